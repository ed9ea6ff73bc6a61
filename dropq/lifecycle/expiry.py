"""When messages expire: the queue's configuration and the message's own expiration, read from its name.

The four expiration models are those of AMPS.
"""

from __future__ import annotations

from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext


def may_expire(context: QueueContext, file: MessageFile) -> bool:
    """Return whether a waiting message can expire at all; this is quick, as it parses no name."""
    return context.config.expiration is not None or not (file.plain or names.has_no_expiration(file.filename))


def has_expired(context: QueueContext, file: MessageFile) -> bool:
    return may_expire(context, file) and 0 < expires_at(context, file.name, file.arrival) <= context.clock.now_ms()


def is_to_expire(context: QueueContext, file: MessageFile) -> bool:
    """Return whether a message in target/ is to be moved to expired/: its time is over, and its file has settled."""
    return has_expired(context, file) and not context.settling.settles_at(file)


def expires_by_arrival(context: QueueContext, file: MessageFile) -> bool:
    """Return whether a message expires by the time at which its file arrived, as its name contains no time."""
    return context.config.expiration is not None and not (file.name.since or file.name.timestamp)


def expires_at(context: QueueContext, name: Name, arrival: int) -> int:
    """Return when a message expires, in ms since 1970; 0 for never."""
    own, config = name.expiration, context.config
    if config.expiration is None:
        # The queue sets no limit: only the models that use the message's own expiration can expire it.
        return own if config.expiration_model in ("default", "earliest") else 0
    queues = (name.since or name.timestamp or arrival) + int(config.expiration * 1000)
    match config.expiration_model:
        case "queue":
            return queues
        case "earliest":
            return min(own, queues) if own else queues
        case "latest":
            return max(own, queues)
        case _:
            return own or queues
