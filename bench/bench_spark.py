"""Measure the Spark format against what plain processes, and Spark's own sinks and readers, do with the same rows.

In each round all contenders run one after the other, so that a noisy machine disturbs each of them; what counts are the
ratios within a round, and of those the median. Every message is accounted for: files and bytes are counted each time.
Spark's workers are slower where pandas is installed, as they import it: --pandas says whether to measure with it, and
`no` hides an installed one. A Python sink that throws rows away, and a source that has them ready, tell what any data
source in Python costs. --write puts the figures into docs/benchmarks/spark.json, and leaves those of the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

import dropq
import dropq.spark
from bench import median, scratch
from dropq.spark.columns import SCHEMA
from dropq.spark.options import ReadOptions
from dropq.spark.reader import BATCH_ROWS, QueueReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROWS = 100_000
BODY = 100
WORKERS = 2
TEXT_ROWS = 1_000_000
PARTS = 8
TINY = 200
FORMATS = ("jsonl", "csv", "parquet")
COLUMNS = "number bigint, text string, half double, even boolean"
#: The ratios that are asked for.
RATIOS = {
    "write rows": 0.7,
    "write rows as records of 1,000": 5.0,
    "write partitions": 0.9,
    "write 200 tiny partitions": 0.75,
    "read rows, all columns": 0.85,
    "read rows, bodies alone": 1.0,
    **{f"{verb} {name}": 0.6 for verb in ("write", "read") for name in FORMATS},
    "read jsonl": 0.75,
}
#: What is asked for in seconds.
SECONDS = {"list 100,000 names": 0.2, "small job": 0.25}

Contender = Callable[[str], float]
Row = dict[str, Any]


class Alone(DataSource):
    """What Spark asks of any data source in Python, and nothing else."""

    @classmethod
    def name(cls) -> str:
        return "alone"

    def schema(self) -> str:
        return COLUMNS

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return Discarding()

    def reader(self, schema: StructType) -> DataSourceReader:
        return Ready(self.options["file"])


class Discarding(DataSourceArrowWriter):
    """Takes all rows, and throws them away."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Ready(DataSourceReader):
    """Yields batches that lie ready in a file, in each of the tasks.

    Args:
        file: has the rows of one task, as an Arrow stream.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(PARTS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(self.file) as mapped:
            yield from pa.ipc.open_stream(mapped)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a piece of work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Bench:
    """The contenders, on one file system.

    Args:
        spark: a warm session with as many workers as there are plain processes.
        base: a folder on the file system.
    """

    def __init__(self, spark: SparkSession, base: str) -> None:
        self.spark = spark
        self.base = base
        self.waiting = ""

    # -- rows out: a file each ---------------------------------------------------------------------------------

    def plain_writers(self, folder: str) -> float:
        """Let plain processes create, write, close and rename: what each message has to be, and nothing else."""
        os.mkdir(f"{folder}/working")
        os.mkdir(f"{folder}/target")
        share = ROWS // WORKERS
        jobs = [multiprocessing.Process(target=plain_writer, args=(folder, n, share)) for n in range(WORKERS)]

        def run() -> None:
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()

        seconds = timed(run)
        assert len(os.listdir(f"{folder}/target")) == ROWS
        return seconds

    def dropq_rows(self, folder: str, rows: int = ROWS) -> float:
        """Send a data frame, a message a row."""
        queue = made(folder)
        seconds = timed(lambda: self.save(self.rows(rows), queue))
        assert queue.counts()["target"] == rows
        return seconds

    def dropq_records(self, folder: str) -> float:
        """Send the same data frame, a thousand rows in each message; consumers settle each row by itself."""
        queue = made(folder)
        seconds = timed(lambda: self.save(self.rows(ROWS), queue, recordsPerMessage="1000"))
        assert queue.counts()["target"] == ROWS // 1000
        assert sum(message.body.count(b"\n") for message in queue.browse()) == ROWS
        return seconds

    def rows(self, count: int) -> DataFrame:
        """Return rows of 100 bytes, in as many partitions as there are workers."""
        return self.spark.range(0, count, 1, WORKERS).selectExpr(f"rpad(cast(id as string), {BODY}, 'x') as value")

    def save(self, rows: DataFrame, queue: dropq.Queue, **options: str) -> None:
        """Write a data frame to a queue."""
        writer = rows.write.format("dropq").mode("append").options(**options)
        writer.option("root", str(queue.root.path)).option("queue", queue.name).save()

    def alone(self, rows: Callable[[], DataFrame], folder: str) -> float:
        """Throw rows away in Python."""
        return timed(lambda: rows().write.format("alone").mode("append").save())

    # -- partitions out: a file for many rows ---------------------------------------------------------------------

    def text_sink(self, folder: str) -> float:
        """Write lines by Spark's own text sink."""
        seconds = timed(lambda: self.lines.write.text(f"{folder}/text"))
        parts = [entry for entry in os.scandir(f"{folder}/text") if entry.name.startswith("part-")]
        assert sum(part.stat().st_size for part in parts) == TEXT_ROWS * (BODY + 1)
        return seconds

    def dropq_partitions(self, folder: str) -> float:
        """Send the same lines, a message a partition."""
        queue = made(folder)
        seconds = timed(lambda: self.save(self.lines, queue, messagePer="partition", bodyFormat="text"))
        assert sum(message.size() for message in queue.browse()) == TEXT_ROWS * (BODY + 1)
        return seconds

    def cache_lines(self) -> None:
        """Compute 100 MB of lines once, so that only their writing is measured."""
        lines = self.spark.range(0, TEXT_ROWS, 1, PARTS).selectExpr(f"rpad(cast(id as string), {BODY}, 'x') as value")
        self.lines = lines.cache()
        assert self.lines.count() == TEXT_ROWS

    def tiny_sink(self, folder: str) -> float:
        """Write partitions of one line each by Spark's own text sink."""
        seconds = timed(lambda: self.tiny().write.text(f"{folder}/text"))
        assert len([name for name in os.listdir(f"{folder}/text") if name.startswith("part-")]) == TINY
        return seconds

    def dropq_tiny(self, folder: str) -> float:
        """Send the same partitions, a message each."""
        queue = made(folder)
        seconds = timed(lambda: self.save(self.tiny(), queue, messagePer="partition", bodyFormat="text"))
        assert queue.counts()["target"] == TINY
        return seconds

    def tiny(self) -> DataFrame:
        """Return a line in each of many partitions."""
        return self.spark.range(0, TINY, 1, TINY).selectExpr("cast(id as string) as value")

    # -- the formats of bodies, written and read ----------------------------------------------------------------------

    def cache_table(self) -> None:
        """Compute a million rows of four types once, so that only their writing is measured."""
        rows = self.spark.range(0, TEXT_ROWS, 1, PARTS)
        table = rows.selectExpr("id as number", "concat('text ', id) as text", "id / 2 as half", "id % 2 = 0 as even")
        self.table = table.cache()
        assert self.table.count() == TEXT_ROWS

    def write_by_spark(self, folder: str, body_format: str) -> float:
        """Write the table by one of Spark's own sinks."""
        writer = self.table.write.format(body_format.removesuffix("l")).option("header", True)
        return timed(lambda: writer.save(f"{folder}/{body_format}"))

    def write_by_dropq(self, folder: str, body_format: str) -> float:
        """Send the table, a message a partition."""
        queue = made(folder)
        seconds = timed(lambda: self.save(self.table, queue, messagePer="partition", bodyFormat=body_format))
        assert queue.counts()["target"] == PARTS
        return seconds

    def write_for_readers(self, folder: str, body_format: str) -> None:
        """Write the table in both ways, for all who read; see that both have all rows."""
        self.written = folder
        self.write_by_spark(folder, body_format)
        self.write_by_dropq(folder, body_format)
        for rows in (self.from_spark(body_format), self.from_dropq(body_format)):
            totals = rows.selectExpr("count(*)", "sum(number)", "count(text)", "sum(half)", "count_if(even)").first()
            every = TEXT_ROWS * (TEXT_ROWS - 1) // 2
            assert tuple(totals or ()) == (TEXT_ROWS, every, TEXT_ROWS, every / 2, TEXT_ROWS // 2), totals

    def from_spark(self, body_format: str) -> DataFrame:
        """Return what one of Spark's own readers reads."""
        reader = self.spark.read.format(body_format.removesuffix("l")).option("header", True).schema(COLUMNS)
        return reader.load(f"{self.written}/{body_format}")

    def from_dropq(self, body_format: str) -> DataFrame:
        """Return what the messages read as."""
        reader = self.spark.read.format("dropq").option("root", f"{self.written}/root").option("queue", "q")
        return reader.option("bodyFormat", body_format).schema(COLUMNS).load()

    def make_ready(self, folder: str) -> None:
        """Put the rows of a task where a source in Python finds them."""
        self.ready = f"{folder}/rows.arrow"
        rows = self.table.limit(TEXT_ROWS // PARTS).toArrow()
        rows = rows.cast(pa.schema([field.with_nullable(True) for field in rows.schema]))
        with pa.OSFile(self.ready, "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
            stream.write_table(rows, max_chunksize=BATCH_ROWS)

    def read_ready(self, folder: str) -> float:
        """Read as many rows as the table has from a source in Python that has them ready."""
        rows = self.spark.read.format("alone").option("file", self.ready).load()
        return timed(lambda: rows.write.format("noop").mode("append").save())

    # -- rows in -----------------------------------------------------------------------------------------------------

    def fill(self, folder: str) -> None:
        """Let so many messages wait, for all who read: a read takes nothing; then read all once."""
        queue = made(folder)
        queue.send_many(b"x" * BODY for _ in range(ROWS))
        self.waiting = str(queue.root.path)
        self.dropq_reader(folder)

    def plain_reader(self, folder: str) -> float:
        """Read every file in one plain loop."""
        return timed(lambda: read_plainly(f"{self.waiting}/q/target"))

    def dropq_reader(self, folder: str) -> float:
        """Read every message with all of its columns."""
        return self._read(None)

    def dropq_values(self, folder: str) -> float:
        """Read every message's body, and nothing else."""
        return self._read("value binary")

    def _read(self, schema: str | None) -> float:
        reader = self.spark.read.format("dropq").option("root", self.waiting).option("queue", "q")
        reader = reader.option("numPartitions", WORKERS)
        rows = (reader.schema(schema) if schema else reader).load()
        seconds = timed(lambda: rows.write.format("noop").mode("append").save())
        assert rows.count() == ROWS
        return seconds

    def plain_listing(self, folder: str) -> float:
        """List the folder."""
        return timed(lambda: os.listdir(f"{self.waiting}/q/target"))

    def dropq_listing(self, folder: str) -> float:
        """List the messages, and divide them among tasks: what the driver does before a read."""
        options = ReadOptions.parse({"root": self.waiting, "queue": "q", "numPartitions": str(WORKERS)})
        found: list[InputPartition] = []
        seconds = timed(lambda: found.extend(QueueReader(options, SCHEMA).partitions()))
        assert len(found) == WORKERS
        return seconds

    def small_job(self, folder: str) -> float:
        """Send 1,000 rows."""
        return self.dropq_rows(folder, 1000)

    def noop(self, folder: str) -> float:
        """Compute 1,000 rows and throw them away: what a job costs that does nothing."""
        return timed(lambda: self.rows(1000).write.format("noop").mode("append").save())


def made(folder: str) -> dropq.Queue:
    """Make a queue `q` in a new root."""
    return dropq.Root.create(f"{folder}/root").create_queue("q", durability="none")


def plain_writer(folder: str, number: int, count: int) -> None:
    """Create, write, close, rename."""
    body = b"x" * BODY
    for n in range(count):
        name = f"4.{number}{n:015d}-0000000000.B"
        fd = os.open(f"{folder}/working/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        os.write(fd, body)
        os.close(fd)
        os.rename(f"{folder}/working/{name}", f"{folder}/target/{name}")


def read_plainly(folder: str) -> None:
    """Open, read to the end, close."""
    total = 0
    for name in os.listdir(folder):
        fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        while body := os.read(fd, 1 << 16):
            total += len(body)
        os.close(fd)
    assert total == ROWS * BODY


def rounds(bench: Bench, times: int, *contenders: Contender) -> list[list[float]]:
    """Run the contenders in turn, so many times over; return the seconds of each, a list a round."""
    measured = []
    for _ in range(times):
        seconds = []
        for contender in contenders:
            with scratch(bench.base) as folder:
                seconds.append(contender(folder))
        measured.append(seconds)
    return measured


def row(what: str, measured: list[list[float]], against: str, contender: int = 1, *, alone: int | None = None) -> Row:
    """Make a row of the table: one of the contenders, against the first of them.

    Args:
        what: what they did.
        measured: their seconds, a list a round.
        against: names the first.
        contender: which of them is dropq.
        alone: which of them is a sink or a source in Python that does nothing else; None for none.
    """
    theirs, ours = ([one[number] for one in measured] for number in (0, contender))
    by_itself = {} if alone is None else {"alone": round(median([one[alone] for one in measured]), 3)}
    return {
        **by_itself,
        "what": what,
        "seconds": {against: round(median(theirs), 3), "dropq": round(median(ours), 3)},
        "range": [round(min(ours), 3), round(max(ours), 3)],
        "ratio": round(median([one[0] / one[contender] for one in measured]), 2),
        "goal": SECONDS.get(what) or RATIOS[what],
        "goal_in": "seconds" if what in SECONDS else "ratio",
    }


def measure(spark: SparkSession, base: str, times: int) -> Iterator[Row]:
    """Measure everything on one file system."""
    bench = Bench(spark, base)
    for _ in range(2):  # a worker's first job imports what it needs
        with scratch(base) as folder:
            bench.small_job(folder)
    yield from write_rows(bench, times)
    yield from write_partitions(bench, times)
    yield from read_rows(bench, times)
    yield from both_ways(bench, times)
    found = rounds(bench, max(times, 9), bench.noop, bench.small_job)
    yield row("small job", found, "a job that does nothing")


def write_rows(bench: Bench, times: int) -> Iterator[Row]:
    """Measure rows out: a message each, and as records of bundles."""
    plain = "two plain processes"
    alone = partial(bench.alone, partial(bench.rows, ROWS))
    found = rounds(bench, times, bench.plain_writers, bench.dropq_rows, bench.dropq_records, alone)
    yield row("write rows", found, plain, alone=3)
    yield row("write rows as records of 1,000", found, plain, 2, alone=3)


def write_partitions(bench: Bench, times: int) -> Iterator[Row]:
    """Measure partitions out, large and tiny."""
    sink = "Spark's text sink"
    bench.cache_lines()
    alone = partial(bench.alone, lambda: bench.lines)
    found = rounds(bench, times, bench.text_sink, bench.dropq_partitions, alone)
    yield row("write partitions", found, sink, alone=2)
    bench.lines.unpersist()
    found = rounds(bench, times, bench.tiny_sink, bench.dropq_tiny, partial(bench.alone, bench.tiny))
    yield row("write 200 tiny partitions", found, sink, alone=2)


def read_rows(bench: Bench, times: int) -> Iterator[Row]:
    """Measure messages in, and their listing alone."""
    with scratch(bench.base) as folder:
        bench.fill(folder)
        found = rounds(bench, times, bench.plain_reader, bench.dropq_reader, bench.dropq_values)
        yield row("read rows, all columns", found, "a plain loop")
        yield row("read rows, bodies alone", found, "a plain loop", 2)
        yield row("list 100,000 names", rounds(bench, times, bench.plain_listing, bench.dropq_listing), "os.listdir")


def both_ways(bench: Bench, times: int) -> Iterator[Row]:
    """Measure each format of bodies, written and read."""
    bench.cache_table()
    for name in FORMATS:
        writers = (partial(write, body_format=name) for write in (bench.write_by_spark, bench.write_by_dropq))
        found = rounds(bench, times, *writers, partial(bench.alone, lambda: bench.table))
        yield row(f"write {name}", found, "Spark's own sink", alone=2)
        with scratch(bench.base) as folder:
            bench.write_for_readers(folder, name)
            readers = (partial(read_all, read, name) for read in (bench.from_spark, bench.from_dropq))
            bench.make_ready(folder)
            yield row(f"read {name}", rounds(bench, times, *readers, bench.read_ready), "Spark's own reader", alone=2)
    bench.table.unpersist()


def read_all(read: Callable[[str], DataFrame], body_format: str, folder: str) -> float:
    """Read all rows, and throw them away."""
    return timed(lambda: read(body_format).write.format("noop").mode("append").save())


# -- pandas ------------------------------------------------------------------------------------------------------------


def hide_pandas(folder: str) -> None:
    """Let no process that begins from now on import pandas."""
    Path(folder, "pandas.py").write_text('raise ImportError("hidden by --pandas no")\n')
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    sys.modules["pandas"] = None  # type: ignore[assignment]


def has_pandas(spark: SparkSession) -> bool:
    """Return whether Spark's workers can import pandas."""

    def can_import(_: int) -> bool:
        try:
            import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: F401
        except ImportError:
            return False
        return True

    return spark.sparkContext.parallelize([0], 1).map(can_import).first()


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the benchmarks and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--disk", default=".", help="a folder on a disk")
    parser.add_argument("--only", choices=("tmpfs", "disk"), help="run one part")
    parser.add_argument("--pandas", choices=("yes", "no"), help="with pandas or without; default: as installed")
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/benchmarks/spark.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as hiding:
        if given.pandas == "no":
            hide_pandas(hiding)
        spark = dropq.spark.session(f"local[{WORKERS}]", app="dropq bench", **{"spark.driver.memory": "4g"})
        try:
            return run(spark, given)
        finally:
            spark.stop()


def run(spark: SparkSession, given: argparse.Namespace) -> int:
    """Measure what was asked for, print it, and keep it."""
    spark.sparkContext.setLogLevel("ERROR")
    dropq.spark.register(spark)
    spark.dataSource.register(Alone)
    pandas = has_pandas(spark)
    if given.pandas == "yes" and not pandas:
        print(f"pandas is not installed: {sys.executable} -m pip install pandas", file=sys.stderr)
        return 1
    table: list[Row] = []
    for label in (given.only,) if given.only else ("tmpfs", "disk"):
        for figures in measure(spark, given.tmpfs if label == "tmpfs" else given.disk, given.rounds):
            table.append({"on": label, "pandas": pandas, **figures})
            print(json.dumps(table[-1]), flush=True)
    if given.write:
        keep(table, given.rounds, spark.version)
    return 0


def keep(table: list[Row], times: int, version: str) -> None:
    """Put the rows into the kept figures, in the place of those that were measured in the same way."""
    path = Path(__file__).parent.parent / "docs/benchmarks/spark.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {(figures["on"], figures["pandas"]) for figures in table}
    rows = [*table, *(old for old in before if (old["on"], old["pandas"]) not in measured)]
    rows.sort(key=lambda figures: (figures["on"] != "tmpfs", figures["pandas"]))
    machine = f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    kept = {"machine": f"{machine}, Spark {version}", "rounds": times, "rows": rows}
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
