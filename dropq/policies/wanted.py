"""Which messages are wanted: by a queue's own filter, by a subscription's, by whoever looks."""

from __future__ import annotations

from collections.abc import Callable

from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.view import matching


def belonging(context: QueueContext) -> Callable[[MessageFile], bool] | None:
    """Return what tells which waiting messages are in the queue at all, by its own filter; None where all are."""
    return None if context.config.filter is None else wanting(context, context.config.filter)


def wanting(context: QueueContext, filter: str, state: str = "target") -> Callable[[MessageFile], bool]:
    """Return what tells whether a message of a state passes a filter.

    Raises:
        InvalidFilter: it cannot be read; the error points at the column.
        Unavailable: it needs an extra that is not installed.
    """
    folder, message_type = context.layout.folder(state), context.config.message_type
    return matching(filter, context.sidecars, state, folder=folder, message_type=message_type)
