"""Reads lines of jsonl that are laid out alike, many at a time: pyarrow.json parses what a regular expression lets by.

Invariant: a layout reads a block of lines as decoders.py reads each of them, or it does not read the block at all. It
raises no error: the reader of lines names what is wrong. A layout has an object a line; its members come in one order,
and any may be missing. A wanted member is no object and no list. The reader of lines reads the other lines of a block.

pyarrow.json alone could not keep to this. A line such as `null` ends its process (pyarrow 26, a segmentation fault); it
takes two objects on a line for two rows, and a quoted number for a decimal. The expression lets no such line by. Commas
that are missing, or too many, it leaves to the parser.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import pyarrow.json as pa_json  # type: ignore[import-untyped]
from pyarrow import types

from dropq.spark.arrow_cast import is_bytes, is_text

#: The fewest bytes of a block for which an expression is worth its making, and the most that are read as one text.
SMALLEST, LARGEST_BLOCK = 16 << 10, 64 << 20
#: The lines of a block from which a layout learns, and the members that it has at most: RE2 has no room for 300.
SAMPLE, MEMBERS = 20, 150
#: How many blocks may fit no layout before the rest of a body is read line by line.
MISFITS = 3

_DATE = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-[0-9]{2}-[0-9]{2}"
_MOMENT = rf"{_DATE}[T ][0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}}(?:\.[0-9]{{3}}(?:[0-9]{{3}})?)?"
_WHOLE = "(?:0|-?[1-9][0-9]*)"
_DECIMAL = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
_EXPONENT = "[eE][-+]?[0-9]+"
# The reader of lines takes `-0` for a whole number, and so for no negative zero.
_FLOAT = rf"{_WHOLE}|-?(?:0|[1-9][0-9]*)\.[0-9]+|{_DECIMAL}{_EXPONENT}"
_PLAIN = r'[^"\\\x00-\x1f]*'
_TEXT = rf'"{_PLAIN}(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_PLAIN})*"'
_ANY = f"{_TEXT}|{_DECIMAL}(?:{_EXPONENT})?|true|false"


class Layout:
    """How the lines of a body are laid out, as far as it is known from the lines before.

    `read_line` reads a line into a row, and an empty one into None; ValueError for one that cannot be read.
    """

    def __init__(self, schema: pa.Schema, read_line: Callable[[str], Any]) -> None:
        self._schema = schema
        self._read_line = read_line
        self._kinds = {field.name: found for field in schema if (found := _kind(field.type))}
        self._names: list[str] = []
        self._pattern = "^\r?$"
        self._misfits = 0 if len(self._kinds) == len(schema) > 0 else MISFITS

    def read(self, data: bytes) -> pa.RecordBatch | None:
        """Return the rows of a block of whole lines; None if they must be read line by line."""
        if self._misfits >= MISFITS or not SMALLEST <= len(data) <= LARGEST_BLOCK:
            return None
        try:
            batch = self._batch(data)
        except (ValueError, OverflowError, RecursionError, pa.ArrowException):  # the reader of lines names it
            batch = None
        self._misfits = self._misfits + 1 if batch is None else 0
        return batch

    def _batch(self, data: bytes) -> pa.RecordBatch | None:
        """Return the rows of a block, after learning from lines that do not fit; None if too few fit."""
        lines = compute.list_flatten(compute.split_pattern(pa.array([data.decode()]), "\n"))
        for _ in range(2):
            fit = compute.match_substring_regex(lines, self._pattern)
            odd = lines.filter(compute.invert(fit))
            if not len(odd):
                return self._parsed(data)
            if not self._learn(odd.slice(0, SAMPLE).to_pylist()):
                break
        return self._mixed(lines, fit) if 2 * len(odd) < len(lines) else None

    def _learn(self, lines: list[str]) -> bool:
        """Add the names that these lines have to the order; return whether that is a new layout."""
        known = len(self._names)
        for line in filter(str.strip, lines):
            members, index = json.loads(line, object_pairs_hook=tuple), 0
            for name, _ in members if isinstance(members, tuple) else ():
                if name in self._names:
                    index = self._names.index(name) + 1
                else:
                    self._names.insert(index, name)
                    index += 1
        if not known < len(self._names) <= MEMBERS:
            return False
        self._pattern = rf"^(?:\{{{''.join(map(self._member, self._names))}\}})?\r?$"
        return True

    def _member(self, name: str) -> str:
        """Return the expression of a member that may be missing, and of a comma behind it."""
        keys = "|".join({re.escape(json.dumps(name, ensure_ascii=ascii)) for ascii in (True, False)})
        value = self._kinds[name].expression if name in self._kinds else _ANY
        return rf"(?:(?:{keys}): ?(?:null|{value})(?:, ?)?)?"

    def _mixed(self, lines: pa.Array, fit: pa.Array) -> pa.RecordBatch | None:
        """Return the rows of a block whose lines mostly fit the layout."""
        fitting = compute.and_(fit, compute.starts_with(lines, "{"))
        parsed = self._parsed("\n".join(lines.filter(fitting).to_pylist()).encode())
        if parsed is None:
            return None
        indexes, rows = compute.indices_nonzero(fitting).to_pylist(), []
        for index in compute.indices_nonzero(compute.invert(fit)).to_pylist():
            if (row := self._read_line(lines[index].as_py())) is not None:
                indexes.append(index)
                rows.append(row)
        both = pa.concat_batches([parsed, pa.RecordBatch.from_pylist(rows, schema=self._schema)])
        return both.take(compute.array_sort_indices(pa.array(indexes)))

    def _parsed(self, data: bytes) -> pa.RecordBatch | None:
        """Return the rows of lines that fit; None if one has a null where there must be none."""
        kinds = [self._kinds[field.name] for field in self._schema]
        plain = [field.with_type(kind.plain(field.type)) for field, kind in zip(self._schema, kinds, strict=True)]
        table = pa_json.read_json(
            pa.BufferReader(data),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pa_json.ParseOptions(explicit_schema=pa.schema(plain), unexpected_field_behavior="ignore"),
        )
        columns = []
        for field, kind, chunked in zip(self._schema, kinds, table.columns, strict=True):
            column = kind.convert(chunked.combine_chunks(), field.type)
            if column.null_count and not field.nullable:
                return None
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


# -- values --------------------------------------------------------------------------------------------------------


def _floats(column: pa.Array, kind: pa.DataType) -> pa.Array:
    numbers = column.cast(kind, safe=False)
    if compute.any(compute.is_inf(numbers)).as_py():
        raise OverflowError("a number may be too large")
    return numbers


def _bytes(column: pa.Array, kind: pa.DataType) -> pa.Array:
    texts = column.to_pylist()
    return pa.array([None if text is None else base64.b64decode(text, validate=True) for text in texts], kind)


class _Kind(NamedTuple):
    """How the values of a type are written, and read."""

    #: Matches a value.
    expression: str
    #: Returns the type as which pyarrow.json is to read it.
    plain: Callable[[pa.DataType], pa.DataType] = lambda kind: kind
    #: Makes a column of the type of what pyarrow.json has read.
    convert: Callable[[pa.Array, pa.DataType], pa.Array] = lambda column, _: column


def _kind(kind: pa.DataType) -> _Kind | None:
    """Return how values of a type are read; None for a type that only the reader of lines reads."""
    if types.is_timestamp(kind):
        return _Kind(f'"{_MOMENT}{"Z" if kind.tz else ""}"') if kind.unit == "us" else None
    return next((found for known, found in _KINDS if known(kind)), None)


_KINDS: tuple[tuple[Callable[[Any], bool], _Kind], ...] = (
    (types.is_boolean, _Kind("true|false")),
    (types.is_integer, _Kind(_WHOLE)),
    (types.is_floating, _Kind(_FLOAT, lambda _: pa.float64(), _floats)),
    # pyarrow.json does not check the precision of a decimal. With 38 digits on each side all fit the plain type.
    (
        types.is_decimal,
        _Kind(r"-?(?:0|[1-9][0-9]{0,37})(?:\.[0-9]{1,38})?", lambda kind: pa.decimal256(76, kind.scale), pa.Array.cast),
    ),
    (types.is_date, _Kind(f'"{_DATE}"', lambda _: pa.string(), pa.Array.cast)),
    (is_text, _Kind(_TEXT)),
    (is_bytes, _Kind(_TEXT, lambda _: pa.string(), _bytes)),
)
