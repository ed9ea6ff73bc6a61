"""Which subscriptions are alive: each holds a lock on a file of its own for as long as its process lives.

The kernel lets go of the lock when the process dies, however it dies; whoever can take the lock knows that the
subscription is dead. A subscription without a file, such as that of a shell command, has only its leases.

A lock may be known to one mount alone: below FUSE, on NFS with `nolock`. There the file says which mount's kernel keeps
it; to whoever looks through another mount the lock tells nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from filelock import FileLock

from dropq.mounts import mount_of
from dropq.storage import Storage, entries, inode, read_small

log = logging.getLogger("dropq")

#: What a file system answers that has no locks.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
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


class Presence:
    """A subscription's sign of life, held from construction until `end`."""

    def __init__(self, folder: str, subscription: str, storage: Storage) -> None:
        self._folder = folder
        self._path = f"{folder}/{subscription}"
        self._storage = storage
        self._has_locks = True
        self._begin()

    def _begin(self) -> None:
        draft = f"{self._folder}/.{os.path.basename(self._path)}"
        self._lock = _lock(draft)
        self._inode = 0
        self._storage.make_folder(self._folder)
        try:
            # With the queue's modes: others of its group have to open it to find out that we are dead.
            fd = self._storage.create(draft)
            try:
                os.write(fd, keeper(self._folder))
            finally:
                os.close(fd)
            self._lock.acquire(timeout=10)
            # RACE: a sweep buries what it finds without a lock; so it finds the file only when that is taken.
            self._storage.rename(draft, self._path)
            self._inode = inode(self._path)
        except OSError as error:
            self._storage.unlink(draft)
            if error.errno not in _NO_LOCKS:
                raise
            self._has_locks = False
            log.warning("%s: no locks on this file system: only leases free what a dead consumer holds", self._folder)

    def keep(self) -> None:
        """Take the sign of life up anew where somebody took the file away, so that our death will be seen."""
        if not self._has_locks:
            return
        try:
            if inode(self._path) == self._inode:
                return
        except FileNotFoundError:
            pass
        log.warning("%s was taken away; it is made anew", self._path)
        self._lock.release()
        with suppress(FileNotFoundError):  # the queue is gone: the next look at it tells
            self._begin()

    def place(self) -> tuple[int, int]:
        """Return which one it is, from 0, among how many subscriptions that have a sign of life."""
        own = os.path.basename(self._path)
        seen = sorted({own, *known(self._folder)})
        return seen.index(own), len(seen)

    def end(self) -> None:
        """Take the sign of life down; call it when nothing is held any more."""
        if self._lock.is_locked:
            self._storage.unlink(self._path)  # before the lock goes: afterwards it would be somebody else's to take
            self._lock.release()

    def abandon(self) -> None:
        """Let go of the sign of life, but leave it: the next sweep finds it dead, and returns what it held."""
        self._lock.release()


def _lock(path: str) -> FileLock:
    return FileLock(path, thread_local=False, fallback_to_soft=False, poll_interval=0.005)


def keeper(folder: str) -> bytes:
    """Return which kernel keeps the locks of a folder, and of which mount; empty where all mounts share them."""
    device = os.stat(folder).st_dev
    return b"%s %d\n" % (_boot(), device) if _kept_by_mount(folder, device) else b""


@cache
def _kept_by_mount(folder: str, device: int) -> bool:
    """Tell whether locks may be known to one mount alone; another device is another mount of the same folder."""
    mount = mount_of(folder)
    return mount is not None and mount.keeps_locks


@cache
def _boot() -> bytes:
    return (read_small(_BOOT) or os.uname().nodename.encode()).strip()


def can_be_told(folder: str, subscription: str) -> bool:
    """Tell whether its lock tells, here, if a subscription is alive: not if another mount keeps it."""
    try:
        kept = keeper(folder)
        return not kept or read_small(f"{folder}/{subscription}") == kept
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
    except (FileNotFoundError, PermissionError):
        yield False  # ended by itself; or another user's: its own sweeps, or its leases, see to it
        return
    try:
        # RACE: several sweeps at once; the one that gets the lock returns what the dead subscription held. Closing
        # lets go of it again.
        yield _locked(fd) and can_be_told(folder, subscription) and _is_the_file(fd, path)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS | {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        return False  # alive, in a sweep's hands, or without locks
    return True


def _is_the_file(fd: int, path: str) -> bool:
    with suppress(FileNotFoundError):  # RACE: another sweep was first, and buried it
        return inode(path) == os.fstat(fd).st_ino
    return False


def bury(folder: str, subscription: str, storage: Storage) -> None:
    """Forget a dead subscription that holds nothing any more; call it while it is found dead."""
    storage.unlink(f"{folder}/{subscription}")
