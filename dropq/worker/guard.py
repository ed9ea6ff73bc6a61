"""Kills the commands of a worker that died: a program of its own, which reads from a pipe what the worker runs.

The kernel closes the pipe when the worker ends, however it ends; then the guard kills every run that has not ended. The
lines are `run RUN 0` for a run that is about to start, `run RUN GROUP` once its process group is known, and `end RUN`.
The guard finds a run that was about to start by its environment, so there is no moment at which a worker could die and
leave a command running. It does not find processes that left their process group on purpose.

    python -I -S guard.py < PIPE
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

#: The environment variable that names the run of a command.
RUN = "DROPQ_RUN"


def main() -> None:
    """Read lines until the worker ends, then kill the runs that have not ended."""
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
    """Yield the process groups of runs that were about to start, if the system shows environments."""
    wanted = {f"{RUN}={run}".encode() for run in starting}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError), open(f"/proc/{int(entry)}/environ", "rb") as environment:
            if wanted.intersection(environment.read().split(b"\0")):
                yield os.getpgid(int(entry))


if __name__ == "__main__":
    main()
