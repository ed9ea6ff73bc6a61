"""The columns of a message: their types, and how the names and bodies of files become Arrow batches.

Only `length` and `value` need more than the file's name, and only `value` opens the file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from dropq.errors import ConfigError
from dropq.format import names
from dropq.format.escapes import LARGEST
from dropq.format.layout import WITH_REASON
from dropq.lifecycle.context import QueueContext
from dropq.spark.bundles import RowError
from dropq.storage.clock import LAST_MS

#: The columns of a message, in the order that a read without a schema has them.
COLUMNS: dict[str, t.DataType] = {
    "id": t.StringType(),
    "priority": t.IntegerType(),
    "class": t.StringType(),
    "timestamp": t.TimestampType(),
    "expiration": t.TimestampType(),
    "correlation_id": t.StringType(),
    "reply_to": t.StringType(),
    "type": t.StringType(),
    "properties": t.MapType(t.StringType(), t.StringType()),
    "delivery_count": t.IntegerType(),
    "state": t.StringType(),
    "path": t.StringType(),
    "length": t.LongType(),
    "value": t.BinaryType(),
}

SCHEMA = t.StructType([t.StructField(name, kind) for name, kind in COLUMNS.items()])

#: The column with what is known of the message that a row of a body came from, and the fields that it may have.
MESSAGE = "_message"
MESSAGE_FIELDS: dict[str, t.DataType] = {
    **{name: kind for name, kind in COLUMNS.items() if name != "value"},
    "receipt": t.StringType(),
}


class NotText(RowError):
    """Raised when the body in a row of a batch is wanted as a string and is not UTF-8; the text says why."""


def check_columns(schema: t.StructType) -> None:
    """Refuse a schema that messages do not have."""
    problems = [] if schema.names else [f"it names no column of {', '.join(COLUMNS)}"]
    problems += repeated(schema)
    for field in schema.fields:
        if field.name == MESSAGE:
            problems.append(f"column {MESSAGE} needs bodyFormat; without it, name the columns {', '.join(COLUMNS)}")
        else:
            problems += _field_problems(field, f"column {field.name}", COLUMNS)
    if problems:
        raise ConfigError(f"messages cannot be read with this schema: {'; '.join(problems)}")


def repeated(schema: t.StructType, called: str = "column ") -> Iterator[str]:
    """Yield a problem for each name that several columns have."""
    counts = Counter(schema.names)
    return (f"{called}{name} is there twice" for name in sorted(counts) if counts[name] > 1)


def message_problems(schema: t.StructType) -> Iterator[str]:
    """Yield what is wrong with the column `_message` of a schema for rows of bodies, if there is one."""
    for field in schema.fields:
        if field.name.lower() != MESSAGE:
            continue
        if field.name != MESSAGE:
            yield f"column {field.name} must be written {MESSAGE}"
        elif not isinstance(field.dataType, t.StructType) or not field.dataType.fields:
            yield f"column {MESSAGE} is a struct with any of {', '.join(MESSAGE_FIELDS)}"
        else:
            yield from repeated(field.dataType, f"field {MESSAGE}.")
            for inner in field.dataType.fields:
                yield from _field_problems(inner, f"field {MESSAGE}.{inner.name}", MESSAGE_FIELDS)
    if schema.fieldNames().count(MESSAGE) > 1:
        yield f"column {MESSAGE} is there twice"
    elif MESSAGE in schema.fieldNames() and len(schema.fields) == 1:
        yield f"it names no column of the bodies besides {MESSAGE}"


def _field_problems(field: t.StructField, what: str, allowed: Mapping[str, t.DataType]) -> Iterator[str]:
    """Yield what is wrong with a column, or a field of `_message`, of which those that are allowed have given types."""
    if not field.nullable:
        yield f"{what} is declared NOT NULL, and may have nulls"
    if field.name not in allowed:
        yield f"{what} is not one of {', '.join(allowed)}"
        return
    kinds = [allowed[field.name].simpleString(), *(["string"] if field.name == "value" else [])]
    if (kind := field.dataType.simpleString()) not in kinds:
        yield f"{what} is {' or '.join(kinds)}, not {kind}"


def missing_message_column(wanted: Iterable[str], body: Sequence[str]) -> str | None:
    """Return what to say if a wanted column is one of messages, and a body has no such column; else None.

    A null would look like a message that has no such header.
    """
    for name in wanted:
        if name not in body and name.lower() in {*COLUMNS, *MESSAGE_FIELDS}:
            way = f"{MESSAGE}.{name.lower()}" if name.lower() in MESSAGE_FIELDS else f"{MESSAGE} has no such field"
            return f"the body has no column {name}: for that of its message, name {way}"
    return None


def arrow_schema(schema: t.StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark wants the batches of a schema."""
    return to_arrow_schema(schema, timezone="UTC")


class Columns:
    """Makes batches with the wanted columns, in Arrow's types."""

    def __init__(self, schema: pa.Schema, context: QueueContext) -> None:
        self._schema = schema
        self._context = context
        self._repeated: dict[str, pa.Array] = {}

    def batch(
        self,
        state: str,
        folder: str,
        files: Sequence[str],
        arrivals: Mapping[str, int],
        lengths: Sequence[int | None] | None,
        values: Sequence[bytes | None] | None,
    ) -> pa.RecordBatch:
        """Return the rows of some files of a folder; `arrivals` says when they came, in ms, if a name has no time.

        The lengths and values are None if no column needs them, and each for a file that has moved.
        """
        is_plain = names.all_plain(files)
        columns = _plain_columns(folder, files) if is_plain else self._parsed(state, folder, files, arrivals)
        columns |= {"state": lambda: _Repeated(state), "length": lambda: lengths, "value": lambda: values}
        arrays = [self._array(columns[field.name](), field, len(files)) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, column: Any, field: pa.Field, rows: int) -> pa.Array:
        if field.name == "value" and field.type in (pa.string(), pa.large_string()):
            return _as_text(column, field.type)
        if not isinstance(column, _Repeated):
            return column.cast(field.type) if isinstance(column, pa.Array) else pa.array(column, field.type)
        kept = self._repeated.get(field.name)
        if kept is None or len(kept) < rows:  # to repeat an empty map takes as long as to read a file
            kept = self._repeated[field.name] = pa.repeat(pa.scalar(column.value, field.type), rows)
        return kept.slice(0, rows)

    def _parsed(
        self, state: str, folder: str, files: Sequence[str], arrivals: Mapping[str, int]
    ) -> dict[str, Callable[[], Any]]:
        rows = [name_columns(self._context, state, file, arrivals.get(file, 0)) for file in files]
        columns = {name: lambda name=name: [row[name] for row in rows] for name in rows[0]}
        return {**columns, "path": lambda: [_readable(f"{folder}/{file}") for file in files]}


def name_columns(context: QueueContext, state: str, file: str, arrival: int) -> dict[str, Any]:
    """Return what a name (else its `arrival`, in ms), sidecar and reason say, by column; times in microseconds."""
    message_file = context.sidecars.file(file)
    name = context.reasons.complete(state, file, context.sidecars.read(message_file))
    count = name.delivery_count if state in WITH_REASON else message_file.delivery_count
    return {
        "id": _readable(name.id),
        "priority": name.priority,
        "class": name.message_class,
        "timestamp": _microseconds(name.timestamp or name.since or arrival),
        "expiration": _microseconds(name.expiration),
        "correlation_id": name.correlation_id,
        "reply_to": name.reply_to,
        "type": name.type,
        "properties": [(key, typed.text) for key, typed in name.properties.items()],
        "delivery_count": min(count + name.cut, LARGEST),
    }


def _as_text(bodies: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """Return bodies as strings; NotText where one is not UTF-8."""
    binary = pa.large_binary() if kind == pa.large_string() else pa.binary()
    try:
        return pa.array(bodies, binary).cast(kind)
    except pa.ArrowInvalid:
        for row, body in enumerate(bodies):
            try:
                (body or b"").decode()
            except UnicodeDecodeError as error:
                raise NotText(row, f"{error.reason} at byte {error.start}") from error
        raise


class _Repeated(NamedTuple):
    """A column with the same value in all rows."""

    value: object


def _plain_columns(folder: str, files: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Split plain names in Arrow's own loops."""
    filenames = pa.array(files, pa.string())
    parts = compute.extract_regex(filenames, names.PLAIN_PARTS)
    priority, ids, classes = (parts.field(number) for number in range(3))
    return {
        "id": lambda: ids,
        "priority": lambda: priority,
        "class": lambda: classes,
        "timestamp": lambda: compute.multiply(compute.utf8_slice_codeunits(ids, 0, 13).cast(pa.int64()), 1000),
        "path": lambda: compute.binary_join_element_wise(_readable(folder), filenames, "/"),
        "properties": lambda: _Repeated([]),
        "delivery_count": lambda: _Repeated(0),
        **{name: lambda: _Repeated(None) for name in ("expiration", "correlation_id", "reply_to", "type")},
    }


class MessageColumn:
    """Adds the column `_message` to the rows of bodies, where it is wanted; `others` are the other wanted columns.

    The `arrivals` are as of `Columns.batch`.
    """

    def __init__(self, schema: pa.Schema, context: QueueContext, arrivals: Mapping[str, int]) -> None:
        self._schema = schema
        self._context = context
        self._arrivals = arrivals
        self._at = schema.get_field_index(MESSAGE)
        self.others = schema if self._at < 0 else schema.remove(self._at)

    def added_to(
        self, batches: Iterator[pa.RecordBatch], state: str, folder: str, file: str, length: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a body, which have the columns `others`, with the column if it is wanted.

        The length of the body is in bytes; None for a message that has left the read.
        """
        if self._at < 0:
            yield from batches
            return
        column = self._schema.field(self._at)
        message = pa.scalar({**self._message(state, folder, file), "state": state, "length": length}, column.type)
        for batch in batches:
            if batch.num_rows:  # Arrow repeats nothing no times
                yield batch.add_column(self._at, column, pa.repeat(message, batch.num_rows))

    def _message(self, state: str, folder: str, file: str) -> dict[str, Any]:
        row = name_columns(self._context, state, file, self._arrivals.get(file, 0))
        is_claimed = state == "processing" and self._context.sidecars.file(file).claim is not None
        return {**row, "path": _readable(f"{folder}/{file}"), "receipt": _readable(file) if is_claimed else None}


def _microseconds(ms: int) -> int | None:
    return min(ms, LAST_MS) * 1000 if ms else None


def _readable(text: str) -> str:
    """Return text that Spark can hold: bytes of a name that are not UTF-8 become U+FFFD."""
    return text if text.isascii() else os.fsencode(text).decode("utf-8", "replace")
