"""What users get of a message: its metadata, read from its file name, its body, and the verbs that settle it.

A message object is a view of one file. Its verbs are serialised, and each of them is one rename by the lifecycle. A
signal handler may settle a message while its own thread does: the first rename counts, and the other verb raises
LeaseLost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from traceback import format_exception
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack, cast

from dropq.durations import Duration as Duration
from dropq.durations import parse_duration
from dropq.errors import DropqError, LeaseLost, StorageError
from dropq.format.claims import Claim, Location
from dropq.format.message_file import MessageFile
from dropq.lifecycle.endings import HowReturned
from dropq.lifecycle.moving import sync_settled
from dropq.lifecycle.processing import listing_once
from dropq.lifecycle.reasons import as_json
from dropq.lifecycle.settlement import Claims, Settlement, drop_private
from dropq.queue.message_view import MessageView
from dropq.queue.message_view import utc as utc
from dropq.records.rows import fields_of
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import error_context, told

if TYPE_CHECKING:
    from dropq.api import Queue
    from dropq.format.staged import OwnPart
    from dropq.queue.outputs import Out, Outputs
    from dropq.queue.sender import Sent
    from dropq.records.record_cursor import RecordCursor

#: The shortest lease, in seconds: names tell deadlines in milliseconds.
LEAST_LEASE = 0.001

T = TypeVar("T")

log = logging.getLogger("dropq")


class Message(MessageView):
    """A message of a queue: held by a claim, or looked at in any state.

    Each verb that settles it or renews its lease raises what `ack` raises, also where it was never held.
    """

    __slots__ = ()

    @property
    def queue(self) -> Queue:
        """The queue in which it was found."""
        return cast("Queue", self.context.public)

    def records(self, format: str | None = None) -> Iterator[Record]:
        """Take its body apart into records, each to be settled by itself; all are settled by one commit.

        One thread takes the records; any thread may settle them. Once some of them are settled, the message's own verbs
        concern what is left: `ack` acknowledges it, and the others return it, or set it aside, as a message that has
        the bundle's id and says where it begins. When the last record was taken and all are settled, the message is,
        too. If somebody died over the message, it is cut in two messages, which wait, and there are no records to take.

        Args:
            format: jsonl, text, csv or frames, where the message's type is none of them; None for text.

        Raises:
            ValueError: the format is unknown, or the body is a table.
            LeaseLost, NoSuchMessage, StorageError: as of `body`.
        """
        return iter(Bundle(self, format))

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

    def ack(self, *, send: Out | Iterable[Out] = ()) -> None:
        """Acknowledge it: it moves to processed/, or is removed if the queue keeps no history.

        Args:
            send: messages that were made of it, for any queues and topics of the root. They are sent by the commit that
                acknowledges it: all of them, or none, whichever process dies. If a queue makes senders wait, this
                renews the lease and waits. What a full queue discards is not sent, with a warning.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: the file system refused; the text says what became of the message.
            QueueFull, NoSuchQueue: a queue of `send` takes nothing; nothing was sent, and the message is still held.
            ConfigError: its queue delivers at most once or has barriers, or a queue of `send` lies where no rename
                leads; the same.
            ValueError: `send` has a value that no name can hold, or over 10,000 messages; or the message is shared with
                others, or records of it were settled otherwise; the same.
        """
        if send == ():
            self._settle((self._records or self._settlement).archive)
        else:
            self._ack_sending(send)

    def nack(self, delay: Duration | None = None) -> None:
        """Give it back: it returns to target/, and the delivery and a cancel are counted.

        Args:
            delay: how long no consumer receives it; None takes the queue's redelivery_delay.
        """
        self._nack(None if delay is None else parse_duration(delay), {})

    def release(self, *, counted: bool = True) -> None:
        """Give it back without a cancel, as a consumer that ends does.

        Args:
            counted: whether the delivery counts; False says that nobody got to work on it.
        """
        self._settle(partial(self._settles.release, counted=counted))

    def fail(self, reason: str, **details: object) -> None:
        """Report that handling it failed: it returns to target/ while tries last, then goes where `exhausted` says.

        How many tries there are, redelivery_attempts and max_deliveries say: the smaller decides. A dead letter goes
        to error/ at once: its delivery count is not of this queue.

        Args:
            reason: what went wrong, for people who look into error/.
            details: what else to keep with the reason, such as `traceback`, `exit_status` or `stderr`.
        """
        self._give_back(failure={"detail": reason, **details})

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
            extend = partial(self._settles.extend, deadline=deadline)
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._claim is None:
            return  # settled inside
        if error is None:
            self.ack()
        elif isinstance(error, Exception):
            self.fail(told(error), traceback="".join(format_exception(error)))
        else:
            self.release()  # the program is being stopped: that is not the message's fault

    # -- private ---------------------------------------------------------------------------------------------

    @property
    def _settles(self) -> Settlement:
        """What settles it: once its records are taken, by them."""
        return self._records or self._settlement

    def _ack_sending(self, send: Out | Iterable[Out], given_up: Callable[[], bool] | None = None) -> None:
        """Do what `ack` does; raise MustWait, with nothing settled, if the wait for room is `given_up`."""
        from dropq.queue.outputs import Outputs

        with Outputs(self, self.queue._destinations, given_up) as outputs:
            outputs.add_all(send)
            self._ack_with(outputs)

    def _ack_with(self, outputs: Outputs) -> None:
        outputs.sync()
        self._settle(outputs.archive)
        outputs.distribute()

    def _nack(self, delay: float | None, said: Mapping[str, object]) -> None:
        """Give it back, with what its handler said; `delay` in seconds."""
        self._give_back(cancel=True, delay=delay, said=said)

    def _give_back(self, **how: Unpack[HowReturned]) -> None:
        self._settle(partial(self._settles.give_back, **how))

    def _set_aside(self, state: str, reason: str, details: Mapping[str, object]) -> None:
        self._settle(partial(self._settles.set_aside, state=state, reason=reason, details=details))

    def _settle(self, move: Callable[[Claim], Location | None]) -> bool:
        """Settle it by a move; return False if the move did not look for a renewed claim, and changed nothing."""
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
            if location is None:
                return False
            self._done(location)
            return True

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
    """Return an act on a claim that does not look for a renewed claim: then it returns None, and changes nothing."""

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

    If the queue keeps no history, `kept` is the path of its body, which its ack or a sweep removes.
    """

    __slots__ = ("_kept",)

    def __init__(self, settlement: Settlement, location: Location, *, delivery: int, kept: str | None = None) -> None:
        file = settlement.context.sidecars.file(location.filename)
        super().__init__(settlement, location.state, file, delivery=delivery)
        self._kept = kept

    @property
    def path(self) -> str:
        """Where its file lies now."""
        return self._kept or super().path

    def ack(self, *, send: Out | Iterable[Out] = ()) -> None:
        """Remove what was kept of it; it was acknowledged before it was delivered, so nothing can go out with this."""
        if send != ():
            self.queue._destinations.refuse()
        if self._kept is not None:
            with error_context("the message is settled, and what it held is removed by a sweep"):
                drop_private(self.context, self._kept)
            self._kept = None


def ack_all(messages: Iterable[Message]) -> list[Message]:
    """Acknowledge messages of one queue, all of them final when this returns; return those whose claims were gone.

    At durability `full` they are synced together, which is quicker than one by one. One that was delivered at most once
    is acknowledged as its own `ack` does.

    Raises:
        StorageError: one could not be moved, and stays as it is, as those after it; or what was moved is not durable.
    """
    missed, lost = list[Message](), list[Message]()
    unsynced = dict[str, None]()

    def ack(message: Message, *, seek: bool) -> None:
        try:
            archive = partial((message._records or message._settlement).archive, later=unsynced)
            if not message._settle(archive if seek else _where_it_was(archive)):
                missed.append(message)
        except LeaseLost:
            lost.append(message)

    try:
        for message in messages:
            if isinstance(message, SettledMessage):
                message.ack()
            else:
                ack(message, seek=message._records is not None)  # a claim that is not found closes the body of a bundle
        with listing_once(missed[0].context) if missed else nullcontext():
            for message in missed:
                ack(message, seek=True)
    finally:
        if unsynced:
            sync_settled(message.context, *unsynced)
    return lost


def extend_all(messages: Iterable[Message], period: Duration) -> list[tuple[Message, DropqError]]:
    """Renew the leases of messages of one queue; return those that were not renewed, each with its error.

    Those whose claims were not renewed come first; one listing finds the others.
    """
    missed, refused = list[Message](), list[tuple[Message, DropqError]]()

    def extend(message: Message, *, seek: bool) -> None:
        if not message._lock.acquire(blocking=False):
            return  # another thread settles it, and renews its lease if that takes long
        try:
            if not message._extend(period, seek=seek):
                missed.append(message)
        except DropqError as error:  # the others are as good as before
            refused.append((message, error))
        finally:
            message._lock.release()

    for message in messages:
        extend(message, seek=False)
    with listing_once(missed[0].context) if missed else nullcontext():
        for message in missed:
            extend(message, seek=True)
    return refused


# -- records -------------------------------------------------------------------------------------------------------

#: A checkpoint is due after so many times as long as it takes to write what is left.
SHARE = 20
#: Bytes of records that were not acknowledged and wait in memory, after which a checkpoint is due.
BUFFERED_BYTES = 16 << 20


class Record:
    """A record of a bundle.

    Each verb that settles it raises LeaseLost if it was settled before, or its bundle is not held any more.

    Attributes:
        number: its number in the bundle as it was sent, from 1.
        data: its bytes.
    """

    __slots__ = ("_bundle", "data", "number")

    def __init__(self, bundle: Bundle, number: int, data: bytes) -> None:
        self.number = number
        self.data = data
        self._bundle = bundle

    def __repr__(self) -> str:
        return f"<Record {self.number} of message {self.message.id!r}>"

    @property
    def message(self) -> Message:
        """The message that it is in."""
        return self._bundle.message

    @property
    def text(self) -> str:
        """Its bytes as UTF-8 text; bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """Return the value that it is the JSON of.

        Raises:
            ValueError: it is no JSON; it stays as it is.
        """
        from dropq.format.json_body import from_json

        try:
            return from_json(self.data)
        except ValueError as error:
            raise ValueError(f"record {self.number} of message {self.message.id} is not JSON: {error}") from error

    @property
    def fields(self) -> dict[str, str]:
        """Its fields by the names of the columns, of a row of csv.

        Raises:
            ValueError: it is no row of csv, or has another number of fields than the header; or two columns have one
                name.
        """
        return self._bundle.fields(self)

    @property
    def delivery_count(self) -> int:
        """How often its bundle was delivered, with this delivery."""
        return self.message.delivery_count

    @property
    def redelivered(self) -> bool:
        """Whether its bundle was delivered before."""
        return self.message.redelivered

    def ack(self) -> None:
        """Acknowledge it; this is durable once its bundle is settled, or at the next checkpoint."""
        if not self._bundle.cursor.ack(self.number):
            self._bundle.refuse(self)

    def nack(self, delay: Duration | None = None) -> None:
        """Give it back: once its bundle is settled, it waits in target/, as a message of its own.

        Args:
            delay: how long no consumer receives it; None takes the queue's redelivery_delay.
        """
        self._nack(None if delay is None else parse_duration(delay), {})

    def fail(self, reason: str, **details: object) -> None:
        """Report that handling it failed: it becomes a message, to be retried, or lies in error/, as `Message.fail`."""
        self._settle("fail", None, reason, details)

    def reject(self, reason: str, **details: object) -> None:
        """Refuse it for good: once its bundle is settled, it is a message in error/, with the reason.

        Where others share the message, as with a barrier, the whole message has failed.
        """
        self._settle("reject", None, reason, details)

    def _nack(self, delay: float | None, said: Mapping[str, object]) -> None:
        self._settle("nack", delay, "", said)

    def _settle(self, verb: str, delay: float | None, reason: str = "", details: Mapping[str, object] = {}) -> None:
        from dropq.records.record_cursor import Fate

        try:
            as_json([reason, details])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self!r}: its reason cannot be kept, as {error}; nothing was changed") from error
        if self._bundle.settles_whole:
            return self._bundle.fail_whole(self, reason or verb, details)
        fate = Fate(verb, delay, reason, details)
        if not self._bundle.cursor.settle(self.number, self.data, fate):
            self._bundle.refuse(self)
        self._bundle.note_failure()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.number not in self._bundle.cursor.unsettled:
            return  # settled inside
        if error is None:
            self.ack()
        elif isinstance(error, Exception):
            self.fail(told(error), traceback="".join(format_exception(error)))


class Bundle:
    """The records of one message, for its holder.

    Args:
        wanted: the format, if the message's type is no format; None for text.
        lease: seconds of its lease; None takes what is left of it now.
        checkpoint: seconds after which what is settled is committed; None for never.
        failures: how many of its records have failed before, by the same reader.

    Raises:
        ValueError, LeaseLost, NoSuchMessage, StorageError: as of `Message.records`.
    """

    def __init__(
        self,
        message: Message,
        wanted: str | None,
        *,
        lease: float | None = None,
        checkpoint: float | None = None,
        failures: int = 0,
    ) -> None:
        from dropq.records.record_settlement import RecordSettlement

        self.message = message
        self.identity = message._identity
        self._failed_before = failures
        self._config = message.context.config
        self._checkpoint = checkpoint
        self._columns: list[str] | None = None
        self._settlement = message._records
        self.cursor = self._open(wanted) if self._settlement is None else self._settlement.cursor
        self._began = time.monotonic()
        self._due_at = self._due() if checkpoint is not None else float("inf")
        claim = message._claim
        # Others share what is not settled by the queue's own claims: it is settled as a whole.
        if self._settlement is None and claim is not None and isinstance(message._settlement, Claims):
            if lease is None and claim.deadline:
                lease = max(claim.deadline - message.context.clock.now_ms(), 1) / 1000
            message._records = self._settlement = RecordSettlement(message._settlement, self.cursor, lease)

    def _open(self, wanted: str | None) -> RecordCursor:
        from dropq.records.formats import format_of
        from dropq.records.reader import BLOCK
        from dropq.records.record_cursor import RecordCursor

        name = self.message._name
        body_format = format_of(name.type, wanted)
        file = self.message._reading(partial(reading.open_body, buffering=BLOCK))
        with error_context("the message is still held"):
            return RecordCursor(file, body_format, first=name.begins, max_bytes=self._config.max_record_bytes)

    @property
    def failures(self) -> int:
        """How many of its records have failed until now."""
        return self._failed_before + self.cursor.failed

    @property
    def parts(self) -> list[OwnPart]:
        """The parts that the message was settled as; empty if it is not settled, or one rename settled it."""
        return [] if self._settlement is None else self._settlement.parts

    @property
    def kept_whole(self) -> str:
        """Why the message was settled as a whole although records of it were settled; empty if it was not."""
        return "" if self._settlement is None else self._settlement.kept_whole

    def _due(self) -> float:
        speed = self.message.context.storage.copy_speed
        return self._began + max(self._checkpoint or 0.0, SHARE * self.cursor.size / speed)

    # -- taking records ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Record]:
        """Yield each record; settle the message once all were taken and settled."""
        cursor, take, now, new = self.cursor, self.cursor.take, time.monotonic, object.__new__
        is_delivered = self.message.held or isinstance(self.message, SettledMessage)
        try:
            if cursor.is_fresh and self._cut():
                return
            while (raw := take()) is not None:
                if not is_delivered:
                    cursor.unsettled.clear()
                record = new(Record)  # a call of the class takes half as long again
                record._bundle, record.number, record.data = self, raw[0], raw[3]
                yield record
                if now() >= self._due_at and not cursor.unsettled and self._settlement is not None:
                    return self._commit()
        except ValueError:  # RACE: a signal handler settled the message, and closed its body: no record comes any more
            if not cursor.file.closed:
                raise
        if not cursor.unsettled:
            self._commit()

    def _commit(self) -> None:
        """Settle the message as its records say; what is left waits, or goes to error/."""
        message, cursor = self.message, self.cursor
        if self._settlement is None:
            return self._settle_whole()
        if not message.held:
            return
        if self.failures >= self._config.max_record_failures and (cursor.unsettled or cursor.next is not None):
            detail = f"{self.failures} of its records failed: that many are allowed by max_record_failures"
            message._set_aside("error", "too_many_records", {"detail": detail})
        elif cursor.next is not None and (problem := cursor.unreadable) is not None:
            message._set_aside("error", "unreadable", {"detail": str(problem), "record": problem.number})
        else:
            message._settle(self._settlement.checkpoint)

    @property
    def settles_whole(self) -> bool:
        """Whether others share the message, or it was settled before it was delivered."""
        return self._settlement is None

    def _settle_whole(self) -> None:
        """Acknowledge a message whose records cannot be settled one by one."""
        self.cursor.file.close()
        is_settled, problem = isinstance(self.message, SettledMessage), self.cursor.unreadable
        if problem is not None and not is_settled:
            self.message.reject(str(problem))
        elif self.message.held or is_settled:
            if problem is not None:
                log.warning("message %s, which was settled before: %s; the rest is not read", self.message.id, problem)
            self.message.ack()

    def fail_whole(self, record: Record, reason: str, details: Mapping[str, object]) -> None:
        """Fail a message whose records cannot be settled one by one; what was delivered at most once cannot fail."""
        with nullcontext() if isinstance(self.message, SettledMessage) else self.cursor.frozen():
            self.message.fail(f"record {record.number}: {reason}", **details)

    def _cut(self) -> bool:
        """Cut a bundle in two if a holder died over it, or lost it; return whether it was cut."""
        message = self.message
        if message._claim is None or self._settlement is None or not (name := message._name).died:
            return False
        middle = _middle(message, self.cursor, self._config.max_record_bytes)
        if middle is None or self.cursor.next is None:  # last, as it reads the head, with which the later half begins
            return False
        message._settle(partial(self._settlement.cut, at=middle, first=name.begins))
        if self.parts:
            log.info("message %s is cut in two: %d of its holders died or lost it", message.id, name.died)
        return True

    # -- what its records ask ------------------------------------------------------------------------------------

    def note_failure(self) -> None:
        """Make a checkpoint due if too many records failed, or their bytes take too much memory."""
        if self.cursor.buffered_bytes >= BUFFERED_BYTES or self.failures >= self._config.max_record_failures:
            self._due_at = 0.0

    def refuse(self, record: Record) -> NoReturn:
        """Raise LeaseLost for a record that cannot be settled any more."""
        why = " was settled before; nothing was changed" if self.message.held else ": the message is not held any more"
        raise LeaseLost(f"record {record.number} of message {self.message.id}{why}")

    def fields(self, record: Record) -> dict[str, str]:
        """Return the fields of a row by the names of the columns."""
        where = f"record {record.number} of message {self.message.id}"
        if self.cursor.format != "csv":
            raise ValueError(f"{where} is {self.cursor.format}, which has no columns: use json(), text or data")
        if self._columns is None:
            self._columns = self._columns_of(where)
        try:
            row = fields_of(record.text)
        except ValueError as error:
            raise ValueError(f"{where} cannot be taken apart: {error}") from error
        if len(row) != len(self._columns):
            raise ValueError(f"{where} has {len(row)} fields, and its header names {len(self._columns)}")
        return dict(zip(self._columns, row, strict=True))

    def _columns_of(self, where: str) -> list[str]:
        """Return the names of the columns, which differ; a column without a name may occur several times."""
        columns = fields_of(self.cursor.head.decode("utf-8-sig", errors="replace").strip("\r\n"))
        if twice := [name for name, count in Counter(columns).items() if name and count > 1]:
            raise ValueError(f"{where}: its header has column {twice[0]!r} twice, and fields has each once: use text")
        return columns


def _middle(message: Message, cursor: RecordCursor, max_bytes: int) -> tuple[int, int] | None:
    """Return where the record in the middle of a body begins, by number and byte.

    Of a body that has less than two, or that cannot be read to its end and so not be copied, it returns None.
    """
    from dropq.records.formats import Unreadable
    from dropq.records.reader import RecordReader

    file, first = cursor.file, message._name.begins
    at = file.tell()  # its cursor may have read ahead

    def beginnings() -> Iterator[tuple[int, int]]:
        file.seek(0)
        with suppress(Unreadable):
            for number, begin, _, _ in RecordReader(file, cursor.format, first=first, max_bytes=max_bytes):
                yield number, begin

    try:
        count = sum(1 for _ in beginnings())
        return next(islice(beginnings(), (count + 1) // 2, None), None) if count > 1 else None
    except OSError:
        return None
    finally:
        file.seek(at)
