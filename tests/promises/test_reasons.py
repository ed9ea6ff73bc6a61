"""A reason says why a message lies in error/ or expired/, and belongs to that message alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from helpers import Clock, Make, base, drop, names_in, take

from dropq import LeaseLost, Queue, StorageError
from dropq.queue.message import utc
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


def test_the_folder_of_reasons_is_made_only_where_it_is_missing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, made, make_folder = make(), list[str](), Storage.make_folder

    def noted(self: Storage, path: str, *, parents: bool = True, passing: bool = False) -> None:
        made.append(path)
        make_folder(self, path, parents=parents, passing=passing)

    os.rmdir(f"{queue.layout.reasons}/error")
    monkeypatch.setattr(Storage, "make_folder", noted)
    for body in (b"a", b"b"):
        queue.send(body)
        take(queue).reject("r")
    assert made.count(f"{queue.layout.reasons}/error") == 1
    assert [message.reason and message.reason["detail"] for message in queue.browse("error")] == ["r", "r"]


def detail(queue: Queue, name: str) -> object:
    """Return why the message of a name is in error/; None if nothing says it."""
    (found,) = (message for message in queue.browse("error") if message.name == name)
    return found.reason and found.reason["detail"]


def written(queue: Queue) -> list[str]:
    return [path.name for path in Path(queue.layout.reasons).rglob("*.json")]


def test_a_file_that_an_editor_writes_again_keeps_its_reason(make: Make) -> None:
    queue = make()
    drop(queue, "a.csv", b"bad")
    take(queue).reject("no number")
    queue.send(b"bad")
    take(queue).reject("no text")
    before = {message.name: os.lstat(message.path).st_ino for message in queue.browse("error")}
    subprocess.run(["sed", "-i", "s/bad/good/", *(message.path for message in queue.browse("error"))], check=True)
    after = {message.name: (os.lstat(message.path).st_ino, message.text) for message in queue.browse("error")}
    assert all(after[name] != (inode, "good") and after[name][1] == "good" for name, inode in before.items())
    assert {detail(queue, name) for name in before} == {"no number", "no text"}
    assert queue.fsck() == []
    assert all(outcome.ok for outcome in queue.requeue())
    assert written(queue) == [] and queue.fsck() == []


def test_a_file_that_fails_under_a_name_that_an_earlier_one_had_has_its_own_reason(make: Make) -> None:
    queue = make()
    drop(queue, "a.csv", b"first")
    take(queue).reject("first")
    os.unlink(base(queue) / "error" / "a.csv")
    drop(queue, "a.csv", b"second")
    take(queue).reject("second")
    assert detail(queue, "a.csv") == "second"
    assert len(written(queue)) == 1


def test_a_file_that_fails_beside_one_of_its_name_leaves_that_one_its_reason(make: Make) -> None:
    queue = make()
    for reason in ("first", "second"):
        drop(queue, "a.csv", reason.encode())
        take(queue).reject(reason)
    assert detail(queue, "a.csv") == "first"
    assert {message.text: message.reason and message.reason["detail"] for message in queue.browse("error")} == {
        "first": "first",
        "second": "second",
    }
    (marked,) = (message.name for message in queue.browse("error") if message.name != "a.csv")
    assert [outcome.ok for outcome in queue.requeue(ids=[marked])] == [True]
    assert detail(queue, "a.csv") == "first"


def test_a_reason_whose_writer_died_once_the_file_was_moved_is_found_and_filed_by_a_sweep(make: Make) -> None:
    queue = make()
    drop(queue, "a.csv", b"bad")
    with mock.patch("dropq.lifecycle.reasons.Reasons.keep"):
        take(queue).reject("no number")
    assert detail(queue, "a.csv") == "no number" and queue.fsck() == []
    filed_by_inode = written(queue)
    queue.sweep()
    assert written(queue) != filed_by_inode
    subprocess.run(["sed", "-i", "s/bad/good/", base(queue) / "error" / "a.csv"], check=True)
    assert detail(queue, "a.csv") == "no number"


def test_a_reason_of_a_move_that_never_came_is_not_taken_for_another_file_of_the_name(make: Make) -> None:
    queue = make()
    (base(queue) / "error" / "a.csv").write_bytes(b"a script put it there")
    other = os.lstat(base(queue) / "error" / "a.csv").st_ino + 1
    queue.context.reasons.record("error", "a.csv", other, {"detail": "of a file that came back"})
    assert detail(queue, "a.csv") is None
    queue.sweep()
    assert detail(queue, "a.csv") is None
    assert [finding.kind for finding in queue.fsck()] == ["orphan-reason"]


def test_a_reason_that_cannot_be_filed_by_the_name_is_found_all_the_same(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    queue.send(b"a")
    message, replace = take(queue), Storage.replace

    def refuse(storage: Storage, source: str, destination: str) -> None:
        if names_in(queue, "error"):  # its file is there: only the reason's rename is left
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(storage, source, destination)

    with mock.patch.object(Storage, "replace", refuse):
        message.reject("r")
    assert "is found only while its file keeps its inode" in caplog.text
    (found,) = queue.browse("error")
    assert found.reason and found.reason["detail"] == "r"


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


def test_a_foreign_file_in_error_tells_its_tries_and_when_it_came(make: Make, clock: Clock) -> None:
    queue = make(redelivery_attempts=3, redelivery_delay=0)
    drop(queue, "a.csv", b"bad")
    came = os.lstat(base(queue) / "target" / "a.csv").st_ctime_ns // 1_000_000
    for _ in range(4):
        clock.advance(100)
        take(queue).fail("no number")
    (failed,) = queue.browse("error")
    assert (failed.name, failed.delivery_count, failed.redelivered) == ("a.csv", 4, True)
    assert failed.timestamp == utc(came)
    assert queue.stats()["error"].oldest == utc(came)
    assert [found.name for found in queue.browse("error", filter="JMSXDeliveryCount = 4")] == ["a.csv"]
    assert list(queue.browse("error", filter="JMSXDeliveryCount < 4")) == []
    assert list(queue.browse("error", filter=f"JMSTimestamp <> {came}")) == []


def test_a_foreign_file_that_fails_at_once_tells_when_it_came(make: Make) -> None:
    queue = make()
    drop(queue, "a.csv", b"bad")
    came = os.lstat(base(queue) / "target" / "a.csv").st_ctime_ns // 1_000_000
    message = take(queue)
    while os.lstat(message.path).st_ctime_ns // 1_000_000 == came:
        os.chmod(message.path, 0o600)  # a later ctime, as the claim has where the clock ticks faster
    message.fail("no number")
    (failed,) = queue.browse("error")
    assert (failed.delivery_count, failed.timestamp) == (1, utc(came))


def test_a_foreign_file_that_expires_between_two_tries_tells_them_and_its_cancels(make: Make, clock: Clock) -> None:
    queue = make(expiration="1h", redelivery_delay=0)
    drop(queue, "a.csv", b"bad")
    came = os.lstat(base(queue) / "target" / "a.csv").st_ctime_ns // 1_000_000
    take(queue).nack()
    clock.advance(7200)
    queue.sweep()
    (expired,) = queue.browse("expired")
    assert (expired.name, expired.delivery_count, expired.cancels) == ("a.csv", 1, 1)
    assert expired.timestamp == utc(came)


def test_a_coded_name_without_a_time_tells_in_error_when_it_came(make: Make, clock: Clock) -> None:
    queue = make()
    drop(queue, "4.mine.B", b"bad")
    came = os.lstat(base(queue) / "target" / "4.mine.B").st_ctime_ns // 1_000_000
    clock.advance(100)
    take(queue).fail("no number")
    (failed,) = queue.browse("error")
    assert (failed.id, failed.delivery_count, failed.timestamp) == ("mine", 1, utc(came))


@pytest.mark.parametrize("told", ["4", 4.0, True, -1, 1 << 31, None, [4]])
def test_counts_and_times_of_a_reason_that_are_none_count_for_nothing(make: Make, told: object) -> None:
    queue = make()
    drop(queue, "a.csv", b"bad")
    take(queue).fail("no number")
    (reason,) = Path(queue.layout.reasons).rglob("*.json")
    known = json.loads(reason.read_text())
    reason.write_text(json.dumps({**known, "delivery": told, "cancels": told, "arrived": told}))
    (failed,) = queue.browse("error")
    assert (failed.delivery_count, failed.cancels) == (0, 0)
    assert failed.timestamp == utc(os.lstat(failed.path).st_ctime_ns // 1_000_000)


@pytest.mark.parametrize("state", ["error", "expired"])
def test_a_foreign_file_that_is_moved_on_keeps_its_tries_and_its_arrival(make: Make, state: str) -> None:
    queue = make(max_cancels=3)
    drop(queue, "a.csv", b"1")
    take(queue).nack(delay=0)
    message = take(queue)
    message.reject("r") if state == "error" else message.expire()
    assert names_in(queue, state) == ["a.csv"]
    (ended,) = queue.browse(state)
    assert ended.since is not None
    other = queue.root.create_queue("other")
    assert [outcome.ok for outcome in queue.move(other, state=state)] == [True]
    (moved,) = other.browse()
    assert (moved.id, moved.delivery_count, moved.cancels, moved.since) == ("a.csv", 2, 1, ended.since)


def test_a_message_that_is_moved_out_of_error_takes_no_reason_along(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other")
    drop(queue, "a.csv", b"bad")
    take(queue).fail("no number")
    assert [outcome.ok for outcome in queue.move(other, state="error")] == [True]
    assert written(queue) == [] and queue.fsck() == []
