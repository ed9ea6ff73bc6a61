"""A handler that runs a command for each message, in a process group of its own.

No shell is run: the command gets its arguments as they were given, so that no text in a message's name becomes code.
The command does not outlive the claim of its message: its process group is ended when the claim is lost, when the
command takes too long, and, by a guard process, when the worker itself is killed. Only processes that leave the group
on purpose, by starting a session, survive.

The body is on the command's standard input; docs/cli.md lists the variables of its environment. The path DROPQ_FILE
stays the same while the command runs, although renewing a lease renames the claimed file. The command must not write to
it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Self

from dropq.durations import format_duration, parse_duration
from dropq.errors import ConfigError, LeaseLost, Missing, NoSuchQueue
from dropq.lifecycle.reasons import STDERR_LIMIT
from dropq.queue.message import Duration, Message
from dropq.queue.outputs import Out, OutputWriter
from dropq.storage import reading
from dropq.storage.files import Storage
from dropq.worker import guard
from dropq.worker.loop import Cancelled, Fail, Halt, Reject, Retry
from dropq.worker.sending import NotSent, Sending, SendingHandler, not_sent, why_not_sent

log = logging.getLogger("dropq")

#: The exit statuses that reject the message, and give it back; 0 acknowledges it, any other status fails it.
REJECT = 65
RETRY = 75
#: The exit statuses by which shells report that a command cannot be executed, or does not exist.
UNUSABLE = (126, 127)
#: Seconds between SIGTERM and SIGKILL for a command whose message is still claimed.
GRACE = 5.0
#: Seconds between SIGTERM and SIGKILL for a command whose message is lost.
LOST_GRACE = 1.0
#: Seconds to wait for the end of a command's stderr after the command ended, as a child that it left behind may keep it
#: open. After that the pipe is closed: such a child gets SIGPIPE when it writes.
LINGER = 0.2
#: Seconds until the rest of a process group is looked for again whose leader has exited, at first and at the longest.
GROUP_CHECK, LONGEST_GROUP_CHECK = 0.001, 0.1

_PROPERTY = "DROPQ_PROP_"


class Runner:
    """Runs a command for a handler of `work`; leave its `with` block after the worker has ended.

    Args:
        argv: the command and its arguments; in each argument, `{}` stands for the message's path.
        timeout: how long the command may run before it is ended and its message fails; None for no limit.

    Raises:
        Unavailable: there is no such command, or its exit status could not be read; no message was touched.
    """

    def __init__(self, argv: Sequence[str], *, timeout: Duration | None = None) -> None:
        if not argv:
            raise ValueError("no command was given")
        self.argv = tuple(argv)
        self.timeout = None if timeout is None else parse_duration(timeout)
        program = shutil.which(self.argv[0])
        if program is None:
            raise Missing(f"{self.argv[0]}: no such command, or it may not be executed; no message was touched")
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited from the program that started us
            raise Missing("SIGCHLD is ignored, so no exit status can be read: start the worker without ignoring it")
        self._program = os.path.abspath(program)
        self._guard = Guard()
        self._names = _SecondNames()
        self._runs: dict[int, Run] = {}

    def run(
        self,
        message: Message,
        stdin: Callable[[], IO[bytes]],
        stdout: Callable[[bytes], object] | None = None,
        **variables: object,
    ) -> str:
        """Run the command; return the end of its stderr if it succeeded, else raise what settles the message.

        Args:
            stdin: opens what the command reads.
            stdout: called with each piece that the command's process group writes, until the whole group has ended;
                what it raises ends the command. None lets the command write to the worker's own.
            variables: other variables of its environment, see `environment`.
        """
        run = self._runs[id(message)] = Run(self._guard, stdout)
        try:
            with self._names.given(message) as path, stdin() as body:
                argv = [self.argv[0], *(argument.replace("{}", path) for argument in self.argv[1:])]
                self._start(run, argv, body, environment(message, path, run.id, **variables))
                status = run.wait(self.timeout)
        finally:
            del self._runs[id(message)]
        if run.ended_by == "timeout":
            after = format_duration(self.timeout or 0)
            raise Fail(f"timeout: ended after {after}", stderr=run.stderr)
        if run.ended_by is not None:
            raise Cancelled
        self._raise_for(status, run.stderr)
        return run.stderr

    def cancel(self, message: Message) -> None:
        """End the command that runs for a message, sooner if the message is lost; return without waiting."""
        run = self._runs.get(id(message))
        if run is not None:
            run.end("cancel", GRACE if message.held else LOST_GRACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._guard.close()
        self._names.close()

    def _start(self, run: Run, argv: list[str], body: IO[bytes], environment: Mapping[bytes, bytes]) -> None:
        try:
            run.start(argv, executable=self._program, stdin=body, env=environment)
        except OSError as error:
            reason = f"{self.argv[0]} cannot be run: {error.strerror}"
            if error.errno == errno.E2BIG:
                raise Fail(f"{reason} (the message's properties make the environment)") from error
            raise Halt(reason) from error

    def _raise_for(self, status: int, stderr: str) -> None:
        if status == RETRY:
            raise Retry(reason=f"exit status {status}", exit_status=status, stderr=stderr)
        if status == REJECT:
            raise Reject(f"exit status {status}", exit_status=status, stderr=stderr)
        if status in UNUSABLE:
            raise Halt(f"{self.argv[0]} ended with exit status {status}, which means that it cannot be run")
        if status < 0:
            failed = Fail(f"killed by {_signal_name(-status)}", exit_status=128 - status, stderr=stderr)
            failed.returncode = status
            raise failed
        if status:
            raise Fail(f"exit status {status}", exit_status=status, stderr=stderr)


class Command(Runner):
    """A handler for `work` that runs a command for each message."""

    def __call__(self, message: Message) -> None:
        """Run the command; return if it succeeded, else raise the exception that settles the message."""
        self.run(message, message.open)


class SendingCommand(Runner, SendingHandler):
    """A handler for `work` that sends what a command writes to its stdout, by the ack of the message.

    The body goes into a draft as it is written, so it takes no memory. A message is sent once the command's whole
    process group has ended, and the command with 0.

    Args:
        argv, timeout: as of `Runner`.
        outs: where it goes, with no body: each gets one.
        lines: send each line as a message, without its line feed.
        sends_empty: send an empty body, or an empty line, too.
    """

    def __init__(
        self,
        argv: Sequence[str],
        outs: Sequence[Out],
        *,
        timeout: Duration | None = None,
        lines: bool = False,
        sends_empty: bool = False,
    ) -> None:
        super().__init__(argv, timeout=timeout)
        self._outs = outs
        self._lines = lines
        self._sends_empty = sends_empty

    def stage(self, message: Message, sending: Sending) -> None:
        """Run the command, and stage what it writes; raise the exception that settles the message if that fails."""
        try:
            writing = _Writing(sending, self._outs, sends_empty=self._sends_empty)
            self.run(message, message.open, writing.write_lines if self._lines else writing.write)
            writing.end(sends_empty=self._sends_empty and not self._lines)
        except NotSent as error:
            if isinstance(error.cause, NoSuchQueue | ConfigError):
                why = why_not_sent(error.cause)
                raise Halt(f"what was made of message {message.id} cannot be sent, so it goes back: {why}") from error
            raise


class _Writing:
    """The messages that one run of a command makes: each body is a copy for each destination."""

    def __init__(self, sending: Sending, outs: Sequence[Out], *, sends_empty: bool) -> None:
        self._sending = sending
        self._outs = outs
        self._sends_empty = sends_empty
        # The body at hand; None between two. The first is begun before the work: who may not send learns it then.
        self._parts: list[OutputWriter] | None = self._begun()

    def _begun(self) -> list[OutputWriter]:
        return [part for part in map(self._sending.begin, self._outs) if part is not None]

    def write(self, piece: bytes) -> None:
        """Write a piece of a body."""
        if self._parts is None:
            self._parts = self._begun()
        with not_sent():
            for part in self._parts:
                part.write(piece)

    def write_lines(self, piece: bytes) -> None:
        """Write a piece that may end some lines; each line is a body."""
        *ended, rest = piece.split(b"\n")
        for line in ended:
            if line or self._sends_empty:
                self.write(line)
            self.end(sends_empty=self._sends_empty)
        if rest:
            self.write(rest)

    def end(self, *, sends_empty: bool) -> None:
        """End the body at hand; make no message of it if it is empty, unless such are to be sent."""
        parts, self._parts = self._parts or (), None
        with not_sent():
            for part in parts:
                if part.size or sends_empty:
                    part.finish()
                else:
                    part.drop()


class Run:
    """A run of a command: a process group, until its leader is reaped, or, with `stdout`, until none of it is left.

    The system gives the id to another process only after that. So signals are sent only before it, under the lock.
    """

    def __init__(self, guard: Guard, stdout: Callable[[bytes], object] | None = None) -> None:
        self.id = secrets.token_hex(8)
        self.ended_by: str | None = None
        self._stdout = stdout
        self._guard = guard
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = False
        self._kill_at = 0.0
        self._timers: list[threading.Timer] = []
        self._pump: _Pump | None = None
        self._output: _Pump | None = None
        self._unwritten: Exception | None = None

    def start(self, argv: list[str], *, executable: str, stdin: IO[bytes], env: Mapping[bytes, bytes]) -> None:
        """Start the command.

        Raises:
            OSError: the command cannot be executed.
            Cancelled: `end` was called before.
        """
        with self._lock, ExitStack() as undoing:
            if self.ended_by is not None:
                raise Cancelled
            self._guard.run(self.id, 0)
            undoing.callback(self._guard.end, self.id)
            self._pump = _Pump(_echo, "dropq-stderr")
            undoing.callback(self._pump.close)
            if self._stdout is not None:
                self._output = _Pump(self._write, "dropq-stdout")
                undoing.callback(self._output.close)
            self._process = subprocess.Popen(
                argv,
                executable=executable,
                stdin=stdin,
                stdout=None if self._stdout is None else subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
            undoing.pop_all()
            self._guard.run(self.id, self._process.pid)
        assert self._process.stderr is not None
        self._pump.begin(self._process.stderr)
        if self._output is not None and self._process.stdout is not None:
            self._output.begin(self._process.stdout)

    def _write(self, piece: bytes) -> None:
        if self._stdout is None or self._unwritten is not None:
            return
        try:
            self._stdout(piece)
        except Exception as error:
            self._unwritten = error
            self.end("unwritten", GRACE)

    def wait(self, timeout: float | None) -> int:
        """Wait for the command, ended after `timeout` seconds; return its exit status, or minus its signal's number.

        Raise what ended the command if what it wrote could not be passed on.
        """
        assert self._process is not None and self._pump is not None
        if timeout is not None:
            self._later(timeout, self.end, "timeout", GRACE)
        _wait_for_exit(self._process)
        if self._output is not None:
            self._wait_for_group()
        with self._lock:
            self._exited = True
            for timer in self._timers:
                timer.cancel()
        # Another process of the group may still have stderr open. If we ended the group, wait until it is killed;
        # otherwise such a process may go on, so wait only shortly.
        self._pump.end(max(self._kill_at - time.monotonic(), 0) if self.ended_by else LINGER)
        if self._output is not None:  # the group has ended: what else is to come lies in the pipe
            self._output.end(0, None)
        elif self.ended_by:
            self._signal(signal.SIGKILL)
        self._guard.end(self.id)
        status = self._process.wait()
        if self._unwritten is not None:
            raise self._unwritten
        return status

    def end(self, why: str, grace: float) -> None:
        """End the process group: SIGTERM now, SIGKILL after `grace` seconds; return without waiting."""
        with self._lock:
            if self._exited or self.ended_by is not None:
                return
            self.ended_by = why
            self._kill_at = time.monotonic() + grace
            if self._process is not None:
                self._signal(signal.SIGTERM)
                self._later(grace, self._kill)

    def _wait_for_group(self) -> None:
        """Wait until no process of the group is left, but for the leader, which has exited.

        The leader is reaped by this. RACE: the system gives its number to another process only once the group, too, is
        gone: so if a process has it, the group has ended, and is not signalled any more.
        """
        assert self._process is not None
        self._process.wait()
        pause = GROUP_CHECK
        while True:
            with self._lock:
                if not _lives(self._process.pid):
                    self._exited = True
                    return
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_GROUP_CHECK)

    @property
    def stderr(self) -> str:
        """The end of what the command wrote to its stderr, at most `STDERR_LIMIT` bytes."""
        return self._pump.tail.decode("utf-8", errors="replace") if self._pump is not None else ""

    def _kill(self) -> None:
        with self._lock:
            if not self._exited:
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.returncode is not None and not _lives(self._process.pid):
            return
        with suppress(ProcessLookupError, PermissionError):  # the command has changed its user
            os.killpg(self._process.pid, number)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


def _echo(piece: bytes) -> None:
    with suppress(OSError):
        while piece:
            piece = piece[os.write(2, piece) :]


def _lives(group: int) -> bool:
    """Return whether a process of a group runs whose leader was reaped; the dead that nobody reaped do not count."""
    with suppress(ChildProcessError):  # of a worker that has to reap what it did not start, as the first of a container
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG)
    if _exists(os.kill, group) or not _exists(os.killpg, group):
        return False
    return not os.path.isdir("/proc/self") or any(_runs_in(group, entry) for entry in os.listdir("/proc"))


def _exists(signal_to: Callable[[int, int], None], number: int) -> bool:
    """Return whether a process, or a group, of a number can be signalled, or may not be."""
    try:
        signal_to(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _runs_in(group: int, entry: str) -> bool:
    """Return whether an entry of /proc is a process of a group that is not dead."""
    try:
        with open(f"/proc/{int(entry)}/stat", "rb") as about:
            state, _, its_group = about.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in b"ZX"


class _Pump:
    """Passes on what a command writes to a pipe, in a thread, and keeps the end of it."""

    def __init__(self, sink: Callable[[bytes], None], name: str) -> None:
        self.tail = b""
        self._name = name
        self._sink = sink
        self._stop_read, self._stop_write = os.pipe()  # closing the write end stops the thread

    def begin(self, pipe: IO[bytes]) -> None:
        """Start to copy a pipe."""
        self._thread = threading.Thread(target=self._run, args=(pipe,), name=self._name, daemon=True)
        self._thread.start()

    def end(self, timeout: float, rest: float | None = LINGER) -> None:
        """Wait at most `timeout` seconds for the end of the pipe, then `rest` until what lies in it is passed on.

        None waits as long as that takes. A process that writes to the pipe later gets SIGPIPE.
        """
        self._thread.join(timeout)
        os.close(self._stop_write)
        self._thread.join(rest)

    def close(self) -> None:
        """Close a pump that did not begin."""
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self, pipe: IO[bytes]) -> None:
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        ready.register(self._stop_read, select.POLLIN)
        with pipe, open(self._stop_read, "rb"):
            left = None  # how many bytes are read yet, once it is to stop
            while left is None or left > 0:
                events = dict(ready.poll())
                if left is None and self._stop_read in events:
                    left = _lying_in(pipe)
                    ready.unregister(self._stop_read)
                    continue
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    return
                left = None if left is None else left - len(chunk)
                self.tail = (self.tail + chunk)[-STDERR_LIMIT:]
                self._sink(chunk)


def _lying_in(pipe: IO[bytes]) -> int:
    number = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, number)
    return number[0]


class Guard:
    """The process that kills the commands of this process if it dies, see `guard`; the first command starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._runs: dict[str, int] = {}
        self._off = False

    def run(self, run: str, group: int) -> None:
        """Report the process group of a run; 0 for a run that is about to start."""
        with self._lock:
            self._runs[run] = group
            self._write(f"run {run} {group}\n")

    def end(self, run: str) -> None:
        """Report that a run has ended."""
        with self._lock:
            self._runs.pop(run, None)
            self._write(f"end {run}\n")

    def close(self) -> None:
        """End the guard."""
        with self._lock:
            process, self._process = self._process, None
            self._off = True
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def _write(self, line: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            try:
                process.stdin.write(line.encode())
                return
            except BrokenPipeError:
                log.warning("the guard of this worker's commands has ended: starting another")
                process.wait()
        if self._off:
            return
        try:
            self._process = self._start()
        except OSError as error:
            self._off = True
            log.warning("no guard (%s): commands will outlive this worker if it is killed", error)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a signal to the worker's process group must not end the guard
        )
        assert process.stdin is not None
        process.stdin.write("".join(f"run {run} {group}\n" for run, group in self._runs.items()).encode())
        return process


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()  # macOS before Python 3.13: the id may be reused a moment before we know of the end


class _SecondNames:
    """Gives bodies second names, each in a folder of a queue's `held/` that no other body has meanwhile.

    A folder is kept for the next body if its command left nothing there: over NFS it takes longer to make one than to
    read a message. If this process dies, a sweep removes them, with what is in them.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Storage, str]] = []

    @contextmanager
    def given(self, message: Message) -> Iterator[str]:
        """Give the body of a message a second name until the block ends."""
        if message.owner is None:  # at most once: the message is archived, so its path does not change
            yield message.path
            return
        name = message.context.sidecars.full(message.context.sidecars.parse(message.name))
        storage, folder = self._folder(message, message.owner)
        path = f"{folder}/{name.born_foreign or name.filename or message.name}"
        try:
            try:
                message.link(path)
            except LeaseLost:
                if reading.exists(folder):
                    raise
                _make(storage, folder)  # a sweep has removed it, as it was empty for long
                message.link(path)
            with suppress(OSError):  # then no folder is kept
                storage.date_back(folder)  # what a command makes in it gives it another time
            yield path
        finally:
            with suppress(OSError):
                if reading.written_ms(folder) != 0:
                    storage.remove_tree(folder)
                else:
                    storage.unlink(path)
                    self._free.append((storage, folder))

    def _folder(self, message: Message, owner: str) -> tuple[Storage, str]:
        storage, held = message.context.storage, message.context.layout.held
        for free in self._free.copy():
            if free[1].startswith(f"{held}/"):
                with suppress(ValueError):  # RACE: another thread took it
                    self._free.remove(free)
                    return free
        _make(storage, folder := f"{held}/{owner}")
        return storage, folder

    def close(self) -> None:
        """Remove the folders."""
        for storage, folder in self._free:
            with suppress(OSError):
                storage.remove_tree(folder)


def _make(storage: Storage, folder: str) -> None:
    try:
        storage.make_folder(folder, passing=True)
    except OSError as error:
        raise Halt(f"{folder} cannot be made: {error.strerror}") from error


def environment(
    message: Message, path: str, run: str, *, record: object = None, failed: object = None
) -> dict[bytes, bytes]:
    """Return the environment of a command: that of this process, what docs/cli.md lists, and the `run` for a guard."""
    variables = {
        "DROPQ_ID": message.id,
        "DROPQ_QUEUE": message.context.name,
        "DROPQ_ROOT": message.context.root.layout.path,
        "DROPQ_FILE": path,
        "DROPQ_PRIORITY": message.priority,
        "DROPQ_DELIVERY_COUNT": message.delivery_count,
        "DROPQ_TYPE": message.type,
        "DROPQ_CORRELATION_ID": message.correlation_id,
        "DROPQ_REPLY_TO": message.reply_to,
        "DROPQ_ORIGIN": message.origin,
        "DROPQ_REASON": message.dead_letter_reason,
        "DROPQ_RECEIPT": message.receipt,
        "DROPQ_RECORD": record,
        "DROPQ_FAILED": failed,
        guard.RUN: run,
        **{f"{_PROPERTY}{name}": value for name, value in message.properties.items()},
    }
    # If a worker runs inside a command, its environment has the variables of another message.
    result = {key: value for key, value in os.environb.items() if not key.startswith(_PROPERTY.encode())}
    for name, value in variables.items():
        key = _bytes(name)
        if value is None:
            result.pop(key, None)
        elif b"=" not in key:  # a variable cannot have such a name, but a property that a script wrote can
            result[key] = _bytes(value)
    return result


def _bytes(value: object) -> bytes:
    """Return a value as bytes for the environment: without NUL, and with the bytes of a file name unchanged."""
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
