"""Locks of whole files: the kernel frees a lock when its holder dies, however that dies.

A lock is a `flock`. On this host's own disks a second lock goes with it, on the same descriptor, of the kind that an
NFS server takes for its clients: a `flock` alone neither sees the locks of those clients, nor do they see it.

The `flock` comes first, so that a program that knows no other lock is excluded, too. Nobody waits for the second lock
with the first in hand: without the second, the first is freed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import weakref
from contextlib import suppress

from filelock import FileLock, lock_descriptor, unlock_descriptor

from dropq.storage.mounts import mount_at
from dropq.storage.reading import inode
from dropq.storage.system_calls import NO_FLAGS, closing

#: What a file system raises that has no locks.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
#: What a second lock raises when another process has it.
_TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES})
#: What locks a range of bytes for an open file, not for a process: it is documented on Linux alone.
_SET: int | None = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" else None
#: Without O_NONBLOCK the open would wait for an NFS client that was lent the file, and for a fifo's other end.
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LockFile:
    """An open lock file.

    A forked child has no part in the lock: it closes its copy of the file, which frees nothing, and there this object
    is closed. So the lock goes with its holder, also if that is killed. It is freed before the file is closed, for the
    child of a fork that Python does not know of.

    Raises:
        FileNotFoundError: there is no such file.
        BlockingIOError: an NFS client was promised that nobody else would open the file. The server has just asked for
            its promise back: try again.
    """

    __slots__ = ("__weakref__", "_fd", "_folder", "_locked", "_path", "device", "inode")

    def __init__(self, path: str, folder: str) -> None:
        self._path = path
        self._folder = folder
        self._locked = False
        self._fd = -1
        _LOCK_FILES.add(self)
        # RACE: a child that another thread forks before this returns keeps its copy, whose number nobody knows yet.
        self._fd = os.open(path, _OPEN)
        found = os.fstat(self._fd)
        #: The open file's inode number, and that of its device.
        self.inode, self.device = found.st_ino, found.st_dev

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # the lock is not freed: this may be a forked child's copy

    @property
    def has_its_name(self) -> bool:
        """Whether the path still leads to the open file."""
        with suppress(FileNotFoundError):
            return inode(self._path) == self.inode
        return False

    def lock(self) -> bool:
        """Try to lock the file; return False where another process has the lock. For an OSError see `are_missing`."""
        self._locked = try_lock(self._fd, self._folder, self.device)
        return self._locked

    def unlock(self) -> None:
        """Free the lock, if it is locked."""
        if self._locked:
            self._locked = False
            unlock(self._fd, self._folder, self.device)

    def close(self) -> None:
        """Free the lock, and close the file; closing twice is no error."""
        try:
            self.unlock()
        finally:
            self._close_copy()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or was opened before the fork that made this process."""
        return self._fd < 0

    def _close_copy(self) -> None:
        """Close the file, and free no lock: a process that has another copy keeps it."""
        self._locked = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


#: The lock files of this process that may be open.
_LOCK_FILES: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_copies() -> None:
    """Close, in a forked child, what the parent has open: else the child would keep the lock of a killed parent."""
    for file in _LOCK_FILES:
        with suppress(OSError):
            file._close_copy()


os.register_at_fork(after_in_child=_close_copies)


class ProcessLock:
    """A lock that a process keeps while it lives; a forked child does not have it.

    `filelock` lends the file's descriptor for the second lock.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = os.path.dirname(path)
        self._fd = -1
        #: The file's inode number, while it is locked.
        self.inode = 0
        self._lock = FileLock(
            path, thread_local=False, fallback_to_soft=False, poll_interval=0.005, on_acquired=self._acquired
        )

    def acquire(self) -> None:
        """Lock the file; OSError if that fails, or another process has it: see `are_missing`.

        FileNotFoundError if there is no such file. One may have been made, with the folders above it.
        """
        expected = inode(self._path)
        self._lock.acquire(timeout=10)
        if self.inode != expected:  # RACE: its folder was renamed away, and `filelock` makes what is missing
            self.release()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)

    def _acquired(self, fd: int) -> None:
        self._fd, self.inode = fd, os.fstat(fd).st_ino
        if not _try_second(fd, self._folder):
            said = "its lock is taken (`dropq doctor` tells what locks this file system has)"
            raise OSError(errno.EAGAIN, said, self._lock.lock_file)

    @property
    def is_locked(self) -> bool:
        """Whether this process has the lock."""
        return self._lock.is_locked

    @property
    def has_a_name(self) -> bool:
        """Whether the file is locked, and still lies somewhere."""
        try:
            return self.is_locked and os.fstat(self._fd).st_nlink > 0
        except OSError:
            return False  # another host removed it: NFS

    def release(self) -> None:
        """Free the lock."""
        if self.is_locked:
            _unlock_second(self._fd, self._folder)
            self._lock.release()


def are_missing(error: OSError) -> bool:
    """Return whether an error says that the file system has no locks."""
    return error.errno in _NO_LOCKS


def try_lock(fd: int, folder: str, device: int | None = None) -> bool:
    """Lock a file of a folder, open for writing; False: another process has it. For an OSError see `are_missing`.

    Give the number of its `device` where that is known: the lock of an NFS file makes what is known old.
    """
    if not lock_descriptor(fd, blocking=False):
        return False
    both = False
    try:
        both = _try_second(fd, folder, device)
    finally:
        if not both:
            unlock_descriptor(fd)
    return both


def unlock(fd: int, folder: str, device: int | None = None) -> None:
    """Free a file's lock for all copies of its descriptor; a close alone would leave the lock to a forked child's."""
    _unlock_second(fd, folder, device)
    with suppress(OSError):  # its holder closes it next, which cannot be refused
        unlock_descriptor(fd)


def has_second(path: str) -> bool:
    """Return whether a file that nobody has locked can have a second lock."""
    if _SET is None:
        return False
    with closing(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
        try:
            _set(fd, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno not in NO_FLAGS:
                raise
            return False
    return True


def _try_second(fd: int, folder: str, device: int | None = None) -> bool:
    """Take the second lock of a file where it has two; return False where another process has it."""
    if not _has_two(folder, os.fstat(fd).st_dev if device is None else device):
        return True
    try:
        _set(fd, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in NO_FLAGS:
            raise
    return True


def _unlock_second(fd: int, folder: str, device: int | None = None) -> None:
    with suppress(OSError):  # as in unlock
        if _has_two(folder, os.fstat(fd).st_dev if device is None else device):
            _set(fd, fcntl.F_UNLCK)


def _has_two(folder: str, device: int) -> bool:
    """Return whether files in a folder have two locks: it is on this host's own disk, which may be served by NFS.

    On an NFS mount both kinds are one lock of the server's, and would exclude each other.
    """
    mount = mount_at(folder, device)
    return _SET is not None and mount is not None and not mount.shared


def _set(fd: int, kind: int) -> None:
    if _SET is not None:
        fcntl.fcntl(fd, _SET, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))  # the whole file, however it grows
