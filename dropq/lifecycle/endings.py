"""How a delivery ends that was not acknowledged: the message is tried again, or it goes where `exhausted` says.

This is the one place that decides so. A failure is tried again while `redelivery_attempts` and `max_deliveries` last,
and the smaller of the two decides; `max_deliveries` also counts what came back without a failure, and `max_cancels`
what was given back on purpose. It also decides how long a message waits for its next try.

A message may kill its holders, or keep them longer than their lease. So a death, which sweeps alone count, is followed
by a wait that grows, whatever `redelivery_delay` says: what is behind the message has its turn meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from dropq.config.schema import QueueConfig
from dropq.format.claims import Claim
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext

#: The reason of a message whose handler failed as often as redelivery_attempts allows.
FAILED = "failed"


class Ending(NamedTuple):
    """Where a message goes that is not delivered again.

    Attributes:
        state: error, expired or dead-letter.
        reason: why: `failed`, or the key of the limit that it reached.
    """

    state: str
    reason: str


class LastTry(NamedTuple):
    """The try after which a message whose handler fails is not tried again.

    Attributes:
        number: its number; the first try is 1.
        reason: the reason of a message that fails then: `failed`, or `max_deliveries` if that limit is the smaller.
    """

    number: int
    reason: str


def last_try(config: QueueConfig) -> LastTry:
    """Return the last try of a message whose handler always fails."""
    attempts = config.redelivery_attempts + 1
    if 0 < config.max_deliveries < attempts:
        return LastTry(config.max_deliveries, "max_deliveries")
    return LastTry(attempts, FAILED)


def ending(
    context: QueueContext, name: Name, *, failed: bool = False, cancel: bool = False, counted: bool = True
) -> Ending | None:
    """Return where a message goes whose delivery ended without an ack; None if it is delivered again.

    Args:
        name: what its name says, this delivery and a cancel included.
        cancel: its holder gave it back on purpose.
    """
    config = context.config
    if failed and name.delivery_count >= (last := last_try(config)).number:
        return Ending(config.exhausted, last.reason)
    if counted and config.max_deliveries and name.delivery_count >= config.max_deliveries:
        return Ending(config.exhausted, "max_deliveries")
    if cancel and config.max_cancels and name.cancels >= config.max_cancels:
        return Ending(config.exhausted, "max_cancels")
    return None


def delivers(context: QueueContext, claim: Claim) -> bool:
    """Return whether a claim counts as a delivery: what distributes or copies delivers nothing."""
    return not (context.layout.is_topic or claim.of_router)


def is_death(context: QueueContext, claim: Claim) -> bool:
    """Return whether a claim that a sweep returns counts as a death of its holder; ZeroMQ's server only passes on."""
    return delivers(context, claim) and not claim.of_zmq


def delay_before(context: QueueContext, name: Name, *, died: bool = False) -> float:
    """Return the seconds that a message waits after a delivery.

    Args:
        name: what its name says, this delivery and a death included.
        died: its holder died, or lost its lease.
    """
    config, tries = context.config, max(name.delivery_count - 1, 0)
    wait = _growing(config.redelivery_delay, config.redelivery_backoff, tries, config.redelivery_delay_limit)
    if not died or context.is_shared:
        return wait
    return max(wait, _growing(context.timing.after_death, 2.0, name.died - 1, config.redelivery_delay_limit))


def _growing(first: float, factor: float, times: int, limit: float) -> float:
    """Return a wait that grew so many times, to a limit that does not apply to the first wait."""
    longest = max(first, limit)
    if not first:
        return 0
    try:
        return min(first * factor**times, longest)
    except OverflowError:
        return longest
