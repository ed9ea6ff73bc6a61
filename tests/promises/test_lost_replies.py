"""A reply that is lost on the way from the file server does not turn a success into a failure."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import Make, reopened, stand_in_for_os, take, where

from dropq import DropqError, StorageError
from dropq.storage import system_calls
from dropq.storage.files import Storage


def test_a_lost_reply_of_the_file_server_is_no_lost_race(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS a rename is sent again when its reply was lost, and then finds nothing."""
    queue = make(lease_period="60s")
    monkeypatch.setattr(queue.context.storage._exclusive, "in_kernel", False)  # NFS has no such call
    rename = os.rename

    def losing(source: str, destination: str) -> None:
        rename(source, destination)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)

    class Losing:
        def __getattr__(self, name: str) -> Any:
            return losing if name == "rename" else getattr(os, name)

    stand_in_for_os(monkeypatch, Losing())
    queue.send(b"a")
    message = take(queue)
    message.extend(90)
    message.nack()
    take(queue).reject("r")
    queue.requeue()
    take(queue).ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("answer", [errno.ENOENT, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("is_swept", [False, True])
def test_a_bundle_whose_commit_was_done_although_the_answer_was_lost_is_settled(
    make: Make, monkeypatch: pytest.MonkeyPatch, answer: int, is_swept: bool
) -> None:
    queue = make(lease_period="60s")
    queue.send(b"1\n2\n3\n", type="text")
    message = take(queue)
    loop = message.records()
    next(loop).ack()
    next(loop).reject("bad")
    commit = Storage.commit

    def losing(self: Storage, source: str, destination: str) -> None:
        commit(self, source, destination)
        if is_swept:  # another process rolls forward before this one looks
            reopened(queue).sweep()
        raise OSError(answer, os.strerror(answer), source)

    with monkeypatch.context() as lost:
        lost.setattr(Storage, "commit", losing)
        if is_swept and answer == errno.EIO:  # what the server refused to do, it may not have done
            with pytest.raises(StorageError, match="is still held"):
                message.nack()
        else:
            message.nack()
    assert where(queue) == {"target": [b"3\n"], "processed": [b"1"], "error": [b"2\n"]}
    with suppress(DropqError):
        message.nack()  # and a second try settles nothing twice
    assert where(queue) == {"target": [b"3\n"], "processed": [b"1"], "error": [b"2\n"]}


class Replies:
    """Stands for the module `os` in dropq.storage, as over NFS where a reply is lost: the call is made twice."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self._call:
            return real

        def twice(*args: Any, **kwargs: Any) -> Any:
            real(*args, **kwargs)
            return real(*args, **kwargs)

        return twice


def test_an_ack_without_a_history_is_none_that_was_lost_where_the_reply_to_its_removal_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(history=False)
    queue.send(b"a")
    message = take(queue)
    stand_in_for_os(monkeypatch, Replies("unlink"))
    message.ack()
    assert message.state == "removed" and where(queue) == {}


def test_a_second_name_for_a_body_is_had_where_the_reply_to_it_was_lost(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    stand_in_for_os(monkeypatch, Replies("link"))
    message.link(str(tmp_path / "linked"))
    assert (tmp_path / "linked").read_bytes() == b"a"


def test_a_second_name_that_something_else_has_is_still_refused(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.send(b"a")
    (tmp_path / "linked").write_bytes(b"b")
    with pytest.raises(StorageError, match="File exists"):
        take(queue).link(str(tmp_path / "linked"))
    assert (tmp_path / "linked").read_bytes() == b"b"


def test_a_tree_is_removed_to_its_end_where_somebody_else_removes_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "file").touch()
    real = os.unlink
    monkeypatch.setattr(os, "unlink", lambda *args, **kwargs: (real(*args, **kwargs), real(*args, **kwargs)))
    Storage().remove_tree(str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()


def test_a_file_that_was_taken_over_although_the_answer_was_lost_is_sent(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"a")
    rename = os.rename

    def lost(old: str, new: str) -> None:
        rename(old, new)
        if str(old) == str(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)

    monkeypatch.setattr(os, "rename", lost)
    queue.send_file(source, move=True)
    assert where(queue) == {"target": [b"a"]} and not source.exists()


def test_a_queue_that_was_made_although_the_answer_was_lost_is_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rename = make().root, os.rename

    def no_flags(old: str, new: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), old)

    def lost(old: str, new: str) -> None:
        rename(old, new)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)

    monkeypatch.setattr(system_calls, "rename_noreplace", no_flags)  # as on NFS
    monkeypatch.setattr(os, "rename", lost)
    assert root.create_queue("z").exists()
