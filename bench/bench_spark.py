"""Measure the Spark format against what plain processes, and Spark's own sink, do with the same rows.

In each round all contenders run one after the other, so that a noisy machine disturbs each of them; what counts are the
ratios within a round, and of those the median. Every message is accounted for: files and bytes are counted each time.
--write puts the figures into docs/benchmarks/spark.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import dropq
import dropq.spark
from bench import median, scratch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 100_000
BODY = 100
WORKERS = 2
TEXT_ROWS = 1_000_000
PARTS = 8
#: What each row is measured against, and the ratio that is asked for; the last one is asked for in seconds.
GOALS = {"write rows": 0.8, "write partitions": 1.0, "read rows": 1.0, "small job": 0.25}

Contender = Callable[[str], float]


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

    def rows(self, count: int) -> DataFrame:
        """Return rows of 100 bytes, in as many partitions as there are workers."""
        return self.spark.range(0, count, 1, WORKERS).selectExpr(f"rpad(cast(id as string), {BODY}, 'x') as value")

    def save(self, rows: DataFrame, queue: dropq.Queue, **options: str) -> None:
        """Write a data frame to a queue."""
        writer = rows.write.format("dropq").mode("append").options(**options)
        writer.option("root", str(queue.root.path)).option("queue", queue.name).save()

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

    # -- rows in ------------------------------------------------------------------------------------------------------

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


def row(what: str, label: str, measured: list[list[float]], *names: str) -> dict[str, object]:
    """Make a row of the table: the last contender is dropq, the first what it is measured against."""
    return {
        "what": what,
        "on": label,
        "seconds": {name: round(median([one[n] for one in measured]), 3) for n, name in enumerate(names)},
        "range": [round(pick(one[-1] for one in measured), 3) for pick in (min, max)],
        "ratio": round(median([one[0] / one[-1] for one in measured]), 2),
        "goal": GOALS[what.partition(",")[0]],
    }


def measure(spark: SparkSession, base: str, label: str, times: int) -> list[dict[str, object]]:
    """Measure everything on one file system."""
    bench = Bench(spark, base)
    for _ in range(2):  # a worker's first job imports what it needs
        with scratch(base) as folder:
            bench.small_job(folder)
    table = []
    plain = "two plain processes"
    table.append(row("write rows", label, rounds(bench, times, bench.plain_writers, bench.dropq_rows), plain, "dropq"))
    bench.cache_lines()
    sink = "Spark's text sink"
    found = rounds(bench, times, bench.text_sink, bench.dropq_partitions)
    table.append(row("write partitions", label, found, sink, "dropq"))
    bench.lines.unpersist()
    loop = "a plain loop"
    with scratch(base) as folder:
        bench.fill(folder)
        found = rounds(bench, times, bench.plain_reader, bench.dropq_reader)
        table.append(row("read rows, all columns", label, found, loop, "dropq"))
        found = rounds(bench, times, bench.plain_reader, bench.dropq_values)
        table.append(row("read rows, bodies alone", label, found, loop, "dropq"))
    found = rounds(bench, max(times, 9), bench.noop, bench.small_job)
    table.append(row("small job", label, found, "a job that does nothing", "dropq"))
    return table


def main() -> int:
    """Run the benchmarks and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--disk", default=".", help="a folder on a disk")
    parser.add_argument("--only", choices=("tmpfs", "disk"), help="run one part")
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/benchmarks/spark.json")
    given = parser.parse_args()
    memory = {"spark.driver.memory": "4g"}
    spark = dropq.spark.session(f"local[{WORKERS}]", app="dropq bench", **memory)
    spark.sparkContext.setLogLevel("ERROR")
    dropq.spark.register(spark)
    table: list[dict[str, object]] = []
    for label in (given.only,) if given.only else ("tmpfs", "disk"):
        for figures in measure(spark, given.tmpfs if label == "tmpfs" else given.disk, label, given.rounds):
            print(json.dumps(figures), flush=True)
            table.append(figures)
    if given.write:
        machine = (
            f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
        )
        kept = {"machine": f"{machine}, Spark {spark.version}", "rounds": given.rounds, "rows": table}
        path = Path(__file__).parent.parent / "docs/benchmarks/spark.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
