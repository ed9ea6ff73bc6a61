"""Processes race for the messages of a queue, and some of them are killed or hang: each message is handed out once.

The actors' notes and the folders are read with plain system calls; see actors.py.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest
from actors import said, start
from forks import forked
from helpers import FRESH, base, make_queue, names_in, until, where

from dropq import DropqError, LeaseLost, Message, Queue, Root
from dropq.format import names

Actor = Popen[bytes]


def expect(actor: Actor, word: str) -> None:
    line = said(actor)
    assert line == word, f"the actor said {line!r}"


def accounted(queue: Queue, expected: list[bytes]) -> None:
    """Every body was processed and lies in processed/ once; nothing is anywhere else."""
    found = where(queue)
    assert set(found) == {"processed"}
    assert Counter(found["processed"]) == Counter(expected)


@pytest.mark.parametrize(("lease", "backlog"), [("0", 1), ("30", 5)], ids=["no lease", "lease and backlog"])
@pytest.mark.crashes
def test_racing_consumers_of_whom_some_are_killed_process_each_message_once(
    tmp_path: Path, stage: list[Actor], lease: str, backlog: int
) -> None:
    queue = make_queue(tmp_path / "root")
    notes, root, dice = tmp_path / "notes", tmp_path / "root", random.Random(4711)
    consumers = [start("consume", root, notes, lease, backlog) for _ in range(3)]
    stage += consumers
    stage += [start("sweep", root, notes), *(start("produce", root, notes, f"p{n}", 100) for n in range(2))]
    expected = sorted(f"p{n}-{number}".encode() for n in range(2) for number in range(100))
    for done in (15, 60, 120):
        until(partial(_done, queue, done), f"{done} messages to be processed")
        victim = consumers.pop(dice.randrange(len(consumers)))
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        consumers.append(start("consume", root, notes, lease, backlog))
        stage.append(consumers[-1])
    until(partial(_done, queue, len(expected)), "all messages to be processed")
    assert os.listdir(notes / "violations") == []
    acked = Counter(name.partition(".")[0] for name in os.listdir(notes / "acked"))
    assert set(acked.values()) == {1}
    accounted(queue, expected)


def _done(queue: Queue, count: int) -> bool:
    return len(os.listdir(base(queue) / "processed")) >= count


@pytest.mark.parametrize("lease", ["0", "3600"], ids=["no lease", "lease"])
def test_what_a_killed_consumer_held_is_back_after_the_next_sweep_counted_as_a_delivery(
    tmp_path: Path, stage: list[Actor], lease: str
) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a", b"b", b"c", b"d"])
    holder = start("hold", tmp_path / "root", tmp_path / "notes", 3, lease)
    stage.append(holder)
    expect(holder, "holding")
    assert queue.sweep().total == 0
    assert where(queue) == {"processing": [b"a", b"b", b"c"], "target": [b"d"]}
    holder.kill()
    holder.wait(10)
    assert queue.sweep().dead == 3
    assert where(queue) == {"target": [b"a", b"b", b"c", b"d"]}
    assert [message.delivery_count for message in queue.browse()] == [1, 1, 1, 0]
    assert [message.cancels for message in queue.browse()] == [0, 0, 0, 0]
    assert os.listdir(queue.layout.consumers) == []


def test_a_consumer_on_the_way_returns_what_a_killed_one_held(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    holder = start("hold", tmp_path / "root", tmp_path / "notes", 1)
    stage.append(holder)
    expect(holder, "holding")
    with queue.subscribe() as subscription:
        assert subscription.receive() is None
        holder.kill()
        holder.wait(10)
        message = subscription.receive(10)
        assert message is not None
        assert message.delivery_count == 2


def test_one_that_hangs_without_a_lease_keeps_its_messages(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    holder = start("hold", tmp_path / "root", tmp_path / "notes", 1)
    stage.append(holder)
    expect(holder, "holding")
    holder.send_signal(signal.SIGSTOP)
    assert queue.sweep(unleased_older_than=0).total == 0
    assert queue.receive() is None
    assert where(queue) == {"processing": [b"a"]}
    holder.send_signal(signal.SIGCONT)
    holder.communicate(b"go\n")
    accounted(queue, [b"a"])


def test_one_that_hangs_loses_its_messages_with_its_lease_and_its_late_ack_changes_nothing(
    tmp_path: Path, stage: list[Actor]
) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    holder = start("hold", tmp_path / "root", tmp_path / "notes", 1, "0.5")
    stage.append(holder)
    expect(holder, "holding")
    holder.send_signal(signal.SIGSTOP)
    until(lambda: queue.sweep().lapsed == 1, "its lease to be swept")
    message = queue.receive()
    assert message is not None
    assert message.delivery_count == 2
    before = names_in(queue, "processing")
    holder.send_signal(signal.SIGCONT)
    said_last, _ = holder.communicate(b"go\n")
    assert said_last == b"lost\n"
    assert names_in(queue, "processing") == before
    message.ack()
    accounted(queue, [b"a"])


def test_one_that_hangs_and_is_killed_gives_back_what_it_still_held(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    holder = start("hold", tmp_path / "root", tmp_path / "notes", 1)
    stage.append(holder)
    expect(holder, "holding")
    holder.send_signal(signal.SIGSTOP)
    holder.kill()
    holder.wait(10)
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a"]}


def test_a_lease_that_is_renewed_in_time_is_never_swept(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    holder = start("renew", tmp_path / "root", tmp_path / "notes", "0.6", 9)
    stage += [holder, start("sweep", tmp_path / "root", tmp_path / "notes")]
    expect(holder, "holding")
    expect(holder, "acked")
    accounted(queue, [b"a"])
    assert [message.delivery_count for message in queue.browse("processed")] == [0], "as it was sent"


def test_a_forked_child_does_not_keep_a_killed_consumer_alive(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    parent = start("fork", tmp_path / "root", tmp_path / "notes")
    stage.append(parent)
    child = int(said(parent))
    try:
        assert queue.sweep().total == 0
        parent.kill()
        parent.wait(10)
        until(lambda: queue.sweep().dead == 1, "the child to let go of what it inherited")
        assert where(queue) == {"target": [b"a"]}
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_ends_leaves_its_parents_messages_alone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    held = queue.receive()
    assert held is not None
    subscription = queue.subscribe()

    def end() -> None:
        nonlocal subscription, held
        subscription.close()
        own = queue.receive()
        assert own is not None
        own.ack()
        with pytest.raises(DropqError, match="fork"):
            subscription.receive()
        queue.close()
        del subscription, held
        gc.collect()

    assert forked(end) == 0
    assert Root(tmp_path).queue("q").sweep().total == 0
    assert where(queue) == {"processing": [b"a"], "processed": [b"b"]}
    held.ack()
    subscription.close()
    queue.close()


def test_threads_share_a_subscription_and_each_message_goes_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    expected = [str(number).encode() for number in range(300)]
    queue.send_many(expected)
    taken: list[bytes] = []

    def work() -> None:
        while (message := queue.receive()) is not None:
            taken.append(message.body)
            message.ack()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert Counter(taken) == Counter(expected)
    accounted(queue, sorted(expected))
    queue.close()


def test_threads_that_settle_one_message_settle_it_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    for number in range(40):
        queue.send(str(number).encode())
        message = queue.receive()
        assert message is not None
        outcomes = _settle_at_once(message)
        assert outcomes.count("lost") == 2
        assert sum(len(bodies) for bodies in where(queue).values()) == number + 1
        if "nack" in outcomes:
            again = queue.receive()
            assert again is not None
            again.ack()
    queue.close()


def _settle_at_once(message: Message) -> list[str]:
    """Settle a message in three ways at once; return what came of each."""
    gate = threading.Barrier(3)
    outcomes: list[str] = []
    verbs: dict[str, Callable[[], None]] = {
        "ack": message.ack,
        "nack": message.nack,
        "reject": partial(message.reject, "r"),
    }

    def settle(verb: str) -> None:
        gate.wait(10)
        try:
            verbs[verb]()
            outcomes.append(verb)
        except LeaseLost:
            outcomes.append("lost")

    threads = [threading.Thread(target=settle, args=(verb,)) for verb in verbs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return outcomes


def test_two_subscriptions_of_one_process_hold_apart(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    one, other = queue.subscribe(), queue.subscribe()
    first, second = one.receive(), other.receive()
    assert first is not None
    assert second is not None
    assert {first.body, second.body} == {b"a", b"b"}
    assert Root(tmp_path).queue("q").sweep().total == 0
    one.close()
    assert where(queue) == {"target": [first.body], "processing": [second.body]}
    other.close()
    assert where(queue) == {"target": [b"a", b"b"]}


def test_sweeps_that_race_return_what_the_dead_held_once(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root")
    bodies = [f"{number:03d}".encode() for number in range(100)]
    queue.send_many(bodies)
    holder = start("hold", tmp_path / "root", tmp_path / "notes", 100)
    stage.append(holder)
    expect(holder, "holding")
    holder.kill()
    holder.wait(10)
    stage += [start("sweep", tmp_path / "root", tmp_path / "notes") for _ in range(3)]
    until(lambda: where(queue) == {"target": bodies}, "all to be back")
    assert {names.parse(name).delivery_count for name in names_in(queue, "target")} == {1}
    assert os.listdir(tmp_path / "notes" / "violations") == []
