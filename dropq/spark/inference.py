"""Finds the schema of the bodies that wait in a queue, as Spark's own readers infer it from a few of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_schema

from dropq.api import Queue
from dropq.errors import NoSuchMessage
from dropq.queue.message import Message
from dropq.records.formats import MARK
from dropq.spark.claim_batch import find_queue
from dropq.spark.decoders import csv_rows
from dropq.spark.options import BODY_FORMATS, CSV_OPTIONS, ReadOptions, by_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The most bytes that are read of a body of lines.
SAMPLE = 1 << 20


def infer(
    spark: SparkSession, queue: Queue | str, n: int = 10, *, root: str | os.PathLike[str] | None = None, **options: Any
) -> t.StructType:
    """Return a schema for the bodies of the first n messages that wait; take none.

    Lines are inferred by Spark's own readers of JSON and CSV, of up to 1 MiB of each body. A time in them is a string.
    The schema of Parquet and Arrow is that of the first body.

    Args:
        spark: the session.
        queue: the queue, or its name.
        n: the most messages, at least 1.
        root: the root of a queue that is given by its name; None takes it from DROPQ_ROOT in the environment.
        options: bodyFormat, else the type of the first message if it is a format, else jsonl; and those of csv.

    Raises:
        ConfigError: an option cannot be used.
        NoSuchMessage: no message waits.
    """
    queue = find_queue(queue, root, "infer()")
    messages = list(islice(queue.browse(), n))
    if not messages:
        raise NoSuchMessage(f"no message waits in queue {queue.name}, whose bodies could tell their columns: send one")
    given = by_name(options, ("bodyFormat", *CSV_OPTIONS), "infer()")
    body_format = given.setdefault("bodyformat", messages[0].type if messages[0].type in BODY_FORMATS else "jsonl")
    parsed = ReadOptions.parse({"root": os.fspath(queue.root.path), "queue": queue.name, **given})
    if body_format in ("parquet", "arrow"):
        with messages[0].open() as body:
            found = pq.read_schema(body) if body_format == "parquet" else pa.ipc.open_stream(body).schema
        return from_arrow_schema(found, prefer_timestamp_ntz=True)
    if body_format == "text":
        return t.StructType().add("value", t.StringType())
    csv = parsed.csv
    split = partial(csv_rows, csv=csv) if body_format == "csv" else _split
    lines = spark.createDataFrame([(line,) for message in messages for line in _lines(message, split)], "line string")
    if body_format == "jsonl":
        return spark.read.json(lines).schema
    reader = spark.read.options(header=True, inferSchema=True, sep=csv.sep, quote=csv.quote, escape=csv.escape)
    inferred = reader.option("nullValue", csv.null).csv(lines).schema
    schema = t.StructType()
    for field in inferred:
        is_time = isinstance(field.dataType, (t.TimestampType, t.TimestampNTZType))
        schema.add(field.name, t.StringType() if is_time else field.dataType)
    return schema


def _lines(message: Message, split: Callable[[bytes], list[bytes]]) -> list[str]:
    """Return the first whole lines, or rows, of a body; one that is longer than the sample is cut off."""
    with message.open() as body:
        data = body.read(SAMPLE)
    lines = split(data.removeprefix(MARK))
    whole = lines if len(data) < SAMPLE else lines[:-1] or lines
    return [line.decode("utf-8", "replace") for line in whole]


def _split(data: bytes) -> list[bytes]:
    # Not by str.splitlines(), which also splits at U+2028 and others.
    return [line.removesuffix(b"\r") for line in data.split(b"\n")]
