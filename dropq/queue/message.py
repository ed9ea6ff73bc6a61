"""What users get of a message: its metadata, read from its file name, its body, and the verbs that settle it.

A message object is a view of one file. Its verbs are serialised, and each of them is one rename by the lifecycle. A
signal handler may settle a message while its own thread does: the first rename counts, and the other verb raises
LeaseLost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from traceback import format_exception
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from dropq.durations import Duration as Duration
from dropq.durations import parse_duration
from dropq.errors import DropqError, LeaseLost, NoSuchMessage, StorageError
from dropq.format.claims import Claim, Location
from dropq.format.layout import DEAD_LETTER, WAITING, WITH_REASON
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.claims import find_claim, listing_once
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.dead_letters import is_letter
from dropq.lifecycle.transitions import Transitions
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import error_context, storage_error

if TYPE_CHECKING:
    from dropq.api import Queue
    from dropq.queue.sender import Sent

#: The shortest lease, in seconds: names tell deadlines in milliseconds.
LEAST_LEASE = 0.001

T = TypeVar("T")


class Message:
    """A message of a queue: held by a claim, or looked at in any state.

    Each verb that settles it or renews its lease raises what `ack` raises, also where it was never held.
    """

    __slots__ = (
        "_claim",
        "_delivery",
        "_file",
        "_forget",
        "_lock",
        "_parsed",
        "_state",
        "_transitions",
        "context",
    )

    def __init__(
        self,
        transitions: Transitions,
        state: str,
        file: MessageFile,
        *,
        claim: Claim | None = None,
        delivery: int = 0,
        forget: Callable[[str], None] | None = None,
    ) -> None:
        #: What dropq's own modules need to know of its queue.
        self.context: QueueContext = transitions.context
        self._transitions = transitions
        self._state = state
        self._file = file
        self._claim = claim  # None where it is not held, or not any more
        self._delivery = claim.number if claim is not None else delivery
        self._forget = forget
        self._lock = threading.RLock()
        self._parsed: Name | None = None

    def __repr__(self) -> str:
        return f"<Message {self.id!r} of queue {self.context.name!r} in {self._state}>"

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def _name(self) -> Name:
        if self._parsed is None:
            self._parsed = self.context.sidecars.read(self._file)
        return self._parsed

    @property
    def queue(self) -> Queue:
        """The queue in which it was found."""
        return cast("Queue", self.context.public)

    @property
    def state(self) -> str:
        """The state in which this object found it, or to which this object moved it."""
        return self._state

    @property
    def name(self) -> str:
        """Its file name, without a claim's prefix."""
        claim = self._claim  # once, as another thread may settle it at this moment
        return claim.own_name if claim is not None else self._file.own_name

    @property
    def file(self) -> str:
        """Its file name in its folder, with the claim's prefix."""
        claim = self._claim
        return claim.filename if claim is not None else self._file.filename

    @property
    def path(self) -> str:
        """Where its file lies now; a renewed lease changes it."""
        claim = self._claim
        if claim is not None:
            return claim.path
        if self._state == "removed":
            raise NoSuchMessage(f"message {self.id} was settled; queue {self.context.name} keeps no history")
        if self._state == DEAD_LETTER:
            letters = self.context.config.dead_letter_queue
            raise NoSuchMessage(f"message {self.id} is a dead letter now, in queue {letters}")
        return f"{self.context.layout.folder(self._state)}/{self.file}"

    @property
    def receipt(self) -> str | None:
        """What proves the claim to another process: the file's name in processing/; None if it is not held."""
        claim = self._claim
        return claim.filename if claim is not None else None

    @property
    def held(self) -> bool:
        """Whether this object holds a claim that it has not settled, as far as it knows."""
        return self._claim is not None

    @property
    def id(self) -> str:
        """The message id; a foreign file's is its whole name."""
        return self._name.id

    @property
    def priority(self) -> int:
        """The JMS priority, 4 by default; higher goes first."""
        return self._name.priority

    @property
    def type(self) -> str | None:
        """The JMS type."""
        return self._name.type

    @property
    def message_class(self) -> str:
        """The class: M, B (bytes), S, P, O or T (text)."""
        return self._name.message_class

    @property
    def correlation_id(self) -> str | None:
        """The JMS correlation id."""
        return self._name.correlation_id

    @property
    def reply_to(self) -> str | None:
        """The queue that answers should go to."""
        return self._name.reply_to

    @property
    def properties(self) -> Mapping[str, bool | int | float | str]:
        """The sender's properties by name, as Python values."""
        return {key: typed.value for key, typed in self._name.properties.items()}

    @property
    def timestamp(self) -> datetime:
        """When it was sent: the time in its id, else when its file came to the folder where dropq first saw it."""
        name = self._name
        claim = self._claim
        known = name.timestamp or name.since or (claim.arrival if claim is not None else 0)
        return utc(known or self._reading(reading.changed_ms))

    @property
    def expiration(self) -> datetime | None:
        """When it expires by its own expiration; None for never."""
        return utc(self._name.expiration) if self._name.expiration else None

    @property
    def not_before(self) -> datetime | None:
        """When its delay ends; None if it has none."""
        return utc(self._name.not_before) if self._name.not_before else None

    @property
    def since(self) -> datetime | None:
        """When the queue's expiration began to count, if the id does not show that, as after a requeue; else None."""
        return utc(self._name.since) if self._name.since else None

    @property
    def delivery_count(self) -> int:
        """How often it has been delivered, the present delivery included."""
        return max(self._name.delivery_count, self._delivery or self._file.delivery_count)

    @property
    def cancels(self) -> int:
        """How often its holders gave it back by `nack`."""
        return self._name.cancels

    @property
    def redelivered(self) -> bool:
        """Whether it was delivered before the present delivery."""
        return self.delivery_count > (0 if self._state in WAITING else 1)

    @property
    def deadline(self) -> datetime | None:
        """When its lease runs out; None if it is not held, or has no lease."""
        claim = self._claim or self._file.claim
        return utc(claim.deadline) if claim is not None and claim.deadline else None

    @property
    def owner(self) -> str | None:
        """Who holds it: client, subscription and claim; None if nobody holds it."""
        claim = self._claim or self._file.claim
        return claim.owner if claim is not None and self._state == "processing" else None

    @property
    def reason(self) -> Mapping[str, object] | None:
        """Why it lies in error/ or expired/: `reason`, `time`, and details such as `traceback`; None if unknown."""
        if self._state not in WITH_REASON:
            return None
        try:
            return self.context.reasons.find(self._state, self._file.filename, reading.inode(self.path))
        except FileNotFoundError:
            return None

    @property
    def origin(self) -> str | None:
        """The queue that it was in last, or was sent to, before it became a dead letter; None if it is none."""
        return self._name.origin or None

    @property
    def dead_letter_reason(self) -> str | None:
        """Why it became a dead letter, in a word such as `max_deliveries` or `no_such_queue`; None if it is none."""
        return self._name.reason or None

    # -- what it says ----------------------------------------------------------------------------------------

    @property
    def body(self) -> bytes:
        """Its whole body.

        Raises:
            LeaseLost: the claim is gone.
            NoSuchMessage: the message was not held, and its file is not there any more.
            StorageError: the file cannot be read.
        """
        claim = self._claim
        try:
            return reading.read_body(self.path if claim is None else claim.path)
        except OSError:
            return self._reading(reading.read_body)  # after a renewed lease, or to say why it cannot be read

    @property
    def text(self) -> str:
        """Its body as UTF-8 text; bytes that are not UTF-8 become U+FFFD."""
        return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """Return the value that its body is the JSON of.

        Raises:
            ValueError: the body is not JSON; the message stays as it is.
            LeaseLost, NoSuchMessage, StorageError: as of `body`.
        """
        from dropq.format.json_body import from_json

        body = self.body
        try:
            return from_json(body)
        except ValueError as error:
            raise ValueError(f"message {self.id}: its body is not JSON: {error}") from error

    def open(self) -> IO[bytes]:
        """Open its body, to read it piece by piece.

        If another NFS client removes the file meanwhile, reading raises OSError with ESTALE.

        Raises:
            LeaseLost, NoSuchMessage, StorageError: as of `body`.
        """
        return self._reading(reading.open_body)

    def size(self) -> int:
        """Return the length of its body in bytes."""
        return self._reading(os.path.getsize)

    def link(self, path: str) -> None:
        """Give its body a second name, which a renewed lease does not change; a copy where links fail."""
        self._reading(lambda source: self.context.storage.link_or_copy(source, path))

    def _reading(self, read: Callable[[str], T]) -> T:
        try:
            try:
                claim = self._claim  # without the lock: a lease has to be renewed while a long body is read
                return read(self.path if claim is None else claim.path)
            except OSError as error:
                if not reading.is_gone(error):
                    raise
                return read(self._renewed_path())  # what is gone for good is not found there
        except FileNotFoundError as error:
            if self._claim is not None:
                raise LeaseLost(f"message {self.id}: the claim on it is gone; its body was not read") from error
            where = f"queue {self.context.name}, {self._state}/"
            raise NoSuchMessage(f"message {self.id} is not in {where} any more") from error
        except OSError as error:
            raise storage_error(error, "its body was not read") from error

    def _renewed_path(self) -> str:
        """RACE: a renewed lease renames the file, by this process or another. Its claim's owner finds it."""
        with self._lock:
            if self._claim is not None and (renewed := find_claim(self.context, self._claim.owner)) is not None:
                self._claim.follow(renewed)
            return self.path

    def reply(self, body: bytes | str, **fields: Any) -> Sent:
        """Send an answer to the queue of the same root that its `reply_to` names; this does not settle the message.

        The answer's correlation id is this message's correlation id, or its id if it has none, as JMS has it.

        Args:
            body: as for `Queue.send`.
            fields: the other arguments of `Queue.send`; a `correlation_id` replaces the one above.

        Raises:
            ValueError: the message has no `reply_to`; nothing was sent.
            InvalidName: its `reply_to` cannot be the name of a queue; nothing was sent.
            NoSuchQueue: its `reply_to` names no queue of the root, which has no dead-letter queue; nothing was sent.
            QueueFull, StorageError: as of `Queue.send`.
        """
        from dropq.queue.replies import correlated, reply_queue

        return reply_queue(self).send(body, **correlated(self, fields))

    # -- what becomes of it ----------------------------------------------------------------------------------

    def ack(self) -> None:
        """Acknowledge it: it moves to processed/, or is removed if the queue keeps no history.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: the file system refused; the text says what became of the message.
        """
        self._settle(self._transitions.archive)

    def nack(self, delay: Duration | None = None) -> None:
        """Give it back: it returns to target/, and the delivery and a cancel are counted.

        Args:
            delay: how long no consumer receives it; None takes the queue's redelivery_delay.
        """
        seconds = None if delay is None else parse_duration(delay)
        self._give_back(cancel=True, delay=seconds)

    def release(self, *, counted: bool = True) -> None:
        """Give it back without a cancel, as a consumer that ends does.

        Args:
            counted: whether the delivery counts; False says that nobody got to work on it.
        """
        self._give_back(counted=counted, delay=None if counted else 0)

    def fail(self, reason: str, **details: object) -> None:
        """Report that handling it failed: it returns to target/ while redelivery_attempts last, then goes to error/.

        A dead letter goes to error/ at once: its delivery count is not of this queue.

        Args:
            reason: what went wrong, for people who look into error/.
            details: what else to keep with the reason, such as `traceback`, `exit_status` or `stderr`.
        """
        tries = self.context.config.redelivery_attempts
        if self._claimed().number <= tries and not is_letter(self.context, self._name):
            self._give_back()
        else:
            self._set_aside("error", "failed", {"detail": reason, **details})

    def reject(self, reason: str, **details: object) -> None:
        """Refuse it for good: it moves to error/ at once, with the reason."""
        self._set_aside("error", "rejected", {"detail": reason, **details})

    def expire(self) -> None:
        """Expire it now: it moves to expired/."""
        self._set_aside("expired", "forced_expire", {})

    def extend(self, period: Duration) -> None:
        """Renew its lease: it ends a period from now; the receipt changes, and older ones stay valid.

        Args:
            period: how long from now, at least 1ms.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            ValueError: the period is 0, or no period; nothing was changed.
        """
        self._extend(period)

    def _extend(self, period: Duration, *, seek: bool = True) -> bool:
        seconds = parse_duration(period)
        if seconds < LEAST_LEASE:
            raise ValueError(
                f"extend({period!r}): at least 1ms; nack or release gives the message back at once; nothing was changed"
            )
        with self._lock:
            deadline = lease_end(self.context.clock, seconds)
            claim = self._claim or self._claimed()
            extend = partial(self._transitions.extend, deadline=deadline)
            if not seek:
                return _where_it_was(extend)(claim) is not None
            try:
                extend(claim)
            except LeaseLost:
                self._done(None)
                raise
            return True

    def __enter__(self) -> Message:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._claim is None:
            return  # settled inside
        if error is None:
            self.ack()
        elif isinstance(error, Exception):
            self.fail(f"{type(error).__name__}: {error}", traceback="".join(format_exception(error)))
        else:
            self.release()  # the program is being stopped: that is not the message's fault

    # -- private ---------------------------------------------------------------------------------------------

    def _claimed(self) -> Claim:
        if self._claim is None:
            raise LeaseLost(f"message {self.id} of queue {self.context.name} is not held (state: {self._state})")
        return self._claim

    def _give_back(self, *, cancel: bool = False, counted: bool = True, delay: float | None = None) -> None:
        self._settle(partial(self._transitions.give_back, cancel=cancel, counted=counted, delay=delay))

    def _set_aside(self, state: str, reason: str, details: Mapping[str, object]) -> None:
        self._settle(partial(self._transitions.set_aside, state=state, reason=reason, details=details))

    def _settle(self, move: Callable[[Claim], Location | None]) -> bool:
        """Settle it by a move; return False where the move did not seek the claim, and nothing was changed."""
        with self._lock:
            claim = self._claim or self._claimed()
            try:
                location = move(claim)
            except LeaseLost:
                self._done(None)
                raise
            except StorageError as error:
                if error.location is not None:  # it has left, and only that is not durable
                    self._done(Location(*error.location))
                raise
            if location is not None:
                self._done(location)
            return location is not None

    def _done(self, location: Location | None) -> None:
        """Stop holding it: the subscription that handed it out may take another."""
        claim, self._claim = self._claim, None
        filename = self._file.filename if claim is None else claim.filename
        if location is not None:
            self._state, filename = location
        if filename != self._file.filename:
            self._file = MessageFile(filename, typed_replies=self._file.typed_replies)
        forget, self._forget = self._forget, None
        if forget is not None and claim is not None:
            forget(claim.owner)


def _where_it_was(act: Callable[[Claim], T]) -> Callable[[Claim], T | None]:
    """Return an act on a claim that is not sought where it was renewed: that returns None, and changes nothing."""

    def acting(claim: Claim) -> T | None:
        exact, claim.exact = claim.exact, True
        try:
            return act(claim)
        except LeaseLost:
            return None
        finally:
            claim.exact = exact

    return acting


class SettledMessage(Message):
    """A message that was settled before it was delivered, at most once: its ack changes nothing that others see.

    Args:
        kept: the path of its body where the queue keeps no history; its ack removes it, else a sweep.
    """

    __slots__ = ("_kept",)

    def __init__(
        self,
        transitions: Transitions,
        location: Location,
        *,
        delivery: int,
        kept: str | None = None,
    ) -> None:
        file = transitions.context.sidecars.file(location.filename)
        super().__init__(transitions, location.state, file, delivery=delivery)
        self._kept = kept

    @property
    def path(self) -> str:
        """Where its file lies now."""
        kept = self._kept
        return super().path if kept is None else kept

    def ack(self) -> None:
        """Remove what was kept of it; it was acknowledged before it was delivered."""
        if self._kept is not None:
            with error_context("the message is settled, and what it held is removed by a sweep"):
                self._transitions.drop_private(self._kept)
            self._kept = None


def ack_all(messages: Iterable[Message]) -> list[Message]:
    """Acknowledge messages of one queue, all of them final when this returns; return those whose claims were gone.

    At durability `full` they are synced together, which is quicker than one by one.

    Raises:
        StorageError: one could not be moved, and stays as it is, as those after it; or what was moved is not durable.
    """
    missed, lost = list[Message](), list[Message]()
    acknowledged: Message | None = None

    def ack(message: Message, *, seek: bool) -> None:
        nonlocal acknowledged
        try:
            archive = partial(message._transitions.archive, synced=False)
            if message._settle(archive if seek else _where_it_was(archive)):
                acknowledged = message
            else:
                missed.append(message)
        except LeaseLost:
            lost.append(message)

    try:
        for message in messages:
            ack(message, seek=False)
        with listing_once(missed[0].context) if missed else nullcontext():
            for message in missed:
                ack(message, seek=True)
    finally:
        if acknowledged is not None:
            acknowledged._transitions.archived()
    return lost


def extend_all(messages: Iterable[Message], period: Duration) -> list[tuple[Message, DropqError]]:
    """Renew the leases of messages of one queue; return those that were not renewed, each with its error.

    Those whose claims are where they were come first; the others are looked for by one listing.
    """
    missed, refused = list[Message](), list[tuple[Message, DropqError]]()

    def extend(message: Message, *, seek: bool) -> None:
        try:
            if not message._extend(period, seek=seek):
                missed.append(message)
        except DropqError as error:  # the others are as good as before
            refused.append((message, error))

    for message in messages:
        extend(message, seek=False)
    with listing_once(missed[0].context) if missed else nullcontext():
        for message in missed:
            extend(message, seek=True)
    return refused


#: The last moment that a datetime can tell; names may hold later ones.
LAST_MS = int(datetime.max.replace(tzinfo=UTC).timestamp() * 1000) - 1


def utc(ms: int) -> datetime:
    """Return a time in milliseconds since 1970, or the last that a datetime can tell."""
    return datetime.fromtimestamp(min(ms, LAST_MS) / 1000, UTC)
