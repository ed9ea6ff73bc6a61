"""jsonl is written and read by columns, and is what it would be row by row."""

from __future__ import annotations

import io
import math
from decimal import Decimal
from typing import Any

import jsonl_by_rows
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_spark_parsing import nested_kinds, tables

from dropq.spark import encoders
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
    part = table.slice(start)
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
