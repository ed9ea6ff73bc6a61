#!/bin/sh
# Check the models beside this script with spin, and see that each one that is broken on purpose fails.
#
#     check.sh [claims] [jobs] [commit] [credits] [records] [reassembly] [roots]        all of them when none is named
#
# Prints a line for each: name, states, depth, seconds, verdict. Exits 1 when one is not as it must be, 69 without tools.
set -eu

models=$(cd "$(dirname "$0")" && pwd)
for tool in spin gcc; do
    command -v "$tool" >/dev/null || {
        echo "$tool is missing: apt-get install spin gcc" >&2
        exit 69
    }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
cd "$work"
bad=0

# check EXPECTED NAME MODEL [-DSWITCH]...: run one search in full; EXPECTED is "holds" or "violated".
check() {
    expected=$1 name=$2 model=$3
    shift 3
    # To compile well takes longer than most searches, and what is broken is found at once.
    case $expected in violated) optimized=-O0 ;; *) optimized=-O1 ;; esac
    rm -f pan* ./*.trail log
    # -Q5 gives up after five minutes, MEMLIM at 1000 MB: both count as failures, as does a search that is cut short.
    if ! { spin -a "$@" "$models/$model.pml" && gcc -w $optimized -DSAFETY -DCOLLAPSE -DMEMLIM=1000 -o pan pan.c; } >log 2>&1; then
        verdict="cannot be built"
    else
        status=0
        ./pan -m2000000 -w22 -n -Q5 >log 2>&1 || status=$?
        verdict=$(judge "$status")
    fi
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' log)
    depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' log)
    seconds=$(sed -n 's/^pan: elapsed time \([0-9.e+-]*\) seconds.*/\1/p' log)
    case $expected/$verdict in
    holds/holds) ;;
    violated/violated) verdict="is violated, as it must be" ;;
    violated/holds) verdict="holds, but must not" bad=1 ;;
    *) bad=1 ;;
    esac
    printf '%-32s %9s states  depth %7s  %6s s  %s\n' "$name" "${states:-?}" "${depth:-?}" "${seconds:-?}" "$verdict"
    case $verdict in
    holds | "is violated, as it must be") ;;
    *) cat log >&2 ;;
    esac
}

# check_long NAME MODEL [-DSWITCH]...: run a search that holds and takes more than ten seconds, unless QUICK is set.
check_long() {
    [ -n "${QUICK:-}" ] || check holds "$@"
}

# Say in a word or a sentence how a search ended, from its log.
judge() {
    if grep -q '^error: max search depth too small' log; then
        echo "is not decided: max search depth too small"
    elif grep -Eqi 'out of memory|MEMLIM bound' log; then
        echo "is not decided: out of memory"
    elif grep -Eq '^pan:[0-9]+: assertion violated' log; then
        echo "violated"
    elif grep -Eq '^pan:[0-9]+: ' log; then
        sed -n 's/^pan:[0-9]*: /fails: /p' log | head -n 1
    elif [ "$1" -ne 0 ] || grep -q 'Search not completed' log || ! grep -q 'errors: 0$' log; then
        echo "is not decided: the search is incomplete"
    else
        echo "holds"
    fi
}

for model in ${*:-claims jobs commit credits records reassembly roots}; do
    case $model in
    claims)
        check holds "claims" claims
        check violated "claims, SHARED_NAMES" claims -DSHARED_NAMES
        ;;
    jobs)
        check_long "jobs" jobs
        check holds "jobs, TWO_SWEEPS" jobs -DTWO_SWEEPS
        check violated "jobs, LOOK_THEN_DROP" jobs -DLOOK_THEN_DROP
        ;;
    commit)
        check_long "commit" commit
        check violated "commit, RENAME_AWAY" commit -DRENAME_AWAY
        check violated "commit, WHOLE_FIRST" commit -DWHOLE_FIRST
        check violated "commit, PROCESSING_FIRST" commit -DPROCESSING_FIRST
        check violated "commit, DROP_HELD" commit -DDROP_HELD
        check violated "commit, FENCE_LOOKED_FIRST" commit -DFENCE_LOOKED_FIRST
        check violated "commit, SENT_FIRST" commit -DSENT_FIRST
        check violated "commit, LOST_SENDS" commit -DLOST_SENDS
        ;;
    credits)
        check holds "credits" credits
        check_long "credits, TWO_EACH" credits -DTWO_EACH
        check violated "credits, KEY_OF_ID" credits -DKEY_OF_ID
        check violated "credits, NO_LOCK" credits -DNO_LOCK
        check violated "credits, CREDITS_FIRST" credits -DCREDITS_FIRST
        check violated "credits, RETURN_WITHOUT_LOCK" credits -DRETURN_WITHOUT_LOCK
        check violated "credits, BELOW_ANYWHERE" credits -DTWO_EACH -DBELOW_ANYWHERE
        ;;
    records)
        check_long "records" records
        check_long "records, TWO_SWEEPS" records -DTWO_SWEEPS
        check violated "records, RENAME_AWAY" records -DRENAME_AWAY
        check violated "records, FROM_MEMORY" records -DFROM_MEMORY
        check violated "records, WHOLE_FIRST" records -DWHOLE_FIRST
        check violated "records, SYNC_LATE" records -DSYNC_LATE
        check violated "records, SYNC_OWN" records -DSYNC_OWN
        check violated "records, PROCESSING_FIRST" records -DTWO_SWEEPS -DPROCESSING_FIRST
        check violated "records, TORN_LISTING" records -DTWO_SWEEPS -DTORN_LISTING
        ;;
    reassembly)
        check_long "reassembly" reassembly
        check_long "reassembly, TWO_SWEEPS" reassembly -DTWO_SWEEPS
        check violated "reassembly, PARTS_STAY" reassembly -DPARTS_STAY
        check violated "reassembly, DRAFT_LATE" reassembly -DDRAFT_LATE
        check violated "reassembly, LOOK_FIRST" reassembly -DLOOK_FIRST
        check violated "reassembly, PARTS_LAST" reassembly -DPARTS_LAST
        check violated "reassembly, BY_MARK" reassembly -DBY_MARK
        check violated "reassembly, MARKS_TOO" reassembly -DTWO_SWEEPS -DMARKS_TOO
        ;;
    roots)
        check_long "roots" roots
        check holds "roots, FIVE_LISTS" roots -DFIVE_LISTS
        check holds "roots, TWO_MESSAGES" roots -DTWO_MESSAGES
        check_long "roots, PROXIED" roots -DPROXIED
        check_long "roots, PROXIED, TWO_MESSAGES" roots -DPROXIED -DTWO_MESSAGES
        check holds "roots, RESTORED" roots -DRESTORED
        check holds "roots, RESTORED, PROXIED" roots -DRESTORED -DPROXIED
        check violated "roots, READ_ONCE" roots -DREAD_ONCE
        check violated "roots, RENAME_THEN_LOOK" roots -DRENAME_THEN_LOOK
        check violated "roots, BACK_TOO_SOON" roots -DBACK_TOO_SOON
        check violated "roots, OLD_NAME" roots -DOLD_NAME
        check violated "roots, NEWEST_GOES" roots -DNEWEST_GOES
        check violated "roots, CHECK_LATE" roots -DRESTORED -DCHECK_LATE
        check violated "roots, RECALL_UNCHECKED" roots -DRESTORED -DRECALL_UNCHECKED
        check violated "roots, LOOK_ONCE" roots -DPROXIED -DLOOK_ONCE
        ;;
    *)
        echo "$model is no model: claims, jobs, commit, credits, records, reassembly or roots" >&2
        exit 64
        ;;
    esac
done
exit "$bad"
