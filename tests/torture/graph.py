"""Selectors: crashes, faults and others at work at every call; then a storm in which everybody is killed at random.

In the storm, programs and a script send to a graph of six queues. Routers move what waits, under one to five credits;
consumers acknowledge, reject and return it; sweeps go on with what the dead left; a selector is added and removed again
and again. While a look holds the policy lock of a queue, no selector of it has spent more than it was granted. At the
end each message was settled once, or waits in one place, and each credit belongs to one that waits.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from helpers import until

from dropq import LeaseLost, Message, Queue, Root, Unavailable
from dropq.policies.lock import PolicyLock
from dropq.routing import Router, Serving, looks, registry
from dropq.upkeep.sweep import QuickSweep
from torture.account import body, look, name_of
from torture.graph_cases import CASES, OTHERS, SETTINGS, Books, GraphCases, Setting
from torture.storm import _forked
from torture.table import Options, Row
from torture.topics import BODIES, SCRIPT

#: Seconds of the storm, and between two kills on average; seconds between two looks at credits in a short one.
LONG, SHORT, EVERY, APART = 30.0, 4.0, 0.1, 0.1
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
ROUTERS = ("start", "start", "start", "left", "left", "right", "meet", "meet")
CONSUMERS = ("end", "end", "end", "end", "end", "end", "meet", "left")
#: Who takes part.
ROLES = (
    *(f"route {queue}" for queue in ROUTERS),
    *(f"consume {queue}" for queue in CONSUMERS),
    *("send", "send", "send", "script", "sweep", "look", "come-and-go"),
)


def run(options: Options) -> Iterable[Row]:
    """Return a row for the crashes, the faults and the others of each setting, and one for the storm."""
    rows = []
    if options.long:
        apart = [replace(options, folder=options.folder / str(number)) for number in range(len(SETTINGS))]
        for each in apart:
            each.folder.mkdir()
        with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork")) as pool:
            rows += [row for found in pool.map(_all_cases, apart, SETTINGS) for row in found]
    folder = options.folder / "storm"
    folder.mkdir()
    if options.long:
        rows.append(storm(folder, options.seed, LONG))
    else:
        with mock.patch.object(looks, "APART", APART), mock.patch.object(registry, "APART", APART):
            rows.append(storm(folder, options.seed, SHORT))
    return rows


def _all_cases(options: Options, setting: Setting) -> list[Row]:
    """Die at every call, refuse some calls, and let others work before some: all of them would take hours."""
    chance = random.Random(options.seed)
    crashes, faults, others = (Row(f"{what}: {setting.name}") for what in (
        "graph, crash at every call", "graph, faults at calls", "graph, others between two calls",
    ))  # fmt: skip
    for case in CASES:
        GraphCases(options.folder, setting, crashes).crash(case)
        GraphCases(options.folder, setting, faults).refuse(case, lambda all: chance.sample(all, len(all) // 40 + 1))
        for other in OTHERS:
            cases = GraphCases(options.folder, setting, others)
            cases.meet(case, other, lambda all: chance.sample(all, len(all) // 20 + 1))
    return [crashes, faults, others]


# -- the storm -----------------------------------------------------------------------------------------------------


@dataclass
class Storm:
    """A root with its queues and selectors, and all who work there."""

    folder: Path
    seed: int
    live: dict[int, tuple[str, str]] = field(default_factory=dict)
    kills: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._serial = 0
        self.root = Root.create(self.folder / "root")
        (self.folder / "notes").mkdir()
        for name in QUEUES:
            self.root.create_queue(name, durability="none", redelivery_delay=0)
        for queue, name, to, credit, options in EDGES:
            self.root.queue(queue).add_selector(name, to=to, credit=credit, **options)

    def rage(self, seconds: float) -> None:
        """Kill somebody again and again, and put another in the place."""
        for role in ROLES:
            self._start(role)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._chance.uniform(0, 2 * EVERY))
            role = self._end(self._chance.choice(list(self.live)))
            self.kills += 1
            self._start(role)
        for pid in list(self.live):
            self._end(pid)

    def _start(self, role: str) -> None:
        self._serial += 1
        name = f"{role.replace(' ', '-')}-{self._serial}"
        seed = f"{self.seed} {name}"
        pid = _forked(lambda: play(role, name, self.folder, seed), self.folder / "notes" / f"{name}.out")
        self.live[pid] = role, name

    def _end(self, pid: int) -> str:
        role, name = self.live.pop(pid)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) and role != "script":
            told = (self.folder / "notes" / f"{name}.out").read_text(errors="replace").splitlines()
            self.wrong.append(f"{name} ended with status {status}: {told[-1] if told else ''}")
        return role

    def told(self, verb: str) -> Counter[str]:
        """Return how often each message was noted under a verb."""
        lines = (line for path in (self.folder / "notes").glob("*.log") for line in path.read_text().split("\n")[:-1])
        return Counter(line.partition(" ")[2] for line in lines if line.startswith(f"{verb} "))


def storm(folder: Path, seed: int, seconds: float) -> Row:
    """Rage, and let sweeps bring all in order; then route and settle all, and hold it against what was sent."""
    whole = Storm(folder, seed)
    whole.rage(seconds)
    root = Root(folder / "root")
    row = Row("graph, storm: senders, routers, consumers and sweeps of six queues", kills=whole.kills)
    row.wrong += whole.wrong
    _sweep(root)
    row.wrong += [*_books(folder), *whole.told("wrong")]
    _judge(row, whole)

    def settled() -> bool:
        for queue in root.queues():
            queue.route()
            if not queue.selectors():
                _settle_all(queue)
        return not any(
            queue.counts()[state] for queue in root.queues() for state in ("target", "processing", "delayed")
        )

    until(settled, "all that was sent to be settled", timeout=120)
    _sweep(root)
    row.wrong += [*_books(folder), *(f"credit {each} is left" for each in Books.of(folder / "root").spent)]
    _judge(row, whole)
    return row


def _sweep(root: Root) -> None:
    until(lambda: not root.sweep().total, "sweeps to find nothing more to do", timeout=120)


def _books(folder: Path) -> list[str]:
    """Return what is wrong with the credits of a root after sweeps."""
    books = Books.of(folder / "root")
    hidden = [str(path) for path in (folder / "root").glob("*/selectors/.*.removed")]
    return [*books.overdrawn(), *books.leaked(), *(f"{path} is left" for path in hidden)]


def _judge(row: Row, whole: Storm) -> None:
    sent, tried, settled = whole.told("sent"), whole.told("try"), whole.told("settled")
    found = look(whole.folder / "root")
    row.wrong += [f"{path} is not whole" for path in found.damaged]
    row.cases = len(found.places)
    for name in sorted(sent.keys() - found.places.keys()):
        row.lost += 1
        row.wrong.append(f"{name} was sent, and is nowhere")
    row.wrong += [f"{name} was never sent" for name in sorted(found.places.keys() - tried.keys())]
    for name, places in sorted(found.places.items()):
        where = [f"{place.queue}/{place.state}" for place in places]
        if len(places) > 1 or settled[name] > 1:
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
        _script(root, name, folder, path)
    with path.open("a", buffering=1) as notes:

        def note(words: str) -> None:
            notes.write(f"{words}\n")

        if part == "route":
            context = root.queue(queue).context
            sweep = QuickSweep(context, routes=False) if chance.random() < 0.5 else None
            Serving(Router(context, sweep=sweep), context.timing).run(lambda: False)
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


def _script(root: Root, name: str, folder: Path, log: Path) -> None:
    bodies = folder / "notes" / f"{name}.bodies"
    bodies.mkdir()
    for number in range(1, BODIES):
        message = f"{name}-{number}{'-urgent' if number % 10 == 3 else ''}"
        (bodies / message).write_bytes(body(message))
    base = root.queue("start").layout.base
    os.execvp("sh", ["sh", "-c", SCRIPT, "sh", str(base), name, str(log), str(bodies)])


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
        start.add_selector("extra", to="meet", credit=2, filter="way IS NULL")
    time.sleep(chance.uniform(0, 0.5))


def _look(root: Root, note: Callable[[str], None]) -> None:
    """Note each selector that has more unsettled messages than credits: under the lock, no credit is spent."""
    for address in ("start", "left", "right", "meet"):
        queue = root.queue(address)
        with PolicyLock(queue.context).held(lambda: None) as locked:
            if locked:
                books = Books.of(Path(root.path))
                own = {one.token: one.credit for one in queue.selectors() if one.credit is not None}
                under: dict[str, set[str]] = {token: set() for token in own}
                for via in (*books.spent, *books.unsettled.values()):
                    under.get(via.partition("-")[0], set()).add(via)
                for token, vias in under.items():
                    if len(vias) > own[token]:
                        note(f"wrong {address} granted {own[token]} credits of {token}, and spent {sorted(vias)}")
