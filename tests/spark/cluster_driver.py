"""A Spark driver for a cluster, for test_cluster.py to judge and to kill: python cluster_driver.py MASTER ROOT.

It writes to each of ROOT's queues by the scenario of the queue's name. What happens meanwhile is noted in the file
QUEUE.notes beside ROOT: an event a line, in the order of the events, whichever process met them. The last scenario
does not end: with all staged, the driver waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from cluster import HOSTS, JAVA_OPTIONS, PATIENCE, Executor
from helpers import until
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.functions import udf
from spark_driver import FailingTasks, StopsStaged, register

from dropq.spark import register as register_dropq
from dropq.spark import session
from dropq.spark.writer import QueueWriter

#: Rows of the plain job, and of all others.
MANY_ROWS, ROWS = 4000, 80
#: Partitions of a job, and those of the plain one.
PARTITIONS, MANY_PARTITIONS = 4, 8
#: The share of a job's tasks that are through before the others may be repeated elsewhere.
NEVER, HALF = 1.0, 0.5
#: An event: what happened, and for what happened to a task its partition, attempt, pid, executor and host.
Note = dict[str, Any]

Batches = Iterator[pa.RecordBatch]
Scenario = Callable[[SparkSession, Path, str], None]

CONF: dict[str, str | int | float | bool] = {
    "spark.cores.max": len(HOSTS),
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    # No task runs before both hosts can run one.
    "spark.scheduler.minRegisteredResourcesRatio": 1.0,
    "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{PATIENCE:.0f}s",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.log.level": "ERROR",
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.sql.shuffle.partitions": PARTITIONS,
    # A partition comes in several batches, so that a task can stop between two of them.
    "spark.sql.execution.arrow.maxRecordsPerBatch": 5,
    "spark.task.maxFailures": 2,
    # Once a job may speculate, a try that is not through after a second is repeated on the other host.
    "spark.speculation": True,
    "spark.speculation.efficiency.enabled": False,
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.speculation.multiplier": 1.1,
    "spark.speculation.quantile": NEVER,
    # The Python of a try that Spark gave up is left to run, as on a host that does not answer.
    "spark.python.task.killTimeout": f"{2 * PATIENCE:.0f}s",
}


def connect(master: str, app: str = "dropq cluster tests") -> SparkSession:
    """Start a session on a cluster, with an executor on each host and dropq's format."""
    spark = session(master, app, **CONF)
    register_dropq(spark)
    return spark


# -- notes -----------------------------------------------------------------------------------------------------------


def note(root: Path, queue: str, event: str, **facts: object) -> None:
    """Note an event."""
    with _beside(root, f"{queue}.notes").open("a") as file:
        file.write(json.dumps({"event": event, **facts}) + "\n")


def notes(root: Path, queue: str, *events: str) -> list[Note]:
    """Return what was noted so far, of these events or of all."""
    path = _beside(root, f"{queue}.notes")
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")  # the last line may be being written
    found: list[Note] = [json.loads(line) for line in whole.splitlines()]
    return [each for each in found if not events or each["event"] in events]


def staged(root: Path, queue: str, pattern: str) -> list[Path]:
    """Return what lies in the folder of the queue's job."""
    return list(Path(root, queue, "working").glob(f".job-*/{pattern}"))


def mode_and_group(path: Path) -> tuple[str, int]:
    """Return the permission bits of a file or folder, and its group."""
    found = path.stat()
    return f"{stat.S_IMODE(found.st_mode):04o}", found.st_gid


def _beside(root: Path, name: str) -> Path:
    return root.parent / name


# -- writers: what goes wrong in a job ---------------------------------------------------------------------------------


class Noted(QueueWriter):
    """Notes where each try of a partition began, and what it came to."""

    def write(self, iterator: Batches) -> WriterCommitMessage:
        self.note("began")
        try:
            message = self.attempt(iterator)
        except BaseException as error:
            self.note("failed", error=f"{type(error).__name__}: {error}")
            raise
        self.note("staged")
        return message

    def attempt(self, batches: Batches) -> WriterCommitMessage:
        """Stage a partition."""
        return super().write(batches)

    def note(self, event: str, **facts: object) -> None:
        """Note an event of this task."""
        task, executor = self.task(), Executor.here()
        here = {"pid": os.getpid(), "executor": executor.pid, "host": executor.host}
        tried = {"partition": task.partitionId(), "attempt": task.attemptNumber()}
        note(Path(self.options.root), self.options.queue, event, **tried, **here, **facts)

    @staticmethod
    def task() -> TaskContext:
        context = TaskContext.get()
        assert context is not None
        return context


class NotedFailingTasks(Noted, FailingTasks):
    """The first try of each partition fails, each at another moment."""


class Holding(Noted):
    """The first try of partition 0 stops at some moment until it is released."""

    def attempt(self, batches: Batches) -> WriterCommitMessage:
        if self.task().partitionId() or not self._is_first():
            return super().attempt(batches)
        # Spark stops talking to a try that it gave up, so all rows are fetched before it stops.
        return self.held_attempt(list(batches))

    def held_attempt(self, batches: list[pa.RecordBatch]) -> WriterCommitMessage:
        raise NotImplementedError

    def hold(self) -> None:
        """Wait to be released."""
        root, queue = Path(self.options.root), self.options.queue
        mine = staged(root, queue, f"p00000-a{self.task().attemptNumber()}-*/*")
        self.note("held", staged=len(mine))
        until(lambda: notes(root, queue, "released"), "the release of the held task", timeout=PATIENCE)

    def _is_first(self) -> bool:
        """Tell whether no try was first before: the attempt's number begins anew when Spark repeats a stage."""
        try:
            _beside(Path(self.options.root), f"{self.options.queue}.held").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class HeldBefore(Holding):
    """... before it stages anything."""

    def held_attempt(self, batches: list[pa.RecordBatch]) -> WriterCommitMessage:
        self.hold()
        return super().attempt(iter(batches))


class HeldMidway(Holding):
    """... when a part of its rows is staged."""

    def held_attempt(self, batches: list[pa.RecordBatch]) -> WriterCommitMessage:
        return QueueWriter.write(self, self._interrupted(batches))

    def _interrupted(self, batches: list[pa.RecordBatch]) -> Batches:
        yield batches[0]
        self.hold()
        yield from batches[1:]


class HeldStaged(Holding):
    """... when all is staged, before it says so."""

    def held_attempt(self, batches: list[pa.RecordBatch]) -> WriterCommitMessage:
        message = QueueWriter.write(self, iter(batches))
        self.hold()
        return message


class OthersFail(Holding):
    """... and while it is held, all tries of the other partitions fail."""

    def attempt(self, batches: Batches) -> WriterCommitMessage:
        if self.task().partitionId() == 0:
            return super().attempt(batches)
        root, queue = Path(self.options.root), self.options.queue
        until(lambda: notes(root, queue, "held"), "the held task", timeout=PATIENCE)
        raise RuntimeError("fails each time")


class HeldMidwayOthersFail(OthersFail, HeldMidway):
    """Holds one task midway and lets the others fail."""


class HeldBeforeOthersFail(OthersFail, HeldBefore):
    """Holds one task before it stages anything and lets the others fail."""


class Releasing(Noted):
    """Releases the task of an earlier run, and lets it stage all it has, before it commits."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        root, queue = Path(self.options.root), self.options.queue
        release(root, queue)
        note(root, queue, "lying", tries=sorted(path.name for path in staged(root, queue, "p*")))
        super().commit(messages)


class ShowingModes(Noted):
    """Notes the modes of what the executors made, before it commits."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        root, queue = Path(self.options.root), self.options.queue
        for kind, pattern in (("folders", "p*"), ("files", "p*/*")):
            note(root, queue, kind, modes=sorted({mode_and_group(path) for path in staged(root, queue, pattern)}))
        super().commit(messages)


class NotedStopsStaged(Noted, StopsStaged):
    """Stops when its tasks are through."""


# -- scenarios: each writes to one queue -------------------------------------------------------------------------------


def save(rows: DataFrame, root: Path, queue: str, format_name: str, **options: str) -> None:
    """Write rows to a queue, and note that the job is through."""
    writer = rows.write.format(format_name).mode("append").options(root=str(root), queue=queue, **options)
    writer.save()
    note(root, queue, "saved")


def save_by(kind: type[QueueWriter], spark: SparkSession, root: Path, queue: str, **options: str) -> None:
    """Write the numbers from 0 with a kind of writer."""
    register(spark, kind, kind.__name__)
    save(numbers(spark), root, queue, kind.__name__, **options)


def numbers(spark: SparkSession) -> DataFrame:
    """Return the numbers from 0 as rows to send."""
    return spark.range(0, ROWS, 1, PARTITIONS).selectExpr("cast(id as string) value")


def plain(spark: SparkSession, root: Path, queue: str) -> None:
    """Send many numbers, each with the host that it was sent from."""
    with_host = udf(lambda number: f"{number} {Executor.here().host}", "string", useArrow=False)
    rows = spark.range(0, MANY_ROWS, 1, MANY_PARTITIONS).select(with_host("id").alias("value"))
    save(rows, root, queue, "dropq")


def by(kind: type[QueueWriter]) -> Scenario:
    """Write with a kind of writer."""
    return partial(save_by, kind)


def too_late(kind: type[Holding]) -> Scenario:
    """Release the held task only when the job is through, and see it end."""

    def scenario(spark: SparkSession, root: Path, queue: str) -> None:
        with speculation(spark):
            save_by(kind, spark, root, queue)
        release(root, queue)

    return scenario


@contextmanager
def speculation(spark: SparkSession) -> Iterator[None]:
    """Let jobs speculate: this is the one setting of it that each of them reads anew."""
    settings = spark.sparkContext._jsc.sc().conf()
    settings.set("spark.speculation.quantile", str(HALF))
    try:
        yield
    finally:
        settings.set("spark.speculation.quantile", str(NEVER))


def failing(kind: type[OthersFail], spark: SparkSession, root: Path, queue: str, **options: str) -> None:
    """See the job fail while one of its tasks is held."""
    try:
        save_by(kind, spark, root, queue, **options)
    except Exception as error:
        note(root, queue, "refused", error=str(error))


def failed(kind: type[OthersFail]) -> Scenario:
    """Release the held task when the job has failed, and see it end."""

    def scenario(spark: SparkSession, root: Path, queue: str) -> None:
        failing(kind, spark, root, queue)
        release(root, queue)

    return scenario


def failed_then_repeated(spark: SparkSession, root: Path, queue: str) -> None:
    """Repeat a job that failed, under its id; what is left of the first run goes on in the middle of the second."""
    failing(HeldBeforeOthersFail, spark, root, queue, jobId="nightly")
    save_by(Releasing, spark, root, queue, jobId="nightly")


def release(root: Path, queue: str) -> None:
    """Let the held task go on, and wait until it is through."""
    note(root, queue, "released")
    until(lambda: ended(root, queue), "the end of the held task", timeout=PATIENCE)


def ended(root: Path, queue: str) -> Note | None:
    """Return what the held task came to: the next event of its process; None while there is none."""
    found = notes(root, queue)
    (held,) = (each for each in found if each["event"] == "held")
    later = found[found.index(held) + 1 :]
    return next((each for each in later if each.get("pid") == held["pid"]), None)


def killing(kill: Callable[[Note], None]) -> Scenario:
    """Kill what runs the held task; in a job with a shuffle, whose part on that host is lost with an executor."""

    def kill_when_held(root: Path, queue: str) -> None:
        until(lambda: notes(root, queue, "held"), "the held task", timeout=PATIENCE)
        (held,) = notes(root, queue, "held")
        note(root, queue, "killed")
        kill(held)

    def scenario(spark: SparkSession, root: Path, queue: str) -> None:
        register(spark, HeldMidway, HeldMidway.__name__)
        with ThreadPoolExecutor() as threads:
            killed = threads.submit(kill_when_held, root, queue)
            save(numbers(spark).repartition(PARTITIONS), root, queue, HeldMidway.__name__)
            killed.result()

    return scenario


def kill_worker(held: Note) -> None:
    """Kill the Python of a task."""
    assert held["pid"] in Executor(held["executor"], held["host"]).python_workers()
    os.kill(held["pid"], signal.SIGKILL)


def kill_executor(held: Note) -> None:
    """Kill the executor of a task."""
    Executor(held["executor"], held["host"]).kill()


SCENARIOS: dict[str, Scenario] = {
    "plain": plain,
    "failing_tasks": by(NotedFailingTasks),
    "killed_worker": killing(kill_worker),
    "late_before": too_late(HeldBefore),
    "late_midway": too_late(HeldMidway),
    "late_staged": too_late(HeldStaged),
    "failed_before": failed(HeldBeforeOthersFail),
    "failed_midway": failed(HeldMidwayOthersFail),
    "failed_then_repeated": failed_then_repeated,
    "modes": by(ShowingModes),
    "umask": by(ShowingModes),
    "killed_executor": killing(kill_executor),
    "killed_driver": by(NotedStopsStaged),
}


def main(master: str, root: Path, scenarios: Mapping[str, Scenario] = MappingProxyType(SCENARIOS)) -> None:
    """Run scenarios, one after the other."""
    spark = connect(master)
    for queue, scenario in scenarios.items():
        try:
            scenario(spark, root, queue)
        except Exception:
            note(root, queue, "broken", error=traceback.format_exc())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
