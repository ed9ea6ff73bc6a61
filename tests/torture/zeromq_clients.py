"""A queue served over ZeroMQ to strangers, too: who connect thousands of times, stop in the middle, ask without end.

They hit both servers of the storm of `torture.zeromq`, whose clients have signs of life and identities here. Its judge
says what became of the messages; beside that no server may end by itself, or take more memory than its bound.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from helpers import until
from zeromq import ANY, GREETING, PING, Raw, framed

from dropq import Root
from dropq.format.layout import UNSETTLED
from torture.account import Found
from torture.table import NotRun, Options, Row
from torture.zeromq import CLIENTS, LONG, SERVERS, SHORT, Line, Storm, is_bound

#: Those who take part beside the clients of the storm.
STRANGERS = ("strange-crowd", "strange-pings", "strange-words", "strange-halves", "strange-questions")
#: Connections of the crowd to all sockets of one server, if there are descriptors; in short.
CROWD, SHORT_CROWD = 10_000, 300
#: MiB that a server may take: what it has at its start, its pools, and a large message with its copies.
MEMORY = 420
#: Seconds in which a machine that is gone is noticed, at most.
GONE = 90
#: The network of machines that go away: this one and the other.
HERE, THERE = "10.213.7.1", "10.213.7.2"


def strangers(options: Options) -> Iterator[Row]:
    """Return rows for a storm with strangers, and for machines that go away."""
    with tempfile.TemporaryDirectory(prefix="dropq-") as paths:
        (folder := options.folder / "strangers").mkdir()
        storm = StrangeStorm(folder, Path(paths), options.seed)
        storm.crowd = CROWD if options.long else SHORT_CROWD
        storm.rage(LONG if options.long else SHORT)
        storm.drain()
        storm.judge(row := Row(""))
        row.test = f"strangers beside them: {storm.connections:,} connections and {storm.memory} MiB at most"
    yield row
    if options.long:
        yield _machines_go(options)


class StrangeStorm(Storm):
    """A storm in which strangers take part."""

    crowd = SHORT_CROWD
    memory = connections = 0
    heartbeat = 50

    def _start_all(self, clients: object) -> None:
        super()._start_all((*CLIENTS, *STRANGERS))

    def _play(self, name: str, notes: Path) -> None:
        if name not in STRANGERS:
            super()._play(name, notes)
            return
        paths = {socket: f"{self._sockets}/{SERVERS[0]}-{socket}" for socket in ("receive", "send", "monitor")}
        if name == "strange-crowd":
            _crowd(list(paths.values()), self.crowd)
        chance = random.Random(f"{self._seed} {notes}")
        while True:
            with suppress(OSError, ValueError, AssertionError):  # the server was killed, or ended the connection
                ACTS[name](paths, chance)
            time.sleep(chance.uniform(0, 0.02))

    def _kill(self, name: str) -> None:
        if name in SERVERS:
            with suppress(FileNotFoundError):  # it has ended by itself
                there = len(os.listdir(f"/proc/{self._actors[name].pid}/fd"))
                self.connections = max(self.connections, there)
        super()._kill(name)

    def _count_out(self) -> None:
        super()._count_out()
        for name in SERVERS:
            actor = self._actors.get(name)
            if actor is not None and is_bound(actor.out):  # until it is executed, it has the memory of who forked it
                with suppress(OSError, IndexError):  # it has just been killed
                    text = Path(f"/proc/{actor.pid}/status").read_text().split("VmRSS:")[1]
                    self.memory = max(self.memory, int(text.split()[0]) >> 10)
        if self.memory > MEMORY and not self.wrong:
            self.wrong.append(f"a server took {self.memory} MiB, and may take {MEMORY}")

    def _due(self, found: Found, noted: list[Line]) -> set[str]:
        """Return nobody: with so many connections nothing is prompt."""
        return set()


def _crowd(paths: list[str], most: int) -> None:
    """Connect as often as there are descriptors for it; say who one is, and no more, or not even that.

    Nobody says that it is a consumer, as it would get messages.
    """
    most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100)
    there = list[sockets.socket]()
    for number in count():
        client = sockets.socket(sockets.AF_UNIX)
        client.settimeout(0.1)
        with suppress(OSError):
            client.connect(paths[number % 3])
            says = number % 4 == 1 and number % 3 != 1
            client.send((GREETING if number % 2 else b"") + (HELLO[number % 3] if says else b""))
            there.append(client)
        if len(there) >= most or number % 1000 == 999:
            time.sleep(0.1)
        if len(there) >= most:
            there.pop(0).close()


#: What says who one is, to each of the three sockets.
HELLO = [b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6" + kind for kind in (b"DEALER", b"ROUTER", b"DEALER")]
#: What a stranger sends to each socket, which is no message.
NOTHING = {"receive": framed(b"id"), "send": framed(b"key", b"1"), "monitor": framed(b"", b"MONITOR")}


def _connected(path: str, socket: str, identity: bytes = b"") -> Raw:
    return Raw(f"ipc://{path}", b"ROUTER" if socket == "send" else b"DEALER", identity)


def _pings(paths: dict[str, str], chance: random.Random) -> None:
    socket = chance.choice(list(paths))
    client = _connected(paths[socket], socket, chance.choice([b"", b"produce-one", b"produce-many"]))
    client.say(NOTHING[socket] * chance.randrange(200) + PING * chance.randrange(3) + NOTHING[socket] * 3)
    client.connection.close()


def _words(paths: dict[str, str], chance: random.Random) -> None:
    socket = chance.choice(list(paths))
    client = Raw(f"ipc://{paths[socket]}", None)
    begin = GREETING + chance.choice(HELLO) if chance.random() < 0.7 else GREETING[: chance.randrange(64)]
    client.say(begin + b"".join(chance.choice(WORDS) for _ in range(chance.randrange(20))) + chance.randbytes(5))
    client.connection.close()


#: Frames that are no message, in whatever order they follow each other: no empty one says that more follows, as an id
#: and the frame that ends the headers do.
WORDS = [
    PING,
    b"\4\4\3SUB",
    b"\0\0",
    b"\1\1x",
    framed(b"id"),
    b"\2" + bytes(8),
    b"\7" + bytes(8),
    b"\3" + bytes(7) + b"\xff",
]


def _halves(paths: dict[str, str], chance: random.Random) -> None:
    socket = chance.choice(list(paths))
    client = _connected(paths[socket], socket)
    client.connection.settimeout(0.2)
    size = 60 << 20
    client.say(framed(b"id", b"")[:-2] + b"\1\0\3" + size.to_bytes(8))
    for _ in range(chance.randrange(size >> 20)):  # and never the rest
        client.say(bytes(1 << 20))
    client.connection.close()


def _questions(paths: dict[str, str], chance: random.Random) -> None:
    client = _connected(paths["monitor"], "monitor")
    client.connection.settimeout(0.2)
    for _ in range(chance.randrange(100)):
        client.say(NOTHING["monitor"] * 100)  # and reads no answer
    client.connection.close()


ACTS = {"strange-pings": _pings, "strange-words": _words, "strange-halves": _halves, "strange-questions": _questions}


# -- machines that go away ---------------------------------------------------------------------------------------------

#: What runs on the other machine: producers and consumers with identities; each says once that it is connected.
CLIENT = """
import signal, sys, zmq
context, made = zmq.Context(), []
for number in range(20):
    producer, consumer = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
    producer.routing_id = b"shop-%d" % number
    producer.connect(sys.argv[1]), consumer.connect(sys.argv[2])
    made += [producer, consumer]
    producer.send_multipart([b"id", b"", b"before"])
    assert producer.recv_multipart()[1] == b"1"
print("connected", flush=True)
signal.pause()
"""


@contextmanager
def _machine() -> Iterator[list[str]]:
    """Make a machine: a network of its own beside this one; yield what runs a command on it."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        raise NotRun("machines that go away need root, and `ip`: apt install iproute2")
    holder = subprocess.Popen(["unshare", "--net", "sleep", "900"])
    within = ["nsenter", "--net", "--target", str(holder.pid)]
    try:
        until(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", "the other network")
        for command in (
            f"ip link add dropq0 type veth peer name dropq1 netns {holder.pid}",
            f"ip addr add {HERE}/24 dev dropq0",
            "ip link set dropq0 up",
            f"{' '.join(within)} ip addr add {THERE}/24 dev dropq1",
            f"{' '.join(within)} ip link set dropq1 up",
        ):
            subprocess.run(command.split(), check=True)
        yield within
    finally:
        subprocess.run(["ip", "link", "del", "dropq0"], check=False)
        holder.kill()
        holder.wait()


def _machines_go(options: Options) -> Row:
    """Let a machine with clients go away; the server has to notice, and answer those who come with its identities."""
    row = Row("a machine with 40 connections goes away, and its identities come again")
    root = Root.create(options.folder / "machines")
    queue = root.create_queue("q", durability="none")
    argv = [sys.executable, "-m", "dropq", "--root", str(root.path), "serve", "q", "--zmq", "--insecure"]
    argv += ["--receive", f"tcp://{HERE}:*", "--send", f"tcp://{HERE}:*", "--monitor", ANY]
    try:
        with _machine() as within, subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                _, receive, send, _ = server.stdout.readline().split("\t")
                run = [*within, sys.executable, "-c", CLIENT, receive, send.strip()]
                with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as away:
                    try:
                        assert away.stdout is not None
                        assert away.stdout.readline() == "connected\n"
                        there = _connections(server.pid, THERE)
                        subprocess.run([*within, "ip", "addr", "del", f"{THERE}/24", "dev", "dropq1"], check=True)
                        row.wrong += [] if there == 40 else [f"{there} are connected"]
                        row.wrong += _again(receive)
                        until(lambda: not _connections(server.pid, THERE), "the dead connections to end", timeout=GONE)
                    finally:
                        away.kill()
                row.cases, row.wrong = 40, row.wrong + ([] if server.poll() is None else ["the server ended"])
                row.lost = 40 - sum(queue.counts()[state] for state in UNSETTLED)
            finally:
                server.kill()
    except NotRun as error:
        row.not_run = str(error)
    return row


def _again(address: str) -> Iterator[str]:
    """Come with the identities of the machine that is gone; yield who gets no answer."""
    for number in range(20):
        client = Raw(address, identity=b"shop-%d" % number)
        client.say(framed(b"id", b"", b"again"))
        if client.message() != [b"id", b"1", b""]:
            yield f"shop-{number} is not answered"


def _connections(pid: int, peer: str) -> int:
    """Return how many connections a process has with a machine."""
    wanted = "".join(f"{int(part):02X}" for part in reversed(peer.split(".")))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    held = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            held.add(os.readlink(entry))
    return sum(line[2].startswith(wanted) and f"socket:[{line[9]}]" in held for line in lines)
