"""The storm: whoever works on a few queues is killed or stopped at random moments, and comes again.

A kill counts when the notes of the process say that it was in the middle of something. A process that is stopped for
longer than its lease, and goes on, must find that it has lost what it held. At the end everybody is killed, dropq
sweeps what is left, and `account` is asked whether all is there; then all is drained, and it is asked again.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forks import fork
from helpers import until

from dropq import Queue, Root
from torture import cast
from torture.account import Account, Found, judge, look
from torture.notes import Claim, Notes, ProcessNotes, broken
from torture.table import Options, Row

#: Proven kills: as many as a storm is to have.
LONG, SHORT = 1_000, 30
#: Seconds after which a storm that does not come to its kills is given up.
PATIENCE, SHORT_PATIENCE = 900.0, 120.0
#: Seconds between two strikes, on average, in the long form and in the short one; the part of them that are stops.
EVERY, SHORT_EVERY, STOPS = 0.15, 0.08, 0.2
#: Seconds that a process is stopped for: some are back before their lease has run out.
STOPPED = (0.5 * cast.LEASE, 4 * cast.LEASE)
#: Milliseconds by which the clock of the machine may be set meanwhile.
STEADY = 50

#: Who is stopped to lose a lease.
_HOLDERS = ("consume", "consume-leased", "work", "stream")


@dataclass(frozen=True)
class Setting:
    """A queue of the storm: what it is called in the table, its configuration, and who works on it."""

    told: str
    options: dict[str, Any]
    roles: tuple[str, ...]


_ALL = ("produce", "produce", "consume", "consume", "work", "sweep")
SETTINGS = {
    "kept": Setting(
        "history kept, no lease but of those who ask, synced",
        {"durability": "full"},
        (*_ALL, "consume-leased", "work-by-command", "requeue"),
    ),
    "bare": Setting("no history, leases", {"history": False, "lease_period": cast.LEASE}, (*_ALL, "requeue")),
    "patient": Setting(
        "delays before the next try, leases",
        {"lease_period": cast.LEASE, "redelivery_delay": 0.02, "redelivery_backoff": 2.0, "redelivery_attempts": 3},
        _ALL,
    ),
    "counted": Setting(
        "three deliveries, then error/, and back, leases",
        {"lease_period": cast.LEASE, "max_deliveries": 3, "max_cancels": 2, "exhausted": "error"},
        (*_ALL, "requeue"),
    ),
    "streamed": Setting(
        "a stream, and others beside it, leases",
        {"lease_period": cast.LEASE},
        ("produce", "consume-leased", "stream", "sweep", "requeue"),
    ),
}


def run(options: Options) -> Iterable[Row]:
    """Return a row for each queue of a storm."""
    kills, patience, every = (LONG, PATIENCE, EVERY) if options.long else (SHORT, SHORT_PATIENCE, SHORT_EVERY)
    storm = Storm(options.folder, options.seed, crowded=options.long)
    drift = _drift()
    try:
        storm.rage(kills, patience, every)
    finally:
        storm.end()
    rows = storm.rows()
    if storm.proven.total() < kills:
        rows[0].wrong.append(f"{storm.proven.total()} proven kills in {patience:.0f} s, of {kills}")
    if abs(_drift() - drift) > STEADY:
        rows[0].wrong.append("the clock of this machine was set meanwhile, and the notes go by it: run it again")
    return rows


def _drift() -> int:
    return (time.time_ns() - time.monotonic_ns()) // 1_000_000


@dataclass
class Process:
    """A process of the storm: its part, its place among those who work on a queue, and its notes."""

    pid: int
    queue: str
    role: str
    place: int
    notes: Path
    #: When it was killed, in ns; None while it was not.
    killed: int | None = None


@dataclass
class Storm:
    """A root with its queues, and all who work on them."""

    folder: Path
    seed: int
    #: Whether there are several of a part, where a queue's setting says so.
    crowded: bool
    live: list[Process] = field(default_factory=list)
    past: list[Process] = field(default_factory=list)
    #: Kills in the middle of something, by queue; and what that was.
    proven: Counter[str] = field(default_factory=Counter)
    within: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._serial = 0
        self._stopped: list[tuple[float, int]] = []
        self.root = Root.create(self.folder / "root")
        (self.folder / "notes").mkdir()
        for name, setting in SETTINGS.items():
            self.root.create_queue(name, **{"durability": "none", "redelivery_delay": 0, **setting.options})

    # -- raging ----------------------------------------------------------------------------------------------------

    def rage(self, kills: int, patience: float, every: float) -> None:
        """Kill and stop, until so many kills are proven, or patience is at its end."""
        for queue, setting in SETTINGS.items():
            for place, role in enumerate(setting.roles if self.crowded else dict.fromkeys(setting.roles)):
                self._start(queue, role, place)
        deadline = time.monotonic() + patience
        while self.proven.total() < kills and time.monotonic() < deadline:
            time.sleep(self._chance.uniform(0, 2 * every))
            self._go_on()
            self._replace_ended()
            self._strike()

    def _start(self, queue: str, role: str, place: int) -> None:
        self._serial += 1
        name = f"{queue}-{role}-{place}-{self._serial}"
        notes = self.folder / "notes" / f"{name}.log"
        seed = f"{self.seed} {name}"
        out = notes.with_suffix(".out")
        pid = fork(lambda: cast.play(role, self.folder / "root", queue, notes, seed), longest=0, out=out)
        self.live.append(Process(pid, queue, role, place, notes))

    def _strike(self) -> None:
        if self._chance.random() < STOPS:
            self._stop_a_holder()
        else:
            victim = self._chance.choice(self.live)
            self._kill(victim)
            self._start(victim.queue, victim.role, victim.place)

    def _stop_a_holder(self) -> None:
        """Stop a process that holds a message on a lease, and let it go on later."""
        for victim in self._chance.sample(self.live, len(self.live)):
            if victim.role in _HOLDERS and not any(pid == victim.pid for _, pid in self._stopped):
                os.kill(victim.pid, signal.SIGSTOP)
                os.waitpid(victim.pid, os.WUNTRACED)
                if ProcessNotes.read(victim.notes).leased:
                    heapq.heappush(self._stopped, (time.monotonic() + self._chance.uniform(*STOPPED), victim.pid))
                    return
                os.kill(victim.pid, signal.SIGCONT)

    def _go_on(self) -> None:
        while self._stopped and self._stopped[0][0] <= time.monotonic():
            _, pid = heapq.heappop(self._stopped)
            if any(process.pid == pid for process in self.live):
                os.kill(pid, signal.SIGCONT)

    def _kill(self, victim: Process) -> None:
        victim.killed = time.time_ns()
        os.kill(victim.pid, signal.SIGKILL)
        _, status = os.waitpid(victim.pid, 0)
        self._leave(victim, status)
        within = ProcessNotes.read(victim.notes).within
        if within is not None and os.WIFSIGNALED(status):
            self.proven[victim.queue] += 1
            self.within[within] += 1

    def _replace_ended(self) -> None:
        for process in list(self.live):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid:
                self._leave(process, status)
                self._start(process.queue, process.role, process.place)

    def _leave(self, process: Process, status: int) -> None:
        self.live.remove(process)
        self.past.append(process)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            lines = process.notes.with_suffix(".out").read_text(errors="replace").splitlines()
            self.failed.append(f"{process.notes.stem} ended with status {status}: {lines[-1] if lines else ''}")

    def end(self) -> None:
        """Kill everybody."""
        for process in list(self.live):
            process.killed = time.time_ns()
            os.kill(process.pid, signal.SIGKILL)
            self._leave(process, os.waitpid(process.pid, 0)[1])

    # -- accounting ------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Bring the queues in order, look, drain them, look again, and hold it all against the notes."""
        for name in SETTINGS:
            _settle_down(self.root.queue(name))
        before = look(self.folder / "root")
        for name in SETTINGS:
            self._drain(name)
        after = look(self.folder / "root")
        rows = [self._row(name, setting, before, after) for name, setting in SETTINGS.items()]
        rows[0].wrong += self.failed
        print(f"storm: {self._serial} processes; killed in {dict(self.within.most_common())}", file=sys.stderr)
        return rows

    def _drain(self, name: str) -> None:
        """Take what waits, as one more consumer that takes notes."""
        drain = Process(os.getpid(), name, "drain", 0, self.folder / "notes" / f"{name}-drain.log")
        notes, queue = Notes(drain.notes), Root(self.folder / "root").queue(name)
        with queue.subscribe(lease_period="1h") as subscription:
            while queue.counts()["target"]:
                message = subscription.receive()
                if message is not None and cast.got(notes, message) is not None:
                    cast.noted(notes, "ack", message, message.ack)
        self.past.append(drain)

    def _row(self, name: str, setting: Setting, before: Found, after: Found) -> Row:
        by_process = [(process, ProcessNotes.read(process.notes)) for process in self.past if process.queue == name]
        claims = [(claim, process.killed or notes.last) for process, notes in by_process for claim in notes.claims]
        sent = {body for _, notes in by_process for body in notes.sent}
        tried = {body for _, notes in by_process for body in notes.tried}
        row = Row(f"storm: {setting.told}", cases=len(sent), kills=self.proven[name])
        row.faults = sum(claim.lost is not None for claim, _ in claims)  # leases that ran out, mostly of the stopped
        row.wrong += [f"{name}: {file} was read half" for _, notes in by_process for file in notes.half]
        keeps = bool(setting.options.get("history", True))
        drained = [claim for process, notes in by_process if process.role == "drain" for claim in notes.claims]
        earlier = [claim for process, notes in by_process if process.role != "drain" for claim in notes.claims]
        account = _account(before, name, sent, tried, earlier, keeps=keeps)
        row.count(account, f"{name} before the drain")
        later = _account(after, name, sent, tried, [*earlier, *drained], keeps=keeps)
        row.count(_beyond(account, later), f"{name} after the drain")
        for body, what in broken(claims):
            row.doubled += 1
            row.wrong.append(f"{name}: {body}: {what}")
        return row


def _account(
    found: Found, queue: str, sent: set[str], tried: set[str], claims: Iterable[Claim], *, keeps: bool
) -> Account:
    """Hold what lies in a queue against what was sent to it and acknowledged."""
    claims = list(claims)
    acked = {claim.name for claim in claims if claim.acked}
    begun = {claim.name for claim in claims if claim.by in ("ack", "leave")}
    locations = {body: locations for body, locations in found.locations.items() if locations[0].queue == queue}
    here = Found(locations, [path for path in found.damaged if f"/{queue}/" in path])
    account = judge(here, must=sent if keeps else sent - begun, may=tried)
    for body in sorted(acked & locations.keys()):
        if not keeps or {location.state for location in locations[body]} != {"processed"}:
            account.wrong.append(f"{body} was acknowledged, and lies in {locations[body][0].state}")
    return account


def _beyond(earlier: Account, later: Account) -> Account:
    """Return what a later account says that an earlier one did not."""
    return Account(
        [name for name in later.lost if name not in earlier.lost],
        [name for name in later.doubled if name not in earlier.doubled],
        [line for line in later.wrong if line not in earlier.wrong],
    )


def _settle_down(queue: Queue) -> None:
    """Sweep until nothing is held, and nothing is delayed, any more."""

    def settled() -> bool:
        queue.sweep()
        counts = queue.counts()
        return not counts["processing"] and not counts["delayed"]

    until(settled, f"all that was held in {queue.name} to come back", timeout=60)
