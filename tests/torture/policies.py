"""Many messages under each policy: consumers drain a queue, and each message is handed out once, by the policy's rules.

The messages are made, and the folders read, by plain system calls. Consumers note when each message was given to them,
and when they began to settle it; nobody dies here.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from helpers import until

from dropq import Root
from torture.table import Options, Row

#: Messages of a queue, in the long form and in the short one; how many consumers there are.
LONG, SHORT, CONSUMERS = 100_000, 1_000, 3
#: Every so many messages one is a barrier: ten in all.
BARRIERS = 10
#: How many messages all consumers may hold together where that is limited.
MOST = 2
#: Of what is wrong, as many lines are told.
FEW = 5
#: Seconds for which a consumer waits for a message before it looks whether any is left.
WAIT = 0.5


class Given(NamedTuple):
    """A message that a consumer was given: its number, what it holds, when it came and when its ack began, in ns."""

    number: int
    urgency: int
    given: int
    settled: int


@dataclass(frozen=True)
class Policy:
    """A policy: what it is called in the table, its configuration, and what breaks its rules."""

    told: str
    options: dict[str, Any]
    broken: Callable[[list[list[Given]], int], list[str]] = lambda consumers, every: []


def _out_of_order(consumers: list[list[Given]], every: int) -> list[str]:
    """Find what came after something less urgent: nothing comes while consumers drain, so urgency only falls."""
    return [
        f"message {after.number} of urgency {after.urgency} came after one of {before.urgency}"
        for seen in consumers
        for before, after in pairwise(seen)
        if after.urgency > before.urgency
    ]


def _across_barriers(consumers: list[list[Given]], every: int) -> list[str]:
    """Find what is behind a barrier, or is one, and was given before all that is before it was settled."""
    wrong: list[str] = []
    lanes: list[list[Given]] = [[] for _ in range(2 * BARRIERS)]
    for one in chain.from_iterable(consumers):
        lanes[2 * (one.number // every) + (one.number % every == every - 1)].append(one)
    for number, (before, after) in enumerate(pairwise(lanes)):
        if before and after and max(one.settled for one in before) > min(one.given for one in after):
            wrong.append(f"lane {number + 1} began before lane {number} was settled")
    return wrong


POLICIES = {
    "max_backlog": Policy("max_backlog", {"max_backlog": MOST}),
    "round-robin": Policy("round-robin", {"fairness_model": "round-robin"}),
    "proportional": Policy("proportional", {"fairness_model": "proportional"}),
    "barriers": Policy("barriers", {"barrier_expression": "JMSType = 'sync'"}, _across_barriers),
    "priority": Policy("priority by the body", {"priority": "/urgency"}, _out_of_order),
}


def run(options: Options) -> Iterable[Row]:
    """Return a row for each policy."""
    return [drain(options.folder / name, name, LONG if options.long else SHORT) for name in POLICIES]


def drain(folder: Path, name: str, count: int) -> Row:
    """Let consumers drain a queue of so many messages under a policy."""
    policy, every = POLICIES[name], count // BARRIERS
    queue = Root.create(folder / "root").create_queue("q", durability="none", **policy.options)
    home = Path(queue.layout.base)
    _fill(home, count, every if name == "barriers" else 0)
    with ProcessPoolExecutor(CONSUMERS, mp_context=get_context("spawn")) as pool:
        seen = list(pool.map(_consume, [folder] * CONSUMERS))
    row = Row(f"{CONSUMERS} consumers: {policy.told}", cases=count)
    _account(row, home, seen, count, every if name == "barriers" else 0)
    row.wrong += policy.broken(seen, every)[:FEW]
    return row


def _fill(home: Path, count: int, every: int) -> None:
    """Send messages as a script does that names them as dropq would; every so many one is a barrier, 0 for none."""
    began = int(time.time() * 1000) - count
    for number in range(count):
        kind = "....sync" if every and number % every == every - 1 else ""
        file = f"4.{began + number:013d}000-{number:010d}.B{kind}"
        (home / "working" / file).write_text(json.dumps({"number": number, "urgency": number * 7919 % 1000}))
        os.rename(home / "working" / file, home / "target" / file)


def _consume(folder: Path) -> list[Given]:
    """Take and settle messages until none is left; begin when all are there."""
    queue = Root(folder / "root").queue("q")
    base, most, seen = queue.layout.base, queue.config.max_backlog, list[Given]()
    with queue.subscribe() as subscription:
        (folder / f"ready-{subscription.id}").touch()
        until(lambda: len(list(folder.glob("ready-*"))) == CONSUMERS, "all consumers to begin")
        while True:
            message = subscription.receive(WAIT)
            if message is None:
                if not os.listdir(f"{base}/target") and not os.listdir(f"{base}/processing"):
                    return seen
                continue
            given, said = time.monotonic_ns(), json.loads(message.body)
            held = os.listdir(f"{base}/processing")
            if most is not None and len(held) > most:
                raise AssertionError(f"{len(held)} are held, of {most}: {held}")
            seen.append(Given(said["number"], said["urgency"], given, time.monotonic_ns()))
            message.ack()


def _account(row: Row, home: Path, seen: list[list[Given]], count: int, every: int) -> None:
    """See that each message was given once, a barrier once to each, and lies in processed/ once."""
    handed = Counter(one.number for consumer in seen for one in consumer)
    wanted = {number: CONSUMERS if every and number % every == every - 1 else 1 for number in range(count)}
    row.wrong += [f"{number} was given {handed[number]} times, not {times}"
                  for number, times in wanted.items() if handed[number] != times][:FEW]  # fmt: skip
    lying = Counter(json.loads((home / "processed" / file).read_text())["number"]
                    for file in os.listdir(home / "processed"))  # fmt: skip
    row.lost = sum(not lying[number] for number in wanted)
    row.doubled = sum(times > 1 for times in lying.values())
    row.wrong += [f"{state}/ is not empty" for state in ("target", "error", "expired") if os.listdir(home / state)]
