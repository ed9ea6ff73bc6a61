"""What the tests of the worker and of its commands share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from dropq import Queue, work
from dropq.worker.loop import Stop, WorkReport


class Working:
    """A worker in a thread of this process."""

    def __init__(self, queue: Queue | Sequence[Queue], handler: Callable[[Any], object], **options: Any) -> None:
        self.stop = Stop()
        self.report = WorkReport()
        self._thread = threading.Thread(target=self._run, args=(queue, handler), kwargs=options, daemon=True)

    def _run(self, queue: Queue | Sequence[Queue], handler: Callable[[Any], object], **options: Any) -> None:
        self.report = work(queue, handler, stop=self.stop, **options)

    def __enter__(self) -> Working:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.ask()
        self._thread.join(10)
        self.stop.ask()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the worker did not end"


def reason_in(queue: Queue, state: str) -> dict[str, Any]:
    """Why the one message in a state lies there."""
    (message,) = queue.browse(state)
    return dict(message.reason or {})


def counted(report: WorkReport) -> dict[str, int]:
    """What a report counts, without zeros."""
    return {
        name: value for name, value in vars(report).items() if value and isinstance(value, int) and value is not True
    }
