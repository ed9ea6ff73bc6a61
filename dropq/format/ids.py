"""Message ids: unique, and in the order of their making within a process."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable


class IdSource:
    """Makes message ids: 13 digits of ms, 3 of sequence, `-`, 10 random ones; increasing within a process.

    A signal handler may make one while its own thread does: it runs between two calls, never between the look at the
    last number and the keeping of the next, where nothing is called.
    """

    def __init__(self, now_ms: Callable[[], int], rng: random.Random | None = None) -> None:
        self._now_ms = now_ms
        self._random = rng or random.Random()
        self._lock = threading.RLock()
        self._last = 0
        _sources.add(self)

    def next(self) -> str:
        """Make an id that sorts behind all that this process made before."""
        now = self._now_ms() * 1000
        with self._lock:
            number = self._last = now if now > self._last else self._last + 1
        return "%016d-%010d" % (number, self._random.getrandbits(33))  # noqa: UP031 - half the time

    def take(self, count: int) -> list[str]:
        """Make so many ids at once, in order."""
        bits = self._random.getrandbits
        now = self._now_ms() * 1000
        with self._lock:
            first = now if now > self._last else self._last + 1
            self._last = first + count - 1
        return ["%016d-%010d" % (number, bits(33)) for number in range(first, first + count)]  # noqa: UP031

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # the parent's may have been held by a thread that is not here
        self._random.seed()


_sources: weakref.WeakSet[IdSource] = weakref.WeakSet()


def _reseed() -> None:
    for source in list(_sources):
        source._after_fork()
