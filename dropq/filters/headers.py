"""The values that the identifiers of a filter have in a message: in its name, and maybe in its body.

Invariant: a header field wins over a property of the same name, and anything that the message lacks is NULL.
"""

from __future__ import annotations

from dropq.filters.body import Body
from dropq.filters.tree import NOW, Found, Lookup, Path
from dropq.format.names import ENVELOPE, TOPIC_REPLY, Name

#: What a filter may name that is not the message's own: it changes while the message stays as it is.
NOT_ITS_OWN = frozenset(("JMSDestination", "JMSRedelivered", "JMSXDeliveryCount", NOW))


def for_name(
    name: Name,
    *,
    delivery_count: int | None = None,
    arrival: int | None = None,
    body: Body | None = None,
    queue: str = "",
) -> Lookup:
    """Return the lookup of header fields, properties and paths for a message; names are case-sensitive.

    Args:
        delivery_count: the number of the delivery that the filter decides about, from 1; None for the next delivery of
            a waiting message. What was counted before its bundle was cut in two is added.
        arrival: when its file was first seen, in ms; counts if neither the id nor the name has a time.
        body: its body, which is read when a path is first looked up; without it, every path is NULL.
    """
    count = name.cut + (name.delivery_count + 1 if delivery_count is None else delivery_count)
    fields: dict[str, Found] = {key: typed.value for key, typed in name.properties.items()}
    fields |= {
        "JMSPriority": name.priority,
        "JMSMessageID": f"ID:{name.id}",
        "JMSDeliveryMode": "PERSISTENT",
        "JMSTimestamp": name.timestamp or name.since or arrival,
        "JMSCorrelationID": name.correlation_id or None,
        "JMSType": name.type or None,
        "JMSReplyTo": (name.reply_to or "").removeprefix(TOPIC_REPLY) or None,
        "JMSDestination": queue.partition("/")[0] or None,  # of a subscription, its topic
        "JMSExpiration": name.expiration,
        "JMSRedelivered": count > 1,
        "JMSXDeliveryCount": count,
        **dict(zip(ENVELOPE, (name.origin or None, name.reason or None), strict=True)),
    }
    if body is None:
        return fields.get
    return lambda key: body.find(key) if isinstance(key, Path) else fields.get(key)
