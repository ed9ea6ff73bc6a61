"""Replies: the answer to a message goes to the queue, or topic, that its `reply_to` names, in the same root.

The sender of the message chose that name. So it must be the name of a queue, never a path: nothing is written
outside of the root's queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropq.errors import InvalidName, NoSuchQueue
from dropq.format import names
from dropq.queue.message_view import MessageView
from dropq.queue.missing_queue import missing_queue_sender
from dropq.queue.sender import Sender


def reply_queue(request: MessageView) -> Sender:
    """Open the queue that a message's answers go to; if it is missing, the root's dead-letter queue takes them.

    Raises:
        ValueError, InvalidName, NoSuchQueue: as of `Message.reply`.
        Unavailable: the queue is away.
        ConfigError, StorageError: the queue cannot be opened.
    """
    name, of_message = request.reply_to, f"message {request.id} of queue {request.context.name}"
    if not name:
        raise ValueError(
            f"{of_message} has no reply_to: send the answer to a queue that you name, or let the sender give a "
            "reply_to; nothing was sent"
        )
    asked: Any = request.context.public  # a `Queue`; its root returns queues that send as users do
    root, address = request.context.root, name.removeprefix(names.TOPIC_REPLY)
    try:
        names.check_queue_name(address)  # a subscription's address is refused, too
        queue: Sender = asked.root.queue(address)
        _ = queue._destination  # opens it
        return queue
    except (InvalidName, NoSuchQueue) as error:
        if isinstance(error, NoSuchQueue) and (sender := missing_queue_sender(root, address)) is not None:
            return sender
        if names.is_temporary(name):
            raise NoSuchQueue(
                f"nobody waits any more for the answer to {of_message}, correlation id "
                f"{request.correlation_id or request.id!r}: its requester's queue {name} is gone; nothing was sent"
            ) from error
        raise type(error)(f"the reply_to of {of_message}: {error}; nothing was sent") from error


def correlated(request: MessageView, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an answer: with the request's correlation id, else its id, unless they have one."""
    given = fields.get("correlation_id")
    return {**fields, "correlation_id": given if given is not None else request.correlation_id or request.id}
