"""A claiming batch: a data frame of messages that are nobody else's until they are acknowledged together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dropq.errors import DropqError, LeaseLost, NoSuchMessage
from dropq.journal import check_semantics
from dropq.message import Duration, Message, ack_all
from dropq.queue import Queue
from dropq.spark.options import ReadOptions
from dropq.subscription import Subscription

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

    check_semantics(queue)
    register(spark)
    with queue.subscribe(client_id="spark", max_backlog=None, filter=filter) as subscription:
        most = n if subscription.max_backlog is None else min(n, subscription.max_backlog)
        messages = subscription.receive_many(most, timeout)
        with _renewed(messages, subscription.lease):
            yield _frame(spark, queue, subscription, len(messages), schema, options)
        lost = [message for message in messages if not message.held]  # a renewal found it
        lost += ack_all(message for message in messages if message.held)
        lost = [message for message in lost if not _is_settled(queue, message)]
    if lost:
        raise LeaseLost(
            f"{len(lost)} of {len(messages)} messages of queue {queue.name}, the first {lost[0].id}, were not held any "
            "more when they were to be acknowledged: they may be worked on twice. The others are acknowledged"
        )


def _is_settled(queue: Queue, message: Message) -> bool:
    """Tell whether a message that is not held any more was settled: in the block, by its receipt."""
    try:
        queue.find(message.id, ("error", "processed", "expired"))
    except NoSuchMessage:
        return False
    return True


def _frame(
    spark: SparkSession,
    queue: Queue,
    subscription: Subscription,
    count: int,
    schema: StructType | str | None,
    options: dict[str, Any],
) -> DataFrame:
    place = {"root": os.fspath(queue.root.path), "queue": queue.name, "claimed": f"{subscription.id}:{count}"}
    given = {key: str(value) for key, value in options.items()} | place
    ReadOptions.parse(given)  # now, not at the first action
    reader = spark.read.format("dropq").options(**given)
    return (reader if schema is None else reader.schema(schema)).load()


@contextmanager
def _renewed(messages: list[Message], lease: float | None) -> Iterator[None]:
    """Renew the leases of messages, where they have any, until the block ends."""
    ended = threading.Event()

    def renew() -> None:
        while lease and not ended.wait(lease / 3):
            for message in messages:
                try:
                    if message.held:
                        message.extend(lease)
                except DropqError:
                    pass  # it is lost: whoever reads or acknowledges it is told

    thread = threading.Thread(target=renew, name="dropq leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
