"""Where the messages of a queue wait that go to queues on other file systems: one row for each of these queues.

A rename cannot lead to another file system. So a message is given to a row by one rename, from which moment no consumer
can take it, and a carrier does the rest: who moved it, or any sweep of the queue.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dropq.carrier.lists import Carrier
from dropq.errors import DropqError, NoSuchQueue, StorageError
from dropq.format.layout import GONE_PREFIX, QueueLayout
from dropq.format.names import Name
from dropq.format.transfers import GIVEN, GOAL, is_row
from dropq.lifecycle import known_queues
from dropq.lifecycle.context import QueueContext
from dropq.queue.open_queue import open_queue, open_root
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")


@dataclass(frozen=True, slots=True)
class Row:
    """A row: where a queue's messages for one other queue wait.

    Attributes:
        folder: its folder.
        root: the root of that queue; "" for the root that the row is in.
        queue: the queue's address.
        mark: the queue's mark, which another queue of its name does not have.
    """

    folder: str
    root: str
    queue: str
    mark: str

    @property
    def given(self) -> str:
        """The folder of the messages."""
        return f"{self.folder}/{GIVEN}"

    @property
    def goal(self) -> str:
        """The queue that they go to, for people."""
        return f"{self.root}/{self.queue}" if self.root else self.queue

    def carrier(self, source: QueueContext, target: QueueContext | None = None) -> Carrier:
        """Return what carries the messages of the row.

        Args:
            source: the queue that the row is in.
            target: the queue that they go to; None opens it.

        Raises:
            NoSuchQueue: the queue is not there, or another one has its name.
            DropqError: the queue cannot be opened.
        """
        if target is None:
            root = open_root(self.root, None) if self.root else source.root
            target = open_queue(root, self.queue)
        with target.error_context("nothing was carried"):
            if self.mark not in known_queues.marks_in(target.layout.private):
                raise NoSuchQueue(
                    f"{target.layout.home} is another queue than the one that the messages in {self.given} were given "
                    "to: bring that one back, or move them to a target/; nothing was carried"
                )

        def name(own_name: str) -> Name:
            return source.sidecars.parse(own_name)

        return Carrier(source, self.given, self.folder, target, os.path.basename(self.folder), name)


def row_to(source: QueueContext, target: QueueContext) -> Row:
    """Return the row of a queue's messages for another queue; make it if there is none.

    RACE: two processes at once may make two rows to one queue. Both are used from then on.
    """
    root = "" if target.root.layout.path == source.root.layout.path else target.root.layout.path
    with target.error_context("nothing was moved"):
        marks = known_queues.marks_in(target.layout.private)
    for row in rows(source.layout):
        if (row.root, row.queue) == (root, target.name) and row.mark in marks:
            return row
    with target.error_context("nothing was moved"):
        mark = known_queues.make_known(target.root.layout, target.layout.private, target.storage)
    with source.error_context("nothing was moved"):
        return _make(source, root, target.name, mark)


def _make(source: QueueContext, root: str, queue: str, mark: str) -> Row:
    """Make a row, which appears complete."""
    storage, layout = source.storage, source.layout
    token = secrets.token_hex(8)
    draft, folder = f"{layout.private}/{GONE_PREFIX}{token}", f"{layout.transfers}/{token}"
    storage.make_folder(layout.transfers)
    storage.make_folder(f"{draft}/{GIVEN}")
    content = {"format": 1, "root": root, "queue": queue, "mark": mark}
    storage.write_small(f"{draft}/{GOAL}", json.dumps(content).encode())
    storage.rename_folder(draft, folder)
    storage.sync(layout.transfers)
    return Row(folder, root, queue, mark)


def rows(layout: QueueLayout) -> Iterator[Row]:
    """Yield the rows of a queue; log those that cannot be read."""
    for entry in list(reading.entries(layout.transfers)):
        if not is_row(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            content: Any = reading.parse_json(reading.read_small(f"{entry.path}/{GOAL}") or b"null")
            root, queue, mark = (content[key] for key in ("root", "queue", "mark"))
            if not (isinstance(root, str) and isinstance(queue, str) and isinstance(mark, str)):
                raise ValueError("it names no queue")
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s/%s cannot be used, and nothing is carried from there: %s", entry.path, GOAL, _why(error))
            continue
        yield Row(entry.path, root, queue, mark)


def _why(error: Exception) -> str:
    return describe(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def given_messages(layout: QueueLayout) -> Iterator[tuple[Row, str]]:
    """Yield the messages that are on their way to other file systems: the row, and the file name in its folder.

    A message whose copy is there already is among them until it is removed here.
    """
    for row in rows(layout):
        for entry in reading.entries(row.given):
            if not entry.name.startswith(".") and reading.is_message_file(entry):
                yield row, entry.name


def in_transit(layout: QueueLayout) -> dict[str, int]:
    """Return how many messages are on their way to each queue on another file system."""
    return dict(Counter(row.goal for row, _ in given_messages(layout)))


def stalled(context: QueueContext, stalled_for: float = 0) -> Iterator[Row]:
    """Yield the rows in which messages wait for a carrier.

    Args:
        context: the queue.
        stalled_for: leave a row to its carriers if something changed in it in this many seconds.
    """
    for row in list(rows(context.layout)):
        if stalled_for and min(map(context.age_ms, (row.folder, row.given))) < stalled_for * 1000:
            continue
        if reading.names_in(row.given):
            yield row


class Passage:
    """The way of messages into another queue: a rename each, or, where none leads there, a carrier.

    Args:
        source: the queue that they come from.
        target: the queue that they go to.

    Attributes:
        arrived: the names in that queue of what the last `carry` sent, by the names in the carrier's folder.
    """

    def __init__(self, source: QueueContext, target: QueueContext) -> None:
        self._source = source
        self._target = target
        self._row: Row | None = None
        self.arrived: dict[str, str] = {}

    @property
    def is_carried(self) -> bool:
        """Whether a carrier takes what is moved."""
        return self._row is not None

    def move(self, act: Callable[[str], str | None]) -> str | None:
        """Move a message; return its name where it went, or None if another process was first.

        Args:
            act: moves it, into a carrier's folder, or by a rename if that is "".
        """
        if self._row is None:
            try:
                return act("")
            except StorageError as error:
                if error.errno != errno.EXDEV:
                    raise
            self._row = row_to(self._source, self._target)
        return act(self._row.given)

    def carry(self) -> str:
        """Carry what was moved so far; return why some of it may still be here, or ""."""
        if self._row is None:
            return ""
        try:
            carrier = self._row.carrier(self._source, self._target)
            self.arrived = carrier.arrived
            for _ in carrier.run():
                pass
        except DropqError as error:
            return str(error)
        return "this user may not read it"

    def has_left(self, given: str) -> bool:
        """Return whether a message has left the carrier's folder, by its name there: it is in the other queue."""
        return self._row is None or not reading.exists(f"{self._row.given}/{given}")
