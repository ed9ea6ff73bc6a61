"""Acks that come before their messages: each is an empty file in `.dropq/acks/`, named by the message's id.

The process that unlinks the file uses the ack up, so an ack settles at most one message. A crash between the unlink and
the archive leaves a claim, which any sweep returns: the message is delivered after all, and nothing is lost.
"""

from __future__ import annotations

from contextlib import suppress

from dropq.errors import LeaseLost, StorageError
from dropq.format.layout import QueueLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.settlement import Claims
from dropq.storage import reading

#: What becomes of a message when its early ack cannot be read or removed.
STAYS = "the message is not acknowledged, and stays in target/"


def check(context: QueueContext, message_id: str) -> None:
    """Raise ValueError for an id whose ack cannot be remembered, and for a topic."""
    if context.layout.is_topic:
        raise ValueError(
            f"the ack of {message_id!r} cannot be deferred: {context.name} is a topic, whose messages go to receivers; "
            "acknowledge it where they get it"
        )
    if not Name(message_id).generated:
        raise ValueError(
            f"the ack of {message_id!r} cannot be deferred: only ids that dropq made are never used twice; acknowledge "
            "the message once it is there"
        )


def remember(context: QueueContext, message_id: str) -> None:
    """Remember an ack for deferred_ack_expiration; it is as durable as a message that is sent."""
    context.storage.make_folder(context.layout.acks)
    context.storage.write_small(_path(context, message_id), b"")


def forget(context: QueueContext, message_id: str) -> None:
    """Forget an ack: its message was settled."""
    context.storage.unlink(_path(context, message_id))


def remembered(layout: QueueLayout) -> frozenset[str]:
    """List the ids whose acks are remembered; some may be too old."""
    return reading.names_in(layout.acks)


def applies(context: QueueContext, file: MessageFile) -> bool:
    """Return whether a waiting message has an ack that came before it: its next consumer archives it undelivered.

    A part of a bundle is delivered: the ack is for the whole bundle, and one part would use it up.
    """
    is_whole = file.name.generated and not file.name.first
    return is_whole and not context.layout.is_topic and _in_force(context, file.name.id)


def settle(context: QueueContext, file: MessageFile, owner: str, deadline: int) -> bool:
    """Archive a waiting message undelivered, by a claim of `owner`, if its ack came before it; else return False.

    Raises:
        StorageError: it could not be claimed; or not archived, and was given back; or the archive was not synced.
    """
    with context.error_context(STAYS):
        if not applies(context, file):
            return False
    claim = Claims(context).claim(file, owner, deadline)
    if claim is None:
        return True  # RACE: another consumer was first, and settles or delivers it
    try:
        with context.error_context(STAYS):
            ours = context.storage.unlink(_path(context, file.name.id))
        if ours:
            Claims(context).archive(claim)
        else:  # RACE: another consumer used the ack for another message of this id: this message is to be delivered
            Claims(context).release(claim, counted=False)
    except LeaseLost:
        pass  # RACE: a sweep returned it; it was not delivered
    except StorageError:
        with suppress(LeaseLost):  # it was archived, only not synced, as the error says
            Claims(context).release(claim, counted=False)
        raise
    return True


def is_over(context: QueueContext, filename: str) -> bool:
    """Return whether a file in `.dropq/acks/` is an ack that is too old."""
    return Name(filename).generated and not _in_force(context, filename)


def _in_force(context: QueueContext, message_id: str) -> bool:
    try:
        age = context.clock.now_ms() - reading.written_ms(_path(context, message_id))
    except FileNotFoundError:
        return False
    return age < context.config.deferred_ack_expiration * 1000


def _path(context: QueueContext, message_id: str) -> str:
    return f"{context.layout.acks}/{message_id}"
