"""Many rows in a message: rows as records, a message for each key, and the headers that options give to all of them.

Most tests call the writer as Spark's driver and tasks do, without a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from helpers import make_queue
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema
from test_spark_writer import save

from dropq import ConfigError, Message, Queue, Typed
from dropq.records.formats import check_record
from dropq.spark.options import WriteOptions
from dropq.spark.writer import QueueWriter, cut

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


def write(queue: Queue, *tasks: pa.Table, rows: int = 4, **options: object) -> list[Message]:
    """Write tables as a job of so many tasks, in batches of a few rows; return the messages of the queue."""
    given = {key: str(value) for key, value in options.items()}
    parsed = WriteOptions.parse({"root": str(queue.root.path), "queue": "q", **given})
    parsed.check_columns(from_arrow_schema(tasks[0].schema))
    writer = QueueWriter.begin(parsed)
    try:
        writer.commit([writer.write(iter(task.combine_chunks().to_batches(max_chunksize=rows))) for task in tasks])
    except BaseException:
        writer.abort([])
        raise
    return list(queue.browse())


def values(*texts: str | bytes, **columns: Sequence[Any]) -> pa.Table:
    return pa.table({"value": list(texts), **columns})


def nothing(queue: Queue) -> bool:
    """Whether a job left nothing: no message, and nothing that is staged."""
    working = Path(queue.layout.working)
    return not list(queue.browse()) and not [*working.iterdir()] if working.exists() else True


# -- rows as records ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sent", "body_format"),
    [
        ({}, values("a", "b"), "text"),
        ({}, values(b"a", b"b\n"), "frames"),
        ({"bodyFormat": "frames"}, values("a", "b\n"), "frames"),
        ({"bodyFormat": "jsonl"}, values('{"a":1}', "2"), "jsonl"),
        ({"bodyFormat": "text"}, values(b"a", b"\xff"), "text"),
    ],
)
def test_rows_are_records_of_a_bundle_whose_type_is_their_format(
    queue: Queue, options: dict[str, Any], sent: pa.Table, body_format: str
) -> None:
    (message,) = write(queue, sent, recordsPerMessage=10, **options)
    assert (message.type, message.message_class, message.record_count) == (body_format, "B", sent.num_rows)
    expected = [value.encode() if isinstance(value, str) else value for value in sent["value"].to_pylist()]
    assert records(queue) == [expected]


def records(queue: Queue) -> list[list[bytes]]:
    """Receive all messages by their records."""
    found = []
    with queue.subscribe(max_backlog=100) as subscription:
        while (message := subscription.receive()) is not None:
            found.append([record.data for record in message.records()])
            message.ack()
    return found


#: What any format holds, and what some of them refuse.
RECORDS = st.one_of(
    st.binary(min_size=1, max_size=9), st.sampled_from([b"\xef\xbb\xbf", b"\xef\xbb\xbfx", b"\r", b"x\r", b"\n", b""])
)


@given(
    sent=st.lists(RECORDS, min_size=1, max_size=12),
    most=st.integers(1, 5),
    rows=st.integers(1, 5),
    body_format=st.sampled_from(["text", "frames", "jsonl"]),
)
def test_every_record_is_read_as_it_was_written_or_refused_as_every_writer_of_records_does(
    tmp_path_factory: pytest.TempPathFactory, sent: list[bytes], most: int, rows: int, body_format: str
) -> None:
    queue = make_queue(tmp_path_factory.mktemp("root") / "root", durability="none")
    send = partial(write, queue, values(*sent), rows=rows, recordsPerMessage=most, bodyFormat=body_format)
    refused = [number for number, record in enumerate(sent) if not is_record(record, body_format)]
    if refused:
        with pytest.raises(ValueError, match=rf"^row {refused[0]} of partition 0 \(from 0\)"):
            send()
        assert nothing(queue)
        return
    send()
    read = records(queue)
    assert list(chain(*read)) == sent
    assert [len(bundle) for bundle in read[:-1]] == [most] * (len(read) - 1)


def is_record(record: bytes, body_format: str) -> bool:
    try:
        check_record(record, body_format)
    except ValueError:
        return False
    return True


def test_a_record_longer_than_the_queue_reads_is_refused(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", max_record_bytes=10)
    assert len(write(queue, values("x" * 10), recordsPerMessage=2)) == 1
    with pytest.raises(ValueError, match=r"row 1 of .*whose value begins with 'xxxx.*max_record_bytes allows 10"):
        write(queue, values("y", "x" * 11), recordsPerMessage=2)


def test_what_cannot_be_a_record_names_its_row_its_value_and_the_way_out(queue: Queue) -> None:
    long = "x" * 50
    with pytest.raises(ValueError, match=rf"row 5 of partition 0 .*begins with '{'x' * 40}'.*bodyFormat=frames"):
        write(queue, values(*"abcde", f"{long}\n"), recordsPerMessage=3)
    with pytest.raises(ValueError, match=r"row 1 of .*\): the record is empty"):
        write(queue, values("a", ""), recordsPerMessage=3)
    with pytest.raises(ValueError, match=r"row 4 of .*value is null"):
        write(queue, values(*"abcd", None), recordsPerMessage=3)  # type: ignore[arg-type]
    assert nothing(queue)


def test_rows_share_a_message_as_long_as_their_headers_are_equal(queue: Queue) -> None:
    eu, us = [("region", "EU"), ("gone", None)], [("region", "US")]
    table = values(
        *"abcdefg",
        priority=pa.array([5, 5, None, None, None, None, 5]),
        properties=pa.array([eu, eu, eu, eu, us, us, us], pa.map_(pa.string(), pa.string())),
    )
    messages = write(queue, table, recordsPerMessage=3, properties="kind:I=7,region=none", priority="2")
    assert [(m.priority, m.body, m.properties) for m in messages] == [
        (5, b"a\nb\n", {"region": "EU", "kind": 7}),
        (5, b"g\n", {"region": "US", "kind": 7}),
        (2, b"c\nd\n", {"region": "EU", "kind": 7}),
        (2, b"e\nf\n", {"region": "US", "kind": 7}),
    ]


def test_a_header_that_no_message_can_have_names_the_first_row_that_has_it(queue: Queue) -> None:
    table = values(*"abcdef", delay=[None, None, None, None, "soon", "soon"])
    with pytest.raises(ValueError, match=r"row 4 of .*begins with 'e'.*'soon' is not a duration"):
        write(queue, table, recordsPerMessage=10)
    assert nothing(queue)


cells = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.sampled_from([1, None])), max_size=20)


@given(rows=cells, most=st.none() | st.integers(1, 5), batch=st.integers(1, 6))
def test_a_message_ends_where_a_shared_column_changes_or_when_it_is_full(
    rows: list[tuple[str | None, int | None]], most: int | None, batch: int
) -> None:
    table = pa.table(
        {"a": pa.array([a for a, _ in rows], pa.string()), "b": pa.array([b for _, b in rows], pa.int8()),
         "n": range(len(rows))}
    )  # fmt: skip
    batches: Iterable[pa.RecordBatch] = table.to_batches(max_chunksize=batch) if rows else []
    parts = list(cut(batches, lambda part: [part["a"], part["b"]], most))
    assert [number for part in parts for number in part.batch["n"].to_pylist()] == list(range(len(rows)))
    assert [part.row for part in parts] == [part.batch["n"][0].as_py() for part in parts]
    messages = []
    for number, (_, group) in enumerate(groupby(parts, attrgetter("message"))):
        same = list(group)
        shared = {cells for part in same for cells in zip(*(part.batch[c].to_pylist() for c in "ab"), strict=True)}
        assert [part.message for part in same] == [number] * len(same)
        assert shared == {part.shared for part in same}
        messages.append((same[0].shared, sum(part.batch.num_rows for part in same)))
    assert all(count <= (most or len(rows)) for _, count in messages)
    assert all(one[0] != next_[0] or one[1] == most for one, next_ in pairwise(messages))


@pytest.mark.spark
def test_consumers_settle_the_rows_of_a_spark_job_one_by_one(spark: SparkSession, queue: Queue) -> None:
    save(spark.range(0, 250, 1, 2).selectExpr("cast(id as string) value"), queue, recordsPerMessage=100)
    assert sorted(message.record_count or 0 for message in queue.browse()) == [25, 25, 100, 100]
    with queue.subscribe(max_backlog=4) as subscription:
        for record in subscription.records(timeout=0):
            record.reject("no good") if record.text == "17" else record.ack()
    assert [message.body for message in queue.browse("error")] == [b"17\n"]
    assert not list(queue.browse())


# -- headers -----------------------------------------------------------------------------------------------------------


HEADERS: dict[str, Any] = {
    "type": "order",
    "priority": "-7",
    "expiresIn": "1h",
    "properties": "region=EU, n:I=5,empty=",
}


def test_options_give_headers_to_partitions(queue: Queue) -> None:
    table = pa.table({"a": [1, 2, 3]})
    (message,) = write(queue, table, messagePer="partition", **HEADERS)
    assert (message.type, message.priority, message.record_count) == ("order", -7, 3)
    assert message.properties == {"region": "EU", "n": 5, "empty": ""}
    assert message.expiration is not None
    write(queue, table, messagePer="partition", delay="1h")
    assert queue.counts()["delayed"] == 1


def test_a_column_that_is_not_null_overrides_the_header_of_an_option(queue: Queue) -> None:
    region = pa.array([[("region", "US")], [("region", None)], None], pa.map_(pa.string(), pa.string()))
    table = values(*"abc", type=["invoice", None, None], priority=[-7, None, -7], properties=region)
    found = {
        m.text: (m.type, m.priority, m.properties.get("region"), m.properties["n"])
        for m in write(queue, table, **HEADERS)
    }
    assert found == {"a": ("invoice", -7, "US", 5), "b": ("order", -7, "EU", 5), "c": ("order", -7, "EU", 5)}
    (plain, *_) = write(queue, values("d"), priority=9)
    assert (plain.text, plain.priority) == ("d", 9)


def test_a_column_gives_messages_their_ids(queue: Queue) -> None:
    messages = write(queue, values(*"abc", message_id=["order-1", None, "order-1"]))
    ids = {message.text: message.id for message in messages}
    assert (ids["a"], ids["c"]) == ("order-1", "order-1")
    assert ids["b"] != "order-1"
    with pytest.raises(ValueError, match=r"row 0 of .*message id '' is empty"):
        write(queue, values("a", message_id=[""]))


# -- a message for each key --------------------------------------------------------------------------------------------


def test_each_key_is_a_message_whose_properties_are_the_key(queue: Queue) -> None:
    table = pa.table(
        {"a": ["x"] * 5 + [None, "", "y"], "b": [1] * 5 + [None, 2, 2], "c": range(8)}
    )  # fmt: skip
    messages = write(queue, table, rows=3, messagePer="key", keyColumns="a, b", bodyFormat="csv", properties="n=1")
    assert [(m.type, m.properties, m.record_count) for m in messages] == [
        ("csv", {"a": "x", "b": "1", "n": "1"}, 5),
        ("csv", {"n": "1"}, 1),
        ("csv", {"a": "", "b": "2", "n": "1"}, 1),
        ("csv", {"a": "y", "b": "2", "n": "1"}, 1),
    ]
    assert messages[3].text == '"a","b","c"\n"y",2,7\n'


def test_a_long_key_is_cut_into_several_messages(queue: Queue) -> None:
    table = pa.table({"k": [True] * 5 + [False]})
    messages = write(queue, table, messagePer="key", keyColumns="k", maxRecordsPerMessage=2)
    assert [(m.properties["k"], m.record_count) for m in messages] == [
        ("true", 2),
        ("true", 2),
        ("true", 1),
        ("false", 1),
    ]


@pytest.mark.parametrize(
    ("tasks", "where"),
    [
        ([["x", "y", "x"]], "again in a task"),
        ([["x", "y"], ["z", "x"]], "in two tasks"),
        ([[None], [None]], "in two tasks"),
    ],
)
def test_a_key_that_comes_again_is_refused_before_anything_is_sent(
    queue: Queue, tasks: list[list[str | None]], where: str
) -> None:
    tables = [pa.table({"k": pa.array(task, pa.string())}) for task in tasks]
    with pytest.raises(
        ValueError, match=rf"the key k=.* comes {where}.*repartition\(\"k\"\).sortWithinPartitions\(\"k\"\)"
    ):
        write(queue, *tables, messagePer="key", keyColumns="k")
    assert nothing(queue)


def test_a_key_that_is_too_long_for_a_name_is_a_property_all_the_same(queue: Queue) -> None:
    long = "\N{EURO SIGN}" * 200
    (message,) = write(queue, pa.table({"k": [long] * 3}), messagePer="key", keyColumns="k")
    assert message.properties == {"k": long}
    tables = [pa.table({"k": [long]})] * 2
    with pytest.raises(ValueError, match="in two tasks"):
        write(queue, *tables, messagePer="key", keyColumns="k")


@pytest.mark.spark
def test_sparks_way_of_grouping_rows_makes_a_message_of_each_key(spark: SparkSession, queue: Queue) -> None:
    rows = spark.range(0, 100, 1, 4).selectExpr("id % 7 as k", "id")
    with pytest.raises(PySparkException, match=r"the key k='[0-6]' comes again in a task"):
        save(rows, queue, messagePer="key", keyColumns="k")
    with pytest.raises(PySparkException, match=r"the key k='[0-6]' comes in two tasks"):
        save(rows.sortWithinPartitions("k"), queue, messagePer="key", keyColumns="k")
    assert nothing(queue)
    save(rows.repartition(3, "k").sortWithinPartitions("k"), queue, messagePer="key", keyColumns="k")
    assert sorted((m.properties["k"], m.record_count) for m in queue.browse()) == [
        (str(k), 15 if k < 2 else 14) for k in range(7)
    ]


@pytest.mark.spark
def test_spark_refuses_partition_by_in_its_own_words(spark: SparkSession, queue: Queue) -> None:
    """Spark does not call the format before it refuses; docs/spark.md has the words, and the way to go."""
    writer = spark.sql("select 1 as k").write.format("dropq").mode("append").partitionBy("k")
    with pytest.raises(Exception, match="provided partitioning or clustering columns do not match"):
        writer.option("root", str(queue.root.path)).option("queue", "q").option("messagePer", "partition").save()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"recordsPerMessage": "5", "messagePer": "partition"},
            "recordsPerMessage needs messagePer=row.*maxRecordsPerMessage",
        ),
        ({"recordsPerMessage": "0"}, "'0': a whole number from 1"),
        ({"recordsPerMessage": "5", "bodyFormat": "csv"}, "'csv': text, frames or jsonl is allowed"),
        ({"recordsPerMessage": "5", "type": "x"}, "type does not go with recordsPerMessage.*see bodyFormat"),
        (
            {"maxRecordsPerMessage": "5"},
            "maxRecordsPerMessage needs messagePer=partition or key; for rows there is rec",
        ),
        ({"bodyFormat": "text"}, "bodyFormat needs messagePer=partition or key, or recordsPerMessage"),
        ({"messagePer": "key"}, "keyColumns is missing"),
        ({"messagePer": "partition", "keyColumns": "a"}, "keyColumns needs messagePer=key"),
        ({"messagePer": "key", "keyColumns": "a,,b"}, "'a,,b': names of columns are allowed, each once"),
        ({"messagePer": "key", "keyColumns": "a,a"}, "'a,a': names of columns are allowed, each once"),
        ({"priority": "high"}, "option priority = 'high': an integer from -2147483648"),
        ({"priority": "3000000000"}, "option priority = '3000000000': an integer"),
        ({"expiresIn": "soon"}, "option expiresIn = 'soon': 'soon' is not a duration"),
        ({"delay": "-1s"}, "option delay = '-1s'.*is not a duration"),
        ({"type": ""}, "option type is empty"),
        ({"queue": ""}, "option queue is empty: name the queue, or leave the option out"),
        ({"messagePer": "partition", "type": "csv"}, "type = 'csv': consumers would read the bodies, which are jsonl"),
        ({"messagePer": "partition", "bodyFormat": "parquet", "type": "frames"}, "which are parquet, in this format"),
        ({"properties": "a=1,2"}, "properties = 'a=1,2': 2: NAME=VALUE or NAME:TYPE=VALUE is allowed.*a comma begins"),
        ({"properties": "n:I=x"}, "'x' is not a value of property type I"),
        ({"properties": "a-b=1"}, "property name 'a-b' is not an identifier"),
        ({"properties": "JMSType=1"}, "property name 'JMSType' is reserved"),
        ({"properties": "a=1,a=2"}, "a is there twice"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        WriteOptions.parse({"root": "/r", "queue": "q", **options})


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"value": ["a"], "type": ["a"]}, {"recordsPerMessage": "5"}, "column type does not go with recordsPerMessage"),
        ({"value": ["a"], "message_id": ["a"]}, {"recordsPerMessage": "5"}, "each bundle gets an id of its own"),
        ({"value": ["a"], "message_id": [1]}, {}, "column message_id is bigint, and must be string"),
        ({"store": [1]}, {"keyColumns": "stor"}, r"keyColumns names stor, which is not there \(did you mean store"),
        ({"store": [1]}, {"keyColumns": "xyz"}, r"keyColumns names xyz, which is not there \(there are store\)"),
        ({"a": [1.5]}, {"keyColumns": "a"}, "column a of keyColumns is double, and must be a string.*cast it"),
        ({"a b": [1]}, {"keyColumns": "a b"}, "column a b of keyColumns cannot be a property.*withColumnRenamed"),
        ({"JMSType": [1]}, {"keyColumns": "JMSType"}, "cannot be a property.*reserved"),
        ({"a": [1]}, {"keyColumns": "a", "properties": "a=1"}, "the property a is in keyColumns and in the option"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_by_name(
    columns: dict[str, list[Any]], options: dict[str, str], said: str
) -> None:
    per = {"messagePer": "key"} if "keyColumns" in options else {}
    parsed = WriteOptions.parse({"root": "/r", "queue": "q", **per, **options})
    with pytest.raises(ConfigError, match=said):
        parsed.check_columns(from_arrow_schema(pa.table(columns).schema))


def test_headers_of_options_have_the_types_of_those_of_send() -> None:
    parsed = WriteOptions.parse({"root": "/r", "queue": "q", **HEADERS, "delay": "500ms"})
    assert parsed.headers == {
        "type": "order", "priority": -7, "expires_in": 3600.0, "delay": 0.5,
        "properties": {"region": Typed("S", "EU"), "n": Typed("I", 5), "empty": Typed("S", "")},
    }  # fmt: skip
