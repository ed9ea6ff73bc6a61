"""A queue: the verbs of producers, consumers and administrators on one directory.

Each verb validates, makes its one move, and returns. A queue object may be used by several threads, by a signal handler
at any moment of its own thread, and after a fork: so it has no lock, which one of these could wait for in vain. It
opens its folders and its configuration at its first use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from dropq import names, storage
from dropq.admission import view_of, wanting
from dropq.config import QueueConfig
from dropq.durations import parse_duration
from dropq.errors import ConfigError, LeaseLost, NoSuchMessage
from dropq.layout import FOLDERS, RESERVED, QueueLayout, ignoring
from dropq.lifecycle import Held, Lifecycle, Waiting
from dropq.message import LEAST_LEASE, Duration, Message, utc
from dropq.names import Claim
from dropq.opening import find_layout, open_queue
from dropq.producer import Producer

# What sends and counts is imported here; the rest by the verbs that need it, so that a shell's `send` does not wait.
if TYPE_CHECKING:
    from dropq.admin import Outcome
    from dropq.explain import Explanation
    from dropq.fsck import Finding
    from dropq.root import Root
    from dropq.subscription import Subscription
    from dropq.sweep import SweepReport

#: States in which `find` looks for a message, in this order.
SEARCHED = ("target", "processing", "delayed", "error", "expired", "processed")


@dataclass(frozen=True, slots=True)
class StateStats:
    """What lies in a state: messages, bytes, and since when the oldest message exists."""

    count: int
    bytes: int
    oldest: datetime | None


P = ParamSpec("P")
T = TypeVar("T")


def _telling(fate: str) -> Callable[[Callable[Concatenate[Queue, P], T]], Callable[Concatenate[Queue, P], T]]:
    """Let a verb of a queue raise our own errors alone; what the file system refuses is told with this fate."""

    def wrap(verb: Callable[Concatenate[Queue, P], T]) -> Callable[Concatenate[Queue, P], T]:
        @wraps(verb)
        def telling(queue: Queue, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with queue.life.telling(fate):
                return verb(queue, *args, **kwargs)

        return telling

    return wrap


class Queue(Producer):
    """A queue of a root.

    Args:
        root: the root.
        name: the queue's name, which is its folder's.

    Raises:
        InvalidName: it cannot be the name of a queue.
    """

    def __init__(self, root: Root, name: str) -> None:
        names.check_queue_name(name)
        self.root = root
        self.name = name
        self._opened: Lifecycle | None = None
        self._own: Subscription | None = None

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} in {self.root.path}>"

    # -- opening ---------------------------------------------------------------------------------------------

    @property
    def life(self) -> Lifecycle:
        """The queue's transitions; opens the queue when that was not done.

        Raises:
            NoSuchQueue: there is no such queue in the root.
            ConfigError: its configuration cannot be used.
            StorageError: a folder is missing, or lies on another file system.
        """
        opened = self._opened
        if opened is None:
            # RACE: threads that open it at once open the same queue; any of their results will do.
            opened = self._opened = open_queue(self.root, self.name)
        return opened

    @property
    def layout(self) -> QueueLayout:
        """Where its folders are."""
        return self.life.layout

    @property
    def config(self) -> QueueConfig:
        """Its configuration, as it was when the queue was opened."""
        return self.life.config

    def exists(self) -> bool:
        """Tell whether the queue is there."""
        return find_layout(self.root.layout.path, self.name) is not None

    # -- receiving -------------------------------------------------------------------------------------------

    def subscribe(
        self,
        *,
        client_id: str | None = None,
        filter: str | None = None,
        max_backlog: int | None = 1,
        lease_period: Duration | None = None,
        detached: bool = False,
    ) -> Subscription:
        """Begin to receive; close the subscription, or leave its `with` block, to return what it holds.

        Args:
            client_id: who receives, for people who read processing/; None takes host and process.
            filter: other messages are left to others, as those are that the queue's own filter does not match.
            max_backlog: how many messages it may hold at once; None for as many as the queue's cap allows.
            lease_period: after which a claim runs out, at least 1ms; None takes the queue's, which may have none.
            detached: its claims outlive the process, as those of a shell command; they must have a lease.

        Raises:
            ConfigError: a detached subscription without a lease.
            InvalidFilter: the filter cannot be read, or is empty.
            Unavailable: a filter needs an extra that is not installed.
            ValueError: max_backlog is below 1, or lease_period is 0 or no period.
        """
        from dropq.subscription import Subscription

        if filter is not None:
            from dropq.filters import check_chooses

            check_chooses(filter)
        if max_backlog is not None and max_backlog < 1:
            raise ValueError(f"max_backlog {max_backlog}: at least 1, or None for no limit")
        life = self.life
        lease = life.config.lease_period if lease_period is None else parse_duration(lease_period)
        if lease_period is not None and (lease or 0) < LEAST_LEASE:
            raise ValueError(f"lease_period {lease_period!r}: at least 1ms, or None for the queue's own")
        if detached and not lease:
            raise ConfigError("a claim that outlives its process needs a lease: give a lease_period")
        limits = [limit for limit in (max_backlog, life.config.max_per_subscription_backlog) if limit is not None]
        return Subscription(
            self,
            life,
            client_id=client_id or _client_id(),
            max_backlog=min(limits) if limits else None,
            lease=lease or None,
            filter=filter,
            read_locks=(self.root.layout.read_lock, life.layout.read_lock),
            detached=detached,
        )

    def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message, on a subscription that lives as long as this object.

        Args:
            timeout: how long to wait for one: 0 looks once, None waits for ever.

        Returns:
            The message, or None, as `Subscription.receive` does.
        """
        own = self._own
        if own is None or own.inherited:
            own = self._own_subscription()
        return own.receive(timeout)

    def _own_subscription(self) -> Subscription:
        before = self._own  # None, or after a fork the parent's
        opened = self.subscribe(max_backlog=None)
        # RACE: threads, and a signal handler, that open one at once: all use the first that is kept. Nothing comes in
        # between looking and keeping, as nothing is called there.
        if self._own is before:
            self._own = opened
            return opened
        opened.close()
        return self._own_subscription() if self._own is None or self._own.inherited else self._own

    @_telling("nothing was changed")
    def claimed(self, receipt: str) -> Message:
        """Take up a claim by its receipt, or, where leasing is `sublet`, by the message's id.

        Raises:
            LeaseLost: there is no such claim.
        """
        from dropq.subscription import held_here

        life = self.life
        claim, _ = names.split_claim(receipt)
        if claim is None or not claim.ours or "/" in receipt or "\0" in receipt:
            return self._claimed_by_id(receipt)
        ours = held_here(claim.owner)
        if ours is not None and ours.queue.layout.home == self.layout.home:
            return ours  # settled by its receipt, or by who received it: it is one message
        held = life.find_claim(claim.owner)
        if held is None and storage.is_there(self.layout.barriers, life.clock):
            from dropq.admission.barrier import find_share

            held, life = find_share(life, claim.owner) or (None, life)
        if held is None:
            raise LeaseLost(
                f"no claim {claim.owner} on queue {self.name}: its lease ran out, or it was settled; "
                "nothing was changed"
            )
        return Message(self, life, "processing", held.filename, held=held)

    def _claimed_by_id(self, message_id: str, *, unleased: bool = False) -> Message:
        """Take up a claim by the message's id: this object's own, and where leasing is `sublet` anybody's.

        With `unleased`, where it is `strict`, also one that nobody has any more, which a sweep would return.
        """
        own = self._own
        for message in own.held if own is not None and not own.inherited else ():
            if message.id == message_id:
                return message
        strict = self.config.leasing == "strict"
        if strict and not unleased:
            raise LeaseLost(
                f"{message_id!r} is no receipt, and queue {self.name} has strict leasing: ids do not settle claims"
            )
        for claim, file in self._claims_of(message_id):
            if claim.of_barrier:
                raise LeaseLost(f"message {message_id!r} is a barrier, and several hold it: settle it by receipt")
            held = self._nobodys(claim, file) if strict else self.life.find_claim(claim.owner)
            if held is not None:
                return Message(self, self.life, "processing", held.filename, held=held)
        paused = f", which is paused: what waits stays until `dropq resume {self.name}`" if self.paused else ""
        raise LeaseLost(f"no message {message_id!r} is held on queue {self.name}{paused}; nothing was changed")

    def _claims_of(self, message_id: str) -> Iterator[tuple[Claim, str]]:
        for waiting in self._bearing("processing", message_id):
            claim, file = names.split_claim(waiting.file)
            if claim is not None and claim.ours:
                yield claim, file

    def _nobodys(self, claim: Claim, file: str) -> Held | None:
        """Return a claim whose lease ran out, or whose holder is dead; None of any other."""
        from dropq import consumers

        lapsed = 0 < claim.deadline <= self.life.clock.now_ms()
        if not lapsed and not consumers.is_dead(self.layout.consumers, claim.subscription):
            return None
        held = Held(self.layout.processing, claim, file)
        held.as_seen = True  # RACE: whoever renewed it since the listing keeps it
        return held

    @_telling("whether the message was acknowledged, `dropq show` tells")
    def ack(self, id: str, defer: bool = False) -> bool:
        """Acknowledge a message by its id, wherever it is held, waits or is delayed; False when it is nowhere.

        With strict leasing a message that somebody else holds is left alone; while the queue is paused, one that waits
        or is delayed is. It takes a listing: receipts are quicker.

        Args:
            id: the message's id.
            defer: remember the ack of a message that is not here yet, for deferred_ack_expiration: it is archived once
                it comes, and not delivered. This still returns False then: nothing was acknowledged so far.

        Raises:
            ValueError: the ack of an id that dropq did not make cannot be deferred: another message may come under it.
        """
        if not defer:
            return self._acknowledged(id)
        from dropq import deferred

        deferred.check(id)
        deferred.remember(self.life, id)
        # RACE: a message that comes from now on meets its ack, whoever takes it; one that came before is found here.
        done = self._acknowledged(id)
        if done or self._is_past_ack(id):
            deferred.forget(self.life, id)
        return done

    def _acknowledged(self, message_id: str) -> bool:
        try:
            self._claimed_by_id(message_id, unleased=True).ack()
            return True
        except LeaseLost:
            pass  # not held, or not any more, or another's: it may wait
        return self._ack_waiting(message_id)

    def _is_past_ack(self, message_id: str) -> bool:
        """Tell whether an ack has nothing to wait for: the message is settled, or another's by strict leasing."""
        try:
            state = self.find(message_id).state
        except NoSuchMessage:
            return False
        return state in RESERVED or (state == "processing" and self.config.leasing == "strict")

    def _ack_waiting(self, message_id: str) -> bool:
        if self.paused:
            return False  # nobody claims then
        life = self.life
        # RACE: a sweep moves what is due from delayed/ to target/: what is missed in the one is met in the other.
        for state in ("delayed", "target"):
            for waiting in self._bearing(state, message_id):
                with self.subscribe(client_id="ack") as subscription:
                    held = life.claim(waiting, subscription.next_owner(), 0, state=state)
                    if held is not None:
                        life.archive(held)
                        return True
        return False

    # -- looking ---------------------------------------------------------------------------------------------

    def browse(self, state: str = "target", filter: str | None = None) -> Iterator[Message]:
        """Yield the messages of a state in order of delivery, without touching any.

        Args:
            state: the state.
            filter: only what it matches.

        Raises:
            InvalidFilter: the filter cannot be read; the error points at the column.
        """
        for waiting in self.listed(state, filter):
            yield Message(self, self.life, state, waiting.file)

    def explain(self, state: str | None = None, filter: str | None = None) -> Iterator[Explanation]:
        """Say of each message that is not settled why nobody is handed it, or who holds it.

        Args:
            state: target, delayed or processing; None for all three.
            filter: only what it matches.

        Raises:
            InvalidFilter: the filter cannot be read; the error points at the column.
        """
        from dropq.explain import explain

        return explain(self, state, filter)

    def listed(self, state: str = "target", filter: str | None = None) -> Iterator[Waiting]:
        """Yield the files of a state's messages in order of delivery, by one listing."""
        life = self.life
        matches = None if filter is None else wanting(life, filter, state)
        with life.telling("nothing was changed"):
            for waiting in self._waiting(state):
                if (state not in RESERVED or not self._is_reserved(state, waiting.file)) and (
                    matches is None or matches(waiting)
                ):
                    yield waiting

    def _is_reserved(self, state: str, file: str) -> bool:
        try:
            return storage.is_reservation(os.lstat(f"{self.layout.folder(state)}/{file}"))
        except FileNotFoundError:
            return False  # RACE: it moved on since the listing; who acts on it is told

    @_telling("nothing was changed")
    def find(self, id: str, states: Iterable[str] = SEARCHED) -> Message:
        """Return a message by its id, its file name or its receipt, wherever it lies.

        Of several in one state it is the first in order of delivery.

        Raises:
            NoSuchMessage: it is in none of the states.
        """
        return self.find_all(id, states)[0]

    @_telling("nothing was changed")
    def find_all(self, id: str, states: Iterable[str] = SEARCHED) -> list[Message]:
        """Return the messages of an id in the first state that has any, in order of delivery.

        Args:
            id: an id, which a sender may have given to several, a file name or a receipt.
            states: where to look, in this order.

        Raises:
            NoSuchMessage: there is none in any of the states.
        """
        searched = tuple(states)
        for state in searched:
            if found := self._bearing(state, id):
                return [Message(self, self.life, state, waiting.file) for waiting in found]
        raise NoSuchMessage(f"no message {id!r} in queue {self.name} ({', '.join(searched)})")

    def _bearing(self, state: str, message_id: str) -> list[Waiting]:
        """Return the files of a state that have an id, or that name, in order of delivery; no sidecar is read."""
        bears, ignored = names.bears(message_id), self.life.sidecars.ignored
        found = {
            entry.name: Waiting(entry.name)
            for entry in storage.entries(self.layout.folder(state))
            if bears(entry.name)
            and not ignored(entry.name)
            and storage.is_message_file(entry)
            and not (state in RESERVED and self._is_reserved(state, entry.name))
        }
        if len(found) > 1:
            in_order = [waiting for waiting in self._waiting(state) if waiting.file in found]
            return in_order or list(found.values())  # RACE: all of them moved on since; who acts on them is told
        return list(found.values())

    def _waiting(self, state: str = "target") -> Iterator[Waiting]:
        life = self.life
        try:
            return view_of(life, state).waiting()
        except FileNotFoundError:
            if state != "delayed":
                raise
            return iter(())  # an older queue may lack that folder, until a message is delayed

    @_telling("nothing was changed")
    def counts(self) -> dict[str, int]:
        """Return how many messages lie in each state, by one listing of each folder."""
        patterns = self.config.ignore
        counts = storage.message_counts
        return {state: sum(counts(self.layout.folder(state), patterns)) for state in (*FOLDERS, "delayed")}

    @_telling("nothing was changed")
    def stats(self) -> dict[str, StateStats]:
        """Return count, bytes and oldest message of each state; it looks at every file."""
        return {state: self._state_stats(state) for state in (*FOLDERS, "delayed")}

    def _state_stats(self, state: str) -> StateStats:
        ignored = ignoring(self.config.ignore)
        count = size = 0
        oldest: int | None = None
        for entry in storage.entries(self.layout.folder(state)):
            if ignored(entry.name) or not storage.is_message_file(entry):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # RACE: it moved on since the listing
            name = self.life.sidecars.parse(names.split_claim(entry.name)[1])
            since = name.timestamp or name.since or found.st_ctime_ns // 1_000_000
            count, size = count + 1, size + found.st_size
            oldest = since if oldest is None else min(oldest, since)
        return StateStats(count, size, None if oldest is None else utc(oldest))

    # -- keeping it in order -----------------------------------------------------------------------------------

    def requeue(
        self, ids: Iterable[str] | None = None, *, state: str = "error", filter: str | None = None
    ) -> list[Outcome]:
        """Move messages back into target/ as if they were new; return what became of each.

        Args:
            ids: which; None takes all of the state.
            state: where they lie: error, expired, processed, or processing, whose holders lose their claims.
            filter: only what it matches.
        """
        from dropq import admin

        return list(admin.requeue(self, ids=ids, state=state, filter=filter))

    def replay(
        self,
        start: str | date | None = None,
        *,
        filter: str | None = None,
        ids: Iterable[str] | None = None,
        to: Queue | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Send archived messages again, each once and oldest first; return what became of each. The archive stays.

        They come as redelivered ones, without their own expirations, and the queue's clock starts again.

        Args:
            start: `epoch`, `now`, `creation`, an id that dropq made, an ISO 8601 date or time (UTC where it does not
                say); None is the queue's recovery_point, or all where ids are given.
            filter: a JMS selector: only what it matches.
            ids: which; None takes all from the point on.
            to: the queue that they go to; None is this one.
            dry_run: only say what would be done.

        Raises:
            ValueError: start is no point to begin at.
        """
        from dropq.replay import replay

        return list(replay(self, start, ids=ids, filter=filter, to=to, dry_run=dry_run))

    @_telling("the sweep did not come to its end: the next one goes on")
    def sweep(
        self,
        *,
        foreign_older_than: Duration | None = None,
        unleased_older_than: Duration | None = None,
        jobs_older_than: Duration | None = None,
    ) -> SweepReport:
        """Return what the dead held and what outlived its lease, deliver the delayed, expire, finish jobs, prune.

        Args:
            foreign_older_than: also return claims that scripts or DropboxMQ clients made so long ago.
            unleased_older_than: also return claims without lease and known holder that are so old.
            jobs_older_than: also drop jobs that were not committed and had no activity for so long.
        """
        from dropq.sweep import sweep

        return sweep(
            self.life,
            foreign_older_than=_seconds(foreign_older_than),
            unleased_older_than=_seconds(unleased_older_than),
            jobs_older_than=_seconds(jobs_older_than),
        )

    def fsck(self, repair: bool = False) -> list[Finding]:
        """Find what does not belong, and set it aside where asked; nothing is ever deleted."""
        from dropq.fsck import fsck

        return fsck(self, repair=repair)

    @_telling("whether the queue is paused, `dropq ls` tells")
    def pause(self) -> None:
        """Make consumers see an empty queue, until `resume`; senders go on."""
        self.life.storage.touch(self.layout.read_lock)

    @_telling("whether the queue is paused, `dropq ls` tells")
    def resume(self) -> None:
        """Let consumers see the queue again."""
        self.life.storage.unlink(self.layout.read_lock)

    @property
    @_telling("nothing was changed")
    def paused(self) -> bool:
        """Whether consumers see an empty queue: by this queue's read-lock or the root's."""
        return any(
            storage.is_there(path, self.root.clock) for path in (self.layout.read_lock, self.root.layout.read_lock)
        )

    def close(self) -> None:
        """Return what this object's own subscription holds."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _seconds(period: Duration | None) -> float | None:
    return None if period is None else parse_duration(period)


def _client_id() -> str:
    return f"{socket.gethostname().split('.')[0][:9]}-{os.getpid()}"
