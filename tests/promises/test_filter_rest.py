"""`filter_rest = "error"`: what a queue's own filter keeps from every consumer is put aside, and nothing else is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import FRESH, Clock, base, drop, make_queue, names_in, reopened, take

from dropq import ConfigError, Queue, Root
from dropq.filters import LIMIT, Body, functions

HOUR = 3600
EU = "region = 'eu'"


@pytest.fixture
def clock() -> Clock:
    """A clock that the test moves."""
    return Clock()


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Queue:
    """A queue for messages of one region, whose rest is put aside after an hour."""
    return make_queue(
        tmp_path / "root", clock=clock, timing=FRESH, filter=EU, filter_rest="error", unroutable_after=HOUR
    )


def send(queue: Queue, *regions: str) -> None:
    """Send a message for each region."""
    for region in regions:
        queue.send(region, properties={"region": region})


def in_error(queue: Queue) -> list[str]:
    """Return the bodies of the messages in error/."""
    return sorted(message.text for message in queue.browse("error"))


def test_what_nobody_gets_is_put_aside_when_it_has_waited_and_a_bounded_queue_goes_on(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"filter": EU, "filter_rest": "error", "unroutable_after": HOUR, "max_unprocessed": 3}
    queue = make_queue(tmp_path / "root", clock=clock, timing=FRESH, **asked)
    send(queue, "us", "mars", "eu")
    drop(queue, "by-hand.csv", b"x")
    take(queue).ack()
    assert queue.receive() is None
    (waiting,) = (said for said in queue.explain() if said.message.text == "us")
    assert waiting.why == "filter" and waiting.until is not None
    assert waiting.until.timestamp() == pytest.approx(os.stat(waiting.message.path).st_ctime + HOUR, abs=1)
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    assert in_error(queue) == ["mars", "us", "x"]
    assert "by-hand.csv" in names_in(queue, "error"), "a foreign file keeps its name"
    assert [message.reason["reason"] for message in queue.browse("error") if message.reason] == ["filtered"] * 3
    assert caplog.text.count("(filtered)") == 3
    assert not any((base(queue) / ".dropq" / "reasons").rglob("*.json")), "no file says why"
    send(queue, "eu")
    assert take(queue).text == "eu"


def test_nothing_is_put_aside_before_the_configuration_was_as_it_is_for_as_long(queue: Queue, clock: Clock) -> None:
    send(queue, "us")
    clock.ms += HOUR * 1000 - 1000
    os.utime(base(queue) / "queue.toml")  # somebody saved it just now
    assert queue.receive() is None and not in_error(queue)
    past = int(os.stat(base(queue) / "queue.toml").st_ctime * 1000) + HOUR * 1000
    clock.ms = past - 1000
    assert queue.receive() is None and not in_error(queue)
    clock.ms = past + 5000
    assert queue.receive() is None and in_error(queue) == ["us"]


@pytest.mark.parametrize(
    "now",
    [
        "filter = \"region = 'us'\"",
        'filter_rest = "wait"',
        "filter = ",
        'unroutable_after = "2h"',
        'message_type = "fix"',
    ],
)
def test_a_consumer_of_yesterdays_filter_puts_nothing_aside(queue: Queue, clock: Clock, now: str) -> None:
    send(queue, "us")
    assert queue.receive() is None
    text = (base(queue) / "queue.toml").read_text()
    kept = [line for line in text.splitlines() if line.split(" ")[0] != now.split(" ")[0]]
    (base(queue) / "queue.toml").write_text("\n".join([*kept, now]))
    clock.ms += 10 * HOUR * 1000
    assert queue.receive() is None and not in_error(queue)


def test_after_the_mend_a_requeue_brings_back_what_a_wrong_filter_put_aside(queue: Queue, clock: Clock) -> None:
    send(queue, *["us"] * 50)
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    assert len(in_error(queue)) == 50
    config = base(queue) / "queue.toml"
    config.write_text(config.read_text().replace("'eu'", "'us'"))
    mended = reopened(queue, FRESH)
    assert len(mended.requeue()) == 50
    assert [take(mended).text for _ in range(50)] == ["us"] * 50


def test_a_configuration_behind_a_link_is_given_as_much_time(queue: Queue, clock: Clock, tmp_path: Path) -> None:
    config, elsewhere = base(queue) / "queue.toml", tmp_path / "elsewhere.toml"
    config.rename(elsewhere)
    config.symlink_to(elsewhere)
    send(queue, "us")
    clock.ms += 2 * HOUR * 1000
    os.utime(elsewhere)
    clock.ms = int(os.stat(elsewhere).st_ctime * 1000) + HOUR * 1000 - 1000
    assert queue.receive() is None and not in_error(queue)


def test_why_is_not_told_on_a_host_that_lacks_what_the_filter_needs(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"filter": "/a LIKE 'x'", "filter_rest": "error", "unroutable_after": HOUR}
    queue = make_queue(tmp_path / "root", clock=clock, timing=FRESH, **asked)
    queue.send('{"a": "b"}')
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    monkeypatch.setitem(sys.modules, "re2", None)
    assert [message.reason for message in queue.browse("error")] == [None]


def test_what_cannot_be_read_or_is_too_long_waits(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(
        tmp_path / "root", clock=clock, timing=FRESH, filter="/a = 1", filter_rest="error", unroutable_after=HOUR
    )
    queue.send(b" " * (LIMIT + 1), priority=9)
    queue.send("[" * 100_000 + "]" * 100_000)
    queue.send('{"a": 2}')
    queue.send("no JSON at all")
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    assert in_error(queue) == ["no JSON at all", '{"a": 2}']
    for said in queue.explain():
        assert (said.why, said.until) == ("filter", None)
        assert said.detail.endswith("as its body cannot be read, or is too long or deep: it stays")
    with monkeypatch.context() as patch:
        patch.setattr(Body, "_parse", lambda body: pytest.fail("it was read before"))
        assert queue.receive() is None
    assert queue.counts()["target"] == 2


def test_sweeps_routers_and_those_who_look_leave_the_rest_where_it_is(queue: Queue, clock: Clock) -> None:
    send(queue, "us")
    clock.ms += 2 * HOUR * 1000
    queue.sweep()
    queue.route()
    list(queue.browse())
    assert not in_error(queue)
    assert queue.receive() is None and in_error(queue) == ["us"]


def test_an_expired_message_goes_to_expired(queue: Queue, clock: Clock) -> None:
    queue.send("old", properties={"region": "us"}, expires_in=1)
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    queue.sweep()
    assert not in_error(queue) and len(names_in(queue, "expired")) == 1


def test_two_files_of_one_name_both_stay(queue: Queue, clock: Clock) -> None:
    drop(queue, "report.csv", b"first")
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    drop(queue, "report.csv", b"second")
    clock.ms += 2 * HOUR * 1000
    assert queue.receive() is None
    assert in_error(queue) == ["first", "second"]


def test_a_filter_that_does_not_decide_by_the_message_alone_is_refused_with_it(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    with pytest.raises(ConfigError, match=r'with filter_rest = "error" .* leave JMSXDeliveryCount out'):
        root.create_queue("q", filter="JMSXDeliveryCount < 3", filter_rest="error")
    with pytest.raises(ConfigError, match=r"leave UNIX_TIMESTAMP\(\) out"):
        root.create_queue("q", filter="/until > UNIX_TIMESTAMP()", filter_rest="error")
    root.create_queue("q", filter="JMSXDeliveryCount < 3")


def test_a_filter_that_asks_for_the_time_is_evaluated_again_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", timing=FRESH, filter="/from < UNIX_TIMESTAMP()")
    consumer = queue.subscribe()
    queue.send('{"from": 1000}')
    monkeypatch.setattr(functions, "time", SimpleNamespace(time=lambda: 999.0))
    assert consumer.receive() is None
    monkeypatch.setattr(functions, "time", SimpleNamespace(time=lambda: 1001.0))
    assert consumer.receive() is not None


def test_where_a_filter_chooses_what_comes_in_the_rest_stays_and_health_says_so(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    root.create_queue("view", underlying_topic=root.create_topic("news").name, filter=EU, filter_rest="error")
    (note,) = root.queue("view").health().notes
    assert note.kind == "filter-rest"


def test_health_tells_what_is_about_to_be_put_aside_and_calls_no_queue_jammed(queue: Queue) -> None:
    send(queue, "us")
    (note,) = queue.health().notes
    assert note.kind == "filtered"
    assert "after 1h, by unroutable_after, consumers put aside in error/ what waits" in note.message


def test_a_property_whose_name_ends_like_that_of_a_part_passes_no_filter(queue: Queue) -> None:
    queue.send("us", properties={"batch_first": 3, "last_record": 3, "region": "us"})
    drop(queue, "report_recordI=1.csv", b"x")
    assert queue.receive() is None


def test_what_is_left_of_a_bundle_passes_the_filter_that_let_the_bundle_in(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"message_type": "text", "filter": "/ LIKE 'ERROR'", "filter_rest": "error"}
    queue = make_queue(tmp_path / "root", timing=FRESH, unroutable_after=0, **asked)
    queue.send("ERROR 1\n2\n3\n", type="text")
    queue.send("no match", type="text")
    with queue.subscribe() as first:
        next(first.records()).ack()
    with queue.subscribe() as second:
        message = second.receive()
        assert message is not None and message.body == b"2\n3\n"
        message.ack()
        assert second.receive() is None
    assert in_error(queue) == ["no match"]
