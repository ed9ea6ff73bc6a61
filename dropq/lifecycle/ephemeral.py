"""Ephemeral queues: they go with the process that made them, their holder.

`.dropq/ephemeral` marks such a queue, and is its holder's sign of life. The holder locks it before the queue gets its
name, and keeps the lock for as long as it needs the queue; the kernel frees the lock when the holder dies. While it
uses the queue, it also touches the marker each minute: where locks tell nothing, the marker's age does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dropq.format.layout import QueueLayout
from dropq.storage import liveness, reading
from dropq.storage.clock import Clock
from dropq.storage.files import Storage
from dropq.storage.liveness import Presence

#: Seconds after which a holder that uses its queue touches the marker again.
TOUCH_INTERVAL = 60.0
#: The content of a marker whose holder has no lock: no mount has this mark.
_UNLOCKED = b"no lock\n"


class EphemeralMarker:
    """Marks a queue as ephemeral, and holds it from construction until `end`, or until this process dies.

    Make it while the queue still has its hidden name. The lock is the open file's, and goes with it when the queue is
    renamed into place: so a process that sees the queue sees its holder alive.
    """

    def __init__(self, layout: QueueLayout, storage: Storage) -> None:
        self._presence = Presence(layout.private, os.path.basename(layout.ephemeral), storage)
        if not self._presence.is_locked:
            storage.write_new(layout.ephemeral, _UNLOCKED)

    def end(self) -> None:
        """Hold the queue no longer: it is to be removed now, by this process or by a sweep."""
        self._presence.abandon()


def touch(layout: QueueLayout, storage: Storage) -> bool:
    """Note that the holder uses the queue now; return False if the queue is gone."""
    return storage.renew(layout.ephemeral)


@contextmanager
def left(layout: QueueLayout, clock: Clock, older_than: float | None = None) -> Iterator[bool]:
    """Yield whether a queue is ephemeral and its holder is gone; keep other sweeps from finding that meanwhile.

    Where locks tell nothing, the holder counts as gone after `older_than` seconds without a touch; None: never.
    """
    # RACE: a queue that is just being made has its holder's lock before it has a name, so no sweep finds it without.
    name = os.path.basename(layout.ephemeral)
    with liveness.dead(layout.private, name) as is_left:
        if not is_left and older_than is not None and not liveness.is_verifiable(layout.private, name):
            with suppress(FileNotFoundError):  # it is not ephemeral, or gone
                is_left = clock.now_ms() - reading.written_ms(layout.ephemeral) >= older_than * 1000
        yield is_left
