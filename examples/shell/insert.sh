#!/bin/sh
# insert.sh DATABASE - handle the records of a message: insert each line into DATABASE, and report those that it refuses.
#
#   tail -F requests.log | dropq send requests --records --format text --linger 100ms
#   dropq work requests --records -- shell/insert.sh requests.db
#
# A line is the id of a request, its time and its milliseconds, such as `a7 2026-11-23T14:02:11 35`. The database says
# which lines it takes, by the CHECKs of its table. All that it takes is one transaction. A line that comes again, as after
# a crash, has its id there already, and changes nothing. Exits with 75, so that dropq tries again later, when the database
# cannot be written to. It needs sqlite3 3.24 or newer, awk, sed and grep.

export LC_ALL=C
database=$1

[ -n "$DROPQ_FAILED" ] || {
    echo 'there is no DROPQ_FAILED: run this by dropq work --records' >&2
    exit 2
}

# Print SQL for the lines on standard input; the line N + 1 of it is about the record N.
statements() {
    awk -v quote="'" '
        function text(value) { gsub(quote, quote quote, value); return quote value quote }
        BEGIN {
            printf "CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, at TEXT CHECK (at GLOB %s), ",
                text("????-??-??T??:??:??")
            printf "ms INTEGER CHECK (typeof(ms) = %s)); BEGIN IMMEDIATE;\n", text("integer")
        }
        {
            id = $1; at = $2
            sub(/^[ \t]*[^ \t]*[ \t]*[^ \t]*[ \t]*/, "") # what is left are the milliseconds, and what is too much
            printf "INSERT INTO requests VALUES (%s, %s, %s) ON CONFLICT (id) DO NOTHING;\n", text(id), text(at), text($0)
        }
        END { print "COMMIT;" }'
}

# sqlite3 goes on after an error, and names the line of SQL that it is about.
if errors=$(statements | sqlite3 -batch -cmd '.timeout 10000' "$database" 2>&1 >/dev/null); then
    exit 0
fi
printf '%s\n' "$errors" >&2
if printf '%s\n' "$errors" | grep -qv 'near line.*CHECK constraint failed'; then
    exit 75
fi
printf '%s\n' "$errors" | sed -n 's/.*near line \([0-9]*\): \(.*\)/\1 \2/p' | while read -r line reason; do
    printf '%s\t%s\n' "$((line - 1))" "$reason"
done >"$DROPQ_FAILED"
