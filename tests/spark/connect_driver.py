"""A program under Spark Connect, for test_spark_connect.py: python connect_driver.py ROOT CHECKPOINT.

It prints what it found as one JSON object. The server is a process of its own, which Spark starts and ends with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dropq
import dropq.spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def main(root: str, checkpoint: str) -> None:
    """Write, read, claim and stream, under a server on two workers of this machine."""
    os.environ["JAVA_HOME"] = dropq.spark.find_java().home
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    dropq.spark.register(spark)
    found: dict[str, Any] = {"session": type(spark).__module__}

    def save(frame: DataFrame, queue: str, **options: str) -> None:
        writer = frame.write.format("dropq").mode("append").option("root", root).option("queue", queue)
        writer.options(**options).save()

    save(spark.sql("select cast(id as string) as value from range(0, 5, 1, 2)"), "q")
    address = {"root": root, "queue": "q"}
    read = spark.read.format("dropq").options(**address).load()
    found["read"] = sorted(bytes(row.value).decode() for row in read.collect())
    with dropq.spark.claim(spark, "q", 2, root=root) as frame:
        found["claimed"] = sorted(bytes(row.value).decode() for row in frame.collect())
        try:
            save(frame.select("value"), "ours", jobId="{claim}")
            found["job"] = ""
        except Exception as error:
            found["job"] = str(error)

    messages = spark.readStream.format("dropq").options(**address).load().select("value")

    def each(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("dropq").mode("append").option("root", root).option("queue", "out")
        writer.option("jobId", f"{Path(checkpoint).name}-{number}").save()

    query = messages.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint)
    started = query.trigger(availableNow=True).start()
    started.awaitTermination()
    found["backlog"] = [json.loads(p["sources"][0]["latestOffset"])["waiting"] for p in started.recentProgress]

    lines = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load()
    sent = lines.selectExpr("cast(value as string) as value").writeStream.format("dropq")
    sent = sent.option("root", root).option("queue", "epochs").option("checkpointLocation", f"{checkpoint}-epochs")
    sent.trigger(once=True).start().awaitTermination()

    def named(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("dropq").mode("append").option("root", root).option("queue", "never")
        writer.option("jobId", "{query}-{batch}").save()

    refused = lines.selectExpr("cast(value as string) as value").writeStream.foreachBatch(named)
    refused = refused.option("checkpointLocation", f"{checkpoint}-named").trigger(once=True)
    try:
        refused.start().awaitTermination()
        found["refused"] = ""
    except Exception as error:
        found["refused"] = str(error)
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
