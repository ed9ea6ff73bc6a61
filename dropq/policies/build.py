"""Build the policies that a queue's configuration asks for; other queues take the short plain path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dropq.format.layout import ignoring
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.view import TargetView

if TYPE_CHECKING:
    from dropq.policies.receive_policies import ReceivePolicies


def view_of(
    context: QueueContext, state: str = "target", *, depth: int | None = None, settled: bool = True
) -> TargetView:
    """Return a view of a state's messages, at most `depth` of them, in the queue's order of delivery.

    If `settled`, leave out the files of target/ that may still be written to, as all do that take messages.
    """
    folder, sidecars, config = context.layout.folder(state), context.sidecars, context.config
    ignored = ignoring(config.ignore)
    settling = context.settling if settled and state == "target" else None
    if state != "target" or (config.priority is None and config.barrier_expression is None):
        return TargetView(folder, sidecars, ignored, context.timing, depth=depth, settling=settling)
    from dropq.policies.order import RankedView, by_expression, by_time

    rank = by_time if config.priority is None else by_expression(config.priority, context)
    return RankedView(folder, sidecars, ignored, context.timing, rank=rank, depth=depth, settling=settling)


def policies_for(
    context: QueueContext, subscription: str, *, allowed: int | None, filter: str | None, lasting: bool
) -> ReceivePolicies | None:
    """Return the receive policies of a queue for one subscription, as of `FairShare`; None if the queue has none."""
    config = context.config
    if config.max_backlog is None and config.barrier_expression is None and config.fairness_model == "fast":
        return None
    from dropq.policies.fair_share import FairShare
    from dropq.policies.receive_policies import ReceivePolicies

    turns = None
    if config.fairness_model != "fast":
        turns = FairShare(context, subscription, allowed=allowed, filter=filter, lasting=lasting)
    return ReceivePolicies(context, subscription, turns)
