"""The wait of a subscription's threads for the next message: woken by the file system, or by another thread.

Threads wait in turns. An event that ended one thread's wait may concern the next thread, too, which tries in its turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dropq.lifecycle.timing import Timing
from dropq.storage.watch import RESCAN, Watch

if TYPE_CHECKING:
    from dropq.queue.message import Message


class Waiting:
    """The waiting threads of one subscription.

    Args:
        folder: the folder in which messages come: the queue's target/.
        leaving: folders; whatever leaves one of them ends a wait.
        timing: how long the thread rests after a long attempt.
        moved_in: called with the name of each file that an event says was moved into `folder`.

    Attributes:
        news: another object each time that there may be a new message.
        waits: whether a thread waits.
    """

    def __init__(
        self, folder: str, *, leaving: Sequence[str], timing: Timing, moved_in: Callable[[str], object]
    ) -> None:
        self._new_watch = partial(Watch, folder, leaving=leaving, moved_in={folder: moved_in})
        self._timing = timing
        self._turn = threading.RLock()
        self._watch: Watch | None = None
        self._closed = False
        self.news = object()
        self.waits = False

    def wait(
        self,
        news: object,
        until: float,
        *,
        attempt: Callable[[], Message | None],
        next_attempt: Callable[[], float],
        given_up: Callable[[], bool],
        is_quiet: Callable[[], bool],
    ) -> Message | None:
        """Try to receive each time that there may be a message; return None at the end of the time, or once closed.

        Args:
            news: what `self.news` was before the caller's own attempt, which found nothing.
            until: when to give up, by `time.monotonic()`.
            next_attempt: returns the seconds after which to try again without news.
            given_up: whether to return None at the next wake-up.
            is_quiet: whether nothing came since an earlier wait: then this is the same wait, and its pauses are long.
        """
        if not self._turn.acquire(timeout=max(min(until - time.monotonic(), threading.TIMEOUT_MAX), 0)):
            return None
        waits, self.waits = self.waits, True  # a signal handler may receive while its own thread waits
        try:
            watch = self._watch = self._watch or self._new_watch()
            if self._closed:  # RACE: a later close finds the watch, and an earlier close is seen here
                self._watch = None
                return None
            if not is_quiet():
                watch.begin()
            while not (self._closed or given_up()) and (left := until - time.monotonic()) > 0:
                if news is self.news:  # RACE: the thread that gives up says so first, and then brings news
                    watch.wait(min(left, next_attempt()))
                    self.news = object()
                news = self.news
                began = time.thread_time()
                if (message := attempt()) is not None:
                    return message
                if (took := time.thread_time() - began) > self._timing.long_attempt:  # at many messages for others
                    rest = min(took, RESCAN) * self._timing.listing_share
                    self._rest(watch, min(until, time.monotonic() + rest), given_up)
            return None
        finally:
            self.waits = waits
            self._turn.release()
            if waits:
                self.wake()  # what woke this wait of a signal handler may be for the wait that it interrupted

    def _rest(self, watch: Watch, until: float, given_up: Callable[[], bool]) -> None:
        while not (self._closed or given_up()) and (left := until - time.monotonic()) > 0:
            watch.rest(left)

    def wake(self) -> None:
        """Let the thread that waits try again."""
        self.news = object()
        # RACE: a thread that is about to wait sets `waits` first, and then compares the news.
        if self.waits and (watch := self._watch) is not None:
            watch.wake()

    def close(self) -> None:
        """End every wait, now and later."""
        self._closed = True
        self.wake()
        self._watch = None  # it goes with the thread that waits


class Ending:
    """Ends a request before its time, from another thread.

    Attributes:
        wake: wakes the thread that waits for the answer.
    """

    def __init__(self) -> None:
        self._given_up = False
        self.wake: Callable[[], object] = bool

    def has_come(self) -> bool:
        """Return whether the request was given up."""
        return self._given_up

    def give_up(self) -> None:
        """Let the request return None soon."""
        self._given_up = True
        self.wake()  # RACE: a request that has nothing to wake yet sees afterwards that it was given up
