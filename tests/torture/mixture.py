"""A storm in which topics, views, selectors, a route and dead letters feed each other in one root.

What is published is copied to subscriptions and a view. One subscription feeds a graph of queues by a selector, under
credit. There some messages are copied, some go on to a second topic, some aside by a route that is switched on and off,
and some nowhere: those are dead letters, and so is what is given back too often. Everybody is killed at random. In the
end each receiver of the topic has each message once, and each message that went into the graph ended once;
each dead letter says where it could not be delivered, and why.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

from helpers import until

from dropq import LeaseLost, Queue, Root, Unavailable
from dropq.routing import Routers, Serving, credit_audit, registry
from dropq.upkeep.sweep import QuickSweep
from torture.account import body, look, name_of
from torture.crowd import Crowd, send_by_hand
from torture.graph_cases import Books
from torture.rings import address_of
from torture.table import Options, Row

#: Seconds of the storm.
LONG, SHORT = 60.0, 5.0
#: Seconds between two audits of credits.
AUDIT_INTERVAL = 0.1
#: Messages that may wait in a queue that is slow before publishers pause.
WAITING = 30
#: What no selector takes says so in its name, and in a property; so does what is urgent.
ASTRAY, URGENT = "astray", "urgent"
#: Which receivers of the topic get everything; the one that gets what is urgent; and the one that feeds the graph.
EVERYTHING, FILTERED, FEEDING = ("a.b/all.x", "a.b/full.x", "a/top.x", "view"), "a.b/some.x", "a.b/feed.x"
TOPIC, START, SECOND, SECOND_OUT, AUDIT, ASIDE, DEAD = "a.b", "start", "b", "b/out.y", "audit", "aside", "dead"
CONSUMED = (*EVERYTHING, FILTERED, SECOND_OUT, SECOND_OUT, SECOND_OUT, AUDIT, ASIDE, DEAD)
ROLES = (
    *(f"consume {address}" for address in CONSUMED),
    *("publish", "publish", "script", "send-to-view", "route", "route", "route", "sweep", "sweep", "switch"),
)
CONFIGURATION = """format = 1
dead_letter_queue = "dead"
[defaults]
durability = "none"
redelivery_delay = 0
settle_time = 0
"""
SWITCH = "routing/aside.in-use"


class Storm(Crowd):
    """A root with all that routes, and all that work there."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed, ROLES, play)
        (folder / "root" / "dropq.toml").write_text(CONFIGURATION)
        root = self.root = Root(folder / "root")
        for name in ("a", TOPIC):
            root.create_topic(name)
        root.create_topic(SECOND, max_deliveries=3, exhausted="dead-letter")
        for address in (*EVERYTHING, FILTERED, FEEDING, SECOND_OUT):
            topic, _, subscription = address.partition("/")
            if subscription:
                name, client = subscription.split(".")
                filter = "JMSPriority >= 7" if address == FILTERED else None
                root.topic(topic).create_subscription(name, client_id=client, filter=filter)
        Path(root.queue("a.b/full.x").layout.config_file).write_text("max_unprocessed = 5\n")
        root.create_queue("view", underlying_topic=TOPIC)
        for name in (DEAD, AUDIT, ASIDE):
            root.create_queue(name)
        start = root.create_queue(START, unroutable_after="0s")
        root.queue(FEEDING).add_selector("on", to=START, credit=5)
        start.add_selector("audit", to=AUDIT, op="copy", filter="way IS NULL")
        start.add_selector("on", to=SECOND, credit=2, filter="way IS NULL")
        base = Path(start.layout.base)
        (base / "routing").mkdir(exist_ok=True)
        (base / "routing.properties").write_text("aside.selector=JMSPriority = 8\n")
        (base / "routing" / "aside").symlink_to(root.queue(ASIDE).layout.target)


def storm(options: Options) -> Row:
    """Rage, bring all in order, settle what waits, and hold it against what was published."""
    seconds = LONG if options.long else SHORT
    folder = options.folder / "mixture"
    folder.mkdir()
    with (
        mock.patch.object(credit_audit, "AUDIT_INTERVAL", AUDIT_INTERVAL),
        mock.patch.object(registry, "AUDIT_INTERVAL", AUDIT_INTERVAL),
    ):
        whole = Storm(folder, options.seed)
        whole.rage(seconds)
        root = Root(folder / "root")
        Path(root.queue(START).layout.base, SWITCH).unlink(missing_ok=True)
        row = Row("storm of topics, views, selectors, routes and dead letters", kills=whole.kills)
        row.wrong += whole.wrong
        until(lambda: not root.sweep().total, "sweeps to find nothing more to do")
        row.wrong += [*Books.of(folder / "root").overdrawn(), *Books.of(folder / "root").leaked()]
        until(lambda: _is_settled(root), "all that was published to be settled")
        until(lambda: not root.sweep().total, "sweeps to find nothing more to do")
    _judge(row, whole)
    row.wrong += [f"credit {each} is left" for each in Books.of(folder / "root").spent]
    return row


def _is_settled(root: Root) -> bool:
    """Route what waits, settle what comes, and return whether nothing waits any more."""
    root.sweep()
    for queue in root.queues():
        queue.route()
    for address in dict.fromkeys(CONSUMED):
        with root.queue(address).subscribe(max_backlog=None) as subscription:
            while (message := subscription.receive()) is not None:
                message.ack()
    return not any(queue.counts()[state] for queue in root.queues() for state in ("target", "processing", "delayed"))


def _judge(row: Row, whole: Storm) -> None:
    found = look(whole.folder / "root")
    row.wrong += [f"{path} is not whole" for path in found.damaged]
    settled = whole.noted("settled")
    row.cases = len(found.locations)
    for name in sorted(whole.noted("sent").keys() | found.locations.keys()):
        lies = Counter(address_of(location).partition("/processed")[0] for location in found.locations.get(name, ()))
        for address in (TOPIC, *EVERYTHING, FILTERED):
            _count(row, name, address, lies.pop(address, 0), int(address != FILTERED or URGENT in name))
        ends = Counter({end: lies.pop(end, 0) for end in (SECOND_OUT, ASIDE, DEAD)})
        _count(row, name, "an end of the graph", ends.total(), 1)
        audited, second = lies.pop(AUDIT, 0), lies.pop(SECOND, 0)
        went_on = bool(ends[SECOND_OUT] or (ends[DEAD] and ASTRAY not in name))
        _count(row, name, SECOND, second, int(went_on))
        _count(row, name, AUDIT, audited, int(went_on or (audited > 0 and ends[ASIDE] > 0)))
        row.wrong += [f"{name} lies in {address} {count} times" for address, count in lies.items()]
    row.wrong += _unexplained(Root(whole.folder / "root"))
    row.wrong += [f"{lies} was settled {count} times" for lies, count in sorted(settled.items()) if count > 1]
    tried = whole.noted("try")
    row.wrong += [f"{name} was never sent" for name in sorted(found.locations.keys() - tried.keys())]


def _unexplained(root: Root) -> Iterator[str]:
    """Yield the dead letters that do not say where they could not be delivered, and why."""
    for letter in root.queue(DEAD).browse("processed"):
        is_astray = ASTRAY in str(name_of(letter.body))
        ended = (START, "unroutable") if is_astray else (SECOND_OUT, "max_deliveries")
        if (said := (letter.origin, letter.dead_letter_reason)) != ended:
            yield f"{letter.path} says {said}, not {ended}"


def _count(row: Row, name: str, where: str, count: int, wanted: int) -> None:
    row.lost += count < wanted
    row.doubled += count > wanted
    if count != wanted:
        row.wrong.append(f"{name} is {count} times in {where}, and not {wanted} times")


# -- who takes part ------------------------------------------------------------------------------------------------


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed."""
    chance = random.Random(seed)
    path = folder / "notes" / f"{name}.log"
    root = Root(folder / "root")
    part, _, address = role.partition(" ")
    if part == "script":
        send_by_hand(root.queue(TOPIC).layout.base, name, folder, path)
    with path.open("a", buffering=1) as notes:

        def note(words: str) -> None:
            notes.write(f"{words}\n")

        if part == "route":
            routers = Routers(root.context, sweep=partial(QuickSweep, routes=False))
            Serving(routers).run(lambda: False)
        if part in ("publish", "send-to-view"):
            _publish(root, root.queue(TOPIC if part == "publish" else "view"), name, chance, note)
        while True:
            if part == "sweep":
                root.sweep()
            elif part == "switch":
                _switch(Path(root.queue(START).layout.base, SWITCH), chance)
            else:
                _consume(root.queue(address), chance, note)
            time.sleep(chance.uniform(0, 0.1))


def _publish(root: Root, queue: Queue, name: str, chance: random.Random, note: Callable[[str], None]) -> None:
    number = 0
    while True:
        urgent, astray = chance.random() < 0.3, chance.random() < 0.1
        message = f"{name}-{number}{f'-{URGENT}' * urgent}{f'-{ASTRAY}' * astray}"
        number += 1
        note(f"try {message}")
        queue.send(
            body(message, chance.choice((0, 1_000, 100_000))),
            priority=8 if urgent else 4,
            properties={"way": "none"} if astray else None,
        )
        note(f"sent {message}")
        while root.queue(FEEDING).counts()["target"] > WAITING or root.queue(TOPIC).counts()["target"] > WAITING:
            time.sleep(0.05)


def _switch(switch: Path, chance: random.Random) -> None:
    """Put the route into use, or out of it."""
    if switch.exists():
        switch.unlink(missing_ok=True)
    else:
        switch.touch()
    time.sleep(chance.uniform(0, 0.5))


def _consume(queue: Queue, chance: random.Random, note: Callable[[str], None]) -> None:
    """Take what comes, and settle it; in the second topic, give some back, which makes dead letters in the end."""
    with queue.subscribe(max_backlog=None) as subscription:
        for _ in range(20):
            if (message := subscription.receive(timeout=0.2)) is None:
                return
            if queue.name == SECOND_OUT and chance.random() < 0.3:
                with suppress(LeaseLost):
                    message.nack(delay=0)
                continue
            with suppress(LeaseLost, Unavailable):
                message.ack()
                note(f"settled {queue.name} {name_of(message.body)}")
