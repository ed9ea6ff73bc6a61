"""What carries the messages of rows to other file systems: for the process that moved them, and for any other."""

from __future__ import annotations

import logging
import os

from dropq.carrier.lists import Carrier
from dropq.errors import DropqError, NoSuchQueue
from dropq.format.names import Name
from dropq.lifecycle import known_queues
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import open_queue, open_root
from dropq.lifecycle.transfers import Row, rows, stalled
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

#: What the error says where nobody knows which messages have arrived.
_CARRIED = "the messages are in the other queue, or on their way: any sweep of this queue carries them"


def carrier_of(row: Row, source: QueueContext, target: QueueContext | None = None) -> Carrier:
    """Return what carries the messages of a row.

    Args:
        row: the row.
        source: the queue that the row is in.
        target: the queue that they go to; None opens it.

    Raises:
        NoSuchQueue: the queue is not there, or another one has its name.
        DropqError: the queue cannot be opened.
    """
    if target is None:
        root = open_root(row.root, None) if row.root else source.root
        target = open_queue(root, row.queue)
    there = target

    def check() -> None:
        with there.error_context("nothing was carried"):
            if row.mark not in known_queues.marks_in(there.layout.private):
                raise NoSuchQueue(
                    f"{there.layout.home} is another queue than the one that the messages in {row.given} were given "
                    "to: bring that one back, or move them to a target/; nothing was carried"
                )

    check()

    def name(own_name: str) -> Name:
        return source.sidecars.parse(own_name)

    return Carrier(source, row.given, row.folder, target, os.path.basename(row.folder), check, name)


class Carriers:
    """Carries what waits in the rows of one queue, for one process.

    Args:
        context: the queue.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._warned: dict[str, str] = {}

    def run(self) -> int:
        """Carry all that waits; return how many messages this process sent.

        What cannot be carried now waits for the next run, or for a sweep; the log says so once for each reason.
        """
        sent, failed = 0, dict[str, str]()
        for row in stalled(self._context):
            try:
                sent += sum(carrier_of(row, self._context).run())
            except (DropqError, OSError) as error:
                failed[row.goal] = describe(error)
                if self._warned.get(row.goal) != failed[row.goal]:
                    log.warning("queue %s: messages for %s wait: %s", self._context.name, row.goal, failed[row.goal])
        self._warned = failed
        return sent


class Passage:
    """What carries the messages that were moved to a queue on another file system, and knows which have arrived.

    Args:
        source: the queue that they come from.
        target: the queue that they go to.

    Attributes:
        arrived: the names in that queue of what was sent, by the names in the rows.
    """

    def __init__(self, source: QueueContext, target: QueueContext) -> None:
        self._source = source
        self._target = target
        self.arrived: dict[str, str] = {}

    def carry(self) -> str:
        """Carry what was moved so far; return why some of it may still be here."""
        try:
            for row in self._rows():
                carrier = carrier_of(row, self._source, self._target)
                try:
                    for _ in carrier.run():
                        pass
                finally:
                    self.arrived |= carrier.arrived
        except DropqError as error:
            return str(error)
        return "this user may not read it"

    def has_left(self, given: str) -> bool:
        """Return whether a message has left the rows, by its name there: it is in the other queue.

        Raises:
            StorageError: the rows cannot be listed.
        """
        with self._source.error_context(_CARRIED):
            return not any(reading.exists(f"{row.given}/{given}") for row in rows(self._source.layout))

    def _rows(self) -> list[Row]:
        target = self._target
        root = "" if target.root.layout.path == self._source.root.layout.path else target.root.layout.path
        with self._source.error_context(_CARRIED):
            marks = known_queues.marks_in(target.layout.private)
            found = [row for row in rows(self._source.layout) if (row.root, row.queue) == (root, target.name)]
            return [row for row in found if row.mark in marks]
