"""Recovery: a new subscription, or a new view, gets what topics archived before it was made.

While `.dropq/recovering` is there, nothing leaves the queue's `target/`. So a recovery that a crash ended can begin
again, and knows which messages the queue has. Any process may do it, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress

from dropq.config.schema import is_expression, underlies
from dropq.errors import ConfigError, LeaseLost, NoSuchQueue, StorageError
from dropq.format.addresses import SubscriptionName
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.queue_notes import refuse_away, topics
from dropq.lifecycle.settlement import Claims
from dropq.policies.lock import PolicyLock
from dropq.policies.matching import deciding
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.upkeep.archived import Archived, checked, identity_of, since


def recover(context: QueueContext) -> int:
    """Fill a new subscription or view with what topics archived; return how many copies were made. Sweeps go on."""
    with PolicyLock(context).acquire(lambda: None) as alone:
        if not alone or not context.is_recovering:
            return 0
        point = _point(context)
        archives = list(_archives(context))
        for topic in archives:
            _begin_again(topic)
        count = _fill(context, archives, point)
        context.storage.unlink(context.layout.recovering)
        context.storage.sync(context.layout.private)
    return count


def _point(context: QueueContext) -> str:
    """Return where in the history of its topics a queue begins."""
    path = context.layout.recovering
    point = (reading.read_small(path) or b"").decode(errors="replace").strip()
    try:
        return checked(point or "epoch")
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; write one, or remove the file") from error


def _archives(context: QueueContext) -> Iterator[QueueContext]:
    root, expression = context.root, context.config.underlying_topic
    if expression is None:
        yield open_queue(root, context.name.partition("/")[0])
        return
    for name in topics(root.layout) if is_expression(expression) else (expression,):
        if underlies(expression, name):
            try:
                yield open_queue(root, name)
            except NoSuchQueue:  # it is a folder above topics; RACE: or it is gone
                refuse_away(root.layout, name, f"view {context.name} begins with what it archived")


def _begin_again(topic: QueueContext) -> None:
    """Make each distribution begin again that may have listed the receivers before the queue was made.

    A distributor that lost its claim can neither commit nor archive. What is committed is rolled forward.
    """
    for claim in claims_in(topic):
        with suppress(LeaseLost):
            Claims(topic).release(claim, counted=False)
    rolled = fan_out.sweep(topic)
    if rolled.refused:
        raise StorageError(
            f"topic {topic.name}: what is committed was not rolled forward whole, as the log says, and is not archived "
            "yet; the queue is there, and a later sweep fills it"
        )


def _fill(context: QueueContext, archives: list[QueueContext], point: str) -> int:
    # RACE: a message may be distributed meanwhile, and its copy is in target/ before it is archived: so the archives
    # are listed first.
    listed = [(archived, topic) for topic in archives for archived in since(topic, point)]
    there = Counter(identity_of(file, context, "target") for file in _waiting(context))
    wanted = {topic.name: _wanted(context, topic) for topic in archives}
    seen, count = set[tuple[str, Hashable]](), 0
    for archived, topic in sorted(listed, key=lambda pair: pair[0].time):
        identity = topic.name, archived.message
        if identity in seen or not wanted[topic.name](archived):
            continue
        seen.add(identity)
        if there[archived.message] > 0:  # equal files of two topics are two messages
            there[archived.message] -= 1
        else:
            count += Moves(topic).copy_archived(archived.file, context) is not None
    return count


def _wanted(context: QueueContext, topic: QueueContext) -> Callable[[Archived], bool]:
    subscription = SubscriptionName.of(context.name.partition("/")[2])
    client = subscription.client_id if subscription is not None and subscription.no_local else None
    matches = None
    if context.config.filter is not None:
        matches = deciding(context.config.filter, topic, "processed", context)

    def wants(archived: Archived) -> bool:
        file = MessageFile(archived.file, archived.time // 1000, typed_replies=topic.sidecars.typed_replies)
        if (client is not None and topic.sidecars.full(file.name).from_client == client) or has_expired(topic, file):
            return False
        matching = matches is None or matches(file)
        if matching is None:
            path = f"{topic.layout.processed}/{archived.file}"
            raise StorageError(f"{path} cannot be read, and the filter of {context.name} asks for it", path=path)
        return matching

    return wants


def _waiting(context: QueueContext) -> list[MessageFile]:
    return [
        context.sidecars.file(entry.name, context.layout.target)
        for entry in reading.entries(context.layout.target)
        if reading.is_message_file(entry) and not context.sidecars.ignored(entry.name)
    ]


def recover_if_needed(context: QueueContext) -> int:
    """Finish an interrupted recovery before anything leaves the queue; return what `recover` does."""
    if context.is_recovering:
        with suppress(NoSuchQueue):  # its topic is gone: it stays as it is
            return recover(context)
    return 0
