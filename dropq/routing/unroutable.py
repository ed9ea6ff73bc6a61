"""Which waiting messages are unroutable: what no selector takes, once routers have looked for long enough.

`.dropq/routers` says since when routers have looked; its mtime is the last time that one said so. Only a router that
meets a message which no selector takes writes there.

Invariant: what came while no router looked counts from the next look, and so does the end of a subscription. So a
router that starts before the consumers makes no dead letters of what waits for them.
"""

from __future__ import annotations

import errno
import os

from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.storage import liveness, reading
from dropq.storage.failures import describe

#: Milliseconds after which a router says again that it looks.
SAID_EVERY = 60_000
#: Milliseconds without a look after which routers count as looking only since the next one: cron may look seldom.
FORGOTTEN_AFTER = 600_000
#: The longest content of the file that counts: a time in ms.
LONGEST = 32


class Unroutable:
    """Tells which of a queue's waiting messages are unroutable, of those that no selector takes.

    Args:
        context: the queue.
        only_looks: whether to write nothing, and tell what the next router will find.

    Attributes:
        has_subscriptions: whether anybody was subscribed when it was refreshed.
    """

    def __init__(self, context: QueueContext, *, only_looks: bool = False) -> None:
        self._context = context
        self._only_looks = only_looks
        self._patience = context.config.unroutable_after * 1000
        self._since = self._last = self._reads_at = 0
        self._unseen = 0, 0  # the last look before a while without looks, and the first after it
        self._refused = ""
        self.has_subscriptions = False

    def refresh(self) -> None:
        """Look again whether anybody is subscribed."""
        self.has_subscriptions = bool(liveness.known(self._context.layout.consumers))

    def why_not(self, file: MessageFile) -> str:
        """Return why a message that no selector takes is not unroutable yet; "" if it is."""
        if why := self.why_never():
            return f"no selector takes it; {why}"
        layout, now = self._context.layout, self._last
        came = _changed_ms(f"{layout.target}/{file.filename}", gone=now)
        deserted = _changed_ms(layout.consumers, gone=0)  # where it is missing nobody ever was subscribed
        begun = max(self._since, self._seen(came), self._seen(deserted))
        if not self.has_subscriptions and now - begun >= self._patience:
            return ""
        return (
            f"no selector takes it; when routers have looked for {self._context.config.unroutable_after:g} s without a "
            "subscription it is unroutable"
        )

    def why_never(self) -> str:
        """Look; return why no message becomes unroutable now, whatever its age; "" if messages do."""
        now = self._context.clock.now_ms()
        if not self._last <= now < self._reads_at:  # the clock may have been set back
            self._reads_at = now + SAID_EVERY
            try:
                self._read(now)
                self._refused = ""
            except OSError as error:
                path = self._context.layout.routers
                self._refused = f"nothing becomes unroutable, as {path} cannot be written: {describe(error)}"
        if now - self._last > min(SAID_EVERY, self._patience):
            self._unseen = self._last, now
        self._last = now
        return self._refused

    def _seen(self, changed: int) -> int:
        """Return when a look could first see what changed at a time."""
        last, first = self._unseen
        return first if last < changed < first else changed

    def _read(self, now: int) -> None:
        """Read since when routers have looked; say that one looks now.

        RACE: two routers may begin at once; each then says since when, and they differ by that moment.
        """
        path, storage = self._context.layout.routers, self._context.storage
        said = (reading.read_small(path, LONGEST) or b"").strip()
        since = int(said) if said.isdigit() else 0
        last = min(max(_written_ms(path), self._last), now)
        goes_on = 0 < since <= now and now - last <= max(FORGOTTEN_AFTER, self._patience)
        if self._only_looks:
            if not os.access(path if reading.exists(path) else self._context.layout.private, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        elif not (goes_on and storage.renew(path)):
            storage.make_folder(os.path.dirname(path))
            storage.write_small(path, b"%d\n" % now)
            goes_on = False
        self._since, self._last = (since, last) if goes_on else (now, now)


def _changed_ms(path: str, *, gone: int) -> int:
    try:
        return reading.changed_ms(path)
    except FileNotFoundError:
        return gone


def _written_ms(path: str) -> int:
    try:
        return reading.written_ms(path)
    except FileNotFoundError:
        return 0
