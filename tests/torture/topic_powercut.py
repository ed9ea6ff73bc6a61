"""What of a topic outlives a power cut: a guest publishes, at durability `full`, until its power is cut.

What had been published lies in each subscription afterwards, and in the topic's processed/, once a sweep has gone on
with what the cut left; what was under way lies in all of them, or in none.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dropq import Root
from dropq.topics.distribution import Distributor
from torture.account import body, name_of
from torture.guest import never_write_back, say
from torture.table import Options, Row
from torture.uml import cut_power

#: The subscriptions of the topic.
SUBSCRIPTIONS = ("audit", "stock", "later")
#: How many lines the guest says at the most before its power is cut.
LINES = 400


def row(options: Options, system: str, mount: str, cuts: int, rng: random.Random) -> Row:
    """Cut the power of guests that publish, so many times."""
    found = Row(f"a topic with three subscriptions: {system}", kills=cuts)
    for number in range(cuts):
        cut_once(options.folder / f"topic-{system}-{number}", system, mount, rng, found)
    return found


def cut_once(folder: Path, system: str, mount: str, rng: random.Random, row: Row) -> None:
    """Let a guest publish, cut its power, boot it again, and reckon up."""
    lines, pause, seed = rng.randrange(20, LINES), rng.random() / 20, rng.randrange(1 << 30)
    reckon(row, *cut_power(folder, __name__, system, [mount], lines=lines, pause=pause, seed=seed))


def work(disk: Path, seed: int) -> None:
    """Publish for ever, as a program or as a script; say each name before, and after it is distributed."""
    never_write_back()
    topic = Root.create(disk / "root").create_topic("t", durability="full")
    for name in SUBSCRIPTIONS:
        topic.create_subscription(name, client_id="c")
    os.sync()  # the last one but for a script's own
    rng = random.Random(seed)
    distributor = Distributor(topic.queue.context)
    number = 0
    while True:
        number += 1
        name = f"message-{number}"
        content = body(name, rng.randrange(20_000))
        say(f"try {name}")
        if rng.random() < 0.7:
            topic.publish(content)
        else:
            _by_script(Path(topic.queue.layout.working), Path(topic.queue.layout.target), name, content)
            while not distributor.run():  # it settles first
                time.sleep(max(distributor.settles_at / 1000 - time.time(), 0))
        say(f"sent {name}")


def _by_script(working: Path, target: Path, name: str, content: bytes) -> None:
    with open(working / name, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(working / name, target / name)


def inspect(disk: Path) -> dict[str, Any]:
    """Sweep the topic, and tell what lies in it, and in each subscription."""
    root = Root(disk / "root")
    topic = root.topic("t")
    topic.queue.sweep(unleased_older_than=0)
    Distributor(topic.queue.context).run()
    queues = [topic.queue, *topic.subscriptions()]
    return {
        queue.name: {
            state: [name_of(message.body) for message in queue.browse(state)]
            for state in ("target", "processing", "processed", "error", "expired", "delayed")
        }
        for queue in queues
    } | {"staged": [file for _, _, files in os.walk(topic.queue.layout.staged) for file in files]}  # a fence is none


def reckon(row: Row, said: Iterable[str], seen: dict[str, Any]) -> None:
    """Hold what lies on a disk against what was said before the cut, and fill in a row.

    Args:
        row: the row.
        said: the guest's lines: `try` or `sent`, followed by a name.
        seen: what `inspect` returned.
    """
    names: dict[str, set[str]] = {"try": set(), "sent": set()}
    for line in said:
        verb, _, name = line.partition(" ")
        if verb in names:
            names[verb].add(name)
        elif verb == "failed":
            row.wrong.append(line)
    row.cases += len(names["sent"])
    there = {queue: Counter(seen[queue]["target"]) for queue in seen if queue not in ("t", "staged")}
    there["t"] = Counter(seen["t"]["processed"])
    if len(there) != len(SUBSCRIPTIONS) + 1:
        row.wrong.append(f"of the subscriptions {sorted(there)} are there")
    for queue, found in there.items():
        lost, doubled = names["sent"] - found.keys(), [name for name, count in found.items() if count > 1]
        row.lost += len(lost)
        row.doubled += len(doubled)
        row.wrong += [f"{name} had been published, and is not in {queue}" for name in sorted(lost)]
        row.wrong += [f"{name} is in {queue} {found[name]} times" for name in doubled]
        row.wrong += [
            f"{name} in {queue} is not whole, or was never sent" for name in found if name not in names["try"]
        ]
    for name in names["try"] - names["sent"]:
        if len(holders := [queue for queue in there if name in there[queue]]) not in (0, len(there)):
            row.wrong.append(f"{name} was under way, and is in {holders} alone")
    left = {
        f"{queue}/{state}": files
        for queue in there
        for state, files in seen[queue].items()
        if files and state != ("processed" if queue == "t" else "target")
    }
    row.wrong += [f"{folder}: {files}" for folder, files in left.items()]
    row.wrong += [f"{file} is left in staged/" for file in seen["staged"]]
