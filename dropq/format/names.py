"""The grammar of file names: everything dropq knows about a message without opening it.

Invariant: reading never raises and never logs, and what was read once is written the same for ever after:
`write(parse(x))` reads back as the same name. No name, whoever made it, is too long to be claimed once `shorten` and
`squeeze` were through with it. Pure text in and out, no I/O; nobody else takes a file name apart.

    name = prio "." id "." [ class ] [ "." exp [ "." corr [ "." reply [ "." type [ "." props ]]]]]
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dropq.errors import InvalidName
from dropq.format.claims import split_claim
from dropq.format.escapes import CODED, decode, encode, is_coded, to_bytes
from dropq.format.ids import _reseed
from dropq.format.typed import _LONE_SURROGATE, _TYPES, Typed, check_text

__all__ = [
    "CLASSES", "ID_LIMIT", "MARK_LIMIT", "NAME_BUDGET", "NAME_MAX", "PLAIN_PARTS", "PREFIX_LIMIT", "Name",
    "all_tell_time", "bears", "check_message_id", "check_property_name", "check_queue_name", "check_text",
    "claim_room", "decode", "encode", "file_name", "has_no_expiration", "is_coded", "is_plain", "is_unique",
    "may_be_delayed", "may_be_lapsed", "may_be_marked", "moment", "order", "order_at_a_glance", "parse",
    "plain_length", "priority_start", "restore", "room", "shorten", "sidecar_of", "since_at_a_glance", "squeeze",
    "start_of", "tells_time", "write",
]  # fmt: skip

NAME_BUDGET = 140  #: bytes of a name without its claim prefix; longer ones are shortened
ID_LIMIT = 100  #: bytes of an encoded message id
NAME_MAX = 255  #: bytes of a name that file systems have room for
PREFIX_LIMIT = 62  #: bytes of a claim prefix: owner 36, deadline 13, number 10, three separators
MARK_LIMIT = 32  #: bytes of an encoded copy, lapsed, meta or via; what is longer was not written by dropq
CLASSES = "MBSPOT"

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
_GENERATED = re.compile(r"[0-9]{16}-[0-9]{10}")
_TOKEN = re.compile(rf"[0-9A-Za-z_-]{{1,{MARK_LIMIT}}}")


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
    return usable and len(to_bytes(text)) <= 255 and split_claim(text)[0] is None and not is_coded(text)


def parse(filename_without_prefix: str, *, typed_replies: bool = False, problems: list[str] | None = None) -> Name:
    """Read a file name; never raises: what is no coded name is a foreign one, and a message too.

    Args:
        filename_without_prefix: the file name as `split_claim` leaves it.
        typed_replies: whether field 6 begins with DropboxMQ's Q (queue) or T (topic).
        problems: gets a sentence about each part of the name that cannot be read, and is left out.
    """
    problems = [] if problems is None else problems
    found = CODED.fullmatch(filename_without_prefix)
    if found is None or not -(1 << 31) <= (priority := int(found[1])) < 1 << 31:
        return make({"id": filename_without_prefix, "foreign": True})
    _, message_id, message_class, rest = found.groups()
    if "%" in message_id or "+" in message_id:
        message_id = decode(message_id, "surrogateescape")
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


def _text(raw: str) -> str:
    """Decode a field; bytes that are no text stay as the escapes that show them."""
    return _readable(decode(raw))


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


#: The attributes of a Name that has nothing to say but the first three fields.
_HEAD = frozenset(("id", "priority", "message_class", "properties"))
#: Those of a Name to which dropq itself has nothing to add in field 8.
_FROM_SENDER = _HEAD | {"expiration", "correlation_id", "reply_to", "type"}


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
    correlation = encode(name.correlation_id) if name.correlation_id else ""
    reply = encode(_write_reply(name.reply_to, typed_replies)) if name.reply_to else ""
    kind = encode(name.type) if name.type else ""
    written = [f"JMSXDeliveryCountI={name.delivery_count}"] if name.delivery_count else []
    for key, typed in name.properties.items():
        written.append(f"{encode(key)}{typed.type}={encode(typed.text)}")
    attributes = name.__dict__
    if not attributes.keys() <= _FROM_SENDER:
        for key, (attribute, mark) in _OURS.items():
            if attribute != "delivery_count" and (value := attributes.get(attribute)):
                written.append(f"{key}{mark}={encode(str(value))}")
    return f"{head}.{expiration}.{correlation}.{reply}.{kind}.{'&'.join(written)}".rstrip(".")


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
    return "long-" + hashlib.sha256(to_bytes(message_id)).hexdigest()[:24]


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


os.register_at_fork(after_in_child=_reseed)

# -- at a glance: what is read of many names, without parsing each ------------------------------------------------

#: Tells a plain name: one that has nothing but a priority, a generated id and a class.
is_plain = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT]\Z", re.ASCII).match
#: Takes a plain name apart, for engines that have regular expressions of their own.
PLAIN_PARTS = r"^(?P<priority>[^.]+)\.(?P<id>[^.]+)\.(?P<class>.)$"
#: Tells a name with a generated id and the usual form of a priority, whatever follows.
tells_time = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT](?:\.|\Z)", re.ASCII).match
#: Tells whether a name may bear a mark or a counter that only dropq writes.
may_be_marked = re.compile("JMS_dropq_").search

#: The same as `tells_time` of many names, each with a NUL behind it: at once, and without a way back.
_ALL_TELL_TIME = re.compile(
    r"(?>(?:0|-?[1-9]\d{0,8}+)\.\d{16}-\d{10}\.[MBSPOT](?>\.[^\0]*+)?+\0)*+", re.ASCII
).fullmatch
#: What a name that tells its time begins with: its priority, and its time as far as about a day.
_START = re.compile(r"(0|-?[1-9]\d{0,8})\.(\d{5})", re.ASCII).match
#: The end of a plain name has a fixed length.
_PLAIN_END = len(".0000000000000000-0000000000.B")
_SENT = re.compile(r"-?[0-9]{1,9}\.([0-9]{13})[0-9]{3}-[0-9]{10}\.[MBSPOT](?:\.|\Z)").match
_SINCE = re.compile(r"[.&]JMS_dropq_sinceL=([0-9]{13})(?![^&.])").search
_SIDECAR = re.compile(r"JMS_dropq_metaS=([0-9A-Za-z_-]+)").search


def all_tell_time(filenames: Iterable[str]) -> bool:
    """Tell whether `tells_time` is true of all names."""
    return _ALL_TELL_TIME("\0".join([*filenames, ""])) is not None


def start_of(filename: str) -> tuple[tuple[int, str], str] | None:
    """Return where a name is in the order by priority and by about a day, and what all that begin so sort before.

    None for a name that does not begin as those do that tell their time.
    """
    found = _START(filename)
    if found is None:
        return None
    return (-int(found[1]), found[2]), f"{found[0][:-1]}{chr(ord(found[0][-1]) + 1)}"


def order_at_a_glance(filename: str) -> tuple[int, str, str]:
    """Return the key that `order` gives to a name that tells its time."""
    priority, _, rest = filename.partition(".")
    return -int(priority), rest[:16], filename


def priority_start(filename: str) -> str:
    """Return what the names of a coded name's priority begin with."""
    return filename[: filename.index(".") + 1]


def plain_length(filename: str) -> int:
    """Return how long the plain names of a coded name's priority are."""
    return filename.index(".") + _PLAIN_END


def since_at_a_glance(filename: str) -> int | None:
    """Return since when a message counts as waiting, in ms; None where its name has to be parsed for that."""
    own_name = split_claim(filename)[1]
    found = _SENT(own_name)
    if found and "JMS_dropq_since" in own_name:
        found = _SINCE(own_name)
    return int(found[1]) if found else None


def sidecar_of(filename: str) -> str | None:
    """Return which sidecar a name refers to, whatever stands before it; None for none."""
    found = _SIDECAR(filename) if "_metaS" in filename else None
    return found[1] if found else None


def may_be_delayed(filename: str) -> bool:
    """Tell whether a name may say until when its message is delayed."""
    return "_notBeforeL=" in filename


def may_be_lapsed(filename: str) -> bool:
    """Tell whether a name may tell of a lease that ran out."""
    return "_lapsed" in filename


def has_no_expiration(filename: str) -> bool:
    """Tell whether a name, with or without a claim's prefix, surely has no expiration: that is its fourth field."""
    return filename.count(".") < 3


def is_unique(own_name: str) -> bool:
    """Tell whether no other file has a name: it has a generated id, or a mark that makes it unique."""
    name = parse(own_name)
    return name.generated or bool(name.copy)


# -- what may be given a name ---------------------------------------------------------------------------------------

#: What a DropboxMQ puts behind the name of a queue that it deletes and keeps.
DELETED = re.compile(r"\.deleted-[0-9]+\Z", re.ASCII)


def check_queue_name(name: str) -> None:
    """Refuse what cannot name a queue, with InvalidName."""
    if not name or name[0] == "." or "/" in name or len(to_bytes(name)) > 255:
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
