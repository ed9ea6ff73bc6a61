"""SQL over queues, and what says where they are: the forms of the paper, the environment, claims by name, filters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import make_queue, where
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType
from test_spark_writer import PAPER

import dropq.spark
from dropq import ConfigError, InvalidFilter, Queue
from dropq.spark.columns import COLUMNS, SCHEMA
from dropq.spark.jms_words import JMS_WORDS, check_words
from dropq.spark.options import ReadOptions, WriteOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


def test_the_sql_of_the_paper_runs(spark: SparkSession, tmp_path: Path, queue: Queue) -> None:
    root = queue.root
    orders = root.create_queue("orders", durability="none")
    orders.send("before", priority=7)
    dropq.spark.register(spark)
    (block,) = re.findall(r"^```sql\n(.*?)^```", PAPER.read_text(), re.MULTILINE | re.DOTALL)
    statements = [text.strip() for text in block.replace("/mnt/queues", str(root.path)).split(";") if text.strip()]
    try:
        answers = [[tuple(row) for row in spark.sql(text).collect()] for text in statements]
        assert [answer for answer in answers if answer] == [[("before", 7)], [("before", 7), ("by SQL", 6)]]
        assert where(orders) == {"target": [b"before", b"by SQL"]}
        for lacking in (
            "select * from messages",
            "insert into outgoing values ('x', 1)",
            "create table copy using dropq as select 'x' as value",
        ):
            with pytest.raises(AnalysisException, match=r"option root is missing.* say WITH \(root = "):
                spark.sql(lacking).collect()
        frame = spark.read.option("root", str(root.path)).option("queue", "orders").table("messages")
        assert frame.count() == 2
        writer = spark.sql("select 'by writeTo' as value, 9 as priority").writeTo("outgoing")
        writer.option("root", str(root.path)).option("queue", "q").append()
        assert where(queue) == {"target": [b"by writeTo"]}
    finally:
        for table in ("messages", "outgoing", "copy"):
            spark.sql(f"drop table if exists {table}")
        spark.sql("drop view if exists waiting")


# -- where the queue is ------------------------------------------------------------------------------------------------


def test_the_root_is_the_environments_where_the_option_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPQ_ROOT", "queues")
    monkeypatch.chdir(tmp_path)
    assert WriteOptions.parse({"queue": "q"}).root == str(tmp_path / "queues")
    assert ReadOptions.parse({"root": "/other", "queue": "q"}).root == "/other"
    monkeypatch.delenv("DROPQ_ROOT")
    with pytest.raises(ConfigError, match=r"option root is missing: .* or set DROPQ_ROOT before Spark starts"):
        ReadOptions.parse({"queue": "q"})


def test_a_batch_is_claimed_by_the_name_of_its_queue(
    spark: SparkSession, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("a")
    queue.send("b")
    with dropq.spark.claim(spark, "q", 1, root=queue.root.path) as frame:
        assert [bytes(row.value) for row in frame.collect()] == [b"a"]
    monkeypatch.setenv("DROPQ_ROOT", str(queue.root.path))
    with dropq.spark.claim(spark, "q", 5) as frame:
        assert [bytes(row.value) for row in frame.collect()] == [b"b"]
    assert where(queue) == {"processed": [b"a", b"b"]}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        (("q", 0), {}, ValueError, "claim() takes up to n messages, and n is 0: give a whole number from 1; nothing"),
        (("q", True), {}, ValueError, "n is True"),
        (("q", "5"), {}, ValueError, "n is '5'"),
        (("q", 5), {}, ConfigError, "takes the queue 'q' by its name, and does not know the root"),
        ((None, 5), {"root": "/r"}, ValueError, "takes a root only with the name of a queue"),
        ((None, 5), {"filter": "priority > 4"}, InvalidFilter, "for the column priority say JMSPriority"),
        ((None, 5), {"topic": "sales"}, ConfigError, "give a subscription of it as the queue"),
    ],
)
def test_a_claim_that_cannot_be_meant_is_refused_in_its_own_words(
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, Any],
    options: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    queue.send("x")
    name, n = arguments
    no_session: Any = None
    with pytest.raises(error) as caught, dropq.spark.claim(no_session, queue if name is None else name, n, **options):
        pass
    assert said in str(caught.value)
    assert where(queue) == {"target": [b"x"]}


# -- filters and columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", JMS_WORDS)
def test_a_filter_by_a_column_is_refused_unless_a_message_has_such_a_property(queue: Queue, column: str) -> None:
    filter = f"region IS NULL OR {column} = '4'"
    check_words(queue.context, filter)  # nothing is listed
    queue.send("x", properties={"region": "EU"})
    check_words(queue.context, f"{column} = '4'", ("error",))
    with pytest.raises(InvalidFilter, match=f"for the column {column} say {JMS_WORDS[column]}"):
        check_words(queue.context, filter)
    check_words(queue.context, f"region = '{column}' AND {JMS_WORDS[column].partition(',')[0]} IS NOT NULL")
    queue.send("y", properties={column: "4"})
    check_words(queue.context, filter)


def test_every_column_that_a_filter_calls_otherwise_has_its_word() -> None:
    assert JMS_WORDS.keys() <= COLUMNS.keys()
    assert COLUMNS.keys() - JMS_WORDS.keys() == {"class", "properties", "state", "path", "length", "value"}


def test_a_read_refuses_a_filter_by_a_column_in_the_driver(spark: SparkSession, queue: Queue) -> None:
    queue.send("x", priority=9)
    dropq.spark.register(spark)
    reader = spark.read.format("dropq").option("root", str(queue.root.path)).option("queue", "q")
    with pytest.raises(AnalysisException, match="for the column priority say JMSPriority"):
        reader.option("filter", "priority > 4").load().collect()
    assert reader.option("filter", "JMSPriority > 4").load().count() == 1


def test_a_frame_that_was_read_is_told_which_columns_to_drop() -> None:
    options = WriteOptions.parse({"root": "/r", "queue": "q"})
    with pytest.raises(ConfigError) as caught:
        options.check_columns(SCHEMA)
    said = str(caught.value)
    dropped = "id, class, timestamp, expiration, delivery_count, state, path, length"
    assert f"columns of a read cannot be written: drop {dropped} (" in said
    assert "did you mean" not in said
    options.check_columns(StructType([field for field in SCHEMA if field.name not in dropped.split(", ")]))
