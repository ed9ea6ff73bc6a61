"""The receive policies of a queue, as one subscription meets them: limits, barriers and turns, under one lock.

Each attempt takes the lock, reads the state of the queue, claims a message, and releases the lock; where there is only
a limit, it claims as many as the consumer asks for and the limit allows. No dropq consumer of the queue changes that
state meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from dropq.format.claims import Claim
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.processing import claimed_messages
from dropq.lifecycle.settlement import Settlement
from dropq.policies.backlog import MAY_TAKE, Backlog
from dropq.policies.barrier import Barrier, give_up
from dropq.policies.fair_share import FairShare
from dropq.policies.filter_rest import FilterRest
from dropq.policies.lock import PolicyLock
from dropq.storage import reading
from dropq.storage.failures import describe, error_context
from dropq.storage.watch import RESCAN

log = logging.getLogger("dropq")

#: Seconds until the next attempt while a limit, a barrier or the lock keeps messages back: events may not reach here.
RECHECK = 0.05
#: Seconds until the next attempt while a message is left to another subscription.
TURN_RECHECK = 0.002
#: What becomes of messages when an attempt fails.
UNTOUCHED = "no message was touched"
LOCKED, ANOTHERS_TURN = (Decision(False, why) for why in ("lock", "turn"))


class ReceivePolicies:
    """The receive policies of a queue, as one subscription meets them; it has no `turns` where nobody takes any."""

    def __init__(self, context: QueueContext, subscription: str, turns: FairShare | None) -> None:
        config = context.config
        self._context = context
        self._subscription = subscription
        self._belongs = FilterRest(context).matches
        self._lock = PolicyLock(context, keeps_open=True)
        self._backlog = Backlog(config.max_backlog) if config.max_backlog is not None else None
        self._barrier = Barrier(context, subscription) if config.barrier_expression is not None else None
        self._turns = turns
        #: Whether the subscription may get the share of a barrier, which is in no listing of target/.
        self.have_barriers = self._barrier is not None
        #: Whether several messages may be claimed by one hold of the lock: without turns and barriers.
        self.only_limits = turns is None and self._barrier is None
        self._counts_claims = turns is not None and turns.are_proportional
        #: The folders that something leaves when the subscription may take a message again.
        self.wait_for = (context.layout.processing,) if self._backlog is not None else ()
        self._lists_claims = self._counts_claims or self._backlog is not None or self.have_barriers
        #: Whether the subscription may take something at present; else why not: `barrier`, `backlog`, `turn`, `lock`.
        self.decision = MAY_TAKE
        #: Whether a barrier was handed out after target/ was last listed: it may have come back.
        self.view_is_old = False
        #: Of processing/, while it has as many messages as `max_backlog` allows.
        self._standstill = reading.Standstill(context.layout.processing, clock=context.clock)
        self._again_at = 0.0
        self._claimed: list[MessageFile] = []
        self._passed = self._woken = False

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Hold the policy lock for the block; yield False if another consumer kept it for too long."""
        self._passed = False
        with self._lock.acquire(self.waits) as alone:
            waited, self.decision = self.decision, MAY_TAKE if alone else LOCKED
            if alone:
                with error_context(UNTOUCHED):
                    if waited.why == "backlog":
                        self._standstill.begin()
                    self._refresh()
                    self._standstill.confirm()
                    self._again_at = time.monotonic() + RESCAN
            yield alone
        if self._passed and self._turns is not None:
            self._turns.wake_next()

    def _refresh(self) -> None:
        self._claimed = claimed_messages(self._context) if self._lists_claims else []
        if self._turns is not None:
            self._turns.refresh(self._claimed)
        if self._barrier is not None:
            self.view_is_old |= self._barrier.refresh(self._claimed)
            self.decision = self._barrier.decision
        if self._backlog is not None and not self.must_wait:
            self.decision = self._backlog.decide(self._claimed, partial(claimed_messages, self._context))

    @property
    def still_wait(self) -> bool:
        """Whether the limit kept messages back, and processing/ has not changed since; asked without the lock."""
        if self.decision.why != "backlog" or self._barrier is not None or time.monotonic() > self._again_at:
            return False  # now and then all is looked at: a message may have expired that waits
        with error_context(UNTOUCHED):
            return self._standstill.lasts()

    def note_quiet(self) -> None:
        """Note that no message waits."""
        self.decision = MAY_TAKE

    def have_nothing(self) -> None:
        """Note that no message waits for the subscription, and ask for a turn."""
        self.note_quiet()
        if self._turns is not None:
            with error_context(UNTOUCHED):
                self._turns.refresh(())  # it may have been passed over since it asked
            self._turns.ask()

    def note(self, claim: Claim) -> None:
        """Count a claim that was made under the lock, and decide on the next one."""
        self._claimed.append(MessageFile(claim.filename, folder=self._context.layout.processing))
        if self._backlog is not None:
            with error_context(UNTOUCHED):
                self.decision = self._backlog.decide(self._claimed, partial(claimed_messages, self._context))

    @property
    def must_wait(self) -> bool:
        """Whether the subscription may take nothing at present."""
        return not self.decision.allowed

    @property
    def recheck(self) -> float | None:
        """Seconds until the next attempt even if no event comes; None to wait for an event."""
        return TURN_RECHECK if self.decision.why == "turn" else RECHECK if self.must_wait else None

    # -- barriers ----------------------------------------------------------------------------------------------

    def is_barrier(self, file: MessageFile) -> bool:
        """Return whether a waiting message is a barrier; may be called without the lock."""
        return self._barrier is not None and self.is_here(file) and self._barrier.matches(file)

    def is_here(self, file: MessageFile) -> bool:
        """Return whether a waiting message passes the queue's own filter and has not expired."""
        return (self._belongs is None or self._belongs(file)) and not has_expired(self._context, file)

    def is_ready_for(self, barrier: MessageFile) -> bool:
        """Return whether nothing is claimed or committed; call it before target/ is listed for a barrier.

        RACE: what is committed goes from processing/ to staged/, then to delayed/ or target/. They are listed in this
        order, so a message that is being moved is in one listing or in more.
        """
        assert self._barrier is not None
        with error_context(UNTOUCHED):
            self.decision = self._barrier.list_before(barrier, self._claimed)
            if not self.must_wait:
                reading.ask_server(self._context.layout.target)
        return not self.must_wait

    def hand_out(self, barrier: MessageFile, waiting: int) -> None:
        """Hand out the first barrier, unless a message is before it; `waiting` is how many are known to wait."""
        assert self._barrier is not None
        with error_context("the barrier stays in target/"):
            self.decision = self._barrier.hand_out(barrier, waiting, alone=lambda: not self._lock.broken)

    def share(
        self, owner: Callable[[], str], deadline: Callable[[], int], wanted: Callable[[str], bool]
    ) -> tuple[Claim, Settlement] | None:
        """Do what `Barrier.share` does, if the queue has barriers."""
        if self._barrier is None:
            return None
        with error_context(UNTOUCHED):
            return self._barrier.share(owner(), deadline(), wanted)

    # -- turns -------------------------------------------------------------------------------------------------

    def leaves(self, file: MessageFile) -> bool:
        """Return whether a message is to be left to another subscription; ask without the lock, which that one needs.

        RACE: turns may change meanwhile. The next attempt, after a moment, sees that.
        """
        if self._turns is None or self._barrier is not None or not self._turns.are_shared:
            return False
        if self._woken:
            self._woken = False  # by the one that saw whose turn it is
            return False
        with error_context(UNTOUCHED):
            self._turns.refresh(claimed_messages(self._context) if self._counts_claims else ())
        if self._is_free(file, self._turns.is_left):
            return False
        self.waits()
        return True

    def admits(self, file: MessageFile) -> bool:
        """Return whether the subscription may take a message, or has to leave it to another subscription."""
        return self._turns is None or self._is_free(file, self._turns.is_anothers)

    def _is_free(self, file: MessageFile, is_anothers: Callable[[MessageFile], bool]) -> bool:
        try:
            if not is_anothers(file):
                return True
        except OSError as error:
            log.warning("queue %s: whose turn it is cannot be read: %s", self._context.layout.home, describe(error))
            return True
        self.decision = ANOTHERS_TURN
        return False

    def breaks(self) -> bool:
        """Return whether another consumer may hold the lock, too: then the caller must give back what it claimed.

        RACE: the lock file was removed during the attempt, and the other consumer locked a new file. Both give back.
        """
        if not self._lock.broken:
            return False
        self.decision = LOCKED
        return True

    def passed(self) -> None:
        """Count a message that was taken."""
        if self._turns is not None:
            self._turns.took()
            self._passed = True

    def wait_for_turn(self) -> None:
        """Wait until it may be the subscription's turn."""
        assert self._turns is not None
        self._woken = self._turns.turn.wait(TURN_RECHECK)

    def waits(self) -> None:
        """Note that the subscription waits for a message."""
        if self._turns is not None:
            self._turns.ask()

    def close(self) -> None:
        """Close the file of the lock, if it is open."""
        self._lock.close()

    def leave(self) -> None:
        """Give up shares and turns: the subscription ends, and holds nothing any more."""
        if self._barrier is not None:
            give_up(self._context, self._subscription)
        if self._turns is not None:
            self._turns.leave()
