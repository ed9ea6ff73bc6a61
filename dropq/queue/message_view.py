"""A message without the verbs that change it: its metadata, read from its file name, and its body."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, TypeVar

from dropq.errors import LeaseLost, NoSuchMessage
from dropq.format import names
from dropq.format.claims import Claim, claim_id
from dropq.format.layout import DEAD_LETTER, WAITING, WITH_REASON
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import find_claim
from dropq.lifecycle.settlement import Settlement
from dropq.storage import reading
from dropq.storage.clock import utc as utc
from dropq.storage.failures import storage_error

if TYPE_CHECKING:
    from dropq.records.record_settlement import RecordSettlement

T = TypeVar("T")


class MessageView:
    """A message of a queue, held by a claim or looked at in any state, without the verbs that change it."""

    __slots__ = (
        "_claim",
        "_delivery",
        "_file",
        "_forget",
        "_lock",
        "_parsed",
        "_records",
        "_settlement",
        "_state",
        "context",
    )

    def __init__(
        self,
        settlement: Settlement,
        state: str,
        file: MessageFile,
        *,
        claim: Claim | None = None,
        delivery: int = 0,
        forget: Callable[[str], None] | None = None,
    ) -> None:
        #: Its queue, for dropq's own modules.
        self.context: QueueContext = settlement.context
        self._settlement = settlement
        self._records: RecordSettlement | None = None  # what settles it once its records are taken
        self._state = state
        self._file = file
        self._claim = claim  # None where it is not held, or not any more
        self._delivery = claim.number if claim is not None else delivery
        self._forget = forget
        self._lock = threading.RLock()
        self._parsed: Name | None = None

    def __repr__(self) -> str:
        return f"<Message {self.id!r} of queue {self.context.name!r} in {self._state}>"

    def _claimed(self) -> Claim:
        if self._claim is None:
            raise LeaseLost(f"message {self.id} of queue {self.context.name} is not held (state: {self._state})")
        return self._claim

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def _name(self) -> Name:
        if self._parsed is None:
            name = self.context.sidecars.read(self._file)
            self._parsed = self.context.reasons.complete(self._state, self._file.filename, name)
        return self._parsed

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
        """What proves the claim to another process; None if it is not held.

        It is the file's name in processing/. Where the id is not a generated one, the size and time of the body follow
        behind a slash, so that an ack sees whether somebody has written to it.
        """
        claim = self._claim
        return claim.receipt if claim is not None else None

    @property
    def held(self) -> bool:
        """Whether this object holds a claim that it has not settled, as far as it knows."""
        return self._claim is not None

    @property
    def id(self) -> str:
        """The message id; a foreign file's is its whole name."""
        return self._name.id

    @property
    def _identity(self) -> tuple[str, int]:
        """What tells it from other messages of its id, as long as it waits or is held: see `names.identity`."""
        claim = self._claim
        return names.identity(self._name, self._file.arrival if claim is None else claim.arrival)

    @property
    def _distinction(self) -> str:
        """What tells it from all other messages of its id, as `Name.distinction` does."""
        if self._file.plain:
            return ""
        claim = self._claim
        return self._name.distinction(claim_id(claim.owner) if claim is not None and claim.ours else "")

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
    def filename(self) -> str | None:
        """The name of the file that it was sent from: its property `filename`, if that is safe in a path; else None.

        Safe are printable characters without a slash, at most 255 bytes, and without a dot or dash at the start.
        """
        return self._name.filename

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
        """How often it has been delivered, the present delivery included.

        Of a part of a bundle that was cut in two, this includes the deliveries of the bundle, which no limit counts.
        """
        return max(self._name.delivery_count, self._delivery or self._file.delivery_count) + self._name.cut

    @property
    def record_count(self) -> int | None:
        """How many records its sender counted in its body; None if the sender did not say."""
        return self._name.records or None

    @property
    def first_record(self) -> int | None:
        """The number that its first line, row or frame has in its bundle if it is a part of one; else None."""
        return self._name.first or None

    @property
    def record_number(self) -> int | None:
        """Its number in its bundle if it was a record of one; else None."""
        return self._name.record or None

    @property
    def cancels(self) -> int:
        """How often its holders gave it back by `nack`."""
        return self._name.cancels

    @property
    def deaths(self) -> int:
        """How often a holder died over it, or lost its lease, as sweeps counted it."""
        return self._name.died

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
            found = self.context.reasons.find(self._state, self._file.filename, reading.inode(self.path))
        except FileNotFoundError:
            return None
        if found is None and self._state == "error" and self.context.config.filter_rest == "error":
            from dropq.policies.filter_rest import found_aside  # few queues put anything aside

            return found_aside(self.context, self._file)
        return found

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
