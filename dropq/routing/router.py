"""A router serves the routes and the selectors of a queue; a message that none of them takes stays in target/.

In a topic it distributes what is published, which asks the topic's routes first. Elsewhere it claims nothing: each
message goes by one rename, and no delivery is counted. If a consumer claims the same message, the first rename decides.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from dropq.carrier.carriers import Carriers
from dropq.carrier.lists import LIST_LENGTH
from dropq.errors import DropqError, StorageError
from dropq.format.claims import router_claims
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transfers import in_transit
from dropq.policies import routes
from dropq.queue.offers import UNTOUCHED, Offers
from dropq.queue.subscription import SweepOnTheWay
from dropq.routing.credit_audit import CreditAudit
from dropq.routing.mover import Mover
from dropq.routing.registry import finish_removed
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.watch import RESCAN
from dropq.topics.distribution import Distributor

log = logging.getLogger("dropq")

#: The fewest seconds after which a router tries all that waits, although no selector has a credit left: a message may
#: be unroutable.
TRY_ALL = 1.0
#: Seconds that the router's claim lasts on a message that it archives, as its ack came before it.
LEASE = 60.0


class Folders(NamedTuple):
    """The watched folders of a queue: a file that comes into an arrival, or leaves a departure, may start a move."""

    arrivals: Sequence[str] = ()
    departures: Sequence[str] = ()


class Taken(NamedTuple):
    """How many messages each route and each selector of a queue took, by name."""

    routes: Counter[str]
    selectors: Counter[str]


class Router:
    """Moves the waiting messages of a queue into the folders of its routes, and where its selectors say.

    It does the `sweep` on the way, if there is one, as messages that this delivers may go to a route. It counts on in
    what was `taken` before. What is said of the last `serve` is as of `Routers`.
    """

    def __init__(self, context: QueueContext, *, sweep: SweepOnTheWay | None, taken: Taken | None = None) -> None:
        self._context = context
        self._sweep = sweep
        deadline = partial(lease_end, context.clock, LEASE)
        self._offers = Offers(context, None, filter=None, owners=router_claims(), deadline=deadline)
        self.taken = Taken(Counter(), Counter()) if taken is None else taken
        self.moved, self.selected = self.taken
        self._mover = Mover(context, self.selected)
        self._audit = CreditAudit(context)
        self._carriers = Carriers(context)
        self._tries_all_at = 0.0
        self._rest: deque[MessageFile] | None = None
        self._refresh_at = 0.0
        self._paused = False
        #: How many messages of a topic were distributed until now, with those that went to a route.
        self.distributed = 0
        self.has_moved = False
        self.rests_for = 0.0
        with context.error_context(UNTOUCHED):
            self._distributor = Distributor(context, self.moved) if context.layout.is_topic else None

    @property
    def total(self) -> int:
        """How many messages it moved, copied or distributed until now."""
        return self.moved.total() + self.selected.total() + self.distributed

    def one_pass(self, stopped: Callable[[], bool] = bool) -> None:
        """Make one pass over the queue: sweep, if that is due, then do what routes and selectors say with each message.

        Then carry messages to other file systems. `stopped` says whether to end the pass after the message at hand. If
        a message cannot be moved, the error is raised after all others were moved.
        """
        self.sweep()
        try:
            self._route(stopped)
        finally:
            self._mover.rest()
            self._context.log.sums.tell_if_due()
            with self._context.error_context("the messages wait for the next router, or a sweep"):
                self._carriers.run()

    def _route(self, stopped: Callable[[], bool]) -> None:
        if self._distributor is not None:
            self.distributed += self._distributor.run(stopped=stopped)
            return
        self._refresh_at = 0.0
        may_move = self._may_move()
        known = self._mover.selectors
        with self._context.error_context(UNTOUCHED):
            if known.are_removed:
                finish_removed(self._context)
            if known.are_removed or (may_move and known.out_of_credit):
                self._run_audit(self._audit.run)
            may_take = not known.for_waiting or known.may_take
        if not may_move or (not may_take and time.monotonic() < self._tries_all_at):
            return
        self._try_each(stopped)

    def find_credits(self) -> int:
        """Return how many credits without a message were found and removed by two audits, a second apart."""
        with self._context.error_context(UNTOUCHED):
            return self._run_audit(self._audit.run_twice) if self._mover.selectors.out_of_credit else 0

    def _run_audit(self, run: Callable[[], int]) -> int:
        try:
            return run()
        except (OSError, DropqError) as error:  # no reason not to route; `dropq sweep` says it, too
            log.info("queue %s: its credits were not looked at: %s", self._context.name, describe(error))
            return 0

    def _try_each(self, stopped: Callable[[], bool]) -> None:
        offers, listings, carried = self._offers, self._offers.listings, self.total
        again, stayed = self._go_on(), list[MessageFile]()
        began = time.monotonic()
        tries_all = began >= self._tries_all_at  # also at what is behind a message that waits for a credit
        while not stopped() and self._may_move():
            if (file := again.popleft() if again else next(offers.view, None)) is None:
                listed = offers.listings
                if not offers.more(listings):
                    if tries_all and self._is_out_of_credit():
                        rest = (time.monotonic() - began) * self._context.timing.listing_share
                        self._tries_all_at = time.monotonic() + max(TRY_ALL, rest)
                    break
                if offers.listings > listed:
                    stayed.clear()  # they are offered again
            else:
                try:
                    if (name := offers.route_waiting(file)) is not None:
                        self.moved[name] += 1
                    elif not self._mover.take(file):
                        stayed.append(file)
                except StorageError as error:  # the others may be as good as before
                    offers.pass_over(file, error)
                if not tries_all and self._mover.blocked_by and self._is_out_of_credit():
                    again.extendleft(reversed(stayed))
                    self._rest = again  # those behind it need not be tried now
                    break
            if self.total - carried >= LIST_LENGTH:
                carried = self.total
                self._carriers.run()
        offers.raise_refused()

    def _go_on(self) -> deque[MessageFile]:
        """Return what the last pass left of a fresh view for want of credit; else list target/ again.

        A listing for each credit that is free again would cost the square of the number of messages.
        """
        rest, self._rest = self._rest, None
        if rest is None or time.monotonic() >= self._offers.fresh_until:
            self._offers.refresh()
            return deque()
        return rest

    def _is_out_of_credit(self) -> bool:
        with self._context.error_context(UNTOUCHED):
            return not self._mover.selectors.may_take

    def serve(self, stopped: Callable[[], bool], changed: frozenset[str] | None) -> dict[str, Folders]:
        """Make a pass whatever has changed; else as `Routers.serve`."""
        before, began = self.total, time.thread_time()
        self.one_pass(stopped)
        layout = self._context.layout
        with self._context.error_context(UNTOUCHED):
            changing = filter(reading.is_folder, (layout.base, layout.routing, layout.selectors, layout.delayed))
            folders = Folders([layout.target, *changing], self._mover.credit_folders)
        self.has_moved = self.total > before
        self.rests_for = 0.0 if self.has_moved else self._context.timing.rest(time.thread_time() - began)
        return {self._context.name: folders}

    @property
    def is_idle(self) -> bool:
        """Whether nothing here changes with time: each new message comes into one of the watched `Folders`.

        A queue whose upkeep has begun is not idle: each of the following slices is done as soon as it is due.
        """
        if self._sweep is not None and self._sweep.has_begun:
            return False
        layout, ignored = self._context.layout, self._context.sidecars.ignored
        known = self._mover.selectors
        with self._context.error_context(UNTOUCHED):
            if known.are_removed or known.out_of_credit or not reading.is_folder(layout.delayed):
                return False
            # RACE: a message in processing/ came from one of the others, and its return there gives an event.
            listed = (layout.target, layout.delayed, layout.processing)
            if any(not ignored(name) for folder in listed for name in reading.names_in(folder)):
                return False
            if reading.names_in(layout.staged):
                return False
            return not in_transit(layout) and not self._context.is_recovering

    @property
    def again(self) -> float:
        """The seconds after which to serve again without an event: a delay or a lease may have ended."""
        now = time.monotonic()
        again = RESCAN if self._sweep is None else self._sweep.again - now
        counts = self._mover.selectors.counts_at - now
        return max(min(again, RESCAN, counts if counts > 0 else RESCAN), 0.001)

    @property
    def has_unusable(self) -> bool:
        """Whether a route in use, or the file of a selector, cannot be used."""
        with self._context.error_context(UNTOUCHED):
            self._mover.refresh()
            return bool(self._mover.selectors.unusable or routes.examine(self._context)[1])

    def close(self) -> None:
        """End the signs of life of its distributors; what it moved stays moved."""
        if self._distributor is not None:
            self._distributor.close()
        if self._sweep is not None:
            self._sweep.close()

    def _may_move(self) -> bool:
        """Return whether a route or a selector is in use, and the queue is not paused; read that after `max_age`."""
        if time.monotonic() >= self._refresh_at:
            with self._context.error_context(UNTOUCHED):
                self._paused, has_routes = self._context.switches()
                self._offers.routes.refresh(are_there=has_routes)
                self._mover.refresh()
            self._refresh_at = time.monotonic() + self._context.timing.max_age
        return bool(self._offers.routes.in_use or self._mover.selectors.in_use) and not self._paused

    def sweep(self) -> None:
        """Sweep on the way, if that is due."""
        try:
            if self._sweep is not None and self._sweep.due:
                self._sweep.run()
        except (OSError, DropqError) as error:  # no reason not to route; `dropq sweep` raises it
            log.warning("queue %s was not swept: %s", self._context.name, describe(error))


def route(context: QueueContext, *, sweep: SweepOnTheWay | None) -> dict[str, int]:
    """Do what routes and selectors say with each waiting message, once, after the sweep; return how many each took."""
    router = Router(context, sweep=sweep)
    try:
        router.one_pass()
        if router.find_credits():
            router.one_pass()
    finally:
        router.close()
    return dict(router.moved + router.selected)
