"""Bodies come back as the rows they were written from, in the wanted schema, or it is said what is wrong where."""

from __future__ import annotations

import codecs
import csv
import io
import json
import random
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pa_csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from dropq.spark import decoders
from dropq.spark.arrow_cast import ROWS, BadBody
from dropq.spark.decoders import CHUNK, PARSERS, csv_rows, read_csv
from dropq.spark.encoders import BODIES
from dropq.spark.json_layout import SMALLEST
from dropq.spark.options import BODY_FORMATS, CsvOptions

COLUMNAR = ("parquet", "arrow")
NESTING = ("jsonl", *COLUMNAR)


def write(body_format: str, table: pa.Table) -> bytes:
    file = io.BytesIO()
    BODIES[body_format](file, table.schema, table.to_batches(max_chunksize=7))
    return file.getvalue()


def read(body_format: str, body: bytes, schema: pa.Schema) -> list[Any]:
    """Return the rows of a body, having looked at the schema and the size of each batch and at the file."""
    file, rows = io.BytesIO(body), []
    for batch in PARSERS[body_format](file, schema, False):
        batch.validate(full=True)
        assert batch.schema.equals(schema) and 0 < batch.num_rows <= ROWS
        rows += batch.to_pylist()
    assert not file.closed
    return rows


def fields(**kinds: Any) -> pa.Schema:
    return pa.schema(list(kinds.items()))


def refusal(body_format: str, body: bytes, schema: pa.Schema) -> str:
    with pytest.raises(BadBody) as caught:
        read(body_format, body, schema)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- there and back ------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=8)


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


@st.composite
def decimals(draw: st.DrawFn) -> tuple[t.DataType, st.SearchStrategy[Any]]:
    precision = draw(st.integers(1, 38))
    scale = draw(st.integers(0, precision))
    digits = st.tuples(st.sampled_from((0, 1)), st.lists(st.integers(0, 9), min_size=1, max_size=precision))
    return t.DecimalType(precision, scale), digits.map(lambda pair: Decimal((pair[0], pair[1], -scale)))


Kind = tuple[t.DataType, st.SearchStrategy[Any]]

FLAT: list[Kind] = [
    (t.BooleanType(), st.booleans()),
    (t.ByteType(), whole(8)),
    (t.ShortType(), whole(16)),
    (t.IntegerType(), whole(32)),
    (t.LongType(), whole(64)),
    (t.FloatType(), st.floats(width=32)),
    (t.DoubleType(), st.floats()),
    (t.StringType(), texts),
    (t.DateType(), st.dates()),
    (t.TimestampType(), st.datetimes(timezones=st.just(UTC))),
    (t.TimestampNTZType(), st.datetimes()),
]
RICH: list[Kind] = [*FLAT, (t.BinaryType(), st.binary(max_size=8)), (t.NullType(), st.none())]
KEYS: list[Kind] = [kind for kind in FLAT if isinstance(kind[0], t.StringType | t.ByteType | t.LongType)]

flat_kinds = st.sampled_from(FLAT) | decimals()
rich_kinds = st.sampled_from(RICH) | decimals()


def arrays(items: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    return items.map(lambda item: (t.ArrayType(item[0]), st.lists(st.none() | item[1], max_size=3)))


def maps(items: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    def build(key: Kind, item: Kind) -> Kind:
        pairs = st.dictionaries(key[1], st.none() | item[1], max_size=3)
        return t.MapType(key[0], item[0]), pairs.map(lambda found: list(found.items()))

    return st.builds(build, st.sampled_from(KEYS), items)


def structs(items: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    def build(members: dict[str, tuple[Kind, bool]]) -> Kind:
        kind, values = t.StructType(), {}
        for name, ((member, value), nullable) in members.items():
            kind = kind.add(name, member, nullable or isinstance(member, t.NullType))
            values[name] = value if not nullable else st.none() | value
        return kind, st.fixed_dictionaries(values)

    return st.dictionaries(texts, st.tuples(items, st.booleans()), min_size=1, max_size=3).map(build)


nested_kinds = st.recursive(rich_kinds, lambda items: arrays(items) | maps(items) | structs(items), max_leaves=4)


@st.composite
def tables(draw: st.DrawFn, kinds: st.SearchStrategy[Kind]) -> pa.Table:
    """Draw a table of the types that Spark has, with its nulls, and fields of structs that must not be null."""
    columns = draw(st.dictionaries(texts, kinds, min_size=1, max_size=4))
    spark = t.StructType([t.StructField(name, kind) for name, (kind, _) in columns.items()])
    row = st.fixed_dictionaries({name: st.none() | value for name, (_, value) in columns.items()})
    return pa.Table.from_pylist(draw(st.lists(row, max_size=20)), to_arrow_schema(spark, timezone="UTC"))


def assert_same(body_format: str, table: pa.Table) -> None:
    found = read(body_format, write(body_format, table), table.schema)
    assert repr(found) == repr(table.to_pylist())  # as text, since NaN is not NaN


@given(tables(nested_kinds))
def test_every_type_comes_back_from_jsonl(table: pa.Table) -> None:
    assert_same("jsonl", table)


@given(tables(nested_kinds))
def test_every_type_comes_back_from_parquet(table: pa.Table) -> None:
    assert_same("parquet", table)


@given(tables(nested_kinds))
def test_every_type_comes_back_from_arrow(table: pa.Table) -> None:
    assert_same("arrow", table)


@given(tables(flat_kinds))
@example(pa.table({"one": pa.array([None, "", "\r\n\"',", None, "nan", "NULL"])}))
def test_every_type_comes_back_from_csv(table: pa.Table) -> None:
    assert_same("csv", table)


@given(st.lists(texts.filter(lambda text: "\n" not in text), max_size=20), texts)
@example(["", "a\r", "\x0b\x85\u2028", ""], "line")
@example(["\ufefffirst", "\ufeffsecond"], "line")
def test_text_comes_back_line_by_line_under_any_name(lines: list[str], name: str) -> None:
    body = write("text", pa.table({"line": pa.array(lines, pa.string())}))
    assert read("text", body, pa.schema([(name, pa.string())])) == [{name: line} for line in lines]


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_times_of_day_and_intervals_come_back(body_format: str) -> None:
    table = pa.table({"at": pa.array([1, None], pa.time64("ns")), "gap": pa.array([None, -5], pa.duration("us"))})
    parsed = PARSERS[body_format](io.BytesIO(write(body_format, table)), table.schema, False)
    assert pa.Table.from_batches(parsed).equals(table)  # as values, Python has no nanoseconds


@pytest.mark.parametrize("body_format", ["jsonl", "csv"])
@pytest.mark.parametrize("value", [2**60, -(2**60)])
@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC")])
def test_a_year_that_text_does_not_hold_is_refused_by_column(body_format: str, value: int, kind: pa.DataType) -> None:
    table = pa.table({"n": [1, 2], "at": pa.array([0, value], kind)})
    with pytest.raises(ValueError, match=r"^column at: .* years 1 to 9999"):
        write(body_format, table)


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_years_that_text_does_not_hold_come_back_in_columns(body_format: str) -> None:
    table = pa.table({"at": pa.array([2**60, -(2**60)], pa.timestamp("us"))})
    parsed = PARSERS[body_format](io.BytesIO(write(body_format, table)), table.schema, False)
    assert pa.Table.from_batches(parsed).equals(table)


@pytest.mark.parametrize("body_format", [name for name in BODIES if name != "text"])
def test_the_large_types_of_a_session_come_back_as_plain_ones(body_format: str) -> None:
    nested = {} if body_format == "csv" else {"b": pa.large_binary(), "l": pa.list_(pa.large_string())}
    large = pa.schema([("s", pa.large_string()), *nested.items()])
    rows = [{"s": "x", "b": b"\xff", "l": ["a", None]}, {"s": None, "b": None, "l": None}]
    plain = pa.schema([("s", pa.string()), *({"b": pa.binary(), "l": pa.list_(pa.string())} if nested else {}).items()])
    table = pa.Table.from_pylist(rows, large)
    assert read(body_format, write(body_format, table), plain) == table.to_pylist()


def test_every_format_that_is_written_is_read() -> None:
    assert tuple(PARSERS) == tuple(BODIES) == BODY_FORMATS


@pytest.mark.parametrize("body_format", ["jsonl", "csv", "text"])
def test_an_empty_body_has_no_rows(body_format: str) -> None:
    assert read(body_format, b"", fields(a=pa.string())) == []


@pytest.mark.parametrize("body_format", ["csv", *COLUMNAR])
def test_a_body_of_a_schema_alone_has_no_rows(body_format: str) -> None:
    table = pa.table({"a": pa.array([], pa.string())})
    assert read(body_format, write(body_format, table), table.schema) == []


# -- what is wanted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body_format", [name for name in BODIES if name != "text"])
def test_columns_are_matched_by_name_and_case(body_format: str) -> None:
    body = write(body_format, pa.table({"a": [1, 2], "B": ["x", "y"], "c": [0.5, 1.5]}))
    assert read(body_format, body, fields(c=pa.float64(), a=pa.int64(), B=pa.string())) == [
        {"c": 0.5, "a": 1, "B": "x"},
        {"c": 1.5, "a": 2, "B": "y"},
    ]
    assert read(body_format, body, fields(c=pa.float64(), gone=pa.decimal128(5, 2))) == [
        {"c": 0.5, "gone": None},
        {"c": 1.5, "gone": None},
    ]


@pytest.mark.parametrize("body_format", ["csv", *COLUMNAR])
def test_a_body_of_other_columns_alone_is_refused_with_what_it_has(body_format: str) -> None:
    body = write(body_format, pa.table({"a;b": [1], 'the "best"': [2]}))
    said = 'none of the wanted columns is there: the body has "a;b", "the \\"best\\""'
    assert refusal(body_format, body, fields(a=pa.int64(), b=pa.int64())) == said
    many = write(body_format, pa.table({f"column {number}": [1] for number in range(99)}))
    assert refusal(body_format, many, fields(a=pa.int64())).endswith('"column 4", ...')


def test_an_object_of_jsonl_may_have_none_of_the_wanted_columns() -> None:
    assert read("jsonl", b'{"c":1,"A":2}', fields(a=pa.int64(), c=pa.int64())) == [{"a": None, "c": 1}]
    assert read("jsonl", b'{}\n{"b":1}\n', fields(a=pa.int64())) == [{"a": None}] * 2


@pytest.mark.parametrize("body_format", NESTING)
def test_fields_of_structs_are_matched_by_name_as_well(body_format: str) -> None:
    have = pa.struct([("x", pa.int32()), ("y", pa.string())])
    rows = [[{"x": 1, "y": "a"}, None], None, []]
    table = pa.table({"l": pa.array(rows, pa.list_(have)), "s": pa.array([{"x": 1, "y": "a"}, None, None], have)})
    want = pa.struct([("z", pa.float32()), ("x", pa.int64())])
    found = read(body_format, write(body_format, table), fields(l=pa.list_(want), s=want))
    row = {"z": None, "x": 1}
    assert found == [{"l": [row, None], "s": row}, {"l": None, "s": None}, {"l": [], "s": None}]


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_a_null_struct_may_have_fields_that_must_not_be_null(body_format: str) -> None:
    kind = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    table = pa.table({"s": pa.array([{"x": 1}, None], kind)})
    assert read(body_format, write(body_format, table), table.schema) == [{"s": {"x": 1}}, {"s": None}]


def test_a_dot_in_a_name_is_no_path() -> None:
    table = pa.table({"a.b": [1], "a": [{"b": 2}]})
    for body_format in COLUMNAR:
        body = write(body_format, table)
        assert read(body_format, body, fields(**{"a.b": pa.int64()})) == [{"a.b": 1}]
        assert read(body_format, body, fields(a=table.schema.field("a").type)) == [{"a": {"b": 2}}]
        assert refusal(body_format, body, fields(b=pa.int64())).startswith("none of the wanted columns is there")


@pytest.mark.parametrize("body_format", COLUMNAR)
@pytest.mark.parametrize(
    ("have", "want", "value"),
    [
        (pa.int8(), pa.int16(), -128),
        (pa.int32(), pa.int64(), 2**31 - 1),
        (pa.uint32(), pa.int64(), 2**32 - 1),
        (pa.int32(), pa.float64(), 2**31 - 1),
        (pa.float32(), pa.float64(), 0.5),
        (pa.decimal128(5, 2), pa.decimal128(10, 4), Decimal("123.4500")),
        (pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us", "UTC"), datetime(2024, 3, 31, tzinfo=UTC)),
        (pa.timestamp("ns"), pa.timestamp("us"), datetime(2024, 3, 31, microsecond=1)),
        (pa.null(), pa.list_(pa.int8()), None),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), "again and again"),
        (pa.binary(3), pa.binary(), b"abc"),
    ],
)
def test_a_type_that_has_room_for_the_bodys_own_is_fine(
    body_format: str, have: pa.DataType, want: pa.DataType, value: Any
) -> None:
    table = pa.table({"a": pa.array([value], have), "l": pa.array([[value]], pa.list_(have))})
    found = read(body_format, write(body_format, table), fields(a=want, l=pa.list_(want)))
    assert found == [{"a": value, "l": [value]}]


@pytest.mark.parametrize("body_format", COLUMNAR)
@pytest.mark.parametrize(
    ("have", "want", "value"),
    [
        (pa.int64(), pa.int32(), 1),
        (pa.uint64(), pa.int64(), 1),
        (pa.int64(), pa.float64(), 1),
        (pa.float64(), pa.float32(), 0.5),
        (pa.float64(), pa.int64(), 1.0),
        (pa.decimal128(5, 2), pa.decimal128(5, 3), Decimal("1.00")),
        (pa.decimal128(5, 2), pa.decimal128(4, 2), Decimal("1.00")),
        (pa.string(), pa.int32(), "1"),
        (pa.int32(), pa.string(), 1),
        (pa.bool_(), pa.int8(), True),
        (pa.string(), pa.binary(), "x"),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), datetime(2024, 1, 1)),
        (pa.date32(), pa.timestamp("us"), date(2024, 1, 1)),
        (pa.list_(pa.field("element", pa.int8())), pa.int8(), [1]),
        (pa.struct([("x", pa.int8())]), pa.map_(pa.string(), pa.int8()), {"x": 1}),
    ],
)
def test_a_type_that_has_not_is_refused_by_the_columns_name(
    body_format: str, have: pa.DataType, want: pa.DataType, value: Any
) -> None:
    body = write(body_format, pa.table({"other": [1], "a": pa.array([value], have)}))
    assert refusal(body_format, body, fields(a=want)) == f"column a is {have}, and {want} is wanted"
    deep = write(body_format, pa.table({"a": pa.array([{"s": [("k", [value])]}], pa.struct([("s", _map_of(have))]))}))
    said = refusal(body_format, deep, fields(a=pa.struct([("s", _map_of(want))])))
    assert said == f"column a.s{{}}[] is {have}, and {want} is wanted"


def _map_of(kind: pa.DataType) -> pa.DataType:
    return pa.map_(pa.string(), pa.list_(kind))


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_nanoseconds_that_would_be_lost_are_refused(body_format: str) -> None:
    body = write(body_format, pa.table({"a": pa.array([1], pa.timestamp("ns"))}))
    assert "column a is not timestamp[us]: " in refusal(body_format, body, fields(a=pa.timestamp("us")))


@pytest.mark.parametrize("body_format", NESTING)
def test_a_null_that_must_not_be_is_refused_at_any_depth(body_format: str) -> None:
    number, some = pa.int64(), pa.field("element", pa.int64(), nullable=False)
    cases: list[tuple[str, pa.DataType, pa.DataType, object]] = [
        ("a", number, number, None),
        ("a[]", pa.list_(number), pa.list_(some), [1, None]),
        ("a[][]", pa.list_(pa.list_(number)), pa.list_(pa.list_(some)), [None, [None]]),
        ("a{}", pa.map_(pa.string(), number), pa.map_(pa.string(), some), [("k", None)]),
    ]
    for where, have, want, value in cases:
        body = write(body_format, pa.table({"a": pa.array([value], have)}))
        schema = pa.schema([pa.field("a", want, nullable=where != "a")])
        assert refusal(body_format, body, schema).endswith(f"column {where} is null, and must not be")


def test_a_missing_column_that_must_not_be_null_is_refused() -> None:
    for body_format in ("jsonl", "csv", *COLUMNAR):
        body = write(body_format, pa.table({"b": [1]}))
        said = refusal(body_format, body, pa.schema([pa.field("a", pa.int8(), nullable=False), ("b", pa.int64())]))
        assert said.endswith("column a is null, and must not be")


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_the_older_timestamps_of_parquet_are_instants_or_local_as_is_wanted(zone: str | None) -> None:
    noon, last = datetime(2024, 1, 1, 12), datetime(9999, 12, 31, 23, 59, 59, 999999)
    in_zone = [moment.replace(tzinfo=UTC if zone else None) for moment in (noon, last)]
    naive, want = pa.timestamp("us"), pa.timestamp("us", zone)
    table = pa.table(
        {
            "n": [1, 2],
            "at": pa.array([noon, last], naive),
            "l": pa.array([[noon, None], None], pa.list_(naive)),
            "s": pa.array([{"x": 1, "y": [("k", last)]}, None], pa.struct([("x", pa.int8()), ("y", _texts_to(naive))])),
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file, use_deprecated_int96_timestamps=True)  # as Spark does, unless it is told otherwise
    found = read("parquet", file.getvalue(), fields(at=want, l=pa.list_(want), s=pa.struct([("y", _texts_to(want))])))
    assert found == [
        {"at": in_zone[0], "l": [in_zone[0], None], "s": {"y": [("k", in_zone[1])]}},
        {"at": in_zone[1], "l": None, "s": None},
    ]
    for kind in (pa.int64(), pa.date32(), pa.string()):
        assert refusal("parquet", file.getvalue(), fields(at=kind)) == f"column at is int96, and {kind} is wanted"


def _texts_to(kind: pa.DataType) -> pa.DataType:
    return pa.map_(pa.string(), kind)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body_format", COLUMNAR)
@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [
        (pa.string(), "k", "l"),
        (pa.int8(), 1, 2),
        (pa.decimal128(5, 2), Decimal("1.50"), Decimal("2.50")),
        (pa.timestamp("us", "UTC"), datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC)),
        (pa.struct([("x", pa.int8())]), {"x": 1}, {"x": 2}),
    ],
)
def test_a_map_with_a_key_twice_is_refused_at_any_depth(
    body_format: str, kind: pa.DataType, one: Any, two: Any
) -> None:
    maps = pa.map_(kind, pa.int8())
    good, bad = [[(one, 1)], None, [], [(one, 1), (two, 1)]], [[(one, 1)], None, [(one, 1), (two, 2), (one, 3)]]
    body = write(body_format, pa.table({"m": pa.array(good, maps)}))
    assert read(body_format, body, fields(m=maps)) == [{"m": value} for value in good]
    body = write(body_format, pa.table({"m": pa.array(bad, maps)}))
    assert refusal(body_format, body, fields(m=maps)) == "column m has a key twice"
    deep = pa.list_(pa.struct([("m", maps)]))
    body = write(body_format, pa.table({"l": pa.array([[], [{"m": value} for value in bad]], deep)}))
    assert refusal(body_format, body, fields(l=deep)) == "column l[].m has a key twice"


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_maps_of_structs_with_columns_of_nulls_are_read_beyond_the_first_batch(body_format: str) -> None:
    kind = pa.map_(pa.int8(), pa.struct([("x", pa.null()), ("y", pa.int64())]))
    table = pa.table({"m": pa.array([[(1, {"x": None, "y": 2})]] * (2 * ROWS + 9), kind)})
    file = io.BytesIO()
    BODIES[body_format](file, table.schema, table.to_batches())
    assert read(body_format, file.getvalue(), table.schema) == table.to_pylist()


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_a_wanted_field_of_a_struct_that_is_there_twice_is_refused(body_format: str) -> None:
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"])
    body = write(body_format, pa.table({"s": struct}))
    assert refusal(body_format, body, fields(s=pa.struct([("x", pa.int64())]))) == "column s.x is there twice"
    assert read(body_format, body, fields(s=pa.struct([("y", pa.int64())]))) == [{"s": {"y": 3}}]


@pytest.mark.parametrize("body_format", ["csv", *COLUMNAR])
def test_a_wanted_column_that_is_there_twice_is_refused(body_format: str) -> None:
    body = write(body_format, pa.table([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "a", "b"]))
    assert refusal(body_format, body, fields(a=pa.int64())) == "column a is there twice"
    assert read(body_format, body, fields(b=pa.int64())) == [{"b": 3}]


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        (pa.int8(), "128", None),
        (pa.int32(), "1.0", None),
        (pa.int32(), "true", None),
        (pa.int64(), "1e400", None),
        (pa.bool_(), "1", None),
        (pa.float32(), "3.5e38", None),
        (pa.float64(), "1e400", None),
        (pa.float64(), "1" * 400, f"{'1' * 60}..."),
        (pa.float64(), '"inf"', None),
        (pa.float64(), "false", None),
        (pa.decimal128(5, 2), "1.234", None),
        (pa.decimal128(5, 2), "1234", None),
        (pa.decimal128(5, 2), "1e999999999999999999", None),
        (pa.decimal128(5, 2), "NaN", None),
        (pa.decimal128(5, 2), '"1.5"', None),
        (pa.string(), "1.5", None),
        (pa.string(), '"\\ud800"', None),
        (pa.binary(), '"a"', None),
        (pa.binary(), '"\u00e4"', '"\\u00e4"'),
        (pa.date32(), '"2024-02-30"', None),
        (pa.timestamp("us", "UTC"), '"2024-01-01T00:00:00"', None),
        (pa.timestamp("us"), '"2024-01-01T00:00:00Z"', None),
        (pa.timestamp("us"), '"2024-01-01T00:00:00.1234567"', None),
        (pa.timestamp("us", "UTC"), '"2024-01-01T00:00:00+00:00:00.5"', None),
        (pa.timestamp("us", "UTC"), '"20240101T000000-010000.000001"', None),
        (pa.timestamp("us"), "0", None),
        (pa.null(), "0", None),
    ],
)
def test_a_value_of_jsonl_that_does_not_fit_is_refused_with_its_line(
    kind: pa.DataType, value: str, shown: str | None
) -> None:
    said = f"is {shown or value}, and {kind} is wanted"
    body = '{"a":null}\n\n{"a":%s}\n'
    assert refusal("jsonl", (body % value).encode(), fields(a=kind)) == f"line 3: column a {said}"
    deep = pa.struct([("s", pa.list_(kind))])
    assert refusal("jsonl", (body % f'{{"s":[{value}]}}').encode(), fields(a=deep)) == f"line 3: column a.s[] {said}"


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.float64(), "9007199254740993", 2.0**53),
        (pa.float64(), "Infinity", float("inf")),
        (pa.float32(), "3.4028235e38", float.fromhex("0x1.fffffep127")),
        (pa.decimal128(5, 2), "1.2300", Decimal("1.23")),
        (pa.decimal128(38, 2), f"{'9' * 36}.99", Decimal(f"{'9' * 36}.99")),
        (pa.decimal128(5, 2), "12e1", Decimal("120.00")),
        (pa.timestamp("us", "UTC"), '"2024-01-01T01:00:00+01:00"', datetime(2024, 1, 1, tzinfo=UTC)),
        (
            pa.timestamp("us", "UTC"),
            '"2024-01-01T00:00:30.5+00:00:30"',
            datetime(2024, 1, 1, 0, 0, 0, 500000, tzinfo=UTC),
        ),
        (pa.timestamp("us"), '"2024-01-01 00:00:00.123456000"', datetime(2024, 1, 1, microsecond=123456)),
        (pa.map_(pa.int32(), pa.int8()), '{"-1": null}', [(-1, None)]),
        (pa.map_(pa.date32(), pa.int8()), '{"2024-01-01": 1}', [(date(2024, 1, 1), 1)]),
        (pa.struct([("x", pa.int8())]), "{}", {"x": None}),
    ],
)
def test_what_others_may_write_in_jsonl_is_read(kind: pa.DataType, value: str, expected: object) -> None:
    assert read("jsonl", f'  {{"a" : {value}}}\r\n'.encode(), fields(a=kind)) == [{"a": expected}]


def test_an_integer_that_nobody_wants_may_have_any_number_of_digits() -> None:
    line = b'{"a":1,"b":[%s]}\n' % (b"9" * 5000)
    assert read("jsonl", line, fields(a=pa.int64())) == [{"a": 1}]


@pytest.mark.parametrize(
    ("body_format", "body"), [("jsonl", b'{"a":"x"}'), ("csv", b"a\nx\n"), ("csv", b'"a"\nx\n'), ("text", b"x")]
)
def test_a_mark_before_utf_8_is_no_part_of_the_first_line(body_format: str, body: bytes) -> None:
    assert read(body_format, codecs.BOM_UTF8 + body, fields(a=pa.string())) == [{"a": "x"}]
    assert read(body_format, codecs.BOM_UTF8, fields(a=pa.string())) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a":1', "line 2 is not JSON: Expecting ',' delimiter at character 6"),
        (b"\xff", "line 2 is not UTF-8: invalid start byte at byte 0"),
        (b"[1]", "line 2: the row is [1], and an object is wanted"),
        (b"null", "line 2: the row is null, and an object is wanted"),
        (b'{"x":' + b"[" * 100_000, "line 2 is JSON that is nested too deeply"),
        (b'{"a":1,"b":2,"a":1}', 'line 2: "a" is there twice in an object'),
        (b'{"x":[{"\xc3\xa4":1,"\xc3\xa4":2}]}', 'line 2: "\\u00e4" is there twice in an object'),
        (b'{"a":1} {"a":2}', "line 2 is not JSON: Extra data at character 7"),
        (b'{"a":' + b"1" * 5000 + b"}", f"line 2: column a is {'1' * 60}..., and int8 is wanted"),
        (b'{"d":{"2024-01-01":1,"20240101":2}}', "line 2: column d has a key twice"),
        (b'{"m":[]}', "line 2: column m is [], and an object is wanted"),
        (b'{"m":{"01":2}}', 'line 2: the key of column m is "01", and int64 is wanted'),
        (b'{"m":{"1":"2"}}', 'line 2: column m{} is "2", and int8 is wanted'),
        (b'{"l":{}}', "line 2: column l is {}, and a list is wanted"),
    ],
)
def test_a_line_of_jsonl_that_is_no_row_is_refused_with_its_number(line: bytes, said: str) -> None:
    maps = {"m": pa.map_(pa.int64(), pa.int8()), "d": pa.map_(pa.date32(), pa.int8())}
    schema = fields(a=pa.int8(), **maps, l=pa.list_(pa.int8()))
    assert refusal("jsonl", b'{"a":1}\n' + line, schema).startswith(said)


@pytest.mark.parametrize("before", [1, SMALLEST])
@pytest.mark.parametrize("blanks", ["\xa0", "\x1c", "\u3000 \u2028"])
def test_a_line_of_jsonl_of_other_blanks_than_those_of_ascii_is_refused_in_a_body_of_any_size(
    blanks: str, before: int
) -> None:
    lines = b'{"a":1}\n' * before
    said = refusal("jsonl", lines + blanks.encode(), fields(a=pa.int8()))
    assert said.startswith(f"line {before + 1} is not JSON")
    assert len(read("jsonl", lines + b" \t\r\v\f\n\n", fields(a=pa.int8()))) == before


def test_lines_are_counted_beyond_the_first_batch() -> None:
    lines = [b'{"a":"%s"}\n' % (b"x" * (number % 99)) for number in range(CHUNK // 20)]
    assert refusal("jsonl", b"".join([*lines, b'{"a":0}']), fields(a=pa.string())).startswith(f"line {len(lines) + 1}:")
    assert refusal("text", b"\n" * 2 * ROWS + b"\xc3\n", fields(a=pa.string())).startswith(f"line {2 * ROWS + 1} is")
    body = b"a\n" + b"1\n" * CHUNK + b"x\n"
    assert refusal("csv", body, fields(a=pa.int8())).startswith(f"row {CHUNK + 2} (the header is row 1), column a: ")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), "128"),
        (pa.int8(), "0xFF"),
        (pa.int64(), "0Xffffffffffffffff"),
        (pa.int64(), "-0x1"),
        (pa.int32(), "1.0"),
        (pa.int32(), "1e2"),
        (pa.int32(), '""'),
        (pa.float64(), "much"),
        (pa.float64(), "1e400"),
        (pa.float64(), "-1e400"),
        (pa.float32(), "3.5e38"),
        (pa.float32(), "1" * 40),
        (pa.bool_(), "yes"),
        (pa.decimal128(5, 2), "1.234"),
        (pa.decimal128(5, 2), "1e999999999"),
        (pa.string(), b"\xff"),
        (pa.date32(), "2024-02-30"),
        (pa.timestamp("us", "UTC"), "2024-01-01 00:00:00"),
        (pa.timestamp("us"), "2024-01-01 00:00:00Z"),
        (pa.timestamp("us"), "2024-01-01 00:00:00.1234567"),
    ],
)
def test_a_value_of_csv_that_does_not_fit_is_refused_with_its_row(kind: pa.DataType, value: str | bytes) -> None:
    raw = value if isinstance(value, bytes) else value.encode()
    body = b'"b","a"\n"two\nlines",\n"",%s\n' % raw
    assert refusal("csv", body, fields(a=kind)).startswith("row 3 (the header is row 1), column a: ")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.int64(), "007", 7),
        (pa.int64(), '" -0\t"', 0),
        (pa.float64(), " 1.5", 1.5),
        (pa.float64(), "inf", float("inf")),
        (pa.float32(), "-Infinity", -float("inf")),
        (pa.float32(), "3.4028235e38", float.fromhex("0x1.fffffep127")),
        (pa.float32(), "1e-60", 0.0),
    ],
)
def test_numbers_that_others_may_write_in_csv_are_read(kind: pa.DataType, value: str, expected: float) -> None:
    body = f"b,a\nx,\nx,{value}\nx,0\n".encode()
    assert [row["a"] for row in read("csv", body, fields(a=kind))] == [None, expected, 0]


def test_a_number_of_csv_that_does_not_fit_is_found_beyond_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "CHUNK", 100)
    body = b"n,a\n" + b"".join(b"%d,7\n" % number for number in range(999)) + b"0,0x7\n"
    assert refusal("csv", body, fields(a=pa.int8())) == 'row 1001 (the header is row 1), column a: "0x7" is not int8'


@pytest.mark.parametrize(
    ("body", "opening"),
    [(b'a,b\n1,"hello wor', 6), (b'a,b\n1,"x\n2,y\n3,z\n', 6), (b'a,"b\n1,x\n', 2), (b'a,b\n1,"x""\n2,y', 6)],
)
@pytest.mark.parametrize("chunk", [CHUNK, 3])
def test_a_body_of_csv_that_is_cut_off_in_quotes_is_refused(
    body: bytes, opening: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "CHUNK", chunk)
    said = f"a quote is open at the end: it opens at byte {opening}"
    assert refusal("csv", body, fields(a=pa.int64(), b=pa.string())) == said


def test_csv_without_quotes_has_them_in_its_texts() -> None:
    body = b'a;b\n"x;5" pipe\n"1";"\n'
    (batch,) = read_csv(io.BytesIO(body), fields(a=pa.string(), b=pa.string()), False, csv=CsvOptions(";", "\0"))
    assert [tuple(row.values()) for row in batch.to_pylist()] == [('"x', '5" pipe'), ('"1"', '"')]


def test_a_text_for_null_is_one_without_quotes_alone() -> None:
    schema, body = fields(a=pa.int64(), b=pa.string()), b'a;b\nNULL;"NULL"\n1;NULL\n;""\n'
    (batch,) = read_csv(io.BytesIO(body), schema, False, csv=CsvOptions(sep=";", null="NULL"))
    assert [tuple(row.values()) for row in batch.to_pylist()] == [(None, "NULL"), (1, None), (None, "")]


def test_empty_lines_among_several_columns_of_csv_are_no_rows() -> None:
    schema = fields(a=pa.int64(), b=pa.string())
    rows = [{"a": 1, "b": "x\n\ny"}, {"a": None, "b": None}]
    assert read("csv", b'\r\n\na,b\n\n1,"x\n\ny"\r\n\r\n,\n\n', schema) == rows
    assert read("csv", b"\n\n", schema) == []


def test_empty_lines_in_one_column_of_csv_are_nulls() -> None:
    assert read("csv", b"\na\n1\n\n2\n\n", fields(a=pa.int64())) == [{"a": 1}, {"a": None}, {"a": 2}, {"a": None}]


@pytest.mark.parametrize("chunk", [CHUNK, 3])
@pytest.mark.parametrize(
    ("body", "texts"), [(b"a,b", ""), (b'"a","b"', ""), (b'a,b\n"x",', "x"), (b'a,b\n"x",\ny,\n"z",', "xyz")]
)
@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.date32(), pa.bool_()])
def test_a_last_row_of_csv_without_a_line_feed_is_read_as_one_with_it(
    body: bytes, texts: str, kind: pa.DataType, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "CHUNK", chunk)
    schema, rows = fields(a=pa.string(), b=kind), [{"a": text, "b": None} for text in texts]
    assert read("csv", body, schema) == read("csv", body + b"\n", schema) == rows


def test_a_row_of_csv_with_a_cell_too_many_is_refused_with_its_row() -> None:
    said = refusal("csv", b"a,b\n1,2\n1,2,3\n", fields(a=pa.int8()))
    assert said == "row 3 (the header is row 1): Expected 2 columns, got 3: 1,2,3"


@pytest.mark.parametrize("kind", [pa.binary(), pa.list_(pa.int8()), pa.duration("us")])
def test_a_type_that_csv_does_not_hold_is_refused(kind: pa.DataType) -> None:
    for body in (b"", b"a\n1\n"):
        assert refusal("csv", body, fields(a=kind)) == f"column a is {kind}, which csv does not hold"


def test_a_type_that_jsonl_does_not_hold_is_refused() -> None:
    schema = fields(a=pa.list_(pa.duration("us")))
    assert refusal("jsonl", b"", schema) == "column a[] is duration[us], which jsonl does not hold"


@pytest.mark.parametrize("schema", [fields(a=pa.int8()), fields(a=pa.string(), b=pa.int8()), fields()])
def test_text_is_one_column_of_strings(schema: pa.Schema) -> None:
    assert refusal("text", b"x\n", schema).startswith("text is one column of strings, and ")


# -- streams -------------------------------------------------------------------------------------------------------


class Counted(io.BytesIO):
    """A file that counts the bytes it gives."""

    given = 0

    def read(self, size: int | None = -1, /) -> bytes:
        got = super().read(size)
        self.given += len(got)
        return got


@pytest.mark.parametrize("body_format", ["jsonl", "text", "csv", "arrow"])
def test_the_first_rows_come_before_the_rest_is_read(body_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": pa.array([f"{number:0100d}" for number in range(50_000)])})
    file = io.BytesIO()
    BODIES[body_format](file, table.schema, table.to_batches(max_chunksize=10_000))
    size = file.tell()
    file.seek(0)
    monkeypatch.setattr(decoders, "CHUNK", 4 << 10)  # Arrow reads ahead some blocks of csv
    batches = PARSERS[body_format](file, table.schema, False)
    first = next(batches)
    assert first.num_rows <= ROWS and file.tell() < size / 2
    assert pa.Table.from_batches([first, *batches]).equals(table)


def test_columns_of_parquet_that_nobody_wants_are_not_read() -> None:
    noise = random.Random(1).randbytes(1 << 20)
    file = Counted(write("parquet", pa.table({"noise": [noise, noise[::-1]], "a": [1, 2]})))
    (batch,) = PARSERS["parquet"](file, fields(a=pa.int64()), False)
    assert batch.to_pylist() == [{"a": 1}, {"a": 2}]
    assert file.given < len(noise)


@pytest.mark.parametrize("field", [b'5" pipe', b'5"" pipe"', b' "5 x pipe"'])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_quote_inside_a_field_of_csv_hides_no_row(field: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "CHUNK", 4 << 10)
    body = end.join([b"a,b", b"1," + field, *[b"2,of many"] * 50_000, b""])
    file = io.BytesIO(body)
    batches = PARSERS["csv"](file, fields(a=pa.int64(), b=pa.string()), False)
    first = next(batches)
    assert first.column("b")[1].as_py() == "of many"
    assert file.tell() < len(body) / 2
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 50_001


def as_arrow_reads(body: bytes, schema: pa.Schema) -> list[Any] | None:
    """Return the rows of csv as Arrow reads it whole; None if it does not, or a quote is open at the end."""
    end = dict.fromkeys(schema.names, "end")
    try:
        table = pa_csv.read_csv(
            io.BytesIO(body + b"\n%s\n" % ",".join(end.values()).encode()),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=schema, strings_can_be_null=True, null_values=[""], quoted_strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid:
        return None
    *rows, last = table.to_pylist()
    return rows if last == end else None


cells = st.text('a"\r\n', max_size=5)
#: Finds a text behind a closing quote, in csv that is split by commas and line breaks outside of quotes.
BEHIND = re.compile(rb'\A(?:(?:[^",\r\n][^,\r\n]*|(?:"[^"]*")+(?=[,\r\n]|\Z))?[,\r\n])*(?:"[^"]*")+[^",\r\n]')


@given(st.lists(st.tuples(cells, cells, st.sampled_from(("\n", "\r", "\r\n", ",\n"))), max_size=6), st.integers(1, 9))
@example([('"', '"', "\n"), ("", '"a"', "\n")], 1)
@example([("", '"\r\n"', "\r\n")], 1)
@example([('a"', '"', "\n"), ("", '""a"', "\r")], 1)
def test_rows_of_csv_are_what_arrow_takes_for_rows(rows: list[tuple[str, str, str]], chunk: int) -> None:
    schema = fields(x=pa.string(), y=pa.string())
    body = "".join(["x,y\n", *(f"{x},{y}{end}" for x, y, end in rows)]).encode()
    expected = as_arrow_reads(body, schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "CHUNK", chunk)
        if expected is None or BEHIND.search(body):
            refusal("csv", body, schema)
        else:
            assert read("csv", body, schema) == expected


@pytest.mark.parametrize("escape", ['"', "\\"])
@pytest.mark.parametrize(("sep", "quote"), [(";", '"'), ("\t", "'"), ('"', ","), ("'", '"'), ('"', ";")])
@given(st.lists(st.tuples(*[st.text("a,;'\"\t\r\n\\\0", max_size=5)] * 2), max_size=6), st.integers(1, 9))
def test_csv_with_another_separator_or_quote_is_read_as_the_usual_one_is(
    sep: str, quote: str, escape: str, rows: list[tuple[str, str]], chunk: int
) -> None:
    """A row that is right in one is right in the other, with these characters in each other's places."""
    schema, csv_options = fields(x=pa.string(), y=pa.string()), CsvOptions(sep, quote, escape)
    table = decoders._dialect(csv_options)
    usual = "".join(["x,y\n", *(f"{x},{y}\n" for x, y in rows)]).encode()

    def outcome(body: bytes, given: CsvOptions) -> list[tuple[str | None, ...]] | str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoders, "CHUNK", chunk)
            try:
                batches = list(read_csv(io.BytesIO(body), schema, False, csv=given))
            except BadBody:
                return "refused"  # which of two errors is met first depends on the blocks
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    def back(found: list[tuple[str | None, ...]] | str) -> list[tuple[str | None, ...]] | str:
        if isinstance(found, str):
            return found
        return [tuple(cell and cell.encode().translate(table.to).decode() for cell in row) for row in found]

    assert back(outcome(usual.translate(table.back), csv_options)) == outcome(usual, CsvOptions(escape=escape))


@pytest.mark.parametrize("chunk", [CHUNK, 3])
@pytest.mark.parametrize(
    ("escape", "row", "byte"),
    [
        ('"', b'"x"y,z', 3),
        ('"', b'1,"x"y', 5),
        ('"', b'"""a"b"",c', 5),
        ('"', b'1,"x\\"y"', 6),
        ('"', b'"\n" ,z', 3),
        ("\\", b'"x"y,z', 3),
        ("\\", b'1,"x""y"', 5),
        ("\\", b'1,"x\\\\"y"', 7),
    ],
)
def test_text_behind_a_closing_quote_of_csv_is_refused(
    escape: str, row: bytes, byte: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers differ in what they take it for: Arrow drops the quotes."""
    monkeypatch.setattr(decoders, "CHUNK", chunk)
    for body in (b"a,b\n%s\n" % row, b"a,b\n%s" % row, b"a,b\n%s\n3,4\n" % row):
        with pytest.raises(BadBody) as caught:
            list(read_csv(io.BytesIO(body), fields(a=pa.string(), b=pa.string()), False, csv=CsvOptions(escape=escape)))
        assert str(caught.value).startswith(f"text is behind a closing quote, at byte {4 + byte}: ")
        assert "the option escape=\\" in str(caught.value) or "with escape=\\" in str(caught.value)


@pytest.mark.parametrize("chunk", [CHUNK, 3])
def test_csv_whose_quotes_have_backslashes_is_read_with_the_option_and_never_moves_text_between_columns(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is how Spark's own csv writes these texts."""
    monkeypatch.setattr(decoders, "CHUNK", chunk)
    schema = fields(k=pa.int64(), t=pa.string(), u=pa.string())
    rows: list[tuple[bytes, str]] = [
        (rb'"say \"hi\"",x', 'say "hi"'),
        (rb"back\slash\,x", "back\\slash\\"),
        (rb'"a\\,b",x', "a\\,b"),
        (rb'"\"\\",x', '"\\'),
        (rb'"a\b,",x', "a\\b,"),
        (b'"a\\\\\nb",x', "a\\\nb"),
        (rb'"",x', ""),
    ]
    for written, text in rows:
        body = b'k,"t",u\n7,' + written + b"\n"
        found = read_csv(io.BytesIO(body), schema, False, csv=CsvOptions(escape="\\"))
        assert [row for batch in found for row in batch.to_pylist()] == [{"k": 7, "t": text, "u": "x"}]
    moving = rb'7,"x\"",",y"'
    ((row,),) = [
        batch.to_pylist()
        for batch in read_csv(io.BytesIO(b"k,t,u\n" + moving), schema, False, csv=CsvOptions(escape="\\"))
    ]
    assert row == {"k": 7, "t": 'x"', "u": ",y"}
    for body in (b"k,t,u\n" + moving, b"k,t,u\n8,a,b\n" + moving + b"\n", b'k,t,u\n8,"a\\",b\n9,5" pipe,c\n'):
        said = refusal("csv", body, schema)
        assert said.startswith("a quote is in a field that does not begin with one, at byte ")
        assert "give the option escape=\\" in said
    fine = b'k,t,u\n8,5" pipe,b\n9,"a\\""b",c\n7,"end\\","x"\n'
    assert [row["t"] for row in read("csv", fine, schema)] == ['5" pipe', 'a\\"b', "end\\"]


@pytest.mark.parametrize(
    ("csv_options", "rows"),
    [
        (CsvOptions(), [b"a,b", b'1,"x\r\n""\n"', b"", b'2" ,y', b"", b'"",', b"3,z"]),
        (CsvOptions(escape="\\"), [b"a,b", b'1,"\\"\n\\\\"', b"\\,", b""]),
        (CsvOptions(";", "'"), [b"a;b", b"1;'it''s\n;'", b'2;"', b'";,', b""]),
        (CsvOptions(quote="\0"), [b"a,b", b'1,"', b'",2', b""]),
        (CsvOptions(), [b"a,b", b'1,"open\n2,y\n']),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_csv_is_split_at_line_ends_outside_of_quotes_alone(
    csv_options: CsvOptions, rows: list[bytes], end: bytes
) -> None:
    assert csv_rows(end.join(rows), csv_options) == rows


@pytest.mark.parametrize("body_format", ["csv", *COLUMNAR])
@pytest.mark.parametrize("near", [" b", "B", "b ", " B\t"])
def test_a_column_whose_name_differs_in_case_or_blanks_alone_is_refused_and_not_null(
    body_format: str, near: str
) -> None:
    body = write(body_format, pa.table([pa.array([1]), pa.array([2])], ["a", near]))
    schema = fields(a=pa.int64(), b=pa.int64())
    said = f"column b is not there, and {json.dumps(near)} is: name the one as the other"
    assert refusal(body_format, body, schema) == said
    assert read(body_format, body, fields(a=pa.int64(), c=pa.int64())) == [{"a": 1, "c": None}]
    both = write(body_format, pa.table([pa.array([1]), pa.array([2])], ["b", near]))
    assert read(body_format, both, fields(b=pa.int64(), c=pa.int64())) == [{"b": 1, "c": None}]
    assert read(body_format, both, pa.schema([("b", pa.int64()), (near, pa.int64())])) == [{"b": 1, near: 2}]


@pytest.mark.parametrize("body_format", COLUMNAR)
def test_a_field_of_a_struct_whose_name_differs_in_case_alone_is_refused(body_format: str) -> None:
    body = write(body_format, pa.table({"s": [{"x": 1, "Y": 2}]}))
    kind = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    assert (
        refusal(body_format, body, fields(s=kind)) == 'column s.y is not there, and "Y" is: name the one as the other'
    )


@pytest.mark.parametrize("end", ["\r\n", ""])
@given(st.lists(st.tuples(texts, texts), max_size=6), st.integers(1, 9))
@example([(",", "")], 9)
def test_what_python_writes_as_csv_comes_back(end: str, rows: list[tuple[str, str]], chunk: int) -> None:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("x", "y"), *rows])
    body = file.getvalue().removesuffix("\r\n") + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "CHUNK", chunk)
        found = read("csv", body.encode(), fields(x=pa.string(), y=pa.string()))
    assert found == [{"x": x or None, "y": y or None} for x, y in rows]


@pytest.mark.parametrize(
    ("body_format", "before", "long", "said"),
    [
        (
            "jsonl",
            b'{"a":"1"}\n',
            b'{"a":"%s"}',
            "line 2 is longer than the 100 bytes that a value of Spark has at most",
        ),
        ("text", b"1\n", b"%s", "line 2 is longer than the 100 bytes that a value of Spark has at most"),
        ("csv", b"a\n1\n", b"%s", "the row at byte 4 is longer than the 100 bytes that a value of Spark has at most"),
        (
            "csv",
            b"a\n1\n",
            b'"\n%s"',
            "the row at byte 4 is longer than the 100 bytes that a value of Spark has at most",
        ),
        ("csv", b"", b"%s", "the row at byte 0 is longer than the 100 bytes that a value of Spark has at most"),
    ],
)
@pytest.mark.parametrize("chunk", [CHUNK, 16])
def test_a_line_that_no_value_of_spark_holds_is_refused_and_not_read_whole(
    body_format: str, before: bytes, long: bytes, said: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "CHUNK", chunk)
    monkeypatch.setattr(decoders, "LONGEST", 100)
    schema = fields(a=pa.string())
    assert len(read(body_format, (before or b"a\n1\n") + long % (b"x" * 70) + b"\n", schema)) == 2
    file = io.BytesIO(before + long % (b"x" * (1 << 20)) + b"\n")
    with pytest.raises(BadBody) as caught:
        list(PARSERS[body_format](file, schema, False))
    assert str(caught.value) == said and file.tell() <= chunk + 200


@given(st.lists(st.text("ab\n\"',", max_size=40), min_size=1, max_size=5), st.integers(0, 3))
def test_a_row_of_csv_may_be_longer_than_what_is_read_at_once(cells: list[str], repeat: int) -> None:
    table = pa.table({"x": cells, "y": [cell * (1 << repeat) for cell in cells]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "CHUNK", 8)
        assert read("csv", write("csv", table), table.schema) == table.to_pylist()


# -- bodies that are damaged, and disks that are ---------------------------------------------------------------------

DAMAGED = fields(
    i=pa.int32(),
    s=pa.string(),
    d=pa.decimal128(9, 2),
    at=pa.timestamp("us", "UTC"),
    l=pa.list_(pa.string()),
    m=pa.map_(pa.string(), pa.int32()),
    st=pa.struct([("x", pa.float64()), ("y", pa.binary())]),
)


def whole_body(body_format: str) -> tuple[bytes, pa.Schema]:
    """Return a body of all the types that a format has, and its schema."""
    rows = [
        {
            "i": number,
            "s": 'caf\u00e9, "\n' * (number % 4) if number % 3 else None,
            "d": Decimal(number) / 4,
            "at": datetime(2024, 1, 1, tzinfo=UTC),
            "l": ["a", None, "b" * number],
            "m": [(f"k{number}", number)],
            "st": {"x": number / 3, "y": b"\xff"} if number % 4 else None,
        }
        for number in range(20)
    ]
    names = {"text": ["s"], "csv": ["i", "s", "d", "at"]}.get(body_format, DAMAGED.names)
    table = pa.Table.from_pylist(rows, DAMAGED).select(names)
    return write(body_format, table), table.schema


WHOLE = {body_format: whole_body(body_format) for body_format in BODIES}


def outcome(body_format: str, body: bytes, schema: pa.Schema) -> str | None:
    """Read a body, and return what is said against it if anything."""
    try:
        for batch in PARSERS[body_format](io.BytesIO(body), schema, False):
            batch.validate(full=True)
            assert batch.schema.equals(schema)
    except BadBody as error:
        return str(error)
    return None


@given(st.sampled_from(BODY_FORMATS), st.binary() | st.text("{}[]\"',:\\0aeE-.\n").map(str.encode))
def test_any_bytes_are_a_body_or_a_bad_one(body_format: str, body: bytes) -> None:
    outcome(body_format, body, WHOLE[body_format][1])


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_a_body_that_is_cut_off_is_a_shorter_or_a_bad_one(body_format: str) -> None:
    body, schema = WHOLE[body_format]
    assert outcome(body_format, body, schema) is None
    said = {outcome(body_format, body[:end], schema) for end in range(len(body))}
    if body_format == "parquet":
        assert None not in said


@given(st.sampled_from(BODY_FORMATS), st.data())
def test_a_body_with_garbled_bytes_is_another_or_a_bad_one(body_format: str, data: st.DataObject) -> None:
    body, schema = WHOLE[body_format]
    garbled = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        garbled[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    outcome(body_format, bytes(garbled), schema)


def test_a_length_that_no_memory_has_is_a_bad_body(tmp_path: Path) -> None:
    body, schema = WHOLE["arrow"]
    reader = pa.ipc.MessageReader.open_stream(io.BytesIO(body))
    length = next(message.body.size for message in reader if message.type == "record batch").to_bytes(8, "little")
    path = tmp_path / "body"
    path.write_bytes(body.replace(length, (1 << 50).to_bytes(8, "little")))
    with path.open("rb") as file, pytest.raises(BadBody, match="arrow body cannot be read: MemoryError"):
        list(PARSERS["arrow"](file, schema, False))


class Failing(io.BytesIO):
    """A file on a disk that fails."""

    error: Exception = OSError(5, "Input/output error")

    def fail(self, *args: Any) -> Any:
        raise self.error

    read = readinto = readline = readlines = __next__ = fail


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_a_disk_that_fails_is_no_bad_body(body_format: str) -> None:
    body, schema = WHOLE[body_format]
    with pytest.raises(OSError, match="Input/output error"):
        list(PARSERS[body_format](Failing(body), schema, False))


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_a_body_that_memory_does_not_hold_is_a_bad_one(body_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, schema = WHOLE[body_format]
    monkeypatch.setattr(Failing, "error", MemoryError())
    with pytest.raises(BadBody, match=f"^the {body_format} body cannot be read: "):
        list(PARSERS[body_format](Failing(body), schema, False))
