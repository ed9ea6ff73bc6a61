"""The credit audit: it finds credits whose messages are gone, after a crash or a script.

A credit is live while its message is in the queue that the credit names, or on its way to it from another file system,
or while a credit of that queue lists it in `below`. A message goes from that way to the queue's folders, from these to
its credits, and back: an audit lists them in this order, and the folders again.

Invariant: an audit removes no credit of a message that is under way; at worst it leaves one that nobody needs.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator

from dropq.errors import DropqError
from dropq.format.credits import Credit, Via, is_key, is_token, via_of
from dropq.format.layout import QueueLayout
from dropq.format.staged import OwnPart, StagedFolder
from dropq.lifecycle import credits
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.processing import is_dropped
from dropq.lifecycle.queue_notes import why_away
from dropq.lifecycle.transfers import vias_in_transit
from dropq.policies.lock import PolicyLock
from dropq.storage import reading
from dropq.storage.watch import Watch

log = logging.getLogger("dropq")

#: The credits that were read before.
Read = dict[Via, Credit]
#: How many of them are remembered.
REMEMBERED = 200_000
#: Seconds between two audits, and between the two that must find a credit without a message.
AUDIT_INTERVAL = 1.0


class CreditAudit:
    """The audits of the credits of one queue, for one process; `known` has its audits of other queues, by address."""

    def __init__(self, context: QueueContext, *, known: dict[str, CreditAudit] | None = None) -> None:
        self._context = context
        self._lock = PolicyLock(context)
        self._idle: dict[Via, float] = {}
        self._due_at = 0.0
        self._known = {} if known is None else known
        self._known[context.name] = self
        self._read: Read = {}  # a credit never changes

    def run_twice(self) -> int:
        """Audit, and again if credits without a message were found; return how many credits were removed."""
        removed = self.run()
        if any(audit._idle for audit in self._known.values()):
            watch = Watch(self._context.layout.credits)
            while (left := self._due_at - time.monotonic()) > 0:
                watch.wait(left)
            removed += self.run()
        return removed

    def run(self) -> int:
        """Audit, unless the last audit was less than `AUDIT_INTERVAL` ago; return how many credits were removed.

        A credit of the next queue may keep a credit of this queue live, so that queue is audited first. OSError if a
        folder cannot be listed; then nothing was removed.
        """
        began = time.monotonic()
        if began < self._due_at or not reading.exists(self._context.layout.credits):
            return 0
        self._due_at = began + AUDIT_INTERVAL  # before the others: queues may send to each other
        removed = sum(audit.run() for audit in self._further())
        with self._lock.acquire() as locked:
            if not locked:
                return removed
            idle = {via: self._idle.get(via, began) for via in idle_credits(self._context, self._read)}
            over = [via for via, since in idle.items() if began - since >= AUDIT_INTERVAL]
            for via in over:
                credits.unspend(self._context, via)
        self._idle = {via: since for via, since in idle.items() if via not in over}
        if len(self._read) > REMEMBERED:
            self._read = {}
        now = time.monotonic()
        self._due_at = now + max(AUDIT_INTERVAL, self._context.timing.listing_share * (now - began))
        return removed + len(over)

    def _further(self) -> list[CreditAudit]:
        """Return the audits of those queues that messages went to and that spend credits themselves."""
        further = list[CreditAudit]()
        present = all_credits(self._context.layout, self._read)  # before the lock: what is read now is known then
        for address in sorted({said.to for _, said in present if said is not None}):
            layout = credits.layout_of(self._context.root.layout, address)
            if layout is None or not reading.exists(layout.credits):
                continue
            try:
                audit = self._known.get(address) or CreditAudit(
                    open_queue(self._context.root, address), known=self._known
                )
            except DropqError as error:
                log.info("the credits of %s are not looked at: %s", address, error)
            else:
                further.append(audit)
        return further


def idle_credits(context: QueueContext, read: Read | None = None) -> list[Via]:
    """Return the credits that a queue has spent, and that belong to no message; call it under the policy lock.

    `read` has the credits that were read before, and gets those that are read now. OSError if a folder cannot be
    listed: then nothing is known.
    """
    idle = list[Via]()
    on_the_way = set(vias_in_transit(context.layout))
    by_target: dict[str, list[Via]] = {}
    for via, said in all_credits(context.layout, read):
        if said is None:
            idle.append(via)  # half written, by a process that was killed before its message was moved
        else:
            by_target.setdefault(said.to, []).append(via)
    for address, vias in by_target.items():
        live = _live(context, address, read)
        idle += [via for via in vias if live is not None and via not in live and via not in on_the_way]
    return idle


def all_credits(layout: QueueLayout, read: Read | None = None) -> Iterator[tuple[Via, Credit | None]]:
    """Yield the credits that a queue has spent, with their content, or None if it is damaged; `read` as above."""
    known = {} if read is None else read
    for token in sorted(filter(is_token, reading.names_in(layout.credits))):
        try:
            folder = reading.open_below(layout.private, os.path.basename(layout.credits), token)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            continue  # a file, or a link: fsck reports it
        if folder is None:
            continue
        try:
            for key in filter(is_key, os.listdir(folder)):
                via = Via(token, key)
                said = known.get(via) or credits.read_in(folder, key)
                if said is not None:
                    known[via] = said
                yield via, said
        finally:
            os.close(folder)


def _live(context: QueueContext, address: str, read: Read | None = None) -> set[Via] | None:
    """Return the credits under which messages are in a queue, or have left it; None if that is not known."""
    root = context.root.layout
    layout = credits.layout_of(root, address)
    if layout is None:
        return None if why_away(root, address) else set()
    live = set(vias_in(layout))
    for _, said in all_credits(layout, read):
        live.update(() if said is None else said.below)
    live.update(vias_in(layout))
    if credits.layout_of(root, address) is None:
        return None  # RACE: it was deleted meanwhile
    return live


def vias_in(layout: QueueLayout) -> Iterator[Via]:
    """Yield the credits under which messages are in a queue; list its folders in the order in which messages pass."""
    return (via for via in map(via_of, _files(layout)) if via is not None)


def _files(layout: QueueLayout) -> Iterator[str]:
    for folder in (layout.delayed, layout.target, layout.processing):
        yield from reading.names_in(folder)
    for name in reading.names_in(layout.staged):
        if (staged := StagedFolder.of(name)) is not None:
            if not is_dropped(f"{layout.staged}/{name}"):
                yield staged.own_name
            for file in reading.names_in(f"{layout.staged}/{name}"):
                part = OwnPart.of(file)
                yield file if part is None else part.own_name
    for folder in (layout.target, layout.delayed):
        yield from reading.names_in(folder)
