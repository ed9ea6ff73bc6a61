"""How long a command takes to start, beyond Python's own start, and what `dropq ls` costs where many wait.

Prints a row of JSON for each command: `python bench/startup.py --messages 1000000`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import dropq
from bench import scratch

#: What a run is compared with: Python that starts and does nothing.
NOTHING = [sys.executable, "-c", "pass"]
#: Modules are compiled once, as an installation does, whatever this environment says.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class Run:
    """Seconds and greatest resident set, in MB, of one process."""

    seconds: float
    memory: float


def run(command: list[str]) -> Run:
    """Run a command to its end."""
    started = time.perf_counter()
    nothing = subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, env=ENVIRONMENT)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, command
    return Run(time.perf_counter() - started, used.ru_maxrss / 1024)


def row(what: str, times: int, command: list[str], prepare: Callable[[], object] = lambda: None) -> dict[str, object]:
    """Run a command and Python alone in turn; tell the median and the best of both."""
    run(command)
    runs, bare = [], []
    for _ in range(times):
        prepare()
        bare.append(run(NOTHING).seconds)
        runs.append(run(command))
    seconds = [each.seconds for each in runs]
    return {
        "what": what,
        "runs": times,
        "median_s": round(statistics.median(seconds), 3),
        "best_s": round(min(seconds), 3),
        "beyond_python_median_s": round(statistics.median(seconds) - statistics.median(bare), 3),
        "beyond_python_best_s": round(min(seconds) - min(bare), 3),
        "max_rss_mb": round(max(each.memory for each in runs), 1),
    }


def dropq_command(*arguments: str) -> list[str]:
    """Return the command line of a command."""
    return [sys.executable, "-m", "dropq", *arguments]


def help_row(times: int) -> dict[str, object]:
    """Measure `dropq --help`."""
    return row("dropq --help", times, dropq_command("--help"))


def ls_row(folder: str, times: int, messages: int) -> dict[str, object]:
    """Measure `dropq ls` of a queue in which so many wait."""
    fill(folder, messages)
    return row(f"dropq ls, {messages} waiting", times, dropq_command("--root", folder, "ls"))


def fill(folder: str, messages: int) -> None:
    """Make a root with a queue of empty messages; their bodies are not looked at."""
    target = dropq.Root.create(folder).create_queue("bench").layout.target
    for number in range(messages):
        os.close(os.open(f"{target}/4.{number:016d}-0000000000.B", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o664))


def work_rows(folder: str, times: int) -> Iterator[dict[str, object]]:
    """Measure the commands of shell scripts, on a queue that has a configuration of its own."""
    root = dropq.Root.create(folder)
    queue = root.create_queue("bench", lease_period="5m")
    body = f"{folder}/body"
    with open(body, "wb") as file:
        file.write(os.urandom(1024))

    def command(*arguments: str) -> list[str]:
        return dropq_command("--root", folder, *arguments)

    def send() -> None:
        queue.send(b"x")

    send()
    yield row("dropq send", times, command("send", "bench", body))
    yield row("dropq receive", times, command("receive", "bench"), send)
    yield row("dropq work --until-empty", times, command("work", "bench", "--until-empty", "--", "true"), send)
    yield row("dropq health", times, command("health"))


def rows(base: str, times: int, messages: int) -> Iterator[dict[str, object]]:
    """Measure each command in a folder of its own."""
    with scratch(base) as compiled:
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = compiled
        yield from commands(base, times, messages)


def commands(base: str, times: int, messages: int) -> Iterator[dict[str, object]]:
    """Measure each command, in folders of their own."""
    yield help_row(times)
    with scratch(base) as folder:
        yield from work_rows(folder, times)
    for waiting in (1000, messages):
        with scratch(base) as folder:
            yield ls_row(folder, times, waiting)


def main() -> int:
    """Run the benchmarks and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--base", default="/dev/shm", help="where the queues are made")
    given = parser.parse_args()
    for row in rows(given.base, max(5, given.runs), given.messages):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
