"""What a client can do to a server over ZeroMQ: not end it, not fill its memory, not keep others out for long."""

from __future__ import annotations

import logging
import os
import resource
import select
import shutil
import signal
import socket as sockets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import until, where

from dropq import Queue, Root
from dropq.storage.files import Storage

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from test_zmq import Certificates  # noqa: E402
from zeromq import ANY, GREETING, PING, Raw, Served, commanded, framed, served  # noqa: E402

from dropq.zmq import monitor, server, wire, zmtp  # noqa: E402
from dropq.zmq import sockets as network  # noqa: E402
from dropq.zmq.keys import is_private  # noqa: E402
from dropq.zmq.server import Terms  # noqa: E402


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """A queue."""
    return Root.create(tmp_path / "root").create_queue("orders", redelivery_delay=0, durability="none")


@pytest.fixture
def serving(queue: Queue) -> Iterator[Served]:
    """A server of the queue."""
    with served(queue) as serving:
        yield serving


HANGS = 60.0
HELLO = GREETING + b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
MESSAGE = framed(b"id", b"", b"body")
STORED = [b"id", b"1", b""]


def memory(serving: Served, name: str = "receive") -> int:
    """Return the bytes that a socket keeps for its peers."""
    return sum(peer.size for peer in list(serving.server._sockets[name].peers))


# -- the end of a server -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "type", "message"),
    [
        ("receive", b"DEALER", MESSAGE),
        ("send", b"ROUTER", framed(b"key", b"1")),
        ("monitor", b"DEALER", framed(b"", b"MONITOR")),
    ],
)
def test_no_client_ends_a_server_by_signs_of_life_among_messages(
    queue: Queue, name: str, type: bytes, message: bytes
) -> None:
    with commanded(queue.root) as (process, bound):
        for number in range(40):
            client = Raw(bound[name], type)
            client.say(message * 60 + PING + message * 3)
            client.reset() if number % 2 else client.connection.close()
        last = Raw(bound["receive"])
        last.say(MESSAGE)
        assert last.message() == STORED
        assert process.poll() is None


def test_what_a_client_sent_before_it_ended_is_stored(serving: Served, queue: Queue) -> None:
    for number in range(20):
        client = Raw(serving.bound["receive"])
        client.say(b"".join(framed(b"id", b"", b"%d" % (100 * number + at)) for at in range(100)))
        client.connection.close()
    until(lambda: queue.counts()["target"] == 2000, "all to be stored")
    assert sorted(map(int, where(queue)["target"])) == list(range(2000))


def test_signs_of_life_are_answered_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", durability="full")
    goes_on, synced = threading.Event(), threading.Event()
    sync = Storage.sync

    def slow(self: Storage, *folders: str) -> None:
        synced.set()
        assert goes_on.wait(60)
        sync(self, *folders)

    with served(queue) as serving:
        client, other = Raw(serving.bound["receive"]), Raw(serving.bound["send"], b"ROUTER")
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "sync", slow)
            client.say(MESSAGE)
            assert synced.wait(60)
            for raw in (client, other):
                raw.say(b"\4\x0b\4PING\0\1text")
                assert raw.frame() == (4, b"\4PONGtext")
            goes_on.set()
            assert client.message() == STORED


def test_with_keys_signs_of_life_are_no_messages(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HEARTBEAT", 0.2)
    keys = Certificates(tmp_path / "keys")
    consumers, producers = keys.make("consumers"), keys.make("producers")
    with served(queue, keys=str(keys.folder)) as serving:
        consumer = serving.consumer(**consumers)
        producer = serving.producer(**producers, heartbeat_ivl=50, heartbeat_timeout=int(1000 * HANGS))
        until(lambda: any(peer.talk.pongs > 1 for peer in _peers(serving, "send")), "signs of life of a consumer")
        heard = next(iter(_peers(serving, "receive"))).heard
        until(lambda: next(iter(_peers(serving, "receive"))).heard > heard, "a sign of life of a producer")
        producer.send_multipart([b"id", b"", b"body"])
        assert producer.recv_multipart() == STORED
        assert consumer.recv_multipart()[-1] == b"body"


def _peers(serving: Served, name: str) -> list[network.Peer]:
    return list(serving.server._sockets[name].peers)


def test_who_serves_and_who_stands_in_hand_out_one_at_a_time() -> None:
    net = network.Network()
    try:
        socket = net.make("send", most=0, hwm=10)
        peer = _let_in(net, socket, Raw(net.bind(socket, ANY), None), b"")
        sends = threading.Thread(target=network.sent, args=(socket, [b"key"]))
        with net.lock:
            sends.start()
            sends.join(0.2)
            assert list(socket.takers) == [peer]
            net.drop(peer)
        sends.join()
        assert not socket.takers
    finally:
        net.close()


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_producer_whose_machine_died_is_answered_when_it_comes_again_with_its_identity(serving: Served) -> None:
    Raw(serving.bound["receive"], identity=b"shop-1")  # and says nothing more, nor that it ends
    again = serving.producer(routing_id=b"shop-1")
    for number in (b"1", b"2"):
        again.send_multipart([number, b"", b"body"])
        assert again.recv_multipart() == [number, b"1", b""]


def test_an_answer_reaches_who_came_again_with_its_identity_and_its_key_alone() -> None:
    net = network.Network()
    try:
        socket = net.make("receive", most=1000, hwm=10)
        address = net.bind(socket, ANY)
        first = Raw(address, None)
        old = _let_in(net, socket, first, b"shop-1")
        first.say(MESSAGE)
        assert _taken(net, socket) is old
        first.reset()
        while not old.has_ended:
            net.poll(1)
        stranger, same = Raw(address, None), Raw(address, None)
        theirs = _let_in(net, socket, stranger, b"shop-1")
        socket.named.pop(theirs.identity)
        socket.named[b"another key", b"shop-1"] = theirs
        network.answered(old, STORED)
        assert not theirs.unsent
        _let_in(net, socket, same, b"shop-1")
        network.answered(old, STORED)
        net.flush()
        assert same.message() == STORED
    finally:
        net.close()


def _let_in(net: network.Network, socket: network.Socket, client: Raw, identity: bytes) -> network.Peer:
    """Shake hands in the thread of the test."""
    body = b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity" + len(identity).to_bytes(4) + identity
    client.say(GREETING + bytes([4, len(body)]) + body)
    while True:
        net.poll(0.01)
        for peer in socket.peers:
            if peer.talk.is_open and peer.connection.getpeername() == client.connection.getsockname():
                net.flush()
                assert client.hear(64)[:1] == b"\xff"
                client.frame()
                return peer


def _taken(net: network.Network, socket: network.Socket) -> network.Peer:
    while (got := network.received(socket)) is None:
        net.poll(1)
    return got[0]


def test_a_producer_that_reads_no_answers_is_read_no_more_and_gets_them_all_later(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "UNREAD", 10_000)
    with served(queue) as serving:
        client = Raw(serving.bound["receive"])
        id, count = b"i" * 60_000, 300

        def send() -> None:
            for _ in range(count):
                client.say(framed(id, b"", b"x"))

        sender = threading.Thread(target=send)
        sender.start()
        peak = 0
        for _ in range(20):
            assert serving.ask(b"id", b"", b"body") == STORED
            peak = max(peak, memory(serving))
        for _ in range(count):
            assert client.message() == [id, b"1", b""]
            peak = max(peak, memory(serving))
        sender.join()
        assert peak < 2 << 20, "of 18 MB"
    assert queue.counts()["target"] == count + 20


# -- connections -------------------------------------------------------------------------------------------------------


def test_what_was_said_waits_while_answers_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network.Network()
    try:
        socket = net.make("receive", most=1000, hwm=10)
        client = Raw(net.bind(socket, ANY), None)
        peer = _let_in(net, socket, client, b"")
        client.say(framed(b"id") * 100)
        answer, taken = b"x" * 1_000_000, 0
        while (got := _next(net, socket)) is not None:
            taken += 1
            network.answered(got, [answer])
            assert peer.unsent <= network.UNREAD + 2 * 1_000_010  # one was taken before
        assert taken < 100
        reader = threading.Thread(target=lambda: [client.message() for _ in range(100)])
        reader.start()
        while taken < 100:
            if (got := _next(net, socket)) is not None:
                taken += 1
                network.answered(got, [answer])
        while reader.is_alive():
            net.poll(0.01)
    finally:
        net.close()


def _next(net: network.Network, socket: network.Socket) -> network.Peer | None:
    """Return the peer of a message that came, or comes at once."""
    net.poll(0.2 if not socket.ready else 0)
    got = network.received(socket)
    return None if got is None else got[0]


def test_the_kernel_asks_whether_the_machine_of_a_client_is_there(serving: Served) -> None:
    clients = [Raw(serving.bound[name], type) for name, type in (("receive", b"DEALER"), ("send", b"ROUTER"))]
    for name in ("receive", "send"):
        (peer,) = serving.server._sockets[name].peers
        assert peer.connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE)
        assert 0 < peer.connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT) <= 60_000
    assert len(clients) == 2


def test_a_consumer_that_gives_no_sign_of_life_is_let_go(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HEARTBEAT", 0.0)
    monkeypatch.setattr(network, "HEARTBEAT_TIMEOUT", 1.0)
    with served(queue) as serving:
        alive = serving.consumer()
        assert Raw(serving.bound["send"], b"ROUTER").has_ended()
        queue.send(b"body")
        assert alive.recv_multipart()[-1] == b"body"


@pytest.mark.parametrize("said", [b"", GREETING[:20], GREETING])
def test_who_does_not_say_who_it_is_is_let_go(queue: Queue, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(network, "HANDSHAKE", 0.1)
    with served(queue) as serving:
        client = Raw(serving.bound["receive"], None)
        client.say(said)
        assert client.has_ended()


def limited(number: int) -> Any:
    """Return what a process does first, so that it has a number of descriptors."""
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, (number, number))


@pytest.mark.parametrize("name", ["monitor", "receive"])
def test_connections_alone_do_not_keep_messages_from_going_out(queue: Queue, name: str) -> None:
    queue.send_many([b"body"] * 50)
    with commanded(queue.root, preexec_fn=limited(128)) as (process, bound), zmq.Context() as context:
        clients = [_tried(bound[name]) for _ in range(200)]
        with context.socket(zmq.ROUTER) as consumer:
            consumer.linger = 0
            consumer.connect(bound["send"])
            for _ in range(50):
                peer, key, *_ = consumer.recv_multipart()
                consumer.send_multipart([peer, key, b"1"])
            until(lambda: queue.counts()["processed"] == 50, "the acks")
        before = _processor_time(process.pid)
        time.sleep(1)
        assert _processor_time(process.pid) - before < 0.3, "it waits, and does not try again and again"
        for client in clients:
            client.close()
        last = Raw(bound[name])
        last.say(MESSAGE if name == "receive" else framed(b"", b"MONITOR"))
        assert last.message()
        process.send_signal(signal.SIGTERM)
        assert f"{name}: others wait for a connection: it has 26 connections" in process.communicate()[1]


@pytest.mark.skipif(
    not (path := Path("/proc/sys/net/core/somaxconn")).exists() or int(path.read_text()) < 512,
    reason="the system lets fewer wait",
)
def test_many_clients_that_come_at_once_wait_for_no_second_try() -> None:
    net = network.Network()
    try:
        socket = net.make("receive", most=0, hwm=10)
        host, port = net.bind(socket, ANY).removeprefix("tcp://").split(":")
        with net.lock, ExitStack() as clients:
            for _ in range(300):
                clients.enter_context(sockets.create_connection((host, int(port)), 30))
    finally:
        net.close()


def test_two_addresses_of_a_socket_that_is_full_end_no_server() -> None:
    net = network.Network()
    try:
        socket = net.make("monitor", most=0, hwm=10)
        socket.most_peers = 2
        addresses = [net.bind(socket, ANY), net.bind(socket, ANY)]
        clients = [_tried(address) for address in addresses * 3]
        while len(socket.peers) < 2:
            net.poll(1)
        assert not socket.accepts
        for client in clients:
            client.close()
        while socket.peers:
            net.poll(1)
        assert socket.accepts
    finally:
        net.close()


def _tried(address: str, patience: float = 0.01) -> sockets.socket:
    """Begin to connect, and greet, as far as the server lets us within some seconds."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    client = sockets.socket()
    client.setblocking(False)
    client.connect_ex((host, int(port)))
    select.select([], [client], [], patience)
    with suppress(OSError):
        client.send(GREETING + b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER")
    return client


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_before_it_is_let_in_nobody_has_more_than_a_command(serving: Served) -> None:
    for said in (GREETING + b"\6" + (1 << 20).to_bytes(8), GREETING + b"\2" + (1 << 62).to_bytes(8), b"GET / HTTP"):
        client = Raw(serving.bound["receive"], None)
        client.say(said)
        assert client.has_ended()
    assert serving.ask(b"id", b"", b"body") == STORED


def test_half_a_message_has_no_more_than_a_message(queue: Queue) -> None:
    with served(queue, max_size=100_000) as serving:
        for name, type in (("send", b"ROUTER"), ("receive", b"DEALER"), ("monitor", b"DEALER")):
            client = Raw(serving.bound[name], type)
            peak = 0
            for frame in (bytes((1, 0)), b"\3" + (50_000).to_bytes(8) + bytes(50_000)):
                for _ in range(200):
                    client.say(frame)
                    peak = max(peak, memory(serving, name))
            assert peak < 100_000 + 2 * zmtp.ID + 2 * zmtp.CHUNK + 1003 * zmtp.FRAME
        assert serving.ask(b"id", b"", b"body") == STORED


def test_a_message_that_is_too_long_is_answered_however_long_it_is(queue: Queue) -> None:
    with served(queue, max_size=1000) as serving:
        client = Raw(serving.bound["receive"])
        for parts in ([b"x" * 3_000_000], [b"x" * 60_000] * 50, [b""] * 100_000):
            client.say(framed(b"id", b"", *parts))
            id, status, _, why = client.message()
            assert (id, status) == (b"id", b"0")
            assert why == b"the message has more than 1000 bytes, or 1000 frames"
        client.say(MESSAGE)
        assert client.message() == STORED
    assert where(queue) == {"target": [b"body"]}


def test_an_id_and_headers_are_bounded(serving: Served) -> None:
    id, status, _, why = serving.ask(b"i" * 70_000, b"", b"body")
    assert (id, status) == (b"i" * 65_536, b"0")
    assert why == b"the id and the headers have 70000 bytes: at most 65536 are allowed"
    assert serving.ask(b"id", *[b"h" * 1000] * 66, b"", b"body")[1] == b"0"


def test_connections_share_memory_and_who_stops_in_a_message_loses_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "POOL", 1 << 20)
    monkeypatch.setattr(network, "STALL", 1.0)
    big = framed(b"id", b"", b"x" * 2_000_000)
    with served(queue, max_size=2_000_000) as serving:
        stops = [Raw(serving.bound["receive"]) for _ in range(5)]
        for client in stops:
            client.say(big[:300_000])
        assert serving.ask(b"id", b"", b"small") == STORED, "what is small needs nothing of the pool"
        goes_on = Raw(serving.bound["receive"])
        goes_on.say(big)
        assert goes_on.message() == STORED
        assert memory(serving) < (1 << 20) + 2_000_000 + 2 * zmtp.REST + 7 * network.ALLOWANCE


def test_who_drips_into_a_message_that_others_wait_for_loses_it(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "POOL", 1000)
    monkeypatch.setattr(network, "LONGEST", 1.0)
    big = framed(b"id", b"", b"x" * 500_000)
    with served(queue, max_size=500_000) as serving:
        drips = Raw(serving.bound["receive"])
        drips.say(big[:200_000])
        until(lambda: serving.server._sockets["receive"].used > 1000, "the pool to be full")
        goes_on = Raw(serving.bound["receive"])
        goes_on.say(big)
        until(partial(_is_cut, drips), "its connection to end", timeout=60)
        assert goes_on.message() == STORED


def _is_cut(client: Raw) -> bool:
    """Send one more byte; return whether the server has ended the connection."""
    try:
        client.say(b"x")
    except ConnectionError:
        return True
    return False


def test_what_comes_of_clients_that_have_gone_is_bounded_while_the_queue_is_full(tmp_path: Path) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders", max_unprocessed=3, overflow="block")
    with served(queue) as serving:
        socket = serving.server._sockets["receive"]
        socket.most_peers = 10
        for number in range(30):
            client = _tried(serving.bound["receive"], patience=60)
            client.send(framed(b"id", b"", b"%d" % number))
            client.close()
        until(lambda: len(socket.peers) == 10, "ten to be taken for connections")
        assert serving.figures()["queue"] == "orders"
        assert len(socket.peers) == len(socket.ready) == 10
        consumer = serving.consumer()
        bodies = set[int]()
        while len(bodies) < 30:
            peer, key, *_, body = consumer.recv_multipart()
            bodies.add(int(body))
            consumer.send_multipart([peer, key, b"1"])
        until(lambda: not socket.peers, "all to be taken")


def test_consumers_that_have_gone_leave_nothing(serving: Served) -> None:
    for _ in range(50):
        Raw(serving.bound["send"], b"ROUTER").connection.close()
    socket = serving.server._sockets["send"]
    until(lambda: not socket.peers and not socket.takers, "all to be forgotten")


def test_a_consumer_that_stops_with_memory_that_others_wait_for_loses_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "POOL", 3_000_000)
    monkeypatch.setattr(network, "STALL", 1.0)
    monkeypatch.setattr(network, "HEARTBEAT", 6000.0)
    queue.send_many([b"x" * 1_000_000] * 60)
    with served(queue, ack_timeout=600) as serving:
        lazy = [Raw(serving.bound["send"], b"ROUTER") for _ in range(8)]  # the kernel takes some messages for each
        until(lambda: serving.server._consumers.blocked, "no more to go out")
        assert len(serving.consumer().recv_multipart()[-1]) == 1_000_000
        assert lazy


def test_what_consumers_do_not_read_is_bounded(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "STALL", 6000.0)
    monkeypatch.setattr(network, "POOL", 3_000_000)
    queue.send_many([b"x" * 1_000_000] * 40)
    with served(queue, ack_timeout=600) as serving:
        lazy = [Raw(serving.bound["send"], b"ROUTER") for _ in range(40)]
        until(lambda: serving.server._consumers.blocked, "no more to go out")
        assert memory(serving, "send") <= 3_000_000 + 1_000_000 + 41 * network.ALLOWANCE
        assert len(lazy[0].message()[-1]) == 1_000_000


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_who_says_more_than_a_round_can_read_has_one_turn_and_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "ROUND", 0.0)
    net = network.Network()
    try:
        socket = net.make("receive", most=1000, hwm=10)
        address = net.bind(socket, ANY)
        floods = [Raw(address, None) for _ in range(5)]
        peers = [_let_in(net, socket, client, b"") for client in floods]
        for client in floods:
            client.say(PING * 20_000)
        silent, other = Raw(address, None), Raw(address, None)
        for _ in range(20):
            net.poll(0)
            assert len(net._later) <= len(socket.peers)
        assert len(socket.peers) == 7
        assert all(peer.heard > peers[-1].heard - 600 for peer in peers)
        other.say(HELLO + MESSAGE)
        for _ in range(20):
            net.poll(0)
        assert socket.ready
        monkeypatch.setattr(net, "_new", dict.fromkeys(net._new, 0.0))
        net._ticks_at = 0.0
        for _ in range(20):
            net.poll(0)
        assert silent.has_ended()
    finally:
        net.close()


@pytest.mark.parametrize(
    ("count", "size", "turn", "come"),
    [(100, 1000, zmtp.REST, 100), (3, 50_000, zmtp.REST, 3), (100, 1000, 2 * zmtp.CHUNK, 64)],
)
def test_what_has_come_of_a_producer_is_read_in_one_round_as_far_as_its_turn_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, size: int, turn: int, come: int
) -> None:
    monkeypatch.setattr(network, "REST", turn)
    net = network.Network()
    try:
        socket = net.make("receive", most=100_000, hwm=10)
        many, other = Raw(net.bind(socket, f"ipc://{tmp_path}/receive"), None), Raw(net.bind(socket, ANY), None)
        peers = [_let_in(net, socket, client, b"") for client in (many, other)]
        many.say(framed(b"id", b"", b"x" * size) * count)
        other.say(MESSAGE * 2)
        while len(socket.ready) < 2:
            net.poll(1)
        came = [got[0] for got in iter(lambda: network.received(socket), None)]
        assert came.count(peers[0]) == come
        assert came[:4].count(peers[1]) == 2
    finally:
        net.close()


def test_who_asks_the_monitor_without_end_holds_up_nobody(serving: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = serving.connect(zmq.DEALER, "monitor")
    asks.send_multipart([b"", b"MONITOR"])
    assert asks.recv_multipart()[1].startswith(b"messages: ")
    (peer,) = serving.server._sockets["monitor"].peers
    endless = peer, zmtp.Got([b"", b"x"], True, 1)
    monkeypatch.setattr(monitor, "received", lambda socket: endless)
    serving.server._monitor.serve()
    monkeypatch.undo()
    assert serving.ask(b"id", b"", b"body") == STORED


def test_a_server_ends_when_it_is_asked_whatever_clients_write(queue: Queue) -> None:
    floods = {
        "receive": (b"DEALER", framed(b"id") * 1000),
        "send": (b"ROUTER", framed(b"key", b"1") * 1000),
        "monitor": (b"DEALER", framed(b"", b"?") * 1000),
    }

    def flood(client: Raw, data: bytes) -> None:
        with suppress(OSError):  # the server ended
            while True:
                client.say(data)
                while select.select([client.connection], [], [], 0)[0]:
                    client.connection.recv(1 << 20)

    with commanded(queue.root) as (process, bound):
        for name, (type, data) in floods.items():
            for _ in range(3):
                threading.Thread(target=flood, args=(Raw(bound[name], type), data), daemon=True).start()
        producer = Raw(bound["receive"])
        producer.say(MESSAGE)
        assert producer.message() == STORED
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_key_lets_nobody_in_and_keeps_nobody_out(
    queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Certificates(tmp_path / "keys")
    good = keys.make("producers")
    folder = tmp_path / "keys" / "producers"
    (folder / "empty.key").touch()
    (folder / "folder.key").mkdir()
    os.mkfifo(folder / "fifo.key")
    (folder / "latin.key").write_bytes(b'# M\xfcller\npublic-key = "\xfc"\n')
    (folder / "short.key").write_text("public-key\n")
    (folder / "none.key").write_text(f'public-key = "{"~" * 40}"\n')
    with served(queue, keys=str(keys.folder)) as serving:
        producer = serving.producer(**good)
        producer.send_multipart([b"id", b"", b"body"])
        assert producer.recv_multipart() == STORED
        for name in ("empty", "folder", "fifo", "latin", "short", "none"):
            assert f"producers/{name}.key is no public key, and lets nobody in: " in caplog.text


@pytest.mark.parametrize("how", ["file", "bad file", "folder"])
def test_a_key_that_is_taken_away_lets_in_no_more_and_ends_its_connections(
    queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    keys = Certificates(tmp_path / "keys")
    mine = keys.make("producers")
    folder = tmp_path / "keys" / "producers"
    with served(queue, keys=str(keys.folder)) as serving:
        producer = serving.producer(**mine)
        producer.send_multipart([b"id", b"", b"body"])
        assert producer.recv_multipart() == STORED
        if how == "folder":
            shutil.rmtree(folder)
        else:
            (folder / "me.key").unlink()
            (folder / "other.key").write_text("half" if how == "bad file" else "")
        serving.server.reread_keys()
        until(lambda: not serving.server._sockets["receive"].peers, "its connection to end")
        producer.send_multipart([b"id", b"", b"body"])
        assert producer.poll(300) == 0
        assert "the keys were read again" in caplog.text
    assert where(queue) == {"target": [b"body"]}


# -- PZQ's own monitor -------------------------------------------------------------------------------------------------


@contextmanager
def by_default(queue: Queue, monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[Served]:
    """Serve a queue where nothing is said of the monitor."""
    monkeypatch.setattr(Terms, "monitor", ANY)
    monkeypatch.setattr(server, "PZQ_MONITOR", f"ipc://{path}")
    with served(queue) as serving:
        yield serving


def test_by_default_the_monitor_is_also_where_pzq_has_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import tempfile

    assert server.PZQ_MONITOR == "ipc:///tmp/pzq-monitor"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pzq-monitor")
        with sockets.socket(sockets.AF_UNIX) as dead:
            dead.bind(str(path))  # a server that was killed leaves it
        with by_default(queue, monkeypatch, path) as first:
            found = os.lstat(path)
            assert stat.S_IMODE(found.st_mode) & 0o077 == 0
            with caplog.at_level(logging.INFO), by_default(queue, monkeypatch, path) as second:
                assert "another server uses it" in caplog.text
                assert second.figures()["queue"] == "orders"
            assert os.lstat(path).st_ino == found.st_ino
            first.bound["monitor"] = f"ipc://{path}"
            assert first.figures()["queue"] == "orders"
        assert not path.exists()
        path.write_text("of somebody else")
        with by_default(queue, monkeypatch, path) as serving:
            assert serving.figures()["queue"] == "orders"
        assert path.read_text() == "of somebody else"


def test_where_somebody_accepts_nobody_a_server_is_refused_and_does_not_wait(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    with sockets.socket(sockets.AF_UNIX) as busy, suppress(BlockingIOError):
        busy.bind(path)
        busy.listen(0)
        waiting = [sockets.socket(sockets.AF_UNIX) for _ in range(10)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect(path)
        finally:
            with pytest.raises(OSError, match="another server uses it"):
                network._local(path)


def test_a_monitor_is_answered_with_any_path() -> None:
    assert wire.complaint("/m\udcfcller")[1] == b"error: /m?ller"


def test_an_ipc_socket_is_private_in_a_sticky_folder(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o1777)
    assert is_private(f"ipc://{tmp_path}/s/socket")
    (tmp_path / "s").chmod(0o777)
    assert not is_private(f"ipc://{tmp_path}/s/socket")
