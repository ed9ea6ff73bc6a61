"""What stands between a message and its consumer, look by look: how soon it looks again, and for what."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest
from helpers import base, make_queue, reopened, take

from dropq.lifecycle.timing import Timing
from dropq.policies.receive_policies import RECHECK, TURN_RECHECK


def test_who_finds_an_empty_queue_waits_for_news_and_who_finds_it_full_looks_for_the_ack(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    with queue.subscribe() as one:
        assert one.receive() is None
        assert (one.held_up, one.next_look > 2 * RECHECK) == (False, True)
        queue.send_many([b"a", b"b"])
        held = take(reopened(queue))
        assert one.receive() is None
        assert (one.held_up, one.next_look <= RECHECK) == (True, True)
        held.ack()
        assert one.receive() is not None
        assert one.held_up is False


def test_who_does_not_get_the_lock_looks_again_soon(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.05), max_backlog=1)
    queue.send(b"a")
    with queue.subscribe() as one:
        take(queue).nack()  # there is a lock file from now on
        with open(base(queue) / ".dropq" / "lock") as stranger:
            fcntl.flock(stranger, fcntl.LOCK_EX)
            assert one.receive() is None
            assert (one.held_up, one.next_look <= RECHECK) == (True, True)
        assert one.receive() is not None


def test_a_file_system_without_locks_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    queue = make_queue(tmp_path, max_backlog=1)
    monkeypatch.setattr("fcntl.flock", refused)
    with queue.subscribe() as one:
        assert [one.receive() for _ in range(3)] == [None] * 3
    assert caplog.text.count("limits and turns may be missed by a few") == 1


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
        assert (other.held_up, other.next_look <= TURN_RECHECK) == (True, True)
