"""Reads queue.toml and dropq.toml: which value wins, which values conflict, and where each value comes from.

Invariant: no key is accepted and then ignored. A key is in force, or it is reported as unknown or wrong. All problems
of a file are reported together, each with file, key, value and what is allowed. This module writes no files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dropq.config.schema import FORMAT, UNSET, QueueConfig, RootConfig, is_expression, kinds, underlies
from dropq.errors import ConfigError, InvalidFilter, Unavailable
from dropq.format.addresses import layouts, topic_layout
from dropq.format.layout import INCOMING, SUBSCRIPTIONS, TOPIC_INCOMING, TOPIC_ROOT, QueueLayout, unsettled_config
from dropq.format.names import can_name_queue, is_temporary
from dropq.hints import nearest
from dropq.storage.reading import parse_toml, read_opened

#: The keys of a GroupLocalQueue alone.
_GROUP_LOCAL = ("initial_owner", "group_local_queue_domain")
#: The keys of a queue that several roots share, and the keys of queues that none can share.
_OF_ROOTS = ("replication_type", "transfer_after", *_GROUP_LOCAL)
_OF_ONE_ROOT = ("self_destruct", "barrier_expression")
_NO_SELECTORS = (
    "this is no key of queue.toml: each selector is a file of its own, selectors/NAME.toml in the queue's folder; "
    "`dropq selector add QUEUE NAME` writes it"
)
#: A line of TOML whose value is a duration without quotes: the key and the duration.
_BARE_PERIOD = re.compile(r"\s*(\S+)\s*=\s*([0-9.]+[a-zA-Z]\w*)")
_BOTH, _EXCLUDE, _ONE_ROOT = (
    "cannot both be set",
    "exclude each other",
    "such a queue belongs to one root, a LocalQueue",
)
#: Pairs of keys that a queue cannot both have, the second with any value or with these, and what errors say of them.
_FORBIDDEN = (
    ("priority", "barrier_expression", (), f"{_BOTH}: a barrier needs messages in the order of their times"),
    ("target_queue_depth", "priority", (), f"{_BOTH}: only a look at all messages shows which come first"),
    ("target_queue_depth", "barrier_expression", (), f"{_BOTH}: a barrier must see every message before it"),
    ("barrier_expression", "semantics", ("at-most-once",), f"{_EXCLUDE}: a barrier is held until it is acknowledged"),
    *((key, "replication_type", ("Queue", "GroupLocalQueue"), f"{_EXCLUDE}: {_ONE_ROOT}") for key in _OF_ONE_ROOT),
)
#: The keys that count for what is published to a topic. The others in a topic's file are the defaults of its
#: subscriptions, and so are those of `_ALSO_DEFAULTS`.
_TOPIC_KEYS = frozenset(
    (
        *("expiration", "expiration_model", "message_type", "max_unprocessed", "overflow", "history", "max_history"),
        *("history_age", "durability", "file_mode", "dir_mode", "group", "ignore", "settle_time", "recovery_point"),
        *("log", "log_age", "field_separator"),
    )
)
#: The keys that count for a topic, and are defaults of its subscriptions, too.
_ALSO_DEFAULTS = ("message_type", "field_separator", "recovery_point")
#: The keys that neither a topic nor a subscription can have, and why.
_OF_QUEUES = {
    "underlying_topic": "only a queue can be a view",
    "default_publish_target": "only a queue can be a view",
    "self_destruct": "only a queue can destroy itself; a topic and a subscription of a topic are removed by commands",
    "self_destruct_after": "only a queue can destroy itself",
    **dict.fromkeys(_OF_ROOTS, "only a queue can be shared by several roots"),
}
#: The bits of the longest integer that is shown in decimal digits; Python raises ValueError for some that are longer.
_MOST_BITS = 1024
#: The key that names where dead letters go.
_LETTERS = "dead_letter_queue"
#: Every key of queue.toml.
QUEUE_KEYS = (*kinds(QueueConfig), "name")
_ROOT_KEYS = tuple(kinds(RootConfig))
#: Keys that a dropq.toml can have and a queue.toml cannot.
_ROOT_ONLY = {"format", "reply_to_style", "defaults"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of a queue, its value as a person would write it (None if unset), and its file, or "default"."""

    key: str
    value: object
    source: str

    @property
    def text(self) -> str:
        """The value as TOML."""
        return toml_value(self.value)


class _Entry(NamedTuple):
    value: object
    spelling: str
    source: str

    def problem(self, what: str) -> str:
        return f"{self.source}: {self.spelling} = {short_toml(self.value)}: {what}"


# The public verbs.


def has_dropboxmq(root: str) -> bool:
    """Return whether a DropboxMQ 1.2 may share a root: it has its own folder there."""
    return os.path.isdir(f"{root}/dropboxmq")


def load_root(path: str) -> RootConfig:
    """Read dropq.toml, or raise ConfigError with all of its problems; if there is none, return the defaults.

    Those for replies are DropboxMQ's where it has the root.
    """
    reading = _Reading()
    config = reading.build_root(_read(path) or {}, path)
    reading.refuse()
    return config


def load_queue(name: str, root: RootConfig, root_file: str, layout: QueueLayout) -> QueueConfig:
    """Read the configuration of a queue: values of queue.toml, else of the root's [defaults], else built-in ones.

    A topic has its file beside `.incoming/`. A subscription has a file of its own, and what its topic's file says for
    subscriptions.

    Raise ConfigError, with all problems of the files; `root_file`, that of the root's configuration, is named in them.
    """
    reading = _Reading(root_file)
    return reading.config(reading.entries_of(name, root, layout))


def explain_queue(name: str, root: RootConfig, root_file: str, layout: QueueLayout) -> list[Setting]:
    """List every key of a queue with its value and the file that sets it; the arguments are those of `load_queue`."""
    reading = _Reading(root_file)
    entries = reading.entries_of(name, root, layout)
    values = _to_toml_values(reading.config(entries))
    return [Setting(key, value, entries[key].source if key in entries else "default") for key, value in values.items()]


def validate_options(
    options: Mapping[str, object],
    where: str,
    *,
    root: RootConfig | None = None,
    root_file: str = "",
    queue: str = "",
    is_queue: bool = True,
) -> QueueConfig:
    """Check options of a queue before they are written; return them, and the root's [defaults], as a configuration.

    Raise ConfigError with all problems, which call the source of the options `where`. `root_file` is where the root's
    configuration stands. The options are those of `queue`, if it has a name yet, or of a topic or a subscription.
    """
    reading = _Reading(root_file)
    entries = reading.queue_entries(root, options, where, name="", queue=queue)
    if not is_queue:
        reading.problems += _keys_of_queues({key: entry for key, entry in entries.items() if entry.source == where})
    return reading.config(entries)


def check_file(path: str) -> list[str]:
    """Return every problem of a queue.toml or a dropq.toml; a file with another name is recognised by its content.

    A queue.toml in a queue's folder is checked as that queue's: with its name, and with the root's [defaults].
    """
    try:
        return _problems_of(path)
    except ConfigError as error:  # it cannot be read; or that of a subscription's topic cannot
        return str(error).split("\n")


def _problems_of(path: str) -> list[str]:
    table = _read(path)
    if table is None:
        return [f"{path}: there is no such file"]
    base = os.path.basename(path)
    if base == "dropq.toml" or (base != "queue.toml" and {snake(key) for key in table} & _ROOT_ONLY):
        reading = _Reading()
        reading.build_root(table, path)
        return reading.problems + (_letter_problems_of_root(table, path) if base == "dropq.toml" else [])
    root_folder, name, layout = _location_of(os.path.abspath(path))
    root, root_file = RootConfig(), os.path.join(root_folder, "dropq.toml")
    reading = _Reading(root_file)
    if layout is None or not os.path.exists(root_file):
        reading.build(reading.queue_entries(None if layout is None else root, table, path, name=None))
        return reading.problems
    with suppress(ConfigError):  # a check of the root's file reports the root's problems
        root = load_root(root_file)
    entries = reading.entries_of(name, root, layout)
    if _LETTERS in entries and entries[_LETTERS].source == layout.config_file:  # else it is reported where it stands
        reading.problems += _absent(entries[_LETTERS], root_folder)
    reading.build(entries)
    return [problem.replace(layout.config_file, path) for problem in reading.problems]


def _location_of(path: str) -> tuple[str, str, QueueLayout | None]:
    """Return the folder that is the root of a queue.toml, and the queue's address and layout there, by the path."""
    folder, base = os.path.split(path)
    above, topics, below = folder.rpartition(f"/{TOPIC_ROOT}/")
    if topics:
        topic, _, name = below.partition(f"/{SUBSCRIPTIONS}/")
        address = topic.replace("/", ".") + (f"/{name}" if name else "")
        root = above
    else:
        home = os.path.dirname(folder) if os.path.basename(folder) == INCOMING else folder
        root, address = os.path.split(home)
    possible = layouts(root, address)
    return root, address, next((each for each in possible if each.config_file == f"{folder}/{base}"), None)


def toml_text(options: Mapping[str, object]) -> str:
    """Return options as the text of a queue.toml, in canonical spelling, or raise ConfigError; None becomes "unset"."""
    values = _to_toml_values(validate_options(options, "options"))
    entries = _Reading().table_entries(options, "options", name="")
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items() if key in entries)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"options: {text[error.start]!r} is not allowed: UTF-8 cannot encode it") from None
    return text


# From a file to its table.


def content_of(path: str) -> bytes | None:
    """Return the content of a configuration file; None if there is no file, ConfigError if it cannot be read."""
    try:
        # O_NONBLOCK: if this is a fifo, opening the queue must not wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return read_opened(file, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        instead = ": run this as a user who may" if isinstance(error, PermissionError) else ""
        raise ConfigError(f"{path}: it cannot be read ({reason}){instead}") from error


def _read(path: str) -> dict[str, object] | None:
    data = content_of(path)
    if data is None:
        return None
    try:
        return parse_toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: this is not UTF-8, as TOML must be") from error
    except ValueError as error:
        match = re.search(r"at line (\d+)", str(error))
        line = int(match[1]) if match else data.count(b"\n") + 1
        written = _BARE_PERIOD.match(data.decode("utf-8-sig").split("\n")[line - 1])
        hint = f'; a duration stands in quotes: {written[1]} = "{written[2]}"' if written else ""
        raise ConfigError(f"{path}: line {line}: this is not valid TOML ({error}){hint}") from error


def _read_topic(topic: str) -> dict[str, object]:
    """Return the table of the queue.toml of the topic in a folder.

    RACE: the file may be renamed to or fro between two reads, so the first path is read again.
    """
    settled = f"{topic}/queue.toml"
    tables = (_read(path) for path in (settled, unsettled_config(topic), settled))
    return next((table for table in tables if table is not None), {})


# From tables to entries, and from entries to a configuration.

#: A DropboxMQ does not look into .dropq/delayed/: returned messages wait there only if a redelivery_delay is set.
_AT_ONCE = {"redelivery_delay": _Entry(0, "redelivery_delay", "default")}


class _Reading:
    """Makes the configuration of a queue or a root from tables, by entries with canonical keys; collects problems."""

    def __init__(self, root_file: str = "") -> None:
        self._root_file = root_file
        self.problems: list[str] = []

    def entries_of(self, name: str, root: RootConfig, layout: QueueLayout) -> dict[str, _Entry]:
        """Return the entries of a queue, a topic or a subscription from its files."""
        own = _read_topic(layout.topic) if layout.is_topic else _read(layout.config_file) or {}
        if not layout.topic:
            entries = self.queue_entries(root, own, layout.config_file, name=name, queue=name)
            return (_AT_ONCE if layout.shared else {}) | entries
        defaults = self.table_entries(root.defaults, self._root_file, name="")
        entries = self.table_entries(own, layout.config_file, name=name)
        if layout.is_topic:
            self.values(QueueConfig, {key: entries[key] for key in entries.keys() - _TOPIC_KEYS})
            self.problems += _keys_of_queues(entries)
            merged = defaults | entries
            obeyed = {key: merged[key] for key in merged if key in _TOPIC_KEYS}
            if "recovery_point" not in entries:  # that of the root's defaults is for replays
                obeyed.pop("recovery_point", None)
            return obeyed | _AT_ONCE  # what a distributor gives back was given to nobody
        of_topic = self.table_entries(_read_topic(layout.topic), f"{layout.topic}/queue.toml", name=None)
        self.problems += _keys_of_queues(entries)
        if "overflow" in entries and entries["overflow"].value == "reject":
            why = 'a subscription cannot reject what was published; "block" makes the topic wait, "discard" drops it'
            self.problems.append(entries["overflow"].problem(why))
        defaults = {key: defaults[key] for key in defaults if key not in (*_OF_QUEUES, "overflow")}
        defaults["overflow"] = _Entry("block", "overflow", "default")  # if it is full, its topic waits
        inherited = {key: of_topic[key] for key in of_topic if key not in (*_TOPIC_KEYS, *_OF_QUEUES)}
        inherited |= {key: of_topic[key] for key in of_topic if key in _ALSO_DEFAULTS}
        if has_dropboxmq(os.path.dirname(self._root_file)):
            defaults = _AT_ONCE | defaults
        return self._with_letters(root, defaults | inherited | entries, entries, name)

    def queue_entries(
        self, root: RootConfig | None, table: Mapping[str, object], source: str, *, name: str | None, queue: str = ""
    ) -> dict[str, _Entry]:
        """Merge a queue's table with the root's entries for it, if there is a root.

        `name` is as for `table_entries`; `queue` is the name of the queue, "" if it has no name yet.
        """
        entries = self.table_entries(table, source, name=name)
        if root is None:
            return entries
        defaults = self.table_entries(root.defaults, self._root_file, name="")
        merged = self._with_letters(root, defaults | entries, entries, queue)
        if is_temporary(queue):
            merged = {key: entry for key, entry in merged.items() if key not in _OF_ROOTS}
        kind = merged.get("replication_type")
        if kind is not None and kind.value == "GroupLocalQueue" and root.instance is None:
            why = f"the root needs a name: set instance in {self._root_file or 'dropq.toml'}"
            self.problems.append(kind.problem(why))
        self.problems += _type_problems(merged, defaults, os.path.dirname(self._root_file))
        return merged

    def _with_letters(
        self, root: RootConfig, merged: Mapping[str, _Entry], own: Mapping[str, _Entry], queue: str
    ) -> dict[str, _Entry]:
        """Add the root's dead-letter queue where a queue names none.

        The root's dead-letter queue itself needs none: it ignores those [defaults] that need a dead-letter queue.

        `merged` has the entries of the queue, with the [defaults]; `own` those of them that are in its own file.
        """
        entries = dict(merged)
        if queue and queue in (root.dead_letter_queue, root.defaults.get(_LETTERS)):
            for key in {_LETTERS, "exhausted", "self_destruct"} - own.keys():
                entries.pop(key, None)
        elif root.dead_letter_queue is not None and (_LETTERS not in entries or entries[_LETTERS].value is None):
            entries[_LETTERS] = _Entry(root.dead_letter_queue, _LETTERS, self._root_file)
        if queue and _LETTERS in own and own[_LETTERS].value == queue:
            self.problems.append(own[_LETTERS].problem("a queue cannot be its own dead-letter queue: name another"))
        self.problems += _exhausted_problems(entries)
        return entries

    def table_entries(self, table: Mapping[str, object], source: str, *, name: str | None) -> dict[str, _Entry]:
        """Return the entries of a queue's table, by canonical key.

        A name in the table must be `name`; None allows any name, "" allows no name.
        """
        known, default = dict[str, _Entry](), QueueConfig()
        for key, entry in self._by_key(table, source).items():
            if key == "selector":
                self.problems.append(f"{source}: {entry.spelling}: {_NO_SELECTORS}")
            elif key == "name":
                self.problems += _name_problems(entry, name)
            elif key not in QUEUE_KEYS:
                self.problems.append(
                    f"{source}: {entry.spelling} is not a key of a queue{_nearest(entry.spelling, QUEUE_KEYS)}"
                )
            elif entry.value is None or entry.value == UNSET:
                known[key] = entry._replace(value=getattr(default, key))
            else:
                known[key] = entry
        return known

    def root_entries(self, table: Mapping[str, object], path: str) -> dict[str, _Entry]:
        entries = self._by_key(table, path)
        for key in [key for key in entries if key not in _ROOT_KEYS]:
            spelling = entries.pop(key).spelling
            if key != "name" and key in QUEUE_KEYS:
                self.problems.append(f"{path}: {spelling} is a key of queues: write it under [defaults]")
            else:
                self.problems.append(f"{path}: {spelling} is not a key of a root{_nearest(spelling, _ROOT_KEYS)}")
        return entries

    def _by_key(self, table: Mapping[str, object], source: str) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for name, value in table.items():
            key, spelling = snake(str(name)), _toml_key(name)
            if key == "topic":  # in AMPS, a synonym of Name
                key = "name"
            if key in entries:
                self.problems.append(
                    f"{source}: {entries[key].spelling} and {spelling} are the same key: give one of them"
                )
            else:
                entries[key] = _Entry(value, spelling, source)
        return entries

    def config(self, entries: Mapping[str, _Entry]) -> QueueConfig:
        """Return a queue's configuration, or raise ConfigError with all problems."""
        config = self.build(entries)
        self.refuse()
        return config

    def build(self, entries: Mapping[str, _Entry]) -> QueueConfig:
        """Return a queue's configuration, with the default for each wrong value."""
        values = self.values(QueueConfig, entries)
        self.problems += _conflicts(entries)
        return QueueConfig(**values)

    def build_root(self, table: Mapping[str, object], path: str) -> RootConfig:
        entries = self.root_entries(table, path)
        newer = entries["format"].value if "format" in entries else FORMAT
        if type(newer) is int and newer > FORMAT:
            why = f"this dropq reads format {FORMAT}, and the root has format {short_toml(newer)}"
            self.problems = [entries["format"].problem(why)]
            return RootConfig()
        values = self.values(RootConfig, entries)
        self.problems += _peer_problems(entries, values)
        defaults = self.table_entries(values.get("defaults", {}), f"{path}: [defaults]", name="")
        self.build(defaults)
        values["defaults"] = {key: entry.value for key, entry in defaults.items()}
        if "reply_to_style" not in values and has_dropboxmq(os.path.dirname(path)):
            values["reply_to_style"] = "typed"
        return RootConfig(**values)

    def refuse(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(self.problems))

    def values(self, config: type, entries: Mapping[str, _Entry]) -> dict[str, Any]:
        """Return the values of entries, without the wrong ones."""
        values: dict[str, Any] = {}
        for key, entry in entries.items():
            kind = kinds(config)[key]
            try:
                values[key] = None if entry.value is None else kind.read(entry.value)
            except ValueError as error:
                self.problems.append(entry.problem(str(error) or f"{kind.allowed} is allowed"))
        return values


def _exhausted_problems(entries: Mapping[str, _Entry]) -> list[str]:
    exhausted, letters = entries.get("exhausted"), entries.get(_LETTERS)
    if exhausted is None or exhausted.value != "dead-letter" or (letters is not None and letters.value is not None):
        return []
    return [exhausted.problem(f"there is no {_LETTERS}, neither of the queue nor of the root: set one")]


def _letter_problems_of_root(table: Mapping[str, object], path: str) -> list[str]:
    """Return problems with the dead-letter queues that a dropq.toml names; they do not keep a queue from opening."""
    root = _Reading().root_entries(table, path)
    of_all = root["defaults"].value if "defaults" in root else {}
    table = of_all if isinstance(of_all, Mapping) else {}
    defaults = _Reading().table_entries(table, f"{path}: [defaults]", name="")
    named = [entries[_LETTERS] for entries in (root, defaults) if _LETTERS in entries]
    absent = [problem for entry in named for problem in _absent(entry, os.path.dirname(os.path.abspath(path)))]
    return absent + _exhausted_problems({key: root[key] for key in root if key == _LETTERS} | defaults)


def _absent(letters: _Entry, root: str) -> list[str]:
    queue = letters.value
    if not isinstance(queue, str) or not can_name_queue(queue) or not os.path.exists(root):
        return []  # reported as a wrong value
    if any(os.path.isdir(layout.target) for layout in layouts(root, queue) if not layout.topic):
        return []
    return [letters.problem(f"the root has no queue of this name: `dropq create {shlex.quote(queue)}` makes it")]


def _keys_of_queues(entries: Mapping[str, _Entry]) -> list[str]:
    return [entries[key].problem(why) for key, why in _OF_QUEUES.items() if key in entries]


def _type_problems(entries: Mapping[str, _Entry], defaults: Mapping[str, _Entry], root: str) -> list[str]:
    """Return a problem for each topic of a view whose message type is not the view's."""
    view = entries.get("underlying_topic")
    if view is None or not isinstance(view.value, str) or not root:
        return []
    own, problems = _message_type(entries), []
    try:
        found = [topic for topic in _topics(root, view.value) if underlies(view.value, topic)]
    except (Unavailable, ValueError):
        return []  # reported when the view is opened, or as a wrong value
    for topic in found:
        layout = topic_layout(root, topic)
        if not os.path.isdir(layout.base):
            continue  # it is made later, with the same message_type
        with suppress(ConfigError):  # that is the topic's problem
            of_topic = _Reading().table_entries(_read_topic(layout.topic), layout.config_file, name=None)
            theirs = _message_type({**defaults, **of_topic})
            if theirs != own:
                problems.append(
                    view.problem(
                        f"the queue has message_type = {toml_value(own)}, and its topic {topic} has message_type = "
                        f"{toml_value(theirs)}: give both the same"
                    )
                )
    return problems


def _message_type(entries: Mapping[str, _Entry]) -> object:
    key = "message_type"
    values = _Reading().values(QueueConfig, {key: entries[key]} if key in entries else {})
    return values.get(key, QueueConfig().message_type)


def _topics(root: str, expression: str) -> Iterator[str]:
    if not is_expression(expression):
        yield expression
        return
    top = f"{root}/{TOPIC_ROOT}"
    for folder, below, _ in os.walk(top):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if folder != top and os.path.isdir(f"{folder}/{TOPIC_INCOMING}"):
            yield os.path.relpath(folder, top).replace("/", ".")


def _name_problems(entry: _Entry, name: str | None) -> list[str]:
    if name == "":
        return [entry.problem("a queue's name is its folder's: leave it out")]
    if name is None:
        return [] if isinstance(entry.value, str) else [entry.problem("the name of a queue is allowed")]
    return [] if entry.value == name else [entry.problem(f"only {short_toml(name)}, its folder's name, is allowed")]


def _peer_problems(entries: Mapping[str, _Entry], values: Mapping[str, Any]) -> list[str]:
    peers, instance = values.get("peer", ()), values.get("instance")
    if not peers:
        return []
    if instance is None:
        return [entries["peer"].problem("a root that has peers has a name: set instance, too")]
    names = [instance, *(peer.name for peer in peers)]
    return [
        entries["peer"].problem(f"{name} names two roots: each needs a name of its own")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]


def _to_toml_values(config: QueueConfig) -> dict[str, object]:
    """Return the values of a configuration as a person would write them; None means unset."""
    values = ((key, kind, getattr(config, key)) for key, kind in kinds(QueueConfig).items())
    return {key: None if value is None else kind.write(value) for key, kind, value in values}


def _conflicts(entries: Mapping[str, _Entry]) -> list[str]:
    """Return a problem for each pair of keys that exclude each other."""
    active = {key: entry for key, entry in entries.items() if entry.value is not None}
    problems = [
        f"{_both_entries(active[first], active[second])} {why}"
        for first, second, values, why in _FORBIDDEN
        if first in active and second in active and (not values or active[second].value in values)
        if second != "replication_type" or active[first].value is not False  # self_destruct = false excludes nothing
    ]
    problems += _root_problems(active)
    if "filter" in active and "filter_rest" in active and active["filter_rest"].value == "error":
        problems += _rest_problems(active["filter"], active["filter_rest"])
    separator, fields = active.get("field_separator"), active.get("message_type")
    if separator is not None and (fields is None or fields.value not in ("fix", "nvfix")):
        problems.append(separator.problem('only message_type = "fix" and message_type = "nvfix" have one'))
    return problems + _view_problems(active.get("underlying_topic"), active.get("default_publish_target"))


def _root_problems(active: Mapping[str, _Entry]) -> list[str]:
    kind = active.get("replication_type", _Entry(QueueConfig().replication_type, "replication_type", "default"))
    problems = []
    if kind.value == "GroupLocalQueue" and "initial_owner" not in active:
        problems.append(kind.problem("it needs initial_owner, the instance that owns what is sent to any of the roots"))
    if kind.value in ("Queue", "LocalQueue"):
        problems += [
            active[key].problem(f"only a GroupLocalQueue has this key, and the queue is a {kind.value}")
            for key in _GROUP_LOCAL
            if key in active
        ]
    return problems


def _rest_problems(filter: _Entry, rest: _Entry) -> list[str]:
    """Return a problem if a filter does not decide by the message alone, and puts aside what it does not match."""
    from dropq.filters import NOT_ITS_OWN, compile_filter

    try:
        named = sorted(compile_filter(str(filter.value)).identifiers & NOT_ITS_OWN)
    except (InvalidFilter, Unavailable):
        return []  # reported when a consumer opens the queue, or as a wrong value
    if not named:
        return []
    why = f"it may name only what stays as it is: leave {', '.join(named)} out of it, or filter_rest"
    return [filter.problem(f'with {rest.spelling} = "error" {why}')]


def _view_problems(topics: _Entry | None, target: _Entry | None) -> list[str]:
    """Return what is wrong with the topics of a view; as in AMPS, a send to a view goes to one topic."""
    if topics is None:
        return [] if target is None else [target.problem("only a view has one: set underlying_topic, too")]
    if not isinstance(topics.value, str) or not isinstance(target.value if target else "", str):
        return []  # reported as wrong values
    if target is None:
        regex = "this is a regular expression: set default_publish_target, the topic that sends to the queue go to"
        return [topics.problem(regex)] if is_expression(topics.value) else []
    try:
        if underlies(topics.value, str(target.value)):
            return []
    except (Unavailable, ValueError):
        return []  # reported when the view is opened, or as a wrong value
    return [target.problem(f"it is none of the topics that {topics.spelling} = {short_toml(topics.value)} names")]


# The texts of errors, and TOML.


def _both_entries(first: _Entry, second: _Entry) -> str:
    if first.source == second.source:
        return f"{first.source}: {first.spelling} and {second.spelling}"
    return f"{first.source}: {first.spelling}, and {second.source}: {second.spelling},"


def _nearest(spelling: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known key, in CamelCase or snake_case as the spelling is."""
    near = nearest(spelling, known, cutoff=0.0)[0]
    if spelling[:1].isupper():
        near = "".join(part.capitalize() for part in near.split("_"))
    return f"; the nearest is {near}"


def snake(key: str) -> str:
    """Return a key in CamelCase as snake_case: LeasePeriod becomes lease_period; any other spelling stays."""
    if not re.fullmatch("([A-Z][a-z0-9]*)+", key):
        return key
    return re.sub("(?<!^)(?=[A-Z])", "_", key).lower()


def _toml_key(key: object) -> str:
    text = str(key)
    return text if re.fullmatch("[A-Za-z0-9_-]+", text) else short_toml(text)


def short_toml(value: object) -> str:
    """Return a value as TOML for an error, cut off after 100 characters."""
    text = toml_value(value)
    return text if len(text) <= 100 else text[:97] + "..."


def toml_value(value: object) -> str:
    """Return a value as TOML; a value that TOML cannot hold is shown as in Python, for errors only."""
    if value is None:
        return f'"{UNSET}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON and TOML have the same escapes, but TOML also wants DEL and some line breaks escaped.
        text = json.dumps(value, ensure_ascii=False)
        return re.sub("[\x7f-\x9f\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"{value:#x}"
    return str(value)
