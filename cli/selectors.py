"""Commands of selectors: add one to a queue, list them, and remove one."""

from __future__ import annotations

from contextlib import suppress
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dropq.errors import Missing

from . import output
from .options import Filter, QueueName, QueueOrRoot, argument, option
from .output import NEGATIVE, OK, TRY_LATER, Record, unescape
from .parsing import Command, group
from .shell import Shell, UsageError

if TYPE_CHECKING:
    from dropq import Queue

#: The columns of `selector ls`.
COLUMNS = ("queue", "name", "op", "to", "filter", "role", "credit", "free")

SelectorName = Annotated[str, argument("NAME", "The name of the selector.")]

selector = group("selector", "Make selectors, which carry messages from queue to queue.")


@selector.command("add", cls=Command)
def add(
    ctx: typer.Context,
    name: QueueName,
    selector: SelectorName,
    to: Annotated[
        list[str] | None,
        option(
            "--to TO",
            "The queue or topic that it sends to; of a bounce, a return address that it goes to, several where "
            "given again, by default temp-*, where * stands for the rest of a name.",
        ),
    ] = None,
    op: Annotated[
        Literal["move", "copy", "bounce"],
        option("--op OP", "What it does: move, copy, or bounce to the return address."),
    ] = "move",
    filter: Filter = None,
    credit: Annotated[
        int | None, option("--credit N", "How many messages that it moved may be unsettled at a time; else 1.")
    ] = None,
    role: Annotated[
        Literal["normal", "default", "overflow"],
        option(
            "--role ROLE",
            "When it is asked: normal; default, where no other takes a message; overflow, by senders to a full queue.",
        ),
    ] = "normal",
) -> None:
    """Add a selector to a queue; prints the path of its file.

    It takes waiting messages as soon as somebody serves the queue, as `dropq route QUEUE` does.
    """
    from dropq.filters import compile_filter
    from dropq.policies.selectors import path_of

    shell = Shell(ctx)
    queue = shell.queue(name)
    if filter is not None:
        with suppress(Missing):  # who adds a selector need not be who routes
            compile_filter(filter)  # `add_selector` would raise ConfigError, as for a file, and not InvalidFilter
    destinations = [unescape(each) for each in to or ()]
    if op != "bounce" and len(destinations) > 1:
        raise UsageError("give one --to: only a bounce goes to several addresses")
    destination = destinations if op == "bounce" and destinations else next(iter(destinations), None)
    made = queue.add_selector(selector, to=destination, op=op, filter=filter, credit=credit, role=role)
    path = path_of(queue.context, made.name)
    shell.line({"queue": queue.name, "name": made.name, "path": path}, ("path",))


@selector.command("ls", cls=Command)
def ls(ctx: typer.Context, name: QueueOrRoot = None) -> int:
    """List selectors, with their credits.

    A credit is free unless it was spent on a message that is not settled yet. Exits with 1 when the file of a selector
    cannot be used; stderr says why.
    """
    shell = Shell(ctx)
    records: list[Record] = []
    unusable: list[str] = []

    def list_one(address: str) -> None:
        found, problems = _listed(shell.root.queue(address))
        records.extend(found)
        unusable.extend(problems)

    act = shell.unless_gone(list_one) if name is None else list_one
    code = shell.each(shell.queues(None if name is None else [name]), act)
    shell.show(records, COLUMNS, spare=("role", "filter"))
    for problem in unusable:
        output.note(f"error: {problem}")
    if name is None:
        shell.check_root()
    if not records and not unusable and code == OK:
        where = shell.root.path if name is None else f"queue {name}"
        output.note(f"{where} has no selectors: `dropq selector add QUEUE NAME --to TO` makes one")
    return code or (NEGATIVE if unusable else OK)


def _listed(queue: Queue) -> tuple[list[Record], list[str]]:
    """Return the selectors of a queue as records, and what is wrong with their files."""
    from dropq.lifecycle.credits import spent
    from dropq.policies.selectors import read
    from dropq.routing.registry import removed_in

    context = queue.context
    with context.error_context("nothing was changed"):
        found, problems = read(context)
        for gone in removed_in(context):
            output.note(f"selector {gone} of {queue.name} is removed, and what it moved is on its way back")
        records: list[Record] = [
            {
                "queue": queue.name,
                "name": one.name,
                "op": one.op,
                "to": list(one.returns_to) if one.op == "bounce" else one.to,
                "filter": one.filter,
                "role": one.role,
                "credit": one.credit,
                "free": None if one.credit is None else max(one.credit - len(spent(context.layout, one.token)), 0),
            }
            for one in found
        ]
    return records, [problem for of_file in problems.values() for problem in of_file]


@selector.command("rm", cls=Command)
def rm(ctx: typer.Context, name: QueueName, selector: SelectorName) -> int:
    """Remove a selector; what it moved returns.

    What is settled stays where it is. All else returns to the queue, also from queues further on, and a consumer that
    holds it loses its claim. Exits with 75 when something is under way still after ten seconds: any router or sweep
    brings it back, and the same command waits for it again.
    """
    from dropq.lifecycle.credits import spent

    shell = Shell(ctx)
    queue = shell.queue(name)
    tokens = [one.token for one in queue.selectors() if one.name == selector and one.token]
    moved = sum(len(spent(queue.layout, token)) for token in tokens)
    done = queue.remove_selector(selector)
    shell.line({"queue": queue.name, "name": selector, "unsettled": moved, "returned": done}, ("name", "unsettled"))
    if not done:
        again = f"`dropq selector rm {quote(output.escape(queue.name))} {quote(selector)}` waits for it again"
        output.note(
            f"selector {selector} is removed, but what it moved is not all back in {queue.name}: any router or sweep "
            f"goes on with that, and {again}"
        )
        return TRY_LATER
    output.note(f"selector {selector} is removed: unsettled={moved}, all of them back in {queue.name} or settled since")
    return OK
