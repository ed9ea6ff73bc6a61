"""What a run of the tests leaves behind: no process outlives it, else the run fails.

A process is of this run if one of these holds:

- its environment says so, as that of every program does which the run starts with the environment that it has itself;
- it has a file open that forks of the run's first process inherit, and programs that are started do not;
- its parent is of this run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

#: The variable that names the runs which a process belongs to: tests may start a run of their own. It has no prefix of
#: dropq's variables, whose number tests check.
VARIABLE = "TEST_RUNS"
#: Seconds that processes have to end after the run: a Java may take a while to notice.
PATIENCE = 30.0


class Leftovers:
    """A plugin of the process that reports on a whole run; not of those that share its tests."""

    def __init__(self) -> None:
        self._run = uuid4().hex
        os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {self._run}".lstrip()
        os.memfd_create(self._run)  # it stays open, and its name is what /proc shows of it

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """End what is left, and let the run fail, after everything else has been torn down."""
        yield
        deadline = time.monotonic() + PATIENCE
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        out = session.config.get_terminal_writer()
        for pid, command in left.items():
            out.line(f"ERROR: process {pid} outlived the tests, and is killed: {command}", red=True)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if left:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def _left(self) -> dict[int, str]:
        """Return the processes of this run that are still there, but for this one, with their command lines."""
        parents = dict(_parents())
        left = {pid for pid in parents if pid == os.getpid() or self._is_marked(Path(f"/proc/{pid}"))}
        while more := {pid for pid, parent in parents.items() if parent in left} - left:
            left |= more
        return {pid: _command(pid) for pid in sorted(left - {os.getpid()})}

    def _is_marked(self, process: Path) -> bool:
        # Of a process that ended meanwhile, and of other users' ones, nothing can be read.
        with suppress(OSError):
            if self._run.encode() in (process / "environ").read_bytes():
                return True
            for file in (process / "fd").iterdir():
                with suppress(OSError):
                    if self._run in os.readlink(file):
                        return True
        return False


def _parents() -> Iterator[tuple[int, int]]:
    """Yield each process that runs, with its parent; one that has ended and waits for its parent does not run."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                yield int(process.name), int(parent)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "it ended meanwhile"
    return " ".join(word.decode(errors="backslashreplace") for word in words if word)


def watch(config: pytest.Config) -> None:
    """Let a run fail if a process outlives it."""
    if not hasattr(config, "workerinput") and os.path.exists("/proc/self/environ"):
        config.pluginmanager.register(Leftovers())
