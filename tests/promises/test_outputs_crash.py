"""No crash, no refused call and no other program lets a part go out with an ack, or all without it.

`make torture` has all cases, in its part `outputs`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from helpers import first_and_long, make_queue, take, where
from test_records_crash import few
from torture.acts import Setting
from torture.output_cases import CASES, SETTINGS, WORKS, OutputCases
from torture.table import Row

from dropq import LeaseLost, Out, Queue, StorageError
from dropq.queue import outputs
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.topics.publishing import Publishing


@pytest.mark.parametrize("setting", first_and_long(SETTINGS), ids=lambda setting: setting.name)
def test_a_crash_anywhere_sends_all_with_the_ack_or_nothing(tmp_path: Path, setting: Setting) -> None:
    seed, row = random.randrange(10**6), Row("crash")
    for case in random.Random(seed).sample(CASES, 3):
        OutputCases(tmp_path, setting, row).crash(case, few(seed, 2))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.kills and not row.lost and not row.doubled


def test_a_crash_of_the_sweep_after_a_crash_sends_all_or_nothing(tmp_path: Path) -> None:
    seed, row = random.randrange(10**6), Row("crash")
    OutputCases(tmp_path, SETTINGS[0], row).crash_twice(random.Random(seed).choice(CASES[:3]), few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.kills and not row.lost and not row.doubled


def test_a_refused_call_sends_all_or_nothing(tmp_path: Path) -> None:
    seed, row = random.randrange(10**6), Row("fault")
    for case in random.Random(seed).sample(CASES, 3):
        OutputCases(tmp_path, SETTINGS[0], row).refuse(case, few(seed, 3))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.faults and not row.lost and not row.doubled


@pytest.mark.parametrize("other", WORKS)
def test_who_lost_the_claim_sends_nothing_whatever_others_do(tmp_path: Path, other: str) -> None:
    seed, row = random.randrange(10**6), Row("two at once")
    for case in random.Random(seed).sample(CASES, 2):
        OutputCases(tmp_path, SETTINGS[0], row).meet(case, other, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []


# -- what was refused once ---------------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """A queue with a message, and another beside it."""
    queue = make_queue(tmp_path)
    queue.root.create_queue("other")
    queue.send(b"a")
    return queue


def refused(*_: object, **__: object) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "there")


def test_a_look_for_circles_that_is_refused_leaves_the_message_held(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = take(queue)
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "waypoint_at", refused)
        with pytest.raises(StorageError, match="the message is still held"):
            message.ack(send=Out("other", b"A"))
    message.ack(send=Out("other", b"A"))
    assert where(queue.root.queue("other")) == {"target": [b"A"]}


def test_a_worker_waits_while_it_cannot_look_at_a_destination(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    destinations = queue._destinations
    destinations.sender("other")
    monkeypatch.setattr(reading, "exists", refused)
    assert destinations.what_blocks() == "other takes nothing: Input/output error at there"


def test_an_ack_is_done_though_what_it_published_cannot_be_distributed_yet(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.root.create_topic("news").create_subscription("all", client_id="x")
    monkeypatch.setattr(Publishing, "distribute", refused)
    take(queue).ack(send=Out("news", b"A"))
    assert where(queue) == {"processed": [b"a"]}
    monkeypatch.undo()
    queue.root.sweep()
    assert where(queue.root.queue("news/all.x")) == {"target": [b"A"]}


# -- that it would be seen ---------------------------------------------------------------------------------------------


def tried(tmp_path: Path, name: str, is_seen: Callable[[Row], object], *, meeting: str = "") -> Row:
    """Let a case die at every other call, until that is seen which is wrong; or meet another program."""
    row = Row("control")
    case = next(case for case in CASES if case.name == name)
    cases = OutputCases(tmp_path, SETTINGS[0], row)
    if meeting:
        cases.meet(case, meeting, few(1, 20))
    else:
        cases.crash(case, lambda moments: takewhile(lambda _: not is_seen(row), moments[::2]))
    return row


@pytest.mark.long
def test_parts_that_are_sent_before_the_commit_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fan_out._commit

    def late(context: Any, claim: Any, folder: str) -> bool:
        for part in sorted(os.listdir(folder)):
            context.storage.rename(
                f"{folder}/{part}", f"{context.root.layout.path}/out/target/{part.partition('~')[2]}"
            )
        return commit(context, claim, folder)

    monkeypatch.setattr(fan_out, "_commit", late)
    assert "something was sent" in str(tried(tmp_path, "one", lambda row: "something was sent" in str(row.wrong)).wrong)


@pytest.mark.long
def test_a_message_that_is_archived_before_its_parts_are_sent_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_forward = fan_out.roll_forward

    def early(context: Any, folder: str, **how: Any) -> bool:
        context.storage.rename(f"{folder}/whole", f"{context.layout.processed}/{folder.partition('~')[2]}")
        return roll_forward(context, folder, **how)

    monkeypatch.setattr(fan_out, "roll_forward", early)
    assert tried(tmp_path, "three", lambda row: row.lost).lost


@pytest.mark.long
def test_a_holder_that_sends_without_its_claim_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fan_out._commit

    def careless(context: Any, claim: Any, folder: str) -> bool:
        try:
            return commit(context, claim, folder)
        except LeaseLost:
            for part in sorted(os.listdir(folder)):
                context.storage.rename(
                    f"{folder}/{part}", f"{context.root.layout.path}/out/target/{part.partition('~')[2]}"
                )
            raise

    monkeypatch.setattr(fan_out, "_commit", careless)
    row = tried(tmp_path, "one", lambda row: row.wrong, meeting="a script that moves claims back")
    assert any("was sent" in line for line in row.wrong)


def test_parts_that_go_astray_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fan_out._commit

    def forgetful(context: Any, claim: Any, folder: str) -> bool:
        done = commit(context, claim, folder)
        context.storage.unlink(f"{folder}/{sorted(set(os.listdir(folder)) - {'whole'})[0]}")
        return done

    monkeypatch.setattr(fan_out, "_commit", forgetful)
    assert tried(tmp_path, "three", lambda row: row.lost).lost
