"""A route takes messages out of a queue: which, under which name, and what becomes of one that cannot be used."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from children import killed_at_each_call
from helpers import (
    FRESH,
    Clock,
    Make,
    RecordingOs,
    add_route,
    base,
    drop,
    files,
    first_and_long,
    make_queue,
    names_in,
    other_file_system,
    take,
    until,
    where,
)

import dropq
from dropq import Queue, Root, StorageError, aio
from dropq.cli import main as cli
from dropq.diagnosis import fsck
from dropq.lifecycle.queue_notes import scan
from dropq.policies.routes import check_file
from dropq.routing import Router
from dropq.storage import system_calls
from dropq.upkeep.sweep import QuickSweep

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "dropboxmq-1.2-routes.json").read_text("utf-8"))
#: Where the tests look for a second file system.


def routed(queue: Queue, name: str = "hi") -> dict[str, bytes]:
    """What lies in a route's folder, by file name."""
    return files(base(queue) / "routing" / name)


@pytest.fixture
def q(make: Make) -> Queue:
    """A queue whose route `hi` takes what is urgent."""
    queue = make(timing=FRESH)
    add_route(queue, "hi", "JMSPriority > 6")
    return queue


# -- as DropboxMQ has them ---------------------------------------------------------------------------------------------

PROPERTIES = """\
hi.selector=JMSPriority >= 8
eu.selector=region = 'eu'
sym.selector=JMSType = 'S'
bad.selector=this is (( to bad
"""


def without_prefix(path: str) -> str:
    """A path without the claim prefix that DropboxMQ leaves in a name."""
    return path.replace("me~", "")


def test_each_step_that_was_recorded_of_dropboxmq_has_the_same_outcome(tmp_path: Path) -> None:
    root = Root.create(tmp_path, dropboxmq=True)
    queues = {name: root.create_queue(name, dropboxmq=True, durability="none") for name in ("orders", "other")}
    (tmp_path / "orders" / "incoming" / "routing.properties").write_text(PROPERTIES)
    consumers: dict[str, Queue] = {}
    held: dict[str, list[dropq.Message]] = {}
    checked = 0
    for step in VECTORS["routes_of_a_queue"]:
        for folder in step.get("dirs_added", ()):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for path, about in step.get("files_added", {}).items():
            if path.endswith(".in-use"):
                (tmp_path / path).touch()
            elif "link" in about:
                (tmp_path / path).symlink_to(about["link"])
        threading.Event().wait(0.11)  # a switch is seen within a tenth of a second
        sent = iter(order for order in step["order"] if order[0] == "rename" and "/working/" in order[1])
        for call in step["calls"]:
            verb, *arguments = call["call"]
            if verb == "sub":
                consumers[arguments[0]] = queues[arguments[2].removeprefix("queue:")]
            elif verb == "send":
                _, _, target = next(sent)
                (body,) = (text.removeprefix("body=") for text in arguments if text.startswith("body="))
                (tmp_path / target).write_text(body)
            elif verb == "recv":
                own = consumers[arguments[0]]
                got = list(iter(own.receive, None))
                received = [(f"ID:{one.id}", one.priority, one.delivery_count, one.text) for one in got]
                assert received == [
                    (one["id"], one["priority"], int(one["props"]["JMSXDeliveryCount"][1]), one["body"])
                    for one in call["result"]
                ], step["step"]
                held[arguments[0]] = got
            elif verb == "ack":
                for message in held.pop(arguments[0]):
                    message.ack()
        for path, about in step.get("files_added", {}).items():
            if re.search(r"/routing/\w+/", path):
                assert (tmp_path / without_prefix(path)).stat().st_size == about["size"], step["step"]
                checked += 1
    assert checked == 4
    for queue in queues.values():
        queue.close()


@pytest.mark.parametrize("vector", VECTORS["selectors_of_routing_properties"], ids=lambda vector: vector["why"])
def test_each_selector_that_was_recorded_of_dropboxmq_has_the_same_outcome(
    tmp_path: Path, vector: dict[str, str]
) -> None:
    root = Root.create(tmp_path, dropboxmq=True)
    queue = root.create_queue("orders", dropboxmq=True, durability="none")
    add_route(queue, "hi", None)
    (base(queue) / "routing.properties").write_text(vector["properties"])
    queue.send("body", priority=7, reply_to="other", properties={"flag": True, "region": "é"})
    with queue.subscribe() as subscription:
        message = subscription.receive()
    assert ("routed" if message is None else "delivered") == vector["result"]
    assert len(routed(queue)) == (message is None)


# -- what is taken, and under which name -------------------------------------------------------------------------------


def test_a_routed_message_is_not_delivered_and_receive_goes_on_with_the_next(q: Queue) -> None:
    q.send("urgent", priority=9)
    q.send("other")
    assert take(q).text == "other"
    assert q.receive() is None
    assert list(routed(q).values()) == [b"urgent"]
    assert where(q) == {"processing": [b"other"]}


def test_a_routed_message_keeps_its_file_and_its_name_and_no_delivery_is_counted(q: Queue) -> None:
    q.send("urgent", priority=9, type="t", properties={"n": 1})
    (name,) = names_in(q, "target")
    inode = (base(q) / "target" / name).stat().st_ino
    assert q.receive() is None
    assert list(routed(q)) == [name]
    assert (base(q) / "routing" / "hi" / name).stat().st_ino == inode


def test_counters_that_are_in_the_name_stay_and_the_selector_sees_the_raised_count(make: Make) -> None:
    queue = make(timing=FRESH)
    queue.send("again")
    take(queue).nack()
    (name,) = names_in(queue, "target")
    assert "JMSXDeliveryCountI=1" in name
    add_route(queue, "hi", "JMSXDeliveryCount = 2 AND JMSRedelivered AND JMSDestination = 'q'")
    assert queue.receive() is None
    assert list(routed(queue)) == [name]


def test_a_foreign_file_keeps_its_own_name(q: Queue) -> None:
    add_route(q, "all", "JMSPriority = 4")
    drop(q, "report.csv", b"rows")
    assert q.receive() is None
    assert routed(q, "all") == {"report.csv": b"rows"}


def test_a_claim_prefix_that_was_left_by_hand_is_dropped(q: Queue) -> None:
    drop(q, "client7~9.1795333378714000-1924848761.T", b"x")
    assert q.receive() is None
    assert routed(q) == {"9.1795333378714000-1924848761.T": b"x"}


def test_where_the_name_is_taken_both_stay_and_the_second_has_a_copy_mark(q: Queue) -> None:
    add_route(q, "all", "JMSPriority = 4")
    for body in (b"first", b"second"):
        drop(q, "report.csv", body)
        assert q.receive() is None
    found = routed(q, "all")
    assert found.pop("report.csv") == b"first"
    ((name, body),) = found.items()
    assert body == b"second" and name.startswith("4.report%2Ecsv.B.") and "copyS=" in name


def test_without_a_rename_that_replaces_nothing_each_has_a_copy_mark_and_no_name_is_reserved(
    q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    monkeypatch.setattr(system_calls, "rename_noreplace", refused)
    watched = RecordingOs().record(monkeypatch)
    monkeypatch.setattr(system_calls, "rename_noreplace", refused)
    q.send("urgent", priority=9)
    assert q.receive() is None
    ((name, body),) = routed(q).items()
    assert body == b"urgent" and "copyS=" in name
    behind = [call for call in watched.calls if f"{base(q)}/routing/hi/" in str(call[-1])]
    assert [call[0] for call in behind] == ["rename"]


def test_the_routes_are_tried_in_the_order_of_their_names(q: Queue) -> None:
    add_route(q, "a", "JMSPriority = 9")
    q.send("both", priority=9)
    q.send("second", priority=8)
    assert q.receive() is None
    assert (list(routed(q, "a").values()), list(routed(q).values())) == ([b"both"], [b"second"])


@pytest.mark.parametrize("kind", ["B", "S"])
def test_what_its_sender_wants_not_to_be_routed_is_delivered(q: Queue, kind: str) -> None:
    drop(q, f"9.1795333378714000-1924848761.T.....JMS_dropboxmq_do_not_route{kind}=true", b"x")
    assert take(q).body == b"x"
    drop(q, f"9.1795333378714000-1924848762.T.....JMS_dropboxmq_do_not_route{kind}=false", b"y")
    assert q.receive() is None
    assert list(routed(q).values()) == [b"y"]


def test_what_has_expired_goes_to_expired_and_to_no_route(q: Queue, clock: Clock) -> None:
    q.send("urgent", priority=9, expires_in="1s")
    clock.advance(2)
    assert q.receive() is None
    assert where(q) == {"expired": [b"urgent"]} and not routed(q)


def test_what_the_queue_s_filter_leaves_out_stays(make: Make) -> None:
    queue = make(timing=FRESH, filter="JMSType = 'a'")
    add_route(queue, "hi", "JMSPriority > 6")
    queue.send("left", priority=9)
    assert queue.receive() is None
    assert queue.route() == {}
    assert where(queue) == {"target": [b"left"]}


# -- switches ----------------------------------------------------------------------------------------------------------


def test_a_route_is_in_use_from_a_tenth_of_a_second_after_its_file_comes_until_one_after_it_goes(
    tmp_path: Path,
) -> None:
    queue = make_queue(tmp_path)
    folder = add_route(queue, "hi", "JMSPriority > 6")
    switch = folder.with_name("hi.in-use")
    switch.unlink()
    with queue.subscribe(max_backlog=None) as subscription:
        for in_use in (False, True, False, True):
            switch.touch() if in_use else switch.unlink(missing_ok=True)
            threading.Event().wait(0.11)
            queue.send("urgent", priority=9)
            assert (subscription.receive(1 if not in_use else 0) is None) == in_use
    assert len(routed(queue)) == 2


def test_without_routing_properties_no_route_is_in_use(q: Queue) -> None:
    (base(q) / "routing.properties").unlink()
    q.send("urgent", priority=9)
    assert take(q).text == "urgent"


def test_another_selector_counts_from_the_next_refresh(q: Queue) -> None:
    q.send("urgent", priority=9)
    (base(q) / "routing.properties").write_text("hi.selector=JMSPriority = 1\n")
    assert take(q).text == "urgent"


# -- routes that cannot be used ----------------------------------------------------------------------------------------


def on_another_disk(queue: Queue) -> Path:
    folder = other_file_system(base(queue))
    if folder is None:
        pytest.skip("there is no other file system here")
    return folder


def circle(queue: Queue) -> None:
    """Let a route lead to another queue, whose route leads to a third, whose route leads back."""
    one, two = (queue.root.create_queue(name, durability="none") for name in ("one", "two"))
    add_route(queue, "bad", "TRUE", to=base(one) / "target")
    add_route(one, "on", "TRUE", to=base(two) / "target")
    add_route(two, "back", "TRUE", to=base(queue) / "target")


UNUSABLE: dict[str, tuple[Callable[[Queue], object], str]] = {
    "bad selector": (lambda queue: add_route(queue, "bad", "this is (( to bad"), "bad selector, column 9"),
    "no selector": (lambda queue: add_route(queue, "bad", None), "has no bad.selector"),
    "empty selector": (lambda queue: add_route(queue, "bad", " "), "bad.selector is empty"),
    "body": (lambda queue: add_route(queue, "bad", "/a = 1"), "bad selector, column 1: "),
    "unknown field": (lambda queue: add_route(queue, "bad", "JMSNothing = 1"), "expected a header field"),
    "no folder": (lambda queue: add_route(queue, "bad", "TRUE", folder=False), "/routing/bad is missing"),
    "dangling": (lambda queue: add_route(queue, "bad", "TRUE", to=Path("nowhere")), "/routing/bad is missing"),
    "file": (lambda queue: add_route(queue, "bad", "TRUE", to=Path("bad.in-use")), "is no folder"),
    "itself": (lambda queue: add_route(queue, "bad", "TRUE", to=Path("bad")), "Too many levels of symbolic links"),
    "own target": (
        lambda queue: add_route(queue, "bad", "TRUE", to=Path("../target")),
        "leads to a folder of the queue itself",
    ),
    "own archive": (
        lambda queue: add_route(queue, "bad", "TRUE", to=Path("../processed")),
        "leads to a folder of the queue itself",
    ),
    "circle": (circle, "messages would go round: q -> one -> two -> q"),
    "other file system": (
        lambda queue: add_route(queue, "bad", "TRUE", to=on_another_disk(queue)),
        "leads to another file system",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_route_that_cannot_be_used_takes_nothing_and_is_reported(
    make: Make, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make(timing=FRESH)
    build, why = UNUSABLE[kind]
    build(queue)
    queue.send_many(["a", "b"])
    assert [take(queue).text, take(queue).text] == ["a", "b"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith("queue q: route bad is passed over: ") and why in warning
    (reason,) = queue.health().reasons
    assert reason.kind == "route" and why in reason.message
    (diagnosis,) = (found for found in queue.root.doctor(["q"]) if found.kind == "unusable-route")
    assert why in diagnosis.found
    (problem,) = check_file(str(base(queue) / "routing.properties"))
    assert problem.startswith(f"{base(queue)}/routing.properties: route bad: ") and why in problem


def test_the_next_route_takes_what_an_unusable_one_would(q: Queue) -> None:
    add_route(q, "a", "JMSPriority = 9", folder=False)
    q.send("urgent", priority=9)
    assert q.receive() is None
    assert list(routed(q).values()) == [b"urgent"]


def test_an_identifier_that_no_message_has_takes_nothing_and_is_no_fault(make: Make) -> None:
    queue = make(timing=FRESH)
    add_route(queue, "hi", "nobody = 'knows'")
    queue.send("a")
    assert take(queue).text == "a"
    assert queue.health().healthy


def test_a_routing_properties_that_cannot_be_read_routes_nothing(q: Queue, caplog: pytest.LogCaptureFixture) -> None:
    (base(q) / "routing.properties").unlink()
    (base(q) / "routing.properties").mkdir()
    q.send("urgent", priority=9)
    assert take(q).text == "urgent"
    assert "cannot be read" in caplog.text
    assert [reason.kind for reason in q.health().reasons] == ["route"]


def test_where_a_folder_goes_after_it_was_looked_at_the_message_is_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path)
    folder = add_route(queue, "hi", "JMSPriority > 6")
    queue.send_many([{"body": "a", "priority": 9}, {"body": "b", "priority": 9}])
    with queue.subscribe(max_backlog=None) as subscription:
        subscription._offers.attend()
        folder.rmdir()
        subscription._attend_at = float("inf")  # the look stays as it is
        for body in ("a", "b"):
            message = subscription.receive()
            assert message is not None and message.text == body and message.delivery_count == 1
    assert "a message could not be moved to" in caplog.text


# -- links -------------------------------------------------------------------------------------------------------------


def test_a_link_leads_to_another_queue_whose_consumers_get_the_message_as_new(make: Make) -> None:
    queue = make(timing=FRESH)
    other = queue.root.create_queue("other", durability="none")
    add_route(queue, "hi", "JMSPriority > 6", to=base(other) / "target")
    sent = queue.send("urgent", priority=9, properties={"long": "x" * 300})
    assert queue.receive() is None
    message = take(other)
    assert (message.id, message.text, message.delivery_count) == (sent.id, "urgent", 1)
    assert message.properties["long"] == "x" * 300
    assert queue.routed() == {}  # what a link leads to is the other queue's
    other.close()


def test_out_of_the_root_goes_only_what_has_no_sidecar(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    queue, far = make(timing=FRESH), make(timing=FRESH)
    add_route(queue, "hi", "JMSPriority > 6", to=base(far) / "target")
    queue.send("short", priority=9)
    queue.send("long", priority=9, properties={"long": "x" * 300})
    assert take(queue).text == "long"
    assert where(far) == {"target": [b"short"]}
    assert "leads out of the root" in caplog.text


def test_the_sidecar_of_a_routed_message_counts_as_used(q: Queue) -> None:
    q.send("urgent", priority=9, properties={"long": "x" * 300})
    assert q.receive() is None
    assert len(scan(str(q.root.path)).references) == 1


# -- every way to receive ----------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "at most once": {"semantics": "at-most-once"},
    "at most once, no history": {"semantics": "at-most-once", "history": False},
    "max_backlog": {"max_backlog": 1},
    "round robin": {"fairness_model": "round-robin"},
    "barrier": {"barrier_expression": "JMSType = 'barrier'"},
    "expiration": {"expiration": "1d"},
    "priority": {"priority": "JMSPriority"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_under_every_policy_what_a_route_takes_is_not_delivered(make: Make, options: dict[str, Any]) -> None:
    queue = make(timing=FRESH, **options)
    add_route(queue, "hi", "JMSPriority > 6")
    for number in range(3):
        queue.send(f"urgent {number}", priority=9)
        queue.send(f"other {number}")
    got = []
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            got.append(message.text)
            if message.held:
                message.ack()
    assert got == ["other 0", "other 1", "other 2"]
    assert sorted(routed(queue).values()) == [b"urgent 0", b"urgent 1", b"urgent 2"]


def test_a_barrier_that_a_route_takes_goes_there_and_holds_nothing_back(make: Make) -> None:
    queue = make(timing=FRESH, barrier_expression="JMSType = 'barrier'")
    add_route(queue, "hi", "JMSPriority > 6")
    queue.send("barrier", type="barrier", priority=9)
    queue.send("behind")
    assert take(queue).text == "behind"
    assert list(routed(queue).values()) == [b"barrier"]


def test_a_barrier_that_a_route_takes_does_not_wait_for_what_is_held_before_it(make: Make) -> None:
    queue = make(timing=FRESH, barrier_expression="JMSType = 'barrier'")
    add_route(queue, "hi", "JMSPriority > 6")
    queue.send("before")
    queue.send("barrier", type="barrier", priority=9)
    queue.send("behind")
    with queue.subscribe() as first, queue.subscribe() as second:
        assert first.receive() is not None
        behind = second.receive()
        assert behind is not None and behind.text == "behind"
    assert list(routed(queue).values()) == [b"barrier"]


def test_a_worker_a_batch_and_a_task_route_what_they_take(q: Queue) -> None:
    q.send_many([{"body": "u", "priority": 9}, "a"])
    handled: list[str] = []
    dropq.work(q, lambda message: handled.append(message.text), until_empty=True)
    q.send_many([{"body": "v", "priority": 9}, "b"])
    with q.subscribe(max_backlog=None) as subscription:
        batch = subscription.receive_many(2)
        handled += [message.text for message in batch]
        subscription.ack_many(batch)

    async def receive() -> str:
        async with aio.Queue(q) as queue:
            message = await queue.receive(timeout=5)
            assert message is not None
            text = await message.text()
            await message.ack()
            return text

    q.send_many([{"body": "w", "priority": 9}, "c"])
    handled.append(asyncio.run(receive()))
    assert handled == ["a", "b", "c"]
    assert sorted(routed(q).values()) == [b"u", b"v", b"w"]


def test_a_consumer_that_waits_routes_what_comes_and_goes_on_waiting(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    add_route(queue, "hi", "JMSPriority > 6")
    got: list[str] = []

    def consume() -> None:
        with queue.subscribe() as subscription:
            message = subscription.receive(timeout=30)
            assert message is not None
            got.append(message.text)

    consumer = threading.Thread(target=consume)
    consumer.start()
    queue.send("urgent", priority=9)
    until(lambda: routed(queue), "the route of a waiting consumer")
    queue.send("other")
    consumer.join(30)
    assert got == ["other"]


# -- durability, and crashes -------------------------------------------------------------------------------------------


def test_a_routed_message_is_durable_when_receive_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    add_route(queue, "hi", "JMSPriority > 6")
    queue.send("urgent", priority=9)
    with queue.subscribe() as subscription:
        watched = RecordingOs().record(monkeypatch)
        assert subscription.receive() is None
        synced = watched.briefly(("rename", "fsync"), base(queue))
    assert synced == [
        *("rename target/* processing/*", "rename processing/* routing/hi/*"),
        *("fsync routing/hi", "fsync processing"),
    ]


def test_a_sync_that_fails_is_raised_and_the_message_is_where_its_route_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    add_route(queue, "hi", "JMSPriority > 6")
    queue.send("urgent", priority=9)
    with queue.subscribe() as subscription:

        def failing(*folders: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), folders[0])

        monkeypatch.setattr(queue.context.storage, "sync", failing)
        with pytest.raises(StorageError, match="the message went to its route, but a power cut may bring it back"):
            subscription.receive()
        monkeypatch.undo()
    assert list(routed(queue).values()) == [b"urgent"]


def crash_scene(folder: Path, counter: Iterator[int], **options: Any) -> Queue:
    queue = make_queue(folder / str(next(counter)), **{"durability": "full", **options})
    other = queue.root.create_queue("other", durability="none")
    add_route(queue, "hi", "JMSPriority > 6")
    add_route(queue, "sym", "JMSPriority < 3", to=base(other) / "target")
    queue.send("urgent", priority=9)
    queue.send("low", priority=1)
    return queue


def receive_one(queue: Queue) -> None:
    with queue.subscribe() as subscription:
        subscription.receive()


@pytest.mark.parametrize("act", [receive_one, Queue.route], ids=["consumer", "router"])
@pytest.mark.parametrize("options", first_and_long([{}, {"max_backlog": 1}, {"semantics": "at-most-once"}]), ids=str)
@pytest.mark.crashes
def test_whoever_dies_before_or_after_any_call_each_message_is_once_where_it_belongs(
    tmp_path: Path, act: Callable[[Queue], object], options: dict[str, Any]
) -> None:
    counter = iter(range(10_000))
    deaths = 0
    for queue in killed_at_each_call(partial(crash_scene, tmp_path, counter, **options), act):
        other = queue.root.queue("other")
        folders = [*routed(queue).values(), *routed(queue, "sym").values()]
        lying = sorted([*folders, *(body for bodies in where(queue).values() for body in bodies)])
        assert lying == [b"low", b"urgent"]
        if act is Queue.route:
            assert where(queue).keys() <= {"target"}, "the router leaves a message in target/, or at its route"
        queue.sweep()
        assert where(queue).keys() <= {"target"}
        queue.route()
        assert (list(routed(queue).values()), where(queue), where(other)) == ([b"urgent"], {}, {"target": [b"low"]})
        deaths += 1
    assert deaths > 5


# -- the router --------------------------------------------------------------------------------------------------------


def test_a_router_moves_what_a_route_takes_and_touches_nothing_else(q: Queue, clock: Clock) -> None:
    q.send("urgent", priority=9)
    q.send("other")
    drop(q, "report.csv", b"rows")
    before = {path.name: path.stat().st_ctime_ns for path in (base(q) / "target").iterdir()}
    assert q.route() == {"hi": 1}
    after = {path.name: path.stat().st_ctime_ns for path in (base(q) / "target").iterdir()}
    assert after.items() <= before.items() and len(after) == 2
    assert list(routed(q).values()) == [b"urgent"] and next(iter(routed(q))) in before
    assert q.route() == {}


def test_a_file_that_cannot_be_looked_at_keeps_no_other_from_its_route(
    q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_route(q, "all", "JMSPriority = 4")
    drop(q, "report.csv", b"rows")
    q.send("urgent", priority=9)
    q.send("other")

    def refused(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(q.context.settling, "status", refused)
    with pytest.raises(StorageError, match=r"report\.csv; no message was touched"):
        q.route()
    assert list(routed(q).values()) == [b"urgent"] and list(routed(q, "all").values()) == [b"other"]
    assert where(q) == {"target": [b"rows"]}


def test_a_router_expires_what_has_expired_and_archives_what_was_acknowledged_early(q: Queue, clock: Clock) -> None:
    q.send("expired", priority=9, expires_in="1s")
    clock.advance(2)
    early = "1795333378714000-1924848761"
    q.ack(early, defer=True)
    drop(q, f"9.{early}.B", b"acknowledged")
    assert q.route() == {}
    assert where(q) == {"expired": [b"expired"], "processed": [b"acknowledged"]}


def test_a_router_delivers_what_was_delayed_to_its_route(q: Queue, clock: Clock) -> None:
    q.send("urgent", priority=9, delay="5s")
    assert q.route() == {}
    clock.advance(6)
    assert q.route() == {"hi": 1}


def test_a_paused_queue_routes_nothing(q: Queue) -> None:
    q.send("urgent", priority=9)
    q.pause()
    assert (q.receive(), q.route()) == (None, {})
    q.resume()
    assert q.route() == {"hi": 1}


def test_a_pause_ends_a_pass_that_is_under_way(q: Queue) -> None:
    q.send_many([{"body": b"%d" % number, "priority": 9} for number in range(3)])
    router = Router(q.context, sweep=QuickSweep(q.context))

    def pause_after_the_first() -> bool:
        if router.moved:
            q.pause()
        return False

    router.one_pass(pause_after_the_first)
    assert router.moved == {"hi": 1}


def test_a_router_and_consumers_share_a_queue_and_each_message_goes_one_way(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    add_route(queue, "hi", "JMSPriority > 6")
    queue.send_many([{"body": f"{number}", "priority": number % 10} for number in range(400)])
    consume = partial(dropq.work, queue, bool, until_empty=True)
    consumers = [threading.Thread(target=consume) for _ in range(2)]
    routers = [threading.Thread(target=queue.route) for _ in range(2)]
    for thread in (*consumers, *routers):
        thread.start()
    for thread in (*consumers, *routers):
        thread.join(60)
    assert sorted(int(body) % 10 > 6 for body in routed(queue).values()) == [True] * 120
    assert len(where(queue)["processed"]) == 280


# -- the command line --------------------------------------------------------------------------------------------------


def run(queue: Queue, *arguments: str) -> int:
    return cli.main(["--root", str(queue.root.path), *arguments])


def test_route_once_prints_how_many_went_to_which_route(q: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    q.send_many([{"body": "u", "priority": 9}, {"body": "v", "priority": 8}, "a"])
    assert run(q, "route", "q", "--once") == 0
    assert capsys.readouterr() == ("q\troute\thi\t2\n", "routed=2 selected=0 distributed=0\n")
    q.send("w", priority=9)
    assert run(q, "route", "q", "--once", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"queue": "q", "kind": "route", "name": "hi", "moved": 1}
    assert run(q, "route", "nobody", "--once") == 66


def test_route_exits_with_1_where_a_route_in_use_cannot_be_used(q: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    add_route(q, "bad", "TRUE", folder=False)
    q.send("u", priority=9)
    assert run(q, "route", "q", "--once") == 1
    assert capsys.readouterr().out == "q\troute\thi\t1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_route_serves_a_queue_until_a_signal_and_prints_the_sum(tmp_path: Path, number: signal.Signals) -> None:
    queue = make_queue(tmp_path)
    switch = add_route(queue, "hi", "JMSPriority > 6").with_name("hi.in-use")
    queue.send("before", priority=9)
    command = [sys.executable, "-m", "dropq", "--root", str(tmp_path), "route", "q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as router:
        until(lambda: len(routed(queue)) == 1, "what waited")
        switch.unlink()
        threading.Event().wait(0.2)
        queue.send("after", priority=9)
        threading.Event().wait(0.2)
        assert where(queue) == {"target": [b"after"]}
        switch.touch()
        until(lambda: len(routed(queue)) == 2, "what came")
        router.send_signal(number)
        out, err = router.communicate()
    assert (router.returncode, out, err) == (0, "q\troute\thi\t2\n", "routed=2 selected=0 distributed=0\n")


def test_receive_and_work_on_the_command_line_route(q: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    q.send("u", priority=9)
    assert run(q, "receive", "q", "--lease", "1m") == 66
    q.send("v", priority=9)
    assert run(q, "work", "q", "--until-empty", "--", "cat") == 0
    assert sorted(routed(q).values()) == [b"u", b"v"]


def test_ls_has_a_column_only_where_something_is_routed(q: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(q, "ls") == 0
    assert capsys.readouterr().out == "q\t0\t0\t0\t0\t0\t0\t0\t\n"
    q.send("u", priority=9)
    q.route()
    q.root.create_queue("r")
    assert run(q, "ls") == 0
    assert capsys.readouterr().out == "q\t0\t0\t0\t0\t0\t0\t0\t1\t\nr\t0\t0\t0\t0\t0\t0\t0\t0\t\n"
    assert run(q, "ls", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["routed"] == {"hi": 1} and "routed" not in second


def test_health_notes_what_lies_in_the_folder_of_a_route(q: Queue) -> None:
    q.send("u", priority=9)
    q.route()
    report = q.health()
    (note,) = report.notes
    assert report.healthy and note.kind == "routed" and note.figure == 1
    assert note.message.startswith(f"1 message in {base(q)}/routing/hi, ")


def test_fsck_finds_nothing_wrong_with_switches_and_routed_messages(q: Queue) -> None:
    q.send("u", priority=9)
    q.route()
    assert fsck.fsck(q.root.context, "q") == []
    assert fsck.fsck_root(q.root.context) == []


def test_explain_names_the_route_that_a_message_goes_to(q: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    q.send("u", priority=9)
    q.send("a")
    assert [one.why for one in q.explain("target")] == ["route", "ready"]
    assert run(q, "browse", "q", "--explain") == 0
    assert "it goes to route hi: " in capsys.readouterr().out


def test_config_check_reads_routing_properties(q: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(q, "config", "check") == 0
    with open(base(q) / "routing.properties", "a") as properties:
        properties.write("spare.selector=(\nlo.selektor=TRUE\nno.selector=/a = 1\n")
    assert run(q, "config", "check") == 78
    path = base(q) / "routing.properties"
    found = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in found] == [
        [f"{path}", "lo.selektor is not the selector of a route"],
        [f"{path}", "no.selector"],
        [f"{path}", "spare.selector"],
    ]
    assert run(q, "config", "check", str(path)) == 78


def test_a_queue_with_messages_in_the_folder_of_a_route_is_deleted_only_by_force(q: Queue) -> None:
    q.send("u", priority=9)
    q.route()
    home = base(q)
    with pytest.raises(StorageError, match="1 in routing/hi"):
        q.root.delete_queue("q")
    q.root.delete_queue("q", force=True)
    assert not home.exists()
