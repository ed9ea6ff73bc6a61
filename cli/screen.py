"""The screen of `dropq top`: the look, drawn again every few seconds. It reads no keys."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict

import typer

from dropq.diagnosis.metrics import findings
from dropq.diagnosis.overview import Look, Seen, Viewer
from dropq.durations import format_duration
from dropq.events.reader import Event, Reader
from dropq.format.claims import client_part
from dropq.format.names import is_temporary
from dropq.lifecycle.decision import count_of

from . import log as log_command
from . import output
from .look import AGE_NAMES
from .output import OK, Record
from .shell import Shell

#: The columns of queues.
COLUMNS = ("queue", "state", "waiting", "oldest", "in", "out", "held", "delayed", "error", "because")
#: The columns that a narrow terminal does without, the least important first.
SPARE = ("delayed", "in", "because", "out", "held", "oldest", "error", "state")
#: The columns of holders.
HOLDERS = ("holder", "held", "since", "settles", "status")
#: The columns of what went by.
EVENTS = ("time", "event", "id", "reason", "by")
#: Characters of why that the screen shows of a queue among others.
BRIEF = 60
#: How often the looks that are due begin, in seconds.
TICK = 0.2
#: How many failures and acts are shown; bytes of each file of the log in which they are looked for.
LAST, RECENT = 10, 256 << 10
#: Another screen of the terminal, which is left at the end; to its corner; to the end of the line, and of the screen.
ENTER, LEAVE, HOME, CLEAR, REST = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"
#: Kinds of what health says that have a word of their own as the state of a queue, those first that matter most.
STATES = {"storage": "UNREAD", "configuration": "UNREAD", "still": "STILL", "full": "full", "paused": "paused"}
#: How bad a state is: the worst is listed first.
WORST = ("silent", "UNREAD", "STILL", "unwell", "full", "paused", "ok")


def top(shell: Shell, name: str | None, interval: float, sort: str | None, count: int | None) -> int:
    """Show the looks, again and again; the arguments are those of `dropq top`."""
    if sort is not None and sort not in COLUMNS:
        raise typer.BadParameter(f"there is no column {sort}: {', '.join(COLUMNS)}", param_hint="'--sort'")
    if name is not None:
        name = shell.queue(name).name
    viewer = Viewer(shell.root.context, None if name is None else [name])
    on_screen = shell.on_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown")
    left = count or (None if on_screen else 1)
    viewer.wait(float("inf"))
    screen = _Screen(shell, viewer, name, sort) if on_screen else None
    try:
        while True:
            if screen is not None:
                screen.draw()
            else:
                _lines(shell, viewer, sort)
            left = None if left is None else left - 1
            if left == 0:
                return OK
            until = time.monotonic() + interval
            while (rest := until - time.monotonic()) > 0:
                viewer.refresh()
                time.sleep(min(rest, TICK))
    except KeyboardInterrupt:
        return OK
    finally:
        if screen is not None:
            screen.leave()


# -- a queue as a line -------------------------------------------------------------------------------------------


def state_of(seen: Seen, now: float) -> str:
    """Return the state of a queue in a word."""
    if seen.silent(now) is not None:
        return "silent"
    if seen.look is None:
        return "ok"
    kinds = findings(seen.look)
    for kind, word in STATES.items():
        if kind in kinds:
            return word
    return "ok" if seen.look.health.healthy else "unwell"


def record_of(seen: Seen, now: float) -> Record:
    """Return what a look shows of a queue, as the columns have it."""
    look, silent = seen.look, seen.silent(now)
    record: dict[str, object] = {"queue": seen.watched.name, "state": state_of(seen, now)}
    if silent is not None:
        record["because"] = f"no answer for {format_duration(int(silent))}"
    if look is None:
        return record
    counts = look.counts
    said = [one.message for one in (*look.health.reasons, *look.health.notes)]
    return {
        **record,
        "waiting": counts.get("target"),
        "oldest": look.health.oldest_age,
        "in": look.rate_in,
        "out": look.rate_out,
        "held": counts.get("processing"),
        "delayed": counts.get("delayed"),
        "error": counts.get("error"),
        "because": record.get("because") or look.still or (said[0] if said else None),
    }


def _record_of_look(seen: Seen, now: float) -> Record:
    """Return all of a look, for programs."""
    look = seen.look
    record = dict(record_of(seen, now))
    if look is None:
        return record
    return {
        **record,
        "at": look.at,
        "age": now - seen.looked,
        "counts": look.counts,
        "oldest": look.oldest,
        "ages": dict(zip(AGE_NAMES, look.ages, strict=False)),
        "consumers": look.consumers,
        "holders": [holder._asdict() for holder in look.holders],
        "reasons": [asdict(one) for one in look.health.reasons],
        "notes": [asdict(one) for one in look.health.notes],
    }


def _ordered(viewer: Viewer, sort: str | None, now: float) -> list[Seen]:
    """Return the queues, the worst first, or by a column; without temporary ones."""
    shown = [seen for seen in viewer.all() if not is_temporary(seen.watched.name)]
    if sort in (None, "state"):
        return sorted(shown, key=lambda seen: (WORST.index(state_of(seen, now)), -_number(seen, "waiting", now)))
    if sort in ("queue", "because"):
        return sorted(shown, key=lambda seen: str(record_of(seen, now).get(sort) or ""))
    return sorted(shown, key=lambda seen: -_number(seen, sort, now))


def _number(seen: Seen, column: str | None, now: float) -> float:
    value = record_of(seen, now).get(column or "")
    return float(value) if isinstance(value, int | float) else -1.0


def _lines(shell: Shell, viewer: Viewer, sort: str | None) -> None:
    now = time.monotonic()
    for seen in _ordered(viewer, sort, now):
        shell.line(_record_of_look(seen, now) if shell.json else _short(record_of(seen, now)), COLUMNS)


def _short(record: Record) -> Record:
    """Return a record whose numbers are as people read them."""
    oldest, rates = record.get("oldest"), {key: record.get(key) for key in ("in", "out")}
    return {
        **record,
        "oldest": None if not isinstance(oldest, int | float) else format_duration(int(oldest)),
        **{key: None if not isinstance(rate, int | float) else f"{rate:.1f}" for key, rate in rates.items()},
    }


def _brief(record: Record) -> Record:
    """Return a record for a line of a screen: the first clause of why."""
    because = str(record.get("because") or "").partition(";")[0]
    return {**_short(record), "because": because if len(because) <= BRIEF else f"{because[: BRIEF - 3]}..."}


# -- the screen --------------------------------------------------------------------------------------------------


class _Screen:
    """Draws what a viewer has seen; each line ends with its rest cleared, so that nothing flickers."""

    def __init__(self, shell: Shell, viewer: Viewer, name: str | None, sort: str | None) -> None:
        self._shell = shell
        self._viewer = viewer
        self._name = name
        self._sort = sort
        self._width = 80
        self._log: Reader | None = None
        self._went_by: deque[Event] = deque(maxlen=LAST)
        sys.stdout.write(ENTER)

    def leave(self) -> None:
        """Go back to the screen that was there before."""
        sys.stdout.write(LEAVE)
        output.flush()

    def draw(self) -> None:
        """Draw the present looks, as far as they fit."""
        self._width, rows = shutil.get_terminal_size()
        now = time.monotonic()
        lines = list(self._of_queue(now) if self._name is not None else self._of_root(now))[: max(rows - 1, 1)]
        body = "".join(f"{line}{CLEAR}\n" for line in lines)
        sys.stdout.write(f"{HOME}{body}{REST}")
        output.flush()

    def _of_root(self, now: float) -> Iterator[str]:
        seen = _ordered(self._viewer, self._sort, now)
        looks = [one.look for one in seen if one.look is not None]
        sums = {state: sum(look.counts.get(state, 0) for look in looks) for state in ("target", "processing", "error")}
        oldest = max((now - one.looked for one in seen if one.look is not None), default=0.0)
        where = output.escape(os.path.basename(str(self._shell.root.path)))
        counted = f"{sums['target']:,} waiting, {sums['processing']:,} held, {sums['error']:,} in error"
        at = time.strftime("%H:%M:%SZ", time.gmtime())
        yield from self._wrapped(
            f"{where}: {count_of(len(seen), 'queue')}, {counted}; {at}, at most {oldest:.0f} s old"
        )
        yield from output.table_lines([_brief(record_of(one, now)) for one in seen], COLUMNS, SPARE)

    def _of_queue(self, now: float) -> Iterator[str]:
        assert self._name is not None
        seen = next(iter(self._viewer.all()))
        yield from output.table_lines([_short(record_of(seen, now))], COLUMNS[:-1], SPARE)
        look = seen.look
        if look is None:
            return
        for one in (*look.health.reasons, *look.health.notes):
            yield from self._wrapped(f"{one.kind}: {one.message}")
        yield ""
        if look.ages:
            ages = {name: f"{count:,}" for name, count in zip(AGE_NAMES, look.ages, strict=True)}
            yield from output.table_lines([{"waiting": "at most", **ages}], ("waiting", *AGE_NAMES), ())
            yield ""
        yield from output.table_lines(list(_holders(look)), HOLDERS, ("status", "settles", "since"))
        self._read_log()
        if self._went_by:
            yield ""
            yield from output.table_lines([_event(event) for event in reversed(self._went_by)], EVENTS, ("by", "id"))

    def _wrapped(self, text: str) -> list[str]:
        from rich.console import Console
        from rich.text import Text

        return [line.plain for line in Text(output.visible(text)).wrap(Console(), self._width)]

    def _read_log(self) -> None:
        if self._log is None:
            self._log = Reader(self._shell.root.queue(self._name or "").layout.log, back=RECENT)
        self._went_by += (event for event in self._log.events() if event.event not in ("sum", "acked", "moved"))


def _holders(look: Look) -> Iterator[Record]:
    """Yield who holds messages, with what its process settles a second."""
    rates = {client_part(f"{host.rpartition('-')[0]}-{pid}"): rate for (host, pid), rate in (look.rates or {}).items()}
    for holder in look.holders:
        rate = rates.get(holder.client)
        since = max(look.at.timestamp() - holder.since / 1000, 0)
        yield {
            "holder": holder.subscription or holder.client,
            "held": holder.held,
            "since": f"{format_duration(int(since))} ago",
            "settles": None if rate is None else f"{rate:.1f}/s",
            "status": holder.status,
        }


def _event(event: Event) -> Record:
    record = log_command.record_of(event)
    return {**record, "reason": output.reason_text(record)}
