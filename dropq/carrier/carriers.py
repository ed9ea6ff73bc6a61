"""Carrying the messages of rows to other file systems, for the process that moved them, or for any other.

Only a process that moves messages to another root, or a sweep by hand, accesses the path of that root. Before it writes
there, the row, the queue that the row is in and the queue that it leads to must be those that the row's maker meant.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dropq.carrier.lists import Carrier, refuse_another
from dropq.errors import DropqError, Unavailable
from dropq.format.addresses import layouts
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.giving import OlderState, refuse_older
from dropq.lifecycle.open_queue import open_queue, open_root
from dropq.lifecycle.transfers import (
    Refusal,
    Row,
    RowDestination,
    note_refusal,
    other_host,
    own_mark,
    rows,
    stalled,
)
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

#: What the error says if it is not known which messages have arrived.
_CARRIED = "the messages are in the other queue, or on their way: `dropq sweep` of this queue carries them"


def carry(row: Row, source: QueueContext, destination: QueueContext | None = None, **how: Any) -> Iterator[int]:
    """Carry the messages of a row, as `Carrier.run` says; note beside the row why that failed, until it succeeds.

    The arguments are those of `carrier_of`.
    """
    try:
        yield from carrier_of(row, source, destination, **how).run()
    except (DropqError, OSError) as error:
        note_refusal(source, row.folder, Refusal(describe(error), isinstance(error, OlderState)))
        raise
    note_refusal(source, row.folder, None)


def carrier_of(
    row: Row, source: QueueContext, destination: QueueContext | None = None, *, named: bool = False, **how: Any
) -> Carrier:
    """Return the carrier for the messages of a row, to the open `destination`, if there is one.

    If the user `named` the row, he vouches that its path leads where its maker meant. `how` it carries is as of
    `Carrier`.

    Raises:
        NoSuchQueue: the destination is not there, or another one has its name.
        Unavailable: another host wrote the row, or another queue.
        OlderState: the queue that the row is in is an older state of itself.
    """
    if not (named or row.is_of_this_host):
        raise Unavailable(f"{other_host(row, source.name)}; nothing was carried")
    with source.error_context("nothing was carried"):
        if not row.is_of(source):
            raise Unavailable(
                f"{row.folder} was copied from another queue: move what is in {row.given} to a target/, unless the "
                "queue that it goes to has it; nothing was carried"
            )
        mark = own_mark(source)
    there = destination or _opened(row, source)
    refuse_another(row, there.layout)
    with source.error_context("nothing was carried"):
        refuse_older(source, RowDestination(there.root.layout, there.name, there.layout, row.peer))
    return Carrier(source, row, there, mark, **how)


def _opened(row: Row, source: QueueContext) -> QueueContext:
    """Open the queue that a row leads to; write nothing to another root before the queue's mark was seen."""
    if not row.is_abroad:
        return open_queue(source.root, row.queue)
    with source.error_context("nothing was carried"):
        found = [layout for layout in layouts(row.root, row.queue) if reading.is_folder(layout.target)]
        for layout in found[:1]:
            refuse_another(row, layout)
    return open_queue(open_root(row.root, None), row.queue)


@dataclass
class Carriers:
    """Carries the messages in the rows of one queue to queues of its own root, for one process."""

    context: QueueContext
    _warned: dict[str, str] = field(default_factory=dict)

    def run(self) -> int:
        """Carry all that waits; return how many messages this process sent.

        What cannot be carried now waits for the next run, or for a sweep; the log says so once for each reason.
        """
        sent, failed = 0, dict[str, str]()
        for row in stalled(self.context, unusable=failed):
            if row.is_abroad:
                continue
            try:
                sent += sum(carry(row, self.context))
            except (DropqError, OSError) as error:
                failed[f"messages for {row.destination} wait"] = describe(error)
        for what, why in failed.items():
            if self._warned.get(what) != why:
                log.warning("queue %s: %s: %s", self.context.name, what, why)
        self._warned = failed
        return sent


@dataclass
class CarrierTo:
    """Carries messages to a queue on another file system; `arrived` has their names there, by those in the rows."""

    source: QueueContext
    destination: QueueContext
    arrived: dict[str, str] = field(default_factory=dict)

    def carry(self) -> str:
        """Carry the messages that were moved so far; return why some of them may still be here."""
        there = RowDestination(self.destination.root.layout, self.destination.name, self.destination.layout)
        try:
            with self.source.error_context(_CARRIED):
                found = [row for row in rows(self.source.layout) if row.leads(self.source, there)]
            for row in found:
                for _ in carry(row, self.source, self.destination, arrived=self.arrived):
                    pass
        except DropqError as error:
            return str(error)
        return "this user may not read it"

    def has_left(self, given: str) -> bool:
        """Return whether a message has left the rows, by its name there: it is in the other queue."""
        with self.source.error_context(_CARRIED):
            return not any(reading.exists(f"{row.given}/{given}") for row in rows(self.source.layout))
