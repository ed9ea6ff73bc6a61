"""Wait until a message may have come into a folder, or into one of several; or until a file has left another folder.

An event is a hint. The kernel drops events when it has too many of them, and a change by another host of a network file
system, or below a FUSE mount, gives no event. So a wait always ends by its timeout, and the waiter then lists the
folder: listings find the messages, events only make that soon. The kernel drops an event only while earlier events are
unread, and those end a wait: so even then the listing comes after the last message. Only the name of a file that was
moved in is read from an event, by who wants to know that.

Who waits for many folders may ask of which the events were, and lists those alone; all others it lists now and then.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import sys
import time
import weakref
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from dropq.storage.mounts import MOUNTS, mount_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from watchdog.observers.inotify_c import WatchDescriptor

log = logging.getLogger("dropq")

#: Seconds after which to list a folder again although no event came.
RESCAN = 1.0
#: Seconds between two looks without events. The first pause doubles to `PAUSE`, grows on to a tenth of the wait until
#: then, and to no more than `LONG_PAUSE`; after a minute's wait it is `LONGEST_PAUSE`.
FIRST_PAUSE = 0.002
PAUSE = 0.05
LONG_PAUSE = 0.19
LONGEST_PAUSE = 0.8
MINUTE = 60.0
#: Seconds of pauses before a wait asks for events, which costs more than a few looks.
PATIENCE = 0.05

#: Nobody is told which files were moved into a folder.
NOBODY: Mapping[str, Callable[[str], object]] = MappingProxyType({})
#: Bytes of events that one read throws away: at least a dozen events, and seldom are there more.
_CHUNK = 4096
#: How an event of the kernel begins: the number of the folder, what happened, a cookie, the length of the name behind.
_EVENT = struct.Struct("iIII")


class Watched(NamedTuple):
    """A folder of a group: its path, and the number that events have of it."""

    group: str
    folder: str
    number: int


class _Wanted(NamedTuple):
    """What a watch waits for; the fields are arguments of `Watch`."""

    folders: Sequence[str]
    leaving: Sequence[str]
    touched: Sequence[str]
    moved_in: Mapping[str, Callable[[str], object]]


class Watch:
    """Waits for changes of folders: by short pauses at first, by events when the wait becomes long.

    One thread at a time may wait; any thread, and any signal handler, may wake it. Its files stay open as long as
    anything refers to it, so that a late wake-up never writes to another file.

    Args:
        folders: the folders into which something comes.
        leaving: the folders that something leaves.
        touched: files; a new time of one ends a wait, but on Linux alone.
        moved_in: called with the name of each file that an event says was moved into a folder, by the folder. On
            systems other than Linux nothing is called.
        poll: use pauses alone, as also happens where events do not work for one of the folders.
    """

    def __init__(
        self,
        *folders: str,
        leaving: Sequence[str] = (),
        touched: Sequence[str] = (),
        moved_in: Mapping[str, Callable[[str], object]] = NOBODY,
        poll: bool = False,
    ) -> None:
        self._wanted = _Wanted(folders, leaving, touched, moved_in)
        self._poll = poll
        self._events: _Inotify | _Observed | None = None
        self._followed: dict[str, frozenset[Watched]] = {}
        self._pause = FIRST_PAUSE
        self._paused = 0.0
        self._began = time.monotonic()
        self._woken_fd, self._wake_fd = _pipe(self)
        self._both: select.epoll | None = None

    @property
    def events(self) -> bool:
        """Whether events end a wait; otherwise a wait is a pause."""
        return self._events is not None

    def observe(self) -> bool:
        """Ask for events now, unless that was done; return whether there are any.

        What came before gives no event: list the folders afterwards.
        """
        if self._events is None and not self._poll:
            wanted = self._wanted
            reach = all(map(events_reach, (*wanted.folders, *wanted.leaving, *wanted.touched)))
            self._events = _events(wanted, self.wake) if reach else None
            self._poll = self._events is None
        return self.events

    def follow(self, group: str, folders: Sequence[str] = (), leaving: Sequence[str] = ()) -> bool:
        """Wait for the folders of a group, too, and no longer for others of it; see whether the paths lead elsewhere.

        When something comes into a folder, or leaves one, `changed` returns the group; no folders end it. Return
        whether there is a new folder among them: list them once more, as what came before gave no event.
        """
        before = self._followed.pop(group, frozenset())
        if not self.observe() or self._events is None:
            return False
        try:
            asked = [(folder, False) for folder in folders] + [(folder, True) for folder in leaving]
            added = [self._events.add(group, folder, leaves) for folder, leaves in asked]
        except (OSError, RuntimeError) as error:
            _say_polled(group, error)
            self._events, self._poll = None, True
            return True
        found = frozenset(watched for watched in added if watched is not None)
        for watched in before - found:
            self._events.drop(watched)
        if found:
            self._followed[group] = found
        if found <= before:
            return False
        if not events_reach(folders[0]):
            self._events, self._poll = None, True
        return True

    def changed(self) -> frozenset[str] | None:
        """Return the groups that events were of since the last call; None if any may have changed."""
        return None if self._events is None else self._events.changed()

    def fileno(self) -> int:
        """Return a descriptor for the caller's own poll: it is readable when a wait would end at once.

        `wait(0)` empties it. Without `events`, only a wake-up makes it readable: then look every `PAUSE` seconds.
        """
        if not self.observe() or self._events is None or self._events.fd is None:
            return self._woken_fd
        if self._both is None:
            self._both = select.epoll()
            self._both.register(self._woken_fd, select.EPOLLIN)
            self._both.register(self._events.fd, select.EPOLLIN)
        return self._both.fileno()

    @property
    def waker(self) -> int:
        """A descriptor for the caller's own poll, which only a wake-up makes readable; `wait(0)` empties it, too."""
        return self._woken_fd

    def begin(self) -> None:
        """Begin a new wait: without events its first pauses are short."""
        self._pause, self._began = FIRST_PAUSE, time.monotonic()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        with suppress(BlockingIOError):  # the pipe is full of wake-ups: one of them ends the wait
            os.write(self._wake_fd, b"\0")

    def wait(self, timeout: float = RESCAN) -> bool:
        """Wait until something may have come into a folder, or left one, until a wake-up, or for so many seconds.

        Without events it is a pause at most. Return whether the wait ended before the timeout.
        """
        if self._events is None:
            if self._paused >= PATIENCE and not self._poll and self.observe():
                return True  # the caller lists first what came until now
            timeout = min(timeout, self._pause)
            waited = time.monotonic() - self._began
            self._pause = min(2 * self._pause, max(PAUSE, min(waited / 10, LONG_PAUSE)))
            if waited > MINUTE:
                self._pause = LONGEST_PAUSE
            self._paused += timeout
        ready = [fd for fd, _ in self._poller().poll(max(timeout, 0) * 1000)]
        for fd in ready:
            if fd == self._woken_fd:
                _empty(fd)
            elif self._events is not None:
                self._events.read()
        if not ready and self._events is not None:
            self._events.renew()
        return bool(ready)

    def rest(self, timeout: float) -> None:
        """Wait until a wake-up, or until the timeout; what comes into the folders does not end this wait."""
        poller = select.poll()
        poller.register(self._woken_fd, select.POLLIN)
        if poller.poll(max(timeout, 0) * 1000):
            _empty(self._woken_fd)

    def _poller(self) -> select.poll:
        """Return a new poller for each wait: a signal handler may wait while its own thread does."""
        poller = select.poll()
        poller.register(self._woken_fd, select.POLLIN)
        if self._events is not None and self._events.fd is not None:
            poller.register(self._events.fd, select.POLLIN)
        return poller


def events_reach(folder: str, mounts: str = MOUNTS) -> bool:
    """Return whether every change of a folder gives an event here, by the type of its file system."""
    mount = mount_of(folder, mounts)
    return mount is None or not mount.shared


def _events(wanted: _Wanted, wake: Callable[[], None]) -> _Inotify | _Observed | None:
    """Ask for the events of folders and files; where that fails, log it and return None."""
    try:
        return _Inotify(wanted) if sys.platform.startswith("linux") else _observed(wanted, wake)
    except (ImportError, OSError, RuntimeError) as error:
        # Too many watches or instances for this user, mostly. Polling finds the same messages.
        _say_polled(", ".join([*wanted.folders, *wanted.touched]), error)
        return None


def _say_polled(folders: str, error: Exception) -> None:
    log.warning("%s: no events (%s): looking every %s s instead", folders, error, PAUSE)


class _Inotify:
    """The kernel's own events, without watchdog's threads: what those read from an event is not needed here.

    The file `fd` is readable while there are events.
    """

    def __init__(self, wanted: _Wanted) -> None:
        from watchdog.observers.inotify_c import (
            InotifyConstants,
            inotify_add_watch,
            inotify_init,
            inotify_rm_watch,
        )

        # What leaves target/ is no event: each claim would be one.
        self._comes = InotifyConstants.IN_CREATE | InotifyConstants.IN_MOVED_TO
        self._leaves = InotifyConstants.IN_DELETE | InotifyConstants.IN_MOVED_FROM
        self._masks = {os.fsencode(folder): self._comes for folder in wanted.folders}
        self._masks |= {os.fsencode(folder): self._leaves for folder in wanted.leaving}
        self._masks |= {os.fsencode(file): InotifyConstants.IN_ATTRIB for file in wanted.touched}
        self._add_watch, self._remove_watch = inotify_add_watch, inotify_rm_watch
        self._moves, self._lost = InotifyConstants.IN_MOVED_TO, InotifyConstants.IN_Q_OVERFLOW
        self._moved_in = {os.fsencode(folder): note for folder, note in wanted.moved_in.items()}
        self._notes: dict[int, Callable[[str], object]] = {}  # by the number that events have of a folder
        self._groups: dict[int, dict[str, bool]] = {}
        self._changed: set[str] | None = set()
        self.fd = _done(inotify_init())
        _close_with(self, self.fd)
        os.set_inheritable(self.fd, False)
        os.set_blocking(self.fd, False)
        for path in self._masks:
            self._watch(path)

    def renew(self) -> None:
        """Report on the folders that the paths lead to now, but for those of groups."""
        for path in self._masks:
            with suppress(OSError):  # it is gone: the listing that follows raises
                self._watch(path)

    def _watch(self, path: bytes) -> None:
        number = _done(self._add_watch(self.fd, path, self._masks[path]))  # the same for a folder that is watched
        if (note := self._moved_in.get(path)) is not None:
            self._notes[number] = note

    def add(self, group: str, folder: str, leaves: bool) -> Watched | None:
        """Report on the folder of a group that a path leads to now; return None if it leads to none."""
        try:
            number = _done(self._add_watch(self.fd, os.fsencode(folder), self._leaves if leaves else self._comes))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):  # no more folders may be watched
                raise
            return None
        self._groups.setdefault(number, {})[group] = leaves  # two paths may lead to one folder
        return Watched(group, folder, number)

    def drop(self, watched: Watched) -> None:
        """Report on a folder of a group no more."""
        groups = self._groups.get(watched.number, {})
        if groups.pop(watched.group, None) is not None and not groups:
            del self._groups[watched.number]
            # This fails if the folder is gone: then the kernel has removed it.
            self._remove_watch(self.fd, cast("WatchDescriptor", watched.number))

    def changed(self) -> frozenset[str] | None:
        """Return the groups that events were of since the last call; None if any may have changed."""
        changed, self._changed = self._changed, set()
        return None if changed is None else frozenset(changed)

    def read(self) -> None:
        """Read all events, so that the file is not readable any more."""
        for events in _chunks(self.fd):
            at = 0
            while (self._notes or self._groups) and at < len(events):
                number, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                name = events[at - length : at].rstrip(b"\0")
                if mask & self._lost:
                    self._changed = None
                elif self._changed is not None:
                    # What leaves under such a name was a draft.
                    left, groups = name.startswith(b"."), self._groups.get(number, {})
                    self._changed.update(group for group, leaves in groups.items() if not (leaves and left))
                if mask & self._moves and (note := self._notes.get(number)) is not None:
                    note(os.fsdecode(name))


class _Observed:
    """The events of watchdog's observer, but for Linux: they wake the watch, and there is no file to read.

    `schedule` watches a folder, and returns what ends it. Any group may have changed.
    """

    fd = None

    def __init__(self, schedule: Callable[[str, bool], Callable[[], None]]) -> None:
        self._schedule = schedule
        self._ends: dict[str, Callable[[], None]] = {}

    def add(self, group: str, folder: str, leaves: bool) -> Watched:
        if folder not in self._ends:
            self._ends[folder] = self._schedule(folder, leaves)
        return Watched(group, folder, 0)

    def drop(self, watched: Watched) -> None:
        if (end := self._ends.pop(watched.folder, None)) is not None:
            end()

    def changed(self) -> None: ...
    def read(self) -> None: ...
    def renew(self) -> None: ...


def _observed(wanted: _Wanted, wake: Callable[[], None]) -> _Observed | None:
    from watchdog.events import (
        FileCreatedEvent,
        FileDeletedEvent,
        FileMovedEvent,
        FileSystemEvent,
        FileSystemEventHandler,
    )
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

    def schedule(folder: str, leaves: bool) -> Callable[[], None]:
        kinds: list[type[FileSystemEvent]] = [FileDeletedEvent if leaves else FileCreatedEvent, FileMovedEvent]
        return partial(observer.unschedule, observer.schedule(Handler(), folder, event_filter=kinds))

    for folder in wanted.folders:
        schedule(folder, False)
    for folder in wanted.leaving:
        schedule(folder, True)
    observer.start()
    events = _Observed(schedule)
    weakref.finalize(events, observer.stop)
    return events


def _done(result: int) -> int:
    """Return what a call of the C library returned; raise its error if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _pipe(owner: object) -> tuple[int, int]:
    """Make a pipe that never blocks; close it when its owner is gone."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
        _close_with(owner, end)
    return ends


def _close_with(owner: object, fd: int) -> None:
    """Close a descriptor when its owner is gone; not at the end of the program, as a thread may still wait there."""
    weakref.finalize(owner, os.close, fd).atexit = False


def _empty(fd: int) -> None:
    for _ in _chunks(fd):
        pass


def _chunks(fd: int) -> Iterator[bytes]:
    """Read everything that waits; an event is in one chunk."""
    with suppress(BlockingIOError):
        while True:
            yield (chunk := os.read(fd, _CHUNK))
            if len(chunk) <= _CHUNK // 2:  # an event is shorter than the other half: else there may be more
                return
