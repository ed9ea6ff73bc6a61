"""What producers send, and the answers: a message is answered with 1 once it is stored as durably as the queue asks.

Invariant: each message that is read gets one answer, unless its producer is gone. What was read and finds no room stays
in memory, at most a batch, and until it has room nothing more is read: so the sockets of the producers hold them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from dropq.api import Queue
from dropq.errors import DropqError, StorageError
from dropq.policies.send_limits import MustWait
from dropq.queue.sender import BATCH, PLAIN, Sent
from dropq.storage.watch import PAUSE
from dropq.zmq import wire
from dropq.zmq.sockets import Peer, Socket, answered, name_of, received
from dropq.zmq.zmtp import ID, Got


class _Asked(NamedTuple):
    """A message that was read and has no answer yet."""

    peer: Peer
    id: bytes
    message: bytes | Mapping[str, Any]


class Producers:
    """The producers of one queue, which this object alone may use; the last arguments are those of `Terms`."""

    def __init__(self, socket: Socket, queue: Queue, *, max_size: int, headers: bool) -> None:
        queue._waits = False
        self._socket = socket
        self._queue = queue
        self._max_size = max_size
        self._headers = headers
        self._asked = deque[_Asked]()
        self._tries_at = 0.0
        self._unlogged = 0
        #: How many messages were answered so, and how many batches were stored.
        self.stored = self.refused = self.syncs = 0

    @property
    def blocked_for(self) -> float | None:
        """Seconds until to try again to store what found no room; None if nothing waits for room."""
        return max(self._tries_at - time.monotonic(), 0.0) if self._asked else None

    def serve(self, *, reads: bool) -> None:
        """Store what producers have sent, as far as there is room, and answer it; read more if it `reads`."""
        if self._asked and time.monotonic() < self._tries_at:
            return
        if not self._asked and reads:
            self._read()
        if self._asked:
            self._store()

    def end(self) -> None:
        """Refuse what was read and found no room."""
        while self._asked:
            one = self._asked.popleft()
            self._refuse(one.peer, one.id, "the server ends, and the queue has no room: the message was not stored")

    def _read(self) -> None:
        size = 0
        while len(self._asked) < BATCH and size <= self._max_size and (got := received(self._socket)) is not None:
            peer, message = got
            size += message.size
            try:
                self._asked.append(self._understood(peer, message))
            except ValueError as error:
                self._refuse(peer, message.frames[0][:ID], str(error))

    def _understood(self, peer: Peer, got: Got) -> _Asked:
        if not got.whole:
            raise ValueError(f"the message has more than {self._max_size} bytes, or {wire.MOST_FRAMES} frames")
        id, headers, parts = wire.read_message(got.frames)
        if (size := len(id) + sum(map(len, headers))) > ID:
            raise ValueError(f"the id and the headers have {size} bytes: at most {ID} are allowed")
        if (size := sum(map(len, parts))) > self._max_size:
            raise ValueError(f"the message has {size} bytes: at most {self._max_size} are allowed (--max-size)")
        body, lengths = wire.joined(parts)
        fields = wire.fields_of(headers) if self._headers else {}
        if lengths is not None:
            fields["properties"] = {**fields.get("properties", {}), wire.PARTS: lengths}
        return _Asked(peer, id, {**fields, "body": body} if fields else body)

    def _store(self) -> None:
        failed = self._store_first(len(self._asked))
        while failed and self._asked:  # one of them, or all: each gets its own answer
            before = len(self._asked)
            if (error := self._store_first(1)) is not None and len(self._asked) == before:
                if isinstance(error, MustWait):
                    return
                one = self._asked.popleft()
                self._refuse(one.peer, one.id, str(error))

    def _store_first(self, count: int) -> DropqError | ValueError | MustWait | None:
        """Store messages, and answer those that were stored; return why the others were not."""
        sent = list[Sent]()
        failed: DropqError | ValueError | MustWait | None = None
        try:
            self._send(sent, count)
        except MustWait as error:
            self._tries_at = time.monotonic() + PAUSE
            self._socket.network.log("producers", "producers wait: %s", error)
            failed = error
        except (DropqError, ValueError) as error:
            failed = error
        self.syncs += bool(sent)
        undurable = str(failed) if isinstance(failed, StorageError) and failed.unsynced else ""
        for result in sent:
            one = self._asked.popleft()
            if undurable or not result.accepted:
                full = f"queue {self._queue.name} is full, and discards: the message was not stored"
                self._refuse(one.peer, one.id, undurable or full)
            else:
                self.stored += 1
                answered(one.peer, wire.stored(one.id))
        return failed

    def _send(self, sent: list[Sent], count: int) -> None:
        """Send messages; add what became of each to a list, also where an error ends it."""
        first = self._asked[0].message
        if count > 1 or isinstance(first, Mapping):
            self._queue._send_into(sent, [self._asked[at].message for at in range(count)])
            return
        try:  # with less around it: a producer waits for the answer
            self._queue._to_who_takes(lambda sender: sent.append(sender._send(first, PLAIN)))
        except StorageError as error:
            if error.unsynced:
                sent.append(Sent("", True, self._queue.name))
            raise

    def _refuse(self, peer: Peer, id: bytes, why: str) -> None:
        self.refused += 1
        self._unlogged += 1
        answered(peer, wire.refused(id, why))
        said = "%d messages of producers were refused, the last of %s: %s"
        if self._socket.network.log("producers", said, self._unlogged, name_of(peer), why):
            self._unlogged = 0
