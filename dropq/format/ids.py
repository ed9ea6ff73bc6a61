"""Message ids: unique, and increasing within a process."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable


class IdSource:
    """Makes message ids: 13 digits of ms since 1970, 3 of sequence, `-`, 10 random digits.

    A signal handler may make an id while it interrupts its own thread in `next`. Python runs it only between two calls,
    and nothing is called between reading the last number and storing the next.
    """

    def __init__(self, now_ms: Callable[[], int], rng: random.Random | None = None) -> None:
        self._now_ms = now_ms
        self._random = rng or random.Random()
        self._lock = threading.RLock()
        self._last = 0
        self._moments: dict[str, int] = {}
        _sources.add(self)

    def next(self) -> str:
        """Return an id that sorts after every earlier id of this process."""
        now = self._now_ms() * 1000
        with self._lock:
            number = self._last = now if now > self._last else self._last + 1
        return "%016d-%010d" % (number, self._random.getrandbits(33))  # noqa: UP031 - half the time

    def take(self, count: int) -> list[str]:
        """Return `count` ids, in order."""
        bits = self._random.getrandbits
        now = self._now_ms() * 1000
        with self._lock:
            first = now if now > self._last else self._last + 1
            self._last = first + count - 1
        return ["%016d-%010d" % (number, bits(33)) for number in range(first, first + count)]  # noqa: UP031

    def moment(self, message_id: str) -> int:
        """Return the time, in ms since 1970; a later one for each message of an id that begins to wait in one ms."""
        now = self._now_ms()
        with self._lock:
            self._moments = {id: moment for id, moment in self._moments.items() if moment >= now}
            self._moments[message_id] = moment = max(now, self._moments.get(message_id, 0) + 1)
        return moment

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # a thread that the child does not have may hold the parent's lock
        self._random.seed()


_sources: weakref.WeakSet[IdSource] = weakref.WeakSet()


def _reseed() -> None:
    for source in list(_sources):
        source._after_fork()


os.register_at_fork(after_in_child=_reseed)
