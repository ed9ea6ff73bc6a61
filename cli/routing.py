"""The command that serves the routes of a queue, and distributes what is published to a topic."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import Json, QueueName
from .output import NEGATIVE, OK
from .shell import Shell, despite_closed_stdout


def route(
    ctx: typer.Context,
    name: QueueName,
    once: Annotated[bool, typer.Option("--once", help="End after one pass over the queue.")] = False,
    json: Json = False,
) -> int:
    """Serve the routes of a queue, or distribute what is published.

    Consumers move what a route takes by themselves. This does it where nobody consumes; the rest stays in target/. In a
    topic it also gives each receiver its copy of what scripts publish, as consumers of the receivers do. It runs until
    a SIGTERM, SIGHUP or Ctrl-C, and then prints how many messages went to which route.

    Exits with 1 when a route is in use that cannot be used; the warning says why.
    """
    from dropq.policies.routes import examine
    from dropq.routing import Router
    from dropq.upkeep.sweep import QuickSweep
    from dropq.worker.loop import Stop, stop_on_signals

    shell = Shell(ctx, json)
    context = shell.queue(name).context
    router = Router(context, sweep=QuickSweep(context, routes=False))
    with despite_closed_stdout(), stop_on_signals(Stop()) as stop, stop.waking(router.wake):
        try:
            if once:
                router.one_pass(lambda: stop.asked)
            else:
                router.run(lambda: stop.asked)
        finally:  # whatever ends it, this is done
            moved = [{"route": name, "moved": count} for name, count in sorted(router.moved.items())]
            shell.show(moved, ("route", "moved"))
            distributed = f" distributed={router.distributed}" if context.layout.is_topic else ""
            output.note(f"routed={router.moved.total()}{distributed}")
    return NEGATIVE if examine(context)[1] else OK
