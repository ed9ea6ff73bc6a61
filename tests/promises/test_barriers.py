"""Barriers, call by call: what the crashes of others leave of them, who else may settle one, and what a sweep takes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from helpers import FRESH, Clock, base, make_queue, names_in, reopened, where

from dropq import Message, Queue, Subscription
from dropq.format.claims import Claim
from dropq.lifecycle.claims import claimed_files, find_claim
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transitions import Transitions
from dropq.policies import barrier
from dropq.policies.barrier import Barrier, Shares
from dropq.storage import reading

#: Seconds for which what a crash left of a barrier that was not handed out may lie there.
STAGING = 60


def barriers(path: Path, **options: Any) -> Queue:
    queue = make_queue(path, timing=FRESH, barrier_expression="JMSType = 'sync'", **options)
    queue.send(b"sync", type="sync")
    queue.send(b"a")
    return queue


def folder(queue: Queue) -> Path:
    """The one folder of shares that is there."""
    (found,) = (path for path in (base(queue) / ".dropq" / "barriers").iterdir() if path.name[0] != ".")
    return found


def shares(queue: Queue, below: str = "") -> list[str]:
    """The names of the shares that are not settled, or of those that are, `below` how."""
    return sorted(entry.name for entry in os.scandir(folder(queue) / below) if entry.is_file() and entry.name[0] != ".")


def given(subscription: Subscription) -> Message:
    message = subscription.receive()
    assert message is not None
    return message


def test_a_barrier_whose_last_holder_died_as_it_settled_keeps_nobody_back_for_one_look(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    with queue.subscribe(max_backlog=None) as one:
        assert given(one).body == b"sync"
        (share,) = shares(queue)
        os.rename(folder(queue) / share, folder(queue) / "acked" / share)  # and there its holder dies
        assert given(one).body == b"a"
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


def test_a_barrier_whose_last_share_was_settled_is_settled_by_a_look_and_is_not_out(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    with queue.subscribe() as one:
        assert given(one).body == b"sync"
        (share,) = shares(queue)
        os.rename(folder(queue) / share, folder(queue) / "acked" / share)
        policy = Barrier(queue.context, one.id)
        policy.look(list(claimed_files(queue.context)))
        assert not policy.is_out
        assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


@pytest.mark.parametrize("whole", [False, True], ids=["and has moved it", "and has removed its shares"])
def test_two_who_see_the_last_share_settled_may_both_settle_the_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    queue = barriers(tmp_path)
    find = find_claim

    def find_and_come_second(context: QueueContext, owner: str) -> Claim | None:
        found = find(context, owner)
        if found is not None and "/processing/" in found.path and not shares(queue):
            os.rename(found.path, base(queue) / "processed" / found.own_name)
            if whole:
                shutil.rmtree(folder(queue))
        return found

    with queue.subscribe() as one:
        share = given(one)
        monkeypatch.setattr(barrier, "find_claim", find_and_come_second)
        share.ack()
        assert given(one).body == b"a"
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


@pytest.mark.parametrize("name", [".barrier%-0123456789-0", "barrier%-0123456789-0"], ids=["hidden", "whole"])
def test_what_a_crash_left_of_a_barrier_that_was_not_handed_out_is_swept_after_a_while(
    tmp_path: Path, name: str
) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    left = base(queue) / ".dropq" / "barriers" / name
    left.mkdir(parents=True)
    clock.ms = reading.changed_ms(str(left)) + STAGING * 1000
    queue.sweep()
    assert left.exists()
    clock.ms += 1
    queue.sweep()
    assert not left.exists()


def test_a_sweep_counts_the_shares_that_it_gave_up_and_those_that_outlived_their_leases(tmp_path: Path) -> None:
    clock = Clock()
    queue = barriers(tmp_path, clock=clock)
    with queue.subscribe(lease_period="10s") as one, reopened(queue).subscribe(lease_period="10s") as other:
        assert given(one).body == given(other).body == b"sync"
        clock.advance(11)
        os.unlink(base(queue) / ".dropq" / "consumers" / other.id)  # it has no sign of life any more, and cannot take
        assert queue.sweep().barriers == 2
        assert [share.partition(",")[0] for share in shares(queue)] == sorted([f"{one.id}-0", f"{other.id}-0"])
        assert queue.sweep().barriers == 1
        assert [share.partition(",")[0] for share in shares(queue)] == [f"{one.id}-0"]
        assert [share.partition(",")[0] for share in shares(queue, "left")] == [f"{other.id}-0"]
        assert names_in(queue, "target") != []


def test_a_barrier_of_which_nobody_had_taken_a_share_returns_uncounted(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    with queue.subscribe() as one:
        assert given(one).body == b"sync"
        (share,) = shares(queue)
        os.rename(folder(queue) / share, folder(queue) / "left" / share.replace(",1~", ",0~"))  # as who ends before
        queue.sweep()
        assert [(message.body, message.delivery_count) for message in queue.browse()] == [(b"sync", 0), (b"a", 0)]


def test_a_message_that_was_sent_with_a_delay_keeps_no_barrier_waiting(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    queue.send(b"later", delay="1h")
    queue.send(b"sync", type="sync")
    with queue.subscribe() as one:
        assert given(one).body == b"sync"


def test_another_process_settles_a_share_by_its_receipt(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    with queue.subscribe(detached=True, lease_period="1h") as one, queue.subscribe() as other:
        receipt = given(one).receipt
        assert receipt is not None
        in_child(lambda: reopened(queue).claimed(receipt).ack())
        (acked,) = shares(queue, "acked")
        assert acked.startswith(f"{one.id}-")
        assert where(queue) == {"processing": [b"sync"], "target": [b"a"]}
        given(other).ack()
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


def test_what_the_queue_s_filter_keeps_out_keeps_no_barrier_waiting_and_is_none(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'", filter="JMSPriority > 3")
    queue.send(b"not in the queue", priority=1)
    queue.send(b"no barrier", type="sync", priority=1)
    queue.send(b"sync", type="sync")
    with queue.subscribe() as one:
        assert given(one).body == b"sync"
    assert sorted(os.listdir(base(queue) / "processing")) == []


def test_what_has_expired_keeps_no_barrier_waiting(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock, barrier_expression="JMSType = 'sync'")
    queue.send(b"late", expires_in="10s", properties={"kind": "b"})
    queue.send(b"sync", type="sync")
    clock.advance(11)
    with queue.subscribe(filter="kind IS NULL") as one:
        assert given(one).body == b"sync"


def test_a_barrier_that_all_have_left_counts_as_delivered_if_one_of_them_had_it(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    with queue.subscribe(), queue.subscribe() as one, queue.subscribe():
        assert given(one).body == b"sync"
    assert [(message.body, message.delivery_count) for message in queue.browse()] == [(b"sync", 1), (b"a", 0)]


def test_a_barrier_whose_only_holder_died_returns_and_counts_as_delivered(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    dead = queue.subscribe()
    assert given(dead).body == b"sync"
    assert dead._presence is not None
    dead._presence.abandon()
    queue.sweep()
    assert [(message.body, message.delivery_count) for message in queue.browse()] == [(b"sync", 1), (b"a", 0)]


def test_a_sweep_passes_over_a_share_that_was_settled_since_it_was_listed(tmp_path: Path) -> None:
    clock = Clock()
    queue = barriers(tmp_path, clock=clock)

    def give_back_what_is_settled(self: Shares, held: Claim) -> object:
        os.rename(held.path, folder(queue) / "acked" / held.filename)
        return Transitions.give_back(self, held)

    with queue.subscribe(lease_period="10s") as one:
        assert given(one).body == b"sync"
        clock.advance(11)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shares, "give_back", give_back_what_is_settled)
            assert queue.sweep().barriers == 0
        assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}  # and it has seen to the rest
