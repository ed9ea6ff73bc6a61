"""Metadata that does not fit a file name: immutable files in `.dropq/meta/`, durable before a name refers to them.

Every name that dropq writes passes through `Sidecars.fit`, so that no name is ever longer than its budget.

A sidecar is removed once no name refers to it. That a queue is not there proves nothing: its disk may be away. So each
queue carries a mark, `.dropq/queue-TOKEN`, and the root keeps a note of each mark, `.dropq/queues/queue-TOKEN`. While a
mark that has a note is not found below the root, no sidecar is removed. A queue in which no mark can be made, as it is
mounted read-only or another user's, has a note of its path, `.dropq/queues/path-DIGEST`, and is missed while there is
no queue.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import NamedTuple

from dropq.errors import StorageError
from dropq.format import names
from dropq.format.layout import QueueLayout, RootLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.storage.clock import Clock
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Storage
from dropq.storage.reading import (
    changed_ms,
    entries,
    exists,
    is_message_file,
    names_in,
    parse_json,
    read_small,
    written_ms,
)

log = logging.getLogger("dropq")

#: Milliseconds that a sidecar is old before it may be collected, and between the two passes that miss it.
COLLECTED_AGE = 86_400_000
PASSES_APART = 3_600_000
#: How many warnings about names are remembered, so that each is given once.
WARNINGS = 1000

#: What is said of a folder, a link or a fifo: no file of ours comes there by waiting.
_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_MARK = re.compile(r"queue-[0-9a-f]{16}")
_NOTE = re.compile(r"(?:queue|path)-[0-9a-f]{16}")
#: What a queue answers that this user, or this mount, may not change.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Sidecars:
    """The sidecars of one root.

    Args:
        folder: the root's `.dropq/meta/`; made when the first sidecar is written.
        storage: where they are written; they are durable as soon as bodies are.
        typed_replies: whether reply-to is written as DropboxMQ 1.2 writes it.
        ignored: tells which names are never messages.
        queue: the private folder of the queue whose names are written; None where none are.
    """

    def __init__(
        self,
        folder: str,
        storage: Storage,
        *,
        typed_replies: bool = False,
        ignored: Callable[[str], object] = lambda name: False,
        queue: str | None = None,
    ) -> None:
        self.folder = folder
        self.ignored = ignored
        self.root = RootLayout(os.path.dirname(os.path.dirname(folder)))
        self._queue = queue
        self._mark = ""
        self._storage = storage
        self.typed_replies = typed_replies
        self._warned: set[tuple[str, str]] = set()

    def file(self, filename: str, folder: str = "") -> MessageFile:
        """Return a message file whose name is read as this root writes names."""
        return MessageFile(filename, folder=folder, typed_replies=self.typed_replies)

    def parse(self, own_name: str) -> Name:
        """Read a file name that has no claim prefix; never fails, logs nothing and never opens a file."""
        return names.parse(own_name, typed_replies=self.typed_replies)

    def read(self, file: MessageFile) -> Name:
        """Return what the file name and the sidecar of a message say; log what cannot be read."""
        problems = file.problems
        name = self.full(file.name, problems)
        if problems:
            self.warn(file.own_name, problems)
        return name

    def warn(self, file: str, problems: list[str]) -> None:
        """Warn of what is wrong with a name, once a name."""
        for problem in problems:
            if (file, problem) in self._warned:
                continue
            if len(self._warned) >= WARNINGS:
                self._warned.clear()
            self._warned.add((file, problem))
            log.warning("%r: %s", file, problem)

    def fit(self, name: Name) -> str:
        """Return the file name for a message; what is over the budget goes to a new sidecar first."""
        text = names.file_name(name, typed_replies=self.typed_replies)
        length = len(text) if text.isascii() else len(os.fsencode(text))
        if length <= names.NAME_BUDGET or length <= names.room(name):  # no name has less room
            return text
        token = os.urandom(8).hex()
        short, content = names.shorten(self.whole(name), token)
        short, left_out = names.squeeze(short)
        if left_out:
            self.warn(text, [f"left out of the name, which would be too long to be claimed: {', '.join(left_out)}"])
        with error_context("what does not fit the name was not written, and nothing was moved"):
            self._storage.make_folder(self.folder)
            self.make_known()
            self._storage.write_small(f"{self.folder}/{token}.json", json.dumps(content).encode())
        return names.file_name(short, typed_replies=self.typed_replies)

    def make_known(self) -> None:
        """Let the root know the queue: while the queue is away, no sidecar is removed."""
        if self._queue is None or (self._mark and exists(self._mark)):
            return
        with suppress(PermissionError):  # who may send and nothing else; the next sweep of the root does it
            self._mark = f"{self._queue}/{make_known(self.root.queues, self._queue, self._storage)}"

    def full(self, name: Name, problems: list[str] | None = None) -> Name:
        """Return a name with what its sidecar holds; `problems` gets a sentence about what cannot be read."""
        problems = [] if problems is None else problems
        try:
            return self._restored(name, problems)
        except StorageError as error:
            problems.append(f"the message is delivered without its sidecar: {error}")
            return name

    def whole(self, name: Name) -> Name:
        """Return a name with what its sidecar holds, to be written again; warn where one is missing or damaged.

        Raises:
            StorageError: it cannot be read now; what is written without it would never have it again.
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
            content = parse_json(read_small(path) or b"null")
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise storage_error(error, "what it holds stays there, and nothing was moved") from error
            problems.append(f"the message is delivered without its sidecar: {path} is damaged ({describe(error)})")
            return name
        if not isinstance(content, dict):
            problems.append(f"the message is delivered without its sidecar: {path} is missing")
            return name
        return names.restore(name, content, problems)


def collect(root: str, folder: str, storage: Storage, clock: Clock, *, again: int = 0) -> Iterator[int]:
    """Remove the sidecars that no name refers to any more; yield 1 for each, and 0 for whatever else is looked at.

    Nothing is removed while a queue that the root knows is away, or while a folder cannot be listed.

    RACE: a name may move from a folder not yet looked at to one already passed. So a sidecar goes only when it is a
    day old and two passes, an hour apart, found no name that refers to it.

    Args:
        root: the root.
        folder: where its sidecars lie.
        storage: what removes them.
        clock: what tells how old they are.
        again: do nothing where the last pass began less than so many milliseconds ago.
    """
    now, queues = clock.now_ms(), RootLayout(root).queues
    notes = f"{folder}/.unreferenced"
    level = logging.INFO if again else logging.WARNING  # a consumer may not look everywhere: `dropq sweep` does
    if again and exists(notes) and 0 <= now - written_ms(notes) < again:
        return
    ages = dict[str, int]()
    why = "its folder cannot be worked in"
    try:
        for entry in _sidecar_files(folder):
            if not ages:
                storage.stamp(notes)  # first: what is given up is tried again as late as what is done
            with suppress(FileNotFoundError):  # RACE: another pass removed it
                ages[entry.name[:-5]] = now - changed_ms(entry.path)
            yield 0
        if not ages:
            return
        why = "a queue cannot be noted, and would not be missed"
        for layout in _layouts(root):
            yield 0
            _note(root, layout)
        old = {token for token, age in ages.items() if age > COLLECTED_AGE}
        if not old:
            return
        why = "names that refer to it may lie there"
        there = yield from _looking(root)
        for _, absence in absences(queues, there):
            log.log(level, "no metadata is collected: %s", absence)
            return
    except OSError as error:
        log.log(level, "no metadata is collected, as %s: %s", why, describe(error))
        return
    old -= there.references
    missed = {token: min(first, now) for token, first in _missed_before(notes).items()}
    gone = {token for token in old if token in missed and now - missed[token] > PASSES_APART}
    for token in gone:
        storage.unlink(f"{folder}/{token}.json")
        yield 1
    storage.write_small(notes, json.dumps({token: missed.get(token, now) for token in old - gone}).encode())


# -- which queues a root knows -----------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What the file names below a root say: which sidecars they refer to, and which of the noted queues are there."""

    references: frozenset[str]
    marks: frozenset[str]


def look(root: str) -> Seen:
    """Look at all file names below a root, and in what its queues' symbolic links lead to.

    Raises:
        OSError: a folder cannot be listed, or a link leads nowhere.
    """
    looking = _looking(root)
    while True:
        try:
            next(looking)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def _looking(root: str) -> Generator[int, None, Seen]:
    references, marks = set[str](), set[str]()
    queues = {layout.base: (layout, {_path_note(root, layout.base)}) for layout in _layouts(root)}
    for layout, own in queues.values():
        for private in (layout.private, layout.delayed):
            _refuse_link(private)
        own |= marks_in(layout.private)
        marks |= own
    for file in _names_below(root, [layout for layout, _ in queues.values()]):
        yield 0
        if token := names.sidecar_of(file):
            references.add(token)
        elif _MARK.fullmatch(file):
            marks.add(file)
    for layout, own in queues.values():
        if not _is_there(layout):  # it went while it was looked at
            marks -= own
    return Seen(frozenset(references), frozenset(marks))


def make_known(queues: str, private: str, storage: Storage) -> str:
    """Give a queue a mark, unless it has one, and keep a note of it; return the mark.

    RACE: two processes at once may give it two, which are both noted, and both found. Who dies between mark and note
    leaves a mark that the next pass notes. A queue that is deleted at this moment may leave a note, which `fsck` names.

    Args:
        queues: the folder of the notes.
        private: the queue's private folder.
        storage: what writes there.
    """
    marks = marks_in(private)
    if not marks:
        mark = f"queue-{os.urandom(8).hex()}"
        storage.make_folder(private)
        storage.touch(f"{private}/{mark}")
        marks = {mark}
    for mark in marks:
        if not exists(f"{queues}/{mark}"):
            storage.make_folder_like(queues, os.path.dirname(queues))
            base = os.path.dirname(private)
            storage.write_small(f"{queues}/{mark}", os.fsencode(base))
            storage.unlink(f"{queues}/{_path_note(_root(queues), base)}")
    return min(marks)


def _note(root: str, layout: QueueLayout) -> None:
    """Let the root know a queue by its mark, or by its path where this user cannot give it one."""
    queues, storage = RootLayout(root).queues, Storage(base=layout.base)
    try:
        _refuse_link(layout.private)
        make_known(queues, layout.private, storage)
    except FileNotFoundError:
        if _is_there(layout):
            raise
        # RACE: it was deleted since it was listed
    except OSError as error:
        note = f"{queues}/{_path_note(root, layout.base)}"
        if error.errno not in _NOT_OURS:
            raise
        if not exists(note):
            storage.make_folder_like(queues, os.path.dirname(queues))
            storage.write_small(note, os.fsencode(layout.base))


def forget(queues: str, base: str, private: str, storage: Storage) -> None:
    """Forget a queue that is being deleted: nobody has to wait for it to come back.

    Args:
        queues: the folder of the notes.
        base: where its folders were.
        private: where its private folder is now.
        storage: what removes the notes.
    """
    for note in (*marks_in(private), _path_note(_root(queues), base)):
        storage.unlink(f"{queues}/{note}")


def marks_in(private: str) -> set[str]:
    """Return the marks of a queue, by its private folder."""
    return set(filter(_MARK.fullmatch, names_in(private)))


def _refuse_link(private: str) -> None:
    """Refuse a private folder that is a link, which nobody follows: names behind it may refer to any sidecar."""
    if os.path.islink(private):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), private)


def _path_note(root: str, base: str) -> str:
    """Return what the note of a queue without a mark is called: the same in a root that was moved."""
    return f"path-{hashlib.sha256(os.fsencode(os.path.relpath(base, root))).hexdigest()[:16]}"


def _root(queues: str) -> str:
    return os.path.dirname(os.path.dirname(queues))


def absences(queues: str, there: Seen) -> Iterator[tuple[str, str]]:
    """Yield the notes of queues that are away, each with a sentence about it."""
    for name in sorted(set(filter(_NOTE.fullmatch, names_in(queues))) - there.marks):
        note = f"{queues}/{name}"
        home = "a queue"
        with suppress(PermissionError):
            home = os.fsdecode(read_small(note) or b"a queue")
        yield note, f"{home} is not there: bring it back; if it is gone for good, remove {note}"


def _names_below(root: str, layouts: list[QueueLayout]) -> Iterator[str]:
    notes = RootLayout(root).queues
    paths = [path for at in layouts for path in (at.home, at.base, *at.folders.values())]
    links = [path for path in dict.fromkeys(paths) if os.path.islink(path)]
    left = [root, *links]
    for link in links:
        os.stat(link)  # one that leads nowhere may lead to names that refer to any sidecar
    while left:
        for entry in entries(left.pop()):
            if not entry.is_dir(follow_symlinks=False):
                yield entry.name
            elif entry.path != notes:
                left.append(entry.path)
    for link in links:
        os.stat(link)  # as before: what went on the way was not looked at


def _layouts(root: str) -> Iterator[QueueLayout]:
    """Yield where the queues of a root are.

    Raises:
        OSError: this user may not look, or a link leads nowhere: there may be a queue.
    """
    for entry in entries(root):
        if names.can_name_queue(entry.name):
            for layout in QueueLayout.candidates(entry.path):
                if os.path.islink(layout.base):
                    os.stat(layout.base)
                if _is_there(layout):
                    yield layout


def _is_there(layout: QueueLayout) -> bool:
    leads_nowhere = os.path.islink(layout.target) and not os.path.exists(layout.target)
    return leads_nowhere or exists(f"{layout.target}/.")


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
