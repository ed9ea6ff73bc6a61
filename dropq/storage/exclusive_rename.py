"""Rename a file to a name that another process may have taken, and never replace what has that name.

There are three ways. The first refusal shows that a way does not work on this file system, and the next is kept:

1. `renameat2` replaces nothing. Linux has it on its own disks.
2. A reservation: make an empty file of that name, which fails when the name is taken, and rename over it. For NFS and
   most FUSE mounts.
3. A plain rename, where the file system itself never replaces a file. For HDFS mounts.

Each raises FileExistsError if the destination exists, and FileNotFoundError if the source is gone; then nothing was
changed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dropq.format.layout import GONE_PREFIX
from dropq.storage import system_calls
from dropq.storage.reading import RESERVED_MODE, status_now
from dropq.storage.system_calls import CREATE, NO_FLAGS, closing, is_missing

#: How often a rename over a file must fail, and a rename beside it succeed, to prove that a file system never replaces
#: files: a disk that fails now and then is no proof.
PROOFS = 5

#: What a rename over a file raises on a file system that never replaces one: HDFS, and others on top of object stores.
_TAKEN = frozenset({errno.EEXIST, errno.EIO})


class ExclusiveRename:
    """Renames that replace nothing, on one file system.

    Files of a mode show whether a rename replaces them, in the folder `private`; None uses the destination's.
    """

    def __init__(self, private: str | None, mode: int) -> None:
        self._private = private
        self._mode = mode
        #: Whether `renameat2` is tried first: until the first refusal.
        self.in_kernel = True
        #: Whether `renameat2` has worked here.
        self.proved = False
        #: Whether a plain rename replaces a file; None until it was tried.
        self._replaces: bool | None = None

    def by_kernel(self, source: str, destination: str, *folder: int) -> bool:
        """Rename a file by `renameat2`; return False where there is no such call.

        A relative `destination` begins in the open `folder`, if there is one.
        """
        if not self.in_kernel:
            return False
        try:
            system_calls.rename_noreplace(source, destination, *folder)
        except OSError as error:
            return self.is_done(error, source, destination, *folder)
        return True

    def is_done(self, error: OSError, source: str, destination: str, *folder: int) -> bool:
        """Return whether a `renameat2` that raised an error did its work, else raise it; False without such a call."""
        if error.errno in NO_FLAGS:
            self.in_kernel = False
            return False
        if isinstance(error, FileExistsError | FileNotFoundError):
            raise error
        raise_unless_done(error, source, destination, *folder)
        return True

    def rename(self, source: str, destination: str) -> None:
        """Rename a file without `renameat2`."""
        if self._replaces is None:
            self._replaces = self._can_replace(destination)
        if self._replaces:
            self._over_reservation(source, destination)
        else:
            self._to_free_name(source, destination)

    def _over_reservation(self, source: str, destination: str) -> None:
        # RACE: O_EXCL decides who has the name; the rename replaces the empty file. A crash between the two leaves the
        # empty file behind; fsck recognises it by its mode.
        with closing(os.open(destination, CREATE, RESERVED_MODE)) as fd:
            try:
                reserved = os.fstat(fd).st_ino
            except BaseException:
                os.unlink(destination)
                raise
        try:
            os.rename(source, destination)
        except BaseException as error:
            # RACE: NFS lost the reply, or a signal came on the way back. When the reservation and the source are both
            # gone, our rename replaced the reservation, and the destination is the file itself.
            if not _is_reserved(destination, reserved):
                if isinstance(error, OSError) and os.path.lexists(destination) and is_missing(source):
                    return
                raise  # the reservation went with its folder
            os.unlink(destination)
            if not isinstance(error, OSError) or not self.is_taken(error, destination):
                raise
            self._to_free_name(source, destination)  # where nothing is ever replaced, a plain rename is safe

    def _to_free_name(self, source: str, destination: str) -> None:
        """Rename a file on a file system that never replaces one."""
        taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)
        if os.path.lexists(destination):
            raise taken
        try:
            os.rename(source, destination)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            if self.is_taken(error, destination) and not is_missing(source) and os.path.lexists(destination):
                raise taken from error
            raise_unless_done(error, source, destination)

    def is_taken(self, error: OSError, destination: str) -> bool:
        """Return whether a rename over a file failed because this file system never replaces one."""
        if self._replaces is not False and self._never_replaces(error, destination):
            self._replaces = False
        return self._replaces is False and error.errno in _TAKEN

    def _can_replace(self, destination: str) -> bool:
        """Try with files of our own whether a rename replaces a file, before the first reservation is made.

        Where it does not, a crash would leave the reservation, and where there are no modes that is an empty message.
        """
        try:
            with self._probes(destination) as (ours, taken, _):
                os.rename(ours, taken)
        except OSError as error:
            return not self._never_replaces(error, destination)
        return True

    def _never_replaces(self, error: OSError, destination: str) -> bool:
        """Find out with files of our own what an error means: HDFS raises EIO for a taken name, a bad disk for any."""
        if error.errno not in _TAKEN:
            return False
        try:
            with self._probes(destination) as (ours, taken, free):
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
        return True

    @contextmanager
    def _probes(self, destination: str) -> Iterator[tuple[str, str, str]]:
        """Make two files of our own for a block, and a third name; remove what is left of them."""
        folder = self._private or os.path.dirname(destination)
        ours = f"{folder}/{GONE_PREFIX}{os.urandom(8).hex()}"
        paths = ours, f"{ours}-taken", f"{ours}-free"
        try:
            for path in paths[:2]:
                os.close(os.open(path, CREATE, self._mode))
            yield paths
        finally:
            for path in paths:
                with suppress(OSError):
                    os.unlink(path)


def raise_unless_done(error: OSError, source: str, destination: str, folder: int | None = None) -> None:
    """Raise the error of a rename, unless the rename was done: its reply was lost, or its server went away.

    It raises FileNotFoundError as `gone_or` does. A relative `destination` begins in the open `folder`.
    """
    try:
        os.stat(destination, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise gone_or(error, source, destination) from None
    except OSError:
        raise error from None
    if not is_missing(source):
        raise error


def gone_or(error: OSError, source: str, destination: str) -> OSError:
    """Return the error of a rename, or FileNotFoundError where its source is gone: HDFS says EIO whatever it was."""
    if isinstance(error, FileNotFoundError) or not is_missing(source):
        return error
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, destination)


def _is_reserved(path: str, reserved: int) -> bool:
    """Return whether a name is still our reservation, by its inode; it is opened, as NFS caches what lstat returns.

    Its mode does not count: a file system without modes shows another.
    """
    try:
        found = status_now(path)
    except FileNotFoundError:
        return False
    return found.st_ino == reserved and not found.st_size
