"""A queue served over ZeroMQ by two servers: they, producers and consumers are killed at random, and come again.

What was answered with 1 must be there once, whole; what was acknowledged must not be delivered again after it was
archived; no server has more out than it may. Each client notes what it does in a file of its own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers import until

from dropq import Root
from dropq.format.claims import split_claim
from torture.account import body, judge, look, name_of
from torture.table import NotRun, Options, Row

#: Seconds of a storm, and between two kills on average.
LONG, SHORT, EVERY = 60.0, 5.0, 0.25
#: How many messages each server may have out, and for how long.
IN_FLIGHT, ACK_TIMEOUT = 20, 0.5
#: Messages that the producer may send that does not wait for its answers; messages that the queue has room for.
OUTSTANDING, WAITING = 500, 2000
#: Seconds after which a producer gives up an answer, whose server may be dead.
GIVES_UP = 2.0
#: Microseconds by which the clock of a file's change may be behind the clock of a delivery.
COARSE = 100_000

SERVERS = ("server-0", "server-1")
CLIENTS = ("produce-one", "produce-many", "produce-parts", "consume", "consume-nack", "consume-stall")


def run(options: Options) -> Iterable[Row]:
    """Return a row for a storm."""
    if find_spec("zmq") is None:
        raise NotRun("pyzmq is not installed: pip install 'dropq[zmq]'")
    row = Row("ZeroMQ, storm: 2 servers, 3 producers, 3 consumers")
    with tempfile.TemporaryDirectory(prefix="dropq-") as sockets:  # the path of a socket is short
        storm = Storm(options.folder, Path(sockets), options.seed)
        storm.rage(LONG if options.long else SHORT)
        storm.drain()
        storm.judge(row)
    yield row


class Storm:
    """Who takes part.

    Args:
        folder: an empty folder.
        sockets: a folder that only its owner may enter, for the sockets.
        seed: what is left to chance.
    """

    def __init__(self, folder: Path, sockets: Path, seed: int) -> None:
        self.root = Root.create(folder / "root")
        self.queue = self.root.create_queue(
            "q", redelivery_delay=0, durability="none", max_unprocessed=WAITING, overflow="block"
        )
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.kills = 0
        self.most_out: Counter[str] = Counter()
        self._sockets = sockets
        self._seed = seed
        self._chance = random.Random(seed)
        self._started = 0
        self._actors: dict[str, subprocess.Popen[bytes]] = {}

    def rage(self, seconds: float) -> None:
        """Kill whoever it hits, and let it come again."""
        ends = time.monotonic() + seconds
        try:
            for name in (*SERVERS, *CLIENTS):
                self._start(name)
            until(lambda: self.queue.counts()["processed"], "the first ack", timeout=60)
            while time.monotonic() < ends:
                time.sleep(self._chance.uniform(0, 2 * EVERY))
                self._count_out()
                name = self._chance.choice(list(self._actors))
                self._kill(name)
                self._start(name)
        finally:
            for name in list(self._actors):
                self._kill(name)

    def _start(self, name: str) -> None:
        self._started += 1
        argv = [sys.executable, "-m", "dropq", "--root", str(self.root.path), "serve", "q", "--zmq"]
        argv += ["--in-flight", str(IN_FLIGHT), "--ack-timeout", f"{ACK_TIMEOUT}s"]
        if name in SERVERS:
            for socket in ("receive", "send", "monitor"):
                argv += [f"--{socket}", f"ipc://{self._sockets}/{name}-{socket}"]
        else:
            notes = self.notes / f"{name}.{self._started}"
            argv = [sys.executable, "-m", __name__, name, str(self._sockets), str(notes), f"{self._seed}"]
        quiet: Any = subprocess.DEVNULL
        path = {"PYTHONPATH": str(Path(__file__).parents[1])}
        self._actors[name] = subprocess.Popen(argv, stdout=quiet, stderr=quiet, env={**os.environ, **path})

    def _kill(self, name: str) -> None:
        actor = self._actors.pop(name)
        actor.send_signal(signal.SIGKILL)
        self.kills += actor.wait() == -signal.SIGKILL

    def _count_out(self) -> None:
        """See how many messages each server holds: those whose leases run."""
        names = os.listdir(self.queue.layout.processing)
        claims = [claim for claim in (split_claim(name)[0] for name in names) if claim is not None]
        now = time.time() * 1000
        held = Counter(claim.subscription for claim in claims if claim.deadline > now)
        for server, count in held.items():
            self.most_out[server] = max(count, self.most_out[server])

    def drain(self) -> None:
        """Acknowledge what is left, and note it as a consumer does."""
        self.queue.sweep()
        with (self.notes / "drain.0").open("a") as notes, self.queue.subscribe(max_backlog=None) as subscription:
            while (message := subscription.receive(timeout=4 * ACK_TIMEOUT)) is not None:
                notes.write(f"ack {name_of(message.body)}\n")
                message.ack()

    # -- the end -------------------------------------------------------------------------------------------------------

    def noted(self) -> Iterator[list[str]]:
        """Yield all lines of the notes that were written to their ends, in words."""
        for path in sorted(self.notes.iterdir()):
            yield from (line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))

    def judge(self, row: Row) -> None:
        """Hold what lies there, and what the clients noted, against what was promised."""
        noted = list(self.noted())
        said: dict[str, set[str]] = {verb: {name for told, name, *_ in noted if told == verb} for verb in VERBS}
        row.kills += self.kills
        row.cases += len(said["sent"])
        found = look(self.root.path)
        account = judge(found, must=said["sent"], may=said["try"])
        account.wrong += sorted(f"{name} came damaged" for name in said["damaged"])
        account.wrong += [f"{name} was refused: {' '.join(why)}" for told, name, *why in noted if told == "refused"]
        archived = {name: _changed_us(places[0].path) for name, places in found.places.items()}
        states = found.states()
        account.wrong += [f"{name} is not in processed/" for name in archived if states[name] != "processed"]
        account.wrong += sorted(
            f"{name} is archived, and nobody acknowledged it" for name in archived.keys() - said["ack"]
        )
        for told, name, *rest in noted:
            if told == "got" and name in archived and int(rest[0]) > archived[name] + COARSE:
                account.wrong.append(f"{name} was delivered after it was archived")
        account.wrong += [f"{who} had {most} messages out" for who, most in self.most_out.items() if most > IN_FLIGHT]
        row.count(account, "the storm")
        again = Counter(name for told, name, *_ in noted if told == "got")
        row.test += f" ({sum(count - 1 for count in again.values()):,} came again, as they may)"


#: What clients note: a message is about to be sent, was answered with 1, with 0; came, damaged; is acknowledged.
VERBS = ("try", "sent", "refused", "got", "damaged", "ack")


def _changed_us(path: str) -> int:
    return os.stat(path).st_ctime_ns // 1000


# -- clients -----------------------------------------------------------------------------------------------------------


def parts_of(name: str) -> list[bytes]:
    """Return the parts of the message of a name: `NAME.N` has N of them."""
    whole, count = body(name, 200), int(name.rpartition(".")[2])
    step = len(whole) // count
    return [whole[at * step : (at + 1) * step] for at in range(count - 1)] + [whole[(count - 1) * step :]]


def play(role: str, sockets: str, notes: str, seed: str) -> None:
    """Play the part of a client until killed."""
    import zmq

    verb, _, kind = role.partition("-")
    producing = verb == "produce"
    socket = zmq.Context().socket(zmq.DEALER if producing else zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0
    for server in SERVERS:
        socket.connect(f"ipc://{sockets}/{server}-{'receive' if producing else 'send'}")
    with open(notes, "a", buffering=1) as file:
        chance = random.Random(f"{seed} {notes}")
        if producing:
            _produce(socket, file, kind, f"{role}-{os.path.basename(notes).rpartition('.')[2]}", chance)
        else:
            _consume(socket, file, kind, chance)


def _produce(socket: Any, notes: Any, kind: str, prefix: str, chance: random.Random) -> None:
    number, out = 0, deque[tuple[str, float]]()
    most = OUTSTANDING if kind == "many" else 1
    answered = set[str]()
    while True:
        while len(out) < most:
            number += 1
            name = f"{prefix}-{number}.{chance.randint(2, 9) if kind == 'parts' else 1}"
            notes.write(f"try {name}\n")
            socket.send_multipart([name.encode(), b"", *parts_of(name)])
            out.append((name, time.monotonic() + GIVES_UP))
        while socket.poll(50):
            id, status, _, *why = socket.recv_multipart()
            name = id.decode()
            answered.add(name)
            notes.write(f"sent {name}\n" if status == b"1" else f"refused {name} {b' '.join(why).decode()}\n")
            if len(out) - len(answered) < most:
                break
        while out and (out[0][0] in answered or out[0][1] < time.monotonic()):
            answered.discard(out.popleft()[0])


def _consume(socket: Any, notes: Any, kind: str, chance: random.Random) -> None:
    while True:
        peer, key, sent, _, _, *parts = socket.recv_multipart()
        name = name_of(b"".join(parts))
        if name is None or parts != parts_of(name):
            notes.write(f"damaged {name or key.decode()}\n")
            continue
        notes.write(f"got {name} {int(sent)}\n")
        if kind == "stall":
            time.sleep(chance.uniform(0, ACK_TIMEOUT))
        elif kind == "nack" and chance.random() < 0.3:
            socket.send_multipart([peer, key, b"0"])
        else:
            notes.write(f"ack {name}\n")
            socket.send_multipart([peer, key, b"1"])


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        play(*sys.argv[1:])
