"""Why a message is not handed out, and who holds those that are: for the person who looks at a queue that stands still.

It reads and changes nothing, and takes no lock: what it says was so when it looked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from dropq.format.layout import UNSETTLED
from dropq.format.message_file import MessageFile
from dropq.lifecycle.claims import claimed_files, find_claim
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.transitions import Transitions
from dropq.policies.wanted import belonging, wanting
from dropq.queue.browsing import listed
from dropq.queue.message import Message, utc
from dropq.storage import liveness, reading


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a message is where it is.

    Attributes:
        message: the message.
        why: `ready`, `paused`, `expired`, `acked`, `filter`, `barrier`, `backlog`, `turn`, `delay`; of what is held:
            `held`, `lease`, `lapsed`, `dead`, `unleased`, `script`, `barrier`.
        detail: the same for a person, with the way out where there is one.
        holders: the subscriptions that hold it; of one that waits, those that keep it waiting.
        until: when that ends by itself; None when nobody knows.
    """

    message: Message
    why: str
    detail: str
    holders: tuple[str, ...] = ()
    until: datetime | None = None


def explain(context: QueueContext, state: str | None = None, filter: str | None = None) -> Iterator[Explanation]:
    """Say of each message that is not settled why nobody is handed it, or who holds it; in order of delivery.

    Args:
        context: the queue.
        state: target, delayed or processing; None for all three.
        filter: only messages that match.

    Raises:
        ValueError: messages of that state are in nobody's way.
        InvalidFilter: the filter cannot be read.
        StorageError: a folder of the queue cannot be listed.
    """
    if state is not None and state not in UNSETTLED:
        raise ValueError(f"state {state!r}: why a message waits is told of {', '.join(UNSETTLED)}")
    with context.error_context("nothing was changed"):
        look, transitions = _Look(context), Transitions(context)
        for where in UNSETTLED if state is None else (state,):
            explained = {"target": look.waiting, "delayed": look.delayed, "processing": look.held}[where]
            wanted = None if filter is None else wanting(context, filter, where)
            for file in listed(context, where):
                why, detail, *rest = explained(file)  # for every file: a barrier keeps back those behind it
                if wanted is None or wanted(file):
                    yield Explanation(Message(transitions, where, file), why, detail, *rest)


#: Why, the detail, and where they are known the holders and until when.
_Told = tuple[str, str] | tuple[str, str, tuple[str, ...]] | tuple[str, str, tuple[str, ...], datetime | None]


class _Look:
    """What stands between a queue's messages and its consumers at this moment."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._locks = [lock for lock in context.read_locks if reading.is_there(lock, context.clock)]
        self._acks = reading.names_in(context.layout.acks)
        self._belongs = belonging(context)
        expression = context.config.barrier_expression
        self._is_barrier = None if expression is None else wanting(context, expression)
        self._barrier: str | None = None  # the id of the first that waits, as soon as it was met
        self._ahead = 0
        self._out = _barriers_out(context)
        self._claims = [file.claim for file in claimed_files(context) if file.filename[0] != "."]
        known = liveness.known(context.layout.consumers)
        self._dead = {name for name in known if liveness.is_dead(context.layout.consumers, name)}
        self._alive = known - self._dead
        delayed = map(context.sidecars.parse, reading.names_in(context.layout.delayed))
        self._delayed = sum(1 for name in delayed if name.delivery_count)  # whichever side of a barrier they are on

    # -- what waits ------------------------------------------------------------------------------------------------

    def waiting(self, file: MessageFile) -> _Told:
        """Tell why nobody is handed a message of target/: the first reason that holds."""
        if self._locks:
            return "paused", f"{self._locks[0]} keeps consumers waiting: `dropq resume`, or remove it"
        if has_expired(self._context, file):
            return "expired", "its time is over: any consumer, or `dropq sweep`, moves it to expired/"
        if self._acks and file.name.id in self._acks:
            return "acked", "its ack came before it: whoever looks next archives it, and delivers it to nobody"
        if self._belongs is not None and not self._belongs(file):
            return "filter", "it does not match the queue's filter: nobody is handed it"
        return self._behind_barrier(file) or self._over_backlog() or self._ready()

    def _behind_barrier(self, file: MessageFile) -> _Told | None:
        if self._is_barrier is None:
            return None
        for token, holders in self._out.items():
            return "barrier", f"a barrier is out: claim {token} has to be settled first", holders
        if self._barrier is not None:
            return "barrier", f"it comes behind the barrier {self._barrier}"
        if self._is_barrier(file):
            self._barrier = file.name.id
            return self._first_barrier()
        self._ahead += 1
        return None

    def _first_barrier(self) -> _Told:
        if self._ahead or self._claims or self._delayed:
            before = f"{self._ahead} before it wait, {len(self._claims)} are held, {self._delayed} were given back"
            return "barrier", f"it is a barrier, and waits until all before it are settled: {before}", self._holders()
        if not self._alive:
            return "barrier", "it is a barrier, and nobody is subscribed whom it could go to"
        return "ready", f"it is a barrier, and goes to {len(self._alive)} subscriptions at the next look"

    def _over_backlog(self) -> _Told | None:
        most = self._context.config.max_backlog
        if most is None or len(self._claims) < most:
            return None
        return "backlog", f"{len(self._claims)} held, as many as max_backlog allows", self._holders()

    def _ready(self) -> _Told:
        turns = self._next_turns()
        if turns:
            return "turn", "whoever waits takes the next in turn, and has a moment to come for it", turns
        if not self._alive:
            return "ready", "nobody is subscribed; whoever asks is handed it"
        return "ready", "whoever of the subscriptions asks first is handed it", tuple(sorted(self._alive))

    def _next_turns(self) -> tuple[str, ...]:
        if self._context.config.fairness_model == "fast":
            return ()
        from dropq.policies.fair_share import waiting_by_turn

        return waiting_by_turn(self._context)

    def _holders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(claim.subscription if claim else "a script" for claim in self._claims))

    def delayed(self, file: MessageFile) -> _Told:
        """Tell until when a message is delayed."""
        name = self._context.sidecars.parse(file.filename)
        given_back = "it was given back" if name.delivery_count else "it was sent with a delay"
        if name.not_before <= self._context.clock.now_ms():
            return "delay", f"{given_back}, and its time has come: any consumer, or `dropq sweep`, lets it in"
        return "delay", f"{given_back}, and waits for its time", (), utc(name.not_before)

    # -- what is held ----------------------------------------------------------------------------------------------

    def held(self, file: MessageFile) -> _Told:
        """Tell who holds a message, and what would bring it back."""
        claim = file.claim
        if claim is None or not claim.ours:
            who = claim.owner if claim is not None else "a script"
            way_out = "nothing returns it but `dropq sweep --foreign-older-than`"
            return "script", f"taken by {who}, with no sign of life: {way_out}", (who,)
        if claim.of_barrier:
            holders = self._out.get(claim.owner, ())
            return "barrier", f"{len(holders)} subscriptions have not settled their share of it", holders
        return self._leased(claim.subscription, claim.deadline)

    def _leased(self, subscription: str, deadline: int) -> _Told:
        holder = (subscription,)
        if subscription in self._dead:
            return "dead", "its holder is dead: any consumer, or `dropq sweep`, returns it", holder
        if 0 < deadline <= self._context.clock.now_ms():
            return "lapsed", "its lease ran out: any consumer, or `dropq sweep`, returns it", holder, utc(deadline)
        if deadline:
            return "lease", "its holder has a lease on it", holder, utc(deadline)
        if subscription in self._alive:
            return "held", "its holder lives, and has no lease that could run out", holder
        return "unleased", "no lease, no known holder: `dropq sweep --unleased-older-than` returns it", holder


def _barriers_out(context: QueueContext) -> dict[str, tuple[str, ...]]:
    """Return the claims of the barriers that are out, with the subscriptions that have not settled their shares."""
    if not reading.is_there(context.layout.barriers, context.clock):
        return {}
    from dropq.policies.barrier import all_shares

    return {
        shares.token: tuple(sorted(share.subscription for share in shares.claims()))
        for shares in all_shares(context)
        if find_claim(context, shares.token) is not None
    }
