"""A claiming batch: a data frame of claimed messages, which are acknowledged together."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dropq.api import Queue, Root
from dropq.errors import ConfigError, DropqError, LeaseLost
from dropq.format.layout import WITH_REASON
from dropq.queue.bad_bodies import BadBodyNotes, reject_bad
from dropq.queue.lease_renewer import LeaseRenewer, renew_held
from dropq.queue.message import Duration, Message, ack_all
from dropq.queue.stream_journal import batch_key, check_semantics
from dropq.spark.jms_words import check_words
from dropq.spark.open_claims import claim_id, opened
from dropq.spark.options import CLAIM_OPTIONS, ROOT_VARIABLE, ReadOptions, by_name
from dropq.spark.reader import bad_body_notes
from dropq.storage.failures import describe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

log = logging.getLogger("dropq")


@contextmanager
def claim(
    spark: SparkSession,
    queue: Queue | str,
    n: int,
    *,
    root: str | os.PathLike[str] | None = None,
    timeout: Duration | None = 0,
    filter: str | None = None,
    schema: StructType | str | None = None,
    **options: Any,
) -> Iterator[DataFrame]:
    """Claim up to n messages as a data frame; acknowledge them when the block ends, return them if it raises.

    With badBodies=reject, messages whose bodies were found bad are rejected when the block ends.

    The set of messages is fixed: a stage that Spark computes again reads the same messages, and fails if one is lost.
    This process holds them; when it dies, they return to the queue. If the queue has leases, they are renewed while the
    block runs. A write of the block with `jobId="{claim}"` is named after the messages, so that they are sent once also
    if the block runs again; a job with another id that was sent before is an error there.

    Args:
        spark: the session.
        queue: the queue, or its name; its root must have the same path on every executor.
        n: the most messages, at least 1.
        root: the root of a queue that is given by its name; None takes it from DROPQ_ROOT in the environment.
        timeout: how long to wait for the first message: 0 looks once, None waits for ever.
        filter: claim only messages that match.
        schema: the columns of the data frame, as for a read; None takes all columns of a message.
        options: further options of a read: bodyFormat, those of csv, badBodies, numPartitions.

    Raises:
        ValueError: n is no number of messages; or a root is given, although the queue has one.
        ConfigError: an option cannot be used; or the queue is given by its name, and the root is not known.
        InvalidFilter: the filter cannot be read, or names a column where JMS has another word.
        LeaseLost: some messages were not held any more at the end of the block; the rest was acknowledged.
    """
    from dropq.spark.datasource import register

    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(
            f"claim() takes up to n messages, and n is {n!r}: give a whole number from 1; nothing was claimed"
        )
    queue = find_queue(queue, root)
    check_semantics(queue.context)
    rejects = by_name(options, CLAIM_OPTIONS, "claim()").get("badbodies") == "reject"
    _options(queue, "claim:0", options)  # check them before anything is claimed
    check_words(queue.context, filter)
    register(spark)
    with queue.subscribe(client_id="spark", max_backlog=None, filter=filter) as subscription:
        most = n if subscription.max_backlog is None else min(n, subscription.max_backlog)
        messages = subscription.receive_many(most, timeout)
        with ExitStack() as ends:
            if subscription.lease:
                renewer = LeaseRenewer(subscription.lease, partial(renew_held, messages, subscription.lease))
                ends.callback(renewer.stop)
            claimed = f"{subscription.id}:{len(messages)}"
            reader = spark.read.format("dropq").options(**_options(queue, claimed, options))
            notes = bad_body_notes(queue.context, claimed)
            if rejects:
                notes.begin()
                ends.callback(_forget, queue, notes)
            try:
                with opened(spark, claim_id(queue.context, messages)):
                    yield (reader if schema is None else reader.schema(schema)).load()
            except BaseException:
                _release(messages)
                raise
            if rejects:
                _reject(queue, messages, notes)
            ack_all(message for message in messages if message.held)
        unsettled = [message for message in messages if message.state == "processing"]
        settled = _settled_owners(queue, unsettled)
        lost = [message for message in unsettled if message.owner not in settled]
    if lost:
        raise LeaseLost(
            f"{len(lost)} of {len(messages)} messages of queue {queue.name}, the first {lost[0].id}, were not held any "
            "more at the end of the block: they may be handled twice. The others are acknowledged"
        )


def find_queue(queue: Queue | str, root: str | os.PathLike[str] | None, verb: str = "claim()") -> Queue:
    """Return the queue that is given, or named."""
    if isinstance(queue, Queue):
        if root is not None:
            raise ValueError(
                f"{verb} takes a root only with the name of a queue: {queue!r} has one; nothing was claimed"
            )
        return queue
    path = root or os.environ.get(ROOT_VARIABLE)
    if not path:
        raise ConfigError(
            f"{verb} takes the queue {queue!r} by its name, and does not know the root: give root=..., or set "
            f"{ROOT_VARIABLE}; nothing was claimed"
        )
    return Root(path).queue(queue)


def _forget(queue: Queue, notes: BadBodyNotes) -> None:
    try:
        notes.drop()
        queue.context.storage.remove_folder(os.path.dirname(notes.folder))
    except OSError as error:  # every message is settled: the notes go with the streams that nobody continues
        log.warning("queue %s: notes on bad bodies are left: %s", queue.name, describe(error))


def _reject(queue: Queue, messages: list[Message], notes: BadBodyNotes) -> None:
    if rejected := reject_bad({batch_key(message.file): message for message in messages}, notes.reasons()):
        warning = "%d of %d messages of queue %s were rejected for their bodies, such as %s: see error/"
        log.warning(warning, len(rejected), len(messages), queue.name, rejected[0].id)


def _release(messages: list[Message]) -> None:
    """Give messages back after an error; the delivery counts, or a bad message would come back for ever."""
    for message in messages:
        with suppress(DropqError):  # a message that stays held is returned when the subscription closes
            if message.held:
                message.release()


def _settled_owners(queue: Queue, messages: list[Message]) -> set[str | None]:
    """Return the owners of those messages that another process rejected or expired by their receipts."""
    ids = {message.id for message in messages}
    views = (view for state in WITH_REASON if ids for view in queue.browse(state) if view.id in ids)
    return {str(reason.get("owner")) for view in views if (reason := view.reason) is not None}


def _options(queue: Queue, claimed: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the options of the read of claimed messages, after checking them."""
    address = {"root": os.fspath(queue.root.path), "queue": queue.name, "claimed": claimed}
    read_options = {key: str(value) for key, value in options.items()} | address
    ReadOptions.parse(read_options)
    return read_options
