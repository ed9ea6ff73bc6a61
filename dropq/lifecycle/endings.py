"""How a delivery ends that was not acknowledged: the message is tried again, or it goes where `exhausted` says.

This is the one place that decides so. A failure is tried again while `redelivery_attempts` and `max_deliveries` last,
and the smaller of the two decides; `max_deliveries` also counts what came back without a failure, and `max_cancels`
what was given back on purpose. It also decides how long a message waits for its next try.

A message may kill its holders, or keep them longer than their lease. So a death, which sweeps alone count, is followed
by a wait that grows, whatever `redelivery_delay` says: what is behind the message has its turn meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypedDict, Unpack

from dropq.config.schema import QueueConfig
from dropq.format.claims import Claim
from dropq.format.names import Name
from dropq.lifecycle import naming
from dropq.lifecycle.context import QueueContext

#: The reason of a message whose handler failed as often as redelivery_attempts allows.
FAILED = "failed"

#: What is kept with a reason.
Details = Mapping[str, object]


class HowReturned(TypedDict, total=False):
    """How a delivery ended without an ack."""

    #: Its holder gave it back on purpose; False by default.
    cancel: bool
    #: The delivery counts; True by default.
    counted: bool
    #: Seconds before the next delivery; None for the queue's redelivery_delay.
    delay: float | None
    #: Its handler failed: what to keep with the reason if this was the last try.
    failure: Details | None
    #: What its holder said of a cancel, for the log, and for the reason if this was the last try.
    said: Details
    #: What the log says of it where neither a failure nor a cancel does; `released` by default.
    why: str


class Goes(NamedTuple):
    """Where a message goes: its name there, its state, and why it goes there if the state has reasons."""

    name: Name
    state: str
    reason: str = ""
    details: Mapping[str, object] = {}


class LastTry(NamedTuple):
    """The number, from 1, of the last try of a message that always fails, and the reason that it then ends for."""

    number: int
    reason: str


def last_try(config: QueueConfig) -> LastTry:
    attempts = config.redelivery_attempts + 1
    if 0 < config.max_deliveries < attempts:
        return LastTry(config.max_deliveries, "max_deliveries")
    return LastTry(attempts, FAILED)


def returned(context: QueueContext, claim: Claim, **how: Unpack[HowReturned]) -> Goes:
    """Return where a claimed message goes whose delivery ends without an ack, as `after_delivery`."""
    name = naming.counted(context, claim, cancel=how.get("cancel", False), counted=how.get("counted", True))
    return after_delivery(context, name, died=claim.died, **how)


def after_delivery(context: QueueContext, name: Name, *, died: bool = False, **how: Unpack[HowReturned]) -> Goes:
    """Return where a message goes whose delivery ended without an ack: back, to be delivered again, or to its end.

    Its name counts this delivery, a cancel and a death already. `died`: its holder died, or lost its lease.
    """
    if reason := _limit_reached(context.config, name, how):
        return Goes(name, context.config.exhausted, reason, how.get("failure") or how.get("said", {}))
    if (wait := how.get("delay")) is None:
        wait = delay_before(context, name, died=died)
    not_before = context.clock.now_ms() + int(wait * 1000) if wait > 0 else 0
    return Goes(replace(name, not_before=not_before), "delayed" if wait > 0 else "target")


def why_returned(**how: Unpack[HowReturned]) -> tuple[str, Details]:
    """Return what the log says of a delivery after which the message is tried again: the reason, and details."""
    if (failure := how.get("failure")) is not None:
        return FAILED, failure
    return "nack" if how.get("cancel") else how.get("why", "released"), how.get("said", {})


def ended_as(state: str, reason: str) -> str:
    """Return the event, as the log has it, of a message that went to a state for a reason."""
    if state != "error":
        return state
    return "rejected" if reason == "rejected" else FAILED


def _limit_reached(config: QueueConfig, name: Name, how: HowReturned) -> str:
    """Return why a message is not delivered again: `failed`, or the key of the limit that it reached; "" if it is."""
    if how.get("failure") is not None and name.delivery_count >= (last := last_try(config)).number:
        return last.reason
    if how.get("counted", True) and config.max_deliveries and name.delivery_count >= config.max_deliveries:
        return "max_deliveries"
    return "max_cancels" if how.get("cancel") and config.max_cancels and name.cancels >= config.max_cancels else ""


def delivers(context: QueueContext, claim: Claim) -> bool:
    """Return whether a claim counts as a delivery: a claim for distributing or copying does not."""
    return not (context.layout.is_topic or claim.of_router)


def is_death(context: QueueContext, claim: Claim) -> bool:
    """Return whether a claim that a sweep returns counts as a death of its holder; ZeroMQ's server only passes on."""
    return delivers(context, claim) and not claim.of_zmq


def delay_before(context: QueueContext, name: Name, *, died: bool) -> float:
    """Return the seconds that a message waits after a delivery; the arguments are as for `after_delivery`."""
    config, tries = context.config, max(name.delivery_count - 1, 0)
    wait = growing(config.redelivery_delay, config.redelivery_backoff, tries, config.redelivery_delay_limit)
    if not died or context.is_shared:
        return wait
    return max(wait, growing(context.timing.after_death, 2.0, name.died - 1, config.redelivery_delay_limit))


def growing(first: float, factor: float, times: int, limit: float) -> float:
    """Return a wait that grew so many times, to a limit that does not apply to the first wait."""
    longest = max(first, limit)
    if not first:
        return 0
    try:
        return min(first * factor**times, longest)
    except OverflowError:
        return longest
