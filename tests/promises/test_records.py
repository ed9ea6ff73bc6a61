"""A bundle is settled record by record, by one commit: nothing of it is lost, doubled or handed out again."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers import died, drop, processed, take

from dropq import BacklogReached, DropqError, LeaseLost, Queue, Root, StorageError
from dropq.format import names
from dropq.lifecycle.processing import find_claim
from dropq.lifecycle.settlement import Claims
from dropq.queue import message as message_module
from dropq.queue.message import Bundle, Record, extend_all
from dropq.records import record_settlement
from dropq.records.reader import RawRecord, RecordReader
from dropq.records.record_cursor import RecordCursor
from dropq.records.record_settlement import RecordSettlement
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.storage.files import Storage


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path / "root")


@pytest.fixture
def queue(root: Root) -> Queue:
    return root.create_queue("orders", redelivery_delay="0s", durability="none")


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, last + 1))


def records(queue: Queue, **options: Any) -> Iterator[Record]:
    with queue.subscribe() as subscription:
        yield from subscription.records(timeout=0, **options)


def acked(loop: Iterator[Record]) -> list[tuple[int, bytes]]:
    """Acknowledge each record; return their numbers and bytes."""
    seen = []
    for record in loop:
        seen.append((record.number, record.data))
        record.ack()
    return seen


def bodies_in(queue: Queue, state: str) -> dict[str, bytes]:
    """Return the bodies in a state by their ids, and where they begin if that is not 1."""
    found = {}
    for message in queue.browse(state=state):
        name = message._name
        found[f"{message.id}{f' from {name.first}' if name.first else ''}"] = message.body
    return found


def staged(queue: Queue) -> list[str]:
    """Return the folders of attempts that are not over."""
    folder = Path(queue.layout.staged)
    return os.listdir(folder) if folder.exists() else []


def test_records_of_several_messages_come_in_order_and_all_are_acknowledged(queue: Queue) -> None:
    first = queue.send(lines(1, 3), type="text").id
    second = queue.send(lines(1, 2), type="text").id
    seen = []
    for record in records(queue):
        seen.append((record.message.id, record.number, record.data))
        record.ack()
    assert seen == [(first, 1, b"1"), (first, 2, b"2"), (first, 3, b"3"), (second, 1, b"1"), (second, 2, b"2")]
    assert bodies_in(queue, "processed") == {first: lines(1, 3), second: lines(1, 2)}
    assert queue.counts()["processed"] == 2
    assert staged(queue) == []


def test_a_record_that_is_rejected_becomes_a_message_in_error_and_the_bundle_is_archived_as_it_is(queue: Queue) -> None:
    id = queue.send(b'{"n": 1}\nbad\n{"n": 3}', type="jsonl", priority=7, properties={"region": "eu"}).id
    for record in records(queue):
        try:
            record.json()
        except ValueError as error:
            record.reject(str(error), line=record.number)
        else:
            record.ack()
    (bad,) = queue.browse(state="error")
    assert (bad.id, bad.body, bad.type, bad.priority) == (f"{id}-2", b"bad\n", "jsonl", 7)
    assert bad.properties == {"region": "eu"}
    assert bad._name.record == 2
    reason = bad.reason
    assert reason is not None
    assert reason["reason"] == "rejected"
    assert reason["line"] == 2
    assert "is not JSON" in str(reason["detail"])
    assert bodies_in(queue, "processed") == {id: b'{"n": 1}\nbad\n{"n": 3}'}
    assert staged(queue) == []


@pytest.mark.parametrize(("region", "sidecars"), [("eu", 0), ("e" * 100, 1)], ids=["short", "long"])
def test_a_record_needs_a_sidecar_only_if_its_name_leaves_a_claim_no_room(
    queue: Queue, region: str, sidecars: int
) -> None:
    id = queue.send(lines(1, 1000), type="text", properties={"region": region}).id
    before = set(Path(queue.root.layout.meta).glob("*"))
    for record in records(queue):
        record.nack() if record.number == 1000 and record.message.id == id else record.ack()
    (part,) = (message for message in queue.browse(state="processed") if message._name.record)
    assert (part.id, part.properties, part.body) == (f"{id}-1000", {"region": region}, b"1000\n")
    assert len(set(Path(queue.root.layout.meta).glob("*")) - before) == sidecars


def test_a_row_that_is_rejected_keeps_the_header_and_is_repaired_and_requeued(queue: Queue) -> None:
    id = queue.send(b'id,text\n1,"a\nb"\n2,c,d\n3,e\n', type="csv").id
    rows = []
    for record in records(queue):
        with suppress(ValueError), record:
            rows.append(record.fields)
    assert rows == [{"id": "1", "text": "a\nb"}, {"id": "3", "text": "e"}]
    assert bodies_in(queue, "error") == {f"{id}-2": b"id,text\n2,c,d\n"}
    (bad,) = queue.browse(state="error")
    assert bad.reason is not None
    assert "2 of message" in str(bad.reason["detail"])
    Path(bad.path).write_bytes(b"id,text\n2,c\n")
    assert len(queue.requeue([f"{id}-2"])) == 1
    assert acked(records(queue)) == [(2, b"2,c")]


def test_a_record_that_is_nacked_waits_as_a_message_of_its_own_and_comes_again(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id
    seen = []
    for record in records(queue):
        seen.append((record.message.id, record.data, record.delivery_count, record.redelivered))
        if record.data == b"2" and len(seen) < 4:
            record.nack()
        else:
            record.ack()
    assert seen == [(id, b"1", 1, False), (id, b"2", 1, False), (id, b"3", 1, False), (f"{id}-2", b"2", 2, True)]


def test_a_failed_record_is_retried_while_attempts_last_and_then_lies_in_error(root: Root) -> None:
    queue = root.create_queue("q", redelivery_attempts=2, redelivery_delay="0s")
    id = queue.send(lines(1, 2), type="text").id
    tries = 0
    for record in records(queue):
        if record.data == b"2":
            tries += 1
            record.fail("no")
        else:
            record.ack()
    assert tries == 3
    assert bodies_in(queue, "error") == {f"{id}-2": b"2\n"}


def test_a_message_with_one_record_is_settled_as_the_message_that_it_is(queue: Queue) -> None:
    id = queue.send(b"only", type="text").id
    for record in records(queue):
        record.reject("bad")
    assert bodies_in(queue, "error") == {id: b"only"}
    assert not os.path.exists(queue.layout.staged)


def test_what_is_left_waits_under_the_same_id_and_says_where_it_begins(queue: Queue) -> None:
    id = queue.send(lines(1, 5), type="text").id
    with queue.subscribe() as subscription:
        taken = subscription.records(timeout=0)
        for _ in range(2):
            next(taken).ack()
        next(taken)
    assert bodies_in(queue, "target") == {f"{id} from 3": lines(3, 5)}
    assert bodies_in(queue, "processed") == {f"{id} from 1": b"1\n2"}
    assert acked(records(queue)) == [(3, b"3"), (4, b"4"), (5, b"5")]
    assert staged(queue) == []


def test_records_settled_out_of_order_leave_empty_lines_so_that_numbers_stay(queue: Queue) -> None:
    id = queue.send(lines(1, 6), type="text").id
    with queue.subscribe() as subscription:
        taken = list(subscription.receive(timeout=0).records())  # type: ignore[union-attr]
        taken[1].ack()
        taken[4].ack()
        taken[3].reject("four")
    assert bodies_in(queue, "target") == {f"{id} from 1": b"1\n\n3\n\n\n6\n"}
    assert bodies_in(queue, "processed") == {f"{id} from 2": b"2\n\n\n5"}
    assert bodies_in(queue, "error") == {f"{id}-4": b"4\n"}
    assert acked(records(queue)) == [(1, b"1"), (3, b"3"), (6, b"6")]


@pytest.mark.parametrize("verb", ["nack", "fail", "reject", "release", "expire"])
def test_the_verbs_of_the_message_concern_what_is_left(queue: Queue, verb: str) -> None:
    id = queue.send(lines(1, 4), type="text").id
    message = take(queue)
    next(message.records()).ack()
    arguments = ("no",) if verb in ("fail", "reject") else ()
    getattr(message, verb)(*arguments)
    state = {"nack": "target", "release": "target", "expire": "expired"}.get(verb, "error")
    assert bodies_in(queue, state) == {f"{id} from 2": lines(2, 4)}
    assert bodies_in(queue, "processed") == {f"{id} from 1": b"1"}
    assert not message.held
    left = next(iter(queue.browse(state=state)))
    assert left.delivery_count == (0 if verb == "release" else 1)
    assert staged(queue) == []


def test_an_ack_of_the_message_acknowledges_what_is_not_settled_otherwise(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id
    message = take(queue)
    for record in message.records():
        if record.number == 2:
            record.reject("two")
    message.ack()
    assert bodies_in(queue, "processed") == {id: lines(1, 3)}
    assert bodies_in(queue, "error") == {f"{id}-2": b"2\n"}


def test_each_record_is_settled_once(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    message = take(queue)
    record = next(message.records())
    record.ack()
    with pytest.raises(LeaseLost, match="was settled before"):
        record.reject("again")
    message.ack()
    assert queue.counts()["error"] == 0
    with pytest.raises(LeaseLost, match="not held any more"):
        record.ack()


def test_the_next_message_waits_until_each_record_is_settled(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    queue.send(b"other", type="text")
    with queue.subscribe() as subscription:
        loop = subscription.records(timeout=0)
        taken = [next(loop), next(loop)]
        with pytest.raises(BacklogReached, match="2 of its records"):
            next(loop)
        for record in taken:
            record.ack()
        assert acked(subscription.records(timeout=0)) == [(1, b"other")]


def test_a_loop_that_was_left_goes_on_with_the_same_bundle(queue: Queue) -> None:
    queue.send(lines(1, 3), type="text")
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            record.ack()
            break
        assert acked(subscription.records(timeout=0)) == [(2, b"2"), (3, b"3")]


def test_threads_settle_records_in_any_order(queue: Queue) -> None:
    id = queue.send(lines(1, 1000), type="text").id
    message = take(queue)
    taken = list(message.records())
    threads = [
        threading.Thread(target=lambda part=taken[begin::4]: [record.ack() for record in reversed(part)])
        for begin in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    message.release()
    assert bodies_in(queue, "processed") == {id: lines(1, 1000)}
    assert queue.counts()["target"] == 0


def test_a_checkpoint_commits_what_is_settled_and_the_loop_goes_on_with_the_rest(queue: Queue) -> None:
    id = queue.send(lines(1, 4), type="text").id
    names = []
    for record in records(queue, checkpoint="0s"):
        names.append((record.number, record.message._name.first, record.delivery_count, record.message.receipt))
        record.ack()
    assert [each[:3] for each in names] == [(1, 0, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1)]
    assert len({each[3] for each in names}) == 4
    assert bodies_in(queue, "processed") == {
        f"{id} from 1": b"1",
        f"{id} from 2": b"2",
        f"{id} from 3": b"3",
        f"{id} from 4": b"4\n",
    }


def test_a_checkpoint_is_due_after_twenty_times_as_long_as_the_disk_takes(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_settlement, "monotonic", count(0, 3).__next__)  # each commit takes three seconds
    queue.send(b"x" * 1023 + b"\n" + (b"y" * 1023 + b"\n") * 9000, type="text")

    def due_after() -> float:
        """Take a record, leave the rest, and return after how many seconds a checkpoint was due."""
        message = take(queue)
        bundle = Bundle(message, None, checkpoint=1)
        next(iter(bundle)).ack()
        message.release()
        return bundle._due_at - bundle._began

    waits = [due_after() for _ in range(4)]
    assert waits[0] == pytest.approx(20 * 8.8 / 100, rel=0.01), "nothing is known of the disk"
    assert waits[1] == pytest.approx(4 * waits[0], rel=0.01), "one slow copy may have been stopped in between"
    assert waits[2:] == pytest.approx([16 * waits[0], 60], rel=0.01)


def test_a_bundle_over_which_somebody_died_is_cut_until_a_record_stands_alone(root: Root) -> None:
    queue = root.create_queue("q", redelivery_delay="0s", max_deliveries=3)
    id = queue.send(lines(1, 1000), type="text").id
    acked, deaths = [], 0
    while True:
        with queue.subscribe() as subscription:
            for record in subscription.records(timeout=0):
                if record.data == b"371":
                    died(record.message)
                    deaths += 1
                    break
                acked.append(int(record.data))
                record.ack()
            else:
                break
    assert deaths == 10 + 3
    assert bodies_in(queue, "error") == {f"{id} from 371": b"371\n"}
    assert sorted({*acked, 371}) == list(range(1, 1001))


def test_a_refused_call_of_a_settlement_is_an_error_that_says_that_the_message_is_still_held(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(lines(1, 3), type="text")
    message = take(queue)
    next(message.records()).ack()
    with monkeypatch.context() as refusing:
        refusing.setattr(RecordCursor, "is_changed", lambda *_: os.stat(f"{message.path}/not a folder"))
        with pytest.raises(StorageError, match="is still held"):
            message.nack()
    message.nack()
    assert queue.counts()["target"] == 1


def test_bulk_commands_find_the_parts_that_a_dead_holder_has_committed_and_not_moved(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(lines(1, 3), type="text")
    message = take(queue)
    loop = message.records()
    next(loop).reject("one")
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "roll_forward", lambda *_, **__: False)
        message.release()
    assert (queue.counts()["processing"], queue.counts()["error"]) == (1, 0)
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    assert [outcome.ok for outcome in queue.purge()] == [True, True]
    assert not any(queue.counts().values())


def test_both_halves_of_a_csv_that_is_cut_have_its_header(queue: Queue) -> None:
    queue.send(b"id,text\n1,a\n2,b\n3,c\n", type="csv")
    died(take(queue))
    assert list(take(queue).records()) == []
    assert [message.body for message in queue.browse()] == [b"id,text\n1,a\n2,b\n", b"id,text\n3,c\n"]
    assert acked(records(queue)) == [(1, b"1,a"), (2, b"2,b"), (3, b"3,c")]


def test_what_cannot_be_taken_apart_goes_to_error_and_what_was_before_it_is_settled(queue: Queue) -> None:
    body = b"\0\0\0\1a\0\0\0\1b\0\0\0\7torn"
    id = queue.send(body, type="frames").id
    assert acked(records(queue)) == [(1, b"a"), (2, b"b")]
    assert bodies_in(queue, "error") == {f"{id} from 3": b"\0\0\0\7torn"}
    (torn,) = queue.browse(state="error")
    assert torn.reason is not None
    assert (torn.reason["reason"], torn.reason["record"]) == ("unreadable", 3)
    assert bodies_in(queue, "processed") == {f"{id} from 1": b"\0\0\0\1a\0\0\0\1b"}


def test_when_too_many_records_fail_the_rest_goes_to_error_as_one_message(root: Root) -> None:
    queue = root.create_queue("q", max_record_failures=2)
    id = queue.send(lines(1, 6), type="text").id
    for record in records(queue):
        record.reject("bad") if record.number != 1 else record.ack()
    assert bodies_in(queue, "error") == {f"{id}-2": b"2\n", f"{id}-3": b"3\n", f"{id} from 4": lines(4, 6)}
    reasons = [(message.reason or {})["reason"] for message in queue.browse(state="error")]
    assert sorted(map(str, reasons)) == ["rejected", "rejected", "too_many_records"]


def test_a_body_that_is_written_to_while_it_is_held_goes_to_error_whole(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id
    message = take(queue)
    next(message.records()).reject("one")
    with open(message.path, "ab") as body:
        body.write(b"4\n")
    message.nack()
    assert bodies_in(queue, "error") == {id: lines(1, 4)}
    (changed,) = queue.browse(state="error")
    assert changed.reason is not None
    assert changed.reason["reason"] == "body_changed"


def test_a_table_has_no_records_and_waits_for_another_reader(queue: Queue) -> None:
    queue.send(b"PAR1", type="parquet")
    with pytest.raises(ValueError, match="read it with Spark"):
        next(records(queue))
    assert queue.counts()["target"] == 1


def test_a_message_that_was_settled_before_its_delivery_is_read_by_records(root: Root) -> None:
    queue = root.create_queue("q", semantics="at-most-once")
    queue.send(lines(1, 2), type="text")
    assert acked(records(queue)) == [(1, b"1"), (2, b"2")]
    assert queue.counts()["processed"] == 1


def test_a_queue_without_history_keeps_nothing_of_what_was_acknowledged(root: Root) -> None:
    queue = root.create_queue("q", history=False, redelivery_delay="0s")
    id = queue.send(lines(1, 4), type="text").id
    message = take(queue)
    taken = message.records()
    next(taken).ack()
    next(taken).reject("two")
    message.nack()
    assert bodies_in(queue, "target") == {f"{id} from 3": lines(3, 4)}
    assert bodies_in(queue, "error") == {f"{id}-2": b"2\n"}
    assert queue.counts()["processed"] == 0


def test_a_lost_claim_settles_nothing(queue: Queue) -> None:
    id = queue.send(lines(1, 3), type="text").id
    message = take(queue)
    next(message.records()).reject("one")
    os.rename(message.path, f"{queue.layout.target}/{message.name}")  # by hand
    with pytest.raises(LeaseLost):
        message.ack()
    assert bodies_in(queue, "target") == {id: lines(1, 3)}
    assert queue.counts()["error"] == queue.counts()["processed"] == 0


def test_parts_of_a_bundle_keep_its_place_in_the_order(queue: Queue) -> None:
    first = queue.send(lines(1, 3), type="text").id
    queue.send(b"later", type="text")
    with queue.subscribe() as subscription:
        next(subscription.records(timeout=0)).ack()
    with queue.subscribe() as subscription:
        message = subscription.receive(timeout=0)
        assert message is not None
        assert (message.id, message._name.first) == (first, 2)


@pytest.mark.parametrize("verb", ["ack", "nack", "lost"])
def test_the_body_is_closed_once_the_message_is_not_held_any_more(queue: Queue, verb: str) -> None:
    queue.send(lines(1, 3), type="text")
    message = take(queue)
    bundle = Bundle(message, None)
    next(iter(bundle)).ack()
    if verb == "lost":
        os.rename(message.path, f"{queue.layout.target}/{message.name}")
        with pytest.raises(LeaseLost):
            message.nack()
    else:
        getattr(message, verb)()
    assert bundle.cursor.file.closed


def test_a_settlement_that_was_refused_can_be_tried_again(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    id = queue.send(lines(1, 4), type="text").id
    message = take(queue)
    taken = message.records()
    next(taken).reject("one")
    with monkeypatch.context() as refusing:
        refusing.setattr(Storage, "make_folder", refused)
        with pytest.raises(StorageError, match="nothing was settled"):
            message.nack()
    assert message.held
    next(taken).ack()
    message.nack(delay=0)
    assert bodies_in(queue, "target") == {f"{id} from 3": lines(3, 4)}
    assert bodies_in(queue, "error") == {f"{id}-1": b"1\n"}


def refused(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_another_thread_gives_back_while_a_record_is_read_begins_before_that_record(queue: Queue) -> None:
    queue.send(lines(1, 5), type="text")
    message = take(queue)
    bundle = Bundle(message, None)
    loop = iter(bundle)
    next(loop).ack()
    bundle.cursor._reads = True  # as if a signal handler interrupted the reader
    message.nack(delay=0)
    assert next(loop, None) is None
    assert acked(records(queue)) == [(2, b"2"), (3, b"3"), (4, b"4"), (5, b"5")]


def test_a_bundle_whose_lease_another_process_renewed_is_acknowledged_with_others(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    with queue.subscribe(lease_period="10s") as subscription:
        message = subscription.receive()
        assert message is not None and message._claim is not None
        next(message.records()).ack()
        found = find_claim(queue.context, message._claim.owner)
        assert found is not None
        Claims(queue.context).extend(found, found.deadline + 60_000)
        assert subscription.ack_many([message]) == []
    assert processed(queue) == 1


@pytest.mark.parametrize(("where", "step"), [(RecordCursor, "is_changed"), (RecordSettlement, "_copy")])
def test_a_verb_that_a_signal_handler_overtakes_finds_its_claim_lost(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, where: type, step: str
) -> None:
    queue.send(lines(1, 2), type="text")
    message = take(queue)
    next(message.records()).ack()
    done = getattr(where, step)

    def interrupted(*args: Any, **how: Any) -> Any:
        monkeypatch.setattr(where, step, done)
        message.nack(delay=0)
        return done(*args, **how)

    monkeypatch.setattr(where, step, interrupted)
    with pytest.raises(LeaseLost):
        message.release()
    assert acked(records(queue)) == [(2, b"2")]


def test_a_bundle_that_a_signal_handler_settles_as_it_is_to_be_cut_has_no_records(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(lines(1, 2), type="text")
    died(take(queue))
    message, middle = take(queue), message_module._middle

    def interrupted(*args: Any) -> Any:
        message.nack(delay=0)
        return middle(*args)

    monkeypatch.setattr(message_module, "_middle", interrupted)
    assert list(message.records()) == []
    assert queue.counts()["target"] == 1


@pytest.mark.parametrize(
    ("error", "raised", "before"),
    [(KeyboardInterrupt(), KeyboardInterrupt, 0), (OSError(errno.EIO, "no answer"), StorageError, 2)],
    ids=["Ctrl-C", "EIO"],
)
def test_what_was_not_read_is_left_if_an_error_ends_the_reading(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException], before: int
) -> None:
    id = queue.send(lines(1, 5), type="text").id
    read = RecordReader.__iter__

    def interrupted(reader: RecordReader) -> Iterator[RawRecord]:
        for record in read(reader):
            if record[0] == 3:
                raise error
            yield record

    with monkeypatch.context() as patch:
        patch.setattr(RecordReader, "__iter__", interrupted)
        with pytest.raises(raised):
            acked(records(queue))
    assert bodies_in(queue, "processed") == ({f"{id} from 1": b"1\n2"} if before else {})
    assert acked(records(queue)) == [(number, b"%d" % number) for number in range(before + 1, 6)]
    assert queue.counts()["target"] == 0


@pytest.mark.parametrize("kind", ["text", "frames"])
def test_nothing_is_left_if_an_error_comes_behind_the_last_record(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    body = b"1\n2\n" if kind == "text" else b"\0\0\0\x011\0\0\0\x012"
    id = queue.send(body, type=kind).id
    read = RecordReader.__iter__

    def interrupted(reader: RecordReader) -> Iterator[RawRecord]:
        yield from read(reader)
        raise OSError(errno.EIO, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(RecordReader, "__iter__", interrupted)
        with pytest.raises(StorageError):
            acked(records(queue))
    assert bodies_in(queue, "processed") == {id: body}
    assert queue.counts()["target"] == 0


def test_a_csv_that_is_cut_keeps_its_header_in_both_halves(queue: Queue) -> None:
    queue.send(b"id,n\n1,a\n2,b\n3,c\n4,d\n", type="csv")
    died(take(queue))
    rows = []
    for record in records(queue):
        rows.append((record.number, record.fields["n"], record.delivery_count, record.redelivered))
        record.ack()
    assert rows == [(1, "a", 2, True), (2, "b", 2, True), (3, "c", 2, True), (4, "d", 2, True)]


@pytest.mark.parametrize("verb", ["nack", "fail"])
def test_a_message_with_one_record_ends_by_the_limits_of_the_queue(root: Root, verb: str) -> None:
    queue = root.create_queue("q", max_cancels=2, max_deliveries=2, redelivery_attempts=9, redelivery_delay="0s")
    id = queue.send(b"only\n", type="text").id
    for record in records(queue):
        record.nack() if verb == "nack" else record.fail("no")
    assert bodies_in(queue, "error") == {id: b"only\n"}


def test_what_json_cannot_hold_is_kept_as_it_is_shown_or_leaves_the_record_open(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    endless: list[object] = []
    endless.append(endless)
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            with pytest.raises(ValueError, match="nothing was changed"):
                record.reject("bad", error=endless)
            record.reject("bad", error=ValueError("x"))
    assert [(message.reason or {})["error"] for message in queue.browse("error")] == ["ValueError('x')"] * 2


@pytest.mark.parametrize("body", [b"1", b"1\n2\n"], ids=["a message", "a record"])
def test_details_do_not_hide_the_reason_of_a_message(queue: Queue, body: bytes) -> None:
    queue.send(body, type="text")
    held = take(queue)
    next(held.records()).reject("bad", name="Ann", inode=7, time="noon")
    held.ack()
    (message,) = queue.browse(state="error")
    assert message.reason is not None
    assert (message.reason["detail"], message.reason["name"]) == ("bad", message.name)
    assert message.reason["time"] != "noon"


def test_the_parts_of_a_foreign_file_say_where_they_begin(queue: Queue) -> None:
    drop(queue, "orders.txt", lines(1, 4))
    message = take(queue)
    taken = message.records()
    next(taken).ack()
    next(taken).reject("two")
    message.reject("all else")
    assert bodies_in(queue, "error") == {"orders.txt from 3": lines(3, 4), "orders.txt-2": b"2\n"}
    assert bodies_in(queue, "processed") == {"orders.txt from 1": b"1"}


@pytest.mark.parametrize("how", ["appended", "replaced"])
def test_what_was_written_behind_the_last_record_is_not_archived_unread(queue: Queue, how: str) -> None:
    id = queue.send(lines(1, 2), type="text").id
    message = take(queue)
    loop = message.records()
    next(loop).ack()
    last = next(loop)
    if how == "appended":
        with open(message.path, "ab") as body:
            body.write(b"3\n")
    else:
        Path(queue.layout.working, "new").write_bytes(lines(1, 3))
        os.rename(f"{queue.layout.working}/new", message.path)
    last.ack()
    for record in loop:
        record.ack()
    assert bodies_in(queue, "error") == {id: lines(1, 3)}


def test_shares_of_a_barrier_and_what_is_delivered_at_most_once_are_read_past_a_checkpoint(root: Root) -> None:
    once = root.create_queue("once", semantics="at-most-once", history=False)
    once.send(lines(1, 3), type="text")
    assert acked(records(once, checkpoint="0s")) == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert not os.listdir(once.layout.held)
    halt = root.create_queue("halt", barrier_expression="halt = TRUE")
    halt.send(lines(1, 3), type="text", properties={"halt": True})
    assert acked(records(halt, checkpoint="0s")) == [(1, b"1"), (2, b"2"), (3, b"3")]
    halt.send(lines(1, 3), type="text", properties={"halt": True})
    with halt.subscribe() as subscription:
        loop = subscription.records(timeout=0)
        next(loop).ack()
        next(loop).reject("two")
        assert next(loop, None) is None
    assert [(message.reason or {})["detail"] for message in halt.browse(state="error")] == ["record 2: two"]


def test_records_of_a_message_that_is_only_looked_at_cannot_be_settled(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    (message,) = queue.browse()
    seen = list(message.records())
    assert [record.data for record in seen] == [b"1", b"2"]
    with pytest.raises(LeaseLost, match="not held"):
        seen[0].ack()
    assert queue.counts()["target"] == 1


def test_records_asked_for_twice_go_on_where_they_were(queue: Queue) -> None:
    queue.send(lines(1, 3), type="text")
    message = take(queue)
    next(message.records()).ack()
    assert acked(message.records()) == [(2, b"2"), (3, b"3")]


def test_a_record_that_is_nacked_keeps_that_its_copies_are_made(queue: Queue) -> None:
    name = replace(names.parse("4.1700000000000000-0123456789.B....text"), copied="0123456789abcdef")
    Path(queue.layout.target, names.write(name)).write_bytes(lines(1, 2))
    message = take(queue)
    for record in message.records():
        record.nack()
    assert all("copiedS=0123456789abcdef" in file for file in os.listdir(queue.layout.target))


def test_a_body_that_cannot_be_opened_waits_again(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send(lines(1, 2), type="text")
    with queue.subscribe() as subscription:
        with monkeypatch.context() as refusing:
            refusing.setattr(reading, "open_body", refused)
            with pytest.raises(StorageError):
                next(subscription.records(timeout=0))
        assert acked(subscription.records(timeout=0)) == [(1, b"1"), (2, b"2")]


def test_other_messages_keep_their_leases_while_one_is_settled(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    message = take(queue)
    with message._lock:
        renewing = threading.Thread(target=extend_all, args=([message], 60))
        renewing.start()
        renewing.join(10)
        assert not renewing.is_alive()


def test_the_fields_of_a_row_may_hold_any_text(queue: Queue) -> None:
    queue.send("a,b\n1,x\fy\u2028z\n".encode(), type="csv")
    assert [record.fields for record in take(queue).records()] == [{"a": "1", "b": "x\fy\u2028z"}]


def test_a_child_after_a_fork_does_not_read_its_parents_records(queue: Queue) -> None:
    queue.send(lines(1, 2), type="text")
    bundle = Bundle(take(queue), None)
    bundle.cursor._process = 0  # as if it was opened by another process
    with pytest.raises(DropqError, match="before a fork"):
        next(iter(bundle))


def test_a_message_that_is_settled_just_before_more_of_it_is_read_is_left_whole(queue: Queue) -> None:
    queue.send(lines(1, 40_000), type="text")
    message = take(queue)
    cursor = Bundle(message, None).cursor
    seen: list[bytes] = []
    while not seen or cursor._ahead:
        raw = cursor.take()
        assert raw is not None
        seen.append(raw[3])
        cursor.ack(raw[0])

    class Between(deque[RawRecord]):
        """What was read ahead: nothing, and the message is settled when that was found."""

        def __bool__(self) -> bool:
            if message.held and not threading.current_thread().name.startswith("settling"):
                settling = threading.Thread(target=message.release, kwargs={"counted": False}, name="settling")
                settling.start()
                settling.join(10)
                return False
            return len(self) > 0

    cursor._ahead = Between()
    assert cursor.take() is None
    seen += [data for _, data in acked(records(queue))]
    assert seen == lines(1, 40_000).split()


# -- dead letters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def letters(root: Root) -> Queue:
    return root.create_queue("dead", durability="none")


@pytest.fixture
def strict(root: Root, letters: Queue) -> Queue:
    """A queue in which what was given back once is a dead letter."""
    limits: dict[str, Any] = {"max_cancels": 1, "exhausted": "dead-letter", "dead_letter_queue": "dead"}
    return root.create_queue("strict", durability="none", **limits)


def test_a_record_that_was_given_back_too_often_is_a_dead_letter(
    strict: Queue, letters: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = strict.send(lines(1, 3), type="text").id
    for record in records(strict):
        record.nack() if record.number == 2 else record.ack()
    (letter,) = letters.browse()
    assert (letter.id, letter.body, letter.origin) == (f"{bundle}-2", b"2\n", "strict")
    assert (letter.dead_letter_reason, letter.cancels, letter.type) == ("max_cancels", 0, "text")
    assert caplog.text == ""
    assert {state: count for state, count in strict.counts().items() if count} == {"processed": 1}
    assert not os.listdir(Path(strict.layout.private) / "reasons" / "error")
    assert [outcome.ok for outcome in letters.requeue(state="target", to_origin=True)] == [True]
    (again,) = strict.browse()
    assert (again.cancels, again.origin, again.dead_letter_reason) == (0, None, None)
    assert acked(records(strict)) == [(2, b"2")]


def test_what_is_left_of_a_bundle_that_was_given_back_too_often_is_a_dead_letter(strict: Queue, letters: Queue) -> None:
    bundle = strict.send(lines(1, 3), type="text").id
    message = take(strict)
    next(iter(message.records())).ack()
    message.nack()
    assert message.state == "dead-letter"
    (letter,) = letters.browse()
    assert (letter.id, letter.body, letter.origin) == (bundle, b"2\n3\n", "strict")


def test_a_record_whose_dead_letter_queue_refuses_it_stays_in_error_with_its_reason(
    strict: Queue, letters: Queue, root: Root
) -> None:
    bundle = strict.send(lines(1, 2), type="text").id
    root.delete_queue("dead")
    for record in records(strict):
        record.nack() if record.number == 2 else record.ack()
    (kept,) = strict.browse(state="error")
    assert kept.id == f"{bundle}-2"
    assert kept.reason is not None and kept.reason["reason"] == "max_cancels"


def test_many_dead_letters_of_one_bundle_are_made_durable_by_one_sync(
    root: Root, letters: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, Any] = {"max_cancels": 1, "exhausted": "dead-letter", "dead_letter_queue": "dead"}
    queue = root.create_queue("synced", durability="full", **limits)
    queue.send(lines(1, 20), type="text")
    synced: list[str] = []
    sync = Storage.sync

    def noted(storage: Storage, *folders: str) -> None:
        synced.extend(folders)
        sync(storage, *folders)

    monkeypatch.setattr(Storage, "sync", noted)
    for record in records(queue):
        record.nack() if record.number <= 10 else record.ack()
    assert len(list(letters.browse())) == 10
    assert synced.count(letters.layout.target) == 1
    assert synced[-1] == queue.layout.error
