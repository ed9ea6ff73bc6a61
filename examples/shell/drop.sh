#!/bin/sh
# drop.sh ROOT QUEUE FILE... - send each FILE as a message of its own, with nothing but sh, mkdir, mv, cp, rm, date, od.
#
#   drop.sh /srv/work orders order-1.json order-2.json
#   make-order | drop.sh /srv/work orders -
#   drop.sh /srv/work topic-root/sales/eu/.incoming order-1.json      publishes to the topic sales.eu
#
# Prints the name that each message got, in the order of the files. Exits with 0, with 1 when a file was not sent, 2 when
# called wrongly, 66 when there is no such queue.
#
# How it keeps the protocol:
# - The body is written in working/, where nobody looks, and sent by one mv into target/. A name in target/ is a whole
#   message, always.
# - mv replaces what has the name already, so the name is made here, never taken from the file: milliseconds, sequence
#   and 10 random digits, as dropq makes its own. It is reserved in working/ before anything is written.
# - mv is a rename only within one file system; across two it copies, and consumers would see half a message. dropq
#   refuses to open a queue that lies on two. Check a queue made by hand once:  df -P QUEUE/working QUEUE/target
# - Nothing is synced: what was dropped in the last seconds before a power cut may be gone. `dropq send` syncs.

export LC_ALL=C
me=${0##*/}

say() { printf '%s: %s\n' "$me" "$*" >&2; }

if [ $# -lt 3 ]; then
    say 'usage: drop.sh ROOT QUEUE FILE...'
    exit 2
fi

base=$1/$2
queue=$2
shift 2
[ -d "$base/target" ] || base=$base/incoming # DropboxMQ's own layout
if [ ! -d "$base/target" ] || [ ! -d "$base/working" ]; then
    say "there is no queue $queue: ${base%/incoming} has no working/ and target/"
    exit 66
fi

# Set $name to a name that nobody ever had: 4.MILLISECONDS SEQUENCE-RANDOM.B
sequence=0
make_name() {
    # shellcheck disable=SC2046 # three numbers are wanted
    set -- $(od -A n -N 6 -t u2 /dev/urandom)
    name=$(printf '4.%s000%03d-%04d%03d%03d.B' "$(date +%s)" "$sequence" \
        $(($1 % 10000)) $(($2 % 1000)) $(($3 % 1000)))
    sequence=$(((sequence + 1) % 1000))
}

# The shell creates a file exclusively under `set -C`, so of two processes only one gets a name.
reserve() { (set -C && : >"$base/working/$name") 2>/dev/null; }

staged=
give_up() { [ -z "$staged" ] || rm -f "$staged"; }
trap give_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

status=0
for file; do
    make_name
    if ! reserve; then
        say "$base/working/$name cannot be made; $file was not sent"
        exit 1
    fi
    staged=$base/working/$name
    [ "$file" != - ] || file=/dev/stdin
    # A name that begins with - is no option: ./ is put before it.
    case $file in -*) file=./$file ;; esac
    if cp "$file" "$staged" && mv -f "$staged" "$base/target/$name"; then
        printf '%s\n' "$name"
    else
        say "$file was not sent"
        rm -f "$staged"
        status=1
    fi
    staged=
done
exit $status
