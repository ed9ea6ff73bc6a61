"""What monitors count, in the text format of Prometheus: seven families; the labels are closed sets, but `queue`.

What comes and goes has no series of its own: temporary queues are counted together, and so are a topic's ephemeral
subscriptions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import add
from typing import NamedTuple

from dropq.diagnosis.overview import Look, Viewer, Watched
from dropq.format import names

#: The type of the text format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: What the listing of the root is counted as.
ROOT = ".root"
#: What temporary queues, and ephemeral subscriptions of a topic, are counted as.
TEMPORARY, EPHEMERAL = ".temp", ".ephemeral"

_FAMILIES = {
    "dropq_messages": ("gauge", "messages that lie in a state"),
    "dropq_oldest_seconds": (
        "gauge",
        "how long the oldest message has waited: in delayed since it was due, in processing without a running lease",
    ),
    "dropq_consumers": ("gauge", "subscriptions that live"),
    "dropq_finding": ("gauge", "1 while `dropq health` reports or notes something of this kind"),
    "dropq_settled_total": ("counter", "messages that were settled since this exporter began, as the log says"),
    "dropq_up": (
        "gauge",
        "1 if the last look at the queue could read it, and, of .root, if the queues could be listed",
    ),
    "dropq_look_age_seconds": ("gauge", "how long ago the last look at the queue began"),
}


#: How the values of queues are put together that are counted as one; of all other families the largest counts.
_TOGETHER: Mapping[str, Callable[[float, float], float]] = {
    "dropq_messages": add,
    "dropq_consumers": add,
    "dropq_up": min,
}


class Sample(NamedTuple):
    """What a value is of: a family, what the queue is counted as, and another label with its value."""

    family: str
    queue: str
    label: str = ""
    value: str = ""


class Exporter:
    """Writes what a viewer has seen; it remembers what was settled."""

    def __init__(self) -> None:
        self._settled = Counter[Sample]()

    def text(self, viewer: Viewer, *, counters: bool = True) -> str:
        """Return all samples, or only the gauges."""
        now, seen = time.monotonic(), viewer.all()
        values: dict[Sample, float] = {Sample("dropq_up", ROOT): float(viewer.is_listed)}
        there = {TEMPORARY}
        for one in seen:
            there.add(series_of(one))
            for outcome, count in one.newly_settled().items():
                self._settled[Sample("dropq_settled_total", series_of(one), "outcome", outcome)] += count
            for sample, value in _samples(one, now):
                together = _TOGETHER.get(sample.family, max)
                values[sample] = together(values[sample], value) if sample in values else value
        if counters:
            values |= {sample: count for sample, count in self._settled.items() if sample.queue in there}
        return "".join(_written(values))


def series_of(seen: Watched) -> str:
    """Return what a queue is counted as."""
    name = seen.name
    if names.is_temporary(name):
        return TEMPORARY
    if seen.is_ephemeral:
        return f"{name.partition('/')[0]}/{EPHEMERAL}"
    return name


def _samples(seen: Watched, now: float) -> Iterator[tuple[Sample, float]]:
    look, queue = seen.last, series_of(seen)
    if look is None and seen.silent(now) is None:
        return  # it is being looked at for the first time
    is_up = look is not None and look.health.error is None and seen.silent(now) is None
    if is_up or queue != TEMPORARY:  # a temporary queue may go while it is looked at
        yield Sample("dropq_up", queue), float(is_up)
    if look is None:
        return
    yield Sample("dropq_look_age_seconds", queue), round(now - seen.looked, 3)
    if look.health.error is None:
        yield Sample("dropq_consumers", queue), look.consumers
    for state, count in look.counts.items():
        yield Sample("dropq_messages", queue, "state", state), count
    for state, age in look.oldest.items():
        yield Sample("dropq_oldest_seconds", queue, "state", state), round(age, 3)
    for kind in findings(look):
        yield Sample("dropq_finding", queue, "kind", kind), 1


def findings(look: Look) -> list[str]:
    """Return the kinds of what health says of a queue, notes too, each once."""
    return list(dict.fromkeys(one.kind for one in (*look.health.reasons, *look.health.notes)))


def _written(values: Mapping[Sample, float]) -> Iterator[str]:
    for family, (kind, help) in _FAMILIES.items():
        yield f"# HELP {family} {help}\n# TYPE {family} {kind}\n"
        for sample in sorted(sample for sample in values if sample.family == family):
            label = f',{sample.label}="{_label(sample.value)}"' if sample.label else ""
            yield f'{family}{{queue="{_label(sample.queue)}"{label}}} {values[sample]:.16g}\n'


def _label(text: str) -> str:
    """Return the value of a label: bytes that are no UTF-8 become escapes."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    return shown.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
