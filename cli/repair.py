"""Commands that repair queues, and commands that act on many messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack

import typer

from dropq.format.layout import STATES, UNSETTLED
from dropq.lifecycle.decision import count_of

from . import output
from .look import explain_filter
from .options import (
    All,
    DryRun,
    Filter,
    Ids,
    QueueName,
    QueueNames,
    QueueOrRoot,
    Quiet,
    State,
    Yes,
    argument,
    duration,
    option,
    point,
    state,
    with_options,
)
from .output import NEGATIVE, OK, unescape
from .shell import Shell, UsageError, report_open, reporting_errors

if TYPE_CHECKING:
    from dropq import Outcome, Queue
    from dropq.lifecycle.context import QueueContext
    from dropq.upkeep.bulk import Selection
    from dropq.upkeep.steps import SweepReport

    Act = Callable[[QueueContext, Selection], Iterator[Outcome]]


#: The columns of `fsck`; on a terminal the path, which may be long, comes first.
FINDING = ("level", "kind", "path", "detail", "repaired")
FINDING_TABLE = ("path", "level", "kind", "detail", "repaired")


@dataclass(frozen=True)
class Bulk:
    """One run of a bulk verb: it asks before it takes all messages of a state, and reports each message."""

    shell: Shell
    queue: Queue
    which: Selection
    yes: bool

    def total(self) -> int:
        """Return how many messages were named, else how many the states have."""
        if self.which.wanted is not None:
            return len(self.which.wanted)
        counts = self.queue.counts()
        return sum(counts[state] for state in self.which.states)

    def run_on_those(self, verb: str, act: Act, destination: str = "") -> int:
        """Ask about the messages that were named or match the filter, else about all, and run; return the exit code."""
        which, total = self.which, self.total()
        question = (
            f"{verb.capitalize()} {_those(total, which.filter)} in {which.where}/ of {self.queue.name}{destination}?"
        )
        return self.run(verb, act, total if which.filter is None else None, question=question)

    def run(self, verb: str, act: Act, total: int | None, *, question: str, always_asks: bool = False) -> int:
        """Ask, also about named messages if it `always_asks`, and act on `total` messages; return the exit code."""
        which = self.which
        outcomes: Iterable[Outcome] = act(self.queue.context, which)  # does nothing until it is gone through
        if not (which.dry_run or self.yes) and (which.wanted is None or always_asks):
            if total == 0:  # nothing to ask about: what comes meanwhile stays
                outcomes = ()
            else:
                self.shell.confirm(question, yes=False)
        if which.filter is not None:
            outcomes = self._explained(outcomes, which.filter)
        return self.shell.report(outcomes, _in_sum(verb, dry_run=which.dry_run), total, state=which.where)

    def _explained(self, outcomes: Iterable[Outcome], filter: str) -> Iterator[Outcome]:
        """Yield what became of each message; of a filter that chose none, say which of its names no message has."""
        is_empty = True
        for outcome in outcomes:
            is_empty = False
            yield outcome
        if is_empty:
            for state in self.which.states:
                explain_filter(self.queue, state, filter)


def _in_sum(verb: str, *, dry_run: bool) -> str:
    return f"would_{verb}" if dry_run else f"{verb.removesuffix('e')}ed"


def _those(count: int, filter: str | None) -> str:
    """Write which messages a question is about."""
    every = "" if count == 1 else "all "
    return f"{every if filter is None else 'what matches of '}{count_of(count)}"


def requeue(
    ctx: typer.Context,
    name: QueueName,
    ids: Ids = None,
    everything: All = False,
    state: Annotated[
        State | None, state("The state they are in: by default error, and target with --to-origin.")
    ] = None,
    to: Annotated[str | None, option("--to QUEUE", "The queue to bring them to, if another.")] = None,
    to_origin: Annotated[bool, option("--to-origin", "Bring each dead letter to the queue that it came from.")] = False,
    whole: Annotated[bool, option("--whole", "Put the parts of each bundle together as one message.")] = False,
    keep_expiration: Annotated[bool, option("--keep-expiration", "Keep their expirations.")] = False,
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Bring messages back into target/, as if they were new.

    Their counters start again, and their expirations are dropped. With --to-origin, each dead letter goes back to the
    queue that it came from. A letter stays when that queue is missing, and so do messages that are no dead letters.
    With --whole, the parts and records of a bundle that are in the state become one message again, in the order of
    their numbers. Parts whose formats, headers or records contradict each other stay.
    """
    from dropq.upkeep import bulk

    if to_origin and to is not None:
        raise UsageError("give --to or --to-origin: the messages go to one queue, or each to its own")
    if whole and (to_origin or to is not None):
        raise UsageError("--whole puts parts together in their own queue: move the message after that")

    shell = Shell(ctx, quiet)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None)
    where = bulk.requeued_from(state, to_origin=to_origin)
    task = Bulk(shell, shell.queue(name), bulk.Selection((where,), wanted, filter, dry_run=dry_run), yes)
    if whole and where == "processing":
        raise UsageError("--whole puts together what is settled: give --state error, expired or processed")
    destination = shell.queue(to).context if to is not None else None
    act = partial(bulk.requeue, to=destination, to_origin=to_origin, whole=whole, keep_expiration=keep_expiration)
    return _requeue(task, act, to_origin=to_origin)


def _by_origin(task: Bulk) -> str:
    """Write how many dead letters go where."""
    from dropq.upkeep import bulk

    with task.queue.context.error_context("nothing was changed"):
        found = bulk.origins_in(task.queue.context, task.which)
    destinations = [f"{count} to {output.escape(name)}" for name, count in sorted(found.items()) if name]
    destinations += [f"{found['']} stay"] if found[""] else []
    return ", ".join(destinations) or "none is a dead letter"


def _requeue(task: Bulk, act: Act, *, to_origin: bool) -> int:
    """Bring messages back; if no message was brought back, report dead letters in another state, and return 1."""
    from dropq.upkeep import bulk

    found, which = False, task.which

    def noted(outcome: Outcome) -> Outcome:
        nonlocal found
        found = found or outcome.ok
        return outcome

    def watched(context: QueueContext, which: Selection) -> Iterator[Outcome]:
        return map(noted, act(context, which))

    plan = _by_origin(task) if to_origin and (which.dry_run or not task.yes) else ""
    destination = f", each to its origin: {plan}" if plan else ""
    if which.dry_run and plan:
        output.note(plan)
    code = task.run_on_those("requeue", watched, destination)
    if found:
        return code
    other = {"target": "error", "error": "target"}.get(which.where)
    count = bulk.letters_in(task.queue.context, replace(which, states=(other,))) if other else 0
    if count and other:
        those = "--all" if which.wanted is None else "ID"
        way = f"`dropq requeue {quote(task.queue.name)} --to-origin {those}` puts each back where it came from"
        letters = f"{count_of(count, 'dead letter')} {'lies' if count == 1 else 'lie'} in {other}/ of {task.queue.name}"
        output.note(f"{letters}: {f'look there with --state {other}' if to_origin else way}")
    elif to_origin and not plan:
        output.note(_by_origin(task))
    return NEGATIVE if code == OK and (count or to_origin) else code


def replay(
    ctx: typer.Context,
    name: QueueName,
    ids: Ids = None,
    start: Annotated[
        str | None,
        option(
            "--from POINT",
            "Where to begin: epoch, now, creation, a generated id, or an ISO 8601 date or time, in UTC unless it "
            "has an offset. By default the queue's recovery_point or, when ids are named, anywhere.",
            parser=point,
        ),
    ] = None,
    filter: Filter = None,
    to: Annotated[str | None, option("--to QUEUE", "The queue to send them to, if another.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Send the messages in processed/ again, oldest first.

    Each is sent once, as a copy that counts as redelivered; the original stays. Without ID it sends all from POINT on.
    """
    from dropq.upkeep import bulk

    shell = Shell(ctx, quiet)
    wanted = shell.ids(ids, everything=not ids)
    task = Bulk(shell, shell.queue(name), bulk.Selection(("processed",), wanted, filter, dry_run=dry_run), yes)
    destination = shell.queue(to) if to is not None else task.queue
    point = start or task.queue.config.recovery_point or "epoch"
    question = f"Replay the messages in processed/ of {task.queue.name}, from {point} on, to {destination.name}?"
    total = task.total() if wanted is not None else None
    return task.run("replay", partial(bulk.replay, start=start, to=destination.context), total, question=question)


def move(
    ctx: typer.Context,
    name: QueueName,
    to: Annotated[str, argument("TO", "The queue to move them to.")],
    ids: Ids = None,
    everything: All = False,
    state: Annotated[State, state("The state they are in.", STATES)] = "target",
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Move messages to another queue, with their counters.

    A message that is delayed waits there at once.
    """
    from dropq.upkeep import bulk

    shell = Shell(ctx, quiet)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None)
    task = Bulk(shell, shell.queue(name), bulk.Selection((state,), wanted, filter, dry_run=dry_run), yes)
    destination = shell.queue(to)
    if task.queue.name == destination.name:
        raise UsageError(f"the messages are in {destination.name} already: name another queue to move them to")
    return task.run_on_those("move", partial(bulk.move, to=destination.context), f" to {destination.name}")


def expire(
    ctx: typer.Context,
    name: QueueName,
    ids: Ids = None,
    everything: All = False,
    state: Annotated[State | None, state("The state they are in; all three by default.", UNSETTLED)] = None,
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Move messages that wait, are delayed or are held to expired/.

    Consumers that hold one lose their claims. `dropq requeue --state expired` brings the messages back.
    """
    from dropq.upkeep import bulk

    shell = Shell(ctx, quiet)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None)
    states = bulk.UNFINISHED if state is None else (state,)
    task = Bulk(shell, shell.queue(name), bulk.Selection(states, wanted, filter, dry_run=dry_run), yes)
    return task.run_on_those("expire", bulk.expire)


def purge(
    ctx: typer.Context,
    name: QueueName,
    state: Annotated[State, state("The state they are in.")],
    ids: Ids = None,
    everything: All = False,
    older_than: Annotated[
        float | None, duration("--older-than", "Remove all that came to the state longer ago.")
    ] = None,
    filter: Filter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Remove messages for good."""
    from dropq.upkeep import bulk

    shell = Shell(ctx, quiet)
    wanted = shell.ids(ids, everything=everything, chosen=filter is not None or older_than is not None)
    task = Bulk(shell, shell.queue(name), bulk.Selection((state,), wanted, filter, older_than, dry_run), yes)
    total = task.total()
    which = _those(total, filter) if older_than is None else f"what is old enough of {count_of(total)}"
    question = f"Remove {which} from {state}/ of {task.queue.name} for good?"
    expected = total if filter is None and older_than is None else None
    return task.run("remove", bulk.purge, expected, question=question, always_asks=True)


def prune(
    ctx: typer.Context,
    queues: QueueNames = None,
    state: Annotated[State, state("The state to prune.")] = "processed",
    keep_age: Annotated[float | None, duration("--keep-age", "Remove what has been there for longer.")] = None,
    keep_count: Annotated[
        int | None, option("--keep-count N", "Keep the newest N, and remove the rest.", min=0)
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> int:
    """Remove the oldest messages of a state for good.

    Without --keep-age and --keep-count it prunes processed/, by the queue's max_history and history_age.
    """
    from dropq.upkeep import bulk

    if state != "processed" and keep_age is None and keep_count is None:
        raise UsageError(f"give --keep-age or --keep-count: queues have no limits of their own for {state}/")
    shell = Shell(ctx, quiet)
    if not queues:
        shell.check_root()
    names = shell.queues(queues)
    if not dry_run:
        shell.confirm(f"Prune {state}/ of {', '.join(names)}?", yes=yes)
    codes: list[int] = []

    def outcomes() -> Iterator[Outcome]:
        opened = shell.named if queues else shell.unless_gone(shell.named)
        for name in names:
            with reporting_errors(codes):
                if queue := opened(name):
                    yield from bulk.prune(
                        queue.context, state=state, keep_age=keep_age, keep_count=keep_count, dry_run=dry_run
                    )

    return shell.report(outcomes(), _in_sum("remove", dry_run=dry_run), state=state) or output.verdict(codes)


Switched = Annotated[list[str] | None, argument("QUEUE", "The queues; or give --all.")]
Root = Annotated[bool, option("--all", "The whole root, with queues that are created later.")]


def pause(ctx: typer.Context, queues: Switched = None, everything: Root = False) -> int:
    """Make queues look empty to consumers, until they are resumed.

    Senders go on, and consumers keep the messages that they hold.
    """
    return _switch(Shell(ctx), queues, everything, paused=True)


def resume(ctx: typer.Context, queues: Switched = None, everything: Root = False) -> int:
    """End the pause of queues."""
    return _switch(Shell(ctx), queues, everything, paused=False)


def _switch(shell: Shell, queues: list[str] | None, everything: bool, *, paused: bool) -> int:
    if bool(queues) == everything:
        raise UsageError("name a QUEUE, or give --all for the whole root")
    if everything:
        if paused:
            shell.check_root()
        (shell.root.pause if paused else shell.root.resume)()
        return OK

    def switch(name: str) -> None:
        queue = shell.queue(name)
        (queue.pause if paused else queue.resume)()
        if queue.paused and not paused:
            output.note(f"queue {queue.name}: the whole root is still paused; `dropq resume --all` ends that")

    return shell.each(queues or (), switch, "paused" if paused else "resumed")


class Ages(TypedDict):
    """The ages from which a sweep does more than by itself, in seconds."""

    foreign_older_than: Annotated[
        float | None, duration("--foreign-older-than", "Also return older claims of scripts and DropboxMQ clients.")
    ]
    unleased_older_than: Annotated[
        float | None, duration("--unleased-older-than", "Also return older claims without a lease or a living owner.")
    ]
    jobs_older_than: Annotated[
        float | None, duration("--jobs-older-than", "Also drop uncommitted jobs that are idle for longer.")
    ]
    ephemeral_older_than: Annotated[
        float | None,
        duration("--ephemeral-older-than", "Also remove temporary queues untouched for longer, without a lock."),
    ]


@with_options(Ages)
def sweep(
    ctx: typer.Context,
    name: QueueOrRoot = None,
    *,
    row: Annotated[
        str, option("--row ROW", "Also carry this row to another root, although another host wrote it.")
    ] = "",
    **ages: Unpack[Ages],
) -> int:
    """Return what the dead hold, deliver what is due, expire, prune.

    Prints how many messages, or private files, each step moved. No daemon is needed: consumers sweep a part as they
    receive, and this command sweeps all. Exits with 1 when a file could not be dealt with: stderr names it, and the
    next sweep tries again.
    """
    shell = Shell(ctx)
    reports: list[SweepReport] = []
    if name is None:
        shell.check_root()
        if row:
            raise UsageError("--row: name the QUEUE that the row is in, too")
    names = shell.queues(None if name is None else [name])

    def act(name: str) -> None:
        reports.append(shell.named(name).sweep(**ages, row=row))

    code = shell.each(names, shell.unless_gone(act) if name is None else act, "swept")
    if name is None:
        tidied: list[int] = []
        with reporting_errors(tidied):
            reports.append(shell.root.tidy())
        code = code or tidied[0]
    if code and not reports:
        return code
    refused = _show_sweep(shell, name, reports)
    return code or (NEGATIVE if refused else OK)


def _show_sweep(shell: Shell, queue: str | None, reports: list[SweepReport]) -> int:
    """Print what the sweeps did, added up; return how many files they could not deal with."""
    from dropq.upkeep.steps import SweepReport

    report = SweepReport()
    for each in reports:
        report.add(each)
    counts = report.counts()
    if shell.json:
        shell.line({"queue": queue and unescape(queue), **counts, "next_due": report.next_due}, ())
    else:
        shell.show([{"step": step, "count": count} for step, count in counts.items() if count], ("step", "count"))
    output.note(f"swept={report.total}" + (f" refused={report.refused}" if report.refused else ""))
    return report.refused


def fsck(
    ctx: typer.Context,
    queues: QueueNames = None,
    repair: Annotated[bool, option("--repair", "Make missing folders, and set aside what does not belong.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Find what does not belong in a root or its queues.

    Exits with 1 when something wants attention: a warning or an error that was not repaired. --repair never deletes:
    what it sets aside lies in .dropq/set-aside/, under the path it had.
    """
    from dropq.diagnosis import fsck as checks

    shell = Shell(ctx)
    if not queues:
        shell.check_root()
    repair = repair and not dry_run
    if repair:
        shell.confirm(f"Repair {', '.join(queues) if queues else 'the whole root'}?", yes=yes)
    names = [unescape(name) for name in queues] if queues else checks.queues(shell.root.context)
    findings = [] if queues else checks.fsck_root(shell.root.context, repair=repair)

    def check(name: str) -> None:
        findings.extend(shell.root.queue(name).fsck(repair))

    try:
        code = shell.each(names, check if queues else shell.unless_gone(check), "queues checked", doing="checking")
    finally:  # Ctrl-C ends it: what was found so far is shown
        records = ({key: getattr(finding, key) for key in FINDING} for finding in findings)
        shell.show(records, FINDING, table=FINDING_TABLE)
    return report_open(findings, code)
