"""The log of a queue: a line for each delivery that ended without an ack, and for each act; sums of what was settled.

    .dropq/log/YYYYMMDD-HOST-UID.jsonl    one file a host, user and day, to which all their processes append

A line is one write, after the rename that it tells of, and is never synced: a kill loses the line of one rename, and
the sums of some 10 s. The log decides nothing. Who may not write it, or has no room for it, goes on as before.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from time import monotonic
from weakref import WeakValueDictionary

from dropq.format.claims import Claim
from dropq.format.escapes import encode
from dropq.format.names import Name
from dropq.storage.clock import Clock, time_text, utc
from dropq.storage.failures import describe
from dropq.storage.files import Storage
from dropq.storage.mounts import boot_id

log = logging.getLogger("dropq")

#: How a delivery, or a message that waits, may end; `returned` does not end it. Sums count these.
OUTCOMES = ("acked", "failed", "rejected", "expired", "dead-letter", "moved", "removed", "returned")
#: What somebody did to a queue, or to its messages outside of a delivery.
ACTS = (
    *("requeued", "replayed", "purged", "pruned", "paused", "resumed", "created", "repaired", "committed", "dropped"),
)
#: What a line keeps of what was said with a failure.
DETAILS = ("detail", "traceback", "stderr", "exit_status")
#: Bytes of a line at most.
LINE_LIMIT = 16 << 10
#: Bytes of a file, after which lines have no details, and after which they are about acts and sums only.
DETAILED, LISTED = 16 << 20, 64 << 20
#: Characters of a detail that are kept, from its end; the next lower number, where a line is too long.
_KEPT = (4096, 1024, 128, 0)
#: Seconds that a process gathers what it settled, before it writes a sum.
SUM_INTERVAL = 10.0
#: Milliseconds of a day.
DAY = 86_400_000
_NOTHING: Mapping[str, object] = {}


class EventLog:
    """Writes the log of one queue.

    Args:
        folder: where its files lie.
        level: failures, all or off, as `log` in queue.toml has it.
        parse: reads a file name.
    """

    def __init__(self, folder: str, level: str, storage: Storage, clock: Clock, parse: Callable[[str], Name]) -> None:
        self.folder = folder
        self._storage = storage
        self._clock = clock
        self._parse = parse
        self._is_on = level != "off"
        self._tells_all = level == "all"
        sums = _SUMS.get(folder) if self._is_on else None
        if sums is None:
            sums = Sums(self._write_sum)
            if self._is_on:
                _SUMS[folder] = sums
        self._sums = sums

    def ended(
        self,
        event: str,
        own_name: str,
        claim: Claim | None = None,
        *,
        reason: str = "",
        details: Mapping[str, object] | None = None,
        to: str = "",
        outcome: str | None = None,
        intended: bool = False,
    ) -> None:
        """Tell how a delivery ended, or where a message went, after the rename.

        Args:
            event: one of OUTCOMES or ACTS.
            own_name: the file name that the message had.
            claim: of the delivery; None if nobody held the message.
            to: the queue, or the route, that it went to.
            outcome: which of OUTCOMES it counts as; "" for none, as it was not to be worked on; None for the event.
            intended: it is what the queue is for, as an ack is: only `log = "all"` has a line of it.
        """
        if not self._is_on:
            return
        if outcome is None or outcome:
            self._sums.count(outcome or event)
        if self._tells_all or not (intended or event == "acked"):
            self._tell_end(event, own_name, claim, reason, details or _NOTHING, to)

    def _tell_end(
        self, event: str, own_name: str, claim: Claim | None, reason: str, details: Mapping[str, object], to: str
    ) -> None:
        fields: dict[str, object] = {"id": self._parse(own_name).id}
        if claim is not None:
            fields |= {"owner": claim.owner, "delivery": claim.number}
            if claim.taken:
                fields["seconds"] = round(monotonic() - claim.taken, 3)
        fields |= {key: value for key, value in (("reason", reason), ("to", to)) if value}
        self._write(event, fields, details, is_act=event in ACTS)

    def act(self, event: str, **fields: object) -> None:
        """Tell what was done to the queue by a verb that renames no message of it, or many at once."""
        if self._is_on:
            self._write(event, fields, _NOTHING, is_act=True)

    def close(self) -> None:
        """Write what was settled since the last sum."""
        self._sums.tell()

    # -- private ---------------------------------------------------------------------------------------------

    def _write_sum(self, over: float, counts: Mapping[str, int]) -> None:
        self._write("sum", {"over": round(over, 1), **counts}, _NOTHING, is_act=True)

    def _write(self, event: str, fields: Mapping[str, object], details: Mapping[str, object], *, is_act: bool) -> None:
        now = self._clock.now_ms()
        said = {"time": time_text(now), "event": event, "pid": os.getpid(), **fields}

        def line(size: int) -> bytes:
            if size >= LISTED and not is_act:
                return b""
            return _line(said, {} if size >= DETAILED else details)

        path = f"{self.folder}/{file_of(now // DAY, os.geteuid())}"
        try:
            try:
                self._storage.append(path, line)
            except FileNotFoundError:
                self._storage.make_folder(self.folder)
                self._storage.append(path, line)
        except FileNotFoundError:
            return  # the queue is gone, or away for a moment
        except OSError as error:
            if self.folder not in _REFUSED:
                _REFUSED.add(self.folder)
                log.warning("%s: nothing more is said of it: what goes by is not in the log", describe(error))


class Sums:
    """What one process settled in one queue since it last wrote so; `write` gets the seconds, and each count.

    RACE: threads, and signal handlers, count while another tells: each outcome is taken from the queue once.
    """

    def __init__(self, write: Callable[[float, Mapping[str, int]], None]) -> None:
        self._write = write
        self._outcomes = deque[str]()
        self._began = 0.0

    def count(self, outcome: str) -> None:
        """Count an outcome; write a sum if the last one is old."""
        now = monotonic()
        self._outcomes.append(outcome)
        if self not in _UNTOLD:  # looked at after the outcome is there: who tells meanwhile takes it, or sees this
            self._began = now
            _UNTOLD[self] = None
        if now - self._began >= SUM_INTERVAL:
            self.tell()

    def tell(self) -> None:
        """Write a sum, if there is something to tell."""
        _UNTOLD.pop(self, None)
        over, counts = monotonic() - self._began, Counter[str]()
        with suppress(IndexError):
            while True:
                counts[self._outcomes.popleft()] += 1
        if counts:
            self._write(over, counts)

    def tell_if_due(self, now: float) -> None:
        """Write a sum if the last one is old."""
        if now - self._began >= SUM_INTERVAL:
            self.tell()

    def forget(self) -> None:
        """Begin anew, as a process does that was forked: its parent tells what was counted until then."""
        self._outcomes = deque[str]()


#: The sums of this process, by the folder of the log, and those that have something to tell.
_SUMS: WeakValueDictionary[str, Sums] = WeakValueDictionary()
_UNTOLD: dict[Sums, None] = {}
#: The folders of logs that could not be written, of which one warning was logged.
_REFUSED: set[str] = set()


def tell_sums() -> None:
    """Write the sums of this process that are due, of all queues."""
    now = monotonic()
    for sums in list(_UNTOLD):
        sums.tell_if_due(now)


def _tell_all() -> None:
    for sums in list(_UNTOLD):
        sums.tell()


def _forget() -> None:
    for sums in list(_SUMS.values()):
        sums.forget()
    _UNTOLD.clear()


atexit.register(_tell_all)
os.register_at_fork(after_in_child=_forget)


@lru_cache(8)
def file_of(day: int, user: int) -> str:
    """Return the name of the file that a user's processes on this host append to on a day, counted since 1970."""
    boot = boot_id()[:8].decode(errors="replace")
    return f"{utc(day * DAY):%Y%m%d}-{encode(f'{os.uname().nodename}-{boot}')}-{user}.jsonl"


def _line(fields: Mapping[str, object], details: Mapping[str, object]) -> bytes:
    """Return a line; where it would be too long, less is kept of the details, each from its end."""
    for kept in _KEPT:
        cut = {key: _cut(details[key], kept) for key in DETAILS if kept and key in details}
        data = json.dumps({**fields, **cut}).encode() + b"\n"
        if len(data) <= LINE_LIMIT:
            return data
    return data


def _cut(said: object, kept: int) -> object:
    return said if type(said) is int else str(said)[-kept:]
