"""One body as rows: jsonl, csv, parquet, arrow or text, read as Arrow batches of the schema that is wanted.

Invariant: what bodies.py wrote comes back as the same values, in batches of exactly the wanted schema. Columns are
matched by name: what the body lacks is null, what nobody wants is passed over. A value that would have to be bent to
fit is none: the body is refused.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pa_csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import types

#: Reads the batches of one body, in the wanted schema.
Parser = Callable[[IO[bytes], pa.Schema], Iterator[pa.RecordBatch]]
#: Rows that a batch has at most.
ROWS = 4096
#: Bytes of text that are read at a time; a line may be longer.
CHUNK = 256 << 10

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WHOLE = re.compile("0|-?[1-9][0-9]{0,19}")
_FINER = re.compile(r"[.,]\d{6}0*[1-9]")  # Python would cut a time off after its microseconds
_ARROW_SAYS = re.compile(r"(?:In CSV column #(\d+): |CSV parse error: )?(?:Row #(\d+): )?(.*)")


class BadBody(ValueError):
    """Raised when a body cannot be read as the rows that are wanted: it says what is wrong, and where."""


def read_jsonl(file: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read an object a line; a key that is missing or null is a null, and an empty line is no row."""
    decode = _object(list(schema), "the row", "column ")
    for first, lines in _lines(file):
        rows = [_row(line, number, decode) for number, line in enumerate(lines, first) if not line.isspace()]
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)


def read_csv(file: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read a row a line after the header; nothing is a null, and a quoted nothing is an empty text."""
    for field in schema:
        if not any(known(field.type) for known in _IN_CSV):
            raise BadBody(f"column {field.name} is {field.type}, which csv does not hold")
    names: list[str] = []
    lengths = _row_lengths(file)
    if header := next(lengths):
        longest = max(header, max(lengths, default=0))
        with _refusing("csv", names):
            names += _csv_names(file, header)
            _present(names, schema)
            for batch in _open_csv(file, longest, column_types=schema, include_columns=schema.names):
                yield from _conform(batch, schema)


def read_parquet(file: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read the wanted columns of a Parquet file, and nothing else of it."""
    with _refusing("parquet"):
        body = pq.ParquetFile(file)
        present = _fitting(body.schema_arrow, schema)
        for batch in body.iter_batches(ROWS, columns=present, use_threads=False):
            yield from _conform(batch, schema)


def read_arrow(file: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read an Arrow IPC stream."""
    with _refusing("arrow"):
        body = pa.ipc.open_stream(file)
        present = _fitting(body.schema, schema)
        for batch in body:
            yield from _conform(batch.select(present), schema)


def read_text(file: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read a row a line into the one column, whatever its name; an empty line is an empty text."""
    if [_is_text(kind) for kind in schema.types] != [True]:
        wanted = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise BadBody(f"text is one column of strings, and {wanted} is wanted")
    for first, lines in _lines(file):
        texts = [_utf8(line.removesuffix(b"\n"), number) for number, line in enumerate(lines, first)]
        yield pa.RecordBatch.from_arrays([pa.array(texts, schema.field(0).type)], schema=schema)


PARSERS: dict[str, Parser] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text,
}


# -- lines ---------------------------------------------------------------------------------------------------------


def _lines(file: IO[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the lines of a body in parts, each with the number of its first line."""
    number = 1
    while lines := file.readlines(CHUNK):
        for start in range(0, len(lines), ROWS):
            part = lines[start : start + ROWS]
            yield number, part
            number += len(part)


def _utf8(line: bytes, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"line {number} is not UTF-8: {error.reason} at byte {error.start}") from error


def _row(line: bytes, number: int, decode: Decoder) -> Any:
    text = _utf8(line, number)
    try:
        return decode(_loads(text))
    except BadBody as error:
        raise BadBody(f"line {number}: {error}") from error
    except json.JSONDecodeError as error:
        raise BadBody(f"line {number} is not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, lists in lists in lists
        raise BadBody(f"line {number} is JSON beyond all bounds: {error}") from error


# -- JSON: what it has in Python as the values of each type, the mirror of bodies.py ------------------------------

#: Reads a value of JSON.
Decoder = Callable[[Any], Any]


class _Number(str):
    """A number with a fraction or an exponent, as it was written: a decimal keeps every digit."""

    __slots__ = ()


_loads = json.JSONDecoder(parse_float=_Number).decode  # json.loads would make a decoder for each line


def _object(fields: list[pa.Field], where: str, prefix: str) -> Decoder:
    known = [(field.name, _or_null(field, f"{prefix}{field.name}")) for field in fields]

    def decode(value: Any) -> Any:
        found = _only(dict, value, where)
        return {name: read(found.get(name)) for name, read in known}

    return decode


def _list(kind: pa.DataType, where: str) -> Decoder:
    item = _or_null(kind.value_field, f"{where}[]")
    return lambda value: [item(part) for part in _only(list, value, where)]


def _map(kind: pa.DataType, where: str) -> Decoder:
    key, item = _key(kind.key_type, f"the key of {where}"), _or_null(kind.item_field, f"{where}{{}}")
    return lambda value: [(key(name), item(part)) for name, part in _only(dict, value, where).items()]


def _key(kind: pa.DataType, where: str) -> Decoder:
    decode = _decoder(kind, where)
    if types.is_integer(kind):
        return lambda name: decode(int(name) if _WHOLE.fullmatch(name) else name)
    return decode


def _or_null(field: pa.Field, where: str) -> Decoder:
    decode, nullable = _decoder(field.type, where), field.nullable

    def read(value: Any) -> Any:
        if value is None and not nullable:
            raise BadBody(f"{where} is null, and must not be")
        return None if value is None else decode(value)

    return read


def _decoder(kind: pa.DataType, where: str) -> Decoder:
    """Return what reads a value of a type, other than null."""
    if types.is_struct(kind):
        return _object(list(kind), where, f"{where}.")
    if types.is_map(kind):
        return _map(kind, where)
    if _is_list(kind):
        return _list(kind, where)
    for known, accepted, converter in _LEAVES:
        if known(kind):
            return _leaf(kind, where, accepted, converter(kind))
    raise BadBody(f"{where} is {kind}, which jsonl does not hold")


def _leaf(kind: pa.DataType, where: str, accepted: tuple[type, ...], convert: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        try:
            if type(value) in accepted:  # not isinstance: True is no integer here, and a number no text
                return convert(value)
        except (ValueError, LookupError, ArithmeticError):
            pass
        raise _misfit(where, value, kind)

    return decode


def _only(shape: type, value: Any, where: str) -> Any:
    if type(value) is not shape:
        raise _misfit(where, value, "an object" if shape is dict else "a list")
    return value


def _misfit(where: str, value: Any, wanted: object) -> BadBody:
    shown = value if type(value) is _Number else json.dumps(value)
    return BadBody(f"{where} is {shown if len(shown) <= 60 else f'{shown[:60]}...'}, and {wanted} is wanted")


def _integer(kind: pa.DataType) -> Decoder:
    limit = 1 << kind.bit_width - 1

    def convert(value: int) -> int:
        if -limit <= value < limit:
            return value
        raise OverflowError

    return convert


def _floating(kind: pa.DataType) -> Decoder:
    # A float of 32 bits ends half a step above its largest number: of what lies beyond, Arrow makes an infinity.
    limit = 2.0**128 - 2.0**103 if types.is_float32(kind) else math.inf

    def convert(value: Any) -> float:
        if type(value) is str:
            return _NOT_FINITE[value]
        number = float(value)
        if abs(number) >= limit and type(value) is not float:
            raise OverflowError
        return number

    return convert


def _decimal(kind: pa.DataType) -> Decoder:
    step, exact = Decimal(1).scaleb(-kind.scale), Context(kind.precision, traps=[InvalidOperation, Inexact])
    return lambda value: exact.quantize(Decimal(value), step)


def _moment(kind: pa.DataType) -> Decoder:
    def convert(value: str) -> datetime:
        moment = datetime.fromisoformat(value)
        if (moment.tzinfo is None) != (kind.tz is None) or _FINER.search(value):
            raise ValueError
        return moment

    return convert


def _text(value: str) -> str:
    if not value.isascii():
        value.encode()  # half a pair of surrogates is no text
    return value


def _either(*known: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda kind: any(is_kind(kind) for is_kind in known)


_is_text = _either(types.is_string, types.is_large_string, types.is_string_view)
_is_bytes = _either(types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
_is_list = _either(types.is_list, types.is_large_list, types.is_fixed_size_list)

#: A type, what JSON's values of it are in Python, and what makes their converter.
_LEAVES: tuple[tuple[Callable[[Any], bool], tuple[type, ...], Callable[[Any], Decoder]], ...] = (
    (types.is_boolean, (bool,), lambda kind: bool),
    (types.is_integer, (int,), _integer),
    (types.is_floating, (int, float, str, _Number), _floating),
    (types.is_decimal, (int, _Number), _decimal),
    (types.is_date, (str,), lambda kind: date.fromisoformat),
    (types.is_timestamp, (str,), _moment),
    (_is_bytes, (str,), lambda kind: partial(base64.b64decode, validate=True)),
    (_is_text, (str,), lambda kind: _text),
    (types.is_null, (), lambda kind: bool),
)
_IN_CSV = [known for known, _, _ in _LEAVES if known is not _is_bytes]


# -- Arrow: the columns of a body in the wanted types ----------------------------------------------------------------


def _row_lengths(file: IO[bytes]) -> Iterator[int]:
    """Yield the bytes of each row of csv, the header first; a row ends where no quote is open."""
    row = quotes = 0
    for line in file:
        row, quotes = row + len(line), quotes + line.count(b'"')
        if quotes % 2 == 0:
            yield row
            row = 0
    yield row


def _csv_names(file: IO[bytes], header: int) -> list[str]:
    file.seek(0)
    first = io.BytesIO(file.read(header))  # a file of its own, since a thread of Arrow's reads ahead, even when dropped
    names: list[str] = _open_csv(first, header).schema.names
    return names


def _open_csv(file: IO[bytes], longest: int, **columns: Any) -> pa_csv.CSVStreamingReader:
    file.seek(0)
    return pa_csv.open_csv(
        file,
        # Arrow wants each row in one block. One thread: with more, its errors do not say in which row.
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=min(max(longest, CHUNK), (1 << 31) - 1)),
        # An empty line is a row: the null of a table that has one column.
        parse_options=pa_csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pa_csv.ConvertOptions(
            include_missing_columns=True,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            **columns,
        ),
    )


@contextmanager
def _refusing(body_format: str, names: Sequence[str] = ()) -> Iterator[None]:
    """Say what Arrow says against a body as a BadBody; csv's columns have numbers there, and here names."""
    try:
        yield
    except BadBody:
        raise
    except (pa.ArrowException, ValueError, OSError, MemoryError) as error:  # garbled lengths ask for any memory
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault, not the body's
        said = str(error) or type(error).__name__
        column, row, said = _ARROW_SAYS.match(said).groups()  # type: ignore[union-attr]  # anything matches
        place = [f"row {row} (the header is row 1)"] if row else []
        place += [f"column {names[int(column)]}"] if column else []
        raise BadBody(f"{', '.join(place) or f'the {body_format} body cannot be read'}: {said:.200}") from error


def _present(names: list[str], schema: pa.Schema) -> list[str]:
    """Return the wanted columns that a body has."""
    present = [name for name in schema.names if name in names]
    for name in present:
        if names.count(name) > 1:
            raise BadBody(f"column {name} is there twice")
    return present


def _fitting(body: pa.Schema, schema: pa.Schema) -> list[str]:
    """Return the wanted columns that a body has, whose types are the wanted ones or fit into them."""
    present = _present(body.names, schema)
    for name in present:
        _check(body.field(name).type, schema.field(name).type, f"column {name}")
    return present


def _check(have: pa.DataType, want: pa.DataType, where: str) -> None:
    have = have.value_type if types.is_dictionary(have) else have
    if types.is_struct(have) and types.is_struct(want):
        for field in want:
            if (index := have.get_field_index(field.name)) >= 0:
                _check(have.field(index).type, field.type, f"{where}.{field.name}")
    elif types.is_map(have) and types.is_map(want):
        _check(have.key_type, want.key_type, f"the key of {where}")
        _check(have.item_type, want.item_type, f"{where}{{}}")
    elif _is_list(have) and _is_list(want):
        _check(have.value_type, want.value_type, f"{where}[]")
    elif not have.equals(want) and not _holds(want, have):
        raise BadBody(f"{where} is {have}, and {want} is wanted")


def _holds(want: pa.DataType, have: pa.DataType) -> bool:
    """Tell whether a type has room for every value of another; for times of nanoseconds, the cast tells."""
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
    alike = (_is_text, _is_bytes, types.is_date, types.is_time, types.is_duration)
    return bool(types.is_null(have)) or any(known(have) and known(want) for known in alike)


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in the wanted schema."""
    batch.validate(full=True)  # garbled offsets would be followed to wherever they point
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        yield pa.RecordBatch.from_arrays([_column(part, field) for field in schema], schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    where = f"column {field.name}"
    column = batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows)
    try:
        # Arrow's cast of a type to itself fails where a struct is null whose fields must not be.
        column = column if column.type.equals(field.type) else column.cast(field.type)
    except pa.ArrowException as error:
        raise BadBody(f"{where} is not {field.type}: {error}") from error
    _refuse_nulls(column, field, where)
    return column


def _refuse_nulls(array: pa.Array, field: pa.Field, where: str) -> None:
    """Refuse nulls where there must not be any: Spark would take them for zeros."""
    if array.null_count and not field.nullable:
        raise BadBody(f"{where} is null, and must not be")
    parts: list[tuple[pa.Array, pa.Field, str]] = []
    if types.is_struct(field.type):
        parts = [(part, child, f".{child.name}") for part, child in zip(_members(array), field.type, strict=True)]
    elif types.is_list(field.type):
        parts = [(array.flatten(), field.type.value_field, "[]")]
    elif types.is_map(field.type):
        pairs = array.cast(pa.list_(pa.struct([field.type.key_field, field.type.item_field])))
        parts = [(_members(pairs.flatten())[1], field.type.item_field, "{}")]
    for part, child, name in parts:
        _refuse_nulls(part, child, f"{where}{name}")


def _members(structs: pa.StructArray) -> list[pa.Array]:
    """Return the fields of those structs that are not null."""
    members: list[pa.Array] = structs.drop_null().flatten()
    return members
