"""What many lost leases cost: a few listings of processing/ for all of them, not one for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from children import in_child
from helpers import Clock, Make, reopened, take

from dropq import LeaseLost, Message, Queue, Subscription
from dropq.format.claims import Claim
from dropq.lifecycle import processing
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import LISTINGS, claims_in
from dropq.lifecycle.settlement import Claims
from dropq.queue.message import ack_all
from dropq.queue.stream_journal import Journal
from dropq.storage import reading

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


def test_many_lost_messages_are_acknowledged_by_few_listings(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    subscription, messages = lose_half(queue, clock)
    with listings(queue, monkeypatch) as seen:
        assert subscription.ack_many(messages) == messages[:N]
    assert len(seen) == LISTINGS
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
    assert order == ["renewed"] * N + ["listing"] * LISTINGS
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
    assert len(seen) == LISTINGS
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
        if len(listed) == LISTINGS:
            with monkeypatch.context() as patch:
                patch.setattr(processing, "claims_in", claims_in)
                renew_elsewhere(queue, messages[N:])
        yield from found

    monkeypatch.setattr(processing, "claims_in", then_renewed)
    assert ack_all(messages) == messages[:N]
    assert listed == [2 * N] * (LISTINGS + 1)
    assert len(os.listdir(queue.layout.processed)) == N


def passing_over(queue: Queue, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let so many listings of processing/ pass over all that lies there, as they may what is being renamed."""
    entries, left = reading.entries, [None] * times

    def passed_over(folder: str) -> Iterator[os.DirEntry[str]]:
        return iter(()) if folder == queue.layout.processing and left and left.pop() is None else entries(folder)

    monkeypatch.setattr(reading, "entries", passed_over)


@pytest.mark.parametrize("named", ["receipt", "id"])
def test_what_is_held_is_found_though_listings_pass_over_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    queue = make(leasing="sublet")
    queue.send(b"a")
    message = take(queue)
    name = message.id if named == "id" else message.receipt
    assert name is not None
    passing_over(queue, monkeypatch, LISTINGS - 1)
    in_child(lambda: reopened(queue).claimed(name).ack())
    assert len(os.listdir(queue.layout.processed)) == 1


@pytest.mark.parametrize("verb", ["ack", "ack_many", "extend"])
def test_what_another_process_renewed_is_found_though_listings_pass_over_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = make(lease_period="1h")
    queue.send_many([b"a", b"b"])
    subscription = queue.subscribe(max_backlog=None)
    messages = subscription.receive_many(2)
    renew_elsewhere(queue, messages)
    passing_over(queue, monkeypatch, LISTINGS - 1)
    if verb == "ack_many":
        assert subscription.ack_many(messages) == []
    elif verb == "ack":
        messages[0].ack()
    else:
        messages[0].extend("2h")


def test_what_is_gone_is_told_after_a_few_listings(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    os.unlink(message.path)
    with listings(queue, monkeypatch) as seen, pytest.raises(LeaseLost):
        message.ack()
    assert len(seen) == LISTINGS
