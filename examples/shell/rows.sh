#!/bin/sh
# rows.sh COLUMNS BOOK - handle the records of a message, rows of CSV without a header: enter them in BOOK, and report
# those that do not have so many columns.
#
#   dropq work till --records -- shell/rows.sh 5 till.csv
#
# A row that is reported becomes a message of its own in error/. The others are acknowledged when this exits with 0.

awk -F , -v columns="$1" -v book="$2" -v failed="$DROPQ_FAILED" '
    NF != columns { print NR "\t" NF " columns, and not " columns > failed; next }
    { print >> book }'
