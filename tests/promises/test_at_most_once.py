"""At most once: a message is settled before it is delivered, and comes back only while nobody has it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, VERBS, Clock, Make, base, reopened, take, where

from dropq import LeaseLost, StorageError
from dropq.format.claims import Claim
from dropq.lifecycle.settlement import Claims
from dropq.storage.files import Storage


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
    queue = make(timing=FRESH, semantics="at-most-once", history=history, lease_period="1s")
    queue.send(b"a")
    claim = Claims.claim

    def slow(transitions: Claims, *args: Any) -> Claim | None:
        monkeypatch.setattr(Claims, "claim", claim)
        held = claim(transitions, *args)
        clock.advance(2)
        assert reopened(queue).sweep().lapsed == 1
        return held

    monkeypatch.setattr(Claims, "claim", slow)
    assert queue.receive() is None
    assert where(queue) == {"target": [b"a"]}
    message = take(queue)
    assert message.body == b"a"
    assert message.delivery_count == 2
    assert sum(len(bodies) for bodies in where(queue).values()) == int(history)


@pytest.mark.parametrize("history", [True, False])
def test_what_is_acknowledged_together_is_neither_lost_nor_kept(make: Make, history: bool) -> None:
    queue = make(semantics="at-most-once", history=history)
    queue.send_many([b"a", b"b"])
    with queue.subscribe(max_backlog=2) as subscription:
        messages = subscription.receive_many(2)
        assert subscription.ack_many(messages) == []
        assert subscription.ack_many(messages) == []
        assert [path for path in Path(queue.layout.held).rglob("*") if path.is_file()] == []
    assert where(queue) == ({"processed": [b"a", b"b"]} if history else {})


@pytest.mark.parametrize("history", [True, False])
def test_a_with_block_around_an_at_most_once_message_never_brings_it_back(make: Make, history: bool) -> None:
    queue = make(semantics="at-most-once", history=history)
    queue.send(b"a")
    with pytest.raises(ZeroDivisionError), take(queue):
        _ = 1 // 0
    assert where(queue) == ({"processed": [b"a"]} if history else {})


@pytest.mark.parametrize("history", [True, False])
def test_at_most_once_gives_back_what_it_could_not_archive(make: Make, history: bool) -> None:
    queue = make(semantics="at-most-once", history=history)
    queue.send(b"a")
    needed = Path(queue.layout.processed if history else queue.layout.held)
    needed.rmdir()
    if not history:
        needed.write_bytes(b"")
    with pytest.raises(StorageError):
        queue.receive()
    assert where(queue) == {"target": [b"a"]}
    needed.mkdir() if history else needed.unlink()
    message = take(queue)
    assert (message.body, message.delivery_count) == (b"a", 1)


def test_at_most_once_says_what_is_wrong_when_the_archive_was_made_but_not_durable(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(semantics="at-most-once", durability="full")
    queue.send(b"a")

    def refuse(self: Storage, *folders: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folders[0])

    with monkeypatch.context() as patch:
        subscription = queue.subscribe()
        patch.setattr(Storage, "sync", refuse)
        with pytest.raises(StorageError, match="was not delivered, and lies in processed/"):
            subscription.receive()
    subscription.close()
    assert where(queue) == {"processed": [b"a"]}
