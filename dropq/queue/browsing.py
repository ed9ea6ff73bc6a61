"""Listing a queue: the messages of each state in order of delivery, from names alone; nothing is changed or opened.

A message may move on after the listing that shows it; then the verb that acts on it raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar

from dropq.errors import NoSuchMessage
from dropq.format import names
from dropq.format.layout import ALL_STATES, SETTLED, STATES, ignoring
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import committed, committed_files
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.view import TargetView
from dropq.policies.build import view_of
from dropq.policies.matching import matcher
from dropq.queue.message import Message, utc
from dropq.storage import reading

T = TypeVar("T")


class ListedFiles(NamedTuple):
    """The names of message files, in order; and, if a name has no time, when its file arrived, in ms since 1970."""

    names: Sequence[str]
    arrivals: dict[str, int]


@dataclass(frozen=True, slots=True)
class StateStats:
    """A state's number of messages and of bytes, and the time when its oldest message was sent."""

    count: int
    bytes: int
    oldest: datetime | None


def browse(context: QueueContext, state: str = "target", filter: str | None = None) -> Iterator[Message]:
    """Yield the messages of a state in order of delivery, without touching any; InvalidFilter points at a column."""
    settlement = Claims(context)
    for file in listed(context, state, filter):
        yield Message(settlement, state, file)


def listed(context: QueueContext, state: str = "target", filter: str | None = None) -> Iterator[MessageFile]:
    """Yield the files of a state's messages in order of delivery, by one listing."""
    matches = None if filter is None else matcher(context, filter, state)
    with context.error_context("nothing was changed"):
        for file in _in_order(context, state):
            if not _is_reserved(context, state, file.filename) and (matches is None or matches(file)):
                yield file


def listed_names(context: QueueContext, state: str = "target", filter: str | None = None) -> ListedFiles:
    """Return what `listed` yields as names, which are quicker to make: most names contain their time."""
    if filter is not None:
        found: list[str | MessageFile] = list(listed(context, state, filter))
    else:
        with context.error_context("nothing was changed"):
            found = list(_listed_by(context, state, TargetView.names_or_files))
    filenames = [item if isinstance(item, str) else item.filename for item in found]
    if state in SETTLED:
        filenames = [name for name in filenames if not _is_reserved(context, state, name)]
    arrivals = {item.filename: item.arrival for item in found if not isinstance(item, str) and item.arrival}
    return ListedFiles(filenames, arrivals)


def find_all(context: QueueContext, message_id: str, states: Iterable[str] = STATES) -> list[Message]:
    """Return the messages of an id in the first of the states that has any, in order of delivery.

    Args:
        message_id: an id, which several messages may have, a file name or a receipt.

    Raises:
        NoSuchMessage: no state has such a message.
    """
    searched = tuple(states)
    settlement = Claims(context)
    for state in searched:
        if found := bearing(context, state, message_id):
            return [Message(settlement, state, file) for file in found]
    if "processing" in searched and is_committed(context, message_id):
        raise NoSuchMessage(
            f"message {message_id!r} of queue {context.name} is committed, and parts of it have not arrived: "
            f"`dropq browse {context.name} --state processing --explain` says which"
        )
    raise NoSuchMessage(f"no message {message_id!r} in queue {context.name} ({', '.join(searched)})")


def bearing(context: QueueContext, state: str, message_id: str) -> list[MessageFile]:
    """Return the files of a state with this id, or this file name, in order of delivery; read no sidecar."""
    bears, sidecars = names.bears(message_id), context.sidecars
    folder = context.layout.folder(state)
    found = {
        entry.name: sidecars.file(entry.name, folder)
        for entry in reading.entries(folder)
        if bears(entry.name)
        and not sidecars.ignored(entry.name)
        and reading.is_message_file(entry)
        and not _is_reserved(context, state, entry.name)
    }
    if len(found) > 1:
        in_order = [file for file in _in_order(context, state) if file.filename in found]
        return in_order or list(found.values())  # RACE: all of them moved on since the listing
    return list(found.values())


def _in_order(context: QueueContext, state: str) -> Iterator[MessageFile]:
    return _listed_by(context, state, TargetView.files)


def _listed_by(context: QueueContext, state: str, list_view: Callable[[TargetView], Iterator[T]]) -> Iterator[T]:
    try:
        return list_view(view_of(context, state, settled=False))
    except FileNotFoundError:
        if state != "delayed":
            raise
        return iter(())  # an older queue may lack that folder, until a message is delayed


def _is_reserved(context: QueueContext, state: str, file: str) -> bool:
    """Return whether a file only reserves a name for a move that is under way."""
    try:
        return state in SETTLED and reading.is_reservation(os.lstat(f"{context.layout.folder(state)}/{file}"))
    except FileNotFoundError:
        return False  # RACE: it moved on since the listing


def is_committed(context: QueueContext, message_id: str) -> bool:
    """Return whether a message of an id was committed, and its parts have not all arrived."""
    bears = names.bears(message_id)
    return any(bears(file.filename) for file in committed_files(context))


def counts(context: QueueContext) -> dict[str, int]:
    """Return how many messages lie in each state, by one listing of each folder.

    A message that was committed, and whose parts have not all arrived, counts as held.
    """
    count, ignore = reading.message_counts, context.config.ignore
    found = {state: sum(count(context.layout.folder(state), ignore)) for state in ALL_STATES}
    found["processing"] += sum(1 for _ in committed_files(context))
    return found


def _files_of(context: QueueContext, state: str) -> Iterator[tuple[MessageFile, str]]:
    """Yield the messages that count in a state, each with the path of its body."""
    ignored = ignoring(context.config.ignore)
    for entry in reading.looked_at(context.layout.folder(state)):
        if not ignored(entry.name) and reading.is_message_file(entry):
            yield context.sidecars.file(entry.name), entry.path
    if state == "processing":
        yield from committed(context)


def stats(context: QueueContext) -> dict[str, StateStats]:
    """Return count, bytes and oldest message of each state, from the attributes of every file."""
    return {state: _state_stats(context, state) for state in ALL_STATES}


def _state_stats(context: QueueContext, state: str) -> StateStats:
    count = size = 0
    oldest: int | None = None
    for file, path in _files_of(context, state):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue  # RACE: it moved on since the listing
        name = context.reasons.complete(state, file.filename, file.name)
        since = name.timestamp or name.since or found.st_ctime_ns // 1_000_000
        count, size = count + 1, size + found.st_size
        oldest = since if oldest is None else min(oldest, since)
    return StateStats(count, size, None if oldest is None else utc(oldest))
