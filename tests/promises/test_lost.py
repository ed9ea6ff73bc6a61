"""What many lost leases cost: a listing of processing/ for all of them, not one for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers import Clock, Make

from dropq import Message, Queue, Subscription
from dropq.format.claims import Claim
from dropq.lifecycle import processing
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.settlement import Claims
from dropq.queue.message import ack_all
from dropq.queue.stream_journal import Journal

N = 20


@contextmanager
def listings(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the listings of processing/."""
    seen: list[str] = []
    scandir = os.scandir

    def recorded(path: str) -> object:
        if str(path) == queue.layout.processing:
            seen.append(str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", recorded)
        yield seen


def lose_half(queue: Queue, clock: Clock) -> tuple[Subscription, list[Message]]:
    """Receive messages; the leases of half of them run out, and others hold these now."""
    for number in range(2 * N):
        queue.send(b"%d" % number)
    first = queue.subscribe(max_backlog=None, lease_period="1m")
    messages = first.receive_many(2 * N)
    for message in messages[N:]:
        message.extend("1h")
    clock.advance(120)
    assert queue.sweep().lapsed == N
    assert len(queue.subscribe(max_backlog=None, lease_period="1h", client_id="other").receive_many(N)) == N
    return first, messages


def test_many_lost_messages_are_acknowledged_by_one_listing(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    subscription, messages = lose_half(queue, clock)
    with listings(queue, monkeypatch) as seen:
        assert subscription.ack_many(messages) == messages[:N]
    assert len(seen) == 1
    assert not any(message.held for message in messages)
    assert len(os.listdir(queue.layout.processed)) == N


def test_a_subscription_that_lost_many_messages_closes_by_few_listings(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    subscription, _ = lose_half(queue, clock)
    with listings(queue, monkeypatch) as seen:
        subscription.close()
    assert len(seen) == 1  # for those that were lost, and for those that nobody was handed
    assert len(os.listdir(queue.layout.target)) == N


def test_a_stream_renews_what_it_has_before_it_looks_for_what_it_lost(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    for _ in range(2 * N):
        queue.send(b"a")
    subscription = queue.subscribe(max_backlog=None, lease_period="1m", detached=True)
    journal = Journal(queue.context, "stream", subscription)
    assert journal.next_batch(1, None) == 2 * N
    messages = journal.messages(1)
    for message in messages[::2]:
        message.extend("1h")
    clock.advance(120)
    assert queue.sweep().lapsed == N
    order: list[str] = []
    rename, scandir = os.rename, os.scandir

    def renamed(source: str, destination: str) -> None:
        rename(source, destination)
        order.append("renewed")

    def listed(folder: str) -> object:
        order.append("listing")
        return scandir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", renamed)
        patch.setattr(os, "scandir", listed)
        journal.renew()
    assert order == ["renewed"] * N + ["listing"]
    assert [message.held for message in messages] == [True, False] * N


def renew_elsewhere(queue: Queue, messages: list[Message]) -> None:
    """Renew leases as another process does; the message objects here do not know."""
    owners = {message.owner for message in messages}
    for claim in list(claims_in(queue.context)):
        if claim.owner in owners:
            Claims(queue.context).extend(claim, claim.deadline + 1)


def test_messages_that_another_process_renewed_are_found_among_the_lost_ones(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    _, messages = lose_half(queue, clock)
    renew_elsewhere(queue, messages[N:])
    with listings(queue, monkeypatch) as seen:
        assert ack_all(messages) == messages[:N]
    assert len(seen) == 1
    assert len(os.listdir(queue.layout.processed)) == N


def test_messages_that_are_renewed_while_they_are_looked_for_are_found_by_another_listing(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    _, messages = lose_half(queue, clock)
    renew_elsewhere(queue, messages[N:])
    listed: list[int] = []

    def then_renewed(context: QueueContext) -> Iterator[Claim]:
        found = list(claims_in(context))
        listed.append(len(found))
        if len(listed) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(processing, "claims_in", claims_in)
                renew_elsewhere(queue, messages[N:])
        yield from found

    monkeypatch.setattr(processing, "claims_in", then_renewed)
    assert ack_all(messages) == messages[:N]
    assert listed == [2 * N, 2 * N]
    assert len(os.listdir(queue.layout.processed)) == N
