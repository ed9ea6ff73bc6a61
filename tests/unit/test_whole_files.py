"""A file that was written is waited for where a close() may return before the file is whole, and nowhere else."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from dropq import Root, StorageError
from dropq.storage import files, reading, system_calls
from dropq.storage.files import Storage
from dropq.storage.mounts import Mount


@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_the_size_that_a_file_system_is_asked_for_is_the_file_s(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        asked = system_calls.size_asked(f"{tmp_path}/file"), system_calls.size_asked("file", folder)
    finally:
        os.close(folder)
    assert asked in [(size, size), (None, None)]


def test_the_size_of_a_file_that_is_gone_cannot_be_asked_for(tmp_path: Path) -> None:
    if system_calls._statx is None:
        pytest.skip("this C library has no statx")
    with pytest.raises(FileNotFoundError):
        system_calls.size_asked(f"{tmp_path}/gone")


@pytest.mark.parametrize("refused", [errno.ENOSYS, errno.EPERM])
def test_where_a_container_refuses_the_call_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    def statx(*_: object) -> int:
        ctypes.set_errno(refused)
        return -1

    monkeypatch.setattr(system_calls, "_statx", statx)
    assert system_calls.size_asked(f"{tmp_path}/file") is None


@pytest.mark.parametrize(("kind", "late"), [("fuse.fuse_dfs", True), ("fuse", True), ("ext4", False), ("nfs4", False)])
def test_fuse_may_finish_files_late(kind: str, late: bool) -> None:
    assert Mount(kind).finishes_late is late


def test_no_other_file_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount("ext4"))
    monkeypatch.setattr(system_calls, "size_asked", lambda *_: pytest.fail("it was asked"))
    Storage().write_new(f"{tmp_path}/file", b"12345")


def test_a_file_is_asked_for_until_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount("fuse.fuse_dfs"))
    shown = iter([0, 0, 3, 5])
    monkeypatch.setattr(system_calls, "size_asked", lambda *_: next(shown))
    Storage().write_new(f"{tmp_path}/file", b"12345")
    assert next(shown, "no more") == "no more"


def test_what_does_not_become_whole_is_not_sent_and_the_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Root.create(tmp_path / "root").create_queue("q")
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount("fuse.fuse_dfs"))
    monkeypatch.setattr(files, "WHOLE_LIMIT", 0.0)
    monkeypatch.setattr(system_calls, "size_asked", lambda *_: 2)
    with pytest.raises(StorageError, match="shows 2 of its 5 bytes") as refused:
        queue.send(b"12345")
    assert isinstance(refused.value.__cause__, OSError)
    assert refused.value.__cause__.errno == errno.EIO
    assert queue.counts()["target"] == 0
    assert os.listdir(queue.layout.working) == []


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_a_copy_reads_regular_files_only_and_waits_for_none(tmp_path: Path, kind: str) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    if kind == "fifo":
        os.mkfifo(source)
    elif kind == "folder":
        source.mkdir()
    else:
        source.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="source") as raised:
        Storage("none").copy(str(source), str(copy))
    assert raised.value.errno in reading.CLOSED and not copy.exists()


def test_a_copy_says_what_the_file_was_before_it_was_read(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"body")
    os.utime(source, ns=(10**18, 10**18 + 5))
    found = Storage("none").copy(str(source), str(copy))
    assert (found.st_size, found.st_mtime_ns) == (4, 10**18 + 5)
    assert copy.read_bytes() == b"body" and copy.stat().st_mtime_ns == 10**18 + 5
