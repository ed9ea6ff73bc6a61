"""The lock of a queue's policies: whoever has it may look, and then act by what it saw.

It guards policy alone. Without it, as on a file system that has no locks, nothing is lost or handed out twice, because
the rename decides; only a limit may be exceeded, or a turn taken twice, where two look at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dropq import locks
from dropq.layout import QueueLayout
from dropq.storage import Storage, inode, telling

log = logging.getLogger("dropq")

#: Seconds that a look waits for the lock: who has it needs a millisecond, unless it was stopped in the middle.
PATIENCE = 1.0
#: Seconds between two tries: the kernel waits for a lock without an end, and this wait has to have one.
POLL = 0.001

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PolicyLock:
    """The lock file of a queue; the kernel lets go of it when its holder dies, however that dies.

    It is opened for each look, and let go of before it is closed: a child that is forked has no part in it.
    """

    def __init__(self, layout: QueueLayout, storage: Storage) -> None:
        self._path = layout.lock
        self._folder = layout.private
        self._storage = storage
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
        fd, taken = None, False
        try:
            with telling("no message was touched"):
                for _ in self._tries(before_waiting):
                    fd = self._opened() if fd is None else fd
                    taken = fd is not None and self._locked(fd)
                    if taken:
                        break
            yield taken
        finally:
            if fd is not None:
                if taken:
                    locks.let_go(fd, self._folder)
                os.close(fd)

    def _opened(self) -> int | None:
        """Open the lock file, which is made with the queue's modes, as others of its group have to open it.

        None where an NFS client was promised that nobody else would: the server has just asked for its promise back.
        """
        while True:
            try:
                fd = os.open(self._path, _OPEN)
            except FileNotFoundError:
                self._storage.make_folder(self._folder)
                self._storage.touch(self._path)
                continue  # RACE: if somebody removes it again and again, so do we
            except BlockingIOError:
                return None
            self._inode = os.fstat(fd).st_ino
            return fd

    def _tries(self, before_waiting: Callable[[], None]) -> Iterator[None]:
        """Yield for each try to take the lock, until it has taken too long."""
        yield
        before_waiting()
        until = time.monotonic() + PATIENCE
        while time.monotonic() <= until:
            time.sleep(POLL)
            yield
        log.warning("%s: held by another process for %s s: nothing is taken meanwhile", self._path, PATIENCE)

    def _locked(self, fd: int) -> bool:
        try:
            return locks.take(fd, self._folder)
        except OSError as error:
            if error.errno not in locks.NO_LOCKS:
                raise
            if not self._warned:
                log.warning("%s: no locks on this file system: limits and turns may be missed by a few", self._path)
            self._warned = True
        return True

    @property
    def broken(self) -> bool:
        """Whether somebody took the file away since it was opened: another may hold the lock of its name, too."""
        try:
            return inode(self._path) != self._inode
        except FileNotFoundError:
            return True
