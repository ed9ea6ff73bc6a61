"""Why a message lies in error/ or expired/: a small file beside the state folders, never in the message.

A reason is written before the message moves and holds the name and inode it is about, so that a crash between the
two leaves a reason that matches nothing and is ignored. An inode of null, in the reasons of a root that is kept as a
copy (in git, say), fits any file of the name: copies get inodes of their own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping

from dropq.storage import Storage, exists, inode, parse_json, read_small, told

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
        digest = hashlib.sha256(f"{'' if inode is None else inode}/".encode() + os.fsencode(name)).hexdigest()[:32]
        return f"{self.folder}/{state}/{digest}.json"

    def record(self, state: str, name: str, inode: int, fields: Mapping[str, object]) -> None:
        """Write why a file, about to move to a state under a name, goes there."""
        path = self.path(state, name, inode)
        self._storage.make_folder(os.path.dirname(path))
        content = {"name": name, "inode": inode, **fields}
        self._storage.write_small(path, json.dumps(content).encode())

    def find(self, state: str, name: str, inode: int) -> dict[str, object] | None:
        """Return why a file lies in a state; None when nothing, or nothing readable, is known of it."""
        for wanted in (inode, None):
            try:
                content = parse_json(read_small(self.path(state, name, wanted)) or b"null")
            except (OSError, ValueError):
                continue  # damaged by hand: fsck reports it, the message is as good without
            if isinstance(content, dict) and (content.get("name"), content.get("inode")) == (name, wanted):
                return content
        return None

    def drop(self, state: str, name: str, inode: int) -> None:
        """Forget why a file lay in a state; what cannot be removed now is void, and a sweep collects it."""
        path = self.path(state, name, inode)
        try:
            self._storage.unlink(path if exists(path) else self.path(state, name, None))
        except OSError as error:
            log.warning("%s explains nothing any more, and stays until a sweep clears it: %s", path, told(error))


def explains(folder: str, reason: Mapping[str, object]) -> bool:
    """Tell whether a reason is about a file that lies in a folder."""
    name = reason.get("name")
    if not isinstance(name, str) or os.path.basename(name) != name:
        return False
    try:
        return reason.get("inode") in (None, inode(f"{folder}/{name}"))
    except (OSError, ValueError):
        return False
