"""Commands that send, receive and settle messages: shell scripts build on them.

A claim that `receive` makes outlives the command, so it always has a lease. Any process can settle it by its receipt.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from errno import EBADF
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropq.errors import LeaseLost

from . import output
from .look import body_of, first_of, record_of
from .options import Filter, Json, QueueName, Quiet, Receipts, duration, lease_of, lease_period
from .output import IO_ERROR, NEGATIVE, NO_INPUT, OK, TRY_LATER, Record
from .shell import DelayedInterrupt, Shell, UsageError, arguments, despite_closed_stdout, how_many, stdin

if TYPE_CHECKING:
    from dropq import Message, Queue, Sent, Typed
    from dropq.queue.sender import Sender

#: The columns of `receive`.
CLAIM = ("id", "receipt", "path")
#: Bytes that `send --lines` reads at once.
CHUNK = 1 << 16

Properties = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--property",
        metavar="NAME[:TYPE]=VALUE",
        help="A property. TYPE is S (text, the default), B (boolean), Y, H, I, L (whole numbers of 8 to 64 bits), "
        "F or D (float, double).",
    ),
]
Priority = Annotated[int, typer.Option("--priority", metavar="N", help="Higher is delivered first.")]
Type = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="The JMS type.")]
ReplyTo = Annotated[str | None, typer.Option("--reply-to", metavar="QUEUE", help="The queue for answers.")]
ExpiresIn = Annotated[float | None, duration("--expires-in", help="Expire it after this long.")]
Delay = Annotated[float | None, duration("--delay", help="Deliver it only after this long.")]
OwnId = Annotated[str | None, typer.Option("--id", metavar="ID", help="The message's id, instead of a generated id.")]
Files = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Files to send; - is stdin.")]
CorrelationId = Annotated[str | None, typer.Option("--correlation-id", metavar="ID", help="The JMS correlation id.")]
Lines = Annotated[bool, typer.Option("--lines", help="Send each line as a message of its own.")]
Move = Annotated[bool, typer.Option("--move", help="Move the files instead of copying them.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="The reason, kept with the message in error/.")]


def send(
    ctx: typer.Context,
    name: QueueName,
    files: Files = None,
    properties: Properties = None,
    priority: Priority = 4,
    type: Type = None,
    correlation_id: CorrelationId = None,
    reply_to: ReplyTo = None,
    expires_in: ExpiresIn = None,
    delay: Delay = None,
    id: OwnId = None,
    lines: Lines = False,
    move: Move = False,
    wait_reply: Annotated[
        float | None, duration("--wait-reply", help="Wait this long for the answer, and print its body.")
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Send the records of the input, many in a message.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="Of the records: jsonl (the default), text, csv or frames."),
    ] = None,
    max_records: Annotated[
        int | None, typer.Option("--max-records", metavar="N", help="Records in a message, at most; else 1000.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", metavar="N", help="Bytes in a message, at most; else 1048576.")
    ] = None,
    linger: Annotated[
        float | None, duration("--linger", help="How long a record waits for others, at most; else 1s.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Send each FILE, or standard input, as a message; prints the ids.

    Without FILE it sends standard input, unless that is a terminal. Once an id is printed, the message is in target/,
    as durable as the queue's configuration asks. When the queue is full (max_unprocessed) it exits with 75; if that
    queue discards new messages, it prints no id and exits with 1. What is sent to a topic is published. The message of
    a FILE has the file's own name in the property filename, unless -p gives one.

    With --wait-reply it sends one message, prints the body of the answer instead of the id, which stderr gets, and
    exits with 75 when no answer came in time: the message stays sent, and a later answer is refused to its sender.

    With --records it sends the lines of the input, or the rows of csv, or frames, many in one message, and follows a
    pipe; prints the id of each message, and how many records it has. A signal that ends the command lets it send what
    it has read.
    """
    shell = Shell(ctx, json, quiet)

    def open_queue() -> Queue:
        return shell.root.queue(output.unescape(name))

    bundles: dict[str, Any] = {"format": format, "max_records": max_records, "max_bytes": max_bytes, "linger": linger}
    given = {option: value for option, value in bundles.items() if value is not None}
    if records:
        if lines or move or id is not None or type is not None or wait_reply is not None:
            raise UsageError(
                "--records goes with no --lines, --move, --id, --wait-reply or --type: the format is the type"
            )
        from .records import send_records

        fields = {
            "priority": priority,
            "correlation_id": correlation_id,
            "reply_to": reply_to,
            "expires_in": expires_in,
            "delay": delay,
            "properties": _properties(properties),
        }
        return send_records(shell, open_queue, _sources(files), fields=fields, **given)
    if given:
        raise UsageError(f"--{next(iter(given)).replace('_', '-')} needs --records; nothing was sent")
    return send_all(
        shell,
        open_queue,
        files,
        lines=lines,
        move=move,
        id=id,
        properties=properties,
        priority=priority,
        type=type,
        correlation_id=correlation_id,
        reply_to=reply_to,
        expires_in=expires_in,
        delay=delay,
        wait_reply=wait_reply,
    )


def send_all(
    shell: Shell,
    open_queue: Callable[[], Queue],
    files: list[str] | None,
    *,
    lines: bool,
    move: bool,
    id: str | None,
    properties: list[str] | None,
    wait_reply: float | None = None,
    **fields: Any,
) -> int:
    """Send files, or their lines, and print the ids; return the exit code.

    Args:
        shell: the run of the command.
        open_queue: returns where it sends to; called when the arguments are checked.
        files: the files; without any, standard input.
        lines, move, id, properties, wait_reply: as the options of `send`.
        fields: the other arguments of `Queue.send`.
    """
    sources = _sources(files, id=id, lines=lines, move=move)
    if wait_reply == 0:
        raise UsageError("--wait-reply 0: an answer takes longer; nothing was sent")
    if wait_reply is not None and (lines or len(sources) > 1 or fields["reply_to"] is not None):
        raise UsageError("--wait-reply sends one message: one FILE with it, no --lines, and no --reply-to of your own")
    try:
        fields = {**fields, "message_id": id, "properties": _properties(properties)}
        queue = open_queue()
        if wait_reply is not None:
            return _Request(shell, queue, fields).send(sources[0], move=move, timeout=wait_reply)
        sending = Sending(shell, queue, fields)
        return sending.send_lines(sources) if lines else sending.send_files(sources, move=move)
    except ValueError as error:  # all messages share what is wrong
        error.add_note("nothing was sent")
        raise


def reply(
    ctx: typer.Context,
    name: QueueName,
    receipt: Annotated[
        str,
        typer.Argument(metavar="RECEIPT", help="The receipt, or the id, of the message to answer.", show_default=False),
    ],
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="The file to send; - is stdin.")] = None,
    properties: Properties = None,
    priority: Priority = 4,
    type: Type = None,
    correlation_id: Annotated[
        str | None,
        typer.Option("--correlation-id", metavar="ID", help="Instead of the message's correlation id, else its id."),
    ] = None,
    reply_to: ReplyTo = None,
    expires_in: ExpiresIn = None,
    delay: Delay = None,
    id: OwnId = None,
    json: Json = False,
) -> int:
    """Answer a message with FILE, or standard input; prints the id.

    The answer goes to the queue of the same root that the message's reply-to names. Its correlation id is that of the
    message, or the message's id if it has none. The message itself is not settled: acknowledge it afterwards.
    """
    from dropq.queue.replies import correlated, reply_queue

    shell = Shell(ctx, json)
    sources = _sources(None if file is None else [file], id=id)
    (named,) = arguments([receipt])
    queue = shell.queue(name)
    message = first_of(queue, named) if _is_id(named) else queue.claimed(named)
    fields = {
        "priority": priority,
        "type": type,
        "correlation_id": correlation_id,
        "reply_to": reply_to,
        "expires_in": expires_in,
        "delay": delay,
        "properties": _properties(properties),
        "message_id": id,
    }
    return Sending(shell, reply_queue(message), correlated(message, fields)).send_files(sources, move=False)


def _sources(files: list[str] | None, *, id: str | None = None, lines: bool = False, move: bool = False) -> list[str]:
    if not files and sys.stdin.isatty():
        raise UsageError("name a FILE, or give - to type a message on this terminal")
    sources = files or ["-"]
    if id is not None and (lines or len(sources) > 1):
        raise UsageError("--id names one message: send one FILE with it, and no --lines")
    if move and (lines or "-" in sources):
        raise UsageError("--move takes whole files: no --lines, and nothing from standard input")
    return sources


def _properties(texts: list[str] | None) -> dict[str, Typed]:
    from dropq.format.typed import read_property

    try:
        return dict(map(read_property, texts or ()))
    except ValueError as error:
        raise UsageError(f"-p {error}; nothing was sent") from error


class Sending:
    """One run of `send`: it prints the id of each message as soon as the message is durable, however the command ends.

    Args:
        shell: the run of the command.
        queue: where it sends to.
        fields: the arguments of `Queue.send` that all messages share.
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
                self._sent_lines(file), "sent", size, size=None if size is None else _in_file
            ):
                pass

    def _sent_lines(self, file: BufferedReader) -> Iterator[bytes]:
        """Send each line of a file; yield it after that."""
        chunks = _chunks(file)
        for chunk in chunks:
            self._lines_read += len(chunk)
            try:
                for batch in _batches(chunk):
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
        with DelayedInterrupt() as interrupt:
            while self._sent:
                sent = self._sent[0]
                if sent.accepted or self._shell.json:  # a bare id means that the message is in target/
                    self._print(sent)
                self._accepted += sent.accepted
                self._discarded += not sent.accepted
                self._undistributed += sent.accepted and sent.distributed is False
                if sent.delivered_to in self._queue._overflow_goals:
                    self._overflowed[sent.delivered_to] += 1
                else:
                    self._letters += sent.accepted and self._is_letter(sent)
                del self._sent[0]
        if interrupt.came:
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
        for goal, count in self._overflowed.items():
            output.note(f"overflowed={count}: queue {self._queue.name} was full; they went to {goal}")
        if self._letters:
            there = f"went to the root's dead-letter queue {self._shell.root.context.config.dead_letter_queue}"
            output.note(f"dead_letters={self._letters}: queue {self._queue.name} is not there; they {there}")

    def _report_sum(self, code: int) -> None:
        not_sent = self._lines_read - self._accepted - self._discarded
        if code and not_sent > 0:
            output.note(f"sent={self._accepted} not_sent={not_sent}")
        elif self._shell.quiet:
            output.note(f"sent={self._accepted}")

    def _is_letter(self, sent: Sent) -> bool:
        letters = self._shell.root.context.config.dead_letter_queue
        return sent.delivered_to == letters != self._queue.name


class _Request:
    """One run of `send --wait-reply`: a message is sent, its answer is awaited, and the answer's body is printed.

    Args:
        shell: the run of the command.
        queue: where it sends to.
        fields: the other arguments of `Queue.request`.
    """

    def __init__(self, shell: Shell, queue: Queue, fields: Mapping[str, Any]) -> None:
        self._shell = shell
        self._queue = queue
        self._fields = fields
        self._sent: list[Sent] = []

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
        return self._print(self._sent[0], answer)

    def _print(self, sent: Sent, answer: Message | None) -> int:
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

    def end(number: int, frame: object) -> None:
        came.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise _Ended

    # What a parent has the command ignore, as nohup does, stays ignored.
    before = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in before:
        signal.signal(each, end)
    try:
        yield
    except _Ended:
        pass
    finally:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
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


def _in_file(line: bytes) -> int:
    """Return the bytes of a line in its file, with its end."""
    return len(line) + 1


def _opened(path: str) -> BufferedReader:
    from dropq.storage.failures import error_context

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


def _batches(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Yield lines, as many at a time as `send_many` makes durable together."""
    from dropq.queue.sender import BATCH

    for start in range(0, len(lines), BATCH):
        yield lines[start : start + BATCH]


def receive(
    ctx: typer.Context,
    name: QueueName,
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Receive at most N messages.")] = 1,
    wait: Annotated[float | None, duration("--wait", help="How long to wait for the first message.")] = None,
    lease: Annotated[
        float | None, lease_period("--lease", help="How long the claim holds; else the queue's lease_period, else 60s.")
    ] = None,
    filter: Filter = None,
    json: Json = False,
) -> int:
    """Claim messages; prints the id, receipt and path of each.

    Settle each message by its receipt, with ack, nack, fail or reject. It returns to the queue when its lease runs out
    first, and at once when its receipt cannot be written. Exits with 66 when there is no message. A queue that delivers
    at most once settles a message before it prints it, without a receipt.
    """
    shell = Shell(ctx, json)
    queue = shell.queue(name)
    shell.warn_of_topic(queue)
    period = lease_of(queue, lease)
    printed: list[str | None] = []
    with (
        despite_closed_stdout(),
        queue.subscribe(filter=filter, max_backlog=count, lease_period=period, detached=True) as subscription,
    ):
        try:
            messages = subscription.receive_many(count, timeout=wait or 0)
            _hand_over(shell, messages, printed)
        except BaseException:
            with DelayedInterrupt():  # nobody knows its receipt: it need not wait for the end of its lease
                if returned := subscription._give_back_but({owner for owner in printed if owner}):
                    output.note(f"{how_many(returned, None, 'given back')}: their receipts were not printed")
            raise
    if messages:
        return OK
    output.note(_nothing_of(queue))
    return NO_INPUT


def _nothing_of(queue: Queue) -> str:
    """Write why there is nothing to receive."""
    if queue.paused:
        return f"queue {queue.name} is paused: nothing comes until `dropq resume {queue.name}`, or `dropq resume --all`"
    if waiting := queue.counts()["target"]:
        why = f"`dropq browse {queue.name} --explain` shows why"
        return f"nothing to receive: of {waiting} in target/ of {queue.name} none is for this consumer now; {why}"
    return f"nothing to receive: queue {queue.name} has no message in target/"


def _hand_over(shell: Shell, messages: list[Message], printed: list[str | None]) -> None:
    """Print claims, and add the owner of each claim that was printed; Ctrl-C waits for the end of the line."""
    for message in messages:
        record = record_of(message)
        with DelayedInterrupt() as interrupt:
            try:
                if shell.on_terminal:
                    output.write(("\n" if printed else "") + output.block(record, (*CLAIM, "deadline")))
                else:
                    output.write(output.line(record, CLAIM, as_json=shell.json))
            except OSError as error:
                output.discard()
                if message.owner is None:  # delivered at most once: it cannot come again
                    output.note(f"message {message.id} was received and is settled; see {record['path']}")
                output.note(f"error: message {message.id} could not be written to standard output: {error.strerror}")
                raise typer.Exit(NEGATIVE if isinstance(error, BrokenPipeError) else IO_ERROR) from error
            printed.append(message.owner)
        if interrupt.came:
            raise KeyboardInterrupt(f"{how_many(len(printed), len(messages), 'received')}")


# -- settling --------------------------------------------------------------------------------------------------


def ack(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    defer: Annotated[
        bool, typer.Option("--defer", help="Remember the ack of a generated id whose message is not here yet.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Acknowledge messages: they are done. One whose body was changed meanwhile goes to error/, and the exit code is 1.

    By its id, a message that waits is acknowledged, too. With --defer, the ack of a message that is not here yet is
    remembered for the queue's deferred_ack_expiration. When the message comes, it is archived instead of delivered.
    """
    shell = Shell(ctx, json, quiet)
    queue = shell.queue(name)
    named = arguments(receipts, column=1)
    refused: list[str] = []

    def acknowledge(receipt: str) -> None:
        if not receipt and _settles_first(queue):
            output.note("this queue settles messages before it delivers them: there is nothing to acknowledge")
            return
        record = _acked_by_id(queue, receipt, defer) if _is_id(receipt) else _acked(queue.claimed(receipt))
        if shell.json and not shell.quiet:
            shell.line(record, ())
        if record["state"] == "error":  # its body was changed, as the log said
            refused.append(receipt)

    with despite_closed_stdout():
        code = shell.each(_deferrable(named) if defer else named, acknowledge, "acknowledged")
    return code or (NEGATIVE if refused else OK)


def _is_id(text: str) -> bool:
    from dropq.format.claims import split_receipt
    from dropq.format.message_file import MessageFile

    claim = MessageFile(split_receipt(text)[0]).claim
    return claim is None or not claim.ours


def _settles_first(queue: Queue) -> bool:
    return queue.config.semantics == "at-most-once"


def _deferrable(named: Iterable[str]) -> list[str]:
    """Return the names, once all of them are known to be receipts, or ids whose acks can be deferred."""
    from dropq.lifecycle import early_acks

    found = list(named)
    for id in filter(_is_id, found):
        try:
            early_acks.check(id)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found


def _acked(message: Message) -> Record:
    message.ack()
    return {"id": message.id, "state": message.state, "receipt": message.receipt}


def _acked_by_id(queue: Queue, id: str, defer: bool) -> Record:
    from dropq.lifecycle import early_acks

    if queue.ack(id, defer):
        return {"id": id, "state": "processed" if queue.config.history else "removed", "receipt": None}
    if not defer or id not in early_acks.remembered(queue.layout):
        return _acked(queue.claimed(id))  # raises the error that explains why
    output.note(f"{output.escape(id)} was not acknowledged now: its ack is remembered")
    return {"id": id, "state": None, "receipt": None}


def nack(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    delay: Annotated[float | None, duration("--delay", help="Keep it from all consumers for this long.")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Give messages back, to be delivered again; a cancel is counted."""
    return _settle(Shell(ctx, json, quiet), name, receipts, lambda message: message.nack(delay))


def fail(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    reason: Reason = "no reason was given",
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Report that handling messages failed.

    A message is delivered again, as often as the queue's redelivery_attempts allows, and then ends as exhausted says.
    """
    return _settle(Shell(ctx, json, quiet), name, receipts, lambda message: message.fail(reason))


def reject(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    reason: Reason = "no reason was given",
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Refuse messages for good: they go to error/ at once."""
    return _settle(Shell(ctx, json, quiet), name, receipts, lambda message: message.reject(reason))


def extend(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    by: Annotated[
        float | None, lease_period("--by", help="How long from now; else the queue's lease_period, else 60s.")
    ] = None,
    json: Json = False,
) -> int:
    """Renew leases; prints the new receipts."""

    def renew(message: Message) -> None:
        message.extend(lease_of(message.queue, by))

    return _settle(Shell(ctx, json), name, receipts, renew, columns=("receipt",))


def _settle(
    shell: Shell, name: str, receipts: Iterable[str], verb: Callable[[Message], object], columns: tuple[str, ...] = ()
) -> int:
    queue = shell.queue(name)

    def settle(receipt: str) -> None:
        if not receipt and _settles_first(queue):
            raise LeaseLost("this queue settles messages before it delivers them: it is too late for that")
        message = queue.claimed(receipt)
        verb(message)
        if columns or (shell.json and not shell.quiet):
            shell.line({"id": message.id, "state": message.state, "receipt": message.receipt}, columns)

    with despite_closed_stdout():
        return shell.each(arguments(receipts, column=1), settle, "settled")


def record_of_send(sent: Sent) -> Record:
    """Return what is shown of a send; whether it is distributed only of what was published."""
    record = sent._asdict()
    return record if sent.distributed is not None else {key: record[key] for key in record if key != "distributed"}
