"""Send archived messages again, from a point in time on, oldest first; the archive stays.

A replay makes copies. A link would share its inode with the archived file, and a reason finds its file by the inode.
Each rename of a link would also change the ctime of the archived file: retention finds the oldest files by it, and a
message whose name contains no time takes its time from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from datetime import date

from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.settlement import Claims
from dropq.queue.message import Message
from dropq.upkeep.archived import checked, since
from dropq.upkeep.bulk import Outcome, Selection, each, select


def replay(
    context: QueueContext, which: Selection, start: str | date | None = None, *, to: QueueContext | None = None
) -> Iterator[Outcome]:
    """Send archived messages again, each once, as redelivered ones: without their expirations, on a new clock.

    Args:
        start: the point to begin at, as for `since`; None is the queue's recovery_point; else, and where ids are given,
            it is all; ValueError for what is no point to begin at.
        to: the queue that they go to; None is this one.
    """
    destination, moves = to or context, Moves(context)
    if start is None:
        start = (which.wanted is None and context.config.recovery_point) or "epoch"
    messages = _chosen(context, checked(start), which)

    def act(message: Message) -> str | None:
        return moves.replay(message.file, destination)

    return each(context, which, messages, act, f"replayed to {destination.name}")


def _chosen(context: QueueContext, point: str, which: Selection) -> Iterator[Message]:
    """Yield the messages from a point on that were asked for, each once.

    The parts of a bundle are messages of their own, unless the bundle is archived as a whole, too.
    """
    chosen = None
    if which.wanted is not None or which.filter is not None:
        chosen = {message.file for message in select(context, which)}
    seen: set[Hashable] = set()
    settlement = Claims(context)
    asked = [archived for archived in since(context, point) if chosen is None or archived.file in chosen]
    wholes = {archived.message for archived in asked}
    for archived in asked:
        if archived.message not in seen and archived.bundle not in wholes:
            seen.add(archived.message)
            yield Message(settlement, "processed", context.sidecars.file(archived.file))
