#!/bin/sh
# pipeline.sh [N [KILLS]] - send N orders (40) through three filters over four queues, kill all workers KILLS times (4)
# meanwhile, and count what comes out.
#
#   orders -> net -> gross -> bills: an order is a number of lamps, and a bill is what they cost with the tax
#
# Each filter is a `dropq work FROM --to TO -- awk ...`. A worker that is killed is started again, as a service would be.
# At the end each order must have exactly one bill. Where a worker was killed before its ack, the first run left nothing,
# and its filter has run again: `done_again` counts these runs. Exits with 1 when a bill is missing, wrong, or there
# twice. It works in a folder of its own, which it removes. It needs dropq, awk and sort.

export LC_ALL=C
count=${1:-40} kills=${2:-4}
work=$(mktemp -d) && cd "$work" || exit 1
unset DROPQ_ROOT # the folder is the root

# Keep a worker running until there is a file `stop`: FROM TO CMD...
keep() {
    from=$1 to=$2
    shift 2
    while [ ! -e stop ]; do
        dropq work "$from" --to "$to" -q -- "$@" &
        echo $! >"$from.pid"
        [ ! -e stop ] || kill -KILL $! # it was started while all were killed for the last time
        wait $!
        rm "$from.pid"
    done 2>>log
}

# One that was killed a moment ago may not run again yet.
kill_workers() {
    for pid in $(cat ./*.pid 2>>log); do
        kill -KILL "$pid" 2>>log
    done
}

clear_away() {
    touch stop
    kill_workers
    wait
    cd / && rm -rf "$work"
}
trap 'exit 1' HUP INT TERM
trap clear_away EXIT

dropq init >log 2>&1 || exit 1
for queue in orders net gross bills; do dropq create $queue >>log || exit 1; done

# Each run of a filter leaves a line in the file `runs`.
keep orders net awk '{ print $1 * 4900; print >>"runs" }' &
keep net gross awk '{ print $1 * 119 / 100; print >>"runs" }' &
keep gross bills awk '{ print "pay", $1, "cents"; print >>"runs" }' &

seq "$count" | dropq send orders --lines >ids || exit 1
seq "$count" | awk '{ print "pay", $1 * 4900 * 119 / 100, "cents" }' | paste ids - | sort >expected

kill=0
while [ $((kill += 1)) -le "$kills" ]; do
    dropq wait bills --count $((count * kill / (kills + 1))) --timeout 5m || exit 1
    kill_workers
done
for queue in orders net gross; do dropq wait $queue --empty --timeout 5m || exit 1; done

# A message that was made of another has its id as correlation id, and so has what is made of that.
dropq browse bills --json | sed 's/.*"correlation_id": *"\([^"]*\)".*/\1/' >found.ids
dropq browse bills | cut -f 1 | dropq cat bills - | paste found.ids - | sort >found
missing=$(cut -f 1 expected | join -v 1 - found | wc -l)
twice=$(cut -f 1 found | uniq -d | wc -l)
echo "orders=$count bills=$(wc -l <found) missing=$missing twice=$twice"
echo "killed=$kills done_again=$(($(wc -l <runs) - 3 * count))"
cmp expected found
