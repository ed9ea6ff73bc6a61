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
from datetime import UTC, datetime
from itertools import groupby
from typing import NamedTuple

from dropq.events.log import ACTS, DETAILS, LINE_LIMIT, OUTCOMES
from dropq.format.escapes import decode
from dropq.storage.reading import names_in, open_body, parse_json

#: The name of a file of a log: its day, host and user.
FILE = re.compile(r"([0-9]{8})-([^/]+)-([0-9]{1,10})\.jsonl")
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
#: Bytes of a file, from its end, in which the sums of that time are looked for.
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
    """Reads a queue's log, and then again what came since.

    Args:
        back: how many bytes of each file are read the first time, from its end; None for all. Files that come later are
            read whole.
    """

    def __init__(self, folder: str, *, back: int | None = None) -> None:
        self._folder = folder
        self._back = back
        self._offsets: dict[str, int] = {}

    def events(self, *, since: datetime | None = None, id: str | None = None) -> Iterator[Event]:
        """Yield the events that are new, by time; sums, too. Constant memory, but for the days' files.

        Args:
            since: only events of this time and later.
            id: only what is about this message.
        """
        files = sorted(name for name in names_in(self._folder) if FILE.fullmatch(name))
        back, self._back = self._back, None
        if since is not None:
            files = [name for name in files if name[:8] >= f"{since.astimezone(UTC):%Y%m%d}"]
        for _, of_day in groupby(files, lambda name: name[:8]):
            merged = heapq.merge(*(self._read(name, back, id) for name in of_day), key=lambda event: event.time)
            yield from (event for event in merged if since is None or event.time >= since)

    def begins(self) -> datetime | None:
        """Return the first day of which the log tells; None if there is no log."""
        days = [name[:8] for name in names_in(self._folder) if FILE.fullmatch(name)]
        with suppress(ValueError):
            return datetime.strptime(min(days), "%Y%m%d").replace(tzinfo=UTC)
        return None

    def _read(self, name: str, back: int | None, id: str | None) -> Iterator[Event]:
        wanted = None if id is None else json.dumps(id).encode()
        found = FILE.fullmatch(name)
        assert found is not None
        with suppress(OSError), open_body(f"{self._folder}/{name}") as file:  # gone, closed to this user, or a link
            status = os.fstat(file.fileno())
            begin = self._offsets.get(name, 0 if back is None else max(status.st_size - back, 0))
            if begin > status.st_size:
                begin = 0  # somebody replaced it
            file.seek(begin)
            if name not in self._offsets and begin:
                begin += len(file.readline(LINE_LIMIT + 1))  # the end of a line
            by, host = user_name(status.st_uid), decode(found[2])
            self._offsets[name] = begin
            while line := file.readline(LINE_LIMIT + 1):
                if not line.endswith(b"\n") and len(line) <= LINE_LIMIT:
                    break  # it is being written
                self._offsets[name] += len(line)
                if wanted is not None and wanted not in line:
                    continue
                if (event := parse(line, by, host)) is not None and (id is None or event.fields.get("id") == id):
                    yield event


def parse(line: bytes, by: str, host: str) -> Event | None:
    """Return the event of a line; None for what is no line of ours."""
    try:
        said = parse_json(line)
        if not isinstance(said, dict) or said.get("event") not in _KINDS:
            return None
        time = datetime.fromisoformat(str(said["time"])).astimezone(UTC)
    except (ValueError, KeyError, OverflowError):
        return None
    fields = {key: said[key] for key, kind in _FIELDS.items() if key in said and _is_a(said[key], kind)}
    return Event(time, str(said["event"]), by, host, fields)


def _is_a(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    is_number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    return is_number and 0 <= value <= _LARGEST  # type: ignore[operator]


def user_name(uid: int) -> str:
    """Return the name of a user on this host, or the number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Rates:
    """How fast a queue's messages were settled in the last `period`, in seconds, as the sums in its log say."""

    def __init__(self, folder: str, period: float = RATE_PERIOD) -> None:
        self._period = period
        self._reader = Reader(folder, back=_RECENT)
        self._sums: deque[Event] = deque()
        #: All that was settled since this was made, by outcome.
        self.totals: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._has_begun = False

    def read(self, now: datetime) -> None:
        """Read what came since."""
        for event in self._reader.events():
            if event.event != "sum":
                continue
            self._sums.append(event)
            if self._has_begun:
                for outcome in OUTCOMES:
                    self.totals[outcome] += int(event.fields.get(outcome, 0))
        self._has_begun = True
        while self._sums and (now - self._sums[0].time).total_seconds() > self._period:
            self._sums.popleft()

    def out(self, now: datetime) -> float:
        """Return how many messages left a second: all that was settled, but for what returned."""
        return sum(self.by_holder(now).values())

    def by_holder(self, now: datetime) -> dict[tuple[str, int], float]:
        """Return how many messages a second each process settled, by its host and its number."""
        rates: dict[tuple[str, int], float] = {}
        for event in self._sums:
            over = float(event.fields.get("over", 0.0))
            age = (now - event.time).total_seconds()
            # A sum over a time that began before the last minute counts with its part of that minute.
            share = 1.0 if age + over <= self._period else max(self._period - age, 0.0) / over
            settled = sum(int(event.fields.get(outcome, 0)) for outcome in OUTCOMES if outcome != "returned")
            key = (event.host, int(event.fields.get("pid", 0)))
            rates[key] = rates.get(key, 0.0) + settled * share / self._period
        return rates
