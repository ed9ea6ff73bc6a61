"""System calls as dropq needs them: a rename that replaces nothing, a sync of a whole file system, an open that neither
follows links nor blocks."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dropq.storage.mounts import mount_of

#: Permission bits of new files when the configuration has none; the umask applies to them.
FILE_MODE = 0o664
#: Seconds to wait until an NFS server on this host has taken back a file that it lent to one client alone.
RECALL_LIMIT = 10.0
#: Without O_NONBLOCK the open of a fifo that lies under a name of ours would wait.
TOUCH = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: What a call raises when the kernel or the file system lacks it, or its flags.
NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
#: The current folder of the process, in the place of a folder's descriptor.
HERE = -100
_RENAME_NOREPLACE = 1
#: Of `statx`: the inode, the size and the ctime; of a link itself; and asked of the file system, whatever the kernel
#: remembers; and the bytes at which the answer has them.
_WANTED, _NO_FOLLOW, _ASKED, _STATX_BYTES, _INODE_AT, _SIZE_AT, _CTIME_AT = 0x380, 0x100, 0x2000, 256, 32, 40, 96
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
#: File systems that one call syncs as a whole. It syncs btrfs, too, but there a file that is renamed after it may have
#: both names after a power cut, until both folders are synced; a file that was synced by itself has one.
_SYNCED_WHOLE = frozenset({"ext4", "xfs", "tmpfs"})


def _from_c_library(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return None  # not Linux, or a C library without it


# Called with int and bytes alone: ctypes passes those on without argtypes, and faster.
_renameat2 = _from_c_library("renameat2")
_syncfs = _from_c_library("syncfs")
_statx = _from_c_library("statx")


def rename_noreplace(source: str, destination: str, folder: int = HERE, source_folder: int = HERE) -> None:
    """Rename a file unless the destination exists, in one system call; OSError of `NO_FLAGS` where there is none.

    A relative `destination` begins in the open `folder`, and a relative `source` in the open `source_folder`.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    old, new = source.encode(_ENCODING, _ERRORS), destination.encode(_ENCODING, _ERRORS)
    if _renameat2(source_folder, old, folder, new, _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, destination)


class Asked(NamedTuple):
    """What a file system said of a file: its inode, its ctime in nanoseconds, and its size in bytes."""

    inode: int
    changed_ns: int
    size: int


def ask(path: str, folder: int = HERE, *, follows: bool = False) -> Asked | None:
    """Return what a file is as its file system has it now, whatever the kernel remembers: over NFS this is one call.

    Return None where the C library, the kernel or a container's rules do not let it ask. A relative `path` begins in
    the open `folder`; of a link, this returns what it leads to only if it `follows`.
    """
    if _statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(folder, path.encode(_ENCODING, _ERRORS), _ASKED | (0 if follows else _NO_FOLLOW), _WANTED, answer) != 0:
        number = ctypes.get_errno()
        if number in NO_FLAGS or number == errno.EPERM:  # to ask takes no permission
            return None
        raise OSError(number, os.strerror(number), path)
    inode, size = (int.from_bytes(answer.raw[at : at + 8], sys.byteorder) for at in (_INODE_AT, _SIZE_AT))
    seconds, nanoseconds = struct.unpack_from("qI", answer.raw, _CTIME_AT)
    return Asked(inode, seconds * 1_000_000_000 + nanoseconds, size)


def is_missing(path: str) -> bool:
    """Return whether nothing has this path, as its file system has it now; False where that cannot be looked at."""
    try:
        if ask(path) is None:
            os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def size_asked(path: str, folder: int = HERE) -> int | None:
    """Return a file's size in bytes; arguments as of `ask`, None where that returns it."""
    asked = ask(path, folder)
    return None if asked is None else asked.size


def sync_whole(fd: int, path: str) -> None:
    """Make durable what was written to an open file's file system; OSError if any write failed since it was opened."""
    if _syncfs is None or _syncfs(fd) != 0:
        number = ctypes.get_errno() if _syncfs else errno.ENOSYS
        raise OSError(number, os.strerror(number), path)


def can_sync_whole(path: str) -> bool:
    """Return whether one call syncs a whole file system, and reports what failed.

    FUSE does not pass the call on, other file systems are not known to, and kernels before 5.8 did not report errors.
    The answer is not kept, as another file system may get the device's number later; asking costs less than a sync.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    reports = release is not None and (int(release[1]), int(release[2])) >= (5, 8)
    mount = mount_of(path) if reports and _syncfs is not None else None
    return mount is not None and mount.kind in _SYNCED_WHOLE


def open_file(path: str, flags: int) -> int:
    """Open a file; wait for an NFS server that has lent it to a client, but not for a fifo's other end.

    On the server's own host the open of a lent file fails (EAGAIN), and makes the server ask the client for the file.
    """
    try:
        return os.open(path, flags, FILE_MODE)
    except BlockingIOError:
        give_up = time.monotonic() + RECALL_LIMIT
    while True:
        time.sleep(0.001)
        try:
            return os.open(path, flags, FILE_MODE)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a file when the block ends; yield its descriptor."""
    try:
        yield fd
    finally:
        os.close(fd)
