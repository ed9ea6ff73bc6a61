"""Receivers: the queues that get parts of a committed message, known by more than their paths.

A receiver may be removed, and another queue made of its name, while a part is on its way. So a receiver is its folder's
inode and the random word in its `.dropq/created`, and a part is renamed through a descriptor of that folder: what was
removed takes the part along, and a new queue of its name never gets it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dropq.format.layout import PRIVATE
from dropq.storage.files import Storage
from dropq.storage.reading import read_in

#: The file with a queue's word, below its folder.
CREATED = f"{PRIVATE}/created"


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a receiver from all others.

    Attributes:
        path: the folder that its target/ lies in, from the root.
        inode: that folder's inode.
        word: the content of its `.dropq/created`; "" where it has none: then the inode alone tells.
    """

    path: str
    inode: int
    word: str

    @classmethod
    def read(cls, value: object) -> Identity | None:
        """Return what receivers.json says; None if it is damaged, or leads out of the root."""
        if not isinstance(value, Mapping):
            return None
        path, inode, word = value.get("path"), value.get("inode"), value.get("word")
        if not (isinstance(path, str) and isinstance(inode, int) and isinstance(word, str)):
            return None
        parts = path.split("/")
        return None if "\0" in path or not all(parts) or ".." in parts or "." in parts else cls(path, inode, word)

    def written(self) -> dict[str, Any]:
        """Return the identity as receivers.json has it."""
        return {"path": self.path, "inode": self.inode, "word": self.word}


class Receiver:
    """A receiver whose folder is open.

    Args:
        root: the root's path.
        path: the folder that its target/ lies in, from the root.

    Raises:
        OSError: the folder cannot be opened.
    """

    def __init__(self, root: str, path: str) -> None:
        self._folder = os.open(f"{root}/{path}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        word = (read_in(self._folder, CREATED) or b"").decode(errors="replace").strip()
        found = os.fstat(self._folder)
        self.identity = Identity(path, found.st_ino, word)
        #: The identity as receivers.json has it.
        self.written = json.dumps(self.identity.written())
        self.device = found.st_dev

    def __del__(self) -> None:
        # Whoever uses the descriptor refers to the receiver, so that no other folder gets its number meanwhile.
        if (folder := getattr(self, "_folder", None)) is not None:
            os.close(folder)

    def is_in_place(self, root: str) -> bool:
        """Return whether its path still leads to its folder."""
        try:
            return os.stat(f"{root}/{self.identity.path}").st_ino == self.identity.inode
        except OSError:
            return False

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
