"""The worker: messages become what handlers say, and it ends when it is asked to."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from helpers import drop, make_queue, names_in, only_woken, reopened, take, until, where
from workers import Working, counted, reason_in

import dropq
from dropq import Message, Queue, Reject, Retry, StorageError, Subscription, work
from dropq.lifecycle.settlement import Claims
from dropq.storage import watch
from dropq.worker import loop
from dropq.worker.command import Command
from dropq.worker.loop import Fail, Stop, stop_on_signals
from dropq.worker.reporter import Handled, Reporter
from dropq.worker.run import run
from dropq.worker.sources import Sources


def until_processed(queue: Queue, body: bytes, what: str) -> None:
    """Wait until a body lies in processed/."""
    until(lambda: body in where(queue).get("processed", []), what)


# -- what becomes of a message -------------------------------------------------------------------------------


def test_a_handler_that_returns_acknowledges(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b", b"c"])
    bodies: list[bytes] = []
    report = work(queue, lambda message: bodies.append(message.body), until_empty=True)
    assert bodies == [b"a", b"b", b"c"]
    assert where(queue) == {"processed": [b"a", b"b", b"c"]}
    assert counted(report) == {"acked": 3}


def test_an_exception_fails_the_message_and_keeps_the_traceback_from_the_handler_on(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")

    def broken(message: Message) -> None:
        raise KeyError("no such thing")

    assert counted(work(queue, broken, until_empty=True)) == {"failed": 1}
    reason = reason_in(queue, "error")
    assert reason["reason"] == "failed" and reason["detail"] == "KeyError: 'no such thing'"
    assert "in broken" in reason["traceback"] and "in _handle" not in reason["traceback"]


def test_redelivery_attempts_decide_how_often_a_failing_message_comes_back(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=2)
    queue.send(b"a")

    def broken(message: Message) -> None:
        raise Fail("not today", weather="rain")

    runs = [counted(work(queue, broken, until_empty=True)) for _ in range(4)]
    assert runs == [{"failed": 1}] * 3 + [{}]
    reason = reason_in(queue, "error")
    assert (reason["detail"], reason["weather"], reason["delivery"]) == ("not today", "rain", 3)


def test_retry_gives_back_with_its_delay_and_reject_refuses_at_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=5)
    queue.send_many([b"later", b"never"])

    def handler(message: Message) -> None:
        raise Retry("1h") if message.body == b"later" else Reject("nobody wants it", code=7)

    assert counted(work(queue, handler, until_empty=True)) == {"retried": 1, "rejected": 1}
    assert where(queue) == {"delayed": [b"later"], "error": [b"never"]}
    reason = reason_in(queue, "error")
    assert (reason["reason"], reason["detail"], reason["code"]) == ("rejected", "nobody wants it", 7)


class Mute(Exception):
    def __str__(self) -> str:
        return self.args[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (Reject("no", stderr=b"oops\xff"), {"detail": "no", "stderr": "oops\ufffd"}),
        (Fail("no", at=Path("x")), {"detail": "no", "at": "PosixPath('x')"}),
        (Mute(1), {"detail": "Mute"}),
    ],
    ids=["bytes", "a path", "no text"],
)
def test_whatever_a_handler_says_of_a_message_ends_no_worker(
    tmp_path: Path, raised: Exception, says: dict[str, str], records: bool
) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=0)
    queue.send_many([{"body": body, "type": "text"} for body in ("bad\n", "good\n")])

    def handler(item: Any) -> None:
        if b"bad" in item.body if isinstance(item, Message) else b"bad" in item.data:
            raise raised

    work(queue, handler, until_empty=True, records=records)
    assert where(queue) == {"error": [b"bad\n"], "processed": [b"good\n"]}
    assert reason_in(queue, "error").items() >= says.items()


def test_a_retry_without_a_delay_is_delivered_again_by_the_same_worker(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    deliveries: list[int] = []

    def handler(message: Message) -> None:
        deliveries.append(message.delivery_count)
        if len(deliveries) < 3:
            raise Retry

    with Working(queue, handler) as working:
        until_processed(queue, b"a", "the third try")
    assert counted(working.report) == {"retried": 2, "acked": 1}
    assert deliveries == [1, 2, 3]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_until_empty_takes_each_message_once_at_most_and_says_what_it_left(tmp_path: Path, concurrency: int) -> None:
    queue = make_queue(tmp_path)
    ids = [queue.send(body).id for body in (b"again", b"fine", b"later", b"again")]
    drop(queue, "report.csv", b"again")
    taken: list[str] = []

    def handler(message: Message) -> None:
        taken.append(message.id)
        if message.body != b"fine":
            raise Retry("1h" if message.body == b"later" else None)

    report = work(queue, handler, until_empty=True, concurrency=concurrency)
    assert sorted(taken) == sorted([*ids, "report.csv"])
    assert counted(report) == {"retried": 4, "acked": 1}
    assert where(queue) == {"target": [b"again"] * 3, "delayed": [b"later"], "processed": [b"fine"]}
    assert sorted(left.id for left in report.left) == sorted([ids[0], *ids[2:], "report.csv"])
    assert [left.id for left in report.left if left.due is not None] == [ids[2]]
    assert counted(work(queue, lambda message: None, until_empty=True)) == {"acked": 3}, "another run takes them"


@pytest.mark.parametrize("concurrency", [1, 3])
def test_until_empty_takes_each_message_once_also_where_a_sender_gave_an_id_twice(
    tmp_path: Path, concurrency: int
) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([{"body": body, "message_id": id} for body, id in ((b"1", "X"), (b"2", "X"), (b"3", "Y"))])
    taken: list[bytes] = []

    def handler(message: Message) -> None:
        taken.append(message.body)
        raise Retry

    report = work(queue, handler, until_empty=True, concurrency=concurrency)
    assert sorted(taken) == [b"1", b"2", b"3"]
    assert sorted(left.id for left in report.left) == ["X", "X", "Y"]


def test_until_empty_takes_a_message_whose_namesake_was_refused(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([{"body": body, "message_id": "X"} for body in (b"bad", b"good")])

    def handler(message: Message) -> None:
        if message.body == b"bad":
            raise Reject("no")

    assert counted(work(queue, handler, until_empty=True)) == {"rejected": 1, "acked": 1}
    assert where(queue) == {"error": [b"bad"], "processed": [b"good"]}


def test_what_the_queue_sets_aside_as_given_back_too_often_has_failed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_cancels=1)
    queue.send(b"a")
    with Command(["sh", "-c", "exit 75"]) as handler:
        report = work(queue, handler, until_empty=True)
    assert (counted(report), report.left) == ({"failed": 1}, [])
    assert where(queue) == {"error": [b"a"]}


def test_until_empty_does_not_count_a_lost_claim_among_what_it_left(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")

    def handler(message: Message) -> None:
        os.rename(message.path, Path(queue.layout.processed) / "elsewhere")

    report = work(queue, handler, until_empty=True)
    assert (counted(report), report.left) == ({"lost": 1}, [])


def test_until_empty_waits_for_a_limit_that_others_fill_also_where_barriers_may_come(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="/sync = 1", max_backlog=1)
    queue.send_many([b'{"n": 1}', b'{"n": 2}', b'{"n": 3}'])
    others: list[threading.Timer] = []

    def handler(message: Message) -> None:
        if message.body == b'{"n": 1}':
            message.nack("1h")
            others.append(threading.Timer(0.3, take(reopened(queue)).ack))
            others[0].start()

    report = work(queue, handler, until_empty=True)
    others[0].join()
    assert counted(report) == {"retried": 1, "acked": 1}
    assert where(queue) == {"delayed": [b'{"n": 1}'], "processed": [b'{"n": 2}', b'{"n": 3}']}


@pytest.mark.parametrize("returncode", [[1], "143", 1.5])
def test_an_exception_with_a_return_code_of_any_kind_fails_its_message_alone(tmp_path: Path, returncode: Any) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])

    def handler(message: Message) -> None:
        error = RuntimeError("so")
        error.returncode = returncode  # type: ignore[attr-defined]
        raise error

    assert counted(work(queue, handler, until_empty=True)) == {"failed": 2}


def test_commands_that_exit_by_themselves_as_stopped_are_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SIGNAL_SPREAD", 10.0)
    queue = make_queue(tmp_path)
    queue.send_many([b"a"] * 4)
    began = time.monotonic()
    with Command(["sh", "-c", "exit 143"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 4}
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("message_id", [None, "X"])
def test_until_empty_leaves_what_comes_due_again_while_it_runs(tmp_path: Path, message_id: str | None) -> None:
    queue = make_queue(tmp_path, redelivery_delay="1ms")
    queue.send_many([{"body": b"again", "message_id": message_id, "priority": 9}, b"last"])

    def handler(message: Message) -> None:
        if message.body == b"again":
            raise Retry
        queue.sweep()
        until(lambda: queue.sweep().total or where(queue).get("target"), "the first is due again")

    assert counted(work(queue, handler, until_empty=True)) == {"retried": 1, "acked": 1}
    assert where(queue) == {"target": [b"again"], "processed": [b"last"]}


def test_until_empty_ends_before_a_barrier_that_waits_for_what_came_back(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="/sync = 1", redelivery_delay="1h")
    queue.send_many([b'{"n": 1}', b'{"sync": 1}'])

    def handler(message: Message) -> None:
        raise Retry

    report = work(queue, handler, until_empty=True)
    assert counted(report) == {"retried": 1}
    assert where(queue) == {"delayed": [b'{"n": 1}'], "target": [b'{"sync": 1}']}


def test_until_empty_takes_its_share_of_a_barrier_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="/sync = 1")
    queue.send(b'{"sync": 1}')
    taken: list[str] = []

    def handler(message: Message) -> None:
        taken.append(message.id)
        raise Retry

    assert counted(work(queue, handler, until_empty=True)) == {"retried": 1}
    assert len(taken) == 1
    assert where(queue) == {"target": [b'{"sync": 1}']}


def test_a_line_is_logged_for_each_message_that_does_not_go_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=1, redelivery_delay="4s")
    queue.send_many([b"75", b"65", b"3"])
    with Command(["sh", "-c", "exit $(cat)"]) as handler:
        work(queue, handler, until_empty=True)
    first, second, third = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"message \S+ given back \(exit status 75\), try 1, again in (4|3.9)s", first)
    assert re.fullmatch(r"message \S+ rejected \(exit status 65\), try 1, in error/ now", second)
    assert re.fullmatch(r"message \S+ failed \(exit status 3\), try 1 of 2, again in (4|3.9)s", third)


def test_the_number_of_tries_is_that_of_the_limit_that_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=5, max_deliveries=2)
    queue.send(b"3")
    with Command(["sh", "-c", "exit $(cat)"]) as handler:
        work(queue, handler, until_empty=True)
        work(queue, handler, until_empty=True)
    first, last = [record.getMessage() for record in caplog.records]
    assert first.endswith("failed (exit status 3), try 1 of 2, again at once")
    assert last.endswith("failed (exit status 3), try 2 of 2, in error/ now")


def test_a_delay_that_is_none_is_the_handlers_failure(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")

    def handler(message: Message) -> None:
        raise Retry("soon")

    assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    assert "'soon' is not a duration" in reason_in(queue, "error")["detail"]


@pytest.mark.parametrize(
    ("settle", "state", "counts"),
    [
        (Message.ack, "processed", "acked"),
        (lambda message: message.nack("1h"), "delayed", "retried"),
        (lambda message: message.fail("so"), "error", "failed"),
        (Message.expire, "expired", "failed"),
    ],
)
def test_a_message_that_its_handler_settled_is_left_alone(
    tmp_path: Path, settle: Callable[[Message], None], state: str, counts: str
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    assert counted(work(queue, settle, until_empty=True)) == {counts: 1}
    assert where(queue) == {state: [b"a"]}


def test_an_exception_after_the_handler_settled_changes_nothing(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")

    def handler(message: Message) -> None:
        message.ack()
        raise RuntimeError("too late")

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
    assert where(queue) == {"processed": [b"a"]}


def test_a_claim_that_was_lost_is_counted_and_logged_and_nothing_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    deliveries: list[bool] = []

    def handler(message: Message) -> None:
        deliveries.append(message.redelivered)
        if len(deliveries) == 1:
            queue.requeue(state="processing")

    assert counted(work(queue, handler, until_empty=True)) == {"lost": 1}
    assert where(queue) == {"target": [b"a"]}
    assert "lost: somebody else has settled it or taken it back, or its lease ran out; nothing" in caplog.text
    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}


def test_at_most_once_a_failing_message_stays_settled(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, semantics="at-most-once")
    queue.send_many([b"good", b"bad"])

    def handler(message: Message) -> None:
        if message.body == b"bad":
            raise Retry

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1, "failed": 1}
    assert where(queue) == {"processed": [b"bad", b"good"]}


def test_a_refusing_file_system_ends_the_worker_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])

    def refuse(*args: object) -> None:
        raise StorageError("No space left on device; the message stays in processing/")

    monkeypatch.setattr(Claims, "archive", refuse)
    with pytest.raises(StorageError, match="No space left"):
        work(queue, lambda message: None)
    assert where(queue) == {"target": [b"a", b"b"]}


# -- the loop ------------------------------------------------------------------------------------------------


def test_as_many_messages_as_asked_are_handled_at_a_time_and_no_more_are_claimed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"x"] * 9)
    together = threading.Barrier(3)
    claimed: list[int] = []

    def handler(message: Message) -> None:
        together.wait(20)  # breaks unless three are here
        claimed.append(len(names_in(queue, "processing")))
        together.wait(20)

    assert counted(work(queue, handler, concurrency=3, until_empty=True)) == {"acked": 9}
    assert set(claimed) == {3}


def test_the_cap_of_the_queue_is_respected(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_per_subscription_backlog=1)
    queue.send_many([b"x"] * 5)
    claimed: list[int] = []
    work(queue, lambda message: claimed.append(len(names_in(queue, "processing"))), concurrency=3, until_empty=True)
    assert claimed == [1] * 5


def test_until_empty_ends_without_waiting_for_what_is_delayed_or_held_by_others(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"held")
    with queue.subscribe() as other:
        assert other.receive()
        queue.send(b"delayed", delay="1h")
        queue.send(b"waiting")
        assert counted(work(queue, lambda message: None, until_empty=True)) == {"acked": 1}
        assert where(queue) == {"delayed": [b"delayed"], "processing": [b"held"], "processed": [b"waiting"]}


def test_until_empty_waits_for_what_runs_here_as_it_may_send_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    found_none: list[None] = []
    receive = Subscription.receive

    def counting(subscription: Subscription) -> Message | None:
        message = receive(subscription)
        if message is None:
            found_none.append(None)
        return message

    def handler(message: Message) -> None:
        if message.body == b"a":
            until(lambda: len(found_none) > 2, "the worker sees an empty queue")
            queue.send(b"b")

    monkeypatch.setattr(Subscription, "receive", counting)
    monkeypatch.setattr(Subscription, "_next_attempt", 0.02)
    assert counted(work(queue, handler, concurrency=2, until_empty=True)) == {"acked": 2}


def test_until_empty_goes_on_with_what_a_handler_sends(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"5")

    def handler(message: Message) -> None:
        if left := int(message.body):
            queue.send(str(left - 1))

    assert counted(work(queue, handler, concurrency=2, until_empty=True)) == {"acked": 6}


def test_a_queue_that_is_not_there_and_a_concurrency_of_none_are_refused(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    with pytest.raises(ValueError, match="concurrency 0"):
        work(queue, lambda message: None, concurrency=0)
    with pytest.raises(dropq.NoSuchQueue):
        work(queue.root.queue("none"), lambda message: None)


def test_a_queue_that_is_deleted_ends_its_worker(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")

    def handler(message: Message) -> None:
        message.ack()
        queue.root.delete_queue("q", force=True)

    with pytest.raises(dropq.NoSuchQueue):
        work(queue, handler)


def test_a_message_that_comes_wakes_the_worker_by_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = only_woken(monkeypatch)
    queue = make_queue(tmp_path)
    with Working(queue, lambda message: None):
        for body in (b"a", b"b", b"c"):
            until(waits, "the worker to wait")
            queue.send(body)
            until_processed(queue, body, "an event wakes the worker")


def test_a_polling_worker_needs_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subscription, "_next_attempt", 60.0)
    monkeypatch.setattr(watch, "_events", None)
    queue = make_queue(tmp_path)
    with Working(queue, lambda message: None, poll=True):
        for body in (b"a", b"b"):
            queue.send(body)
            until_processed(queue, body, "polling finds the message")


def test_of_several_queues_the_first_that_has_a_message_comes_first(tmp_path: Path) -> None:
    one, two = make_queue(tmp_path / "one"), make_queue(tmp_path / "two")
    two.send_many([b"2", b"2"])
    one.send_many([b"1", b"1"])
    bodies: list[bytes] = []

    def handler(message: Message) -> None:
        bodies.append(message.body)
        if len(bodies) == 3:
            one.send(b"late")

    assert counted(work([one, two], handler, until_empty=True)) == {"acked": 5}
    assert bodies == [b"1", b"1", b"2", b"late", b"2"]


def test_several_queues_take_turns_where_work_is_fair(tmp_path: Path) -> None:
    waiting = {"one": 3, "two": 1, "three": 2}
    queues = [make_queue(tmp_path / name) for name in waiting]
    for queue, (name, count) in zip(queues, waiting.items(), strict=True):
        queue.send_many([name] * count)
    texts: list[str] = []
    report = work(queues, lambda message: texts.append(message.text), until_empty=True, fair=True)
    assert counted(report) == {"acked": 6}
    assert texts == ["one", "two", "three", "one", "three", "one"]


def test_a_message_in_any_of_several_queues_wakes_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = only_woken(monkeypatch)
    queues = [make_queue(tmp_path / name) for name in ("one", "two")]
    with Working(queues, lambda message: None):
        for queue in (*queues, *queues):
            body = os.urandom(8)
            until(waits, "the worker to wait")
            queue.send(body)
            until_processed(queue, body, "the message is handled")


def test_the_filter_and_the_client_id_are_those_of_every_subscription(tmp_path: Path) -> None:
    queues = [make_queue(tmp_path / name) for name in ("one", "two")]
    for queue in queues:
        queue.send(b"yes", type="y")
        queue.send(b"no", type="n")
    owners: list[str | None] = []
    work(queues, lambda message: owners.append(message.owner), until_empty=True, filter="JMSType = 'y'", client_id="me")
    assert [owner is not None and owner.startswith("me") for owner in owners] == [True, True]
    assert [where(queue) for queue in queues] == [{"processed": [b"yes"], "target": [b"no"]}] * 2


def test_no_queue_at_all_and_a_queue_that_is_named_twice_are_refused(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with pytest.raises(ValueError, match="there is none"):
        work([], print)
    with pytest.raises(ValueError, match="queue q is named twice: name each queue once"):
        work([queue, reopened(queue)], print)
    assert [message.delivery_count for message in queue.browse()] == [0]


def test_a_reporter_that_raises_ends_the_worker_and_no_message_is_the_worse_for_it(tmp_path: Path) -> None:
    class Full(Reporter):
        def handled(self, handled: Handled) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b", b"c"])
    begun, stop = threading.Semaphore(0), Stop()

    def handler(message: Message) -> None:
        begun.release()
        stop.ask()
        stop.ask()
        until(lambda: not message.held, "the message is given back")

    before = set(threading.enumerate())
    with queue.subscribe(max_backlog=3) as subscription, pytest.raises(OSError, match="No space left"):
        run(Sources([subscription]), handler, stop, concurrency=3, reporter=Full())
    assert {message.delivery_count for message in queue.browse()} == {0} and queue.counts()["target"] == 3
    until(lambda: set(threading.enumerate()) <= before, "the worker's threads have ended")


def test_what_no_event_told_of_is_found_by_the_rescan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        fd = None

        def renew(self) -> None: ...

    monkeypatch.setattr(watch, "_events", lambda folder, wake: Silent())
    queue = make_queue(tmp_path)
    with Working(queue, lambda message: None):
        for body in (b"a", b"b"):
            queue.send(body)
            until_processed(queue, body, "the rescan finds the message")


def test_a_message_is_handled_when_its_delay_is_over(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    with Working(queue, lambda message: None):
        queue.send(b"a", delay="300ms")
        until(lambda: where(queue) == {"processed": [b"a"]}, "the delayed message is handled")


# -- ending --------------------------------------------------------------------------------------------------


def test_one_request_finishes_what_runs_and_takes_no_more(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    stop = Stop()

    def handler(message: Message) -> None:
        stop.ask()

    assert counted(work(queue, handler, stop=stop)) == {"acked": 1}
    assert where(queue) == {"processed": [b"a"], "target": [b"b"]}
    assert counted(work(queue, handler, stop=stop)) == {}


def test_an_event_is_a_request_too(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    stop = threading.Event()
    assert counted(work(queue, lambda message: stop.set(), stop=stop)) == {"acked": 1}


def test_a_second_request_gives_back_what_a_handler_still_works_on(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    stop, go = Stop(), threading.Event()

    def handler(message: Message) -> None:
        stop.ask()
        stop.ask()
        assert go.wait(60)

    try:
        assert counted(work(queue, handler, stop=stop)) == {"returned": 1}
        assert [message.delivery_count for message in queue.browse()] == [0]
    finally:
        go.set()


def test_ctrl_c_finishes_what_runs_and_pythons_own_handling_is_back_afterwards(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def handler(message: Message) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: asked, "the signal is heard")

    asked: list[bool] = []
    before = Stop.ask

    def ask(stop: Stop) -> None:
        before(stop)
        asked.append(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stop, "ask", ask)
        assert counted(work(queue, handler)) == {"acked": 1}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_ends_the_program_gives_its_message_back(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with pytest.raises(SystemExit, match="3"):
        work(queue, lambda message: sys.exit(3))
    assert where(queue) == {"target": [b"a"]}


def test_signals_ask_for_as_long_as_the_block_lasts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(Stop()) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.times == 1, "SIGTERM is heard")
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: stop.times == 2, "SIGINT is heard")
    assert signal.getsignal(signal.SIGTERM) is before


def test_whoever_waits_for_a_stop_sees_it_whenever_it_was_asked() -> None:
    stop = Stop()
    assert not stop.wait(0) and not stop.wait(-1)
    asking = threading.Timer(0.05, stop.ask)
    asking.start()
    assert stop.wait(600)
    asking.join()
    assert stop.wait(600) and stop.times == 1


def test_a_signal_at_any_moment_of_a_wait_for_a_stop_ends_it() -> None:
    """A handler that sets an event instead waits for the lock of that wait, in one of some hundred rounds."""

    def interrupted() -> None:
        for number in range(5_000):
            stop = Stop()
            signal.signal(signal.SIGALRM, lambda *_, stop=stop: stop.ask())
            signal.setitimer(signal.ITIMER_REAL, (20 + number % 60) / 1_000_000)
            until(lambda stop=stop: stop.wait(0.1), "the stop")  # type: ignore[misc]

    in_child(interrupted, longest=120)
