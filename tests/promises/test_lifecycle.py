"""The life of a message: a test for each arrow of the life cycle, and a table of the arrows that there are not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from forks import die_after
from helpers import (
    FRESH,
    SETTLED,
    VERBS,
    Clock,
    Make,
    RecordingOs,
    base,
    drop,
    make_queue,
    names_in,
    reopened,
    take,
    where,
)

from dropq import DropqError, LeaseLost, Message, NoSuchMessage, NoSuchQueue, StorageError
from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.lifecycle import naming
from dropq.lifecycle.expiry import expires_at, expires_by_arrival, has_expired, may_expire
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.sending import into_target
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.timing import Timing
from dropq.staging.jobs import Job, is_committed
from dropq.storage import reading
from dropq.storage.files import Storage
from dropq.upkeep import bulk
from dropq.upkeep.bulk import Selection

#: A plain name, and what it may go on with.
PLAIN = "4.1763770000000000-0000000000.B"


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
    queue = make(timing=FRESH)
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


def test_of_two_claimers_with_the_same_view_one_wins_and_the_other_goes_on(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(max_age=3600))  # both keep what they listed
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
    queue = make(timing=FRESH)
    queue.send(b"a")
    take(queue).nack(delay="5s")
    assert where(queue) == {"delayed": [b"a"]}
    assert queue.receive() is None
    clock.advance(5)
    message = take(queue)
    assert (message.delivery_count, message.cancels) == (2, 1)


def test_a_lease_that_ran_out_is_swept_back_with_a_delivery_and_no_cancel_counted(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, lease_period="10s")
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
    die_after(lambda: take(reopened(queue)))
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
    queue = make(timing=FRESH)
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


def test_what_expires_while_it_is_held_ends_at_the_next_sweep_of_any_consumer_and_counts_until_then(
    make: Make, clock: Clock
) -> None:
    queue = make(timing=FRESH)
    for body in (b"a", b"b"):
        queue.send(body, expires_in="5s")
    with queue.subscribe(max_backlog=2) as subscription:
        first, second = subscription.receive_many(2)
        clock.advance(6)
        first.ack()
        assert where(queue) == {"processed": [b"a"], "processing": [b"b"]}
        assert reopened(queue).receive() is None, "nothing else waits"
        assert where(queue) == {"processed": [b"a"], "expired": [b"b"]}
        with pytest.raises(LeaseLost):
            second.ack()
    assert where(queue) == {"processed": [b"a"], "expired": [b"b"]}


@pytest.mark.parametrize("state", ["error", "expired", "processed", "processing"])
def test_requeue_resets_counters_expiration_and_the_queues_clock(make: Make, clock: Clock, state: str) -> None:
    queue = make(timing=FRESH, redelivery_attempts=9)
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
    (outcome,) = bulk.requeue(queue.context, Selection(("error",)), keep_expiration=True)
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
    assert [outcome.ok for outcome in bulk.requeue(queue.context, Selection(("error",)), to=other.context)] == [True]
    assert (where(queue), where(other)) == ({}, {"target": [b"a"]})


def test_a_move_to_another_queue_keeps_counters_and_expiration(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    queue.send(b"a", expires_in="1h")
    take(queue).nack()
    (before,) = names_in(queue, "target")
    assert [outcome.ok for outcome in queue.move(other)] == [True]
    assert names_in(other, "target") == [before]


def test_a_move_to_a_queue_of_another_root_takes_the_spilled_metadata_along(make: Make) -> None:
    queue, other = make(), make()
    queue.send(b"a", properties={"long": "x" * 300})
    assert [outcome.ok for outcome in queue.move(other)] == [True]
    assert take(other).properties == {"long": "x" * 300}


def test_a_purge_removes_for_good(make: Make) -> None:
    queue = make()
    ids = [sent.id for sent in queue.send_many([b"a", b"b", b"c"])]
    outcomes = queue.purge([ids[1], "nothing"])
    assert [outcome.ok for outcome in outcomes] == [True, False]
    assert where(queue) == {"target": [b"a", b"c"]}


def test_an_expire_moves_what_waits_is_delayed_or_is_held_to_expired(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH)
    queue.send(b"held")
    held = take(queue)
    queue.send(b"waits")
    queue.send(b"delayed", delay="1h", properties={"long": "x" * 300})
    drop(queue, "a.csv", b"foreign")
    (base(queue) / "processing" / "b.csv").write_bytes(b"held by a script")
    outcomes = queue.expire()
    assert [(outcome.ok, outcome.detail) for outcome in outcomes] == [(True, "expired")] * 5
    assert where(queue) == {"expired": [b"delayed", b"foreign", b"held", b"held by a script", b"waits"]}
    reasons = [message.reason for message in queue.browse("expired")]
    assert [reason and reason["reason"] for reason in reasons] == ["forced_expire"] * 5
    with pytest.raises(LeaseLost):
        held.ack()
    assert [outcome.ok for outcome in queue.requeue(state="expired")] == [True] * 5
    assert {message.id for message in queue.browse()} >= {held.id, "a.csv", "b.csv"}
    assert {"long": "x" * 300} in [message.properties for message in queue.browse()]


@pytest.mark.parametrize("state", ["target", "delayed", "processing"])
def test_an_expire_leaves_what_it_is_not_asked_for(make: Make, state: str) -> None:
    queue = make(timing=FRESH)
    lies = {"target": b"waits", "delayed": b"delayed", "processing": b"held"}
    queue.send(b"held")
    take(queue)
    queue.send(b"waits")
    queue.send(b"delayed", delay="1h")
    assert [outcome.ok for outcome in queue.expire(state=state, dry_run=True)] == [True]
    assert [outcome.ok for outcome in queue.expire(filter="JMSPriority > 9")] == []
    assert [(outcome.id, outcome.ok) for outcome in queue.expire(["nosuch"])] == [("nosuch", False)]
    assert len(where(queue)) == 3
    (wanted,) = queue.browse(state)
    assert [outcome.ok for outcome in queue.expire([wanted.id])] == [True]
    assert where(queue)["expired"] == [lies[state]]
    with pytest.raises(ValueError, match="expired in delayed, target, processing"):
        queue.expire(state="error")


@pytest.mark.parametrize("state", ["target", "processing"])
def test_an_expire_of_what_another_settles_first_says_so(make: Make, state: str) -> None:
    queue = make(timing=FRESH)
    queue.send_many([b"a", b"b"])
    first = take(queue) if state == "processing" else None
    outcomes = bulk.expire(queue.context, Selection((state,)))
    (first or take(queue)).ack()
    done = list(outcomes)
    assert (done[0].ok, done[0].detail) == (False, f"somebody else took it out of {state}/ first")
    assert queue.counts()["processed"] == 1


def test_the_lease_of_what_is_expired_may_have_been_renewed_meanwhile(make: Make) -> None:
    queue = make(timing=FRESH, lease_period="1h")
    queue.send(b"a")
    message = take(queue)
    outcomes = bulk.expire(queue.context, Selection(bulk.UNFINISHED))
    message.extend("2h")
    assert [outcome.ok for outcome in outcomes] == [True]
    assert where(queue) == {"expired": [b"a"]}


@pytest.mark.parametrize("state", ["target", "processing"])
def test_an_ack_of_many_leaves_what_another_settles_first(make: Make, state: str) -> None:
    queue = make(timing=FRESH)
    queue.send_many([b"a", b"b"])
    first = take(queue) if state == "processing" else None
    outcomes = bulk.ack(queue.context, Selection((state,)), subscribe=queue.subscribe)
    (first or take(queue)).reject("r")
    assert [outcome.ok for outcome in outcomes] == ([False, True] if state == "target" else [False])
    assert where(queue) == {"error": [b"a"], "processed" if state == "target" else "target": [b"b"]}


def test_an_ack_of_many_takes_renewed_leases_and_leaves_what_a_script_holds(make: Make) -> None:
    queue = make(timing=FRESH, lease_period="1h")
    queue.send_many([b"a", b"b"])
    message = take(queue)
    target, processing = base(queue) / "target", base(queue) / "processing"
    (waiting,) = target.iterdir()
    waiting.rename(processing / f"script~{waiting.name}")
    outcomes = bulk.ack(queue.context, Selection(bulk.UNFINISHED), subscribe=queue.subscribe)
    message.extend("2h")
    details = {outcome.ok: outcome.detail for outcome in outcomes}
    assert set(details) == {True, False} and "only who holds it can settle it" in details[False]
    assert where(queue) == {"processed": [b"a"], "processing": [b"b"]}


def refused(path: str) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_an_ack_of_many_that_meets_an_error_at_one_message_says_so_and_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=FRESH)
    drop(queue, "a.csv", b"a")
    queue.send(b"b")
    monkeypatch.setattr(queue.context.settling, "status", refused)
    reason = f"it stays in target/: Input/output error at {base(queue)}/target/a.csv"
    for dry_run, done in ((True, "would be acknowledged"), (False, "acknowledged")):
        outcomes = bulk.ack(queue.context, Selection(("target",), dry_run=dry_run), subscribe=queue.subscribe)
        assert {outcome.ok: outcome.detail for outcome in outcomes} == {True: done, False: reason}
    assert where(queue) == {"target": [b"a"], "processed": [b"b"]}


@pytest.mark.parametrize("by_id", [True, False])
def test_an_ack_that_fails_leaves_a_delayed_message_delayed(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, by_id: bool
) -> None:
    queue = make(timing=FRESH)
    sent = queue.send(b"a", delay="1h")
    with monkeypatch.context() as patch:
        patch.setattr(Claims, "archive", lambda _, claim: refused(claim.path))
        if by_id:
            with pytest.raises(StorageError, match="shows whether the message was acknowledged"):
                queue.ack(sent.id)
        else:
            outcomes = bulk.ack(queue.context, Selection(("delayed",)), subscribe=queue.subscribe)
            assert [outcome.ok for outcome in outcomes] == [False]
    assert where(queue) == {"delayed": [b"a"]}
    clock.advance(3599)
    assert queue.receive() is None
    clock.advance(2)
    assert take(queue).delivery_count == 1


def test_a_dry_run_changes_nothing(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    queue.send(b"a")
    take(queue).reject("r")
    before = where(queue)
    which = Selection(("error",), dry_run=True)
    for verb in (bulk.requeue, bulk.purge, partial(bulk.move, to=other.context)):
        assert [outcome.ok for outcome in verb(queue.context, which)] == [True]
    assert where(queue) == before


# -- the arrows that there are not ---------------------------------------------------------------------------


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
    queue = make(timing=FRESH, lease_period="10s")
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


# -- what is reported, and what is left behind ---------------------------------------------------------------


def reasons(path: Path) -> list[str]:
    return [name for _, _, names in os.walk(path / ".dropq" / "reasons") for name in names]


def test_a_message_that_is_removed_takes_its_reason_with_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).reject("no")
    (message,) = queue.browse("error")
    assert len(reasons(base(queue))) == 1
    assert Moves(queue.context).remove("error", message.file)
    assert (where(queue), reasons(base(queue))) == ({}, [])
    assert not Moves(queue.context).remove("error", message.file)


def test_a_copy_that_cannot_be_staged_is_told_and_is_not_taken_for_a_message_that_has_gone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).ack()
    (name,) = names_in(queue, "processed")
    assert Moves(queue.context).replay(f"{name}0", queue.context) is None
    os.rmdir(base(queue) / "working")
    with pytest.raises(StorageError, match="the message was not sent"):
        Moves(queue.context).replay(name, queue.context)
    assert where(queue) == {"processed": [b"a"]}


def test_what_cannot_go_back_as_target_is_gone_is_told_and_stays(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).reject("no")
    (name,) = names_in(queue, "error")
    assert Moves(queue.context).requeue(queue.layout.error, f"{name}0", queue.context) is None
    shutil.rmtree(base(queue) / "target")
    with pytest.raises(NoSuchQueue, match="was not moved"):
        Moves(queue.context).requeue(queue.layout.error, name, queue.context)
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
        patch.setattr(os, "lstat", lambda path, **more: closed() if "/processed/" in str(path) else lstat(path, **more))
        with pytest.raises(StorageError, match=r"Permission denied.*the message was not sent"):
            Moves(queue.context).replay(name, queue.context)
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
        Moves(queue.context).expire_waiting(MessageFile(name))
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
    context = make_queue(tmp_path).context
    rest = "...JMS_dropq_notBeforeL=1"
    within = f"{PLAIN}..{'x' * (names.NAME_BUDGET - len(f'{PLAIN}..{rest}'))}{rest}"
    assert naming.next_delivery(context, MessageFile(within)) == (1, within)
    _, file = naming.next_delivery(context, MessageFile(within.replace("xx", "xxx", 1)))
    assert "notBefore" not in file


def test_a_foreign_file_that_comes_back_keeps_the_time_at_which_it_came(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    source = base(queue) / "working" / "report.csv"
    source.touch()
    came = reading.changed_ms(str(source))
    context = queue.context
    file = into_target(context, str(source), context.sidecars.parse("report.csv"))
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


@pytest.mark.parametrize(
    "settle",
    [
        Message.ack,
        Message.nack,
        lambda message: message.nack(delay="1s"),
        lambda message: message.reject("no good"),
        lambda message: message.extend("1h"),
    ],
)
def test_settling_while_the_queue_is_away_fails_and_keeps_the_claim(
    make: Make, settle: Callable[[Message], None]
) -> None:
    queue = make()
    queue.send(b"a")
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        away = f"{queue.layout.home}.away"
        os.rename(queue.layout.home, away)
        with pytest.raises(StorageError):
            settle(message)
        os.rename(away, queue.layout.home)
        assert message.held
        assert subscription.held == (message,)
        message.ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("verb", ["ack", "nack", "extend", "receive"])
def test_a_race_that_is_lost_on_a_disk_that_cannot_be_looked_at_is_a_storage_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = make()
    queue.send("a")
    subscription = queue.subscribe()

    def refused(path: str) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def taken(self: Storage, source: str, destination: str, *_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    act: dict[str, Callable[[], object]] = {"receive": subscription.receive}
    if verb not in act:
        message = take(queue)
        act |= {"ack": message.ack, "nack": partial(message.nack, delay=0), "extend": partial(message.extend, 5)}
    for name in ("rename", "rename_guarded", "move"):
        monkeypatch.setattr(Storage, name, taken)
    monkeypatch.setattr(reading, "exists", refused)
    with pytest.raises(StorageError, match=r"Input/output error at .*(if it is still held|unless another)"):
        act[verb]()
