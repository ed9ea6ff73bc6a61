"""Clocks that are wrong: processes an hour apart agree on leases, delays and expiry, and one that is set harms nothing.

The processes are told another time by libfaketime, as hosts are whose clocks were set wrong; files keep the time of the
system, as those of a file server do. Everything is asked for in minutes, or is over in an instant: an hour shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations, repeat
from pathlib import Path
from typing import Any

from helpers import drop, until

from dropq import DropqError, LeaseLost, Message, Queue, Root, Subscription
from dropq.storage import clock
from torture.account import Found, body, judge, look, name_of
from torture.table import NotRun, Options, Row

#: Where Debian, Fedora and Homebrew put the library.
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
    "/usr/local/lib/faketime/libfaketime.so.1",
)
MISSING = "libfaketime: apt install faketime"
#: What leaves alone the clocks that nobody sets, and the times of files: of those that are read, and that are written.
HONEST = {
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "NO_FAKE_STAT": "1",
    "FAKE_UTIME": "1",
    "FAKETIME_NO_CACHE": "1",
}
#: Seconds by which clocks are wrong, and by which one that is asked for the time may be off for other reasons.
HOUR, SLACK = 3600, 600
#: What is not over before a test is, by the right clock; and what soon is.
LONG, BRIEF = "10m", "0.3s"
#: How often each pair of clocks is tried in the long form.
ROUNDS = 5


def library() -> str:
    """Return where libfaketime is; NotRun where it is not."""
    known = [*LIBRARIES, *(line.split()[-1] for line in _known_to_the_linker() if "libfaketime.so" in line)]
    for path in known:
        if os.path.exists(path):
            return path
    raise NotRun(MISSING)


def _known_to_the_linker() -> list[str]:
    try:
        return subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout.splitlines()
    except FileNotFoundError:
        return []


def run(options: Options) -> Iterable[Row]:
    """Return a row for clocks that are wrong, and one for clocks that are set."""
    preload = library()
    Root.create(options.folder / "root")
    rounds = ROUNDS if options.long else 1
    return [_apart(options.folder, preload, rounds), _set(options.folder, preload, rounds)]


# -- a process with a clock of its own ------------------------------------------------------------------------------


class Hand:
    """A process on another clock, which does what it is told.

    Args:
        root: the root that it works on.
        environment: what makes its clock another one.
        interval: seconds after which it measures the file server's clock again; None for the usual ones.
    """

    def __init__(self, root: Path, environment: Mapping[str, str], interval: float | None = None) -> None:
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(root), *([] if interval is None else [str(interval)])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return partial(self._ask, verb)

    def _ask(self, verb: str, *args: object, **options: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, args, options]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"a process on another clock ended at {verb}"
        return json.loads(answer)

    def end(self) -> None:
        """Let the process come to its end: one that is killed leaves what libfaketime keeps in shared memory."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait(10)
            self._process.stdout.close()


class Verbs:
    """What such a process can be told."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._held: dict[str, Message] = {}
        self._subscriptions: dict[tuple[str, str], Subscription] = {}

    def times(self) -> tuple[float, float]:
        """Return the time by the process's own clock, and by the root's, in seconds since 1970."""
        return time.time(), self._root.clock.now_ms() / 1000

    def send(self, queue: str, name: str, **fields: Any) -> str:
        return self._root.queue(queue).send(body(name), **fields).id

    def drop(self, queue: str, name: str) -> None:
        drop(self._root.queue(queue), name, body(name))

    def receive(self, queue: str, lease: str) -> str | None:
        """Take a message; return the name that its body tells."""
        if (queue, lease) not in self._subscriptions:
            opened = self._root.queue(queue).subscribe(lease_period=lease, max_backlog=None)
            self._subscriptions[queue, lease] = opened
        message = self._subscriptions[queue, lease].receive()
        if message is None:
            return None
        name = name_of(message.body) or "half of one"
        self._held[name] = message
        return name

    def extend(self, name: str, lease: str) -> bool:
        """Renew the lease of a message that was taken; tell whether it was still held."""
        return name in self._held and _kept(partial(self._held[name].extend, lease))

    def ack(self, name: str) -> bool:
        """Acknowledge a message that was taken; tell whether it was still held."""
        return name in self._held and _kept(self._held.pop(name).ack)

    def swept(self, queue: str) -> str | None:
        """Sweep, then take a message."""
        self.sweep(queue)
        return self.receive(queue, LONG)

    def sweep(self, queue: str, **ages: str) -> int:
        """Sweep; return how many messages were moved."""
        return self._root.queue(queue).sweep(**ages).total


def _kept(verb: Callable[[], None]) -> bool:
    try:
        verb()
    except LeaseLost:
        return False
    return True


def serve(root: str, interval: str = "") -> None:
    """Do what is told line by line, and answer."""
    if interval:
        clock.CLOCK_INTERVAL = float(interval)
    verbs = Verbs(Root(root))
    for line in sys.stdin:
        verb, args, options = json.loads(line)
        try:
            answer = getattr(verbs, verb)(*args, **options)
        except DropqError as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


# -- what is checked ------------------------------------------------------------------------------------------------


@dataclass
class Checks:
    """What was looked at in a queue, and what was not as it should be."""

    row: Row
    root: Path
    queue: str
    where: str
    #: In which state each message has to be at the end.
    expected: dict[str, str] = field(default_factory=dict)

    def name(self, what: str, state: str) -> str:
        """Return what a message is called, which is to be in a state at the end."""
        name = f"{self.queue}-{what}"
        self.expected[name] = state
        return name

    def that(self, good: object, what: str) -> None:
        """Count a check."""
        self.row.cases += 1
        if not good:
            self.row.wrong.append(f"{self.where}: {what}")

    def soon(self, condition: Callable[[], object], what: str) -> None:
        """Count a check that waits for something."""
        try:
            until(condition, what)
        except AssertionError as error:
            self.row.wrong.append(f"{self.where}: {error}")
        self.row.cases += 1

    def state(self, name: str) -> str | None:
        """Return the state that a message is in."""
        locations = look(self.root).locations.get(name)
        return locations[0].state if locations else None

    def end(self) -> None:
        """See that every message is there once, where it is to be."""
        everywhere = look(self.root)
        here = {name: locations for name, locations in everywhere.locations.items() if locations[0].queue == self.queue}
        found = Found(here, everywhere.damaged)
        self.row.count(judge(found, must=self.expected), self.where)
        for name, state in self.expected.items():
            locations = found.locations.get(name, [])
            self.that(
                {location.state for location in locations} == {state}, f"{name} should lie in {state}, not {locations}"
            )


#: Every age in a queue is one that an hour would exceed.
AGED: dict[str, Any] = {"durability": "none", "expiration": "20m", "history_age": "20m"}


def _queue(root: Path, name: str) -> Queue:
    return Root(root).create_queue(name, **AGED)


def _apart(folder: Path, preload: str, rounds: int) -> Row:
    """Let every two of a right clock, one ahead and one behind agree, in either part."""
    row, root = Row("hosts an hour or two apart"), folder / "root"
    offsets = {"the right time": 0, "an hour ahead": HOUR, "an hour behind": -HOUR}
    with ExitStack() as stack:
        hands = {}
        for clock, offset in offsets.items():
            faked = {**HONEST, "LD_PRELOAD": preload, "FAKETIME": f"{offset:+d}"} if offset else {}
            hands[clock] = stack.enter_context(_hand(root, faked))
            _check_clock(hands[clock], offset, Checks(row, root, "", clock))
        pairs = permutations(hands, 2)
        for number, (one, other) in enumerate(pair for pairs in repeat([*pairs], rounds) for pair in pairs):
            checks = Checks(row, root, f"apart{number}", f"sent and held at {one}, swept and taken at {other}")
            _agree(checks, _queue(root, checks.queue), hands[one], hands[other])
            row.faults += 1
    return row


@contextmanager
def _hand(root: Path, environment: Mapping[str, str], interval: float | None = None) -> Iterator[Hand]:
    hand = Hand(root, environment, interval)
    try:
        yield hand
    finally:
        hand.end()


def _check_clock(hand: Hand, offset: int, checks: Checks) -> None:
    """See that a process has the wrong clock that it is to have, and that dropq tells the right time there."""
    own, roots = hand.times()
    if abs(own - time.time() - offset) > SLACK:
        raise NotRun(f"libfaketime does not change the time here: {own - time.time():.0f} s off, not {offset}")
    checks.that(abs(roots - time.time()) < SLACK, f"the root's clock is {roots - time.time():.0f} s off")


def _agree(checks: Checks, queue: Queue, one: Hand, other: Hand) -> None:
    """Let one send and hold, and another sweep and take."""
    for steps in (_leases, _delays, _expiry, _ages):
        steps(checks, one, other)
    checks.end()


def _leases(checks: Checks, one: Hand, other: Hand) -> None:
    queue = checks.queue
    held = checks.name("held", "processed")
    one.send(queue, held)
    checks.that(one.receive(queue, LONG) == held, "what was sent is not taken")
    checks.that(not other.sweep(queue) and other.receive(queue, LONG) is None, "a lease ended early")
    checks.that(one.ack(held), "a holder lost its claim early")

    lapsed = checks.name("lapsed", "processed")
    one.send(queue, lapsed)
    one.receive(queue, BRIEF)
    checks.soon(lambda: other.swept(queue) == lapsed, "a lease that runs out to end")
    checks.that(not one.ack(lapsed), "a holder whose lease ran out settled its message")
    checks.that(other.ack(lapsed), "the next holder lost its claim early")

    renewed = checks.name("renewed", "processed")
    one.send(queue, renewed)
    one.receive(queue, "5m")
    checks.that(one.extend(renewed, LONG), "a lease is not renewed in time")
    checks.that(not other.sweep(queue) and other.receive(queue, LONG) is None, "a renewed lease ended early")
    checks.that(one.ack(renewed), "a holder that renewed its lease lost its claim")


def _delays(checks: Checks, one: Hand, other: Hand) -> None:
    queue = checks.queue
    later = checks.name("later", "delayed")
    one.send(queue, later, delay=LONG)
    checks.that(not other.sweep(queue) and other.receive(queue, LONG) is None, "a delay ended early")
    soon = checks.name("soon", "processed")
    one.send(queue, soon, delay=BRIEF)
    checks.soon(lambda: other.swept(queue) == soon, "a delay to end")
    checks.that(other.ack(soon), "a claim was lost early")


def _expiry(checks: Checks, one: Hand, other: Hand) -> None:
    queue = checks.queue
    fresh = checks.name("fresh", "processed")
    one.send(queue, fresh, expires_in=LONG)
    checks.that(not other.sweep(queue) and other.receive(queue, LONG) == fresh, "a message expired early")
    checks.that(other.ack(fresh), "a claim was lost early")
    stale = checks.name("stale", "expired")
    one.send(queue, stale, expires_in=BRIEF)
    checks.soon(lambda: other.sweep(queue) is not None and checks.state(stale) == "expired", "a message to expire")


def _ages(checks: Checks, one: Hand, other: Hand) -> None:
    """See that nothing of a few seconds passes for an hour old: a file by its times, a message by its id."""
    queue = checks.queue
    plain, script = checks.name("plain", "processed"), checks.name("script", "processed")
    one.send(queue, plain)
    one.drop(queue, script)
    checks.that(not other.sweep(queue), "something new passed for old")
    taken = {other.receive(queue, LONG), other.receive(queue, LONG)}
    checks.that(taken == {plain, script}, f"{taken} was taken of what waits")
    checks.that(all([other.ack(plain), other.ack(script)]), "a claim was lost early")
    checks.that(not other.sweep(queue, foreign_older_than=LONG), "something new passed for old")


def _set(folder: Path, preload: str, rounds: int) -> Row:
    """Set the clock of a process an hour back, ahead and right again while it sends, holds and sweeps."""
    row, root = Row("set by an hour within a process"), folder / "root"
    control = folder / "clock"
    faked = {**HONEST, "LD_PRELOAD": preload, "FAKETIME_TIMESTAMP_FILE": str(control)}
    intervals = {"the file server's clock measured once": None, "measured all the time": 0.0}
    with _hand(root, {}) as other:
        for number, (clock, interval) in enumerate(pair for _ in range(rounds) for pair in intervals.items()):
            _set_to(control, 0)
            with _hand(root, faked, interval) as one:
                checks = Checks(row, root, f"set{number}", clock)
                _queue(root, checks.queue)
                _check_clock(one, 0, checks)
                _jump(checks, control, one, other)
    return row


def _set_to(control: Path, offset: int) -> None:
    written = control.with_suffix(".new")
    written.write_text(f"{offset:+d}\n")
    os.replace(written, control)


def _jump(checks: Checks, control: Path, one: Hand, other: Hand) -> None:
    queue = checks.queue
    mine, theirs, last = (checks.name(what, "processed") for what in ("mine", "theirs", "last"))
    for hand, name in ((one, mine), (other, theirs)):
        hand.send(queue, name)
        hand.receive(queue, LONG)
    names, ids = [], []
    for number, offset in enumerate((0, -HOUR, HOUR, -HOUR, 0)):
        _set_to(control, offset)
        _check_clock(one, offset, checks)
        checks.that(not one.sweep(queue) and not other.sweep(queue), f"a lease ended as a clock was set to {offset:+d}")
        checks.that(one.extend(mine, LONG), f"a claim was lost as a clock was set to {offset:+d}")
        names += [checks.name(f"{number}-{each}", "processed") for each in range(3)]
        ids += [one.send(queue, name) for name in names[-3:]]
        checks.row.faults += 1
    checks.that(ids == sorted(set(ids)), f"ids that are not in order: {ids}")
    taken = [other.receive(queue, LONG) for _ in names]
    checks.that(taken == names, f"taken in another order: {taken}")
    checks.that(all([one.ack(mine), other.ack(theirs), *map(other.ack, names)]), "a claim was lost early")

    other.send(queue, last)
    other.receive(queue, BRIEF)
    _set_to(control, -HOUR)
    checks.soon(lambda: one.swept(queue) == last, "a lease to end by a clock that was set back")
    checks.that(not other.ack(last) and one.ack(last), "a holder whose lease ran out settled its message")
    checks.end()


if __name__ == "__main__":
    serve(*sys.argv[1:])
