"""Topics: crashes, faults and others at work at every call; then a storm in which everybody is killed at random.

In the storm, programs and scripts publish, programs sweep, and consumers work on five subscriptions: one gets only what
its filter chooses, one is full again and again, one is made and removed. At the end each subscription that stood all
the time has got each message exactly once. What was on its way to one that was removed is in the topic's error/.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from helpers import until

from dropq import Queue, Root, Unavailable
from torture import hardships
from torture.account import body, look
from torture.acts import of_each
from torture.crowd import Crowd, send_by_hand
from torture.table import Options, Row
from torture.topic_cases import CASES, MEETING, OTHERS, SETTINGS, Setting, TopicCases

#: Seconds of the storm.
LONG, SHORT = 60.0, 5.0
#: Messages that may wait in the fullest subscription before publishers pause.
WAITING = 60
#: What the filtered subscription gets: urgent messages.
FILTER = "JMSPriority >= 7"
STANDING = ("all", "some", "full", "top")
#: Who takes part: three programs and two scripts publish, two programs sweep; each subscription has a consumer.
PUBLISHERS, CONSUMERS = ("publish",) * 3 + ("script",) * 2, tuple(f"consume-{name}" for name in STANDING)
ROLES = (*PUBLISHERS, "sweep", "sweep", *CONSUMERS, "come-and-go")


def run(options: Options) -> Iterable[Row]:
    """Return a row for the crashes, the faults and the others of each setting, for each hardship, and for the storm."""
    rows = of_each(SETTINGS, options, _all_cases) if options.long else []
    rows += hardships.run(options)
    folder = options.folder / "storm"
    folder.mkdir()
    rows.append(storm(folder, options.seed, LONG if options.long else SHORT))
    return rows


def _all_cases(options: Options, setting: Setting) -> list[Row]:
    """Die at every call, refuse some calls, and let others work before some: all of them would take hours."""
    chance = random.Random(options.seed)
    crashes, faults, others = (Row(f"{what}: {setting.name}") for what in (
        "crash at every call", "faults at calls", "others between two calls",
    ))  # fmt: skip
    for case in options.shared(CASES):
        TopicCases(options.folder, setting, crashes).crash(case, options.some(chance))
        TopicCases(options.folder, setting, faults).refuse(case, options.some(chance, 20))
        for other in OTHERS if case in MEETING else ():
            cases = TopicCases(options.folder, setting, others)
            cases.meet(case, other, options.some(chance, 20))
    return [crashes, faults, others]


# -- the storm -----------------------------------------------------------------------------------------------------


class Storm(Crowd):
    """A root with its topics, and all that work there."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed, ROLES, play)
        options = {"durability": "none", "redelivery_delay": 0}
        above = self.root.create_topic("a", **options)
        topic = self.root.create_topic("a.b", **options)
        topic.create_subscription("all", client_id="x")
        topic.create_subscription("some", client_id="x", filter=FILTER)
        full = topic.create_subscription("full", client_id="x")
        Path(full.layout.config_file).write_text('max_unprocessed = 5\noverflow = "block"\n')
        above.create_subscription("top", client_id="x")


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

    until(settled, "all that was published to be distributed")
    row = Row("storm", kills=whole.kills)
    row.wrong += whole.wrong
    _judge(row, whole, root)
    return row


def _judge(row: Row, whole: Storm, root: Root) -> None:
    sent, tried = whole.noted("sent").keys(), whole.noted("try").keys()
    found = look(whole.folder / "root")
    row.wrong += [f"{path} is not whole" for path in found.damaged]
    lying: dict[str, Counter[str]] = {}
    for name, locations in found.locations.items():
        for location in locations:
            where = f"{location.queue}/{location.state}" if location.queue.endswith(".incoming") else location.queue
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
        send_by_hand(root.topic("a.b").queue.layout.base, name, folder, log)
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
