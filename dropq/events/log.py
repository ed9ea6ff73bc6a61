"""The log of a queue: a line for each delivery that ended without an ack, and for each act; sums of what was settled.

    .dropq/log/YYYYMMDD-HOST-UID.jsonl    one file a host, user and day, to which all their processes append

A line is one write, after the rename that it tells of, and is never synced: a kill loses the line of one rename, and
the sums of some 5 s. The log decides nothing. Who may not write it, or has no room for it, goes on as before.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
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
from dropq.storage.reading import exists

log = logging.getLogger("dropq")

#: How a delivery, or a message that waits, may end; `returned` does not end it. Sums count these.
OUTCOMES = ("acked", "failed", "rejected", "expired", "dead-letter", "moved", "removed", "returned")
#: What somebody did to a queue, or to its messages outside of a delivery.
ACTS = (
    *("requeued", "replayed", "purged", "pruned", "paused", "resumed", "created", "repaired", "committed", "dropped"),
)
#: What a line keeps of what was said with a failure, where it is text or a small number.
DETAILS = ("detail", "traceback", "stderr", "exit_status")
#: Bytes of a line at most.
LINE_LIMIT = 16 << 10
#: Bytes of a file, after which lines have no details, and after which they are about acts and sums only.
DETAILED, LISTED = 16 << 20, 64 << 20
#: Characters of a detail that are kept, from its end; the next lower number, where a line is too long.
_KEPT = (4096, 1024, 128, 0)
#: Seconds that a process gathers what it settled, before it writes a sum.
SUM_INTERVAL = 5.0
#: Milliseconds of a day.
DAY = 86_400_000


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
        #: What was settled and is not told yet.
        self.sums = _SUMS.setdefault(folder, Sums(self._write))

    def ended(
        self,
        event: str,
        own_name: str,
        claim: Claim | None = None,
        *,
        reason: str = "",
        details: Mapping[str, object] | None = None,
        to: str = "",
        state: str = "",
        outcome: str | None = None,
        intended: bool = False,
    ) -> None:
        """Tell how a delivery ended, or where a message went, after the rename.

        Args:
            event: one of OUTCOMES or ACTS.
            own_name: the file name that the message had.
            claim: of the delivery; None if nobody held the message.
            to: the queue, or the route, that it went to.
            state: the state that somebody took it out of.
            outcome: which of OUTCOMES it counts as; "" for none, as it was not to be worked on; None for the event.
            intended: it is what the queue is for, as an ack is: only `log = "all"` has a line of it.
        """
        if not self._is_on:
            return
        if outcome is None or outcome:
            self.sums.count(outcome or event)
        if (intended or event == "acked") and not self._tells_all:
            return
        fields: dict[str, object] = {"id": self._parse(own_name).id}
        if claim is not None:
            fields |= {"owner": claim.owner, "delivery": claim.number}
            if claim.taken:
                fields["seconds"] = round(monotonic() - claim.taken, 3)
        fields |= {key: value for key, value in (("reason", reason), ("to", to), ("state", state)) if value}
        self._write(event, fields, details)

    def act(self, event: str, **fields: object) -> None:
        """Tell what was done to the queue by a verb that renames no message of it, or many at once."""
        if self._is_on:
            self._write(event, fields)

    def _write(self, event: str, fields: Mapping[str, object], details: Mapping[str, object] | None = None) -> None:
        now = self._clock.now_ms()
        said = {"time": time_text(now), "event": event, "pid": os.getpid(), **fields}
        if event != "sum" and (via := VIA.get()):
            said["via"] = via

        def line(size: int) -> bytes:
            if size >= LISTED and event in OUTCOMES:
                return b""
            return _line(said, details if details and size < DETAILED else {})

        path = f"{self.folder}/{file_of(now // DAY, os.geteuid())}"
        try:
            try:
                self._storage.append(path, line)
            except FileNotFoundError:
                if exists(private := os.path.dirname(self.folder)):  # else nothing is made in its place
                    self._storage.make_folder_like(self.folder, private)
                    self._storage.append(path, line)
        except FileNotFoundError:
            return  # the queue is gone, or its disk is away for a moment
        except OSError as error:
            if self.folder not in _REFUSED:
                _REFUSED.add(self.folder)
                log.warning("%s: nothing more is said of it: what goes by is not in the log", describe(error))


class Sums:
    """What one process settled in one queue since it last wrote so; `write` writes an event with its fields.

    RACE: threads, and signal handlers, count while another tells: each outcome is taken from the queue once.
    """

    def __init__(self, write: Callable[[str, Mapping[str, object]], None]) -> None:
        self._write = write
        self._outcomes = deque[str]()
        self._began = 0.0

    def count(self, outcome: str) -> None:
        """Count an outcome; write a sum if the last one is old."""
        self._outcomes.append(outcome)
        if self not in _UNTOLD:  # looked at after the outcome is there: who tells meanwhile takes it, or sees this
            self._began = monotonic()
            _remember(self)
        if monotonic() - self._began >= SUM_INTERVAL:  # not by `tell_if_due`: each ack would pay for the call
            self.tell()

    def tell(self) -> None:
        """Write a sum, if there is something to tell."""
        _UNTOLD.pop(self, None)
        over, taken = monotonic() - self._began, list[str]()
        with suppress(IndexError):  # another thread took the rest
            for _ in range(len(self._outcomes)):
                taken.append(self._outcomes.popleft())
        if taken:
            self._write("sum", {"over": round(over, 1), **Counter(taken)})

    def tell_if_due(self) -> bool:
        """Write a sum if the last one is old; return whether it is."""
        if is_due := monotonic() - self._began >= SUM_INTERVAL:
            self.tell()
        return is_due

    def forget(self) -> None:
        """Tell nothing of it: the queue is gone; or its parent tells it, in a process that was forked."""
        self._outcomes = deque[str]()
        _UNTOLD.pop(self, None)


#: The sums of this process, by the folder of the log, and those that have something to tell.
_SUMS: WeakValueDictionary[str, Sums] = WeakValueDictionary()
_UNTOLD: dict[Sums, None] = {}
#: How many of them may be old, before those are told, as nobody may attend to them any more. A process of few queues
#: writes in none but that at hand: the disk of another may not answer.
_MANY_UNTOLD = 64
#: By way of what somebody acts, if not by a command: `web`, or `web:NAME` for a person whom a proxy names.
VIA: ContextVar[str] = ContextVar("via", default="")
#: What `multiprocessing` does at the end of this process.
_AT_END: list[object] = []
#: The folders of logs that could not be written, of which one warning was logged.
_REFUSED: set[str] = set()


def _remember(sums: Sums) -> None:
    """Remember sums that have something to tell until they do, at the latest at the end of the process."""
    _UNTOLD[sums] = None
    for first in list(_UNTOLD) if len(_UNTOLD) > _MANY_UNTOLD else ():
        if not first.tell_if_due():
            break  # those that follow are younger
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None and not _AT_END:
        # Its children end without what `atexit` has, and forget what was registered before the fork.
        _AT_END.append(multiprocessing.Finalize(None, _tell_all, exitpriority=0))


def _tell_all() -> None:
    for sums in list(_UNTOLD):
        sums.tell()


def _forget() -> None:
    for sums in (*_SUMS.values(), *_UNTOLD):
        sums.forget()
    _AT_END.clear()


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
        cut = {key: text for key in DETAILS if kept and (text := _cut(details.get(key), kept)) is not None}
        data = json.dumps({**fields, **cut}).encode() + b"\n"
        if len(data) <= LINE_LIMIT:
            return data
    return data


def _cut(said: object, kept: int) -> object:
    """Return the end of a text, or a number; whatever else a handler has said is left out."""
    if isinstance(said, str):
        return said[-kept:]
    return said if type(said) is int and abs(said) < 1 << 32 else None
