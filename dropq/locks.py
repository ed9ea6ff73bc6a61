"""Locks of whole files: the kernel lets go of a lock when its holder dies, however that dies.

A lock is a `flock`. On this host's own disks a second one goes with it, on the same descriptor, of the kind that an NFS
server takes for its clients: a `flock` alone neither sees the locks of those clients, nor is it seen by them.

The `flock` comes first: a program that knows of no other is excluded, too. Nobody waits for one lock with the other in
hand, and a lock that got only one of the two lets go of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from contextlib import suppress

from dropq.mounts import mount_at

#: What a file system answers that has no locks.
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
#: What it answers when somebody else has the lock.
_TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES})
#: What a kernel or a file system answers that has no locks of the second kind.
_NO_SECOND = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
#: What takes a lock on a range of bytes for an open file, not for a process: it is documented on Linux alone.
_SET: int | None = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" else None


def take(fd: int, folder: str) -> bool:
    """Take the lock of a file that is open for writing; False where somebody else has it.

    Args:
        fd: the file.
        folder: where it lies.

    Raises:
        OSError: the lock cannot be had for another reason: one of NO_LOCKS where the file system has none.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    both = False
    try:
        both = take_second(fd, folder)
    finally:
        if not both:
            fcntl.flock(fd, fcntl.LOCK_UN)
    return both


def take_second(fd: int, folder: str) -> bool:
    """Take what goes with a file's `flock`, where something does; False where somebody else has it.

    Raises:
        OSError: it cannot be had for another reason.
    """
    if not _goes_by_two(folder, os.fstat(fd).st_dev):
        return True
    try:
        _set(fd, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in _NO_SECOND:
            raise
    return True


def let_go(fd: int, folder: str) -> None:
    """Let go of a file's lock for all copies of its descriptor; to close one leaves the lock to a forked child's."""
    let_go_of_second(fd, folder)
    with suppress(OSError):  # its holder closes it next, which cannot be refused
        fcntl.flock(fd, fcntl.LOCK_UN)


def let_go_of_second(fd: int, folder: str) -> None:
    """Let go of what goes with a file's `flock`."""
    with suppress(OSError):  # as above
        if _goes_by_two(folder, os.fstat(fd).st_dev):
            _set(fd, fcntl.F_UNLCK)


def has_second(path: str) -> bool:
    """Tell whether locks of the second kind are to be had for a file that nobody has locked."""
    if _SET is None:
        return False
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _set(fd, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno not in _NO_SECOND:
            raise
        return False
    else:
        return True
    finally:
        os.close(fd)


def _goes_by_two(folder: str, device: int) -> bool:
    """Tell whether a folder is this host's own, which may serve it by NFS.

    On an NFS mount both kinds are one lock of the server's, and would refuse each other.
    """
    mount = mount_at(folder, device)
    return _SET is not None and mount is not None and not mount.shared


def _set(fd: int, kind: int) -> None:
    if _SET is not None:
        fcntl.fcntl(fd, _SET, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))  # of the whole file, however it grows
