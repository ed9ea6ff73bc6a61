"""The send limits of a queue: its write-lock, which people set, and `max_unprocessed`.

Nothing of a message is written before it is admitted. Only sends by dropq are limited: messages that return to the
queue, are moved into it, or are sent by a script, are counted and never stopped. No lock is taken: senders that ask at
the same moment may all be admitted, and notice it at their next counts. So the limits are approximate.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dropq.errors import QueueFull
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import find_layout
from dropq.lifecycle.processing import committed_files
from dropq.lifecycle.timing import Timing
from dropq.storage import reading

if TYPE_CHECKING:
    from dropq.config.selectors import Selector

log = logging.getLogger("dropq")

#: Seconds after which the log says again why a sender waits.
LOG_WAIT_EVERY = 300.0
#: Discarded messages are logged at most once in this many seconds.
LOG_DISCARDS_EVERY = 5.0

#: What each `overflow` does to a send.
OVERFLOW = {"reject": "sends are refused", "discard": "what is sent is discarded", "block": "senders wait"}

_DELAY, _LIMIT = "delay-milliseconds", "target-limit"
_NUMBER = re.compile("[+-]?[0-9]{1,18}")


class MustWait(Exception):
    """Raised instead of a wait for room, for a sender that has something else to do; nothing was sent."""


class SendLimits:
    """The send limits of one queue, for the process that made this object.

    Args:
        then: for a view, the limits of its topic, which are asked after its own; else None.
        rejects: whether the queue rejects what is beyond its limit, whatever its `overflow` is: for the queue that the
            overflow selector of another sends to.
        waits: whether senders wait for room; else they get MustWait.
    """

    def __init__(
        self,
        name: str,
        context: QueueContext,
        *,
        then: SendLimits | None = None,
        rejects: bool = False,
        waits: bool = True,
    ) -> None:
        most = context.config.max_unprocessed
        self._then = then
        self._write_lock = WriteLock(name, context, waits=waits)
        self._limit = None if most is None else Limit(name, context, most, rejects=rejects, waits=waits)
        both = most, None if then is None else then.most
        #: How many messages may be admitted at once at the most; None for any number.
        self.most: int | None = min((most for most in both if most is not None), default=None)
        self._pid = os.getpid()

    def stop_waiting(self) -> None:
        """Let senders get MustWait, those that wait at this moment within `max_age`; a signal handler may call this."""
        self._write_lock.waits = False
        if self._limit is not None:
            self._limit.waits = False
        if self._then is not None:
            self._then.stop_waiting()

    @property
    def is_ours(self) -> bool:
        """Whether this process made the object: after a fork, threads of the other process may hold its locks."""
        return self._pid == os.getpid()

    @property
    def asks_at(self) -> float:
        """When senders are to ask again, by `time.monotonic()`; 0 for always."""
        return 0.0 if self._limit is not None else self._write_lock.refresh_at

    def admit(self, count: int, *, whole: bool = False) -> int:
        """Admit messages; wait for room if the queue makes senders wait.

        Admit all of them, as a `whole`, or none. Return how many are admitted, at least one; 0 if the queue is full and
        discards. Raise QueueFull if it rejects, and MustWait if these senders do not wait: none was sent.
        """
        count = self._write_lock.admit(count, whole=whole)
        count = count if self._limit is None else self._limit.admit(count, whole=whole)
        return count if self._then is None or not count else self._then.admit(count, whole=whole)

    def refusals(self) -> dict[str, str]:
        """Return what becomes of a send that comes now by each limit that does not admit it, the first one first."""
        found = {"write-lock": self._write_lock.why_not(), "full": "" if self._limit is None else self._limit.why_not()}
        return {limit: why for limit, why in found.items() if why}

    def what_blocks(self) -> str:
        """Return why a message that comes now waits or is refused; "" if it is taken, discarded or sent elsewhere."""
        own = self._write_lock.why_not() or ("" if self._limit is None else self._limit.what_blocks())
        return own or ("" if self._then is None else self._then.what_blocks())

    def admit_one(self) -> bool:
        """Admit one message if the queue has room for it now, and return whether it has; this never waits."""
        own = not self._write_lock.why_not() and (self._limit is None or self._limit.admit_one())
        return own and (self._then is None or self._then.admit_one())


def limits_of_sends(own: QueueContext, to: QueueContext, *, waits: bool) -> SendLimits:
    """Return what lets in a message that is sent to a queue, and goes to another: of a view, its topic.

    A view that rejects limits what is published by it, too.
    """
    limits = SendLimits(to.name, to, waits=waits)
    if own is to or own.config.max_unprocessed is None or own.config.overflow != "reject":
        return limits
    return SendLimits(own.name, own, then=limits, waits=waits)


class Tally:
    """How many messages some folders contain: the last count, plus what this process has sent since.

    A count is used for ten times as long as it took, and for a second at most. Before messages are refused because
    of what was added since, they are counted again.

    Args:
        folders: in the order in which messages pass through them, so that a message that moves on during the count is
            counted twice rather than not at all.
        most: how many messages the folders may contain; a count ends there.
        committed: the queue whose committed messages count, too; None counts none.
    """

    def __init__(
        self,
        folders: Sequence[str],
        ignore: tuple[str, ...],
        most: int,
        timing: Timing,
        *,
        committed: QueueContext | None = None,
    ) -> None:
        self._folders = folders
        self._ignore = ignore
        self._most = most
        self._timing = timing
        self._committed = committed
        self._known = 0
        self._counts_at = 0.0
        self._is_counted = False
        self._lock = threading.RLock()  # a signal handler may send while its thread has the lock

    def enter(self, count: int, *, whole: bool = False) -> int:
        """Return for how many of `count` messages there is room, and add these; `whole` as for `SendLimits.admit`."""
        with self._lock:
            self._count_for(count)
            room = max(self._most - self._known, 0)
            entering = (count if count <= room else 0) if whole else min(count, room)
            self.add(entering)
            return entering

    def has_room(self) -> bool:
        """Return whether there is room for a message, and add none."""
        with self._lock:
            self._count_for(1)
            return self._known < self._most

    def add(self, count: int) -> None:
        """Add messages that are sent, whether there is room or not."""
        with self._lock:
            self._known += count
            self._is_counted = self._is_counted and not count

    def _count_for(self, more: int) -> None:
        """Count again if the last count is old, or leaves no room for so many more."""
        began = time.monotonic()
        if began < self._counts_at and (self._known + more <= self._most or self._is_counted):
            return
        # RACE: messages that others send meanwhile, or have admitted and not sent yet, are in the next count.
        self._known = self._counted()
        self._is_counted = True
        now = time.monotonic()
        self._counts_at = now + min(self._timing.listing_share * (now - began), self._timing.count_age)

    def _counted(self) -> int:
        if not self._most:
            return 0
        known = 0 if self._committed is None else sum(1 for _ in committed_files(self._committed))
        for folder in self._folders:
            for count in reading.message_counts(folder, self._ignore):
                if (known := known + count) >= self._most:
                    return known
        return known


class Limit:
    """`max_unprocessed`: how many messages may be waiting, delayed or held; `overflow` says what happens beyond it.

    What it `rejects`, and whether it `waits`, is as of `SendLimits`.
    """

    def __init__(
        self, name: str, context: QueueContext, most: int, *, rejects: bool = False, waits: bool = True
    ) -> None:
        layout = context.layout
        self.waits = waits
        self._name = name
        self._context = context
        self.most = most
        self._full = f"queue {name} is full (max_unprocessed = {most})"
        self._overflow = "reject" if rejects else context.config.overflow
        self._follows = not rejects
        folders = layout.delayed, layout.target, layout.processing
        self._tally = Tally(folders, context.config.ignore, most, context.timing, committed=context)
        self._discarded = 0
        self._logs_at = 0.0

    def admit(self, count: int, *, whole: bool) -> int:
        """Admit messages as `SendLimits.admit` does, by this limit alone."""
        if whole and count > self.most:
            never = f"queue {self._name} never has room for {count} messages at once (max_unprocessed = {self.most})"
            self._overflow_now(never)
            raise QueueFull(f"{never}: none was sent; send them in smaller jobs, or raise max_unprocessed")
        if entering := self._enter(count, whole):
            return entering
        self._overflow_now(self._full)
        if self._overflow == "discard":
            return self._discard(count if whole else 1)
        if self._overflow == "reject":
            what = f"the job of {count} messages" if whole and count > 1 else "the message"
            raise QueueFull(
                f"{self._full}: {what} was not sent; send again when consumers have settled some, "
                f"`dropq ls {self._name}` shows how many there are"
            )
        return self._wait(count, whole)

    def _overflow_now(self, why: str) -> None:
        """Raise QueueFull, with why and where to send instead, if the queue has an overflow selector."""
        if self._follows and (one := self._overflow_selector()) is not None:
            goes = f"sends to {one.to}" if one.to else "bounces"
            full = QueueFull(f"{why}, and its overflow selector {goes}: nothing was sent")
            full.overflow, full.overflows_to = one, one.to or ""
            raise full

    def why_not(self) -> str:
        """Return what becomes of a message that is sent now; "" if it has room, and then it is admitted."""
        if self.admit_one():
            return ""
        if (one := self._overflow_selector()) is None:
            return OVERFLOW[self._overflow]
        if one.to is None:
            return f"selector {one.name} bounces what is sent, and what has no return address is refused"
        if find_layout(self._context.root.layout.path, one.to) is None:
            return f"sends are refused, as selector {one.name} sends to {one.to}, which is missing"
        return f"selector {one.name} takes what is sent to {one.to}"

    def what_blocks(self) -> str:
        """Do what `SendLimits.what_blocks` does, for this limit alone."""
        if self._overflow == "discard":
            return ""
        with self._context.error_context("the message was not sent"):
            has_room = self._tally.has_room()
        return "" if has_room or self._overflow_selector() is not None else f"{self._full}: {OVERFLOW[self._overflow]}"

    def _overflow_selector(self) -> Selector | None:
        with self._context.error_context("the message was not sent"):
            if not reading.exists(self._context.layout.selectors):
                return None  # most queues have no selectors, and need no more than this check
            from dropq.policies.selectors import overflow_of

            return overflow_of(self._context)

    def admit_one(self) -> bool:
        """Admit one message if there is room, and return whether there is."""
        return self._enter(1, False) == 1

    def _enter(self, count: int, whole: bool) -> int:
        with self._context.error_context("the message was not sent"):
            return self._tally.enter(count, whole=whole)

    def _wait(self, count: int, whole: bool) -> int:
        # Mostly an ack makes room, which causes an event; other changes are found by the next count.
        timing, why, wait = self._context.timing, f"{self._full}: senders wait for consumers", None
        while not (entering := self._enter(count, whole)):
            if not self.waits:
                raise MustWait(why)
            wait = wait or Wait(self._context.layout.processed, why, timing)
            wait.pause(timing.max_age)
            self._overflow_now(self._full)
        return entering

    def _discard(self, count: int) -> int:
        self._discarded += count
        if (now := time.monotonic()) >= self._logs_at:
            log.warning(
                "%s: messages sent to it were discarded: %d since the last warning", self._full, self._discarded
            )
            self._discarded, self._logs_at = 0, now + LOG_DISCARDS_EVERY
        return 0


class WriteLock:
    """`write-lock.properties`: while the file exists, senders wait as long as target/ holds `target-limit` messages.

    As in DropboxMQ, a sender waits at most `delay-milliseconds`, and then sends: -1 is an endless delay, and any other
    number below 0 is none. An empty file means a limit of 0 and an endless delay: it stops all senders until it is
    removed. Whether it `waits` is as of `SendLimits`.
    """

    def __init__(self, name: str, context: QueueContext, *, waits: bool = True) -> None:
        self._name = name
        self._context = context
        self.waits = waits
        self._path = context.layout.write_lock
        self._refresh_at = 0.0
        self._content: bytes | None = None
        self._terms: _Terms | None = None

    @property
    def refresh_at(self) -> float:
        """When the file is to be looked for again, by `time.monotonic()`; 0 while it exists."""
        return 0.0 if self._terms is not None else self._refresh_at

    def admit(self, count: int, *, whole: bool) -> int:
        """Admit messages as `SendLimits.admit` does, by the write-lock alone; it never rejects any."""
        began, wait, timing = time.monotonic(), None, self._context.timing
        while (terms := self._now()) is not None:
            left = terms.delay - (time.monotonic() - began)
            with self._context.error_context("the message was not sent"):
                entering = terms.tally.enter(1 if whole else count)
            if entering or left <= 0:
                admitted = count if whole else max(entering, 1)
                terms.tally.add(admitted - entering)
                return admitted
            why = f"{self._path} makes senders wait: remove it to let them go on"
            if not self.waits:
                raise MustWait(why)
            wait = wait or Wait(self._context.layout.processing, why, timing)
            wait.pause(min(left, timing.max_age))
        return count

    def why_not(self) -> str:
        """Return that senders wait; "" if they need not, and then one message is admitted."""
        terms = self._now()
        with self._context.error_context("the message was not sent"):
            if terms is None or terms.delay <= 0 or terms.tally.enter(1):
                return ""
        return f"senders wait, as {self._path} says"

    def _now(self) -> _Terms | None:
        """Return what the file says; None if there is no file. It is read again after `Timing.max_age`."""
        if time.monotonic() >= self._refresh_at:
            content = self._read()
            if content != self._content:
                self._terms = None if content is None else _Terms(self._path, content, self._context)
                self._content = content
            self._refresh_at = time.monotonic() + self._context.timing.max_age
        return self._terms

    def _read(self) -> bytes | None:
        """Return the file's content; b"" if it cannot be read, None if there is no file."""
        try:
            return reading.read_small(self._path) if reading.is_there(self._path, self._context.clock) else None
        except OSError as error:
            with self._context.error_context("the message was not sent"):
                if error.errno not in reading.CLOSED or not reading.exists(self._path):
                    raise
            if self._content != b"":
                log.warning("%s cannot be read (%s), and counts as empty", self._path, error.strerror)
            return b""


class _Terms:
    """What a write-lock says: the most seconds that a sender waits, and a tally up to where senders begin to wait."""

    def __init__(self, path: str, content: bytes, context: QueueContext) -> None:
        from dropq.format.java_properties import read_properties  # here, as few queues have a write-lock

        properties = read_properties(content)
        for key in properties.keys() - {_LIMIT, _DELAY}:
            log.warning("%s: %s is no key of a write-lock: %s and %s are", path, key, _LIMIT, _DELAY)
        delay = _number(path, properties, _DELAY, default=-1)
        limit = _number(path, properties, _LIMIT, default=0, least=0)
        self.delay = math.inf if delay == -1 else max(delay, 0) / 1000
        self.tally = Tally((context.layout.target,), context.config.ignore, limit, context.timing)


def _number(path: str, properties: Mapping[str, str], key: str, *, default: int, least: int | None = None) -> int:
    text = properties.get(key, str(default)).strip()
    if _NUMBER.fullmatch(text) and (least is None or int(text) >= least):
        return int(text)
    allowed = "a whole number" if least is None else f"a whole number from {least}"
    log.warning("%s: %s = %s: %s is allowed; %d counts", path, key, text, allowed, default)
    return default


class Wait:
    """A sender's wait, in pauses; it logs now and then why the sender waits."""

    def __init__(self, folder: str, why: str, timing: Timing) -> None:
        from dropq.storage.watch import Watch  # here, as most senders never wait, and the import takes time

        self._watch = Watch(folder)
        self._why = why
        self._began = time.monotonic()
        self._logs_at = self._began + timing.first_word

    def pause(self, seconds: float) -> None:
        """Wait for a change in the folder, at most this long."""
        self._watch.wait(seconds)
        now = time.monotonic()
        if now >= self._logs_at:
            self._logs_at = now + LOG_WAIT_EVERY
            log.warning("%s (this sender has waited for %d s)", self._why, now - self._began)
