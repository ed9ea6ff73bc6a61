"""The data source `dropq` of PySpark: queues as a format for reads and writes, in batches and streams.

What an option, a column or a mode asks for and cannot be done is a ConfigError in the driver, before any task runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StringType, StructType

from dropq.errors import ConfigError
from dropq.spark.columns import SCHEMA, check_columns, message_problems
from dropq.spark.options import BODY_FORMATS, ReadOptions, WriteOptions, body_problems
from dropq.spark.planned import mark_of
from dropq.spark.reader import QueueReader
from dropq.spark.streams import QueueStreamReader
from dropq.spark.writer import QueueStreamWriter, QueueWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Let a session use the format `dropq`, even if Spark does not find it by itself; repeating this is harmless."""
    spark.dataSource.register(DropqDataSource)


class DropqDataSource(DataSource):
    """Queues as a format of Spark."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "dropq"

    def schema(self) -> StructType:
        """Return the columns of a read without a schema: those of a message, or one for a line of text."""
        body_format = next((value for key, value in self.options.items() if key.lower() == "bodyformat"), None)
        if body_format is None:
            return SCHEMA
        if body_format == "text":
            return StructType().add("value", StringType())
        if body_format not in BODY_FORMATS:
            raise ConfigError(f"option bodyFormat = {body_format!r}: one of {', '.join(BODY_FORMATS)} is allowed")
        raise ConfigError(f"bodyFormat={body_format} needs the columns of the rows: name them by .schema(...)")

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch, which takes no message."""
        options = _checked(ReadOptions.parse(self.options), schema)
        return QueueReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream, which claims messages in micro-batches and acknowledges committed ones."""
        options = _checked(ReadOptions.parse(self.options, stream=True), schema)
        return QueueStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Begin a job that sends a data frame; NoSuchQueue if there is no such queue."""
        if overwrite:
            raise ConfigError("mode overwrite is refused: it would replace the messages of others; use mode append")
        options = WriteOptions.parse(self.options)
        options.check_columns(schema)
        return QueueWriter.begin(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a stream, which sends each epoch once; NoSuchQueue if there is no such queue."""
        if overwrite:
            raise ConfigError("outputMode complete is refused: it would replace the messages of others; use append")
        options = WriteOptions.parse(self.options, stream=True)
        options.check_columns(schema)
        return QueueStreamWriter(options, mark_of(options.open().context))


def _checked(options: ReadOptions, schema: StructType) -> ReadOptions:
    """Return the options of a read, or refuse a schema that they cannot be used with."""
    if options.body_format is None:
        check_columns(schema)
        return options
    columns = options.body_columns(schema)
    problems = [*message_problems(schema), *body_problems(columns, options.body_format), *options.null_problems(schema)]
    if problems:
        raise ConfigError(f"bodies cannot be read with this schema: {'; '.join(problems)}")
    return options
