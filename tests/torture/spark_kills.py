"""Kills Spark jobs at random moments, and accounts for every message: `make torture-spark`.

kill_driver.py runs jobs, several at once; whatever they do, they tell in logs. This program kills its processes: the
driver's Python, its Java, single Python workers or all of them, or everything at once. By the log of a job it is proven
in which phase a kill fell: it went by what was told before the kill, and for what dies at once, also by what was told
until it was dead. Then everything is swept, and what lies where is looked at without dropq. The log decides how much of
it must be there: all of each job that told its manifest, and nothing of one that did not begin to write it. A stream is
begun again from its checkpoint until its input is used up.

It ends with a table, and with 1 where a message was lost or doubled or a phase had too few kills.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import IO, NamedTuple

from cluster import command, members
from helpers import files, lying, until

import dropq
from dropq import Root
from dropq.durations import parse_duration
from torture.kill_driver import EFFECT, STREAM_IN, STREAM_OUT, WRITER, Log, Run, offset, stream_of

#: The phases of what sends and of what takes, in their order; the renames begin with the manifest.
WRITING, BEFORE, MIDDLE, AFTER = "writing", "before the manifest", "in the middle of the renames", "after them"
CLAIMING, CLAIMED, WORKING = "claiming", "claimed", "working"
BEFORE_ACKS, MIDDLE_ACKS, AFTER_ACKS = "before the acks", "in the middle of the acks", "after the acks"
SENDING = (WRITING, BEFORE, MIDDLE, AFTER)
PHASES = {
    WRITER: SENDING,
    STREAM_OUT: SENDING,
    STREAM_IN: (CLAIMING, CLAIMED, WORKING, BEFORE_ACKS, MIDDLE_ACKS, AFTER_ACKS),
}
ELSEWHERE = "elsewhere"
#: The phases in which a job, an epoch or a batch has no effect yet, and those in which it has it, or is to have it.
UNDECIDED = (WRITING, BEFORE, CLAIMING, CLAIMED)
DECIDED = (MIDDLE, AFTER, BEFORE_ACKS, MIDDLE_ACKS, AFTER_ACKS)
#: Seconds that a phase takes, about: within them, a kill comes at random.
LENGTH = {
    WRITING: 0.5,
    BEFORE: 0.3,
    MIDDLE: 0.6,
    AFTER: 0.4,
    CLAIMING: 0.4,
    CLAIMED: 0.3,
    WORKING: 2.0,
    BEFORE_ACKS: 0.3,
    MIDDLE_ACKS: 0.4,
    AFTER_ACKS: 0.3,
}
#: What is killed, and how often: within a session, and to end it.
WORKER, WORKERS, DRIVER, JAVA, ALL = "a worker", "all workers", "the driver", "the Java", "all"
WITHIN, ENDING = {WORKER: 19, WORKERS: 1}, {DRIVER: 1, JAVA: 1, ALL: 2}
#: How the command of a worker goes on, and that of the daemons that fork workers.
_WORKER = ["-m", "pyspark"]
#: A lease that ends before a stream is begun again; the usual one does not.
SHORT_LEASE = "6s"
#: Seconds between two looks at a log; that a run may stand still; that what was killed may take to end.
GLANCE, PATIENCE, DYING = 0.01, 240.0, 20.0
#: Runs of a stream in a row that may fail though nothing of theirs was killed: a kill may hit a worker that serves
#: another run by then.
UNPROVOKED = 8
#: What Spark says when a worker did not start within its ten seconds, which is nobody's fault here.
SLOW_START = "Python worker failed to connect back"
#: Runs of a job that may fail by that without a kill in between: a machine is that busy for minutes, not for ever.
SLOW_STARTS = 20
#: How many jobs run at the same time; and how many epochs or batches a stream has.
LANES, BATCHES = 4, 6
#: How often is killed within a session before it is ended, at least and at most.
STRIKES = (6, 14)
#: So many kills before the end of a session, the next one is started.
HEAD_START = 3
#: Lets workers begin quickly: what they need is loaded once, by the daemon that forks them.
PRELOADED = """\
import sys

if "pyspark.daemon" in sys.orig_argv:
    from torture import kill_driver
"""


class Line(NamedTuple):
    """A step that a process told."""

    at: float
    pid: int
    queue: str
    what: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Line:
        """Return what a line of a log tells."""
        at, pid, queue, *words = text.split(" ")
        last = words[-1]
        number = int(last) if last.isdecimal() else 0
        return cls(float(at), int(pid), queue, " ".join(words[:-1] if last.isdecimal() else words), number)


_OF_ONE_FILE = re.compile(r" (staged|renamed) [0-9]+$", re.MULTILINE)


class Tail:
    """Reads a log as it grows; a line counts when its end is there: one across two pages may be seen in two parts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[Line]:
        """Return what was told since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._offset)
            whole, end, _ = log.read().rpartition(b"\n")
        logged = whole + end
        self._offset += len(logged)
        return [Line.parse(text) for text in logged.decode().splitlines()]


# -- phases, by the log ----------------------------------------------------------------------------------------------


class Progress:
    """How far a run has come, by what was told; what a direction makes of it, its subclass says."""

    def __init__(self) -> None:
        self.failed = ""
        self._begun = self._ended = 0.0
        #: Python workers that are at it, and with what.
        self.busy: dict[int, str] = {}

    def feed_all(self, lines: list[Line]) -> int:
        """Take note of lines; return how many they are."""
        for line in lines:
            self.feed(line)
        return len(lines)

    def feed(self, line: Line) -> None:
        """Take note of a line."""
        if line.what == "run begins":
            self._begun, self.failed, self.busy = line.at, "", {}
            self.begin()
        elif line.what.startswith(("run ends", "run fails")):
            self._ended, self.failed = line.at, line.what.removeprefix("run ends").removeprefix("run fails ")
        else:
            self._feed_busy(line)
            self.feed_step(line)

    def ended(self, since: float = 0.0) -> float:
        """Return when the newest run ended, if it began since some moment; 0 where it has not."""
        return self._ended if self._ended >= self._begun >= since else 0.0

    def begin(self) -> None:
        """Forget what is over when a run begins."""

    def feed_step(self, line: Line) -> None:
        """Take note of a step."""

    def phase(self, moment: float) -> str | None:
        """Return the phase of the moment, the time of the newest line or later; None for none that has a name."""
        return None

    def decided(self, moment: float) -> int:
        """Return how many jobs, epochs or batches were decided on at the moment: they are to have their effect."""
        raise NotImplementedError

    def victims(self, phase: str) -> list[int]:
        """Return the workers that do what a phase is about."""
        return [pid for pid, what in self.busy.items() if what in _DOES[phase]]

    def _feed_busy(self, line: Line) -> None:
        what, _, verb = line.what.rpartition(" ")
        if verb == "begins" and what in ("task", "commit", "abort", "read"):
            self.busy[line.pid] = what
        elif verb == "ends" and what in ("task", "commit", "abort", "read"):
            self.busy.pop(line.pid, None)


#: What a worker does that is worth a kill in a phase.
_DOES = {
    WRITING: ("task",),
    BEFORE: ("commit",),
    MIDDLE: ("commit", "abort"),
    AFTER: ("commit", "abort"),
    CLAIMING: ("source",),
    CLAIMED: ("source",),
    WORKING: ("source", "read", "task", "commit"),
    BEFORE_ACKS: ("source",),
    MIDDLE_ACKS: ("source",),
    AFTER_ACKS: ("source",),
}


class Sending(Progress):
    """How far a job has come, or the newest epoch of a stream.

    Args:
        rows: how many messages it sends.
        parts: how many tasks it has.
        sent: how many jobs or epochs were sent before the newest run.
    """

    def __init__(self, rows: int, parts: int, sent: int = 0) -> None:
        super().__init__()
        self._rows = rows
        self._parts = parts
        self._sent = sent
        self.begin()

    def begin(self) -> None:
        self._manifests = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._staged = self._commits = self._aborts = self._begins_manifest = self._has_manifest = False
        self._done: set[int] = set()
        self._renamed = 0

    def feed_step(self, line: Line) -> None:
        match line.what:
            case "task begins" if self._commits:
                self._begin_epoch()
            case "staged":
                self._staged = True
            case "task ends":
                self._done.add(line.number)
            case "commit begins":
                self._commits = True
            case "abort begins":
                self._aborts = True
            case "manifest begins":
                self._begins_manifest = True
            case "manifest":
                self._has_manifest = True
                self._manifests += 1
            case "renamed":
                self._has_manifest = True
                self._renamed += 1

    def phase(self, moment: float) -> str | None:
        if not self._staged or self.ended():
            return None
        if self._has_manifest:
            return MIDDLE if self._renamed < self._rows else AFTER
        if self._begins_manifest or self._aborts:
            return None
        if self._commits:
            return BEFORE
        return WRITING if len(self._done) < self._parts else None

    def decided(self, moment: float) -> int:
        return self._sent + (0 if self.ended() else self._manifests)  # of the run before, _sent tells


class Checkpoint:
    """What Spark has written down about a stream, and when."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[int, int] = {}

    def has_offset(self, batch: int, moment: float) -> bool:
        """Tell whether the offset of a batch of the queue's was logged at a moment."""
        number = self._number(batch)
        return number is not None and self._is_there(f"offsets/{number}", moment)

    def has_commit(self, batch: int, moment: float) -> bool:
        """Tell whether a batch was logged as done at a moment."""
        number = self._number(batch)
        return number is not None and self._is_there(f"commits/{number}", moment)

    def stream(self) -> str:
        """Return what the queue calls the stream."""
        return stream_of(self._folder)

    def offsets(self) -> int:
        """Return how many batches have their offset logged."""
        return sum(name.isdecimal() for name in _names(self._folder / "offsets"))

    def files(self, epochs: int) -> int:
        """Return how many files the first epochs of a stream of files have.

        One each, and more where a query was killed as Spark had listed a file and not yet logged the epoch's offset.
        """
        logged = sorted(filter(str.isdecimal, _names(self._folder / "offsets")), key=int)[:epochs]
        return max(epochs, int(offset(self._folder, logged[-1])["logOffset"]) + 1) if logged else epochs

    def commits(self, moment: float = math.inf) -> int:
        """Return how many batches were logged as done at a moment."""
        return sum(self._is_there(f"commits/{name}", moment) for name in self.committed())

    def committed(self) -> set[str]:
        """Return Spark's numbers of the batches that are logged as done."""
        return set(filter(str.isdecimal, _names(self._folder / "commits")))

    def _number(self, batch: int) -> int | None:
        """Return Spark's number of a batch of the queue's."""
        if batch not in self._offsets:
            for name in _names(self._folder / "offsets"):
                if name.isdecimal() and int(name) not in self._offsets.values():
                    self._offsets[offset(self._folder, name)["batch"]] = int(name)
        return self._offsets.get(batch)

    def _is_there(self, name: str, moment: float) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / name).stat().st_mtime <= moment
        return False


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


class Taking(Progress):
    """How far a stream has come that takes messages from a queue.

    Args:
        queue: the queue.
        checkpoint: the stream's.
    """

    def __init__(self, queue: str, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._queue = queue
        self._checkpoint = checkpoint
        self._sizes: dict[int, int] = {}
        self._acked: Counter[int] = Counter()
        self.begin()

    def begin(self) -> None:
        self._state = ""
        self._batch = self._next = 0

    def feed_step(self, line: Line) -> None:
        if line.queue != self._queue:
            return
        match line.what:
            case "committed":
                self.busy[line.pid] = "source"
                is_known = self._acked[line.number] < self._sizes.get(line.number, 0)
                self._state, self._batch = "settles" if is_known else "", line.number
            case "acked" if self._state == "settles":
                self._acked[self._batch] += 1
            case "settle ends" if self._state == "settles":
                self._state = "settled" if line.number else ""
                self._acked[self._batch] = self._sizes[self._batch]
            case "take begins":
                self._next = line.number
            case "claimed" if self._state in ("", "settled", "claims"):
                self._state, self._batch = "claims", self._next
            case "journal" if self._state == "claims":
                self._state = "journalled"
            case "take ends" if line.number:
                self._state, self._batch, self._sizes[self._next] = "journalled", self._next, line.number
            case "plan begins":
                self.busy[line.pid] = "source"
                self._state, self._batch = "journalled", line.number

    def phase(self, moment: float) -> str | None:
        if self.ended():
            return None
        match self._state:
            case "claims":
                return CLAIMING
            case "journalled":
                return self._by_checkpoint(moment)
            case "settles" if self._acked[self._batch] < self._sizes[self._batch]:
                return MIDDLE_ACKS if self._acked[self._batch] else BEFORE_ACKS
            case "settles" | "settled":
                return AFTER_ACKS
        return None

    def decided(self, moment: float) -> int:
        return self._checkpoint.commits(moment)

    def _by_checkpoint(self, moment: float) -> str:
        if not self._checkpoint.has_offset(self._batch, moment):
            return CLAIMED
        return BEFORE_ACKS if self._checkpoint.has_commit(self._batch, moment) else WORKING


# -- what is killed ----------------------------------------------------------------------------------------------------


class Kill(NamedTuple):
    """A kill: of what, when it began, and when nothing of it lived any more; the process where it was a single one."""

    kind: str
    at: float
    dead: float
    pid: int = 0


class Proof(NamedTuple):
    """What the log says of a kill: of what, in which phase, and how many were decided on before it."""

    kind: str
    phase: str
    decided: int

    def has_all(self, effects: int) -> bool:
        """Tell whether what the kill fell into has its effect, where so many jobs, epochs or batches have theirs."""
        return effects >= max(1, self.decided + (self.phase in (*UNDECIDED, WORKING)))

    @property
    def is_last(self) -> bool:
        """Whether nothing lived any more that could decide on what the kill fell into."""
        if self.kind == WORKER:
            return self.phase in (BEFORE, CLAIMING)  # what a worker does there, no other does after it
        return self.kind == ALL and self.phase in UNDECIDED


class Session:
    """A driver that runs, with all that it started.

    Args:
        folder: the folder that it works in.
        number: which one it is, from 1.
        strikes: how often is killed within it.
    """

    def __init__(self, folder: Path, number: int, strikes: int) -> None:
        self.number = number
        self.strikes = strikes
        self.kills: list[Kill] = []
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        path = os.pathsep.join(map(str, (folder / "site", Path(dropq.__file__).parents[1], Path(__file__).parents[1])))
        with (folder / "logs" / f"session-{number}.out").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torture.kill_driver", str(folder)],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder / "tmp")},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start(self, run: Run) -> None:
        """Ask for a run; a session that is over does not do it."""
        with self._lock, suppress(BrokenPipeError, ValueError):
            self._input.write(json.dumps(asdict(run)).encode() + b"\n")
            self._input.flush()

    def kill_worker(self, pid: int) -> Kill | None:
        """Kill one Python worker; None where it is none any more."""
        with self._lock:
            if self.is_over.is_set() or pid not in self._workers():
                return None
            self.strikes -= 1
            return self._kill(WORKER, [pid], pid)

    def kill(self, kind: str) -> None:
        """Kill what a kind is about, and see to it that what cannot live without it ends."""
        with self._lock:
            if self.is_over.is_set():
                return
            self.strikes -= 1
            self.kills.append(self._kill(kind, self._of_kind(kind)))
            if kind in ENDING:
                self._end()

    def end(self) -> None:
        """Kill all that is left."""
        with self._lock:
            if not self.is_over.is_set():
                self._kill(ALL, self._members())
                self._end()

    def _end(self) -> None:
        with suppress(OSError):
            self._input.close()
        with suppress(AssertionError):
            until(lambda: not self._members(), "the end of what was not killed", timeout=DYING)
        if self._members():
            self._kill(ALL, self._members())
        self._process.wait()
        self.is_over.set()

    def _kill(self, kind: str, pids: list[int], pid: int = 0) -> Kill:
        began = time.time()

        def kill() -> bool:
            for each in pids:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            if kind == ALL:
                pids[:] = self._members()  # what was being forked
                return not pids
            return not set(pids).intersection(self._members())

        until(kill, f"the end of {kind} in session {self.number}", timeout=PATIENCE)
        return Kill(kind, began, time.time(), pid)

    def _of_kind(self, kind: str) -> list[int]:
        if kind == DRIVER:
            return [self._process.pid]
        if kind == JAVA:
            return [pid for pid in self._members() if "org.apache.spark.deploy.SparkSubmit" in command(pid)]
        if kind == WORKERS:
            return self._workers()
        return self._members()

    def _workers(self) -> list[int]:
        return [pid for pid in self._members() if [word.partition(".")[0] for word in command(pid)[1:3]] == _WORKER]

    def _members(self) -> list[int]:
        return members(self._process.pid)

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """What became of a job's messages: how many of them were lost or doubled, and what else is not as it should be."""

    lost: int = 0
    doubled: int = 0
    faults: list[str] = field(default_factory=list)

    def compare(self, found: Iterable[str], wanted: Iterable[str]) -> None:
        """Count what is missing, and what is there too often."""
        there, due = Counter(found), Counter(wanted)
        self.lost += (due - there).total()
        self.doubled += (there - due).total()

    def expect(self, what: str, found: object, wanted: object) -> None:
        """Note what is not as it should be."""
        if found != wanted:
            self.faults.append(f"{what}: {found}, not {wanted}")

    def expect_within(self, what: str, found: int, least: int, most: int) -> None:
        """Note what are fewer or more than there may be."""
        if not least <= found <= most:
            self.faults.append(f"{what}: {found}, not {least} to {most}")

    @property
    def is_good(self) -> bool:
        """Whether all is as it should be."""
        return not (self.lost or self.doubled or self.faults)


class Job:
    """A job of the writer, or a stream, that is begun again until it is finished.

    Args:
        folder: the folder that all lies in.
        run: what a driver is asked to do.
    """

    #: Kills that are aimed at one job.
    most_kills = 2

    def __init__(self, folder: Path, run: Run) -> None:
        self.run = run
        self.log = folder / "logs" / f"{run.name}.log"
        self.is_saved = False
        self.killed_in = ELSEWHERE
        #: The jobs, epochs or batches that had their effect when it was last looked at.
        self.effects = 0
        self.folder = folder
        self.root = Root(folder / "root")

    def prepare(self, durability: str) -> None:
        """Make what it works on."""
        self.root.create_queue(self.run.name, durability=durability, redelivery_delay=0)

    def progress(self) -> Progress:
        """Return what is to follow its log from the beginning."""
        return Sending(self.run.rows, self.run.parts, self.effects)

    @property
    def is_finished(self) -> bool:
        """Whether it is not to be begun again."""
        return self.is_saved

    def sweep(self) -> None:
        """Bring its queues in order, as somebody does after a crash."""
        self.root.queue(self.run.name).sweep(jobs_older_than=0)

    def check(self) -> Account:
        """Look at what lies where, and keep how many jobs, epochs or batches have their effect."""
        raise NotImplementedError

    def committed(self, queue: str) -> tuple[int, int]:
        """Return how many jobs have sent to a queue, by the log: at least, and at most."""
        counts = Counter(line.what for line in Tail(self.log).lines() if line.queue == queue)
        return counts["manifest"], counts["manifest begins"]

    def bodies(self, queue: str, *states: str) -> list[str]:
        """Return the bodies that lie in some states of a queue."""
        lie = lying(self.folder / "root" / queue)
        return [body.decode() for state in states for body in lie.get(state, [])]

    def expect_only(self, account: Account, queue: str, *states: str) -> None:
        """Note messages in other states, and anything in working/."""
        folder = self.folder / "root" / queue
        account.expect(f"working/ of {queue}", os.listdir(folder / "working"), [])
        others = {state: len(bodies) for state, bodies in lying(folder).items() if state not in states}
        account.expect(f"other states of {queue}", others, {})


class WriterJob(Job):
    """A job of the writer: all of its messages are sent or none; one with an id is repeated until it says so."""

    @property
    def is_finished(self) -> bool:
        return self.is_saved or not self.run.has_id

    def check(self) -> Account:
        account = Account()
        found = self.bodies(self.run.name, "target")
        least, most = self.committed(self.run.name)
        if found or least or self.is_saved:
            account.compare(found, (f"{self.run.name} {number}" for number in range(self.run.rows)))
        self.effects = int(bool(found))
        account.expect_within("jobs that are sent", self.effects, least, most)
        self.expect_only(account, self.run.name, "target")
        return account


@dataclass
class Later:
    """A clock that is ahead by some hours."""

    hours: int = 1

    def now_ms(self) -> int:
        return int((time.time() + self.hours * 3600) * 1000)


class Stream(Job):
    """A stream that is begun again on its checkpoint until its input is used up."""

    most_kills = 12

    def __init__(self, folder: Path, run: Run) -> None:
        super().__init__(folder, run)
        self.checkpoint = Checkpoint(folder / "checkpoints" / run.name)


class StreamOut(Stream):
    """A stream of files into a queue: each is an epoch, all of whose messages are sent or none."""

    def prepare(self, durability: str) -> None:
        super().prepare(durability)
        inputs = self.folder / "input" / self.run.name
        inputs.mkdir()
        for epoch in range(self.run.batches):
            (inputs / f"{epoch}.txt").write_text("".join(f"{body}\n" for body in self._epoch(str(epoch))))

    def check(self) -> Account:
        account = Account()
        found = grouped(self.bodies(self.run.name, "target"))
        for epoch, bodies in found.items():
            account.compare(bodies, self._epoch(epoch))
        self.effects = len(found)
        least, most = map(self.checkpoint.files, self.committed(self.run.name))
        least = self.run.batches if self.is_saved else least
        account.lost += self.run.rows * max(0, least - self.effects)
        account.expect_within("epochs that are sent", self.effects, least, most)
        self.expect_only(account, self.run.name, "target")
        return account

    def _epoch(self, epoch: str) -> list[str]:
        return [f"{epoch} {self.run.name} {number}" for number in range(self.run.rows)]


class StreamIn(Stream):
    """A stream out of a queue: each batch has its effect once, and is acknowledged then; bad messages are rejected."""

    def __init__(self, folder: Path, run: Run) -> None:
        super().__init__(folder, run)
        self._effect = EFFECT.format(run.name)
        self._before: dict[str, list[str]] = {}
        self._good, self._values, self._bad = run.bodies()
        self._streams = folder / "root" / run.name / ".dropq" / "streams"
        self._processing = folder / "root" / run.name / "processing"
        self._delayed = folder / "root" / run.name / ".dropq" / "delayed"

    def prepare(self, durability: str) -> None:
        super().prepare(durability)
        if self.run.to_queue:
            self.root.create_queue(self._effect, durability=durability, redelivery_delay=0)
        messages = [*self._good, *self._bad]
        random.Random(self.run.name).shuffle(messages)
        self.root.queue(self.run.name).send_many(messages)

    def progress(self) -> Progress:
        return Taking(self.run.name, self.checkpoint)

    def sweep(self) -> None:
        self._let_leases_end()
        super().sweep()
        until(self._is_all_due, "the end of the wait after a death", timeout=PATIENCE)
        if self.run.to_queue:
            self.root.queue(self._effect).sweep(jobs_older_than=0)
        if self.is_saved and len(_names(self._streams)) > 1 and os.listdir(self._processing):
            # A run that is killed before its first offset leaves claims that no other goes on with: they return.
            for hours in (1, 2):  # they wait after the first of these sweeps, as their holder counts as dead
                Root(self.folder / "root", clock=Later(hours)).queue(self.run.name).sweep()
            self.is_saved = False

    def _is_all_due(self) -> bool:
        """Deliver what has waited long enough after a death; return whether nothing waits any more."""
        self.root.queue(self.run.name).sweep()
        return not _names(self._delayed)

    def _let_leases_end(self) -> None:
        """Wait where the stream has a short lease, which is for the sweep to return what it held."""
        if self.run.lease == SHORT_LEASE and not self.is_saved:
            ends = time.monotonic() + parse_duration(SHORT_LEASE)
            until(lambda: time.monotonic() > ends, "the end of the leases")

    def check(self) -> Account:
        account = Account()
        groups = grouped(self._effects())
        for batch, bodies in self._before.items():  # what has its effect keeps it, and gets no other
            account.expect(f"the effect of batch {batch}", groups.get(batch), bodies)
        self._before = groups
        found = [body.partition(" ")[2] for bodies in groups.values() for body in bodies]
        account.compare(found, self._values if self.is_saved else set(found))
        # A batch that has bad messages alone has no effect.
        without = self.checkpoint.committed() - groups.keys() if self._bad else set()
        self.effects = len(groups) + len(without)
        known = self.checkpoint.commits(), self.checkpoint.offsets()
        account.expect_within("batches that have their effect", self.effects, *known)
        if self.run.to_queue:
            account.expect_within("batches that are sent on", len(groups), *self.committed(self._effect))
        self._check_input(account)
        return account

    def _effects(self) -> list[str]:
        """Return what was sent on, or kept: each body after the number of its batch."""
        if self.run.to_queue:
            return self.bodies(self._effect, "target")
        kept = files(self.folder / "effects" / self.run.name).values()
        return [line for content in kept for line in content.decode().splitlines()]

    def _check_input(self, account: Account) -> None:
        """See that every message is in one state, in the end acknowledged or rejected."""
        states = ("processed",) if self.is_saved else ("processed", "processing", "target")
        rejected = self.bodies(self.run.name, "error")
        account.compare(rejected, self._bad if self.is_saved else set(rejected).intersection(self._bad))
        others = Counter([*self._good, *self._bad]) - Counter(rejected)
        account.compare(self.bodies(self.run.name, *states), others.elements())
        self.expect_only(account, self.run.name, *states, "error")
        if self.run.to_queue:
            self.expect_only(account, self._effect, "target")
        if self.is_saved:
            folder = self._streams / self.checkpoint.stream()
            account.expect("batches written down", [path.name for path in folder.glob("*.json")], [])
            account.expect("bad bodies written down", [path.name for path in folder.glob("bad-*")], [])


def grouped(bodies: Iterable[str]) -> dict[str, list[str]]:
    """Return bodies by their first word, the batch or epoch that they came by."""
    groups: dict[str, list[str]] = defaultdict(list)
    for body in bodies:
        groups[body.partition(" ")[0]].append(body)
    return {group: sorted(bodies) for group, bodies in groups.items()}


def make_job(folder: Path, direction: str, name: str, chance: random.Random, *, has_bad: bool = False) -> Job:
    """Make a job of a direction, a stream of several batches, of a size and kind as chance has it.

    Args:
        folder: the folder that all lies in.
        direction: the direction.
        name: its name.
        chance: what the random choices come from.
        has_bad: whether a stream out of a queue meets bad messages in any case.
    """
    if direction == WRITER:
        rows, parts = chance.choice([(60, 3), (150, 2), (240, 4), (1500, 1)])
        return WriterJob(folder, Run(WRITER, name, rows, parts, has_id=chance.random() < 0.3))
    available_now = chance.random() < 0.7
    if direction == STREAM_OUT:
        rows = chance.randrange(20, 120)
        return StreamOut(folder, Run(STREAM_OUT, name, rows, 2, BATCHES, available_now=available_now))
    rows, to_queue = chance.randrange(10, 60), chance.random() < 0.3
    bad = 4 if has_bad or chance.random() < 0.5 else 0
    run = Run(STREAM_IN, name, rows, 1, BATCHES, available_now=available_now, to_queue=to_queue, bad=bad)
    return StreamIn(folder, replace(run, lease=SHORT_LEASE) if chance.random() < 0.1 else run)


# -- the torture -------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What the table tells of a phase: kills that were proven, and what became of the jobs that they fell into."""

    kills: int = 0
    all: int = 0
    none: int = 0
    #: Of the jobs all, those that had no effect when they were killed, and nothing lived on: there must be none.
    revived: int = 0
    lost: int = 0
    doubled: int = 0


class Torture:
    """Kills until every phase had its share.

    Args:
        folder: an empty folder to work in.
        seed: what the random choices come from.
        proven: the kills that each phase must have.
        seconds: the time after which nothing new is begun.
        phases: the phases, by direction.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        proven: int,
        seconds: float = 3600,
        phases: Mapping[str, Sequence[str]] = PHASES,
    ) -> None:
        self.table = {(each, phase): Row() for each in phases for phase in (*PHASES[each], ELSEWHERE)}
        self.faults: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._folder = folder
        self._seed = seed
        self._proven = proven
        self._phases = phases
        self._ends_at = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._started = 0
        self._jobs: Counter[str] = Counter()
        for name in ("logs", "input", "checkpoints", "effects", "site", "tmp"):
            (folder / name).mkdir()
        (folder / "site" / "sitecustomize.py").write_text(PRELOADED)
        Root.create(folder / "root")

    def run(self) -> None:
        """Torture jobs in several lanes at once; return when all of them are through."""
        lanes = [threading.Thread(target=self._lane, args=(number,), daemon=True) for number in range(LANES)]
        try:
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        finally:
            self._ends_at = 0
            for session in self._sessions:
                session.end()

    # -- what the lanes ask for --------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return a session that was not killed; where many kills are to come, the next one is started meanwhile."""
        with self._lock:
            self._sessions = [session for session in self._sessions if not session.is_over.is_set()]
            if not self._sessions or self._wants_another:
                self._start_session()
            return self._sessions[0]

    @property
    def _wants_another(self) -> bool:
        return len(self._sessions) == 1 and self._sessions[0].strikes < HEAD_START and self.lacking > 2 * LANES

    def _start_session(self) -> None:
        self._started += 1
        print(f"session {self._started}; {self.lacking} kills to go", flush=True)
        strikes = random.Random(f"{self._seed} {self._started}").randint(*STRIKES)
        self._sessions.append(Session(self._folder, self._started, strikes))

    def aim(self, direction: str, chance: random.Random) -> str | None:
        """Choose a phase that lacks kills."""
        weights = [self._lacks(direction, phase) for phase in PHASES[direction]]
        return None if self.is_over or not any(weights) else chance.choices(PHASES[direction], weights)[0]

    def next_job(self, chance: random.Random) -> Job | None:
        """Make a job of a direction that lacks kills."""
        weights = {each: sum(self._lacks(each, phase) for phase in PHASES[each]) for each, _ in self.table}
        if self.is_over or not any(weights.values()):
            return None
        (direction,) = chance.choices(list(weights), list(weights.values()))
        with self._lock:
            self._jobs[direction] += 1
            is_first = self._jobs[direction] == 1
            name = f"{direction.replace('-', '')}{self._jobs[direction]}"
        job = make_job(self._folder, direction, name, chance, has_bad=is_first)
        job.prepare(chance.choice(["none", "none", "file", "full"]))
        return job

    def jobs(self, direction: str) -> int:
        """Return how many jobs, or streams, of a direction were begun."""
        return self._jobs[direction]

    @property
    def is_over(self) -> bool:
        """Whether nothing new is begun."""
        return time.monotonic() > self._ends_at or bool(self.faults)

    @property
    def lacking(self) -> int:
        """How many kills are still to be made."""
        return sum(self._lacks(direction, phase) for direction, phase in self.table)

    def _lacks(self, direction: str, phase: str) -> int:
        wanted = self._proven if phase in self._phases[direction] else 0
        return max(0, wanted - self.table[direction, phase].kills)

    def _lane(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        try:
            while job := self.next_job(chance):
                Lane(self, job, chance).run()
        except BaseException:
            self.fault(f"lane {number}: {traceback.format_exc()}")

    # -- what they found ---------------------------------------------------------------------------------------------

    def count(self, job: Job, proof: Proof) -> None:
        """Count a kill."""
        with self._lock:
            self.table[job.run.direction, proof.phase].kills += 1
            self.kinds[proof.kind] += 1

    def judge(self, job: Job, proofs: list[Proof], account: Account) -> None:
        """Note what became of what each of these kills of a job fell into."""
        with self._lock:
            for proof in proofs:
                row, has_all = self.table[job.run.direction, proof.phase], proof.has_all(job.effects)
                row.all += has_all
                row.none += not has_all
                row.revived += has_all and proof.is_last
            blamed = self.table[job.run.direction, job.killed_in]
            blamed.lost += account.lost
            blamed.doubled += account.doubled
        if not account.is_good:
            summary = [f"{account.lost} lost, {account.doubled} doubled", *account.faults]
            self.fault(f"{job.run}, last killed in {job.killed_in}: {'; '.join(summary)}\n{newest(job.log)}")

    def fault(self, what: str) -> None:
        """Note what must not be; nothing new is begun."""
        with self._lock:
            self.faults.append(what)

    def report(self) -> Iterator[str]:
        """Yield the table."""
        columns = "{:11} {:27} {:>6} {:>9} {:>9} {:>7} {:>6} {:>8}"
        yield columns.format("direction", "phase", "kills", "jobs all", "jobs none", "revived", "lost", "doubled")
        for (direction, phase), row in self.table.items():
            yield columns.format(direction, phase, *astuple(row))
        killed = ", ".join(f"{kind} {times}" for kind, times in self.kinds.most_common())
        yield f"{self.kinds.total()} kills in {self._started} sessions and {self._jobs.total()} jobs, of {killed}"


def newest(log: Path, lines: int = 80) -> str:
    """Return the end of a log, without the single files that were staged and renamed."""
    written = log.read_text().splitlines(keepends=True) if log.exists() else []
    return "".join([line for line in written if not _OF_ONE_FILE.search(line)][-lines:])


class Lane:
    """Sees one job through all of its runs.

    Args:
        torture: what the job is part of.
        job: the job.
        chance: what the random choices come from.
    """

    def __init__(self, torture: Torture, job: Job, chance: random.Random) -> None:
        self._torture = torture
        self._job = job
        self._chance = chance
        self._kills = 0
        self._is_slow_start = False

    def run(self) -> None:
        """Begin the job, and begin it again, until it is finished; look at what is there after each run."""
        unprovoked = slow = 0
        while unprovoked <= UNPROVOKED and slow <= SLOW_STARTS:
            proofs = self._run_once()
            self._job.killed_in = proofs[-1].phase if proofs else self._job.killed_in
            self._job.sweep()
            account = self._job.check()
            self._torture.judge(self._job, proofs, account)
            if self._job.is_finished or not account.is_good:
                return
            if proofs:
                unprovoked = slow = 0
            elif self._is_slow_start:
                slow += 1
            else:
                unprovoked += 1
        summary = f"{unprovoked} times, and {slow} times as its workers start too slowly"
        self._torture.fault(f"{self._job.run} fails by itself: {summary}\n{newest(self._job.log)}")

    def _run_once(self) -> list[Proof]:
        """Run the job once, and kill; return what is proven of the kills."""
        session, began = self._torture.session(), time.time()
        tail, progress = Tail(self._job.log), self._job.progress()
        progress.feed_all(tail.lines())
        session.start(self._job.run)
        own = self._follow(session, tail, progress, began)
        lines, ended = Tail(self._job.log).lines(), progress.ended(began)
        self._job.is_saved = bool(ended) and not progress.failed
        self._is_slow_start = SLOW_START in progress.failed
        wide = [kill for kill in session.kills if began <= kill.at <= (ended or kill.at)]
        proofs = [self._prove(kill, lines) for kill in sorted([*own, *wide], key=lambda kill: kill.at)]
        if not ended:
            Log(str(self._job.log), self._job.run.name)("run fails killed")
        return proofs

    def _follow(self, session: Session, tail: Tail, progress: Progress, began: float) -> list[Kill]:
        """Follow the run to its end, and kill where it is aimed at; return the kills of single workers."""
        kills: list[Kill] = []
        aim, stands_since = self._aim(), time.monotonic()
        while not progress.ended(began) and not session.is_over.is_set():
            if progress.feed_all(tail.lines()):
                stands_since = time.monotonic()
            if time.monotonic() > stands_since + PATIENCE:
                raise AssertionError(f"{self._job.run} stands still:\n{newest(self._job.log)}")
            if aim and progress.phase(time.time()) == aim:
                session.is_over.wait(self._chance.uniform(0, LENGTH[aim]))
                progress.feed_all(tail.lines())
                kills += self._strike(session, progress.victims(aim))
                aim = self._aim()
            session.is_over.wait(GLANCE)
        progress.feed_all(tail.lines())
        return kills

    def _aim(self) -> str | None:
        if self._kills >= self._job.most_kills:
            return None
        return self._torture.aim(self._job.run.direction, self._chance)

    def _strike(self, session: Session, victims: list[int]) -> list[Kill]:
        """Kill something; return the kill of a single worker."""
        kinds = WITHIN if session.strikes > 0 else ENDING
        (kind,) = self._chance.choices(list(kinds), list(kinds.values()))
        self._kills += 1
        if kind != WORKER:
            session.kill(kind)
            return []
        kill = session.kill_worker(self._chance.choice(victims)) if victims else None
        return [kill] if kill else []

    def _prove(self, kill: Kill, lines: list[Line]) -> Proof:
        """Find the phase that a kill fell in, and count it.

        It is that of the moment before the kill, and for what died then and there, still that when it was dead.
        """
        progress = self._job.progress()
        progress.feed_all([line for line in lines if line.at <= kill.at])
        before = self._phase(kill, progress, kill.at)
        after = before
        if kind_dies_at_once := kill.kind in (WORKER, ALL):
            until_then = [line for line in lines if line.at <= (kill.dead if kill.pid in (0, line.pid) else kill.at)]
            later = self._job.progress()
            later.feed_all(until_then)
            after = self._phase(kill, later, kill.dead)
        phase = before if before and (before == after or not kind_dies_at_once) else ELSEWHERE
        proof = Proof(kill.kind, phase, progress.decided(kill.at))
        self._torture.count(self._job, proof)
        return proof

    def _phase(self, kill: Kill, progress: Progress, moment: float) -> str | None:
        phase = progress.phase(moment)
        return phase if phase and (not kill.pid or kill.pid in progress.victims(phase)) else None


# -- the program -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Torture as the command line says; return the program's status."""
    parser = argparse.ArgumentParser(description="Kill Spark jobs at random moments, and account for every message.")
    parser.add_argument("--proven", type=int, default=10, help="kills that each phase must have (10)")
    parser.add_argument("--seconds", type=float, default=3600, help="after so long, nothing new is begun (3600)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all choices")
    parser.add_argument("--only", choices=sorted(PHASES), help="kill only these")
    given = parser.parse_args()
    phases = {given.only: PHASES[given.only]} if given.only else PHASES
    print(f"seed {given.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="dropq-kills-"))
    began = time.monotonic()
    torture = Torture(folder, seed=given.seed, proven=given.proven, seconds=given.seconds, phases=phases)
    try:
        torture.run()
    finally:
        print("\n".join([*torture.report(), f"{time.monotonic() - began:.0f} seconds"]), flush=True)
        if torture.faults:
            print("\n\n".join([*torture.faults, f"All of it lies in {folder}"]))
        else:
            shutil.rmtree(folder)
    return 1 if torture.faults or torture.lacking else 0


if __name__ == "__main__":
    sys.exit(main())
