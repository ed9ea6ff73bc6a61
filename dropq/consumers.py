"""Which subscriptions are alive: each holds a lock on a file of its own for as long as its process lives.

The kernel lets go of the lock when the process dies, however it dies; a sweep that can take the lock knows that the
subscription is dead. A subscription without a file, such as that of a shell command, has only its leases.

Not every two mounts of a folder know each other's locks, so the file says who knows this one: its mark. A sweep that
finds another mark than its own mount's learns nothing from the lock.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from filelock import FileLock

from dropq import locks
from dropq.mounts import mount_at
from dropq.storage import Storage, device, entries, inode, read_small

log = logging.getLogger("dropq")

#: Where a host tells one of its boots from every other's.
_BOOT = "/proc/sys/kernel/random/boot_id"


class _Forks:
    """How many forks lie between this process and the one that imported this module, without a system call."""

    def __init__(self) -> None:
        self.count = 0

    def one_more(self) -> None:
        self.count += 1


FORKS = _Forks()
os.register_at_fork(after_in_child=FORKS.one_more)


class Sign:
    """A locked file. The library that takes the `flock` lends its descriptor for what goes with it."""

    def __init__(self, path: str) -> None:
        self._folder = os.path.dirname(path)
        self._fd = -1
        #: The file's inode number, while it is locked.
        self.inode = 0
        self._lock = FileLock(
            path, thread_local=False, fallback_to_soft=False, poll_interval=0.005, on_acquired=self._acquired
        )

    def lock(self) -> None:
        """Take the lock.

        Raises:
            OSError: it cannot be had.
        """
        self._lock.acquire(timeout=10)

    def _acquired(self, fd: int) -> None:
        self._fd, self.inode = fd, os.fstat(fd).st_ino
        if not locks.take_second(fd, self._folder):
            said = "its lock is taken (`dropq doctor` tells what locks this file system has)"
            raise OSError(errno.EAGAIN, said, self._lock.lock_file)

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock: a forked child does not."""
        return self._lock.is_locked

    @property
    def has_a_name(self) -> bool:
        """Whether the file is locked, and still lies somewhere."""
        try:
            return self.is_locked and os.fstat(self._fd).st_nlink > 0
        except OSError:
            return False  # another host removed it: NFS

    def release(self) -> None:
        """Let go of the lock."""
        if self.is_locked:
            locks.let_go_of_second(self._fd, self._folder)
            self._lock.release()


class Presence:
    """A subscription's sign of life, held from construction until `end`."""

    def __init__(self, folder: str, subscription: str, storage: Storage) -> None:
        self._folder = folder
        self._path = f"{folder}/{subscription}"
        self._storage = storage
        #: The signs that are held: one, unless the folder was another for a while. None where there are no locks.
        self._signs = self._made()

    def _made(self) -> list[Sign]:
        draft = f"{self._folder}/.{os.path.basename(self._path)}"
        self._storage.make_folder(self._folder)
        sign = Sign(draft)
        try:
            # With the queue's modes: others of its group have to open it to find out that we are dead.
            fd = self._storage.create(draft)
            try:
                os.write(fd, mark(self._folder))
            finally:
                os.close(fd)
            sign.lock()
            # RACE: a sweep buries what it finds without a lock; so it finds the file only when that is taken.
            self._storage.rename(draft, self._path)
        except OSError as error:
            sign.release()
            self._storage.unlink(draft)
            if error.errno not in locks.NO_LOCKS:
                raise
            log.warning("%s: no locks on this file system: only leases free what a dead consumer holds", self._folder)
            return []
        return [sign]

    def keep(self) -> None:
        """Make a new sign of life where somebody took the file away, so that a sweep will see our death.

        What is held already stays held meanwhile: if the folder comes back, we have not been dead for a moment.
        """
        if not self._signs:
            return
        with suppress(FileNotFoundError):
            found = inode(self._path)
            if any(sign.inode == found for sign in self._signs):
                return
        try:
            made = self._made()
        except FileNotFoundError:
            return  # the queue is gone, or away for a moment: the next look at it tells
        log.warning("%s was taken away: it was made again", self._path)
        for sign in self._signs:
            if sign.has_a_name:
                made.append(sign)  # it went with the folder, and may come back with it
            else:
                sign.release()
        self._signs = made

    def place(self) -> tuple[int, int]:
        """Return which one it is, from 0, among how many subscriptions that have a sign of life."""
        own = os.path.basename(self._path)
        seen = sorted({own, *known(self._folder)})
        return seen.index(own), len(seen)

    def end(self) -> None:
        """Take the sign of life down; call it when nothing is held any more."""
        if any(sign.is_locked for sign in self._signs):
            self._storage.unlink(self._path)  # before the lock goes: afterwards it would be somebody else's to take
            self.abandon()

    def abandon(self) -> None:
        """Let go of the sign of life, but leave it: the next sweep finds it dead, and returns what it held."""
        for sign in self._signs:
            sign.release()


def mark(folder: str) -> bytes:
    """Return who knows the locks that are taken in a folder; two that have the same mark know each other's.

    It is empty on this host's own disks and on NFS; the name of another file system that passes locks on to all its
    hosts; else it names the kernel and the mount that know the lock.
    """
    number = device(folder)
    mount = mount_at(folder, number)
    if mount is None:
        return b""
    if mount.keeps_locks:
        return b"%s %d\n" % (_boot(), number)
    return f"{mount.sharing_locks}\n".encode() if mount.sharing_locks else b""


@cache
def _boot() -> bytes:
    return (read_small(_BOOT) or os.uname().nodename.encode()).strip()


def can_be_told(folder: str, subscription: str) -> bool:
    """Tell whether its lock tells, here, if a subscription is alive: not if the file has another mark than ours."""
    try:
        return (read_small(f"{folder}/{subscription}") or b"") == mark(folder)
    except OSError:
        return False


def known(folder: str) -> frozenset[str]:
    """Return the subscriptions that have a file, alive or dead; a name with a dot is a draft, or kept by NFS."""
    return frozenset(entry.name for entry in entries(folder) if entry.name[0] != ".")


def is_dead(folder: str, subscription: str) -> bool:
    """Tell whether a subscription that has a file is dead, and change nothing; False where it cannot be told."""
    try:
        with dead(folder, subscription) as found:
            return found
    except OSError:
        return False


@contextmanager
def dead(folder: str, subscription: str) -> Iterator[bool]:
    """Tell whether a subscription is dead, and keep others from finding it dead too while its claims are returned."""
    path = f"{folder}/{subscription}"
    try:
        # As FileLock does, but for making the file: it may have gone since it was listed.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError, BlockingIOError):
        # Ended by itself; or another user's: its own sweeps, or its leases, see to it; or an NFS client was promised
        # that nobody else would open the file: the server has just asked for its promise back, and the next sweep sees.
        yield False
        return
    locked = False
    try:
        # RACE: several sweeps at once; the one that gets the lock returns what the dead subscription held.
        locked = _locked(fd, folder)
        yield locked and can_be_told(folder, subscription) and _is_the_file(fd, path)
    finally:
        if locked:
            locks.let_go(fd, folder)
        os.close(fd)


def _locked(fd: int, folder: str) -> bool:
    try:
        return locks.take(fd, folder)
    except OSError as error:
        if error.errno not in locks.NO_LOCKS:
            raise
        return False


def _is_the_file(fd: int, path: str) -> bool:
    with suppress(FileNotFoundError):  # RACE: another sweep was first, and buried it
        return inode(path) == os.fstat(fd).st_ino
    return False


def bury(folder: str, subscription: str, storage: Storage) -> None:
    """Forget a dead subscription that holds nothing any more; call it while it is found dead."""
    storage.unlink(f"{folder}/{subscription}")
