"""A Spark job: read sales from a CSV, add them up by store and day, send the partitions as messages into a queue.

    python examples/daily_sales.py ROOT QUEUE SALES.csv JOB_ID

All of the job's messages are sent by one commit, or none is. The job id makes it safe to run the job again: what was
sent once under an id is not sent again.
"""

from __future__ import annotations

import sys

import dropq.spark


def main(root: str, queue: str, sales: str, job_id: str) -> None:
    """Run the job on two local workers."""
    from pyspark.sql import functions as f

    spark = dropq.spark.session("local[2]", app="daily sales")
    dropq.spark.register(spark)
    schema = "sold_at timestamp, store string, sku string, quantity int, price decimal(8,2)"
    rows = spark.read.csv(sales, schema=schema, header=True)
    daily = rows.groupBy("store", f.to_date("sold_at").alias("day")).agg(
        f.sum("quantity").alias("items"), f.sum(f.col("quantity") * f.col("price")).alias("amount")
    )
    by_store = daily.repartition(4, "store").sortWithinPartitions("store", "day")
    writer = by_store.write.format("dropq").mode("append").option("root", root).option("queue", queue)
    writer.option("messagePer", "partition").option("bodyFormat", "csv").option("jobId", job_id).save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
