"""Nobody is handed a file that has not settled, and nobody ends one as done whose body has changed meanwhile.

The clock stands until it is moved; what is put in place is a file whose last change was a write.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, Make, Run, base, drop, make_queue, names_in, reopened, take, timed, where
from workers import counted, reason_in

from dropq import Message, Queue, Root, work
from dropq.format.claims import split_receipt
from dropq.lifecycle import settling
from dropq.lifecycle.timing import Timing
from dropq.queue.stream_journal import Journal
from dropq.storage.files import Storage

#: Consumers look at each file each time, and files settle as they do by default.
REAL = replace(FRESH, written_in_place=Timing().written_in_place)
#: Seconds: less than it takes to settle, and more.
SOON, LATER = 1, 3


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    return timed(Root.create(tmp_path / "root", clock=clock), REAL)


@pytest.fixture
def queue(root: Root) -> Queue:
    return root.create_queue("q", durability="none", redelivery_delay=0)


def put(queue: Queue, name: str = "a.csv", body: bytes = b"1\n") -> Path:
    """Write a file in place, as an upload does."""
    path = base(queue) / "target" / name
    path.write_bytes(body)
    return path


def append(message: Message, body: bytes = b"2\n") -> None:
    """Write on in the body of a held message, as who has it open does."""
    with open(message.path, "ab") as file:
        file.write(body)


def why(queue: Queue) -> list[str]:
    return [explained.why for explained in queue.explain("target")]


# -- who takes messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"priority": "/n"}, {"barrier_expression": "JMSType = 'sync'"}, {"max_backlog": 5}, {"filter": "1=1"}],
)
def test_a_consumer_gets_a_file_when_it_has_settled(root: Root, clock: Clock, options: dict[str, Any]) -> None:
    queue = root.create_queue("other", **options)
    put(queue, body=b'{"n": 1}')
    queue.send(b'{"n": 0}')
    clock.advance(SOON)
    with queue.subscribe() as subscription:
        first = subscription.receive()
        assert first is not None
        assert first.body == b'{"n": 0}'
        first.ack()
        assert subscription.receive() is None
        clock.advance(LATER)
        second = subscription.receive()
        assert second is not None
        assert second.id == "a.csv"
        second.ack()
    assert names_in(queue, "processed")[-1] == "a.csv"


def test_a_file_does_not_expire_before_it_has_settled(root: Root, clock: Clock) -> None:
    queue = root.create_queue("other", expiration="1s")
    put(queue)
    clock.advance(SOON + 0.5)
    assert why(queue) == ["settling"]
    assert (queue.sweep().expired, queue.receive()) == (0, None)
    clock.advance(LATER)
    assert why(queue) == ["expired"]
    assert queue.sweep().expired == 1
    assert names_in(queue, "expired") == ["a.csv"]


@pytest.mark.parametrize("options", [{}, {"max_backlog": 5}])
def test_a_file_that_is_written_again_after_it_was_listed_does_not_expire(
    root: Root, clock: Clock, options: dict[str, Any]
) -> None:
    queue = root.create_queue("other", expiration="1s", **options)
    path = put(queue)
    os.utime(path, (0, 0))  # a copy, whose times were set: it has settled
    with queue.subscribe() as subscription:
        subscription._snapshot()
        clock.advance(1.5)
        with path.open("ab") as file:
            file.write(b"2\n")
        assert why(queue) == ["settling"]
        assert subscription.receive() is None
    assert names_in(queue, "expired") == []


def test_a_write_lets_a_file_wait_anew(queue: Queue, clock: Clock) -> None:
    clock.advance(-3600)  # its ctime is in the future for this clock
    path = put(queue)
    for _ in range(3):
        assert queue.receive() is None
        clock.advance(1.5)
        with path.open("ab") as file:
            file.write(b"2\n")
    assert queue.receive() is None
    clock.advance(LATER)
    assert take(queue).body == b"1\n2\n2\n2\n"


def test_what_has_settled_stays_so_when_the_clock_comes_to_its_time(queue: Queue, clock: Clock) -> None:
    clock.advance(-10)
    put(queue)
    assert why(queue) == ["settling"]
    clock.advance(LATER)
    assert why(queue) == ["ready"]
    clock.advance(10 - LATER + SOON)  # its ctime is a second ago
    assert why(queue) == ["ready"]


def test_a_memory_that_is_full_forgets_the_oldest_file_alone(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "REMEMBERED", 3 * settling._size("a.csv"))
    clock.advance(-3600)
    context = queue.context
    for name in ("a.csv", "b.csv", "c.csv"):
        put(queue, name)
        assert context.settling.settles_at(context.sidecars.file(name))
    clock.advance(LATER)
    put(queue, "d.csv")
    waiting = {name for name in "dcba" if context.settling.settles_at(context.sidecars.file(f"{name}.csv"))}
    assert waiting == {"a", "d"}


def test_until_empty_waits_for_a_file_that_settles(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(written_in_place=0.2))
    put(queue)
    seen: list[str] = []

    def handler(message: Message) -> None:
        seen.append(message.id)
        if len(seen) == 1:
            put(queue, "late.csv")

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 2}
    assert seen == ["a.csv", "late.csv"]


def test_a_frozen_view_offers_what_waited_then_once_it_has_settled(queue: Queue, clock: Clock) -> None:
    put(queue)
    with queue.subscribe() as subscription:
        subscription._snapshot()
        put(queue, "late.csv")
        assert subscription.receive() is None
        clock.advance(LATER)
        message = subscription.receive()
        assert message is not None
        assert message.id == "a.csv"
        assert subscription.receive() is None
    assert "late.csv" in names_in(queue, "target")


def test_a_paused_consumer_does_not_look_for_what_has_settled(queue: Queue, clock: Clock) -> None:
    put(queue)
    with queue.subscribe() as subscription:
        assert subscription.receive() is None
        assert 0 < subscription._offers.settles_in <= LATER
        queue.pause()
        clock.advance(LATER)
        assert subscription.receive() is None
        assert subscription._offers.settles_in == math.inf  # else it would look again at once, for as long as it waits
        queue.resume()
        assert subscription.receive() is not None


def test_explain_says_until_when_a_file_settles(queue: Queue, clock: Clock) -> None:
    put(queue)
    (explained,) = queue.explain("target")
    assert explained.why == "settling"
    assert explained.until is not None
    left = explained.until.timestamp() - clock.ms / 1000
    assert 0 < left <= Timing().written_in_place + 1
    assert explained.detail.endswith("it waits for 2 s after that, and settle_time sets another time")
    clock.advance(LATER)
    assert why(queue) == ["ready"]


def test_explain_names_the_settle_time_of_a_queue_that_has_one(root: Root) -> None:
    queue = root.create_queue("other", settle_time="1m")
    put(queue)
    (explained,) = queue.explain("target")
    assert (explained.why, explained.detail.endswith("it waits for settle_time, 60 s")) == ("settling", True)


@pytest.mark.parametrize("act", [lambda path: os.chmod(path, 0o600), lambda path: os.utime(path, (1, 1))])
def test_a_chmod_and_a_copied_time_end_the_wait(queue: Queue, act: Callable[[Path], object]) -> None:
    path = put(queue)
    while path.stat().st_ctime_ns == path.stat().st_mtime_ns:  # in one tick it tells nothing
        act(path)
    assert take(queue).body == b"1\n"


# -- what moves messages elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["move", "copy"])
def test_a_selector_leaves_a_file_that_settles(root: Root, queue: Queue, clock: Clock, op: str) -> None:
    there = root.create_queue("there")
    queue.add_selector("on", op=op, to="there")
    put(queue)
    assert queue.route() == {}
    assert (where(there), why(queue)) == ({}, ["settling"])
    clock.advance(LATER)
    assert queue.route() == {"on": 1}
    assert where(there) == {"target": [b"1\n"]}


def test_a_route_leaves_a_file_that_settles(root: Root, queue: Queue, clock: Clock) -> None:
    route = base(queue) / "routing" / "on"
    route.mkdir(parents=True)
    (base(queue) / "routing.properties").write_text("on.selector=1=1\n")
    (base(queue) / "routing" / "on.in-use").touch()
    put(queue)
    assert queue.route() == {}
    clock.advance(LATER)
    assert queue.route() == {"on": 1}
    assert (route / "a.csv").read_bytes() == b"1\n"


def test_a_topic_distributes_no_file_that_settles(root: Root, clock: Clock) -> None:
    topic = root.create_topic("news")
    one = topic.create_subscription("one", client_id="c")
    put(topic.queue)
    topic.queue.route()
    assert where(one) == {}
    clock.advance(LATER)
    topic.queue.route()
    assert where(one) == {"target": [b"1\n"]}


def test_a_selector_carries_a_file_that_has_settled_to_another_file_system(
    root: Root, queue: Queue, clock: Clock, elsewhere: Path
) -> None:
    home = Path(root.create_queue("there").layout.home)
    shutil.move(home, elsewhere / "there")
    home.symlink_to(elsewhere / "there")
    queue.add_selector("on", to="there")
    put(queue)
    assert queue.route() == {}
    clock.advance(LATER)
    assert queue.route() == {"on": 1}
    assert where(root.queue("there")) == {"target": [b"1\n"]}


# -- what ends a claim -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["nack", "fail", "reject", "expire"])
def test_what_does_not_end_a_message_as_done_compares_nothing(queue: Queue, clock: Clock, verb: str) -> None:
    put(queue)
    clock.advance(LATER)
    message = take(queue)
    append(message)
    {"fail": lambda: message.fail("f"), "reject": lambda: message.reject("r")}.get(verb, getattr(message, verb))()
    assert list(where(queue).values()) == [[b"1\n2\n"]]
    assert not [each for each in queue.browse("error") if (each.reason or {}).get("reason") == "body_changed"]


@pytest.mark.parametrize("name", ["a.csv", "report 2024%2F11.csv", "a~b", "a,b-1.csv"])
def test_a_receipt_keeps_the_version_of_the_body(queue: Queue, clock: Clock, name: str) -> None:
    put(queue, name)
    clock.advance(LATER)
    with reopened(queue).subscribe(detached=True, lease_period=60) as subscription:
        message = subscription.receive()
        assert message is not None
        receipt = str(message.receipt)
    filename, body = split_receipt(receipt)
    assert body is not None
    assert (filename, body.size) == (os.path.basename(message.path), 2)
    append(message)
    other = reopened(queue).claimed(receipt)
    other.ack()
    assert other.state == "error"
    assert reason_in(queue, "error")["reason"] == "body_changed"


def test_the_commands_keep_the_version_of_the_body(queue: Queue, run: Run) -> None:
    for name in ("a.csv", "b.csv"):
        path = put(queue, name)
        os.utime(path, (1, 1))
    receipts = [json.loads(run("receive", "q", "--lease", "1m", "--json").out)["receipt"] for _ in range(2)]
    assert [receipt.rpartition("/")[2] for receipt in receipts] == ["2-1000000000", "2-1000000000"]
    with open(base(queue) / "processing" / receipts[1].rpartition("/")[0], "ab") as body:
        body.write(b"2\n")
    assert run("ack", "q", receipts[0]).code == 0
    assert run("ack", "q", receipts[1]).code == 1
    assert where(queue) == {"processed": [b"1\n"], "error": [b"1\n2\n"]}


@pytest.mark.parametrize("id", ["report/2024-11", "a/1-2", "4~x/1-2"])
def test_an_id_with_a_slash_is_no_receipt(queue: Queue, id: str) -> None:
    queue.send(b"a", message_id=id)
    assert split_receipt(id) == (id, None)
    message = take(queue)
    assert message.id == id
    queue.claimed(id).ack()
    assert where(queue) == {"processed": [b"a"]}


def test_an_ack_by_id_of_what_waits_compares_nothing(queue: Queue, clock: Clock) -> None:
    path = put(queue)
    clock.advance(LATER)
    with path.open("ab") as file:
        file.write(b"2\n")
    queue.ack("a.csv")
    assert where(queue) == {"processed": [b"1\n2\n"]}


def test_at_most_once_compares_nothing(root: Root, clock: Clock) -> None:
    queue = root.create_queue("once", semantics="at-most-once")
    put(queue)
    clock.advance(LATER)
    message = take(queue)
    assert where(queue) == {"processed": [b"1\n"]}
    assert message.body == b"1\n"


def test_what_has_come_back_is_compared_anew(queue: Queue, clock: Clock) -> None:
    put(queue)
    clock.advance(LATER)
    message = take(queue)
    append(message)
    message.nack()
    take(queue).ack()
    assert where(queue) == {"processed": [b"1\n2\n"]}


def test_a_second_file_of_the_name_that_is_claimed_instead_was_not_written_to(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(queue, "report.csv", b"first")
    rename = Storage.rename

    taken = list[Message]()

    def renamed_late(storage: Storage, source: str, destination: str) -> None:
        if source.endswith("/target/report.csv") and not taken:
            monkeypatch.setattr(Storage, "rename", rename)
            taken.append(take(reopened(queue)))  # another consumer is quicker
            drop(queue, "report.csv", b"second")
        rename(storage, source, destination)

    monkeypatch.setattr(Storage, "rename", renamed_late)
    second = take(queue)
    assert second.body == b"second"
    second.ack()
    taken[0].ack()
    assert where(queue) == {"processed": [b"first", b"second"]}


def test_records_of_a_body_that_was_changed_are_no_more_acknowledged(queue: Queue, clock: Clock) -> None:
    put(queue, body=b"1\n2\n3\n")
    clock.advance(LATER)
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            with open(base(queue) / "processing" / os.listdir(base(queue) / "processing")[0], "ab") as body:
                body.write(b"4\n")
            record.ack()
            break
    assert "processed" not in where(queue)


# -- Spark's streams ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stream(tmp_path: Path) -> Callable[[], Journal]:
    """Begins another run of a stream, as another process does."""
    clock = Clock()
    queue = make_queue(tmp_path / "stream", clock=clock, timing=REAL)
    os.utime(put(queue), (1, 1))
    options: dict[str, Any] = {"client_id": "spark", "max_backlog": None, "lease_period": 600, "detached": True}

    def run() -> Journal:
        again = reopened(queue)
        return Journal(again.context, "s", again.subscribe(**options))

    run.queue = queue  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("changed", [True, False])
def test_a_batch_keeps_the_versions_of_its_bodies_for_the_run_that_settles_it(stream: Any, changed: bool) -> None:
    assert stream().next_batch(1, None) == 1
    path = base(stream.queue) / ".dropq" / "streams" / "s" / "1.json"
    ((size, at),) = json.loads(path.read_text())["bodies"].values()
    assert (size, at) == (2, 1_000_000_000)
    (message,) = stream().messages(1)
    if changed:
        append(message)
    last = stream()
    last.messages(1)
    last.settle(1)
    assert where(stream.queue) == ({"error": [b"1\n2\n"]} if changed else {"processed": [b"1\n"]})


def test_a_stream_claims_no_file_that_settles(make: Make, clock: Clock) -> None:
    queue = make(timing=REAL)
    put(queue)
    options: dict[str, Any] = {"client_id": "spark", "max_backlog": None, "lease_period": 600, "detached": True}
    journal = Journal(queue.context, "s", queue.subscribe(**options))
    assert journal.next_batch(1, None) == 0
    clock.advance(LATER)
    assert journal.next_batch(1, None) == 1


def test_an_empty_file_settles_however_it_was_touched(queue: Queue, clock: Clock) -> None:
    path = base(queue) / "target" / "a.csv"
    path.touch()
    os.utime(path, (1, 1))  # as a server does that sets the owner, the mode or the times before the first byte
    assert queue.receive() is None
    clock.advance(LATER)
    assert take(queue).body == b""


def test_until_empty_waits_for_what_settles_in_a_topic(tmp_path: Path) -> None:
    root = timed(Root.create(tmp_path / "root"), Timing(written_in_place=0.3))
    topic = root.create_topic("sales")
    audit = topic.create_subscription("audit", client_id="hq")
    Path(topic.queue.layout.target, "a.csv").write_bytes(b"1\n")
    seen = []
    work(audit, lambda message: seen.append(message.body), until_empty=True)
    assert seen == [b"1\n"]


@pytest.fixture
def barriers(root: Root) -> Queue:
    return root.create_queue("barriers", barrier_expression="JMSType = 'sync'", settle_time="2h", redelivery_delay=0)


def test_a_barrier_waits_for_a_file_before_it_that_has_not_settled(barriers: Queue, clock: Clock) -> None:
    put(barriers)
    clock.advance(3600)
    barriers.send(b"", type="sync")
    with barriers.subscribe() as subscription:
        assert subscription.receive() is None
        assert why(barriers) == ["settling", "barrier"]
        clock.advance(3601)
        first = subscription.receive()
        assert first is not None and first.id == "a.csv"
        first.ack()
        barrier = subscription.receive()
        assert barrier is not None and barrier.type == "sync"


def test_a_barrier_waits_for_no_file_behind_it_that_has_not_settled(barriers: Queue, clock: Clock) -> None:
    clock.advance(-3600)
    barriers.send(b"", type="sync")
    clock.advance(3600)
    put(barriers)
    with barriers.subscribe() as subscription:
        assert why(barriers) == ["ready", "settling"]
        barrier = subscription.receive()
        assert barrier is not None and barrier.type == "sync"


def test_a_barrier_whose_body_was_written_to_goes_to_error(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="1 = 1", settle_time=0)
    put(queue)
    with queue.subscribe() as first, queue.subscribe() as second:
        held, other = first.receive(timeout=5), second.receive(timeout=5)
        assert held is not None and other is not None
        (path,) = Path(queue.layout.processing).iterdir()
        with path.open("ab") as file:
            file.write(b"2\n")
        held.ack()
        other.ack()
    assert names_in(queue, "error") == ["a.csv"]
    assert reason_in(queue, "error")["reason"] == "body_changed"
