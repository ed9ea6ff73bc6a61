"""Two hosts, each with a disk, a root and a kernel of its own, share a queue by NFS, and lose their power in turn.

The hosts are guests of user-mode-linux at one cable. Each serves its disk, mounts the other's, and runs a producer,
consumers that wait and a bridge, at durability `full`. While messages go both ways, one of them is cut off. The other's
mount hangs, and it goes on by itself until the first has started again. In the end all that was sent lies in the
archive of one of both roots, once, and where it was acknowledged.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from forks import ended, fork
from helpers import until

from dropq import Queue, Root
from dropq.carrier.bridge import Bridge
from torture.account import body, found_in, in_short, look, name_of, plainly
from torture.cases import open_findings
from torture.guest import MOUNTS, mount, never_write_back, plug_in, say, serve
from torture.table import NotRun, Row
from torture.uml import Guest, kernel, make_disk

#: The hosts, which are called as their roots, and the number of each at the cable.
HOSTS = {"a": 1, "b": 2}
#: Their journals commit when somebody syncs, or not before an hour has passed.
MOUNT = "noatime,noauto_da_alloc,commit=3600"
#: How many messages each host acknowledges of those that the other sends, before a cut: at most.
CROSSED = 30
#: While one host is off, for so many seconds at least, the other acknowledges so many messages that it sends meanwhile.
AWAY, ALONE = 5.0, 30
#: Seconds in which each thing that is waited for has to happen, whatever else the machine has to do.
PATIENCE = 900.0
#: A producer sends so many messages at once at most, and rests when they are worked off, as long as that took or so: so
#: each host has at times too much to do, and at times nothing. A consumer works on each for so many seconds at most.
MANY, WORK = 100, 0.1
#: How many messages each consumer of a host may hold, and how often it gives one back.
BACKLOGS, NACKED = (1, None), 0.05
#: Seconds between two rounds of upkeep; and between two looks at what the guests said.
ROUND, LOOK = 0.5, 0.1
#: Seconds in which a bridge copies what it was given, and removes it at the peer.
CARRYING = 0.6
#: The files of the host's by which the guests are told to send no more, and to end; and the guest's own, when it has.
STOP, END, OVER = "stop", "end", Path("/run/over")


def row(folder: Path, version: str, seed: int, *, cuts: int) -> Row:
    """Let both hosts work, cut the power of each so many times, and hold their disks against what they said."""
    found = Row(f"two hosts, each with a root, lose their power: {version}")
    folder.mkdir()
    try:
        if not shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
            raise NotRun("there is no ip, which gives guests their addresses: apt install iproute2")
        _fill(found, folder, version, cuts, random.Random(seed))
    except NotRun as reason:
        found.not_run = str(reason)
    return found


def _fill(found: Row, folder: Path, version: str, cuts: int, chance: random.Random) -> None:
    with ExitStack() as stack:
        cable = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        hosts = [Host(*each, folder, version) for each in zip(HOSTS, map(stack.enter_context, cable), strict=True)]
        for host in hosts:
            stack.callback(host.cut)
        try:
            _work(hosts, folder, cuts, chance, found)
        except (AssertionError, RuntimeError) as error:  # the disks tell what became of the messages all the same
            found.wrong.append(str(error))
        seen = {host.name: host.inspected() for host in hosts}
        reckon(found, {host.name: host.said() for host in hosts}, seen)


class Host:
    """A guest that starts again and again on its disk; while it is off, its end of the cable stays where it is."""

    def __init__(self, name: str, wire: socket.socket, folder: Path, version: str) -> None:
        self.name = name
        self._disk = make_disk(folder / f"disk-{name}")
        self._folder = folder
        self._wire = wire
        self._version = version
        self._runs: list[Guest] = []

    def start(self) -> None:
        """Switch it on."""
        run = len(self._runs) + 1
        task: dict[str, Any] = {"name": self.name, "run": run, "version": self._version, "tree": str(kernel())}
        folder, task = self._folder / f"{self.name}-{run}", {**task, "told_by": str(self._folder)}
        guest = Guest(folder, [self._disk], f"{__name__}:work", mounts=[MOUNT], wire=self._wire, **task)
        self._runs.append(guest)

    def up(self) -> None:
        """Wait until it has booted."""
        self._runs[-1].up()

    def cut(self) -> None:
        """Cut its power."""
        for guest in self._runs[-1:]:
            guest.cut()

    def inspected(self) -> dict[str, Any]:
        """Cut its power, start it once more by itself, and return what lies on its disk."""
        self.cut()
        with Guest(self._folder / f"{self.name}-last", [self._disk], f"{__name__}:inspect", name=self.name) as guest:
            seen: dict[str, Any] = guest.result()
        self._disk.unlink()
        return seen

    def said(self) -> list[str]:
        """Return what it has said whenever it ran."""
        return [line for guest in self._runs for line in guest.said()]

    def has_come_to(self, line: str) -> bool:
        """Return whether a line is the last of its verb that it has said."""
        return _lines(line.partition(" ")[0], self.said())[-1:] == [line]

    def has_taken(self, since: int) -> bool:
        """Return whether its bridge has been given messages of the other, after so many of its lines."""
        return any("taken from peer" in line for line in _lines("logged", self.said()[since:]))

    def found(self) -> int:
        """Return how many messages were on their way from it when it started last."""
        return int(_names("found", self.said())[-1])

    def check(self) -> None:
        """Make sure that it works, as its power is on.

        Raises:
            NotRun: its kernel has no network.
            RuntimeError: it failed.
        """
        said = self._runs[-1].said()
        if "no network" in said:
            raise NotRun("this user-mode-linux has no vector device, so there is no network for guests")
        wrong = _lines("failed", said)
        if wrong or not self._runs[-1].runs:
            raise RuntimeError(f"host {self.name}: {'; '.join(wrong) or 'it ended by itself'}")


def _work(hosts: Sequence[Host], folder: Path, cuts: int, chance: random.Random, found: Row) -> None:
    """Let the hosts work, cut the power of each in turn, and see that all is worked off."""
    for host in hosts:
        host.start()
    for host in hosts:
        host.up()
    met = 0
    for number in range(cuts * len(hosts)):
        cut, other = hosts[number % 2], hosts[1 - number % 2]
        _take_from_each_other(hosts, chance.randint(1, CROSSED))
        taker = (other, cut)[number // 2 % 2]
        since = len(taker.said())
        _until(hosts, partial(taker.has_taken, since), f"the bridge of {taker.name} to take something")
        time.sleep(CARRYING * chance.random())  # the moment is left to chance: some are given, copied, or removed
        cut.cut()
        found.kills += 1
        on_the_way = _go_on_alone(other)
        cut.start()
        cut.up()
        _take_from_each_other(hosts, 1)
        met += on_the_way + cut.found() > 0
    found.test += f" ({met} of {found.kills} in a transfer)"
    for sign, last in ((STOP, "left 0"), (END, "over")):
        (folder / sign).touch()
        for host in hosts:
            _until(hosts, partial(host.has_come_to, last), f"host {host.name} to say '{last}'")


def _until(hosts: Sequence[Host], condition: Callable[[], object], what: str) -> None:
    """Wait until something is so, while some hosts work."""

    def is_so() -> object:
        time.sleep(LOOK)
        for host in hosts:
            host.check()
        return condition()

    until(is_so, what, timeout=PATIENCE)


def _take_from_each_other(hosts: Sequence[Host], count: int) -> None:
    """Wait until each host has acknowledged so many messages of those that the other sends from now on."""
    since = {host: len(host.said()) for host in hosts}

    def crossed(taker: Host, giver: Host) -> int:
        sent = set(_names("try", giver.said()[since[giver] :]))
        return len(sent.intersection(_names("acked", taker.said()[since[taker] :])))

    one, other = hosts
    _until(
        hosts,
        lambda: min(crossed(one, other), crossed(other, one)) >= count,
        f"{count} messages of each host to be acknowledged on the other",
    )


def _go_on_alone(host: Host) -> int:
    """Wait until a host has worked and looked after its root by itself, and has said that its peer is away.

    Returns:
        How many messages are on their way from it.
    """
    since, begun = len(host.said()), time.monotonic()

    def has_gone_on() -> bool:
        said = host.said()[since:]
        settled = set(_names("sent", said)).intersection(_names("acked", said))
        is_kept = len(_lines("kept", said)) > 1  # the first may have been under way
        return len(settled) >= ALONE and is_kept and "away" in said and time.monotonic() > begun + AWAY

    _until([host], has_gone_on, f"host {host.name} to go on while the other is off")
    return int(_names("kept", host.said())[-1])


def _lines(verb: str, said: Sequence[str]) -> list[str]:
    return [line for line in said if line.partition(" ")[0] == verb]


def _names(verb: str, said: Sequence[str]) -> list[str]:
    return [line.partition(" ")[2] for line in _lines(verb, said)]


# -- inside: until the power is cut --------------------------------------------------------------------------------


def work(disk: Path, name: str, run: int, version: str, tree: str, told_by: str) -> None:
    """Be a host: send, take from the peer, acknowledge, look after the root; say each, until the power is cut."""
    never_write_back()
    socket.sethostname(name)
    try:
        plug_in(HOSTS[name])
    except FileNotFoundError:
        say("no network")
        raise
    (other,) = HOSTS.keys() - {name}
    if run == 1:
        _make(disk, name, other)
    serve(Path(tree), kept=disk / "nfs")
    mount(version, "peer", options="retry=10", server=HOSTS[other])
    told, root = Path(told_by), disk / name
    queue = Root(root).queue("q")
    say(f"found {_on_the_way(queue)}")
    parts = [partial(_produce, f"{name}{run}", told), partial(_bridge, told), partial(_ask_the_doctor, told)]
    parts += [partial(_consume, most) for most in BACKLOGS]
    producer, bridge, *others = (fork(partial(_say_failure, part, root), longest=0) for part in parts)
    while not (told / END).exists():
        queue.sweep()
        queue.health()
        say(f"kept {_on_the_way(queue)}")
        if (told / STOP).exists():
            if producer:
                ended(producer)
                producer = 0
            say(f"left {_left(queue)}")
        time.sleep(ROUND)
    ended(bridge)
    until(lambda: not _left(queue), "what the bridge has brought to be acknowledged", timeout=PATIENCE)
    OVER.touch()
    for child in others:
        ended(child)
    say("over")
    while True:
        signal.pause()


def _make(disk: Path, name: str, other: str) -> None:
    (disk / "nfs").mkdir()
    root = Root.create(disk / name)
    peer = f'[[peer]]\nname = "{other}"\nroot = "{MOUNTS}/peer/{other}"\n'
    (root.path / "dropq.toml").write_text(f'format = 1\ninstance = "{name}"\n{peer}')
    Root(root.path).create_queue("q", durability="full", replication_type="Queue", transfer_after=0, redelivery_delay=0)
    os.sync()  # the last one


def _say_failure(part: Callable[[Root], None], root: Path) -> None:
    try:
        part(Root(root))
    except BaseException as error:
        say(f"failed {error!r}")
        raise


def _produce(prefix: str, told: Path, root: Root) -> None:
    """Send some messages, let them be worked off, and rest; until it is told to stop."""
    chance, queue = random.Random(prefix), root.queue("q")
    names = (f"{prefix}-{number}" for number in itertools.count())

    def stay_while(condition: Callable[[], object]) -> None:
        while condition() and not (told / STOP).exists():
            time.sleep(LOOK)

    while not (told / STOP).exists():
        begun = time.monotonic()
        for name in itertools.islice(names, chance.randint(1, MANY)):
            say(f"try {name}")
            queue.send(body(name, chance.randrange(20_000)))
            say(f"sent {name}")
        stay_while(lambda: queue.counts()["target"])
        end = time.monotonic() + 2 * chance.random() * (time.monotonic() - begun)
        stay_while(lambda end=end: time.monotonic() < end)  # type: ignore[misc]


def _consume(most: int | None, root: Root) -> None:
    """Acknowledge what comes, after some work, until all is over; give some back."""
    chance = random.Random(str(most))
    with root.queue("q").subscribe(max_backlog=most) as subscription:
        while (message := subscription.receive(1.0)) is not None or not OVER.exists():
            if message is None:
                continue
            time.sleep(WORK * chance.random())
            if chance.random() < NACKED:
                message.nack()
            else:
                message.ack()
                say(f"acked {name_of(message.body)}")


def _bridge(told: Path, root: Root) -> None:
    """Take from the peer until it is told to end, and say what its log has."""
    logger = logging.getLogger("dropq")
    logger.setLevel(logging.INFO)
    logger.addHandler(Saying())

    def is_over(seconds: float) -> bool:
        time.sleep(seconds)
        return (told / END).exists()

    Bridge(root.context, root.context.config.peer[0], None).run(is_over)


class Saying(logging.Handler):
    """Says what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"logged {record.getMessage()}")


def _ask_the_doctor(told: Path, root: Root) -> None:
    """Say when the doctor finds that the peer is away, until it is told to end."""
    while not (told / END).exists():
        if "peer-away" in {found.kind for found in root.doctor()}:
            say("away")
        time.sleep(ROUND)


def _left(queue: Queue) -> int:
    counts = queue.counts()
    return sum(counts[state] for state in ("target", "delayed", "processing")) + _on_the_way(queue)


def _on_the_way(queue: Queue) -> int:
    return sum(queue.in_transit().values())


# -- inside: after the last cut ------------------------------------------------------------------------------------


def inspect(disk: Path, name: str) -> dict[str, Any]:
    """Sweep; tell where all lies, what is on its way, and what fsck finds."""
    root = Root(disk / name)
    root.sweep()
    rows = sorted((root.path / "q/.dropq/transfers").glob("*/target/*"))
    return {"found": plainly(look(disk / name)), "on_the_way": [*map(str, rows)], "findings": [*open_findings(root)]}


# -- outside again -------------------------------------------------------------------------------------------------


def reckon(row: Row, said: Mapping[str, Sequence[str]], seen: Mapping[str, dict[str, Any]]) -> None:
    """Hold what lies on both disks against what was said, and fill in a row.

    Args:
        row: the row.
        said: the lines of each host: among others `try`, `sent` or `acked` and a name.
        seen: what `inspect` returned of each, as it comes out of JSON.
    """
    lies: dict[str, list[str]] = defaultdict(list)
    for host, at in seen.items():
        found = found_in(at["found"])
        for name, locations in found.locations.items():
            lies[name] += [f"{host}/{in_short(location)}" for location in locations]
        row.wrong += [f"{host}: {path} is not whole" for path in found.damaged]
        row.wrong += [f"{host}: {path} stays on its way" for path in at["on_the_way"]]
        row.wrong += [f"{host}: {finding}" for finding in at["findings"]]
    lines = [line for host in said.values() for line in host]
    tried, sent = set(_names("try", lines)), set(_names("sent", lines))
    row.cases += len(sent)
    for name in sorted(tried | lies.keys()):
        where = lies[name]
        if name not in tried:
            row.wrong.append(f"{name} was never sent, and lies in {where}")
        elif len(where) > 1:
            row.doubled += 1
            row.wrong.append(f"{name} lies in {where}")
        elif name in sent and not where:
            row.lost += 1
            row.wrong.append(f"{name} had been sent, and is lost")
        elif where and not where[0].endswith("/processed"):
            row.wrong.append(f"{name} stays in {where}")
    for host, its in said.items():
        for name in sorted(set(_names("acked", its))):
            if f"{host}/processed" not in lies[name]:
                row.wrong.append(f"{name} had been acknowledged on {host}, and lies in {lies[name]}")
    acked = Counter(_names("acked", lines))
    row.wrong += [f"{name} was acknowledged {count} times" for name, count in acked.items() if count > 1]
    row.wrong += _lines("failed", lines)
    if not sent:
        row.wrong.append("nothing was sent")
