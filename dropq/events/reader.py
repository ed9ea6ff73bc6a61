"""What a log says: events by time, those of one message, what came since, and rates of the last minute.

Whoever may write in `.dropq/log/` may write anything there: what is no line of ours is skipped, and who did something
is the owner of the file, whatever a line says.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import IO, NamedTuple

from dropq.events.log import ACTS, DETAILS, LINE_LIMIT, LISTED, OUTCOMES
from dropq.format.escapes import decode
from dropq.storage.clock import time_of
from dropq.storage.reading import names_in, open_body, parse_json, user_name

#: The name of a file of a log: its day, host and user.
FILE = re.compile(r"(20[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01]))-([^/]+)-([0-9]{1,10})\.jsonl")
#: How a line of ours begins.
_BEGINNING = b'{"time": '
#: Bytes that are read of a file at a time; it is closed in between, as a day may have many.
_CHUNK = 1 << 16
#: What a line may say besides its time and event, and whether that is text.
_FIELDS: Mapping[str, type] = {
    **dict.fromkeys(("id", "name", "state", "owner", "reason", "to", "via"), str),
    **{"pid": int, "delivery": int, "count": int, "seconds": float, "over": float},
    **dict.fromkeys(OUTCOMES, int),
    **dict.fromkeys(DETAILS, str),
    "exit_status": int,
}
_KINDS = frozenset((*OUTCOMES, *ACTS, "sum"))
#: The largest number that a line may have.
_LARGEST = 1 << 53
#: Seconds over which rates are told.
RATE_PERIOD = 60.0
#: Seconds by which a line may be ahead of the file server's clock.
_AHEAD = 60.0
#: Seconds after which a process that works has written its next sum.
_UNTOLD = 8.0
#: How many failures are kept, and how many acts.
LAST = 10
#: Bytes of a file, from its end, that a first look reads at least.
_RECENT = 1 << 20


class Event(NamedTuple):
    """A line of a log.

    Attributes:
        time: when it was written, by the file server's clock.
        event: how a delivery ended, or what was done: one of OUTCOMES or ACTS; or `sum`.
        by: the user who owns the file.
        host: the host whose processes write it.
        fields: what else applies: pid, id, owner, delivery, seconds, reason, detail and so on.
    """

    time: datetime
    event: str
    by: str
    host: str
    fields: Mapping[str, str | int | float]


class Reader:
    """Reads a queue's log, and then again what came since."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def events(
        self, *, since: datetime | None = None, id: str | None = None, recent: datetime | None = None
    ) -> Iterator[Event]:
        """Yield the events that are new, by time; sums, too.

        Args:
            since: only events of this time and later.
            id: only what is about this message.
            recent: of a file that is new, its end will do, with what is of this time and later.

        Raises:
            OSError: this user may not list the log. It is empty where it is missing.
        """
        oldest = "" if since is None else f"{since.astimezone(UTC):%Y%m%d}"
        files = sorted(name for name in self._files() if name[:8] >= oldest)
        for _, of_day in groupby(files, lambda name: name[:8]):
            merged = heapq.merge(*(self._read(name, recent, id) for name in of_day), key=lambda event: event.time)
            yield from (event for event in merged if since is None or event.time >= since)

    def begins(self) -> datetime | None:
        """Return the first day of which the log tells; None if there is no log."""
        with suppress(ValueError):
            return datetime.strptime(min(name[:8] for name in self._files()), "%Y%m%d").replace(tzinfo=UTC)
        return None

    def _files(self) -> list[str]:
        return list(filter(FILE.fullmatch, names_in(self._folder)))

    def _read(self, name: str, recent: datetime | None, id: str | None) -> Iterator[Event]:
        wanted, found = None if id is None else json.dumps(id).encode(), FILE.fullmatch(name)
        assert found is not None
        while (chunk := self._chunk(name, recent)) is not None:
            data, owner = chunk
            by = user_name(owner) if owner == int(found[3]) else f"{user_name(owner)}?"
            for line in data.splitlines():
                if wanted is None or wanted in line:
                    event = parse(line, by, decode(found[2]))
                    if event is not None and (id is None or event.fields.get("id") == id):
                        yield event

    def _chunk(self, name: str, recent: datetime | None) -> tuple[bytes, int] | None:
        """Return the next whole lines of a file, and its owner; None if there are none, or it cannot be read."""
        with suppress(OSError), open_body(f"{self._folder}/{name}") as file:  # gone, closed to this user, or a link
            status = os.fstat(file.fileno())
            begin = self._offsets.get(name)
            if begin is None and recent is not None:
                begin = _begin(file, status.st_size, recent)
            if begin is None or begin > status.st_size:
                begin = 0  # somebody replaced it
            file.seek(begin)
            data = file.read(_CHUNK)
            # What has no end is being written; where it is longer than any line of ours, it is skipped.
            whole = data[: data.rfind(b"\n") + 1] or (data if len(data) > LINE_LIMIT else b"")
            self._offsets[name] = begin + len(whole)
            return (whole, status.st_uid) if whole else None
        return None


def _begin(file: IO[bytes], size: int, recent: datetime) -> int:
    """Return a place near the end of a file, before which no line is of this time or later; as far as LISTED."""
    back = _RECENT
    while back < min(size, LISTED):
        file.seek(size - back)
        found = filter(None, (parse(line, "", "") for line in file.read(_CHUNK).splitlines()))
        if (event := next(found, None)) is not None and event.time < recent:
            break
        back *= 2
    return max(size - back, 0)


def parse(line: bytes, by: str, host: str) -> Event | None:
    """Return the event of a line; None for what is no line of ours."""
    try:
        said = parse_json(line)
        if not isinstance(said, dict) or said.get("event") not in _KINDS:
            return None
        time = time_of(str(said["time"])).astimezone(UTC)
    except (ValueError, KeyError, TypeError, OverflowError):
        # What is left of a line that a full disk has cut is followed by a whole one.
        at = line.rfind(_BEGINNING)
        return parse(line[at:], by, host) if at > 0 else None
    fields = {key: said[key] for key, kind in _FIELDS.items() if key in said and _is_a(said[key], kind)}
    return Event(time, str(said["event"]), by, host, fields)


def _is_a(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    is_number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    return is_number and 0 <= value <= _LARGEST  # type: ignore[operator]


class Rates:
    """How fast a queue's messages were settled in the last `period`, in seconds, as the sums in its log say."""

    def __init__(self, folder: str, period: float = RATE_PERIOD) -> None:
        self._period = period
        self._reader = Reader(folder)
        self._sums: deque[Event] = deque()
        #: All that was settled since this was made, by outcome.
        self.totals: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._last = {is_act: deque[Event](maxlen=LAST) for is_act in (False, True)}
        self._has_begun = False

    @property
    def last(self) -> list[Event]:
        """The last failures, and as many of the last acts, by time; not what a queue is for."""
        return sorted((*self._last[False], *self._last[True]), key=lambda event: event.time)

    def read(self, now: datetime) -> None:
        """Read what came since."""
        period = timedelta(seconds=self._period + _UNTOLD)
        recent = None if self._has_begun else now - period
        for event in self._reader.events(since=now - timedelta(days=1) - period, recent=recent):
            if _age(event, now) < -_AHEAD:
                continue  # it is not of this time
            if event.event != "sum":
                if event.event not in ("acked", "moved"):
                    self._last[event.event in ACTS].append(event)
                continue
            self._sums.append(event)
            if self._has_begun:
                for outcome in OUTCOMES:
                    self.totals[outcome] += int(event.fields.get(outcome, 0))
        self._has_begun = True
        while self._sums and _age(self._sums[0], now) > self._period + _UNTOLD:
            self._sums.popleft()

    def by_holder(self, now: datetime) -> dict[tuple[str, int], float]:
        """Return how many messages left a second by each process, but for what returned, by its host and its number.

        The period ends for each process at its last sum, if that is young: what it settled since is not told yet.
        """
        told = dict.fromkeys(map(_process, self._sums), 0.0)
        for event in self._sums:
            told[_process(event)] = _age(event, now)
        ends = {process: age if age <= _UNTOLD else 0.0 for process, age in told.items()}
        rates = dict.fromkeys(told, 0.0)
        for event in self._sums:
            over, age = float(event.fields.get("over", 0.0)), _age(event, now) - ends[_process(event)]
            left = max(self._period - age, 0.0)
            share = min(left / over, 1.0) if over else float(left > 0)  # it may have begun before the period
            settled = sum(int(event.fields.get(outcome, 0)) for outcome in OUTCOMES if outcome != "returned")
            rates[_process(event)] += settled * share / self._period
        return rates


def _age(event: Event, now: datetime) -> float:
    return (now - event.time).total_seconds()


def _process(event: Event) -> tuple[str, int]:
    return event.host, int(event.fields.get("pid", 0))
