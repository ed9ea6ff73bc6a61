"""What the monitor answers: figures of the queue and of this server.

A thread counts, and takes at most a tenth of the time for it: the loop that delivers and settles never waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

from dropq.api import Queue
from dropq.errors import DropqError
from dropq.format.layout import UNSETTLED
from dropq.queue.sender import BATCH
from dropq.storage import reading
from dropq.zmq import wire
from dropq.zmq.consumers import Consumers
from dropq.zmq.producers import Producers
from dropq.zmq.sockets import Peer, Socket, answered, received

#: How many times as long as a count takes it is used.
SHARE = 10
#: Requests that wait for a count; what is more is answered with an error.
MOST = 1000


class Monitor:
    """Answers requests for figures."""

    def __init__(
        self, socket: Socket, queue: Queue, producers: Producers, consumers: Consumers, wake: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._queue = queue
        self._producers = producers
        self._consumers = consumers
        self._wake = wake
        self._since = datetime.now(UTC)
        self._asking = list[Peer]()
        self._counted: dict[str, int] | DropqError | None = None
        self._good_until = 0.0
        self._counting = self._is_new = False

    def serve(self) -> None:
        """Answer who asked, once there is a count that is young enough."""
        for _ in range(BATCH):
            if (got := received(self._socket)) is None:
                break
            peer, (frames, whole, _) = got
            if whole and wire.is_question(frames) and len(self._asking) < MOST:
                self._asking.append(peer)
            else:
                why = f"send {wire.MONITOR.decode()}" if len(self._asking) < MOST else "too many wait for an answer"
                answered(peer, wire.complaint(why))
        if not self._asking or self._counting:
            return
        if self._counted is None or (time.monotonic() >= self._good_until and not self._is_new):
            self._counting = True
            threading.Thread(target=self._count, name="dropq-zmq-monitor", daemon=True).start()
            return
        counted, self._is_new = self._counted, False
        asking, self._asking = self._asking, []
        if isinstance(counted, DropqError):
            answer = wire.complaint(str(counted))
        else:
            answer = wire.figures(self._figures(counted))
        for peer in asking:
            answered(peer, answer)

    def _count(self) -> None:
        began = time.monotonic()
        try:
            counts = self._queue.counts()
            size = sum(_size(self._queue.layout.folder(state)) for state in UNSETTLED)
            self._counted = {**counts, "size": size, "paused": int(self._queue.paused)}
        except DropqError as error:
            self._counted = error
        except OSError as error:
            self._counted = DropqError(f"queue {self._queue.name} cannot be counted: {error}")
        now = time.monotonic()
        self._good_until = now + SHARE * (now - began)
        self._counting, self._is_new = False, True  # first: whoever is woken by this finds it done
        self._wake()

    def _figures(self, counted: Mapping[str, int]) -> dict[str, object]:
        out = self._consumers.out
        return {
            # The page's six, in its order and spelling.
            "messages": sum(counted[state] for state in UNSETTLED),
            "messages_in_flight": out,
            "db_size": counted["size"],
            "in_flightdb_size": out,
            "syncs": self._producers.syncs,
            "expired_messages": self._consumers.expired,
            # As PZQ's own program spells two of them.
            "messages_inflight": out,
            "inflight_db_size": out,
            # What is of this queue and this server.
            "queue": self._queue.name,
            **{figure: counted[figure] for figure in (*UNSETTLED, "error", "paused")},
            "stored": self._producers.stored,
            "refused": self._producers.refused,
            "acks": self._consumers.acked,
            "acks_late": self._consumers.late,
            "nacks": self._consumers.given_back,
            "since": self._since.isoformat(timespec="seconds"),
        }


def _size(folder: str) -> int:
    """Return the bytes of the files of a folder."""
    size = 0
    for entry in reading.entries(folder):
        with suppress(FileNotFoundError):  # RACE: it moved on
            size += entry.stat(follow_symlinks=False).st_size
    return size
