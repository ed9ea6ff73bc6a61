"""Sends to a missing queue: the messages become dead letters in the root's dead-letter queue, if the root has one."""

from __future__ import annotations

import logging
from typing import Any

from dropq.durations import parse_duration
from dropq.errors import DropqError
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.dead_letters import NO_SUCH_QUEUE
from dropq.lifecycle.open_queue import find_layout, open_queue
from dropq.lifecycle.queue_notes import refuse_away
from dropq.queue.sender import Headers, Sender

log = logging.getLogger("dropq")


class MissingQueueSender(Sender):
    """Sends messages for a missing queue to the dead-letter queue, whose limits hold only for its own senders."""

    def __init__(self, destination: QueueContext, origin: str) -> None:
        super().__init__(destination)
        self.name = origin
        self._marks = {"origin": origin, "reason": NO_SUCH_QUEUE}

    def _admit(self, count: int = 1, *, whole: bool = False) -> int:
        return count

    def _address_of(self, body: bytes | str, headers: Headers, **how: Any) -> tuple[str, str, int]:
        """Do what a sender does; a dead letter neither expires nor is delayed."""
        for period in (headers.expires_in, headers.delay):
            if period is not None:
                parse_duration(period)
        return super()._address_of(body, headers._replace(expires_in=None, delay=None), **how)


def missing_queue_sender(root: RootContext, origin: str, *, publishes: bool = False) -> MissingQueueSender | None:
    """Return the sender to the dead-letter queue; None if `origin` exists, or its messages cannot be dead letters.

    It raises Unavailable if `origin` is away.
    """
    if find_layout(root.layout.path, origin) is not None:
        return None
    refuse_away(root.layout, origin, "nothing was sent")
    name = root.config.dead_letter_queue
    if name is None or name == origin or publishes:
        return None
    try:
        destination = open_queue(root, name)
    except DropqError as error:
        log.warning("queue %s is not there, and its messages cannot become dead letters: %s", origin, error)
        return None
    if destination.layout.topic:
        log.warning("queue %s is not there, and the dead-letter queue %s is a topic: it gets nothing", origin, name)
        return None
    return MissingQueueSender(destination, origin)
