"""The values that the identifiers of a filter have in a message: in its name, and maybe in its body.

Invariant: a header field wins over a property of the same name, and anything that the message lacks is NULL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dropq.filters.body import Body
from dropq.filters.tree import NOW, Found, Lookup, Path
from dropq.format.names import ORIGIN, REASON, TOPIC_REPLY, Name

#: What a filter may name that is not the message's own: it changes while the message stays as it is.
NOT_ITS_OWN = frozenset(("JMSDestination", "JMSRedelivered", "JMSXDeliveryCount", NOW))


class _Delivery(NamedTuple):
    name: Name
    number: int
    arrival: int | None
    queue: str


#: The header fields, each worked out when a filter asks for it: most filters ask for one. Any other name that begins
#: with JMS is an error, unless it begins with JMSX or JMS_, and is not one of dropq's own.
HEADERS: dict[str, Callable[[_Delivery], Found]] = {
    "JMSPriority": lambda it: it.name.priority,
    "JMSMessageID": lambda it: f"ID:{it.name.id}",
    "JMSDeliveryMode": lambda it: "PERSISTENT",
    "JMSTimestamp": lambda it: it.name.timestamp or it.name.since or it.arrival,
    "JMSCorrelationID": lambda it: it.name.correlation_id or None,
    "JMSType": lambda it: it.name.type or None,
    "JMSReplyTo": lambda it: (it.name.reply_to or "").removeprefix(TOPIC_REPLY) or None,
    "JMSDestination": lambda it: it.queue.partition("/")[0] or None,  # of a subscription, its topic
    "JMSExpiration": lambda it: it.name.expiration,
    "JMSRedelivered": lambda it: it.number > 1,
    "JMSXDeliveryCount": lambda it: it.number,
    ORIGIN: lambda it: it.name.origin or None,
    REASON: lambda it: it.name.reason or None,
}


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
    number = name.cut + (name.delivery_count + 1 if delivery_count is None else delivery_count)
    delivery = _Delivery(name, number, arrival, queue)

    def find(key: str) -> Found:
        if key in HEADERS:
            return HEADERS[key](delivery)
        if isinstance(key, Path):
            return None if body is None else body.find(key)
        return None if (typed := name.properties.get(key)) is None else typed.value

    return find
