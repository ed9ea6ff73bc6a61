"""The look: what one pass over a queue's names, and its log, say of it; and a viewer that looks again and again.

`ls`, `health`, `top` and `metrics` show it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from dropq.diagnosis import health
from dropq.diagnosis.health import STILL, Health, Limits
from dropq.diagnosis.standing import AGES, Holder
from dropq.errors import DropqError, NoSuchQueue, Unavailable
from dropq.events.reader import RATE_PERIOD, Rates
from dropq.format.layout import UNSETTLED
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import open_queue
from dropq.storage import reading
from dropq.storage.clock import utc

__all__ = ["AGES", "STILL", "Holder", "Look", "Seen", "Viewer", "overview"]

#: Seconds between two looks at a queue; and how many times as long as a look took, if that is more.
PAUSE, RESTS = 1.0, 10
#: How many queues are looked at together.
TOGETHER = 4
#: Seconds after which a look counts as without an answer, and another queue may be looked at beside it.
PATIENCE = 5.0


@dataclass(frozen=True)
class Look:
    """What a look at a queue showed.

    Attributes:
        at: when it began, by the file server's clock.
        health: whether it is well, why not, and how many messages lie in each state.
        oldest: seconds that the oldest message has waited in target/, in delayed/ since it was due, and in processing/
            without a running lease.
        ages: how many wait for at most 1 s, 10 s, 1 min, 10 min, 1 h, 6 h and 1 d, each without those before; and the
            others.
        consumers: how many subscriptions live.
        holders: who holds messages, those first who have held one for the longest.
        rates: messages settled a second in the last minute, by the host and number of each process; None without a log.
        rate_in: messages that came a second; None until two looks were made.
        took: seconds that the look took.
    """

    queue: str
    at: datetime
    health: Health
    oldest: Mapping[str, float] = field(default_factory=dict)
    ages: tuple[int, ...] = ()
    consumers: int = 0
    holders: tuple[Holder, ...] = ()
    rates: Mapping[tuple[str, int], float] | None = None
    rate_in: float | None = None
    took: float = 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """How many messages lie in each state; empty for a queue that cannot be read."""
        return self.health.counts

    @property
    def still(self) -> str:
        """Why the queue stands still; "" if it does not."""
        return next((one.message for one in (*self.health.reasons, *self.health.notes) if one.kind == "still"), "")

    @property
    def rate_out(self) -> float | None:
        """Messages that left a second, in the last minute; None without a log."""
        return None if self.rates is None else sum(self.rates.values())


class Watched:
    """A queue that is looked at again and again."""

    def __init__(self, root: RootContext, name: str, still: float) -> None:
        self._root = root
        self.name = name
        self._still = still
        #: Whether it is a subscription that goes with its holder.
        self.is_ephemeral = False
        self._log: Rates | None = None
        self._told: Mapping[str, int] = {}
        self._unsettled: deque[tuple[datetime, int]] = deque()  # of the last minute

    def newly_settled(self) -> Mapping[str, int]:
        """Return how many messages were settled since this was last asked, or since the first look, by outcome."""
        if self._log is None:
            return {}
        before, self._told = self._told, dict(self._log.totals)
        return {outcome: count - before.get(outcome, 0) for outcome, count in self._told.items()}

    def look(self) -> Look:
        """Look at the queue.

        Raises:
            NoSuchQueue: it is not there any more.
        """
        began, at = time.monotonic(), utc(self._root.clock.now_ms())
        try:
            found = health.stands(open_queue(self._root, self.name))
            layout = found.context.layout
            self.is_ephemeral = layout.is_subscription and reading.exists(layout.ephemeral)
            rates = self._rates(found.context, at)
            return Look(
                self.name,
                at,
                health.judged(found, Limits(still=self._still)),
                found.oldest,
                tuple(found.waiting.ages),
                len(found.signs.living),
                tuple(found.holders),
                rates,
                self._rate_in(at, found.counts, rates),
                time.monotonic() - began,
            )
        except (DropqError, OSError) as error:
            return Look(self.name, at, health.unusable(self._root, self.name, error), took=time.monotonic() - began)

    def _rates(self, context: QueueContext, at: datetime) -> dict[tuple[str, int], float] | None:
        if context.config.log == "off":
            return None
        self._log = self._log or Rates(context.layout.log)
        self._log.read(at)
        return self._log.by_holder(at)

    def _rate_in(
        self, at: datetime, counts: Mapping[str, int], rates: Mapping[tuple[str, int], float] | None
    ) -> float | None:
        """Return how many messages came a second: what left, and what the queue grew by."""
        unsettled = sum(counts[state] for state in UNSETTLED)
        self._unsettled.append((at, unsettled))
        while (at - self._unsettled[0][0]).total_seconds() > RATE_PERIOD:
            self._unsettled.popleft()
        before, count = self._unsettled[0]
        seconds = (at - before).total_seconds()
        if rates is None or seconds <= 0:
            return None
        return max(sum(rates.values()) + (unsettled - count) / seconds, 0.0)


@dataclass
class Seen:
    """What a viewer knows of a queue.

    Attributes:
        look: its last look, which began at `looked`; None before the first.
        due: when the next look is due.
        began: when the look began that runs; None while none does. These times are on the monotonic clock.
    """

    watched: Watched
    look: Look | None = None
    looked: float = 0.0
    due: float = 0.0
    began: float | None = None

    def silent(self, now: float) -> float | None:
        """Return for how many seconds it has not answered; None while it may still do so."""
        return None if self.began is None or now - self.began < PATIENCE else now - self.began


class Viewer:
    """Looks at queues again and again: four at once, and never twice at one that does not answer.

    Args:
        names: which queues; None for all that are there.
        still: seconds for which nobody takes or settles a message before a queue stands still.
    """

    def __init__(self, root: RootContext, names: Sequence[str] | None = None, still: float = STILL) -> None:
        self._root = root
        self.names = names
        self._still = still
        self._listing = Seen(Watched(root, "", still))
        self._changed = threading.Condition()
        #: The queues by name.
        self.seen: dict[str, Seen] = {name: self._new(name) for name in names or ()}

    def _new(self, name: str) -> Seen:
        return Seen(Watched(self._root, name, self._still))

    def refresh(self) -> None:
        """Begin the looks that are due, as far as others have ended."""
        with self._changed:
            now = time.monotonic()
            if self.names is None and self._listing.began is None and self._listing.due <= now:
                self._begin(self._listing, self._list)
            running = sum(seen.began is not None and seen.silent(now) is None for seen in self.seen.values())
            waiting = sorted(
                (seen for seen in self.seen.values() if seen.began is None and seen.due <= now),
                key=lambda seen: seen.due,
            )
            for seen in waiting[: max(TOGETHER - running, 0)]:
                self._begin(seen, partial(self._look, seen))

    def wait(self, timeout: float) -> bool:
        """Wait until each queue has been looked at once, or does not answer; return whether that is so."""
        until = time.monotonic() + timeout
        while True:
            self.refresh()
            with self._changed:
                now = time.monotonic()
                if not any(seen.look is None and seen.silent(now) is None for seen in self._all()):
                    return True
                if now >= until:
                    return False
                self._changed.wait(min(until - now, PATIENCE / 10))

    def all(self) -> list[Seen]:
        """Return the queues, by name."""
        with self._changed:
            return [seen for _, seen in sorted(self.seen.items())]

    def _all(self) -> Iterator[Seen]:
        yield from self.seen.values()
        if self.names is None and not self._listing.due and self._listing.silent(time.monotonic()) is None:
            yield self._listing

    def _begin(self, seen: Seen, act: Callable[[], None]) -> None:
        seen.began = time.monotonic()
        threading.Thread(target=self._run, args=(seen, act), daemon=True).start()

    def _run(self, seen: Seen, act: Callable[[], None]) -> None:
        try:
            act()
        finally:
            with self._changed:
                now = time.monotonic()
                took, seen.began = now - (seen.began or now), None
                seen.due = now + max(PAUSE, RESTS * took)
                self._changed.notify_all()

    def _list(self) -> None:
        names = set(health.queues(self._root))
        with self._changed:
            for name in self.seen.keys() - names:
                del self.seen[name]
            for name in sorted(names - self.seen.keys()):
                self.seen[name] = self._new(name)

    def _look(self, seen: Seen) -> None:
        began = time.monotonic()
        try:
            look = seen.watched.look()
        except NoSuchQueue as error:
            look = Look(seen.watched.name, utc(self._root.clock.now_ms()), health.unread(seen.watched.name, error))
        seen.look, seen.looked = look, began


def overview(root: RootContext, names: Sequence[str] | None = None) -> list[Look]:
    """Look at each queue of a root once, four at a time; one that does not answer has an error."""
    viewer = Viewer(root, names)
    viewer.wait(float("inf"))
    return [seen.look or _silent(root, name) for name, seen in sorted(viewer.seen.items())]


def _silent(root: RootContext, name: str) -> Look:
    text = f"queue {name} does not answer: look whether its disk is mounted, and its file server runs"
    return Look(name, utc(root.clock.now_ms()), health.unread(name, Unavailable(text)))
