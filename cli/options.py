"""The arguments and options that several commands take, each declared in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dropq.format.layout import ALL_STATES

#: Seconds of a lease where neither the command nor the queue has a period.
LEASE = 60.0

if TYPE_CHECKING:
    from dropq import Queue

    State = str
else:  # typer takes the choices from here
    State = Literal[ALL_STATES]

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue.", show_default=False)]
QueueNames = Annotated[list[str] | None, typer.Argument(metavar="QUEUE", help="The queues; all by default.")]
QueueOrRoot = Annotated[
    str | None, typer.Argument(metavar="QUEUE", help="The queue; by default all queues of the root.")
]
TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Message ids or file names; - reads them from standard input, one a line."),
]
Receipts = Annotated[
    list[str],
    typer.Argument(
        metavar="RECEIPT",
        help="Receipts from `receive`, or message ids where leasing is sublet; - reads them from standard input.",
        show_default=False,
    ),
]
MessageId = Annotated[str, typer.Argument(metavar="ID", help="An id, file name or receipt.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option for its queue.toml; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
All = Annotated[bool, typer.Option("--all", help="Take every message of the state.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the sum and the errors: no line for each message, no progress bar.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal to ask on.")]
Filter = Annotated[
    str | None,
    typer.Option("--filter", metavar="FILTER", help="Only messages that match.", show_default=False),
]


def _seconds(text: str) -> float:
    from dropq.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def lease_seconds(text: str) -> float:
    """Return the seconds of a lease that was given as an option."""
    from dropq.queue.message import LEAST_LEASE

    seconds = _seconds(text)
    if seconds < LEAST_LEASE:
        raise typer.BadParameter(f"{text!r}: a lease lasts at least 1ms")
    return seconds


def duration(*names: str, help: str, parser: Callable[[str], float] = _seconds) -> Any:
    """Return an option that takes a duration, in seconds for the command."""
    return typer.Option(*names, parser=parser, metavar="DURATION", help=help, show_default=False)


#: An option that takes how long a lease lasts, in seconds for the command.
lease_period = partial(duration, parser=lease_seconds)


def lease_of(queue: Queue, given: float | None) -> float:
    """Return the seconds that a lease lasts: as given, else as the queue is configured, else a minute."""
    return given if given is not None else queue.config.lease_period or LEASE


def state(help: str) -> Any:
    """Return the option that names a state."""
    return typer.Option("--state", metavar="STATE", help=f"{help} One of {', '.join(ALL_STATES)}.")
