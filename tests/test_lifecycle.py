"""The arrows of a message's life, one by one: what is told where a folder has gone, and what is left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers import base, drop, make_queue, names_in, reopened, take, where

from dropq import NoSuchQueue, StorageError
from dropq.staging import Job, is_committed


def reasons(path: Path) -> list[str]:
    return [name for _, _, names in os.walk(path / ".dropq" / "reasons") for name in names]


def test_a_message_that_is_removed_takes_its_reason_with_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).reject("no")
    (message,) = queue.browse("error")
    assert len(reasons(base(queue))) == 1
    assert queue.life.remove("error", message.file)
    assert (where(queue), reasons(base(queue))) == ({}, [])
    assert not queue.life.remove("error", message.file)


def test_a_copy_that_cannot_be_staged_is_told_and_is_not_taken_for_a_message_that_has_gone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).ack()
    (name,) = names_in(queue, "processed")
    assert queue.life.replay(f"{name}0", queue.life) is None
    os.rmdir(base(queue) / "working")
    with pytest.raises(StorageError, match="the message was not sent"):
        queue.life.replay(name, queue.life)
    assert where(queue) == {"processed": [b"a"]}


def test_what_cannot_go_back_as_target_is_gone_is_told_and_stays(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).reject("no")
    (name,) = names_in(queue, "error")
    assert queue.life.requeue(queue.layout.error, f"{name}0", queue.life) is None
    shutil.rmtree(base(queue) / "target")
    with pytest.raises(NoSuchQueue, match="was not moved"):
        queue.life.requeue(queue.layout.error, name, queue.life)
    assert where(queue) == {"error": [b"a"]}


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
    job = Job(queue.life, "j")
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
