"""`dropq top` and `dropq metrics`: the look for people, and for monitors."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import QueueNames, QueueOrRoot, duration, option
from .shell import Shell


def top(
    ctx: typer.Context,
    name: QueueOrRoot = None,
    interval: Annotated[float, duration("--interval", "The time between two screens.")] = 2.0,
    sort: Annotated[
        str | None, option("--sort COLUMN", "Order queues by this column, the largest first; else the worst.")
    ] = None,
    count: Annotated[
        int | None, option("-n N", "End after N looks; by default 1 into a pipe and with --json.", min=1)
    ] = None,
) -> int:
    """Show all queues as a screen, or one of them.

    The worst queue comes first. Of one queue it shows what is wrong, ages, holders, last failures and acts.
    IN and OUT are messages a second in the last minute, by the log; OUT is what was settled, IN what came. They are
    about right: what scripts settle is in neither. Ctrl-C ends it. Into a pipe, or with --json, it prints N looks as
    lines.
    """
    from .screen import top as show

    return show(Shell(ctx), name, interval, sort, count)


def metrics(
    ctx: typer.Context,
    queues: QueueNames = None,
    textfile: Annotated[
        str | None, option("--textfile FILE", "Write FILE, which ends in .prom, again and again for node_exporter.")
    ] = None,
    listen: Annotated[
        str | None, option("--listen ADDRESS", "Answer Prometheus at ADDR:PORT; who reaches that address may read.")
    ] = None,
    interval: Annotated[float, duration("--interval", "The time between two files.")] = 15.0,
) -> int:
    """Write metrics of queues, in the text format of Prometheus.

    With neither --textfile nor --listen it prints the gauges once, and exits with 1 when a queue could not be read.
    No answer waits for a disk: of a queue that does not answer it gives the last values, their age, and dropq_up 0.
    """
    from .exporter import metrics as write

    return write(Shell(ctx), queues, textfile, listen, interval)
