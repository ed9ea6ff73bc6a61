"""The only module that renames, links, unlinks and syncs, and the file server's clock.

A rename here either happened or raised; a name that stood in a folder is never replaced. `rename` is for
destinations that are unique by construction, `move` for those that are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import logging
import math
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import IO, Any, Protocol, TypeVar

from dropq.errors import StorageError
from dropq.layout import PRIVATE, ignored_ends, ignoring
from dropq.mounts import mount_at, mount_of

log = logging.getLogger("dropq")

#: Nanoseconds after which a folder's time tells its next change from the last, on whatever file system.
SETTLED_NS = 2_000_000_000

#: Permission bits of what is created when the configuration does not say; the umask applies to them.
FILE_MODE = 0o664
DIR_MODE = 0o775
#: The mode of an empty file that reserves its name for a move: nobody may open it, and no message has the sticky bit.
RESERVED_MODE = 0o1000
#: Seconds after which the offset to the file server's clock is measured again.
CLOCK_INTERVAL = 60.0
#: Seconds after which it is measured again before a lease is made: its end has to be right on every host.
LEASE_INTERVAL = 1.0
#: Seconds of difference that are put down to coarse time stamps rather than to another clock.
CLOCK_TOLERANCE = 0.05
#: How often a measurement that took longer than that is made anew.
CLOCK_TRIES = 3
#: Seconds after which a folder that does not become empty is given up.
DRAIN_LIMIT = 10.0
#: How often a rename over a file has to be refused, and one beside it not, before a file system counts as one that
#: never replaces: one that fails now and then does not.
PROOFS = 5
#: Seconds that an NFS server on this host is given to take a file back that it lent to a client for the client alone.
RECALL_LIMIT = 10.0
#: How deeply what is read as JSON may be nested.
DEPTH = 50
#: Entries of a folder that are looked at together.
CHUNK = 4096
#: Bytes that one read of a body asks for.
READ_SIZE = 1 << 16
#: Threads that share a long list of renames: one does its Python while the other is in the kernel, which makes no two
#: renames between folders of one file system at a time.
THREADS = 2
#: Shorter lists are not worth a thread.
LONG_LIST = 1000
#: So many files are made durable by one sync of their file system, which is several times as quick as one by one. Of
#: fewer each is synced by itself, since the one sync waits for all that anybody wrote.
SYNCED_TOGETHER = 32

_STEADY_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
#: Without O_NONBLOCK a fifo that lies under a name of ours would keep who opens it.
_TOUCH = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: File systems on which one call syncs all of it. On btrfs it does, but a file that is renamed after that may have both
#: names after a power cut, until both folders are synced; a file that was synced by itself has one.
_SYNCED_WHOLE = frozenset({"ext4", "xfs", "tmpfs"})
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
#: What one answers that never replaces a file, of a name that is taken: HDFS, and others that are stores beneath.
_TAKEN = frozenset({errno.EEXIST, errno.EIO})
#: What a file system answers that has no modes, also to the owner of a file.
_NO_MODES = _NO_FLAGS | {errno.EPERM}

T = TypeVar("T")


class Clock(Protocol):
    """What tells the time: milliseconds since 1970 UTC."""

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970 UTC."""


def told(error: Exception) -> str:
    """Return what an error says: of a refused call what refused and where, of a rename from where and to where."""
    if not isinstance(error, OSError):
        return str(error)
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, str | bytes)]
    return f"{error.strerror or error}{' at ' if paths else ''}{' -> '.join(paths)}"


def storage_error(error: OSError, fate: str) -> StorageError:
    """Return the StorageError for a refused call: what refused, where, and what became of the message."""
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    return StorageError(f"{told(error)}; {fate}", path=path, errno=error.errno)


@contextlib.contextmanager
def telling(fate: str) -> Iterator[None]:
    """Raise a StorageError for a call that is refused meanwhile: it tells what became of the messages."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, fate) from error


def refuse_links(folders: Iterable[str]) -> None:
    """Refuse private folders that are symbolic links: what is written, or cleared away, there would be elsewhere.

    Raises:
        StorageError: with ELOOP, one is.
    """
    for path in folders:
        if os.path.islink(path):
            raise StorageError(
                f"{path} is a symbolic link, and dropq follows none to private files: look where it leads, as delayed "
                "messages, reasons or metadata may lie there, then remove it: whoever needs the folder makes it again; "
                "nothing was touched",
                path=path,
                errno=errno.ELOOP,
            )


def _since_boot() -> float:
    """Return seconds on a clock that only goes on: also while the host sleeps, where there is such a one."""
    return time.clock_gettime(_STEADY_CLOCK)


class ServerClock:
    """The file server's clock, as the modification time of a probe file shows it.

    Hosts that share a mount agree on leases and delays through it, however wrong their own clocks are. A process
    that may not write the probe file uses its own clock.

    It counts on from a measurement by the clock since boot, which stands still while a virtual machine is paused. When
    this host's clock has stepped against that one, as it does when it is set right after a pause, it measures at once.
    A pause that no step shows, and a step of the server's own clock, make it wrong until the next measurement: for
    `CLOCK_INTERVAL` at the most, and for `LEASE_INTERVAL` where the end of a lease is told.
    """

    def __init__(self, probe: str) -> None:
        self._probe = probe
        self._ahead = 0.0
        self._own = 0.0
        self._measured_at = -math.inf

    def now_ms(self) -> int:
        """Return the server's time in milliseconds since 1970 UTC."""
        return self._told(CLOCK_INTERVAL)

    def lease_ms(self) -> int:
        """Return the same by a measurement of the last second, for the end of a lease."""
        return self._told(LEASE_INTERVAL)

    def _told(self, interval: float) -> int:
        now = _since_boot()
        own = time.time() - now
        if now >= self._measured_at + interval or abs(own - self._own) > CLOCK_TOLERANCE:
            self._own = own  # before the measurement: a step that comes within it is seen by the next call
            self._ahead = self._measure()
            now = self._measured_at = _since_boot()
        return int((now + self._ahead) * 1000)

    def offset(self) -> float:
        """Return by how many seconds the server's clock is ahead of this host's, as far as it can be measured."""
        return self._measure() - (time.time() - _since_boot())

    def _measure(self) -> float:
        """Return by how many seconds the server's time is ahead of that since boot."""
        try:
            fd = _open(self._probe, _TOUCH)
        except OSError:
            return time.time() - _since_boot()  # not ours to write, or no root yet: our own clock it is
        try:
            within, ahead = self._compared(fd)
        except OSError:
            return time.time() - _since_boot()
        finally:
            os.close(fd)
        own = time.time() - _since_boot()
        return ahead if abs(ahead - own) > within + CLOCK_TOLERANCE else own

    def _compared(self, fd: int) -> tuple[float, float]:
        """Touch the probe file; return by how much the server's time is ahead, after how exactly that is known.

        RACE: whatever stops this process in between, and whoever else touches the file meanwhile, the time that it
        shows is one between the two that are taken here. What took long is done again.
        """
        tries = []
        for _ in range(CLOCK_TRIES):
            before = _since_boot()
            os.utime(fd)
            shown = os.fstat(fd).st_mtime
            after = _since_boot()
            tries.append((after - before, shown - (before + after) / 2))
            if after - before <= CLOCK_TOLERANCE:
                break
        return min(tries)


def lease_end(clock: Clock, period: float) -> int:
    """Return when a lease of so many seconds that begins now runs out, in milliseconds since 1970 UTC."""
    now = clock.lease_ms() if isinstance(clock, ServerClock) else clock.now_ms()
    return now + int(period * 1000)


def _open(path: str, flags: int) -> int:
    """Open a file without waiting for a fifo's other end, but for an NFS server that has lent the file to a client.

    On the server's own host such an open is refused (EAGAIN), and has the server ask the client to give the file back.
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


def _unless_done(error: OSError, source: str, destination: str) -> None:
    """Raise the error of a rename, unless it was done all the same: its answer was lost, or its server went."""
    if not os.path.lexists(destination) or os.path.lexists(source):
        raise error


def _is_still(path: str, reserved: int) -> bool:
    """Tell whether a name is still a reservation of ours; opened anew, as NFS caches what lstat says.

    Its mode is not asked: a file system that has no modes shows another.
    """
    try:
        fd = _open(path, _READ)
    except PermissionError:
        found = os.lstat(path)  # nobody may open a reservation
        return found.st_ino == reserved and not found.st_size
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return found.st_ino == reserved and not found.st_size


def _from_c_library(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return None  # not Linux, or a C library without it


# Called with int and bytes alone, which ctypes passes on by itself, and sooner than by argtypes.
_renameat2 = _from_c_library("renameat2")
_syncfs = _from_c_library("syncfs")


def rename_noreplace(source: str, destination: str) -> None:
    """Rename a file unless the destination exists, in one call of the kernel.

    Raises:
        FileExistsError: the destination exists.
        OSError: with EINVAL or ENOSYS where the file system or the kernel has no such call.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    old, new = source.encode(_ENCODING, _ERRORS), destination.encode(_ENCODING, _ERRORS)
    if _renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, destination)


def sync_whole(fd: int, path: str) -> None:
    """Make all durable that was written to the file system of an open file.

    Raises:
        OSError: something could not be written since it was opened; that may be another's.
    """
    if _syncfs is None or _syncfs(fd) != 0:
        number = ctypes.get_errno() if _syncfs else errno.ENOSYS
        raise OSError(number, os.strerror(number), path)


def _can_sync_whole(path: str) -> bool:
    """Tell whether one call syncs all that was written to a file system, and tells of what failed.

    FUSE does not pass the call on, others are not known to, and before 5.8 the kernel kept errors to itself. It is
    found out each time, which costs less than a sync: a device's number may be another file system's later.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    tells = release is not None and (int(release[1]), int(release[2])) >= (5, 8)
    mount = mount_of(path) if tells and _syncfs is not None else None
    return mount is not None and mount.kind in _SYNCED_WHOLE


class Draft(io.FileIO):
    """A body that is being written piece by piece, by whoever does not know what a refused write means for it.

    Args:
        fd: where it is written; closed with it.
        refused: makes the error that is raised of the one that the file system gives.
    """

    def __init__(self, fd: int, refused: Callable[[OSError], Exception]) -> None:
        super().__init__(fd, "wb")
        self._refused = refused

    def write(self, data: Any, /) -> int:
        """Write a piece, or the beginning of it; return how many bytes it was."""
        try:
            return os.write(self.fileno(), data)
        except OSError as error:
            raise self._refused(error) from error


class Storage:
    """The calls that change a root, with one durability and one set of modes.

    Args:
        durability: `none`, `file` (bodies are synced before they are sent) or `full` (folders too).
        file_mode, dir_mode: permission bits of what is created; None leaves them to the umask.
        group: the numeric group of what is created; None leaves it to the system.
        base: a folder that is never made, nor any above it: what is put in a queue that was deleted fails.
        lenient: modes and group are set where the file system has such; that it has none is no error.
    """

    def __init__(
        self,
        durability: str = "full",
        *,
        file_mode: int | None = None,
        dir_mode: int | None = None,
        group: int | None = None,
        base: str | None = None,
        lenient: bool = False,
    ) -> None:
        self.durability = durability
        self.syncs_files = durability != "none"
        self.syncs_folders = durability == "full"
        self._file_mode = file_mode
        self._dir_mode = dir_mode
        self._group = group
        self._base = base
        self._lenient = lenient
        self._create_mode = FILE_MODE if file_mode is None else file_mode
        self._owns = file_mode is not None or group is not None
        self._noreplace = True
        self._replaces = True
        self._tried_to_replace = False

    # -- writing -----------------------------------------------------------------------------------------

    def create(self, path: str) -> int:
        """Create a file that was not there and return its descriptor, open for writing."""
        fd = os.open(path, _CREATE, self._create_mode)
        if self._owns:
            try:
                self._own(fd, self._file_mode)
            except OSError:
                os.close(fd)
                os.unlink(path)
                raise
        return fd

    def write_new(self, path: str, data: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a file that was not there; a failure leaves none.

        Args:
            path: the file.
            data: its content.
            synced: make it durable at once, as far as that is asked for; else `together` does.
        """
        fd = self.create(path)
        try:
            try:
                written = os.write(fd, data)
                while written < len(data):
                    written += os.write(fd, data[written:])
                if synced and self.syncs_files:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    @contextlib.contextmanager
    def together(self, folder: str, count: int) -> Iterator[bool]:
        """Make so many files durable that are written into a folder meanwhile, in whichever way is quicker.

        Yields:
            Whether each is to be synced as it is written. Else its file system is synced as a whole at the end.
        """
        if not self.syncs_files or count < SYNCED_TOGETHER or not _can_sync_whole(folder):
            yield True
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # first: it is told of errors from now on
        try:
            yield False
            sync_whole(fd, folder)
        finally:
            os.close(fd)

    def write_all(self, folder: str, files: Sequence[str], bodies: Iterable[bytes | memoryview]) -> None:
        """Write many files that were not there into a folder that goes as a whole when one of them fails."""
        mode, owns = self._create_mode, self._owns
        with self.together(folder, len(files)) as each:
            syncs = each and self.syncs_files
            for name, data in zip(files, bodies, strict=True):
                fd = os.open(f"{folder}/{name}", _CREATE, mode)
                try:
                    if owns:
                        self._own(fd, self._file_mode)
                    written = os.write(fd, data)
                    while written < len(data):
                        written += os.write(fd, data[written:])
                    if syncs:
                        os.fsync(fd)
                finally:
                    os.close(fd)

    def write_small(self, path: str, data: bytes, *, by: str | None = None) -> None:
        """Replace a small file of ours whole: a reader sees the old content or the new, also after a crash.

        Args:
            path: the file.
            data: its new content.
            by: where to write it first, beside the file; a name of nobody else's. None makes one.
        """
        folder, name = os.path.split(path)
        temporary = by or f"{folder}/.{name[:100]}.{os.urandom(6).hex()}.tmp"
        if by is not None:
            self.unlink(by)  # what an error left
        self.write_new(temporary, data)
        try:
            try:
                self.rename(temporary, path)
            except OSError as error:
                if not self._is_taken(error, path):
                    raise
                self.unlink(path)
                self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync(folder)

    def touch(self, path: str) -> None:
        """Make an empty file of ours, such as a read-lock; that it exists is no error."""
        with contextlib.suppress(FileExistsError):
            self.write_new(path, b"")
            self.sync(os.path.dirname(path))

    def stamp(self, path: str) -> None:
        """Give an empty file of ours the file server's time, and make it where it is missing."""
        self.touch(path)
        fd = _open(path, _TOUCH)
        try:
            os.utime(fd)
        finally:
            os.close(fd)

    def adopt(self, source: str, destination: str) -> None:
        """Move a file from outside into working/, with the modes of what is created here; a failure moves it back.

        Where no modes are set it keeps its own, but for the permission that lets everybody change it.

        Raises:
            OSError: with EXDEV when it lies on another file system.
        """
        self.rename(source, destination)
        try:
            self._take_over(destination)
        except BaseException:
            self.move(destination, source)
            raise

    def _take_over(self, path: str) -> None:
        fd = _open(path, _READ)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            kept = mode & ~stat.S_IWOTH if mode & stat.S_IWOTH else None
            self._own(fd, kept if self._file_mode is None else self._file_mode)
            self.sync_file(fd)
        finally:
            os.close(fd)

    def link(self, source: str, destination: str) -> None:
        """Give a file a second name."""
        os.link(source, destination, follow_symlinks=False)

    def link_or_copy(self, source: str, destination: str) -> None:
        """Give a file a second name; where links are not to be had, copy it."""
        try:
            self.link(source, destination)
        except FileNotFoundError:
            raise
        except OSError as error:
            # RACE: over NFS a link whose reply was lost is made again, and is there.
            if isinstance(error, FileExistsError) and os.path.samefile(source, destination):
                return
            self.copy(source, destination, synced=False)

    def copy(self, source: str, destination: str, *, synced: bool = True) -> None:
        """Write a file that was not there as a copy of another, which stays as it is; a failure leaves none.

        The copy tells when its content was written as the other does, where the file system can keep that.

        Args:
            source: the file that is copied.
            destination: the copy.
            synced: make it durable at once, as far as that is asked for.
        """
        with open_body(source) as reading:
            fd = self.create(destination)
            try:
                with open(fd, "wb") as writing:
                    shutil.copyfileobj(reading, writing, READ_SIZE)
                    writing.flush()
                    found = os.fstat(reading.fileno())
                    with contextlib.suppress(OSError):
                        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
                    if synced:
                        self.sync_file(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(destination)
                raise

    # -- moving ------------------------------------------------------------------------------------------

    def rename(self, source: str, destination: str) -> None:
        """Rename a file to a name that is unique by construction.

        Raises:
            FileNotFoundError: the source is gone, and it was not this rename that took it.
        """
        try:
            os.rename(source, destination)
        except OSError as error:
            # RACE: over NFS a rename whose reply was lost is sent again and finds nothing. The destination was
            # never anybody else's, so if it is there, this rename made it.
            _unless_done(error, source, destination)

    def move(self, source: str, destination: str) -> None:
        """Rename a file to a name that somebody else may have taken.

        Raises:
            FileExistsError: the destination exists; nothing was changed.
            FileNotFoundError: the source is gone.
        """
        if self._noreplace and self._without_replacing(source, destination):
            return
        if not self._tried_to_replace:
            self._tried_to_replace = True
            self._replaces = self._replaces and self._can_replace(destination)
        if self._replaces:
            return self._move_by_reservation(source, destination)
        self._rename_to_free(source, destination)

    def _without_replacing(self, source: str, destination: str) -> bool:
        """Rename a file and replace nothing; False where the kernel has no such call, as on NFS and most FUSE ones."""
        try:
            rename_noreplace(source, destination)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            if error.errno in _NO_FLAGS:
                self._noreplace = False
                return False
            _unless_done(error, source, destination)
        return True

    def _move_by_reservation(self, source: str, destination: str) -> None:
        # RACE: O_EXCL decides who has the name; the empty file of this mode is renamed over. A crash
        # in between leaves it behind; fsck knows it by its mode.
        fd = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, RESERVED_MODE)
        reserved = os.fstat(fd).st_ino
        os.close(fd)
        try:
            os.rename(source, destination)
        except BaseException as error:
            # RACE: a lost reply of NFS again, or a signal on the way back: if the reservation is gone, and the source
            # with it, it was our rename that replaced it, and what lies there is the file itself.
            if not _is_still(destination, reserved):
                if isinstance(error, OSError) and os.path.lexists(destination) and not os.path.lexists(source):
                    return
                raise  # the reservation went with its folder
            os.unlink(destination)
            if not isinstance(error, OSError) or not self._is_taken(error, destination):
                raise
            self._rename_to_free(source, destination)  # where nothing is ever replaced a plain rename is the safe one

    def _rename_to_free(self, source: str, destination: str) -> None:
        """Rename a file to a name that nobody has, on a file system that never replaces.

        Raises:
            FileExistsError: somebody has it.
        """
        taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)
        if os.path.lexists(destination):
            raise taken
        try:
            os.rename(source, destination)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            if self._is_taken(error, destination) and os.path.lexists(source) and os.path.lexists(destination):
                raise taken from error
            _unless_done(error, source, destination)

    def _is_taken(self, error: OSError, destination: str) -> bool:
        """Tell whether a rename over a file was refused because this file system never replaces one."""
        if self._replaces and self._never_replaces(error, destination):
            self._replaces = False
        return not self._replaces and error.errno in _TAKEN

    def _can_replace(self, destination: str) -> bool:
        """Try with files of our own whether a rename replaces a file, before the first name is reserved by one.

        Where it does not, a crash would leave the reservation, and where there are no modes that is an empty message.
        """
        ours = f"{self._own_folder(destination)}/.gone-{os.urandom(8).hex()}"
        try:
            for path in (ours, f"{ours}-taken"):
                os.close(os.open(path, _CREATE, self._create_mode))
            os.rename(ours, f"{ours}-taken")
        except OSError as error:
            return not self._never_replaces(error, destination)
        finally:
            for path in (ours, f"{ours}-taken"):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return True

    def _own_folder(self, destination: str) -> str:
        return os.path.dirname(destination) if self._base is None else f"{self._base}/{PRIVATE}"

    def _never_replaces(self, error: OSError, destination: str) -> bool:
        """Find out with files of our own: HDFS says EIO of a name that is taken, as a disk that fails does of any."""
        if error.errno not in _TAKEN:
            return False
        ours = f"{self._own_folder(destination)}/.gone-{os.urandom(8).hex()}"
        taken, free = f"{ours}-taken", f"{ours}-free"
        try:
            for path in (ours, taken):
                os.close(os.open(path, _CREATE, self._create_mode))
            for _ in range(PROOFS):
                try:
                    os.rename(ours, taken)
                    return False
                except OSError as refused:
                    if refused.errno != error.errno:
                        return False
                os.rename(ours, free)
                os.rename(free, ours)
        except OSError:
            return False
        finally:
            for path in (ours, taken, free):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return True

    def discard(self, path: str, folder: str) -> None:
        """Remove a message for good: take it out by a rename to a private name, then unlink it.

        What the rename took out is gone from its queue; what cannot be removed now, a sweep does.

        Raises:
            FileNotFoundError: somebody else took it first.
        """
        private = f"{folder}/.gone-{os.urandom(8).hex()}"
        self.rename(path, private)
        try:
            self.unlink(private)  # RACE: over NFS a removal whose reply was lost is sent again and finds nothing
        except OSError as error:
            log.warning("%s is nobody's any more, and stays until a sweep clears it: %s", private, told(error))

    def place(self, source: str, destination: str) -> None:
        """Rename a file to a name that is unique by construction, and replace nothing where the kernel helps.

        Raises:
            FileExistsError: the name is taken all the same, by a copy that somebody made; nothing was changed.
            FileNotFoundError: the source is gone.
        """
        if not (self._noreplace and self._without_replacing(source, destination)):
            self.rename(source, destination)

    def unlink(self, path: str) -> bool:
        """Remove a file of ours; False when it was gone already."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    # -- folders -----------------------------------------------------------------------------------------

    def make_folder(self, path: str, *, parents: bool = True, passing: bool = False) -> None:
        """Create a folder and those above it that are missing; that it exists is no error.

        Args:
            path: the folder.
            parents: create those above it.
            passing: it will soon be gone, and need not outlive a power cut.

        Raises:
            NotADirectoryError: something else lies in its place.
        """
        try:
            os.mkdir(path, DIR_MODE if self._dir_mode is None else self._dir_mode)
        except FileExistsError:
            if not os.path.isdir(path):  # an error of its own: it must not pass for a message's name that is taken
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            return
        except FileNotFoundError:
            if not parents or os.path.dirname(path) == self._base:
                raise  # RACE: the queue was deleted; nothing brings its folder back
            self.make_folder(os.path.dirname(path))
            return self.make_folder(
                path, parents=False, passing=passing
            )  # once: /proc says ENOENT however many parents there are
        if self._dir_mode is not None or self._group is not None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._own(fd, self._dir_mode)
            finally:
                os.close(fd)
        if not passing:
            self.sync(os.path.dirname(path))

    def make_folder_like(self, path: str, model: str) -> None:
        """Create a folder with the owner, group and mode of another; what cannot be given stays as it was made.

        A mode that was asked for goes before the other's, of which everybody's permission to write is not taken over.
        """
        self.make_folder(path)
        like = os.stat(model)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                return  # RACE: somebody else made it; it is theirs
            for owner in ((-1, like.st_gid), (like.st_uid, -1)):  # a group may be given where an owner may not
                with contextlib.suppress(OSError):
                    os.fchown(fd, *owner)
            mode = like.st_mode & 0o2775
            if os.fstat(fd).st_gid != like.st_gid:
                mode = mode & 0o705 | (mode & 0o005) << 3  # its group is as good as any other
            with contextlib.suppress(OSError):
                os.fchmod(fd, mode if self._dir_mode is None else self._dir_mode)  # last: chown clears set-id bits
            if self.syncs_folders:
                os.fsync(fd)
        finally:
            os.close(fd)

    def rename_folder(self, source: str, destination: str) -> None:
        """Rename a folder to a name that is unique by construction."""
        self.rename(source, destination)

    def move_folder(self, source: str, destination: str) -> None:
        """Rename a folder to a name that somebody else may have taken.

        Raises:
            FileExistsError: the destination exists; nothing was changed.
        """
        if self._noreplace and self._without_replacing(source, destination):
            return
        if os.path.lexists(destination):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)
        self.rename(source, destination)  # RACE: fails with ENOTEMPTY on any folder that is not empty

    def drain(self, folder: str) -> None:
        """Empty and remove a folder, until nothing comes into it any more."""
        give_up = time.monotonic() + DRAIN_LIMIT
        pause = 0.001
        while True:
            for entry in list(entries(folder)):
                self.remove_tree(entry.path)
            try:
                return os.rmdir(folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or time.monotonic() > give_up:
                    raise
                time.sleep(pause)  # a send came in between, or an NFS client keeps a file that somebody has open
                pause = min(pause * 2, 0.25)

    def remove_tree(self, path: str) -> None:
        """Remove a folder of ours with all that is in it, or what lies in its place; that it is gone is no error."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path, onerror=_unless_gone)
            else:  # rmtree would open it: a link leads elsewhere, and a fifo keeps who opens it
                os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder; that it is gone already is no error.

        Raises:
            OSError: with ENOTEMPTY when something lies in it.
        """
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def sync(self, *folders: str) -> None:
        """Make the entries of folders durable, in this order; does nothing below durability `full`."""
        if not self.syncs_folders:
            return
        for folder in folders:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_file(self, fd: int) -> None:
        """Make a file's content durable; does nothing at durability `none`."""
        if self.syncs_files:
            os.fsync(fd)

    def _own(self, fd: int, mode: int | None) -> None:
        try:
            if self._group is not None:
                os.fchown(fd, -1, self._group)  # before the mode: chown clears the set-id bits
            if mode is not None:
                os.fchmod(fd, mode)
        except OSError as error:
            if not self._lenient or error.errno not in _NO_MODES:
                raise


def _unless_gone(call: object, path: str, failed: tuple[type[BaseException], BaseException, TracebackType]) -> None:
    """Let the removal of a tree go on where something is gone: by somebody else, or its reply was lost over NFS."""
    if not isinstance(failed[1], FileNotFoundError):
        raise failed[1]


def shared_out(items: Sequence[T], work: Callable[[Sequence[T]], None]) -> None:
    """Do the work on all items, in parts that several threads share where there are many; raise what a part raises."""
    if len(items) < LONG_LIST:
        return work(items)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, items[part::THREADS]) for part in range(THREADS)]:
            done.result()


# -- reading: nothing below changes anything -----------------------------------------------------------------


def ask_server(folder: str) -> None:
    """Make the next question about a folder, for a name or a listing, go to the server.

    An NFS client remembers for up to a minute which names are not there, and answers from that also when one is opened.
    Opening the folder makes it ask whether the folder changed, and after a change it forgets them. It asks also for a
    user who may not open the folder.

    RACE: NFS 3 tells a change by its time alone. A name that is looked for between two changes within one tick of the
    server's clock, and comes with the second, is missed until the next change. A listing shows it.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        fd = _open_folder(folder)
        try:
            _forget_listing(fd)
        finally:
            os.close(fd)


def _open_folder(path: str) -> int:
    """Open a folder; one that seems not to be there is looked for again, once the folder above has been opened."""
    try:
        return os.open(path, _FOLDER)
    except FileNotFoundError:
        above = os.path.dirname(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.close(os.open(above, _FOLDER))
        return os.open(path, _FOLDER)


def _forget_listing(fd: int) -> None:
    """Drop what this host keeps of an open folder's listing, which NFS 3 takes for new within a tick of its server.

    Elsewhere nothing is kept, and nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is advice: where it cannot be taken, nothing is kept either
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def listing(folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    """List what lies in a folder, in no order; on NFS it may be a listing that this host keeps.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    return os.scandir(folder)


def entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in a folder now, in no order; one that is not there is empty."""
    ask_server(folder)
    try:
        found = listing(folder)
    except FileNotFoundError:
        return
    with found:
        yield from found  # type: ignore[misc]


def names_in(folder: str) -> frozenset[str]:
    """Return the names of all that lies in a folder now; one that is not there is empty."""
    try:
        fd = _open_folder(folder)
    except FileNotFoundError:
        return frozenset()
    try:
        _forget_listing(fd)
        return frozenset(os.listdir(fd))
    finally:
        os.close(fd)


class Listing:
    """The names in a folder, listed again only when it has changed since; one that is not there is empty.

    Args:
        folder: the folder.
        clock: the file server's, by which the folder's time tells how long ago it changed.
    """

    def __init__(self, folder: str, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._names = frozenset[str]()
        self._changed = 0

    def names(self) -> frozenset[str]:
        """Return the names."""
        try:
            fd = _open_folder(self._folder)
        except FileNotFoundError:
            return frozenset()
        try:
            changed = os.fstat(fd).st_mtime_ns
            if changed != self._changed:
                _forget_listing(fd)
                now = self._clock.now_ms() * 1_000_000  # before the listing: what comes after it is younger
                self._names = frozenset(os.listdir(fd))
                # Of a folder that changed just now, the next change may bear the same time.
                self._changed = changed if now - changed > SETTLED_NS else 0
        finally:
            os.close(fd)
        return self._names


def files_in(folder: str) -> Iterator[list[str]]:
    """Yield the names of the regular files in a folder, so many at a time; one that is not there is empty."""
    try:
        found = listing(folder)
    except FileNotFoundError:
        return
    with found as entries:
        while chunk := list(islice(entries, CHUNK)):
            yield message_files(chunk)


def message_counts(folder: str, patterns: tuple[str, ...]) -> Iterator[int]:
    """Count the messages in a folder, so many at a time, by their names alone; `patterns` are of what is ignored."""
    ignored, ends = ignoring(patterns), ignored_ends(patterns)
    for files in files_in(folder):
        yield sum(1 for name in files if name[0] != "." and not ((ends is None or name[-1] in ends) and ignored(name)))


def message_files(entries: Sequence[os.DirEntry[str]]) -> list[str]:
    """Return the names of those entries that are regular files."""
    try:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return [entry.name for entry in entries if is_message_file(entry)]


def is_message_file(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a regular file, by what the listing says where it says it."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False  # gone, or not to be looked at: not a message now


def was_message_file(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a regular file, or has gone since the listing.

    Where a listing does not tell what an entry is, as on NFS, a claim that was renewed since is not found by its name,
    but is held all the same.
    """
    if is_message_file(entry):
        return True
    try:
        return stat.S_ISREG(os.lstat(entry.path).st_mode)
    except FileNotFoundError:
        return True


def open_body(path: str) -> IO[bytes]:
    """Open a message's body for reading; symbolic links are not followed, a fifo does not block.

    Raises:
        OSError: with ELOOP for a symbolic link.
    """
    fd = _open(path, _READ)
    try:
        return open(fd, "rb")
    except OSError as error:  # a folder
        os.close(fd)
        error.filename = path
        raise


def size_now(path: str) -> int:
    """Return how long a file is, by opening it: NFS caches what lstat says."""
    try:
        fd = _open(path, _READ)
    except PermissionError:
        return os.lstat(path).st_size  # nobody may open a reservation
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def is_gone(error: OSError) -> bool:
    """Tell whether a file may be gone; of one that it has open an NFS client says so in its own way."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def read_body(path: str, limit: int | None = None) -> bytes:
    """Read a message's body whole.

    Raises:
        OSError: with EFBIG, it is longer than the limit, and was not read.
    """
    try:
        fd = os.open(path, _READ)
    except BlockingIOError:
        fd = _open(path, _READ)
    try:
        body = os.read(fd, READ_SIZE)
        if not (more := os.read(fd, READ_SIZE)):
            return body
        if limit is not None and os.fstat(fd).st_size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        chunks = [body, more]
        while more := os.read(fd, READ_SIZE):
            chunks.append(more)
    finally:
        os.close(fd)
    return b"".join(chunks)


def read_small(path: str, limit: int = 1 << 20) -> bytes | None:
    """Read a small file of ours; None when it is not there.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    try:
        with open_body(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            return file.read(limit)
    except FileNotFoundError:
        return None


def parse_json(data: bytes) -> object:
    """Read JSON that anybody may have written.

    Raises:
        ValueError: it is damaged, or nested more deeply than anything of ours.
    """
    try:
        content: object = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(content, DEPTH)
    return content


def _check_depth(content: object, left: int) -> None:
    if not left:
        raise ValueError("it is nested too deeply")
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for value in inner:
        if isinstance(value, dict | list):
            _check_depth(value, left - 1)


def changed_ms(path: str) -> int:
    """Return when a file was last renamed or changed: its ctime in milliseconds since 1970."""
    return os.lstat(path).st_ctime_ns // 1_000_000


def written_ms(path: str) -> int:
    """Return when a file's content was last written: its mtime in milliseconds since 1970."""
    return os.lstat(path).st_mtime_ns // 1_000_000


def is_reservation(status: os.stat_result) -> bool:
    """Tell whether a file only reserves its name for a move: empty, and of the mode that only reservations have."""
    return not status.st_size and status.st_mode == stat.S_IFREG | RESERVED_MODE


def inode(path: str) -> int:
    """Return a file's inode number."""
    return os.lstat(path).st_ino


def has_another_name(path: str) -> bool:
    """Tell whether a file is there, and under another name, too."""
    try:
        return os.lstat(path).st_nlink > 1
    except FileNotFoundError:
        return False


def exists(path: str) -> bool:
    """Tell whether something is there, as far as this host knows: on NFS it may know too little; see `is_there`."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_there(path: str, clock: Clock) -> bool:
    """Tell whether something is there that another host may have made, or removed, just now, such as a read-lock.

    A folder that changed a moment ago is listed: see `ask_server`. What may not be opened is there all the same.

    Args:
        path: what is looked for.
        clock: the file server's.
    """
    folder, name = os.path.split(path)
    try:
        if (mount := mount_at(folder, os.stat(folder).st_dev)) is not None and not mount.shared:
            return _opens(path)  # this host's own disk
        fd = _open_folder(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        return _opens(path)  # the server was asked all the same
    try:
        if clock.now_ms() * 1_000_000 - os.fstat(fd).st_mtime_ns <= SETTLED_NS:
            _forget_listing(fd)
            return name in os.listdir(fd)
    finally:
        os.close(fd)
    return _opens(path)


def _opens(path: str) -> bool:
    """Tell whether a file is there; of one that is known to this host, opening it asks the server."""
    try:
        os.close(_open(path, _READ))
    except FileNotFoundError:
        return False
    except OSError:
        return exists(path)
    return True


def is_folder(path: str) -> bool:
    """Tell whether a folder is there, or a link to one.

    Raises:
        OSError: that cannot be told.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def device(path: str) -> int:
    """Return the number of the file system that a path lies on."""
    return os.stat(path).st_dev
