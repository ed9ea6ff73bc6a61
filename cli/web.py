"""`dropq web`: the page."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from dropq.errors import Unavailable

from . import output
from .options import option
from .shell import Shell, UsageError


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
    try:
        from dropq.web import application
        from dropq.web.server import bound, serve
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("werkzeug", "waitress", "jinja2", "markupsafe"):
            raise
        raise Unavailable("web needs the extra web: pip install 'dropq[web]'") from error
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

    serve(page, listener, ready)
