"""Jobs on a file system that behaves as HDFS does by its FUSE client: each message is sent whole, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from torture.mounts import HDFS_LIKE, mounted, needs
from torture.table import NotRun

from dropq import Root


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    """A root on such a mount."""
    try:
        needs(HDFS_LIKE)
        with mounted(HDFS_LIKE, tmp_path) as fs:
            yield Root.create(fs.path / "root")
    except NotRun as reason:
        pytest.skip(str(reason))


def test_rows_and_partitions_are_written_and_read_whole(spark: SparkSession, root: Root) -> None:
    rows, parts = root.create_queue("rows"), root.create_queue("parts")
    table = spark.range(0, 40, 1, 2).selectExpr("id", "repeat('x', cast(id as int)) as text")
    at = {"root": str(root.path)}
    table.selectExpr("text as value").write.format("dropq").options(**at, queue="rows").mode("append").save()
    written = table.write.format("dropq").options(**at, queue="parts", messagePer="partition")
    written.mode("append").save()
    assert sorted(len(message.body) for message in rows.browse()) == list(range(40))
    assert rows.fsck() == parts.fsck() == []
    read = spark.read.format("dropq").options(**at, queue="parts", bodyFormat="jsonl").schema(table.schema).load()
    assert sorted(read.collect()) == sorted(table.collect())
    assert parts.counts()["target"] == 2
