"""The recipe of docs/spark.md fills tables of Delta and Iceberg, each row once, though each batch comes again.

It runs where these libraries are installed: pip install deltalake 'pyiceberg[sql-sqlite,pyiceberg-core]'.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from helpers import make_queue
from pyspark.errors import StreamingQueryException

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAPER = Path(__file__).parents[2] / "docs" / "spark.md"


@pytest.mark.parametrize("sink", ["to_delta", "to_iceberg"])
def test_each_row_is_in_the_table_once_though_each_batch_comes_again(
    spark: SparkSession, tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltalake, pyiceberg = pytest.importorskip("deltalake"), pytest.importorskip("pyiceberg.catalog.sql")
    database = f"sqlite:///{tmp_path}/catalog.db"
    catalog = pyiceberg.SqlCatalog("lake", uri=database, warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("db")
    monkeypatch.setattr("pyiceberg.catalog.load_catalog", lambda name: catalog)
    (block,) = re.findall(r"^```py\n(.*?)^sales = ", PAPER.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(block.replace("/mnt/lake", str(tmp_path)), namespace)
    write: Callable[[DataFrame, int], None] = namespace[sink]
    queue = make_queue(tmp_path / "root")
    queue.send_many(f'{{"store": {store}, "item": 1}}\n{{"store": {store}, "item": 2}}\n' for store in range(5))
    failed: list[int] = []

    def each(frame: DataFrame, batch: int) -> None:
        write(frame, batch)
        if batch not in failed:
            failed.append(batch)
            raise ValueError("behind the write")

    reader = spark.readStream.format("dropq").options(root=str(queue.root.path), queue=queue.name)
    rows = reader.options(bodyFormat="jsonl", maxMessagesPerTrigger="2").schema("store bigint, item bigint").load()
    writer = rows.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "checkpoint"))
    for _ in range(3):
        with pytest.raises(StreamingQueryException, match="behind the write"):
            writer.trigger(availableNow=True).start().awaitTermination()
    writer.trigger(availableNow=True).start().awaitTermination()
    table = deltalake.DeltaTable(f"{tmp_path}/sales").to_pyarrow_table() if sink == "to_delta" else None
    found: pa.Table = catalog.load_table("db.sales").scan().to_arrow() if table is None else table
    assert sorted((row["store"], row["item"]) for row in found.to_pylist()) == [(n // 2, n % 2 + 1) for n in range(10)]
    assert (failed, queue.counts()["processed"]) == ([0, 1, 2], 5)
