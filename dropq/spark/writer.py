"""The writer of a Spark job: tasks stage messages out of sight, and the driver commits all of them at once.

Invariant: before the commit nothing of the job is in target/, and after it everything is. A task that fails, is run
twice or comes too late leaves only staged files that no commit lists. A writer has only plain values, as Spark pickles
it into every task and into the commit; its job id is made before that.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter

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

#: The local properties of a task that name its query, and its epoch or batch.
QUERY_ID = "sql.streaming.queryId"
EPOCH = "streaming.sql.batchId"
#: What they may be at most: a UUID, and a number of so many digits.
LONGEST_QUERY, LONGEST_BATCH = "0" * 36, "9" * 10


@dataclass
class StagedFiles(WriterCommitMessage):
    """What a task staged, for the driver to commit; and the query, if it staged for an epoch, else the job's id."""

    staged: Staged | None = None
    query: str = ""
    job_id: str = ""


class QueueWriter(DataSourceArrowWriter):
    """Sends the rows, or the partitions, of a job into a queue.

    Args:
        options: the options of the write.
        job_id: names the job; if it has `{query}` or `{batch}`, the tasks fill them in, and tell the commit.
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
        if options.is_per_batch:
            Job(options.open()._goal, options.job_of(LONGEST_QUERY, LONGEST_BATCH))  # raises if it may be too long
            return writer
        job = writer._job(writer.job_id)
        if job.sent:
            log.warning("job %s was sent to queue %s before: this run sends nothing", job.id, options.queue)
        else:
            job.begin()
        return writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition, in a task; stage nothing if it is empty, or if the job was sent before."""
        queue, job_id, begins = self.options.open(), self.job_id, self.options.is_per_batch
        if begins:
            job_id = _job_of_batch(self.options)
        staged = stage(queue, Job(queue._goal, job_id), self.options, iterator, begins=begins)
        return StagedFiles(staged, job_id=job_id)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Send everything that was staged, in the driver."""
        queue = self.options.open()
        for job_id in self._job_ids(messages):
            job = Job(queue._goal, job_id)
            if self.options.is_per_batch and job.sent:
                log.warning("job %s was sent to queue %s before: this run sends nothing", job.id, self.options.queue)
            _commit(queue, job, _staged(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the job; if Spark calls this after a commit that failed halfway, send the job instead."""
        for job_id in self._job_ids(messages):
            if self._job(job_id).abort():
                log.warning("job %s was committed before it failed: all of it is sent, do not send it again", job_id)

    def _job_ids(self, messages: Iterable[WriterCommitMessage | None]) -> list[str]:
        """Return the ids of the job: one, or what the tasks filled in, which is none if no task was successful."""
        if not self.options.is_per_batch:
            return [self.job_id]
        return sorted({part.job_id for part in messages if isinstance(part, StagedFiles)})

    def _job(self, job_id: str) -> Job:
        return Job(self.options.open()._goal, job_id)


class QueueStreamWriter(DataSourceStreamArrowWriter):
    """Sends each epoch of a streaming query as a job of its own, so that a replayed epoch sends nothing.

    Spark makes one writer for the tasks of an epoch and another for its commit. The commit learns the query from the
    tasks' results.

    Args:
        options: the options of the write.
    """

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition of an epoch, in a task; stage nothing if it is empty, or if the epoch was sent before."""
        query, epoch = _query_and_batch()
        if query is None or epoch is None:
            raise ConfigError("only micro-batches can be written to a queue: Spark gave no query and no epoch")
        queue = self.options.open()
        return StagedFiles(
            stage(queue, Epoch(queue._goal, query, int(epoch)), self.options, iterator, begins=True), query
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send everything that was staged for an epoch, in the driver."""
        queue = self.options.open()
        for query in _queries(messages):
            epoch = Epoch(queue._goal, query, batchId)
            if epoch.sent:
                log.warning(
                    "%s was sent to queue %s before: this run of it sends nothing", epoch.id, self.options.queue
                )
            _commit(queue, epoch, _staged(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop an epoch, unless it was committed; the query runs it again under the same number."""
        context = self.options.open()._goal
        for query in _queries(messages):
            epoch = Epoch(context, query, batchId)
            if epoch.abort():
                log.warning("%s was committed before it failed: all of it is sent", epoch.id)


def _query_and_batch() -> tuple[str | None, str | None]:
    """Return the query and the number of the batch that a task works for, where Spark tells them."""
    context = TaskContext.get()
    if context is None:
        return None, None
    return context.getLocalProperty(QUERY_ID), context.getLocalProperty(EPOCH)


def _job_of_batch(options: WriteOptions) -> str:
    """Return the job id of the batch that a task works for.

    Raises:
        ConfigError: Spark does not tell the query and the batch.
    """
    query, batch = _query_and_batch()
    if query is None or batch is None:
        raise ConfigError(
            f"option jobId = {options.job_id!r}: Spark tells tasks the query and the batch only within foreachBatch, "
            "and not under Spark Connect; nothing was sent. Give a name of your own that changes with the checkpoint, "
            'such as f"{checkpoint_name}-{batch}"'
        )
    return options.job_of(query, batch)


def _commit(queue: Queue, job: Job, staged: list[Staged]) -> None:
    """Send everything that a job staged, as soon as the queue has room for it, or to where its overflow selector sends.

    A job that was sent before needs no room.
    """
    count, overflow = sum(len(part.files) for part in staged), ""
    if count and not job.sent:
        taker = queue._admit_job(count)
        if taker is None:
            job.abort()
            return
        overflow = "" if taker is queue else taker.name
    sent = job.commit(staged, overflow=overflow)
    if sent and overflow:
        full = "queue %s has no room for job %s: its %d messages were sent to queue %s instead"
        log.warning(full, queue.name, job.id, sent, overflow)
    else:
        log.info("job %s sent %d messages to queue %s", job.id, sent, queue.name)


def _queries(messages: Iterable[WriterCommitMessage | None]) -> list[str]:
    """Return the query that the tasks of an epoch staged for; nothing if Spark returns none of their results."""
    return sorted({part.query for part in messages if isinstance(part, StagedFiles)})


def _staged(messages: Iterable[WriterCommitMessage | None]) -> list[Staged]:
    return [part.staged for part in messages if isinstance(part, StagedFiles) and part.staged is not None]


def stage(
    queue: Queue, job: Job, options: WriteOptions, iterator: Iterator[pa.RecordBatch], *, begins: bool = False
) -> Staged | None:
    """Stage the batches of a task for a job; return None if there are none, or if the job was sent before.

    Args:
        queue: the queue.
        job: the job.
        options: the options of the write.
        iterator: the task's batches, which are read to their end.
        begins: whether the tasks begin the job; else the driver has begun it.
    """
    batches = (batch for batch in iterator if batch.num_rows)
    first = next(batches, None)
    if first is None or job.sent:
        deque(batches, maxlen=0)  # Spark expects that all rows are read
        return None
    if begins:
        job.begin()
    context = TaskContext.get()
    partition, number = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
    try:
        attempt = job.attempt(f"p{partition:05d}-a{number}")
        try:
            rows = chain([first], batches)
            if options.message_per == "row":
                _stage_rows(queue, attempt, rows, partition)
            else:
                _stage_bodies(queue, attempt, rows, options.body_format, options.max_records)
            return attempt.finish()
        except BaseException:
            attempt.discard()
            raise
    except OSError as error:
        raise storage_error(error, f"partition {partition} of job {job.id} was not staged") from error


def _stage_rows(queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], partition: int) -> None:
    """Stage a message for each row; bodies are written straight from Arrow's memory."""
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
    """Raised when a row cannot be a message; `row` is its number in the batch, from 0."""

    def __init__(self, row: int, reason: object) -> None:
        super().__init__(str(reason))
        self.row = row


def _files(queue: Queue, batch: pa.RecordBatch, message_class: str) -> list[str]:
    """Return the file names of rows; null in a column other than `value` counts as absent."""
    value = batch.column(batch.schema.get_field_index("value"))
    if value.null_count:
        row = value.is_null().to_pylist().index(True)
        raise RowError(row, "value is null, and a message must have a body, which may be empty")
    others = [name for name in batch.schema.names if name != "value"]
    if not others:
        return queue._plain_addresses(batch.num_rows, message_class)
    files = []
    for row, cells in enumerate(zip(*(batch.column(name).to_pylist() for name in others), strict=True)):
        fields = {name: cell for name, cell in zip(others, cells, strict=True) if cell is not None}
        if "properties" in fields:
            fields["properties"] = {key: value for key, value in fields["properties"] if value is not None}
        try:
            files.append(queue._address(b"", message_class=message_class, **fields)[0])
        except ValueError as error:
            raise RowError(row, error) from error
    return files


def bodies(column: pa.Array) -> Iterator[memoryview]:
    """Yield the values of a column of text or binary, without nulls, as slices of Arrow's memory."""
    if not any(known(column.type) for known in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string)):
        column = column.cast(pa.large_binary())
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, data = column.buffers()
    ends = memoryview(offsets).cast("q" if wide else "i")[column.offset : column.offset + len(column) + 1]
    whole = memoryview(data) if data is not None else memoryview(b"")
    return (whole[start:end] for start, end in pairwise(ends))


def _stage_bodies(
    queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], body_format: str, max_records: int | None
) -> None:
    """Stage a message for every `max_records` rows, or for all; its JMS type is the format of its body."""
    for _, group in groupby(_numbered(batches, max_records), key=itemgetter(0)):
        parts = (part for _, part in group)
        first = next(parts)
        schema = in_utc(first.schema)
        file, _, _ = queue._address(b"", message_class="B", type=body_format)
        with attempt.open(file) as body:
            BODIES[body_format](body, schema, (part.cast(schema) for part in chain([first], parts)))


def _numbered(batches: Iterable[pa.RecordBatch], max_records: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut batches where a message ends; yield each part with the number of its message."""
    number = rows = 0
    for batch in batches:
        rest = batch
        while max_records is not None and rows + rest.num_rows > max_records:
            yield number, rest.slice(0, max_records - rows)
            rest = rest.slice(max_records - rows)
            number, rows = number + 1, 0
        rows += rest.num_rows
        yield number, rest
