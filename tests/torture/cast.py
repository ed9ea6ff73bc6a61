"""Who takes part in a storm: producers, scripts, consumers, workers, sweepers, requeuers and a stream's reader.

Each plays its part in a process of its own until it is killed, and takes notes of every step. It does as programs do
that use dropq; now and then it takes its time over a step, or pauses between two.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import dropq
from dropq import LeaseLost, Message, Queue, Root, Subscription
from dropq.queue.stream_journal import Journal
from torture import account
from torture.notes import Notes

#: Seconds of a lease: soon over for a process that is stopped, enough for one that is not.
LEASE = 0.5
#: Seconds that a step is drawn out by, and that a pause takes, at most.
SLOW, PAUSE = 0.04, 0.1
#: Seconds that a message which another lost is held for, at most: until that one wants to settle it, perhaps.
LONG = 4 * LEASE
#: Messages that may wait before producers pause, and that one call takes at most.
WAITING, MANY = 40, 5
#: Rounds after which a consumer closes its subscription and opens another.
ROUNDS = 25


@dataclass(frozen=True)
class Actor:
    """What a process has to play its part: its queue, its notes, its chance, and a folder outside the root."""

    queue: Queue
    notes: Notes
    chance: random.Random
    scratch: Path
    #: Unlike that of any other process of the storm.
    name: str

    def pause(self) -> None:
        """Do nothing for a moment, and have nothing to do."""
        self.notes("idle")
        time.sleep(self.chance.uniform(0, PAUSE))

    def dawdle(self) -> None:
        """Take time over a step, every other time."""
        if self.flip(1 / 2):
            time.sleep(self.chance.uniform(0, SLOW))

    def flip(self, odds: float) -> bool:
        return self.chance.random() < odds


def play(role: str, root: Path, queue: str, notes: Path, seed: str) -> None:
    """Play a part until killed."""
    scratch = notes.with_suffix(".scratch")
    scratch.mkdir()
    actor = Actor(Root(root).queue(queue), Notes(notes), random.Random(seed), scratch, notes.stem)
    ROLES[role](actor)


# -- sending -----------------------------------------------------------------------------------------------------------


def produce(actor: Actor) -> None:
    """Send in every way that there is, as long as not too many wait."""
    target, numbers = actor.queue.layout.target, count()
    ways: list[Callable[[Actor, list[str]], None]] = [_send, _send_many, _write, _send_file, _send_later, _drop]
    while True:
        way = actor.chance.choice(ways)
        names = [f"{actor.name}-{next(numbers)}" for _ in range(actor.chance.randint(2, 8) if way is _send_many else 1)]
        actor.notes("try", *names)
        way(actor, names)
        actor.notes("sent", *names)
        while len(os.listdir(target)) > WAITING:
            actor.pause()


def _body(actor: Actor, name: str) -> bytes:
    return account.body(name, actor.chance.choice((0, 100, 5_000, 200_000)) if actor.flip(0.3) else 64)


def _send(actor: Actor, names: list[str]) -> None:
    long = "c" * actor.chance.choice((1, 300)) if actor.flip(0.2) else None  # the longer one does not fit a name
    actor.queue.send(_body(actor, names[0]), priority=actor.chance.choice((4, 4, 7)), correlation_id=long)


def _send_many(actor: Actor, names: list[str]) -> None:
    actor.queue.send_many(_body(actor, name) for name in names)


def _write(actor: Actor, names: list[str]) -> None:
    content = account.body(names[0], 50_000)
    with actor.queue.writer(properties={"written": True}) as file:
        file.write(content[:20_000])
        file.flush()
        actor.dawdle()
        file.write(content[20_000:])


def _send_file(actor: Actor, names: list[str]) -> None:
    path = actor.scratch / names[0]
    path.write_bytes(_body(actor, names[0]))
    actor.queue.send_file(path, move=actor.flip(0.5))
    path.unlink(missing_ok=True)


def _send_later(actor: Actor, names: list[str]) -> None:
    actor.queue.send(_body(actor, names[0]), delay=actor.chance.uniform(0.001, 0.3))


def _drop(actor: Actor, names: list[str]) -> None:
    """Send as a script does that knows nothing of dropq: write out of sight, then move."""
    layout = actor.queue.layout
    staged = f"{layout.working}/{names[0]}.csv"
    with open(staged, "wb", buffering=0) as file:
        content = _body(actor, names[0])
        file.write(content[:30])
        actor.dawdle()
        file.write(content[30:])
    os.rename(staged, f"{layout.target}/{names[0]}.csv")


# -- taking ------------------------------------------------------------------------------------------------------------


def consume(actor: Actor) -> None:
    """Take messages on the queue's lease, or for good where it has none, and settle each in some way."""
    _consume(actor, None)


def consume_leased(actor: Actor) -> None:
    """Take messages on a lease of one's own."""
    _consume(actor, LEASE)


def _consume(actor: Actor, lease: float | None) -> None:
    while True:
        with actor.queue.subscribe(lease_period=lease, max_backlog=2 * MANY) as subscription:
            for _ in range(ROUNDS):
                _round(actor, subscription)
            actor.notes("do", "close", *(message.owner for message in subscription.held))
        actor.notes("did", "close")


def _round(actor: Actor, subscription: Subscription) -> None:
    actor.notes("ask")
    messages = subscription.receive_many(actor.chance.randint(1, MANY))
    taken = [message for message in messages if got(actor.notes, message) is not None]
    for message in taken:
        actor.dawdle()
        if not actor.flip(0.03):  # some are held until the subscription is closed
            settle(actor, message)
    if not messages:
        actor.pause()


def got(notes: Notes, message: Message) -> str | None:
    """Note a message that was received, by its body; None when its claim is gone already, or its body is not whole."""
    owner, deadline, made = message.owner, message.deadline, None
    while made is None:
        try:
            content = message.body
        except LeaseLost:
            return None  # stopped before it had a look
        with suppress(FileNotFoundError):  # its lease was renewed in between, which renames it
            made = os.stat(message.path).st_ctime_ns
    name = account.name_of(content)
    if name is None:
        notes("half", message.file)
        return None
    notes("got", name, owner, round(deadline.timestamp() * 1000) if deadline is not None else 0, made)
    return name


def settle(actor: Actor, message: Message) -> None:
    """Settle a message in some way, mostly by an ack."""
    if message.deadline is not None and not _kept(actor, message):
        return
    verb = actor.chance.choices(("ack", "nack", "fail", "reject"), (10, 2, 2, 1))[0]
    ways: dict[str, Callable[[], None]] = {
        "ack": message.ack,
        "nack": lambda: message.nack(actor.chance.choice((None, 0.05))),
        "fail": lambda: message.fail("as it happens"),
        "reject": lambda: message.reject("as it happens"),
    }
    noted(actor.notes, verb, message, ways[verb])


def _kept(actor: Actor, message: Message) -> bool:
    """Hold a message for a while, which is long where another lost it; tell whether it is held still."""
    times = int(_while(actor, message) / (LEASE / 3)) or actor.flip(0.3)
    for _ in range(times):
        if not _extend(actor, message):
            return False
        time.sleep(LEASE / 3 if times > 1 else 0)
    return True


def _while(actor: Actor, message: Message) -> float:
    """Return for how long a message is held: some that another lost are held until that one is back."""
    lost = message.redelivered and not message.cancels
    return actor.chance.uniform(0, LONG) if lost and actor.flip(0.3) else 0


def _extend(actor: Actor, message: Message) -> bool:
    owner = message.owner
    actor.notes("do", "extend", owner)
    try:
        message.extend(LEASE)
    except LeaseLost:
        actor.notes("lost", "extend", owner)
        return False
    assert message.deadline is not None
    actor.notes("did", "extend", owner, round(message.deadline.timestamp() * 1000))
    return True


def noted(notes: Notes, verb: str, message: Message, way: Callable[[], None]) -> None:
    """Settle a message, and note that it is begun, and how it ended."""
    owner = message.owner
    notes("do", verb, owner)
    try:
        way()
    except LeaseLost:
        notes("lost", verb, owner)
    else:
        notes("did", verb, owner)


#: What it says of a message that its handler left to the worker, by the state that it was found in after that.
_LEFT = {"processed": "ack", "removed": "ack", "target": "nack", "delayed": "nack", "error": "fail"}


def work(actor: Actor) -> None:
    """Be a worker whose handler returns, raises, or settles its message itself."""
    left = threading.local()

    def handle(message: Message) -> None:
        last: tuple[str, Message] | None = getattr(left, "last", None)
        if last is not None and last[1].state in _LEFT:
            actor.notes("did", _LEFT[last[1].state], last[0])
        left.last = None
        if got(actor.notes, message) is None:
            raise dropq.Retry()  # to return would be to acknowledge it, and no note would tell
        actor.dawdle()
        if actor.flip(0.3):
            return settle(actor, message)
        time.sleep(_while(actor, message))  # its lease, where it has one, is renewed meanwhile
        left.last = str(message.owner), message
        actor.notes("do", "leave", message.owner)
        if actor.flip(0.2):
            raise actor.chance.choice((dropq.Retry(), dropq.Retry(0.02), dropq.Reject("no"), ValueError("no")))

    dropq.work(actor.queue, handle, concurrency=2, lease=actor.chance.choice((None, LEASE)))


#: The command of the worker of the command line: it notes what it is handed, and until when it had it.
_COMMAND = """\
read -r name rest && cat >/dev/null || exit 65
owner=${DROPQ_RECEIPT%%,*} deadline=${DROPQ_RECEIPT#*,}
made=$(stat -c %Z "$DROPQ_FILE")000000000 || exit 75
echo "$(date +%s%N) got $name $owner ${deadline%%,*} $made" >>"$0"
sleep 0.02
echo "$(date +%s%N) do leave $owner" >>"$0"
"""


def work_by_command(actor: Actor) -> None:
    """Be `dropq work`, with a command for each message."""
    from dropq.cli.main import main

    script = ["sh", "-c", _COMMAND, str(actor.scratch.with_suffix(".log"))]
    root, queue = str(actor.queue.root.path), actor.queue.name
    sys.exit(main(["--root", root, "work", queue, "-j", "2", "--lease", f"{LEASE}s", "--", *script]))


def stream(actor: Actor) -> None:
    """Be a stream: take up what the last run of it held, make batches, commit each, and settle it then."""
    checkpoint = actor.scratch.with_name("checkpoint")
    batch = int(checkpoint.read_text()) if checkpoint.exists() else 0
    lease = LEASE * actor.chance.choice((1, 4))
    subscription = actor.queue.subscribe(detached=True, lease_period=lease, max_backlog=None)
    journal = Journal(actor.queue.context, "storm", subscription)
    while True:
        actor.notes("do", "settle")
        journal.settle(batch)  # what was committed; the run that did so may not have come to it
        actor.notes("do", "batch")
        if not journal.next_batch(batch + 1, 2 * MANY):
            actor.pause()
            continue
        messages = [message for message in journal.messages(batch + 1) if got(actor.notes, message) is not None]
        actor.dawdle()
        if actor.flip(0.3):
            journal.renew()
        batch += 1
        written = actor.scratch / "checkpoint"
        written.write_text(str(batch))
        os.replace(written, checkpoint)
        owners = {message: str(message.owner) for message in messages}
        actor.notes("do", "ack", *owners.values())
        journal.settle(batch)
        actor.notes("did", "ack", *(owner for message, owner in owners.items() if message.state == "processed"))


# -- keeping in order --------------------------------------------------------------------------------------------------


def sweep(actor: Actor) -> None:
    """Sweep, again and again."""
    while True:
        actor.notes("do", "sweep")
        actor.queue.sweep()
        actor.pause()


def requeue(actor: Actor) -> None:
    """Bring back what is in error/, again and again."""
    while True:
        actor.notes("do", "requeue")
        actor.queue.requeue()
        actor.pause()


ROLES: dict[str, Callable[[Actor], None]] = {
    "produce": produce,
    "consume": consume,
    "consume-leased": consume_leased,
    "work": work,
    "work-by-command": work_by_command,
    "stream": stream,
    "sweep": sweep,
    "requeue": requeue,
}
