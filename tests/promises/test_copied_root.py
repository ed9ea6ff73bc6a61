"""A root that was copied, by tar or rsync, keeps why its messages failed, though all files have other inodes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import Clock, Make, base, make_queue, reopened

from dropq import Queue, Root
from dropq.lifecycle.timing import Timing
from dropq.storage import reading

DAY = 86_400


@pytest.fixture
def fresh(tmp_path: Path, clock: Clock) -> Queue:
    """A queue of a root that was copied just now.

    In error/ lie a message of ours, a foreign file, and that one's second delivery.
    """
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"ours")
    for _ in range(2):
        (base(queue) / "working" / "report.csv").write_bytes(b"theirs")
        (base(queue) / "working" / "report.csv").rename(base(queue) / "target" / "report.csv")
        while (message := queue.receive()) is not None:
            message.reject(f"no {message.text} are wanted")
    for number in range(20):  # so that no inode of the copy is that of the original
        (tmp_path / f"{number}").touch()
    shutil.copytree(queue.root.path, tmp_path / "copy", symlinks=True)
    return Root(tmp_path / "copy", clock=clock).queue("q")


@pytest.fixture
def filed(fresh: Queue) -> Queue:
    """The same with reasons that are filed by the inodes of the original, as where their writer died at once."""
    folder = base(fresh) / ".dropq" / "reasons" / "error"
    for reason in list(folder.iterdir()):
        known = json.loads(reason.read_text())
        reason.rename(fresh.context.reasons.path("error", known["name"], known["inode"]))
    return fresh


@pytest.fixture
def copy(filed: Queue) -> Queue:
    """The same after a sweep."""
    filed.sweep()
    return filed


def details(queue: Queue) -> dict[str, object]:
    return {message.name: message.reason and message.reason["detail"] for message in queue.browse("error")}


def reasons(queue: Queue) -> set[str]:
    return set(os.listdir(base(queue) / ".dropq" / "reasons" / "error"))


def test_a_copied_root_keeps_its_reasons(fresh: Queue, clock: Clock) -> None:
    before = details(fresh)
    assert before.pop("report.csv") == "no theirs are wanted"
    assert sorted(map(str, before.values())) == ["no ours are wanted", "no theirs are wanted"]
    assert fresh.fsck() == []
    clock.advance(2 * DAY)
    assert fresh.sweep().leftovers == 0
    assert details(fresh) == {**before, "report.csv": "no theirs are wanted"}


def test_of_reasons_that_are_filed_by_inodes_a_copied_root_keeps_those_of_unique_names(copy: Queue) -> None:
    found = details(copy)
    assert len(found) == 3
    assert found.pop("report.csv") is None  # another file may have come under that name
    assert sorted(map(str, found.values())) == ["no ours are wanted", "no theirs are wanted"]


def test_a_consumer_files_the_reasons_of_a_copied_root(filed: Queue) -> None:
    with reopened(filed, Timing(first_upkeep=0)).subscribe() as subscription:
        assert subscription.receive() is None
    assert {"no ours are wanted", "no theirs are wanted"} < set(details(filed).values())


def test_a_reason_that_cannot_be_filed_now_stays_for_the_next_sweep(
    filed: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.advance(2 * DAY)

    def full(*anything: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("dropq.storage.files.Storage.replace", full)
        assert filed.sweep().leftovers == 1
    filed.sweep()
    assert {"no ours are wanted", "no theirs are wanted"} < set(details(filed).values())


def test_a_look_into_a_copied_root_opens_two_reasons_at_most_for_each_message(
    copy: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_small, opened = reading.read_small, list[str]()

    def recorded(path: str) -> bytes | None:
        opened.append(path)
        return read_small(path)

    monkeypatch.setattr("dropq.lifecycle.reasons.read_small", recorded)
    for message in list(copy.browse("error")):
        copy.send(b"more")  # so that the folder of reasons changes between two looks
        failed = copy.receive()
        assert failed is not None
        failed.reject("no")
        opened.clear()
        assert message.reason is None or len(opened) <= 2


def test_fsck_and_sweep_agree_on_the_reasons_of_a_copied_root(filed: Queue, clock: Clock) -> None:
    written = reasons(filed)
    assert [finding.kind for finding in filed.fsck()] == ["orphan-reason"]
    assert filed.sweep().leftovers == 0
    before = details(filed)
    clock.advance(2 * DAY)
    assert filed.sweep().leftovers == 1
    assert details(filed) == before
    assert len(reasons(filed)) == 2
    assert not reasons(filed) & written  # each is filed by the name of its file
    assert filed.fsck() == []
    assert filed.sweep().leftovers == 0


def test_a_reason_of_a_copied_root_goes_with_its_message(copy: Queue, clock: Clock) -> None:
    names = [name for name, detail in details(copy).items() if detail]
    assert all(outcome.ok for outcome in copy.requeue(ids=names))
    clock.advance(2 * DAY)
    copy.sweep()
    assert reasons(copy) == set()


def test_a_message_that_fails_again_in_a_copied_root_has_its_new_reason(copy: Queue, clock: Clock) -> None:
    [name] = [name for name, detail in details(copy).items() if detail == "no ours are wanted"]
    assert [outcome.ok for outcome in copy.requeue(ids=[name])] == [True]
    message = copy.receive()
    assert message is not None
    message.reject("still none")
    assert details(copy)[message.name] == "still none"
    clock.advance(2 * DAY)
    copy.sweep()
    assert details(copy)[message.name] == "still none"


def test_a_sweep_opens_no_reason_that_its_file_is_there_for(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    for number in range(10):
        queue.send(b"%d" % number)
    while (message := queue.receive()) is not None:
        message.reject("no")
    [one, *_] = (base(queue) / "error").iterdir()
    one.unlink()
    clock.advance(2 * DAY)
    opened: list[str] = []
    read_small = "dropq.lifecycle.reasons.read_small"

    def recorded(path: str) -> bytes:
        opened.append(path)
        return Path(path).read_bytes()

    monkeypatch.setattr(read_small, recorded)
    assert queue.sweep().leftovers == 1
    assert len(opened) == 1
    assert len(reasons(queue)) == 9


def test_a_damaged_reason_is_cleared_away_and_loses_nothing(filed: Queue, clock: Clock) -> None:
    for name in reasons(filed):
        (base(filed) / ".dropq" / "reasons" / "error" / name).write_text(json.dumps(["no table"]))
    assert set(details(filed).values()) == {None}
    clock.advance(2 * DAY)
    assert filed.sweep().leftovers == 3
    assert len(details(filed)) == 3
