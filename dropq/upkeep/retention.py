"""Retention: which files of a state are over a limit of age or of count, by the time they came there."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from dropq.errors import DropqError
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import Moves
from dropq.storage import reading


class Surplus(NamedTuple):
    """A file that is over a limit, and why it could not be removed; None if it was removed, or was not to be."""

    file: str
    error: OSError | DropqError | None = None


def surplus(
    context: QueueContext,
    *,
    state: str = "processed",
    keep_age: float | None = None,
    keep_count: int | None = None,
    remove: bool,
) -> Iterator[Surplus | None]:
    """Yield the files that are over a limit, oldest first; on the way there, None for each small step.

    Without an age, it counts the names, and looks at the files only if there are more than `keep_count`.

    Args:
        keep_age: seconds that files are kept; None takes the queue's history_age for processed/.
        keep_count: how many are kept; None takes the queue's max_history for processed/.
        remove: remove each file before yielding it, or yield it with the error, and go on.
    """
    if state == "processed":
        keep_age = context.config.history_age if keep_age is None else keep_age
        keep_count = context.config.max_history if keep_count is None else keep_count
    folder = context.layout.folder(state)
    count = 0
    if keep_count is not None:
        for chunk in reading.message_counts(folder, context.config.ignore):
            count += chunk
            yield None
    if keep_age is None and (keep_count is None or count <= keep_count):
        return
    counted = time.monotonic()
    found = yield from _oldest(context, folder, count, keep_age, keep_count)
    now, removed = context.clock.now_ms(), 0
    try:
        for changed, file in found:
            if keep_age is None or now - changed <= keep_age * 1000:
                if time.monotonic() - counted > context.timing.count_age:  # others may have taken some away since
                    count, counted = sum(reading.message_counts(folder, context.config.ignore)), time.monotonic()
                if count <= (keep_count or 0):
                    continue
            try:
                is_gone = not remove or _remove(context, state, file, changed)
            except (OSError, DropqError) as error:
                yield Surplus(file, error)
                continue
            count -= is_gone
            removed += remove and is_gone
            yield Surplus(file) if is_gone else None
    finally:
        if removed:
            context.log.act("pruned", count=removed, state=state)


def kept_files(context: QueueContext, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the names of the messages in a folder, with their status; not names that only wait for a move."""
    for entry in reading.entries(folder):
        if context.sidecars.ignored(entry.name) or not reading.is_message_file(entry):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # RACE: it was pruned or requeued since the listing
        if not reading.is_reservation(status):
            yield entry.name, status


class _Came(NamedTuple):
    """When a file came to its folder, in ms, and its name; the later is the lesser: a heap has its least on top."""

    changed: int
    file: str

    def __lt__(self, other: tuple[object, ...]) -> bool:
        return tuple.__gt__(self, other)


def _oldest(
    context: QueueContext, folder: str, count: int, keep_age: float | None, keep_count: int | None
) -> Generator[None, None, list[_Came]]:
    """Return the files that are over a limit, oldest first; `count` is how many files there are at most.

    Only those over a limit are kept in memory: an archive may have millions of others.
    """
    now = context.clock.now_ms()
    most = 0 if keep_count is None else max(count - keep_count, 0)
    oldest: list[_Came] = []  # a heap of the `most` files that came first, with the youngest of them on top
    too_old: list[_Came] = []  # of the others
    seen = 0

    def pass_on(youngest: _Came) -> None:
        if keep_age is not None and now - youngest.changed > keep_age * 1000:
            too_old.append(youngest)

    for file, status in kept_files(context, folder):
        yield
        seen += 1
        came = _Came(status.st_ctime_ns // 1_000_000, file)
        if len(oldest) < most:
            heapq.heappush(oldest, came)
        else:
            pass_on(heapq.heappushpop(oldest, came) if most else came)
    for _ in range(len(oldest) - max(seen - (keep_count or 0), 0)):  # some names that were counted are no messages
        pass_on(heapq.heappop(oldest))
    return sorted(chain(oldest, too_old), reverse=True)


def _remove(context: QueueContext, state: str, file: str, changed: int) -> bool:
    """Remove a file; return False if it is gone, or if another has come under its name since it was looked at."""
    path = f"{context.layout.folder(state)}/{file}"
    with suppress(FileNotFoundError):
        return reading.changed_ms(path) == changed and Moves(context).remove(state, file)
    return False
