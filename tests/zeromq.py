"""A server of a queue for clients of PZQ, in a thread of the tests, and the clients that users have as an example."""

from __future__ import annotations

import socket as sockets
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from dropq import Queue, Root  # noqa: E402
from dropq.worker.loop import Stop  # noqa: E402
from dropq.zmq.server import Server, Terms  # noqa: E402

#: Milliseconds after which a test gives up on a frame.
PATIENCE = 120_000
#: A port that the system chooses.
ANY = "tcp://127.0.0.1:*"


def _example() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "zeromq_clients.py"
    spec = spec_from_file_location("zeromq_clients", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: examples/zeromq_clients.py: Producer, Consumer and figures.
clients = _example()


@dataclass
class Served:
    """A server that runs, where it is bound, and sockets that are connected to it."""

    bound: dict[str, str]
    stop: Stop
    server: Server
    context: Any
    ended: threading.Event
    made: list[Any] = field(default_factory=list)

    def connect(self, kind: int, to: str, **options: Any) -> Any:
        """Return a socket that is connected to one of the server's; it waits for frames as long as a test may."""
        socket = self.context.socket(kind)
        self.made.append(socket)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = PATIENCE
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(self.bound[to])
        return socket

    def producer(self, **options: Any) -> Any:
        """Return a socket of a producer."""
        return self.connect(zmq.DEALER, "receive", **options)

    def consumer(self, **options: Any) -> Any:
        """Return a socket of a consumer."""
        return self.connect(zmq.ROUTER, "send", **options)

    def client(self, kind: str) -> Any:
        """Return a Producer or a Consumer of the example."""
        client = getattr(clients, kind)(self.context, self.bound["receive" if kind == "Producer" else "send"])
        self.made.append(client.socket)
        client.socket.linger = 0
        client.socket.rcvtimeo = PATIENCE
        return client

    def figures(self) -> dict[str, str]:
        """Return what the monitor says."""
        return dict(clients.figures(self.context, self.bound["monitor"]))

    def ask(self, *frames: bytes) -> list[bytes]:
        """Send frames to receive, and return the answer."""
        socket = self.producer()
        socket.send_multipart(frames)
        answer: list[bytes] = socket.recv_multipart()
        return answer

    def end(self) -> None:
        """Ask it to stop, and wait until it has."""
        self.stop.ask()
        assert self.ended.wait(PATIENCE / 1000), "the server did not end"


@contextmanager
def served(queue: Queue, **terms: Any) -> Iterator[Served]:
    """Serve a queue on ports that the system chooses, until the block ends."""
    server, stop = Server(queue, Terms(**{"receive": ANY, "send": ANY, "monitor": ANY, **terms})), Stop()
    said: SimpleQueue[dict[str, str] | BaseException] = SimpleQueue()
    ended = threading.Event()

    def serve() -> None:
        try:
            with server.opened() as bound:
                said.put(bound)
                server.run(stop)
        except BaseException as error:
            said.put(error)
        finally:
            ended.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    first = said.get(timeout=PATIENCE / 1000)
    if isinstance(first, BaseException):
        raise first
    with zmq.Context() as context:
        serving = Served(first, stop, server, context, ended)
        try:
            yield serving
        finally:
            for socket in serving.made:
                socket.close()
            stop.times += 1
            stop.ask()
            thread.join(PATIENCE / 1000)
    assert ended.is_set(), "the server did not end"
    if not said.empty():
        failed = said.get()
        assert isinstance(failed, BaseException)
        raise failed


@contextmanager
def commanded(root: Root, *options: str, **popen: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Run `dropq serve orders`; yield the process, and where its sockets are bound."""
    bind = ("--receive", ANY, "--send", ANY, "--monitor", ANY)
    argv = [sys.executable, "-m", "dropq", "--root", str(root.path), "serve", "orders", "--zmq", *bind, *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen) as server:
        assert server.stdout is not None
        try:
            said = server.stdout.readline().rstrip("\n").split("\t")
            yield server, dict(zip(("queue", "receive", "send", "monitor"), said, strict=True))
        finally:
            server.kill()


#: What begins a connection, and a question for a sign of life.
GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
PING = b"\4\7\4PING\0\0"


def framed(*frames: bytes) -> bytes:
    """Return the bytes of a message."""
    last = len(frames) - 1
    return b"".join(
        bytes((at < last, len(frame))) + frame
        if len(frame) < 256
        else bytes((2 | (at < last),)) + len(frame).to_bytes(8) + frame
        for at, frame in enumerate(frames)
    )


class Raw:
    """A client that says what it likes, byte by byte."""

    def __init__(self, address: str, type: bytes | None = b"DEALER", identity: bytes = b"") -> None:
        if address.startswith("ipc://"):
            self.connection = sockets.socket(sockets.AF_UNIX)
            self.connection.settimeout(PATIENCE / 1000)
            self.connection.connect(address.removeprefix("ipc://"))
        else:
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            self.connection = sockets.create_connection((host, int(port)), PATIENCE / 1000)
        if type is not None:
            self.say(GREETING)
            said = {b"Socket-Type": type, b"Identity": identity}
            body = b"\5READY" + b"".join(
                bytes([len(name)]) + name + len(value).to_bytes(4) + value for name, value in said.items()
            )
            self.say(bytes([4, len(body)]) + body)
            self.hear(64)
            assert self.frame()[1].startswith(b"\5READY")

    def say(self, data: bytes) -> None:
        """Send bytes."""
        self.connection.sendall(data)

    def hear(self, size: int) -> bytes:
        """Return as many bytes as are asked for; fewer where the connection ends."""
        data = b""
        while len(data) < size and (part := self.connection.recv(size - len(data))):
            data += part
        return data

    def frame(self) -> tuple[int, bytes]:
        """Return the flags and the bytes of the next frame."""
        flags, size = self.hear(2)
        if flags & 2:
            size = int.from_bytes(bytes([size]) + self.hear(7))
        return flags, self.hear(size)

    def message(self) -> list[bytes]:
        """Return the frames of the next message."""
        flags, frames = 1, []
        while flags & 1:
            flags, frame = self.frame()
            frames.append(frame)
        return frames

    def has_ended(self) -> bool:
        """Wait until the server ends the connection; return True."""
        try:
            while self.connection.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def reset(self) -> None:
        """End the connection as a process does that dies with unread bytes."""
        self.connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
