"""Acks that come before their messages: each is an empty file in `.dropq/acks/`, named by the message's id.

Whoever unlinks the file uses the ack up, so it settles one message, once. Who dies between that and the archive leaves
a claim, which any sweep returns: then the message is delivered all the same, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dropq import names, storage
from dropq.errors import LeaseLost, StorageError
from dropq.layout import QueueLayout
from dropq.lifecycle import Lifecycle, Waiting
from dropq.names import Name

#: What becomes of a message when the ack that came before it cannot be looked at.
STAYS = "the message is not acknowledged, and stays in target/"


def check(message_id: str) -> None:
    """Refuse an id whose ack cannot be remembered, with ValueError."""
    if not Name(message_id).generated:
        raise ValueError(
            f"the ack of {message_id!r} cannot be deferred: only of an id that dropq made it is certain that no other "
            "message will come under it; acknowledge the message once it is there"
        )


def remember(life: Lifecycle, message_id: str) -> None:
    """Remember an ack, for deferred_ack_expiration from now on; it is as durable as a message that is sent."""
    life.storage.make_folder(life.layout.acks)
    life.storage.write_small(_path(life, message_id), b"")


def forget(life: Lifecycle, message_id: str) -> None:
    """Forget an ack: its message was settled."""
    life.storage.unlink(_path(life, message_id))


def remembered(layout: QueueLayout) -> frozenset[str]:
    """Return the ids whose acks are remembered, by one listing; some may be too old."""
    return storage.names_in(layout.acks)


def settle(life: Lifecycle, waiting: Waiting, owner: str, deadline: int) -> bool:
    """Archive a waiting message by the ack that came before it, undelivered; False where it is to be delivered.

    Args:
        life: the queue.
        waiting: the message.
        owner, deadline: of the claim, as for `Lifecycle.claim`.

    Raises:
        StorageError: it could not be claimed, or not be archived, and is given back; or that is not durable.
    """
    message_id = names.parse(names.split_claim(waiting.file)[1]).id
    with life.telling(STAYS):
        if not _in_force(life, message_id):
            return False
    held = life.claim(waiting, owner, deadline)
    if held is None:
        return True  # RACE: another consumer was first, and settles or delivers it
    try:
        with life.telling(STAYS):
            ours = life.storage.unlink(_path(life, message_id))
        if ours:
            life.archive(held)
        else:  # RACE: it was used up meanwhile, for another message of this id: this one is to be delivered
            life.give_back(held, counted=False, delay=0)
    except LeaseLost:
        pass  # RACE: a sweep returned it; it was not delivered
    except StorageError:
        with suppress(LeaseLost):  # it has left all the same, and the error says what is the matter
            life.give_back(held, counted=False, delay=0)
        raise
    return True


def expired(life: Lifecycle) -> Iterator[str]:
    """Yield the paths of acks that were remembered for long enough."""
    for name in remembered(life.layout):
        if Name(name).generated and not _in_force(life, name):
            yield _path(life, name)


def _in_force(life: Lifecycle, message_id: str) -> bool:
    try:
        age = life.clock.now_ms() - storage.written_ms(_path(life, message_id))
    except FileNotFoundError:
        return False
    return age < life.config.deferred_ack_expiration * 1000


def _path(life: Lifecycle, message_id: str) -> str:
    return f"{life.layout.acks}/{message_id}"
