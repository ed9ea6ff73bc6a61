"""Reading queue.toml and dropq.toml: which value wins, whether the values fit together, and where each comes from.

Nothing is accepted and then ignored: a key is unknown, wrong, not built yet, or in force. Every problem of a file is
reported at once, with file, key, value and what is allowed. This module reads files and writes none.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dropq.config.schema import FORMAT, UNSET, QueueConfig, RootConfig, kinds
from dropq.errors import ConfigError

__all__ = ["Setting", "check_file", "explain_queue", "load_queue", "load_root", "toml_text", "validate_options"]

#: AMPS keys of a queue that a group of servers hosts; dropq has no servers.
_GROUP_LOCAL = frozenset({"initial_owner", "group_local_queue_domain"})
_NO_GROUPS = (
    "this key belongs to AMPS's GroupLocalQueue, which one server of a group owns; dropq has no servers,"
    " and every host that sees the root shares its queues: leave it out"
)
#: Pairs of keys that a queue cannot both have, and why.
_FORBIDDEN = (
    ("priority", "barrier_expression", "a barrier needs the order of time alone"),
    ("target_queue_depth", "priority", "the first messages are known only when all are looked at"),
    ("target_queue_depth", "barrier_expression", "a barrier must see every message before it"),
)
_QUEUE_KEYS = (*kinds(QueueConfig), "name")
_ROOT_KEYS = tuple(kinds(RootConfig))
#: Keys that tell a dropq.toml from a queue.toml.
_ROOT_ONLY = {"format", "reply_to_style", "defaults"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a queue: its value as a person would write it (None: unset), and its file, or "default"."""

    key: str
    value: object
    source: str

    @property
    def text(self) -> str:
        """The value as TOML."""
        return _toml_value(self.value)


class _Given(NamedTuple):
    """A value as it was given: the spelling of its key, and where it stands."""

    value: object
    spelt: str
    source: str

    def problem(self, what: str) -> str:
        return f"{self.source}: {self.spelt} = {_shown(self.value)}: {what}"


# The public verbs.


def load_root(path: str) -> RootConfig:
    """Read dropq.toml; a missing file is all defaults.

    Raises:
        ConfigError: the file has problems, in [defaults] or elsewhere; the error has all of them.
    """
    config, problems = _root(_read(path) or {}, path)
    _raise(problems)
    return config


def load_queue(name: str, root: RootConfig, root_file: str, queue_file: str) -> QueueConfig:
    """Read the configuration of one queue: queue.toml, over the root's [defaults], over what is built in.

    Args:
        name: the queue's name; a name in queue.toml must be the same.
        root: the root's configuration, with its [defaults].
        root_file: the file of that configuration; errors about a default name it.
        queue_file: the queue's queue.toml, which may be missing.

    Raises:
        ConfigError: the files have problems; the error has all of them.
    """
    return _checked(*_layered(root, root_file, _read(queue_file) or {}, queue_file, name=name))


def explain_queue(name: str, root: RootConfig, root_file: str, queue_file: str) -> list[Setting]:
    """List every key of a queue with its value and the file it comes from; the arguments are those of load_queue."""
    given, problems = _layered(root, root_file, _read(queue_file) or {}, queue_file, name=name)
    values = _written(_checked(given, problems))
    return [Setting(key, value, given[key].source if key in given else "default") for key, value in values.items()]


def validate_options(
    options: Mapping[str, object], where: str, *, root: RootConfig | None = None, root_file: str = ""
) -> QueueConfig:
    """Check options of a queue that are not written yet; `where` is what errors call their place.

    With the root's configuration, its [defaults] are in force in the result.

    Raises:
        ConfigError: the options have problems; the error has all of them.
    """
    return _checked(*_layered(root or RootConfig(), root_file, options, where, name=""))


def check_file(path: str) -> list[str]:
    """Return every problem of a queue.toml or a dropq.toml, which its name tells apart, else its content.

    A queue.toml that lies in a root is checked as that queue: with its name, and over the root's [defaults].
    """
    try:
        table = _read(path)
    except ConfigError as error:
        return str(error).split("\n")
    if table is None:
        return [f"{path}: there is no such file"]
    base = os.path.basename(path)
    if base == "dropq.toml" or (base != "queue.toml" and {_snake(key) for key in table} & _ROOT_ONLY):
        return _root(table, path)[1]
    folder = os.path.dirname(os.path.abspath(path))
    root, root_file, name = RootConfig(), os.path.join(os.path.dirname(folder), "dropq.toml"), None
    if base == "queue.toml" and os.path.exists(root_file):
        name = os.path.basename(folder)
        with suppress(ConfigError):  # a check of the root's file reports the root's problems
            root = load_root(root_file)
    given, problems = _layered(root, root_file, table, path, name=name)
    return problems + _built(given)[1]


def toml_text(options: Mapping[str, object]) -> str:
    """Return options as the text of a queue.toml, in canonical spelling; None becomes "unset".

    Raises:
        ConfigError: the options have problems, or hold text that UTF-8 cannot encode.
    """
    values = _written(validate_options(options, "options"))
    given = _collect(options, "options", name="")[0]
    text = "".join(f"{key} = {_toml_value(value)}\n" for key, value in values.items() if key in given)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"options: {text[error.start]!r} is not allowed: it has no UTF-8") from None
    return text


# From file to table.


def _read(path: str) -> dict[str, object] | None:
    """Return the table of a TOML file; None where there is no file."""
    try:
        # O_NONBLOCK: a fifo that somebody made under this name must not keep the opening of the queue waiting.
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


def _layered(
    root: RootConfig, root_file: str, table: Mapping[str, object], source: str, *, name: str | None
) -> tuple[dict[str, _Given], list[str]]:
    """Lay a queue's table over the root's [defaults]; `name` is that of _collect."""
    defaults, problems = _collect(root.defaults, root_file, name="")
    given, more = _collect(table, source, name=name)
    return defaults | given, problems + more


def _collect(table: Mapping[str, object], source: str, *, name: str | None) -> tuple[dict[str, _Given], list[str]]:
    """Sort the table of a queue by canonical key.

    Its name, where it has one, must be `name`; None allows any name, "" allows no name.
    """
    given, problems = _by_key(table, source)
    known: dict[str, _Given] = {}
    default = QueueConfig()
    for key, entry in given.items():
        if key in _GROUP_LOCAL:
            problems.append(entry.problem(_NO_GROUPS))
        elif key == "name":
            problems += _name_problems(entry, name)
        elif key not in _QUEUE_KEYS:
            problems.append(f"{source}: {entry.spelt} is not a key of a queue{_nearest(entry.spelt, _QUEUE_KEYS)}")
        elif entry.value is None or entry.value == UNSET:
            known[key] = entry._replace(value=getattr(default, key))
        else:
            known[key] = entry
    return known, problems


def _collect_root(table: Mapping[str, object], path: str) -> tuple[dict[str, _Given], list[str]]:
    """Sort the table of a root by canonical key, without keys that are not a root's."""
    given, problems = _by_key(table, path)
    for key in [key for key in given if key not in _ROOT_KEYS]:
        word = given.pop(key).spelt
        if key != "name" and key in _QUEUE_KEYS:
            problems.append(f"{path}: {word} is a key of queues: write it under [defaults]")
        else:
            problems.append(f"{path}: {word} is not a key of a root{_nearest(word, _ROOT_KEYS)}")
    return given, problems


def _by_key(table: Mapping[str, object], source: str) -> tuple[dict[str, _Given], list[str]]:
    """Return a table's values by canonical key, and a problem for each key that comes twice."""
    given: dict[str, _Given] = {}
    problems: list[str] = []
    for spelt, value in table.items():
        key, word = _canonical(str(spelt)), _word(spelt)
        if key in given:
            problems.append(f"{source}: {given[key].spelt} and {word} are the same key: give one of them")
        else:
            given[key] = _Given(value, word, source)
    return given, problems


def _name_problems(entry: _Given, name: str | None) -> list[str]:
    if name == "":
        return [entry.problem("a queue's name is its folder's: leave it out")]
    if name is None:
        return [] if isinstance(entry.value, str) else [entry.problem("the name of a queue is allowed")]
    return [] if entry.value == name else [entry.problem(f"only {_shown(name)}, its folder's name, is allowed")]


# From what was given to what is in force.


def _checked(given: Mapping[str, _Given], problems: list[str]) -> QueueConfig:
    config, more = _built(given)
    _raise(problems + more)
    return config


def _built(given: Mapping[str, _Given]) -> tuple[QueueConfig, list[str]]:
    """Return a queue's configuration, with the default for each value that is wrong, and the problems."""
    values, problems = _values(QueueConfig, given)
    return QueueConfig(**values), problems + _conflicts(given)


def _root(table: Mapping[str, object], path: str) -> tuple[RootConfig, list[str]]:
    """Return a root's configuration, with the default for each value that is wrong, and the problems."""
    given, problems = _collect_root(table, path)
    newer = given["format"].value if "format" in given else FORMAT
    if type(newer) is int and newer > FORMAT:
        return RootConfig(), [f"{path}: format = {newer}: this dropq reads format {FORMAT}, and the root is of {newer}"]
    values, wrong = _values(RootConfig, given)
    defaults, unknown = _collect(values.get("defaults", {}), f"{path}: [defaults]", name="")
    values["defaults"] = {key: entry.value for key, entry in defaults.items()}
    return RootConfig(**values), problems + wrong + unknown + _built(defaults)[1]


def _values(config: type, given: Mapping[str, _Given]) -> tuple[dict[str, Any], list[str]]:
    """Read what was given for the keys of a configuration; return the values, and the problems of wrong ones."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, entry in given.items():
        kind = kinds(config)[key]
        try:
            values[key] = None if entry.value is None else kind.read(entry.value)
        except ValueError as error:
            problems.append(entry.problem(str(error) or f"{kind.allowed} is allowed"))
    return values, problems


def _written(config: QueueConfig) -> dict[str, object]:
    """Return the values of a configuration as a person would write them; None is unset."""
    values = {key: getattr(config, key) for key in kinds(QueueConfig)}
    return {key: None if values[key] is None else kind.write(values[key]) for key, kind in kinds(QueueConfig).items()}


def _conflicts(given: Mapping[str, _Given]) -> list[str]:
    """Report keys that cannot stand beside each other."""
    there = {key: entry for key, entry in given.items() if entry.value is not None}
    problems = [
        f"{_both(there[first], there[second])} cannot both be set: {why}"
        for first, second, why in _FORBIDDEN
        if first in there and second in there
    ]
    if "barrier_expression" in there and "semantics" in there and there["semantics"].value == "at-most-once":
        why = "a barrier is held until it is acknowledged"
        problems.append(f"{_both(there['barrier_expression'], there['semantics'])} do not fit: {why}")
    return problems


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


# Words.


def _both(first: _Given, second: _Given) -> str:
    if first.source == second.source:
        return f"{first.source}: {first.spelt} and {second.spelt}"
    return f"{first.source}: {first.spelt}, and {second.source}: {second.spelt},"


def _nearest(spelt: str, known: Iterable[str]) -> str:
    """Name the nearest known key, in the spelling that was used."""
    near = difflib.get_close_matches(_snake(spelt), list(known), n=1, cutoff=0.0)[0]
    return f"; the nearest is {_camel(near) if spelt[:1].isupper() else near}"


def _snake(key: str) -> str:
    """Return the snake_case of a key: LeasePeriod is lease_period; any other spelling stays as it is."""
    if not re.fullmatch("([A-Z][a-z0-9]*)+", key):
        return key
    return re.sub("(?<!^)(?=[A-Z])", "_", key).lower()


def _canonical(key: str) -> str:
    """Return the canonical form of a key; AMPS knows Topic as another word for Name."""
    snake = _snake(key)
    return "name" if snake == "topic" else snake


def _camel(key: str) -> str:
    return "".join(part.capitalize() for part in key.split("_"))


def _word(key: object) -> str:
    """Return a key as errors show it: quoted where TOML needs quotes."""
    text = str(key)
    return text if re.fullmatch("[A-Za-z0-9_-]+", text) else _shown(text)


def _shown(value: object) -> str:
    text = _toml_value(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _toml_value(value: object) -> str:
    """Write a value as TOML; a value that TOML cannot hold is written as Python does, for messages only."""
    if value is None:
        return f'"{UNSET}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, too; JSON leaves DEL and some line breaks bare, which TOML does not.
        text = json.dumps(value, ensure_ascii=False)
        return re.sub("[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_word(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return str(value)
