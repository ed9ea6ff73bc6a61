"""Jobs that send what was claimed: nothing is acknowledged that was not sent, and nothing is sent twice for a crash."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import base, died, drop, first_and_long, make_queue, names_in, next_moment, take, where
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType
from test_spark_streams import below

import dropq.spark
from dropq import DropqError, Queue
from dropq.events.log import OUTCOMES
from dropq.events.reader import Reader
from dropq.spark.columns import SCHEMA
from dropq.spark.datasource import DropqDataSource
from dropq.spark.open_claims import SETTING, OpenClaims, claim_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


@pytest.fixture
def out(queue: Queue) -> Queue:
    return queue.root.create_queue("out", durability="none")


def claimed(spark: SparkSession, queue: Queue) -> Any:
    return dropq.spark.claim(spark, queue, 10)


def save(frame: DataFrame, out: Queue, job_id: str) -> None:
    writer = frame.select("value").write.format("dropq").mode("append").option("root", str(out.root.path))
    writer.option("queue", out.name).option("jobId", job_id).save()


def test_a_job_that_was_sent_before_is_an_error_in_a_block_and_acknowledges_nothing(
    spark: SparkSession, queue: Queue, out: Queue
) -> None:
    def night(job_id: str) -> None:
        with claimed(spark, queue) as frame:
            save(frame, out, job_id)

    queue.send("10")
    night("2026-11-22")
    assert (where(queue), where(out)) == ({"processed": [b"10"]}, {"target": [b"10"]})
    night("2026-11-22")  # nothing is claimed, and nothing is to be sent
    queue.send("99")
    with pytest.raises(PySparkException) as caught:
        night("2026-11-22")
    assert "job 2026-11-22 was sent to queue out before, and a claim is open" in str(caught.value)
    assert 'Name the job after what is claimed: jobId="{claim}"' in str(caught.value)
    assert (where(queue), where(out)) == ({"processed": [b"10"], "target": [b"99"]}, {"target": [b"10"]})
    night("{claim}")
    assert (where(queue), where(out)) == ({"processed": [b"10", b"99"]}, {"target": [b"10", b"99"]})
    assert spark.conf.get(SETTING) == ""
    assert below(out, "working") == []
    save(spark.sql("select 'x' as value"), out, "2026-11-22")  # no claim is open: this writes nothing, as ever
    assert where(out) == {"target": [b"10", b"99"]}


def test_a_block_that_runs_again_for_an_error_after_its_write_sends_its_messages_once(
    spark: SparkSession, queue: Queue, out: Queue
) -> None:
    def block(*, fails: bool) -> None:
        with claimed(spark, queue) as frame:
            save(frame, out, "sums-{claim}")
            if fails:
                raise ValueError("after the write")

    queue.send("10")
    drop(queue, "report.csv", b"20")
    for _ in range(2):
        with pytest.raises(ValueError, match="after the write"):
            block(fails=True)
        assert (where(queue), where(out)) == ({"target": [b"10", b"20"]}, {"target": [b"10", b"20"]})
    block(fails=False)
    assert (where(queue), where(out)) == ({"processed": [b"10", b"20"]}, {"target": [b"10", b"20"]})


@pytest.mark.parametrize("level", first_and_long(["all", "failures"]))
def test_the_log_tells_each_message_of_a_block_once_and_its_job_once(
    spark: SparkSession, tmp_path: Path, level: str
) -> None:
    queue = make_queue(tmp_path / "root", log=level)
    out = queue.root.create_queue("out", durability="none")
    ids = [sent.id for sent in queue.send_many([b"1", b"2", b"3"])]

    def block(*, fails: bool) -> None:
        with claimed(spark, queue) as frame:
            assert frame.count() == 3
            save(frame, out, "{claim}")
            if fails:
                raise ValueError("after the write")

    with pytest.raises(ValueError, match="after the write"):
        block(fails=True)
    block(fails=False)
    lines, totals = told(queue)
    ends = {"returned": 1, "acked": 2} if level == "all" else {"returned": 1}  # with the number of the delivery
    assert lines == Counter((event, id, number) for event, number in ends.items() for id in ids)
    assert totals == {"returned": 3, "acked": len(names_in(queue, "processed"))} == {"returned": 3, "acked": 3}
    assert [event.fields["count"] for event in Reader(out.layout.log).events() if event.event == "committed"] == [3]


def told(queue: Queue) -> tuple[Counter[tuple[object, ...]], Counter[str]]:
    """What a queue's log says: how deliveries to Spark ended, with ids and numbers; and the totals of its sums."""
    lines, totals = Counter[tuple[object, ...]](), Counter[str]()
    for event in Reader(queue.layout.log).events():
        if event.event == "sum":
            totals.update({key: int(value) for key, value in event.fields.items() if key in OUTCOMES})
        elif str(event.fields.get("owner")).startswith("spark-"):
            lines[event.event, event.fields["id"], event.fields["delivery"]] += 1
    return lines, totals


def test_two_writes_of_a_block_under_one_name_are_an_error_and_two_claims_have_one_name(
    spark: SparkSession, queue: Queue, out: Queue
) -> None:
    queue.send("10")

    def block() -> None:
        with claimed(spark, queue) as frame:
            save(frame, out, "{claim}")
            save(frame.selectExpr("cast('more' as binary) as value"), out, "{claim}")

    with pytest.raises(PySparkException, match="by another write of this block"):
        block()
    assert (where(queue), where(out)) == ({"target": [b"10"]}, {"target": [b"10"]})
    other = queue.root.create_queue("other", durability="none")
    other.send("20")
    with claimed(spark, queue) as frame, claimed(spark, other) as second:
        save(frame.union(second), out, "{claim}")
    assert where(out) == {"target": [b"10", b"10", b"20"]}
    assert len(max(below(out, ".dropq", "ledger"), key=len)) == len(f"{'0' * 41}.json")


def test_a_job_that_is_named_after_a_claim_is_refused_where_none_is_open(spark: SparkSession, out: Queue) -> None:
    with pytest.raises(PySparkException, match="no claim is open in this session; nothing was sent"):
        save(spark.sql("select 'x' as value"), out, "{claim}")
    assert (where(out), below(out, "working")) == ({}, [])
    long = DropqDataSource({"root": str(out.root.path), "queue": "out", "jobId": "{claim}" + "x" * 90})
    with pytest.raises(ValueError, match=r"job id .*: give 1 to 100 bytes"):
        long.writer(StructType([SCHEMA["value"]]), False)


def test_a_run_that_is_overtaken_at_its_commit_is_an_error_in_a_block(
    queue: Queue, out: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]

    setting = "0123.1"
    monkeypatch.setattr("dropq.spark.writer._local_property", lambda name: setting if name == SETTING else None)

    def writer() -> Any:
        address = {"root": str(out.root.path), "queue": "out", "jobId": "daily"}
        return DropqDataSource(address).writer(StructType([SCHEMA["value"]]), False)

    def rows() -> Iterator[pa.RecordBatch]:
        return iter([pa.RecordBatch.from_pylist([{"value": b"x"}])])

    first, second = writer(), writer()
    staged = [first.write(rows())], [second.write(rows())]
    first.commit(staged[0])
    with pytest.raises(DropqError, match="job daily was sent to queue out before, and a claim is open"):
        second.commit(staged[1])
    assert where(out) == {"target": [b"x"]}


def test_the_same_messages_make_the_same_claim_however_they_came_back(queue: Queue) -> None:
    def claim() -> str:
        with queue.subscribe(max_backlog=None) as subscription:
            return claim_id(queue.context, subscription.receive_many(10))

    assert claim() != claim()  # of nothing: nothing that was sent is what this one sends
    queue.send("1")
    queue.send("2", message_id="order-7")
    drop(queue, "report.csv", b"3")
    first = claim()
    assert len(first) == 20 and claim() == first
    died(take(queue))
    queue.sweep()
    with queue.subscribe(max_backlog=None) as subscription:
        messages = subscription.receive_many(10)
        assert claim_id(queue.context, messages) == first
        for message in messages:
            message.ack()
    assert len(queue.requeue(state="processed")) == 3
    again = claim()
    assert again != first and claim() == again
    for name in os.listdir(queue.layout.target):
        os.unlink(f"{queue.layout.target}/{name}")
    drop(queue, "report.csv", b"3")
    one = claim()
    for name in os.listdir(queue.layout.target):
        os.unlink(f"{queue.layout.target}/{name}")
    drop(queue, "report.csv", b"3")
    assert claim() != one  # the next file of the name


def test_files_that_a_killed_process_held_at_their_first_delivery_make_the_same_claim_again(queue: Queue) -> None:
    for name in ("report.csv", "y" * 250):
        drop(queue, name, b"3")
    next_moment(base(queue))
    claims = []
    for _ in range(3):
        with queue.subscribe(max_backlog=None) as subscription:
            messages = subscription.receive_many(10)
            assert len(messages) == 2
            claims.append(claim_id(queue.context, messages))
            for message in messages:
                assert message._claim is not None
                message._claim.arrival = 0  # a sweep does not know it
                died(message)
    assert len({*claims}) == 1


def test_the_setting_tells_which_claims_are_open() -> None:
    assert OpenClaims.of(None) is OpenClaims.of("") is None
    assert OpenClaims.of("b.2 a.1") == OpenClaims.of("a.1 b.2") == ("a-b", "1-2", True)
    assert OpenClaims.of("none-a.1") == ("none-a", "1", False)
    assert OpenClaims.of("none-a.1 b.2") == ("b-none-a", "2-1", True)
