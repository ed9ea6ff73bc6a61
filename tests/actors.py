"""Processes that tests start, stop and kill: `python actors.py ROLE ROOT NOTES ...`.

An actor keeps its notes in the folder NOTES with plain system calls, so that a test can tell what it did without asking
dropq. A body that is held has a file in NOTES/holding; two holders at a time leave one in NOTES/violations.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from forks import fork as fork_child

from dropq import DropqError, LeaseLost, Message, Queue, QueueFull, Root

#: The name of a claim; its groups are the message's id, and the mark of its copy if it is one.
MESSAGE = re.compile(r"[^~]*~[^.]*\.([^.]*)\.(?:.*(copyS=[^&]*))?.*")

Actor = subprocess.Popen[bytes]


def start(role: str, root: Path, notes: Path, *arguments: object) -> Actor:
    """Start an actor on the queue `q` of a root; what it prints is in its notes."""
    for folder in ("holding", "violations", "acked", "out"):
        (notes / folder).mkdir(parents=True, exist_ok=True)
    with open(notes / "out" / f"{role}-{time.monotonic_ns()}", "wb") as out:
        command = [sys.executable, __file__, role, str(root), str(notes), *map(str, arguments)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out)


def said(actor: Actor) -> str:
    """The next line that an actor prints."""
    assert actor.stdout is not None
    return actor.stdout.readline().decode().strip()


def finish(*actors: Actor) -> None:
    """End actors that are still there."""
    for actor in actors:
        actor.kill()
        actor.wait(10)
        for stream in (actor.stdin, actor.stdout):
            if stream is not None:
                stream.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that was killed and not waited for does not."""
    return state_of(pid) not in ("Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped and is to go on later."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """The letter by which the kernel tells a process's state; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def say(text: object) -> None:
    print(text, flush=True)


def main(role: str, root: str, notes: str, *arguments: str) -> None:
    roles: dict[str, Callable[..., None]] = {
        "produce": produce,
        "fill": fill,
        "consume": consume,
        "sweep": sweep,
        "hold": hold,
        "fork": fork,
        "renew": renew,
        "limited": limited,
        "lane": lane,
        "turns": turns,
        "obey": obey,
    }
    roles[role](Root(root).queue("q"), Path(notes), *arguments)


def stopped(notes: Path) -> bool:
    return (notes / "stop").exists()


def produce(queue: Queue, notes: Path, prefix: str, count: str) -> None:
    """Send bodies, and say each that was sent."""
    for number in range(int(count)):
        queue.send(f"{prefix}-{number}".encode())


def fill(queue: Queue, notes: Path, prefix: str) -> None:
    """Send when told to, until the queue is full; say how many that were."""
    say("ready")
    sys.stdin.readline()
    number = 0
    with suppress(QueueFull):
        while True:
            queue.send(f"{prefix}-{number}".encode())
            number += 1
    say(number)


def consume(queue: Queue, notes: Path, lease: str = "0", backlog: str = "1") -> None:
    """Take messages and ack them until there is a file `stop`; some are given back now and then."""
    with queue.subscribe(lease_period=None if lease == "0" else lease, max_backlog=int(backlog)) as subscription:
        number = 0
        while not stopped(notes):
            for message in subscription.receive_many(int(backlog), timeout=0.1):
                number += 1
                body = message.body.decode()
                note_holding(notes, body)
                try:
                    if number % 7 == 0:
                        (notes / "holding" / body).unlink()
                        message.nack()
                        continue
                    message.ack()
                except LeaseLost:
                    continue  # it was too slow, and says so
                (notes / "acked" / f"{body}.{os.getpid()}").touch()
                (notes / "holding" / body).unlink(missing_ok=True)


def note_holding(notes: Path, body: str) -> None:
    """Put a mark on a body; another's mark on it is a violation, unless that process is dead."""
    mark = notes / "holding" / body
    while True:
        try:
            fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            holder = read_holder(mark)
            if holder and alive(holder):
                (notes / "violations" / body).touch()
            mark.unlink(missing_ok=True)
            continue
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)
        return


def read_holder(mark: Path) -> int:
    try:
        return int(mark.read_text() or 0)
    except FileNotFoundError:
        return 0


def sweep(queue: Queue, notes: Path) -> None:
    """Sweep all the time."""
    while not stopped(notes):
        try:
            queue.sweep()
        except DropqError as error:
            (notes / "violations" / f"sweep-{os.getpid()}").write_text(str(error))


def hold(queue: Queue, notes: Path, count: str, lease: str = "0") -> None:
    """Take messages and say so; then ack them when told to, and say what came of it."""
    with queue.subscribe(lease_period=None if lease == "0" else lease, max_backlog=int(count)) as subscription:
        messages = take(subscription.receive_many(int(count), timeout=10), int(count))
        say("holding")
        sys.stdin.readline()
        for message in messages:
            try:
                message.ack()
                say("acked")
            except LeaseLost:
                say("lost")


def take(messages: list[Message], count: int) -> list[Message]:
    assert len(messages) == count
    return messages


def fork(queue: Queue, notes: Path) -> None:
    """Take a message, and leave a forked child behind that outlives this process."""
    message = queue.receive(10)
    assert message is not None

    def live_on() -> None:
        os.close(1)  # nobody waits for this one
        signal.pause()

    say(fork_child(live_on))
    signal.pause()


def renew(queue: Queue, notes: Path, lease: str, times: str) -> None:
    """Hold a message for many times its lease, which is renewed each time a third of it has passed."""
    with queue.subscribe(lease_period=lease) as subscription:
        message = subscription.receive(10)
        assert message is not None
        say("holding")
        for _ in range(int(times)):
            time.sleep(float(lease) / 3)
            message.extend(lease)
        message.ack()
        say("acked")


def limited(queue: Queue, notes: Path, most: str) -> None:
    """Take messages and ack them until there is a file `stop`; see that the living hold no more than a limit."""
    with queue.subscribe(max_backlog=None) as subscription:
        while not stopped(notes):
            for message in iter(lambda: subscription.receive(0.1), None):
                mark = notes / "holding" / f"{os.getpid()}.{message.id}"
                mark.touch()
                holders = [int(name.partition(".")[0]) for name in os.listdir(notes / "holding")]
                if len([pid for pid in holders if alive(pid)]) > int(most):
                    (notes / "violations" / message.id).touch()
                mark.unlink()
                message.ack()
                (notes / "acked" / f"{message.id}.{os.getpid()}").touch()


def lane(queue: Queue, notes: Path) -> None:
    """Take messages `LANE-N` and barriers `sync-LANE` until there is a file `stop`; see that no lane passes a barrier.

    A message is of a lane; nothing of a later one may be held while a barrier, or something before it, is.
    """
    with queue.subscribe() as subscription:
        while not stopped(notes):
            message = subscription.receive(0.1)
            if message is None:
                continue
            body = message.body.decode()
            number = int(body.removeprefix("sync-").partition("-")[0])
            index = 2 * number + body.startswith("sync-")
            mark = notes / "holding" / f"{os.getpid()}.{index}"
            mark.touch()
            others = [name.split(".") for name in os.listdir(notes / "holding")]
            if any(int(other) != index and alive(int(pid)) for pid, other in others):
                (notes / "violations" / f"{body}.{os.getpid()}").touch()
            mark.unlink()
            message.ack()


def turns(queue: Queue, notes: Path, allowed: str, handling: str) -> None:
    """Take messages until its input ends, each for some ms; note when each was asked for and given.

    With no handling it keeps them all; else it acknowledges the oldest when it holds as many as it may.
    """
    held: list[Message] = []
    log = []
    with queue.subscribe(max_backlog=int(allowed)) as subscription:
        say("ready")
        sys.stdin.readline()
        while True:
            asked = time.monotonic_ns()
            message = subscription.receive(0.5)
            if message is None:
                if select.select([sys.stdin], [], [], 0)[0]:
                    break
                continue
            log.append(f"{asked} {time.monotonic_ns()} {len(held)} {allowed}\n")
            held.append(message)
            if int(handling) and len(held) == int(allowed):
                time.sleep(int(handling) / 1000)
                held.pop(0).ack()
        (notes / "out" / f"turns.{os.getpid()}").write_text("".join(log))
        for message in held:
            message.ack()


def obey(queue: Queue, notes: Path) -> None:
    """Take some messages at a time, and do with each what its body says, until there is a file `stop`.

    Each ack leaves a note `ID.NUMBER` in NOTES/acked, and each claim that was lost by then one in NOTES/lost.
    """
    (notes / "lost").mkdir(exist_ok=True)
    elsewhere = Root(queue.root.path).queue("q")
    with queue.subscribe(max_backlog=3) as subscription:
        while not stopped(notes):
            for message in subscription.receive_many(3, timeout=0.1):
                see(queue, notes)
                try:
                    treat(message, elsewhere, notes)
                except LeaseLost:
                    (notes / "lost" / f"{message.id}.{os.getpid()}").touch()


def see(queue: Queue, notes: Path) -> None:
    """Look whether more is held than may be, or a message twice.

    The name of a claim never comes again: what is seen two times was held all the time in between.
    """
    held = set(os.listdir(queue.layout.processing)) & set(os.listdir(queue.layout.processing))
    messages = {MESSAGE.sub(r"\1\2", name) for name in held}
    if len(held) > (queue.config.max_backlog or len(held)) or len(messages) < len(held):
        (notes / "violations" / f"held-{os.getpid()}").write_text("\n".join(held))


def treat(message: Message, elsewhere: Queue, notes: Path) -> None:
    """Acknowledge a message, or first die, hang, or return it, or have another client acknowledge it by its id."""
    wish, first = json.loads(message.body)["do"], message.delivery_count == 1
    if wish == "poison" or (wish == "die" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if wish == "hang" and first:
        os.kill(os.getpid(), signal.SIGSTOP)
    if wish == "return" and first:
        message.nack()
        return
    if wish == "elsewhere":
        deadline, done = message.deadline, elsewhere.ack(message.id)
        in_time = deadline is not None and deadline > datetime.now(UTC)
        if in_time and done is (elsewhere.config.leasing == "strict"):
            (notes / "violations" / f"{message.id}.{os.getpid()}").touch()
        if done:
            note_acked(message, notes)
    message.ack()
    note_acked(message, notes)


def note_acked(message: Message, notes: Path) -> None:
    (notes / "acked" / f"{message.id}.{time.monotonic_ns()}").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
