"""What goes out with an ack outlives a power cut, or the message waits: a guest works at durability `full`.

Three queues send to two others, of which one is synced at `full`: a queue that keeps its history, one that keeps none,
and one that syncs nothing itself. What had been acknowledged before the cut is archived, or gone, and each message that
was made of it is in its queue once, whole. What was under way was sent as a whole, or it waits and nothing was sent.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from forks import DIED, forked
from helpers import AT_ONCE, timed

from dropq import Message, Out, Queue, Root
from dropq.staging import fan_out
from torture.account import body, found_in, in_short, look, name_of, plainly
from torture.guest import never_write_back, say
from torture.table import Options, Row
from torture.uml import cut_power

#: The queues that work is taken from, and what is special about each; those that it is sent to.
SOURCES: dict[str, dict[str, Any]] = {
    "keeping": {"durability": "full"},
    "forgetting": {"durability": "full", "history": False},
    "loose": {"durability": "none"},
}
GOALS: dict[str, dict[str, Any]] = {"full": {"durability": "full"}, "file": {"durability": "file"}}
#: How many lines the guest says at the most before its power is cut.
LINES = 300
#: How many messages are made of one, at the most.
MANY = 5


def row(options: Options, system: str, mount: str, cuts: int, rng: random.Random) -> Row:
    """Cut the power of guests that send with their acks, so many times."""
    found = Row(f"what goes out with an ack: {system}", kills=cuts)
    for number in range(cuts):
        folder = options.folder / f"outputs-{system}-{number}"
        lines, pause, seed = rng.randrange(20, LINES), rng.random() / 20, rng.randrange(1 << 30)
        reckon(found, *cut_power(folder, __name__, system, [mount], lines=lines, pause=pause, seed=seed))
    return found


# -- inside --------------------------------------------------------------------------------------------------------


def work(disk: Path, seed: int) -> None:
    """Send messages, and acknowledge each with others; say each before, and once it is done."""
    never_write_back()
    root = Root.create(disk / "root")
    queues = [root.create_queue(name, redelivery_delay=0, **options) for name, options in SOURCES.items()]
    for name, options in GOALS.items():
        root.create_queue(name, **options)
    os.sync()  # the last one
    chance = random.Random(seed)
    number = 0
    while True:
        queue = chance.choice(queues)
        name = f"{queue.name}-{number}"
        number += 1
        say(f"try {name}")
        queue.send(body(name, chance.randrange(20_000)))
        say(f"sent {name}")
        if chance.random() < 0.2:
            _left_to_a_sweep(queue, name, chance)
        else:
            message = queue.receive()
            assert message is not None
            _ack(message, chance)


def _ack(message: Message, chance: random.Random) -> None:
    """Acknowledge a message with some others, one at least for the queue that is synced at `full`."""
    name = name_of(message.body)
    made = {
        f"{name}.{number}": chance.choice(list(GOALS)) if number else "full"
        for number in range(chance.randint(1, MANY))
    }
    say(f"take {name} {' '.join(made)}")
    message.ack(send=[Out(to, body(part, chance.randrange(50_000))) for part, to in made.items()])
    say(f"acked {name}")


def _left_to_a_sweep(queue: Queue, name: str, chance: random.Random) -> None:
    """Let a program die that has committed its ack, and a sweep go on with it."""

    def die() -> None:
        with mock.patch.object(fan_out, "roll_forward", side_effect=lambda *_, **__: os._exit(DIED)):
            message = Root(queue.root.path).queue(queue.name).receive()
            assert message is not None
            _ack(message, chance)

    assert forked(die) == DIED
    queue.sweep()
    say(f"acked {name}")


def inspect(disk: Path) -> dict[str, Any]:
    """Sweep, and tell where all lies; then take all that waits, and tell it again."""
    root = timed(Root(disk / "root"), AT_ONCE)

    def sweep() -> None:
        for queue in root.queues():
            queue.sweep(unleased_older_than=0)

    sweep()
    first = plainly(look(disk / "root"))
    for queue in root.queues():
        with queue.subscribe() as subscription:
            while (message := subscription.receive()) is not None:
                message.ack()
    sweep()
    last = plainly(look(disk / "root"))
    staged = [file for queue in root.queues() for _, _, files in os.walk(queue.layout.staged) for file in files]
    return {"first": first, "last": last, "staged": staged}


# -- outside again -------------------------------------------------------------------------------------------------


def reckon(row: Row, said: Iterable[str], seen: dict[str, Any]) -> None:
    """Hold what lies on a disk against what was said before the cut, and fill in a row.

    Args:
        row: the row.
        said: the guest's lines: `try`, `sent` or `acked` and a name, or `take`, a name, and what is made of it.
        seen: what `inspect` returned, as it comes out of JSON.
    """
    sent, acked, made = set[str](), set[str](), dict[str, list[str]]()
    tried = set[str]()
    for line in said:
        verb, *names = line.split()
        match verb:
            case "failed":
                row.wrong.append(line)
            case "try":
                tried.update(names)
            case "sent":
                sent.update(names)
            case "take":
                made[names[0]] = names[1:]
            case "acked":
                acked.update(names)
    row.cases += len(made)
    for when in ("first", "last"):
        found = found_in(seen[when])
        places = {name: [in_short(each) for each in lies] for name, lies in found.locations.items()}
        if when == "last":
            row.wrong += [f"{name} stays in {lies}" for name, lies in places.items() if "processed" not in lies[0]]
        # A body that nobody synced may be partly written, also where the message was acknowledged.
        row.wrong += [f"{when} look: {path} is not whole" for path in found.damaged if "/loose/" not in path]
        known = tried | {part for parts in made.values() for part in parts}
        row.wrong += [f"{when} look: {name} was never sent" for name in places.keys() - known]
        for name in sorted(tried):
            _reckon_one(row, when, name, places, sent=name in sent, acked=name in acked, parts=made.get(name, []))
    row.wrong += [f"{file} is left in staged/" for file in seen["staged"]]


def _reckon_one(
    row: Row, when: str, name: str, places: dict[str, list[str]], *, sent: bool, acked: bool, parts: list[str]
) -> None:
    """Hold one message, and what was made of it, against what was said of it."""
    queue = name.partition("-")[0]
    lies, counts = places.get(name, []), [len(places.get(part, [])) for part in parts]
    where = f"{when} look: {name} lies in {lies}, and what was made of it in {[places.get(part) for part in parts]}"
    committed = any(counts)
    if len(lies) > 1 or any(count > 1 for count in counts):
        row.doubled += 1
        row.wrong.append(f"{where}: doubled")
    if committed and not all(counts):
        row.lost += 1
        row.wrong.append(f"{where}: a part was sent")
    if acked and not committed:
        row.lost += 1
        row.wrong.append(f"{where}: it had been acknowledged")
    archived = [] if queue == "forgetting" else [f"{queue}/processed"]
    if (acked or committed) and lies != archived and not (queue == "loose" and not lies):
        row.wrong.append(f"{where}: it is to be archived")
    if sent and not committed and not lies and queue != "loose" and not (queue == "forgetting" and when == "last"):
        row.lost += 1
        row.wrong.append(f"{where}: lost")
    if not committed and lies and when == "first" and lies[0].rpartition("/")[2] not in ("target", "processing"):
        row.wrong.append(f"{where}: nobody had settled it")
