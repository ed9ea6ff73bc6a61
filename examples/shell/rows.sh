#!/bin/sh
# rows.sh BOOK - handle the rows of a message of CSV: enter them in BOOK, and report those with columns missing, or too
# many.
#
#   dropq work till --records -- shell/rows.sh till.csv
#
# A row that is reported becomes a message of its own in error/. The others are acknowledged when this exits with 0.

awk -F , -v book="$1" -v failed="$DROPQ_FAILED" '
    NR == 1 { columns = NF; next }
    NF != columns { print NR - 1 "\t" NF " columns, and not " columns > failed; next }
    { print >> book }'
