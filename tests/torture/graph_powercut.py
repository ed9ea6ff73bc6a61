"""What of a graph of queues outlives a power cut, at durability `full`, where one queue lies on a disk of its own.

A guest sends to `start`; selectors move what waits under credits to `middle` and on to `end`, where it is settled; now
and then a selector is removed, which returns what it moved, and added again. One of the queues lies on a second disk,
so that messages are copied there, and back, and removed here. The power of both disks is cut at once. One of them may
keep each rename at once and the other only what was synced, so the order of the syncs alone decides.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dropq import Message, Queue, QueueExists, Root
from dropq.storage import system_calls
from torture.account import body, found_in, in_short, judge, look, name_of, plainly
from torture.calls import Call, come_between
from torture.graph import settled
from torture.graph_cases import Books, put_in
from torture.guest import SECOND, never_write_back, say
from torture.table import Options, Row
from torture.uml import cut_power

QUEUES = ("start", "middle", "end")
#: How many credits each selector has.
CREDITS = 8
#: The option by which a file system keeps each rename at once; of btrfs, by which it does so each second.
AT_ONCE = {"ext4": "dirsync", "xfs": "wsync", "btrfs": "commit=1"}
#: How many lines the guest says at the most before its power is cut.
LINES = 600
#: How many steps it takes at the most before the last one, in which it rests before a call: at most so many come first.
STEPS, CALLS = 40, {"route": 300, "change": 200, "settle": 80}
#: Seconds after which a file system that does so each second has kept its renames.
KEPT = 2.0
#: How many sweeps may find something to do, and how often all is routed and settled at the most.
SWEEPS, ROUNDS = 10, 60
#: How long the property is that does not fit a name.
WIDE = 300
#: Where each settlement leaves a message.
ENDS = {"acked": "end/processed", "rejected": "end/error"}


class Cut(NamedTuple):
    """A kind of cut: the queue on the second disk, which disks keep each rename at once, and what comes last."""

    far: str
    at_once: tuple[bool, bool]
    #: The step that the guest begins, and stops in, before the cut; with "" it goes on, and is cut at any moment.
    last: str = ""


ONE, OTHER, NEITHER = (True, False), (False, True), (False, False)
CUTS = (
    *(Cut(far, at_once) for far in QUEUES for at_once in (OTHER, ONE)),
    *(Cut(far, at_once, "route") for far in QUEUES for at_once in (ONE, OTHER, NEITHER)),
    *(Cut(far, at_once, "change") for far in ("middle", "end") for at_once in (ONE, OTHER, NEITHER)),
    *(Cut("end", at_once, "settle") for at_once in (ONE, OTHER)),
)


def row(options: Options, system: str, mount: str, rng: random.Random) -> Row:
    """Cut the power of guests that move messages through a graph, once for each kind of cut; in a short run, once."""
    cuts = CUTS if options.long else CUTS[:1]
    found = Row(f"a graph on two file systems: {system}", kills=len(cuts))
    for number, cut in enumerate(cuts):
        cut_once(options.folder / f"graph-{system}-{number}", system, mount, cut, rng, found)
    return found


def cut_once(folder: Path, system: str, mount: str, cut: Cut, rng: random.Random, found: Row) -> None:
    """Let a guest move messages, cut its power, boot it again, and reckon up."""
    mounts = [f"{mount},{AT_ONCE[system]}" if at_once else mount for at_once in cut.at_once]
    lines, pause = (math.inf, KEPT) if cut.last else (rng.randrange(100, LINES), rng.random() / 10)
    task = {"far": cut.far, "last": cut.last, "seed": rng.randrange(1 << 30)}
    said, seen = cut_power(folder, __name__, system, mounts, lines=lines, pause=pause, **task)
    known = len(found.wrong)
    reckon(found, said, seen)
    found.wrong[known:] = [f"{folder.name}, {cut}: {line}" for line in found.wrong[known:][:10]]


# -- inside: until the cut -----------------------------------------------------------------------------------------


def work(disk: Path, far: str, last: str, seed: int) -> None:
    """Send, route, settle and change selectors, for ever or until the last step; say each call before and after."""
    never_write_back()
    root = Root.create(disk / "root")
    for name in QUEUES:
        made = root.create_queue(name, durability="full", redelivery_delay=0)
        if name == far:
            put_in(made, SECOND)
    for name, to in (("start", "middle"), ("middle", "end")):
        root.queue(name).add_selector("on", to=to, credit=CREDITS)
    os.sync()  # the last one of all that is there
    chance = random.Random(seed)
    numbers = iter(range(1 << 30))
    steps: dict[str, Callable[[], object]] = {
        "send": lambda: _send(root.queue("start"), [f"message-{next(numbers)}" for _ in range(chance.randint(1, 8))]),
        "route": lambda: _route(root),
        "settle": lambda: _settle(root.queue("end"), chance),
        "change": lambda: _change(root, chance),
    }
    kinds, weights = ("send", "route", "settle", "change"), (4, 5, 4, 1)
    for _ in range(chance.randrange(STEPS)) if last else itertools.count():
        steps[chance.choices(kinds, weights)[0]]()
    for kind in ("settle", "settle", "send", "send", *(["route"] if last != "route" else [])):
        steps[kind]()  # so that there is something to do
    _rest_in_the_middle(disk, chance, CALLS[last])
    steps[last]()
    _rest()


def _rest_in_the_middle(disk: Path, chance: random.Random, calls: int) -> None:
    """Let this process do some calls that change something, and rest then; before one of them, a disk keeps it all."""
    rests = chance.randrange(calls)
    keeps, kept = chance.randrange(rests + 1), chance.choice((disk, SECOND))
    number = itertools.count()
    keep_all = system_calls.sync_whole

    def between(call: Call) -> object:
        if call.changes:
            if (now := next(number)) == keeps:
                say(f"keep {kept.name} before {call}")
                keep_all(os.open(kept, os.O_RDONLY), str(kept))
            if now == rests:
                say(f"before {call}")
                _rest()
        return call.do()

    come_between(between)


def _rest() -> NoReturn:
    say("resting")
    while True:
        signal.pause()


def _send(start: Queue, names: list[str]) -> None:
    """Send messages, every third with a property that does not fit its name."""
    for name in names:
        say(f"try {name}")
        properties = {"wide": "x" * WIDE} if _is_wide(name) else None
        start.send(body(name, int(name.rpartition("-")[2]) * 997 % 20_000), properties=properties)
        say(f"sent {name}")


def _is_wide(name: str) -> bool:
    return int(name.rpartition("-")[2]) % 3 == 0


def _route(root: Root) -> None:
    for name in ("start", "middle"):
        say(f"route {name}")
        say(f"routed {name} {root.queue(name).route()}")


def _settle(end: Queue, chance: random.Random) -> None:
    """Take some of what has come to the end, and settle it or give it back."""
    calls: dict[str, Callable[[Message], object]] = {
        "acked": lambda message: message.ack(),
        "rejected": lambda message: message.reject("as it comes"),
        "nacked": lambda message: message.nack(),
    }
    with end.subscribe(max_backlog=None) as subscription:
        for _ in range(chance.randint(1, 2 * CREDITS)):
            message = subscription.receive(timeout=0)
            if message is None:
                return
            name = name_of(message.body) or f"half:{message.file}"
            verb = chance.choices(list(calls), (6, 1, 1))[0]
            say(f"take {name}")
            calls[verb](message)
            say(f"{verb} {name}")


def _change(root: Root, chance: random.Random) -> None:
    """Remove a selector, and add it again, maybe after a pass of the routers."""
    queue = root.queue(chance.choice(("start", "middle")))
    if queue.selectors():
        say(f"remove {queue.name}")
        say(f"removed {queue.name} {queue.remove_selector('on')}")
        if chance.random() < 0.5:
            _route(root)
    say(f"add {queue.name}")
    with suppress(QueueExists):  # what it moved is on its way back still
        queue.add_selector("on", to=QUEUES[QUEUES.index(queue.name) + 1], credit=CREDITS)
        say(f"added {queue.name}")


# -- inside: after the cut -----------------------------------------------------------------------------------------


def inspect(disk: Path) -> dict[str, Any]:
    """Sweep, and tell what lies on the disks; then settle all, and tell it again."""
    root, folders = Root(disk / "root"), (disk / "root", SECOND)
    swept = _sweep(root)
    books = Books.of(*folders)
    seen = {
        "first": plainly(look(*folders)),
        "given": _given(folders),
        "leaked": [*books.leaked()],
        "removing": [str(path) for path in folders[0].glob("*/selectors/.*.removed")],
        "narrow": [*_narrow(root)],
    }
    any(settled(root) for _ in range(ROUNDS))
    swept = _sweep(root) and swept
    last = {"last": plainly(look(*folders)), "given_last": _given(folders), "spent": [*Books.of(*folders).spent]}
    return seen | last | {"swept": swept}


def _sweep(root: Root) -> bool:
    """Sweep until nothing is left to do, in which looks meet a second apart; return whether it came to that."""
    return any(not root.sweep(unleased_older_than=0).total for _ in range(SWEEPS))


def _given(folders: Iterable[Path]) -> list[str]:
    return [str(path) for folder in folders for path in folder.glob("*/.dropq/transfers/*/target/*")]


def _narrow(root: Root) -> Iterator[str]:
    """Yield the messages that have lost what did not fit their names."""
    for queue in root.queues():
        for state in ("target", "processing", "processed", "error", "expired", "delayed"):
            for message in queue.browse(state):
                name = name_of(message.body)
                if name and _is_wide(name) and len(str(message.properties.get("wide", ""))) != WIDE:
                    yield name


# -- outside again -------------------------------------------------------------------------------------------------


def reckon(row: Row, said: Iterable[str], seen: dict[str, Any]) -> None:
    """Hold what lies on the disks against what was said before the cut, and fill in a row.

    Args:
        row: the row.
        said: the guest's lines: `try`, `sent`, `take` and the settlements, each followed by a name; and others.
        seen: what `inspect` returned, as it comes out of JSON.
    """
    tried, sent, fate = set[str](), set[str](), dict[str, str]()
    for line in said:
        verb, _, name = line.partition(" ")
        if verb == "failed":
            row.wrong.append(line)
        elif verb in ("try", "sent"):
            (tried if verb == "try" else sent).add(name)
        elif verb in ("take", "nacked", *ENDS):
            fate[name] = verb
    row.cases += len(sent)
    known = set[str]()  # what was lost or doubled at the first look counts once
    for when in ("first", "last"):
        found = found_in(seen[when])
        account = judge(found, must=sent - known, may=tried)
        account.doubled = [name for name in account.doubled if name not in known]
        known.update(account.lost, account.doubled)
        row.count(account, f"{when} look")
        for name, locations in found.locations.items():
            wanted = ENDS.get(fate.get(name, ""))
            where = in_short(locations[0])
            if wanted is not None and where != wanted:
                row.wrong.append(f"{when} look: {name} had been {fate[name]}, and lies in {where}")
            elif when == "first" and fate.get(name) != "take" and wanted is None and locations[0].state != "target":
                row.wrong.append(f"{when} look: nobody had settled {name}, and it lies in {where}")
            elif when == "last" and locations[0].state not in ("processed", "error"):
                row.wrong.append(f"{when} look: {name} stays in {where}")
    row.wrong += [f"{path} is still to be carried" for path in (*seen["given"], *seen["given_last"])]
    row.wrong += [*seen["leaked"], *(f"{path} is left" for path in seen["removing"])]
    row.wrong += [f"{name} has lost what did not fit its name" for name in seen["narrow"]]
    row.wrong += [f"credit {each} is spent, and all is settled" for each in seen["spent"]]
    if not seen["swept"]:
        row.wrong.append(f"{SWEEPS} sweeps do not come to an end")
