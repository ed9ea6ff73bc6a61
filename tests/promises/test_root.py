"""What lies in a root: its queues, what was deleted, and what only looks like either."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from helpers import Clock, Make, base, make_queue, where

from dropq import InvalidName, QueueExists, Root, StorageError
from dropq.diagnosis.fsck import fsck_root
from dropq.diagnosis.fsck import queues as fsck_queues
from dropq.lifecycle.ages import DEAD_MAKER
from dropq.storage.files import Storage


@pytest.fixture
def deleted(tmp_path: Path, clock: Clock) -> Root:
    """A root with a queue that a DropboxMQ deleted and kept."""
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.root.create_queue("temp").send(b"a")
    (queue.root.path / "temp").rename(queue.root.path / "temp.deleted-1700000000000")
    return Root(queue.root.path, clock=clock)


def test_what_a_dropboxmq_deleted_is_no_queue(deleted: Root, clock: Clock) -> None:
    assert [queue.name for queue in deleted.queues()] == ["q"]
    with pytest.raises(InvalidName, match="deleted"):
        deleted.queue("temp.deleted-1700000000000")
    with pytest.raises(InvalidName, match="deleted"):
        deleted.create_queue("mine.deleted-1")
    clock.advance(2 * 86_400)
    deleted.sweep()
    assert len(os.listdir(deleted.path / "temp.deleted-1700000000000" / "target")) == 1
    assert deleted.create_queue("temp.deleted-by-me").exists()


def test_what_a_dropboxmq_deleted_is_found_once(deleted: Root) -> None:
    found = [finding for finding in fsck_root(deleted.context) if "temp.deleted" in finding.path]
    assert [(finding.kind, finding.level) for finding in found] == [("deleted-queue", "info")]


def test_the_temporary_queues_that_a_dropboxmq_deleted_are_one_finding(deleted: Root) -> None:
    for number in range(3):
        (deleted.path / f"temp-179533298243000{number}-0000000001.deleted-17" / "target").mkdir(parents=True)
    (deleted.path / "topic-root" / "temp-1795332982430009-0000000001.deleted-17").mkdir(parents=True)
    found = [finding for finding in fsck_root(deleted.context) if finding.kind == "deleted-queue"]
    assert [os.path.basename(finding.path) for finding in found] == [
        "temp.deleted-1700000000000",
        "temp-1795332982430000-0000000001.deleted-17",
    ]
    assert found[1].detail.startswith("this and 3 other temporary queues: a DropboxMQ deleted this queue")


@pytest.mark.parametrize(
    "path",
    ["temp-1.deleted-17", "a/b.deleted-17", "a/.subscriptions/s.c.deleted-17", "a/b/.subscriptions/s.c.deleted-17"],
)
def test_a_topic_or_subscription_that_a_dropboxmq_deleted_is_found_once(deleted: Root, path: str) -> None:
    folder = deleted.path / "topic-root" / path
    (folder / "target" / "no.deleted-1").mkdir(parents=True)
    (deleted.path / "topic-root" / "a" / ".incoming" / "target").mkdir(parents=True, exist_ok=True)
    found = [finding for finding in fsck_root(deleted.context) if "topic-root" in finding.path]
    assert [(finding.kind, finding.path) for finding in found] == [("deleted-queue", str(folder))]


def test_what_a_dropboxmq_deleted_is_no_queue_for_commands(deleted: Root) -> None:
    assert [health.queue for health in deleted.health()] == ["q"]
    assert sorted(fsck_queues(deleted.context)) == ["q"]
    with pytest.raises(InvalidName):
        deleted.queue("temp.deleted-1700000000000").send(b"a")


@pytest.mark.parametrize("length", [200, 201, 220, 255])
def test_a_delete_that_died_brings_the_queue_back_under_its_whole_name(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    name = "orders-" + "ü" * ((length - 7) // 2) + "x" * ((length - 7) % 2)
    queue.root.create_queue(name, durability="none")

    def dies(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dropq.upkeep.queues._restore_if_unsettled", dies)
        with pytest.raises(KeyboardInterrupt):
            queue.root.delete_queue(name)
    assert [one.name for one in queue.root.queues()] == ["q"]
    clock.advance(DEAD_MAKER / 1000 + 1)
    queue.root.sweep()
    assert [one.name for one in queue.root.queues()] == [name, "q"]
    queue.root.delete_queue(name)
    assert [one.name for one in queue.root.queues()] == ["q"]


@pytest.mark.parametrize("settle", ["ack", "reject"])
def test_an_empty_message_that_nobody_may_open_is_no_reservation(make: Make, clock: Clock, settle: str) -> None:
    queue = make()
    marker = base(queue) / "working" / "marker"
    os.close(os.open(marker, os.O_CREAT | os.O_WRONLY, 0))
    marker.rename(base(queue) / "target" / "marker")
    message = queue.receive()
    assert message is not None
    state = "processed" if settle == "ack" else "error"
    message.ack() if settle == "ack" else message.reject("cannot be read")
    assert [one.id for one in queue.browse(state)] == ["marker"]
    clock.advance(2 * 86_400)
    assert {finding.kind for finding in queue.fsck(repair=True)} <= {"unreadable"}
    assert [outcome.ok for outcome in queue.requeue(state=state)] == [True]


def test_what_a_dropboxmq_archived_is_not_told_message_by_message(make: Make) -> None:
    queue = make()
    for state in ("processed", "error", "expired"):
        name = f"client7~4.1140429201295000-926257472{len(state)}.T.....JMSXDeliveryCountI=1"
        (base(queue) / state / name).write_bytes(b"a")
    assert queue.fsck() == []


def test_a_queue_appears_whole_or_not_at_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()

    def failing(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EIO, "no", source)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "move_folder", failing)
        with pytest.raises(StorageError):
            queue.root.create_queue("new")
    assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml", "q"]
    with pytest.raises(QueueExists):
        queue.root.create_queue("q")


def test_root_create_is_safe_to_repeat(tmp_path: Path) -> None:
    make_queue(tmp_path).send(b"a")
    Root.create(tmp_path)
    assert where(Root(tmp_path).queue("q")) == {"target": [b"a"]}
