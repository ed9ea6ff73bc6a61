"""An attempt to receive from a queue with a policy: find a message first, then take it under the policy lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import TypeVar

from dropq.errors import DropqError, LeaseLost, StorageError
from dropq.format.claims import Claim
from dropq.format.message_file import MessageFile
from dropq.lifecycle.settlement import Claims, Settlement
from dropq.policies.receive_policies import ReceivePolicies
from dropq.queue.offers import Offers

log = logging.getLogger("dropq")

T = TypeVar("T")


class Admission:
    """Takes what the subscription is offered, as far as the policies allow."""

    def __init__(self, policies: ReceivePolicies, offers: Offers, claims: Claims) -> None:
        self.policies = policies
        self._offers = offers
        self._claims = claims
        #: Whether others took what was offered here: then check that a message still waits before taking the lock.
        self._others_take = False
        #: How many more messages the subscription is about to ask for: they are claimed while the lock is held.
        self.more = 0
        self._ahead: list[tuple[Claim, Settlement, MessageFile | None]] = []

    def take(self, listings: int) -> tuple[Claim, Settlement, MessageFile | None] | None:
        """Claim the next message, or the share of a barrier; return it with what settles it, or None."""
        with suppress(IndexError):  # RACE: a signal handler may give back what its thread claimed ahead
            return self._ahead.pop(0)
        met = raced = False
        policies = self.policies
        if policies.still_wait:
            return None
        for file, is_barrier in chain(self._candidates(listings), ((None, False),)):
            if file is None and not policies.have_barriers:
                policies.have_nothing()
                break
            if file is not None:
                if self._others_take and not is_barrier and self._offers.is_gone(file):
                    raced = True
                    continue
                self._offers.put_back(file)  # until it is taken: an error is not to lead past it
                # A route takes a message whosever turn it is: then all is decided under the lock.
                if not is_barrier and not self._offers.routes.in_use and policies.leaves(file):
                    return None
            taken = None
            with policies.entered() as alone:
                if alone and file is not None and policies.view_is_old and not policies.must_wait:
                    policies.view_is_old = False
                    self._offers.refresh()  # a barrier that came back is before what was behind it
                    continue
                if alone and file is not None and is_barrier and not policies.must_wait:
                    met |= self._meet_barrier(file, again=met)
                if alone:
                    taken = self._take_alone(None if is_barrier else file)
                if taken is not None:
                    policies.passed()
                    self._others_take = raced
                    if self.more > 0 and policies.only_limits:
                        self._take_ahead(taken[0])
                elif alone and (file is None or policies.must_wait):
                    policies.waits()
                elif alone and not is_barrier:
                    raced = self._others_take = True
            if taken is not None or policies.must_wait:
                return taken
        self._offers.raise_refused()
        return None

    def _take_ahead(self, claim: Claim | None) -> None:
        """Claim more messages of the view, as many as are asked for and the limit allows, after a first claim."""
        policies, offers = self.policies, self._offers
        try:
            while len(self._ahead) < self.more:
                if claim is not None:
                    policies.note(claim)
                if policies.must_wait or (file := offers.next()) is None:
                    return
                claim = None
                if not offers.settle_acked(file) and offers.wants(file) and not offers.expire(file):
                    claim = self._claim(file)
                if claim is not None:
                    self._ahead.append((claim, self._claims, file))
        except DropqError as error:
            log.warning("receive_many: no more is claimed ahead: %s", error)  # what was claimed is the caller's

    def note_quiet(self) -> bool:
        """Note that nothing waits, as target/ is empty; return False where a share of a barrier may be taken."""
        if self.policies.have_barriers:
            return False
        self.policies.note_quiet()
        return True

    def give_back_ahead(self) -> None:
        """Give back what was claimed for requests that did not come."""
        with suppress(IndexError):
            while True:
                claim = self._ahead.pop()[0]
                try:
                    self._claims.release(claim, counted=False)
                except LeaseLost:
                    continue
                except DropqError as error:  # it returns as the subscription closes, or by a sweep
                    log.warning("a message that was claimed ahead could not be given back: %s", error)

    def _candidates(self, listings: int) -> Iterator[tuple[MessageFile | None, bool]]:
        """Yield the waiting messages that it wants, and the barriers, each with whether it is a barrier."""
        offers = self._offers
        while True:
            while (file := offers.next()) is not None:
                if offers.settle_acked(file):
                    continue
                if self.policies.is_barrier(file):
                    yield file, True
                elif offers.wants(file) and not offers.expire(file):
                    yield file, False
            if not offers.more(listings):
                return

    def _take_alone(self, file: MessageFile | None) -> tuple[Claim, Settlement, MessageFile | None] | None:
        """Take the share of a barrier that is handed out, or else a message; call this with the policy lock."""
        policies, offers = self.policies, self._offers
        shared = policies.share(
            lambda: next(offers.owners), offers.deadline, lambda name: not offers.has_returned(MessageFile(name))
        )
        if shared is not None:
            return *shared, None
        if file is None or policies.must_wait:
            return None
        claim = self._claim(file)
        if not policies.must_wait:
            offers.next()  # it was this one: it is taken, or gone
        return None if claim is None else (claim, self._claims, file)

    def _claim(self, file: MessageFile) -> Claim | None:
        """Claim a message, unless the policies leave it to another consumer, or it goes to a route; else None."""
        policies = self.policies
        try:
            if self._offers.route_waiting(file) is not None or not policies.admits(file):
                return None
            claim = self._claims.claim(file, next(self._offers.owners), self._offers.deadline())
            if claim is None:
                self._offers.defer(file)
            elif policies.breaks():
                self._claims.release(claim, counted=False)
                return None
        except StorageError as error:
            self._offers.pass_over(file, error)
            return None
        return claim

    def _meet_barrier(self, barrier: MessageFile, *, again: bool) -> bool:
        """Hand out a barrier if no message waits before it; else take the messages before it first.

        If it is met `again` in one attempt, it waits for messages that this consumer may not take.

        Returns:
            Whether it is still a barrier: if a route takes it, it holds nothing back.
        """
        policies, offers = self.policies, self._offers
        if offers.route_waiting(barrier) is not None:
            offers.next()
            return False
        if not policies.is_ready_for(barrier):
            return True
        offers.refresh()
        first = next(filter(policies.is_here, iter(offers.next, None)), None)
        if first is not None:
            offers.put_back(first)
            is_first = first.filename == barrier.filename
            if is_first or again:
                policies.hand_out(barrier, offers.settling_before(first) if is_first else 1)
        return True

    def after_others(self, attempt: Callable[[], T | None], is_closed: Callable[[], bool]) -> T | None:
        """Try again while it is another subscription's turn: that has a moment to take its message."""
        until = time.monotonic() + self._claims.context.timing.turns_wait
        found = None
        while found is None and self.policies.decision.why == "turn" and time.monotonic() < until and not is_closed():
            self.policies.wait_for_turn()
            found = attempt()
        return found
