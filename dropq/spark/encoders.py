"""Writes the rows of a partition as one body, from Arrow batches: jsonl, csv, parquet, arrow or text.

Timestamps with a time zone are written in UTC, whatever the time zone of the session is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import pyarrow.csv as pa_csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dropq.spark import json_columns
from dropq.spark.arrow_cast import gathered, with_leaves
from dropq.spark.bundles import write_records, write_values
from dropq.spark.json_columns import TEXT

#: A function that writes the batches of a body, which have the schema, into a file.
Body = Callable[[IO[bytes], pa.Schema, Iterable[pa.RecordBatch]], None]
#: Bytes of Arrow data in a row group of Parquet.
ROW_GROUP = 64 << 20
#: Bytes of Arrow data that are turned into text at a time. Quoting may make it six times as long, and a list of texts
#: has less than 2 GiB.
TEXTS = 64 << 20


def in_utc(schema: pa.Schema) -> pa.Schema:
    """Return a schema with UTC in place of the session's time zone; the instants stay the same."""

    def changed(kind: pa.DataType) -> pa.DataType:
        return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz is not None else kind

    return with_leaves(schema, changed)


def write_csv(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a header and a line for each row; text is quoted, so that an empty text differs from null."""
    times = [field.name for field in schema if pa.types.is_date(field.type) or pa.types.is_timestamp(field.type)]
    with pa_csv.CSVWriter(file, schema) as body:
        for batch in batches:
            for name in times:  # Arrow would write a year without four digits in a form that nothing reads
                _as_python(name, partial(json_columns.check_years, batch.column(name)))
            body.write_batch(batch)


def write_arrow(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an Arrow IPC stream, which can be read from a pipe."""
    with pa.ipc.new_stream(file, schema) as body:
        for batch in batches:
            body.write_batch(batch)


def write_parquet(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a Parquet file, in row groups of ROW_GROUP bytes rather than one for each of Spark's batches."""
    with pq.ParquetWriter(file, schema) as body:
        for group in gathered(batches, attrgetter("nbytes"), ROW_GROUP):
            body.write_table(pa.Table.from_batches(group, schema))


def write_text(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write the only column, a line for each row and an empty line for null, as Spark's text format does."""
    write_records(file, "text", (batch.column(0).fill_null("") for batch in batches if batch.num_rows))


def write_jsonl(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an object for each row; as Spark's json format does, nulls are left out and binary is base64."""
    for batch in chain.from_iterable(map(_small, batches)):
        columns = [
            _as_python(name, partial(json_columns.values, column))
            for name, column in zip(schema.names, batch.columns, strict=True)
        ]
        _write_lines(file, json_columns.objects(schema.names, columns, batch.num_rows))


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in parts of at most TEXTS bytes; a row may be larger."""
    if batch.nbytes <= TEXTS or batch.num_rows == 1:
        yield batch
    else:
        half = batch.num_rows // 2
        yield from _small(batch.slice(0, half))
        yield from _small(batch.slice(half))


def _write_lines(file: IO[bytes], texts: pa.Array) -> None:
    """Write each of the texts, none of them null, and a line feed behind it."""
    write_values(file, compute.binary_join_element_wise(texts, *(pa.scalar(text, TEXT) for text in ("", "\n"))))


def _as_python(name: str, values: Callable[[], Any]) -> Any:
    """Return the values of a column as Python values; ValueError for a year outside 1 to 9999."""
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
