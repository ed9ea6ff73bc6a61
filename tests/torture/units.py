"""A unit is stopped and started again and again while it works: no stop fails, loses or counts a message.

The unit is a `dropq work` with its guard and its commands. A stop is what systemd, a terminal or a person sends: a
signal to every process of the unit, as KillMode=control-group does, and in any order; to the worker alone, as
KillMode=mixed does; or to its process group. systemd itself is not needed for that.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers import until

from dropq import Queue, Root
from torture.account import Found, body, judge, look
from torture.table import Options, Row

#: Stops: as many as there are in all; and the most that are tried until one has come in the middle of a command.
LONG, SHORT, MOST = 50, 5, 50
#: Messages that are sent before each start, and commands that run at a time.
EACH, AT_A_TIME = 20, 4
#: Seconds that a unit works before it is stopped, at most; and that signals to its processes are apart, at most.
WORKS, APART = 0.4, 0.01
#: Seconds that a stop may take.
STOPS_WITHIN = 60.0

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: The variable by which the processes of a unit are known.
UNIT = "DROPQ_TORTURE_UNIT"
#: What is run for each message: some fail by themselves, by their exit status or by a signal of their own.
COMMAND = """
read -r name rest
case $name in
bad-*) exit 1 ;;
own-*) kill -TERM $$ ;;
esac
exec sleep 0.1
"""


def run(options: Options) -> Iterable[Row]:
    """Return a row of all stops."""
    stops = LONG if options.long else SHORT
    chance = random.Random(options.seed)
    queue = Root.create(options.folder / "root").create_queue("q", durability="none")
    names: set[str] = set()
    row = Row("a worker is stopped at work")
    returned = 0
    # Some stops come when all is done, and a worker that is stopped alone lets its commands end.
    while row.kills < stops or (not returned and row.kills < MOST):
        number = row.kills
        names |= _send(queue, number, chance)
        unit = Unit(queue, options.folder / f"unit-{number}")
        until(lambda: os.listdir(queue.layout.processing), "the unit works", timeout=STOPS_WITHIN)
        time.sleep(chance.uniform(0, WORKS))
        how = unit.stop(chance)
        row.kills += 1
        returned += int(found[1]) if (found := re.search(r"(\d+) given back unfinished", how)) else 0
        row.wrong += [f"stop {number}: {line}" for line in (*unit.wrong, *_counted(queue))]
    unit = Unit(queue, options.folder / "last")
    until(lambda: not _waits(queue), "all is worked off", timeout=STOPS_WITHIN + len(names))
    unit.stop(chance)
    row.wrong += unit.wrong
    row.cases = len(names)
    if not returned:
        row.wrong.append("no stop came in the middle of a command")
    _judge(row, look(Path(queue.root.path)), names)
    return [row]


def _send(queue: Queue, number: int, chance: random.Random) -> set[str]:
    kinds = chance.choices(("good", "bad", "own"), (12, 3, 1), k=EACH)
    names = [f"{kind}-{number}-{each}" for each, kind in enumerate(kinds)]
    queue.send_many(body(name) for name in names)
    return set(names)


def _counted(queue: Queue) -> list[str]:
    """Return what a stop has counted, delayed, or left held: that is nothing."""
    wrong = [f"{name} was counted" for name in os.listdir(queue.layout.target) if "JMSX" in name]
    return wrong + [f"{name} is {where}" for where in ("processing", "delayed") for name in _in(queue, where)]


def _in(queue: Queue, state: str) -> list[str]:
    folder = queue.layout.folder(state)
    return os.listdir(folder) if os.path.isdir(folder) else []


def _waits(queue: Queue) -> bool:
    return bool(_in(queue, "target") or _in(queue, "processing") or _in(queue, "delayed"))


def _judge(row: Row, found: Found, names: set[str]) -> None:
    row.count(judge(found, must=names), "at the end")
    states = found.states()
    for name, location in found.locations.items():
        fails = not name.startswith("good")
        if states[name] != ("error" if fails else "processed"):
            row.wrong.append(f"{name} is in {states[name]}")
        if re.search(r"JMSXDeliveryCountI=(?!1\b)", location[0].path) or (not fails and "JMSX" in location[0].path):
            row.wrong.append(f"{name} was counted more than once: {location[0].path}")


class Unit:
    """A worker, its guard and its commands."""

    def __init__(self, queue: Queue, log: Path) -> None:
        self.wrong: list[str] = []
        self._mark = secrets.token_hex(8)
        self._log = log
        argv = [sys.executable, "-m", "dropq", "--root", str(queue.root.path), "work", queue.name, "-j", str(AT_A_TIME)]
        with open(log, "wb") as errors:
            self._worker = subprocess.Popen(
                [*argv, "--", "sh", "-c", COMMAND],
                env={**os.environ, UNIT: self._mark},
                stderr=errors,
                start_new_session=True,
            )

    def stop(self, chance: random.Random) -> str:
        """Stop it as somebody would; return what it told."""
        # What this process was told to ignore, as by nohup, its worker ignores, too.
        number = chance.choice([one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN])
        how = chance.choice((self._signal_all, self._signal_all, self._signal_worker, self._signal_group))
        how(number, chance)
        try:
            code = self._worker.wait(STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            code = -1
            self._worker.kill()
            self._worker.wait()
        output = self._log.read_text(errors="replace")
        if code != 0:
            self.wrong.append(f"{number.name}: the worker ended with {code}: {output[-300:]}")
        until(lambda: not self._processes(), "the unit's processes ended")
        return output

    def _signal_all(self, number: signal.Signals, chance: random.Random) -> None:
        """Signal each process, again while there are new ones, as systemd does."""
        done: set[int] = set()
        while new := [process for process in self._processes() if process not in done]:
            for process in chance.sample(new, len(new)):
                with suppress(ProcessLookupError):
                    os.kill(process, number)
                done.add(process)
                if chance.random() < 0.3:
                    time.sleep(chance.uniform(0, APART))

    def _signal_worker(self, number: signal.Signals, chance: random.Random) -> None:
        self._worker.send_signal(number)

    def _signal_group(self, number: signal.Signals, chance: random.Random) -> None:
        os.killpg(self._worker.pid, number)

    def _processes(self) -> list[int]:
        wanted = f"{UNIT}={self._mark}".encode()
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # gone since the listing
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found
