"""A queue served over ZeroMQ: servers, producers and consumers are killed at random, or servers are asked to end.

What was answered with 1 must be there once, whole; what was acknowledged must not be delivered again after it was
archived; no server has more out than it may; and a producer that lives has an answer to all that was stored of it while
its servers lived. Each client notes what it does in a file of its own; times in there are microseconds of the machine.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from forks import fork
from helpers import until

from dropq import Root
from dropq.format.claims import split_claim
from torture.account import Found, body, judge, look, name_of
from torture.table import NotRun, Options, Row

#: Seconds of a storm, and between two kills on average; how often servers are asked to end, in long and in short.
LONG, SHORT, EVERY = 60.0, 2.0, 0.3
ENDS, SHORT_ENDS = 20, 1
#: How many messages each server may have out, and for how long; for how long where servers are asked to end.
IN_FLIGHT, ACK_TIMEOUT, GENTLE_TIMEOUT = 20, 0.5, 2.0
#: Messages that the producer may send that does not wait for its answers; messages that the queue has room for.
OUTSTANDING, WAITING = 500, 1000
#: Seconds after which a producer gives up an answer, whose server may be dead.
GIVES_UP = 2.0
#: Messages, on average, after which the consumer kills itself that does so again and again.
MORTAL = 300
#: Seconds between two files of the script.
PAUSE = 0.005
#: Microseconds for which a slow consumer keeps a message before it acknowledges it.
SLOW = 100_000
#: Microseconds by which the clock of a file's change may be behind the clock of a delivery, and by which the end of a
#: message's time at a consumer may be before the one that it is told.
COARSE, EARLIER = 100_000, 20_000
#: Microseconds in which an answer reaches a living producer, and an ack a living server, on a machine with much to do.
PROMPT = 1_000_000

#: What a server says of messages that found no room until it ended.
NO_ROOM = "the server ends, and the queue has no room: the message was not stored"

SERVERS = ("server-0", "server-1")
CLIENTS = (
    *("produce-one", "produce-many", "produce-parts", "produce-script"),
    *("consume-nack", "consume-stall", "consume-die"),
)
#: The names that a script gives its files, again and again.
SAME = ("report.csv", "orders.csv")
#: Those who take part where nobody is killed.
GENTLE = (*(name for name in CLIENTS if name != "consume-die"), "consume-slow")
#: Who consumes what the storm leaves.
HEALTHY = "consume-all"


def run(options: Options) -> Iterable[Row]:
    """Return rows for a storm, for servers that are asked to end under load, and for crashes at every call."""
    if find_spec("zmq") is None:
        raise NotRun("pyzmq is not installed: pip install 'dropq[zmq]'")
    from torture.zeromq_clients import strangers
    from torture.zeromq_crashes import crashes

    yield _stormed(options, "storm", lambda storm: storm.rage(LONG if options.long else SHORT))
    yield _stormed(options, "gentle", lambda storm: storm.end_servers(ENDS if options.long else SHORT_ENDS))
    yield from strangers(options)
    yield from crashes(options)


def _stormed(options: Options, name: str, rage: Callable[[Storm], None]) -> Row:
    with tempfile.TemporaryDirectory(prefix="dropq-") as sockets:  # the path of a socket is short
        (folder := options.folder / name).mkdir()
        storm = Storm(folder, Path(sockets), options.seed)
        rage(storm)
        storm.drain()
        storm.judge(row := Row(""))
    return row


# -- the storm ---------------------------------------------------------------------------------------------------------


@dataclass
class Actor:
    """A server or a client: its name, its process, the file of its notes, and when it lived."""

    name: str
    pid: int
    notes: Path
    began: int
    ended: int = 1 << 63
    status: int | None = None

    @property
    def out(self) -> Path:
        """The file of what it prints."""
        return Path(f"{self.notes}.out")

    def has_ended(self) -> bool:
        """Return whether its process has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


class Storm:
    """Who takes part.

    Attributes:
        heartbeat: milliseconds between the signs of life of clients; 0 for none.

    Args:
        folder: an empty folder.
        sockets: a folder that only its owner may enter, for the sockets.
        seed: what is left to chance.
    """

    heartbeat = 0

    def __init__(self, folder: Path, sockets: Path, seed: int) -> None:
        self.root = Root.create(folder / "root")
        self.queue = self.root.create_queue(
            "q", redelivery_delay=0, durability="none", max_unprocessed=WAITING, overflow="block"
        )
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.kills = self.ends = 0
        self.most_out: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.left = 0
        self.past: list[Actor] = []
        self._gentle = False
        self._sockets = sockets
        self._seed = seed
        self._chance = random.Random(seed)
        self._actors: dict[str, Actor] = {}

    def rage(self, seconds: float) -> None:
        """Kill whoever it hits, and let it come again."""
        try:
            self._start_all(CLIENTS)
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                self._wait(self._chance.uniform(0, 2 * EVERY))
                name = self._chance.choice(list(self._actors))
                self._kill(name)
                self._start(name)
        finally:
            self._kill_all()

    def end_servers(self, times: int) -> None:
        """Ask a server to end while it has much to do, and let it come again; nobody is killed."""
        self._gentle = True
        try:
            self._start_all(GENTLE)
            for _ in range(times):
                self._wait(self._chance.uniform(0.2, 1))
                name = self._chance.choice(SERVERS)
                self._end(name)
                self._start(name)
            for name in self._actors:
                if name.startswith("produce"):
                    os.kill(self._actors[name].pid, signal.SIGTERM)  # which is: send nothing more
            self._end(*SERVERS)
            self._wait(PROMPT / 1e6)
        finally:
            self._kill_all()

    def _start_all(self, clients: Iterable[str]) -> None:
        for name in (*SERVERS, *clients):
            self._start(name)
        until(lambda: self.queue.counts()["processed"], "the first ack")

    def _start(self, name: str) -> None:
        notes = self.notes / f"{name}.{len(self.past) + len(self._actors)}"
        actor = Actor(name, 0, notes, _now())
        play_it = partial(self._serve if name in SERVERS else self._play, name, notes)
        actor.pid = fork(play_it, longest=0, out=actor.out)
        self._actors[name] = actor

    def _serve(self, name: str, notes: Path) -> None:
        """Become a server."""
        argv = [sys.executable, "-m", "dropq", "--root", str(self.root.path), "serve", "q", "--zmq"]
        argv += ["--in-flight", str(IN_FLIGHT), "--ack-timeout", f"{GENTLE_TIMEOUT if self._gentle else ACK_TIMEOUT}s"]
        for socket in ("receive", "send", "monitor"):
            argv += [f"--{socket}", f"ipc://{self._sockets}/{name}-{socket}"]
        os.execv(sys.executable, argv)

    def _play(self, name: str, notes: Path) -> None:
        if name == "produce-script":
            drop_files(Path(self.queue.layout.base), f"script-{notes.suffix[1:]}", notes)
        play(name, str(self._sockets), str(notes), f"{self._seed}", heartbeat=self.heartbeat)

    def _wait(self, seconds: float) -> None:
        """Wait, and see meanwhile how much is out, and whether somebody has ended by itself."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(0.02)
            self._count_out()
            for actor in list(self._actors.values()):
                if actor.has_ended():
                    self._leave(actor)
                    self._start(actor.name)

    def _kill(self, name: str) -> None:
        actor = self._actors[name]
        actor.ended = _now()
        os.kill(actor.pid, signal.SIGKILL)
        self._leave(actor)

    def _kill_all(self) -> None:
        """Kill all at the end, which counts as no kill."""
        kills = self.kills
        for name in list(self._actors):
            self._kill(name)
        self.kills = kills

    def _end(self, *names: str) -> None:
        """Ask servers to end, which can be asked once they have said where they are bound, and wait until they have."""
        actors = [self._actors[name] for name in names]
        for actor in actors:
            until(partial(is_bound, actor.out), f"{actor.name} to be bound")
            os.kill(actor.pid, signal.SIGTERM)
        for actor in actors:
            until(partial(self._sees_end, actor), f"{actor.name} to end")
            self.ends += 1
            self._leave(actor)

    def _sees_end(self, actor: Actor) -> bool:
        self._count_out()
        return actor.has_ended()

    def _leave(self, actor: Actor) -> None:
        """Note that one is no more; only who kills itself may end without being asked."""
        until(actor.has_ended, f"{actor.name} to end")
        actor.ended = min(actor.ended, _now())
        self.past.append(self._actors.pop(actor.name))
        self.kills += actor.status == -signal.SIGKILL
        if actor.status not in (0, -signal.SIGKILL):
            lines = actor.out.read_text(errors="replace").splitlines()
            self.wrong.append(f"{actor.name} ended with {actor.status}: {lines[-1] if lines else ''}")

    def _count_out(self) -> None:
        """See how many messages each server holds: those whose leases run."""
        names = os.listdir(self.queue.layout.processing)
        claims = [claim for claim in (split_claim(name)[0] for name in names) if claim is not None]
        now = time.time() * 1000
        held = Counter(claim.subscription for claim in claims if claim.deadline > now)
        for server, count in held.items():
            self.most_out[server] = max(count, self.most_out[server])

    def drain(self) -> None:
        """Let one healthy server and one healthy consumer take what is left; nobody sweeps but the server."""
        try:
            self._start(SERVERS[0])
            self._start(HEALTHY)
            until(self._is_empty, "all that is left to be acknowledged")
            self._end(SERVERS[0])
        finally:
            self._kill_all()

    def _is_empty(self) -> bool:
        counts = self.queue.counts()
        return not any(counts[state] for state in ("target", "processing", "delayed"))

    # -- the end -------------------------------------------------------------------------------------------------------

    def noted(self) -> Iterator[Line]:
        """Yield all lines of the notes that were written to their ends."""
        for path in sorted(self.notes.iterdir()):
            for line in path.read_text().splitlines(keepends=True) if path.suffix != ".out" else ():
                if line.endswith("\n"):
                    verb, name, *rest = line.split()
                    yield Line(path, verb, name, rest)

    def judge(self, row: Row) -> None:
        """Hold what lies there, and what the clients noted, against what was promised."""
        noted = list(self.noted())
        said: dict[str, set[str]] = defaultdict(set)
        for line in noted:
            said[line.verb].add(line.name)
        row.kills += self.kills
        row.cases += len(said["sent"])
        self.queue.sweep()
        found = look(self.root.path)
        account = judge(found, must=said["sent"], may=said["try"])
        account.wrong += self.wrong
        account.wrong += sorted(f"{name} came damaged" for name in said["damaged"])
        account.wrong += _of_refusals(found, noted)
        account.wrong += self._of_ends(found, said["ack"])
        account.wrong += self._of_deliveries(found, noted)
        account.wrong += [f"{who} had {most} messages out" for who, most in self.most_out.items() if most > IN_FLIGHT]
        stalled, due = self._most_stalled(noted), self._due(found, noted)
        account.wrong += [f"a consumer that stalls held {stalled} messages"] if stalled > IN_FLIGHT else []
        account.wrong += [f"{name} was stored, and has no answer" for name in sorted(due - said["sent"])]
        account.wrong += self._of_order(found, said["sent"])
        row.count(account, "the storm")
        row.test = self._title(noted, stalled, len(due))

    def _title(self, noted: list[Line], stalled: int, due: int) -> str:
        again = Counter(line.name for line in noted if line.verb == "got")
        doubles = sum(count - 1 for count in again.values())
        what = f"{self.ends} ends of servers under load" if self._gentle else "storm"
        most = max(stalled, *self.most_out.values(), 0)
        return (
            f"{what} ({doubles:,} came again, {self.left} drafts left; {due:,} answers due; "
            f"at most {most} of {IN_FLIGHT} out)"
        )

    def _of_ends(self, found: Found, acked: set[str]) -> Iterator[str]:
        """Yield what is not archived, or is, and nobody acknowledged it."""
        for name, state in found.states().items():
            if not state.endswith("processed"):
                yield f"{name} is in {state}, not in processed"
            elif name not in acked:
                yield f"{name} is archived, and nobody acknowledged it"

    def _of_deliveries(self, found: Found, noted: list[Line]) -> Iterator[str]:
        """Yield what was delivered after it was archived, or was acknowledged in time with nobody killed."""
        archived = {name: os.stat(locations[0].path).st_ctime_ns // 1000 for name, locations in found.locations.items()}
        acked = self._acked_in_time(noted)
        for line in noted:
            if line.verb == "got":
                sent = int(line.rest[0])
                if sent > archived.get(line.name, sent) + COARSE:
                    yield f"{line.name} was delivered after it was archived"
                elif sent > acked.get(line.name, sent):
                    yield f"{line.name} was delivered after it was acknowledged in time"

    def _acked_in_time(self, noted: list[Line]) -> dict[str, int]:
        """Return when each message was acknowledged in time, where nobody was killed before the ack arrived."""
        times: dict[str, int] = {}
        for line in noted:
            if self._gentle and line.verb == "ack":
                at, until_ = map(int, line.rest)
                if at < until_ - PROMPT:
                    times[line.name] = min(at, times.get(line.name, at))
        return times

    def _due(self, found: Found, noted: list[Line]) -> set[str]:
        """Return what has to have an answer: its producer, and all servers that may have stored it, lived on."""
        if self._gentle:
            return set(found.locations)
        lives = {actor.notes: actor for actor in self.past}
        due = set[str]()
        for line in noted:
            if line.verb == "try" and line.rest and line.name in found.locations and line.path in lives:
                stored = _stored(found.locations[line.name][0].path)
                servers = [actor for actor in self.past if actor.name in line.rest and actor.began <= stored]
                ends = [lives[line.path].ended, *(actor.ended for actor in servers if actor.ended >= stored)]
                if len(ends) > 1 and stored + PROMPT < min(ends):
                    due.add(line.name)
        return due

    def _most_stalled(self, noted: list[Line]) -> int:
        """Return how many messages of one server a consumer that settles nothing had at a time, by their times.

        Its connection outlives a server, and the next one counts for itself.
        """
        begins = sorted((actor.began, actor.name) for actor in self.past)
        steps: dict[tuple[Path, int], list[tuple[int, int]]] = defaultdict(list)
        for line in noted:
            if line.verb == "got" and line.path.name.startswith("consume-stall"):
                sent, timeout = int(line.rest[0]), int(line.rest[1])
                began = max((at for at, name in begins if name == line.rest[2] and at <= sent), default=0)
                steps[line.path, began] += [(sent, 1), (sent + timeout - EARLIER, -1)]
        return max((max(accumulate(change for _, change in sorted(one))) for one in steps.values()), default=0)

    def _of_order(self, found: Found, sent: set[str]) -> Iterator[str]:
        """Yield what the end left that is no message: only drafts of the killed that were never answered may be."""
        counts = self.queue.counts()
        if counts["processed"] != len(found.locations):
            yield f"{counts['processed']} are counted in processed/, and {len(found.locations)} lie there"
        self.left = len(found.beside)
        for path in found.beside:
            if (name := name_of(Path(path).read_bytes())) in sent:
                yield f"{name} was answered with 1, and lies in {path}"
        yield from (f"fsck finds {finding.kind}: {finding.path}" for finding in self.queue.fsck() if finding.open)


class Line(NamedTuple):
    """A line of notes: a message is about to be sent, was answered with 1, with 0; came, damaged; is acknowledged."""

    path: Path
    verb: str
    name: str
    rest: list[str]


def is_bound(out: Path) -> bool:
    """Return whether a server has said where it is bound."""
    return out.exists() and "\tipc://" in out.read_text()


def _now() -> int:
    return time.time_ns() // 1000


def _of_refusals(found: Found, noted: list[Line]) -> Iterator[str]:
    """Yield what was refused, but for want of room when a server ended, and what was refused and is there.

    A stranger may connect under the name of a producer, and send what is no message. The server sends the refusal to
    whoever has that name then. So a refusal of what no producer sent does not count.
    """
    tried = {line.name for line in noted if line.verb == "try"}
    for line in noted:
        if line.verb == "refused" and line.name in tried:
            why = " ".join(line.rest)
            if not why.startswith(NO_ROOM):
                yield f"{line.name} was refused: {why}"
            elif line.name in found.locations:
                yield f"{line.name} was refused, and is there: {why}"


def _stored(path: str) -> int:
    """Return when a message was stored, by its id, in microseconds."""
    return int(os.path.basename(path).split(".")[1].partition("-")[0])


# -- clients -----------------------------------------------------------------------------------------------------------


def parts_of(name: str) -> list[bytes]:
    """Return the parts of the message of a name: `NAME.N` has N of them, of which the second is empty."""
    whole, count = body(name, 200), int(name.rpartition(".")[2])
    step = len(whole) // count
    parts = [whole[at * step : (at + 1) * step] for at in range(count - 1)] + [whole[(count - 1) * step :]]
    return [parts[0], b"", *parts[1:-1], b"".join(parts[-1:])] if count > 1 else parts


def play(role: str, sockets: str, notes: str, seed: str, *, heartbeat: int = 0) -> None:
    """Play the part of a client until killed; a producer sends nothing more after a SIGTERM.

    Args:
        role: which part.
        sockets: the folder of the servers' sockets.
        notes: the file of its notes.
        seed: what is left to chance.
        heartbeat: milliseconds between signs of life; with any, a producer has an identity.
    """
    import zmq

    verb, _, kind = role.partition("-")
    producing = verb == "produce"
    chance = random.Random(f"{seed} {notes}")
    socket = zmq.Context().socket(zmq.DEALER if producing else zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0
    if heartbeat:
        socket.heartbeat_ivl, socket.heartbeat_timeout = heartbeat, 60_000
        if producing:
            socket.routing_id = role.encode()
    servers = [chance.choice(SERVERS)] if kind in ("one", "stall") else list(SERVERS)
    for server in servers:
        socket.connect(f"ipc://{sockets}/{server}-{'receive' if producing else 'send'}")
    with open(notes, "a", buffering=1) as file:
        if producing:
            Producer(socket, file, kind, servers).work(f"{role}-{os.path.basename(notes).rpartition('.')[2]}", chance)
        else:
            Consumer(socket, file, kind, servers, chance).work()


def drop_files(base: Path, prefix: str, notes: Path) -> None:
    """Drop files under few names until killed, as a script does that knows nothing of ZeroMQ; none after a SIGTERM.

    It leaves alone what lies under a name: a rename would replace it.
    """
    sends = [True]
    signal.signal(signal.SIGTERM, lambda *_: sends.clear())
    with open(notes, "a", buffering=1) as file:
        number = 0
        while True:
            time.sleep(PAUSE)
            free = [name for name in SAME if sends and not (base / "target" / name).exists()]
            for name in free:
                number += 1
                file.write(f"try {prefix}-{number}.1\n")
                draft = base / "working" / f"{prefix}-{number}"
                draft.write_bytes(body(f"{prefix}-{number}.1", 200))
                os.utime(draft, (time.time() - 1,) * 2)  # it has settled
                draft.rename(base / "target" / name)
                file.write(f"sent {prefix}-{number}.1\n")


class Producer:
    """Sends messages, and reads the answers; one that is not given in time it does not wait for."""

    def __init__(self, socket: Any, notes: Any, kind: str, servers: list[str]) -> None:
        self._socket = socket
        self._notes = notes
        self._kind = kind
        self._servers = " ".join(servers)
        self._most = OUTSTANDING if kind == "many" else 1
        self._out: deque[tuple[str, float]] = deque()
        self._answered: set[str] = set()
        self._sends = True

    def work(self, prefix: str, chance: random.Random) -> None:
        """Send until killed."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_sends", False))
        number = 0
        while True:
            while self._sends and len(self._out) < self._most:
                number += 1
                self._send(f"{prefix}-{number}.{chance.randint(2, 9) if self._kind == 'parts' else 1}")
            while self._socket.poll(50):
                self._read()
                if self._sends and len(self._out) - len(self._answered) < self._most:
                    break
            while self._out and (self._out[0][0] in self._answered or self._out[0][1] < time.monotonic()):
                self._answered.discard(self._out.popleft()[0])

    def _send(self, name: str) -> None:
        self._notes.write(f"try {name} {self._servers}\n")
        self._socket.send_multipart([name.encode(), b"", *parts_of(name)])
        self._out.append((name, time.monotonic() + GIVES_UP))

    def _read(self) -> None:
        id, status, _, *why = self._socket.recv_multipart()
        name = id.decode()
        self._answered.add(name)
        self._notes.write(f"sent {name}\n" if status == b"1" else f"refused {name} {b' '.join(why).decode()}\n")


class Consumer:
    """Receives messages, and settles each as its kind does, or never; what came damaged it notes, and acknowledges."""

    def __init__(self, socket: Any, notes: Any, kind: str, servers: list[str], chance: random.Random) -> None:
        self._socket = socket
        self._notes = notes
        self._kind = kind
        self._servers = " ".join(servers)
        self._chance = chance
        self._held: deque[tuple[int, Delivery]] = deque()

    def work(self) -> None:
        """Receive until killed; one that is slow keeps each message for a while."""
        while True:
            if self._socket.poll(10):
                delivery = self._receive()
                if self._kind == "slow":
                    self._held.append((_now() + SLOW, delivery))
                else:
                    self._settle(delivery)
            while self._held and self._held[0][0] <= _now():
                self._ack(self._held.popleft()[1])

    def _receive(self) -> Delivery:
        peer, key, sent, timeout, _, *parts = self._socket.recv_multipart()
        name = name_of(b"".join(parts))
        if name is None or parts != parts_of(name):
            self._notes.write(f"damaged {name or key.decode()}\n")
        self._notes.write(f"got {name} {int(sent)} {int(timeout)} {self._servers}\n")
        self._die()
        return Delivery(peer, key, str(name), int(sent) + int(timeout))

    def _settle(self, delivery: Delivery) -> None:
        if self._kind == "nack" and self._chance.random() < 0.3:
            self._socket.send_multipart([delivery.peer, delivery.key, b"0"])
        elif self._kind != "stall":
            self._ack(delivery)

    def _ack(self, delivery: Delivery) -> None:
        self._notes.write(f"ack {delivery.name} {_now()} {delivery.until}\n")
        self._die()
        self._socket.send_multipart([delivery.peer, delivery.key, b"1"])
        self._die()

    def _die(self) -> None:
        if self._kind == "die" and self._chance.random() < 1 / MORTAL / 3:
            os.kill(os.getpid(), signal.SIGKILL)


class Delivery(NamedTuple):
    """A message that came: what settles it, its name, and until when it is the consumer's."""

    peer: bytes
    key: bytes
    name: str
    until: int
