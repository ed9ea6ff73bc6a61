"""queue.toml and dropq.toml, read into one frozen and validated object each.

Nothing is accepted and then ignored: a key is unknown, wrong, valid but not built yet, or in force, and every
problem of a file is reported at once, with file, key, value and what is allowed. This module reads files and
never writes one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date, datetime
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from dropq import durations
from dropq.durations import format_duration, parse_duration
from dropq.errors import ConfigError, InvalidFilter, InvalidName, Unavailable
from dropq.names import CLASSES, Name, check_queue_name

__all__ = [
    "FORMAT",
    "NOT_BUILT",
    "POINTS",
    "QueueConfig",
    "RootConfig",
    "Selector",
    "Setting",
    "check_file",
    "explain_queue",
    "format_duration",
    "load_queue",
    "load_root",
    "parse_duration",
    "recovery_point",
    "toml_text",
    "validate_options",
]

#: The format of a root that this version reads and writes.
FORMAT = 1

#: Keys that are validated in full, and refused when they are set to anything but their default.
NOT_BUILT = frozenset(
    {
        "dead_letter_queue",
        "default_publish_target",
        "selector",
        "self_destruct",
        "underlying_topic",
    }
)

#: What a point that a replay begins at may be.
POINTS = "epoch, now, creation, an id that dropq made, or an ISO 8601 time"

#: AMPS keys of a queue that is hosted by a group of servers, which dropq has not.
_GROUP_LOCAL = frozenset({"initial_owner", "group_local_queue_domain"})
_NO_GROUPS = (
    "this key is of AMPS's GroupLocalQueue, which one server of a group owns; dropq has no servers,"
    " and every host that sees the root shares its queues: leave it out"
)
#: Pairs of keys of which a queue can have one only, and why.
_FORBIDDEN = (
    ("priority", "barrier_expression", "a barrier needs the order of time alone"),
    ("target_queue_depth", "priority", "the first messages are known only when all are looked at"),
    ("target_queue_depth", "barrier_expression", "a barrier must see every message before it"),
)
#: What makes a topic a regular expression; the dot does not, it parts the levels of a topic.
_REGEX = re.compile(r"[\\^$*+?()\[\]{}|]")
#: A value that means: as if the key were not there.
_UNSET = "unset"
#: The largest count; counters travel in file names as 32-bit integers.
_MOST = 2**31 - 1
#: A count as AMPS's configurations have it.
_WRITTEN_COUNT = re.compile("([0-9]{1,10})([km]?)")
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000}


# The kinds of values. What reads one raises ValueError: with what is allowed, or bare where its kind says that.


class _Kind(NamedTuple):
    """What values a key takes: how one is read, what an error says is allowed, and how one is written."""

    read: Callable[[Any], object]
    allowed: str
    write: Callable[[Any], object] = lambda value: value


class _InParts(ValueError):
    """Raised with one sentence for each part of a value that is wrong."""


def _period(value: object) -> float:
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError from None


def _lifetime(value: object) -> float:
    seconds = _period(value)
    if seconds < 0.001:
        raise ValueError(f'at least 1ms is allowed; leave it out, or write "{_UNSET}", for no limit')
    return seconds


def _octal(value: object) -> int:
    if isinstance(value, str) and re.fullmatch("(0o)?[0-7]{3,5}", value):
        return int(value.removeprefix("0o"), 8)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError('octal digits as a string are allowed, such as "0664", or a TOML integer such as 0o664')


def _mode(value: object, *, needed: int, possible: int) -> int:
    mode = _octal(value)
    if mode & needed != needed or mode & ~possible:
        hint = f" (the number {value} is {mode:04o} in octal: write it as a string)" if value == mode else ""
        raise ValueError(f"a mode with at least {needed:04o} and within {possible & ~0o002:04o} is allowed{hint}")
    if mode & 0o002:
        raise ValueError("a mode that not everybody can write to is allowed")
    return mode


def _file_mode(value: object) -> int:
    return _mode(value, needed=0o600, possible=0o777)


def _dir_mode(value: object) -> int:
    return _mode(value, needed=0o700, possible=0o2777)


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
            raise ValueError(f"{pattern!r} cannot be ignored: a pattern is of file names, and of no message's")
    return tuple(patterns)


#: How plain names begin: with any of JMS's priorities, with an id of no time and with one of our time.
_PLAIN_STARTS = [f"{n}.{id}" for n in range(10) for id in ("0" * 16 + "-" + "0" * 10, "1789012345678901-2345678901")]


def _hides_messages(pattern: str) -> bool:
    return any(fnmatchcase(f"{start}.{kind}", pattern) for start in _PLAIN_STARTS for kind in CLASSES)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _expression(value: object) -> str:
    if not _text(value):
        raise ValueError
    return _text(value)


def _filter(value: object) -> str:
    from dropq.filters import compile_filter  # few queues have one

    return _compiled(value, compile_filter)


def _order(value: object) -> str:
    from dropq.filters import compile_expression

    return _compiled(value, compile_expression)


def _compiled(value: object, compiler: Callable[[str], object]) -> str:
    text = _expression(value)
    if not text.strip():
        raise ValueError
    try:
        compiler(text)
    except Unavailable:
        pass  # whoever sends needs no extra; who uses the filter is told
    except InvalidFilter as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    return text


def _queue_name(value: object) -> str:
    try:
        check_queue_name(_text(value))
    except InvalidName as error:
        raise ValueError(f"the name of a queue is allowed ({error})") from None
    return _text(value)


def _topic(value: object) -> str:
    topic = _text(value)
    if _REGEX.search(topic):
        try:
            re.compile(topic)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"a topic or a regular expression is allowed ({error})") from None
    else:
        for part in topic.split("."):
            _queue_name(part)
    return topic


def recovery_point(value: object) -> str:
    """Return a point that a replay may begin at, as text; a date is one too.

    Raises:
        ValueError: it is none; `POINTS` says what is allowed.
    """
    if isinstance(value, date):
        return value.isoformat()
    point = _text(value)
    if point not in ("epoch", "now", "creation") and not Name(point).generated:
        try:
            datetime.fromisoformat(point)
        except ValueError:
            raise ValueError from None
    return point


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _factor(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= 1000:
        raise ValueError
    return float(value)


def _op(value: object) -> object:
    return _OPS.read(_text(value).lower())


def _metadata(value: object) -> object:
    return _ENABLED.read("enabled" if value is True else value)


def _table(value: object) -> object:
    if not isinstance(value, Mapping):
        raise ValueError
    return value


def _counts(least: int) -> _Kind:
    def read(value: object) -> int:
        if isinstance(value, str) and (written := _WRITTEN_COUNT.fullmatch(value.strip().lower())):
            value = int(written[1]) * _THOUSANDS[written[2]]
        if type(value) is not int or not least <= value <= _MOST:
            raise ValueError
        return value

    return _Kind(read, f"a whole number from {least} to {_MOST}")


def _format(value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ValueError
    return value


def _one_of(*choices: str) -> _Kind:
    def read(value: object) -> object:
        if value not in choices:
            raise ValueError
        return value

    return _Kind(read, "one of " + ", ".join(f'"{choice}"' for choice in choices))


def _selectors(value: object) -> tuple[Selector, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    selectors: list[Selector] = []
    problems: list[str] = []
    for number, table in enumerate(value, 1):
        try:
            selectors.append(_selector(table, f"[[selector]] {number}"))
        except _InParts as error:
            problems += error.args
    if problems:
        raise _InParts(*problems)
    names = [selector.name for selector in selectors]
    if len(set(names)) < len(names):
        raise ValueError("each selector has a name of its own")
    for role in ("default", "overflow"):
        if sum(selector.role == role for selector in selectors) > 1:
            raise ValueError(f"one selector at most has the role {role!r}")
    return tuple(selectors)


def _selector(table: object, place: str) -> Selector:
    if not isinstance(table, Mapping):
        raise _InParts(f"{place} = {_shown(table)}: a table is allowed")
    there = {_snake(str(key)): value for key, value in table.items()}
    known = {key: _Given(there[key], key, place) for key in _kinds(Selector) if there.get(key) is not None}
    values, problems = _values(Selector, known)
    if "name" not in known:
        problems.insert(0, f"{place}: name is missing")
    for key in [key for key in there if key not in _kinds(Selector)]:
        problems.append(f"{place}: {_word(key)} is not a key of a selector{_nearest(key, _kinds(Selector))}")
    if problems:
        raise _InParts(*problems)
    selector = Selector(**values)
    if selector.to is None and selector.op != "bounce":
        needs = f"{selector.op} needs `to`, the name of a queue; only bounce goes without"
        raise _InParts(f"{place} = {_shown(there)}: {needs}")
    return selector


def _written_selectors(selectors: tuple[Selector, ...]) -> list[dict[str, object]]:
    return [asdict(selector) for selector in selectors]


_PERIOD = _Kind(_period, durations.ALLOWED, format_duration)
_LIFETIME = _Kind(_lifetime, durations.ALLOWED, format_duration)
_COUNT, _LIMIT, _DEPTH = _counts(0), _counts(1), _counts(1000)
_FORMAT = _Kind(_format, f"the number {FORMAT}")
_SWITCH = _Kind(_switch, "true or false")
_EXPRESSION = _Kind(_expression, "an expression as a string")
_FILTER, _ORDER = _Kind(_filter, _EXPRESSION.allowed), _Kind(_order, _EXPRESSION.allowed)
_QUEUE_NAME = _Kind(_queue_name, "the name of a queue")
_TOPIC = _Kind(_topic, "a topic")
_POINT = _Kind(recovery_point, POINTS)
_FACTOR = _Kind(_factor, "a number from 1 to 1000")
_OPS, _ENABLED = _one_of("move", "copy", "bounce"), _one_of("enabled")
_OP, _METADATA = _Kind(_op, _OPS.allowed), _Kind(_metadata, _ENABLED.allowed)
_PATTERNS = _Kind(_patterns, "patterns of file names, as a list of strings or one string with spaces between", list)
_FILE_MODE = _Kind(_file_mode, "a mode", "{:04o}".format)
_DIR_MODE = _Kind(_dir_mode, "a mode", "{:04o}".format)
_GROUP = _Kind(_group, "the name of a group, or its number,")
_DEFAULTS = _Kind(_table, "a table of keys of queue.toml")
_SELECTORS = _Kind(_selectors, "tables [[selector]] with name, to, op, filter, credit, role", _written_selectors)


def _key(kind: _Kind, default: Any = None) -> Any:
    """Return a field of a configuration, which takes values of a kind."""
    return field(default=default, metadata={"kind": kind})


def _kinds(config: type) -> dict[str, _Kind]:
    """Return the keys of a configuration, with their kinds."""
    return {key.name: key.metadata["kind"] for key in fields(config)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """One `[[selector]]` of a queue: which of its messages go where, and by what right."""

    name: str = _key(_Kind(_queue_name, "a name"))
    to: str | None = _key(_QUEUE_NAME)
    op: Literal["move", "copy", "bounce"] = _key(_OP, "move")
    filter: str | None = _key(_EXPRESSION)
    credit: int = _key(_LIMIT, 1)
    role: Literal["normal", "default", "overflow"] = _key(_one_of("normal", "default", "overflow"), "normal")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """What is in force for one queue. Durations are seconds; None is unset: no limit, nothing of the kind."""

    lease_period: float | None = _key(_LIFETIME)
    semantics: Literal["at-least-once", "at-most-once"] = _key(
        _one_of("at-least-once", "at-most-once"), "at-least-once"
    )
    leasing: Literal["sublet", "strict"] = _key(_one_of("sublet", "strict"), "sublet")
    max_backlog: int | None = _key(_LIMIT)
    max_per_subscription_backlog: int | None = _key(_LIMIT)
    expiration: float | None = _key(_LIFETIME)
    expiration_model: Literal["default", "queue", "earliest", "latest"] = _key(
        _one_of("default", "queue", "earliest", "latest"), "default"
    )
    filter: str | None = _key(_FILTER)
    fairness_model: Literal["fast", "round-robin", "proportional"] = _key(
        _one_of("fast", "round-robin", "proportional"), "fast"
    )
    max_deliveries: int = _key(_COUNT, 0)
    max_cancels: int = _key(_COUNT, 0)
    exhausted: Literal["error", "expired"] = _key(_one_of("error", "expired"), "error")
    redelivery_attempts: int = _key(_COUNT, 0)
    redelivery_delay: float = _key(_PERIOD, 1.0)
    redelivery_backoff: float = _key(_FACTOR, 2.0)
    redelivery_delay_limit: float = _key(_PERIOD, 60.0)
    priority: str | None = _key(_ORDER)
    barrier_expression: str | None = _key(_FILTER)
    target_queue_depth: int | None = _key(_DEPTH)
    deferred_ack_expiration: float = _key(_PERIOD, 86400.0)
    recovery_point: str = _key(_POINT, "epoch")
    max_unprocessed: int | None = _key(_LIMIT)
    overflow: Literal["reject", "discard", "block", "selector"] = _key(
        _one_of("reject", "discard", "block", "selector"), "reject"
    )
    history: bool = _key(_SWITCH, True)
    max_history: int | None = _key(_COUNT)
    history_age: float | None = _key(_PERIOD)
    message_type: Literal["json", "text", "binary"] = _key(_one_of("json", "text", "binary"), "json")
    underlying_topic: str | None = _key(_TOPIC)
    default_publish_target: str | None = _key(_TOPIC)
    file_backed_metadata: Literal["enabled"] = _key(_METADATA, "enabled")
    dead_letter_queue: str | None = _key(_QUEUE_NAME)
    self_destruct: bool = _key(_SWITCH, False)
    selector: tuple[Selector, ...] = _key(_SELECTORS, ())
    durability: Literal["none", "file", "full"] = _key(_one_of("none", "file", "full"), "full")
    ignore: tuple[str, ...] = _key(_PATTERNS, ("_SUCCESS", "_temporary", "*.tmp", "*.part", "*.crc"))
    file_mode: int | None = _key(_FILE_MODE)
    dir_mode: int | None = _key(_DIR_MODE)
    group: int | str | None = _key(_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootConfig:
    """What is in force for a root; `defaults` holds the raw values of `[defaults]` by snake_case key."""

    format: int = _key(_FORMAT, FORMAT)
    reply_to_style: Literal["bare", "typed"] = _key(_one_of("bare", "typed"), "bare")
    dead_letter_queue: str | None = _key(_QUEUE_NAME)
    defaults: Mapping[str, object] = field(default_factory=dict, metadata={"kind": _DEFAULTS})


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a queue: its value as one would write it (None: unset), and its file, or "default"."""

    key: str
    value: object
    source: str

    @property
    def text(self) -> str:
        """The value as TOML."""
        return _toml_value(self.value)


class _Given(NamedTuple):
    """A value as somebody gave it: how they spelt the key, and where."""

    value: object
    spelt: str
    source: str

    def problem(self, what: str, *, within: str = "") -> str:
        return f"{self.source}: {within or self.spelt} = {_shown(self.value)}: {what}"


# The public verbs.


def load_root(path: str) -> RootConfig:
    """Read dropq.toml; a missing file is all defaults.

    Raises:
        ConfigError: with every problem of the file, those of its [defaults] too.
    """
    table = _read(path)
    problems = _root_problems(table or {}, path)
    _raise(problems)
    return _root(table or {}, path)


def load_queue(name: str, root: RootConfig, root_file: str, queue_file: str) -> QueueConfig:
    """Read the configuration of one queue: queue.toml, over the root's [defaults], over what is built in.

    Args:
        name: the queue's name; where queue.toml gives one too, it must be the same.
        root: the root's configuration, with its [defaults].
        root_file: where that was read; errors about a default name it.
        queue_file: the queue's queue.toml, which may be missing.

    Raises:
        ConfigError: with every problem.
    """
    given, problems = _gathered(name, root, root_file, queue_file)
    return _checked(given, problems, name=name)


def validate_options(
    options: Mapping[str, object], where: str, *, root: RootConfig | None = None, root_file: str = ""
) -> QueueConfig:
    """Check options of a queue that are yet to be written; `where` is what errors call their place.

    With the root's configuration, what it says in [defaults] is in what is returned.

    Raises:
        ConfigError: with every problem.
    """
    defaults, problems = _collect(root.defaults if root is not None else {}, root_file, name="")
    given, more = _collect(options, where, name="")
    return _checked(defaults | given, problems + more)


def explain_queue(name: str, root: RootConfig, root_file: str, queue_file: str) -> list[Setting]:
    """List every key of a queue with its value and the file it comes from; the arguments of load_queue."""
    given, problems = _gathered(name, root, root_file, queue_file)
    values = _written(_checked(given, problems, name=name))
    return [Setting(key, value, given[key].source if key in given else "default") for key, value in values.items()]


def check_file(path: str) -> list[str]:
    """Return every problem of a queue.toml or a dropq.toml, told apart by name, else by content.

    A queue.toml that lies in a root is checked as that queue: with its name and over the root's [defaults].
    """
    try:
        table = _read(path)
    except ConfigError as error:
        return str(error).split("\n")
    if table is None:
        return [f"{path}: there is no such file"]
    base = os.path.basename(path)
    if base == "dropq.toml" or (base != "queue.toml" and {_snake(key) for key in table} & _ROOT_ONLY):
        return _root_problems(table, path)
    given, problems = _collect(table, path, name=None)
    folder = os.path.dirname(os.path.abspath(path))
    root_file = os.path.join(os.path.dirname(folder), "dropq.toml")
    if base != "queue.toml" or not os.path.exists(root_file):
        return problems + _build(given)[1]
    name = os.path.basename(folder)
    try:
        given, problems = _gathered(name, load_root(root_file), root_file, path)
    except ConfigError:  # the root's own problems are told when the root's file is checked
        given, problems = _collect(table, path, name=name)
    return problems + _build(given, name=name)[1]


def toml_text(options: Mapping[str, object]) -> str:
    """Return options as the text of a queue.toml, in canonical spelling; what is None becomes "unset".

    Raises:
        ConfigError: when they are not valid, or hold text that UTF-8 cannot.
    """
    given = _collect(options, "options", name="")[0]
    values = {key: value for key, value in _written(validate_options(options, "options")).items() if key in given}
    tables: Any = values.pop("selector") if values.get("selector") else []
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    for table in tables:
        lines += ["", "[[selector]]"]
        lines += [f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None]
    text = "".join(f"{line}\n" for line in lines).lstrip("\n")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"options: {text[error.start]!r} is not allowed: it has no UTF-8") from None
    return text


# From file to table.


def _read(path: str) -> dict[str, object] | None:
    """Return the table of a TOML file, or None where there is no file."""
    try:
        # O_NONBLOCK: a fifo somebody made under this name must not hang whoever opens the queue.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: a regular file of TOML is allowed, and this is something else")
            data = file.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise ConfigError(f"{path}: it cannot be read ({reason})") from error
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: this is not UTF-8, as TOML must be") from error
    except (ValueError, RecursionError) as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else data.count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: this is not valid TOML ({error})") from error


# From table to what was given, by canonical key.


def _collect(table: Mapping[str, object], source: str, *, name: str | None) -> tuple[dict[str, _Given], list[str]]:
    """Sort a table by canonical key. `name`: what a name in it must be; None any, "" there must be none."""
    given: dict[str, _Given] = {}
    problems: list[str] = []
    default = QueueConfig()
    for spelt, value in table.items():
        key, word = _canonical(str(spelt)), _word(spelt)
        entry = _Given(value, word, source)
        if key in given:
            problems.append(f"{source}: {given[key].spelt} and {word} are the same key: give one of them")
        elif key in _GROUP_LOCAL:
            problems.append(entry.problem(_NO_GROUPS))
        elif key == "name":
            problems += _name_problems(entry, name)
            given[key] = entry
        elif key not in _QUEUE_KEYS:
            problems.append(f"{source}: {word} is not a key of a queue{_nearest(word, _QUEUE_KEYS)}")
        elif value is None or value == _UNSET:
            given[key] = _Given(getattr(default, key), word, source)
        else:
            given[key] = entry
    given.pop("name", None)
    return given, problems


def _gathered(name: str, root: RootConfig, root_file: str, queue_file: str) -> tuple[dict[str, _Given], list[str]]:
    given, problems = _collect(root.defaults, root_file, name="")
    own, own_problems = _collect(_read(queue_file) or {}, queue_file, name=name)
    return given | own, problems + own_problems


def _name_problems(entry: _Given, name: str | None) -> list[str]:
    if name == "":
        return [entry.problem("a queue's name is its folder's: leave it out")]
    if name is None:
        return [] if isinstance(entry.value, str) else [entry.problem("the name of a queue is allowed")]
    return [] if entry.value == name else [entry.problem(f"only {_shown(name)}, its folder's name, is allowed")]


# From what was given to what is in force.


def _checked(given: dict[str, _Given], problems: list[str], *, name: str | None = None) -> QueueConfig:
    config, more = _build(given, name=name)
    _raise(problems + more)
    assert config is not None
    return config


def _build(given: Mapping[str, _Given], *, name: str | None = None) -> tuple[QueueConfig | None, list[str]]:
    values, problems = _values(QueueConfig, given)
    config = QueueConfig(**values)
    good = {key: entry for key, entry in given.items() if key in values}
    problems += _conflicts(given, name) + _not_built(config, good)
    return None if problems else config, problems


def _values(config: type, given: Mapping[str, _Given]) -> tuple[dict[str, Any], list[str]]:
    """Read what was given for the keys of a configuration: the values, and the problems of those that are wrong."""
    kinds, values, problems = _kinds(config), {}, []
    for key, entry in given.items():
        try:
            values[key] = None if entry.value is None else kinds[key].read(entry.value)
        except _InParts as error:
            problems += [f"{entry.source}: {part}" for part in error.args]
        except ValueError as error:
            problems.append(entry.problem(str(error) or f"{kinds[key].allowed} is allowed"))
    return values, problems


def _written(config: QueueConfig) -> dict[str, object]:
    """Return the values of a configuration as one would write them; None is unset."""
    values = {key: getattr(config, key) for key in _kinds(QueueConfig)}
    return {key: None if values[key] is None else kind.write(values[key]) for key, kind in _kinds(QueueConfig).items()}


def _not_built(config: QueueConfig | RootConfig, given: Mapping[str, _Given]) -> list[str]:
    """Tell which valid keys ask for something that this version does not do."""
    default = type(config)()
    return [
        entry.problem(f"this is valid, but not built in this version of dropq; leave {entry.spelt} out")
        for key, entry in given.items()
        if key in NOT_BUILT and getattr(config, key) != getattr(default, key)
    ]


def _conflicts(given: Mapping[str, _Given], name: str | None) -> list[str]:
    """Tell which keys cannot stand beside each other."""
    there = {key: entry for key, entry in given.items() if entry.value is not None}
    problems = [
        f"{_both(there[one], there[other])} cannot both be set: {why}"
        for one, other, why in _FORBIDDEN
        if one in there and other in there
    ]
    if "underlying_topic" in there or "default_publish_target" in there:
        problems += _topic_conflicts(there.get("underlying_topic"), there.get("default_publish_target"))
    if "barrier_expression" in there and "semantics" in there and there["semantics"].value == "at-most-once":
        why = "a barrier is held until it is acknowledged"
        problems.append(f"{_both(there['barrier_expression'], there['semantics'])} do not fit: {why}")
    letter, overflow = there.get("dead_letter_queue"), there.get("overflow")
    if letter and letter.value == name:
        problems.append(letter.problem("a queue cannot be its own dead-letter queue; another one is allowed"))
    if overflow and overflow.value == "selector" and not _has_overflow_selector(there.get("selector")):
        problems.append(overflow.problem('it needs a [[selector]] with role = "overflow"'))
    return problems


def _topic_conflicts(topic: _Given | None, target: _Given | None) -> list[str]:
    if topic is None:
        assert target is not None
        return [target.problem("default_publish_target needs underlying_topic, of whose topics it is one")]
    regex = isinstance(topic.value, str) and _REGEX.search(topic.value)
    if target is None:
        what = "underlying_topic as a regular expression needs default_publish_target, the topic to send to"
        return [topic.problem(what)] if regex else []
    try:
        fits = re.search(str(topic.value), str(target.value)) if regex else topic.value == target.value
    except (re.error, OverflowError, RecursionError):  # told as a wrong value
        return []
    if fits:
        return []
    return [f"{_both(topic, target)} do not fit: {_shown(target.value)} is not one of {_shown(topic.value)}"]


def _has_overflow_selector(given: _Given | None) -> bool:
    tables = given.value if given is not None else ()
    if not isinstance(tables, list | tuple):
        return False
    return any(
        _snake(str(key)) == "role" and value == "overflow"
        for table in tables
        if isinstance(table, Mapping)
        for key, value in table.items()
    )


def _root_problems(table: Mapping[str, object], path: str) -> list[str]:
    given, problems = _collect_root(table, path)
    newer = given["format"].value if "format" in given else FORMAT
    if type(newer) is int and newer > FORMAT:
        return [f"{path}: format = {newer}: this dropq reads format {FORMAT}, and the root is of {newer}"]
    values, wrong = _values(RootConfig, given)
    problems += wrong or _not_built(RootConfig(**values), given)
    defaults = given["defaults"].value if "defaults" in given else {}
    if isinstance(defaults, Mapping):
        chosen, more = _collect(defaults, f"{path}: [defaults]", name="")
        problems += more + _build(chosen)[1]
    return problems


def _root(table: Mapping[str, object], path: str) -> RootConfig:
    values = _values(RootConfig, _collect_root(table, path)[0])[0]
    defaults = values.get("defaults", {})
    values["defaults"] = {_canonical(key): value for key, value in defaults.items()}
    return RootConfig(**values)


def _collect_root(table: Mapping[str, object], path: str) -> tuple[dict[str, _Given], list[str]]:
    given: dict[str, _Given] = {}
    problems: list[str] = []
    for spelt, value in table.items():
        key, word = _snake(spelt), _word(spelt)
        if key in given:
            problems.append(f"{path}: {given[key].spelt} and {word} are the same key: give one of them")
        elif key in _ROOT_KEYS:
            given[key] = _Given(value, word, path)
        elif key != "name" and key in _QUEUE_KEYS:
            problems.append(f"{path}: {word} is a key of queues: write it under [defaults]")
        else:
            problems.append(f"{path}: {word} is not a key of a root{_nearest(word, _ROOT_KEYS)}")
    return given, problems


# Words.


def _both(one: _Given, other: _Given) -> str:
    if one.source == other.source:
        return f"{one.source}: {one.spelt} and {other.spelt}"
    return f"{one.source}: {one.spelt}, and {other.source}: {other.spelt},"


def _nearest(spelt: str, known: Iterable[str]) -> str:
    """Name the nearest known key, in the spelling that was used."""
    near = difflib.get_close_matches(_snake(spelt), list(known), n=1, cutoff=0.0)[0]
    return f"; the nearest is {_camel(near) if spelt[:1].isupper() else near}"


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _snake(key: str) -> str:
    """Return the snake_case of a key: LeasePeriod is lease_period; any other spelling stays as it is."""
    if not re.fullmatch("([A-Z][a-z0-9]*)+", key):
        return key
    return re.sub("(?<!^)(?=[A-Z])", "_", key).lower()


def _canonical(key: str) -> str:
    """Return the canonical key of a queue; AMPS knows Topic as another word for Name."""
    snake = _snake(key)
    return "name" if snake == "topic" else snake


def _camel(key: str) -> str:
    return "".join(part.capitalize() for part in key.split("_"))


def _word(key: object) -> str:
    """Return a key as it is shown: one that TOML needs quotes for is quoted."""
    text = str(key)
    return text if re.fullmatch("[A-Za-z0-9_-]+", text) else _shown(text)


def _shown(value: object) -> str:
    text = _toml_value(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _toml_value(value: object) -> str:
    """Write a value as TOML; what TOML has no word for is written as Python does, for messages only."""
    if value is None:
        return f'"{_UNSET}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's. It leaves DEL bare, which TOML does not, and some breaks of lines.
        text = json.dumps(value, ensure_ascii=False)
        return re.sub("[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_word(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return str(value)


_QUEUE_KEYS = (*_kinds(QueueConfig), "name")
_ROOT_KEYS = tuple(_kinds(RootConfig))
_ROOT_ONLY = {"format", "reply_to_style", "defaults"}
