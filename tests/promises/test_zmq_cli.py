"""`dropq serve QUEUE --zmq`: what it refuses, how it ends, and what shell scripts do with its messages."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Run, until, where

from dropq import Queue, Root

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from zeromq import PATIENCE, commanded  # noqa: E402


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root with one queue."""
    root = Root.create(tmp_path / "root")
    root.create_queue("orders")
    return root


@pytest.fixture
def queue(root: Root) -> Queue:
    """The queue of the root."""
    return root.queue("orders")


@pytest.fixture
def connect() -> Iterator[Any]:
    """Connect sockets, which end with the test."""
    made = []
    with zmq.Context() as context:

        def one(kind: int, address: str) -> Any:
            socket = context.socket(kind)
            made.append(socket)
            socket.linger = 0
            socket.rcvtimeo = PATIENCE
            socket.connect(address)
            return socket

        yield one
        for socket in made:
            socket.close()


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ((), 2, "give --zmq"),
        (("--zmq", "--send", "11132"), 2, "'11132' is no address: tcp://HOST:PORT and ipc://PATH are allowed"),
        (("--zmq", "--send", "tcp://*:11132"), 78, "--send tcp://*:11132 is open to others"),
        (("--zmq", "--keys", "/nowhere"), 78, "/nowhere/server.key_secret: no key can be read"),
        (("--zmq", "--receive", "tcp://127.0.0.1:99999"), 2, "'tcp://127.0.0.1:99999' is no address"),
        (("--zmq", "--receive", "tcp://localhost:"), 2, "'tcp://localhost:' is no address"),
        (("--zmq", "--receive", "ipc:///nowhere/x", "--insecure"), 75, "ipc:///nowhere/x cannot be bound"),
        (("--zmq", "--ack-timeout", "0"), 2, "a lease lasts at least 1ms"),
        (("--zmq", "--ack-timeout", "5000000"), 2, "a bare number is seconds, and PZQ's are microseconds"),
        (("--zmq", "--in-flight", "0"), 2, "in-flight"),
        (("--zmq", "--max-size", "64X"), 2, "'64X': a number of bytes from 1 is allowed"),
        (("--zmq", "--max-size", "0M"), 2, "'0M': a number of bytes from 1 is allowed"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_claimed(
    run: Run, queue: Queue, options: tuple[str, ...], code: int, why: str
) -> None:
    queue.send(b"body")
    ran = run("serve", "orders", *options)
    assert (ran.code, ran.out) == (code, "")
    assert why in ran.err
    assert where(queue) == {"target": [b"body"]}


def test_a_queue_that_is_not_there_is_refused(run: Run) -> None:
    assert run("serve", "nothing", "--zmq").code == 66


@pytest.mark.parametrize("missing", ["zmq", "nacl"])
def test_without_pyzmq_or_pynacl_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing or name.startswith("dropq.zmq")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    ran = run("serve", "orders", "--zmq")
    assert ran.code == 69
    assert "pip install 'dropq[zmq]'" in ran.err


def test_a_term_signal_under_load_returns_nothing_that_is_acked_in_time(root: Root, queue: Queue, connect: Any) -> None:
    with commanded(root, "--in-flight", "20", "--ack-timeout", "5s", "--max-size", "1m") as (server, bound):
        producer, consumer = connect(zmq.DEALER, bound["receive"]), connect(zmq.ROUTER, bound["send"])
        for number in range(300):
            producer.send_multipart([b"%d" % number, b"", b"%d" % number])
        acked = set[bytes]()
        out = []
        while len(acked) < 60:
            out.append(consumer.recv_multipart())
            if len(out) > 5:
                peer, key, *_, body = out.pop(0)
                consumer.send_multipart([peer, key, b"1"])
                acked.add(body)
        server.send_signal(signal.SIGTERM)
        until(lambda: not connect_takes(bound["receive"], connect), "the server to read no more")
        while True:
            out += [consumer.recv_multipart()] if consumer.poll(0 if out else 500) else []
            if not out:
                break
            peer, key, *_, body = out.pop(0)
            consumer.send_multipart([peer, key, b"1"])
            acked.add(body)
        assert server.wait(15) == 0
        assert set(where(queue)["processed"]) == acked
        assert queue.counts()["processing"] == 0
        answered = set()
        while producer.poll(0):
            id, status, *_ = producer.recv_multipart()
            assert status == b"1"
            answered.add(id)
        assert answered <= acked | set(where(queue)["target"])


def connect_takes(address: str, connect: Any) -> bool:
    """Return whether a server answers a new producer within a tenth of a second."""
    socket = connect(zmq.DEALER, address)
    socket.send_multipart([b"probe"])
    return bool(socket.poll(100))


def test_a_second_signal_returns_at_once_what_is_out(root: Root, queue: Queue, connect: Any) -> None:
    queue.send(b"body")
    with commanded(root, "--ack-timeout", "10m") as (server, bound):
        connect(zmq.ROUTER, bound["send"]).recv_multipart()
        server.send_signal(signal.SIGTERM)
        until(lambda: not connect_takes(bound["receive"], connect), "the server to read no more")
        server.send_signal(signal.SIGINT)
        assert server.wait(15) == 0
    counts = queue.counts()
    assert counts["target"] + counts["delayed"] == 1, "it comes again after the queue's redelivery_delay"


def test_what_a_killed_server_held_comes_to_the_next(root: Root, queue: Queue, connect: Any) -> None:
    queue.send_many([b"a", b"b", b"c"])
    with commanded(root, "--ack-timeout", "10m") as (server, bound):
        consumer = connect(zmq.ROUTER, bound["send"])
        for _ in range(3):
            consumer.recv_multipart()
        server.kill()
        server.wait()
    with commanded(root) as (_, bound):
        consumer = connect(zmq.ROUTER, bound["send"])
        assert sorted(consumer.recv_multipart()[-1] for _ in range(3)) == [b"a", b"b", b"c"]


def test_scripts_make_and_read_messages_of_many_parts(
    root: Root, queue: Queue, run: Run, connect: Any, tmp_path: Path
) -> None:
    assert run("send", "orders", "-p", "zmq_parts=5-2", input="head\nx\n").code == 0
    with commanded(root, "--ack-timeout", "10m") as (server, bound):
        *_, delimiter, first, second = connect(zmq.ROUTER, bound["send"]).recv_multipart()
        assert (delimiter, first, second) == (b"", b"head\n", b"x\n")
        server.kill()
    (path,) = Path(queue.layout.processing).iterdir()
    os.rename(path, Path(queue.layout.error) / path.name)  # as a person does
    assert run("requeue", "orders", "--all", "--yes").code == 0
    out = tmp_path / "out"
    assert run("work", "orders", "--until-empty", "--", "sh", "-c", f"cat > '{out}'").code == 0
    assert out.read_bytes() == b"head\nx\n"
    assert run("replay", "orders", "--yes").code == 0
    with commanded(root) as (_, bound):
        assert connect(zmq.ROUTER, bound["send"]).recv_multipart()[4:] == [b"", b"head\n", b"x\n"]
