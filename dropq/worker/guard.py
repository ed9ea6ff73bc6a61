"""Ends the commands of a worker that died: a program of its own, which reads what its worker runs from a pipe.

The pipe ends when the worker does, however it does; then whatever is still listed is killed. A line is `run RUN 0`
for a run that is about to start, `run RUN GROUP` once its process group is known, and `end RUN`. A run that was about
to start is found by its environment, so that there is no moment at which a worker's death leaves a command behind.
What left its process group on purpose is not reached.

    python -I -S guard.py < PIPE
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

#: The variable in a command's environment that tells its run.
RUN = "DROPQ_RUN"


def main() -> None:
    """Follow the worker until it ends, then kill what it left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    runs: dict[str, int] = {}
    with open(0, encoding="ascii") as lines:
        for line in lines:
            match line.split():
                case ["run", run, group]:
                    runs[run] = int(group)
                case ["end", run]:
                    runs.pop(run, None)
    starting = {run for run, group in runs.items() if not group}
    for group in [*filter(None, runs.values()), *(_groups_of(starting) if starting else ())]:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _groups_of(starting: set[str]) -> Iterator[int]:
    """Yield the process groups that run what was about to start, where the system shows environments."""
    wanted = {f"{RUN}={run}".encode() for run in starting}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError), open(f"/proc/{int(entry)}/environ", "rb") as environment:
            if wanted.intersection(environment.read().split(b"\0")):
                yield os.getpgid(int(entry))


if __name__ == "__main__":
    main()
