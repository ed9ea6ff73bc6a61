"""Where a row came from: the column `_message` beside the columns of a body; and bodies that are wanted as text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from helpers import drop, make_queue, names_in, reopened, take, where
from pyspark.errors import PySparkException
from pyspark.sql import types as t
from test_spark_reader import Moving, claim, looked_at, micros, read, read_here, send, struct

from dropq import ConfigError, DropqError, Queue
from dropq.queue import browsing
from dropq.spark.columns import MESSAGE, MESSAGE_FIELDS, check_columns
from dropq.spark.datasource import DropqDataSource
from dropq.spark.options import ReadOptions
from dropq.spark.reader import Part, QueueReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


def message(**fields: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in fields.items()])


def schema(*columns: str, fields: t.DataType | None = None) -> t.StructType:
    """Build a schema of `name type` columns, and `_message` with all that it may have, or with some fields."""
    kinds = {"int": t.IntegerType(), "string": t.StringType()}
    made = t.StructType()
    for column in columns:
        name, _, kind = column.partition(" ")
        made = made.add(name, kinds[kind] if kind else message(**MESSAGE_FIELDS) if fields is None else fields)
    return made


def rows(queue: Queue, wanted: t.StructType, body_format: str, **options: str) -> Iterator[dict[str, Any]]:
    source = DropqDataSource(
        {"root": str(queue.root.path), "queue": queue.name, "bodyFormat": body_format, "numPartitions": "1", **options}
    )
    reader: Any = source.reader(wanted)
    for part in reader.partitions():
        yield from (row for batch in reader.read(part) for row in batch.to_pylist())


def body_of(body_format: str, table: pa.Table) -> bytes:
    file = io.BytesIO()
    if body_format == "parquet":
        pq.write_table(table, file)
    elif body_format == "arrow":
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        lines = [",".join(table.column_names), *(",".join(map(str, row.values())) for row in table.to_pylist())]
        file.write("\n".join(lines).encode())
    return file.getvalue()


# -- the column `_message` -------------------------------------------------------------------------------------------


def test_rows_have_the_fields_of_the_message_that_they_came_from(queue: Queue) -> None:
    queue.send('{"n": 1}\n{"n": 2}\n', priority=9)
    queue.send('{"n": 3}', priority=7, type="order", properties={"region": "EU & ~", "long": "é" * 900, "n": 7})
    queue.send("", priority=5)
    queue.send('{"n": 4}', message_id="order-7")
    drop(queue, "a report of größe 1.csv", b'{"n": 5}\n')
    found = list(rows(queue, schema("n int", MESSAGE), "jsonl"))
    messages = {item.id: looked_at(item) | {"receipt": None} for item in queue.browse()}
    assert {row["n"]: row[MESSAGE]["priority"] for row in found} == {1: 9, 2: 9, 3: 7, 4: 4, 5: 4}
    assert len({row[MESSAGE]["id"] for row in found}) == 4
    for row in found:
        got = row[MESSAGE]
        got |= {"timestamp": micros(got["timestamp"]), "properties": dict(got["properties"])}
        assert got == {name: messages[got["id"]][name] for name in MESSAGE_FIELDS}


@pytest.mark.parametrize("body_format", ["csv", "parquet", "arrow", "text"])
@pytest.mark.parametrize("columns", [("_message", "n string"), ("n string", "_message")])
def test_every_format_has_the_column_wherever_the_schema_names_it(
    queue: Queue, body_format: str, columns: tuple[str, str]
) -> None:
    body = b"1\n2" if body_format == "text" else body_of(body_format, pa.table({"n": ["x", "y"]}))
    ids = [queue.send(body).id for _ in range(2)]
    found = list(rows(queue, schema(*columns, fields=message(id=t.StringType())), body_format))
    assert [list(row) for row in found] == [[column.partition(" ")[0] for column in columns]] * 4
    assert [row[MESSAGE] for row in found] == [{"id": id} for id in ids for _ in range(2)]


def test_only_a_claimed_message_has_a_receipt(queue: Queue) -> None:
    send(queue, 2)
    held = take(queue)
    Path(queue.layout.processing, "by-hand~.csv").write_bytes(b"2")
    drop(queue, "mail~4.2024.B", b"3")
    wanted = schema("n string", MESSAGE, fields=message(receipt=t.StringType()))
    found = {row["n"]: row[MESSAGE]["receipt"] for row in rows(queue, wanted, "text", state="target,processing")}
    assert found == {"0": held.receipt, "1": None, "2": None, "3": None}
    reopened(queue).claimed(str(held.receipt)).reject("bad")
    assert where(queue)["error"] == [b"0"]


def test_a_batch_rejects_a_message_by_the_receipt_of_its_rows(spark: SparkSession, queue: Queue) -> None:
    sent = [b'{"n": 1}', b'{"n": -1}\n{"n": 2}']
    for body in sent:
        queue.send(body, properties={"region": "EU"})
    ddl = "n int, _message struct<receipt: string, properties: map<string, string>, timestamp: timestamp>"
    with claim(spark, queue, schema=ddl, bodyFormat="jsonl") as frame:
        (bad,) = frame.where("n < 0 and _message.properties['region'] = 'EU'").select("_message.receipt").collect()
        assert frame.where("_message.timestamp is null").count() == 0
        queue.claimed(bad["receipt"]).reject("negative")
    assert where(queue) == {"processed": [sent[0]], "error": [sent[1]]}


def test_a_bad_body_that_becomes_a_row_of_nulls_has_its_message(queue: Queue) -> None:
    ids = [queue.send(body).id for body in ('{"n": 1}', "no json")]
    wanted = schema("_corrupt_record string", MESSAGE, "n int", fields=message(id=t.StringType()))
    good, bad = rows(queue, wanted, "jsonl", badBodies="null")
    assert good == {"_corrupt_record": None, MESSAGE: {"id": ids[0]}, "n": 1}
    assert "line 1 is not JSON" in bad.pop("_corrupt_record")
    assert bad == {MESSAGE: {"id": ids[1]}, "n": None}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (message(ident=t.StringType()), "field _message.ident is not one of id, priority, .*receipt"),
        (message(priority=t.StringType()), "field _message.priority is int, not string"),
        (message(properties=t.MapType(t.StringType(), t.LongType())), "is map<string,string>, not map<string,bigint>"),
        (t.StructType().add("id", "string").add("id", "string"), "field _message.id is there twice"),
        (t.StructType().add("id", "string", nullable=False), "field _message.id is declared NOT NULL"),
        (t.StructType(), "column _message is a struct with any of id, priority"),
        (t.StringType(), "column _message is a struct with any of id, priority"),
    ],
)
def test_fields_that_messages_do_not_have_are_refused_in_the_driver(
    queue: Queue, wanted: t.DataType, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        list(rows(queue, schema("n int", MESSAGE, fields=wanted), "jsonl"))


def test_a_schema_for_bodies_names_their_columns_and_the_message_once(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="it names no column of the bodies besides _message"):
        list(rows(queue, schema(MESSAGE), "text"))
    with pytest.raises(ConfigError, match="column _message is there twice"):
        list(rows(queue, schema("n int", MESSAGE, MESSAGE), "csv"))
    with pytest.raises(ConfigError, match="column _Message must be written _message"):
        list(rows(queue, t.StructType().add("n", "integer").add("_Message", message(**MESSAGE_FIELDS)), "csv"))


def test_without_body_format_the_columns_of_the_message_are_named_themselves() -> None:
    with pytest.raises(
        ConfigError, match="column _message needs bodyFormat; without it, name the columns id, priority"
    ):
        check_columns(schema(MESSAGE))


# -- columns of messages that bodies do not have ---------------------------------------------------------------------


@pytest.mark.parametrize("body_format", ["csv", "parquet", "arrow"])
@pytest.mark.parametrize(("name", "way"), [("path", "_message.path"), ("Priority", "_message.priority"), ("value", "")])
def test_a_column_of_messages_that_a_body_lacks_is_refused_with_the_way(
    queue: Queue, body_format: str, name: str, way: str
) -> None:
    queue.send(body_of(body_format, pa.table({"n": ["1"]})))
    path = f"{queue.layout.target}/{names_in(queue, 'target')[0]}"
    said = (
        f"{path} cannot be read as {body_format} .*: the body has no column {name}: .* name {way or '_message has no'}"
    )
    with pytest.raises(DropqError, match=said):
        list(rows(queue, schema("n string", f"{name} string"), body_format))


@pytest.mark.parametrize("body_format", ["csv", "parquet", "arrow"])
def test_a_bodys_own_column_may_have_the_name_of_a_messages_and_others_may_be_missing(
    queue: Queue, body_format: str
) -> None:
    queue.send(body_of(body_format, pa.table({"path": ["/its/own"]})), priority=7)
    wanted = schema("path string", "missing string", MESSAGE, fields=message(priority=t.IntegerType()))
    expected = {"path": "/its/own", "missing": None, MESSAGE: {"priority": 7}}
    assert list(rows(queue, wanted, body_format)) == [expected]


def test_a_key_of_jsonl_that_is_missing_is_null_whatever_its_name(queue: Queue) -> None:
    queue.send('{"n": 1}')
    assert list(rows(queue, schema("n int", "path string"), "jsonl")) == [{"n": 1, "path": None}]


# -- bodies as text --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_body_may_be_wanted_as_text(spark: SparkSession, queue: Queue) -> None:
    for body in ("größe", ""):
        queue.send(body)
    assert [row["value"] for row in read_here(queue, "length bigint, value string")] == ["größe", ""]
    assert sorted(row["value"] for row in read(spark, queue, "value string").collect()) == ["", "größe"]
    queue.send(b"\xff")
    with pytest.raises(PySparkException, match="is not UTF-8: invalid start byte at byte 0; read it as binary"):
        read(spark, queue, "value string").collect()


def test_a_body_that_is_no_text_is_named_with_the_way(queue: Queue) -> None:
    for body in (b"text", b"te\xffxt", b"\xff"):
        queue.send(body)
    path = f"{queue.layout.target}/{names_in(queue, 'target')[1]}"
    said = f"{path} is not UTF-8: invalid start byte at byte 2; read it as binary, by a schema with `value binary`"
    with pytest.raises(DropqError, match=re.escape(said)):
        list(read_here(queue, "id string, value string"))
    assert len(list(read_here(queue, "value binary"))) == 3


def test_the_text_of_a_message_that_moves_on_is_null(queue: Queue) -> None:
    queue.send("goes", priority=9)
    queue.send("stays")
    reader = Moving(ReadOptions.parse({"root": str(queue.root.path), "queue": "q"}), struct("value string"))
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["value"] for row in found] == [None, "stays"]


# -- how it is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filter", [None, "JMSPriority > 4"])
def test_names_are_listed_as_files_are(tmp_path: Path, filter: str | None) -> None:
    queue = make_queue(tmp_path / "root")
    for priority in (9, 4, 9, -3):
        queue.send(b"x", priority=priority, properties={"n": priority})
        drop(queue, f"foreign {priority}.csv", b"x")
        queue.send(b"x", priority=priority, delay="1h")
    for _ in range(2):
        take(queue).ack()
    for state in ("target", "processed", "delayed", "error"):
        files = list(browsing.listed(queue.context, state, filter))
        names, arrivals = browsing.listed_names(queue.context, state, filter)
        assert list(names) == [file.filename for file in files]
        assert arrivals == {file.filename: file.arrival for file in files if file.arrival}


def test_a_task_without_messages_opens_no_queue() -> None:
    options = ReadOptions.parse({"root": "/nowhere", "queue": "none"})
    assert list(QueueReader(options, struct("value binary")).read(Part("target", []))) == []
