"""What a stream has claimed, in batches that are written down: whoever goes on after a crash reads the same again.

A stream is a reader that may die and come again, such as a streaming query. Its folder in `.dropq/streams/` tells which
subscriptions claim for it, one for each of its runs and known there before the first claim, and which messages each
batch holds. Invariant: what one of its runs claimed is in a batch, or comes into the next one; a batch's file stays
until every message of it is settled. The claims have leases, which a run renews while it lives: a stream that does not
come again loses them, and its messages return.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dropq.errors import ConfigError, DropqError, LeaseLost
from dropq.format import names
from dropq.format.claims import Claim, claim_id, claim_order
from dropq.format.message_file import MessageFile
from dropq.lifecycle.claims import claims_in
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transitions import Transitions
from dropq.queue.lease_renewer import renew_held
from dropq.queue.message import Message, ack_all, extend_all
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.files import refuse_links

if TYPE_CHECKING:
    from dropq.queue.subscription import Subscription

log = logging.getLogger("dropq")

#: Seconds of a stream's leases where neither reader nor queue says: enough to start a query again after a crash.
LEASE = 600.0

_BATCH = re.compile(r"([0-9]+)\.json")
_STREAM = re.compile(r"[\w*%+-]{1,100}", re.ASCII)
_RUN = "run-"
_SETTLED = "settled-"


def runs(context: QueueContext) -> frozenset[str]:
    """Return the subscriptions that claim for the streams of a queue; a stream that cannot be looked at has none."""
    found = set[str]()
    for entry in reading.entries(context.layout.streams):
        try:
            found |= _runs(entry.path) if entry.is_dir(follow_symlinks=False) else set()
        except OSError as error:
            why = describe(error)
            log.warning("the stream %s cannot be read (%s): what its leases lose comes back as new", entry.path, why)
    return frozenset(found)


def lapsed_claim(claim: Claim, streams: frozenset[str]) -> str:
    """Return what a name is to say of a lease that ran out: by which claim a stream knows the message, if one does."""
    return _entry(claim.filename) if claim.subscription in streams else ""


def _runs(folder: str) -> set[str]:
    return {name.removeprefix(_RUN) for name in reading.names_in(folder) if name.startswith(_RUN)}


def _entry(filename: str) -> str:
    """Return what a claimed message is called in a batch: the first claim on it, whoever of the stream has it now.

    Only the stream itself claims a message whose name tells of a lease that ran out, and leaves that there.
    """
    file = MessageFile(filename)
    return file.name.lapsed or (claim_id(file.claim.owner) if file.claim is not None else "")


class Journal:
    """The batches of one stream, as one run of it holds them.

    The newest run of a stream has it: one that goes on although another began since is refused, as both would settle
    and offer the same batches.

    Args:
        context: the queue that the stream reads.
        stream: what names the stream, whichever run of it this is.
        subscription: what this run claims by; detached, and with a lease.

    Raises:
        ConfigError: the queue delivers at most once, and a stream may have to read twice.
        NoSuchQueue, StorageError: the journal cannot be kept.
    """

    def __init__(self, context: QueueContext, stream: str, subscription: Subscription) -> None:
        if not _STREAM.fullmatch(stream):
            raise ValueError(f"{stream!r} cannot name a stream: letters, digits, -, _, *, % and +, at most 100")
        if not subscription.lease:
            raise ValueError("a stream claims by leases: without one its messages would wait for it for ever")
        check_semantics(context)
        self.lease = subscription.lease
        self._context = context
        self._folder = f"{self._context.layout.streams}/{stream}"
        self._lock = threading.RLock()
        #: The batches that this run holds, their messages by what they are called there.
        self._batches: dict[int, dict[str, Message]] = {}
        self._subscription = subscription
        self._has_looked_back = False
        self._run = f"{self._folder}/{_RUN}{subscription.id}"
        refuse_links([self._folder])
        with self._kept():
            self._earlier = frozenset(_runs(self._folder))
            self._inherited = frozenset(self._numbers())
            self._announce()

    def _announce(self) -> None:
        """Say that this run claims for the stream, unless it is known: a sweep forgets a stream that was idle long."""
        if not reading.exists(self._run):
            self._context.storage.make_folder(self._folder)
            self._context.storage.touch(self._run)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Say what a refused call means."""
        with self._context.error_context(
            f"the journal {self._folder} is not kept; what the stream has claimed stays claimed"
        ):
            yield

    def _be_newest(self) -> None:
        newer = _runs(self._folder) - self._earlier - {self._subscription.id}
        if newer:
            raise DropqError(
                f"{min(newer)} reads the stream {self._folder} since this run began: two queries go on from one "
                "checkpoint, or from copies of it. The newest has the stream, this one ends; give each query a "
                "checkpoint of its own"
            )

    # -- taking --------------------------------------------------------------------------------------------------

    def next_batch(self, batch: int, limit: int | None) -> int:
        """Make a batch of what waits, unless it was made before; return how many messages it has.

        Args:
            batch: its number, one more than the last that was settled.
            limit: the most messages; None for all that wait. What an earlier run claimed comes all the same.

        Raises:
            DropqError: another run reads the stream since.
        """
        with self._lock, self._kept():
            self._be_newest()
            self._announce()
            if batch in self._numbers() and (entries := self._entries(batch)):
                return len(entries)
            messages = {} if self._has_looked_back else self._left_over()
            self._has_looked_back = False  # until what is claimed now is written down
            messages |= self._claimed(limit, besides=len(messages))
            if messages:
                self._write(batch, messages)
                self._batches[batch] = messages
            self._has_looked_back = True
            return len(messages)

    def _claimed(self, limit: int | None, *, besides: int) -> dict[str, Message]:
        subscription = self._subscription
        most = sys.maxsize if limit is None else limit - besides
        if subscription.max_backlog is not None:
            most = min(most, subscription.max_backlog - len(subscription.held))
        if most < 1:
            return {}
        try:
            messages = subscription.receive_many(most)
        except DropqError as error:
            if not besides:
                raise
            log.warning("%s", error)  # what an earlier run claimed is not to wait for that
            return {}
        return {_entry(message.file): message for message in messages}

    def _left_over(self) -> dict[str, Message]:
        """Take up what earlier runs claimed and did not live to write down."""
        known = _runs(self._folder)
        claims = [claim for claim in self._claims() if claim.subscription in known]
        self._strike_out(self._earlier, claims)
        written = {entry for number in self._numbers() for entry in self._entries(number)}
        found = {_entry(claim.filename): claim for claim in claims}
        return self._renewed({entry: claim for entry, claim in found.items() if entry not in written})

    def messages(self, batch: int) -> list[Message]:
        """Return the messages of a batch, held by this run: the same as ever, but for those that others have settled.

        Raises:
            DropqError: the batch is not in the journal.
        """
        with self._lock, self._kept():
            if batch not in self._batches:
                self._batches[batch] = self._resumed(batch)
            return list(self._batches[batch].values())

    def _resumed(self, batch: int) -> dict[str, Message]:
        if batch in self._numbers():
            return self._taken_up(batch)
        if batch <= max(self._settled(), default=0):
            log.warning(
                "batch %d of %s was acknowledged: it was committed once, and is not read again", batch, self._folder
            )
            return {}
        raise DropqError(
            f"batch {batch} is not in the journal {self._folder}: the checkpoint belongs to another queue, or is "
            "older than the journal is kept. Start the query with a new checkpoint: what it had not "
            "committed was returned to the queue"
        )

    def _taken_up(self, batch: int) -> dict[str, Message]:
        """Hold a batch that an earlier run held; what was returned since, because its lease ran out, is claimed again.

        RACE: a lease may run out between the listing and its renewal. So what is missing is looked for last.
        """
        entries = self._entries(batch)
        held = {_entry(found.filename): found for found in self._claims()}
        messages = self._renewed({entry: held[entry] for entry in entries if entry in held})
        messages |= self._claimed_again({*entries} - messages.keys())
        if len(messages) < len(entries):
            gone = len(entries) - len(messages)
            log.warning("batch %d of %s: %d of %d messages were settled by others, or are held by them, and are not "
                        "read again", batch, self._folder, gone, len(entries))  # fmt: skip
        return {entry: messages[entry] for entry in entries if entry in messages}

    def _renewed(self, claims: Mapping[str, Claim]) -> dict[str, Message]:
        """Hold claims, and renew them; one whose lease runs out at this moment is left out."""
        messages = {entry: self._subscription.adopt(claim) for entry, claim in claims.items()}
        for message, error in extend_all(messages.values(), self.lease):
            if not isinstance(error, LeaseLost):
                raise error
            messages.pop(_entry(message.file))
        return messages

    # -- settling ------------------------------------------------------------------------------------------------

    def settle(self, upto: int) -> int:
        """Acknowledge every batch up to one, for good; return how many messages were.

        What a lapsed lease has returned to the queue meanwhile is acknowledged there, before anybody else takes it.

        Raises:
            DropqError: another run reads the stream since: it settles what is committed.
        """
        settled = 0
        with self._lock, self._kept():
            self._be_newest()
            written = self._numbers()
            ours = self._batches.keys() | self._inherited.intersection(written)  # not what another has written since
            for number in sorted(number for number in ours if number <= upto):
                if number not in self._batches:
                    self._batches[number] = self._taken_up(number)
                settled += self._acknowledged(number, self._batches[number])
                if number in written:
                    self._note_settled(number)
                del self._batches[number]
        return settled

    def _note_settled(self, batch: int) -> None:
        """Remember a batch as settled, by its file: a checkpoint that lost its last commit asks for it again."""
        store, earlier = self._context.storage, self._settled()
        store.rename(f"{self._folder}/{batch}.json", f"{self._folder}/{_SETTLED}{batch}")
        for number in earlier:
            store.unlink(f"{self._folder}/{_SETTLED}{number}")

    def _settled(self) -> list[int]:
        found = (name.removeprefix(_SETTLED) for name in reading.names_in(self._folder) if name.startswith(_SETTLED))
        return [int(number) for number in found if number.isdigit()]

    def _acknowledged(self, batch: int, messages: dict[str, Message]) -> int:
        """Acknowledge messages, those too that were returned when their leases ran out; return how many there were."""
        ack_all(message for message in messages.values() if message.held)
        again = self._claimed_again({entry for entry, message in messages.items() if message.state == "processing"})
        ack_all(again.values())
        gone = [one for one in (messages | again).values() if one.state == "processing"]
        if gone:
            log.info("batch %d of %s: %d of %d messages had been settled by others, or in the batch itself, such as %s",
                     batch, self._folder, len(gone), len(messages), gone[0].id)  # fmt: skip
        return len(messages) - len(gone)

    # -- renewing and ending ---------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the leases of all that this run holds; one that is lost is found out by whoever reads it."""
        with self._lock:
            renew_held((message for batch in self._batches.values() for message in batch.values()), self.lease)

    def close(self) -> None:
        """End the run: what is not settled stays claimed until its lease runs out, for the next run to go on with."""
        with self._lock, self._kept():
            self._strike_out(self._earlier | {self._subscription.id}, self._claims())
            with suppress(OSError):  # another run, or a batch, is there
                self._context.storage.remove_folder(self._folder)

    def _strike_out(self, runs: frozenset[str], claims: Iterable[Claim]) -> None:
        """Remove the runs that hold nothing, and what they were writing.

        RACE: an earlier one may still live. It is refused at its next claim, as this one is newer; what it claims in
        this moment would, at worst, be returned as if nobody came again.
        """
        for run in runs.difference(claim.subscription for claim in claims):
            for name in reading.names_in(self._folder):
                if name.endswith(f"-{run}"):
                    self._context.storage.unlink(f"{self._folder}/{name}")

    # -- what is written down ----------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        found = (_BATCH.fullmatch(entry.name) for entry in reading.entries(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _entries(self, batch: int) -> list[str]:
        """Return what the messages of a batch are called, in their order."""
        path = f"{self._folder}/{batch}.json"
        try:
            content = reading.parse_json(reading.read_small(path, limit=-1) or b"null")
            return [str(entry) for entry in content["claims"]]  # type: ignore[index]
        except (ValueError, TypeError, KeyError) as error:
            raise DropqError(
                f"{path} is damaged ({error}): start the query with a new checkpoint; what the stream holds returns to "
                "the queue when its leases end"
            ) from error

    def _write(self, batch: int, messages: Mapping[str, Message]) -> None:
        self._context.storage.sync(
            self._context.layout.processing
        )  # or a power cut gives back what the batch says it has
        draft = f"{self._folder}/.{batch}-{self._subscription.id}"  # what a crash leaves of it goes with the run
        content = json.dumps({"format": 1, "claims": [*messages]})
        self._context.storage.write_small(f"{self._folder}/{batch}.json", content.encode(), by=draft)

    # -- where messages are now ----------------------------------------------------------------------------------------

    def _claims(self) -> list[Claim]:
        """Return the claims on the queue's messages, each subscription's in the order they were made."""
        return sorted(claims_in(self._context), key=lambda claim: (claim.subscription, claim_order(claim.owner)))

    def _claimed_again(self, missing: set[str]) -> dict[str, Message]:
        """Claim what lies where a sweep has put it when a lease ran out, and what nobody has touched since."""
        context, claimed = self._context, dict[str, Message]()
        for folder in (context.layout.delayed, context.layout.target) if missing else ():
            for file in map(context.sidecars.file, reading.names_in(folder)):
                entry = file.name.lapsed if names.may_be_lapsed(file.filename) else ""
                if entry not in missing:
                    continue
                if folder == context.layout.delayed:
                    Transitions(context).deliver_delayed(file.filename)  # its name changes: it is found in target/ next
                    continue
                deadline = lease_end(context.clock, self.lease)
                claim = Transitions(context).claim(file, self._subscription.next_owner(), deadline, again=True)
                if claim is not None:
                    claimed[entry] = self._subscription.adopt(claim)
        return claimed


def check_semantics(context: QueueContext) -> None:
    """Refuse a queue whose messages Spark cannot claim: one that delivers at most once, or has barriers."""
    if context.config.barrier_expression is not None:
        raise ConfigError(f"queue {context.name} has barriers: Spark's batches have no place for a share of one")
    if context.config.semantics == "at-most-once":
        raise ConfigError(
            f'queue {context.name} has semantics = "at-most-once", and Spark may have to read a message twice'
        )
