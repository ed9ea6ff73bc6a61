"""What cannot be delivered goes to a dead-letter queue, once, with where it came from and why, and can come back."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, names_in, take, timed, where

from dropq import ConfigError, LeaseLost, NoSuchMessage, Queue, Root
from dropq.format.claims import Location
from dropq.lifecycle.transitions import Transitions
from dropq.storage import exclusive_rename, files

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
    assert (letter.delivery_count, letter.cancels) == (2, 2)


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


@pytest.mark.parametrize("end", ["fail", "reject", "expire"])
def test_what_failed_was_rejected_or_expired_is_no_letter_by_itself(root: Root, end: str) -> None:
    orders = root.create_queue("orders")
    orders.send(b"a")
    message = take(orders)
    message.expire() if end == "expire" else getattr(message, end)("r")
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


def test_a_foreign_file_becomes_a_letter_and_gets_its_name_back_at_the_end(root: Root) -> None:
    orders, letters = root.create_queue("orders", max_deliveries=1), root.queue("letters")
    Path(orders.layout.target, "report.csv").write_bytes(b"a")
    nacked(orders)
    assert (only(letters).id, only(letters).origin) == ("report.csv", "orders")
    take(letters).ack()
    assert names_in(letters, "processed") == ["report.csv"]


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
def test_the_counters_of_a_letter_are_kept_and_are_no_limit(root: Root, limit: str) -> None:
    letters = five_times(root, **{limit: 3})
    nacked(letters, 4)
    assert (only(letters).delivery_count, only(letters).cancels) == (9, 9)


def test_a_letter_that_fails_goes_to_error_and_is_still_a_letter(root: Root) -> None:
    letters = five_times(root, redelivery_attempts=9)
    take(letters).fail("f")
    assert (only(letters, "error").origin, only(letters, "error").dead_letter_reason) == ("orders", "max_deliveries")
    letters.requeue()
    assert (only(letters).origin, only(letters).delivery_count) == ("orders", 0)


def test_a_letter_that_a_script_moves_back_has_the_limits_of_its_queue_again(root: Root) -> None:
    letters = five_times(root)
    orders = root.queue("orders")
    os.rename(only(letters).path, f"{orders.layout.target}/{only(letters).file}")
    assert nacked(orders).state == "dead-letter"
    assert only(letters).delivery_count == 6


def test_a_letter_of_a_letter_names_the_last_queue(root: Root) -> None:
    letters = five_times(root, max_deliveries=1, dead_letter_queue="more", exhausted="dead-letter")
    more = root.create_queue("more")
    assert Transitions(letters.context).to_dead_letter(only(letters)._file, "unroutable") is not None
    assert (only(more).origin, only(more).dead_letter_reason) == ("letters", "unroutable")
    assert only(more).delivery_count == 5


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
    assert "goes to error/: the dead-letter queue letters is missing" in warning


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
    place = files.Storage.place_in_kernel

    def late(self: files.Storage, source: str, destination: str) -> bool:
        shutil.rmtree(gone)
        return place(self, source, destination)

    orders.send(b"a")
    monkeypatch.setattr(files.Storage, "place_in_kernel", late)
    assert nacked(orders).state == "error"
    assert not os.path.exists(gone), "nothing brings its folder back"


def test_a_dead_letter_queue_on_another_file_system_leaves_the_message_in_error(root: Root) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == root.path.stat().st_dev:
        pytest.skip("there is no other file system")
    orders, letters = root.create_queue("orders", max_deliveries=1), Path(root.queue("letters").layout.home)
    other = elsewhere / f"dropq-letters-{os.getpid()}"
    shutil.move(letters, other)
    try:
        letters.symlink_to(other)
        orders.send(b"a")
        assert nacked(orders).state == "error"
        assert only(orders, "error").reason["detail"] == "the dead-letter queue letters lies on another file system"
    finally:
        shutil.rmtree(other)


# -- what waits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["target", "delayed"])
def test_a_message_that_waits_becomes_a_letter_without_a_claim(root: Root, state: str) -> None:
    orders, letters = root.create_queue("orders"), root.queue("letters")
    orders.send(b"a", delay="1h" if state == "delayed" else None)
    message = only(orders, state)
    location = Transitions(orders.context).to_dead_letter(message._file, "unroutable", state=state)
    assert location == Location("dead-letter", only(letters).file)
    assert (only(letters).origin, only(letters).dead_letter_reason) == ("orders", "unroutable")
    assert only(letters).delivery_count == 0 and only(letters).not_before is None
    assert Transitions(orders.context).to_dead_letter(message._file, "unroutable", state=state) is None


def test_a_message_that_waits_and_has_no_dead_letter_queue_goes_to_error(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    orders = root.create_queue("orders")
    orders.send(b"a")
    file = only(orders)._file
    location = Transitions(orders.context).to_dead_letter(file, "unroutable", {"detail": "nobody takes it"})
    assert location == Location("error", file.filename)
    assert only(orders, "error").reason["detail"] == "nobody takes it; no dead_letter_queue is set"
    assert Transitions(orders.context).to_dead_letter(file, "unroutable") is None
