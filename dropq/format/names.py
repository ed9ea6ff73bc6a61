"""The grammar of file names: everything dropq knows about a message without opening it.

Invariant: parsing never raises and never logs, and `parse(write(parse(x)))` is `parse(x)`. After `shorten` and
`squeeze`, every name is short enough to be claimed. Text in and out, no I/O; no other room parses file names.

    name = prio "." id "." [ class ] [ "." exp [ "." corr [ "." reply [ "." type [ "." props ]]]]]
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dropq.errors import InvalidName
from dropq.format.claims import split_claim, split_receipt
from dropq.format.escapes import decode, encode, is_coded, is_int32, match_coded, to_bytes
from dropq.format.typed import LONE_SURROGATE, TYPES, Typed, check_text

NAME_BUDGET = 140  #: bytes of a name without its claim prefix; longer names are shortened
ID_LIMIT = 100  #: bytes of an encoded message id
NAME_MAX = 255  #: bytes of the longest file name that common file systems allow
PREFIX_LIMIT = 62  #: bytes of a claim prefix: owner 36, deadline 13, number 10, three separators
SHARED_BUDGET = NAME_MAX - PREFIX_LIMIT  #: the budget where a DropboxMQ, which reads no sidecars, shares the queue
BUNDLE_MARK = 6  #: digits that the copy marks of all parts of one bundle begin with, where another may have its id
COPY_MARK = 10  #: random digits of a copy mark
MARK_LIMIT = 32  #: bytes of an encoded copy, lapsed, meta or via; dropq writes none that is longer
CLASSES = "MBSPOT"

#: The keywords of the selector language. No property may have one of these names.
KEYWORDS = frozenset(["NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"])

#: The property, true or false, of a message that no route takes away.
DO_NOT_ROUTE = "JMS_dropboxmq_do_not_route"
#: The property with the name of the file that a message was sent from.
FILENAME = "filename"
#: The properties among JMS's own names that a sender may set.
_JMS_SENT = ("JMSXGroupID", "JMSXGroupSeq", DO_NOT_ROUTE)

#: How a reply-to that names a topic begins.
TOPIC_REPLY = "topic-root/"
#: The properties that dropq itself writes into field 8: the attribute of Name, and the JMS type.
_OURS = {
    "JMSXDeliveryCount": ("delivery_count", "I"),
    "JMS_dropq_cancels": ("cancels", "I"),
    "JMS_dropq_died": ("died", "I"),
    "JMS_dropq_notBefore": ("not_before", "L"),
    "JMS_dropq_since": ("since", "L"),
    "JMS_dropq_copy": ("copy", "S"),
    "JMS_dropq_lapsed": ("lapsed", "S"),
    "JMS_dropq_meta": ("meta", "S"),
    "JMS_dropq_via": ("via", "S"),
    "JMS_dropq_hops": ("hops", "I"),
    "JMS_dropq_origin": ("origin", "S"),
    "JMS_dropq_from": ("from_client", "S"),
    "JMS_dropq_reason": ("reason", "S"),
    "JMS_dropq_copied": ("copied", "S"),
    "JMS_dropq_first": ("first", "I"),
    "JMS_dropq_record": ("record", "I"),
    "JMS_dropq_records": ("records", "I"),
    "JMS_dropq_cut": ("cut", "I"),
    "JMS_dropq_replay": ("replayed", "B"),
    "JMS_dropq_owned": ("owned", "B"),
}
#: How the names of dropq's own properties begin, but for the delivery count.
RESERVED = "JMS_dropq_"
#: Those that filters know: where a message could not be delivered, and why.
ORIGIN, REASON = f"{RESERVED}origin", f"{RESERVED}reason"
#: What an older dropq wrote of a bounce: it is left out when a name is read.
_FORMER = "JMS_dropq_returnTo"
#: What `copied` says in a name of an older dropq: the selectors of whichever queue it lies in made their copies.
COPIED_HERE = "true"
_COPIED_HERE = "JMS_dropq_copiedB=true"
#: The attributes that `write` puts before the sender's properties.
_WRITTEN_FIRST = ("first", "delivery_count")
_SPILLED_OURS = ("JMS_dropq_origin", "JMS_dropq_from")
#: The attributes with at most MARK_LIMIT bytes.
_MARKS = frozenset(("copy", "lapsed", "meta", "via", "reason"))
#: The property that a name which is too long has in place of others of dropq, and the letter of each in its value.
PACK = f"{RESERVED}all"
_PACKED = {
    "cancels": "C", "died": "D", "since": "S", "hops": "H", "copied": "K", "cut": "T", "records": "N", "reason": "R",
    "replayed": "Y", "lapsed": "L", "copy": "M", "via": "V",
}  # fmt: skip
_UNPACKED = {letter: key for key, (attribute, _) in _OURS.items() if (letter := _PACKED.get(attribute))}
_PACKED_VALUE = re.compile(r"[a-z0-9_-]+", re.ASCII).fullmatch
#: The attributes that `squeeze` leaves out of a name that is too long even then, in this order.
_DISPENSABLE = (
    "records", "replayed", "cut", "lapsed", "reason", "cancels", "died", "since", "hops", "copied", "via", "record",
    "first",
)  # fmt: skip
_GENERATED = re.compile(r"[0-9]{16}-[0-9]{10}")
_MARK = re.compile(r"[0-9a-f]{16}", re.ASCII)
_TOKEN = re.compile(rf"[0-9A-Za-z_-]{{1,{MARK_LIMIT}}}")


@dataclass(frozen=True)  # no slots: `make` relies on the defaults in the class, and takes a fifth of the time
class Name:
    """What a file name says about its message; times in milliseconds since 1970 UTC, 0 or "" if absent."""

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
    died: int = 0
    not_before: int = 0
    since: int = 0
    copy: str = ""
    lapsed: str = ""
    meta: str = ""
    via: str = ""
    hops: int = 0
    origin: str = ""
    from_client: str = ""
    reason: str = ""
    copied: str = ""
    first: int = 0
    record: int = 0
    records: int = 0
    cut: int = 0
    replayed: bool = False
    owned: bool = False
    foreign: bool = False

    @property
    def generated(self) -> bool:
        """Whether the id has the form that dropq and DropboxMQ generate."""
        return _GENERATED.fullmatch(self.id) is not None

    @property
    def timestamp(self) -> int | None:
        """The time of sending, which a generated id has, else None."""
        return int(self.id[:13]) if self.generated else None

    @property
    def born_foreign(self) -> str | None:
        """The name that the foreign file was sent with, and gets back in processed/, error/ and expired/, or None."""
        if self.foreign:
            return self.id
        if self.first or self.record:
            return None  # a part of its bundle, and no message that was sent
        touched = self.correlation_id or self.reply_to or self.type or self.properties or self.expiration
        plain = self.priority == 4 and self.message_class == "B" and not touched
        if (self.mark or self.lapsed) and plain and not self.generated and _is_own_name(self.id):
            return self.id
        return None

    @property
    def filename(self) -> str | None:
        """The name of the file that it was sent from; None if there is none, or it is not safe in a path."""
        typed = self.properties.get(FILENAME)
        text = typed.value if typed is not None else None
        if not isinstance(text, str) or not text.isprintable() or "/" in text or text[:1] in ("", ".", "-"):
            return None
        return text if len(to_bytes(text)) <= NAME_MAX else None

    @property
    def begins(self) -> int:
        """The number that the first line, row or frame of its body has in its bundle."""
        return self.first or self.record or 1

    @property
    def mark(self) -> str:
        """What tells its file from others of the same id: the credit under which it came, or its copy mark.

        Copies for several receivers bear one copy mark, and may meet again in a queue, each under a credit of its own.
        """
        return self.via or self.copy

    def distinction(self, claim: str = "") -> str:
        """Return what tells its message from all others of its id, the same at each delivery; "" if the id does.

        Unlike `identity`, it also tells parts of a bundle apart, and files that came in the same millisecond. The id of
        the claim that holds it becomes its mark when it returns without one.
        """
        mark = self.unmarked.mark or ("" if self.generated else claim)
        return "".join(f"/{part}" for part in (self.first, mark) if part)

    @property
    def unmarked(self) -> Name:
        """This name without its expired-claim marker; a copy marker then keeps it unique."""
        if not self.lapsed:
            return self
        return replace(self, lapsed="", copy=self.copy if self.generated else self.lapsed)


def _is_own_name(text: str) -> bool:
    usable = bool(text) and text[0] != "." and "/" not in text and "\0" not in text
    return usable and len(to_bytes(text)) <= NAME_MAX and split_claim(text)[0] is None and not is_coded(text)


def parse(filename_without_prefix: str, *, typed_replies: bool = False, problems: list[str] | None = None) -> Name:
    """Parse a file name; never raises. A name that is not coded is foreign, and names a message, too.

    Args:
        filename_without_prefix: the file name as `split_claim` returns it.
        typed_replies: whether field 6 begins with DropboxMQ's Q (queue) or T (topic).
        problems: gets a sentence about each part of the name that cannot be read, and is left out.
    """
    problems = [] if problems is None else problems
    coded = match_coded(filename_without_prefix)
    if coded is None:
        return make({"id": filename_without_prefix, "foreign": True})
    priority, message_id, message_class, rest = coded.groups()
    if "%" in message_id or "+" in message_id:
        message_id = decode(message_id, "surrogateescape")
    attributes: dict[str, Any] = {"id": message_id, "priority": int(priority), "message_class": message_class or "B"}
    if not rest:
        return make(attributes)
    expiration, correlation, reply, kind, properties = (rest.rstrip(".") + "....").split(".", 4)
    if expiration:
        attributes["expiration"] = _read_expiration(expiration, problems)
    if correlation:
        attributes["correlation_id"] = _read_text(correlation)
    if reply:
        attributes["reply_to"] = _read_reply(_read_text(reply), typed_replies)
    if kind:
        attributes["type"] = _read_text(kind)
    if properties := properties.rstrip("."):
        attributes |= _read_properties(properties, problems)
    return make(attributes)


def make(attributes: Mapping[str, Any]) -> Name:
    """Build a Name without its frozen __init__, which would set all of its attributes; the rest have defaults."""
    name = object.__new__(Name)
    name.__dict__["properties"] = {}
    name.__dict__.update(attributes)
    return name


def _read_text(raw: str) -> str:
    return readable(decode(raw))


def readable(text: str) -> str:
    """Return a text as UTF-8 can hold it: bytes that are not UTF-8, and halves of pairs, stay escapes."""
    return text if text.isascii() else LONE_SURROGATE.sub(lambda lone: encode(lone[0]), text)


def _read_expiration(text: str, problems: list[str]) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63:
        return int(text)
    problems.append(f"{text!r} is not an expiration time: the message never expires")
    return 0


def _read_reply(text: str, typed: bool) -> str | None:
    if typed and text.startswith("Q"):
        text = text[1:]
    elif typed and text.startswith("T"):
        text = TOPIC_REPLY + text[1:] if text[1:] else ""
    return text or None


def _write_reply(reply_to: str, typed: bool) -> str:
    if not typed or not reply_to:
        return reply_to
    topic = reply_to.removeprefix(TOPIC_REPLY)
    return "T" + topic if topic and topic != reply_to else "Q" + reply_to


def _read_properties(text: str, problems: list[str]) -> dict[str, Any]:
    pairs = [_read_property(pair, problems) for pair in text.split("&") if pair]
    return _sort_properties([pair for pair in pairs if pair], problems)


def _read_property(pair: str, problems: list[str]) -> tuple[str, Typed] | None:
    head, equals, value = pair.partition("=")
    kind = head[-1:] if head[-1:] in TYPES else "S"
    try:
        if not equals or len(head) < 2:
            raise ValueError("it has no name and type")
        return _read_text(head[:-1]), Typed.read(kind, _read_text(value))
    except ValueError as error:
        problems.append(f"property {pair!r} is dropped: {error}")
        return None


def _sort_properties(pairs: Iterable[tuple[str, Typed]], problems: list[str]) -> dict[str, Any]:
    """Separate the sender's properties from ours; return attributes of a Name."""
    properties: dict[str, Typed] = {}
    attributes: dict[str, Any] = {"properties": properties}
    for key, typed in pairs:
        if key == PACK:
            attributes = _sort_properties(_unpack(typed.text, problems), problems) | attributes
        elif key not in _OURS:
            if key != _FORMER:
                properties[key] = typed
        else:
            attribute, kind = _OURS[key]
            if attribute == "copied" and typed.type == "B":
                attributes[attribute] = COPIED_HERE if typed.value else ""
            elif _is_valid(attribute, kind, typed):
                attributes[attribute] = typed.value
            else:
                problems.append(f"{key} cannot be {typed.value!r}; it is dropped")
    return attributes


def _unpack(text: str, problems: list[str]) -> Iterable[tuple[str, Typed]]:
    """Yield the properties of dropq that one property of a name has in place of them."""
    for letter, value in re.findall(r"(.)([^A-Z]*)", text, re.DOTALL):
        try:
            key = _UNPACKED[letter]
            yield key, Typed.read(_OURS[key][1], str(int(value, 36)) if letter == _PACKED["since"] else value)
        except (KeyError, ValueError):
            problems.append(f"{PACK} cannot have {letter + value!r}; it is dropped")


def _is_valid(attribute: str, kind: str, typed: Typed) -> bool:
    if attribute == "meta":  # becomes part of a path
        return isinstance(typed.value, str) and _TOKEN.fullmatch(typed.value) is not None
    if typed.type != kind:
        return False
    if attribute == "copied":  # becomes part of a path
        return isinstance(typed.value, str) and _MARK.fullmatch(typed.value) is not None
    if isinstance(typed.value, str):
        return attribute not in _MARKS or len(encode(typed.value)) <= MARK_LIMIT
    return typed.value >= 0


def plain_name(message_id: str, priority: int | str, message_class: str) -> str:
    """Return the name of a message that has only a generated id, a priority and a class."""
    return f"{priority}.{message_id}.{message_class}"


def made_name(message_id: str, message_class: str, of: str) -> str:
    """Return the name of a message made of another, whose name `of` has only a generated id, a priority and a class."""
    priority, correlation_id, _ = of.split(".")
    return f"{plain_name(message_id, priority, message_class)}..{correlation_id}"


#: The attributes in the first three fields; `properties` is always set, and may be empty.
_HEAD = frozenset(("id", "priority", "message_class", "properties"))
#: The attributes that a sender sets; dropq itself adds nothing to field 8.
_FROM_SENDER = _HEAD | {"expiration", "correlation_id", "reply_to", "type"}


def write(name: Name, *, typed_replies: bool = False, packed: Collection[str] = ()) -> str:
    """Return the coded form of a name: ASCII, without trailing empty fields; ValueError for a number out of range.

    The attributes that are `packed` share one property, as far as each is text that this can hold.
    """
    if name.message_class not in CLASSES or len(name.message_class) != 1:
        raise ValueError(f"message class {name.message_class!r} is not one of {' '.join(CLASSES)}")
    if not is_int32(name.priority):
        raise ValueError(f"priority {name.priority} does not fit into 32 bits")
    if not 0 <= name.expiration < 1 << 63:
        raise ValueError(f"expiration {name.expiration} is not a time in milliseconds since 1970")
    head = f"{name.priority}.{encode(name.id)}.{name.message_class}"
    if not name.properties and name.__dict__.keys() <= _HEAD:
        return head
    expiration = str(name.expiration) if name.expiration else ""
    correlation = encode(name.correlation_id) if name.correlation_id else ""
    reply = encode(_write_reply(name.reply_to, typed_replies)) if name.reply_to else ""
    kind = encode(name.type) if name.type else ""
    # It comes first, and with leading zeros: in the order of their names, the parts of a bundle are in its order.
    written = [f"JMS_dropq_firstI={name.first:010d}"] if name.first else []
    if name.delivery_count:
        written.append(f"JMSXDeliveryCountI={name.delivery_count}")
    for key, typed in name.properties.items():
        written.append(f"{encode(key)}{typed.type}={encode(typed.text)}")
    attributes, pack = name.__dict__, ""
    if not attributes.keys() <= _FROM_SENDER:
        for key, (attribute, letter) in _OURS.items():
            if attribute not in _WRITTEN_FIRST and (value := attributes.get(attribute)):
                text = Typed(letter, value).text
                if attribute == "copied" and value == COPIED_HERE:
                    written.append(_COPIED_HERE)
                elif attribute in packed and _PACKED_VALUE(text):
                    pack += _PACKED[attribute] + (_base36(value) if attribute == "since" else text)
                else:
                    written.append(f"{key}{letter}={encode(text)}")
    if pack:
        written.append(f"{PACK}S={pack}")
    return f"{head}.{expiration}.{correlation}.{reply}.{kind}.{'&'.join(written)}".rstrip(".")


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def file_name(name: Name, *, typed_replies: bool = False) -> str:
    """Return the file name of a message: the coded form, or a foreign file's own name."""
    return name.id if name.foreign else write(name, typed_replies=typed_replies)


def shorten(name: Name, token: str, budget: int = NAME_BUDGET) -> tuple[Name, dict[str, object]]:
    """Move parts of a name that is too long into a sidecar; `restore` undoes it.

    These parts leave the name: correlation, reply-to, type, properties, origin and sender; and the id, if its encoding
    is over ID_LIMIT, or if the name is still over its budget. A foreign name becomes coded, with a copy marker.

    Args:
        token: names the sidecar: at most MARK_LIMIT letters, digits, - and _.
        budget: how many bytes a name may have in its queue: the `name_budget` of its layout.

    Returns:
        The short name, and the content of the sidecar as a JSON object.
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
        name, correlation_id=None, reply_to=None, type=None, properties={}, origin="", from_client="",
        meta=token, copy=name.copy or (token if name.foreign else ""), foreign=False,
    )  # fmt: skip
    stand_in, length = _stand_in(name.id), len(encode(name.id))
    if length > ID_LIMIT or (length > len(stand_in) and len(write(short)) > budget):
        short = replace(short, id=stand_in)
    return short, sidecar


def room(name: Name, budget: int = NAME_BUDGET) -> int:
    """Return how many bytes a file name may have.

    A name with a sidecar may have more, as its counters cannot spill into one; and that of a single record, as its id,
    clock, mark and number alone take 140 bytes, and a sidecar for each record costs two syncs.
    """
    return claim_room(name) if name.meta or name.record else budget


def claim_room(name: Name, most: int = NAME_MAX) -> int:
    """Return how many of `most` bytes a file name may have so that its next claim, without a mark of delay, fits."""
    prefix = PREFIX_LIMIT - 10 + len(str(name.delivery_count + 1))
    return most - prefix + (len(f"&JMS_dropq_notBeforeL={name.not_before}") if name.not_before else 0)


def squeeze(name: Name) -> tuple[str, dict[str, object]]:
    """Return the text of a shortened name, which may still be too long, and what had to be left out of it.

    Its counters and marks are packed into one property then, the credit, which others look for, only if it must be.
    """
    left_out: dict[str, object] = {}
    if len(text := write(name)) <= room(name):
        return text, left_out
    if name.generated:
        name = replace(name, copy="")  # the token of its new sidecar makes it unique
    for packed in ((), _PACKED.keys() - {"via"}, _PACKED):
        if len(text := write(name, packed=packed)) <= room(name):
            return text, left_out
    for attribute in _DISPENSABLE:
        if value := getattr(name, attribute):
            left_out[attribute] = value
            name = replace(name, **{attribute: getattr(Name, attribute)})
            if len(text := write(name, packed=_PACKED)) <= room(name):
                break
    return text, left_out


def bears(message_id: str) -> Callable[[str], bool]:
    """Return a test of file names, with or without a claim prefix: whether one is of this id, file name or receipt.

    The test compares text first, and parses only the few names that pass. It opens no sidecar: a shortened name has a
    hash of its id.
    """
    message_id, _ = split_receipt(message_id)
    stand_in = _stand_in(message_id)
    space = "+" if " " in message_id else "%"

    def test(filename: str) -> bool:
        # This must be fast for an archive of a million files. An id that any program encoded has an escape.
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
    """Undo `shorten`; values in the name itself win. `problems` gets a sentence about each damaged value."""
    problems = [] if problems is None else problems
    sidecar = sidecar if isinstance(sidecar, Mapping) else {}
    attributes = _sort_properties(_sidecar_properties(sidecar.get("properties"), problems), problems)
    return replace(
        name,
        id=_restored_id(name.id, sidecar.get("id"), problems),
        correlation_id=name.correlation_id or _sidecar_text(sidecar, "correlation_id", problems),
        reply_to=name.reply_to or _sidecar_text(sidecar, "reply_to", problems),
        type=name.type or _sidecar_text(sidecar, "type", problems),
        properties={**attributes["properties"], **name.properties},
        origin=name.origin or attributes.get("origin", ""),
        from_client=name.from_client or attributes.get("from_client", ""),
        meta="",
    )


def _restored_id(short: str, full: object, problems: list[str]) -> str:
    if isinstance(full, str) and short in (full, _stand_in(full)):
        return full
    problems.append(f"the id in its sidecar, {full!r}, belongs to another message and is ignored")
    return short


def _sidecar_text(sidecar: Mapping[str, object], key: str, problems: list[str]) -> str | None:
    value = sidecar.get(key)
    if value is None or isinstance(value, str):
        return value and readable(value)
    problems.append(f"{key} in its sidecar is not text and is dropped")
    return None


def _sidecar_properties(entry: object, problems: list[str]) -> Iterable[tuple[str, Typed]]:
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        try:
            kind, text = value
            yield readable(str(key)), Typed.read(str(kind), readable(str(text)))
        except (TypeError, ValueError) as error:
            problems.append(f"property {key!r} in its sidecar is dropped: {error}")


def order(name: Name, arrival: int) -> tuple[int, str, str]:
    """Return the key that sorts names in order of delivery: priority, time (else `arrival`, in ms), sequence, name."""
    time = name.id[:16] if name.generated else f"{name.since or arrival:013d}000"
    return -name.priority, time, file_name(name)


def bundle_mark(name: Name) -> str:
    """Return what the copy marks of all parts of a bundle begin with, if another bundle may have its id; else ""."""
    if _MARK.fullmatch(name.copy):
        return name.copy[:BUNDLE_MARK]
    return credit_mark(name) if name.first and not name.generated else ""


def credit_mark(name: Name) -> str:
    """Return the mark of a bundle that came under a credit, which what is left of it bears in place of a copy mark."""
    return hashlib.sha256(name.via.encode()).hexdigest()[:BUNDLE_MARK] if name.via else ""


def copy_mark(name: Name) -> str:
    """Return a mark that no other file has; a part of a bundle keeps what tells it from those of another one."""
    return bundle_mark(name) + random_hex(COPY_MARK)


def random_hex(digits: int) -> str:
    """Return so many random hexadecimal digits, an even number."""
    return os.urandom(digits // 2).hex()


def identity(name: Name, arrival: int) -> tuple[str, int]:
    """Return what tells a message from any other of its queue that has the same id, however often it comes back.

    A second file may have its name, a sender may choose an id twice, and a requeue or a replay begins anew: each waits
    since another time, which a message keeps. The parts that a bundle is cut into have the identity of the bundle.
    """
    return name.id, name.since or name.timestamp or arrival


def moment(name: Name, arrival: int) -> int:
    """Return a message's time, else the `arrival` (in ms), in microseconds; of a generated id with its sequence."""
    return int(name.id[:16]) if name.generated else (name.since or arrival) * 1000


# -- at a glance: what can be read from many names without parsing each ---------------------------------------------

_PRIORITY = r"(?:0|-?[1-9]\d{0,8})"
_GENERATED_HEAD = _PRIORITY + r"\.\d{16}-\d{10}\.[MBSPOT]"
#: Matches a plain name, which has only a priority, a generated id and a class.
is_plain = re.compile(rf"{_GENERATED_HEAD}\Z", re.ASCII).match
_ALL_PLAIN = re.compile(rf"(?>{_GENERATED_HEAD}\0)*+", re.ASCII).fullmatch
#: Splits a plain name, for engines with their own regular expressions.
PLAIN_PARTS = r"^(?P<priority>[^.]+)\.(?P<id>[^.]+)\.(?P<class>.)$"
#: Matches a name with a priority in the usual form and a generated id, whatever follows.
tells_time = re.compile(rf"{_GENERATED_HEAD}(?:\.|\Z)", re.ASCII).match
#: Matches a name, or a text with several, that may have a marker or a counter that only dropq writes.
may_be_marked = re.compile(RESERVED).search
#: Whether a name may say that copies were made, or that its root owns the message.
may_be_copied = re.compile(f"{RESERVED}copied|{PACK}").search
may_be_owned = re.compile("JMS_dropq_ownedB=true").search
#: Whether a name may say until when its message is delayed, that its holders died, or that its lease ran out.
may_be_delayed = re.compile("_notBeforeL=").search
may_have_deaths = re.compile(f"_diedI=|{PACK}").search
may_be_lapsed = re.compile(f"_lapsed|{PACK}").search

#: Matches many names that `tells_time` matches, each followed by NUL, without backtracking.
_ALL_TELL_TIME = re.compile(rf"(?>{_GENERATED_HEAD}(?>\.[^\0]*+)?+\0)*+", re.ASCII).fullmatch
#: Matches the start of a name that tells its time: its priority, and its time to about a day.
_START = re.compile(rf"({_PRIORITY})\.(\d{{5}})", re.ASCII).match
#: The length of a plain name without its priority.
_PLAIN_END = len(".0000000000000000-0000000000.B")
_WITH_ID = re.compile(_PRIORITY + r"\.(\d{16}-\d{10})(?:-\d+)?\.", re.ASCII).match
_SENT = re.compile(r"-?[0-9]{1,9}\.([0-9]{13})[0-9]{3}-[0-9]{10}\.[MBSPOT](?:\.|\Z)").match
#: Finds the times of the names that `_SENT` matches; NUL comes before each name.
_ALL_SENT = re.compile(r"\0-?[0-9]{1,9}\.([0-9]{13})[0-9]{3}-[0-9]{10}\.[MBSPOT](?![^.\0])").findall
_may_have_since = re.compile(f"{RESERVED}since|{PACK}").search
_SINCE = re.compile(r"[.&]JMS_dropq_sinceL=([0-9]{13})(?![^&.])").search
_NOT_BEFORE = re.compile(r"[.&]JMS_dropq_notBeforeL=([0-9]{13})(?![^&.])").search
_SIDECAR = re.compile(r"JMS_dropq_metaS=([0-9A-Za-z_-]+)").search


def all_tell_time(filenames: Iterable[str]) -> bool:
    """Return whether `tells_time` matches every name."""
    return _ALL_TELL_TIME("\0".join([*filenames, ""])) is not None


def all_plain(filenames: Iterable[str]) -> bool:
    """Return whether `is_plain` matches every name."""
    return _ALL_PLAIN("\0".join([*filenames, ""])) is not None


def start_of(filename: str) -> tuple[tuple[int, str], str] | None:
    """Return two things: a sort key, by priority and about a day, and a text that names with this start sort before.

    Return None if the name does not begin like those that `tells_time` matches.
    """
    match = _START(filename)
    if match is None:
        return None
    return (-int(match[1]), match[2]), f"{match[0][:-1]}{chr(ord(match[0][-1]) + 1)}"


def order_at_a_glance(filename: str) -> tuple[int, str, str]:
    """Return the key that `order` returns for a name that `tells_time` matches."""
    priority, _, rest = filename.partition(".")
    return -int(priority), rest[:16], filename


def priority_start(filename: str) -> str:
    """Return how all names with the priority of a coded name begin."""
    return filename[: filename.index(".") + 1]


def plain_length(filename: str) -> int:
    """Return how long a plain name with the priority of a coded name is."""
    return filename.index(".") + _PLAIN_END


def since_at_a_glance(filename: str) -> int | None:
    """Return since when a message counts as waiting, in ms; None if that needs the parsed name."""
    own_name = split_claim(filename)[1]
    match = _SENT(own_name)
    if match and _may_have_since(own_name):
        match = _SINCE(own_name)
    return int(match[1]) if match else None


def sent_together(filenames: Sequence[str]) -> list[int] | None:
    """Return what `since_at_a_glance` returns for each name; None if one of them has to be looked at by itself."""
    text = "\0".join(["", *filenames])
    times = [] if "~" in text or _may_have_since(text) else _ALL_SENT(text)
    return list(map(int, times)) if len(times) == len(filenames) else None


def due_at_a_glance(filename: str) -> int | None:
    """Return when a delayed message is due, in ms; None if that needs the parsed name."""
    match = _NOT_BEFORE(filename)
    return int(match[1]) if match else None


def sidecar_of(filename: str) -> str | None:
    """Return the token of the sidecar that a name refers to, whatever prefix it has, or None."""
    match = _SIDECAR(filename) if "_metaS" in filename else None
    return match[1] if match else None


def may_be_part(filename: str) -> bool:
    """Return whether a name may say that its message is a part of a bundle."""
    return "_firstI=" in filename or "_recordI=" in filename


def generated_id(filename: str) -> str | None:
    """Return the generated id of a message, or of the bundle that it was a record of; None if it has none."""
    match = _WITH_ID(split_claim(filename)[1])
    return match[1] if match else None


def sole_id(filename: str) -> str | None:
    """Return the generated id of a message that is no part of a bundle; None if its name does not tell at a glance."""
    own_name = split_claim(filename)[1] if "~" in filename else filename
    return own_name.split(".", 2)[1] if tells_time(own_name) and not may_be_part(own_name) else None


def has_no_expiration(filename: str) -> bool:
    """Return whether a name is too short for the fourth field, the expiration; it may have a claim prefix."""
    return filename.count(".") < 3


#: Matches a name that says why its message became a dead letter, and was not only bounced; it may have a claim prefix.
is_letter = re.compile(f"(?:{RESERVED}reasonS=|{PACK}.=[^&]*R)(?!(?:bounced|overflow)(?:[&A-Z]|$))").search


def is_unique(own_name: str) -> bool:
    """Return whether no other file can have a name: it has a generated id, a copy marker, or a credit."""
    name = parse(own_name)
    return name.generated or bool(name.mark)


# -- which names may be given ---------------------------------------------------------------------------------------

#: The suffix that DropboxMQ gives to the folder of a deleted queue.
DELETED = re.compile(r"\.deleted-[0-9]+\Z", re.ASCII)
#: What the names of temporary queues begin with; a generated id follows.
TEMPORARY = "temp-"


def check_queue_name(name: str, what: str = "queue") -> None:
    """Raise InvalidName if a queue, or what else `what` says, cannot have a name."""
    if len(to_bytes(name)) > NAME_MAX:
        raise InvalidName(
            f"{name!r} cannot name a {what}: it is longer than {NAME_MAX} bytes, the most of a folder's name"
        )
    if not name or name[0] == "." or "/" in name:
        raise InvalidName(
            f"{name!r} cannot name a {what}: give the name of a folder, without / and without a dot at the start"
        )
    if any(ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000 for char in name):
        raise InvalidName(f"{name!r} cannot name a {what}: it has control characters or undecodable bytes")
    if name in ("topic-root", "dropboxmq"):
        raise InvalidName(f"{name!r} cannot name a {what}: a root has another folder of this name")
    if DELETED.search(name):
        raise InvalidName(f"{name!r} cannot name a {what}: DropboxMQ gives such names to queues that it deleted")


def can_name_queue(name: str) -> bool:
    """Return whether a queue can have a name."""
    try:
        check_queue_name(name)
    except InvalidName:
        return False
    return True


def temporary_name(id: str) -> str:
    """Return the name of a temporary queue, with a generated id; DropboxMQ's temporary queues are named so, too."""
    return f"{TEMPORARY}{id}"


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a temporary queue."""
    return name.startswith(TEMPORARY) and Name(name.removeprefix(TEMPORARY)).generated


def check_property_name(name: str) -> None:
    """Raise ValueError if a sender cannot give a name to a property."""
    if not name.replace("$", "_").isidentifier():
        raise ValueError(f"property name {name!r} is not an identifier: a letter, _ or $, then also digits")
    if name.upper() in KEYWORDS:
        raise ValueError(f"property name {name!r} is a keyword of the selector language")
    if name.startswith("JMS") and name not in _JMS_SENT:
        raise ValueError(f"property name {name!r} is reserved: of JMS's names, send {', '.join(_JMS_SENT)} only")


def check_property(name: str, typed: Typed) -> None:
    """Raise ValueError if a sender cannot give a property to a message."""
    check_property_name(name)
    if name == DO_NOT_ROUTE and typed.text not in ("true", "false"):
        raise ValueError(f"property {name} cannot be {typed.value!r}: it is a boolean, true or false")


def check_message_id(message_id: str) -> None:
    """Raise ValueError if a sender cannot give an id to a message."""
    if not message_id or "\0" in message_id:
        raise ValueError(f"message id {message_id!r} is empty or has a NUL")
    check_text("the message id", message_id)
    if len(encode(message_id)) > ID_LIMIT:
        raise ValueError(f"message id {message_id!r} takes over {ID_LIMIT} bytes in a file name")
