"""A streaming query of its own, for test_spark_streams.py to kill: python stream_driver.py ROOT CHECKPOINT READ.

It reads the queue `q`, three messages a batch, and writes what each batch held to READ. In the second batch, when its
work is done, it makes the file READ.done and stops for ever.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import dropq.spark

#: Messages of a batch, and the number that Spark gives to the one that stops.
LIMIT, STOPS = 3, 1


def start(spark: SparkSession, root: str, checkpoint: str, read: Path, *, stops: int | None = None) -> None:
    """Run the query until its input is used up, or for ever."""

    def work(frame: DataFrame, batch: int) -> None:
        rows = sorted((row.id, bytes(row.value).decode()) for row in frame.select("id", "value").collect())
        with read.open("a") as lines:
            lines.write(json.dumps([batch, rows]) + "\n")
        if batch == stops:
            read.with_suffix(".done").touch()
            while True:
                time.sleep(60)

    dropq.spark.register(spark)
    reader = spark.readStream.format("dropq").option("root", root).option("queue", "q")
    frame = reader.option("maxMessagesPerTrigger", LIMIT).load()
    query = frame.writeStream.foreachBatch(work).option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query.start().awaitTermination()


if __name__ == "__main__":
    _, root, checkpoint, read = sys.argv
    start(dropq.spark.session("local[2]", app="stream to be killed"), root, checkpoint, Path(read), stops=STOPS)
