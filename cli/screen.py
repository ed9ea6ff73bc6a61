"""The screen of `dropq top`: the look, drawn again every few seconds. It reads no keys, and draws without a disk."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import count as counting
from typing import TYPE_CHECKING, Annotated

import typer

from dropq.durations import format_duration
from dropq.lifecycle.decision import count_of

from . import log as log_command
from . import output
from .options import QueueOrRoot, interval, option
from .output import NEGATIVE, OK, Record
from .shell import Shell, handling

if TYPE_CHECKING:
    from dropq.diagnosis.overview import Viewer, Watched

#: The columns of queues.
COLUMNS = ("queue", "state", "waiting", "oldest", "in", "out", "held", "delayed", "error", "because")
#: The columns that a narrow terminal does without, the least important first.
SPARE = ("delayed", "in", "because", "out", "held", "oldest", "error", "state")
#: The columns of holders, and of what went by.
HOLDERS, EVENTS = ("holder", "held", "changed", "settles", "status"), ("time", "event", "id", "reason", "by")
#: Characters of why that the screen shows of a queue among others, at least; and of a screen that are for the rest.
BRIEF, BESIDE = 60, 70
#: To the corner of a terminal; clear a line's rest, and begin the next; clear the screen's rest.
HOME, CLEAR, REST = "\x1b[H", "\x1b[K\n", "\x1b[J"


def top(
    ctx: typer.Context,
    name: QueueOrRoot = None,
    interval: Annotated[float, interval("--interval", "The time between two screens.")] = 2.0,
    sort: Annotated[
        str | None, option("--sort COLUMN", f"By {', '.join(COLUMNS)}, the largest first; else the worst first.")
    ] = None,
    count: Annotated[
        int | None, option("-n N", "End after N looks; by default 1 into a pipe and with --json.", min=1)
    ] = None,
) -> int:
    """Show all queues as a screen, or one of them.

    The worst queue comes first. Of one queue it shows what is wrong, ages, holders, last failures and acts, on a
    terminal or with --json. Lines have queue, state, waiting, oldest, in, out, held, delayed, error, because.
    IN and OUT are messages a second in the last minute, by the log; OUT is what was settled, IN what came. They are
    about right: what scripts settle is in neither. Ctrl-C ends it. Into a pipe, or with --json, it prints N looks as
    lines.
    """
    from dropq.diagnosis.overview import Viewer
    from dropq.diagnosis.summary import summary_of, worst_first

    shell = Shell(ctx)
    sort = sort and sort.lower()
    if sort is not None and sort not in COLUMNS:
        raise typer.BadParameter(f"there is no column {sort}: {', '.join(COLUMNS)}", param_hint="'--sort'")
    if name is not None:
        name = shell.queue(name).name
    viewer = Viewer(shell.root.context, None if name is None else [name])
    viewer.wait()
    if viewer.is_listed and not viewer.all():
        shell.check_root()
    if shell.on_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown"):
        _draw_again(shell, viewer, interval, sort, count)
        return OK
    for number in range(count or 1):
        if number:
            viewer.keep_up(interval)
        now = time.monotonic()
        for seen in worst_first(viewer, now, sort):
            shell.line(_whole(seen, now) if shell.json else _short(summary_of(seen, now)), COLUMNS)
    if not viewer.is_listed:
        output.note(f"error: the queues of {shell.root.path} could not be listed: {viewer.problem or 'no answer'}")
    return OK if viewer.is_listed else NEGATIVE


def _draw_again(shell: Shell, viewer: Viewer, interval: float, sort: str | None, last: int | None) -> None:
    """Draw until somebody ends it; then leave the terminal as it was, with the last looks after so many of them."""
    from rich.console import Console

    def end(number: int, restore: Callable[[], None]) -> None:
        raise KeyboardInterrupt

    shown: list[str] = []
    screen, ends = Console().screen(hide_cursor=False), handling((signal.SIGTERM, signal.SIGHUP), end)
    with suppress(KeyboardInterrupt), screen, ends:
        for number in counting(1):
            lines = _draw(shell, viewer, sort)
            if number == last:
                shown = lines
                break
            viewer.keep_up(interval)
    for line in shown:
        output.put(line)


# -- a queue as a line -------------------------------------------------------------------------------------------


def _whole(seen: Watched, now: float) -> Record:
    """Return all of a look, for programs."""
    from dropq.diagnosis.standing import AGE_NAMES
    from dropq.diagnosis.summary import holders_of, summary_of

    look, record = seen.last, summary_of(seen, now)
    if look is None:
        return record
    return {
        **record,
        **{"at": look.at, "age": round(now - seen.looked, 3), "counts": look.counts},
        "oldest_of": {state: round(age, 3) for state, age in look.oldest.items()},
        "ages": dict(zip(AGE_NAMES, look.ages, strict=False)),
        "consumers": look.consumers,
        "holders": list(holders_of(look)),
        "reasons": [asdict(one) for one in look.health.reasons],
        "notes": [asdict(one) for one in look.health.notes],
        "log": [log_command.record_of(event) for event in look.went_by],
    }


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


# -- the screen --------------------------------------------------------------------------------------------------


def _draw(shell: Shell, viewer: Viewer, sort: str | None) -> list[str]:
    """Draw the present looks, as far as they fit, and clear the rest of each line, so that nothing flickers.

    Return all lines.
    """
    from rich.cells import cell_len, set_cell_size

    (width, rows), now = shutil.get_terminal_size(), time.monotonic()
    found = _of_queue(viewer.all()[0], width, now) if viewer.named else _of_root(shell, viewer, sort, width, now)
    # A line with colours is a table's, and fits.
    lines = [line if "\x1b" in line or cell_len(line) <= width else set_cell_size(line, width) for line in found]
    shown = lines if len(lines) < rows else [*lines[: max(rows - 2, 0)], f"... {len(lines) - rows + 2} more lines"]
    sys.stdout.write(f"{HOME}{''.join(f'{line}{CLEAR}' for line in shown)}{REST}")
    output.flush()
    return lines


def _of_root(shell: Shell, viewer: Viewer, sort: str | None, width: int, now: float) -> Iterator[str]:
    from dropq.diagnosis.summary import summary_of, worst_first

    seen = worst_first(viewer, now, sort)
    looks = [one.last for one in seen if one.last is not None]
    waiting, held, error = (sum(look.counts.get(s, 0) for look in looks) for s in ("target", "processing", "error"))
    oldest = max((now - one.looked for one in seen if one.last is not None), default=0.0)
    name, at = output.escape(os.path.basename(str(shell.root.path))), time.strftime("%H:%M:%SZ", time.gmtime())
    counted = f"{count_of(len(seen), 'queue')}, {waiting:,} waiting, {held:,} held, {error:,} in error"
    yield from _wrapped(f"{name}: {counted}; {at}, at most {oldest:.0f} s old", width)
    if not viewer.is_listed:
        yield from _wrapped(f"the queues cannot be listed: {viewer.problem or 'no answer'}", width)
    brief = max(BRIEF, width - BESIDE)
    yield from output.table_lines([_brief(summary_of(one, now), brief) for one in seen], COLUMNS, SPARE)


def _of_queue(seen: Watched, width: int, now: float) -> Iterator[str]:
    from dropq.diagnosis.standing import AGE_NAMES
    from dropq.diagnosis.summary import holders_of, summary_of

    look, record = seen.last, _short(summary_of(seen, now))
    yield from output.table_lines([record], COLUMNS[:-1], SPARE)
    if look is None or seen.silent(now) is not None:
        yield from _wrapped(str(record.get("because") or ""), width)
    if look is None:
        return
    for one in (*look.health.reasons, *look.health.notes):
        yield from _wrapped(f"{one.kind}: {one.message}", width)
    if look.ages:
        ages = {name: f"{number:,}" for name, number in zip(AGE_NAMES, look.ages, strict=True)}
        yield from ("", *output.table_lines([{"waiting": "at most", **ages}], ("waiting", *AGE_NAMES)))
    if look.holders:
        held = [{**holder, "settles": _rate(holder["settles"])} for holder in holders_of(look)]
        yield from ("", *output.table_lines(held, HOLDERS, ("status", "settles", "changed")))
    if look.went_by:
        records = [log_command.record_of(event) for event in reversed(look.went_by)]
        events = [{**record, "reason": output.reason_text(record)} for record in records]
        yield from ("", *output.table_lines(events, EVENTS, ("by", "id")))


def _wrapped(text: str, width: int) -> list[str]:
    from rich.console import Console
    from rich.text import Text

    return [line.plain for line in Text(output.visible(text)).wrap(Console(), width)]


def _rate(rate: object) -> str | None:
    return f"{rate:.1f}/s" if isinstance(rate, int | float) else None
