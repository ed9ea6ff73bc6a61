"""The life of a message: a test for each arrow of the life cycle, and a table of the arrows that there are not."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from helpers import (
    Clock,
    RecordingOs,
    always_fresh,
    base,
    drop,
    files,
    make_queue,
    names_in,
    reopened,
    stand_in_for_os,
    take,
    until,
    where,
)

from dropq import (
    ConfigError,
    DropqError,
    InvalidFilter,
    LeaseLost,
    Message,
    NoSuchMessage,
    NoSuchQueue,
    Queue,
    QueueExists,
    Root,
    Sent,
    StorageError,
    Typed,
)
from dropq.format import names
from dropq.format.claims import Claim
from dropq.lifecycle.sidecars import collect
from dropq.lifecycle.transitions import Transitions
from dropq.storage import system_calls
from dropq.storage.files import Storage
from dropq.storage.mounts import Mount
from dropq.storage.reading import RESERVED_MODE
from dropq.upkeep import bulk

Make = Callable[..., Queue]


# -- the arrows, in the order of the life cycle --------------------------------------------------------------


def test_a_send_puts_the_body_into_target_and_leaves_nothing_in_working(make: Make) -> None:
    queue = make()
    sent = queue.send(b"a")
    assert where(queue) == {"target": [b"a"]}
    assert sent.accepted
    assert sent.delivered_to == "q"
    assert names_in(queue, "target") == [f"4.{sent.id}.B"]


def test_a_file_moved_into_target_is_a_message(make: Make) -> None:
    queue = make()
    drop(queue, "2024.report.csv", b"a")
    message = take(queue)
    assert (message.id, message.priority, message.message_class) == ("2024.report.csv", 4, "B")
    assert message.body == b"a"


def test_a_delayed_message_is_kept_out_of_target_until_its_time(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"a", delay="10s")
    assert where(queue) == {"delayed": [b"a"]}
    clock.advance(9.9)
    assert queue.receive() is None
    clock.advance(0.2)
    assert take(queue).body == b"a"
    assert where(queue) == {"processing": [b"a"]}


def test_a_delayed_message_is_delivered_by_any_sweep_under_the_name_it_was_sent_by(make: Make, clock: Clock) -> None:
    queue = make()
    sent = queue.send(b"a", delay=1)
    clock.advance(2)
    assert reopened(queue).sweep().delayed == 1
    assert names_in(queue, "target") == [f"4.{sent.id}.B"]


def test_a_claim_is_a_rename_that_says_who_until_when_and_how_often(make: Make, clock: Clock) -> None:
    queue = make(lease_period="30s")
    sent = queue.send(b"a")
    with queue.subscribe(client_id="billing") as subscription:
        message = subscription.receive()
        assert message is not None
        owner = message.owner
        assert owner is not None
        assert owner.startswith("billing-")
        assert len(owner) <= 36
        assert names_in(queue, "processing") == [f"{owner},{clock.ms + 30_000},1~4.{sent.id}.B"]
        assert message.receipt == names_in(queue, "processing")[0]
        assert message.path == str(base(queue) / "processing" / message.receipt)


def test_of_two_claimers_with_the_same_view_one_wins_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.lifecycle.view.MAX_AGE", 3600.0)  # both keep what they listed
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b", b"c"])
    with queue.subscribe(max_backlog=None) as one, queue.subscribe(max_backlog=None) as other:
        taken = [one.receive(), other.receive(), one.receive(), other.receive(), one.receive()]
        bodies = [message.body for message in taken if message]
    assert sorted(bodies) == [b"a", b"b", b"c"]
    assert taken[3:] == [None, None]


def test_an_ack_moves_to_processed_with_the_name_as_it_was_sent(make: Make) -> None:
    queue = make()
    sent = queue.send(b"a")
    message = take(queue)
    message.ack()
    assert where(queue) == {"processed": [b"a"]}
    assert names_in(queue, "processed") == [f"4.{sent.id}.B"]
    assert message.state == "processed"
    assert message.body == b"a"
    assert message.receipt is None


def test_an_ack_without_history_leaves_nothing_anywhere(make: Make) -> None:
    queue = make(history=False)
    queue.send(b"a")
    message = take(queue)
    message.ack()
    assert where(queue) == {}
    assert [path for path in base(queue).rglob("*") if path.is_file() and path.read_bytes() == b"a"] == []
    assert message.state == "removed"
    with pytest.raises(NoSuchMessage):
        _ = message.body


def test_a_nack_returns_it_with_a_delivery_and_a_cancel_counted(make: Make) -> None:
    queue = make()
    sent = queue.send(b"a")
    take(queue).nack()
    assert where(queue) == {"target": [b"a"]}
    assert names_in(queue, "target") == [f"4.{sent.id}.B.....JMSXDeliveryCountI=1&JMS_dropq_cancelsI=1"]
    again = take(queue)
    assert (again.delivery_count, again.cancels, again.redelivered) == (2, 1, True)
    assert again.receipt is not None
    assert ",0,2~" in again.receipt


def test_a_nack_with_a_delay_returns_it_later(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).nack(delay="5s")
    assert where(queue) == {"delayed": [b"a"]}
    assert queue.receive() is None
    clock.advance(5)
    message = take(queue)
    assert (message.delivery_count, message.cancels) == (2, 1)


def test_a_lease_that_ran_out_is_swept_back_with_a_delivery_and_no_cancel_counted(make: Make, clock: Clock) -> None:
    queue = make(lease_period="10s")
    queue.send(b"a")
    message = take(queue)
    clock.advance(9)
    assert reopened(queue).sweep().lapsed == 0
    clock.advance(2)
    assert reopened(queue).sweep().lapsed == 1
    assert where(queue) == {"target": [b"a"]}
    again = take(reopened(queue))
    assert (again.delivery_count, again.cancels) == (2, 0)
    assert message.held, "it does not know yet"


def test_what_a_dead_subscription_held_is_swept_back_with_a_delivery_and_no_cancel_counted(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    if (child := os.fork()) == 0:
        taken = reopened(queue).receive()
        os._exit(0 if taken is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert where(queue) == {"processing": [b"a"]}
    assert queue.sweep().dead == 1
    again = take(queue)
    assert (again.delivery_count, again.cancels) == (2, 0)
    assert os.listdir(queue.layout.consumers) == [again.owner.rpartition("-")[0] if again.owner else ""]


def test_a_live_subscription_keeps_what_it_holds_through_every_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    clock.advance(1_000_000)
    assert reopened(queue).sweep(unleased_older_than=0).total == 0
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_extend_gives_the_claim_a_new_deadline_and_receipt(make: Make, clock: Clock) -> None:
    queue = make(lease_period="10s")
    queue.send(b"a")
    message = take(queue)
    receipt = message.receipt
    message.extend("60s")
    assert message.receipt != receipt
    assert message.deadline is not None
    assert int(message.deadline.timestamp() * 1000) == pytest.approx(clock.ms + 60_000, abs=1)
    clock.advance(59)
    assert queue.sweep().lapsed == 0
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_reject_moves_to_error_at_once_with_the_reason(make: Make) -> None:
    queue = make(redelivery_attempts=5)
    queue.send(b"a")
    message = take(queue)
    message.reject("no such order", exit_status=65)
    assert where(queue) == {"error": [b"a"]}
    (found,) = queue.browse("error")
    assert found.reason is not None
    assert found.reason["reason"] == "rejected"
    assert found.reason["detail"] == "no such order"
    assert found.reason["exit_status"] == 65
    assert found.delivery_count == 1


def test_a_failure_moves_to_error_when_the_attempts_are_used_up(make: Make) -> None:
    queue = make(redelivery_attempts=2)
    queue.send(b"a")
    for number in (1, 2):
        take(queue).fail("boom")
        assert where(queue) == {"target": [b"a"]}, f"after failure {number}"
    message = take(queue)
    assert (message.delivery_count, message.cancels) == (3, 0)
    message.fail("boom")
    assert where(queue) == {"error": [b"a"]}


def test_a_with_block_acks_or_fails_on_an_exception_with_its_traceback(make: Make) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])
    with take(queue) as message:
        assert message.body == b"a"
    with pytest.raises(ZeroDivisionError), take(queue):
        _ = 1 // 0
    assert where(queue) == {"processed": [b"a"], "error": [b"b"]}
    (found,) = queue.browse("error")
    assert found.reason is not None
    assert "ZeroDivisionError" in str(found.reason["traceback"])


def test_an_interrupt_in_a_with_block_gives_the_message_back(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    with pytest.raises(KeyboardInterrupt), take(queue):
        raise KeyboardInterrupt
    assert where(queue) == {"target": [b"a"]}


def test_its_owner_may_expire_it(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).expire()
    assert where(queue) == {"expired": [b"a"]}
    (found,) = queue.browse("expired")
    assert found.reason is not None
    assert found.reason["reason"] == "forced_expire"


def test_an_expired_message_is_not_delivered_but_moved_by_its_claimer(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"a", expires_in="5s")
    queue.send(b"b")
    clock.advance(6)
    assert take(queue).body == b"b"
    assert where(queue) == {"expired": [b"a"], "processing": [b"b"]}
    (found,) = queue.browse("expired")
    assert found.reason is not None
    assert found.reason["reason"] == "time_limit"


@pytest.mark.parametrize("claimed", [False, True])
def test_a_sweep_expires_what_waits_and_what_is_held(make: Make, clock: Clock, claimed: bool) -> None:
    queue = make()
    queue.send(b"a", expires_in="5s")
    message = take(queue) if claimed else None
    clock.advance(6)
    assert reopened(queue).sweep().expired == 1
    assert where(queue) == {"expired": [b"a"]}
    if message is not None:
        with pytest.raises(LeaseLost):
            message.ack()
        assert where(queue) == {"expired": [b"a"]}


@pytest.mark.parametrize("state", ["error", "expired", "processed", "processing"])
def test_requeue_resets_counters_expiration_and_the_queues_clock(make: Make, clock: Clock, state: str) -> None:
    queue = make(redelivery_attempts=9)
    sent = queue.send(b"a", expires_in="100s")
    take(queue).nack()
    message = take(queue)
    {"error": lambda: message.reject("r"), "expired": message.expire, "processed": message.ack}.get(state, lambda: 0)()
    assert where(queue) == {state: [b"a"]}
    clock.advance(500)
    (outcome,) = queue.requeue(state=state)
    assert outcome.ok
    assert names_in(queue, "target") == [f"4.{sent.id}.B.....JMS_dropq_sinceL={clock.ms}"]
    if state == "processing":
        with pytest.raises(LeaseLost):
            message.ack()
    again = take(reopened(queue))
    assert (again.delivery_count, again.cancels, again.expiration, again.id) == (1, 0, None, sent.id)


def test_requeue_with_keep_expiration_keeps_it(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"a", expires_in="100s")
    take(queue).reject("r")
    expiration = clock.ms + 100_000
    (outcome,) = bulk.requeue(queue.context, keep_expiration=True)
    assert outcome.ok
    (found,) = queue.browse()
    assert found.expiration is not None
    assert round(found.expiration.timestamp() * 1000) == expiration


@pytest.mark.parametrize("state", ["error", "expired", "processed"])
def test_mv_by_hand_into_target_is_a_requeue_that_keeps_the_counters(make: Make, state: str) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).nack()
    message = take(queue)
    {"error": lambda: message.reject("r"), "expired": message.expire, "processed": message.ack}[state]()
    (name,) = names_in(queue, state)
    os.rename(base(queue) / state / name, base(queue) / "target" / name)
    again = take(queue)
    assert again.body == b"a"
    assert again.delivery_count == 3


def test_a_message_that_is_requeued_to_another_queue_leaves_the_first(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    queue.send(b"a")
    take(queue).reject("r")
    assert [outcome.ok for outcome in bulk.requeue(queue.context, to=other.context)] == [True]
    assert (where(queue), where(other)) == ({}, {"target": [b"a"]})


def test_a_move_to_another_queue_keeps_counters_and_expiration(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    queue.send(b"a", expires_in="1h")
    take(queue).nack()
    (before,) = names_in(queue, "target")
    assert [outcome.ok for outcome in bulk.move(queue.context, other.context)] == [True]
    assert names_in(other, "target") == [before]


def test_a_move_to_a_queue_of_another_root_takes_the_spilled_metadata_along(make: Make) -> None:
    queue, other = make(), make()
    queue.send(b"a", properties={"long": "x" * 300})
    assert [outcome.ok for outcome in bulk.move(queue.context, other.context)] == [True]
    assert take(other).properties == {"long": "x" * 300}


def test_a_purge_removes_for_good(make: Make) -> None:
    queue = make()
    ids = [sent.id for sent in queue.send_many([b"a", b"b", b"c"])]
    outcomes = list(bulk.purge(queue.context, ids=[ids[1], "nothing"]))
    assert [outcome.ok for outcome in outcomes] == [True, False]
    assert where(queue) == {"target": [b"a", b"c"]}


def test_a_dry_run_changes_nothing(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    queue.send(b"a")
    take(queue).reject("r")
    before = where(queue)
    for verb in (bulk.requeue(queue.context, dry_run=True), bulk.purge(queue.context, state="error", dry_run=True)):
        assert [outcome.ok for outcome in verb] == [True]
    assert [outcome.ok for outcome in bulk.move(queue.context, other.context, state="error", dry_run=True)] == [True]
    assert where(queue) == before


# -- the arrows that there are not ---------------------------------------------------------------------------

SETTLED: dict[str, Callable[[Message], None]] = {
    "ack": lambda message: message.ack(),
    "nack": lambda message: message.nack(),
    "fail": lambda message: message.fail("f"),
    "reject": lambda message: message.reject("r"),
    "expire": lambda message: message.expire(),
    "release": lambda message: message.release(),
}
VERBS: dict[str, Callable[[Message], None]] = {**SETTLED, "extend": lambda message: message.extend(60)}


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("second", VERBS)
@pytest.mark.parametrize("first", SETTLED)
def test_a_settled_message_cannot_be_settled_again(make: Make, first: str, second: str, history: bool) -> None:
    queue = make(history=history)
    queue.send(b"a")
    message = take(queue)
    SETTLED[first](message)
    before = {state: names_in(queue, state) for state in where(queue)}
    with pytest.raises(LeaseLost):
        VERBS[second](message)
    assert {state: names_in(queue, state) for state in where(queue)} == before


@pytest.mark.parametrize("state", ["target", "processing", "processed", "error", "expired"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_browsed_message_cannot_be_settled(make: Make, state: str, verb: str) -> None:
    queue = make()
    queue.send(b"a")
    if state != "target":
        message = take(queue)
        {"error": lambda: message.reject("r"), "expired": message.expire, "processed": message.ack}.get(
            state, lambda: None
        )()
    (found,) = queue.browse(state)
    with pytest.raises(LeaseLost):
        VERBS[verb](found)
    assert where(queue) == {state: [b"a"]}


@pytest.mark.parametrize("verb", VERBS)
def test_a_message_whose_lease_was_lost_cannot_be_settled_nor_what_its_new_holder_has_be_touched(
    make: Make, clock: Clock, verb: str
) -> None:
    queue = make(lease_period="10s")
    queue.send(b"a")
    late = take(queue)
    clock.advance(11)
    other = reopened(queue)
    other.sweep()
    holder = take(other)
    before = names_in(queue, "processing")
    with pytest.raises(LeaseLost):
        VERBS[verb](late)
    assert names_in(queue, "processing") == before
    assert not late.held
    holder.ack()
    assert where(queue) == {"processed": [b"a"]}
    other.close()


def test_a_claimed_message_cannot_be_claimed(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue)
    assert reopened(queue).receive() is None
    assert queue.receive() is None


@pytest.mark.parametrize("state", ["target", "working", "delayed", "nowhere"])
def test_requeue_is_refused_from_where_nothing_is_to_be_brought_back(make: Make, state: str) -> None:
    queue = make()
    queue.send(b"a")
    with pytest.raises(ValueError, match="requeued from"):
        queue.requeue(state=state)
    assert where(queue) == {"target": [b"a"]}


def test_a_closed_subscription_hands_out_nothing(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    subscription = queue.subscribe()
    subscription.close()
    subscription.close()
    with pytest.raises(DropqError, match="closed"):
        subscription.receive()
    assert where(queue) == {"target": [b"a"]}


def test_more_than_the_backlog_is_not_to_be_asked_for(make: Make) -> None:
    queue = make()
    queue.send_many([b"a", b"b", b"c"])
    with queue.subscribe(max_backlog=2) as subscription:
        for n in (0, -1, 3):
            with pytest.raises(ValueError):
                subscription.receive_many(n)
        assert len(subscription.receive_many(2)) == 2
        assert subscription.receive() is None, "it holds as many as it may"


# -- order ---------------------------------------------------------------------------------------------------


def drained(queue: Queue) -> list[bytes]:
    with queue.subscribe(max_backlog=None) as subscription:
        bodies = []
        while (message := subscription.receive()) is not None:
            bodies.append(message.body)
            message.ack()
    return bodies


def test_order_is_priority_then_time_then_name(make: Make, clock: Clock) -> None:
    queue = make()
    for number, priority in enumerate([4, 9, 4, 0, -7, 9, 12, 4]):
        queue.send(f"{priority}/{number}".encode(), priority=priority)
        clock.advance(0.01)
    assert drained(queue) == [b"12/6", b"9/1", b"9/5", b"4/0", b"4/2", b"4/7", b"0/3", b"-7/4"]


def test_messages_of_one_millisecond_keep_their_sequence(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path, clock=clock)
    sent = [f"{number:04d}".encode() for number in range(1500)]
    queue.send_many(sent)
    assert drained(queue) == sent


def test_foreign_and_coded_messages_of_one_priority_come_by_their_time(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)  # by the real clock, which is that of ctime
    for number in range(6):
        body = str(number).encode()
        if number % 2:
            drop(queue, f"{9 - number}.csv", body)
        else:
            queue.send(body)
        _next_moment(tmp_path)
    queue.send(b"urgent", priority=5)
    assert drained(queue) == [b"urgent", b"0", b"1", b"2", b"3", b"4", b"5"]


def test_foreign_files_jump_no_queue_whatever_number_their_name_begins_with(make: Make) -> None:
    queue = make()
    queue.send(b"first")
    drop(queue, "20241105.csv", b"second")
    drop(queue, "9.report.csv", b"third")
    queue.send(b"urgent", priority=5)
    assert drained(queue)[0] == b"urgent"


def test_a_returned_message_keeps_its_place(make: Make, clock: Clock) -> None:
    queue = make()
    for body in (b"a", b"b", b"c"):
        queue.send(body)
        clock.advance(1)
    take(queue).nack()
    assert drained(queue) == [b"a", b"b", b"c"]


def test_a_returned_foreign_file_keeps_its_place(make: Make) -> None:
    queue = make()
    for name in ("b.csv", "a.csv", "c.csv"):
        drop(queue, name, name.encode())
        _next_moment(base(queue))
    take(queue).nack()
    assert drained(queue) == [b"b.csv", b"a.csv", b"c.csv"]


def _next_moment(folder: Path) -> None:
    """Wait until what is done next has a later ctime, and a later id, than what was done."""
    probe = folder / ".probe"

    def now() -> int:
        probe.touch()
        return probe.stat().st_ctime_ns

    moment = now()
    until(lambda: now() > moment + 10_000_000, "the file system's clock")


def test_an_urgent_newcomer_is_seen_though_a_listing_is_at_hand(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"x"] * 50)
    with queue.subscribe() as subscription:
        first = subscription.receive()
        assert first is not None
        first.ack()
        queue.send(b"urgent", priority=9)

        def urgent() -> bool:
            message = subscription.receive()
            assert message is not None
            message.ack()
            return message.body == b"urgent"

        until(lambda: _after_a_moment(urgent), "the urgent message")
        assert where(queue).get("target"), "it did not wait for the end of the queue"


def _after_a_moment(look: Callable[[], bool]) -> bool:
    threading.Event().wait(0.03)
    return look()


# -- delays and backoff --------------------------------------------------------------------------------------


def test_redelivery_waits_longer_each_time(make: Make, clock: Clock) -> None:
    queue = make(redelivery_delay="1s", redelivery_backoff=3.0, redelivery_attempts=9)
    queue.send(b"a")
    for seconds in (1, 3, 9, 27):
        take(queue).fail("again")
        assert where(queue) == {"delayed": [b"a"]}
        clock.advance(seconds - 0.01)
        assert queue.receive() is None
        clock.advance(0.02)
    assert take(queue).delivery_count == 5


def test_without_a_word_on_it_what_comes_back_waits_a_second_then_twice_as_long_up_to_a_minute(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_fresh(monkeypatch)
    queue = Root.create(tmp_path, clock=clock).create_queue("q", durability="none", lease_period="5s")
    queue.send(b"a")
    with queue.subscribe() as subscription:
        for give_back, seconds in ((Message.nack, 1), (Message.nack, 2), (Message.nack, 4)):
            message = subscription.receive()
            assert message is not None
            give_back(message)
            assert due_in(queue, clock) == seconds
            clock.advance(seconds)
        for seconds in (8, 16, 32, 60, 60):
            assert subscription.receive() is not None
            clock.advance(6)
            assert queue.sweep().lapsed == 1
            assert due_in(queue, clock) == seconds
            clock.advance(seconds)


def test_a_failure_with_attempts_left_waits_too_and_an_explicit_0s_means_at_once(tmp_path: Path, clock: Clock) -> None:
    root = Root.create(tmp_path, clock=clock)
    patient = root.create_queue("patient", durability="none", redelivery_attempts=1)
    hasty = root.create_queue("hasty", durability="none", redelivery_attempts=1, redelivery_delay="0s")
    for queue in (patient, hasty):
        queue.send(b"a")
        take(queue).fail("not now")
    assert where(patient) == {"delayed": [b"a"]}
    assert where(hasty) == {"target": [b"a"]}


def test_a_redelivery_delay_beyond_the_limit_stays_as_it_is_and_does_not_grow(make: Make, clock: Clock) -> None:
    queue = make(redelivery_delay="10m")
    queue.send(b"a")
    for _ in range(2):
        take(queue).nack()
        assert due_in(queue, clock) == 600
        clock.advance(600)


def due_in(queue: Queue, clock: Clock) -> float:
    """In how many seconds the one delayed message is due."""
    (message,) = queue.browse("delayed")
    assert message.not_before is not None
    return round(message.not_before.timestamp() - clock.now_ms() / 1000, 3)


def test_redelivery_delay_applies_to_nacks_and_lost_leases_and_a_nacks_own_delay_wins(make: Make, clock: Clock) -> None:
    queue = make(redelivery_delay="10s", redelivery_backoff=1, lease_period="5s")
    queue.send(b"a")
    take(queue).nack(delay=0)
    assert where(queue) == {"target": [b"a"]}
    take(queue).nack()
    assert where(queue) == {"delayed": [b"a"]}
    clock.advance(11)
    take(queue)
    clock.advance(6)
    assert queue.sweep().lapsed == 1
    assert where(queue) == {"delayed": [b"a"]}


def test_a_huge_backoff_ends_in_a_long_delay_and_no_error(make: Make, clock: Clock) -> None:
    never = {"redelivery_backoff": 1000.0, "redelivery_delay_limit": "36500d", "redelivery_attempts": 2**31 - 1}
    queue = make(redelivery_delay="1d", **never)
    drop(queue, "4.x.B.....JMSXDeliveryCountI=2000000", b"a")
    take(queue).fail("again")
    assert where(queue) == {"delayed": [b"a"]}
    queue.sweep()
    assert where(queue) == {"delayed": [b"a"]}


@pytest.mark.parametrize("exhausted", ["error", "expired"])
def test_max_deliveries_ends_it_however_it_comes_back(make: Make, clock: Clock, exhausted: str) -> None:
    queue = make(max_deliveries=3, lease_period="5s", exhausted=exhausted, redelivery_attempts=99)
    queue.send(b"a")
    take(queue).fail("f")
    take(queue).nack()
    take(queue)
    clock.advance(6)
    reopened(queue).sweep()
    assert where(queue) == {exhausted: [b"a"]}
    (found,) = queue.browse(exhausted)
    assert found.reason is not None
    assert found.reason["reason"] == "max_deliveries"
    assert found.delivery_count == 3


@pytest.mark.parametrize("exhausted", ["error", "expired"])
def test_max_cancels_counts_only_what_was_given_back_of_free_will(make: Make, clock: Clock, exhausted: str) -> None:
    queue = make(max_cancels=2, lease_period="5s", exhausted=exhausted, redelivery_attempts=99)
    queue.send(b"a")
    take(queue).nack()
    take(queue).fail("f")
    take(queue).release()
    take(queue)
    clock.advance(6)
    queue.sweep()
    assert where(queue) == {"target": [b"a"]}
    take(queue).nack()
    assert where(queue) == {exhausted: [b"a"]}
    (found,) = queue.browse(exhausted)
    assert found.reason is not None
    assert found.reason["reason"] == "max_cancels"


def test_a_release_that_does_not_count_leaves_the_count_as_it_was(make: Make) -> None:
    queue = make(max_deliveries=2, redelivery_delay="1h")
    queue.send(b"a")
    for _ in range(5):
        take(queue).release(counted=False)
        assert where(queue) == {"target": [b"a"]}
    assert take(queue).delivery_count == 1


# -- leases --------------------------------------------------------------------------------------------------


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
    give_back = Transitions.give_back

    def late(transitions: Transitions, held: Claim, **options: Any) -> object:
        message.extend("60s")  # RACE: between the sweep's listing and its rename
        return give_back(transitions, held, **options)

    monkeypatch.setattr(Transitions, "give_back", late)
    assert reopened(queue).sweep().lapsed == 0
    assert where(queue) == {"processing": [b"a"]}
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_two_sweeps_at_once_count_a_delivery_once(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    take(queue)
    clock.advance(6)
    give_back = Transitions.give_back
    others: list[int] = []

    def after_another(transitions: Transitions, held: Claim, **options: Any) -> object:
        monkeypatch.setattr(Transitions, "give_back", give_back)
        others.append(reopened(queue).sweep().lapsed)
        return give_back(transitions, held, **options)

    monkeypatch.setattr(Transitions, "give_back", after_another)
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
    place = Storage.place

    def refused(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "place", place)
        raise OSError(errno.EIO, "no", source)

    monkeypatch.setattr(Storage, "place", refused)
    with pytest.raises(StorageError):
        subscription.close()
    assert where(queue) == {"processing": [b"a"], "target": [b"b"]}
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a", b"b"]}


def test_what_a_sweep_could_not_return_is_left_to_the_next_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])
    if (child := os.fork()) == 0:
        subscription = reopened(queue).subscribe(max_backlog=2)
        os._exit(0 if len(subscription.receive_many(2)) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    place = Storage.place

    def refused(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "place", place)
        raise OSError(errno.ENOSPC, "No space left on device", source)

    monkeypatch.setattr(Storage, "place", refused)
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
    claim = Transitions.claim

    def interrupted(transitions: Transitions, *args: Any) -> Claim | None:
        claim(transitions, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transitions, "claim", interrupted)
        with pytest.raises(KeyboardInterrupt), queue.subscribe() as subscription:
            subscription.receive()
    assert where(queue) == {"target": [b"a"]}
    assert take(queue).delivery_count == 1


def test_a_lost_lease_frees_its_place_in_the_backlog(make: Make, clock: Clock) -> None:
    queue = make(lease_period="5s")
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


def test_strict_leasing_lets_only_the_receipt_settle_and_sublet_lets_the_id(make: Make) -> None:
    strict, sublet = make(leasing="strict"), make(leasing="sublet")
    for queue in (strict, sublet):
        sent = queue.send(b"a")
        message = take(queue)
        other = reopened(queue)
        if queue is strict:
            with pytest.raises(LeaseLost):
                other.claimed(sent.id)
            assert not other.ack(sent.id)
            assert where(queue) == {"processing": [b"a"]}
            assert message.receipt is not None
            other.claimed(message.receipt).ack()
        else:
            assert other.ack(sent.id)
        assert where(queue) == {"processed": [b"a"]}
        assert not other.ack(sent.id)


def test_an_ack_by_id_takes_a_message_that_waits(make: Make) -> None:
    queue = make()
    ids = [sent.id for sent in queue.send_many([b"a", b"b"])]
    assert queue.ack(ids[1])
    assert where(queue) == {"target": [b"a"], "processed": [b"b"]}
    assert not queue.ack("nothing")


# -- expiration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "queues", "own", "lives"),
    [
        ("default", None, None, None),
        ("default", None, 10, 10),
        ("default", 20, None, 20),
        ("default", 20, 10, 10),
        ("default", 20, 30, 30),
        ("queue", None, None, None),
        ("queue", None, 10, None),
        ("queue", 20, None, 20),
        ("queue", 20, 10, 20),
        ("queue", 20, 30, 20),
        ("earliest", None, None, None),
        ("earliest", None, 10, 10),
        ("earliest", 20, None, 20),
        ("earliest", 20, 10, 10),
        ("earliest", 20, 30, 20),
        ("latest", None, None, None),
        ("latest", None, 10, None),
        ("latest", 20, None, 20),
        ("latest", 20, 10, 20),
        ("latest", 20, 30, 30),
    ],
)
def test_the_models_of_expiration(
    make: Make, clock: Clock, model: str, queues: int | None, own: int | None, lives: int | None
) -> None:
    queue = make(expiration_model=model, **({} if queues is None else {"expiration": queues}))
    queue.send(b"a", expires_in=own)
    if lives is None:
        clock.advance(10**6)
        assert queue.sweep().expired == 0
        assert take(queue).body == b"a"
        return
    clock.advance(lives - 1)
    assert queue.sweep().expired == 0
    message = take(queue)
    message.nack()
    clock.advance(2)
    assert queue.receive() is None
    assert where(queue) == {"expired": [b"a"]}


def test_a_foreign_file_lives_as_long_as_the_queue_says_from_when_it_came(make: Make, clock: Clock) -> None:
    queue = make(expiration="1h")
    drop(queue, "a.csv", b"a")
    clock.advance(3590)
    take(queue).nack()
    clock.advance(20)
    assert queue.receive() is None
    assert names_in(queue, "expired") == ["a.csv"]


def test_a_requeued_message_gets_the_queues_lifetime_anew(make: Make, clock: Clock) -> None:
    queue = make(expiration="1h")
    queue.send(b"a")
    clock.advance(3601)
    assert queue.receive() is None
    queue.requeue(state="expired")
    clock.advance(3599)
    take(queue).nack()
    clock.advance(2)
    assert queue.receive() is None
    assert where(queue) == {"expired": [b"a"]}


# -- semantics and history -----------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [True, False])
def test_at_most_once_settles_before_it_delivers(make: Make, history: bool) -> None:
    queue = make(semantics="at-most-once", history=history)
    queue.send(b"a")
    message = take(queue)
    assert where(queue) == ({"processed": [b"a"]} if history else {})
    assert message.body == b"a"
    assert (message.delivery_count, message.redelivered, message.held) == (1, False, False)
    message.ack()
    message.ack()
    for verb in ("nack", "fail", "reject", "expire", "extend"):
        with pytest.raises(LeaseLost):
            VERBS[verb](message)
    assert where(queue) == ({"processed": [b"a"]} if history else {})
    queue.close()
    queue.sweep()
    assert [path for path in base(queue).rglob("*") if path.is_file() and path.read_bytes() == b"a"] == (
        [Path(message.path)] if history else []
    )


def test_what_a_shell_command_received_at_most_once_without_a_history_can_be_read_for_a_day(
    make: Make, clock: Clock
) -> None:
    queue = make(semantics="at-most-once", history=False)
    queue.send(b"a")
    with queue.subscribe(detached=True, lease_period="60s") as subscription:
        message = subscription.receive()
    assert message is not None
    queue.sweep()
    assert message.body == b"a"
    clock.advance(90_000)
    queue.sweep()
    assert not os.path.exists(message.path)


@pytest.mark.parametrize("history", [True, False])
def test_an_at_most_once_message_swept_before_it_was_delivered_goes_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock, history: bool
) -> None:
    queue = make(semantics="at-most-once", history=history, lease_period="1s")
    queue.send(b"a")
    claim = Transitions.claim

    def slow(transitions: Transitions, *args: Any) -> Claim | None:
        monkeypatch.setattr(Transitions, "claim", claim)
        held = claim(transitions, *args)
        clock.advance(2)
        assert reopened(queue).sweep().lapsed == 1
        return held

    monkeypatch.setattr(Transitions, "claim", slow)
    assert queue.receive() is None
    assert where(queue) == {"target": [b"a"]}
    message = take(queue)
    assert message.body == b"a"
    assert message.delivery_count == 2
    assert sum(len(bodies) for bodies in where(queue).values()) == int(history)


@pytest.mark.parametrize("history", [True, False])
def test_a_with_block_around_an_at_most_once_message_never_brings_it_back(make: Make, history: bool) -> None:
    queue = make(semantics="at-most-once", history=history)
    queue.send(b"a")
    with pytest.raises(ZeroDivisionError), take(queue):
        _ = 1 // 0
    assert where(queue) == ({"processed": [b"a"]} if history else {})


def test_the_oldest_history_goes_first_and_none_early(make: Make) -> None:
    queue = make(max_history=2)
    for body in (b"a", b"b", b"c", b"d"):
        queue.send(body)
        take(queue).ack()
        _next_moment(base(queue))
    assert queue.sweep().pruned == 2
    assert where(queue) == {"processed": [b"c", b"d"]}
    assert queue.sweep().pruned == 0


def test_history_is_kept_for_its_age(make: Make, clock: Clock) -> None:
    queue = make(history_age="1h")
    queue.send(b"a")
    take(queue).ack()
    clock.advance(3590)
    assert queue.sweep().pruned == 0
    clock.advance(20)
    assert queue.sweep().pruned == 1
    assert where(queue) == {}


def test_retention_looks_at_processed_alone(make: Make, clock: Clock) -> None:
    queue = make(max_history=0, history_age="0s")
    queue.send_many([b"a", b"b", b"c"])
    take(queue).reject("r")
    take(queue).expire()
    clock.advance(10)
    assert queue.sweep().pruned == 0
    assert where(queue) == {"error": [b"a"], "expired": [b"b"], "target": [b"c"]}


# -- durability ----------------------------------------------------------------------------------------------

CALLS = ("fsync", "rename")


@pytest.mark.parametrize(
    ("durability", "send", "ack"),
    [
        (
            "full",
            ["fsync working/*", "rename working/* target/*", "fsync target", "fsync working"],
            ["rename processing/* processed/*", "fsync processed", "fsync processing"],
        ),
        ("file", ["fsync working/*", "rename working/* target/*"], ["rename processing/* processed/*"]),
        ("none", ["rename working/* target/*"], ["rename processing/* processed/*"]),
    ],
)
def test_the_order_of_syncs_and_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, send: list[str], ack: list[str]
) -> None:
    queue = make_queue(tmp_path, durability=durability)
    with queue.subscribe() as subscription:
        seen = RecordingOs().record(monkeypatch)
        queue.send(b"a")
        assert seen.briefly(CALLS, base(queue)) == send
        seen.calls.clear()
        message = subscription.receive()
        assert message is not None
        assert seen.briefly(CALLS, base(queue)) == ["rename target/* processing/*"], "claims are not synced"
        seen.calls.clear()
        message.ack()
        assert seen.briefly(CALLS, base(queue)) == ack


@pytest.mark.parametrize(
    ("settle", "calls"),
    [
        ("nack", ["rename processing/* target/*", "fsync target", "fsync processing"]),
        ("extend", ["rename processing/* processing/*"]),
    ],
)
def test_a_return_is_synced_at_full_and_an_extension_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settle: str, calls: list[str]
) -> None:
    queue = make_queue(tmp_path, durability="full", lease_period="1h")
    with queue.subscribe() as subscription:
        queue.send(b"a")
        message = subscription.receive()
        assert message is not None
        seen = RecordingOs().record(monkeypatch)
        VERBS[settle](message)
        assert seen.briefly(CALLS, base(queue)) == calls


def test_a_writer_a_file_and_a_delayed_message_are_synced_like_a_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    queue.send(b"makes the folder", delay=1)
    (tmp_path / "body").write_bytes(b"c")
    (tmp_path / "moved").write_bytes(b"d")
    order = ["fsync working/*", "rename working/* target/*", "fsync target", "fsync working"]
    seen = RecordingOs().record(monkeypatch)
    with queue.writer() as out:
        out.write(b"b")
    assert seen.briefly(CALLS, base(queue)) == order
    seen.calls.clear()
    queue.send_file(tmp_path / "body")
    assert seen.briefly(CALLS, base(queue)) == order
    seen.calls.clear()
    queue.send_file(tmp_path / "moved", move=True)
    assert seen.briefly(CALLS, base(queue))[1:] == order
    seen.calls.clear()
    queue.send(b"e", delay=1)
    assert seen.briefly(CALLS, base(queue)) == [line.replace("target", ".dropq/delayed") for line in order]


def test_send_many_syncs_folders_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    seen = RecordingOs().record(monkeypatch)
    queue.send_many([b"x"] * 5)
    calls = seen.briefly(CALLS, base(queue))
    assert calls == [*["fsync working/*"] * 5, *["rename working/* target/*"] * 5, "fsync target", "fsync working"]


def test_ack_many_syncs_folders_once_and_tells_whose_claims_were_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    queue.send_many([b"a", b"b", b"c"])
    with queue.subscribe(max_backlog=None) as subscription:
        messages = subscription.receive_many(3)
        os.rename(messages[1].path, base(queue) / "target" / messages[1].name)  # somebody returned it
        seen = RecordingOs().record(monkeypatch)
        assert subscription.ack_many(messages) == [messages[1]]
        assert seen.briefly(CALLS, base(queue)) == [
            *["rename processing/* processed/*"] * 2,
            "fsync processed",
            "fsync processing",
        ]
        assert subscription.held == ()
    assert where(queue) == {"target": [b"b"], "processed": [b"a", b"c"]}


@pytest.mark.parametrize("durability", ["none", "file", "full"])
def test_what_is_sent_by_the_hundred_is_synced_as_a_whole_before_the_first_of_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: True)
    queue = make_queue(tmp_path, durability=durability)
    seen = RecordingOs().record(monkeypatch)
    queue.send_many([b"x"] * 100)
    sends = ["rename working/* target/*"] * 100
    calls = {"none": sends, "file": ["syncfs working", *sends]}
    calls["full"] = [*calls["file"], "fsync target", "fsync working"]
    assert seen.briefly((*CALLS, "syncfs"), base(queue)) == calls[durability]


def test_where_a_file_system_cannot_be_synced_as_a_whole_each_message_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: False)
    queue = make_queue(tmp_path, durability="file")
    seen = RecordingOs().record(monkeypatch)
    queue.send_many([b"x"] * 100)
    assert seen.briefly(CALLS, base(queue)) == ["fsync working/*"] * 100 + ["rename working/* target/*"] * 100


def test_nothing_is_sent_of_what_could_not_be_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: True)
    monkeypatch.setattr(system_calls, "sync_whole", refused)
    queue = make_queue(tmp_path, durability="full")
    with pytest.raises(StorageError, match="the message was not sent"):
        queue.send_many([b"x"] * 100)
    assert where(queue) == {}


def test_an_interrupted_send_many_tells_of_what_is_in_target_and_of_nothing_else(tmp_path: Path) -> None:
    class Interrupted(list[Sent]):
        def append(self, one: Sent) -> None:
            if len(self) == 5:
                raise KeyboardInterrupt
            super().append(one)

    queue = make_queue(tmp_path)
    sent = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        queue.send_into(sent, [b"x"] * 10)
    assert sorted(one.id for one in sent) == sorted(message.id for message in queue.browse())
    assert "working" not in where(queue)


@pytest.mark.parametrize("move", [False, True])
def test_an_interrupt_before_the_rename_leaves_the_senders_file_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: bool
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    queue = make_queue(tmp_path / "root")
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(Transitions, "send", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        queue.send_file(tmp_path / "file", move=move)
    assert (tmp_path / "file").read_bytes() == b"x"
    assert where(queue) == {} and not hasattr(raised.value, "__notes__")


def test_an_interrupted_send_many_takes_away_also_what_was_just_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    opened, made = os.open, iter(range(10))

    def interrupted(path: str, flags: int, *args: Any, **options: Any) -> int:
        fd = opened(path, flags, *args, **options)
        if flags & os.O_EXCL and next(made) == 5:
            os.close(fd)
            raise KeyboardInterrupt
        return fd

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.send_many([b"x"] * 10)
    assert where(queue) == {}


@pytest.mark.parametrize(
    ("kind", "release", "can"),
    [
        ("ext4", "5.8.0", True),
        ("xfs", "6.1.0-13-amd64", True),
        ("ext4", "5.4.0", False),
        ("fuse.sshfs", "6.1.0", False),
    ],
)
def test_which_file_systems_are_synced_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, release: str, can: bool
) -> None:
    monkeypatch.setattr(system_calls, "mount_of", lambda path: Mount(kind))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", release, "", "")))
    assert system_calls.can_sync_whole("/anywhere") is can
    monkeypatch.setattr(system_calls, "mount_of", lambda path: Mount("fuse.other"))
    assert not system_calls.can_sync_whole("/anywhere")  # another one may be mounted there since


def test_a_sidecar_is_durable_before_the_name_that_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    seen = RecordingOs().record(monkeypatch)
    queue.send(b"a", properties={"long": "x" * 200})
    calls = seen.briefly(CALLS, tmp_path)
    assert calls[:3] == [
        "fsync .dropq/meta/*",
        "rename .dropq/meta/* .dropq/meta/*",
        "fsync .dropq/meta",
    ]
    assert calls[3:] == ["fsync q/working/*", "rename q/working/* q/target/*", "fsync q/target", "fsync q/working"]


def test_a_sync_error_after_the_rename_says_that_the_message_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")

    def failing(self: Storage, *folders: str) -> None:
        raise OSError(errno.EIO, "Input/output error", folders[0])

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "sync", failing)
        with pytest.raises(StorageError, match="do not send it again") as caught:
            queue.send(b"a")
    assert caught.value.errno == errno.EIO
    assert where(queue) == {"target": [b"a"]}


PLAIN_LOOP = """
import os, sys
from pathlib import Path
root, count, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
body = b"x" * 1024
if kind == "raw":
    for folder in ("working", "target", "processing", "processed"):
        (root / folder).mkdir(parents=True)
    os.chdir(root)
    for number in range(count):
        fd = os.open(f"working/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        os.write(fd, body)
        os.close(fd)
        os.rename(f"working/{number}", f"target/{number}")
    for number in sorted(os.listdir("target")):
        os.rename(f"target/{number}", f"processing/{number}")
        fd = os.open(f"processing/{number}", os.O_RDONLY)
        while os.read(fd, 65536):
            pass
        os.close(fd)
        os.rename(f"processing/{number}", f"processed/{number}")
else:
    from dropq import Root
    queue = Root.create(root).create_queue("q", durability="none")
    for number in range(count):
        queue.send(body)
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            assert message.body == body
            message.ack()
"""


@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_empty_filter_is_for_looking_only(make: Make, blank: str) -> None:
    queue = make()
    queue.send("a")
    assert len(list(queue.browse(filter=blank))) == 1
    with pytest.raises(InvalidFilter, match="would match every message"):
        queue.subscribe(filter=blank)
    assert where(queue) == {"target": [b"a"]}


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_plain_path_makes_no_system_call_that_the_raw_loop_does_not_make(tmp_path: Path) -> None:
    few, many = 100, 600
    raw = _calls_per_message(tmp_path / "raw", "raw", few, many)
    ours = _calls_per_message(tmp_path / "ours", "dropq", few, many)
    # What a listing or a second's sweep costs is shared by many messages; a call per message would show as 1.0.
    more = {name: count for name, count in ours.items() if count > raw.get(name, 0) + 0.25}
    assert not more, f"per message, raw loop: {raw}, dropq: {ours}"


def _calls_per_message(folder: Path, kind: str, few: int, many: int) -> dict[str, float]:
    counts = [_count_calls(folder.with_suffix(f".{n}"), kind, n) for n in (few, many)]
    grown = {name: (counts[1][name] - counts[0].get(name, 0)) / (many - few) for name in counts[1]}
    renames = grown.pop("rename", 0) + grown.pop("renameat", 0) + grown.pop("renameat2", 0)
    return {"rename": renames, **{name: count for name, count in grown.items() if count > 0.01}}


def _count_calls(root: Path, kind: str, count: int) -> dict[str, int]:
    table = root.with_suffix(f".{kind}.{count}.strace")
    command = ["strace", "-f", "-c", "-o", str(table), sys.executable, "-c", PLAIN_LOOP, str(root), str(count), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    counts = {}
    for line in table.read_text().splitlines()[2:]:
        columns = line.split()
        if len(columns) >= 5 and columns[3].isdigit() and columns[-1] != "total":
            counts[columns[-1]] = int(columns[3])
    return counts


# -- what is no message --------------------------------------------------------------------------------------


def test_what_is_no_message_is_passed_over(make: Make) -> None:
    queue = make()
    target = base(queue) / "target"
    for name in ("_SUCCESS", "x.tmp", "x.part", ".hidden", "part-0.crc"):
        (target / name).write_bytes(b"no message")
    (target / "_temporary").mkdir()
    (target / "4.dir.B").mkdir()
    (target / "4.link.B").symlink_to(target / "_SUCCESS")
    os.mkfifo(target / "4.fifo.B")
    (target / "4.empty.B").touch()
    message = take(queue)
    assert (message.id, message.body) == ("empty", b"")
    message.ack()
    assert queue.receive() is None
    assert queue.counts()["target"] == 0
    assert list(queue.browse()) == []
    queue.sweep()
    assert len(os.listdir(target)) == 9


@pytest.mark.parametrize("patterns", [["*.tmp"], ["wip-*", "*.swp"], ["a?", "_done"], ["*[ab]"], []])
def test_what_is_counted_is_what_is_browsed_whatever_is_ignored(make: Make, patterns: list[str]) -> None:
    queue = make(ignore=patterns)
    for name in ("x.tmp", "wip-1", "y.swp", "a1", "_done", "4.za", "tmp", ".hidden"):
        (base(queue) / "target" / name).write_bytes(b"x")
    assert queue.counts()["target"] == len(list(queue.browse()))


def test_ignore_is_configured(make: Make) -> None:
    queue = make(ignore=["*.swp", "wip-*"])
    for name in ("a.swp", "wip-b", "c.tmp"):
        drop(queue, name, name.encode())
    assert take(queue).body == b"c.tmp"
    assert queue.receive() is None


# -- modes and group -----------------------------------------------------------------------------------------


def _another_group() -> int:
    if os.geteuid() == 0:
        return 4711
    others = [group for group in os.getgroups() if group != os.getegid()]
    if not others:
        pytest.skip("this user is in one group alone")
    return others[0]


@pytest.mark.parametrize("where_said", ["queue.toml", "dropq.toml"])
def test_modes_and_group_of_what_is_created(tmp_path: Path, where_said: str) -> None:
    group = _another_group()
    said: dict[str, Any] = {"file_mode": "0640", "dir_mode": "2770", "group": group, "durability": "none"}
    root = Root.create(tmp_path)
    if where_said == "dropq.toml":
        (tmp_path / "dropq.toml").write_text(
            f'format = 1\n[defaults]\nfile_mode = "0640"\ndir_mode = "2770"\ngroup = {group}\ndurability = "none"\n'
        )
        root, said = Root(tmp_path), {}
    queue = root.create_queue("q", **said)
    queue.send(b"a", properties={"long": "x" * 300})
    queue.send(b"b", delay="1h")
    with queue.writer() as out:
        out.write(b"c")
    source = tmp_path / "source"
    source.write_bytes(b"d")
    source.chmod(0o600)
    queue.send_file(source, move=True)
    take(queue).reject("r")
    messages = [path for state in ("target", "error", ".dropq/delayed") for path in (base(queue) / state).iterdir()]
    assert len(messages) == 4
    for path in messages:
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, group), path
    for path in [base(queue), *base(queue).rglob("*")]:
        if path.is_dir():
            assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o2770, group), path
    queue.close()


# -- pause and resume ----------------------------------------------------------------------------------------


def test_a_paused_queue_looks_empty_and_takes_sends(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    queue.pause()
    assert (queue.paused, queue.receive()) == (True, None)
    queue.send(b"b")
    assert where(queue) == {"target": [b"a", b"b"]}
    assert len(list(queue.browse())) == 2
    queue.resume()
    queue.resume()
    assert not queue.paused
    assert take(queue).body == b"a"


def test_what_is_held_can_be_settled_while_paused(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    queue.pause()
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_the_roots_read_lock_holds_every_queue(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    for one in (queue, other):
        one.send(b"a")
    (Path(queue.root.path) / "global-read-lock").touch()
    assert queue.receive() is None
    assert other.receive() is None
    assert queue.paused
    os.unlink(Path(queue.root.path) / "global-read-lock")
    assert queue.receive() is not None
    assert other.receive() is not None
    other.close()


def test_a_pause_takes_hold_soon_however_much_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.lifecycle.view.LISTING_SHARE", 10_000_000)  # as if a million messages had been listed
    queue = make_queue(tmp_path)
    queue.send_many([b"x"] * 20)
    with queue.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is not None
        queue.pause()
        threading.Event().wait(0.25)
        assert subscription.receive() is None
        queue.resume()
        assert subscription.receive(5) is not None


# -- other ways to send --------------------------------------------------------------------------------------


def test_a_writer_sends_on_a_clean_exit_and_discards_on_an_exception(make: Make) -> None:
    queue = make()
    with queue.writer(type="order", priority=7) as out:
        out.write(b"one ")
        out.write(b"two")
        assert "target" not in where(queue)
    with pytest.raises(ZeroDivisionError), queue.writer() as out:
        _write_half(out)
    assert where(queue) == {"target": [b"one two"]}
    message = take(queue)
    assert (message.type, message.priority) == ("order", 7)


def _write_half(out: IO[bytes]) -> None:
    out.write(b"half")
    raise ZeroDivisionError


def test_a_full_disk_in_a_writer_sends_nothing_and_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="full")

    def full(self: Storage, fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Storage, "sync_file", full)
    with pytest.raises(StorageError, match="not sent"), queue.writer() as out:
        out.write(b"a")
    assert where(queue) == {}


def test_send_file_copies_or_moves(make: Make, tmp_path: Path) -> None:
    queue = make()
    source = tmp_path / "report.csv"
    source.write_bytes(b"a")
    queue.send_file(source)
    assert source.read_bytes() == b"a"
    queue.send_file(source, move=True, type="csv")
    assert not source.exists()
    assert where(queue) == {"target": [b"a", b"a"]}


@pytest.mark.parametrize("kind", ["missing", "folder", "link to nothing"])
@pytest.mark.parametrize("move", [False, True])
def test_send_file_of_what_is_no_file_sends_nothing(make: Make, tmp_path: Path, kind: str, move: bool) -> None:
    queue = make()
    source = tmp_path / "source"
    if kind == "folder":
        source.mkdir()
    elif kind != "missing":
        source.symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"nothing was sent|was not sent"):
        queue.send_file(source, move=move)
    assert where(queue) == {}
    assert kind == "missing" or source.is_symlink() or source.is_dir()


@pytest.mark.parametrize("refused", ["_own", "sync_file"])
def test_a_file_that_could_not_be_adopted_is_sent_all_the_same_or_stays(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"a")

    def failing(*args: object) -> None:
        monkeypatch.undo()
        raise PermissionError(errno.EPERM, "not its owner", "")

    monkeypatch.setattr(Storage, refused, failing)
    queue.send_file(source, move=True)
    assert where(queue) == {"target": [b"a"]}
    assert not source.exists()


def test_a_moved_file_is_back_in_its_place_when_the_send_fails(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"a")
    rename = Storage.rename

    def refused(self: Storage, old: str, new: str) -> None:
        if "/target/" in new:
            raise PermissionError(errno.EACCES, "no", old)
        rename(self, old, new)

    monkeypatch.setattr(Storage, "rename", refused)
    with pytest.raises(StorageError, match="not sent"):
        queue.send_file(source, move=True)
    assert where(queue) == {}
    assert source.read_bytes() == b"a"


def test_send_many_takes_bodies_and_mappings(make: Make) -> None:
    queue = make()
    sent = queue.send_many([b"a", "b", {"body": "c", "priority": 9, "delay": "1h"}])
    assert len({one.id for one in sent}) == 3
    assert where(queue) == {"target": [b"a", b"b"], "delayed": [b"c"]}


@pytest.mark.parametrize("bad", [{"body": b"x", "priority": 2**31}, {"body": b"x", "properties": {"JMSx": 1}}, 7])
def test_a_bad_message_among_many_sends_none_of_its_batch(make: Make, bad: Any) -> None:
    queue = make()
    with pytest.raises((ValueError, TypeError)):
        queue.send_many([b"a", b"b", bad, b"c"])
    assert where(queue) == {}


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_send_many_cut_short_says_how_many_were_sent_and_leaves_no_halves(
    make: Make, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    queue = make()
    calls = iter(range(1, 100))
    write_new, rename = Storage.write_new, Storage.rename

    def failing_write(self: Storage, path: str, data: bytes | memoryview, *, synced: bool = True) -> None:
        if next(calls) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write_new(self, path, data, synced=synced)

    def failing_rename(self: Storage, source: str, destination: str) -> None:
        if next(calls) == fails_at:
            raise OSError(errno.EIO, "Input/output error", source)
        rename(self, source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_new", failing_write)
        patch.setattr(Storage, "rename", failing_rename)
        with pytest.raises(StorageError) as caught:
            queue.send_many([b"1", b"2", b"3", b"4"])
    sent = max(fails_at - 5, 0)
    assert caught.value.__notes__ == [f"{sent} messages of this send_many were sent before the error"]
    assert where(queue) == ({"target": [b"1", b"2", b"3"][:sent]} if sent else {})


def test_two_sends_with_one_id_of_the_senders_own_are_two_messages(make: Make) -> None:
    queue = make()
    for id in ("order-1", "1700000000000000-0000000001"):
        queue.send(b"a" + id.encode(), message_id=id)
        queue.send(b"b" + id.encode(), message_id=id)
        queue.send_many([{"body": b"c" + id.encode(), "message_id": id}] * 2)
        with queue.writer(message_id=id) as out:
            out.write(b"d" + id.encode())
    assert len(where(queue)["target"]) == 10
    with queue.subscribe(max_backlog=None) as subscription:
        for settle in ("nack", "release", "reject"):
            taken = subscription.receive_many(20)
            assert len(taken) == 10
            for message in taken:
                VERBS[settle](message)
    assert len(where(queue)["error"]) == 10
    assert {message.id for message in queue.browse("error")} == {"order-1", "1700000000000000-0000000001"}


def test_a_text_is_sent_as_utf_8_and_class_t(make: Make) -> None:
    queue = make()
    queue.send("größe")
    message = take(queue)
    assert (message.text, message.body, message.message_class) == ("größe", "größe".encode(), "T")


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 2**31},
        {"message_class": "X"},
        {"message_id": ""},
        {"message_id": "x" * 101},
        {"message_id": "a\0b"},
        {"type": "\ud800"},
        {"properties": {"JMSXDeliveryCount": 1}},
        {"properties": {"or": 1}},
        {"properties": {"a b": 1}},
        {"properties": {"n": 2**63}},
        {"properties": {"n": None}},
        {"expires_in": -1},
        {"delay": "soon"},
    ],
)
def test_what_no_name_can_hold_is_refused_and_nothing_is_sent(make: Make, fields: dict[str, Any]) -> None:
    queue = make()
    with pytest.raises(ValueError):
        queue.send(b"a", **fields)
    assert where(queue) == {}


# -- names over their budget ---------------------------------------------------------------------------------

LONG: dict[str, Any] = {
    "correlation_id": "c" * 80,
    "reply_to": "answers",
    "type": "order.placed",
    "properties": {"text": "ä.~&=" * 30, "count": Typed("H", 5), "ok": True, "ratio": 1.5},
}


def assert_long(message: Message) -> None:
    assert message.correlation_id == LONG["correlation_id"]
    assert message.reply_to == "answers"
    assert message.type == "order.placed"
    assert message.properties == {"text": "ä.~&=" * 30, "count": 5, "ok": True, "ratio": 1.5}
    assert len(os.fsencode(message.file)) <= 255


def test_metadata_over_the_budget_spills_and_comes_back_through_every_transition(make: Make, clock: Clock) -> None:
    queue = make(lease_period="5s", redelivery_attempts=99)
    queue.send(b"a", message_id="i" * 60, **LONG)
    (name,) = names_in(queue, "target")
    assert len(name) <= names.NAME_BUDGET

    def taken() -> Message:
        message = take(queue)
        assert_long(message)
        assert message.id == "i" * 60
        return message

    taken().ack()
    for state in ("processed", "error", "expired"):
        (found,) = queue.browse(state)
        assert_long(found)
        queue.requeue(state=state)
        taken().nack()
        taken().nack(delay=3)
        clock.advance(4)
        taken().fail("f")
        lost = taken()
        lost.extend("7s")
        clock.advance(8)
        queue.sweep()
        taken().release(counted=False)
        if state == "processed":
            taken().reject("r")
        elif state == "error":
            taken().expire()
    message = taken()
    assert message.delivery_count == 5
    message.ack()
    (found,) = queue.browse("processed")
    assert_long(found)


def test_a_missing_sidecar_is_warned_of_and_the_message_delivered_without(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    queue.send(b"a", **LONG)
    shutil.rmtree(queue.root.layout.meta)
    with caplog.at_level(logging.WARNING, "dropq"):
        message = take(queue)
        assert message.properties == {}
    assert "sidecar" in caplog.text
    message.nack()
    take(queue).ack()
    assert where(queue) == {"processed": [b"a"]}


def test_sidecars_are_collected_when_nothing_referred_to_them_for_a_day_and_two_passes(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(history=False)
    queue.send(b"a", **LONG)
    queue.send(b"b", **LONG)
    root = queue.root
    take(queue).ack()
    for seconds, collected in ((0, 0), (90_000, 0), (1000, 0), (3000, 1), (10_000, 0)):
        clock.advance(seconds)
        assert root.sweep().sidecars == collected
    assert_long(take(queue))


def test_no_sidecar_is_collected_while_a_folder_cannot_be_listed(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"a", **LONG)
    scandir = os.scandir
    clock.advance(90_000)

    def refused(path: str) -> Any:
        if str(path).endswith("/target"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    with monkeypatch.context() as patch:
        for _ in range(3):
            clock.advance(90_000)
            patch.setattr(os, "scandir", refused)
            assert sum(collect(queue.root.layout.path, queue.root.layout.meta, Storage("none"), clock)) == 0
    assert_long(take(queue))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 7, "properties": [1]}', '{"properties": {"a": 1}}'])
def test_a_damaged_sidecar_loses_no_message(make: Make, content: str) -> None:
    queue = make()
    queue.send(b"a", **LONG)
    (sidecar,) = Path(queue.root.layout.meta).iterdir()
    sidecar.write_text(content)
    take(queue).nack()
    take(queue).reject("r")
    queue.requeue()
    take(queue).ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("name", ["ä" * 100, "x" * 255, "a" * 150 + ".csv", "t~" * 100, "p." * 90 + "csv"])
def test_a_long_foreign_name_is_given_back(make: Make, name: str) -> None:
    queue = make()
    drop(queue, name, b"a")
    message = take(queue)
    assert message.id == name
    message.nack()
    assert take(queue).id == name
    queue.close()
    take(reopened(queue)).reject("r")
    assert names_in(queue, "error") == [name]
    queue.requeue()
    other = reopened(queue)
    take(other).ack()
    assert names_in(queue, "processed") == [name]


def test_undecodable_names_are_messages_and_given_back(make: Make) -> None:
    queue = make()
    names_ = [b"\xff\xfe.csv", b"\xff" * 200]
    for name in names_:
        with open(os.fsencode(base(queue)) + b"/target/" + name, "wb") as out:
            out.write(name)
    for _ in names_:
        take(queue).nack()
    while (message := queue.receive()) is not None:
        message.ack()
    assert sorted(os.listdir(os.fsencode(queue.layout.processed))) == sorted(names_)


# -- DropboxMQ's layout --------------------------------------------------------------------------------------


def test_dropboxmqs_layout_is_opened_as_it_is(tmp_path: Path) -> None:
    for folder in ("working", "target", "processing", "processed", "expired", "error"):
        (tmp_path / "orders" / "incoming" / folder).mkdir(parents=True)
    queue = Root(tmp_path).queue("orders")
    assert queue.exists()
    queue.send(b"a")
    assert where(queue) == {"target": [b"a"]}
    assert sorted(os.listdir(tmp_path / "orders")) == ["incoming"]
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        message.reject("r")
    assert where(queue) == {"error": [b"a"]}
    assert [found.name for found in Root(tmp_path).queues()] == ["orders"]


def test_typed_replies_are_written_and_read_as_dropboxmq_does(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, dropboxmq=True)
    assert (tmp_path / "q" / "incoming" / "target").is_dir()
    assert (tmp_path / "dropboxmq" / "transaction" / "rolled-back").is_dir()
    for reply, written in (("estQueue1", "QestQueue1"), ("topic-root/prices", "Tprices"), ("Quotes", "QQuotes")):
        queue.send(b"a", reply_to=reply)
        (name,) = names_in(queue, "target")
        assert name.split(".")[5] == written
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None
            assert message.reply_to == reply
            message.nack()
            (name,) = names_in(queue, "target")
            assert name.split(".")[5] == written
            again = subscription.receive()
            assert again is not None
            again.ack()


def test_a_dropboxmq_clients_claim_is_swept_only_when_asked_for(make: Make, clock: Clock) -> None:
    queue = make(lease_period="5s")
    queue.send(b"a")
    (name,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / f"client7~{name}")
    clock.advance(10_000)
    assert queue.sweep(unleased_older_than=0).total == 0
    assert queue.sweep(foreign_older_than=20_000).total == 0
    assert queue.sweep(foreign_older_than=5_000).foreign == 1
    assert take(queue).delivery_count == 2


def test_a_scripts_claim_is_swept_only_when_asked_for(make: Make, clock: Clock) -> None:
    queue = make(lease_period="5s")
    drop(queue, "report.csv", b"a")
    os.rename(base(queue) / "target" / "report.csv", base(queue) / "processing" / "report.csv")
    clock.advance(10_000)
    assert queue.sweep(unleased_older_than=0).total == 0
    assert names_in(queue, "processing") == ["report.csv"]
    assert queue.sweep(foreign_older_than=5_000).foreign == 1
    message = take(queue)
    assert (message.id, message.delivery_count) == ("report.csv", 2)
    message.ack()
    assert names_in(queue, "processed") == ["report.csv"]


# -- claim prefixes left by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["target", "error", "processed"])
def test_a_claim_prefix_left_by_hand_is_dropped_by_the_next_claim_and_its_count_kept(make: Make, state: str) -> None:
    queue = make()
    sent = queue.send(b"a")
    message = take(queue)
    (claimed,) = names_in(queue, "processing")
    os.rename(base(queue) / "processing" / claimed, base(queue) / state / claimed)
    with pytest.raises(LeaseLost):
        message.ack()
    (found,) = queue.browse(state)
    assert found.id == sent.id
    if state != "target":
        os.rename(base(queue) / state / claimed, base(queue) / "target" / claimed)
    again = take(queue)
    assert (again.id, again.delivery_count) == (sent.id, 2)
    assert again.receipt is not None
    assert again.receipt.count("~") == 1
    again.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_claim_prefix_left_by_hand_is_dropped_by_a_requeue(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue)
    (claimed,) = names_in(queue, "processing")
    os.rename(base(queue) / "processing" / claimed, base(queue) / "error" / claimed)
    queue.requeue()
    assert all("~" not in name for name in names_in(queue, "target"))
    assert take(queue).delivery_count == 1


@pytest.mark.parametrize("name", ["report~2.csv", "a,b~c", "client~report.csv", "x-y,0,1~4.i.B"])
def test_any_other_tilde_or_comma_is_the_files_own(make: Make, name: str) -> None:
    queue = make()
    drop(queue, name, b"a")
    message = take(queue)
    assert message.id == name
    message.nack()
    take(queue).ack()
    assert names_in(queue, "processed") == [name]


# -- waiting -------------------------------------------------------------------------------------------------


def test_receive_waits_for_a_message_and_gives_up_in_time(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    with queue.subscribe() as subscription:
        assert subscription.receive(0.05) is None
        sender = threading.Timer(0.1, queue.send, [b"a"])
        sender.start()
        message = subscription.receive(10)
        sender.join()
        assert message is not None
        assert message.body == b"a"


def test_closing_wakes_whoever_waits(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    subscription = queue.subscribe()
    taken: list[object] = []
    waiter = threading.Thread(target=lambda: taken.extend(subscription))
    waiter.start()
    subscription.close()
    waiter.join(5)
    assert not waiter.is_alive()
    assert taken == []


def test_a_queue_that_vanishes_is_told_to_its_consumers_and_producers(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    subscription = queue.subscribe()
    queue.root.delete_queue("q", force=True)
    with pytest.raises(NoSuchQueue):
        subscription.receive()
    with pytest.raises(NoSuchQueue):
        queue.subscribe()
    with pytest.raises(NoSuchQueue):
        queue.send(b"b")
    with pytest.raises(NoSuchQueue):
        queue.send(b"b", delay=1)
    with pytest.raises(NoSuchQueue):
        queue.send_many([b"b"])
    with pytest.raises(NoSuchQueue), queue.writer() as out:
        out.write(b"b")
    subscription.close()
    assert not (Path(queue.root.path) / "q").exists(), "nothing of it is made anew"
    queue.root.create_queue("q")


@pytest.mark.parametrize("folder", ["processing", "processed", "error", "target"])
def test_a_folder_that_vanishes_is_told_and_loses_nothing(make: Make, folder: str) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])
    message = take(queue) if folder != "processing" else None
    os.rename(base(queue) / folder, base(queue) / ".elsewhere")
    act: Callable[[], object] = queue.receive
    if message is not None and folder != "target":
        act = message.ack if folder == "processed" else partial(message.reject, "r")
    with pytest.raises(DropqError) as caught:
        act()
    assert not isinstance(caught.value, LeaseLost)
    os.rename(base(queue) / ".elsewhere", base(queue) / folder)
    if message is not None:
        message.ack()
    assert sum(len(bodies) for bodies in where(queue).values()) == 2


# -- deleting a queue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["target", "processing", "delayed", "working"])
def test_a_queue_with_messages_to_work_on_is_not_deleted(make: Make, state: str) -> None:
    queue = make()
    if state == "working":
        (base(queue) / "working" / "draft").write_bytes(b"a")
    else:
        queue.send(b"a", delay=60 if state == "delayed" else None)
    if state == "processing":
        take(queue)
    with pytest.raises(StorageError, match="nothing was removed"):
        queue.root.delete_queue("q")
    assert where(queue) == {state: [b"a"]}
    queue.root.delete_queue("q", force=True)
    assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml"]


def test_a_queue_without_them_is_deleted_with_its_history(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).ack()
    queue.close()
    queue.root.delete_queue("q")
    assert queue.root.queues() == []
    with pytest.raises(NoSuchQueue):
        queue.root.delete_queue("q")


@pytest.mark.parametrize("delay", [None, 60])
def test_a_send_that_returned_as_the_queue_was_deleted_brings_it_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, delay: int | None
) -> None:
    queue = make()
    rename_folder = Storage.rename_folder

    def after_a_send(self: Storage, source: str, destination: str) -> None:
        queue.send(b"a", delay=delay)  # RACE: after the messages were counted
        rename_folder(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", after_a_send)
    with pytest.raises(StorageError, match="nothing was removed"):
        queue.root.delete_queue("q")
    assert where(queue) == {"delayed" if delay else "target": [b"a"]}
    queue.send(b"b")


def test_a_send_that_was_half_way_as_the_queue_was_deleted_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    write_new = Storage.write_new

    def before_a_delete(storage: Storage, *args: Any) -> None:
        write_new(storage, *args)
        Root(queue.root.path).delete_queue("q", force=True)

    monkeypatch.setattr(Storage, "write_new", before_a_delete)
    with pytest.raises(NoSuchQueue):
        queue.send(b"a")
    assert not (Path(queue.root.path) / "q").exists()


@pytest.mark.parametrize("stray", ["file", "folder"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_message_keeps_a_queue_from_being_deleted_unless_forced(make: Make, stray: str, force: bool) -> None:
    queue = make()
    if stray == "file":
        (base(queue) / "target" / "_SUCCESS").touch()
    else:
        (base(queue) / "target" / "_temporary" / "0").mkdir(parents=True)
    if not force:
        with pytest.raises(StorageError, match="no message in target"):
            queue.root.delete_queue("q")
        queue.send(b"a")
        assert where(queue)["target"][-1] == b"a"
    else:
        queue.root.delete_queue("q", force=True)
        assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml"]


def test_producers_racing_with_a_forced_delete_get_an_error_or_their_message_goes_with_the_queue(
    tmp_path: Path,
) -> None:
    root = Root.create(tmp_path)
    outcomes: list[str] = []

    def produce() -> None:
        queue = root.queue("q")
        try:
            while True:
                queue.send(b"x")
        except NoSuchQueue:
            outcomes.append("told")

    for _ in range(5):
        root.create_queue("q", durability="none")
        producers = [threading.Thread(target=produce) for _ in range(3)]
        for producer in producers:
            producer.start()
        until(lambda: os.listdir(tmp_path / "q" / "target"), "messages")
        root.delete_queue("q", force=True)
        for producer in producers:
            producer.join(10)
        assert sorted(os.listdir(tmp_path)) == [".dropq", "dropq.toml"]
    assert outcomes == ["told"] * 15


# -- making and finding queues -------------------------------------------------------------------------------


def test_a_queue_appears_whole_or_not_at_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()

    def failing(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EIO, "no", source)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "move_folder", failing)
        with pytest.raises(StorageError):
            queue.root.create_queue("new")
    assert sorted(os.listdir(queue.root.path)) == [".dropq", "dropq.toml", "q"]
    with pytest.raises(QueueExists):
        queue.root.create_queue("q")


@pytest.mark.parametrize("state", ["processed", "error", "expired"])
def test_a_reservation_that_a_crash_left_is_no_message(make: Make, state: str) -> None:
    queue = make()
    reservation = base(queue) / state / "report.csv"
    os.close(os.open(reservation, os.O_WRONLY | os.O_CREAT | os.O_EXCL, RESERVED_MODE))
    assert list(queue.browse(state)) == []
    assert queue.requeue(state=state) == []
    assert reservation.exists()
    assert queue.receive() is None


def test_root_create_is_safe_to_repeat(tmp_path: Path) -> None:
    make_queue(tmp_path).send(b"a")
    Root.create(tmp_path)
    assert where(Root(tmp_path).queue("q")) == {"target": [b"a"]}


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


def test_counts_and_stats_tell_what_lies_where(make: Make) -> None:
    queue = make()
    queue.send_many([b"a", b"bb", b"ccc"])
    queue.send(b"later", delay=60)
    take(queue).ack()
    take(queue)
    counts = queue.counts()
    assert {state: count for state, count in counts.items() if count} == {
        "target": 1,
        "processing": 1,
        "processed": 1,
        "delayed": 1,
    }
    stats = queue.stats()
    assert (stats["target"].count, stats["target"].bytes) == (1, 3)
    assert files(base(queue) / "target") != {}
