"""Sending again what a queue has archived: from a point in time on, oldest first, while the archive stays.

A replay makes copies, and no links, which would share their inode with the archived file: by the inode a reason finds
its file; and each rename of a link sets the one ctime, by which retention finds what is oldest in the archive, and a
message whose name tells no time has its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from datetime import date

from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.settlement import Claims
from dropq.queue.message import Message
from dropq.upkeep.archived import checked, since
from dropq.upkeep.bulk import Outcome, each, select


def replay(
    context: QueueContext,
    start: str | date | None = None,
    *,
    ids: Iterable[str] | None = None,
    filter: str | None = None,
    to: QueueContext | None = None,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Send archived messages again, each once, as redelivered ones: without their expirations, on a new clock.

    Args:
        context: whose archive it is.
        start: the point to begin at, as for `since`; None is the queue's recovery_point, or all where ids are given.
        ids, filter: which; neither takes all from the point on.
        to: the queue that they go to; None is this one.
        dry_run: only say what would be done.

    Raises:
        ValueError: start is no point to begin at.
    """
    goal = to or context
    wanted = None if ids is None else list(dict.fromkeys(ids))
    if start is None:
        start = context.config.recovery_point if wanted is None else "epoch"
    messages = _chosen(context, checked(start), wanted, filter)

    def act(message: Message) -> str | None:
        return Moves(context).replay(message.file, goal)

    done = f"replayed to {goal.name}"
    return each(context, "processed", messages, wanted=wanted, act=act, done=done, dry_run=dry_run)


def _chosen(context: QueueContext, point: str, ids: list[str] | None, filter: str | None) -> Iterator[Message]:
    """Yield the messages from a point on that were asked for, each once.

    The parts of a bundle are messages of their own, unless the bundle is archived as a whole, too.
    """
    chosen = None
    if ids is not None or filter is not None:
        chosen = {message.file for message in select(context, "processed", ids=ids, filter=filter)}
    seen: set[Hashable] = set()
    settlement = Claims(context)
    asked = [archived for archived in since(context, point) if chosen is None or archived.file in chosen]
    wholes = {archived.message for archived in asked}
    for archived in asked:
        if archived.message not in seen and archived.bundle not in wholes:
            seen.add(archived.message)
            yield Message(settlement, "processed", context.sidecars.file(archived.file))
