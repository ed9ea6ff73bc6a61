"""A server of a queue for clients of PZQ, in a thread of the tests, and the clients that users have as an example."""

from __future__ import annotations

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

from dropq import Queue  # noqa: E402
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
