"""The words of filters for what the table of a queue has in columns: JMS's, by which a filter calls the headers.

A filter that says `priority` means a property of that name. Where no message has one, the column was meant, and the
filter would match nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable

from dropq.errors import InvalidFilter
from dropq.filters import compile_filter
from dropq.lifecycle.context import QueueContext
from dropq.queue import browsing

#: JMS's words for columns of a message.
JMS_WORDS = {
    "id": "JMSMessageID, whose values begin with ID:",
    "priority": "JMSPriority",
    "type": "JMSType",
    "correlation_id": "JMSCorrelationID",
    "reply_to": "JMSReplyTo",
    "timestamp": "JMSTimestamp, in milliseconds",
    "expiration": "JMSExpiration, in milliseconds",
    "delivery_count": "JMSXDeliveryCount",
}


def check_words(context: QueueContext, filter: str | None, states: Iterable[str] = ("target",)) -> None:
    """Raise InvalidFilter if a filter names a column, and messages are listed, but none has a property of that name."""
    meant = set() if filter is None else JMS_WORDS.keys() & compile_filter(filter).identifiers
    if not meant:
        return
    are_listed = False
    for state in states:
        for file in browsing.listed(context, state):
            are_listed = True
            meant -= context.sidecars.full(file.name).properties.keys()
            if not meant:
                return
    if are_listed:
        words = "; ".join(f"for the column {name} say {JMS_WORDS[name]}" for name in sorted(meant))
        raise InvalidFilter(
            f"filter {filter!r}: no message that is listed has a property {' or '.join(sorted(meant))}: {words}"
        )
