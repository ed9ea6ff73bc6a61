"""What a name has no room for lies in a sidecar, and comes back through every transition."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, Make, base, drop, names_in, reopened, take, timed, where

from dropq import Message, Root, Typed
from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.lifecycle.sidecars import collect
from dropq.storage.files import Storage

LONG: dict[str, Any] = {
    "correlation_id": "c" * 80,
    "reply_to": "answers",
    "type": "order.placed",
    "properties": {"text": "ä.~&=" * 30, "count": Typed("H", 5), "ok": True, "ratio": 1.5},
}


def assert_long(message: Message) -> None:
    assert message.correlation_id == LONG["correlation_id"]
    assert message.reply_to == "answers"
    assert message.type == "order.placed"
    assert message.properties == {"text": "ä.~&=" * 30, "count": 5, "ok": True, "ratio": 1.5}
    assert len(os.fsencode(message.file)) <= 255


def test_metadata_over_the_budget_spills_and_comes_back_through_every_transition(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, lease_period="5s", redelivery_attempts=99)
    queue.send(b"a", message_id="i" * 60, **LONG)
    (name,) = names_in(queue, "target")
    assert len(name) <= names.NAME_BUDGET

    def taken() -> Message:
        message = take(queue)
        assert_long(message)
        assert message.id == "i" * 60
        return message

    taken().ack()
    for state in ("processed", "error", "expired"):
        (found,) = queue.browse(state)
        assert_long(found)
        queue.requeue(state=state)
        taken().nack()
        taken().nack(delay=3)
        clock.advance(4)
        taken().fail("f")
        lost = taken()
        lost.extend("7s")
        clock.advance(8)
        queue.sweep()
        taken().release(counted=False)
        if state == "processed":
            taken().reject("r")
        elif state == "error":
            taken().expire()
    message = taken()
    assert message.delivery_count == 5
    message.ack()
    (found,) = queue.browse("processed")
    assert_long(found)


def test_a_missing_sidecar_is_warned_of_and_the_message_delivered_without(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    queue.send(b"a", **LONG)
    shutil.rmtree(queue.root.layout.meta)
    with caplog.at_level(logging.WARNING, "dropq"):
        message = take(queue)
        assert message.properties == {}
    assert "sidecar" in caplog.text
    message.nack()
    take(queue).ack()
    assert where(queue) == {"processed": [b"a"]}


def test_sidecars_are_collected_when_nothing_referred_to_them_for_a_day_and_two_passes(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(history=False)
    queue.send(b"a", **LONG)
    queue.send(b"b", **LONG)
    root = queue.root
    take(queue).ack()
    for seconds, collected in ((0, 0), (90_000, 0), (1000, 0), (3000, 1), (10_000, 0)):
        clock.advance(seconds)
        assert root.sweep().sidecars == collected
    assert_long(take(queue))


def test_no_sidecar_is_collected_while_a_folder_cannot_be_listed(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"a", **LONG)
    scandir = os.scandir
    clock.advance(90_000)

    def refused(path: str) -> Any:
        if str(path).endswith("/target"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    with monkeypatch.context() as patch:
        for _ in range(3):
            clock.advance(90_000)
            patch.setattr(os, "scandir", refused)
            assert sum(collect(queue.root.layout.path, queue.root.layout.meta, Storage("none"), clock)) == 0
    assert_long(take(queue))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 7, "properties": [1]}', '{"properties": {"a": 1}}'])
def test_a_damaged_sidecar_loses_no_message(make: Make, content: str) -> None:
    queue = make()
    queue.send(b"a", **LONG)
    (sidecar,) = Path(queue.root.layout.meta).iterdir()
    sidecar.write_text(content)
    take(queue).nack()
    take(queue).reject("r")
    queue.requeue()
    take(queue).ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("name", ["ä" * 100, "x" * 255, "a" * 150 + ".csv", "~t" * 100, "p." * 90 + "csv"])
def test_a_long_foreign_name_is_given_back(make: Make, name: str) -> None:
    queue = make()
    drop(queue, name, b"a")
    message = take(queue)
    assert message.id == name
    message.nack()
    assert take(queue).id == name
    queue.close()
    take(reopened(queue)).reject("r")
    assert names_in(queue, "error") == [name]
    queue.requeue()
    other = reopened(queue)
    take(other).ack()
    assert names_in(queue, "processed") == [name]


def test_undecodable_names_are_messages_and_given_back(make: Make) -> None:
    queue = make()
    names_ = [b"\xff\xfe.csv", b"\xff" * 200]
    for name in names_:
        with open(os.fsencode(base(queue)) + b"/target/" + name, "wb") as out:
            out.write(name)
    for _ in names_:
        take(queue).nack()
    while (message := queue.receive()) is not None:
        message.ack()
    assert sorted(os.listdir(os.fsencode(queue.layout.processed))) == sorted(names_)


@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_a_message_whose_sidecar_cannot_be_read_is_settled_all_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = make()
    queue.send(b"a", properties={"long": "x" * 300})

    def closed(path: str, limit: int = 0) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("dropq.lifecycle.sidecars.read_small", closed)
    message = take(queue)
    message.reject("r") if verb == "reject" else getattr(message, verb)()
    monkeypatch.undo()
    (state,) = where(queue)
    assert state == {"ack": "processed", "nack": "target", "reject": "error"}[verb]
    (message,) = queue.browse(state)
    assert message.properties == {"long": "x" * 300}


def test_what_would_be_written_without_its_sidecar_is_not_moved(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, far = make(), make()
    queue.send(b"a", properties={"long": "x" * 300})

    def unread(path: str, limit: int = 0) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patched:
        patched.setattr("dropq.lifecycle.sidecars.read_small", unread)
        (outcome,) = queue.move(far)
    assert not outcome.ok and "nothing was moved" in outcome.detail
    (outcome,) = queue.move(far)
    assert outcome.ok
    assert take(far).properties == {"long": "x" * 300}


@pytest.mark.parametrize("plant", [Path.mkdir, lambda path: path.symlink_to("/etc/hosts"), os.mkfifo])
def test_what_is_no_file_in_place_of_a_sidecar_holds_nobody_up(make: Make, plant: Callable[[Path], object]) -> None:
    queue = make()
    queue.send(b"a", properties={"long": "x" * 300}, priority=9)
    queue.send(b"b")
    (sidecar,) = Path(queue.root.layout.meta).glob("*.json")
    sidecar.unlink()
    plant(sidecar)
    open_files = len(os.listdir("/proc/self/fd"))
    for body in (b"a", b"b"):
        message = take(queue)
        assert (message.body, message.properties) == (body, {})
        message.ack()
    assert len(os.listdir("/proc/self/fd")) <= open_files + 2  # the queue's own subscription


@pytest.mark.parametrize("verb", ["requeue", "move"])
def test_a_queue_that_cannot_be_made_known_keeps_the_message_where_it_was(
    make: Make, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    other = queue.root.create_queue("other")
    queue.send(b"a", **LONG)
    take(queue).reject("no")

    def refused(*args: Any) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), args[1])

    monkeypatch.setattr("dropq.lifecycle.queue_notes.make_known", refused)
    outcomes = reopened(queue).requeue() if verb == "requeue" else queue.move(other, state="error")
    assert [(outcome.ok, "Input/output error" in outcome.detail) for outcome in outcomes] == [(False, True)]
    assert where(queue) == {"error": [b"a"]} and where(other) == {}


@pytest.mark.parametrize("spilled", [{}, {"text": "x" * 99}])
@pytest.mark.parametrize("value", [True, "true", Typed("B", False)])
def test_what_forbids_routes_survives_whatever_happens_to_the_message(
    make: Make, clock: Clock, spilled: dict[str, Any], value: Any
) -> None:
    queue = make(timing=FRESH, lease_period="5s", redelivery_attempts=9)
    queue.send(b"a", properties={names.DO_NOT_ROUTE: value, **spilled})
    other = queue.root.create_queue("other", durability="none")

    def taken() -> Message:
        message = take(queue)
        typed = queue.context.sidecars.read(queue.context.sidecars.file(message.file)).properties[names.DO_NOT_ROUTE]
        assert typed == Typed.of(value)
        return message

    taken().nack()
    taken().nack(delay=3)
    clock.advance(4)
    taken().fail("f")
    taken()
    clock.advance(8)
    queue.sweep()
    taken().reject("r")
    queue.requeue()
    taken().ack()
    queue.replay()
    queue.move(other)
    other.move(queue)
    taken().ack()


def test_a_letter_that_was_moved_copied_and_given_back_in_part_keeps_its_clock_hops_and_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = timed(Root.create(tmp_path / "root"), FRESH)
    work = root.create_queue("work", redelivery_delay=0, max_cancels=3)
    audit, dead = root.create_queue("audit"), root.create_queue("dead")
    source = root.create_queue("source", dead_letter_queue="dead", unroutable_after=0)
    source.add_selector("never", to="work", filter="FALSE")
    dead.add_selector("on", to="work")
    work.add_selector("copy", to="audit", op="copy")
    source.send("1\n2\n3\n", type="text", properties={"long": "x" * 200})
    with work.subscribe() as consumer:  # so that it waits here, and is not unroutable again
        for queue in (source, dead, work):
            queue.route()
        part = consumer.receive()
        assert part is not None
        next(part.records()).ack()
        part.nack()
        for _ in range(3):
            assert work.route() == {}
        (name,) = (MessageFile(file).name for file in names_in(work, "target"))
        assert (name.first, name.cancels, name.hops) == (2, 1, 2)
        assert name.since and name.copied and name.via and name.reason == "unroutable"
        assert audit.counts()["target"] == 1
        for _ in range(2):
            part = consumer.receive()
            assert part is not None
            part.nack()
    assert [message.reason["reason"] for message in work.browse("error") if message.reason] == ["max_cancels"]
    assert "left out" not in caplog.text
