"""What a worker reports: what became of each message, that it waits, that it is stopping."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dropq.durations import format_duration
from dropq.format.layout import DEAD_LETTER
from dropq.queue.message import Message, utc

log = logging.getLogger("dropq")

Outcome = Literal["acked", "failed", "retried", "rejected", "lost", "returned"]

#: What happened to a message, in words, by its outcome.
WORDS = {
    "acked": "acknowledged",
    "failed": "failed",
    "retried": "given back",
    "rejected": "rejected",
    "lost": "lost",
    "returned": "given back unfinished",
}


@dataclass(frozen=True, slots=True)
class Handled:
    """What became of a message that a worker handled, and has just settled.

    Attributes:
        message: the message.
        outcome: as `WorkReport` counts it.
        reason: why it was not acknowledged; empty if there is nothing to say.
        seconds: how long the worker had it.
    """

    message: Message
    outcome: Outcome
    reason: str
    seconds: float

    @property
    def due(self) -> datetime | None:
        """When the message may be delivered again; None for at once, or never."""
        due = due_ms(self.message)
        return utc(due) if due else None

    @property
    def tries(self) -> int | None:
        """How often a message that failed may be tried before it goes to error/; None for other outcomes."""
        return self.message.context.config.redelivery_attempts + 1 if self.outcome == "failed" else None

    @property
    def words(self) -> str:
        """What happened, why, and what comes next."""
        return WORDS[self.outcome] + self.details

    @property
    def details(self) -> str:
        """What follows the outcome in a sentence: why, and what comes next; empty where all is well."""
        if self.outcome == "lost":
            return ": its lease ran out, or somebody else settled it; nothing was changed"
        if self.outcome not in ("failed", "retried", "rejected"):
            return ""
        tries = self.message.delivery_count
        of = f" of {self.tries}" if self.tries is not None and tries <= self.tries else ""
        return f" ({self.reason}), try {tries}{of}, {self._next_step}"

    @property
    def _next_step(self) -> str:
        message = self.message
        if message.state == "target":
            return "again at once"
        if due := due_ms(message):
            seconds = max(due - message.context.clock.now_ms(), 0) / 1000
            return f"again in {format_duration(round(seconds, 1))}"
        return f"in {place(message)} now"


class Reporter:
    """Hears what a worker does, in any of the worker's threads; this one logs what did not end well."""

    def handled(self, handled: Handled) -> None:
        """Hear what became of a message."""
        if handled.outcome not in ("acked", "returned"):
            log.warning("message %s %s", handled.message.id, handled.words)

    def idle(self) -> None:
        """Hear that no message is handled now, and that the worker waits for one; this may come often."""

    def stopping(self, running: int) -> None:
        """Hear that the worker was asked to stop, and how many messages it still handles."""


def place(message: Message) -> str:
    """Return where a message is that is not delivered again: a state of its queue, or the dead-letter queue."""
    if message.state == DEAD_LETTER:
        return f"dead-letter queue {message.context.config.dead_letter_queue}"
    return f"{message.state}/"


def due_ms(message: Message) -> int:
    """Return when a message that was given back may be delivered again, in ms since 1970; 0 for at once."""
    return message.context.sidecars.parse(message.file).not_before if message.state == "delayed" else 0
