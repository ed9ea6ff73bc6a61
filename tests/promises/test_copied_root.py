"""A root that was copied, by tar or rsync, keeps why its messages failed, and to whom what is committed goes.

All files have other inodes then.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import Clock, Make, base, make_queue, reopened

import dropq
from dropq import Queue, Root
from dropq.lifecycle.timing import Timing
from dropq.staging import fan_out
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


# -- what is committed -------------------------------------------------------------------------------------------------


#: Who gets a copy of what is committed in `fed`.
RECEIVERS = ("a/one.c", "a/two.c", "view")


@pytest.fixture
def fed(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root with a message that is committed for two subscriptions and a view, and not rolled forward."""
    root = Root.create(tmp_path / "root", clock=clock)
    topic = root.create_topic("a", durability="none")
    for name in ("one", "two"):
        topic.create_subscription(name, client_id="c")
    root.create_queue("view", underlying_topic="a", durability="none")
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *_, **__: False)
        topic.publish(b"paid")
    return root


def copied(root: Root, tmp_path: Path) -> Root:
    """The root on another disk."""
    for number in range(400):  # so that no inode of the copy is that of the original
        (tmp_path / f"{number}").touch()
    shutil.copytree(root.path, tmp_path / "copy", symlinks=True)
    return Root(tmp_path / "copy", clock=root.clock)


def counted(root: Root) -> list[int]:
    return [len(list(root.queue(name).browse())) for name in RECEIVERS]


def test_what_is_committed_for_receivers_arrives_in_a_copied_root(fed: Root, tmp_path: Path) -> None:
    copy = copied(fed, tmp_path)
    assert copy.sweep().rolled_forward == 1
    assert counted(copy) == [1, 1, 1]
    assert list(copy.queue("a").browse("error")) == []


def test_what_is_committed_for_a_view_that_was_made_by_hand_arrives_in_a_copied_root(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.create(tmp_path / "root", clock=clock)
    topic, view = root.create_topic("a", durability="none"), tmp_path / "root" / "view"
    for state in ("working", "target", "processing", "processed", "expired", "error"):
        (view / state).mkdir(parents=True)
    (view / "queue.toml").write_text('underlying_topic = "a"\n')
    root.queue("view").sweep()
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *_, **__: False)
        topic.publish(b"paid")
    assert reading.written_ms(str(view / ".dropq" / "created")) == 0, "nobody knows when it was made"
    copy = copied(root, tmp_path)
    copy.sweep()
    assert [message.body for message in copy.queue("view").browse()] == [b"paid"]


def test_a_queue_keeps_its_time_where_it_gets_a_word(fed: Root) -> None:
    created = Path(fed.queue("view").layout.created)
    created.write_bytes(b"")
    os.utime(created, (5, 5))
    Root(fed.path, clock=fed.clock).topic("a").publish(b"next")
    assert created.read_bytes()
    assert created.stat().st_mtime == 5


@pytest.mark.parametrize("of", ["a/one.c", "view"])
def test_a_copied_receiver_of_which_there_are_two_gets_nothing_that_was_committed_for_one(
    fed: Root, tmp_path: Path, of: str
) -> None:
    home = Path(fed.queue(of).layout.home)
    shutil.copytree(home, home.with_name("other.c" if of != "view" else "other"))
    copy = copied(fed, tmp_path)
    copy.sweep()
    assert counted(copy) == [int(name != of) for name in RECEIVERS]
    assert [message.body for message in copy.queue("a").browse("error")] == [b"paid"]


def test_what_is_committed_waits_in_a_copied_root_for_a_view_that_is_being_removed(fed: Root, tmp_path: Path) -> None:
    home = Path(fed.path, "view")
    hidden = home.rename(home.with_name(".view.deleting-1795408273487-abcdef"))
    copy = copied(fed, tmp_path)
    copy.queue("a").sweep()
    (tmp_path / "copy" / hidden.name).rename(tmp_path / "copy" / "view")
    copy.queue("a").sweep()
    assert counted(copy) == [1, 1, 1]


def test_copies_that_selectors_made_arrive_in_a_copied_root(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.create(tmp_path / "root", clock=clock)
    for name in ("q", "audit"):
        root.create_queue(name, durability="none")
    root.queue("q").add_selector("audit", to="audit", op="copy")
    root.queue("q").send(b"paid")
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *_, **__: False)
        dropq.route(root, once=True)
    copy = copied(root, tmp_path)
    copy.sweep()
    assert [message.body for message in copy.queue("audit").browse()] == [b"paid"]
    assert list(copy.queue("q").browse("error")) == []
