"""DropboxMQs that publish while a subscription is removed: its folder stays until they are done.

Without working/ of a subscription a DropboxMQ's whole transaction fails, with what that sends to queues. So a
subscription that is removed is hidden first: dropq finds it no more, and DropboxMQ does.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress

from dropq.format.addresses import topic_layout
from dropq.format.layout import TOPIC_ROOT, UNLESS_ROUTED, QueueLayout
from dropq.lifecycle.context import RootContext
from dropq.lifecycle.queue_notes import forget, topics
from dropq.storage import reading
from dropq.storage.files import Storage

#: Seconds for which a removal waits; after that a sweep goes on with it.
PATIENCE = 1.0
#: Seconds between two listings.
RECHECK = 0.01
#: Milliseconds after which a file in working/ of a subscription is that of a process that died.
ABANDONED = 3_600_000
#: Milliseconds after which a DropboxMQ that wrote to working/ of a topic has written to those of the subscriptions.
SPREADING = 60_000


def hide(root: RootContext, layout: QueueLayout, store: Storage, *, force: bool) -> None:
    """Hide a subscription that is to be removed, by force with what its routes took, from all but DropboxMQs."""
    store.make_folder(layout.private, parents=False)
    store.write_small(layout.removed, b"" if force else UNLESS_ROUTED.encode())
    forget(root.layout, layout.base, layout.private, store)


def is_forced(layout: QueueLayout) -> bool:
    """Return whether a hidden subscription is removed with what its routes took; FileNotFoundError if it is no more."""
    if (how := reading.read_small(layout.removed)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), layout.removed)
    return how != UNLESS_ROUTED.encode()


def await_writers(root: RootContext, layout: QueueLayout) -> bool:
    """Wait a moment until no DropboxMQ is publishing to a subscription; return False if one still is.

    A file in working/ of a topic may also be a publish of dropq, which does not need the folder, and a DropboxMQ writes
    to the subscriptions just after it. So of these only the files of the first listing count.

    RACE: a DropboxMQ may begin afterwards, before the folder goes: then its publish fails, and it may publish again.
    """
    own = os.path.relpath(layout.topic, f"{root.layout.path}/{TOPIC_ROOT}").replace("/", ".")
    above = [topic_layout(root.layout.path, name).working for name in topics(root.layout, own)]
    begun = {path for folder in above for path in _written(root, folder, SPREADING)}
    give_up = time.monotonic() + PATIENCE
    while begun or any(_written(root, layout.working, ABANDONED)):
        if time.monotonic() > give_up:
            return False
        time.sleep(RECHECK)
        if begun:
            begun &= {path for folder in above for path in _written(root, folder, SPREADING)}
    return True


def _written(root: RootContext, folder: str, limit: int) -> Iterator[str]:
    """Yield the files in working/ that are written, or wait for a commit: those changed in the last `limit` ms."""
    for entry in reading.entries(folder):
        with suppress(FileNotFoundError):
            age = root.clock.now_ms() - reading.changed_ms(entry.path)
            if entry.is_file(follow_symlinks=False) and age <= limit:
                yield entry.path
