"""The frames of PZQ's three sockets, and what they say: text and bytes alone, no sockets.

Frames are written as the server sees them, without the routing frame that a ROUTER puts in front of them. The empty
frame parts what the protocol says from what the sender says. The formats are those of PZQ's wiki page *Sockets and
formats*; where its code and the page differ, docs/zeromq.md says what holds here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from dropq.format.json_body import from_json, to_json
from dropq.format.names import readable

if TYPE_CHECKING:
    from dropq.queue.message import Message

#: The frame that parts the protocol's frames from the sender's.
DELIMITER = b""
#: What says that a message was stored, or is acknowledged; and that it was refused.
YES, NO = b"1", b"0"
#: The request to the monitor.
MONITOR = b"MONITOR"
#: The property that has the lengths of a message's parts, joined by `-`, where it has more than one.
PARTS = "zmq_parts"
#: The most parts and headers that a message may have together.
MOST_FRAMES = 1000

#: What a producer's header may say of a message, by the type that JSON has for it.
_FIELDS: dict[str, tuple[type, ...]] = {
    "priority": (int,),
    "type": (str,),
    "correlation_id": (str,),
    "reply_to": (str,),
    "expires_in": (int, float, str),
    "delay": (int, float, str),
    "properties": (dict,),
    "message_id": (str,),
}


class Produced(NamedTuple):
    """What a producer sent: an id, which names the answer and nothing else, headers, and the parts to be stored."""

    id: bytes
    headers: Sequence[bytes]
    parts: Sequence[bytes]


class Settled(NamedTuple):
    """What a consumer says of a message: its key, and whether it is acknowledged, or given back."""

    key: bytes
    acked: bool


def read_message(frames: Sequence[bytes]) -> Produced:
    """Read what a producer sent, `id, header..., delimiter, part...`; ValueError if it is none, but for its id."""
    try:
        at = frames.index(DELIMITER, 1)
    except ValueError:
        raise ValueError("malformed message: no empty frame follows its id and headers") from None
    if at == len(frames) - 1:
        raise ValueError("malformed message: no part follows the empty frame")
    if len(frames) - 2 > MOST_FRAMES:
        raise ValueError(f"the message has {len(frames) - 2} parts and headers: at most {MOST_FRAMES} are allowed")
    return Produced(frames[0], frames[1:at], frames[at + 1 :])


def stored(id: bytes) -> list[bytes]:
    """Return the answer to a message that is stored as durably as the queue asks."""
    return [id, YES, DELIMITER]


def refused(id: bytes, why: str) -> list[bytes]:
    """Return the answer to a message that is not stored, or not durable."""
    return [id, NO, DELIMITER, why.encode(errors="replace")]


def joined(parts: Sequence[bytes]) -> tuple[bytes, str | None]:
    """Return parts as the body of one file, and their lengths; None for one part, which is the body."""
    if len(parts) == 1:
        return parts[0], None
    return b"".join(parts), "-".join(str(len(part)) for part in parts)


def fields_of(headers: Sequence[bytes]) -> dict[str, Any]:
    """Return the arguments of `Queue.send` in the header of a message; ValueError for several headers, or others."""
    if not headers:
        return {}
    if len(headers) > 1:
        raise ValueError(f"the message has {len(headers)} headers: one JSON object is allowed")
    try:
        said = from_json(headers[0])
    except ValueError as error:
        raise ValueError(f"the header is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError("the header is no JSON object")
    for key, value in said.items():
        if key not in _FIELDS:
            raise ValueError(f"the header says {key!r}: {', '.join(_FIELDS)} are allowed")
        if not isinstance(value, _FIELDS[key]) or isinstance(value, bool):
            raise ValueError(f"the header's {key} is of the wrong type: {value!r:.80}")
    if PARTS in said.get("properties", ()):
        raise ValueError(f"the header has a property {PARTS}: the frames of the message say that")
    return said


def delivery(
    key: bytes, sent_us: int, timeout_us: int, parts: Sequence[bytes], header: bytes | None = None
) -> list[bytes]:
    """Return a message for a consumer, who settles it by its key within a time in microseconds.

    It is sent at a time in microseconds since 1970; the header is what else is said of it.
    """
    said = [key, b"%d" % sent_us, b"%d" % timeout_us]
    return [*said, DELIMITER, *parts] if header is None else [*said, header, DELIMITER, *parts]


def parted(body: bytes, lengths: str) -> list[bytes]:
    """Take a body apart by the lengths of its parts; ValueError if they do not add up to its own."""
    sizes = lengths.split("-")
    if not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f"{PARTS} is {lengths!r:.80}: numbers joined by - are allowed")
    ends = list(accumulate(map(int, sizes), initial=0))
    if ends[-1] != len(body):
        raise ValueError(f"{PARTS} adds up to {ends[-1]} bytes, and the body has {len(body)}")
    return [body[begin:end] for begin, end in pairwise(ends)]


def header_of(message: Message) -> bytes:
    """Return what is said of a message, as JSON; what it does not say is left out."""
    said: dict[str, Any] = {
        "message_id": readable(message.id),
        "priority": message.priority,
        "timestamp": message.timestamp.isoformat(),
        "delivery_count": message.delivery_count,
        "type": message.type,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "expiration": message.expiration and message.expiration.isoformat(),
        "properties": _finite({name: value for name, value in message.properties.items() if name != PARTS}) or None,
    }
    return to_json({key: value for key, value in said.items() if value is not None}).encode()


def _finite(properties: Mapping[str, object]) -> dict[str, object]:
    """Return properties as JSON can hold them: numbers that it has no word for as text, as file names have them."""
    return {
        name: ("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in properties.items()
    }


def read_settlement(frames: Sequence[bytes]) -> Settled | None:
    """Read what a consumer says: `key, 1` acknowledges, anything else gives back; None if it says nothing of a key."""
    return Settled(frames[0], frames[1] == YES) if len(frames) > 1 else None


def is_question(frames: Sequence[bytes]) -> bool:
    """Return whether the monitor is asked for its figures: by the last frame."""
    return frames[-1] == MONITOR


def figures(values: Mapping[str, object]) -> list[bytes]:
    """Return the monitor's answer: a line for each figure, its name and its value parted by a colon and a blank."""
    return [DELIMITER, "".join(f"{name}: {value}\n" for name, value in values.items()).encode(errors="replace")]


def complaint(why: str) -> list[bytes]:
    """Return the monitor's answer to what it does not understand."""
    return [DELIMITER, f"error: {why}".encode(errors="replace")]
