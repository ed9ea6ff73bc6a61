"""Writes the rows of a partition as one body, from Arrow batches: jsonl, csv, parquet, arrow or text.

Timestamps with a time zone are written in UTC, whatever the time zone of the session is.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import pyarrow.csv as pa_csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

#: A function that writes the batches of a body, which have the schema, into a file.
Body = Callable[[IO[bytes], pa.Schema, Iterable[pa.RecordBatch]], None]
#: Bytes of Arrow data in a row group of Parquet.
ROW_GROUP = 64 << 20

_text = json.JSONEncoder(ensure_ascii=False).encode


def in_utc(schema: pa.Schema) -> pa.Schema:
    """Return a schema with UTC in place of the session's time zone; the instants stay the same."""
    return pa.schema([field.with_type(_in_utc(field.type)) for field in schema], metadata=schema.metadata)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    if pa.types.is_map(kind):
        key, item = kind.key_field, kind.item_field
        return pa.map_(key.with_type(_in_utc(key.type)), item.with_type(_in_utc(item.type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    return kind


def write_csv(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a header and a line for each row; text is quoted, so that an empty text differs from null."""
    times = [field.name for field in schema if pa.types.is_date(field.type) or pa.types.is_timestamp(field.type)]
    with pa_csv.CSVWriter(file, schema) as body:
        for batch in batches:
            for name in times:  # Arrow would write a year without four digits in a form that nothing reads
                _as_python(name, compute.min_max(batch.column(name)).as_py)
            body.write_batch(batch)


def write_arrow(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an Arrow IPC stream, which can be read from a pipe."""
    with pa.ipc.new_stream(file, schema) as body:
        for batch in batches:
            body.write_batch(batch)


def write_parquet(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a Parquet file, in row groups of ROW_GROUP bytes rather than one for each of Spark's batches."""
    with pq.ParquetWriter(file, schema) as body:
        group: list[pa.RecordBatch] = []
        for batch in batches:
            group.append(batch)
            if sum(part.nbytes for part in group) >= ROW_GROUP:
                body.write_table(pa.Table.from_batches(group, schema))
                group = []
        if group:
            body.write_table(pa.Table.from_batches(group, schema))


def write_text(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write the only column, a line for each row and an empty line for null, as Spark's text format does."""
    for batch in batches:
        column = batch.column(0).fill_null("").cast(pa.large_string())
        lines = compute.binary_join_element_wise(column, *(pa.scalar(text, pa.large_string()) for text in ("", "\n")))
        _, offsets, data = lines.buffers()  # a new array, so its data begins at the start of the buffer
        end = memoryview(offsets).cast("q")[len(lines)]
        file.write(memoryview(data)[:end])


def write_jsonl(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an object for each row; as Spark's json format does, nulls are left out and binary is base64."""
    encode = _object(list(schema))
    for batch in batches:
        columns = [_as_python(name, batch.column(name).to_pylist) for name in schema.names]
        rows = (dict(zip(schema.names, row, strict=True)) for row in zip(*columns, strict=True))
        file.write("".join(f"{encode(row)}\n" for row in rows).encode())


def _as_python(name: str, values: Callable[[], Any]) -> Any:
    """Return the values of a column as Python values.

    Raises:
        ValueError: a date or a timestamp has a year outside 1 to 9999, which neither Python nor plain ISO 8601 has.
    """
    try:
        return values()
    except OverflowError as error:
        raise ValueError(f"column {name}: text formats hold the years 1 to 9999, and a value is outside") from error


BODIES: dict[str, Body] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "text": write_text,
}


# -- JSON: values of each type as text, so that a decimal keeps every digit ----------------------------------------


def _encoder(kind: pa.DataType) -> Callable[[Any], str]:
    """Return the function that writes a value of a type, other than null, as JSON."""
    types = pa.types
    if types.is_struct(kind):
        return _object(list(kind))
    if types.is_map(kind):
        return _map(kind)
    if types.is_list(kind) or types.is_large_list(kind):
        item = _or_null(_encoder(kind.value_type))
        return lambda value: f"[{','.join(map(item, value))}]"
    for known, encode in (
        (types.is_boolean, lambda value: "true" if value else "false"),
        (types.is_integer, str),
        (types.is_float32, lambda value: _float(_shortest(value))),
        (types.is_floating, _float),
        (types.is_decimal, lambda value: format(value, "f")),
        (types.is_date, lambda value: f'"{value.isoformat()}"'),
        (types.is_timestamp, _instant if getattr(kind, "tz", None) else _local),
        (lambda kind: types.is_binary(kind) or types.is_large_binary(kind), _base64),
        (lambda kind: types.is_string(kind) or types.is_large_string(kind), _text),
    ):
        if known(kind):
            return encode
    return _text  # a column of nulls, which has no values; the driver refused any other type


def _object(fields: list[pa.Field]) -> Callable[[Any], str]:
    known = [(field.name, f"{_text(field.name)}:", _encoder(field.type)) for field in fields]

    def encode(row: Any) -> str:
        parts = [key + write(value) for name, key, write in known if (value := row[name]) is not None]
        return f"{{{','.join(parts)}}}"

    return encode


def _map(kind: pa.DataType) -> Callable[[Any], str]:
    item = _or_null(_encoder(kind.item_type))
    return lambda pairs: f"{{{','.join(f'{_text(str(key))}:{item(value)}' for key, value in pairs)}}}"


def _or_null(encode: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "null" if value is None else encode(value)


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _shortest(value: float) -> float:
    """Return the double with the fewest digits that rounds to the same 32-bit float."""
    for digits in range(6, 9) if math.isfinite(value) else ():
        short = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short))[0] == value:
            return short
    return value


def _local(value: datetime) -> str:
    precision = "microseconds" if value.microsecond % 1000 else "milliseconds"
    return f'"{value.replace(tzinfo=None).isoformat(timespec=precision)}"'


def _instant(value: datetime) -> str:
    return f'{_local(value)[:-1]}Z"'


def _base64(value: bytes) -> str:
    return f'"{base64.b64encode(value).decode()}"'
