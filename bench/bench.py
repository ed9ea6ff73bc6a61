"""Measure dropq against the raw loop of the system calls that it cannot do without.

Each round runs the raw loop and dropq one after the other, so that a noisy machine disturbs both; what counts are
the ratios within a round, and of those the median. Every message is accounted for: sent, received and settled once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import dropq

BODY = os.urandom(1024)


@dataclass(frozen=True)
class Timing:
    """Seconds for sending and for draining a number of messages."""

    messages: int
    sending: float
    draining: float

    @property
    def life(self) -> float:
        """Messages a second, over their whole life."""
        return self.messages / (self.sending + self.draining)


def raw_loop(folder: str, messages: int) -> Timing:
    """Open, write, rename; then, from one listing, rename, read, rename: what every queue of files has to do."""
    working, target, processing, processed = (f"{folder}/{name}" for name in ("w", "t", "p", "d"))
    for path in (working, target, processing, processed):
        os.mkdir(path)
    started = time.perf_counter()
    for number in range(messages):
        name = f"4.{number:016d}-0000000000.B"
        fd = os.open(f"{working}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        os.write(fd, BODY)
        os.close(fd)
        os.rename(f"{working}/{name}", f"{target}/{name}")
    sent = time.perf_counter()
    drained = 0
    for name in sorted(os.listdir(target)):
        os.rename(f"{target}/{name}", f"{processing}/c,0,1~{name}")
        fd = os.open(f"{processing}/c,0,1~{name}", os.O_RDONLY | os.O_CLOEXEC)
        body = os.read(fd, 1 << 16)
        while chunk := os.read(fd, 1 << 16):
            body += chunk
        os.close(fd)
        assert len(body) == len(BODY)
        os.rename(f"{processing}/c,0,1~{name}", f"{processed}/{name}")
        drained += 1
    ended = time.perf_counter()
    assert drained == messages == len(os.listdir(processed))
    return Timing(messages, sent - started, ended - sent)


def dropq_loop(folder: str, messages: int, **options: object) -> Timing:
    """Send, then receive, read and ack, with one queue."""
    queue = dropq.Root.create(folder).create_queue("bench", **options)
    started = time.perf_counter()
    for _ in range(messages):
        queue.send(BODY)
    sent = time.perf_counter()
    drained = 0
    while (message := queue.receive()) is not None:
        assert len(message.body) == len(BODY)
        message.ack()
        drained += 1
    ended = time.perf_counter()
    counts = queue.counts()
    assert drained == messages == counts["processed"], counts
    assert sum(counts.values()) == messages, counts
    queue.close()
    return Timing(messages, sent - started, ended - sent)


def drain_only(folder: str, waiting: int) -> float:
    """Return the seconds a message that draining a queue takes in which so many wait."""
    queue = dropq.Root.create(folder).create_queue("bench", durability="none")
    queue.send_many(BODY for _ in range(waiting))
    started = time.perf_counter()
    drained = 0
    while (message := queue.receive()) is not None:
        message.ack()
        drained += 1
    elapsed = time.perf_counter() - started
    assert drained == waiting
    queue.close()
    return elapsed / waiting


@contextmanager
def scratch(base: str) -> Iterator[str]:
    """Give an empty folder on a file system, and remove it afterwards."""
    folder = tempfile.mkdtemp(prefix="dropq-bench-", dir=base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def rounds(base: str, times: int, *loops: Callable[[str], Timing]) -> list[list[Timing]]:
    """Run the loops in turn, so many times over; return the timings of each round."""
    measured = []
    for _ in range(times):
        timings = []
        for loop in loops:
            with scratch(base) as folder:
                timings.append(loop(folder))
        measured.append(timings)
    return measured


def median(values: list[float]) -> float:
    """Return the middle value."""
    return statistics.median(values)


def plain_path(base: str, label: str, messages: int, times: int) -> Iterator[dict[str, object]]:
    """Compare sending and draining with the raw loop, at each durability."""
    for durability in ("none", "file", "full") if label == "disk" else ("none", "full"):
        runs = rounds(
            base,
            times,
            lambda folder: raw_loop(folder, messages),
            lambda folder, durability=durability: dropq_loop(folder, messages, durability=durability),  # type: ignore[misc]
        )
        yield {
            "what": f"{label}, durability {durability}",
            "messages": messages,
            "raw_per_s": round(median([raw.life for raw, _ in runs])),
            "dropq_per_s": round(median([ours.life for _, ours in runs])),
            "ratio_send": round(median([raw.sending / ours.sending for raw, ours in runs]), 2),
            "ratio_drain": round(median([raw.draining / ours.draining for raw, ours in runs]), 2),
            "ratio": round(median([ours.life / raw.life for raw, ours in runs]), 2),
        }


def depth(base: str, times: int, deep: int) -> dict[str, object]:
    """Compare draining a deep queue with draining a shallow one."""
    ratios, shallow_costs, deep_costs = [], [], []
    for _ in range(times):
        shallow = median([_drained(base, 1000) for _ in range(3)])
        cost = _drained(base, deep)
        shallow_costs.append(shallow)
        deep_costs.append(cost)
        ratios.append(shallow / cost)
    return {
        "what": f"tmpfs, {deep} waiting against 1000",
        "messages": deep,
        "shallow_per_s": round(1 / median(shallow_costs)),
        "deep_per_s": round(1 / median(deep_costs)),
        "ratio": round(median(ratios), 2),
    }


def _drained(base: str, waiting: int) -> float:
    with scratch(base) as folder:
        return drain_only(folder, waiting)


def main() -> int:
    """Run the benchmarks and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--deep", type=int, default=100_000)
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--disk", default=".", help="a folder on a disk")
    parser.add_argument("--only", choices=("tmpfs", "disk", "depth"), help="run one part")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    for part in (given.only,) if given.only else ("tmpfs", "depth", "disk"):
        if part == "depth":
            rows.append(depth(given.tmpfs, max(3, given.rounds // 3), given.deep))
        else:
            base, messages = (given.tmpfs, given.messages) if part == "tmpfs" else (given.disk, given.messages // 5)
            rows += plain_path(base, part, messages, max(3, given.rounds))
        for row in rows:
            if not row.pop("shown", False):
                print(json.dumps(row), flush=True)
            row["shown"] = True
    return 0


if __name__ == "__main__":
    sys.exit(main())
