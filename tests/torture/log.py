"""What the log says after a storm: from it alone, the last state of each message, but for one message a kill at most.

Producers, workers that fail one message in twenty and refuse one in fifty, scripts that send by `mv`, and a sweep are
killed at random. The log has all: acks, too. Then a message fails until the file of the day is full, which stops at its
limit, tells acts all the same, and whose sums count each failure.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from helpers import timed

from dropq import Root
from dropq.events.log import LINE_LIMIT, LISTED, OUTCOMES
from dropq.events.reader import Event, Reader
from dropq.lifecycle.timing import Timing
from torture.crowd import Crowd, send_by_hand
from torture.table import Options, Row

#: Seconds of the storm.
LONG, SHORT = 60.0, 3.0
ROLES = (*("producer",) * 4, *("worker",) * 4, *("script",) * 2, "sweep")
FAILURES, REFUSALS = 1 / 20, 1 / 50
#: Seconds between two messages of a producer: the workers keep up.
PAUSE = 0.002
QUEUE: dict[str, Any] = {"durability": "none", "redelivery_delay": 0, "redelivery_attempts": 2, "log": "all"}
#: What a failure says that fills the log, in bytes; and how often it fails after that.
TRACEBACK, BEYOND = 16 << 10, 1000
#: What the last line about a message may say, by the state that it is in; None stands for no line.
LAST: dict[str, tuple[str | None, ...]] = {
    "processed": ("acked",),
    "error": ("failed", "rejected"),
    "target": ("returned", None),
}


def run(options: Options) -> Iterable[Row]:
    """Return a row of the storm; and, for its figures, of a log that gets full."""
    rows = [storm(options)]
    return [*rows, full(options.folder / "full")] if options.long else rows


def full(folder: Path) -> Row:
    """Let a message fail until its log takes no more failures, and purge it."""
    row = Row("a message that fails until the log is full")
    queue = Root.create(folder).create_queue("q", **{**QUEUE, "redelivery_attempts": 10_000_000, "log": "failures"})
    queue.send(b"")
    with queue.subscribe() as subscription:

        def fail() -> None:
            message = subscription.receive(None)
            assert message is not None
            message.fail("it fails", traceback="x" * TRACEBACK)
            row.cases += 1

        fail()
        (file,) = Path(queue.layout.log).iterdir()
        while file.stat().st_size < LISTED:
            fail()
        for _ in range(BEYOND):
            fail()
    queue.purge()
    queue.context.log.sums.tell()
    size, events = file.stat().st_size, list(Reader(queue.layout.log).events())
    told, sums = Counter(event.event for event in events), [event for event in events if event.event == "sum"]
    if size > LISTED + LINE_LIMIT * (len(sums) + 2):
        row.wrong.append(f"the log has {size} bytes")
    if told["purged"] != 1:
        row.wrong.append(f"a purge is told {told['purged']} times")
    if (counted := sum(int(event.fields.get("returned", 0)) for event in sums)) != row.cases:
        row.wrong.append(f"{row.cases} failures, of which sums count {counted}")
    if not 0 < told["returned"] <= row.cases - BEYOND:
        row.wrong.append(f"{row.cases} failures, of which {told['returned']} have a line")
    return row


def storm(options: Options) -> Row:
    """Rage, let a sweep return what the dead held, and hold the log against the folders."""
    crowd = Crowd(options.folder, options.seed, ROLES, play)
    queue = crowd.root.create_queue("q", **QUEUE)
    crowd.rage(LONG if options.long else SHORT)
    timed(crowd.root, Timing(after_death=0))
    crowd.root.sweep()
    row = Row("storm of senders, workers, scripts and a sweep", kills=crowd.kills, wrong=crowd.wrong)
    states = {message.id: state for state in LAST for message in queue.browse(state)}
    events = list(Reader(queue.layout.log).events())
    row.cases = len(states)
    row.wrong += judged(states, events, crowd.kills)
    return row


def judged(states: dict[str, str], events: list[Event], kills: int) -> Iterator[str]:
    """Yield what is wrong with a log: the last lines of more messages than kills tell another state.

    No message has two acks, and no more are counted in sums than lie in the folders.
    """
    last: dict[str, str] = {}
    ended, sums = Counter[tuple[str, str]](), Counter[str]()
    for event in events:
        if event.event == "sum":
            sums += Counter({key: int(count) for key, count in event.fields.items() if key in OUTCOMES})
        elif id := event.fields.get("id"):
            last[str(id)] = event.event
            ended[str(id), event.event] += 1
    untold = [id for id, state in states.items() if last.get(id) not in LAST[state]]
    if len(untold) > kills:
        found = [f"{id} is in {states[id]}/, and the log says {last.get(id)}" for id in untold[:5]]
        yield f"{len(untold)} messages are told wrongly after {kills} kills: {'; '.join(found)}"
    for (id, outcome), count in ended.items():
        if outcome != "returned" and count > 1:
            yield f"{id} {outcome} {count} times"
    there = Counter(states.values())
    for what, count, most in (
        ("acked", sums["acked"], there["processed"]),
        ("failed and rejected", sums["failed"] + sums["rejected"], there["error"]),
    ):
        if count > most:
            yield f"sums count {count} {what}, and {most} are there"


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed."""
    queue, chance = Root(folder / "root").queue("q"), random.Random(seed)
    if role == "script":
        send_by_hand(queue.layout.base, name, folder, folder / "notes" / f"{name}.log")
    elif role == "producer":
        while True:
            queue.send(os.urandom(chance.choice((10, 1000))), delay=PAUSE if chance.random() < PAUSE else None)
    elif role == "sweep":
        while True:
            queue.sweep()
    with queue.subscribe() as subscription:
        while True:
            message = subscription.receive(None)
            assert message is not None
            fate = chance.random()
            if fate < FAILURES:
                message.fail("it fails, as it does at times")
            elif fate < FAILURES + REFUSALS:
                message.reject("it is refused")
            else:
                message.ack()
