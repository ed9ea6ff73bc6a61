"""Policies of a queue: who may send and who may receive, when, and in which order; a file each.

None of them is built for a queue that does not ask for it: the plain path stays short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dropq.layout import ignoring
from dropq.lifecycle import Lifecycle, Waiting
from dropq.ready import Ready, matching

if TYPE_CHECKING:
    from dropq.admission.gate import Gate

#: Seconds after which to look again where another subscription has a moment to come for its turn.
TURN_RECHECK = 0.002

__all__ = ["TURN_RECHECK", "belonging", "gate_for", "view_of", "wanting"]


def view_of(life: Lifecycle, state: str = "target", *, depth: int | None = None) -> Ready:
    """Make a view of a state's messages, in the order of delivery that the queue asks for.

    Args:
        life: the queue's transitions.
        state: the state.
        depth: how many messages the view holds at the most; None for all.
    """
    folder, sidecars, config = life.layout.folder(state), life.sidecars, life.config
    ignored = ignoring(config.ignore)
    if state != "target" or (config.priority is None and config.barrier_expression is None):
        return Ready(folder, sidecars, ignored, depth=depth)
    from dropq.admission.order import Ranked, by_expression, by_time

    rank = by_time if config.priority is None else by_expression(config.priority, life)
    return Ranked(folder, sidecars, ignored, rank=rank, depth=depth)


def gate_for(
    life: Lifecycle, subscription: str, *, allowed: int | None, filter: str | None, lasting: bool
) -> Gate | None:
    """Make what stands between a queue's messages and one subscription; None where the queue has no such policy.

    Args:
        life: the queue's transitions.
        subscription: its id.
        allowed: how many messages it may hold; None for any number.
        filter: which messages it takes; None for all.
        lasting: it lives on between its looks.
    """
    config = life.config
    if config.max_backlog is None and config.barrier_expression is None and config.fairness_model == "fast":
        return None
    from dropq.admission.gate import Gate

    return Gate(life, subscription, allowed=allowed, filter=filter, lasting=lasting)


def belonging(life: Lifecycle) -> Callable[[Waiting], bool] | None:
    """Return what tells which waiting messages are in the queue at all, by its own filter; None where all are."""
    return None if life.config.filter is None else wanting(life, life.config.filter)


def wanting(life: Lifecycle, filter: str, state: str = "target") -> Callable[[Waiting], bool]:
    """Return what tells whether a message of a state passes a filter.

    Raises:
        InvalidFilter: it cannot be read; the error points at the column.
        Unavailable: it needs an extra that is not installed.
    """
    folder, message_type = life.layout.folder(state), life.config.message_type
    return matching(filter, life.sidecars, state, folder=folder, message_type=message_type)
