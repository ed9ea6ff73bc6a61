"""Reads lines of jsonl that are laid out alike, many at a time: one regular expression takes the place of a parser.

Invariant: a layout reads a block of lines as decoders.py reads each of them, or it does not read the block at all. It
raises no error: the reader of lines names what is wrong. A layout has an object a line; its members come in one order,
and any may be missing. A wanted member is no object and no list.

pyarrow.json could not keep to this. A line such as `null` ends its process (pyarrow 26, a segmentation fault); it takes
two objects on a line for two rows, and a quoted number for a decimal.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
from pyarrow import types

from dropq.spark.arrow_cast import is_bytes, is_text

#: The fewest bytes of a block for which an expression is worth its making, and the most that are read as one text.
SMALLEST, LARGEST_BLOCK = 16 << 10, 64 << 20
#: The lines of a block from which a layout learns, and the members that it has at most.
SAMPLE, MEMBERS = 20, 300
#: How many blocks may fit no layout before the rest of a body is read line by line.
MISFITS = 3

#: A function that makes a column of the texts of its values; a missing value is an empty text.
Maker = Callable[[Sequence[str], pa.DataType], pa.Array]

_WHOLE = r"(?:0|-?[1-9][0-9]*+)"
_DECIMAL = r"-?(?:0|[1-9][0-9]*+)(?>\.[0-9]++)?+"
_NUMBER = rf"{_DECIMAL}(?>[eE][-+]?+[0-9]++)?+"
# The reader of lines takes `-0` for a whole number, and so for no negative zero.
_FLOAT = rf"(?!-0[^.eE]){_NUMBER}"
_EMPTY_LINES = re.compile(r"^\n", re.MULTILINE)
_PLAIN = r'[^"\\\x00-\x1f]*+'
_OPEN_TEXT = rf'"{_PLAIN}(?>\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_PLAIN})*+'
_MOMENT = r"(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{3}(?:[0-9]{3})?)?"
_ANY = rf'(?:{_OPEN_TEXT}"|{_NUMBER}|true|false)'


class Layout:
    """How the lines of a body are laid out, as far as it is known from the lines before."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._kinds = {field.name: found for field in schema if (found := _kind(field.type))}
        self._names: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self._misfits = 0 if len(self._kinds) == len(schema) > 0 else MISFITS

    def read(self, data: bytes) -> pa.RecordBatch | None:
        """Return the rows of a block of whole lines; None if they must be read line by line."""
        if self._misfits >= MISFITS or not SMALLEST <= len(data) <= LARGEST_BLOCK:
            return None
        try:
            text = f"{data.decode()}\n"
            rows = self._rows(_EMPTY_LINES.sub("", text) if "\n\n" in text else text)
            batch = None if rows is None else self._batch(rows)
        except (ValueError, OverflowError, RecursionError, pa.ArrowException):  # the reader of lines names it
            batch = None
        self._misfits = self._misfits + 1 if batch is None else 0
        return batch

    def _rows(self, text: str) -> list[tuple[str, ...]] | None:
        """Return the values of the wanted members of all lines, after learning from lines that do not fit."""
        for _ in range(2):
            if self._pattern is not None:
                rows = self._pattern.findall(text)
                if len(rows) == text.count("\n"):
                    return rows
            if not self._learn(islice(self._unfit(text), SAMPLE)):
                return None
        return None

    def _unfit(self, text: str) -> Iterator[str]:
        """Yield the lines that do not fit."""
        lines = (line for line in text.split("\n") if line)
        return lines if self._pattern is None else (line for line in lines if not self._pattern.match(f"{line}\n"))

    def _learn(self, lines: Iterator[str]) -> bool:
        """Add the names that these lines have to the order; return whether that is a new layout."""
        known = len(self._names)
        for line in lines:
            members, index = json.loads(line, object_pairs_hook=tuple), 0
            for name, _ in members if isinstance(members, tuple) else ():
                if name in self._names:
                    index = self._names.index(name) + 1
                else:
                    self._names.insert(index, name)
                    index += 1
        if not known < len(self._names) <= MEMBERS:
            return False
        members = "".join(map(self._member, self._names))
        # Two groups more, as `findall` returns tuples only where there are several.
        layout = rf"^()()\{{{members}\}}\r?+\n"
        self._pattern = re.compile(layout, re.MULTILINE)
        return True

    def _member(self, name: str) -> str:
        """Return the expression of a member that may be missing, and of the comma behind it."""
        keys = "|".join({re.escape(json.dumps(name, ensure_ascii=ascii)) for ascii in (True, False)})
        value = self._kinds[name][0] if name in self._kinds else _ANY
        return rf'(?>(?:{keys}): ?+(?:null|{value})(?:, ?+(?=")|(?=\}})))?+'

    def _batch(self, rows: list[tuple[str, ...]]) -> pa.RecordBatch | None:
        wanted = [name for name in self._names if name in self._kinds]
        texts = dict(zip(wanted, list(zip(*rows, strict=True))[2:], strict=True))
        columns = []
        for field in self._schema:
            make = self._kinds[field.name][1]
            column = make(texts[field.name], field.type) if field.name in texts else pa.nulls(len(rows), field.type)
            if column.null_count and not field.nullable:
                return None
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


# -- values: the expression of a type, and the maker of its columns ------------------------------------------------


def _each(convert: Callable[[str], Any], texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    return pa.array([convert(text) if text else None for text in texts], kind)


def _floats(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    numbers = pa.array([float(text.strip('"')) if text else None for text in texts], kind)
    if compute.any(compute.is_inf(numbers)).as_py():
        raise OverflowError("a number may be too large")
    return numbers


def _cast(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    return pa.array([text or None for text in texts], pa.string()).cast(kind)


def _moments(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    return _cast(texts, pa.timestamp("us")).view(kind)


def _texts(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    return pa.array([(_unquoted(text) if "\\" in text else text[1:]) if text else None for text in texts], kind)


def _unquoted(text: str) -> Any:
    return json.loads(f'{text}"')


def _bytes(text: str) -> bytes:
    return base64.b64decode(text[1:], validate=True)


def _kind(kind: pa.DataType) -> tuple[str, Maker] | None:
    """Return the expression of a type's values, with one group, and the maker of its columns; None for other types."""
    if types.is_timestamp(kind):
        return (rf'"({_MOMENT}){"Z" if kind.tz else ""}"', _moments) if kind.unit == "us" else None
    return next(((value, make) for known, value, make in _KINDS if known(kind)), None)


_KINDS: tuple[tuple[Callable[[Any], bool], str, Maker], ...] = (
    (types.is_boolean, "(true|false)", partial(_each, "true".__eq__)),
    (types.is_integer, rf"({_WHOLE})", partial(_each, int)),
    (types.is_floating, rf'({_FLOAT}|"NaN")', _floats),
    (types.is_decimal, rf"({_DECIMAL})", _cast),
    (types.is_date, r'"([0-9]{4}-[0-9]{2}-[0-9]{2})"', partial(_each, date.fromisoformat)),
    (is_text, rf'({_OPEN_TEXT})"', _texts),  # with the quote that opens it, as an empty text is no null
    (is_bytes, rf'({_OPEN_TEXT})"', partial(_each, _bytes)),
)
