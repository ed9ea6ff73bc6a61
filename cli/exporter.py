"""What `dropq metrics` writes for Prometheus: once, in a file, or over HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import typer

from dropq.diagnosis.metrics import CONTENT_TYPE, Exporter
from dropq.diagnosis.overview import Viewer
from dropq.errors import QueueExists
from dropq.storage.failures import describe

from . import output
from .output import NEGATIVE, OK, unescape
from .shell import Shell, UsageError

#: Seconds that a client may take to ask.
PATIENCE = 10


def metrics(shell: Shell, queues: list[str] | None, textfile: str | None, listen: str | None, interval: float) -> int:
    """Write metrics; the arguments are those of `dropq metrics`."""
    if shell.json:
        raise UsageError("metrics are in the format of Prometheus: `dropq top --json` has the same as JSON")
    if textfile is not None and listen is not None:
        raise UsageError("give --textfile or --listen, not both")
    if textfile is not None and not textfile.endswith(".prom"):
        raise UsageError(f"--textfile {textfile}: the collector reads files whose names end in .prom")
    names = [unescape(name) for name in queues] if queues else None
    viewer, exporter = Viewer(shell.root.context, names), Exporter()
    if listen is not None:
        return _serve(viewer, exporter, *_address(listen))
    viewer.wait()
    if textfile is None:
        output.put(exporter.text(viewer, counters=False).removesuffix("\n"))
        are_read = (seen.look is not None and seen.look.health.error is None for seen in viewer.all())
        return OK if viewer.is_listed and all(are_read) else NEGATIVE
    while True:
        _write(textfile, exporter.text(viewer))
        viewer.keep_up(interval)


def _write(path: str, text: str) -> None:
    """Replace a file, so that a reader finds the old one or the new one."""
    draft = f"{path}.{os.getpid()}"
    try:
        try:
            with open(draft, "x") as file:
                file.write(text)
            os.replace(draft, path)
        except FileExistsError:
            os.unlink(draft)  # of a process that died and had this number
            return _write(path, text)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        raise QueueExists(f"{path} cannot be written: {describe(error)}") from error


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is no ADDR:PORT, such as 127.0.0.1:9590", param_hint="'--listen'")
    return host.strip("[]"), int(port)


def _serve(viewer: Viewer, exporter: Exporter, host: str, port: int) -> int:
    """Answer until the process is ended; looks go on in threads of their own."""
    lock = threading.Lock()

    def text() -> str:
        with lock:
            return exporter.text(viewer)

    try:
        server = _Server((host, port), text)
    except OSError as error:
        raise QueueExists(f"{host}:{port} cannot be listened at: {describe(error)}") from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"[{host}]" if ":" in host else host
    output.note(f"metrics are at http://{where}:{server.server_address[1]}/metrics")
    try:
        while True:
            viewer.keep_up(60)
    finally:
        server.shutdown()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        self.text = text
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Answer with the last looks."""
        if self.path.partition("?")[0] != "/metrics":
            return self.send_error(404)
        assert isinstance(self.server, _Server)
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape comes every few seconds."""
