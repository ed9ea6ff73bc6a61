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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from dropq import names, storage
from dropq.errors import ConfigError, DropqError, LeaseLost
from dropq.lifecycle import Held, Waiting
from dropq.message import Message, ack_all

if TYPE_CHECKING:
    from dropq.queue import Queue
    from dropq.subscription import Subscription

log = logging.getLogger("dropq")

#: Seconds of a stream's leases where neither reader nor queue says: enough to start a query again after a crash.
LEASE = 600.0

#: Milliseconds that a file's time may lag behind the clock that ended its lease: coarse times, and clocks unlike by less
#: than is corrected.
CLOCKS_APART = 100

_BATCH = re.compile(r"([0-9]+)\.json")
_STREAM = re.compile(r"[\w*%+-]{1,100}", re.ASCII)
_RUN = "run-"


class Entry(NamedTuple):
    """A message of a batch: its file in processing/ as it was claimed, and its inode."""

    filename: str
    inode: int

    @property
    def owner(self) -> str:
        """The owner of its claim."""
        claim, _ = names.split_claim(self.filename)
        return claim.owner if claim is not None else ""

    @property
    def deadline(self) -> int:
        """When its lease ends, in ms, unless it was renewed."""
        claim, _ = names.split_claim(self.filename)
        return claim.deadline if claim is not None else 0

    @property
    def key(self) -> tuple[str, int]:
        """What tells the message wherever it went: its id, and where a sender chose that, its inode too."""
        return key(self.filename, self.inode)


def key(filename: str, inode: int) -> tuple[str, int]:
    """Return what tells a message wherever it went, by its file in any state."""
    name = names.parse(names.split_claim(filename)[1])
    return name.id, 0 if name.generated else inode


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
            limit: the most messages; None for all that wait.
        """
        with self._lock:
            self._announce()
            if batch in self._numbers() and (entries := self._entries(batch)):
                return len(entries)
            messages = [] if self._has_looked_back else self._left_over()
            self._has_looked_back = False  # until what is claimed now is written down
            messages += self._claimed(limit)
            if messages:
                self._write(batch, messages)
                self._batches[batch] = messages
            self._has_looked_back = True
            return len(messages)

    def _claimed(self, limit: int | None) -> list[Message]:
        subscription = self._subscription
        room = subscription.max_backlog
        if room is not None:
            limit = min(limit or room, room - len(subscription.held))
        messages: list[Message] = []
        while (limit is None or len(messages) < limit) and (message := subscription.receive()) is not None:
            messages.append(message)
        return messages

    def _left_over(self) -> list[Message]:
        """Take up what earlier runs claimed and did not live to write down."""
        written = {entry.key for number in self._numbers() for entry in self._entries(number)}
        return self._taken_up(held for held, inode in self._claims() if key(held.filename, inode) not in written)

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
        self._note_renewal()
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
                entries = self._entries(number)
                messages = self._batches.pop(number, None)
                if messages is None:
                    messages = [self._subscription.adopt(held) for held in self._found(entries)]
                lost = ack_all(message for message in messages if message.held)
                again = self._found(entries) if lost else []
                ack_all(self._subscription.adopt(held) for held in again)
                settled += len(messages) - len(lost) + len(again)
                self._life.storage.unlink(f"{self._folder}/{number}.json")
            if settled:
                self._forget_runs()
        return settled

    def _forget_runs(self) -> None:
        """Strike out the earlier runs of which nothing is claimed any more."""
        earlier = self._runs() - {self._subscription.id}
        for run in earlier - {held.claim.subscription for held, _ in self._claims()} if earlier else ():
            self._life.storage.unlink(f"{self._folder}/{_RUN}{run}")

    # -- renewing and ending ---------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the leases of all that this run holds; one that is lost is found out by whoever reads it."""
        with self._lock:
            messages = [message for batch in self._batches.values() for message in batch if message.held]
            self._note_renewal()
        for message in messages:
            try:
                message.extend(self.lease)
            except LeaseLost as error:
                log.warning("%s", error)

    def _note_renewal(self) -> None:
        """Write down, before leases are renewed, until when they last at the least."""
        until = self._life.clock.now_ms() + int(self.lease * 1000)
        self._life.storage.write_small(self._run, str(until).encode())

    def close(self) -> None:
        """End the run: what is not settled stays claimed until its lease runs out, for the next run to go on with."""
        with self._lock:
            if self._numbers() or self._claims():
                return
            for entry in list(storage.entries(self._folder)):
                self._life.storage.unlink(entry.path)
            self._life.storage.remove_folder(self._folder)

    # -- what is written down ----------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        found = (_BATCH.fullmatch(entry.name) for entry in storage.entries(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _entries(self, batch: int) -> list[Entry]:
        path = f"{self._folder}/{batch}.json"
        try:
            content = json.loads(storage.read_small(path, limit=-1) or b"null")
            return [Entry(str(filename), int(inode)) for filename, inode in content["messages"]]
        except (ValueError, TypeError, KeyError) as error:
            raise DropqError(f"{path} is damaged ({error}): move it away, its messages return to the queue") from error

    def _write(self, batch: int, messages: Iterable[Message]) -> None:
        entries = [(message.file, _inode(message)) for message in messages]
        content = {"format": 1, "messages": entries}
        self._life.storage.write_small(f"{self._folder}/{batch}.json", json.dumps(content).encode())

    # -- where messages are now ----------------------------------------------------------------------------------------

    def _runs(self) -> set[str]:
        found = (entry.name for entry in storage.entries(self._folder))
        return {name.removeprefix(_RUN) for name in found if name.startswith(_RUN)}

    def _claims(self) -> list[tuple[Held, int]]:
        """Return the claims of all runs of the stream, each with its file's inode, in the order they were made."""
        runs, processing = self._runs(), self._life.layout.processing
        found = []
        for entry in storage.entries(processing):
            claim, file = names.split_claim(entry.name)
            if claim is not None and claim.ours and claim.subscription in runs:
                found.append((Held(processing, claim, file), entry.inode()))
        return sorted(found, key=lambda one: (one[0].claim.subscription, names.claim_order(one[0].claim.owner)))

    def _found(self, entries: list[Entry]) -> list[Held]:
        """Return the claims on what a batch lists: its own, else another of the stream's, else a new one."""
        claims = self._claims()
        by_owner = {held.claim.owner: held for held, _ in claims}
        by_key = {key(held.filename, inode): held for held, inode in claims}
        missing = [entry for entry in entries if entry.owner not in by_owner and entry.key not in by_key]
        by_key |= self._claimed_again(missing)
        found = (by_owner.get(entry.owner) or by_key.get(entry.key) for entry in entries)
        return [held for held in found if held is not None]

    def _claimed_again(self, missing: list[Entry]) -> dict[tuple[str, int], Held]:
        """Claim messages whose leases ran out and that nobody else took since.

        One that came back while its lease still ran was given back, by the stream's own user or an administrator: it
        is to be delivered anew, and left alone here.
        """
        life, renewed, claimed = self._life, self._renewed_until(), dict[tuple[str, int], Held]()
        wanted = {entry.key: max(entry.deadline, renewed) for entry in missing}
        for folder in (life.layout.delayed, life.layout.target) if wanted else ():
            for file, inode in self._lying(folder):
                found = key(file, inode)
                if found not in wanted or found in claimed or not _came_after(f"{folder}/{file}", wanted[found]):
                    continue
                if folder == life.layout.delayed:
                    life.deliver_delayed(file)  # its name changes: it is found in target/ next
                    continue
                deadline = life.clock.now_ms() + int(self.lease * 1000)
                held = life.claim(Waiting(file), self._subscription.next_owner(), deadline)
                if held is not None:
                    claimed[found] = held
        return claimed

    def _renewed_until(self) -> int:
        """Return until when the last renewal of any run lasted, in ms."""
        notes = (storage.read_small(f"{self._folder}/{_RUN}{run}") or b"0" for run in self._runs())
        return max((int(note) for note in notes if note.isdigit()), default=0)

    def _lying(self, folder: str) -> Iterator[tuple[str, int]]:
        entries = [entry for entry in storage.entries(folder) if storage.is_message_file(entry)]
        return ((entry.name, entry.inode()) for entry in entries)


def check_semantics(queue: Queue) -> None:
    """Refuse a queue that delivers at most once, for readers that may have to read a message again."""
    if queue.config.semantics == "at-most-once":
        raise ConfigError(
            f'queue {queue.name} has semantics = "at-most-once", and Spark may have to read a message twice'
        )


def _came_after(path: str, deadline: int) -> bool:
    """Tell whether a file came to where it lies when a lease had run out, and not before; False when it is gone."""
    try:
        return storage.changed_ms(path) >= deadline - CLOCKS_APART
    except FileNotFoundError:
        return False


def _inode(message: Message) -> int:
    try:
        return storage.inode(message.path)
    except FileNotFoundError:
        return 0  # RACE: its lease was renewed, or ran out, this moment: its id tells it
