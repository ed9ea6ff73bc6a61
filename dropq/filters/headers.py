"""What an identifier of a filter stands for in a message that is known by its name.

Invariant: a header field wins over a property of the same name, and whatever a message does not have is NULL.
"""

from __future__ import annotations

from dropq.filters.tree import Lookup, Value
from dropq.names import Name


def for_name(name: Name, *, delivery_count: int | None = None, arrival: int | None = None) -> Lookup:
    """Make the lookup of header fields and properties for a message.

    Args:
        name: what the message's file name says, its sidecar included.
        delivery_count: the number of the delivery that is decided about, 1 for the first; None for the next one of a
            message that waits.
        arrival: when its file was first seen, in ms; stands in where neither id nor name tells a time.

    Returns:
        A function from an identifier, which is case-sensitive, to its value; None is NULL.
    """
    count = name.delivery_count + 1 if delivery_count is None else delivery_count
    fields: dict[str, Value] = {key: typed.value for key, typed in name.properties.items()}
    fields |= {
        "JMSPriority": name.priority,
        "JMSMessageID": name.id,
        "JMSTimestamp": name.timestamp or name.since or arrival,
        "JMSCorrelationID": name.correlation_id or None,
        "JMSType": name.type or None,
        "JMSReplyTo": name.reply_to or None,
        "JMSExpiration": name.expiration,
        "JMSRedelivered": count > 1,
        "JMSXDeliveryCount": count,
    }
    return fields.get
