"""Sending, receiving and settling messages: what shell scripts build on.

A claim that `receive` makes outlives the command, so it always has a lease; its receipt settles it from anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropq.errors import LeaseLost

from . import output
from .look import record_of
from .options import Filter, Json, QueueName, Receipts, duration, lease_period
from .output import IO_ERROR, NEGATIVE, NO_INPUT, OK, Record
from .shell import HeldOff, Shell, UsageError, arguments, so_many, stdin, whoever_reads

if TYPE_CHECKING:
    from dropq import Message, Queue, Sent, Typed

#: Seconds that a claim is leased for when neither the command nor the queue says.
LEASE = 60.0
#: Bytes that are read at once of what is sent line by line: the complete lines among them go as one batch.
LINES = 1 << 16

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept with it, for whoever reads error/.")]


def send(
    ctx: typer.Context,
    queue: QueueName,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="What to send; - for stdin.")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--property", metavar="NAME[:TYPE]=VALUE", help="A property: S, a string, or B Y H I L F D."
        ),
    ] = None,
    priority: Annotated[int, typer.Option("--priority", metavar="N", help="Higher goes first.")] = 4,
    type: Annotated[str | None, typer.Option("--type", metavar="T", help="The JMS type.")] = None,
    correlation_id: Annotated[
        str | None, typer.Option("--correlation-id", metavar="C", help="What it is about.")
    ] = None,
    reply_to: Annotated[str | None, typer.Option("--reply-to", metavar="Q", help="Where answers should go.")] = None,
    expires_in: Annotated[float | None, duration("--expires-in", help="Expire it after this long.")] = None,
    delay: Annotated[float | None, duration("--delay", help="Keep it from consumers for this long.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="An id of your own; else one is made.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Send each line as a message of its own.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Move the files instead of copying them.")] = False,
    json: Json = False,
) -> int:
    """Send each FILE, or standard input, as a message; prints the ids.

    Without FILE standard input is sent, when it is not a terminal. Once an id is printed, the message is in target/,
    as durable as the queue's configuration asks. A queue that is full (max_unprocessed) is told by 75, or, where it
    discards what comes, by 1 and no id.
    """
    shell = Shell(ctx, json)
    sources = _sources(files, id=id, lines=lines, move=move)
    fields = {
        "priority": priority,
        "type": type,
        "correlation_id": correlation_id,
        "reply_to": reply_to,
        "expires_in": expires_in,
        "delay": delay,
        "properties": dict(_property(text) for text in properties or ()),
        "message_id": id,
    }
    sending = _Sending(shell, shell.root.queue(output.unescape(queue)), fields)

    def send_all(source: str) -> None:
        if not lines:
            return sending.send(source, move=move)
        for _ in shell.progress(sending.lines(source), "sent"):
            pass

    with whoever_reads():
        try:
            code = shell.each(sources if lines else shell.progress(sources, "sending", len(sources)), send_all)
        except KeyboardInterrupt as error:
            sending.tell()
            told = so_many(sending.accepted, None if lines else len(sources), "sent")
            raise KeyboardInterrupt(f"{told}, nothing after that") from error
        except typer.Exit as error:  # ids cannot be written: nothing more is sent
            sending.sum(error.exit_code)
            raise
    sending.sum(code)
    return code or (NEGATIVE if sending.discarded else OK)


def _sources(files: list[str] | None, *, id: str | None, lines: bool, move: bool) -> list[str]:
    if not files and sys.stdin.isatty():
        raise UsageError("name a FILE, or give - to type a message on this terminal")
    sources = files or ["-"]
    if id is not None and (lines or len(sources) > 1):
        raise UsageError("--id names one message: send one FILE with it, and no --lines")
    if move and (lines or "-" in sources):
        raise UsageError("--move takes whole files: no --lines, and nothing from standard input")
    return sources


def _property(text: str) -> tuple[str, Typed]:
    from dropq import Typed

    head, equals, value = text.partition("=")
    name, _, kind = head.partition(":")
    if not equals or not name:
        raise UsageError(f"-p {text}: NAME=VALUE or NAME:TYPE=VALUE is allowed, with a TYPE of B Y H I L F D S")
    return name, Typed.read(kind or "S", value)


class _Sending:
    """One `send`: the ids of what is sent are printed as soon as it is durable, whatever ends the command.

    Args:
        shell: the run of the command.
        queue: where it sends.
        fields: what all messages say.
    """

    def __init__(self, shell: Shell, queue: Queue, fields: Mapping[str, Any]) -> None:
        self.accepted = self.discarded = 0
        self._read = 0
        self._unread = False  # nobody reads ids any more
        self._shell = shell
        self._queue = queue
        self._fields = fields
        self._sent: list[Sent] = []  # and not told yet

    def send(self, source: str, *, move: bool) -> None:
        """Send a file, or standard input, as one message."""
        try:
            self._sent.append(self._queue.send_file(stdin() if source == "-" else source, move=move, **self._fields))
        except KeyboardInterrupt as error:
            self.accepted += hasattr(error, "__notes__")  # which say that it was sent all the same
            raise
        self.tell()

    def lines(self, source: str) -> Iterator[None]:
        """Send each line of a file, or of standard input; yield after each."""
        with _reading(source) as file:
            chunks = _chunks(file)
            for chunk in chunks:
                self._read += len(chunk)
                try:
                    for batch in _batches(chunk):
                        yield from self._send_batch(batch)
                except Exception:
                    if file.seekable():  # a file: the sum is to be true of all of it; a pipe may never end
                        self._read += sum(map(len, chunks))
                    raise

    def _send_batch(self, batch: list[bytes]) -> Iterator[None]:
        try:
            self._queue.send_into(self._sent, ({**self._fields, "body": line} for line in batch))
        except BaseException as error:
            error.__notes__ = []  # on this batch alone: the sum is told of all
            raise
        finally:
            self.tell()
        yield from (None for _ in batch)

    def tell(self) -> None:
        """Print the ids of what was sent since the last time; Ctrl-C waits for that."""
        with HeldOff() as interrupt:
            while self._sent:
                one = self._sent[0]
                if one.accepted or self._shell.json:  # an id that is printed alone is that of a message in target/
                    self._print(one)
                self.accepted += one.accepted
                self.discarded += not one.accepted
                del self._sent[0]
        if interrupt.asked:
            raise KeyboardInterrupt

    def _print(self, one: Sent) -> None:
        text = output.line(one._asdict(), ("id",), as_json=self._shell.json)
        try:
            if not self._unread:
                print(text, flush=True)
        except BrokenPipeError:  # who reads has seen enough: that is no reason to stop
            output.discard()
            self._unread = True
        except OSError as error:
            output.discard()
            for sent in filter(lambda sent: sent.accepted, self._sent):
                self.accepted += 1
                untold = f"message {sent.id} was sent; its id could not be written to standard output"
                output.note(f"error: {untold}: {error.strerror}")
            raise typer.Exit(IO_ERROR) from error

    def sum(self, code: int) -> None:
        """Say how many were sent, where that were not all."""
        not_sent = self._read - self.accepted - self.discarded
        if code and not_sent > 0:
            output.note(f"sent={self.accepted} not_sent={not_sent}")
        if self._unread:
            output.note(f"sent={self.accepted}: not all ids were read")
        if self.discarded:
            output.note(f"discarded={self.discarded}")


def _reading(source: str) -> AbstractContextManager[BufferedReader]:
    return nullcontext(stdin()) if source == "-" else open(source, "rb")


def _chunks(file: BufferedReader) -> Iterator[list[bytes]]:
    """Yield lines, without their ends, as many at a time as are there: a slow writer's are not held back."""
    begun: list[bytes] = []
    while data := file.read1(LINES):
        first, *others = data.split(b"\n")
        begun.append(first)
        if others:
            yield [b"".join(begun), *others[:-1]]
            begun = others[-1:]
    if any(begun):
        yield [b"".join(begun)]


def _batches(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Yield lines, as many at a time as `send_many` makes durable together."""
    from dropq.producer import BATCH

    for start in range(0, len(lines), BATCH):
        yield lines[start : start + BATCH]


def receive(
    ctx: typer.Context,
    queue: QueueName,
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="At most so many.")] = 1,
    wait: Annotated[float | None, duration("--wait", help="How long to wait for the first one.")] = None,
    lease: Annotated[
        float | None, lease_period("--lease", help="How long the claim holds; else the queue's lease_period, else 60s.")
    ] = None,
    filter: Filter = None,
    json: Json = False,
) -> int:
    """Claim messages; prints id, receipt and path of each.

    Settle each with its receipt, by ack, nack, fail or reject; when its lease runs out before that, it goes back. One
    whose receipt cannot be written goes back at once. Exits with 66 when there is none. From a queue that delivers at
    most once a message comes settled, without a receipt.
    """
    shell = Shell(ctx, json)
    found = shell.queue(queue)
    period = lease if lease is not None else found.config.lease_period or LEASE
    told: dict[str | None, str] = {}
    with (
        whoever_reads(),
        found.subscribe(filter=filter, max_backlog=count, lease_period=period, detached=True) as subscription,
    ):
        try:
            messages = subscription.receive_many(count, timeout=wait or 0)
            _hand_over(shell, messages, told)
        except BaseException:
            with HeldOff():  # what nobody was told of is nobody's: it does not wait for the end of its lease
                if returned := subscription.give_back_but({owner for owner in told if owner}):
                    output.note(f"{so_many(returned, None, 'given back')}: nobody was told of their receipts")
            raise
    return OK if messages else NO_INPUT


def _hand_over(shell: Shell, messages: list[Message], told: dict[str | None, str]) -> None:
    """Print claims, and keep whose were printed; Ctrl-C waits for the line at hand."""
    for message in messages:
        record = record_of(message)
        with HeldOff() as interrupt:
            try:
                print(output.line(record, ("id", "receipt", "path"), as_json=shell.json), flush=True)
            except OSError as error:
                output.discard()
                if message.owner is None:  # delivered at most once: it cannot come again
                    output.note(f"message {message.id} was received and is settled; see {record['path']}")
                output.note(f"error: message {message.id} could not be written to standard output: {error.strerror}")
                raise typer.Exit(NEGATIVE if isinstance(error, BrokenPipeError) else IO_ERROR) from error
            told[message.owner] = message.id
        if interrupt.asked:
            raise KeyboardInterrupt(f"{so_many(len(told), len(messages), 'received')}")


# -- settling --------------------------------------------------------------------------------------------------


def ack(
    ctx: typer.Context,
    queue: QueueName,
    receipts: Receipts,
    defer: Annotated[
        bool, typer.Option("--defer", help="Remember the acks of ids that dropq made and that are not here yet.")
    ] = False,
    json: Json = False,
) -> int:
    """Acknowledge messages: they are done.

    By its id a message is acknowledged also while it waits. With --defer one that is not here yet is archived once it
    comes, and not delivered: so long as the queue's deferred_ack_expiration says, and once.
    """
    shell = Shell(ctx, json)
    found = shell.queue(queue)
    named = arguments(receipts, column=1)

    def acknowledge(receipt: str) -> None:
        if not receipt and _settles_first(found):
            output.note("a message of this queue comes settled, without a receipt: there is nothing to acknowledge")
            return
        record = _acked_by_id(found, receipt, defer) if _is_id(receipt) else _acked(found.claimed(receipt))
        if shell.json:
            shell.line(record, ())

    with whoever_reads():
        return shell.each(_deferrable(named) if defer else named, acknowledge, "acknowledged")


def _is_id(text: str) -> bool:
    from dropq.names import split_claim

    claim, _ = split_claim(text)
    return claim is None or not claim.ours


def _settles_first(queue: Queue) -> bool:
    return queue.config.semantics == "at-most-once"


def _deferrable(named: Iterable[str]) -> list[str]:
    """Return what was named, once all of it is known to be receipts, or ids whose acks can be deferred."""
    from dropq import deferred

    found = list(named)
    for id in filter(_is_id, found):
        try:
            deferred.check(id)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found


def _acked(message: Message) -> Record:
    message.ack()
    return {"id": message.id, "state": message.state, "receipt": message.receipt}


def _acked_by_id(queue: Queue, id: str, defer: bool) -> Record:
    from dropq import deferred

    if queue.ack(id, defer):
        return {"id": id, "state": "processed" if queue.config.history else "removed", "receipt": None}
    if not defer or id not in deferred.remembered(queue.layout):
        return _acked(queue.claimed(id))  # which says why it is not to be had
    output.note(f"{output.escape(id)} was not acknowledged now: its ack is remembered")
    return {"id": id, "state": None, "receipt": None}


def nack(
    ctx: typer.Context,
    queue: QueueName,
    receipts: Receipts,
    delay: Annotated[float | None, duration("--delay", help="Keep it from everybody for this long.")] = None,
    json: Json = False,
) -> int:
    """Give messages back, to be delivered again; a cancel is counted."""
    return _settle(Shell(ctx, json), queue, receipts, lambda message: message.nack(delay))


def fail(
    ctx: typer.Context, queue: QueueName, receipts: Receipts, reason: Reason = "no reason was given", json: Json = False
) -> int:
    """Say that handling messages failed.

    They are tried again as often as the queue's redelivery_attempts says, then go to error/.
    """
    return _settle(Shell(ctx, json), queue, receipts, lambda message: message.fail(reason))


def reject(
    ctx: typer.Context, queue: QueueName, receipts: Receipts, reason: Reason = "no reason was given", json: Json = False
) -> int:
    """Refuse messages for good: they go to error/ at once."""
    return _settle(Shell(ctx, json), queue, receipts, lambda message: message.reject(reason))


def extend(
    ctx: typer.Context,
    queue: QueueName,
    receipts: Receipts,
    by: Annotated[
        float | None, lease_period("--by", help="How long from now; else the queue's lease_period, else 60s.")
    ] = None,
    json: Json = False,
) -> int:
    """Renew leases; prints the new receipts."""
    shell = Shell(ctx, json)
    period = by if by is not None else shell.queue(queue).config.lease_period or LEASE
    return _settle(shell, queue, receipts, lambda message: message.extend(period), columns=("receipt",))


def _settle(
    shell: Shell, queue: str, receipts: Iterable[str], verb: Callable[[Message], object], columns: tuple[str, ...] = ()
) -> int:
    found = shell.queue(queue)

    def settle(receipt: str) -> None:
        if not receipt and _settles_first(found):
            raise LeaseLost("a message of this queue comes settled, without a receipt: nothing can be done to it now")
        message = found.claimed(receipt)
        verb(message)
        if columns or shell.json:
            shell.line({"id": message.id, "state": message.state, "receipt": message.receipt}, columns)

    with whoever_reads():
        return shell.each(arguments(receipts, column=1), settle, "settled")
