"""Writes columns as JSON in Arrow's loops, many values at a time.

Invariant: the text of a value does not depend on the values beside it. Arrow writes the values whose text it knows, and
Python each of the others: `_by_python` has their reasons.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
from pyarrow import types

from dropq.spark.arrow_cast import extent, is_bytes, is_list, is_text

#: The type of the texts. Its offsets have 64 bits, as quoting may make a text six times as long.
TEXT = pa.large_string()

_text = json.JSONEncoder(ensure_ascii=False).encode


def objects(names: Sequence[str], members: Sequence[pa.Array], rows: int) -> pa.Array:
    """Return an object for each row, from the JSON of its members, without those that are null."""
    parts: list[Any] = [pa.repeat(_scalar(""), rows)]
    for name, texts in zip(names, members, strict=True):
        key = f",{_text(name)}:"
        parts += [_join(key, texts)] if texts.null_count else [key, texts]
    # "skip" in place of "replace" would shorten the array by each row of nulls alone (pyarrow 26).
    joined = _join(*parts, null_handling="replace", null_replacement="")
    return _join(compute.binary_replace_slice(joined, 0, 1, "{"), "}")


def values(column: pa.Array) -> pa.Array:
    """Return the JSON of each value of a column, and null for null; OverflowError for a year outside 1 to 9999."""
    if column.null_count and types.is_nested(column.type):  # what lies behind a null may be anything
        texts = values(column.drop_null())
        return compute.replace_with_mask(pa.nulls(len(column), TEXT), column.is_valid(), texts)
    for known, write in _WRITERS:
        if known(column.type):
            return write(column)
    raise TypeError(f"json does not hold {column.type}")  # the driver has refused such a column


# -- nested types: arrays without nulls ----------------------------------------------------------------------------


def _struct(column: pa.Array) -> pa.Array:
    names = [field.name for field in column.type]
    if len(set(names)) < len(names):
        raise ValueError(f"a struct has a name twice: {', '.join(names)}")
    return objects(names, list(map(values, column.flatten())), len(column))


def _list(column: pa.Array) -> pa.Array:
    starts, own = extent(column)
    return _join("[", _joined(starts, values(own(column.values))), "]")


def _map(column: pa.Array) -> pa.Array:
    starts, own = extent(column)
    keys, items = values(own(column.keys)), values(own(column.items)).fill_null("null")
    names = keys if is_text(column.type.key_type) else _join('"', keys, '"')
    return _join("{", _joined(starts, _join(names, ":", items)), "}")


def _joined(starts: pa.Array, items: pa.Array) -> pa.Array:
    """Return the texts of the items of each list, with commas between them."""
    texts = items.fill_null("null").cast(pa.string())  # Arrow joins no lists of large strings
    return compute.binary_join(pa.ListArray.from_arrays(starts, texts), ",").cast(TEXT)


# -- values --------------------------------------------------------------------------------------------------------


def _plain(column: pa.Array) -> pa.Array:
    return column.cast(TEXT)


def _double(column: pa.Array) -> pa.Array:
    size = compute.abs(column)
    # Arrow writes an exponent for larger and smaller numbers than Python does, and another NaN and infinity.
    plain = compute.or_(compute.and_(compute.greater(size, 1e-3), compute.less(size, 1e9)), compute.equal(size, 0))
    fraction = compute.if_else(compute.equal(compute.floor(column), column), _scalar(".0"), _scalar(""))
    return _by_python(_join(column.cast(TEXT), fraction), column, compute.invert(plain), _float)


def _decimal(column: pa.Array) -> pa.Array:
    texts = column.cast(TEXT)
    return _by_python(texts, column, compute.match_substring(texts, "E"), lambda value: format(value, "f"))


def _date(column: pa.Array) -> pa.Array:
    check_years(column)
    return _join('"', column.cast(TEXT), '"')


def _timestamp(column: pa.Array) -> pa.Array:
    check_years(column)
    instant = column.cast(pa.timestamp("us", column.type.tz))
    texts = compute.binary_replace_slice(instant.view(pa.timestamp("us")).cast(TEXT), 10, 11, "T")
    in_ms = compute.ends_with(texts, "000")
    texts = compute.if_else(in_ms, compute.utf8_slice_codeunits(texts, 0, len("2024-01-01T00:00:00.000")), texts)
    return _join('"', texts, 'Z"' if column.type.tz else '"')


def _string(column: pa.Array) -> pa.Array:
    texts = column.cast(TEXT)
    special = compute.match_substring_regex(texts, r'["\\\x00-\x1f]')
    return _by_python(_join('"', texts, '"'), column, special, _text)


#: A test of a type, and the function that writes its values.
_WRITERS: tuple[tuple[Callable[[Any], bool], Callable[[pa.Array], pa.Array]], ...] = (
    (is_text, _string),
    (types.is_integer, _plain),
    (types.is_float32, lambda column: _all_by_python(column, _single)),  # Arrow may choose other digits
    (types.is_floating, _double),
    (types.is_boolean, _plain),
    (types.is_decimal, _decimal),
    (types.is_date, _date),
    (types.is_timestamp, _timestamp),
    (is_bytes, lambda column: _all_by_python(column, _base64)),  # Arrow has no base64
    (types.is_struct, _struct),
    (types.is_map, _map),
    (is_list, _list),
    (types.is_null, _plain),
)


def _by_python(texts: pa.Array, column: pa.Array, chosen: pa.Array, write: Callable[[Any], str]) -> pa.Array:
    """Return the texts of a column, of which Python writes those of the chosen values anew."""
    if not compute.any(chosen).as_py():
        return texts
    written = pa.array(map(write, column.filter(chosen).to_pylist()), TEXT)
    return compute.replace_with_mask(texts, chosen, written)


def _all_by_python(column: pa.Array, write: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else write(value) for value in column.to_pylist()], TEXT)


def check_years(column: pa.Array) -> None:
    """Raise OverflowError for a year that neither Python nor plain ISO 8601 has."""
    compute.min_max(column).as_py()


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _single(value: float) -> str:
    """Write the double with the fewest digits that rounds to the same 32-bit float."""
    for digits in range(6, 9) if math.isfinite(value) else ():
        short = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short))[0] == value:
            return _float(short)
    return _float(value)


def _base64(value: bytes) -> str:
    return f'"{base64.b64encode(value).decode()}"'


def _join(*parts: Any, **nulls: Any) -> pa.Array:
    """Join texts, value by value; the result is null where a part is, unless `nulls` says otherwise."""
    scalars = [_scalar(part) if isinstance(part, str) else part for part in parts]
    return compute.binary_join_element_wise(*scalars, _scalar(""), **nulls)


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text, TEXT)
