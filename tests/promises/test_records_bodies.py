"""Bodies, names and arguments that nobody wished for: what becomes of each record, and of its bundle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import take

from dropq import ConfigError, Queue, Root, aio
from dropq.queue.message import Record


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path / "root")


@pytest.fixture
def queue(root: Root) -> Queue:
    return root.create_queue("orders", redelivery_delay="0s", durability="none", max_record_bytes=64)


def by_hand(queue: Queue, name: str, body: bytes) -> None:
    """Send a file as a script does."""
    Path(queue.layout.working, name).write_bytes(body)
    os.rename(f"{queue.layout.working}/{name}", f"{queue.layout.target}/{name}")


def worked(queue: Queue, bad: int = 0, format: str | None = None) -> list[tuple[int, bytes]]:
    """Acknowledge each record, and reject the one with a number; return what was handed out."""
    seen = []
    with queue.subscribe() as subscription:
        for record in subscription.records(format, timeout=0):
            seen.append((record.number, record.data))
            record.reject("bad") if record.number == bad else record.ack()
    return seen


def bodies(queue: Queue) -> dict[str, list[bytes]]:
    """The bodies of the messages in each state."""
    states = ("target", "delayed", "processing", "processed", "error", "expired")
    found = {state: [message.body for message in queue.browse(state)] for state in states}
    return {state: there for state, there in found.items() if there}


def reason(queue: Queue) -> Mapping[str, object]:
    """The reason of the only message in error/."""
    (message,) = queue.browse("error")
    assert message.reason is not None
    return message.reason


# -- bodies that are read to their end ---------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text", b""),
        ("jsonl", b""),
        ("frames", b""),
        ("text", b"\n\r\n\n"),
        ("frames", b"\0\0\0\0"),
        ("text", BOM),
        ("csv", b"id,price\n"),
        ("csv", b"\n\nid,price"),
    ],
)
def test_a_body_without_records_is_archived_as_it_is(queue: Queue, kind: str, body: bytes) -> None:
    queue.send(body, type=kind)
    assert worked(queue) == []
    assert bodies(queue) == {"processed": [body]}


#: A body of two records or more, the records, and what a message with the second alone has.
WHOLE = [
    ("text", b"1\n2", [(1, b"1"), (2, b"2")], b"2\n"),
    ("text", b"1\r\n2\r\n", [(1, b"1\r"), (2, b"2\r")], b"2\r\n"),
    ("text", BOM + b"1\n2\n", [(1, b"1"), (2, b"2")], BOM + b"2\n"),
    ("text", b"1\n" + BOM + b"2\n", [(1, b"1"), (2, BOM + b"2")], BOM + BOM + b"2\n"),
    ("text", b"a\0b\n\0\n", [(1, b"a\0b"), (2, b"\0")], b"\0\n"),
    ("text", b"\xff\n\xc3\n", [(1, b"\xff"), (2, b"\xc3")], b"\xc3\n"),
    ("text", b"\x0b\n\xe2\x80\xa8\n", [(1, b"\x0b"), (2, b"\xe2\x80\xa8")], b"\xe2\x80\xa8\n"),
    ("jsonl", b"{\n}{\n", [(1, b"{"), (2, b"}{")], b"}{\n"),
    ("csv", b"\nid,x\r\n1\n2,3,4\n", [(1, b"1"), (2, b"2,3,4")], b"\nid,x\r\n2,3,4\n"),
    ("csv", BOM + b"id\n1\n2", [(1, b"1"), (2, b"2")], BOM + b"id\n2\n"),
    ("frames", b"\0\0\0\1a\0\0\0\2\n\r", [(1, b"a"), (2, b"\n\r")], b"\0\0\0\2\n\r"),
]


@pytest.mark.parametrize(("kind", "body", "records", "second"), WHOLE)
def test_each_record_is_handed_out_as_it_is_and_a_bad_one_is_kept_as_a_body_of_its_own(
    queue: Queue, kind: str, body: bytes, records: list[tuple[int, bytes]], second: bytes
) -> None:
    id = queue.send(body, type=kind).id
    assert worked(queue, bad=2) == records
    assert bodies(queue) == {"processed": [body], "error": [second]}
    assert len(queue.requeue([f"{id}-2"])) == 1
    assert worked(queue) == [records[1]]


@pytest.mark.parametrize(("kind", "body", "records", "second"), WHOLE)
def test_what_is_left_has_the_same_record_with_the_same_number(
    queue: Queue, kind: str, body: bytes, records: list[tuple[int, bytes]], second: bytes
) -> None:
    queue.send(body, type=kind)
    message = take(queue)
    next(message.records()).ack()
    message.release()
    assert worked(queue) == records[1:]
    assert "target" not in bodies(queue) and "error" not in bodies(queue)


def test_lines_that_are_no_json_fail_in_their_handler_and_the_others_go_on(queue: Queue) -> None:
    lines = [b'{"n": 1}', b"not json", b'{"n": 3', b"\xff", b"NaN5", b'{"n": 6}\r', b"[" * 60]
    id = queue.send(b"\n".join(lines), type="jsonl").id
    values, said = [], []
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            try:
                values.append(record.json())
            except ValueError as error:
                said.append(str(error).partition(":")[0])
                record.reject(str(error))
            else:
                record.ack()
    assert values == [{"n": 1}, {"n": 6}]
    assert said == [f"record {number} of message {id} is not JSON" for number in (2, 3, 4, 5, 7)]
    assert sorted(message.id for message in queue.browse("error")) == [f"{id}-{number}" for number in (2, 3, 4, 5, 7)]


def fields(record: Record) -> dict[str, str]:
    with record:
        return record.fields


def test_rows_with_too_few_or_too_many_fields_fail_and_the_others_go_on(queue: Queue) -> None:
    id = queue.send(b"id,price\n1\n2,3\n4,5,6\n", type="csv").id
    read = []
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            with suppress(ValueError):
                read.append(fields(record))
    assert read == [{"id": "2", "price": "3"}]
    assert bodies(queue)["error"] == [b"id,price\n1\n", b"id,price\n4,5,6\n"]
    details = {message.id: (message.reason or {})["detail"] for message in queue.browse("error")}
    assert "has 1 fields, and its header names 2" in str(details[f"{id}-1"])
    assert "has 3 fields, and its header names 2" in str(details[f"{id}-3"])


def test_a_field_may_be_as_long_as_a_record_whatever_limit_csv_has_in_the_process(root: Root) -> None:
    queue = root.create_queue("long", durability="none")
    text = "x" * 200_000
    queue.send(f'id,text\n1,{text}\n2,"a,""{text}\n"\n', type="csv")
    with queue.subscribe() as subscription:
        read = [fields(record) for record in subscription.records(timeout=0)]
    assert read == [{"id": "1", "text": text}, {"id": "2", "text": f'a,"{text}\n'}]


def test_fields_that_two_columns_of_one_name_would_hide_are_refused(queue: Queue) -> None:
    queue.send("id,note,price,note\n1,a,2,b\n", type="csv")
    (record,) = take(queue).records()
    with pytest.raises(ValueError, match="its header has column 'note' twice, and fields has each once: use text"):
        fields(record)
    record.message.ack()
    assert bodies(queue) == {"error": [b"id,note,price,note\n1,a,2,b\n"]}
    queue.send("id,,\n1,,\n", type="csv")
    assert [fields(record) for record in take(queue).records()] == [{"id": "1", "": ""}]


def test_a_field_keeps_what_only_python_takes_for_the_end_of_a_line(queue: Queue) -> None:
    queue.send('a,b\nx\x0by,\x85z\n"p\u2028\nq",\x1c\n', type="csv")
    with queue.subscribe() as subscription:
        read = [fields(record) for record in subscription.records(timeout=0)]
    assert read == [{"a": "x\x0by", "b": "\x85z"}, {"a": "p\u2028\nq", "b": "\x1c"}]


def test_a_row_that_python_takes_for_two_raises_valueerror(queue: Queue) -> None:
    queue.send(b"a,b\nx\ry,z\n", type="csv")
    with queue.subscribe() as subscription:
        record = next(subscription.records(timeout=0))
        with pytest.raises(ValueError, match=r"record 1 of message .* carriage return outside of quotes"):
            fields(record)
    assert bodies(queue) == {"error": [b"a,b\nx\ry,z\n"]}


# -- bodies that cannot be read to their end ---------------------------------------------------------------------------

LONG = b"x" * 65


@pytest.mark.parametrize(
    ("kind", "body", "records", "processed", "left", "says"),
    [
        (
            "text",
            b"1\n2\n" + LONG + b"\n4\n",
            2,
            b"1\n2",
            LONG + b"\n4\n",
            "more bytes than max_record_bytes allows, 64",
        ),
        ("csv", b"id\n1\n" + LONG + b"\n", 1, b"id\n1", b"id\n" + LONG + b"\n", "more bytes than max_record_bytes"),
        ("csv", b'id\n1\n2,"a\n3\n', 1, b"id\n1", b'id\n2,"a\n3\n', "quote at byte 7 is not closed"),
        (
            "frames",
            b"\0\0\0\1a\0\0\0\2b",
            1,
            b"\0\0\0\1a",
            b"\0\0\0\2b",
            "is torn: the body ends after 1 of its 2 bytes",
        ),
        ("frames", b"\0\0\0\1a\0\0", 1, b"\0\0\0\1a", b"\0\0", "is torn: the body ends after 2 bytes of its length"),
        ("frames", b"\0\0\0\1a\xff\xff\xff\xffb", 1, b"\0\0\0\1a", b"\xff\xff\xff\xffb", "is negative, or 4294967295"),
        (
            "frames",
            b"\0\0\0\1a\0\0\0\x41b",
            1,
            b"\0\0\0\1a",
            b"\0\0\0\x41b",
            "65 bytes, and max_record_bytes allows 64",
        ),
    ],
)
def test_what_is_before_the_unreadable_is_settled_and_the_rest_lies_in_error(
    queue: Queue, kind: str, body: bytes, records: int, processed: bytes, left: bytes, says: str
) -> None:
    id = queue.send(body, type=kind).id
    assert len(worked(queue)) == records
    assert bodies(queue) == {"processed": [processed], "error": [left]}
    found = reason(queue)
    assert (found["reason"], found["record"]) == ("unreadable", records + 1)
    assert says in str(found["detail"])
    assert [message.id for message in queue.browse("error")] == [id]


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("csv", b"", "the header at byte 0 is missing"),
        ("csv", b"\n\r\n", "is missing: the first row of csv has the names of the columns"),
        ("csv", b'id,"x\n1,2\n', "quote at byte 3 is not closed"),
        ("csv", b"id\rx\n1\n", "a carriage return without a line feed"),
        ("csv", LONG + b"\n1\n", "more bytes than max_record_bytes"),
        ("text", LONG, "more bytes than max_record_bytes"),
        ("frames", b"\xff", "is torn: the body ends after 1 bytes of its length"),
        ("frames", b"\x80\0\0\0", "is negative, or 2147483648 bytes"),
    ],
)
def test_a_body_of_which_nothing_can_be_read_lies_in_error_as_it_is(
    queue: Queue, kind: str, body: bytes, says: str
) -> None:
    queue.send(body, type=kind)
    assert worked(queue) == []
    assert bodies(queue) == {"error": [body]}
    assert reason(queue)["reason"] == "unreadable" and says in str(reason(queue)["detail"])


def test_what_was_unreadable_goes_on_with_its_numbers_once_it_is_repaired(queue: Queue) -> None:
    id = queue.send(b'id,x\n1,2\n3,"4\n5,6\n', type="csv").id
    assert worked(queue) == [(1, b"1,2")]
    (bad,) = queue.browse("error")
    Path(bad.path).write_bytes(b'id,x\n3,"4"\n5,6\n')
    assert len(queue.requeue([id])) == 1
    assert worked(queue) == [(2, b'3,"4"'), (3, b"5,6")]


def test_a_body_that_grows_while_it_is_read_lies_in_error_whole(queue: Queue) -> None:
    queue.send(b"1\n2\n", type="text")
    with queue.subscribe() as subscription:
        loop = subscription.records(timeout=0)
        first = next(loop)
        with open(first.message.path, "ab") as body:
            body.write(b"3\n")
        first.reject("bad")
        for record in loop:
            record.ack()
    assert bodies(queue) == {"error": [b"1\n2\n3\n"]}
    assert reason(queue)["reason"] == "body_changed"


# -- names that nobody checked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["firstI=-1", "firstI=x", "firstI=", "firstI=2147483648", "firstS=7", "first=7"])
def test_where_a_bundle_begins_counts_from_1_if_its_name_says_no_number(queue: Queue, written: str) -> None:
    by_hand(queue, f"4.a.B....text.JMS_dropq_{written}", b"1\n2\n3\n")
    assert worked(queue, bad=2) == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert [message.id for message in queue.browse("error")] == ["a-2"]


def test_a_file_that_calls_itself_a_record_is_read_as_the_bundle_that_it_is(queue: Queue) -> None:
    by_hand(queue, "4.a.B....text.JMS_dropq_recordI=7&JMS_dropq_recordsI=99", b"1\n2\n3\n")
    assert worked(queue, bad=8) == [(7, b"1"), (8, b"2"), (9, b"3")]
    assert [message.id for message in queue.browse("error")] == ["a-8"]
    by_hand(queue, "4.b.B....text.JMS_dropq_recordI=-7", b"1\n")
    assert worked(queue) == [(1, b"1")]


def test_a_bundle_that_begins_at_the_largest_number_is_settled_record_by_record(queue: Queue) -> None:
    by_hand(queue, "4.a.B....text.JMS_dropq_firstI=2147483647", b"1\n2\n3\n4\n")
    message = take(queue)
    records = message.records()
    next(records).ack()
    next(records).reject("bad")
    message.release()
    assert bodies(queue) == {"target": [b"3\n4\n"], "processed": [b"1"], "error": [b"2\n"]}
    assert [message.id for message in queue.browse("error")] == ["a-2147483648"]
    assert [data for _, data in worked(queue)] == [b"3", b"4"]
    assert "target" not in bodies(queue) and "processing" not in bodies(queue)


def test_a_bundle_that_begins_at_the_largest_number_is_cut_in_two(queue: Queue) -> None:
    by_hand(queue, "4.a.B....text.JMS_dropq_firstI=2147483647&JMSXDeliveryCountI=1", b"1\n2\n3\n")
    seen = worked(queue)
    assert sorted(data for _, data in seen) == [b"1", b"2", b"3"]
    assert min(number for number, _ in seen) == 2147483647
    assert "target" not in bodies(queue) and "error" not in bodies(queue)


# -- arguments that are wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "near"), [("jsnol", "the nearest is jsonl"), ("CSV", "it is jsonl, text, csv or")])
def test_an_unknown_format_is_refused_by_name_and_the_message_waits_again(queue: Queue, format: str, near: str) -> None:
    queue.send(b"1\n")
    with queue.subscribe() as subscription, pytest.raises(ValueError, match=f"'{format}' is not a format.*{near}"):
        next(subscription.records(format, timeout=0))
    assert [message.delivery_count for message in queue.browse("target")] == [0]
    assert worked(queue) == [(1, b"1")]


def test_an_unknown_format_leaves_a_message_held_that_its_caller_holds(queue: Queue) -> None:
    queue.send(b"1\n")
    message = take(queue)
    with pytest.raises(ValueError, match="the nearest is frames"):
        message.records("frame")
    assert message.held
    message.ack()


@pytest.mark.parametrize("checkpoint", ["soon", " ", "-1s", -1, float("nan"), "1 parsec"])
def test_a_checkpoint_that_is_no_period_is_refused_before_a_message_is_taken(queue: Queue, checkpoint: str) -> None:
    queue.send(b"1\n")
    with queue.subscribe() as subscription, pytest.raises(ValueError, match=str(checkpoint)):
        next(subscription.records(timeout=0, checkpoint=checkpoint))
    assert [message.delivery_count for message in queue.browse("target")] == [0]


def test_tasks_too_are_refused_a_checkpoint_that_is_no_period_before_a_message_is_taken(queue: Queue) -> None:
    queue.send(b"1\n")

    async def read() -> None:
        async with aio.Queue(queue) as tasks, tasks.subscribe() as subscription:
            async for _ in subscription.records(timeout=0, checkpoint="soon"):
                raise AssertionError("a record came")

    with pytest.raises(ValueError, match="soon"):
        asyncio.run(read())
    assert [message.delivery_count for message in queue.browse("target")] == [0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint", "soon"),
        ("checkpoint", -1),
        ("max_record_bytes", 0),
        ("max_record_bytes", "big"),
        ("max_record_bytes", 2**31),
        ("max_record_failures", 0),
        ("max_record_failures", -1),
        ("max_record_failures", True),
    ],
)
def test_a_limit_of_records_that_cannot_be_is_refused_by_its_name(root: Root, key: str, value: object) -> None:
    options: dict[str, Any] = {key: value}
    with pytest.raises(ConfigError, match=key):
        root.create_queue("q", **options)


@pytest.mark.parametrize("wrong", ["max_records_failures", "max_record_byte", "checkpoints"])
def test_a_misspelt_key_of_records_is_refused_with_the_nearest(root: Root, wrong: str) -> None:
    options: dict[str, Any] = {wrong: 1}
    with pytest.raises(ConfigError, match=f"{wrong}.*(max_record_failures|max_record_bytes|checkpoint)"):
        root.create_queue("q", **options)


@pytest.mark.parametrize("history", [True, False])
def test_what_cannot_be_read_of_a_message_that_was_settled_before_is_logged_and_the_loop_goes_on(
    root: Root, caplog: pytest.LogCaptureFixture, history: bool
) -> None:
    queue = root.create_queue("q", semantics="at-most-once", history=history, durability="none")
    torn = queue.send(b"\0\0\0\1a\0\0\0\7torn", type="frames").id
    queue.send(b"\0\0\0\1b", type="frames")
    assert worked(queue) == [(1, b"a"), (1, b"b")]
    assert bodies(queue) == ({"processed": [b"\0\0\0\1a\0\0\0\7torn", b"\0\0\0\1b"]} if history else {})
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert torn in record.getMessage() and "is torn: the body ends after 4 of its 7 bytes" in record.getMessage()
