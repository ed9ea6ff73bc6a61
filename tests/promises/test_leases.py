"""A lease gives a message to one holder for a while, and every message whose holder is gone comes back."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from forks import die_after
from helpers import FRESH, Clock, Make, make_queue, reopened, take, where

from dropq import ConfigError, LeaseLost, StorageError
from dropq.format.claims import Claim
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.timing import Timing
from dropq.storage.files import Storage


def test_a_late_ack_succeeds_while_nobody_took_the_claim(make: Make, clock: Clock) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    message = take(queue)
    clock.advance(100)
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_the_holder_acks_although_another_process_extended_its_lease(make: Make) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    message = take(queue)
    assert message.receipt is not None
    other = reopened(queue).claimed(message.receipt)
    other.extend("1h")
    assert message.body == b"a"
    message.ack()
    assert where(queue) == {"processed": [b"a"]}
    with pytest.raises(LeaseLost):
        other.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_an_old_receipt_still_names_the_claim(make: Make) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    message = take(queue)
    receipt = message.receipt
    assert receipt is not None
    message.extend("1h")
    reopened(queue).claimed(receipt).ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_sweep_that_saw_a_lease_lapse_leaves_it_when_its_holder_renews_it_in_time(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    message = take(queue)
    clock.advance(6)
    give_back = Claims.give_back

    def late(transitions: Claims, held: Claim, **options: Any) -> object:
        message.extend("60s")  # RACE: between the sweep's listing and its rename
        return give_back(transitions, held, **options)

    monkeypatch.setattr(Claims, "give_back", late)
    assert reopened(queue).sweep().lapsed == 0
    assert where(queue) == {"processing": [b"a"]}
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_two_sweeps_at_once_count_a_delivery_once(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    take(queue)
    clock.advance(6)
    give_back = Claims.give_back
    others: list[int] = []

    def after_another(transitions: Claims, held: Claim, **options: Any) -> object:
        monkeypatch.setattr(Claims, "give_back", give_back)
        others.append(reopened(queue).sweep().lapsed)
        return give_back(transitions, held, **options)

    monkeypatch.setattr(Claims, "give_back", after_another)
    assert queue.sweep().lapsed == 0
    assert others == [1]
    assert take(queue).delivery_count == 2


def test_a_detached_claim_outlives_its_subscription_and_needs_a_lease(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"a")
    with pytest.raises(ConfigError, match="lease"):
        queue.subscribe(detached=True)
    with queue.subscribe(detached=True, lease_period="60s") as subscription:
        message = subscription.receive()
    assert message is not None
    assert where(queue) == {"processing": [b"a"]}
    assert queue.sweep().total == 0
    assert message.receipt is not None
    queue.claimed(message.receipt).ack()
    assert where(queue) == {"processed": [b"a"]}


def test_closing_a_subscription_returns_what_it_holds_counted_as_a_delivery(make: Make) -> None:
    queue = make()
    queue.send_many([b"a", b"b", b"c"])
    with queue.subscribe(max_backlog=5) as subscription:
        held = subscription.receive_many(3)
        held[1].ack()
    assert where(queue) == {"target": [b"a", b"c"], "processed": [b"b"]}
    assert [message.delivery_count for message in queue.browse()] == [1, 1]
    assert os.listdir(queue.layout.consumers) == []


def test_what_a_subscription_could_not_return_when_it_closed_is_left_to_the_next_sweep(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])
    subscription = queue.subscribe(max_backlog=5)
    assert len(subscription.receive_many(2)) == 2
    rename_guarded = Storage.rename_guarded

    def refused(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "rename_guarded", rename_guarded)
        raise OSError(errno.EIO, "no", source)

    monkeypatch.setattr(Storage, "rename_guarded", refused)
    with pytest.raises(StorageError):
        subscription.close()
    assert where(queue) == {"processing": [b"a"], "target": [b"b"]}
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a", b"b"]}


def test_what_a_sweep_could_not_return_is_left_to_the_next_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])

    def claim() -> None:
        subscription = reopened(queue).subscribe(max_backlog=2)
        assert len(subscription.receive_many(2)) == 2

    die_after(claim)
    rename_guarded = Storage.rename_guarded

    def refused(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "rename_guarded", rename_guarded)
        raise OSError(errno.ENOSPC, "No space left on device", source)

    monkeypatch.setattr(Storage, "rename_guarded", refused)
    assert queue.sweep().dead == 1
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a", b"b"]}
    assert os.listdir(queue.layout.consumers) == []


@pytest.mark.parametrize("semantics", ["at-least-once", "at-most-once"])
def test_an_interrupt_between_a_claim_and_its_hand_out_leaves_no_message_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch, semantics: str
) -> None:
    queue = make(semantics=semantics)
    queue.send(b"a")
    claim = Claims.claim

    def interrupted(transitions: Claims, *args: Any) -> Claim | None:
        claim(transitions, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Claims, "claim", interrupted)
        with pytest.raises(KeyboardInterrupt), queue.subscribe() as subscription:
            subscription.receive()
    assert where(queue) == {"target": [b"a"]}
    assert take(queue).delivery_count == 1


def test_a_lost_lease_frees_its_place_in_the_backlog(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, lease_period="5s")
    queue.send_many([b"a", b"b"])
    with queue.subscribe() as subscription:
        assert subscription.receive() is not None
        assert subscription.receive() is None
        clock.advance(6)
        message = subscription.receive()
        assert message is not None


@pytest.mark.parametrize(("cap", "asked", "most"), [(None, 3, 3), (2, 3, 2), (3, 2, 2), (2, None, 2)])
def test_the_lower_of_cap_and_wish_is_what_a_subscription_may_hold(
    make: Make, cap: int | None, asked: int | None, most: int
) -> None:
    queue = make(**({} if cap is None else {"max_per_subscription_backlog": cap}))
    queue.send_many([b"x"] * 5)
    with queue.subscribe(max_backlog=asked) as one, queue.subscribe(max_backlog=asked) as other:
        taken = [one.receive() for _ in range(5)]
        assert sum(message is not None for message in taken) == most
        assert other.receive() is not None, "the other has a backlog of its own"
        first = taken[0]
        assert first is not None
        first.ack()
        assert one.receive() is not None


def test_a_delivery_whose_lease_ran_out_counts_when_its_subscription_closes(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", timing=Timing(sweep_interval=3600), redelivery_delay=0)
    queue.send("a")
    with queue.subscribe(lease_period=0.05) as subscription:
        assert subscription.receive() is not None
        time.sleep(0.1)  # and nobody sweeps meanwhile
        assert subscription.receive() is None and subscription.held == ()
    (waiting,) = queue.browse()
    assert waiting.delivery_count == 1 and waiting.redelivered
