"""Messages are handed out by priority, then by time, then by name, and keep their place when they come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import FRESH, Clock, Make, base, drop, make_queue, next_moment, take, until, where

from dropq import Queue
from dropq.storage import reading


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
        next_moment(tmp_path)
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
    queue = make(timing=FRESH)
    for body in (b"a", b"b", b"c"):
        queue.send(body)
        clock.advance(1)
    take(queue).nack()
    assert drained(queue) == [b"a", b"b", b"c"]


def test_a_returned_foreign_file_keeps_its_place(make: Make) -> None:
    queue = make()
    for name in ("b.csv", "a.csv", "c.csv"):
        drop(queue, name, name.encode())
        next_moment(base(queue))
    take(queue).nack()
    assert drained(queue) == [b"b.csv", b"a.csv", b"c.csv"]


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


# -- by an expression ----------------------------------------------------------------------------------------


def test_the_value_of_an_expression_is_the_priority(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, priority="/price * /quantity")
    bodies = ['{"price": 2, "quantity": 3}', "no json", '{"price": 5, "quantity": 4}', '{"price": -1, "quantity": 9}']
    for body in bodies:
        queue.send(body)
    wanted = [bodies[2], bodies[0], bodies[1], bodies[3]]
    assert [message.text for message in queue.browse()] == wanted
    assert [take(queue).text for _ in bodies] == wanted


def test_an_expression_replaces_the_priority_in_the_name(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, priority="rank")
    queue.send(b"low", priority=9, properties={"rank": 1})
    queue.send(b"high", priority=0, properties={"rank": 2})
    assert [take(queue).body, take(queue).body] == [b"high", b"low"]


def test_each_body_is_read_once_for_its_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, priority="/n")
    for number in range(5):
        queue.send(f'{{"n": {number}}}')
    read: list[str] = []
    read_body = reading.read_body

    def noted(path: str, limit: int | None = None) -> bytes:
        read.append(path)
        return read_body(path, limit)

    monkeypatch.setattr(reading, "read_body", noted)
    with queue.subscribe(max_backlog=None) as subscription:
        for _ in range(5):
            subscription._attend_at = subscription._offers._target.fresh_until = 0.0
            assert subscription.receive() is not None
    assert len(read) == 5


def test_the_filter_of_a_queue_leaves_what_does_not_match_untouched(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, filter="/total > 10")
    queue.send('{"total": 5}')
    queue.send('{"total": 50}')
    assert take(queue).text == '{"total": 50}'
    assert queue.receive() is None
    assert where(queue)["target"] == [b'{"total": 5}']
    with queue.subscribe(filter="JMSPriority > 4") as subscription:
        assert subscription.receive() is None
