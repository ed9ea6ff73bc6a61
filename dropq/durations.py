"""Durations as people write them: `500ms 30s 5m 2h 1d`, combined as in `1h30m`; a bare number is seconds.

AMPS's units are read, too, and all units in upper and lower case: `1w 30S 250us 10ns`. What is parsed is never
negative, never NaN and never beyond `LONGEST`, so that any clock can add it.
"""

from __future__ import annotations

import re
from datetime import timedelta

__all__ = ["ALLOWED", "LONGEST", "format_duration", "parse_duration"]

#: What an error about a duration says is allowed.
ALLOWED = "a duration such as 500ms, 30s, 5m, 2h, 1d or 1h30m, or a number of seconds, at most 36500d,"
#: The longest duration, in seconds: a hundred years.
LONGEST = 36500 * 86400.0

#: The units that durations are written in, largest first.
_WRITES = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
#: Those that are read.
_READS = {"w": 604800.0, **_WRITES, "us": 1e-6, "ns": 1e-9}
_NUMBER = "[0-9]+(?:[.][0-9]+)?"
_BARE = re.compile(_NUMBER)
_WRITTEN = re.compile(r"\s*".join(f"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _READS))


def parse_duration(value: object) -> float:
    """Return the seconds of a duration, to the millisecond: of a text, a number of seconds, or a timedelta.

    Raises:
        ValueError: when it is none; the message says what is allowed.
    """
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= LONGEST:
        raise ValueError(f"{value!r} is not a duration: {ALLOWED} is allowed")
    return round(seconds, 3)


def _seconds(value: object) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= LONGEST else None
    if not isinstance(value, str) or len(value) > 100:
        return None
    text = value.strip().lower()
    if _BARE.fullmatch(text):
        return float(text)
    written = _WRITTEN.fullmatch(text)
    if not text or written is None:
        return None
    return sum(float(number) * _READS[unit] for unit, number in written.groupdict().items() if number)


def format_duration(seconds: float) -> str:
    """Write seconds as a duration, largest unit first, to the millisecond: `1h30m`, `500ms`, `0s`."""
    rest = round(abs(seconds) * 1000)
    parts = []
    for unit, size in _WRITES.items():
        count, rest = divmod(rest, round(size * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return ("-" if seconds < 0 and parts else "") + ("".join(parts) or "0s")
