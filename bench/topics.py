"""Measure topics beside the raw loop that copies and renames: one publish to many, and what scripts published.

In each round both run one after the other, and what counts are the ratios within a round. The raw loop works in folders
of the same names. For a message it writes the file in working/, writes a copy for each subscription in that one's
working/ and renames it to target/, and renames the file itself to processed/. Where the durability is `full` it syncs
each file, and after each rename both folders, as dropq does. What a script published lies in target/: the raw loop
lists that, reads each file, and goes on as before.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NamedTuple, Protocol

from beside import RawCalls, compared, print_rows

import dropq
from bench import scratch
from dropq.storage.reading import SETTLED_NS
from dropq.storage.system_calls import READ
from dropq.topics.distribution import Distributor

KIB, MIB = 1 << 10, 1 << 20
STATES = ("working", "target", "processed")


class Case(NamedTuple):
    """What is measured: how many subscriptions, how long a body, and how many messages a round."""

    on: str
    durability: str
    subscriptions: int
    size: int
    messages: int
    by_script: bool = False

    @property
    def what(self) -> str:
        """What it is called."""
        verb = "distribute what a script sent" if self.by_script else "publish"
        return f"{verb}, {self.size // MIB} MiB" if self.size >= MIB else f"{verb}, {self.size // KIB} KiB"

    @property
    def name(self) -> str:
        """What `--only` finds it by."""
        return f"{self.on} {self.what} {self.subscriptions}"


#: To 100 a body of 10 MiB is a gigabyte a message: that is measured in memory alone.
CASES = (
    Case("tmpfs", "none", 1, KIB, 400),
    Case("tmpfs", "none", 10, KIB, 100),
    Case("tmpfs", "none", 100, KIB, 20),
    Case("tmpfs", "none", 1, 10 * MIB, 10),
    Case("tmpfs", "none", 10, 10 * MIB, 3),
    Case("tmpfs", "none", 100, 10 * MIB, 1),
    Case("tmpfs", "none", 1, KIB, 400, by_script=True),
    Case("tmpfs", "none", 10, KIB, 100, by_script=True),
    Case("tmpfs", "none", 100, KIB, 20, by_script=True),
    Case("tmpfs", "none", 10, 10 * MIB, 3, by_script=True),
    Case("disk", "full", 1, KIB, 40),
    Case("disk", "full", 10, KIB, 10),
    Case("disk", "full", 100, KIB, 3),
    Case("disk", "full", 1, 10 * MIB, 4),
    Case("disk", "full", 10, 10 * MIB, 1),
    Case("disk", "full", 1, KIB, 40, by_script=True),
    Case("disk", "full", 10, KIB, 10, by_script=True),
    Case("disk", "full", 100, KIB, 3, by_script=True),
)


class Loop(Protocol):
    """What publishes, and distributes what waits."""

    @property
    def home(self) -> str:
        """The folder of its topic."""

    def publish(self, number: int, body: bytes) -> None:
        """Publish a message."""

    def distribute(self) -> None:
        """Distribute what waits in target/."""


class Raw(RawCalls):
    """The raw loop of system calls."""

    def __init__(self, folder: str, case: Case) -> None:
        super().__init__(syncs=case.durability == "full")
        self.home = f"{folder}/raw/topic-root/t"
        self._incoming = f"{self.home}/.incoming"
        self._subscriptions = [f"{self.home}/.subscriptions/s{n:03}.c" for n in range(case.subscriptions)]
        for base in (self._incoming, *self._subscriptions):
            for state in STATES:
                os.makedirs(f"{base}/{state}")

    def publish(self, number: int, body: bytes) -> None:
        """Publish a message."""
        file = f"4.{1795383089375000 + number}-7523895424.B"
        self.write(f"{self._incoming}/working/{file}", body)
        self._copy_to_all(file, body)
        self._archive("working", file)

    def distribute(self) -> None:
        """Distribute what waits in target/."""
        for file in sorted(os.listdir(f"{self._incoming}/target")):
            self._copy_to_all(file, read(f"{self._incoming}/target/{file}"))
            self._archive("target", file)

    def _copy_to_all(self, file: str, body: bytes) -> None:
        for base in self._subscriptions:
            self.copy(file, body, base)

    def _archive(self, state: str, file: str) -> None:
        self.rename(f"{self._incoming}/{state}/{file}", f"{self._incoming}/processed/{file}")


class Ours:
    """A topic of dropq."""

    def __init__(self, folder: str, case: Case) -> None:
        topic = dropq.Root.create(f"{folder}/own").create_topic("t", durability=case.durability)
        for n in range(case.subscriptions):
            topic.create_subscription(f"s{n:03}", client_id="c")
        self.home = f"{folder}/own/topic-root/t"
        self._topic = topic
        self._distributor = Distributor(topic.queue.context)

    def publish(self, number: int, body: bytes) -> None:
        """Publish a message."""
        self._topic.publish(body)

    def distribute(self) -> None:
        """Distribute what waits in target/."""
        self._distributor.run()


def read(path: str) -> bytes:
    """Read a file whole."""
    fd = os.open(path, READ)
    try:
        body = os.read(fd, os.fstat(fd).st_size)
        os.read(fd, 1)
        return body
    finally:
        os.close(fd)


def taken(loop: Loop, case: Case, body: bytes, first: int) -> float:
    """Return the microseconds that a message takes, in a round of so many."""
    numbers = range(first, first + case.messages)
    if case.by_script:
        for number in numbers:
            with open(f"{loop.home}/.incoming/working/order-{number:06}", "wb") as file:
                file.write(body)
            os.rename(file.name, f"{loop.home}/.incoming/target/order-{number:06}")
    if case.on == "disk":
        os.sync()  # what those before it wrote is not for it to wait for
    started = time.perf_counter()
    if case.by_script:
        loop.distribute()
    else:
        for number in numbers:
            loop.publish(number, body)
    return (time.perf_counter() - started) / case.messages * 1e6


def clear(loop: Loop, case: Case) -> tuple[int, int]:
    """Remove what a round left; return how many copies were lost, and how many were too many."""
    lost = doubled = 0
    ends = [f"{loop.home}/.incoming/processed"]
    ends += [f"{loop.home}/.subscriptions/s{n:03}.c/target" for n in range(case.subscriptions)]
    for folder in ends:
        files = [name for name in os.listdir(folder) if os.stat(f"{folder}/{name}").st_size == case.size]
        lost += max(case.messages - len(files), 0)
        doubled += max(len(files) - case.messages, 0)
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
    return lost, doubled


def row(case: Case, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    body = b"x" * case.size
    times: dict[type[Loop], list[float]] = {Raw: [], Ours: []}
    lost = doubled = 0
    with scratch(base) as folder:
        loops: list[Loop] = [Raw(folder, case), Ours(folder, case)]
        for loop in loops:
            loop.publish(0, body)  # what is opened once is opened now
            clear(loop, case._replace(messages=1))
        time.sleep(SETTLED_NS / 1e9 + 0.1)  # until then a folder that changed is listed each time
        for number in range(1, rounds + 1):
            for loop in loops if number % 2 else reversed(loops):
                times[type(loop)].append(taken(loop, case, body, number * case.messages))
                gone, twice = clear(loop, case)
                lost, doubled = lost + gone, doubled + twice
    return {
        "what": case.what,
        "on": case.on,
        "durability": case.durability,
        "subscriptions": case.subscriptions,
        "rounds": rounds,
        "a_round": case.messages,
        **compared(times[Raw], times[Ours]),
        "lost": lost,
        "doubled": doubled,
    }


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, CASES, row))
