"""Topics: crashes, faults and others at work at every call; then a storm in which everybody is killed at random.

In the storm, programs and scripts publish, programs sweep, and consumers work on five subscriptions: one gets only what
its filter chooses, one is full again and again, one is made and removed. At the end each subscription that stood all
the time has got each message exactly once. What was on its way to one that was removed is in the topic's error/.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers import until

from dropq import Queue, Root, Unavailable
from torture.account import body, look
from torture.storm import _forked
from torture.table import Options, Row
from torture.topic_cases import CASES, MEETING, OTHERS, SETTINGS, Setting, TopicCases

#: Seconds of the storm, and between two kills on average.
LONG, SHORT, EVERY = 60.0, 5.0, 0.1
#: Messages that may wait in the fullest subscription before publishers pause.
WAITING = 60
#: What the filtered subscription gets: urgent messages.
FILTER = "JMSPriority >= 7"
STANDING = ("all", "some", "full", "top")
#: Who takes part: three programs and two scripts publish, two programs sweep; each subscription has a consumer.
PUBLISHERS, CONSUMERS = ("publish",) * 3 + ("script",) * 2, tuple(f"consume-{name}" for name in STANDING)
ROLES = (*PUBLISHERS, "sweep", "sweep", *CONSUMERS, "come-and-go")

#: A script that publishes by `mv`, and says of each message that it tries and that it is sent.
SCRIPT = r"""
cd "$1" && n=0
while n=$((n + 1)); do
    name=$2-$n
    case $n in *3) name=$name-urgent file=8.$name.B ;; *) file=4.$name.B ;; esac
    echo "try $name" >>"$3"
    cp "$4/$name" "working/$file" 2>/dev/null || exit 0
    mv "working/$file" "target/$file"
    echo "sent $name" >>"$3"
    sleep 0.05
done
"""
#: Bodies that are laid out for a script: more than it comes to before it is killed.
BODIES = 400


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
    rows.append(storm(folder, options.seed, LONG if options.long else SHORT))
    return rows


def _all_cases(options: Options, setting: Setting) -> list[Row]:
    """Die at every call, refuse some calls, and let others work before some: all of them would take hours."""
    chance = random.Random(options.seed)
    crashes, faults, others = (Row(f"{what}: {setting.name}") for what in (
        "topics, crash at every call", "topics, faults at calls", "topics, others between two calls",
    ))  # fmt: skip
    for case in CASES:
        TopicCases(options.folder, setting, crashes).crash(case)
        TopicCases(options.folder, setting, faults).refuse(case, lambda all: chance.sample(all, len(all) // 20 + 1))
        for other in OTHERS if case in MEETING else ():
            cases = TopicCases(options.folder, setting, others)
            cases.meet(case, other, lambda all: chance.sample(all, len(all) // 5 + 1))
    return [crashes, faults, others]


# -- the storm -----------------------------------------------------------------------------------------------------


@dataclass
class Storm:
    """A root with its topics, and all who work there."""

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
        options = {"durability": "none", "redelivery_delay": 0}
        above = self.root.create_topic("a", **options)
        topic = self.root.create_topic("a.b", **options)
        topic.create_subscription("all", client_id="x")
        topic.create_subscription("some", client_id="x", filter=FILTER)
        full = topic.create_subscription("full", client_id="x")
        Path(full.layout.config_file).write_text('max_unprocessed = 5\noverflow = "block"\n')
        above.create_subscription("top", client_id="x")

    def rage(self, seconds: float) -> None:
        """Kill somebody again and again, and put another in the place."""
        for role in ROLES:
            self._start(role)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._chance.uniform(0, 2 * EVERY))
            pid = self._chance.choice(list(self.live))
            role = self._end(pid)
            self.kills += 1
            self._start(role)
        for pid in list(self.live):
            self._end(pid)

    def _start(self, role: str) -> None:
        self._serial += 1
        name = f"{role}-{self._serial}"
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

    def told(self, verb: str) -> set[str]:
        """Return the messages that publishers noted under a verb."""
        lines = (line for path in (self.folder / "notes").glob("*.log") for line in path.read_text().split("\n")[:-1])
        return {line.partition(" ")[2] for line in lines if line.startswith(f"{verb} ")}


def storm(folder: Path, seed: int, seconds: float) -> Row:
    """Rage, bring all in order, let everybody take what waits, and hold it against what was published."""
    whole = Storm(folder, seed)
    whole.rage(seconds)
    root = Root(folder / "root")
    topic = root.topic("a.b")

    def settled() -> bool:
        root.sweep()
        for name in STANDING:
            _take(_queue(root, name))
        return not any(topic.queue.counts()[state] for state in ("target", "processing", "delayed"))

    until(settled, "all that was published to be distributed", timeout=120)
    row = Row("topics, storm: publishers, scripts, sweeps and consumers of five subscriptions", kills=whole.kills)
    row.wrong += whole.wrong
    _judge(row, whole, root)
    return row


def _judge(row: Row, whole: Storm, root: Root) -> None:
    sent, tried = whole.told("sent"), whole.told("try")
    found = look(whole.folder / "root")
    row.wrong += [f"{path} is not whole" for path in found.damaged]
    lying: dict[str, Counter[str]] = {}
    for name, places in found.places.items():
        for place in places:
            where = f"{place.queue}/{place.state}" if place.queue.endswith(".incoming") else place.queue
            lying.setdefault(where.removeprefix("topic-root/"), Counter())[name] += 1
    published = lying.get("a/b/.incoming/processed", Counter())
    row.cases = len(published)
    for name in sorted(sent - published.keys()):
        row.lost += 1
        row.wrong.append(f"{name} was sent, and is not in the topic's archive")
    row.wrong += [f"{name} was never sent" for name in sorted(published.keys() - tried)]
    for name in STANDING:
        above = "a" if name == "top" else "a/b"
        got = lying.get(f"{above}/.subscriptions/{name}.x", Counter())
        wanted = {each for each in published if name != "some" or "urgent" in each}
        row.lost += len(wanted - got.keys())
        row.doubled += sum(count > 1 for count in got.values())
        row.wrong += [f"{name} did not get {each}" for each in sorted(wanted - got.keys())]
        row.wrong += [f"{name} has {each} {count} times" for each, count in sorted(got.items()) if count > 1]
        row.wrong += [f"{name} has {each}, which is not for it" for each in sorted(got.keys() - wanted)]
    row.wrong += list(_set_aside(root))
    staged = root.topic("a.b").queue.layout.staged
    for each in os.listdir(staged):
        if not os.path.isdir(f"{staged}/{each}/whole") and os.listdir(f"{staged}/{each}"):
            row.wrong.append(f"{each} is still staged")


def _set_aside(root: Root) -> Iterator[str]:
    """Yield what is in the topic's error/ for another reason than that its receiver, which was removed, is gone."""
    for message in root.topic("a.b").queue.browse("error"):
        reason = message.reason
        if reason is None or reason["reason"] != "receiver_gone" or "passing" not in str(reason):
            yield f"{message.file} is in error/: {reason}"


# -- who takes part ------------------------------------------------------------------------------------------------


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed."""
    chance = random.Random(seed)
    log = folder / "notes" / f"{name}.log"
    root = Root(folder / "root")
    if role == "script":
        _script(root, name, folder, log)
    with log.open("a", buffering=1) as notes:
        if role == "publish":
            _publish(root, name, chance, lambda words: notes.write(f"{words}\n"))
        while True:
            if role == "sweep":
                root.topic("a.b").queue.sweep()
            elif role == "come-and-go":
                _come_and_go(root)
            else:
                _take(_queue(root, role.partition("-")[2]))
            time.sleep(chance.uniform(0, 0.1))


def _publish(root: Root, name: str, chance: random.Random, note: Callable[[str], object]) -> None:
    topic, number = root.topic("a.b"), 0
    while True:
        urgent = chance.random() < 0.3
        message = f"{name}-{number}{'-urgent' if urgent else ''}"
        number += 1
        note(f"try {message}")
        topic.publish(body(message, chance.choice((0, 1_000, 100_000))), priority=8 if urgent else 4, timeout=0.2)
        note(f"sent {message}")
        while topic.queue.counts()["target"] > WAITING:
            time.sleep(0.05)


def _script(root: Root, name: str, folder: Path, log: Path) -> None:
    bodies = folder / "notes" / f"{name}.bodies"
    bodies.mkdir()
    for number in range(1, BODIES):
        message = f"{name}-{number}{'-urgent' if number % 10 == 3 else ''}"
        (bodies / message).write_bytes(body(message))
    base = root.topic("a.b").queue.layout.base
    os.execvp("sh", ["sh", "-c", SCRIPT, "sh", str(base), name, str(log), str(bodies)])


def _queue(root: Root, name: str) -> Queue:
    return root.queue(f"{'a' if name == 'top' else 'a.b'}/{name}.x")


def _take(queue: Queue) -> None:
    """Take what waits, and settle it."""
    with queue.subscribe(max_backlog=None) as subscription:
        while (message := subscription.receive()) is not None:
            message.ack()


def _come_and_go(root: Root) -> None:
    """Subscribe, take what comes for a moment, and unsubscribe."""
    topic = root.topic("a.b")
    queue = topic.create_subscription("passing", client_id="x")
    _take(queue)
    time.sleep(0.05)
    with suppress(Unavailable):  # a sweep has not seen yet that the one before is dead
        topic.unsubscribe("passing", client_id="x")
