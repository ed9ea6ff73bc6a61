"""Asks the disk for requests: a few at a time, for a few seconds, so that a disk that hangs keeps no page waiting.

What hangs keeps its thread. Of a queue that has not answered, nothing more is asked until it does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from typing import Generic, TypeVar

from dropq.web.guard import Refused

T = TypeVar("T")

#: How many threads ask the disk, and how many of them ask for one queue; how many requests may wait for a thread.
THREADS, OF_ONE, WAITING = 4, 2, 12
#: Seconds that a request waits for its answer.
PATIENCE = 5.0


class Disk:
    """The threads that ask a root's disk."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = Counter[str]()
        self._silent = Counter[str]()  # of those, whose requests have given up
        self._waiting = 0

    def ask(self, queue: str, act: Callable[[], T], seconds: float = PATIENCE) -> T:
        """Return what `act` returns, in another thread; raise what it raises.

        Args:
            queue: which queue it reads, to keep one that hangs from using up all threads.

        Raises:
            Refused: it takes longer than these seconds, or others have taken all threads for as long.
        """
        until = time.monotonic() + seconds
        self._begin(queue, until)
        task = _Task(act)
        threading.Thread(target=self._run, args=(queue, task), daemon=True).start()
        if not task.over.wait(max(until - time.monotonic(), 0)):
            with self._changed:
                if not task.over.is_set():
                    task.is_silent = True
                    self._silent[queue] += 1
                    raise Refused(503, f"{_where(queue)} has not answered for {seconds:.0f} s: {_LATER}")
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[return-value] # it ended without an error

    def _begin(self, queue: str, until: float) -> None:
        """Wait for a thread."""
        with self._changed:
            self._waiting += 1
            try:
                while self._silent[queue] or self._running[queue] >= OF_ONE or self._running.total() >= THREADS:
                    if self._silent[queue]:
                        raise Refused(503, f"{_where(queue)} does not answer: {_LATER}")
                    left = until - time.monotonic()
                    if self._waiting > WAITING or left <= 0:
                        raise Refused(503, f"Too many pages are being read from the disk: {_LATER}")
                    self._changed.wait(left)
                self._running[queue] += 1
            finally:
                self._waiting -= 1

    def _run(self, queue: str, task: _Task[T]) -> None:
        task.run()
        with self._changed:
            task.over.set()
            self._running[queue] -= 1
            self._silent[queue] -= task.is_silent
            self._running, self._silent = +self._running, +self._silent  # names of queues come and go
            self._changed.notify_all()


class _Task(Generic[T]):
    """What a thread does, and what came of it."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act, self._context = act, copy_context()
        self.over = threading.Event()
        self.is_silent = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._context.run(self._act)
        except BaseException as error:  # the request raises it
            self.error = error


_LATER = "try again in a moment; `dropq doctor` says more of a disk that does not answer."


def _where(queue: str) -> str:
    return f"Queue {queue}" if queue else "The root"
