"""One run of a command that sends: what was sent is printed as soon as it is durable, however the command ends."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from errno import EBADF
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import typer

from dropq.storage.failures import error_context

from . import output
from .look import body_of
from .output import IO_ERROR, NEGATIVE, OK, TRY_LATER, Record
from .shell import Shell, delayed_interrupt, despite_closed_stdout, handling, how_many, stdin

if TYPE_CHECKING:
    from dropq import Message, Queue, Sent
    from dropq.queue.sender import Sender

#: Bytes that `send --lines` reads at once.
CHUNK = 1 << 16


class Sending:
    """One run of `send`: it prints the id of each message as soon as the message is durable, however the command ends.

    All messages share `fields`, arguments of `Queue.send`.
    """

    def __init__(self, shell: Shell, queue: Sender, fields: Mapping[str, Any]) -> None:
        self._shell = shell
        self._queue = queue
        self._fields = fields
        self._sent: list[Sent] = []  # their ids are not printed yet
        self._accepted = self._discarded = self._undistributed = self._letters = self._lines_read = 0
        self._overflowed: Counter[str] = Counter()  # by where they went
        self._reader_left = False

    def send_files(self, sources: list[str], *, move: bool) -> int:
        """Send each file, or standard input, as one message; return the exit code."""
        return self._send_each(sources, partial(self._send_file, move=move), total=len(sources), doing="sending")

    def send_lines(self, sources: list[str]) -> int:
        """Send each line of the files, or of standard input, as a message; return the exit code."""
        return self._send_each(sources, self._send_lines)

    def _send_each(
        self, sources: list[str], send: Callable[[str], None], *, total: int | None = None, doing: str = ""
    ) -> int:
        """Send each source; report how many messages were sent where that is not all of them."""
        with despite_closed_stdout():
            try:
                code = self._shell.each(sources, send, doing=doing)
            except KeyboardInterrupt as error:
                self._print_ids()
                done = how_many(self._accepted, total, "sent")
                raise KeyboardInterrupt(f"{done}, nothing after that") from error
            except typer.Exit as error:  # ids cannot be written: nothing more is sent
                code = error.exit_code
        self._report(code)
        return code or (NEGATIVE if self._discarded else OK)

    def _send_file(self, source: str, *, move: bool) -> None:
        try:
            self._queue._send_file_into(self._sent, stdin() if source == "-" else source, move=move, **self._fields)
        finally:
            self._print_ids()

    def _send_lines(self, source: str) -> None:
        with nullcontext(stdin()) if source == "-" else _opened(source) as file:
            size = _bytes_left(file)
            for _ in self._shell.progress(
                self._sent_lines(file), "sent", size, size=None if size is None else lambda line: len(line) + 1
            ):
                pass

    def _sent_lines(self, file: BufferedReader) -> Iterator[bytes]:
        """Send each line of a file, as many at a time as `send_many` makes durable together; yield it after that."""
        from dropq.queue.sender import BATCH

        chunks = _chunks(file)
        for chunk in chunks:
            self._lines_read += len(chunk)
            try:
                for start in range(0, len(chunk), BATCH):
                    batch = chunk[start : start + BATCH]
                    self._send_batch(batch)
                    yield from batch
            except Exception:
                if file.seekable():  # the report counts all of a file; a pipe may never end
                    self._lines_read += sum(map(len, chunks))
                raise

    def _send_batch(self, batch: list[bytes]) -> None:
        try:
            self._queue._send_into(self._sent, ({**self._fields, "body": line} for line in batch))
        finally:
            self._print_ids()

    def _print_ids(self) -> None:
        """Print the ids of what was sent since the last time; Ctrl-C waits for that."""
        with delayed_interrupt() as interrupted:
            while self._sent:
                sent = self._sent[0]
                if sent.accepted or self._shell.json:  # a bare id means that the message is in target/
                    self._print(sent)
                self._accepted += sent.accepted
                self._discarded += not sent.accepted
                self._undistributed += sent.accepted and sent.distributed is False
                if sent.delivered_to in self._queue._overflow_destinations:
                    self._overflowed[sent.delivered_to] += 1
                else:
                    letters = self._shell.root.context.config.dead_letter_queue
                    self._letters += sent.accepted and sent.delivered_to == letters != self._queue.name
                del self._sent[0]
        if interrupted:
            raise KeyboardInterrupt

    def _print(self, sent: Sent) -> None:
        if self._reader_left or self._shell.quiet:
            return
        try:
            output.write(self._line(sent))
        except BrokenPipeError:  # the reader has seen enough; sending goes on
            output.discard()
            self._reader_left = True
        except OSError as error:
            output.discard()
            for unprinted in filter(lambda sent: sent.accepted, self._sent):
                self._accepted += 1
                what = f"message {unprinted.id} was sent; its id could not be written to standard output"
                output.note(f"error: {what}: {error.strerror}")
            raise typer.Exit(IO_ERROR) from error

    def _line(self, sent: Sent) -> str:
        return output.line(record_of_send(sent), ("id",), as_json=self._shell.json)

    def _report(self, code: int) -> None:
        """Report how many messages were sent, where that is not all, or not all ids were read."""
        self._report_sum(code)
        if self._reader_left:
            output.note(f"sent={self._accepted}: not all ids were read")
        if self._discarded:
            output.note(f"discarded={self._discarded}")
        if self._undistributed:
            later = "sent, and not with every receiver yet: they get it later; do not send it again"
            output.note(f"not_distributed={self._undistributed}: {later}")
        for destination, count in self._overflowed.items():
            output.note(f"overflowed={count}: queue {self._queue.name} was full; they went to {destination}")
        if self._letters:
            there = f"went to the root's dead-letter queue {self._shell.root.context.config.dead_letter_queue}"
            output.note(f"dead_letters={self._letters}: queue {self._queue.name} is not there; they {there}")

    def _report_sum(self, code: int) -> None:
        not_sent = self._lines_read - self._accepted - self._discarded
        if code and not_sent > 0:
            output.note(f"sent={self._accepted} not_sent={not_sent}")
        elif self._shell.quiet:
            output.note(f"sent={self._accepted}")


def record_of_send(sent: Sent) -> Record:
    """Return what is shown of a send; whether it is distributed only of what was published."""
    record = sent._asdict()
    return record if sent.distributed is not None else {key: record[key] for key in record if key != "distributed"}


class Request(Sending):
    """One run of `send --wait-reply`: it sends a message, waits for the answer, and prints the answer's body."""

    _queue: Queue

    def send(self, source: str, *, move: bool, timeout: float) -> int:
        """Send a file, or standard input, and wait for the answer; return the exit code."""

        def send(**fields: Any) -> Sent:
            file = stdin() if source == "-" else source
            self._queue._send_file_into(self._sent, file, move=move, **fields)
            if self._sent[0].accepted and not self._shell.quiet and not self._shell.json:
                output.note(f"sent {self._sent[0].id}")
            return self._sent[0]

        try:
            with _ended_by_signals(), self._queue:
                answer = self._queue._request(send, timeout, self._fields)
        except KeyboardInterrupt as error:
            sent = f"message {self._sent[0].id} was sent" if self._sent else "nothing was sent"
            raise KeyboardInterrupt(f"{sent}, and no answer is awaited") from error
        return self._print_answer(self._sent[0], answer)

    def _print_answer(self, sent: Sent, answer: Message | None) -> int:
        try:
            if self._shell.json:
                output.write(output.json_line({**record_of_send(sent), "reply": answer and _answer_of(answer)}))
            elif answer is not None:
                _write_body(answer.body)
        except OSError as error:
            output.discard()
            what = f"the answer to message {sent.id} came, and could not be written to standard output"
            output.note(f"error: {what}: {error.strerror}")
            return IO_ERROR
        if answer is None:
            output.note(f"no answer to message {sent.id} came in time: it stays sent, and a later answer is refused")
            return TRY_LATER
        return OK


def _answer_of(answer: Message) -> Record:
    fields = ("id", "correlation_id", "timestamp", "type", "priority", "properties")
    return {**{field: getattr(answer, field) for field in fields}, **body_of(answer.body)}


def _write_body(data: bytes) -> None:
    """Write a body to stdout as it is; a terminal gets no control characters."""
    if sys.stdout.isatty():
        output.write(output.visible(os.fsdecode(data)))
    elif sys.__stdout__ is None:
        raise OSError(EBADF, os.strerror(EBADF))
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


class _Ended(BaseException):
    """Raised by a signal that ends the command."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave the block in good order at SIGTERM and SIGHUP, too, and then end by the signal; a second ends at once."""
    came: list[int] = []

    def end(number: int, restore: Callable[[], None]) -> None:
        came.append(number)
        restore()
        raise _Ended

    with suppress(_Ended), handling((signal.SIGTERM, signal.SIGHUP), end):
        yield
    if came:
        os.kill(os.getpid(), came[0])


def _bytes_left(file: BufferedReader) -> int | None:
    """Return how many bytes of a file were not read yet; None for a pipe."""
    if not file.seekable():
        return None
    here = file.tell()
    left = file.seek(0, os.SEEK_END) - here
    file.seek(here)
    return left


def _opened(path: str) -> BufferedReader:
    with error_context("no line of it was sent"):
        return open(path, "rb")


def _chunks(file: BufferedReader) -> Iterator[list[bytes]]:
    """Yield lines without their ends, as many at a time as there are, so that a slow writer's are not held back."""
    begun: list[bytes] = []
    while data := file.read1(CHUNK):
        first, *others = data.split(b"\n")
        begun.append(first)
        if others:
            yield [b"".join(begun), *others[:-1]]
            begun = others[-1:]
    if any(begun):
        yield [b"".join(begun)]
