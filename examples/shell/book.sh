#!/bin/sh
# book.sh BOOK - handle a message of CSV: enter the rows on standard input in the CSV BOOK, below the same heading.
#
#   dropq work daily-sales -- shell/book.sh daily-sales.csv       (without -j: one message at a time)
#
# A message is delivered again after a crash: rows that are in BOOK already are not entered twice. So each row says what
# it is about, such as a store and a day. A crash leaves BOOK as it was: it is replaced by one mv. Exits with 65, which
# rejects the message, when its heading is another than BOOK's.

export LC_ALL=C
book=$1

IFS= read -r heading && [ -n "$heading" ] || {
    echo 'no CSV: there is no heading' >&2
    exit 65
}
[ -s "$book" ] || printf '%s\n' "$heading" >"$book" || exit 1
[ "$heading" = "$(head -n 1 "$book")" ] || {
    echo "the heading is $heading, not that of $book" >&2
    exit 65
}
awk '!seen[$0]++' "$book" - >"$book.new" && mv -f "$book.new" "$book"
