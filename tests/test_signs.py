"""Signs of life, as plain files and locks: who leaves one, who takes it down, and what it says where a mount has it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
from helpers import base, make_queue, where

from dropq import consumers
from dropq.mounts import Mount


def signs(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path / ".dropq" / "consumers") if name[0] != ".")


def test_another_thread_than_the_one_that_subscribed_takes_down_the_sign_of_life(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    subscription = queue.subscribe()
    assert subscription.receive() is not None
    assert signs(base(queue)) == [subscription.id]
    closing = threading.Thread(target=subscription.close)
    closing.start()
    closing.join()
    assert signs(base(queue)) == []
    assert where(queue) == {"target": [b"a"]}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_nothing_stands_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    queue = make_queue(tmp_path)
    queue.send(b"a")
    monkeypatch.setattr(fcntl, "flock", refused)
    with queue.subscribe() as one:
        assert one.receive() is not None
        assert os.listdir(base(queue) / ".dropq" / "consumers") == []
        assert "no locks on this file system" in caplog.text
        assert queue.sweep().total == 0


def test_where_a_mount_keeps_its_locks_to_itself_the_sign_says_which_kernel_and_mount_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.consumers.mount_at", lambda folder, device: Mount("fuse.bindfs", "/", "x", ("rw",)))
    queue = make_queue(tmp_path)
    with queue.subscribe() as one:
        sign = base(queue) / ".dropq" / "consumers" / one.id
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert sign.read_text() == f"{boot} {os.stat(sign.parent).st_dev}\n"


def test_where_a_host_does_not_tell_its_boots_apart_the_sign_has_its_name_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As outside Linux."""
    monkeypatch.setattr("dropq.consumers.mount_at", lambda folder, device: Mount("fuse.bindfs", "/", "x", ("rw",)))
    monkeypatch.setattr(consumers, "_BOOT", str(tmp_path / "boot_id"))
    monkeypatch.setattr(consumers, "_boot", consumers._boot.__wrapped__)  # nothing that was found before
    queue = make_queue(tmp_path)
    with queue.subscribe() as one:
        sign = base(queue) / ".dropq" / "consumers" / one.id
        assert sign.read_text() == f"{os.uname().nodename} {os.stat(sign.parent).st_dev}\n"


def test_a_sign_of_life_that_cannot_be_read_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    dead = queue.subscribe()
    assert dead.receive() is not None
    assert dead._presence is not None
    dead._presence.abandon()

    def broken(path: str) -> bytes | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as disk:
        disk.setattr("dropq.consumers.read_small", broken)
        report = queue.sweep()
        assert (report.total, report.refused) == (0, 0)
        assert where(queue) == {"processing": [b"a"]}
        assert signs(base(queue)) == [dead.id]
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a"]}
