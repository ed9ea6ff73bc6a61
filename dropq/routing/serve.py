"""Serves one queue, or all queues of a root: passes in one thread, and one wait for a change in any of their folders.

Only a queue in which something happened gets a pass. Some changes give no event, such as the end of a lease: so queues
where messages wait, or are held, get a pass each second.

Invariant: a queue of a root that cannot be served keeps no other from being served.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable

from dropq.errors import DropqError, NoSuchQueue
from dropq.format.layout import QueueLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import find_layout, open_queue
from dropq.lifecycle.queue_notes import addresses
from dropq.lifecycle.timing import Timing
from dropq.queue.subscription import SweepOnTheWay
from dropq.routing.router import Folders, Router, Taken
from dropq.storage import reading
from dropq.storage.failures import describe, error_context
from dropq.storage.watch import RESCAN, Watch

log = logging.getLogger("dropq")

#: Checking queues where nothing waits, and listing the root, each take at most one part in this many of a processor.
IDLE_SHARE = 300
#: Seconds after which such a queue is checked, however many there are.
IDLE_LIMIT = 60.0
#: Seconds after which the root is listed, however many queues there are: a new queue waits no longer.
LIST_LIMIT = 5.0


def serve_once(served: Router | Routers, stopped: Callable[[], bool]) -> None:
    """Make one pass, and another if it found credits without a message; DropqError as of `Serving.run`."""
    served.one_pass(stopped)
    if not stopped() and served.find_credits():
        served.one_pass(stopped)


class Serving:
    """Makes a pass over a queue each time that a message there may be moved."""

    def __init__(self, served: Router | Routers) -> None:
        self._served = served
        self._watch = Watch()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Make passes until `stopped` returns True, or one fails; call `wake` then. What was moved stays moved."""
        changed = None
        while not stopped():
            served = self._served.serve(stopped, changed)
            changed = frozenset(address for address, folders in served.items() if self._watch.follow(address, *folders))
            if changed:
                continue  # RACE: another pass sees what changed before the watch of a new folder began
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


class _Service:
    """The router of one queue of a root, and when to serve it again."""

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
        began = time.thread_time()
        (self.folders,) = self.router.serve(stopped, None).values()
        self.is_idle = self.router.is_idle
        now, took = time.monotonic(), time.thread_time() - began
        self.rests_until = now + (0 if self.router.has_moved else timing.rest(took))
        self.due = max(now + self.router.again, self.rests_until)
        return self.router.has_moved


class Routers:
    """The routers of a root: one for each topic, and for each queue and subscription that has routes or selectors.

    They serve a queue with events or waiting messages as its own router would. They check a queue that does not change
    with time now and then: the more queues there are, the less often. `sweep` returns the sweep of a queue's router.
    """

    def __init__(self, root: RootContext, *, sweep: Callable[[QueueContext], SweepOnTheWay]) -> None:
        self._root = root
        self._sweep = sweep
        self._services: dict[str, _Service] = {}
        self._ended: set[str] = set()
        #: How many messages each queue's routes and selectors took until now, by the queue's address.
        self.taken: dict[str, Taken] = {}
        self._distributed = 0
        self._lists_at = 0.0
        #: Why queues are not served now, by address; the log says so once.
        self.passed_over: dict[str, str] = {}
        #: Whether the last `serve` moved, copied or distributed a message.
        self.has_moved = False
        #: The seconds for which not to serve again, whatever changes: a long pass moved nothing.
        self.rests_for = 0.0

    def one_pass(self, stopped: Callable[[], bool] = bool) -> None:
        """Make one pass over each queue that has something to serve; list the root at most once a second."""
        self._list_if_due()
        for address, service in list(self._services.items()):
            if stopped():
                return
            self._one_pass(address, service, stopped)

    def serve(self, stopped: Callable[[], bool], changed: frozenset[str] | None) -> dict[str, Folders]:
        """Make a pass over each queue in whose folders something happened, or that is due.

        Return the folders to watch now, of each queue that got a pass, or is served no more. `stopped` says whether to
        end the pass after the message at hand; `changed` is None if it is not known in which queues something happened.
        """
        began, self.has_moved = time.thread_time(), False
        self._list_if_due()
        now, served = time.monotonic(), dict[str, Folders]()
        idle_for = IDLE_SHARE * sum(service.took for service in self._services.values())
        for address, service in list(self._services.items()):
            if changed is not None and address in changed:
                service.wake(now)
            if stopped():
                break
            if service.due <= now or (changed is None and service.rests_until <= now):
                if not service.is_idle or not self._is_still_idle(address, service, idle_for):
                    self._one_pass(address, service, stopped)
                served[address] = service.folders
        served |= dict.fromkeys(self._ended - self._services.keys(), Folders())
        self._ended.clear()
        took = time.thread_time() - began
        self.rests_for = 0.0 if self.has_moved or changed is not None else self._root.timing.rest(took)
        return served

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
        """Sweep an idle queue, if that is due; if it is still idle, check it again after about `idle_for` seconds."""
        began = time.thread_time()
        try:
            service.router.sweep()
            service.is_idle = service.router.is_idle
            service.took = time.thread_time() - began
            if not service.is_idle or not _has_something(service.layout):
                return False
        except (DropqError, OSError) as error:
            self._pass_over(address, error)
            return True
        service.due = _in_about(min(max(idle_for * random.uniform(1, 2), RESCAN), IDLE_LIMIT))
        return True

    def find_credits(self) -> int:
        """Return how many credits without a message were found and removed by two audits, a second apart."""
        found = 0
        for address, service in list(self._services.items()):
            try:
                found += service.router.find_credits()
            except (DropqError, OSError) as error:
                self._pass_over(address, error)
        return found

    def _list_if_due(self) -> None:
        """Begin to serve the queues that have something to serve now, and end the routers of those that are gone."""
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
        """Begin to serve a queue; end its router first if its folder is another now; return the processor time in s."""
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
        router = Router(context, sweep=self._sweep(context), taken=self.taken.get(address))
        self.taken[address] = router.taken
        self._services[address] = _Service(router, layout)
        return time.thread_time() - began

    def _pass_over(self, address: str, error: DropqError | OSError) -> None:
        """Serve a queue no more until the root is listed again; log why, once for each reason."""
        self._end(address)
        why = describe(error)
        if self.passed_over.get(address) != why:
            log.warning("%s is passed over: %s", address, why)
        self.passed_over[address] = why

    def _end(self, address: str) -> None:
        """End the router of a queue, if it has a router; keep what that counted."""
        if (service := self._services.pop(address, None)) is not None:
            self._ended.add(address)
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
    def distributed(self) -> int:
        """How many messages of topics were distributed until now, with those that went to a route."""
        return self._distributed + sum(service.router.distributed for service in self._services.values())

    @property
    def has_unusable(self) -> bool:
        """Whether a queue is passed over, or has a route in use or a selector that cannot be used."""
        return bool(self.passed_over) or any(service.router.has_unusable for service in self._services.values())


def _refuse_gone(address: str, *, is_there: bool) -> None:
    if not is_there:
        raise NoSuchQueue(f"queue {address!r} is gone")


def _in_about(seconds: float) -> float:
    """Return a time by `time.monotonic()`: a whole second, so that one wake-up is for many queues."""
    return math.ceil(time.monotonic() + seconds - 0.5)


def _has_something(layout: QueueLayout) -> bool:
    """Return whether a queue has something to serve: routes, selectors, or what is published."""
    return layout.is_topic or reading.exists(layout.routes_file) or bool(reading.names_in(layout.selectors))
