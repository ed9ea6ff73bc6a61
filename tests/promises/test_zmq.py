"""A queue served to clients of PZQ: every row of the table of docs/zeromq.md, byte for byte, and what is never lost."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from helpers import base, drop, events, health, names_in, sums, take, told, until, where
from workers import reason_in

from dropq import Queue, Root
from dropq.storage.files import Storage

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from zeromq import ANY, Served, served  # noqa: E402

from dropq.errors import ConfigError, Unavailable  # noqa: E402
from dropq.zmq.server import Server, Terms  # noqa: E402


@pytest.fixture
def queue(tmp_path: Any) -> Queue:
    """A queue, which keeps no message from anybody for long."""
    return Root.create(tmp_path / "root").create_queue("orders", redelivery_delay=0)


@pytest.fixture
def serving(queue: Queue) -> Iterator[Served]:
    """A server of the queue."""
    with served(queue) as serving:
        yield serving


# -- producers ---------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_answered_with_1_and_an_empty_frame(serving: Served, queue: Queue) -> None:
    assert serving.ask(b"id-1", b"", b"body") == [b"id-1", b"1", b""]
    assert where(queue) == {"target": [b"body"]}
    (message,) = queue.browse()
    assert (message.message_class, dict(message.properties)) == ("B", {})


@pytest.mark.parametrize("id", [b"", b"\xff\xfe", b"x" * 65_536, b"\0", b"1"])
def test_the_id_names_the_answer_whatever_it_is(serving: Served, id: bytes) -> None:
    assert serving.ask(id, b"", b"body") == [id, b"1", b""]


def test_equal_ids_get_an_answer_each(serving: Served, queue: Queue) -> None:
    producer = serving.producer()
    for body in (b"a", b"b"):
        producer.send_multipart([b"id", b"", body])
    assert [producer.recv_multipart() for _ in range(2)] == [[b"id", b"1", b""]] * 2
    assert sorted(where(queue)["target"]) == [b"a", b"b"]


def test_headers_are_ignored(serving: Served, queue: Queue) -> None:
    assert serving.ask(b"id", b'{"priority": 9}', b"no JSON", b"", b"body") == [b"id", b"1", b""]
    (message,) = queue.browse()
    assert (message.body, message.priority) == (b"body", 4)


@pytest.mark.parametrize("frames", [[b"id"], [b"id", b"h"], [b"id", b"h", b"body"], [b"id", b""], [b""]])
def test_what_is_no_message_gets_an_answer_too(serving: Served, queue: Queue, frames: list[bytes]) -> None:
    id, status, delimiter, why = serving.ask(*frames)
    assert (id, status, delimiter) == (frames[0], b"0", b"")
    assert why.startswith(b"malformed message: no")
    assert where(queue) == {}


def test_an_empty_body_is_a_message(serving: Served, queue: Queue) -> None:
    assert serving.ask(b"id", b"", b"") == [b"id", b"1", b""]
    assert where(queue) == {"target": [b""]}


def test_a_req_can_be_a_producer(serving: Served, queue: Queue) -> None:
    req = serving.connect(zmq.REQ, "receive")
    req.send_multipart([b"x", b"", b"body"])
    assert req.recv_multipart() == [b"1", b""]
    req.send_multipart([b"x"])
    assert req.recv_multipart()[:2] == [b"0", b""]
    assert where(queue) == {"target": [b"body"]}


def test_a_producer_that_pipelines_gets_every_answer(serving: Served, queue: Queue) -> None:
    producer = serving.producer(sndhwm=0, rcvhwm=0)
    for number in range(5000):
        producer.send_multipart([b"%d" % number, b"", b"body"])
    answers = [producer.recv_multipart() for _ in range(5000)]
    assert sorted(int(id) for id, *_ in answers) == list(range(5000))
    assert {tuple(rest) for _, *rest in answers} == {(b"1", b"")}
    assert queue.counts()["target"] == 5000


def test_a_part_of_64_megabytes_goes_in_and_out(serving: Served) -> None:
    part = os.urandom(64 << 20)
    consumer = serving.consumer()
    assert serving.ask(b"id", b"", part) == [b"id", b"1", b""]
    assert consumer.recv_multipart()[4:] == [b"", part]


def test_a_message_that_is_too_large_is_refused_and_the_loop_goes_on(queue: Queue) -> None:
    with served(queue, max_size=1000) as serving:
        id, status, _, why = serving.ask(b"id", b"", b"x" * 600, b"x" * 401)
        assert (id, status) == (b"id", b"0")
        assert why == b"the message has 1001 bytes: at most 1000 are allowed (--max-size)"
        assert serving.ask(b"id", b"", *[b"p"] * 1001)[1] == b"0"
        assert serving.ask(b"id", b"", b"x" * 1000)[1] == b"1"


def test_an_id_that_is_too_long_is_answered_with_its_first_64_kib(queue: Queue) -> None:
    with served(queue, max_size=1000) as serving:
        for size in ((64 << 10) + 1, 200_000):
            assert serving.ask(b"i" * size, b"", b"body")[:2] == [b"i" * (64 << 10), b"0"]
        assert serving.ask(b"i" * (64 << 10), b"", b"body")[1] == b"1"


def test_a_frame_of_over_twice_the_limit_ends_its_connection_and_no_other(queue: Queue) -> None:
    with served(queue, max_size=1000) as serving:
        other = serving.producer()
        serving.producer().send_multipart([b"id", b"", b"x" * 2001])
        other.send_multipart([b"id", b"", b"body"])
        assert other.recv_multipart() == [b"id", b"1", b""]
        assert where(queue) == {"target": [b"body"]}


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[b"a", b"", b"bcd"], [b"", b""], [b"p"] * 1000, [b"x" * 70_000, b"y"]])
def test_parts_are_one_file_and_come_out_as_they_went_in(serving: Served, queue: Queue, parts: list[bytes]) -> None:
    assert serving.ask(b"id", b"", *parts) == [b"id", b"1", b""]
    (message,) = queue.browse()
    assert message.body == b"".join(parts)
    assert message.properties["zmq_parts"] == "-".join(str(len(part)) for part in parts)
    assert serving.consumer().recv_multipart()[4:] == [b"", *parts]


def test_parts_survive_every_state(serving: Served, queue: Queue) -> None:
    serving.ask(b"id", b"", b"a", b"", b"bc")
    serving.end()
    take(queue).reject("no")
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    take(queue).ack()
    assert [outcome.ok for outcome in queue.replay()] == [True]
    with served(queue) as again:
        assert again.consumer().recv_multipart()[4:] == [b"", b"a", b"", b"bc"]


@pytest.mark.parametrize("lengths", ["1-1", "x", "", 3, 4, True])
def test_lengths_of_strangers_that_do_not_add_up_are_one_part(
    serving: Served, queue: Queue, lengths: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send(b"abc", properties={"zmq_parts": lengths})
    assert serving.consumer().recv_multipart()[4:] == [b"", b"abc"]
    assert ("goes out as one part" in caplog.text) == (lengths != 3)


# -- consumers ---------------------------------------------------------------------------------------------------------


def test_a_delivery_has_key_time_timeout_and_an_empty_frame(serving: Served, queue: Queue) -> None:
    consumer = serving.consumer()
    sent = queue.send(b"body")
    peer, key, when, timeout, delimiter, body = consumer.recv_multipart()
    assert (len(peer), key, timeout, delimiter, body) == (5, sent.id.encode(), b"5000000", b"", b"body")
    assert abs(int(when) / 1_000_000 - time.time()) < 60
    assert re.fullmatch(b"[0-9]{16}", when)
    assert names_in(queue, "processing")[0].startswith("zmq-")
    consumer.send_multipart([peer, key, b"1"])
    until(lambda: where(queue) == {"processed": [b"body"]}, "the ack")


@pytest.mark.parametrize("answer", [[b"0"], [b"OK"], [b""], [b"1x"], [b"0", b"1"]])
def test_anything_but_1_gives_a_message_back_at_once(serving: Served, queue: Queue, answer: list[bytes]) -> None:
    consumer = serving.consumer()
    queue.send(b"body")
    peer, key, *_ = consumer.recv_multipart()
    consumer.send_multipart([peer, key, *answer])
    assert consumer.recv_multipart()[1] == key
    until(lambda: serving.figures()["nacks"] == "1", "the nack")
    assert next(iter(queue.browse("processing"))).cancels == 1


def test_what_is_not_settled_in_time_comes_again(queue: Queue) -> None:
    with served(queue, ack_timeout=0.3) as serving:
        consumer = serving.consumer()
        queue.send(b"body")
        first, second = consumer.recv_multipart(), consumer.recv_multipart()
        assert first[1] == second[1]
        assert first[3] == b"300000"
        consumer.send_multipart([*second[:2], b"1"])
        until(lambda: where(queue) == {"processed": [b"body"]}, "the ack")
        assert int(serving.figures()["expired_messages"]) >= 1


def test_the_queues_lease_is_the_timeout(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", lease_period="7s")
    with served(queue) as serving:
        queue.send(b"body")
        assert serving.consumer().recv_multipart()[3] == b"7000000"


def written_to(serving: Served, queue: Queue) -> tuple[Any, list[bytes]]:
    """Deliver a file to a consumer, and write on in it; return the consumer, and what names the delivery."""
    consumer = serving.consumer()
    drop(queue, "a.csv", b"1\n")
    peer, key, *_, body = consumer.recv_multipart()
    assert body == b"1\n"
    (claim,) = (base(queue) / "processing").iterdir()
    with claim.open("ab") as file:
        file.write(b"2\n")
    return consumer, [peer, key]


def test_an_ack_of_a_body_that_was_written_to_meanwhile_puts_it_into_error(serving: Served, queue: Queue) -> None:
    consumer, delivery = written_to(serving, queue)
    consumer.send_multipart([*delivery, b"1"])
    until(lambda: where(queue) == {"error": [b"1\n2\n"]}, "the ack")
    assert reason_in(queue, "error")["reason"] == "body_changed"


def test_a_body_that_was_written_to_and_given_back_comes_as_it_is_now(serving: Served, queue: Queue) -> None:
    consumer, delivery = written_to(serving, queue)
    consumer.send_multipart([*delivery, b"0"])
    peer, key, *_, body = consumer.recv_multipart()
    assert (key, body) == (delivery[1], b"1\n2\n")
    consumer.send_multipart([peer, key, b"1"])
    until(lambda: where(queue) == {"processed": [b"1\n2\n"]}, "the ack")


def test_an_ack_of_what_was_never_sent_changes_nothing(serving: Served, queue: Queue) -> None:
    consumer = serving.consumer()
    first = queue.send(b"a")
    peer, *_ = consumer.recv_multipart()
    held = queue.send(b"b", delay="1h")
    for key in (held.id.encode(), b"", b"\xff", b"x" * 100_000):
        consumer.send_multipart([peer, key, b"1"])
    consumer.send_multipart([peer, first.id.encode()])  # nothing is said of it
    consumer.send_multipart([peer, first.id.encode(), b"1"])
    until(lambda: where(queue) == {"processed": [b"a"], "delayed": [b"b"]}, "the ack")


def test_a_consumer_that_reads_nothing_holds_no_more_than_is_allowed(queue: Queue) -> None:
    queue.send_many([b"x" * 100] * 2000)
    with served(queue, in_flight=7, ack_timeout=60) as serving:
        consumer = serving.consumer(rcvhwm=1)
        until(lambda: queue.counts()["processing"] == 7, "seven messages to be out")
        peer, key, *_ = consumer.recv_multipart()
        consumer.send_multipart([peer, key, b"1"])
        until(lambda: queue.counts()["processed"] == 1, "the ack")
        until(lambda: queue.counts()["processing"] == 7, "another to go out")
        assert serving.figures()["messages_in_flight"] == "7"
        assert queue.counts() | {"processing": 7, "processed": 1, "target": 1992} == queue.counts()


def test_without_a_consumer_nothing_is_claimed(serving: Served, queue: Queue) -> None:
    queue.send(b"body")
    assert serving.ask(b"id", b"", b"more")[1] == b"1"
    assert serving.figures()["processing"] == "0"
    assert queue.counts()["target"] == 2


def test_a_message_of_a_lone_producer_takes_one_round(serving: Served) -> None:
    assert serving.ask(b"id", b"", b"body")[1] == b"1"
    rounds, producer = 0, serving.producer()
    settle = serving.server._consumers.settle

    def counted(*, readable: bool) -> None:
        nonlocal rounds
        rounds += 1
        settle(readable=readable)

    serving.server._consumers.settle = counted  # type: ignore[method-assign]
    for number in range(200):
        producer.send_multipart([b"%d" % number, b"", b"body"])
        assert producer.recv_multipart()[1] == b"1"
    assert rounds < 300


@pytest.mark.parametrize("waiting", [0, 5])
def test_a_server_that_has_nothing_to_do_takes_no_time(serving: Served, queue: Queue, waiting: int) -> None:
    queue.send_many([b"body"] * waiting)
    assert serving.figures()["target"] == str(waiting)
    began, rounds = time.monotonic(), 0
    settle = serving.server._consumers.settle

    def counted(*, readable: bool) -> None:
        nonlocal rounds
        rounds += 1
        settle(readable=readable)

    serving.server._consumers.settle = counted  # type: ignore[method-assign]
    until(lambda: time.monotonic() > began + 1, "a second")
    assert rounds < 20


def test_a_body_that_is_too_large_goes_to_error(queue: Queue) -> None:
    queue.send(b"x" * 1001)
    queue.send(b"fits")
    with served(queue, max_size=1000) as serving:
        assert serving.consumer().recv_multipart()[-1] == b"fits"
        (message,) = queue.browse("error")
        assert message.reason is not None
        assert message.reason["detail"] == "its body has 1001 bytes, and --max-size lets 1000 out"


def test_at_most_once_without_history_an_ack_removes_the_body(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", semantics="at-most-once", history=False)
    with served(queue) as serving:
        queue.send(b"a")
        consumer = serving.consumer()
        delivery = consumer.recv_multipart()
        (body,) = (base(queue) / ".dropq" / "held").glob("*/*")
        assert body.read_bytes() == b"a"
        consumer.send_multipart([*delivery[:2], b"1"])
        until(lambda: serving.figures()["acks"] == "1", "the ack")
        until(lambda: not list((base(queue) / ".dropq" / "held").glob("*/*")), "the body to go")


def test_at_most_once_nothing_comes_again(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", semantics="at-most-once")
    with served(queue, in_flight=2, ack_timeout=0.3) as serving:
        queue.send_many([b"a", b"b", b"c"])
        consumer = serving.consumer()
        got = [consumer.recv_multipart() for _ in range(3)]
        assert sorted(frames[-1] for frames in got) == [b"a", b"b", b"c"]
        consumer.send_multipart([*got[2][:2], b"0"])
        until(lambda: serving.figures()["messages_in_flight"] == "0", "the last to be over")
        assert sorted(where(queue)["processed"]) == [b"a", b"b", b"c"]


# -- headers -----------------------------------------------------------------------------------------------------------


def test_with_headers_a_message_says_more_both_ways(queue: Queue) -> None:
    with served(queue, headers=True) as serving:
        said = {
            "priority": 7,
            "type": "order",
            "correlation_id": "c",
            "reply_to": "answers",
            "properties": {"region": "eu", "paid": True},
            "message_id": "mine",
        }
        assert serving.ask(b"id", json.dumps(said).encode(), b"", b"a", b"b") == [b"id", b"1", b""]
        _, key, _, _, header, delimiter, *parts = serving.consumer().recv_multipart()
        assert (key[:5], delimiter, parts) == (b"mine/", b"", [b"a", b"b"])
        parsed = json.loads(header)
        assert {name: parsed[name] for name in said} == said
        assert parsed["delivery_count"] == 1
        assert abs((datetime.fromisoformat(parsed["timestamp"]) - datetime.now(UTC)).total_seconds()) < 60


@pytest.mark.parametrize(
    "header",
    [
        *(b"x", b"[]", b'{"prio": 1}', b'{"priority": 99999999999}', b'{"delay": "soon"}', b'{"delay": -1}'),
        *(b'{"properties": {"a b": 1}}', b'{"properties": {"a": [1]}}', b'{"properties": {"zmq_parts": "1"}}'),
        *(b'{"message_id": ""}', b'{"type": "\\ud800"}', b'{"expires_in": null}'),
    ],
)
def test_a_header_that_is_wrong_refuses_its_message_and_no_other(queue: Queue, header: bytes) -> None:
    with served(queue, headers=True) as serving:
        producer = serving.producer()
        for id, said in ((b"1", b"{}"), (b"2", header), (b"3", b'{"priority": 5}')):
            producer.send_multipart([id, said, b"", id])
        answers = {answer[0]: answer[1:] for answer in (producer.recv_multipart() for _ in range(3))}
        assert (answers[b"1"], answers[b"3"]) == ([b"1", b""], [b"1", b""])
        assert answers[b"2"][:2] == [b"0", b""]
        assert answers[b"2"][2]
        assert sorted(where(queue)["target"]) == [b"1", b"3"]


# -- the log -----------------------------------------------------------------------------------------------------------


def test_the_log_tells_how_each_delivery_to_a_consumer_ended_and_who_held_it(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", durability="none", log="all")
    queue.send(b"too large")
    acked, refused, kept = (queue.send(body).id.encode() for body in (b"a", b"b", b"c"))
    with served(queue, max_size=8, ack_timeout=600) as serving:
        consumer = serving.consumer()
        out = {frames[1]: frames[:2] for frames in (consumer.recv_multipart() for _ in range(3))}
        owners = {str(message.owner) for message in queue.browse("processing")}
        consumer.send_multipart([*out[acked], b"1"])
        until(lambda: queue.counts()["processed"] == 1, "the ack")
        consumer.send_multipart([*out[refused], b"0"])
        consumer.send_multipart([*consumer.recv_multipart()[:2], b"1"])
        until(lambda: queue.counts()["processed"] == 2, "the ack of what came again")
        consumer.close()  # `kept` is still out when the server ends
    too_large, *rest = [event.fields for event in events(queue)[1:]]
    assert told(queue)[0] == ("rejected", "rejected") and "--max-size lets 8 out" in str(too_large["detail"])
    assert told(queue)[1:] == [("acked", None), ("returned", "nack"), ("acked", None), ("returned", "released")]
    assert [str(line["id"]).encode() for line in rest] == [acked, refused, refused, kept]
    assert [line["delivery"] for line in rest] == [1, 1, 2, 1]
    assert {rest[number]["owner"] for number in (0, 1, 3)} == owners
    assert all(str(line["owner"]).startswith(f"zmq-{os.getpid()}-") for line in (too_large, *rest))
    assert sums(queue) == {"rejected": 1, "acked": 2, "returned": 2}


def test_an_ack_that_comes_late_is_told_once_after_the_return(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", durability="none", log="all", leasing="sublet")
    queue.send(b"body")
    with served(queue, ack_timeout=0.2) as serving:
        late = (consumer := serving.consumer()).recv_multipart()
        serving.server._consumers.deliver = lambda: None  # type: ignore[method-assign]
        until(lambda: where(queue) == {"target": [b"body"]}, "the end of its time")
        consumer.send_multipart([*late[:2], b"1"])
        until(lambda: where(queue) == {"processed": [b"body"]}, "the late ack")
    *before, last = [event for event, _ in told(queue)]
    assert last == "acked" and set(before) == {"returned"}
    assert sums(queue) == {"acked": 1, "returned": len(before)}


# -- the monitor -------------------------------------------------------------------------------------------------------


def test_the_monitor_answers_with_the_six_lines_of_the_page_first(serving: Served, queue: Queue) -> None:
    queue.send(b"body")
    req = serving.connect(zmq.REQ, "monitor")
    req.send(b"MONITOR")
    (text,) = req.recv_multipart()
    lines = [line.split(": ") for line in text.decode().split("\n")]
    assert lines.pop() == [""]
    assert [name for name, _ in lines[:8]] == [
        *("messages", "messages_in_flight", "db_size", "in_flightdb_size", "syncs", "expired_messages"),
        *("messages_inflight", "inflight_db_size"),
    ]
    assert dict(lines[:3]) == {"messages": "1", "messages_in_flight": "0", "db_size": "4"}
    assert all(len(line) == 2 for line in lines)


@pytest.mark.parametrize("frames", [[b"HELLO"], [b""], [b"MONITOR", b"x"]])
def test_the_monitor_complains_about_anything_else(serving: Served, frames: list[bytes]) -> None:
    req = serving.connect(zmq.REQ, "monitor")
    req.send_multipart(frames)
    assert req.recv_multipart() == [b"error: send MONITOR"]


# -- a queue in trouble ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overflow", "why"), [("reject", b"is full"), ("discard", b"discards")])
def test_a_full_queue_answers_0(tmp_path: Any, overflow: str, why: bytes) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", max_unprocessed=2, overflow=overflow)
    with served(queue) as serving:
        producer = serving.producer()
        for number in range(5):
            producer.send_multipart([b"%d" % number, b"", b"body"])
        answers = [producer.recv_multipart() for _ in range(5)]
        assert sorted(answer[1] for answer in answers) == [b"0", b"0", b"0", b"1", b"1"]
        assert all(why in answer[3] for answer in answers if answer[1] == b"0")
        assert queue.counts()["target"] == 2


def test_a_full_queue_that_blocks_holds_its_producers_and_acks_go_on(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", max_unprocessed=3, overflow="block")
    with served(queue, in_flight=1) as serving:
        producer, consumer = serving.producer(), serving.consumer()
        for number in range(50):
            producer.send_multipart([b"%d" % number, b"", b"%d" % number])
        answers = [producer.recv_multipart() for _ in range(3)]
        assert producer.poll(200) == 0, "what has no room is not answered"
        bodies = []
        for _ in range(50):
            peer, key, *_, body = consumer.recv_multipart()
            bodies.append(int(body))
            consumer.send_multipart([peer, key, b"1"])
        answers += [producer.recv_multipart() for _ in range(47)]
        assert {answer[1] for answer in answers} == {b"1"}
        assert sorted(bodies) == list(range(50))


def test_a_write_lock_holds_producers_until_it_goes(serving: Served, queue: Queue) -> None:
    producer, consumer = serving.producer(), serving.consumer()
    queue.send(b"before")
    lock = queue.layout.write_lock
    open(lock, "w").close()
    until(lambda: _is_held(queue), "the write-lock to be seen")
    producer.send_multipart([b"id", b"", b"after"])
    peer, key, *_ = consumer.recv_multipart()
    consumer.send_multipart([peer, key, b"1"])
    until(lambda: where(queue).get("processed") == [b"before"], "the ack")
    assert serving.figures()["stored"] == "0"
    os.unlink(lock)
    assert producer.recv_multipart() == [b"id", b"1", b""]


def _is_held(queue: Queue) -> bool:
    limits = queue.root.queue(queue.name)._limits_of_sends()
    return not limits.admit_one()


def test_a_disk_that_refuses_answers_0_and_the_loop_goes_on(
    serving: Served, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Storage, path: str, data: bytes, **options: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_new", full)
        producer = serving.producer()
        for id in (b"1", b"2", b"3"):
            producer.send_multipart([id, b"", b"body"])
        for id in (b"1", b"2", b"3"):
            answer = producer.recv_multipart()
            assert answer[:3] == [id, b"0", b""]
            assert b"No space left on device" in answer[3] and b"the message was not sent" in answer[3]
    assert where(queue) == {}
    assert serving.ask(b"id", b"", b"body")[1] == b"1"


def test_what_was_sent_and_could_not_be_synced_is_answered_0(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", durability="full")

    def broken(self: Storage, *folders: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folders[0])

    with served(queue) as serving, monkeypatch.context() as patch:
        patch.setattr(Storage, "sync", broken)
        id, status, _, why = serving.ask(b"id", b"", b"body")
        assert (id, status) == (b"id", b"0")
        assert b"it is visible" in why or b"the message is visible" in why
        assert where(queue) == {"target": [b"body"]}


def test_acks_that_are_refused_are_tried_again(serving: Served, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = serving.consumer()
    queue.send(b"body")
    frames = consumer.recv_multipart()
    tried = []

    def refused(self: Storage, source: str, destination: str, *how: object) -> None:
        tried.append(source)
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "move", refused)
        consumer.send_multipart([*frames[:2], b"1"])
        until(lambda: tried, "the first try")
        assert where(queue) == {"processing": [b"body"]}
    until(lambda: where(queue) == {"processed": [b"body"]}, "another try")


def test_a_server_that_stops_waits_for_no_ack_that_is_refused_beyond_its_lease(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"body")
    tried = []

    def refused(self: Storage, source: str, destination: str, *how: object) -> None:
        tried.append(source)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), source)

    with served(queue, ack_timeout=0.3) as serving, monkeypatch.context() as patch:
        consumer = serving.consumer()
        frames = consumer.recv_multipart()
        patch.setattr(Storage, "move", refused)
        consumer.send_multipart([*frames[:2], b"1"])
        until(lambda: tried, "the first try")
        serving.stop.ask()
        until(serving.ended.is_set, "the end of the server")
    assert where(queue) == {"target": [b"body"]}


def test_what_found_no_room_is_refused_at_the_end(tmp_path: Any) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", max_unprocessed=1, overflow="block")
    with served(queue) as serving:
        producer = serving.producer()
        for id in (b"1", b"2"):
            producer.send_multipart([id, b"", b"body"])
        assert producer.recv_multipart() == [b"1", b"1", b""]
        until(lambda: serving.server._producers.blocked_for is not None, "the second to be read")
        serving.end()
        id, status, _, why = producer.recv_multipart()
        assert (id, status) == (b"2", b"0")
        assert b"the server ends" in why


def test_a_queue_that_is_deleted_answers_0_and_goes_on_when_it_is_made_again(serving: Served, queue: Queue) -> None:
    consumer = serving.consumer()
    assert serving.ask(b"id", b"", b"a")[1] == b"1"
    peer, key, *_ = consumer.recv_multipart()
    consumer.send_multipart([peer, key, b"1"])
    until(lambda: where(queue) == {"processed": [b"a"]}, "the ack")
    queue.root.delete_queue("orders", force=True)
    id, status, _, why = serving.ask(b"id", b"", b"b")
    assert (id, status) == (b"id", b"0")
    assert b"orders" in why
    queue.root.create_queue("orders")
    assert serving.ask(b"id", b"", b"c")[1] == b"1"
    assert consumer.recv_multipart()[-1] == b"c"


def test_a_paused_queue_takes_and_gives_nothing(serving: Served, queue: Queue) -> None:
    queue.pause()
    consumer = serving.consumer()
    assert serving.ask(b"id", b"", b"a")[1] == b"1"
    assert consumer.poll(300) == 0
    assert serving.figures()["paused"] == "1"
    queue.resume()
    assert consumer.recv_multipart()[-1] == b"a"


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_server_that_ends_waits_for_acks_and_returns_the_rest(queue: Queue) -> None:
    queue.send_many([b"a", b"b", b"c"])
    with served(queue, in_flight=2, ack_timeout=1) as serving:
        consumer = serving.consumer()
        first = consumer.recv_multipart()
        consumer.recv_multipart()
        serving.stop.ask()
        consumer.send_multipart([*first[:2], b"1"])
        assert serving.ended.wait(15)
        assert len(where(queue)["processed"]) == 1
        assert len(where(queue)["target"]) == 2


def test_a_server_that_is_asked_twice_returns_all_at_once(queue: Queue) -> None:
    queue.send_many([b"a", b"b"])
    with served(queue, ack_timeout=600) as serving:
        consumer = serving.consumer()
        for _ in range(2):
            consumer.recv_multipart()
        serving.stop.ask()
        serving.stop.ask()
        assert serving.ended.wait(15)
    assert len(where(queue)["target"]) == 2


# -- who may -----------------------------------------------------------------------------------------------------------


def _terms(name: str, address: str) -> Terms:
    """Return terms with an address for one of the sockets."""
    options: dict[str, Any] = {"receive": ANY, "send": ANY, "monitor": ANY, name: address}
    return Terms(**options)


@pytest.mark.parametrize(
    "address", ["tcp://*:0", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://eth0:1", "tcp://192.168.0.1:1", "ipc://@name"]
)
def test_an_address_that_is_open_to_others_needs_keys(queue: Queue, address: str) -> None:
    for name in ("receive", "send", "monitor"):
        with pytest.raises(ConfigError, match=re.escape(f"--{name} {address} is open to others")):
            Server(queue, _terms(name, address))
    Server(queue, Terms(receive=address, insecure=True))


@pytest.mark.parametrize("address", ["", "11131", "udp://127.0.0.1:1", "inproc://x", "tcp://", "ipc://", "pgm://x"])
def test_what_is_no_address_is_refused(queue: Queue, address: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        Server(queue, Terms(send=address))


def test_an_ipc_socket_is_private_in_a_folder_of_its_owners_alone(queue: Queue, tmp_path: Any) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="is open to others"):
        Server(queue, Terms(send=f"ipc://{folder}/send"))
    folder.chmod(0o700)
    Server(queue, Terms(send=f"ipc://{folder}/send"))


def test_an_address_that_is_taken_is_refused_before_anything_is_claimed(serving: Served, queue: Queue) -> None:
    queue.send(b"body")
    for name in ("receive", "send", "monitor"):
        terms = _terms(name, serving.bound[name])
        server = Server(queue, terms)
        with pytest.raises(Unavailable, match="cannot be bound: Address already in use"), server.opened():
            pass
    assert where(queue) == {"target": [b"body"]}


def test_an_ipc_path_that_is_taken_is_refused_and_stays(queue: Queue) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        with (
            served(queue, send=f"ipc://{path}"),
            pytest.raises(Unavailable, match="another server uses it"),
            served(queue, send=f"ipc://{path}"),
        ):
            pass
        with open(f"{folder}/file", "w") as file:
            file.write("mine")
        with pytest.raises(Unavailable, match="is there, and is no socket"), served(queue, send=f"ipc://{folder}/file"):
            pass
        with open(f"{folder}/file") as file:
            assert file.read() == "mine"


class Certificates:
    """A folder of keys, as docs/zeromq.md makes it."""

    def __init__(self, folder: Any) -> None:
        import zmq.auth

        self.folder = folder
        folder.mkdir()
        for name in ("producers", "consumers", "monitors"):
            (folder / name).mkdir()
        zmq.auth.create_certificates(folder, "server")
        (folder / "server.key_secret").chmod(0o600)
        self.server, _ = zmq.auth.load_certificate(folder / "server.key")

    def make(self, role: str | None) -> dict[str, bytes]:
        """Make a key, let it in as a role, and return the options of its socket."""
        import zmq.auth

        elsewhere = self.folder.parent / f"keys-of-{role}"
        elsewhere.mkdir(exist_ok=True)
        public, _ = zmq.auth.create_certificates(elsewhere, "me")
        if role is not None:
            os.link(public, self.folder / role / "me.key")
        key, secret = zmq.auth.load_certificate(elsewhere / "me.key_secret")
        assert secret is not None
        return {"curve_publickey": key, "curve_secretkey": secret, "curve_serverkey": self.server}


def test_with_keys_each_socket_lets_in_its_own_and_nobody_else(
    queue: Queue, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Certificates(tmp_path / "keys")
    producer, consumer, stranger = keys.make("producers"), keys.make("consumers"), keys.make(None)
    with served(queue, keys=str(keys.folder), receive="tcp://*:*", hwm=1) as serving:
        serving.bound["receive"] = serving.bound["receive"].replace("0.0.0.0", "127.0.0.1")
        good = serving.producer(**producer)
        good.send_multipart([b"id", b"", b"body"])
        assert good.recv_multipart() == [b"id", b"1", b""]
        assert serving.consumer(**consumer).recv_multipart()[-1] == b"body"
        for refused in (serving.producer(**stranger), serving.producer(**consumer), serving.producer()):
            with suppress(zmq.Again):  # its connection may have ended already
                refused.send_multipart([b"id", b"", b"bad"], zmq.NOBLOCK)
            assert refused.poll(300) == 0
        queue.send(b"more")
        assert serving.consumer(**producer).poll(300) == 0
        late = keys.make("monitors")
        serving.server.reread_keys()
        until(lambda: "the keys were read again" in caplog.text, "the keys to be read")
        req = serving.connect(zmq.REQ, "monitor", **late)
        req.send(b"MONITOR")
        assert b"queue: orders" in req.recv()
        assert not any(b"bad" in bodies for bodies in where(queue).values())


def test_keys_that_others_may_read_or_that_are_missing_are_refused(queue: Queue, tmp_path: Any) -> None:
    keys = Certificates(tmp_path / "keys")
    secret = keys.folder / "server.key_secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others than its owner: run `chmod 600"):
        Server(queue, Terms(keys=str(keys.folder)))
    secret.chmod(0o600)
    (keys.folder / "monitors").rmdir()
    with pytest.raises(ConfigError, match="monitors is no folder"):
        Server(queue, Terms(keys=str(keys.folder)))
    (keys.folder / "monitors").mkdir()
    secret.write_text("nothing")
    with pytest.raises(ConfigError, match="no key can be read"):
        Server(queue, Terms(keys=str(keys.folder)))
    secret.unlink()
    with pytest.raises(ConfigError, match="no key can be read"):
        Server(queue, Terms(keys=str(keys.folder)))


def test_health_tells_of_a_consumer_that_waits_for_more_than_may_be_out(queue: Queue) -> None:
    queue.send_many([b"a", b"b", b"c"])
    with served(queue, in_flight=2, ack_timeout=60) as serving:
        consumer = serving.consumer()
        for _ in range(2):
            consumer.recv_multipart()
        until(lambda: not health(queue, max_age="1ms").healthy, "the third message to be too old")
        (reason,) = health(queue, max_age="1ms").reasons
        assert "wants more than --in-flight of `dropq serve` before it acknowledges gets no more" in reason.message


def test_health_tells_of_a_server_that_has_no_consumer(serving: Served, queue: Queue) -> None:
    assert health(queue, max_age=0).healthy
    sent = queue.send(b"body")
    until(lambda: not health(queue, max_age="1ms").healthy, "the message to be too old")
    (reason,) = health(queue, max_age="1ms").reasons
    assert f"zmq-{os.getpid()} lives, and no consumer takes a message from it" in reason.message
    assert serving.consumer().recv_multipart()[1] == sent.id.encode()
    assert health(queue, max_age="1ms").healthy, "what is held with a lease does not wait"


# -- the clients of the example ----------------------------------------------------------------------------------------


def test_the_clients_of_the_example_work(serving: Served, queue: Queue) -> None:
    producer, consumer = serving.client("Producer"), serving.client("Consumer")
    id = producer.send(b"one", b"two")
    assert producer.answer() == (id, None)
    parts, message = consumer.receive()
    assert parts == [b"one", b"two"]
    consumer.settle(message, done=False)
    parts, message = consumer.receive()
    consumer.settle(message)
    until(lambda: where(queue) == {"processed": [b"onetwo"]}, "the ack")
    assert serving.figures()["acks"] == "1"


def test_several_servers_share_a_queue(queue: Queue) -> None:
    with served(queue) as one, served(queue.root.queue("orders")) as other:
        queue.send_many([b"%d" % number for number in range(200)])
        got = set[bytes]()
        consumers = [one.consumer(), other.consumer()]
        while len(got) < 200:
            for consumer in consumers:
                if consumer.poll(20):
                    peer, key, *_, body = consumer.recv_multipart()
                    assert body not in got
                    got.add(body)
                    consumer.send_multipart([peer, key, b"1"])
        until(lambda: queue.counts()["processed"] == 200, "all acks")
