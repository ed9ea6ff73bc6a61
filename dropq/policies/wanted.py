"""Filters of queues, subscriptions and commands, as functions of a message file."""

from __future__ import annotations

from collections.abc import Callable

from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.view import matching


def belonging(context: QueueContext) -> Callable[[MessageFile], bool] | None:
    """Return a function that tests waiting messages by the queue's own filter; None if it has no filter."""
    return None if context.config.filter is None else wanting(context, context.config.filter)


def wanting(context: QueueContext, filter: str, state: str = "target") -> Callable[[MessageFile], bool]:
    """Return a function that tests messages of a state by a filter.

    Raises:
        InvalidFilter: the filter cannot be parsed; the error points at the column.
        Unavailable: it needs an extra that is not installed.
    """
    folder, message_type = context.layout.folder(state), context.config.message_type
    return matching(filter, context.sidecars, state, folder=folder, message_type=message_type)
