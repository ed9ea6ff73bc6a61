"""Measure records beside raw loops, SQLite and Redis: 1 KiB each, a thousand in a bundle, a transaction or a pipeline.

In each round all loops of a place run one after the other, in an order that changes, and what counts are the ratios
within a round. One process sends all, then takes and settles all. Loops make different numbers of records, as a file
for each takes long: rates are compared. Two loops of one comparison make the same syncs, or, of SQLite and Redis, those
that promise the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.queues import SimpleQueue
from typing import IO, Any, ClassVar, NamedTuple
from unittest import mock

from drain import peak_kb
from peers import BULK, Dropq, DropqFull, Peer, Raw, RawFull, Redis, sync_folders
from runs import SIZE, Run, body_of, one_and_one

import dropq
from bench import scratch, tried
from dropq.records.record_settlement import RecordSettlement

#: Bundles that each of several processes could take.
BUNDLES = 1000
#: Threads that wait for what they sent, and how many records all of them send.
THREADS, AWAITED = 64, 6400
#: Seconds between two lines that a program follows, and for which a consumer waits for them.
GAPS, LIMIT = (0.001, 0.04), 30
#: Seconds for which a process works at each MiB of a large bundle; so it makes several checkpoints.
PACE = 0.4
#: Records after which it pauses, to keep that pace.
PAUSED = 64

Row = dict[str, Any]


# -- loops -------------------------------------------------------------------------------------------------------------


class RawBundles(Raw):
    """The raw loop, of files that have a thousand lines each."""

    name = "raw loop of bundles"

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        super().put_all(b"\n".join([*batch, b""]) for batch in iter(lambda: list(itertools.islice(several, BULK)), []))

    def take_all(self) -> Iterator[bytes]:
        rename, processed = os.rename, self.processed
        for name, held in self.claims():
            with open(held, "rb", buffering=0) as file:
                body = file.readall()
            yield from body[:-1].split(b"\n")
            rename(held, f"{processed}/{name}")
            if self.syncs_folders:
                sync_folders(processed, self.processing)

    @classmethod
    def settled(cls, folder: str) -> int:
        return super().settled(folder) * BULK


class RawBundlesFull(RawBundles):
    """The same with the syncs of `full`: the file, and the four folders that renames change."""

    name = "raw loop of bundles, all synced"
    syncs_file = syncs_folders = True


class Records(Dropq):
    """Write records; take each, read it, and settle it by itself."""

    name = "records, none"
    #: One of so many records is rejected; 0 for none.
    rejects: ClassVar[int] = 0

    def put_all(self, bodies: Iterable[bytes]) -> None:
        with self.queue.record_writer("text") as out:
            for body in bodies:
                out.write(body)

    def take_all(self) -> Iterator[bytes]:
        rejects = self.rejects
        for record in self.subscribed().records(timeout=0):
            if rejects and record.number % rejects == 0:
                record.reject("it was to be rejected")
            else:
                record.ack()
            yield record.data

    @classmethod
    def settled(cls, folder: str) -> int:
        """Return how many records lie settled: none if not each one that was rejected is in error/."""
        records = super().settled(folder) * BULK
        rejected = records // cls.rejects if cls.rejects else 0
        return records if len(os.listdir(f"{folder}/root/q/error")) == rejected else 0


class RecordsFull(Records):
    """The same, bodies and folders synced."""

    name = "records, full"
    options: ClassVar[dict[str, Any]] = {"durability": "full"}


class RecordsOneInThousand(RecordsFull):
    """The same, with a record in each bundle that is rejected."""

    name = "records, full, one in 1,000 rejected"
    rejects = 1000


class RecordsOneInHundred(RecordsFull):
    """The same, with ten."""

    name = "records, full, one in 100 rejected"
    rejects = 100


class Lines(Records):
    """Send what is a sequence of lines already, and take it by records."""

    name = "records, none, sent as lines"

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        while batch := list(itertools.islice(several, BULK)):
            self.queue.send(b"\n".join([*batch, b""]), type="text")


class LinesFull(Lines):
    """The same, bodies and folders synced."""

    name = "records, full, sent as lines"
    options: ClassVar[dict[str, Any]] = {"durability": "full"}


class Sqlite(Peer):
    """A table in SQLite, in which a thousand rows are inserted, marked as taken, and settled each, in a transaction."""

    name = "SQLite, not synced"
    synchronous: ClassVar[str] = "OFF"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        import sqlite3

        self.base = sqlite3.connect(f"{folder}/base")
        self.base.execute("PRAGMA journal_mode = WAL")
        self.base.execute(f"PRAGMA synchronous = {self.synchronous}")
        self.base.execute(
            "CREATE TABLE IF NOT EXISTS q (id INTEGER PRIMARY KEY, body BLOB, state INT DEFAULT 0, taken REAL)"
        )
        self.base.execute("CREATE INDEX IF NOT EXISTS waiting ON q (id) WHERE state = 0")

    @classmethod
    def settled(cls, folder: str) -> int:
        queue = cls(folder)
        [(count,)] = queue.base.execute("SELECT count(*) FROM q WHERE state = 2")
        queue.close()
        return int(count)

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        while batch := list(itertools.islice(several, BULK)):
            with self.base:
                self.base.executemany("INSERT INTO q (body) VALUES (?)", [(body,) for body in batch])

    def take_all(self) -> Iterator[bytes]:
        some = f"SELECT id FROM q WHERE state = 0 ORDER BY id LIMIT {BULK}"
        take = f"UPDATE q SET state = 1, taken = ? WHERE id IN ({some}) RETURNING id, body"
        while True:
            with self.base:
                taken = self.base.execute(take, (time.time(),)).fetchall()
            if not taken:
                return
            yield from (body for _, body in taken)
            with self.base:
                self.base.executemany("UPDATE q SET state = 2 WHERE id = ?", [(number,) for number, _ in taken])

    def close(self) -> None:
        self.base.close()


class SqliteFull(Sqlite):
    """The same, synced at each commit."""

    name = "SQLite, synced at each commit"
    synchronous = "FULL"


class RedisStreams(Redis):
    """A stream of Redis, whose log is synced each second: a pipeline of XADD, XREADGROUP, XACK."""

    name = "Redis streams, synced each second"

    @classmethod
    def make(cls, folder: str) -> None:
        super().make(folder)
        queue = cls(folder)
        queue.queue.xgroup_create("q", "g", mkstream=True)
        queue.close()

    @classmethod
    def settled(cls, folder: str) -> int:
        queue = cls(folder)
        left = int(queue.queue.xpending("q", "g")["pending"])
        count = int(queue.queue.xlen("q"))
        queue.close()
        return count - left

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        while batch := list(itertools.islice(several, BULK)):
            pipeline = self.queue.pipeline(transaction=False)
            for body in batch:
                pipeline.xadd("q", {"b": body})
            pipeline.execute()

    def take_all(self) -> Iterator[bytes]:
        while found := self.queue.xreadgroup("g", "c", {"q": ">"}, count=BULK):
            [(_, taken)] = found
            yield from (fields[b"b"] for _, fields in taken)
            self.queue.xack("q", "g", *(number for number, _ in taken))


class RedisStreamsAlways(RedisStreams):
    """The same, its log synced before each answer."""

    name = "Redis streams, synced each time"
    syncs = "always"


class RedisLists(Redis):
    """A list of Redis, whose log is synced each second: RPUSH and LPOP of a thousand; what is taken is gone."""

    name = "Redis lists, synced each second"

    def put_all(self, bodies: Iterable[bytes]) -> None:
        several = iter(bodies)
        while batch := list(itertools.islice(several, BULK)):
            self.queue.rpush("q", *batch)

    def take_all(self) -> Iterator[bytes]:
        while taken := self.queue.lpop("q", BULK):
            yield from taken


class RedisListsAlways(RedisLists):
    """The same, its log synced before each answer."""

    name = "Redis lists, synced each time"
    syncs = "always"


class Comparison(NamedTuple):
    """Two loops, and the ratio of their rates that is asked for."""

    of: type[Peer]
    to: type[Peer]
    goal: float | None


IN_MEMORY = (
    Comparison(Records, Raw, 12),
    Comparison(Records, RawBundles, 0.45),
    Comparison(Records, Sqlite, 5),
    Comparison(Records, RedisStreams, 5),
    Comparison(Records, RedisLists, 1),
    Comparison(Lines, Raw, None),
    Comparison(Lines, RawBundles, None),
)
ON_DISK = (
    Comparison(RecordsFull, RawFull, 100),
    Comparison(RecordsFull, RawBundlesFull, 0.6),
    Comparison(RecordsFull, SqliteFull, 5),
    Comparison(RecordsFull, RedisStreamsAlways, 5),
    Comparison(RecordsFull, RedisListsAlways, 1),
    Comparison(RecordsOneInThousand, RecordsFull, 0.7),
    Comparison(RecordsOneInHundred, RecordsFull, 0.4),
    Comparison(LinesFull, RawFull, None),
    Comparison(LinesFull, RawBundlesFull, None),
)
#: Of how many records a loop makes only one, as it is slow.
SLOW: dict[type[Peer], int] = {
    Raw: 20,
    RawFull: 200,
    Sqlite: 5,
    SqliteFull: 5,
    RedisStreams: 5,
    RedisStreamsAlways: 5,
}


# -- one process -------------------------------------------------------------------------------------------------------


def one_process(medium: str, base: str, comparisons: Sequence[Comparison], asked: argparse.Namespace) -> Iterator[Row]:
    """Send all by one process, then take and settle all by the same; yield a row for each comparison."""
    peers = dict.fromkeys(peer for each in comparisons for peer in (each.of, each.to))
    here = [peer for peer in peers if not peer.missing()]
    runs: dict[type[Peer], list[Run | str]] = {peer: [] for peer in here}
    for number in range(asked.rounds):
        for peer in random.Random(number).sample(here, len(here)):
            if medium == "disk":
                os.sync()  # what those before it wrote is not for it to wait for
            count = max(asked.records // SLOW.get(peer, 1) // BULK * BULK, BULK if peer not in (Raw, RawFull) else 100)
            runs[peer].append(tried(one_and_one, peer, base, count))
    for of, to, goal in comparisons:
        row: Row = {"what": of.name, "against": to.name, "on": medium}
        if why := of.missing() or to.missing():
            yield row | {"skipped": why}
        else:
            yield row | compared(runs[of], runs[to], goal)


def compared(ours: Sequence[Run | str], others: Sequence[Run | str], goal: float | None) -> Row:
    """Return what a row says of two loops: their rates, and the ratios within each round."""
    row: Row = {"rounds": len(ours)}
    if broke := [run for run in (*ours, *others) if isinstance(run, str)]:
        return row | {"broke": broke[0], "times": len(broke)}
    runs, against = [[run for run in each if isinstance(run, Run)] for each in (ours, others)]
    ratios = [rate(run) / rate(other) for run, other in zip(runs, against, strict=True)]
    return row | {
        "per_s": round(statistics.median(map(rate, runs))),
        "against_per_s": round(statistics.median(map(rate, against))),
        "ratio": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
        "goal": goal,
        "load": round(os.getloadavg()[0], 1),
        "lost": sum(run.lost for run in (*runs, *against)),
        "doubled": sum(run.doubled for run in (*runs, *against)),
    }


def rate(run: Run) -> float:
    """Return how many records a second a run made."""
    return run.messages / run.whole


# -- several processes -------------------------------------------------------------------------------------------------


def workers(medium: str, base: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Take the same bundles by four processes, and by one."""
    records = min(BUNDLES * BULK, asked.records * 10)
    found: dict[int, list[Run | str]] = {1: [], 4: []}
    for number in range(asked.rounds):
        for count in (1, 4) if number % 2 else (4, 1):
            found[count].append(
                tried(lambda peer, folder, n, count=count: shared(folder, n, count), Lines, base, records)
            )
    row: Row = {"what": "records, none, taken by four processes", "against": "by one", "on": medium}
    yield row | compared(found[4], found[1], 1.7)


def shared(folder: str, records: int, processes: int) -> Run:
    """Take records by several processes at once; they begin together, when all are up."""
    queue = Lines(folder)
    queue.put_all(map(body_of, range(records)))
    queue.close()
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(processes), context.SimpleQueue()
    jobs = [context.Process(target=take_share, args=(folder, gate, answers)) for _ in range(processes)]
    for job in jobs:
        job.start()
    shares = [answers.get() for _ in jobs]
    for job in jobs:
        job.join()
    run = Run(records, max(ended for _, ended, _, _ in shares) - min(started for started, _, _, _ in shares))
    taken = sum(count for _, _, count, _ in shares)
    run.lost = records - min(taken, Lines.settled(folder))
    run.doubled = max(taken - records, 0) if sum(size for *_, size in shares) == taken * SIZE else records
    return run


def take_share(folder: str, gate: Any, answers: SimpleQueue[tuple[float, float, int, int]]) -> None:
    """Take and settle records until none waits; answer when it began and ended, how many it took, and their bytes."""
    queue = Lines(folder)
    subscription = queue.subscribed()
    gate.wait()
    started, count, size = time.monotonic(), 0, 0
    for record in subscription.records(timeout=0):
        count += 1
        size += len(record.data)
        record.ack()
    answers.put((started, time.monotonic(), count, size))
    queue.close()


# -- many threads ------------------------------------------------------------------------------------------------------


def threads(medium: str, base: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Send by threads that wait until each record is durable: by a record writer, and by `Queue.send`."""
    for count, goal in ((THREADS, 5.0), (1, 0.9)):
        said = f"{count} threads" if count > 1 else "one thread"
        row: Row = {"what": f"record_writer().send().result(), full, {said}", "against": "send, full", "on": medium}
        records = min(AWAITED if count > 1 else AWAITED // 8, asked.records)
        found: dict[bool, list[Run | str]] = {True: [], False: []}
        for number in range(asked.rounds):
            for written in (True, False) if number % 2 else (False, True):
                os.sync()

                def run(peer: type[Peer], folder: str, n: int, *, count: int = count, by: bool = written) -> Run:
                    return awaited(folder, n, count, by_writer=by)

                found[written].append(tried(run, DropqFull, base, records))
        yield row | compared(found[True], found[False], goal)


def awaited(folder: str, records: int, count: int, *, by_writer: bool) -> Run:
    """Send by threads; each waits for its record before it sends the next. Then account for all."""
    queue = dropq.Root(f"{folder}/root").queue("q")
    with queue.record_writer("text") if by_writer else queue as out:

        def send(numbers: range) -> None:
            for number in numbers:
                sent = out.send(body_of(number))
                if by_writer:
                    sent.result()

        jobs = [threading.Thread(target=send, args=(range(n, records, count),)) for n in range(count)]
        started = time.perf_counter()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        run = Run(records, time.perf_counter() - started)
    taking = Lines(folder)
    bodies = list(taking.take_all())  # a message that is no bundle has one line
    taking.close()
    run.lost = len({*map(body_of, range(records))} - {*bodies})
    run.doubled = len(bodies) - len({*bodies})
    return run


# -- a pipe ------------------------------------------------------------------------------------------------------------


def followed(medium: str, base: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Write a line now and then to `dropq send --records`; tell how long it takes until it is received."""
    took: list[float] = []
    lost = doubled = 0
    for _ in range(asked.rounds):
        with scratch(base) as folder:
            found = list(received(f"{folder}/root", asked.lines))
        took += [seconds for _, seconds in found]
        numbers = {number for number, _ in found}
        lost += asked.lines - len(numbers)
        doubled += len(found) - len(numbers)
    took.sort()
    row: Row = {
        "what": "dropq send --records --linger 100ms, full: from a line in its pipe to the consumer",
        "on": medium,
    }
    yield row | {
        "rounds": asked.rounds,
        "lines": asked.lines,
        "p50_ms": round(took[len(took) // 2] * 1e3, 1),
        "p99_ms": round(took[len(took) * 99 // 100] * 1e3, 1),
        "goal": "p99 150 ms",
        "load": round(os.getloadavg()[0], 1),
        "lost": lost,
        "doubled": doubled,
    }


def received(root: str, lines: int) -> Iterator[tuple[int, float]]:
    """Yield the number of each line, and the seconds from its writing until it was received."""
    queue = dropq.Root.create(root).create_queue("q", durability="full")
    options = ("--records", "--format", "text", "--linger", "100ms")
    command = [sys.executable, "-m", "dropq", "--root", root, "send", "q", *options]
    chance, started = random.Random(lines), threading.Event()

    def write(pipe: IO[bytes]) -> None:
        with pipe:
            for number in range(lines + 1):
                pipe.write(b"%d %f\n" % (number, time.monotonic()))
                pipe.flush()
                if number == 0:
                    started.wait()
                else:
                    time.sleep(chance.uniform(*GAPS))

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        assert child.stdin is not None
        threading.Thread(target=write, args=(child.stdin,), daemon=True).start()
        with queue.subscribe() as subscription:
            for record in subscription.records(timeout=LIMIT):
                number, written = record.data.split()
                if started.is_set():  # the first line waits until the program has started
                    yield int(number), time.monotonic() - float(written)
                started.set()
                record.ack()
                if int(number) == lines:
                    break
        started.set()  # if no line came, the pipe is closed all the same, and so the program ends


# -- a large bundle ----------------------------------------------------------------------------------------------------


def large(medium: str, base: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Work for long at a large bundle, in a process of its own: what checkpoints take, and how much memory it needs."""
    context = multiprocessing.get_context("spawn")
    found: list[Row] = []
    records = asked.large << 20 >> 10
    for _ in range(asked.rounds):
        with scratch(base) as folder:
            queue = dropq.Root.create(f"{folder}/root").create_queue("q", durability="full")
            with queue.writer(type="text") as out:
                for start in range(0, records, BULK):
                    out.write(b"".join(b"%s\n" % body_of(n)[1:] for n in range(start, min(start + BULK, records))))
            os.sync()
            answer: SimpleQueue[Row] = context.SimpleQueue()
            child = context.Process(target=work_through, args=(folder, asked.large * asked.pace, records, answer))
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"the process that worked at the bundle ended with {child.exitcode}")
            found.append(answer.get())
    medians = {name: statistics.median(row[name] for row in found) for name in found[0]}
    row: Row = {"what": f"checkpoints of a bundle of {asked.large} MiB, full", "on": medium, "rounds": asked.rounds}
    yield row | medians | {"goal": "share 0.05, MB 64", "load": round(os.getloadavg()[0], 1)}


def work_through(folder: str, seconds: float, records: int, answer: SimpleQueue[Row]) -> None:
    """Take and settle all records of a bundle, at such a pace that it takes so many seconds."""
    spent: list[float] = []
    checkpoint = RecordSettlement.checkpoint

    def timed(*about: Any) -> Any:
        before = time.perf_counter()
        try:
            return checkpoint(*about)
        finally:
            spent.append(time.perf_counter() - before)

    queue = Lines(folder)
    numbers = bytearray(records)
    twice = 0
    started = time.perf_counter()
    with mock.patch.object(RecordSettlement, "checkpoint", timed):
        for count, record in enumerate(queue.subscribed().records(timeout=0), 1):
            number = int(record.data[:11])
            twice += numbers[number]
            numbers[number] = 1
            record.ack()
            if count % PAUSED == 0 and (ahead := started + seconds * count / records - time.perf_counter()) > 0:
                time.sleep(ahead)
    took = time.perf_counter() - started
    queue.close()
    answer.put(
        {
            "seconds": round(took, 1),
            "checkpoints": len(spent) - 1,  # the last commit has nothing left
            "share": round(sum(spent) / took, 4),
            "peak_mb": round(peak_kb() / 1000, 1),
            "lost": numbers.count(0),
            "doubled": twice,
        }
    )


PARTS: tuple[tuple[str, str, Callable[..., Iterator[Row]]], ...] = (
    ("one", "tmpfs", lambda medium, base, asked: one_process(medium, base, IN_MEMORY, asked)),
    ("one", "disk", lambda medium, base, asked: one_process(medium, base, ON_DISK, asked)),
    ("workers", "tmpfs", workers),
    ("threads", "disk", threads),
    ("followed", "disk", followed),
    ("large", "disk", large),
)


def main() -> int:
    """Print a line of JSON for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=100_000, help="fewer of slow loops, more of several processes")
    parser.add_argument("--lines", type=int, default=500, help="that a program follows")
    parser.add_argument("--large", type=int, default=256, metavar="MIB", help="of the bundle with checkpoints")
    parser.add_argument("--pace", type=float, default=PACE, help="seconds that a MiB of it takes")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts in whose names this is: one, workers, ...")
    parser.add_argument("--tmpfs", default="/dev/shm", metavar="DIR")
    parser.add_argument("--disk", default=".", metavar="DIR")
    asked = parser.parse_args()
    for name, medium, part in PARTS:
        if asked.only in f"{name} {medium}":
            for row in part(medium, asked.tmpfs if medium == "tmpfs" else asked.disk, asked):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
