"""The data source `dropq` of PySpark: `df.write.format("dropq")`, once `register(spark)` was called.

What is not built yet is refused by name, never half done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceWriter

from dropq.errors import ConfigError
from dropq.spark.options import WriteOptions
from dropq.spark.writer import QueueWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


def register(spark: SparkSession) -> None:
    """Let a session write to queues with `df.write.format("dropq")`; safe to repeat."""
    spark.dataSource.register(DropqDataSource)


class DropqDataSource(DataSource):
    """Queues as a format of Spark."""

    @classmethod
    def name(cls) -> str:
        """Return what the format is called."""
        return "dropq"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Begin a job that sends a data frame; Spark asks for it in the driver, before any task runs.

        Raises:
            ConfigError: an option or a column cannot be used, or the mode is overwrite.
            NoSuchQueue: there is no such queue.
        """
        if overwrite:
            raise ConfigError("mode overwrite is refused: what waits in a queue is not the writer's; use mode append")
        options = WriteOptions.parse(self.options)
        options.check_columns(schema)
        return QueueWriter.begin(options)

    def schema(self) -> NoReturn:
        """Refuse to read, as a table or a stream: both ask for the schema first."""
        raise _not_built("reading a queue")

    def reader(self, schema: StructType) -> NoReturn:
        """Refuse to read a table whose schema was given."""
        raise _not_built("reading a queue")

    def streamReader(self, schema: StructType) -> NoReturn:  # noqa: N802
        """Refuse to read a stream whose schema was given."""
        raise _not_built("reading a queue as a stream")

    def simpleStreamReader(self, schema: StructType) -> NoReturn:  # noqa: N802
        """Refuse to read a stream whose schema was given."""
        raise _not_built("reading a queue as a stream")

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: N802
        """Refuse to write a stream."""
        raise _not_built("writing a stream to a queue")


def _not_built(what: str) -> ConfigError:
    return ConfigError(f"{what} is not built in this version of dropq: it writes data frames, in batches")
