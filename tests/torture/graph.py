"""Selectors: crashes, faults and others at work at every call; then a storm in which everybody is killed at random.

In the storm, programs and a script send to a graph of six queues. Routers move what waits, under one to five credits;
consumers acknowledge, reject and return it; sweeps go on with what the dead left; a selector is added and removed again
and again. While a look holds the policy lock of a queue, no selector of it has spent more than it was granted. At the
end each message was settled once, or waits in one place, and each credit belongs to one that waits.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

from helpers import other_file_system, until

from dropq import LeaseLost, Message, Queue, QueueExists, Root, Unavailable
from dropq.policies.lock import PolicyLock
from dropq.routing import Router, Routers, Serving, credit_audit, registry
from dropq.upkeep.sweep import QuickSweep
from torture import mixture, rings
from torture.account import body, look, name_of
from torture.acts import of_each
from torture.crowd import Crowd, send_by_hand
from torture.graph_cases import (
    CASES,
    OTHERS,
    SETTINGS,
    Books,
    GraphCases,
    Setting,
    put_in,
)
from torture.table import Options, Row

#: Seconds of the storm; seconds between two audits of credits in a short one.
LONG, SHORT, AUDIT_INTERVAL = 30.0, 4.0, 0.1
#: Messages that may wait at the start before senders pause.
WAITING = 30
#: What only the default selector takes says so in its name, and in a property.
ASTRAY = "astray"
#: The selectors: of which queue, to which, with how many credits, and what else they say.
EDGES: tuple[tuple[str, str, str, int, dict[str, str]], ...] = (
    ("start", "left", "left", 3, {"filter": "way IS NULL"}),
    ("start", "right", "right", 2, {"filter": "way IS NULL"}),
    ("start", "astray", "nowhere", 5, {"role": "default"}),
    ("left", "on", "meet", 4, {}),
    ("right", "on", "meet", 1, {}),
    ("meet", "on", "end", 5, {}),
)
QUEUES = ("start", "left", "right", "meet", "end", "nowhere")
#: The queues on another file system, in the storm on two.
FAR = ("meet",)
#: The queues that have routers; two routers serve the whole root.
ROUTERS = ("start", "start", "left", "left", "right", "meet", "", "")
CONSUMERS = ("end", "end", "end", "end", "end", "end", "meet", "left")
#: Who takes part.
ROLES = (
    *(f"route {queue}" for queue in ROUTERS),
    *(f"consume {queue}" for queue in CONSUMERS),
    *("send", "send", "send", "script", "sweep", "look", "come-and-go"),
)


def run(options: Options) -> Iterable[Row]:
    """Return a row for the crashes, the faults and the others of each setting, for rings, and for each storm."""
    settings = [setting for setting in SETTINGS if not setting.far or other_file_system(options.folder)]
    rows = of_each(settings, options, _all_cases) if options.long else []
    rows += rings.run(options)
    rows.append(mixture.storm(options))
    folder = options.folder / "storm"
    folder.mkdir()
    if options.long:
        rows.append(storm(folder, options.seed, LONG))
        if far := other_file_system(options.folder):
            rows.append(storm_elsewhere(options.folder / "far", far, options.seed, LONG))
    else:
        with (
            mock.patch.object(credit_audit, "AUDIT_INTERVAL", AUDIT_INTERVAL),
            mock.patch.object(registry, "AUDIT_INTERVAL", AUDIT_INTERVAL),
        ):
            rows.append(storm(folder, options.seed, SHORT))
    return rows


def storm_elsewhere(folder: Path, far: Path, seed: int, seconds: float) -> Row:
    """Let the storm rage where a queue in the middle of the graph lies on another file system."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=far) as elsewhere:
        return storm(folder, seed, seconds, Path(elsewhere))


def _all_cases(options: Options, setting: Setting) -> list[Row]:
    """Die at every call, refuse some calls, and let others work before some: all of them would take hours."""
    chance = random.Random(options.seed)
    crashes, faults, others = (Row(f"{what}: {setting.name}") for what in (
        "crash at every call", "faults at calls", "others between two calls",
    ))  # fmt: skip
    for case in options.shared(CASES):
        GraphCases(options.folder, setting, crashes).crash(case, options.some(chance))
        GraphCases(options.folder, setting, faults).refuse(case, options.some(chance, 40))
        for other in OTHERS:
            cases = GraphCases(options.folder, setting, others)
            cases.meet(case, other, options.some(chance, 20))
    return [crashes, faults, others]


# -- the storm -----------------------------------------------------------------------------------------------------


class Storm(Crowd):
    """A root with its queues and selectors, and all that work there."""

    def __init__(self, folder: Path, seed: int, elsewhere: Path | None = None) -> None:
        super().__init__(folder, seed, ROLES, play)
        #: The root, and where the queues of FAR lie if they do not lie in it.
        self.folders = (self.folder / "root", *([] if elsewhere is None else [elsewhere]))
        for name in QUEUES:
            made = self.root.create_queue(name, durability="none", redelivery_delay=0)
            if elsewhere is not None and name in FAR:
                put_in(made, elsewhere)
        for queue, name, to, credit, options in EDGES:
            self.root.queue(queue).add_selector(name, to=to, credit=credit, **options)


def storm(folder: Path, seed: int, seconds: float, elsewhere: Path | None = None) -> Row:
    """Rage, and let sweeps bring all in order; then route and settle all, and hold it against what was sent."""
    whole = Storm(folder, seed, elsewhere)
    whole.rage(seconds)
    root = Root(folder / "root")
    where = "one file system" if elsewhere is None else "two file systems"
    row = Row(f"storm: {where}", kills=whole.kills)
    row.wrong += whole.wrong
    _sweep(root)
    row.wrong += [*_books(whole), *whole.noted("wrong")]
    _judge(row, whole)
    until(lambda: settled(root), "all that was sent to be settled")
    _sweep(root)
    row.wrong += [*_books(whole), *(f"credit {each} is left" for each in Books.of(*whole.folders).spent)]
    _judge(row, whole)
    return row


def settled(root: Root) -> bool:
    """Route what waits, settle what no selector takes, and return whether nothing waits any more."""
    for queue in root.queues():
        queue.route()
        if not queue.selectors():
            _settle_all(queue)
    return not any(queue.counts()[state] for queue in root.queues() for state in ("target", "processing", "delayed"))


def _sweep(root: Root) -> None:
    until(lambda: not root.sweep().total, "sweeps to find nothing more to do")


def _books(whole: Storm) -> list[str]:
    """Return what is wrong with the credits of a root after sweeps."""
    books = Books.of(*whole.folders)
    hidden = [str(path) for path in (whole.folder / "root").glob("*/selectors/.*.removed")]
    return [*books.overdrawn(), *books.leaked(), *(f"{path} is left" for path in hidden)]


def _judge(row: Row, whole: Storm) -> None:
    sent, tried, settled = whole.noted("sent"), whole.noted("try"), whole.noted("settled")
    found = look(*whole.folders)
    row.wrong += [f"{path} is not whole" for path in found.damaged]
    row.cases = len(found.locations)
    for name in sorted(sent.keys() - found.locations.keys()):
        row.lost += 1
        row.wrong.append(f"{name} was sent, and is nowhere")
    row.wrong += [f"{name} was never sent" for name in sorted(found.locations.keys() - tried.keys())]
    for name, locations in sorted(found.locations.items()):
        where = [f"{location.queue}/{location.state}" for location in locations]
        if len(locations) > 1 or settled[name] > 1:
            row.doubled += 1
            row.wrong.append(f"{name} is in {where}, and was settled {settled[name]} times")
        elif settled[name] and where[0].endswith(("/target", "/processing", "/delayed")):
            row.wrong.append(f"{name} was settled, and is in {where[0]}")
        elif (ASTRAY in name) and where[0].startswith(("left/", "right/")):
            row.wrong.append(f"{name} is in {where[0]}, where no selector moves it")


# -- who takes part ------------------------------------------------------------------------------------------------


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed."""
    chance = random.Random(seed)
    path = folder / "notes" / f"{name}.log"
    root = Root(folder / "root")
    part, _, queue = role.partition(" ")
    if part == "script":
        send_by_hand(root.queue("start").layout.base, name, folder, path)
    with path.open("a", buffering=1) as notes:

        def note(words: str) -> None:
            notes.write(f"{words}\n")

        if part == "route":
            Serving(_router(root, queue, chance)).run(lambda: False)
        if part == "send":
            _send(root.queue("start"), name, chance, note)
        while True:
            if part == "sweep":
                root.sweep()
            elif part == "look":
                _look(root, note)
            elif part == "come-and-go":
                _come_and_go(root.queue("start"), chance)
            else:
                _consume(root.queue(queue), chance, note)
            time.sleep(chance.uniform(0, 0.1))


def _router(root: Root, queue: str, chance: random.Random) -> Router | Routers:
    """Return the router of a queue, or of the whole root."""
    sweep = partial(QuickSweep, routes=False)
    if not queue:
        return Routers(root.context, sweep=sweep)
    context = root.queue(queue).context
    return Router(context, sweep=sweep(context) if chance.random() < 0.5 else None)


def _send(start: Queue, name: str, chance: random.Random, note: Callable[[str], None]) -> None:
    number = 0
    while True:
        astray = chance.random() < 0.03
        message = f"{name}-{number}{f'-{ASTRAY}' if astray else ''}"
        number += 1
        note(f"try {message}")
        start.send(body(message, chance.choice((0, 1_000))), properties={"way": "none"} if astray else None)
        note(f"sent {message}")
        while start.counts()["target"] > WAITING:
            time.sleep(0.05)


def _consume(queue: Queue, chance: random.Random, note: Callable[[str], None]) -> None:
    """Take what comes, and settle or return it; a selector that is removed may take it away meanwhile."""
    with queue.subscribe(max_backlog=None) as subscription:
        for _ in range(20):
            message = subscription.receive(timeout=0.2)
            if message is None:
                return
            with suppress(LeaseLost):
                _treat(message, chance, note)


def _treat(message: Message, chance: random.Random, note: Callable[[str], None]) -> None:
    name, way = name_of(message.body), chance.random()
    time.sleep(chance.uniform(0, 0.02))
    if way < 0.2:
        message.nack(delay=0)
        return
    if way < 0.3:
        message.reject("no")
    else:
        message.ack()
    note(f"settled {name}")


def _settle_all(queue: Queue) -> None:
    with queue.subscribe(max_backlog=None) as subscription:
        while (message := subscription.receive(timeout=0)) is not None:
            message.ack()


def _come_and_go(start: Queue, chance: random.Random) -> None:
    """Add a selector, or remove the one that is there."""
    if any(one.name == "extra" for one in start.selectors()):
        with suppress(Unavailable):
            start.remove_selector("extra")
    else:
        # Its removal is not over, as what it moved is on its way back; or another process has the policy lock for long.
        with suppress(QueueExists, Unavailable):
            start.add_selector("extra", to="meet", credit=2, filter="way IS NULL")
    time.sleep(chance.uniform(0, 0.5))


def _look(root: Root, note: Callable[[str], None]) -> None:
    """Note each selector that has more unsettled messages than credits: under the lock, no credit is spent."""
    for address in ("start", "left", "right", "meet"):
        queue = root.queue(address)
        with PolicyLock(queue.context).acquire(lambda: None) as locked:
            if locked:
                books = Books.of(Path(root.path), *((root.path / name).resolve() for name in FAR))
                own = {one.token: one.credit for one in queue.selectors() if one.credit is not None}
                under: dict[str, set[str]] = {token: set() for token in own}
                for via in (*books.spent, *books.unsettled.values()):
                    under.get(via.partition("-")[0], set()).add(via)
                for token, vias in under.items():
                    if len(vias) > own[token]:
                        note(f"wrong {address} granted {own[token]} credits of {token}, and spent {sorted(vias)}")
