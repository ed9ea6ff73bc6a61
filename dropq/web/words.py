"""How the page writes figures: with units, and as people read them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from dropq.durations import format_duration

#: Seconds of the units that an age is told in, two at most.
_UNITS = (86_400, 3600, 60, 1)


def ago(seconds: float | None) -> str:
    """Write an age: two units of it at most, and no parts of a second beyond ten of them."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    place = next(place for place, unit in enumerate(_UNITS) if seconds >= unit)
    least = _UNITS[min(place + 1, len(_UNITS) - 1)]
    text = format_duration(int(seconds) // least * least)
    for unit in "dhm":
        text = text.replace(unit, f" {unit} ")
    return text.replace("s", " s").strip()


def since(time: datetime, now: datetime) -> str:
    """Write how long ago a time was."""
    return ago(max((now - time).total_seconds(), 0.0))


def amount(size: int) -> str:
    """Write a number of bytes."""
    if size < 1024:
        return f"{size} B"
    number, units = float(size), iter(("KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = ""
    while number >= 1024 and (following := next(units, None)) is not None:
        number, unit = number / 1024, following
    return f"{number:.1f} {unit}"


def figure(number: float | None) -> str:
    """Write a count, or a rate; a dash for what is not known."""
    if number is None:
        return "-"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"


def parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a sentence, and whether each is a command, which stands between backticks."""
    for place, part in enumerate(text.split("`")):
        if part:
            yield place % 2 == 1, part
