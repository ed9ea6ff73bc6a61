"""The view of target/: ordered, bounded, shared out among consumers that get into each other's way."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import FRESH, drop, make_queue, reopened, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropq import Queue, Subscription
from dropq.format import names
from dropq.format.claims import Claim
from dropq.format.layout import ignoring
from dropq.format.message_file import MessageFile
from dropq.lifecycle import view
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.sidecars import Sidecars
from dropq.lifecycle.timing import Timing
from dropq.lifecycle.view import TargetView
from dropq.storage import reading
from dropq.storage.files import Storage
from dropq.storage.mounts import Mount

FILES = st.builds(
    lambda priority, time, rest: f"{priority}.{1763770000000000 + time:016d}-{time:010d}{rest}",
    st.sampled_from([-1, 0, 4, 9]),
    st.integers(0, 60),
    st.sampled_from([".B", ".T", ".B.JMS_dropq_delivery_countI1"]),
) | st.sampled_from(["by hand", "9.urgent.B", "4.by hand", "0.2024.report.csv", "-1.x.B.JMS_dropq_delivery_countI1"])


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    """A queue whose consumers look as seldom as they do in earnest."""
    with make_queue(tmp_path / "root") as queue:
        yield queue


def view_of(queue: Queue, depth: int | None = None) -> TargetView:
    context = queue.context
    return TargetView(
        context.layout.target, context.sidecars, ignoring(context.config.ignore), context.timing, depth=depth
    )


def offered(view: TargetView) -> list[str]:
    """All that a view offers, from its first piece to its last."""
    pieces = [[file.filename for file in view.view]]
    while view.go_on():
        pieces.append([file.filename for file in view.view])
    return list(itertools.chain.from_iterable(pieces))


def put(queue: Queue, files: set[str]) -> None:
    for path in Path(queue.layout.target).iterdir():
        path.unlink()
    for file in files:
        Path(queue.layout.target, file).touch()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.sets(FILES, max_size=60), depth=st.integers(1, 30), chunk=st.integers(1, 20))
def test_a_bounded_view_offers_the_first_of_all_in_order_and_then_what_lies_behind_them(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, files: set[str], depth: int, chunk: int
) -> None:
    put(queue, files)
    everything = [file.filename for file in view_of(queue).files()]
    assert sorted(everything) == sorted(files)
    bounded = view_of(queue, depth)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "CHUNK", chunk)
        for _ in range(2):  # the second listing knows names of the first
            bounded.refresh()
            assert [file.filename for file in bounded.view] == everything[:depth]
            assert offered(bounded) == everything[depth:]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.sets(FILES, max_size=60), consumers=st.integers(2, 5))
def test_each_consumer_is_offered_all_by_priority_and_each_message_is_in_the_share_of_one(
    queue: Queue, files: set[str], consumers: int
) -> None:
    put(queue, files)
    firsts: list[str] = []
    for rank in range(consumers):
        shared = view_of(queue)
        shared.refresh(rank, consumers)
        everything = offered(shared)
        assert set(everything) == files
        priorities = [queue.context.sidecars.parse(file).priority for file in everything]
        assert priorities == sorted(priorities, reverse=True)
        firsts += [file for file in files if view._number(file) % consumers == rank]
    assert sorted(firsts) == sorted(files)


def test_now_and_then_a_consumer_takes_the_oldest_of_the_others(queue: Queue) -> None:
    sent = [f"4.{one.id}.B" for one in queue.send_many([b"a"] * 500)]
    shared = view_of(queue)
    shared.refresh(0, 2)
    own = [file for file in sent if view._number(file) % 2 == 0]
    others = [file for file in sent if file not in own]
    begin = [file.filename for file in shared.view]
    assert begin[: view.OLDEST_EACH + 1] == [*own[: view.OLDEST_EACH], others[0]]
    assert [file for file in begin if file in others] == others[: len(own) // view.OLDEST_EACH]


def test_what_is_no_message_is_not_offered_by_a_view_that_is_ranked(tmp_path: Path) -> None:
    with make_queue(tmp_path, priority="/p") as queue:
        target = Path(queue.layout.target)
        (target / "folder").mkdir()
        (target / "link").symlink_to(tmp_path)
        sent = queue.send(b'{"p": 1}')
        with queue.subscribe(max_backlog=None) as consumer:
            assert [message.id for message in consumer.receive_many(10)] == [sent.id]
            assert sorted(os.listdir(target)) == ["folder", "link"]


@pytest.mark.parametrize("sharing", [(0, 1), (0, 2)])
def test_on_nfs_a_view_asks_what_a_name_is_when_it_is_about_to_be_taken_and_offers_no_folder_and_no_link(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, sharing: tuple[int, int]
) -> None:
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("nfs4"))
    for end in ("1000000000000000-0000000000.B", "by-hand.B"):
        os.mkdir(f"{queue.layout.target}/9.{end}")
        os.symlink(tmp_path, f"{queue.layout.target}/8.{end}")
        os.mkfifo(f"{queue.layout.target}/7.{end}")
    sent = {f"4.{one.id}.B" for one in queue.send_many([b"a"] * 100)}
    asked = list[str]()
    may_be_message = reading.may_be_message

    def ask(path: str) -> bool:
        asked.append(path)
        return may_be_message(path)

    monkeypatch.setattr(reading, "may_be_message", ask)
    shared = view_of(queue)
    shared.refresh(*sharing)
    assert not asked
    while (first := next(shared.view, None)) is None:
        assert shared.go_on()
    assert first.filename in sent and len(asked) <= 7
    assert len(offered(shared)) == 99
    shared.refresh(*sharing)
    for file in sent:
        os.unlink(f"{queue.layout.target}/{file}")
    assert set(offered(shared)) == sent  # other consumers took them: the claims fail, and tell that


def test_what_a_script_sent_is_offered_in_its_place_among_many_plain_ones(queue: Queue) -> None:
    drop(queue, "by-hand", b"a")
    queue.send_many([b"b"] * 50)
    drop(queue, "9.urgent.B", b"c")
    bounded = view_of(queue, 10)
    bounded.refresh()
    first, *others = [file.filename for file in bounded.view]
    assert first == "9.urgent.B"
    assert "by-hand" in others[:2]  # the kernel's clock, and ours, may tell the same millisecond


def test_a_file_that_was_taken_before_it_had_settled_counts_until_the_next_listing(queue: Queue) -> None:
    listed = view_of(queue)
    listed.unsettled["a.csv"] = 1
    assert listed.unsettled_before(MessageFile("4.1700000000000000-0000000001.B")) == 1


def test_names_that_begin_like_ours_and_are_ignored_are_passed_over(queue: Queue) -> None:
    for number in range(20):
        Path(queue.layout.target, f"4.{1763770000000000 + number}-0000000000.tmp").touch()
    sent = [f"4.{one.id}.B" for one in queue.send_many([b"a"] * 30)]
    bounded = view_of(queue, 10)
    for _ in range(2):
        bounded.refresh()
        assert offered(bounded) == sent


def test_a_file_whose_name_begins_like_ours_is_offered(queue: Queue) -> None:
    drop(queue, "4.1763770000000000 by hand", b"a")
    sent = [f"4.{one.id}.B" for one in queue.send_many([b"a"] * 3)]
    bounded = view_of(queue, 4)
    bounded.refresh()
    assert sorted(offered(bounded)) == sorted([*sent, "4.1763770000000000 by hand"])


@pytest.mark.parametrize("name", ["0.20241122 report.csv", "4.90012345.B", "4.1763770000000000-tail"])
def test_a_name_that_begins_like_ours_has_its_place_among_more_than_a_view_holds(queue: Queue, name: str) -> None:
    drop(queue, name, b"first")
    dropped = int(time.time() * 1000)
    until(lambda: time.time() * 1000 > dropped + 10, "its ctime, which the kernel's clock tells, is an earlier one")
    queue.send_many([b"a"] * 50)
    bounded = view_of(queue, 10)
    bounded.refresh()
    assert offered(bounded)[0] == name


def test_what_lies_behind_all_that_a_view_holds_is_received(queue: Queue) -> None:
    queue = reopened(queue, Timing(view_depth=10))
    queue.send_many([{"body": b"late", "expires_in": 0.001}] * 25)
    queue.send_many([b"others"] * 25)
    last = queue.send(b"mine", type="mine")
    until(lambda: queue.root.clock.now_ms() > int(last.id[:13]) + 10, "what is to expire has expired")
    with queue.subscribe(filter="JMSType = 'mine'", max_backlog=None) as consumer:
        assert [message.body for message in consumer.receive_many(100)] == [b"mine"]
    with queue.subscribe(max_backlog=None) as consumer:
        assert [message.body for message in consumer.receive_many(1)] == [b"others"]
        consumer._snapshot()
        queue.send(b"later")
        assert sorted(message.body for message in consumer.receive_many(100)) == [b"mine", *[b"others"] * 24]


def test_names_that_are_listed_and_cannot_be_had_keep_nobody_for_ever(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*args: object, **options: object) -> None:
        return None

    queue.send_many([b"a"] * 20)
    monkeypatch.setattr(Claims, "claim", gone)
    monkeypatch.setattr(TargetView, "worn", True)
    with queue.subscribe() as consumer:
        assert consumer.receive() is None


# -- several consumers ----------------------------------------------------------------------------------------------


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each message that anybody reached for, whether he got it."""
    found: list[bool] = []
    claim = Claims.claim

    def counted(self: Claims, file: MessageFile, owner: str, deadline: int, *, again: bool = False) -> Claim | None:
        claimed = claim(self, file, owner, deadline, again=again)
        found.append(claimed is not None)
        return claimed

    monkeypatch.setattr(Claims, "claim", counted)
    return found


def drained(subscriptions: list[Subscription], take: Callable[[Subscription], bool]) -> None:
    """Let subscriptions take one after the other, until none finds anything."""
    while sum(take(subscription) for subscription in subscriptions):
        pass


def acknowledge(subscription: Subscription) -> bool:
    message = subscription.receive()
    if message is None:
        return False
    message.ack()
    return True


def test_consumers_that_take_at_once_seldom_reach_for_the_same_message(queue: Queue, claims: list[bool]) -> None:
    queue.send_many([b"a"] * 4000)
    subscriptions = [queue.subscribe() for _ in range(4)]
    drained(subscriptions, acknowledge)
    assert claims.count(True) == queue.counts()["processed"] == 4000
    assert claims.count(False) < 0.1 * 4000


@pytest.mark.long
def test_consumers_seldom_reach_for_the_same_message_also_where_most_of_the_known_are_idle_or_dead(
    tmp_path: Path, claims: list[bool]
) -> None:
    for round in range(4):  # how often they meet is left to chance: one round of 4,000 varies by half of its mean
        with make_queue(tmp_path / str(round)) as queue:
            queue.send_many([b"a"] * 4000)
            for number in range(50):
                Path(queue.layout.consumers, f"dead-{number}").touch()
            subscriptions = [queue.subscribe() for _ in range(4)]
            drained(subscriptions, acknowledge)
    assert claims.count(True) == 4 * 4000
    assert claims.count(False) < 0.2 * 4 * 4000


def test_who_shares_with_nobody_gets_in_its_own_way_no_more(queue: Queue, claims: list[bool]) -> None:
    queue.send_many([b"a"] * 1000)
    with queue.subscribe(), queue.subscribe() as consumer:
        consumer._offers._shares_until = float("inf")
        while acknowledge(consumer):
            pass
    assert (claims.count(True), claims.count(False)) == (1000, 0)


def test_who_takes_little_from_each_view_comes_to_the_oldest_of_the_others_too(queue: Queue) -> None:
    queue.send_many([b"a"] * 500)
    shared = view_of(queue)
    seen = []
    for _ in range(view.OLDEST_EACH):
        shared.refresh(0, 2)
        seen += [next(shared.view).filename for _ in range(3)]
    assert any(view._number(file) % 2 for file in seen)


def test_consumers_take_all_that_one_of_them_leaves_which_is_busy(tmp_path: Path, claims: list[bool]) -> None:
    for round in range(4):  # how often they meet is left to chance
        with make_queue(tmp_path / str(round)) as queue:
            queue.send_many([b"a"] * 1000)
            busy, *others = [queue.subscribe() for _ in range(4)]
            held = busy.receive()
            assert held is not None
            drained(others, acknowledge)
            assert queue.counts()["processed"] == 999
            held.ack()
    assert claims.count(False) < 0.1 * 4 * 1000


def test_a_consumer_that_nobody_gets_in_the_way_of_keeps_to_the_order(queue: Queue) -> None:
    sent = [one.id for one in queue.send_many([b"a"] * 100)]
    with queue.subscribe(), queue.subscribe() as subscription:
        received = []
        while (message := subscription.receive()) is not None:
            received.append(message.id)
            message.ack()
    assert received == sent


def test_a_dead_consumer_has_no_share_for_long(queue: Queue) -> None:
    dead = queue.subscribe()
    assert dead._presence is not None
    dead._presence.abandon()
    queue.send_many([b"a"] * 200)
    subscriptions = [queue.subscribe(), queue.subscribe()]
    drained(subscriptions, acknowledge)
    assert len(os.listdir(queue.layout.consumers)) == 3
    queue.send_many([b"b"] * 200)
    subscriptions[0]._sweep.again = subscriptions[0]._attend_at = 0.0  # a second later
    drained(subscriptions, acknowledge)
    assert len(os.listdir(queue.layout.consumers)) == 2


def test_an_urgent_message_goes_first_also_when_it_is_in_the_share_of_another(queue: Queue) -> None:
    queue = reopened(queue, FRESH)
    queue.send_many([b"a"] * 100)
    with queue.subscribe() as idle, queue.subscribe() as busy:
        busy._offers._shares_until = idle._offers._shares_until = float("inf")
        for priority in range(5, 15):
            queue.send(b"urgent", priority=priority)
            message = busy.receive()
            assert message is not None and message.priority == priority
            message.ack()


def test_the_messages_of_one_priority_are_shared_by_all_consumers_alike() -> None:
    files = [names.plain_name(f"{1763770000000000 + n:016d}-{n * 7919:010d}", 4, "B") for n in range(4000)]
    for consumers in (2, 3, 4, 8):
        for rank in range(consumers):
            share = sum(1 for file in files if view._number(file) % consumers == rank)
            assert share == pytest.approx(len(files) / consumers, rel=0.15)


def test_a_bounded_view_keeps_what_it_knows_of_the_first_files_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a foreign file came its name does not tell: of as many as the view holds that is asked for once."""
    for number in range(40):
        (tmp_path / f"report-{number:02d}.csv").touch()
    came = {f"report-{number:02d}.csv": 1000 + number for number in range(40)}
    asked: list[str] = []

    def arrival(view: TargetView, file: MessageFile) -> int:
        asked.append(file.filename)
        return came[file.filename]

    monkeypatch.setattr(TargetView, "_arrival", arrival)
    view = TargetView(str(tmp_path), Sidecars("/nowhere", Storage("none")), lambda name: False, Timing(), depth=10)
    view.refresh()
    assert [file.filename for file in view.view] == [f"report-{number:02d}.csv" for number in range(10)]
    assert len(asked) == 40
    view.refresh()
    assert len(asked) == 40 + 30
    assert [file.filename for file in view.view] == [f"report-{number:02d}.csv" for number in range(10)]
    assert view.go_on()
    assert [file.filename for file in view.view] == [f"report-{number:02d}.csv" for number in range(10, 20)]


def test_a_view_that_policies_look_into_stays_as_it_is_however_many_are_taken_from_it(tmp_path: Path) -> None:
    one_view = Timing(max_age=60)  # all are taken from it
    with make_queue(tmp_path, timing=one_view, max_backlog=3, priority="/p") as queue:
        sent = [one.id for one in queue.send_many([b'{"p": 1}'] * 50)]
        consumer = queue.subscribe(max_backlog=None)
        got = [message.id for _ in range(2) for message in consumer.receive_many(3)]  # the second finds no room
        sizes = set()
        for id in sent[3:]:
            consumer.held[0].ack()
            message = consumer.receive()
            assert message is not None and message.id == id
            got.append(message.id)
            sizes.add(made_of(consumer._offers.view))
        assert got == sent and len(sizes) == 1
        consumer.close()


def made_of(view: object) -> int:
    """How many iterators a view leads through: each costs a frame when the innermost is asked."""
    found: dict[int, object] = {}
    unseen = [view]
    while unseen:
        one = unseen.pop()
        if isinstance(one, Iterator | tuple) and id(one) not in found:
            found[id(one)] = one
            unseen += gc.get_referents(one)
    return sum(isinstance(one, Iterator) for one in found.values())
