"""A server dies at each call that changes something on disk, while a message goes in and out over ZeroMQ."""

from __future__ import annotations

import os
import threading
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from children import killed_at_each_call
from helpers import files, until, where

from dropq import Queue, Root
from dropq.worker.loop import Stop

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from zeromq import ANY, PATIENCE  # noqa: E402

from dropq.zmq.server import Server, Terms  # noqa: E402

PARTS = [b"head", b"", b"body"]


def serve_one(queue: Queue) -> None:
    """Serve until a message has come in, gone out, and is acknowledged; note the answer and the delivery in files."""
    server, stop = Server(queue, Terms(receive=ANY, send=ANY, monitor=ANY, ack_timeout=60)), Stop()
    notes = queue.root.path.parent

    def clients(bound: dict[str, str]) -> None:
        with zmq.Context() as context:
            producer, consumer = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
            for socket, address in ((producer, bound["receive"]), (consumer, bound["send"])):
                socket.linger, socket.rcvtimeo = 0, PATIENCE
                socket.connect(address)
            producer.send_multipart([b"id", b"", *PARTS])
            if producer.recv_multipart()[1] == b"1":
                (notes / f"answered-{queue.root.path.name}").touch()
            peer, key, _, _, _, *parts = consumer.recv_multipart()
            assert parts == PARTS
            (notes / f"delivered-{queue.root.path.name}").touch()
            consumer.send_multipart([peer, key, b"1"])
            until(lambda: os.listdir(queue.layout.processed), "the ack")
            producer.close()
            consumer.close()
        stop.ask()

    with server.opened() as bound:
        threading.Thread(target=clients, args=(bound,), daemon=True).start()
        server.run(stop)


@pytest.mark.timeout(240)
def test_a_server_that_dies_at_any_call_loses_nothing_that_it_answered(tmp_path: Path) -> None:
    roots = (tmp_path / f"root{number}" for number in count())
    ends = Counter[str]()

    def build() -> Queue:
        return Root.create(next(roots)).create_queue("orders", durability="full", redelivery_delay=0)

    for queue in killed_at_each_call(build, serve_one):
        answered = (tmp_path / f"answered-{queue.root.path.name}").exists()
        delivered = (tmp_path / f"delivered-{queue.root.path.name}").exists()
        lies = {state: bodies for state, bodies in where(queue).items() if state != "working"}
        assert lies in [{}, *({state: [b"headbody"]} for state in ("target", "processing", "processed"))]
        assert lies or not answered
        assert "processed" not in lies or delivered
        again = Root(queue.root.path).queue("orders")
        again.sweep()
        with again.subscribe() as subscription:
            message = subscription.receive(0)
            assert (message is not None) == bool({"target", "processing"} & lies.keys())
            if message is not None:
                assert (message.body, message.properties["zmq_parts"]) == (b"headbody", "4-0-4")
                message.ack()
        ends[next(iter(lies), "nowhere")] += 1
        assert len(files(Path(queue.layout.base, "working"))) <= 1, "a draft, where the send was cut short"
    assert ends.keys() == {"nowhere", "target", "processing", "processed"}
