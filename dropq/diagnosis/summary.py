"""A look in a line: the state of a queue in a word, its figures, and which queue is worse than which.

`top` and the page show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dropq.diagnosis.metrics import findings
from dropq.diagnosis.overview import Look, Viewer, Watched
from dropq.durations import format_duration
from dropq.format.claims import client_part
from dropq.format.names import is_temporary

#: The states of queues, the worst first; and those that a kind of what health says puts a queue in.
STATES = ("silent", "unread", "still", "unhealthy", "full", "paused", "ok")
_OF_KIND = {"storage": "unread", "configuration": "unread", "still": "still", "full": "full", "paused": "paused"}


def state_of(seen: Watched, now: float) -> str:
    """Return the state of a queue in a word."""
    if seen.silent(now) is not None:
        return "silent"
    if seen.last is None:
        return "ok"
    found = {_OF_KIND[kind] for kind in findings(seen.last) if kind in _OF_KIND}
    return min({*found, "ok" if seen.last.health.healthy else "unhealthy"}, key=STATES.index)


def summary_of(seen: Watched, now: float) -> Mapping[str, object]:
    """Return what a look shows of a queue: queue, state, waiting, oldest, in, out, held, delayed, error, because."""
    look, silent = seen.last, seen.silent(now)
    summary = {"queue": seen.name, "state": state_of(seen, now)}
    if silent is not None:
        summary["because"] = f"no answer for {format_duration(int(silent))}"
    if look is None:
        return summary
    said = [one.message for one in (*look.health.reasons, *look.health.notes)]
    oldest = look.health.oldest_age
    return {
        **summary,
        "waiting": look.counts.get("target"),
        "oldest": None if oldest is None else round(oldest, 3),
        "in": look.rate_in,
        "out": look.rate_out,
        "held": look.counts.get("processing"),
        "delayed": look.counts.get("delayed"),
        "error": look.counts.get("error"),
        "because": summary.get("because") or look.still or (said[0] if said else None),
    }


def worst_first(viewer: Viewer, now: float, column: str | None = None) -> list[Watched]:
    """Return the queues, the worst first, or by a column; temporary ones only where they were named."""

    def key(seen: Watched) -> tuple[object, ...]:
        summary = summary_of(seen, now)
        if column in (None, "state"):
            return STATES.index(str(summary["state"])), _largest_first(summary.get("waiting"))
        value = summary.get(column)
        return (str(value or "") if column in ("queue", "because") else _largest_first(value),)

    return sorted((seen for seen in viewer.all() if viewer.named or not is_temporary(seen.name)), key=key)


def _largest_first(value: object) -> float:
    return -value if isinstance(value, int | float) else 1.0


def holders_of(look: Look) -> Iterator[Mapping[str, object]]:
    """Yield who holds messages, with what its process settles a second, where its client says which that is."""
    rates = {client_part(f"{host.rpartition('-')[0]}-{pid}"): rate for (host, pid), rate in (look.rates or {}).items()}
    for holder in look.holders:
        name = holder.subscription or holder.client
        yield {"holder": name, **holder._asdict(), "settles": rates.get(holder.client)}
