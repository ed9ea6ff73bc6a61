"""A sweep goes on past what it cannot do, and reports what it had to leave."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import Clock, Make, archive, names_in, where

from dropq import StorageError
from dropq.storage import reading
from dropq.storage.files import Storage


def full_disk(path: str, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@pytest.mark.parametrize("held", [False, True])
def test_a_reason_that_cannot_be_written_keeps_no_sweep_from_pruning(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    queue = make(max_history=1)
    archive(queue, b"1", b"2", b"3")
    queue.send(b"late", expires_in="1s")
    with queue.subscribe() as subscription:
        if held:
            subscription.receive()
        clock.advance(2)
        with monkeypatch.context() as patch:
            patch.setattr(queue.context.storage, "write_small", full_disk)
            assert queue.sweep().pruned == 2
        assert where(queue)["processing" if held else "target"] == [b"late"]
        assert queue.sweep().expired == 1


def test_a_sweep_prunes_before_it_does_what_needs_room(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(max_history=1)
    archive(queue, b"1", b"2")
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    write_small = queue.context.storage.write_small

    def nearly_full(path: str, data: bytes) -> None:
        if len(names_in(queue, "processed")) > 1:
            full_disk(path, data)
        write_small(path, data)

    monkeypatch.setattr(queue.context.storage, "write_small", nearly_full)
    assert queue.sweep().expired == 1


def test_a_folder_among_the_consumers_does_not_end_a_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    os.makedirs(f"{queue.layout.consumers}/no-consumer")
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    assert queue.sweep().expired == 1


def test_a_leftover_that_cannot_be_removed_does_not_end_a_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    os.mkdir(f"{queue.layout.reasons}/error/no-reason")
    os.mkdir(f"{queue.layout.private}/.gone-1")
    Path(queue.layout.private, ".gone-1", "left").touch()
    Path(queue.layout.held, "a-0123456789-1").write_bytes(b"")
    os.mkdir(f"{queue.layout.held}/a-0123456789-2")
    clock.advance(2 * 86_400)
    report = queue.sweep()
    assert (report.leftovers, report.refused) == (3, 1)
    assert os.listdir(queue.layout.held) == []
    assert not os.path.exists(f"{queue.layout.private}/.gone-1")


@pytest.mark.parametrize("folder", ["processing", "delayed", "target"])
def test_a_root_is_swept_over_a_queue_that_cannot_be_listed(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    queue = make()
    denied = queue.root.create_queue("another", durability="none").layout.folder(folder)
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    listing = reading.listing

    def refusing(path: str) -> Any:
        if path == denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listing(path)

    monkeypatch.setattr(reading, "listing", refusing)
    with pytest.raises(StorageError, match="the sweep did not come to its end"):
        queue.root.sweep()
    assert where(queue) == {"expired": [b"late"]}


def test_a_drain_gives_up_a_folder_that_does_not_become_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.storage.files.DRAIN_LIMIT", 0.02)
    tries = 0

    def refuse(path: str) -> None:
        nonlocal tries
        tries += 1
        assert tries < 1000, "it tries for ever, and without a pause"
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        Storage().drain(str(tmp_path))


def test_a_sweep_tells_what_it_had_to_leave(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.send_many([{"body": b"a", "delay": 1}, {"body": b"b", "delay": 1}])
    clock.advance(2)

    def refused(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "place", refused)
        report = queue.sweep()
    assert (report.refused, report.total) == (2, 0)
    assert queue.sweep().delayed == 2
