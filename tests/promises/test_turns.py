"""Whose turn a message is, call by call and among processes, some of which are slow, hang or die."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from actors import Actor, said, start
from helpers import base, make_queue, names_in, private, reopened, take, until, where

from dropq import Message, Queue
from dropq.lifecycle.timing import Timing
from dropq.policies import fair_share, receive_policies
from dropq.policies.lock import PolicyLock
from dropq.storage.files import Storage

#: Whose turn it is has all the time to come for it, and who gives way looks once.
KEPT = Timing(turn_patience=3600, turns_wait=0)


@pytest.mark.parametrize("model", ["round-robin", "proportional"])
def test_a_command_that_receives_comes_behind_all_that_wait(tmp_path: Path, model: str) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model=model)
    queue.send(b"a")
    with reopened(queue).subscribe() as waiting:
        first = waiting.receive()
        assert first is not None
        first.ack()
        assert waiting.receive() is None  # from now on it waits, and has had its turn
        queue.send(b"b")
        with queue.subscribe(lease_period="1m", detached=True) as passing:
            assert passing.receive() is None
            assert where(queue) == {"processed": [b"a"], "target": [b"b"]}
            own = waiting.receive()
            assert own is not None
            assert [name.partition(",")[0] for name in os.listdir(base(queue) / ".dropq" / "turns")] == [waiting.id]
            queue.send(b"c")
            assert passing.receive() is not None  # nobody waits any more


def standings(queue: Queue) -> dict[str, str]:
    """Whether each subscription waits, by its id, as its file says."""
    found = os.listdir(base(queue) / ".dropq" / "turns")
    return {name.partition(",")[0]: name.rpartition(",")[2] for name in found if name[0] != "."}


def test_who_was_passed_over_counts_again_when_it_next_asks(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    with queue.subscribe() as one:
        assert one.receive() is None
        assert standings(queue) == {one.id: "waits"}
        (name,) = os.listdir(base(queue) / ".dropq" / "turns")
        passed = name.replace(",waits", ",busy")
        os.rename(base(queue) / ".dropq" / "turns" / name, base(queue) / ".dropq" / "turns" / passed)
        assert one.receive() is None
        assert standings(queue) == {one.id: "waits"}


def test_who_waits_already_says_so_no_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    renamed: list[str] = []
    rename = Storage.rename

    def counting(self: Storage, source: str, destination: str) -> None:
        renamed.append(destination)
        rename(self, source, destination)

    with queue.subscribe() as one:
        assert one.receive() is None
        monkeypatch.setattr(Storage, "rename", counting)
        assert [one.receive() for _ in range(3)] == [None] * 3
        assert [path for path in renamed if "/turns/" in path] == []
        queue.send(b"a")
        assert one.receive() is not None
        assert len([path for path in renamed if "/turns/" in path]) == 1


def test_who_has_a_filter_that_cannot_be_read_is_taken_to_want_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    with reopened(queue).subscribe(filter="JMSPriority > 8") as picky, queue.subscribe() as other:
        assert picky.receive() is None
        (name,) = (name for name in os.listdir(base(queue) / ".dropq" / "turns") if name.startswith(picky.id))
        (base(queue) / ".dropq" / "turns" / name).write_text("((")
        os.rename(  # the other has had a turn, so that the picky one is before it
            base(queue) / ".dropq" / "turns" / name,
            base(queue) / ".dropq" / "turns" / name.replace(",waits", ",busy"),
        )
        queue.send(b"a")
        first = other.receive()
        assert first is not None
        first.ack()
        assert picky.receive() is None
        queue.send(b"b")
        assert other.receive() is None
        assert where(queue) == {"processed": [b"a"], "target": [b"b"]}
    assert "by a filter that cannot be read here" in caplog.text


def test_a_message_is_left_to_who_waits_for_it_by_a_filter(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    with reopened(queue).subscribe(filter="JMSPriority > 3") as picky, queue.subscribe() as other:
        assert picky.receive() is None
        queue.send(b"a", priority=1)
        first = other.receive()
        assert first is not None
        first.ack()
        queue.send(b"b", priority=9)
        assert other.receive() is None
        assert picky.receive() is not None


def test_who_is_passed_over_while_it_takes_has_one_standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    turns = base(queue) / ".dropq" / "turns"
    rename = Storage.rename

    def passing_over(self: Storage, source: str, destination: str) -> None:
        if "/processing/" in destination:
            (name,) = os.listdir(turns)
            os.rename(turns / name, turns / name.replace(",waits", ",busy"))
        rename(self, source, destination)

    with queue.subscribe() as one:
        assert one.receive() is None
        queue.send(b"a")
        monkeypatch.setattr(Storage, "rename", passing_over)
        assert one.receive() is not None
        assert os.listdir(turns) == [f"{one.id},1,1,busy"]


def test_who_loses_its_standing_while_it_takes_has_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and a sweep takes its standing for a dead one's just after it found that again."""
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    turns = base(queue) / ".dropq" / "turns"
    rename = Storage.rename
    found: list[str] = []

    def losing(self: Storage, source: str, destination: str) -> None:
        if "/processing/" in destination:
            (name,) = os.listdir(turns)
            os.rename(turns / name, turns / name.replace(",waits", ",busy"))
        elif source.endswith(",busy"):
            found.append(source)
            os.unlink(source)
        rename(self, source, destination)

    with queue.subscribe() as one:
        assert one.receive() is None
        queue.send(b"a")
        monkeypatch.setattr(Storage, "rename", losing)
        assert one.receive() is not None
        assert len(found) == 1
        assert os.listdir(turns) == [f"{one.id},1,1,busy"]


# -- among consumers -----------------------------------------------------------------------------------------


#: A message is left to whose turn it is, who has all the time to come for it.
LEFT = Timing(turn_patience=3600, turns_wait=3600)


class Grant(NamedTuple):
    """A message that was given: to whom, when it was asked for and given, what its taker held, and might hold."""

    consumer: int
    asked: int
    given: int
    held: int
    allowed: int


def granted(notes: Path) -> list[Grant]:
    found = []
    for number, path in enumerate(sorted((notes / "out").glob("turns.*"))):
        found += [Grant(number, *map(int, line.split())) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda grant: grant.given)


@contextmanager
def playing(tmp_path: Path, stage: list[Actor], *players: tuple[int, int]) -> Iterator[None]:
    """Let consumers, each with what it may hold and ms of handling, take messages until the block ends."""
    actors = [start("turns", tmp_path / "root", tmp_path / "notes", *player) for player in players]
    stage += actors
    inputs = [actor.stdin for actor in actors if said(actor) == "ready" and actor.stdin is not None]
    for each in inputs:
        each.write(b"\n")
        each.flush()
    yield
    for each in inputs:
        each.close()
    assert [actor.wait(600) for actor in actors] == [0] * len(players)


def test_round_robin_gives_equal_turns_to_those_that_wait(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root", fairness_model="round-robin")
    with playing(tmp_path, stage, (100, 0), (100, 0), (100, 0)):
        for _ in range(60):
            until(lambda: sum("waits" in name for name in private(queue, "turns")) == 3, "all to wait")
            queue.send(b"next")
            until(lambda: not names_in(queue, "target"), "the message to be taken")
    got = Counter(grant.consumer for grant in granted(tmp_path / "notes"))
    # A consumer that the machine lets wait may be passed over; without turns one gets half as much again.
    assert sorted(got.values()) == [pytest.approx(20, abs=3)] * 3


def test_of_messages_that_come_one_by_one_each_keeps_its_proportion(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root", fairness_model="proportional")
    with playing(tmp_path, stage, (100, 0), (300, 0)):
        for _ in range(200):
            until(lambda: sum("waits" in name for name in private(queue, "turns")) == 2, "both to wait")
            queue.send(b"next")
            until(lambda: not names_in(queue, "target"), "the message to be taken")
    got = Counter(grant.allowed for grant in granted(tmp_path / "notes"))
    assert dict(got) == {100: pytest.approx(50, rel=0.1), 300: pytest.approx(150, rel=0.1)}


def test_who_asks_again_and_again_leaves_a_message_to_whoever_waits_longer(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with queue.subscribe(max_backlog=None) as first, reopened(queue).subscribe(max_backlog=None) as second:
        assert first.receive() is None
        assert second.receive() is None
        queue.send_many([b"a", b"b", b"c", b"d"])
        taken: list[tuple[str, bytes]] = []
        other = threading.Thread(target=lambda: taken.extend(("second", m.body) for m in _each(second, 2)))
        other.start()
        taken.extend(("first", message.body) for message in _each(first, 2))
        other.join()
    assert Counter(who for who, _ in taken) == {"first": 2, "second": 2}


def _each(subscription: Any, count: int) -> Iterator[Message]:
    for _ in range(count):
        message = subscription.receive(10)
        assert message is not None
        yield message


def test_who_takes_a_message_wakes_the_one_that_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_policies, "TURN_RECHECK", 3600.0)
    queue = make_queue(tmp_path, timing=LEFT, fairness_model="round-robin")
    with reopened(queue, LEFT).subscribe() as one, reopened(queue, LEFT).subscribe() as another:
        first, second = sorted((one, another), key=lambda subscription: subscription.id)
        assert [first.receive(), second.receive()] == [None, None]  # both wait, and neither has had a turn
        queue.send_many([b"a", b"b"])
        got: list[Message | None] = []
        waiter = threading.Thread(target=lambda: got.append(second.receive()), daemon=True)
        waiter.start()
        until(lambda: stands_in(waiter, "wait"), "the second to wait for its turn, and to be told of it")
        assert first.receive() is not None
        waiter.join(60)
        assert len(got) == 1 and got[0] is not None


def stands_in(thread: threading.Thread, function: str) -> bool:
    """Whether a thread is in a function, or in what it calls."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def test_who_waits_for_its_turn_leaves_the_lock_to_the_one_whose_turn_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    with reopened(queue, KEPT).subscribe() as one, reopened(queue, KEPT).subscribe() as another:
        first, second = sorted((one, another), key=lambda subscription: subscription.id)
        assert [first.receive(), second.receive()] == [None, None]
        queue.send_many([b"a", b"b"])
        locked = Counter[str]()
        with monkeypatch.context() as patched:
            patched.setattr(PolicyLock, "acquire", lambda lock, before: locked.update(["held"]))
            assert [second.receive() for _ in range(5)] == [None] * 5
        assert not locked
        assert [first.receive() is None, second.receive() is None] == [False, False]


def test_who_asks_again_just_before_it_is_passed_over_does_not_get_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, timing=KEPT, fairness_model="round-robin")
    with reopened(queue, KEPT).subscribe() as one, reopened(queue, KEPT).subscribe() as another:
        first, second = sorted((one, another), key=lambda subscription: subscription.id)
        assert [first.receive(), second.receive()] == [None, None]
        queue.send(b"a")
        assert second.receive() is None  # from now on it leaves the message to the first
        turns, acquire = base(queue) / ".dropq" / "turns", PolicyLock.acquire

        def asked_again(lock: PolicyLock, before: Callable[[], None]) -> Any:
            (name,) = (name for name in os.listdir(turns) if name.startswith(f"{first.id},"))
            os.rename(turns / name, turns / name.replace(",busy", ",waits"))
            return acquire(lock, before)

        monkeypatch.setattr(PolicyLock, "acquire", asked_again)
        over = time.monotonic() + 2 * KEPT.turn_patience
        monkeypatch.setattr(fair_share, "time", SimpleNamespace(monotonic=lambda: over))
        assert second.receive() is not None


def test_a_command_that_waits_for_its_turn_does_not_complain_of_missing_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, timing=LEFT, fairness_model="round-robin")
    with reopened(queue, Timing(turn_patience=3600)).subscribe() as waiting:
        assert waiting.receive() is None
        queue.send(b"a")
        with reopened(queue, Timing(turn_patience=3600)).subscribe(lease_period="1m", detached=True) as passing:
            assert passing.receive() is None
    assert caplog.messages == []


def test_who_waits_and_does_not_come_is_passed_over(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with reopened(queue).subscribe() as absent, queue.subscribe(max_backlog=None) as present:
        assert absent.receive() is None
        queue.send_many([b"a", b"b"])
        assert present.receive() is not None
        assert present.receive() is not None
        assert "busy" in "".join(name for name in private(queue, "turns") if name.startswith(absent.id))


def test_who_waits_and_dies_is_not_waited_for(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root", timing=LEFT, fairness_model="round-robin")
    waiter = start("limited", tmp_path / "root", tmp_path / "notes", 1)
    stage.append(waiter)
    until(lambda: any("waits" in name for name in private(queue, "turns")), "the other to wait")
    waiter.kill()
    waiter.wait(10)
    queue.send_many([b"a", b"b"])
    assert [take(queue).body, take(queue).body] == [b"a", b"b"]  # by the second at the latest it is the dead one's turn
    assert len([name for name in private(queue, "turns") if name[0] != "."]) == 1
    queue.sweep()
    assert len(private(queue, "turns")) == 1


def test_a_message_that_the_next_in_turn_does_not_want_is_not_left_to_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=LEFT, fairness_model="round-robin")
    with reopened(queue).subscribe(filter="JMSPriority > 4") as picky, queue.subscribe(max_backlog=None) as other:
        assert picky.receive() is None
        queue.send(b"plain")
        assert other.receive() is not None
        queue.send(b"urgent", priority=9)
        with reopened(queue, Timing(turn_patience=0)).subscribe() as hasty:
            assert hasty.receive() is not None


def test_standings_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with queue.subscribe() as living:
        assert living.receive() is None
        (base(queue) / ".dropq" / "turns" / "gone-0123456789,1,7,waits").touch()
        queue.sweep()
        assert [name.partition(",")[0] for name in private(queue, "turns")] == [living.id]
    assert private(queue, "turns") == []


def test_a_standing_that_cannot_be_read_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with reopened(queue).subscribe() as living:
        assert living.receive() is None
        (name,) = private(queue, "turns")
        os.unlink(base(queue) / ".dropq" / "turns" / name)
        (base(queue) / ".dropq" / "turns" / name).mkdir()
        queue.send_many([b"a", b"b"])
        assert [take(queue).body, take(queue).body] == [b"a", b"b"]
    assert "whose turn it is cannot be read" in caplog.text


def test_turns_are_kept_of_a_filter_that_utf_8_cannot_carry(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with queue.subscribe(filter="JMSType <> '\ud800' OR JMSType IS NULL") as odd, reopened(queue).subscribe() as other:
        assert [odd.receive(), other.receive()] == [None, None]
        queue.send_many([b"a", b"b"])
        assert [message and message.body for message in (odd.receive(5), other.receive(5))] == [b"a", b"b"]
