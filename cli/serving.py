"""Commands that serve queues until they are stopped: routes and selectors, clients of PZQ, and browsers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypedDict, Unpack

import typer

from dropq.errors import Missing

from . import output
from .options import QueueName, QueueOrRoot, duration, lease_seconds, option, with_options
from .output import NEGATIVE, OK
from .shell import Shell, UsageError, despite_closed_stdout

#: The columns of `route`.
COLUMNS = ("queue", "kind", "name", "moved")
#: The longest --ack-timeout, in seconds.
A_DAY = 86400
#: What a letter behind a number of bytes stands for.
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in UNITS or not int(number):
        raise typer.BadParameter(f"{text!r}: a number of bytes from 1 is allowed, such as 1000, 64K, 64M or 1G")
    return int(number) * UNITS[unit]


def _ack_seconds(text: str) -> float:
    seconds = lease_seconds(text)
    if seconds > A_DAY:
        raise typer.BadParameter(
            f"{text!r}: at most 1d is allowed; a bare number is seconds, and PZQ's are microseconds (its default is 5s)"
        )
    return seconds


@contextmanager
def _needing(command: str, extra: str, *packages: str) -> Iterator[None]:
    """Raise Missing where the block imports from a package of an extra that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in packages:
            raise
        raise Missing(f"{command} needs the extra {extra}: pip install 'dropq[{extra}]'") from error


class TermOptions(TypedDict):
    """The options of `serve`, as `Terms` has them."""

    receive: Annotated[str, option("--receive ADDRESS", "Where producers connect."), "tcp://127.0.0.1:11131"]
    send: Annotated[str, option("--send ADDRESS", "Where consumers connect."), "tcp://127.0.0.1:11132"]
    monitor: Annotated[str, option("--monitor ADDRESS", "Where monitors connect."), "tcp://127.0.0.1:11133"]
    ack_timeout: Annotated[
        float | None,
        duration(
            "--ack-timeout", "How long a message is a consumer's; else the queue's lease_period, else 5s.", _ack_seconds
        ),
    ]
    in_flight: Annotated[int, option("--in-flight N", "How many messages may be at consumers at once.", min=1), 100]
    hwm: Annotated[int, option("--hwm N", "How many messages may wait for each consumer.", min=1), 10]
    max_size: Annotated[
        int, option("--max-size BYTES", "The most bytes of a message; K, M and G may follow.", parser=_bytes), "64M"
    ]
    keys: Annotated[str | None, option("--keys DIR", "Let in only those whose keys are here (CURVE).")]
    headers: Annotated[bool, option("--headers", "Pass on priority, properties and others as a JSON header."), False]
    insecure: Annotated[bool, option("--insecure", "Let everybody in, also from other machines."), False]


@with_options(TermOptions)
def serve(
    ctx: typer.Context,
    name: QueueName,
    zmq: Annotated[bool, option("--zmq", "Serve clients of PZQ, over ZeroMQ.")] = False,
    **terms: Unpack[TermOptions],
) -> int:
    """Serve a queue to clients of PZQ, over ZeroMQ.

    Producers send to the queue, consumers receive from it, monitors ask for figures, as docs/zeromq.md says. An
    ADDRESS is tcp://HOST:PORT, or ipc://PATH in a folder of its owner alone or a sticky one; where others can reach it,
    --keys or --insecure is needed. Prints where the sockets are bound once they are.

    It runs until a SIGTERM, SIGHUP or Ctrl-C. Then it sends nothing more, and waits for acks until the last
    --ack-timeout is over; after a second signal it returns at once what is not acknowledged. With --keys, a SIGHUP
    lets it read the keys again.
    """
    if not zmq:
        raise UsageError("give --zmq, the protocol to serve")
    with _needing("serve --zmq", "zmq", "zmq", "nacl"):
        from dropq.zmq.server import Server, Terms
    from dropq.worker.loop import Stop, stop_on_signals

    shell = Shell(ctx)
    queue = shell.queue(name)
    shell.warn_of_topic(queue)
    server = Server(queue, Terms(**terms))
    if terms["insecure"]:
        output.note("warning: everybody who reaches these sockets may take and send messages (--insecure)")
    with despite_closed_stdout(), stop_on_signals(Stop()) as stop, server.opened() as bound:
        if terms["keys"] is not None:
            signal.signal(signal.SIGHUP, lambda *_: server.reread_keys())
        shell.line({"queue": queue.name, **bound}, ("queue", "receive", "send", "monitor"))
        output.flush()
        server.run(stop)
    return OK


def route(
    ctx: typer.Context, name: QueueOrRoot = None, once: Annotated[bool, option("--once", "End after one pass.")] = False
) -> int:
    """Serve routes and selectors, and distribute what is published.

    Consumers move what a route takes by themselves. This does it where nobody consumes, and carries on what selectors
    take; the rest stays in target/. In a topic it also gives each receiver its copy of what scripts publish, as
    consumers of the receivers do. Without QUEUE it serves all of the root, also what is made later.

    It runs until a SIGTERM, SIGHUP or Ctrl-C, and then prints how many messages each route and selector took. Exits
    with 1 when one of them cannot be used, or a queue of the root cannot be served; the warning says why.
    """
    from dropq.routing import Router, Routers, Serving
    from dropq.routing.serve import serve_once
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
            taken = served.taken if isinstance(served, Routers) else {queue.name: served.taken}
            records = (
                {"queue": address, "kind": kind, "name": name, "moved": count}
                for address, took in sorted(taken.items())
                for kind, counts in (("route", took.routes), ("selector", took.selectors))
                for name, count in sorted(counts.items())
                if count
            )
            shell.show(records, COLUMNS)
            output.flush()
            routed = sum(took.routes.total() for took in taken.values())
            selected = sum(took.selectors.total() for took in taken.values())
            output.note(f"routed={routed} selected={selected} distributed={served.distributed}")
    return NEGATIVE if served.has_unusable else OK


def web(
    ctx: typer.Context,
    listen: Annotated[
        str, option("--listen ADDRESS", "Where it listens: a loopback HOST:PORT, or unix:PATH.")
    ] = "127.0.0.1:8077",
    writable: Annotated[bool, option("--writable", "Let people requeue, purge, pause and resume.")] = False,
    no_bodies: Annotated[bool, option("--no-bodies", "Show no bodies, and let nobody save or filter by them.")] = False,
    proxy_user: Annotated[
        str | None,
        option("--proxy-user HEADER", "A proxy logs people in, and names them in HEADER; needs --listen unix:PATH."),
    ] = None,
) -> int:
    """Show the queues as pages for a browser.

    It prints the link to open. Whoever has the link sees what this user sees. The link ends with this process. On
    another machine, `ssh -L 8077:127.0.0.1:8077 HOST` makes it work there. The command runs until a SIGTERM, SIGHUP or
    Ctrl-C.
    """
    with _needing("web", "web", "werkzeug", "waitress", "jinja2", "markupsafe"):
        from dropq.web import application
        from dropq.web.server import bound
        from dropq.web.server import serve as serve_page
    if proxy_user is not None and not re.fullmatch("[A-Za-z0-9-]+", proxy_user):
        raise UsageError("--proxy-user takes the name of a header: letters, digits and hyphens, such as X-User")
    shell = Shell(ctx)
    shell.check_root()
    try:
        listener = bound(listen, for_proxy=proxy_user is not None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--listen'") from None
    page = application(shell.root, writable=writable, bodies=not no_bodies, user_header=proxy_user or "")

    def ready() -> None:
        if isinstance(at := listener.getsockname(), str):
            record = {"socket": os.path.abspath(at), "path": page.link}
            shell.line(record, ("socket", "path"))
        else:
            host = f"[{at[0]}]" if ":" in at[0] else at[0]
            shell.line({"url": f"http://{host}:{at[1]}{page.link}"}, ("url",))
        output.flush()

    serve_page(page, listener, ready)
