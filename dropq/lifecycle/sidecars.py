"""Metadata that does not fit a file name: immutable files in `.dropq/meta/`, durable before a name refers to them.

Every name that dropq writes passes through `Sidecars.fit`, so no name is ever longer than its budget. A sidecar is
removed once no name refers to it, and no queue of the root is missing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace

from dropq.errors import StorageError
from dropq.format import names
from dropq.format.layout import QueueLayout, RootLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.format.typed import LONE_SURROGATE, Typed
from dropq.lifecycle import queue_notes
from dropq.lifecycle.ages import SIDECAR, SIDECAR_PASSES
from dropq.storage.clock import Clock
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Storage
from dropq.storage.reading import changed_ms, entries, exists, is_message_file, parse_json, read_small, written_ms

log = logging.getLogger("dropq")

#: How many warnings about names are remembered, to log each once.
WARNINGS = 1000

#: The errors of a folder, a link or a fifo in a sidecar's place: trying again does not help.
_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EFBIG})


class Sidecars:
    """The sidecars of one root, in the folder `.dropq/meta/`.

    Args:
        typed_replies: whether reply-to is written as DropboxMQ 1.2 writes it.
        ignored: returns whether a name is never a message's.
        queue: the private folder of the queue whose names are written; None if no names are written.
        name_budget: how many bytes a name may have in that queue.
    """

    def __init__(
        self,
        folder: str,
        storage: Storage,
        *,
        typed_replies: bool = False,
        ignored: Callable[[str], object] = lambda name: False,
        queue: str | None = None,
        name_budget: int = names.NAME_BUDGET,
    ) -> None:
        self.folder = folder
        self.ignored = ignored
        self.root = RootLayout(os.path.dirname(os.path.dirname(folder)))
        self._queue = queue
        self._name_budget = name_budget
        self._mark = ""
        self._storage = storage
        self.typed_replies = typed_replies
        self._warned: set[tuple[str, str]] = set()

    def at(self, layout: QueueLayout) -> Sidecars:
        """Return sidecars for the names of another queue, or of this queue in another folder."""
        other = copy(self)
        other._queue, other._name_budget, other._mark = layout.private, layout.name_budget, ""
        other._storage = self._storage.at(layout.base)
        return other

    def file(self, filename: str, folder: str = "") -> MessageFile:
        """Return a message file, to be parsed as this root writes names."""
        return MessageFile(filename, folder=folder, typed_replies=self.typed_replies)

    def parse(self, own_name: str) -> Name:
        """Parse a file name without a claim prefix; this never fails, logs nothing and opens no file."""
        return names.parse(own_name, typed_replies=self.typed_replies)

    def read(self, file: MessageFile) -> Name:
        """Return the name in a message's file name and its sidecar; log parts that cannot be read."""
        problems = file.problems
        name = self.full(file.name, problems)
        if problems:
            self.warn(file.own_name, problems)
        return name

    def warn(self, file: str, problems: list[str]) -> None:
        """Log the problems of a name, each once."""
        for problem in problems:
            if (file, problem) in self._warned:
                continue
            if len(self._warned) >= WARNINGS:
                self._warned.clear()
            self._warned.add((file, problem))
            log.warning("%r: %s", file, problem)

    def fit(self, name: Name) -> str:
        """Return a message's file name; if it is too long, write the rest to a new sidecar first."""
        if name.meta and self._name_budget == names.SHARED_BUDGET:
            name = self._without_sidecar(name)
        text = names.file_name(name, typed_replies=self.typed_replies)
        length = len(text) if text.isascii() else len(os.fsencode(text))
        if length <= self._name_budget or length <= names.room(name):  # the budget is the least room of all names
            return text
        token = os.urandom(8).hex()
        short, content = names.shorten(self.whole(name), token, self._name_budget)
        fits, left_out = names.squeeze(short)
        if left_out:
            said = ", ".join(f"{attribute} {value!r}" for attribute, value in left_out.items())
            self.warn(text, [f"left out of the name, which would be too long to be claimed: {said}"])
        with error_context("what does not fit the name was not written, and nothing was moved"):
            self._storage.make_folder(self.folder)
            self.make_known()
            self._storage.write_small(f"{self.folder}/{token}.json", json.dumps(content).encode())
        return fits

    def with_filename(self, name: Name, filename: str) -> Name:
        """Return a name with the property `filename`, unless its sender gave one; log it where that cannot be.

        Where a DropboxMQ may read the name, it is left out rather than make a sidecar, now or by the counters of later
        deliveries: a sidecar would hide the reply-to from DropboxMQ.
        """
        if not filename or names.FILENAME in name.properties:
            return name
        if LONE_SURROGATE.search(filename):
            problem = "it is not UTF-8"
        else:
            named = replace(name, properties={**name.properties, names.FILENAME: Typed("S", filename)})
            is_shared = self._name_budget == names.SHARED_BUDGET
            if not is_shared or len(names.write(named, typed_replies=self.typed_replies)) <= names.NAME_BUDGET:
                return named
            problem = "the message's name would be too long for DropboxMQ"
        self.warn(filename, [f"sent without the property {names.FILENAME}: {problem}"])
        return name

    def _without_sidecar(self, name: Name) -> Name:
        """Return a name with the content of its sidecar, if all of it fits: a DropboxMQ reads names only."""
        whole = self.full(name)
        fits = not whole.meta and len(names.write(whole, typed_replies=self.typed_replies)) <= self._name_budget
        return whole if fits else name

    def make_known(self) -> None:
        """Make the queue known to the root: while the queue is missing, no sidecar is removed."""
        if self._queue is None or (self._mark and exists(self._mark)):
            return
        with suppress(PermissionError):  # this user may only send: the next sweep of the root makes it known
            self._mark = f"{self._queue}/{queue_notes.make_known(self.root, self._queue, self._storage)}"

    def full(self, name: Name, problems: list[str] | None = None) -> Name:
        """Return a name with the content of its sidecar; append to `problems` what cannot be read."""
        problems = [] if problems is None else problems
        try:
            return self._restored(name, problems)
        except StorageError as error:
            problems.append(f"the message is delivered without its sidecar: {error}")
            return name

    def whole(self, name: Name) -> Name:
        """Return a name with the content of its sidecar, to write it again; log a sidecar that is missing or damaged.

        It raises StorageError for a sidecar that cannot be read now: the name would lose its content for ever.
        """
        problems: list[str] = []
        restored = self._restored(name, problems)
        self.warn(name.id, problems)
        return restored

    def _restored(self, name: Name, problems: list[str]) -> Name:
        if not name.meta:
            return name
        path = f"{self.folder}/{os.path.basename(name.meta)}.json"
        try:
            content = parse_json(read_small(path) or b"null", any_text=True)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise storage_error(error, "the sidecar stays, and nothing was moved") from error
            problems.append(f"the message is delivered without its sidecar: {path} is damaged ({describe(error)})")
            return name
        if not isinstance(content, dict):
            problems.append(f"the message is delivered without its sidecar: {path} is missing")
            return name
        return names.restore(name, content, problems)


def collect(root: str, folder: str, storage: Storage, clock: Clock, *, again: int = 0) -> Iterator[int]:
    """Remove the sidecars that no name refers to any more; yield 1 for each, and 0 for each other step.

    Nothing is removed while a queue that the root knows is missing, or while a folder cannot be listed.

    RACE: a name may move from a folder not yet looked at to a folder already passed. So a sidecar is removed only when
    it is a day old, and two passes, an hour apart, found no name that refers to it.
    It does nothing if the last pass began less than `again` milliseconds ago.
    """
    now, layout = clock.now_ms(), RootLayout(root)
    passes = f"{folder}/.unreferenced"
    level = logging.INFO if again else logging.WARNING  # a consumer may not look everywhere: `dropq sweep` does
    if again and exists(passes) and 0 <= now - written_ms(passes) < again:
        return
    ages = dict[str, int]()
    why = "its folder cannot be worked in"
    try:
        for entry in entries(folder):
            if not entry.name.endswith(".json") or entry.name.startswith(".") or not is_message_file(entry):
                continue
            if not ages:
                storage.stamp(passes)  # first: also after a pass that fails, the next waits for `again`
            with suppress(FileNotFoundError):  # RACE: another pass removed it
                ages[entry.name[:-5]] = now - changed_ms(entry.path)
            yield 0
        if not ages:
            return
        why = "a queue cannot be noted, and would not be missed"
        for queue in queue_notes.queue_layouts(layout):
            yield 0
            queue_notes.note(layout, queue)
        old = {token for token, age in ages.items() if age > SIDECAR}
        if not old:
            return
        why = "names that refer to it may be there"
        seen = yield from queue_notes.scanning(layout)
        for _, absence in queue_notes.absences(layout, seen):
            log.log(level, "no metadata is collected: %s", absence)
            return
    except OSError as error:
        log.log(level, "no metadata is collected, as %s: %s", why, describe(error))
        return
    old -= seen.references
    missed = {token: min(first, now) for token, first in _missed_before(passes).items()}
    gone = {token for token in old if token in missed and now - missed[token] > SIDECAR_PASSES}
    for token in gone:
        storage.unlink(f"{folder}/{token}.json")
        yield 1
    storage.write_small(passes, json.dumps({token: missed.get(token, now) for token in old - gone}).encode())


def _missed_before(passes: str) -> dict[str, int]:
    """Return when a pass first found no reference to a sidecar, in ms since 1970, by the sidecar's token."""
    try:
        found = parse_json(read_small(passes) or b"{}")
        return {str(token): int(first) for token, first in found.items()}  # type: ignore[attr-defined]
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}  # damaged: this pass counts as the first
