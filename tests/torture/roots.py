"""Three roots share a queue: publishers, scripts, consumers, bridges and sweeps are killed at random; a root is away.

In the end bridges and consumers of each root work off what is left. Each message that was sent was consumed once, in
one root; nothing is on its way, and fsck finds nothing. Then people meet bridges, as root_hands.py has it. At last the
mount of a peer hangs, and keeps nobody else waiting.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forks import fork
from helpers import AT_ONCE, other_file_system, timed, until

from dropq import DropqError, Queue, Root
from dropq.carrier.bridge import Bridge
from dropq.storage import reading
from torture import root_hands
from torture.account import body, name_of
from torture.cases import open_findings
from torture.crowd import Crowd, send_by_hand
from torture.mounts import Mounted, mounted, passthrough
from torture.table import NotRun, Options, Row

#: Seconds of the storm; and for which one of the roots is away, at its middle.
LONG, SHORT = 180.0, 6.0
AWAY = 10.0
ROOTS = ("a", "b", "c")
ROLES = (
    *(f"{role} {root}" for root in ROOTS for role in ("producer", "consumer", "bridge", "bridge", "sweep")),
    *("script a", "script b", "taker b", "taker c"),
)
#: Seconds between two messages of a producer.
PAUSE = 0.004
QUEUE: dict[str, Any] = {"durability": "none", "redelivery_delay": 0, "transfer_after": 0.1}
#: How many rounds a peer hangs, and for how many seconds the doctor looks at most.
HANGS, LONGEST = 60, 20.0
#: The queues: of one any root has what lies there, of the other root a has it first.
KINDS: dict[str, dict[str, Any]] = {
    "Queue": {"replication_type": "Queue"},
    "GroupLocalQueue": {"replication_type": "GroupLocalQueue", "initial_owner": "a"},
}


def run(options: Options) -> Iterable[Row]:
    """Return a row for each kind of queue; one of the roots lies on another file system where there is one."""
    elsewhere = other_file_system(options.folder)
    for number, kind in enumerate(KINDS):
        folder = options.folder / kind
        folder.mkdir()
        if elsewhere is None:
            yield storm(kind, folder, folder / "b", options.seed + number, LONG if options.long else SHORT)
            continue
        with tempfile.TemporaryDirectory(dir=elsewhere) as far:
            yield storm(kind, folder, Path(far) / "b", options.seed + number, LONG if options.long else SHORT)
    yield from root_hands.rows(options)
    if options.long:
        yield hung(options.folder / "hung", HANGS, longest=LONGEST)


def storm(kind: str, folder: Path, far: Path, seed: int, seconds: float) -> Row:
    """Rage twice, with a root away in between; work off what is left, and hold it against what was sent."""
    row = Row(f"storm of three roots: {kind}")
    crowd = Crowd(folder, seed, ROLES, play)
    paths = {"a": folder / "a", "b": far, "c": folder / "c"}
    for name, path in paths.items():
        root_hands.make(name, path, paths, {**QUEUE, **KINDS[kind]})
        (folder / f"of-{name}").symlink_to(path)
    crowd.rage(seconds / 2)
    away = paths["c"].with_name("away")
    paths["c"].rename(away)
    crowd.rage(min(AWAY, seconds / 2))
    away.rename(paths["c"])
    crowd.rage(seconds / 2)
    row.kills = crowd.kills
    row.wrong += [line for line in crowd.wrong if not line.startswith("script")]  # which end when their root is away
    queues = {name: timed(Root(path), AT_ONCE).queue("q") for name, path in paths.items()}
    _work_off(queues)
    _judge(row, crowd, queues)
    return row


def hung(folder: Path, rounds: int, *, longest: float = math.inf) -> Row:
    """Stop the FUSE file system that a peer lies on, let all else go on for some rounds, and let it answer again.

    A round sends here and at another peer, whose message a bridge brings; it receives, sweeps, counts, asks `health`.
    """
    row = Row("a peer whose mount hangs")
    folder.mkdir()
    try:
        with mounted(passthrough("links", "local-locks", "modes", "replaces"), folder / "mount") as peer:
            paths = {"a": peer.path / "a", "b": folder / "b", "c": folder / "c"}
            for name, path in paths.items():
                root_hands.make(name, path, paths, {**QUEUE, **KINDS["Queue"]})
            row.wrong += _hung(paths, peer, rounds, row, longest)
    except NotRun as reason:
        row.not_run = str(reason)
    return row


def _hung(paths: dict[str, Path], peer: Mounted, rounds: int, row: Row, longest: float) -> Iterator[str]:
    a, b, c = (Root(path).queue("q") for path in paths.values())
    command = [sys.executable, "-m", "dropq", "--root", str(paths["b"]), "bridge"]
    with b.subscribe(max_backlog=None) as subscription, subprocess.Popen(command) as bridge:

        def come(*sent: str) -> None:
            found = Counter[str]()
            while found != Counter(sent):
                message = subscription.receive(None)
                assert message is not None
                found[str(name_of(message.body))] += 1
                message.ack()
                row.cases += 1

        try:
            for queue, name in ((a, "a"), (c, "c")):
                queue.send(body(name))
            come("a", "c")
            a.send(body("later"))
            peer.stop()
            for number in range(rounds):
                b.send(body(f"b{number}"))
                c.send(body(f"c{number}"))
                come(f"b{number}", f"c{number}")
                b.sweep()
                b.counts()
                b.health()
            began = time.monotonic()
            until(lambda: _peers(b) == {"peer", "peer-away"}, "the doctor to tell which peer hangs", timeout=120)
            if (took := time.monotonic() - began) > longest:
                yield f"the doctor looks for {took:.0f} s"
            peer.go_on()
            come("later")
        finally:
            peer.go_on()
            bridge.terminate()


def _peers(queue: Queue) -> set[str]:
    """Return what the doctor says of the peers; one that answers late, on a busy machine, it calls away, too."""
    return {each.kind for each in queue.root.doctor() if each.kind.startswith("peer")}


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed; a part whose root is away waits for it."""
    part, where = role.split()
    chance, path = random.Random(seed), (folder / f"of-{where}").resolve()
    log = folder / "notes" / f"{name}.log"
    if part == "script":
        send_by_hand(str(path / "q"), name, folder, log)
    while True:
        try:
            _act(part, path, name, log, chance)
        except (DropqError, OSError):
            until(path.joinpath("q", "target").exists, "the root")


def _act(part: str, path: Path, name: str, log: Path, chance: random.Random) -> None:
    root = Root(path)
    queue = root.queue("q")
    if part == "bridge":
        peer = chance.choice(root.context.config.peer)
        Bridge(root.context, peer, None).run(lambda seconds: until_killed(seconds, chance))
    while part == "sweep":
        queue.sweep()
        until_killed(0.05, chance)
    while part == "taker":
        _take(path / "q")
        until_killed(0.2, chance)
    serial = 0
    with open(log, "a", buffering=1) as notes:
        while part == "producer":
            serial += 1
            message = f"{name}-{os.getpid()}-{serial}"
            print(f"try {message}", file=notes)
            queue.send(body(message, chance.choice((0, 300, 20_000))), message_id=message)
            print(f"sent {message}", file=notes)
            until_killed(PAUSE, chance)
    with queue.subscribe(max_backlog=chance.choice((1, 10, None))) as subscription:
        while True:
            message_or_none = subscription.receive(None)
            if message_or_none is None:
                return
            if chance.random() < 0.05:
                message_or_none.nack()
            else:
                message_or_none.ack()


def _take(queue: Path) -> None:
    """Take a message by `mv`, as a script does that consumes, under a name that no other has."""
    for entry in os.scandir(queue / "target"):
        if entry.name[0] != "." and entry.stat(follow_symlinks=False).st_size:
            os.rename(entry.path, queue / "processed" / f"taken-{os.urandom(8).hex()}")
            return


def until_killed(seconds: float, chance: random.Random) -> bool:
    """Wait for so long, or less; return that it is not over."""
    time.sleep(seconds * chance.random())
    return False


def _work_off(queues: dict[str, Queue]) -> None:
    """Let consumers and bridges of each root work until nothing is left."""
    consumers, bridges = (
        [
            fork(lambda queue=queue, part=part: _finish(part, queue), longest=0)  # type: ignore[misc]
            for queue in queues.values()
        ]
        for part in ("consumer", "bridge")
    )

    def is_empty() -> bool:
        for queue in queues.values():
            queue.sweep()
        return not any(
            sum(queue.counts()[state] for state in ("target", "delayed", "processing")) + len(queue.in_transit())
            for queue in queues.values()
        )

    def is_done() -> bool:
        if not is_empty():
            return False
        # RACE: a bridge may have taken messages meanwhile to a root that was counted before. So count without bridges.
        for bridge in bridges:
            os.kill(bridge, signal.SIGSTOP)
            os.waitpid(bridge, os.WUNTRACED)
        try:
            return is_empty()
        finally:
            for bridge in bridges:
                os.kill(bridge, signal.SIGCONT)

    try:
        until(is_done, "all that was sent to be consumed", timeout=1800)
    finally:
        for child in (*consumers, *bridges):
            os.kill(child, 9)
            os.waitpid(child, 0)
    for queue in queues.values():
        queue.sweep()


def _finish(part: str, queue: Queue) -> None:
    root, chance = Root(queue.root.path), random.Random(1)
    if part == "consumer":
        with root.queue("q").subscribe(max_backlog=None) as subscription:
            while True:
                for message in subscription.receive_many(100, timeout=None):
                    message.ack()
    bridges = [Bridge(root.context, peer, None) for peer in root.context.config.peer]
    while True:
        for bridge in bridges:
            bridge.once()
        until_killed(0.05, chance)


def _judge(row: Row, crowd: Crowd, queues: dict[str, Queue]) -> None:
    """Hold what was consumed against what was sent."""
    found = Counter[str]()
    half_reserved = set[str]()  # by who was killed before NFS 3 set the mode of the file that reserves a name
    for name, queue in queues.items():
        for message in queue.browse("processed"):
            is_nfs = reading.on_nfs(queue.layout.processed)
            if is_nfs and not message.body and not os.stat(message.path).st_mode & 0o777:
                half_reserved.add(message.path)
                continue
            if (said := name_of(message.body)) is None:
                row.wrong.append(f"the body of {message.id} in {name} is not whole")
            found[str(said)] += 1
        for state in ("error", "expired"):
            row.wrong += [f"{message.id} lies in {state}/ of {name}" for message in queue.browse(state)]
        own = (finding for finding in open_findings(queue.root) if finding.partition(" ")[2] not in half_reserved)
        row.wrong += [f"{name}: {finding}" for finding in own]
    sent, tried = crowd.noted("sent"), crowd.noted("try")
    row.cases = sum(found.values())
    row.lost = len([message for message in sent if not found[message]])
    row.doubled = len([message for message, count in found.items() if count > 1])
    row.wrong += [f"{message} was never sent" for message in found if message not in tried]
    if not sent:
        row.wrong.append("nothing was sent")
