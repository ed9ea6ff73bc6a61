"""What the library's modules know of an open root and of an open queue; nothing here changes a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dropq.config.load import has_dropboxmq
from dropq.config.schema import QueueConfig, RootConfig
from dropq.errors import DropqError, NoSuchQueue
from dropq.events.log import EventLog
from dropq.format.ids import IdSource
from dropq.format.layout import QueueLayout, RootLayout
from dropq.lifecycle.reasons import Reasons
from dropq.lifecycle.settling import Settling
from dropq.lifecycle.sidecars import Sidecars
from dropq.lifecycle.timing import Timing
from dropq.storage import reading
from dropq.storage.clock import Clock
from dropq.storage.failures import storage_error
from dropq.storage.files import Storage


@dataclass(frozen=True, slots=True)
class RootContext:
    """An open root, with the configuration that it had when it was opened."""

    layout: RootLayout
    config: RootConfig
    clock: Clock
    ids: IdSource
    timing: Timing


@dataclass(frozen=True, slots=True)
class QueueContext:
    """An open queue, with the configuration that it had when it was opened."""

    root: RootContext
    name: str
    #: The object that users have of it; the library only passes it on, to the messages that it makes.
    public: object
    layout: QueueLayout
    config: QueueConfig
    storage: Storage
    sidecars: Sidecars
    reasons: Reasons
    settling: Settling
    log: EventLog

    @property
    def clock(self) -> Clock:
        return self.root.clock

    @property
    def timing(self) -> Timing:
        return self.root.timing

    @property
    def is_shared(self) -> bool:
        """Whether a DropboxMQ may consume the queue, which does not look into `.dropq/delayed/`."""
        return self.layout.shared or (self.layout.is_subscription and has_dropboxmq(self.root.layout.path))

    @property
    def read_locks(self) -> tuple[str, ...]:
        """The files that make the queue look empty to consumers while one of them exists.

        These are the root's read-lock and the queue's, and what says that a subscription or a view is being filled.
        """
        recovering = (self.layout.recovering,) if self.is_fed else ()
        return (self.root.layout.read_lock, self.layout.read_lock, *recovering)

    @property
    def is_recovering(self) -> bool:
        """Whether it is a new subscription, or a new view, that is being filled with what topics archived."""
        return self.is_fed and reading.exists(self.layout.recovering)

    @property
    def is_fed(self) -> bool:
        """Whether it is a subscription or a view, and so gets what is published."""
        return self.layout.is_subscription or self.config.underlying_topic is not None

    @property
    def paused(self) -> bool:
        """Whether consumers see an empty queue."""
        return self.switches(routes=False)[0]

    def switches(self, *, routes: bool = True) -> tuple[bool, bool]:
        """Return whether the queue is paused, and whether it has `routes`: with one call for each folder over NFS."""
        lock, routes_file = map(os.path.basename, (self.layout.read_lock, self.layout.routes_file))
        there = reading.those_there(self.layout.base, (lock, routes_file) if routes else (lock,), self.clock)
        elsewhere = (path for path in self.read_locks if path != self.layout.read_lock)
        paused = lock in there or any(reading.is_there(path, self.clock) for path in elsewhere)
        return paused, routes_file in there

    def refused(self, error: OSError, outcome: str) -> DropqError:
        """Return NoSuchQueue for a failed call if the queue is gone, else StorageError; both say the outcome."""
        if isinstance(error, FileNotFoundError) and not reading.exists(self.layout.target):
            return NoSuchQueue(f"queue {self.layout.home} is not there any more; {outcome}")
        if error.filename is None:  # a call on an open file, such as a write
            error.filename = self.layout.base
        return storage_error(error, outcome)

    @contextmanager
    def error_context(self, outcome: str) -> Iterator[None]:
        """Raise dropq's own error, with what became of the messages, when a call in the block fails."""
        try:
            yield
        except OSError as error:
            raise self.refused(error, outcome) from error

    def age_ms(self, path: str) -> int:
        """Return how long ago a file was renamed or changed, in ms; 0 when it is gone."""
        now = self.clock.now_ms()
        return now - reading.changed_ms(path, gone=now)


class OfQueue:
    """Acts on one queue, by its context; it keeps the parts of that at hand which most of its verbs use."""

    def __init__(self, context: QueueContext) -> None:
        self.context = context
        self._layout = context.layout
        self._config = context.config
        self._storage = context.storage
        self._sidecars = context.sidecars
        self._ended = context.log.ended
