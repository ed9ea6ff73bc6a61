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
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from dropq import names, storage
from dropq.errors import ConfigError, DropqError, LeaseLost
from dropq.lifecycle import Held, Lifecycle, Waiting
from dropq.message import Message, ack_all

if TYPE_CHECKING:
    from dropq.queue import Queue
    from dropq.subscription import Subscription

log = logging.getLogger("dropq")

#: Seconds of a stream's leases where neither reader nor queue says: enough to start a query again after a crash.
LEASE = 600.0

_BATCH = re.compile(r"([0-9]+)\.json")
_STREAM = re.compile(r"[\w*%+-]{1,100}", re.ASCII)
_RUN = "run-"
_SETTLED = "settled-"


def runs(life: Lifecycle) -> dict[str, str]:
    """Return the subscriptions that claim for the streams of a queue, each with its stream's folder."""
    folders = [entry.path for entry in storage.entries(life.layout.streams)]
    return {run: folder for folder in folders for run in _runs(folder)}


def lapsed_owner(held: Held, streams: Mapping[str, str]) -> str:
    """Return which owner is to be named for a lease that ran out: the first of a row of one stream's; else none."""
    stream = streams.get(held.claim.subscription)
    if stream is None:
        return ""
    before = names.parse(held.file).lapsed
    # A run that holds nothing any more may be struck out by now: it was this stream's, or it is known as another's.
    return before if before and streams.get(before.rpartition("-")[0], stream) == stream else held.claim.owner


def _runs(folder: str) -> Iterator[str]:
    found = storage.names_in(folder)
    return (name.removeprefix(_RUN) for name in found if name.startswith(_RUN))


def _owners(filename: str) -> tuple[str, str]:
    """Return who holds a file, and whose lease on it ran out before, by its name; empty for nobody."""
    claim, file = names.split_claim(filename)
    return claim.owner if claim is not None else "", names.parse(file).lapsed


class Journal:
    """The batches of one stream, as one run of it holds them.

    Args:
        queue: the queue that the stream reads.
        stream: what names the stream, whichever run of it this is.
        subscription: what this run claims by; detached, and with a lease.

    Raises:
        ConfigError: the queue delivers at most once, and a stream may have to read twice.
    """

    def __init__(self, queue: Queue, stream: str, subscription: Subscription) -> None:
        if not _STREAM.fullmatch(stream):
            raise ValueError(f"{stream!r} cannot name a stream: letters, digits, -, _, *, % and +, at most 100")
        check_semantics(queue)
        self.lease = subscription.lease or LEASE
        self._life = queue.life
        self._folder = f"{self._life.layout.streams}/{stream}"
        self._lock = threading.RLock()
        self._batches: dict[int, list[Message]] = {}
        self._subscription = subscription
        self._has_looked_back = False
        self._run = f"{self._folder}/{_RUN}{subscription.id}"
        self._earlier = frozenset(_runs(self._folder))
        self._announce()

    def _announce(self) -> None:
        """Say that this run claims for the stream, unless it is known: a sweep forgets a stream that was idle long."""
        if not storage.exists(self._run):
            self._life.storage.make_folder(self._folder)
            self._life.storage.touch(self._run)

    # -- taking --------------------------------------------------------------------------------------------------

    def next_batch(self, batch: int, limit: int | None) -> int:
        """Make a batch of what waits, unless it was made before; return how many messages it has.

        Args:
            batch: its number, one more than the last that was settled.
            limit: the most messages; None for all that wait. What an earlier run claimed comes all the same.
        """
        with self._lock:
            self._announce()
            if batch in self._numbers() and (entries := self._entries(batch)):
                return len(entries)
            messages = [] if self._has_looked_back else self._left_over()
            self._has_looked_back = False  # until what is claimed now is written down
            messages += self._claimed(None if limit is None else limit - len(messages))
            if messages:
                self._write(batch, messages)
                self._batches[batch] = messages
            self._has_looked_back = True
            return len(messages)

    def _claimed(self, limit: int | None) -> list[Message]:
        subscription = self._subscription
        room = subscription.max_backlog
        if room is not None:
            room -= len(subscription.held)
            limit = room if limit is None else min(limit, room)
        messages: list[Message] = []
        while (limit is None or len(messages) < limit) and (message := subscription.receive()) is not None:
            messages.append(message)
        return messages

    def _left_over(self) -> list[Message]:
        """Take up what earlier runs claimed and did not live to write down."""
        known = {*_runs(self._folder)}
        claims = [held for held in self._claims() if held.claim.subscription in known]
        self._strike_out(self._earlier, claims)
        written = {owner for number in self._numbers() for owner in self._entries(number)}
        return self._taken_up(held for held in claims if written.isdisjoint(_owners(held.filename)))

    def messages(self, batch: int) -> list[Message]:
        """Return the messages of a batch, held by this run: the same as ever, but for those that others have settled.

        Raises:
            DropqError: the batch is not in the journal.
        """
        with self._lock:
            if batch not in self._batches:
                self._batches[batch] = self._resumed(batch)
            return self._batches[batch]

    def _resumed(self, batch: int) -> list[Message]:
        """Take up what an earlier run held; what was returned since, because its lease ran out, is claimed again."""
        if batch not in self._numbers() and batch <= max(self._settled(), default=0):
            log.warning(
                "batch %d of %s was acknowledged: it was committed once, and is not read again", batch, self._folder
            )
            return []
        if batch not in self._numbers():
            raise DropqError(
                f"batch {batch} is not in the journal {self._folder}: the checkpoint belongs to another queue, or is "
                "older than the journal is kept. Start the query with a new checkpoint: what it had not "
                "committed was returned to the queue"
            )
        entries = self._entries(batch)
        messages = self._taken_up(self._found(entries))
        if len(messages) < len(entries):
            gone = len(entries) - len(messages)
            log.warning("batch %d of %s: %d of %d messages were settled by others, or are held by them, and are not "
                        "read again", batch, self._folder, gone, len(entries))  # fmt: skip
        self._write(batch, messages)
        return messages

    def _taken_up(self, claims: Iterable[Held]) -> list[Message]:
        """Renew claims, and hold them; one whose lease runs out at this moment is left to whoever gets it."""
        messages = []
        for held in claims:
            message = self._subscription.adopt(held)
            with suppress(LeaseLost):
                message.extend(self.lease)
                messages.append(message)
        return messages

    # -- settling ------------------------------------------------------------------------------------------------

    def settle(self, upto: int) -> int:
        """Acknowledge every batch up to one, for good; return how many messages were.

        What a lapsed lease has returned to the queue meanwhile is acknowledged there, before anybody else takes it.
        """
        settled = 0
        with self._lock:
            for number in [number for number in self._numbers() if number <= upto]:
                messages = self._batches.pop(number, None)
                if messages is None:  # RACE: what another run made of a batch that we hold is not ours to settle
                    messages = [self._subscription.adopt(held) for held in self._found(self._entries(number))]
                settled += self._acknowledged(messages)
                self._note_settled(number)
        return settled

    def _note_settled(self, batch: int) -> None:
        """Remember a batch as settled, by its file: a checkpoint that lost its last commit asks for it again."""
        store, earlier = self._life.storage, self._settled()
        store.rename(f"{self._folder}/{batch}.json", f"{self._folder}/{_SETTLED}{batch}")
        for number in earlier:
            store.unlink(f"{self._folder}/{_SETTLED}{number}")

    def _settled(self) -> list[int]:
        found = (name.removeprefix(_SETTLED) for name in storage.names_in(self._folder) if name.startswith(_SETTLED))
        return [int(number) for number in found if number.isdigit()]

    def _acknowledged(self, messages: list[Message]) -> int:
        """Acknowledge messages, those too that were returned when their leases ran out; return how many there were."""
        owners = {message.owner or "": message for message in messages}
        lost = ack_all(message for message in messages if message.held)
        gone = {owner for owner, message in owners.items() if message in lost or message.state == "processing"}
        again = [self._subscription.adopt(held) for held in self._claimed_again(gone).values()]
        return len(owners) - len(gone) + len(again) - len(ack_all(again))

    # -- renewing and ending ---------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the leases of all that this run holds; one that is lost is found out by whoever reads it."""
        with self._lock:
            for message in [message for batch in self._batches.values() for message in batch if message.held]:
                try:
                    message.extend(self.lease)
                except DropqError as error:  # the others are as good as before
                    log.warning("%s", error)

    def close(self) -> None:
        """End the run: what is not settled stays claimed until its lease runs out, for the next run to go on with."""
        with self._lock:
            self._strike_out(self._earlier | {self._subscription.id}, self._claims())
            with suppress(OSError):  # another run, or a batch, is there
                self._life.storage.remove_folder(self._folder)

    def _strike_out(self, runs: frozenset[str], claims: Iterable[Held]) -> None:
        """Remove the runs that hold nothing, and what they were writing.

        RACE: an earlier one may still live. It says again who it is before its next claim; what it claims in between
        would, at worst, be returned as if nobody came again.
        """
        for run in runs.difference(held.claim.subscription for held in claims):
            for name in storage.names_in(self._folder):
                if name.endswith(f"-{run}"):
                    self._life.storage.unlink(f"{self._folder}/{name}")

    # -- what is written down ----------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        found = (_BATCH.fullmatch(entry.name) for entry in storage.entries(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _entries(self, batch: int) -> list[str]:
        """Return the owners of a batch's claims."""
        path = f"{self._folder}/{batch}.json"
        try:
            content = json.loads(storage.read_small(path, limit=-1) or b"null")
            return [str(owner) for owner in content["claims"]]
        except (ValueError, TypeError, KeyError) as error:
            raise DropqError(f"{path} is damaged ({error}): move it away, its messages return to the queue") from error

    def _write(self, batch: int, messages: Iterable[Message]) -> None:
        content = {"format": 1, "claims": [message.owner for message in messages]}
        draft = f"{self._folder}/.{batch}-{self._subscription.id}"  # what a crash leaves of it goes with the run
        self._life.storage.write_small(f"{self._folder}/{batch}.json", json.dumps(content).encode(), by=draft)

    # -- where messages are now ----------------------------------------------------------------------------------------

    def _claims(self) -> list[Held]:
        """Return the claims on the queue's messages, each subscription's in the order they were made."""
        processing = self._life.layout.processing
        split = (names.split_claim(entry.name) for entry in storage.entries(processing))
        found = [Held(processing, claim, file) for claim, file in split if claim is not None and claim.ours]
        return sorted(found, key=lambda held: (held.claim.subscription, names.claim_order(held.claim.owner)))

    def _found(self, owners: list[str]) -> list[Held]:
        """Return the claims of a batch: those it lists, or the stream's on what one of them lost by its lease."""
        claims, known = dict[str, Held](), {*_runs(self._folder)}
        for held in self._claims():
            owner, lapsed = _owners(held.filename)
            claims[owner] = held
            if lapsed and held.claim.subscription in known:  # else somebody else has it now
                claims.setdefault(lapsed, held)
        claims |= self._claimed_again({*owners} - claims.keys())
        return [claims[owner] for owner in owners if owner in claims]

    def _claimed_again(self, missing: set[str]) -> dict[str, Held]:
        """Claim what lies where a sweep has put it when a lease ran out, and what nobody has touched since."""
        life, claimed = self._life, dict[str, Held]()
        for folder in (life.layout.delayed, life.layout.target) if missing else ():
            for file in storage.names_in(folder):
                _, lapsed = _owners(file) if "_lapsed" in file else ("", "")
                if lapsed not in missing:
                    continue
                if folder == life.layout.delayed:
                    life.deliver_delayed(file)  # its name changes: it is found in target/ next
                    continue
                deadline = life.clock.now_ms() + int(self.lease * 1000)
                held = life.claim(Waiting(file), self._subscription.next_owner(), deadline)
                if held is not None:
                    claimed[lapsed] = held
        return claimed


def check_semantics(queue: Queue) -> None:
    """Refuse a queue that delivers at most once, for readers that may have to read a message again."""
    if queue.config.semantics == "at-most-once":
        raise ConfigError(
            f'queue {queue.name} has semantics = "at-most-once", and Spark may have to read a message twice'
        )
