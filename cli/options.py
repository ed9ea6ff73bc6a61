"""The arguments and options that several commands take, each declared in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar, get_type_hints

import typer

from dropq.durations import parse_duration
from dropq.format.layout import ALL_STATES
from dropq.format.typed import Typed, read_property

from .output import unescape
from .shell import UsageError

#: Seconds of a lease where neither the command nor the queue has a period.
LEASE = 60.0

if TYPE_CHECKING:
    from dropq import Queue

    State = str
else:  # typer takes the choices from here
    State = Literal[ALL_STATES]

P = ParamSpec("P")
R = TypeVar("R")


def option(written: str, help: str, **more: Any) -> Any:
    """Return an option as a help writes it, such as `-n, --count N`; without a name for its value it is a flag."""
    *names, last = written.split(", ")
    name, _, metavar = last.partition(" ")
    return typer.Option(*names, name, metavar=metavar or None, help=help, **more)


def argument(metavar: str, help: str) -> Any:
    """Return an argument."""
    return typer.Argument(metavar=metavar, help=help)


QueueName = Annotated[str, argument("QUEUE", "The queue.")]
QueueNames = Annotated[list[str] | None, argument("QUEUE", "The queues; all by default.")]
QueueOrRoot = Annotated[str | None, argument("QUEUE", "The queue; by default all queues of the root.")]
TopicName = Annotated[str, argument("TOPIC", "The topic.")]
Ids = Annotated[
    list[str] | None, argument("ID", "Message ids or file names; - reads them from standard input, one a line.")
]
RECEIPTS = "Receipts from `receive`, or message ids where leasing is sublet; - reads them from standard input."
Receipts = Annotated[list[str], argument("RECEIPT", RECEIPTS)]
MessageId = Annotated[str, argument("ID", "An id, file name or receipt.")]
Settings = Annotated[list[str] | None, option("--set KEY=VALUE", "An option for its queue.toml; may be repeated.")]
All = Annotated[bool, option("--all", "Take every message of the state.")]
DryRun = Annotated[bool, option("--dry-run", "Only report what would be done.")]
Quiet = Annotated[
    bool, option("--quiet, -q", "Print the sum and the errors: no line for each message, no progress bar.")
]
Yes = Annotated[bool, option("--yes, -y", "Do not ask; needed where there is no terminal to ask on.")]
Filter = Annotated[str | None, option("--filter FILTER", "Only messages that match.")]


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def lasting(what: str, least_ms: int, text: str) -> float:
    """Return the seconds of a period that was given as an option, and that lasts at least some milliseconds."""
    seconds = _seconds(text)
    if seconds * 1000 < least_ms:
        raise typer.BadParameter(f"{text!r}: {what} lasts at least {least_ms}ms")
    return seconds


def lease_seconds(text: str) -> float:
    """Return the seconds of a lease that was given as an option."""
    from dropq.queue.message import LEAST_LEASE

    return lasting("a lease", round(LEAST_LEASE * 1000), text)


def duration(name: str, help: str, parser: Callable[[str], float] = _seconds) -> Any:
    """Return an option that takes a duration, in seconds for the command."""
    return option(f"{name} DURATION", help, parser=parser)


#: Options that take how long a lease lasts, and how often a command looks again, in seconds for the command.
lease_period = partial(duration, parser=lease_seconds)
interval = partial(duration, parser=partial(lasting, "an interval", 100))


def lease_of(queue: Queue, given: float | None) -> float:
    """Return the seconds that a lease lasts: as given, else as the queue is configured, else a minute."""
    return given if given is not None else queue.config.lease_period or LEASE


def most(count: int | None) -> int | None:
    """Return how many at most, as Python's iterators take a number."""
    return None if count is None else min(count, sys.maxsize)


def point(text: str) -> str:
    """Return the point at which a replay or a subscription begins, as an option gives it."""
    from dropq.upkeep.archived import checked

    try:
        return checked(unescape(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def state(help: str, states: Iterable[str] = ALL_STATES) -> Any:
    """Return the option that names a state, one of `states`."""
    return option("--state STATE", f"{help} One of {', '.join(states)}.")


class Headers(TypedDict):
    """What options say of a message that is sent, beside its body."""

    properties: Annotated[
        list[str] | None,
        option(
            "-p, --property NAME[:TYPE]=VALUE",
            "A property. TYPE is S (text, the default), B (boolean), Y, H, I, L (whole numbers of 8 to 64 bits), "
            "F or D (float, double).",
        ),
    ]
    priority: Annotated[int, option("--priority N", "Higher is delivered first."), 4]
    type: Annotated[str | None, option("--type TYPE", "The JMS type.")]
    correlation_id: Annotated[str | None, option("--correlation-id ID", "The JMS correlation id.")]
    reply_to: Annotated[str | None, option("--reply-to QUEUE", "The queue for answers.")]
    expires_in: Annotated[float | None, duration("--expires-in", "Expire it after this long.")]
    delay: Annotated[float | None, duration("--delay", "Deliver it only after this long.")]
    id: Annotated[str | None, option("--id ID", "The message's id, instead of a generated id.")]


def with_options(options: type, *only: str, **helps: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that gives a command with `**options` those of a TypedDict, all or `only` some.

    Behind an option stands its default, if that is not None. `helps` replaces helps.
    """

    def with_those(command: Callable[P, R]) -> Callable[P, R]:
        own = signature(command, eval_str=True)
        params = [param for param in own.parameters.values() if param.kind is not Parameter.VAR_KEYWORD]
        behind = sum(param.kind is not Parameter.KEYWORD_ONLY for param in params)
        added = []
        for name, hint in get_type_hints(options, include_extras=True).items():
            if not only or name in only:
                shared, *default = hint.__metadata__
                option = copy(shared)
                option.help = helps.get(name, option.help)
                kind, annotation = Parameter.KEYWORD_ONLY, Annotated[hint.__origin__, option]
                added.append(Parameter(name, kind, default=next(iter(default), None), annotation=annotation))
        params[behind:behind] = added
        command.__signature__ = own.replace(parameters=params)  # type: ignore[attr-defined]
        command.__annotations__ = {param.name: param.annotation for param in params}
        return command

    return with_those


def fields_of(headers: Headers) -> dict[str, Any]:
    """Return the arguments of `Queue.send` that the options say; UsageError for a property that cannot be read."""
    fields = {name: value for name, value in headers.items() if name != "id"}
    fields["reply_to"] = headers["reply_to"] and unescape(headers["reply_to"])
    return {**fields, "message_id": headers["id"], "properties": properties_of(headers["properties"])}


def properties_of(given: list[str] | None) -> dict[str, Typed]:
    """Return the properties that options say; UsageError for one that cannot be read."""
    try:
        return dict(map(read_property, given or ()))
    except ValueError as error:
        raise UsageError(f"-p {error}; nothing was sent") from error
