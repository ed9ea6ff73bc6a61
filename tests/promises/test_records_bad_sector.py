"""A bundle whose body the disk cannot read to its end: all of it goes where a failure goes, and the worker goes on."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import pytest
from helpers import died, make_queue, take, where
from workers import counted, reason_in

from dropq import Message, Queue, Reject, Retry, StorageError, work
from dropq.queue.message import Bundle, Record
from dropq.storage import reading
from dropq.worker.loop import Fail, Handler, Stop, WorkReport
from dropq.worker.record_commands import BundleCommand
from dropq.worker.run import run
from dropq.worker.sources import Sources

#: The first byte that cannot be read; a worker reads less than that ahead.
BAD_AT = 100_000
#: Records of 8 bytes: the bad byte is amid them, and begins a record.
BODY = b"".join(b"%07d\n" % number for number in range(1, 40_001))
#: How many of them can be read.
GOOD = BAD_AT // 8
SAYS = f"its body cannot be read behind byte {BAD_AT - 1}: {os.strerror(errno.EIO)}"
NOT_BY_RECORDS = f"{SAYS}; so the message was settled as a whole, and none of its records by itself"


class BadDisk:
    """Bodies that cannot be read from a byte on, by their inodes."""

    def __init__(self) -> None:
        self._bad: set[int] = set()

    def spoil(self, path: str) -> None:
        self._bad.add(os.stat(path).st_ino)

    def heal(self) -> None:
        self._bad.clear()

    def is_bad(self, file: io.FileIO) -> bool:
        return os.fstat(file.fileno()).st_ino in self._bad


class BadFile(io.FileIO):
    """A file that may have a bad sector."""

    def __init__(self, fd: int, disk: BadDisk) -> None:
        super().__init__(fd, "rb")
        self._disk = disk

    def readinto(self, buffer: Any) -> int | None:
        if self._disk.is_bad(self):
            if self.tell() >= BAD_AT:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            buffer = memoryview(buffer)[: BAD_AT - self.tell()]
        return super().readinto(buffer)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    disk, open_body = BadDisk(), reading.open_body

    def open_bad(path: str, *, buffering: int = -1) -> IO[bytes]:
        with open_body(path) as file:
            raw = BadFile(os.dup(file.fileno()), disk)
        return io.BufferedReader(raw, buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE)

    monkeypatch.setattr(reading, "open_body", open_bad)
    return disk


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path)


def send_bad(queue: Queue, disk: BadDisk, body: bytes = BODY, *, dead: bool = False) -> str:
    """Send a bundle with a bad sector, over which somebody may have died, and a good one behind it; return its id."""
    id = queue.send(body, type="text").id
    if dead:
        died(take(queue))
    (message,) = queue.browse("target")
    disk.spoil(message.path)
    queue.send(b"good\n", type="text")
    return id


def until_empty(queue: Queue, handler: Callable[[Record], object]) -> WorkReport:
    return work(queue, handler, records=True, until_empty=True)


def until_empty_by_bundle(queue: Queue, handler: Callable[[Bundle], None]) -> WorkReport:
    with queue.subscribe() as subscription:
        return run(Sources([subscription]), cast(Handler, handler), Stop(), by="bundle", until_empty=True)


def due_after(number: int) -> Callable[[Bundle], float]:
    """Let a checkpoint be due once a bundle that has more than its first records left is opened."""
    return lambda bundle: 0.0 if bundle.message._name.begins <= number else float("inf")


@pytest.mark.parametrize("dead", [False, True], ids=["", "died"])
def test_it_fails_as_a_whole_with_a_reason_that_says_where_and_the_next_one_is_handled(
    queue: Queue, disk: BadDisk, caplog: pytest.LogCaptureFixture, dead: bool
) -> None:
    id = send_bad(queue, disk, dead=dead)
    seen = []
    report = until_empty(queue, lambda record: seen.append(record.data))
    assert seen == [*BODY[:BAD_AT].splitlines(), b"good"]
    assert counted(report) == {"acked": 1, "failed": 1}
    assert f"message {id}: {NOT_BY_RECORDS}" in caplog.text
    disk.heal()
    assert where(queue) == {"error": [BODY], "processed": [b"good\n"]}
    reason = reason_in(queue, "error")
    assert (reason["reason"], reason["detail"], reason["whole"]) == ("failed", SAYS, NOT_BY_RECORDS)


def test_what_was_repaired_is_requeued_and_no_record_is_missing(queue: Queue, disk: BadDisk) -> None:
    id = send_bad(queue, disk)
    until_empty(queue, lambda record: None)
    disk.heal()
    assert len(queue.requeue([id])) == 1
    assert counted(until_empty(queue, lambda record: None)) == {"acked": 40_000}


@pytest.mark.parametrize("raised", [Reject("bad"), Retry("1h"), Fail("bad"), KeyError("bad")])
def test_records_that_failed_before_it_are_in_it_and_do_not_count(
    queue: Queue, disk: BadDisk, raised: Exception
) -> None:
    send_bad(queue, disk)

    def handler(record: Record) -> None:
        if record.number in (2, GOOD):
            raise raised

    assert counted(until_empty(queue, handler)) == {"acked": 1, "failed": 1}
    disk.heal()
    assert where(queue) == {"error": [BODY], "processed": [b"good\n"]}


def test_it_is_tried_again_as_often_as_any_failure_and_then_goes_where_exhausted_says(
    tmp_path: Path, disk: BadDisk
) -> None:
    queue = make_queue(
        tmp_path, redelivery_attempts=1, redelivery_delay="0s", exhausted="dead-letter", dead_letter_queue="dead"
    )
    dead = queue.root.create_queue("dead", durability="none")
    id = send_bad(queue, disk)
    report = until_empty(queue, lambda record: None)
    assert counted(report) == {"acked": 1, "failed": 1} and [left.id for left in report.left] == [id]
    report = until_empty(queue, lambda record: None)
    assert counted(report) == {"failed": 1} and not report.left
    disk.heal()
    assert where(queue) == {"processed": [b"good\n"]}
    assert where(dead) == {"target": [BODY]}


@pytest.mark.parametrize("dead", [False, True], ids=["", "died"])
def test_a_checkpoint_that_cannot_copy_it_fails_it(
    queue: Queue, disk: BadDisk, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    monkeypatch.setattr(Bundle, "_due", due_after(1))
    send_bad(queue, disk, dead=dead)
    seen = []
    assert counted(until_empty(queue, lambda record: seen.append(record.data))) == {"acked": 1, "failed": 1}
    assert seen == [b"0000001", b"good"]
    disk.heal()
    assert where(queue) == {"error": [BODY], "processed": [b"good\n"]}
    assert "; so the message was settled as a whole" in reason_in(queue, "error")["detail"]


def test_what_an_earlier_commit_settled_stays_settled(
    queue: Queue, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bundle, "_due", due_after(1))
    id = queue.send(BODY, type="text").id

    def handler(record: Record) -> None:
        if record.number == 1:
            raise Reject("one")
        if record.number == 2:
            disk.spoil(record.message.path)

    assert counted(until_empty(queue, handler)) == {"rejected": 1, "failed": 1}
    disk.heal()
    assert {message.id: message.body for message in queue.browse("error")} == {f"{id}-1": BODY[:8], id: BODY[8:]}


def test_if_a_record_before_it_is_too_long_it_lies_in_error_whole_as_unreadable(tmp_path: Path, disk: BadDisk) -> None:
    queue = make_queue(tmp_path, max_record_bytes=8)
    body = BODY[:80] + b"x" * 9 + BODY
    send_bad(queue, disk, body)
    assert counted(until_empty(queue, lambda record: None)) == {"acked": 1, "failed": 1}
    disk.heal()
    assert where(queue) == {"error": [body], "processed": [b"good\n"]}
    reason = reason_in(queue, "error")
    assert (reason["reason"], reason["record"]) == ("unreadable", 11) and os.strerror(errno.EIO) in reason["whole"]


def test_if_it_can_be_taken_apart_and_not_be_cut_it_fails(tmp_path: Path, disk: BadDisk) -> None:
    queue = make_queue(tmp_path, max_record_bytes=8)
    body = BODY[:80] + b"x" * 9 + BODY
    send_bad(queue, disk, body, dead=True)
    seen = []
    assert counted(until_empty(queue, lambda record: seen.append(record.data))) == {"acked": 1, "failed": 1}
    assert seen == [b"good"]
    disk.heal()
    assert where(queue) == {"error": [body], "processed": [b"good\n"]}
    assert os.strerror(errno.EIO) in reason_in(queue, "error")["detail"]


def test_a_worker_that_is_asked_to_stop_gives_it_back_whole_and_uncounted(queue: Queue, disk: BadDisk) -> None:
    send_bad(queue, disk)
    stop = Stop()

    def handler(record: Record) -> None:
        if record.number == 2:
            stop.ask()
            raise Reject("two")

    assert counted(work(queue, handler, records=True, stop=stop)) == {"returned": 1}
    disk.heal()
    assert where(queue) == {"target": [BODY, b"good\n"]}
    assert [message.delivery_count for message in queue.browse("target")] == [0, 0]


# -- without a worker, and handlers of messages ------------------------------------------------------------------------


def loop(queue: Queue, seen: list[int]) -> None:
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            seen.append(record.number)
            record.reject("bad") if record.number == 2 else record.ack()


def test_a_loop_over_records_raises_and_its_subscription_gives_it_back_whole(tmp_path: Path, disk: BadDisk) -> None:
    queue = make_queue(tmp_path, redelivery_delay="0s", max_deliveries=2)
    send_bad(queue, disk)
    for state in ("target", "error"):
        seen: list[int] = []
        with pytest.raises(StorageError, match=SAYS):
            loop(queue, seen)
        assert seen == [*range(1, GOOD + 1)]
        assert queue.counts()["processing"] == 0 and queue.counts()[state]
    disk.heal()
    assert where(queue) == {"target": [b"good\n"], "error": [BODY]}
    assert reason_in(queue, "error")["reason"] == "max_deliveries"


@pytest.mark.parametrize("verb", ["nack", "fail", "reject", "expire"])
def test_what_is_left_of_a_message_goes_whole_where_its_verb_says(queue: Queue, disk: BadDisk, verb: str) -> None:
    send_bad(queue, disk)
    message = take(queue)
    records = message.records()
    next(records).ack()
    next(records).reject("two")
    states = {"nack": "delayed", "expire": "expired"}
    arguments = {"nack": ("1h",), "expire": ()}
    getattr(message, verb)(*arguments.get(verb, ("why",)))
    disk.heal()
    assert where(queue) == {states.get(verb, "error"): [BODY], "target": [b"good\n"]}
    if verb != "nack":
        assert os.strerror(errno.EIO) in reason_in(queue, states.get(verb, "error"))["whole"]


def test_an_ack_of_what_is_left_needs_no_copy_of_it(queue: Queue, disk: BadDisk) -> None:
    body = BODY[: BAD_AT - 1].replace(b"\n", b"-") + b"\n" + BODY  # one record, and what cannot be read
    id = send_bad(queue, disk, body)
    message = take(queue)
    next(message.records()).reject("one")
    message.ack()
    disk.heal()
    assert where(queue) == {"processed": [body], "error": [body[:BAD_AT]], "target": [b"good\n"]}
    assert [message.id for message in queue.browse("error")] == [f"{id}-1"]


def test_records_that_a_handler_of_messages_rejected_do_not_count(queue: Queue, disk: BadDisk) -> None:
    send_bad(queue, disk)

    def handler(message: Message) -> None:
        for record in message.records():
            record.reject("bad") if record.number == 2 else record.ack()

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1, "failed": 1}
    disk.heal()
    assert where(queue) == {"processed": [b"good\n"], "error": [BODY]}


# -- the records of a message together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [False, True], ids=["", "died"])
def test_a_command_for_the_records_of_a_message_fails_it_and_gets_the_next(
    queue: Queue, disk: BadDisk, tmp_path: Path, dead: bool
) -> None:
    send_bad(queue, disk, dead=dead)
    with BundleCommand(["sh", "-c", f'cat >>"{tmp_path}/read"']) as handler:
        assert counted(until_empty_by_bundle(queue, handler)) == {"acked": 1, "failed": 1}
    assert (tmp_path / "read").read_bytes() == b"good\n"
    disk.heal()
    assert where(queue) == {"error": [BODY], "processed": [b"good\n"]}
    assert os.strerror(errno.EIO) in reason_in(queue, "error")["detail"]


@pytest.mark.parametrize("dead", [False, True], ids=["", "died"])
def test_a_bundle_of_which_some_records_were_settled_fails_as_a_whole(queue: Queue, disk: BadDisk, dead: bool) -> None:
    send_bad(queue, disk, dead=dead)

    def handler(bundle: Bundle) -> None:
        for record in bundle:
            record.reject("bad") if record.number == 2 else record.ack()

    assert counted(until_empty_by_bundle(queue, handler)) == {"acked": 1, "failed": 1}
    disk.heal()
    assert where(queue) == {"error": [BODY], "processed": [b"good\n"]}
    assert SAYS in reason_in(queue, "error")["detail"]
