"""The file server's clock, by which all hosts agree on leases and delays."""

from __future__ import annotations

import math
import os
import sys
import time
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from dropq.storage.system_calls import TOUCH, open_file

#: The last moment that a datetime can tell; names may hold later ones.
LAST_MS = int(datetime.max.replace(tzinfo=UTC).timestamp() * 1000) - 1
#: Seconds after which the offset to the file server's clock is measured again.
CLOCK_INTERVAL = 60.0
#: Seconds after which it is measured again before a lease is made: its end has to be right on every host.
LEASE_INTERVAL = 1.0
#: Seconds of difference that are put down to coarse time stamps rather than to another clock.
CLOCK_TOLERANCE = 0.05
#: How often a measurement is made at most: it is repeated when it took longer than the tolerance.
CLOCK_TRIES = 3
#: The clock that file times come from on Linux, which Python has no name for: it stands still for a tick.
_REALTIME_COARSE = 5
#: Seconds that are surely shorter than a tick, which is 1 to 10 ms.
_PART_OF_TICK = 0.0005
#: Returns seconds on a clock that never steps; where the system has such a clock, it counts in sleep, too.
_since_boot = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def utc(ms: int) -> datetime:
    """Return a time in milliseconds since 1970, or the last that a datetime can tell."""
    return datetime.fromtimestamp(min(ms, LAST_MS) / 1000, UTC)


def time_text(ms: int) -> str:
    """Return a time in milliseconds since 1970 as reasons and the log have it."""
    return utc(ms).isoformat(timespec="milliseconds")


def time_of(text: str) -> datetime:
    """Return an ISO 8601 date or time, which is in UTC where it does not say; ValueError if it is none."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Clock(Protocol):
    """A clock in milliseconds since 1970 UTC."""

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970 UTC."""


class ServerClock:
    """The file server's clock, as the modification time of a probe file shows it.

    Hosts that share a mount agree on leases and delays through it, however wrong their own clocks are. A process that
    may not write the probe file uses its own clock.

    Between two measurements the clock since boot counts, which stands still while a virtual machine is paused. When
    this host's clock has stepped against it, as happens when it is corrected after a pause, the next call measures.
    A pause without such a step, and a step of the server's own clock, make the result wrong until the next measurement:
    for `CLOCK_INTERVAL` at most, and for `LEASE_INTERVAL` at the end of a lease.
    """

    def __init__(self, probe: str) -> None:
        self._probe = probe
        self._ahead = 0.0
        self._own = 0.0
        self._measured_at = -math.inf

    def now_ms(self, *, interval: float = CLOCK_INTERVAL) -> int:
        """Return the server's time in ms since 1970 UTC; its offset is measured again after `interval` seconds."""
        now = _since_boot()
        own = time.time() - now
        if now >= self._measured_at + interval or abs(own - self._own) > CLOCK_TOLERANCE:
            self._own = own  # before the measurement: the next call sees a step that comes during it
            self._ahead = self._measure()
            now = self._measured_at = _since_boot()
        return int((now + self._ahead) * 1000)

    def offset(self) -> float:
        """Return by how many seconds the server's clock is ahead of this host's, as far as it can be measured."""
        return self._measure() - (time.time() - _since_boot())

    def _measure(self) -> float:
        """Return by how many seconds the server's time is ahead of the clock since boot."""
        try:
            try:
                within, ahead = self._compared()
            except FileNotFoundError:
                os.close(open_file(self._probe, TOUCH))
                within, ahead = self._compared()
        except OSError:
            return time.time() - _since_boot()  # not ours to write, or no root yet: use our own clock
        own = time.time() - _since_boot()
        return ahead if abs(ahead - own) > within + CLOCK_TOLERANCE else own

    def _compared(self) -> tuple[float, float]:
        """Touch the probe file; return the error of the measurement, and by how much the server's time is ahead.

        RACE: this process may be stopped in between, and another may touch the file meanwhile: the file's time still
        lies between the two times that are taken here. A measurement that took long is repeated.
        """
        tries = []
        for _ in range(CLOCK_TRIES):
            before = _since_boot()
            os.utime(self._probe, follow_symlinks=False)  # an NFS server answers with the time: it is not opened
            shown = os.lstat(self._probe).st_mtime
            after = _since_boot()
            tries.append((after - before, shown - (before + after) / 2))
            if after - before <= CLOCK_TOLERANCE:
                break
        return min(tries)


def pass_tick(written: int) -> None:
    """Let the tick of the kernel's clock pass in which a file was written, by its mtime in ns: a few ms at most.

    A rename in that tick would leave equal times, as a later write does. Elsewhere than on Linux nothing happens.
    """
    while sys.platform == "linux" and time.clock_gettime_ns(_REALTIME_COARSE) == written:
        time.sleep(_PART_OF_TICK)


def lease_end(clock: Clock, period: float) -> int:
    """Return the end of a lease that begins now, in milliseconds since 1970 UTC; `period` is in seconds."""
    now = clock.now_ms(interval=LEASE_INTERVAL) if isinstance(clock, ServerClock) else clock.now_ms()
    return now + int(period * 1000)
