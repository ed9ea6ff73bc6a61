"""Signs of life, as plain files and locks: who leaves one, who takes it down, and what it says where a mount has it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from filelock import FileLock
from helpers import Clock, Make, base, make_queue, open_files, reopened, where

from dropq import NoSuchQueue, Queue, StorageError
from dropq.storage import liveness, locks, mounts
from dropq.storage.files import Storage
from dropq.storage.liveness import Presence
from dropq.storage.mounts import Mount


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
        assert one._presence is not None
        one._presence.keep()
        assert "was taken away" not in caplog.text
        (base(queue) / ".dropq" / "consumers" / "of-another-host").touch()
        report = queue.sweep()
        assert (report.total, report.refused) == (0, 0)
        assert signs(base(queue)) == ["of-another-host"]


def test_where_a_mount_keeps_its_locks_to_itself_the_sign_says_which_kernel_and_mount_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dropq.storage.liveness.mount_at", lambda folder, device: Mount("fuse.bindfs", "/", "x", ("rw",))
    )
    queue = make_queue(tmp_path)
    with queue.subscribe() as one:
        sign = base(queue) / ".dropq" / "consumers" / one.id
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert sign.read_text() == f"{boot} {os.stat(sign.parent).st_dev}\n"


def test_where_a_host_does_not_tell_its_boots_apart_the_sign_has_its_name_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As outside Linux."""
    monkeypatch.setattr(
        "dropq.storage.liveness.mount_at", lambda folder, device: Mount("fuse.bindfs", "/", "x", ("rw",))
    )
    monkeypatch.setattr(mounts, "_BOOT", str(tmp_path / "boot_id"))
    monkeypatch.setattr(liveness, "boot_id", mounts.boot_id.__wrapped__)  # nothing that was found before
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
        disk.setattr("dropq.storage.liveness.read_small", broken)
        report = queue.sweep()
        assert (report.total, report.refused) == (0, 0)
        assert where(queue) == {"processing": [b"a"]}
        assert signs(base(queue)) == [dead.id]
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a"]}


def test_a_sign_of_life_takes_one_open_file_and_leaves_none(tmp_path: Path) -> None:
    """However often somebody takes it away; and its folder is made where it is missing."""
    queue = make_queue(tmp_path)
    folder = base(queue) / ".dropq" / "consumers"
    shutil.rmtree(folder)
    opened = open_files()
    presence = Presence(str(folder), "one", queue.context.storage)
    for _ in range(3):
        assert open_files() == opened + 1
        assert os.listdir(folder) == ["one"]
        (folder / "one").unlink()
        presence.keep()
    presence.end()
    assert open_files() == opened
    assert os.listdir(folder) == []


def test_a_sign_of_life_that_another_host_removed_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS nothing can be learned any more of a file that is gone."""
    queue = make_queue(tmp_path)
    folder = base(queue) / ".dropq" / "consumers"
    opened = open_files()
    presence = Presence(str(folder), "one", queue.context.storage)
    removed, fstat = os.stat(folder / "one").st_ino, os.fstat

    def stale(fd: int) -> os.stat_result:
        if fstat(fd).st_ino == removed:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(fd)

    os.rename(folder / "one", tmp_path / "removed")  # so that no other file gets its number
    with monkeypatch.context() as nfs:
        nfs.setattr(os, "fstat", stale)
        presence.keep()
    assert open_files() == opened + 1
    assert os.listdir(folder) == ["one"]
    presence.end()
    assert open_files() == opened


def test_a_sign_that_was_let_go_of_has_no_part_in_the_file_that_is_opened_next(tmp_path: Path) -> None:
    """It gets the same descriptor."""
    for name in ("sign", "other"):
        (tmp_path / name).touch()
    sign = locks.ProcessLock(str(tmp_path / "sign"))
    sign.acquire()
    fd = sign._fd
    sign.release()
    with open(tmp_path / "other", "r+b") as other, open(tmp_path / "other", "r+b") as again:
        assert other.fileno() == fd
        assert locks.try_lock(fd, str(tmp_path))
        assert not sign.has_a_name
        sign.release()
        if locks.has_second(str(tmp_path / "sign")):
            with pytest.raises(BlockingIOError):
                fcntl.lockf(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_sign_of_life_that_cannot_get_its_name_leaves_no_draft_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), destination)

    queue = make_queue(tmp_path)
    opened = open_files()
    monkeypatch.setattr(Storage, "rename", broken)
    with pytest.raises(StorageError, match="no message was touched") as error:
        queue.subscribe()
    assert error.value.errno == errno.EIO
    assert open_files() == opened
    assert os.listdir(base(queue) / ".dropq" / "consumers") == []


@pytest.mark.parametrize("mount", [None, Mount("ext4"), Mount("nfs4", options=("vers=4.2",))])
def test_a_sign_says_nothing_where_all_who_see_it_know_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount | None
) -> None:
    monkeypatch.setattr("dropq.storage.liveness.mount_at", lambda folder, device: mount)
    queue = make_queue(tmp_path)
    with queue.subscribe() as one:
        assert (base(queue) / ".dropq" / "consumers" / one.id).read_bytes() == b""


def test_a_sign_that_gave_place_to_another_file_is_made_again_and_counts_if_it_comes_back(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    folder, away = base(queue) / ".dropq" / "consumers", tmp_path / "away"
    presence = Presence(str(folder), "one", queue.context.storage)
    first, opened = os.stat(folder / "one").st_ino, open_files()
    presence.keep()
    assert (os.stat(folder / "one").st_ino, open_files()) == (first, opened)
    os.rename(folder / "one", away)
    (folder / "one").touch()
    presence.keep()
    with open(folder / "one", "r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(away, folder / "one")
    presence.keep()
    assert os.stat(folder / "one").st_ino == first
    presence.end()


def test_a_sign_of_life_is_not_made_where_the_queue_is_away(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    folder = base(queue) / ".dropq" / "consumers"
    presence = Presence(str(folder), "one", queue.context.storage)
    os.rename(tmp_path / "root", tmp_path / "away")
    presence.keep()
    assert os.listdir(tmp_path) == ["away"]
    os.rename(tmp_path / "away", tmp_path / "root")
    assert os.listdir(folder) == ["one"]
    presence.end()


def its_file(queue: Queue, look: Callable[[], object]) -> None:
    for consumer in os.scandir(queue.layout.consumers):
        os.unlink(consumer)
    queue.send(b"a")


def its_file_for_another(queue: Queue, look: Callable[[], object]) -> None:
    copy = f"{queue.layout.home}.copy"
    shutil.copytree(queue.layout.home, copy)
    shutil.rmtree(queue.layout.home)
    os.rename(copy, queue.layout.home)
    queue.send(b"a")


def its_queue(queue: Queue, look: Callable[[], object]) -> None:
    queue.root.delete_queue(queue.name)
    queue.root.create_queue(queue.name, durability="none", redelivery_delay=0).send(b"a")


def its_queue_for_a_while(queue: Queue, look: Callable[[], object]) -> None:
    queue.root.delete_queue(queue.name)
    with pytest.raises(NoSuchQueue):
        look()
    queue.root.create_queue(queue.name, durability="none", redelivery_delay=0).send(b"a")


@pytest.mark.parametrize("take_away", [its_file, its_file_for_another, its_queue, its_queue_for_a_while])
def test_a_consumer_whose_sign_of_life_was_taken_away_is_found_dead_all_the_same(
    make: Make, take_away: Callable[[Queue, Callable[[], object]], None]
) -> None:
    queue = make()

    def dies() -> bytes:
        subscription = reopened(queue).subscribe()
        assert subscription.receive() is None
        take_away(reopened(queue), subscription.receive)
        message = subscription.receive()
        assert message is not None
        return message.body

    assert in_child(dies) == b"a"
    assert where(queue) == {"processing": [b"a"]}
    assert reopened(queue).sweep().dead == 1
    assert where(queue) == {"target": [b"a"]}


def test_what_nfs_keeps_of_a_sign_of_life_that_was_removed_is_nobody(make: Make) -> None:
    queue = make()
    folder = Path(queue.layout.consumers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".nfs000000000000801300000003").touch()
    assert liveness.known(str(folder)) == frozenset()
    assert queue.sweep().total == 0
    assert os.listdir(folder) == [".nfs000000000000801300000003"]


def test_a_sign_of_life_is_seen_only_when_it_is_locked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    seen: list[set[str]] = []
    real = FileLock.acquire

    def acquire(lock: FileLock, *args: Any, **kwargs: Any) -> Any:
        seen.append({*liveness.known(queue.layout.consumers)})
        queue.sweep()  # which buries what it finds without a lock
        return real(lock, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(FileLock, "acquire", acquire)
        subscription = queue.subscribe()
    assert seen[0] == set()
    queue.sweep()
    assert liveness.known(queue.layout.consumers) == {subscription.id}
    subscription.close()
    assert os.listdir(queue.layout.consumers) == []


def test_what_is_held_through_another_mount_is_left_to_its_lease_where_each_mount_has_locks_of_its_own(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "mount_at", lambda folder, device: Mount("fuse"))
    queue = make()
    holders = []
    for body, lease in ((b"leased", "1m"), (b"without a lease", None)):
        queue.send(body)
        holders.append(queue.subscribe(lease_period=lease))
        assert holders[-1].receive() is not None
    for holder in holders:
        assert holder._presence is not None
        holder._presence.abandon()  # as the kernel does for the dead; and for the living, on another mount
    with monkeypatch.context() as patch:
        patch.setattr(liveness, "boot_id", lambda: b"another host")
        assert not liveness.is_dead(queue.layout.consumers, holders[0].id)
        assert queue.sweep().total == 0
        clock.advance(61)
        assert queue.sweep().lapsed == 1
        assert queue.sweep(unleased_older_than="1h").total == 0
        assert where(queue) == {"processing": [b"without a lease"], "target": [b"leased"]}
        clock.advance(7200)
        assert queue.sweep(unleased_older_than="1h").unleased == 1
    queue.send(b"held here")
    holder = queue.subscribe()
    assert holder.receive() is not None
    assert holder._presence is not None
    holder._presence.abandon()
    assert queue.sweep().dead == 1, "the same mount's lock tells"


def test_a_sweep_makes_no_sign_of_life_of_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    subscription = queue.subscribe()
    known = liveness.known

    def ends_meanwhile(folder: str) -> frozenset[str]:
        found = known(folder)
        subscription.close()
        return found

    monkeypatch.setattr(liveness, "known", ends_meanwhile)
    queue.sweep()
    assert os.listdir(queue.layout.consumers) == []


def test_a_sign_of_life_of_another_mount_that_holds_nothing_goes_after_a_day(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "mount_at", lambda folder, device: Mount("fuse"))
    queue = make()
    queue.send(b"a")
    with queue.subscribe() as idle, queue.subscribe() as holder:
        assert holder.receive() is not None
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(liveness, "boot_id", lambda: b"another host")
            clock.advance(2 * 86_400)
            queue.sweep()
            assert liveness.known(queue.layout.consumers) == {holder.id}
        queue.send(b"b")
        assert idle.receive() is not None
        assert liveness.known(queue.layout.consumers) == {holder.id, idle.id}, "who lives is there again"
