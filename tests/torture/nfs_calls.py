"""What a message costs over NFS, in RPCs: the cases, which run inside a guest with two clients of a real server.

`make bench-nfs` counts all of them, and `make torture` counts the main ones, of ten messages each; see uml.py. A case
is a generator: it prepares its queues until its first yield, then the folders settle, and the rest is counted. What a
consumer pays once, its opening and its first listing, is left out where nothing else is said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
#: Seconds that anything may take that one waits for.
PATIENCE = 60

#: A row: of which case, and what was found.
Row = dict[str, Any]
Running = Iterator[None]


@dataclass
class Rig:
    """Two clients of one server, by the folder that each sees, and the same folder on the server's own disk.

    Attributes:
        count: how many messages a case counts.
        rounds: how often it counts them; the round with the fewest RPCs is kept.
        trace: attribute the RPCs to lines, and count in one process.
    """

    a: Path
    b: Path
    here: Path
    rpcs: Rpcs
    count: int
    rounds: int = 1
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
        queue = self.root(folder or self.a).queue(name)
        assert queue.context
        return queue

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

    def command(self, *arguments: str) -> None:
        """Run a command of dropq to its end, in a process of its own where nothing is traced."""
        run = partial(_command, self.root(self.a).path, arguments)
        if not self.trace:
            assert ended(fork(run, longest=0, out=Path(os.devnull))) == 0, f"dropq {' '.join(arguments)} failed"
            return
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            run()


def _command(root: Path, arguments: Sequence[str]) -> None:
    """Be the command `dropq` with these arguments."""
    os.environ["DROPQ_ROOT"] = str(root)
    sys.argv = ["dropq", *arguments]
    with suppress(SystemExit):
        main()


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


def raw_receive(rig: Rig) -> Running:
    _, target, processing, processed = raw_folders(rig)
    here = rig.here / Path(target).relative_to(rig.a)
    for number in range(rig.enough):
        (here / f"m{number:06}").write_bytes(BODY)
    yield
    waiting = iter(os.listdir(target))
    for _ in rig.messages():
        raw_take_one(target, processing, processed, next(waiting))


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


# -- the cases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of the table: what it is called there, what does it, and the row of system calls that it compares with."""

    title: str
    run: Callable[[Rig], Running]
    raw: str = ""
    #: What the RPCs are counted for.
    unit: str = "message"


CASES = {
    "raw-send": Case("raw send", raw_send),
    "raw-receive": Case("raw receive", raw_receive),
    "send": Case("send, `none`", send, "raw-send"),
    "send-full": Case("send, `full`", partial(send, durability="full"), "raw-send"),
    "send-many": Case("`send_many`, `none`", send_many, "raw-send"),
    "send-many-full": Case("`send_many`, `full`", partial(send_many, durability="full"), "raw-send"),
    "receive": Case("receive, body, ack, `none`", receive, "raw-receive"),
    "receive-full": Case("receive, body, ack, `full`", partial(receive, durability="full"), "raw-receive"),
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
}


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
        rtt: seconds that the net needs for a request and its reply.
        options: more options of the mounts.
        trace: attribute the RPCs to lines.
    """
    a, b = mount(version, "a", options=options), mount(version, "b", options=options)
    _end_grace()
    if rtt:
        _delay(Path(tree), rtt)
    rig = Rig(a, b, disk, Rpcs(), count, rounds, trace)
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
