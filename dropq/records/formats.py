"""The formats of a bundle: how a body is a sequence of records.

A body is a head, and then lines, rows or frames. The head is a byte order mark, and in csv also the header; it is part
of no record. Lines and rows end with a line feed, which the last one may lack. A carriage return before the line feed
belongs to the record. So records keep every byte, and putting them together gives the bytes that were taken apart.

An empty line, row or frame is no record, but it has a number: so an empty line replaces a settled record, and the other
records keep their numbers.
"""

from __future__ import annotations

import codecs
import difflib
import struct
from collections.abc import Iterable

from dropq.errors import StorageError
from dropq.records.rows import LINE_FEED, is_one_row
from dropq.storage.failures import describe

#: The formats, by the JMS types that name them.
FORMATS = ("jsonl", "text", "csv", "frames")
#: Types whose bodies are tables, which only Spark and Arrow take apart.
TABLES = ("arrow", "parquet")
#: Bytes that a record has at most, unless the reader says otherwise.
MAX_RECORD_BYTES = 16 << 20
#: Bytes that any record has at most: the largest length of a frame.
LARGEST_RECORD = (1 << 31) - 1
#: The length in front of each frame: 4 bytes, big-endian.
LENGTH = struct.Struct(">I")
#: A byte order mark, which the text formats may begin with.
MARK = codecs.BOM_UTF8


class Unreadable(ValueError):
    """Raised when a body cannot be taken apart from a record on, which begins at a byte; those before were yielded."""

    def __init__(self, message: str, *, number: int, byte: int) -> None:
        super().__init__(message)
        self.number = number
        self.byte = byte


class ReadFailed(StorageError):
    """Raised when the file system cannot read a body; `problem` says behind which byte, and why."""

    problem = ""


def read_failed(error: OSError, byte: int, outcome: str) -> ReadFailed:
    """Return the error for a read that failed behind a byte of a body; `outcome` says what became of the message."""
    problem = f"its body cannot be read behind byte {byte}: {describe(error)}"
    failed = ReadFailed(f"{problem}; {outcome}", errno=error.errno)
    failed.problem = problem
    return failed


def format_of(message_type: str | None, wanted: str | None = None) -> str:
    """Return a body's format: its type, else `wanted`, else text; ValueError for a table or an unknown format."""
    if wanted is not None and wanted not in FORMATS:
        _refuse_table(wanted)
        near = difflib.get_close_matches(wanted, FORMATS, n=1)
        known = f"the nearest is {near[0]}" if near else f"it is {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"{wanted!r} is not a format of records; {known}")
    _refuse_table(message_type)
    if message_type in FORMATS:
        return message_type
    return wanted or "text"


def _refuse_table(name: str | None) -> None:
    if name in TABLES:
        raise ValueError(
            f"a body of type {name} is a table and has no records; read it with Spark "
            f'(.format("dropq").option("bodyFormat", "{name}")), or with pyarrow'
        )


def is_empty(line: bytes) -> bool:
    """Return whether a line or row is no record."""
    return not line or line == b"\r"


def check_limit(max_bytes: int) -> None:
    """Raise ValueError if no record can have so many bytes at most."""
    if not 1 <= max_bytes <= LARGEST_RECORD:
        raise ValueError(f"max_record_bytes is {max_bytes}, and must be 1 to {LARGEST_RECORD}")


def check_record(record: bytes, body_format: str, max_bytes: int = MAX_RECORD_BYTES) -> None:
    """Check that a record, put into a body of this format, is read from it as the same record.

    Raises:
        ValueError: it is empty or too long, has a line break that its format cannot hold, or is not one row of csv.
    """
    if len(record) > max_bytes:
        raise ValueError(f"the record has {len(record)} bytes, and max_record_bytes allows {max_bytes}")
    if not record or (record == b"\r" and body_format != "frames"):
        raise ValueError("the record is empty, and readers would skip it; leave it out")
    if body_format == "csv":
        if not is_one_row(record):
            raise ValueError(
                "the record is not one row of csv: a line break is outside of quotes, or a quote is open at the end; "
                "quote the field and double the quotes in it, or use the format frames"
            )
    elif body_format != "frames" and LINE_FEED in record:
        raise ValueError(f"the record has a line break, and {body_format} has a record a line; use the format frames")


def csv_head(header: bytes) -> bytes:
    """Return the head of a csv body with this header, which is one row, and may have its line feed or not."""
    row = header.removesuffix(b"\n")
    if is_empty(row):
        raise ValueError("csv needs a header, and it is empty; give the names of the columns, such as b'id,price'")
    if not is_one_row(row):
        raise ValueError(
            "the header is not one row of csv: a line break is outside of quotes, or a quote is open at the end; "
            "quote the name and double the quotes in it"
        )
    return row + b"\n"


def beginning(body_format: str, head: bytes, following: bytes) -> bytes:
    """Return the beginning of a body: its head, or a mark if the first record begins with the bytes of a mark.

    Without that mark, a reader would take the beginning of the record for a mark, and skip it.
    """
    return MARK if body_format in ("jsonl", "text") and following.startswith(MARK) else head


def pack(body_format: str, records: Iterable[bytes], *, head: bytes | None = None) -> bytes:
    """Return the body that these records make; each was checked, and an empty record is a number without a record.

    A long body is packed in pieces, and only its first piece has a head. `head` is b"" where the format has none, and
    None for the later pieces.
    """
    if body_format == "frames":
        return b"".join([part for record in records for part in (LENGTH.pack(len(record)), record)])
    lines = b"\n".join([*records, b""])
    return lines if head is None else beginning(body_format, head, lines) + lines
