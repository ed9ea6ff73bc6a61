"""Asks the disk for requests: a few at a time, for a few seconds, so that a disk that hangs keeps no page waiting.

What hangs keeps its thread. Of a queue that has not answered, nothing more is asked until it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dropq.web.guard import Refused

T = TypeVar("T")

#: How many threads ask the disk, and how many of them ask for one queue; how many requests may wait for a thread; and
#: how many threads may hang besides, each of them in a request for another queue.
THREADS, OF_ONE, WAITING, HANGING = 4, 2, 12, 16
#: Seconds that a request waits for its answer, the first half of them for a thread.
PATIENCE = 5.0


class Disk:
    """The threads that ask a root's disk."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = set[_Task]()
        self._waiting = 0

    def ask(self, queue: str, act: Callable[[], T], seconds: float | None = None) -> T:
        """Return what `act` returns, in another thread; raise what it raises.

        Args:
            queue: which queue it reads, to keep one that hangs from using up all threads.
            seconds: how long to wait; None is PATIENCE.

        Raises:
            Refused: it takes longer than these seconds, or others have taken all threads for half as long.
        """
        began, answer = time.monotonic(), Future[T]()
        seconds = PATIENCE if seconds is None else seconds
        task = self._begin(queue, began + seconds / 2)
        try:
            asking = (task, partial(copy_context().run, act), answer)
            threading.Thread(target=self._run, args=asking, daemon=True).start()
        except RuntimeError as error:  # this process may have no more threads
            self._end(task)
            raise Refused(503, f"{_BUSY}: {_LATER}") from error
        if not wait([answer], began + seconds - time.monotonic()).done:
            raise Refused(503, f"{_where(queue)} has not answered for {seconds:.0f} s: {_LATER}")
        return answer.result()

    def _begin(self, queue: str, until: float) -> _Task:
        """Wait for a thread."""
        with self._changed:
            self._waiting += 1
            try:
                while not self._has_room(queue):
                    left = until - time.monotonic()
                    if self._waiting > WAITING or left <= 0:
                        raise Refused(503, f"{_BUSY}: {_LATER}")
                    self._changed.wait(min(left, PATIENCE / 10))  # that a thread hangs is told by time alone
                task = _Task(queue, time.monotonic())
                self._running.add(task)
                return task
            finally:
                self._waiting -= 1

    def _has_room(self, queue: str) -> bool:
        """Return whether another thread may ask for a queue now; raise Refused if one of its threads hangs."""
        hanging = {task for task in self._running if time.monotonic() - task.began > PATIENCE}
        if len(hanging) >= HANGING or any(task.queue == queue for task in hanging):
            raise Refused(503, f"{_where(queue)} does not answer: {_LATER}")
        asked = [task.queue for task in self._running - hanging]
        return len(asked) < THREADS and asked.count(queue) < OF_ONE

    def _run(self, task: _Task, act: Callable[[], T], answer: Future[T]) -> None:
        try:
            told = partial(answer.set_result, act())
        except BaseException as error:  # the request raises it
            told = partial(answer.set_exception, error)
        self._end(task)
        told()

    def _end(self, task: _Task) -> None:
        with self._changed:
            self._running.discard(task)
            self._changed.notify_all()


@dataclass(eq=False)
class _Task:
    """What a thread does for a queue, and since when, on the monotonic clock."""

    queue: str
    began: float


_BUSY = "Too many pages are being read from the disk"
_LATER = "try again in a moment; `dropq doctor` says more of a disk that does not answer."


def _where(queue: str) -> str:
    return f"Queue {queue}" if queue else "The root"
