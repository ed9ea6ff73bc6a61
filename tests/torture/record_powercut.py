"""What of bundles outlives a power cut: a guest sends records, and settles them one by one, at durability `full`.

What was settled before the cut is settled afterwards: a record that was acknowledged does not come again, one that was
rejected lies in error/ with its reason, and one that was given back, or left, waits. What was under way waits as well,
or is settled as the guest was about to, and no record is in two places.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from helpers import AT_ONCE, timed

from dropq import Message, Queue, Root
from torture.guest import never_write_back, say
from torture.table import Options, Row
from torture.uml import cut_power

#: How many lines the guest says at the most before its power is cut.
LINES = 400
#: How many records a bundle has, at the most.
MANY = 12
#: What becomes of a record, and how often; a bundle that the guest does not take to its end leaves the rest.
FATES = {"acked": 8, "rejected": 1, "nacked": 1}
STATES = ("target", "processing", "processed", "error", "expired", "delayed")
#: Where a record may be, by what was said of it last; in processed/ lies a bundle of which nothing was left, as it is.
PLACES = {
    "sent": {"target", "processing"},
    "acked": {"processed"},
    "rejected": {"error"},
    "nacked": {"target", "processing"},
    "left": {"target", "processing"},
    "take": {"target", "processing", "processed", "error"},
}

_RECORD = re.compile(rb"(bundle-\d+:\d+) x*[.]")


def row(options: Options, system: str, mount: str, cuts: int, rng: random.Random) -> Row:
    """Cut the power of guests that settle records, so many times."""
    found = Row(f"bundles settled record by record: {system}", kills=cuts)
    for number in range(cuts):
        folder = options.folder / f"records-{system}-{number}"
        lines, pause, seed = rng.randrange(20, LINES), rng.random() / 20, rng.randrange(1 << 30)
        reckon(found, *cut_power(folder, __name__, system, [mount], lines=lines, pause=pause, seed=seed))
    return found


# -- inside --------------------------------------------------------------------------------------------------------


def work(disk: Path, seed: int) -> None:
    """Send bundles and settle them, for ever; say each record before, and what became of it."""
    never_write_back()
    queue = Root.create(disk / "root").create_queue("q", durability="full", redelivery_delay=0)
    os.sync()  # the last one
    chance = random.Random(seed)
    number = 0
    while True:
        for _ in range(chance.randint(1, 3)):
            _send(queue, f"bundle-{number}", chance)
            number += 1
        with queue.subscribe() as subscription:
            for _ in range(chance.randint(1, 4)):
                if (message := subscription.receive(timeout=0)) is not None:
                    _settle(message, chance)


def _send(queue: Queue, bundle: str, chance: random.Random) -> None:
    """Send a bundle as one message, or by a record writer."""
    names = [f"{bundle}:{one}" for one in range(chance.randint(1, MANY))]
    lines = [f"{name} {'x' * chance.randrange(2000)}." for name in names]
    say(f"try {' '.join(names)}")
    if chance.random() < 0.5:
        queue.send("".join(f"{line}\n" for line in lines), type="text")
    else:
        with queue.record_writer("text") as out:
            for line in lines:
                out.write(line)
    say(f"sent {' '.join(names)}")


def _settle(message: Message, chance: random.Random) -> None:
    """Settle some records of a message, or all; then what is left of it."""
    taken = [name for _, name in _records(message)]
    say(f"take {' '.join(taken)}")
    fates: dict[str, list[str]] = {fate: [] for fate in FATES}
    left = set(taken)
    stops = chance.randrange(len(taken)) if chance.random() < 0.3 else None
    for at, record in enumerate(message.records()):
        if at == stops:
            break
        fate = chance.choices(list(FATES), list(FATES.values()))[0]
        name = record.text.partition(" ")[0]
        fates[fate].append(name)
        left.remove(name)
        if fate == "rejected":
            record.reject("as it comes")
        else:
            record.ack() if fate == "acked" else record.nack()
    if message.held:
        chance.choice((message.release, message.nack))()
    for fate, names in [*fates.items(), ("left", sorted(left))]:
        if names:
            say(f"{fate} {' '.join(names)}")


def _records(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the records of a message, each with the message's reason."""
    reason = str((message.reason or {}).get("detail", "")) if message.state == "error" else ""
    yield from ((reason, name.decode()) for name in _RECORD.findall(message.body))


def inspect(disk: Path) -> dict[str, Any]:
    """Sweep, and tell where each record lies; then settle all that waits, and tell it again."""
    queue = timed(Root(disk / "root"), AT_ONCE).queue("q")
    queue.sweep(unleased_older_than=0)
    first = [(state, *found) for state in STATES for message in queue.browse(state) for found in _records(message)]
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            record.ack()
    queue.sweep()
    last = [(state, *found) for state in STATES for message in queue.browse(state) for found in _records(message)]
    staged = [file for _, _, files in os.walk(queue.layout.staged) for file in files]  # a fence is none
    return {"first": first, "last": last, "staged": staged}


# -- outside again -------------------------------------------------------------------------------------------------


def reckon(row: Row, said: Iterable[str], seen: dict[str, Any]) -> None:
    """Hold what lies on a disk against what was said before the cut, and fill in a row.

    Args:
        row: the row.
        said: the guest's lines: `try`, or a key of PLACES, followed by names of records.
        seen: what `inspect` returned, as it comes out of JSON.
    """
    tried, fate = set[str](), dict[str, str]()
    for line in said:
        verb, *names = line.split()
        if verb == "failed":
            row.wrong.append(line)
        elif verb == "try":
            tried.update(names)
        elif verb in PLACES:
            fate.update(dict.fromkeys(names, verb))
    row.cases += len(fate)
    for when in ("first", "last"):
        there: dict[str, Counter[str]] = {}
        for state, _, name in seen[when]:
            there.setdefault(name, Counter())[state] += 1
        row.wrong += [f"{when} look: {name} was never sent" for name in there if name not in tried]
        for name, verb in fate.items():
            states = there.get(name, Counter())
            row.lost += not states
            row.wrong += [f"{when} look: {name} was {verb}, and is nowhere"] if not states else []
            archived = states.pop("processed", 0)
            if states.total() > 1:
                row.doubled += 1
                row.wrong.append(f"{when} look: {name} was {verb}, and is in {dict(states)}")
            found_in = set(states) or ({"processed"} if archived else set())
            allowed = PLACES[verb] if when == "first" else {"processed", "error"}
            row.wrong += [f"{when} look: {name} was {verb}, and is in {where}" for where in found_in - allowed]
    unexplained = [name for state, reason, name in seen["first"] if state == "error" and reason != "as it comes"]
    row.wrong += [f"{name} was rejected, and nothing says why" for name in unexplained]
    row.wrong += [f"{file} is left in staged/" for file in seen["staged"]]
