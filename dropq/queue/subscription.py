"""A consumer's hold on a queue: it claims messages, knows which it holds, and returns them when it closes.

A subscription never gives a message to two callers, and holds no more than its backlog allows. It may be used by
several threads; after a fork the child has to open its own.

No lock keeps out a signal handler, which may use the subscription at any moment of its own thread. If the handler
interrupts an attempt to receive, its own receive returns None, and its close lets the attempt end the subscription. The
attempt still has a sign of life for what it claims, and returns that before it ends.
"""

from __future__ import annotations

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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from dropq.durations import parse_duration
from dropq.errors import BacklogReached, ConfigError, DropqError, LeaseLost, StorageError
from dropq.format.claims import Claim, Location, claim_owners, client_part, subscription_of
from dropq.format.message_file import MessageFile
from dropq.lifecycle import named as named_clients
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import sync_settled
from dropq.lifecycle.processing import claims_of, listing_once
from dropq.lifecycle.settlement import Claims, Settlement
from dropq.policies.build import policies_for
from dropq.policies.wanted import Wanting
from dropq.queue.message import LEAST_LEASE, Bundle, Duration, Message, Record, SettledMessage, ack_all
from dropq.queue.offers import Offers, untouched
from dropq.queue.waiting import Waiting
from dropq.storage.clock import lease_end, pass_tick
from dropq.storage.failures import describe
from dropq.storage.liveness import FORKS, Presence
from dropq.storage.watch import RESCAN

if TYPE_CHECKING:
    from dropq.queue.by_policy import Admission

log = logging.getLogger("dropq")

#: How many messages an error names.
SHOWN = 3
#: The fewest seconds until a waiting consumer tries again for a file that has settled.
SETTLED_LOOK = 0.02

_ALPHABET = string.digits + string.ascii_lowercase


class SweepOnTheWay(Protocol):
    """The sweep that a consumer does between its attempts to receive; upkeep/sweep.py has it.

    Attributes:
        again: when it is due again, by `time.monotonic()`.
        settles_at: when the first file settles that waits in a topic of the consumer, in ms since 1970; 0 if none does.
    """

    again: float
    settles_at: int

    @property
    def due(self) -> bool:
        """Whether it is time for it."""

    @property
    def has_begun(self) -> bool:
        """Whether an upkeep has begun, and slices of it are to follow."""

    def run(self, *, idle: bool = False, quiet: bool = False) -> int:
        """Bring back what dead consumers and lapsed leases held; return how many messages and files it moved.

        If `idle`, it also removes the dead that held nothing. While target/ is `quiet`, and nothing was found to bring
        back, it only looks for what changes without target/.
        """

    def stir(self) -> None:
        """Do all next time, and be due as usual: target/ has changed."""

    def found_nothing(self) -> None:
        """Run the queue's selectors on messages that the consumer leaves to others, if that is due."""

    def close(self) -> None:
        """End what it keeps open."""


class Subscription:
    """A consumer of one queue, as `Queue.subscribe` opens it.

    If it is detached, its claims outlive it: they have a lease, but no sign of life, and closing does not return them.

    Args:
        sweep: the sweep that it does on the way.
        at_end: called once it has ended.

    Attributes:
        max_backlog: how many messages it may hold at once; None for no limit.
        lease: seconds after which a claim runs out; None for never.

    Raises:
        ConfigError, InvalidFilter, Unavailable, ValueError: as of `Queue.subscribe`.
        NoSuchQueue: the queue is gone.
        StorageError: it cannot show that it lives; no message was touched.
    """

    def __init__(
        self,
        context: QueueContext,
        *,
        client_id: str | None = None,
        max_backlog: int | None = None,
        lease_period: Duration | None = None,
        filter: str | None = None,
        sweep: SweepOnTheWay,
        detached: bool = False,
        named: bool = False,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        if filter is not None:
            from dropq.filters import check_chooses

            check_chooses(filter)
        if max_backlog is not None and max_backlog < 1:
            raise ValueError(f"max_backlog {max_backlog}: at least 1, or None for no limit")
        if named and (detached or not client_id):
            raise ValueError("a named subscription has a client_id, by which it comes back, and is not detached")
        limits = (max_backlog, context.config.max_per_subscription_backlog)
        self.max_backlog = min((limit for limit in limits if limit is not None), default=None)
        self.lease = lease = _lease(context, lease_period, detached=detached)
        self.id = subscription_id(client_id or f"{socket.gethostname().split('.')[0][:9]}-{os.getpid()}")
        self._context = context
        self._claims = Claims(context)
        self._settles_first = context.config.semantics == "at-most-once"
        self._expires = context.config.expiration is not None
        self._owners = claim_owners(self.id)
        self._deadline = partial(lease_end, context.clock, lease) if lease else int  # 0 for never
        self._sweep = sweep
        self._attend_at = 0.0
        self._held: dict[str, Message] = {}
        self._bundle: Bundle | None = None  # the last that was read by records
        self._looped: dict[str, object] = {}  # by a claim's owner: the thread or task whose loop has the message
        self._lock = threading.RLock()
        self._receiving = 0  # the thread that looks for a message, under the lock; 0 for none
        self._forks = FORKS.count
        self._closed = False
        self._at_end = at_end
        _OF_THIS_PROCESS[self.id] = self
        policies = policies_for(context, self.id, allowed=self.max_backlog, filter=filter, lasting=not detached)
        self._waiting = Waiting(
            context.layout.target,
            leaving=() if policies is None else policies.wait_for,
            timing=context.timing,
            moved_in=context.settling.note_moved_in,
        )
        from_peers = context.config.replication_type != "LocalQueue" and context.root.config.peer
        self._wanting = Wanting(context, self.id, filter) if from_peers else None
        self._presence = None if detached else _presence(context, self.id, client_id if named else None)
        self._offers = Offers(context, self._presence, filter=filter, owners=self._owners, deadline=self._deadline)
        self._offers.puts_aside = True
        self._admission: Admission | None = None
        if policies is not None:
            from dropq.queue.by_policy import Admission  # few queues have a policy

            self._admission = Admission(policies, self._offers, self._claims)

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message; no other consumer gets it until it is settled or its lease runs out.

        Args:
            timeout: how long to wait for a message: 0 tries once, None waits for ever.

        Returns:
            The message; None if no message came in that time, it already holds as many as it may (max_backlog), or it
            was closed meanwhile. A signal handler that interrupts its own thread's receive gets None at once.
        """
        if self._closed:
            self._refuse()
        news = self._waiting.news
        message = self._next()
        return message if message is not None else self._wait(news, timeout)

    def _receive(self, timeout: Duration | None, given_up: Callable[[], bool] = bool) -> Message | None:
        """Do what `receive` does; return None once closed, or soon after it was given up and woken.

        A caller that gave up returns a message that was claimed after that.
        """
        news = self._waiting.news
        message = self._next()
        return message if message is not None else self._wait(news, timeout, given_up)

    def _wait(self, news: object, timeout: Duration | None, given_up: Callable[[], bool] = bool) -> Message | None:
        """Wait for a message, after an attempt that found none."""
        if self._receiving == threading.get_ident():
            return None  # this thread's own attempt waits for its signal handler, which is here
        if self._admission is not None:
            message = self._admission.after_others(self._next, lambda: self._closed or given_up())
            if message is not None:
                return message
        if self._wanting is not None:
            self._say_wanted(self._wanting)
        if timeout == 0:
            return None
        until = math.inf if timeout is None else time.monotonic() + parse_duration(timeout)
        return self._waiting.wait(
            news,
            until,
            attempt=self._next if self._wanting is None else self._next_or_wanted,
            next_attempt=lambda: self._next_attempt,
            given_up=given_up,
            is_quiet=lambda: self._offers.is_quiet,
        )

    def _next_or_wanted(self) -> Message | None:
        """Try to receive; let bridges see that messages are wanted where there is none."""
        assert self._wanting is not None
        if (message := self._next()) is None:
            self._say_wanted(self._wanting)
        else:
            self._wanting.pause()  # it may be busy from now on
        return message

    def _say_wanted(self, wanting: Wanting) -> None:
        """Say that messages are wanted, unless a pause, a policy or its own limit holds back what is there."""
        room = self._room
        has_room = room is None or room > 0
        if wanting.again_in <= 0 and has_room and not (self._closed or self._is_kept_back or self._context.paused):
            wanting.say(room)

    def receive_many(self, n: int, timeout: Duration | None = 0) -> list[Message]:
        """Claim up to n messages: wait for the first, then take as many of the others as are there.

        Raises:
            ValueError: n is below 1, or more than the subscription may hold.
        """
        if self._closed:
            self._refuse()
        return self._receive_many(n, timeout, bool)

    def _receive_many(self, n: int, timeout: Duration | None, given_up: Callable[[], bool]) -> list[Message]:
        """Do what `receive_many` does; take no more messages once it was given up, as `_receive` does."""
        if n < 1 or (self.max_backlog is not None and n > self.max_backlog):
            most = "at least 1 is to be asked for"
            if n > 0:
                most = f"this subscription may hold {self.max_backlog}: give subscribe() a max_backlog of {n}, or None"
            raise ValueError(f"receive_many({n}): {most}; nothing was received")
        messages = list[Message]()
        try:
            if (first := self._receive(timeout, given_up)) is not None:
                messages.append(first)
            while messages and (left := n - len(messages)) and not given_up():
                if (message := self._next_of(left)) is None:
                    break
                messages.append(message)
        except DropqError as error:
            if not messages:
                raise
            log.warning("receive_many: %d of %d: %s", len(messages), n, error)  # what was claimed is the caller's
        finally:
            if self._admission is not None:
                with self._lock:  # another thread may be about to take one
                    self._admission.give_back_ahead()
        return messages

    def _next_of(self, count: int) -> Message | None:
        """Try to receive one of so many messages, which a policy lets it claim together."""
        if self._admission is None:
            return self._next()
        with self._lock:
            room = self._room
            self._admission.more = (count if room is None else min(count, room)) - 1
            try:
                return self._next()
            finally:
                self._admission.more = 0

    def records(
        self, format: str | None = None, timeout: Duration | None = None, checkpoint: Duration | None = None
    ) -> Iterator[Record]:
        """Yield, to one thread, the records of one message after the other; settle each before the next message comes.

        A record's ack is durable with its bundle's commit: after its last record, or at a checkpoint. So after a crash
        about a second's work is done again. What was settled by a commit is never handed out again.

        Args:
            format: jsonl, text, csv or frames, for messages whose type is none of them; None for text.
            timeout: how long to wait for a message, as for `receive`; None for ever.
            checkpoint: how long it works at a message before it commits what is settled, if that is cheap enough; None
                takes the queue's checkpoint.

        Raises:
            ValueError: the checkpoint is no period; or the format is unknown, or the body is a table, and the message
                waits again.
            BacklogReached: records of the last message were taken and are not settled.
            LeaseLost: the claim is gone, and what was settled since the last commit does not count.
        """
        checkpoint = None if checkpoint is None else parse_duration(checkpoint)  # before a message is taken
        while True:
            bundle = self._bundle
            if bundle is None or not bundle.message.held:  # else an earlier loop left it
                if (message := self.receive(timeout)) is None:
                    return
                bundle = self._open_bundle(message, format, checkpoint)
            yield from bundle
            self._check_bundle(bundle)

    def _open_bundle(self, message: Message, format: str | None, checkpoint: Duration | None) -> Bundle:
        """Return the records of a message; if they cannot be opened, the message goes back uncounted."""
        seconds = parse_duration(self._context.config.checkpoint if checkpoint is None else checkpoint)
        last = self._bundle
        failures = last.failures if last is not None and last.identity == message._identity else 0
        try:
            bundle = Bundle(message, format, lease=self.lease, checkpoint=seconds, failures=failures)
        except (ValueError, StorageError):
            with suppress(LeaseLost):
                message.release(counted=False)
            raise
        self._bundle = bundle
        return bundle

    def _check_bundle(self, bundle: Bundle) -> None:
        """Raise BacklogReached if records of a held bundle were taken and are not settled."""
        if (message := bundle.message).held and bundle.cursor.unsettled:
            raise BacklogReached(
                f"message {message.id}: {len(bundle.cursor.unsettled)} of its records were taken and are not settled: "
                "settle each record before the loop asks for the next message"
            )

    def ack_many(self, messages: Iterable[Message]) -> list[Message]:
        """Acknowledge messages that it received; all of them are final when this returns, made durable by one sync.

        Returns:
            The messages whose claims were gone; nothing of these was changed.

        Raises:
            StorageError: a message could not be moved; it stays held, and so do those after it. Or the messages were
                moved, and are not durable.
        """
        return ack_all(messages)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they come, until it is closed; settle each before the next, as max_backlog is 1 by default.

        Raises:
            BacklogReached: it holds as many messages as it may, and all were handed to loops of this thread: no other
                can come. They stay held.
        """
        if self._closed:
            self._refuse()
        while True:
            self._check_loop(threading.get_ident())
            message = self._receive(None)
            if message is None:
                return
            self._note_loop(message, threading.get_ident())
            yield message

    def _note_loop(self, message: Message, looper: object) -> None:
        """Note that a message was handed to a loop of a thread, or of a task."""
        if message.owner is not None:  # at most once, nothing is held
            self._looped[message.owner] = looper

    def _check_loop(self, looper: object) -> None:
        """Raise BacklogReached if only the loop that is about to wait could settle the messages that it waits for."""
        most = self.max_backlog
        if most is None or len(self._held) < most or self._closed or self._inherited:
            return
        self._forget_lost()
        held = self._held.copy()
        if len(held) < most or any(self._looped.get(owner) != looper for owner in held):
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
    def _inherited(self) -> bool:
        """Whether a parent of this process opened it, before a fork: it stays the parent's."""
        return self._forks != FORKS.count

    @property
    def _next_attempt(self) -> float:
        """Seconds after which to try again without an event: then a delay or a lease may have ended."""
        again = min(self._sweep.again - time.monotonic(), RESCAN)
        if self._admission is not None and self._admission.policies.recheck is not None:
            again = min(again, self._admission.policies.recheck)
        if self._wanting is not None:
            again = min(again, self._wanting.again_in)
        # A limit, say, may keep back a file that has settled: so this is not 0 all the time.
        return max(min(again, max(self._offers.settles_in, SETTLED_LOOK)), 0.001)

    @property
    def _is_kept_back(self) -> bool:
        """Whether messages wait that a policy keeps back, or that somebody may still write to."""
        is_settling = self._offers.are_settling or self._sweep.settles_at > 0
        return is_settling or (self._admission is not None and self._admission.policies.must_wait)

    @property
    def _waits_for_passed_over(self) -> bool:
        """Whether a barrier keeps messages back, and may itself wait for messages that this one passes over."""
        is_kept = self._admission is not None and self._admission.policies.decision.why == "barrier"
        return is_kept and self._offers.passes_over

    def _snapshot(self) -> None:
        """Sweep if that is due, as it may deliver messages; from then on offer only what waits at this moment."""
        self._next(self._freeze)

    def _freeze(self) -> None:
        self._sweep_if_due()
        self._offers.freeze()

    def _next(self, instead: Callable[[], None] | None = None) -> Message | None:
        """Try to receive, one thread at a time, and no signal handler of that thread; return None once closed."""
        if self._forks != FORKS.count:
            self._refuse()  # before the lock, which a thread may hold that is not here
        with self._lock:
            if self._receiving:
                return None
            message = None
            try:
                self._receiving = threading.get_ident()
                if instead is not None:
                    instead()
                elif not self._closed:
                    message = self._attempt()
            finally:
                self._receiving = 0
                if self._closed:  # by a signal handler meanwhile
                    self._end(message)
            # What was delivered at most once is archived, and comes to nobody else.
            return message if not self._closed or self._settles_first else None

    def _attempt(self) -> Message | None:
        """Claim the next message; a message that cannot be claimed is an error only when there is no other."""
        offers = self._offers
        listings = offers.listings
        if time.monotonic() >= self._attend_at:
            self._attend()
        if offers.is_quiet and (self._admission is None or self._admission.note_quiet()):
            return None
        if self.max_backlog is not None and len(self._held) >= self.max_backlog:
            self._forget_lost()
            if len(self._held) >= self.max_backlog:
                return None
        if self._admission is not None:
            taken = self._admission.take(listings)
            if taken is None:
                self._sweep.found_nothing()
                return None
            return self._settled_first(taken[0]) if self._settles_first else self._hold(*taken)
        while True:
            while (file := next(offers.view, None)) is not None:
                if (self._expires or not file.plain) and offers.expire(file):
                    continue
                try:
                    claim = self._claims.claim(file, next(self._owners), self._deadline())
                except StorageError as error:
                    offers.pass_over(file, error)
                    continue
                if claim is None:
                    if not offers.defer(file):
                        offers.lose()
                    continue
                offers.losses = 0
                if offers.routes.in_use and offers.route(file, claim):
                    continue
                if not self._settles_first:
                    return self._hold(claim, self._claims, file)
                if (message := self._settled_first(claim)) is not None:
                    return message
            if not offers.more(listings):
                offers.raise_refused()
                self._sweep.found_nothing()
                return None

    def _attend(self) -> None:
        """Do what is not done for each message: sweep, read read-locks and routes, replace an old view."""
        offers = self._offers
        offers.look_for_change()
        self._context.log.sums.tell_if_due()
        if not offers.is_quiet:
            self._sweep.stir()
        self._sweep_if_due()
        offers.attend(holds=bool(self._held))
        # A view of many messages is kept longer than a read-lock may go unseen.
        refresh_at = time.monotonic() + self._context.timing.max_age
        self._attend_at = min(self._sweep.again, self._offers.fresh_until, refresh_at)

    def _sweep_if_due(self) -> None:
        if not self._sweep.due:
            return
        self._forget_lost()  # before the sweep that returns them
        try:
            # Consumers that died and held nothing are cleared away while they would have a part of the view.
            if self._sweep.run(idle=self._offers.are_shared, quiet=self._offers.is_quiet):
                self._offers.is_quiet = False
        except (OSError, DropqError) as error:
            # What cannot be brought in order here is no reason not to receive; `dropq sweep` raises it.
            log.warning("queue %s was not swept: %s", self._context.name, describe(error))

    @property
    def _room(self) -> int | None:
        """How many more messages it may hold; None for any number."""
        return None if self.max_backlog is None else self.max_backlog - len(self._held)

    def _hold(self, claim: Claim, settlement: Settlement | None = None, file: MessageFile | None = None) -> Message:
        """Return a claimed message, which counts as held; `file` is how it waited, if this subscription claimed it."""
        if file is None or file.filename != claim.own_name:
            file = self._context.sidecars.file(claim.filename)
        # The message keeps its subscription: one that nobody else refers to is still alive while it holds something.
        message = Message(settlement or self._claims, "processing", file, claim=claim, forget=self._forget)
        self._held[claim.owner] = message
        return message

    def _forget(self, owner: str) -> None:
        self._held.pop(owner, None)
        self._looped.pop(owner, None)
        waiting = self._waiting
        waiting.news = object()  # another thread may wait for room
        if waiting.waits:  # RACE: as in Waiting.wake
            waiting.wake()

    def _settled_first(self, claim: Claim) -> Message | None:
        """Archive a message, then deliver it: whichever process dies, it is not delivered twice."""
        context = self._context
        if claim.body is not None:
            pass_tick(claim.body.written)
        claim.body = None  # it is archived before anybody reads it
        try:
            if context.config.history:
                unsynced = dict[str, None]()
                location = self._claims.archive(claim, later=unsynced)
                fate = "the message was not delivered, and lies in processed/: requeue it from there"
                sync_settled(context, *unsynced, location=location, fate=fate)
                return SettledMessage(self._claims, location, delivery=claim.number)
            path = self._claims.hold_privately(claim)
        except LeaseLost:
            return None  # RACE: a sweep returned it in between; it was not delivered
        except StorageError:
            with suppress(LeaseLost):  # it has left all the same, and the error says what is the matter
                self._claims.release(claim, counted=False)
            raise
        location = Location("processed", claim.own_name)
        return SettledMessage(self._claims, location, delivery=claim.number, kept=path)

    def _forget_lost(self) -> None:
        """Stop counting messages whose lease has run out: a sweep may have given them to somebody else."""
        now = self._context.clock.now_ms()
        for owner, message in self._held.copy().items():
            deadline = message.deadline  # once, and popped if it is there: another thread may settle it at this moment
            if deadline is not None and deadline.timestamp() * 1000 < now:
                self._held.pop(owner, None)
                self._looped.pop(owner, None)

    # -- ending ----------------------------------------------------------------------------------------------

    def _give_back_but(self, owners: Collection[str]) -> int:
        """Give back its claims, uncounted, except those of `owners`; return how many it gave back."""
        returned = 0
        with self._context.error_context("what is still held returns with the next sweep"):
            claims = claims_of(self._context, self.id)
        for claim in claims:
            if claim.owner not in owners:
                with suppress(LeaseLost):
                    self._claims.release(claim, counted=False)
                    returned += 1
        return returned

    def close(self) -> None:
        """Return what it holds to target/, counted as a delivery, and end; closing twice is no error.

        If a signal handler calls this, and interrupted its own thread's receive, that receive ends the subscription,
        and returns what it has claimed, uncounted.
        """
        if self._inherited:
            return
        with self._lock:
            self._closed = True  # under the lock: nothing is handed out after this
            interrupts = self._receiving != 0  # the lock let only this thread's own handler in
        self._waiting.close()
        if not interrupts:
            self._end()

    def _end(self, unseen: Message | None = None) -> None:
        """Return what is held, then end the sign of life; no caller has got the message `unseen`."""
        presence, self._presence = self._presence, None
        if self._admission is not None:
            self._admission.policies.close()
        try:
            outcome = "what is still held returns with the next sweep"
            with self._context.error_context(outcome), listing_once(self._context):
                if unseen is not None and unseen.held:
                    with suppress(LeaseLost):
                        unseen.release(counted=False)
                self._sweep.close()
                if self._wanting is not None:
                    self._wanting.end()
                if presence is None:
                    return  # its claims outlive it, or it has ended before
                self._return_held()
                if self._admission is not None:
                    self._admission.policies.leave()
                presence.end()
            if self._at_end is not None:
                self._at_end()
        except BaseException:
            if presence is not None:
                presence.abandon()
            raise
        finally:
            self._context.log.sums.tell()

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
            lapsed = claim.has_lapsed(now)  # handed out, and forgotten as its lease ran out
            with suppress(LeaseLost):  # of others, an interrupt came between the claim and its hand-out
                self._claims.release(claim, counted=lapsed)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse(self) -> NoReturn:
        if self._inherited:
            raise DropqError(f"subscription {self.id} was opened before a fork, by the parent: open another here")
        raise DropqError(f"subscription {self.id} on queue {self._context.name} is closed")


def subscription_id(client_id: str) -> str:
    """Return a new id for a subscription: no other has it."""
    random = "".join(secrets.choice(_ALPHABET) for _ in range(10))
    return f"{client_part(client_id)}-{random}"


def _presence(context: QueueContext, subscription: str, client_id: str | None) -> Presence:
    """Show that a subscription lives, and note its client if it is named."""
    with untouched(context):
        if client_id is not None:
            named_clients.note(context, client_id)
        presence = Presence(context.layout.consumers, subscription, context.storage)
        if client_id is not None and not presence.is_locked:
            named_clients.note_unlocked(context, client_id)
        return presence


#: The subscriptions of this process by id, as long as anybody refers to them.
_OF_THIS_PROCESS: weakref.WeakValueDictionary[str, Subscription] = weakref.WeakValueDictionary()


def held_here(context: QueueContext, owner: str) -> Message | None:
    """Return the message of a claim on a queue, where a subscription of this process holds it."""
    subscription = _OF_THIS_PROCESS.get(subscription_of(owner))
    if subscription is None or subscription._inherited or subscription._context.layout.home != context.layout.home:
        return None
    return subscription._held.get(owner)


def _lease(context: QueueContext, lease_period: Duration | None, *, detached: bool) -> float | None:
    """Return the seconds after which a claim runs out; None for never."""
    lease = context.config.lease_period if lease_period is None else parse_duration(lease_period)
    if lease_period is not None and (lease or 0) < LEAST_LEASE:
        raise ValueError(f"lease_period {lease_period!r}: at least 1ms, or None for the queue's own")
    if detached and not lease:
        raise ConfigError("a claim that outlives its process needs a lease: give a lease_period")
    return lease or None
