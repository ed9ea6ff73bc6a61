"""Lets Spark find the format `dropq` by itself: it looks at the modules whose names begin with pyspark_."""

from dropq.spark.datasource import DropqDataSource as DefaultSource

__all__ = ["DefaultSource"]
