"""Barriers, call by call and among consumers: when they are handed out, who settles them, what a crash leaves."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
from actors import Actor, start
from children import in_child
from forks import DIED, forked
from helpers import FRESH, Clock, base, make_queue, names_in, private, processed, reopened, take, until, where

from dropq import ConfigError, LeaseLost, Message, Queue, StorageError, Subscription
from dropq.format.claims import Claim
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import claimed_files, find_claim
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.timing import Timing
from dropq.policies import barrier
from dropq.policies.barrier import Barrier, Shares
from dropq.queue.stream_journal import check_semantics
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.storage.files import Storage

#: Seconds for which what a crash left of a barrier that was not handed out may lie there.
STAGING = 60


def barriers(path: Path, **options: Any) -> Queue:
    return make_queue(path, barrier_expression="JMSType = 'sync'", **options)


def with_barrier(path: Path, **options: Any) -> Queue:
    """A queue whose first message is a barrier, with a message behind it."""
    queue = barriers(path, timing=FRESH, **options)
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
    queue = with_barrier(tmp_path)
    with queue.subscribe(max_backlog=None) as one:
        assert given(one).body == b"sync"
        (share,) = shares(queue)
        os.rename(folder(queue) / share, folder(queue) / "acked" / share)  # and there its holder dies
        assert given(one).body == b"a"
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


def test_a_share_is_settled_though_the_barrier_cannot_be_archived_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = with_barrier(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise StorageError("Input/output error; the message stays in processing/")

    with queue.subscribe(max_backlog=None) as one:
        message = given(one)
        with monkeypatch.context() as disk:
            disk.setattr(Claims, "archive", refused)
            message.ack()
        assert not message.held
        queue.sweep()
    assert where(queue)["processed"] == [b"sync"]


@pytest.mark.parametrize("refused", ["write_small", "remove_tree"])
def test_a_share_whose_disk_refuses_is_held_or_settled_as_its_holder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    queue = with_barrier(tmp_path)

    def full(self: Storage, path: str, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with queue.subscribe(max_backlog=None) as one:
        message = given(one)
        monkeypatch.setattr(Storage, refused, full)
        if refused == "write_small":
            with pytest.raises(StorageError, match="the share of the barrier is still held"):
                message.reject("no")
            monkeypatch.undo()
        message.reject("no")
        assert not message.held
    assert where(queue)["error"] == [b"sync"]


def test_a_barrier_waits_for_what_is_committed_before_it_and_has_not_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = barriers(tmp_path, timing=FRESH)
    queue.send(b"1\n2\n", type="text")
    queue.send(b"sync", type="sync")
    with queue.subscribe() as one, queue.subscribe() as other:
        message = given(one)
        next(message.records()).ack()
        with monkeypatch.context() as standing:
            standing.setattr(fan_out, "roll_forward", lambda *_, **__: False)  # as where its holder died, or waits
            message.release()
            assert queue.counts()["processing"] == 1
            assert other.receive() is None
        assert given(other).body == b"2\n"


def test_a_barrier_whose_last_share_was_settled_is_settled_by_a_look_and_is_not_out(tmp_path: Path) -> None:
    queue = with_barrier(tmp_path)
    with queue.subscribe() as one:
        assert given(one).body == b"sync"
        (share,) = shares(queue)
        os.rename(folder(queue) / share, folder(queue) / "acked" / share)
        policy = Barrier(queue.context, one.id)
        policy.refresh(list(claimed_files(queue.context)))
        assert policy.decision.allowed
        assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


@pytest.mark.parametrize("whole", [False, True], ids=["and has moved it", "and has removed its shares"])
def test_two_who_see_the_last_share_settled_may_both_settle_the_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    queue = with_barrier(tmp_path)
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
    queue = with_barrier(tmp_path, clock=clock)
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
    queue = with_barrier(tmp_path)
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
    queue = with_barrier(tmp_path)
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
    queue = with_barrier(tmp_path)
    with queue.subscribe(), queue.subscribe() as one, queue.subscribe():
        assert given(one).body == b"sync"
    assert [(message.body, message.delivery_count) for message in queue.browse()] == [(b"sync", 1), (b"a", 0)]


def test_a_barrier_whose_only_holder_died_returns_and_counts_as_delivered(tmp_path: Path) -> None:
    queue = with_barrier(tmp_path)
    dead = queue.subscribe()
    assert given(dead).body == b"sync"
    assert dead._presence is not None
    dead._presence.abandon()
    queue.sweep()
    assert [(message.body, message.delivery_count) for message in queue.browse()] == [(b"sync", 1), (b"a", 0)]


def test_a_sweep_passes_over_a_share_that_was_settled_since_it_was_listed(tmp_path: Path) -> None:
    clock = Clock()
    queue = with_barrier(tmp_path, clock=clock)

    give_back = Shares.give_back

    def give_back_what_is_settled(self: Shares, held: Claim) -> object:
        os.rename(held.path, folder(queue) / "acked" / held.filename)
        return give_back(self, held)

    with queue.subscribe(lease_period="10s") as one:
        assert given(one).body == b"sync"
        clock.advance(11)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shares, "give_back", give_back_what_is_settled)
            assert queue.sweep().barriers == 0
        assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}  # and it has seen to the rest


# -- among consumers -----------------------------------------------------------------------------------------


def send(queue: Queue, *bodies: bytes) -> None:
    """Send messages; a body that begins with `sync` is a barrier."""
    for body in bodies:
        queue.send(body, type="sync" if body.startswith(b"sync") else None)


def test_a_barrier_waits_for_all_before_it_goes_to_everybody_and_holds_what_is_behind_it(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"a", b"b", b"sync", b"c")
    with queue.subscribe(max_backlog=None) as one, reopened(queue).subscribe(max_backlog=None) as other:
        before = one.receive_many(2)
        assert [message.body for message in before] == [b"a", b"b"]
        assert [one.receive(), other.receive()] == [None, None]
        before[0].ack()
        before[1].nack()
        assert other.receive() is not None  # b again: it comes before the barrier
        assert one.receive() is None
        other.held[0].ack()
        shares = [one.receive(), other.receive()]
        assert [share.body for share in shares if share] == [b"sync", b"sync"]
        assert [one.receive(), other.receive()] == [None, None]
        assert shares[0] and shares[1]
        shares[0].ack()
        assert [one.receive(), other.receive()] == [None, None]
        assert where(queue)["processing"] == [b"sync"]
        shares[1].ack()
        assert where(queue)["processed"] == [b"a", b"b", b"sync"]
        assert private(queue, "barriers") == []
        last = one.receive()
        assert last is not None
        assert last.body == b"c"


def test_priorities_do_not_carry_a_message_over_a_barrier(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"a", b"sync")
    queue.send(b"urgent", priority=9)
    with queue.subscribe(max_backlog=None) as one:
        first = one.receive()
        assert first is not None
        assert (first.body, one.receive()) == (b"a", None)
        first.ack()
        share = one.receive()
        assert share is not None
        assert (share.body, one.receive()) == (b"sync", None)


def test_a_message_given_back_with_a_delay_keeps_a_barrier_waiting(tmp_path: Path) -> None:
    clock = Clock()
    queue = barriers(tmp_path, clock=clock)
    send(queue, b"a", b"sync")
    with queue.subscribe(max_backlog=None) as one:
        first = one.receive()
        assert first is not None
        first.nack(delay=60)
        assert one.receive() is None
        clock.advance(61)
        queue.sweep()
        again = one.receive()
        assert again is not None
        assert again.body == b"a"


def test_a_barrier_that_comes_back_is_not_passed_by_what_was_listed_while_it_was_handed_out(tmp_path: Path) -> None:
    queue = barriers(tmp_path, timing=Timing(max_age=3600))
    send(queue, b"sync", b"a")
    with queue.subscribe() as one:
        assert given(one).body == b"sync"
        other = reopened(queue).subscribe(max_backlog=None)
        assert other.receive() is None
    assert where(queue) == {"target": [b"a", b"sync"]}
    assert given(other).body == b"sync"
    other.close()


def test_a_barrier_that_comes_back_in_a_look_is_not_passed_in_it(tmp_path: Path) -> None:
    queue = barriers(tmp_path, timing=Timing(sweep_interval=3600, max_age=3600))
    send(queue, b"sync", b"a")
    with queue.subscribe() as one:
        assert given(one).body == b"sync"
        with reopened(queue).subscribe(max_backlog=None) as other:
            assert other.receive() is None
            (share,) = shares(queue)
            os.rename(folder(queue) / share, folder(queue) / "left" / share)  # and there whoever gave it up dies
            assert given(other).body == b"sync"


def test_a_barrier_that_has_another_name_by_now_is_not_passed_by_who_lost_a_race(tmp_path: Path) -> None:
    queue = barriers(tmp_path, timing=Timing(sweep_interval=3600, max_age=3600))
    send(queue, b"w", b"x", b"sync", b"a")
    with queue.subscribe(max_backlog=None) as one, reopened(queue).subscribe() as other:
        given(one).ack()
        given(other).ack()  # one has listed it, too
        target = base(queue) / "target"
        (barrier,) = (name for name in os.listdir(target) if (target / name).read_bytes() == b"sync")
        os.rename(target / barrier, target / barrier.replace("4.", "9.", 1))  # a script gives it another priority
        assert given(one).body == b"sync"


def test_a_barrier_waits_while_nobody_is_subscribed(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    queue.sweep()
    assert where(queue) == {"target": [b"a", b"sync"]}
    assert take(queue).body == b"sync"


@pytest.mark.parametrize("how", ["ack", "reject", "expire"])
def test_a_share_is_settled_as_a_message_is_and_the_barrier_with_the_last(tmp_path: Path, how: str) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        mine, theirs = one.receive(), other.receive()
        assert mine and theirs
        getattr(mine, how)(*(["not mine"] if how == "reject" else []))
        assert where(queue)["processing"] == [b"sync"]
        theirs.ack()
    state = {"ack": "processed", "reject": "error", "expire": "expired"}[how]
    assert where(queue) == {"target": [b"a"], state: [b"sync"]}
    if how == "reject":
        (message,) = queue.browse("error")
        assert message.reason is not None
        assert (message.reason["reason"], message.reason["detail"]) == ("rejected", "not mine")


def test_a_share_that_is_given_back_comes_again_to_the_same_subscription(tmp_path: Path) -> None:
    queue = barriers(tmp_path, max_deliveries=2)
    send(queue, b"sync")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        mine, theirs = one.receive(), other.receive()
        assert mine and theirs
        theirs.ack()
        mine.nack()
        assert other.receive() is None
        again = one.receive()
        assert again is not None
        assert (again.delivery_count, again.redelivered) == (2, True)
        again.nack()
    assert where(queue) == {"error": [b"sync"]}


def test_a_share_whose_lease_runs_out_comes_again_and_its_old_holder_cannot_settle_it(tmp_path: Path) -> None:
    clock = Clock()
    queue = barriers(tmp_path, clock=clock)
    send(queue, b"sync")
    with queue.subscribe(lease_period="10s", max_backlog=None) as one:
        mine = one.receive()
        assert mine is not None
        mine.extend("60s")
        clock.advance(30)
        queue.sweep()
        assert one.receive() is None
        clock.advance(31)
        queue.sweep()
        again = one.receive()
        assert again is not None
        with pytest.raises(LeaseLost):
            mine.ack()
        again.ack()
    assert where(queue) == {"processed": [b"sync"]}


def test_a_share_may_be_settled_by_its_receipt_from_elsewhere_but_not_by_the_id(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe(detached=True, lease_period="1h") as one:
        mine = one.receive()
        assert mine is not None
    elsewhere = reopened(queue)
    with pytest.raises(LeaseLost, match="several hold it"):
        elsewhere.claimed(mine.id)
    assert mine.receipt is not None
    elsewhere.claimed(mine.receipt).ack()
    assert where(queue) == {"processed": [b"sync"]}


def test_who_ends_without_settling_its_share_keeps_nobody_waiting(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    one, other = queue.subscribe(), reopened(queue).subscribe()
    assert one.receive() is not None
    one.close()
    share = other.receive()
    assert share is not None
    share.ack()
    message = other.receive()
    assert message is not None
    assert message.body == b"a"
    other.close()
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


def test_a_barrier_that_nobody_settled_returns_and_counts_if_anybody_had_it(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe() as one:
        assert one.receive() is not None
    assert where(queue) == {"target": [b"sync"]}
    assert next(queue.browse()).delivery_count == 1


def test_a_barrier_that_is_requeued_by_hand_leaves_nothing_behind(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe(max_backlog=None) as one:
        share = one.receive()
        assert share is not None
        assert [outcome.ok for outcome in queue.requeue(state="processing")] == [True]
        with pytest.raises(LeaseLost):
            share.ack()
        again = one.receive()
        assert again is not None
        again.ack()
    assert where(queue) == {"processed": [b"sync"]}
    assert private(queue, "barriers") == []


def test_a_barrier_that_is_expired_by_hand_is_taken_from_all_its_holders(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe(max_backlog=None) as one:
        share = one.receive()
        assert share is not None
        assert [outcome.ok for outcome in queue.expire()] == [True]
        with pytest.raises(LeaseLost):
            share.ack()
        assert one.receive() is None
    assert where(queue) == {"expired": [b"sync"]}
    assert private(queue, "barriers") == []


def test_a_queue_with_barriers_is_refused_to_readers_that_claim_by_batches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has barriers"):
        check_semantics(barriers(tmp_path).context)


def test_a_barrier_is_refused_where_messages_are_settled_before_they_are_delivered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="barrier_expression and semantics exclude each other"):
        barriers(tmp_path, semantics="at-most-once")


#: What changes files.
CHANGES = ("rename", "link", "make_folder", "unlink", "rename_folder", "remove_tree", "move", "write_small")


def dies(queue: Queue, at: int, *, after: bool) -> bool:
    """Take and ack a message in a process that dies before or after its `at`th change; False when it made fewer."""

    def consume() -> None:
        subscription = reopened(queue).subscribe()
        calls = iter(range(10**6))

        def wrapped(self: Storage, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
            last = next(calls) == at
            if last and not after:
                os._exit(DIED)
            result = method(self, *args, **options)
            if last:
                os._exit(DIED)
            return result

        for name in CHANGES:
            setattr(Storage, name, partialmethod(wrapped, getattr(Storage, name)))
        if (message := subscription.receive()) is not None:
            message.ack()
        os._exit(0)  # the subscription is not closed, also of a child that came to its end

    code = forked(consume)
    assert code in (0, DIED), f"the child ended with {code}"
    return code == DIED


@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.crashes
def test_a_barrier_is_handed_out_and_settled_whichever_call_its_holder_dies_at(tmp_path: Path, after: bool) -> None:
    for at in range(100):
        queue = barriers(tmp_path / f"root-{at}", timing=FRESH)
        send(queue, b"sync", b"a")
        with reopened(queue).subscribe() as other:
            died = dies(queue, at, after=after)
            share = other.receive(10)
            assert share is not None, f"call {at}: {where(queue)} {private(queue, 'barriers')}"
            assert share.body == b"sync"
            assert where(queue) == {"processing": [b"sync"], "target": [b"a"]}, f"call {at}"
            share.ack()
            message = other.receive(10)
            assert message is not None
            message.ack()
        assert where(queue) == {"processed": [b"a", b"sync"]}, f"call {at}"
        assert [name for name in private(queue, "barriers") if name[0] != "."] == [], f"call {at}"
        if not died:
            break
    else:
        pytest.fail("the child never came to its end")
    assert at > 8


def test_a_claim_of_a_barrier_whose_shares_are_gone_is_returned_by_a_sweep(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    (name,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / f"barrier%-0123456789-0,0,1~{name}")
    assert queue.sweep().barriers == 1
    assert where(queue) == {"target": [b"sync"]}
    assert next(queue.browse()).delivery_count == 0


def before(
    patch: pytest.MonkeyPatch, method: str, concerns: Callable[[str, str], bool], act: Callable[[], None]
) -> None:
    """Act once, just before the first call of a method of the storage whose two paths it concerns."""
    real = getattr(Storage, method)
    pending = [act]

    def wrapped(self: Storage, source: str, destination: str, *args: Any, **options: Any) -> Any:
        if pending and concerns(source, destination):
            pending.pop()()
        return real(self, source, destination, *args, **options)

    patch.setattr(Storage, method, wrapped)


@pytest.mark.parametrize(
    ("method", "concerns"),
    [
        ("link_or_copy", lambda _, to: "/barriers/" in to),
        ("rename", lambda _, to: "/processing/barrier%" in to),
        ("rename_folder", lambda source, _: "/barriers/." in source),
    ],
    ids=["a link", "the claim", "the commit"],
)
def test_a_barrier_that_a_sweep_dropped_while_its_holder_stood_still_comes_to_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, concerns: Callable[[str, str], bool]
) -> None:
    clock = Clock()
    queue = with_barrier(tmp_path, clock=clock)

    def stand_still() -> None:
        clock.advance(STAGING + 1)
        queue.sweep()

    with queue.subscribe(max_backlog=None) as one:
        before(monkeypatch, method, concerns, stand_still)
        assert one.receive() is None
        assert where(queue) == {"target": [b"a", b"sync"]}
        assert private(queue, "barriers") == []
        share = given(one)
        assert share.body == b"sync"
        assert share.delivery_count == 1
        share.ack()
        assert given(one).body == b"a"


def test_a_sweep_that_is_about_to_drop_a_barrier_leaves_it_alone_when_its_holder_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    queue = with_barrier(tmp_path, clock=clock)
    decided, handed_out = threading.Event(), threading.Event()

    def wait_for_holder() -> None:
        decided.set()
        assert handed_out.wait(30)

    sweeper = threading.Thread(target=reopened(queue).sweep)

    def stand_still() -> None:
        clock.advance(STAGING + 1)
        sweeper.start()
        assert decided.wait(30)

    before(monkeypatch, "rename_folder", lambda _, to: "/.gone-" in to, wait_for_holder)
    before(monkeypatch, "rename", lambda _, to: "/processing/barrier%" in to, stand_still)
    with queue.subscribe() as one:
        share = given(one)
        handed_out.set()
        sweeper.join(30)
        assert where(queue) == {"processing": [b"sync"], "target": [b"a"]}
        share.ack()
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}
    assert private(queue, "barriers") == []


def test_a_barrier_whose_holder_died_between_claim_and_commit_is_handed_out_by_the_next_attempt(tmp_path: Path) -> None:
    queue = with_barrier(tmp_path)
    with queue.subscribe() as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shares, "commit", lambda self: False)
        patch.setattr(Shares, "drop", lambda self, claim: None)  # it dies here
        assert one.receive() is None
    assert where(queue) == {"processing": [b"sync"], "target": [b"a"]}
    with reopened(queue).subscribe() as other:
        share = other.receive(10)
        assert share is not None
        assert share.body == b"sync"
        assert share.delivery_count == 1


@pytest.mark.crashes
def test_many_consumers_of_whom_some_are_killed_pass_barrier_after_barrier(tmp_path: Path, stage: list[Actor]) -> None:
    queue = barriers(tmp_path / "root")
    for number in range(10):
        send(queue, *(f"{number}-{n}".encode() for n in range(5)), f"sync-{number}".encode())
    notes = tmp_path / "notes"
    consumers = [start("lane", tmp_path / "root", notes) for _ in range(3)]
    stage += consumers
    for done in (10, 25, 40):
        until(partial(lambda n: processed(queue) >= n, done), f"{done} messages to be processed")
        victim = consumers.pop(0)
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        consumers.append(start("lane", tmp_path / "root", notes))
        stage.append(consumers[-1])
    until(lambda: processed(queue) == 60, "all to be processed")
    assert os.listdir(notes / "violations") == []
    assert where(queue).keys() == {"processed"}
    assert len(set(where(queue)["processed"])) == 60


def refusing(patch: pytest.MonkeyPatch, method: str, part: str) -> None:
    """Let a call of the storage fail where a path has this part: the disk is full."""
    real = getattr(Storage, method)

    def refuse(self: Storage, *args: Any, **options: Any) -> Any:
        if any(part in str(arg) for arg in args):
            raise OSError(errno.ENOSPC, "No space left on device", args[0])
        return real(self, *args, **options)

    patch.setattr(Storage, method, refuse)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("make_folder", "/barriers/"),
        ("link_or_copy", "/barriers/"),
        ("rename_folder", "/barriers/"),
        ("rename", "/processing/"),
    ],
)
def test_a_barrier_that_cannot_be_handed_out_is_not_passed_by(tmp_path: Path, method: str, part: str) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    with queue.subscribe(max_backlog=None) as one:
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, method, part)
            for _ in range(3):
                with pytest.raises(StorageError):
                    one.receive()
        assert where(queue) == {"target": [b"a", b"sync"]}
        assert len(private(queue, "barriers")) <= 1  # what was staged last, where it was not to be claimed
        share = one.receive()
        assert share is not None
        assert share.body == b"sync"
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, "rename", "/acked/")
            with pytest.raises(StorageError):
                share.ack()
        share.ack()
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}
    assert private(queue, "barriers") == []


def test_a_barrier_that_comes_back_is_not_delayed(tmp_path: Path) -> None:
    queue = barriers(tmp_path, redelivery_delay="1h")
    send(queue, b"sync", b"a")
    with queue.subscribe() as one:
        assert one.receive() is not None
    assert where(queue) == {"target": [b"a", b"sync"]}
    assert take(queue).body == b"sync"


def test_an_administrator_s_sweep_leaves_a_barrier_to_those_who_live_and_gives_up_what_nobody_has(
    tmp_path: Path,
) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe() as one:
        share = one.receive()
        assert share is not None
        assert queue.sweep(unleased_older_than=0).total == 0
        assert [finding.kind for finding in queue.fsck()] == []
        os.unlink(base(queue) / ".dropq" / "consumers" / one.id)  # as where a file system has no locks
        assert queue.sweep(unleased_older_than=0).barriers == 1
        assert where(queue) == {"target": [b"sync"]}
        with pytest.raises(LeaseLost):
            share.ack()


def test_a_damaged_word_about_a_share_does_not_keep_a_barrier(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        mine, theirs = one.receive(), other.receive()
        assert mine and theirs
        mine.reject("no")
        (token,) = private(queue, "barriers")
        (base(queue) / ".dropq" / "barriers" / token / ".why.json").write_bytes(b"")
        theirs.ack()
    assert where(queue) == {"error": [b"sync"]}


def test_what_somebody_leaves_among_the_barriers_stops_no_sweep(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    folder = base(queue) / ".dropq" / "barriers"
    (folder / "stray").write_text("x")
    queue.send(b"a")
    with queue.subscribe(lease_period="10s") as one:
        assert one.receive() is not None
        clock.advance(11)
        assert queue.sweep().lapsed == 1
    assert where(queue) == {"target": [b"a"]}


def test_what_is_before_a_barrier_and_not_for_us_keeps_it_waiting(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    queue.send(b"other's", properties={"kind": "b"})
    send(queue, b"sync", b"a")
    with queue.subscribe(filter="kind = 'a'", max_backlog=None) as one, reopened(queue).subscribe() as other:
        assert one.receive() is None
        message = other.receive()
        assert message is not None
        message.ack()
        shares = one.receive(5), other.receive(5)
        assert [share and share.body for share in shares] == [b"sync", b"sync"]
