"""Commands that run a worker, and that wait for workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from dropq.errors import NoSuchMessage
from dropq.format.layout import UNSETTLED
from dropq.lifecycle.decision import count_of

from . import output
from .log import deliveries, words
from .look import explain_filter
from .options import (
    Filter,
    Headers,
    QueueName,
    argument,
    duration,
    lasting,
    lease_of,
    lease_period,
    option,
    properties_of,
    with_options,
)
from .output import NEGATIVE, OK, TRY_LATER, UNAVAILABLE
from .shell import Shell, UsageError, despite_closed_stdout
from .work_reporter import WorkReporter

if TYPE_CHECKING:
    from dropq import Out, Queue, Stop
    from dropq.queue.outputs import Destinations
    from dropq.worker.command import Runner
    from dropq.worker.loop import WorkReport

#: Seconds between two counts of `wait`: the first pause, and the longest, to which it doubles.
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
#: What the log says of a message that left its queue, and was not acknowledged there.
LEAVES = ("moved", "purged", "dead-letter")


@with_options(
    Headers, "properties", "type", properties="With --to, a property of what is sent.", type="With --to, its type."
)
def work(
    ctx: typer.Context,
    line: Annotated[list[str], argument("QUEUE... -- CMD...", "The queues, and the command to run for each message.")],
    jobs: Annotated[int, option("-j, --jobs N", "How many messages at a time.", min=1)] = 1,
    until_empty: Annotated[bool, option("--until-empty", "End when no message waits any more.")] = False,
    fair: Annotated[bool, option("--fair", "Take from the queues by turns.")] = False,
    filter: Filter = None,
    client_id: Annotated[
        str | None, option("--client-id NAME", "The worker's lasting name, also for self_destruct.")
    ] = None,
    lease: Annotated[
        float | None, lease_period("--lease", "The lease, kept renewed; else the queue's lease_period, else 60s.")
    ] = None,
    timeout: Annotated[
        float | None,
        duration(
            "--timeout", "Stop a command that takes longer; it has failed.", parser=partial(lasting, "a command", 1)
        ),
    ] = None,
    poll: Annotated[bool, option("--poll", "List the queues at intervals instead of waiting for events.")] = False,
    each: Annotated[bool, option("--each", "Run CMD for each record of a message, which is on its stdin.")] = False,
    records: Annotated[
        bool, option("--records", "Run CMD for a message's records; it reports those that failed.")
    ] = False,
    to: Annotated[list[str] | None, option("--to QUEUE", "Send what CMD writes to QUEUE, with the ack.")] = None,
    lines: Annotated[bool, option("--lines", "With --to, send each line as a message.")] = False,
    send_empty: Annotated[bool, option("--send-empty", "With --to, send an empty output, or line, too.")] = False,
    quiet: Annotated[
        bool, option("-q, --quiet", "No line for each message, and no sums; only what keeps the worker from working.")
    ] = False,
    verbose: Annotated[bool, option("-v, --verbose", "Report each message, as on a terminal.")] = False,
    **headers: Unpack[Headers],
) -> int:
    """Run a command for each message: its body on stdin, {} its path.

    Of several queues, a message comes from the first that has one; with --fair they take turns.

    The environment has DROPQ_ID, DROPQ_QUEUE, DROPQ_RECEIPT, DROPQ_PROP_NAME for each property, and others.

    Exit status 0 acknowledges the message, 75 gives it back, 65 rejects it, anything else fails it; 126 and 127 stop
    the worker. After a first SIGTERM, SIGHUP or Ctrl-C the worker finishes what runs; after a second it gives that
    back. The message of a command that the signal itself ends is given back, too. Neither counts as a delivery.

    With --until-empty it takes each message once at most, and exits with 1 when a message failed or was rejected.

    With --each, all of this is true of each record, and DROPQ_RECORD is its number. With --records, CMD writes a line
    for each record that failed into the file DROPQ_FAILED: its number among those that CMD read, or the number, a tab
    and a reason. If CMD exits with 0, the others are acknowledged.

    With --to, what CMD writes to its stdout is sent to QUEUE by the rename that acknowledges the message: once CMD and
    all its children have ended, and CMD with 0. It has the message's priority, properties and correlation id, else its
    id. Nothing is taken while QUEUE is full. With --until-empty it exits with 75 when that could not be written.
    """
    from dropq.worker.command import Command, SendingCommand
    from dropq.worker.loop import Stop, stop_on_signals
    from dropq.worker.record_commands import BundleCommand, RecordCommand
    from dropq.worker.run import By, run
    from dropq.worker.sources import Sources

    names, command = _parted(line)
    if quiet and verbose:
        raise UsageError("give -q or -v, not both")
    if each and records:
        raise UsageError(
            "give --each for a run of CMD for each record, or --records for a run for all of them, not both"
        )
    outs = _outs(to or [], headers)
    for needing, is_given in (("--lines", lines), ("--send-empty", send_empty)):
        if is_given and not outs:
            raise UsageError(f"{needing} needs --to QUEUE")
    if outs and (each or records):
        raise UsageError("--to sends with the ack of a message: leave out --each and --records")
    shell = Shell(ctx)
    client_id = None if client_id is None else output.unescape(client_id)
    queues = [shell.queue(name) for name in names]
    for queue in queues if not quiet else ():
        shell.warn_of_topic(queue)
    with ExitStack() as stack:
        stack.enter_context(despite_closed_stdout())
        by: By = "record" if each else "bundle" if records else "message"
        handler: Runner
        if outs:
            handler = SendingCommand(command, outs, timeout=timeout, lines=lines, sends_empty=send_empty)
        else:
            kinds = {"record": RecordCommand, "bundle": BundleCommand, "message": Command}
            handler = kinds[by](command, timeout=timeout)
        stack.enter_context(handler)
        stop = stack.enter_context(stop_on_signals(Stop()))
        destinations = {queue.name: _destinations(queue, outs, stop, client_id) for queue in queues if outs}
        subscriptions = [
            stack.enter_context(
                queue.subscribe(
                    max_backlog=jobs,
                    lease_period=lease_of(queue, lease),
                    filter=filter,
                    client_id=client_id,
                    named=bool(client_id),
                )
            )
            for queue in queues
        ]
        reporter = stack.enter_context(
            WorkReporter(shell, queues, quiet=quiet, verbose=verbose, until_empty=until_empty)
        )
        sources = Sources(subscriptions, fair=fair, poll=poll)
        report = run(
            sources,
            handler,  # type: ignore[arg-type]  # each kind is called with what its worker has
            stop,
            concurrency=jobs,
            until_empty=until_empty,
            by=by,
            reporter=reporter,
            destinations=destinations,
            client_id=client_id,
        )
    if shell.json:
        shell.line(asdict(report), ())
    reporter.sum_up()
    if report.left and not quiet:
        output.note(_left(report))
    taken = report.acked + report.failed + report.retried + report.rejected + report.lost + report.returned
    for queue in queues if not quiet and report.halted is None else ():
        if until_empty and not report.stopped:
            _report_unmatched(queue, filter)
        if filter is not None and not taken:
            explain_filter(queue, "target", filter)
    if report.halted is not None:
        output.note(f"error: {report.halted}")
        return UNAVAILABLE
    if until_empty and outs and report.returned and not report.stopped:
        return TRY_LATER  # what was made of them could not be written
    return NEGATIVE if until_empty and report.failed + report.rejected else OK


def _outs(to: list[str], headers: Headers) -> list[Out]:
    """Return what goes to each queue, without its body."""
    for name in to:
        if not name or name.startswith("-"):
            raise UsageError(f"--to names a queue or topic, and {name!r} is none")
        if to.count(name) > 1:
            raise UsageError(f"--to {name} is given twice: each queue gets one message")
    fields: dict[str, Any] = {"type": headers["type"], "properties": properties_of(headers["properties"])}
    if not to and any(fields.values()):
        raise UsageError("-p and --type are of what is sent: give --to QUEUE, too")
    from dropq.queue.outputs import Out

    return [Out(output.unescape(name), b"", **fields) for name in to]


def _destinations(queue: Queue, outs: list[Out], stop: Stop, client_id: str | None) -> Destinations:
    """Return where messages go that are made of a queue's; refuse what could not be sent, before the work."""
    from dropq.queue.outputs import Destinations

    found = Destinations(queue.context, queue.root.queue, given_up=lambda: stop.asked, client_id=client_id or "")
    found.refuse()
    letters = queue.root.context.config.dead_letter_queue
    for out in outs:
        found.check(out)
        if not queue.root.queue(out.to).exists():
            output.note(f"warning: there is no queue {out.to}: what is made goes to the dead-letter queue {letters}")
    return found


def _parted(line: list[str]) -> tuple[list[str], list[str]]:
    """Return the queues and the command of a line, which `--` parts."""
    at = line.index("--") if "--" in line else len(line)
    if not line[at + 1 :]:
        raise UsageError("no command: write it after the queues and --, such as `dropq work orders -- cat`")
    if not at:
        raise UsageError("no queue: name one or several before --, such as `dropq work orders -- cat`")
    return line[:at], line[at + 1 :]


def _report_unmatched(queue: Queue, filter: str | None) -> None:
    """Report how many messages wait that the queue's filter, or the worker's own, keeps from the worker."""
    from dropq.policies.filter_rest import FilterRest
    from dropq.policies.matching import matcher
    from dropq.queue.browsing import listed

    asked = FilterRest(queue.context).matches, None if filter is None else matcher(queue.context, filter)
    wanted = [matches for matches in asked if matches is not None]
    if not wanted or queue.paused:  # a pause is told, and keeps all from it
        return
    if count := sum(not all(matches(file) for matches in wanted) for file in listed(queue.context)):
        output.note(
            f"{count_of(count)} {'waits' if count == 1 else 'wait'} in {queue.name} that the filter does not match"
        )


def _left(report: WorkReport) -> str:
    """Write how many messages were given back, and until when they wait."""
    due = [one.due for one in report.left if one.due is not None]
    where = f"until {output.time_text(max(due))} at the latest" if due else "in target/"
    return f"{len(report.left)} given back {'waits' if len(report.left) == 1 else 'wait'} {where}"


def wait(
    ctx: typer.Context,
    name: QueueName,
    empty: Annotated[bool, option("--empty", "Until no message waits, is delayed, or is worked on.")] = False,
    count: Annotated[int | None, option("--count N", "Until at least N messages wait.", min=0)] = None,
    id: Annotated[str | None, option("--id ID", "Until this message is settled.")] = None,
    filter: Annotated[str | None, option("--filter FILTER", "Count only messages that match.")] = None,
    timeout: Annotated[float | None, duration("--timeout", "Wait at most this long, then exit with 75.")] = None,
) -> int:
    """Wait until a queue is empty or has N messages, or for a message.

    With --id it prints the state that the message ended in: `removed` for an acknowledged one without a history. It
    exits with 0 when the message was acknowledged, and with 1 when it ended in error/ or expired/, or left the queue.
    """
    if sum((empty, count is not None, id is not None)) != 1:
        raise UsageError("give one of --empty, --count N and --id ID")
    if id is not None and filter is not None:
        raise UsageError("--id names one message: give --filter with --empty or --count N")
    shell = Shell(ctx)
    queue = shell.queue(name)
    if id is not None:
        return _wait_for_one(shell, queue, output.unescape(id), timeout)

    def reached() -> bool:
        if not empty:
            return _unsettled(queue, filter)["target"] >= (count or 0)
        # RACE: a message that goes back while the folders are listed is met by the second list.
        return not any(any(_unsettled(queue, filter).values()) for _ in range(2))

    return OK if _until(reached, queue, timeout, filter) else TRY_LATER


def _wait_for_one(shell: Shell, queue: Queue, id: str, timeout: float | None) -> int:
    state = _state(queue, id)
    if state is None and queue.config.history:
        queue.find(id)  # it raises: the message is nowhere
    if not _until(lambda: _state(queue, id) not in UNSETTLED, queue, timeout):
        return TRY_LATER
    ended = _state(queue, id)
    if ended is None:
        left = _departure(queue, id)
        if not left and (queue.config.history or (queue.config.log == "off" and not _may_have_copies(queue))):
            left = shell.where(queue, id)  # if nowhere, it was acknowledged, and perhaps pruned
        if left:
            output.note(left)
        else:
            ended = "processed" if queue.config.history else "removed"
    if ended or shell.json:
        shell.line({"id": id, "state": ended}, ("state",))
    return OK if ended in ("processed", "removed") else NEGATIVE


def _departure(queue: Queue, id: str) -> str:
    """Return how a message left its queue but by an ack, as the log has it; "" if it does not say that."""
    events, _ = deliveries(queue, id)
    last = events[-1] if events else {}
    leaves = last.get("event") in LEAVES or (last.get("event") == "requeued" and last.get("to"))
    return f"message {id} left {queue.name}: {words(last)}" if leaves else ""


def _may_have_copies(queue: Queue) -> bool:
    """Return whether a message of the same id may lie in other queues, although this one was acknowledged."""
    if queue.layout.is_topic or queue.context.is_fed:
        return True
    return any(selector.op == "copy" for each in queue.root.queues() for selector in each.selectors())


def _state(queue: Queue, id: str) -> str | None:
    from dropq.queue.browsing import is_committed

    state = None
    # RACE: a message that goes back, or whose parts arrive, while the folders are read in turn is met on a second look.
    for _ in range(2):
        if is_committed(queue.context, id):
            return "processing"
        with suppress(NoSuchMessage):
            state = queue.find(id).state
        if state in UNSETTLED:
            break
    return state


def _unsettled(queue: Queue, filter: str | None) -> dict[str, int]:
    """Return how many messages are in each state before they are settled; with a filter, how many of them match."""
    if filter is not None:
        return {state: sum(1 for _ in queue.browse(state, filter=filter)) for state in UNSETTLED}
    counts = queue.counts()
    return {state: counts[state] for state in UNSETTLED}


def _remaining(queue: Queue, filter: str | None) -> str:
    counts = ", ".join(f"{count} in {state}" for state, count in _unsettled(queue, filter).items())
    return f"queue {queue.name} has {counts}" + (" that match" if filter is not None else "")


def _until(reached: Callable[[], bool], queue: Queue, timeout: float | None, filter: str | None = None) -> bool:
    """Wait until a condition holds; if the time is up first, report what remains, and return False."""
    end = time.monotonic() + (inf if timeout is None else timeout)
    pause = FIRST_PAUSE
    try:
        while not reached():
            left = end - time.monotonic()
            if left <= 0:
                output.note(f"timed out: {_remaining(queue, filter)}")
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, LONGEST_PAUSE)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_remaining(queue, filter)) from error
    return True
