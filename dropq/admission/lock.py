"""The lock of a queue's policies: whoever has it may look, and then act by what it saw.

It guards policy alone. Without it, as on a file system that has no locks, nothing is lost or handed out twice, because
the rename decides; only a limit may be exceeded, or a turn taken twice, where two look at once.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from dropq.layout import QueueLayout
from dropq.storage import Storage, inode, telling

log = logging.getLogger("dropq")

#: Seconds that a look waits for the lock: who has it needs a millisecond, unless it was stopped in the middle.
PATIENCE = 1.0
#: Seconds between two tries.
POLL = 0.001

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})


class PolicyLock:
    """The lock file of a queue; the kernel lets go of it when its holder dies, however that dies."""

    def __init__(self, layout: QueueLayout, storage: Storage) -> None:
        self._path = layout.lock
        self._folder = layout.private
        self._storage = storage
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False, poll_interval=POLL)
        self._inode = 0
        self._warned = False

    @contextmanager
    def held(self, before_waiting: Callable[[], None]) -> Iterator[bool]:
        """Hold the lock for a block; tell whether it was to be had.

        Args:
            before_waiting: called where somebody else has it.

        Raises:
            StorageError: the lock file cannot be made or opened.
        """
        with telling("no message was touched"):
            taken = self._take(before_waiting)
        try:
            yield taken
        finally:
            if self._lock.is_locked:
                self._lock.release()

    def _take(self, before_waiting: Callable[[], None]) -> bool:
        try:
            self._inode = self._made()
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                before_waiting()
                self._lock.acquire(timeout=PATIENCE)
        except Timeout:
            log.warning("%s: held by another process for %s s: nothing is taken meanwhile", self._path, PATIENCE)
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if not self._warned:
                log.warning("%s: no locks on this file system: limits and turns may be missed by a few", self._path)
            self._warned = True
        return True

    def _made(self) -> int:
        """Return the inode of the lock file, made with the queue's modes: others of its group have to open it."""
        try:
            return inode(self._path)
        except FileNotFoundError:
            self._storage.make_folder(self._folder)
            self._storage.touch(self._path)
            return inode(self._path)

    @property
    def broken(self) -> bool:
        """Whether somebody took the file away since: another may hold the lock of its name, too."""
        try:
            return inode(self._path) != self._inode
        except FileNotFoundError:
            return True
