"""What grows with what lies in a queue: sweeps, and calls whose cost may depend on it; a line of JSON for each row.

Each figure is the median of three processes, so that a row's memory is its own. `python bench/upkeep.py` measures
100,000 files; rows whose preparation takes long have fewer. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any
from unittest import mock

import dropq
from dropq.storage import locks
from dropq.upkeep.sweep import QuickSweep

#: How many files lie there, or are taken.
FILES = 100_000
#: How many with --quick.
FEW = 100
#: Processes that are measured for a figure, which is their median.
ROUNDS = 3
DAY = 86_400_000


class Ahead:
    """A clock some days ahead, to which what was just made is old."""

    def __init__(self, days: int) -> None:
        self._days = days

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970 UTC."""
        return int(time.time() * 1000) + self._days * DAY


def reasons(queue: dropq.Queue, count: int) -> None:
    """Let messages lie in expired/ with reasons over a day old."""
    folder = Path(queue.layout.reasons, "expired")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = Path(queue.layout.expired, _name(number))
        path.touch()
        about = {"name": path.name, "inode": path.stat().st_ino, "reason": "time_limit"}
        digest = hashlib.sha256(f"{about['inode']}/{path.name}".encode()).hexdigest()[:32]
        (folder / f"{digest}.json").write_text(json.dumps(about))


def waiting(queue: dropq.Queue, count: int) -> None:
    """Let messages wait."""
    for number in range(count):
        Path(queue.layout.target, _name(number)).touch()


def files(queue: dropq.Queue, count: int) -> None:
    """Let files of scripts wait."""
    for number in range(count):
        Path(queue.layout.target, f"report-2024-11-05-{number:09d}.csv").touch()


def history(queue: dropq.Queue, count: int) -> None:
    """Let messages lie in processed/, as many as its limit allows."""
    for number in range(count):
        Path(queue.layout.processed, _name(number)).touch()


def bodies(queue: dropq.Queue, count: int) -> None:
    """Let messages wait that have bodies."""
    for number in range(count):
        Path(queue.layout.target, _name(number)).write_text('{"urgency": 1}')


def sidecars(queue: dropq.Queue, count: int) -> None:
    """Let messages lie in processed/, each with a sidecar."""
    folder = Path(queue.root.layout.meta)
    folder.mkdir(exist_ok=True)
    about = {"format": 1, "foreign_name": None, "reply_to": None, "type": None, "properties": {}}
    for number in range(count):
        Path(queue.layout.processed, f"{_name(number)}.....JMS_dropq_metaS={number:016x}").touch()
        more = {"id": _name(number)[2:-2], "correlation_id": "c" * 150}
        (folder / f"{number:016x}.json").write_text(json.dumps(about | more))


Row = dict[str, Any]
#: What is done with a queue in which so many files lie: it is measured from the first yield, of nothing, to the second,
#: of what else there is to tell.
Doing = Callable[[dropq.Queue, int], Iterator[Row]]


def sweep(queue: dropq.Queue, count: int) -> Iterator[Row]:
    """Sweep once, two days later."""
    later = _later(queue, 2)
    yield {}
    later.sweep()
    yield {}


def take(queue: dropq.Queue, count: int) -> Iterator[Row]:
    """Take and acknowledge all; tell what the first and last twentieth cost a message, and what is left in held/."""
    with queue.subscribe(max_backlog=None) as subscription:
        yield {}
        times = []
        while (message := subscription.receive()) is not None:
            _ = message.body
            message.ack()
            times.append(time.process_time())
        some = count // 20
        first, last = times[some] - times[0], times[-1] - times[-1 - some]  # the first message waits for the listing
        held = Path(queue.layout.held)
        yield {
            "taken": len(times),
            "first_us": round(first / some * 1e6, 1),
            "last_us": round(last / some * 1e6, 1),
            "left_in_held": len(os.listdir(held)) if held.exists() else 0,
        }


def ack_lost(queue: dropq.Queue, count: int) -> Iterator[Row]:
    """Acknowledge at once messages whose leases are over, and which another consumer holds by now."""
    with queue.subscribe(max_backlog=None, lease_period="1h") as one:
        lost = one.receive_many(count)
        for days in (2, 4):  # what outlived a lease is delayed for a moment
            _later(queue, days).sweep()
        with queue.subscribe(max_backlog=None, lease_period="1h") as other:
            held = other.receive_many(count)
            yield {}
            yield {"gone": len(one.ack_many(lost)), "held": len(held)}


def ask(queue: dropq.Queue, count: int) -> Iterator[Row]:
    """Look for a message that is not there, and acknowledge one that is still to come."""
    yield {}
    began = time.process_time()
    with suppress(dropq.NoSuchMessage):
        queue.find(_name(count)[2:-2])
    found = time.process_time()
    queue.ack(_name(count)[2:-2], defer=True)
    acked = time.process_time()
    yield {"find_ms": round((found - began) * 1e3, 2), "early_ack_ms": round((acked - found) * 1e3, 2)}


def sweep_on_the_way(queue: dropq.Queue, count: int) -> Iterator[Row]:
    """Sweep as a consumer does each second, beside consumers that each hold a message."""
    holders = [queue.subscribe() for _ in range(count)]
    held = [holder.receive() for holder in holders]
    on_the_way = QuickSweep(queue.context)
    with mock.patch.object(locks, "try_lock", wraps=locks.try_lock) as tried:
        on_the_way.run()
    yield {}
    on_the_way.run()
    yield {"lock_tries": tried.call_count}
    for message in filter(None, held):
        message.ack()
    for holder in holders:
        holder.close()


#: What lies in the queue, what is done, how often, and the queue's options.
CASES: dict[str, tuple[Callable[[dropq.Queue, int], None], Doing, int, dict[str, Any]]] = {
    "reasons over a day old": (reasons, sweep, FILES, {}),
    "messages that wait": (waiting, sweep, FILES, {}),
    "files of scripts that wait": (files, sweep, FILES, {}),
    "files of scripts that wait, with an expiration": (files, sweep, FILES, {"expiration": "30d"}),
    "messages in processed/, within max_history": (history, sweep, FILES, {"max_history": 10_000_000}),
    "messages in processed/, within history_age": (history, sweep, FILES, {"history_age": "30d"}),
    "taken at most once, without a history": (waiting, take, FILES, {"semantics": "at-most-once", "history": False}),
    "taken under max_backlog and a priority by the body": (
        bodies,
        take,
        FILES,
        {"max_backlog": 10, "priority": "/urgency"},
    ),
    "taken under a barrier_expression": (bodies, take, FILES, {"barrier_expression": "JMSType = 'none'"}),
    "lost leases that ack_many meets, beside as many held": (waiting, ack_lost, 10_000, {}),
    "archived: a find, and an early ack": (history, ask, FILES, {}),
    "archived, with sidecars: a find, and an early ack": (sidecars, ask, FILES, {}),
    "consumers that hold a message: a sweep on the way of another": (waiting, sweep_on_the_way, 200, {}),
}


def _later(queue: dropq.Queue, days: int) -> dropq.Queue:
    return dropq.Root(queue.root.path, clock=Ahead(days)).queue(queue.name)


def _name(number: int) -> str:
    return f"4.{1_700_000_000_000_000 + number:016d}-{number:010d}.B"


def _measure(case: str, folder: str, count: int, answer: SimpleQueue[Row]) -> None:
    fill, do, _, options = CASES[case]
    queue = dropq.Root.create(folder).create_queue("q", durability="none", **options)
    fill(queue, count)
    doing = do(queue, count)
    next(doing)
    before = _peak_mb()
    began = time.process_time()
    more = next(doing)
    took = time.process_time() - began
    answer.put({"seconds": round(took, 4), "mb": round(_peak_mb() - before, 1)} | more)
    doing.close()


def _peak_mb() -> float:
    with open("/proc/self/status") as file:
        [line] = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(case: str, count: int, base: str) -> Row:
    """Measure a case in a process and a folder of its own."""
    folder = tempfile.mkdtemp(prefix="dropq-upkeep-", dir=base)
    try:
        context = multiprocessing.get_context("spawn")
        answer: SimpleQueue[Row] = context.SimpleQueue()
        child = context.Process(target=_measure, args=(case, f"{folder}/root", count, answer))
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"{case}: the measuring process ended with {child.exitcode}")
        return answer.get()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=FILES, help="at the most")
    parser.add_argument("--folder", default="/dev/shm", help="where to measure; in memory it is the processor's time")
    parser.add_argument("--quick", action="store_true", help=f"{FEW} files, once")
    asked, _ = parser.parse_known_args()
    for case, (_, _, most, _) in CASES.items():
        count = min(most, FEW if asked.quick else asked.files)
        rows = [measured(case, count, asked.folder) for _ in range(1 if asked.quick else ROUNDS)]
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(json.dumps({"what": case, "files": count} | medians), flush=True)


if __name__ == "__main__":
    main()
