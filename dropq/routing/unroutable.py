"""Which waiting messages are unroutable: no selector takes them, and routers have run for long enough.

`.dropq/routers` has the time since which routers have run, and the gaps in which no router ran (docs/protocol.md).

Invariant: for every router, a message that came in a gap counts from the end of the gap, and so does the end of a
subscription. So routers that start before the consumers make no dead letters of messages that wait for these.
"""

from __future__ import annotations

import logging
import os
from itertools import chain

from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.storage import liveness, reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

#: Milliseconds after which a router notes again that it runs.
SAID_EVERY = 60_000
#: Milliseconds without a router after which they count as running only since the next: cron may start them seldom.
FORGOTTEN_AFTER = 600_000
#: How many gaps count at most: each is longer than `unroutable_after` divided by this.
MOST_GAPS = 100
#: The longest content of the file that counts: a time in ms, and two for each gap.
LONGEST = 4096


class Unroutable:
    """Decides which of a queue's waiting messages are unroutable, of those that no selector takes.

    If `read_only`, it writes nothing, and returns what the next router will find.
    """

    def __init__(self, context: QueueContext, *, read_only: bool = False) -> None:
        self._context = context
        self._read_only = read_only
        self._patience = context.config.unroutable_after * 1000
        self._gap = max(min(self._patience or SAID_EVERY, SAID_EVERY), self._patience / MOST_GAPS)
        self._since = self._last = self._reads_at = 0
        self._gaps: list[tuple[int, int]] = []  # when a router ran last before each, and first after it
        self._refused = ""
        self._is_noted = True
        self._has_subscriptions: bool | None = None

    def refresh(self) -> None:
        """Read again, when it is asked for, whether anybody is subscribed."""
        self._has_subscriptions = None

    @property
    def has_subscriptions(self) -> bool:
        """Whether anybody was subscribed when it was first asked for since the last refresh."""
        if self._has_subscriptions is None:
            self._has_subscriptions = bool(liveness.known(self._context.layout.consumers))
        return self._has_subscriptions

    def why_not(self, file: MessageFile) -> str:
        """Return why a message that no selector takes is not unroutable yet; "" if it is."""
        if why := self._note_now():
            return f"no selector takes it; {why}"
        layout, now = self._context.layout, self._last
        came = reading.changed_ms(f"{layout.target}/{file.filename}", gone=now)
        deserted = reading.changed_ms(layout.consumers, gone=0)  # if it is missing, nobody was ever subscribed
        begun = max(self._since, self._seen(came), self._seen(deserted))
        if not self.has_subscriptions and now - begun >= self._patience:
            return ""
        noted = "" if self._is_noted else ", and none says in .dropq/routers that it looks"
        return (
            f"no selector takes it; when routers have looked for {self._context.config.unroutable_after:g} s without a "
            f"subscription it is unroutable{noted}"
        )

    def _note_now(self) -> str:
        """Note that a router runs now; return why no message, whatever its age, is unroutable; "" if some may be."""
        now = self._context.clock.now_ms()
        if not self._last <= now < self._reads_at or now - self._last > self._gap:  # the clock may have been set back
            self._reads_at = now + SAID_EVERY
            try:
                self._read(now)
                self._refused = ""
            except OSError as error:
                why = f"since when routers look cannot be read and noted: {describe(error)}"
                if not (self._refused or self._read_only):
                    log.warning("queue %s: what no selector takes waits: %s", self._context.name, why)
                self._refused = why
        self._last = now
        return self._refused

    def _seen(self, changed: int) -> int:
        """Return when a router could first see a change of this time."""
        return max([changed, *(first for last, first in self._gaps if last < changed)])

    def _read(self, now: int) -> None:
        """Read since when routers have run; note that a router runs now.

        RACE: two routers may begin at once; each then notes its own beginning, and they differ by that moment. The
        mtime is read first: so this router also sees a gap that another router notes meanwhile.
        """
        path, storage = self._context.layout.routers, self._context.storage
        last = min(max(reading.written_ms(path, gone=0), 0 if self._refused else self._last), now)
        said = (reading.read_small(path, LONGEST) or b"").split()
        since, *times = map(int, said) if len(said) % 2 and all(map(bytes.isdigit, said)) else [0]
        goes_on = 0 < since <= now and now - last <= max(FORGOTTEN_AFTER, self._patience)
        pairs = zip(times[::2], times[1::2], strict=True)
        self._gaps = [pair for pair in pairs if goes_on and now - self._patience < pair[1] <= now]
        self._since = since if goes_on else now
        is_new = not goes_on or now - last > self._gap
        if goes_on and is_new:
            self._gaps.append((last, now))
        self._is_noted = goes_on or not self._read_only
        if not self._read_only and (is_new or not storage.renew(path)):
            storage.make_folder(os.path.dirname(path))
            storage.write_small(path, b" ".join(b"%d" % time for time in (self._since, *chain(*self._gaps))) + b"\n")
