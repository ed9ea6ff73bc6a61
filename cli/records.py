"""`send --records`: the records of files, or of a pipe that it follows, many in one message.

It always reports records that it read and did not send: a record is in the queue, in that sum, or unread.
"""

from __future__ import annotations

import io
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from math import ceil
from typing import Any

from dropq import Queue, RecordWriter, Sent
from dropq.errors import DropqError, QueueFull
from dropq.policies.send_limits import MustWait
from dropq.records.formats import MARK, format_of
from dropq.records.reader import BLOCK, RecordReader
from dropq.records.rows import LINE_FEED
from dropq.storage.failures import describe, error_context

from . import output
from .output import BAD_DATA, NEGATIVE, OK
from .sending import Sending, record_of_send
from .shell import Shell, UsageError, despite_closed_stdout, handling, stdin

#: Seconds that a record waits for others.
LINGER = 1.0


def send_records(
    shell: Shell,
    open_queue: Callable[[], Queue],
    sources: list[str],
    *,
    fields: Mapping[str, Any],
    format: str = "jsonl",
    linger: float = LINGER,
    **limits: Any,
) -> int:
    """Send the records of files, and print the id of each message, and how many records it has; return the exit code.

    It calls `open_queue` once the arguments are checked. All messages share `fields`, arguments of `Queue.send`; the
    other options are those of `Queue.record_writer`.
    """
    try:
        format_of(None, format)
    except ValueError as error:
        raise UsageError(f"--format: {error}") from None
    queue = open_queue()
    open_writer = partial(_Writer, queue, format, linger=linger, **limits, **fields)
    open_writer(header=b"column" if format == "csv" else None)  # what it refuses is refused before anything is read
    stops = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    try:
        with closing(_Ending(queue)) as ending, handling(stops, ending.note):
            code = _Records(shell, queue, format, open_writer, ending).send(sources)
    except _EndedAtOnce as error:
        _end_by(error.number)
        raise
    if code == OK and ending.came:
        _end_by(ending.came[0])
    return code


def _end_by(number: int) -> None:
    """End as the signal ends a program that does not handle it; Ctrl-C is reported, as of all commands."""
    if number != signal.SIGINT:
        output.flush()
        os.kill(os.getpid(), number)


class _Writer(RecordWriter):
    """A record writer without a thread: the command itself waits for more records, and sends what has lingered."""

    def _call_thread(self) -> None:
        pass

    def _send_first(self) -> None:
        try:
            super()._send_first()
        except MustWait as error:  # a signal has ended the wait
            raise QueueFull(str(error)) from error


class _Ended(Exception):
    """Raised when a signal ends the reading: the unfinished record is not sent, and the command reports that."""


class _EndedAtOnce(KeyboardInterrupt):
    """Raised by the second signal, wherever it comes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Ending:
    """The signals that ended the command, and its waits for room; and a pipe that is readable when one has come."""

    def __init__(self, queue: Queue) -> None:
        self.came: list[int] = []
        self.wakes, self._wake = os.pipe()
        self._queue = queue
        self._raises = False

    def note(self, number: int, restore: Callable[[], None]) -> None:
        """Note a signal; the second raises _EndedAtOnce, and a third does what it did before."""
        if self.came:
            restore()
            raise _EndedAtOnce(number)
        self.came.append(number)
        os.write(self._wake, b"!")
        self._queue._stop_waiting()
        if self._raises:
            raise _Ended

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise _Ended in the block as soon as a signal comes: it may wait for ever."""
        self._raises = True
        try:
            if self.came:
                raise _Ended
            yield
        finally:
            self._raises = False

    def close(self) -> None:
        os.close(self.wakes)
        os.close(self._wake)


class _Records(Sending):
    """One run of `send --records`; `open_writer` returns a writer for records behind a header."""

    def __init__(
        self,
        shell: Shell,
        queue: Queue,
        body_format: str,
        open_writer: Callable[..., RecordWriter],
        ending: _Ending,
    ) -> None:
        super().__init__(shell, queue, {})
        self._format = body_format
        self._longest = queue.config.max_record_bytes
        self._open_writer = open_writer
        self._ending = ending
        self._writer: RecordWriter | None = None
        self._header: bytes | None = None
        self._records: dict[str, int] = {}  # by the id of the message
        self._records_sent = 0
        self._warned = False

    def send(self, sources: list[str]) -> int:
        """Send the records of each file, or of standard input; return the exit code."""
        code = OK
        with despite_closed_stdout():
            try:
                with suppress(_Ended):
                    for source in sources:
                        self._send_source(source)
                self._flush()
            except (ValueError, DropqError, OSError) as error:  # what was read before it is sent
                code = output.exit_code(error) if isinstance(error, DropqError | OSError) else BAD_DATA
                self._complain(error)
            except BaseException as error:
                self._report_left(always=isinstance(error, KeyboardInterrupt))
                raise
        if code == OK and self._ending.came[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt(f"{self._records_sent} records sent, nothing after that")
        self._report(code)
        return code or (NEGATIVE if self._discarded else OK)

    def _flush(self) -> None:
        """Send what was read, and print what was sent."""
        try:
            if self._writer is not None:
                self._writer._flush()
        finally:
            self._print_sent()

    def _complain(self, error: Exception) -> None:
        """Send what was read before an error, and report the error, and why it cannot be sent, if that is another."""
        errors = [error]
        try:
            self._flush()
        except (DropqError, OSError) as refused:
            if str(refused) != str(error):
                errors.append(refused)
        for each in errors:
            output.complain(each)

    def _report_left(self, *, always: bool) -> None:
        left = 0 if self._writer is None else self._writer._waiting()
        if left or always:
            output.note(f"sent={self._records_sent} not_sent={left}")

    def _report_sum(self, code: int) -> None:
        if code or self._shell.quiet:
            self._report_left(always=True)

    def _send_source(self, source: str) -> None:
        with nullcontext(stdin()) if source == "-" else self._opened(source) as file:
            stays = file.seekable()  # what is not read of a file stays there; of a pipe, all that was read is sent
            pipe = None if stays else _Followed(file.fileno(), self._wait, self._ending.wakes)
            source_file = file if pipe is None else io.BufferedReader(pipe, BLOCK)
            reader = RecordReader(source_file, self._format, max_bytes=self._longest)
            whole = 0
            try:
                for number, _, end, record in reader:
                    whole = end + (self._format != "frames")
                    self._write(record, number, reader.head)
                    if stays and self._ending.came:
                        raise _Ended
            except (_Ended, KeyboardInterrupt) as ended:
                if pipe is not None:
                    self._report_rest(pipe, whole or len(reader.head), at_once=isinstance(ended, KeyboardInterrupt))
                raise
            except ValueError as error:
                where = "standard input" if source == "-" else source
                raise ValueError(f"{where}: {error}; it was not sent, nor was what follows it") from error

    def _opened(self, path: str) -> io.BufferedReader:
        with error_context("nothing of it was sent"), self._ending.raising():  # a fifo waits for who writes to it
            return io.BufferedReader(io.FileIO(path), BLOCK)

    def _report_rest(self, pipe: _Followed, end: int, *, at_once: bool) -> None:
        """Report how many bytes were read behind the last record and its line feed, which end at `end`.

        Unless it ended `at_once`, these bytes are only empty lines if all lines have ended.
        """
        left = pipe.taken - end
        if left > 0 and (at_once or not (pipe.ended_line and self._format in ("jsonl", "text"))):
            output.note(f"{left} bytes behind the last whole record were read, and not sent")

    def _write(self, record: bytes, number: int, head: bytes) -> None:
        writer = self._writer
        if writer is None or (self._format == "csv" and head != self._header):
            self._flush()
            self._header = head
            header = head.removeprefix(MARK).lstrip(b"\r\n") if self._format == "csv" else None
            writer = self._writer = self._open_writer(header=header)
        try:
            writer.write(record)
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from error
        if writer._sent:
            self._print_sent()

    def _wait(self, poll: select.poll) -> None:
        """Wait until a pipe has more; meanwhile, send what has lingered."""
        while not self._ending.came:
            due = None if self._writer is None else self._writer._due()
            left = None if due is None else due - time.monotonic()
            if left is not None and left <= 0:
                self._send_lingering()
            elif poll.poll(None if left is None else ceil(left * 1000)) and not self._ending.came:
                return
        raise _Ended

    def _send_lingering(self) -> None:
        """Send what has lingered; what the queue refuses is tried again later."""
        try:
            self._flush()
            self._warned = False
        except (DropqError, OSError) as error:
            if not self._warned and not self._ending.came:
                output.note(f"warning: {describe(error)}; it is tried again")
            self._warned = True

    def _print_sent(self) -> None:
        for sent, records in () if self._writer is None else self._writer._take_sent():
            self._records[sent.id] = records
            self._records_sent += records if sent.accepted else 0
            self._sent.append(sent)
        self._print_ids()
        self._records.clear()

    def _line(self, sent: Sent) -> str:
        record = {**record_of_send(sent), "records": self._records[sent.id]}
        return output.line(record, ("id", "records"), as_json=self._shell.json)


class _Followed(io.RawIOBase):
    """A pipe: each read of it calls `wait` with what polls it, which returns when the pipe has more.

    The descriptor `wakes` ends a poll, too.
    """

    def __init__(self, fd: int, wait: Callable[[select.poll], None], wakes: int) -> None:
        self._fd = fd
        self._wait = wait
        #: How many bytes were read, and whether the last of them is a line feed.
        self.taken, self.ended_line = 0, False
        self._poll = select.poll()
        for each in (fd, wakes):
            self._poll.register(each, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read the bytes in the pipe, once there are any; return 0 when the pipe has ended."""
        self._wait(self._poll)
        if count := os.readv(self._fd, [buffer]):
            self.taken, self.ended_line = self.taken + count, buffer[count - 1] == LINE_FEED
        return count
