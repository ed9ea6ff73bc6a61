"""A handler that runs a command for each message, in a process group of its own.

No shell is ever run: the command gets its arguments as they were given, so that nothing in a message's name can be
taken for code. It lives no longer than its message's claim: the group is ended when the claim is lost, when the
command takes too long, and, by a guard process, when the worker itself is killed. Only what leaves the group on
purpose, by a session of its own, gets away.

A command finds the body on its standard input. In its environment are:

- DROPQ_ID, DROPQ_QUEUE, DROPQ_ROOT, DROPQ_PRIORITY, DROPQ_DELIVERY_COUNT,
- DROPQ_TYPE, DROPQ_CORRELATION_ID and DROPQ_REPLY_TO, where the message has them,
- DROPQ_PROP_NAME for each property, its name spelled as the sender spelled it,
- DROPQ_RECEIPT, which names the claim to `dropq ack` and the like, also after the lease was renewed,
- DROPQ_FILE, and `{}` in any argument: a path under the message's own name that stays the same while the command
  runs, as renewing a lease renames the claimed file. It is to be read, not written, and goes with the command,
- DROPQ_RUN, which the guard knows this run by.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from dropq.durations import format_duration, parse_duration
from dropq.errors import Unavailable
from dropq.lifecycle.reasons import STDERR_LIMIT
from dropq.queue.message import Duration, Message
from dropq.worker import guard
from dropq.worker.loop import Cancelled, Fail, Halt, Reject, Retry

log = logging.getLogger("dropq")

#: Exit statuses that say what is to become of the message; 0 acknowledges it, any other fails it.
REJECT = 65
RETRY = 75
#: Exit statuses by which shells say that a command cannot be executed, or is not there.
UNUSABLE = (126, 127)
#: Seconds between SIGTERM and SIGKILL for a command that is ended while its message is still its own.
GRACE = 5.0
#: The same where the message is somebody else's already.
LOST_GRACE = 1.0
#: Seconds that the last of a command's stderr is waited for, as a child that it left behind may keep it open. Then
#: nobody reads it any more: such a child meets SIGPIPE when it writes there.
LINGER = 0.2

_PROPERTY = "DROPQ_PROP_"


class Command:
    """A handler for `work` that runs a command; leave its `with` block, or close it, when the worker has ended.

    Args:
        argv: the command and its arguments; `{}` stands for the message's path in every argument.
        timeout: after which the command is ended and its message fails; None for never.

    Raises:
        Unavailable: there is no such command, or its end could not be told; no message was touched.
    """

    def __init__(self, argv: Sequence[str], *, timeout: Duration | None = None) -> None:
        if not argv:
            raise ValueError("no command was given")
        self.argv = tuple(argv)
        self.timeout = None if timeout is None else parse_duration(timeout)
        program = shutil.which(self.argv[0])
        if program is None:
            raise Unavailable(f"{self.argv[0]}: no such command, or it may not be executed; no message was touched")
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # left so by whoever started us
            raise Unavailable("SIGCHLD is ignored here, so no exit status can be had: start the worker without that")
        self._program = os.path.abspath(program)
        self._guard = Guard()
        self._runs: dict[int, Run] = {}

    def __call__(self, message: Message) -> None:
        """Run the command; raise what its end says of the message, and return where it is to be acknowledged."""
        run = self._runs[id(message)] = Run(self._guard)
        try:
            with _stable_path(message) as path, message.open() as body:
                argv = [self.argv[0], *(argument.replace("{}", path) for argument in self.argv[1:])]
                self._start(run, argv, body, environment(message, path, run.id))
                status = run.wait(self.timeout)
        finally:
            del self._runs[id(message)]
        if run.ended_by == "timeout":
            after = format_duration(self.timeout or 0)
            raise Fail(f"timeout: ended after {after}", stderr=run.stderr)
        if run.ended_by is not None:
            raise Cancelled
        self._judge(status, run.stderr)

    def cancel(self, message: Message) -> None:
        """End the command that runs for a message, at once where the message is lost; return without waiting."""
        run = self._runs.get(id(message))
        if run is not None:
            run.end("cancel", GRACE if message.held else LOST_GRACE)

    def close(self) -> None:
        """Let the guard go."""
        self._guard.close()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, run: Run, argv: list[str], body: IO[bytes], environment: Mapping[bytes, bytes]) -> None:
        try:
            run.start(argv, executable=self._program, stdin=body, env=environment)
        except OSError as error:
            reason = f"{self.argv[0]} cannot be run: {error.strerror}"
            if error.errno == errno.E2BIG:
                raise Fail(f"{reason} (the message's properties make the environment)") from error
            raise Halt(reason) from error

    def _judge(self, status: int, stderr: str) -> None:
        if status == RETRY:
            raise Retry(reason=f"exit status {status}")
        if status == REJECT:
            raise Reject(f"exit status {status}", exit_status=status, stderr=stderr)
        if status in UNUSABLE:
            raise Halt(f"{self.argv[0]} ended with exit status {status}, which says that it cannot be run")
        if status < 0:
            failed = Fail(f"killed by {_signal_name(-status)}", exit_status=128 - status, stderr=stderr)
            failed.returncode = status
            raise failed
        if status:
            raise Fail(f"exit status {status}", exit_status=status, stderr=stderr)


class Run:
    """One run of a command: a process group, from its start until its leader is reaped.

    Once a process id is reaped the system may give it away again: signals are sent under the lock, and only before.
    """

    def __init__(self, guard: Guard) -> None:
        self.id = secrets.token_hex(8)
        self.ended_by: str | None = None
        self._guard = guard
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = False
        self._kill_at = 0.0
        self._timers: list[threading.Timer] = []
        self._pump: _Pump | None = None

    def start(self, argv: list[str], *, executable: str, stdin: IO[bytes], env: Mapping[bytes, bytes]) -> None:
        """Start the command.

        Raises:
            OSError: it cannot be executed.
            Cancelled: it was ended before it began.
        """
        with self._lock:
            if self.ended_by is not None:
                raise Cancelled
            self._guard.run(self.id, 0)
            pump: _Pump | None = None
            try:
                pump = _Pump()
                self._process = subprocess.Popen(
                    argv, executable=executable, stdin=stdin, stderr=subprocess.PIPE, env=env, start_new_session=True
                )
            except BaseException:
                self._guard.end(self.id)
                if pump is not None:
                    pump.close()
                raise
            self._guard.run(self.id, self._process.pid)
        assert self._process.stderr is not None
        self._pump = pump
        pump.begin(self._process.stderr)

    def wait(self, timeout: float | None) -> int:
        """Wait for the command's end; return its exit status, negative for a signal.

        Args:
            timeout: seconds after which it is ended.
        """
        assert self._process is not None and self._pump is not None
        if timeout is not None:
            self._later(timeout, self.end, "timeout", GRACE)
        _wait_for_exit(self._process)
        with self._lock:
            self._exited = True
            for timer in self._timers:
                timer.cancel()
        # Who still holds its stderr is of its group: the rest of an ended one has its grace, what a command that came
        # to its own end left behind goes on.
        self._pump.end(max(self._kill_at - time.monotonic(), 0) if self.ended_by else LINGER)
        if self.ended_by:
            self._signal(signal.SIGKILL)
        self._guard.end(self.id)
        return self._process.wait()

    def end(self, why: str, grace: float) -> None:
        """End its process group: SIGTERM now, SIGKILL after a grace in seconds; return without waiting."""
        with self._lock:
            if self._exited or self.ended_by is not None:
                return
            self.ended_by = why
            self._kill_at = time.monotonic() + grace
            if self._process is not None:
                self._signal(signal.SIGTERM)
                self._later(grace, self._kill)

    @property
    def stderr(self) -> str:
        """The last that it wrote to its stderr, at most `STDERR_LIMIT` bytes."""
        return self._pump.tail.decode("utf-8", errors="replace") if self._pump is not None else ""

    def _kill(self) -> None:
        with self._lock:
            if not self._exited:
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):  # another user's now: not ours to end
            os.killpg(self._process.pid, number)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


class _Pump:
    """Passes on what a command writes to its stderr, and keeps the end of it, in a thread and until it is ended."""

    def __init__(self) -> None:
        self.tail = b""
        self._over, self._end = os.pipe()
        self._thread: threading.Thread | None = None

    def begin(self, pipe: IO[bytes]) -> None:
        """Begin to read a pipe."""
        self._thread = threading.Thread(target=self._run, args=(pipe,), name="dropq-stderr", daemon=True)
        self._thread.start()

    def end(self, patience: float) -> None:
        """Wait for the end of the pipe, so many seconds at most; then close it, whoever still writes there."""
        if self._thread is not None:
            self._thread.join(patience)
        os.close(self._end)  # which ends the thread

    def close(self) -> None:
        """Let go of what was not begun."""
        os.close(self._over)
        os.close(self._end)

    def _run(self, pipe: IO[bytes]) -> None:
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        ready.register(self._over, select.POLLIN)
        with pipe, open(self._over, "rb"):
            goes_on = True
            while goes_on:
                events = dict(ready.poll())
                goes_on = self._over not in events
                chunk = os.read(pipe.fileno(), 1 << 16) if pipe.fileno() in events else b""
                goes_on = goes_on and bool(chunk)
                self.tail = (self.tail + chunk)[-STDERR_LIMIT:]
                with suppress(OSError):
                    while chunk:
                        chunk = chunk[os.write(2, chunk) :]


class Guard:
    """What kills the commands of this process when it dies, see `guard`; started with the first command."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._runs: dict[str, int] = {}
        self._off = False

    def run(self, run: str, group: int) -> None:
        """Say that a run is in a process group; 0 says that it is about to start."""
        with self._lock:
            self._runs[run] = group
            self._tell(f"run {run} {group}\n")

    def end(self, run: str) -> None:
        """Say that a run is over."""
        with self._lock:
            self._runs.pop(run, None)
            self._tell(f"end {run}\n")

    def close(self) -> None:
        """End the guard."""
        with self._lock:
            process, self._process = self._process, None
            self._off = True
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def _tell(self, line: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            try:
                process.stdin.write(line.encode())
                return
            except BrokenPipeError:
                log.warning("the guard of this worker's commands is gone: starting another")
                process.wait()
        if self._off:
            return
        try:
            self._process = self._started()
        except OSError as error:
            self._off = True
            log.warning("no guard (%s): commands will outlive this worker if it is killed", error)

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what ends the worker's whole group is not to end it
        )
        assert process.stdin is not None
        process.stdin.write("".join(f"run {run} {group}\n" for run, group in self._runs.items()).encode())
        return process


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()  # macOS before Python 3.13: its id is free a moment before we know


@contextmanager
def _stable_path(message: Message) -> Iterator[str]:
    """Give the body a second name that lasts as long as the block; a sweep clears it when this process dies."""
    if message.owner is None:  # at most once: it is archived, and moves no more
        yield message.path
        return
    context = message.context
    name = context.sidecars.full(context.sidecars.parse(message.name))
    folder = f"{context.layout.held}/{message.owner}"
    path = f"{folder}/{name.born_foreign or message.name}"
    try:
        context.storage.make_folder(folder, passing=True)
    except OSError as error:
        raise Halt(f"{folder} cannot be made: {error.strerror}") from error
    try:
        message.link(path)
        yield path
    finally:
        with suppress(OSError):
            context.storage.remove_tree(folder)


def environment(message: Message, path: str, run: str) -> dict[bytes, bytes]:
    """Return the environment of a command: this process's, and what the message says."""
    said = {
        "DROPQ_ID": message.id,
        "DROPQ_QUEUE": message.context.name,
        "DROPQ_ROOT": message.context.root.layout.path,
        "DROPQ_FILE": path,
        "DROPQ_PRIORITY": message.priority,
        "DROPQ_DELIVERY_COUNT": message.delivery_count,
        "DROPQ_TYPE": message.type,
        "DROPQ_CORRELATION_ID": message.correlation_id,
        "DROPQ_REPLY_TO": message.reply_to,
        "DROPQ_RECEIPT": message.receipt,
        guard.RUN: run,
        **{f"{_PROPERTY}{name}": value for name, value in message.properties.items()},
    }
    # Another message's, where a worker runs within a command, are not this one's.
    kept = {key: value for key, value in os.environb.items() if not key.startswith(_PROPERTY.encode())}
    for name, value in said.items():
        key = _bytes(name)
        if value is None:
            kept.pop(key, None)
        elif b"=" not in key:  # which no environment can hold: a name that some script made up
            kept[key] = _bytes(value)
    return kept


def _bytes(value: object) -> bytes:
    """Write a value as the environment can hold it: without NUL, and with the bytes that a file name had."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        data = text.encode("utf-8", "replace")
    return data.replace(b"\0", b"?")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
