"""Clients of `dropq serve QUEUE --zmq`: a producer, a consumer and a monitor, as PZQ's wiki describes them.

python examples/zeromq_clients.py produce TEXT...    sends each TEXT, and prints its answer
python examples/zeromq_clients.py consume N          prints N messages, and acknowledges each
python examples/zeromq_clients.py monitor            prints the figures of the server

They connect to the server's default addresses, or to those that begin as PZQ in the environment says and end with 1, 2
and 3: with PZQ=ipc://sockets/ to ipc://sockets/1 and so on.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence

import zmq

RECEIVE, SEND, MONITOR = (f"{os.environ.get('PZQ', 'tcp://127.0.0.1:1113')}{end}" for end in (1, 2, 3))


class Producer:
    """Sends messages, each of one part or more, and gets an answer to each."""

    def __init__(self, context: zmq.Context, address: str = RECEIVE) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)

    def send(self, *parts: bytes) -> bytes:
        """Send a message; return the id that its answer has."""
        id = uuid.uuid4().bytes
        self.socket.send_multipart([id, b"", *parts])
        return id

    def answer(self) -> tuple[bytes, str | None]:
        """Wait for the next answer; return its id, and why the message was not stored: None if it was."""
        id, status, *rest = self.socket.recv_multipart()
        return id, None if status == b"1" else b" ".join(rest[rest.index(b"") + 1 :]).decode()


class Consumer:
    """Receives messages, and says of each whether it is done, or to be sent again."""

    def __init__(self, context: zmq.Context, address: str = SEND) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.connect(address)

    def receive(self) -> tuple[list[bytes], list[bytes]]:
        """Wait for a message that is still in time; return its parts, and what settles it."""
        while True:
            peer, key, sent, timeout, *rest = self.socket.recv_multipart()
            if time.time() * 1_000_000 < int(sent) + int(timeout):
                return rest[rest.index(b"") + 1 :], [peer, key]

    def settle(self, message: Sequence[bytes], done: bool = True) -> None:
        """Acknowledge a message, or let it be sent again."""
        self.socket.send_multipart([*message, b"1" if done else b"0"])


def figures(context: zmq.Context, address: str = MONITOR) -> dict[str, str]:
    """Return what the monitor says."""
    with context.socket(zmq.REQ) as socket:
        socket.connect(address)
        socket.send(b"MONITOR")
        return dict(line.split(": ", 1) for line in socket.recv().decode().splitlines())


def main(what: str, *arguments: str) -> None:
    """Do what the command line says."""
    context = zmq.Context()
    if what == "monitor":
        print("\n".join(f"{name}: {value}" for name, value in figures(context).items()))
    elif what == "produce":
        producer = Producer(context)
        sent = {producer.send(text.encode()): text for text in arguments}
        for _ in arguments:
            id, refused = producer.answer()
            print(sent[id], refused or "stored")
    else:
        consumer = Consumer(context)
        for _ in range(int(arguments[0])):
            parts, message = consumer.receive()
            print(*(part.decode(errors="replace") for part in parts), flush=True)
            consumer.settle(message)


if __name__ == "__main__":
    main(*sys.argv[1:])
