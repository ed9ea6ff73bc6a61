"""The grammar of file names: everything dropq knows about a message without opening it.

Invariant: reading never raises and never logs, and what was read once is written the same for ever after:
`write(parse(x))` reads back as the same name. No name, whoever made it, is too long to be claimed once `shorten` and
`squeeze` were through with it. Pure text in and out, no I/O; nobody else takes a file name apart.

    name = prio "." id "." [ class ] [ "." exp [ "." corr [ "." reply [ "." type [ "." props ]]]]]
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote_plus, unquote_to_bytes

from dropq.errors import InvalidName

__all__ = [
    "CLASSES", "ID_LIMIT", "MARK_LIMIT", "NAME_BUDGET", "NAME_MAX", "PREFIX_LIMIT", "Claim", "IdSource", "Name",
    "Typed", "bears", "check_message_id", "check_property_name", "check_queue_name", "check_text", "claim_id",
    "claim_order", "claim_room", "client_part", "decode", "encode", "file_name", "is_coded", "is_plain", "moment",
    "order", "owner", "parse", "restore", "room", "shorten", "split_claim", "squeeze", "write",
]  # fmt: skip

NAME_BUDGET = 140  #: bytes of a name without its claim prefix; longer ones are shortened
ID_LIMIT = 100  #: bytes of an encoded message id
NAME_MAX = 255  #: bytes of a name that file systems have room for
PREFIX_LIMIT = 62  #: bytes of a claim prefix: owner 36, deadline 13, number 10, three separators
MARK_LIMIT = 32  #: bytes of an encoded copy, lapsed, meta or via; what is longer was not written by dropq
CLASSES = "MBSPOT"
#: The client's part in the claims of barriers; `client_part` never makes it.
BARRIER = "barrier%"

_INT_BITS = {"Y": 7, "H": 15, "I": 31, "L": 63}
_TYPES = "BYHILFDS"
_TOPIC = "topic-root/"
_KEYWORDS = frozenset(["NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"])
#: Property name -> attribute of Name and type, of what dropq itself writes into field 8.
_OURS = {
    "JMSXDeliveryCount": ("delivery_count", "I"),
    "JMS_dropq_cancels": ("cancels", "I"),
    "JMS_dropq_notBefore": ("not_before", "L"),
    "JMS_dropq_since": ("since", "L"),
    "JMS_dropq_copy": ("copy", "S"),
    "JMS_dropq_lapsed": ("lapsed", "S"),
    "JMS_dropq_meta": ("meta", "S"),
    "JMS_dropq_via": ("via", "S"),
    "JMS_dropq_hops": ("hops", "I"),
    "JMS_dropq_origin": ("origin", "S"),
    "JMS_dropq_returnTo": ("return_to", "S"),
}
_SPILLED_OURS = ("JMS_dropq_origin", "JMS_dropq_returnTo")
#: The marks of a name, each at most MARK_LIMIT long.
_MARKS = frozenset(("copy", "lapsed", "meta", "via"))
#: What `squeeze` leaves out of a name that is still too long, in this order.
_DISPENSABLE: Mapping[str, str | int] = {"via": "", "hops": 0, "lapsed": "", "cancels": 0, "since": 0}
#: The class may be empty where another field follows it.
_CODED = re.compile(r"(-?[0-9]{1,19})\.([^.]+)\.([MBSPOT]|(?=\.+[^.]))(?:\.(.*))?", re.DOTALL)
_GENERATED = re.compile(r"[0-9]{16}-[0-9]{10}")
#: The number is 0 only in a share of a barrier that its subscription has not taken yet.
_CLAIM = re.compile(
    r"([\w*%+-]{0,16}-[0-9a-z]{10}-[0-9a-z]{1,8}),(0|[1-9][0-9]{0,15}),((?<=-0,0,)0|[1-9][0-9]{0,9})~([^.].*)",
    re.ASCII | re.DOTALL,
)
_DROPBOXMQ_CLAIM = re.compile(r"([\w*%+-]+)~(.+)", re.ASCII | re.DOTALL)
_TOKEN = re.compile(rf"[0-9A-Za-z_-]{{1,{MARK_LIMIT}}}")
_BARE = re.compile(r"[\w*-]*", re.ASCII)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_FLOAT = re.compile(r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")


@dataclass(frozen=True, slots=True)
class Typed:
    """A property's value with the JMS type it has in a name: one of B Y H I L F D S.

    Raises:
        ValueError: the value is not of the type, or outside its range.
    """

    type: str
    value: bool | int | float | str

    def __post_init__(self) -> None:
        kind, value = self.type, self.value
        if kind == "S" and isinstance(value, str):
            check_text("a property value", value)
        elif kind == "B":
            _require(isinstance(value, bool), self)
        elif kind in _INT_BITS and isinstance(value, int) and not isinstance(value, bool):
            limit = 1 << _INT_BITS[kind]
            _require(-limit <= value < limit, self)
        elif kind in ("F", "D") and isinstance(value, (int, float)) and not isinstance(value, bool):
            object.__setattr__(self, "value", _float(self, value))
        else:
            _require(False, self)

    @classmethod
    def of(cls, value: object) -> Typed:
        """Give a Python value its type: bool B, int I or L, float D, str S; a Typed is itself."""
        if isinstance(value, Typed):
            return value
        if isinstance(value, bool):
            return cls("B", value)
        if isinstance(value, int):
            return cls("I" if -(1 << 31) <= value < 1 << 31 else "L", value)
        if isinstance(value, float):
            return cls("D", value)
        if isinstance(value, str):
            return cls("S", value)
        raise ValueError(f"a property is a bool, int, float or str, not {type(value).__name__}")

    @classmethod
    def read(cls, kind: str, text: str) -> Typed:
        """Read a value as it stands in a name, after decoding."""
        if kind == "S":
            return cls(kind, text)
        if kind == "B" and text.lower() in ("true", "false"):
            return cls(kind, text.lower() == "true")
        if kind in _INT_BITS and _INTEGER.fullmatch(text):
            return cls(kind, int(text))
        if kind in ("F", "D") and _FLOAT.fullmatch(text):
            return cls(kind, float(text))
        if kind not in _TYPES or len(kind) != 1:
            raise ValueError(f"property type {kind!r} is none of {' '.join(_TYPES)}")
        raise ValueError(f"{text!r} is not a value of property type {kind}")

    @property
    def text(self) -> str:
        """The value as it stands in a name, before encoding."""
        value = self.value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        if isinstance(value, int):
            return str(int(value))  # an IntEnum writes its number
        return value if isinstance(value, str) else repr(value)


def _require(good: bool, typed: Typed) -> None:
    if typed.type not in _TYPES or len(typed.type) != 1:
        raise ValueError(f"property type {typed.type!r} is none of {' '.join(_TYPES)}")
    if not good:
        raise ValueError(f"{typed.value!r} is not a value of property type {typed.type}")


def _float(typed: Typed, value: float) -> float:
    try:
        number = float(value)
        if typed.type == "F":
            struct.pack(">f", number)  # the native form lets overflow pass
        return math.nan if math.isnan(number) else number  # one NaN, so that equal names are equal
    except OverflowError:
        raise ValueError(f"{value!r} is not a value of property type {typed.type}") from None


@dataclass(frozen=True)  # no slots: `make` builds on the class's defaults, at a fifth of the price
class Name:
    """What a file name says about its message; times in milliseconds since 1970 UTC, 0 or "" for absent."""

    id: str
    priority: int = 4
    message_class: str = "B"
    expiration: int = 0
    correlation_id: str | None = None
    reply_to: str | None = None
    type: str | None = None
    properties: Mapping[str, Typed] = field(default_factory=dict, hash=False)
    delivery_count: int = 0
    cancels: int = 0
    not_before: int = 0
    since: int = 0
    copy: str = ""
    lapsed: str = ""
    meta: str = ""
    via: str = ""
    hops: int = 0
    origin: str = ""
    return_to: str = ""
    foreign: bool = False

    @property
    def generated(self) -> bool:
        """Whether the id has the form that dropq and DropboxMQ generate."""
        return _GENERATED.fullmatch(self.id) is not None

    @property
    def timestamp(self) -> int | None:
        """The time of sending out of a generated id, else None."""
        return int(self.id[:13]) if self.generated else None

    @property
    def born_foreign(self) -> str | None:
        """The file's own name, to be given back in processed/, error/ and expired/, or None."""
        if self.foreign:
            return self.id
        touched = self.correlation_id or self.reply_to or self.type or self.properties or self.expiration
        plain = self.priority == 4 and self.message_class == "B" and not touched
        if (self.copy or self.lapsed) and plain and not self.generated and _is_own_name(self.id):
            return self.id
        return None

    @property
    def unmarked(self) -> Name:
        """This name without a word of a lease that ran out, which made it unique in place of a copy's mark."""
        if not self.lapsed:
            return self
        return replace(self, lapsed="", copy=self.copy if self.generated else self.lapsed)


def _is_own_name(text: str) -> bool:
    usable = bool(text) and text[0] != "." and "/" not in text and "\0" not in text
    return usable and len(_bytes(text)) <= 255 and split_claim(text)[0] is None and not is_coded(text)


class Claim(NamedTuple):
    """Who holds a claimed file, until when (ms, 0 = no lease), and for which delivery."""

    owner: str
    deadline: int
    number: int
    ours: bool = True

    @property
    def subscription(self) -> str:
        """The owner without the sequence of the claim: what a live consumer is known by."""
        return self.owner.rpartition("-")[0] if self.ours else self.owner

    @property
    def of_barrier(self) -> bool:
        """Whether it is a barrier's, which several subscriptions have a share of."""
        return self.owner.startswith(f"{BARRIER}-")

    @property
    def prefix(self) -> str:
        """What stands before the name in processing/."""
        return f"{self.owner},{self.deadline},{self.number}~" if self.ours else f"{self.owner}~"


def split_claim(filename: str) -> tuple[Claim | None, str]:
    """Split a claim prefix off: our own exact form, or DropboxMQ's `client~` before a coded name.

    What stands before a hidden name is no prefix: without it the file would be no message any more.
    """
    if "~" not in filename:
        return None, filename
    if found := _CLAIM.fullmatch(filename):
        return Claim(found[1], int(found[2]), int(found[3])), found[4]
    found = _DROPBOXMQ_CLAIM.fullmatch(filename)
    if found and is_coded(found[2]):
        return Claim(found[1], 0, 0, ours=False), found[2]
    return None, filename


def client_part(client_id: str) -> str:
    """Make the readable start of an owner: the encoded client id, cut to 16 bytes between escapes."""
    return re.sub(r"%.?$", "", encode(client_id)[:16]) or "client"


def owner(subscription: str, n: int) -> str:
    """Write the owner of a subscription's nth claim; no two claims ever share it."""
    return f"{subscription}-{n:x}"


def claim_id(owner: str) -> str:
    """Return the part of an owner that tells its claim from all others, without the client's name."""
    return "-".join(owner.rsplit("-", 2)[1:])


def claim_order(owner: str) -> int:
    """Return what sorts the owners of one subscription in the order of their claims."""
    return int(owner.rpartition("-")[2], 36)


def encode(text: str) -> str:
    """URL-encode, dots and tildes too; the bytes of an undecodable file name become escapes."""
    if _BARE.fullmatch(text):
        return text
    return quote_plus(_bytes(text), safe="*").replace(".", "%2E").replace("~", "%7E")


def decode(text: str) -> str:
    """Undo `encode`; text with a malformed escape, or one that is not UTF-8, is returned as it is."""
    return _decode(text, "strict")


def _decode(text: str, errors: str) -> str:
    if "%" not in text and "+" not in text:
        return text
    try:
        raw = text.replace("+", " ").encode("utf-8", errors)
        return text if _BAD_ESCAPE.search(text) else unquote_to_bytes(raw).decode("utf-8", errors)
    except UnicodeError:
        return text


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that no file system gave us
        return text.encode("utf-8", "surrogatepass")


def parse(filename_without_prefix: str, *, typed_replies: bool = False, problems: list[str] | None = None) -> Name:
    """Read a file name; never raises: what is no coded name is a foreign one, and a message too.

    Args:
        filename_without_prefix: the file name as `split_claim` leaves it.
        typed_replies: whether field 6 begins with DropboxMQ's Q (queue) or T (topic).
        problems: gets a sentence about each part of the name that cannot be read, and is left out.
    """
    problems = [] if problems is None else problems
    found = _CODED.fullmatch(filename_without_prefix)
    if found is None or not -(1 << 31) <= (priority := int(found[1])) < 1 << 31:
        return make({"id": filename_without_prefix, "foreign": True})
    _, message_id, message_class, rest = found.groups()
    if "%" in message_id or "+" in message_id:
        message_id = _decode(message_id, "surrogateescape")
    known: dict[str, Any] = {"id": message_id, "priority": priority, "message_class": message_class or "B"}
    if not rest:
        return make(known)
    expiration, correlation, reply, kind, properties = (rest.rstrip(".") + "....").split(".", 4)
    if expiration:
        known["expiration"] = _expiration(expiration, problems)
    if correlation:
        known["correlation_id"] = _text(correlation)
    if reply:
        known["reply_to"] = _read_reply(_text(reply), typed_replies)
    if kind:
        known["type"] = _text(kind)
    if properties := properties.rstrip("."):
        known |= _read_properties(properties, problems)
    return make(known)


def make(known: Mapping[str, Any]) -> Name:
    """Build a Name from what is known of it, past its frozen __init__, which would set all nineteen attributes."""
    name = object.__new__(Name)
    attributes = name.__dict__
    attributes["properties"] = {}
    attributes.update(known)
    return name


def is_coded(text: str) -> bool:
    """Tell whether a file name without a claim's prefix is coded; any other is foreign."""
    found = _CODED.fullmatch(text)
    return found is not None and -(1 << 31) <= int(found[1]) < 1 << 31


def _text(raw: str) -> str:
    """Decode a field; bytes that are no text stay as the escapes that show them."""
    return _readable(_decode(raw, "strict"))


def _readable(text: str) -> str:
    return text if text.isascii() else _LONE_SURROGATE.sub(lambda lone: encode(lone[0]), text)


def _expiration(text: str, problems: list[str]) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63:
        return int(text)
    problems.append(f"{text!r} is no expiration time; the message never expires")
    return 0


def _read_reply(text: str, typed: bool) -> str | None:
    if typed and text.startswith("Q"):
        text = text[1:]
    elif typed and text.startswith("T"):
        text = _TOPIC + text[1:] if text[1:] else ""
    return text or None


def _write_reply(reply_to: str, typed: bool) -> str:
    if not typed or not reply_to:
        return reply_to
    topic = reply_to.removeprefix(_TOPIC)
    return "T" + topic if topic and topic != reply_to else "Q" + reply_to


def _read_properties(text: str, problems: list[str]) -> dict[str, Any]:
    pairs = [_read_property(pair, problems) for pair in text.split("&") if pair]
    return _sort_properties([pair for pair in pairs if pair], problems)


def _read_property(pair: str, problems: list[str]) -> tuple[str, Typed] | None:
    head, equals, value = pair.partition("=")
    kind = head[-1:] if head[-1:] in _TYPES else "S"
    try:
        if not equals or len(head) < 2:
            raise ValueError("it has no name and type")
        return _text(head[:-1]), Typed.read(kind, _text(value))
    except ValueError as error:
        problems.append(f"property {pair!r} is dropped: {error}")
        return None


def _sort_properties(pairs: Iterable[tuple[str, Typed]], problems: list[str]) -> dict[str, Any]:
    """Tell the sender's properties from ours; returns arguments of Name."""
    properties: dict[str, Typed] = {}
    fields: dict[str, Any] = {"properties": properties}
    for key, typed in pairs:
        ours = _OURS.get(key)
        if ours is None:
            properties[key] = typed
        elif _fits(ours, typed):
            fields[ours[0]] = typed.value
        else:
            problems.append(f"{key} cannot be {typed.value!r}; it is dropped")
    return fields


def _fits(ours: tuple[str, str], typed: Typed) -> bool:
    attribute, kind = ours
    if attribute == "meta":  # becomes part of a path
        return isinstance(typed.value, str) and _TOKEN.fullmatch(typed.value) is not None
    if typed.type != kind:
        return False
    if isinstance(typed.value, str):
        return attribute not in _MARKS or len(encode(typed.value)) <= MARK_LIMIT
    return typed.value >= 0


def plain_name(message_id: str, priority: int, message_class: str) -> str:
    """Write the name of a message with a generated id that has nothing else to say."""
    return f"{priority}.{message_id}.{message_class}"


#: Tells a plain name: one that has nothing but a priority, a generated id and a class.
is_plain = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT]\Z", re.ASCII).match


#: The attributes of a Name that has nothing to say but the first three fields.
_HEAD = frozenset(("id", "priority", "message_class", "properties"))


def write(name: Name, *, typed_replies: bool = False) -> str:
    """Write the coded form of a name, without trailing empty fields, all of it ASCII.

    Raises:
        ValueError: the priority, class or expiration cannot stand in a name.
    """
    if name.message_class not in CLASSES or len(name.message_class) != 1:
        raise ValueError(f"message class {name.message_class!r} is none of {' '.join(CLASSES)}")
    if not -(1 << 31) <= name.priority < 1 << 31:
        raise ValueError(f"priority {name.priority} is not within 32 bits")
    if not 0 <= name.expiration < 1 << 63:
        raise ValueError(f"expiration {name.expiration} is not a time in milliseconds since 1970")
    head = f"{name.priority}.{encode(name.id)}.{name.message_class}"
    if not name.properties and name.__dict__.keys() <= _HEAD:
        return head
    expiration = str(name.expiration) if name.expiration else ""
    correlation, kind = encode(name.correlation_id or ""), encode(name.type or "")
    reply = encode(_write_reply(name.reply_to or "", typed_replies))
    rest = f"{expiration}.{correlation}.{reply}.{kind}.{_write_properties(name)}"
    return f"{head}.{rest}".rstrip(".")


def _write_properties(name: Name) -> str:
    written = [f"JMSXDeliveryCountI={name.delivery_count}"] if name.delivery_count else []
    written += [f"{encode(key)}{typed.type}={encode(typed.text)}" for key, typed in name.properties.items()]
    for key, (attribute, kind) in _OURS.items():
        value = getattr(name, attribute)
        if value and attribute != "delivery_count":
            written.append(f"{key}{kind}={encode(str(value))}")
    return "&".join(written)


def file_name(name: Name, *, typed_replies: bool = False) -> str:
    """Write a name as its file bears it: a foreign one keeps its own."""
    return name.id if name.foreign else write(name, typed_replies=typed_replies)


def shorten(name: Name, token: str) -> tuple[Name, dict[str, object]]:
    """Move what a name need not carry into a sidecar; `restore` puts it back.

    Correlation, reply-to, type, properties, origin and return address leave the name, and the id where its
    encoding is over ID_LIMIT or the rest still over NAME_BUDGET. A foreign name becomes coded, with a copy.

    Args:
        name: the name that is too long.
        token: names the sidecar; letters, digits, - and _, at most MARK_LIMIT of them.

    Returns:
        The short name and the content of the sidecar, fit for JSON.
    """
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{token!r} cannot name a sidecar: letters, digits, - and _ only")
    sidecar: dict[str, object] = {
        "format": 1,
        "id": name.id,
        "foreign_name": name.born_foreign,
        "correlation_id": name.correlation_id,
        "reply_to": name.reply_to,
        "type": name.type,
        "properties": _spilled_properties(name),
    }
    short = replace(
        name, correlation_id=None, reply_to=None, type=None, properties={}, origin="", return_to="",
        meta=token, copy=name.copy or (token if name.foreign else ""), foreign=False,
    )  # fmt: skip
    stand_in, length = _stand_in(name.id), len(encode(name.id))
    if length > ID_LIMIT or (length > len(stand_in) and len(write(short)) > NAME_BUDGET):
        short = replace(short, id=stand_in)
    return short, sidecar


def room(name: Name) -> int:
    """Return how many bytes the file name of a message may have; one that refers to a sidecar grows by its counters."""
    return claim_room(name) if name.meta else NAME_BUDGET


def claim_room(name: Name, most: int = NAME_MAX) -> int:
    """Return how many bytes of the file name of a message that waits leave room for the prefix of its next claim.

    Args:
        name: the message; if it is delayed, it loses that mark before it is claimed.
        most: how many bytes of a name the file system has room for.
    """
    prefix = PREFIX_LIMIT - 10 + len(str(name.delivery_count + 1))
    return most - prefix + (len(f"&JMS_dropq_notBeforeL={name.not_before}") if name.not_before else 0)


def squeeze(name: Name) -> tuple[Name, list[str]]:
    """Leave out of a shortened name what still makes it too long, which only huge values made by strangers do.

    Returns:
        The name, which fits its room, and what was left out.
    """
    left_out = []
    for attribute, nothing in _DISPENSABLE.items():
        if len(write(name)) <= room(name):
            break
        if getattr(name, attribute) != nothing:
            left_out.append(f"{attribute} {getattr(name, attribute)!r}")
            name = replace(name, **{attribute: nothing})  # type: ignore[arg-type]
    return name, left_out


def bears(message_id: str) -> Callable[[str], bool]:
    """Return a test of file names, with or without a claim's prefix: whether the message has an id, or that name.

    It compares text first and parses the few names that are left. It opens no sidecar: a shortened name has a hash of
    its id.
    """
    stand_in = _stand_in(message_id)
    space = "+" if " " in message_id else "%"

    def test(filename: str) -> bool:
        # An archive of a million is looked through so; whatever is encoded, by whichever program, has an escape.
        if message_id not in filename and stand_in not in filename and "%" not in filename and space not in filename:
            return False
        file = split_claim(filename)[1]
        if message_id in (filename, file):
            return True
        name = parse(file)
        return name.id == message_id or (name.id == stand_in and name.meta != "")

    return test


def _stand_in(message_id: str) -> str:
    return "long-" + hashlib.sha256(_bytes(message_id)).hexdigest()[:24]


def _spilled_properties(name: Name) -> dict[str, list[str]]:
    spilled = {key: [typed.type, typed.text] for key, typed in name.properties.items()}
    ours = {key: getattr(name, _OURS[key][0]) for key in _SPILLED_OURS}
    return spilled | {key: ["S", value] for key, value in ours.items() if value}


def restore(name: Name, sidecar: Mapping[str, object], problems: list[str] | None = None) -> Name:
    """Undo `shorten`; what the name itself carries wins.

    Args:
        name: the short name.
        sidecar: the content of its sidecar.
        problems: gets a sentence about each damaged value, which is dropped.
    """
    problems = [] if problems is None else problems
    fields = _sort_properties(_sidecar_properties(_entry(sidecar, "properties"), problems), problems)
    return replace(
        name,
        id=_restored_id(name.id, _entry(sidecar, "id"), problems),
        correlation_id=name.correlation_id or _sidecar_text(sidecar, "correlation_id", problems),
        reply_to=name.reply_to or _sidecar_text(sidecar, "reply_to", problems),
        type=name.type or _sidecar_text(sidecar, "type", problems),
        properties={**fields["properties"], **name.properties},
        origin=name.origin or fields.get("origin", ""),
        return_to=name.return_to or fields.get("return_to", ""),
        meta="",
    )


def _entry(sidecar: object, key: str) -> object:
    return sidecar.get(key) if isinstance(sidecar, Mapping) else None


def _restored_id(short: str, full: object, problems: list[str]) -> str:
    if isinstance(full, str) and short in (full, _stand_in(full)):
        return full
    problems.append(f"the id in its sidecar, {full!r}, is not its own and is ignored")
    return short


def _sidecar_text(sidecar: object, key: str, problems: list[str]) -> str | None:
    value = _entry(sidecar, key)
    if value is None or isinstance(value, str):
        return value and _readable(value)
    problems.append(f"{key} in its sidecar is no text and is dropped")
    return None


def _sidecar_properties(found: object, problems: list[str]) -> Iterable[tuple[str, Typed]]:
    for key, value in found.items() if isinstance(found, Mapping) else ():
        try:
            kind, text = value
            yield _readable(str(key)), Typed.read(str(kind), _readable(str(text)))
        except (TypeError, ValueError) as error:
            problems.append(f"property {key!r} in its sidecar is dropped: {error}")


def order(name: Name, arrival: int) -> tuple[int, str, str]:
    """Make the key that sorts names in order of delivery: priority, then time and sequence, then name.

    Args:
        name: the name.
        arrival: when the file was first seen, in ms; counts where the id tells no time.
    """
    time = name.id[:16] if name.generated else f"{name.since or arrival:013d}000"
    return -name.priority, time, file_name(name)


def moment(name: Name, arrival: int) -> int:
    """Return the time of a message, in thousandths of a ms as generated ids tell it.

    Args:
        name: the name.
        arrival: when its file came, in ms; counts where the name tells no time.
    """
    return int(name.id[:16]) if name.generated else (name.since or arrival) * 1000


class IdSource:
    """Makes message ids: 13 digits of ms, 3 of sequence, `-`, 10 random ones; increasing within a process.

    A signal handler may make one while its own thread does: it runs between two calls, never between the look at the
    last number and the keeping of the next, where nothing is called.
    """

    def __init__(self, now_ms: Callable[[], int], rng: random.Random | None = None) -> None:
        self._now_ms = now_ms
        self._random = rng or random.Random()
        self._lock = threading.RLock()
        self._last = 0
        _sources.add(self)

    def next(self) -> str:
        """Make an id that sorts behind all that this process made before."""
        now = self._now_ms() * 1000
        with self._lock:
            number = self._last = now if now > self._last else self._last + 1
        return "%016d-%010d" % (number, self._random.getrandbits(33))  # noqa: UP031 - half the time

    def take(self, count: int) -> list[str]:
        """Make so many ids at once, in order."""
        bits = self._random.getrandbits
        now = self._now_ms() * 1000
        with self._lock:
            first = now if now > self._last else self._last + 1
            self._last = first + count - 1
        return ["%016d-%010d" % (number, bits(33)) for number in range(first, first + count)]  # noqa: UP031

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # the parent's may have been held by a thread that is not here
        self._random.seed()


_sources: weakref.WeakSet[IdSource] = weakref.WeakSet()


def _reseed() -> None:
    for source in list(_sources):
        source._after_fork()


os.register_at_fork(after_in_child=_reseed)


def check_text(what: str, value: str) -> None:
    """Refuse text that UTF-8 cannot carry, with a ValueError that calls it `what`."""
    if not value.isascii() and _LONE_SURROGATE.search(value):
        raise ValueError(f"{what} holds a lone surrogate, which UTF-8 cannot carry: {value!r}")


#: What a DropboxMQ puts behind the name of a queue that it deletes and keeps.
DELETED = re.compile(r"\.deleted-[0-9]+\Z", re.ASCII)


def check_queue_name(name: str) -> None:
    """Refuse what cannot name a queue, with InvalidName."""
    if not name or name[0] == "." or "/" in name or len(_bytes(name)) > 255:
        raise InvalidName(f"{name!r} cannot name a queue: one folder name, without / and no dot first")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000 for char in name):
        raise InvalidName(f"{name!r} cannot name a queue: it holds control characters or undecodable bytes")
    if name in ("topic-root", "dropboxmq"):
        raise InvalidName(f"{name!r} cannot name a queue: the name is taken by the layout of a root")
    if DELETED.search(name):
        raise InvalidName(f"{name!r} cannot name a queue: DropboxMQ calls a queue so that it has deleted")


def can_name_queue(name: str) -> bool:
    """Tell whether a folder of a root has a name that a queue can have."""
    try:
        check_queue_name(name)
    except InvalidName:
        return False
    return True


def check_property_name(name: str) -> None:
    """Refuse what a sender may not call a property, with ValueError."""
    if not name.replace("$", "_").isidentifier():
        raise ValueError(f"property name {name!r} is no identifier: a letter, _ or $, then also digits")
    if name.upper() in _KEYWORDS:
        raise ValueError(f"property name {name!r} is a keyword of the selector language")
    if name.startswith("JMS") and name not in ("JMSXGroupID", "JMSXGroupSeq"):
        raise ValueError(f"property name {name!r} is reserved: JMSXGroupID and JMSXGroupSeq may be sent")


def check_message_id(message_id: str) -> None:
    """Refuse what cannot be the id of a message to send, with ValueError."""
    if not message_id or "\0" in message_id:
        raise ValueError(f"message id {message_id!r} is empty or holds a NUL")
    check_text("the message id", message_id)
    if len(encode(message_id)) > ID_LIMIT:
        raise ValueError(f"message id {message_id!r} takes over {ID_LIMIT} bytes in a file name")
