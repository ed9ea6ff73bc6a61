"""The look: what one pass over a queue's names, and its log, say of it; and a viewer that looks again and again.

`top` and `metrics` show it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from heapq import heappop, heappush

from dropq.diagnosis import health
from dropq.diagnosis.health import STILL, Health, Limits
from dropq.diagnosis.standing import Holder, Standing
from dropq.errors import Unavailable
from dropq.events.reader import RATE_PERIOD, Event, Rates
from dropq.format.layout import PRIVATE, UNSETTLED
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import addresses, why_away
from dropq.storage import reading
from dropq.storage.clock import utc

#: Seconds between two looks at a queue; how many times as long as a look took, if that is more; and seconds for each
#: queue that is looked at, if that is more: all of them together take a tenth of a processor at most.
PAUSE, RESTS, EACH = 1.0, 10, 0.01
#: How many queues are looked at together.
TOGETHER = 4
#: Seconds after which a look counts as without an answer, and another queue may be looked at beside it.
PATIENCE = 5.0
#: How often looks that have become due begin, in seconds.
TICK = 0.2
#: What to do where a file system does not answer.
_SILENT = "look whether its disk is mounted, and its file server runs"


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
        holders: who holds messages, those first whose claims have not changed for the longest.
        rates: messages settled a second in the last minute, by the host and number of each process; None without a log.
        rate_in: messages that came a second; None until two looks were made.
        went_by: the last ten failures and the last ten acts in the log, by time.
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
    went_by: tuple[Event, ...] = ()

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


@dataclass(eq=False)
class Watched:
    """A queue that is looked at again and again.

    Attributes:
        last: its last look, which began at `looked`; None before the first.
        due: when the next look is due.
        began: when the look began that runs; None while none does. These times are on the monotonic clock.
        is_ephemeral: whether it is a subscription that goes with its holder.
    """

    _root: RootContext
    name: str
    last: Look | None = None
    looked: float = 0.0
    due: float = 0.0
    began: float | None = None
    is_ephemeral: bool = False
    _owners: frozenset[str] | None = None
    _since: int = 0
    _log: Rates | None = None
    _told: Mapping[str, int] = field(default_factory=dict)
    _unsettled: deque[tuple[datetime, int]] = field(default_factory=deque)  # of the last minute, or the last two looks

    def silent(self, now: float) -> float | None:
        """Return for how many seconds it has not answered; None while it may still do so."""
        began = self.began  # RACE: the look may end meanwhile
        return None if began is None or now - began < PATIENCE else now - began

    def newly_settled(self) -> Mapping[str, int]:
        """Return how many messages were settled since this was last asked, or since the first look, by outcome."""
        if self._log is None:
            return {}
        before, self._told = self._told, dict(self._log.totals)
        return {outcome: count - before.get(outcome, 0) for outcome, count in self._told.items()}

    def look(self) -> Look:
        """Look at the queue; raise whatever keeps it from being read."""
        at = utc(self._root.clock.now_ms())
        found = Standing(open_queue(self._root, self.name))
        self._note_claims(found)
        layout = found.context.layout
        self.is_ephemeral = layout.is_subscription and reading.exists(layout.ephemeral)
        rates = self._rates(found.context, at)
        found.moves = rates is not None and any(rates.values())
        return Look(
            self.name,
            at,
            health.judged(found, Limits(still=STILL)),
            found.oldest,
            tuple(found.waiting.ages),
            len(found.signs.living),
            tuple(found.holders),
            rates,
            self._rate_in(at, found.counts, rates),
            () if self._log is None else tuple(self._log.last),
        )

    def _note_claims(self, found: Standing) -> None:
        """Take renewals for no change: a holder that hangs has its lease renewed all the same.

        Where no claim can be renewed, a change in processing/ is a message that moved.
        """
        owners = frozenset(file.claim.owner if file.claim else file.filename for file in found.claimed)
        if owners != self._owners or not any(file.claim and file.claim.ours for file in found.claimed):
            self._owners, self._since = owners, found.now - found.idle_ms
        found.idle_ms = found.now - self._since

    def _rates(self, context: QueueContext, at: datetime) -> dict[tuple[str, int], float] | None:
        if context.config.log == "off":
            return None
        log = self._log or Rates(context.layout.log)
        try:
            log.read(at)
        except OSError:
            return None
        self._log = log
        return log.by_holder(at)

    def _rate_in(
        self, at: datetime, counts: Mapping[str, int], rates: Mapping[tuple[str, int], float] | None
    ) -> float | None:
        """Return how many messages came a second: what left, and what the queue grew by."""
        unsettled = sum(counts[state] for state in UNSETTLED)
        self._unsettled.append((at, unsettled))
        while len(self._unsettled) > 2 and (at - self._unsettled[1][0]).total_seconds() > RATE_PERIOD:
            self._unsettled.popleft()
        before, count = self._unsettled[0]
        seconds = (at - before).total_seconds()
        if rates is None or seconds <= 0:
            return None
        return max(sum(rates.values()) + (unsettled - count) / seconds, 0.0)


class Viewer:
    """Looks at queues again and again: four at once, and never twice at one that does not answer.

    Args:
        names: which queues; None for all that are there.

    Attributes:
        named: whether queues were named.
        problem: why the root could not be listed; None if it could, or queues were named.
        pause: seconds between two looks at a queue, at least.
        rests: how many times as long as a look took, at least, until the next look at its queue.
    """

    def __init__(self, root: RootContext, names: Sequence[str] | None = None) -> None:
        self._root = root
        self.named = names is not None
        self.pause, self.rests = PAUSE, RESTS
        self._listing = Watched(root, "")
        self._changed = threading.Condition()
        self._closed = self._has_listed = self._had_queues = False
        self._seen: dict[str, Watched] = {}
        self._due: list[tuple[float, str]] = []  # a heap; what became of a queue since makes an entry void
        self._running: set[Watched] = set()
        self.problem: Exception | None = None
        self._add(names or ())

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            self._seen[name] = Watched(self._root, name)
            heappush(self._due, (0.0, name))

    def look_soon(self, name: str) -> None:
        """Let the next look at a queue be due now, as something was done to it."""
        with self._changed:
            watched = self._seen.get(name)
            if watched is not None and watched.began is None:
                watched.due = time.monotonic()
                heappush(self._due, (watched.due, name))

    def close(self) -> None:
        """Begin no look any more."""
        self._closed = True

    def all(self) -> list[Watched]:
        """Return the queues, by name."""
        with self._changed:
            return [seen for _, seen in sorted(self._seen.items())]

    @property
    def is_listed(self) -> bool:
        """Whether the root could be listed when that was last tried, and answers now."""
        return self.named or (self.problem is None and self._listing.silent(time.monotonic()) is None)

    @property
    def has_begun(self) -> bool:
        """Whether it is known which queues there are, or what keeps them from being listed."""
        return self.named or self._has_listed

    def refresh(self) -> None:
        """Begin the looks that are due, as far as others have ended; each look that ends does so, too."""
        with self._changed:
            if self._closed:
                return
            now = time.monotonic()
            if not self.named and self._listing.began is None and self._listing.due <= now:
                self._begin(self._listing, self._list)
            while self._due and self._due[0][0] <= now and len(self._answering(now)) < TOGETHER:
                due, name = heappop(self._due)
                watched = self._seen.get(name)
                if watched is not None and watched.began is None and watched.due == due:
                    self._begin(watched, partial(self._look, watched))

    def _answering(self, now: float) -> list[Watched]:
        """Return what is being looked at, and may still answer."""
        return [watched for watched in self._running if watched.silent(now) is None]

    def keep_up(self, seconds: float) -> None:
        """Begin the looks that become due within these seconds, and return after them."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.refresh()
            time.sleep(min(left, TICK))

    def wait(self) -> None:
        """Wait until each queue has been looked at once, or does not answer."""
        self.refresh()
        with self._changed:
            while (self._due and not self._due[0][0]) or not all(one.due for one in self._answering(time.monotonic())):
                self._changed.wait(PATIENCE / 10)
                self.refresh()

    def _begin(self, watched: Watched, act: Callable[[], None]) -> None:
        watched.began = time.monotonic()
        self._running.add(watched)
        try:
            threading.Thread(target=self._run, args=(watched, act), daemon=True).start()
        except RuntimeError:
            self._end(watched)  # this process may have no more threads now

    def _run(self, watched: Watched, act: Callable[[], None]) -> None:
        try:
            act()
        finally:
            self._end(watched)
        self.refresh()

    def _end(self, watched: Watched) -> None:
        with self._changed:
            now = time.monotonic()
            took, watched.began = now - (watched.began or now), None
            watched.due = now + max(self.pause, self.rests * took, EACH * len(self._seen))
            self._running.discard(watched)
            if self._seen.get(watched.name) is watched:
                heappush(self._due, (watched.due, watched.name))
            self._changed.notify_all()

    def _list(self) -> None:
        """Find out which queues there are; look at no entry of the root, as it may lead to a disk that is away."""
        try:
            files = {
                entry.name for entry in reading.entries(self._root.layout.path) if entry.is_file(follow_symlinks=False)
            }
            names = set(addresses(self._root.layout)) - files
            if not names and self._is_away():
                raise Unavailable(f"{self._root.layout.path} has no queues any more, and no dropq.toml: {_SILENT}")
            self.problem, self._had_queues = None, bool(names)
        except Exception as error:  # the names that were found before are as good as any
            self.problem = error
            return
        finally:
            self._has_listed = True
        with self._changed:
            for name in self._seen.keys() - names:
                del self._seen[name]
            self._add(names - self._seen.keys())

    def _is_away(self) -> bool:
        """Return whether the root had queues and is there no more, as where its disk was unmounted."""
        layout = self._root.layout
        is_root = reading.exists(layout.config_file) or reading.exists(f"{layout.path}/{PRIVATE}")
        return self._had_queues and not is_root and not any(addresses(layout))

    def _look(self, watched: Watched) -> None:
        began, name = time.monotonic(), watched.name
        try:
            look = watched.look()
        except Exception as error:
            if self._is_gone(name, error):
                with self._changed:  # RACE: it went since it was listed; or it never was a queue
                    self._seen.pop(name, None)
                return
            look = _unusable(self._root, name, error)
        watched.looked, watched.last = began, look  # RACE: who sees the look sees its time

    def _is_gone(self, name: str, error: Exception) -> bool:
        """Return whether a queue is no more, not only its disk away; False also where that cannot be looked at."""
        try:
            is_gone = not self.named and health.is_gone(self._root, name, error)
            return is_gone and not (self._is_away() or why_away(self._root.layout, name))
        except OSError:
            return False  # it is shown with the error that it had


def overview(root: RootContext, names: Sequence[str] | None = None) -> list[Look]:
    """Look at each queue of a root once, four at a time; one that does not answer has an error.

    OSError if the root cannot be listed; Unavailable if it does not answer.
    """
    viewer = Viewer(root, names)
    viewer.wait()
    viewer.close()
    if viewer.problem is not None:
        raise viewer.problem
    if not viewer.is_listed:
        raise Unavailable(f"{root.layout.path} does not answer: {_SILENT}")
    return [
        each.last or _unusable(root, each.name, Unavailable(f"queue {each.name} does not answer: {_SILENT}"))
        for each in viewer.all()
    ]


def _unusable(root: RootContext, name: str, error: Exception) -> Look:
    return Look(name, utc(root.clock.now_ms()), health.unusable(root, name, error))
