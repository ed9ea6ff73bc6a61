"""Serves the page: on a loopback port or a unix socket, until a signal ends it, whatever hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from waitress.server import create_server

from dropq.errors import ConfigError, QueueExists
from dropq.storage.failures import describe
from dropq.storage.files import remove_dead_socket
from dropq.web.app import Application
from dropq.web.guard import FORM_LIMIT

#: How many requests are answered at once: those that wait for a disk need a thread each. And how many connections are
#: open at once: most processes may have 1024 files.
THREADS, CONNECTIONS = 32, 500
#: Bytes of a request's header.
HEADER_LIMIT = 16 << 10
#: Seconds in which an act that runs may come to an end.
GRACE = 1.0
#: Seconds in which what an act told may be sent to the browser.
LAST = 0.2
#: The hosts that may be listened at without a proxy.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TCP = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/]+):([0-9]{1,5})")


def bound(address: str, *, for_proxy: bool) -> socket.socket:
    """Return a socket that is bound to HOST:PORT or unix:PATH.

    Args:
        for_proxy: whether a proxy connects, which shares the socket's group; else its user alone may connect.

    Raises:
        ConfigError: others than this user could connect there.
        QueueExists: it cannot be listened there, as somebody else does.
        ValueError: it is no address.
    """
    if address.startswith("unix:"):
        return _unix(address.removeprefix("unix:"), 0o660 if for_proxy else 0o600)
    if for_proxy:
        raise ConfigError(
            "--proxy-user needs --listen unix:PATH: on a port, whoever connects could name any user in that header"
        )
    found = _TCP.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"{address!r} is neither HOST:PORT, such as 127.0.0.1:8077, nor unix:PATH")
    host = found[1].strip("[]")
    if host not in LOOPBACK:
        raise ConfigError(
            f"--listen {address}: others could reach it. Listen at 127.0.0.1 and come by `ssh -L`, or at unix:PATH "
            "behind a proxy that logs people in, with --proxy-user"
        )
    host = "127.0.0.1" if host == "localhost" else host
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listening(listener, (host, int(found[2])), address)


def _unix(path: str, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    if not path:
        raise ValueError("unix: needs a path, such as unix:/run/dropq/web.sock")
    with suppress(OSError):  # to listen is refused then
        remove_dead_socket(path)
    before = os.umask(0o777 & ~mode)
    try:
        return _listening(listener, path, f"unix:{path}")
    finally:
        os.umask(before)


def _listening(listener: socket.socket, at: str | tuple[str, int], address: str) -> socket.socket:
    try:
        listener.bind(at)
        listener.listen()  # at once: until then another process may take the address
    except OSError as error:
        listener.close()
        raise QueueExists(f"--listen {address}: it cannot be had: {describe(error)}; name another") from error
    return listener


def serve(application: Application, listener: socket.socket, ready: Callable[[], None]) -> NoReturn:
    """Answer until SIGTERM or SIGINT, and end the process within two seconds, also while threads hang in a disk.

    Args:
        ready: called once connections are taken.
    """
    # They are blocked before a thread begins, and waited for: a handler that sets an event would wait for ever if it
    # interrupted the wait for that event where that holds its lock.
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    # A client that goes away ends no server; other commands end by this signal when nobody reads their output.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    server = create_server(
        application,
        sockets=[listener],
        threads=THREADS,
        connection_limit=CONNECTIONS,
        asyncore_use_poll=True,
        max_request_header_size=HEADER_LIMIT,
        max_request_body_size=FORM_LIMIT,
        ident=None,
        clear_untrusted_proxy_headers=True,
    )
    application.look()
    threading.Thread(target=server.run, daemon=True).start()
    ready()
    signal.sigwait(ending)
    application.end(GRACE)
    time.sleep(LAST)
    if listener.family == socket.AF_UNIX:
        with suppress(OSError):
            os.unlink(listener.getsockname())
    os._exit(0)  # a thread that hangs in a disk can neither be ended nor waited for
