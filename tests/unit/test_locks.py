"""Who lives is told from who died across hosts, mounts and forks; and a lock goes with its holder, not with a child."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from children import in_child
from forks import ended, fork
from helpers import Clock, make_queue, open_files, reopened, take, until, where

from dropq import LeaseLost, NoSuchQueue, Queue, Root, StorageError, Subscription
from dropq.lifecycle.timing import Timing
from dropq.policies.lock import PolicyLock
from dropq.policies.receive_policies import ReceivePolicies
from dropq.storage import liveness, locks
from dropq.storage.clock import ServerClock
from dropq.storage.mounts import Mount, mount_of
from dropq.upkeep.steps import LOCKS_TRIED
from dropq.upkeep.sweep import QuickSweep

NFS, HERE = Mount("nfs4", options=("vers=4.2",)), Mount("ext4")
#: Two mounts of one folder whose locks the two do not know of each other.
APART = [
    (Mount("fuse.sshfs"), HERE),
    (Mount("9p"), HERE),
    (Mount("nfs", options=("nolock",)), NFS),
    (Mount("cifs"), HERE),
    (Mount("ceph"), NFS),
]


@pytest.fixture
def own_disk(tmp_path: Path) -> None:
    mount = mount_of(str(tmp_path))
    if mount is None or mount.shared or not hasattr(fcntl, "F_OFD_SETLK"):
        pytest.skip("no disk of this host's own, or no locks for open files")


def mounted(monkeypatch: pytest.MonkeyPatch, mount: Mount) -> None:
    """Let all folders lie on a mount from now on."""
    for module in (liveness, locks):
        monkeypatch.setattr(module, "mount_at", lambda folder, device: mount)


def serve(path: str, length: int = 0, start: int = 0) -> bool:
    """Take a lock as an NFS server does for a client, in another process; let go of it; tell whether it was free."""

    def try_it() -> bool:
        with open(path, "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
            except BlockingIOError:
                return False
        return True

    return in_child(try_it)


@contextmanager
def served(path: str) -> Iterator[None]:
    """Let another process hold such a lock."""
    ready, done = os.pipe(), os.pipe()

    def hold() -> None:
        os.close(done[1])
        with open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(ready[1], b"x")
            os.read(done[0], 1)

    child = fork(hold)
    os.close(done[0])
    os.read(ready[0], 1)
    try:
        yield
    finally:
        for end in (*ready, done[1]):
            os.close(end)
        assert ended(child) == 0


def sign_of(subscription: Subscription) -> str:
    return f"{subscription._context.layout.consumers}/{subscription.id}"


def died(subscription: Subscription) -> None:
    """Let go of a sign of life as the kernel does for the dead."""
    assert subscription._presence is not None
    subscription._presence.abandon()


def policy_lock(queue: Queue) -> PolicyLock:
    return PolicyLock(queue.context)


# -- NFS: the server's own host, and its clients ---------------------------------------------------------------------


@pytest.mark.usefixtures("own_disk")
def test_an_nfs_servers_own_host_does_not_take_a_clients_consumer_for_dead(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    holder = queue.subscribe()
    assert holder.receive() is not None
    died(holder)  # this host's kernel knows of no flock: the client's is the server's lock
    with served(sign_of(holder)):
        assert not liveness.is_dead(queue.layout.consumers, holder.id)
        assert queue.sweep().total == 0
    assert queue.sweep().dead == 1


@pytest.mark.usefixtures("own_disk")
def test_an_nfs_client_does_not_take_a_consumer_on_the_servers_own_host_for_dead(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    with queue.subscribe() as holder:
        assert not serve(sign_of(holder))
        died(holder)
        assert serve(sign_of(holder))


@pytest.mark.usefixtures("own_disk")
def test_the_policy_lock_excludes_an_nfs_client_from_the_servers_own_host_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.02), max_backlog=1)
    queue.send(b"a")
    path = queue.layout.lock
    with policy_lock(queue).acquire(lambda: None) as taken:
        assert taken and not serve(path)
    assert serve(path)
    with served(path):
        assert queue.receive() is None
    assert take(queue).body == b"a"


@pytest.mark.usefixtures("own_disk")
def test_a_lock_that_got_only_one_of_the_two_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with served(str(path)), open(path, "r+b") as one, open(path, "r+b") as other:
        assert not locks.try_lock(one.fileno(), str(tmp_path))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_program_that_knows_of_flock_alone_is_excluded_and_excludes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.02))
    with queue.subscribe() as holder, open(sign_of(holder), "r+b") as sign:
        with pytest.raises(BlockingIOError):
            fcntl.flock(sign, fcntl.LOCK_EX | fcntl.LOCK_NB)
        died(holder)
        fcntl.flock(sign, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not liveness.is_dead(queue.layout.consumers, holder.id)
    with policy_lock(queue).acquire(lambda: None) as taken, open(queue.layout.lock, "r+b") as file:
        assert taken
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(queue.layout.lock, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with policy_lock(queue).acquire(lambda: None) as taken:
            assert not taken


@pytest.mark.parametrize("mount", [NFS, Mount("cifs"), Mount("fuse.sshfs"), Mount("9p"), None])
def test_a_mount_whose_flock_may_be_the_servers_lock_gets_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount | None
) -> None:
    """There the two would refuse each other."""
    monkeypatch.setattr(locks, "mount_at", lambda folder, device: mount)
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send(b"a")
    with queue.subscribe() as holder:
        message = holder.receive()
        assert message is not None
        assert serve(sign_of(holder)) and serve(queue.layout.lock)
        assert not liveness.is_dead(queue.layout.consumers, holder.id)
        message.ack()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_a_kernel_has_no_second_lock_the_flock_excludes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refused(fd: int, kind: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(locks, "_set", refused)
    queue = make_queue(tmp_path)
    queue.send(b"a")
    holder = queue.subscribe()
    assert holder.receive() is not None
    assert queue.sweep().total == 0
    died(holder)
    assert queue.sweep().dead == 1


@pytest.mark.usefixtures("own_disk")
@pytest.mark.parametrize(("broken", "refused"), [("flock", 2), ("fcntl", 1)])
def test_a_lock_that_fails_is_neither_taken_for_somebody_elses_nor_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, refused: int
) -> None:
    """The first one, or the second one that goes with it: the living have the first, and nobody asks for both."""

    def failing(fd: int, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    queue = make_queue(tmp_path, max_backlog=2)
    queue.send_many([b"a", b"b"])
    dead = reopened(queue).subscribe()
    assert dead.receive() is not None
    died(dead)
    living = queue.subscribe()
    with monkeypatch.context() as disk:
        disk.setattr(fcntl, broken, failing)
        with pytest.raises(StorageError, match="no message was touched"):
            living.receive()
        with pytest.raises(StorageError, match="no message was touched"):
            queue.subscribe()
        report = queue.sweep()
        assert (report.total, report.refused) == (0, refused)
        assert where(queue) == {"processing": [b"a"], "target": [b"b"]}
        assert sorted(os.listdir(queue.layout.consumers)) == sorted([dead.id, living.id])
    assert queue.sweep().dead == 1
    assert where(queue) == {"target": [b"a", b"b"]}
    assert living.receive() is not None


@pytest.mark.usefixtures("own_disk")
@pytest.mark.parametrize("byte", [0, 1, 1 << 40])
def test_a_lock_is_of_the_whole_file_however_it_grows(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "file"
    path.touch()
    with open(path, "r+b") as file:
        assert serve(str(path), 1, byte)
        assert locks.try_lock(file.fileno(), str(tmp_path))
        assert not serve(str(path), 1, byte)
        locks.unlock(file.fileno(), str(tmp_path))
        assert serve(str(path), 1, byte)


@pytest.mark.usefixtures("own_disk")
def test_a_lock_whose_second_half_fails_leaves_no_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()

    def failing(fd: int, kind: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(locks, "_set", failing)
    with open(path, "r+b") as one, open(path, "r+b") as other:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            locks.try_lock(one.fileno(), str(tmp_path))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("broken", ["flock", "fcntl"])
def test_a_lock_that_cannot_be_let_go_of_goes_when_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "file"
    path.touch()

    def failing(fd: int, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open(path, "r+b") as file:
        assert locks.try_lock(file.fileno(), str(tmp_path))
        with monkeypatch.context() as disk:
            disk.setattr(fcntl, broken, failing)
            locks.unlock(file.fileno(), str(tmp_path))
    with open(path, "r+b") as file:
        assert locks.try_lock(file.fileno(), str(tmp_path))


@pytest.mark.usefixtures("own_disk")
def test_whether_there_are_second_locks_is_tried_and_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = str(tmp_path / "file"), str(tmp_path / "link")
    Path(path).touch()
    os.symlink(path, link)
    opened = open_files()
    assert locks.has_second(path)
    assert serve(path) and open_files() == opened
    with served(path), pytest.raises(BlockingIOError):
        locks.has_second(path)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        locks.has_second(link)
    assert open_files() == opened
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(locks, "_SET", None)
        assert not locks.has_second(path)

    def refused(fd: int, *_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    assert not locks.has_second(path)


def test_what_an_nfs_client_was_promised_to_have_alone_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open that does not wait is refused while the server asks for its promise back: a delegation of NFS 4."""
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send(b"a")
    holder = reopened(queue).subscribe()
    take(queue).nack()
    assert holder.receive() is not None
    died(holder)
    real, refusals = os.open, 0

    def promised(path: str, *args: int) -> int:
        nonlocal refusals
        if os.path.basename(path) in ("lock", holder.id) and refusals < 3:
            refusals += 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
        return real(path, *args)

    monkeypatch.setattr(os, "open", promised)
    for number in range(1, 4):
        report = queue.sweep()
        assert (report.dead, report.refused, refusals) == (0, 0, number)
    assert queue.sweep().dead == 1
    refusals = 0
    assert take(reopened(queue)).body == b"a" and refusals == 3


#: Takes a file for itself, as an NFS server does for a client, and gives it back when the kernel asks for it.
BORROWER = """
import fcntl, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])  # one that comes before the wait is not lost
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("lent", flush=True)
signal.sigwait([signal.SIGIO])
"""


@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="this system lends no files")
@pytest.mark.parametrize("file", ["body", "stream"])
def test_a_file_that_an_nfs_client_was_lent_is_opened_once_it_gives_it_back(tmp_path: Path, file: str) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    message = take(queue)
    with subprocess.Popen([sys.executable, "-c", BORROWER, message.path], stdout=subprocess.PIPE) as borrower:
        assert borrower.stdout is not None and borrower.stdout.readline() == b"lent\n"
        if file == "body":
            assert message.body == b"a"
        else:
            with message.open() as stream:
                assert stream.read() == b"a"
        assert borrower.wait() == 0


@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="this system lends no files")
def test_the_clock_is_measured_by_a_file_that_an_nfs_client_was_lent_and_keeps(tmp_path: Path) -> None:
    path = make_queue(tmp_path).root.layout.clock
    ServerClock(path).now_ms()
    os.utime(path, (0, 0))
    with subprocess.Popen([sys.executable, "-c", BORROWER, path], stdout=subprocess.PIPE) as borrower:
        assert borrower.stdout is not None and borrower.stdout.readline() == b"lent\n"
        ServerClock(path).now_ms()
        assert os.stat(path).st_mtime > 0  # it was measured
        borrower.kill()


# -- mounts that do not know each other's locks ----------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [*APART, *((other, one) for one, other in APART)])
def test_a_lock_that_another_mount_does_not_know_of_tells_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Mount, other: Mount
) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    queue.send(b"a")
    with monkeypatch.context() as through:
        mounted(through, one)
        holder = queue.subscribe(lease_period="10m")
        message = holder.receive()
        assert message is not None
    died(holder)  # so it looks where nobody knows of the lock
    with monkeypatch.context() as through:
        mounted(through, other)
        assert not liveness.is_dead(queue.layout.consumers, holder.id)
        assert queue.sweep().total == 0
        clock.advance(601)
        assert queue.sweep().lapsed == 1
    with pytest.raises(LeaseLost):
        message.ack()


@pytest.mark.parametrize(
    ("one", "other"), [(HERE, NFS), (Mount("ext4"), Mount("xfs")), (Mount("cifs"), Mount("smb3")), (Mount("9p"),) * 2]
)
def test_a_lock_that_both_mounts_know_of_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Mount, other: Mount
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with monkeypatch.context() as through:
        mounted(through, one)
        holder = queue.subscribe(lease_period="10m")
        assert holder.receive() is not None
    with monkeypatch.context() as through:
        mounted(through, other)
        assert queue.sweep().total == 0
        died(holder)
        assert queue.sweep().dead == 1


# -- forks -----------------------------------------------------------------------------------------------------------


@contextmanager
def a_child_that_lives_on() -> Iterator[None]:
    """Fork a child that does nothing, and end it after the block."""
    reading, writing = os.pipe()

    def live_on() -> None:
        os.close(writing)
        os.read(reading, 1)

    child = fork(live_on)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        assert ended(child) == 0


def test_a_child_that_was_forked_inside_the_policy_lock_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread consumes while another one starts a process by fork, as multiprocessing does on Linux up to 3.13."""
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.05), max_backlog=5)
    queue.send_many([b"a", b"b"])
    inside, forked = threading.Event(), threading.Event()
    refresh = ReceivePolicies._refresh

    def refresh_slowly(self: ReceivePolicies) -> None:
        inside.set()
        assert forked.wait(15)
        refresh(self)

    monkeypatch.setattr(ReceivePolicies, "_refresh", refresh_slowly)
    taken: list[bytes] = []

    def consume() -> None:
        with reopened(queue).subscribe() as subscription:
            for message in subscription.receive_many(1):
                taken.append(message.body)
                message.ack()

    thread = threading.Thread(target=consume)
    thread.start()
    assert inside.wait(15)
    with a_child_that_lives_on():
        forked.set()
        thread.join()
        assert taken == [b"a"]
        assert take(queue).body == b"b"


def test_a_child_that_was_forked_while_a_dead_one_is_looked_at_does_not_keep_it_alive(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    holder = queue.subscribe()
    assert holder.receive() is not None
    died(holder)
    with ExitStack() as longer:
        with liveness.dead(queue.layout.consumers, holder.id) as found:
            assert found
            longer.enter_context(a_child_that_lives_on())
        assert liveness.is_dead(queue.layout.consumers, holder.id)
        assert queue.sweep().dead == 1


@pytest.mark.parametrize("kind", ["policies", "a dead consumer"])
def test_a_killed_process_leaves_its_lock_to_no_child(tmp_path: Path, kind: str) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.05))
    queue.send(b"a")
    holder = queue.subscribe()
    assert holder.receive() is not None
    died(holder)
    ready, done = os.pipe(), os.pipe()

    def live_on() -> None:
        os.write(ready[1], b"x")
        os.read(done[0], 1)

    def be_killed_inside() -> None:
        os.close(done[1])
        dead = liveness.dead(queue.layout.consumers, holder.id)
        with policy_lock(queue).acquire() if kind == "policies" else dead as taken:
            assert taken
            fork(live_on)
            os.read(ready[0], 1)
            os.kill(os.getpid(), signal.SIGKILL)

    killed = fork(be_killed_inside)
    os.close(ready[1])
    try:
        assert ended(killed) == -signal.SIGKILL
        with policy_lock(queue).acquire() as taken:
            assert taken
        assert queue.sweep().dead == 1
    finally:
        os.close(done[1])
        assert os.read(ready[0], 1) == b"", "the child that lived on has ended"
        os.close(done[0])
        os.close(ready[0])


def test_a_child_that_was_forked_inside_a_lock_leaves_the_lock_and_the_files_of_others_alone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.02))
    lock = PolicyLock(queue.context, keeps_open=True)
    block = lock.acquire()
    number = os.dup(0)
    os.close(number)
    assert block.__enter__()
    assert os.path.samestat(os.fstat(number), os.stat(queue.layout.lock))
    left, freed = os.pipe(), os.pipe()

    def go_on() -> None:
        os.close(freed[1])
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(number)
        os.dup2(freed[0], number)
        block.__exit__(None, None, None)
        os.fstat(number)
        with lock.acquire() as taken:
            assert not taken, "the parent has it"
        os.close(left[1])
        os.read(freed[0], 1)
        with lock.acquire() as taken:
            assert taken
        os.fstat(number)

    child = fork(go_on)
    os.close(left[1])
    os.read(left[0], 1)
    block.__exit__(None, None, None)
    os.close(freed[1])
    assert ended(child) == 0
    os.close(left[0])
    os.close(freed[0])


@pytest.mark.usefixtures("own_disk")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="nothing shows what is open")
def test_a_copy_of_its_descriptor_does_not_keep_a_sign_of_life_that_is_let_go(tmp_path: Path) -> None:
    """As a child has one that was forked without Python's knowledge."""
    queue = make_queue(tmp_path)
    holder = queue.subscribe()
    sign = os.stat(sign_of(holder))
    with ExitStack() as copies:
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the listing's own
                if os.path.samestat(os.fstat(fd), sign):
                    copies.callback(os.close, os.dup(fd))
        assert liveness.is_dead(queue.layout.consumers, holder.id) is False
        died(holder)
        assert serve(sign_of(holder))
        assert liveness.is_dead(queue.layout.consumers, holder.id)


# -- a sign of life that goes away ------------------------------------------------------------------------------------


def test_a_root_that_is_away_for_a_moment_costs_nobody_what_it_holds(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    queue = make_queue(root)
    queue.send_many([b"a", b"b"])
    with queue.subscribe(max_backlog=2, lease_period="10m") as holder:
        message = holder.receive()
        assert message is not None
        os.rename(root, away)
        with pytest.raises(NoSuchQueue):
            until(lambda: holder.receive() is not None, "the root to be missed")
        os.rename(away, root)
        assert reopened(queue).sweep().total == 0
        message.ack()
        assert holder.receive() is not None
    assert where(queue) == {"processed": [b"a"], "target": [b"b"]}
    assert os.listdir(queue.layout.consumers) == []


def test_a_root_that_gives_place_to_another_for_a_moment_costs_nobody_what_it_holds(tmp_path: Path) -> None:
    """As when a link is switched to another root, and back."""
    root, away, other = tmp_path / "root", tmp_path / "away", tmp_path / "other"
    queue = make_queue(root)
    queue.send(b"a")
    Root.create(other).create_queue(queue.name, durability="none")
    with queue.subscribe(max_backlog=2, lease_period="10m") as holder:
        message = holder.receive()
        assert message is not None
        assert holder._presence is not None
        os.rename(root, away)
        os.rename(other, root)
        holder._presence.keep()
        assert liveness.known(queue.layout.consumers) == {holder.id}
        os.rename(root, other)
        os.rename(away, root)
        assert reopened(queue).sweep().total == 0
        holder._presence.keep()
        assert reopened(queue).sweep().total == 0
        message.ack()
    assert where(queue) == {"processed": [b"a"]}
    assert not liveness.known(queue.layout.consumers)
    gone = Root(other).queue(queue.name)
    assert liveness.is_dead(gone.layout.consumers, holder.id), "what was left in the other root is nobody's"


def test_a_sign_of_life_that_was_made_again_meanwhile_is_not_found_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with queue.subscribe() as holder:
        assert holder.receive() is not None
        take_lock = locks.try_lock

        def after_it_was_made_again(fd: int, folder: str, device: int) -> bool:
            os.unlink(sign_of(holder))
            assert holder._presence is not None
            holder._presence.keep()
            return take_lock(fd, folder)

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(locks, "try_lock", after_it_was_made_again)
            assert not liveness.is_dead(queue.layout.consumers, holder.id)
        assert liveness.known(queue.layout.consumers) == {holder.id}
        assert queue.sweep().total == 0


# -- how many locks are tried ----------------------------------------------------------------------------------------


def test_a_sweep_on_the_way_tries_a_few_locks_and_all_of_them_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    holders = [queue.subscribe() for _ in range(4 * LOCKS_TRIED)]
    queue.send_many([b"x"] * len(holders))
    assert all(holder.receive() for holder in holders)
    tried: list[str] = []
    dead = liveness.dead

    def noted(folder: str, subscription: str) -> AbstractContextManager[bool]:
        tried.append(subscription)
        return dead(folder, subscription)

    monkeypatch.setattr(liveness, "dead", noted)
    quick = QuickSweep(queue.context)
    for number in range(1, 5):
        assert quick.run() == 0
        assert len(tried) == number * LOCKS_TRIED
    assert {*tried} == {holder.id for holder in holders}
    assert queue.sweep().dead == 0
    assert len(tried) == 8 * LOCKS_TRIED, "a sweep that was asked for tries all"
    for holder in holders[::2]:
        died(holder)
    returned = [quick.run() for _ in range(4)]
    assert sum(returned) == 2 * LOCKS_TRIED
    assert sorted(returned)[-1] == 2 * LOCKS_TRIED, "they seldom die alone: one of them leads to the others"
    for holder in holders[1::2]:
        holder.close()
