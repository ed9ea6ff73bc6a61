"""What goes out with an ack: crashes, faults and others at work at every call; then a chain in a storm of kills.

The chain has four queues and three stages: a shell command by `dropq work --to`, a handler of `dropq.work` that yields
what it makes, and an asyncio program. The first two fail one message in twenty, after they have made something of it.
All workers and a sweep are killed at random. In the end each message that went in came out once, byte for byte.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers import AT_ONCE, FOLDERS, files, timed, until

from dropq import Message, Out, Queue, Root, StorageError, aio, work
from dropq.cli.main import main
from torture.account import body
from torture.acts import Setting, of_each
from torture.crowd import Crowd
from torture.disks import Disk, fill, mounted
from torture.output_cases import CASES, SETTINGS, WORKS, OutputCases
from torture.table import NotRun, Options, Row

#: Seconds of the storm, and how many messages go through the chain.
LONG, SHORT = 120.0, 4.0
MANY, FEW = 10_000, 200
#: How many go through a chain whose disk is full.
STALLED = 5
#: The queues, and who takes part: each stage takes from a queue and sends to the next.
CHAIN = ("a", "b", "c", "d")
STAGES = ("shell", "python", "asyncio")
ROLES = (*STAGES * 2, "sweep")
#: Seconds between two kills, on average: a worker gets to work before it is killed.
EVERY = 0.3
#: How often a stage fails, and the command of the shell's: it reads its fate from the kernel, after it has written.
FAILURES = 1 / 20
COMMAND = r"""
cat && echo shell && [ $(($(od -An -N2 -tu2 /dev/urandom) % 20)) != 0 ]
"""
#: Options of the queues.
QUEUES: dict[str, Any] = {"durability": "none", "redelivery_delay": 0, "redelivery_attempts": 1_000_000}


def run(options: Options) -> Iterable[Row]:
    """Return rows for the crashes, the faults and the others of each setting, and for the storm."""
    rows = of_each(SETTINGS, options, _all_cases) if options.long else []
    folder = options.folder / "storm"
    folder.mkdir()
    many, seconds = (MANY, LONG) if options.long else (FEW, SHORT)
    rows = [*rows, storm(folder, options.seed, seconds, many)]
    return [*rows, full_disk(options)] if options.long else rows


def _all_cases(options: Options, setting: Setting) -> list[Row]:
    """Die at every call, and in pairs at some; refuse some calls, and let others work before some."""
    chance = random.Random(options.seed)
    crashes, pairs, faults, others = (Row(f"{what}: {setting.name}") for what in (
        "crash at every call", "crash of the sweep after a crash", "faults at calls", "others between two calls",
    ))  # fmt: skip
    for case in options.shared(CASES):
        OutputCases(options.folder, setting, crashes).crash(case, options.some(chance))
        OutputCases(options.folder, setting, pairs).crash_twice(case, options.some(chance, 8))
        OutputCases(options.folder, setting, faults).refuse(case, options.some(chance, 20))
        for other in WORKS:
            cases = OutputCases(options.folder, setting, others)
            cases.meet(case, other, options.some(chance, 10))
    return [crashes, pairs, faults, others]


# -- the storm -----------------------------------------------------------------------------------------------------


class Storm(Crowd):
    """A root with the chain, whose first queue has all messages, and all who work there."""

    def __init__(self, folder: Path, seed: int, many: int) -> None:
        super().__init__(folder, seed, ROLES, play, every=EVERY)
        for name in CHAIN:
            self.root.create_queue(name, **QUEUES)
        chance = random.Random(seed)
        self.sent = {f"m{number}": body(f"m{number}", chance.choice((0, 1_000, 30_000))) for number in range(many)}
        self.root.queue(CHAIN[0]).send_many(list(self.sent.values()))


def storm(folder: Path, seed: int, seconds: float, many: int) -> Row:
    """Rage, let each stage work on what is left, and hold what came out against what went in."""
    whole = Storm(folder, seed, many)
    whole.rage(seconds)
    row = Row("storm of a chain of three stages", cases=many, kills=whole.kills, wrong=whole.wrong)
    root = Root(folder / "root")
    work_off(root, seed)
    row.wrong += judged(root, whole.sent, row)
    return row


def work_off(root: Root, seed: int) -> None:
    """Let each stage work until the last queue has all."""
    timed(root, AT_ONCE)

    def settled() -> bool:
        root.sweep()
        for stage in STAGES:
            _stage(stage, root, random.Random(seed), until_empty=True)
        return not any(root.queue(name).counts()[state] for name in CHAIN[:-1] for state in ("target", "processing"))

    until(settled, "all that went in to come out", timeout=1800)


def full_disk(options: Options) -> Row:
    """Let each stage work on a disk that is full, then with room again; hold what came out as in the storm."""
    row = Row("a chain whose disk is full in each stage")
    disk = Disk(row.test, "size=16m,mode=0777", lambda _: None, lambda _: None)
    try:
        with mounted(options.folder / "disk", disk) as folder:
            whole = Storm(folder, options.seed, STALLED)
            root = Root(whole.root.path)
            for number, stage in enumerate(STAGES):
                fill(0, folder)
                with suppress(StorageError):
                    _stage(stage, root, random.Random(options.seed), until_empty=True)
                for name, wanted in zip(CHAIN[number : number + 2], (STALLED, 0), strict=True):
                    root.queue(name).sweep()
                    if (found := root.queue(name).counts()["target"]) != wanted:
                        row.wrong.append(f"{stage}: {found} wait in {name} while the disk is full, not {wanted}")
                row.faults += 1
                shutil.rmtree(folder / "filler")
                while root.queue(CHAIN[number]).counts()["target"]:
                    _stage(stage, root, random.Random(options.seed), until_empty=True)
            row.cases = STALLED
            row.wrong += judged(root, whole.sent, row)
    except NotRun as reason:
        row.not_run = str(reason)
    return row


def judged(root: Root, sent: dict[str, bytes], row: Row) -> Iterator[str]:
    """Yield what is wrong: each message is archived once in each queue but the last, where it lies as it came out."""
    for number, name in enumerate(CHAIN):
        queue, place = root.queue(name), "target" if name == CHAIN[-1] else "processed"
        ending = b"".join(b"%s\n" % stage.encode() for stage in STAGES[:number])
        wanted = {message: content + ending for message, content in sent.items()}
        found = Counter[str]()
        for state, below in FOLDERS.items():
            for file, content in files(Path(queue.layout.base, below)).items():
                message = content.partition(b" ")[0].decode("latin-1")
                if state == place and content == wanted.get(message):
                    found[message] += 1
                elif state != "working":  # where who was killed left a draft
                    yield f"{name}: {state} has {file}, of {message}"
        for message in wanted:
            row.lost += not found[message]
            row.doubled += found[message] > 1
            if found[message] != 1:
                yield f"{name}: {place} has {message} {found[message]} times"
        staged = Path(queue.layout.staged)
        for folder in staged.iterdir() if staged.exists() else ():
            if left := [each for each in os.listdir(folder) if not (each == "whole" and (folder / each).is_dir())]:
                yield f"{name}: {folder.name} has {left}"


# -- who takes part ------------------------------------------------------------------------------------------------


def play(role: str, name: str, folder: Path, seed: str) -> None:
    """Play a part until killed."""
    root, chance = Root(folder / "root"), random.Random(seed)
    if role != "sweep":
        _stage(role, root, chance)
    while True:
        root.sweep()


def _stage(stage: str, root: Root, chance: random.Random, *, until_empty: bool = False) -> None:
    """Take messages from a stage's queue, and send what is made of them to the next."""
    number = STAGES.index(stage)
    source, to = root.queue(CHAIN[number]), CHAIN[number + 1]
    if stage == "shell":
        words = ["--root", str(root.path), "work", source.name, "--to", to, "-q", "-j", "4"]
        main([*words, *["--until-empty"] * until_empty, "--", "sh", "-c", COMMAND])
    elif stage == "python":
        work(source, _handler(to, chance), until_empty=until_empty, concurrency=2)
    else:
        asyncio.run(_ack_all(source, to, until_empty=until_empty))


def _handler(to: str, chance: random.Random) -> Callable[[Message], Iterator[Out]]:
    def made_of(message: Message) -> Iterator[Out]:
        yield Out(to, message.body + b"python\n")
        if chance.random() < FAILURES:
            raise RuntimeError("it fails, as it does at times")

    return made_of


async def _ack_all(source: Queue, to: str, *, until_empty: bool) -> None:
    async with aio.Queue(source).subscribe(max_backlog=4) as subscription:
        while (message := await subscription.receive(timeout=0 if until_empty else None)) is not None:
            await message.ack(send=Out(to, await message.body() + b"asyncio\n"))
