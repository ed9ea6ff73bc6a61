"""The batches that a stream has claimed, kept in files, so that it reads the same batches again after a crash.

A stream is a reader that may die and be started again, such as a streaming query. Its folder in `.dropq/streams/` has
the subscriptions that claim for it, one for each run and listed before its first claim, and the messages of each batch.
Invariant: a message that a run claimed is in a batch, or goes into the next one; the file of a batch stays until all
its messages are settled. The claims have leases, which a run renews while it lives. If a stream is not started again,
its leases end and its messages return to the queue. A batch is settled as a whole: its messages with bad bodies are
rejected, as `bad_bodies` has it, and all others are acknowledged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from dropq.errors import ConfigError, DropqError, LeaseLost
from dropq.format import names
from dropq.format.claims import BodyVersion, Claim, claim_id, claim_order
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.sending import deliver_delayed
from dropq.lifecycle.settlement import Claims
from dropq.queue.bad_bodies import BadBodyNotes, reject_bad
from dropq.queue.lease_renewer import renew_held
from dropq.queue.message import Message, ack_all, extend_all
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.files import refuse_links

if TYPE_CHECKING:
    from dropq.queue.subscription import Subscription

log = logging.getLogger("dropq")

#: Seconds of a stream's leases, unless the reader or the queue sets them: enough to start a query again after a crash.
LEASE = 600.0

_BATCH = re.compile(r"([0-9]+)\.json")
_STREAM = re.compile(r"[\w*%+-]{1,100}", re.ASCII)
_RUN = "run-"
_SETTLED = "settled-"
_BAD = "bad-{}."


def runs(context: QueueContext) -> frozenset[str]:
    """Return the subscriptions that claim for the streams of a queue; skip a stream whose folder cannot be read."""
    subscriptions = set[str]()
    for entry in reading.entries(context.layout.streams):
        try:
            subscriptions |= _runs(entry.path) if entry.is_dir(follow_symlinks=False) else set()
        except OSError as error:
            log.warning(
                "the stream %s cannot be read (%s): if its leases run out, its messages return without their marker, "
                "and go to any consumer", entry.path, describe(error),
            )  # fmt: skip
    return frozenset(subscriptions)


def lapsed_claim(claim: Claim, streams: frozenset[str]) -> str:
    """Return the marker of a claim whose lease ran out: its key in a batch if a run in `streams` had it, else ""."""
    return batch_key(claim.filename) if claim.subscription in streams else ""


def _runs(folder: str) -> set[str]:
    return {name.removeprefix(_RUN) for name in reading.names_in(folder) if name.startswith(_RUN)}


def batch_key(filename: str) -> str:
    """Return what identifies a claimed message in a batch: the id of the stream's first claim on it.

    After a lease ran out, the expired-claim marker has that id. Only the stream claims such a message, and it keeps the
    marker.
    """
    file = MessageFile(filename)
    return file.name.lapsed or (claim_id(file.claim.owner) if file.claim is not None else "")


class Journal:
    """The batches of a stream, as one of its runs holds them.

    Only the newest run may use the journal. If another run began later, this one is refused, as both would deliver and
    settle the same batches.

    Args:
        stream: names the stream; all its runs have the same.
        subscription: claims for this run; it is detached, and has a lease.

    Raises:
        ConfigError: the queue has barriers or delivers at most once.
        NoSuchQueue, StorageError: the journal cannot be written.
    """

    def __init__(self, context: QueueContext, stream: str, subscription: Subscription) -> None:
        if not _STREAM.fullmatch(stream):
            raise ValueError(f"{stream!r} cannot name a stream: letters, digits, -, _, *, % and +, at most 100")
        if not subscription.lease:
            raise ValueError("a stream needs a lease: without it, its messages would never return to the queue")
        check_semantics(context)
        self.lease = subscription.lease
        self._context = context
        self._folder = f"{context.layout.streams}/{stream}"
        self._lock = threading.RLock()
        #: The batches that this run holds; their messages by their batch keys.
        self._batches: dict[int, dict[str, Message]] = {}
        self._subscription = subscription
        #: How many messages this run has rejected for their bodies.
        self.rejected = 0
        self._has_adopted_leftovers = False
        self._run = f"{self._folder}/{_RUN}{subscription.id}"
        refuse_links([self._folder])
        with self._error_context():
            self._earlier = frozenset(_runs(self._folder))
            self._inherited = frozenset(self._numbers())
            self._inherited_notes = frozenset(reading.names_in(self._folder))
            self._register()

    def _register(self) -> None:
        """List this run's subscription in the stream's folder, again if a sweep has removed an idle stream."""
        if not reading.exists(self._run):
            self._context.storage.make_folder(self._folder)
            self._context.storage.touch(self._run)

    def _error_context(self) -> AbstractContextManager[None]:
        return self._context.error_context(
            f"the journal {self._folder} was not written; the messages of the stream stay claimed"
        )

    def _refuse_if_overtaken(self) -> None:
        newer = _runs(self._folder) - self._earlier - {self._subscription.id}
        if newer:
            raise DropqError(
                f"{min(newer)} reads the stream {self._folder} since this run began: two queries continue from one "
                "checkpoint, or from copies of it. The newest has the stream, this one ends; give each query a "
                "checkpoint of its own"
            )

    # -- making and reading batches ----------------------------------------------------------------------------------

    def next_batch(self, batch: int, limit: int | None, max_bytes: int | None = None) -> int:
        """Make a batch of waiting messages, unless the batch exists; return how many messages it has.

        Args:
            batch: one more than the last settled batch.
            limit: the most messages; None for all that wait. Messages that an earlier run claimed may exceed it.
            max_bytes: of bodies, after which no other message is claimed; None for any number.

        Raises:
            DropqError: another run of the stream began later.
        """
        with self._lock, self._error_context():
            self._refuse_if_overtaken()
            self._register()
            if batch in self._numbers() and (written := self._written(batch)):
                return len(written)
            messages = {} if self._has_adopted_leftovers else self._adopt_leftovers()
            self._has_adopted_leftovers = False  # an error below would leave claims that are in no batch
            messages |= self._claim(limit, max_bytes, besides=len(messages))
            if messages:
                self._write(batch, messages)
                self._batches[batch] = messages
            self._has_adopted_leftovers = True
            return len(messages)

    def _claim(self, limit: int | None, max_bytes: int | None = None, *, besides: int) -> dict[str, Message]:
        subscription = self._subscription
        most = sys.maxsize if limit is None else limit - besides
        if subscription.max_backlog is not None:
            most = min(most, subscription.max_backlog - len(subscription.held))
        if most < 1:
            return {}
        messages: list[Message] = []
        left = sys.maxsize if max_bytes is None else max_bytes
        at_once = most if max_bytes is None else 1
        try:
            while len(messages) < most and left > 0 and (found := subscription.receive_many(at_once)):
                messages += found
                left = left - found[0].size() if at_once == 1 else 0
        except DropqError as error:
            if not (besides or messages):
                raise
            log.warning("%s", error)  # what this run or an earlier one has claimed must not wait for this
        return {batch_key(message.file): message for message in messages}

    def _adopt_leftovers(self) -> dict[str, Message]:
        """Hold the messages that earlier runs claimed, but did not write into a batch before they died."""
        ours = _runs(self._folder)
        claims = [claim for claim in self._claims() if claim.subscription in ours]
        self._remove_runs(self._earlier, claims)
        written = {key for number in self._numbers() for key in self._written(number)}
        by_key = {key: claim for claim in claims if (key := batch_key(claim.filename)) not in written}
        for claim in by_key.values():
            if not self._context.sidecars.parse(claim.own_name).generated:
                with suppress(FileNotFoundError):  # RACE: it was settled, which its renewal finds
                    claim.body = self._context.settling.version(claim.path)  # the run that claimed it gave it to nobody
        return self._adopt(by_key)

    def size(self, batch: int) -> int:
        """Return how many bytes the bodies of a batch have that this run holds, without those that are gone."""
        size = 0
        for message in self._batches.get(batch, {}).values():
            with suppress(DropqError):
                size += message.size()
        return size

    def messages(self, batch: int) -> list[Message]:
        """Return the messages of a batch, held by this run: always the same, but for those that others have settled."""
        with self._lock, self._error_context():
            if batch not in self._batches:
                self._batches[batch] = self._resume(batch)
            return list(self._batches[batch].values())

    def note_bad_bodies(self, batch: int) -> BadBodyNotes:
        """Return the notes in which tasks that read a batch say which messages are to be rejected with it."""
        with self._lock, self._error_context():
            notes = self._own_notes(batch)
            notes.begin()
            return notes

    def _resume(self, batch: int) -> dict[str, Message]:
        if batch in self._numbers():
            for notes in self._earlier_notes(batch):
                notes.drop()  # the batch is read again, maybe with another schema
            return self._adopt_batch(batch)
        if batch <= max(self._settled(), default=0):
            log.warning("batch %d of %s was acknowledged before: it is not read again", batch, self._folder)
            return {}
        raise DropqError(
            f"batch {batch} is not in the journal {self._folder}: the checkpoint belongs to another queue, or is "
            "older than the journal is kept. Start the query with a new checkpoint: messages that it had not "
            "committed were returned to the queue"
        )

    def _adopt_batch(self, batch: int) -> dict[str, Message]:
        """Hold a batch that an earlier run held; claim messages again that were returned because a lease ran out.

        RACE: a lease may run out between the listing and the renewal, so missing messages are claimed last.
        """
        written = self._written(batch)
        claims = {batch_key(claim.filename): claim for claim in self._claims()}
        for key, claim in claims.items():
            claim.body = written.get(key)
        messages = self._adopt({key: claims[key] for key in written if key in claims})
        messages |= self._claim_again(written.keys() - messages.keys(), written)
        if len(messages) < len(written):
            log.warning("batch %d of %s: %d of %d messages were settled by others, or are held by them, and are not "
                        "read again", batch, self._folder, len(written) - len(messages), len(written))  # fmt: skip
        return {key: messages[key] for key in written if key in messages}

    def _adopt(self, claims: Mapping[str, Claim]) -> dict[str, Message]:
        """Hold the messages of claims and renew their leases; leave out those whose leases have just run out."""
        messages = {key: self._subscription._hold(claim) for key, claim in claims.items()}
        for message, error in extend_all(messages.values(), self.lease):
            if not isinstance(error, LeaseLost):
                raise error
            messages.pop(batch_key(message.file))
        return messages

    # -- settling ------------------------------------------------------------------------------------------------

    def settle(self, upto: int) -> int:
        """Settle every batch up to a number; return how many messages were acknowledged, or rejected for their bodies.

        Messages that returned to the queue because a lease ran out are claimed again, and settled, too.

        Raises:
            DropqError: another run of the stream began later; that run acknowledges the committed batches.
        """
        settled = 0
        with self._lock, self._error_context():
            self._refuse_if_overtaken()
            written = self._numbers()
            ours = self._batches.keys() | self._inherited.intersection(written)  # not those that another run wrote
            for number in sorted(number for number in ours if number <= upto):
                if number not in self._batches:
                    self._batches[number] = self._adopt_batch(number)
                settled += self._settle_batch(number, self._batches[number])
                self._drop_notes(number)
                if number in written:
                    self._mark_settled(number)
                del self._batches[number]
            self._context.log.sums.tell()  # Spark kills this process when the query ends
        return settled

    def _mark_settled(self, batch: int) -> None:
        """Rename the file of a settled batch, and keep it: a checkpoint that lost its last commit asks for it again."""
        storage, earlier = self._context.storage, self._settled()
        storage.rename(f"{self._folder}/{batch}.json", f"{self._folder}/{_SETTLED}{batch}")
        for number in earlier:
            storage.unlink(f"{self._folder}/{_SETTLED}{number}")

    def _settled(self) -> list[int]:
        numbers = (name.removeprefix(_SETTLED) for name in reading.names_in(self._folder) if name.startswith(_SETTLED))
        return [int(number) for number in numbers if number.isdigit()]

    def _settle_batch(self, batch: int, messages: dict[str, Message]) -> int:
        """Settle messages, also those that returned because a lease ran out; return how many it settled."""
        reasons: dict[str, str] = {}
        for notes in (self._own_notes(batch), *self._earlier_notes(batch)):
            reasons |= notes.reasons()
        rejected = _settle(messages, reasons)
        lost = {key for key, message in messages.items() if message.state == "processing"}
        again = self._claim_again(lost, self._written(batch) if lost and batch in self._numbers() else {})
        rejected += _settle(again, reasons)
        self.rejected += len(rejected)
        if rejected:
            log.warning("batch %d of %s: %d of %d messages were rejected for their bodies, such as %s: see error/",
                        batch, self._folder, len(rejected), len(messages), rejected[0].id)  # fmt: skip
        gone = [message for message in (messages | again).values() if message.state == "processing"]
        if gone:
            log.info("batch %d of %s: %d of %d messages had been settled by others, or by the query itself, such as %s",
                     batch, self._folder, len(gone), len(messages), gone[0].id)  # fmt: skip
        return len(messages) - len(gone)

    def _own_notes(self, batch: int) -> BadBodyNotes:
        return BadBodyNotes(self._context, f"{self._folder}/{_BAD.format(batch)}{self._subscription.id}")

    def _earlier_notes(self, batch: int) -> list[BadBodyNotes]:
        """Return the notes of runs before this one: if Spark has committed the batch, the batch is settled by them.

        RACE: a run that began later may have notes of its own by now; this run must not touch them.
        """
        names = (name for name in self._inherited_notes if name.startswith(_BAD.format(batch)))
        return [BadBodyNotes(self._context, f"{self._folder}/{name}") for name in names]

    def _drop_notes(self, batch: int) -> None:
        for name in reading.names_in(self._folder):
            if name.startswith(_BAD.format(batch)):
                BadBodyNotes(self._context, f"{self._folder}/{name}").drop()

    # -- renewing and ending ---------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the leases of all messages that this run holds; a lost lease shows when its message is read."""
        with self._lock:
            renew_held((message for batch in self._batches.values() for message in batch.values()), self.lease)

    def close(self) -> None:
        """End the run; messages that are not settled stay claimed for the next run, until their leases run out."""
        with self._lock, self._error_context():
            self._remove_runs(self._earlier | {self._subscription.id}, self._claims())
            with suppress(OSError):  # the folder still has another run, or a batch
                self._context.storage.remove_folder(self._folder)

    def _remove_runs(self, runs: frozenset[str], claims: Iterable[Claim]) -> None:
        """Remove the entries of runs that hold no claim, and their unfinished drafts.

        RACE: such a run may still live. Its next batch is refused, as this run is newer. A claim that it makes right
        now returns to the queue when its lease runs out.
        """
        for run in runs.difference(claim.subscription for claim in claims):
            for name in reading.names_in(self._folder):
                if name.endswith(f"-{run}"):
                    self._context.storage.unlink(f"{self._folder}/{name}")

    # -- files and claims ----------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        matches = (_BATCH.fullmatch(entry.name) for entry in reading.entries(self._folder))
        return sorted(int(match[1]) for match in matches if match)

    def _written(self, batch: int) -> dict[str, BodyVersion | None]:
        """Return the batch keys of a batch's messages, in their order, each with its body's version when claimed."""
        path = f"{self._folder}/{batch}.json"
        try:
            content: Any = reading.parse_json(reading.read_small(path, limit=reading.LONG_LIST) or b"null")
            bodies = {key: BodyVersion(int(size), int(at)) for key, (size, at) in content.get("bodies", {}).items()}
            return {str(key): bodies.get(str(key)) for key in content["claims"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DropqError(
                f"{path} is damaged ({error}): start the query with a new checkpoint; the messages of the stream "
                "return to the queue when its leases end"
            ) from error

    def _write(self, batch: int, messages: Mapping[str, Message]) -> None:
        storage = self._context.storage
        storage.sync(self._context.layout.processing)  # else a power cut could undo claims that the batch lists
        draft = f"{self._folder}/.{batch}-{self._subscription.id}"  # after a crash, `_remove_runs` removes it
        content: dict[str, object] = {"format": 1, "claims": [*messages]}
        bodies = {key: message._claim.body for key, message in messages.items() if message._claim is not None}
        if known := {key: body for key, body in bodies.items() if body is not None}:
            content["bodies"] = known
        storage.write_small(f"{self._folder}/{batch}.json", json.dumps(content).encode(), by=draft)

    def _claims(self) -> list[Claim]:
        """Return the claims in processing/, those of each subscription in the order in which they were made."""
        return sorted(claims_in(self._context), key=lambda claim: (claim.subscription, claim_order(claim.owner)))

    def _claim_again(self, missing: Collection[str], bodies: Mapping[str, BodyVersion | None]) -> dict[str, Message]:
        """Claim messages that a sweep returned because a lease ran out, with bodies that nobody has touched since."""
        context, claimed = self._context, dict[str, Message]()
        for folder in (context.layout.delayed, context.layout.target) if missing else ():
            for file in map(context.sidecars.file, reading.names_in(folder)):
                key = file.name.lapsed if names.may_be_lapsed(file.filename) else ""
                if key not in missing:
                    continue
                if folder == context.layout.delayed:
                    deliver_delayed(context, file.filename)  # target/, which is next, then has it
                    continue
                deadline = lease_end(context.clock, self.lease)
                claim = Claims(context).claim(file, next(self._subscription._owners), deadline, again=True)
                if claim is not None:
                    claim.body = bodies.get(key)
                    claimed[key] = self._subscription._hold(claim)
        return claimed


def _settle(messages: Mapping[str, Message], reasons: Mapping[str, str]) -> list[Message]:
    """Reject the messages for which there is a reason, and acknowledge the others; return the rejected ones."""
    rejected = reject_bad(messages, reasons)
    ack_all(message for message in messages.values() if message.held)
    return rejected


def check_semantics(context: QueueContext) -> None:
    """Refuse a queue whose messages Spark cannot claim: it has barriers, or delivers at most once."""
    if context.config.barrier_expression is not None:
        raise ConfigError(f"queue {context.name} has barriers, and a batch of Spark cannot hold a share of a message")
    if context.config.semantics == "at-most-once":
        raise ConfigError(
            f'queue {context.name} has semantics = "at-most-once", and Spark may have to read a message twice'
        )
