"""What a sweep of a root does with queues whose maker, remover or requester died.

An undecided deletion is undone, as a send may have returned just before it; a decided one is finished. A temporary
queue `temp-ID`, in which a requester gets its answer, goes when nobody holds it any more.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress

from dropq.errors import DropqError
from dropq.format import names
from dropq.format.addresses import layouts, topic_layout
from dropq.format.layout import UNSETTLED, QueueLayout
from dropq.lifecycle import ages, ephemeral, folders
from dropq.lifecycle.context import RootContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.queue_notes import UNDECIDED, cut, layout_in_deletion, topics, whole_name
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

_TEMPORARY = re.compile(r"\.(?P<name>temp-[^.]+)\.(?P<why>creating|deleted)-[0-9a-f-]+")


def tidy(root: RootContext) -> Iterator[int]:
    """Undo, finish or remove what dead processes left; yield for each name how many temporary queues went, 0 or 1.

    A failure is logged, and the next sweep tries again.
    """
    entries = list(reading.entries(root.layout.path))
    for topic in topics(root.layout):
        with suppress(PermissionError):  # another user's, whose sweep does it
            entries += (entry for entry in reading.entries(topic_layout(root.layout.path, topic).home))
    for entry in entries:
        if not entry.name.startswith((".", names.TEMPORARY)) or entry.is_symlink():
            continue
        try:
            yield _tidied(root, entry)
        except (OSError, DropqError) as error:
            log.warning("%s: a queue was left half made or half removed, and stays so: %s", entry.path, describe(error))


def _tidied(root: RootContext, entry: os.DirEntry[str]) -> int:
    if os.path.dirname(entry.path) == root.layout.path and names.is_temporary(entry.name):
        return sum(remove_left(root, layout) for layout in layouts(root.layout.path, entry.name))
    found = decide(root, entry.path)
    if not found.allowed:
        return 0
    if found.why == "undecided":
        _undo(root, entry.path)
    elif found.why == "decided":
        _finish(root, entry.path)
    else:
        folders.remove(entry.path, Storage())
    return found.why == "temporary"


def decide(root: RootContext, path: str) -> Decision:
    """Return whether a sweep acts on the name of a queue that is being made or deleted, and why.

    If a deletion is `undecided`, a sweep gives the queue its name back. It removes what is left of a `temporary` queue.
    It also removes the rest of a queue whose deletion is `decided`, unless that may have messages, which `fsck`
    reports. A sweep leaves other names alone.
    """
    name, now, of_root = os.path.basename(path), root.clock.now_ms(), os.path.dirname(path) == root.layout.path
    if of_root and (found := _TEMPORARY.fullmatch(name)) and names.is_temporary(found["name"]):
        # RACE: a requester that was stopped for a minute as it made its queue finds it gone: it has sent nothing yet.
        is_young = found["why"] == "creating" and now - reading.changed_ms(path, gone=now) < ages.DEAD_MAKER
        return Decision(not is_young, "temporary")
    if found := UNDECIDED.fullmatch(name):
        return Decision(now - int(found["since"]) >= ages.DEAD_MAKER, "undecided")
    if of_root and (found := folders.DECIDED.fullmatch(name)):
        either = QueueLayout.flat(path), QueueLayout.incoming(path)
        is_full = any(reading.exists(each.folders[state]) for each in either for state in UNSETTLED)
        return Decision(not is_full and now - int(found["since"]) >= ages.DEAD_MAKER, "decided")
    return Decision(False, "none")


def _undo(root: RootContext, path: str) -> None:
    """Give a queue its name back; it gets another where a new queue has that."""
    found = UNDECIDED.fullmatch(os.path.basename(path))
    assert found is not None
    layout, above, store = layout_in_deletion(path), os.path.dirname(path), private_store(path)
    name = whole_name(layout, found["name"])
    home = f"{above}/{name}" if above == root.layout.path else f"{above}/.{name}"
    if above == root.layout.path and reading.exists(home):
        # RACE: a queue of its name was made meanwhile. What waits in this one is not lost with it.
        folders.restore(layout, kept := f"{above}/{cut(name)}.deleted-{found['since']}", store)
        log.warning("%s: its delete was cut short, and a new queue has its name", kept)
    else:
        folders.restore(layout, home, store)
        log.warning("queue %s: its delete was cut short, and is undone", name)


def _finish(root: RootContext, path: str) -> None:
    found, layout = folders.DECIDED.fullmatch(os.path.basename(path)), layout_in_deletion(path)
    assert found is not None
    base = layout.moved(f"{root.layout.path}/{found['name']}").base
    folders.clear(root.layout, base, layout, Storage(lenient=True))


def remove(root: RootContext, name: str) -> None:
    """Remove a temporary queue with all that is in it; do nothing if it is gone."""
    if away := _begun(root, name):
        folders.remove(away, Storage())


def _begun(root: RootContext, name: str) -> str:
    """Take a temporary queue's name away; return where the queue is, "" if it was gone."""
    home = f"{root.layout.path}/{name}"
    _, away = folders.deletion_names(root, QueueLayout.flat(home), name)
    try:
        Storage().rename_folder(home, away)
    except FileNotFoundError:
        return ""  # RACE: its requester and a sweep remove it at the same moment; the first rename decides
    return away


def remove_left(root: RootContext, layout: QueueLayout, older_than: float | None = None) -> bool:
    """Remove a temporary queue whose holder is gone, as `ephemeral.left` says; return False for any other queue."""
    name = os.path.basename(layout.home)
    if not names.is_temporary(name):
        return False
    with ephemeral.left(layout, root.clock, older_than) as is_left:
        away = _begun(root, name) if is_left else ""
    if away:
        folders.remove(away, Storage())  # after the lock: NFS keeps a file that is open here
        log.info("queue %s: its holder is gone, and so is the queue", name)
    return bool(away)


def private_store(root: str) -> Storage:
    """Return a storage for a root's private files: every user who may write in the root may write in them."""
    mode = os.stat(root).st_mode & 0o2775
    return Storage(file_mode=mode & 0o664, dir_mode=mode, lenient=True)
