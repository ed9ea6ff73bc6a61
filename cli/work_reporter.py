"""What `dropq work` shows: a line a message, what it waits for, a bar, and a sum in words."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from dropq.durations import format_duration
from dropq.format.layout import DEAD_LETTER, WITH_REASON
from dropq.lifecycle.decision import count_of
from dropq.worker.reporter import WORDS, Handled, Reporter

from . import output
from .shell import BAR_FROM, Shell

if TYPE_CHECKING:
    from dropq import Queue

#: How the sum names what became of messages: of one, and of several.
_SUMS = {
    "acked": ("acknowledged", "acknowledged"),
    "failed": ("failed try", "failed tries"),
    "rejected": ("rejected", "rejected"),
    "retried": ("given back for another try", "given back for another try"),
    "returned": ("given back unfinished", "given back unfinished"),
    "lost": ("lost to another consumer", "lost to other consumers"),
}


class WorkReporter(Reporter):
    """Shows on stderr what a worker does.

    On a terminal, or if `verbose`, that is a line for each message, on stdout with `--json`; else only for those that
    did not end well. A worker that ends when no message waits has a bar.
    """

    def __init__(self, shell: Shell, queues: Sequence[Queue], *, quiet: bool, verbose: bool, until_empty: bool) -> None:
        self._shell = shell
        self._queues = queues
        self._quiet = quiet
        self._on_terminal = sys.stderr.isatty() and not quiet
        self._as_json = shell.json and verbose
        self._each = (verbose or self._on_terminal) and not self._as_json
        self._until_empty = until_empty
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._set_aside = Counter[str]()
        self._paused: list[str] = []
        self._has_said_that_it_waits = until_empty
        self._began = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> WorkReporter:
        if not self._quiet:
            self._report_paused()
        is_counted = self._until_empty and self._on_terminal
        total = sum(queue.counts()["target"] for queue in self._queues) if is_counted else 0
        if total >= BAR_FROM:
            self._bar = self._shell.bar("working", total)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def handled(self, handled: Handled) -> None:
        """Show what became of a message."""
        with self._lock:
            self._counts[handled.outcome] += handled.records or 1
            if handled.outcome != "acked" and handled.state in (*WITH_REASON, DEAD_LETTER):
                self._set_aside[handled.location] += 1
            if self._bar is not None and handled.part is None:
                self._bar.advance(self._bar.task_ids[0])
            # Under the lock: two threads that print at once may mix their lines.
            if self._as_json:
                self._shell.line(_record(handled), ())
            elif self._each:
                output.note(self._line(handled))
            elif not self._quiet:
                super().handled(handled)

    def idle(self) -> None:
        """Show once what the worker waits for, and each time that a queue is paused."""
        if not self._on_terminal:
            return
        self._report_paused()
        if not self._has_said_that_it_waits:
            self._has_said_that_it_waits = True
            names = ", ".join(queue.name for queue in self._queues)
            output.note(f"waiting for messages of {names} (Ctrl-C ends)")

    def stopping(self, running: int) -> None:
        """Show what a stop waits for, and what a second one would do."""
        if running and not self._quiet:
            them = "it" if running == 1 else "them"
            output.note(f"finishing {count_of(running)}; a second Ctrl-C or SIGTERM gives {them} back")

    def sum_up(self) -> None:
        """Show how many messages became what; nothing where nobody looks and nothing was done, as under cron."""
        if self._quiet or not (self._counts or self._on_terminal):
            return
        parts = [f"{count} {_SUMS[key][count > 1]}" for key in _SUMS if (count := self._counts[key])]
        took = time.monotonic() - self._began
        took_text = f"{took:.1f} s" if took < 60 else format_duration(round(took))
        aside = "".join(f"; {count} now in {there}" for there, count in sorted(self._set_aside.items()))
        output.note(f"{', '.join(parts)} in {took_text}{aside}" if parts else "no message was there to handle")

    def _report_paused(self) -> None:
        paused = [queue.name for queue in self._queues if queue.paused]
        for name in paused:
            if name not in self._paused:
                output.note(f"queue {name} is paused: nothing comes until `dropq resume {quote(output.escape(name))}`")
        self._paused = paused

    def _line(self, handled: Handled) -> str:
        queue = f"{handled.message.queue.name} " if len(self._queues) > 1 else ""
        outcome = f"{WORDS[handled.outcome]:{len(WORDS['acked'])}}"
        of = f"{handled.records} of " if handled.records else ""
        return f"{outcome} {of}{queue}{output.escape(handled.label)} in {handled.seconds:.1f} s{handled.details}"


def _record(handled: Handled) -> dict[str, object]:
    """Return what `--json` prints of a message."""
    return {
        "queue": handled.message.queue.name,
        "id": handled.id,
        "filename": handled.message.filename,
        "outcome": handled.outcome,
        "reason": handled.reason or None,
        "seconds": round(handled.seconds, 3),
        "delivery_count": handled.message.delivery_count,
        "tries": handled.tries,
        "state": handled.state,
        "due": handled.due,
        **({"records": handled.records} if handled.records else {}),
    }
