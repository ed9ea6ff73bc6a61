"""What a consumer holds, and when it stops to: what it keeps of a message ends with it, and so does what leases end."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import FRESH, Clock, Make, base, files, names_in, reopened, take, until, where

from dropq import DropqError, LeaseLost, Message, StorageError
from dropq.format.claims import Claim
from dropq.format.message_file import MessageFile
from dropq.lifecycle.processing import claims_of
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.timing import Timing
from dropq.queue.message_view import MessageView
from dropq.storage import reading


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were listed, in order."""
    listed: list[str] = []
    listing = reading.listing

    def counted(folder: str) -> Any:
        listed.append(os.path.basename(folder))
        return listing(folder)

    monkeypatch.setattr(reading, "listing", counted)
    return listed


# -- what is kept of a message -----------------------------------------------------------------------------------------


def test_what_is_delivered_at_most_once_without_a_history_leaves_nothing_once_it_is_settled(make: Make) -> None:
    queue = make(semantics="at-most-once", history=False)
    held = base(queue) / ".dropq" / "held"
    with queue.subscribe(max_backlog=None) as subscription:
        for _ in range(3):
            queue.send_many([b"a", b"b"])
            first, second = subscription.receive_many(2)
            assert sorted(files(path)[name] for path in held.iterdir() for name in os.listdir(path)) == [b"a", b"b"]
            first.ack()
            assert len(os.listdir(held)) == 1
            with second:
                assert second.body == b"b"
            second.ack()
            assert os.listdir(held) == [] and where(queue) == {}


def test_what_somebody_has_open_while_it_is_settled_may_stay_under_another_name(make: Make) -> None:
    """As an NFS client lets it, which a sweep clears away."""
    queue = make(semantics="at-most-once", history=False)
    queue.send(b"a")
    message = take(queue)
    folder = os.path.dirname(message.path)
    with open(f"{folder}/.nfs0001", "xb"):
        message.ack()
    assert os.listdir(folder) == [".nfs0001"]


# -- leases that ran out -----------------------------------------------------------------------------------------------


def test_what_a_lease_ran_out_of_is_not_held_any_more_however_many_may_be(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, lease_period="30s", redelivery_delay=0)
    queue.send(b"a")
    with queue.subscribe(max_backlog=None) as subscription:
        for number in range(6):
            message = subscription.receive()
            assert message is not None and message.delivery_count == number + 1
            assert subscription.held == (message,)
            clock.advance(31)
    assert where(queue) == {"target": [b"a"]}


def test_closing_lists_what_is_held_once_however_many_leases_ran_out(
    make: Make, clock: Clock, listings: list[str]
) -> None:
    queue = make(lease_period="30s")
    queue.send_many([b"a"] * 20)
    subscription = queue.subscribe(max_backlog=None)
    assert len(subscription.receive_many(20)) == 20
    clock.advance(31)
    assert reopened(queue).sweep().lapsed == 20
    listings.clear()
    subscription.close()
    assert listings.count("processing") == 1


def test_closing_returns_what_its_leases_ran_out_of_and_nobody_has_swept(make: Make, clock: Clock) -> None:
    queue = make(lease_period="30s", redelivery_delay=0)
    queue.send_many([b"a", b"b"])
    with queue.subscribe(max_backlog=None) as subscription:
        one, _ = subscription.receive_many(2)
        clock.advance(20)
        one.extend("30s")
        clock.advance(20)
    assert where(queue) == {"target": [b"a", b"b"]}
    assert {message.delivery_count for message in queue.browse()} == {1}


def test_who_brings_a_lapsed_lease_back_leaves_one_alone_that_was_renewed_since_it_was_listed(
    make: Make, clock: Clock
) -> None:
    queue = make(lease_period="30s")
    queue.send(b"a")
    message = take(queue)
    [listed] = claims_of(queue.context, str(message.owner).rpartition("-")[0])
    listed.exact = True
    message.extend("1m")
    with pytest.raises(LeaseLost):
        Claims(queue.context).give_back(listed)
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_message_that_another_thread_settles_meanwhile_tells_all_that_it_told_before(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(lease_period="30s")
    queue.send(b"a")
    message = take(queue)
    held = message._claim
    for what in ("deadline", "receipt", "timestamp", "name", "file", "path"):
        reads = iter([held])

        def read(self: Message, reads: Iterator[Claim | None] = reads) -> Claim | None:
            return next(reads, None)

        with monkeypatch.context() as patch:
            patch.setattr(Message, "_claim", property(read))
            assert getattr(message, what) is not None, what
    message.ack()


def test_a_receive_goes_on_though_another_thread_settles_what_it_looks_at_the_lease_of(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])
    subscription = queue.subscribe(lease_period="1m", max_backlog=1)
    first = subscription.receive()
    assert first is not None
    deadline: property = vars(MessageView)["deadline"]

    def settled_after(message: Message) -> Any:
        found = deadline.__get__(message)
        if found is not None and message is first:
            first.ack()
        return found

    monkeypatch.setattr(Message, "deadline", property(settled_after))
    second = subscription.receive()
    assert second is not None and second.body == b"b" and where(queue)["processed"] == [b"a"]


@pytest.mark.parametrize("period", [0, "0s", "10ns", 0.0001, -1, "soon"])
def test_a_lease_that_is_over_when_it_is_made_is_refused(make: Make, period: object) -> None:
    queue = make(lease_period="30s")
    queue.send(b"a")
    with pytest.raises(ValueError):
        queue.subscribe(lease_period=period)  # type: ignore[arg-type]
    message = take(queue)
    receipt = message.receipt
    with pytest.raises(ValueError):
        message.extend(period)  # type: ignore[arg-type]
    assert message.receipt == receipt and names_in(queue, "processing") == [receipt]


# -- ending ------------------------------------------------------------------------------------------------------------


def test_once_it_is_closed_nothing_is_reached_for_also_where_its_view_is_fresh(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=Timing(max_age=60, sweep_interval=60))
    queue.send_many([b"a", b"b"])
    subscription = queue.subscribe(max_backlog=None)
    assert subscription.receive() is not None
    subscription.close()
    reached: list[MessageFile] = []

    def claim(self: Claims, waiting: MessageFile, *args: object, **options: object) -> Claim | None:
        reached.append(waiting)
        return None

    monkeypatch.setattr(Claims, "claim", claim)
    for receive in (subscription.receive, lambda: subscription.receive(5), lambda: subscription.receive_many(2)):
        with pytest.raises(DropqError, match="is closed"):
            receive()
    assert subscription._next() is None
    assert reached == [] and where(queue) == {"target": [b"a", b"b"]}


def test_who_rests_after_a_long_attempt_is_woken_by_the_end(make: Make) -> None:
    queue = make(timing=Timing(long_attempt=0, listing_share=1_000_000))
    queue.send(b"a")
    subscription = queue.subscribe(filter="JMSType = 'none'", max_backlog=None)
    with queue.subscribe() as other:
        held = other.receive()
        assert held is not None
        got: list[object] = []
        waiting = threading.Thread(target=lambda: got.append(subscription.receive(None)))
        waiting.start()
        until(lambda: subscription._waiting.waits and subscription._waiting._watch is not None, "it waits")
        subscription.close()
        waiting.join(10)
        assert got == [None]
        held.ack()


def test_a_message_keeps_the_subscription_alive_that_handed_it_out(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message = queue.subscribe().receive()
    assert message is not None
    gc.collect()
    assert reopened(queue).sweep().dead == 0
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_claims_that_cannot_be_listed_are_left_to_a_sweep(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> list[Any]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    queue = make()
    queue.send(b"a")
    with queue.subscribe() as subscription:
        assert subscription.receive() is not None
        with monkeypatch.context() as patched:
            patched.setattr("dropq.queue.subscription.claims_of", refused)
            with pytest.raises(StorageError, match="returns with the next sweep"):
                subscription._give_back_but(())
        assert where(queue) == {"processing": [b"a"]}
