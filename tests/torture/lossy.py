"""A way between an NFS client and its server on which replies get lost, and with them the connection.

The server has done what it was asked for; the client asks again on a new connection, from another port, so that the
server does not know the question: as when it was restarted in between.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

NFS = 100003
#: What NFS 3 calls procedures, and what 4 calls operations.
PROCEDURES = {"CREATE": 8, "MKDIR": 9, "REMOVE": 12, "RENAME": 14, "LINK": 15}
OPERATIONS = {"CREATE": 18, "MKDIR": 6, "REMOVE": 28, "RENAME": 29, "LINK": 11}
#: Operations that stand before the one that matters in a request of NFS 4: SEQUENCE, PUTFH, PUTROOTFH, SAVEFH.
SEQUENCE, PUTFH, PUTROOTFH, SAVEFH = 53, 22, 24, 32


def records(stream: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield what comes over a connection, record by record: as it came, and without the marks of its fragments."""
    raw = record = b""
    while header := _exactly(stream, 4):
        mark: int = struct.unpack(">I", header)[0]
        fragment = _exactly(stream, mark & 0x7FFFFFFF)
        raw, record = raw + header + fragment, record + fragment
        if mark >> 31:
            yield raw, record
            raw = record = b""


def _exactly(stream: socket.socket, length: int) -> bytes:
    """Read so many bytes; none when the connection ends before."""
    chunks = []
    while length:
        try:
            chunk = stream.recv(length)
        except OSError:
            return b""
        if not chunk:
            return b""
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def asked(record: bytes) -> str | None:
    """Return which of the known calls a request is; None for any other."""
    reader = _Reader(record)
    _, kind, _, program, version, procedure = (reader.number() for _ in range(6))
    if kind != 0 or program != NFS:
        return None
    if version == 3:
        return _named(PROCEDURES, procedure)
    if version != 4 or procedure != 1:
        return None
    for _ in range(2):  # who asks, and what proves it
        reader.number()
        reader.opaque()
    reader.opaque()  # a tag, for whoever reads along
    reader.number()  # the minor version
    for _ in range(reader.number()):
        operation = reader.number()
        if operation == SEQUENCE:
            reader.skip(32)
        elif operation == PUTFH:
            reader.opaque()
        elif operation not in (SAVEFH, PUTROOTFH):
            return _named(OPERATIONS, operation)
    return None


def _named(numbers: dict[str, int], wanted: int) -> str | None:
    return next((name for name, number in numbers.items() if number == wanted), None)


class _Reader:
    """Reads numbers and opaque data in the external representation, one after another; zeros past the end."""

    def __init__(self, record: bytes) -> None:
        self._record, self._at = record, 0

    def number(self) -> int:
        found = self._record[self._at : self._at + 4].ljust(4, b"\0")
        self._at += 4
        return int.from_bytes(found)

    def opaque(self) -> None:
        length = self.number()
        self.skip(length + -length % 4)

    def skip(self, length: int) -> None:
        self._at += length


class Lossy:
    """Passes an NFS connection on, and loses the reply to a call when it is told to.

    Args:
        port: where it listens.
        server: the port of the server, on the same machine.
    """

    def __init__(self, port: int, server: int = 2049) -> None:
        self._server = server
        self._wanted: str | None = None
        self._armed = threading.Lock()
        #: How many replies were lost.
        self.lost = 0
        self._listening = socket.create_server(("", port))
        threading.Thread(target=self._listen, daemon=True).start()

    def lose(self, call: str) -> None:
        """Lose the reply to the next such call."""
        with self._armed:
            self._wanted = call

    def forgive(self) -> None:
        """Lose nothing any more."""
        with self._armed:
            self._wanted = None

    def _listen(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._server))
            doomed: set[bytes] = set()
            threading.Thread(target=self._up, args=(client, server, doomed), daemon=True).start()
            threading.Thread(target=self._down, args=(client, server, doomed), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, doomed: set[bytes]) -> None:
        for raw, record in records(client):
            with self._armed:
                if self._wanted is not None and asked(record) == self._wanted:
                    self._wanted = None
                    doomed.add(record[:4])  # its number, before the reply can be there
            if not _passed_on(server, raw):
                break
        _cut(client, server)

    def _down(self, client: socket.socket, server: socket.socket, doomed: set[bytes]) -> None:
        for raw, record in records(server):
            if record[:4] in doomed:
                self.lost += 1
                break
            if not _passed_on(client, raw):
                break
        _cut(client, server)


def _passed_on(to: socket.socket, raw: bytes) -> bool:
    try:
        to.sendall(raw)
    except OSError:
        return False
    return True


def _cut(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):  # it is cut already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
