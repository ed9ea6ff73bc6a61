"""A claiming batch: a data frame of messages that are nobody else's until they are acknowledged together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dropq.api import Queue
from dropq.errors import DropqError, LeaseLost
from dropq.format.layout import WITH_REASON
from dropq.queue.lease_renewer import LeaseRenewer, renew_held
from dropq.queue.message import Duration, Message, ack_all
from dropq.spark.options import CLAIM_OPTIONS, ReadOptions, known
from dropq.staging.stream_journal import check_semantics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@contextmanager
def claim(
    spark: SparkSession,
    queue: Queue,
    n: int,
    *,
    timeout: Duration | None = 0,
    filter: str | None = None,
    schema: StructType | str | None = None,
    **options: Any,
) -> Iterator[DataFrame]:
    """Claim up to n messages as a data frame: acknowledged when the block ends, returned when it raises.

    What was claimed is fixed: a stage that is computed again reads the same messages, and none that is lost meanwhile
    goes unnoticed. They are held by this process; when it dies, they return to the queue. A queue's leases are renewed
    while the block runs.

    Args:
        spark: the session.
        queue: the queue; its root lies under the same path on every executor.
        n: the most messages.
        timeout: how long to wait for the first one: 0 looks once, None waits for ever.
        filter: which messages.
        schema: the columns of the data frame, as for a read; None takes all columns of a message.
        options: further options of a read, such as bodyFormat or numPartitions.

    Raises:
        LeaseLost: some of what was claimed is not held any more; the rest was acknowledged.
    """
    from dropq.spark.datasource import register

    check_semantics(queue.context)
    known(options, CLAIM_OPTIONS, "claim()")
    _options(queue, "claim:0", options)  # a mistake in them costs no delivery
    register(spark)
    with queue.subscribe(client_id="spark", max_backlog=None, filter=filter) as subscription:
        most = n if subscription.max_backlog is None else min(n, subscription.max_backlog)
        messages = subscription.receive_many(most, timeout)
        with _renewed(messages, subscription.lease):
            given = _options(queue, f"{subscription.id}:{len(messages)}", options)
            reader = spark.read.format("dropq").options(**given)
            try:
                yield (reader if schema is None else reader.schema(schema)).load()
            except BaseException:
                _release(messages)
                raise
        ack_all(message for message in messages if message.held)
        missed = [message for message in messages if message.state == "processing"]
        settled = _set_aside(queue, missed)
        lost = [message for message in missed if message.owner not in settled]
    if lost:
        raise LeaseLost(
            f"{len(lost)} of {len(messages)} messages of queue {queue.name}, the first {lost[0].id}, were not held any "
            "more when they were to be acknowledged: they may be worked on twice. The others are acknowledged"
        )


def _release(messages: list[Message]) -> None:
    """Give back messages that were worked on in vain: their deliveries count, or a bad one would come for ever."""
    for message in messages:
        with suppress(DropqError):  # what stays held is returned as the subscription closes
            if message.held:
                message.release()


def _set_aside(queue: Queue, messages: list[Message]) -> set[str | None]:
    """Return the owners of those messages that were rejected or expired by their receipts, in another process."""
    ids = {message.id for message in messages}
    found = (one.reason for state in WITH_REASON if ids for one in queue.browse(state) if one.id in ids)
    return {str(reason.get("owner")) for reason in found if reason is not None}


def _options(queue: Queue, claimed: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the options of the read of what is claimed, which are good."""
    place = {"root": os.fspath(queue.root.path), "queue": queue.name, "claimed": claimed}
    given = {key: str(value) for key, value in options.items()} | place
    ReadOptions.parse(given)
    return given


@contextmanager
def _renewed(messages: list[Message], lease: float | None) -> Iterator[None]:
    """Renew the leases of messages, where they have any, until the block ends."""
    if not lease:
        yield
        return
    renewer = LeaseRenewer(lease, partial(renew_held, messages, lease))
    try:
        yield
    finally:
        renewer.stop()
