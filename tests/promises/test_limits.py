"""Switches and limits, as people and configurations set them, among processes that see nothing else of each other."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from actors import finish, said, start
from children import in_child, unprivileged
from helpers import Make, base, files, make_queue, names_in, reopened, take, until, where

import dropq.spark
from dropq import Message, NoSuchQueue, Queue, QueueFull, Sent
from dropq.lifecycle.timing import Timing
from dropq.policies import send_limits
from dropq.policies.send_limits import WriteLock
from dropq.storage import reading
from dropq.storage.clock import Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
Run = Callable[..., tuple[int, str, str]]

#: Senders say at once why they wait.
TALKATIVE = Timing(first_word=0)
#: They look for a write-lock with each send, too.
QUICK = Timing(first_word=0, max_age=0.001)
#: They count for each message; else one that was refused may be refused once more by the same count.
COUNTED = Timing(listing_share=0)

#: A property that does not fit a name.
LONG = {"text": "x" * 300}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Make]:
    """Make queues that are full: of three messages, if the test does not say of how many."""
    made: list[Queue] = []

    def one(*, max_unprocessed: int = 3, **options: Any) -> Queue:
        made.append(make_queue(tmp_path / f"root{len(made)}", max_unprocessed=max_unprocessed, **options))
        made[-1].send_many([f"waits {number}" for number in range(max_unprocessed)])
        return made[-1]

    yield one
    for queue in made:
        queue.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def waits(log: pytest.LogCaptureFixture, future: Future[Any], why: str) -> None:
    """Wait until a sender waits, and says why."""
    until(lambda: why in log.text or future.done(), f"a sender that waits: {why}")
    assert not future.done(), future.result()


def written(queue: Queue) -> list[str]:
    """What a sender writes before its message is in target/: drafts, and metadata that does not fit a name."""
    return names_in(queue, "working") + sorted(os.listdir(queue.root.layout.meta))


def unprocessed(queue: Queue) -> int:
    counts = queue.counts()
    return counts["target"] + counts["delayed"] + counts["processing"]


def fill(queue: Queue) -> int:
    """Send until the queue is full; return how many that were."""
    sent = 0
    with suppress(QueueFull):
        while True:
            queue.send(b"x")
            sent += 1
    return sent


# -- reject ------------------------------------------------------------------------------------------------------------


def test_a_queue_that_is_full_rejects_before_anything_is_written(full: Make, tmp_path: Path) -> None:
    queue = full()
    source = tmp_path / "source"
    source.write_bytes(b"stays")
    before = written(queue), where(queue)
    sends: list[Callable[[], object]] = [
        lambda: queue.send(b"x"),
        lambda: queue.send(b"x", properties=LONG),
        lambda: queue.send(b"x", delay="1h"),
        lambda: queue.send_file(source),
        lambda: queue.send_file(source, move=True),
        lambda: queue.send_file(io.BytesIO(b"x")),
        lambda: queue.send_many([b"x", {"body": b"y", "properties": LONG}]),
        lambda: queue.writer(properties=LONG).__enter__(),
    ]
    for send in sends:
        with pytest.raises(QueueFull, match=r"queue q is full \(max_unprocessed = 3\).*not sent.*`dropq ls q`"):
            send()
    assert (written(queue), where(queue), source.read_bytes()) == (*before, b"stays")


def test_a_message_counts_until_it_is_settled(full: Make) -> None:
    queue = full(timing=COUNTED)
    message = take(queue)
    with pytest.raises(QueueFull):
        queue.send(b"x")
    message.ack()
    assert queue.send(b"takes its place", delay="1h").accepted
    with pytest.raises(QueueFull):
        queue.send(b"the delayed one counts, too")
    take(queue).reject("no")
    queue.send(b"and what failed does not")


def test_what_cannot_be_sent_at_all_is_told_by_a_full_queue_as_well(full: Make) -> None:
    queue = full(overflow="block")
    for fields in ({"priority": 2**31}, {"properties": {"no name": 1}}, {"delay": "5 parsecs"}):
        with pytest.raises(ValueError):
            queue.send(b"x", **fields)


def test_a_send_of_many_keeps_what_it_sent_and_tells_how_many(full: Make) -> None:
    queue = full()
    take(queue).ack()
    take(queue).ack()
    with pytest.raises(QueueFull) as raised:
        queue.send_many([b"first", b"second", b"third", b"fourth"])
    assert raised.value.__notes__ == ["2 messages of this send_many were sent before the error"]
    assert [queue.find(one.id).body for one in raised.value.sent] == [b"first", b"second"]
    assert where(queue)["target"] == [b"first", b"second", b"waits 2"] and written(queue) == []


def test_what_comes_by_other_ways_is_counted_and_never_stopped(full: Make) -> None:
    queue = full()
    other = queue.root.create_queue("other", max_unprocessed=1)
    take(queue).reject("no")
    queue.send(b"fills it again")
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    draft = Path(queue.layout.working, "by-hand")
    draft.write_bytes(b"by hand")
    draft.rename(Path(queue.layout.target, "by-hand"))
    take(queue).nack()
    assert unprocessed(queue) == 5
    assert all(outcome.ok for outcome in queue.move(other))
    assert unprocessed(other) == 5
    with pytest.raises(QueueFull):
        other.send(b"x")


def test_one_sender_alone_never_goes_beyond_the_limit(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", max_unprocessed=100)
    queue.send_many([b"x"] * 60)
    assert fill(queue) == 40
    assert unprocessed(queue) == 100


def test_threads_go_beyond_the_limit_by_what_they_are_sending_at_the_most(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    queue = make_queue(tmp_path / "root", max_unprocessed=200)

    sent = sum(threads.map(fill, [queue] * 4))
    assert 200 <= sent == unprocessed(queue) <= 200 + 3


def test_processes_go_beyond_the_limit_by_what_the_others_sent_since_they_counted(tmp_path: Path) -> None:
    """Each counts on its own, and so adds at most the limit to what it counted: that is the bound."""
    queue = make_queue(tmp_path / "root", max_unprocessed=100)
    notes = tmp_path / "notes"
    senders = [start("fill", tmp_path / "root", notes, f"s{number}") for number in range(4)]
    try:
        assert [said(sender) for sender in senders] == ["ready"] * 4
        for sender in senders:
            assert sender.stdin is not None
            sender.stdin.write(b"\n")
            sender.stdin.flush()
        sent = sum(int(said(sender)) for sender in senders)
    finally:
        finish(*senders)
    assert 100 <= sent == unprocessed(queue) <= 4 * 100
    with pytest.raises(QueueFull):
        reopened(queue).send(b"nobody sends any more")
    assert names_in(queue, "working") == []


def test_a_child_counts_for_itself_even_if_a_thread_of_its_parent_was_counting(full: Make) -> None:
    queue = full()
    with pytest.raises(QueueFull):
        queue.send(b"x")
    take(queue).ack()
    lock = queue._limits._limit._tally._lock  # type: ignore[union-attr]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(10)
        assert in_child(lambda: queue.send(b"of the child").accepted)
    finally:
        done.set()
        holder.join()
    assert b"of the child" in where(queue)["target"]


def test_nothing_is_counted_where_there_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path / "root", timing=Timing(max_age=3600))
    looks: list[str] = []
    is_there = reading.is_there

    def count(*_: object) -> Iterator[int]:
        raise AssertionError("it was counted")

    def look(path: str, clock: Clock) -> bool:
        looks.append(path)
        return is_there(path, clock)

    monkeypatch.setattr(reading, "message_counts", count)
    monkeypatch.setattr(reading, "is_there", look)
    for _ in range(20):
        queue.send(b"x")
    queue.send_many([b"x"] * 3000)
    assert looks == [queue.layout.write_lock]


def test_a_count_ends_at_the_limit(full: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = full()
    monkeypatch.setattr(reading, "CHUNK", 2)
    for number in range(50):
        (base(queue) / "target" / f"dropped-{number}").touch()
    counted: list[int] = []
    counts = reading.message_counts

    def count(folder: str, patterns: tuple[str, ...]) -> Iterator[int]:
        for number in counts(folder, patterns):
            counted.append(number)
            yield number

    monkeypatch.setattr(reading, "message_counts", count)
    with pytest.raises(QueueFull):
        reopened(queue).send(b"x")
    assert sum(counted) <= 4


# -- discard -----------------------------------------------------------------------------------------------------------


def test_a_queue_that_is_full_discards_and_says_so(full: Make, tmp_path: Path) -> None:
    queue = full(overflow="discard")
    before = written(queue), where(queue)
    source = tmp_path / "source"
    source.write_bytes(b"stays")
    results = [queue.send(b"x", message_id="mine"), queue.send(b"x"), queue.send(b"x", properties=LONG)]
    results += [queue.send_file(source, move=True), queue.send_file(io.BytesIO(b"x"))]
    results += queue.send_many([b"x", {"body": b"y", "message_id": "theirs"}])
    with queue.writer(properties=LONG) as nowhere:
        nowhere.write(b"x" * 100_000)
    assert {(one.accepted, one.delivered_to) for one in results} == {(False, "")}
    assert (results[0].id, results[-1].id) == ("mine", "theirs") and all(one.id for one in results)
    assert (written(queue), where(queue), source.read_bytes()) == (*before, b"stays")


def test_what_fits_is_sent_and_only_the_rest_is_discarded(full: Make) -> None:
    queue = full(timing=COUNTED, overflow="discard")
    take(queue).ack()
    sent = queue.send_many([b"fits", b"does not", b"neither"])
    assert [(one.accepted, one.delivered_to) for one in sent] == [(True, "q"), (False, ""), (False, "")]
    assert queue.find(sent[0].id).body == b"fits"
    take(queue).ack()
    assert queue.send(b"now").accepted


def test_the_log_tells_of_discarded_messages_now_and_then_with_their_number(
    full: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = full(overflow="discard")
    for _ in range(10):
        queue.send(b"x")
    (first,) = caplog.messages
    assert "queue q is full (max_unprocessed = 3)" in first and first.endswith("discarded: 1 since the last warning")
    later = time.monotonic() + send_limits.LOG_DISCARDS_EVERY
    monkeypatch.setattr(time, "monotonic", lambda: later)
    queue.send(b"x")
    assert caplog.messages[1].endswith("discarded: 10 since the last warning")


# -- block -------------------------------------------------------------------------------------------------------------


def test_a_sender_waits_for_room_and_says_why(
    full: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    queue = full(timing=TALKATIVE, overflow="block")
    sent = threads.submit(queue.send, b"waited", properties=LONG)
    waits(caplog, sent, "queue q is full (max_unprocessed = 3): senders wait for consumers")
    assert written(queue) == [] and not sent.done()
    take(reopened(queue)).ack()
    assert sent.result(30).accepted and unprocessed(queue) == 3


@pytest.mark.parametrize("history", [True, False])
def test_whatever_makes_room_ends_the_wait(
    full: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, history: bool
) -> None:
    queue = full(timing=TALKATIVE, overflow="block", history=history)
    for settle in (Message.ack, Message.reject, Message.expire):
        caplog.clear()
        sent = threads.submit(queue.send, b"x")
        waits(caplog, sent, "senders wait")
        with reopened(queue).subscribe() as consumer:
            message = consumer.receive()
            assert message is not None
            settle(message, *(["no"] if settle == Message.reject else []))
        assert sent.result(30).accepted


def test_a_send_of_many_goes_on_as_room_comes(
    full: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    queue = full(timing=TALKATIVE, overflow="block")
    sent = threads.submit(queue.send_many, [str(number) for number in range(20)])
    waits(caplog, sent, "senders wait")
    bodies: list[str] = []
    with reopened(queue).subscribe() as consumer:
        while len(bodies) < 23:
            message = consumer.receive(30)
            assert message is not None
            bodies.append(message.text)
            assert unprocessed(queue) <= 3
            message.ack()
    assert bodies[3:] == [str(number) for number in range(20)] and len(sent.result(30)) == 20


def test_senders_that_block_and_a_consumer_that_drains_lose_nothing(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", max_unprocessed=5, overflow="block")
    notes = tmp_path / "notes"
    senders = [start("produce", tmp_path / "root", notes, f"s{number}", 100) for number in range(3)]
    try:
        bodies, most = list[str](), 0
        while len(bodies) < 300:
            message = queue.receive(60)
            assert message is not None, f"only {len(bodies)} of 300 came"
            most = max(most, unprocessed(queue))
            bodies.append(message.text)
            message.ack()
        assert [sender.wait(30) for sender in senders] == [0, 0, 0]
    finally:
        finish(*senders)
    assert sorted(bodies) == sorted(f"s{sender}-{number}" for sender in range(3) for number in range(100))
    assert 5 <= most <= 3 * 5
    queue.close()


def test_a_blocked_sender_that_is_killed_leaves_nothing_and_the_others_go_on(full: Make, tmp_path: Path) -> None:
    queue = full(overflow="block")
    notes = tmp_path / "notes"
    killed, other = (start("produce", queue.root.path, notes, name, 1) for name in ("killed", "other"))
    try:
        logs = list((notes / "out").iterdir())
        until(lambda: all("senders wait" in log.read_text() for log in logs), "two senders that wait")
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        take(queue).ack()
        assert other.wait(30) == 0
    finally:
        finish(killed, other)
    assert where(queue)["target"] == [b"other-0", b"waits 1", b"waits 2"] and written(queue) == []


def test_a_queue_that_is_deleted_ends_the_wait(
    full: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    queue = full(timing=TALKATIVE, overflow="block")
    sent = threads.submit(queue.send, b"x")
    waits(caplog, sent, "senders wait")
    queue.root.delete_queue("q", force=True)
    with pytest.raises(NoSuchQueue):
        sent.result(30)


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """A queue whose write-lock is looked at for each send, and whose senders say at once why they wait."""
    return make_queue(tmp_path / "root", timing=QUICK)


def lock(queue: Queue, *lines: str) -> Path:
    """Write a write-lock, whole in one rename."""
    path = Path(queue.layout.write_lock)
    draft = path.with_name(".draft")
    draft.write_text("\n".join(lines))
    draft.rename(path)
    time.sleep(0.002)  # so long it may go unseen
    return path


@pytest.mark.parametrize("dropboxmq", [False, True])
def test_an_empty_write_lock_holds_all_senders_up_until_it_is_removed(
    tmp_path: Path,
    threads: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    dropboxmq: bool,
) -> None:
    queue = make_queue(tmp_path / "root", timing=QUICK, dropboxmq=dropboxmq)
    queue.send(b"before")
    path = lock(queue)
    assert path == base(queue) / "write-lock.properties"
    sends: list[Future[Any]] = [threads.submit(queue.send, b"x"), threads.submit(queue.send_many, [b"y", b"z"])]
    sends += [threads.submit(reopened(queue).send_file, io.BytesIO(b"file"), properties=LONG)]
    for send in sends:
        waits(caplog, send, f"{path} makes senders wait: remove it")
    assert where(queue) == {"target": [b"before"]} and written(queue) == []
    path.unlink()
    for send in sends:
        send.result(30)
    assert where(queue)["target"] == [b"before", b"file", b"x", b"y", b"z"]


def test_a_sender_that_found_no_write_lock_does_not_look_for_one_again_at_once(tmp_path: Path) -> None:
    write_lock = WriteLock("q", make_queue(tmp_path / "root").context)
    began = time.monotonic()
    assert write_lock.admit(1, whole=False) == 1
    assert write_lock.refresh_at > began


def test_a_sender_that_waits_says_why_after_a_second_and_again_every_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(send_limits, "time", SimpleNamespace(monotonic=lambda: now))
    wait = send_limits.Wait(str(tmp_path), "the queue is full", Timing())
    said: list[tuple[float, list[str]]] = []
    for moment in (100.5, 101.0, 101.5, 400.5, 401.0, 401.5):
        now = moment
        caplog.clear()
        wait.pause(0)
        said.append((moment, caplog.messages))
    assert [(moment, messages) for moment, messages in said if messages] == [
        (101.0, ["the queue is full (this sender has waited for 1 s)"]),
        (401.0, ["the queue is full (this sender has waited for 301 s)"]),
    ]


def test_senders_wait_while_target_holds_the_limit(
    queue: Queue, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send(b"before")
    lock(queue, "# at most three", "target-limit = 3")
    queue.send_many([b"second", b"third"])
    sent = threads.submit(queue.send_many, [b"fourth", b"fifth"])
    waits(caplog, sent, "senders wait")
    assert unprocessed(queue) == 3
    with reopened(queue).subscribe(max_backlog=None) as consumer:
        assert consumer.receive() is not None  # what is held is not in target/ any more
        until(lambda: len(names_in(queue, "target")) == 3, "a message in its place")
        assert not sent.done()
        assert consumer.receive() is not None
        assert all(one.accepted for one in sent.result(30))


def test_after_the_delay_a_message_is_sent_all_the_same(queue: Queue) -> None:
    lock(queue, "delay-milliseconds: 20", "target-limit: 1")
    assert queue.send(b"there is room").accepted
    began = time.monotonic()
    assert queue.send(b"waited").accepted
    assert all(one.accepted for one in queue.send_many([b"x", b"y"]))
    assert time.monotonic() - began >= 3 * 0.02
    assert len(where(queue)["target"]) == 4


@pytest.mark.parametrize(
    "line",
    [
        "target-limit=2 ",
        "target-limit=+2",
        "target-limit=2147483648",
        "\ufefftarget-limit=2",
        "target-limit=1\ndelay-milliseconds=-2",
        "target-limit=1\ndelay-milliseconds=+1",
    ],
)
def test_a_write_lock_lets_a_second_message_in_however_its_numbers_are_written(queue: Queue, line: str) -> None:
    lock(queue, line)
    assert [sent.accepted for sent in queue.send_many([b"x", b"y"])] == [True, True]


@pytest.mark.parametrize("line", ["target-limit=2 ", "target-limit=+2", "\ufefftarget-limit=2"])
def test_a_write_lock_stops_a_third_message_however_its_numbers_are_written(
    queue: Queue, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    path = lock(queue, line)
    sent = threads.submit(queue.send_many, [b"x", b"y", b"z"])
    waits(caplog, sent, "makes senders wait")
    assert len(where(queue)["target"]) == 2
    path.unlink()
    assert len(sent.result(30)) == 3


def test_a_write_lock_that_comes_and_goes_while_a_sender_sends(
    queue: Queue, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    sent: list[Sent] = []

    def send() -> None:
        while not stop.is_set():
            sent.append(queue.send(b"x"))

    sending = threads.submit(send)
    try:
        for _ in range(3):
            until(lambda: len(sent) > 10, "messages that are sent")
            caplog.clear()
            path = lock(queue)
            waits(caplog, sending, "makes senders wait")
            assert len(files(base(queue) / "target")) == len(sent)
            sent.clear()
            for file in files(base(queue) / "target"):
                (base(queue) / "target" / file).unlink()
            path.unlink()
    finally:
        stop.set()
        Path(queue.layout.write_lock).unlink(missing_ok=True)
    sending.result(30)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("target-limit=many", "target-limit = many: a whole number from 0 is allowed; 0 counts"),
        ("target-limit=-1", "target-limit = -1"),
        ("target-limit=1_000", "target-limit = 1_000"),
        ("delay-milliseconds=soon", "delay-milliseconds = soon: a whole number is allowed; -1 counts"),
        ("target_limit=9", "target_limit is no key of a write-lock: target-limit and delay-milliseconds are"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_and_counts_as_the_default(
    queue: Queue, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, line: str, told: str
) -> None:
    path = lock(queue, line)
    sent = threads.submit(queue.send, b"x")
    waits(caplog, sent, "makes senders wait")
    path.unlink()
    assert sent.result(30).accepted
    assert [message for message in caplog.messages if told in message and str(path) in message] != []


@pytest.mark.parametrize("kind", ["folder", "link", "fifo", "closed"])
def test_a_write_lock_that_cannot_be_read_counts_as_empty(tmp_path: Path, kind: str) -> None:
    queue = make_queue(tmp_path / "root", timing=TALKATIVE)
    path = Path(queue.layout.write_lock)
    makers: dict[str, Callable[[], object]] = {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "fifo": lambda: os.mkfifo(path),
        "closed": lambda: path.touch(0),
    }
    makers[kind]()

    def send() -> tuple[bool, list[str]]:
        errors: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("dropq").addHandler(handler)
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(queue.send, b"x")
            until(lambda: len(errors) > 1, "a sender that waits")
            path.rmdir() if kind == "folder" else path.unlink()
            return sent.result(30).accepted, errors

    accepted, errors = unprivileged(send)
    assert accepted and "cannot be read" in errors[0] and str(path) in errors[0] and "makes senders wait" in errors[1]


def test_a_full_queue_and_a_write_lock_are_both_obeyed(
    full: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    queue = full(timing=QUICK)
    path = lock(queue)
    sent = threads.submit(reopened(queue).send, b"x")
    waits(caplog, sent, "makes senders wait")
    path.unlink()
    with pytest.raises(QueueFull):
        sent.result(30)


def test_requeues_and_returns_pass_a_write_lock(queue: Queue) -> None:
    queue.send_many([b"x", b"y"])
    take(queue).reject("no")
    lock(queue)
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    take(queue).nack()
    assert len(where(queue)["target"]) == 2
    queue.close()


# -- read-locks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["queue", "root"])
def test_a_read_lock_that_nobody_may_read_pauses_all_the_same(tmp_path: Path, whose: str) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"x")
    path = Path(queue.layout.read_lock if whose == "queue" else queue.root.layout.read_lock)
    path.touch(0)

    def look() -> tuple[object, bool]:
        with reopened(queue).subscribe() as consumer:
            return consumer.receive(), queue.paused

    assert unprivileged(look) == (None, True)
    path.unlink()
    with reopened(queue).subscribe() as consumer:
        assert consumer.receive() is not None


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_whatever_lies_under_the_name_of_a_read_lock_pauses(tmp_path: Path, make: Callable[[Path], object]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"x")
    make(Path(queue.layout.read_lock))
    with queue.subscribe() as consumer:
        assert queue.paused and consumer.receive() is None


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `dropq send q ...` on a queue, in this process."""
    from dropq.cli.main import main

    def run(queue: Queue, *argv: str, input: bytes = b"") -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
            code = main(["--root", str(queue.root.path), "send", "q", *argv])
        return code, *capfd.readouterr()

    return run


def test_a_shell_is_told_that_a_queue_is_full(full: Make, run: Run, tmp_path: Path) -> None:
    queue = full()
    code, out, err = run(queue, input=b"x")
    assert (code, out) == (75, "")
    assert err.startswith("error: queue q is full (max_unprocessed = 3): the message was not sent; send again when")
    source = tmp_path / "source"
    source.touch()
    assert run(queue, str(source), str(source))[0] == 1 and where(queue).keys() == {"target"}


def test_of_lines_that_do_not_all_fit_those_that_were_sent_are_printed(full: Make, run: Run) -> None:
    queue = full()
    take(queue).ack()
    take(queue).ack()
    code, out, err = run(queue, "--lines", input=b"one\ntwo\nthree\nfour\n")
    assert code == 75 and err.endswith("sent=2 not_sent=2\n")
    assert [queue.find(message_id).body for message_id in out.split()] == [b"one", b"two"]


def test_a_shell_is_told_what_was_discarded(full: Make, run: Run) -> None:
    queue = full(overflow="discard")
    take(queue).ack()
    code, out, err = run(queue, "--lines", input=b"one\ntwo\nthree\n")
    assert code == 1 and "discarded=2\n" in err
    assert [queue.find(message_id).body for message_id in out.split()] == [b"one"]
    code, out, err = run(queue, "--json", input=b"x")
    assert code == 1 and '"accepted": false' in out and "discarded=1\n" in err


def test_ctrl_c_in_a_send_that_blocks_leaves_nothing(full: Make) -> None:
    queue = full(overflow="block")
    before = written(queue), where(queue)
    command = [sys.executable, "-m", "dropq", "--root", str(queue.root.path), "send", "q"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as sender:  # type: ignore[call-overload]
        sender.stdin.write(b"x")
        sender.stdin.close()
        assert b"senders wait" in sender.stderr.readline()
        sender.send_signal(signal.SIGINT)
        assert sender.wait(30) == 130
        assert sender.stdout.read() == b""
    assert (written(queue), where(queue)) == before


# -- Spark -------------------------------------------------------------------------------------------------------------


def save(spark: SparkSession, queue: Queue, count: int, **options: str) -> None:
    """Write so many rows to a queue, in two partitions."""
    dropq.spark.register(spark)
    rows = spark.range(0, count, 1, 2).selectExpr("cast(id as string) value")
    address = {"root": str(queue.root.path), "queue": "q", **options}
    rows.write.format("dropq").mode("append").options(**address).save()


def test_a_job_of_spark_is_let_in_as_a_whole(spark: SparkSession, full: Make, threads: ThreadPoolExecutor) -> None:
    from pyspark.errors import PySparkException

    queue = full(max_unprocessed=10)
    for _ in range(5):
        take(queue).ack()
    with pytest.raises(PySparkException, match="the job of 6 messages was not sent"):
        save(spark, queue, 6)
    assert (unprocessed(queue), os.listdir(queue.layout.working)) == (5, [])
    save(spark, queue, 5, jobId="fits")
    save(spark, queue, 5, jobId="fits")  # was sent before: no question of room
    assert (unprocessed(queue), os.listdir(queue.layout.working)) == (10, [])

    queue = full(max_unprocessed=10, overflow="discard")
    save(spark, queue, 1, jobId="again")
    assert (unprocessed(queue), os.listdir(queue.layout.working)) == (10, [])
    take(queue).ack()
    save(spark, queue, 1, jobId="again")
    assert b"0" in where(queue)["target"]

    queue = full(max_unprocessed=10, overflow="block")
    with pytest.raises(PySparkException, match="never has room for 11 messages at once"):
        save(spark, queue, 11)

    def drain() -> None:
        until(lambda: len(list(base(queue).glob("working/.job-*/*/*"))) == 4, "a job that is staged")
        for number in range(4):
            assert unprocessed(queue) == 10 - number  # nothing of the job came before there is room for all of it
            take(queue).ack()

    drained = threads.submit(drain)
    save(spark, queue, 4)
    drained.result(60)
    assert (unprocessed(queue), os.listdir(queue.layout.working)) == (10, [])


def test_a_job_of_spark_that_a_queue_is_too_full_for_goes_to_its_overflow_selector(
    spark: SparkSession, full: Make
) -> None:
    from pyspark.errors import PySparkException

    queue = full(max_unprocessed=10)
    rest = queue.root.create_queue("rest", durability="none", max_unprocessed=15)
    queue.add_selector("rest", to="rest", role="overflow")
    take(queue).ack()
    save(spark, queue, 2, jobId="daily")
    assert (unprocessed(queue), where(rest)) == (9, {"target": [b"0", b"1"]})
    take(queue).ack()
    save(spark, queue, 2, jobId="daily")  # was sent before, to the other queue
    assert (unprocessed(queue), unprocessed(rest)) == (8, 2)
    save(spark, queue, 2, jobId="next")
    save(spark, queue, 11)
    assert (unprocessed(queue), unprocessed(rest)) == (10, 13)
    with pytest.raises(PySparkException, match=r"queue rest is full .* the job of 3 messages was not sent"):
        save(spark, queue, 3)
    assert (unprocessed(queue), unprocessed(rest)) == (10, 13)
    assert os.listdir(queue.layout.working) == os.listdir(rest.layout.working) == []
