"""Serves one queue, or all queues of a root: passes in one thread, and one wait for a change in any of their folders.

Invariant: a queue of a root that cannot be served keeps no other from being served.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dropq.errors import DropqError, NoSuchQueue
from dropq.format.layout import QueueLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import find_layout, open_queue, queue_names
from dropq.lifecycle.timing import Timing
from dropq.queue.subscription import SweepOnTheWay
from dropq.routing.router import Router
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.watch import RESCAN, Watch

log = logging.getLogger("dropq")


class Served(Protocol):
    """What is served: a `Router`, or the `Routers` of a root."""

    @property
    def total(self) -> int:
        """How many messages it moved, copied or distributed until now."""

    @property
    def arrivals(self) -> list[str]:
        """The folders of which a file that comes may let a message go."""

    @property
    def departures(self) -> list[str]:
        """The folders of which a file that leaves may let a message go."""

    @property
    def again(self) -> float:
        """The seconds after which to make a pass without an event."""

    def one_pass(self, stopped: Callable[[], bool]) -> None:
        """Make a pass over what waits."""

    def find_credits(self) -> int:
        """Return how many credits without a message were found and removed."""


def serve_once(served: Served, stopped: Callable[[], bool]) -> None:
    """Make one pass, and another if it found credits without a message; raise what `run` of `Serving` does."""
    served.one_pass(stopped)
    if not stopped() and served.find_credits():
        served.one_pass(stopped)


class Serving:
    """Makes a pass each time that there may be something to move.

    Args:
        served: what makes the passes.
        timing: how long the thread rests after a long pass that moved nothing.
    """

    def __init__(self, served: Served, timing: Timing) -> None:
        self._served = served
        self._timing = timing
        self._watched: tuple[list[str], list[str]] = ([], [])
        self._watch = Watch()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Make passes until it is stopped.

        Args:
            stopped: whether to end; call `wake` once it is so.

        Raises:
            DropqError: a pass failed; what was moved stays moved.
        """
        while not stopped():
            before, began = self._served.total, time.thread_time()
            self._served.one_pass(stopped)
            took = time.thread_time() - began
            if self._watches_anew():
                continue  # RACE: what changed before the new watch began is seen by another pass
            if self._served.total > before:
                self._watch.begin()
            elif took > self._timing.long_look:
                self._watch.rest(min(took * self._timing.listing_share, RESCAN))
            if not stopped():  # RACE: what stops it later ends the wait
                self._watch.wait(self._served.again)

    def wake(self) -> None:
        """Let `run` see whether it is stopped; any thread and any signal handler may call this."""
        self._watch.wake()

    def _watches_anew(self) -> bool:
        """Watch the folders that are served now; return False if it watches them already."""
        folders = self._served.arrivals, self._served.departures
        if folders == self._watched:
            return False
        arrivals, departures = self._watched = folders
        # RACE: what stops it wakes the watch of before; `run` looks whether it is stopped before it waits on this one.
        self._watch = Watch(*arrivals, leaving=departures)
        self._watch.observe()
        return True


class Taken(NamedTuple):
    """How many messages the routes of a queue took, by name, and its selectors."""

    routes: Counter[str]
    selectors: Counter[str]


class Routers:
    """The routers of a root: one for each topic, and for each queue and subscription that has routes or selectors.

    Args:
        root: the root.
        sweep: returns the sweep that the router of a queue does on the way.

    Attributes:
        passed_over: why queues are not served now, by address; the log says so once.
    """

    def __init__(self, root: RootContext, *, sweep: Callable[[QueueContext], SweepOnTheWay]) -> None:
        self._root = root
        self._sweep = sweep
        self._routers: dict[str, Router] = {}
        self._folders: dict[str, tuple[list[str], list[str]]] = {}
        self._taken: dict[str, Taken] = {}
        self._distributed = 0
        self._lists_at = 0.0
        self.passed_over: dict[str, str] = {}

    def one_pass(self, stopped: Callable[[], bool] = bool) -> None:
        """Make one pass over each queue that has something to serve; look for others at most once a second.

        Raises:
            StorageError: the root cannot be listed.
        """
        if time.monotonic() >= self._lists_at:
            self._list()
        for address, router in list(self._routers.items()):
            if stopped():
                return
            try:
                router.one_pass(stopped)
                self._folders[address] = router.arrivals, router.departures
            except (DropqError, OSError) as error:
                self._pass_over(address, error)
            else:
                self.passed_over.pop(address, None)

    def find_credits(self) -> int:
        """Return how many credits without a message were found and removed: this looks twice, a second apart."""
        found = 0
        for address, router in list(self._routers.items()):
            try:
                found += router.find_credits()
            except (DropqError, OSError) as error:
                self._pass_over(address, error)
        return found

    def _list(self) -> None:
        """Begin to serve what has something to serve, and end what has nothing any more."""
        began = time.monotonic()
        closed = dict[str, OSError]()
        present = queue_names(self._root, closed.__setitem__)
        for address in sorted({*present, *self._routers}):
            try:
                layout = find_layout(self._root.layout.path, address)
                if layout is None:
                    if address in self._routers:
                        raise NoSuchQueue(f"queue {address!r} is gone")
                elif not _has_something(layout):
                    self._end(address)
                elif address not in self._routers:
                    context = open_queue(self._root, address)
                    self._routers[address] = Router(context, sweep=self._sweep(context))
            except (DropqError, OSError) as error:
                self._pass_over(address, error)
        below = {f"{topic}/": why for topic, why in closed.items()}  # its subscriptions, and the topics below it
        for address, why in below.items():
            self._pass_over(address, why)
        for address in self.passed_over.keys() - {*present, *below}:
            del self.passed_over[address]
        now = time.monotonic()
        self._lists_at = now + max(RESCAN, self._root.timing.listing_share * (now - began))

    def _pass_over(self, address: str, error: DropqError | OSError) -> None:
        """Serve a queue no more until the root is listed again; log why, unless the log says so already."""
        self._end(address)
        why = describe(error)
        if self.passed_over.get(address) != why:
            log.warning("%s is passed over: %s", address, why)
        self.passed_over[address] = why

    def _end(self, address: str) -> None:
        """End the router of a queue, if there is one; keep what it counted."""
        self._folders.pop(address, None)
        if (router := self._routers.pop(address, None)) is not None:
            self._taken[address] = self._taken_by(address, router)
            self._distributed += router.distributed
            router.close()

    def close(self) -> None:
        """End all routers; what they moved stays moved."""
        for address in list(self._routers):
            self._end(address)

    # -- what `Serving` asks for ---------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """How many messages were moved, copied or distributed until now."""
        return self.distributed + sum(each.routes.total() + each.selectors.total() for each in self.taken.values())

    @property
    def arrivals(self) -> list[str]:
        """The folders of all queues that are served of which a file that comes may let a message go."""
        return [folder for arrivals, _ in self._folders.values() for folder in arrivals]

    @property
    def departures(self) -> list[str]:
        """The folders of all queues that are served of which a file that leaves may let a message go."""
        return [folder for _, departures in self._folders.values() for folder in departures]

    @property
    def again(self) -> float:
        """The seconds after which to make a pass without an event."""
        listing = max(self._lists_at - time.monotonic(), 0.001)
        return min((router.again for router in self._routers.values()), default=listing)

    # -- what was done -------------------------------------------------------------------------------------------------

    @property
    def taken(self) -> dict[str, Taken]:
        """How many messages each queue's routes and selectors took until now, by the queue's address."""
        return self._taken | {address: self._taken_by(address, router) for address, router in self._routers.items()}

    def _taken_by(self, address: str, router: Router) -> Taken:
        before = self._taken.get(address, Taken(Counter(), Counter()))
        return Taken(before.routes + router.moved, before.selectors + router.selected)

    @property
    def distributed(self) -> int:
        """How many messages of topics were distributed until now; those that went to a route count, too."""
        return self._distributed + sum(router.distributed for router in self._routers.values())

    @property
    def has_unusable(self) -> bool:
        """Whether a queue is passed over, or has a route in use or a selector that cannot be used."""
        return bool(self.passed_over) or any(router.has_unusable for router in self._routers.values())


def _has_something(layout: QueueLayout) -> bool:
    """Return whether a queue has something to serve: routes, selectors, or what is published."""
    return layout.is_topic or reading.exists(layout.routes_file) or bool(reading.names_in(layout.selectors))
