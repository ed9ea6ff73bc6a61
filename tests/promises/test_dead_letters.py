"""What cannot be delivered goes to a dead-letter queue, once, with where it came from and why, and can come back."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from forks import DIED, forked
from helpers import FRESH, Clock, died, health, names_in, take, timed, where
from torture.calls import come_between
from torture.crashes import Dying, Moment

from dropq import ConfigError, LeaseLost, Message, NoSuchMessage, NoSuchQueue, Queue, Root
from dropq.cli import main as cli
from dropq.format.claims import Location
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.queue_notes import forget
from dropq.lifecycle.sending import Outlet
from dropq.storage import exclusive_rename, files
from dropq.upkeep import bulk

Make = Callable[..., Queue]


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    """A root with a dead-letter queue for all, `letters`, and without syncs and delays."""
    return make_root(tmp_path / "root", clock)


def make_root(path: Path, clock: Clock | None = None, text: str = 'dead_letter_queue = "letters"\n') -> Root:
    path.mkdir()
    (path / "dropq.toml").write_text(
        f'format = 1\n{text}[defaults]\ndurability = "none"\nredelivery_delay = 0\nexhausted = "dead-letter"\n'
    )
    root = timed(Root.create(path, clock=clock), FRESH)
    root.create_queue("letters")
    return root


def nacked(queue: Queue, times: int = 1) -> Any:
    """Take and give back the message that waits, so many times; return it as it was the last time."""
    for _ in range(times):
        message = take(queue)
        message.nack()
    return message


def only(queue: Queue, state: str = "target") -> Any:
    (message,) = queue.browse(state)
    return message


# -- exhausted = "dead-letter" -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_deliveries", "max_cancels"])
def test_a_message_at_its_limit_becomes_a_letter_with_origin_and_reason(root: Root, limit: str) -> None:
    options: dict[str, Any] = {limit: 2}
    orders, letters = root.create_queue("orders", **options), root.queue("letters")
    orders.send(b"a", priority=7, correlation_id="c", properties={"n": 1})
    message = nacked(orders, 2)
    assert message.state == "dead-letter" and not message.held
    assert where(orders) == {} and where(letters) == {"target": [b"a"]}
    letter = only(letters)
    assert (letter.origin, letter.dead_letter_reason) == ("orders", limit)
    assert (letter.id, letter.priority, letter.correlation_id, letter.properties) == (message.id, 7, "c", {"n": 1})
    assert (letter.delivery_count, letter.cancels) == (0, 0)


def test_a_message_that_is_no_letter_has_no_origin(root: Root) -> None:
    orders = root.create_queue("orders")
    orders.send(b"a")
    assert (only(orders).origin, only(orders).dead_letter_reason) == (None, None)


def test_a_message_that_became_a_letter_says_where_it_is(root: Root) -> None:
    orders = root.create_queue("orders", max_deliveries=1)
    orders.send(b"a")
    message = nacked(orders)
    with pytest.raises(NoSuchMessage, match="is a dead letter now, in queue letters"):
        _ = message.path
    with pytest.raises(LeaseLost):
        message.ack()


@pytest.mark.parametrize("end", ["sweep", "release", "fail"])
def test_a_message_becomes_a_letter_however_it_comes_back(root: Root, clock: Clock, end: str) -> None:
    orders = root.create_queue("orders", max_deliveries=1, lease_period="5s", redelivery_attempts=9)
    orders.send(b"a")
    message = take(orders)
    if end == "sweep":
        clock.advance(6)
        orders.sweep()
    else:
        message.release() if end == "release" else message.fail("f")
        assert message.state == "dead-letter"
    assert only(root.queue("letters")).dead_letter_reason == "max_deliveries"


def test_the_failure_of_the_last_try_makes_a_letter(root: Root) -> None:
    orders = root.create_queue("orders", redelivery_attempts=1)
    orders.send(b"a")
    take(orders).fail("first")
    assert where(orders) == {"target": [b"a"]}
    message = take(orders)
    message.fail("last")
    assert message.state == "dead-letter" and where(orders) == {}
    assert only(root.queue("letters")).dead_letter_reason == "failed"


def test_a_failure_goes_to_error_where_exhausted_says_so_whatever_dead_letter_queue_there_is(root: Root) -> None:
    orders = root.create_queue("orders", exhausted="error", dead_letter_queue="letters")
    orders.send(b"a")
    take(orders).fail("f")
    assert where(orders) == {"error": [b"a"]} and where(root.queue("letters")) == {}


@pytest.mark.parametrize("end", ["reject", "expire"])
def test_what_was_rejected_or_expired_is_no_letter_by_itself(root: Root, end: str) -> None:
    orders = root.create_queue("orders")
    orders.send(b"a")
    message = take(orders)
    message.expire() if end == "expire" else message.reject("r")
    assert message.state == ("expired" if end == "expire" else "error")
    assert where(root.queue("letters")) == {}


def test_what_a_filter_refuses_is_no_letter(root: Root) -> None:
    orders = root.create_queue("orders", filter="n = 1", max_deliveries=1)
    orders.send(b"a")
    assert orders.receive() is None
    orders.sweep()
    assert where(orders) == {"target": [b"a"]} and where(root.queue("letters")) == {}


def test_a_barrier_becomes_one_letter(root: Root) -> None:
    orders = root.create_queue("orders", barrier_expression="barrier = TRUE", max_deliveries=1)
    with orders.subscribe() as one, orders.subscribe() as other:
        orders.send(b"a", properties={"barrier": True})
        for share in (one.receive(), other.receive()):
            assert share is not None
            share.nack()
            assert share.state == "dead-letter"
    assert where(root.queue("letters")) == {"target": [b"a"]}
    assert only(root.queue("letters")).dead_letter_reason == "max_deliveries"


def test_a_foreign_file_becomes_a_letter_and_gets_its_name_back_where_it_came_from(root: Root) -> None:
    orders, letters = root.create_queue("orders", max_deliveries=1), root.queue("letters")
    Path(orders.layout.target, "report.csv").write_bytes(b"a")
    nacked(orders)
    assert (only(letters).id, only(letters).origin) == ("report.csv", "orders")
    assert [outcome.ok for outcome in letters.requeue(to_origin=True)] == [True]
    take(orders).ack()
    assert names_in(orders, "processed") == ["report.csv"]


def test_a_long_name_becomes_a_letter_with_all_that_it_said(root: Root) -> None:
    orders, letters = root.create_queue("orders" + "s" * 60, max_deliveries=1), root.queue("letters")
    orders.send(b"a", message_id="i" * 90, correlation_id="c" * 90, properties={"p": "v" * 90})
    nacked(orders)
    letter = only(letters)
    assert (letter.id, letter.correlation_id, letter.properties) == ("i" * 90, "c" * 90, {"p": "v" * 90})
    assert (letter.origin, letter.dead_letter_reason) == (orders.name, "max_deliveries")
    nacked(letters)
    assert only(letters).origin == orders.name


def test_letters_of_one_id_replace_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, letters = root.create_queue("orders", max_deliveries=1), root.queue("letters")
    bodies = []
    for body in (b"a", b"b", b"c"):
        if body == b"c":  # a file system without a rename that replaces nothing
            monkeypatch.setattr(exclusive_rename.ExclusiveRename, "by_kernel", lambda *_: False)
        Path(orders.layout.working, "x").write_bytes(body)
        os.rename(f"{orders.layout.working}/x", f"{orders.layout.target}/4.1795383089375000-7523895424.B")
        nacked(orders)
        bodies.append(body)
        assert where(letters) == {"target": bodies}


def test_a_letter_has_no_expiration_any_more(root: Root, clock: Clock) -> None:
    orders, letters = root.create_queue("orders", max_deliveries=1), root.queue("letters")
    orders.send(b"a", expires_in="1m")
    nacked(orders)
    clock.advance(3600)
    letters.sweep()
    assert only(letters).expiration is None


def test_a_letter_waits_in_its_new_queue_from_its_arrival_on(root: Root, clock: Clock) -> None:
    orders = root.create_queue("orders", max_deliveries=1)
    root.delete_queue("letters")
    letters = root.create_queue("letters", expiration="1h")
    orders.send(b"a")
    clock.advance(7200)
    nacked(orders)
    letters.sweep()
    assert where(letters) == {"target": [b"a"]}
    clock.advance(3601)
    letters.sweep()
    assert where(letters) == {"expired": [b"a"]}


# -- in the dead-letter queue ------------------------------------------------------------------------------------------


def five_times(root: Root, **options: Any) -> Queue:
    """Return a dead-letter queue of some options that has a letter which was delivered, and cancelled, five times."""
    root.delete_queue("letters")
    letters = root.create_queue("letters", **options)
    orders = root.create_queue("orders", max_deliveries=5)
    orders.send(b"a")
    nacked(orders, 5)
    return letters


@pytest.mark.parametrize("limit", ["max_deliveries", "max_cancels"])
def test_the_counters_of_a_letter_begin_anew_and_limits_end_it(root: Root, limit: str) -> None:
    letters = five_times(root, **{limit: 3})
    assert (only(letters).delivery_count, only(letters).cancels) == (0, 0)
    nacked(letters, 2)
    assert (only(letters).delivery_count, only(letters).cancels) == (2, 2)
    nacked(letters)
    assert only(letters, "error").reason is not None
    assert (only(letters, "error").reason or {})["reason"] == limit


ENDS: dict[str, Callable[[Message], None]] = {
    "nack": lambda message: message.nack(),
    "fail": lambda message: message.fail("f"),
    "death": died,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_letter_that_was_moved_ends_by_the_limits_of_where_it_is_and_stays_a_letter(root: Root, end: str) -> None:
    letters = five_times(root)
    retry = root.create_queue("retry", max_deliveries=2, redelivery_attempts=5, exhausted="error")
    letters.move(retry)
    for _ in range(2):
        message = take(retry)
        ENDS[end](message)
    ended = only(retry, "error")
    assert (ended.origin, ended.dead_letter_reason) == ("orders", "max_deliveries")


def test_a_letter_that_fails_is_tried_again_as_often_as_any_message(root: Root) -> None:
    letters = five_times(root, redelivery_attempts=1)
    take(letters).fail("f")
    assert only(letters).delivery_count == 1
    take(letters).fail("f")
    assert (only(letters, "error").origin, only(letters, "error").dead_letter_reason) == ("orders", "max_deliveries")
    letters.requeue()
    assert (only(letters).origin, only(letters).delivery_count) == ("orders", 0)


def test_a_letter_that_a_script_moves_back_has_the_limits_of_its_queue_again(root: Root) -> None:
    letters = five_times(root)
    orders = root.queue("orders")
    os.rename(only(letters).path, f"{orders.layout.target}/{only(letters).file}")
    assert nacked(orders, 4).state == "target"
    assert nacked(orders).state == "dead-letter"


def test_a_letter_of_a_letter_names_the_first_queue_and_the_last_reason(root: Root) -> None:
    letters = five_times(root, max_deliveries=1, dead_letter_queue="more", exhausted="dead-letter")
    more = root.create_queue("more")
    assert Moves(letters.context).to_dead_letter(only(letters)._file, "unroutable") is not None
    assert (only(more).origin, only(more).dead_letter_reason) == ("orders", "unroutable")


def ring(path: Path, **options: Any) -> tuple[Queue, Queue]:
    """Two queues that are each other's dead-letter queue."""
    root = make_root(path)
    there, back = (root.create_queue(name, dead_letter_queue=other, **options) for name, other in ("ab", "ba"))
    there.send(b"a")
    return there, back


def test_what_two_dead_letter_queues_cannot_route_ends_in_error_after_sixteen_hops(tmp_path: Path) -> None:
    there, back = ring(tmp_path / "ring", unroutable_after="0s")
    for queue in (there, back):
        queue.add_selector("on", to="letters", filter="n = 1")
    seen = []
    for queue in (there, back) * 20:
        seen += [message.file for message in queue.browse()]
        queue.route()
    assert len(seen) == 17, "it lay there, and then made sixteen hops"
    assert where(there) == {"error": [b"a"]} and where(back) == {}
    assert only(there, "error").reason["detail"] == "it is a dead letter, and has made 16 hops"
    assert only(there, "error").reason["reason"] == "unroutable"
    there.requeue()
    there.route()
    assert where(back) == {"target": [b"a"]}, "who requeues it lets it begin again"


def test_what_two_dead_letter_queues_fail_at_ends_in_error_after_sixteen_hops(tmp_path: Path) -> None:
    there, back = ring(tmp_path / "ring", max_deliveries=1)
    for _ in range(8):
        assert nacked(there).state == nacked(back).state == "dead-letter"
    assert nacked(there).state == "error"
    assert only(there, "error").reason["reason"] == "max_deliveries"


def test_a_letter_that_selectors_have_moved_sixteen_times_goes_to_error(root: Root) -> None:
    letters = root.create_queue("own", dead_letter_queue="letters")
    letters.add_selector("on", to="letters")
    name = "4.x.B.....JMS_dropq_hopsI=16&JMS_dropq_originS=orders&JMS_dropq_reasonS=hop_limit"
    Path(letters.layout.target, name).touch()
    (waiting,) = letters.explain()
    assert waiting.detail.startswith("it was moved 16 times: the next router moves it to error/; ")
    letters.route()
    assert list(where(letters)) == ["error"] and where(root.queue("letters")) == {}
    assert only(letters, "error").reason["reason"] == "hop_limit"


def test_the_dead_letter_queue_of_all_needs_no_other(root: Root) -> None:
    letters = root.queue("letters")
    assert (letters.config.dead_letter_queue, letters.config.exhausted) == (None, "error")
    with pytest.raises(ConfigError, match="cannot be its own dead-letter queue"):
        root.create_queue("own", dead_letter_queue="own")


# -- where there is none -----------------------------------------------------------------------------------------------


def test_a_missing_dead_letter_queue_leaves_the_message_in_error_with_the_reason(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    orders = root.create_queue("orders", max_deliveries=1)
    root.delete_queue("letters")
    orders.send(b"a")
    assert nacked(orders).state == "error"
    reason = only(orders, "error").reason
    assert (reason["reason"], reason["detail"]) == ("max_deliveries", "the dead-letter queue letters is missing")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "went to error/: the dead-letter queue letters is missing" in warning


def test_a_topic_is_no_dead_letter_queue(root: Root) -> None:
    orders = root.create_queue("orders", max_deliveries=1, dead_letter_queue="sales")
    root.create_topic("sales")
    orders.send(b"a")
    assert nacked(orders).state == "error"


def test_a_dead_letter_queue_that_goes_at_this_moment_leaves_the_message_in_error(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, letters = root.create_queue("orders", max_deliveries=1), root.queue("letters")
    gone = letters.layout.home
    rename = files.Storage.rename_exclusive

    def late(self: files.Storage, source: str, destination: str) -> bool:
        shutil.rmtree(gone)
        return rename(self, source, destination)

    orders.send(b"a")
    monkeypatch.setattr(files.Storage, "rename_exclusive", late)
    assert nacked(orders).state == "error"
    assert not os.path.exists(gone), "nothing brings its folder back"


# -- what waits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["target", "delayed"])
def test_a_message_that_waits_becomes_a_letter_without_a_claim(root: Root, state: str) -> None:
    orders, letters = root.create_queue("orders"), root.queue("letters")
    orders.send(b"a", delay="1h" if state == "delayed" else None)
    message = only(orders, state)
    location = Moves(orders.context).to_dead_letter(message._file, "unroutable", state=state)
    assert location == Location("dead-letter", only(letters).file)
    assert (only(letters).origin, only(letters).dead_letter_reason) == ("orders", "unroutable")
    assert only(letters).delivery_count == 0 and only(letters).not_before is None
    assert Moves(orders.context).to_dead_letter(message._file, "unroutable", state=state) is None


def test_a_message_that_waits_and_has_no_dead_letter_queue_goes_to_error(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    orders = root.create_queue("orders")
    orders.send(b"a")
    file = only(orders)._file
    location = Moves(orders.context).to_dead_letter(file, "unroutable", {"detail": "nobody takes it"})
    assert location == Location("error", file.filename)
    assert only(orders, "error").reason["detail"] == "nobody takes it; no dead_letter_queue is set"
    assert Moves(orders.context).to_dead_letter(file, "unroutable") is None


# -- a send to a queue that does not exist -----------------------------------------------------------------------------


def file_of(root: Root) -> str:
    path = root.path.parent / "a.txt"
    path.write_bytes(b"a")
    return str(path)


def written(queue: Queue) -> None:
    with queue.writer() as writing:
        writing.write(b"a")


SENDS: dict[str, Callable[[Queue], Any]] = {
    "send": lambda queue: queue.send(b"a"),
    "send with headers": lambda queue: queue.send(b"a", type="t", message_id="own"),
    "send_many": lambda queue: queue.send_many([b"a"])[0],
    "send_many with headers": lambda queue: queue.send_many([{"body": b"a", "priority": 7}])[0],
    "send_file": lambda queue: queue.send_file(file_of(queue.root)),
    "send_file, moved": lambda queue: queue.send_file(file_of(queue.root), move=True),
    "send_file of a stream": lambda queue: queue.send_file(io.BytesIO(b"a")),
    "writer": written,
}


@pytest.mark.parametrize("send", SENDS)
def test_a_send_to_a_queue_that_does_not_exist_becomes_a_letter(root: Root, send: str) -> None:
    sent = SENDS[send](root.queue("missing"))
    letter = only(root.queue("letters"))
    assert (letter.origin, letter.dead_letter_reason, letter.body) == ("missing", "no_such_queue", b"a")
    if sent is not None:
        assert (sent.id, sent.accepted, sent.delivered_to) == (letter.id, True, "letters")
    assert not Path(root.path, "missing").exists()


@pytest.mark.parametrize("send", SENDS)
def test_a_send_to_a_queue_that_was_deleted_becomes_a_letter(root: Root, send: str) -> None:
    queue = root.create_queue("q")
    queue.send(b"before")
    root.delete_queue("q", force=True)
    SENDS[send](queue)
    assert (only(root.queue("letters")).origin, only(root.queue("letters")).body) == ("q", b"a")


@pytest.mark.parametrize("send", SENDS)
def test_without_a_dead_letter_queue_a_send_to_a_missing_queue_is_refused(tmp_path: Path, send: str) -> None:
    (tmp_path / "root").mkdir()
    root = Root.create(tmp_path / "root")
    with pytest.raises(NoSuchQueue, match="no queue 'missing'"):
        SENDS[send](root.queue("missing"))
    assert not send.startswith("send_file") or "stream" in send or (tmp_path / "a.txt").read_bytes() == b"a"


@pytest.mark.parametrize("send", SENDS)
def test_where_the_dead_letter_queue_is_missing_too_a_send_is_refused(root: Root, send: str) -> None:
    root.delete_queue("letters")
    with pytest.raises(NoSuchQueue, match="no queue 'missing'"):
        SENDS[send](root.queue("missing"))
    with pytest.raises(NoSuchQueue, match="no queue 'letters'"):
        SENDS[send](root.queue("letters"))


def test_a_send_that_is_half_way_when_its_queue_goes_becomes_a_letter(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, letters = root.create_queue("q"), root.queue("letters")
    write_new = files.Storage.write_new

    def before_a_delete(storage: files.Storage, *args: Any, **options: Any) -> None:
        write_new(storage, *args, **options)
        if queue.exists():
            Root(root.path).delete_queue("q", force=True)

    monkeypatch.setattr(files.Storage, "write_new", before_a_delete)
    assert queue.send(b"a").delivered_to == "letters"
    assert where(letters) == {"target": [b"a"]} and not Path(root.path, "q").exists()


def test_what_send_many_has_not_sent_when_its_queue_goes_become_letters(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, letters = root.create_queue("q"), root.queue("letters")
    send, sends = Outlet.send, 0

    def goes(self: Outlet, file: str, **options: Any) -> bool | None:
        nonlocal sends
        sends += 1
        if sends == 3:
            forget(root.layout, queue.layout.base, queue.layout.private, queue.context.storage)  # as a delete does
            os.rename(queue.layout.home, f"{root.path}/.away")
        return send(self, file, **options)

    monkeypatch.setattr(Outlet, "send", goes)
    sent = queue.send_many([b"a", b"b", b"c", b"d"])
    assert [each.delivered_to for each in sent] == ["q", "q", "letters", "letters"]
    assert where(letters) == {"target": [b"c", b"d"]}
    assert sorted(path.read_bytes() for path in Path(root.path, ".away/target").iterdir()) == [b"a", b"b"]


def test_a_stream_that_was_read_when_its_queue_goes_is_refused(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = root.create_queue("q")
    send = Outlet.send

    def goes(self: Outlet, file: str, **options: Any) -> bool | None:
        Root(root.path).delete_queue("q", force=True)
        return send(self, file, **options)

    monkeypatch.setattr(Outlet, "send", goes)
    with pytest.raises(NoSuchQueue, match="was not sent"):
        queue.send_file(io.BytesIO(b"a"))
    assert where(root.queue("letters")) == {}


def test_a_letter_that_was_sent_neither_expires_nor_waits_for_its_delay(root: Root, clock: Clock) -> None:
    root.queue("missing").send(b"a", expires_in="1m", delay="1h")
    clock.advance(3600)
    root.queue("letters").sweep()
    assert (only(root.queue("letters")).expiration, only(root.queue("letters")).not_before) == (None, None)
    with pytest.raises(ValueError, match="soon"):
        root.queue("missing").send(b"a", expires_in="soon")


def test_no_limit_of_the_dead_letter_queue_refuses_a_letter(root: Root) -> None:
    root.delete_queue("letters")
    letters = root.create_queue("letters", max_unprocessed=1)
    letters.send(b"full")
    assert [sent.accepted for sent in root.queue("missing").send_many([b"a", b"b"])] == [True, True]


def test_a_queue_that_is_made_later_gets_what_is_sent_from_then_on(root: Root) -> None:
    queue = root.queue("q")
    assert queue.send(b"a").delivered_to == "letters"
    root.create_queue("q")
    assert queue.send(b"b").delivered_to == "q"
    assert where(queue) == {"target": [b"b"]}


def test_what_is_published_to_a_topic_that_does_not_exist_is_refused(root: Root) -> None:
    with pytest.raises(NoSuchQueue):
        root.topic("sales").publish(b"a")
    topic = root.create_topic("sales")
    topic.publish(b"a")
    root.delete_queue("sales", force=True)
    with pytest.raises(NoSuchQueue):
        topic.publish(b"a")
    assert where(root.queue("letters")) == {}


def test_what_is_sent_to_a_view_without_its_topic_is_refused(root: Root) -> None:
    view = root.create_queue("view", underlying_topic="sales")
    with pytest.raises(NoSuchQueue, match="which is not there"):
        view.send(b"a")
    assert where(root.queue("letters")) == {}


def test_receiving_from_a_queue_that_does_not_exist_is_refused_as_before(root: Root) -> None:
    with pytest.raises(NoSuchQueue):
        root.queue("missing").receive()


def test_an_answer_that_comes_too_late_becomes_a_letter(root: Root) -> None:
    orders = root.create_queue("orders")
    assert orders.request(b"a", 0.01) is None
    message = take(orders)
    assert message.reply(b"late").delivered_to == "letters"
    letter = only(root.queue("letters"))
    assert (letter.origin, letter.dead_letter_reason, letter.correlation_id) == (
        message.reply_to,
        "no_such_queue",
        message.correlation_id or message.id,
    )


# -- back to where they came from --------------------------------------------------------------------------------------


def outcomes(queue: Queue, **which: Any) -> list[tuple[bytes, str]]:
    """Put letters back; return what became of each, by its body of before."""
    bodies = {message.id: message.body for state in ("target", "error") for message in queue.browse(state)}
    return [(bodies[each.id], each.detail if not each.ok else "") for each in queue.requeue(to_origin=True, **which)]


def test_each_letter_goes_back_to_where_it_came_from_as_new(root: Root, clock: Clock) -> None:
    letters = root.queue("letters")
    for name in ("orders", "bills"):
        queue = root.create_queue(name, max_deliveries=2)
        queue.send(name.encode(), properties={"p": "v" * 120}, priority=7)
        nacked(queue, 2)
    clock.advance(60)
    assert outcomes(letters) == [(b"orders", ""), (b"bills", "")]
    assert where(letters) == {}
    for name in ("orders", "bills"):
        back = only(root.queue(name))
        assert (back.body, back.priority, back.properties) == (name.encode(), 7, {"p": "v" * 120})
        assert (back.origin, back.dead_letter_reason) == (None, None)
        assert (back.delivery_count, back.cancels, back.redelivered) == (0, 0, False)
        assert back.since.timestamp() * 1000 == clock.now_ms()
        assert nacked(root.queue(name)).state == "target", "its limit counts from the start"


def test_a_letter_whose_queue_is_missing_stays_and_is_told_by_name(root: Root) -> None:
    letters = root.queue("letters")
    root.queue("missing").send(b"lost")
    for name in ("orders", "gone"):
        queue = root.create_queue(name, max_deliveries=1)
        queue.send(name.encode())
        nacked(queue)
    root.delete_queue("gone", force=True)
    results = dict(outcomes(letters))
    assert results.pop(b"orders") == ""
    assert "stays in target/ of letters: no queue 'missing'" in results.pop(b"lost")
    assert "stays in target/ of letters: no queue 'gone'" in results.pop(b"gone")
    assert not results and where(letters) == {"target": [b"gone", b"lost"]}
    root.create_queue("missing")
    assert dict(outcomes(letters))[b"lost"] == ""
    assert where(root.queue("missing")) == {"target": [b"lost"]}


def test_a_letter_of_a_subscription_goes_back_to_that_subscription(root: Root) -> None:
    topic = root.create_topic("sales", max_deliveries=1)
    for name in ("audit", "log"):
        topic.create_subscription(name, client_id="hq")
    topic.publish(b"a")
    nacked(root.queue("sales/audit.hq"))
    assert only(root.queue("letters")).origin == "sales/audit.hq"
    assert outcomes(root.queue("letters")) == [(b"a", "")]
    assert [where(root.queue(f"sales/{name}.hq")) for name in ("audit", "log")] == [{"target": [b"a"]}] * 2


def test_what_is_no_letter_stays(root: Root) -> None:
    letters = root.queue("letters")
    id = letters.send(b"own").id
    assert outcomes(letters) == []
    assert outcomes(letters, ids=[id]) == [(b"own", "it stays in target/ of letters: it is no dead letter")]
    assert where(letters) == {"target": [b"own"]}


@pytest.mark.parametrize("origin", ["../elsewhere", "a/../../b", "orders/x"])
def test_an_origin_that_a_stranger_wrote_leads_nowhere(root: Root, origin: str) -> None:
    letters = root.queue("letters")
    outside = root.path.parent / "elsewhere" / "target"
    outside.mkdir(parents=True)
    name = f"4.x.B.....JMS_dropq_originS={quote_plus(origin).replace('.', '%2E')}&JMS_dropq_reasonS=unroutable"
    Path(letters.layout.target, name).write_bytes(b"a")
    assert only(letters).origin == origin
    (result,) = outcomes(letters)
    assert "stays in target/" in result[1]
    assert names_in(letters, "target") == [name] and not list(outside.iterdir())


def test_letters_that_were_named_or_match_go_back(root: Root) -> None:
    letters, orders = root.queue("letters"), root.create_queue("orders", max_deliveries=1)
    for number in range(3):
        orders.send(str(number).encode(), properties={"n": number})
        nacked(orders)
    ids = {message.body: message.id for message in letters.browse()}
    letters.requeue([ids[b"0"]], to_origin=True)
    letters.requeue(state="target", filter="n = 1", to_origin=True)
    assert where(letters) == {"target": [b"2"]} and where(orders) == {"target": [b"0", b"1"]}
    (outcome,) = letters.requeue(["nobody"], to_origin=True)
    assert not outcome.ok and outcome.detail == "no such message in target/ of queue letters"


def test_a_letter_that_failed_goes_back_from_error_without_its_reason(root: Root) -> None:
    letters = five_times(root)
    take(letters).reject("r")
    assert outcomes(letters) == []
    assert outcomes(letters, state="error") == [(b"a", "")]
    assert where(root.queue("orders")) == {"target": [b"a"]}
    assert not any(Path(letters.layout.reasons).rglob("*.json"))


def test_only_letters_are_requeued_from_target(root: Root) -> None:
    letters, orders = five_times(root), root.queue("orders")
    ways = r"state 'target': messages are requeued from .*; 1 dead letter waits in target/ of queue letters: "
    with pytest.raises(ValueError, match=f"{ways}`dropq requeue letters --to-origin` moves such back"):
        letters.requeue(state="target")
    with pytest.raises(ValueError, match="; what lies in delayed/ of queue orders waits to be delivered already"):
        orders.requeue(state="delayed")
    with pytest.raises(ValueError, match="dead letters are requeued from"):
        root.queue("letters").requeue(state="working", to_origin=True)


def test_a_letter_that_is_requeued_to_another_queue_is_none_there(root: Root) -> None:
    letters, other = five_times(root), root.create_queue("other", max_deliveries=1)
    take(letters).reject("r")
    assert [each.ok for each in bulk.requeue(letters.context, bulk.Selection(("error",)), to=other.context)] == [True]
    assert (only(other).origin, only(other).dead_letter_reason) == (None, None)
    assert nacked(other).state == "dead-letter"


# -- what is shown -----------------------------------------------------------------------------------------------------


def run(root: Root, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, what it printed, and what it said on stderr."""
    capsys.readouterr()
    code = cli.main(["--root", str(root.path), *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_shell_sends_to_a_missing_queue_and_says_where_it_went(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(root)
    code, out, err = run(root, capsys, "send", "missing", file)
    letter = only(root.queue("letters"))
    assert (code, out.strip()) == (0, letter.id)
    assert err == "dead_letters=1: queue missing is not there; they went to the root's dead-letter queue letters\n"
    code, out, err = run(root, capsys, "send", "missing", file, "--lines", "--json")
    assert (code, json.loads(out)["delivered_to"]) == (0, "letters")
    assert run(root, capsys, "send", "letters", file)[2] == ""


def test_the_shell_shows_where_a_letter_comes_from_and_why(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root.queue("missing").send(b"a")
    letter = only(root.queue("letters"))
    _, shown, _ = run(root, capsys, "show", "letters", letter.id)
    assert "origin\tmissing\n" in shown and "dead_letter_reason\tno_such_queue\n" in shown
    _, listed, _ = run(root, capsys, "browse", "letters")
    assert listed.strip().split("\t")[-2:] == ["missing", "no_such_queue"]
    _, listed, _ = run(root, capsys, "browse", "letters", "--json")
    record = json.loads(listed)
    assert (record["origin"], record["dead_letter_reason"]) == ("missing", "no_such_queue")
    queue = root.create_queue("orders")
    queue.send(b"a")
    assert len(run(root, capsys, "browse", "orders")[1].split("\t")) == 6


def test_explain_says_how_a_letter_gets_back_and_the_command_does_it(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = root.queue("letters")
    root.queue("missing").send(b"a", message_id="two words")
    (explanation,) = letters.explain()
    assert "it is a dead letter from missing (no_such_queue): `dropq requeue" in explanation.detail
    root.create_queue("missing")
    command = shlex.split(explanation.detail.split("`")[1])
    assert run(root, capsys, *command[1:])[0] == 0
    assert where(root.queue("missing")) == {"target": [b"a"]}
    (explanation,) = root.queue("missing").explain()
    assert "dead letter" not in explanation.detail


def test_the_shell_puts_letters_back_and_tells_of_those_that_stay(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = root.queue("letters")
    for name in ("orders", "bills"):
        root.queue(name).send(name.encode())
    root.create_queue("orders")
    back = ["requeue", "letters", "--to-origin", "--all"]
    code, out, err = run(root, capsys, *back, "--dry-run")
    assert code == 1 and "would be requeued to orders" in out and "no queue 'bills'" in out
    assert len(where(letters)["target"]) == 2
    code, out, err = run(root, capsys, *back, "--yes")
    assert code == 1 and err.splitlines()[-1] == "requeued=1 failed=1"
    assert "\tok\trequeued to orders\n" in out and "no queue 'bills'" in out
    assert where(letters) == {"target": [b"bills"]} and where(root.queue("orders")) == {"target": [b"orders"]}
    assert run(root, capsys, *back, "--to", "orders", "--yes")[0] == 2


def test_where_no_letter_was_requeued_the_shell_names_the_other_state_that_has_some(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = five_times(root)
    back = ["requeue", "letters", "--to-origin", "--all", "--yes"]
    nothing, none = "requeued=0 failed=0\n", "none is a dead letter\n"
    hint = "1 dead letter lies in target/ of letters: look there with --state target\n"
    assert run(root, capsys, *back, "--state", "error") == (1, "", nothing + hint)
    take(letters).reject("r")
    hint = "1 dead letter lies in error/ of letters: look there with --state error\n"
    assert run(root, capsys, *back) == (1, "", nothing + hint)
    assert run(root, capsys, *back, "--filter", "JMSPriority = 9")[2] == nothing + none, "it does not match"
    assert run(root, capsys, *back, "--state", "error")[2] == "requeued=1 failed=0\n"
    assert run(root, capsys, *back) == (1, "", nothing + none)


def test_a_requeue_that_meets_only_letters_says_what_puts_them_back_and_fails(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = five_times(root)
    (letter,) = letters.browse()
    plain = ["requeue", "letters", "--yes"]
    hint = "1 dead letter lies in target/ of letters: `dropq requeue letters --to-origin --all` puts each back where"
    code, out, err = run(root, capsys, *plain, "--all")
    assert (code, out) == (1, "") and err.startswith("requeued=0 failed=0\n" + hint)
    code, _, err = run(root, capsys, *plain, letter.id)
    assert code == 1 and "`dropq requeue letters --to-origin ID` puts" in err
    assert "dead letter" not in run(root, capsys, *plain, "nobody")[2]
    assert len(where(letters)["target"]) == 1
    assert run(root, capsys, *plain, "--all", "--state", "processed")[0] == 0, "nothing was there to requeue"
    take(letters).reject("r")
    assert run(root, capsys, *plain, "--all")[0] == 0


def test_a_worker_says_that_its_message_is_a_letter_now(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root.create_queue("orders", max_cancels=1).send(b"a")
    _, _, err = run(root, capsys, "work", "orders", "--until-empty", "--", "sh", "-c", "exit 75")
    assert "in dead-letter queue letters now" in err
    assert err.splitlines()[-1].endswith("; 1 now in dead-letter queue letters")


def test_health_reports_a_missing_dead_letter_queue_where_messages_should_go_there(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    Path(root.path, "dropq.toml").write_text('format = 1\ndead_letter_queue = "letters"\n')
    root = Root(root.path)
    root.create_queue("plain").send(b"it never becomes a letter")
    root.create_queue("own", dead_letter_queue="other")
    root.create_queue("limited", max_deliveries=1, exhausted="dead-letter")
    root.create_queue("going", self_destruct=True)
    root.create_queue("source").add_selector("on", to="plain")
    found = {each.queue: each.reasons for each in root.health()}
    assert found.pop("plain") == ()
    for name, (reason,) in found.items():
        letters = "other" if name == "own" else "letters"
        assert reason.kind == "absent-letters"
        assert (
            f"dead-letter queue {letters} is missing" in reason.message
            and f"`dropq create {letters}`" in reason.message
        )
    root.create_queue("letters")
    root.create_queue("other")
    assert all(each.healthy for each in root.health())


def test_health_counts_letters_and_calls_the_queue_well(root: Root) -> None:
    letters, orders = root.queue("letters"), root.create_queue("orders", max_deliveries=1)
    assert not health(letters).notes
    for body in (b"a", b"b"):
        orders.send(body)
        nacked(orders)
    letters.send(b"own")
    take(letters)
    (note,) = health(letters).notes
    assert (note.kind, note.figure, health(letters).healthy) == ("letters", 2, True)
    assert "2 dead letters" in note.message and "`dropq requeue letters --to-origin --all`" in note.message


# -- a crash -----------------------------------------------------------------------------------------------------------


def crash_everywhere(
    folder: Path, act: Callable[[Root], object], check: Callable[[Root, bool], None], *, noreplace: bool = True
) -> None:
    """Let a process die before each of its calls that change something, and after the last; check each time.

    Args:
        folder: a root, of which each process gets a copy.
        act: what each process does.
        check: what has to hold then; it is told whether the process came to its end.
        noreplace: whether the file system has a rename that replaces nothing.
    """
    for calls in count():
        copy = folder.parent / f"{folder.name}-{calls}"
        shutil.copytree(folder, copy)

        def die(calls: int = calls, copy: Path = copy) -> None:
            come_between(Dying(Moment(calls)), noreplace=noreplace)
            act(timed(Root(copy), FRESH))

        code = forked(die)
        assert code in (0, DIED)
        check(Root(copy), code == 0)
        if code == 0:
            assert calls > 1, "it was never killed"
            return


def locations(root: Root) -> list[tuple[str, str]]:
    """Return the queue and the state of each message of a root, also of one that is being written."""
    return [(queue.name, state) for queue in root.queues() for state, bodies in where(queue).items() for _ in bodies]


def exhausted(root: Root) -> None:
    nacked(root.queue("orders"))


def unroutable(root: Root) -> None:
    orders = root.queue("orders")
    Moves(orders.context).to_dead_letter(only(orders)._file, "unroutable")


LONG = {"correlation_id": "c" * 120, "reply_to": "replies"}


@pytest.mark.parametrize("fields", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("noreplace", [True, False])
@pytest.mark.parametrize("act", [exhausted, unroutable])
@pytest.mark.crashes
def test_a_crash_leaves_a_letter_in_exactly_one_place(
    tmp_path: Path, act: Callable[[Root], None], noreplace: bool, fields: dict[str, Any]
) -> None:
    root = make_root(tmp_path / "root")
    root.create_queue("orders", max_deliveries=1).send(b"a", **fields)

    def check(root: Root, done: bool) -> None:
        root.queue("orders").sweep()  # returns what the dead held
        (location,) = locations(root)
        assert location in ([("letters", "target")] if done else [("orders", "target"), ("letters", "target")])
        message = only(root.queue(location[0]))
        assert (message.body, message.correlation_id) == (b"a", fields.get("correlation_id"))
        assert message.origin == (None if location[0] == "orders" else "orders")

    crash_everywhere(tmp_path / "root", act, check, noreplace=noreplace)


@pytest.mark.crashes
def test_a_crash_on_the_way_to_error_leaves_a_message_in_exactly_one_place(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    root.create_queue("orders", max_deliveries=1).send(b"a")
    root.delete_queue("letters")

    def check(root: Root, done: bool) -> None:
        root.queue("orders").sweep()
        (location,) = locations(root)
        assert location in ([("orders", "error")] if done else [("orders", "target"), ("orders", "error")])
        if location[1] == "error":
            reason = only(root.queue("orders"), "error").reason
            assert reason is not None and reason["reason"] == "max_deliveries"

    crash_everywhere(tmp_path / "root", exhausted, check)


@pytest.mark.parametrize("send", ["send", "send_many with headers", "send_file of a stream"])
@pytest.mark.crashes
def test_a_crash_in_a_send_to_a_missing_queue_leaves_the_message_at_most_once(tmp_path: Path, send: str) -> None:
    make_root(tmp_path / "root")

    def check(root: Root, done: bool) -> None:
        there = locations(root)
        assert there in ([[("letters", "target")]] if done else [[], [("letters", "working")], [("letters", "target")]])
        if there == [("letters", "target")]:
            letter = only(root.queue("letters"))
            assert (letter.body, letter.origin) == (b"a", "missing")

    crash_everywhere(tmp_path / "root", lambda root: SENDS[send](root.queue("missing")), check)


@pytest.mark.parametrize("fields", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("noreplace", [True, False])
@pytest.mark.crashes
def test_a_crash_on_the_way_back_leaves_each_letter_in_exactly_one_place(
    tmp_path: Path, noreplace: bool, fields: dict[str, Any]
) -> None:
    root = make_root(tmp_path / "root")
    for name in ("orders", "bills"):
        root.queue(name).send(name.encode(), **fields)
        root.create_queue(name)

    def check(root: Root, done: bool) -> None:
        assert len(locations(root)) == 2 and {state for _, state in locations(root)} == {"target"}
        for name in ("orders", "bills"):
            back = list(root.queue(name).browse())
            assert [message.body for message in back] in ([[name.encode()]] if done else [[], [name.encode()]])
            assert all(message.origin is None for message in back)
        assert all(letter.origin == letter.text for letter in root.queue("letters").browse())

    def act(root: Root) -> None:
        root.queue("letters").requeue(to_origin=True)

    crash_everywhere(tmp_path / "root", act, check, noreplace=noreplace)
