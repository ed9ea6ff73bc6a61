"""Streams out of queues and into them: each message once, whoever stops, fails or is killed amid a batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import Clock, base, events, first_and_long, make_queue, names_in, sums, until, where
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.types import LongType, StringType, StructType
from stream_driver import STOPS, start
from test_spark_writer import kill_session

import dropq.spark
from dropq import DropqError, Queue
from dropq.spark.columns import SCHEMA
from dropq.spark.datasource import DropqDataSource
from dropq.spark.streams import Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Seconds that a query may take on a busy machine.
PATIENCE = 600

Rows = list[tuple[str, bytes]]


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


@pytest.fixture
def out(queue: Queue) -> Queue:
    return queue.root.create_queue("out", durability="none")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def stream(spark: SparkSession, queue: Queue, *, schema: str | None = None, **options: object) -> DataFrame:
    """The messages of a queue as they come."""
    dropq.spark.register(spark)
    reader = spark.readStream.format("dropq").option("root", str(queue.root.path)).option("queue", queue.name)
    if schema is not None:
        reader = reader.schema(schema)
    for key, value in options.items():
        reader = reader.option(key, str(value))
    return reader.load()


def send(frame: DataFrame, queue: Queue, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    """Start a query that sends the column `value` to a queue."""
    dropq.spark.register(frame.sparkSession)
    writer = frame.select("value").writeStream.format("dropq").option("checkpointLocation", str(checkpoint))
    writer = writer.option("root", str(queue.root.path)).option("queue", queue.name)
    return writer.trigger(**(trigger or {"availableNow": True})).start()


def work(frame: DataFrame, checkpoint: Path, each: Callable[[DataFrame, int], None], **trigger: Any) -> StreamingQuery:
    """Start a query that gives each batch to a function."""
    writer = frame.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
    return writer.trigger(**(trigger or {"availableNow": True})).start()


def ended(query: StreamingQuery) -> StreamingQuery:
    """Wait for the end of a query; raise what it failed with."""
    try:
        assert query.awaitTermination(PATIENCE), "the query does not end"
    finally:
        query.stop()
    return query


def rows(frame: DataFrame) -> Rows:
    return sorted((row.id, bytes(row.value)) for row in frame.select("id", "value").collect())


def bodies(count: int, first: int = 0) -> list[bytes]:
    return sorted(b"%d" % number for number in range(first, first + count))


def fill(queue: Queue, count: int, first: int = 0) -> None:
    queue.send_many([b"%d" % number for number in range(first, first + count)])


def below(queue: Queue, *folders: str) -> list[str]:
    """All that lies in a folder of the queue, hidden files too."""
    found = base(queue).joinpath(*folders)
    return sorted(str(path.relative_to(found)) for path in found.rglob("*")) if found.exists() else []


def batches_written_down(queue: Queue) -> list[str]:
    """The batches of streams. Who read stays known for a while: Spark kills that process rather than let it end."""
    return [name for name in below(queue, ".dropq", "streams") if name.endswith(".json")]


def input_rows(query: StreamingQuery) -> list[int]:
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


# -- out of a queue ----------------------------------------------------------------------------------------------------


def test_a_stream_from_queue_to_queue_moves_each_message_once(
    spark: SparkSession, queue: Queue, out: Queue, checkpoint: Path
) -> None:
    fill(queue, 10)
    query = ended(send(stream(spark, queue, maxMessagesPerTrigger=4), out, checkpoint))
    assert input_rows(query) == [4, 4, 2]
    assert where(out) == {"target": bodies(10)}
    assert where(queue) == {"processed": bodies(10)}
    assert batches_written_down(queue) == []
    assert below(out, "working") == below(queue, "working") == []
    assert len(below(out, ".dropq", "ledger")) == 1


def test_a_query_of_what_is_available_now_leaves_what_comes_later(
    spark: SparkSession, queue: Queue, checkpoint: Path
) -> None:
    fill(queue, 3)
    read: list[Rows] = []

    def each(frame: DataFrame, batch: int) -> None:
        read.append(rows(frame))
        queue.send(b"later %d" % batch, priority=9)

    ended(work(stream(spark, queue, maxMessagesPerTrigger=2), checkpoint, each))
    assert [len(batch) for batch in read] == [2, 1]
    assert where(queue) == {"processed": bodies(3), "target": [b"later 0", b"later 1"]}


def test_acks_follow_while_a_query_runs_and_a_query_that_is_stopped_is_gone_on_with(
    spark: SparkSession, queue: Queue, out: Queue, checkpoint: Path
) -> None:
    fill(queue, 12)
    frame = stream(spark, queue, maxMessagesPerTrigger=2)
    query = send(frame, out, checkpoint, processingTime="0 seconds")
    try:
        until(lambda: len(names_in(queue, "processed")) >= 4, "acks of a running query", timeout=PATIENCE)
        assert query.isActive
    finally:
        query.stop()
    stopped = Counter(body for lying in where(queue).values() for body in lying)
    assert stopped == Counter(bodies(12))
    fill(queue, 3, first=12)
    ended(send(frame, out, checkpoint))
    assert where(out) == {"target": bodies(15)}
    assert where(queue) == {"processed": bodies(15)}
    assert batches_written_down(queue) == []


def test_a_batch_that_failed_is_read_again_with_the_same_messages(
    spark: SparkSession, queue: Queue, checkpoint: Path
) -> None:
    fill(queue, 7)
    read: list[tuple[int, Rows]] = []
    failing = [True]

    def each(frame: DataFrame, batch: int) -> None:
        read.append((batch, rows(frame)))
        if batch == 2 and failing:
            raise ValueError("no third batch")

    frame = stream(spark, queue, maxMessagesPerTrigger=2)
    with pytest.raises(StreamingQueryException, match="no third batch"):
        ended(work(frame, checkpoint, each))
    assert where(queue) == {"processed": bodies(4), "processing": bodies(2, first=4), "target": bodies(1, first=6)}
    queue.send(b"urgent", priority=9)
    failing.clear()
    ended(work(frame, checkpoint, each))
    assert [batch for batch, _ in read] == [0, 1, 2, 2, 3]
    assert read[2] == read[3]
    assert sorted(body for _, batch in [*read[:3], *read[4:]] for _, body in batch) == [*bodies(7), b"urgent"]
    assert where(queue) == {"processed": [*bodies(7), b"urgent"]}


def test_bodies_of_a_format_are_read_as_their_rows(
    spark: SparkSession, queue: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    queue.send(b'{"store": 1, "item": "a"}\n{"store": 1, "item": "b"}\n')
    queue.send(b'{"store": 2}\n')
    frame = stream(spark, queue, schema="store long, item string", bodyFormat="jsonl", filter="JMSPriority < 9")
    queue.send(b"none of these", priority=9)
    writer = frame.writeStream.format("json").option("path", str(tmp_path / "lines"))
    ended(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start())
    found = spark.read.schema("store long, item string").json(str(tmp_path / "lines")).collect()
    assert sorted((row.store, row.item or "") for row in found) == [(1, "a"), (1, "b"), (2, "")]
    assert where(queue)["target"] == [b"none of these"]
    assert len(where(queue)["processed"]) == 2


def test_leases_are_renewed_while_a_batch_takes_its_time(spark: SparkSession, queue: Queue, checkpoint: Path) -> None:
    fill(queue, 2)
    seen: set[int] = set()
    read: list[bytes] = []

    def deadlines() -> set[int]:
        return {int(name.split(",")[1]) for name in names_in(queue, "processing")}

    def renewed_twice(first: int) -> bool:
        seen.update(deadlines())
        return sum(deadline > first for deadline in seen) >= 2 and Clock().ms > first

    def each(frame: DataFrame, batch: int) -> None:
        first = max(deadlines())
        until(lambda: renewed_twice(first), "leases that were renewed twice")
        queue.sweep()
        read.extend(body for _, body in rows(frame))

    ended(work(stream(spark, queue, leasePeriod="2s"), checkpoint, each))
    assert read == bodies(2)
    assert where(queue) == {"processed": bodies(2)}
    assert all("JMSXDeliveryCount" not in name for name in names_in(queue, "processed"))


def test_a_row_can_be_rejected_by_its_receipt(spark: SparkSession, queue: Queue, checkpoint: Path) -> None:
    fill(queue, 5)

    def each(frame: DataFrame, batch: int) -> None:
        bad = frame.where("cast(value as string) = '3'").select("path").collect()
        for row in bad:
            queue.claimed(os.path.basename(row.path)).reject("no threes")

    ended(work(stream(spark, queue, maxMessagesPerTrigger=3), checkpoint, each))
    assert where(queue) == {"processed": [b"0", b"1", b"2", b"4"], "error": [b"3"]}
    (rejected,) = queue.browse(state="error")
    assert rejected.reason is not None
    assert rejected.reason["detail"] == "no threes"
    assert batches_written_down(queue) == []


# -- into a queue ------------------------------------------------------------------------------------------------------


def lines(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of text files, one of them a batch."""
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(folder))


def put(folder: Path, name: str, *texts: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder.parent / name).write_text("".join(f"{text}\n" for text in texts))
    os.rename(folder.parent / name, folder / name)


def test_an_epoch_that_is_run_again_sends_nothing_twice(
    spark: SparkSession, out: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    for number in range(3):
        put(tmp_path / "in", f"{number}.txt", f"{number} a", f"{number} b")
    everything = sorted(f"{number} {part}".encode() for number in range(3) for part in "ab")
    ended(send(lines(spark, tmp_path / "in"), out, checkpoint))
    assert where(out) == {"target": everything}
    (entry,) = below(out, ".dropq", "ledger")
    newest = max(int(name) for name in os.listdir(checkpoint / "commits") if name.isdecimal())
    assert entry.endswith(f".{newest}.json")
    for name in (f"{newest}", f".{newest}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    put(tmp_path / "in", "3.txt", "3 a")
    query = ended(send(lines(spark, tmp_path / "in"), out, checkpoint))
    assert input_rows(query) == [2, 1], "the last epoch was not run again"
    assert where(out) == {"target": sorted([*everything, b"3 a"])}
    assert below(out, "working") == []
    assert len(below(out, ".dropq", "ledger")) == 1


def test_an_epoch_that_a_queue_is_too_full_for_goes_to_its_overflow_selector_once(
    spark: SparkSession, queue: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    small = queue.root.create_queue("small", durability="none", max_unprocessed=3)
    rest = queue.root.create_queue("rest", durability="none")
    small.add_selector("rest", to="rest", role="overflow")
    for number in range(3):
        put(tmp_path / "in", f"{number}.txt", f"{number} a", f"{number} b")
    ended(send(lines(spark, tmp_path / "in"), small, checkpoint))
    first, others = where(small)["target"], where(rest)["target"]
    assert (len(first), len({body[:1] for body in first})) == (2, 1)
    assert sorted([*first, *others]) == sorted(f"{number} {part}".encode() for number in range(3) for part in "ab")
    newest = max(int(name) for name in os.listdir(checkpoint / "commits") if name.isdecimal())
    for name in (f"{newest}", f".{newest}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    list(small.purge(state="target"))  # makes room for the epoch that is run again
    query = ended(send(lines(spark, tmp_path / "in"), small, checkpoint))
    assert input_rows(query) == [2], "the last epoch was not run again"
    assert (where(small), where(rest)) == ({}, {"target": others})
    assert (below(small, "working"), below(rest, "working")) == ([], [])


def test_an_epoch_that_was_aborted_sends_nothing_and_its_next_run_sends_it_once(
    spark: SparkSession, out: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    put(tmp_path / "in", "0.txt", "good")
    frame = lines(spark, tmp_path / "in")
    ended(send(frame, out, checkpoint))
    put(tmp_path / "in", "1.txt", *(f"{number}" for number in range(20)), "bad")
    failing = frame.selectExpr("if(value = 'bad', raise_error('a bad line'), value) as value")
    with pytest.raises(StreamingQueryException, match="a bad line"):
        ended(send(failing, out, checkpoint))
    assert where(out) == {"target": [b"good"]}
    assert below(out, "working") == []
    ended(send(frame, out, checkpoint))
    assert where(out) == {"target": sorted([*bodies(20), b"bad", b"good"])}
    assert below(out, "working") == []


def test_an_output_mode_of_whole_tables_is_refused_and_so_is_an_option_that_streams_have_not(
    spark: SparkSession, out: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    put(tmp_path / "in", "0.txt", "a")
    frame = lines(spark, tmp_path / "in")
    dropq.spark.register(spark)
    for rows, mode, options, said in (
        (frame.groupBy("value").count().select("value"), "complete", {}, "outputMode complete is refused"),
        (frame, "append", {"jobId": "mine"}, "option jobid is unknown"),
    ):
        writer = rows.writeStream.format("dropq").outputMode(mode).option("root", str(out.root.path))
        writer = writer.option("queue", "out").options(**options).option("checkpointLocation", f"{checkpoint}-{mode}")
        query = writer.trigger(availableNow=True)
        with pytest.raises(PySparkException, match=said):
            ended(query.start())
    assert (where(out), below(out, "working"), below(out, ".dropq", "ledger")) == ({}, [], [])


VALUES = StructType().add("value", StringType())


@pytest.mark.parametrize(
    ("options", "schema", "said"),
    [
        ({"messagesPer": "row"}, VALUES, "option messagesper is unknown: did you mean messagePer"),
        ({"jobId": "mine"}, VALUES, r"option jobid is unknown: .*save\(\) takes root, queue, topic, messagePer"),
        ({"bodyFormat": "csv"}, VALUES, "needs messagePer=partition"),
        ({"queue": "nowhere"}, VALUES, "nowhere"),
        ({}, StructType().add("value", LongType()), "column value is bigint, and must be string or binary"),
    ],
)
def test_what_a_stream_cannot_write_is_refused(
    queue: Queue, options: dict[str, str], schema: StructType, said: str
) -> None:
    source = DropqDataSource({"root": str(queue.root.path), "queue": "q", "checkpointLocation": "/c", **options})
    with pytest.raises(DropqError, match=said):
        source.streamWriter(schema, overwrite=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": "error"}, "option state is unknown"),
        ({"claimed": "x:1"}, "option claimed is unknown"),
        ({"pushdown": "true"}, "option pushdown is unknown"),
        ({"leasePeriod": "0"}, "needs a lease, such as 10m"),
        ({"leasePeriod": "soon"}, "option leasePeriod = 'soon'"),
        ({"maxMessagesPerTrigger": "0"}, "'0': a whole number from 1"),
        ({"maxMessagePerTrigger": "1"}, "did you mean maxMessagesPerTrigger"),
        ({"filter": "priority ="}, "priority ="),
        ({"queue": "nowhere"}, "nowhere"),
        ({"queue": "once"}, "at-most-once"),
    ],
)
def test_what_a_stream_cannot_read_is_refused(queue: Queue, options: dict[str, str], said: str) -> None:
    fill(queue, 1)
    queue.root.create_queue("once", semantics="at-most-once")
    with pytest.raises(DropqError, match=said):
        asked(queue, options)
    assert where(queue) == {"target": [b"0"]}
    assert below(queue, ".dropq", "streams") == []


def asked(queue: Queue, options: dict[str, str]) -> Offset:
    """Ask a stream for its first offset, as Spark does."""
    reader: Any = DropqDataSource({"root": str(queue.root.path), "queue": "q", **options}).streamReader(SCHEMA)
    offset: Offset = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    return offset


def test_spark_may_name_where_its_checkpoint_is(queue: Queue) -> None:
    fill(queue, 3)
    assert asked(queue, {"checkpointLocation": "/c", "maxmessagespertrigger": "2", "CLIENTID": "me"})["batch"] == 1
    assert [name.split("-")[0] for name in names_in(queue, "processing")] == ["me", "me"]


@pytest.mark.parametrize("level", first_and_long(["all", "failures"]))
def test_the_log_tells_each_message_of_a_stream_once_though_spark_kills_its_reader(
    spark: SparkSession, tmp_path: Path, level: str
) -> None:
    queue = make_queue(tmp_path / "root", log=level)
    fill(queue, 5)
    fails = iter([False, True])

    def each(frame: DataFrame, batch: int) -> None:
        frame.collect()
        if next(fails, False):
            raise RuntimeError("once")

    query = stream(spark, queue, maxMessagesPerTrigger=2)
    with pytest.raises(PySparkException, match="once"):
        ended(work(query, tmp_path / "checkpoint", each))
    ended(work(query, tmp_path / "checkpoint", each))
    ids = sorted(message.id for message in queue.browse("processed"))
    assert len(ids) == 5
    acked = [str(event.fields["id"]) for event in events(queue) if event.event == "acked"]
    assert sorted(acked) == (ids if level == "all" else [])
    assert sums(queue) == {"acked": 5}


# -- a driver that is killed -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_driver_killed_in_the_middle_of_a_batch_is_gone_on_with_by_another(
    spark: SparkSession, queue: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    fill(queue, 8)
    read, log = tmp_path / "read.json", tmp_path / "driver.log"
    script = Path(__file__).with_name("stream_driver.py")
    arguments = str(queue.root.path), str(checkpoint), str(read)
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdout=output, stderr=output, start_new_session=True
        )
        try:
            done = read.with_suffix(".done")
            until(lambda: driver.poll() is not None or done.exists(), f"a second batch, see {log}", timeout=PATIENCE)
            assert driver.poll() is None, log.read_text()
        finally:
            kill_session(driver.pid)
            driver.wait()
    assert where(queue) == {"processed": bodies(3), "processing": bodies(3, first=3), "target": bodies(2, first=6)}
    queue.send(b"urgent", priority=9)
    start(spark, str(queue.root.path), str(checkpoint), read)
    batches = [json.loads(line) for line in read.read_text().splitlines()]
    assert [batch for batch, _ in batches] == [0, STOPS, STOPS, 2]
    assert batches[1] == batches[2]
    of_each = Counter(body for batch, of_batch in [*batches[:2], *batches[3:]] for _, body in of_batch)
    assert of_each == Counter([*(f"{number}" for number in range(8)), "urgent"])
    assert where(queue) == {"processed": [*bodies(8), b"urgent"]}
    assert batches_written_down(queue) == []
