"""The lock of a queue's policies: its holder reads the state of the queue, and acts by it.

The lock guards policy only. Without it, as on a file system that has no locks, nothing is lost or handed out twice,
because the rename decides. Two consumers that look at the same time can only exceed a limit, or take a turn twice.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dropq.lifecycle.context import QueueContext
from dropq.storage import locks
from dropq.storage.failures import error_context
from dropq.storage.files import Storage
from dropq.storage.locks import LockFile
from dropq.storage.reading import inode

log = logging.getLogger("dropq")

#: Seconds between two tries: the first pause, and the longest that it doubles to. The kernel can wait for a lock, but
#: not for a limited time.
FIRST_POLL = 0.0001
POLL = 0.001
#: Seconds for which a lock's file is kept open: over NFS that saves an open and a close for each message.
KEPT_OPEN = 1.0


class Lock:
    """A lock on a file, which is made if it is missing; `patience` is how many seconds to wait for another process.

    If it `keeps_open`, the file stays open from one block to the next, for `KEPT_OPEN` seconds. Then only one thread at
    a time may use it.
    """

    def __init__(self, path: str, storage: Storage, patience: float, *, keeps_open: bool = False) -> None:
        self._path = path
        self._folder = os.path.dirname(path)
        self._storage = storage
        self._patience = patience
        self._keeps_open = keeps_open
        self._opened: LockFile | None = None
        self._close_at = 0.0
        self._inode = 0
        self._warned = False

    @contextmanager
    def acquire(self, before_waiting: Callable[[], object] = bool) -> Iterator[bool]:
        """Take the lock for a block, after a call of `before_waiting` if another process has it.

        Yield False if that kept it for too long. StorageError if the lock file cannot be made or opened.
        """
        (file, self._opened), locked = (self._opened, None), False  # a signal handler opens another
        try:
            with error_context("no message was touched"):
                if file is not None and (file.closed or time.monotonic() > self._close_at or self.broken):
                    file.close()
                    file = None
                for _ in self._tries(before_waiting):
                    file = self._open() if file is None else file
                    try:
                        locked = file is not None and self._lock(file)
                    except OSError as error:
                        if error.errno != errno.ESTALE or file is None:
                            raise
                        file.close()  # another NFS client removed it: the next try makes it again
                        file = None
                    if locked:
                        break
            yield locked
        finally:
            if file is not None:
                self._put_back(file, locked)

    def _put_back(self, file: LockFile, locked: bool) -> None:
        """Free the lock; keep the file for the next block, if another may follow soon."""
        if not locked or not self._keeps_open or self._opened is not None:
            return file.close()
        try:
            file.unlock()
        except BaseException:
            file.close()
            raise
        self._opened = file

    def close(self) -> None:
        """Close the file, if it was kept open."""
        file, self._opened = self._opened, None
        if file is not None:
            file.close()

    def _open(self) -> LockFile | None:
        """Open the lock file; if it is missing, make it with the queue's modes, so that other users can open it.

        Return None if the NFS server has just asked a client to give the file back: try again.
        """
        while True:
            try:
                self._close_at = time.monotonic() + KEPT_OPEN
                return LockFile(self._path, self._folder)
            except FileNotFoundError:
                self._storage.make_folder(self._folder)
                self._storage.touch(self._path)  # RACE: another process may remove it again; then make it again
            except BlockingIOError:
                return None

    def _lock(self, file: LockFile) -> bool:
        self._inode = file.inode
        try:
            return file.lock()
        except OSError as error:
            if not locks.are_missing(error):
                raise
            if not self._warned:
                log.warning("%s: no locks on this file system: limits and turns hold only roughly", self._path)
            self._warned = True
        return True

    def _tries(self, before_waiting: Callable[[], object]) -> Iterator[None]:
        yield
        before_waiting()
        until, pause = time.monotonic() + self._patience, FIRST_POLL
        while time.monotonic() <= until:
            time.sleep(pause)
            pause = min(2 * pause, POLL)
            yield
        log.warning("%s: held by another process for %s s: nothing is taken meanwhile", self._path, self._patience)

    @property
    def broken(self) -> bool:
        """Whether the file was removed since it was opened: another process may hold the lock of a new file."""
        try:
            return inode(self._path) != self._inode
        except OSError:
            return True  # it was removed, or nobody can tell


class PolicyLock(Lock):
    """The lock of one queue."""

    def __init__(self, context: QueueContext, *, keeps_open: bool = False) -> None:
        super().__init__(context.layout.lock, context.storage, context.timing.lock_patience, keeps_open=keeps_open)
