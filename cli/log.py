"""`dropq log`: what went by in a queue, from its log."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

import typer

from dropq.durations import parse_duration
from dropq.events.log import ACTS, OUTCOMES
from dropq.events.reader import Event, Reader
from dropq.storage.clock import time_of
from dropq.storage.failures import describe

from . import output
from .options import QueueName, most, option
from .output import NEGATIVE, OK, Record, unescape
from .shell import Shell

if TYPE_CHECKING:
    from dropq import Queue

#: The events of `--event`.
EVENTS = (*OUTCOMES, *ACTS)
#: The columns of the log's lines.
COLUMNS = ("time", "event", "id", "delivery", "seconds", "reason", "owner", "state", "to", "count", "by")
#: The columns that a narrow terminal does without, the least important first.
SPARE = ("state", "count", "to", "by", "delivery", "seconds", "owner")
#: Seconds between two reads by `log -f`.
PAUSE = 0.5
#: How many lines `log -f` begins with; and how many `show` has at most.
LAST, MOST = 10, 1000


def log(
    ctx: typer.Context,
    name: QueueName,
    follow: Annotated[bool, option("-f, --follow", "Then list what comes, until interrupted.")] = False,
    id: Annotated[str | None, option("--id ID", "Only what is about this message.")] = None,
    event: Annotated[
        list[str] | None,
        option("--event EVENT", f"Only these events; may be repeated: {', '.join(EVENTS)}."),
    ] = None,
    since: Annotated[
        str | None, option("--since TIME", "Only from this time on: 2026-11-29T08:00Z, or 1h for an hour ago.")
    ] = None,
    count: Annotated[int | None, option("-n N", "Only the last N; with -f, 10 by default.", min=0)] = None,
) -> int:
    """List what went by: failed deliveries, and acts.

    It tells, by time, how each delivery ended that was not acknowledged, and why, and what people did to the queue.
    With log = "all" in queue.toml it has acks and routes, too. Who did something is the owner of the log's file. What
    scripts do by mv is in no log. Exits with 1 when nothing matched. A failure that is tried again is `returned`. Lines
    have time, event, id, delivery, seconds, reason, owner, state, to, count, by.
    """
    shell = Shell(ctx)
    if unknown := sorted({*(event or ())} - {*EVENTS}):
        raise typer.BadParameter(
            f"there is no event {', '.join(map(repr, unknown))}: {', '.join(EVENTS)}", param_hint="'--event'"
        )
    queue = shell.queue(name)
    begin = None if since is None else _time(since)
    reader = Reader(queue.layout.log)

    def new() -> Iterator[Record]:
        with queue.context.error_context("nothing was changed"):
            os.stat(queue.layout.target)  # a queue that is gone has no log that is empty
            for each in reader.events(since=begin, id=None if id is None else unescape(id)):
                if each.event != "sum" and (not event or each.event in event):
                    record = record_of(each)
                    yield record if shell.json else {**record, "reason": output.reason_text(record)}

    if follow:
        heading = shell.below("", deque(new(), LAST if count is None else most(count)), COLUMNS, SPARE)
        while True:
            time.sleep(PAUSE)
            heading = shell.below(heading, new(), COLUMNS, SPARE)
    records = new() if count is None else iter(deque(new(), most(count)))
    first = list(islice(records, 1))
    shell.show(chain(first, records), COLUMNS, spare=SPARE)
    return OK if first or count == 0 else NEGATIVE


def record_of(event: Event) -> Record:
    """Return what a line of the log says, by the names of its keys."""
    return {"time": event.time, "event": event.event, **event.fields, "by": event.by, "host": event.host}


def deliveries(queue: Queue, id: str) -> tuple[list[Record], datetime | None]:
    """Return what the log says of a message, and how far back it goes; None if there is no log, or it is closed."""
    reader = Reader(queue.layout.log)
    try:
        return list(map(record_of, deque(reader.events(id=id), MOST))), reader.begins()
    except OSError as error:
        output.note(f"what went by is not shown: {describe(error)}")
        return [], None


def words(record: Record) -> str:
    """Return a line of the log in words."""
    parts = [str(record["event"])]
    if record.get("to"):
        parts.append(f"to {record['to']}")
    if record.get("owner"):
        parts.append(f"in delivery {record.get('delivery')} by {record['owner']}")
    if "seconds" in record:
        parts.append(f"after {record['seconds']} s")
    if why := output.reason_text(record):
        parts.append(f"({why})")
    via = f" by {record['via']}" if record.get("via") else ""
    return f"{' '.join(parts)}, user {record['by']}{via} on {str(record['host']).rpartition('-')[0] or record['host']}"


def _time(text: str) -> datetime:
    """Return the time that an option names: a time, in UTC where it says no zone, or how long ago."""
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    except ValueError:
        pass
    try:
        return time_of(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a time, such as 2026-11-29T08:00Z, nor a period, such as 1h", param_hint="'--since'"
        ) from None
