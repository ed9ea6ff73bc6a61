"""When to look again: what tells somebody who waits for a message that one may have come into a folder.

An event is a hint and nothing more. The kernel drops events when it has too many of them, and a change made by another
host of a network file system, or below a FUSE mount, gives none. So a wait always ends by its timeout, and whoever
waits lists the folder then: messages are found by listings, events only make it soon. An event is dropped only while
earlier ones are still unread, and those end a wait: so even then the listing comes after the last message.

Who waits asks for the events itself, and polls for them: a thread in between would cost as much as the whole way from
the kernel to here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from dropq.mounts import MOUNTS, mount_of

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("dropq")

#: Seconds after which a folder is to be listed again although no event came.
RESCAN = 1.0
#: Seconds between two looks where there are no events: the first pause, and the longest, to which it doubles.
FIRST_PAUSE = 0.002
PAUSE = 0.05
#: Seconds that are waited by pauses before events are asked for, which costs more than a few looks.
PATIENCE = 0.05

#: Bytes that are read at once of what is thrown away: at least a dozen events, and seldom are there more.
_CHUNK = 4096


class Watch:
    """Waits for news of a folder: by short pauses at first, by events when that becomes long.

    One thread at a time may wait; any thread, and any signal handler, may wake it. It lasts as long as anybody refers
    to it, so that whoever wakes it late meets no other's files.

    Args:
        folder: the folder.
        poll: go on with pauses, as is done by itself where events do not work.
    """

    def __init__(self, folder: str, *, poll: bool = False) -> None:
        self._folder = folder
        self._poll = poll
        self._events: Events | None = None
        self._pause = FIRST_PAUSE
        self._paused = 0.0
        self._bell, self._rope = _pipe(self)

    @property
    def events(self) -> bool:
        """Whether events end the wait; else it is a pause."""
        return self._events is not None

    def observe(self) -> bool:
        """Ask for events now, where that was not done; tell whether there are any.

        What came before gives none: look for it afterwards.
        """
        if self._events is None and not self._poll:
            self._poll = not events_reach(self._folder)
            self._events = None if self._poll else _events(self._folder, self.wake)
            self._poll = self._events is None
        return self.events

    def begin(self) -> None:
        """Begin a wait anew: where there are no events the first pauses are short."""
        self._pause = FIRST_PAUSE

    def wake(self) -> None:
        """End the present wait, or the next."""
        with suppress(BlockingIOError):  # so many have rung that it is heard anyway
            os.write(self._rope, b"\0")

    def wait(self, timeout: float = RESCAN) -> bool:
        """Return when something may have come into the folder, when woken, and at the latest after the timeout.

        Args:
            timeout: seconds; without events the wait is at most `PAUSE`.

        Returns:
            Whether it ended before the timeout.
        """
        if self._events is None:
            if self._paused >= PATIENCE and not self._poll and self.observe():
                return True  # what came until now is to be looked for first
            timeout = min(timeout, self._pause)
            self._pause = min(2 * self._pause, PAUSE)
            self._paused += timeout
        told = [fd for fd, _ in self._poller().poll(max(timeout, 0) * 1000)]
        for fd in told:
            _empty(fd)
        if not told and self._events is not None:
            self._events.renew()
        return bool(told)

    def rest(self, timeout: float) -> None:
        """Return when woken, and at the latest after the timeout: what comes into the folder meanwhile waits."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        if poller.poll(max(timeout, 0) * 1000):
            _empty(self._bell)

    def _poller(self) -> select.poll:
        """Return one of its own for each wait: a signal handler may wait while its own thread does."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        if self._events is not None and self._events.fd is not None:
            poller.register(self._events.fd, select.POLLIN)
        return poller


def events_reach(folder: str, mounts: str = MOUNTS) -> bool:
    """Tell whether changes of a folder by whomever give events here, by the type of its file system."""
    mount = mount_of(folder, mounts)
    return mount is None or not mount.shared


class Events(Protocol):
    """What tells of arrivals in a folder: by a file that becomes readable, or by calling what it was given."""

    @property
    def fd(self) -> int | None:
        """The file; None where it calls."""

    def renew(self) -> None:
        """See to it that it is the folder which the path leads to now that is told of."""


def _events(folder: str, wake: Callable[[], None]) -> Events | None:
    """Ask for the events of a folder; None where that fails, which the log says."""
    try:
        return _Inotify(folder) if sys.platform.startswith("linux") else _observed(folder, wake)
    except (ImportError, OSError, RuntimeError) as error:
        # Too many watches or instances for this user, mostly. Polling finds the same messages.
        log.warning("%s: no events (%s): looking every %s s instead", folder, error, PAUSE)
        return None


class _Inotify:
    """The kernel's own events, without watchdog's threads: what they find out of an event is not asked for."""

    def __init__(self, folder: str) -> None:
        from watchdog.observers.inotify_c import InotifyConstants, inotify_add_watch, inotify_init

        self._path = os.fsencode(folder)
        # Arrivals alone: each claim would be an event too.
        self._mask = InotifyConstants.IN_CREATE | InotifyConstants.IN_MOVED_TO
        self._add_watch = inotify_add_watch
        self.fd = _done(inotify_init())
        weakref.finalize(self, os.close, self.fd)
        os.set_inheritable(self.fd, False)
        os.set_blocking(self.fd, False)
        self._watch()

    def renew(self) -> None:
        with suppress(OSError):  # it is gone: whoever looks is told
            self._watch()

    def _watch(self) -> None:
        _done(self._add_watch(self.fd, self._path, self._mask))  # of a folder that is watched it changes nothing


class _Observed:
    """The events of watchdog's observer, on systems other than Linux."""

    fd = None

    def renew(self) -> None:
        """Do nothing: it observes the folder that it was given."""


def _observed(folder: str, wake: Callable[[], None]) -> Events | None:
    from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer
    from watchdog.observers.polling import PollingObserver

    wake_weakly = weakref.WeakMethod(wake)

    class Handler(FileSystemEventHandler):
        def dispatch(self, event: FileSystemEvent) -> None:
            if (awake := wake_weakly()) is not None:
                awake()

    observer = Observer()
    if isinstance(observer, PollingObserver):
        return None  # it looks at every file each time: our own polling is better
    observer.schedule(Handler(), folder, event_filter=[FileCreatedEvent, FileMovedEvent])
    observer.start()
    events = _Observed()
    weakref.finalize(events, observer.stop)
    return events


def _done(result: int) -> int:
    """Return what a call of the C library returned, unless that says that it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _pipe(owner: object) -> tuple[int, int]:
    """Make a pipe that nobody has to wait for, closed when its owner is gone."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
        weakref.finalize(owner, os.close, end)
    return ends


def _empty(fd: int) -> None:
    """Read all that there is, and throw it away."""
    with suppress(BlockingIOError):
        while len(os.read(fd, _CHUNK)) > _CHUNK // 2:  # an event is shorter than that: there may be more
            pass
