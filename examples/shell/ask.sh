#!/bin/sh
# ask.sh ROOT QUEUE SECONDS [FILE] - send FILE, or standard input, as a request, and print the body of the answer, with
# nothing but sh, mkdir, mv, ls, cat, rm, date, od, grep, sleep.
#
#   echo 'how many?' | ask.sh /srv/work orders 30
#
# Exits with 0, with 1 when the request was not sent, 2 when called wrongly, 66 when there is no such queue, 75 when no
# answer came within SECONDS: the request stays sent. With dropq:  echo 'how many?' | dropq send orders --wait-reply 30s
#
# How it keeps the protocol:
# - The answer comes to a queue of this script's own. It is made under a hidden name, and appears whole, by one mv.
# - The request names that queue in its sixth field. Its answer has the request's id in the fifth field; what else comes
#   there is not ours.
# - It is called temp-ID, as DropboxMQ and dropq call theirs: dropq keeps no note of such a queue, and misses none.
# - At the end the queue goes by one mv to a hidden name: from then on, a send to it fails. Only then it is removed. If
#   this script is killed by SIGKILL, the queue stays, as it has no lock that tells of a death: `dropq delete` removes it.

export LC_ALL=C
me=${0##*/}

say() { printf '%s: %s\n' "$me" "$*" >&2; }

case $3 in '' | *[!0-9]*) set -- ;; esac
if [ $# -lt 3 ]; then
    say 'usage: ask.sh ROOT QUEUE SECONDS [FILE]'
    exit 2
fi

root=$1
base=$1/$2
until=$(($(date +%s) + $3))
file=${4:--}
case $file in -?*) file=./$file ;; esac
[ -d "$base/target" ] || base=$base/incoming # DropboxMQ's own layout
if [ ! -d "$base/target" ] || [ ! -d "$base/working" ]; then
    say "there is no queue $2: ${base%/incoming} has no working/ and target/"
    exit 66
fi

# An id that nobody ever had: milliseconds, sequence, and ten random digits.
# shellcheck disable=SC2046 # three numbers are wanted
set -- $(od -A n -N 6 -t u2 /dev/urandom)
id=$(printf '%s000000-%04d%03d%03d' "$(date +%s)" $(($1 % 10000)) $(($2 % 1000)) $(($3 % 1000)))
answers=temp-$id
reply_to=$answers
grep -q '^reply_to_style *= *"typed"' "$root/dropq.toml" 2>/dev/null && reply_to=Q$answers
staged=$base/working/4.$id.B...$reply_to

end() {
    rm -f "$staged"
    mv "$root/$answers" "$root/.$answers.deleted-0" 2>/dev/null
    rm -rf "$root/.$answers.creating-0" "$root/.$answers.deleted-0"
}
trap end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

making=$root/.$answers.creating-0
mkdir "$making" && for state in working target processing processed expired error; do
    mkdir "$making/$state" || exit 1
done && mv "$making" "$root/$answers" || exit 1

# A shell under `set -C` makes a file, and never takes one that is there.
if ! (set -C && cat "$file" >"$staged") || ! mv -f "$staged" "$base/target/${staged##*/}"; then
    say 'the request was not sent'
    exit 1
fi

while :; do
    for found in $(ls "$root/$answers/target" 2>/dev/null); do
        case $found in
        *.*.*.*."$id" | *.*.*.*."$id".*) cat "$root/$answers/target/$found" && exit 0 ;;
        esac
    done
    if [ "$(date +%s)" -ge "$until" ]; then
        say "no answer to $id came in time: the request stays sent"
        exit 75
    fi
    sleep 0.1 2>/dev/null || sleep 1
done
