"""Two roots share a queue while people recall, move, requeue, purge, make and delete by hand: each message comes once.

A recall comes between any two calls of a bridge, and a bridge between those of a recall. Then all is left to chance, in
a storm: bridges and sweeps are killed, and hands, scripts and consumers note what they took. Only a recall that asks
nobody may double messages, and only those that it brought back.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from forks import DIED, ended, fork, forked
from helpers import AT_ONCE, timed, until

from dropq import DropqError, Queue, Root
from dropq.carrier.bridge import Bridge, end_rows, recall
from dropq.policies.wanted import Wanting
from torture.account import body, name_of
from torture.calls import come_between
from torture.cases import open_findings
from torture.crashes import Dying, Moment
from torture.crowd import Crowd
from torture.rings import met
from torture.table import Options, Row

#: Who recalls, of whom one asks nobody; and after how many calls a bridge has given, and sent nothing.
PROXIED = "its owner, proxied"
RECALLERS = ("its owner", "its taker", PROXIED)
GIVEN = 20
#: Calls between two recalls in the short form; in the long form one comes before each call.
STEP = 17
#: Seconds of the storm, and between two kills in it.
LONG, SHORT, EVERY = 60.0, 4.0, 0.15
ROOTS = ("a", "b")
KILLED = tuple(f"{part} {root}" for part in ("bridge", "bridge", "sweep") for root in ROOTS)
#: Most is sent in one root, and wanted in the other.
WORKING: tuple[str, ...] = ("producer a", "producer a", "producer b", "consumer b", "consumer b")
WORKING += ("script a", "script b", "hand a", "hand b")
QUEUE: dict[str, Any] = {
    "durability": "none",
    "redelivery_delay": 0,
    "replication_type": "Queue",
    "transfer_after": 0.02,
}


def rows(options: Options) -> Iterator[Row]:
    """Return a row for each who recalls, and one for the storm."""
    for by in RECALLERS:
        yield recalls(by, options.folder / by, step=1 if options.long else STEP)
    yield storm(options.folder / "hands", options.seed, LONG if options.long else SHORT)


def make(name: str, path: Path, paths: dict[str, Path], options: dict[str, Any]) -> None:
    """Make a root, whose peers are all other paths, with the queue that they share."""
    path.mkdir(parents=True)
    peers = "".join(f'[[peer]]\nname = "{each}"\nroot = "{where}"\n' for each, where in paths.items() if each != name)
    (path / "dropq.toml").write_text(f'format = 1\ninstance = "{name}"\n{peers}')
    Root(path).create_queue("q", **options)


def _both(folder: Path, **options: Any) -> tuple[Queue, Queue]:
    paths = {name: folder / name for name in ROOTS}
    for name, path in paths.items():
        make(name, path, paths, {**QUEUE, **options})
    a, b = (timed(Root(path), AT_ONCE).queue("q") for path in paths.values())
    return a, b


def _bring(to: Queue) -> None:
    """Let a bridge take all that the peer has."""
    context = Root(to.root.path).context
    wanting = Wanting(to.context, "all", None)
    wanting.say(None)
    Bridge(context, context.config.peer[0], None).once()
    wanting.end()


# -- a recall amid a bridge --------------------------------------------------------------------------------------------


def recalls(by: str, folder: Path, *, step: int) -> Row:
    """Let a recall come before the Nth call of a bridge, and a bridge before that of a recall, for each Nth."""
    row, fates = Row(f"a recall amid a bridge: {by}"), Counter[str]()
    folder.mkdir()
    for bridge_first in (True, False):
        for number in count(0, step):
            calls, fate = _recall(by, folder / "roots", number, row, bridge_first=bridge_first)
            shutil.rmtree(folder / "roots")
            if calls <= number:
                break
            fates[fate] += 1
            row.cases += 1
    if not (fates["taken"] and fates["back"]) or (by == PROXIED) != ("doubled" in fates):
        row.wrong.append(f"what became of the messages: {dict(fates)}")
    return row


def _recall(by: str, folder: Path, number: int, row: Row, *, bridge_first: bool) -> tuple[int, str]:
    """Let both meet; return how many calls the first makes, and what became of the messages."""
    sent = ["0", "1", "2"]
    a, b = _both(folder, transfer_after=0)
    for name in sent:
        a.send(body(name))

    def bridge() -> str:
        with suppress(DropqError):  # as the recall took what it carries
            _bring(b)
        return ""

    def bring_back() -> str:
        with suppress(DropqError):
            own = Root((b if by == "its taker" else a).root.path).context
            end_rows(own, "b", None) if by == PROXIED else recall(own, own.config.peer[0], None)
        return ""

    if not bridge_first:
        assert forked(partial(_die_having_given, b)) == DIED
    calls, _ = met(folder, number, *((bridge, bring_back) if bridge_first else (bring_back, bridge)))
    for queue in (a, b):
        queue.sweep()
    arrived, back = b.counts()["target"], a.counts()["target"]

    def has_come() -> bool:
        _bring(b)
        b.sweep()
        return not (a.counts()["target"] or a.in_transit())

    until(has_come, "all to come")
    found = Counter(str(name_of(message.body)) for message in b.browse())
    most = 2 if by == PROXIED else 1
    lost, doubled = [name for name in sent if not found[name]], [name for name in sent if found[name] > most]
    row.lost, row.doubled = row.lost + len(lost), row.doubled + len(doubled)
    left = [*open_findings(a.root), *open_findings(b.root)]
    where = f"call {number} of {'the bridge' if bridge_first else 'the recall'}"
    row.wrong += [f"{where}: {what}" for what in (lost, doubled, *left) if what]
    return calls, "doubled" if found.total() > len(sent) else "back" if back else "taken" if arrived else "on the way"


def _die_having_given(to: Queue) -> None:
    come_between(Dying(Moment(GIVEN)))
    while True:
        _bring(to)


# -- by chance ---------------------------------------------------------------------------------------------------------


def storm(folder: Path, seed: int, seconds: float) -> Row:
    """Rage; work off what is left, and hold what was taken against what was sent."""
    row = Row("two roots, and what people do by hand")
    folder.mkdir()
    queues = _both(folder)
    for queue in queues:
        queue.root.create_queue("aside", durability="none")
        (folder / f"taken-{queue.root.path.name}").mkdir()
    crowd = Crowd(folder, seed, KILLED, _play, every=EVERY)
    workers = [
        fork(partial(_work, role, folder, f"{role}-{number}", f"{seed} {number}"), longest=0)
        for number, role in enumerate(WORKING)
    ]
    crowd.rage(seconds)
    while not (crowd.noted("crossed") and crowd.noted("deleted")):  # on a machine that is busy
        crowd.rage(seconds)
    (folder / "over").touch()
    row.kills = crowd.kills
    row.wrong += crowd.wrong
    row.wrong += [
        f"{role} ended with {status}" for role, pid in zip(WORKING, workers, strict=True) if (status := ended(pid))
    ]
    recalled = _work_off(folder)
    _judge(row, crowd, folder, recalled)
    return row


def _play(role: str, name: str, folder: Path, seed: str) -> None:
    """Bridge or sweep until killed, whether the queue is there or not."""
    part, where = role.split()
    chance, root = random.Random(seed), Root(folder / where)
    while True:
        with suppress(DropqError, OSError):
            if part == "bridge":
                Bridge(root.context, root.context.config.peer[0], None).run(partial(_goes_on, chance))
            root.queue("q").sweep()
        time.sleep(0.05 * chance.random())


def _goes_on(chance: random.Random, seconds: float) -> bool:
    time.sleep(min(seconds, 0.05) * chance.random())
    return False


def _work(role: str, folder: Path, name: str, seed: str) -> None:
    """Play a part until the storm is over, whether the queue is there or not; note what was sent and taken."""
    part, where = role.split()
    worker = _Worker(folder, where, name.replace(" ", "-"), random.Random(seed))
    while not (folder / "over").exists():
        with suppress(DropqError, FileNotFoundError):
            getattr(worker, part)()
        time.sleep(0.03 * worker.chance.random())


class _Worker:
    """Somebody who works on one root, and is not killed."""

    def __init__(self, folder: Path, where: str, name: str, chance: random.Random) -> None:
        self.chance = chance
        self._folder = folder
        self._where = where
        self._name = name
        self._root = timed(Root(folder / where), AT_ONCE)
        self._notes = open(folder / "notes" / f"{self._name}.log", "a", buffering=1)  # noqa: SIM115 - as long as it lives
        self._serial = 0

    def _note(self, verb: str, name: object) -> None:
        print(f"{verb} {name}", file=self._notes)

    def producer(self) -> None:
        for _ in range(self.chance.randrange(4)):
            self._serial += 1
            name = f"{self._name}-{self._serial}"
            self._note("try", name)
            self._root.queue("q").send(body(name, self.chance.choice((0, 3000))), message_id=name)
            self._note("sent", name)

    def consumer(self) -> None:
        with self._root.queue("q").subscribe(max_backlog=self.chance.choice((1, 5, None))) as subscription:
            for _ in range(self.chance.randrange(30)):
                if (message := subscription.receive(0.2)) is None:
                    continue
                if self.chance.random() < 0.1:
                    message.nack()
                    continue
                name = name_of(message.body)
                self._note("tries", name)
                message.ack()
                self._note("took", name)
                if self._where == "b" and str(name).startswith("producer-a"):
                    self._note("crossed", name)

    def script(self) -> None:
        """Take a message by `mv`, the first that is seen."""
        target = self._folder / self._where / "q" / "target"
        for entry in os.scandir(target):
            if entry.name[0] != "." and entry.stat(follow_symlinks=False).st_size:
                os.rename(entry.path, self._folder / f"taken-{self._where}" / f"{os.urandom(8).hex()}")
                return

    def hand(self) -> None:
        verbs = ("move", "move_back", "requeue", "purge", "recall", "delete")
        getattr(self, f"_{self.chance.choice(verbs)}")()

    def _move(self) -> None:
        self._root.queue("q").move(self._root.queue("aside"))

    def _move_back(self) -> None:
        self._root.queue("aside").move(self._root.queue("q"))

    def _requeue(self) -> None:
        """Take from consumers what they hold."""
        self._root.queue("q").requeue(state="processing")

    def _purge(self) -> None:
        ids = [message.id for message in self._root.queue("q").browse()][:1]
        for outcome in self._root.queue("q").purge(ids) if ids else ():
            if outcome.ok:
                self._note("took", outcome.id)

    def _recall(self) -> None:
        recall(self._root.context, self._root.context.config.peer[0], None)

    def _delete(self) -> None:
        """Delete the queue, which is refused while it has messages; make it anew, soon."""
        self._root.delete_queue("q")
        self._note("deleted", self._where)
        time.sleep(0.1 * self.chance.random())
        self._root.create_queue("q", **QUEUE)


def _work_off(folder: Path) -> set[str]:
    """Let bridges and a consumer work until nothing is left; return what a recall that asks nobody brought back."""
    recalled = set[str]()
    roots = [timed(Root(folder / name), AT_ONCE) for name in ROOTS]
    with open(folder / "notes" / "end.log", "w") as notes:

        def takes_all(queue: Queue) -> int:
            queue.sweep(unleased_older_than=0)
            taken = 0
            while (message := queue.receive()) is not None:
                print(f"took {name_of(message.body)}", file=notes)
                message.ack()
                taken += 1
            return taken

        for root in roots:
            if not root.queue("q").exists():
                root.create_queue("q", **QUEUE)

        def is_over() -> bool:
            taken = 0
            for root in roots:
                with suppress(DropqError):  # a row that leads to a queue that was deleted
                    _bring(root.queue("q"))
                taken += takes_all(root.queue("q")) + takes_all(root.queue("aside"))
            return not taken

        until(is_over, "all to be taken")
        for root, peer in zip(roots, reversed(ROOTS), strict=True):
            given = Path(root.queue("q").layout.transfers).glob("*/target/*~*")
            recalled |= {str(name_of(path.read_bytes())) for path in given}
            end_rows(root.context, peer, None)
        until(is_over, "what came back to be taken")
    return recalled


def _judge(row: Row, crowd: Crowd, folder: Path, recalled: set[str]) -> None:
    """Hold what was taken against what was sent."""
    found = crowd.noted("took")
    for path in (path for name in ROOTS for path in (folder / f"taken-{name}").iterdir()):
        found[str(name_of(path.read_bytes()))] += 1
    sent, tried, unsure = (crowd.noted(verb) for verb in ("sent", "try", "tries"))
    row.cases = sum(found.values())
    lost = [name for name in sent if not found[name] and not unsure[name]]
    doubled = [name for name, times in found.items() if times > 1 + (name in recalled)]
    row.lost, row.doubled = len(lost), len(doubled)
    row.wrong += [f"{name} is lost" for name in lost] + [f"{name} came {found[name]} times" for name in doubled]
    row.wrong += [f"{name} was never sent" for name in found if name not in tried]
    for name in ROOTS:
        queue = Root(folder / name).queue("q")
        row.wrong += [f"{name}: {finding}" for finding in open_findings(queue.root)]
        row.wrong += [f"{name}: {count} stay in {where}" for where, count in queue.in_transit().items()]
