"""Measure a bridge: 1 KiB from one root to another, beside the raw loop of the same batches, and beside rsync.

In each round all run one after the other, and what counts are the ratios within a round. The raw loop makes the calls
that a transfer of a thousand needs: rename each out of the queue, copy it into a folder there, rename that folder,
rename each into the queue there, unlink each here. Where the durability is `full` it syncs what dropq syncs. Then come
how long a message takes to a consumer that waits, beyond transfer_after, and what an idle bridge costs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from beside import RawCalls, emptied, print_rows, synced

import dropq
from bench import scratch
from dropq.carrier.bridge import Bridge
from dropq.policies.wanted import Wanting

KIB = 1 << 10
#: How many messages are sent to a consumer that waits, and for how many seconds a bridge is idle.
SENT, IDLE = 30, 10.0
#: How long a message waits before a bridge takes it, in seconds.
AFTER = 0.2


class Case(NamedTuple):
    """What is measured, and how many messages a round has."""

    on: str
    durability: str
    what: str
    messages: int

    @property
    def name(self) -> str:
        """What `--only` finds it by."""
        return f"{self.on} {self.durability} {self.what}"


CASES = (
    Case("tmpfs", "none", "1 KiB", 1000),
    Case("tmpfs", "full", "1 KiB", 1000),
    Case("disk", "none", "1 KiB", 1000),
    Case("disk", "full", "1 KiB", 200),
    Case("tmpfs", "none", "waiting", SENT),
)


class Raw(RawCalls):
    """The raw loop of system calls."""

    def __init__(self, folder: str, case: Case) -> None:
        super().__init__(syncs=False)
        self._sync = synced if case.durability == "full" else lambda *paths: None
        self._here, self._row, self._there, self._working = (
            f"{folder}/raw/{name}" for name in ("a/target", "a/row", "b/target", "b/working")
        )
        for each in (self._here, self._row, self._there, self._working):
            os.makedirs(each)

    def fill(self, count: int, body: bytes) -> None:
        """Let so many messages wait."""
        for number in range(count):
            self.write(f"{self._here}/{number}", body)

    def run(self) -> None:
        """Move them."""
        files = sorted(os.listdir(self._here))
        for file in files:
            os.rename(f"{self._here}/{file}", f"{self._row}/{file}")
        self._sync(self._row)
        job = f"{self._working}/job"
        os.mkdir(job)
        for file in files:
            with open(f"{self._row}/{file}", "rb", buffering=0) as source:
                self.write(f"{job}/{file}", source.read())
        self._sync(*(f"{job}/{file}" for file in files), job)
        os.rename(job, f"{job}.done")
        self._sync(self._working)
        for file in files:
            os.rename(f"{job}.done/{file}", f"{self._there}/{file}")
        self._sync(self._there)
        os.rmdir(f"{job}.done")
        for file in files:
            os.unlink(f"{self._row}/{file}")

    def clear(self) -> int:
        """Remove what a round left; return how many messages there were."""
        return emptied(self._there)


class Rsync(Raw):
    """Rsync, which writes each file aside, renames it, and removes the source."""

    def run(self) -> None:
        """Move them."""
        subprocess.run(["rsync", "-a", "--remove-source-files", f"{self._here}/", f"{self._there}/"], check=True)


class Ours:
    """Two roots, and a bridge."""

    def __init__(self, folder: str, case: Case) -> None:
        self.queues = []
        for name, other in (("a", "b"), ("b", "a")):
            os.makedirs(f"{folder}/{name}")
            with open(f"{folder}/{name}/dropq.toml", "w") as file:
                file.write(f'instance = "{name}"\n[[peer]]\nname = "{other}"\nroot = "{folder}/{other}"\n')
            root = dropq.Root(f"{folder}/{name}")
            after = AFTER if case.what == "waiting" else 0
            self.queues.append(
                root.create_queue("q", durability=case.durability, replication_type="Queue", transfer_after=after)
            )
        context = self.queues[1].root.context
        self.bridge = Bridge(context, context.config.peer[0], None)
        self._wanting = Wanting(self.queues[1].context, "bench", None)

    def fill(self, count: int, body: bytes) -> None:
        """Let so many messages wait."""
        self.queues[0].send_many([body] * count)

    def run(self) -> None:
        """Move them."""
        self._wanting.say(None)
        while self.queues[0].counts()["target"]:
            self.bridge.once()

    def clear(self) -> int:
        """Remove what a round left; return how many messages there were."""
        return emptied(self.queues[1].layout.target)


def row(case: Case, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    with scratch(base) as folder:
        measured = waiting(case, folder) if case.what == "waiting" else moved(case, folder, rounds)
    said = {"what": case.what, "on": case.on, "durability": case.durability, "messages": case.messages}
    return {**said, **measured, "load": round(os.getloadavg()[0], 1)}


def moved(case: Case, folder: str, rounds: int) -> dict[str, object]:
    """Measure what a message costs by each way."""
    body = b"x" * KIB
    ways: dict[str, Raw | Ours] = {"raw": Raw(f"{folder}/raw", case), "dropq": Ours(f"{folder}/own", case)}
    if case.durability == "none" and shutil.which("rsync"):
        ways["rsync"] = Rsync(f"{folder}/rsync", case)
    times = {name: list[float]() for name in ways}
    astray = 0
    for number in range(rounds + 1):
        for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
            count = case.messages if number else 3
            way.fill(count, body)
            if case.on == "disk":
                os.sync()  # what those before it wrote is not for it to wait for
            started = time.perf_counter()
            way.run()
            if number:  # what is opened once is opened in the first
                times[name].append((time.perf_counter() - started) / count * 1e6)
            astray += abs(count - way.clear())
    found: dict[str, object] = {f"{name}_us": round(statistics.median(each), 1) for name, each in times.items()}
    for name in times.keys() - {"dropq"}:
        pairs = zip(times[name], times["dropq"], strict=True)
        found[f"to_{name}"] = round(statistics.median(one / own for one, own in pairs), 2)
    return {"rounds": rounds, **found, "astray": astray}


def waiting(case: Case, folder: str) -> dict[str, object]:
    """Measure how late a message is at a consumer that waits, beyond transfer_after; and what an idle bridge costs."""
    ours = Ours(folder, case)
    source, to = ours.queues
    over, used = threading.Event(), list[float]()

    def serve() -> None:
        ours.bridge.run(over.wait)

    def idle() -> None:
        began = time.thread_time()
        until = time.monotonic() + IDLE
        ours.bridge.run(lambda seconds: time.sleep(seconds) is not None or time.monotonic() > until)
        used.append(time.thread_time() - began)

    late = list[float]()
    thread = threading.Thread(target=serve)
    thread.start()
    with to.subscribe() as subscription:
        for number in range(case.messages):
            sender = threading.Timer(1 + number / case.messages, lambda: source.send(repr(time.time()).encode()))
            sender.start()
            message = subscription.receive(60)
            assert message is not None
            late.append(time.time() - float(message.body) - AFTER)
            message.ack()
        over.set()
        thread.join()
        watched = threading.Thread(target=idle)
        watched.start()
        assert subscription.receive(IDLE + 1) is None
        watched.join()
    percent = round(100 * used[0] / IDLE, 2)
    return {
        "p50_ms": round(statistics.median(late) * 1000),
        "most_ms": round(max(late) * 1000),
        "idle_percent": percent,
    }


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, CASES, row))
