"""What a bridge takes outlives a power cut: a guest with two roots works at durability `full`, and is cut off.

Both roots lie on one disk, so that the cut meets both at once: what had been sent is in one of them once, whole, and
what had been acknowledged is archived once, where it was.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helpers import AT_ONCE, timed

from dropq import Queue, Root
from dropq.carrier.bridge import Bridge
from dropq.policies.wanted import Wanting
from torture.account import body, found_in, in_short, look, name_of, plainly
from torture.guest import never_write_back, say
from torture.table import Options, Row
from torture.uml import cut_power

#: The roots, and the one that each names as its peer.
ROOTS = {"a": "b", "b": "a"}
#: How many lines the guest says at the most before its power is cut, and how many messages are sent between two rounds.
LINES, MANY = 300, 12


def row(options: Options, system: str, mount: str, cuts: int, rng: random.Random) -> Row:
    """Cut the power of guests whose bridges take messages, so many times."""
    found = Row(f"what a bridge takes: {system}", kills=cuts)
    for number in range(cuts):
        folder = options.folder / f"roots-{system}-{number}"
        lines, pause, seed = rng.randrange(20, LINES), rng.random() / 20, rng.randrange(1 << 30)
        reckon(found, *cut_power(folder, __name__, system, [mount], lines=lines, pause=pause, seed=seed))
    return found


# -- inside --------------------------------------------------------------------------------------------------------


def work(disk: Path, seed: int) -> None:
    """Send in one root, let a bridge bring it to the other, and acknowledge it there; say each."""
    never_write_back()
    for name, other in ROOTS.items():
        path = disk / name
        path.mkdir()
        peer = f'[[peer]]\nname = "{other}"\nroot = "{disk / other}"\n'
        (path / "dropq.toml").write_text(f'format = 1\ninstance = "{name}"\n{peer}')
        Root(path).create_queue("q", durability="full", replication_type="Queue", transfer_after=0)
    os.sync()  # the last one
    chance, number = random.Random(seed), 0
    a, b = (Root(disk / name).queue("q") for name in ROOTS)
    while True:
        for _ in range(chance.randint(1, MANY)):
            name = f"m{number}"
            number += 1
            say(f"try {name}")
            a.send(body(name, chance.randrange(20_000)))
            say(f"sent {name}")
        bridged(b)
        for _ in range(chance.randint(0, MANY)):
            if (message := b.receive()) is not None:
                message.ack()
                say(f"acked {name_of(message.body)}")


def bridged(to: Queue) -> None:
    """Let a bridge take all that the peer has."""
    context = Root(to.root.path).context
    wanting = Wanting(to.context, "all", None)
    wanting.say(None)
    Bridge(context, context.config.peer[0], None).once()
    wanting.end()


def inspect(disk: Path) -> dict[str, Any]:
    """Sweep, and tell where all lies; let a bridge and a consumer take all, and tell it again."""
    a, b = (timed(Root(disk / name), AT_ONCE).queue("q") for name in ROOTS)
    for queue in (a, b):
        queue.sweep(unleased_older_than=0)
    first = plainly(look(disk))
    for _ in range(2):
        bridged(b)
        b.sweep()
    with b.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            message.ack()
    return {"first": first, "last": plainly(look(disk)), "on_the_way": sum(a.in_transit().values())}


# -- outside again -------------------------------------------------------------------------------------------------


def reckon(row: Row, said: Iterable[str], seen: dict[str, Any]) -> None:
    """Hold what lies on a disk against what was said before the cut, and fill in a row.

    Args:
        row: the row.
        said: the guest's lines: `try`, `sent` or `acked` and a name.
        seen: what `inspect` returned, as it comes out of JSON.
    """
    names: dict[str, set[str]] = {"try": set(), "sent": set(), "acked": set()}
    for line in said:
        verb, _, name = line.partition(" ")
        if verb == "failed":
            row.wrong.append(line)
        elif verb in names:
            names[verb].add(name)
    row.cases += len(names["sent"])
    first, last = (found_in(seen[when]) for when in ("first", "last"))
    row.wrong += [f"{path} is not whole" for path in (*first.damaged, *last.damaged)]
    for name in sorted(names["try"] | last.locations.keys()):
        lies = [in_short(each) for each in last.locations.get(name, [])]
        if len(lies) > 1:
            row.doubled += 1
            row.wrong.append(f"{name} lies in {lies}")
        elif name in names["sent"] and not lies:
            row.lost += 1
            row.wrong.append(f"{name} had been sent, and is lost")
        elif lies and lies != ["b/q/processed"]:
            row.wrong.append(f"{name} stays in {lies}")
    for name in sorted(names["acked"]):
        lies = [in_short(each) for each in first.locations.get(name, []) if each.state != "transfers"]
        if "b/q/processed" not in lies:
            row.wrong.append(f"{name} had been acknowledged, and lies in {lies}")
    if seen["on_the_way"]:
        row.wrong.append(f"{seen['on_the_way']} stay on their way")
