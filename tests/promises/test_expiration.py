"""A message expires when its own lifetime or that of its queue is over, as the queue's model says."""

from __future__ import annotations

import os

import pytest
from helpers import FRESH, Clock, Make, base, drop, names_in, take, where

from dropq.lifecycle.view import TargetView


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
    queue = make(timing=FRESH, expiration_model=model, **({} if queues is None else {"expiration": queues}))
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
    queue = make(timing=FRESH, expiration="1h")
    drop(queue, "a.csv", b"a")
    clock.advance(3590)
    take(queue).nack()
    clock.advance(20)
    assert queue.receive() is None
    assert names_in(queue, "expired") == ["a.csv"]


def test_a_requeued_message_gets_the_queues_lifetime_anew(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, expiration="1h")
    queue.send(b"a")
    clock.advance(3601)
    assert queue.receive() is None
    queue.requeue(state="expired")
    clock.advance(3599)
    take(queue).nack()
    clock.advance(2)
    assert queue.receive() is None
    assert where(queue) == {"expired": [b"a"]}


def test_a_file_under_a_name_that_was_used_before_has_an_arrival_of_its_own(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetView, "_arrival", lambda view, file: clock.ms)  # whatever is seen first came just now
    queue = make(timing=FRESH, expiration="30s")
    with queue.subscribe(max_backlog=None) as subscription:
        drop(queue, "report.csv", b"old")
        queue.send(b"urgent", priority=9)
        first = subscription.receive()
        assert first is not None and first.body == b"urgent"  # the old report was seen, and left
        os.rename(base(queue) / "target" / "report.csv", base(queue) / "processing" / "mine")
        drop(queue, "report.csv", b"new")
        clock.advance(60)
        second = subscription.receive()
        assert second is not None and second.body == b"new"


@pytest.mark.parametrize("rest", ["", "."])
def test_a_name_with_digits_of_another_script_is_foreign_and_does_not_expire_at_once(make: Make, rest: str) -> None:
    queue = make(expiration="1h")
    one = "\N{ARABIC-INDIC DIGIT ONE}"
    name = f"4.{one * 16}-{one * 10}.B{rest}"
    drop(queue, name, b"a")
    message = take(queue)
    assert message.body == b"a"
    message.ack()
    assert where(queue) == {"processed": [b"a"]}
