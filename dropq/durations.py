"""Durations as people write them: `500ms 30s 5m 2h 1d`, combined as in `1h30m`; a bare number is seconds.

AMPS's units can be read, too, and every unit in upper or lower case: `1w 30S 250us 10ns`. A parsed duration is never
negative, never NaN and never over `LONGEST`, so it can be added to any time.
"""

from __future__ import annotations

import re
from datetime import timedelta

#: Durations as they are given in Python: `"30s"`, a number of seconds, or a timedelta.
Duration = str | int | float | timedelta

#: The part of an error that says which durations are allowed.
ALLOWED = "a duration such as 500ms, 30s, 5m, 2h, 1d or 1h30m, or a number of seconds, at most 36500d,"
#: The longest duration, in seconds: a hundred years.
LONGEST = 36500 * 86400.0

#: The units that durations are written in, largest first, in seconds.
_WRITTEN_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
#: The units that durations are read in, in seconds.
_READ_UNITS = {"w": 604800.0, **_WRITTEN_UNITS, "us": 1e-6, "ns": 1e-9}
_NUMBER = "[0-9]+(?:[.][0-9]+)?"
_BARE = re.compile(_NUMBER)
_WITH_UNITS = re.compile(r"\s*".join(f"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _READ_UNITS))


def parse_duration(value: object) -> float:
    """Return a duration in seconds, rounded to the millisecond.

    Args:
        value: a text, a number of seconds, or a timedelta.

    Raises:
        ValueError: the value is not a duration; the message says what is allowed.
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
    match = _WITH_UNITS.fullmatch(text)
    if not text or match is None:
        return None
    return sum(float(number) * _READ_UNITS[unit] for unit, number in match.groupdict().items() if number)


def format_duration(seconds: float) -> str:
    """Write seconds as a duration, largest unit first, to the millisecond: `1h30m`, `500ms`, `0s`."""
    rest = round(abs(seconds) * 1000)
    parts = []
    for unit, size in _WRITTEN_UNITS.items():
        count, rest = divmod(rest, round(size * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return ("-" if seconds < 0 and parts else "") + ("".join(parts) or "0s")
