"""Receivers: the queues that get parts of a committed message, known by more than their paths.

A receiver may be removed, and another queue made of its name, while a part is on its way. So a receiver's key is its
folder's inode and a word of its own, and a part is renamed through a descriptor of that folder: what was removed takes
the part along, and a new queue of its name never gets it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from dropq.format import names
from dropq.format.addresses import ancestors, topic_layout
from dropq.format.layout import FOLDERS, INCOMING, PRIVATE, SUBSCRIPTIONS, RootLayout, removed_subscriptions
from dropq.lifecycle.known_queues import subscription_folders
from dropq.storage import reading
from dropq.storage.files import Storage

#: The file with a queue's word, below its folder.
CREATED = f"{PRIVATE}/created"
_WORD = re.compile(r"[0-9a-f]{16}")


class Receiver:
    """A receiver whose folder is open.

    Attributes:
        path: the folder that its target/ lies in, from the root.
        key: that folder's inode and the queue's word, `INODE-WORD`: no other queue ever has it. The word is what
            `.dropq/created` says; where that says none, the first 16 hex digits of the path's SHA-256.
        inode: the folder's inode.
        device: the device that the folder is on.

    Args:
        root: the root's path.
        path: the folder that its target/ lies in, from the root.

    Raises:
        OSError: the folder cannot be opened, or its word cannot be read.
    """

    def __init__(self, root: str, path: str) -> None:
        self._folder = os.open(f"{root}/{path}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        said = (reading.read_in(self._folder, CREATED) or b"").decode(errors="replace").strip()
        word = said if _WORD.fullmatch(said) else hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        found = os.fstat(self._folder)
        self.path = path
        self.key = f"{found.st_ino}-{word}"
        self.inode = found.st_ino
        self.device = found.st_dev

    def __del__(self) -> None:
        # Code that uses the descriptor refers to the receiver meanwhile, so that no other folder gets its number.
        if (folder := getattr(self, "_folder", None)) is not None:
            os.close(folder)

    def is_in_place(self, root: str) -> bool:
        """Return whether its path still leads to its folder."""
        try:
            return os.stat(f"{root}/{self.path}").st_ino == self.inode
        except OSError:
            return False

    def holds(self, root: RootLayout, inode: int) -> bool:
        """Return whether a file with an inode is in one of its state folders."""
        base = f"{root.path}/{self.path}"
        return any(entry.inode() == inode for state in FOLDERS for entry in reading.entries(f"{base}/{state}"))

    def take(self, source: str, name: str, storage: Storage) -> bool:
        """Rename a part into target/; return False where the file system has no rename that replaces nothing.

        Raises:
            FileExistsError: the name is taken; nothing was changed.
            FileNotFoundError: the part is gone, or target/ is.
        """
        return storage.place_in(source, self._folder, f"target/{name}")

    def take_as(self, source: str, name: str, storage: Storage) -> None:
        """Rename a part into target/ under a name that is unique by construction.

        Raises:
            FileNotFoundError: the part is gone, or target/ is.
        """
        storage.rename_in(source, self._folder, f"target/{name}")

    def sync(self, storage: Storage) -> None:
        """Make durable what came to target/."""
        storage.sync_in(self._folder, "target")


def take_each(receivers: Sequence[Receiver], at: int, parts: Sequence[str], name: str, storage: Storage) -> list[str]:
    """Rename a part into the target/ of each receiver, as `Receiver.take` does; return the parts that stay.

    Args:
        receivers: the receivers.
        at: the descriptor of the folder that the parts are in.
        parts: the part of each.
        name: the name that each gets.
        storage: renames them.
    """
    return storage.place_each(at, parts, [receiver._folder for receiver in receivers], f"target/{name}")


# -- looking for receivers -----------------------------------------------------------------------------------------


def find(root: RootLayout, topic: str, key: str) -> Receiver | None:
    """Open the receiver that has a key; return None if it is not there.

    Args:
        root: the root.
        topic: the address of the topic that it got a part from.
        key: its key.

    Raises:
        OSError: this user may not look.
    """
    inode = _inode_of(key)
    for path in _possible(root, topic):
        if _inode_at(f"{root.path}/{path}") == inode:
            with suppress(FileNotFoundError, NotADirectoryError):  # RACE: it was removed just now
                if (receiver := Receiver(root.path, path)).key == key:
                    return receiver
    return None


def is_being_removed(root: RootLayout, topic: str, key: str) -> bool:
    """Return whether a receiver that is not in its place is being removed, and its folder is still there."""
    inode = _inode_of(key)
    folders = [root.path, *(removed_subscriptions(topic_layout(root.path, each).home) for each in ancestors(topic))]
    return any(
        inode in (_inode_at(f"{folder}/{name}"), _inode_at(f"{folder}/{name}/{INCOMING}"))
        for folder in folders
        for name in reading.names_in(folder)
        if ".deleting-" in name
    )


def sync_possible(root: RootLayout, topic: str, storage: Storage) -> None:
    """Make durable what came to the target/ of any queue that may be a receiver: any program may have moved it there.

    Raises:
        OSError: a subscription cannot be synced.
    """
    for path in _subscriptions(root, topic):
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.sync(f"{root.path}/{path}/target")
    for path in _queues(root):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # most are no receivers
            storage.sync(f"{root.path}/{path}/target")


def _possible(root: RootLayout, topic: str) -> Iterator[str]:
    """Yield the folders, from the root, that may be receivers of a topic; some may be none, or not there."""
    yield from _subscriptions(root, topic)
    yield from _queues(root)


def _subscriptions(root: RootLayout, topic: str) -> Iterator[str]:
    for each in ancestors(topic):
        folder = os.path.relpath(f"{topic_layout(root.path, each).home}/{SUBSCRIPTIONS}", root.path)
        yield from (f"{folder}/{name}" for name in subscription_folders(root, each))


def _queues(root: RootLayout) -> Iterator[str]:
    for name in filter(names.can_name_queue, reading.names_in(root.path)):
        yield name
        yield f"{name}/{INCOMING}"


def _inode_of(key: str) -> int:
    return int(key.partition("-")[0])


def _inode_at(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
