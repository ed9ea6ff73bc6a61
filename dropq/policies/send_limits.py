"""Whether a queue lets more messages in: by its write-lock, which people set, and by its limit, `max_unprocessed`.

Nothing of a message is written before it is let in. Only who sends by dropq asks; what returns to the queue, is moved
into it, or comes by a script, is counted and never stopped. No file is locked for it: senders that ask at one moment
may all be let in, and each notices at its next count, so that the limits are approximate.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence

from dropq.errors import QueueFull
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.timing import Timing
from dropq.storage import reading

log = logging.getLogger("dropq")

#: Seconds after which the log says again why a sender waits.
NEXT_WORD = 300.0
#: Seconds for which discarded messages are added up before the log tells of more.
DISCARD_WORD = 5.0

_DELAY, _LIMIT = "delay-milliseconds", "target-limit"
#: What is answered of a file that is there and cannot be read: closed to this user, a link, a folder, a socket.
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO})


class Entry:
    """What lets messages into one queue, for the process that made it.

    Args:
        name: the queue's name.
        context: the queue.
    """

    def __init__(self, name: str, context: QueueContext) -> None:
        most = context.config.max_unprocessed
        self._write_lock = WriteLock(name, context)
        self._limit = None if most is None else Limit(name, context, most)
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process made it: after a fork its locks may be held by threads that are not here."""
        return self._pid == os.getpid()

    @property
    def asks_at(self) -> float:
        """The moment from which senders are to ask again, by `time.monotonic()`; 0 for always."""
        return 0.0 if self._limit is not None else self._write_lock.looks_at

    def admit(self, count: int, *, whole: bool = False) -> int:
        """Let in up to so many messages, after a wait where one is due.

        Args:
            count: how many, from 1.
            whole: all of them or none.

        Returns:
            How many: at least one, or 0 where the queue discards what it is too full for.

        Raises:
            QueueFull: the queue rejects them; none was sent.
        """
        count = self._write_lock.admit(count, whole=whole)
        return count if self._limit is None else self._limit.admit(count, whole=whole)


class Tally:
    """How many messages lie in some folders, as one process knows: by a count now and then, its own sends added.

    A count is relied on for ten times as long as it took, and a second at the most; before anything is refused by what
    was added since, there is a new one.

    Args:
        folders: in the order in which messages pass: who moves on meanwhile is counted twice, rather than not at all.
        ignore: patterns of names that are no messages.
        most: at so many no more are let in, nor counted.
        timing: how long a count is relied on.
    """

    def __init__(self, folders: Sequence[str], ignore: tuple[str, ...], most: int, timing: Timing) -> None:
        self._folders = folders
        self._ignore = ignore
        self._most = most
        self._timing = timing
        self._known = 0
        self._counts_at = 0.0
        self._is_counted = False
        self._lock = threading.RLock()  # a signal handler may send while its thread is in here

    def enter(self, count: int, *, whole: bool = False) -> int:
        """Return for how many of so many messages there is room, and count them in."""
        with self._lock:
            if time.monotonic() >= self._counts_at or (self._known + count > self._most and not self._is_counted):
                self._count()
            room = max(self._most - self._known, 0)
            entering = (count if count <= room else 0) if whole else min(count, room)
            self.add(entering)
            return entering

    def add(self, count: int) -> None:
        """Count in what is sent whether there is room or not."""
        with self._lock:
            self._known += count
            self._is_counted = self._is_counted and not count

    def _count(self) -> None:
        began = time.monotonic()
        # RACE: what others send meanwhile, or has not come to its rename yet, is seen by the next count.
        self._known = self._counted()
        self._is_counted = True
        now = time.monotonic()
        self._counts_at = now + min(self._timing.listing_share * (now - began), self._timing.count_age)

    def _counted(self) -> int:
        known = 0
        for folder in self._folders if self._most else ():
            for count in reading.message_counts(folder, self._ignore):
                if (known := known + count) >= self._most:
                    return known
        return known


class Limit:
    """`max_unprocessed`: messages that wait, are delayed or held, and what a send beyond it gets, `overflow`.

    Args:
        name: the queue's name.
        context: the queue.
        most: the limit.
    """

    def __init__(self, name: str, context: QueueContext, most: int) -> None:
        layout = context.layout
        self._name = name
        self._context = context
        self._most = most
        self._full = f"queue {name} is full (max_unprocessed = {most})"
        self._overflow = context.config.overflow
        folders = layout.delayed, layout.target, layout.processing
        self._tally = Tally(folders, context.config.ignore, most, context.timing)
        self._discarded = 0
        self._tells_at = 0.0

    def admit(self, count: int, *, whole: bool) -> int:
        """Do for the limit what `Entry.admit` does for all."""
        if whole and count > self._most:
            raise QueueFull(
                f"queue {self._name} never has room for {count} messages at once (max_unprocessed = {self._most}): "
                "none was sent; send them in smaller jobs, or raise max_unprocessed"
            )
        if entering := self._enter(count, whole):
            return entering
        if self._overflow == "discard":
            return self._discard(count if whole else 1)
        if self._overflow == "reject":
            raise QueueFull(
                f"{self._full}: {f'the job of {count} messages' if whole else 'the message'} was not sent; send again "
                f"when consumers have settled some, `dropq ls {self._name}` shows how many there are"
            )
        return self._wait(count, whole)

    def _enter(self, count: int, whole: bool) -> int:
        with self._context.error_context("the message was not sent"):
            return self._tally.enter(count, whole=whole)

    def _wait(self, count: int, whole: bool) -> int:
        # Mostly an ack makes room, which can be heard; what else does is seen by looking.
        timing = self._context.timing
        wait = _Wait(self._context.layout.processed, f"{self._full}: senders wait for consumers", timing)
        while not (entering := self._enter(count, whole)):
            wait.pause(timing.max_age)
        return entering

    def _discard(self, count: int) -> int:
        self._discarded += count
        if time.monotonic() >= self._tells_at:
            self._tells_at = time.monotonic() + DISCARD_WORD
            log.warning("%s: messages that were sent to it now were discarded, %d of them", self._full, self._discarded)
            self._discarded = 0
        return 0


class WriteLock:
    """`write-lock.properties`: while it is there, senders wait as long as target/ holds `target-limit` messages.

    It is DropboxMQ's: a sender waits `delay-milliseconds` at the most, and then sends all the same; an empty file, with
    a limit of 0 and no end of the delay, stops all senders until somebody removes it.

    Args:
        name: the queue's name.
        context: the queue.
    """

    def __init__(self, name: str, context: QueueContext) -> None:
        self._name = name
        self._context = context
        self._path = context.layout.write_lock
        self._looks_at = 0.0
        self._content: bytes | None = None
        self._terms: _Terms | None = None

    @property
    def looks_at(self) -> float:
        """The moment from which the file is to be looked at again; 0 while it is there."""
        return 0.0 if self._terms is not None else self._looks_at

    def admit(self, count: int, *, whole: bool) -> int:
        """Do for the write-lock what `Entry.admit` does for all: sooner or later it lets in."""
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
            wait = wait or _Wait(self._context.layout.processing, why, timing)
            wait.pause(min(left, timing.max_age))
        return count

    def _now(self) -> _Terms | None:
        """Return what the lock says, as it was a moment ago; None where there is none."""
        if time.monotonic() >= self._looks_at:
            content = self._read()
            if content != self._content:
                self._terms = None if content is None else _Terms(self._path, content, self._context)
                self._content = content
            self._looks_at = time.monotonic() + self._context.timing.max_age
        return self._terms

    def _read(self) -> bytes | None:
        """Return what is in the file, b"" where it cannot be read, None where there is none."""
        try:
            return reading.read_small(self._path) if reading.is_there(self._path, self._context.clock) else None
        except OSError as error:
            with self._context.error_context("the message was not sent"):
                if error.errno not in _CLOSED or not reading.exists(self._path):
                    raise
            if self._content != b"":
                log.warning("%s: it cannot be read (%s), and counts as empty", self._path, error.strerror)
            return b""


class _Terms:
    """What a write-lock says: how many seconds a sender waits at the most, and as long as how much lies in target/."""

    def __init__(self, path: str, content: bytes, context: QueueContext) -> None:
        from dropq.format.java_properties import read_properties  # seldom there is anything to read

        said = read_properties(content)
        for key in said.keys() - {_LIMIT, _DELAY}:
            log.warning("%s: %s is no key of a write-lock: %s and %s are", path, key, _LIMIT, _DELAY)
        delay = _number(path, said, _DELAY, least=-1, default=-1)
        limit = _number(path, said, _LIMIT, least=0, default=0)
        self.delay = math.inf if delay < 0 else delay / 1000
        self.tally = Tally((context.layout.target,), context.config.ignore, limit, context.timing)


def _number(path: str, said: Mapping[str, str], key: str, *, least: int, default: int) -> int:
    text = said.get(key, str(default)).strip()
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 19 and int(text) >= least:
        return int(text)
    log.warning("%s: %s = %s: a whole number from %d is allowed; %d counts", path, key, text, least, default)
    return default


class _Wait:
    """A sender's wait: it ends by what comes into a folder, or after a short pause; the log says now and then why."""

    def __init__(self, folder: str, why: str, timing: Timing) -> None:
        from dropq.storage.watch import Watch  # not before somebody waits: a shell's `send` is not to import it

        self._watch = Watch(folder)
        self._why = why
        self._began = time.monotonic()
        self._tells_at = self._began + timing.first_word

    def pause(self, seconds: float) -> None:
        """Wait for news of the folder, but only so long."""
        self._watch.wait(seconds)
        now = time.monotonic()
        if now >= self._tells_at:
            self._tells_at = now + NEXT_WORD
            log.warning("%s (one has waited for %d s)", self._why, now - self._began)
