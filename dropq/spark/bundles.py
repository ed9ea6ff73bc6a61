"""Writes rows as the records of a bundle, which consumers settle one by one, by column operations of Arrow.

Invariant: reading a body as records gives the rows that it was made of, one record for each. What no record can hold is
refused by `dropq.records.formats`, as in every other writer of records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import IO

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]

from dropq.records.formats import LENGTH, MARK, beginning, check_record

#: The part of an error that says what else to do with a row that cannot be a record.
_WAY_OUT = "bodyFormat=frames holds line breaks, and without recordsPerMessage a value may be anything"


class RowError(ValueError):
    """Raised when a row cannot be a message or a record, or be read; `row` is its number in the batch, from 0."""

    def __init__(self, row: int, reason: object) -> None:
        super().__init__(str(reason))
        self.row = row


def check_records(column: pa.Array, body_format: str, max_bytes: int) -> None:
    """Check that the values of a column, which has no nulls, can be records; RowError tells the first that cannot."""
    lengths = compute.min_max(compute.binary_length(column)).as_py()
    breaks = ("\n", "\r") if body_format != "frames" else ()
    broken = any(compute.any(compute.match_substring(column, text)).as_py() for text in breaks)
    if lengths["min"] and lengths["max"] <= max_bytes and not broken:
        return  # nothing that any format refuses
    for row, value in enumerate(bodies(column)):
        try:
            check_record(bytes(value), body_format, max_bytes)
        except ValueError as error:
            raise RowError(row, f"{error} ({_WAY_OUT})") from error


def write_records(file: IO[bytes], body_format: str, columns: Iterable[pa.Array]) -> None:
    """Write a body of the lines or frames in some columns, each of which has at least one."""
    encode = _frames if body_format == "frames" else _lines
    for number, values in enumerate(columns):
        if not number:
            file.write(beginning(body_format, b"", bytes(next(bodies(values))[: len(MARK)])))
        write_values(file, encode(values.cast(pa.large_binary())))


def write_values(file: IO[bytes], values: pa.Array) -> None:
    """Write all values of a new column of large texts or large binaries, without nulls, one behind the other."""
    _, offsets, data = values.buffers()  # a new column's data begin at the start of the buffer
    file.write(memoryview(data)[: memoryview(offsets).cast("q")[len(values)]])


def _lines(values: pa.Array) -> pa.Array:
    return compute.binary_join_element_wise(values, *_scalars(b"", b"\n"))


def _frames(values: pa.Array) -> pa.Array:
    lengths = compute.binary_length(values).to_pylist()
    packed = pa.py_buffer(struct.pack(f">{len(lengths)}I", *lengths))
    heads = pa.FixedSizeBinaryArray.from_buffers(pa.binary(LENGTH.size), len(lengths), [None, packed])
    return compute.binary_join_element_wise(heads.cast(pa.large_binary()), values, *_scalars(b""))


def _scalars(*values: bytes) -> list[pa.Scalar]:
    """Return values as Arrow's. They are no constants: for the first, pyarrow imports pandas, in half a second."""
    return [pa.scalar(value, pa.large_binary()) for value in values]


def bodies(column: pa.Array) -> Iterator[memoryview]:
    """Yield the values of a column of text or binary, without nulls, as slices of Arrow's memory."""
    if not any(known(column.type) for known in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string)):
        column = column.cast(pa.large_binary())
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, data = column.buffers()
    ends = memoryview(offsets).cast("q" if wide else "i")[column.offset : column.offset + len(column) + 1]
    whole = memoryview(data) if data is not None else memoryview(b"")
    return (whole[start:end] for start, end in pairwise(ends))
