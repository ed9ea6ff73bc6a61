"""A server dies before, in the middle of and after every call that changes something for one client; then others go on.

The server is a child, the client is this process. What is left is as the table in docs/zeromq.md says: what was
answered is there, the rest is where it was before or where it is after, or is held by the dead server until a sweep.
Then another server delivers what waits, byte for byte, under the same keys.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq
from forks import DIED, fork
from helpers import Clock

from dropq import Root
from dropq.diagnosis.fsck import fsck_root
from dropq.worker.loop import Stop, stop_on_signals
from dropq.zmq.server import Server, Terms
from torture.account import judge, look, name_of
from torture.acts import Setting, of_each
from torture.calls import Call, come_between
from torture.cases import DAYS, GONE, SAID
from torture.table import Options, Row
from torture.zeromq import parts_of

SETTINGS = (
    Setting("plain", {"durability": "full"}),
    Setting("no history", {"durability": "full", "history": False}),
    Setting("strict leases, no rename that replaces nothing", {"leasing": "strict"}, noreplace=False),
)
#: Seconds after which a client gives up; milliseconds for which the answer of one that died may be on its way.
PATIENCE, ON_ITS_WAY = 20.0, 50
#: Seconds for which a message is a consumer's: in most cases, and where the end of a server waits for them.
LONG, SHORT = 600.0, 0.3
#: The most bytes of a message, where it is too large.
SMALL = 100
#: Cases of the short form, and moments of each.
FEW_CASES, FEW = 2, 2


@dataclass(frozen=True)
class Moment:
    """When a server dies: before a call, in the middle of it, which is a write, or after it."""

    how: str
    call: int

    def __str__(self) -> str:
        return f"{self.how} call {self.call + 1}"


class Killing:
    """Counts calls that change something once a file is there, and ends the process at a moment; nothing is synced."""

    def __init__(self, at: Moment | None, armed: Path, told: Path) -> None:
        self._at = at
        self._armed = armed
        self._told = told
        self._calls = 0

    def __call__(self, call: Call) -> object:
        if not call.changes or not self._armed.exists():
            return call.do()
        how = self._at.how if self._at is not None and self._at.call == self._calls else ""
        self._calls += 1
        with self._told.open("a") as told:
            told.write(f"{call.name}\n")
        if how == "in the middle of" and call.name == "write":
            os.write(call.arguments[0], bytes(call.arguments[1])[: len(call.arguments[1]) // 2])
        if how and how != "after":
            os._exit(DIED)
        result = None if call.name == "fsync" else call.do()
        if how:
            os._exit(DIED)
        return result


# -- a server and its client -------------------------------------------------------------------------------------------


class Died(Exception):
    """Raised when the server is dead, and no frame of it comes any more."""


@dataclass
class Served:
    """A server in a child, and sockets that are connected to it."""

    pid: int
    sockets: Path
    armed: Path
    context: Any
    made: list[Any] = field(default_factory=list)
    status: int | None = None

    def arm(self) -> None:
        """Let calls be counted from now on."""
        self.armed.touch()

    def connect(self, kind: int, to: str) -> Any:
        """Return a socket that is connected to one of the server's."""
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.connect(f"ipc://{self.sockets}/{to}")
        self.made.append(socket)
        return socket

    def receive(self, socket: Any) -> list[bytes]:
        """Wait for frames.

        Raises:
            Died: there are none, and the server is dead.
        """
        self.wait(lambda: bool(socket.poll(5)))
        frames: list[bytes] = socket.recv_multipart()
        return frames

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for something that the server does."""
        ends = time.monotonic() + PATIENCE
        while not done():
            if self.is_dead():
                time.sleep(ON_ITS_WAY / 1000)
                if done():
                    return
                raise Died
            if time.monotonic() > ends:
                raise TimeoutError("the server does nothing")

    def is_dead(self) -> bool:
        """Return whether the server has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def finish_round(self) -> None:
        """Wait until the server has come once around its loop: what it was told before is done then."""
        monitor = self.connect(zmq.REQ, "monitor")
        for _ in range(2):  # the first answer may be of a round that was under way
            monitor.send(b"MONITOR")
            self.receive(monitor)

    def end(self) -> None:
        """Kill what is left of it."""
        for socket in self.made:
            socket.close()
        if not self.is_dead():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@dataclass
class Seen:
    """What a client of a case saw: whose messages were answered with 1, and the frames that came."""

    answered: set[str] = field(default_factory=set)
    keys: dict[str, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """What one client does, with messages that wait before and messages that it sends, and where they are after it.

    `NAME.N` has N parts, and one more, as `parts_of` has it. With `same_id`, all that wait have one id.
    """

    name: str
    act: Callable[[Served, Case, Seen], None]
    waits: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    same_id: bool = False

    def before(self, name: str) -> str:
        """Return where a message is before the case."""
        return "target" if name in self.waits else GONE


def _send(served: Served, case: Case, seen: Seen) -> None:
    producer = served.connect(zmq.DEALER, "receive")
    served.arm()
    for name in case.sends:
        producer.send_multipart([name.encode(), b"", *parts_of(name)])
    for _ in case.sends:
        id, *rest = served.receive(producer)
        seen.answered.add(id.decode())
        seen.wrong += [f"{id.decode()} got the answer {rest}"] if rest != [b"1", b""] else []
    served.finish_round()


def _take(served: Served, case: Case, seen: Seen) -> tuple[Any, list[list[bytes]]]:
    """Connect as a consumer, and receive all that waits; return what settles each."""
    consumer = served.connect(zmq.ROUTER, "send")
    taken = []
    for _ in case.waits:
        peer, key, _, _, _, *parts = served.receive(consumer)
        name = name_of(b"".join(parts))
        seen.wrong += [f"{key!r} came damaged"] if name is None or parts != parts_of(name) else []
        taken.append([peer, key])
        seen.keys[str(name)] = key
    seen.wrong += (
        [f"{len(taken)} messages have the keys {seen.keys}"] if len({key for _, key in taken}) < len(taken) else []
    )
    return consumer, taken


def _deliver(served: Served, case: Case, seen: Seen) -> None:
    served.arm()
    _take(served, case, seen)
    served.finish_round()


def _fail(served: Served, case: Case, seen: Seen) -> None:
    served.arm()
    served.connect(zmq.ROUTER, "send")
    served.wait(lambda: bool(os.listdir(served.armed.parent / "root" / "q" / "error")))
    served.finish_round()


def _settle(status: bytes) -> Callable[[Served, Case, Seen], None]:
    def act(served: Served, case: Case, seen: Seen) -> None:
        consumer, taken = _take(served, case, seen)
        served.finish_round()
        served.arm()
        for peer, key in taken:
            consumer.send_multipart([peer, key, status])
        served.finish_round()

    return act


def _end(served: Served, case: Case, seen: Seen) -> None:
    """Acknowledge one, then let the server end: it returns the rest when their time is over."""
    consumer, taken = _take(served, case, seen)
    served.finish_round()
    served.arm()
    consumer.send_multipart([*taken[0], b"1"])
    served.finish_round()
    os.kill(served.pid, signal.SIGTERM)
    served.wait(served.is_dead)


CASES = (
    Case("one is sent", _send, sends=("one.1",), after=("target",)),
    Case("parts whose lengths do not fit the name are sent", _send, sends=("many.300",), after=("target",)),
    Case("three are sent", _send, sends=("one.1", "two.2", "three.3"), after=("target",)),
    Case("one is delivered", _deliver, waits=("one.1",), after=("processing",)),
    Case("parts are delivered", _deliver, waits=("many.300", "two.2"), after=("processing",)),
    Case("one is too large", _fail, waits=("one.1",), after=("error",), terms={"max_size": SMALL}),
    Case("one is acknowledged", _settle(b"1"), waits=("one.1",), after=("processed",)),
    Case("three are acknowledged", _settle(b"1"), waits=("one.1", "two.2", "many.300"), after=("processed",)),
    Case("one is given back", _settle(b"0"), waits=("two.2",), after=("target", "processing")),
    Case("a server ends", _end, ("one.1", "two.2"), after=("processed", "target"), terms={"ack_timeout": SHORT}),
    Case("two of one id are acknowledged", _settle(b"1"), waits=("one.1", "two.2"), after=("processed",), same_id=True),
    Case(
        "two of one id are given back", _settle(b"0"), ("one.1", "two.2"), after=("target", "processing"), same_id=True
    ),
)


# -- the cases ---------------------------------------------------------------------------------------------------------


def crashes(options: Options) -> Iterable[Row]:
    """Let a server die at every call of every case, in every setting; in short, at some of some, in one."""
    (folder := options.folder / "crashes").mkdir()
    if options.long:
        return of_each(SETTINGS, replace(options, folder=folder), _all)
    chance = random.Random(options.seed)
    cases = Cases(folder, chance.choice(SETTINGS))
    for case in chance.sample(CASES, FEW_CASES):
        cases.crash(case, lambda moments: chance.sample(moments, min(FEW, len(moments))))
    return [cases.row]


def _all(options: Options, setting: Setting) -> list[Row]:
    cases = Cases(options.folder, setting)
    for case in options.shared(CASES):
        cases.crash(case)
    return [cases.row]


class Cases:
    """The cases of one setting.

    Args:
        folder: where each case makes its root.
        setting: how the queue is configured.
    """

    def __init__(self, folder: Path, setting: Setting) -> None:
        self.row = Row(f"a server dies at every call: {setting.name}")
        self._folder = folder
        self._setting = setting

    def crash(self, case: Case, choose: Callable[[list[Moment]], list[Moment]] = list) -> None:
        """Let the server die at every moment, or at some."""
        calls = self.perform(case, None)
        moments = [Moment(how, call) for call in range(len(calls)) for how in ("before", "after")]
        moments += [Moment("in the middle of", call) for call, name in enumerate(calls) if name == "write"]
        for moment in choose(moments):
            self.perform(case, moment)

    def perform(self, case: Case, moment: Moment | None) -> list[str]:
        """Do what a case does, let the server die meanwhile, and judge what is left; return the calls."""
        shutil.rmtree(self._folder / "root", ignore_errors=True)
        options = {"redelivery_delay": 0, **self._setting.options}
        queue = Root.create(self._folder / "root").create_queue("q", **options)
        for name in case.waits:
            parts = parts_of(name)
            lengths = {"zmq_parts": "-".join(str(len(part)) for part in parts)} if len(parts) > 1 else {}
            queue.send(b"".join(parts), properties=lengths, message_id="same" if case.same_id else None)
        seen, died = Seen(), False
        with self._served(moment, case.terms) as served:
            try:
                case.act(served, case, seen)
            except Died:
                died = True
            died = died or served.status == DIED
        calls = (self._folder / "told").read_text().split()
        if served.status not in (None, SAID, DIED):
            seen.wrong.append(f"the server ended with {served.status}")
        self.row.kills += died
        self.row.cases += 1
        where = f"{case.name}, {moment if died else 'done'}"
        self.row.wrong += [f"{where}: {line}" for line in [*seen.wrong, *self._judge(case, seen, died=died)]]
        return calls

    @contextmanager
    def _served(self, moment: Moment | None, terms: Mapping[str, Any]) -> Iterator[Served]:
        """Serve the queue in a child that may die, until the block ends."""
        armed, told, bound = (self._folder / name for name in ("armed", "told", "bound"))
        for path in (armed, bound):
            path.unlink(missing_ok=True)
        told.write_text("")
        with tempfile.TemporaryDirectory(prefix="dropq-") as sockets:  # the path of a socket is short
            killing = Killing(moment, armed, told)
            pid = fork(lambda: self._serve(Path(sockets), killing, terms, bound), longest=0, out=self._folder / "out")
            with zmq.Context() as context:
                served = Served(pid, Path(sockets), armed, context)
                try:
                    served.wait(bound.exists)
                    yield served
                finally:
                    served.end()

    def _serve(self, sockets: Path, killing: Killing, terms: Mapping[str, Any], bound: Path) -> None:
        addresses = {name: f"ipc://{sockets}/{name}" for name in ("receive", "send", "monitor")}
        server = Server(Root(self._folder / "root").queue("q"), Terms(**{"ack_timeout": LONG, **addresses, **terms}))
        with stop_on_signals(Stop(), [signal.SIGTERM]) as stop, server.opened():
            come_between(killing, noreplace=self._setting.noreplace)
            bound.touch()
            server.run(stop)

    # -- what is checked -----------------------------------------------------------------------------------------

    def _judge(self, case: Case, seen: Seen, *, died: bool) -> Iterator[str]:
        """Yield what is wrong: as it is, after a sweep, after another server, and days later."""
        queue = Root(self._folder / "root").queue("q")
        after = {name: self._after(case, at) for at, name in enumerate((*case.waits, *case.sends))}
        if died:
            for name in after.keys() - seen.answered:
                after[name] |= {case.before(name)} | ({"processing"} if name in case.waits else set())
        yield from self._elsewhere(after, "")
        queue.sweep()
        for found_in in after.values():
            if "processing" in found_in:
                found_in.remove("processing")
                found_in.add("target")
        yield from self._elsewhere(after, " after a sweep")
        yield from self._deliver_rest(seen.keys)
        yield from self._days_later()

    def _after(self, case: Case, at: int) -> set[str]:
        """Return where a message may be after its case: without a history it is gone once it is acknowledged."""
        allowed_states = {case.after[at]} if case.act is _end else set(case.after)
        return {GONE if state == "processed" and not self._setting.history else state for state in allowed_states}

    def _elsewhere(self, allowed: Mapping[str, set[str]], when: str) -> Iterator[str]:
        found = look(self._folder / "root")
        self.row.count(judge(found, must=(), may=found.locations.keys()), when)
        states = {name: state.rpartition("/")[2] for name, state in found.states().items()}
        for name in allowed.keys() | states.keys():
            where, allowed_here = states.get(name, GONE), allowed.get(name, {GONE})
            if where not in allowed_here:
                self.row.lost += where == GONE
                yield f"{name} is {where}{when}, and may be {' or '.join(sorted(allowed_here))}"

    def _deliver_rest(self, keys: Mapping[str, bytes]) -> Iterator[str]:
        """Let another server deliver what waits under the keys that it had, and acknowledge it."""
        found = look(self._folder / "root")
        waiting = {name: places[0].path for name, places in found.locations.items() if places[0].state == "target"}
        rest = Case("the rest", _deliver, waits=tuple(waiting))
        seen = Seen()
        with self._served(None, {}) as served:
            consumer, taken = _take(served, rest, seen)
            for peer, key in taken:
                consumer.send_multipart([peer, key, b"1"])
            served.finish_round()
            if consumer.poll(0):
                yield "a message came again that was acknowledged"
        yield from seen.wrong
        for name in seen.keys.keys() & keys.keys():
            if seen.keys[name] != keys[name]:
                yield f"{name} had the key {keys[name]!r}, and came again under {seen.keys[name]!r}"
        for name, path in waiting.items():
            id = os.path.basename(path).split(".")[1].encode()
            if seen.keys.get(name, id).partition(b"/")[0] != id:
                yield f"{name} came under the key {seen.keys[name]!r}"
        states = look(self._folder / "root").states()
        end = "processed" if self._setting.history else GONE
        for name in waiting:
            if (end_state := states.get(name, GONE).rpartition("/")[2]) != end:
                yield f"{name} is {end_state}, and was acknowledged"

    def _days_later(self) -> Iterator[str]:
        """Yield what fsck finds and does not repair, days later; no message may go by that."""
        there = look(self._folder / "root").locations.keys()
        clock = Clock()
        clock.ms += DAYS
        root = Root(self._folder / "root", clock=clock)
        queue = root.queue("q")
        root.sweep(foreign_older_than="1d", unleased_older_than="1d", jobs_older_than="1d")
        queue.fsck(repair=True)
        fsck_root(root.context, repair=True)
        yield from (f"fsck leaves {finding.kind} {finding.path}" for finding in queue.fsck() if finding.open)
        yield from (f"fsck leaves {finding.kind} {finding.path}" for finding in fsck_root(root.context) if finding.open)
        self.row.count(judge(look(self._folder / "root"), must=there, may=there), "days later")
