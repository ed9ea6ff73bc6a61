"""Measure where the time of a message goes, call by call: what the system calls take, and what is left for Python.

Messages are sent one after the other, and then each is received, read and acknowledged, as a consumer does it. A clock
stands around each verb and around each system call within, and what the clocks take is taken off. What the calls do
not take is Python's: dropq's own code, which runs with cold caches between two calls of the kernel. How many bytecodes
that is does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any

import dropq
from bench import scratch
from dropq.storage import clock, exclusive_rename, files, reading, system_calls

BODY = bytes(1024)
#: The modules that make them.
MODULES = (clock, exclusive_rename, files, reading, system_calls)
#: What is looked at: the calls that dropq makes for a message. Of a rename that replaces nothing there is another name.
CALLS = ("open", "write", "fsync", "close", "rename", "read", "lstat", "scandir")
#: How often a call is made for a message at the least, to be told: a listing serves many.
OFTEN = 0.5
#: Messages whose bytecodes are counted; of each verb the median counts, without what is done each second.
COUNTED = 100


class Clock:
    """Adds up how long calls take, and how many there were, by verb and call."""

    def __init__(self) -> None:
        self.took: Counter[tuple[str, str]] = Counter()
        self.count: Counter[tuple[str, str]] = Counter()
        self.verb = ""

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that is timed."""
        took, count, now = self.took, self.count, time.perf_counter_ns

        def timed(*args: Any, **options: Any) -> Any:
            before = now()
            try:
                return call(*args, **options)
            finally:
                took[self.verb, name] += now() - before
                count[self.verb, name] += 1

        return timed

    @contextmanager
    def around_system_calls(self) -> Iterator[None]:
        """Time the system calls that dropq makes meanwhile."""
        kept = system_calls._renameat2

        class Stand:
            def __getattr__(self, name: str) -> Any:
                return getattr(os, name)

        stand = Stand()
        for name in CALLS:
            setattr(stand, name, self.around(name, getattr(os, name)))
        for module in MODULES:
            module.os = stand  # type: ignore[attr-defined]
        if kept is not None:
            system_calls._renameat2 = self.around("renameat2", kept)  # type: ignore[assignment]
        try:
            yield
        finally:
            system_calls._renameat2 = kept
            for module in MODULES:
                module.os = os  # type: ignore[attr-defined]

    def own_cost(self) -> tuple[float, float]:
        """Return the nanoseconds that a clock adds to what it measures, and to what it stands in."""
        nothing, times = self.around("nothing", lambda: None), 20_000
        before = time.perf_counter_ns()
        for _ in range(times):
            nothing()
        around = (time.perf_counter_ns() - before) / times
        within = self.took.pop((self.verb, "nothing")) / self.count.pop((self.verb, "nothing"))
        return within, around - within


@contextmanager
def verbs_of(base: str, durability: str) -> Iterator[tuple[dropq.Queue, dict[str, Callable[..., Any]]]]:
    """Make a queue; yield it with the verbs of the life of its messages."""
    with (
        scratch(base) as folder,
        dropq.Root.create(folder).create_queue("q", durability=durability) as queue,
        queue.subscribe() as subscription,
    ):
        body, ack = attrgetter("body"), methodcaller("ack")
        yield queue, {"send": queue.send, "receive": subscription.receive, "body": body, "ack": ack}


def bytecodes(base: str, durability: str) -> dict[str, int]:
    """Return how many bytecodes of Python each verb takes for a message."""
    counts = defaultdict[str, list[int]](list)

    def count(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[verb][-1] += event == "opcode"
        return count

    def run(name: str, *args: Any) -> Any:
        nonlocal verb
        counts[verb := name].append(0)
        sys.settrace(count)
        try:
            return verbs[name](*args)
        finally:
            sys.settrace(None)

    verb = ""
    with verbs_of(base, durability) as (_, verbs):
        work(run, COUNTED)
    return {name: int(statistics.median(each)) for name, each in counts.items()}


def context(base: str, durability: str, messages: int) -> Clock:
    """Send, then receive, read and acknowledge so many messages; time the verbs, and the system calls within."""
    clock = Clock()
    with verbs_of(base, durability) as (queue, verbs):
        timed = {verb: clock.around("", call) for verb, call in verbs.items()}

        def run(verb: str, *args: Any) -> Any:
            clock.verb = verb
            return timed[verb](*args)

        with clock.around_system_calls():
            work(run, messages)
        assert queue.counts()["processed"] == messages
    return clock


def work(run: Callable[..., Any], messages: int) -> None:
    """Let messages live."""
    for _ in range(messages):
        run("send", BODY)
    while (message := run("receive")) is not None:
        run("body", message)
        run("ack", message)


def rows(medium: str, base: str, durability: str, messages: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each verb: what it takes, what each call takes of that, and what is left."""
    within, around = Clock().own_cost()
    clocks = [context(base, durability, messages) for _ in range(rounds)]
    executed = bytecodes(base, durability)

    def median(microseconds: Callable[[Clock], float]) -> float:
        return round(statistics.median(microseconds(clock) / messages / 1000 for clock in clocks), 1)

    for verb in ("send", "receive", "body", "ack"):
        counts = {name: count / messages for (of, name), count in clocks[-1].count.items() if of == verb and name}
        counts = {name: count for name, count in counts.items() if count >= OFTEN}

        def call(clock: Clock, name: str, verb: str = verb) -> float:
            return clock.took[verb, name] - within * clock.count[verb, name]

        def rest(clock: Clock, verb: str = verb) -> float:
            calls = [(name, count) for (of, name), count in clock.count.items() if of == verb and name]
            return call(clock, "", verb) - sum(clock.took[verb, name] + around * count for name, count in calls)

        each = {name: median(lambda clock, name=name: call(clock, name)) for name in counts}  # type: ignore[misc]
        row = {
            "what": verb,
            "on": medium,
            "durability": durability,
            "rest_us": median(rest),
            "bytecodes": executed[verb],
        }
        yield row | {"calls": {name: round(count) for name, count in counts.items()}, "calls_us": each}


def main() -> int:
    """Print a line of JSON for each verb, place and durability."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tmpfs", default="/dev/shm", metavar="DIR")
    parser.add_argument("--disk", default=".", metavar="DIR")
    given = parser.parse_args()
    for medium, base, durability, messages in (
        ("tmpfs", given.tmpfs, "none", given.messages),
        ("disk", given.disk, "none", given.messages),
        ("disk", given.disk, "full", max(given.messages // 10, 1)),
    ):
        for row in rows(medium, base, durability, messages, given.rounds):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
