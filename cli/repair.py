"""Bringing queues back in order, and what administrators do to messages in bulk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import All, DryRun, Filter, Ids, Json, QueueName, QueueNames, State, Yes, duration, state
from .output import NEGATIVE, OK, Record, unescape
from .shell import Shell, UsageError, going_on, so_many

if TYPE_CHECKING:
    from dropq import Outcome


def _many(count: int, which: str = "") -> str:
    return "1 message" if count == 1 else f"{which}{count} messages"


def requeue(
    ctx: typer.Context,
    queue: QueueName,
    ids: Ids = None,
    everything: All = False,
    state: Annotated[State, state("Where they lie.")] = "error",
    to: Annotated[str | None, typer.Option("--to", metavar="Q", help="Another queue to bring them to.")] = None,
    keep_expiration: Annotated[bool, typer.Option("--keep-expiration", help="Keep the senders' expirations.")] = False,
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Bring messages back into target/, as if they were new.

    Their counters start again, and their senders' expirations are dropped.
    """
    from dropq import admin

    shell = Shell(ctx, json)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None)
    found = shell.queue(queue)
    goal = shell.queue(to) if to is not None else None
    total = len(wanted) if wanted is not None else found.counts()[state]
    if wanted is None and not dry_run:
        shell.confirm(f"Requeue {_many(total, 'all ')} in {state}/ of {found.name}?", yes=yes)
    outcomes = admin.requeue(
        found, ids=wanted, state=state, filter=filter, to=goal, keep_expiration=keep_expiration, dry_run=dry_run
    )
    return shell.report(outcomes, "would_requeue" if dry_run else "requeued", total, state=state)


def _point(text: str) -> str:
    from dropq.replay import checked

    try:
        return checked(output.unescape(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def replay(
    ctx: typer.Context,
    queue: QueueName,
    ids: Ids = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            parser=_point,
            metavar="POINT",
            help="Where to begin: epoch, now, creation, an id that dropq made, or an ISO 8601 date or time, in UTC "
            "where it does not say; else the queue's recovery_point, or, of ids, anywhere.",
            show_default=False,
        ),
    ] = None,
    filter: Filter = None,
    to: Annotated[str | None, typer.Option("--to", metavar="Q", help="Another queue to send them to.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Send what lies in processed/ again, oldest first.

    It stays there, too. Each message comes once, as one that was delivered before. Without ID all from a point on come.
    """
    from dropq.replay import replay as replayed

    shell = Shell(ctx, json)
    wanted = shell.ids(ids, everything=not ids)
    found = shell.queue(queue)
    goal = shell.queue(to) if to is not None else found
    total = len(wanted) if wanted is not None else None
    if wanted is None and not dry_run:
        point = start or found.config.recovery_point
        shell.confirm(f"Replay what lies in processed/ of {found.name}, from {point} on, to {goal.name}?", yes=yes)
    outcomes = replayed(found, start, ids=wanted, filter=filter, to=goal, dry_run=dry_run)
    return shell.report(outcomes, "would_replay" if dry_run else "replayed", total, state="processed")


def move(
    ctx: typer.Context,
    queue: QueueName,
    to: Annotated[str, typer.Argument(metavar="TO", help="The queue they go to.", show_default=False)],
    ids: Ids = None,
    everything: All = False,
    state: Annotated[State, state("Where they lie.")] = "target",
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Move messages to another queue, counters and all."""
    from dropq import admin

    shell = Shell(ctx, json)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None)
    found, goal = shell.queue(queue), shell.queue(to)
    if found.name == goal.name:
        raise UsageError(f"{goal.name} is where they are: name another queue to move them to")
    total = len(wanted) if wanted is not None else found.counts()[state]
    if wanted is None and not dry_run:
        shell.confirm(f"Move {_many(total, 'all ')} in {state}/ of {found.name} to {goal.name}?", yes=yes)
    outcomes = admin.move(found, goal, ids=wanted, state=state, filter=filter, dry_run=dry_run)
    return shell.report(outcomes, "would_move" if dry_run else "moved", total, state=state)


def purge(
    ctx: typer.Context,
    queue: QueueName,
    state: Annotated[State, state("Where they lie.")],
    ids: Ids = None,
    everything: All = False,
    older_than: Annotated[
        float | None, duration("--older-than", help="All that came to the state so long ago.")
    ] = None,
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Remove messages for good."""
    from dropq import admin

    shell = Shell(ctx, json)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None or older_than is not None)
    found = shell.queue(queue)
    total = len(wanted) if wanted is not None else found.counts()[state]
    if not dry_run:
        count = _many(total)
        which = count if older_than is None else f"what is old enough of {count}"
        shell.confirm(f"Remove {which} from {state}/ of {found.name} for good?", yes=yes)
    outcomes = admin.purge(found, ids=wanted, state=state, filter=filter, older_than=older_than, dry_run=dry_run)
    return shell.report(outcomes, "would_remove" if dry_run else "removed", total, state=state)


def prune(
    ctx: typer.Context,
    queues: QueueNames = None,
    state: Annotated[State, state("Where to prune.")] = "processed",
    keep_age: Annotated[float | None, duration("--keep-age", help="Remove what is there for longer.")] = None,
    keep_count: Annotated[
        int | None, typer.Option("--keep-count", metavar="N", min=0, help="Remove the oldest beyond N.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Remove the oldest messages of a state for good.

    Without a limit processed/ is pruned by the queue's own, max_history and history_age.
    """
    from dropq import admin

    if state != "processed" and keep_age is None and keep_count is None:
        raise UsageError(f"give --keep-age or --keep-count: queues have no limits of their own for {state}/")
    shell = Shell(ctx, json)
    names = shell.queues(queues)
    if not dry_run:
        shell.confirm(f"Prune {state}/ of {', '.join(names)}?", yes=yes)
    codes: list[int] = []

    def outcomes() -> Iterator[Outcome]:
        for name in names:
            with going_on(codes):
                queue = shell.queue(name)
                yield from admin.prune(queue, state=state, keep_age=keep_age, keep_count=keep_count, dry_run=dry_run)

    done = "would_remove" if dry_run else "removed"
    return shell.report(outcomes(), done, state=state) or output.verdict(codes)


Root = Annotated[bool, typer.Option("--all", help="The whole root, queues to come included.")]


def pause(ctx: typer.Context, queues: QueueNames = None, everything: Root = False, json: Json = False) -> int:
    """Make consumers see an empty queue, until it is resumed.

    Senders go on, and what is held stays held.
    """
    return _switch(Shell(ctx, json), queues, everything, paused=True)


def resume(ctx: typer.Context, queues: QueueNames = None, everything: Root = False, json: Json = False) -> int:
    """Let consumers see a queue again."""
    return _switch(Shell(ctx, json), queues, everything, paused=False)


def _switch(shell: Shell, queues: list[str] | None, everything: bool, *, paused: bool) -> int:
    if bool(queues) == everything:
        raise UsageError("name a QUEUE, or give --all for the whole root")
    if everything:
        (shell.root.pause if paused else shell.root.resume)()
        return OK

    def switch(name: str) -> None:
        queue = shell.queue(name)
        (queue.pause if paused else queue.resume)()
        if queue.paused and not paused:
            output.note(f"queue {queue.name}: the whole root is still paused; `dropq resume --all` ends that")

    return shell.each(queues or (), switch, "paused" if paused else "resumed")


def sweep(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", help="The queue; all of the root without.")] = None,
    foreign_older_than: Annotated[
        float | None,
        duration("--foreign-older-than", help="Also return claims of scripts and DropboxMQ clients that are so old."),
    ] = None,
    unleased_older_than: Annotated[
        float | None,
        duration("--unleased-older-than", help="Also return claims without lease and living owner that are so old."),
    ] = None,
    jobs_older_than: Annotated[
        float | None, duration("--jobs-older-than", help="Also drop uncommitted jobs that are idle for so long.")
    ] = None,
    json: Json = False,
) -> int:
    """Return what the dead hold, deliver what is due, expire, prune.

    Prints how many messages, or private files, each step moved. No daemon is needed: consumers sweep on their way, this
    sweeps all. Exits with 1 when something could not be brought in order, which stderr tells of; the next sweep tries
    again.
    """
    from dropq.sweep import SweepReport

    shell = Shell(ctx, json)
    ages = {
        "foreign_older_than": foreign_older_than,
        "unleased_older_than": unleased_older_than,
        "jobs_older_than": jobs_older_than,
    }
    reports: list[SweepReport] = []
    names = shell.queues(None if queue is None else [queue])
    code = shell.each(names, lambda name: reports.append(shell.queue(name).sweep(**ages)), "swept")
    if code and not reports:
        return code
    if queue is None and not code:
        reports.append(shell.root.tidy())
    report = SweepReport()
    for one in reports:
        report.add(one)
    counts = report.counts()
    if shell.json:
        shell.line({"queue": queue and unescape(queue), **counts, "next_due": report.next_due}, ())
    else:
        shell.show([{"step": step, "count": count} for step, count in counts.items() if count], ("step", "count"))
    output.note(f"swept={report.total}" + (f" refused={report.refused}" if report.refused else ""))
    return code or (NEGATIVE if report.refused else OK)


def fsck(
    ctx: typer.Context,
    queues: QueueNames = None,
    repair: Annotated[bool, typer.Option("--repair", help="Make missing folders, set strays aside.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Find what does not belong in a root or its queues.

    Exits with 1 when something wants attention: a warning or an error that was not repaired. --repair never deletes:
    what it sets aside lies in .dropq/set-aside/, under the path it had.
    """
    from dropq import fsck as checks

    shell = Shell(ctx, json)
    repair = repair and not dry_run
    if repair:
        shell.confirm(f"Repair {', '.join(queues) if queues else 'the whole root'}?", yes=yes)
    open_ones = 0
    codes: list[int] = []
    interrupted: list[str] = []

    def records() -> Iterator[Record]:
        nonlocal open_ones
        names = [unescape(name) for name in queues] if queues else [queue.name for queue in checks.queues(shell.root)]
        found = [] if queues else checks.fsck_root(shell.root, repair=repair)
        try:
            for name in shell.progress(names, "checking", len(names)):
                with going_on(codes):
                    found += shell.root.queue(name).fsck(repair)
        except KeyboardInterrupt:  # what was found until then is shown
            interrupted.append(so_many(len(codes), len(names), "queues checked"))
        for finding in found:
            open_ones += finding.open
            yield {
                "level": finding.level,
                "kind": finding.kind,
                "path": finding.path,
                "detail": finding.detail,
                "repaired": finding.repaired,
            }

    shell.show(records(), ("level", "kind", "path", "detail", "repaired"))
    if interrupted:
        raise KeyboardInterrupt(*interrupted)
    code = output.verdict(codes)
    if open_ones or not code:
        output.note(f"open={open_ones}" if open_ones else "nothing wants attention")
    return code or (NEGATIVE if open_ones else OK)
