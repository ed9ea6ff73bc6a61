"""A reason says why a message lies in error/ or expired/, and belongs to that message alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from helpers import Make, base, drop, names_in, take

from dropq import LeaseLost, StorageError
from dropq.storage.files import Storage


def test_reasons_name_what_they_are_about_and_go_with_it(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).reject("r")
    (reason,) = Path(queue.layout.reasons).rglob("*.json")
    content = json.loads(reason.read_text())
    assert content["name"] == names_in(queue, "error")[0]
    assert content["delivery"] == 1
    queue.requeue()
    assert list(Path(queue.layout.reasons).rglob("*.json")) == []
    take(queue).reject("again")
    (found,) = queue.browse("error")
    assert found.reason is not None
    assert found.reason["detail"] == "again"


def test_a_reason_is_not_taken_for_another_file_of_the_same_name(make: Make) -> None:
    queue = make()
    drop(queue, "a.csv", b"a")
    take(queue).reject("r")
    os.unlink(base(queue) / "error" / "a.csv")
    keep = base(queue) / "keeps-the-inode"
    keep.touch()
    (base(queue) / "error" / "a.csv").write_bytes(b"other")
    (found,) = queue.browse("error")
    if os.lstat(found.path).st_ino != json.loads(next(Path(queue.layout.reasons).rglob("*.json")).read_text())["inode"]:
        assert found.reason is None


def test_of_two_that_move_a_message_at_once_the_second_leaves_the_reason_of_the_first(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message, move = take(queue), Storage.move

    def second(storage: Storage, source: str, destination: str) -> None:
        move(storage, source, destination)  # by the first one, at this moment
        move(storage, source, destination)

    with mock.patch.object(Storage, "move", second), pytest.raises(LeaseLost):
        message.reject("r")
    (found,) = queue.browse("error")
    assert found.reason is not None
    assert found.reason["detail"] == "r"


def test_a_message_that_could_not_be_moved_leaves_no_reason(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    (base(queue) / "error").rmdir()
    with pytest.raises(StorageError):
        message.reject("r")
    assert list(Path(queue.layout.reasons).rglob("*.json")) == []
