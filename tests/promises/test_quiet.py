"""While target/ stands empty, a consumer asks for its time alone; it misses nothing that comes all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import Clock, Make, base, drop, leave_claimed, make_queue, next_moment, open_files, reopened, take, where

from dropq import Queue, StorageError, Subscription
from dropq.lifecycle.decision import Decision
from dropq.policies import receive_policies
from dropq.policies.backlog import Backlog
from dropq.policies.lock import Lock
from dropq.queue import offers
from dropq.storage import reading
from dropq.storage.mounts import Mount
from dropq.storage.watch import LONG_PAUSE, LONGEST_PAUSE, MINUTE, PAUSE, Watch
from dropq.upkeep import steps


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a queue whose folders changed long ago, by a clock that is a minute ahead."""
    monkeypatch.setattr(offers, "QUIET_AFTER", -1.0)
    clock = Clock()
    clock.advance(60)
    return partial(make_queue, tmp_path / "root", clock=clock)


@pytest.fixture
def queue(made: Make) -> Queue:
    """Such a queue, without options."""
    return made()


def advance(queue: Queue, seconds: float) -> None:
    """Let time pass by a queue's clock."""
    assert isinstance(queue.root.clock, Clock)
    queue.root.clock.advance(seconds)


@pytest.fixture
def quiet(queue: Queue) -> Iterator[Subscription]:
    """A consumer that has seen target/ empty."""
    next_moment(base(queue))
    with queue.subscribe() as subscription:
        for _ in range(3):
            attempt(subscription)
        assert subscription._offers.is_quiet
        yield subscription


def attempt(subscription: Subscription) -> bytes | None:
    """Try to receive with all that is due: the look that comes each 0.1 s, and the sweep of each second."""
    subscription._attend_at = subscription._sweep.again = 0.0
    message = subscription.receive()
    if message is None:
        return None
    message.ack()
    return b"taken"


def test_a_quiet_consumer_lists_nothing_and_opens_nothing(quiet: Subscription, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for call in ("open", "scandir", "listdir"):
            patch.setattr(os, call, lambda *_, **__: pytest.fail("it was called"))
        quiet._attend_at = quiet._sweep.again = 0.0
        assert quiet.receive() is None


@pytest.mark.parametrize("sends", ["send", "mv", "delay", "requeue", "return of the dead"])
def test_a_quiet_consumer_receives_what_comes(queue: Queue, quiet: Subscription, sends: str) -> None:
    other = reopened(queue)
    if sends == "send":
        other.send(b"body")
    elif sends == "mv":
        drop(other, "report.csv", b"body")
    elif sends == "delay":
        other.send(b"body", delay="5s")
        assert attempt(quiet) is None and quiet._offers.is_quiet
        advance(queue, 6)
    elif sends == "requeue":
        other.send(b"body")
        take(other).reject("no")
        for _ in range(3):
            attempt(quiet)
        assert quiet._offers.is_quiet
        other.requeue()
    else:
        other.send(b"body")
        leave_claimed(other)
    for _ in range(3):
        message = quiet.receive(timeout=5)
        if message is not None:
            break
        quiet._attend_at = quiet._sweep.again = 0.0
    assert message is not None and message.body == b"body"
    message.ack()
    assert where(queue) == {"processed": [b"body"]}


def test_a_consumer_of_a_paused_queue_is_not_quiet_and_goes_on_after_the_pause(
    queue: Queue, quiet: Subscription
) -> None:
    other = reopened(queue)
    other.pause()
    other.send(b"body")
    assert attempt(quiet) is None and not quiet._offers.is_quiet
    other.resume()
    quiet._attend_at = 0.0
    message = quiet.receive()
    assert message is not None and message.body == b"body"


def test_a_consumer_whose_sign_of_life_was_taken_away_makes_it_again_while_it_holds_a_message(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"body")
    with queue.subscribe(max_backlog=2) as subscription:
        held = subscription.receive()
        assert held is not None
        for _ in range(3):
            subscription._attend_at = 0.0
            assert subscription.receive() is None
        assert subscription._offers.is_quiet
        sign = Path(queue.layout.consumers) / subscription.id
        sign.unlink()
        subscription._attend_at = 0.0
        assert subscription.receive() is None
        assert sign.exists()


def test_behind_fuse_whose_folders_may_keep_their_times_nobody_is_quiet(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("fuse.sshfs"))
    monkeypatch.setattr(reading, "_kinds", {})
    with queue.subscribe() as subscription:
        for _ in range(3):
            attempt(subscription)
        assert not subscription._offers.is_quiet


def test_a_folder_that_changed_just_now_may_change_again_within_the_same_tick(tmp_path: Path) -> None:
    clock = Clock()
    standstill = reading.Standstill(str(tmp_path), clock=clock)
    standstill.begin()
    standstill.confirm()
    assert not standstill.lasts()
    clock.advance(10)
    standstill.begin()
    standstill.confirm()
    assert standstill.lasts()
    (tmp_path / "new").touch()
    assert not standstill.lasts()


def test_a_folder_that_is_missing_is_asked_for_by_the_one_above(tmp_path: Path) -> None:
    clock = Clock()
    clock.advance(10)
    standstill = reading.Standstill(f"{tmp_path}/folder", clock=clock)
    standstill.begin()
    standstill.confirm()
    assert standstill.lasts()
    next_moment(tmp_path.parent)
    (tmp_path / "folder").mkdir()
    assert not standstill.lasts()


def test_without_events_pauses_grow_with_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching, asked, now = Watch(str(tmp_path), poll=True), list[float](), [0.0]

    class Poller:
        def poll(self, ms: float) -> list[tuple[int, int]]:
            asked.append(ms / 1000)
            now[0] += ms / 1000
            return []

    monkeypatch.setattr(watching, "_poller", Poller)
    monkeypatch.setattr("dropq.storage.watch.time.monotonic", lambda: now[0])
    watching.begin()
    while now[0] < MINUTE + 5:
        watching.wait(100)
    assert asked == sorted(asked)
    assert {PAUSE, LONG_PAUSE, LONGEST_PAUSE} <= set(asked)
    assert sum(pause < LONG_PAUSE for pause in asked) < 40


def test_a_consumer_that_a_limit_keeps_back_takes_no_lock_until_something_leaves_processing(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = made(max_backlog=1)
    queue.send_many([b"held", b"waits"])
    held = take(reopened(queue))
    with queue.subscribe() as subscription:
        for _ in range(2):
            assert subscription.receive() is None
        with monkeypatch.context() as patch:
            patch.setattr(Lock, "acquire", lambda *_: pytest.fail("the lock was taken"))
            assert subscription.receive() is None
        next_moment(base(queue))
        held.ack()
        message = subscription.receive()
        assert message is not None and message.body == b"waits"


@pytest.mark.parametrize("options", [{"max_backlog": 3}, {"fairness_model": "round-robin"}])
def test_a_consumer_for_whom_nothing_waits_takes_no_policy_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    queue = make_queue(tmp_path / "root", **options)
    with queue.subscribe() as subscription:
        with monkeypatch.context() as patch:
            patch.setattr(Lock, "acquire", lambda *_: pytest.fail("the lock was taken"))
            assert subscription.receive() is None
        queue.send(b"body")
        message = subscription.receive(timeout=5)
        assert message is not None and message.body == b"body"


def test_the_lock_of_a_receive_many_is_taken_once_for_the_first_and_once_for_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", max_backlog=5)
    queue.send_many([str(number) for number in range(8)])
    taken = list[object]()
    acquire = Lock.acquire

    def counted(lock: Lock, before_waiting: Callable[[], None]) -> AbstractContextManager[bool]:
        taken.append(lock)
        return acquire(lock, before_waiting)

    with queue.subscribe(max_backlog=None) as subscription, monkeypatch.context() as patch:
        patch.setattr(Lock, "acquire", counted)
        found = subscription.receive_many(4)
        assert ([message.text for message in found], len(taken)) == (["0", "1", "2", "3"], 2)
        found += subscription.receive_many(4)
        assert [message.text for message in found] == ["0", "1", "2", "3", "4"]
        subscription.ack_many(found)
        assert [message.text for message in subscription.receive_many(8)] == ["5", "6", "7"]


def test_what_was_claimed_ahead_for_a_receive_many_that_ended_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", max_backlog=5)
    queue.send_many([b"1", b"2", b"3"])
    with queue.subscribe(max_backlog=None) as subscription:
        given_up = iter([True])
        (message,) = subscription._receive_many(3, 0, lambda: next(given_up, True))
        assert message.body == b"1"
        assert where(queue) == {"processing": [b"1"], "target": [b"2", b"3"]}
        assert [each.delivery_count for each in subscription.receive_many(2)] == [1, 1]


@pytest.mark.parametrize("folder", ["target", "processing"])
def test_a_state_folder_that_is_a_link_is_looked_at_behind_the_link(tmp_path: Path, made: Make, folder: str) -> None:
    queue = made(max_backlog=1)
    there = tmp_path / "elsewhere"
    (base(queue) / folder).rename(there)
    (base(queue) / folder).symlink_to(there)
    queue = reopened(queue)
    queue.send_many([b"first", b"second"])
    held = take(reopened(queue))
    with queue.subscribe() as subscription:
        for _ in range(3):
            assert attempt(subscription) is None
        next_moment(tmp_path)
        held.ack()
        message = subscription.receive()
        assert message is not None and message.body == b"second"
        message.ack()
        for _ in range(3):
            assert attempt(subscription) is None
        next_moment(tmp_path)
        queue.send(b"third")
        subscription._attend_at = 0.0
        message = subscription.receive()
        assert message is not None and message.body == b"third"


def test_a_listing_that_failed_leaves_nobody_quiet(
    queue: Queue, quiet: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = reading.listing

    def failing(folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        if folder == queue.layout.target:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), folder)
        return listing(folder)

    queue.send(b"body")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "listing", failing)
        for _ in range(2):
            with pytest.raises(StorageError):
                attempt(quiet)
    assert attempt(quiet) == b"taken"


def test_a_sweep_that_failed_rests_not(queue: Queue, quiet: Subscription, monkeypatch: pytest.MonkeyPatch) -> None:
    reopened(queue).send(b"body", delay="5s")

    def failing(context: object) -> Iterator[object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(steps, "claims_in", failing)
        assert attempt(quiet) is None
    advance(queue, 6)
    message = quiet.receive(timeout=10)
    assert message is not None and message.body == b"body"


def test_nothing_is_kept_back_once_what_a_limit_kept_back_has_left_target(tmp_path: Path, made: Make) -> None:
    queue = made(max_backlog=1)
    queue.send_many([b"held", b"waits"])
    held = take(reopened(queue))
    with queue.subscribe() as subscription:
        for _ in range(3):
            assert attempt(subscription) is None
        assert subscription._is_kept_back
        (waiting,) = (base(queue) / "target").iterdir()
        next_moment(tmp_path)
        waiting.rename(tmp_path / "away")
        for _ in range(4):
            assert attempt(subscription) is None
        held.ack()
        for _ in range(4):
            assert attempt(subscription) is None
        assert subscription._offers.is_quiet and not subscription._is_kept_back


def test_what_waits_behind_a_limit_still_expires(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_policies, "RESCAN", -1.0)
    queue = made(max_backlog=1)
    queue.send(b"held")
    queue.send(b"late", expires_in="5s")
    held = take(reopened(queue))
    with queue.subscribe() as subscription:
        for _ in range(3):
            assert attempt(subscription) is None
        advance(queue, 6)
        attempt(subscription)
        assert where(queue) == {"processing": [b"held"], "expired": [b"late"]}
    held.ack()


@pytest.mark.parametrize("detached", [True, False])
def test_a_closed_subscription_of_a_queue_with_a_limit_keeps_no_file_open(tmp_path: Path, detached: bool) -> None:
    queue = make_queue(tmp_path / "root", max_backlog=2, lease_period="1h")
    queue.send(b"body")
    before = open_files()
    subscription = queue.subscribe(detached=detached)
    message = subscription.receive()
    assert message is not None
    message.ack()
    subscription.close()
    assert open_files() == before


def test_an_error_as_more_is_claimed_ahead_leaves_the_caller_what_was_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", max_backlog=5)
    queue.send_many([b"1", b"2", b"3"])
    with queue.subscribe(max_backlog=None) as subscription:
        with monkeypatch.context() as patch:
            patch.setattr(Backlog, "decide", failing_after(1))
            found = subscription.receive_many(3)
        assert [message.body for message in found] == [b"1", b"2"]
        assert where(queue) == {"processing": [b"1", b"2"], "target": [b"3"]}


def failing_after(count: int) -> Callable[..., Decision]:
    """Return a decision that raises once it was asked for so many times for each hold of the lock."""
    asked, decide = iter(range(100)), Backlog.decide

    def failing(*some: Any) -> Decision:
        if next(asked) > count:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return decide(*some)

    return failing
