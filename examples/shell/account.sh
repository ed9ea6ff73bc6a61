#!/bin/sh
# account.sh ROOT LEDGER - check that every file of a ledger is in exactly one state folder of a root, unchanged.
#
# LEDGER has a line for each file, as sha256sum writes it. Prints how many files lie in which state; then whatever is
# missing, with its line of the ledger, and whatever nobody entered, with its path. Exits with 1 when there is anything
# of either kind. Knows nothing of dropq but the names of the folders: find, sha256sum, sort, join. Topics have names
# without a dot.

export LC_ALL=C

if [ $# != 2 ] || [ ! -d "$1" ] || [ ! -r "$2" ]; then
    echo 'usage: account.sh ROOT LEDGER' >&2
    exit 2
fi
root=$1
ledger=$2
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# Number equal contents, HASH-1, HASH-2 ...: a file that was entered twice has to be there twice.
numbered() { sed 's/^\\//' | sort | awk '{ print $1 "-" ++seen[$1] " " $0 }' | sort; }

for state in working target processing processed expired error delayed; do
    set --
    for base in "$root"/*/ "$root"/*/incoming/ \
        "$root"/topic-root/*/.incoming/ "$root"/topic-root/*/.subscriptions/*/; do
        folder=$base$state
        [ $state != delayed ] || folder=$base.dropq/delayed
        [ ! -d "$folder" ] || set -- "$@" "$folder"
    done
    [ $# = 0 ] || find "$@" -type f ! -name '.*' -exec sha256sum {} + >"$work/$state-files"
    [ ! -s "$work/$state-files" ] || printf '    %-12s %5d\n' "$state" "$(wc -l <"$work/$state-files")"
done
numbered <"$ledger" >"$work/ledger"
cat "$work"/*-files 2>/dev/null | numbered >"$work/found"

join -v 1 "$work/ledger" "$work/found" | sed 's/^[^ ]* /    MISSING /'
join -v 2 "$work/ledger" "$work/found" | sed 's/^[^ ]* /    NOT IN THE LEDGER /'
missing=$(join -v 1 "$work/ledger" "$work/found" | wc -l)
unknown=$(join -v 2 "$work/ledger" "$work/found" | wc -l)
printf '    %d in the ledger, %d found, %d missing, %d not in the ledger\n' \
    "$(wc -l <"$work/ledger")" "$(wc -l <"$work/found")" "$missing" "$unknown"
[ "$missing$unknown" = 00 ]
