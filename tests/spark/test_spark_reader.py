"""Spark reads queues: rows that tell what a browse tells, taking nothing; a claiming batch that is nobody else's."""

from __future__ import annotations

import logging
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
from helpers import base, drop, make_queue, names_in, next_moment, reopened, take, until, where
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader, InputPartition
from test_spark_writer import kill_session

import dropq.spark
from dropq import ConfigError, DropqError, LeaseLost, Message, NoSuchMessage, NoSuchQueue, Queue, StorageError
from dropq.format.layout import STATES
from dropq.lifecycle.context import QueueContext
from dropq.queue import browsing
from dropq.spark import infer, planned
from dropq.spark.columns import COLUMNS, check_columns
from dropq.spark.datasource import DropqDataSource
from dropq.spark.options import BODY_FORMATS, ReadOptions
from dropq.spark.reader import Part, QueueReader
from dropq.storage.reading import RESERVED_MODE

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyspark.sql import DataFrame, SparkSession

#: The classes that tests register are not importable where Spark's workers run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

TOP = Path(__file__).parents[2]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: A schema of what names tell, and of what a look at the file tells.
NAMES = "id string, state string, path string"
LENGTHS = "id string, path string, length bigint"
#: A schema of most that names tell.
TELLING = t.StructType([t.StructField(name, kind) for name, kind in COLUMNS.items() if name != "value"])
#: Spark's own switch, without which a reader that takes filters is refused.
PUSHES = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


def read(
    spark: SparkSession,
    queue: Queue,
    schema: str | t.StructType | None = None,
    *,
    format_name: str = "dropq",
    **options: object,
) -> DataFrame:
    """Make a frame of a queue's messages."""
    dropq.spark.register(spark)
    reader = spark.read.format(format_name).option("root", str(queue.root.path)).option("queue", queue.name)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.options(**{key: str(value) for key, value in options.items()}).load()


def read_here(queue: Queue, schema: str | None = None, **options: object) -> Iterator[dict[str, Any]]:
    """Yield the rows of a read as Spark would do it, but in this process; it is listed when the first is asked for."""
    given = {"root": str(queue.root.path), "queue": queue.name, **{key: str(value) for key, value in options.items()}}
    source = DropqDataSource(given)
    reader: Any = source.reader(source.schema() if schema is None else struct(schema))
    for part in pickle.loads(pickle.dumps(reader.partitions())):
        yield from (row for batch in pickle.loads(pickle.dumps(reader)).read(part) for row in batch.to_pylist())


def struct(schema: str) -> t.StructType:
    """Build a schema out of `name type, ...`, without a session, which would be needed to parse it."""
    kinds: dict[str, t.DataType] = {kind.simpleString(): kind for kind in COLUMNS.values()} | {
        "timestamp_ntz": t.TimestampNTZType(),
        "map<string:int>": t.MapType(t.StringType(), t.IntegerType()),
    }
    kinds |= {"map<string:string>": COLUMNS["properties"], "smallint": t.ShortType()}
    fields = (field.split(" ") for field in schema.split(", "))
    return t.StructType([t.StructField(name, kinds[kind]) for name, kind in fields])


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame by their paths; times in microseconds."""
    columns = [f"unix_micros({name}) {name}" if name in ("timestamp", "expiration") else name for name in frame.columns]
    rows = [row.asDict() for row in frame.selectExpr(*columns).collect()]
    return sorted(rows, key=lambda row: str(row["path"]))


def looked_at(message: Message) -> dict[str, Any]:
    """The row that a message has to be, by what a browse tells of it."""
    return {
        "id": message.id,
        "priority": message.priority,
        "class": message.message_class,
        "timestamp": micros(message.timestamp),
        "expiration": None if message.expiration is None else micros(message.expiration),
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "type": message.type,
        "properties": {
            key: str(value).lower() if value is True or value is False else str(value)
            for key, value in message.properties.items()
        },
        "delivery_count": message.delivery_count,
        "state": message.state,
        "path": message.path,
        "length": message.size(),
        "value": message.body,
    }


def browsed(queue: Queue, *states: str, filter: str | None = None) -> list[dict[str, Any]]:
    """The rows that a read of some states has to have."""
    found = [looked_at(message) for state in states for message in queue.browse(state, filter)]
    return sorted(found, key=lambda row: str(row["path"]))


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def bodies(rows: Iterable[Any]) -> list[bytes]:
    return sorted(bytes(row["value"]) for row in rows)


@contextmanager
def setting(spark: SparkSession, key: str, value: object) -> Iterator[None]:
    before = spark.conf.get(key)
    spark.conf.set(key, str(value).lower() if isinstance(value, bool) else str(value))
    try:
        yield
    finally:
        spark.conf.set(key, str(before))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """A queue with messages of every kind in every state, of which some are held."""
    queue = make_queue(tmp_path_factory.mktemp("zoo") / "root")
    with queue.subscribe(client_id="keeper~1", max_backlog=None) as keeper:
        for settle in (Message.ack, lambda message: message.reject("bad"), Message.expire):
            send_all_kinds(queue)
            for message in keeper.receive_many(100):
                settle(message)
        send_all_kinds(queue)
        for message in keeper.receive_many(100):
            message.release()  # they are delivered a second time below
        assert len(keeper.receive_many(100)) == 6
        Path(queue.layout.processing, "by-hand.csv").write_bytes(b"1;2")
        send_all_kinds(queue)
        Path(queue.layout.target, "4.1700000000000000-0000000001.B").write_bytes(b"from 2023")
        queue.send(b"", priority=-3, delay="1h")
        queue.send(b"later", type="order", message_id="to come", delay="2h")
        yield queue


def send_all_kinds(queue: Queue) -> None:
    queue.send(b"\x00plain\xff", priority=0)
    queue.send("a text", priority=9)
    queue.send(
        "coded", priority=7, type="order", correlation_id="c~1.é", reply_to="replies", expires_in="1h",
        properties={"region": "EU & ~", "n": 7, "ok": True, "rate": 0.5},
    )  # fmt: skip
    queue.send(b"", message_id="order-7", priority=9, type="bill")
    queue.send(b"spilled", message_id="x" * 100, type="order", properties={"long": "é" * 900, "n": -1})
    drop(queue, "a report of größe 1.csv", b"foreign")


# -- what the rows tell ----------------------------------------------------------------------------------------------


def test_a_read_tells_of_every_message_what_a_browse_tells(spark: SparkSession, zoo: Queue) -> None:
    rows = rows_of(read(spark, zoo, state=",".join(STATES)))
    assert rows == browsed(zoo, *STATES)
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    assert counts == {"target": 7, "processing": 7, "processed": 6, "expired": 6, "error": 6, "delayed": 2}
    assert {row["delivery_count"] for row in rows if row["state"] == "processing"} == {0, 2}
    assert {"order-7", "x" * 100, "a report of größe 1.csv", "to come"} < {row["id"] for row in rows}
    assert {"region": "EU & ~", "n": "7", "ok": "true", "rate": "0.5"} in [row["properties"] for row in rows]
    assert {"long": "é" * 900, "n": "-1"} in [row["properties"] for row in rows]


def test_a_read_takes_nothing(spark: SparkSession, zoo: Queue) -> None:
    before = where(zoo), {state: names_in(zoo, state) for state in STATES}
    assert read(spark, zoo, state=",".join(STATES)).count() == 34
    assert (where(zoo), {state: names_in(zoo, state) for state in STATES}) == before


def test_messages_that_tell_only_the_least_are_rows_like_the_others(spark: SparkSession, queue: Queue) -> None:
    for number, priority in enumerate((4, -(2**31), 2**31 - 1, 0, -7)):
        queue.send(str(number), priority=priority)
    expected = browsed(queue, "target")
    assert rows_of(read(spark, queue)) == expected
    with setting(spark, "spark.sql.execution.arrow.useLargeVarTypes", True):
        assert rows_of(read(spark, queue)) == expected
    drop(queue, "foreign", b"")
    assert rows_of(read(spark, queue)) == browsed(queue, "target")


@pytest.mark.long
def test_target_is_what_is_read_without_a_state(spark: SparkSession, zoo: Queue) -> None:
    frame = read(spark, zoo)
    assert [(field.name, field.dataType) for field in frame.schema.fields] == list(COLUMNS.items())
    assert rows_of(frame) == browsed(zoo, "target")
    assert rows_of(read(spark, zoo, state="error, expired")) == browsed(zoo, "error", "expired")


@pytest.mark.parametrize("columns", ["length path id", "value path", "properties path timestamp", "delivery_count"])
def test_a_schema_chooses_columns_in_any_order(zoo: Queue, columns: str) -> None:
    chosen = columns.split()
    schema = ", ".join(f"{name} {COLUMNS[name].simpleString().replace(',', ':')}" for name in chosen)
    rows = [
        {**row, "properties": dict(row.get("properties", ()))} for row in read_here(zoo, schema, state="target,error")
    ]
    expected = browsed(zoo, "target", "error")
    for name in chosen:
        values = [micros(row[name]) if name == "timestamp" else row[name] for row in rows]
        assert sorted(map(repr, values)) == sorted(repr(row[name]) for row in expected)
    assert [list(row)[: len(chosen)] for row in rows] == [chosen] * 13


def test_spark_has_the_columns_that_were_chosen(spark: SparkSession, zoo: Queue) -> None:
    rows = read(spark, zoo, LENGTHS).collect()
    assert sorted(tuple(row) for row in rows) == sorted(
        (row["id"], row["path"], row["length"]) for row in browsed(zoo, "target")
    )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("id string, size bigint, length int", "column size is not one of id, .*column length is bigint, not int"),
        ("priority smallint", "column priority is int, not smallint"),
        ("value int", "column value is binary or string, not int"),
        ("timestamp timestamp_ntz", "column timestamp is timestamp, not timestamp_ntz"),
        ("properties map<string:int>", "column properties is map<string,string>, not map<string,int>"),
        ("ID string", "column ID is not one of id"),
        ("id string, id string", "column id is there twice"),
    ],
)
def test_a_schema_that_messages_do_not_have_is_refused_by_name(schema: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_columns(struct(schema))


def test_columns_that_can_be_null_are_not_taken_for_such_that_cannot(spark: SparkSession, queue: Queue) -> None:
    """Spark believes NOT NULL, and reads past the end of what it finds there."""
    queue.send(b"x")
    with suppress(AnalysisException):  # it may as well be refused
        assert read(spark, queue, "id string, type string not null").collect()[0]["type"] is None


def test_a_schema_without_columns_is_no_empty_queue(spark: SparkSession, queue: Queue) -> None:
    queue.send(b"x")
    with suppress(AnalysisException):  # it may as well be refused
        assert read(spark, queue, t.StructType()).count() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"root": ""}, "option root is empty"),
        ({"queue": ""}, "option queue is empty"),
        ({"path": "/r/q"}, r"load\(\) takes no path here"),
        ({"states": "target"}, "option states is unknown: did you mean state?"),
        ({"bodyFormats": "csv"}, "did you mean bodyFormat?"),
        ({"messagePer": "row"}, r"option messageper is unknown: .*load\(\) takes root, queue, topic, state"),
        ({"maxMessagesPerTrigger": "5"}, "option maxmessagespertrigger is unknown"),
        ({"state": "target,done"}, "option state = 'target,done': one or more of target, delayed"),
        ({"state": "working"}, "one or more of target"),
        ({"state": ""}, "one or more of target"),
        ({"numPartitions": "0"}, "option numPartitions = '0': a whole number from 1"),
        ({"numPartitions": "\u0664"}, "a whole number from 1"),
        ({"numPartitions": "9" * 5000}, r"option numPartitions = '9{30,40}: a whole number from 1 to 999999999"),
        ({"pushdown": "true"}, "option pushdown is unknown"),
        ({"bodyFormat": "json"}, "'json': jsonl, csv, parquet, arrow or text is allowed"),
        ({"bodyFormat": "csv", "escape": "/"}, r"""option escape = '/': " or \\ is allowed"""),
        ({"bodyFormat": "jsonl", "escape": '"'}, "option escape needs bodyFormat=csv"),
        ({"bodyFormat": "csv", "sep": "||"}, r"option sep = '\|\|': one ASCII character is allowed, .*from_csv reads"),
        ({"bodyFormat": "csv", "quote": "\u00ab"}, "option quote = '\u00ab': one ASCII character"),
        ({"bodyFormat": "csv", "quote": ";", "sep": ";"}, "options sep and quote are both ';'"),
        ({"bodyFormat": "text", "nullValue": "-"}, "option nullValue needs bodyFormat=csv"),
        ({"bodyFormat": "csv", "timestampFormat": "dd/MM/yyyy"}, "timestampformat is unknown: Spark's from_csv and"),
        ({"sentAfter": "yesterday"}, "option sentAfter = 'yesterday': a time such as 2026-11-28T19:00:00Z is allowed"),
        ({"maxBytesPerTrigger": "1"}, "option maxbytespertrigger is unknown"),
    ],
)
def test_options_of_a_read_that_cannot_be_used_are_refused_by_name(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReadOptions.parse({"root": "/r", "queue": "q", **options})


def test_states_and_defaults_are_what_was_asked_for() -> None:
    parsed = ReadOptions.parse({"ROOT": "r", "Queue": "q", "State": "error, target,error"})
    assert (parsed.root, parsed.states, parsed.partitions) == (os.path.abspath("r"), ("error", "target"), 8)
    assert (parsed.filter, parsed.body_format, parsed.claimed) == (None, None, None)


@pytest.mark.long
def test_spark_refuses_in_the_driver_what_cannot_be_read(spark: SparkSession, queue: Queue) -> None:
    reader = spark.read.format("dropq").option("root", str(queue.root.path)).option("queue", "q")
    with pytest.raises(AnalysisException, match="takes no path here"):
        reader.load("/tmp/somewhere").collect()
    for option, value, said in (
        ("filters", "x = 1", "did you mean filter"),
        ("queue", "none", "no queue 'none'"),
        ("root", "/nowhere", "no root at /nowhere"),
    ):
        with pytest.raises(AnalysisException, match=said):
            reader.option(option, value).load().collect()
        reader = spark.read.format("dropq").option("root", str(queue.root.path)).option("queue", "q")
    with pytest.raises(AnalysisException, match="column size is not one of"):
        read(spark, queue, "size bigint").collect()


@pytest.mark.parametrize("claimed", ["", "garbage", "a:b", "spark-0123456789:-1"])
def test_what_no_batch_has_claimed_is_refused(queue: Queue, claimed: str) -> None:
    queue.send(b"x")
    with pytest.raises(DropqError):
        list(read_here(queue, claimed=claimed))


def test_a_folder_that_is_missing_is_named(queue: Queue) -> None:
    shutil.rmtree(queue.layout.error)
    with pytest.raises(StorageError, match="lacks its folder error"):
        list(read_here(queue, state="error"))


def test_a_message_that_moves_from_state_to_state_between_their_listings_is_one_row(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(queue, 3)
    drop(queue, "report.csv", b"sent twice")
    (base(queue) / "processed" / "report.csv").write_bytes(b"sent twice")
    listed, other = browsing.listed_names, reopened(queue)
    taken: list[Message | None] = []

    def meanwhile(context: QueueContext, state: str, filter: str | None) -> Any:
        found = listed(context, state, filter)
        if state == "target" and not taken:
            taken.append(other.receive())
        return found

    monkeypatch.setattr(browsing, "listed_names", meanwhile)
    rows = list(read_here(queue, "state string, value binary", state="target,processing,processed"))
    found = sorted((row["state"], row["value"]) for row in rows)
    assert found == [
        ("processed", b"sent twice"),
        ("processing", b"0"),
        *(("target", body) for body in (b"1", b"2", b"sent twice")),
    ]


def test_odd_claims_and_sidecars_are_rows_like_the_others(queue: Queue) -> None:
    (base(queue) / "processing" / "spark-abcdefghij-1,0,9999999999~4.2024.B").write_bytes(b"x")
    queue.send("x", properties={"k": "v" * 200})
    (sidecar,) = (queue.root.path / ".dropq" / "meta").glob("*.json")
    sidecar.chmod(0o644)
    sidecar.write_text(sidecar.read_text().replace('"type": null', '"type": "\\ud800"').replace("vvv", "\\udc80"))
    rows = {row["state"]: row for row in read_here(queue, state="target,processing")}
    assert rows["processing"]["delivery_count"] == 2**31 - 1
    assert rows["target"]["type"] == "%ED%A0%80"
    assert "%80" in rows["target"]["properties"][0][1]


def test_an_empty_queue_is_an_empty_table(spark: SparkSession, queue: Queue) -> None:
    assert read(spark, queue, state=",".join(STATES)).collect() == []
    assert read(spark, queue, "a int", bodyFormat="parquet").collect() == []


def test_what_is_no_message_is_no_row(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", ignore=["*.part", "Thumbs.db"])
    queue.send(b"message")
    for state in STATES:
        folder = Path(queue.layout.folder(state))
        folder.mkdir(exist_ok=True)
        for name in (".hidden", "upload.part", "Thumbs.db"):
            (folder / name).write_bytes(b"no message")
        (folder / "link").symlink_to(queue.layout.home)
        (folder / "file-link").symlink_to(folder / ".hidden")
        (folder / "folder").mkdir()
        os.mkfifo(folder / "fifo")
    for state in ("processed", "expired", "error"):
        Path(queue.layout.folder(state), "reserved").touch(RESERVED_MODE)
        Path(queue.layout.folder(state), "empty").touch(0o600)
    rows = list(read_here(queue, state=",".join(STATES)))
    assert [(row["id"], row["value"]) for row in rows if row["state"] != "target"] == [("empty", b"")] * 3
    assert [row["value"] for row in rows if row["state"] == "target"] == [b"message"]


@pytest.mark.parametrize("name", [b"\xff\xfereport.csv", b"7.\xff.T"])
def test_one_undecodable_name_does_not_keep_the_others_from_being_read(queue: Queue, name: bytes) -> None:
    queue.send(b"plain")
    drop(queue, os.fsdecode(name), b"undecodable")
    rows = list(read_here(queue))
    assert bodies(rows) == [b"plain", b"undecodable"]
    assert len({row["id"] for row in rows}) == 2


def test_messages_are_shared_out_over_tasks(spark: SparkSession, queue: Queue) -> None:
    for number in range(2500):
        Path(queue.layout.target, f"4.{1700000000000000 + number}-0000000000.T").write_text(str(number))
    Path(queue.layout.error, "4.1700000000000000-0000000000.T").write_text("2500")

    def shares(**options: object) -> list[int]:
        parsed = ReadOptions.parse(
            {"root": str(queue.root.path), "queue": "q", "state": "target,error"}
            | {k: str(v) for k, v in options.items()}
        )
        parts: list[Any] = QueueReader(parsed, struct("id string")).partitions()
        assert len({(part.state, file) for part in parts for file in part.files}) == 2501
        return [len(part.files) for part in parts]

    assert shares() == [1000, 1000, 500, 1]
    assert shares(numPartitions=50) == [*[51] * 49, 1, 1]  # who says so knows
    assert shares(bodyFormat="jsonl") == [*[313] * 7, 309, 1]  # a body may be a whole partition
    assert shares(numPartitions=1) == [2500, 1]
    assert shares(numPartitions=2) == [1251, 1249, 1]
    rows = read(spark, queue, "value binary", state="target,error").selectExpr("spark_partition_id() part", "value")
    found = rows.collect()
    assert sorted(int(row["value"]) for row in found) == list(range(2501))
    assert sorted(sum(row["part"] == part for row in found) for part in range(4)) == [1, 500, 1000, 1000]


def test_bodies_are_shared_out_over_tasks_by_their_bytes(queue: Queue) -> None:
    sizes = [10, 10, 2_000_000, 10, 10, 1_000_000, 900_000, 10]
    queue.send_many(b"x" * size for size in sizes)

    def shares(**options: str) -> list[int]:
        given = {"root": str(queue.root.path), "queue": "q", "bodyFormat": "text", **options}
        parts: list[Any] = QueueReader(ReadOptions.parse(given), struct("line string")).partitions()
        return [len(part.files) for part in parts]

    assert shares(numPartitions="2") == [3, 5]
    assert shares(numPartitions="4") == [3, 3, 2]
    assert shares(numPartitions="8") == shares() == [1] * 8


def test_messages_may_be_chosen_by_when_they_were_sent(queue: Queue) -> None:
    for name in (
        "4.1700000000000000-0000000001.T",
        "4.1700000001000000-0000000001.T.....nS=1",
        "4.1700000002000000-0000000001.T",
    ):
        drop(queue, name, name[10:12].encode())
    drop(queue, "report.csv", b"later")
    middle = "2023-11-14T22:13:21"
    for options, found in (
        ({"sentAfter": middle}, [b"02", b"later"]),
        ({"sentBefore": f"{middle}Z"}, [b"00"]),
        ({"sentAfter": f"{middle}.000-01:00"}, [b"later"]),
        ({"sentAfter": "2023-11-14T22:13:20.999", "sentBefore": "2023-11-14T22:13:21.001"}, [b"01"]),
    ):
        assert sorted(bodies(list(read_here(queue, **options)))) == found


def test_a_task_hands_over_batches_of_bounded_size(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.spark.reader.BATCH_MESSAGES", 4)
    monkeypatch.setattr("dropq.spark.reader.BATCH_BYTES", 10)
    sizes = [0, 3, 3, 3, 0, 11, 1, 5, 5, 1, 30, 2]
    for size in sizes:
        queue.send(b"x" * size)
    options = ReadOptions.parse({"root": str(queue.root.path), "queue": "q"})
    reader = QueueReader(options, struct("value binary, length bigint"))
    (part,) = reader.partitions()
    batches = [batch.to_pydict() for batch in reader.read(part)]
    assert [len(value) for batch in batches for value in batch["value"]] == sizes
    assert [batch["length"] for batch in batches] == [[0, 3, 3, 3], [0, 11], [1, 5], [5, 1, 30], [2]]


def test_a_body_that_no_value_holds_is_named_and_not_read(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.spark.reader.LONGEST", 200_000)
    queue.send(b"x" * 200_000)
    assert [len(row["value"]) for row in read_here(queue)] == [200_000]
    with (base(queue) / "target" / "huge").open("wb") as body:
        body.truncate(1 << 40)
    with pytest.raises(StorageError, match=r"target/huge is longer than the 200000 bytes of a value of Spark: read it"):
        list(read_here(queue))
    assert [row["length"] for row in read_here(queue, "length bigint")] == [200_000, 1 << 40]


# -- which files are touched -----------------------------------------------------------------------------------------


class Watched(QueueReader):
    """Writes into a file beside the root which messages its tasks opened, and which they looked at."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        touched: set[str] = set()
        real, ours = os.lstat, set(partition.files)

        def lstat(path: Any, **options: Any) -> os.stat_result:
            touched.add(f"looked {path}")
            return real(path, **options)

        def opened(event: str, args: tuple[Any, ...]) -> None:
            if event == "open":
                touched.add(f"opened {args[0]}")

        sys.addaudithook(opened)
        with mock.patch.object(os, "lstat", lstat):
            yield from super().read(partition)
        with Path(self.options.root).with_name("touched").open("a") as log:
            log.writelines(f"{line}\n" for line in sorted(touched) if os.path.basename(line.partition(" ")[2]) in ours)


def touched(queue: Queue) -> list[str]:
    """What the tasks did since this was last asked: `opened NAME`, `looked NAME`."""
    log = queue.root.path.with_name("touched")
    lines = log.read_text().splitlines()
    log.unlink()
    return sorted(f"{line.partition(' ')[0]} {os.path.basename(line.partition(' ')[2])}" for line in lines)


def register(spark: SparkSession, name: str, kind: type[QueueReader]) -> None:
    """Make a data source whose reads are done by a kind of reader."""

    class Source(DropqDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def reader(self, schema: t.StructType) -> DataSourceReader:
            made: Any = super().reader(schema)
            return kind(made.options, schema)

    spark.dataSource.register(Source)


def test_bodies_are_opened_only_for_their_value_and_looked_at_only_for_their_length(
    spark: SparkSession, queue: Queue
) -> None:
    register(spark, "watched", Watched)
    queue.send("a text")
    queue.send("coded", type="order", properties={"long": "x" * 500})
    drop(queue, "foreign", b"foreign")
    files = names_in(queue, "target")
    names_alone = t.StructType([t.StructField(name, kind) for name, kind in COLUMNS.items() if name[0] not in "lv"])
    assert len(names_alone.fields) == len(COLUMNS) - 2
    assert len(read(spark, queue, names_alone, format_name="watched").collect()) == 3
    assert touched(queue) == []
    lengths = read(spark, queue, "length bigint", format_name="watched").collect()
    assert sorted(row["length"] for row in lengths) == [5, 6, 7]
    assert touched(queue) == [f"looked {file}" for file in files]
    assert len(read(spark, queue, "value binary", format_name="watched").collect()) == 3
    assert touched(queue) == [f"opened {file}" for file in files]


# -- messages that move on ---------------------------------------------------------------------------------------------


class Moving(QueueReader):
    """After its listing, messages of priority 9 move on; what is logged while it reads is kept beside the root."""

    def partitions(self) -> list[InputPartition]:
        parts = super().partitions()
        layout = self.options.open().layout
        for name in os.listdir(layout.target):
            if name.startswith("9."):
                os.rename(f"{layout.target}/{name}", f"{layout.processed}/{name}")
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        handler = logging.FileHandler(Path(self.options.root).with_name("warnings"))
        logger = logging.getLogger("dropq")
        logger.addHandler(handler)
        try:
            yield from super().read(partition)
        finally:
            logger.removeHandler(handler)
            handler.close()


def test_spark_is_not_stopped_by_messages_that_move_on_while_it_reads(spark: SparkSession, queue: Queue) -> None:
    register(spark, "moving", Moving)
    stay, *gone = (queue.send(body, priority=priority).id for body, priority in (("stays", 4), ("goes", 9), ("too", 9)))
    first = names_in(queue, "target")[-2]
    rows = {row["id"]: row for row in read(spark, queue, format_name="moving").collect()}
    assert [rows[id]["length"] for id in (stay, *gone)] == [5, None, None]
    assert [rows[id]["value"] for id in (stay, *gone)] == [b"stays", None, None]
    log = queue.root.path.with_name("warnings").read_text()
    assert log == f"2 messages left {queue.layout.target} while it was read: the first was {first}\n"
    assert where(queue) == {"target": [b"stays"], "processed": [b"goes", b"too"]}


def read_moving(queue: Queue, schema: str, **options: str) -> list[dict[str, Any]]:
    """Read while all messages of priority 9 move on."""
    reader = Moving(ReadOptions.parse({"root": str(queue.root.path), "queue": "q", **options}), struct(schema))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("schema", ["id string, value binary", "length bigint, value binary", LENGTHS])
@pytest.mark.parametrize("stays", [0, 1])
def test_a_message_that_moves_on_while_it_is_read_keeps_its_row_and_is_reported(
    queue: Queue, schema: str, stays: int, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send("goes", priority=9)
    for _ in range(stays):
        queue.send("stays")
    rows = read_moving(queue, schema)
    for column, value in (("length", 5), ("value", b"stays")):
        if column in rows[0]:
            assert [row[column] for row in rows] == [None, value][: 1 + stays]
    (message,) = caplog.messages
    assert message.startswith(f"1 messages left {queue.layout.target} while it was read: the first was 9.")


def test_what_nobody_looks_at_is_not_missed(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.send("goes", priority=9)
    assert [row["state"] for row in read_moving(queue, NAMES)] == ["target"]
    assert caplog.messages == []


def test_bodies_that_move_on_fail_the_read_and_are_found_in_its_other_states(queue: Queue) -> None:
    queue.send('{"priority": 1}\n{"priority": 2}\n')
    queue.send('{"priority": 3}\n', priority=9)
    with pytest.raises(NoSuchMessage) as caught:
        read_moving(queue, "priority int", bodyFormat="jsonl")
    assert "has left target/ since this read began, and is not in target, so its rows would be missing" in str(
        caught.value
    )
    queue.send('{"priority": 4}\n', priority=9)
    rows = read_moving(queue, "priority int", bodyFormat="jsonl", state="target,processed")
    assert [row["priority"] for row in rows] == [4, 1, 2, 3]
    queue.send('{"priority": 5}\n', priority=9)
    schema = "priority int, path string"
    rows = read_moving(queue, schema, bodyFormat="jsonl", badBodies="null", corruptRecordColumn="path")
    assert [row["priority"] for row in rows] == [None, 1, 2]
    assert (
        rows[0]["path"].startswith(queue.layout.target) and "has left target/ since this read began" in rows[0]["path"]
    )


def test_messages_that_move_on_have_their_values_where_the_read_has_their_next_state(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        queue.send(f"{number}", priority=9)
    rows = read_moving(queue, "state string, length bigint, value binary", state="target,processed")
    assert [(row["state"], row["length"], row["value"]) for row in rows] == [
        ("target", 1, body) for body in (b"0", b"1", b"2")
    ]
    assert caplog.messages == []


def test_a_frame_that_is_computed_again_is_complete_or_fails(spark: SparkSession, queue: Queue) -> None:
    for number in range(10):
        queue.send(f'{{"priority": {number}}}')
    alone = read(spark, queue, "priority int", bodyFormat="jsonl")
    whole = read(spark, queue, "priority int", bodyFormat="jsonl", state="target,processing,processed")
    assert (alone.count(), whole.count()) == (10, 10)
    with queue.subscribe(max_backlog=None) as subscription:
        messages = subscription.receive_many(6)
        for message in messages[:3]:
            message.ack()
        with pytest.raises(PySparkException, match="has left target/ since this read began"):
            alone.collect()
        assert sorted(row["priority"] for row in whole.collect()) == [*range(10)]
        for message in messages[3:]:
            message.release()  # under names that count the delivery
        assert sorted(row["priority"] for row in whole.collect()) == [*range(10)]


@pytest.mark.parametrize("value", ["jsonl", "value"])
def test_the_next_file_of_a_name_is_not_read_for_the_planned_one(queue: Queue, value: str) -> None:
    options, schema = ({"bodyFormat": "jsonl"}, "priority int") if value == "jsonl" else ({}, "value binary")
    planned, other = b'{"priority": 1}', b'{"priority": 2}'

    def rows(meanwhile: Callable[[], None], **more: str) -> list[Any]:
        given = ReadOptions.parse({"root": str(queue.root.path), "queue": "q", **options, **more})
        reader = QueueReader(given, struct(schema))
        parts = pickle.loads(pickle.dumps(reader.partitions()))
        meanwhile()
        found = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
        return [row.get("priority", row.get("value")) for row in found]

    def go_on() -> None:
        with queue.subscribe() as subscription:
            message = subscription.receive(None)
            assert message is not None
            message.ack()
        drop(queue, "report.csv", other)

    wanted = 1 if value == "jsonl" else planned
    drop(queue, "report.csv", planned)
    assert rows(lambda: None) == [wanted]
    if value == "jsonl":
        with pytest.raises(NoSuchMessage, match=r"report\.csv has left target/"):
            rows(go_on)
    else:
        assert rows(go_on) == [None]
    shutil.rmtree(queue.layout.processed)
    os.mkdir(queue.layout.processed)
    drop(queue, "report.csv", planned)
    assert rows(go_on, state="target,processing,processed") == [wanted]


def test_a_message_that_goes_back_between_two_listings_is_one_row(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(queue, 3)
    drop(queue, "report.csv", b"foreign")
    listed = browsing.listed_names
    with queue.subscribe(max_backlog=None) as subscription:
        messages = subscription.receive_many(4)

        def meanwhile(context: QueueContext, state: str, filter: str | None) -> Any:
            found = listed(context, state, filter)
            if state == "target":
                while messages:
                    messages.pop().release()
            return found

        monkeypatch.setattr(browsing, "listed_names", meanwhile)
        rows = list(read_here(queue, "state string, value binary", state="target,processing,processed"))
    found = sorted((row["state"], row["value"]) for row in rows)
    assert found == [("target", body) for body in (b"0", b"1", b"2", b"foreign")]


@pytest.mark.parametrize("message_id", [None, "chosen"])
def test_a_replayed_message_that_moves_on_behind_the_last_listing_keeps_its_row_beside_the_first(
    queue: Queue, message_id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("body", message_id=message_id)
    take(queue).ack()
    queue.replay()
    monkeypatch.setattr(planned, "RECENT", 0)
    next_moment(base(queue))
    left = planned._left
    moved: list[Message] = []

    def behind(*arguments: Any) -> Any:
        moved.append(take(queue))
        return left(*arguments)

    monkeypatch.setattr(planned, "_left", behind)
    rows = list(read_here(queue, "value string", state="target,processing,processed", bodyFormat="text"))
    assert len(moved) == 1
    assert [row["value"] for row in rows] == ["body", "body"]


def test_a_name_that_the_next_file_takes_between_two_listings_stands_for_the_first_alone(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(queue, "report.csv", b"first")
    listed = browsing.listed_names
    with queue.subscribe() as subscription:

        def meanwhile(context: QueueContext, state: str, filter: str | None) -> Any:
            if state == "processing" and not subscription.held:
                subscription.receive(None)
                drop(queue, "report.csv", b"second")
            return listed(context, state, filter)

        monkeypatch.setattr(browsing, "listed_names", meanwhile)
        rows = list(read_here(queue, "state string, value binary", state="target,processing"))
    assert [(row["state"], row["value"]) for row in rows] == [("processing", b"first")]


@pytest.mark.parametrize("state", ["target", "processing", "processing,processed"])
def test_a_file_that_one_listing_shows_twice_or_under_two_names_is_one_row(
    queue: Queue, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(queue, 3)
    drop(queue, "report.csv", b"foreign")
    listed = browsing.listed_names
    with queue.subscribe(max_backlog=None, lease_period=60) as subscription:
        messages = [] if state == "target" else subscription.receive_many(4)

        def meanwhile(context: QueueContext, state: str, filter: str | None) -> Any:
            before = listed(context, state, filter)
            for message in messages:
                message.extend(120)
            after = listed(context, state, filter)
            return browsing.ListedFiles([*before.names, *after.names], {**before.arrivals, **after.arrivals})

        monkeypatch.setattr(browsing, "listed_names", meanwhile)
        rows = list(read_here(queue, "value binary", state=state))
    assert sorted(row["value"] for row in rows) == [b"0", b"1", b"2", b"foreign"]


def test_a_host_that_sees_another_root_or_none_says_so_and_reads_nothing(queue: Queue) -> None:
    send(queue, 2)
    root = queue.root.path
    host = socket.gethostname()
    with queue.subscribe(max_backlog=None) as subscription:
        subscription.receive()
        held = f"{subscription.id}:1"
        readers = [
            QueueReader(ReadOptions.parse({"root": str(root), "queue": "q", **options}), struct(schema))
            for schema, options in (
                ("id string", {}),
                ("value binary", {}),
                ("priority int", {"bodyFormat": "jsonl", "badBodies": "null"}),
                ("value binary", {"claimed": held}),
            )
        ]
        planned = [(reader, part) for reader in readers for part in reader.partitions()]
        root.rename(root.with_name("away"))
        for reader, part in planned:
            with pytest.raises(
                NoSuchQueue, match=f"host {host} does not see queue q in {root}, and the driver sees it"
            ):
                list(reader.read(part))
        make_queue(root)
        for reader, part in planned:
            with pytest.raises(DropqError, match=f"host {host} has another root at {root} than the driver"):
                list(reader.read(part))
        shutil.rmtree(root)
        root.with_name("away").rename(root)


def test_a_frame_is_one_listing_and_what_comes_later_is_in_the_next(spark: SparkSession, queue: Queue) -> None:
    queue.send("first")
    frame = read(spark, queue)
    assert bodies(frame.collect()) == [b"first"]
    queue.send("second")
    assert bodies(read(spark, queue).collect()) == [b"first", b"second"]
    take(queue).ack()
    assert [row["value"] for row in frame.collect()] == [None]


# -- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filter", "count"),
    [
        ("JMSType = 'order' AND JMSPriority > 4", 5),
        ("JMSXDeliveryCount > 1", 6),
        ("n < 0", 5),
        ("JMSType IS NULL AND JMSMessageID LIKE 'ID:a report%'", 5),
    ],
)
def test_a_filter_chooses_as_a_browse_does(zoo: Queue, filter: str, count: int) -> None:
    rows = list(read_here(zoo, NAMES, state=",".join(STATES), filter=filter))
    assert sorted(row["path"] for row in rows) == [row["path"] for row in browsed(zoo, *STATES, filter=filter)]
    assert len(rows) == count


def test_spark_reads_what_a_filter_chooses(spark: SparkSession, zoo: Queue) -> None:
    filter = "region LIKE 'EU%' AND ok"
    rows = rows_of(read(spark, zoo, state="error,target", filter=filter))
    assert rows == browsed(zoo, "error", "target", filter=filter)
    assert len(rows) == 2


def test_a_bad_filter_fails_in_the_driver_with_its_column(spark: SparkSession, queue: Queue) -> None:
    with pytest.raises(AnalysisException, match=r"bad filter, column 5: expected a value, found ="):
        read(spark, queue, filter="a = = 3").collect()


def test_a_frame_reads_the_same_whatever_was_chosen_from_it_before(spark: SparkSession, queue: Queue) -> None:
    """Spark keeps what was last pushed for all uses of a frame: so nothing is pushed, also where a session would."""
    for priority in (1, 2, 3):
        queue.send(b"x", priority=priority)
    with setting(spark, PUSHES, "true"):
        frame = read(spark, queue, "priority int")
        assert [row.priority for row in frame.where("priority = 1").collect()] == [1]
        assert sorted(row.priority for row in frame.collect()) == [1, 2, 3]
        both = frame.where("priority = 1").union(frame.where("priority = 3"))
        assert sorted(row.priority for row in both.collect()) == [1, 3]


# -- the rows of bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_what_was_written_by_partition_is_read_back_as_the_same_rows(
    spark: SparkSession, queue: Queue, body_format: str
) -> None:
    columns = """
        id, concat('"é,\n', id) as str, id % 2 = 0 as yes, cast(id as decimal(20,5)) / 3 as dec,
        if(id = 3, null, id) gap, id / 3 as d,
        timestamp'2024-03-31 01:30:00.123456Z' + make_dt_interval(0, cast(id as int)) as at
    """
    frame = spark.sql(
        f"select {'line' if body_format == 'text' else columns} from range(0, 8, 1, 2)".replace(
            "line", "concat('é ', id) line"
        )
    )
    writer = frame.write.format("dropq").mode("append").options(root=str(queue.root.path), queue="q")
    dropq.spark.register(spark)
    writer.options(messagePer="partition", bodyFormat=body_format).save()
    assert queue.counts()["target"] == 2
    back = read(spark, queue, frame.schema, bodyFormat=body_format)
    assert sorted(back.collect(), key=str) == sorted(frame.collect(), key=str)


def test_a_line_of_text_is_a_row_without_any_schema(spark: SparkSession, queue: Queue) -> None:
    queue.send("first\n\nthird")
    frame = read(spark, queue, bodyFormat="text")
    assert frame.columns == ["value"]
    assert [row["value"] for row in frame.collect()] == ["first", "", "third"]
    with pytest.raises(AnalysisException, match="bodyFormat=text has one string column"):
        read(spark, queue, "a string, b string", bodyFormat="text").collect()


@pytest.mark.parametrize("body_format", BODY_FORMATS[:-1])
def test_bodies_without_a_schema_are_refused_with_what_to_do(body_format: str) -> None:
    with pytest.raises(ConfigError, match=rf"bodyFormat={body_format} needs the columns .*by \.schema"):
        DropqDataSource({"bodyformat": body_format}).schema()


def test_spark_refuses_bodies_without_a_schema(spark: SparkSession, queue: Queue) -> None:
    with pytest.raises(AnalysisException, match=r"bodyFormat=csv needs the columns .*by \.schema"):
        read(spark, queue, bodyFormat="csv")


@pytest.mark.parametrize(
    ("body_format", "kind", "said"),
    [
        ("csv", t.ArrayType(t.IntegerType()), r"column c is array<int>, which bodyFormat=csv does not hold"),
        ("jsonl", t.VariantType(), r"column c is variant, which bodyFormat=jsonl does not hold"),
        ("parquet", t.StructType(), r"column c is struct<>, which bodyFormat=parquet does not hold"),
        ("text", t.IntegerType(), r"column c is int, which bodyFormat=text does not hold"),
    ],
)
def test_columns_that_bodies_cannot_have_are_refused_in_the_driver(
    queue: Queue, body_format: str, kind: t.DataType, said: str
) -> None:
    source = DropqDataSource({"root": str(queue.root.path), "queue": "q", "bodyFormat": body_format})
    with pytest.raises(ConfigError, match=said):
        source.reader(t.StructType([t.StructField("c", kind)]))


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_a_bad_body_is_named_with_the_way_out(queue: Queue, body_format: str) -> None:
    queue.send(b"priority\n\xff{1\n")
    path = f"{queue.layout.target}/{names_in(queue, 'target')[0]}"
    with pytest.raises(DropqError, match=f"{path} cannot be read as {body_format} with this schema: .*bodyFormat"):
        list(read_here(queue, "id string" if body_format == "text" else "priority int", bodyFormat=body_format))


def test_what_sparks_own_csv_writes_is_read_as_it_was_and_never_otherwise(
    spark: SparkSession, queue: Queue, tmp_path: Path
) -> None:
    """Random texts of what separates, quotes and escapes; of one row a body, each is right, or its body is refused."""
    chance = random.Random(7)
    texts = ["".join(chance.choices('a,"\\\\ \n\r#', k=chance.randint(0, 6))) or "a" for _ in range(4000)]
    rows = [(number, texts[2 * number], texts[2 * number + 1]) for number in range(2000)]
    frame = spark.createDataFrame(rows, "k int, t string, u string").coalesce(1)
    writer = frame.write.option("header", True).option("ignoreLeadingWhiteSpace", False)
    writer.option("ignoreTrailingWhiteSpace", False).csv(str(tmp_path / "csv"))
    (part,) = (tmp_path / "csv").glob("part-*")
    body = part.read_bytes()
    queue.send(body)
    schema = "k int, t string, u string"
    options = {"bodyFormat": "csv", "escape": "\\"}
    assert [tuple(row) for row in read(spark, queue, schema, **options).collect()] == rows
    own = spark.read.schema(schema).option("header", True).option("multiLine", True).csv(str(tmp_path / "csv"))
    assert sorted(map(tuple, own.collect())) == rows  # Spark reads the same
    with pytest.raises(PySparkException, match=r"a closing quote|does not begin with one"):
        read(spark, queue, schema, bodyFormat="csv").collect()  # as if quotes were written twice


def test_spark_tells_which_body_is_bad(spark: SparkSession, queue: Queue) -> None:
    queue.send('{"a": 1}\n')
    queue.send("{")
    path = f"{queue.layout.target}/{names_in(queue, 'target')[1]}"
    with pytest.raises(PySparkException, match=f"{path} cannot be read as jsonl with this schema: line 1 is not JSON"):
        read(spark, queue, "a int", bodyFormat="jsonl").collect()


# -- a claiming batch ------------------------------------------------------------------------------------------------


def claim(spark: SparkSession, queue: Queue, n: int = 100, **options: Any) -> Any:
    return dropq.spark.claim(spark, queue, n, **options)


def send(queue: Queue, count: int) -> list[bytes]:
    for number in range(count):
        queue.send(str(number))
    return [str(number).encode() for number in range(count)]


def receipt(row: t.Row) -> str:
    return str(row["path"]).rpartition("/")[2]


def deliveries(queue: Queue, state: str) -> list[tuple[bytes, int]]:
    return sorted((message.body, message.delivery_count) for message in queue.browse(state))


def test_a_batch_is_the_same_messages_however_often_it_is_read_and_nobody_elses(
    spark: SparkSession, queue: Queue
) -> None:
    sent = send(queue, 5)
    with claim(spark, queue, 3) as frame:
        assert bodies(frame.collect()) == sent[:3]
        assert bodies(frame.collect()) == sent[:3]
        assert frame.alias("a").join(frame.alias("b"), "id").count() == 3
        assert {(row["state"], row["delivery_count"]) for row in frame.collect()} == {("processing", 1)}
        others = [message.body for message in iter(reopened(queue).receive, None)]
        assert others == sent[3:]
    assert where(queue) == {"processed": sent[:3], "processing": sent[3:]}


def test_a_batch_has_what_waits_where_less_waits_than_is_asked_for(spark: SparkSession, queue: Queue) -> None:
    with claim(spark, queue, 10) as frame:
        assert frame.collect() == []
    assert where(queue) == {}
    sent = send(queue, 2)
    with claim(spark, queue, 10) as frame:
        send(queue, 1)
        assert bodies(frame.collect()) == sent
    assert where(queue) == {"processed": sent, "target": [b"0"]}


def test_a_batch_of_foreign_files_has_the_times_of_their_contents(spark: SparkSession, queue: Queue) -> None:
    drop(queue, "report.csv", b"foreign")
    os.utime(base(queue) / "target" / "report.csv", ns=(1, 1700000000123 * 10**6))
    send(queue, 1)
    with claim(spark, queue) as frame:
        rows = {row["id"]: row for row in rows_of(frame)}
    assert rows["report.csv"]["timestamp"] == 1700000000123000
    assert (rows["report.csv"]["value"], len(rows)) == (b"foreign", 2)
    assert (base(queue) / "processed" / "report.csv").read_bytes() == b"foreign"


def test_a_batch_takes_a_filter_a_schema_and_the_options_of_a_read(spark: SparkSession, queue: Queue) -> None:
    queue.send('{"a": 1}\n{"a": 2}\n', type="jsonl")
    queue.send("other", type="text")
    batch = claim(spark, queue, filter="JMSType = 'jsonl'", schema="a int", bodyFormat="jsonl", numPartitions=1)
    with batch as frame:
        assert sorted(row["a"] for row in frame.collect()) == [1, 2]
    with claim(spark, queue, schema=NAMES) as frame:
        assert [tuple(row)[1:2] for row in frame.collect()] == [("processing",)]
    assert where(queue) == {"processed": sorted([b"other", b'{"a": 1}\n{"a": 2}\n'])}


@pytest.mark.parametrize("options", [{"state": "error"}, {"filters": "x"}, {"Root": "/elsewhere"}, {"claimed": "a:1"}])
def test_options_that_a_batch_would_not_heed_are_refused_and_nothing_is_lost(
    spark: SparkSession, queue: Queue, options: dict[str, Any]
) -> None:
    sent = send(queue, 1)

    def collect() -> None:
        with claim(spark, queue, **options) as frame:
            frame.collect()

    with pytest.raises(ConfigError, match=f"option {next(iter(options)).lower()} is unknown"):
        collect()
    assert deliveries(queue, "target") == [(sent[0], 0)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_returns_a_batch_with_the_delivery_counted(
    spark: SparkSession, queue: Queue, error: type[BaseException]
) -> None:
    sent = send(queue, 3)

    def stopped() -> None:
        with claim(spark, queue, 2) as frame:
            assert frame.columns == list(COLUMNS)
            raise error

    with pytest.raises(error):
        stopped()
    assert deliveries(queue, "target") == [(sent[0], 1), (sent[1], 1), (sent[2], 0)]
    assert where(queue) == {"target": sent}


def test_an_action_that_fails_returns_a_batch(spark: SparkSession, queue: Queue) -> None:
    sent = send(queue, 2)
    with pytest.raises(PySparkException), claim(spark, queue) as frame:
        frame.selectExpr("raise_error('boom')").collect()
    assert where(queue) == {"target": sent}


def test_messages_that_are_settled_inside_stay_what_they_were_settled_as(spark: SparkSession, queue: Queue) -> None:
    sent = send(queue, 4)
    with claim(spark, queue) as frame:
        rows = sorted(frame.collect(), key=lambda row: bytes(row["value"]))
        again = reopened(queue)
        again.claimed(receipt(rows[0])).ack()
        again.claimed(receipt(rows[1])).reject("bad")
        queue.claimed(receipt(rows[2])).nack()
    assert where(queue) == {"processed": [sent[0], sent[3]], "error": [sent[1]], "target": [sent[2]]}


REJECT = """\
import sys, dropq
dropq.Root(sys.argv[1]).queue("q").claimed(sys.argv[2]).reject("bad")
"""


def test_what_another_process_rejects_by_its_receipt_is_not_lost(spark: SparkSession, queue: Queue) -> None:
    sent = send(queue, 2)
    with claim(spark, queue, schema="path string") as frame:
        receipts = sorted(row["path"].rpartition("/")[2] for row in frame.collect())
        subprocess.run([sys.executable, "-c", REJECT, str(queue.root.path), receipts[0]], check=True)
    assert sorted(where(queue)) == ["error", "processed"]
    assert sorted(body for found in where(queue).values() for body in found) == sent


def test_what_another_consumer_took_and_settled_meanwhile_is_told(spark: SparkSession, queue: Queue) -> None:
    send(queue, 2)

    def lose() -> None:
        with claim(spark, queue):
            requeue(queue, first_held(queue))
            take(queue).ack()
            assert sorted(where(queue)) == ["processed", "processing"]

    with pytest.raises(LeaseLost, match=r"1 of 2 messages .* may be handled twice"):
        lose()
    assert where(queue) == {"processed": [b"0", b"1"]}


@pytest.mark.parametrize("schema", [None, LENGTHS])
def test_a_message_that_is_lost_fails_the_next_action_and_the_end_of_the_block(
    spark: SparkSession, queue: Queue, schema: str | None
) -> None:
    send(queue, 3)

    def lose() -> None:
        with claim(spark, queue, schema=schema) as frame:
            assert frame.count() == 3
            lost = first_held(queue)
            requeue(queue, lost)
            with pytest.raises(PySparkException, match=rf"LeaseLost: message {lost} was not read: its claim "):
                frame.collect()

    with pytest.raises(LeaseLost, match=r"1 of 3 messages of queue q, .* were not held any more"):
        lose()
    assert where(queue) == {"target": [b"0"], "processed": [b"1", b"2"]}


def test_a_batch_that_is_first_read_when_a_message_is_lost_fails_in_the_driver(
    spark: SparkSession, queue: Queue
) -> None:
    send(queue, 3)

    def lose() -> None:
        with claim(spark, queue) as frame:
            requeue(queue, first_held(queue))
            with pytest.raises(AnalysisException, match="2 of the 3 messages that were claimed from queue q"):
                frame.collect()

    with pytest.raises(LeaseLost):
        lose()


def requeue(queue: Queue, id: str) -> None:
    """Take a message away from who holds it, as administrators may."""
    assert [outcome.ok for outcome in queue.requeue([id], state="processing")] == [True]


def first_held(queue: Queue) -> str:
    return next(iter(queue.browse("processing"))).id


def test_a_frame_fails_when_its_block_is_over(spark: SparkSession, queue: Queue) -> None:
    send(queue, 2)
    with claim(spark, queue) as frame:
        assert frame.count() == 2
    with pytest.raises(PySparkException, match="LeaseLost"):
        frame.collect()


def test_leases_are_renewed_while_the_block_runs_and_renamed_files_are_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    queue = make_queue(tmp_path / "root", lease_period="1s")
    other = reopened(queue)
    sent = send(queue, 3)
    end = time.monotonic() + 3
    with claim(spark, queue) as frame:
        first = frame.collect()
        while time.monotonic() < end:
            other.sweep()
            assert other.receive() is None
            again = frame.collect()
            assert (bodies(again), [row["length"] for row in again]) == (sent, [1, 1, 1])
        assert not any(os.path.exists(row["path"]) for row in first)
        until(lambda: len(names_in(queue, "processing")) == 3, "a listing between two renewals")
    assert where(queue) == {"processed": sent}


def test_lengths_of_renamed_files_are_found_as_their_bodies_are(spark: SparkSession, tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", lease_period="300ms")
    send(queue, 3)
    with claim(spark, queue, schema=LENGTHS) as frame:
        first = frame.collect()
        until(lambda: not any(os.path.exists(row["path"]) for row in first), "renewed leases")
        assert [row["length"] for row in frame.collect()] == [1, 1, 1]


def test_a_loss_that_a_renewal_finds_out_is_told_at_the_end_of_the_block(spark: SparkSession, tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", lease_period="300ms")
    send(queue, 3)

    def lose() -> None:
        with claim(spark, queue):
            requeue(queue, first_held(queue))
            for _ in range(2):  # after the second renewal of the others the lost one was tried in any case
                await_renewal(queue)

    with pytest.raises(LeaseLost, match="1 of 3 messages"):
        lose()
    assert where(queue) == {"target": [b"0"], "processed": [b"1", b"2"]}


def await_renewal(queue: Queue) -> None:
    """Wait until all that is held has another name."""
    before = set(names_in(queue, "processing"))
    until(lambda: before.isdisjoint(names_in(queue, "processing")), "renewed leases")


def test_a_queue_that_delivers_at_most_once_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", semantics="at-most-once")
    sent = send(queue, 1)
    with pytest.raises(ConfigError, match=r'queue q has semantics = "at-most-once"'), claim(spark, queue):
        pass
    assert where(queue) == {"target": sent}


def test_a_batch_is_no_larger_than_the_queue_allows_a_subscription(spark: SparkSession, tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", max_per_subscription_backlog=2)
    sent = send(queue, 5)
    with claim(spark, queue, 4) as frame:
        assert bodies(frame.collect()) == sent[:2]
    assert where(queue) == {"processed": sent[:2], "target": sent[2:]}


# -- a driver of its own ---------------------------------------------------------------------------------------------

#: Reads a queue by a format that it has not registered, then claims from it, and stops for ever.
DRIVER = """
import sys, time
from pathlib import Path
import dropq
from dropq.spark import claim, register, session

root = Path(sys.argv[1])
spark = session("local[1]", app="dropq driver to be killed")
if " " in sys.executable:
    register(spark)
frame = spark.read.format("dropq").option("root", str(root)).option("queue", "q").load()
(root.parent / "read").write_text("".join(sorted(row["value"].decode() for row in frame.collect())))
with claim(spark, dropq.Root(root).queue("q"), 2) as frame:
    count = frame.count()
    (root.parent / "at-claim").write_text(str(count))
    while True:
        time.sleep(60)
"""


class Killed(NamedTuple):
    queue: Queue
    before: dict[str, list[bytes]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A queue of 3 whose 2 claims were held by a driver that was killed, Java and all, and what lay where before."""
    folder = tmp_path_factory.mktemp("killed")
    modules, log = folder / "modules", folder / "driver.log"
    modules.mkdir()
    shutil.copy(TOP / "pyspark_dropq.py", modules)
    queue = make_queue(folder / "root")
    send(queue, 3)
    command = [sys.executable, "-c", DRIVER, str(queue.root.path)]
    environment = {**os.environ, "PYTHONPATH": str(modules)}
    with log.open("wb") as output:
        driver = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            until(
                lambda: driver.poll() is not None or (folder / "at-claim").exists(),
                f"a driver that has claimed, see {log}",
            )
            assert driver.poll() is None, log.read_text()
            before = where(queue)
        finally:
            kill_session(driver.pid)
            driver.wait()
    return Killed(queue, before)


@pytest.mark.spark
@pytest.mark.skipif(" " in sys.executable, reason="Spark looks for formats only where its Python's path has no space")
def test_the_format_is_found_without_being_registered(killed: Killed) -> None:
    assert (killed.queue.root.path.parent / "read").read_text() == "012"


@pytest.mark.spark
def test_the_messages_of_a_driver_that_was_killed_return_with_a_sweep(killed: Killed) -> None:
    assert killed.before == {"processing": [b"0", b"1"], "target": [b"2"]}
    until(lambda: killed.queue.sweep() and not where(killed.queue).get("processing"), "the claims of the dead")
    assert deliveries(killed.queue, "target") == [(b"0", 1), (b"1", 1), (b"2", 0)]


def test_the_module_that_spark_looks_for_is_installed() -> None:
    setup = ConfigParser()
    setup.read(TOP / "setup.cfg")
    assert "pyspark_dropq" in setup["options"]["py_modules"].split()
    import pyspark_dropq

    assert pyspark_dropq.DefaultSource is DropqDataSource


# -- schemas -----------------------------------------------------------------------------------------------------------


def test_a_schema_is_inferred_from_what_waits_and_reads_it(spark: SparkSession, queue: Queue) -> None:
    make = queue.root.create_queue
    lines, table, columns = make("lines"), make("table"), make("columns")
    with pytest.raises(NoSuchMessage, match="no message waits in queue lines"):
        infer(spark, lines)
    lines.send('{"a":1,"b":{"c":[1.5]}}\n{"a":2,"d":true}\n')
    lines.send('{"a":null,"e":"2024-01-01T00:00:00Z"}')
    lines.send('{"later":1}')
    table.send("n;day;at\n1;2024-01-31;2024-01-31 10:00:00\nNULL;;\n2.5;;\n", type="csv")
    frame = spark.sql("select 1L n, timestamp_ntz'2024-01-31 10:00:00' at, timestamp'2024-01-31 10:00:00' then, 1.25 p")
    frame.write.format("dropq").mode("append").options(
        root=str(queue.root.path), queue="columns", messagePer="partition", bodyFormat="parquet"
    ).save()
    for waiting, options, found, rows in (
        (lines, {}, "struct<a:bigint,b:struct<c:array<double>>,d:boolean,e:string>", 4),
        (table, {"sep": ";", "nullValue": "NULL"}, "struct<n:double,day:date,at:string>", 3),
        (columns, {}, "struct<n:bigint,at:timestamp_ntz,then:timestamp,p:decimal(3,2)>", 1),
    ):
        schema = infer(spark, waiting.name, 2, root=queue.root.path, **options)
        assert schema.simpleString() == found
        body_format = next(waiting.browse()).type or "jsonl"
        reader = spark.read.format("dropq").options(root=str(queue.root.path), queue=waiting.name, **options)
        assert len(reader.option("bodyFormat", body_format).schema(schema).load().collect()) == rows
        assert waiting.counts()["processing"] == 0


@pytest.mark.parametrize(
    ("body", "options", "found", "rows"),
    [
        ('{"a":1,"t":"x\u2028y\x85"}\r\n\n', {"bodyFormat": "jsonl"}, "a:bigint,t:string", [(1, "x\u2028y\x85")]),
        (
            '\ufeffid,t,n\r\n1,"a\u2028b\x85",\r\n2,"two\r\n""lines""\n",3\r\n',
            {"bodyFormat": "csv"},
            "id:int,t:string,n:int",
            [(1, "a\u2028b\x85", None), (2, 'two\r\n"lines"\n', 3)],
        ),
        (
            "id;t\n1;'it\\'s\n\ntwo;'\n2;\"x",
            {"bodyFormat": "csv", "sep": ";", "quote": "'", "escape": "\\"},
            "id:int,t:string",
            [(1, "it's\n\ntwo;"), (2, '"x')],
        ),
    ],
)
def test_a_schema_is_inferred_from_the_lines_and_rows_that_are_read(
    spark: SparkSession, queue: Queue, body: str, options: dict[str, str], found: str, rows: list[Any]
) -> None:
    queue.send(body.encode())
    schema = infer(spark, queue, **options)
    assert schema.simpleString() == f"struct<{found}>"
    reader = spark.read.format("dropq").options(root=str(queue.root.path), queue=queue.name, **options)
    assert [tuple(row) for row in reader.schema(schema).load().collect()] == rows
