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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from fnmatch import fnmatchcase
from typing import Annotated, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dropq import durations
from dropq.durations import format_duration, parse_duration
from dropq.errors import ConfigError, InvalidName
from dropq.names import CLASSES, Name, check_queue_name

__all__ = [
    "FORMAT",
    "NOT_BUILT",
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
    "toml_text",
    "validate_options",
]

#: The format of a root that this version reads and writes.
FORMAT = 1

#: Keys that are validated in full, and refused when they are set to anything but their default.
NOT_BUILT = frozenset(
    {
        "barrier_expression",
        "dead_letter_queue",
        "default_publish_target",
        "deferred_ack_expiration",
        "fairness_model",
        "filter",
        "max_backlog",
        "max_unprocessed",
        "message_type",
        "overflow",
        "priority",
        "recovery_point",
        "selector",
        "self_destruct",
        "underlying_topic",
    }
)

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


# The types of values. A type's description is what an error says is allowed.


def _period(value: object) -> float:
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError(f"{durations.ALLOWED} is allowed") from None


def _lifetime(value: object) -> float | None:
    if value is None:
        return None
    seconds = _period(value)
    if seconds < 0.001:
        raise ValueError(f'at least 1ms is allowed; leave it out, or write "{_UNSET}", for no limit')
    return seconds


def _age(value: object) -> float | None:
    return None if value is None else _period(value)


def _written_period(value: float | None) -> str | None:
    return None if value is None else format_duration(value)


def _octal(value: object) -> int:
    if isinstance(value, str) and re.fullmatch("(0o)?[0-7]{3,5}", value):
        return int(value.removeprefix("0o"), 8)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError('octal digits as a string are allowed, such as "0664", or a TOML integer such as 0o664')


def _mode(value: object, *, needed: int, possible: int) -> object:
    if value is None:
        return None
    mode = _octal(value)
    if mode & needed != needed or mode & ~possible:
        hint = f" (the number {value} is {mode:04o} in octal: write it as a string)" if value == mode else ""
        raise ValueError(f"a mode with at least {needed:04o} and within {possible & ~0o002:04o} is allowed{hint}")
    if mode & 0o002:
        raise ValueError("a mode that not everybody can write to is allowed")
    return mode


def _file_mode(value: object) -> object:
    return _mode(value, needed=0o600, possible=0o777)


def _dir_mode(value: object) -> object:
    return _mode(value, needed=0o700, possible=0o2777)


def _written_mode(value: int | None) -> str | None:
    return None if value is None else f"{value:04o}"


def _group(value: object) -> object:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    known = value is None or (isinstance(value, str) and re.fullmatch(r"[^\s:,/\x00-\x1f]{1,255}", value))
    if not known and not (type(value) is int and 0 <= value < 2**32 - 1):
        raise ValueError("the name of a group, or its number, is allowed")
    return value


def _patterns(value: object) -> object:
    patterns = value.split() if isinstance(value, str) else value
    if isinstance(patterns, list | tuple):
        for pattern in patterns:
            if isinstance(pattern, str) and ("/" in pattern or _hides_messages(pattern)):
                raise ValueError(f"{pattern!r} cannot be ignored: a pattern is of file names, and of no message's")
    return patterns


#: How plain names begin: with any of JMS's priorities, with an id of no time and with one of our time.
_PLAIN_STARTS = [f"{n}.{id}" for n in range(10) for id in ("0" * 16 + "-" + "0" * 10, "1789012345678901-2345678901")]


def _hides_messages(pattern: str) -> bool:
    return any(fnmatchcase(f"{start}.{kind}", pattern) for start in _PLAIN_STARTS for kind in CLASSES)


def _queue_name(value: str | None) -> str | None:
    if value is not None:
        try:
            check_queue_name(value)
        except InvalidName as error:
            raise ValueError(f"the name of a queue is allowed ({error})") from None
    return value


def _topic(value: str | None) -> str | None:
    if value is not None and _REGEX.search(value):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"a topic or a regular expression is allowed ({error})") from None
    elif value is not None:
        for part in value.split("."):
            _queue_name(part)
    return value


_POINTS = "epoch, now, creation, an id that dropq made, or an ISO 8601 time"


def _recovery_point(value: object) -> object:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str) and value not in ("epoch", "now", "creation") and not Name(value).generated:
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{_POINTS} is allowed") from None
    return value


def _metadata(value: object) -> object:
    return "enabled" if value is True else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _selector_tables(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return tuple(
        {_snake(str(key)): item for key, item in table.items()} if isinstance(table, Mapping) else table
        for table in value
    )


def _selectors_agree(selectors: tuple[Selector, ...]) -> tuple[Selector, ...]:
    names = [selector.name for selector in selectors]
    if len(set(names)) < len(names):
        raise ValueError("each selector has a name of its own")
    for role in ("default", "overflow"):
        if sum(selector.role == role for selector in selectors) > 1:
            raise ValueError(f"one selector at most has the role {role!r}")
    return selectors


def _whole(least: int) -> str:
    return f"a whole number from {least} to {_MOST}"


_Lifetime = Annotated[
    float | None,
    BeforeValidator(_lifetime),
    PlainSerializer(_written_period, when_used="json"),
    Field(description=durations.ALLOWED),
]
_Period = Annotated[
    float,
    BeforeValidator(_period),
    PlainSerializer(_written_period, when_used="json"),
    Field(description=durations.ALLOWED),
]
_Age = Annotated[
    float | None,
    BeforeValidator(_age),
    PlainSerializer(_written_period, when_used="json"),
    Field(description=durations.ALLOWED),
]
_Count = Annotated[int, Field(strict=True, ge=0, le=_MOST, description=_whole(0))]
_Kept = Annotated[int | None, Field(strict=True, ge=0, le=_MOST, description=_whole(0))]
_Limit = Annotated[int | None, Field(strict=True, ge=1, le=_MOST, description=_whole(1))]
_Depth = Annotated[int | None, Field(strict=True, ge=1000, le=_MOST, description=_whole(1000))]
_Factor = Annotated[
    float, Field(strict=True, ge=1, le=1000, allow_inf_nan=False, description="a number from 1 to 1000")
]
_Switch = Annotated[bool, Field(strict=True, description="true or false")]
_Expression = Annotated[str | None, Field(strict=True, min_length=1, description="an expression as a string")]
_QueueName = Annotated[str | None, Field(strict=True, description="the name of a queue"), AfterValidator(_queue_name)]
_Topic = Annotated[str | None, Field(strict=True, description="a topic"), AfterValidator(_topic)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Selector(_Frozen):
    """One `[[selector]]` of a queue: which of its messages go where, and by what right."""

    name: Annotated[str, Field(strict=True, description="a name"), AfterValidator(_queue_name)]
    to: _QueueName = None
    op: Annotated[Literal["move", "copy", "bounce"], BeforeValidator(_lower)] = "move"
    filter: _Expression = None
    credit: Annotated[int, Field(strict=True, ge=1, le=_MOST, description=_whole(1))] = 1
    role: Literal["normal", "default", "overflow"] = "normal"

    @model_validator(mode="after")
    def _has_a_goal(self) -> Selector:
        if self.to is None and self.op != "bounce":
            raise ValueError(f"{self.op} needs `to`, the name of a queue; only bounce goes without")
        return self


class QueueConfig(_Frozen):
    """What is in force for one queue. Durations are seconds; None is unset: no limit, nothing of the kind."""

    lease_period: _Lifetime = None
    semantics: Literal["at-least-once", "at-most-once"] = "at-least-once"
    leasing: Literal["sublet", "strict"] = "sublet"
    max_backlog: _Limit = None
    max_per_subscription_backlog: _Limit = None
    expiration: _Lifetime = None
    expiration_model: Literal["default", "queue", "earliest", "latest"] = "default"
    filter: _Expression = None
    fairness_model: Literal["fast", "round-robin", "proportional"] = "fast"
    max_deliveries: _Count = 0
    max_cancels: _Count = 0
    exhausted: Literal["error", "expired"] = "error"
    redelivery_attempts: _Count = 0
    redelivery_delay: _Period = 0.0
    redelivery_backoff: _Factor = 1.0
    priority: _Expression = None
    barrier_expression: _Expression = None
    target_queue_depth: _Depth = None
    deferred_ack_expiration: _Period = 86400.0
    recovery_point: Annotated[
        str,
        BeforeValidator(_recovery_point),
        Field(strict=True, description=_POINTS),
    ] = "epoch"
    max_unprocessed: _Limit = None
    overflow: Literal["reject", "discard", "block", "selector"] = "reject"
    history: _Switch = True
    max_history: _Kept = None
    history_age: _Age = None
    message_type: Literal["json", "text", "binary"] = "json"
    underlying_topic: _Topic = None
    default_publish_target: _Topic = None
    file_backed_metadata: Annotated[Literal["enabled"], BeforeValidator(_metadata)] = "enabled"
    dead_letter_queue: _QueueName = None
    self_destruct: _Switch = False
    selector: Annotated[
        tuple[Selector, ...],
        BeforeValidator(_selector_tables),
        AfterValidator(_selectors_agree),
        Field(description="tables [[selector]] with name, to, op, filter, credit, role"),
    ] = ()
    durability: Literal["none", "file", "full"] = "full"
    ignore: Annotated[
        tuple[Annotated[str, Field(strict=True)], ...],
        BeforeValidator(_patterns),
        Field(description="patterns of file names, as a list of strings or one string with spaces between"),
    ] = ("_SUCCESS", "_temporary", "*.tmp", "*.part", "*.crc")
    file_mode: Annotated[int | None, BeforeValidator(_file_mode), PlainSerializer(_written_mode, when_used="json")] = (
        None
    )
    dir_mode: Annotated[int | None, BeforeValidator(_dir_mode), PlainSerializer(_written_mode, when_used="json")] = None
    group: Annotated[int | str | None, BeforeValidator(_group)] = None


class RootConfig(_Frozen):
    """What is in force for a root; `defaults` holds the raw values of `[defaults]` by snake_case key."""

    format: Annotated[int, Field(strict=True, ge=1, description=f"the number {FORMAT}")] = FORMAT
    reply_to_style: Literal["bare", "typed"] = "bare"
    dead_letter_queue: _QueueName = None
    defaults: Annotated[Mapping[str, object], Field(description="a table of keys of queue.toml")] = {}


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


@dataclass(frozen=True, slots=True)
class _Given:
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
    values = _checked(given, problems, name=name).model_dump(mode="json")
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
    values = validate_options(options, "options").model_dump(mode="json", exclude_unset=True)
    tables = values.pop("selector") if values.get("selector") else []
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
        elif key not in QueueConfig.model_fields:
            problems.append(f"{source}: {word} is not a key of a queue{_nearest(word, _QUEUE_KEYS)}")
        elif value is None or value == _UNSET:
            given[key] = _Given(QueueConfig.model_fields[key].get_default(), word, source)
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


def _build(given: dict[str, _Given], *, name: str | None = None) -> tuple[QueueConfig | None, list[str]]:
    problems: list[str] = []
    good = given
    try:
        config = QueueConfig.model_validate({key: entry.value for key, entry in given.items()})
    except ValidationError as error:
        places = list(given)
        details = sorted(error.errors(), key=lambda detail: places.index(str(detail["loc"][0])))
        problems = [_told(detail, given[str(detail["loc"][0])]) for detail in details]
        wrong = {detail["loc"][0] for detail in details}
        good = {key: entry for key, entry in given.items() if key not in wrong}
        config = QueueConfig.model_validate({key: entry.value for key, entry in good.items()})
    problems += _conflicts(given, name) + _not_built(config, good, QueueConfig.model_fields)
    return None if problems else config, problems


def _not_built(config: BaseModel, given: Mapping[str, _Given], fields: Mapping[str, FieldInfo]) -> list[str]:
    """Tell which valid keys ask for something that this version does not do."""
    return [
        entry.problem(f"this is valid, but not built in this version of dropq; leave {entry.spelt} out")
        for key, entry in given.items()
        if key in NOT_BUILT and getattr(config, key) != fields[key].get_default()
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
    try:
        config = RootConfig.model_validate({key: entry.value for key, entry in given.items()})
        problems += _not_built(config, given, RootConfig.model_fields)
    except ValidationError as error:
        problems += [_told(detail, given[str(detail["loc"][0])]) for detail in error.errors()]
    defaults = given["defaults"].value if "defaults" in given else {}
    if isinstance(defaults, Mapping):
        chosen, more = _collect(defaults, f"{path}: [defaults]", name="")
        problems += more + _build(chosen)[1]
    return problems


def _root(table: Mapping[str, object], path: str) -> RootConfig:
    values = {key: entry.value for key, entry in _collect_root(table, path)[0].items()}
    defaults = values.get("defaults", {})
    assert isinstance(defaults, Mapping)
    values["defaults"] = {_canonical(key): value for key, value in defaults.items()}
    return RootConfig.model_validate(values)


def _collect_root(table: Mapping[str, object], path: str) -> tuple[dict[str, _Given], list[str]]:
    given: dict[str, _Given] = {}
    problems: list[str] = []
    for spelt, value in table.items():
        key, word = _snake(spelt), _word(spelt)
        if key in given:
            problems.append(f"{path}: {given[key].spelt} and {word} are the same key: give one of them")
        elif key in RootConfig.model_fields:
            given[key] = _Given(value, word, path)
        elif key in QueueConfig.model_fields:
            problems.append(f"{path}: {word} is a key of queues: write it under [defaults]")
        else:
            problems.append(f"{path}: {word} is not a key of a root{_nearest(word, RootConfig.model_fields)}")
    return given, problems


# Words.


def _told(detail: ErrorDetails, given: _Given) -> str:
    """Turn one of pydantic's errors into a sentence with file, key, value and what is allowed."""
    place = detail["loc"]
    within, fields = given.spelt, QueueConfig.model_fields | RootConfig.model_fields
    key = str(place[0])
    if key == "selector" and len(place) > 1:
        within, fields = f"[[selector]] {int(place[1]) + 1}", Selector.model_fields
        key = str(place[2]) if len(place) > 2 else ""
        within += f": {_word(key)}" if key else ""
    if detail["type"] == "missing":
        return f"{given.source}: {within} is missing"
    if detail["type"] == "extra_forbidden":
        return f"{given.source}: {within} is not a key of a selector{_nearest(key, list(fields))}"
    cause = detail.get("ctx", {}).get("error")
    what = str(cause) if cause is not None else f"{_allowed(fields.get(key))} is allowed"
    return _Given(detail["input"], within, given.source).problem(what)


def _allowed(field: FieldInfo | None) -> str:
    if field is None:
        return "a table"
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(_toml_value(choice) for choice in get_args(field.annotation))
    return field.description or "something else"


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


_QUEUE_KEYS = [*QueueConfig.model_fields, "name"]
_ROOT_ONLY = {"format", "reply_to_style", "defaults"}
