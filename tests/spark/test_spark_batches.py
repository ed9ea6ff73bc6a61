"""What surrounds a stream: jobs named by query and batch, the backlog in its progress, output modes, and topics."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from helpers import FRESH, Clock, make_queue, timed, where
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.types import StructType
from test_spark_streams import below, bodies, ended, fill, lines, put, send, stream, work

import dropq.spark
from dropq import ConfigError, DropqError, InvalidFilter, NoSuchQueue, Queue, Root, StorageError
from dropq.spark.columns import SCHEMA
from dropq.spark.datasource import DropqDataSource
from dropq.spark.options import ReadOptions, WriteOptions
from dropq.spark.streams import Backlog, QueueStreamReader
from dropq.spark.writer import QueueWriter
from dropq.storage.files import Storage
from dropq.upkeep.sweep import UPKEEP_INTERVAL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLACE = {"root": "/r", "queue": "q"}


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


@pytest.fixture
def out(queue: Queue) -> Queue:
    return queue.root.create_queue("out", durability="none")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def save(frame: DataFrame, out: Queue, job_id: str) -> None:
    writer = frame.write.format("dropq").mode("append").option("root", str(out.root.path)).option("queue", out.name)
    writer.option("jobId", job_id).save()


# -- jobs of batches ---------------------------------------------------------------------------------------------------


def test_a_batch_that_comes_again_sends_nothing_under_its_query_and_number(
    spark: SparkSession, queue: Queue, out: Queue, checkpoint: Path
) -> None:
    fill(queue, 3)
    failing = [True]

    def each(frame: DataFrame, batch: int) -> None:
        save(frame.select("value"), out, "{query}-{batch}")
        if batch == 0:
            save(frame.where("false").select("value"), out, "{query}-{batch}-empty")
        if batch == 1 and failing:
            raise ValueError("after the write")

    frame = stream(spark, queue, maxMessagesPerTrigger=2)
    with pytest.raises(StreamingQueryException, match="after the write"):
        ended(work(frame, checkpoint, each))
    assert where(out) == {"target": bodies(3)}
    failing.clear()
    fill(queue, 1, first=3)
    query = ended(work(frame, checkpoint, each))
    assert where(out) == {"target": bodies(4)}
    assert where(queue) == {"processed": bodies(4)}
    assert below(out, "working") == []
    assert below(out, ".dropq", "ledger") == [f"{query.id}-%7Bbatch%7D.2.json"]


def test_a_batch_that_was_overtaken_is_refused_instead_of_dropped(
    spark: SparkSession, out: Queue, checkpoint: Path, tmp_path: Path
) -> None:
    def each(frame: DataFrame, batch: int) -> None:
        save(frame, out, "{query}-{batch}")

    put(tmp_path / "in", "0.txt", "a")
    put(tmp_path / "in", "1.txt", "b")
    ended(work(lines(spark, tmp_path / "in"), checkpoint, each))
    for folder, first in (("offsets", 1), ("commits", 0)):  # a copy of the checkpoint, from before batch 0 was done
        for number in range(first, 2):
            for name in (f"{number}", f".{number}.crc"):
                (checkpoint / folder / name).unlink(missing_ok=True)
    with pytest.raises(StreamingQueryException, match=r"epoch 0 of .* was not sent, as epoch 1 was sent before"):
        ended(work(lines(spark, tmp_path / "in"), checkpoint, each))
    assert where(out) == {"target": [b"a", b"b"]}
    assert below(out, "working") == []


def test_tasks_that_know_no_batch_refuse_a_job_named_by_it_and_say_the_way(spark: SparkSession, out: Queue) -> None:
    dropq.spark.register(spark)
    with pytest.raises(PySparkException) as caught:
        save(spark.sql("select 'x' as value"), out, "{query}-{batch}")
    assert "only within foreachBatch, and not under Spark Connect; nothing was sent" in str(caught.value)
    assert 'f"{checkpoint_name}-{batch}"' in str(caught.value)
    assert (where(out), below(out, "working")) == ({}, [])


@pytest.mark.parametrize(
    ("job_id", "said"),
    [
        ("{query}", "needs {batch}, too: else only the first batch would be sent"),
        ("{batch}", "needs {query}, too: a new checkpoint counts from 0 again"),
        ("{claim}-{batch}", "{claim} is for claim(), and the others are for foreachBatch"),
        ("{query}-{number}", "only {query}, {batch} and {claim} may be in braces"),
        ("{batch}}", "only {query}, {batch} and {claim} may be in braces"),
    ],
)
def test_a_job_id_that_would_name_many_batches_alike_is_refused(job_id: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WriteOptions.parse({**PLACE, "jobId": job_id})
    assert said in str(caught.value)


def test_a_job_id_that_grows_too_long_with_its_batches_is_refused_at_the_first(out: Queue) -> None:
    address = {"root": str(out.root.path), "queue": "out"}
    values = StructType([SCHEMA["value"]])
    DropqDataSource({**address, "jobId": "{query}-{batch}-" + "x" * 50}).writer(values, False)
    with pytest.raises(ValueError, match=r"job id .*: give 1 to 100 bytes"):
        DropqDataSource({**address, "jobId": "{query}-{batch}-" + "x" * 60}).writer(values, False)
    assert below(out, "working") == []


# -- the backlog -------------------------------------------------------------------------------------------------------


def test_the_progress_of_a_query_says_what_waits_and_since_when(
    spark: SparkSession, queue: Queue, checkpoint: Path
) -> None:
    fill(queue, 5)
    times = [message.timestamp for message in queue.browse()]
    first, second, third, fourth, last = [message.size() for message in queue.browse()]
    sizes = [first + second, third + fourth, last]
    query = ended(
        work(stream(spark, queue, maxMessagesPerTrigger=2), checkpoint, lambda frame, batch: frame.foreach(print))
    )
    reports = [json.loads(p.sources[0].latestOffset) for p in query.recentProgress if p.numInputRows]
    assert [(report["batch"], report["waiting"]) for report in reports] == [(1, 3), (2, 1), (3, 0)]
    assert [report["bytes"] for report in reports] == sizes
    said = [report["oldest"] for report in reports]
    assert said == [*(time.isoformat(timespec="milliseconds").replace("+00:00", "Z") for time in times[2::2]), None]
    ends = {json.loads(p.sources[0].endOffset)["stream"] for p in query.recentProgress}
    assert {report["stream"] for report in reports} == ends


def test_a_batch_has_few_bytes_and_the_progress_says_how_many_bodies_were_rejected(
    spark: SparkSession, queue: Queue, checkpoint: Path
) -> None:
    bodies = ['{"a": 1}\n', "no json", '{"a": 2}\n' * 100, '{"a": 3}\n', '{"a": 4}\n']
    queue.send_many(bodies)
    given = {"bodyFormat": "jsonl", "badBodies": "reject", "maxBytesPerTrigger": "16"}
    found: list[list[int]] = []
    reader = spark.readStream.format("dropq").options(root=str(queue.root.path), queue="q", **given).schema("a int")
    query = ended(work(reader.load(), checkpoint, lambda frame, batch: found.append([a for (a,) in frame.collect()])))
    assert found == [[1], [2] * 100, [3, 4]]
    reports = [json.loads(p.sources[0].latestOffset) for p in query.recentProgress if p.numInputRows]
    assert [(report["bytes"], report["rejected"]) for report in reports] == [(16, 0), (900, 1), (18, 1)]


def test_a_backlog_counts_messages_alone_and_lists_a_large_queue_seldom(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(queue.layout.target)
    monkeypatch.setattr("dropq.spark.streams.KEPT", 0)
    backlog = Backlog(queue.context)
    assert backlog.report() == {"waiting": 0, "oldest": None}
    (target / "report.csv").write_text("foreign")
    (target / ".hidden").write_text("no message")
    (target / "half.tmp").write_text("no message")
    assert backlog.report() == {"waiting": 1, "oldest": None}
    sent = queue.send("x")
    assert backlog.report()["waiting"] == 2
    assert datetime.fromisoformat(backlog.report()["oldest"]).timestamp() == int(sent.id[:13]) / 1000
    monkeypatch.setattr("dropq.spark.streams.KEPT", 10**9)
    kept = backlog.report()
    queue.send("y")
    assert backlog.report() == kept
    reader = QueueStreamReader(ReadOptions.parse({"root": str(queue.root.path), "queue": "q"}, stream=True), SCHEMA)
    assert reader.reportLatestOffset() is None  # before the first look


# -- output modes ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_query_that_spark_refuses_for_its_mode_keeps_its_claims_for_the_next_run(
    spark: SparkSession, queue: Queue, out: Queue, checkpoint: Path
) -> None:
    """Spark asks for the writer when the first batch is planned; the batch is claimed by then."""
    fill(queue, 3)
    frame = stream(spark, queue)
    writer = frame.select("value").writeStream.format("dropq").outputMode("update").option("queue", "out")
    writer = writer.option("root", str(queue.root.path)).option("checkpointLocation", str(checkpoint))
    with pytest.raises(PySparkException, match="does not support Update mode"):
        ended(writer.trigger(availableNow=True).start())
    assert where(queue) == {"processing": bodies(3)}
    ended(send(frame, out, checkpoint))
    assert (where(queue), where(out)) == ({"processed": bodies(3)}, {"target": bodies(3)})


# -- topics ------------------------------------------------------------------------------------------------------------


def test_a_stream_publishes_to_a_topic_and_another_takes_from_a_subscription(
    spark: SparkSession, queue: Queue, out: Queue, checkpoint: Path
) -> None:
    root = queue.root
    topic = root.create_topic("sales.eu", durability="none")
    audit = topic.create_subscription("audit", client_id="hq")
    stock = root.create_topic("sales").create_subscription("stock", client_id="hq")
    fill(queue, 3)
    frame = stream(spark, queue).select("value")
    writer = frame.writeStream.format("dropq").option("root", str(root.path)).option("topic", "sales.eu")
    ended(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start())
    published = spark.read.format("dropq").option("root", str(root.path)).option("topic", "sales.eu").load()
    assert sorted(bytes(row.value) for row in published.collect()) == bodies(3)
    ended(send(stream(spark, audit), out, checkpoint.with_name("other")))  # its consumer distributes
    assert (where(audit), where(out)) == ({"processed": bodies(3)}, {"target": bodies(3)})
    assert (where(stock), where(topic.queue)) == ({"target": bodies(3)}, {"processed": bodies(3)})


def test_a_commit_to_a_topic_that_ends_half_way_is_finished_by_a_consumer_of_a_subscription(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = timed(Root.create(tmp_path / "root", clock=clock), replace(FRESH, first_upkeep=0))
    topic = root.create_topic("sales", durability="none")
    audit, stock = (topic.create_subscription(name, client_id="hq") for name in ("audit", "stock"))
    writer = QueueWriter.begin(WriteOptions.parse({"root": str(root.path), "topic": "sales"}))
    staged = writer.write(iter([pa.RecordBatch.from_pylist([{"value": f"{number}"} for number in range(6)])]))
    real = Storage.rename_all_exclusive

    def rename_all_exclusive(storage: Storage, source: str, destination: str, files: Sequence[str]) -> list[str]:
        return real(storage, source, destination, files[:4]) + list(files[4:])

    def rename_guarded(storage: Storage, *names: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "rename_all_exclusive", rename_all_exclusive)
        patch.setattr(Storage, "rename_guarded", rename_guarded)
        with pytest.raises(StorageError, match="is committed"):
            writer.commit([staged])
    assert len(where(topic.queue)["target"]) == 4
    clock.advance(UPKEEP_INTERVAL + 1)
    got = []
    with root.queue(audit.name).subscribe() as subscription:
        for _ in range(8):
            if (message := subscription.receive()) is not None:
                got.append(message.body)
                message.ack()
    assert sorted(got) == bodies(6)
    assert (where(stock), where(topic.queue)) == ({"target": bodies(6)}, {"processed": bodies(6)})
    assert below(topic.queue, "working") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "q", "topic": "sales"}, "give one of the two"),
        ({"topic": "sales/audit.hq"}, "give it as option queue"),
        ({}, r"option queue is missing: give the options root and queue, or topic; in SQL, say WITH \(root = "),
    ],
)
def test_a_place_that_is_no_queue_and_no_topic_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReadOptions.parse({"root": "/r", **options})


def test_a_topic_is_not_taken_from_and_a_queue_is_no_topic(queue: Queue) -> None:
    address: dict[str, Any] = {"root": str(queue.root.path)}
    with pytest.raises(ConfigError, match="give a subscription of it as the queue"):
        ReadOptions.parse({**address, "topic": "sales"}, stream=True)
    with pytest.raises(NoSuchQueue, match="'q' is a queue, and no topic"):
        WriteOptions.parse({**address, "topic": "q"}).open()
    with pytest.raises(NoSuchQueue, match="no topic 'nope'"):
        WriteOptions.parse({**address, "topic": "nope"}).open()


# -- the queue that is meant -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_queue_is_refused_before_anything_is_claimed(queue: Queue, out: Queue) -> None:
    fill(queue, 2)
    fill(out, 2)

    def reader(name: str) -> QueueStreamReader:
        options = ReadOptions.parse({"root": str(queue.root.path), "queue": name}, stream=True)
        return QueueStreamReader(options, SCHEMA)

    first = reader("q")
    begun = first.initialOffset()
    offset = first.latestOffset(begun, first.getDefaultReadLimit())
    first.stop()
    assert offset == {**begun, "batch": 1}
    other = reader("out")
    said = "the checkpoint of this query belongs to another queue than out in "
    with pytest.raises(ConfigError, match=said):
        other.latestOffset(offset, other.getDefaultReadLimit())
    with pytest.raises(ConfigError, match=said):
        other.partitions(begun, offset)
    with pytest.raises(ConfigError, match=said):
        other.commit(offset)
    other.stop()
    assert (where(queue), where(out)) == ({"processing": bodies(2)}, {"target": bodies(2)})
    again = reader("q")
    assert again.latestOffset(offset, again.getDefaultReadLimit()) == offset
    again.stop()
    assert where(queue) == {"processed": bodies(2)}
    older = {"stream": "stream-1", "batch": 0}  # says nothing of its queue
    third = reader("out")
    assert third.latestOffset(older, third.getDefaultReadLimit()) == {**older, "batch": 1}
    third.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_on_a_host_that_has_another_root_stages_nothing(
    queue: Queue, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.spark.writer._query_and_batch", lambda: ("query", "0"))
    source = DropqDataSource({"root": str(queue.root.path), "queue": "q"})
    values = StructType([SCHEMA["value"]])
    writer: Any = source.streamWriter(values, False) if stream else source.writer(values, False)
    rows = [pa.RecordBatch.from_pylist([{"value": b"x"}])]
    root = queue.root.path
    root.rename(root.with_name("away"))
    for there, said in ((False, "does not see queue q in "), (True, "has another root at ")):
        if there:
            make_queue(root)
        with pytest.raises(DropqError, match=f"host {socket.gethostname()} {said}"):
            writer.write(iter(rows))
    assert below(Root(root).queue("q"), "working") == []


# -- filters -----------------------------------------------------------------------------------------------------------


def test_a_stream_refuses_a_filter_by_a_column_when_it_begins_and_not_when_it_goes_on(queue: Queue) -> None:
    options = ReadOptions.parse({"root": str(queue.root.path), "queue": "q", "filter": "priority > 4"}, stream=True)
    QueueStreamReader(options, SCHEMA).initialOffset()  # nothing waits
    fill(queue, 2)
    with pytest.raises(InvalidFilter, match="for the column priority say JMSPriority"):
        QueueStreamReader(options, SCHEMA).initialOffset()
    reader = QueueStreamReader(options, SCHEMA)
    begun = {"stream": "stream-1", "batch": 0}
    assert reader.latestOffset(begun, reader.getDefaultReadLimit()) == begun
    reader.stop()
    assert where(queue) == {"target": bodies(2)}
