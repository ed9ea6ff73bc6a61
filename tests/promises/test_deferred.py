"""An ack that comes before its message settles it once, and the message is not delivered, whoever dies when."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from children import in_child, killed_at_each_call
from helpers import FRESH, Clock, Make, base, drop, first_and_long, make_queue, reopened, take, where

from dropq import LeaseLost, Message, Queue, StorageError
from dropq.lifecycle import early_acks
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.timing import Timing
from dropq.storage import reading
from dropq.storage.files import Storage


def acks(queue: Queue) -> list[str]:
    """The ids whose acks are remembered, as plain system calls see them."""
    folder = base(queue) / ".dropq" / "acks"
    return sorted(os.listdir(folder)) if folder.exists() else []


def send_as(queue: Queue, id: str, body: bytes, **options: Any) -> None:
    """Send a message whose id is known, as one is that another process is about to send."""
    queue.send(body, message_id=id, **options)


@pytest.fixture
def id(clock: Clock) -> str:
    """The id of a message that is yet to come."""
    return f"{clock.ms:013d}000-0123456789"


# -- it is remembered --------------------------------------------------------------------------------------------------


def test_an_ack_of_what_is_nowhere_is_remembered_and_acknowledges_nothing_yet(make: Make, id: str) -> None:
    queue = make()
    assert queue.ack(id, defer=True) is False
    assert acks(queue) == [id]
    assert (base(queue) / ".dropq" / "acks" / id).read_bytes() == b""
    assert queue.fsck() == []


def test_an_ack_is_not_remembered_unless_it_is_asked_for(make: Make, id: str) -> None:
    queue = make()
    assert queue.ack(id) is False
    assert acks(queue) == []


@pytest.mark.parametrize("options", [{}, {"semantics": "at-most-once"}, {"lease_period": "1m"}, {"leasing": "strict"}])
def test_the_message_is_archived_when_it_comes_and_not_delivered(make: Make, id: str, options: dict[str, str]) -> None:
    queue = make(**options)
    queue.ack(id, defer=True)
    send_as(queue, id, b"a")
    queue.send(b"b")
    assert take(queue).body == b"b"
    assert queue.receive() is None
    assert where(queue)["processed"] == ([b"a", b"b"] if "semantics" in options else [b"a"])
    assert acks(queue) == []


def test_subscriptions_of_every_kind_meet_it(make: Make, clock: Clock) -> None:
    queue = make(history=False)
    kinds: list[dict[str, Any]] = [
        {},
        {"filter": "n = 1"},
        {"detached": True, "lease_period": "1m"},
        {"max_backlog": None},
    ]
    for number, options in enumerate(kinds):
        id = f"{clock.ms:013d}00{number}-0123456789"
        queue.ack(id, defer=True)
        with queue.subscribe(**options) as subscription:
            assert subscription.receive() is None
            send_as(queue, id, b"a")
            assert subscription.receive() is None
        assert where(queue) == {} and acks(queue) == []


@pytest.mark.parametrize("options", [{}, {"max_backlog": 5}])
def test_a_message_that_was_acknowledged_before_is_archived_when_its_time_is_over_too(
    make: Make, clock: Clock, id: str, options: dict[str, int]
) -> None:
    queue = make(timing=FRESH, **options)
    queue.ack(id, defer=True)
    send_as(queue, id, b"a", expires_in="1m")
    clock.advance(61)
    assert [explained.why for explained in queue.explain()] == ["acked"]
    assert queue.sweep().expired == 0
    assert queue.receive() is None
    assert where(queue) == {"processed": [b"a"]} and acks(queue) == []


def test_a_message_expires_when_its_ack_is_too_old(make: Make, clock: Clock, id: str) -> None:
    queue = make(timing=FRESH, deferred_ack_expiration="1h")
    queue.ack(id, defer=True)
    send_as(queue, id, b"a", expires_in="1m")
    clock.advance(3700)
    assert [explained.why for explained in queue.explain()] == ["expired"]
    assert queue.sweep().expired == 1
    assert where(queue) == {"expired": [b"a"]}


@pytest.mark.parametrize("odd", ["%00", "%2E", "%2E%2E", "%2E%2E%2F%2E%2E%2Ftarget", "{id}%2Fx"])
def test_a_name_that_could_lead_out_of_the_acks_expires_as_any_other(
    make: Make, clock: Clock, id: str, odd: str
) -> None:
    queue = make(timing=FRESH, expiration="1m")
    queue.ack(id, defer=True)
    drop(queue, f"4.{odd.format(id=id)}.B.1", b"a")
    clock.advance(61)
    assert [explained.why for explained in queue.explain()] == ["expired"]
    assert queue.sweep().expired == 1
    assert where(queue) == {"expired": [b"a"]}


def test_an_ack_in_a_topic_is_not_remembered(make: Make, id: str) -> None:
    topic = make().root.create_topic("t")
    with pytest.raises(ValueError, match=f"the ack of '{id}' cannot be deferred: t is a topic"):
        topic.queue.ack(id, defer=True)
    assert acks(topic.queue) == []


def test_who_waits_for_a_message_goes_on_waiting(make: Make, id: str) -> None:
    queue = make()
    queue.ack(id, defer=True)
    send_as(queue, id, b"a")
    assert queue.receive(timeout="100ms") is None
    queue.send(b"b")
    message = queue.receive(timeout="10s")
    assert message is not None and message.body == b"b"


def test_a_message_that_is_delayed_meets_it_when_it_is_due(make: Make, clock: Clock, id: str) -> None:
    queue = make(timing=FRESH)
    queue.ack(id, defer=True)
    send_as(queue, id, b"before", delay="1m")
    assert queue.receive() is None and where(queue) == {"delayed": [b"before"]}
    clock.advance(61)
    assert queue.receive() is None
    assert where(queue) == {"processed": [b"before"]}
    assert acks(queue) == []


@pytest.mark.parametrize("defer", [False, True])
def test_a_message_that_is_delayed_is_acknowledged_where_it_lies(
    make: Make, clock: Clock, id: str, defer: bool
) -> None:
    queue = make(timing=FRESH)
    send_as(queue, id, b"a", delay="1m")
    assert queue.ack(id, defer=defer) is True
    assert where(queue) == {"processed": [b"a"]} and acks(queue) == []
    assert queue.ack(id, defer=defer) is False
    clock.advance(61)
    assert queue.receive() is None


def test_what_was_given_back_and_is_delayed_is_acknowledged_where_it_lies(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    message.nack("1m")
    assert queue.ack(message.id) is True
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("delay", [None, "1m"])
def test_while_a_queue_is_paused_an_ack_leaves_what_waits_alone_and_is_remembered_where_that_is_asked(
    make: Make, clock: Clock, delay: str | None
) -> None:
    queue = make(timing=FRESH)
    sent = queue.send(b"a", delay=delay)
    queue.pause()
    assert queue.ack(sent.id) is False
    assert acks(queue) == []
    with pytest.raises(LeaseLost, match="which is paused: what waits stays until `dropq resume q`"):
        queue.claimed(sent.id)
    assert queue.ack(sent.id, defer=True) is False
    assert where(queue) == {"target" if delay is None else "delayed": [b"a"]} and acks(queue) == [sent.id]
    queue.resume()
    clock.advance(61)
    assert queue.receive() is None
    assert where(queue) == {"processed": [b"a"]} and acks(queue) == []


def test_while_a_queue_is_paused_an_ack_settles_what_is_held(make: Make) -> None:
    queue = make()
    sent = queue.send(b"a")
    take(queue)
    queue.pause()
    assert queue.ack(sent.id) is True
    assert where(queue) == {"processed": [b"a"]}


def test_a_script_s_send_under_a_known_id_meets_it(make: Make, id: str) -> None:
    queue = make()
    queue.ack(id, defer=True)
    drop(queue, f"9.{id}.T", b"a")
    assert queue.receive() is None
    assert where(queue) == {"processed": [b"a"]}


def test_it_is_used_up_by_one_message(make: Make, id: str) -> None:
    queue = make()
    queue.ack(id, defer=True)
    for body in (b"first", b"second"):
        send_as(queue, id, body)
    delivered = take(queue)
    assert queue.receive() is None
    assert len(where(queue)["processed"]) == 1 and where(queue)["processed"] != [delivered.body]


def test_another_process_remembers_and_another_meets_it(make: Make, id: str) -> None:
    queue = make()
    assert in_child(lambda: reopened(queue).ack(id, defer=True)) is False
    send_as(queue, id, b"a")
    assert in_child(lambda: reopened(queue).receive() is None)
    assert where(queue) == {"processed": [b"a"]}


def test_messages_behind_a_full_view_meet_it(tmp_path: Path, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.lifecycle.view.TargetView.worn", False)
    queue = make_queue(tmp_path, timing=Timing(view_depth=2, max_age=3600))
    queue.send_many([b"1", b"2"])
    with queue.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is not None
        queue.ack(id, defer=True)
        send_as(queue, id, b"a", priority=0)
        queue.send(b"last", priority=0)
        assert [message.body for message in subscription.receive_many(5)] == [b"2", b"last"]
    assert where(queue)["processed"] == [b"a"]


# -- what is there -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leasing", ["sublet", "strict"])
def test_what_waits_is_acknowledged_at_once(make: Make, leasing: str) -> None:
    queue = make(leasing=leasing)
    sent = queue.send(b"a")
    assert queue.ack(sent.id, defer=True) is True
    assert where(queue) == {"processed": [b"a"]} and acks(queue) == []


def test_what_is_held_is_acknowledged_at_once_or_left_alone_where_leasing_is_strict(make: Make) -> None:
    for leasing, done in (("sublet", True), ("strict", False)):
        queue = make(leasing=leasing)
        queue.send(b"a")
        message = take(queue)
        assert reopened(queue).ack(message.id, defer=True) is done
        assert acks(queue) == [], "and nothing is remembered that would take it from its holder"
        assert where(queue) == {"processed" if done else "processing": [b"a"]}


@pytest.mark.parametrize("settle", [Message.ack, Message.expire, lambda message: message.reject("r")])
def test_what_is_settled_is_not_remembered(make: Make, settle: Callable[[Message], None]) -> None:
    queue = make()
    sent = queue.send(b"a")
    settle(take(queue))
    assert queue.ack(sent.id, defer=True) is False
    assert acks(queue) == []


def test_a_message_that_comes_between_is_acknowledged(make: Make, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    remember = early_acks.remember

    def then_it_comes(context: QueueContext, message_id: str) -> None:
        remember(context, message_id)
        send_as(queue, id, b"a")

    monkeypatch.setattr(early_acks, "remember", then_it_comes)
    assert queue.ack(id, defer=True) is True
    assert where(queue) == {"processed": [b"a"]} and acks(queue) == []


@pytest.mark.parametrize("id", ["order-17", "report.csv", "", "../../x", "1763805600000000-012345678", "a/b"])
def test_only_ids_that_dropq_made_can_be_deferred(make: Make, id: str) -> None:
    queue = make()
    with pytest.raises(ValueError, match="cannot be deferred: only ids that dropq made"):
        queue.ack(id, defer=True)
    assert acks(queue) == []


# -- for how long ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "seconds"), [({}, 86_400), ({"deferred_ack_expiration": "10m"}, 600)])
def test_it_is_remembered_as_long_as_the_queue_says(
    make: Make, clock: Clock, id: str, options: dict[str, str], seconds: int
) -> None:
    queue = make(timing=FRESH, **options)
    other = id.replace("-0", "-9")
    queue.ack(id, defer=True)
    queue.ack(other, defer=True)
    clock.advance(seconds - 5)
    send_as(queue, id, b"in time")
    assert [one.why for one in queue.explain()] == ["acked"]
    assert queue.receive() is None and queue.sweep().leftovers == 0
    clock.advance(10)
    send_as(queue, other, b"too late")
    assert [one.why for one in queue.explain()] == ["ready"]
    assert take(queue).body == b"too late"


def test_a_sweep_removes_what_is_too_old_and_nothing_else(make: Make, clock: Clock, id: str) -> None:
    queue = make()
    queue.ack(id, defer=True)
    old = base(queue) / ".dropq" / "acks" / id.replace("-0", "-9")
    old.touch()
    os.utime(old, (clock.ms / 1000 - 90_000,) * 2)
    assert queue.sweep().leftovers == 1
    assert acks(queue) == [id]


def test_an_ack_that_is_given_again_counts_from_then_on(make: Make, clock: Clock, id: str) -> None:
    queue = make()
    record = base(queue) / ".dropq" / "acks" / id
    queue.ack(id, defer=True)
    os.utime(record, (0, 0))
    queue.ack(id, defer=True)
    assert record.stat().st_mtime > clock.ms / 1000 - 3600
    assert acks(queue) == [id]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_message_whose_ack_is_used_up_meanwhile_is_delivered(
    make: Make, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.ack(id, defer=True)
    send_as(queue, id, b"a")
    unlink = Storage.unlink

    def another_was_first(self: Storage, path: str) -> bool:
        if "/acks/" in path:
            os.unlink(path)
        return unlink(self, path)

    monkeypatch.setattr(Storage, "unlink", another_was_first)
    message = queue.receive() or take(queue)
    assert (message.body, message.delivery_count, message.redelivered) == (b"a", 1, False)


def test_what_cannot_be_archived_stays_and_is_told_when_nothing_else_waits(
    make: Make, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.ack(id, defer=True)
    send_as(queue, id, b"a")
    queue.send(b"b")
    archive = Claims.archive

    def refused(self: Claims, *args: object, **options: object) -> None:
        raise StorageError("no space left; the message stays", errno=errno.ENOSPC)

    monkeypatch.setattr(Claims, "archive", refused)
    assert take(queue).body in (b"a", b"b"), "one that can be had is had"
    monkeypatch.setattr(Claims, "archive", archive)
    assert sorted(chain.from_iterable(where(queue).values())) == [b"a", b"b"]


def test_a_folder_of_acks_that_is_a_link_is_refused(make: Make, tmp_path: Path) -> None:
    queue = make()
    (tmp_path / "elsewhere").mkdir()
    (base(queue) / ".dropq" / "acks").rmdir()
    (base(queue) / ".dropq" / "acks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="symbolic link"):
        reopened(queue).counts()
    assert "linked-folder" in {finding.kind for finding in queue.fsck()}


def test_fsck_tells_of_an_ack_that_was_being_written(make: Make, clock: Clock, id: str) -> None:
    queue = make()
    queue.ack(id, defer=True)
    half = base(queue) / ".dropq" / "acks" / f".{id}.0123456789ab.tmp"
    half.touch()
    clock.advance(86_400)
    assert [(finding.kind, finding.path) for finding in queue.fsck()] == [("temporary", str(half))]
    assert [finding.repaired for finding in queue.fsck(repair=True)] == [True]
    assert acks(queue) == [id]


@pytest.mark.crashes
def test_whenever_the_consumer_dies_the_message_is_archived_or_comes_again(
    tmp_path: Path, clock: Clock, id: str
) -> None:
    roots = iter(range(1000))

    def build() -> Queue:
        queue = make_queue(tmp_path / str(next(roots)), clock=clock)
        queue.ack(id, defer=True)
        send_as(queue, id, b"a")
        return queue

    def receive(queue: Queue) -> None:
        with queue.subscribe() as subscription:
            assert subscription.receive() is None

    ends = set()
    for queue in killed_at_each_call(build, receive):
        assert sum(map(len, where(queue).values())) == 1, "in one place"
        queue.sweep()
        message = queue.receive()
        ends.add("delivered" if message else "archived")
        assert where(queue) == {"processing" if message else "processed": [b"a"]}
        assert acks(queue) == []
        queue.close()
    assert ends == {"delivered", "archived"}


@pytest.mark.parametrize("is_there", first_and_long([False, True]))
@pytest.mark.crashes
def test_whenever_the_one_who_acknowledges_dies_nothing_is_lost(
    tmp_path: Path, clock: Clock, id: str, is_there: bool
) -> None:
    roots = iter(range(1000))

    def build() -> Queue:
        queue = make_queue(tmp_path / str(next(roots)), clock=clock)
        queue.send(b"b")
        if is_there:
            send_as(queue, id, b"a")
        return queue

    for queue in killed_at_each_call(build, lambda queue: queue.ack(id, defer=True)):
        if not is_there:
            send_as(queue, id, b"a")
        queue.sweep()
        got = [queue.receive(), queue.receive()]
        delivered = {message.body for message in got if message is not None}
        assert delivered | {*where(queue).get("processed", [])} == {b"a", b"b"}
        assert sum(map(len, where(queue).values())) == 2
        queue.close()


# -- what it does not touch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["requeue", "replay"])
def test_what_comes_again_is_not_taken_for_what_was_acknowledged_before(make: Make, id: str, how: str) -> None:
    queue = make()
    send_as(queue, id, b"a")
    (name,) = os.listdir(base(queue) / "target")
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / name)  # a script has it
    assert queue.ack(id, defer=True) is False
    os.rename(base(queue) / "processing" / name, base(queue) / "processed" / name)
    assert acks(queue) == [id]
    outcomes = queue.requeue(state="processed") if how == "requeue" else queue.replay()
    assert [outcome.ok for outcome in outcomes] == [True]
    assert take(queue).body == b"a"


def test_acks_are_listed_anew_only_when_there_are_others(
    make: Make, id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, clock = tmp_path / "acks", Clock()
    listing = reading.Listing(str(folder), clock)
    assert listing.names() == frozenset()
    folder.mkdir()
    (folder / "a").touch()
    clock.advance(60)
    assert listing.names() == {"a"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.listdir", lambda path: pytest.fail("it has not changed"))
        assert listing.names() == {"a"}
    clock.advance(-60)
    (folder / "b").touch()
    assert listing.names() == {"a", "b"}
    (folder / "c").touch()  # within the same tick of the clock, maybe
    assert listing.names() == {"a", "b", "c"}
