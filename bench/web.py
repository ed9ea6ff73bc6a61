"""Measure what a page that is held open costs: processor time of `dropq web`, and messages a second with and without.

Four processes send and four receive, as fast as they can, while a reader has the root's page and a queue's open: both
are asked for each 5 s, with their style sheet, as a browser does. In each round the same runs with the page and
without, in an order that changes. Where others use the machine too, the ratio of messages for each second of a
processor, the page's included, says more than that of messages a second.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from beside import print_rows

import dropq
from bench import scratch

BODY = b"x" * 1024
#: Seconds of a run, and between two times that a page is asked for.
RUN, REFRESH = 10.5, 5.0
#: How many send, and as many receive; and how many messages may wait.
EACH, WAITING = 4, 1000


class Case(NamedTuple):
    """A case: how many queues the root has, one of which is at work, and whether they keep a history."""

    queues: int
    history: bool = False
    on: str = "tmpfs"

    @property
    def name(self) -> str:
        """What `--only` finds it by."""
        return f"{self.queues} queue{'s' * (self.queues > 1)}{', history' * self.history}"


CASES = (Case(1), Case(20), Case(1, history=True))


def send(folder: str, room: Any, until: float) -> None:
    """Send until a time, while there is room."""
    queue = dropq.Root(folder).queue("q0")
    while time.monotonic() < until:
        if room.acquire(timeout=0.1):
            queue.send(BODY)


def receive(folder: str, room: Any, until: float, count: Any) -> None:
    """Receive until a time; add up how many messages."""
    with dropq.Root(folder).queue("q0").subscribe() as subscription:
        taken = 0
        while time.monotonic() < until:
            if (message := subscription.receive(0.1)) is not None:
                message.ack()
                room.release()
                taken += 1
    with count.get_lock():
        count.value += taken


def run(folder: str) -> tuple[int, float]:
    """Return how many messages went through, and the seconds of processors that their processes took."""
    context = multiprocessing.get_context("fork")
    room, count = context.Semaphore(WAITING), context.Value("i", 0)
    until = time.monotonic() + RUN
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    jobs = [context.Process(target=send, args=(folder, room, until)) for _ in range(EACH)]
    jobs += [context.Process(target=receive, args=(folder, room, until, count)) for _ in range(EACH)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return int(count.value), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before


class Reader(threading.Thread):
    """Has two pages open until it is told that it is over."""

    def __init__(self, link: str) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self._link = link

    def run(self) -> None:
        """Ask for the pages again and again."""
        while not self.over.wait(REFRESH):
            self.read()

    def read(self) -> bool:
        """Ask for each page once; return whether a first look is under way."""
        begins = False
        for path in ("", "style.css", "queue?q=q0", "style.css"):
            try:
                with urllib.request.urlopen(self._link + path) as answer:
                    begins |= b"under way" in answer.read()
            except urllib.error.HTTPError:  # no look has found the queue yet
                begins = True
        return begins


@contextmanager
def page(folder: str, used: list[float]) -> Iterator[None]:
    """Run `dropq web` with a reader; add the seconds of a processor that it took once it was ready."""
    command = [sys.executable, "-m", "dropq", "--root", folder, "web", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            reader = Reader(process.stdout.readline().strip())
            while reader.read():
                time.sleep(0.1)
            reader.start()
            before = spent(process.pid)
            yield
            used.append(spent(process.pid) - before)
            reader.over.set()
            reader.join()
        finally:
            process.terminate()


def spent(pid: int) -> float:
    """Return the seconds of a processor that a process has taken."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(case: Case, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    used, runs = list[float](), {"with": list[tuple[int, float]](), "without": list[tuple[int, float]]()}
    for number in range(rounds):
        for which in sorted(runs, reverse=bool(number % 2)):
            with scratch(base) as folder:
                root = dropq.Root.create(f"{folder}/root")
                for place in range(case.queues):
                    root.create_queue(f"q{place}", durability="none", history=case.history)
                with page(f"{folder}/root", used) if which == "with" else nullcontext():
                    runs[which].append(run(f"{folder}/root"))
    pairs = list(zip(runs["with"], runs["without"], used, strict=True))
    ratios = [one / other for (one, _), (other, _), _ in pairs]
    by_cpu = [one / (cpu + own) / (other / without) for (one, cpu), (other, without), own in pairs]
    return {
        "what": case.name,
        "on": case.on,
        "rounds": rounds,
        "per_s": round(statistics.median(count for count, _ in runs["with"]) / RUN),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "by_cpu": round(statistics.median(by_cpu), 3),
        "by_cpu_range": [round(min(by_cpu), 3), round(max(by_cpu), 3)],
        "percent": round(100 * statistics.median(used) / RUN, 2),
        "most_percent": round(100 * max(used) / RUN, 2),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, CASES, row))
