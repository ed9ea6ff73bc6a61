"""What becomes of bodies that do not fit the schema: the query fails, or the message is rejected, or there are nulls.

Most of it is read in this process, as Spark's workers would do it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import Run, base, drop, make_queue, reopened, where
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import types as t

import dropq.spark
from dropq import ConfigError, DropqError, LeaseLost, Message, Queue, Root, Subscription
from dropq.queue.bad_bodies import BadBodyNotes, reject_bad
from dropq.queue.stream_journal import batch_key
from dropq.spark.datasource import DropqDataSource
from dropq.spark.options import BODY_FORMATS
from dropq.spark.reader import bad_body_notes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Two rows, of which the second is bad; and a row.
BAD, GOOD = b'{"a": 1}\n{"a": no}\n', b'{"a": 2}\n'
A = t.StructType().add("a", t.LongType())
PROBLEM = "cannot be read as jsonl with this schema: line 2 is not JSON"


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


@pytest.fixture
def root(queue: Queue) -> Root:
    """The root of the fixture `run`."""
    return queue.root


def source(queue: Queue, **options: object) -> DropqDataSource:
    given = {"root": str(queue.root.path), "queue": queue.name, "bodyFormat": "jsonl", **options}
    return DropqDataSource({key: str(value) for key, value in given.items()})


def rows(reader: Any, parts: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of parts as tasks do."""
    for part in pickle.loads(pickle.dumps(parts)):
        yield from (row for batch in pickle.loads(pickle.dumps(reader)).read(part) for row in batch.to_pylist())


def table(queue: Queue, schema: t.StructType = A, **options: object) -> list[dict[str, Any]]:
    reader: Any = source(queue, **options).reader(schema)
    return list(rows(reader, reader.partitions()))


class Batch:
    """A claiming batch whose frame is read in this process."""

    def __init__(self, queue: Queue, *, n: int = 10, **options: object) -> None:
        self.subscription: Subscription = queue.subscribe(client_id="spark", max_backlog=None)
        self.messages: list[Message] = self.subscription.receive_many(n)
        self.claimed = f"{self.subscription.id}:{len(self.messages)}"
        self.notes: BadBodyNotes = bad_body_notes(queue.context, self.claimed)
        self.notes.begin()
        self.reader: Any = source(queue, claimed=self.claimed, **options).reader(A)
        self.parts: Any = self.reader.partitions()

    def read(self) -> list[int]:
        return [row["a"] for row in rows(self.reader, self.parts)]

    def bad(self) -> list[bytes]:
        """The bodies that were found bad."""
        keys = self.notes.keys()
        return [message.body for message in self.messages if batch_key(message.file) in keys]


# -- fail --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body_format", BODY_FORMATS)
def test_the_error_names_the_message_and_the_options_that_go_past_it(queue: Queue, body_format: str) -> None:
    queue.send(b"priority\n\xff{1\n")
    schema = t.StructType().add("priority", t.StringType() if body_format == "text" else t.LongType())
    (name,) = os.listdir(queue.layout.target)
    said = (
        f"^{queue.layout.target}/{name} cannot be read as {body_format} with this schema: .*badBodies=null .*bodyFormat"
    )
    with pytest.raises(DropqError, match=said):
        table(queue, schema, bodyFormat=body_format)


def test_the_command_in_the_error_rejects_the_message(queue: Queue, run: Run) -> None:
    drop(queue, "it's bad.jsonl", BAD)
    batch = Batch(queue)
    with pytest.raises(DropqError, match=f"{PROBLEM}.* and badBodies=reject every such message$") as caught:
        batch.read()
    program, *arguments = shlex.split(str(caught.value).split("`")[1])
    assert (program, run(*arguments).code) == ("dropq", 0)
    assert where(queue) == {"error": [BAD]}


# -- reject ------------------------------------------------------------------------------------------------------------


def test_a_bad_body_has_no_rows_and_its_message_stays_claimed_until_the_batch_is_settled(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many([GOOD, BAD, BAD])
    batch = Batch(queue, badBodies="reject", numPartitions=1)
    with caplog.at_level(logging.WARNING, "dropq"):
        assert batch.read() == [2]
    assert len(where(queue)["processing"]) == 3
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == ["2 messages"]
    assert PROBLEM in caplog.text
    reject_bad({batch_key(message.file): message for message in batch.messages}, batch.notes.reasons())
    assert where(queue) == {"processing": [GOOD], "error": [BAD, BAD]}
    for message in queue.browse("error"):
        assert message.reason is not None
        assert (message.reason["reason"], PROBLEM in str(message.reason["detail"])) == ("rejected", True)


def test_each_try_of_a_task_has_the_same_rows_when_leases_were_renewed_and_messages_settled(queue: Queue) -> None:
    queue.send_many([GOOD, BAD, GOOD])
    batch = Batch(queue, badBodies="reject", numPartitions=1)
    assert batch.read() == [2, 2]
    for message in batch.messages:
        message.extend("1h")
    assert batch.read() == [2, 2]
    batch.messages[1].reject("by the query itself")
    assert batch.read() == [2, 2]
    batch.messages[2].nack()
    with pytest.raises(LeaseLost):
        batch.read()


def test_two_tries_of_a_task_may_find_the_same_message_bad(queue: Queue) -> None:
    queue.send_many([GOOD, BAD])
    batch = Batch(queue, badBodies="reject", numPartitions=1)
    tries = [rows(batch.reader, batch.parts) for _ in range(2)]
    assert [next(each)["a"] for each in tries] == [2, 2]
    assert [list(each) for each in tries] == [[], []]
    assert batch.bad() == [BAD]


def test_a_try_that_dies_before_it_noted_a_bad_body_leaves_that_to_the_next(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(BAD)
    batch = Batch(queue, badBodies="reject")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BadBodyNotes, "add", die)
        with pytest.raises(KeyboardInterrupt):
            batch.read()
    assert batch.bad() == []
    assert batch.read() == []
    assert batch.bad() == [BAD]


@given(st.lists(st.sampled_from([GOOD, BAD, b"", b"\xff", b"{}\n", b'{"a": 1}\n' * 3]), max_size=12), st.integers(1, 4))
@settings(max_examples=25)
def test_whatever_bodies_come_in_whatever_order_the_good_have_all_rows_and_the_bad_none(
    sent: list[bytes], tasks: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        queue = make_queue(Path(folder) / "root")
        queue.send_many(sent)
        batch = Batch(queue, n=len(sent) or 1, badBodies="reject", numPartitions=tasks)
        bad = [body for body in sent if body in (BAD, b"\xff")]
        rows = [
            json.loads(line).get("a") for body in sent if body not in bad for line in body.splitlines() if line.strip()
        ]
        assert (batch.read(), batch.read()) == (rows, rows)
        assert sorted(batch.bad()) == sorted(bad)
        batch.subscription.close()


# -- null --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["_corrupt_record", "problem"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_body_is_a_row_of_nulls_with_its_error_where_a_column_is_for_that(
    queue: Queue, column: str, place: int
) -> None:
    queue.send_many([GOOD, BAD, b'{"a": 3, "problem": "no column of the body"}'])
    fields = [t.StructField("a", t.LongType())]
    fields.insert(place, t.StructField(column, t.StringType()))
    named = {"corruptRecordColumn": column} if column == "problem" else {}
    found = table(queue, t.StructType(fields), badBodies="null", numPartitions=1, **named)
    error = found[1].pop(column)
    assert error.startswith(f"{queue.layout.target}/")
    assert PROBLEM in error
    assert found == [{"a": 2, column: None}, {"a": None}, {"a": 3, column: None}]
    assert [list(row) for row in (found[0], found[2])] == [[field.name for field in fields]] * 2


def test_a_bad_body_is_a_row_of_nulls_where_no_column_is_for_its_error(queue: Queue) -> None:
    queue.send_many([BAD, GOOD])
    assert table(queue, badBodies="null") == [{"a": None}, {"a": 2}]
    assert len(where(queue)["target"]) == 2


def test_the_name_of_a_bad_message_may_be_any_bytes(queue: Queue) -> None:
    (base(queue) / "target" / os.fsdecode(b"\xff.jsonl")).write_bytes(BAD)
    (row,) = table(queue, t.StructType([*A, t.StructField("_corrupt_record", t.StringType())]), badBodies="null")
    assert "\ufffd.jsonl" in row["_corrupt_record"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def of_table(queue: Queue, **options: object) -> object:
    return source(queue, **options).reader(A)


def of_stream(queue: Queue, **options: object) -> object:
    return source(queue, **options).streamReader(A)


def of_claim(queue: Queue, **options: object) -> object:
    return source(queue, claimed="spark-0000000000:1", **options).reader(A)


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        (of_table, {"badBodies": "reject"}, "'reject': only streams and claim.* fail or null is allowed"),
        (of_stream, {"badBodies": "null"}, "'null': only a table has rows of nulls.* fail or reject is allowed"),
        (of_claim, {"badBodies": "null"}, "'null': only a table has rows of nulls.* fail or reject is allowed"),
        (of_table, {"badBodies": "drop"}, "option badBodies = 'drop': fail or null is allowed"),
        (of_stream, {"badBodies": "drop"}, "option badBodies = 'drop': fail or reject is allowed"),
        (of_table, {"badBodies": "fail", "corruptRecordColumn": "a"}, "corruptRecordColumn needs badBodies=null"),
        (of_table, {"badBodies": "null", "corruptRecordColumn": ""}, "corruptRecordColumn is empty"),
        (of_table, {"badBodies": "null", "corruptRecordColumn": "a"}, "column a is bigint, .* a string"),
        (of_stream, {"corruptRecordColumn": "a"}, "option corruptrecordcolumn is unknown"),
    ],
)
def test_options_that_are_not_for_this_use_are_refused(
    queue: Queue, use: Callable[..., object], options: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        use(queue, **options)


def test_bad_bodies_need_a_format(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="option badBodies needs bodyFormat"):
        DropqDataSource({"root": str(queue.root.path), "queue": "q", "badBodies": "fail"}).reader(A)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (t.StructType().add("a", t.LongType(), nullable=False), "column a is declared NOT NULL, and badBodies=null"),
        (t.StructType().add("_corrupt_record", t.StringType()), "it names no column of the bodies"),
    ],
)
def test_a_schema_that_no_row_of_nulls_fits_is_refused(queue: Queue, schema: t.StructType, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        table(queue, schema, badBodies="null")


# -- Spark -------------------------------------------------------------------------------------------------------------


def test_a_batch_rejects_its_bad_messages_and_acknowledges_the_others_when_its_block_ends(
    spark: SparkSession, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many([GOOD, BAD, GOOD])
    with dropq.spark.claim(spark, queue, 10, schema="a long", bodyFormat="jsonl", badBodies="reject") as frame:
        assert [[row.a for row in frame.collect()] for _ in range(2)] == [[2, 2]] * 2
        assert len(where(queue)["processing"]) == 3
    assert where(queue) == {"processed": [GOOD, GOOD], "error": [BAD]}
    assert "1 of 3 messages of queue q were rejected for their bodies, such as " in caplog.text
    assert os.listdir(queue.layout.streams) == []


def test_an_exception_returns_the_bad_messages_of_a_batch_with_the_others(spark: SparkSession, queue: Queue) -> None:
    queue.send_many([GOOD, BAD])

    def stopped() -> None:
        with dropq.spark.claim(spark, queue, 10, schema="a long", bodyFormat="jsonl", badBodies="reject") as frame:
            assert frame.count() == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stopped()
    assert where(queue) == {"target": sorted([GOOD, BAD])}
    assert os.listdir(queue.layout.streams) == []


def test_a_stream_goes_past_bad_messages_also_when_it_failed_and_is_started_again(
    spark: SparkSession, queue: Queue, tmp_path: Path
) -> None:
    queue.send_many([GOOD, BAD, b'{"a": 3}', b"worse", b'{"a": 4}'])
    dropq.spark.register(spark)
    reader = spark.readStream.format("dropq").option("root", str(queue.root.path)).option("queue", queue.name)
    reader = reader.option("bodyFormat", "jsonl").option("badBodies", "reject").option("maxMessagesPerTrigger", 2)
    found: list[tuple[int, list[int]]] = []

    def keep(frame: DataFrame, batch: int) -> None:
        found.append((batch, sorted(row.a for row in frame.collect())))
        if len(found) == 2:
            raise RuntimeError("once")

    def start() -> StreamingQuery:
        writer = reader.schema("a long").load().writeStream.foreachBatch(keep)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()

    with pytest.raises(StreamingQueryException, match="once"):
        start().awaitTermination(60)
    assert start().awaitTermination(60)
    assert found == [(0, [2]), (1, [3]), (1, [3]), (2, [4])]
    assert where(reopened(queue)) == {
        "processed": sorted([GOOD, b'{"a": 3}', b'{"a": 4}']),
        "error": sorted([BAD, b"worse"]),
    }
