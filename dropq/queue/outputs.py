"""What work makes: messages that go out by the rename that acknowledges the message they were made of.

Each is a part in a staged folder of that message, as `dropq/staging/fan_out.py` has it: all are sent and the message is
acknowledged, or nothing is. A holder that lost its claim sends nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from io import BufferedWriter
from typing import Any, Protocol, Self, TypeVar

from dropq.errors import ConfigError, DropqError, InvalidName, LeaseLost, NoSuchQueue, Unavailable
from dropq.format import names
from dropq.format.addresses import check_address
from dropq.format.claims import Claim, Location
from dropq.format.staged import part_draft, part_name
from dropq.format.typed import check_text
from dropq.hints import nearest
from dropq.lifecycle import naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.settlement import Claims
from dropq.policies.circles import Circles, waypoint_at, words
from dropq.policies.send_limits import MustWait, Wait
from dropq.queue.message_view import MessageView
from dropq.queue.sender import Headers, Sender, bytes_of
from dropq.staging import fan_out
from dropq.staging.destinations import DestinationFolder, give_word, is_known, make_known
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe, error_context
from dropq.storage.files import Draft, Storage
from dropq.storage.liveness import MOST_ANNOUNCED

T = TypeVar("T")

log = logging.getLogger("dropq")

#: How many messages may be made of one.
MOST = 10_000
#: How many destinations of a queue are kept open at the most, and announced.
MOST_OPEN = MOST_ANNOUNCED
#: Seconds after which the file of a destination is looked for again.
KNOWN_AGE = 1.0
#: The properties that a message does not hand on to what is made of it.
_NOT_INHERITED = ("JMSXGroupSeq", "zmq_parts", names.DO_NOT_ROUTE)


class TooManyOutputs(ValueError):
    """Raised when more than `MOST` messages are made of one; nothing was sent."""


class Named(Protocol):
    """A queue or a topic, as `Queue` and `Topic` are."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def root(self) -> Any:
        """The root that it is in, which has a `path`."""


class Out:
    """A message that goes out by the ack of the message that it was made of.

    What is not said is that message's: its priority, each of its properties, and its correlation id, or its id if it
    has none. A property of None is left out.

    Args:
        to: a queue or a topic of the root, or its name; such as the `reply_to` of the message.
        body: as for `Queue.send`.
        fields: the other arguments of `Queue.send`. Periods count from when the message is staged.

    Raises:
        ValueError: `to` is None or empty.
        TypeError: the body is neither bytes nor text, or an argument is none that `Queue.send` takes.
    """

    __slots__ = ("body", "fields", "root", "to")

    def __init__(self, to: str | Named | None, body: bytes | str, **fields: Any) -> None:
        self.root: str | None = None
        if not isinstance(to, str | None):
            if not (hasattr(to, "name") and hasattr(to, "root")):
                kind = f"{type(to).__name__}; of an aio.Queue, its `queue`"
                raise TypeError(f"Out: give a queue, a topic or the name of one, not {kind}")
            self.root = str(to.root.path)
            to = to.name
        self.to = (to or "").removeprefix(names.TOPIC_REPLY)
        self.body = body
        self.fields = fields
        if not self.to:
            raise ValueError("Out: give the name of a queue or topic; a message whose reply_to is None has none")
        if not isinstance(body, bytes | str):
            raise TypeError(f"Out: a body is bytes or text, not {type(body).__name__}")
        if not isinstance(fields.get("properties") or {}, Mapping):
            raise TypeError(f"Out: properties are a mapping, not {type(fields['properties']).__name__}")
        for word in fields.keys() - set(Headers._fields):
            near = "".join(f": is it {name}?" for name in nearest(word, Headers._fields))
            raise TypeError(f"Out has no argument {word}{near}")

    def __repr__(self) -> str:
        return f"<Out to {self.to!r}>"


@dataclass(eq=False)
class Destinations:
    """Where the messages go that are made of a queue's messages; each queue is opened once.

    Once `given_up` returns True, nobody waits until a queue has room. `on_new` is called once for each new address. The
    `client_id` names who publishes to topics; "" without one.
    """

    context: QueueContext
    sender_of: Callable[[str], Sender]
    given_up: Callable[[], bool] = bool
    on_new: Callable[[], object] = bool
    client_id: str = ""
    _senders: OrderedDict[str, Sender] = field(default_factory=OrderedDict, init=False)
    _folders: OrderedDict[str, tuple[float, DestinationFolder]] = field(default_factory=OrderedDict, init=False)
    #: How durable the file of a destination is, by its token.
    _synced: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False)

    @property
    def addresses(self) -> list[str]:
        """The addresses that were asked for, but for those of requesters."""
        return [address for address in list(self._senders) if not names.is_temporary(address)]  # threads may add some

    def refuse(self) -> None:
        """Raise ConfigError if nothing can go out with the queue's acks: it delivers at most once, or has barriers."""
        config = self.context.config
        key = "semantics" if config.semantics == "at-most-once" else "barrier_expression"
        if key == "semantics" or config.barrier_expression is not None:
            why = "acknowledges before the work" if key == "semantics" else "gives a message to several consumers"
            raise ConfigError(
                f"queue {self.context.name} {why} ({key}), so nothing can go out with an ack: send by `send`, or take "
                f"{key} out of {self.context.layout.config_file}"
            )

    def sender(self, address: str) -> Sender:
        """Return what sends to an address; InvalidName if it is none, ConfigError on a circle through a topic."""
        sender = self._senders.get(address)
        if sender is None:
            check_address(address)
            sender = self.sender_of(address)
            sender._waits = False
            is_told = len(self._senders) < MOST_OPEN
            _keep(self._senders, address, sender)  # RACE: threads may make two, which are equal
            if is_told:
                self.on_new()
            try:
                self._open(sender)
            except NoSuchQueue:
                return sender  # whoever uses it meets NoSuchQueue again, and asks `instead`
            except ConfigError:
                self._senders.pop(address, None)
                raise
        return sender

    def _open(self, sender: Sender) -> None:
        """Open the queue of a sender; raise ConfigError if what is sent there comes back to this queue by a topic."""
        to = sender._destination
        with error_context(fan_out.UNSETTLED):
            own = waypoint_at(self.context.layout.base)
            way = Circles().by_topic(waypoint_at(to.layout.base), own)
        if way:
            raise ConfigError(
                f"{words([own.address, *way])}: what is made of messages of {own.address} cannot go to {to.name}"
            )
        if self.client_id and to.layout.is_topic:
            sender._marks = {**sender._marks, "from_client": self.client_id}

    def instead(self, sender: Sender, missing: NoSuchQueue) -> Sender:
        """Return the sender to the dead-letter queue, for one whose queue is missing.

        Raise NoSuchQueue if the root has none, or it is the queue itself, which would feed itself for ever.
        """
        other = sender._instead(missing)
        if other._destination.layout.home == self.context.layout.home:
            raise NoSuchQueue(f"{missing}; a dead letter of it would come back to {self.context.name}") from missing
        return other

    def folder(self, to: QueueContext) -> DestinationFolder:
        """Return the folder of a queue, and make its file in `.dropq/receivers/`; NoSuchQueue if the queue is gone."""
        base, now, root = to.layout.base, time.monotonic(), self.context.root.layout.path
        known_at, folder = self._folders.get(base, (0.0, None))
        if folder is not None and now - known_at <= KNOWN_AGE and folder.is_there(root):
            return folder
        with to.error_context(fan_out.UNSETTLED):
            if folder is None or not folder.is_there(root):
                give_word(to)
                known_at, folder = 0.0, DestinationFolder(root, os.path.relpath(base, root))
            if now - known_at > KNOWN_AGE:
                if not known_at or not is_known(self.context.layout, folder):
                    self._synced.pop(folder.token, None)
                    make_known(self.context.layout, folder, self.context.storage.at_least(to.storage.durability))
                _keep(self._folders, base, (now, folder))
        return folder

    def sync(self, folders: Iterable[DestinationFolder], storage: Storage) -> None:
        """Sync the files of destinations in `.dropq/receivers/`, which may have been made at a lower durability."""
        receivers = self.context.layout.receivers
        unsynced = {each.token for each in folders if self._synced.get(each.token) != storage.durability}
        for token in unsynced:
            storage.sync_path(f"{receivers}/{token}")
        if unsynced:
            storage.sync(receivers)
        for token in unsynced:
            _keep(self._synced, token, storage.durability)

    def check(self, out: Out) -> None:
        """Try whether messages like one can be sent, and a rename leads from their queue to this one; send nothing.

        Raises:
            ConfigError: no rename leads there, or it lies on a circle through a topic.
            ValueError: a value that no name can hold.
            DropqError: this user may not send there, or the queue is away, or missing, and nothing takes its messages.
        """
        sender = self.sender(out.to)
        try:
            to = sender._destination
        except NoSuchQueue as missing:
            sender = self.instead(sender, missing)
            to = sender._destination
        sender._address(out.body, **out.fields)
        fan_out.try_rename(self.context, to)

    def what_blocks(self, addresses: Iterable[str] | None = None) -> str:
        """Return which of its addresses, or of others, takes nothing now, and why; "" if each takes or discards it."""
        for address in self.addresses if addresses is None else addresses:
            if why := self._blocks(self._senders.get(address) or self.sender_of(address)):
                return f"{address} takes nothing: {why}"
        return ""

    def _blocks(self, sender: Sender) -> str:
        try:
            try:
                to = sender._destination
                is_there = reading.exists(to.layout.target)
            except NoSuchQueue:
                is_there = False
            if not is_there:
                sender._missing_queue_sender()
                return ""  # who sends to it finds another that takes it, or says that it is gone
            is_own = to.layout.home == self.context.layout.home
            return "" if is_own else sender._send_limits().what_blocks()
        except (NoSuchQueue, InvalidName):
            return ""
        except DropqError as error:
            return str(error)
        except OSError as error:
            return describe(error)


def _keep(known: OrderedDict[str, T], key: str, value: T) -> None:
    """Keep a value; drop the one that was kept first if there are `MOST_OPEN` others."""
    if key not in known and len(known) >= MOST_OPEN:
        known.popitem(last=False)
    known[key] = value


class OutputWriter:
    """A message that is being made: a draft in the staged folder of the message that it is made of."""

    def __init__(self, outputs: Outputs, sender: Sender, out: Out, number: int, fd: int) -> None:
        self.size = 0  # bytes that were written
        self._outputs = outputs
        self._sender = sender
        self._out = out
        self._draft = part_draft(number)
        to = sender._destination
        self._writing = BufferedWriter(Draft(fd, lambda error: fan_out.dropped(outputs._folder, error, to)))

    def write(self, data: bytes | memoryview) -> None:
        """Write a piece of the body; StorageError if that fails, such as on a full disk."""
        self.size += len(data)
        self._writing.write(data)

    def finish(self) -> None:
        """Give it the name that it will have: its id, and its periods, are of this moment."""
        outputs, to = self._outputs, self._sender._destination
        path = f"{outputs._folder}/{self._draft}"
        with fan_out.staging(outputs._folder, to):
            self._writing.flush()
            to.storage.sync_file(self._writing.fileno())
            self._writing.close()
            to.storage.await_whole(path, self.size)
        outputs._open.discard(self)
        try:
            destination = outputs._destinations.folder(to)
        except NoSuchQueue as missing:
            self._sender = outputs._destinations.instead(self._sender, missing)
            destination = outputs._destinations.folder(self._sender._destination)
        name = part_name(destination.token, outputs._file_name(self._sender, self._out))
        with fan_out.staging(outputs._folder, to):
            outputs._context.storage.rename(path, f"{outputs._folder}/{name}")
        outputs._note(name, destination, self._sender)

    def drop(self) -> None:
        """Make no message of it."""
        self.close()
        self._outputs._open.discard(self)
        self._outputs._context.storage.unlink(f"{self._outputs._folder}/{self._draft}")

    def close(self) -> None:
        """Close its file."""
        with suppress(DropqError):  # what is in its buffer is not needed
            self._writing.close()


class Outputs:
    """What is made of one held message, and is sent with its ack; what was not sent when the block ends is removed.

    Args:
        given_up: whether nobody waits any more until a queue has room; None asks the destinations.

    Raises:
        LeaseLost: the message is not held.
        ValueError: it is shared with others, or is a bundle, and one of its records was settled by itself.
        ConfigError: nothing can go out with the acks of its queue.
    """

    def __init__(
        self, message: MessageView, destinations: Destinations, given_up: Callable[[], bool] | None = None
    ) -> None:
        destinations.refuse()
        self._given_up = given_up or destinations.given_up
        self._message = message
        self._destinations = destinations
        self._context = destinations.context
        self._claims = self._claims_of(message)
        self._folder = ""
        self._count = 0
        self._open: set[OutputWriter] = set()
        self._parts: dict[str, DestinationFolder] = {}
        self._unsynced: list[str] = []
        self._topics: dict[str, Sender] = {}
        self._takers: dict[str, Sender | None] = {}
        self._storage = self._context.storage  # as durable as the strictest destination asks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.withdraw()

    @staticmethod
    def _claims_of(message: MessageView) -> Claims:
        records = message._records
        settlement = message._settlement if records is None else records.claims
        why = "others hold it, too, or a script, so nothing can go out with its ack"
        if isinstance(settlement, Claims) and message._claimed().ours:
            if records is None or not records.cursor.others:
                return settlement
            why = "some of its records were settled otherwise, so it cannot be acknowledged as a whole"
        raise ValueError(f"message {message.id} of queue {message.context.name}: {why}; nothing was settled")

    # -- what goes out ---------------------------------------------------------------------------------------------

    def add_all(self, outs: Out | Iterable[Out]) -> None:
        """Stage messages; each queue is asked for room for all of its own, before anything is staged.

        Raises:
            ValueError: a value that no name can hold.
            QueueFull: a queue is full, and rejects.
            NoSuchQueue: a queue is missing, and nothing takes its messages.
            ConfigError, StorageError: it lies where no rename leads, or the file system refused.
        """
        outs = list(outs) if isinstance(outs, Iterable) else [outs]
        for out in outs:
            if not isinstance(out, Out):
                raise TypeError(f"what goes out with an ack is a dropq.Out, or several, not {type(out).__name__}")
        for address, count in Counter(out.to for out in outs).items() if len(outs) > 1 else ():
            self._taker(address, count)
        for out in outs:
            self._begun(out, self._written)

    def begin(self, out: Out) -> OutputWriter | None:
        """Begin a message whose body is written piece by piece; return None if its queue discards it.

        Raises:
            TooManyOutputs: `MOST` messages were made of this one.
            QueueFull, NoSuchQueue, ConfigError, StorageError: as of `add_all`.
        """
        return self._begun(out, self._writer)

    def _begun(self, out: Out, begin: Callable[[Sender, Out], T]) -> T | None:
        """Begin a message in the staged folder by `begin`, with who takes it; return None if its queue discards it."""
        own = self._context.root.layout.path
        if out.root not in (None, own) and not _is_same(out.root, own):
            raise ConfigError(f"{out!r} is in root {out.root}: what is made of a message goes to queues of its root")
        if len(self._parts) + len(self._open) >= MOST:
            raise TooManyOutputs(f"message {self._message.id}: more than {MOST} messages were made of it")
        if (sender := self._taker(out.to, 1)) is None:
            return None
        claim = self._message._claimed()
        self._folder = self._folder or fan_out.new_folder(self._context, claim, self._own_name(claim))
        try:
            begun = begin(sender, out)
        except NoSuchQueue as missing:
            sender = self._takers[out.to] = self._destinations.instead(sender, missing)
            begun = begin(sender, out)
        self._count += 1
        return begun

    def _taker(self, address: str, count: int) -> Sender | None:
        """Return the sender that takes so many messages for an address, after a wait for room; None discards them."""
        if address not in self._takers:
            sender = self._destinations.sender(address)
            try:
                is_own = sender._destination.layout.home == self._context.layout.home
                self._takers[address] = sender if is_own else self._admitted(sender, count)
            except NoSuchQueue as missing:
                self._takers[address] = self._destinations.instead(sender, missing)
        return self._takers[address]

    def _admitted(self, sender: Sender, count: int) -> Sender | None:
        """Let messages in as a whole; if the queue makes senders wait, wait, and renew the lease meanwhile."""
        wait, claim, timing, renewed = None, self._message._claim, self._context.timing, time.monotonic()
        left = claim.deadline - self._context.clock.now_ms() if claim is not None and claim.deadline else 0
        lease = max(left, 0) / 1000
        while time.monotonic() >= sender._asks_at:
            most = sender._send_limits().most
            try:
                return sender._admit_job(count if most is None else min(count, most))
            except MustWait as must:
                if self._given_up():
                    raise
                wait = wait or Wait(sender._destination.layout.processed, str(must), timing)
                wait.pause(timing.max_age)
            if claim is not None and lease and time.monotonic() - renewed > lease / 3:
                with self._message._lock:
                    self._claims.extend(claim, lease_end(self._context.clock, lease))
                renewed = time.monotonic()
        return sender

    def _writer(self, sender: Sender, out: Out) -> OutputWriter:
        self._destinations.folder(sender._destination)
        fd = fan_out.new_draft(self._context, self._folder, self._count, sender._destination)
        part = OutputWriter(self, sender, out, self._count, fd)
        self._open.add(part)
        return part

    def _written(self, sender: Sender, out: Out) -> None:
        to = sender._destination
        file = self._file_name(sender, out)
        destination = self._destinations.folder(to)
        name, data = part_name(destination.token, file), bytes_of(out.body)
        fan_out.write_part(self._context, self._folder, name, file, data, to)
        self._note(name, destination, sender)

    def _own_name(self, claim: Claim) -> str:
        """Return the file name by which an ack archives the message."""
        if claim.number == 1 and not names.may_be_marked(claim.own_name):
            return claim.own_name
        return self._context.sidecars.fit(naming.counted(self._context, claim))

    def _note(self, name: str, destination: DestinationFolder, sender: Sender) -> None:
        to = sender._destination
        self._parts[name] = destination
        if not to.storage.syncs_files:
            self._unsynced.append(name)
        self._storage = self._storage.at_least(to.storage.durability)
        if to.layout.is_topic:
            self._topics[to.name] = sender

    def _file_name(self, sender: Sender, out: Out) -> str:
        file = self._message._file
        if file.plain and not out.fields and not sender._marks:
            message_class = "T" if isinstance(out.body, str) else "B"
            return names.made_name(self._context.root.ids.next(), message_class, file.filename)
        try:
            return sender._address_of(out.body, self._headers(out))[0]
        except ValueError as error:
            raise ValueError(f"{out!r}: {error}") from error

    def _headers(self, out: Out) -> Headers:
        """Return the headers of a message: what is not said is that of the message it is made of."""
        message, name, fields = self._message, self._message._name, out.fields
        correlation_id = name.correlation_id or (
            message.id if _passes(check_text, "correlation_id", message.id) else None
        )
        properties = {key: value for key, value in name.properties.items() if _is_inherited(key, value)}
        properties |= fields.get("properties") or {}
        said = {"priority": name.priority, "correlation_id": correlation_id, **fields}
        return Headers(**{**said, "properties": {key: each for key, each in properties.items() if each is not None}})

    # -- the end ---------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make durable what is less so than the commit will be; do this first, while the lease can be renewed."""
        storage, folder = self._storage, self._folder
        # A sweep may have dropped what is staged: then the settlement finds the claim gone, too.
        with suppress(LeaseLost), fan_out.staging(folder, self._context):
            unsynced = self._unsynced if storage.syncs_files else []
            with storage.together(folder, len(unsynced)) as each:
                for name in unsynced if each else ():
                    storage.sync_path(f"{folder}/{name}")
            if storage is not self._context.storage:
                self._destinations.sync(self._parts.values(), storage)

    def archive(self, claim: Claim) -> Location:
        """Acknowledge the message, and send what was made of it; use this as the verb of a settlement."""
        records = self._message._records
        with nullcontext() if records is None else records.cursor.frozen():
            self._claims_of(self._message)  # its records may have been settled since
            if self._parts:
                return self._archive(claim)
            self.withdraw()
            return self._claims.archive(claim)

    def _archive(self, claim: Claim) -> Location:
        context = self._context
        if self._storage is not context.storage:
            context = replace(context, storage=self._storage)
        own_name, folder = self._own_name(claim), self._folder
        self._folder = ""  # RACE: a file server may do the rename after it was refused: then the commit needs the parts
        try:
            fan_out.send(context, claim, folder, self._parts, own_name)
        except Unavailable:
            if self._claims.is_changed(claim):
                return self._claims.set_changed_aside(claim)
            raise
        return Location("processed", own_name) if context.config.history else Location("removed", "")

    def distribute(self) -> None:
        """Distribute what was published, as far as that is possible now; somebody else does the rest."""
        for topic, sender in self._topics.items():
            try:
                sender._outlet.distribute()
            except (OSError, DropqError) as error:
                log.info("topic %s: what was published is distributed later: %s", topic, describe(error))

    def withdraw(self) -> None:
        """Remove what was not sent."""
        for part in self._open:
            part.close()
        folder, self._folder = self._folder, ""
        if folder and self._message._claim is not None:
            fan_out.withdraw(self._context, folder)


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False  # one of them is gone


def _is_inherited(key: str, value: Any) -> bool:
    is_own = key in _NOT_INHERITED or key.startswith(names.RESERVED)
    return not is_own and _passes(names.check_property, key, value)


def _passes(check: Callable[[str, Any], object], key: str, value: Any) -> bool:
    """Return whether a value can be sent: a script or a foreign file may have one that nobody can send."""
    try:
        check(key, value)
    except ValueError:
        return False
    return True
