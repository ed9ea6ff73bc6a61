"""Listing a queue: the messages of each state in order of delivery, from names alone; nothing is changed or opened.

A message may move on after the listing that shows it; then the verb that acts on it raises an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
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

#: How many messages an excerpt holds against a filter at most.
DEPTH = 50_000


class ListedFiles(NamedTuple):
    """The names of message files, in order; and, if a name has no time, when its file arrived, in ms since 1970."""

    names: Sequence[str]
    arrivals: dict[str, int]


class Excerpt(NamedTuple):
    """Some messages of a state.

    Attributes:
        messages: the first of those that match.
        looked_at: how many were held against the filter, or are listed.
        matching: how many of these match.
        is_whole: whether that was all that lay there.
        total: how many lie there.
    """

    messages: list[Message]
    looked_at: int
    matching: int
    is_whole: bool
    total: int


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


def walk(
    context: QueueContext, state: str, filter: str | None = None, stop: Callable[[], bool] = lambda: False
) -> Iterator[Message]:
    """Yield the messages of a state in order of delivery, DEPTH by a listing; what comes meanwhile may be there.

    `stop` is asked at each message, also at those that do not match; True ends it.
    """
    settlement, matches = Claims(context), None if filter is None else matcher(context, filter, state)
    view = view_of(context, state, depth=DEPTH, settled=False)
    with suppress(FileNotFoundError) if state == "delayed" else nullcontext():
        view.refresh()
    while True:
        for file in view.view:
            if stop():
                return
            if not _is_reserved(context, state, file.filename) and (matches is None or matches(file)):
                yield Message(settlement, state, file)
        if not view.go_on():
            break


def named(context: QueueContext, state: str, files: Collection[str]) -> Iterator[Message]:
    """Yield the messages of a state that have these file names, by one listing."""
    wanted, folder, settlement = dict.fromkeys(files), context.layout.folder(state), Claims(context)
    with suppress(FileNotFoundError) if state == "delayed" else nullcontext():
        for chunk in reading.message_names(folder, context.config.ignore):
            for file in wanted.keys() & chunk:
                if not _is_reserved(context, state, file):
                    yield Message(settlement, state, context.sidecars.file(file, folder))


def excerpt(
    context: QueueContext,
    state: str,
    count: int,
    *,
    newest: bool = False,
    filter: str | None = None,
    letters: bool = False,
    seconds: float = math.inf,
) -> Excerpt:
    """Return the first messages of a state, in order of delivery or the newest first; touch none.

    It takes the memory of at most DEPTH names, and holds at most so many messages against the filter.

    Args:
        letters: only dead letters match.
        seconds: after which no more messages are held against the filter.
    """
    settlement, matches = Claims(context), None if filter is None else matcher(context, filter, state)
    depth = DEPTH if matches or letters else count
    found, looked_at, matching, is_whole, total = list[Message](), 0, 0, True, -1
    with context.error_context("nothing was changed"):
        if newest:
            files, total = _newest(context, state, depth + 1)
        else:
            files = _listed_by(context, state, TargetView.files, depth + 1)
        until = time.monotonic() + seconds
        for file in files:
            if _is_reserved(context, state, file.filename):
                continue
            if looked_at == depth or time.monotonic() > until:
                is_whole = False
                break
            looked_at += 1
            if not (letters and names.is_letter(file.filename) is None) and (matches is None or matches(file)):
                matching += 1
                if len(found) < count:
                    found.append(Message(settlement, state, file))
    if is_whole:
        total = looked_at
    return Excerpt(found, looked_at, matching, is_whole, total if total >= 0 else count_in(context, state))


def _newest(context: QueueContext, state: str, count: int) -> tuple[Iterator[MessageFile], int]:
    """Return the messages of a state, the newest first, and how many lie there, by one listing."""
    folder, now = context.layout.folder(state), context.clock.now_ms()
    newest, total, least = list[tuple[int, str]](), 0, 0
    for chunk in reading.message_names(folder, context.config.ignore):
        total += len(chunk)
        times = names.sent_together(chunk) or [since(context, state, name, now) for name in chunk]
        newest += [one for one in zip(times, chunk, strict=True) if one[0] >= least]
        if len(newest) > 2 * count:  # a heap of so many takes three times as long
            newest.sort(reverse=True)
            del newest[count:]
            least = newest[-1][0]
    newest.sort(reverse=True)
    return (context.sidecars.file(name, folder) for _, name in newest[:count]), total


def since(context: QueueContext, state: str, file: str, now: int) -> int:
    """Return since when a message counts as waiting, in ms, or, where it does not wait, when it was sent."""
    if (known := names.since_at_a_glance(file)) is not None:
        return known
    name = MessageFile(file).name
    return name.since or name.timestamp or reading.changed_ms(f"{context.layout.folder(state)}/{file}", gone=now)


def listed(context: QueueContext, state: str = "target", filter: str | None = None) -> Iterator[MessageFile]:
    """Yield the files of a state's messages in order of delivery, by one listing."""
    matches = None if filter is None else matcher(context, filter, state)
    with context.error_context("nothing was changed"):
        for file in _listed_by(context, state, TargetView.files):
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


def details_of(message: Message) -> dict[str, object]:
    """Return everything about a message that is there, by the names of its attributes."""
    return {
        "id": message.id,
        "queue": message.queue.name,
        "state": message.state,
        "priority": message.priority,
        "message_class": message.message_class,
        "type": message.type,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "timestamp": message.timestamp,
        "expiration": message.expiration,
        "not_before": message.not_before,
        "since": message.since,
        "properties": message.properties,
        "filename": message.filename,
        "delivery_count": message.delivery_count,
        "redelivered": message.redelivered,
        "cancels": message.cancels,
        "deaths": message.deaths,
        "records": message.record_count,
        "from": message.first_record,
        "record": message.record_number,
        "owner": message.owner,
        "deadline": message.deadline,
        "receipt": message.receipt or (message.file if message.owner else None),
        "reason": message.reason,
        "origin": message.origin,
        "dead_letter_reason": message.dead_letter_reason,
        "bytes": message.size(),
        "path": message.path,
    }


def find_all(context: QueueContext, message_id: str, states: Iterable[str] = STATES) -> list[Message]:
    """Return the messages of an id in the first of the states that has any, in order of delivery; else NoSuchMessage.

    `message_id` may be an id, which several messages may have, a file name or a receipt.
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
        in_order = [file for file in _listed_by(context, state, TargetView.files) if file.filename in found]
        return in_order or list(found.values())  # RACE: all of them moved on since the listing
    return list(found.values())


def _listed_by(
    context: QueueContext, state: str, list_view: Callable[[TargetView], Iterator[T]], depth: int | None = None
) -> Iterator[T]:
    try:
        return list_view(view_of(context, state, depth=depth, settled=False))
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
    return {state: count_in(context, state) for state in ALL_STATES}


def count_in(context: QueueContext, state: str) -> int:
    """Return how many messages lie in a state, by one listing."""
    count = sum(reading.message_counts(context.layout.folder(state), context.config.ignore))
    return count + sum(1 for _ in committed_files(context)) if state == "processing" else count


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
