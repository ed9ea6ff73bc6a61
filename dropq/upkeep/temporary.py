"""Temporary queues `temp-ID`, in which requesters get their answers: what removes them.

A requester makes one with `queues.create_temporary`, and removes it when it is done. What a requester leaves that died
is removed by any sweep of the root, and by any consumer's upkeep: the queue, when its holder's lock is free, and the
hidden folder of one that was half made or half removed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator

from dropq.errors import DropqError
from dropq.format import names
from dropq.format.addresses import layouts
from dropq.format.layout import QueueLayout
from dropq.lifecycle import ephemeral
from dropq.lifecycle.context import RootContext
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

#: Milliseconds after which a temporary queue that has no name yet counts as given up: making one takes a few.
HALF_MADE_LIMIT = 60_000

_HIDDEN = re.compile(r"\.(?P<name>temp-[^.]+)\.(?P<why>creating|deleted)-[0-9a-f-]+")


def remove(root: RootContext, name: str) -> None:
    """Remove a temporary queue with all that is in it; do nothing if it is gone."""
    _clear(_hidden(root, name))


def remove_left(root: RootContext, layout: QueueLayout, older_than: float | None = None) -> bool:
    """Remove a temporary queue whose holder is gone; return whether it was, False for any other queue.

    Args:
        root: the root.
        layout: the queue.
        older_than: as for `ephemeral.left`.
    """
    away = ""
    if not names.is_temporary(os.path.basename(layout.home)):
        return False
    with ephemeral.left(layout, root.clock, older_than) as is_left:
        if is_left:
            away = _hidden(root, os.path.basename(layout.home))
    if away:
        _clear(away)  # after the lock: NFS keeps a file that is open here
        log.info("queue %s: its holder is gone, and so is the queue", os.path.basename(layout.home))
    return bool(away)


def clear(root: RootContext) -> Iterator[int]:
    """Remove the temporary queues that dead requesters left; yield for each entry looked at how many went, 0 or 1.

    What cannot be removed now is logged, and left to the next sweep.
    """
    for entry in list(reading.entries(root.layout.path)):
        if not entry.name.startswith((names.TEMPORARY, f".{names.TEMPORARY}")) or entry.is_symlink():
            continue
        try:
            yield _clear_left(root, entry)
        except (OSError, DropqError) as error:
            log.warning("%s: a temporary queue is left, and cannot be removed: %s", entry.path, describe(error))


def _clear_left(root: RootContext, entry: os.DirEntry[str]) -> int:
    if names.is_temporary(entry.name):
        return sum(remove_left(root, layout) for layout in layouts(root.layout.path, entry.name))
    found = _HIDDEN.fullmatch(entry.name)
    if found is None or not names.is_temporary(found["name"]):
        return 0
    # RACE: a requester that was stopped for a minute while it made its queue finds it gone: it has sent nothing yet.
    if found["why"] == "creating" and root.clock.now_ms() - reading.changed_ms(entry.path) < HALF_MADE_LIMIT:
        return 0
    _clear(entry.path)
    return 1


def _hidden(root: RootContext, name: str) -> str:
    """Take a queue's name away, so that a send from now on fails; return where the queue is, "" if it was gone."""
    away = f"{root.layout.path}/.{name}.deleted-{root.clock.now_ms()}-{os.urandom(3).hex()}"
    try:
        Storage().rename_folder(f"{root.layout.path}/{name}", away)
    except FileNotFoundError:
        return ""  # RACE: its requester and a sweep remove it at the same moment; the first rename decides
    return away


def _clear(away: str) -> None:
    """Remove what was a queue, with what a send that was half-way still puts there; follow no link out of it."""
    for last in (False, False, True):
        try:
            return Storage().remove_tree(away) if away else None
        except OSError as error:
            if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
