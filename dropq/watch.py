"""When to look again: what tells a worker that something may have come into a folder.

An event is a hint and nothing more. A burst loses two of three without a sign, and a change made by another host of
a network file system, or below a FUSE mount, gives none. So a wait always ends by its timeout, and whoever waits
lists the folder then: messages are found by listings, events only make it soon.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dropq.consumers import FORKS
from dropq.mounts import MOUNTS, mount_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from watchdog.observers.api import BaseObserver

log = logging.getLogger("dropq")

#: Seconds after which a folder is to be listed again although no event came.
RESCAN = 1.0
#: Seconds between two looks where there are no events.
PAUSE = 0.1

#: In which process, by its forks, folders were observed first.
_OBSERVED: dict[str, int] = {}


class Watch:
    """A context that waits for news of a folder.

    Args:
        folder: the folder.
        poll: look every `PAUSE` seconds, as is done by itself where events do not work.
    """

    def __init__(self, folder: str, *, poll: bool = False) -> None:
        self._folder = folder
        self._poll = poll
        self._observer: BaseObserver | None = None
        # The only queue whose put may interrupt its own get: a signal handler may wake the thread that waits.
        self._hints: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> Watch:
        if not self._poll and events_reach(self._folder):
            self._observer = _observer(self._folder, self.wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observer is not None:
            with _hushed():
                self._observer.stop()
                self._observer.join()
            self._observer = None

    @property
    def events(self) -> bool:
        """Whether events shorten the wait; else it is a pause."""
        return self._observer is not None

    def wake(self) -> None:
        """End the present wait, or the next; any thread and any signal handler may call it."""
        if self._hints.empty():
            self._hints.put(None)

    def wait(self, timeout: float = RESCAN) -> bool:
        """Return when something may have come into the folder, when woken, and at the latest after the timeout.

        Args:
            timeout: seconds; without events the wait is at most `PAUSE`.

        Returns:
            Whether it ended before the timeout.
        """
        woken = False
        with suppress(Empty):
            self._hints.get(timeout=max(timeout if self.events else min(timeout, PAUSE), 0))
            woken = True
            while True:
                self._hints.get_nowait()
        return woken


def events_reach(folder: str, mounts: str = MOUNTS) -> bool:
    """Tell whether changes of a folder by whomever give events here, by the type of its file system."""
    mount = mount_of(folder, mounts)
    return mount is None or not mount.shared


def _observer(folder: str, wake: Callable[[], None]) -> BaseObserver | None:
    """Start to observe a folder; None where that fails, which the log says."""
    if _OBSERVED.setdefault("forks", FORKS.count) != FORKS.count:
        # The thread that reads all events of a process does not live on in a fork, which would wait for it in vain.
        return None
    try:
        from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler

        class Handler(FileSystemEventHandler):
            def dispatch(self, event: FileSystemEvent) -> None:
                wake()

        observer = _new_observer()
        if observer is not None:
            observer.schedule(Handler(), folder, event_filter=[FileCreatedEvent, FileMovedEvent])
            observer.start()
    except (ImportError, OSError, RuntimeError) as error:
        # Too many watches or instances for this user, mostly. Polling finds the same messages.
        log.warning("%s: no events (%s): looking every %s s instead", folder, error, PAUSE)
        return None
    return observer


def _new_observer() -> BaseObserver | None:
    """Return what this system observes folders with; None where that is no better than our own polling."""
    if not sys.platform.startswith("linux"):
        from watchdog.observers import Observer
        from watchdog.observers.polling import PollingObserver

        observer = Observer()
        return None if isinstance(observer, PollingObserver) else observer  # it looks at every file each time
    from watchdog.observers.api import BaseObserver
    from watchdog.observers.inotify import InotifyEmitter
    from watchdog.observers.inotify_c import InotifyConstants

    class Arrivals(InotifyEmitter):
        """Asks the kernel for arrivals alone: each claim would be an event too, searched through for half a second."""

        def get_event_mask_from_filter(self) -> Any:
            return InotifyConstants.IN_CREATE | InotifyConstants.IN_MOVED_TO

    return BaseObserver(Arrivals)


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep an observer that stops from logging, as an error, that an event came just then."""
    logger = logging.getLogger("watchdog.observers.inotify")

    def not_the_last_event(record: logging.LogRecord) -> bool:
        return "when the thread is inactive" not in record.getMessage()

    logger.addFilter(not_the_last_event)
    try:
        yield
    finally:
        logger.removeFilter(not_the_last_event)
