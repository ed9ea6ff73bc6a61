"""What a message costs over NFS, in RPCs: the cases, which run inside a guest with two clients of a real server.

`make bench-nfs` counts all of them, and `make torture` counts the main ones, of ten messages each; see uml.py. A case
is a generator: it prepares its queues until its first yield, then the folders settle, and the rest is counted. Where a
process consumes or sends many messages, what it pays once is left out: its opening, its first listing. So is the upkeep
of each minute, but not what a consumer asks for each tenth of a second and each second.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from forks import ended, fork

from dropq import Message, Queue, Root, Subscription
from dropq.cli.main import main
from dropq.staging.jobs import Job
from torture.guest import load, mount, say
from torture.rpcs import Cause, Rpcs, traced

PROJECT = Path(__file__).parents[2]
BODY = b"x" * 1024
#: Seconds after which nobody doubts a folder's time any more, which was changed before.
SETTLE = 2.2
#: Seconds in which what the kernel sends late is sent.
LATE = 0.05
#: Seconds of an idle consumer that are counted.
IDLE = 10
#: Seconds until an idle consumer looks as seldom as it does.
CALM = 4
#: Seconds after which nothing came for a minute.
MINUTE = 62
#: Messages whose lags are measured, at the most; and after a minute, in as many queues.
LAGS, SELDOM_LAGS = 100, 10
#: Commands of a shell that are counted.
COMMANDS = 5
#: Records of a bundle.
RECORDS = 1000
#: Seconds that a consumer waits at once which works beside others.
TURN = 0.2

#: A row: of which case, and what was found.
Row = dict[str, Any]
Running = Iterator[None]


@dataclass
class Rig:
    """Two clients of one server, by the folder that each sees, and the same folder on the server's own disk.

    Attributes:
        count: how many messages a case counts.
        rounds: how often it counts them; the round with the fewest RPCs is kept.
        deep: how many messages wait in a deep queue.
        trace: attribute the RPCs to lines, and count in one process.
    """

    a: Path
    b: Path
    here: Path
    rpcs: Rpcs
    count: int
    rounds: int = 1
    deep: int = 10_000
    trace: bool = False
    found: list[Row] = field(default_factory=list)
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    # -- queues --------------------------------------------------------------------------------------------------

    @property
    def enough(self) -> int:
        """How many messages a queue needs for all rounds, and some to begin with."""
        return self.count * self.rounds + 20

    def new_name(self) -> str:
        """Return a name that nothing has."""
        return f"q{next(self._names)}"

    def root(self, folder: Path) -> Root:
        """Return the root as it is seen in a client's folder, or on the server's own disk."""
        return Root(folder / "root")

    def made(self, **options: Any) -> str:
        """Make a queue; return its name."""
        name = self.new_name()
        self.root(self.a).create_queue(name, **{"durability": "none", "redelivery_delay": 0, **options})
        return name

    def filled(self, *, count: int | None = None, fields: dict[str, Any] | None = None, **options: Any) -> str:
        """Make a queue in which messages wait that no client knows; return its name."""
        name = self.made(**options)
        self.fill(name, count, **fields or {})
        return name

    def fill(self, name: str, count: int | None = None, **fields: Any) -> None:
        """Send messages on the server's own host."""
        messages: list[Any] = [{"body": BODY, **fields}] * (self.enough if count is None else count)
        self.root(self.here).queue(name).send_many(messages)

    def queue(self, name: str, folder: Path | None = None) -> Queue:
        """Open a queue, by the first client if nothing else is said, as a program that runs already has it."""
        self.kept_up(name)
        queue = self.root(folder or self.a).queue(name)
        assert queue.context
        return queue

    def kept_up(self, *names: str) -> None:
        """Let no consumer of some queues begin an upkeep within the next minute: it would be in few rows only."""
        for name in names:
            Path(self.root(self.here).queue(name).layout.swept).touch()

    # -- counting ------------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[int]:
        """Count what is done for each of the messages: `for _ in rig.messages(): queue.send(body)`."""
        for count in self.batches():
            yield from range(count)

    def batches(self, count: int | None = None) -> Iterator[int]:
        """Count what is done for so many messages at once, in each round."""
        for _ in range(self.rounds):
            counting = self.counted(count or self.count)
            with counting:
                yield count or self.count

    @contextmanager
    def counted(self, count: float) -> Iterator[None]:
        """Count what is done meanwhile, for so many messages."""
        time.sleep(LATE)
        causes: Counter[Cause] = Counter()
        before, began = self.rpcs.now(), time.monotonic()
        if self.trace:
            with traced(self.rpcs, PROJECT) as causes:
                yield
        else:
            yield
        seconds = time.monotonic() - began
        time.sleep(LATE)
        calls = self.rpcs.now() - before
        row: Row = {"n": count, "seconds": round(seconds, 3), "calls": dict(calls)}
        if self.trace:
            row["causes"] = [[*cause, times] for cause, times in causes.most_common()]
        self.found.append(row)

    # -- processes -----------------------------------------------------------------------------------------------

    def command(self, *arguments: str, root: str = "root") -> None:
        """Run a command of dropq on the first client to its end, as a process of its own if nothing is traced."""
        if not self.trace:
            assert ended(self.started(*arguments, root=root)) == 0, f"dropq {' '.join(arguments)} failed"
            return
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            _command(self.a / root, arguments)

    def started(self, *arguments: str, root: str = "root") -> int:
        """Start a command of dropq on the first client as a process of its own; return its id."""
        return fork(partial(_command, self.a / root, arguments), longest=0, out=Path(os.devnull))


def _command(root: Path, arguments: Sequence[str]) -> None:
    """Be the command `dropq` with these arguments."""
    os.environ["DROPQ_ROOT"] = str(root)
    sys.argv = ["dropq", *arguments]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    assert not code, f"exit code {code}"


class Crew:
    """Processes that work at once: each says when it is ready, and begins when all are.

    Args:
        works: what each does, and on which client's folder; it is given its crew.
        count: how many messages they take in all.
    """

    def __init__(self, works: Sequence[Callable[[Crew], None]], count: int) -> None:
        self.count = count
        self._taken = mmap.mmap(-1, mmap.PAGESIZE)  # shared; a number of each process
        self._ready, self._go = os.pipe(), os.pipe()
        self._pids = []
        for index, work in enumerate(works):
            self._index = index
            self._pids.append(fork(partial(work, self), longest=0))
        assert all(os.read(self._ready[0], 1) for _ in works)

    def begin(self) -> None:
        """Say that this process is ready, and wait until it may begin."""
        os.close(self._go[1])
        os.write(self._ready[1], b".")
        os.read(self._go[0], 1)

    def take(self) -> None:
        """Note that this process took a message."""
        self._numbers[self._index] += 1

    @property
    def over(self) -> bool:
        """Whether all messages are taken."""
        return sum(self._numbers) >= self.count

    @property
    def _numbers(self) -> memoryview[int]:
        return memoryview(self._taken).cast("Q")

    def run(self) -> None:
        """Let all begin, and wait until all have ended."""
        os.close(self._go[1])
        assert not any(map(ended, self._pids)), "one of them failed"
        for fd in (*self._ready, self._go[0]):
            os.close(fd)


# -- the floor: system calls ---------------------------------------------------------------------------------------


def raw_folders(rig: Rig) -> tuple[str, str, str, str]:
    """Make the folders of a queue, by their paths for the first client."""
    base = rig.a / rig.new_name()
    base.mkdir()
    for name in (names := ("working", "target", "processing", "processed")):
        (base / name).mkdir()
    working, target, processing, processed = (str(base / name) for name in names)
    return working, target, processing, processed


def raw_send_one(working: str, target: str, name: str) -> None:
    """Write a file, and rename it to where it waits."""
    fd = os.open(f"{working}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
    os.write(fd, BODY)
    os.close(fd)
    os.rename(f"{working}/{name}", f"{target}/{name}")


def raw_take_one(target: str, processing: str, processed: str, name: str) -> None:
    """Claim a file, read it, and file it."""
    os.rename(f"{target}/{name}", f"{processing}/{name}")
    fd = os.open(f"{processing}/{name}", os.O_RDONLY)
    os.read(fd, 65536)
    os.close(fd)
    os.rename(f"{processing}/{name}", f"{processed}/{name}")


def raw_send(rig: Rig) -> Running:
    working, target, *_ = raw_folders(rig)
    yield
    for _ in rig.messages():
        raw_send_one(working, target, rig.new_name())


def fill_raw(rig: Rig, target: str) -> None:
    """Write files into a folder on the server's own disk."""
    here = rig.here / Path(target).relative_to(rig.a)
    for number in range(rig.enough):
        (here / f"m{number:06}").write_bytes(BODY)


def raw_receive(rig: Rig) -> Running:
    _, target, processing, processed = raw_folders(rig)
    fill_raw(rig, target)
    yield
    waiting = iter(os.listdir(target))
    for _ in rig.messages():
        raw_take_one(target, processing, processed, next(waiting))


def raw_move(rig: Rig) -> Running:
    _, target, processing, _ = raw_folders(rig)
    fill_raw(rig, target)
    yield
    waiting = iter(os.listdir(target))
    for _ in rig.messages():
        name = next(waiting)
        os.rename(f"{target}/{name}", f"{processing}/{name}")


def raw_publish(rig: Rig) -> Running:
    """Write the message's file, write and rename a copy for each subscription, and file the message's."""
    working, _, _, processed = raw_folders(rig)
    receivers = [raw_folders(rig)[:2] for _ in range(3)]
    yield
    for _ in rig.messages():
        name = rig.new_name()
        fd = os.open(f"{working}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        os.write(fd, BODY)
        os.close(fd)
        for own, target in receivers:
            raw_send_one(own, target, name)
        os.rename(f"{working}/{name}", f"{processed}/{name}")


def raw_consume(folder: Path, crew: Crew) -> None:
    """Take files beside others until all are taken."""
    target, processing, processed = (str(folder / name) for name in ("target", "processing", "processed"))
    crew.begin()
    while not crew.over:
        if not (waiting := os.listdir(target)):
            time.sleep(TURN / 4)
        for name in waiting:
            with suppress(FileNotFoundError):  # another took it
                raw_take_one(target, processing, processed, name)
                crew.take()


def raw_produce(folder: Path, crew: Crew) -> None:
    """Send as many files as are to be taken."""
    crew.begin()
    for number in range(crew.count):
        raw_send_one(str(folder / "working"), str(folder / "target"), f"m{number:06}")


def raw_crew(rig: Rig, *, producing: bool) -> Running:
    base = Path(raw_folders(rig)[0]).parent.name
    for number in range(0 if producing else rig.count):
        (rig.here / base / "target" / f"m{number:06}").write_bytes(BODY)
    yield
    works = [partial(raw_consume, rig.a / base), partial(raw_produce if producing else raw_consume, rig.b / base)]
    crew = Crew(works, rig.count)
    with rig.counted(rig.count):
        crew.run()


# -- sending -------------------------------------------------------------------------------------------------------


def send(rig: Rig, **options: Any) -> Running:
    queue = rig.queue(rig.made(**options))
    queue.send(BODY)
    yield
    for _ in rig.messages():
        queue.send(BODY)


def send_many(rig: Rig, **options: Any) -> Running:
    queue = rig.queue(rig.made(**options))
    queue.send(BODY)
    yield
    for count in rig.batches():
        queue.send_many([BODY] * count)


# -- receiving -----------------------------------------------------------------------------------------------------


def taken(subscription: Subscription) -> Message:
    """Receive a message that waits, and read it."""
    message = subscription.receive()
    assert message is not None, "nothing to receive"
    assert len(message.body) == len(BODY)
    return message


def receive(
    rig: Rig, *, fields: dict[str, Any] | None = None, by: dict[str, Any] | None = None, **options: Any
) -> Running:
    name = rig.filled(fields=fields, **options)
    yield
    with rig.queue(name).subscribe(**by or {}) as subscription:
        taken(subscription).ack()
        for _ in rig.messages():
            taken(subscription).ack()


def receive_many(rig: Rig, *, at_once: int) -> Running:
    name = rig.filled(count=rig.enough + rig.rounds * at_once, max_backlog=at_once)
    yield
    with rig.queue(name).subscribe(max_backlog=at_once) as subscription:
        taken(subscription).ack()
        for count in rig.batches(-(-rig.count // at_once) * at_once):
            for _ in range(count // at_once):
                held = subscription.receive_many(at_once)
                assert len(held) == at_once, f"{len(held)} at once"
                for message in held:
                    assert len(message.body) == len(BODY)
                    message.ack()


def steps_of_a_receive(rig: Rig, *, step: str) -> Running:
    """Count one of the steps of many messages, which are taken one after the other."""
    name = rig.filled()
    yield
    steps: dict[str, Callable[[Message], object]] = {"body": lambda message: message.body, "ack": Message.ack}
    with rig.queue(name).subscribe(max_backlog=None) as subscription:
        held = [taken(subscription)]
        if step == "claim":
            held += [message for _ in rig.messages() if (message := subscription.receive()) is not None]
        else:
            claimed = iter(subscription.receive_many(rig.count * rig.rounds))
            for _ in rig.messages():
                held.append(next(claimed))
                steps[step](held[-1])


def settle(rig: Rig, *, how: Callable[[Message], None]) -> Running:
    name = rig.filled()
    yield
    with rig.queue(name).subscribe(max_backlog=None) as subscription:
        taken(subscription).ack()
        held = iter(subscription.receive_many(rig.count * rig.rounds))
        for _ in rig.messages():
            how(next(held))


def bundle(rig: Rig) -> Running:
    name = rig.made()
    lines = b"".join(b"%07d" % number + b"x" * 1016 + b"\n" for number in range(RECORDS))
    rig.root(rig.here).queue(name).send_many([lines] * rig.rounds)
    yield
    with rig.queue(name).subscribe() as subscription:
        for count in rig.batches(RECORDS):
            records = subscription.records("text", timeout=0)
            for _ in range(count):
                next(records).ack()


# -- topics, selectors, Spark --------------------------------------------------------------------------------------


def topic_of(rig: Rig) -> tuple[str, list[str]]:
    """Make a topic with three subscriptions; return its name, and the addresses of these."""
    name = rig.new_name()
    root = rig.root(rig.a)
    root.create_topic(name, durability="none")
    topic = root.topic(name, client_id=name)  # a client's subscription of another topic would replace it
    made = [topic.create_subscription(f"s{number}").name for number in range(3)]
    return name, made


def publish(rig: Rig) -> Running:
    name, subscriptions = topic_of(rig)
    topic = rig.root(rig.a).topic(name)
    topic.publish(BODY)
    yield
    for _ in rig.messages():
        assert topic.publish(BODY).distributed
    for address in subscriptions:
        assert rig.root(rig.here).queue(address).counts()["target"] == rig.count * rig.rounds + 1


def receive_of_topic(rig: Rig) -> Running:
    name, (first, *_) = topic_of(rig)
    for _ in range(rig.enough):
        rig.root(rig.here).topic(name).publish(BODY)
    yield
    with rig.queue(first).subscribe() as subscription:
        taken(subscription).ack()
        for _ in rig.messages():
            taken(subscription).ack()


def graph_of(rig: Rig, count: int) -> tuple[str, str]:
    """Make a queue with a selector that moves all to another, in which so many wait; return the names of both."""
    name, to = rig.made(), rig.made()
    rig.root(rig.a).queue(name).add_selector("s", to=to, credit=10_000)
    rig.fill(name, count)
    return name, to


def move(rig: Rig) -> Running:
    queues = [graph_of(rig, rig.count)[0] for _ in range(rig.rounds)]
    yield
    opened = [rig.queue(name) for name in queues]
    for number, count in enumerate(rig.batches()):
        moved = sum(opened[number].route().values())
        assert moved == count, f"{moved} were moved"


def receive_moved(rig: Rig) -> Running:
    name, to = graph_of(rig, rig.enough)
    rig.root(rig.here).queue(name).route()
    yield
    with rig.queue(to).subscribe() as subscription:
        taken(subscription).ack()
        for _ in rig.messages():
            taken(subscription).ack()


def stage(rig: Rig) -> Running:
    name = rig.made()
    yield
    queue = rig.queue(name)
    job = Job(queue.context, "job")
    job.begin()
    for number, count in enumerate(rig.batches()):
        attempt = job.attempt(f"{number}")
        attempt.write_all(queue._plain_addresses(count, "B"), [BODY] * count)
        attempt.finish()


def commit(rig: Rig) -> Running:
    name = rig.made()
    yield
    queue = rig.queue(name)
    for number in range(rig.rounds):
        job = Job(queue.context, f"job-{number}")
        job.begin()
        attempt = job.attempt("0")
        attempt.write_all(queue._plain_addresses(rig.count, "B"), [BODY] * rig.count)
        staged = attempt.finish()
        with rig.counted(rig.count):
            assert job.commit([staged]) == rig.count


# -- several processes, and commands -------------------------------------------------------------------------------


def consume(rig: Rig, folder: Path, name: str, crew: Crew) -> None:
    """Take messages beside others until all are taken."""
    with rig.queue(name, folder).subscribe() as subscription:
        if message := subscription.receive():
            message.ack()
        crew.begin()
        while not crew.over:
            if message := subscription.receive(timeout=TURN):
                assert len(message.body) == len(BODY)
                message.ack()
                crew.take()


def produce(rig: Rig, folder: Path, name: str, crew: Crew) -> None:
    """Send as many messages as are to be taken."""
    queue = rig.queue(name, folder)
    crew.begin()
    for _ in range(crew.count):
        queue.send(BODY)


def crew(rig: Rig, *, producing: bool, **options: Any) -> Running:
    name = rig.made(**options) if producing else rig.filled(**options)
    yield
    works = [partial(consume, rig, rig.a, name), partial(produce if producing else consume, rig, rig.b, name)]
    working = Crew(works, rig.count)
    with rig.counted(rig.count):
        working.run()


def work(rig: Rig, *options: str, queues: int = 1) -> Running:
    names = [rig.filled(count=rig.count // queues) for _ in range(queues)]
    yield
    rig.kept_up(*names)
    with rig.counted(rig.count // queues * queues):
        rig.command("work", *names, *options, "--until-empty", "-q", "--", "true")


def shell(rig: Rig, *, verb: str) -> Running:
    """Count commands, each on a queue of its own, which the client knows since a moment ago."""
    file = Path("/run/body")
    file.write_bytes(BODY)
    words = {"send": [str(file)], "receive": ["--lease", "60s"]}[verb]
    yield
    names = [rig.filled(count=1) for _ in range(COMMANDS)]
    yield
    with rig.counted(COMMANDS):
        for name in names:
            rig.command(verb, name, *words)


DEEP, DEEP_QUEUE = "deep", "messages"


def deep_root(rig: Rig) -> Root:
    """Return a root, on the server's own disk, with a queue in which many messages wait."""
    path = rig.here / DEEP
    if path.exists():
        return Root(path)
    root = Root.create(path)
    root.create_queue(DEEP_QUEUE, durability="none").send_many([BODY] * rig.deep)
    return root


def forget() -> None:
    """Let the clients know of no file any more, as if they had just mounted, and return what they keep of any."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    time.sleep(LATE)


def look(rig: Rig, *command: str) -> Running:
    deep_root(rig)
    yield
    forget()
    with rig.counted(1):
        rig.command(*command, root=DEEP)


def first_look(rig: Rig) -> Running:
    deep_root(rig)
    yield
    forget()
    with rig.counted(1):
        subscription = Root(rig.a / DEEP).queue(DEEP_QUEUE).subscribe()
        message = subscription.receive()
    assert message is not None
    message.nack()
    subscription.close()


# -- who waits -----------------------------------------------------------------------------------------------------


def idle(rig: Rig, *, queues: int = 1, calm: float = CALM) -> Running:
    """Count what consumers in one process ask for while nothing comes."""
    names = [rig.made() for _ in range(queues)]
    yield
    forget()
    subscriptions = [rig.queue(name).subscribe() for name in names]
    waiting = [
        threading.Thread(target=subscription.receive, args=(IDLE + (0 if rig.trace else calm + 1),))
        for subscription in subscriptions
    ]
    if not rig.trace:
        for thread in waiting:
            thread.start()
        time.sleep(calm)
    with rig.counted(IDLE):
        if rig.trace:  # a thread is traced if it starts now
            for thread in waiting:
                thread.start()
        time.sleep(IDLE)
    for thread in waiting:
        thread.join()
    for subscription in subscriptions:
        subscription.close()


def idle_work(rig: Rig, *options: str, queues: int) -> Running:
    names = [rig.made() for _ in range(queues)]
    yield
    forget()
    rig.kept_up(*names)
    pid = rig.started("work", *names, *options, "-q", "--", "true")
    time.sleep(2 * CALM)
    with rig.counted(IDLE):
        time.sleep(IDLE)
    os.kill(pid, signal.SIGTERM)
    ended(pid)


def lag(rig: Rig, *, queues: int, calm: float, each: int) -> Running:
    """Measure how long a message of the other client waits for a consumer to whom nothing came for some time."""
    names = [rig.made() for _ in range(queues)]
    kept = Path("/run", rig.new_name())
    yield
    senders = [rig.queue(name, rig.b) for name in names]
    pid = fork(partial(note_lags, rig, names, each, kept), longest=0)
    time.sleep(CALM + calm)
    for _ in range(each):
        for sender in senders:
            sender.send(f"{time.time():.6f}")
            time.sleep(random.uniform(0.3, 0.9))  # the consumer's pauses are shorter
    assert ended(pid) == 0, "the consumer failed"
    lags = sorted(map(float, kept.read_text().split()))
    tail = lags[math.ceil(len(lags) * 0.99) - 1]
    rig.found.append({"n": len(lags), "calls": {}, "lag": [round(statistics.median(lags), 3), round(tail, 3)]})


def note_lags(rig: Rig, names: list[str], each: int, kept: Path) -> None:
    """Take so many messages from each queue; write down how long ago each was sent."""
    lags: list[float] = []

    def take(name: str) -> None:
        with rig.queue(name).subscribe() as subscription:
            for _ in range(each):
                message = subscription.receive(timeout=2 * MINUTE)
                now = time.time()
                assert message is not None, "nothing came"
                lags.append(now - float(message.text))
                message.ack()

    threads = [threading.Thread(target=take, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.write_text(" ".join(f"{lag:.6f}" for lag in lags))


# -- the cases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of the table: what it is called there, what does it, and the row of system calls that it compares with."""

    title: str
    run: Callable[[Rig], Running]
    raw: str = ""
    #: What the RPCs are counted for.
    unit: str = "message"


#: What a message, a record, a command, a look at the deep queue or a second costs; and how late a message is.
CASES = {
    "raw-send": Case("raw send", raw_send),
    "raw-receive": Case("raw receive", raw_receive),
    "raw-move": Case("raw rename", raw_move),
    "raw-publish": Case("raw publish, 3 subscriptions", raw_publish),
    "raw-two-consumers": Case("raw, two consumers on two clients", partial(raw_crew, producing=False)),
    "raw-two-clients": Case("raw, producer and consumer on two clients", partial(raw_crew, producing=True)),
    "send": Case("send, `none`", send, "raw-send"),
    "send-full": Case("send, `full`", partial(send, durability="full"), "raw-send"),
    "send-many": Case("`send_many`, `none`", send_many, "raw-send"),
    "send-many-full": Case("`send_many`, `full`", partial(send_many, durability="full"), "raw-send"),
    "receive": Case("receive, body, ack, `none`", receive, "raw-receive"),
    "receive-full": Case("receive, body, ack, `full`", partial(receive, durability="full"), "raw-receive"),
    "claim": Case("receive alone", partial(steps_of_a_receive, step="claim")),
    "body": Case("body alone", partial(steps_of_a_receive, step="body")),
    "ack": Case("ack alone", partial(steps_of_a_receive, step="ack")),
    "history-off": Case("history off", partial(receive, history=False), "raw-receive"),
    "lease": Case("lease of 60 s", partial(receive, lease_period="60s"), "raw-receive"),
    "filter": Case(
        "filter on a property",
        partial(receive, fields={"properties": {"region": "EU"}}, by={"filter": "region = 'EU'"}),
        "raw-receive",
    ),
    "max-backlog": Case("`max_backlog`", partial(receive, max_backlog=10), "raw-receive"),
    "receive-many": Case("`max_backlog`, `receive_many(16)`", partial(receive_many, at_once=16), "raw-receive"),
    "round-robin": Case("round-robin", partial(receive, fairness_model="round-robin"), "raw-receive"),
    "nack": Case("nack", partial(settle, how=Message.nack), "raw-move"),
    "reject": Case("reject", partial(settle, how=lambda message: message.reject("as it comes"))),
    "bundle": Case("a bundle of 1,000", bundle, unit="record"),
    "work": Case("`dropq work`, command `true`", work, "raw-receive"),
    "work-fair": Case("`dropq work --fair`, two queues", lambda rig: work(rig, "--fair", queues=2), "raw-receive"),
    "publish": Case("publish, 3 subscriptions", publish, "raw-publish"),
    "subscription": Case("receive, body, ack of a subscription", receive_of_topic, "raw-receive"),
    "move": Case("MOVE by a selector", move, "raw-move"),
    "moved": Case("receive, body, ack of what was moved", receive_moved, "raw-receive"),
    "spark-stage": Case("Spark's job: stage a file", stage),
    "spark-commit": Case("Spark's job: commit", commit, "raw-move"),
    "two-consumers": Case("two consumers on two clients", partial(crew, producing=False), "raw-two-consumers"),
    "two-clients": Case("producer and consumer on two clients", partial(crew, producing=True), "raw-two-clients"),
    "two-clients-full": Case(
        "producer and consumer on two clients, `full`",
        partial(crew, producing=True, durability="full"),
        "raw-two-clients",
    ),
    "shell-send": Case("`dropq send`", partial(shell, verb="send"), unit="command"),
    "shell-receive": Case("`dropq receive`", partial(shell, verb="receive"), unit="command"),
    "ls": Case("`dropq ls`", lambda rig: look(rig, "ls"), unit="look at a deep queue, cold"),
    "health": Case("`dropq health`", lambda rig: look(rig, "health"), unit="look at a deep queue, cold"),
    "browse": Case("`dropq browse`", lambda rig: look(rig, "browse", DEEP_QUEUE), unit="look at a deep queue, cold"),
    "fsck": Case("`dropq fsck`", lambda rig: look(rig, "fsck", DEEP_QUEUE), unit="look at a deep queue, cold"),
    "first-look": Case("opening, and the first receive", first_look, unit="look at a deep queue, cold"),
    "idle": Case("idle, one queue", idle, unit="second"),
    "idle-ten": Case("idle, ten queues in one process", partial(idle, queues=10), unit="second"),
    "idle-work": Case("idle, `dropq work` on ten queues", partial(idle_work, queues=10), unit="second"),
    "idle-fair": Case(
        "idle, `dropq work --fair` on two queues", lambda rig: idle_work(rig, "--fair", queues=2), unit="second"
    ),
    "idle-minute": Case("idle for a minute, one queue", partial(idle, calm=MINUTE), unit="second"),
    "lag": Case(
        "lag at an idle consumer",
        lambda rig: lag(rig, queues=1, calm=0, each=min(rig.count, LAGS)),
        unit="message of another client",
    ),
    "lag-minute": Case(
        "lag at a consumer to whom nothing came for a minute",
        partial(lag, queues=SELDOM_LAGS, calm=MINUTE, each=1),
        unit="message of another client",
    ),
}


#: What `make torture` counts: the most RPCs that a message may cost with NFS 3 and with 4.2. The net is not delayed and
#: the best of some rounds counts, so that little is asked for by time: six RPCs of a consumer's look, for ten messages.
#: Half an RPC is to spare. Who saves RPCs lowers these.
LIMITS = {
    "send": (4.6, 4.6),
    "send-full": (4.6, 4.6),
    "send-many": (4.6, 4.6),
    "receive": (6.0, 7.0),
    "receive-full": (6.0, 7.0),
    "claim": (1.6, 1.6),
    "body": (3.5, 3.5),
    "ack": (1.5, 1.5),
    "history-off": (7.0, 8.0),
    "lease": (6.0, 7.0),
    "filter": (6.0, 7.0),
    "max-backlog": (12.0, 13.5),
    "receive-many": (6.4, 7.2),
    "round-robin": (12.5, 14.5),
    "nack": (3.2, 4.2),  # with a line of the log, as the next
    "reject": (11.2, 13.2),
    "bundle": (0.1, 0.1),
    "publish": (26.5, 26.5),
    "subscription": (6.7, 7.0),
    "moved": (10.9, 11.9),
    "spark-stage": (3.7, 3.7),
    "spark-commit": (5.6, 6.1),
    "idle": (10.0, 10.0),
}
#: How many messages it counts, and how often.
FEW, ROUNDS = 10, 10


def beyond(version: str, rows: list[Row]) -> Iterator[str]:
    """Yield what is wrong with rows that `make torture` counted."""
    for row in rows:
        case, limit = CASES[row["case"]], LIMITS[row["case"]][version != "v3"]
        if "broke" in row:
            yield f"{case.title}: {row['broke']}"
        elif (each := sum(row["calls"].values()) / row["n"]) > limit:
            calls = ", ".join(f"{call} {count}" for call, count in sorted(row["calls"].items()))
            yield f"{case.title}: {each:.1f} RPCs a {case.unit}, and {limit} are its limit: {calls} for {row['n']}"


def chosen(patterns: str) -> list[str]:
    """Return the cases that patterns name, with a comma between them, and the raw rows that these compare with.

    Raises:
        ValueError: a pattern names none.
    """
    wanted: set[str] = set()
    for pattern in patterns.split(","):
        if not (matching := {key for key in CASES if fnmatchcase(key, pattern)}):
            raise ValueError(f"there is no case {pattern}; there are {', '.join(CASES)}")
        wanted |= matching
    wanted |= {CASES[key].raw for key in wanted} - {""}
    return [key for key in CASES if key in wanted]


def inside(
    disk: Path,
    version: str,
    cases: list[str],
    tree: str,
    *,
    count: int = 100,
    rounds: int = 1,
    deep: int = 10_000,
    rtt: float = 0.0,
    options: str = "",
    trace: bool = False,
) -> list[Row]:
    """Count cases on one version of NFS, and say each row as it comes; return the rows.

    Args:
        disk: the disk that is served.
        version: the version, one of guest.CLIENTS.
        cases: which, by their keys.
        tree: where the packages are unpacked.
        count: messages that a case counts.
        rounds: how often it does; the round with the fewest RPCs is kept.
        deep: how many messages wait in the deep queue.
        rtt: seconds that the net needs for a request and its reply.
        options: more options of the mounts.
        trace: attribute the RPCs to lines.
    """
    a, b = mount(version, "a", options=options), mount(version, "b", options=options)
    _end_grace()
    if rtt:
        _delay(Path(tree), rtt)
    rig = Rig(a, b, disk, Rpcs(), count, rounds, deep, trace)
    Root.create(a / "root")
    running: dict[str, Running] = {}
    rows: list[Row] = []

    def told(key: str, work: Callable[[], Row | None]) -> None:
        """Do a part of a case; say its row where it has one, or why it broke off."""
        try:
            row = work()
        except Exception as error:  # the other cases are as good as before
            traceback.print_exc()
            running.pop(key, None)
            row = {"broke": f"{type(error).__name__}: {error}"}
        if row is not None:
            rows.append({"case": key, **row})
            say(f"row {json.dumps(rows[-1])}")

    for key in cases:
        running[key] = CASES[key].run(rig)
        told(key, partial(next, running[key]))
    time.sleep(SETTLE)
    for key, case in list(running.items()):
        told(key, partial(_least, rig, case))
    return rows


def _least(rig: Rig, case: Running) -> Row:
    """Let a case count, and return the row of its round with the fewest RPCs."""
    rig.found = []
    for _ in case:
        time.sleep(SETTLE)
    return min(rig.found, key=lambda row: sum(row["calls"].values()))


def _end_grace() -> None:
    """Let locks be given at once: nobody has any to reclaim."""
    with suppress(FileNotFoundError):  # there since a lock was possible
        Path("/proc/fs/lockd/nlm_end_grace").write_text("Y")


def _delay(tree: Path, rtt: float) -> None:
    """Let a request and its reply need so many seconds on the net."""
    load(tree, "sch_netem")
    half = f"{rtt / 2 * 1000:.3f}ms"
    add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", half, "limit", "100000"]
    subprocess.run(add, check=True)
