"""A consumer's hold on a queue: it claims messages, knows which it holds, and returns them when it closes.

A subscription never gives a message to two callers, and holds no more than its backlog allows. It may be used by
several threads; after a fork the child has to open its own.

A signal handler may use it at any moment of its own thread, which no lock keeps out. So a thread's look for a message
cannot be entered by its own handlers: a receive in there returns None, and a close leaves the end to the look, which
still has a sign of life for what it claims, and returns it before that ends.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import socket
import string
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Protocol

from dropq.durations import parse_duration
from dropq.errors import BacklogReached, ConfigError, DropqError, LeaseLost, NoSuchQueue, StorageError
from dropq.format.claims import Claim, Location, claim_owners, client_part, subscription_of
from dropq.format.message_file import MessageFile
from dropq.lifecycle import early_acks
from dropq.lifecycle.claims import claims_of, listing_once
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.transitions import Transitions
from dropq.lifecycle.view import DEPTH, LISTING_SHARE, MAX_AGE
from dropq.policies.build import gate_for, view_of
from dropq.policies.wanted import belonging, wanting
from dropq.queue.message import LEAST_LEASE, Duration, Message, SettledMessage, ack_all
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.liveness import FORKS, Presence
from dropq.storage.watch import RESCAN, Watch

if TYPE_CHECKING:
    from dropq.policies.receive_policies import Gate

log = logging.getLogger("dropq")

#: Seconds of a processor after which a look that found nothing was long: who waits lets pass ten times as much before
#: the next.
LONG_LOOK = 0.02
#: Seconds that one call waits for others to take their turns.
TURNS_PATIENCE = 0.2
#: Seconds for which consumers share what waits, after one was in another's way.
SHARING = 1.0
#: After so many messages of a view that others took first, a new one is made; after twice as many the next one, until
#: something is claimed: names may be listed for a while that are gone, as on NFS, and then no view is better.
LOSSES = 8
#: How many files that cannot be claimed are remembered; when there are more, each is tried, and logged, again.
UNCLAIMABLE = 1000
#: How many messages an error names.
SHOWN = 3

_ALPHABET = string.digits + string.ascii_lowercase


class SweepOnTheWay(Protocol):
    """What a consumer brings back in order between its looks for a message; upkeep/sweep.py has it.

    Attributes:
        again: when it is due again, by `time.monotonic()`.
    """

    again: float

    @property
    def due(self) -> bool:
        """Whether it is time to run it."""

    def run(self, *, idle: bool = False) -> object:
        """Bring back what the dead and lapsed leases held; where `idle`, clear away the dead that held nothing, too."""


class Subscription:
    """A consumer of one queue.

    Args:
        context: the queue.
        client_id: who holds what it claims, for people who read processing/.
        max_backlog: how many messages it may hold at once; None for no limit.
        lease: seconds after which a claim runs out; None for never.
        filter: which messages it takes; None for all.
        sweep: what it brings back in order on the way.
        detached: its claims outlive it: they have a lease, but no sign of life, and closing does not return them.
    """

    def __init__(
        self,
        context: QueueContext,
        *,
        client_id: str,
        max_backlog: int | None,
        lease: float | None,
        filter: str | None = None,
        sweep: SweepOnTheWay,
        detached: bool = False,
    ) -> None:
        random = "".join(secrets.choice(_ALPHABET) for _ in range(10))
        self.id = f"{client_part(client_id)}-{random}"
        self.max_backlog = max_backlog
        self.lease = lease
        self._context = context
        self._transitions = Transitions(context)
        self._matches = _all_of(belonging(context), None if filter is None else wanting(context, filter))
        self._snapshot = False
        self._passed_over: set[tuple[str, str | None]] = set()  # ids, with what tells a file from its twins; None: all
        self._on_their_way: list[str] = []  # ids of what may be about to come back, and be passed over
        self._ready = view_of(context, depth=context.config.target_queue_depth or DEPTH)
        self._acks = reading.Listing(context.layout.acks, context.clock)
        self._acked: frozenset[str] = frozenset()  # ids whose acks came before them
        self._shares_until = 0.0
        self._lost = 0
        self._losses = LOSSES
        self._timed = lease is not None or context.config.expiration is not None
        self._at_most_once = context.config.semantics == "at-most-once"
        self._sweep = sweep
        self._held: dict[str, Message] = {}
        self._looped: dict[str, int] = {}  # by a claim's owner: the thread whose loop the message was handed to
        self._owners = claim_owners(self.id)
        self._lock = threading.RLock()
        self._looker = 0  # the thread that looks for a message, under the lock; 0 for none
        self._attend_at = 0.0
        self._refused: StorageError | None = None
        self._unclaimable: set[str] = set()  # files whose claims would have too long a name here
        self._forks = FORKS.count
        self._closed = False
        self._turn = threading.RLock()
        self._watch: Watch | None = None
        self._waits = False
        self._news = object()  # another one whenever there may be something to look for
        self._presence: Presence | None = None
        _OF_THIS_PROCESS[self.id] = self
        self._gate = gate_for(context, self.id, allowed=max_backlog, filter=filter, lasting=not detached)
        if detached:
            return
        try:
            self._presence = Presence(context.layout.consumers, self.id, context.storage)
        except FileNotFoundError as error:
            raise NoSuchQueue(f"queue {context.name} is not there any more: {context.layout.home}") from error
        except OSError as error:
            raise storage_error(error, "no message was touched") from error

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message; it is nobody else's until it is settled or its lease runs out.

        Args:
            timeout: how long to wait for one: 0 looks once, None waits for ever.

        Returns:
            The message, or None when there was none in that time, it holds as many as it may already (max_backlog), or
            it was closed meanwhile; also, at once, in a signal handler that interrupted its own thread's look for one.
        """
        if self._closed or self._forks != FORKS.count:
            self._refuse()
        news = self._news
        message = self._next()
        if message is None and self._looker == threading.get_ident():
            return None  # this thread's own look waits for its signal handler, which is here
        if message is None and self._gate is not None and self._gate.gives_way:
            message = self._after_others(self._gate)
        if message is not None or timeout == 0:
            return message
        until = math.inf if timeout is None else time.monotonic() + parse_duration(timeout)
        # Threads wait in turns: what ended one's wait may be for the next one, too, who looks when its turn comes.
        if self._turn.acquire(timeout=max(min(until - time.monotonic(), threading.TIMEOUT_MAX), 0)):
            waits, self._waits = self._waits, True  # a signal handler may receive while its own thread waits
            try:
                return self._wait(news, until)
            finally:
                self._waits = waits
                self._turn.release()
                if waits:
                    self._wake()  # what woke this wait of a signal handler may be for its own thread's, around it
        return None

    def _after_others(self, gate: Gate) -> Message | None:
        """Look again and again while it is another subscription's turn, who has a moment to come for it."""
        from dropq.policies.receive_policies import TURN_RECHECK

        until = time.monotonic() + TURNS_PATIENCE
        message = None
        while message is None and gate.gives_way and time.monotonic() < until and not self._closed:
            time.sleep(TURN_RECHECK)
            message = self._next()
        return message

    def _wait(self, news: object, until: float) -> Message | None:
        """Look for a message whenever there may be one; at first only if something came since the news were these."""
        with self._lock:
            if self._closed:
                return None
            watch = self._watch = self._watch or Watch(self._context.layout.target)
        watch.begin()
        while (left := until - time.monotonic()) > 0:
            if news is self._news:
                watch.wait(min(left, self.next_look))
                self._news = object()
            news = self._news
            began = time.thread_time()
            message = self._next()
            if message is not None or self._closed:  # another thread closed it: that is no error of who waits
                return message
            if (took := time.thread_time() - began) > LONG_LOOK:  # at many, none of which are for it
                self._rest(watch, min(until, time.monotonic() + min(took, RESCAN) * LISTING_SHARE))
        return None

    def _rest(self, watch: Watch, until: float) -> None:
        """Wait without looking, unless it is closed."""
        while not self._closed and (left := until - time.monotonic()) > 0:
            watch.rest(left)

    def _wake(self) -> None:
        """Let the thread that waits look again."""
        self._news = object()
        # RACE: who is about to wait says so first, and then sees the news.
        if self._waits and (watch := self._watch) is not None:
            watch.wake()

    def receive_many(self, n: int, timeout: Duration | None = 0) -> list[Message]:
        """Claim up to n messages; wait for the first, take of the rest what is there.

        Raises:
            ValueError: n is below 1, or more than the subscription may hold.
        """
        if n < 1 or (self.max_backlog is not None and n > self.max_backlog):
            most = "at least 1 is to be asked for"
            if n > 0:
                most = f"this subscription may hold {self.max_backlog}: give subscribe() a max_backlog of {n}, or None"
            raise ValueError(f"receive_many({n}): {most}; nothing was received")
        first = self.receive(timeout)
        messages = [] if first is None else [first]
        try:
            while messages and len(messages) < n and (message := self._next()) is not None:
                messages.append(message)
        except DropqError as error:
            log.warning("receive_many: %d of %d: %s", len(messages), n, error)  # what was claimed is the caller's
        return messages

    def ack_many(self, messages: Iterable[Message]) -> list[Message]:
        """Acknowledge messages that it received; all of them are final when this returns, made durable by one sync.

        Returns:
            Those whose claims were gone, of which nothing was changed.

        Raises:
            StorageError: one could not be moved, and stays held, as those after it; or what was moved is not durable.
        """
        return ack_all(messages)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they come, for ever; each has to be settled before the loop goes on (with max_backlog 1).

        Raises:
            BacklogReached: it holds as many messages as it may, and all were handed to loops of this thread: no other
                can come. They stay held.
        """
        while True:
            self._check_loop()
            message = self.receive(None)
            if message is None:
                return
            if message.owner is not None:  # at most once, nothing is held
                self._looped[message.owner] = threading.get_ident()
            yield message

    def _check_loop(self) -> None:
        """Refuse to wait for messages that only the loop of this thread would settle."""
        most = self.max_backlog
        if most is None or len(self._held) < most or self._closed or self.inherited:
            return
        self._forget_lost()
        held, thread = self._held.copy(), threading.get_ident()
        if len(held) < most or any(self._looped.get(owner) != thread for owner in held):
            return  # RACE: another thread may settle what it received, and this loop waits for that
        ids = [message.id for message in held.values()]
        more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
        capped = self._context.config.max_per_subscription_backlog == most
        raise BacklogReached(
            f"queue {self._context.name}: this loop has not settled {', '.join(ids[:SHOWN])}{more}, and its "
            f"subscription holds no more than {most}: ack each message, handle it in `with message:`, or allow more by "
            "a larger " + ("max_per_subscription_backlog of the queue" if capped else "max_backlog")
        )

    @property
    def held(self) -> tuple[Message, ...]:
        """The messages that it has handed out and that are not settled."""
        return tuple(self._held.copy().values())  # at once, as threads settle meanwhile

    @property
    def inherited(self) -> bool:
        """Whether it was opened before a fork, by the parent of this process, whose it stays."""
        return self._forks != FORKS.count

    @property
    def next_look(self) -> float:
        """Seconds after which to look again without news: then a delay or a lease may have ended."""
        again = min(self._sweep.again - time.monotonic(), RESCAN)
        if self._gate is not None and self._gate.recheck is not None:
            again = min(again, self._gate.recheck)
        return max(again, 0.001)

    @property
    def held_up(self) -> bool:
        """Whether it found nothing because a policy of the queue keeps back what waits: a limit, a turn, a barrier."""
        return self._gate is not None and self._gate.holds_up

    @property
    def waits_for_passed_over(self) -> bool:
        """Whether a barrier keeps back what waits, and may itself wait for what this subscription passes over."""
        return self._gate is not None and self._gate.at_barrier and bool(self._passed_over)

    @contextmanager
    def once(self, message: Message) -> Iterator[None]:
        """Take a message that it holds no more where it comes back within the block; until then, none of its id."""
        claimed = self._context.sidecars.parse(message.name)
        self._on_their_way.append(claimed.id)
        try:
            yield
        finally:
            if message.state in ("target", "delayed"):
                name = self._context.sidecars.parse(message.name)
                self._passed_over.add((name.id, name.copy))
            elif message.state == "processing":  # lost: if it comes back, it is by a name that others gave it
                self._passed_over.add((claimed.id, claimed.copy if claimed.generated else None))
            self._on_their_way.remove(claimed.id)

    def _is_passed_over(self, file: MessageFile) -> bool:
        """Tell whether a file that waits came back before, or may be what comes back at this moment."""
        if not self._passed_over and not self._on_their_way:
            return False
        name = file.name
        marks = {(name.id, name.copy), (name.id, None)}
        return name.id in self._on_their_way or not marks.isdisjoint(self._passed_over)

    def snapshot(self) -> None:
        """Offer from now on only what waits at this moment."""
        self._next(self._freeze)

    def adopt(self, claim: Claim) -> Message:
        """Hold a claim that an earlier run of the same reader made; it counts as this subscription's."""
        return self._hand_out(claim)

    def _next(self, look: Callable[[], None] | None = None) -> Message | None:
        """Look for a message as one at a time may do, which not even a signal handler gets into; None once closed.

        Args:
            look: what is done instead, and finds no message.
        """
        if self._forks != FORKS.count:
            self._refuse()  # before the lock, which a thread may hold that is not here
        with self._lock:
            if self._looker:
                return None
            message = None
            try:
                self._looker = threading.get_ident()
                message = self._found() if look is None else look()
            finally:
                self._looker = 0
                if self._closed:  # by a signal handler meanwhile
                    self._end(message)
            # What was delivered at most once is archived, and comes to nobody else.
            return message if not self._closed or self._at_most_once else None

    def _freeze(self) -> None:
        self._ready.depth = None  # what lies behind a bounded view could only be found by a later listing
        self._refresh()
        self._snapshot = True

    def _found(self) -> Message | None:
        """Claim the next message; one that cannot be claimed is an error only when there is no other."""
        if self._closed:
            return None
        refreshed = time.monotonic() >= self._attend_at and self._attend()
        if self.max_backlog is not None and len(self._held) >= self.max_backlog:
            self._forget_lost()
            if len(self._held) >= self.max_backlog:
                return None
        if self._gate is not None:
            return self._admitted(self._gate, refreshed)
        ready = self._ready
        refreshed = refreshed or self._snapshot
        while True:
            file = next(ready.view, None)
            if file is not None:
                if (message := self._claim(file)) is not None:
                    return message
            elif not refreshed and ready.worn:
                refreshed = True  # before the others' shares: what they took of them themselves is not reached for
                self._refresh()
            elif not self._go_on():
                if refreshed:
                    self._tell_refused()
                    return None
                refreshed = True
                self._refresh()

    def _attend(self) -> bool:
        """See to what is not done for each message: sweeps, read-locks; tell whether the view is new."""
        if self._sweep.due:
            self._forget_lost()  # before the sweep that returns them
            self._sweep_on_the_way()
        stale = self._ready.stale and not self._snapshot
        if stale:
            self._refresh()
        elif self._paused():
            self._ready.clear()
        # A view of many messages is kept longer than a read-lock may go unseen.
        self._attend_at = min(self._sweep.again, self._ready.fresh_until, time.monotonic() + MAX_AGE)
        return stale

    def _sweep_on_the_way(self) -> None:
        try:
            # The dead who hold nothing are cleared away while they would have a share.
            self._sweep.run(idle=time.monotonic() < self._shares_until)
        except (OSError, DropqError) as error:
            # What cannot be brought in order here is no reason not to receive; `dropq sweep` raises it.
            log.warning("queue %s was not swept: %s", self._context.name, describe(error))

    def _admitted(self, gate: Gate, refreshed: bool) -> Message | None:
        """Take the next message where the queue has a policy: look for it first, then take it under the policy lock."""
        met = False
        for file, is_barrier in chain(self._candidates(gate, refreshed), ((None, False),)):
            if file is not None:
                self._ready.put_back(file)  # until it is taken: an error is not to lead past it
            with gate.entered() as alone:
                if alone and is_barrier and not gate.holds_up:
                    self._meet_barrier(gate, file, again=met)
                    met = True
                message = self._take_alone(gate, None if is_barrier else file) if alone else None
                if message is not None:
                    gate.passed()
                elif alone and (file is None or gate.holds_up):
                    gate.waits()
            if message is not None or gate.holds_up:
                return message
        self._tell_refused()
        return None

    def _candidates(self, gate: Gate, refreshed: bool) -> Iterator[tuple[MessageFile | None, bool]]:
        """Yield what waits and is wanted here, or is a barrier, and which: of what is left of the view, then anew."""
        while True:
            while (file := self._ready.next()) is not None:
                if self._acked and self._was_acked(file):
                    continue
                is_barrier = gate.is_barrier(file)
                if not is_barrier and self._is_passed_over(file):
                    continue
                if is_barrier or self._matches is None or self._matches(file):
                    yield file, is_barrier
            if not self._go_on():
                if refreshed or self._snapshot:
                    return
                refreshed = True
                self._refresh()

    def _take_alone(self, gate: Gate, file: MessageFile | None) -> Message | None:
        """Take the share of a barrier that is out, or else a message, where nobody else who takes is in the way."""
        shared = gate.share(self.next_owner, self._deadline, lambda name: not self._is_passed_over(MessageFile(name)))
        if shared is not None:
            return self._hand_out(*shared)
        if file is None or gate.holds_up:
            return None
        message = self._claim(file)
        if not gate.holds_up:
            self._ready.next()  # it was this one: it is taken, or gone
        return message

    def _meet_barrier(self, gate: Gate, barrier: MessageFile | None, *, again: bool) -> None:
        """Hand out a barrier, if it is the first of what waits now; else what is before it is taken first.

        When it is met `again` in one look, what is before it is not for us to take, and the barrier waits.
        """
        if not gate.is_ready_for_barrier():
            return
        self._refresh()
        first = next(filter(gate.is_here, iter(self._ready.next, None)), None)
        if first is not None:
            self._ready.put_back(first)
            if barrier is not None and first.filename == barrier.filename:
                gate.hand_out(first)
            elif again:
                gate.wait_for_others()

    def _paused(self) -> bool:
        with error_context("no message was touched"):
            return self._context.paused

    def _tell_refused(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def _refresh(self) -> None:
        self._refused = None  # what still waits is met again
        self._lost = 0
        if self._paused():
            self._ready.clear()
            return
        with self._listing():
            if self._presence is not None:
                self._presence.keep()  # before the listing: what is claimed from it is claimed by the living
            self._ready.refresh(*self._place())
            self._acked = self._acks.names()  # RACE: after the messages that it may be about

    def _go_on(self) -> bool:
        with self._listing():
            if not self._ready.go_on():
                return False
            self._acked = self._acks.names()
            return True

    @contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NoSuchQueue(
                f"queue {self._context.name} is not there any more: {self._context.layout.home}"
            ) from error
        except OSError as error:
            raise storage_error(error, "no message was touched") from error

    def _place(self) -> tuple[int, int]:
        """Return which one it is, and of how many consumers that share what waits: one, while nobody is in its way."""
        if self._presence is None or time.monotonic() >= self._shares_until:
            return 0, 1
        return self._presence.position()

    def _share(self) -> None:
        """Share what waits with the other consumers for a while: one of them was first."""
        now = time.monotonic()
        begins = now >= self._shares_until
        self._shares_until = now + SHARING
        self._lost += 1
        if (begins or (self._lost >= self._losses and self._ready.worn)) and not self._snapshot:
            self._losses *= 2
            self._refresh()

    def _claim(self, file: MessageFile) -> Message | None:
        context = self._context
        if self._acked and self._was_acked(file):
            return None
        if self._matches is not None and not self._matches(file):
            return None
        if self._unclaimable and file.filename in self._unclaimable:
            return None
        if (self._passed_over or self._on_their_way) and self._is_passed_over(file):
            return None
        deadline = 0
        if self._timed or not file.plain:
            if has_expired(context, file):
                self._expire(file)
                return None
            deadline = self._deadline()
        try:
            if self._gate is None:
                claim = self._transitions.claim(file, next(self._owners), deadline)
            else:
                claim = self._claim_admitted(self._gate, file, deadline)
        except StorageError as error:
            self._pass_over(file, error)
            return None
        if claim is None:
            if self._gate is None:
                self._share()
            return None
        self._losses = LOSSES
        return self._settled_first(claim) if self._at_most_once else self._hand_out(claim, file=file)

    def _claim_admitted(self, gate: Gate, file: MessageFile, deadline: int) -> Claim | None:
        """Claim a message under the policy lock, unless it is to be left to another; None when it is not ours."""
        claim = self._transitions.claim(file, self.next_owner(), deadline) if gate.admits(file) else None
        if claim is not None and gate.breaks():
            self._transitions.give_back(claim, counted=False, delay=0)
            return None
        return claim

    def _deadline(self) -> int:
        """Return when the lease of a claim that is made now runs out, in ms since 1970; 0 for never."""
        return lease_end(self._context.clock, self.lease) if self.lease else 0

    def _was_acked(self, file: MessageFile) -> bool:
        """Archive a message whose ack came before it; False where it is to be delivered."""
        context = self._context
        if file.name.id not in self._acked:
            return False
        try:
            return early_acks.settle(context, file, self.next_owner(), self._deadline())
        except StorageError as error:
            self._pass_over(file, error)
            return True

    def _pass_over(self, file: MessageFile, error: StorageError) -> None:
        """Go on with the other messages, which may be as good as before; where there is no other, the error is raised.

        Where a file system never has room for a claim's name, nothing but another name helps: that is logged once.
        """
        if error.errno != errno.ENAMETOOLONG:
            self._refused = self._refused or error
            return
        if len(self._unclaimable) >= UNCLAIMABLE:
            self._unclaimable.clear()
        self._unclaimable.add(file.filename)
        log.warning(
            "queue %s: message %r is passed over, as this file system has no room for the name of a claim on it; "
            "`dropq fsck %s` says which name is short enough (%s)",
            *(self._context.name, file.filename, self._context.name, error),
        )

    def _expire(self, file: MessageFile) -> None:
        try:
            self._transitions.expire_waiting(file)
        except StorageError as error:
            log.warning("an expired message is passed over: %s", error)  # the others are as good as before

    def next_owner(self) -> str:
        """Return what identifies the next claim: no two claims, of whichever process, ever share it."""
        return next(self._owners)

    def _hand_out(
        self, claim: Claim, transitions: Transitions | None = None, file: MessageFile | None = None
    ) -> Message:
        """Return a claimed message, which counts as held; `file` is how it waited, where its name stays."""
        # The message keeps its subscription: one that nobody else refers to is still alive while it holds something.
        if file is None or file.filename != claim.own_name:
            file = self._context.sidecars.file(claim.filename)
        message = Message(transitions or self._transitions, "processing", file, claim=claim, forget=self._forget)
        self._held[claim.owner] = message
        return message

    def _forget(self, owner: str) -> None:
        """Stop counting a claim that was settled."""
        self._held.pop(owner, None)
        self._looped.pop(owner, None)
        self._news = object()  # another thread may wait for room
        if self._waits:  # RACE: as in _wake
            self._wake()

    def _settled_first(self, claim: Claim) -> Message | None:
        """Archive, then deliver: whoever dies now, the message is not delivered twice."""
        context = self._context
        try:
            if context.config.history:
                location = self._transitions.archive(claim, synced=False)
                self._transitions.archived(
                    location, "the message was not delivered, and lies in processed/: requeue it from there"
                )
                return SettledMessage(self._transitions, location, delivery=claim.number)
            path = self._transitions.hold_privately(claim)
        except LeaseLost:
            return None  # RACE: a sweep returned it in between; it was not delivered
        except StorageError:
            with suppress(LeaseLost):  # it has left all the same, and the error says what is the matter
                self._transitions.give_back(claim, counted=False, delay=0)
            raise
        location = Location("processed", claim.own_name)
        return SettledMessage(self._transitions, location, delivery=claim.number, kept=path)

    def _forget_lost(self) -> None:
        """Stop counting messages whose lease has run out: a sweep may have given them to somebody else."""
        now = self._context.clock.now_ms()
        for owner, message in self._held.copy().items():
            if message.deadline is not None and message.deadline.timestamp() * 1000 < now:
                self._held.pop(owner, None)  # another thread may settle it at this moment
                self._looped.pop(owner, None)

    # -- ending ----------------------------------------------------------------------------------------------

    def give_back_but(self, owners: Collection[str]) -> int:
        """Give back, uncounted, every claim that it made but those of some owners; return how many there were."""
        returned = 0
        for claim in claims_of(self._context, self.id):
            if claim.owner not in owners:
                with suppress(LeaseLost):
                    self._transitions.give_back(claim, counted=False, delay=0)
                    returned += 1
        return returned

    def close(self) -> None:
        """Return what it holds to target/, counted as a delivery, and end; closing twice is no error.

        In a signal handler that interrupted its own thread's look for a message, it ends when that look does, which
        returns what it has found, uncounted.
        """
        if self.inherited:
            return
        with self._lock:
            self._closed = True  # under the lock: nothing is handed out after this
            interrupts = self._looker != 0  # the lock let only this thread's own handler in
        self._wake()
        self._watch = None  # it goes with the thread that waits
        if not interrupts:
            self._end()

    def _end(self, unseen: Message | None = None) -> None:
        """Return what is held, then take the sign of life down; `unseen` was handed to nobody."""
        presence, self._presence = self._presence, None
        try:
            fate = "what is still held returns with the next sweep"
            with self._context.error_context(fate), listing_once(self._context):
                if unseen is not None and unseen.held:
                    with suppress(LeaseLost):
                        unseen.release(counted=False)
                if presence is None:
                    return  # its claims outlive it, or it has ended before
                self._return_held()
                if self._gate is not None:
                    self._gate.leave()
                presence.end()
        except BaseException:
            if presence is not None:
                presence.abandon()
            raise

    def _return_held(self) -> None:
        refused: DropqError | None = None
        self._forget_lost()  # what a sweep may have returned is looked for below, all at once
        for message in self.held:
            try:
                message.release()
            except LeaseLost:
                continue  # settled by another thread, or somebody else's already
            except DropqError as error:
                refused = error
        if refused is not None:
            raise refused
        now = self._context.clock.now_ms()
        for claim in claims_of(self._context, self.id):
            lapsed = 0 < claim.deadline <= now  # handed out, and forgotten as its lease ran out
            with suppress(LeaseLost):  # of others, an interrupt came between the claim and its hand-out
                self._transitions.give_back(claim, counted=lapsed, delay=None if lapsed else 0)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse(self) -> NoReturn:
        if self.inherited:
            raise DropqError(f"subscription {self.id} was opened before a fork, by the parent: open another here")
        raise DropqError(f"subscription {self.id} on queue {self._context.name} is closed")


def _all_of(*tests: Callable[[MessageFile], bool] | None) -> Callable[[MessageFile], bool] | None:
    asked = [test for test in tests if test is not None]
    return (lambda file: all(test(file) for test in asked)) if asked else None


#: The subscriptions of this process by id, as long as anybody refers to them.
_OF_THIS_PROCESS: weakref.WeakValueDictionary[str, Subscription] = weakref.WeakValueDictionary()


def held_here(context: QueueContext, owner: str) -> Message | None:
    """Return the message of a claim on a queue, where a subscription of this process holds it."""
    subscription = _OF_THIS_PROCESS.get(subscription_of(owner))
    if subscription is None or subscription.inherited or subscription._context.layout.home != context.layout.home:
        return None
    return subscription._held.get(owner)


def subscribe(
    context: QueueContext,
    *,
    client_id: str | None,
    filter: str | None,
    max_backlog: int | None,
    lease_period: Duration | None,
    detached: bool,
    sweep: SweepOnTheWay,
) -> Subscription:
    """Begin to receive from a queue, as `Queue.subscribe` says; `sweep` brings it back in order on the way."""
    if filter is not None:
        from dropq.filters import check_chooses

        check_chooses(filter)
    if max_backlog is not None and max_backlog < 1:
        raise ValueError(f"max_backlog {max_backlog}: at least 1, or None for no limit")
    lease = context.config.lease_period if lease_period is None else parse_duration(lease_period)
    if lease_period is not None and (lease or 0) < LEAST_LEASE:
        raise ValueError(f"lease_period {lease_period!r}: at least 1ms, or None for the queue's own")
    if detached and not lease:
        raise ConfigError("a claim that outlives its process needs a lease: give a lease_period")
    limits = [limit for limit in (max_backlog, context.config.max_per_subscription_backlog) if limit is not None]
    return Subscription(
        context,
        client_id=client_id or f"{socket.gethostname().split('.')[0][:9]}-{os.getpid()}",
        max_backlog=min(limits) if limits else None,
        lease=lease or None,
        filter=filter,
        sweep=sweep,
        detached=detached,
    )
