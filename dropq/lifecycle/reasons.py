"""Why a message is in error/ or expired/: a small file beside the state folders, never in the message.

A reason is written before the message moves, and contains the message's name and inode. A crash between the two steps
leaves a reason that matches no file and is ignored. An inode of null matches any file of the name, for a root that is
kept as a copy (in git, say), since copies have other inodes. In a root that was copied as it was, a sweep rewrites a
reason with the copy's inode, if the name is unique because dropq made its id or its mark.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

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
        """Return the path of a file's reason; with an inode of None, of a reason for any file of the name."""
        return f"{self.folder}/{state}/{_file(name, inode)}"

    def record(self, state: str, name: str, inode: int, fields: Mapping[str, object]) -> None:
        """Write why a file is about to move to a state, under a name."""
        path = self.path(state, name, inode)
        self._storage.make_folder(os.path.dirname(path))
        content = {**fields, "name": name, "inode": inode}
        self._storage.write_small(path, json.dumps(content).encode())

    def adopt(self, path: str, state: str, name: str, inode: int) -> None:
        """Make a file the reason of another one, which it names; do nothing if it is missing. It is not synced."""
        goal = self.path(state, name, inode)
        self._storage.make_folder(os.path.dirname(goal))
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            self._storage.rename(path, goal)

    def copy(self, state: str, name: str, to: str, inode: int) -> bool:
        """Write the reason of a file also for another name, which it is about to get; return False if it has none."""
        content = self.find(state, name, inode)
        if content:
            self.record(state, to, inode, {key: content[key] for key in content if key not in ("name", "inode")})
        return bool(content)

    def find(self, state: str, name: str, inode: int) -> dict[str, object] | None:
        """Return why a file is in a state; None if there is no reason, or none that can be read."""
        for wanted in (inode, None):
            content = _content(self.path(state, name, wanted))
            if content and (content.get("name"), content.get("inode")) == (name, wanted):
                return content
        return None

    def unmatched(self, state: str) -> Iterator[str | None]:
        """Yield the paths of reasons that match no file by name and inode, and None for each file looked at meanwhile.

        If a file has no reason, the unmatched reasons are opened, and those of a copied root are refiled, not yielded.

        RACE: a reason is written before its file arrives. So reasons are listed first, and the file of a young reason
        may still arrive.
        """
        unmatched = set[str]()
        for entry in entries(f"{self.folder}/{state}"):
            unmatched.add(entry.name)
            yield None
        if not unmatched:
            return
        unexplained = False
        try:
            with listing(f"{_base(self.folder)}/{state}") as files:
                for entry in files:
                    own = {_file(entry.name, entry.inode())}
                    if not own & unmatched:
                        own = {_file(entry.name, None)}
                        unexplained |= not own & unmatched
                    unmatched -= own
                    yield None
        except FileNotFoundError:
            return  # a state folder that is missing proves nothing
        for name in unmatched:
            path = f"{self.folder}/{state}/{name}"
            yield None if unexplained and self._try_to_refile(state, path) else path

    def _try_to_refile(self, state: str, path: str) -> bool:
        try:
            return self.refile(state, path)
        except OSError as error:
            log.warning("%s is not matched to its file until the next sweep: %s", path, describe(error))
            return True

    def refile(self, state: str, path: str) -> bool:
        """Rewrite a reason with the inode that its file has now; return False if it is about no file that is there.

        A crash in between leaves two reasons of the same content.
        """
        content = _content(path)
        folder = f"{_base(self.folder)}/{state}"
        if content is None or not explains(folder, content):
            return False
        name = str(content["name"])
        try:
            number = inode(f"{folder}/{name}")
        except FileNotFoundError:
            return False  # RACE: its file went after the look
        if content.get("inode") in (None, number):
            return True  # it is of a kept copy; or a listing here shows other inodes than the files have
        if exists(self.path(state, name, number)):
            return False  # the file has another reason
        self.record(state, name, number, {key: content[key] for key in content if key not in ("name", "inode")})
        self._storage.unlink(path)
        return True

    def drop(self, state: str, name: str, inode: int) -> None:
        """Remove a file's reason; if that fails, it matches nothing any more, and a sweep collects it."""
        path = self.path(state, name, inode)
        try:
            self._storage.unlink(path if exists(path) else self.path(state, name, None))
        except OSError as error:
            log.warning("%s explains nothing any more, and stays until a sweep clears it: %s", path, describe(error))


def explains(folder: str, reason: Mapping[str, object]) -> bool:
    """Return whether a reason is about a file that is in a folder."""
    name = reason.get("name")
    if not isinstance(name, str) or os.path.basename(name) != name:
        return False
    try:
        return reason.get("inode") in (None, inode(f"{folder}/{name}")) or names.is_unique(name)
    except (OSError, ValueError):
        return False


def _file(name: str, inode: int | None) -> str:
    """Return the file name of a file's reason."""
    digest = hashlib.sha256(f"{'' if inode is None else inode}/".encode() + os.fsencode(name)).hexdigest()[:32]
    return f"{digest}.json"


def _base(folder: str) -> str:
    """Return the folder that contains the state folders: two above a queue's reasons."""
    return os.path.dirname(os.path.dirname(folder))


def _content(path: str) -> dict[str, object] | None:
    """Return what a reason says; None if it is missing, or damaged by hand, which fsck reports."""
    try:
        content = parse_json(read_small(path) or b"null")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
