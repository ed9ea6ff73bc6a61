"""A name that a move has reserved is no message, and no message is replaced or removed for one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Make, archive, base, drop, take, where

from dropq import LeaseLost, StorageError
from dropq.storage import exclusive_rename, system_calls
from dropq.storage.exclusive_rename import raise_unless_done
from dropq.storage.files import Storage
from dropq.storage.reading import RESERVED_MODE


@pytest.mark.parametrize("state", ["processed", "error", "expired"])
def test_a_reservation_that_a_crash_left_is_no_message(make: Make, state: str) -> None:
    queue = make()
    reservation = base(queue) / state / "report.csv"
    os.close(os.open(reservation, os.O_WRONLY | os.O_CREAT | os.O_EXCL, RESERVED_MODE))
    assert list(queue.browse(state)) == []
    assert queue.requeue(state=state) == []
    assert reservation.exists()
    assert queue.receive() is None


def test_a_move_in_doubt_never_removes_the_message_for_its_reservation(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    drop(queue, "report.csv", b"precious")
    message = take(queue)
    queue.context.storage._exclusive.in_kernel = False
    rename, lstat = os.rename, os.lstat
    cached: dict[str, os.stat_result] = {}

    def with_lost_reply(source: str, destination: str) -> None:
        if "/processed/" not in destination:
            return rename(source, destination)
        cached[destination] = lstat(destination)
        rename(source, destination)
        raise FileNotFoundError(errno.ENOENT, "the reply was lost", source)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", with_lost_reply)
        patch.setattr(os, "lstat", lambda path, **more: cached.get(path) or lstat(path, **more))
        message.ack()
    assert where(queue) == {"processed": [b"precious"]}


def test_where_renames_replace_only_a_name_that_somebody_else_may_take_is_reserved(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.context.storage._exclusive.in_kernel = False
    opened = list[str]()
    monkeypatch.setattr(os, "open", noting_created(os.open, opened))
    queue.send(b"sent")
    drop(queue, "report.csv", b"dropped")
    for _ in range(2):
        take(queue).ack()
    assert [name for name in opened if "/processed/" in name] == [f"{base(queue)}/processed/report.csv"]
    assert where(queue) == {"processed": [b"dropped", b"sent"]}


def noting_created(call: Callable[..., int], opened: list[str]) -> Callable[..., int]:
    """Return an os.open that notes the paths that it creates."""

    def noting(path: str, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_CREAT:
            opened.append(path)
        return call(path, flags, *rest, **more)

    return noting


def test_retention_leaves_a_name_alone_that_a_move_has_reserved(make: Make) -> None:
    queue = make(max_history=1)
    reserved = base(queue) / "processed" / "report.csv"
    os.close(os.open(reserved, os.O_WRONLY | os.O_CREAT | os.O_EXCL, RESERVED_MODE))
    archive(queue, b"a")
    assert queue.sweep().pruned == 0
    assert reserved.exists()
    assert where(queue) == {"processed": [b"a"]}


def test_a_move_that_lost_its_source_and_its_reservation_has_not_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no rename refuses to replace: a folder that somebody takes away takes the reservation with it."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "draft").write_text("manifest")
    rename = os.rename

    def taken_away(source: str, destination: str) -> None:
        if source.endswith("/draft"):
            rename(tmp_path / "job", tmp_path / "away")
        rename(source, destination)

    def unsupported(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    monkeypatch.setattr(system_calls, "rename_noreplace", unsupported)
    monkeypatch.setattr(os, "rename", taken_away)
    with pytest.raises(FileNotFoundError):
        Storage().move(str(tmp_path / "job" / "draft"), str(tmp_path / "job" / "manifest.json"))
    assert (tmp_path / "away" / "draft").read_text() == "manifest"


@pytest.mark.parametrize("mode", [0, 0o644])
def test_a_late_ack_is_refused_where_a_reservation_has_another_mode(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    def no_flags(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    real = os.open
    monkeypatch.setattr(system_calls, "rename_noreplace", no_flags)
    monkeypatch.setattr(os, "open", lambda path, flags, given=0o777, **more: real(path, flags, given | mode, **more))
    queue = make()
    queue.send(b"a")
    late = take(queue)
    assert [outcome.ok for outcome in queue.requeue(state="processing")] == [True]
    with pytest.raises(LeaseLost):
        late.ack()
    assert where(queue) == {"target": [b"a"]}
    assert os.listdir(base(queue) / "processed") == []


def test_a_disk_that_fails_for_a_moment_is_not_taken_for_one_that_never_replaces(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flags(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    real, failures = os.rename, ["the ack's"]

    def fails_once(source: str, destination: str) -> None:
        if failures and "/processed/" in destination:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        real(source, destination)

    queue = make()
    queue.send(b"a")
    message = take(queue)
    monkeypatch.setattr(system_calls, "rename_noreplace", no_flags)
    monkeypatch.setattr(os, "rename", fails_once)
    with pytest.raises(StorageError, match="stays in processing/"):
        message.ack()
    drop(queue, "report", b"kept")
    take(queue).ack()
    drop(queue, "report", b"kept too")
    take(queue).ack()
    message.ack()
    assert where(queue) == {"processed": [b"a", b"kept", b"kept too"]}


def test_a_rename_that_failed_after_it_was_done_costs_no_message_where_names_are_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "message").write_bytes(b"a")
    rename = os.rename

    def done_but_refused(source: str, destination: str) -> None:
        rename(source, destination)
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    store = Storage("none")
    store._exclusive.in_kernel = False
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", done_but_refused)
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert (tmp_path / "kept").read_bytes() == b"a"


def test_no_name_is_reserved_where_a_rename_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash would leave the empty file; where there are no modes it is a message."""
    rename, made = os.rename, os.open

    def never_replacing(source: str, destination: str) -> None:
        if os.path.lexists(destination):
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, destination)

    opened = []

    def opening(path: str, *args: Any, **kwargs: Any) -> int:
        opened.append(os.path.basename(path))
        return made(path, *args, **kwargs)

    store = Storage("none")
    store._exclusive.in_kernel = False
    (tmp_path / "message").write_bytes(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", never_replacing)
        patched.setattr(os, "open", opening)
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert opened and "kept" not in opened
    assert os.listdir(tmp_path) == ["kept"]


def test_a_disk_that_fails_now_and_then_is_not_one_that_never_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = os.rename, []

    def flaky(source: str, destination: str) -> None:
        calls.append(source)
        if len(calls) in (1, 2, 6):  # twice what is tried before, and then the message's own
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, destination)

    store = Storage("none")
    store._exclusive.in_kernel = False
    (tmp_path / "message").write_bytes(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", flaky)
        with pytest.raises(OSError, match="Input/output"):
            store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    (tmp_path / "kept").write_bytes(b"another of its name")
    with pytest.raises(FileExistsError):
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert (tmp_path / "kept").read_bytes() == b"another of its name"
    assert sorted(os.listdir(tmp_path)) == ["kept", "message"]


def test_a_move_that_was_refused_is_not_taken_for_done_where_inodes_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "message").write_bytes(b"a")

    def refused(old: str, new: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), old)

    store = Storage("none")
    store._exclusive.in_kernel = False
    monkeypatch.setattr(exclusive_rename, "_is_reserved", lambda path, reserved: False)
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="Read-only"):
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert (tmp_path / "message").read_bytes() == b"a"


def test_a_disk_that_says_of_each_name_that_it_is_taken_lets_the_message_where_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)

    def taken(self: Storage, source: str, destination: str, is_unique: object = None) -> None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)

    monkeypatch.setattr(Storage, "move", taken)
    verbs: tuple[Callable[[], object], ...] = (lambda: message.reject("r"), message.ack)
    for verb in verbs:
        with pytest.raises(StorageError, match="the message stays in processing/"):
            verb()
    monkeypatch.undo()
    assert where(queue) == {"processing": [b"a"]}
    message.reject("r")
    assert where(queue) == {"error": [b"a"]}


def test_a_refused_rename_is_not_taken_for_done_where_its_source_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = str(tmp_path / "new"), str(tmp_path / "old")
    for path in (source, destination):
        Path(path).touch()
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), source)

    def refused(path: str, *folder: int, **how: object) -> None:
        raise error

    with monkeypatch.context() as disk:
        disk.setattr(system_calls, "ask", refused)
        with pytest.raises(PermissionError):
            raise_unless_done(error, source, destination)
    os.unlink(source)
    raise_unless_done(error, source, destination)
    os.unlink(destination)
    with pytest.raises(FileNotFoundError):
        raise_unless_done(error, source, destination)
    with monkeypatch.context() as disk:
        disk.setattr(os, "stat", refused)
        with pytest.raises(PermissionError):  # whether it was done is not known
            raise_unless_done(error, source, destination)
