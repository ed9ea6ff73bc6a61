"""The columns of a message: their types, and how the names and bodies of files become Arrow batches.

Only `length` and `value` need more than the file's name, and only `value` opens the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from dropq.errors import ConfigError
from dropq.format import names
from dropq.format.escapes import LARGEST
from dropq.lifecycle.sidecars import Sidecars
from dropq.queue.message import LAST_MS

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


def check_columns(schema: t.StructType) -> None:
    """Refuse a schema that messages do not have.

    Raises:
        ConfigError: the schema has wrong columns; the error names each and says what is wrong.
    """
    named = schema.fieldNames()
    problems = [] if named else [f"it names no column of {', '.join(COLUMNS)}"]
    problems += [f"column {name} is there twice" for name in sorted({name for name in named if named.count(name) > 1})]
    for field in schema.fields:
        kind = COLUMNS.get(field.name)
        if not field.nullable:
            problems.append(f"column {field.name} is declared NOT NULL, and may have nulls")
        if kind is None:
            problems.append(f"column {field.name} is not one of {', '.join(COLUMNS)}")
        elif field.dataType.simpleString() != kind.simpleString():
            problems.append(f"column {field.name} is {kind.simpleString()}, not {field.dataType.simpleString()}")
    if problems:
        raise ConfigError(f"messages cannot be read with this schema: {'; '.join(problems)}")


def arrow_schema(schema: t.StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark wants the batches of a schema."""
    return to_arrow_schema(schema, timezone="UTC")


class Columns:
    """Makes batches with the wanted columns.

    Args:
        schema: the wanted columns, in Arrow's types.
        sidecars: parses names, and reads their sidecars.
    """

    def __init__(self, schema: pa.Schema, sidecars: Sidecars) -> None:
        self._schema = schema
        self._sidecars = sidecars

    def batch(
        self,
        state: str,
        folder: str,
        files: Sequence[str],
        arrivals: Mapping[str, int],
        lengths: Sequence[int | None] | None,
        values: Sequence[bytes | None] | None,
    ) -> pa.RecordBatch:
        """Return the rows of some files of a folder.

        Args:
            state: the state of the messages.
            folder: the folder.
            files: the names of the files.
            arrivals: when files came, in ms, by name, for names without a time.
            lengths: the lengths of the bodies, None for a file that has moved; None if no column needs them.
            values: the bodies, None for a file that has moved; None if no column needs them.
        """
        columns = _plain_columns(files) if all(map(names.is_plain, files)) else self._parsed(files, arrivals)
        columns |= {
            "state": lambda: _Repeated(state),
            "path": lambda: [_readable(f"{folder}/{file}") for file in files],
            "length": lambda: lengths,
            "value": lambda: values,
        }
        arrays = [_array(columns[field.name](), field.type, len(files)) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _parsed(self, files: Sequence[str], arrivals: Mapping[str, int]) -> dict[str, Callable[[], Any]]:
        rows = [self.row(file, arrivals.get(file, 0)) for file in files]
        return {name: lambda name=name: [row[name] for row in rows] for name in rows[0]}  # type: ignore[misc]

    def row(self, file: str, arrival: int) -> dict[str, Any]:
        """Return what a file's name says, by column; times in microseconds."""
        message_file = self._sidecars.file(file)
        name = self._sidecars.read(message_file)
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
            "delivery_count": min(message_file.delivery_count + name.cut, LARGEST),
        }


class _Repeated(NamedTuple):
    """A column with the same value in all rows."""

    value: object


def _plain_columns(files: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Split plain names in Arrow's own loops."""
    parts = compute.extract_regex(pa.array(files, pa.string()), names.PLAIN_PARTS)
    priority, ids, classes = (parts.field(number) for number in range(3))
    sent = compute.utf8_slice_codeunits(ids, 0, 13)
    return {
        "id": lambda: ids,
        "priority": lambda: priority,
        "class": lambda: classes,
        "timestamp": lambda: compute.multiply(sent.cast(pa.int64()), 1000),
        "properties": lambda: _Repeated([]),
        "delivery_count": lambda: _Repeated(0),
        **{name: lambda: _Repeated(None) for name in ("expiration", "correlation_id", "reply_to", "type")},
    }


def _array(column: Any, kind: pa.DataType, rows: int) -> pa.Array:
    if isinstance(column, _Repeated):
        return pa.repeat(pa.scalar(column.value, kind), rows)
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)


def _microseconds(ms: int) -> int | None:
    return min(ms, LAST_MS) * 1000 if ms else None


def _readable(text: str) -> str:
    """Return text that Spark can hold: bytes of a name that are not UTF-8 become U+FFFD."""
    return text if text.isascii() else os.fsencode(text).decode("utf-8", "replace")
