"""Recovery: a new subscription gets what its topic archived before the subscription was made.

While `.dropq/recovering` is there, nothing leaves the subscription's `target/`. So a recovery that a crash ended can
begin again, and knows which messages the subscription has. Any process may do it, one at a time.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress

from dropq.errors import ConfigError, LeaseLost, NoSuchQueue, StorageError
from dropq.format.addresses import SubscriptionName
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.settlement import Claims
from dropq.policies.lock import PolicyLock
from dropq.policies.matching import deciding
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.upkeep.archived import checked, identity_of, since


def recover(context: QueueContext) -> int:
    """Fill a new subscription with what its topic has archived; return how many copies were made. Sweeps go on."""
    topic = open_queue(context.root, context.name.partition("/")[0])
    with PolicyLock(context).acquire(lambda: None) as alone:
        if not alone or not context.is_recovering:
            return 0
        point = _point(context)
        _begin_again(topic)
        count = _fill(context, topic, point)
        context.storage.unlink(context.layout.recovering)
        context.storage.sync(context.layout.private)
    return count


def _point(context: QueueContext) -> str:
    """Return where in the topic's history a subscription begins."""
    path = context.layout.recovering
    point = (reading.read_small(path) or b"").decode(errors="replace").strip()
    try:
        return checked(point or "epoch")
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; write one, or remove the file") from error


def _begin_again(topic: QueueContext) -> None:
    """Make each distribution begin again that may have listed the receivers before the subscription was made.

    A distributor that lost its claim can neither commit nor archive. What is committed is rolled forward.
    """
    for claim in claims_in(topic):
        with suppress(LeaseLost):
            Claims(topic).release(claim, counted=False)
    rolled = fan_out.sweep(topic)
    if rolled.refused:
        raise StorageError(
            f"topic {topic.name}: what is committed was not rolled forward whole, as the log says, and is not archived "
            "yet; the subscription is there, and a later sweep fills it"
        )


def _fill(context: QueueContext, topic: QueueContext, point: str) -> int:
    # RACE: a message may be distributed meanwhile, and its copy is in target/ before it is archived: so the archive is
    # listed first.
    archive = list(since(topic, point))
    there = {identity_of(file, context, "target") for file in _waiting(context)}
    subscription = SubscriptionName.of(context.name.partition("/")[2])
    client = subscription.client_id if subscription is not None and subscription.no_local else None
    wants = None
    if context.config.filter is not None:
        wants = deciding(context.config.filter, topic, "processed", context)
    count = 0
    seen: set[Hashable] = set(there)
    for archived in archive:
        if archived.message in seen:
            continue
        file = MessageFile(archived.file, archived.time // 1000, typed_replies=topic.sidecars.typed_replies)
        if (client is not None and topic.sidecars.full(file.name).from_client == client) or has_expired(topic, file):
            continue
        if wants is not None and not wants(file):
            continue
        seen.add(archived.message)
        count += Moves(topic).copy_archived(archived.file, context) is not None
    return count


def _waiting(context: QueueContext) -> list[MessageFile]:
    return [
        context.sidecars.file(entry.name, context.layout.target)
        for entry in reading.entries(context.layout.target)
        if reading.is_message_file(entry) and not context.sidecars.ignored(entry.name)
    ]


def recover_if_needed(context: QueueContext) -> int:
    """Finish an interrupted recovery before anything leaves the subscription; return what `recover` does."""
    if context.is_recovering:
        with suppress(NoSuchQueue):  # its topic is gone: it stays as it is
            return recover(context)
    return 0
