"""What a worker reports: what became of each message, that it waits, that it is stopping."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

from dropq.durations import format_duration
from dropq.format.layout import DEAD_LETTER
from dropq.lifecycle.endings import last_try
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


class Part(NamedTuple):
    """A record that became a message.

    Attributes:
        id: the message's id.
        state: where it is.
        due: when it may be delivered again, in ms since 1970; 0 for at once, or never.
    """

    id: str
    state: str
    due: int


@dataclass(frozen=True, slots=True)
class Handled:
    """What became of a message that a worker handled, and has just settled, or of records of it.

    Attributes:
        message: the message.
        outcome: as `WorkReport` counts it.
        reason: why it was not acknowledged; empty if there is nothing to say.
        seconds: how long the worker had it, or the handler the record.
        records: how many of its records were acknowledged; 0 for the message as a whole, or for a part of it.
        part: the record that became a message; None for the message itself.
    """

    message: Message
    outcome: Outcome
    reason: str
    seconds: float
    records: int = 0
    part: Part | None = None

    @property
    def id(self) -> str:
        """The id of the message, or of the message that the record became."""
        return self.message.id if self.part is None else self.part.id

    @property
    def label(self) -> str:
        """What it is called on a line: that id, and the name of the file that the message was sent from, if any."""
        return " ".join(filter(None, (self.id, self.message.filename)))

    @property
    def state(self) -> str:
        """Where that message is."""
        return self.message.state if self.part is None else self.part.state

    @property
    def due(self) -> datetime | None:
        """When that message may be delivered again; None for at once, or never."""
        due = self._due_ms
        return utc(due) if due else None

    @property
    def _due_ms(self) -> int:
        return due_ms(self.message) if self.part is None else self.part.due

    @property
    def tries(self) -> int | None:
        """How often a message that fails is tried at the most; None for other outcomes."""
        return last_try(self.message.context.config).number if self.outcome == "failed" else None

    @property
    def details(self) -> str:
        """What follows the outcome in a sentence: why, and what comes next; empty where all is well."""
        if self.outcome == "lost":
            return ": somebody else has settled it or taken it back, or its lease ran out; nothing was changed"
        if self.outcome not in ("failed", "retried", "rejected"):
            return ""
        tries = self.message.delivery_count
        of = f" of {self.tries}" if self.tries is not None and tries <= self.tries else ""
        return f" ({self.reason}), try {tries}{of}, {self._next_step}"

    @property
    def _next_step(self) -> str:
        if self.state == "target":
            return "again at once"
        if due := self._due_ms:
            seconds = max(due - self.message.context.clock.now_ms(), 0) / 1000
            return f"again in {format_duration(round(seconds, 1))}"
        return f"in {self.location} now"

    @property
    def location(self) -> str:
        """Where a message is that is not delivered again: a state of its queue, or the dead-letter queue."""
        if self.state == DEAD_LETTER:
            return f"dead-letter queue {self.message.context.config.dead_letter_queue}"
        return f"{self.state}/"


class Reporter:
    """Hears of a worker's results, in any of its threads; this class logs those that are no success."""

    def handled(self, handled: Handled) -> None:
        """Hear what became of a message."""
        if handled.outcome not in ("acked", "returned"):
            log.warning("message %s %s%s", handled.label, WORDS[handled.outcome], handled.details)

    def idle(self) -> None:
        """Hear that no message is handled now, and that the worker waits for one; this may come often."""

    def stopping(self, running: int) -> None:
        """Hear that the worker was asked to stop, and how many messages it still handles."""


def due_ms(message: Message) -> int:
    """Return when a message that was given back may be delivered again, in ms since 1970; 0 for at once."""
    return message.context.sidecars.parse(message.file).not_before if message.state == "delayed" else 0
