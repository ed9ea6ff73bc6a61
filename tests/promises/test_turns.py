"""Whose turn a message is, call by call: what each subscription is given while others wait, and what they note."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import base, make_queue, reopened, where

from dropq import Queue
from dropq.lifecycle.timing import Timing
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
