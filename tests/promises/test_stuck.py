"""What a stranger leaves in a topic or a queue keeps nothing behind it from its receivers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from children import few_descriptors, in_child, unprivileged
from forks import DIED, forked
from helpers import FRESH, Clock, add_route, base, drop, names_in, take, timed

from dropq import Queue, Root
from dropq.lifecycle.processing import claimed_files
from dropq.routing import Routers
from dropq.staging import fan_out
from dropq.staging.copies import LEASE, Renewal
from dropq.storage import reading
from dropq.storage.files import Storage
from dropq.topics.distribution import Distributor
from dropq.topics.receiver_topics import ReceiverTopics
from dropq.upkeep.sweep import QuickSweep


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    made = Root.create(tmp_path / "root", clock=clock)
    made.path.joinpath("dropq.toml").write_text('format = 1\n[defaults]\ndurability = "none"\nredelivery_delay = 0\n')
    return opened(made)


def opened(root: Root) -> Root:
    """The same root as another process opens it."""
    return timed(Root(root.path, clock=root.clock), FRESH)


def drop_closed(queue: Queue, name: str) -> None:
    """Send a file that nobody but a privileged user may read."""
    drop(queue, name, b"closed")
    (base(queue) / "target" / name).chmod(0)


def bodies(queue: Queue) -> list[bytes]:
    return [message.body for message in queue.browse()]


def why_in_error(queue: Queue) -> list[object]:
    for name in os.listdir(base(queue) / "error"):
        (base(queue) / "error" / name).chmod(0o600)  # who looks may not read it before, unless it is root
    return [(message.reason or {}).get("reason") for message in queue.browse("error")]


# -- a body that is closed to who distributes ------------------------------------------------------------------------


@pytest.mark.parametrize("filter", [None, "/a = 1"])
def test_a_file_that_may_not_be_read_goes_to_error_and_what_is_behind_it_is_distributed(
    root: Root, filter: str | None
) -> None:
    topic = root.create_topic("t")
    copies = topic.create_subscription("s", client_id="c", filter=filter)
    drop_closed(topic.queue, "a.csv")
    drop(topic.queue, "b.csv", b'{"a": 1}')
    unprivileged(lambda: opened(root).sweep())
    assert bodies(copies) == [b'{"a": 1}']
    assert why_in_error(topic.queue) == ["unreadable"] and names_in(topic.queue, "error") == ["a.csv"]


def test_explain_says_of_a_file_that_may_not_be_read_what_becomes_of_it_and_of_no_other(root: Root) -> None:
    topic = root.create_topic("t")
    topic.create_subscription("s", client_id="c", filter="/a = 1")
    drop_closed(topic.queue, "a.csv")
    drop(topic.queue, "b.csv", b"{}")
    said = unprivileged(lambda: [explained.why for explained in opened(root).queue("t").explain()])
    assert said == ["unreadable", "ready"]
    assert unprivileged(lambda: opened(root).queue("t").health().healthy)


def test_a_file_that_may_not_be_read_is_not_tried_again_and_again_by_a_selector_that_copies(root: Root) -> None:
    queue = root.create_queue("q")
    for name in ("x", "y"):
        root.create_queue(name)
        queue.add_selector(name, to=name, op="copy")
    drop_closed(queue, "a.csv")
    drop(queue, "b.csv", b"b")
    unprivileged(lambda: opened(root).queue("q").route())
    assert bodies(root.queue("x")) == bodies(root.queue("y")) == [b"b"]
    assert why_in_error(queue) == ["unreadable"] and names_in(queue, "error") == ["a.csv"]


# -- a foreign name that the receiver ignores ------------------------------------------------------------------------


def test_a_name_that_a_subscription_ignores_arrives_coded_and_keeps_its_id(
    root: Root,
) -> None:
    topic = root.create_topic("t", ignore=[])
    copies = topic.create_subscription("s", client_id="c")
    Path(copies.layout.config_file).write_text('ignore = ["*.part"]\n')
    drop(topic.queue, "batch.part", b"x")
    root.sweep()
    message = take(opened(root).queue("t/s.c"))
    assert (message.id, message.body) == ("batch.part", b"x")
    message.ack()
    assert "batch.part" not in names_in(copies, "processed")
    assert names_in(topic.queue, "processed") == ["batch.part"]


def test_a_name_that_every_subscription_takes_stays_as_it_is(root: Root) -> None:
    topic = root.create_topic("t", ignore=[])
    copies = topic.create_subscription("s", client_id="c")
    Path(copies.layout.config_file).write_text('ignore = ["*.tmp"]\n')
    drop(topic.queue, "batch.part", b"x")
    root.sweep()
    assert names_in(copies, "target") == ["batch.part"]


@pytest.mark.parametrize(("ignored", "coded"), [(["*.part"], True), (["*.tmp"], False)])
def test_a_route_codes_the_name_that_the_queue_behind_it_ignores(
    root: Root, ignored: list[str], *, coded: bool
) -> None:
    queue, there = root.create_queue("q", ignore=[]), root.create_queue("to", ignore=ignored)
    add_route(queue, "r", "1=1", to=base(there) / "target")
    drop(queue, "batch.part", b"x")
    queue.route()
    (message,) = there.browse()
    assert (message.id, message.body) == ("batch.part", b"x")
    assert (names_in(there, "target") != ["batch.part"]) == coded


# -- large bodies ----------------------------------------------------------------------------------------------------


def copying(root: Root) -> tuple[Queue, list[Queue]]:
    """A queue whose selectors copy what comes to two others."""
    queue = root.create_queue("q")
    made = [root.create_queue(name) for name in ("x", "y")]
    for target in made:
        queue.add_selector(target.name, to=target.name, op="copy")
    return queue, made


def published(root: Root) -> tuple[Queue, list[Queue]]:
    """A topic with two subscriptions."""
    topic = root.create_topic("t")
    return topic.queue, [topic.create_subscription(name, client_id="c") for name in ("x", "y")]


def hand_on(queue: Queue) -> None:
    """Copy what waits, as a router does."""
    queue.route()


BOTH = pytest.mark.parametrize("build", [copying, published])
Build = Callable[[Root], tuple[Queue, list[Queue]]]


@BOTH
def test_a_claim_is_renewed_within_a_copy_that_takes_longer_than_its_lease(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    queue, receivers = build(root)
    drop(queue, "big.iso", bytes(3 << 20))
    renew, passed = Renewal.__call__, [0.0]

    def slowly(self: Renewal) -> None:
        passed[0] += LEASE / 2
        clock.advance(LEASE / 2)
        renew(self)
        opened(root).queue(queue.name).sweep()

    monkeypatch.setattr("dropq.storage.files.COPIED_AT_ONCE", 1 << 18)
    monkeypatch.setattr("dropq.staging.copies.time.monotonic", lambda: time.monotonic_ns() / 1e9 + passed[0])
    monkeypatch.setattr(Renewal, "__call__", slowly)
    hand_on(queue)
    assert [bodies(receiver) for receiver in receivers] == [[bytes(3 << 20)]] * 2
    assert passed[0] > 10 * LEASE


@BOTH
def test_what_a_router_was_copying_when_it_was_killed_is_claimed_for_no_longer_than_a_lease_however_large_it_is(
    root: Root, clock: Clock, build: Build
) -> None:
    queue, _ = build(root)
    drop(queue, "big.iso", b"")
    os.truncate(base(queue) / "target" / "big.iso", 50 << 30)
    os.utime(base(queue) / "target" / "big.iso", (0, 0))

    def die(*args: object, **options: object) -> Any:
        os._exit(DIED)

    def copies() -> None:
        Storage.copy = die  # type: ignore[method-assign]
        hand_on(opened(root).queue(queue.name))

    assert forked(copies) == DIED
    (claim,) = claimed_files(queue.context)
    assert claim.claim is not None and 0 < claim.claim.deadline <= clock.now_ms() + LEASE * 1000


@pytest.mark.host
@pytest.mark.skipif(os.geteuid() != 0, reason="to give files to a group takes root")
def test_a_copy_has_the_modes_and_the_group_of_the_queue_that_it_goes_to(root: Root) -> None:
    queue = root.create_queue("q", file_mode="0600")
    there = root.create_queue("to", file_mode="0664", group=60103)
    queue.add_selector("c", to="to", op="copy")
    queue.send("m")
    queue.route()
    (copy,) = (base(there) / "target").iterdir()
    assert (copy.stat().st_mode & 0o777, copy.stat().st_gid) == (0o664, 60103)


# -- descriptors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 400])
def test_a_topic_may_have_more_subscriptions_than_a_process_has_descriptors(root: Root, used: int) -> None:
    topic = root.create_topic("t")
    made = [topic.create_subscription(f"s{number}", client_id="c") for number in range(120)]

    def publish() -> list[bool | None]:
        few_descriptors(used)
        own = opened(root).topic("t")
        with ThreadPoolExecutor(8) as threads:
            return [sent.distributed for sent in threads.map(own.publish, map(str, range(16)))]

    assert in_child(publish) == [True] * 16
    assert [len(names_in(queue, "target")) for queue in made] == [16] * 120


def test_one_router_serves_many_topics_of_many_subscriptions_with_few_descriptors(root: Root) -> None:
    topics = [root.create_topic(f"t{number}") for number in range(12)]
    made = [topic.create_subscription(f"s{number}", client_id=topic.name) for topic in topics for number in range(15)]
    for topic in topics:
        drop(topic.queue, "a.csv", b"a")

    def serve() -> None:
        few_descriptors()
        own = opened(root)
        routers = Routers(own.context, sweep=QuickSweep)
        routers.one_pass()
        routers.close()

    in_child(serve)
    assert [len(names_in(queue, "target")) for queue in made] == [1] * len(made)


def test_a_receiver_that_is_not_kept_open_is_compared_each_time_before_something_is_moved_into_it(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.staging.destinations.SHARE", 1 << 40)
    topic = root.create_topic("t")
    topic.create_subscription("s", client_id="c")
    stage = fan_out._stage

    def replaced(*args: Any) -> None:
        stage(*args)
        topic.unsubscribe("s", client_id="c")
        topic.create_subscription("s", client_id="c")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(fan_out, "_stage", replaced)
        topic.publish("for the first")
    assert bodies(opened(root).queue("t/s.c")) == []
    assert [message.body for message in topic.queue.browse("error")] == [b"for the first"]
    assert topic.publish("for the second").distributed
    assert bodies(opened(root).queue("t/s.c")) == [b"for the second"]


# -- what lies about -------------------------------------------------------------------------------------------------


def test_a_folder_in_target_lets_no_publisher_take_the_way_of_what_waits(root: Root) -> None:
    topic = root.create_topic("t")
    copies = topic.create_subscription("s", client_id="c")
    (base(topic.queue) / "target" / "old").mkdir()
    distributor = Distributor(topic.queue.context)
    for number in range(3):
        assert distributor.claim_staged(f"4.{number}.B") is not None
    assert topic.publish("x").distributed and bodies(copies) == [b"x"]
    drop(topic.queue, "waits.csv", b"first")
    assert distributor.claim_staged("4.4.B") is None


def test_a_consumer_of_a_subscription_looks_at_no_topic_that_does_not_feed_it(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "mine.below", "other", "other.below"):
        root.create_topic(name)
    copies = root.topic("mine").create_subscription("s", client_id="c")
    looked, entries = list[str](), reading.entries

    def listing(folder: str) -> Iterator[os.DirEntry[str]]:
        looked.append(os.path.basename(folder))
        return entries(folder)

    monkeypatch.setattr("dropq.lifecycle.queue_notes.entries", listing)
    assert [topic.name for topic in ReceiverTopics(copies.context).topics()] == ["mine", "mine.below"]
    assert looked == ["mine", "below"]
