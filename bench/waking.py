"""Measure how soon who waits for a message has it, what waiting costs, and whether a burst loses any.

The sender is a process of its own, as a script would be: it writes the time into a file and renames it into target/.
A reader of raw inotify events runs in the same rounds: no more is to be had. Rows are JSON, one a line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import rmtree

import dropq
from dropq.worker.loop import Stop

#: Arguments: the queue's folder, how many, the shortest and the longest pause in seconds.
SENDER = """
import os, random, sys, time
base, count, shortest, longest = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
for number in range(count):
    time.sleep(random.uniform(shortest, longest))
    name = f"4.{time.time_ns() // 1_000_000:013d}000-{number:010d}.B"
    file = os.open(f"{base}/working/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
    os.write(file, b"%020d" % time.monotonic_ns())
    os.close(file)
    os.rename(f"{base}/working/{name}", f"{base}/target/{name}")
"""

#: Arguments: the queue's folder, how many. All are written first, so that the renames come as fast as they can.
RENAMES = """
import os, sys
base, count = sys.argv[1], int(sys.argv[2])
names = [f"4.0000000000000{number % 1000:03d}-{number:010d}.B" for number in range(count)]
for name in names:
    os.close(os.open(f"{base}/working/{name}", os.O_WRONLY | os.O_CREAT, 0o664))
for name in names:
    os.rename(f"{base}/working/{name}", f"{base}/target/{name}")
"""

#: Arguments: the root, how many.
SEND_MANY = """
import sys
import dropq
dropq.Root(sys.argv[1]).queue("q").send_many(b"" for _ in range(int(sys.argv[2])))
"""

IN_CREATE, IN_MOVED_TO, IN_Q_OVERFLOW = 0x100, 0x80, 0x4000

Latencies = list[float]
#: Takes so many messages of a queue; calls what it is given once it waits; returns the milliseconds each was under way.
Waiter = Callable[[dropq.Queue, int, Callable[[], object]], Latencies]


def since(stamp: bytes) -> float:
    """Return the milliseconds since a sender's stamp."""
    return (time.monotonic_ns() - int(stamp)) / 1e6


class Inotify:
    """The kernel's events of one folder, by the C library alone."""

    def __init__(self, folder: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        assert self.fd >= 0 and libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_CREATE | IN_MOVED_TO) >= 0

    def read(self) -> Iterator[tuple[int, str]]:
        """Yield mask and name of each event that is there."""
        try:
            while buffer := os.read(self.fd, 1 << 16):
                at = 0
                while at < len(buffer):
                    _, mask, _, length = struct.unpack_from("iIII", buffer, at)
                    yield mask, os.fsdecode(buffer[at + 16 : at + 16 + length].rstrip(b"\0"))
                    at += 16 + length
        except BlockingIOError:
            return


def raw(queue: dropq.Queue, messages: int, ready: Callable[[], object]) -> Latencies:
    """Read events, and the files that they name: no listing, no claim, no thread."""
    events, latencies = Inotify(queue.layout.target), Latencies()
    ready()
    while len(latencies) < messages:
        select.select([events.fd], [], [])
        for _, name in events.read():
            with open(f"{queue.layout.target}/{name}", "rb") as file:
                latencies.append(since(file.read()))
    os.close(events.fd)
    return latencies


def receive(queue: dropq.Queue, messages: int, ready: Callable[[], object]) -> Latencies:
    """Loop over a subscription."""
    latencies = Latencies()
    with queue.subscribe() as subscription:
        assert subscription.receive(timeout=0.5) is None  # by then it waits as one who has waited long
        ready()
        for message in subscription:
            now = time.monotonic_ns()
            latencies.append((now - int(message.body)) / 1e6)
            message.ack()
            if len(latencies) == messages:
                return latencies
    raise AssertionError("it never ends by itself")


def work(queue: dropq.Queue, messages: int, ready: Callable[[], object]) -> Latencies:
    """Let a worker call a handler."""
    latencies, stop = Latencies(), Stop()

    def handler(message: dropq.Message) -> None:
        now = time.monotonic_ns()
        latencies.append((now - int(message.body)) / 1e6)
        if len(latencies) == messages:
            stop.ask()

    threading.Timer(0.5, ready).start()
    dropq.work(queue, handler, stop=stop)
    return latencies


@contextmanager
def fresh_queue(base: str) -> Iterator[dropq.Queue]:
    """Give an empty queue on a file system, and remove it afterwards."""
    folder = tempfile.mkdtemp(prefix="dropq-waking-", dir=base)
    try:
        yield dropq.Root.create(folder).create_queue("q", durability="none")
    finally:
        rmtree(folder)


def sender(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a sender."""
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)])


def latency(base: str, label: str, rounds: int, spacing: tuple[int, float, float]) -> Iterator[dict[str, object]]:
    """Compare the ways to wait, one after the other in each round; report the medians of the rounds."""
    messages, shortest, longest = spacing
    waiters: dict[str, Waiter] = {"raw inotify": raw, "receive": receive, "work": work}
    latencies: dict[str, list[Latencies]] = {name: [] for name in waiters}
    for _ in range(rounds):
        for name, waiter in waiters.items():
            with fresh_queue(base) as queue:
                senders: list[subprocess.Popen[bytes]] = []

                def start(queue: dropq.Queue = queue, senders: list[subprocess.Popen[bytes]] = senders) -> None:
                    senders.append(sender(SENDER, queue.layout.base, messages, shortest, longest))

                latencies[name].append(sorted(waiter(queue, messages, start)))
                assert senders[0].wait() == 0 and len(latencies[name][-1]) == messages
    for name, runs in latencies.items():
        yield {
            "what": f"{label}, {name}, one message in {round(shortest * 1000)} to {round(longest * 1000)} ms",
            "messages": messages,
            "rounds": rounds,
            "p50_ms": round(statistics.median(run[messages // 2] for run in runs), 3),
            "best_p50_ms": round(min(run[messages // 2] for run in runs), 3),
            "p99_ms": round(statistics.median(run[messages * 99 // 100] for run in runs), 3),
        }


def idle(base: str, how: str, seconds: float) -> dict[str, object]:
    """Let a process of its own wait for what never comes; report its processor time, all threads, user and system."""
    with fresh_queue(base) as queue:
        command = [sys.executable, __file__, "--waits", how, queue.root.layout.path, str(seconds)]
        used = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"what": f"idle, {how}", "seconds": seconds, "cpu_percent": round(used / seconds * 100, 4)}


def waits(how: str, root: str, seconds: float) -> None:
    """Wait for what never comes, and tell what that costs once the beginning is over."""

    def measure() -> None:
        time.sleep(2)
        before = time.process_time()
        time.sleep(seconds)
        print(time.process_time() - before, flush=True)
        os._exit(0)

    threading.Thread(target=measure, daemon=True).start()
    queue = dropq.Root(root).queue("q")
    if how == "work":
        dropq.work(queue, lambda message: None)
    else:
        queue.receive(None)


def burst(base: str, label: str, how: str, messages: int) -> dict[str, object]:
    """Send faster than anybody reads while a worker waits; account for every message, and for the events."""
    with fresh_queue(base) as queue:
        unread = Inotify(queue.layout.target)
        seen: dict[str, int] = {}
        stop, senders, last = Stop(), [], [0.0]

        def handler(message: dropq.Message) -> None:
            seen[message.id] = seen.get(message.id, 0) + 1
            last[0] = time.monotonic()
            if len(seen) == messages:
                stop.ask()

        def start() -> None:
            arguments = (RENAMES, queue.layout.base) if how == "rename" else (SEND_MANY, queue.root.layout.path)
            senders.append(sender(*arguments, messages))

        threading.Timer(0.5, start).start()
        giving_up = threading.Timer(300, stop.ask)
        giving_up.start()
        started = time.monotonic()
        dropq.work(queue, handler, stop=stop)
        giving_up.cancel()
        assert senders[0].wait() == 0
        masks = [mask for mask, _ in unread.read()]
        os.close(unread.fd)
        counts = queue.counts()
        assert counts["processed"] == sum(counts.values()) == len(seen), counts
        return {
            "what": f"{label}, burst by {how}, work",
            "messages": messages,
            "seconds": round(last[0] - started, 1),
            "lost": messages - len(seen),
            "doubled": sum(count - 1 for count in seen.values()),
            "events_kept_by_the_kernel": sum(1 for mask in masks if not mask & IN_Q_OVERFLOW),
            "overflow": any(mask & IN_Q_OVERFLOW for mask in masks),
        }


def main() -> int:
    """Run the parts and print a row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="how long to wait for nothing")
    parser.add_argument("--burst", type=int, default=100_000)
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--disk", default=".", help="a folder on a disk")
    parser.add_argument("--only", choices=("latency", "idle", "burst"), help="run one part")
    parser.add_argument("--waits", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.waits:
        waits(given.waits[0], given.waits[1], float(given.waits[2]))
        return 0
    for row in rows(given):
        print(json.dumps(row), flush=True)
    return 0


def rows(given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the row of each measurement."""
    parts = (given.only,) if given.only else ("latency", "idle", "burst")
    mediums = (("tmpfs", given.tmpfs), ("disk", given.disk))
    if "latency" in parts:
        for label, base in mediums:
            yield from latency(base, label, given.rounds, (given.messages, 0.001, 0.020))
            yield from latency(base, label, 1, (12, 0.7, 1.3))  # not in step with the look once a second
    if "idle" in parts:
        for how in ("receive", "work"):
            yield idle(given.tmpfs, how, given.seconds)
    if "burst" in parts:
        for label, base in mediums:
            for how in ("rename", "send_many"):
                yield burst(base, label, how, given.burst)


if __name__ == "__main__":
    sys.exit(main())
