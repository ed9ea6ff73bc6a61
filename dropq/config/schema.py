"""The keys of queue.toml and dropq.toml, the values that each takes, and the frozen objects that hold the values.

Each key has one kind, which reads a value, says what is allowed, and writes the value. This module knows single values;
load.py knows where they come from and which of them exclude each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import date, datetime
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from dropq import durations
from dropq.durations import format_duration, parse_duration
from dropq.errors import InvalidFilter, Unavailable
from dropq.format.addresses import is_topic_name
from dropq.format.escapes import LARGEST
from dropq.format.names import CLASSES, Name, can_name_queue, plain_name

#: The format of a root that this version reads and writes.
FORMAT = 1

#: The points that a replay can begin at.
POINTS = "epoch, now, creation, an id that dropq made, or an ISO 8601 date or time"

#: A value that means the same as leaving the key out, even where [defaults] sets it.
UNSET = "unset"

#: The characters that make an underlying_topic a regular expression.
_EXPRESSION = re.compile(r"[\\^$*+?()\[\]{}|]")

#: A number of bytes, such as 16MiB, and what each unit stands for.
_WRITTEN_SIZE = re.compile("([0-9]{1,10}) ?(|b|kib|mib|gib)")
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
#: A count as AMPS's configurations write it, such as 10k.
_WRITTEN_COUNT = re.compile("([0-9]{1,10})([km]?)")
_MULTIPLIERS = {"": 1, "k": 1_000, "m": 1_000_000}


# Readers of values. A reader raises ValueError with a text that says what is allowed, or bare: `Kind.allowed` says it.


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


class Kind(NamedTuple):
    """The values that a key takes: how to read one, what errors say is allowed, and how to write one."""

    read: Callable[[Any], object]
    allowed: str
    write: Callable[[Any], object] = _plain


def _values(allowed: str, is_allowed: Callable[[object], bool]) -> Kind:
    """Return the kind of values that are used as they are."""

    def read(value: object) -> object:
        if not is_allowed(value):
            raise ValueError
        return value

    return Kind(read, allowed)


def _period(value: object) -> float:
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError from None


def _lifetime(value: object) -> float:
    seconds = _period(value)
    if seconds < 0.001:
        raise ValueError(f'at least 1ms is allowed; leave it out, or write "{UNSET}", for no limit')
    return seconds


def _octal(value: object) -> int:
    if isinstance(value, str) and re.fullmatch("(0o)?[0-7]{3,5}", value):
        return int(value.removeprefix("0o"), 8)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError('octal digits as a string are allowed, such as "0664", or a TOML integer such as 0o664')


def _modes(*, needed: int, possible: int) -> Kind:
    def read(value: object) -> int:
        mode = _octal(value)
        if mode & needed != needed or mode & ~possible:
            hint = (
                f" (the number {value} is {mode:04o} in octal: write it as a string)" if value == mode < 10_000 else ""
            )
            raise ValueError(f"a mode with at least {needed:04o} and within {possible & ~0o002:04o} is allowed{hint}")
        if mode & 0o002:
            raise ValueError("a mode without write permission for others is allowed")
        return mode

    return Kind(read, "a mode", "{:04o}".format)


def _group(value: object) -> object:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    known = isinstance(value, str) and re.fullmatch(r"[^\s:,/\x00-\x1f]{1,255}", value)
    if not known and not (type(value) is int and 0 <= value < 2**32 - 1):
        raise ValueError
    return value


def _patterns(value: object) -> tuple[str, ...]:
    patterns = value.split() if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError
    for pattern in patterns:
        if "/" in pattern or _hides_messages(pattern):
            raise ValueError(f"{pattern!r} cannot be ignored: a pattern has no slash, and matches no coded name")
    return tuple(patterns)


def _hides_messages(pattern: str) -> bool:
    ids = ("0000000000000000-0000000000", "1789012345678901-2345678901")
    plain = (plain_name(id, priority, kind) for id in ids for priority in range(10) for kind in CLASSES)
    return any(fnmatchcase(name, pattern) for name in plain)


def _expression(value: object, *, of_order: bool) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    check_expression(value, of_order=of_order)
    return value


def check_expression(text: str, *, of_order: bool = False) -> None:
    """Raise ValueError, with what is wrong, for a filter, or an expression of an order, that cannot be read."""
    from dropq.filters import compile_expression, compile_filter  # few queues have a filter

    try:
        (compile_expression if of_order else compile_filter)(text)
    except Unavailable:
        pass  # who writes it does not need the extra; who evaluates it does, and gets this error then
    except InvalidFilter as error:
        raise ValueError(str(error).partition("\n")[0]) from None


def recovery_point(value: object) -> str:
    """Return a point that a replay can begin at, as text, or raise ValueError; a date is allowed, too."""
    if isinstance(value, date):
        return value.isoformat()
    if not isinstance(value, str):
        raise ValueError
    if value not in ("epoch", "now", "creation") and not Name(value).generated:
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise ValueError from None
    return value


def _factor(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= 1000:
        raise ValueError
    return float(value)


def _metadata(value: object) -> str:
    if value is not True and value != "enabled":
        raise ValueError
    return "enabled"


def _whole(value: object, written: re.Pattern[str], units: Mapping[str, int], least: int) -> int:
    if isinstance(value, str) and (found := written.fullmatch(value.strip().lower())):
        value = int(found[1]) * units[found[2]]
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError
    return value


def _counts(least: int) -> Kind:
    read = partial(_whole, written=_WRITTEN_COUNT, units=_MULTIPLIERS, least=least)
    return Kind(read, f"a whole number from {least} to {LARGEST}")


def _format_size(value: int) -> str:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if not value % _UNITS[unit.lower()]), "")
    return f"{value // _UNITS[unit.lower()]}{unit}"


def _separator(value: object) -> str:
    if type(value) is int or (isinstance(value, str) and re.fullmatch("[0-9]{1,3}", value)):
        value = chr(int(value)) if 0 < int(value) < 128 else ""  # AMPS writes the number of the character
    if not isinstance(value, str) or not re.fullmatch(r"[\x01-/:;<>?@\[-`{-\x7f]", value):
        raise ValueError
    return value


def _can_be_name(value: object) -> bool:
    return isinstance(value, str) and can_name_queue(value)


def _one_of(choices: tuple[str, ...]) -> Kind:
    return _values("one of " + ", ".join(f'"{choice}"' for choice in choices), lambda value: value in choices)


_SWITCH = _values("true or false", lambda value: isinstance(value, bool))
_PERIOD = Kind(_period, durations.ALLOWED, format_duration)
_LIFETIME = Kind(_lifetime, durations.ALLOWED, format_duration)
_SIZE = Kind(
    partial(_whole, written=_WRITTEN_SIZE, units=_UNITS, least=1),
    f'a number of bytes from 1 to {LARGEST}, also as "16MiB",',
    _format_size,
)
_COUNT, _LIMIT, _DEPTH = _counts(0), _counts(1), _counts(1000)
_QUEUE = _values("the name of a queue", _can_be_name)
_INSTANCE = _values("a name such as a queue may have", _can_be_name)
_FILTER = Kind(partial(_expression, of_order=False), "an expression as a string")
_ORDER = Kind(partial(_expression, of_order=True), "an expression as a string")


def _topics(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    if is_expression(value):
        from dropq.filters.regex import Regex

        try:
            Regex(value)
        except Unavailable:
            pass  # a sender does not need the extra
        except ValueError as error:
            raise ValueError(f"this is no regular expression ({error})") from None
    elif not is_topic_name(value):
        raise ValueError("no part of a topic's name between its dots may be empty")
    return value


def is_expression(topics: str) -> bool:
    """Return whether an underlying_topic is a regular expression, and not the name of a topic."""
    return _EXPRESSION.search(topics) is not None


def underlies(topics: str, topic: str) -> bool:
    """Return whether an underlying_topic names a topic, or, by RE2, matches its name; AMPS searches for a match."""
    if not is_expression(topics):
        return topics == topic
    from dropq.filters.regex import Regex

    return Regex(topics).matches(topic)


class Peer(NamedTuple):
    """Another root, which a bridge takes messages from: its `instance`, and where it lies."""

    name: str
    root: str


def _peers(value: object) -> tuple[Peer, ...]:
    found = []
    for said in value if isinstance(value, list | tuple) else (None,):
        if not isinstance(said, Mapping) or said.keys() != {"name", "root"}:
            raise ValueError
        name, root = said["name"], said["root"]
        if not _can_be_name(name):
            raise ValueError(f"{name!r} is no name of a root: one that a queue may have is allowed")
        if not isinstance(root, str) or not os.path.isabs(root) or "\0" in root:
            raise ValueError(f"the root of peer {name} is {root!r}: the absolute path of its folder is allowed")
        found.append(Peer(name, os.path.normpath(root)))
    return tuple(found)


def _key(kind: Kind, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """The configuration of a queue. Durations are in seconds; None means that a key is unset: no limit, no filter."""

    lease_period: float | None = _key(_LIFETIME)
    semantics: Literal["at-least-once", "at-most-once"] = "at-least-once"
    leasing: Literal["sublet", "strict"] = "sublet"
    max_backlog: int | None = _key(_LIMIT)
    max_per_subscription_backlog: int | None = _key(_LIMIT)
    expiration: float | None = _key(_LIFETIME)
    expiration_model: Literal["default", "queue", "earliest", "latest"] = "default"
    filter: str | None = _key(_FILTER)
    filter_rest: Literal["wait", "error"] = "wait"
    fairness_model: Literal["fast", "round-robin", "proportional"] = "fast"
    max_deliveries: int = _key(_COUNT, 0)
    max_cancels: int = _key(_COUNT, 0)
    exhausted: Literal["error", "expired", "dead-letter"] = "error"
    redelivery_attempts: int = _key(_COUNT, 0)
    #: None: as long as a file waits that was last touched by a write; `lifecycle/settling.py` says how long.
    settle_time: float | None = _key(_PERIOD)
    redelivery_delay: float = _key(_PERIOD, 1.0)
    redelivery_backoff: float = _key(Kind(_factor, "a number from 1 to 1000"), 2.0)
    redelivery_delay_limit: float = _key(_PERIOD, 60.0)
    priority: str | None = _key(_ORDER)
    barrier_expression: str | None = _key(_FILTER)
    target_queue_depth: int | None = _key(_DEPTH)
    deferred_ack_expiration: float = _key(_PERIOD, 86400.0)
    recovery_point: str | None = _key(Kind(recovery_point, POINTS))
    max_unprocessed: int | None = _key(_LIMIT)
    overflow: Literal["reject", "discard", "block"] = "reject"
    unroutable_after: float = _key(_PERIOD, 60.0)
    history: bool = _key(_SWITCH, True)
    max_record_failures: int = _key(_LIMIT, 1000)
    max_record_bytes: int = _key(_SIZE, 16 << 20)
    checkpoint: float = _key(_PERIOD, 1.0)
    max_history: int | None = _key(_COUNT)
    history_age: float | None = _key(_PERIOD)
    log: Literal["failures", "all", "off"] = "failures"
    log_age: float = _key(_PERIOD, 7 * 86400.0)
    message_type: Literal["json", "text", "binary", "fix", "nvfix", "xml", "msgpack", "bson"] = "json"
    #: Only for fix and nvfix; None: SOH.
    field_separator: str | None = _key(Kind(_separator, "an ASCII character that is no letter, digit or ="))
    underlying_topic: str | None = _key(Kind(_topics, "the name of a topic, or a regular expression,"))
    default_publish_target: str | None = _key(
        _values("the name of a topic", lambda value: isinstance(value, str) and is_topic_name(value))
    )
    file_backed_metadata: Literal["enabled"] = _key(Kind(_metadata, '"enabled"'), "enabled")
    #: Of the queue itself, else of [defaults], else of the root.
    dead_letter_queue: str | None = _key(_QUEUE)
    self_destruct: bool = _key(_SWITCH, False)
    self_destruct_after: float = _key(_PERIOD, 60.0)
    replication_type: Literal["LocalQueue", "Queue", "GroupLocalQueue"] = "LocalQueue"
    transfer_after: float = _key(_PERIOD, 1.0)
    initial_owner: str | None = _key(_INSTANCE)
    group_local_queue_domain: str | None = _key(_INSTANCE)
    durability: Literal["none", "file", "full"] = "full"
    ignore: tuple[str, ...] = _key(
        Kind(_patterns, "patterns of file names, as a list of strings or one string with spaces between"),
        (
            "_SUCCESS",
            "_temporary",
            "*.tmp",
            "*.part",
            "*.partial",
            "*.filepart",
            "*.crdownload",
            "*.swp",
            "*~",
            "*.crc",
        ),
    )
    file_mode: int | None = _key(_modes(needed=0o600, possible=0o777))
    dir_mode: int | None = _key(_modes(needed=0o700, possible=0o2777))
    group: int | str | None = _key(Kind(_group, "the name of a group, or its number,"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RootConfig:
    """The configuration of a root; `defaults` has the raw values of `[defaults]` by snake_case key."""

    format: int = _key(_values(f"the number {FORMAT}", lambda value: type(value) is int and value == FORMAT), FORMAT)
    reply_to_style: Literal["bare", "typed"] = "bare"
    dead_letter_queue: str | None = _key(_QUEUE)
    instance: str | None = _key(_INSTANCE)
    instance_group: str | None = _key(_INSTANCE)
    peer: tuple[Peer, ...] = _key(Kind(_peers, "[[peer]], each with name and root,"), ())
    defaults: Mapping[str, object] = field(
        default_factory=dict,
        metadata={"kind": _values("a table of keys of queue.toml", lambda value: isinstance(value, Mapping))},
    )


@cache
def kinds(config: type) -> Mapping[str, Kind]:
    """Return the keys of a configuration with their kinds; a key without a kind takes the choices of its type."""
    types = get_type_hints(config)
    return {key.name: key.metadata.get("kind") or _one_of(get_args(types[key.name])) for key in fields(config)}
