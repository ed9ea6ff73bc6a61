"""The arrows of a message's life, one by one: what is told where a folder has gone, and what is left behind."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from helpers import RecordingOs, base, drop, make_queue, names_in, reopened, take, where

from dropq import NoSuchQueue, StorageError
from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.lifecycle.expiry import expires_at, expires_by_arrival, has_expired, may_expire
from dropq.lifecycle.transitions import Transitions
from dropq.staging.jobs import Job, is_committed
from dropq.storage import reading
from dropq.storage.files import Storage

#: A plain name, and what it may go on with.
PLAIN = "4.1763770000000000-0000000000.B"


def reasons(path: Path) -> list[str]:
    return [name for _, _, names in os.walk(path / ".dropq" / "reasons") for name in names]


def test_a_message_that_is_removed_takes_its_reason_with_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).reject("no")
    (message,) = queue.browse("error")
    assert len(reasons(base(queue))) == 1
    assert Transitions(queue.context).remove("error", message.file)
    assert (where(queue), reasons(base(queue))) == ({}, [])
    assert not Transitions(queue.context).remove("error", message.file)


def test_a_copy_that_cannot_be_staged_is_told_and_is_not_taken_for_a_message_that_has_gone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).ack()
    (name,) = names_in(queue, "processed")
    assert Transitions(queue.context).replay(f"{name}0", queue.context) is None
    os.rmdir(base(queue) / "working")
    with pytest.raises(StorageError, match="the message was not sent"):
        Transitions(queue.context).replay(name, queue.context)
    assert where(queue) == {"processed": [b"a"]}


def test_what_cannot_go_back_as_target_is_gone_is_told_and_stays(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).reject("no")
    (name,) = names_in(queue, "error")
    assert Transitions(queue.context).requeue(queue.layout.error, f"{name}0", queue.context) is None
    shutil.rmtree(base(queue) / "target")
    with pytest.raises(NoSuchQueue, match="was not moved"):
        Transitions(queue.context).requeue(queue.layout.error, name, queue.context)
    assert where(queue) == {"error": [b"a"]}


def test_an_archive_that_may_not_be_entered_is_told_and_its_messages_are_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).ack()
    (name,) = names_in(queue, "processed")
    lstat = os.lstat

    def closed(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "copy", closed)
        patch.setattr(os, "lstat", lambda path: closed() if "/processed/" in path else lstat(path))
        with pytest.raises(StorageError, match=r"Permission denied.*the message was not sent"):
            Transitions(queue.context).replay(name, queue.context)
    assert where(queue) == {"processed": [b"a"]}


def test_a_message_that_cannot_be_moved_to_expired_is_told_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    (name,) = names_in(queue, "target")

    def refused(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    monkeypatch.setattr(Storage, "move", refused)
    with pytest.raises(StorageError, match=r"Input/output error.*the message stays in target/"):
        Transitions(queue.context).expire_waiting(MessageFile(name))
    assert (where(queue), reasons(base(queue))) == ({"target": [b"a"]}, [])


@pytest.mark.parametrize(
    ("history", "calls"),
    [
        (True, ["rename processing/* processed/*", "fsync processed", "fsync processing"]),
        (False, ["rename processing/* .dropq/*", "unlink .dropq/*", "fsync processing"]),
    ],
)
def test_an_ack_is_durable_whether_a_history_is_kept_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: bool, calls: list[str]
) -> None:
    queue = make_queue(tmp_path, durability="full", history=history)
    queue.send(b"a")
    message = take(queue)
    seen = RecordingOs().record(monkeypatch)
    message.ack()
    assert seen.briefly(("fsync", "rename", "unlink"), base(queue)) == calls


def test_a_name_within_the_budget_is_claimed_as_it_is_and_a_longer_one_is_written_anew(tmp_path: Path) -> None:
    transitions = Transitions(make_queue(tmp_path).context)
    rest = "...JMS_dropq_notBeforeL=1"
    within = f"{PLAIN}..{'x' * (names.NAME_BUDGET - len(f'{PLAIN}..{rest}'))}{rest}"
    assert transitions.next_delivery(MessageFile(within)) == (1, within)
    _, file = transitions.next_delivery(MessageFile(within.replace("xx", "xxx", 1)))
    assert "notBefore" not in file


def test_a_foreign_file_that_comes_back_keeps_the_time_at_which_it_came(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    source = base(queue) / "working" / "report.csv"
    source.touch()
    came = reading.changed_ms(str(source))
    context = queue.context
    file = Transitions(context).into_target(str(source), context.sidecars.parse("report.csv"))
    assert file is not None
    assert context.sidecars.parse(file).since == came


@pytest.mark.parametrize(
    ("file", "by_arrival"),
    [("report.csv", True), (PLAIN, False), ("4.report%2Ecsv.B.....JMS_dropq_sinceL=1763770000000", False)],
)
def test_only_a_message_whose_name_tells_no_time_expires_by_when_its_file_came(
    tmp_path: Path, file: str, by_arrival: bool
) -> None:
    assert expires_by_arrival(make_queue(tmp_path, expiration="1h").context, MessageFile(file)) is by_arrival


def test_where_the_queue_lets_nothing_expire_no_message_expires_by_when_its_file_came(tmp_path: Path) -> None:
    assert not expires_by_arrival(make_queue(tmp_path).context, MessageFile("report.csv"))


@pytest.mark.parametrize(
    ("file", "expires"),
    [
        ("report.csv", 5_000 + 3_600_000),
        (PLAIN, 1763770000000 + 3_600_000),
        (f"{PLAIN}.....JMS_dropq_sinceL=7000", 7_000 + 3_600_000),
    ],
)
def test_the_queue_s_expiration_counts_from_the_name_s_newest_time_or_else_from_when_the_file_came(
    tmp_path: Path, file: str, expires: int
) -> None:
    assert expires_at(make_queue(tmp_path, expiration="1h").context, MessageFile(file).name, 5_000) == expires


@pytest.mark.parametrize("expiration", [None, "1h"])
def test_a_message_without_an_expiration_may_expire_only_where_the_queue_has_one(
    tmp_path: Path, expiration: str | None
) -> None:
    context = make_queue(tmp_path, expiration=expiration).context
    assert [may_expire(context, MessageFile(file)) for file in ("report.csv", PLAIN)] == [expiration is not None] * 2
    assert may_expire(context, MessageFile(f"{PLAIN}.1"))


@pytest.mark.parametrize(("expiration", "expired"), [("0", False), ("1", True)])
def test_a_message_may_expire_at_any_time_but_0_which_is_never(tmp_path: Path, expiration: str, expired: bool) -> None:
    assert has_expired(make_queue(tmp_path).context, MessageFile(f"{PLAIN}.{expiration}")) is expired


def test_names_at_rest_say_nothing_of_a_delay(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    for body in (b"a", b"b"):
        drop(queue, "report.csv", body)
        message = take(queue)
        message.nack(delay=0)
        take(reopened(queue)).ack()
    assert where(queue) == {"processed": [b"a", b"b"]}
    assert len(names_in(queue, "processed")) == 2
    assert [name for name in names_in(queue, "processed") if "notBefore" in name] == []


@pytest.mark.parametrize("dropped", [False, True])
def test_who_commits_is_told_whether_somebody_dropped_the_job(tmp_path: Path, dropped: bool) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "j")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all(["4.1000000000000000-0000000000.B"], [b"a"])
    staged = attempt.finish()
    if dropped:
        shutil.rmtree(job.folder)
    else:
        os.unlink(f"{attempt.folder}/{staged.files[0]}")
    with pytest.raises(StorageError, match="nothing was sent") as refused:
        job.commit([staged])
    assert ("dropped it" in str(refused.value)) is dropped
    assert where(queue) == {}


def test_a_link_to_a_job_that_was_committed_elsewhere_is_no_job_of_this_queue(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text('{"format": 1, "job": "j", "attempts": {}}')
    os.symlink(elsewhere, base(queue) / "working" / ".job-j")
    assert not is_committed(queue.layout.working)
    os.unlink(base(queue) / "working" / ".job-j")
    os.rename(elsewhere, base(queue) / "working" / ".job-j")
    assert is_committed(queue.layout.working)
