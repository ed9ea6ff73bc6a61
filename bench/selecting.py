"""Measure selectors beside the raw loop of system calls, and beside a loop of `mv` in a shell.

In each round all run one after the other, and what counts are the ratios within a round. The raw loop lists target/ and
renames each file into the next target/, in folders of the same names; for copies it writes each file once more for each
queue, and renames the file itself to processed/. It has no credits, and replaces what has the same name. The loop of
`mv` does the same with a command for each file.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from beside import RawCalls, compared, print_rows

import dropq
from bench import scratch
from dropq.format.credits import Credit, Via
from dropq.lifecycle import credits
from dropq.routing.router import Router

KIB = 1 << 10
BODY = b"x" * KIB
#: How the keys of credits begin that are spent on what waits downstream.
KEPT = "0000"
#: A loop of `mv`, for a folder and a folder that it moves to.
MV = 'for file in "$1"/*; do mv -n "$file" "$2"/; done'


class Case(NamedTuple):
    """What is measured: which selectors, how many messages a round, and how many wait downstream already."""

    what: str
    durability: str
    messages: int
    downstream: int = 0

    @property
    def on(self) -> str:
        """Where it is measured."""
        return "disk" if self.durability == "full" else "tmpfs"

    @property
    def name(self) -> str:
        """What `--only` finds it by."""
        return f"{self.on} {self.what} {self.downstream}"


CASES = (
    Case("one MOVE", "none", 400),
    Case("one MOVE", "none", 400, downstream=10),
    Case("one MOVE", "none", 400, downstream=100_000),
    Case("a chain of three", "none", 200),
    Case("a chain of five", "none", 200),
    Case("one COPY to 10", "none", 50),
    Case("MOVE under a credit of 1, and its ack", "none", 200),
    Case("one MOVE", "full", 40),
    Case("one COPY to 10", "full", 10),
)
#: How many queues a chain has.
CHAINS = {"one MOVE": 2, "a chain of three": 3, "a chain of five": 5, "MOVE under a credit of 1, and its ack": 2}


def names(case: Case) -> list[str]:
    """Return the names of the queues of a case, the first where messages are sent."""
    return ["q0", *(f"q{n}" for n in range(1, CHAINS.get(case.what, 11)))]


class Raw(RawCalls):
    """The raw loop of system calls."""

    def __init__(self, folder: str, case: Case) -> None:
        super().__init__(syncs=case.durability == "full")
        self._case = case
        self.homes = [f"{folder}/raw/{name}" for name in names(case)]
        for home in self.homes:
            for state in ("target", "working", "processed"):
                os.makedirs(f"{home}/{state}")

    def run(self) -> None:
        """Do with what waits what the selectors say."""
        first, *others = self.homes
        if self._case.what.startswith("one COPY"):
            for file in os.listdir(f"{first}/target"):
                for home in others:
                    self.copy(file, BODY, home)
                self.rename(f"{first}/target/{file}", f"{first}/processed/{file}")
        elif "credit of 1" in self._case.what:
            for file in sorted(os.listdir(f"{first}/target")):
                self.rename(f"{first}/target/{file}", f"{others[0]}/target/{file}")
                (waiting,) = os.listdir(f"{others[0]}/target")
                self.rename(f"{others[0]}/target/{waiting}", f"{others[0]}/processed/{waiting}")
        else:
            for home, following in zip(self.homes, others, strict=False):
                for file in os.listdir(f"{home}/target"):
                    if file.startswith("4."):
                        self.rename(f"{home}/target/{file}", f"{following}/target/{file}")


class Ours:
    """Selectors of dropq."""

    def __init__(self, folder: str, case: Case) -> None:
        root = dropq.Root.create(f"{folder}/own")
        queues = [root.create_queue(name, durability=case.durability) for name in names(case)]
        self.homes = [queue.layout.home for queue in queues]
        self._acks = "credit of 1" in case.what
        self._first, self._last = queues[0], queues[-1]
        if case.what.startswith("one COPY"):
            for queue in queues[1:]:
                queues[0].add_selector(queue.name, op="copy", to=queue.name)
        else:
            for queue, following in itertools.pairwise(queues):
                queue.add_selector("on", to=following.name, credit=1 if self._acks else 1_000_000)
        self._routers = [Router(queue.context, sweep=None) for queue in queues[:-1]]

    def spend(self, count: int) -> None:
        """Spend credits on messages that wait downstream."""
        (selector, *_) = self._first.selectors()
        if count:
            os.makedirs(f"{self._first.layout.credits}/{selector.token}", exist_ok=True)
        for number in range(count):
            via, credit = Via(selector.token, f"{KEPT}{number:06}"), Credit(f"waits-{number:06}", self._last.name)
            credits.spend(self._first.context, via, credit)

    def run(self) -> None:
        """Do with what waits what the selectors say."""
        if not self._acks:
            for router in self._routers:
                router.one_pass()
            return
        with self._last.subscribe() as subscription:
            while True:
                self._routers[0].one_pass()
                message = subscription.receive(timeout=0)
                if message is None:
                    return
                message.ack()


def by_mv(homes: list[str]) -> Callable[[], None]:
    """Return what moves all that waits by a loop of `mv`."""

    def run() -> None:
        for home, following in itertools.pairwise(homes):
            subprocess.run(["sh", "-c", MV, "mv", f"{home}/target", f"{following}/target"], check=True)

    return run


def fill(home: str, messages: int, first: int) -> None:
    """Let messages wait."""
    for number in range(first, first + messages):
        with open(f"{home}/target/4.{1795383089375000 + number}-7523895424.B", "wb") as file:
            file.write(BODY)


def taken(homes: list[str], run: Callable[[], None], case: Case, first: int) -> float:
    """Return the microseconds that a message takes, in a round of so many."""
    fill(homes[0], case.messages, first)
    if case.on == "disk":
        os.sync()  # what those before it wrote is not for it to wait for
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) / case.messages * 1e6


def clear(homes: list[str], case: Case) -> tuple[int, int]:
    """Remove what a round left; return how many messages were lost, and how many were too many."""
    ends = homes[1:] if case.what.startswith("one COPY") else homes[-1:]
    state = "processed" if "credit of 1" in case.what else "target"
    found = [[name for name in os.listdir(f"{home}/{state}") if name.startswith("4.")] for home in ends]
    lost = sum(max(case.messages - len(files), 0) for files in found)
    doubled = sum(max(len(files) - case.messages, 0) for files in found)
    for home in homes:
        for folder in ("target", "processed"):
            for name in os.listdir(f"{home}/{folder}"):
                if name.startswith("4."):
                    os.unlink(f"{home}/{folder}/{name}")
        spent = f"{home}/.dropq/credits"
        for token in os.listdir(spent) if os.path.isdir(spent) else ():
            for key in os.listdir(f"{spent}/{token}"):
                if not key.startswith((KEPT, ".")):
                    os.unlink(f"{spent}/{token}/{key}")
    return lost, doubled


def row(case: Case, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    times: dict[str, list[float]] = {"raw": [], "dropq": [], "mv": []}
    lost = doubled = 0
    with scratch(base) as folder:
        raw, own = Raw(folder, case), Ours(folder, case)
        mv = Raw(f"{folder}/shell", case)
        loops = [("raw", raw.homes, raw.run), ("dropq", own.homes, own.run)]
        if case.what in ("one MOVE", "a chain of three"):
            loops.append(("mv", mv.homes, by_mv(mv.homes)))
        for _, homes, _ in loops:
            for number in range(case.downstream):
                with open(f"{homes[-1]}/target/0.waits-{number:06}.B", "wb"):
                    pass
        own.spend(case.downstream)
        for number in range(rounds + 1):
            for name, homes, run in loops if number % 2 else loops[::-1]:
                took = taken(homes, run, case, number * case.messages)
                gone, twice = clear(homes, case)
                if number:  # what is opened once was opened in the first round
                    times[name].append(took)
                lost, doubled = lost + gone, doubled + twice
    found: dict[str, object] = {
        "what": case.what,
        "on": case.on,
        "durability": case.durability,
        "downstream": case.downstream,
        "rounds": rounds,
        "a_round": case.messages,
        **compared(times["raw"], times["dropq"]),
        "messages_per_second": round(1e6 / statistics.median(times["dropq"])),
        "lost": lost,
        "doubled": doubled,
    }
    if times["mv"]:
        found["mv_us"] = round(statistics.median(times["mv"]))
    return found


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, CASES, row))
