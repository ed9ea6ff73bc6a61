"""Commands that send, receive and settle messages: shell scripts build on them.

A claim that `receive` makes outlives the command, so it always has a lease. Any process can settle it by its receipt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from dropq.errors import LeaseLost
from dropq.format.claims import split_receipt
from dropq.format.layout import UNSETTLED
from dropq.format.message_file import MessageFile

from . import output
from .look import explain_filter, first_of
from .options import (
    RECEIPTS,
    DryRun,
    Filter,
    Headers,
    QueueName,
    Quiet,
    Receipts,
    State,
    Yes,
    argument,
    duration,
    fields_of,
    lease_of,
    lease_period,
    option,
    state,
    with_options,
)
from .output import IO_ERROR, NEGATIVE, NO_INPUT, OK, Record
from .sending import Request, Sending
from .shell import (
    Shell,
    UsageError,
    arguments,
    delayed_interrupt,
    despite_closed_stdout,
    how_many,
    single,
    telling_where,
)

if TYPE_CHECKING:
    from dropq import Message, Queue

#: The columns of `receive`.
CLAIM = ("id", "receipt", "path")
Files = Annotated[list[str] | None, argument("FILE", "Files to send; - is stdin.")]
Lines = Annotated[bool, option("--lines", "Send each line as a message of its own.")]
Move = Annotated[bool, option("--move", "Move the files instead of copying them.")]
Reason = Annotated[str, option("--reason TEXT", "The reason, kept with the message in error/.")]


@with_options(Headers)
def send(
    ctx: typer.Context,
    name: QueueName,
    files: Files = None,
    *,
    lines: Lines = False,
    move: Move = False,
    wait_reply: Annotated[
        float | None, duration("--wait-reply", "Wait this long for the answer, and print its body.")
    ] = None,
    records: Annotated[bool, option("--records", "Send the records of the input, many in a message.")] = False,
    format: Annotated[
        str | None, option("--format FORMAT", "Of the records: jsonl (the default), text, csv or frames.")
    ] = None,
    max_records: Annotated[int | None, option("--max-records N", "Records in a message, at most; else 1000.")] = None,
    max_bytes: Annotated[int | None, option("--max-bytes N", "Bytes in a message, at most; else 1048576.")] = None,
    linger: Annotated[
        float | None, duration("--linger", "How long a record waits for others, at most; else 1s.")
    ] = None,
    quiet: Quiet = False,
    **headers: Unpack[Headers],
) -> int:
    """Send each FILE, or standard input, as a message; prints the ids.

    Without FILE it sends standard input, unless that is a terminal. Once an id is printed, the message is in target/,
    as durable as the queue's configuration asks. When the queue is full (max_unprocessed) it exits with 75; if that
    queue discards new messages, it prints no id and exits with 1. What is sent to a topic is published. The message of
    a FILE has the file's own name in the property filename, unless -p gives one.

    With --wait-reply it sends one message, prints the body of the answer instead of the id, which stderr gets, and
    exits with 75 when no answer came in time: the message stays sent, and a later answer is refused to its sender. If
    the message itself comes back, it exits with 66 where there is no such queue, else with 75.

    With --records it sends the lines of the input, or the rows of csv, or frames, many in one message, and follows a
    pipe; prints the id of each message, and how many records it has. A signal that ends the command lets it send what
    it has read.
    """
    shell = Shell(ctx, quiet)

    def open_queue() -> Queue:
        return shell.root.queue(output.unescape(name))

    bundles: dict[str, Any] = {"format": format, "max_records": max_records, "max_bytes": max_bytes, "linger": linger}
    given = {option: value for option, value in bundles.items() if value is not None}
    if records:
        if lines or move or wait_reply is not None or headers["id"] is not None or headers["type"] is not None:
            raise UsageError(
                "--records goes with no --lines, --move, --id, --wait-reply or --type: the format is the type"
            )
        from .records import send_records

        fields = {name: value for name, value in fields_of(headers).items() if name not in ("type", "message_id")}
        return send_records(shell, open_queue, _sources(files), fields=fields, **given)
    if given:
        raise UsageError(f"--{next(iter(given)).replace('_', '-')} needs --records; nothing was sent")
    return send_all(shell, open_queue, files, headers, lines=lines, move=move, wait_reply=wait_reply)


def send_all(
    shell: Shell,
    open_queue: Callable[[], Queue],
    files: list[str] | None,
    headers: Headers,
    *,
    lines: bool,
    move: bool,
    wait_reply: float | None = None,
) -> int:
    """Send files, or their lines, and print the ids; the queue is opened once the arguments are checked."""
    sources = _sources(files, id=headers["id"], lines=lines, move=move)
    if wait_reply == 0:
        raise UsageError("--wait-reply 0: an answer takes longer; nothing was sent")
    if wait_reply is not None and (lines or len(sources) > 1 or headers["reply_to"] is not None):
        raise UsageError("--wait-reply sends one message: one FILE with it, no --lines, and no --reply-to of your own")
    try:
        fields, queue = fields_of(headers), open_queue()
        if wait_reply is not None:
            return Request(shell, queue, fields).send(sources[0], move=move, timeout=wait_reply)
        sending = Sending(shell, queue, fields)
        return sending.send_lines(sources) if lines else sending.send_files(sources, move=move)
    except ValueError as error:  # all messages share what is wrong
        error.add_note("nothing was sent")
        raise


@with_options(Headers, correlation_id="Instead of the message's correlation id, else its id.")
def reply(
    ctx: typer.Context,
    name: QueueName,
    receipt: Annotated[str, argument("RECEIPT", "The receipt, or the id, of the message to answer.")],
    file: Annotated[str | None, argument("FILE", "The file to send; - is stdin.")] = None,
    **headers: Unpack[Headers],
) -> int:
    """Answer a message with FILE, or standard input; prints the id.

    The answer goes to the queue of the same root that the message's reply-to names. Its correlation id is that of the
    message, or the message's id if it has none. The message itself is not settled: acknowledge it afterwards.
    """
    from dropq.queue.replies import correlated, reply_queue

    shell = Shell(ctx)
    sources = _sources(None if file is None else [file], id=headers["id"])
    named = single(receipt)
    queue = shell.queue(name)
    message = first_of(queue, named) if _is_id(named) else queue.claimed(named)
    fields = correlated(message, fields_of(headers))
    return Sending(shell, reply_queue(message), fields).send_files(sources, move=False)


def _sources(files: list[str] | None, *, id: str | None = None, lines: bool = False, move: bool = False) -> list[str]:
    if not files and sys.stdin.isatty():
        raise UsageError("name a FILE, or give - to type a message on this terminal")
    sources = files or ["-"]
    if id is not None and (lines or len(sources) > 1):
        raise UsageError("--id names one message: send one FILE with it, and no --lines")
    if move and (lines or "-" in sources):
        raise UsageError("--move takes whole files: no --lines, and nothing from standard input")
    return sources


def receive(
    ctx: typer.Context,
    name: QueueName,
    count: Annotated[int, option("-n N", "Receive at most N messages.", min=1)] = 1,
    wait: Annotated[float | None, duration("--wait", "How long to wait for the first message.")] = None,
    lease: Annotated[
        float | None, lease_period("--lease", "How long the claim holds; else the queue's lease_period, else 60s.")
    ] = None,
    filter: Filter = None,
) -> int:
    """Claim messages; prints the id, receipt and path of each.

    Settle each message by its receipt, with ack, nack, fail or reject. It returns to the queue when its lease runs out
    first, and at once when its receipt cannot be written. Exits with 66 when there is no message. A queue that delivers
    at most once settles a message before it prints it, without a receipt.
    """
    shell = Shell(ctx)
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
            with delayed_interrupt():  # nobody knows its receipt: it need not wait for the end of its lease
                if returned := subscription._give_back_but({owner for owner in printed if owner}):
                    output.note(f"{how_many(returned, None, 'given back')}: their receipts were not printed")
            raise
    if messages:
        return OK
    output.note(_nothing_of(queue))
    if filter is not None:
        explain_filter(queue, "target", filter)
    return NO_INPUT


def _nothing_of(queue: Queue) -> str:
    """Write why there is nothing to receive."""
    name = quote(output.escape(queue.name))
    if queue.paused:
        return f"queue {queue.name} is paused: nothing comes until `dropq resume {name}`, or `dropq resume --all`"
    if waiting := queue.counts()["target"]:
        why = f"`dropq browse {name} --explain` shows why"
        return f"nothing to receive: of {waiting} in target/ of {queue.name} none is for this consumer now; {why}"
    return f"nothing to receive: queue {queue.name} has no message in target/"


def _hand_over(shell: Shell, messages: list[Message], printed: list[str | None]) -> None:
    """Print claims, and add the owner of each claim that was printed; Ctrl-C waits for the end of the line."""
    from dropq.queue.browsing import details_of

    for message in messages:
        record = details_of(message)
        with delayed_interrupt() as interrupted:
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
        if interrupted:
            raise KeyboardInterrupt(f"{how_many(len(printed), len(messages), 'received')}")


# -- settling --------------------------------------------------------------------------------------------------


def ack(
    ctx: typer.Context,
    name: QueueName,
    receipts: Annotated[list[str] | None, argument("RECEIPT", RECEIPTS)] = None,
    defer: Annotated[
        bool, option("--defer", "Remember the ack of a generated id whose message is not here yet.")
    ] = False,
    filter: Filter = None,
    state: Annotated[State | None, state("The state of what matches; all three by default.", UNSETTLED)] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Acknowledge messages: they are done. One whose body was changed meanwhile goes to error/, and the exit code is 1.

    By its id, a message that waits is acknowledged, too. With --defer, the ack of a message that is not here yet is
    remembered for the queue's deferred_ack_expiration. When the message comes, it is archived instead of delivered.

    With --filter, instead of receipts, it acknowledges all that match: those that wait, are delayed or are held.
    Consumers that hold one lose their claims, but not where leasing is strict.
    """
    shell = Shell(ctx, quiet)
    if filter is not None:
        if receipts or defer:
            raise UsageError("--filter chooses the messages: give no RECEIPT and no --defer with it")
        return _ack_matching(shell, name, filter, state, dry_run=dry_run, yes=yes)
    if not receipts or state is not None or dry_run:
        raise UsageError(
            "name messages by their receipts or ids; or choose them by --filter, also with --state, --dry-run"
        )
    return _ack_each(shell, shell.queue(name), arguments(receipts, column=1), defer=defer)


def _ack_matching(shell: Shell, name: str, filter: str, state: str | None, *, dry_run: bool, yes: bool) -> int:
    from dropq.upkeep import bulk

    from .repair import Bulk

    queue = shell.queue(name)
    which = bulk.Selection(bulk.UNFINISHED if state is None else (state,), None, filter, dry_run=dry_run)
    act = partial(bulk.ack, subscribe=queue._subscribe_to_ack)
    return Bulk(shell, queue, which, yes).run_on_those("acknowledge", act)


def _ack_each(shell: Shell, queue: Queue, named: Iterable[str], *, defer: bool) -> int:
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
        named = _deferrable(queue, named) if defer else named
        code = shell.each(named, telling_where(shell, queue, acknowledge), "acknowledged")
    return code or (NEGATIVE if refused else OK)


def _is_id(text: str) -> bool:
    claim = MessageFile(split_receipt(text)[0]).claim
    return claim is None or not claim.ours


def _settles_first(queue: Queue) -> bool:
    return queue.config.semantics == "at-most-once"


def _deferrable(queue: Queue, named: Iterable[str]) -> list[str]:
    """Return the names, once all of them are known to be receipts, or ids whose acks can be deferred."""
    from dropq.lifecycle import early_acks

    found = list(named)
    for id in filter(_is_id, found):
        try:
            early_acks.check(queue.context, id)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found


def _acked(message: Message) -> Record:
    id = message.id  # which one that has no history tells no more
    message.ack()
    return {"id": id, "state": message.state, "receipt": message.receipt}


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
    delay: Annotated[float | None, duration("--delay", "Keep it from all consumers for this long.")] = None,
    quiet: Quiet = False,
) -> int:
    """Give messages back, to be delivered again; a cancel is counted."""
    return _settle(Shell(ctx, quiet), name, receipts, lambda message: message.nack(delay))


def fail(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    reason: Reason = "no reason was given",
    quiet: Quiet = False,
) -> int:
    """Report that handling messages failed.

    A message is delivered again, as often as the queue's redelivery_attempts allows, and then ends as exhausted says.
    """
    return _settle(Shell(ctx, quiet), name, receipts, lambda message: message.fail(reason))


def reject(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    reason: Reason = "no reason was given",
    quiet: Quiet = False,
) -> int:
    """Refuse messages for good: they go to error/ at once."""
    return _settle(Shell(ctx, quiet), name, receipts, lambda message: message.reject(reason))


def extend(
    ctx: typer.Context,
    name: QueueName,
    receipts: Receipts,
    by: Annotated[
        float | None, lease_period("--by", "How long from now; else the queue's lease_period, else 60s.")
    ] = None,
) -> int:
    """Renew leases; prints the new receipts."""

    def renew(message: Message) -> None:
        message.extend(lease_of(message.queue, by))

    return _settle(Shell(ctx), name, receipts, renew, columns=("receipt",))


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
        return shell.each(arguments(receipts, column=1), telling_where(shell, queue, settle), "settled")
