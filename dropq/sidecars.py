"""Metadata that does not fit a file name: immutable files in the root's `.dropq/meta/`, durable before a name refers to them.

Every name that dropq writes passes through `Sidecars.fit`, so that no name is ever longer than its budget.
"""

from __future__ import annotations

import json
import logging
import os
import secrets

from dropq import names
from dropq.names import Name
from dropq.storage import Storage, read_small

log = logging.getLogger("dropq")

#: Bytes that a name may have that refers to a sidecar: what a claim's prefix leaves of NAME_MAX.
SPILLED = 255 - names.PREFIX_LIMIT


class Sidecars:
    """The sidecars of one root.

    Args:
        folder: the root's `.dropq/meta/`; made when the first sidecar is written.
        storage: where they are written; they are durable as soon as bodies are.
        typed_replies: whether reply-to is written as DropboxMQ 1.2 writes it.
    """

    def __init__(self, folder: str, storage: Storage, *, typed_replies: bool = False) -> None:
        self.folder = folder
        self._storage = storage
        self._typed_replies = typed_replies

    def parse(self, file: str) -> Name:
        """Read a file name that has no claim prefix; never fails and never opens a file."""
        return names.parse(file, typed_replies=self._typed_replies)

    def fit(self, name: Name) -> str:
        """Return the file name for a message; what is over the budget goes to a new sidecar first."""
        text = names.file_name(name, typed_replies=self._typed_replies)
        # Counters may take a name over the budget that has spilled already: there is room for them, up to SPILLED.
        length = len(text) if text.isascii() else len(os.fsencode(text))
        if length <= (SPILLED if name.meta else names.NAME_BUDGET):
            return text
        token = secrets.token_hex(8)
        short, content = names.shorten(self.full(name), token)
        self._storage.make_folder(self.folder)
        self._storage.write_small(f"{self.folder}/{token}.json", json.dumps(content).encode())
        return names.file_name(short, typed_replies=self._typed_replies)

    def full(self, name: Name) -> Name:
        """Return a name with what its sidecar holds; a missing or damaged one is warned of and left out."""
        if not name.meta:
            return name
        path = f"{self.folder}/{os.path.basename(name.meta)}.json"
        try:
            content = json.loads(read_small(path) or b"null")
        except (OSError, ValueError) as error:
            log.warning("sidecar %s of message %s is unreadable (%s): delivered without it", path, name.id, error)
            return name
        if not isinstance(content, dict):
            log.warning("sidecar %s of message %s is missing: delivered without it", path, name.id)
            return name
        return names.restore(name, content)
