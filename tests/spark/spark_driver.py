"""A Spark driver of its own, for test_spark_writer.py to kill: python spark_driver.py ROOT.

First it writes to the queue `flaky` while tasks fail. Then three jobs run at once, and each stops for ever at a moment
of its own, after it has made the file ROOT/at-QUEUE: `staging` in one of its tasks, `staged` before its commit,
`committing` in the middle of its renames.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from dropq.spark import session
from dropq.spark.datasource import DropqDataSource
from dropq.spark.writer import QueueWriter
from dropq.storage import system_calls

#: Rows of each job, and those of its messages that are renamed when `committing` stops.
ROWS, RENAMED = 200, 70


def stop_for_ever(writer: QueueWriter) -> NoReturn:
    """Say where it is, then do nothing until killed."""
    Path(writer.options.root, f"at-{writer.options.queue}").touch()
    while True:
        time.sleep(60)


class FailingTasks(QueueWriter):
    """The first try of each partition fails, each at another moment; one takes its process with it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() > 0:
            return super().write(iterator)
        if context.partitionId() == 0:
            return super().write(self._cut_short(iterator))
        super().write(iterator)
        if context.partitionId() == 1:
            os._exit(1)
        raise RuntimeError("fails after all is staged")

    @staticmethod
    def _cut_short(iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(iterator)
        raise RuntimeError("fails while rows are coming")


class StopsStaging(QueueWriter):
    """Stops in one of its tasks, when all of the partition is written."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        staged = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        return staged if context.partitionId() else stop_for_ever(self)


class StopsStaged(QueueWriter):
    """Stops when its tasks are through."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        stop_for_ever(self)


class StopsCommitting(QueueWriter):
    """Stops after some of its renames."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        renamed, rename = iter(range(1 + RENAMED)), system_calls.rename_noreplace  # the manifest's is the first

        def rename_or_stop(*call: Any) -> None:
            if next(renamed, None) is None:
                stop_for_ever(self)
            rename(*call)

        with mock.patch.object(system_calls, "rename_noreplace", rename_or_stop):
            super().commit(messages)


def register(spark: SparkSession, kind: type[QueueWriter], format_name: str) -> None:
    """Make a data source whose jobs are written by a kind of writer."""

    class Source(DropqDataSource):
        @classmethod
        def name(cls) -> str:
            return format_name

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            writer: Any = super().writer(schema, overwrite)
            return kind(writer.options, writer.job_id)

    spark.dataSource.register(Source)


def save(spark: SparkSession, root: str, queue: str) -> None:
    """Write 4 partitions of rows, the numbers from 0, to a queue with the data source of the queue's name."""
    # createDataFrame makes the session the active one of this thread: there Spark looks for data sources.
    frame = spark.createDataFrame([(str(number),) for number in range(ROWS)], "value string").repartition(4)
    frame.write.format(queue).mode("append").option("root", root).option("queue", queue).save()


def main(root: str) -> None:
    """Run the jobs."""
    spark = session("local[2,3]", app="dropq driver to be killed")
    register(spark, FailingTasks, "flaky")
    save(spark, root, "flaky")
    threads = []
    for queue, kind in (("committing", StopsCommitting), ("staged", StopsStaged), ("staging", StopsStaging)):
        register(spark, kind, queue)
        threads.append(threading.Thread(target=save, args=(spark, root, queue)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
