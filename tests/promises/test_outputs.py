"""What work makes: it goes out by the commit that acknowledges the message it was made of, or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import unprivileged
from helpers import (
    Clock,
    Make,
    base,
    drop,
    events,
    files,
    make_queue,
    other_file_system,
    reopened,
    sums,
    take,
    told,
    until,
    where,
)
from workers import Working, counted, reason_in

import dropq
from dropq import (
    ConfigError,
    LeaseLost,
    Message,
    NoSuchMessage,
    NoSuchQueue,
    Out,
    Queue,
    QueueFull,
    StorageError,
    aio,
    work,
)
from dropq.lifecycle import processing
from dropq.queue import outputs as outputs_module
from dropq.queue.lease_renewer import renew_held
from dropq.staging import fan_out
from dropq.storage import system_calls
from dropq.storage.files import Storage
from dropq.upkeep import bulk
from dropq.worker.sending import Sendings


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path)


@pytest.fixture
def other(queue: Queue) -> Queue:
    return queue.root.create_queue("other")


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    """The bodies that lie in a state, in order of delivery."""
    return [message.body for message in queue.browse(state)]


def staged(queue: Queue) -> list[str]:
    """What lies in staged/."""
    folder = base(queue) / ".dropq/staged"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


# -- what goes out ---------------------------------------------------------------------------------------------------


def test_what_was_made_of_a_message_is_sent_with_its_ack(queue: Queue, other: Queue) -> None:
    queue.send(b"a")
    message = take(queue)
    message.ack(send=Out("other", b"A"))
    assert message.state == "processed" and where(queue) == {"processed": [b"a"]}
    assert bodies(other) == [b"A"]
    assert staged(queue) == [] and files(base(other) / "working") == {}


def test_several_go_to_several_queues_and_to_the_queue_itself(queue: Queue, other: Queue) -> None:
    queue.send(b"a")
    take(queue).ack(send=[Out(other, b"1"), Out("other", "2"), Out(queue, b"again"), Out("other", b"3")])
    assert sorted(bodies(other)) == [b"1", b"2", b"3"]
    assert where(queue) == {"processed": [b"a"], "target": [b"again"]}


def test_what_is_not_said_is_the_message_s(queue: Queue, other: Queue) -> None:
    properties = {"page": 7, "JMSXGroupID": "g", "JMSXGroupSeq": 3, "zmq_parts": 2, "gone": "x"}
    sent = queue.send(
        b"a", priority=9, type="scan", reply_to="q", expires_in=60, properties=properties, message_class="M"
    )
    take(queue).ack(send=Out("other", "A", properties={"page": 8, "gone": None, "more": True}))
    (made,) = other.browse("target")
    assert made.priority == 9 and made.correlation_id == sent.id
    assert made.properties == {"page": 8, "JMSXGroupID": "g", "more": True}
    assert (made.type, made.reply_to, made.expiration, made.message_class) == (None, None, None, "T")
    take(other).ack(send=Out("q", b"B", priority=1, type="t"))
    (again,) = queue.browse("target")
    assert again.correlation_id == sent.id and (again.priority, again.type) == (1, "t")


def test_a_delay_and_an_expiration_count_from_the_staging(make: Make, clock: Clock) -> None:
    queue = make()
    other = queue.root.create_queue("other")
    queue.send(b"a")
    message = take(queue)
    clock.ms += 5_000
    message.ack(send=Out("other", b"later", delay=10, expires_in=60))
    assert where(other) == {"delayed": [b"later"]}
    (made,) = other.browse("delayed")
    assert made.expiration is not None
    assert int(made.expiration.timestamp() * 1000) == clock.ms + 60_000
    clock.ms += 10_001
    other.sweep()
    assert bodies(other) == [b"later"]


def test_a_topic_s_subscriptions_have_it_after_the_ack(queue: Queue) -> None:
    topic = queue.root.create_topic("t")
    subscription = topic.create_subscription("s", client_id="c")
    queue.send(b"a")
    take(queue).ack(send=Out("t", b"A"))
    assert bodies(subscription) == [b"A"]


def test_what_goes_to_a_view_is_published_to_its_topic(queue: Queue) -> None:
    topic = queue.root.create_topic("t")
    view = queue.root.create_queue("v", underlying_topic="t")
    subscription = topic.create_subscription("s", client_id="c")
    queue.send(b"a")
    take(queue).ack(send=Out("v", b"A"))
    assert bodies(subscription) == bodies(view) == [b"A"]


def test_an_answer_goes_to_the_requester_with_the_ack(queue: Queue) -> None:
    with Working(queue, lambda message: Out(message.reply_to, message.body.upper())):
        answer = queue.request(b"a", 60)
    assert answer is not None and answer.body == b"A"


def test_a_message_that_came_back_is_archived_with_its_deliveries(queue: Queue, other: Queue) -> None:
    queue.send(b"a")
    take(queue).nack(0)
    take(queue).ack(send=Out("other", b"A"))
    (archived,) = queue.browse("processed")
    assert archived.delivery_count == 2


def test_a_foreign_file_keeps_its_name_in_the_history(queue: Queue, other: Queue) -> None:
    drop(queue, "report.csv", b"a")
    queue = reopened(queue)
    until(lambda: queue.counts()["target"] == 1, "the file")
    with queue.subscribe() as subscription:
        message = subscription.receive(60)
        assert message is not None
        message.ack(send=Out("other", b"A"))
    assert os.listdir(base(queue) / "processed") == ["report.csv"]
    assert bodies(other) == [b"A"]


def test_without_a_history_the_message_is_gone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, history=False)
    other = queue.root.create_queue("other")
    queue.send(b"a")
    take(queue).ack(send=Out("other", b"A"))
    assert where(queue) == {} and bodies(other) == [b"A"]


def test_a_bundle_that_is_acknowledged_whole_may_send(queue: Queue, other: Queue) -> None:
    queue.send(b"1\n2\n", type="text")
    message = take(queue)
    for record in message.records():
        record.ack()
        break
    message.ack(send=Out("other", b"A"))
    assert where(queue) == {"processed": [b"1\n2\n"]} and bodies(other) == [b"A"]


def test_the_credit_of_a_message_is_freed_by_the_ack(queue: Queue, other: Queue) -> None:
    source = queue.root.create_queue("source")
    source.add_selector("s", to="q", credit=1)
    source.send_many([b"1", b"2"])
    source.route()
    take(queue).ack(send=Out("other", b"A"))
    source.route()
    assert bodies(queue) == [b"2"]
    (made,) = other.browse("target")
    assert "via" not in made.name


def test_the_durability_is_that_of_the_strictest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="none")
    strict = queue.root.create_queue("strict", durability="full")
    loose = queue.root.create_queue("loose", durability="none")
    queue.send(b"a")
    message = take(queue)
    bodies_synced, folders = list[str](), list[str]()
    fsync = os.fsync

    def noting(fd: int) -> None:
        path = str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path))
        (folders if stat.S_ISDIR(os.fstat(fd).st_mode) else bodies_synced).append(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    message.ack(send=[Out(loose, b"1"), Out(strict, b"2")])
    known = {path for path in bodies_synced if "/receivers/" in path and not path.endswith(".tmp")}
    assert len(known) == 2, "the file by which the queue that syncs nothing is known is synced before the commit, too"
    bodies = [path for path in bodies_synced if "/receivers/" not in path]
    assert len(bodies) == 2, "the body for the queue that syncs nothing is synced before the commit, too"
    assert {"strict/target", "loose/target", "q/processing", "q/.dropq/staged"} <= set(folders)


def test_the_lease_is_renewed_while_an_ack_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    queue.root.create_queue("loose", durability="none")
    queue.send(b"a")
    message = take(queue)
    message.extend(30)
    sync_path, deadlines = Storage.sync_path, list[int]()

    def renewing(self: Storage, path: str) -> None:
        thread = threading.Thread(target=renew_held, args=([message], 60 * (len(deadlines) + 1)))
        thread.start()
        thread.join()
        deadlines.append(message._claim.deadline if message._claim is not None else 0)
        sync_path(self, path)

    monkeypatch.setattr(Storage, "sync_path", renewing)
    message.ack(send=[Out("loose", b"1"), Out("loose", b"2")])
    assert len(deadlines) >= 2 and deadlines == sorted(set(deadlines))


def test_many_that_an_ack_syncs_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    loose = queue.root.create_queue("loose", durability="none")
    queue.send(b"a")
    message, synced = take(queue), list[str]()
    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: True)
    monkeypatch.setattr(system_calls, "sync_whole", lambda fd, path: synced.append(path))
    monkeypatch.setattr(Storage, "sync_path", lambda self, path: synced.append(path))
    message.ack(send=[Out(loose, b"x")] * 100)
    assert [path.split("/")[-2] for path in synced] == ["staged"] and len(bodies(loose)) == 100


def test_a_part_has_the_modes_of_a_message_that_is_sent_there(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, file_mode="0600")
    other = queue.root.create_queue("other", file_mode="0640")
    queue.send(b"a")
    take(queue).ack(send=Out("other", b"A"))
    (made,) = (base(other) / "target").iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o640


# -- nothing goes out ------------------------------------------------------------------------------------------------


def test_who_lost_the_claim_sends_nothing(make: Make, clock: Clock) -> None:
    queue = make()
    other = queue.root.create_queue("other")
    queue.send(b"a")
    message = take(queue)
    message.extend(60)
    clock.ms += 61_000
    queue.sweep()
    with pytest.raises(LeaseLost):
        message.ack(send=Out("other", b"A"))
    assert bodies(other) == [] and bodies(queue) == [b"a"]
    clock.ms += 2 * 24 * 3_600_000
    queue.sweep()  # makes a fence there
    queue.sweep()
    assert staged(queue) == []


def test_who_lost_the_claim_is_told_so_whatever_fails_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    queue.root.create_queue("loose", durability="none")
    queue.send(b"a")
    message = take(queue)
    outputs = outputs_module.Outputs(message, queue._destinations)
    outputs.add_all([Out("loose", b"A")])
    part = outputs.begin(Out("loose", b""))
    assert part is not None
    os.unlink(message.path)
    reopened(queue).sweep()

    def stale(fd: int, data: bytes) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")  # as of a file that another NFS client removed

    monkeypatch.setattr(os, "write", stale)
    with pytest.raises(LeaseLost):
        part.write(b"x" * 100_000)
    part.close()
    with pytest.raises(LeaseLost):
        message._ack_with(outputs)
    assert not message.held


def test_a_missing_queue_leaves_the_message_held(queue: Queue) -> None:
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(NoSuchQueue, match="no queue 'nope'"):
        message.ack(send=[Out("q", b"1"), Out("nope", b"2")])
    assert message.held and staged(queue) == [] and where(queue) == {"processing": [b"a"]}
    message.ack(send=Out("q", b"1"))
    assert bodies(queue) == [b"1"]


def test_for_a_missing_queue_the_dead_letter_queue_takes_it(tmp_path: Path) -> None:
    (tmp_path / "dropq.toml").write_text('dead_letter_queue = "dlq"\n')
    queue = make_queue(tmp_path)
    letters = queue.root.create_queue("dlq")
    queue.send(b"a")
    take(queue).ack(send=Out("nope", b"A", delay=60))
    (letter,) = letters.browse("target")
    assert (letter.body, letter.origin, letter.dead_letter_reason) == (b"A", "nope", "no_such_queue")


def test_a_dead_letter_queue_does_not_feed_itself(tmp_path: Path) -> None:
    (tmp_path / "dropq.toml").write_text('dead_letter_queue = "q"\n')
    queue = make_queue(tmp_path)
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(NoSuchQueue, match="a dead letter of it would come back to q"):
        message.ack(send=Out("nope", b"A"))
    assert message.held and staged(queue) == [] and where(queue) == {"processing": [b"a"]}
    message.release()
    assert counted(work(queue, lambda message: Out("nope", b"A"), until_empty=True)) == {"failed": 1}


def test_a_full_queue_that_rejects_leaves_the_message_held(queue: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="reject")
    full.send(b"1")
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(QueueFull, match="queue full is full"):
        message.ack(send=Out("full", b"A"))
    assert message.held and staged(queue) == []
    take(full).ack()
    until(lambda: is_acked(message, Out("full", b"A")), "an ack")
    assert bodies(full) == [b"A"]


def is_acked(message: Message, *outs: Out) -> bool:
    """Acknowledge a message if there is room; a count of what is in a queue is relied on for a moment."""
    try:
        message.ack(send=outs)
    except QueueFull:
        return False
    return True


def test_more_than_a_queue_ever_has_room_for_goes_out_once_it_is_empty(queue: Queue) -> None:
    small = queue.root.create_queue("small", max_unprocessed=2, overflow="reject")
    small.send(b"1")
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(QueueFull):
        message.ack(send=[Out("small", b"%d" % number) for number in range(5)])
    take(small).ack()
    until(lambda: is_acked(message, *(Out("small", b"%d" % number) for number in range(5))), "an ack")
    assert len(bodies(small)) == 5


def test_a_full_queue_that_discards_gets_nothing_and_the_rest_goes_out(queue: Queue, other: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="discard")
    full.send(b"1")
    queue.send(b"a")
    take(queue).ack(send=[Out("full", b"A"), Out("other", b"B")])
    assert bodies(full) == [b"1"] and bodies(other) == [b"B"] and where(queue) == {"processed": [b"a"]}


def test_an_overflow_selector_s_queue_takes_what_a_full_queue_does_not(queue: Queue, other: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="reject")
    full.add_selector("spill", to="other", role="overflow")
    full.send(b"1")
    queue.send(b"a")
    take(queue).ack(send=Out("full", b"A"))
    assert bodies(full) == [b"1"] and bodies(other) == [b"A"]


def test_an_ack_waits_for_room_and_renews_its_lease(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="block")
    full.send(b"1")
    queue.send(b"a")
    with queue.subscribe(lease_period=0.6) as subscription:
        message = subscription.receive()
        assert message is not None
        deadline = message._claim.deadline if message._claim is not None else 0
        holder = take(reopened(full))

        def settle() -> None:
            until(lambda: message._claim is not None and message._claim.deadline > deadline, "a renewed lease")
            holder.ack()

        thread = threading.Thread(target=settle)
        thread.start()
        message.ack(send=Out("full", b"A"))
        thread.join()
    assert bodies(full) == [b"A"] and where(queue) == {"processed": [b"a"]}


def test_a_full_queue_itself_may_be_sent_to(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_unprocessed=1, overflow="reject")
    queue.send(b"a")
    take(queue).ack(send=Out("q", b"again"))
    assert bodies(queue) == [b"again"]


@pytest.mark.parametrize(
    ("options", "key"),
    [({"semantics": "at-most-once"}, "semantics"), ({"barrier_expression": "JMSType = 'b'"}, "barrier_expression")],
)
def test_where_nothing_can_go_out_with_an_ack_it_is_refused(tmp_path: Path, options: dict[str, Any], key: str) -> None:
    queue = make_queue(tmp_path, **options)
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(ConfigError, match=key):
        message.ack(send=Out("q", b"A"))
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_bundle_of_which_records_were_settled_otherwise_sends_nothing(queue: Queue) -> None:
    queue.send(b"1\n2\n", type="text")
    message = take(queue)
    first = next(message.records())
    first.reject("bad")
    with pytest.raises(ValueError, match="some of its records were settled otherwise"):
        message.ack(send=Out("q", b"A"))
    assert message.held
    message.ack()
    assert where(queue) == {"processed": [b"1\n2\n"], "error": [b"1\n"]}


@pytest.mark.parametrize(
    ("make_out", "error", "words"),
    [
        (lambda: Out(None, b""), ValueError, "reply_to is None"),
        (lambda: Out("q", 1), TypeError, "a body is bytes or text"),  # type: ignore[arg-type]
        (lambda: Out("q", b"", ttl=1), TypeError, "is it expires_in?"),
        (lambda: Out(5, b""), TypeError, "give a queue, a topic or the name of one, not int"),  # type: ignore[arg-type]
        (lambda: Out("q", b"", properties=["a"]), TypeError, "properties are a mapping, not list"),
    ],
)
def test_an_out_that_cannot_be_sent_is_refused_when_it_is_made(
    make_out: Callable[[], Out], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_out()


def test_what_no_name_can_hold_is_refused_before_anything_is_settled(queue: Queue) -> None:
    queue.send(b"a")
    message = take(queue)
    for bad, error in (
        (Out("a/../b", b""), dropq.InvalidName),
        (Out("q", b"", priority=1 << 40), ValueError),
        (Out("q", b"", properties={"NOT": 1}), ValueError),
        (Out("q", b"", delay="soon"), ValueError),
        ("q", TypeError),
    ):
        with pytest.raises(error):
            message.ack(send=[bad])  # type: ignore[list-item]
    assert message.held and staged(queue) == [] and where(queue) == {"processing": [b"a"]}


def test_more_than_so_many_are_refused(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "MOST", 3)
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(ValueError, match="more than 3 messages"):
        message.ack(send=[Out("q", b"x")] * 4)
    assert message.held and where(queue) == {"processing": [b"a"]}
    message.ack(send=[Out("q", b"x")] * 3)
    assert len(bodies(queue)) == 3


def test_another_file_system_is_refused(queue: Queue, request: pytest.FixtureRequest) -> None:
    there = other_file_system(Path(queue.root.path))
    if there is None:
        pytest.skip("there is no other file system")
    folder = Path(tempfile.mkdtemp(dir=there))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    far = dropq.Root.create(folder).create_queue("far")
    os.symlink(base(far), Path(queue.root.path) / "far")
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(ConfigError, match="no rename from queue q leads to"):
        message.ack(send=Out("far", b"A"))
    assert message.held and files(base(far) / "working") == {} and bodies(far) == []


def test_who_may_not_send_there_sends_nothing(queue: Queue, other: Queue) -> None:
    queue.send(b"a")
    for folder in (Path(queue.root.path), *Path(queue.root.path).rglob("*")):
        if folder.is_dir():
            folder.chmod(0o777)
    (base(other) / "working").chmod(0o555)

    def refused() -> str:
        message = take(reopened(queue))
        try:
            message.ack(send=Out("other", b"A"))
        except StorageError as error:
            message.release(counted=False)
            return f"{error.errno} {message.state}"
        return "sent"

    assert unprivileged(refused) == f"{errno.EACCES} target"
    assert staged(queue) == [] and bodies(other) == []


def test_a_circle_through_a_topic_is_refused(queue: Queue) -> None:
    queue.root.create_topic("t")
    queue.root.create_queue("v", underlying_topic="t").add_selector("back", to="q")
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(ConfigError, match="q -> t -> v -> q"):
        message.ack(send=Out("t", b"A"))
    assert message.held


def test_a_body_that_was_written_to_meanwhile_sends_nothing(queue: Queue, other: Queue) -> None:
    drop(queue, "a.txt", b"a")
    with reopened(queue).subscribe() as subscription:
        message = subscription.receive(60)
        assert message is not None
        with open(message.path, "ab") as writing:
            writing.write(b"more")
        message.ack(send=Out("other", b"A"))
        assert message.state == "error"
    assert bodies(other) == [] and staged(queue) == []
    assert reason_in(queue, "error")["reason"] == "body_changed"


# -- after the commit ------------------------------------------------------------------------------------------------


def commit_only(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do what commits parts, as a process that dies after that."""

    def die(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dropq.staging.fan_out._roll_forward", die)
        with pytest.raises(KeyboardInterrupt):
            act()


def committed_only(monkeypatch: pytest.MonkeyPatch, message: Message, *outs: Out) -> None:
    """Commit what was made of a message, as a process that dies after that."""
    commit_only(monkeypatch, lambda: message.ack(send=outs))


def test_a_sweep_goes_on_with_what_was_committed(queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send(b"a")
    message = take(queue)
    committed_only(monkeypatch, message, Out("other", b"A"), Out("other", b"B", delay=3600))
    assert bodies(other) == [] and queue.counts()["processing"] == 1
    with pytest.raises(NoSuchMessage, match="is committed, and parts of it have not arrived"):
        queue.find(message.id)
    assert reopened(queue).sweep().total == 1
    assert where(other) == {"target": [b"A"], "delayed": [b"B"]} and where(queue) == {"processed": [b"a"]}
    assert queue.fsck() == []


def test_who_stages_tells_a_committed_ack_from_a_lost_one(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"a")
    message = take(queue)
    rename = Storage.commit

    def no_answer(_: str) -> bool:
        raise OSError(errno.EIO, "no answer")

    def done_and_refused(self: Storage, source: str, destination: str) -> None:
        rename(self, source, destination)
        raise OSError(errno.EIO, "no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "commit", done_and_refused)
        patched.setattr("dropq.staging.fan_out.is_committed", no_answer)
        with pytest.raises(StorageError):
            message.ack(send=Out("other", b"A"))
    assert message.held and bodies(other) == []
    message.ack(send=Out("other", b"B"))
    assert bodies(other) == [b"A"] and where(queue) == {"processed": [b"a"]}


def test_an_ack_that_was_interrupted_after_its_commit_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, log="all")
    other = queue.root.create_queue("other")
    queue.send(b"a")
    message = take(queue)
    committed_only(monkeypatch, message, Out("other", b"A"))
    assert message.held
    message.ack(send=Out("other", b"B"))
    queue.context.log.sums.tell()
    assert told(queue) == [("acked", None)] and sums(queue) == {"acked": 1} and bodies(other) == [b"A"]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("letters", [False, True])
def test_a_part_whose_queue_is_gone_is_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool, letters: bool
) -> None:
    if letters:
        (tmp_path / "dropq.toml").write_text('dead_letter_queue = "dlq"\n')
    queue = make_queue(tmp_path)
    root = queue.root
    other = root.create_queue("other")
    if letters:
        root.create_queue("dlq")
    queue.send(b"a")
    committed_only(monkeypatch, take(queue), Out("other", b"A"))
    root.delete_queue("other", force=True)
    if anew:
        other = root.create_queue("other")
    reopened(queue).sweep()
    place = root.queue("dlq") if letters else reopened(queue)
    (letter,) = place.browse("target" if letters else "error")
    assert (letter.body, letter.origin, letter.dead_letter_reason) == (b"A", "other", "no_such_queue")
    assert where(queue).get("processed") == [b"a"]
    (event,) = (each for each in events(queue) if each.fields.get("id") == letter.id)
    assert (event.event, event.fields["reason"]) == ("dead-letter" if letters else "failed", "no_such_queue")
    queue.context.log.sums.tell()
    assert sums(queue) == {"acked": 1}
    if anew:
        assert bodies(other) == []
        if letters:
            (outcome,) = place.requeue(to_origin=True)
        else:
            (outcome,) = place.move(other, state="error")
        assert outcome.ok and bodies(other) == [b"A"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_requeue_passes_over_what_was_made_for_another_queue(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    queue.send(b"a")
    committed_only(monkeypatch, take(queue), Out("other", b"A"))
    queue.root.delete_queue("other", force=True)
    queue = reopened(queue)
    queue.sweep()
    (letter,) = queue.browse("error")
    assert list(queue.requeue(whole=whole)) == []
    (outcome,) = queue.requeue([letter.id], whole=whole)
    assert not outcome.ok and f"`dropq requeue q {letter.id} --to QUEUE`" in outcome.detail
    again = queue.root.create_queue("again")
    (outcome,) = bulk.requeue(queue.context, bulk.Selection(("error",), frozenset({letter.id})), to=again.context)
    assert outcome.ok and bodies(again) == [b"A"]


def test_what_was_made_in_a_topic_stays_delayed_and_is_no_copy_for_a_receiver(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = queue.root.create_queue("gone")
    queue.root.create_topic("t")
    incoming = queue.root.queue("t")
    drop(incoming, "script", b"x")
    with incoming.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        committed_only(monkeypatch, message, Out("other", b"later", delay=3600), Out("gone", b"A"))
    gone.root.delete_queue("gone", force=True)
    reopened(incoming).sweep()
    assert where(other) == {"delayed": [b"later"]}
    (letter,) = reopened(incoming).browse("error")
    assert (letter.body, letter.dead_letter_reason) == (b"A", "no_such_queue")


def test_the_copy_of_a_selector_is_no_dead_letter(
    tmp_path: Path, queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.root.create_queue("dlq")
    (tmp_path / "dropq.toml").write_text('dead_letter_queue = "dlq"\n')
    queue = reopened(queue)
    queue.add_selector("copies", to="other", op="copy")
    queue.send(b"a")
    commit_only(monkeypatch, lambda: dropq.route(queue.root, once=True))
    queue.root.delete_queue("other", force=True)
    reopened(queue).sweep()
    assert reason_in(queue, "error")["reason"] == "receiver_gone"
    assert bodies(queue.root.queue("dlq")) == [] and where(queue) == {"error": [b"a"], "processed": [b"a"]}


def test_a_draft_of_a_dead_worker_is_removed_by_a_sweep(queue: Queue, other: Queue, clock: Clock) -> None:
    queue.send(b"a")
    message = take(queue)
    outputs = outputs_module.Outputs(message, queue._destinations)
    part = outputs.begin(Out("other", b""))
    assert part is not None
    part.write(b"x" * 100_000)
    part.close()
    assert [name.rpartition("/")[2] for name in staged(queue)][-1] == "0.draft"
    assert queue.fsck() == []
    message.release()
    queue.sweep()
    assert [name for name in staged(queue) if name.endswith("draft")] == []
    assert bodies(other) == [] and files(base(other) / "working") == {}


def test_what_was_tried_to_commit_is_not_withdrawn(queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send(b"a")
    message = take(queue)

    def refused(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EIO, "no answer")  # a file server may do it after that

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "commit", refused)
        with pytest.raises(StorageError):
            message.ack(send=Out("other", b"A"))
    (folder, _) = staged(queue)
    os.rename(message.path, base(queue) / ".dropq/staged" / folder / "whole")
    queue.sweep()
    assert bodies(other) == [b"A"] and where(queue) == {"processed": [b"a"]}


def test_a_sweep_drops_no_folder_whose_claim_its_listing_passed_over(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"a")
    message = take(queue)
    outputs = outputs_module.Outputs(message, queue._destinations)
    outputs.add_all([Out("other", b"A")])
    passed_over, claims_in = [True], processing.claims_in
    monkeypatch.setattr(
        fan_out, "claims_in", lambda context: iter(()) if passed_over and passed_over.pop() else claims_in(context)
    )
    assert fan_out.sweep(reopened(queue).context).dropped == 0 and not passed_over
    message._ack_with(outputs)
    assert bodies(other) == [b"A"]


def test_a_part_that_another_user_left_without_a_file_is_left_to_its_owner(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"a")
    committed_only(monkeypatch, take(queue), Out("other", b"A"))
    (token,) = (base(queue) / ".dropq/receivers").iterdir()
    token.unlink()
    if os.geteuid():
        pytest.skip("only root gives files away")
    (folder,) = (base(queue) / ".dropq/staged").iterdir()
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, -1)
    queue = reopened(queue)
    queue.sweep()
    assert queue.counts()["processing"] == 1 and where(queue).get("error") is None
    assert any("only processes of that user" in why for _, _, why in _committed(queue))


def _committed(queue: Queue) -> list[tuple[str, str, str]]:
    return [(found.message.id, found.why, found.detail) for found in queue.explain("processing")]


def test_an_out_to_a_queue_of_another_root_is_refused(queue: Queue, other: Queue, tmp_path: Path) -> None:
    far = dropq.Root.create(tmp_path / "far").create_queue("other")
    queue.send(b"a")
    message = take(queue)
    with pytest.raises(ConfigError, match="goes to queues of its root"):
        message.ack(send=Out(far, b"A"))
    assert message.held and bodies(other) == bodies(far) == []


def test_an_out_to_a_queue_of_the_root_by_another_path_is_sent(queue: Queue, other: Queue, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(queue.root.path)
    queue.send(b"a")
    take(queue).ack(send=Out(dropq.Root(tmp_path / "link").queue("other"), b"A"))
    assert bodies(other) == [b"A"]


def test_a_foreign_name_that_is_not_text_is_no_correlation_id(queue: Queue, other: Queue) -> None:
    drop(queue, os.fsdecode(b"a\xff.txt"), b"a")
    with reopened(queue).subscribe() as subscription:
        message = subscription.receive(60)
        assert message is not None
        message.ack(send=Out("other", b"A"))
    (made,) = other.browse("target")
    assert made.correlation_id is None


# -- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda other: Out(other, b"1"),
        lambda other: [Out(other, b"1"), Out(other, b"2")],
        lambda other: (Out(other, b"1"),),
        lambda other: (Out(other, b"%d" % number) for number in (1, 2, 3)),
    ],
)
def test_a_worker_sends_what_its_handler_returns(queue: Queue, other: Queue, made: Callable[[Queue], Any]) -> None:
    queue.send(b"a")
    expected = len(list(made(other))) if not isinstance(made(other), Out) else 1
    assert counted(work(queue, lambda message: made(other), until_empty=True)) == {"acked": 1}
    assert len(bodies(other)) == expected and where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("made", ["text", [1, 2], {"a": 1}, iter([]), 7])
def test_whatever_else_a_handler_returns_does_not_count(queue: Queue, made: object) -> None:
    queue.send(b"a")
    assert counted(work(queue, lambda message: made, until_empty=True)) == {"acked": 1}


@pytest.mark.parametrize(
    "container",
    [set, frozenset, lambda outs: dict(enumerate(outs)).values(), lambda outs: filter(None, outs)],
    ids=["set", "frozenset", "values", "iterator"],
)
def test_several_may_come_in_any_container(queue: Queue, other: Queue, container: Callable[[Any], object]) -> None:
    queue.send(b"a")
    report = work(queue, lambda message: container([Out(other, b"1"), Out(other, b"2")]), until_empty=True)
    assert counted(report) == {"acked": 1} and sorted(bodies(other)) == [b"1", b"2"]


def test_an_async_handler_is_refused(queue: Queue, other: Queue) -> None:
    queue.send(b"a")

    async def handler(message: Message) -> Out:
        return Out(other, b"1")

    with pytest.raises(ValueError, match="the handler is async"):
        work(queue, handler, until_empty=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert counted(work(queue, lambda message: handler(message), until_empty=True)) == {"failed": 1}
    assert "the handler is async" in reason_in(queue, "error")["detail"]


@pytest.mark.parametrize("wrap", [lambda out: [[out]], lambda out: {"k": out}, lambda out: ({"k": 1}, (out,))])
def test_outs_that_lie_deeper_fail_the_message(queue: Queue, other: Queue, wrap: Callable[[Out], object]) -> None:
    queue.send(b"a")
    assert counted(work(queue, lambda message: wrap(Out(other, b"1")), until_empty=True)) == {"failed": 1}
    assert "return them in one list" in reason_in(queue, "error")["detail"]


def test_what_a_handler_returns_after_it_settled_is_not_sent_and_the_log_says_so(
    queue: Queue, other: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send(b"a")

    def handler(message: Message) -> Out:
        message.ack()
        return Out(other, b"A")

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
    assert bodies(other) == [] and "was not sent, as its handler settled it" in caplog.text


def test_a_record_that_is_rejected_after_the_first_output_fails_the_message(queue: Queue, other: Queue) -> None:
    queue.send(b"1\n2\n", type="text")

    def handler(message: Message) -> Iterator[Out]:
        for record in message.records():
            if record.data == b"2":
                record.reject("bad")
            else:
                yield Out(other, record.data)

    report = work(queue, handler, until_empty=True)
    assert report.acked == 0 and report.failed == 1
    assert bodies(other) == [] and b"2\n" in where(queue)["error"]


def test_a_handler_that_settles_its_message_sends_nothing_and_the_log_says_so(
    queue: Queue, other: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send(b"a")

    def handler(message: Message) -> Iterator[Out]:
        yield Out(other, b"A")
        message.ack()

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
    assert bodies(other) == [] and "was not sent, as its handler settled it" in caplog.text


def test_a_worker_waits_for_a_destination_that_is_away(queue: Queue, other: Queue) -> None:
    queue.send_many([b"1", b"2"])
    home, aside = base(other), base(other).with_name("aside")
    with Working(queue, lambda message: Out("other", message.body)) as working:
        until(lambda: len(bodies(other)) == 2, "both")
        home.rename(aside)
        home.symlink_to("/nonexistent/disk")
        queue.send(b"3")
        until(lambda: [found.why for found in queue.explain("target")] == ["destination"], "the reason")
        home.unlink()
        aside.rename(home)
        until(lambda: len(bodies(other)) == 3, "the third")
    assert counted(working.report)["acked"] == 3 and "failed" not in counted(working.report)


@pytest.mark.parametrize("paused", [True, False])
def test_a_worker_does_not_wait_for_room_where_nothing_is_for_it(queue: Queue, paused: bool) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="reject")
    queue.send(b"1", type="mine")
    queue.send(b"2", type="other")
    if paused:
        work(queue, lambda message: Out("full", message.body), until_empty=True, filter="JMSType = 'mine'")
        queue.pause()
    else:
        work(queue, lambda message: Out("full", message.body), until_empty=True, filter="JMSType = 'mine'")
    again = work(queue, lambda message: Out("full", message.body), until_empty=True, filter="JMSType = 'mine'")
    assert counted(again) == {} and bodies(full) == [b"1"] and bodies(queue) == [b"2"]


def test_what_a_generator_made_before_it_failed_is_not_sent(queue: Queue, other: Queue) -> None:
    queue.send(b"a")
    closed = []

    def handler(message: Message) -> Iterator[Out]:
        try:
            yield Out(other, b"1")
            raise RuntimeError("broken")
        finally:
            closed.append(True)

    assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    assert bodies(other) == [] and closed == [True] and staged(queue) == []
    assert reason_in(queue, "error")["detail"] == "RuntimeError: broken"


def test_a_generator_that_yields_something_else_fails_its_message(queue: Queue, other: Queue) -> None:
    queue.send(b"a")

    def handler(message: Message) -> Iterator[object]:
        yield Out(other, b"1")
        yield b"2"

    assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    assert "a dropq.Out, or several, not bytes" in reason_in(queue, "error")["detail"]
    assert bodies(other) == []


def test_too_many_outputs_fail_the_message_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, redelivery_attempts=5)
    monkeypatch.setattr(outputs_module, "MOST", 3)
    queue.send(b"a")
    assert counted(work(queue, lambda message: [Out(queue, b"x")] * 4, until_empty=True)) == {"failed": 1}
    assert reason_in(queue, "error")["reason"] == "too_many_outputs"


def test_a_reply_to_that_is_missing_fails_its_message_alone(queue: Queue, other: Queue) -> None:
    queue.send(b"a", reply_to="nobody")
    queue.send(b"b", reply_to="other")
    report = work(queue, lambda message: Out(message.reply_to, message.body), until_empty=True)
    assert counted(report) == {"acked": 1, "failed": 1} and bodies(other) == [b"b"]
    assert "no queue 'nobody'" in reason_in(queue, "error")["detail"]


def test_a_handler_of_records_cannot_send(queue: Queue, other: Queue) -> None:
    queue.send(b"1\n", type="text")
    assert counted(work(queue, lambda record: Out(other, b"x"), until_empty=True, records=True)) == {"failed": 1}
    assert bodies(other) == []


def test_a_full_disk_gives_the_message_back_and_the_worker_rests(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"a")
    write_new, full = Storage.write_new, [True]

    def no_space(self: Storage, path: str, data: bytes, **how: Any) -> None:
        if full and "/other/working/" in path:
            full.pop()
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write_new(self, path, data, **how)

    monkeypatch.setattr(Storage, "write_new", no_space)
    monkeypatch.setattr("dropq.worker.sending.LEAST_REST", 0.3)
    taken: list[float] = []

    def handler(message: Message) -> Out:
        taken.append(time.monotonic())
        return Out(other, message.body)

    with Working(queue, handler) as working:
        until(lambda: bodies(other) == [b"a"], "the message that was sent at last")
    assert counted(working.report) == {"returned": 1, "acked": 1}
    assert taken[1] - taken[0] >= 0.3
    (archived,) = queue.browse("processed")
    assert "JMSXDeliveryCount" not in archived.name


def test_a_worker_that_loses_a_message_as_its_ack_fails_goes_on(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send_many([b"1", b"2"])
    commit, fails = Storage.commit, [True]

    def removed(self: Storage, source: str, destination: str) -> None:
        if fails and fails.pop():
            os.unlink(source)
            raise OSError(errno.EIO, "no answer")
        commit(self, source, destination)

    monkeypatch.setattr(Storage, "commit", removed)
    monkeypatch.setattr("dropq.worker.sending.LEAST_REST", 0.01)
    report = work(queue, lambda message: Out(other, message.body), until_empty=True)
    assert counted(report) == {"lost": 1, "acked": 1} and bodies(other) == [b"2"]


def test_a_worker_takes_nothing_while_a_destination_is_full(queue: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="reject")
    queue.send_many([b"1", b"2", b"3"])
    with Working(queue, lambda message: Out("full", message.body)) as working:
        until(lambda: bodies(full) == [b"1"], "the first")
        for body in (b"1", b"2"):
            message = reopened(full).receive(60)
            assert message is not None and message.body == body
            assert queue.counts()["processing"] <= 1
            message.ack()
        until(lambda: bodies(full) == [b"3"], "the last")
    assert counted(working.report)["acked"] == 3
    assert not any("JMSXDeliveryCount" in message.name for message in queue.browse("processed"))


def test_a_worker_that_is_to_empty_a_queue_waits_for_room(queue: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="block")
    queue.send_many([b"1", b"2"])
    with Working(queue, lambda message: Out("full", message.body), until_empty=True) as working:
        until(lambda: bodies(full) == [b"1"], "the first")
        take(reopened(full)).ack()
        until(lambda: bodies(full) == [b"2"], "the second")
    assert counted(working.report) == {"acked": 2}


def test_an_ack_that_waits_for_room_goes_back_when_the_worker_stops(queue: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="block")
    queue.send(b"1")

    def handler(message: Message) -> Out:
        full.send(b"in between")
        return Out("full", message.body)

    with Working(queue, handler) as working:
        until(lambda: bodies(full) == [b"in between"], "the other message")
        until(lambda: queue.counts()["processing"] == 1, "the held one")
    assert counted(working.report) == {"returned": 1}
    (waiting,) = queue.browse("target")
    assert waiting.delivery_count == 0


def test_explain_health_and_graph_say_where_workers_send_and_why_they_take_nothing(queue: Queue) -> None:
    full = queue.root.create_queue("full", max_unprocessed=1, overflow="block")
    queue.send_many([b"1", b"2"])
    with Working(queue, lambda message: Out("full", message.body)):
        until(lambda: [found.why for found in queue.explain("target")] == ["destination"], "the reason")
        (explained,) = queue.explain("target")
        assert explained.detail == "its workers take nothing, as full takes nothing: queue full is full " + (
            "(max_unprocessed = 1): senders wait"
        )
        assert [note.kind for note in queue.health().notes] == ["destination"]
        edges = {(edge.source, edge.to, edge.kind): edge.stuck for edge in queue.root.graph().edges}
        why = "full takes nothing: queue full is full (max_unprocessed = 1): senders wait"
        assert edges["q", "full", "work"] == why
        assert "by work" in queue.root.graph().mermaid() and "by work" in queue.root.graph().svg()
        take(reopened(full)).ack()
        until(lambda: bodies(full) == [b"2"], "the second")
    assert [path.name for path in (base(queue) / ".dropq/consumers").iterdir()] == []


def test_a_view_that_rejects_is_a_full_destination_and_explain_says_so(queue: Queue) -> None:
    queue.root.create_topic("t")
    view = queue.root.create_queue("v", underlying_topic="t", max_unprocessed=1, overflow="reject")
    queue.send_many([b"1", b"2"])
    with Working(queue, lambda message: Out("v", message.body)):
        until(lambda: [found.why for found in queue.explain("target")] == ["destination"], "the reason")
        (explained,) = queue.explain("target")
        assert explained.detail == "its workers take nothing, as v takes nothing: queue v is full " + (
            "(max_unprocessed = 1): sends are refused"
        )
        take(reopened(view)).ack()
        until(lambda: bodies(view) == [b"2"], "the second")


def test_what_several_threads_meet_at_once_makes_a_worker_rest_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, redelivery_delay=10, redelivery_backoff=2)
    sendings = Sendings()
    with queue.subscribe() as subscription:
        for _ in range(4):
            sendings.rest(subscription)
        assert 0 < sendings.rests_for <= 10


def test_workers_that_wait_for_each_other_s_room_are_told(queue: Queue) -> None:
    one = queue.root.create_queue("one", max_unprocessed=1, overflow="block")
    two = queue.root.create_queue("two", max_unprocessed=1, overflow="block")
    one.send(b"1")
    two.send(b"2")
    there = threading.Event()

    def to(name: str) -> Callable[[Message], Out]:
        def handler(message: Message) -> Out:
            there.wait(60)
            return Out(name, message.body)

        return handler

    with Working(one, to("two")), Working(two, to("one")):
        there.set()
        until(lambda: [each.kind for each in one.health().reasons] == ["full-circle"], "the circle")
        (reason,) = one.health().reasons
        assert "one -> two -> one" in reason.message


def test_what_a_dead_worker_told_goes_with_its_sign_of_life(queue: Queue, other: Queue) -> None:
    queue.send(b"a")
    script = (
        "import os, sys, dropq; queue = dropq.Root(sys.argv[1]).queue('q'); "
        "dropq.work(queue, lambda message: (yield dropq.Out('other', b'A')) or os._exit(0))"
    )
    subprocess.run([sys.executable, "-c", script, str(queue.root.path)], check=True)
    consumers = base(queue) / ".dropq/consumers"
    assert [path.suffix for path in consumers.glob(".*")] == [".to"]
    reopened(queue).sweep()
    assert list(consumers.iterdir()) == [] and bodies(queue) == [b"a"] and bodies(other) == []


def test_what_nobody_told_any_more_is_a_leftover_after_a_day(make: Make, clock: Clock) -> None:
    queue = make()
    other = queue.root.create_queue("other")
    queue.send(b"a")
    take(queue).ack(send=Out("other", b"A"))
    consumers = base(queue) / ".dropq/consumers"
    with queue.subscribe() as subscription:
        for name in (subscription.id, "vm-1-0123456789"):
            (consumers / f".{name}.to").write_text("{}")
        clock.ms += 2 * 24 * 3_600_000
        queue.sweep()
        assert [path.name for path in consumers.glob(".*")] == [f".{subscription.id}.to"]
        assert len(list((base(queue) / ".dropq/receivers").iterdir())) == 1
        take(other).ack()
        queue.root.delete_queue("other")
        queue.sweep()
        assert list((base(queue) / ".dropq/receivers").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"to": 1}', b'{"to": [1, "../up", "other"]}', b"\xff" * 99])
def test_whatever_a_worker_told_breaks_nothing(queue: Queue, other: Queue, content: bytes) -> None:
    queue.send(b"a")
    with reopened(queue).subscribe() as subscription:
        (base(queue) / f".dropq/consumers/.{subscription.id}.to").write_bytes(content)
        assert [found.why for found in queue.explain("target")] == ["ready"]
        assert queue.health().healthy
        assert {edge.to for edge in queue.root.graph().edges} <= {"other"}


def test_asyncio_sends_with_an_ack(queue: Queue, other: Queue) -> None:
    queue.send(b"a")

    async def main() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            message = await anext(aiter(subscription))
            await message.ack(send=[Out("other", b"A")])

    asyncio.run(main())
    assert bodies(other) == [b"A"] and where(queue) == {"processed": [b"a"]}
