"""Dead letters: messages that cannot be delivered, in the target/ of a dead-letter queue.

A dead letter is a message like any other. Its name says in which queue it could not be delivered first (`originS`),
and why, the last time (`reasonS`). Both stay when selectors, routes and commands move it on. Its counters start again,
and it has no expiration. Becoming a dead letter is a hop, and hops are limited: so rings of dead-letter queues end.
"""

from __future__ import annotations

from dataclasses import replace
from shlex import quote

from dropq.errors import ConfigError
from dropq.format.addresses import layouts
from dropq.format.credits import HOPS_LIMIT
from dropq.format.layout import QueueLayout
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.naming import uncounted
from dropq.storage import reading

#: Reasons: it was sent to a queue that is not there; it was bounced.
NO_SUCH_QUEUE, BOUNCED = "no_such_queue", "bounced"


def find_layout(root: str, name: str) -> QueueLayout | None:
    """Return where the dead-letter queue of a name is; None if the root has no queue of this name."""
    reading.ask_server(root)  # on NFS another host may have made it just now
    possible = (layout for layout in layouts(root, name) if not layout.topic)
    return next((layout for layout in possible if reading.is_folder(layout.target)), None)


def letter(name: Name, origin: str, reason: str, now: int) -> Name:
    """Return the name of a dead letter: one hop more, and counters that start again.

    It could not be delivered in the queue `origin` first. The expiration of its new queue counts from `now`, in ms.
    """
    return replace(
        uncounted(name.unmarked),
        expiration=0,
        since=now,
        via="",
        copied="",
        owned=False,
        hops=name.hops + 1,
        origin=origin,
        reason=reason,
        foreign=False,
    )


def why_no_more(name: Name) -> str:
    """Return why a message that cannot be delivered goes to no dead-letter queue; "" if it does."""
    return f"it is a dead letter, and has made {name.hops} hops" if name.reason and name.hops >= HOPS_LIMIT else ""


def check_origin(letters: QueueContext, origin: QueueContext) -> None:
    """Refuse to put a letter back into its origin unless the dead letters of that queue come here.

    Anybody who can write here can write any origin into a name: such a name must not borrow this user's rights.

    Raises:
        ConfigError: another queue, or none, is the dead-letter queue of its origin.
    """
    own = origin.config.dead_letter_queue
    if own != letters.name:
        goes = "has no dead-letter queue" if own is None else f"has the dead-letter queue {own}"
        way = f"`dropq move {quote(letters.name)} {quote(origin.name)}` brings letters there as they are"
        raise ConfigError(f"it says that it came from {origin.name}, which {goes}: {way}")
