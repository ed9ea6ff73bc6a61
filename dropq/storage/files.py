"""Every call that changes a root: writes, renames, links, removals and syncs.

A rename either happened or raised, and replaces nothing: it raises FileExistsError if the destination exists, and
FileNotFoundError if the source is gone, and then nothing was changed. `rename` is for destinations that are unique by
construction; `move` is for names that another process may have taken. Small files of ours alone are replaced, by
`write_small`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy as shallow
from types import TracebackType
from typing import Any

from dropq.errors import StorageError
from dropq.format.layout import GONE_PREFIX, PRIVATE
from dropq.storage import system_calls
from dropq.storage.exclusive_rename import ExclusiveRename, gone_or, raise_unless_done
from dropq.storage.failures import describe
from dropq.storage.mounts import mount_at
from dropq.storage.reading import READ_SIZE, entries
from dropq.storage.system_calls import CREATE, FILE_MODE, FOLDER, HERE, NO_FLAGS, READ, TOUCH, closing, open_file

log = logging.getLogger("dropq")


DIR_MODE = 0o775
#: Seconds after which `drain` gives up a folder that does not become empty.
DRAIN_LIMIT = 10.0
#: Seconds to wait until a file system shows all of a file that was written and closed.
WHOLE_LIMIT = 60.0
#: Bytes that are copied at a time: on a disk that writes a MiB a second they, and their sync, take some 20 seconds.
COPIED_AT_ONCE = 16 << 20
#: Bytes from which on the time of a copy says how quick the disk is, more than what each file costs.
LARGE_COPY = 8 << 20
#: From this many files on, one sync of their file system makes all of them durable: it is several times as quick as a
#: sync of each. Fewer files are synced one by one, as the one sync waits for the writes of every process.
SYNCED_TOGETHER = 32

#: Of how many folders it is remembered whether they are on NFS, and sticky.
NATURES_KNOWN = 100
#: What a file system without modes raises, to the owner of a file, too.
_NO_MODES = NO_FLAGS | {errno.EPERM}


def refuse_links(folders: Iterable[str]) -> None:
    """Raise StorageError (ELOOP) for a private folder that is a link: dropq would write, or remove, files elsewhere."""
    for path in folders:
        if os.path.islink(path):
            raise StorageError(
                f"{path} is a symbolic link, and dropq follows none to private files: look where it leads, as delayed "
                "messages, reasons or metadata may lie there, then remove it: the next process that needs the folder "
                "makes it again; nothing was touched",
                path=path,
                errno=errno.ELOOP,
            )


def remove_dead_socket(path: str) -> None:
    """Remove a unix socket whose process is dead; OSError if another process listens there, or it is no socket."""
    import socket  # here, as few processes need it

    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EADDRINUSE, f"{path} is there, and is no socket")
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)  # it may be there, and accept nobody
            if caller.connect_ex(path) != errno.ECONNREFUSED:
                raise OSError(errno.EADDRINUSE, "another server uses it")
        os.unlink(path)


class Draft(io.FileIO):
    """A body that a caller writes piece by piece; `refused` makes the error to raise from one of the file system."""

    def __init__(self, fd: int, refused: Callable[[OSError], Exception]) -> None:
        super().__init__(fd, "wb")
        self._refused = refused

    def write(self, data: Any, /) -> int:
        """Write a piece, or the beginning of it; return how many bytes it was."""
        try:
            return os.write(self.fileno(), data)
        except OSError as error:
            raise self._refused(error) from error


def _syncs(durability: str) -> tuple[bool, bool]:
    """Return whether a durability syncs files, and folders; a stricter one is greater."""
    return durability != "none", durability == "full"


class Storage:
    """The calls that change a root, with one durability and one set of modes.

    Args:
        durability: `none`, `file` (bodies are synced before they are sent) or `full` (folders too).
        file_mode, dir_mode: permission bits of new files and folders; None leaves them to the umask.
        group: the numeric group of new files and folders; None leaves it to the system.
        base: a folder that is never made, nor are those above it: a write into a deleted queue fails.
        lenient: accept a file system that has no modes or groups.
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
        self.syncs_files, self.syncs_folders = _syncs(durability)
        self._file_mode = file_mode
        self._dir_mode = dir_mode
        self._group = group
        self._base = base
        self._lenient = lenient
        self._create_mode = FILE_MODE if file_mode is None else file_mode
        #: The bytes a second with which a large part of a body was copied, as given to `note_copy`.
        self.copy_speed: float = 100 << 20
        self._owns = file_mode is not None or group is not None
        self._finishes_late: bool | None = None  # until the first file is written
        self._natures: dict[str, tuple[bool, int, bool]] = {}  # see `_nature`
        self._exclusive = ExclusiveRename(None if base is None else f"{base}/{PRIVATE}", self._create_mode)

    def note_copy(self, size: int, seconds: float) -> None:
        """Note how long it took to copy so many bytes; a small copy says nothing, and a single slow one little."""
        if size >= LARGE_COPY:
            self.copy_speed = max(size / max(seconds, 0.001), self.copy_speed / 4)

    # -- writing -----------------------------------------------------------------------------------------

    def create(self, path: str, flags: int = CREATE) -> int:
        """Create a new file and return its descriptor, open for writing."""
        fd = os.open(path, flags, self._create_mode)
        if self._owns:
            try:
                self._own(fd, self._file_mode)
            except OSError:
                os.close(fd)
                os.unlink(path)
                raise
        return fd

    def write_new(self, path: str, data: bytes | memoryview, *, synced: bool = True, sole_in: str = "") -> None:
        """Write a new file, durable at once if `synced` and the durability asks for it; remove it when that fails.

        `sole_in` is its folder, if no other file there can have its name.
        """
        flags = (self._natures.get(sole_in) or self._nature(sole_in))[1] if sole_in else CREATE
        fd = self.create(path, flags) if self._owns else os.open(path, flags, self._create_mode)
        try:
            try:
                if (written := os.write(fd, data)) < len(data):
                    _write_rest(fd, data, written)
                if synced and self.syncs_files:
                    os.fsync(fd)
            finally:
                os.close(fd)
            self.await_whole(path, len(data))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def _nature(self, folder: str, at: int | None = None) -> tuple[bool, int, bool]:
        """Return whether a folder is on NFS, the flags to make a file of a unique name there, and if it is on btrfs.

        All are as they were when the folder was first asked for; `at` is its descriptor. On NFS an exclusive creation
        takes a second call. It stays where a sticky folder keeps users apart.
        """
        known = self._natures.get(folder) if at is None else None
        if known is None:
            path = folder if at is None else f"/proc/self/fd/{at}"
            found = os.stat(path)
            mount = mount_at(os.path.realpath(path), found.st_dev)
            on_nfs = mount is not None and mount.is_nfs
            flags = CREATE & ~os.O_EXCL if on_nfs and not found.st_mode & stat.S_ISVTX else CREATE
            known = on_nfs, flags, mount is not None and mount.kind == "btrfs"
            if at is None:
                if len(self._natures) >= NATURES_KNOWN:
                    self._natures.clear()
                self._natures[folder] = known
        return known

    def await_whole(self, path: str, size: int, *, at: int | None = None) -> None:
        """Wait until the file system shows all of a file that was written and closed; do this before it is renamed.

        Over FUSE a close() may return too early. HDFS shows an empty file until its client has finished it, and who
        looks at it then believes for a minute that it is empty. OSError (EIO) if the rest does not come within
        `WHOLE_LIMIT`. A relative `path` begins in the open folder `at`.
        """
        if self._finishes_late is False or not self._is_late(os.path.dirname(path), at):
            return
        give_up = time.monotonic() + WHOLE_LIMIT
        while (shown := system_calls.size_asked(path, HERE if at is None else at)) is not None and shown < size:
            if time.monotonic() > give_up:
                said = f"the file system shows {shown} of its {size} bytes {WHOLE_LIMIT:.0f} s after they were written"
                raise OSError(errno.EIO, said, path)
            time.sleep(0.002)

    def _is_late(self, folder: str, at: int | None) -> bool:
        """Return whether the file system may finish files after their close(); it is one file system for all calls."""
        if self._finishes_late is None:
            path = folder if at is None else f"/proc/self/fd/{at}"
            mount = mount_at(os.path.realpath(path), os.stat(path).st_dev)
            self._finishes_late = mount is not None and mount.finishes_late
        return self._finishes_late

    @contextlib.contextmanager
    def together(self, folder: str, count: int) -> Iterator[bool]:
        """Make the files durable that the block writes into a folder, in the quicker way for their count.

        Yield whether the caller syncs each file as it is written. If not, one sync of the file system ends the block.
        """
        if not self.syncs_files or count < SYNCED_TOGETHER or not system_calls.can_sync_whole(folder):
            yield True
            return
        with closing(os.open(folder, FOLDER)) as fd:  # first: syncfs reports errors from here on
            yield False
            system_calls.sync_whole(fd, folder)

    def write_all(
        self,
        folder: str,
        files: Sequence[str],
        bodies: Iterable[bytes | memoryview],
        *,
        at: int | None = None,
        times: tuple[int, int] | None = None,
    ) -> None:
        """Write many new files into a folder of the caller's own; after a failure the caller removes the folder.

        Args:
            at: the folder's descriptor, where it is open: it saves the walk along the path to each file.
            times: when they were read and written, in ns since 1970, where the file system can keep that; None for now.
        """
        if not files:
            return
        paths = files if at is not None else [f"{folder}/{name}" for name in files]
        above, sizes = os.path.dirname(paths[0]), list[int]()
        with self.together(folder, len(files)) as each:
            flags = self._nature(above, at)[1]
            for path, data in zip(paths, bodies, strict=True):
                fd = os.open(path, flags, self._create_mode, dir_fd=at)
                try:
                    if self._owns:
                        self._own(fd, self._file_mode)
                    if (written := os.write(fd, data)) < len(data):
                        _write_rest(fd, data, written)
                    if times is not None:
                        _set_times(fd, times)
                    if each and self.syncs_files:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                sizes.append(len(data))
            if self._is_late(above, at):
                for path, size in zip(paths, sizes, strict=True):  # after all: they are finished beside each other
                    self.await_whole(path, size, at=at)

    def owner_of_new(self, folder: str) -> int:
        """Return to which user a file belongs that this process makes in a folder, as the file server has it."""
        path = f"{folder}/.owner.{os.urandom(6).hex()}.tmp"
        os.close(self.create(path))
        try:
            return os.lstat(path).st_uid
        finally:
            self.unlink(path)

    def write_small(self, path: str, data: bytes, *, by: str | None = None) -> None:
        """Replace a small file, `by` a path of its own: readers see the old content or the new, also after a crash."""
        folder, name = os.path.split(path)
        temporary = by or f"{folder}/.{name[:100]}.{os.urandom(6).hex()}.tmp"
        if by is not None:
            self.unlink(by)  # an error may have left it
        self.write_new(temporary, data, sole_in=folder if by is None else "")
        try:
            self.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync(folder)

    def replace(self, source: str, destination: str) -> None:
        """Rename a file of ours over another of ours; where a rename replaces nothing, the other is removed first."""
        try:
            self.rename(source, destination)
        except OSError as error:
            if not self._exclusive.is_taken(error, destination):
                raise
            self.unlink(destination)
            self.rename(source, destination)

    def append(self, path: str, line: Callable[[int], bytes]) -> None:
        """Append a line to a file of ours, which is made if it is missing, by one write; it is not synced.

        `line` makes it, and gets the bytes that the file has; an empty one is not written. OSError for what is no file.
        """
        with closing(os.open(path, TOUCH | os.O_APPEND, self._create_mode)) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError(errno.EINVAL, "it is no regular file of ours", path)
            if self._owns and not found.st_size:
                self._own(fd, self._file_mode)
            if data := line(found.st_size):
                os.write(fd, data)

    def touch(self, path: str) -> bool:
        """Make an empty file of ours, such as a read-lock; return False if it was there."""
        try:
            self.write_new(path, b"")
            self.sync(os.path.dirname(path))
        except FileExistsError:
            return False
        return True

    def stamp(self, path: str) -> None:
        """Give an empty file of ours the file server's time; make it if it is missing."""
        self.touch(path)
        with closing(open_file(path, TOUCH)) as fd:
            os.utime(fd)

    def renew(self, path: str) -> bool:
        """Give a file of ours the file server's time; return False if it is gone."""
        try:
            os.utime(path, follow_symlinks=False)  # not opened: HDFS empties a file that is opened for writing
        except FileNotFoundError:
            return False
        return True

    def adopt(self, path: str) -> None:
        """Give a file from outside the modes of new files, and make its body durable; it stays where it is.

        Where no modes are set it keeps its own, without the permission for everybody to write.
        """
        with closing(open_file(path, READ)) as fd:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            kept = mode & ~stat.S_IWOTH if mode & stat.S_IWOTH else None
            self._own(fd, kept if self._file_mode is None else self._file_mode)
            self.sync_file(fd)

    def date_back(self, path: str) -> None:
        """Set the mtime of a folder or file of ours to 1970; then it shows whether something has changed it since."""
        os.utime(path, (0, 0), follow_symlinks=False)

    def link(self, source: str, destination: str) -> None:
        """Give a file a second name."""
        os.link(source, destination, follow_symlinks=False)

    def link_folder(self, folder: str, path: str) -> None:
        """Make a symbolic link to a folder, unless something of its name is there."""
        with contextlib.suppress(FileExistsError):
            os.symlink(folder, path)

    def link_or_copy(self, source: str, destination: str) -> None:
        """Give a file a second name; where links fail, copy it."""
        try:
            self.link(source, destination)
        except FileNotFoundError:
            raise
        except OSError as error:
            # RACE: an NFS client sends a link again whose reply was lost, and finds its own.
            if isinstance(error, FileExistsError) and os.path.samefile(source, destination):
                return
            self.copy(source, destination, synced=False)

    def writes_as(self, other: Storage) -> bool:
        """Return whether it gives its files the modes and the group that another one gives."""
        return (self._file_mode, self._group) == (other._file_mode, other._group)

    def at_least(self, durability: str) -> Storage:
        """Return what writes as this writes, with a durability, or with its own if that is as strict."""
        if (syncs := _syncs(durability)) <= _syncs(self.durability):
            return self
        other = shallow(self)
        other.durability, (other.syncs_files, other.syncs_folders) = durability, syncs
        return other

    def at(self, base: str) -> Storage:
        """Return what writes in another folder of the file system as this writes, and never makes that folder."""
        other = shallow(self)
        other._base = base
        return other

    def copy(
        self,
        source: str,
        destination: str,
        *,
        synced: bool = True,
        like: Storage | None = None,
        between: Callable[[], object] | None = None,
    ) -> os.stat_result:
        """Copy a file to a new file, with its times where the file system can keep them; remove the copy if that fails.

        Args:
            synced: make it durable at once, if the durability asks for it.
            like: whose modes and group the copy gets; None for its own.
            between: called after each `COPIED_AT_ONCE` bytes, which are synced first, so that no sync takes long; what
                it raises ends the copy.

        Returns:
            What the file was before it was read. What is no regular file is not read.
        """

        def step() -> None:
            if between is not None:
                if synced:
                    self.sync_file(fd)
                between()

        with closing(open_file(source, READ)) as reading:
            found = os.fstat(reading)
            if not stat.S_ISREG(found.st_mode):
                number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
                raise OSError(number, os.strerror(number), source)
            fd = (like or self).create(destination)
            try:
                with closing(fd):
                    size = _copy_in_steps(reading, fd, found.st_size, step)
                    _set_times(fd, (found.st_atime_ns, found.st_mtime_ns))
                    if synced:
                        self.sync_file(fd)
                self.await_whole(destination, size)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(destination)
                raise
        return found

    # -- moving ------------------------------------------------------------------------------------------

    def rename(self, source: str, destination: str) -> None:
        """Rename a file to a name that is unique by construction; FileNotFoundError if another process took it."""
        try:
            os.rename(source, destination)
        except OSError as error:
            # RACE: an NFS client sends a rename again whose reply was lost, and the source is gone. Nobody else uses
            # the destination, so if it is there, this rename made it.
            raise_unless_done(error, source, destination)

    def move(self, source: str, destination: str, is_unique: Callable[[str], object] | None = None) -> None:
        """Rename a file to a name that another process may have taken.

        Where there is no `renameat2`, the name is reserved first, unless the destination `is_unique` by construction.
        """
        exclusive = self._exclusive
        if exclusive.in_kernel:
            try:
                return system_calls.rename_noreplace(source, destination)
            except OSError as error:
                if exclusive.is_done(error, source, destination):
                    return None
        if is_unique is not None and is_unique(destination):
            return self.rename(source, destination)
        return exclusive.rename(source, destination)

    def discard(self, path: str, folder: str) -> None:
        """Remove a message for good: rename it to a private name in a folder, which is made if needed; then unlink it.

        The rename takes the message out of its queue. If the unlink fails, a sweep removes the file.
        """
        private = f"{folder}/{GONE_PREFIX}{os.urandom(8).hex()}"
        try:
            self.rename(path, private)
        except FileNotFoundError:
            if os.path.lexists(folder):
                raise
            self.make_folder(folder)
            self.rename(path, private)
        try:
            self.unlink(private)  # RACE: NFS may have lost the reply to a first unlink, and then the file is gone
        except OSError as error:
            log.warning("%s is nobody's any more, and stays until a sweep clears it: %s", private, describe(error))

    def rename_guarded(self, source: str, destination: str) -> None:
        """Rename a file to a name that is unique by construction; replace no copy of it where `renameat2` works."""
        if not self._exclusive.by_kernel(source, destination):
            self.rename(source, destination)

    def refuses_to_replace(self, private: str) -> bool:
        """Return whether the file system has a rename that replaces nothing, tried with files of our own."""
        if self._exclusive.in_kernel and not self._exclusive.proved:
            self.make_folder(private)
            ours = f"{private}/{GONE_PREFIX}{os.urandom(8).hex()}"
            self.write_new(ours, b"", synced=False)
            try:
                self._exclusive.proved = self._exclusive.by_kernel(ours, f"{ours}-free")
            finally:
                self.unlink(ours)
                self.unlink(f"{ours}-free")
        return self._exclusive.in_kernel

    def commit(self, source: str, destination: str) -> None:
        """Rename a file to a name in whose place a folder of ours may stand, which it never replaces.

        Unlike `rename` it does not conclude from an error that it was done: a file that another process took, and a
        folder that stands in its place, look as a rename whose reply was lost.
        """
        if self._exclusive.in_kernel:
            try:
                return system_calls.rename_noreplace(source, destination)
            except OSError as error:
                if error.errno not in NO_FLAGS:
                    raise
                self._exclusive.in_kernel = False
        try:
            os.rename(source, destination)
        except OSError as error:
            raise gone_or(error, source, destination) from None

    def rename_each_exclusive(self, at: int, files: Sequence[str], folders: Iterable[int], name: str) -> list[str]:
        """Rename each file of the open folder `at` to the path `name` in an open folder of its own, by `renameat2`.

        Return the files whose rename raised an error, for the caller to look at one by one.
        """
        if not self._exclusive.in_kernel:
            return list(files)
        left = []
        for file, folder in zip(files, folders, strict=True):
            try:
                system_calls.rename_noreplace(file, name, folder, at)
            except OSError:
                left.append(file)
        return left

    def rename_all_exclusive(self, source: str, destination: str, files: Sequence[str]) -> list[str]:
        """Rename files of a folder into another, to names that are unique by construction, where `renameat2` works.

        Return the files that may not have been renamed, for the caller to look at one by one.

        One thread renames them all. A kernel makes one rename into a folder at a time, and lets the others wait even
        while a server or a FUSE daemon works at it: more threads, or processes, would only wait for each other. The
        open folders save the walk along two paths to each file.
        """
        left: list[str] = []
        if not self._exclusive.in_kernel:
            return list(files)
        with contextlib.ExitStack() as opened:
            try:
                at, to = (opened.enter_context(closing(os.open(path, FOLDER))) for path in (source, destination))
            except OSError:
                return list(files)  # such as a folder that this user may not list, which a rename does not need
            for number, file in enumerate(files):
                try:
                    system_calls.rename_noreplace(file, file, to, at)
                except (FileExistsError, FileNotFoundError):
                    left.append(file)
                except OSError:
                    return left + list(files[number:])
        return left

    def rename_in(self, source: str, folder: int, name: str) -> None:
        """Rename a file to a path in an open folder that is unique by construction."""
        try:
            os.rename(source, name, dst_dir_fd=folder)
        except OSError as error:
            raise_unless_done(error, source, name, folder)

    def sync_in(self, folder: int, name: str) -> None:
        """Make the entries of a folder durable that lies in an open folder; does nothing where `sync` does nothing."""
        if not self.syncs_folders or self._nature("", folder)[0]:
            return
        with closing(os.open(name, FOLDER, dir_fd=folder)) as fd:
            os.fsync(fd)

    def rename_exclusive(self, source: str, destination: str, *folder: int) -> bool:
        """Rename a file by `renameat2`; return False, and change nothing, where that is missing.

        A relative `destination` begins in the open `folder`, if there is one; it may have been renamed meanwhile.
        """
        return self._exclusive.by_kernel(source, destination, *folder)

    def unlink(self, path: str, folder: int | None = None) -> bool:
        """Remove a file of ours, of an open `folder` if that is given; return False when it was gone."""
        try:
            os.unlink(path, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    # -- folders -----------------------------------------------------------------------------------------

    def make_folder(self, path: str, *, parents: bool = True, passing: bool = False) -> None:
        """Create a folder, and missing ones above it, unless it exists.

        A `passing` folder will soon be removed, and need not survive a power cut. NotADirectoryError if something other
        than a folder has its name.
        """
        try:
            os.mkdir(path, DIR_MODE if self._dir_mode is None else self._dir_mode)
        except FileExistsError:
            if os.path.isdir(path):
                return
            if os.path.lexists(path):  # FileExistsError would say that a message's name is taken
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            return self.make_folder(path, parents=parents, passing=passing)  # RACE: it was removed since
        except FileNotFoundError:
            if not parents or os.path.dirname(path) == self._base:
                raise  # RACE: the queue was deleted; nothing brings its folder back
            self.make_folder(os.path.dirname(path))
            # Once: /proc raises ENOENT although the parents are there.
            return self.make_folder(path, parents=False, passing=passing)
        if self._dir_mode is not None or self._group is not None:
            with closing(os.open(path, FOLDER)) as fd:
                self._own(fd, self._dir_mode)
        if not passing:
            self.sync(os.path.dirname(path))

    def make_folder_like(self, path: str, model: str) -> None:
        """Create a folder with the owner, group and mode of another, as far as this user may set them.

        A configured mode goes before the other folder's. The permission for everybody to write is not copied.
        """
        self.make_folder(path)
        like = os.stat(model)
        with closing(os.open(path, FOLDER | os.O_NOFOLLOW)) as fd:
            if os.fstat(fd).st_uid != os.geteuid():
                return  # RACE: another user made it, and keeps it as it is
            for owner in ((-1, like.st_gid), (like.st_uid, -1)):  # a user who may not set the owner may set the group
                with contextlib.suppress(OSError):
                    os.fchown(fd, *owner)
            mode = like.st_mode & 0o2775
            if os.fstat(fd).st_gid != like.st_gid:
                mode = mode & 0o705 | (mode & 0o005) << 3  # its group is as good as any other
            with contextlib.suppress(OSError):
                os.fchmod(fd, mode if self._dir_mode is None else self._dir_mode)  # last: chown clears set-id bits
            if self.syncs_folders:
                os.fsync(fd)

    def rename_folder(self, source: str, destination: str) -> None:
        """Rename a folder to a name that is unique by construction."""
        self.rename(source, destination)

    def move_folder(self, source: str, destination: str) -> None:
        """Rename a folder to a name that nobody else has taken; else FileExistsError, and nothing was changed."""
        if self._exclusive.by_kernel(source, destination):
            return
        if os.path.lexists(destination):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)
        self.rename(source, destination)  # RACE: raises ENOTEMPTY if a folder came there that is not empty

    def drain(self, folder: str) -> None:
        """Empty and remove a folder; repeat that while files come into it, or into a folder in it."""
        give_up = time.monotonic() + DRAIN_LIMIT
        pause = 0.001
        while True:
            try:
                for entry in list(entries(folder)):
                    self.remove_tree(entry.path)
                return os.rmdir(folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or time.monotonic() > give_up:
                    raise
                time.sleep(pause)  # a send came in between, or an NFS client keeps an open file
                pause = min(pause * 2, 0.25)

    def fence(self, path: str, content: bytes, private: str) -> None:
        """Take the name of a file, so that no `commit` gets it: by a folder, or by a file where folders let files in.

        Where a rename to the name of a folder moves the file into the folder, as on HDFS, a rename also replaces no
        file: there a file with this content, which no other has, takes the name; it is made in the folder `private`.
        FileExistsError if the name is taken.
        """
        if self._lets_files_into_folders(private):
            temporary = f"{private}/{GONE_PREFIX}{os.urandom(8).hex()}"
            self.write_new(temporary, content)
            try:
                os.rename(temporary, path)
            except OSError as error:
                self.unlink(temporary)
                if os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
                raise
        else:
            os.mkdir(path)

    def _lets_files_into_folders(self, private: str) -> bool:
        """Try with a file and a folder of our own whether a rename to a folder's name moves a file into the folder."""
        ours = f"{private}/{GONE_PREFIX}{os.urandom(8).hex()}"
        file, folder = f"{ours}-file", f"{ours}-folder"
        self.write_new(file, b"", synced=False)
        try:
            os.mkdir(folder)
            with contextlib.suppress(OSError):
                os.rename(file, folder)
            return os.path.lexists(f"{folder}/{os.path.basename(file)}")
        finally:
            self.unlink(file)
            self.remove_tree(folder)

    def remove_tree(self, path: str) -> None:
        """Remove a folder of ours with everything in it, or a file of its name; do nothing if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path, onerror=_unless_gone)
            else:  # rmtree would open it: a link leads elsewhere, and a fifo blocks
                os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder; do nothing if it is gone. OSError (ENOTEMPTY) if it is not empty."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def sync(self, *folders: str) -> None:
        """Make the entries of folders durable, in this order; does nothing below durability `full`.

        It does nothing on NFS either, whose server has made them durable before it answered.
        """
        if not self.syncs_folders:
            return
        known = self._natures.get
        for folder in folders:
            # A folder that is new for each message is where the folder above it is.
            if not (known(folder) or known(os.path.dirname(folder)) or self._nature(folder))[0]:
                fd = os.open(folder, FOLDER)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def leaves_both_names(self, folder: str) -> bool:
        """Return whether a power cut after the sync of another folder may bring back a name that left this one.

        So it does on btrfs; to sync this folder first makes both durable.
        """
        return (self._natures.get(folder) or self._nature(folder))[2]

    def sync_whole(self, folder: str) -> None:
        """Make durable what anybody did on the file system of a folder; it waits for the writes of all processes."""
        if not system_calls.can_sync_whole(folder):
            return os.sync()
        with closing(os.open(folder, FOLDER)) as fd:
            system_calls.sync_whole(fd, folder)

    def sync_path(self, path: str) -> None:
        """Make the content of a closed file durable; does nothing at durability `none`."""
        with closing(open_file(path, READ)) as fd:
            self.sync_file(fd)

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


def _set_times(fd: int, times: tuple[int, int]) -> None:
    """Set when a file was read and written, in ns since 1970, where the file system can keep that."""
    with contextlib.suppress(OSError):
        os.utime(fd, ns=times)


def _copy_in_steps(source: int, destination: int, size: int, between: Callable[[], object]) -> int:
    """Copy a file of a size to an empty one, with a call `between` two steps; return how many bytes were copied.

    The call that clones a file, or copies it on its server, does that where it can.
    """
    copied = 0
    try:
        while size > copied and (count := os.copy_file_range(source, destination, min(size - copied, COPIED_AT_ONCE))):
            copied += count
            if size > copied:
                between()
    except OSError:
        if copied:
            raise
    if copied:
        return copied
    while piece := os.read(source, READ_SIZE):
        _write_rest(destination, piece, 0)
        copied += len(piece)
        if copied % COPIED_AT_ONCE < len(piece):
            between()
    return copied


def _write_rest(fd: int, data: bytes | memoryview, written: int) -> None:
    while written < len(data):
        written += os.write(fd, data[written:])


def _unless_gone(call: object, path: str, failed: tuple[type[BaseException], BaseException, TracebackType]) -> None:
    """Let rmtree go on when something is gone: another process removed it, or NFS lost the reply."""
    if not isinstance(failed[1], FileNotFoundError):
        raise failed[1]
