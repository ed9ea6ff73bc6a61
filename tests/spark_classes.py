"""Start Spark, read and write a little with it, and wait for its Java to end, which may store what classes it used."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import dropq.spark

with TemporaryDirectory() as folder:
    session = dropq.spark.session("local[2]")
    java: Any = session.sparkContext._gateway
    session.createDataFrame([(1, "a"), (2, "b")], ["n", "s"]).repartition(2).write.parquet(f"{folder}/rows")
    session.read.parquet(f"{folder}/rows").selectExpr("n * 2 AS n", "s").groupBy("s").count().collect()
    session.stop()
    java.shutdown()
    java.proc.communicate()
