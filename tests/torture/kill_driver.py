"""A Spark driver for spark_kills.py to kill: python -m torture.kill_driver FOLDER, with FOLDER/root to work on.

Each line of its standard input is a run, which begins at once beside those that are under way; at the end of the input
it ends. Whatever process does a step of a run appends a line to FOLDER/logs/NAME.log: when, which process, which queue,
and what it did. Nothing is changed but the pace: here and there a step waits for a moment, so that a kill finds it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pyarrow as pa  # type: ignore[import-untyped]
from cluster import JAVA_OPTIONS
from helpers import until
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from dropq.lifecycle.settlement import Claims
from dropq.queue.bad_bodies import BadBodyNotes
from dropq.queue.stream_journal import Journal
from dropq.spark import session
from dropq.spark.datasource import DropqDataSource
from dropq.spark.options import Options
from dropq.spark.streams import QueueStreamReader
from dropq.spark.writer import QueueStreamWriter, QueueWriter, StagedFiles
from dropq.staging.jobs import MANIFEST
from dropq.storage import system_calls
from dropq.storage.files import Storage

#: The three directions.
WRITER, STREAM_OUT, STREAM_IN = "writer", "stream-out", "stream-in"
#: What the queue is called that a stream's messages are sent on to.
EFFECT = "{}-effect"
#: Seconds that a step is drawn out by, at most: one at which something is decided, and one of many.
DECISIVE, SMALL = 0.4, 0.06
#: A phase of many steps is drawn out at so many of them.
PAUSES = 12
#: Seconds in which a stream that is triggered by time reads all that waits.
PATIENCE = 300.0
#: What Spark says of a checkpoint in which the first offset is in part.
UNUSABLE = "STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY"

CONF: dict[str, str | int | float | bool] = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.maxRecordsPerBatch": 20,
    "spark.sql.shuffle.partitions": 2,
    "spark.ui.enabled": False,
}
#: Room for the tasks of several runs, most of which wait; a task that fails is tried three times.
MASTER = "local[8,3]"

T = TypeVar("T")
Batches = Iterator[pa.RecordBatch]
Answers = list[WriterCommitMessage | None]


@dataclass(frozen=True)
class Run:
    """What a driver is asked to do: a job of the writer, or what is left of a stream."""

    direction: str
    name: str
    #: Messages: of a job; of an epoch, each a file of FOLDER/input/NAME; of a batch, at most.
    rows: int
    #: Tasks of a job.
    parts: int = 1
    #: Epochs or batches of a stream.
    batches: int = 1
    #: Whether a job has an id, by which it can be repeated.
    has_id: bool = False
    #: Whether a stream takes what waits and ends, else it is triggered by time until nothing waits.
    available_now: bool = True
    #: Whether the messages of a stream go on into a queue, by a job for each batch; else into a file for each batch.
    to_queue: bool = False
    lease: str = "10m"
    #: Each so-many-th message of a stream is bad, and to be rejected, where the others are lines of JSON; 0: none.
    bad: int = 0

    def bodies(self) -> tuple[list[str], list[str], list[str]]:
        """Return the good bodies that a stream is to take, the values in them, and the bad bodies."""
        values = [f"{self.name} {number}" for number in range(self.batches * self.rows)]
        if not self.bad:
            return values, values, []
        bad = [f"{value} is no JSON" for value in values[:: self.bad]]
        del values[:: self.bad]
        return [json.dumps({"value": value}) for value in values], values, bad


# -- the log -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """Where the processes of a run tell their steps."""

    path: str
    queue: str

    @classmethod
    def of(cls, options: Options) -> Log:
        """Return the log of what works on a queue."""
        return cls.in_folder(Path(options.root).parent, options.queue)

    @classmethod
    def in_folder(cls, folder: Path, queue: str) -> Log:
        """Return the log of a queue; that of its effect is the same."""
        suffix = EFFECT.format("")
        return cls(str(folder / "logs" / f"{queue.removesuffix(suffix)}.log"), queue)

    def __call__(self, what: str) -> None:
        """Append a line, in one call of the system."""
        line = f"{time.time():.6f} {os.getpid()} {self.queue} {what}\n".encode()
        log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(log, line)
        finally:
            os.close(log)


def draw_out(seconds: float) -> None:
    """Take up to so long over a step."""
    time.sleep(random.uniform(0, seconds))


def steps(log: Log, what: str, total: int) -> Callable[[], None]:
    """Return what tells a step of so many, from whichever thread, and takes its time over some."""
    numbers, every = count(1), max(1, total // PAUSES)

    def step() -> None:
        number = next(numbers)
        log(f"{what} {number}")
        if number % every == 0:
            draw_out(SMALL)

    return step


@contextmanager
def replaced(owner: type, **calls: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of a class in this process."""
    with ExitStack() as stack:
        for name, call in calls.items():
            stack.enter_context(mock.patch.object(owner, name, call))
        yield


# -- sending -------------------------------------------------------------------------------------------------------


class LoggedWriter(QueueWriter):
    """A job's writer that tells its steps."""

    def write(self, iterator: Batches) -> WriterCommitMessage:
        with staging(Log.of(self.options)):
            return super().write(iterator)

    def commit(self, messages: Answers) -> None:
        with sending(Log.of(self.options), "commit", messages):
            super().commit(messages)

    def abort(self, messages: Answers) -> None:
        with sending(Log.of(self.options), "abort", messages):
            super().abort(messages)


class LoggedStreamWriter(QueueStreamWriter):
    """An epoch's writer that tells its steps."""

    def write(self, iterator: Batches) -> WriterCommitMessage:
        with staging(Log.of(self.options)):
            return super().write(iterator)

    def commit(self, messages: Answers, batchId: int) -> None:  # noqa: N803 - Spark's name
        with sending(Log.of(self.options), "commit", messages):
            super().commit(messages, batchId)

    def abort(self, messages: Answers, batchId: int) -> None:  # noqa: N803 - Spark's name
        with sending(Log.of(self.options), "abort", messages):
            super().abort(messages, batchId)


@contextmanager
def staging(log: Log) -> Iterator[None]:
    """Tell the steps of a task that stages."""
    context = TaskContext.get()
    partition = context.partitionId() if context else 0
    write_all, step = Storage.write_all, steps(log, "staged", 2 * PAUSES)

    def stepped(files: Iterable[T]) -> Iterator[T]:
        for file in files:
            yield file
            step()

    def logged_write_all(storage: Storage, folder: str, files: Sequence[str], bodies: Iterable[Any]) -> None:
        write_all(storage, folder, files, stepped(bodies))

    log(f"task begins {partition}")
    with replaced(Storage, write_all=logged_write_all):
        yield
    log(f"task ends {partition}")


@contextmanager
def sending(log: Log, verb: str, messages: Answers) -> Iterator[None]:
    """Tell the steps of a commit, or of the abort that may finish it."""
    step = steps(log, "renamed", count_staged(messages))
    rename_guarded, move, remove_tree = Storage.rename_guarded, Storage.move, Storage.remove_tree
    rename = system_calls.rename_noreplace
    write_small, rename_folder = Storage.write_small, Storage.rename_folder

    def logged_rename_guarded(storage: Storage, source: str, destination: str) -> None:
        rename_guarded(storage, source, destination)
        step()

    def logged_rename(source: str, destination: str, *folders: int) -> None:
        rename(source, destination, *folders)
        if folders:  # else `rename_guarded` or `move` renames, and they tell
            step()

    def logged_move(storage: Storage, source: str, destination: str, *how: Any) -> None:
        draw_out(DECISIVE)
        if not destination.endswith(f"/{MANIFEST}"):
            return move(storage, source, destination, *how)
        log("manifest begins")  # by one rename: who is killed between these two lines may have committed or not
        move(storage, source, destination, *how)
        log("manifest")
        draw_out(DECISIVE)

    def logged_write_small(storage: Storage, path: str, data: bytes, **options: Any) -> None:
        draw_out(DECISIVE)
        write_small(storage, path, data, **options)
        log("ledger")

    def logged_rename_folder(storage: Storage, source: str, destination: str) -> None:
        rename_folder(storage, source, destination)
        log("away")

    def logged_remove_tree(storage: Storage, path: str) -> None:
        draw_out(DECISIVE)
        remove_tree(storage, path)
        log("removed")

    log(f"{verb} begins")
    storage_calls = replaced(
        Storage,
        rename_guarded=logged_rename_guarded,
        move=logged_move,
        write_small=logged_write_small,
        rename_folder=logged_rename_folder,
        remove_tree=logged_remove_tree,
    )
    with storage_calls, mock.patch.object(system_calls, "rename_noreplace", logged_rename):
        yield
    log(f"{verb} ends")


def count_staged(messages: Answers) -> int:
    """Return how many files the tasks staged."""
    return sum(len(part.staged.files) for part in messages if isinstance(part, StagedFiles) and part.staged)


# -- taking ------------------------------------------------------------------------------------------------------------


class LoggedStreamReader(QueueStreamReader):
    """A stream's reader that tells its steps; its tasks tell theirs."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        log = Log.of(self.options)
        log(f"committed {start['batch']}")
        draw_out(DECISIVE if start["batch"] else 0)
        with taking(log, self.options.limit):
            offset = super().latestOffset(start, limit)
        log(f"offset {offset['batch']}")
        return offset

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        log = Log.of(self.options)
        log(f"plan begins {end['batch']}")
        parts = super().partitions(start, end)
        log(f"plan ends {end['batch']}")
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        log = Log.of(self.options)
        log("read begins")
        draw_out(DECISIVE)
        with noting():
            yield from super().read(partition)
        draw_out(DECISIVE)
        log("read ends")


@contextmanager
def noting() -> Iterator[None]:
    """Take time over noting bad bodies."""
    add = BadBodyNotes.add

    def slow_add(notes: BadBodyNotes, key: str, reason: str) -> None:
        draw_out(SMALL)
        add(notes, key, reason)
        draw_out(SMALL)

    with replaced(BadBodyNotes, add=slow_add):
        yield


@contextmanager
def taking(log: Log, limit: int) -> Iterator[None]:
    """Tell the steps of settling a batch and of claiming the next one."""
    claimed, acked = steps(log, "claimed", limit), steps(log, "acked", limit)
    claim, archive, move = Claims.claim, Claims.archive, Storage.move
    set_aside = Claims.set_aside
    settle, next_batch = Journal.settle, Journal.next_batch

    def logged_claim(transitions: Claims, *given: Any, **options: Any) -> Any:
        held = claim(transitions, *given, **options)
        if held is not None:
            claimed()
        return held

    def logged_archive(transitions: Claims, *given: Any, **options: Any) -> Any:
        location = archive(transitions, *given, **options)
        acked()
        return location

    def logged_set_aside(transitions: Claims, *given: Any, **options: Any) -> Any:
        location = set_aside(transitions, *given, **options)
        acked()
        return location

    def logged_move(storage: Storage, source: str, destination: str, *how: Any) -> None:
        is_journal = destination.endswith(".json")
        draw_out(SMALL if is_journal else 0)
        move(storage, source, destination, *how)
        if is_journal:
            log("journal")

    def logged_settle(journal: Journal, upto: int) -> int:
        log(f"settle begins {upto}")
        settled = settle(journal, upto)
        log(f"settle ends {settled}")
        draw_out(DECISIVE if settled else 0)
        return settled

    def logged_next_batch(journal: Journal, batch: int, *most: int | None) -> int:
        log(f"take begins {batch}")
        taken = next_batch(journal, batch, *most)
        log(f"take ends {taken}")
        draw_out(DECISIVE if taken else 0)
        return taken

    with (
        replaced(Claims, claim=logged_claim, archive=logged_archive, set_aside=logged_set_aside),
        replaced(Journal, settle=logged_settle, next_batch=logged_next_batch),
        replaced(Storage, move=logged_move),
    ):
        yield


# -- the format ------------------------------------------------------------------------------------------------------


class LoggedSource(DropqDataSource):
    """dropq, with all its steps told; `register` gives it a name."""

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        writer: Any = super().writer(schema, overwrite)
        return LoggedWriter(writer.options, writer.job_id)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        writer: Any = super().streamWriter(schema, overwrite)
        return LoggedStreamWriter(writer.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        reader: Any = super().streamReader(schema)
        return LoggedStreamReader(reader.options, schema)


def register(spark: SparkSession, format_name: str) -> None:
    """Register a format for one run.

    Spark changes the environment of a format's Python as it begins to use it, without a lock: two runs that begin at
    once with one format may break it for the whole session.
    """

    class Source(LoggedSource):
        @classmethod
        def name(cls) -> str:
            return format_name

    spark.dataSource.register(Source)


def offset(checkpoint: Path, name: str) -> dict[str, Any]:
    """Return an offset of a queue's, which Spark has logged."""
    *_, content = (checkpoint / "offsets" / name).read_text().splitlines()
    return dict(json.loads(content))


def stream_of(checkpoint: Path) -> str:
    """Return what the queue calls the stream of a checkpoint."""
    return str(offset(checkpoint, "0")["stream"])


# -- runs --------------------------------------------------------------------------------------------------------------


class Driver:
    """Performs runs in a session.

    Args:
        spark: the session.
        folder: the folder that holds the root and all else.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._kinds = {WRITER: self._write, STREAM_OUT: self._stream_out, STREAM_IN: self._stream_in}

    def perform(self, run: Run) -> None:
        """Perform a run, and tell its end."""
        log = Log.in_folder(self._folder, run.name)
        log("run begins")
        try:
            self._spark.createDataFrame([], "nothing int")  # makes the session the active one of this thread
            register(self._spark, run.name)
            self._kinds[run.direction](run)
            log("run ends")
        except BaseException as error:
            text = str(error)
            log(f"run fails {type(error).__name__} {text[:300]!r} {text[300:][-1500:]!r}")

    def _write(self, run: Run) -> None:
        rows = self._spark.range(0, run.rows, 1, run.parts).selectExpr(f"concat('{run.name} ', id) as value")
        job_id = {"jobId": run.name} if run.has_id else {}
        rows.write.format(run.name).mode("append").options(**self._address(run.name), **job_id).save()

    def _stream_out(self, run: Run) -> None:
        source = self._spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        lines = source.load(str(self._folder / "input" / run.name)).repartition(2)
        self._follow(run, lines.writeStream.format(run.name).options(**self._address(run.name)), self._is_used_up)

    def _stream_in(self, run: Run) -> None:
        source = self._spark.readStream.format(run.name).options(**self._address(run.name))
        source = source.option("maxMessagesPerTrigger", run.rows).option("leasePeriod", run.lease)
        if run.bad:
            rows = source.options(bodyFormat="jsonl", badBodies="reject").schema("value string").load()
        else:
            rows = source.load().selectExpr("cast(value as string) as value")
        sink = self._send_on if run.to_queue else self._keep
        self._follow(run, rows.writeStream.foreachBatch(partial(sink, run)), self._is_drained)

    def _address(self, queue: str) -> dict[str, str]:
        return {"root": str(self._folder / "root"), "queue": queue}

    def _follow(self, run: Run, writer: DataStreamWriter, is_done: Callable[[Run], bool]) -> None:
        """Run a query to its end, with its checkpoint.

        Where one was killed as it wrote its first offset, Spark refuses the checkpoint for good, and it has to go.
        """
        checkpoint = self._folder / "checkpoints" / run.name
        try:
            self._run_query(run, writer.option("checkpointLocation", str(checkpoint)), is_done)
        except StreamingQueryException as error:
            if UNUSABLE in str(error):
                shutil.rmtree(checkpoint)
            raise

    def _run_query(self, run: Run, writer: DataStreamWriter, is_done: Callable[[Run], bool]) -> None:
        if run.available_now:
            writer.trigger(availableNow=True).start().awaitTermination()
            return
        query = writer.trigger(processingTime="0 seconds").start()
        until(lambda: not query.isActive or is_done(run), "the end of a stream", timeout=PATIENCE)
        query.stop()
        query.awaitTermination()

    def _is_used_up(self, run: Run) -> bool:
        checkpoint = self._folder / "checkpoints" / run.name / "commits"
        inputs = os.listdir(self._folder / "input" / run.name)
        return checkpoint.exists() and (checkpoint / str(len(inputs) - 1)).exists()

    def _is_drained(self, run: Run) -> bool:
        queue = self._folder / "root" / run.name
        if os.listdir(queue / "target") or os.listdir(queue / "processing"):
            return False
        # A batch's file goes after its last ack. A stream that was killed before its first offset may keep one.
        stream = stream_of(self._folder / "checkpoints" / run.name)
        return not list((queue / ".dropq" / "streams" / stream).glob("*.json"))

    def _send_on(self, run: Run, rows: DataFrame, batch: int) -> None:
        """Send a batch to the queue of the effect, by a job of its own."""
        with self._batch(run, batch):
            queue = EFFECT.format(run.name)
            numbered = rows.selectExpr(f"concat('{batch} ', value) as value")
            writer = numbered.write.format(run.name).mode("append").option("jobId", f"{run.name}-{batch}")
            writer.options(**self._address(queue)).save()

    def _keep(self, run: Run, rows: DataFrame, batch: int) -> None:
        """Keep a batch in a file of its own, once; a batch that comes again as another one lies beside it."""
        with self._batch(run, batch):
            bodies = "".join(sorted(f"{batch} {row.value}\n" for row in rows.collect()))
            folder = self._folder / "effects" / run.name
            folder.mkdir(exist_ok=True, parents=True)
            if any(path.read_text() == bodies for path in folder.glob(f"{batch}-*")):
                return
            draft = folder / ".draft"
            draft.write_text(bodies)
            draft.rename(folder / f"{batch}-{time.time_ns()}")

    def _batch(self, run: Run, batch: int) -> AbstractContextManager[None]:
        return logged_batch(Log.in_folder(self._folder, run.name), batch)


@contextmanager
def logged_batch(log: Log, batch: int) -> Iterator[None]:
    """Tell that a batch is worked on."""
    log(f"batch begins {batch}")
    draw_out(DECISIVE)
    yield
    draw_out(DECISIVE)
    log(f"batch ends {batch}")


def main(folder: Path) -> None:
    """Perform what standard input asks for."""
    spark = session(MASTER, "dropq runs to be killed", **CONF)
    driver = Driver(spark, folder)
    with ThreadPoolExecutor(32) as threads:
        for line in sys.stdin:
            threads.submit(driver.perform, Run(**json.loads(line)))


if __name__ == "__main__":
    from torture.kill_driver import main as importable_main  # Spark's workers know its classes by the module's own name

    importable_main(Path(sys.argv[1]))
