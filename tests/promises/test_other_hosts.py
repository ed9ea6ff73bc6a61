"""What another host just made is found: on NFS a client answers from what it remembers, unless it is made to ask."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    FRESH,
    Clock,
    Make,
    RecordingOs,
    base,
    drop,
    health,
    make_queue,
    reopened,
    stand_in_for_os,
    take,
    where,
)

from dropq import LeaseLost, Message, Queue, Root, StorageError, Subscription
from dropq.format.layout import QueueLayout
from dropq.policies import barrier
from dropq.queue import stream_journal
from dropq.staging.jobs import Job
from dropq.storage import reading, system_calls
from dropq.storage.mounts import Mount


class Scanned(list[Any]):
    """What a listing yields, which is closed as the system's is."""

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(self, *about: object) -> None:
        pass


class Renamed:
    """What a listing yields of a file that has another name since, where it does not tell what it is."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, entry.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return False


class Client:
    """Stands for the module `os` in dropq.storage, as a client of NFS answers: what it looked for and did not find it
    remembers as missing, and what it listed it lists again. It asks the server when a folder is opened.

    Args:
        sees_changes: opening a folder shows that it changed; in NFS 3 not, within a tick of the server's clock.
    """

    def __init__(self, *, sees_changes: bool = True) -> None:
        self.sees_changes = sees_changes
        self._missing: dict[str, frozenset[str]] = {}  # with what lay in the folder above
        self._listed: dict[str, frozenset[str]] = {}
        self._is_here = True

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @contextmanager
    def elsewhere(self, is_here: bool = False) -> Iterator[None]:
        """Let another host do what is done in the block: this one does not know of it."""
        before, self._is_here = self._is_here, is_here
        try:
            yield
        finally:
            self._is_here = before

    def here(self) -> AbstractContextManager[None]:
        """Let this host do what is done in the block, within one that another host does."""
        return self.elsewhere(is_here=True)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        assert dir_fd is None, "what it knows is known by paths"
        if flags & os.O_CREAT:
            made = os.open(path, flags, mode)
            self._knows(path)
            return made
        fd: int = self._found(path, lambda: os.open(path, flags, mode))
        if stat_is_dir(path):
            self._asks(path)
        return fd

    def stat(self, path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        assert dir_fd is None, "what it knows is known by paths"
        found: os.stat_result = self._found(path, lambda: os.stat(path, follow_symlinks=follow_symlinks))
        return found

    def lstat(self, path: str) -> os.stat_result:
        found: os.stat_result = self._found(path, lambda: os.lstat(path))
        return found

    def access(self, path: str, mode: int) -> bool:
        try:
            self.lstat(path)
        except FileNotFoundError:
            return False
        return os.access(path, mode)

    def isdir(self, path: str) -> bool:
        try:
            self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat_is_dir(path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)
        self._knows(path)

    def rename(self, source: str, destination: str) -> None:
        os.rename(source, destination)
        self.renamed(source, destination)

    def renamed(self, source: str, destination: str) -> None:
        """Know of a rename: what was missing in a folder is missing in it under its new name."""
        below = {one: seen for one, seen in self._missing.items() if one.startswith(f"{source}/")}
        self._knows(source)
        self._knows(destination)
        if self._is_here:
            self._missing |= {f"{destination}{one.removeprefix(source)}": seen for one, seen in below.items()}

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        assert dir_fd is None, "what it knows is known by paths"
        os.unlink(path)
        self._knows(path)

    def link(self, source: str, destination: str, **options: Any) -> None:
        os.link(source, destination, **options)
        self._knows(destination)

    def listdir(self, folder: str | int) -> list[str]:
        path = folder if isinstance(folder, str) else os.readlink(f"/proc/self/fd/{folder}")
        return [name for name in os.listdir(folder) if name in self._kept(path)]

    def scandir(self, folder: str) -> Scanned:
        with self._found(folder, lambda: os.scandir(folder)) as found:
            self._asks(folder)
            kept = self._kept(folder)
            return Scanned([entry for entry in found if entry.name in kept])

    def posix_fadvise(self, fd: int, *arguments: int) -> None:
        self._listed.pop(os.readlink(f"/proc/self/fd/{fd}"), None)

    def _asks(self, folder: str) -> None:
        """Ask the server whether a folder changed."""
        if self._is_here and self.sees_changes:
            now = frozenset(os.listdir(folder))
            changed = [one for one, seen in self._missing.items() if os.path.dirname(one) == folder and seen != now]
            for one in changed:
                del self._missing[one]
            self._listed.pop(folder, None)

    def _kept(self, folder: str) -> frozenset[str]:
        if folder in self._listed and self._is_here:
            return self._listed[folder]
        listed: frozenset[str] = self._found(folder, lambda: frozenset(os.listdir(folder)))
        if self._is_here:
            self._listed[folder] = listed
        return listed

    def _found(self, path: str, call: Callable[[], Any]) -> Any:
        if not self._is_here:
            return call()
        if any(f"{path}/".startswith(f"{one}/") for one in self._missing):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            return call()
        except FileNotFoundError:
            while not os.path.lexists(os.path.dirname(path)):
                path = os.path.dirname(path)
            self._missing[path] = frozenset(os.listdir(os.path.dirname(path)))
            raise

    def _knows(self, path: str) -> None:
        """Know of a change of one's own."""
        if not self._is_here:
            return
        self._missing = {one: seen for one, seen in self._missing.items() if not f"{one}/".startswith(f"{path}/")}
        self._listed.pop(os.path.dirname(path), None)


stat_is_dir = os.path.isdir


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client that sees changes when it opens a folder."""
    return watching(monkeypatch, Client())


def watching(monkeypatch: pytest.MonkeyPatch, client: Client) -> Client:
    stand_in_for_os(monkeypatch, client)
    kind = "nfs4" if client.sees_changes else "nfs"
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount(kind))
    monkeypatch.setattr(reading, "_kinds", {})
    monkeypatch.setattr(os.path, "isdir", client.isdir)
    real = system_calls.rename_noreplace

    def rename_noreplace(source: str, destination: str, *folders: int) -> None:
        real(source, destination, *folders)
        client.renamed(source, destination)

    monkeypatch.setattr(system_calls, "rename_noreplace", rename_noreplace)
    return client


def older(queue: Queue) -> Queue:
    """Let a queue lack the folders that an older dropq made when they were needed; return it as it is opened then."""
    shutil.rmtree(queue.layout.log)
    for path in reversed(queue.layout.private_folders):
        if path != queue.layout.private and stat_is_dir(path):
            os.rmdir(path)
    return reopened(queue)


@pytest.fixture(params=["with all folders", "of an older dropq"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Queue]:
    """Make a queue, as it is made now or was made before."""

    def make(**options: Any) -> Queue:
        queue = make_queue(tmp_path / "root", **{"timing": FRESH, **options})
        return queue if request.param == "with all folders" else older(queue)

    return make


def take_from(one: Subscription, body: bytes) -> Message:
    """Receive a message that is known to be the next."""
    message = one.receive()
    assert message is not None and message.body == body
    return message


# -- switches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [False, True], ids=["of the queue", "of the root"])
@pytest.mark.parametrize("sees_changes", [True, False], ids=["another tick", "the same tick"])
def test_a_pause_by_another_host_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everywhere: bool, sees_changes: bool
) -> None:
    client = watching(monkeypatch, Client(sees_changes=sees_changes))
    queue = make_queue(tmp_path, timing=FRESH)
    queue.send_many([b"a", b"b", b"c"])
    switch = queue.root if everywhere else queue
    with queue.subscribe(max_backlog=None) as one:
        assert one.receive() is not None
        with client.elsewhere():
            switch.pause()
        assert one.receive() is None
        assert "paused" in {note.kind for note in health(queue).notes}
        with client.elsewhere():
            switch.resume()
        assert one.receive() is not None


def test_a_switch_is_looked_for_by_name_where_the_folder_changed_long_ago(tmp_path: Path) -> None:
    clock = Clock()
    switch = tmp_path / "switch"
    clock.advance(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.listdir", lambda path: pytest.fail("a folder of many was listed"))
        assert not reading.is_there(str(switch), clock)
        switch.touch(mode=0)
        clock.advance(10)
        assert reading.is_there(str(switch), clock)
    assert not reading.is_there(str(tmp_path / "gone" / "switch"), clock)


def test_a_write_lock_by_another_host_is_seen(tmp_path: Path, client: Client) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    queue.send(b"a")
    with client.elsewhere():
        (base(queue) / "write-lock.properties").write_text("delay-milliseconds=300\n")
    until_it_waits = time.monotonic() + 5
    while time.monotonic() < until_it_waits:
        began = time.monotonic()
        queue.send(b"b")
        if time.monotonic() - began >= 0.3:
            return
    pytest.fail("no sender waited")


# -- jobs --------------------------------------------------------------------------------------------------------------


def run_job(queue: Queue) -> int:
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all(queue._plain_addresses(1, "B"), [b"x"])
    return job.commit([attempt.finish()])


def test_a_job_that_another_host_sent_is_not_sent_again(made: Callable[..., Queue], client: Client) -> None:
    queue = made()
    assert not Job(queue.context, "job").sent
    with client.elsewhere():
        assert run_job(queue) == 1
    assert Job(queue.context, "job").sent and run_job(queue) == 0
    assert where(queue) == {"target": [b"x"]}


def killed(*_: object, **__: object) -> bool:
    raise KeyboardInterrupt


def test_a_job_that_another_host_committed_is_not_dropped(tmp_path: Path, client: Client) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all(queue._plain_addresses(1, "B"), [b"x"])
    staged = attempt.finish()
    assert not job.sent
    with client.elsewhere(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("dropq.staging.jobs.finish", killed)
        with pytest.raises(KeyboardInterrupt):
            job.commit([staged])
    assert job.abort()
    assert where(queue) == {"target": [b"x"]}


# -- what is made for messages that are to come, and what holds others back --------------------------------------------


def test_an_ack_that_came_first_on_another_host_is_met(made: Callable[..., Queue], client: Client) -> None:
    queue = made()
    with queue.subscribe() as one:
        assert one.receive() is None
        early = queue.root.context.ids.next()
        with client.elsewhere():
            queue.ack(early, defer=True)
        drop(queue, f"4.{early}.B", b"x")
        assert one.receive() is None
    assert where(queue) == {"processed": [b"x"]}


def test_a_second_ack_is_met_that_came_within_a_tick_of_a_file_server_whose_clock_is_behind(tmp_path: Path) -> None:
    clock = Clock()
    clock.advance(-60)
    queue = make_queue(tmp_path, clock=clock, timing=FRESH)
    tick = clock.ms * 1_000_000

    def ack_early() -> str:
        early = queue.root.context.ids.next()
        queue.ack(early, defer=True)
        os.utime(queue.layout.acks, ns=(tick, tick))
        return early

    with queue.subscribe() as one:
        ack_early()
        assert one.receive() is None  # it has listed the acks
        drop(queue, f"4.{ack_early()}.B", b"x")
        assert one.receive() is None
    assert where(queue) == {"processed": [b"x"]}


def test_the_first_barrier_that_another_host_hands_out_holds_back_what_is_behind(
    made: Callable[..., Queue], client: Client
) -> None:
    queue = made(barrier_expression="JMSType = 'b'")
    with client.elsewhere():
        other = reopened(queue).subscribe()
    with queue.subscribe() as one:
        assert one.receive() is None
        with client.elsewhere():
            queue.send(b"barrier", type="b")
            queue.send(b"behind")
            share = take_from(other, b"barrier")
        take_from(one, b"barrier").ack()
        assert one.receive() is None
        with client.elsewhere():
            share.ack()
            other.close()
        take_from(one, b"behind")


def test_a_message_that_another_host_gave_back_goes_before_the_barrier_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = watching(monkeypatch, Client(sees_changes=False))
    queue = make_queue(tmp_path, timing=FRESH, barrier_expression="JMSType = 'b'")
    queue.send(b"before")
    with client.elsewhere():
        other = reopened(queue).subscribe()
        held = take_from(other, b"before")
        queue.send(b"barrier", type="b")
    with queue.subscribe() as one:
        assert one.receive() is None  # this host keeps that listing of target/
        with client.elsewhere():
            held.nack()
            other.close()
        take_from(one, b"before").ack()
        take_from(one, b"barrier")


@pytest.mark.parametrize("sees_changes", [True, False], ids=["another tick", "the same tick"])
def test_a_limit_counts_what_another_host_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees_changes: bool
) -> None:
    client = watching(monkeypatch, Client(sees_changes=sees_changes))
    queue = make_queue(tmp_path, timing=FRESH, max_backlog=1)
    queue.send_many([b"a", b"b"])
    with client.elsewhere():
        other = reopened(queue).subscribe()
    with queue.subscribe() as one:
        list(reading.files_in(queue.layout.processing))  # this host keeps that listing
        with client.elsewhere():
            held = take_from(other, b"a")
        assert one.receive() is None and one._is_kept_back
        with client.elsewhere():
            held.ack()
            other.close()
        take_from(one, b"b")


def test_a_limit_counts_a_claim_that_is_renewed_between_its_listing_and_a_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b"])
    with queue.subscribe(lease_period="1h") as one, reopened(queue).subscribe() as other:
        assert one.receive() is not None
        listing = reading.listing

        def renamed(folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
            return Scanned(map(Renamed, os.scandir(folder))) if folder == queue.layout.processing else listing(folder)

        monkeypatch.setattr(reading, "listing", renamed)
        assert other.receive() is None and other._is_kept_back


def test_a_turn_is_left_to_who_waits_on_another_host(made: Callable[..., Queue], client: Client) -> None:
    queue = made(timing=replace(FRESH, turns_wait=0), fairness_model="round-robin")
    by_the_way = queue.subscribe(detached=True, lease_period="1h")
    assert by_the_way.receive() is None
    with client.elsewhere(), reopened(queue).subscribe() as waits:
        assert waits.receive() is None
        queue.send(b"a")
        with client.here():
            assert by_the_way.receive() is None and by_the_way._is_kept_back
        take_from(waits, b"a")


def test_what_another_host_delayed_is_delivered(made: Callable[..., Queue], client: Client, clock: Clock) -> None:
    queue = made(clock=clock)
    assert queue.sweep().delayed == 0
    with client.elsewhere():
        queue.send(b"a", delay="1s")
    clock.advance(2)
    assert queue.sweep().delayed == 1
    assert where(queue) == {"target": [b"a"]}


def test_the_first_stream_of_another_host_is_known(made: Callable[..., Queue], client: Client) -> None:
    queue = made()
    assert stream_journal.runs(queue.context) == frozenset()
    with client.elsewhere():
        os.makedirs(f"{queue.layout.streams}/s")
        Path(f"{queue.layout.streams}/s/run-me-0123456789").touch()
    assert stream_journal.runs(queue.context) == {"me-0123456789"}


def test_a_queue_that_another_host_made_is_there(tmp_path: Path, client: Client) -> None:
    root = Root.create(tmp_path)
    assert not root.queue("q").exists()
    with client.elsewhere():
        root.create_queue("q", durability="none", lease_period="7s")
    assert root.queue("q").exists()
    assert Root(tmp_path).queue("q").config.lease_period == 7


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


# -- a share that is being renamed -------------------------------------------------------------------------------------


def test_a_barrier_is_not_settled_by_one_listing_that_missed_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, timing=FRESH, barrier_expression="JMSType = 'b'")
    queue.send(b"barrier", type="b")
    message = take(queue)
    (shares,) = barrier.all_shares(queue.context)
    real, missed = reading.entries, [shares.context.layout.processing]

    def entries(folder: str) -> Iterator[os.DirEntry[str]]:
        if folder not in missed:
            return real(folder)
        missed.remove(folder)
        return iter(())

    monkeypatch.setattr(reading, "entries", entries)
    assert shares.complete()  # what is not settled
    assert not missed and list(where(queue)) == ["processing"]
    message.ack()
    assert where(queue) == {"processed": [b"barrier"]}


# -- the folders of a queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropboxmq", [False, True], ids=["flat", "incoming"])
def test_a_queue_has_its_folders_from_the_beginning(tmp_path: Path, dropboxmq: bool) -> None:
    queue = make_queue(tmp_path, dropboxmq=dropboxmq, dir_mode="0750")
    folders = {path for path, _, _ in os.walk(queue.layout.home)}
    assert folders == set(queue.layout.first_folders)
    assert {f"{queue.layout.private}/{name}" for name in ("acks", "barriers", "delayed", "ledger", "turns")} <= folders
    assert {os.stat(path).st_mode & 0o777 for path in folders} == {0o750}
    assert queue.fsck() == []


def test_the_folders_are_synced_before_the_queue_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root.create(tmp_path)
    calls = RecordingOs().record(monkeypatch).calls
    root.create_queue("q", durability="full", max_backlog=1)
    (appears,) = (at for at, (name, *paths) in enumerate(calls) if name == "rename" and paths[-1].endswith("/q"))
    hidden = calls[appears][1]
    layout = QueueLayout.flat(hidden)
    made = {paths[0] for name, *paths in calls[:appears] if name == "mkdir"}
    last_made = max(at for at, (name, *_) in enumerate(calls[:appears]) if name == "mkdir")
    synced = {paths[0] for name, *paths in calls[last_made:appears] if name == "fsync"}
    assert made == set(layout.first_folders)
    assert {os.path.dirname(path) for path in made} - {str(tmp_path)} <= synced
    assert ("fsync", str(tmp_path)) in calls[appears:]


def test_no_verb_makes_a_folder_that_is_there_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    before = {path for path, _, _ in os.walk(queue.layout.home)}
    calls = RecordingOs().record(monkeypatch).calls
    queue.send(b"a", delay="1h")
    queue.ack(queue.root.context.ids.next(), defer=True)
    run_job(queue)
    taken: Message = take(queue)
    taken.reject("as it comes")
    queue.close()
    queue.sweep()
    assert not {paths[0] for name, *paths in calls if name == "mkdir"} & before


def test_opening_an_older_queue_makes_nothing(tmp_path: Path) -> None:
    queue = older(make_queue(tmp_path))
    assert reopened(queue).counts()["target"] == 0 and not list(queue.browse())
    assert not os.path.exists(queue.layout.delayed)  # whoever needs it makes it


def test_a_look_over_nfs_sees_what_each_entry_is_as_the_listing_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"abc"] * 20)
    os.mkdir(f"{queue.layout.target}/folder")
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("nfs4"))
    seen = list[str]()
    looked_at = reading._looked_at

    def look_at(entry: os.DirEntry[str]) -> os.DirEntry[str]:
        seen.append(entry.name)
        return looked_at(entry)

    monkeypatch.setattr(reading, "_looked_at", look_at)
    with reading.look(queue.layout.target) as entries:
        for count, _ in enumerate(entries, 1):
            assert len(seen) == count  # not after the listing: then each takes a call
    seen.clear()
    assert queue.counts()["target"] == len(list(queue.browse())) == queue.stats()["target"].count == 20
    assert queue.health().counts["target"] == 20 and len(seen) >= 4 * 21
    assert queue.stats()["target"].bytes == 60


def test_fsck_asks_once_over_nfs_whether_it_may_read_files_that_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a"] * 20)
    drop(queue, "closed", b"a")
    os.chmod(f"{queue.layout.target}/closed", 0)
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("nfs4"))
    asked = list[str]()
    access = os.access

    def ask(path: str, mode: int) -> bool:
        asked.append(path)
        return access(path, mode)

    monkeypatch.setattr(os, "access", ask)
    assert [finding.kind for finding in queue.fsck()] == ["unreadable"]
    assert sum(path.startswith(queue.layout.target + "/") for path in asked) == 1


def test_a_queue_is_opened_over_nfs_by_two_listings_and_links_in_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = older(make_queue(tmp_path / "root"))
    monkeypatch.setattr(reading, "_kinds", {})
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("nfs4"))
    asked = list[str]()
    islink = os.path.islink

    def ask(path: str) -> bool:
        asked.append(path)
        return islink(path)

    monkeypatch.setattr(os.path, "islink", ask)
    reopened(queue).send(b"a")
    assert queue.layout.private in asked and queue.layout.held not in asked  # what is not there takes no call
    for folder in (queue.layout.held, queue.layout.reasons):
        os.symlink(tmp_path, folder)
        with pytest.raises(StorageError, match="symbolic link"):
            reopened(queue).send(b"a")
        os.unlink(folder)
