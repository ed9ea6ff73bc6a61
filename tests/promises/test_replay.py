"""What was archived is sent again: from where on, as what, and that the archive stays as it is, whoever dies when."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from children import killed_at_each_call
from helpers import Clock, Make, RecordingOs, base, drop, files, make_queue, names_in, reopened, take, until, where

from dropq import InvalidFilter, Message, Outcome, Queue, Root
from dropq.config.schema import POINTS
from dropq.storage.files import Storage
from dropq.storage.reading import RESERVED_MODE
from dropq.upkeep.archived import since


def archive(queue: Queue, *bodies: bytes, **options: Any) -> list[str]:
    """Send messages, take and acknowledge them; return their ids."""
    ids = [queue.send(body, **options).id for body in bodies]
    work_off(queue)
    return ids


def work_off(queue: Queue) -> list[bytes]:
    """Take what waits and acknowledge it; return the bodies."""
    taken = []
    while (message := queue.receive()) is not None:
        taken.append(message.body)
        message.ack()
    return taken


def let_time_pass(queue: Queue) -> None:
    """Wait until what changes now has another ctime, in ms, than what changed before."""
    probe = base(queue) / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns

    def passed() -> bool:
        probe.touch()
        return probe.stat().st_ctime_ns > before + 1_000_000

    until(passed, "the file system's clock to go on")
    probe.unlink()


def bodies(queue: Queue) -> list[bytes]:
    """The bodies that wait, in order."""
    return [message.body for message in queue.browse()]


def ids_of(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [outcome.id for outcome in outcomes]


# -- as what it comes --------------------------------------------------------------------------------------------------


def test_what_was_archived_comes_again_and_the_archive_stays(make: Make) -> None:
    queue = make()
    ids = archive(queue, b"a", b"b")
    before = files(base(queue) / "processed")
    outcomes = queue.replay()
    assert ids_of(outcomes) == ids
    assert [outcome.target for outcome in outcomes] == names_in(queue, "target")
    assert bodies(queue) == [b"a", b"b"]
    assert files(base(queue) / "processed") == before
    assert names_in(queue, "working") == []


def test_a_replayed_message_is_redelivered_and_is_otherwise_what_it_was(make: Make) -> None:
    queue = make()
    fields = {"type": "order", "correlation_id": "c", "reply_to": "answers", "properties": {"n": 7, "region": "EU"}}
    (id,) = archive(queue, b"a", priority=6, **fields)
    queue.replay()
    (waiting,) = queue.browse()
    assert (waiting.redelivered, waiting.delivery_count) == (True, 1)
    message = take(queue)
    assert (message.redelivered, message.delivery_count, message.cancels) == (True, 2, 0)
    assert (message.id, message.priority, message.message_class, message.body) == (id, 6, "B", b"a")
    assert {name: getattr(message, name) for name in fields} == fields


def test_its_counters_begin_again(make: Make) -> None:
    queue = make(redelivery_attempts=5)
    queue.send(b"a")
    for _ in range(3):
        take(queue).nack()
    take(queue).ack()
    queue.replay()
    (waiting,) = queue.browse()
    assert (waiting.delivery_count, waiting.cancels) == (1, 0)


def test_its_own_expiration_is_dropped_and_the_queues_clock_starts_again(make: Make, clock: Clock) -> None:
    queue = make(expiration="1h")
    archive(queue, b"a", expires_in="10s")
    clock.advance(3 * 3600)
    queue.replay()
    assert next(queue.browse()).expiration is None
    clock.advance(3500)
    assert bodies(queue) == [b"a"] and queue.sweep().expired == 0
    clock.advance(200)
    assert queue.sweep().expired == 1


def test_what_did_not_fit_its_name_comes_too_also_into_another_root(make: Make) -> None:
    queue, far = make(), make()
    long = {"text": "x" * 300}
    archive(queue, b"a", properties=long)
    queue.replay()
    queue.replay(to=far)
    assert [message.properties for each in (queue, far) for message in each.browse()] == [long, long]


def test_it_goes_to_another_queue_where_asked(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    (id,) = archive(queue, b"a")
    (outcome,) = queue.replay(to=other)
    assert (outcome.id, outcome.ok, outcome.detail) == (id, True, "replayed to other")
    assert where(queue) == {"processed": [b"a"]} and where(other) == {"target": [b"a"]}


def test_a_foreign_file_comes_again_and_is_archived_beside_the_one_before(make: Make) -> None:
    queue = make()
    drop(queue, "report.csv", b"a")
    work_off(queue)
    assert ids_of(queue.replay()) == ["report.csv"]
    message = take(queue)
    assert (message.id, message.redelivered) == ("report.csv", True)
    message.ack()
    assert where(queue) == {"processed": [b"a", b"a"]}
    assert "report.csv" in names_in(queue, "processed")


def test_two_replays_at_a_time_are_two_messages(make: Make) -> None:
    queue = make()
    archive(queue, b"a")
    first, second = queue.replay() + queue.replay()
    assert first.target != second.target
    assert where(queue) == {"processed": [b"a"], "target": [b"a", b"a"]}


def test_the_reason_of_each_replay_that_fails_is_kept(make: Make) -> None:
    queue = make()
    drop(queue, "report.csv", b"a")
    work_off(queue)
    for why in ("first", "second"):
        queue.replay()
        take(queue).reject(why)
    reasons = [message.reason for message in queue.browse("error")]
    assert sorted(str(reason and reason["detail"]) for reason in reasons) == ["first", "second"]


def test_the_age_of_what_is_archived_stays_and_the_oldest_goes_first(make: Make) -> None:
    queue = make(max_history=3)
    drop(queue, "oldest", b"oldest")
    work_off(queue)
    let_time_pass(queue)
    archive(queue, b"b", b"c")
    let_time_pass(queue)
    before = {path.name: path.stat().st_ctime_ns for path in (base(queue) / "processed").iterdir()}
    queue.replay(ids=["oldest"])
    work_off(queue)
    after = {path.name: path.stat().st_ctime_ns for path in (base(queue) / "processed").iterdir()}
    assert before.items() <= after.items()
    assert queue.sweep().pruned == 1
    assert "oldest" not in names_in(queue, "processed")


# -- from where on -----------------------------------------------------------------------------------------------------


@pytest.fixture
def dated(make: Make, clock: Clock) -> Queue:
    """A queue that archived `0` to `3`, an hour between each, from 2026-11-22 10:00 UTC on."""
    clock.ms = int(datetime(2026, 11, 22, 10, tzinfo=UTC).timestamp() * 1000)
    queue = make()
    for number in range(4):
        archive(queue, b"%d" % number)
        clock.advance(3600)
    return queue


@pytest.mark.parametrize(
    ("point", "first"),
    [
        ("epoch", 0),
        ("now", 4),
        ("2026-11-22", 0),
        ("20261122", 0),
        ("2026-11-23", 4),
        ("2026-11-22T11:00", 1),
        ("2026-11-22 11:00:00.000", 1),
        ("2026-11-22T11:00Z", 1),
        ("2026-11-22T11:00:00.001Z", 2),
        ("2026-11-22T13:00+01:00", 2),
        ("2026-11-22T08:00:00-05:00", 3),
        ("0001-01-01T00:00+14:00", 0),
        ("9999-12-31T23:59:59-14:00", 4),
        (datetime(2026, 11, 22, 12, tzinfo=UTC), 2),
        (datetime(2026, 11, 22, 12), 2),
        (datetime(2026, 11, 22, 11, tzinfo=timezone(timedelta(hours=-1))), 2),
        (datetime(2026, 11, 23).date(), 4),
    ],
)
def test_a_replay_begins_at_a_time(dated: Queue, point: str | datetime, first: int) -> None:
    assert len(dated.replay(point)) == 4 - first
    assert bodies(dated) == [b"%d" % number for number in range(first, 4)]


def test_a_replay_begins_at_a_message_itself_included(dated: Queue) -> None:
    ids = [message.id for message in dated.browse("processed")]
    assert ids_of(dated.replay(ids[2])) == ids[2:]


def test_a_replay_begins_at_an_id_whose_message_is_gone(dated: Queue) -> None:
    ids = [message.id for message in dated.browse("processed")]
    for path in (base(dated) / "processed").glob(f"*{ids[1]}*"):
        path.unlink()
    assert ids_of(dated.replay(ids[1])) == ids[2:]


def test_a_replay_begins_where_the_queue_was_made_or_at_all_where_that_is_not_known(dated: Queue) -> None:
    made = base(dated) / ".dropq" / "created"
    at = datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()
    os.utime(made, (at, at))
    assert len(dated.replay("creation", dry_run=True)) == 2
    made.unlink()
    assert len(dated.replay("creation", dry_run=True)) == 4


def test_a_new_queue_knows_when_it_was_made(tmp_path: Path) -> None:
    for dropboxmq in (False, True):
        queue = make_queue(tmp_path / str(dropboxmq), dropboxmq=dropboxmq)
        archive(queue, b"a")
        assert len(queue.replay("creation", dry_run=True)) == 1
        assert queue.fsck() == []
        queue.close()


@pytest.mark.parametrize("point", ["epoch", "2026-11-22T12:00Z", "now"])
def test_a_replay_that_is_not_told_begins_at_the_recovery_point(dated: Queue, point: str) -> None:
    (base(dated) / "queue.toml").write_text(f'RecoveryPoint = "{point}"\n')
    queue = reopened(dated)
    assert len(queue.replay(dry_run=True)) == {"epoch": 4, "now": 0}.get(point, 2)
    assert len(queue.replay("epoch", dry_run=True)) == 4


def test_ids_are_found_anywhere_unless_a_point_is_given(dated: Queue) -> None:
    (base(dated) / "queue.toml").write_text('recovery_point = "now"\n')
    queue = reopened(dated)
    ids = [message.id for message in queue.browse("processed")]
    assert ids_of(queue.replay(ids=ids[:2], dry_run=True)) == ids[:2]
    early, late = sorted(queue.replay(ids[1], ids=ids[:2], dry_run=True), key=lambda outcome: outcome.ok)
    assert (early.id, early.ok, late.id, late.ok) == (ids[0], False, ids[1], True)


@pytest.mark.parametrize("point", ["", "yesterday", "2026-13-01", "12:00", "1789-012", "EPOCH", 5])
def test_a_bad_point_is_refused_with_what_is_allowed(make: Make, point: Any) -> None:
    queue = make()
    archive(queue, b"a")
    with pytest.raises(ValueError, match=POINTS) as refused:
        queue.replay(point)
    assert repr(point) in str(refused.value)
    assert where(queue) == {"processed": [b"a"]}


def test_the_order_is_by_time_alone(make: Make, clock: Clock) -> None:
    queue = make()
    ids = []
    for priority in (1, 9, 4):
        ids += archive(queue, b"x", priority=priority)
        clock.advance(1)
    assert ids_of(queue.replay()) == ids
    assert [archived.file.split(".")[0] for archived in since(queue.context, "epoch")][:3] == ["1", "9", "4"]


def test_a_name_that_tells_no_time_counts_from_when_it_came_to_the_archive(make: Make) -> None:
    queue = make()
    drop(queue, "foreign", b"a")
    work_off(queue)
    came = (base(queue) / "processed" / "foreign").stat().st_ctime
    for seconds, count in ((-2, 1), (2, 0)):
        assert len(queue.replay(datetime.fromtimestamp(came + seconds, UTC), dry_run=True)) == count


# -- which -------------------------------------------------------------------------------------------------------------


def test_what_was_replayed_and_acknowledged_comes_once(make: Make, clock: Clock) -> None:
    queue = make()
    archive(queue, b"a", b"b")
    drop(queue, "foreign", b"c")
    drop(queue, "4.order-17.T", b"d")
    for _ in range(3):
        work_off(queue)
        clock.advance(60)
        assert len(queue.replay()) == 4
        assert sorted(bodies(queue)) == [b"a", b"b", b"c", b"d"]


def test_what_is_left_of_a_message_comes_when_the_archive_has_lost_the_first(make: Make) -> None:
    queue = make(max_history=1)
    (id,) = archive(queue, b"a")
    queue.replay()
    work_off(queue)
    assert queue.sweep().pruned == 1
    assert ids_of(queue.replay()) == [id]


def test_two_files_of_one_name_are_two_messages(make: Make) -> None:
    queue = make()
    for day, body in enumerate((b"monday", b"tuesday")):
        drop(queue, "report.csv", body)
        work_off(queue)
        for path in (base(queue) / "processed").iterdir():
            if path.read_bytes() == body:
                os.utime(path, (day, day))
    for _ in range(2):
        assert len(queue.replay()) == 2
        assert sorted(work_off(queue)) == [b"monday", b"tuesday"]


def test_ids_and_filters_choose(make: Make) -> None:
    queue = make()
    ids = archive(queue, b"a", b"b", properties={"n": 1}) + archive(queue, b"c", properties={"n": 2})
    assert ids_of(queue.replay(ids=[ids[2], ids[0]], dry_run=True)) == [ids[0], ids[2]]
    assert ids_of(queue.replay(filter="n = 2", dry_run=True)) == [ids[2]]
    assert [outcome.ok for outcome in queue.replay(ids=[ids[0]], filter="n = 2", dry_run=True)] == [False]
    assert ids_of(queue.replay(ids=names_in(queue, "processed"), dry_run=True)) == ids
    with pytest.raises(InvalidFilter):
        queue.replay(filter="n = ")
    (missing,) = queue.replay(ids=["nothing"])
    assert (missing.ok, missing.detail) == (False, "no such message in processed/ of queue q")
    assert where(queue) == {"processed": [b"a", b"b", b"c"]}


def test_a_dry_run_says_what_would_be_done(make: Make) -> None:
    queue = make()
    archive(queue, b"a")
    (outcome,) = queue.replay(dry_run=True)
    assert (outcome.ok, outcome.detail, outcome.target) == (True, "would be replayed to q", None)
    assert where(queue) == {"processed": [b"a"]}


def test_what_is_no_message_is_passed_over(make: Make) -> None:
    queue = make()
    archive(queue, b"a")
    processed = base(queue) / "processed"
    os.close(os.open(processed / "reserved", os.O_CREAT, RESERVED_MODE))
    (processed / "half.tmp").write_bytes(b"x")
    (processed / ".hidden").write_bytes(b"x")
    (processed / "folder").mkdir()
    (processed / "link").symlink_to(processed / ".hidden")
    assert [outcome.ok for outcome in queue.replay()] == [True]
    assert bodies(queue) == [b"a"]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_somebody_prunes_meanwhile_is_told_and_the_others_come(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    first, second = archive(queue, b"a", b"b")
    copy = Storage.copy

    def pruned_first(self: Storage, source: str, destination: str, *, synced: bool = True) -> None:
        if first in source:
            os.unlink(source)
        copy(self, source, destination, synced=synced)

    monkeypatch.setattr(Storage, "copy", pruned_first)
    lost, done = queue.replay()
    assert (lost.id, lost.ok, lost.detail) == (first, False, "somebody else took it out of processed/ first")
    assert (done.id, done.ok) == (second, True)
    assert bodies(queue) == [b"b"]


def test_a_full_disk_leaves_nothing_behind_and_is_told_of_each(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    archive(queue, b"a", b"b")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr("dropq.storage.files._write_rest", full)
    assert [outcome.ok for outcome in queue.replay()] == [False, False]
    assert all("the message was not sent" in outcome.detail for outcome in queue.replay())
    assert where(queue) == {"processed": [b"a", b"b"]}


def test_a_replay_is_as_durable_as_a_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    archive(queue, b"a")
    recorded = RecordingOs().record(monkeypatch)
    queue.replay()
    calls = recorded.briefly(("fsync", "rename"), base(queue))
    assert calls == ["fsync working/*", "rename working/* target/*", "fsync target", "fsync working"]
    queue.close()


@pytest.mark.crashes
def test_whenever_it_dies_the_archive_stays_and_what_waits_is_whole(tmp_path: Path) -> None:
    body = b"x" * 200_000
    roots = iter(range(1000))

    def build() -> Queue:
        queue = make_queue(tmp_path / str(next(roots)))
        archive(queue, body, properties={"text": "y" * 300})
        drop(queue, "report.csv", body)
        work_off(queue)
        queue.close()
        return queue

    seen = set()
    for queue in killed_at_each_call(build, Queue.replay):
        lies = where(queue)
        left = lies.pop("working", [])
        assert lies.pop("processed") == [body, body]
        assert set(map(len, lies)) <= {len("target")} and set(lies.get("target", [])) <= {body}
        assert len(left) <= 1
        seen.add(len(lies.get("target", [])))
        assert all(outcome.ok for outcome in queue.replay()), "the next one goes on"
        assert {message.redelivered for message in queue.browse()} == {True}
    assert seen == {0, 1, 2}


def test_a_message_object_of_the_archive_is_not_touched(make: Make) -> None:
    queue = make()
    archive(queue, b"a")
    (archived,) = queue.browse("processed")
    queue.replay()
    assert isinstance(archived, Message) and (archived.body, archived.redelivered) == (b"a", False)


def test_what_a_root_holds_is_in_order_after_replays(make: Make) -> None:
    queue = make()
    archive(queue, b"a")
    queue.replay()
    assert queue.fsck() == []
    work_off(queue)
    assert queue.fsck() == []
    assert Root(queue.root.path).queue("q").counts()["processed"] == 2


def test_a_replay_within_a_root_needs_no_sidecar_of_its_own(make: Make) -> None:
    queue = make()
    queue.send(b"a", properties={"text": "x" * 300})
    take(queue).ack()
    before = os.listdir(queue.root.layout.meta)
    assert [outcome.ok for outcome in queue.replay("epoch")] == [True]
    assert take(queue).properties == {"text": "x" * 300}
    assert os.listdir(queue.root.layout.meta) == before
