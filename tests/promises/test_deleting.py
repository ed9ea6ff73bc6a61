"""A queue is deleted only when nothing in it is left to do, whoever sends, opens or commits meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Clock, Make, base, reopened, take, until, where

from dropq import NoSuchQueue, Queue, Root, StorageError
from dropq.format.layout import QueueLayout, RootLayout
from dropq.lifecycle import folders, queue_notes
from dropq.staging import fan_out
from dropq.staging.jobs import Job
from dropq.storage import reading, system_calls
from dropq.storage.files import Storage
from dropq.upkeep import queues


@pytest.mark.parametrize("state", ["target", "processing", "delayed", "working"])
def test_a_queue_with_messages_to_work_on_is_not_deleted(make: Make, state: str) -> None:
    queue = make()
    if state == "working":
        (base(queue) / "working" / "draft").write_bytes(b"a")
    else:
        queue.send(b"a", delay=60 if state == "delayed" else None)
    if state == "processing":
        take(queue)
    with pytest.raises(StorageError, match="nothing was removed"):
        queue.root.delete_queue("q")
    assert where(queue) == {state: [b"a"]}
    queue.root.delete_queue("q", force=True)
    assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml"]


def test_a_queue_without_them_is_deleted_with_its_history(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).ack()
    queue.close()
    queue.root.delete_queue("q")
    assert queue.root.queues() == []
    with pytest.raises(NoSuchQueue):
        queue.root.delete_queue("q")


@pytest.mark.parametrize("delay", [None, 60])
def test_a_send_that_returned_as_the_queue_was_deleted_brings_it_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, delay: int | None
) -> None:
    queue = make()
    rename_folder = Storage.rename_folder

    def after_a_send(self: Storage, source: str, destination: str) -> None:
        queue.send(b"a", delay=delay)  # RACE: after the messages were counted
        rename_folder(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", after_a_send)
    with pytest.raises(StorageError, match="nothing was removed"):
        queue.root.delete_queue("q")
    assert where(queue) == {"delayed" if delay else "target": [b"a"]}
    queue.send(b"b")


def test_a_send_that_was_half_way_as_the_queue_was_deleted_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    write_new = Storage.write_new

    def before_a_delete(storage: Storage, *args: Any, **options: Any) -> None:
        write_new(storage, *args, **options)
        Root(queue.root.path).delete_queue("q", force=True)

    monkeypatch.setattr(Storage, "write_new", before_a_delete)
    with pytest.raises(NoSuchQueue):
        queue.send(b"a")
    assert not (Path(queue.root.path) / "q").exists()


@pytest.mark.parametrize("stray", ["file", "folder"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_message_keeps_a_queue_from_being_deleted_unless_forced(make: Make, stray: str, force: bool) -> None:
    queue = make()
    if stray == "file":
        (base(queue) / "target" / "_SUCCESS").touch()
    else:
        (base(queue) / "target" / "_temporary" / "0").mkdir(parents=True)
    if not force:
        with pytest.raises(StorageError, match="no message in target"):
            queue.root.delete_queue("q")
        queue.send(b"a")
        assert where(queue)["target"][-1] == b"a"
    else:
        queue.root.delete_queue("q", force=True)
        assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml"]


def test_a_call_of_a_send_that_ends_while_the_queue_is_removed_goes_with_the_queue(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    rmdir, late = os.rmdir, list[str]()

    def after_one_more_file(path: str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(path) == "working" and not late:
            fd = os.open(path, os.O_RDONLY, dir_fd=dir_fd)
            os.close(os.open("late", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
            os.close(fd)
            late.append(path)
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", after_one_more_file)
    queue.root.delete_queue("q", force=True)
    assert len(late) == 1
    assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml"]


def test_producers_racing_with_a_forced_delete_get_an_error_or_their_message_goes_with_the_queue(
    tmp_path: Path,
) -> None:
    root = Root.create(tmp_path)
    outcomes: list[str] = []

    def produce() -> None:
        try:
            queue = root.queue("q")  # which may be gone by now: the other producers are enough for the deletion
            while True:
                queue.send(b"x")
        except NoSuchQueue:
            outcomes.append("told")

    for _ in range(5):
        root.create_queue("q", durability="none")
        producers = [threading.Thread(target=produce) for _ in range(3)]
        for producer in producers:
            producer.start()
        until(lambda: os.listdir(tmp_path / "q" / "target"), "messages")
        root.delete_queue("q", force=True)
        for producer in producers:
            producer.join(10)
        assert sorted(os.listdir(tmp_path)) == [".dropq", "dropq.toml"]
    assert outcomes == ["told"] * 15


def test_a_send_during_whose_last_look_the_deletion_ends_is_told_that_the_queue_is_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"a")  # from now on the root has a note of it
    clear, queue_layouts = folders.clear, queue_notes.queue_layouts
    rest: list[Callable[[], None]] = []

    def later(*arguments: Any, **options: Any) -> None:
        rest.append(lambda: clear(*arguments, **options))

    def after_the_deletion(root: RootLayout) -> Iterator[QueueLayout]:
        rest.pop()()
        return queue_layouts(root)

    monkeypatch.setattr(queues, "clear", later)
    queue.root.delete_queue("q", force=True)
    monkeypatch.setattr(queue_notes, "queue_layouts", after_the_deletion)
    with pytest.raises(NoSuchQueue):
        queue.send(b"x")
    assert not rest
    assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml"]


def test_a_delete_that_died_before_it_was_decided_is_undone_by_a_sweep(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    rename_folder = Storage.rename_folder

    def dies_after(self: Storage, source: str, destination: str) -> None:
        Root(queue.root.path, clock=clock).queue("q").send(b"just before")
        rename_folder(self, source, destination)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "rename_folder", dies_after)
        with pytest.raises(KeyboardInterrupt):
            queue.root.delete_queue("q")
    assert queue.root.queues() == []
    queue.root.sweep()
    assert queue.root.queues() == [], "it may still be decided"
    clock.advance(61)
    queue.root.sweep()
    assert [message.body for message in reopened(queue).browse()] == [b"just before"]


def staged_job(queue: Queue, *rows: bytes) -> tuple[Job, list[Any]]:
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all([f"4.{queue.root.context.ids.next()}.B" for _ in rows], rows)
    return job, [attempt.finish()]


@pytest.mark.parametrize("by_path", [False, True], ids=["renameat2", "no renameat2"])
def test_a_queue_that_is_renamed_away_and_back_while_a_job_is_sent_loses_no_row(
    make: Make, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    queue = make()
    queue.context.storage._exclusive.in_kernel = not by_path
    rows = [b"0", b"1", b"2", b"3"]
    job, listed = staged_job(queue, *rows)
    home, away = queue.layout.home, f"{queue.layout.home}.away"
    owner, name = (Storage, "rename_guarded") if by_path else (system_calls, "rename_noreplace")
    rename, moves = getattr(owner, name), iter([None, None, (home, away), (away, home)])

    def meanwhile(*call: Any) -> None:
        if (move := next(moves, None)) is not None:
            os.rename(*move)
        rename(*call)

    monkeypatch.setattr(owner, name, meanwhile)
    assert job.commit(listed) == len(rows)
    assert where(queue) == {"target": rows}


def test_a_delete_is_undone_when_a_job_was_committed_after_its_check(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    job, listed = staged_job(queue, b"row")
    rename_folder = Storage.rename_folder

    def meanwhile(self: Storage, source: str, destination: str) -> None:
        if source == queue.layout.home:
            job._write_manifest(listed)  # the driver commits, and dies before it sends
        rename_folder(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", meanwhile)
    with pytest.raises(StorageError, match="1 in target"):
        Root(queue.root.path).delete_queue(queue.name)
    assert where(queue) == {"target": [b"row"]}


def test_a_queue_that_is_deleted_while_it_is_opened_is_not_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, device = make(), reading.device

    def deleting(path: str) -> int:
        if path == f"{queue.root.path}/q/.dropq":
            monkeypatch.setattr(reading, "device", device)
            Root(queue.root.path).delete_queue("q")
        return device(path)

    monkeypatch.setattr(reading, "device", deleting)
    with pytest.raises(NoSuchQueue, match="q is not there any more"):
        reopened(queue).send(b"a")


def test_a_queue_is_not_deleted_while_a_router_makes_copies_of_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.create(tmp_path / "root")
    source = root.create_queue("source")
    root.create_queue("audit")
    source.add_selector("all", op="copy", to="audit")
    look = queues.refuse_unsettled

    def late(context: Any) -> None:
        monkeypatch.undo()
        look(context)
        source.send(b"a")
        with monkeypatch.context() as slow:  # it has committed the copies, and not moved them yet
            slow.setattr(fan_out, "roll_forward", lambda *args, **options: True)
            source.route()

    monkeypatch.setattr(queues, "refuse_unsettled", late)
    with pytest.raises(StorageError, match="nothing was removed"):
        root.delete_queue("source")
    root.sweep()
    assert [message.body for message in root.queue("audit").browse()] == [b"a"]
