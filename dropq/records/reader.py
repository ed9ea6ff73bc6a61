"""Takes a body apart into its records, in memory that does not grow with the body.

Invariant: for each record, the body has its bytes from `begin` to `end`; those of a frame include its length. Between
two records lie only line feeds and empty lines, rows or frames, so these offsets are enough to copy parts of the body.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

from dropq.records.formats import LARGEST_RECORD, LENGTH, MARK, MAX_RECORD_BYTES, Unreadable, check_limit, is_empty
from dropq.records.rows import QUOTE, is_closed, is_closing, is_one_row, open_quote

#: A record as it is read: its number, where it begins and ends in the body, and its bytes. A plain tuple, since making
#: an object of a class takes half as long again as reading the record.
RawRecord = tuple[int, int, int, bytes]
#: Bytes of the buffer that a body is opened with.
BLOCK = 256 << 10


class RecordReader:
    """The records of a body, to be iterated over once.

    Args:
        file: the body, at its start, opened with a buffer: `open(path, "rb", buffering=BLOCK)`. Of a pipe, each record
            is yielded as soon as all of it was written.
        first: the number of the first line, row or frame of this body: 1, or more if it is a part of another body.
        max_bytes: bytes that a record has at most, or in csv all that is before the first row.

    Attributes:
        head: what is before the first record: a byte order mark, and in csv also the header and the empty lines before
            it. It is known when the first record was asked for.
        following: after the last record, the number that another line, row or frame would have.
    """

    def __init__(self, file: IO[bytes], body_format: str, *, first: int = 1, max_bytes: int = MAX_RECORD_BYTES) -> None:
        check_limit(max_bytes)
        if isinstance(file, io.RawIOBase):  # it may return less than it is asked for, as if a frame were torn
            raise TypeError("a body is read with a buffer: open it with buffering=BLOCK")
        self.head = b""
        self.following = first
        self._file = file
        self._format = body_format
        self._max = max_bytes

    def __iter__(self) -> Iterator[RawRecord]:
        """Yield each record, in order, or raise Unreadable."""
        return self._frames() if self._format == "frames" else self._lines()

    def _unreadable(self, offset: int, problem: str, number: int | None = None) -> Unreadable:
        """Return the error about a record; without a number it is about the header, so that all is unreadable."""
        if number is None:
            return Unreadable(f"the header at byte {offset} {problem}", number=self.following, byte=0)
        return Unreadable(f"record {number} at byte {offset} {problem}", number=number, byte=offset)

    # -- lines and rows --------------------------------------------------------------------------------------------

    def _lines(self) -> Iterator[RawRecord]:
        is_csv, most, readline = self._format == "csv", self._max + 1, self._file.readline
        number, line = self.following, self._after_head()
        begin = len(self.head)
        while line:
            if is_csv and QUOTE in line and not is_closed(line):
                line = self._whole_row(line, begin, number)
            data = line.removesuffix(b"\n")
            size = len(data)
            if size >= most:
                raise self._unreadable(begin, self._too_long(), number)
            if data and data != b"\r":  # as is_empty says, without a call
                yield number, begin, begin + size, data
            number += 1
            begin += len(line)
            line = readline(most)
        self.following = number

    def _after_head(self) -> bytes:
        """Read the head, and return the first line after it, which may not be all of a row."""
        line = self._file.readline(len(MARK) + self._max + 1)
        if line.startswith(MARK):
            self.head, line = MARK, line[len(MARK) :]
        if self._format == "csv":
            self.head += self._header(line)
            line = self._file.readline(self._max + 1)
        return line

    def _header(self, line: bytes) -> bytes:
        """Return the header, which is the first row that is not empty, with the empty lines before it."""
        before = bytearray()
        while line and is_empty(line.removesuffix(b"\n")) and len(before) <= self._max:
            before += line
            line = self._file.readline(self._max + 1)
        offset = len(self.head) + len(before)
        if not is_closed(line):
            line = self._whole_row(line, offset)
        row = line.removesuffix(b"\n")
        if len(before) + len(row) > self._max:
            problem = self._too_long()
        elif not row:
            problem = "is missing: the first row of csv has the names of the columns"
        elif not is_one_row(row):
            problem = "has a carriage return without a line feed outside of quotes: rows end with line feeds"
        else:
            return bytes(before) + line
        raise self._unreadable(offset, problem)

    def _whole_row(self, line: bytes, begin: int, number: int | None = None) -> bytes:
        """Return the row that begins with a line in which a quote is left open; without a number it is the header."""
        lines, size = [line], len(line)
        while line := self._file.readline(max(0, self._max + 1 - size)):
            lines.append(line)
            size += len(line)
            if is_closing(line):  # also if it was cut at the limit: the caller sees that it is too long
                return b"".join(lines)
        opening = f"its quote at byte {begin + open_quote(b''.join(lines))} is not closed"
        problem = f"{self._too_long()}: {opening} before" if size > self._max else f"does not end: {opening}"
        raise self._unreadable(begin, problem, number)

    def _too_long(self) -> str:
        return f"has more bytes than max_record_bytes allows, {self._max}"

    # -- frames ----------------------------------------------------------------------------------------------------

    def _frames(self) -> Iterator[RawRecord]:
        limit, read = self._max, self._file.read
        number, begin = self.following, 0
        while prefix := read(LENGTH.size):
            length = int.from_bytes(prefix, "big")
            if len(prefix) < LENGTH.size or length > limit:
                raise self._bad_frame(number, begin, prefix, b"")
            data = read(length)
            if len(data) < length:
                raise self._bad_frame(number, begin, prefix, data)
            end = begin + LENGTH.size + length
            if data:
                yield number, begin, end, data
            number += 1
            begin = end
        self.following = number

    def _bad_frame(self, number: int, begin: int, prefix: bytes, data: bytes) -> Unreadable:
        length = int.from_bytes(prefix, "big")
        if len(prefix) < LENGTH.size:
            problem = f"is torn: the body ends after {len(prefix)} bytes of its length"
        elif length > LARGEST_RECORD:
            problem = f"is damaged: its length is negative, or {length} bytes"
        elif length > self._max:
            problem = f"has {length} bytes, and max_record_bytes allows {self._max}"
        else:
            problem = f"is torn: the body ends after {len(data)} of its {length} bytes"
        return self._unreadable(begin, problem, number)
