"""What consumers of records leave of a bundle is read by Spark as the rows that are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import make_queue
from pyspark.sql import types as t

from dropq import Queue, Root
from dropq.spark.datasource import DropqDataSource

FIVE: dict[str, tuple[bytes, str]] = {
    "jsonl": (b'{"v":"a"}\n{"v":"b"}\n{"v":"c"}\r\n{"v":"d"}\n{"v":"e"}\n', "v"),
    "text": (b"a\nb\nc\nd\ne\n", "v"),
    "csv": (b'v\na\n"b"\nc\r\nd\ne\n', "v"),
}


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    root = Root.create(tmp_path / "root")
    return root.create_queue("orders", redelivery_delay="1h", durability="none")


def rows(queue: Queue, body_format: str, state: str = "target") -> list[Any]:
    """Return the values that Spark reads from the messages of a state, in their order."""
    address = {"root": str(queue.root.path), "queue": queue.name}
    source = DropqDataSource(address | {"bodyFormat": body_format, "state": state})
    reader: Any = source.reader(t.StructType([t.StructField("v", t.StringType())]))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.column(0).to_pylist()]


@pytest.mark.parametrize("body_format", FIVE)
def test_the_settled_records_of_a_bundle_are_no_rows(queue: Queue, body_format: str) -> None:
    queue.send(FIVE[body_format][0], type=body_format)
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0, checkpoint="1h"):
            if record.number in (1, 3):
                record.ack()
            elif record.number == 4:
                record.reject("bad")
            if record.number == 5:
                break
    text = [value.strip() for value in rows(queue, body_format)]
    assert text == ["b", "e"]
    assert rows(queue, body_format, "error") == ["d"]
    assert [value.strip() for value in rows(queue, body_format, "processed")] == ["a", "c"]


@pytest.mark.parametrize(("body_format", "empty"), [("text", ""), ("csv", None), ("jsonl", "no row")])
def test_an_empty_line_of_a_message_that_is_whole_is_what_its_format_says(
    tmp_path: Path, body_format: str, empty: str | None
) -> None:
    queue = make_queue(tmp_path / "whole")
    body = {"text": b"a\n\nb\n", "csv": b"v\na\n\nb\n", "jsonl": b'{"v":"a"}\n\n{"v":"b"}\n'}[body_format]
    for properties in ({}, {"a_firstI": "3"}):
        queue.send(body, type=body_format, properties=properties)
    expected = ["a", "b"] if empty == "no row" else ["a", empty, "b"]
    assert rows(queue, body_format) == expected * 2
