"""The topics that a queue is a receiver of: its consumers check now and then whether a message waits there.

A subscription gets the messages of its topic and of all topics below that; a view those of the topics that it names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from dropq.config.schema import is_expression, underlies
from dropq.errors import DropqError, NoSuchQueue
from dropq.format.addresses import topic_layout
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.ephemeral import TOUCH_INTERVAL, touch
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import topics
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.topics.distribution import Distributor

log = logging.getLogger("dropq")


class ReceiverTopics:
    """The topics that one queue is a receiver of, for a consumer of it."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._known: dict[str, Distributor] = {}
        self._failed: dict[str, str] = {}
        self._keeps_at = 0.0

    def distributors(self) -> list[Distributor]:
        """Return a distributor for each topic where a message waits, or is under way."""
        return [each for each in self._all() if _is_busy(each.context)]

    def topics(self) -> list[QueueContext]:
        """Return all topics that the queue is a receiver of."""
        return [each.context for each in self._all()]

    def _all(self) -> list[Distributor]:
        found: dict[str, Distributor] = {}
        failed: dict[str, str] = {}
        for topic in self._possible():
            layout = topic_layout(self._context.root.layout.path, topic)
            if not gets_from(self._context, topic) or not reading.is_folder(layout.target):
                continue
            distributor = self._known.get(topic)
            if distributor is None or not distributor.is_ours:
                try:
                    distributor = Distributor(open_queue(self._context.root, topic))
                except NoSuchQueue:
                    continue  # RACE: it was deleted just now
                except (DropqError, OSError) as error:
                    failed[topic] = describe(error)
                    if self._failed.get(topic) != failed[topic]:
                        log.warning("%s is not fed from topic %s: %s", self._context.name, topic, failed[topic])
                    continue
                if not distributor.context.layout.is_topic:
                    continue  # a queue has its name
            found[topic] = distributor
        self._known, self._failed = found, failed
        return list(found.values())

    def _possible(self) -> Iterable[str]:
        """Return the topics that it may be a receiver of; list no others if its configuration names them."""
        expression, root = self._context.config.underlying_topic, self._context.root.layout
        if expression is None:
            return topics(root, self._context.name.partition("/")[0])
        return topics(root) if is_expression(expression) else [expression]

    def close(self) -> None:
        """End the signs of life of its distributors."""
        known, self._known = self._known, {}
        for distributor in known.values():
            if distributor.is_ours:
                distributor.close()

    def keep_ephemeral(self) -> None:
        """Show that the holder of an ephemeral subscription is there."""
        layout, now = self._context.layout, time.monotonic()
        if layout.is_subscription and now >= self._keeps_at:
            self._keeps_at = now + TOUCH_INTERVAL
            touch(layout, self._context.storage)


def gets_from(context: QueueContext, topic: str) -> bool:
    """Return whether a subscription or a view gets what is published to a topic."""
    expression = context.config.underlying_topic
    if expression is not None:
        return underlies(expression, topic)
    own = context.name.partition("/")[0]
    return topic == own or topic.startswith(f"{own}.")


def _is_busy(topic: QueueContext) -> bool:
    layout = topic.layout
    return any(reading.names_in(folder) for folder in (layout.target, layout.processing, layout.staged, layout.delayed))
