"""The screen of `dropq top`: the look, drawn again every few seconds. It reads no keys, and draws without a disk."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import typer

from dropq.diagnosis.metrics import findings
from dropq.diagnosis.overview import Look, Seen, Viewer
from dropq.diagnosis.standing import AGE_NAMES
from dropq.durations import format_duration
from dropq.format.claims import client_part
from dropq.format.names import is_temporary
from dropq.lifecycle.decision import count_of

from . import log as log_command
from . import output
from .output import NEGATIVE, OK, Record
from .shell import Shell, handling

#: The columns of queues.
COLUMNS = ("queue", "state", "waiting", "oldest", "in", "out", "held", "delayed", "error", "because")
#: The columns that a narrow terminal does without, the least important first.
SPARE = ("delayed", "in", "because", "out", "held", "oldest", "error", "state")
#: The columns of holders, and of what went by.
HOLDERS, EVENTS = ("holder", "held", "changed", "settles", "status"), ("time", "event", "id", "reason", "by")
#: Characters of why that the screen shows of a queue among others, at least; and of a screen that are for the rest.
BRIEF, BESIDE = 60, 70
#: Another screen of the terminal, which is left at the end; to its corner; clear a line's rest, and begin the next;
#: clear the screen's rest.
ENTER, LEAVE, HOME, CLEAR, REST = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H", "\x1b[K\n", "\x1b[J"
#: The states of queues, the worst first; each has the kinds of what health says that make it so.
STATES = {
    "silent": (),
    "UNREAD": ("storage", "configuration"),
    "STILL": ("still",),
    "unwell": (),
    "full": ("full",),
    "paused": ("paused",),
    "ok": (),
}


def top(shell: Shell, name: str | None, interval: float, sort: str | None, count: int | None) -> int:
    """Show the looks, again and again; the arguments are those of `dropq top`."""
    if sort is not None and sort not in COLUMNS:
        raise typer.BadParameter(f"there is no column {sort}: {', '.join(COLUMNS)}", param_hint="'--sort'")
    if name is not None:
        name = shell.queue(name).name
    viewer = Viewer(shell.root.context, None if name is None else [name])
    viewer.wait()
    if shell.on_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown"):
        _draw_again(_Screen(shell, viewer, name, sort), viewer, interval, count)
        return OK
    for number in range(count or 1):
        if number:
            viewer.keep_up(interval)
        now = time.monotonic()
        for seen in _ordered(viewer, sort, now):
            shell.line(_whole(seen, now) if shell.json else _short(record_of(seen, now)), COLUMNS)
    if not viewer.is_listed:
        output.note(f"error: the queues of {shell.root.path} could not be listed: {viewer.problem or 'no answer'}")
    return OK if viewer.is_listed else NEGATIVE


def _draw_again(screen: _Screen, viewer: Viewer, interval: float, count: int | None) -> None:
    """Draw until somebody ends it; then leave the terminal as it was, with the last looks after so many of them."""

    def end(number: int, restore: Callable[[], None]) -> None:
        raise KeyboardInterrupt

    sys.stdout.write(ENTER)
    try:
        with handling((signal.SIGTERM, signal.SIGHUP), end):
            while True:
                lines = screen.draw()
                count = None if count is None else count - 1
                if count == 0:
                    break
                viewer.keep_up(interval)
    except KeyboardInterrupt:
        lines = []
    finally:
        sys.stdout.write(LEAVE)
        output.flush()
    for line in lines:
        output.put(line)


# -- a queue as a line -------------------------------------------------------------------------------------------


def state_of(seen: Seen, now: float) -> str:
    """Return the state of a queue in a word."""
    if seen.silent(now) is not None:
        return "silent"
    if seen.look is None:
        return "ok"
    kinds = findings(seen.look)
    is_well = seen.look.health.healthy
    return next(word for word, those in STATES.items() if _is_so(word, those, kinds, is_well=is_well))


def _is_so(word: str, those: tuple[str, ...], kinds: list[str], *, is_well: bool) -> bool:
    return word == "ok" or (word == "unwell" and not is_well) or not set(those).isdisjoint(kinds)


def record_of(seen: Seen, now: float) -> Record:
    """Return what a look shows of a queue, as the columns have it."""
    look, silent = seen.look, seen.silent(now)
    record = {"queue": seen.watched.name, "state": state_of(seen, now)}
    if silent is not None:
        record["because"] = f"no answer for {format_duration(int(silent))}"
    if look is None:
        return record
    said = [one.message for one in (*look.health.reasons, *look.health.notes)]
    return {
        **record,
        "waiting": look.counts.get("target"),
        "oldest": look.health.oldest_age,
        "in": look.rate_in,
        "out": look.rate_out,
        "held": look.counts.get("processing"),
        "delayed": look.counts.get("delayed"),
        "error": look.counts.get("error"),
        "because": record.get("because") or look.still or (said[0] if said else None),
    }


def _whole(seen: Seen, now: float) -> Record:
    """Return all of a look, for programs."""
    look, record = seen.look, record_of(seen, now)
    if look is None:
        return record
    return {
        **record,
        **{"at": look.at, "age": now - seen.looked, "took": look.took, "counts": look.counts},
        "oldest_of": look.oldest,
        "ages": dict(zip(AGE_NAMES, look.ages, strict=False)),
        "consumers": look.consumers,
        "holders": list(_holders(look)),
        "reasons": [asdict(one) for one in look.health.reasons],
        "notes": [asdict(one) for one in look.health.notes],
        "log": [log_command.record_of(event) for event in look.went_by],
    }


def _ordered(viewer: Viewer, sort: str | None, now: float) -> list[Seen]:
    """Return the queues, the worst first, or by a column; without temporary ones."""
    found = [(seen, record_of(seen, now)) for seen in viewer.all() if not is_temporary(seen.watched.name)]

    def number(record: Record, column: str) -> float:
        value = record.get(column)
        return -value if isinstance(value, int | float) else 1.0

    def key(one: tuple[Seen, Record]) -> tuple[object, ...]:
        record = one[1]
        if sort in (None, "state"):
            return [*STATES].index(str(record["state"])), number(record, "waiting")
        if sort in ("queue", "because"):
            return (str(record.get(sort) or ""),)
        return (number(record, sort or ""),)

    return [seen for seen, _ in sorted(found, key=key)]


def _short(record: Record) -> Record:
    """Return a record whose numbers are as people read them."""
    oldest, rates = record.get("oldest"), {key: record.get(key) for key in ("in", "out")}
    return {
        **record,
        "oldest": format_duration(int(oldest)) if isinstance(oldest, int | float) else None,
        **{key: f"{rate:.1f}" if isinstance(rate, int | float) else None for key, rate in rates.items()},
    }


def _brief(record: Record, room: int) -> Record:
    """Return a record for a line of a screen: the first clause of why, as far as there is room."""
    because = str(record.get("because") or "").partition(";")[0]
    return {**_short(record), "because": because if len(because) <= room else f"{because[: room - 3]}..."}


def _holders(look: Look) -> Iterator[Record]:
    """Yield who holds messages, with what its process settles a second, where its client says which that is."""
    rates = {client_part(f"{host.rpartition('-')[0]}-{pid}"): rate for (host, pid), rate in (look.rates or {}).items()}
    for holder in look.holders:
        name = holder.subscription or holder.client
        yield {"holder": name, **holder._asdict(), "settles": rates.get(holder.client)}


# -- the screen --------------------------------------------------------------------------------------------------


class _Screen:
    """Draws what a viewer has seen; each line ends with its rest cleared, so that nothing flickers."""

    def __init__(self, shell: Shell, viewer: Viewer, name: str | None, sort: str | None) -> None:
        self._root = output.escape(os.path.basename(str(shell.root.path)))
        self._viewer = viewer
        self._is_one = name is not None
        self._sort = sort
        self._width = 80

    def draw(self) -> list[str]:
        """Draw the present looks, as far as they fit; return all lines."""
        from rich.cells import cell_len, set_cell_size

        self._width, rows = shutil.get_terminal_size()
        lines = list(self._of_queue(time.monotonic()) if self._is_one else self._of_root(time.monotonic()))
        # A line with colours is a table's, and fits.
        fits = ["\x1b" in line or cell_len(line) <= self._width for line in lines]
        lines = [line if each else set_cell_size(line, self._width) for line, each in zip(lines, fits, strict=True)]
        shown = lines if len(lines) < rows else [*lines[: max(rows - 2, 0)], f"... {len(lines) - rows + 2} more lines"]
        sys.stdout.write(f"{HOME}{''.join(f'{line}{CLEAR}' for line in shown)}{REST}")
        output.flush()
        return lines

    def _of_root(self, now: float) -> Iterator[str]:
        seen = _ordered(self._viewer, self._sort, now)
        looks = [one.look for one in seen if one.look is not None]
        sums = {state: sum(look.counts.get(state, 0) for look in looks) for state in ("target", "processing", "error")}
        oldest = max((now - one.looked for one in seen if one.look is not None), default=0.0)
        counted = f"{sums['target']:,} waiting, {sums['processing']:,} held, {sums['error']:,} in error"
        head = f"{self._root}: {count_of(len(seen), 'queue')}, {counted}"
        yield from self._wrapped(f"{head}; {time.strftime('%H:%M:%SZ', time.gmtime())}, at most {oldest:.0f} s old")
        if not self._viewer.is_listed:
            yield from self._wrapped(f"the queues cannot be listed: {self._viewer.problem or 'no answer'}")
        brief = max(BRIEF, self._width - BESIDE)
        yield from output.table_lines([_brief(record_of(one, now), brief) for one in seen], COLUMNS, SPARE)

    def _of_queue(self, now: float) -> Iterator[str]:
        (seen,) = self._viewer.all()
        look, record = seen.look, _short(record_of(seen, now))
        yield from output.table_lines([record], COLUMNS[:-1], SPARE)
        if look is None or seen.silent(now) is not None:
            yield from self._wrapped(str(record.get("because") or ""))
        if look is None:
            return
        for one in (*look.health.reasons, *look.health.notes):
            yield from self._wrapped(f"{one.kind}: {one.message}")
        if look.ages:
            ages = {name: f"{count:,}" for name, count in zip(AGE_NAMES, look.ages, strict=True)}
            yield from ("", *output.table_lines([{"waiting": "at most", **ages}], ("waiting", *AGE_NAMES)))
        if look.holders:
            held = [{**holder, "settles": _rate(holder["settles"])} for holder in _holders(look)]
            yield from ("", *output.table_lines(held, HOLDERS, ("status", "settles", "changed")))
        if look.went_by:
            records = [log_command.record_of(event) for event in reversed(look.went_by)]
            told = [{**record, "reason": output.reason_text(record)} for record in records]
            yield from ("", *output.table_lines(told, EVENTS, ("by", "id")))

    def _wrapped(self, text: str) -> list[str]:
        from rich.console import Console
        from rich.text import Text

        return [line.plain for line in Text(output.visible(text)).wrap(Console(), self._width)]


def _rate(rate: object) -> str | None:
    return f"{rate:.1f}/s" if isinstance(rate, int | float) else None
