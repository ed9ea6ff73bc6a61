"""A message that comes back waits as long as its queue says, and comes back as often as its queue says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, Make, drop, leave_claimed, make_queue, reopened, take, timed, where

from dropq import Message, Queue, Root, work
from dropq.format.claims import ZMQ


def test_redelivery_waits_longer_each_time(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, redelivery_delay="1s", redelivery_backoff=3.0, redelivery_attempts=9)
    queue.send(b"a")
    for seconds in (1, 3, 9, 27):
        take(queue).fail("again")
        assert where(queue) == {"delayed": [b"a"]}
        clock.advance(seconds - 0.01)
        assert queue.receive() is None
        clock.advance(0.02)
    assert take(queue).delivery_count == 5


def test_a_message_counts_its_last_delivery_unless_that_was_the_first_and_acknowledged(make: Make) -> None:
    queue = make(redelivery_attempts=1, redelivery_delay=0)
    queue.send_many([b"a", b"b", b"c"])

    def handle(message: Message) -> None:
        if message.body == b"c" or (message.body == b"b" and message.delivery_count == 1):
            raise ValueError

    for _ in range(2):
        work(queue, handle, until_empty=True)
    assert [message.delivery_count for message in queue.browse("processed")] == [0, 2]
    assert [message.delivery_count for message in queue.browse("error")] == [2]


def test_without_a_word_on_it_what_comes_back_waits_a_second_then_twice_as_long_up_to_a_minute(
    tmp_path: Path, clock: Clock
) -> None:
    root = timed(Root.create(tmp_path, clock=clock), FRESH)
    queue = root.create_queue("q", durability="none", lease_period="5s")
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


def away_for(minutes: float, clock: Clock, calls: list[int]) -> Callable[[Message], None]:
    """Return a handler of bundles that fails until the time is over; it notes how many records it was given."""
    end = clock.ms + minutes * 60_000

    def store(message: Message) -> None:
        calls.append(len(list(message.records())))
        if clock.ms < end:
            raise ConnectionError("the database is away")

    return store


@pytest.mark.parametrize("minutes", [1, 5])
def test_a_bundle_that_fails_is_tried_whole_and_backs_off_until_its_tries_are_used_up(
    tmp_path: Path, clock: Clock, minutes: float
) -> None:
    queue = make_queue(tmp_path, clock=clock, timing=FRESH, redelivery_delay="1s", redelivery_attempts=7)
    body = b"".join(b"%d\n" % number for number in range(1000))
    queue.send(body, type="text")
    calls, waits = list[int](), list[float]()
    store = away_for(minutes, clock, calls)
    while queue.counts()["target"] + queue.counts()["delayed"]:
        if queue.counts()["delayed"]:
            waits.append(due_in(queue, clock))
            clock.advance(waits[-1])
            queue.sweep()
        work(queue, store, until_empty=True)
    assert waits == [1, 2, 4, 8, 16, 32, 60][: len(waits)]
    assert calls == [1000] * (7 if minutes == 1 else 8)
    assert where(queue) == {"processed" if minutes == 1 else "error": [body]}


@pytest.mark.parametrize("way", [Message.fail, Message.nack, Message.release, "close"])
def test_what_is_given_back_by_its_holder_is_no_death_and_the_bundle_stays_whole(tmp_path: Path, way: Any) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=9)
    queue.send(b"1\n2\n3\n4\n", type="text")
    for _ in range(3):
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None and len(list(message.records())) == 4
            if way is Message.fail:
                message.fail("no")
            elif way != "close":
                way(message)
    message = take(queue)
    assert (message.deaths, message.delivery_count, message.first_record) == (0, 4, None)
    assert [record.text for record in message.records()] == ["1", "2", "3", "4"]


def test_a_redelivery_delay_beyond_the_limit_stays_as_it_is_and_does_not_grow(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, redelivery_delay="10m")
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
    queue = make(timing=FRESH, redelivery_delay="10s", redelivery_backoff=1, lease_period="5s")
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


def lost(queue: Queue, clock: Clock, client: str | None = None) -> Message:
    """Take the message that waits, and let a sweep find its lease over; return it as it waits now."""
    queue.sweep()
    with queue.subscribe(client_id=client, lease_period="5s") as subscription:
        assert subscription.receive() is not None
        clock.advance(6)
        assert queue.sweep().lapsed == 1
    (message,) = [*queue.browse("delayed"), *queue.browse()]
    return message


def test_what_its_holders_lose_waits_a_second_then_twice_as_long_up_to_the_limit_whatever_redelivery_delay_says(
    make: Make, clock: Clock
) -> None:
    queue = make(timing=replace(FRESH, after_death=1.0), redelivery_delay=0, redelivery_delay_limit="6s")
    queue.send(b"a")
    for deaths, wait in enumerate((1, 2, 4, 6, 6), start=1):
        assert lost(queue, clock).deaths == deaths
        assert due_in(queue, clock) == wait
        clock.advance(wait)


@pytest.mark.parametrize(
    ("client", "deaths"),
    [("zmq-4194304", 0), ("zmq-feeder", 1), ("zmq-", 1), ("zmq-7a", 1), ("zmq-123456789012345", 1), ("my-zmq-1", 1)],
)
def test_no_deaths_are_counted_of_a_zeromq_server_and_of_nobody_whose_name_only_begins_like_its(
    make: Make, clock: Clock, client: str, deaths: int
) -> None:
    queue = make(timing=FRESH)
    queue.send(b"a")
    assert lost(queue, clock, client).deaths == deaths


def test_a_longer_redelivery_delay_holds_after_a_death(make: Make, clock: Clock) -> None:
    queue = make(timing=replace(FRESH, after_death=1.0), redelivery_delay="10s")
    queue.send(b"a")
    lost(queue, clock)
    assert due_in(queue, clock) == 10


def test_a_nack_and_a_failure_are_no_deaths_and_keep_those_that_were_counted(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, redelivery_attempts=9)
    queue.send(b"a")
    take(queue).nack()
    take(queue).fail("f")
    take(queue).release()
    assert [message.deaths for message in queue.browse()] == [0]
    assert lost(queue, clock).deaths == 1
    take(queue).nack()
    assert [message.deaths for message in queue.browse()] == [1]


def test_what_a_dead_consumer_held_counts_a_death_and_what_max_deliveries_ends_shows_each(
    make: Make, clock: Clock
) -> None:
    queue = make(timing=FRESH, max_deliveries=2)
    queue.send(b"a")
    for _ in range(2):
        leave_claimed(queue)
        assert reopened(queue).sweep().dead == 1
    (ended,) = queue.browse("error")
    assert (ended.deaths, (ended.reason or {})["reason"]) == (2, "max_deliveries")


def test_a_requeue_begins_with_no_deaths(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH)
    queue.send(b"a")
    lost(queue, clock)
    take(queue).reject("r")
    queue.requeue(state="error")
    assert [message.deaths for message in queue.browse()] == [0]


def test_what_a_server_for_zeromq_lost_is_back_at_once_and_counts_no_death(make: Make, clock: Clock) -> None:
    queue = make(timing=replace(FRESH, after_death=1.0))
    queue.send(b"a")
    with queue.subscribe(client_id=f"{ZMQ}17", lease_period="5s") as server:
        assert server.receive() is not None
        clock.advance(6)
        assert reopened(queue).sweep().lapsed == 1
    assert [message.deaths for message in queue.browse()] == [0]


def test_in_dropboxmqs_layout_deaths_count_and_nothing_waits_unless_the_queue_says_so(
    tmp_path: Path, clock: Clock
) -> None:
    timing = replace(FRESH, after_death=1.0)
    root = timed(Root.create(tmp_path / "root", clock=clock, dropboxmq=True), timing)
    queue = root.create_queue("q", dropboxmq=True, durability="none")
    queue.send(b"a")
    assert lost(queue, clock).deaths == 1
    take(queue).nack()
    assert where(queue) == {"target": [b"a"]}
    waiting = root.create_queue("waits", dropboxmq=True, durability="none", redelivery_delay="3s")
    waiting.send(b"b")
    lost(waiting, clock)
    assert due_in(waiting, clock) == 3


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


@pytest.mark.parametrize(
    ("attempts", "deliveries", "tries", "reason"),
    [(0, 0, 1, "failed"), (2, 0, 3, "failed"), (2, 3, 3, "failed"), (5, 3, 3, "max_deliveries"), (0, 5, 1, "failed")],
)
@pytest.mark.parametrize("exhausted", ["error", "expired"])
def test_the_smaller_limit_ends_a_failure_and_the_reason_names_it_and_keeps_what_failed(
    make: Make, attempts: int, deliveries: int, tries: int, reason: str, exhausted: str
) -> None:
    queue = make(redelivery_attempts=attempts, max_deliveries=deliveries, exhausted=exhausted)
    queue.send(b"a")
    for number in range(1, tries + 1):
        assert where(queue) == {"target": [b"a"]}
        take(queue).fail(f"failure {number}", exit_status=3)
    assert where(queue) == {exhausted: [b"a"]}
    (found,) = queue.browse(exhausted)
    assert found.reason is not None and found.delivery_count == tries
    known = {key: found.reason[key] for key in ("reason", "detail", "exit_status")}
    assert known == {"reason": reason, "detail": f"failure {tries}", "exit_status": 3}


@pytest.mark.parametrize("exhausted", ["error", "expired"])
def test_max_cancels_counts_only_what_was_given_back_of_free_will(make: Make, clock: Clock, exhausted: str) -> None:
    queue = make(timing=FRESH, max_cancels=2, lease_period="5s", exhausted=exhausted, redelivery_attempts=99)
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


LARGEST = 2**31 - 1


def test_counts_stay_at_the_largest_that_a_name_can_hold(make: Make) -> None:
    queue = make(max_cancels=0)
    drop(queue, f"4.x.B.....JMSXDeliveryCountI={LARGEST}&JMS_dropq_cancelsI={LARGEST}", b"a")
    for _ in range(3):
        take(queue).nack()
        [message] = queue.browse()
        assert (message.id, message.delivery_count, message.cancels) == ("x", LARGEST, LARGEST)
