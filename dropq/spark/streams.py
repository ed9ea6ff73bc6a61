"""A stream that reads a queue: its micro-batches are claims, written to the queue's journal before Spark knows of them.

The offset in Spark's checkpoint names the stream and its last batch; the journal lists the messages of each batch. So a
query that is started again reads the same messages, and acknowledges committed ones, whenever it was killed.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from dropq.errors import ConfigError, DropqError
from dropq.format.names import tells_time
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.queue_notes import marks_in
from dropq.queue.lease_renewer import LeaseRenewer
from dropq.queue.message import utc
from dropq.queue.stream_journal import LEASE, Journal, check_semantics
from dropq.queue.subscription import Subscription
from dropq.spark.jms_words import check_words
from dropq.spark.options import ReadOptions
from dropq.spark.planned import mark_of
from dropq.spark.reader import Rows, listed, parts, share
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

Offset = dict[str, Any]

#: A report of the backlog is kept for this many times as long as it took.
KEPT = 20


class Backlog:
    """How many messages wait in a queue, and since when.

    Spark asks after each look for a batch, every 10 ms where a query is idle. So target/ is listed again only when it
    has changed, and a report is kept for `KEPT` times as long as it took.
    """

    def __init__(self, context: QueueContext) -> None:
        shared = reading.is_shared(context.layout.base)
        self._listing = reading.Listing(context.layout.target, context.clock, shared=shared)
        self._ignored = context.sidecars.ignored
        self._names: frozenset[str] | None = None
        self._report: dict[str, Any] = {}
        self._again = 0.0

    def report(self) -> dict[str, Any]:
        """Return how many messages wait, and when the oldest was sent, of those whose names tell that; else null."""
        started = time.monotonic()
        if started < self._again:
            return self._report
        found = self._listing.names()
        if found is not self._names:
            self._names = found
            names = [name for name in found if not self._ignored(name)]
            oldest = min((name.split(".", 2)[1][:13] for name in names if tells_time(name)), default=None)
            self._report = {"waiting": len(names), "oldest": None if oldest is None else _as_text(int(oldest))}
        now = time.monotonic()
        self._again = now + KEPT * (now - started)
        return self._report


def _as_text(ms: int) -> str:
    return utc(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class QueueStreamReader(Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Claims messages in micro-batches, in the driver, and acknowledges those that Spark has committed.

    Spark pickles the reader into tasks before it uses it, so the reader opens nothing before the first call.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        check_semantics(options.open().context)
        self._subscription: Subscription | None = None
        self._journal: Journal | None = None
        self._renewer: LeaseRenewer | None = None
        self._latest: Offset | None = None
        self._progress: dict[str, int] = {}
        self._backlog: Backlog | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the first offset of a new stream, with a name for it.

        A stream that goes on has its words not checked, as the result depends on the messages that wait.
        """
        context = self.options.open().context
        check_words(context, self.options.filter)
        return {"stream": f"stream-{secrets.token_hex(8)}", "batch": 0, "queue": mark_of(context) or context.name}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the most messages of a micro-batch."""
        return ReadMaxRows(self.options.limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Restrict the stream to the messages that wait now."""
        self._subscribed()._snapshot()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Acknowledge committed batches, then claim the next batch; return its offset."""
        journal = self._journal_at(start)
        journal.settle(start["batch"])
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        has_more = journal.next_batch(start["batch"] + 1, most, self.options.max_bytes)
        self._latest = {**start, "batch": start["batch"] + 1} if has_more else start
        self._progress = {"bytes": journal.size(self._latest["batch"]) if has_more else 0, "rejected": journal.rejected}
        return self._latest

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the last batch and its bytes, how many were rejected before, and what waits, for the progress."""
        if self._latest is None:
            return None
        try:
            self._backlog = self._backlog or Backlog(self.options.open().context)
            return {**self._latest, **self._progress, **self._backlog.report()}
        except (OSError, DropqError) as error:  # a report is no reason to end a query
            log.warning("the backlog of queue %s is not reported: %s", self.options.queue, describe(error))
            return None

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the messages of a batch as parts for tasks; a batch that an earlier run claimed is the same."""
        # A query that was killed in its first batch has a new initial offset; only `end` is from the checkpoint.
        first = start["batch"] + 1 if start["stream"] == end["stream"] else 1
        journal = self._journal_at(end)
        context, batches = self.options.open().context, range(first, end["batch"] + 1)
        waiting = {batch: listed(context, (message.file for message in journal.messages(batch))) for batch in batches}
        each = share(context, (("processing", files) for files in waiting.values()), self.options)
        mark = mark_of(context)
        return [
            part
            for batch, files in waiting.items()
            for part in parts("processing", files, each, mark, is_claimed=True, notes=self._notes(journal, batch))
        ]

    def _notes(self, journal: Journal, batch: int) -> str:
        return journal.note_bad_bodies(batch).folder if self.options.bad_bodies == "reject" else ""

    def commit(self, end: Offset) -> None:
        """Acknowledge the messages of every batch up to an offset."""
        self._journal_at(end).settle(end["batch"])

    def stop(self) -> None:
        """End the run; uncommitted messages stay claimed for the next run, until their leases run out."""
        if self._renewer is not None:
            self._renewer.stop()
        if self._journal is not None:
            self._journal.close()

    def _subscribed(self) -> Subscription:
        if self._subscription is None:
            queue = self.options.open()
            lease = self.options.lease or queue.config.lease_period or LEASE
            self._subscription = queue.subscribe(
                client_id=self.options.client_id,
                filter=self.options.filter,
                max_backlog=None,
                lease_period=lease,
                detached=True,
            )
            self._subscription._offers.puts_aside = False  # what the queue's filter keeps from all stays where it is
        return self._subscription

    def _journal_at(self, offset: Offset) -> Journal:
        if self._journal is None:
            _refuse_other(self.options.open().context, offset)
            self._journal = Journal(self.options.open().context, offset["stream"], self._subscribed())
            self._renewer = LeaseRenewer(self._journal.lease, self._journal.renew)
        return self._journal


def _refuse_other(context: QueueContext, offset: Offset) -> None:
    """Raise ConfigError if an offset is of a queue with another mark, or name; one of an older dropq does not tell."""
    known = offset.get("queue")
    if known is not None and known not in {context.name, *marks_in(context.layout.private)}:
        raise ConfigError(
            f"the checkpoint of this query belongs to another queue than {context.name} in {context.root.layout.path}, "
            "or that queue was made anew since: give the query the queue that it has read, or a checkpoint of its own"
        )
