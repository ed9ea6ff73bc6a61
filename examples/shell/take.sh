#!/bin/sh
# take.sh [-a] ROOT QUEUE CMD... - take the oldest message and run CMD on it, with nothing but sh, ls, mv, rm, date, od.
#
#   take.sh /srv/work orders ./book.sh          one message
#   take.sh -a /srv/work orders ./book.sh       all, until none waits
#   take.sh /srv/work topic-root/sales/eu/.subscriptions/audit.hq ./book.sh     one of the subscription sales.eu/audit.hq
#
# CMD gets the body on its standard input and the file's path as its last argument. When it exits with 0 the message goes
# to processed/, else to error/. Any number of these may run at once, beside dropq's own consumers and on any host.
# Exits with 0, with 1 when CMD failed (with -a: on any message), 2 when called wrongly, 66 when there was nothing to
# take (without -a) or there is no such queue.
#
# How it keeps the protocol:
# - A message is claimed by one mv from target/ to processing/. Of any number of consumers one mv succeeds; the others
#   find the file gone and go quietly on to the next.
# - The claim is called OWNER,DEADLINE,N~NAME. OWNER is new for every claim, so no claim ever replaces another. DEADLINE
#   is when the lease ends, TAKE_LEASE seconds from now (3600): if this script dies, any dropq consumer, or `dropq sweep`,
#   gives the message back then. N counts deliveries.
# - A claim that is gone when CMD has ended was taken back: this script then changes nothing, and says so.
# - mv replaces what has the name already: the name in processed/ or error/ is reserved first, and a taken one changed.
# - While QUEUE/read-lock or ROOT/global-read-lock exists, nothing is taken.
#
# What it leaves to dropq: priorities (it goes by when a file came to target/, as the file system's clock tells it),
# expirations, names over 190 bytes, names with a line break in them, and a queue's own `ignore` (it knows the default).

export LC_ALL=C
me=${0##*/}

say() { printf '%s: %s\n' "$me" "$*" >&2; }

all=
if [ "$1" = -a ]; then
    all=yes
    shift
fi
if [ $# -lt 3 ]; then
    say 'usage: take.sh [-a] ROOT QUEUE CMD...'
    exit 2
fi

root=$1
base=$1/$2
queue=$2
shift 2
[ -d "$base/target" ] || base=$base/incoming # DropboxMQ's own layout
if [ ! -d "$base/target" ] || [ ! -d "$base/processing" ]; then
    say "there is no queue $queue: ${base%/incoming} has no target/ and processing/"
    exit 66
fi

# Print ten random digits.
random() {
    # shellcheck disable=SC2046 # three numbers are wanted
    set -- $(od -A n -N 6 -t u2 /dev/urandom)
    printf '%04d%03d%03d' $(($1 % 10000)) $(($2 % 1000)) $(($3 % 1000))
}

holder=take-$(random)
sequence=0
stop=

# Set $own to a waiting file's name without a claim's prefix that was left by hand, and $delivery to the delivery's number.
read_name() {
    own=$1
    delivery=1
    case $1 in
    *-[0-9a-z][0-9a-z][0-9a-z][0-9a-z][0-9a-z][0-9a-z][0-9a-z][0-9a-z][0-9a-z][0-9a-z]-*,[0-9]*,[1-9]*~?*)
        own=${1#*~}
        delivery=${1%%~*}
        delivery=$((${delivery##*,} + 1))
        ;;
    esac
    case $own in
    *.*.[MBSPOT].*JMSXDeliveryCountI=[1-9]*)
        count=${own##*JMSXDeliveryCountI=}
        count=${count%%[!0-9]*}
        [ "$count" -lt "$delivery" ] || delivery=$((count + 1))
        ;;
    esac
}

# Claim the waiting file $1; false when somebody else has it.
take() {
    read_name "$1"
    sequence=$((sequence + 1))
    claim=$holder-$sequence,$(($(date +%s) + ${TAKE_LEASE:-3600}))000,$delivery~$own
    mv -f "$base/target/$1" "$base/processing/$claim" 2>/dev/null
}

# Move the claim to the state $1. The name is reserved by an empty file without permissions, which dropq knows and leaves
# alone, and which mv then replaces.
settle() {
    place=$base/$1/$own
    tries=1
    until (umask 777 && set -C && : >"$place") 2>/dev/null; do
        if [ $tries = 9 ]; then
            say "$base/$1 cannot be written to; the message stays in processing/ as $claim"
            exit 1
        fi
        tries=$((tries + 1))
        place=$base/$1/$(random)-$own # another file of this name lies there: both stay
    done
    mv -f "$base/processing/$claim" "$place" 2>/dev/null && return
    # Only what still is our empty reservation goes.
    case $(ls -l "$place" 2>/dev/null) in
    ----------*) [ -s "$place" ] || rm -f "$place" ;;
    esac
    if [ -e "$base/processing/$claim" ]; then
        say "the message stays in processing/ as $claim"
    else
        say "the claim $claim is gone (its lease ran out?); nothing was changed"
    fi
    return 1
}

# Give the message back as it is called now: the next claim drops the prefix, and counts this delivery.
give_back() { mv -f "$base/processing/$claim" "$base/target/$claim"; }

# A signal ends this script after the message that it works on.
trap 'stop=129' HUP
trap 'stop=130' INT
trap 'stop=143' TERM

paused() { [ -e "$base/read-lock" ] || [ -e "$root/global-read-lock" ]; }

is_message() {
    case $1 in
    _SUCCESS | _temporary | *.tmp | *.part | *.crc) return 1 ;;
    esac
    [ -f "$base/target/$1" ] && [ ! -h "$base/target/$1" ]
}

# Run a command on the claimed message, and move the message to where the command's end says.
handle() {
    "$@" "$base/processing/$claim" <"$base/processing/$claim"
    code=$?
    if [ -n "$stop" ] && [ $code -gt 128 ]; then
        give_back # CMD got the signal, too
    elif [ $code = 0 ]; then
        settle processed || status=1
    else
        status=1
        settle error
    fi
    [ -z "$stop" ] || exit "$stop"
}

# Take what `ls` says waits, oldest first, until one was taken; with -a until it says that nothing waits.
status=0
spaces=$IFS
set -f # a file name is no pattern
while :; do
    taken=
    waiting=$(ls -rtc "$base/target" 2>/dev/null) # what goes while it looks is no news
    IFS='
'
    for file in $waiting; do
        IFS=$spaces
        [ -z "$stop" ] || exit "$stop"
        paused && break
        if is_message "$file" && take "$file"; then
            taken=yes
            handle "$@"
            [ -n "$all" ] || exit $status
        fi
    done
    IFS=$spaces
    [ -n "$taken" ] || break
done
[ -n "$all" ] || exit 66
exit $status
