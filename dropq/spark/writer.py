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
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from dropq.queue import Queue
from dropq.root import Root
from dropq.spark.bodies import BODIES, in_utc
from dropq.spark.options import WriteOptions
from dropq.staging import Attempt, Job, Staged
from dropq.storage import storage_error

log = logging.getLogger("dropq")


@dataclass
class StagedFiles(WriterCommitMessage):
    """What a task staged, for the driver to commit."""

    files: list[Staged] = field(default_factory=list)


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
            return writer
        try:
            job.begin()
        except OSError as error:
            raise storage_error(error, f"job {job.id} did not begin, nothing was sent") from error
        return writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition, in a task; nothing is made for an empty one, or for a job that was sent before."""
        queue = self._queue()
        job = Job(queue.life, self.job_id)
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None or job.sent:
            deque(batches, maxlen=0)  # Spark wants its rows read
            return StagedFiles()
        context = TaskContext.get()
        partition, number = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
        try:
            attempt = job.attempt(f"p{partition:05d}-a{number}")
            try:
                self._stage(queue, attempt, chain([first], batches), partition)
                return StagedFiles(attempt.finish())
            except BaseException:
                attempt.discard()
                raise
        except OSError as error:
            raise storage_error(error, f"partition {partition} of job {self.job_id} was not staged") from error

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Send all that was staged, once, in the driver."""
        job = self._job()
        sent = job.commit(chain.from_iterable(part.files for part in messages if isinstance(part, StagedFiles)))
        log.info("job %s sent %d messages to queue %s", self.job_id, sent, self.options.queue)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the job; Spark says this after a commit that failed, too: then what was committed is sent."""
        if self._job().abort():
            log.warning("job %s was committed before it failed: all of it is sent, do not send it again", self.job_id)

    def _queue(self) -> Queue:
        return Root(self.options.root).queue(self.options.queue)

    def _job(self) -> Job:
        return Job(self._queue().life, self.job_id)

    def _stage(self, queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], partition: int) -> None:
        if self.options.message_per == "row":
            return _stage_rows(queue, attempt, batches, partition)
        _stage_bodies(queue, attempt, batches, self.options.body_format, self.options.max_records)


def _stage_rows(queue: Queue, attempt: Attempt, batches: Iterable[pa.RecordBatch], partition: int) -> None:
    """Stage a message for each row; null in a column but `value` is as if the column were not there."""
    number = 0
    for batch in batches:
        value = batch.schema.get_field_index("value")
        text = pa.types.is_string(batch.column(value).type) or pa.types.is_large_string(batch.column(value).type)
        columns = [column if i != value else column.cast(pa.large_binary()) for i, column in enumerate(batch.columns)]
        for row in zip(*(column.to_pylist() for column in columns), strict=True):
            given = {name: cell for name, cell in zip(batch.schema.names, row, strict=True) if cell is not None}
            try:
                file, _, _ = queue.address(b"", message_class="T" if text else "B", **_fields(given))
                attempt.write(file, row[value])
            except ValueError as error:
                raise ValueError(f"row {number} of partition {partition} (from 0): {error}") from error
            number += 1


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a send but for the body."""
    if given.pop("value", None) is None:
        raise ValueError("value is null, and a message has a body, if an empty one")
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
