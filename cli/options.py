"""The arguments and options that several commands take, each declared in one place."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar, get_type_hints

import typer

from dropq.format.layout import ALL_STATES

from .shell import UsageError

#: Seconds of a lease where neither the command nor the queue has a period.
LEASE = 60.0

if TYPE_CHECKING:
    from dropq import Queue, Typed

    State = str
else:  # typer takes the choices from here
    State = Literal[ALL_STATES]

P = ParamSpec("P")
R = TypeVar("R")

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
RECEIPTS = "Receipts from `receive`, or message ids where leasing is sublet; - reads them from standard input."
Receipts = Annotated[list[str], typer.Argument(metavar="RECEIPT", help=RECEIPTS, show_default=False)]
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


class Headers(TypedDict):
    """What an option says of a message that is sent, beside its body."""

    properties: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--property",
            metavar="NAME[:TYPE]=VALUE",
            help="A property. TYPE is S (text, the default), B (boolean), Y, H, I, L (whole numbers of 8 to 64 bits), "
            "F or D (float, double).",
        ),
    ]
    priority: Annotated[int, typer.Option("--priority", metavar="N", help="Higher is delivered first.")]
    type: Annotated[str | None, typer.Option("--type", metavar="TYPE", help="The JMS type.")]
    correlation_id: Annotated[
        str | None, typer.Option("--correlation-id", metavar="ID", help="The JMS correlation id.")
    ]
    reply_to: Annotated[str | None, typer.Option("--reply-to", metavar="QUEUE", help="The queue for answers.")]
    expires_in: Annotated[float | None, duration("--expires-in", help="Expire it after this long.")]
    delay: Annotated[float | None, duration("--delay", help="Deliver it only after this long.")]
    id: Annotated[str | None, typer.Option("--id", metavar="ID", help="The message's id, instead of a generated id.")]


def with_headers(*only: str, **helps: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that gives a command with `**headers` options of `Headers`, all or `only` some.

    `helps` replaces helps.
    """

    def with_options(command: Callable[P, R]) -> Callable[P, R]:
        own = signature(command, eval_str=True)
        params = [param for param in own.parameters.values() if param.kind is not Parameter.VAR_KEYWORD]
        behind = sum(param.kind is not Parameter.KEYWORD_ONLY for param in params)
        for name, hint in get_type_hints(Headers, include_extras=True).items():
            if only and name not in only:
                continue
            option = copy(hint.__metadata__[0])
            option.help = helps.get(name, option.help)
            default, kind = 4 if name == "priority" else None, Parameter.KEYWORD_ONLY
            params.insert(behind, Parameter(name, kind, default=default, annotation=Annotated[hint.__origin__, option]))
            behind += 1
        command.__signature__ = own.replace(parameters=params)  # type: ignore[attr-defined]
        command.__annotations__ = {param.name: param.annotation for param in params}
        return command

    return with_options


def fields_of(headers: Headers) -> dict[str, Any]:
    """Return the arguments of `Queue.send` that the options say; UsageError for a property that cannot be read."""
    fields = {name: value for name, value in headers.items() if name != "id"}
    return {**fields, "message_id": headers["id"], "properties": properties_of(headers["properties"])}


def properties_of(given: list[str] | None) -> dict[str, Typed]:
    """Return the properties that options say; UsageError for one that cannot be read."""
    from dropq.format.typed import read_property

    try:
        return dict(map(read_property, given or ()))
    except ValueError as error:
        raise UsageError(f"-p {error}; nothing was sent") from error
