"""What a key names over ZeroMQ: one message, whatever its file is called, and what an ack of it settles."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest
from helpers import Clock, base, drop, first_and_long, until, where

from dropq import Queue, Root, StorageError
from dropq.lifecycle.settlement import Claims

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from zeromq import PATIENCE, Served, served  # noqa: E402

#: Seconds for which a message is a consumer's where its time is to be over soon.
SHORT = 0.2


def make(path: Any, **options: Any) -> Queue:
    """Make a queue where what is given back would wait for an hour, if it did not come at once."""
    options = {"durability": "none", "redelivery_delay": "1h", "redelivery_delay_limit": "1h", **options}
    return Root.create(path / "root").create_queue("orders", **options)


def ack(consumer: Any, delivery: list[bytes]) -> None:
    """Acknowledge a delivery."""
    consumer.send_multipart([*delivery[:2], b"1"])


def counting(serving: Served) -> list[object]:
    """Return a list that grows with what the server reads of what consumers say."""
    read = list[object]()
    consumers = serving.server._consumers
    settle_late = consumers._settle_late

    def counted(settled: Any) -> None:
        settle_late(settled)
        read.append(settled)

    consumers._settle_late = counted  # type: ignore[method-assign]
    return read


def send_twin(queue: Queue, number: int) -> None:
    """Send a message whose id another has, as a sender does that chooses ids."""
    queue.send(b"%d" % number, message_id="same")


def drop_twin(queue: Queue, number: int) -> None:
    """Send a file whose name another had, as a script does."""
    drop(queue, "report.csv", b"%d" % number)


def copy_twin(queue: Queue, number: int) -> None:
    """Send a message, then copies of its file under its name, as people do."""
    if not number:
        queue.send(b"0")
        return
    first = next(path for state in ("processing", "processed") for path in (base(queue) / state).iterdir())
    name = first.name.rpartition("~")[2]
    (base(queue) / "working" / name).write_bytes(b"%d" % number)
    os.rename(base(queue) / "working" / name, base(queue) / "target" / name)


TWINS = pytest.mark.parametrize("twin", [send_twin, drop_twin, copy_twin])


@TWINS
@pytest.mark.parametrize("leasing", ["sublet", "strict"])
def test_of_two_messages_of_one_name_an_ack_settles_the_one_it_names(tmp_path: Any, leasing: str, twin: Any) -> None:
    queue = make(tmp_path, leasing=leasing)
    with served(queue) as serving:
        consumer = serving.consumer()
        out = []
        for number in range(3):
            twin(queue, number)
            out.append(consumer.recv_multipart())
        assert len({delivery[1] for delivery in out}) == 3
        for number in (2, 0, 1):
            assert out[number][-1] == b"%d" % number
            ack(consumer, out[number])
            until(lambda n=number: b"%d" % n in where(queue).get("processed", ()), "the ack")  # type: ignore[misc]


@TWINS
@pytest.mark.parametrize("leasing", ["sublet", "strict"])
@pytest.mark.parametrize("history", first_and_long([True, False]))
def test_a_late_ack_settles_no_other_message_of_the_name(tmp_path: Any, leasing: str, history: bool, twin: Any) -> None:
    history = history or twin is copy_twin  # else there is no file left to copy
    queue = make(tmp_path, leasing=leasing, history=history)
    with served(queue, ack_timeout=SHORT) as serving:
        consumer = serving.consumer()
        twin(queue, 0)
        late, again = consumer.recv_multipart(), consumer.recv_multipart()
        assert late[1] == again[1]
        while queue.counts()["processing"] or queue.counts()["target"]:
            ack(consumer, again)
            if consumer.poll(50):
                again = consumer.recv_multipart()
        queue.pause()
        twin(queue, 1)
        read = counting(serving)
        for _ in range(2):
            ack(consumer, late)
        until(lambda: len(read) >= 2, "the late acks to be read")
        queue.resume()
        assert consumer.recv_multipart()[-1] == b"1"
        ack(consumer, late)
        until(lambda: len(read) >= 3, "the late ack to be read")
        assert consumer.recv_multipart()[-1] == b"1", "its time is over, and nobody has acknowledged it"


def test_two_copies_that_came_by_two_selectors_have_two_keys_at_each_delivery(tmp_path: Any) -> None:
    end = make(tmp_path, redelivery_delay=0)
    start, *ways = (end.root.create_queue(name, durability="none") for name in ("start", "left", "right"))
    for way in ways:
        start.add_selector(way.name, op="copy", to=way.name)
        way.add_selector("on", to="orders", credit=5)
    start.send(b"body")
    for queue in (start, *ways):
        queue.route()
    keys = []
    for _ in range(2):
        out = [message for message in (end.receive(), end.receive()) if message is not None]
        keys.append({message._distinction for message in out})
        assert len(out) == len(keys[-1]) == 2
        for message in out:
            message.nack()
    assert keys[0] == keys[1]
    with served(end) as serving:
        consumer = serving.consumer()
        deliveries = [consumer.recv_multipart() for _ in range(2)]
        for delivery in deliveries:
            ack(consumer, delivery)
        until(lambda: where(end) == {"processed": [b"body", b"body"]}, "both acks")


@pytest.mark.parametrize("leasing", ["sublet", "strict"])
def test_a_late_ack_settles_its_message_where_others_may_settle(tmp_path: Any, leasing: str) -> None:
    queue = make(tmp_path, leasing=leasing)
    with served(queue, ack_timeout=SHORT) as serving:
        consumer, consumers = serving.consumer(), serving.server._consumers
        drop_twin(queue, 0)
        late = consumer.recv_multipart()
        consumers.deliver = lambda: None  # type: ignore[method-assign]
        until(lambda: where(queue) == {"target": [b"0"]}, "the end of its time")
        drop_twin(queue, 1)
        ack(consumer, late)
        ack(consumer, [late[0], b"never sent"])
        if leasing == "sublet":
            until(lambda: where(queue) == {"processed": [b"0"], "target": [b"1"]}, "the late ack")
        else:
            until(lambda: not any(late.counts for late in consumers._late.values()), "the late ack to be read")
            assert sorted(where(queue)["target"]) == [b"0", b"1"]
        assert serving.figures()["acks_late"] == ("1" if leasing == "sublet" else "0")


def test_a_late_ack_that_the_disk_refuses_leaves_its_message_where_it_waits(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise StorageError("the disk is full", path="", errno=errno.ENOSPC)

    queue = make(tmp_path)
    with served(queue, ack_timeout=SHORT) as serving:
        consumer, consumers = serving.consumer(), serving.server._consumers
        drop_twin(queue, 0)
        late = consumer.recv_multipart()
        consumers.deliver = lambda: None  # type: ignore[method-assign]
        until(lambda: where(queue) == {"target": [b"0"]}, "the end of its time")
        read = counting(serving)
        monkeypatch.setattr(Claims, "archive", refuse)
        ack(consumer, late)
        until(lambda: read, "the late ack to be read")
        assert where(queue) == {"target": [b"0"]}


def test_a_late_ack_settles_what_another_consumer_holds(tmp_path: Any) -> None:
    queue = make(tmp_path)
    with served(queue, ack_timeout=SHORT) as serving:
        consumer, consumers = serving.consumer(), serving.server._consumers
        drop_twin(queue, 0)
        late = consumer.recv_multipart()
        consumers.deliver = lambda: None  # type: ignore[method-assign]
        until(lambda: where(queue) == {"target": [b"0"]}, "the end of its time")
        with queue.subscribe() as other:
            held = other.receive()
            assert held is not None
            drop_twin(queue, 1)
            ack(consumer, late)
            until(lambda: where(queue) == {"processed": [b"0"], "target": [b"1"]}, "the late ack")


@pytest.mark.parametrize("twin", [send_twin, drop_twin])
def test_a_key_is_the_same_at_each_delivery_by_any_server(tmp_path: Any, twin: Any) -> None:
    queue = make(tmp_path)
    keys = set[bytes]()
    twin(queue, 0)
    for _ in range(2):
        with served(queue, ack_timeout=SHORT) as serving:
            consumer = serving.consumer()
            for _ in range(3):
                peer, key, *_ = consumer.recv_multipart()
                keys.add(key)
                consumer.send_multipart([peer, key, b"0"])
                keys.add(consumer.recv_multipart()[1])  # its time is over, then
    assert len(keys) == 1
    with served(queue) as serving:
        consumer = serving.consumer()
        ack(consumer, consumer.recv_multipart())
        until(lambda: where(queue) == {"processed": [b"0"]}, "the ack")
    assert (os.listdir(queue.layout.processed) == ["report.csv"]) == (twin is drop_twin)


def test_the_key_of_an_id_that_dropq_made_is_the_id(tmp_path: Any) -> None:
    queue = make(tmp_path)
    with served(queue) as serving:
        consumer = serving.consumer()
        sent = queue.send(b"body", properties={"a": 1})
        assert consumer.recv_multipart()[1] == sent.id.encode()
        drop(queue, "M\udcfcller.csv", b"foreign")
        assert consumer.recv_multipart()[1].startswith(b"M\xfcller.csv/")


# -- when time is over -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leasing", ["sublet", "strict"])
def test_what_was_said_in_time_counts_however_late_it_is_read(tmp_path: Any, leasing: str) -> None:
    queue = make(tmp_path, leasing=leasing)
    with served(queue, ack_timeout=SHORT * 5) as serving:
        consumer, consumers = serving.consumer(), serving.server._consumers
        settle, go_on, stands = consumers.settle, threading.Event(), threading.Event()

        def stand(*, readable: bool) -> None:
            stands.set()
            assert go_on.wait(PATIENCE / 1000)
            settle(readable=readable)

        queue.pause()
        queue.send_many([b"%d" % number for number in range(20)])
        queue.resume()
        out = [consumer.recv_multipart() for _ in range(20)]
        consumers.settle = stand  # type: ignore[method-assign]
        serving.server._wake()
        assert stands.wait(PATIENCE / 1000)
        for delivery in out:
            ack(consumer, delivery)
        is_in_time = time.time() * 1_000_000 < int(out[0][2]) + int(out[0][3])
        over = int(out[-1][2]) + int(out[-1][3]) + 2_000_000
        until(lambda: time.time() * 1_000_000 > over, "the end of their time, and of their claims")
        consumers.settle = settle  # type: ignore[method-assign]
        go_on.set()
        if not is_in_time:
            pytest.skip("this machine was too slow to answer in time")
        until(lambda: len(where(queue).get("processed", ())) == 20, "the acks")
        assert serving.figures()["expired_messages"] == "0"


def test_a_flood_of_acks_does_not_keep_messages_out_for_ever(tmp_path: Any) -> None:
    queue = make(tmp_path)
    with served(queue, ack_timeout=SHORT) as serving:
        consumer, consumers = serving.consumer(), serving.server._consumers
        queue.send(b"body")
        peer, key, *_ = consumer.recv_multipart()
        said = consumers._said
        consumers._said = lambda: iter([None] * 1000)  # type: ignore[method-assign]
        consumer.send_multipart([peer, b"?", b"1"])  # the first of so many that there are always more
        until(lambda: serving.figures()["expired_messages"] != "0", "the end of its time")
        consumers._said = said  # type: ignore[method-assign]
        assert consumer.recv_multipart()[1] == key


def test_what_is_given_back_comes_again_at_once(tmp_path: Any) -> None:
    queue = make(tmp_path)
    with served(queue, ack_timeout=SHORT) as serving:
        consumer = serving.consumer()
        queue.send(b"body")
        for _ in range(5):
            peer, key, *_ = consumer.recv_multipart()
            consumer.send_multipart([peer, key, b"0"])
            consumer.recv_multipart()  # its time is over, then
    (message,) = queue.browse()
    assert message.delivery_count >= 10 and message.deaths == 0  # another time, if the server ended late


def test_what_a_sweep_takes_from_a_server_comes_again_at_once(tmp_path: Any) -> None:
    queue = make(tmp_path)
    queue.send(b"body")
    with queue.subscribe(client_id="zmq-1", lease_period="1ms") as server:
        assert server.receive() is not None
        until(lambda: queue.sweep().lapsed, "the end of the lease")
        assert where(queue) == {"target": [b"body"]}


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_does_not_keep_messages_out(tmp_path: Any, hours: int) -> None:
    clock = Clock()
    queue = Root.create(tmp_path / "root", clock=clock).create_queue("orders", durability="none")
    with served(queue, ack_timeout=SHORT, in_flight=2) as serving:
        consumer = serving.consumer()
        queue.send_many([b"a", b"b", b"c"])
        got = {consumer.recv_multipart()[-1] for _ in range(2)}
        clock.advance(hours * 3600)
        while len(got) < 3:
            delivery = consumer.recv_multipart()
            got.add(delivery[-1])
            ack(consumer, delivery)


# -- what cannot be said -----------------------------------------------------------------------------------------------


def test_a_name_that_is_not_utf8_goes_out_with_its_bytes_as_escapes(tmp_path: Any) -> None:
    queue = make(tmp_path)
    drop(queue, "M\udcfcller.csv", b"body")
    with served(queue, headers=True) as serving:
        _, _, _, _, header, delimiter, body = serving.consumer().recv_multipart()
        assert b'"message_id":"M%FCller.csv"' in header
        assert (delimiter, body) == (b"", b"body")


def test_a_message_that_cannot_be_written_goes_to_error_and_ends_no_server(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dropq.zmq import wire

    def header(message: Any) -> bytes:
        if message.type == "bad":
            raise ValueError("no word for it")
        return b"{}"

    monkeypatch.setattr(wire, "header_of", header)
    queue = make(tmp_path)
    queue.send(b"bad", type="bad")
    queue.send(b"good")
    with served(queue, headers=True) as serving:
        assert serving.consumer().recv_multipart()[-1] == b"good"
    (message,) = queue.browse("error")
    assert message.reason is not None
    assert "no word for it" in str(message.reason["detail"])
