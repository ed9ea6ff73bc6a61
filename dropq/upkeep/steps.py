"""The steps of a sweep, in order: what each brings back or removes, in which sweeps, and when that is old enough.

Each step is one of the lifecycle's transitions, and anybody may do it at any time: where two sweeps meet, the rename
decides. docs/protocol.md tells other programs what is removed, and when.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from enum import Flag, auto
from functools import partial
from itertools import chain
from typing import NamedTuple

from dropq.carrier.carriers import carry
from dropq.errors import DropqError, LeaseLost, NoSuchMessage
from dropq.events.reader import FILE
from dropq.format.claims import Claim, claim_owners
from dropq.lifecycle import ages, early_acks
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.decision import count_of
from dropq.lifecycle.endings import delivers, is_death
from dropq.lifecycle.expiry import expires_by_arrival, is_to_expire, may_expire
from dropq.lifecycle.holders import claim_status, is_over
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.processing import claims_in, claims_of
from dropq.lifecycle.sending import deliver_delayed
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.sidecars import collect
from dropq.lifecycle.transfers import other_host, stalled
from dropq.policies import barrier
from dropq.policies.build import view_of
from dropq.policies.filter_rest import FilterRest
from dropq.queue import stream_journal
from dropq.staging import jobs
from dropq.storage import liveness, reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.files import Storage
from dropq.storage.liveness import Signs
from dropq.upkeep import deletion, leftovers
from dropq.upkeep.retention import surplus

log = logging.getLogger("dropq")

#: How many holders' locks a consumer's sweep tries; if one of them is dead, it tries all: they seldom die alone.
LOCKS_TRIED = 10
#: Seconds that a sweep's own claim lasts.
UNWANTED_LEASE = 60.0


class When(Flag):
    """Which sweeps do a step: the whole one, by hand; what each consumer does each second; its upkeep each minute."""

    WHOLE, SECOND, MINUTE = auto(), auto(), auto()


@dataclass
class SweepReport:
    """How many messages, or private files, each step of a sweep moved."""

    dead: int = 0
    lapsed: int = 0
    barriers: int = 0
    foreign: int = 0
    unleased: int = 0
    delayed: int = 0
    expired: int = 0
    pruned: int = 0
    jobs_finished: int = 0
    jobs_dropped: int = 0
    #: Messages that were distributed to the receivers of a topic.
    distributed: int = 0
    #: Messages that were committed for their receivers, and whose copies had not all arrived.
    rolled_forward: int = 0
    #: Messages that a new subscription or view got from the archives of its topics.
    recovered: int = 0
    #: Messages that do not match the subscription's filter, from a publisher that knows no filters.
    unwanted: int = 0
    #: Messages that were carried to other file systems.
    carried: int = 0
    #: Temporary queues, and subscriptions, whose holders died.
    ephemeral: int = 0
    #: Queues that destroyed themselves.
    destroyed: int = 0
    #: Credits that belonged to no message, and selectors whose removal was finished.
    credits: int = 0
    sidecars: int = 0
    leftovers: int = 0
    #: What could not be brought in order, each with a warning in the log; the next sweep tries again.
    refused: int = 0
    #: Seconds until the next delay or lease ends.
    next_due: float | None = None

    @property
    def total(self) -> int:
        """The sum of all steps, without what was refused."""
        return sum(self.counts().values()) - self.refused

    def counts(self) -> dict[str, int]:
        """Return the count of each step by its name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "next_due"}

    def add(self, other: SweepReport) -> None:
        """Add another queue's counts; what is due next is the sooner of the two."""
        for name, value in other.counts().items():
            setattr(self, name, getattr(self, name) + value)
        self.next_due = min((due for due in (self.next_due, other.next_due) if due is not None), default=None)


@dataclass
class Sweep:
    """One sweep of a queue: what it was asked to do, as by `Queue.sweep`, in seconds, and what it has done.

    Attributes:
        stalled_for: seconds without activity after which the driver of a committed job, or a carrier, counts as dead.
        by_hand: it also looks at other roots, whose disks may not answer.
        idle: it clears away the dead that held nothing, too.
        first_lock: it tries the locks of a few holders, from that one on; None tries all.
        dues: when the delays and leases end that it has seen, in ms since 1970.
        claims: how many claims it has seen, and committed messages whose parts were not all moved.
    """

    context: QueueContext
    report: SweepReport
    foreign_older_than: float | None = None
    unleased_older_than: float | None = None
    jobs_older_than: float | None = None
    ephemeral_older_than: float | None = None
    row: str = ""
    stalled_for: float = 0
    by_hand: bool = False
    idle: bool = True
    first_lock: int | None = None
    dues: list[int] = field(default_factory=list)
    claims: int = 0

    @contextmanager
    def passing_over(self, what: str) -> Iterator[None]:
        """Go on with the rest when one thing cannot be brought in order: the next sweep tries again."""
        try:
            yield
        except (OSError, DropqError) as error:
            self.report.refused += 1
            log.warning("sweep of %s: %s: %s", self.context.layout.home, what, describe(error))

    def run(self, when: When) -> Iterator[None]:
        """Do the steps of such a sweep, in small parts."""
        for step in STEPS:
            if not step.when & when or (step.spares_filling and self.context.is_recovering):
                continue
            with nullcontext() if step.ends else self.passing_over(step.what):
                yield from step.run(self) or ()
            yield

    def do(self, when: When) -> float | None:
        """Do the steps of such a sweep; return in how many seconds the next delay or lease ends."""
        for _ in self.run(when):
            pass
        return max(min(self.dues) - self.context.clock.now_ms(), 0) / 1000 if self.dues else None


class Step(NamedTuple):
    """A step of a sweep of a queue.

    Attributes:
        what: what it brings back or removes; a warning says so.
        ages: how old that is, in ms, by its row in *What is removed* of docs/protocol.md.
        ends: a folder of messages that cannot be listed ends the sweep.
        spares_filling: a subscription that is being filled from the archive is left alone.
    """

    what: str
    when: When
    run: Callable[[Sweep], Iterator[None] | None]
    ages: Mapping[str, tuple[int, ...]] = {}
    ends: bool = False
    spares_filling: bool = False


# -- what consumers may be handed next -----------------------------------------------------------------------------


def recover(sweep: Sweep) -> None:
    """Fill a new subscription or view with what its topics archived, unless that is done."""
    if sweep.context.is_recovering:
        from dropq.upkeep.recovery import recover_if_needed

        sweep.report.recovered += recover_if_needed(sweep.context)


def _sweep_staged(sweep: Sweep) -> None:
    """Roll forward, or drop, what was staged: by distributors, selectors that copy, and who made parts or outputs."""
    context, report = sweep.context, sweep.report
    if context.layout.topic or reading.exists(context.layout.staged):
        from dropq.staging import fan_out

        sweep.claims += len(reading.names_in(context.layout.staged))
        rolled = fan_out.sweep(context)
        report.rolled_forward += rolled.forward
        report.refused += rolled.refused


def _return_claims(sweep: Sweep) -> None:
    """Return the messages of dead holders and of leases that ran out; set aside messages that have expired."""
    context, report = sweep.context, sweep.report
    returned = report.dead + report.lapsed
    claims = list(claims_in(context))
    barriers = reading.names_in(context.layout.barriers)
    sweep.claims += len(claims) + len(barriers)
    _return_of_dead(sweep, claims, bool(barriers))
    with sweep.passing_over("a barrier"):
        if barriers or any(claim.of_barrier for claim in claims):
            report.barriers += barrier.sweep(context, claims)
    leased = [claim for claim in claims if claim.deadline]
    # Where the server's clock was set back, a new lease would be over by a measurement of before.
    now = lease_end(context.clock, 0) if leased else context.clock.now_ms()
    lapsed = [claim for claim in leased if claim.has_lapsed(now)]
    streams = stream_journal.runs(context) if lapsed else frozenset[str]()
    for claim in lapsed:
        mark = stream_journal.lapsed_claim(claim, streams)
        report.lapsed += _returned(sweep, claim, "lease", died=True, lapsed=mark)
    for claim in claims:
        if is_over(context, claim):
            report.expired += _set_aside(sweep, claim, "expired", "time_limit")
    sweep.dues += (claim.deadline for claim in leased if claim.deadline > now)
    if report.dead + report.lapsed > returned:
        with sweep.passing_over("what the dead had staged for these claims"):
            _sweep_staged(sweep)


def _return_of_dead(sweep: Sweep, claims: list[Claim], has_barriers: bool) -> None:
    holders = {claim.subscription for claim in claims}
    with sweep.passing_over("the shares of barriers"):
        if has_barriers:
            holders |= barrier.sharers(sweep.context)
    if not (holders or sweep.idle):
        return
    known = liveness.known(sweep.context.layout.consumers)
    suspects = sorted(known if sweep.idle else known & holders)
    first = (sweep.first_lock or 0) % max(len(suspects), 1)
    for number, subscription in enumerate((*suspects[first:], *suspects[:first])):
        if sweep.first_lock is not None and number >= LOCKS_TRIED and not sweep.report.dead:
            break
        with sweep.passing_over(f"subscription {subscription}"):
            return_if_dead(sweep, subscription)


def return_if_dead(sweep: Sweep, subscription: str) -> None:
    """Return what a subscription holds, and remove its sign of life, if it is dead."""
    context, report = sweep.context, sweep.report
    with liveness.dead(context.layout.consumers, subscription) as is_dead:
        if is_dead:
            lost = claims_of(context, subscription)
            report.dead += sum(_returned(sweep, claim, "dead", died=True) for claim in lost)
            report.barriers += barrier.give_up(context, subscription)
            if not claims_of(context, subscription):  # what was refused is left to the next sweep
                liveness.forget_dead(context.layout.consumers, subscription, context.storage)


def _returned(sweep: Sweep, claim: Claim, why: str, *, died: bool = False, lapsed: str = "") -> bool:
    """Return a claim to target/ as `give_back` does; False if its holder, or another sweep, was first."""
    context = sweep.context
    claim.exact = True  # RACE: a holder that has renewed it since the listing keeps it
    claim.died = died and is_death(context, claim)
    delay = None if is_death(context, claim) else 0
    with sweep.passing_over(claim.filename), suppress(LeaseLost):
        Claims(context).give_back(claim, counted=delivers(context, claim), delay=delay, lapsed=lapsed, why=why)
        return True
    return False


def _set_aside(sweep: Sweep, claim: Claim, state: str, reason: str) -> bool:
    claim.exact = claim.exact or state == "error"
    with sweep.passing_over(claim.filename), suppress(LeaseLost):
        Claims(sweep.context).set_aside(claim, state, reason)
        return True
    return False


def _deliver_delayed(sweep: Sweep) -> None:
    context, now = sweep.context, sweep.context.clock.now_ms()
    for entry in reading.entries(context.layout.delayed):
        if context.sidecars.ignored(entry.name) or not reading.is_message_file(entry):
            continue
        due = context.sidecars.parse(entry.name).not_before
        if due > now:
            sweep.dues.append(due)
            continue
        with sweep.passing_over(entry.name):
            sweep.report.delayed += deliver_delayed(context, entry.name)


# -- steps of a sweep by hand alone --------------------------------------------------------------------------------


def _tidy_topic(sweep: Sweep) -> None:
    if sweep.context.layout.is_topic:
        from dropq.topics.subscriptions import tidy_topic

        older_than = sweep.ephemeral_older_than
        sweep.report.ephemeral += tidy_topic(sweep.context, sweep.passing_over, ephemeral_older_than=older_than)


def _distribute(sweep: Sweep) -> None:
    if sweep.context.layout.is_topic:
        from dropq.topics.distribution import Distributor

        distributor = Distributor(sweep.context)
        try:
            sweep.report.distributed += distributor.run()
        finally:
            distributor.close()


def _sweep_credits(sweep: Sweep) -> None:
    """Go on with selectors that are being removed; remove the credits that belong to no message."""
    context, report = sweep.context, sweep.report
    if not reading.exists(context.layout.credits) and not reading.exists(context.layout.selectors):
        return
    from dropq.routing.credit_audit import CreditAudit
    from dropq.routing.registry import finish_removed

    report.credits += finish_removed(context)
    report.credits += CreditAudit(context).run_twice()
    report.credits += finish_removed(context)


def _return_unleased(sweep: Sweep) -> None:
    if (seconds := sweep.unleased_older_than) is None:
        return
    context = sweep.context
    old, signs = _older(context, claims_in(context), seconds), Signs(context.layout.consumers)
    sweep.report.barriers += barrier.give_up_old(context, signs, seconds)
    unleased = (claim for claim in old if claim_status(claim, signs, 0) == "unleased")
    sweep.report.unleased += sum(_returned(sweep, claim, "unleased") for claim in unleased)


def _return_foreign(sweep: Sweep) -> None:
    """Return old claims of scripts and of DropboxMQ clients; in a topic copies may have reached some receivers."""
    if (seconds := sweep.foreign_older_than) is None:
        return
    context = sweep.context
    is_topic = context.layout.is_topic
    for claim in _older(context, claims_in(context, foreign=True), seconds):
        if not (_set_aside(sweep, claim, "error", "foreign_claim") if is_topic else _returned(sweep, claim, "foreign")):
            continue
        sweep.report.foreign += 1
        if claim.owner:
            who = f"{claim.owner}, a script or a DropboxMQ client"
            log.warning("%s: taken from %s, whose batch, if it has one, is broken", claim.own_name, who)


def _older(context: QueueContext, claims: Iterable[Claim], seconds: float) -> list[Claim]:
    return [claim for claim in claims if context.age_ms(claim.path) >= seconds * 1000]


# -- upkeep --------------------------------------------------------------------------------------------------------


def sweep_jobs(sweep: Sweep) -> None:
    """Finish committed jobs, and drop those that nobody will commit."""
    found = jobs.sweep(sweep.context, older_than=sweep.jobs_older_than, stalled_for=sweep.stalled_for)
    sweep.report.jobs_finished += found.finished
    sweep.report.jobs_dropped += found.dropped
    sweep.report.refused += found.refused


def _sweep_reassembly(sweep: Sweep) -> None:
    if reading.exists(sweep.context.layout.reassembly) or reading.exists(sweep.context.layout.joining):
        from dropq.upkeep import reassembly  # here, as few queues put parts together

        done, refused = reassembly.sweep(sweep.context)
        sweep.report.leftovers += done
        sweep.report.refused += refused


def _carry(sweep: Sweep) -> Iterator[None]:
    """Carry to other file systems what dead carriers left, and to other roots only by hand: they may not answer."""
    context, report, unusable = sweep.context, sweep.report, dict[str, str]()
    found = list(stalled(context, sweep.stalled_for, unusable=unusable))
    for path, why in unusable.items():
        report.refused += 1
        log.warning("sweep of %s: %s: %s", context.layout.home, path, why)
    if sweep.row and sweep.row not in (row.name for row in found):
        raise NoSuchMessage(f"in row {sweep.row} of {context.layout.transfers} no message waits")
    for row in found:
        if row.peer or (row.is_abroad and not sweep.by_hand):
            continue  # a bridge takes the former
        if row.host and not row.is_of_this_host and row.name != sweep.row:
            log.warning("sweep of %s: %s", context.layout.home, other_host(row, context.name))
            continue
        with sweep.passing_over(row.folder):
            for sent in carry(row, context, named=row.name == sweep.row):
                report.carried += sent
                yield


def _drop_unwanted(sweep: Sweep) -> Iterator[None]:
    """Archive what was put into a subscription past its topic, and against its filter; nobody receives it."""
    context = sweep.context
    if not context.layout.is_subscription or context.config.filter is None:
        return
    rest = FilterRest(context)
    claims, owners = Claims(context), claim_owners(f"filter-{secrets.token_hex(5)}")
    for file in view_of(context).files():
        yield
        if rest.is_intruder(file) and (
            claim := claims.claim(file, next(owners), lease_end(context.clock, UNWANTED_LEASE))
        ):
            with suppress(LeaseLost):
                claims.archive_uncounted(claim)
                sweep.report.unwanted += 1


def _prune(sweep: Sweep) -> Iterator[None]:
    first: OSError | DropqError | None = None
    stuck = 0
    for found in surplus(sweep.context, remove=True):
        if found is not None and found.error is not None:
            first, stuck = first or found.error, stuck + 1
        sweep.report.pruned += found is not None and found.error is None
        yield
    if first is not None:  # said once, however many there are
        sweep.report.refused += stuck - 1
        with sweep.passing_over(count_of(stuck, "archived file")):
            raise first


def _prune_log(sweep: Sweep) -> Iterator[None]:
    """Remove what the log said longer ago than log_age, by files of a day each; those of other users may stay."""
    context = sweep.context
    for file in filter(FILE.fullmatch, reading.names_in(context.layout.log)):
        path, now = f"{context.layout.log}/{file}", context.clock.now_ms()
        with sweep.passing_over(path), suppress(PermissionError):
            if now - reading.written_ms(path, gone=now) > context.config.log_age * 1000:
                context.storage.unlink(path)
        yield


def _expire(sweep: Sweep) -> Iterator[None]:
    context = sweep.context
    for entry in reading.entries(context.layout.target):
        yield
        file = context.sidecars.file(entry.name)
        if not may_expire(context, file) or context.sidecars.ignored(entry.name) or not reading.is_message_file(entry):
            continue
        with suppress(FileNotFoundError):  # RACE: a consumer claimed it since the listing
            if expires_by_arrival(context, file):
                file.arrival = reading.changed_ms(entry.path)
            with sweep.passing_over(entry.name):
                # A consumer archives what was acknowledged before.
                if is_to_expire(context, file) and not early_acks.applies(context, file):
                    sweep.report.expired += Moves(context).expire_waiting(file)


def _clear_leftovers(sweep: Sweep) -> Iterator[None]:
    for found in chain.from_iterable(leftovers.leftovers(sweep.context)):
        yield
        with nullcontext() if found is None else sweep.passing_over(found.path):
            if found is not None and found.is_due(sweep.context):
                sweep.report.leftovers += found.remove()


def _destroy_alone(sweep: Sweep) -> None:
    if sweep.context.config.self_destruct:
        from dropq.upkeep import self_destruct

        sweep.report.destroyed += self_destruct.sweep(sweep.context)


#: Steps of the whole sweep that consumers do, too: each second, or in their upkeep.
_QUICK, _UPKEEP = When.WHOLE | When.SECOND, When.WHOLE | When.MINUTE

STEPS = (
    Step("what its topics archived", When.WHOLE, recover),
    Step("staged copies", _QUICK, _sweep_staged, {"`staged/CLAIM.ATTEMPT,END~NAME/`": (ages.EMPTY_STAGED, ages.FENCE)}),
    Step("old claims", _QUICK, _return_claims, {"`barriers/.TOKEN/`": (ages.DEAD_SHARER,)}, ends=True),
    Step("delayed messages", _QUICK, _deliver_delayed, ends=True),
    Step("its subscriptions", When.WHOLE, _tidy_topic, {"`new/`": (ages.DEAD_SUBSCRIBER,)}),
    Step("what waits in a topic", When.WHOLE, _distribute),
    Step("credits without a message", When.WHOLE, _sweep_credits),
    Step("claims without a lease", When.WHOLE, _return_unleased, ends=True),
    Step("claims of other programs", When.WHOLE, _return_foreign, ends=True),
    Step("jobs", _UPKEEP, sweep_jobs, {"jobs": (ages.JOB,), "`ledger/`": (ages.LEDGER, ages.EPOCH)}),
    Step("parts that are put together", _UPKEEP, _sweep_reassembly, {"`reassembly/": (ages.DEAD_WRITER,)}),
    Step("what goes to other file systems", _UPKEEP, _carry),
    Step("what its filter does not match", _UPKEEP, _drop_unwanted, spares_filling=True),
    Step("its history", _UPKEEP, _prune, spares_filling=True),  # before what needs room on the disk, as it makes some
    Step("its log", _UPKEEP, _prune_log),
    Step("expired messages that wait", _UPKEEP, _expire, ends=True, spares_filling=True),
    Step("leftovers", _UPKEEP, _clear_leftovers, leftovers.AGES, spares_filling=True),
    Step("whether it is to destroy itself", _UPKEEP, _destroy_alone),
)


# -- steps outside the queues --------------------------------------------------------------------------------------


class RootStep(NamedTuple):
    """A step of a sweep of a root: `run` yields a number for each name, to add to the report's `counts`."""

    what: str
    when: When
    counts: str
    run: Callable[[RootContext], Iterator[int]]
    ages: Mapping[str, tuple[int, ...]] = {}


def _tidy_views(root: RootContext) -> Iterator[int]:
    from dropq.topics.views import tidy_views

    tidy_views(root)
    yield 0


def _destroy_all_alone(root: RootContext) -> Iterator[int]:
    from dropq.upkeep import self_destruct

    return self_destruct.sweep_all(root)


def _collect(root: RootContext, again: int = 0) -> Iterator[int]:
    return collect(root.layout.path, root.layout.meta, Storage(), root.clock, again=again)


ROOT_STEPS = (
    RootStep("queues of the dead", _UPKEEP, "ephemeral", deletion.tidy, {"`.NAME.deleting-*`": (ages.DEAD_MAKER,)}),
    RootStep("views that are gone", When.WHOLE, "ephemeral", _tidy_views, {"`ROOT/.dropq/views/": (ages.DEAD_MAKER,)}),
    RootStep("queues that destroy themselves", When.MINUTE, "destroyed", _destroy_all_alone),
    RootStep("sidecars", When.WHOLE, "sidecars", _collect, {"sidecars": (ages.SIDECAR, ages.SIDECAR_PASSES)}),
    RootStep("sidecars", When.MINUTE, "sidecars", partial(_collect, again=ages.SIDECAR_PASSES)),
)


def run_of_root(
    root: RootContext, report: SweepReport, when: When, passing: Callable[[str], AbstractContextManager[None]]
) -> Iterator[None]:
    """Do the steps of a sweep of a root, in small parts; `passing` handles the errors of a step."""
    for step in ROOT_STEPS:
        if step.when & when:
            with passing(step.what):
                for count in step.run(root):
                    setattr(report, step.counts, getattr(report, step.counts) + count)
                    yield
