"""What stands between a waiting message and its consumer where the queue has a policy: one lock, and what it guards.

Each look goes through the gate as a whole: it takes the lock, sees how things stand, takes one message at the most, and
lets go. What is seen under the lock stays true until it is released, as far as consumers of dropq's are concerned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dropq.format.claims import Claim
from dropq.format.layout import ignoring
from dropq.format.message_file import MessageFile
from dropq.lifecycle.claims import claimed_files
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.transitions import Transitions
from dropq.policies.backlog import Backlog
from dropq.policies.barrier import Barrier
from dropq.policies.fair_share import Turns
from dropq.policies.lock import PolicyLock
from dropq.policies.wanted import belonging
from dropq.storage import reading
from dropq.storage.failures import describe, error_context

log = logging.getLogger("dropq")

#: Seconds after which to look again where it is an ack, which gives no event, that opens the gate.
RECHECK = 0.05
#: Seconds after which to look again where another subscription has a moment to come for its turn.
TURN_RECHECK = 0.002
#: What becomes of messages when a look fails.
UNTOUCHED = "no message was touched"


class Gate:
    """The policies of a queue as one subscription meets them.

    Args:
        context: the queue.
        subscription: the subscription's id.
        allowed: how many messages it may hold; None for any number.
        filter: which messages it takes, beyond the queue's own filter; None for all.
        lasting: it lives on between its looks.
    """

    def __init__(
        self,
        context: QueueContext,
        subscription: str,
        *,
        allowed: int | None,
        filter: str | None,
        lasting: bool,
    ) -> None:
        config = context.config
        self._context = context
        self._ignored = ignoring(config.ignore)
        self._belongs = belonging(context)
        self._lock = PolicyLock(context)
        self._backlog = Backlog(config.max_backlog) if config.max_backlog is not None else None
        self._barrier = Barrier(context, subscription) if config.barrier_expression is not None else None
        self._turns: Turns | None = None
        if config.fairness_model != "fast":
            self._turns = Turns(context, subscription, allowed=allowed, filter=filter, lasting=lasting)
        #: Whether a policy keeps back what waits, for now.
        self.holds_up = False
        #: Whether that is so because of a barrier, which waits, or is handed out.
        self.at_barrier = False
        #: Whether that is so because it is the turn of another, who is to come for it.
        self.gives_way = False
        #: Seconds after which to look again although nothing came; None where news tell.
        self.recheck: float | None = None
        self._claimed: list[MessageFile] = []

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Be alone in looking and taking for the block; False where that is not to be had now.

        Raises:
            StorageError: the lock cannot be had for another reason than that somebody has it.
        """
        with self._lock.held(self.waits) as alone:
            self.holds_up, self.gives_way, self.recheck = not alone, False, None if alone else RECHECK
            self.at_barrier = False
            if alone:
                with error_context(UNTOUCHED):
                    self._look()
            yield alone

    def _look(self) -> None:
        self._claimed = self._listed()
        if self._turns is not None:
            self._turns.look(self._claimed)
        if self._barrier is not None:
            self._barrier.look(self._claimed)
            if self._barrier.is_out:
                self._hold_up_at_barrier()
        if self._backlog is not None and not self._backlog.has_room(self._claimed, self._listed):
            self._hold_up(RECHECK)

    def _listed(self) -> list[MessageFile]:
        """Return what is held now, whoever holds it; a claim that is renewed meanwhile is held all the same."""
        return [file for file in claimed_files(self._context) if not self._ignored(file.filename)]

    def _hold_up(self, recheck: float) -> None:
        self.holds_up, self.recheck = True, recheck

    def _hold_up_at_barrier(self) -> None:
        self._hold_up(RECHECK)
        self.at_barrier = True

    # -- barriers ----------------------------------------------------------------------------------------------

    def is_barrier(self, file: MessageFile) -> bool:
        """Tell whether a waiting message is a barrier; may be called without the lock."""
        return self._barrier is not None and self.is_here(file) and self._barrier.is_one(file)

    def is_here(self, file: MessageFile) -> bool:
        """Tell whether a waiting message is in the queue: it passes the queue's filter, and its time is not over."""
        return (self._belongs is None or self._belongs(file)) and not has_expired(self._context, file)

    def wait_for_others(self) -> None:
        """Take nothing until others have settled what is before a barrier."""
        self._hold_up_at_barrier()

    def is_ready_for_barrier(self) -> bool:
        """Tell whether nothing is held; to be asked before target/ is listed for what is before a barrier."""
        assert self._barrier is not None
        if self._claimed:
            self.wait_for_others()
            return False
        with error_context(UNTOUCHED):
            self._barrier.look_at_delayed()
            reading.ask_server(self._context.layout.target)
        return True

    def hand_out(self, barrier: MessageFile) -> None:
        """Hand out a barrier before which nothing waits, unless something before it is delayed."""
        assert self._barrier is not None
        self._hold_up_at_barrier()
        with error_context("the barrier stays in target/"):
            self._barrier.hand_out(barrier, alone=lambda: not self._lock.broken)

    def share(
        self, owner: Callable[[], str], deadline: Callable[[], int], wanted: Callable[[str], bool]
    ) -> tuple[Claim, Transitions] | None:
        """Take the share of a barrier that is out, where its file is wanted, and what settles it; else None."""
        if self._barrier is None or not self._barrier.is_out:
            return None
        with error_context(UNTOUCHED):
            return self._barrier.share(owner(), deadline(), wanted)

    # -- turns -------------------------------------------------------------------------------------------------

    def admits(self, file: MessageFile) -> bool:
        """Tell whether the subscription may take a message that it wants."""
        if self._turns is None:
            return True
        try:
            if not self._turns.is_anothers(file):
                return True
        except OSError as error:  # whoever cannot be looked at is passed over
            log.warning("queue %s: whose turn it is cannot be told: %s", self._context.layout.home, describe(error))
            return True
        self._hold_up(TURN_RECHECK)
        self.gives_way = True
        return False

    def breaks(self) -> bool:
        """Tell whether somebody else may have been as alone as we: then what was taken is to be given back.

        RACE: the lock file was removed while we were inside, and another has locked a new one. Both give back.
        """
        if not self._lock.broken:
            return False
        self._hold_up(RECHECK)
        return True

    def passed(self) -> None:
        """Count a message that was taken."""
        if self._turns is not None:
            self._turns.took()

    def waits(self) -> None:
        """Say that the subscription found nothing, or has to wait, and would take what comes."""
        if self._turns is not None:
            self._turns.ask()

    def leave(self) -> None:
        """Take no more part in it: the subscription ends, and holds nothing any more."""
        if self._barrier is not None:
            self._barrier.leave()
        if self._turns is not None:
            self._turns.leave()
