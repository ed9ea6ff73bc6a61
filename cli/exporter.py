"""What `dropq metrics` writes for Prometheus: once, in a file, or over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import threading
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dropq.errors import NoSuchQueue, QueueExists
from dropq.lifecycle.queue_notes import why_away
from dropq.storage.failures import describe
from dropq.storage.files import Storage

from . import output
from .options import QueueNames, interval, option
from .output import NEGATIVE, OK, unescape
from .shell import Shell, UsageError

if TYPE_CHECKING:
    from dropq.diagnosis.metrics import Exporter
    from dropq.diagnosis.overview import Viewer

#: Seconds that a client may take to ask.
PATIENCE = 10


def metrics(
    ctx: typer.Context,
    queues: QueueNames = None,
    textfile: Annotated[
        str | None, option("--textfile FILE", "Write FILE, which ends in .prom, again and again for node_exporter.")
    ] = None,
    listen: Annotated[
        str | None, option("--listen ADDRESS", "Answer Prometheus at ADDR:PORT; who reaches that address may read.")
    ] = None,
    interval: Annotated[float, interval("--interval", "The time between two files.")] = 15.0,
) -> int:
    """Write metrics of queues, in the text format of Prometheus.

    With neither --textfile nor --listen it prints the gauges once, and exits with 1 when a queue could not be read.
    No answer waits for a disk: of a queue that does not answer it gives the last values, their age, and dropq_up 0.
    """
    from dropq.diagnosis.metrics import Exporter
    from dropq.diagnosis.overview import Viewer

    shell = Shell(ctx)
    if shell.json:
        raise UsageError("metrics are in the format of Prometheus: `dropq top --json` has the same as JSON")
    if textfile is not None and listen is not None:
        raise UsageError("give --textfile or --listen, not both")
    if textfile is not None and not textfile.endswith(".prom"):
        raise UsageError(f"--textfile {textfile}: the collector reads files whose names end in .prom")
    names = [unescape(name) for name in queues] if queues else None
    viewer, exporter = Viewer(shell.root.context, names), Exporter()
    if names or listen is None:
        viewer.wait()
        if viewer.is_listed and not viewer.all() and textfile is None:
            shell.check_root()
    for seen in viewer.all() if names else ():
        error = seen.last and seen.last.health.error
        if isinstance(error, NoSuchQueue) and not why_away(shell.root.layout, seen.name):
            raise error
    if listen is not None:
        return _serve(viewer, exporter, *_address(listen))
    if textfile is None:
        output.put(exporter.text(viewer, counters=False).removesuffix("\n"))
        are_read = (seen.last is not None and seen.last.health.error is None for seen in viewer.all())
        return OK if viewer.is_listed and all(are_read) else NEGATIVE
    _keep_written(viewer, exporter, os.path.abspath(textfile), interval)


def _keep_written(viewer: Viewer, exporter: Exporter, path: str, interval: float) -> NoReturn:
    """Replace a file again and again; once that was possible, it goes on also while its folder is away."""
    reported: bool | None = None  # whether it was reported that it cannot be written; None before the first time
    while True:
        try:
            Storage("none").write_small(path, exporter.text(viewer).encode())
            reported = False
        except OSError as error:
            why = f"{path} cannot be written: {describe(error)}"
            if reported is None:
                raise QueueExists(why) from error
            if not reported:
                output.note(f"warning: {why}; it is tried again")
            reported = True
        viewer.keep_up(interval)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is no ADDR:PORT, such as 127.0.0.1:9590", param_hint="'--listen'")
    return host.strip("[]"), int(port)


def _serve(viewer: Viewer, exporter: Exporter, host: str, port: int) -> int:
    """Answer until the process is ended; the looks that become due meanwhile begin in threads of their own."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from dropq.diagnosis.metrics import CONTENT_TYPE
    from dropq.diagnosis.overview import TICK

    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                return self.send_error(404)
            with lock:
                body = exporter.text(viewer).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a scrape comes every few seconds."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = AF_INET6 if ":" in host else AF_INET

        def service_actions(self) -> None:
            viewer.refresh()

        def handle_error(self, *request: Any) -> None:
            if not isinstance(sys.exception(), OSError):  # a scrape that was cut short is no news
                super().handle_error(*request)

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise QueueExists(f"{host}:{port} cannot be listened at: {describe(error)}") from error
    where = f"[{host}]" if ":" in host else host
    output.note(f"metrics are at http://{where}:{server.server_address[1]}/metrics")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a scrape that is cut short ends no exporter
    with server:
        server.serve_forever(TICK)
    return OK
