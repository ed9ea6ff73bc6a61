"""A stream that reads a queue: its micro-batches are claims, written to the queue's journal before Spark knows of them.

The offset in Spark's checkpoint names the stream and its last batch; the journal lists the messages of each batch. So a
query that is started again reads the same messages, and acknowledges committed ones, whenever it was killed.
"""

from __future__ import annotations

import secrets
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from dropq.queue.lease_renewer import LeaseRenewer
from dropq.queue.stream_journal import LEASE, Journal, check_semantics
from dropq.queue.subscription import Subscription
from dropq.spark.options import ReadOptions
from dropq.spark.reader import Rows, listed, part_size, parts

Offset = dict[str, Any]


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

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the first offset of a new stream, with a name for it."""
        return {"stream": f"stream-{secrets.token_hex(8)}", "batch": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the most messages of a micro-batch."""
        return ReadMaxRows(self.options.limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Restrict the stream to the messages that wait now."""
        self._subscribed()._snapshot()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Acknowledge committed batches, then claim the next batch; return its offset."""
        journal = self._opened(start)
        journal.settle(start["batch"])
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return {**start, "batch": start["batch"] + 1} if journal.next_batch(start["batch"] + 1, most) else start

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the messages of a batch as parts for tasks; a batch that an earlier run claimed is the same."""
        # A query that was killed in its first batch has a new initial offset; only `end` is from the checkpoint.
        first = start["batch"] + 1 if start["stream"] == end["stream"] else 1
        journal = self._opened(end)
        messages = [message for batch in range(first, end["batch"] + 1) for message in journal.messages(batch)]
        waiting = listed(self.options.open().context, (message.file for message in messages))
        return list(parts("processing", waiting, part_size(len(waiting.names), self.options), held=True))

    def commit(self, end: Offset) -> None:
        """Acknowledge the messages of every batch up to an offset."""
        self._opened(end).settle(end["batch"])

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
        return self._subscription

    def _opened(self, offset: Offset) -> Journal:
        if self._journal is None:
            self._journal = Journal(self.options.open().context, offset["stream"], self._subscribed())
            self._renewer = LeaseRenewer(self._journal.lease, self._journal.renew)
        return self._journal
