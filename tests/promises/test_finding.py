"""A message is found by its id: the first in order of delivery, by its name alone, however many there are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import Make, base, drop, take, where

from dropq import NoSuchMessage, Queue
from dropq.format import names
from dropq.storage import reading

ID = "1700000000000000-0000000001"
ABSENT = "1800000000000000-0000000001"


@pytest.fixture
def archive(make: Make) -> Queue:
    """A queue with an archive in which each message has a sidecar."""
    queue = make()
    meta = Path(queue.root.layout.meta)
    meta.mkdir(parents=True, exist_ok=True)
    for number in range(200):
        id, token = f"{1700000000000000 + number}-0000000001", f"{number:016x}"
        (base(queue) / "processed" / f"4.{id}.B.....JMS_dropq_metaS={token}").write_bytes(b"%d" % number)
        (meta / f"{token}.json").write_text(json.dumps({"format": 1, "id": id, "correlation_id": "c" * 150}))
    return queue


@pytest.fixture
def work_done(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many sidecars were read, and how many names parsed."""
    done = {"read": 0, "parsed": 0}
    read, parse = reading.read_small, names.parse

    def counted_read(path: str) -> bytes | None:
        done["read"] += 1
        return read(path)

    def counted_parse(file: str, **how: object) -> names.Name:
        done["parsed"] += 1
        return parse(file, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("dropq.lifecycle.sidecars.read_small", counted_read)
    monkeypatch.setattr(names, "parse", counted_parse)
    return done


def test_an_early_ack_reads_no_sidecar_and_parses_no_name_of_the_archive(
    archive: Queue, work_done: dict[str, int]
) -> None:
    assert archive.ack(ABSENT, defer=True) is False
    assert work_done == {"read": 0, "parsed": 0}
    assert archive.ack(ID, defer=True) is False
    assert os.listdir(archive.layout.acks) == [ABSENT]  # that of the archived message was forgotten again


def test_what_is_not_there_is_looked_for_by_text_alone(archive: Queue, work_done: dict[str, int]) -> None:
    for id in (ABSENT, "order-7", "a report 7.csv", "x" * 200):
        with pytest.raises(NoSuchMessage):
            archive.find(id)
    assert work_done == {"read": 0, "parsed": 0}


def test_what_is_found_costs_one_name_and_no_sidecar(archive: Queue, work_done: dict[str, int]) -> None:
    found = archive.find(ID)
    assert (found.state, work_done) == ("processed", {"read": 0, "parsed": 1})
    assert (found.correlation_id, work_done["read"]) == ("c" * 150, 1)


@pytest.mark.parametrize("id", ["x" * 100, "é" * 50, "a long report of everything that happened.csv" * 4])
def test_an_id_that_its_name_had_no_room_for_is_found(make: Make, id: str) -> None:
    queue = make()
    drop(queue, id, b"x")
    for settle in ("nack", "ack"):
        held = take(queue)
        assert queue.find(id).state == "processing"
        held.nack(delay=0) if settle == "nack" else held.ack()
        assert queue.find(id).body == b"x"
    assert queue.requeue([id], state="processed")[0].ok
    assert queue.ack(id) is True


def test_of_several_messages_the_first_in_order_of_delivery_is_found_and_acknowledged(make: Make) -> None:
    queue = make()
    for priority in (4, 1, 9, 5, 0, 7):
        queue.send(b"%d" % priority, message_id="order-7", priority=priority)
    expected = [b"9", b"7", b"5", b"4", b"1", b"0"]
    assert [message.body for message in queue.find_all("order-7")] == expected
    for body in expected:
        assert queue.find("order-7").body == body
        assert queue.ack("order-7") is True
    assert sorted(where(queue)["processed"]) == sorted(expected)


def test_a_priority_by_expression_is_the_order_in_which_messages_are_found(make: Make) -> None:
    queue = make(priority="/urgency")
    for urgency in (1, 7, 3):
        queue.send(json.dumps({"urgency": urgency}), message_id="order-7")
    assert [json.loads(message.body)["urgency"] for message in queue.find_all("order-7")] == [7, 3, 1]


def test_a_name_that_is_reserved_or_ignored_is_no_message(make: Make) -> None:
    queue = make()
    os.close(os.open(base(queue) / "processed" / "report.csv", os.O_CREAT | os.O_WRONLY, reading.RESERVED_MODE))
    drop(queue, "upload.tmp", b"")
    drop(queue, ".hidden", b"")
    for name in ("report.csv", "upload.tmp", ".hidden"):
        with pytest.raises(NoSuchMessage):
            queue.find(name)
