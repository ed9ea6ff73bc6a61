"""Queues that are measured: the raw loop of system calls, dropq, and what PyPI has beside it.

A queue is a small class that each process opens for itself: `put` sends a body, `take` claims, reads and settles one.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import dropq

#: How a new file is opened.
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: Messages that are sent, or taken, together where it is by the thousand.
BULK = 1000


class Peer:
    """A queue in a folder, as one process has it open."""

    #: What it is called in the tables, and what one has to know to read its figures.
    name: ClassVar[str]
    note: ClassVar[str] = ""
    #: The module that it needs; without it the queue is left out.
    needs: ClassVar[str] = ""
    #: Whether it takes so long that it sits out most rounds.
    seldom: ClassVar[bool] = False
    #: The raw loop that makes the same syncs.
    like: ClassVar[str] = ""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @classmethod
    def missing(cls) -> str:
        """Return why it cannot run here; empty where it can."""
        if cls.needs and cls.needs not in sys.modules and find_spec(cls.needs) is None:
            return f"the module {cls.needs} is not installed: pip install '.[bench]'"
        return ""

    @classmethod
    def make(cls, folder: str) -> None:
        """Make the queue, before any process opens it to work with it."""
        cls(folder).close()

    @classmethod
    def unmake(cls, folder: str) -> None:
        """End what `make` started; the folder is removed afterwards."""

    @classmethod
    def settled(cls, folder: str) -> int | None:
        """Return how many messages lie where settled ones are kept; None where they are not."""
        return None

    def put(self, body: bytes) -> None:
        """Send a message."""
        raise NotImplementedError

    def put_all(self, bodies: Iterable[bytes]) -> None:
        """Send messages, together where the queue knows how."""
        for body in bodies:
            self.put(body)

    def take(self) -> bytes | None:
        """Take a message, read it, and settle it; None where none waits."""
        raise NotImplementedError

    def take_all(self) -> Iterator[bytes]:
        """Take messages until none waits."""
        while (body := self.take()) is not None:
            yield body

    def close(self) -> None:
        """End."""


# -- the raw loop --------------------------------------------------------------------------------------------------


class InFolders(Peer):
    """A queue in the folders of dropq's layout: paths and names are as long, whoever works there."""

    @classmethod
    def make(cls, folder: str) -> None:
        dropq.Root.create(f"{folder}/root").create_queue("q", durability="none").close()

    @classmethod
    def settled(cls, folder: str) -> int:
        return len(os.listdir(f"{folder}/root/q/processed"))


class Raw(InFolders):
    """Open, write, close, rename; from a listing rename, open, read, close, rename: what no queue of files spares."""

    name = like = "raw loop"
    note = "system calls alone"
    syncs_file: ClassVar[bool] = False
    syncs_folders: ClassVar[bool] = False

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        queue = f"{folder}/root/q"
        self.working, self.target = f"{queue}/working", f"{queue}/target"
        self.processing, self.processed = f"{queue}/processing", f"{queue}/processed"
        owner = f"{os.uname().nodename}-{os.getpid()}"[:16]
        self.held = f"{self.processing}/{owner}-{secrets.token_hex(5)}-100,0,1~"
        self.numbers = itertools.count(time.time_ns() // 1_000_000 * 1000)
        self.random = f"{secrets.randbelow(10**10):010d}"

    def put_all(self, bodies: Iterable[bytes]) -> None:
        create, write, close, rename = os.open, os.write, os.close, os.rename
        working, target, random, flags = self.working, self.target, self.random, CREATE
        for body, number in zip(bodies, self.numbers, strict=False):
            name = f"4.{number}-{random}.B"
            staged = f"{working}/{name}"
            fd = create(staged, flags, 0o664)
            write(fd, body)
            if self.syncs_file:
                os.fsync(fd)
            close(fd)
            rename(staged, f"{target}/{name}")
            if self.syncs_folders:
                sync_folders(target, working)

    def take_all(self) -> Iterator[bytes]:
        rename, processed = os.rename, self.processed
        for name, held in self.claims():
            body = read(held)
            rename(held, f"{processed}/{name}")
            if self.syncs_folders:
                sync_folders(processed, self.processing)
            yield body

    def claims(self) -> Iterator[tuple[str, str]]:
        """Claim what waits, listing after listing; yield names, and the path of each claim."""
        rename, target, claimed = os.rename, self.target, self.held
        found = True
        while found:
            found = False
            for name in sorted(os.listdir(target)):
                held = claimed + name
                try:
                    rename(f"{target}/{name}", held)
                except FileNotFoundError:
                    continue  # another was first
                found = True
                yield name, held


class RawFile(Raw):
    """The raw loop, with each body synced."""

    name = like = "raw loop, file synced"
    note = ""
    syncs_file = True


class RawFull(RawFile):
    """The raw loop with the syncs of `full`: the body, target/ and working/; processed/ and processing/."""

    name = like = "raw loop, all synced"
    note = "the file, and the four folders that renames change"
    syncs_folders = True


class RawManyFull(RawFull):
    """The raw loop with the syncs of `full`, those of folders once for a thousand messages."""

    name = like = "raw loop, all synced, by the thousand"
    note = "folders synced once for a thousand messages"

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        while batch := list(itertools.islice(several, BULK)):
            names = [f"4.{next(self.numbers)}-{self.random}.B" for _ in batch]
            for name, body in zip(names, batch, strict=True):
                fd = os.open(f"{self.working}/{name}", CREATE, 0o664)
                os.write(fd, body)
                os.fsync(fd)
                os.close(fd)
            for name in names:
                os.rename(f"{self.working}/{name}", f"{self.target}/{name}")
            sync_folders(self.target, self.working)

    def take_all(self) -> Iterator[bytes]:
        claims = self.claims()
        while batch := list(itertools.islice(claims, BULK)):
            bodies = [read(held) for _, held in batch]
            for name, held in batch:
                os.rename(held, f"{self.processed}/{name}")
            sync_folders(self.processed, self.processing)
            yield from bodies


def read(path: str) -> bytes:
    """Return what is in a file: a second read tells that there is no more."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    body = os.read(fd, 1 << 16)
    while more := os.read(fd, 1 << 16):
        body += more
    os.close(fd)
    return body


def sync_folders(*paths: str) -> None:
    """Make the names in folders durable."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(fd)
        os.close(fd)


# -- dropq ---------------------------------------------------------------------------------------------------------


class Dropq(InFolders):
    """Send; receive, read, ack."""

    name = "dropq, none"
    like = "raw loop"
    options: ClassVar[dict[str, Any]] = {"durability": "none"}
    #: How many messages it holds at once.
    backlog: ClassVar[int] = 1

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.queue = dropq.Root(f"{folder}/root").queue("q")
        self.subscription: dropq.Subscription | None = None

    @classmethod
    def make(cls, folder: str) -> None:
        dropq.Root.create(f"{folder}/root").create_queue("q", **cls.options).close()

    def put_all(self, bodies: Iterable[bytes]) -> None:
        send = self.queue.send
        for body in bodies:
            send(body)

    def take_all(self) -> Iterator[bytes]:
        receive = self.subscribed().receive
        while (message := receive()) is not None:
            body = message.body
            message.ack()
            yield body

    def subscribed(self) -> dropq.Subscription:
        """Return the subscription of this process, which lasts until it closes."""
        if self.subscription is None:
            self.subscription = self.queue.subscribe(max_backlog=self.backlog)
        return self.subscription

    def close(self) -> None:
        if self.subscription is not None:
            self.subscription.close()
        self.queue.close()


class DropqLease(Dropq):
    """The same, with leases."""

    name = "dropq, none, leases"
    note = "lease_period = 1m"
    options: ClassVar[dict[str, Any]] = {"durability": "none", "lease_period": "1m"}


class DropqFile(Dropq):
    """The same, each body synced."""

    name = "dropq, file"
    like = RawFile.name
    options: ClassVar[dict[str, Any]] = {"durability": "file"}


class DropqFull(Dropq):
    """The same, bodies and folders synced."""

    name = "dropq, full"
    like = RawFull.name
    options: ClassVar[dict[str, Any]] = {"durability": "full"}


class DropqFullLease(DropqFull):
    """The same, with leases."""

    name = "dropq, full, leases"
    note = DropqLease.note
    options: ClassVar[dict[str, Any]] = {"durability": "full", "lease_period": "1m"}


class DropqMany(Dropq):
    """Send, receive and ack by the thousand."""

    name = "dropq, none, by the thousand"
    note = "send_many, receive_many, ack_many"
    backlog = BULK

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        while batch := list(itertools.islice(several, BULK)):
            self.queue.send_many(batch)

    def take_all(self) -> Iterator[bytes]:
        subscription = self.subscribed()
        while messages := subscription.receive_many(BULK):
            bodies = [message.body for message in messages]
            if gone := subscription.ack_many(messages):
                raise RuntimeError(f"{len(gone)} claims were gone, of {len(messages)}")
            yield from bodies


class DropqManyFull(DropqMany):
    """The same, bodies and folders synced."""

    name = "dropq, full, by the thousand"
    like = RawManyFull.name
    options: ClassVar[dict[str, Any]] = {"durability": "full"}


def with_policy(note: str, **options: Any) -> type[Dropq]:
    """Return dropq with options that ask for a policy; what it costs is seen beside dropq without any."""
    members = {"name": f"dropq, {note}", "options": {"durability": "none", **options}}
    return type("DropqWithPolicy", (Dropq,), members)


#: A policy each, none of which keeps a message from the one consumer there is.
POLICIES = (
    with_policy("max_unprocessed", max_unprocessed=1_000_000),
    with_policy("filter, of names", filter="JMSPriority >= 0"),
    with_policy("filter, of bodies", filter="/ BEGINS WITH ('0')", message_type="text"),
    with_policy("priority, of names", priority="JMSPriority"),
    with_policy("priority, of bodies", priority="INSTR(/, 'x')", message_type="text"),
    with_policy("max_backlog", max_backlog=1000),
    with_policy("round-robin", fairness_model="round-robin"),
    with_policy("proportional", fairness_model="proportional"),
    with_policy("max_backlog, priority of bodies", max_backlog=1000, priority="INSTR(/, 'x')", message_type="text"),
    with_policy("barrier_expression", barrier_expression="JMSType = 'none'"),
    with_policy("max_backlog, proportional", max_backlog=1000, fairness_model="proportional"),
    with_policy("log off", log="off"),
    with_policy("log of all", log="all"),
)


# -- what PyPI has ---------------------------------------------------------------------------------------------------


class Dirq(Peer):
    """dirq's QueueSimple: a link locks, unlinks settle."""

    name, needs = "dirq", "dirq"
    note = "no syncs; what a dead consumer held stays locked until it is purged"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        from dirq.QueueSimple import QueueSimple

        self.queue = QueueSimple(f"{folder}/dirq")

    def put(self, body: bytes) -> None:
        self.queue.add(body)

    def take_all(self) -> Iterator[bytes]:
        queue, found = self.queue, True
        while found:
            found = False
            for name in queue:
                if queue.lock(name):
                    found = True
                    body = queue.get(name)
                    queue.remove(name)
                    yield body


class PersistQueue(Peer):
    """persist-queue's SQLiteAckQueue, as it is by default."""

    name, needs = "persist-queue", "persistqueue"
    note = "SQLite, synced at each commit; for one consumer at a time"
    seldom = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        from persistqueue import Empty, SQLiteAckQueue

        self.empty = Empty
        self.queue = SQLiteAckQueue(f"{folder}/persist", auto_commit=True)

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def take(self) -> bytes | None:
        try:
            message = self.queue.get(block=False, raw=True)
        except self.empty:
            return None
        self.queue.ack(id=message["pqid"])
        return bytes(message["data"])

    def close(self) -> None:
        self.queue.close()


class LiteQueue(Peer):
    """litequeue, as it is by default."""

    name, needs = "litequeue", "litequeue"
    note = "SQLite with a log, synced when that is moved into the table; bodies are text"
    seldom = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        import litequeue

        self.queue = litequeue.LiteQueue(f"{folder}/lite.db")

    def put(self, body: bytes) -> None:
        self.queue.put(body.decode("latin-1"))

    def take(self) -> bytes | None:
        message = self.queue.pop()
        if message is None:
            return None
        self.queue.done(message.message_id)
        return str(message.data).encode("latin-1")

    def close(self) -> None:
        self.queue.conn.close()


class Huey(Peer):
    """huey's file storage."""

    name, needs = "huey, files", "huey"
    note = "no syncs; no acks: what is taken is removed; one lock for all; a listing for each message"
    seldom = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        from huey.storage import FileStorage

        self.queue = FileStorage("bench", f"{folder}/huey")

    @classmethod
    def make(cls, folder: str) -> None:
        os.mkdir(f"{folder}/huey")

    def put(self, body: bytes) -> None:
        self.queue.enqueue(body)

    def take(self) -> bytes | None:
        body: bytes | None = self.queue.dequeue()
        return body


class Kombu(Peer):
    """kombu's filesystem transport, which is below Celery."""

    name, needs = "kombu, files", "kombu"
    note = "no syncs; what is taken is moved; a listing for each message; JSON and base64"
    seldom = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        from kombu.connection import Connection

        folders = {"data_folder_in": "data", "data_folder_out": "data", "processed_folder": "processed"}
        options = {option: f"{folder}/{place}" for option, place in folders.items()}
        options["control_folder"] = f"{folder}/control"
        connect: Any = Connection
        self.connection = connect("filesystem://", transport_options={**options, "store_processed": True})
        name = os.path.basename(folder)  # this process never binds a name again, also not in another folder
        self.queue = self.connection.SimpleQueue(name)

    @classmethod
    def make(cls, folder: str) -> None:
        for name in ("data", "processed", "control"):
            os.mkdir(f"{folder}/{name}")
        super().make(folder)

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def take(self) -> bytes | None:
        while True:
            try:
                message = self.queue.get(block=False)
            except self.queue.Empty:
                return None
            except ValueError:
                continue  # it was taken before it was written, and is lost
            message.ack()
            return bytes(message.body)

    def close(self) -> None:
        self.queue.close()
        self.connection.release()


class DiskCache(Peer):
    """diskcache's Deque."""

    name, needs = "diskcache", "diskcache"
    note = "SQLite with a log, synced when that is moved into the table; no acks: what is taken is removed"
    seldom = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        import diskcache

        self.queue = diskcache.Deque(directory=f"{folder}/cache")

    def put(self, body: bytes) -> None:
        self.queue.append(body)

    def take(self) -> bytes | None:
        try:
            return bytes(self.queue.popleft())
        except IndexError:
            return None

    def close(self) -> None:
        self.queue.cache.close()


class Redis(Peer):
    """A Redis server of its own, that syncs its log each second."""

    name, needs = "Redis, synced each second", "redis"
    note = "a server, asked three times for each message: LPUSH, LMOVE, LREM"
    seldom = True
    syncs: ClassVar[str] = "everysec"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.queue = connected(folder)

    @classmethod
    def missing(cls) -> str:
        return super().missing() or ("" if shutil.which("redis-server") else "there is no redis-server here")

    @classmethod
    def make(cls, folder: str) -> None:
        options = ["--port", "0", "--unixsocket", socket_of(folder), "--dir", folder, "--save", ""]
        options += ["--daemonize", "yes", "--appendonly", "yes", "--appendfsync", cls.syncs]
        subprocess.run(["redis-server", *options], check=True, stdout=subprocess.DEVNULL)
        server, until = connected(folder), time.monotonic() + 10
        while not os.path.exists(socket_of(folder)) and time.monotonic() < until:
            time.sleep(0.01)
        server.ping()

    @classmethod
    def unmake(cls, folder: str) -> None:
        if os.path.exists(socket_of(folder)):
            connected(folder).shutdown(nosave=True)

    def put(self, body: bytes) -> None:
        self.queue.lpush("q", body)

    def take(self) -> bytes | None:
        body: bytes | None = self.queue.lmove("q", "held", "RIGHT", "LEFT")
        if body is not None:
            self.queue.lrem("held", 1, body)
        return body

    def close(self) -> None:
        self.queue.close()


class RedisAlways(Redis):
    """The same, its log synced before each answer."""

    name = "Redis, synced each time"
    syncs = "always"


def socket_of(folder: str) -> str:
    """Return where a folder's server is reached: a socket's path has room for 107 bytes."""
    return f"{tempfile.gettempdir()}/{os.path.basename(folder)}.sock"


def connected(folder: str) -> Any:
    """Return a client of a folder's server, which connects when it is used."""
    import redis

    return redis.Redis(unix_socket_path=socket_of(folder))


#: All that run one and one, and four and four. The raw loop is the first: to it all have their ratio.
QUEUES: tuple[type[Peer], ...] = (
    Raw,
    RawFile,
    RawFull,
    RawManyFull,
    Dropq,
    DropqLease,
    DropqFile,
    DropqFull,
    DropqFullLease,
    DropqMany,
    DropqManyFull,
    Dirq,
    PersistQueue,
    LiteQueue,
    Huey,
    Kombu,
    DiskCache,
    Redis,
    RedisAlways,
)
