"""How filters read bodies of each message type: as dicts, lists and values, which paths lead into.

Invariant: nothing but the body is read; XML has no DTD, and so no entities. A length in a body takes no memory before
the body was found to be that long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from dropq.errors import Missing
from dropq.filters.tree import Opaque
from dropq.format.json_body import refuse_constant

#: What separates the fields of FIX, unless the queue's configuration says otherwise.
SOH = "\x01"
#: Bytes of the longest body that a filter reads; of the types of many small parts, a quarter of that.
LIMIT = 16 << 20
LIMIT_OF_PARTS = LIMIT // 4
#: Elements that XML may have within each other.
DEPTH = 1000


class MessageType(NamedTuple):
    """How to read a body."""

    #: Returns what is in it, and raises any error if it is not of this type; None if bodies are not read.
    parse: Callable[[bytes], object] | None
    #: Functions that convert values which JSON does not have, by their types; others are opaque.
    values: Mapping[type, Callable[[Any], object]] = {}
    #: Bytes of the longest body that is read: one of many small parts takes hundreds of times as much memory.
    longest: int = LIMIT


JSON = MessageType(partial(json.loads, parse_constant=refuse_constant))


def message_type(name: str, field_separator: str | None = None) -> MessageType:
    """Return how to read bodies of a type, as `message_type` in queue.toml; Unavailable if it needs a missing package.

    The `field_separator` is that of fix and nvfix; None for SOH.
    """
    return TYPES[name](field_separator or SOH)


def _fix(is_name: Callable[[str], bool], separator: str) -> MessageType:
    def parse(data: bytes) -> object:
        fields: dict[str, list[str]] = {}
        for text in data.decode(errors="replace").split(separator):
            name, equals, value = text.partition("=")
            if equals and is_name(name):
                fields.setdefault(name, []).append(value)
            elif not fields:
                raise ValueError("it begins with no field")
        return fields

    return MessageType(parse)


class _Element(dict[str, object]):
    """An XML element that has attributes or other elements; `text` is what else stands in it."""

    text: str | None = None


def _xml(_: str) -> MessageType:
    from xml.parsers.expat import ParserCreate

    def parse(data: bytes) -> object:
        document = _Element()
        path: list[tuple[_Element, list[str]]] = [(document, [])]

        def start(name: str, attributes: dict[str, str]) -> None:
            if len(path) > DEPTH:
                raise RecursionError
            path.append((_Element({f"@{key}": value for key, value in attributes.items()}), []))

        def end(name: str) -> None:
            element, texts = path.pop()
            text = "".join(texts)
            element.text = text if text.strip() else None
            siblings: Any = path[-1][0].setdefault(name, [])
            siblings.append(element or element.text)

        parser = ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse_doctype
        parser.StartElementHandler = start
        parser.EndElementHandler = end
        parser.CharacterDataHandler = lambda text: path[-1][1].append(text)
        parser.Parse(data, True)
        return document

    return MessageType(parse, {_Element: lambda element: element.text or Opaque()}, LIMIT_OF_PARTS)


def _refuse_doctype(*_: object) -> None:
    raise ValueError("it has a DOCTYPE")


def _msgpack(_: str) -> MessageType:
    try:
        from msgpack import StackError, Timestamp, Unpacker, unpackb
    except ImportError as missing:
        raise _needs("msgpack", "msgpack") from missing

    def parse(data: bytes) -> object:
        lengths = Unpacker(max_buffer_size=len(data))
        lengths.feed(data)
        try:
            lengths.skip()  # unpackb makes a list of as many elements as a length says before it looks for them
            return unpackb(data, strict_map_key=False, object_pairs_hook=_by_text)
        except StackError:
            raise RecursionError from None

    return MessageType(parse, {Timestamp: lambda time: time.to_unix_nano() // 1_000_000}, LIMIT_OF_PARTS)


def _by_text(pairs: list[tuple[object, object]]) -> dict[str, object]:
    """Return a map by the texts of its keys; where a string and another key have the same text, the string counts."""
    fields = {key: value for key, value in pairs if isinstance(key, str)}
    for key, value in pairs:
        if key is None or isinstance(key, int | float):
            fields.setdefault(json.dumps(key), value)
    return fields


def _bson(_: str) -> MessageType:
    try:
        from bson import Decimal128, ObjectId, decode
        from bson.codec_options import CodecOptions, DatetimeConversion
        from bson.datetime_ms import DatetimeMS
        from bson.errors import InvalidBSON
    except ImportError as missing:
        raise _needs("bson", "pymongo") from missing
    options = CodecOptions[dict[str, Any]](datetime_conversion=DatetimeConversion.DATETIME_MS)

    def parse(data: bytes) -> object:
        try:
            return decode(data, options)
        except InvalidBSON as error:
            raise RecursionError if "recursion" in str(error) else error from None

    def double(value: Decimal128) -> float:
        number = value.to_decimal()
        return float("nan") if number.is_nan() else float(number)  # a signalling NaN cannot be converted

    return MessageType(parse, {DatetimeMS: int, ObjectId: str, Decimal128: double}, LIMIT_OF_PARTS)


def _needs(name: str, package: str) -> Missing:
    return Missing(
        f'filters over bodies of message_type = "{name}" need the package {package}, which is not installed for this '
        f"Python: install dropq with its extra `{name}`: pip install 'dropq[{name}]'"
    )


#: By name, functions that return how to read a type, given the separator of fields.
TYPES: Mapping[str, Callable[[str], MessageType]] = {
    "json": lambda _: JSON,
    "text": lambda _: MessageType(bytes.decode),
    "binary": lambda _: MessageType(None),
    "fix": partial(_fix, lambda name: name.isascii() and name.isdecimal()),
    "nvfix": partial(_fix, bool),
    "xml": _xml,
    "msgpack": _msgpack,
    "bson": _bson,
}
