"""What an identifier of a filter stands for in a message that is known by its name, and maybe by its body.

Invariant: a header field wins over a property of the same name, and whatever a message does not have is NULL.
"""

from __future__ import annotations

from collections.abc import Callable

from dropq.filters.body import Body
from dropq.filters.tree import Found, Lookup, Path
from dropq.format.names import Name


def for_name(
    name: Name,
    *,
    delivery_count: int | None = None,
    arrival: int | None = None,
    body: Callable[[], bytes] | None = None,
    message_type: str = "json",
) -> Lookup:
    """Make the lookup of header fields, properties and paths for a message.

    Args:
        name: what the message's file name says, its sidecar included.
        delivery_count: the number of the delivery that is decided about, 1 for the first; None for the next one of a
            message that waits.
        arrival: when its file was first seen, in ms; stands in where neither id nor name tells a time.
        body: reads its body; called when a path is looked up, once. What it raises of `OSError` makes a body of NULLs,
            as its absence does.
        message_type: what the body is: json, text or binary.

    Returns:
        A function from an identifier, which is case-sensitive, or a path to its value; None is NULL.
    """
    count = name.delivery_count + 1 if delivery_count is None else delivery_count
    fields: dict[str, Found] = {key: typed.value for key, typed in name.properties.items()}
    fields |= {
        "JMSPriority": name.priority,
        "JMSMessageID": f"ID:{name.id}",
        "JMSDeliveryMode": "PERSISTENT",
        "JMSTimestamp": name.timestamp or name.since or arrival,
        "JMSCorrelationID": name.correlation_id or None,
        "JMSType": name.type or None,
        "JMSReplyTo": name.reply_to or None,
        "JMSExpiration": name.expiration,
        "JMSRedelivered": count > 1,
        "JMSXDeliveryCount": count,
    }
    if body is None:
        return fields.get
    content = Body(body, message_type)
    return lambda wanted: content.find(wanted) if isinstance(wanted, Path) else fields.get(wanted)
