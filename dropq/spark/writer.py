"""The writer of a Spark job: tasks stage messages out of sight, and the driver commits all of them at once.

Invariant: before the commit nothing of the job is in target/, and after it everything is. A task that fails, is run
twice or comes too late leaves only staged files that no commit lists. A writer has only plain values, as Spark pickles
it into every task and into the commit; its job id is made before that.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise, repeat
from operator import attrgetter
from typing import IO, Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from dropq.api import Queue
from dropq.errors import ConfigError, DropqError
from dropq.queue.sender import Headers
from dropq.spark.arrow_cast import is_bytes
from dropq.spark.bundles import RowError, bodies, check_records, write_records
from dropq.spark.encoders import BODIES, in_utc
from dropq.spark.open_claims import SETTING, OpenClaims
from dropq.spark.options import BATCH, CLAIM, QUERY, WriteOptions
from dropq.spark.planned import mark_of, open_planned
from dropq.spark.workers import freeze_imports
from dropq.staging.jobs import Attempt, Epoch, Job, StagedAttempt
from dropq.storage.failures import storage_error

log = logging.getLogger("dropq")

#: The local properties of a task that name its query, and its epoch or batch.
QUERY_ID = "sql.streaming.queryId"
EPOCH = "streaming.sql.batchId"
#: What they may be at most: a UUID, and a number of so many digits.
LONGEST_QUERY, LONGEST_BATCH, LONGEST_CLAIM = "0" * 36, "9" * 10, "0" * 21
#: How many characters, or bytes, of a value an error shows.
SHOWN = 40


@dataclass
class StagedFiles(WriterCommitMessage):
    """What a task staged, for the driver to commit; and, where Spark tells tasks alone, for which epoch."""

    staged: StagedAttempt | None = None
    #: The query of the epoch; for the job of a batch, the job's name, with its number left open.
    query: str = ""
    #: The number of a batch.
    batch: int = 0
    #: Which claims were open, as the setting has it.
    claims: str = ""


@dataclass(eq=False)
class QueueWriter(DataSourceArrowWriter):
    """Sends the rows, or the partitions, of a job into a queue, whose mark the driver sees.

    What is in braces in the job's id the tasks fill in, and tell the commit.
    """

    options: WriteOptions
    job_id: str
    mark: str = ""

    @classmethod
    def begin(cls, options: WriteOptions) -> QueueWriter:
        """Begin a job, in the driver; ValueError if the job id cannot name a job."""
        queue = options.open()
        writer = cls(options, options.job_id or f"spark-{secrets.token_hex(10)}", mark_of(queue.context))
        longest = writer.job_id.replace(QUERY, LONGEST_QUERY).replace(BATCH, LONGEST_BATCH)
        job = Job(queue._destination, longest.replace(CLAIM, LONGEST_CLAIM))  # raises if too long
        if options.is_for_tasks:
            return writer
        if job.sent:
            _warn_of_sent(job, queue)
        else:
            job.begin()
        return writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition, in a task; stage nothing if it is empty, or if the job was sent before."""
        freeze_imports()
        commit_message = StagedFiles(claims=_local_property(SETTING) or "")
        if self.options.is_per_batch:
            commit_message.query, commit_message.batch = _job_of_batch(self.options)
        claims = _claims_of(self.options, commit_message)
        if (batches := _with_rows(iterator)) is not None:
            queue = open_planned(self.options, self.mark)
            job = self._job(queue, commit_message)
            if claims is not None and job.sent:
                _refuse_sent(queue, job, self.options, claims)
            commit_message.staged = stage(queue, job, self.options, batches, begins=self.options.is_for_tasks)
        return commit_message

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Send everything that was staged, in the driver."""
        queue, results = self.options.open(), _results(messages)
        claims = _claims_of(self.options, *results)
        for job in self._jobs(queue, results):
            _commit(queue, job, self.options, results, claims, warns=self.options.is_for_tasks)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the job; if Spark calls this after a commit that failed halfway, send the job instead."""
        for job in self._jobs(self.options.open(), _results(messages)):
            if job.abort():
                log.warning("job %s was committed before it failed: all of it is sent, do not send it again", job.id)

    def _jobs(self, queue: Queue, results: Iterable[StagedFiles]) -> list[Job]:
        """Return the job; or what the tasks filled in, which is none if no task was successful."""
        if not self.options.is_for_tasks:
            return [Job(queue._destination, self.job_id)]
        by_batch = {(part.query, part.batch): part for part in results}
        return [self._job(queue, by_batch[each]) for each in sorted(by_batch)]

    def _job(self, queue: Queue, commit_message: StagedFiles) -> Job:
        """Return the job that a task works for, and tells."""
        if self.options.is_per_batch:
            return Epoch(queue._destination, commit_message.query, commit_message.batch)
        job = Job(queue._destination, commit_message.query if self.options.is_per_claim else self.job_id)
        if claims := OpenClaims.of(commit_message.claims):
            job.note = {"claim": claims.blocks}
        return job


@dataclass(eq=False)
class QueueStreamWriter(DataSourceStreamArrowWriter):
    """Sends each epoch of a streaming query as a job of its own, so that a replayed epoch sends nothing.

    Spark makes one writer for the tasks of an epoch and another for its commit. The commit learns the query from the
    tasks' results.
    """

    options: WriteOptions
    mark: str = ""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a partition of an epoch, in a task; stage nothing if it is empty, or if the epoch was sent before."""
        freeze_imports()
        query, epoch = _query_and_batch()
        if query is None or epoch is None:
            raise ConfigError("only micro-batches can be written to a queue: Spark gave no query and no epoch")
        commit_message = StagedFiles(query=query)
        if (batches := _with_rows(iterator)) is not None:
            queue = open_planned(self.options, self.mark)
            job = Epoch(queue._destination, query, int(epoch))
            commit_message.staged = stage(queue, job, self.options, batches, begins=True)
        return commit_message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send everything that was staged for an epoch, in the driver."""
        queue, results = self.options.open(), _results(messages)
        for epoch in _epochs(queue, results, batchId):
            _commit(queue, epoch, self.options, results, warns=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop an epoch, unless it was committed; the query runs it again under the same number."""
        for epoch in _epochs(self.options.open(), _results(messages), batchId):
            if epoch.abort():
                log.warning("%s was committed before it failed: all of it is sent", epoch.id)


def _query_and_batch() -> tuple[str | None, str | None]:
    """Return the query and the number of the batch that a task works for, where Spark tells them."""
    return _local_property(QUERY_ID), _local_property(EPOCH)


def _local_property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def _claims_of(options: WriteOptions, *commit_messages: StagedFiles) -> OpenClaims | None:
    """Return the claims that were open where tasks ran, and fill in the job's name; None if none was, nor is needed."""
    found = None
    for each in commit_messages:
        found = OpenClaims.of(each.claims)
        if options.is_per_claim:
            if found is None:
                raise ConfigError(
                    f"option jobId = {options.job_id!r}: no claim is open in this session; nothing was sent. {CLAIM} "
                    "names a job in a block of dropq.spark.claim after the messages that the block claimed"
                )
            each.query = (options.job_id or "").replace(CLAIM, found.id)
    return found


def _refuse_sent(queue: Queue, job: Job, options: WriteOptions, claims: OpenClaims) -> None:
    """Raise DropqError if a job that was sent before would let a claim be acknowledged of which nothing was sent."""
    if not claims.has_messages:
        return
    before = f"job {job.id} was sent to queue {queue.name} before"
    nothing = "nothing was sent, and nothing is to be acknowledged"
    if not options.is_per_claim:
        raise DropqError(
            f"{before}, and a claim is open, whose messages it may not have sent: {nothing}. Name the job after what "
            f'is claimed: jobId="{CLAIM}"'
        )
    if (job.ledger_note("nothing was sent") or {}).get("claim") == claims.blocks:
        raise DropqError(
            f"{before} by another write of this block of claim(): {nothing}. Give each write a name of its own, such "
            f'as "{CLAIM}-sums"'
        )


def _warn_of_sent(job: Job, queue: Queue) -> None:
    log.warning("job %s was sent to queue %s before: this run sends nothing", job.id, queue.name)


def _job_of_batch(options: WriteOptions) -> tuple[str, int]:
    """Return the name of the job of the batch that a task works for, and the batch's number, or raise ConfigError."""
    query, batch = _query_and_batch()
    if query is None or batch is None:
        raise ConfigError(
            f"option jobId = {options.job_id!r}: Spark tells tasks the query and the batch only within foreachBatch, "
            "and not under Spark Connect; nothing was sent. Give a name of your own that changes with the checkpoint, "
            'such as f"{checkpoint_name}-{batch}"'
        )
    return (options.job_id or "").replace(QUERY, query), int(batch)


def _commit(
    queue: Queue,
    job: Job,
    options: WriteOptions,
    results: Iterable[StagedFiles],
    claims: OpenClaims | None = None,
    *,
    warns: bool,
) -> None:
    """Send everything that a job staged, as soon as the queue has room for it, or to where its overflow selector sends.

    A job that was sent before needs no room.
    """
    if warns and job.sent:
        _warn_of_sent(job, queue)
    staged = [part.staged for part in results if part.staged is not None]
    count, overflow = sum(len(part.files) for part in staged), ""
    if count and not job.sent:
        _refuse_keys_of_two_tasks(queue, options, staged)
        taker = queue._admit_job(count)
        if taker is None:
            job.abort()
            return
        overflow = "" if taker is queue else taker.name
    sent = job.commit(staged, overflow=overflow)
    if count and not sent and claims is not None:
        _refuse_sent(queue, job, options, claims)  # RACE: another run was first, after the tasks had looked
    if sent and overflow:
        full = "queue %s has no room for job %s: its %d messages were sent to queue %s instead"
        log.warning(full, queue.name, job.id, sent, overflow)
    else:
        log.info("job %s sent %d messages to queue %s", job.id, sent, queue.name)


def _results(messages: Iterable[WriterCommitMessage | None]) -> list[StagedFiles]:
    return [part for part in messages if isinstance(part, StagedFiles)]


def _epochs(queue: Queue, results: Iterable[StagedFiles], batch: int) -> list[Epoch]:
    """Return the epoch that tasks staged for; nothing if Spark returns none of their results."""
    return [Epoch(queue._destination, query, batch) for query in sorted({part.query for part in results})]


def _with_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch] | None:
    """Return the batches of a task that have rows; None if none has any: an empty partition opens no queue."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    return None if first is None else chain([first], filled)


def stage(
    queue: Queue, job: Job, options: WriteOptions, batches: Iterator[pa.RecordBatch], *, begins: bool = False
) -> StagedAttempt | None:
    """Stage the batches of a task that have rows, at least one, for a job; return None if the job was sent before.

    The task `begins` the job, unless the driver has begun it. The batches are read to their end.
    """
    if job.sent:
        deque(batches, maxlen=0)  # Spark expects that all rows are read
        return None
    if begins:
        job.begin()
    context = TaskContext.get()
    partition, number = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
    try:
        attempt = job.attempt(f"p{partition:05d}-a{number}")
        try:
            valid = map(_with_valid_texts, batches)
            first = next(valid)
            staging = _Staging(queue, attempt, options, partition, first.schema)
            rows = chain([first], valid)
            if options.message_per != "row":
                staging.stage_bodies(rows)
            elif options.max_records is not None:
                staging.stage_records(rows)
            else:
                staging.stage_rows(rows)
            return attempt.finish()
        except BaseException:
            attempt.discard()
            raise
    except OSError as error:
        raise storage_error(error, f"partition {partition} of job {job.id} was not staged") from error


@dataclass(frozen=True)
class _Staging:
    """What a task stages the rows of its partition with."""

    queue: Queue
    attempt: Attempt
    options: WriteOptions
    partition: int
    schema: pa.Schema

    def stage_rows(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Stage a message for each row; bodies are written straight from Arrow's memory."""
        number = 0
        for batch in batches:
            value = batch.column("value")
            with _named_rows(value, number, self.partition):
                files = _files(self.queue, batch, self.options.headers)
            self.attempt.write_all(files, bodies(value))
            number += batch.num_rows

    def stage_records(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Stage a bundle for every `max_records` rows whose columns say the same of it; its JMS type is the format."""
        others = _others(self.schema)
        is_binary = is_bytes(self.schema.field("value").type)
        body_format = self.options.body_format or ("frames" if is_binary else "text")
        longest = self.queue._destination.config.max_record_bytes

        def write(first: Part, body: IO[bytes], rows: Iterable[pa.RecordBatch]) -> None:
            def checked() -> Iterator[pa.Array]:
                row = first.row
                for batch in rows:
                    value = batch.column("value")
                    with _named_rows(value, row, self.partition):
                        _refuse_null(value)
                        check_records(value, body_format, longest)
                    yield value
                    row += batch.num_rows

            write_records(body, body_format, checked())

        def name(first: Part, count: int) -> str:
            with _named_rows(first.batch.column("value"), first.row, self.partition):
                try:
                    headers = Headers(**_fields(self.options.headers, others, first.shared), type=body_format)
                    return self.queue._address_of(b"", headers, records=count)[0]
                except ValueError as error:
                    raise RowError(0, error) from error

        parts = cut(batches, lambda batch: [batch.column(name) for name in others], self.options.max_records)
        for first, rest in _messages(parts):
            self._body(rest, partial(write, first), partial(name, first))

    def stage_bodies(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Stage a message for each key, or for all rows, of at most `max_records`; ValueError if a key comes again."""
        keys, body_format, schema = self.options.key_columns, self.options.body_format, in_utc(self.schema)
        seen: set[tuple[str | None, ...]] = set()
        last = None

        def write(body: IO[bytes], rows: Iterable[pa.RecordBatch]) -> None:
            BODIES[body_format](body, schema, (batch.cast(schema) for batch in rows))

        def name(first: Part, count: int) -> str:
            fields = _fields(self.options.headers, ("properties",), ([*zip(keys, first.shared, strict=True)],))
            headers = Headers(**{"type": body_format, **fields}, message_class="B")
            return self.queue._address_of(b"", headers, records=count)[0]

        def texts(batch: pa.RecordBatch) -> list[pa.Array]:
            return [batch.column(key).cast(pa.string()) for key in keys]

        for first, parts in _messages(cut(batches, texts, self.options.max_records)):
            if first.shared != last and first.shared in seen:
                raise _not_grouped(keys, first.shared, "again in a task, behind other keys")
            seen.add(first.shared)
            last = first.shared
            self._body(parts, write, partial(name, first))

    def _body(
        self,
        parts: Iterable[Part],
        write: Callable[[IO[bytes], Iterator[pa.RecordBatch]], None],
        name: Callable[[int], str],
    ) -> None:
        """Stage a message of many rows; `name` returns its file name, from their number."""
        count = 0

        def counted() -> Iterator[pa.RecordBatch]:
            nonlocal count
            for part in parts:
                count += part.batch.num_rows
                yield part.batch

        with self.attempt.open(lambda: name(count)) as body:
            write(body, counted())


@contextmanager
def _named_rows(value: pa.Array, first: int, partition: int) -> Iterator[None]:
    """Let an error about a row of a batch, which begins at `first`, tell which row it is, and how its value begins."""
    try:
        yield
    except RowError as error:
        text = value[error.row].as_py()
        begins = f", whose value begins with {text[:SHOWN]!r}" if text else ""
        raise ValueError(f"row {first + error.row} of partition {partition} (from 0){begins}: {error}") from error


def _files(queue: Queue, batch: pa.RecordBatch, headers: Mapping[str, Any]) -> list[str]:
    value = batch.column("value")
    _refuse_null(value)
    message_class = "B" if is_bytes(value.type) else "T"
    others = _others(batch.schema)
    if not (others or headers):
        return queue._plain_addresses(batch.num_rows, message_class)
    columns = [batch.column(name).to_pylist() for name in others]
    rows = zip(*columns, strict=True) if others else repeat((), batch.num_rows)
    files = []
    for row, cells in enumerate(rows):
        try:
            fields = _fields(headers, others, cells)
            files.append(queue._address(b"", message_class=message_class, **fields)[0])
        except ValueError as error:
            raise RowError(row, error) from error
    return files


def _others(schema: pa.Schema) -> list[str]:
    """Return the columns that say something of the message that a row is, or is in."""
    return [name for name in schema.names if name != "value"]


def _refuse_null(value: pa.Array) -> None:
    if value.null_count:
        row = value.is_null().to_pylist().index(True)
        raise RowError(row, "value is null, and a message must have a body, which may be empty")


def _fields(headers: Mapping[str, Any], columns: Sequence[str], cells: Sequence[Any]) -> dict[str, Any]:
    """Return what a row says of its message; the headers stand where a column is null, or has no such property."""
    own = {name: cell for name, cell in zip(columns, cells, strict=True) if cell is not None}
    if "properties" in own:
        properties = {key: value for key, value in own["properties"] if value is not None}
        own["properties"] = {**headers.get("properties", {}), **properties}
    return {**headers, **own}


# -- many rows in a message ------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Rows of one batch that go into one message: its number in the task, and that of the first row, from 0.

    The `shared` cells all rows of the message have in common.
    """

    message: int
    row: int
    shared: tuple[Any, ...]
    batch: pa.RecordBatch


def cut(
    batches: Iterable[pa.RecordBatch], shared: Callable[[pa.RecordBatch], list[pa.Array]], most: int | None
) -> Iterator[Part]:
    """Cut batches, none of them empty, where a message ends: where a shared column changes, and after `most` rows."""
    message, row, rows, last = -1, 0, 0, None
    for batch in batches:
        columns = shared(batch)
        ends = {end for column in columns for end in compute.run_end_encode(column).run_ends.to_pylist()}
        for start, end in pairwise([0, *sorted(ends | {batch.num_rows})]):
            cells = tuple(column[start].as_py() for column in columns)
            while start < end:
                if cells != last or rows == most:
                    message, rows, last = message + 1, 0, cells
                count = end - start if most is None else min(end - start, most - rows)
                yield Part(message, row, cells, batch.slice(start, count))
                start, row, rows = start + count, row + count, rows + count


def _messages(parts: Iterable[Part]) -> Iterator[tuple[Part, Iterator[Part]]]:
    """Yield the first part of each message, and all of its parts, to be read before the next message is taken."""
    for _, group in groupby(parts, key=attrgetter("message")):
        first = next(group)
        yield first, chain([first], group)  # noqa: B031 - the first one, and those behind it


def _with_valid_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch; raise ValueError if a text is not UTF-8, as Spark's may be: no reader could read it."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"column {name} has what nobody could read: {error}; repair its texts, as by make_valid_utf8({name}), "
                "or cast them to binary; nothing was sent"
            ) from error
    return batch


def _refuse_keys_of_two_tasks(queue: Queue, options: WriteOptions, staged: Iterable[StagedAttempt]) -> None:
    """Raise ValueError if two tasks staged rows of one key, which is in the names of their files."""
    sidecars = queue._destination.sidecars
    tasks: dict[tuple[str | None, ...], str] = {}
    for part in staged if options.key_columns else ():
        for file in part.files:
            properties = sidecars.full(sidecars.parse(file)).properties
            key = tuple(properties[name].text if name in properties else None for name in options.key_columns)
            if tasks.setdefault(key, part.attempt) != part.attempt:
                raise _not_grouped(options.key_columns, key, "in two tasks")


def _not_grouped(columns: Sequence[str], key: Sequence[str | None], where: str) -> ValueError:
    names = ", ".join(f'"{column}"' for column in columns)
    cells = ", ".join(f"{column}={_shown(cell)}" for column, cell in zip(columns, key, strict=True))
    return ValueError(
        f"the key {cells} comes {where}, and messagePer=key sends each key once: group the rows first, by "
        f"df.repartition({names}).sortWithinPartitions({names}); nothing was sent"
    )


def _shown(cell: str | None) -> str:
    return "null" if cell is None else repr(cell[:SHOWN])
