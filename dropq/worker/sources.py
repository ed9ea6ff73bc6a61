"""What a worker receives from: the subscriptions of one queue or of several, in their order or by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dropq.queue.message import Message
from dropq.storage.watch import Watch

if TYPE_CHECKING:
    from dropq.queue.subscription import Subscription


class Taken(NamedTuple):
    """A message that a worker received: from which subscription, and when, by `time.monotonic()`."""

    message: Message
    subscription: Subscription
    since: float


class Sources:
    """The subscriptions that a worker receives from.

    Any thread may receive. Without `fair`, a message comes from the first subscription that has one.

    Args:
        subscriptions: of one queue or of several, in the order in which they are asked.
        fair: begin with the subscription behind the last that had a message.
        poll: list the queues at intervals instead of waiting for events.

    Raises:
        ValueError: two subscriptions are of one queue; no message was claimed.

    Attributes:
        watch: waits until a message may have come into one of the queues.
    """

    def __init__(self, subscriptions: Sequence[Subscription], *, fair: bool = False, poll: bool = False) -> None:
        homes = [each._context.layout.home for each in subscriptions]
        for each, home in zip(subscriptions, homes, strict=True):
            if homes.count(home) > 1:
                raise ValueError(f"queue {each._context.name} is named twice: name each queue once")
        self._subscriptions = tuple(subscriptions)
        self._fair = fair
        self._first = 0
        notes = {each._context.layout.target: each._context.settling.note_moved_in for each in subscriptions}
        self.watch = Watch(*notes, moved_in=notes, poll=poll)

    #: Whether nothing is to be taken from a subscription now; the worker sets it.
    is_blocked: Callable[[Subscription], bool] = staticmethod(lambda _: False)

    def receive(self) -> Taken | None:
        """Claim a message; return None if no queue has one for this worker now."""
        first, count = self._first, len(self._subscriptions)
        for step in range(count):
            at = (first + step) % count
            subscription = self._subscriptions[at]
            if self.is_blocked(subscription):
                subscription._sweep_if_due()
                continue
            if (message := subscription.receive()) is not None:
                if self._fair:
                    self._first = (at + 1) % count
                return Taken(message, subscription, time.monotonic())
        return None

    def __iter__(self) -> Iterator[Subscription]:
        """Yield the subscriptions."""
        return iter(self._subscriptions)
