"""Spark writes into queues: all of a job or nothing, whatever fails; what it cannot write it refuses by name."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from helpers import first_and_long, make_queue, until
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage

import dropq.spark
from dropq import ConfigError, Message, NoSuchQueue, Queue, Root
from dropq.spark.datasource import DropqDataSource
from dropq.spark.options import (
    BODY_FORMATS,
    READ_OPTIONS,
    RECORD_FORMATS,
    STREAM_READ_OPTIONS,
    WRITE_OPTIONS,
    WriteOptions,
)
from dropq.spark.writer import QueueWriter
from dropq.storage import system_calls
from dropq.storage.files import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The classes that tests register are not importable where Spark's workers run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

#: What the error about a text that is not UTF-8 says.
NOT_UTF8 = r"column value has what nobody could read: .*make_valid_utf8\(value\)"
PAPER = Path(__file__).parents[2] / "docs" / "spark.md"
#: A column of each type that every format but text can write, some rows of nulls.
FLAT = """
    id % 2 = 0 as yes, cast(id as byte) as b, cast(id as short) as s, cast(id as int) as i, id as l,
    cast(id / 10 as float) as f, id / 3 as d, cast(id as decimal(20,5)) / 3 as dec, concat('"é,\n', id) as str,
    date_add(date'2024-02-28', cast(id as int)) as day,
    timestamp'2024-03-31 01:30:00.123Z' + make_dt_interval(0, cast(id as int)) as at,
    timestamp_ntz'2024-03-31 01:30:00.500' as local, nullif('', if(id = 1, '', 'x')) as maybe
"""
NESTED = """
    encode(concat('bytes', id), 'utf-8') as bin, array(id, null, 7) as arr, map('k', id, 'n', null) as m,
    map(cast(id as int), array(date'2024-01-01')) as mm, named_struct('a', id, 'gone', cast(null as int)) as st,
    array(named_struct('x', timestamp'2024-03-31 01:30:00.123Z')) as deep,
    double('NaN') as nan, float('-Infinity') as inf
"""


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


def save(frame: DataFrame, queue: Queue, *, format_name: str = "dropq", **options: object) -> None:
    """Write a frame to a queue."""
    dropq.spark.register(frame.sparkSession)
    writer = frame.write.format(format_name).mode("append").option("root", str(queue.root.path)).option("queue", "q")
    for key, value in options.items():
        writer = writer.option(key, str(value))
    writer.save()


def bodies(queue: Queue) -> list[bytes]:
    return sorted(message.body for message in queue.browse())


def working(queue: Queue) -> list[str]:
    return os.listdir(queue.layout.working)


def numbers(spark: SparkSession, count: int, partitions: int = 4) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) value")


def texts(count: int) -> list[bytes]:
    return sorted(str(number).encode() for number in range(count))


@contextmanager
def setting(spark: SparkSession, key: str, value: object) -> Iterator[None]:
    before = spark.conf.get(key)
    spark.conf.set(key, str(value))
    try:
        yield
    finally:
        spark.conf.set(key, str(before))


# -- rows --------------------------------------------------------------------------------------------------------


def test_each_row_is_a_message_with_the_metadata_of_its_columns(spark: SparkSession, queue: Queue) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    rows = spark.sql("""
        select value, priority, 'order' as type, 'c~1' as correlation_id, 'replies' as reply_to,
               '1h' as expires_in, map('region', 'EU & ~', 'gone', null) as properties
        from values ('first', 9), ('', -1), ('dritte \u20ac', cast(null as int)) as t(value, priority)
    """)
    save(rows, queue)
    first, third, second = messages = list(queue.browse())
    assert [message.body for message in messages] == [b"first", "dritte \u20ac".encode(), b""]
    assert [message.priority for message in messages] == [9, 4, -1]
    assert third.text == "dritte \u20ac"
    for message in (first, second, third):
        assert (message.type, message.correlation_id, message.reply_to) == ("order", "c~1", "replies")
        assert (message.message_class, message.properties) == ("T", {"region": "EU & ~"})
        assert message.expiration is not None
        assert timedelta(minutes=59) < message.expiration - before < timedelta(minutes=61)
    assert working(queue) == []


def test_properties_are_strings_to_a_filter(spark: SparkSession, queue: Queue) -> None:
    save(spark.sql("select 'x' as value, map('n', '7') as properties"), queue)
    assert len(list(queue.browse(filter="n = '7'"))) == 1
    assert list(queue.browse(filter="n > 3")) == []


def test_binary_values_and_periods_in_seconds(spark: SparkSession, queue: Queue) -> None:
    rows = spark.sql("""
        select unhex('ff00') as value, 0.001D as delay, 3600 as expires_in union all
        select unhex(''), cast(null as double), cast(null as int)
    """)
    save(rows, queue)
    until(lambda: queue.sweep() and queue.counts()["target"] == 2, "the delayed message in target/")
    assert bodies(queue) == [b"", b"\xff\x00"]
    assert {message.message_class for message in queue.browse()} == {"B"}
    assert sorted(message.expiration is None for message in queue.browse()) == [False, True]


def test_large_arrow_types_of_a_session_are_written_alike(spark: SparkSession, queue: Queue) -> None:
    with setting(spark, "spark.sql.execution.arrow.useLargeVarTypes", True):
        save(spark.sql("select 'text' as value"), queue)
        save(spark.sql("select unhex('ff') as value"), queue)
        save(spark.sql("select 'x' as a, unhex('ff') as b"), queue, messagePer="partition")
    found = {message.body: message.message_class for message in queue.browse()}
    assert found == {b"text": "T", b"\xff": "B", b'{"a":"x","b":"/w=="}\n': "B"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("cast(null as string) as value", "value is null"),
        ("'x' as value, 5000000000 as priority", "priority 5000000000"),
        ("'x' as value, 'soon' as delay", "'soon' is not a duration"),
    ],
)
def test_a_row_that_is_no_message_fails_the_job_and_is_named(
    spark: SparkSession, queue: Queue, row: str, said: str
) -> None:
    column = row.replace(" as value", "").split(",")[0]
    good = "'x'" if "null" in column else column
    rows = spark.sql(f"select {row.replace(column, f'if(id = 3, {column}, {good})', 1)} from range(0, 5, 1, 1)")
    with pytest.raises(PySparkException, match=f"row [03] of partition 0.*{said}"):
        save(rows, queue)
    assert (bodies(queue), working(queue)) == ([], [])


# -- partitions ----------------------------------------------------------------------------------------------------


def only(queue: Queue) -> Message:
    (message,) = queue.browse()
    assert message.message_class == "B"
    return message


def everything(spark: SparkSession, columns: str = FLAT) -> DataFrame:
    return spark.sql(f"select {columns} from range(0, 4, 1, 1)")


@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
def test_jsonl_is_what_spark_itself_would_write_in_utc(spark: SparkSession, queue: Queue, zone: str) -> None:
    frame = everything(spark, f"{FLAT}, {NESTED}")
    with setting(spark, "spark.sql.session.timeZone", zone):
        save(frame, queue, messagePer="partition")
    message = only(queue)
    with setting(spark, "spark.sql.session.timeZone", "UTC"):
        expected = [row[0] for row in frame.selectExpr("to_json(struct(*))").collect()]
    assert message.type == "jsonl"
    written = [json.loads(line, parse_float=Decimal) for line in message.body.decode().splitlines()]
    assert written == [json.loads(line, parse_float=Decimal) for line in expected]
    assert message.text.splitlines()[0].startswith('{"yes":true,"b":0,"s":0,"i":0,"l":0,"f":0.0,"d":0.0,"dec":0.0')


def test_jsonl_keeps_microseconds(spark: SparkSession, queue: Queue) -> None:
    save(spark.sql("select timestamp'2024-01-01 00:00:00.000001Z' as at"), queue, messagePer="partition")
    assert only(queue).body == b'{"at":"2024-01-01T00:00:00.000001Z"}\n'


def test_csv_has_a_header_and_tells_null_from_empty(spark: SparkSession, queue: Queue) -> None:
    save(everything(spark), queue, messagePer="partition", bodyFormat="csv")
    message = only(queue)
    assert message.type == "csv"
    header, *rows = csv.reader(io.StringIO(message.text, newline=""))
    assert header == ["yes", "b", "s", "i", "l", "f", "d", "dec", "str", "day", "at", "local", "maybe"]
    assert len(rows) == 4
    assert rows[1][:6] == ["false", "1", "1", "1", "1", "0.1"]
    assert rows[1][8:12] == ['"é,\n1', "2024-02-29", "2024-03-31 02:30:00.123000Z", "2024-03-31 01:30:00.500000"]
    assert '500000,""\n' in message.text
    assert "500000,\n" in message.text


@pytest.mark.parametrize("body_format", ["parquet", "arrow"])
def test_parquet_and_arrow_keep_every_type(spark: SparkSession, queue: Queue, body_format: str) -> None:
    frame = everything(spark, f"{FLAT}, {NESTED}, interval '1' day as gap")
    with setting(spark, "spark.sql.session.timeZone", "Europe/Berlin"):
        save(frame, queue, messagePer="partition", bodyFormat=body_format)
        expected = frame.toArrow()
    message = only(queue)
    assert message.type == body_format
    body = io.BytesIO(message.body)
    table = pq.read_table(body) if body_format == "parquet" else pa.ipc.open_stream(body).read_all()
    assert table.schema.names == expected.schema.names
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert table.schema.field("deep").type.value_type.field("x").type.tz == "UTC"
    assert str(table.drop_columns("nan").to_pylist()[0]["at"]) == "2024-03-31 01:30:00.123000+00:00"
    same = [name for name in table.schema.names if name != "nan"]
    assert table.select(same).to_pylist() == expected.select(same).to_pylist()


def test_parquet_bodies_have_row_groups_larger_than_sparks_batches(spark: SparkSession, queue: Queue) -> None:
    with setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", 10):
        save(spark.range(0, 95, 1, 1), queue, messagePer="partition", bodyFormat="parquet")
    body = pq.ParquetFile(io.BytesIO(only(queue).body))
    assert (body.metadata.num_rows, body.metadata.num_row_groups) == (95, 1)


def test_text_is_a_line_for_each_row(spark: SparkSession, queue: Queue) -> None:
    rows = spark.sql("select * from values ('a'), (null), ('\u20ac'), ('') as t(line)").coalesce(1)
    save(rows, queue, messagePer="partition", bodyFormat="text")
    assert (only(queue).body, only(queue).type) == ("a\n\n\u20ac\n\n".encode(), "text")


@pytest.mark.parametrize(("rows", "limit", "sizes"), [(25, 10, [5, 10, 10]), (20, 10, [10, 10]), (7, 100, [7])])
def test_max_records_per_message_splits_a_partition(
    spark: SparkSession, queue: Queue, rows: int, limit: int, sizes: list[int]
) -> None:
    with setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", 4):
        save(numbers(spark, rows, 1), queue, messagePer="partition", bodyFormat="text", maxRecordsPerMessage=limit)
    messages = list(queue.browse())
    assert sorted(message.body.count(b"\n") for message in messages) == sizes
    assert b"".join(message.body for message in messages).split() == [str(n).encode() for n in range(rows)]


def test_empty_partitions_send_nothing(spark: SparkSession, queue: Queue) -> None:
    for message_per in ("row", "partition"):
        save(numbers(spark, 0), queue, messagePer=message_per)
        save(numbers(spark, 50, 3).where("value = '7'"), queue, messagePer=message_per)
    assert bodies(queue) == [b"7", b'{"value":"7"}\n']
    assert working(queue) == []


# -- what is refused -----------------------------------------------------------------------------------------------


def struct(ddl: str) -> t.StructType:
    """Read the columns of a frame from `name:type ...`, without a session."""
    kinds = {
        "string": t.StringType(), "int": t.IntegerType(), "long": t.LongType(), "double": t.DoubleType(),
        "decimal": t.DecimalType(), "binary": t.BinaryType(), "date": t.DateType(), "timestamp": t.TimestampType(),
        "map": t.MapType(t.StringType(), t.StringType()), "map_int": t.MapType(t.StringType(), t.IntegerType()),
        "map_date": t.MapType(t.DateType(), t.IntegerType()), "array": t.ArrayType(t.StringType()),
        "months": t.YearMonthIntervalType(), "gap": t.DayTimeIntervalType(), "variant": t.VariantType(),
        "deep": t.StructType().add("x", t.ArrayType(t.StructType().add("v", t.VariantType()))),
    }  # fmt: skip
    schema = t.StructType()
    for column in ddl.split():
        name, _, kind = column.partition(":")
        schema = schema.add(name, kinds[kind])
    return schema


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("priority:int", {}, "the column value, the body of each message, is missing"),
        ("value:int", {}, "column value is int, and must be string or binary"),
        ("value:string priority:string", {}, "column priority is string, and must be an integer"),
        ("value:string priority:double", {}, "column priority is double"),
        ("value:string type:int", {}, "column type is int, and must be string"),
        ("value:string delay:decimal", {}, r"column delay is decimal\(10,0\), and must be string"),
        (
            "value:string properties:map_int",
            {},
            r"column properties is map<string,int>, and must be map<string,string>",
        ),
        ("value:string properties:string", {}, "column properties is string"),
        ("value:string Priority:int", {}, "column Priority is unknown.*did you mean priority"),
        ("value:string corelation_id:int", {}, "did you mean correlation_id"),
        ("value:string x:int y:int", {}, "column x is unknown.*messagePer=partition sends any columns.*column y"),
        ("value:string value:string", {}, "column value is there twice"),
        ("a:int b:int", {"bodyFormat": "text"}, "bodyFormat=text has one string column, and there are 2"),
        ("a:int", {"bodyFormat": "text"}, "column a is int, which bodyFormat=text does not hold"),
        ("a:array", {"bodyFormat": "csv"}, "column a is array<string>, which bodyFormat=csv"),
        ("a:binary b:map", {"bodyFormat": "csv"}, "column a is binary.*column b is map<string,string>"),
        ("a:deep", {"bodyFormat": "jsonl"}, r"column a.x\[\].v is variant, which bodyFormat=jsonl"),
        ("a:map_date", {"bodyFormat": "jsonl"}, "column the key of a is date"),
        ("a:gap", {"bodyFormat": "jsonl"}, "column a is interval day to second"),
        ("a:months", {"bodyFormat": "parquet"}, "column a is interval year to month"),
        ("a:deep", {"bodyFormat": "arrow"}, r"column a.x\[\].v is variant"),
        ("a:int a:int", {"bodyFormat": "csv"}, "column a is there twice"),
        ("", {"bodyFormat": "jsonl"}, "these columns cannot be sent: there is none"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_by_name(columns: str, options: dict[str, str], said: str) -> None:
    per = {"messagePer": "partition"} if options else {}
    parsed = WriteOptions.parse({"root": "/r", "queue": "q", **per, **options})
    with pytest.raises(ConfigError, match=said):
        parsed.check_columns(struct(columns))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"root": ""}, "option root is empty"),
        ({"queue": ""}, "option queue is empty"),
        ({"path": "/r/q"}, r"save\(\) takes no path"),
        ({"messageper": "rows"}, "option messagePer = 'rows': row, partition or key is allowed"),
        ({"jobId": ""}, "option jobId is empty"),
        ({"jobId": " "}, "option jobId is empty"),
        ({"messagesPer": "row"}, "option messagesper is unknown: did you mean messagePer?"),
        ({"compression": "gzip"}, r"option compression is unknown: save\(\) takes root, queue, topic, messagePer"),
        ({"bodyFormat": "csv"}, "bodyFormat needs messagePer=partition"),
        ({"maxRecordsPerMessage": "5"}, "maxRecordsPerMessage needs messagePer=partition"),
        ({"messagePer": "partition", "bodyFormat": "json"}, "'json': jsonl, csv, parquet, arrow or text is allowed"),
        ({"messagePer": "partition", "maxRecordsPerMessage": "0"}, "'0': a whole number from 1"),
        ({"messagePer": "partition", "maxRecordsPerMessage": "many"}, "'many': a whole number from 1"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        WriteOptions.parse({"root": "/r", "queue": "q", **options})


def test_a_relative_root_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert WriteOptions.parse({"root": "root", "queue": "q"}).root == str(tmp_path / "root")


def test_every_body_format_has_a_writer() -> None:
    from dropq.spark.encoders import BODIES

    assert tuple(BODIES) == BODY_FORMATS


def test_a_job_id_that_cannot_be_used_and_a_queue_that_is_missing_are_refused(queue: Queue) -> None:
    options = {"root": str(queue.root.path), "queue": "q", "jobId": "x" * 101}
    with pytest.raises(ValueError, match="job id"):
        DropqDataSource(options).writer(struct("value:string"), False)
    with pytest.raises(NoSuchQueue, match="no queue 'nope'"):
        DropqDataSource({**options, "queue": "nope", "jobId": "x"}).writer(struct("value:string"), False)
    with pytest.raises(NoSuchQueue, match="no root at"):
        DropqDataSource({"root": "/nowhere", "queue": "q"}).writer(struct("value:string"), False)


@pytest.mark.parametrize("begin", ["writer", "streamWriter"])
def test_what_is_written_to_a_queue_that_is_missing_becomes_no_dead_letters(tmp_path: Path, begin: str) -> None:
    root = Root.create(tmp_path / "root")
    letters = root.create_queue("letters")
    with open(root.layout.config_file, "a") as file:
        file.write('dead_letter_queue = "letters"\n')
    assert Root(root.path).queue("nope").send("x").delivered_to == "letters"
    source = DropqDataSource({"root": str(root.path), "queue": "nope"})
    with pytest.raises(NoSuchQueue, match="no queue 'nope'"):
        getattr(source, begin)(struct("value:string"), False)
    assert len(bodies(letters)) == 1
    assert sorted(os.listdir(letters.layout.working)) == []


def test_spark_refuses_in_the_driver_what_the_format_refuses(spark: SparkSession, queue: Queue) -> None:
    rows = numbers(spark, 3)
    with pytest.raises(AnalysisException, match="did you mean bodyFormat"):
        save(rows, queue, bodyformats="csv")
    with pytest.raises(AnalysisException, match="column x is unknown"):
        save(rows.selectExpr("value", "1 as x"), queue)
    writer = rows.write.format("dropq").option("root", str(queue.root.path)).option("queue", "q")
    with pytest.raises(AnalysisException, match="mode overwrite is refused"):
        writer.mode("overwrite").save()
    with pytest.raises(AnalysisException, match="no queue 'none'"):
        writer.mode("append").option("queue", "none").save()
    with pytest.raises(AnalysisException, match="takes no path"):
        writer.mode("append").save("/tmp/somewhere")
    assert (bodies(queue), working(queue)) == ([], [])


def test_the_examples_of_the_paper_run(spark: SparkSession, tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    names = ("orders", "sales", "stores", "clicks", "copies", "visits")
    orders, sales, stores, clicks, copies, visits = map(root.create_queue, names)
    visits.send("# of the gate\nvisitor;at\n7;31/01/2024 10:30\nseven;31/01/2024 11:00\n# end\n")
    blocks = re.findall(r"^```python\n(.*?)^```", PAPER.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec("\n".join(blocks).replace("/tmp/", f"{tmp_path}/").replace("/mnt/queues", str(root.path)), namespace)
    (order,) = orders.browse("processed")  # by the claiming batch
    assert (order.text, order.priority, order.properties) == ('{"order": 4711}', 6, {"region": "EU"})
    assert [file.read_text() for file in (tmp_path / "orders").glob("part-*") if file.stat().st_size] == [
        f"{order.text}\n"
    ]
    assert sum(pq.read_table(io.BytesIO(message.body)).num_rows for message in sales.browse()) == 1000
    assert namespace["rows"].count() == 1000
    assert [(row.visitor, str(row.at), row.bad) for row in namespace["visits"].select("row.*").collect()] == [
        (7, "2024-01-31 10:30:00", None),
        (None, "2024-01-31 11:00:00", "seven;31/01/2024 11:00"),
    ]
    assert sorted(message.properties["store"] for message in stores.browse(filter="store <> '6'")) == list("012345")
    assert sum(message.record_count or 0 for message in clicks.browse()) == 5000
    assert sorted(message.text for message in orders.browse()) == list("01234")  # by the stream out
    assert list(copies.browse()) == []  # of nothing, as nothing was left to claim


def test_the_paper_tells_every_option_and_format() -> None:
    paper = PAPER.read_text()
    options = (*WRITE_OPTIONS, *READ_OPTIONS, *STREAM_READ_OPTIONS, *BODY_FORMATS, *RECORD_FORMATS)
    assert [option for option in options if f"`{option}`" not in paper] == []


# -- all or nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"recordsPerMessage": 2}, {"messagePer": "key", "keyColumns": "value"}],
    ids=["rows", "records", "keys"],
)
def test_a_text_that_no_consumer_could_read_is_not_staged(queue: Queue, options: dict[str, Any]) -> None:
    parsed = WriteOptions.parse({"root": str(queue.root.path), "queue": "q", **{k: str(v) for k, v in options.items()}})
    values = pa.array([b"o\xff", b"b"], pa.binary()).view(pa.string())
    writer = QueueWriter.begin(parsed)
    with pytest.raises(ValueError, match=NOT_UTF8):
        writer.write(iter([pa.RecordBatch.from_pydict({"value": values})]))
    writer.abort([])
    assert (bodies(queue), working(queue)) == ([], [])


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_a_text_that_no_reader_could_read_fails_the_job(spark: SparkSession, queue: Queue, body_format: str) -> None:
    rows = spark.sql("SELECT cast(X'6FFF' AS string) value UNION ALL SELECT 'b'")
    with pytest.raises(PySparkException, match=NOT_UTF8):
        save(rows, queue, messagePer="partition", bodyFormat=body_format)
    assert (bodies(queue), working(queue)) == ([], [])
    save(rows.selectExpr("make_valid_utf8(value) value"), queue, messagePer="partition", bodyFormat=body_format)
    reader = spark.read.format("dropq").option("root", str(queue.root.path)).option("queue", "q")
    read = reader.option("bodyFormat", body_format).schema("value string").load()
    assert sorted(row.value for row in read.collect()) == ["b", "o\ufffd"]


def test_a_query_that_fails_leaves_nothing(spark: SparkSession, queue: Queue) -> None:
    rows = spark.range(0, 400, 1, 4).selectExpr("if(id = 399, raise_error('boom'), cast(id as string)) value")
    with setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", 10), pytest.raises(Exception, match="boom"):
        save(rows, queue)
    assert (bodies(queue), working(queue)) == ([], [])


def test_a_second_run_with_the_same_job_id_writes_nothing(spark: SparkSession, queue: Queue) -> None:
    save(numbers(spark, 20), queue, jobId="2024-11-05/orders")
    changed = os.stat(queue.layout.working).st_mtime_ns
    save(numbers(spark, 20), queue, jobId="2024-11-05/orders")
    assert os.stat(queue.layout.working).st_mtime_ns == changed
    assert bodies(queue) == texts(20)
    save(numbers(spark, 20), queue, jobId="2024-11-06/orders")
    assert len(bodies(queue)) == 40


def test_two_jobs_without_an_id_are_two(spark: SparkSession, queue: Queue) -> None:
    rows = numbers(spark, 5)
    save(rows, queue)
    save(rows, queue)
    assert bodies(queue) == sorted(texts(5) * 2)


def test_two_jobs_into_one_queue_at_once_send_both_their_messages(spark: SparkSession, queue: Queue) -> None:
    def job(number: int) -> None:
        # createDataFrame makes the session the active one of this thread: there Spark looks for data sources.
        rows = [(f"{number}-{row}",) for row in range(300)]
        save(spark.createDataFrame(rows, "value string").repartition(3), queue)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(job, range(2)))
    assert bodies(queue) == sorted(f"{number}-{row}".encode() for number in range(2) for row in range(300))
    assert working(queue) == []


Fault = Callable[[], None]


def io_error() -> None:
    raise OSError(5, "Input/output error")


def sudden_death() -> None:
    os._exit(1)


def register_faulty(spark: SparkSession, call: str, after: int, fault: Fault) -> None:
    """Register `faulty`: in its commit, but not in an abort, a call of the storage fails after so many."""
    owner: Any = Storage if hasattr(Storage, call) else system_calls

    class FaultyWriter(QueueWriter):
        def commit(self, messages: list[WriterCommitMessage | None]) -> None:
            calls, real = iter(range(after)), getattr(owner, call)

            def faulty(*args: Any) -> Any:
                if next(calls, None) is None:
                    fault()
                return real(*args)

            with mock.patch.object(owner, call, faulty):
                super().commit(messages)

    class Source(DropqDataSource):
        @classmethod
        def name(cls) -> str:
            return "faulty"

        def writer(self, schema: t.StructType, overwrite: bool) -> DataSourceWriter:
            writer: Any = super().writer(schema, overwrite)
            return FaultyWriter(writer.options, writer.job_id)

    spark.dataSource.register(Source)


@pytest.mark.parametrize(
    ("fault", "call", "after", "sent"),
    first_and_long(
        [
            (sudden_death, "rename_noreplace", 17, 60),
            (io_error, "rename_noreplace", 17, 60),
            (io_error, "move", 0, 0),
            (io_error, "remove_tree", 0, 60),
            (sudden_death, "move", 0, 0),
        ],
        2,
    ),
)
def test_a_commit_that_fails_half_way_is_finished_by_sparks_abort(
    spark: SparkSession, queue: Queue, fault: Fault, call: str, after: int, sent: int
) -> None:
    """Spark calls abort() after a failed commit(): what has its manifest by then is sent, and nothing else."""
    register_faulty(spark, call, after, fault)
    rows = numbers(spark, 60)
    with pytest.raises(PySparkException if fault is io_error else Exception) as caught:
        save(rows, queue, format_name="faulty", jobId="faulty")
    if fault is io_error:
        fate = "is committed" if sent else "nothing was sent"
        assert fate in str(caught.value)
    assert bodies(queue) == texts(sent)
    assert [name for name in working(queue) if name.startswith(".job-")] == []
    save(rows, queue, jobId="faulty")  # the way out of an error that came too late
    queue.sweep()
    assert (bodies(queue), working(queue)) == (texts(60), [])


# -- a driver that is killed -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Root:
    """The root that a driver left whose processes, Java and all, were killed at the moments spark_driver.py tells."""
    root = Root.create(tmp_path_factory.mktemp("killed") / "root")
    for name in ("flaky", "staging", "staged", "committing"):
        root.create_queue(name, durability="none")
    log = root.path.parent / "driver.log"
    script = Path(__file__).with_name("spark_driver.py")
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, str(script), str(root.path)], stdout=output, stderr=output, start_new_session=True
        )
        try:
            until(
                lambda: driver.poll() is not None or len(list(root.path.glob("at-*"))) == 3,
                f"a driver that stops at three places, see {log}",
            )
            assert driver.poll() is None, log.read_text()
        finally:
            kill_session(driver.pid)
            driver.wait()
    return root


def kill_session(session: int) -> None:
    """Kill every process of a session, until none is left: Spark puts its workers into a group of their own."""

    def kill() -> bool:
        members = list(session_members(session))
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not members

    until(kill, f"the end of the processes of session {session}")


def session_members(session: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        with suppress(ValueError, OSError):
            state, _, _, its_session = Path("/proc", str(int(entry)), "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                yield int(entry)


def all_rows() -> list[bytes]:
    from spark_driver import ROWS

    return texts(ROWS)


def test_tasks_that_fail_at_first_send_each_row_once(killed: Root) -> None:
    """One failed while rows were coming, one after it had staged all, one took its process with it."""
    queue = killed.queue("flaky")
    assert bodies(queue) == all_rows()
    assert working(queue) == []


def test_a_driver_killed_in_the_middle_of_its_commit_sent_every_row_once_after_a_sweep(killed: Root) -> None:
    queue = killed.queue("committing")
    at_first = bodies(queue)
    assert 0 < len(at_first) < len(all_rows())
    report = queue.sweep()
    assert (report.jobs_finished, report.jobs_dropped) == (1, 0)
    assert bodies(queue) == all_rows()
    assert working(queue) == []
    assert queue.sweep(jobs_older_than=0).total == 0
    assert bodies(queue) == all_rows()


@pytest.mark.parametrize("moment", ["staging", "staged"])
def test_a_driver_killed_before_its_commit_sent_nothing_and_a_sweep_clears_up(killed: Root, moment: str) -> None:
    queue = killed.queue(moment)
    assert len(working(queue)) == 1
    queue.sweep()
    assert (bodies(queue), len(working(queue))) == ([], 1)
    assert queue.sweep(jobs_older_than=0).jobs_dropped == 1
    assert (bodies(queue), working(queue)) == ([], [])


# -- topics ------------------------------------------------------------------------------------------------------------


def test_a_job_publishes_to_a_topic_or_a_view_by_its_address_and_a_subscription_is_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = Root.create(tmp_path / "root")
    topic = root.create_topic("sales.eu")
    copies = topic.create_subscription("audit", client_id="hq")
    view = root.create_queue("view", underlying_topic="sales.eu")
    dropq.spark.register(spark)
    rows = spark.createDataFrame([("a",), ("b",)], "value string").repartition(1)
    for address in ("sales.eu", "view"):
        writer = rows.write.format("dropq").mode("append").option("root", str(root.path))
        writer.option("queue", address).option("messagePer", "row").save()
    assert (topic.queue.counts()["target"], view.counts()["target"]) == (4, 0)
    topic.queue.sweep()
    read = spark.read.format("dropq").option("root", str(root.path)).option("queue", copies.name).load()
    assert sorted(bytes(row.value).decode() for row in read.select("value").collect()) == ["a", "a", "b", "b"]
    assert view.counts()["target"] == 4
