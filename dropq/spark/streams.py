"""A stream out of a queue: its micro-batches are claims, written down before Spark hears of them.

The offset that Spark keeps in its checkpoint names the stream and the last batch; what the batch holds stands in the
queue's journal. So a query that comes again reads the same messages, and what is committed is acknowledged, whoever
was killed when.
"""

from __future__ import annotations

import secrets
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from dropq.queue.lease_renewer import LeaseRenewer
from dropq.queue.subscription import Subscription
from dropq.spark.options import ReadOptions
from dropq.spark.reader import Rows, listed, part_size, parts
from dropq.staging.stream_journal import LEASE, Journal, check_semantics

Offset = dict[str, Any]


class QueueStreamReader(Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Claims messages in micro-batches, in the driver, and acknowledges those of each offset that Spark has committed.

    Spark pickles it into the tasks before it is used, so that it opens nothing until it is asked for an offset.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        check_semantics(options.open().context)
        self._subscription: Subscription | None = None
        self._journal: Journal | None = None
        self._renewer: LeaseRenewer | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Begin a stream, which gets its name here."""
        return {"stream": f"stream-{secrets.token_hex(8)}", "batch": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return how many messages a micro-batch takes at most."""
        return ReadMaxRows(self.options.limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take from now on only what waits at this moment."""
        self._subscribed().snapshot()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Acknowledge what is committed, then claim the next batch; return where it ends."""
        journal = self._opened(start)
        journal.settle(start["batch"])
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return {**start, "batch": start["batch"] + 1} if journal.next_batch(start["batch"] + 1, most) else start

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Share out the messages of a batch; of one that an earlier run had claimed, the same ones."""
        # A query that was killed in its first batch begins again with an initial offset of its own: `end` is Spark's.
        first = start["batch"] + 1 if start["stream"] == end["stream"] else 1
        journal = self._opened(end)
        messages = [message for batch in range(first, end["batch"] + 1) for message in journal.messages(batch)]
        waiting = listed(self.options.open().context, (message.file for message in messages))
        return list(parts("processing", waiting, part_size(len(waiting), self.options), held=True))

    def commit(self, end: Offset) -> None:
        """Acknowledge the messages of every batch up to an offset, for good."""
        self._opened(end).settle(end["batch"])

    def stop(self) -> None:
        """End the run; what it had not committed stays claimed for the next one, until its leases run out."""
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
