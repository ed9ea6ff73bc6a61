"""Reads a body as rows, in Arrow batches of the wanted schema: jsonl, csv, parquet, arrow or text.

Invariant: reading returns the values that encoders.py wrote, in batches of exactly the wanted schema. Columns are
matched by name: a column that the body lacks is null, and a column that is not wanted is ignored. If a value does not
fit its type without loss, the body is refused. arrow_cast.py knows which types fit.
"""

from __future__ import annotations

import base64
import codecs
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from itertools import chain, starmap
from typing import IO, Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import pyarrow.csv as pa_csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import types

from dropq.format.escapes import LARGEST
from dropq.records.formats import is_empty
from dropq.spark.arrow_cast import (
    ROWS,
    BadBody,
    conform,
    fitting,
    is_bytes,
    is_list,
    is_text,
    present,
    shortened,
    with_int96,
)
from dropq.spark.json_layout import Layout
from dropq.spark.options import CSV, ESCAPES, CsvOptions

#: A function that reads the batches of a body, in the wanted schema. If the body is what is left of a bundle, an empty
#: line in it is a record that was settled, and no row.
Parser = Callable[[IO[bytes], pa.Schema, bool], Iterator[pa.RecordBatch]]
#: Bytes of text that are read at a time; a line may be longer.
CHUNK = 1 << 20
#: Bytes of the longest value that Spark or Arrow can hold, and so of a line, or a row of csv.
LONGEST = LARGEST
#: How many bytes of csv an error shows.
SHOWN = 20

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WHOLE = re.compile("0|-?[1-9][0-9]{0,19}")
# A time finer than microseconds, of which Python would drop digits, or an offset finer than seconds, as Arrow would.
_FINER = re.compile(r"[.,]\d{6}0*[1-9]|[+-]\d\d:?\d\d:?\d\d[.,]")
#: The blanks of a line that counts as empty: those that bytes.strip() takes, and not all of Unicode.
_BLANKS = " \t\n\r\v\f"
_ARROW_ERROR = re.compile(r"(?:In CSV column #(\d+): |CSV parse error: )?(?:Row #(\d+): )?(.*)")


def read_jsonl(file: IO[bytes], schema: pa.Schema, _is_rest: bool) -> Iterator[pa.RecordBatch]:
    """Read an object from each line; a missing key is null, and an empty line is skipped."""
    with _refusing("jsonl"):
        decode = _object(list(schema), "the row", "column ")
        layout = Layout(schema, lambda line: decode(_parse(line)) if line.strip(_BLANKS) else None)
        for first, data in _blocks(file):
            batch = layout.read(data) if len(data) <= LONGEST else None
            if batch is not None:
                yield from (batch.slice(start, ROWS) for start in range(0, batch.num_rows, ROWS))
                continue
            for number, lines in _parts(first, data):
                rows = [_row_at(at, line, decode) for at, line in enumerate(lines, number) if line.strip()]
                if rows:
                    yield pa.RecordBatch.from_pylist(rows, schema=schema)


def read_csv(file: IO[bytes], schema: pa.Schema, is_rest: bool, *, csv: CsvOptions = CSV) -> Iterator[pa.RecordBatch]:
    """Read a row from each line after the header; an empty field is null, a quoted empty field is an empty text.

    An empty line is null in a table with one column, unless the body is what is left of a bundle; otherwise it is
    skipped.
    """
    for field in schema:
        if not any(known(field.type) for known in _IN_CSV):
            raise BadBody(f"column {field.name} is {field.type}, which csv does not hold")
    names: list[str] = []
    with _refusing("csv", names):
        blocks = _doubled_rows(file, _header_start(file), csv)
        if first := next(blocks, b""):
            header = first[: _end(_FIRST_ROW, first)] + b"\n"
            names += _open_csv([header], csv).schema.names
            present(names, schema)
            texts = [field.with_type(pa.string()) if _is_number(field.type) else field for field in schema]
            columns = {"column_types": pa.schema(texts), "include_columns": schema.names}
            row = 2
            for batch in _open_csv(chain([first], blocks), csv, skip_empty=is_rest or len(names) > 1, **columns):
                yield from conform(_with_numbers(batch, schema, row), schema)
                row += batch.num_rows


def read_parquet(file: IO[bytes], schema: pa.Schema, _is_rest: bool) -> Iterator[pa.RecordBatch]:
    """Read only the wanted columns of a Parquet file."""
    with _refusing("parquet"):
        body = pq.ParquetFile(file, coerce_int96_timestamp_unit="us")
        wanted = fitting(with_int96(body), schema)
        for batch in body.iter_batches(ROWS, columns=wanted, use_threads=False):
            yield from conform(batch, schema)


def read_arrow(file: IO[bytes], schema: pa.Schema, _is_rest: bool) -> Iterator[pa.RecordBatch]:
    """Read an Arrow IPC stream."""
    with _refusing("arrow"):
        body = pa.ipc.open_stream(file)
        wanted = fitting(body.schema, schema)
        for batch in body:
            yield from conform(batch.select(wanted), schema)


def read_text(file: IO[bytes], schema: pa.Schema, is_rest: bool) -> Iterator[pa.RecordBatch]:
    """Read each line into the only column, whatever its name; skip empty lines if the body is the rest of a bundle."""
    if [is_text(kind) for kind in schema.types] != [True]:
        wanted = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise BadBody(f"text is one column of strings, and {wanted} is wanted")
    with _refusing("text"):
        for first, lines in chain.from_iterable(starmap(_parts, _blocks(file))):
            texts = [
                _utf8(line, number) for number, line in enumerate(lines, first) if not (is_rest and is_empty(line))
            ]
            if texts:
                yield pa.RecordBatch.from_arrays([pa.array(texts, schema.field(0).type)], schema=schema)


PARSERS: dict[str, Parser] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text,
}


def parser(body_format: str, csv: CsvOptions) -> Parser:
    """Return the parser of a body format."""
    return partial(read_csv, csv=csv) if body_format == "csv" else PARSERS[body_format]


@contextmanager
def _refusing(body_format: str, names: Sequence[str] = ()) -> Iterator[None]:
    """Turn Arrow's errors about a body into BadBody, with names in place of csv's column numbers."""
    try:
        yield
    except BadBody:
        raise
    except (pa.ArrowException, ValueError, OSError, MemoryError) as error:  # a damaged length may ask for any memory
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the file cannot be read, whatever is in it
        text = str(error) or type(error).__name__
        column, row, text = _ARROW_ERROR.match(text).groups()  # type: ignore[union-attr]  # anything matches
        position = [f"row {row} (the header is row 1)"] if row else []
        position += [f"column {names[int(column)]}"] if column else []
        raise BadBody(f"{', '.join(position) or f'the {body_format} body cannot be read'}: {text:.200}") from error


# -- lines ---------------------------------------------------------------------------------------------------------


def _text_start(file: IO[bytes]) -> int:
    """Go to the start of the text, after a byte order mark if there is one; return its position."""
    has_bom = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return file.seek(len(codecs.BOM_UTF8) if has_bom else 0)


def _blocks(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield a body in blocks of whole lines, each with the number of its first line.

    The last line has no line feed. A line that is too long is cut off, and it may only be refused.
    """
    _text_start(file)
    number = 1
    while data := file.read(CHUNK):
        data = (data + file.readline(LONGEST + 1)).removesuffix(b"\n")
        yield number, data
        number += data.count(b"\n") + 1


def _parts(number: int, data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the lines of a block without their ends, in parts of a batch, each with the number of its first line."""
    lines = data.split(b"\n")
    for start in range(0, len(lines), ROWS):
        part = lines[start : start + ROWS]
        if max(map(len, part)) > LONGEST:
            long = next(index for index, line in enumerate(part, number + start) if len(line) > LONGEST)
            raise BadBody(f"line {long} {_too_long()}")
        yield number + start, part


def _too_long() -> str:
    return f"is longer than the {LONGEST} bytes that a value of Spark has at most"


def _utf8(line: bytes, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"line {number} is not UTF-8: {error.reason} at byte {error.start}") from error


def _row_at(number: int, line: bytes, decode: Decoder) -> Any:
    text = _utf8(line, number)
    try:
        return decode(_parse(text))
    except BadBody as error:
        raise BadBody(f"line {number}: {error}") from error
    except json.JSONDecodeError as error:
        raise BadBody(f"line {number} is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:  # deeply nested lists
        raise BadBody(f"line {number} is JSON that is nested too deeply") from error


# -- JSON: from Python's values to those of each type, the reverse of encoders.py ----------------------------------

#: A function that converts a value of JSON.
Decoder = Callable[[Any], Any]


class _Number(str):
    """A number with a fraction or an exponent, as it was written: a decimal keeps every digit."""

    __slots__ = ()


def _integer_of(digits: str) -> int | _Number:
    """Read an integer; keep its text if it has too many digits for Python, as the column may not be wanted."""
    try:
        return int(digits)
    except ValueError:
        return _Number(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise BadBody(f"{shortened(json.dumps(name))} is there twice in an object")
    return members


# json.loads would make a decoder for each line. A call for each integer takes time, and most lines do not need it.
_decoder_of_most = json.JSONDecoder(parse_float=_Number, object_pairs_hook=_unique)
_decoder_of_any = json.JSONDecoder(parse_float=_Number, object_pairs_hook=_unique, parse_int=_integer_of)


def _parse(line: str) -> Any:
    text = line.strip(" \t\r")
    try:
        value, end = _decoder_of_most.raw_decode(text)
    except (BadBody, json.JSONDecodeError):
        raise
    except ValueError:
        value, end = _decoder_of_any.raw_decode(text)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _object(fields: list[pa.Field], where: str, prefix: str) -> Decoder:
    known = [(field.name, _or_null(field, f"{prefix}{field.name}")) for field in fields]

    def decode(value: Any) -> Any:
        members = _only(dict, value, where)
        return {name: read(members.get(name)) for name, read in known}

    return decode


def _list(kind: pa.DataType, where: str) -> Decoder:
    item = _or_null(kind.value_field, f"{where}[]")
    return lambda value: [item(part) for part in _only(list, value, where)]


def _map(kind: pa.DataType, where: str) -> Decoder:
    key, item = _key(kind.key_type, f"the key of {where}"), _or_null(kind.item_field, f"{where}{{}}")

    def decode(value: Any) -> Any:
        pairs = [(key(name), item(part)) for name, part in _only(dict, value, where).items()]
        if len(dict(pairs)) < len(pairs):  # as two different texts may be the same time
            raise BadBody(f"{where} has a key twice")
        return pairs

    return decode


def _key(kind: pa.DataType, where: str) -> Decoder:
    decode = _decoder(kind, where)
    if types.is_integer(kind):
        return lambda name: decode(int(name) if _WHOLE.fullmatch(name) else name)
    return decode


def _or_null(field: pa.Field, where: str) -> Decoder:
    decode, nullable = _decoder(field.type, where), field.nullable

    def read(value: Any) -> Any:
        if value is not None:
            return decode(value)
        if not nullable:
            raise BadBody(f"{where} is null, and must not be")
        return None

    return read


def _decoder(kind: pa.DataType, where: str) -> Decoder:
    if types.is_struct(kind):
        return _object(list(kind), where, f"{where}.")
    if types.is_map(kind):
        return _map(kind, where)
    if is_list(kind):
        return _list(kind, where)
    for known, accepted, converter in _LEAVES:
        if known(kind):
            return _leaf(kind, where, accepted, converter(kind))
    raise BadBody(f"{where} is {kind}, which jsonl does not hold")


def _leaf(kind: pa.DataType, where: str, accepted: tuple[type, ...], convert: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        try:
            if type(value) in accepted:  # not isinstance: True must not pass as an int, nor a _Number as a str
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
    return BadBody(f"{where} is {shortened(shown)}, and {wanted} is wanted")


def _integer(kind: pa.DataType) -> Decoder:
    limit = 1 << kind.bit_width - 1

    def convert(value: int) -> int:
        if -limit <= value < limit:
            return value
        raise OverflowError

    return convert


def _floating(kind: pa.DataType) -> Decoder:
    # Arrow rounds a number to infinity if it is at least half a step above the largest 32-bit float.
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
        value.encode()  # raises for half of a surrogate pair
    return value


#: A test of a type, the Python types that JSON's values of it have, and a function that returns their converter.
_LEAVES: tuple[tuple[Callable[[Any], bool], tuple[type, ...], Callable[[Any], Decoder]], ...] = (
    (types.is_boolean, (bool,), lambda kind: bool),
    (types.is_integer, (int,), _integer),
    (types.is_floating, (int, float, str, _Number), _floating),
    (types.is_decimal, (int, _Number), _decimal),
    (types.is_date, (str,), lambda kind: date.fromisoformat),
    (types.is_timestamp, (str,), _moment),
    (is_bytes, (str,), lambda kind: partial(base64.b64decode, validate=True)),
    (is_text, (str,), lambda kind: _text),
    (types.is_null, (), lambda kind: bool),
)
_IN_CSV = [known for known, _, _ in _LEAVES if known is not is_bytes]


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


# -- csv: rows are split as Arrow splits them, and numbers are read as in JSON -------------------------------------

# Only at the start of a field does a quote open a quoted text, and behind the quote that ends it the field ends. In the
# text, a quote is written twice, or behind a backslash. Csv with another separator or quote is split with these in the
# places of the comma and the double quote, and goes to Arrow as it was.
_DOUBLED, _BACKSLASHED = rb'"[^"]*+(?>""[^"]*+)*+"', rb'"[^"\\]*+(?>\\(?s:.)[^"\\]*+)*+"'
_BEGINS, _ENDS, _GOES_ON = rb"(?<![^,\r\n])", rb"(?![^,\r\n])", rb"[^,\r\n]"
_ROW = rb'(?>%b|[^",\r\n][^,\r\n]*+|,)*+'
_ROW_AND_END = rb"(" + _ROW + rb")(?>\r\n?|\n)"
_ROWS = rb"(?>" + _ROW + rb"[\r\n])*+"
_FIRST_ROW = re.compile(_ROW % (_DOUBLED + _ENDS))
# Everything before a quote that is not closed; going from quote to quote is faster than from field to field.
_UNTIL_OPEN = rb'[^"]*+(?>(?:' + _BEGINS + rb'%b|(?<=[^,\r\n])")[^"]*+)*+'
# Everything before a quote in a field that does not begin with one.
_ALL_QUOTED = re.compile(rb'[^"]*+(?>%b%b%b[^"]*+)*+' % (_BEGINS, _DOUBLED, _ENDS))
_QUOTED_FIELD = re.compile(_BEGINS + _BACKSLASHED + _ENDS)
_ESCAPED = re.compile(rb'\\(["\\])')


class _Dialect(NamedTuple):
    """How a quote is written inside quotes."""

    #: Matches a row and its end, and has the row as its group.
    row: re.Pattern[bytes]
    #: Matches the complete rows.
    rows: re.Pattern[bytes]
    #: Matches everything before a quote that is not closed as it should be.
    closed: re.Pattern[bytes]
    #: Matches a quoted text with something behind it.
    behind: re.Pattern[bytes]
    #: The part of an error that says what to do.
    way: str
    #: Tables by which bytes change places before the patterns are used, and after; empty for none.
    to: bytes = b""
    back: bytes = b""


_DIALECTS = {
    ESCAPES[0]: _Dialect(
        re.compile(_ROW_AND_END % (_DOUBLED + _ENDS)),
        re.compile(_ROWS % (_DOUBLED + _ENDS)),
        re.compile(_UNTIL_OPEN % (_DOUBLED + _ENDS)),
        re.compile(_DOUBLED + _GOES_ON),
        "inside quotes a quote is written twice; or by a backslash, with the option escape=\\",
    ),
    ESCAPES[1]: _Dialect(
        re.compile(_ROW_AND_END % (_BACKSLASHED + _ENDS)),
        re.compile(_ROWS % (_BACKSLASHED + _ENDS)),
        re.compile(_UNTIL_OPEN % (_BACKSLASHED + _ENDS)),
        re.compile(_BACKSLASHED + _GOES_ON),
        "with escape=\\ a quote inside quotes has a backslash before it; without this option it is written twice",
    ),
}


def _dialect(csv: CsvOptions) -> _Dialect:
    """Return how to split csv; its separator and quote change places with the usual ones."""
    own, usual = csv.sep + csv.quote, CSV.sep + CSV.quote
    own, usual = (one + "".join(sorted({*other} - {*one})) for one, other in ((own, usual), (usual, own)))
    if own == usual:
        return _DIALECTS[csv.escape]
    to, back = (bytes.maketrans(a.encode(), b.encode()) for a, b in ((own, usual), (usual, own)))
    return _DIALECTS[csv.escape]._replace(to=to, back=back)


def _header_start(file: IO[bytes]) -> int:
    """Return the position of the first line that is not empty."""
    start = _text_start(file)
    while line := file.readline(CHUNK):
        if header := line.lstrip(b"\r\n"):
            return start + len(line) - len(header)
        start += len(line)
    return start


def _doubled_rows(file: IO[bytes], start: int, csv: CsvOptions) -> Iterator[bytes]:
    """Yield csv in blocks of whole rows, with the usual separator and quote; quotes inside quotes are written twice.

    BadBody if a quoted text does not end where its field ends, or if it is likely that backslashes escape its quotes.
    """
    rows = _whole_rows(file, start, _dialect(csv))
    if csv.escape == ESCAPES[1]:
        for _, block in rows:
            yield _QUOTED_FIELD.sub(_doubled, block) if b"\\" in block else block
        return
    seen = False
    for at, block in rows:
        seen = _refuse_backslashes(block, at, seen=seen)
        yield block


def _doubled(field: re.Match[bytes]) -> bytes:
    """Return a quoted field in which quotes are written twice; a backslash before anything else stays, as in Spark."""
    return _ESCAPED.sub(lambda pair: b'""' if pair[1] == b'"' else pair[1], field[0])


def _refuse_backslashes(block: bytes, start: int, *, seen: bool) -> bool:
    """Return whether a backslash stood before a quote until now.

    Where backslashes escape quotes, a text that is read as if quotes were written twice goes on in the next columns,
    until a quote stands in a field that does not begin with one. BadBody if there is such a quote in a row that has
    such a backslash, or behind that row.
    """
    if not seen and b"\\" not in block:  # one byte is found ten times as fast as two
        return False
    if (first := 0 if seen else block.find(b'\\"')) < 0:
        return False
    row = 0 if seen else _end(_DIALECTS[ESCAPES[0]].rows, block[:first])
    found = _ALL_QUOTED.match(block, row)
    if found is not None and found.end() < len(block):
        raise BadBody(
            f"a quote is in a field that does not begin with one, at byte {start + found.end()}, and a backslash "
            "is before another: if backslashes escape quotes, as in what Spark writes, give the option escape=\\; "
            "else put that field in quotes"
        )
    return True


def _whole_rows(file: IO[bytes], start: int, dialect: _Dialect) -> Iterator[tuple[int, bytes]]:
    """Yield csv in blocks that end at the end of a row, each with its offset in the body."""
    file.seek(start)
    data = b""
    while more := file.read(min(max(CHUNK, len(data)), LONGEST - len(data))):  # doubles the data for a long row
        data += more.translate(dialect.to) if dialect.to else more
        if end := _rows_end(data, start, dialect):
            yield start, data[:end]
            data, start = data[end:], start + end
        elif len(data) == LONGEST:
            raise BadBody(f"the row at byte {start} {_too_long()}")
    if (opening := _end(dialect.closed, data)) < len(data):
        _refuse_behind(data, opening, start, dialect)
        raise BadBody(f"a quote is open at the end: it opens at byte {start + opening}")
    if data:
        # Without a row end, Arrow takes an empty field at the end for one in quotes if the one before has quotes.
        yield start, data + b"\n"


def csv_rows(data: bytes, csv: CsvOptions) -> list[bytes]:
    """Return the rows of csv without their ends; the last is what follows the last row end, also if it is no row."""
    dialect, rows, at = _dialect(csv), [], 0
    swapped = data.translate(dialect.to) if dialect.to else data
    while found := dialect.row.match(swapped, at):
        rows.append(data[at : found.end(1)])
        at = found.end()
    return [*rows, data[at:]]


def _rows_end(data: bytes, start: int, dialect: _Dialect) -> int:
    data = data.removesuffix(b"\r")  # its LF may follow
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if (closed := _end(dialect.closed, data[:end])) == end:
        return end
    _refuse_behind(data, closed, start, dialect)
    return _end(dialect.rows, data)


def _refuse_behind(data: bytes, opening: int, start: int, dialect: _Dialect) -> None:
    """Raise BadBody if the quoted text at an offset of the data is closed, and its field goes on.

    Which part of it the writer meant to be in quotes nobody knows: other readers drop the quotes, or move the text.
    """
    if found := dialect.behind.match(data, opening):
        shown = data[found.end() - 2 :][:SHOWN]
        text = (shown.translate(dialect.back) if dialect.back else shown).decode("utf-8", "replace")
        raise BadBody(
            f"text is behind a closing quote, at byte {start + found.end() - 1}: {json.dumps(text)}; {dialect.way}"
        )


def _end(pattern: re.Pattern[bytes], data: bytes) -> int:
    return pattern.match(data).end()  # type: ignore[union-attr]  # the pattern also matches an empty text


class _Blocks(io.RawIOBase):
    """A file from which each read returns a block: cut elsewhere, Arrow would lose the LF of a quoted CR LF."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return next(self._blocks, b"")


def _open_csv(
    blocks: Iterable[bytes], csv: CsvOptions, *, skip_empty: bool = False, **columns: Any
) -> pa_csv.CSVStreamingReader:
    back = _dialect(csv).back
    return pa_csv.open_csv(
        _Blocks((block.translate(back) for block in blocks) if back else blocks),
        # One thread: with more, Arrow's errors do not say in which row.
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=LONGEST),
        parse_options=pa_csv.ParseOptions(
            delimiter=csv.sep,
            quote_char=csv.quote != "\0" and csv.quote,
            newlines_in_values=True,
            ignore_empty_lines=skip_empty,
        ),
        convert_options=pa_csv.ConvertOptions(
            include_missing_columns=True,
            null_values=["", csv.null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            **columns,
        ),
    )


def _with_numbers(batch: pa.RecordBatch, schema: pa.Schema, first: int) -> pa.RecordBatch:
    """Return rows of csv with texts converted to numbers; the first is row `first` of the body."""
    for index, field in enumerate(schema):
        if _is_number(field.type):
            texts = compute.ascii_trim(batch.column(index), " \t")
            try:
                batch = batch.set_column(index, field.name, _numbers(texts, field.type))
            except pa.ArrowInvalid as error:
                row, text = _first_misfit(texts, field.type)
                position = f"row {first + row} (the header is row 1), column {field.name}"
                raise BadBody(f"{position}: {shortened(json.dumps(text))} is not {field.type}") from error
    return batch


def _numbers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse numbers as in JSON: Arrow alone would read 0xFF as -1, and 1e400 as infinity."""
    numbers = texts.cast(kind)
    if types.is_integer(kind):
        suspect, plain = compute.starts_with(texts, "0"), "^[0-9]+$"
    else:
        suspect, plain = compute.is_inf(numbers), "[nN]"
    if not compute.all(compute.match_substring_regex(texts.filter(suspect), plain), min_count=0).as_py():
        raise pa.ArrowInvalid
    return numbers


def _first_misfit(texts: pa.Array, kind: pa.DataType) -> tuple[int, str]:
    for row in range(len(texts)):
        try:
            _numbers(texts.slice(row, 1), kind)
        except pa.ArrowInvalid:
            return row, texts[row].as_py()
    raise AssertionError(f"each of the texts is {kind}, and all together are not")
