"""A queue's folder appears, and goes, as a whole: by one rename from, or to, a hidden name.

    .NAME.creating-RANDOM       it is being made, and no queue yet
    .NAME.deleting-MS-RANDOM    it is removed if it proves empty; when its remover dies, a sweep gives it its name back
    .NAME.deleted-MS-RANDOM     it is being removed, whatever is in it

From the rename on, a send to it fails. A subscription goes the same way in folders of its topic, which may bring it
back, too.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from dropq.format.layout import FOLDERS, KEEPER, QueueLayout, RootLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.ephemeral import EphemeralMarker
from dropq.lifecycle.queue_notes import cut, forget
from dropq.storage.files import Storage

#: The name of a queue whose deletion is decided: it is being removed.
DECIDED = re.compile(r"\.(?P<name>.+)\.deleted-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)
#: How often a removal is tried: a send that is half-way may put one more file there.
_TRIES = 3


def new_word() -> bytes:
    """Return a random word, which no other queue has."""
    return os.urandom(8).hex().encode()


@contextmanager
def building(
    layout: QueueLayout, store: Storage, files: Mapping[str, bytes], *, is_ephemeral: bool = False
) -> Iterator[EphemeralMarker | None]:
    """Build a queue under a hidden name for a block, which renames it to its place; remove it if the block raises.

    `files` has contents by their paths in it. If it is to go with this process, the block gets its marker.
    """
    marker = None
    try:
        store.make_folder(layout.home, passing=True)
        folders = layout.first_folders[1:]
        for folder in folders:
            store.make_folder(folder, parents=False, passing=True)  # synced below, each parent once
        store.write_new(layout.created, new_word())  # its modification time is when the queue was made
        for name, content in files.items():
            path = f"{layout.base}/{name}"
            store.make_folder(os.path.dirname(path), parents=False, passing=True)
            store.write_small(path, content)
        marker = EphemeralMarker(layout, store) if is_ephemeral else None
        store.sync(*dict.fromkeys(map(os.path.dirname, folders)))
        yield marker
    except BaseException:
        if marker is not None:
            marker.end()
        with suppress(OSError):  # fsck finds what cannot be removed now
            store.remove_tree(layout.home)
        raise


def deletion_names(root: RootContext, layout: QueueLayout, name: str) -> tuple[str, str]:
    """Return the names of a queue while its deletion is undecided, and while it is being removed."""
    stem = layout.base if layout.is_topic else f"{root.layout.path}/.{cut(name)}"
    mark = f"{root.clock.now_ms()}-{os.urandom(3).hex()}"
    return f"{stem}.deleting-{mark}", f"{stem}.deleted-{mark}"


def begin_deletion(context: QueueContext, undecided: str) -> None:
    """Rename a queue to the name of an undecided deletion, which may have only a part of its own."""
    if cut(context.name) != context.name:
        context.storage.make_folder(context.layout.private)
        context.storage.write_small(context.layout.deleting, os.fsencode(context.name))
    context.storage.rename_folder(context.layout.home, undecided)


def close(folder: str, store: Storage) -> None:
    """Remove a folder that is empty but for a `.keep`: a send that is half-way into it fails."""
    store.unlink(f"{folder}/{KEEPER}")
    store.remove_folder(folder)


def restore(gone: QueueLayout, home: str, store: Storage) -> None:
    """Give a queue whose deletion is undecided its name back, and the folders that were closed."""
    there = store.at(gone.base)  # RACE: it makes nothing of a queue that another sweep brought back
    for folder in FOLDERS:
        there.make_folder(gone.folder(folder))
    store.move_folder(gone.home, home)


def clear(root: RootLayout, base: str, gone: QueueLayout, store: Storage, *, wholly: bool = False) -> None:
    """Remove a queue whose deletion is decided, and the root's notes of it.

    A link in it goes, and what that leads to stays. Its folders were at `base`. With `wholly`, it waits while files
    come; if the queue is a link, it removes the folder behind the link first.
    """
    forget(root, base, gone.private, store)
    above = os.path.dirname(gone.home)
    for folder in (gone.target, gone.delayed):
        if wholly or os.path.realpath(folder) == os.path.realpath(above) + folder.removeprefix(above):
            store.drain(folder)
    if wholly:  # RACE: a call of a send that was under way at the rename makes its file now, and goes with the queue
        store.drain(os.path.realpath(gone.home))
    remove(gone.home, store)


def remove(away: str, store: Storage) -> None:
    """Remove a folder with all files in it, also a file that a half-way send still puts there; follow no link."""
    for left in reversed(range(_TRIES)):
        try:
            return store.remove_tree(away)
        except OSError as error:
            if not left or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    return None
