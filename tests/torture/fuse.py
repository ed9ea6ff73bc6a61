"""On FUSE file systems: bindfs, mergerfs, fuse-overlayfs, and one of our own that has nothing but rename.

On each: the life of a message by every verb, processes that race on one mount, holders that are killed, and the file
system's own process killed under a queue at work. What became of every body is told by the folders behind the mount.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import actors
from helpers import health, until

from dropq import (
    ConfigError,
    DropqError,
    LeaseLost,
    Queue,
    QueueExists,
    Root,
    StorageError,
    Subscription,
    work,
)
from dropq.queue.stream_journal import Journal
from dropq.staging.jobs import Epoch, Job
from dropq.storage.system_calls import size_asked
from dropq.upkeep import bulk
from torture import mounts
from torture.account import Account, Found, body, judge, look
from torture.mounts import Mounted, mounted, passthrough, probed
from torture.table import NotRun, Options, Row

#: Seconds of a lease where nothing but leases frees a message, and of one that is not to run out.
SHORT, LONG = "1s", "1h"
CONSUMERS = 4


class Case:
    """A root of its own on a mount, and where each body that is sent there has to lie at the end."""

    def __init__(self, fs: Mounted, name: str) -> None:
        self.fs = fs
        self.name = name
        self.path = fs.path / name
        self.root = Root.create(self.path)
        self.expected: dict[str, str] = {}
        self.removed: set[str] = set()

    def queue(self, name: str = "q", **options: Any) -> Queue:
        """Make a queue; `full` is what it syncs, and what comes back does not wait."""
        return self.root.create_queue(name, **{"redelivery_delay": 0, **options})

    def body(self, name: str, state: str, size: int = 0) -> bytes:
        """Return a body that has to end in a state."""
        self.expected[name] = state
        return body(name, size)

    def account(self) -> Account:
        """Hold what lies behind the mount against what is expected."""
        found = behind(self.fs, self.name)
        reserved = [path for path in found.damaged if not os.path.getsize(path)]
        if reserved and not probed(self.fs.path)["modes"]:  # names that the dead reserved, as docs/protocol.md says
            found.damaged = [path for path in found.damaged if path not in reserved]
        account = judge(found, must=self.expected, may=self.removed)
        states = found.states()
        account.wrong += [
            f"{name} lies in {states[name]}, not in {state}"
            for name, state in self.expected.items()
            if name in states and states[name] != state
        ]
        account.wrong += [f"{name} was removed, and is there" for name in self.removed & states.keys()]
        return account


def behind(fs: Mounted, root: str) -> Found:
    """Return what lies in a root, seen without the mount."""
    found = Found()
    for folder in fs.folders:
        one = look(folder / root)
        for name, locations in one.locations.items():
            found.locations[name] += locations
        found.damaged += one.damaged
        found.beside += one.beside
    return found


def run(options: Options) -> Iterable[Row]:
    yield from _rows("bindfs", mounts.BINDFS, options)
    yield from _rows("mergerfs, two branches", mounts.MERGERFS, options)
    yield from _rows("fuse-overlayfs", mounts.OVERLAY, options)
    yield from _rows("passthrough", passthrough(), options)
    yield from _rows("passthrough, taken is EIO", passthrough(taken="EIO"), options)
    yield tested("two mounts of one folder: bindfs", options, two_mounts, mounts.BINDFS)
    yield tested("two mounts of one folder: passthrough", options, two_mounts, passthrough("shared-locks", "replaces"))
    yield tested("two mounts of one folder: passthrough like HDFS", options, two_mounts, mounts.HDFS_LIKE)
    yield tested("a queue in parts: mergerfs by path", options, in_parts, mounts.MERGERFS_BY_PATH)
    yield tested("a queue in the lower layer: fuse-overlayfs", options, in_layers, mounts.OVERLAY)


def _rows(name: str, kind: mounts.Kind, options: Options) -> Iterator[Row]:
    yield tested(f"every verb: {name}", options, every_verb, kind)
    yield tested(f"{CONSUMERS} consumers, one killed: {name}", options, race, kind)
    yield tested(f"holders killed: {name}", options, killed_holders, kind)
    yield tested(f"its process killed: {name}", options, killed_daemon, kind)


def tested(name: str, options: Options, test: Callable[[Mounted, Row, Options], None], kind: mounts.Kind) -> Row:
    """Run a test on a fresh mount of a kind; the row's name says what the file system has."""
    row = Row(name)
    try:
        with mounted(kind, options.folder / "".join(c if c.isalnum() else "-" for c in name)) as fs:
            row.test = f"{name} ({mounts.in_words(probed(fs.path))})" if test is every_verb else name
            test(fs, row, options)
    except NotRun as reason:
        row.not_run = str(reason)
    except Exception as error:  # the other rows are as good as before
        row.wrong.append(f"{name}: ended by {error!r}")
    return row


@contextmanager
def _case(fs: Mounted, row: Row, name: str) -> Iterator[Case]:
    """Count a case, and what it comes to, also where it breaks off."""
    row.cases += 1
    case = Case(fs, name)
    try:
        yield case
        row.count(case.account(), f"{fs.kind.name}, {name}")
    except (Exception, AssertionError) as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{Path(f.filename).name}:{f.lineno}" for f in where if "contextlib" not in f.filename]
        row.wrong.append(f"{fs.kind.name}, {name}: {error!r} at {' '.join(lines)}")


# -- the life of a message -----------------------------------------------------------------------------------


def every_verb(fs: Mounted, row: Row, options: Options) -> None:
    """Send, settle and bring back by every public verb, each on a queue of its own."""
    for verb in (verb for verb in VERBS if fs.kind.follows or verb is not changes_behind):
        with _case(fs, row, verb.__name__) as case:
            verb(case)
            assert not (found := [str(one) for one in case.root.queue("q").fsck()]), f"fsck found {found}"


def sends(case: Case) -> None:
    """By every way there is to send."""
    queue = case.queue()
    queue.send(case.body("sent", "target", 200_000))
    queue.send_many([case.body(f"many{number}", "target") for number in range(20)])
    with queue.writer(properties={"n": 1}) as writing:
        for part in range(0, len(whole := case.body("written", "target", 300_000)), 1000):
            writing.write(whole[part : part + 1000])
    with suppress(ZeroDivisionError), queue.writer() as writing:
        writing.write(b"half of it")
        raise ZeroDivisionError
    beside = case.path / "beside"
    for name, moved in (("copied", False), ("moved", True)):
        written(beside, case.body(name, "target", 5000))
        queue.send_file(beside, move=moved)
    assert not beside.exists()
    written(beside, case.body("open", "target"))
    with beside.open("rb") as reading:
        queue.send_file(reading)
    elsewhere = case.fs.path.with_name(f"{case.name}-elsewhere")
    elsewhere.write_bytes(case.body("from elsewhere", "target"))
    queue.send_file(elsewhere, move=True)
    assert not elsewhere.exists()
    assert queue.counts()["target"] == len(case.expected) == queue.stats()["target"].count
    assert {message.body for message in queue.browse()} >= {body("open")}
    assert os.listdir(case.path / "q/working") == []


def settles(case: Case) -> None:
    """By every way there is to settle a message that is held."""
    queue = case.queue()
    ways: dict[str, tuple[Callable[[Any], object], str]] = {
        "acked": (lambda m: m.ack(), "processed"),
        "nacked": (lambda m: m.nack(), "target"),
        "nacked later": (lambda m: m.nack(delay="1h"), "delayed"),
        "released": (lambda m: m.release(), "target"),
        "failed": (lambda m: m.fail("no"), "error"),
        "rejected": (lambda m: m.reject("no", traceback="none"), "error"),
        "expired": (lambda m: m.expire(), "expired"),
        "extended": (lambda m: (m.extend("1h"), m.extend("2h"), m.ack()), "processed"),
        "held": (lambda m: None, "processing"),
    }
    queue.send_many([case.body(name, state) for name, (_, state) in ways.items()])
    subscription = queue.subscribe(max_backlog=None, lease_period=LONG)
    for message in subscription.receive_many(len(ways)):
        ways[message.text.rsplit(" ", 2)[0]][0](message)
        if message.state in ("error", "expired"):
            assert message.reason, f"no reason is kept with what lies in {message.state}/"
    reasons = [message.reason or {} for message in queue.browse("error")]
    assert {str(reason.get("reason")) for reason in reasons} == {"failed", "rejected"}


def closes(case: Case) -> None:
    """A subscription that ends gives back what it held; a claim is settled by its receipt."""
    queue = case.queue()
    queue.send(case.body("given back", "target"))
    with queue.subscribe() as subscription:
        assert subscription.receive() is not None
    detached = queue.subscribe(detached=True, lease_period=LONG)
    queue.send(case.body("by receipt", "processed"), priority=9)
    message = detached.receive()
    assert message is not None and message.receipt is not None
    Root(case.path).queue("q").claimed(message.receipt).ack()
    try:
        message.ack()
        raise AssertionError("acked twice")
    except LeaseLost:
        pass


def tries_again(case: Case) -> None:
    """Failed twice with one try more: back to target/, then to error/."""
    queue = case.queue(redelivery_attempts=1, max_cancels=2)
    queue.send(case.body("failed twice", "error"))
    for _ in range(2):
        with_one(queue, lambda message: message.fail("no"))
    queue.send(case.body("cancelled twice", "error"))
    for _ in range(2):
        with_one(queue, lambda message: message.nack())


def takes_time(case: Case) -> None:
    """Delays that end, expirations, leases that run out."""
    queue = case.queue()
    queue.send(case.body("expired", "expired"), expires_in=0.001)
    queue.send(case.body("later", "delayed"), delay="1h")
    queue.send(case.body("soon", "target"), delay=0.001)
    queue.subscribe(detached=True, lease_period=0.001)
    until(lambda: queue.sweep() and queue.counts()["expired"] == 1, "a message to expire")
    until(lambda: queue.sweep() and queue.counts()["delayed"] == 1, "a delay to end")
    queue.send(case.body("lapsed", "delayed"), priority=9)  # it waits after the death of its holder
    message = queue.subscribe(detached=True, lease_period=0.001).receive()
    assert message is not None
    until(lambda: queue.sweep().lapsed, "a lease to run out")
    try:
        message.ack()
        raise AssertionError("a lapsed claim was settled")
    except LeaseLost:
        pass


def comes_back(case: Case) -> None:
    """Requeued from every state, moved to another queue, removed, pruned."""
    queue, other = case.queue(), case.queue("other")
    for state, settle in (
        ("error", lambda message: message.reject("no")),
        ("expired", lambda message: message.expire()),
        ("processed", lambda message: message.ack()),
        ("processing", lambda message: None),
    ):
        queue.send(case.body(f"from {state}", "target"), priority=9)
        subscription = queue.subscribe(detached=True, lease_period=LONG)
        message = subscription.receive()
        assert message is not None
        settle(message)
        all_ok(queue.requeue(state=state))
        with queue.subscribe() as again:  # out of the way of those that follow
            message = again.receive()
            assert message is not None
            all_ok(queue.requeue(state="processing"))
    queue.send(case.body("moved", "other/target"), message_id="moved-by-id")
    all_ok(queue.move(other, ["moved-by-id"]))
    case.removed |= {"purged", *(f"pruned{number}" for number in range(5))}
    queue.send(body("purged"), message_id="purged-by-id")
    all_ok(queue.purge(["purged-by-id"]))
    kept = case.queue("kept")
    for number in range(5):
        kept.send(body(f"pruned{number}"))
        with_one(kept, lambda message: message.ack())
    kept.send(case.body("kept", "kept/processed"))
    with_one(kept, lambda message: message.ack())
    all_ok(kept.prune(keep_count=1))


def names_are_foreign(case: Case) -> None:
    """Files that a script moved in, under names that are taken where they go."""
    queue = case.queue()
    for state, settle in (
        ("processed", lambda message: message.ack()),
        ("error", lambda message: message.reject("no")),
        ("expired", lambda message: message.expire()),
    ):
        for number in range(3):
            drop(case.path / "q", "report.csv", case.body(f"{state}{number}", state, 300))
            with_one(queue, settle)
        here = os.listdir(case.path / "q" / state)
        assert len(here) == 3 and "report.csv" in here, f"{state}/ has {here}"
    for number, name in enumerate(("2024.report.csv", "a b&c%2E.txt", "ünï.txt", "x" * 200)):
        drop(case.path / "q", name, case.body(f"foreign{number}", "processed"))
        with_one(queue, lambda message: message.nack())
        with_one(queue, lambda message: message.ack())
        assert name in os.listdir(case.path / "q/processed")
    os.replace(case.path / "q/processed/report.csv", case.path / "q/target/report.csv")
    with_one(queue, lambda message: message.ack())
    assert "report.csv" in os.listdir(case.path / "q/processed")


def scripts(case: Case) -> None:
    """A script takes, settles and gives back by `mv` alone, on the mount and behind it."""
    queue = case.queue()
    at = case.path / "q"
    drop(at, "one", case.body("one", "processed"))
    os.rename(at / "target/one", at / "processing/me~one")
    assert queue.receive() is None
    os.rename(at / "processing/me~one", at / "processed/one")
    drop(at, "two", case.body("two", "target"))
    os.rename(at / "target/two", at / "processing/two")
    queue.sweep()
    assert queue.counts()["processing"] == 1
    until(lambda: queue.sweep(foreign_older_than=0).foreign == 1, "a script's claim to be returned")


def changes_behind(case: Case) -> None:
    """What a script moves in and out behind the mount is noticed by looking, and never handed out twice."""
    queue = case.queue()
    at = case.fs.folders[0] / case.name / "q"
    if not (at / "target").is_dir():  # the branches of mergerfs
        at = case.fs.folders[1] / case.name / "q"
    with queue.subscribe() as subscription:
        assert subscription.receive() is None
        os.makedirs(at / "working", exist_ok=True)
        drop(at, "dropped", case.body("dropped", "processed", 5000))
        message = subscription.receive(timeout="10s")
        assert message is not None and message.body == body("dropped", 5000)
        message.ack()
        queue.send_many([case.body(f"taken{number}", "processed") for number in range(3)])
        assert queue.counts()["target"] == 3
        parts = [folder / case.name / "q" for folder in case.fs.folders]
        _moved(parts, "target", "processing")
        assert subscription.receive(timeout="0.3s") is None and queue.counts()["processing"] == 3
        _moved(parts, "processing", "processed")
    seen: list[str] = []
    drop(at, "worked", case.body("worked", "processed"))
    work(queue, lambda message: seen.append(message.text), until_empty=True)
    assert len(seen) == 1


def _moved(parts: list[Path], source: str, destination: str) -> None:
    """Do what a script's `mv` of all that lies in a folder does, in the folders behind a mount."""
    for queue in parts:
        for name in os.listdir(queue / source) if (queue / source).is_dir() else ():
            (queue / destination).mkdir(exist_ok=True)
            os.rename(queue / source / name, queue / destination / name)


def hidden_names(case: Case) -> None:
    """What a file system keeps of an open file that was removed is never a message."""
    queue = case.queue(history=False)
    target = case.path / "q/target"
    case.removed |= {"read", "removed"}
    queue.send(body("removed", 5000))
    name = os.listdir(target)[0]
    with open(target / name, "rb") as still_open:
        os.unlink(target / name)
        (target / ".fuse_hidden000000010000000a").write_bytes(b"of another host")
        assert queue.receive() is None and queue.counts()["target"] == 0
        assert still_open.read() == body("removed", 5000)
        queue.send(body("read", 200_000))
        message = queue.receive()
        assert message is not None
        with message.open() as reading:
            message.ack()
            assert reading.read() == body("read", 200_000)
        queue.sweep()
    os.unlink(target / ".fuse_hidden000000010000000a")


def long_names(case: Case) -> None:
    """Metadata that no name holds, through every state."""
    queue = case.queue(redelivery_attempts=5)
    said = {f"property{number}": "word " * 20 for number in range(5)}
    queue.send(case.body("long", "processed"), properties=said, correlation_id="c" * 90, type="t" * 50)
    with_one(queue, lambda message: message.nack())
    with_one(queue, lambda message: message.fail("no"))
    with_one(queue, lambda message: message.reject("no"))
    all_ok(queue.requeue())
    case.root.sweep()

    def last(message: Any) -> None:
        assert message.properties == said and message.type == "t" * 50
        message.ack()

    with_one(queue, last)


def at_most_once(case: Case) -> None:
    """Settled before it is delivered, with a history and without."""
    queue = case.queue(semantics="at-most-once")
    queue.send(case.body("kept", "processed"))
    with_one(queue, lambda message: check(message.text.startswith("kept ")))
    fleeting = case.queue("fleeting", semantics="at-most-once", history=False)
    case.removed.add("gone")
    fleeting.send(body("gone", 5000))
    with_one(fleeting, lambda message: check(message.body == body("gone", 5000)))


def other_layouts(case: Case) -> None:
    """DropboxMQ's layout, a second root of a name that is taken, modes of what is made."""
    case.queue()
    queue = case.root.create_queue("boxed", dropboxmq=True, durability="file")
    queue.send(case.body("a", "boxed/processed"))
    with_one(queue, lambda message: message.ack())
    try:
        case.root.create_queue("boxed")
        raise AssertionError("a queue was made twice")
    except QueueExists:
        pass


def pauses(case: Case) -> None:
    """Paused and resumed, the queue and the root, again and again."""
    queue = case.queue()
    queue.send(case.body("waits", "processed"))
    for one in (queue, case.root, queue, case.root):
        one.pause()
        with queue.subscribe() as subscription:
            assert subscription.receive() is None
        one.resume()
    with_one(queue, lambda message: message.ack())
    assert health(queue).healthy


def copies(case: Case) -> None:
    """A body's second name, for a command: a link, or a copy where there are none."""
    queue = case.queue()
    queue.send(case.body("linked", "processed", 5000))

    def two_names(message: Any) -> None:
        path = f"{case.path}/q/.dropq/second"
        message.link(path)
        message.extend("1h")
        check(Path(path).read_bytes() == body("linked", 5000))
        os.unlink(path)
        message.ack()

    with_one(queue, two_names)


def jobs(case: Case) -> None:
    """Many messages or none, in the way of a Spark job: staged by tasks, committed by one rename, dropped."""
    queue = case.queue()
    context = queue.context
    for name, given_up in (("committed", False), ("aborted", True)):
        job = Job(context, name)
        job.begin()
        parts = []
        for task in range(3):
            attempt = job.attempt(f"task-{task}")
            files = queue._plain_addresses(4, "B")
            bodies = [f"{name}{task}{number}" for number in range(4)]
            attempt.write_all(files, [body(n) if given_up else case.body(n, "target") for n in bodies])
            if task == 1:  # a second try at the same, that comes to nothing
                lost = job.attempt("task-1")
                lost.write_all(queue._plain_addresses(1, "B"), [body("of a lost try")])
                lost.discard()
            parts.append(attempt.finish())
        job.abort() if given_up else check(job.commit(parts) == 12)
        check(job.sent is not given_up)
    for number in range(3):
        epoch = Epoch(context, "row", number)
        epoch.begin()
        attempt = epoch.attempt("task")
        attempt.write_all(queue._plain_addresses(1, "B"), [case.body(f"epoch{number}", "target")])
        check(epoch.commit([attempt.finish()]) == 1)
    check(Epoch(context, "row", 2).sent and os.listdir(f"{case.path}/q/working") == [])


def streams(case: Case) -> None:
    """Batches that outlive their reader are read again, the same, and settled."""
    queue = case.queue()
    queue.send_many([case.body(f"batch{number}", "processed" if number < 3 else "processing") for number in range(6)])
    first = _stream(queue)
    check(first.next_batch(0, 3) == 3)
    seen = sorted(message.text for message in first.messages(0))
    again = _stream(Root(case.path).queue("q"))
    check(sorted(message.text for message in again.messages(0)) == seen)
    again.settle(0)
    check(again.next_batch(1, 3) == 3)


def _stream(queue: Queue) -> Journal:
    subscription = queue.subscribe(detached=True, lease_period=LONG, max_backlog=None)
    return Journal(queue.context, "stream", subscription)


def deletes(case: Case) -> None:
    """A queue with something to do is not removed; one without is, and another may take its name."""
    case.queue().send(case.body("stays", "target"))
    for state in ("target", "processed"):
        queue = case.queue(f"of-{state}")
        queue.send(body(f"in {state}"))
        case.removed.add(f"in {state}")
        if state == "processed":
            with_one(queue, lambda message: message.ack())
            case.root.delete_queue(queue.name)
        else:
            try:
                case.root.delete_queue(queue.name)
                raise AssertionError("a queue with messages was removed")
            except StorageError as error:
                check(error.errno == errno.ENOTEMPTY)
            case.root.delete_queue(queue.name, force=True)
        check(not queue.exists() and case.queue(queue.name).exists())
    case.root.sweep()
    check(not [name for name in os.listdir(case.path) if ".delet" in name or ".creating" in name])


def without_room_for_modes(case: Case) -> None:
    """Modes that are asked for are set, or the queue says that they cannot be, and nothing is half done."""
    case.queue()
    if not probed(case.path)["modes"]:
        try:
            case.root.create_queue("modes", file_mode=0o600, dir_mode=0o700).send(b"x")
            raise AssertionError("modes were set where there are none")
        except StorageError:
            check(not [name for name in os.listdir(case.path) if "creating" in name])
            return
    case.root.create_queue("modes", file_mode=0o600, dir_mode=0o700).send(case.body("mine", "modes/target"))
    (name,) = os.listdir(case.path / "modes/target")
    check((case.path / "modes/target" / name).stat().st_mode & 0o777 == 0o600)


VERBS: tuple[Callable[[Case], None], ...] = (
    sends,
    settles,
    closes,
    tries_again,
    takes_time,
    comes_back,
    names_are_foreign,
    scripts,
    changes_behind,
    hidden_names,
    long_names,
    at_most_once,
    other_layouts,
    pauses,
    copies,
    jobs,
    streams,
    deletes,
    without_room_for_modes,
)


def drop(queue: Path, name: str, content: bytes) -> None:
    """Send a file as a script does."""
    written(queue / "working" / name, content)
    os.rename(queue / "working" / name, queue / "target" / name)


def written(path: Path, content: bytes) -> None:
    """Write a file as a careful script does: wait for all of it where the file system finishes it later."""
    path.write_bytes(content)
    until(lambda: size_asked(str(path)) in (len(content), None), f"{path} to be whole")


def with_one(queue: Queue, act: Callable[[Any], object]) -> None:
    """Do something with the next message, on a subscription of its own."""
    with queue.subscribe(lease_period=LONG) as subscription:
        message = subscription.receive(timeout="5s")
        assert message is not None, f"nothing to receive: {queue.counts()}"
        act(message)


def all_ok(outcomes: Iterable[bulk.Outcome]) -> None:
    """See that there was something to do, and that all of it was done."""
    done = list(outcomes)
    assert done and all(outcome.ok for outcome in done), f"{[outcome.detail for outcome in done]}"


def check(held: object) -> None:
    """Fail where something is not so."""
    assert held


# -- several processes ---------------------------------------------------------------------------------------


def race(fs: Mounted, row: Row, options: Options) -> None:
    """Consumers in processes of their own take all there is; one is killed on the way, and another begins."""
    count = 1000 if options.long else 100
    with _case(fs, row, "race") as case:
        _race(case, [case.path] * CONSUMERS, count, options.folder)
        row.kills += 1
        row.cases = count


def _race(case: Case, roots: list[Path], count: int, folder: Path) -> None:
    """Let one consumer for each path to the root take so many messages; kill the first after a tenth of them."""
    queue = case.queue(durability="none")
    names = {f"{case.name}{number}" for number in range(count)}
    queue.send_many([case.body(name, "processed") for name in sorted(names)])
    notes = folder / f"{case.fs.path.parent.name}-{case.name}"
    lease = "5"  # it frees what the dead held also where locks tell nothing
    consumers = [actors.start("consume", root, notes, lease, 3) for root in roots]
    try:
        until(lambda: len(os.listdir(notes / "acked")) > count // 10, "a tenth to be acked")
        consumers[0].kill()
        consumers.append(actors.start("consume", roots[-1], notes, lease, 3))
        # Twice, as one that moves meanwhile may be in no listing.
        until(lambda: not _to_do(queue) and not _to_do(queue), "all to be acked", timeout=600)
        (notes / "stop").touch()
        for consumer in consumers[1:]:
            assert consumer.wait(30) == 0, f"a consumer failed: {_said(notes)}"
    finally:
        (notes / "stop").touch()
        actors.finish(*consumers)
    acked = Counter(name.rpartition(".")[0].rsplit(" ", 2)[0] for name in os.listdir(notes / "acked"))
    twice = [name for name, times in acked.items() if times > 1]
    assert not twice, f"acked twice: {twice[:5]} ({len(twice)})"
    held_by_two = os.listdir(notes / "violations")
    assert not held_by_two, f"held by two at a time: {held_by_two[:5]} ({len(held_by_two)})"


def _to_do(queue: Queue) -> int:
    counts = queue.counts()
    return counts["target"] + counts["processing"] + counts["delayed"]


def _said(notes: Path) -> str:
    return " ".join(path.read_text()[-500:] for path in (notes / "out").iterdir())


def killed_holders(fs: Mounted, row: Row, options: Options) -> None:
    """A dead holder's messages return: by its lock where there are locks, by its lease everywhere."""
    locks = probed(fs.path)["locks"]
    with _case(fs, row, "by-lock") as case:
        queue = case.queue()
        queue.send_many([case.body(f"held{number}", "target" if locks else "processing") for number in range(3)])
        with _holder(case, options, 3, "0"):
            check(queue.sweep().total == 0)
        row.kills += 1
        if locks:
            until(lambda: queue.sweep().dead, "the dead to be noticed")
            until(lambda: queue.sweep() and queue.counts()["target"] == 3, "what the dead held to return")
        else:
            check(queue.sweep().total == 0)
    with _case(fs, row, "by-lease") as case:
        queue = case.queue()
        queue.send(case.body("leased", "target"))
        with _holder(case, options, 1, SHORT):
            pass
        row.kills += 1
        until(lambda: queue.sweep() and queue.counts()["target"], "a lease to run out")
    with _case(fs, row, "unleased-by-age") as case:
        queue = case.queue()
        queue.send(case.body("by hand", "target"))
        with _holder(case, options, 1, "0"):
            pass
        row.kills += 1
        until(lambda: queue.sweep(unleased_older_than=0) and queue.counts()["target"], "what the dead held to return")


@contextmanager
def _holder(
    case: Case, options: Options, count: int, lease: str, through: Mounted | None = None, which: str = ""
) -> Iterator[None]:
    """Let another process hold messages as long as the block lasts, then kill it.

    Args:
        through: the mount that it sees them on; None for the case's own.
        which: tells it from others of the case.
    """
    notes = options.folder / f"{case.fs.path.parent.name}-{case.name}{which}"
    holder = actors.start("hold", (through or case.fs).path / case.name, notes, count, lease)
    try:
        heard = actors.said(holder)
        assert heard == "holding", f"{heard!r}: {_said(notes)}"
        yield
    finally:
        actors.finish(holder)


# -- the file system's own process ---------------------------------------------------------------------------


def killed_daemon(fs: Mounted, row: Row, options: Options) -> None:
    """Kill it under every verb: each says so by an error of dropq's, and nothing is lost once it is back."""
    with _case(fs, row, "daemon-killed") as case:
        queue = case.queue(redelivery_attempts=9)
        for name, settle in (("erred", lambda m: m.reject("no")), ("done", lambda m: m.ack())):
            queue.send(case.body(name, "error" if name == "erred" else "processed"))
            with_one(queue, settle)
        queue.send_many([case.body(f"waits{number}", "target") for number in range(3)])
        queue.send(case.body("later", "delayed"), delay="1h")
        subscription = queue.subscribe(max_backlog=None, lease_period=LONG)
        held = subscription.receive_many(2)
        writer = queue.writer()
        writing = writer.__enter__()
        writing.write(b"half of it")
        job = Job(queue.context, "job")
        job.begin()
        attempt = job.attempt("0")
        attempt.write_all(queue._plain_addresses(2, "B"), [body("staged0"), body("staged1")])
        parts = [attempt.finish()]
        fs.kill()
        row.kills += 1
        for name, verb in _verbs_of_a_dead_mount(queue, subscription, held, job, parts).items():
            row.cases += 1
            if wrong := _refusal(verb):
                row.wrong.append(f"{fs.kind.name}, {name} on a dead mount: {wrong}")
        if wrong := _refusal(lambda: writer.__exit__(None, None, None)):
            row.wrong.append(f"{fs.kind.name}, writer on a dead mount: {wrong}")
        fs.again()
        _goes_on(queue, subscription, held, row)
        job.abort()


def _goes_on(queue: Queue, subscription: Subscription, held: list[Any], row: Row) -> None:
    """After the mount is back: claims are settled or known to be lost, and the same objects go on."""
    for message in held:
        with suppress(LeaseLost):
            message.nack()
    message = subscription.receive(timeout="5s")
    assert message is not None, "the subscription does not go on"
    message.nack()
    subscription.close()
    queue.sweep()
    with queue.subscribe() as another:
        assert another.receive(timeout="5s") is not None


def _verbs_of_a_dead_mount(
    queue: Queue, subscription: Subscription, held: list[Any], job: Job, parts: list[Any]
) -> dict[str, Callable[[], object]]:
    one, two = held
    receipt = str(two.receipt).replace("-1,", "-other,").replace("-2,", "-other,")
    return {
        "send": lambda: queue.send(b"x"),
        "send_many": lambda: queue.send_many([b"x", b"y"]),
        "send_file": lambda: queue.send_file(__file__),
        "a delayed send": lambda: queue.send(b"x", delay="1h"),
        "a long send": lambda: queue.send(b"x", properties={"p": "x" * 500}),
        "receive": lambda: subscription.receive(),
        "receive_many": lambda: subscription.receive_many(2),
        "queue.receive": lambda: queue.receive(),
        "subscribe": lambda: queue.subscribe(),
        "body": lambda: one.body,
        "ack": lambda: one.ack(),
        "nack": lambda: one.nack(),
        "fail": lambda: one.fail("no"),
        "reject": lambda: two.reject("no"),
        "expire": lambda: two.expire(),
        "extend": lambda: two.extend("1h"),
        "release": lambda: two.release(),
        "link": lambda: two.link("/dev/null/x"),
        "claimed": lambda: queue.claimed(receipt),
        "ack by id": lambda: queue.ack(two.id),
        "find": lambda: queue.find("x"),
        "browse": lambda: list(queue.browse()),
        "counts": lambda: queue.counts(),
        "stats": lambda: queue.stats(),
        "sweep": lambda: queue.sweep(),
        "root.sweep": lambda: queue.root.sweep(),
        "requeue": lambda: queue.requeue(),
        "move": lambda: queue.move(queue),
        "purge": lambda: queue.purge(),
        "prune": lambda: queue.prune(keep_count=0),
        "pause": lambda: queue.pause(),
        "resume": lambda: queue.resume(),
        "fsck": lambda: queue.fsck(),
        "work": lambda: work(queue, lambda message: None, until_empty=True),
        "queues": lambda: queue.root.queues(),
        "open root": lambda: Root(queue.root.path),
        "open queue": lambda: queue.root.queue("q").context,
        "create_queue": lambda: queue.root.create_queue("new"),
        "delete_queue": lambda: queue.root.delete_queue("q", force=True),
        "job commit": lambda: job.commit(parts),
        "job abort": lambda: job.abort(),
    }


def _refusal(verb: Callable[[], object]) -> str:
    """Return what is wrong with how a verb fails on a dead mount; nothing where it says what is the matter."""
    try:
        result = verb()
    except (StorageError, ConfigError) as error:  # the latter where it is the configuration that cannot be read
        return "" if os.strerror(errno.ENOTCONN) in str(error) else str(error)
    except (DropqError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return f"it did not fail, and returned {result!r:.80}"


# -- several views of one folder -----------------------------------------------------------------------------


def two_mounts(fs: Mounted, row: Row, options: Options) -> None:
    """Two hosts that mount one folder, as far as the kernel can tell: what is held stays with who holds it."""
    with mounts.second(fs) as other:
        with _case(fs, row, "held") as case:
            queue = case.queue()
            there = Root(other.path / case.name).queue("q")
            queue.send(case.body("held", "processed"))
            with queue.subscribe() as subscription, there.subscribe() as rival:
                message = subscription.receive()
                assert message is not None
                check(there.sweep().total == 0)
                taken = rival.receive(timeout="1.5s")
                assert taken is None, "a living holder's message was handed to another mount"
                message.ack()
        with _case(fs, row, "dead-there") as case:
            queue = case.queue()
            queue.send_many([case.body("dead there", "target"), case.body("leased there", "target")])
            with _holder(case, options, 1, "0", other), _holder(case, options, 1, SHORT, other, "second"):
                swept = queue.sweep()
                check(swept.total == swept.lapsed)  # on a busy machine the short lease is over by now
            row.kills += 2
            until(lambda: queue.sweep() and queue.counts()["target"] == 1, "a lease to run out")
            check(queue.counts()["processing"] == 1)
            until(lambda: queue.sweep(unleased_older_than=0).unleased == 1, "what the dead held to return")
        with _case(fs, row, "race") as case:
            count = 600 if options.long else 100
            roots = [path / case.name for path in (fs.path, other.path) * (CONSUMERS // 2)]
            _race(case, roots, count, options.folder)
            row.kills, row.cases = row.kills + 1, row.cases + count


def in_parts(fs: Mounted, row: Row, options: Options) -> None:
    """A queue whose folders lie on different branches, between which there is no rename, says so and loses nothing."""
    with _case(fs, row, "in-parts") as case:
        queue = case.queue(durability="none")
        one, two = (folder / case.name / "q" for folder in fs.folders)
        here, away = (one, two) if (one / "target").is_dir() else (two, one)
        queue.send_many([case.body(f"whole{number}", "target") for number in range(3)])
        away.mkdir(parents=True)
        (away / "target").mkdir()
        drop_at = away / "target" / "on-the-other-branch"
        drop_at.write_bytes(case.body("on the other branch", "target"))
        os.utime(drop_at, (1, 1))  # it has settled
        check((here / "processing").is_dir() and not (away / "processing").exists())
        queue = Root(case.path).queue("q")
        with queue.subscribe(max_backlog=None) as subscription:
            messages = subscription.receive_many(3)
            assert len(messages) == 3, "a message that cannot be claimed keeps others from being claimed"
            try:
                message = subscription.receive()
                assert message is not None, "a message that cannot be claimed is passed over without a word"
            except StorageError as error:
                row.faults += 1
                check("stays in target/" in str(error))


def in_layers(fs: Mounted, row: Row, options: Options) -> None:
    """A queue that lies in the lower layer, as in an image: what is taken is copied up, and never there twice."""
    name = "in-layers"
    lower = fs.folders[1]
    fs.unmount()
    queue = Root.create(lower / name).create_queue("q")
    names = [f"layer{number}" for number in range(20)]
    queue.send_many([body(one) for one in names])
    fs.mount()
    row.cases += len(names)
    queue = Root(fs.path / name).queue("q")
    notes = options.folder / "in-layers-notes"
    consumers = [actors.start("consume", fs.path / name, notes, "0", 1) for _ in range(2)]
    try:
        until(lambda: queue.counts()["processed"] == len(names), "all to be acked")
    finally:
        (notes / "stop").touch()
        actors.finish(*consumers)
    row.count(judge(look(fs.path / name), must=names), "fuse-overlayfs, in-layers")
    states = look(fs.path / name).states()
    row.wrong += [f"{one} lies in {state}" for one, state in states.items() if state != "processed"]
    row.wrong += [f"held by two: {one}" for one in os.listdir(notes / "violations")]
    fs.again()
    row.count(judge(look(fs.path / name), must=names), "fuse-overlayfs, in-layers, mounted anew")


#: What `make crashes` runs of it.
SHORT_FORM = (every_verb, killed_holders, killed_daemon)
