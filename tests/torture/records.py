"""Records: crashes, faults and others at work at every call; a record that kills; and a storm of kills at random.

In the storm, two programs send bundles, half of them as files that all have one name, and four work by records on
leases, with many checkpoints. Another takes whole messages, sweeps run, and a script moves claims back to target/.
Nobody returns a record, so in the end each record was archived once, or is in error/ once; where a bundle is archived
as it is, both. Then `requeue --whole` puts those in error/ together: each with those of its own bundle.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from forks import forked
from helpers import AT_ONCE, FOLDERS, files, reopened, timed, until

from dropq import LeaseLost, NoSuchMessage, Queue, Root
from torture.acts import Setting, of_each
from torture.crowd import Crowd
from torture.record_cases import CASES, OTHERS, SETTINGS, TAKERS, RecordCases
from torture.table import Options, Row

#: Seconds of the storm; records of a bundle; messages that may wait before senders pause.
LONG, SHORT, MANY, WAITING = 150.0, 4.0, 50, 30
#: Records of the bundle in which one kills its workers, and how often it is cut in two until that one is alone.
BUNDLE, CUTS = 1000, 10
#: Seconds of a lease; what a script is that moves claims back.
LEASE = 1.0
SCRIPT = r"""
cd "$1/processing" && while :; do
    for file in *~*; do [ -e "$file" ] && mv -n "$file" "../target/${file#*~}" 2>/dev/null; sleep 0.3; done
done
"""
ROLES = (*("work",) * 4, *("send",) * 2, "whole", "sweep", "script")

_RECORD = re.compile(rb"(\S+:\d+)(?: bad)?\n?")


def run(options: Options) -> Iterator[Row]:
    """Yield rows for the crashes, the faults and the others of each setting, for records that kill, for the storm."""
    if options.long:
        yield from of_each(SETTINGS, options, _all_cases)
        yield killers(options.folder)
    folder = options.folder / "storm"
    folder.mkdir()
    yield storm(folder, options.seed, LONG if options.long else SHORT)


def _all_cases(options: Options, setting: Setting) -> list[Row]:
    """Die at every call, and in pairs at some; refuse some calls, and let others work before some."""
    chance = random.Random(options.seed)
    crashes, pairs, faults, others = (Row(f"{what}: {setting.name}") for what in (
        "crash at every call", "crash of the sweep after a crash", "faults at calls", "others between two calls",
    ))  # fmt: skip
    for case in options.shared(CASES):
        RecordCases(options.folder, setting, crashes).crash(case, options.some(chance))
        RecordCases(options.folder, setting, pairs).crash_twice(case, options.some(chance, 8))
        RecordCases(options.folder, setting, faults).refuse(case, options.some(chance, 20))
        for other in (*OTHERS, *TAKERS):
            cases = RecordCases(options.folder, setting, others)
            cases.meet(case, other, options.some(chance, 10))
    return [crashes, pairs, faults, others]


# -- a record that kills -------------------------------------------------------------------------------------------


def killers(folder: Path) -> Row:
    """Let a record kill every worker, at each place of a bundle."""
    row = Row(f"one record kills every worker: at each place of a bundle of {BUNDLE:,}")
    for number in range(1, BUNDLE + 1):
        root = folder / "killer"
        deaths, wrong = ends_alone(root, number)
        row.cases += 1
        row.kills += deaths
        row.wrong += [f"at {number}: {line}" for line in wrong]
        shutil.rmtree(root)
    return row


def ends_alone(folder: Path, at: int) -> tuple[int, list[str]]:
    """Let the record of a place kill every worker; return how many it killed, and what is wrong then."""
    root = timed(Root.create(folder), AT_ONCE)
    queue = root.create_queue("q", redelivery_delay=0, max_deliveries=3, durability="none")
    queue.send("".join(f"{number}\n" for number in range(1, BUNDLE + 1)), type="text")
    queue.send("other", type="text")
    deaths = 0
    while queue.counts()["target"]:
        deaths += _is_killed(queue, b"%d" % at)
        queue.sweep()
    wrong = [f"{deaths} workers were killed"] if deaths > CUTS + 3 else []  # the last three by the record alone
    dead = [(message.body, message.first_record) for message in queue.browse("error")]
    wrong += [f"error/ has {dead}"] if dead != [(b"%d\n" % at, at)] else []
    archived = Counter(line for message in queue.browse("processed") for line in message.body.split(b"\n") if line)
    others = {b"%d" % number for number in range(1, BUNDLE + 1) if number != at} | {b"other"}
    wrong += [f"processed/ lacks {line!r}" for line in others - archived.keys()]
    return deaths, wrong + [f"processed/ has {line!r}" for line in archived - Counter(others)]


def _is_killed(queue: Queue, killer: bytes) -> bool:
    """Acknowledge records in a process of its own; return whether the killer killed it."""

    def acknowledge() -> None:
        with reopened(queue).subscribe() as subscription:
            for record in subscription.records(timeout=0):
                if record.data == killer:
                    os.kill(os.getpid(), signal.SIGKILL)
                record.ack()

    return forked(acknowledge) == -signal.SIGKILL


# -- the storm -----------------------------------------------------------------------------------------------------


class Storm(Crowd):
    """A root with its queue, and all that work there."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed, ROLES, play)
        self.root.create_queue("q", durability="none", redelivery_delay=0, lease_period=LEASE)


def storm(folder: Path, seed: int, seconds: float) -> Row:
    """Rage, let sweeps bring all in order, work on what waits, and hold it against what was sent."""
    whole = Storm(folder, seed)
    whole.rage(seconds)
    queue = Root(folder / "root").queue("q")

    def settled() -> bool:
        queue.sweep()
        _work(queue)
        return not any(queue.counts()[state] for state in ("target", "processing", "delayed"))

    until(settled, "all that was sent to be settled")
    row = Row("storm", kills=whole.kills)
    row.wrong += whole.wrong
    judge(row, whole)
    judge_wholes(row, queue)
    return row


def judge(row: Row, whole: Storm) -> None:
    """Hold what lies in the queue against what was sent."""
    queue = Root(whole.folder / "root").queue("q")
    lies: dict[str, Counter[str]] = {"processed": Counter(), "error": Counter()}
    for state, below in FOLDERS.items():
        for name, content in files(Path(queue.layout.base, below)).items():
            if state in lies:
                lies[state].update(record.decode() for record in _RECORD.findall(content))
            elif state != "working":  # where who was killed left a draft
                row.wrong.append(f"{state} has {name}")
    sent = {record for bundle in whole.noted("sent") for record in _records(bundle)}
    tried = {record for bundle in whole.noted("try") for record in _records(bundle)}
    found = lies["processed"].keys() | lies["error"].keys()
    row.cases = len(found)
    for record in sorted(sent - found):
        row.lost += 1
        row.wrong.append(f"{record} was sent, and is nowhere")
    row.wrong += [f"{record} was never sent" for record in sorted(found - tried)]
    for state, counts in lies.items():
        for record in sorted(record for record, count in counts.items() if count > 1):
            row.doubled += 1
            row.wrong.append(f"{record} is in {state} {counts[record]} times")
    staged = Path(queue.layout.staged)
    for folder in staged.iterdir() if staged.exists() else ():
        if left := [name for name in os.listdir(folder) if not (name == "whole" and (folder / name).is_dir())]:
            row.wrong.append(f"{folder.name} has {left}")


def judge_wholes(row: Row, queue: Queue) -> None:
    """Put together what lies in error/: no message may have records of two bundles, and each record is still there."""
    before = _lying(queue, "error")
    row.wrong += [f"requeue --whole: {outcome.detail}" for outcome in queue.requeue(whole=True) if not outcome.ok]
    for message in queue.browse("target"):
        bundles = {record.rpartition(b":")[0] for record in _RECORD.findall(message.body)}
        if len(bundles) > 1:
            row.wrong.append(f"{message.file} has records of {sorted(bundles)}")
    if _lying(queue, "target", "error") != before:
        row.wrong.append(f"{before.total()} records were put together as {_lying(queue, 'target').total()}")


def _lying(queue: Queue, *states: str) -> Counter[bytes]:
    """Return the records of the messages in some states."""
    bodies = [message.body for state in states for message in queue.browse(state)]
    return Counter(record for body in bodies for record in _RECORD.findall(body))


def _records(bundle: str) -> list[str]:
    return [f"{bundle}:{number}" for number in range(MANY)]


# -- who takes part ------------------------------------------------------------------------------------------------


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed."""
    chance = random.Random(seed)
    queue = Root(folder / "root").queue("q")
    if role == "script":
        os.execvp("sh", ["sh", "-c", SCRIPT, "sh", queue.layout.base])
    if role == "send":
        _send(queue, name, folder / "notes" / f"{name}.log", chance)
    while True:
        with suppress(LeaseLost, NoSuchMessage):
            if role == "sweep":
                queue.sweep()
            elif role == "whole":
                _take_whole(queue)
            else:
                _work(queue, chance)
        time.sleep(chance.uniform(0, 0.1))


def _send(queue: Queue, name: str, log: Path, chance: random.Random) -> None:
    number = 0
    with log.open("a", buffering=1) as notes:
        while True:
            bundle = f"{name}-{number}"
            number += 1
            notes.write(f"try {bundle}\n")
            lines = [f"{record}{' bad' if chance.random() < 0.05 else ''}\n" for record in _records(bundle)]
            if chance.random() < 0.5:
                queue.send("".join(lines), type="text")
            else:
                _drop(queue, name, "".join(lines).removesuffix("\n"))
            notes.write(f"sent {bundle}\n")
            while queue.counts()["target"] > WAITING:
                time.sleep(0.02)


def _drop(queue: Queue, name: str, body: str) -> None:
    """Send a file as a script does, under the name of the one before it, once nothing waits there under that name."""
    draft = Path(queue.layout.working, f"{name}.text")
    draft.write_text(body)
    os.utime(draft, (time.time() - 1,) * 2)  # so that it has settled
    while True:
        try:
            return queue.context.storage.move(str(draft), f"{queue.layout.target}/{name}.text")
        except FileExistsError:
            time.sleep(0.02)


def _work(queue: Queue, chance: random.Random | None = None) -> None:
    """Take what waits by records: reject what is bad, and acknowledge the rest."""
    with queue.subscribe(max_backlog=1) as subscription:
        for record in subscription.records(timeout=0, checkpoint="20ms"):
            if chance is not None and chance.random() < 0.1:
                time.sleep(0.01)
            if record.text.endswith("bad"):
                record.reject("bad")
            else:
                record.ack()


def _take_whole(queue: Queue) -> None:
    with queue.subscribe() as subscription:
        if (message := subscription.receive(timeout=0)) is not None:
            message.ack()
