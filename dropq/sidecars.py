"""Metadata that does not fit a file name: immutable files in `.dropq/meta/`, durable before a name refers to them.

Every name that dropq writes passes through `Sidecars.fit`, so that no name is ever longer than its budget.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterator

from dropq import names
from dropq.errors import StorageError
from dropq.layout import QueueLayout
from dropq.names import Name
from dropq.storage import (
    Clock,
    Storage,
    changed_ms,
    entries,
    is_message_file,
    parse_json,
    read_small,
    storage_error,
    telling,
    told,
)

log = logging.getLogger("dropq")

#: Bytes that a name may have that refers to a sidecar: what a claim's prefix leaves of NAME_MAX.
SPILLED = 255 - names.PREFIX_LIMIT

#: Milliseconds that a sidecar is old before it may be collected, and between the two passes that miss it.
COLLECTED_AGE = 86_400_000
PASSES_APART = 3_600_000

#: What is said of a folder, a link or a fifo: no file of ours comes there by waiting.
_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_REFERENCE = re.compile(r"JMS_dropq_metaS=([0-9A-Za-z_-]+)")


class Sidecars:
    """The sidecars of one root.

    Args:
        folder: the root's `.dropq/meta/`; made when the first sidecar is written.
        storage: where they are written; they are durable as soon as bodies are.
        typed_replies: whether reply-to is written as DropboxMQ 1.2 writes it.
        ignored: tells which names are never messages.
    """

    def __init__(
        self,
        folder: str,
        storage: Storage,
        *,
        typed_replies: bool = False,
        ignored: Callable[[str], object] = lambda name: False,
    ) -> None:
        self.folder = folder
        self.ignored = ignored
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
            return self._visible(text)
        token = os.urandom(8).hex()
        short, content = names.shorten(self.whole(name), token)
        with telling("what does not fit the name was not written, and nothing was moved"):
            self._storage.make_folder(self.folder)
            self._storage.write_small(f"{self.folder}/{token}.json", json.dumps(content).encode())
        return self._visible(names.file_name(short, typed_replies=self._typed_replies))

    def _visible(self, text: str) -> str:
        """Keep a name of ours from being ignored for what a sender wrote last in it, as a type `tmp`: by a dot more."""
        return f"{text}." if self.ignored(text) else text

    def full(self, name: Name) -> Name:
        """Return a name with what its sidecar holds; one that cannot be read is warned of and left out."""
        try:
            return self.whole(name)
        except StorageError as error:
            log.warning("message %s is delivered without its sidecar: %s", name.id, error)
            return name

    def whole(self, name: Name) -> Name:
        """Return a name with what its sidecar holds, to be written anew; a missing or damaged one is left out.

        Raises:
            StorageError: it cannot be read now; what is written without it would never have it again.
        """
        if not name.meta:
            return name
        path = f"{self.folder}/{os.path.basename(name.meta)}.json"
        try:
            content = parse_json(read_small(path) or b"null")
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise storage_error(error, "what it holds stays there, and nothing was moved") from error
            log.warning("sidecar %s of message %s is damaged (%s): delivered without it", path, name.id, told(error))
            return name
        if not isinstance(content, dict):
            log.warning("sidecar %s of message %s is missing: delivered without it", path, name.id)
            return name
        return names.restore(name, content)


def collect(root: str, folder: str, storage: Storage, clock: Clock) -> int:
    """Remove the sidecars that no name refers to any more; return how many.

    RACE: a name may move from a folder not yet looked at to one already passed. So a sidecar goes only when it is a
    day old and two passes, an hour apart, found no name that refers to it.
    """
    now = clock.now_ms()
    old = {entry.name[:-5] for entry in _sidecar_files(folder) if now - changed_ms(entry.path) > COLLECTED_AGE}
    if not old:
        return 0
    try:
        old.difference_update(references(root))
    except OSError as error:
        log.warning("no sidecars are collected: %s", error)
        return 0
    notes = f"{folder}/.unreferenced"
    missed = _missed_before(notes)
    gone = {token for token in old if token in missed and now - missed[token] > PASSES_APART}
    for token in gone:
        storage.unlink(f"{folder}/{token}.json")
    storage.write_small(notes, json.dumps({token: missed.get(token, now) for token in old - gone}).encode())
    return len(gone)


def references(root: str) -> Iterator[str]:
    """Yield which sidecars the names below a root refer to; also those in folders of queues that are symbolic links.

    Raises:
        OSError: a folder cannot be listed.
    """
    tops = [root]
    for entry in entries(root):
        if not names.can_name_queue(entry.name):
            continue
        for layout in (QueueLayout.flat(entry.path), QueueLayout.incoming(entry.path)):
            if os.path.isdir(layout.target):
                tops += [path for path in (layout.home, *layout.folders.values()) if os.path.islink(path)]
    for top in dict.fromkeys(tops):
        for _, _, files in os.walk(top, onerror=_not_looked_at):
            yield from (found[1] for file in files if (found := _REFERENCE.search(file)))


def _not_looked_at(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error  # what cannot be listed may refer to any of them


def _sidecar_files(folder: str) -> Iterator[os.DirEntry[str]]:
    for entry in entries(folder):
        if entry.name.endswith(".json") and not entry.name.startswith(".") and is_message_file(entry):
            yield entry


def _missed_before(notes: str) -> dict[str, int]:
    try:
        found = parse_json(read_small(notes) or b"{}")
        return {str(token): int(first) for token, first in found.items()}  # type: ignore[attr-defined]
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}  # damaged: the passes are counted anew
