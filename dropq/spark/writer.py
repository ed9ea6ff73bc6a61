"""The writer of a Spark job: its tasks stage messages out of sight, its driver commits them as one.

Nothing of a job is in target/ before the commit, and all of it after: a task that fails, is run twice or is too late
leaves only staged files, which no commit lists. The writer itself is plain values, since Spark pickles it into every
task and into the commit; the job's id is made once, before that.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from dropq.api import Queue
from dropq.errors import ConfigError
from dropq.spark.encoders import BODIES, in_utc
from dropq.spark.options import WriteOptions
from dropq.staging.jobs import Attempt, Epoch, Job, Staged
from dropq.storage.failures import storage_error

log = logging.getLogger("dropq")

#: The properties of a task by which Spark says for which query and which epoch of it the task runs.
QUERY_ID = "sql.streaming.queryId"
EPOCH = "streaming.sql.batchId"


@dataclass
class StagedFiles(WriterCommitMessage):
    """What a task staged, for the driver to commit; of an epoch, also for which query."""

    staged: Staged | None = None
    query: str = ""


class QueueWriter(DataSourceArrowWriter):
    """Sends the rows, or the partitions, of one job into a queue.

    Args:
        options: where to and how.
        job_id: what names the job.
    """

    def __init__(self, options: WriteOptions, job_id: str) -> None:
        self.options = options
        self.job_id = job_id

    @classmethod
    def begin(cls, options: WriteOptions) -> QueueWriter:
        """Begin a job, in the driver.

        Raises:
            NoSuchQueue, ConfigError, StorageError: the queue cannot be written to.
            ValueError: the job id cannot name a job.
        """
        writer = cls(options, options.job_id or f"spark-{secrets.token_hex(10)}")
        job = writer._job()
        if job.sent:
            log.warning("job %s was sent to queue %s before: this run sends nothing", job.id, options.queue)
        else:
            job.begin()
        return writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition, in a task; nothing is made for an empty one, or for a job that was sent before."""
        queue = self.options.open()
        return StagedFiles(stage(queue, Job(queue.context, self.job_id), self.options, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Send all that was staged, once, in the driver."""
        queue = self.options.open()
        sent = _commit(queue, Job(queue.context, self.job_id), _staged(messages))
        log.info("job %s sent %d messages to queue %s", self.job_id, sent, self.options.queue)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the job; Spark says this after a commit that failed, too: then what was committed is sent."""
        if self._job().abort():
            log.warning("job %s was committed before it failed: all of it is sent, do not send it again", self.job_id)

    def _job(self) -> Job:
        return Job(self.options.open().context, self.job_id)


class QueueStreamWriter(DataSourceStreamArrowWriter):
    """Sends each epoch of a streaming query as a job of its own, named by both: a replayed one sends nothing.

    Spark makes a writer for the tasks of an epoch and another for its commit, so that what they share is in the
    tasks' answers.

    Args:
        options: where to and how.
    """

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition of an epoch, in a task; nothing is made where it is empty or the epoch was sent before."""
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context else None
        epoch = context.getLocalProperty(EPOCH) if context else None
        if query is None or epoch is None:
            raise ConfigError("only micro-batches can be written to a queue: of them Spark tells query and epoch")
        queue = self.options.open()
        return StagedFiles(
            stage(queue, Epoch(queue.context, query, int(epoch)), self.options, iterator, begins=True), query
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send all that an epoch staged, once, in the driver."""
        queue = self.options.open()
        for query in _queries(messages):
            epoch = Epoch(queue.context, query, batchId)
            if epoch.sent:
                log.warning(
                    "%s was sent to queue %s before: this run of it sends nothing", epoch.id, self.options.queue
                )
            sent = _commit(queue, epoch, _staged(messages))
            log.info("%s: %d messages were sent to queue %s", epoch.id, sent, self.options.queue)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop an epoch, unless it was committed: the query runs it again, under the same name."""
        context = self.options.open().context
        for query in _queries(messages):
            epoch = Epoch(context, query, batchId)
            if epoch.abort():
                log.warning("%s was committed before it failed: all of it is sent", epoch.id)


def _commit(queue: Queue, job: Job, staged: list[Staged]) -> int:
    """Send what a job staged, as a whole and once the queue lets it in; return how many were sent.

    A job that was sent before is not asked about: it takes no room.
    """
    count = sum(len(part.files) for part in staged)
    if count and not job.sent and not queue.admit_job(count):
        job.abort()
        return 0
    return job.commit(staged)


def _queries(messages: Iterable[WriterCommitMessage | None]) -> list[str]:
    """Return the query that the tasks of an epoch staged for: one, or none where Spark gives no answer of theirs."""
    return sorted({part.query for part in messages if isinstance(part, StagedFiles)})


def _staged(messages: Iterable[WriterCommitMessage | None]) -> list[Staged]:
    return [part.staged for part in messages if isinstance(part, StagedFiles) and part.staged is not None]


def stage(
    queue: Queue, job: Job, options: WriteOptions, iterator: Iterator[pa.RecordBatch], *, begins: bool = False
) -> Staged | None:
    """Stage the batches of one task for a job; nothing where there are none, or the job was sent before.

    Args:
        queue: the queue.
        job: the job.
        options: how they become messages.
        iterator: the task's batches, which are read to their end.
        begins: the job begins with its first task; else the driver has begun it.
    """
    batches = (batch for batch in iterator if batch.num_rows)
    first = next(batches, None)
    if first is None or job.sent:
        deque(batches, maxlen=0)  # Spark wants its rows read
        return None
    if begins:
        job.begin()
    context = TaskContext.get()
    partition, number = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
    try:
        attempt = job.attempt(f"p{partition:05d}-a{number}")
        try:
            _stage(queue, attempt, chain([first], batches), partition, options)
            return attempt.finish()
        except BaseException:
            attempt.discard()
            raise
    except OSError as error:
        raise storage_error(error, f"partition {partition} of job {job.id} was not staged") from error


def _stage(
    queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], partition: int, options: WriteOptions
) -> None:
    if options.message_per == "row":
        return _stage_rows(queue, attempt, batches, partition)
    _stage_bodies(queue, attempt, batches, options.body_format, options.max_records)


def _stage_rows(queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], partition: int) -> None:
    """Stage a message for each row, its body out of Arrow's own memory."""
    number = 0
    for batch in batches:
        value = batch.column(batch.schema.get_field_index("value"))
        message_class = "B" if pa.types.is_binary(value.type) or pa.types.is_large_binary(value.type) else "T"
        try:
            files = _files(queue, batch, message_class)
        except RowError as error:
            raise ValueError(f"row {number + error.row} of partition {partition} (from 0): {error}") from error
        attempt.write_all(files, bodies(value))
        number += batch.num_rows


class RowError(ValueError):
    """Raised when a row cannot be a message; tells which of its batch."""

    def __init__(self, row: int, reason: object) -> None:
        super().__init__(str(reason))
        self.row = row


def _files(queue: Queue, batch: pa.RecordBatch, message_class: str) -> list[str]:
    """Return the names that rows are sent by; null in a column but `value` is as if it were not there."""
    value = batch.column(batch.schema.get_field_index("value"))
    if value.null_count:
        row = value.is_null().to_pylist().index(True)
        raise RowError(row, "value is null, and a message has a body, if an empty one")
    others = [name for name in batch.schema.names if name != "value"]
    if not others:
        return queue.plain_addresses(batch.num_rows, message_class)
    files = []
    for row, cells in enumerate(zip(*(batch.column(name).to_pylist() for name in others), strict=True)):
        given = {name: cell for name, cell in zip(others, cells, strict=True) if cell is not None}
        try:
            files.append(queue.address(b"", message_class=message_class, **_fields(given))[0])
        except ValueError as error:
            raise RowError(row, error) from error
    return files


def bodies(column: pa.Array) -> Iterator[memoryview]:
    """Yield the values of a column of text or binary, without nulls, as they lie in Arrow's memory."""
    if not any(known(column.type) for known in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string)):
        column = column.cast(pa.large_binary())
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, data = column.buffers()
    ends = memoryview(offsets).cast("q" if wide else "i")[column.offset : column.offset + len(column) + 1]
    whole = memoryview(data) if data is not None else memoryview(b"")
    return (whole[start:end] for start, end in pairwise(ends))


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a send but for the body."""
    if "properties" in given:
        given["properties"] = {key: value for key, value in given["properties"] if value is not None}
    return given


def _stage_bodies(
    queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], body_format: str, max_records: int | None
) -> None:
    """Stage a message for every so many rows, or for all; its JMS type is the format of its body."""
    for _, group in groupby(_numbered(batches, max_records), key=itemgetter(0)):
        parts = (part for _, part in group)
        first = next(parts)
        schema = in_utc(first.schema)
        file, _, _ = queue.address(b"", message_class="B", type=body_format)
        with attempt.open(file) as body:
            BODIES[body_format](body, schema, (part.cast(schema) for part in chain([first], parts)))


def _numbered(batches: Iterable[pa.RecordBatch], max_records: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut batches where a message ends, and number each part by its message."""
    number = taken = 0
    for batch in batches:
        rest = batch
        while max_records is not None and taken + rest.num_rows > max_records:
            yield number, rest.slice(0, max_records - taken)
            rest = rest.slice(max_records - taken)
            number, taken = number + 1, 0
        taken += rest.num_rows
        yield number, rest
