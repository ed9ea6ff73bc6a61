"""Serves one queue, or all queues of a root: passes in one thread, and one wait for a change in any of their folders.

The events say in which queue something happened, and a pass is made over that queue alone. What gives no event, as the
end of a lease, happens only where something waits, or is held: there a pass is made each second.

Invariant: a queue of a root that cannot be served keeps no other from being served.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dropq.errors import DropqError, NoSuchQueue
from dropq.format.layout import QueueLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import find_layout, open_queue
from dropq.lifecycle.queue_notes import addresses
from dropq.lifecycle.timing import Timing
from dropq.queue.subscription import SweepOnTheWay
from dropq.routing.router import Folders, Router
from dropq.storage import reading
from dropq.storage.failures import describe, error_context
from dropq.storage.watch import RESCAN, Watch

log = logging.getLogger("dropq")

#: Queues where nothing waits are looked at without an event, and the root is listed, only so often that this takes one
#: part in as many of a processor.
IDLE_SHARE = 300
#: Seconds after which such a queue is looked at however many there are.
IDLE_LIMIT = 60.0
#: Seconds after which the root is listed however many queues there are: a new one waits no longer.
LIST_LIMIT = 5.0


class Served(Protocol):
    """What is served: a `Router`, or the `Routers` of a root."""

    @property
    def has_moved(self) -> bool:
        """Whether the last `serve` moved, copied or distributed a message."""

    @property
    def rests_for(self) -> float:
        """The seconds for which not to serve again, whatever changes: much was looked at, and nothing moved."""

    @property
    def again(self) -> float:
        """The seconds after which to serve again without an event."""

    def serve(self, stopped: Callable[[], bool], changed: frozenset[str] | None) -> dict[str, Folders]:
        """Make a pass over what waits in each queue that is due.

        Args:
            stopped: whether to end the pass after the message at hand.
            changed: the addresses of the queues in whose folders something happened; None if that is not known.

        Returns:
            Of each queue that was looked at, or is served no more, the folders that are to be watched now.
        """

    def one_pass(self, stopped: Callable[[], bool]) -> None:
        """Make a pass over what waits in all queues."""

    def find_credits(self) -> int:
        """Return how many credits without a message were found and removed."""


def serve_once(served: Served, stopped: Callable[[], bool]) -> None:
    """Make one pass, and another if it found credits without a message; raise what `run` of `Serving` does."""
    served.one_pass(stopped)
    if not stopped() and served.find_credits():
        served.one_pass(stopped)


class Serving:
    """Makes a pass each time that there may be something to move, over the queues where that is."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._watch = Watch()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Make passes until it is stopped.

        Args:
            stopped: whether to end; call `wake` once it is so.

        Raises:
            DropqError: a pass failed; what was moved stays moved.
        """
        changed = None
        while not stopped():
            looked = self._served.serve(stopped, changed)
            changed = frozenset(
                {address for address, folders in looked.items() if self._watch.follow(address, *folders)}
            )
            if changed:
                continue  # RACE: what changed before the watch of a new folder began is seen by another pass
            if self._served.has_moved:
                self._watch.begin()
            elif self._served.rests_for > 0:
                self._watch.rest(self._served.rests_for)
            if not stopped():  # RACE: what stops it later ends the wait
                self._watch.wait(self._served.again)
            changed = self._watch.changed()

    def wake(self) -> None:
        """Let `run` see whether it is stopped; any thread and any signal handler may call this."""
        self._watch.wake()


class Taken(NamedTuple):
    """How many messages the routes of a queue took, by name, and its selectors."""

    routes: Counter[str]
    selectors: Counter[str]


class _Service:
    """The router of one queue of a root, and when to look there again."""

    def __init__(self, router: Router, layout: QueueLayout) -> None:
        self.router = router
        self.layout = layout
        self.folders = Folders()
        self.inode = reading.inode_or_none(layout.target)
        self.is_idle = False
        self.due = self.rests_until = 0.0
        self.took = 0.0  # seconds of a processor, for the last check while it was idle

    def wake(self, now: float) -> None:
        """Let a pass be made as soon as it has rested from the last one."""
        self.due, self.is_idle = min(self.due, max(now, self.rests_until)), False

    def one_pass(self, stopped: Callable[[], bool], timing: Timing) -> bool:
        """Make a pass; return whether a message was moved, copied or distributed."""
        before, began = self.router.total, time.thread_time()
        self.router.one_pass(stopped)
        has_moved = self.router.total > before
        self.is_idle = self.router.is_idle
        self.folders = Folders(self.router.arrivals, self.router.departures)
        now, took = time.monotonic(), time.thread_time() - began
        self.rests_until = now + (0 if has_moved else timing.rest(took))
        self.due = max(now + self.router.again, self.rests_until)
        return has_moved

    def is_still_idle(self) -> bool:
        """Sweep, if that is due; return whether nothing came since of which no event told."""
        began = time.thread_time()
        self.router.sweep()
        self.is_idle = self.router.is_idle
        self.took = time.thread_time() - began
        return self.is_idle


class Routers:
    """The routers of a root: one for each topic, and for each queue and subscription that has routes or selectors.

    Where something happened, or waits, they look as the router of one queue does. Where nothing is that may change with
    time, they look now and then, the more seldom the more queues there are.

    Args:
        sweep: returns the sweep that the router of a queue does on the way.

    Attributes:
        passed_over: why queues are not served now, by address; the log says so once.
        has_moved, rests_for: of the last `serve`, as `Served` says.
    """

    def __init__(self, root: RootContext, *, sweep: Callable[[QueueContext], SweepOnTheWay]) -> None:
        self._root = root
        self._sweep = sweep
        self._services: dict[str, _Service] = {}
        self._ended: set[str] = set()
        self._taken: dict[str, Taken] = {}
        self._distributed = 0
        self._lists_at = 0.0
        self.passed_over: dict[str, str] = {}
        self.has_moved = False
        self.rests_for = 0.0

    def one_pass(self, stopped: Callable[[], bool] = bool) -> None:
        """Make one pass over each queue that has something to serve; look for others at most once a second."""
        self._list_if_due()
        for address, service in list(self._services.items()):
            if stopped():
                return
            self._one_pass(address, service, stopped)

    def serve(self, stopped: Callable[[], bool], changed: frozenset[str] | None) -> dict[str, Folders]:
        """Make a pass over each queue in whose folders something happened, or that is due, as `Served` says."""
        began, self.has_moved = time.thread_time(), False
        self._list_if_due()
        now, looked = time.monotonic(), dict[str, Folders]()
        idle_for = IDLE_SHARE * sum(service.took for service in self._services.values())
        for address, service in list(self._services.items()):
            if changed is not None and address in changed:
                service.wake(now)
            if stopped():
                break
            if service.due <= now or (changed is None and service.rests_until <= now):
                if not service.is_idle or not self._is_still_idle(address, service, idle_for):
                    self._one_pass(address, service, stopped)
                looked[address] = service.folders
        looked |= dict.fromkeys(self._ended - self._services.keys(), Folders())
        self._ended.clear()
        took = time.thread_time() - began
        self.rests_for = 0.0 if self.has_moved or changed is not None else self._root.timing.rest(took)
        return looked

    def _one_pass(self, address: str, service: _Service, stopped: Callable[[], bool]) -> None:
        try:
            self.has_moved |= service.one_pass(stopped, self._root.timing)
            if not _has_something(service.layout):
                _refuse_gone(address, is_there=reading.exists(service.layout.target))
                self._end(address)
        except (DropqError, OSError) as error:
            self._pass_over(address, error)
        else:
            self.passed_over.pop(address, None)

    def _is_still_idle(self, address: str, service: _Service, idle_for: float) -> bool:
        """Look at a queue that was idle; return whether it still is: then look again after about so many seconds."""
        try:
            if not service.is_still_idle() or not _has_something(service.layout):
                return False
        except (DropqError, OSError) as error:
            self._pass_over(address, error)
            return True
        service.due = _in_about(min(max(idle_for * random.uniform(1, 2), RESCAN), IDLE_LIMIT))
        return True

    def find_credits(self) -> int:
        """Return how many credits without a message were found and removed: this audits twice, a second apart."""
        found = 0
        for address, service in list(self._services.items()):
            try:
                found += service.router.find_credits()
            except (DropqError, OSError) as error:
                self._pass_over(address, error)
        return found

    def _list_if_due(self) -> None:
        """Begin to serve what has something to serve now, and end what is gone."""
        if time.monotonic() < self._lists_at:
            return
        began, opening = time.thread_time(), 0.0
        closed = dict[str, OSError]()
        with error_context("nothing was changed"):
            present = set(addresses(self._root.layout, closed.__setitem__))
        for address in sorted({*present, *self._services}):
            try:
                opening += self._begin_or_end(address, is_there=address in present)
            except (DropqError, OSError) as error:
                self._pass_over(address, error)
        below = {f"{topic}/": why for topic, why in closed.items()}  # its subscriptions, and the topics below it
        for address, why in below.items():
            self._pass_over(address, why)
        for address in self.passed_over.keys() - below.keys():
            if address not in present or find_layout(self._root.layout.path, address) is None:
                del self.passed_over[address]
        took = time.thread_time() - began - opening  # the next one does not open them again
        self._lists_at = _in_about(min(max(RESCAN, IDLE_SHARE * took), LIST_LIMIT))

    def _begin_or_end(self, address: str, *, is_there: bool) -> float:
        """Begin to serve a queue, or end one whose folder is another now; return the seconds of processor time."""
        if (service := self._services.get(address)) is not None:
            inode = reading.inode_or_none(service.layout.target)
            _refuse_gone(address, is_there=is_there and inode is not None)
            if inode == service.inode:
                return 0.0
            self._end(address)
        layout = find_layout(self._root.layout.path, address)
        if layout is None or not _has_something(layout):
            return 0.0
        began = time.thread_time()
        context = open_queue(self._root, address)
        self._services[address] = _Service(Router(context, sweep=self._sweep(context)), layout)
        return time.thread_time() - began

    def _pass_over(self, address: str, error: DropqError | OSError) -> None:
        """Serve a queue no more until the root is listed again; log why, unless the log says so already."""
        self._end(address)
        why = describe(error)
        if self.passed_over.get(address) != why:
            log.warning("%s is passed over: %s", address, why)
        self.passed_over[address] = why

    def _end(self, address: str) -> None:
        """End the router of a queue, if there is one; keep what it counted."""
        if (service := self._services.pop(address, None)) is not None:
            self._ended.add(address)
            self._taken[address] = self._taken_by(address, service.router)
            self._distributed += service.router.distributed
            service.router.close()

    def close(self) -> None:
        """End all routers; what they moved stays moved."""
        for address in list(self._services):
            self._end(address)

    @property
    def again(self) -> float:
        """The seconds after which to serve again without an event."""
        due = min((service.due for service in self._services.values()), default=self._lists_at)
        return max(min(due - time.monotonic(), RESCAN), 0.001)

    # -- what was done -------------------------------------------------------------------------------------------------

    @property
    def taken(self) -> dict[str, Taken]:
        """How many messages each queue's routes and selectors took until now, by the queue's address."""
        return self._taken | {
            address: self._taken_by(address, service.router) for address, service in self._services.items()
        }

    def _taken_by(self, address: str, router: Router) -> Taken:
        before = self._taken.get(address, Taken(Counter(), Counter()))
        return Taken(before.routes + router.moved, before.selectors + router.selected)

    @property
    def distributed(self) -> int:
        """How many messages of topics were distributed until now; those that went to a route count, too."""
        return self._distributed + sum(service.router.distributed for service in self._services.values())

    @property
    def has_unusable(self) -> bool:
        """Whether a queue is passed over, or has a route in use or a selector that cannot be used."""
        return bool(self.passed_over) or any(service.router.has_unusable for service in self._services.values())


def _refuse_gone(address: str, *, is_there: bool) -> None:
    """Raise NoSuchQueue for a queue that is not there any more."""
    if not is_there:
        raise NoSuchQueue(f"queue {address!r} is gone")


def _in_about(seconds: float) -> float:
    """Return a time by `time.monotonic()`: a whole second, so that one wake-up is for many queues."""
    return math.ceil(time.monotonic() + seconds - 0.5)


def _has_something(layout: QueueLayout) -> bool:
    """Return whether a queue has something to serve: routes, selectors, or what is published."""
    return layout.is_topic or reading.exists(layout.routes_file) or bool(reading.names_in(layout.selectors))
