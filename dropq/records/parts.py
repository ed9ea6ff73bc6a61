"""Copies a part of a body, so that reading the part gives the records of the body, with their numbers and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from dropq.records.formats import LENGTH, beginning, read_failed

#: Bytes that are copied at a time.
BLOCK = 256 << 10
#: What an error says of a message whose body cannot be copied.
UNSETTLED = "nothing was settled, and the message is still held"


def copy_part(
    source: IO[bytes],
    target: IO[bytes],
    body_format: str,
    *,
    head: bytes,
    begin: int = 0,
    end: int | None = None,
    empty: Iterable[tuple[int, int]] = (),
) -> None:
    """Write the part of a body, a seekable file, from one of its records on, behind the head of the body.

    A part is read with the number of the record at `begin` as its first. Bytes that are no records are copied, too.

    Args:
        head: the head of the body, as its reader found it; b"" if the part begins at byte 0.
        begin, end: where the part begins, and where the record behind it begins; None for the end of the body.
        empty: where records begin and end that become empty lines, rows or frames, in order.

    Raises:
        ValueError: the body ends too early: it was changed since it was read.
        ReadFailed: the file system cannot read it.
    """
    source.seek(begin)
    if begin:  # at 0 the body's own mark stands
        target.write(beginning(body_format, head, _read(source, begin, 4)))
    hole = LENGTH.pack(0) if body_format == "frames" else b""
    for hole_begin, hole_end in empty:
        _copy(source, target, begin, hole_begin)
        target.write(hole)
        begin = hole_end
    _copy(source, target, begin, end)


def _copy(source: IO[bytes], target: IO[bytes], begin: int, end: int | None) -> None:
    source.seek(begin)
    while end is None or begin < end:
        data = _read(source, begin, BLOCK if end is None else min(BLOCK, end - begin))
        if not data:
            if end is None:
                return
            raise ValueError(f"the body ends at byte {begin}, and had {end} bytes or more when it was read")
        target.write(data)
        begin += len(data)


def _read(source: IO[bytes], begin: int, size: int) -> bytes:
    try:
        return source.read(size)
    except OSError as error:
        raise read_failed(error, begin, UNSETTLED) from error
