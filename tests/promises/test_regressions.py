"""Faults that were: a test for each, which fails where the fault is."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import in_child, unprivileged
from filelock import FileLock
from helpers import Clock, base, drop, names_in, reopened, stand_in_for_os, take, where

from dropq import ConfigError, LeaseLost, Message, NoSuchQueue, Queue, Root, StorageError, work
from dropq.cli import main as cli
from dropq.lifecycle.transitions import Transitions
from dropq.staging.jobs import Epoch, Job
from dropq.storage import exclusive_rename, liveness, reading, system_calls
from dropq.storage import files as storage_files
from dropq.storage.clock import ServerClock, _since_boot
from dropq.storage.files import Storage
from dropq.storage.mounts import Mount
from dropq.storage.reading import RESERVED_MODE
from dropq.upkeep import bulk
from dropq.upkeep.sweep import QuickSweep

Make = Callable[..., Queue]

#: The last of the times that a name can hold, in ms: about the year 292 million.
LATEST = 2**63 - 1
LARGEST = 2**31 - 1


def archive(queue: Queue, *bodies: bytes) -> None:
    for body in bodies:
        queue.send(body)
        take(queue).ack()


def mode(path: str) -> int:
    return os.stat(path).st_mode & 0o7777


def full_disk(path: str, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


# -- messages that were lost, hidden or delivered twice ------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"type": "tmp"},
        {"type": "part", "priority": 9},
        {"reply_to": "crc"},
        {"correlation_id": "part"},
    ],
)
def test_a_message_whose_last_header_is_an_ignored_suffix_is_received_with_it(
    make: Make, headers: dict[str, Any]
) -> None:
    queue = make()
    queue.send(b"a", **headers)
    message = take(queue)
    assert message.body == b"a"
    assert {
        "type": message.type,
        "reply_to": message.reply_to,
        "correlation_id": message.correlation_id,
    } == {"type": None, "reply_to": None, "correlation_id": None} | {
        header: text for header, text in headers.items() if header != "priority"
    }
    message.nack()
    assert take(queue).redelivered


def test_a_delete_that_died_before_it_was_decided_is_undone_by_a_sweep(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    rename_folder = Storage.rename_folder

    def dies_after(self: Storage, source: str, destination: str) -> None:
        Root(queue.root.path, clock=clock).queue("q").send(b"just before")
        rename_folder(self, source, destination)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "rename_folder", dies_after)
        with pytest.raises(KeyboardInterrupt):
            queue.root.delete_queue("q")
    assert queue.root.queues() == []
    queue.root.sweep()
    assert queue.root.queues() == [], "it may still be decided"
    clock.advance(61)
    queue.root.sweep()
    assert [message.body for message in reopened(queue).browse()] == [b"just before"]


@pytest.mark.parametrize(
    ("settle", "state"),
    [
        (Message.ack, "processed"),
        (lambda message: message.fail("no good"), "error"),
        (Message.expire, "expired"),
    ],
)
def test_a_settled_message_whose_id_has_an_ignored_suffix_stays_visible(
    make: Make, settle: Callable[[Message], None], state: str
) -> None:
    queue = make()
    queue.send(b"a", message_id="upload.part")
    settle(take(queue))
    assert queue.counts()[state] == 1
    assert [message.id for message in queue.browse(state)] == ["upload.part"]
    assert queue.fsck() == []
    assert [outcome.ok for outcome in queue.requeue(state=state)] == [True]


def staged_job(queue: Queue, *rows: bytes) -> tuple[Job, list[Any]]:
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all([f"4.{queue.root.context.ids.next()}.B" for _ in rows], rows)
    return job, [attempt.finish()]


def test_a_queue_that_is_renamed_away_and_back_while_a_job_is_sent_loses_no_row(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    rows = [b"0", b"1", b"2", b"3"]
    job, listed = staged_job(queue, *rows)
    home, away = queue.layout.home, f"{queue.layout.home}.away"
    place, moves = Storage.place, iter([None, (home, away), (away, home)])

    def meanwhile(self: Storage, source: str, destination: str) -> None:
        if (move := next(moves, None)) is not None:
            os.rename(*move)
        place(self, source, destination)

    monkeypatch.setattr(Storage, "place", meanwhile)
    assert job.commit(listed) == len(rows)
    assert where(queue) == {"target": rows}


def test_a_delete_is_undone_when_a_job_was_committed_after_its_check(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    job, listed = staged_job(queue, b"row")
    rename_folder = Storage.rename_folder

    def meanwhile(self: Storage, source: str, destination: str) -> None:
        if source == queue.layout.home:
            job._write_manifest(listed)  # the driver commits, and dies before it sends
        rename_folder(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", meanwhile)
    with pytest.raises(StorageError, match="1 in target"):
        Root(queue.root.path).delete_queue(queue.name)
    assert where(queue) == {"target": [b"row"]}


def test_a_message_keeps_the_subscription_alive_that_handed_it_out(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message = queue.subscribe().receive()
    assert message is not None
    gc.collect()
    assert reopened(queue).sweep().dead == 0
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def its_file(queue: Queue, look: Callable[[], object]) -> None:
    for consumer in os.scandir(queue.layout.consumers):
        os.unlink(consumer)
    queue.send(b"a")


def its_file_for_another(queue: Queue, look: Callable[[], object]) -> None:
    copy = f"{queue.layout.home}.copy"
    shutil.copytree(queue.layout.home, copy)
    shutil.rmtree(queue.layout.home)
    os.rename(copy, queue.layout.home)
    queue.send(b"a")


def its_queue(queue: Queue, look: Callable[[], object]) -> None:
    queue.root.delete_queue(queue.name)
    queue.root.create_queue(queue.name, durability="none", redelivery_delay=0).send(b"a")


def its_queue_for_a_while(queue: Queue, look: Callable[[], object]) -> None:
    queue.root.delete_queue(queue.name)
    with pytest.raises(NoSuchQueue):
        look()
    queue.root.create_queue(queue.name, durability="none", redelivery_delay=0).send(b"a")


@pytest.mark.parametrize("take_away", [its_file, its_file_for_another, its_queue, its_queue_for_a_while])
def test_a_consumer_whose_sign_of_life_was_taken_away_is_found_dead_all_the_same(
    make: Make, take_away: Callable[[Queue, Callable[[], object]], None]
) -> None:
    queue = make()

    def dies() -> bytes:
        subscription = reopened(queue).subscribe()
        assert subscription.receive() is None
        take_away(reopened(queue), subscription.receive)
        message = subscription.receive()
        assert message is not None
        return message.body

    assert in_child(dies) == b"a"
    assert where(queue) == {"processing": [b"a"]}
    assert reopened(queue).sweep().dead == 1
    assert where(queue) == {"target": [b"a"]}


def test_a_file_under_a_name_that_was_used_before_has_an_arrival_of_its_own(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "changed_ms", lambda path: clock.ms)  # whatever is seen first came just now
    queue = make(expiration="30s")
    with queue.subscribe(max_backlog=None) as subscription:
        drop(queue, "report.csv", b"old")
        queue.send(b"urgent", priority=9)
        first = subscription.receive()
        assert first is not None and first.body == b"urgent"  # the old report was seen, and left
        os.rename(base(queue) / "target" / "report.csv", base(queue) / "processing" / "mine")
        drop(queue, "report.csv", b"new")
        clock.advance(60)
        second = subscription.receive()
        assert second is not None and second.body == b"new"


def test_a_move_in_doubt_never_removes_the_message_for_its_reservation(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"precious")
    message = take(queue)
    queue.context.storage._exclusive.in_kernel = False
    rename, lstat = os.rename, os.lstat
    cached: dict[str, os.stat_result] = {}

    def with_lost_reply(source: str, destination: str) -> None:
        if "/processed/" not in destination:
            return rename(source, destination)
        cached[destination] = lstat(destination)
        rename(source, destination)
        raise FileNotFoundError(errno.ENOENT, "the reply was lost", source)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", with_lost_reply)
        patch.setattr(os, "lstat", lambda path, **more: cached.get(path) or lstat(path, **more))
        message.ack()
    assert where(queue) == {"processed": [b"precious"]}


def test_retention_leaves_a_name_alone_that_a_move_has_reserved(make: Make) -> None:
    queue = make(max_history=1)
    reserved = base(queue) / "processed" / "report.csv"
    os.close(os.open(reserved, os.O_WRONLY | os.O_CREAT | os.O_EXCL, RESERVED_MODE))
    archive(queue, b"a")
    assert queue.sweep().pruned == 0
    assert reserved.exists()
    assert where(queue) == {"processed": [b"a"]}


# -- one bad item that ended a sweep, a worker or a batch ----------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
def test_a_reason_that_cannot_be_written_keeps_no_sweep_from_pruning(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    queue = make(max_history=1)
    archive(queue, b"1", b"2", b"3")
    queue.send(b"late", expires_in="1s")
    with queue.subscribe() as subscription:
        if held:
            subscription.receive()
        clock.advance(2)
        with monkeypatch.context() as patch:
            patch.setattr(queue.context.storage, "write_small", full_disk)
            assert queue.sweep().pruned == 2
        assert where(queue)["processing" if held else "target"] == [b"late"]
        assert queue.sweep().expired == 1


def test_a_sweep_prunes_before_it_does_what_needs_room(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(max_history=1)
    archive(queue, b"1", b"2")
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    write_small = queue.context.storage.write_small

    def nearly_full(path: str, data: bytes) -> None:
        if len(names_in(queue, "processed")) > 1:
            full_disk(path, data)
        write_small(path, data)

    monkeypatch.setattr(queue.context.storage, "write_small", nearly_full)
    assert queue.sweep().expired == 1


def test_a_folder_among_the_consumers_does_not_end_a_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    os.makedirs(f"{queue.layout.consumers}/no-consumer")
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    assert queue.sweep().expired == 1


def test_a_leftover_that_cannot_be_removed_does_not_end_a_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    for folder in (f"{queue.layout.private}/.gone-1", f"{queue.layout.reasons}/error/no-reason"):
        os.mkdir(folder)
    Path(queue.layout.held, "a-0123456789-1").write_bytes(b"")
    os.mkdir(f"{queue.layout.held}/a-0123456789-2")
    clock.advance(2 * 86_400)
    report = queue.sweep()
    assert (report.leftovers, report.refused) == (2, 2)
    assert os.listdir(queue.layout.held) == []


@pytest.mark.parametrize("folder", ["processing", "delayed", "target"])
def test_a_root_is_swept_over_a_queue_that_cannot_be_listed(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    queue = make()
    denied = queue.root.create_queue("another", durability="none").layout.folder(folder)
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    listing = reading.listing

    def refusing(path: str) -> Any:
        if path == denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listing(path)

    monkeypatch.setattr(reading, "listing", refusing)
    with pytest.raises(StorageError, match="the sweep did not come to its end"):
        queue.root.sweep()
    assert where(queue) == {"expired": [b"late"]}


def put_a_file_for(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def forbid(folder: Path) -> None:
    folder.chmod(0o555)


@pytest.mark.parametrize("hinder", [put_a_file_for, forbid])
def test_a_message_that_cannot_be_claimed_is_told_of_once_all_others_are_handled(
    make: Make, clock: Clock, hinder: Callable[[Path], None]
) -> None:
    queue = make()
    hinder(Path(queue.root.layout.meta))
    drop(queue, f"{'l' * 200}.csv", b"bad")
    clock.advance(10)  # the bad one is the oldest
    for body in (b"1", b"2", b"3"):
        queue.send(body)

    def worker() -> tuple[list[bytes], str]:
        handled: list[bytes] = []
        try:
            work(reopened(queue), lambda message: handled.append(message.body), until_empty=True)
        except StorageError as error:
            return handled, str(error)
        return handled, ""

    handled, told = unprivileged(worker)
    assert handled == [b"1", b"2", b"3"]
    assert "nothing was moved" in told
    assert where(queue) == {"target": [b"bad"], "processed": handled}


def test_a_message_that_could_not_be_claimed_is_not_told_of_once_it_has_gone(make: Make, clock: Clock) -> None:
    queue = make()
    put_a_file_for(Path(queue.root.layout.meta))
    bad = f"{'l' * 200}.csv"
    drop(queue, bad, b"bad")
    clock.advance(10)
    archive(queue, b"good")
    os.unlink(base(queue) / "target" / bad)
    assert queue.receive() is None


@pytest.mark.parametrize(
    "settle",
    [
        Message.ack,
        Message.nack,
        lambda message: message.nack(delay="1s"),
        lambda message: message.reject("no good"),
        lambda message: message.extend("1h"),
    ],
)
def test_settling_while_the_queue_is_away_fails_and_keeps_the_claim(
    make: Make, settle: Callable[[Message], None]
) -> None:
    queue = make()
    queue.send(b"a")
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        away = f"{queue.layout.home}.away"
        os.rename(queue.layout.home, away)
        with pytest.raises(StorageError):
            settle(message)
        os.rename(away, queue.layout.home)
        assert message.held
        assert subscription.held == (message,)
        message.ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("history", [True, False])
def test_at_most_once_gives_back_what_it_could_not_archive(make: Make, history: bool) -> None:
    queue = make(semantics="at-most-once", history=history)
    queue.send(b"a")
    needed = Path(queue.layout.processed if history else queue.layout.held)
    needed.rmdir()
    if not history:
        needed.write_bytes(b"")
    with pytest.raises(StorageError):
        queue.receive()
    assert where(queue) == {"target": [b"a"]}
    needed.mkdir() if history else needed.unlink()
    message = take(queue)
    assert (message.body, message.delivery_count) == (b"a", 1)


def test_at_most_once_says_what_is_wrong_when_the_archive_was_made_but_not_durable(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(semantics="at-most-once", durability="full")
    queue.send(b"a")

    def refuse(self: Storage, *folders: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folders[0])

    with monkeypatch.context() as patch:
        subscription = queue.subscribe()
        patch.setattr(Storage, "sync", refuse)
        with pytest.raises(StorageError, match="was not delivered, and lies in processed/"):
            subscription.receive()
    subscription.close()
    assert where(queue) == {"processed": [b"a"]}


def test_receive_many_returns_what_it_claimed_before_a_claim_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    for body in (b"1", b"2", b"3"):
        queue.send(body)
    claim, claims = Transitions(queue.context).claim, iter([True, True])

    def failing(_: Transitions, *args: Any) -> Any:
        if next(claims, False):
            return claim(*args)
        raise StorageError("the third one fails")

    with queue.subscribe(max_backlog=3) as subscription:
        monkeypatch.setattr(Transitions, "claim", failing)
        assert [message.body for message in subscription.receive_many(3)] == [b"1", b"2"]


# -- time, cost and limits -----------------------------------------------------------------------------------


def test_the_more_a_sweep_costs_the_longer_is_the_pause_after_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    now = 100.0

    def costly(*args: object) -> list[int]:
        nonlocal now
        now += 7.0
        return []

    monkeypatch.setattr("dropq.upkeep.sweep.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("dropq.upkeep.sweep._deliver_delayed", costly)
    quick = QuickSweep(queue.context)
    quick.run()
    assert quick.again >= 107.0 + 7 * 7.0


def test_a_sign_of_life_has_the_modes_and_the_group_of_the_queue(make: Make) -> None:
    others = [group for group in os.getgroups() if group != os.getegid()]
    group = 65534 if os.geteuid() == 0 else others[0] if others else os.getegid()
    queue = make(file_mode="0660", dir_mode="2770", group=group)
    with queue.subscribe():
        [consumer] = os.scandir(queue.layout.consumers)
        assert mode(consumer.path) == 0o660
        assert consumer.stat().st_gid == group


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_private_folders_of_a_root_have_the_modes_of_the_root(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "root"
    path.mkdir()
    path.chmod(0o2775)
    before = os.umask(umask)
    try:
        layout = Root.create(path).layout
    finally:
        os.umask(before)
    assert [mode(folder) for folder in (layout.private, layout.meta)] == [0o2775] * 2
    assert [mode(file) for file in (layout.clock, layout.config_file)] == [0o664] * 2


@pytest.mark.parametrize(
    "name",
    [
        f"4.x.B.{LATEST}",
        f"4.x.B.....JMS_dropq_sinceL={LATEST}",
        f"4.x.B.....JMS_dropq_notBeforeL={LATEST}",
    ],
)
def test_times_beyond_all_calendars_can_be_looked_at(make: Make, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    queue = make()
    drop(queue, name, b"a")
    [message] = queue.browse()
    times = [message.timestamp, message.expiration, message.not_before, message.since]
    assert max(moment.year for moment in times if moment is not None) == 9999
    assert queue.stats()["target"].count == 1
    for command in (
        ["browse", "q", "--json"],
        ["show", "q", message.id],
        ["show", "q", message.id, "--json"],
    ):
        assert cli.main(["--root", str(queue.root.path), *command]) == 0, capsys.readouterr().err


def test_a_drain_gives_up_a_folder_that_does_not_become_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_files, "DRAIN_LIMIT", 0.02, raising=False)
    tries = 0

    def refuse(path: str) -> None:
        nonlocal tries
        tries += 1
        assert tries < 1000, "it tries for ever, and without a pause"
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        Storage().drain(str(tmp_path))


def test_a_move_that_lost_its_source_and_its_reservation_has_not_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no rename refuses to replace: a folder that somebody takes away takes the reservation with it."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "draft").write_text("manifest")
    rename = os.rename

    def taken_away(source: str, destination: str) -> None:
        if source.endswith("/draft"):
            rename(tmp_path / "job", tmp_path / "away")
        rename(source, destination)

    def unsupported(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    monkeypatch.setattr(system_calls, "rename_noreplace", unsupported)
    monkeypatch.setattr(os, "rename", taken_away)
    with pytest.raises(FileNotFoundError):
        Storage().move(str(tmp_path / "job" / "draft"), str(tmp_path / "job" / "manifest.json"))
    assert (tmp_path / "away" / "draft").read_text() == "manifest"


@pytest.mark.parametrize("step", [7200.0, -7200.0])
def test_a_step_of_this_hosts_clock_does_not_move_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    clock = ServerClock(str(tmp_path / "probe"))
    before, real = clock.now_ms(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert 0 <= clock.now_ms() - before < 60_000


@pytest.mark.parametrize("call", ["open", "utime", "fstat"])
@pytest.mark.parametrize("ahead", [0.0, 3600.0])
def test_a_process_that_is_stopped_while_it_measures_the_servers_clock_tells_the_right_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, ahead: float
) -> None:
    """Half a minute goes by before the call, in which another process touches the probe file."""
    probe, slept = tmp_path / "probe", [0.0]
    probe.touch()
    own, gettime, utime = time.time, time.clock_gettime, os.utime

    def server() -> float:
        return own() + slept[0]

    def touch(probe: int | Path) -> None:
        utime(probe, (server(), server()))

    monkeypatch.setattr(time, "time", lambda: server() + ahead)
    monkeypatch.setattr(time, "clock_gettime", lambda id: gettime(id) + slept[0])
    monkeypatch.setattr(os, "utime", touch)
    real = getattr(os, call)

    def late(*args: Any) -> Any:
        if not slept[0]:
            slept[0] = 30.0
            touch(probe)
        return real(*args)

    monkeypatch.setattr(os, call, late)
    assert abs(ServerClock(str(probe)).now_ms() - server() * 1000) < 1000


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock here goes on while a host sleeps")
def test_the_servers_clock_goes_on_while_this_host_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ServerClock(str(tmp_path / "probe"))
    before, own = clock.now_ms(), time.time
    slept = {time.CLOCK_BOOTTIME: 30.0}  # the monotonic clock stood still
    since_boot, (which,) = _since_boot, _since_boot.args
    monkeypatch.setattr("dropq.storage.clock._since_boot", lambda: since_boot() + slept.get(which, 0.0))
    monkeypatch.setattr(time, "time", lambda: own() + 30.0)
    monkeypatch.setattr(ServerClock, "_measure", lambda self: pytest.fail("there was no need to ask the server"))
    assert 30_000 <= clock.now_ms() - before < 60_000


def test_counts_stay_at_the_largest_that_a_name_can_hold(make: Make) -> None:
    queue = make(max_cancels=0)
    drop(queue, f"4.x.B.....JMSXDeliveryCountI={LARGEST}&JMS_dropq_cancelsI={LARGEST}", b"a")
    for _ in range(3):
        take(queue).nack()
        [message] = queue.browse()
        assert (message.id, message.delivery_count, message.cancels) == ("x", LARGEST, LARGEST)


@pytest.mark.parametrize("name", ["4.x.B", "report.csv"])
def test_a_scripts_claim_that_a_sweep_returns_obeys_the_delay_and_the_limit_of_deliveries(
    make: Make, clock: Clock, name: str
) -> None:
    queue = make(max_deliveries=2, redelivery_delay="10s")
    drop(queue, name, b"a")
    for state in ("delayed", "error"):
        [waiting] = names_in(queue, "target")
        claimed = f"mine~{waiting}" if waiting.startswith("4.") else waiting
        os.rename(base(queue) / "target" / waiting, base(queue) / "processing" / claimed)
        clock.advance(1)
        assert queue.sweep(foreign_older_than=0).foreign == 1
        assert where(queue) == {state: [b"a"]}
        clock.advance(10)
        queue.sweep()
    [message] = queue.browse("error")
    assert message.reason is not None and message.reason["reason"] == "max_deliveries"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """A folder on another file system than tmp_path."""
    memory = "/dev/shm"
    if not os.path.isdir(memory) or not os.access(memory, os.W_OK) or os.stat(memory).st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system to put a folder on")
    path = tempfile.mkdtemp(dir=memory)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("folder", ["private", "delayed"])
def test_a_private_folder_on_another_file_system_is_refused(make: Make, elsewhere: str, folder: str) -> None:
    queue = make()
    path = Path(getattr(queue.layout, folder))
    if path.exists():
        shutil.rmtree(path)
    path.symlink_to(elsewhere)
    with pytest.raises(StorageError, match="two file systems"):
        reopened(queue).send(b"a")


@pytest.mark.parametrize("rest", ["", "."])
def test_a_name_with_digits_of_another_script_is_foreign_and_does_not_expire_at_once(make: Make, rest: str) -> None:
    queue = make(expiration="1h")
    one = "\N{ARABIC-INDIC DIGIT ONE}"
    name = f"4.{one * 16}-{one * 10}.B{rest}"
    drop(queue, name, b"a")
    message = take(queue)
    assert message.body == b"a"
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("pattern", ["*.B", "4.*", "*.[A-Z]", "[0-9]*", "*-*", "9.*", "4.1*", "?.*.T"])
def test_a_pattern_that_would_hide_plain_messages_cannot_be_ignored(make: Make, pattern: str) -> None:
    with pytest.raises(ConfigError, match="cannot be ignored"):
        make(ignore=[pattern])


def test_a_queue_that_is_deleted_while_it_is_opened_is_not_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, device = make(), reading.device

    def deleting(path: str) -> int:
        if path == f"{queue.root.path}/q/.dropq":
            shutil.rmtree(queue.root.path / "q")
        return device(path)

    monkeypatch.setattr(reading, "device", deleting)
    with pytest.raises(NoSuchQueue, match="q is not there any more"):
        reopened(queue).send(b"a")


# -- file systems that have little, as below FUSE ------------------------------------------------------------


def test_a_root_is_made_where_there_are_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, mode: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "fchmod", refused)
    Root.create(tmp_path / "root").create_queue("q").send(b"a")
    with pytest.raises(StorageError, match="was not made"):
        Root(tmp_path / "root").create_queue("private", file_mode=0o600, dir_mode=0o700)


@pytest.mark.parametrize("mode", [0, 0o644])
def test_a_late_ack_is_refused_where_a_reservation_has_another_mode(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    def no_flags(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    real = os.open
    monkeypatch.setattr(system_calls, "rename_noreplace", no_flags)
    monkeypatch.setattr(os, "open", lambda path, flags, given=0o777, **more: real(path, flags, given | mode, **more))
    queue = make()
    queue.send(b"a")
    late = take(queue)
    assert [outcome.ok for outcome in queue.requeue(state="processing")] == [True]
    with pytest.raises(LeaseLost):
        late.ack()
    assert where(queue) == {"target": [b"a"]}
    assert os.listdir(base(queue) / "processed") == []


def test_a_disk_that_fails_for_a_moment_is_not_taken_for_one_that_never_replaces(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flags(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    real, failures = os.rename, ["the ack's"]

    def fails_once(source: str, destination: str) -> None:
        if failures and "/processed/" in destination:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        real(source, destination)

    queue = make()
    queue.send(b"a")
    message = take(queue)
    monkeypatch.setattr(system_calls, "rename_noreplace", no_flags)
    monkeypatch.setattr(os, "rename", fails_once)
    with pytest.raises(StorageError, match="stays in processing/"):
        message.ack()
    drop(queue, "report", b"kept")
    take(queue).ack()
    drop(queue, "report", b"kept too")
    take(queue).ack()
    message.ack()
    assert where(queue) == {"processed": [b"a", b"kept", b"kept too"]}


def gone_mount(path: str, *args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)


@pytest.mark.parametrize(
    "verb",
    [
        lambda queue: queue.receive(),
        lambda queue: queue.counts(),
        lambda queue: queue.stats(),
        lambda queue: queue.find("x"),
        lambda queue: list(queue.browse()),
        lambda queue: queue.ack("x"),
        lambda queue: queue.sweep(),
        lambda queue: queue.fsck(),
        lambda queue: queue.root.queues(),
    ],
)
def test_a_mount_that_is_gone_is_told_by_every_verb(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Queue], object]
) -> None:
    queue = make()
    queue.send(b"a")
    assert queue.receive() is not None
    for name in ("lstat", "stat", "scandir", "listdir"):
        monkeypatch.setattr(os, name, gone_mount)
    with pytest.raises(StorageError, match=os.strerror(errno.ENOTCONN)) as refused:
        verb(queue)
    monkeypatch.undo()
    assert refused.value.errno == errno.ENOTCONN


def test_a_writer_that_cannot_clear_up_tells_what_was_the_matter(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="file")
    writer = queue.writer()
    writer.__enter__().write(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", gone_mount)
        patch.setattr(os, "fsync", lambda fd: gone_mount("a file"))
        with pytest.raises(StorageError, match="the message was not sent"):
            writer.__exit__(None, None, None)
    assert where(queue) == {"working": [b"a"]}


# -- over NFS ----------------------------------------------------------------------------------------------------


class Replies:
    """Stands for the module `os` in dropq.storage, as over NFS where a reply is lost: the call is made twice."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self._call:
            return real

        def twice(*args: Any, **kwargs: Any) -> Any:
            real(*args, **kwargs)
            return real(*args, **kwargs)

        return twice


def test_an_ack_without_a_history_is_none_that_was_lost_where_the_reply_to_its_removal_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(history=False)
    queue.send(b"a")
    message = take(queue)
    stand_in_for_os(monkeypatch, Replies("unlink"))
    message.ack()
    assert message.state == "removed" and where(queue) == {}


def test_a_second_name_for_a_body_is_had_where_the_reply_to_it_was_lost(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    stand_in_for_os(monkeypatch, Replies("link"))
    message.link(str(tmp_path / "linked"))
    assert (tmp_path / "linked").read_bytes() == b"a"


def test_a_second_name_that_something_else_has_is_still_refused(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.send(b"a")
    (tmp_path / "linked").write_bytes(b"b")
    with pytest.raises(StorageError, match="File exists"):
        take(queue).link(str(tmp_path / "linked"))
    assert (tmp_path / "linked").read_bytes() == b"b"


def test_a_tree_is_removed_to_its_end_where_somebody_else_removes_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "file").touch()
    real = os.unlink
    monkeypatch.setattr(os, "unlink", lambda *args, **kwargs: (real(*args, **kwargs), real(*args, **kwargs)))
    Storage().remove_tree(str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize("removed", [True, False])
def test_a_body_that_another_host_removed_is_told_as_gone_and_another_is_read(
    make: Make, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    queue = make()
    queue.send(b"a")
    message, read = take(queue), reading.read_body
    calls: list[str] = []

    def stale(path: str, limit: int | None = None) -> bytes:
        calls.append(path)
        if len(calls) > 1:
            return read(path, limit)
        if removed:
            os.unlink(path)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(reading, "read_body", stale)
    if not removed:
        assert message.body == b"a"
        return
    with pytest.raises(LeaseLost, match="its body was not read"):
        _ = message.body


def test_what_nfs_keeps_of_a_sign_of_life_that_was_removed_is_nobody(make: Make) -> None:
    queue = make()
    folder = Path(queue.layout.consumers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".nfs000000000000801300000003").touch()
    assert liveness.known(str(folder)) == frozenset()
    assert queue.sweep().total == 0
    assert os.listdir(folder) == [".nfs000000000000801300000003"]


def test_a_sign_of_life_is_seen_only_when_it_is_locked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    seen: list[set[str]] = []
    real = FileLock.acquire

    def acquire(lock: FileLock, *args: Any, **kwargs: Any) -> Any:
        seen.append({*liveness.known(queue.layout.consumers)})
        queue.sweep()  # which buries what it finds without a lock
        return real(lock, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(FileLock, "acquire", acquire)
        subscription = queue.subscribe()
    assert seen[0] == set()
    queue.sweep()
    assert liveness.known(queue.layout.consumers) == {subscription.id}
    subscription.close()
    assert os.listdir(queue.layout.consumers) == []


def test_what_is_held_through_another_mount_is_left_to_its_lease_where_each_mount_has_locks_of_its_own(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "mount_at", lambda folder, device: Mount("fuse"))
    queue = make()
    holders = []
    for body, lease in ((b"leased", "1m"), (b"without a lease", None)):
        queue.send(body)
        holders.append(queue.subscribe(lease_period=lease))
        assert holders[-1].receive() is not None
    for holder in holders:
        assert holder._presence is not None
        holder._presence.abandon()  # as the kernel does for the dead; and for the living, on another mount
    with monkeypatch.context() as patch:
        patch.setattr(liveness, "_boot", lambda: b"another host")
        assert not liveness.is_dead(queue.layout.consumers, holders[0].id)
        assert queue.sweep().total == 0
        clock.advance(61)
        assert queue.sweep().lapsed == 1
        assert queue.sweep(unleased_older_than="1h").total == 0
        assert where(queue) == {"processing": [b"without a lease"], "target": [b"leased"]}
        clock.advance(7200)
        assert queue.sweep(unleased_older_than="1h").unleased == 1
    queue.send(b"held here")
    holder = queue.subscribe()
    assert holder.receive() is not None
    assert holder._presence is not None
    holder._presence.abandon()
    assert queue.sweep().dead == 1, "the same mount's lock tells"


@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_a_message_whose_sidecar_cannot_be_read_is_settled_all_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = make()
    queue.send(b"a", properties={"long": "x" * 300})

    def closed(path: str, limit: int = 0) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("dropq.lifecycle.sidecars.read_small", closed)
    message = take(queue)
    message.reject("r") if verb == "reject" else getattr(message, verb)()
    monkeypatch.undo()
    (state,) = where(queue)
    assert state == {"ack": "processed", "nack": "target", "reject": "error"}[verb]
    (message,) = queue.browse(state)
    assert message.properties == {"long": "x" * 300}


def test_what_would_be_written_without_its_sidecar_is_not_moved(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, far = make(), make()
    queue.send(b"a", properties={"long": "x" * 300})

    def unread(path: str, limit: int = 0) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patched:
        patched.setattr("dropq.lifecycle.sidecars.read_small", unread)
        (outcome,) = bulk.move(queue.context, far.context)
    assert not outcome.ok and "nothing was moved" in outcome.detail
    (outcome,) = bulk.move(queue.context, far.context)
    assert outcome.ok
    assert take(far).properties == {"long": "x" * 300}


def test_a_sweep_tells_what_it_had_to_leave(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.send_many([{"body": b"a", "delay": 1}, {"body": b"b", "delay": 1}])
    clock.advance(2)

    def refused(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "place", refused)
        report = queue.sweep()
    assert (report.refused, report.total) == (2, 0)
    assert queue.sweep().delayed == 2


def test_a_rename_that_failed_after_it_was_done_costs_no_message_where_names_are_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "message").write_bytes(b"a")
    rename = os.rename

    def done_but_refused(source: str, destination: str) -> None:
        rename(source, destination)
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    store = Storage("none")
    store._exclusive.in_kernel = False
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", done_but_refused)
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert (tmp_path / "kept").read_bytes() == b"a"


def test_a_file_that_the_kernel_takes_piece_by_piece_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, store = os.write, Storage("none")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
        store.write_new(str(tmp_path / "one"), b"0123456789")
        store.write_all(str(tmp_path), ["two", "three"], [b"0123456789", memoryview(b"abcdefg")])
    assert [(tmp_path / name).read_bytes() for name in ("one", "two", "three")] == [b"0123456789"] * 2 + [b"abcdefg"]


def test_no_name_is_reserved_where_a_rename_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash would leave the empty file; where there are no modes it is a message."""
    rename, made = os.rename, os.open

    def never_replacing(source: str, destination: str) -> None:
        if os.path.lexists(destination):
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, destination)

    opened = []

    def opening(path: str, *args: Any, **kwargs: Any) -> int:
        opened.append(os.path.basename(path))
        return made(path, *args, **kwargs)

    store = Storage("none")
    store._exclusive.in_kernel = False
    (tmp_path / "message").write_bytes(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", never_replacing)
        patched.setattr(os, "open", opening)
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert opened and "kept" not in opened
    assert os.listdir(tmp_path) == ["kept"]


def test_a_disk_that_fails_now_and_then_is_not_one_that_never_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = os.rename, []

    def flaky(source: str, destination: str) -> None:
        calls.append(source)
        if len(calls) in (1, 2, 6):  # twice what is tried before, and then the message's own
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, destination)

    store = Storage("none")
    store._exclusive.in_kernel = False
    (tmp_path / "message").write_bytes(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", flaky)
        with pytest.raises(OSError, match="Input/output"):
            store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    (tmp_path / "kept").write_bytes(b"another of its name")
    with pytest.raises(FileExistsError):
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert (tmp_path / "kept").read_bytes() == b"another of its name"
    assert sorted(os.listdir(tmp_path)) == ["kept", "message"]


@pytest.mark.parametrize("plant", [Path.mkdir, lambda path: path.symlink_to("/etc/hosts"), os.mkfifo])
def test_what_is_no_file_in_place_of_a_sidecar_holds_nobody_up(make: Make, plant: Callable[[Path], object]) -> None:
    queue = make()
    queue.send(b"a", properties={"long": "x" * 300}, priority=9)
    queue.send(b"b")
    (sidecar,) = Path(queue.root.layout.meta).glob("*.json")
    sidecar.unlink()
    plant(sidecar)
    open_files = len(os.listdir("/proc/self/fd"))
    for body in (b"a", b"b"):
        message = take(queue)
        assert (message.body, message.properties) == (body, {})
        message.ack()
    assert len(os.listdir("/proc/self/fd")) <= open_files + 2  # the queue's own subscription


def test_a_sweep_makes_no_sign_of_life_of_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    subscription = queue.subscribe()
    known = liveness.known

    def ends_meanwhile(folder: str) -> frozenset[str]:
        found = known(folder)
        subscription.close()
        return found

    monkeypatch.setattr(liveness, "known", ends_meanwhile)
    queue.sweep()
    assert os.listdir(queue.layout.consumers) == []


def test_a_sign_of_life_of_another_mount_that_holds_nothing_goes_after_a_day(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "mount_at", lambda folder, device: Mount("fuse"))
    queue = make()
    queue.send(b"a")
    with queue.subscribe() as idle, queue.subscribe() as holder:
        assert holder.receive() is not None
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(liveness, "_boot", lambda: b"another host")
            clock.advance(2 * 86_400)
            queue.sweep()
            assert liveness.known(queue.layout.consumers) == {holder.id}
        queue.send(b"b")
        assert idle.receive() is not None
        assert liveness.known(queue.layout.consumers) == {holder.id, idle.id}, "who lives is there again"


def test_an_epoch_of_nothing_leaves_the_one_before_it_in_the_ledger(make: Make) -> None:
    queue = make()
    for number in (5, 6, 5):
        epoch = Epoch(queue.context, "row", number)
        epoch.begin()
        attempt = epoch.attempt("p")
        if number == 5:
            attempt.write_all([queue.address(b"a")[0]], [b"a"])
        epoch.commit([attempt.finish()])
    assert where(queue) == {"target": [b"a"]}


def test_a_file_that_was_taken_over_although_the_answer_was_lost_is_sent(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"a")
    rename = os.rename

    def lost(old: str, new: str) -> None:
        rename(old, new)
        if str(old) == str(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)

    monkeypatch.setattr(os, "rename", lost)
    queue.send_file(source, move=True)
    assert where(queue) == {"target": [b"a"]} and not source.exists()


def test_a_queue_that_was_made_although_the_answer_was_lost_is_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rename = make().root, os.rename

    def no_flags(old: str, new: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), old)

    def lost(old: str, new: str) -> None:
        rename(old, new)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)

    monkeypatch.setattr(system_calls, "rename_noreplace", no_flags)  # as on NFS
    monkeypatch.setattr(os, "rename", lost)
    assert root.create_queue("z").exists()


def test_a_move_that_was_refused_is_not_taken_for_done_where_inodes_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "message").write_bytes(b"a")

    def refused(old: str, new: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), old)

    store = Storage("none")
    store._exclusive.in_kernel = False
    monkeypatch.setattr(exclusive_rename, "_is_reserved", lambda path, reserved: False)
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="Read-only"):
        store.move(str(tmp_path / "message"), str(tmp_path / "kept"))
    assert (tmp_path / "message").read_bytes() == b"a"


def test_an_error_of_the_callers_own_in_a_staged_body_stays_what_it_is(make: Make, tmp_path: Path) -> None:
    queue = make()
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("p")
    with pytest.raises(FileNotFoundError), attempt.open("4.x.B"):
        (tmp_path / "no such input").read_bytes()
    assert attempt.files == []


def test_a_send_of_many_on_a_disk_that_turns_read_only_says_how_many_were_sent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    renames: list[str] = []
    rename = Storage.rename

    def read_only(self: Storage, source: str, destination: str) -> None:
        renames.append(source)
        if len(renames) > 1:
            monkeypatch.setattr(Storage, "unlink", refused)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)
        rename(self, source, destination)

    def refused(self: Storage, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(Storage, "rename", read_only)
    with pytest.raises(StorageError, match="the message was not sent") as caught:
        queue.send_many([b"a", b"b"])
    assert caught.value.__notes__ == ["1 messages of this send_many were sent before the error"]


def _refusing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Let a call of the system be refused the next time it is made."""
    real = getattr(os, call)

    def refused(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(os, call, real)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, refused)


@pytest.mark.parametrize(
    ("settle", "state"),
    [
        (lambda message: message.ack(), "processed"),
        (lambda message: message.nack(), "target"),
        (lambda message: message.reject("no"), "error"),
    ],
)
def test_a_message_that_was_settled_and_not_synced_is_held_no_more(
    make: Make, monkeypatch: pytest.MonkeyPatch, settle: Callable[[Message], None], state: str
) -> None:
    queue = make(durability="full")
    with queue.subscribe() as subscription:
        for body in ("a", "b"):
            queue.send(body)
        message = subscription.receive()
        assert message is not None
        syncs = Storage.sync

        def refused(self: Storage, *folders: str) -> None:
            if queue.layout.processing in folders:
                monkeypatch.setattr(Storage, "sync", syncs)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            syncs(self, *folders)

        monkeypatch.setattr(Storage, "sync", refused)
        with pytest.raises(StorageError, match="the message is settled"):
            settle(message)
        assert (message.held, message.state, subscription.held) == (False, state, ())
        assert os.path.exists(message.path)
        assert subscription.receive() is not None  # it may hold one


def test_an_ack_without_a_history_that_cannot_unlink_is_an_ack(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(history=False)
    queue.send("a")
    message = take(queue)
    _refusing(monkeypatch, "unlink")
    message.ack()
    assert message.state == "removed" and not names_in(queue, "processing")
    assert [name for name in os.listdir(queue.layout.private) if name.startswith(".gone-")]


def test_a_delivery_whose_lease_ran_out_counts_when_its_subscription_closes(tmp_path: Path) -> None:
    queue = Root.create(tmp_path / "root").create_queue("q", durability="none", redelivery_delay=0)
    queue.send("a")
    with queue.subscribe(lease_period=0.05) as subscription:
        assert subscription.receive() is not None
        time.sleep(0.1)  # and nobody sweeps meanwhile: a consumer does so each second
        assert subscription.receive() is None and subscription.held == ()
    (waiting,) = queue.browse()
    assert waiting.delivery_count == 1 and waiting.redelivered
