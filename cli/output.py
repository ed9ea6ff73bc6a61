"""What users see: escaping, JSON, lines and tables, and the exit code of every error.

stdout carries data, stderr everything else. No name, id, property or reason reaches either with a control character in
it, and `unescape` returns what plain output escapes byte for byte.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from dropq import errors
from dropq.format.printable import escape as escape
from dropq.format.printable import reason_text as reason_text
from dropq.format.printable import unescape as unescape
from dropq.format.printable import visible as visible

if TYPE_CHECKING:
    from .table import Column, Table

#: A record: the values of one line of output, by snake_case key.
Record = Mapping[str, object]

#: The exit codes; those above 2 are from sysexits.h, but for INTERRUPTED.
OK, NEGATIVE, USAGE, BAD_DATA, NO_INPUT, UNAVAILABLE, BUG = 0, 1, 2, 65, 66, 69, 70
CANNOT_CREATE, IO_ERROR, TRY_LATER, NO_PERMISSION, CONFIGURATION, INTERRUPTED = 73, 74, 75, 77, 78, 130

#: The exit codes of errors; the first kind that fits counts.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.LeaseLost, NEGATIVE),
    (errors.NoSuchQueue, NO_INPUT),
    (errors.NoSuchMessage, NO_INPUT),
    (errors.Missing, UNAVAILABLE),
    (errors.Unavailable, TRY_LATER),
    (errors.QueueExists, CANNOT_CREATE),
    (errors.QueueFull, TRY_LATER),
    (errors.BacklogReached, TRY_LATER),
    (errors.ConfigError, CONFIGURATION),
    (UnicodeError, BAD_DATA),
    (ValueError, USAGE),  # InvalidName and InvalidFilter, too
)
#: The exit codes of what the file system refuses; any other is an I/O error.
_BY_ERRNO = {
    errno.EACCES: NO_PERMISSION,
    errno.EPERM: NO_PERMISSION,
    errno.EROFS: NO_PERMISSION,
    errno.ENOENT: NO_INPUT,
    errno.ENOTEMPTY: NEGATIVE,  # a queue with messages to work on is not deleted
}

#: How columns of plain output write no and yes.
_WORDS = {"ok": ("failed", "ok"), "paused": ("", "paused"), "repaired": ("", "repaired")}
#: The most rows of a table, which has to be measured as a whole; more are printed as plain lines.
TABLE_LIMIT = 2000
#: Columns of a table that are never broken: people copy them.
WHOLE = frozenset({"id", "queue", "key", "path", "owner", "why"})
#: Columns of a table whose words may be in `WRONG`, and how a terminal shows those words.
STYLED = frozenset({"level", "verdict", "ok", "paused"})
WRONG = {
    **dict.fromkeys(("error", "unhealthy", "failed", "rejected"), "red"),
    **dict.fromkeys(("warning", "paused", "given back", "lost"), "yellow"),
}
_CODE = {"red": 31, "yellow": 33}
_WRONG_FIRST = re.compile(rf"^({'|'.join(WRONG)})\b", re.MULTILINE)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; BUG for an error that no command should meet."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError | errors.StorageError):
        return _BY_ERRNO.get(error.errno or 0, IO_ERROR)
    return BUG


def verdict(codes: Sequence[int]) -> int:
    """Return the exit code of a command that did several things: 1 when some failed; a single thing has its own."""
    return codes[0] if len(codes) == 1 else NEGATIVE if any(codes) else OK


# -- values ----------------------------------------------------------------------------------------------------


def time_text(time: datetime) -> str:
    """Write a time in the form of RFC 3339, in UTC, to the millisecond."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(record: Record) -> str:
    """Write a record as one line of JSON, in ASCII, so that undecodable names survive."""
    return json.dumps(_jsonable(record), ensure_ascii=True, allow_nan=False)


def _jsonable(value: object) -> object:
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"  # as in names
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def cell(record: Record, key: str) -> str:
    """Write one value of a record for plain output, escaped; a missing value is empty."""
    value = record.get(key)
    if value is None:
        return ""
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, bool):
        return _WORDS.get(key, ("false", "true"))[value]
    if isinstance(value, Mapping):
        pairs = (f"{name}={item}" for name, item in value.items())
        return escape(reason_text(value) if key == "reason" else " ".join(pairs))
    if isinstance(value, list):
        return escape(" ".join(map(str, value)))
    return escape(str(value))


# -- lines and tables ------------------------------------------------------------------------------------------


def line(record: Record, columns: Sequence[str], *, as_json: bool) -> str:
    """Return a record as one line: all of it as JSON, or the columns with tabs between."""
    return json_line(record) if as_json else "\t".join(cell(record, key) for key in columns)


def put(text: str, *, flush: bool = False) -> None:
    """Print a line of data."""
    with writing():
        print(text, flush=flush)


class Unwritten(errors.StorageError):
    """Standard output cannot be written: a command ends there, also one that goes on after other errors."""


@contextmanager
def writing() -> Iterator[None]:
    """Raise Unwritten where standard output cannot be written; nothing where nobody reads it any more."""
    try:
        yield
    except BrokenPipeError:  # where SIGPIPE is ignored, and only there
        discard()
    except OSError as error:
        discard()  # what cannot be written now is not tried again when Python ends
        text = f"standard output could not be written: {error.strerror}; what the command did stays"
        raise Unwritten(text, errno=error.errno) from error


def write(text: str) -> None:
    """Write a line of data that must not get lost, at once; OSError where it cannot be written."""
    if sys.__stdout__ is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    print(text, flush=True)


def interrupted(error: BaseException | None = None) -> int:
    """Report that Ctrl-C ended the command, and what was done until then; return the exit code."""
    with suppress(errors.StorageError):
        flush()
    done = "; ".join([*filter(None, [str(error or "")]), *_notes(error)])
    note(("\n" if sys.stderr.isatty() else "") + (f"interrupted: {done}" if done else "interrupted"))
    return INTERRUPTED


def _notes(error: BaseException | None) -> list[str]:
    """Return the notes of an error and of its causes."""
    notes: list[str] = []
    while error is not None:
        notes += getattr(error, "__notes__", ())
        error = error.__cause__
    return notes


def flush() -> None:
    """Write out what was printed."""
    with writing():
        sys.stdout.flush()


def discard() -> None:
    """Discard all output to stdout from now on, also what is in its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_table(records: Sequence[Record], columns: Sequence[str], spare: Sequence[str] = (), above: str = "") -> str:
    """Print records as a table, without empty columns; return its heading.

    A narrow terminal leaves out `spare` columns, the least important first. The same heading as `above`, which was
    printed last, is not printed again.
    """
    table = _table(records, columns, spare)
    if table is None:
        return above
    if not table.fits:
        put("\n".join(_blocks(records, columns)))
        return above
    put("\n".join(table.lines(heading=table.heading != above)))
    if table.left_out and table.heading != above:
        note(f"left out: {', '.join(table.left_out)}; --json or a wider terminal shows all")
    return table.heading


def table_lines(records: Sequence[Record], columns: Sequence[str], spare: Sequence[str] = ()) -> list[str]:
    """Return the lines of what `show_table` prints."""
    table = _table(records, columns, spare)
    if table is None:
        return []
    return table.lines() if table.fits else _blocks(records, columns)


def _table(records: Sequence[Record], columns: Sequence[str], spare: Sequence[str]) -> Table | None:
    """Lay out a table without its empty columns; return None if it has no others."""
    from .table import Table

    filled = [column for column in (_column(records, key) for key in columns) if any(column.cells)]
    return Table(filled, spare) if filled else None


def _blocks(records: Sequence[Record], columns: Sequence[str]) -> list[str]:
    return "\n\n".join(block(record, columns) for record in records).splitlines()


def block(record: Record, columns: Sequence[str]) -> str:
    """Write a record as a line for each value that it has, for a terminal."""
    widest = max(map(len, columns))
    return "\n".join(f"{key + ':':{widest + 1}} {text}" for key in columns if (text := short(record, key)))


def _column(records: Sequence[Record], key: str) -> Column:
    from .table import Column

    kinds = {type(record.get(key)) for record in records} - {type(None)}
    cells = [short(record, key) for record in records]
    styles = WRONG if key in STYLED else {count: "red" for count in cells if key == "error" and count != "0"}
    whole = key in WHOLE or kinds <= {int, float, datetime}
    return Column(key, cells, whole=whole, right=kinds <= {int, float}, styles=styles)


def short(record: Record, key: str) -> str:
    """Write a value for a terminal: times to the second."""
    value = record.get(key)
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}" if isinstance(value, datetime) else cell(record, key)


def note(text: str) -> None:
    """Print a line to stderr: it is for people, and no data."""
    with suppress(OSError):  # nobody can read it: that is no reason to stop
        print(coloured(visible(text), sys.stderr), file=sys.stderr, flush=True)


def coloured(text: str, stream: TextIO) -> str:
    """Colour the words at the beginnings of lines that say that something is wrong, where tables are coloured, too.

    It does without rich, whose import may be what fails while an error is reported.
    """
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return text
    return _WRONG_FIRST.sub(lambda found: f"\x1b[{_CODE[WRONG[found[0]]]}m{found[0]}\x1b[0m", text)


def complain(error: Exception) -> None:
    """Report an error, with its notes."""
    with suppress(errors.StorageError):
        flush()  # what was done comes before what was not
    from dropq.storage.failures import describe

    text = describe(error)
    for more in getattr(error, "__notes__", ()):
        text += f"; {more}"
    note(f"error: {text or type(error).__name__}")
    if os.environ.get("DROPQ_DEBUG"):
        import traceback

        note("".join(traceback.format_exception(error)).rstrip())
