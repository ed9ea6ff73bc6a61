"""Casts the Arrow columns of a body to the wanted schema.

Invariant: a cast loses nothing, and its result is valid in Spark: no null in a column that is not nullable, no repeated
key in a map. Otherwise the body is refused. decoders.py knows the formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import types

from dropq.spark.columns import missing_message_column

T = TypeVar("T")

#: The most rows of a batch.
ROWS = 4096


class BadBody(ValueError):
    """Raised when a body cannot be read with the wanted schema; the text says what is wrong, and where."""


def shortened(text: str) -> str:
    """Return a text for an error, cut off after 60 characters."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def gathered(items: Iterable[T], size: Callable[[T], float], most: float) -> Iterator[list[T]]:
    """Yield items together as soon as their sizes add up to the most, and then the rest."""
    chosen: list[T] = []
    total = 0.0
    for item in items:
        chosen.append(item)
        total += size(item)
        if total >= most:
            yield chosen
            chosen, total = [], 0.0
    if chosen:
        yield chosen


def _either(*known: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda kind: any(is_kind(kind) for is_kind in known)


is_text = _either(types.is_string, types.is_large_string, types.is_string_view)
is_bytes = _either(types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
is_list = _either(types.is_list, types.is_large_list, types.is_fixed_size_list)


# -- types -----------------------------------------------------------------------------------------------------------


def present(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """Return the wanted columns that a body has; BadBody if it has one twice, or columns, but no wanted one.

    It is a BadBody, too, if instead of a wanted column it has one whose name differs in case or blanks alone, or lacks
    one that is a column of messages.
    """
    columns = [name for name in schema.names if name in names]
    for name in columns:
        if names.count(name) > 1:
            raise BadBody(f"column {name} is there twice")
    if names and schema.names and not columns:
        raise BadBody(f"none of the wanted columns is there: the body has {shortened(json.dumps(names)[1:-1])}")
    _refuse_near(schema.names, names, "column ")
    if problem := missing_message_column(schema.names, names):
        raise BadBody(problem)
    return columns


def _refuse_near(wanted: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise BadBody if a wanted column is missing, and there is one whose name differs in case or blanks alone."""
    others = {_alike(name): name for name in names if name not in wanted}
    for name in wanted if others else ():
        if name not in names and (near := others.get(_alike(name))):
            raise BadBody(
                f"{where}{name} is not there, and {json.dumps(near, ensure_ascii=False)} is: name the one as the other"
            )


def _alike(name: str) -> str:
    return "".join(name.split()).casefold()


def fitting(body: pa.Schema, schema: pa.Schema) -> list[str]:
    """Return the wanted columns that a body has; BadBody where a type does not fit, or as of `present`."""
    columns = present(body.names, schema)
    for name in columns:
        _check(body.field(name).type, schema.field(name).type, f"column {name}")
    return columns


class _Int96(pa.ExtensionType):  # type: ignore[misc]  # pyarrow has no types
    """A timestamp of Parquet that may be an instant or a local time; the file does not say which."""

    def __init__(self) -> None:
        super().__init__(pa.timestamp("us"), "dropq.int96")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    def __str__(self) -> str:
        return "int96"


_INT96 = _Int96()


def with_int96(body: pq.ParquetFile) -> pa.Schema:
    """Return the schema of a Parquet file for `fitting`, in which INT96 has a type of its own."""
    physical = [body.schema.column(index).physical_type for index in range(len(body.schema))]
    if "INT96" not in physical:
        return body.schema_arrow
    leaves = iter(physical)
    return with_leaves(body.schema_arrow, lambda kind: _INT96 if next(leaves, "") == "INT96" else kind)


def with_leaves(schema: pa.Schema, change: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    """Return a schema in which a function changes the types of the values, also within structs, maps and lists."""

    def changed(kind: pa.DataType) -> pa.DataType:
        inner = [field.with_type(changed(field.type)) for field in map(kind.field, range(kind.num_fields))]
        if types.is_struct(kind):
            return pa.struct(inner)
        if types.is_map(kind):
            return pa.map_(*inner[0].type)
        return pa.list_(*inner) if inner else change(kind)

    return pa.schema([field.with_type(changed(field.type)) for field in schema], metadata=schema.metadata)


def _check(have: pa.DataType, want: pa.DataType, where: str) -> None:
    have = have.value_type if types.is_dictionary(have) else have
    if types.is_struct(have) and types.is_struct(want):
        _refuse_near([field.name for field in want], [field.name for field in have], f"{where}.")
        for field in want:
            indices, inside = have.get_all_field_indices(field.name), f"{where}.{field.name}"
            if len(indices) > 1:
                raise BadBody(f"{inside} is there twice")
            if indices:
                _check(have.field(indices[0]).type, field.type, inside)
    elif types.is_map(have) and types.is_map(want):
        _check(have.key_type, want.key_type, f"the key of {where}")
        _check(have.item_type, want.item_type, f"{where}{{}}")
    elif is_list(have) and is_list(want):
        _check(have.value_type, want.value_type, f"{where}[]")
    elif not have.equals(want) and not _can_hold(want, have):
        raise BadBody(f"{where} is {have}, and {want} is wanted")


def _can_hold(want: pa.DataType, have: pa.DataType) -> bool:
    """Return whether one type can hold every value of another; for nanoseconds, the cast checks each value."""
    if types.is_integer(have) and types.is_integer(want):
        return bool(have.bit_width < want.bit_width + types.is_signed_integer(have))
    if types.is_integer(have) and types.is_floating(want):
        return bool(have.bit_width * 2 <= want.bit_width)
    if types.is_floating(have) and types.is_floating(want):
        return bool(have.bit_width <= want.bit_width)
    if types.is_decimal(have) and types.is_decimal(want):
        return bool(have.scale <= want.scale and have.precision - have.scale <= want.precision - want.scale)
    if types.is_timestamp(have) and types.is_timestamp(want):
        return (have.tz is None) == (want.tz is None)
    if isinstance(have, _Int96):
        return bool(types.is_timestamp(want))
    alike = (is_text, is_bytes, types.is_date, types.is_time, types.is_duration)
    return bool(types.is_null(have)) or any(known(have) and known(want) for known in alike)


# -- values ----------------------------------------------------------------------------------------------------------


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in the wanted schema; BadBody or ArrowException where a value does not fit."""
    batch.validate(full=True)  # damaged offsets could point anywhere in memory
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        yield pa.RecordBatch.from_arrays([_column(part, field) for field in schema], schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    where = f"column {field.name}"
    column = batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows)
    try:
        # Arrow's cast of a type to itself fails for a null struct with fields that are not nullable.
        column = column if column.type.equals(field.type) else column.cast(field.type)
    except pa.ArrowException as error:
        raise BadBody(f"{where} is not {field.type}: {error}") from error
    _refuse(column, field, where)
    return column


def _refuse(array: pa.Array, field: pa.Field, where: str) -> None:
    """Refuse nulls in columns that are not nullable, which Spark would read as zeros, and maps with repeated keys."""
    if array.null_count and not field.nullable:
        raise BadBody(f"{where} is null, and must not be")
    parts: list[tuple[pa.Array, pa.Field, str]] = []
    if types.is_struct(field.type):
        members = array.drop_null().flatten()
        parts = [(part, child, f".{child.name}") for part, child in zip(members, field.type, strict=True)]
    elif types.is_list(field.type):
        parts = [(array.flatten(), field.type.value_field, "[]")]
    elif types.is_map(field.type):
        maps = array.drop_null()
        starts, own = extent(maps)
        keys, items = own(maps.keys), own(maps.items)
        if _repeats(keys, compute.list_parent_indices(pa.ListArray.from_arrays(starts, keys))):
            raise BadBody(f"{where} has a key twice")
        parts = [(items, field.type.item_field, "{}")]
    for part, child, name in parts:
        _refuse(part, child, f"{where}{name}")


def extent(lists: pa.Array) -> tuple[pa.Array, Callable[[pa.Array], pa.Array]]:
    """Return where each of some lists or maps begins in their items, and what cuts these out of a child array.

    A slice shares the child arrays of the whole. A cast of maps to lists of structs would cut, too, but pyarrow 26
    makes an array of it that ends the process, if the structs have columns of nulls.
    """
    first, last = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    return compute.subtract(lists.offsets, first).cast(pa.int32()), lambda child: child.slice(first, last - first)


def _repeats(keys: pa.Array, maps: pa.Array) -> bool:
    """Return whether any map has a key twice; `maps` has the number of the map for each key."""
    if types.is_nested(keys.type):  # Arrow cannot group by nested types
        return len(set(zip(maps.to_pylist(), keys, strict=True))) < len(keys)
    distinct = pa.table([maps, keys], ["map", "key"]).group_by(["map", "key"], use_threads=False).aggregate([])
    return bool(distinct.num_rows < len(keys))
