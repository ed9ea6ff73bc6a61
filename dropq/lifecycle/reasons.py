"""Why a message lies in error/ or expired/: a small file beside the state folders, never in the message.

A reason is written before the message moves and holds the name and inode it is about, so that a crash between the
two leaves a reason that matches nothing and is ignored. An inode of null, in the reasons of a root that is kept as a
copy (in git, say), fits any file of the name: copies get inodes of their own. In a root that was copied as it was, a
sweep files the reason by the copy's inode, where the name is unique, because dropq made its id or its mark.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping

from dropq.format import names
from dropq.storage.failures import describe
from dropq.storage.files import Storage
from dropq.storage.reading import entries, exists, inode, listing, parse_json, read_small

log = logging.getLogger("dropq")

#: Bytes of a failed command's stderr that are kept, from its end.
STDERR_LIMIT = 8192


class Reasons:
    """The reasons of one queue, in `.dropq/reasons/STATE/DIGEST.json`."""

    def __init__(self, folder: str, storage: Storage) -> None:
        self.folder = folder
        self._storage = storage

    def path(self, state: str, name: str, inode: int | None) -> str:
        """Return where the reason of a file would lie; with None, one for any file of the name."""
        return f"{self.folder}/{state}/{_file(name, inode)}"

    def record(self, state: str, name: str, inode: int, fields: Mapping[str, object]) -> None:
        """Write why a file, about to move to a state under a name, goes there."""
        path = self.path(state, name, inode)
        self._storage.make_folder(os.path.dirname(path))
        content = {"name": name, "inode": inode, **fields}
        self._storage.write_small(path, json.dumps(content).encode())

    def find(self, state: str, name: str, inode: int) -> dict[str, object] | None:
        """Return why a file lies in a state; None when nothing, or nothing readable, is known of it."""
        for wanted in (inode, None):
            content = _content(self.path(state, name, wanted))
            if content and (content.get("name"), content.get("inode")) == (name, wanted):
                return content
        return None

    def unmatched(self, state: str) -> Iterator[str | None]:
        """Yield the reasons that are about no file by its name and inode; None on the way.

        Where a file has none, they are opened: those of a copied root are filed by its files' inodes, and not yielded.

        RACE: a reason is written before its file comes. So reasons are listed first, and young ones may yet get theirs.
        """
        left = set[str]()
        for entry in entries(f"{self.folder}/{state}"):
            left.add(entry.name)
            yield None
        if not left:
            return
        unexplained = False
        try:
            with listing(f"{_base(self.folder)}/{state}") as files:
                for entry in files:
                    own = {_file(entry.name, entry.inode())}
                    if not own & left:
                        own = {_file(entry.name, None)}
                        unexplained |= not own & left
                    left -= own
                    yield None
        except FileNotFoundError:
            return  # a state that is not there proves nothing
        for name in left:
            path = f"{self.folder}/{state}/{name}"
            yield None if unexplained and self._is_filed(state, path) else path

    def _is_filed(self, state: str, path: str) -> bool:
        try:
            return self.refile(state, path)
        except OSError as error:
            log.warning("%s is not found by its file, and stays until the next sweep: %s", path, describe(error))
            return True

    def refile(self, state: str, path: str) -> bool:
        """File a reason by the inode that its file has now; False where it is about no file that is there.

        Who dies in between leaves two reasons of one content.
        """
        content = _content(path)
        folder = f"{_base(self.folder)}/{state}"
        if content is None or not explains(folder, content):
            return False
        name = str(content["name"])
        try:
            number = inode(f"{folder}/{name}")
        except FileNotFoundError:
            return False  # RACE: its file went since
        if content.get("inode") in (None, number):
            return True  # of a copy that is kept; or a listing shows other inodes than the files have
        if exists(self.path(state, name, number)):
            return False  # the file has another reason, of its own
        self.record(state, name, number, {key: content[key] for key in content if key not in ("name", "inode")})
        self._storage.unlink(path)
        return True

    def drop(self, state: str, name: str, inode: int) -> None:
        """Forget why a file lay in a state; what cannot be removed now is void, and a sweep collects it."""
        path = self.path(state, name, inode)
        try:
            self._storage.unlink(path if exists(path) else self.path(state, name, None))
        except OSError as error:
            log.warning("%s explains nothing any more, and stays until a sweep clears it: %s", path, describe(error))


def explains(folder: str, reason: Mapping[str, object]) -> bool:
    """Tell whether a reason is about a file that lies in a folder."""
    name = reason.get("name")
    if not isinstance(name, str) or os.path.basename(name) != name:
        return False
    try:
        return reason.get("inode") in (None, inode(f"{folder}/{name}")) or names.is_unique(name)
    except (OSError, ValueError):
        return False


def _file(name: str, inode: int | None) -> str:
    """Return what the reason of a file is called."""
    digest = hashlib.sha256(f"{'' if inode is None else inode}/".encode() + os.fsencode(name)).hexdigest()[:32]
    return f"{digest}.json"


def _base(folder: str) -> str:
    """Return the folder that the state folders lie in: two above a queue's reasons."""
    return os.path.dirname(os.path.dirname(folder))


def _content(path: str) -> dict[str, object] | None:
    """Return what a reason says; None for one that is not there, or damaged by hand, which fsck reports."""
    try:
        content = parse_json(read_small(path) or b"null")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
