"""The command that serves routes and selectors, of a queue or of the root, and distributes what is published."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import QueueOrRoot, option
from .output import NEGATIVE, OK
from .shell import Shell, despite_closed_stdout

#: The columns of `route`.
COLUMNS = ("queue", "kind", "name", "moved")


def route(
    ctx: typer.Context,
    name: QueueOrRoot = None,
    once: Annotated[bool, option("--once", "End after one pass.")] = False,
) -> int:
    """Serve routes and selectors, and distribute what is published.

    Consumers move what a route takes by themselves. This does it where nobody consumes, and carries on what selectors
    take; the rest stays in target/. In a topic it also gives each receiver its copy of what scripts publish, as
    consumers of the receivers do. Without QUEUE it serves all of the root, also what is made later.

    It runs until a SIGTERM, SIGHUP or Ctrl-C, and then prints how many messages each route and selector took. Exits
    with 1 when one of them cannot be used, or a queue of the root cannot be served; the warning says why.
    """
    from dropq.routing import Router, Routers, Serving
    from dropq.routing.serve import Taken, serve_once
    from dropq.upkeep.sweep import sweeps_of_routers
    from dropq.worker.loop import Stop, stop_on_signals

    shell = Shell(ctx)
    sweep = sweeps_of_routers()
    served: Router | Routers
    if name is None:
        shell.check_root()
        served = Routers(shell.root.context, sweep=sweep)
    else:
        queue = shell.queue(name)
        served = Router(queue.context, sweep=sweep(queue.context))
    serving = Serving(served)
    with despite_closed_stdout(), stop_on_signals(Stop()) as stop, stop.waking(serving.wake):
        try:
            if once:
                serve_once(served, lambda: stop.asked)
            else:
                serving.run(lambda: stop.asked)
        finally:  # whatever ends it, this is done
            taken = served.taken if isinstance(served, Routers) else {queue.name: Taken(served.moved, served.selected)}
            shell.show(
                (
                    {"queue": address, "kind": kind, "name": name, "moved": count}
                    for address, took in sorted(taken.items())
                    for kind, counts in (("route", took.routes), ("selector", took.selectors))
                    for name, count in sorted(counts.items())
                    if count
                ),
                COLUMNS,
            )
            output.flush()
            routed = sum(took.routes.total() for took in taken.values())
            selected = sum(took.selectors.total() for took in taken.values())
            output.note(f"routed={routed} selected={selected} distributed={served.distributed}")
    return NEGATIVE if served.has_unusable else OK
