"""A worker by records: its handler gets each record, and each is settled by itself."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers import died, drop, make_queue, take, until, where
from workers import Working, counted, reason_in

from dropq import Message, Queue, Reject, Retry, work
from dropq.lifecycle.settlement import Claims
from dropq.queue.message import Bundle, Record
from dropq.records.reader import RawRecord, RecordReader
from dropq.worker import records as by_records
from dropq.worker.loop import Fail, Halt, Stop, WorkReport
from dropq.worker.reporter import Handled, Reporter
from dropq.worker.run import run
from dropq.worker.sources import Sources


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path, redelivery_delay="0s", durability="none")


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, last + 1))


def test_records_that_a_handler_of_messages_rejects_are_counted(queue: Queue) -> None:
    for _ in range(5):
        queue.send(b"x\n" * 10 + b"good\n" + b"later\n", type="text")

    def handler(message: Message) -> None:
        for record in message.records():
            if record.text.strip() == "later":
                record.nack(60)
            else:
                record.ack() if record.text.strip() == "good" else record.reject("no")

    report = work(queue, handler, until_empty=True)
    assert counted(report) == {"acked": 5, "rejected": 50, "retried": 5}


def test_a_record_that_is_given_back_too_often_counts_as_failed_for_every_handler(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", max_cancels=1)

    def of_messages(message: Message) -> None:
        for record in message.records():
            record.nack() if record.number == 1 else record.ack()

    def of_records(record: Record) -> None:
        if record.number == 1:
            raise Retry

    queue.send(lines(1, 3), type="text")
    assert counted(work(queue, of_messages, until_empty=True)) == {"acked": 1, "failed": 1}  # beside the message
    queue.send(lines(1, 3), type="text")
    assert counted(work(queue, of_records, until_empty=True, records=True)) == {"acked": 2, "failed": 1}
    assert where(queue)["error"] == [b"1\n", b"1\n"]


def until_empty(queue: Queue, handler: Any, **options: Any) -> WorkReport:
    return work(queue, handler, records=True, until_empty=True, **options)


def reasons(queue: Queue) -> dict[str, Any]:
    """Why messages lie in error/, by their ids."""
    return {message.id: (message.reason or {})["detail"] for message in queue.browse("error")}


def commit_after_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "_due", lambda bundle: 0.0)


def test_a_handler_gets_each_record_in_order_and_the_message_is_archived_as_it_is(queue: Queue) -> None:
    first, second = (queue.send(lines(1, 3), type="text").id for _ in range(2))
    seen: list[tuple[str, int, str]] = []
    report = until_empty(queue, lambda record: seen.append((record.message.id, record.number, record.text)))
    assert seen == [(id, number, str(number)) for id in (first, second) for number in (1, 2, 3)]
    assert counted(report) == {"acked": 6}
    assert where(queue) == {"processed": [lines(1, 3)] * 2}


def test_what_a_handler_raises_settles_its_record(queue: Queue) -> None:
    id = queue.send(lines(1, 6), type="text").id

    def handler(record: Record) -> None:
        match record.number:
            case 2:
                raise KeyError("no such thing")
            case 3:
                raise Reject("nobody wants it", code=7)
            case 4:
                raise Retry("1h")
            case 5:
                raise Fail("not today")

    report = until_empty(queue, handler)
    assert counted(report) == {"acked": 2, "failed": 2, "rejected": 1, "retried": 1}
    assert [(left.id, left.due is not None) for left in report.left] == [(f"{id}-4", True)]
    assert where(queue) == {"processed": [lines(1, 6)], "error": [b"2\n", b"3\n", b"5\n"], "delayed": [b"4\n"]}
    assert reasons(queue) == {
        f"{id}-2": "KeyError: 'no such thing'",
        f"{id}-3": "nobody wants it",
        f"{id}-5": "not today",
    }
    failed: dict[str, Any] = {message.id: message.reason for message in queue.browse("error")}
    assert "in handler" in failed[f"{id}-2"]["traceback"] and "in _handle" not in failed[f"{id}-2"]["traceback"]
    assert failed[f"{id}-3"]["code"] == 7


@pytest.mark.parametrize("at", [1, 2, 3])
def test_nothing_of_a_body_that_was_written_to_meanwhile_is_settled(queue: Queue, at: int) -> None:
    drop(queue, "a.txt", lines(1, 3))

    def handler(record: Record) -> None:
        if record.number == at:
            with open(record.message.path, "ab") as body:
                body.write(b"4\n")
        if record.number == 2:
            raise Reject("bad")

    assert counted(until_empty(queue, handler)) == {"failed": 1}
    assert where(queue) == {"error": [lines(1, 4)]}
    assert reason_in(queue, "error")["reason"] == "body_changed"


def test_what_is_left_after_a_checkpoint_is_compared_anew(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_after_each_record(monkeypatch)
    drop(queue, "a.txt", lines(1, 3))

    def handler(record: Record) -> None:
        if record.number == 2:
            with open(record.message.path, "ab") as body:
                body.write(b"4\n")

    assert counted(until_empty(queue, handler)) == {"acked": 1, "failed": 1}
    assert where(queue) == {"processed": [b"1"], "error": [lines(2, 4)]}
    assert reason_in(queue, "error")["reason"] == "body_changed"


def test_a_handler_may_settle_a_record_itself(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id

    def handler(record: Record) -> None:
        match record.number:
            case 1:
                record.ack()
            case 2:
                record.nack()
            case 3:
                record.reject("three")

    report = until_empty(queue, handler)
    assert counted(report) == {"acked": 1, "retried": 1, "rejected": 1}
    assert where(queue)["target"] == [b"2\n"] and reasons(queue) == {f"{id}-3": "three"}


@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_a_handler_may_settle_the_message_with_all_that_is_left(queue: Queue, verb: str) -> None:
    id = queue.send(lines(1, 4), type="text").id

    def handler(record: Record) -> None:
        if record.number == 3:
            getattr(record.message, verb)(*(["enough"] if verb == "reject" else []))

    report = until_empty(queue, handler)
    outcome = {"ack": {"acked": 3}, "nack": {"acked": 2, "retried": 1}, "reject": {"acked": 2, "failed": 1}}[verb]
    assert counted(report) == outcome
    left = {"ack": "processed", "nack": "target", "reject": "error"}[verb]
    assert where(queue)[left] == [lines(1, 4) if verb == "ack" else b"3\n4\n"]
    assert [each.id for each in report.left] == ([id] if verb == "nack" else [])


# -- until empty -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3])
def test_until_empty_takes_each_record_once_and_reports_those_that_came_back(queue: Queue, concurrency: int) -> None:
    ids = [queue.send(lines(1, 4), type="text").id for _ in range(5)]
    single = queue.send(b"alone\n", type="text").id
    seen: list[tuple[str, int]] = []

    def handler(record: Record) -> None:
        seen.append((record.message.id, record.number))
        if record.number == 3 or record.data == b"alone":
            raise Retry

    report = until_empty(queue, handler, concurrency=concurrency)
    assert sorted(seen) == sorted([(id, number) for id in ids for number in range(1, 5)] + [(single, 1)])
    assert counted(report) == {"acked": 15, "retried": 6}
    assert sorted(left.id for left in report.left) == sorted([f"{id}-3" for id in ids] + [single])
    assert where(queue)["target"] == [b"3\n"] * 5 + [b"alone\n"]
    assert counted(until_empty(queue, lambda record: None)) == {"acked": 6}, "another run takes them"


@pytest.mark.parametrize("concurrency", [1, 2])
def test_until_empty_takes_what_a_checkpoint_leaves(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    commit_after_each_record(monkeypatch)
    id = queue.send(lines(1, 5), type="text").id
    seen: list[int] = []

    def handler(record: Record) -> None:
        seen.append(record.number)
        if record.number == 2:
            raise Retry

    report = until_empty(queue, handler, concurrency=concurrency)
    assert seen == [1, 2, 3, 4, 5]
    assert counted(report) == {"acked": 4, "retried": 1} and [left.id for left in report.left] == [f"{id}-2"]
    assert where(queue)["target"] == [b"2\n"]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_until_empty_takes_both_halves_of_a_bundle_over_which_somebody_died(queue: Queue, concurrency: int) -> None:
    id = queue.send(lines(1, 4), type="text").id
    died(take(queue))
    seen: list[int] = []
    report = until_empty(queue, lambda record: seen.append(record.number), concurrency=concurrency)
    assert sorted(seen) == [1, 2, 3, 4] and counted(report) == {"acked": 4} and report.left == []
    assert [message.id for message in queue.browse("processed")] == [id] * 2


def test_until_empty_does_not_take_what_was_given_back_as_a_whole(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id
    seen: list[int] = []

    def handler(record: Record) -> None:
        seen.append(record.number)
        record.message.nack()

    report = until_empty(queue, handler)
    assert seen == [1] and counted(report) == {"retried": 1} and [left.id for left in report.left] == [id]


# -- limits, and what cannot be read ---------------------------------------------------------------------------


def test_failures_are_counted_over_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_after_each_record(monkeypatch)
    queue = make_queue(tmp_path, durability="none", max_record_failures=2)
    id = queue.send(lines(1, 5), type="text").id

    def handler(record: Record) -> None:
        if record.number != 2:
            raise Fail("bad")

    report = until_empty(queue, handler)
    assert counted(report) == {"acked": 1, "failed": 3}
    assert where(queue)["error"] == [b"1\n", b"3\n", b"4\n5\n"]
    assert reasons(queue)[id].startswith("2 of its records failed")


class Replacing(Reporter):
    """Lets another consumer acknowledge what two checkpoints left of a file, and the next file of its name come."""

    def __init__(self, queue: Queue, following: bytes) -> None:
        self.queue, self.following, self.heard = queue, following, 0

    def handled(self, handled: Handled) -> None:
        self.heard += 1
        if self.heard == 2:
            take(self.queue).ack()
            drop(self.queue, "day.text", self.following)


def fail_bad(record: Record) -> None:
    if record.text == "bad":
        raise Fail("bad")


def test_failures_of_a_file_do_not_count_for_the_next_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_after_each_record(monkeypatch)
    queue = make_queue(tmp_path, max_record_failures=3)
    drop(queue, "day.text", b"bad\nbad\nok\n")
    with queue.subscribe() as subscription:
        reporter = Replacing(queue, b"bad\nbad\nfine\ngood\n")
        report = run(Sources([subscription]), fail_bad, Stop(), until_empty=True, by="record", reporter=reporter)
    assert counted(report) == {"acked": 2, "failed": 4}
    assert where(queue)["error"] == [b"bad\n"] * 4
    assert sorted(where(queue)["processed"]) == [b"fine", b"good\n", b"ok\n"]


def test_a_loop_over_records_counts_failures_of_a_file_for_no_other_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_after_each_record(monkeypatch)
    queue = make_queue(tmp_path, max_record_failures=3)
    drop(queue, "day.text", b"bad\nbad\nok\n")
    with queue.subscribe() as subscription:
        receive, calls = subscription.receive, count(1)

        def replacing(timeout: Any) -> Message | None:
            if next(calls) == 3:  # a checkpoint left the rest, and another consumer takes it first
                take(queue).ack()
                drop(queue, "day.text", b"bad\nbad\nfine\n")
            return receive(timeout)

        monkeypatch.setattr(subscription, "receive", replacing)
        for record in subscription.records(timeout=0):
            record.fail("bad") if record.text == "bad" else record.ack()
    assert where(queue)["error"] == [b"bad\n"] * 4


def test_failures_of_a_file_do_not_count_for_that_of_its_name_in_another_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_after_each_record(monkeypatch)
    one = make_queue(tmp_path, max_record_failures=3)
    two = one.root.create_queue("other", max_record_failures=3)
    for queue in (one, two):
        queue.send(b"bad\nbad\nok\n", message_id="day", type="text")
    report = work([one, two], fail_bad, records=True, until_empty=True, fair=True)
    assert counted(report) == {"acked": 2, "failed": 4}


def test_only_the_last_failures_of_bundles_that_others_took_are_remembered(queue: Queue) -> None:
    worker = by_records.RecordWorker(Sources([]), fail_bad, Stop(), Reporter(), concurrency=1, until_empty=True)
    for number in range(by_records.REMEMBERED + 5):
        queue.send(b"1\n2\n", type="text", message_id=f"m{number}")
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None
            worker._remember(Bundle(message, None, failures=1))
            message.ack()
    assert len(worker._failures) == by_records.REMEMBERED


def test_until_empty_takes_the_next_file_of_a_name_whose_first_was_lost(queue: Queue) -> None:
    seen: list[bytes] = []

    def handler(message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            assert queue.ack("day.text")  # by its id, as sublet leasing lets anybody
            drop(queue, "day.text", b"next")

    drop(queue, "day.text", b"first")
    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1, "lost": 1}
    assert seen == [b"first", b"next"]


@pytest.mark.parametrize("name", ["day.text", "4.1795383089375000-7523895424.B", "4.day.B"])
def test_until_empty_leaves_what_was_lost_and_comes_back_to_others(queue: Queue, name: str) -> None:
    seen: list[bytes] = []

    def handler(message: Message) -> None:
        seen.append(message.body)
        assert message._claim is not None
        Claims(queue.context).give_back(message._claim, delay=0)  # as a sweep does

    drop(queue, name, b"first")
    assert counted(work(queue, handler, until_empty=True)) == {"lost": 1}
    assert (seen, where(queue)) == ([b"first"], {"target": [b"first"]})


def test_what_cannot_be_read_goes_to_error_and_counts_as_one(queue: Queue) -> None:
    id = queue.send(b"\0\0\0\x01a\0\0\0\x05bc", type="frames").id
    seen: list[bytes] = []
    report = until_empty(queue, lambda record: seen.append(record.data))
    assert seen == [b"a"] and counted(report) == {"acked": 1, "failed": 1}
    assert "is torn" in reasons(queue)[id]


def test_a_table_is_rejected_with_the_way_out_and_the_worker_goes_on(queue: Queue) -> None:
    id = queue.send(b"PAR1", type="parquet").id
    queue.send(b"a", type="text")
    assert counted(until_empty(queue, lambda record: None)) == {"rejected": 1, "acked": 1}
    assert "read it with Spark" in reasons(queue)[id]


def test_a_body_that_changes_meanwhile_goes_to_error_and_no_record_of_it_counts(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id

    def handler(record: Record) -> None:
        if record.number == 2:
            with open(record.message.path, "ab") as file:
                file.write(b"more\n")
            raise Fail("bad")

    assert counted(until_empty(queue, handler)) == {"failed": 1}
    assert list(reasons(queue)) == [id] and queue.counts()["processed"] == 0


def test_a_message_without_records_counts_as_one(queue: Queue) -> None:
    queue.send(b"\n\n", type="text")
    assert counted(until_empty(queue, lambda record: None)) == {"acked": 1}
    assert where(queue) == {"processed": [b"\n\n"]}


@pytest.mark.parametrize("records", ["yes", 1, None])
def test_records_is_true_or_false(queue: Queue, records: Any) -> None:
    queue.send(b"a")
    with pytest.raises(ValueError, match=f"records {records!r}: True calls the handler with each record"):
        work(queue, print, records=records, until_empty=True)
    assert where(queue) == {"target": [b"a"]}


# -- the end of a worker, and of a claim -----------------------------------------------------------------------


def test_a_worker_that_is_asked_to_stop_finishes_the_record_and_leaves_the_rest(queue: Queue) -> None:
    queue.send(lines(1, 5), type="text")
    stop = Stop()

    def handler(record: Record) -> None:
        if record.number == 2:
            stop.ask()
            raise Fail("bad")

    report = work(queue, handler, records=True, stop=stop)
    assert counted(report) == {"acked": 1, "failed": 1, "returned": 1} and report.stopped
    assert where(queue) == {"processed": [b"1"], "error": [b"2\n"], "target": [lines(3, 5)]}
    (left,) = queue.browse("target")
    assert (left.delivery_count, left._name.first) == (0, 3)


def test_a_second_request_gives_the_running_record_back_with_the_rest(queue: Queue) -> None:
    queue.send(lines(1, 4), type="text")
    running, go_on = threading.Event(), threading.Event()

    def handler(record: Record) -> None:
        if record.number == 2:
            running.set()
            go_on.wait(30)

    try:
        with Working(queue, handler, records=True) as working:
            assert running.wait(10)
            working.stop.ask()
            working.stop.ask()
            until(lambda: queue.counts()["target"] == 1, "what is left")
    finally:
        go_on.set()
    assert counted(working.report) == {"acked": 1, "returned": 1}
    assert where(queue) == {"processed": [b"1"], "target": [lines(2, 4)]}


def test_halt_commits_what_is_settled_and_leaves_the_rest(queue: Queue) -> None:
    queue.send(lines(1, 3), type="text")

    def handler(record: Record) -> None:
        if record.number == 2:
            raise Halt("no database")

    report = work(queue, handler, records=True)
    assert counted(report) == {"acked": 1, "returned": 1} and report.halted == "no database"
    assert where(queue) == {"processed": [b"1"], "target": [lines(2, 3)]}


def test_of_a_lost_message_no_record_counts(queue: Queue) -> None:
    queue.send(lines(1, 3), type="text")

    def handler(record: Record) -> None:
        if record.number == 2:
            Path(record.message.path).rename(f"{queue.layout.error}/by-hand")

    assert counted(until_empty(queue, handler)) == {"lost": 1}
    assert where(queue) == {"error": [lines(1, 3)]}


def test_the_lease_of_a_message_is_renewed_between_its_records(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, durability="none", lease_period="300ms")
    queue.send(lines(1, 2), type="text")
    deadlines: list[Any] = []

    def handler(record: Record) -> None:
        deadlines.append(record.message.deadline)
        until(lambda: record.message.deadline != deadlines[-1], "a renewed lease")

    assert counted(until_empty(queue, handler)) == {"acked": 2}
    assert deadlines[0] != deadlines[1]


@pytest.mark.parametrize("history", [True, False])
def test_at_most_once_all_records_are_handed_out_and_none_comes_again(tmp_path: Path, history: bool) -> None:
    queue = make_queue(tmp_path, durability="none", semantics="at-most-once", history=history)
    queue.send(lines(1, 4), type="text")
    stop, seen = Stop(), list[int]()

    def handler(record: Record) -> None:
        seen.append(record.number)
        if record.number == 1:
            stop.ask()
        if record.number == 2:
            raise Retry

    report = work(queue, handler, records=True, stop=stop)
    assert seen == [1, 2, 3, 4] and counted(report) == {"acked": 3, "failed": 1}
    assert where(queue) == ({"processed": [lines(1, 4)]} if history else {})
    assert not list(Path(queue.layout.held).glob("*/*"))


def test_at_most_once_what_cannot_be_read_counts_as_one_that_failed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, durability="none", semantics="at-most-once")
    queue.send(b"\0\0\0\x01a\0\0\0\x05bc", type="frames")
    assert counted(until_empty(queue, lambda record: None)) == {"acked": 1, "failed": 1}
    assert queue.counts()["processed"] == 1


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_barrier_is_settled_as_a_whole(tmp_path: Path, is_bad: bool, by_itself: bool) -> None:
    queue = make_queue(tmp_path, durability="none", barrier_expression="JMSType = 'text'")
    queue.send(lines(1, 3), type="text")

    def handler(record: Record) -> None:
        if is_bad and record.number == 2:
            if not by_itself:
                raise Reject("two")
            record.reject("two")

    assert counted(until_empty(queue, handler)) == ({"failed": 1} if is_bad else {"acked": 3})
    assert where(queue) == {"error" if is_bad else "processed": [lines(1, 3)]}


def test_what_cannot_be_read_any_more_fails_and_what_was_read_is_settled(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(lines(1, 3), type="text")
    read = RecordReader.__iter__

    def broken(reader: RecordReader) -> Iterator[RawRecord]:
        for record in read(reader):
            if record[0] == 3:
                raise OSError(errno.EIO, "no answer")
            yield record

    monkeypatch.setattr(RecordReader, "__iter__", broken)
    assert counted(until_empty(queue, lambda record: None)) == {"acked": 2, "failed": 1}
    assert where(queue) == {"processed": [b"1\n2"], "error": [b"\n3\n"]}


# -- a handler of messages that settles in part ----------------------------------------------------------------


def test_a_handler_of_messages_may_settle_records_and_the_others_are_acknowledged(queue: Queue) -> None:
    id = queue.send(lines(1, 4), type="text").id

    def handler(message: Message) -> None:
        for record in message.records():
            if record.number == 2:
                record.reject("two")

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1, "rejected": 1}
    assert where(queue) == {"processed": [lines(1, 4)], "error": [b"2\n"]}
    assert reasons(queue) == {f"{id}-2": "two"}


def test_if_a_handler_of_messages_raises_what_it_has_not_settled_fails_together(queue: Queue) -> None:
    queue.send(lines(1, 4), type="text")

    def handler(message: Message) -> None:
        records = message.records()
        next(records).ack()
        next(records).reject("two")
        raise Fail("the database is away")

    assert counted(work(queue, handler, until_empty=True)) == {"failed": 1, "rejected": 1}
    assert where(queue) == {"processed": [b"1"], "error": [b"2\n", b"3\n4\n"]}
