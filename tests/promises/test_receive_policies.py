"""What stands between a message and its consumer: the limits of what is held, the lock, and how soon to look again."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from actors import Actor, start
from filelock import FileLock
from helpers import FRESH, Clock, base, make_queue, names_in, processed, reopened, take, until, where

from dropq import LeaseLost, StorageError, work
from dropq.format.message_file import MessageFile
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.timing import Timing
from dropq.policies.backlog import Backlog
from dropq.policies.receive_policies import RECHECK, TURN_RECHECK
from dropq.storage import reading
from dropq.storage.files import Storage


def test_who_finds_an_empty_queue_waits_for_news_and_who_finds_it_full_looks_for_the_ack(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    with queue.subscribe() as one:
        assert one.receive() is None
        assert (one._is_kept_back, one._next_attempt > 2 * RECHECK) == (False, True)
        queue.send_many([b"a", b"b"])
        held = take(reopened(queue))
        assert one.receive() is None
        assert (one._is_kept_back, one._next_attempt <= RECHECK) == (True, True)
        held.ack()
        assert one.receive() is not None
        assert one._is_kept_back is False


def test_who_does_not_get_the_lock_looks_again_soon(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.05), max_backlog=1)
    queue.send(b"a")
    with queue.subscribe() as one:
        take(queue).nack()  # there is a lock file from now on
        with open(base(queue) / ".dropq" / "lock") as stranger:
            fcntl.flock(stranger, fcntl.LOCK_EX)
            assert one.receive() is None
            assert (one._is_kept_back, one._next_attempt <= RECHECK) == (True, True)
        assert one.receive() is not None


def test_a_file_system_without_locks_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    queue = make_queue(tmp_path, max_backlog=2)
    queue.send_many([b"a", b"b", b"c"])
    monkeypatch.setattr("fcntl.flock", refused)
    with queue.subscribe(max_backlog=None) as one:
        assert [one.receive() is None for _ in range(3)] == [False, False, True]
    assert caplog.text.count("limits and turns hold only roughly") == 1


def test_who_leaves_a_message_to_another_looks_again_at_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(turn_patience=3600, turns_wait=0), fairness_model="round-robin")
    with reopened(queue).subscribe() as waiting, queue.subscribe(max_backlog=None) as other:
        assert waiting.receive() is None
        queue.send(b"a")
        first = waiting.receive()
        assert first is not None
        first.ack()
        assert [other.receive(), waiting.receive()] == [None, None]
        queue.send_many([b"b", b"c"])
        assert other.receive() is not None
        assert other.receive() is None  # it is the other's turn
        assert (other._is_kept_back, other._next_attempt <= TURN_RECHECK) == (True, True)


# -- among consumers -----------------------------------------------------------------------------------------


def test_a_queue_without_policies_has_no_lock_and_no_turns(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).ack()
    queue.sweep()
    private = base(queue) / ".dropq"
    assert not (private / "lock").exists()
    assert {entry.name for entry in private.iterdir() if entry.is_file() or os.listdir(entry)} == {
        "consumers",
        "created",
        "log",
        "reasons",
        *(entry.name for entry in private.glob("queue-*")),
    }


@pytest.mark.parametrize("removed", [False, True], ids=["the lock file stays", "the lock file is taken away"])
@pytest.mark.crashes
def test_no_more_than_max_backlog_are_held_by_consumers_of_whom_some_are_killed(
    tmp_path: Path, stage: list[Actor], removed: bool
) -> None:
    queue = make_queue(tmp_path / "root", max_backlog=2)
    queue.send_many([str(number) for number in range(300)])
    notes = tmp_path / "notes"
    consumers = [start("limited", tmp_path / "root", notes, 2) for _ in range(4)]
    stage += consumers
    for done in range(20, 300, 40):
        until(lambda done=done: processed(queue) >= done, f"{done} messages to be processed")  # type: ignore[misc]
        if removed:
            # It is missing where nobody asked for it since the last time.
            (base(queue) / ".dropq" / "lock").unlink(missing_ok=True)
        victim = consumers.pop(0)
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        consumers.append(start("limited", tmp_path / "root", notes, 2))
        stage.append(consumers[-1])
    until(lambda: processed(queue) == 300, "all messages to be processed")
    assert os.listdir(notes / "violations") == []
    assert set(Counter(name.rpartition(".")[0] for name in os.listdir(notes / "acked")).values()) == {1}
    assert where(queue).keys() == {"processed"}


def test_who_waits_is_given_a_message_soon_after_another_is_settled(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b"])
    message = take(queue)
    with reopened(queue).subscribe() as other:
        assert other.receive(0.2) is None
        threading.Timer(0.2, message.ack).start()
        found = other.receive(10)
        assert found is not None
        assert found.body == b"b"


def test_what_a_script_has_claimed_counts_as_held(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b"])
    name = names_in(queue, "target")[0]
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / name)
    assert queue.receive() is None
    os.rename(base(queue) / "processing" / name, base(queue) / "processed" / name)
    assert take(queue).body == b"b"


def test_what_expires_while_it_is_held_makes_room_without_a_sweep_of_all(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock, timing=FRESH, max_backlog=1)
    queue.send(b"a", expires_in="10s")
    queue.send(b"b")
    message = take(queue)
    with reopened(queue).subscribe() as other:
        assert other.receive() is None
        clock.advance(11)
        found = other.receive()
        assert found is not None
        assert found.body == b"b"
    with pytest.raises(LeaseLost):
        message.ack()
    assert where(queue) == {"expired": [b"a"], "target": [b"b"]}


def test_who_has_the_lock_and_hangs_keeps_others_waiting_and_no_longer_than_it_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.05), max_backlog=1)
    queue.send(b"a")
    os.makedirs(base(queue) / ".dropq", exist_ok=True)
    holder = FileLock(base(queue) / ".dropq" / "lock")
    with holder:
        assert queue.receive() is None
    assert "held by another process" in caplog.text
    assert take(queue).body == b"a"


def test_on_a_file_system_without_locks_messages_are_handed_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    queue = make_queue(tmp_path, max_backlog=2, fairness_model="round-robin", barrier_expression="JMSType = 'sync'")
    queue.send_many([b"a", {"body": b"b", "type": "sync"}, b"c"])
    monkeypatch.setattr("fcntl.flock", refused)
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        for body in (b"a", b"b", b"c"):
            message = one.receive()
            assert message is not None
            assert message.body == body
            assert [one.receive(), other.receive()] == [None, None]  # a barrier goes to whoever hands it out
            message.ack()
    assert where(queue) == {"processed": [b"a", b"b", b"c"]}
    assert "limits and turns hold only roughly" in caplog.text


def test_a_claim_made_while_somebody_took_the_lock_file_away_is_given_back_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send(b"a")
    own = take(queue)
    own.nack()
    rename = Storage.rename

    def take_away(self: Storage, source: str, destination: str) -> None:
        rename(self, source, destination)
        if "/processing/" in destination:
            os.unlink(queue.layout.lock)

    monkeypatch.setattr(Storage, "rename", take_away)
    assert queue.receive() is None
    monkeypatch.setattr(Storage, "rename", rename)
    message = take(queue)
    assert (message.delivery_count, message.cancels) == (2, 1)


def test_a_worker_until_empty_waits_for_what_a_full_backlog_keeps_back(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b", b"c"])
    first = take(queue)
    threading.Timer(0.3, first.ack).start()
    report = work(reopened(queue), lambda message: None, until_empty=True)
    assert report.acked == 2
    assert where(queue) == {"processed": [b"a", b"b", b"c"]}


def test_a_listing_that_misses_claims_being_renewed_is_laid_together_with_others() -> None:
    seen = [MessageFile(f"a-0123456789-{number:x},5,1~x{number}") for number in range(150)]
    renewed = [MessageFile(file.filename.replace(",5,", ",9,")) for file in seen]
    limit = Backlog(150)
    assert limit.decide(seen[:149], lambda: seen[:149]).allowed
    assert not limit.decide(seen[:100], lambda: renewed[60:]).allowed


def test_a_message_that_cannot_be_claimed_keeps_none_behind_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, max_backlog=10)
    first = queue.send(b"too long").id
    queue.send_many([b"1", b"2"])
    claim = Claims.claim

    def refused(self: Claims, file: MessageFile, *args: Any, **options: Any) -> Any:
        if first in file.filename:
            raise StorageError("no room for the name", errno=errno.ENAMETOOLONG)
        return claim(self, file, *args, **options)

    monkeypatch.setattr(Claims, "claim", refused)
    with queue.subscribe(max_backlog=None) as subscription:
        assert [message.body for message in subscription.receive_many(2)] == [b"1", b"2"]


def test_what_was_claimed_as_the_lock_could_not_be_looked_at_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send("a")
    with queue.subscribe(max_backlog=None) as subscription:

        def refused(path: str) -> int:
            if queue.counts()["processing"]:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return reading.inode(path)

        with monkeypatch.context() as disk:
            disk.setattr("dropq.policies.lock.inode", refused)
            assert subscription.receive() is None
        assert queue.counts()["target"] == 1
        message = subscription.receive()
        assert message is not None and message.delivery_count == 1
