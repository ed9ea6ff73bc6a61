#!/bin/sh
# answer.sh ROOT CMD... FILE - run CMD on the request on standard input, and send what it prints as the answer, with
# nothing but sh, mv, rm, date, od, grep. FILE is the request's path, from which its name is read; take.sh gives it last:
#
#   take.sh -a /srv/work orders answer.sh /srv/work wc -l
#
# Exits with 0, with 1 when nothing was sent: the request names no queue for answers, its requester is gone, or CMD
# failed. take.sh then puts the request into error/. With dropq:
#   dropq work orders -- sh -c 'wc -l | dropq reply "$DROPQ_QUEUE" "$DROPQ_RECEIPT"'
#
# How it keeps the protocol:
# - A name has fields with dots between: PRIORITY.ID.CLASS.EXPIRATION.CORRELATION.REPLY-TO... The answer goes to the
#   queue REPLY-TO, and has the request's CORRELATION, else its ID, in its own fifth field, written as it is there.
# - The answer is written in that queue's working/, and sent by one mv. When the requester waits no more, its queue is
#   gone, and the mv fails: it never brings the queue back.
#
# What it leaves to `dropq reply`: names of queues with other characters than letters, digits, - and _, and requests with
# so much metadata that it does not fit their names (JMS_dropq_metaS).

export LC_ALL=C
me=${0##*/}

say() { printf '%s: %s\n' "$me" "$*" >&2; }

if [ $# -lt 3 ]; then
    say 'usage: answer.sh ROOT CMD... FILE'
    exit 2
fi

root=$1
shift
left=$#
for word; do # the last word is FILE, the others are CMD
    shift
    left=$((left - 1))
    [ $left = 0 ] && request=$word || set -- "$@" "$word"
done

# What stands before the ~ is the claim's.
name=${request##*/}
IFS=. read -r _ id _ _ correlation reply_to _ <<EOF
${name#*~}
EOF
grep -q '^reply_to_style *= *"typed"' "$root/dropq.toml" 2>/dev/null && reply_to=${reply_to#Q}
case $reply_to in
'' | *[!A-Za-z0-9_-]*)
    say "$name names no queue that an answer could go to"
    exit 1
    ;;
esac
base=$root/$reply_to
[ -d "$base/target" ] || base=$base/incoming # DropboxMQ's own layout
if [ ! -d "$base/target" ]; then
    say "nobody waits for the answer to $id any more: the queue $reply_to is gone"
    exit 1
fi

# shellcheck disable=SC2046 # three numbers are wanted
random() { set -- $(od -A n -N 6 -t u2 /dev/urandom) && printf '%04d%03d%03d' $(($1 % 10000)) $(($2 % 1000)) $(($3 % 1000)); }
answer=4.$(date +%s)000000-$(random).B..${correlation:-$id}

if (set -C && "$@" >"$base/working/$answer") && mv -f "$base/working/$answer" "$base/target/$answer"; then
    exit 0
fi
rm -f "$base/working/$answer"
say "$id was not answered"
exit 1
