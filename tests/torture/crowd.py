"""Processes that work on one root, each until it is killed at a random moment and another plays its part."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from forks import fork

from dropq import Root
from torture.account import body

#: Seconds between two kills, on average.
EVERY = 0.1
#: How many messages a script has: more than it sends before it is killed.
BODIES = 400
#: A script that sends by `mv`, and notes each message before it tries and once it is sent.
SCRIPT = r"""
cd "$1" && n=0
while n=$((n + 1)); do
    name=$2-$n
    case $n in *3) name=$name-urgent file=8.$name.B ;; *) file=4.$name.B ;; esac
    echo "try $name" >>"$3"
    cp "$4/$name" "working/$file" 2>/dev/null || exit 0
    mv "working/$file" "target/$file"
    echo "sent $name" >>"$3"
    sleep 0.05
done
"""

_PR_SET_PDEATHSIG = 1


class Crowd:
    """A new root, the processes that work on it, and what they have noted.

    Args:
        folder: gets the root, and the notes of each process.
        seed: where chance begins.
        roles: the part of each process.
        play: plays a part until it is killed. It takes the part, the name of the process, the folder and a seed.
        every: seconds between two kills, on average.

    Attributes:
        kills: how many processes were killed.
        wrong: which processes ended by themselves, and their last words.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        roles: Sequence[str],
        play: Callable[[str, str, Path, str], None],
        *,
        every: float = EVERY,
    ) -> None:
        self.folder = folder
        self.root = Root.create(folder / "root")
        self.kills = 0
        self.wrong: list[str] = []
        self._notes = folder / "notes"
        self._seed = seed
        self._roles = roles
        self._play = play
        self._every = every
        self._chance = random.Random(seed)
        self._live: dict[int, tuple[str, str]] = {}
        self._serial = 0
        self._notes.mkdir()

    def rage(self, seconds: float) -> None:
        """Kill one process after the other, and start another in its place; at the end kill all."""
        for role in self._roles:
            self._start(role)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._chance.uniform(0, 2 * self._every))
            role = self._end(self._chance.choice(list(self._live)))
            self.kills += 1
            self._start(role)
        for pid in list(self._live):
            self._end(pid)

    def noted(self, verb: str) -> Counter[str]:
        """Return how often each message was noted under a verb."""
        lines = (line for path in self._notes.glob("*.log") for line in path.read_text().split("\n")[:-1])
        return Counter(line.partition(" ")[2] for line in lines if line.startswith(f"{verb} "))

    def _start(self, role: str) -> None:
        self._serial += 1
        name = f"{role.replace(' ', '-').replace('/', '-')}-{self._serial}"
        seed = f"{self._seed} {name}"
        pid = fork(lambda: self._play(role, name, self.folder, seed), longest=0, out=self._notes / f"{name}.out")
        self._live[pid] = role, name

    def _end(self, pid: int) -> str:
        role, name = self._live.pop(pid)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) and role != "script":
            lines = (self._notes / f"{name}.out").read_text(errors="replace").splitlines()
            self.wrong.append(f"{name} ended with status {status}: {lines[-1] if lines else ''}")
        return role


def send_by_hand(base: str, name: str, folder: Path, log: Path) -> None:
    """Become the script, which sends to the queue or topic at `base`."""
    bodies = folder / "notes" / f"{name}.bodies"
    bodies.mkdir()
    for number in range(1, BODIES):
        message = f"{name}-{number}{'-urgent' if number % 10 == 3 else ''}"
        (bodies / message).write_bytes(body(message))
    os.execvp("sh", ["sh", "-c", SCRIPT, "sh", base, name, str(log), str(bodies)])
