"""The hidden names under which a queue lies while it is removed: from the rename on, a send to it fails.

`.NAME.deleting-MS-RANDOM` is undecided: after a crash, a sweep of the root brings the queue back. The rename to
`.NAME.deleted-MS-RANDOM` is the decision: what has this name is to be removed.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress

from dropq.format.addresses import topic_layout
from dropq.format.layout import FOLDERS, UNSETTLED, QueueLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.known_queues import UNDECIDED, cut, forget, hidden_layout, topics, whole_name
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

DECIDED = re.compile(r"\.(?P<name>.+)\.deleted-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)
#: Milliseconds after which a delete that is undecided counts as dead.
UNDECIDED_LIMIT = 60_000


def note_name(context: QueueContext) -> None:
    """Write a queue's name into it if its hidden folder will have only a part of it."""
    if cut(context.name) != context.name:
        context.storage.make_folder(context.layout.private)
        context.storage.write_small(context.layout.deleting, os.fsencode(context.name))


def tidy_deletes(root: RootContext) -> None:
    """Undo the deletes that died before they were decided, and finish the others."""
    _undo_cut_short_deletes(root)
    _finish_deletes(root)


def _undo_cut_short_deletes(root: RootContext) -> None:
    """Bring back queues whose delete died before it was decided: a send may have returned just before it."""
    entries = list(reading.entries(root.layout.path))
    for topic in topics(root.layout):
        with suppress(PermissionError):  # another user's, whose sweep does it
            entries += reading.entries(topic_layout(root.layout.path, topic).home)
    for entry in entries:
        found = UNDECIDED.fullmatch(entry.name)
        if found is None or root.clock.now_ms() - int(found["since"]) < UNDECIDED_LIMIT or entry.is_symlink():
            continue
        layout = hidden_layout(entry.path)
        try:
            store = private_store(entry.path).at(layout.base)  # which makes nothing of a queue that is gone meanwhile
            for folder in FOLDERS:
                store.make_folder(layout.folder(folder))
            name = whole_name(layout, found["name"])
            above = os.path.dirname(entry.path)
            if above == root.layout.path and reading.exists(f"{above}/{name}"):
                # RACE: a queue of its name was made meanwhile. What waits in this one is not lost with it.
                store.move_folder(entry.path, kept := f"{above}/{cut(name)}.deleted-{found['since']}")
                log.warning("%s: its delete was cut short, and a new queue has its name", kept)
                continue
            store.move_folder(entry.path, f"{above}/{name}" if above == root.layout.path else f"{above}/.{name}")
        except OSError as error:
            why = describe(error)
            log.warning("%s: a delete was cut short, and it cannot be undone: %s", entry.path, why)
        else:
            log.warning("queue %s: its delete was cut short, and is undone", name)


def _finish_deletes(root: RootContext) -> None:
    """Remove what is left of queues whose delete was decided, and that have no messages any more."""
    for entry in list(reading.entries(root.layout.path)):
        found = DECIDED.fullmatch(entry.name)
        if found is None or root.clock.now_ms() - int(found["since"]) < UNDECIDED_LIMIT or entry.is_symlink():
            continue
        flat, incoming = QueueLayout.flat(entry.path), QueueLayout.incoming(entry.path)
        if any(reading.exists(each.folders[state]) for each in (flat, incoming) for state in UNSETTLED):
            continue  # `fsck` names it
        layout, store = hidden_layout(entry.path), private_store(root.layout.path)
        try:
            forget(root.layout, layout.moved(f"{root.layout.path}/{found['name']}").base, layout.private, store)
            store.remove_tree(entry.path)
        except OSError as error:
            log.warning("%s: this is left of a queue, and cannot be removed: %s", entry.path, describe(error))


def private_store(root: str) -> Storage:
    """Return a storage for a root's private files: every user who may write in the root may write in them."""
    mode = os.stat(root).st_mode & 0o2775
    return Storage(file_mode=mode & 0o664, dir_mode=mode, lenient=True)
