"""Commands that show queues, their counts and health, and messages. They change nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dropq.errors import LeaseLost, NoSuchMessage
from dropq.format.layout import STATES, WITH_REASON
from dropq.format.names import is_temporary, is_unique
from dropq.lifecycle.open_queue import away_names
from dropq.storage import reading

from . import output
from .log import deliveries, words
from .options import (
    Filter,
    MessageId,
    QueueName,
    QueueNames,
    QueueOrRoot,
    State,
    argument,
    duration,
    most,
    option,
    state,
)
from .output import NEGATIVE, OK, Record, unescape
from .shell import Shell, UsageError, arguments, single, telling_where

if TYPE_CHECKING:
    from dropq import Message, Queue
    from dropq.diagnosis.explain import Explanation
    from dropq.diagnosis.health import Health

#: The columns of messages, and the further columns of some states.
COLUMNS = ("id", "priority", "timestamp", "bytes", "delivery_count", "type")
MORE = {"delayed": ("not_before",), "processing": ("owner", "deadline"), **dict.fromkeys(WITH_REASON, ("reason",))}
#: The further columns where the first message is a dead letter.
LETTER = ("origin", "dead_letter_reason")
#: The further column where the first message was sent from a file.
FROM_FILE = ("filename",)
#: The further columns where the first message is a bundle whose records were counted, a part of one, or was a record.
PARTS = ("records", "from", "record")
#: The columns of `browse --explain`.
WHY = ("id", "state", "why", "until", "holders", "detail")
#: Why a message waits, in plain words for a terminal; of a message that is held, a terminal shows the holder instead.
PLAIN = {
    "ready": "a consumer can take it",
    "paused": "no consumer gets it",
    "expired": "no consumer gets it",
    "acked": "its ack came first",
    "filter": "it does not match",
    "owner": "another root gets it first",
    "route": "it goes elsewhere",
    "selector": "a selector decides",
    "barrier": "not settled yet",
    "backlog": "the limit is reached",
    "turn": "it is for one consumer",
    "delay": "its time has come",
    "receiver": "a receiver of the topic cannot take it",
    "unreadable": "its body is closed to this user",
    "transit": "it goes to another file system",
    "committed": "its parts have not all arrived",
}
#: The columns that a narrow terminal does without, the least important first.
SPARE = ("bytes", "type", "priority", "delivery_count", "timestamp")
#: The same of `ls`.
SPARE_COUNTS = ("working", "processed", "expired")
#: How many messages are searched for the properties that a filter names.
CHECKED = 1000
#: Bytes of a body that `show` shows on a terminal.
PREVIEW = 2000
#: Seconds between two listings by `tail -f`.
PAUSE = 0.5


def ls(
    ctx: typer.Context,
    queues: QueueNames = None,
    everything: Annotated[
        bool, option("--all, -a", "List temporary queues, too, in which requesters wait for answers.")
    ] = False,
    header: Annotated[bool, option("--header", "Begin with a line of the columns' names, as a table does.")] = False,
    ages: Annotated[bool, option("--ages", "Count the messages of one queue by their ages.")] = False,
    by: Annotated[
        str | None, option("--by NAME", "With --ages, a line for each value of a property, or for each `type`.")
    ] = None,
    state: Annotated[State | None, state("With --ages, the state to count; target by default.")] = None,
) -> int:
    """List queues, with the number of messages in each state.

    With --ages it reads names alone: it tells which type, or which customer, makes up a backlog, and since when.
    Where messages lie in folders of routing/, `routed` counts them; with --json, for each folder. `in_transit` counts
    those on their way to other file systems; with --json, for each queue that they go to.
    """
    shell = Shell(ctx)
    if ages:
        return _ages(shell, queues, by, state or "target", header=header)
    if by is not None or state is not None:
        raise UsageError(f"{'--state' if by is None else '--by'} goes with --ages")
    records: list[dict[str, object]] = []

    def count(name: str) -> None:
        queue = shell.named(name)
        elsewhere = {"routed": queue.routed(), "in_transit": queue.in_transit()}
        records.append({"queue": queue.name, **queue.counts(), **elsewhere, "paused": queue.paused})

    found = shell.queues(queues) + ([] if queues else away_names(shell.root.context))
    names = found if queues or everything else [name for name in found if not is_temporary(name)]
    if not found:
        shell.check_root()
    code = shell.each(names, count if queues else shell.unless_gone(count))
    for column in ("routed", "in_transit"):
        _show_elsewhere(records, column, as_json=shell.json)
    columns = tuple(records[0]) if records else ()
    if shell.on_terminal and len(records) > 1:
        sums = {key: sum(int(str(record[key])) for record in records) for key in columns[1:-1]}
        records.append({"queue": "total", **sums})
    shell.show(records, columns, spare=SPARE_COUNTS, header=header)
    if not found:
        shell.report_no_queues()
    elif len(names) < len(found) and (shell.on_terminal or not names):
        output.note(f"temporary queues that are not listed: {len(found) - len(names)}; --all lists them")
    return code


def _ages(shell: Shell, queues: list[str] | None, by: str | None, state: str, *, header: bool) -> int:
    if queues is None or len(queues) != 1:
        raise UsageError("--ages is of one queue: name it")
    from dropq.diagnosis.standing import AGE_NAMES, ages_by

    queue = shell.queue(queues[0])
    with queue.context.error_context("nothing was changed"):
        found = ages_by(queue.context, state, by)
    none = "(none)" if shell.on_terminal else ""
    groups = [("value", value or none, counts) for value, counts in found.of_value.items()]
    groups += [("other", "other", counts) for counts in (found.others,) if counts is not None]
    groups.append(("total", "total" if by else queue.name, found.total))
    records: list[Record] = [
        {"group": group, "value": value, "count": sum(counts), **dict(zip(AGE_NAMES, counts, strict=True))}
        for group, value, counts in groups
    ]
    shell.show(records, ("value", "count", *AGE_NAMES), header=header)
    return OK


def _show_elsewhere(records: list[dict[str, object]], column: str, *, as_json: bool) -> None:
    """Leave a column out where nothing is in it. Outside of JSON, sum it up, for all queues or for none."""
    found = [cast(dict[str, int], record[column]) for record in records]
    for record, counts in zip(records, found, strict=True):
        if not (counts if as_json else any(found)):
            del record[column]
        elif not as_json:
            record[column] = sum(counts.values())


def health(
    ctx: typer.Context,
    name: QueueOrRoot = None,
    max_age: Annotated[float | None, duration("--max-age", "How long a message may wait.")] = None,
    max_count: Annotated[int | None, option("--max-count N", "How many messages may wait in target/.", min=0)] = None,
    max_error: Annotated[int, option("--max-error N", "How many messages may lie in error/.", min=0)] = 0,
    still: Annotated[
        float | None,
        duration("--still", "For how long messages may wait while nobody takes one; a note says so after 1m."),
    ] = None,
) -> int:
    """Report whether queues are healthy, and why not.

    Exits with 1 when a queue is not healthy. Without limits it reports what no sweep has dealt with for a minute,
    messages in error/, what stops a topic, and queues that cannot be used. It also mentions a pause, which is no fault.
    """
    from dropq.diagnosis.health import Limits, health_root

    shell = Shell(ctx)
    reports: Iterable[Health]
    if name is None:
        reports = health_root(shell.root.context, Limits(max_age, max_count, max_error, still))
    else:
        queue = shell.root.queue(unescape(name))
        reports = [queue.health(max_age=max_age, max_count=max_count, max_error=max_error, still=still)]
    codes: list[int] = []

    def records() -> Iterator[Record]:
        for report in reports:
            codes.append(OK if report.healthy else output.exit_code(report.error) if report.error else NEGATIVE)
            yield from [_health_record(report)] if shell.json else _health_lines(report)

    shell.show(records(), ("queue", "verdict", "kind", "message"))
    if not codes:
        shell.check_root()
        shell.report_no_queues()
    return output.verdict(codes)


def _health_record(health: Health) -> Record:
    return {
        "queue": health.queue,
        "healthy": health.healthy,
        "reasons": [asdict(reason) for reason in health.reasons],
        "notes": [asdict(note) for note in health.notes],
        "counts": health.counts,
        "oldest_age": health.oldest_age,
    }


def _health_lines(health: Health) -> Iterator[Record]:
    """Yield a line for each reason and note; a single line when the queue has neither."""
    verdict = {"queue": health.queue, "verdict": "healthy" if health.healthy else "unhealthy"}
    remarks = [asdict(remark) for remark in (*health.reasons, *health.notes)]
    for remark in remarks or [{}]:
        yield {**verdict, **remark}


def browse(
    ctx: typer.Context,
    name: QueueName,
    state: Annotated[State | None, state("The state to list; target by default.")] = None,
    count: Annotated[int | None, option("-n N", "List only the first N.", min=0)] = None,
    filter: Filter = None,
    explain: Annotated[bool, option("--explain", "Show why each message waits, or who holds it.")] = False,
) -> None:
    """List the messages of a state, in order of delivery.

    Lines have id, priority, timestamp, bytes, delivery_count, type; in delayed/ then not_before, in processing/ owner
    and deadline, in error/ and expired/ reason; with --explain id, state, why, until, holders, detail.
    Where the first of them is a dead letter, it also shows where each comes from, and why. Where it was sent from a
    file, it also shows the name of each message's file. Where it is a bundle whose
    sender counted its records, a part of a bundle or a record of one, it also shows how many records each has, from
    which number on, and which record it was.
    With --explain it lists target/, delayed/ and processing/, or only the state that --state names. It shows why each
    message is not delivered, or who holds it and what would bring it back.
    """
    shell = Shell(ctx)
    if explain:
        return _show_explained(shell, islice(shell.queue(name).explain(state, filter=filter), most(count)))
    listed = state or "target"
    queue = shell.queue(name)
    messages = islice(queue.browse(listed, filter=filter), most(count))
    first = list(islice(messages, 1))
    columns = (*COLUMNS, *MORE.get(listed, ()), *(_further(first[0]) if first else ()))
    shell.show(_records(chain(first, messages)), columns, spare=SPARE)
    if filter is not None and not first and count != 0:
        explain_filter(queue, listed, filter)


def _further(message: Message) -> Iterator[str]:
    """Yield the further columns of a list of messages that begins with this one."""
    if message.dead_letter_reason:
        yield from LETTER
    if message.filename:
        yield from FROM_FILE
    if message.record_count or message.first_record or message.record_number:
        yield from PARTS


def _show_explained(shell: Shell, explanations: Iterable[Explanation]) -> None:
    """Print why messages wait: on a terminal in a few words each, with the details once, below the table."""
    if not shell.on_terminal:
        return shell.show(map(_explained, explanations), WHY)
    details: dict[str, None] = {}

    def records() -> Iterator[Record]:
        for explanation in explanations:
            reason, detail = _in_words(explanation)
            if detail:
                details[detail] = None
            yield {**_explained(explanation), "why": reason}

    shell.show(records(), WHY, table=("id", "state", "why", "until"), spare=("state",))
    for detail in ("", *details) if details else ():
        output.put(output.escape(detail))
    return None


def _in_words(explanation: Explanation) -> tuple[str, str]:
    """Return the reason in a few words, and the sentence about it; no sentence if the words say it all."""
    why, holders = explanation.why, ", ".join(explanation.holders)
    detail = f"{why}: {explanation.detail}"
    letter = detail if explanation.message.dead_letter_reason else ""
    if why == "ready" and not holders:
        return "ready: no consumer is running", letter
    if why == "delay" and explanation.until:
        return "delay: it waits for its time", letter
    if why not in PLAIN:  # a consumer or a script holds it
        return f"{why}: {holders}", "" if why in ("held", "lease") else detail
    return f"{why}: {PLAIN[why]}", f"{detail} ({holders})" if holders else detail


def explain_filter(queue: Queue, state: str, filter: str) -> None:
    """Report which properties a filter names that no message of a state has: they may be misspelt."""
    from difflib import get_close_matches

    from dropq.filters import compile_filter
    from dropq.filters.headers import HEADERS

    used = set(chain.from_iterable(message.properties for message in islice(queue.browse(state), CHECKED)))
    for name in sorted(compile_filter(filter).identifiers):
        if name.startswith("JMS") or name.endswith("()") or name in used:
            continue
        header = next((header for header in HEADERS if header.lower() in (f"jms{name}".lower(), name.lower())), None)
        meant = f"the header is {header}" if header else f"if it is text, write it in quotes: '{name}'"
        if not header and (near := get_close_matches(name, used, n=1)):
            meant = f"is it {near[0]}? {meant[0].upper()}{meant[1:]}"
        output.note(f"no message in {state}/ of {queue.name} has the property {name}: {meant}")


def _explained(explanation: Explanation) -> Record:
    return {
        "id": explanation.message.id,
        "queue": explanation.message.queue.name,
        "state": explanation.message.state,
        "why": explanation.why,
        "until": explanation.until,
        "holders": list(explanation.holders),
        "detail": explanation.detail,
    }


def _records(messages: Iterable[Message]) -> Iterator[Record]:
    from dropq.queue.browsing import details_of

    for message in messages:
        try:
            yield details_of(message)
        except (NoSuchMessage, LeaseLost):
            continue  # RACE: it moved on since the listing


def show(ctx: typer.Context, name: QueueName, id: MessageId) -> None:
    """Show everything about one message, in whichever state it is.

    When several messages have the id, it shows the first in order of delivery; of the parts of a bundle it shows each.
    It includes the counters that travel with the message and, in error/ and expired/, the reason with its traceback or
    the end of the command's stderr; then what the queue's log says of its deliveries, and how far back that goes. On a
    terminal the beginning of the body follows.
    """
    shell = Shell(ctx)
    queue = shell.queue(name)

    def show_all(wanted: str) -> None:
        for number, message in enumerate(_shown(queue, wanted)):
            if number and not shell.json:
                output.put("")
            _show(shell, message, *deliveries(queue, message.id))

    telling_where(shell, queue, show_all)(single(id))


def _shown(queue: Queue, id: str) -> list[Message]:
    """Return the first message with an id; all of them, in whichever states, if it is a part of a bundle."""
    first, *others = queue.find_all(id)
    if first.first_record is None:
        _report_others(id, first, others)
        return [first]
    parts: list[Message] = []
    for where in STATES:
        with suppress(NoSuchMessage):
            parts += queue.find_all(id, [where])
    return parts or [first]


def _show(shell: Shell, message: Message, log: list[Record], log_begins: datetime | None) -> None:
    from dropq.queue.browsing import details_of

    record = details_of(message)
    if shell.json:
        return shell.line({**record, "log": log, "log_begins": log_begins}, ())
    for key, value in _flat(record):
        text = output.cell({key: value}, key)
        if sys.stdout.isatty() and isinstance(value, str) and "\n" in value:
            text = "\n  " + output.visible(value.rstrip()).replace("\n", "\n  ")
        _show_line(key, text)
    for each in log:
        _show_line(f"log.{output.time_text(cast(datetime, each['time']))}", output.escape(words(each)))
    if log_begins is not None:
        _show_line("log_begins", f"{log_begins:%Y-%m-%d}")
    if sys.stdout.isatty():
        with message.open() as body:
            data = body.read(PREVIEW)
        output.put(f"\n{output.visible(os.fsdecode(data))}{' ...' if len(data) == PREVIEW else ''}")


def _show_line(key: str, text: str) -> None:
    label = output.escape(key)  # the sender chose a property's name
    output.put(f"{label}\t{text}" if not sys.stdout.isatty() else f"{label + ':':20} {text}")


def first_of(queue: Queue, id: str) -> Message:
    """Return the first message with an id, in order of delivery; report when several messages have it."""
    first, *others = queue.find_all(id)
    _report_others(id, first, others)
    return first


def _report_others(id: str, first: Message, others: list[Message]) -> None:
    if others:
        output.note(f"{len(others) + 1} messages in {first.state}/ have the id {output.escape(id)}; this is the first")


def _flat(record: Record, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def cat(
    ctx: typer.Context,
    name: QueueName,
    ids: Annotated[list[str], argument("ID", "The ids; - reads them from standard input.")],
    raw: Annotated[bool, option("--raw", "Write the bytes as they are, also to a terminal.")] = False,
) -> int:
    """Write bodies to standard output, one after the other.

    When several messages have an id, it writes the first in order of delivery.
    The bytes stay as they are, but a terminal gets no control characters. With --json the body is in `body`, or in
    `body_base64` when it is not UTF-8.
    """
    shell = Shell(ctx)
    queue = shell.queue(name)

    def write(id: str) -> None:
        message = first_of(queue, id)
        if shell.json:
            shell.line({"id": message.id, **body_of(message.body)}, ())
        elif sys.stdout.isatty() and not raw:
            print(output.visible(os.fsdecode(message.body)), flush=True)
        else:
            with message.open() as body:
                while part := body.read(reading.READ_SIZE):
                    with output.writing():
                        sys.stdout.buffer.write(part)
            with output.writing():
                sys.stdout.buffer.flush()

    return shell.each(arguments(ids), telling_where(shell, queue, write))


def body_of(data: bytes) -> dict[str, object]:
    """Return a body for JSON: as text, or in base64 where it is not UTF-8."""
    try:
        return {"body": data.decode()}
    except UnicodeDecodeError:
        from base64 import b64encode

        return {"body_base64": b64encode(data).decode()}


def tail(
    ctx: typer.Context,
    name: QueueName,
    state: Annotated[State, state("The state to list.")] = "target",
    count: Annotated[int, option("-n N", "How many messages to list.", min=0)] = 10,
    follow: Annotated[bool, option("-f, --follow", "Then list what comes, until interrupted.")] = False,
    filter: Filter = None,
) -> None:
    """List the latest messages of a state, the newest last.

    With -f it goes on. It looks twice a second, so it may miss a message that a consumer takes at once.
    """
    shell = Shell(ctx)
    queue = shell.queue(name)
    columns = (*COLUMNS, *MORE.get(state, ()))
    seen: set[str] = set()
    arrived = _arrived(queue, state, filter, seen)
    heading = shell.below("", _records(arrived[max(len(arrived) - count, 0) :]), columns, SPARE)
    while follow:
        time.sleep(PAUSE)
        heading = shell.below(heading, _records(_arrived(queue, state, filter, seen)), columns, SPARE)


def _arrived(queue: Queue, state: State, filter: str | None, seen: set[str]) -> list[Message]:
    """Return the messages of a state that match and were not seen yet, in the order in which they came there."""
    there = {_known_as(message): message for message in queue.browse(state)}
    new = there.keys() - seen
    if filter is not None and (new or not seen):  # it may read every body: it is asked where something is new
        new &= {_known_as(message) for message in queue.browse(state, filter=filter)}
    came = []
    for key in new:
        try:
            came.append((os.stat(there[key].path, follow_symlinks=False).st_ctime_ns, there[key].id, key))
        except FileNotFoundError:
            continue  # RACE: it moved on since the listing
    seen.clear()
    seen.update(there)
    return [there[key] for *_, key in sorted(came)]


def _known_as(message: Message) -> str:
    """Return a key that no later message has: the file name, and the inode where another file may have that name."""
    return message.file if is_unique(message.name) else f"{message.file}/{reading.inode_or_none(message.path)}"
