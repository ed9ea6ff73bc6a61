"""A record writer sends many records as one message: each that it took is sent once, or is still in the writer."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from children import in_child, killed_at_each_call
from helpers import FRESH, Make, base, names_in, take, until, where

import dropq
from dropq import DropqError, NoSuchQueue, Queue, QueueFull, RecordWriter, Sent, StorageError
from dropq.format import names
from dropq.queue import bundling
from dropq.storage.files import Storage


def bodies(queue: Queue) -> list[bytes]:
    """What waits in target/, in order of delivery."""
    return [message.body for message in queue.browse()]


def refuse(patch: pytest.MonkeyPatch, method: str, number: int, *, times: int = 1) -> list[str]:
    """Let a method of Storage raise an error at its next calls about a message; return the names it was called with."""
    called: list[str] = []
    real = getattr(Storage, method)

    def failing(self: Storage, path: str, *args: Any, **options: Any) -> Any:
        called.append(os.path.basename(path))
        if len(called) <= times:
            raise OSError(number, os.strerror(number), path)
        return real(self, path, *args, **options)

    patch.setattr(Storage, method, failing)
    return called


# -- bundles -----------------------------------------------------------------------------------------------------------


def test_a_bundle_is_sent_when_it_has_as_many_records_as_it_may_have(make: Make) -> None:
    queue = make()
    writer = queue.record_writer("text", max_records=2)
    writer.write(b"1")
    assert where(queue) == {}
    for number in (2, 3, 4, 5):
        writer.write(str(number))
    assert bodies(queue) == [b"1\n2\n", b"3\n4\n"]
    assert len(writer.flush()) == 3
    assert bodies(queue)[-1] == b"5\n"


def test_no_bundle_has_more_bytes_than_it_may_have_but_for_a_record_that_is_larger(make: Make) -> None:
    queue = make()
    with queue.record_writer("text", max_bytes=10) as writer:
        for record in (b"1234", b"5678", b"9", b"a larger record", b"b"):
            writer.write(record)
    assert bodies(queue) == [b"1234\n5678\n", b"9\n", b"a larger record\n", b"b\n"]


def test_a_bundle_says_its_format_and_how_many_records_it_has(make: Make) -> None:
    queue = make()
    with queue.record_writer("text", priority=7, properties={"shop": "a"}, expires_in="1h") as writer:
        writer.write("x")
        writer.write("y")
    name = names.parse(names_in(queue, "target")[0])
    assert (name.type, name.records, name.priority) == ("text", 2, 7)
    message = take(queue)
    assert message.properties == {"shop": "a"}
    assert message.expiration is not None


@pytest.mark.parametrize(
    ("body_format", "header", "body"),
    [
        ("jsonl", None, b"a\nb\n"),
        ("text", None, b"a\nb\n"),
        ("csv", "id", b"id\na\nb\n"),
        ("frames", None, b"\0\0\0\1a\0\0\0\1b"),
    ],
)
def test_each_format_has_its_body(make: Make, body_format: str, header: str | None, body: bytes) -> None:
    queue = make()
    with queue.record_writer(body_format, header=header) as writer:
        writer.write(b"a")
        writer.write("b")
    assert bodies(queue) == [body]


def test_jsonl_takes_any_value_that_json_can_hold(make: Make) -> None:
    queue = make()
    with queue.record_writer() as writer:
        for value in ({"a": "é"}, [1, None], 7, b'"bytes"', bytearray(b"true")):
            writer.write(value)
    assert bodies(queue) == ['{"a":"é"}\n[1,null]\n7\n"bytes"\ntrue\n'.encode()]


@pytest.mark.parametrize(
    ("body_format", "record"),
    [("text", b""), ("text", "a\nb"), ("text", {"a": 1}), ("jsonl", {"a": float("nan")}), ("csv", b'"open')],
)
def test_a_record_that_its_format_cannot_hold_is_not_taken(make: Make, body_format: str, record: Any) -> None:
    queue = make()
    with queue.record_writer(body_format, header=b"id" if body_format == "csv" else None) as writer:
        for act in (writer.write, writer.send):
            with pytest.raises(ValueError):
                act(record)
        writer.write(b"good")
    assert bodies(queue)[0].endswith(b"good\n")
    assert names.parse(names_in(queue, "target")[0]).records == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "json"}, "jsonl"),
        ({"format": "parquet"}, "table"),
        ({"max_records": 0}, "max_records"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"linger": -1}, "-1"),
        ({"format": "csv"}, "header"),
        ({"header": b"id"}, "csv"),
        ({"type": "order"}, "format"),
        ({"message_id": "1"}, "message_id"),
        ({"priority": 2**31}, "priority"),
        ({"properties": {"JMSx": 1}}, "JMSx"),
    ],
)
def test_what_no_writer_can_do_is_refused_before_a_record_is_taken(
    make: Make, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make().record_writer(**options)


def test_a_bundle_costs_the_syncs_of_a_message(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="full")
    fsync, synced = os.fsync, []

    def counted(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    queue.send(b"a message")
    with queue.record_writer("text") as writer:
        for number in range(100):
            writer.write(str(number))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted)
            (sent,) = writer.flush()
    assert synced == [names_in(queue, "target")[-1], "target", "working"]
    assert sent.id in synced[0]


def test_flush_returns_the_bundles_that_were_sent_since_the_last_flush(make: Make) -> None:
    queue = make()
    with queue.record_writer("text", max_records=1) as writer:
        writer.write("1")
        writer.write("2")
        assert [sent.accepted for sent in writer.flush()] == [True, True]
        assert writer.flush() == []
        writer.write("3")
    assert [sent.delivered_to for sent in writer.flush()] == ["q"]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_what_was_written_is_sent_although_an_exception_ends_the_block(make: Make, error: type[BaseException]) -> None:
    queue = make()
    with pytest.raises(error), queue.record_writer("text") as writer:
        _write_and_raise(writer, error)
    assert bodies(queue) == [b"before\n"]


def _write_and_raise(writer: RecordWriter, error: type[BaseException]) -> None:
    writer.write("before")
    raise error


def test_a_closed_writer_takes_no_record(make: Make) -> None:
    writer = make().record_writer("text")
    writer.close()
    for act in (writer.write, writer.send):
        with pytest.raises(DropqError, match="closed; the record was not taken"):
            act("late")
    writer.close()


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_a_full_queue_refuses_stays_for_the_next_flush(make: Make) -> None:
    queue = make(max_unprocessed=1, overflow="reject", timing=FRESH)
    writer = queue.record_writer("text", max_records=2)
    for number in range(5):
        writer.write(str(number))
    assert bodies(queue) == [b"0\n1\n"]
    with pytest.raises(QueueFull) as refused:
        writer.flush()
    assert len(refused.value.sent) == 1
    assert "3 records wait in the writer: the next flush sends them" in refused.value.__notes__
    take(queue).ack()
    with pytest.raises(QueueFull):
        writer.flush()
    take(queue).ack()
    assert len(writer.flush()) == 3
    assert where(queue)["processed"] == [b"0\n1\n", b"2\n3\n"]
    assert bodies(queue) == [b"4\n"]


def test_the_end_of_the_block_raises_what_a_bundle_is_refused_for_and_flush_sends_it_later(make: Make) -> None:
    queue = make(max_unprocessed=1, overflow="reject", timing=FRESH)
    queue.send("the first")
    with pytest.raises(QueueFull), queue.record_writer("text") as writer:
        writer.write("the second")
    take(queue).ack()
    assert len(writer.flush()) == 1
    assert bodies(queue) == [b"the second\n"]


@pytest.mark.parametrize("method", ["write_new", "rename"])
def test_a_bundle_keeps_its_name_however_often_it_is_tried(
    make: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    queue = make()
    writer = queue.record_writer("text", expires_in="1h", correlation_id="c")
    writer.write("x")
    tried = refuse(monkeypatch, method, errno.EIO, times=2)
    for _ in range(2):
        with pytest.raises(StorageError, match="the message was not sent"):
            writer.flush()
        assert where(queue) == {}
        writer.write("more")
    (sent, _) = writer.flush()
    assert len(set(tried[:3])) == 1
    assert bodies(queue) == [b"x\n", b"more\nmore\n"]
    assert next(queue.browse()).id == sent.id
    assert tried[0] in names_in(queue, "target")


def test_what_a_refused_try_left_in_working_does_not_keep_a_bundle_from_being_sent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    writer = queue.record_writer("text")
    writer.write("x")
    with monkeypatch.context() as patch:
        refuse(patch, "rename", errno.EIO)
        refuse(patch, "unlink", errno.EIO, times=2)
        with pytest.raises(StorageError):
            writer.flush()
    assert where(queue) == {"working": [b"x\n"]}
    writer.flush()
    assert where(queue) == {"target": [b"x\n"]}


def test_a_bundle_that_is_visible_is_never_sent_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="full")
    with queue.record_writer("text") as writer:
        with monkeypatch.context() as patch:
            refuse(patch, "sync", errno.EIO)
            future = writer.send("x")
        with pytest.raises(StorageError, match=r"visible.*do not send it again"):
            future.result()
        with pytest.raises(StorageError, match="visible"):
            writer.flush()
        assert len(writer.flush()) == 1
    assert bodies(queue) == [b"x\n"]


def test_an_interrupt_loses_no_record_and_sends_none_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="full")
    for method in ("write_new", "rename", "sync"):
        writer = queue.record_writer("text")
        writer.write(method)
        real = getattr(Storage, method)

        def interrupted(*args: Any, real: Callable[..., Any] = real, **options: Any) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(Storage, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
        writer.close()
    assert bodies(queue) == [b"write_new\n", b"rename\n", b"sync\n"]


def test_no_record_is_taken_while_four_times_max_bytes_wait(make: Make) -> None:
    queue = make(max_unprocessed=1, overflow="reject", timing=FRESH)
    queue.send("the first")
    writer = queue.record_writer("text", max_bytes=10)
    for _ in range(4):
        writer.write("123456789")
    for act in (writer.write, writer.send):
        with pytest.raises(QueueFull) as refused:
            act("too much")
        assert "the record was not taken" in refused.value.__notes__
    take(queue).ack()
    writer.write("there is room")
    assert bodies(queue) == [b"123456789\n"]
    assert writer._waiting() == 4  # three, and the last


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_disk_that_takes_nothing_in_the_middle_of_a_block_leaves_the_rest_in_the_writer(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    queue = make()
    writer = queue.record_writer("text", max_records=1)
    writer.write("1")
    with monkeypatch.context() as patch:
        refuse(patch, "write_new", number, times=100)
        writer.write("2")
        writer.write("3")
        with pytest.raises(StorageError, match="not sent") as refused:
            writer.close()
    assert "1 bundles were sent since the last flush that ended well" in refused.value.__notes__
    assert len(writer.flush()) == 3
    assert bodies(queue) == [b"1\n", b"2\n", b"3\n"]


def test_a_queue_that_is_deleted_in_the_middle_of_a_block_refuses_the_rest(make: Make) -> None:
    queue = make()
    writer = queue.record_writer("text")
    writer.write("1")
    writer.flush()
    queue.root.delete_queue("q", force=True)
    writer.write("2")
    with pytest.raises(NoSuchQueue):
        writer.send("3").result()
    with pytest.raises(NoSuchQueue, match="not sent"):
        writer.close()
    assert writer._waiting() == 2


def test_what_is_written_for_a_queue_that_is_not_there_becomes_a_dead_letter(make: Make) -> None:
    queue = make()
    with open(f"{queue.root.path}/dropq.toml", "a") as config:
        config.write('dead_letter_queue = "q"\n')
    gone = dropq.Root(queue.root.path).queue("gone")
    with gone.record_writer("text") as writer:
        writer.write("lost")
        (sent,) = writer.flush()
    assert sent.delivered_to == "q"
    letter = take(queue)
    assert (letter.body, letter.type, letter.origin) == (b"lost\n", "text", "gone")


def test_an_overflow_selector_takes_bundles_too(make: Make) -> None:
    queue = make(max_unprocessed=1, overflow="reject", timing=FRESH)
    other = queue.root.create_queue("other", durability="none")
    queue.add_selector("over", to="other", role="overflow")
    queue.send("the first")
    with queue.record_writer("text") as writer:
        writer.write("x")
    assert bodies(other) == [b"x\n"]
    assert [sent.delivered_to for sent in writer.flush()] == ["other"]


def test_a_queue_that_discards_says_so(make: Make) -> None:
    queue = make(max_unprocessed=1, overflow="discard", timing=FRESH)
    queue.send("the first")
    with queue.record_writer("text") as writer:
        assert writer.send("x").result().accepted is False
        assert [sent.accepted for sent in writer.flush()] == [False]
    assert bodies(queue) == [b"the first"]


def test_what_is_written_to_a_topic_is_published(make: Make) -> None:
    root = make().root
    root.create_topic("news").create_subscription("archive", client_id="hq")
    with root.queue("news").record_writer("text") as writer:
        assert writer.send("x").result().distributed is True
    assert bodies(root.queue("news/archive.hq")) == [b"x\n"]


@pytest.mark.crashes
def test_a_writer_that_dies_at_any_call_has_sent_whole_bundles_and_each_once(make: Make) -> None:
    def act(queue: Queue) -> None:
        with queue.record_writer("text", max_records=2) as writer:
            for number in range(4):
                writer.write(str(number))

    whole = [b"0\n1\n", b"2\n3\n"]
    left = []
    for queue in killed_at_each_call(lambda: make(durability="full"), act):
        left.append(bodies(queue))
        assert left[-1] == whole[: len(left[-1])]
    assert [[], whole[:1], whole] == [one for number, one in enumerate(left) if one not in left[:number]]


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_lone_sender_needs_no_other_thread(make: Make) -> None:
    queue = make()
    before = threading.active_count()
    with queue.record_writer("text") as writer:
        futures = [writer.send(str(number)) for number in range(3)]
        assert all(future.done() for future in futures)
        assert threading.active_count() == before
    assert bodies(queue) == [b"0\n", b"1\n", b"2\n"]


def test_records_that_come_while_one_is_being_sent_share_the_next_message(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    comes, goes_on = threading.Event(), threading.Event()
    stage = Storage.write_new

    def slow(self: Storage, path: str, data: bytes | memoryview, **options: Any) -> None:
        comes.set()
        assert goes_on.wait(15)
        stage(self, path, data, **options)

    monkeypatch.setattr(Storage, "write_new", slow)
    with queue.record_writer("text") as writer:
        first = threading.Thread(target=writer.send, args=("first",))
        first.start()
        assert comes.wait(15)
        futures: list[Future[Sent]] = [writer.send(str(number)) for number in range(20)]
        assert not any(future.done() for future in futures)
        goes_on.set()
        ids = {future.result().id for future in futures}
        first.join()
    assert len(ids) == 1
    assert bodies(queue) == [b"first\n", b"".join(b"%d\n" % number for number in range(20))]


def test_each_of_many_threads_has_its_records_sent_once(make: Make) -> None:
    queue = make(durability="full")
    with queue.record_writer("text", max_records=7) as writer:

        def send(name: int) -> None:
            for number in range(25):
                record = f"{name}-{number}"
                if number % 3:
                    writer.send(record).result()
                else:
                    writer.write(record)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = b"".join(bodies(queue)).decode().splitlines()
    assert sorted(records) == sorted(f"{name}-{number}" for name in range(8) for number in range(25))
    assert {name: [r for r in records if r.startswith(f"{name}-")] for name in range(8)} == {
        name: [f"{name}-{number}" for number in range(25)] for name in range(8)
    }


def test_a_record_that_has_lingered_is_sent_with_what_came_after_it(make: Make) -> None:
    queue = make()
    with queue.record_writer("text", linger="2s") as writer:
        writer.write("1")
        future = writer.send("2")
        assert future.result().accepted
        writer.write("3")
        until(lambda: len(bodies(queue)) == 2, "the third record is sent")
    assert bodies(queue) == [b"1\n2\n", b"3\n"]


def test_the_writers_thread_tries_again_what_the_queue_refused_and_says_so_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bundling, "RETRY", 0.001)
    queue = make()
    refuse(monkeypatch, "write_new", errno.ENOSPC, times=3)
    with queue.record_writer("text", linger="1ms") as writer:
        writer.write("x")
        until(lambda: bodies(queue) == [b"x\n"], "the record is sent")
    assert caplog.text.count("1 records wait, and are tried again") == 1


def test_the_thread_of_a_writer_ends_with_it(make: Make) -> None:
    queue = make()
    with queue.record_writer("text", linger="1h") as writer:
        writer.write("x")
        assert writer._thread is not None and writer._thread.is_alive()
    assert not writer._thread.is_alive()
    assert bodies(queue) == [b"x\n"]


# -- handlers and forks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["close", "flush", "write", "send"])
def test_a_handler_in_the_middle_of_a_send_neither_hangs_nor_sends_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = make()
    writer = queue.record_writer("text", max_records=1)
    came: list[object] = []
    rename = Storage.rename

    def handled(self: Storage, source: str, destination: str) -> None:
        if not came:
            came.append(None)
            try:
                came.append(getattr(writer, verb)(*["handler's"] * (verb in ("write", "send"))))
            except DropqError as error:
                came.append(error)
        rename(self, source, destination)

    monkeypatch.setattr(Storage, "rename", handled)
    writer.write("x")
    until(lambda: len(came) == 2, "the handler has ended")
    writer.close()
    records = [b"x\n"] + [b"handler's\n"] * (verb in ("write", "send"))
    assert bodies(queue) == records


def test_a_child_after_a_fork_takes_no_record_and_sends_none_of_the_parents(make: Make) -> None:
    queue = make()
    with queue.record_writer("text") as writer:
        writer.write("the parent's")

        def behave() -> None:
            for act in (lambda: writer.write("x"), lambda: writer.send("x"), writer.flush):
                with pytest.raises(DropqError, match="before a fork"):
                    act()
            writer.close()

        in_child(behave)
        assert where(queue) == {}
    assert bodies(queue) == [b"the parent's\n"]


def test_a_bundle_lies_in_target_as_a_plain_file(make: Make) -> None:
    queue = make()
    with queue.record_writer("text") as writer:
        writer.write("x")
    (file,) = names_in(queue, "target")
    assert (base(queue) / "target" / file).read_bytes() == b"x\n"
    assert file.endswith(".B....text.JMS_dropq_recordsI=1")


def test_what_was_written_is_sent_where_no_thread_could_be_started(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = make()
    with queue.record_writer("text", linger="1h") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError):
                writer.write("a")
        writer.write("b")
    assert bodies(queue) == [b"b\n"]


def test_a_record_that_readers_of_the_queue_would_refuse_is_refused(make: Make) -> None:
    queue = make(max_record_bytes=3)
    with queue.record_writer("text") as writer:
        writer.write("abc")
        with pytest.raises(ValueError, match="max_record_bytes allows 3"):
            writer.write("abcd")
    assert bodies(queue) == [b"abc\n"]
