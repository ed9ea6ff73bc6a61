"""A queue: the verbs of producers, consumers and administrators on one directory.

Each verb validates, makes its one move, and returns. A queue object may be used by several threads, and after a fork;
it opens its folders and its configuration at its first use.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from dropq import admin, names, storage
from dropq.config import QueueConfig, load_queue
from dropq.durations import parse_duration
from dropq.errors import ConfigError, InvalidFilter, LeaseLost, NoSuchMessage, NoSuchQueue, StorageError
from dropq.layout import FOLDERS, QueueLayout
from dropq.lifecycle import Lifecycle, Waiting
from dropq.message import Duration, Message
from dropq.names import Name, Typed
from dropq.ready import Ready, ignoring
from dropq.reasons import Reasons
from dropq.sidecars import Sidecars
from dropq.storage import Storage, storage_error
from dropq.subscription import Subscription
from dropq.sweep import SweepReport, sweep

if TYPE_CHECKING:
    from dropq.fsck import Finding
    from dropq.root import Root

#: Messages that send_many makes durable together.
BATCH = 1000
#: States in which `find` looks for a message, in this order.
SEARCHED = ("target", "processing", "delayed", "error", "expired", "processed")


class Sent(NamedTuple):
    """What became of a send: the message's id, whether the queue took it, and the queue that it went to."""

    id: str
    accepted: bool
    delivered_to: str


@dataclass(frozen=True, slots=True)
class StateStats:
    """What lies in a state: messages, bytes, and since when the oldest message exists."""

    count: int
    bytes: int
    oldest: datetime | None


class Queue:
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
        self._lock = threading.RLock()
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
        if self._opened is None:
            with self._lock:
                self._opened = self._opened or self._open()
        return self._opened

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
        return self._find() is not None

    def _find(self, by: str = "target") -> QueueLayout | None:
        home = f"{self.root.layout.path}/{self.name}"
        for layout in (QueueLayout.flat(home), QueueLayout.incoming(home)):
            if os.path.isdir(layout.folder(by)):
                return layout
        return None

    def _open(self) -> Lifecycle:
        layout = self._find() or self._find("processing")  # that target/ alone is missing is told below
        if layout is None:
            raise NoSuchQueue(
                f"no queue {self.name!r} in {self.root.layout.path}: `dropq create {self.name}` makes one, "
                "`dropq ls` shows which there are"
            )
        _check_folders(layout, self.name)
        root = self.root
        config = load_queue(self.name, root.config, root.layout.config_file, layout.config_file)
        store = Storage(
            config.durability,
            file_mode=config.file_mode,
            dir_mode=config.dir_mode,
            group=group_number(config.group),
            base=layout.base,
        )
        typed = root.config.reply_to_style == "typed"
        sidecars = Sidecars(root.layout.meta, store, typed_replies=typed)
        reasons = Reasons(layout.reasons, store)
        return Lifecycle(layout, config, storage=store, sidecars=sidecars, reasons=reasons, clock=root.clock)

    # -- sending ---------------------------------------------------------------------------------------------

    def send(
        self,
        body: bytes | str,
        *,
        priority: int = 4,
        type: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        expires_in: Duration | None = None,
        delay: Duration | None = None,
        properties: Mapping[str, Any] | None = None,
        message_class: str | None = None,
        message_id: str | None = None,
    ) -> Sent:
        """Send a message: once this returns, it is in target/, as durable as the queue's configuration asks.

        Args:
            body: bytes, or text, which is sent as UTF-8 and as class T.
            priority: higher is delivered first; any 32-bit integer.
            type, correlation_id, reply_to: the JMS headers of these names.
            expires_in: how long it may wait before it expires.
            delay: how long it is kept from consumers.
            properties: the sender's own, by name; bool, int, float, str, or `Typed`.
            message_class: one of M B S P O T.
            message_id: an id of the sender's own; None generates one.

        Raises:
            NoSuchQueue, StorageError: the message was not sent, unless the error says that it is visible.
            ValueError: a value that no name can hold; nothing was sent.
        """
        file, message_id, not_before = self._address(
            body, priority, type, correlation_id, reply_to, expires_in, delay, properties, message_class, message_id
        )
        life = self.life
        life.stage(file, body.encode() if isinstance(body, str) else body)
        life.send(file, not_before=not_before)
        life.sent(not_before=not_before)
        return Sent(message_id, True, self.name)

    def send_many(self, messages: Iterable[bytes | str | Mapping[str, Any]]) -> list[Sent]:
        """Send many messages; each batch is synced once, which at durability `full` is quicker than one by one.

        Args:
            messages: bodies, or mappings with a `body` and the other arguments of `send`.

        Raises:
            NoSuchQueue, StorageError, ValueError: what was sent until then stays sent; the error says how many.
        """
        sent: list[Sent] = []
        batch: list[Mapping[str, Any]] = []
        for message in messages:
            batch.append(message if isinstance(message, Mapping) else {"body": message})
            if len(batch) == BATCH:
                self._send_batch(batch, sent)
                batch = []
        if batch:
            self._send_batch(batch, sent)
        return sent

    def _send_batch(self, batch: list[Mapping[str, Any]], sent: list[Sent]) -> None:
        life = self.life
        staged: dict[str, tuple[str, int]] = {}
        delayed: set[bool] = set()
        try:
            for fields in batch:
                file, message_id, not_before = self._address(**fields)
                body = fields["body"]
                life.stage(file, body.encode() if isinstance(body, str) else body)
                staged[file] = message_id, not_before
            for file, (message_id, not_before) in list(staged.items()):
                life.send(file, not_before=not_before)
                del staged[file]
                delayed.add(bool(not_before))
                sent.append(Sent(message_id, True, self.name))
        except BaseException as error:
            for file in staged:
                life.storage.unlink(f"{life.layout.working}/{file}")
            error.add_note(f"{len(sent)} messages of this send_many were sent before the error")
            raise
        finally:
            for not_before in delayed:
                life.sent(not_before=not_before)

    def send_file(self, path: str | os.PathLike[str] | IO[bytes], *, move: bool = False, **fields: Any) -> Sent:
        """Send a file's content as a message.

        Args:
            path: the file; it is copied, so it stays as it is. One that is open for reading is sent to its end.
            move: move it instead, if it is a path; where it lies on another file system it is copied, then removed.
            fields: the other arguments of `send`.

        Raises:
            StorageError: the file cannot be read; nothing was sent.
        """
        if not isinstance(path, str | os.PathLike):
            return self._send_open(path, **fields)
        source = os.fspath(path)
        file, message_id, not_before = self._address(b"", **fields)
        staged = f"{self.life.layout.working}/{file}"
        adopted = move and self._adopted(source, staged)
        if not adopted:
            self._copied(source, file)
        self.life.send(file, not_before=not_before, back_to=source if adopted else None)
        self.life.sent(not_before=not_before)
        if move and not adopted:
            try:
                self.life.storage.unlink(source)
            except OSError as error:
                raise storage_error(error, "the message was sent, its source could not be removed") from error
        return Sent(message_id, True, self.name)

    def _adopted(self, source: str, staged: str) -> bool:
        try:
            if os.path.islink(source) or not os.path.isfile(source):
                raise StorageError(f"{source} is no regular file; nothing was sent", path=source)
            self.life.storage.adopt(source, staged)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise storage_error(error, "nothing was sent") from error
            return False  # another file system, or not ours to move: copy it
        return True

    def _copied(self, source: str, file: str) -> None:
        try:
            with open(source, "rb") as reading, self._staged(file) as writing:
                shutil.copyfileobj(reading, writing, storage.READ_SIZE)
        except OSError as error:
            raise storage_error(error, "nothing was sent") from error

    def _send_open(self, reading: IO[bytes], **fields: Any) -> Sent:
        file, message_id, not_before = self._address(b"", **fields)
        try:
            with self._staged(file) as writing:
                shutil.copyfileobj(reading, writing, storage.READ_SIZE)
        except OSError as error:
            raise storage_error(error, "nothing was sent") from error
        self.life.send(file, not_before=not_before)
        self.life.sent(not_before=not_before)
        return Sent(message_id, True, self.name)

    @contextmanager
    def writer(self, **fields: Any) -> Iterator[IO[bytes]]:
        """Write a message piece by piece: it is sent when the block ends, and discarded when it raises.

        Args:
            fields: the arguments of `send`, but for the body.
        """
        file, message_id, not_before = self._address(b"", **fields)
        with self._staged(file) as writing:
            yield writing
        self.life.send(file, not_before=not_before)
        self.life.sent(not_before=not_before)

    @contextmanager
    def _staged(self, file: str) -> Iterator[IO[bytes]]:
        store, path = self.life.storage, f"{self.life.layout.working}/{file}"
        try:
            fd = store.create(path)
        except OSError as error:
            raise self.life.not_sent(error) from error
        writing = open(fd, "wb")  # noqa: SIM115 - closing says again what flushing said, and only that is told
        try:
            yield writing
            try:
                writing.flush()
                store.sync_file(fd)
                writing.close()
            except OSError as error:
                raise self.life.not_sent(error) from error
        except BaseException:
            with suppress(OSError):
                writing.close()
            store.unlink(path)
            raise

    def _address(
        self,
        body: bytes | str,
        priority: int = 4,
        type: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        expires_in: Duration | None = None,
        delay: Duration | None = None,
        properties: Mapping[str, Any] | None = None,
        message_class: str | None = None,
        message_id: str | None = None,
    ) -> tuple[str, str, int]:
        """Return the file name of a message to send, its id, and the time before which it may not be delivered."""
        life = self.life  # a queue that is refused is refused before the clock writes its probe
        if message_class is None:
            message_class = "T" if isinstance(body, str) else "B"
        elif message_class not in names.CLASSES or len(message_class) != 1:
            raise ValueError(f"message class {message_class!r}: one of {' '.join(names.CLASSES)}")
        if not -(2**31) <= priority < 2**31:
            raise ValueError(f"priority {priority}: an integer from -2147483648 to 2147483647")
        headers = (("type", type), ("correlation_id", correlation_id), ("reply_to", reply_to))
        chosen = message_id is not None
        if message_id is None:
            message_id = self.root.ids.next()
            if expires_in is None and delay is None and not properties and not (type or correlation_id or reply_to):
                return names.plain_name(message_id, priority, message_class), message_id, 0
        else:
            names.check_message_id(message_id)
        for header, text in headers:
            names.check_text(header, text or "")
        name = Name(
            message_id,
            priority=priority,
            message_class=message_class,
            expiration=0 if expires_in is None else self._in(expires_in),
            properties={} if properties is None else _typed(properties),
            correlation_id=correlation_id,
            reply_to=reply_to,
            type=type,
            not_before=0 if delay is None else self._in(delay),
        )
        return life.sidecars.fit(life.unique(name, chosen=chosen)), message_id, name.not_before

    def _in(self, period: Duration) -> int:
        seconds = parse_duration(period)
        return self.root.clock.now_ms() + int(seconds * 1000) if seconds else 0

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
            filter: not built yet.
            max_backlog: how many messages it may hold at once; None for as many as the queue's cap allows.
            lease_period: after which a claim runs out; None takes the queue's.
            detached: its claims outlive the process, as those of a shell command; they must have a lease.

        Raises:
            ConfigError: a detached subscription without a lease.
        """
        _no_filter(filter)
        if max_backlog is not None and max_backlog < 1:
            raise ValueError(f"max_backlog {max_backlog}: at least 1, or None for no limit")
        life = self.life
        lease = life.config.lease_period if lease_period is None else parse_duration(lease_period)
        if detached and not lease:
            raise ConfigError("a claim that outlives its process needs a lease: give a lease_period")
        limits = [limit for limit in (max_backlog, life.config.max_per_subscription_backlog) if limit is not None]
        return Subscription(
            self,
            life,
            client_id=client_id or _client_id(),
            max_backlog=min(limits) if limits else None,
            lease=lease or None,
            read_locks=(self.root.layout.read_lock, life.layout.read_lock),
            detached=detached,
        )

    def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message, on a subscription that lives as long as this object.

        Args:
            timeout: how long to wait for one: 0 looks once, None waits for ever.
        """
        return self._own_subscription().receive(timeout)

    def _own_subscription(self) -> Subscription:
        if self._own is None or self._own.inherited:
            with self._lock:
                if self._own is None or self._own.inherited:  # after a fork the child has its own
                    self._own = self.subscribe(max_backlog=None)
        return self._own

    def claimed(self, receipt: str) -> Message:
        """Take up a claim by its receipt, or, where leasing is `sublet`, by the message's id.

        Raises:
            LeaseLost: there is no such claim.
        """
        life = self.life
        claim, file = names.split_claim(receipt)
        if claim is None or not claim.ours or "/" in receipt or "\0" in receipt:
            return self._claimed_by_id(receipt)
        held = life.find_claim(claim.owner)
        if held is None:
            raise LeaseLost(f"no claim {claim.owner} on queue {self.name}: its lease ran out, or it was settled; nothing was changed")
        return Message(self, life, "processing", held.filename, held=held)

    def _claimed_by_id(self, message_id: str) -> Message:
        if self.config.leasing == "strict":
            raise LeaseLost(f"{message_id!r} is no receipt, and queue {self.name} has strict leasing: ids do not settle claims")
        for entry in storage.entries(self.layout.processing):
            claim, file = names.split_claim(entry.name)
            if claim is not None and claim.ours and self._is(file, message_id):
                held = self.life.find_claim(claim.owner)
                if held is not None:
                    return Message(self, self.life, "processing", held.filename, held=held)
        raise LeaseLost(f"no message {message_id!r} is held on queue {self.name}; nothing was changed")

    def ack(self, id: str, defer: bool = False) -> bool:
        """Acknowledge a message by its id, wherever it is held or waits; False when it is nowhere.

        With strict leasing a message that somebody else holds is left alone. It takes a listing: receipts are quicker.

        Args:
            id: the message's id.
            defer: remember the ack for a message that is not here yet; not built yet.
        """
        if defer:
            raise ConfigError("ack(defer=True) is not built in this version: deferred acks are not remembered")
        own = {message.id: message for message in (self._own.held if self._own else ())}
        try:
            if id in own:
                own[id].ack()
                return True
            if self.config.leasing == "sublet":
                self._claimed_by_id(id).ack()
                return True
        except LeaseLost:
            pass  # not held, or not any more: it may wait
        return self._ack_waiting(id)

    def _ack_waiting(self, message_id: str) -> bool:
        life = self.life
        for waiting in self._waiting():
            if self._is(names.split_claim(waiting.file)[1], message_id):
                with self.subscribe(client_id="ack") as subscription:
                    held = life.claim(waiting, subscription.next_owner(), 0)
                    if held is not None:
                        life.archive(held)
                        return True
        return False

    # -- looking ---------------------------------------------------------------------------------------------

    def browse(self, state: str = "target", filter: str | None = None) -> Iterator[Message]:
        """Yield the messages of a state in order of delivery, without touching any."""
        _no_filter(filter)
        for waiting in self._waiting(state):
            yield Message(self, self.life, state, waiting.file)

    def find(self, id: str, states: Iterable[str] = SEARCHED) -> Message:
        """Return a message by its id, its file name or its receipt, wherever it lies.

        Raises:
            NoSuchMessage: it is in none of the states.
        """
        searched = tuple(states)
        for state in searched:
            for entry in storage.entries(self.layout.folder(state)):
                if storage.is_message_file(entry) and (
                    entry.name == id or self._is(names.split_claim(entry.name)[1], id)
                ):
                    return Message(self, self.life, state, entry.name)
        raise NoSuchMessage(f"no message {id!r} in queue {self.name} ({', '.join(searched)})")

    def _is(self, file: str, message_id: str) -> bool:
        if file == message_id:
            return True
        name = self.life.sidecars.parse(file)
        return name.id == message_id or bool(name.meta and self.life.sidecars.full(name).id == message_id)

    def _waiting(self, state: str = "target") -> Iterator[Waiting]:
        life = self.life
        try:
            return Ready(life.layout.folder(state), life.sidecars, ignoring(life.config.ignore)).waiting()
        except FileNotFoundError:
            if state != "delayed":
                raise
            return iter(())  # that folder is made when a message is first delayed

    def counts(self) -> dict[str, int]:
        """Return how many messages lie in each state, by their names alone."""
        ignored = ignoring(self.config.ignore)
        return {
            state: sum(
                1
                for entry in storage.entries(self.layout.folder(state))
                if not ignored(entry.name) and storage.is_message_file(entry)
            )
            for state in (*FOLDERS, "delayed")
        }

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
        return StateStats(count, size, None if oldest is None else datetime.fromtimestamp(oldest / 1000, UTC))

    # -- keeping it in order -----------------------------------------------------------------------------------

    def requeue(
        self, ids: Iterable[str] | None = None, *, state: str = "error", filter: str | None = None
    ) -> list[admin.Outcome]:
        """Move messages back into target/ as if they were new; return what became of each.

        Args:
            ids: which; None takes all of the state.
            state: where they lie: error, expired, processed, or processing, whose holders lose their claims.
            filter: not built yet.
        """
        _no_filter(filter)
        return list(admin.requeue(self, ids=ids, state=state))

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

    def pause(self) -> None:
        """Make consumers see an empty queue, until `resume`; senders go on."""
        self.life.storage.touch(self.layout.read_lock)

    def resume(self) -> None:
        """Let consumers see the queue again."""
        self.life.storage.unlink(self.layout.read_lock)

    @property
    def paused(self) -> bool:
        """Whether consumers see an empty queue: by this queue's read-lock or the root's."""
        return storage.exists(self.layout.read_lock) or storage.exists(self.root.layout.read_lock)

    def close(self) -> None:
        """Return what this object's own subscription holds."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_folders(layout: QueueLayout, name: str) -> None:
    devices: dict[int, str] = {}
    for folder in FOLDERS:
        path = layout.folder(folder)
        try:
            devices.setdefault(storage.device(path), path)
        except FileNotFoundError as error:
            if not storage.exists(layout.home):  # RACE: it was deleted since it was found
                raise NoSuchQueue(f"queue {name} is not there any more: {layout.home}") from error
            way_out = f"`dropq fsck {name} --repair` makes it"
            raise storage_error(error, f"queue {name} lacks its folder {folder}/: {way_out}") from error
        except OSError as error:
            raise storage_error(error, f"queue {name} cannot be opened") from error
    if len(devices) > 1:
        first, second = list(devices.values())[:2]
        raise StorageError(
            f"queue {name} spans two file systems, {first} and {second}: a rename between them is not atomic; "
            "put all of its folders on one",
            path=second,
        )


def _no_filter(filter: str | None) -> None:
    if filter is not None:
        raise InvalidFilter(f"filter {filter!r}: filters are not built in this version of dropq")


def _typed(properties: Mapping[str, Any]) -> dict[str, Typed]:
    for name in properties:
        names.check_property_name(name)
    return {name: Typed.of(value) for name, value in properties.items()}


def _seconds(period: Duration | None) -> float | None:
    return None if period is None else parse_duration(period)


def _client_id() -> str:
    return f"{socket.gethostname().split('.')[0][:9]}-{os.getpid()}"


def group_number(group: int | str | None) -> int | None:
    """Return a group's number on this host."""
    if group is None or isinstance(group, int):
        return group
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(f"group = {group!r}: there is no such group on this host") from error


