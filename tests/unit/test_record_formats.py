"""A body is taken apart into records and put together again, byte for byte, and what cannot be taken apart is named."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import struct
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, Any, cast

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dropq.records.formats import (
    FORMATS,
    LARGEST_RECORD,
    MARK,
    MAX_RECORD_BYTES,
    Unreadable,
    check_record,
    csv_head,
    format_of,
    pack,
)
from dropq.records.parts import copy_part
from dropq.records.reader import BLOCK, RawRecord, RecordReader
from dropq.records.rows import fields_of, is_one_row

TEXTS = ("jsonl", "text", "csv")
#: Everything that a text format looks at, what looks like a mark, and bytes that are no UTF-8.
PIECES = [b"a", b"bc", b",", b'"', b'""', b"\n", b"\r", b"\r\n", b"\0", b"\xff", MARK, b"x" * 9, b'\n"a\nb",c\n', b',"']
text_bodies = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)
frame_bodies = st.lists(st.binary(max_size=6), max_size=12).map(lambda frames: b"".join(map(framed, frames)))
blocks = st.integers(1, 40)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a format and a body of it, which may have an open quote, or no header."""
    body_format = draw(st.sampled_from(FORMATS))
    return body_format, draw(frame_bodies if body_format == "frames" else text_bodies)


def framed(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def rows_of(body: bytes) -> list[bytes]:
    """Split csv byte by byte, as its rules say; each row has its line feed, and a last one may have an open quote."""
    rows, row, quoted, at_start = list[bytes](), b"", False, True
    for byte in (body[index : index + 1] for index in range(len(body))):
        row += byte
        if quoted:
            quoted = byte != b'"'  # a double quote closes the text, and opens it again
            at_start = byte == b'"'
            continue
        if byte == b"\n":
            rows.append(row)
            row = b""
        quoted = byte == b'"' and at_start
        at_start = byte in b",\n"
    return [*rows, row + OPEN] if quoted else [*rows, row]


#: Marks a row with an open quote in what `rows_of` returns.
OPEN = b"<open>"


def expected(body_format: str, body: bytes) -> tuple[bytes, list[RawRecord], tuple[int, int] | None]:
    """Return the head, the records, and the number and place of what cannot be read, found in the simplest way."""
    found, number, begin = list[RawRecord](), 1, 0
    if body_format == "frames":
        while begin < len(body):
            (length,) = struct.unpack_from(">i", body, begin)
            end = begin + 4 + length
            found += [(number, begin, end, body[begin + 4 : end])] if length else []
            number, begin = number + 1, end
        return b"", found, None
    head = MARK if body.startswith(MARK) else b""
    rest = body[len(head) :]
    lines = rows_of(rest) if body_format == "csv" else [line + b"\n" for line in rest.split(b"\n")]
    if body_format != "csv":
        lines[-1] = lines[-1][:-1]
    else:
        while lines and lines[0] in (b"\n", b"\r\n"):
            head += lines.pop(0)
        if lines[0] in (b"", b"\r") or lines[0].endswith(OPEN) or not bare_of_returns(lines[0]):
            return head, [], (1, 0)
        head += lines.pop(0)
    begin = len(head)
    for line in lines:
        if line.endswith(OPEN):
            return head, found, (number, begin)
        data = line.removesuffix(b"\n")
        found += [(number, begin, begin + len(data), data)] if data not in (b"", b"\r") else []
        number, begin = number + 1, begin + len(line)
    return head, found, None


def bare_of_returns(header: bytes) -> bool:
    """Return whether a header has no carriage return outside of quotes, but for the one at its end."""
    quoted, at_start = False, True
    for byte in header.removesuffix(b"\n").removesuffix(b"\r"):
        if quoted:
            quoted = byte != ord('"')
            at_start = not quoted
            continue
        if byte == ord("\r"):
            return False
        quoted = byte == ord('"') and at_start
        at_start = byte == ord(",")
    return True


def taken(reader: RecordReader) -> tuple[list[RawRecord], Unreadable | None]:
    """Return what a reader yields, and the error that it ends with."""
    found = list[RawRecord]()
    try:
        for record in reader:
            found.append(record)
    except Unreadable as error:
        return found, error
    return found, None


def opened(body: bytes, block: int = BLOCK) -> IO[bytes]:
    """Return a body as a file that reads blocks of this size."""
    return cast("IO[bytes]", io.BufferedReader(io.BytesIO(body), block))


def records_of(body_format: str, body: bytes, block: int = BLOCK, **options: Any) -> list[RawRecord]:
    return list(RecordReader(opened(body, block), body_format, **options))


def part_of(body_format: str, body: bytes, **options: Any) -> bytes:
    target = io.BytesIO()
    copy_part(io.BytesIO(body), target, body_format, **options)
    return target.getvalue()


# -- taking apart --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(bodies(), blocks)
@example(("csv", b'a,b\r\n"1\r\n""2""",x"y\r\n\r\n3,'), 1)
@example(("csv", b'5" nails,"a\n'), 3)
@example(("csv", b'h\n"a\n""b\nc"\n"d\n""e"",f"\n'), 4)
@example(("csv", b'a\n5",x,"m\nn"\n"b""\n"'), 2)
@example(("text", MARK + MARK + b"\0\n\xff\r\n\r\n\n"), 1)
def test_any_body_is_read_as_its_records_in_blocks_of_any_size(drawn: tuple[str, bytes], block: int) -> None:
    body_format, body = drawn
    reader = RecordReader(opened(body, block), body_format)
    found, error = taken(reader)
    head, records, bad = expected(body_format, body)
    assert found == records
    assert ((error.number, error.byte) if error else None) == bad
    assert reader.head == head or (bad and not records)


@settings(deadline=None)
@given(bodies(), blocks)
def test_a_record_has_the_bytes_of_its_place(drawn: tuple[str, bytes], block: int) -> None:
    body_format, body = drawn
    for _, begin, end, data in taken(RecordReader(opened(body, block), body_format))[0]:
        assert body[begin:end] == (framed(data) if body_format == "frames" else data)


@pytest.mark.parametrize("body_format", ["jsonl", "text", "frames"])
def test_an_empty_body_has_no_records(body_format: str) -> None:
    reader = RecordReader(io.BytesIO(), body_format)
    assert list(reader) == [] and reader.following == 1


@pytest.mark.parametrize(
    ("body_format", "body", "numbers"),
    [
        ("text", b"a\n\nb\n\r\n\nc", [1, 3, 6]),
        ("jsonl", b"\n{}\r\n\r\n{}\n", [2, 4]),
        ("csv", b'\r\nname\n\n"a\n\n"\n\r\nb', [2, 4]),
        ("frames", framed(b"") + framed(b"a") + framed(b"") + framed(b"\r"), [2, 4]),
    ],
)
def test_what_is_empty_is_no_record_and_keeps_its_number(body_format: str, body: bytes, numbers: list[int]) -> None:
    assert [number for number, *_ in records_of(body_format, body)] == numbers
    assert [number for number, *_ in records_of(body_format, body, first=101)] == [100 + number for number in numbers]


@pytest.mark.parametrize(
    ("body", "head", "rows"),
    [
        (b"id,name\n1,x\n", b"id,name\n", [b"1,x"]),
        (b'id,"a\n""b"""\r\n1,"x\ny"\r\n', b'id,"a\n""b"""\r\n', [b'1,"x\ny"\r']),
        (MARK + b"\n\r\nid\n1", MARK + b"\n\r\nid\n", [b"1"]),
        (b"id", b"id", []),
        (b'id\n"1\n', b"id\n", None),
    ],
)
def test_the_head_of_csv_ends_with_its_header(body: bytes, head: bytes, rows: list[bytes] | None) -> None:
    reader = RecordReader(io.BytesIO(body), "csv")
    found, error = taken(reader)
    assert reader.head == head
    assert [data for *_, data in found] == (rows or []) and (error is None) == (rows is not None)


def test_a_pipe_gives_a_record_as_soon_as_it_is_there() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=BLOCK) as lines, open(write_end, "wb", buffering=0) as source:
        records = iter(RecordReader(lines, "text"))
        source.write(b"a\nb")
        assert next(records)[3] == b"a"
        source.write(b"c\n")
        assert next(records)[3] == b"bc"


class Endless(io.RawIOBase):
    """A file that repeats one piece of data after its start; it counts what was read."""

    def __init__(self, piece: bytes, size: int, *, start: bytes = b"") -> None:
        self.data = start
        self.piece = piece
        self.left = size
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.data:
            self.data = self.piece * (min(self.left, BLOCK) // len(self.piece))
            self.left -= len(self.data)
        size = min(len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        self.count += size
        return size


@pytest.mark.parametrize(
    ("body_format", "piece"),
    [
        ("text", b"x" * 255 + b"\n"),
        ("csv", b'"' + b"x" * 125 + b"\n" + b"y" * 126 + b'"a\n'),
        ("frames", framed(b"x" * 252)),
    ],
)
def test_memory_does_not_grow_with_the_body(body_format: str, piece: bytes) -> None:
    assert len(piece) == 256
    file = Endless(piece, 4 << 20)
    reader = RecordReader(io.BufferedReader(file, BLOCK), body_format)
    tracemalloc.start()
    try:
        count = sum(1 for _ in reader)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == (4 << 20) // len(piece) - (body_format == "csv")  # its first row is the header
    assert peak < 6 * BLOCK


@pytest.mark.parametrize(
    ("body_format", "start", "piece"),
    [
        ("text", b"", b"x"),
        ("jsonl", b"{", b"\0"),
        ("csv", b"", b"x"),
        ("csv", b"", b"\n"),
        ("csv", b"h\n", b"x,"),
        ("csv", b'h\n"', b"x\n"),
    ],
)
def test_a_line_of_a_gib_is_refused_before_all_of_it_is_read(body_format: str, start: bytes, piece: bytes) -> None:
    file = Endless(piece, 1 << 30, start=start)
    found, error = taken(RecordReader(io.BufferedReader(file, BLOCK), body_format, max_bytes=1 << 20))
    assert found == [] and error is not None and (error.number, error.byte) == (1, start.find(b"\n") + 1)
    assert "max_record_bytes" in str(error)
    assert file.count <= (1 << 20) + 2 * BLOCK


# -- what cannot be taken apart --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, BLOCK])
@pytest.mark.parametrize(
    ("body_format", "body", "number", "byte", "says"),
    [
        ("text", b"a\n\n" + b"x" * 11 + b"\nb\n", 3, 3, "max_record_bytes allows, 10"),
        ("text", b"a\n" + b"x" * 11, 2, 2, "max_record_bytes allows, 10"),
        ("csv", b"h\na\n" + b"x" * 11, 2, 4, "max_record_bytes allows, 10"),
        ("csv", b'h\na\nb,"x\n' + b"y\n" * 20, 2, 4, "its quote at byte 6 is not closed"),
        ("csv", b'h\na\nb,"x\n', 2, 4, "does not end: its quote at byte 6 is not closed"),
        ("csv", b'h\na\n"x""\n', 2, 4, "does not end: its quote at byte 4 is not closed"),
        ("csv", b"", 1, 0, "the header at byte 0 is missing"),
        ("csv", MARK + b"\n\r\n", 1, 0, "the header at byte 6 is missing"),
        ("csv", b'a,"b\n1\n', 1, 0, "does not end: its quote at byte 2 is not closed"),
        ("csv", b"a,b\r1,2\r3", 1, 0, "carriage return"),
        ("csv", b"x" * 11 + b"\na\n", 1, 0, "the header at byte 0 has more bytes"),
        ("frames", framed(b"a") + b"\0\0", 2, 5, "is torn: the body ends after 2 bytes"),
        ("frames", framed(b"a") + framed(b"abc")[:-1], 2, 5, "is torn: the body ends after 2 of its 3 bytes"),
        ("frames", framed(b"") + framed(b"x" * 11), 2, 4, "has 11 bytes, and max_record_bytes allows 10"),
        ("frames", framed(b"a") + b"\xff\xff\xff\xff", 2, 5, "negative, or 4294967295 bytes"),
        ("frames", framed(b"a") + struct.pack(">i", -3) + b"abc", 2, 5, "negative, or 4294967293 bytes"),
    ],
)
def test_what_cannot_be_read_is_named_after_all_before_it_was_yielded(
    body_format: str, body: bytes, number: int, byte: int, says: str, block: int
) -> None:
    found, error = taken(RecordReader(opened(body, block), body_format, max_bytes=10))
    assert error is not None and (error.number, error.byte) == (number, byte)
    assert says in str(error) and (f"record {number} at byte {byte} " in str(error) or "header" in str(error))
    assert found == [record for record in records_of(body_format, body[:byte]) if record[0] < number] if byte else True


def test_a_file_without_a_buffer_is_refused() -> None:
    with pytest.raises(TypeError, match="open it with buffering=BLOCK"):
        RecordReader(cast("IO[bytes]", Endless(b"a\n", 2)), "text")


@pytest.mark.parametrize("limit", [0, -1, LARGEST_RECORD + 1])
def test_a_limit_that_no_record_can_have_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="max_record_bytes"):
        RecordReader(io.BytesIO(), "text", max_bytes=limit)


def test_a_record_may_be_as_long_as_the_limit() -> None:
    long = b"x" * 300_000
    for body_format, head in (("text", b""), ("csv", b"h\n"), ("frames", b"")):
        body = pack(body_format, [b"a", long, b"b"], head=head)
        assert [data for *_, data in records_of(body_format, body, max_bytes=300_000)] == [b"a", long, b"b"]


# -- putting together ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(bodies())
def test_all_of_a_body_is_copied_byte_for_byte(drawn: tuple[str, bytes]) -> None:
    body_format, body = drawn
    reader = RecordReader(io.BytesIO(body), body_format)
    taken(reader)
    assert part_of(body_format, body, head=reader.head) == body == part_of(body_format, body, head=b"")


@settings(deadline=None)
@given(bodies(), st.data(), blocks)
def test_a_part_has_the_records_that_are_left_with_their_numbers(
    drawn: tuple[str, bytes], data: st.DataObject, block: int
) -> None:
    body_format, body = drawn
    reader = RecordReader(io.BytesIO(body), body_format)
    found, error = taken(reader)
    assume(found)
    kept = data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)).filter(any), "kept")
    left = [record for record, keep in zip(found, kept, strict=True) if keep]
    first, begin = left[0][:2]
    empty = [record[1:3] for record in found if record not in left and record[0] > first]
    part = part_of(body_format, body, head=reader.head, begin=begin, empty=empty)
    again = RecordReader(opened(part, block), body_format, first=first)
    read, same = taken(again)
    assert [(number, record) for number, *_, record in read] == [(number, record) for number, *_, record in left]
    assert (same and same.number) == (error and error.number)
    assert error or again.following == reader.following or not body.endswith(b"\n")


@settings(deadline=None)
@given(bodies(), st.data())
@example(("text", MARK + b"a\nb\n"), None)
@example(("text", b"a\n" + MARK + b"b\n"), None)
@example(("jsonl", MARK + b"a\n" + MARK + b"b\n"), None)
@example(("csv", b"h\na\n" + MARK + b"b\n"), None)
def test_the_parts_that_a_body_is_cut_into_have_its_records(
    drawn: tuple[str, bytes], data: st.DataObject | None
) -> None:
    body_format, body = drawn
    reader = RecordReader(io.BytesIO(body), body_format)
    found, error = taken(reader)
    later = st.sets(st.sampled_from([0, *range(1, len(found))]))
    cuts = [found[index] for index in sorted((data.draw(later, "cuts") if data else {1}) - {0})]
    parts = list[tuple[int, bytes]]()
    for (first, begin), (_, end) in pairwise([(1, 0), *(cut[:2] for cut in cuts), (0, None)]):
        part = part_of(body_format, body, head=reader.head, begin=begin, end=end)
        assert part.endswith(body[begin:end])
        parts.append((first, part))
    again = [taken(RecordReader(io.BytesIO(part), body_format, first=first)) for first, part in parts]
    assert [record[::3] for read, _ in again for record in read] == [record[::3] for record in found]
    assert (again[-1][1] and again[-1][1].number) == (error and error.number)


@settings(deadline=None)
@given(bodies())
@example(("jsonl", MARK + b"\r"))
@example(("csv", b'\nid\r\n"a\r\nb"\r\n\nc'))
def test_packing_what_was_read_gives_the_same_bytes(drawn: tuple[str, bytes]) -> None:
    body_format, body = drawn
    reader = RecordReader(io.BytesIO(body), body_format)
    found, error = taken(reader)
    assume(error is None)
    by_number = {number: data for number, _, _, data in found}
    packed = pack(body_format, [by_number.get(number, b"") for number in range(1, reader.following)], head=reader.head)
    # The last line gets a line feed, and an empty line of a carriage return becomes one without.
    assert packed.startswith(reader.head)
    packed, body = (without_empty(whole[len(reader.head) :]) for whole in (packed, body))
    assert packed in (body, body + b"\n")


def without_empty(body: bytes) -> bytes:
    """Return a body without the carriage returns that are alone in their lines."""
    return re.sub(rb"^\r$", b"", body, flags=re.MULTILINE)


@settings(deadline=None)
@given(st.sampled_from(FORMATS), st.lists(text_bodies, max_size=8), st.integers(0, 8), blocks)
@example("text", [MARK + b"a", b"b"], 1, 1)
@example("csv", [MARK, b'"a\n"'], 1, 1)
def test_what_passes_the_check_is_read_as_it_was_packed(
    body_format: str, wanted: list[bytes], cut: int, block: int
) -> None:
    records = list(accepted(body_format, wanted))
    head = csv_head(b'id,"n\n"') if body_format == "csv" else b""
    body = pack(body_format, records, head=head)
    assert [record[::3] for record in records_of(body_format, body, block)] == list(enumerate(records, 1))
    first, rest = records[:cut], records[cut:]
    assert not first or pack(body_format, first, head=head) + pack(body_format, rest) == body


def accepted(body_format: str, records: list[bytes]) -> Iterator[bytes]:
    """Yield the records that a format can hold; every other one would be read as something else."""
    for record in records:
        try:
            check_record(record, body_format)
        except ValueError:
            head = b"h\n" if body_format == "csv" else b""
            found, error = taken(RecordReader(io.BytesIO(head + pack(body_format, [record])), body_format))
            bare = body_format == "csv" and b"\r" in record  # a row to dropq, and two to other readers
            assert error or bare or [data for *_, data in found] != [record]
        else:
            yield record


@pytest.mark.parametrize(
    ("body_format", "record", "says"),
    [
        ("text", b"a\nb", "line break, and text has a record a line; use the format frames"),
        ("jsonl", b"{\n}", "line break, and jsonl has a record a line; use the format frames"),
        ("csv", b"a\nb", "not one row"),
        ("csv", b"a\rb", "not one row"),
        ("csv", b'a,"b', "not one row"),
        ("text", b"", "empty"),
        ("jsonl", b"\r", "empty"),
        ("csv", b"\r", "empty"),
        ("frames", b"", "empty"),
        ("frames", b"x" * 11, "11 bytes, and max_record_bytes allows 10"),
    ],
)
def test_a_record_that_its_format_cannot_hold_is_refused(body_format: str, record: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_record(record, body_format, 10)


@pytest.mark.parametrize("header", [b"", b"\n", b"\r\n", b"a\nb", b"a,b\r1,2", b'a,"b'])
def test_a_header_that_is_not_one_row_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        csv_head(header)


def test_a_header_gets_its_line_feed_once() -> None:
    assert csv_head(b"a,b") == csv_head(b"a,b\n") == b"a,b\n"
    assert csv_head(b'"a\nb"\r\n') == b'"a\nb"\r\n'


def test_a_damaged_frame_is_copied_as_it_is() -> None:
    body = framed(b"a") + MARK + b"xyz"
    _, error = taken(RecordReader(opened(body), "frames"))
    assert error is not None and part_of("frames", body, head=b"", begin=error.byte) == MARK + b"xyz"


def test_a_frame_may_hold_what_would_be_an_empty_line() -> None:
    check_record(b"\r", "frames")
    check_record(b"\n", "frames")


def test_a_body_that_became_shorter_is_not_copied_as_if_it_were_whole() -> None:
    with pytest.raises(ValueError, match="ends at byte 4, and had 8 bytes or more"):
        part_of("text", b"a\nb\n", head=b"", begin=2, empty=[(8, 9)])


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_type", "wanted", "chosen"),
    [
        ("csv", None, "csv"),
        ("frames", "text", "frames"),
        ("", "jsonl", "jsonl"),
        ("order", "csv", "csv"),
        ("order", None, "text"),
        (None, None, "text"),
        ("CSV", None, "text"),
    ],
)
def test_the_type_of_a_message_decides_then_its_reader(
    message_type: str | None, wanted: str | None, chosen: str
) -> None:
    assert format_of(message_type, wanted) == chosen


@pytest.mark.parametrize("table", ["parquet", "arrow"])
def test_a_table_is_refused_with_the_way_out(table: str) -> None:
    for choice in ((table, None), (table, "text"), ("csv", table)):
        with pytest.raises(ValueError, match=f"{table} is a table.*Spark.*pyarrow"):
            format_of(*choice)


@pytest.mark.parametrize(("unknown", "near"), [("json", "jsonl"), ("frame", "frames"), ("txt", "text")])
def test_an_unknown_format_is_refused_by_name_with_the_nearest(unknown: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{unknown!r} is not a format of records; the nearest is {near}"):
        format_of("csv", unknown)


def test_an_unknown_format_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match="'yes' is not a format of records; it is jsonl, text, csv or frames"):
        format_of(None, "yes")


# -- Spark's bodies --------------------------------------------------------------------------------------------------


def spark_body(body_format: str, columns: dict[str, list[Any]]) -> bytes:
    """Return what a Spark job writes for these columns."""
    pytest.importorskip("pyspark")
    pa = pytest.importorskip("pyarrow")
    from dropq.spark import encoders

    batch = pa.RecordBatch.from_pydict(columns)
    file = io.BytesIO()
    encoders.BODIES[body_format](file, batch.schema, [batch])
    return file.getvalue()


def spark_rows(body_format: str, body: bytes, columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return what Spark reads from a body, in the columns that these have."""
    pytest.importorskip("pyspark")
    pa = pytest.importorskip("pyarrow")
    from dropq.spark import decoders

    schema = pa.RecordBatch.from_pydict(columns).schema
    return [
        row for batch in decoders.PARSERS[body_format](io.BytesIO(body), schema, False) for row in batch.to_pylist()
    ]


COLUMNS: dict[str, list[Any]] = {
    "id": [1, None, 3, 4],
    'a "name",\nin two lines': ['q"uo,te\r\nd', "", '5" x 3"\n\n\n', None],
    "price": [1.5, None, -2.0, 1e300],
}


@pytest.mark.parametrize("body_format", ["jsonl", "csv"])
def test_each_row_that_spark_wrote_is_a_record(body_format: str) -> None:
    body = spark_body(body_format, COLUMNS)
    reader = RecordReader(opened(body, 5), body_format)
    found = list(reader)
    assert [number for number, *_ in found] == [1, 2, 3, 4]
    rows = spark_rows(body_format, body, COLUMNS)
    for row, (_, _, _, data) in zip(rows, found, strict=True):
        assert spark_rows(body_format, pack(body_format, [data], head=reader.head), COLUMNS) == [row]


def test_a_null_and_an_empty_text_of_spark_are_empty_lines_in_text() -> None:
    found = records_of("text", spark_body("text", {"value": ["a", None, "", "c\r", "ü"]}))
    assert [record[::3] for record in found] == [(1, b"a"), (4, b"c\r"), (5, "ü".encode())]


def test_a_null_of_spark_is_an_empty_row_in_csv_of_one_column() -> None:
    found = records_of("csv", spark_body("csv", {"value": ["a", None, "", "c\r"]}))
    assert [record[::3] for record in found] == [(1, b'"a"'), (3, b'""'), (4, b'"c\r"')]


@pytest.mark.parametrize("body_format", ["jsonl", "csv"])
def test_spark_reads_what_is_left_of_its_body(body_format: str) -> None:
    body = spark_body(body_format, COLUMNS)
    reader = RecordReader(io.BytesIO(body), body_format)
    _, second, third, _ = reader
    part = part_of(body_format, body, head=reader.head, begin=second[1], empty=[third[1:3]])
    rows = spark_rows(body_format, body, COLUMNS)
    assert spark_rows(body_format, part, COLUMNS) == [rows[1], rows[3]]


def test_spark_reads_what_was_packed() -> None:
    objects = [{"id": 1, "name": "a\nb"}, {"id": 2, "name": "ü"}]
    columns: dict[str, list[Any]] = {"id": [1], "name": ["a"]}
    lines = [json.dumps(value).encode() for value in objects]
    assert spark_rows("jsonl", pack("jsonl", lines, head=b""), columns) == objects
    table = pack("csv", [b'1,"a\nb"', "2,ü".encode()], head=csv_head(b"id,name"))
    assert spark_rows("csv", table, columns) == objects
    assert spark_rows("text", pack("text", [b"a", b"b"], head=b""), {"value": ["a"]}) == [
        {"value": "a"},
        {"value": "b"},
    ]


def test_the_default_limit_is_16_mib() -> None:
    assert MAX_RECORD_BYTES == 16 * 1024 * 1024


@given(st.text(st.sampled_from('ab,"\r\n\0 é'), max_size=12))
def test_the_fields_of_a_row_are_those_that_pythons_csv_finds(row: str) -> None:
    assume(row and is_one_row(row.encode()))
    assert fields_of(row) == (next(csv.reader(io.StringIO(row, newline=""))) or [""]), row
