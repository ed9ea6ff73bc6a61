"""jsonl is written and read by columns, and is what it would be row by row."""

from __future__ import annotations

import io
import json
import math
from decimal import Decimal
from typing import Any

import jsonl_by_rows
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_spark_parsing import flat_kinds, nested_kinds, tables

from dropq.spark import encoders, json_layout
from dropq.spark.arrow_cast import ROWS, BadBody
from dropq.spark.decoders import PARSERS
from dropq.spark.encoders import BODIES


def written(table: pa.Table, size: int | None = None) -> bytes:
    file = io.BytesIO()
    BODIES["jsonl"](file, table.schema, table.to_batches(max_chunksize=size))
    return file.getvalue()


def column(*values: Any, kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"a": pa.array(values, kind)})


# -- written -------------------------------------------------------------------------------------------------------


@given(tables(nested_kinds), st.integers(0, 9), st.integers(1, 9))
@example(pa.table({"a": [None, "x", None, None], "b": [None, None, None, 1]}), 0, 2)
@example(pa.table({"a": pa.nulls(3)}), 0, 9)
@example(pa.table({"a": pa.array([], pa.list_(pa.string()))}), 0, 9)
def test_columns_are_written_as_rows_are(table: pa.Table, start: int, size: int) -> None:
    part = table.slice(min(start, table.num_rows))  # Arrow dies of a start behind the end
    assert written(part, size) == jsonl_by_rows.jsonl(part)


doubles = st.floats() | st.integers(-(2**60), 2**60).map(float) | st.decimals(allow_nan=False, places=6).map(float)


@given(st.lists(doubles, min_size=1, max_size=50))
@example([sign * 10.0**exponent for sign in (1, -1) for exponent in range(-20, 25)])
@example([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e9, math.nextafter(1e9, 0), 1e-3, math.nextafter(1e-3, 1)])
def test_doubles_have_the_digits_that_python_gives_them(values: list[float]) -> None:
    table = column(*values)
    assert written(table) == jsonl_by_rows.jsonl(table)


@given(st.lists(st.text(), max_size=50))
@example(["".join(map(chr, range(256))), '"', "\\", "\x7f\x80\u2028\ufeff\U0001f600", ""])
def test_texts_are_quoted_as_python_quotes_them(values: list[str]) -> None:
    table = column(*values, kind=pa.string())
    assert written(table) == jsonl_by_rows.jsonl(table)


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, min_value=-10, max_value=10, places=30)))
@example([Decimal("1E-30"), Decimal("-1E-7"), Decimal(0)])
def test_decimals_keep_every_digit_and_have_no_exponent(values: list[Decimal]) -> None:
    table = column(*values, kind=pa.decimal128(38, 30))
    assert b"E" not in written(table)
    assert written(table) == jsonl_by_rows.jsonl(table)


def test_large_types_and_other_units_are_written_as_the_plain_ones() -> None:
    kind = pa.struct([("t", pa.large_string()), ("l", pa.large_list(pa.large_string())), ("b", pa.large_binary())])
    table = column({"t": "x", "l": ["a", None], "b": b"\xff"}, None, {"t": None, "l": [], "b": None}, kind=kind)
    assert written(table) == jsonl_by_rows.jsonl(table)
    for unit in ("s", "ms", "us"):
        table = column(0, 1, None, kind=pa.int64()).cast(pa.schema([("a", pa.timestamp(unit, "UTC"))]))
        assert written(table) == jsonl_by_rows.jsonl(table)


def test_nobody_sees_what_lies_behind_a_null() -> None:
    years = pa.array([2**60, 0], pa.timestamp("us"))
    hidden = pa.StructArray.from_arrays([years], ["at"], mask=pa.array([True, False]))
    assert written(pa.table({"s": hidden})) == b'{}\n{"s":{"at":"1970-01-01T00:00:00.000"}}\n'
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), years, mask=pa.array([True, False]))
    assert written(pa.table({"l": lists})) == b'{}\n{"l":["1970-01-01T00:00:00.000"]}\n'


def test_a_large_batch_is_turned_into_text_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "TEXTS", 100)
    table = pa.table({"a": ["x" * (number * 7 % 250) for number in range(40)], "b": range(40)})
    assert written(table) == jsonl_by_rows.jsonl(table)


def test_a_struct_that_has_a_name_twice_is_not_written() -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    with pytest.raises(ValueError, match="a struct has a name twice: x, x"):
        written(pa.table({"s": twice}))


# -- read ----------------------------------------------------------------------------------------------------------


def outcome(body: bytes, schema: pa.Schema, *, by_lines: bool = False) -> str:
    """Return the rows of a body as text, or what is said against it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_layout, "SMALLEST", 1 << 60 if by_lines else 0)
        try:
            batches = list(PARSERS["jsonl"](io.BytesIO(body), schema, False))
        except BadBody as error:
            return str(error)
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(schema) and 0 < batch.num_rows <= ROWS
    return repr([row for batch in batches for row in batch.to_pylist()])


#: Two columns of each type that a layout reads, of which the second must not be null.
KINDS = {
    "b": pa.bool_(),
    "i": pa.int8(),
    "l": pa.int64(),
    "f": pa.float32(),
    "d": pa.float64(),
    "n": pa.decimal128(5, 2),
    "s": pa.string(),
    "x": pa.binary(),
    "day": pa.date32(),
    "at": pa.timestamp("us", "UTC"),
    "here": pa.timestamp("us"),
    "\u00e4 $": pa.large_string(),
}
VALUES = [
    *(
        "null",
        "true",
        "false",
        "0",
        "-0",
        "-0.0",
        "-0e1",
        "00",
        "1",
        "-7",
        "127",
        "128",
        "1.",
        ".5",
        "1.0",
        "1e2",
        "+1",
    ),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "1" * 400, "1e400", "-1e400", "1e-400", "NaN"),
    *(
        "3.4028235e38",
        "3.5e38",
        "3.40282356e38",
        "123.45",
        "-1.50",
        "1.500",
        "12345",
        "-Infinity",
        "0x1",
        "1_0",
        "\u0661",
    ),
    *('"NaN"', '"Infinity"', '"-Infinity"', '"nan"', '""', '"x"', '"AA=="', '"AA="', '"\\u0041A=="', '"1"', '"1.5"'),
    *('"2024-02-29"', '"2024-02-30"', '"0000-01-01"', '"0001-01-01"', '"9999-12-31"', '"20240229"', '"2024-W01-1"'),
    *(
        '"2024-01-01T00:00:00.000Z"',
        '"2024-01-01T00:00:00Z"',
        '"2024-01-01 23:59:59.123456Z"',
        '"2024-01-01T24:00:00Z"',
    ),
    *('"2024-01-01T00:00:60Z"', '"2024-01-01T00:00:00.000"', '"2024-01-01T00:00:00.5"', '"2024-01-01T00:00:00+01:00"'),
    *(
        '"0000-01-01T00:00:00.000Z"',
        '"2024-13-01T00:00:00.000"',
        '"2024-01-01T00:00:00.0000001"',
        '"9999-12-31T23:59:59.999999"',
    ),
    *(
        '"\\"\\\\\\/\\b\\f\\n\\r\\t"',
        '"\\ud83d\\ude00"',
        '"\\ud800"',
        '"\\udc00"',
        '"\\q"',
        '"\\u12"',
        '"\t"',
        '"\x7f\u2028"',
        '"',
    ),
    *("[]", "{}", "[1]", '{"s":1,"s":2}', "nul", ""),
]
members = st.tuples(st.sampled_from([*KINDS, "other", "a.b"]), st.sampled_from(VALUES))


@st.composite
def laid_out(draw: st.DrawFn) -> bytes:
    """Draw lines that mostly have the same members in the same order, of which some are odd."""
    order = [*draw(st.permutations([*KINDS, "other", "a.b"]))]
    fine = draw(st.fixed_dictionaries({name: st.sampled_from(VALUES) for name in order}))
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")]))
    lines = []
    for odd in draw(st.lists(st.lists(members, max_size=2), max_size=8)):
        row = {name: fine[name] for name in order[: draw(st.integers(0, len(order)))]} | dict(odd)
        pairs = [*row.items(), *draw(st.lists(members, max_size=1 if odd else 0))]
        ascii_only = draw(st.booleans())
        inside = comma.join(f"{json.dumps(name, ensure_ascii=ascii_only)}{colon}{value}" for name, value in pairs)
        end = draw(st.sampled_from(["\n"] * 5 + ["\r\n", "\n\n", " \n", "", "} \n", ",\n"]))
        lines.append(f"{{{inside}}}{end}")
    return "".join(lines).encode()


@given(laid_out(), st.lists(st.sampled_from([*KINDS]), unique=True, min_size=1, max_size=4), st.booleans())
def test_lines_of_a_layout_are_read_as_lines_are(body: bytes, wanted: list[str], nullable: bool) -> None:
    schema = pa.schema([pa.field(name, KINDS[name], nullable=nullable) for name in wanted])
    assert outcome(body, schema) == outcome(body, schema, by_lines=True)


@pytest.mark.parametrize("value", VALUES)
def test_each_value_is_read_or_refused_as_it_is_in_a_line_alone(value: str) -> None:
    for name, kind in KINDS.items():
        body = f'{{"{name}":null}}\n{{"{name}":{value}}}\n{{"{name}":{value}, "other": {value}}}\n'.encode()
        for schema in (pa.schema([(name, kind)]), pa.schema([("gone", pa.int8())])):
            assert outcome(body, schema) == outcome(body, schema, by_lines=True)


@given(tables(flat_kinds), st.data())
def test_what_is_written_is_read_by_layout_and_by_lines_alike_also_when_it_is_damaged(
    table: pa.Table, data: st.DataObject
) -> None:
    body = bytearray(written(table))
    for _ in range(data.draw(st.integers(0, 2))) if body else ():
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.sampled_from(b'{}[]":,\\n0e-. \r\n\xff\0'))
    assert outcome(bytes(body), table.schema) == outcome(bytes(body), table.schema, by_lines=True)


def test_what_is_written_fits_a_layout_wherever_nulls_are() -> None:
    table = pa.table(
        {"a": [None, 1] * 2000, "b": [0.5, None, None] * 1333 + [2.0], "c": ['x"\\', None, "", "y"] * 1000}
    )
    for wanted in (["a", "b", "c"], ["c"], ["c", "a"], ["b", "gone"]):
        schema = pa.schema([("gone", pa.string()) if name == "gone" else table.schema.field(name) for name in wanted])
        layout = json_layout.Layout(schema, pytest.fail)
        batch = layout.read(written(table))
        assert batch is not None
        expected = [{name: row.get(name) for name in wanted} for row in table.to_pylist()]
        assert batch.to_pylist() == expected


def test_odd_lines_among_many_that_fit_are_read_by_themselves_and_come_back_into_place() -> None:
    odd = ['{"b":"NaN","a":1}', '{"a":2,"b":"NaN"}', "", '{"a":3,"c":[1],"b":0.5}', " ", '{"b":-0,"a":4}\r', '{"a":5}']
    lines = [line for number in range(4000) for line in (f'{{"a":{number},"b":0.25}}', odd[number % 7]) if number % 3]
    lines += ['{"a":1,"b":1}'] * 4000
    read_line: list[str] = []

    def read(line: str) -> object:
        read_line.append(line)
        return {"a": row["a"], "b": float(row.get("b", "nan"))} if (row := json.loads(line.strip() or "null")) else None

    schema, body = pa.schema([("a", pa.int64()), ("b", pa.float64())]), "\n".join(lines).encode()
    batch = json_layout.Layout(schema, read).read(body)
    assert batch is not None
    assert len(read_line) < 3000
    assert outcome(body, schema) == outcome(body, schema, by_lines=True)


def test_nested_values_fit_no_layout() -> None:
    table = pa.table({"a": range(4000), "b": [[1]] * 4000})
    assert json_layout.Layout(table.schema, pytest.fail).read(written(table)) is None
    assert json_layout.Layout(table.select(["a"]).schema, pytest.fail).read(written(table)) is None
    assert outcome(written(table), table.schema) == repr(table.to_pylist())


def test_a_line_that_fits_no_layout_is_refused_with_its_number_in_the_body() -> None:
    good = b'{"a":1,"b":"x"}\n'
    body = good * 40_000 + b'{"a":1,"b":"x"} null {"a":2,"b":"y"}\n' + good
    assert outcome(body, pa.schema([("a", pa.int8())])) == "line 40001 is not JSON: Extra data at character 15"
