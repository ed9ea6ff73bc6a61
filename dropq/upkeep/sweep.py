"""Sweeps bring a queue back in order: dead holders, lapsed leases, delays, expiry, retention, what crashes leave.

Each step is one of the lifecycle's transitions, and anybody may run it at any time: where two sweeps meet, the rename
decides. No daemon is needed. Each second, a consumer brings back what it may be handed next. About once a minute, one
of a queue's consumers does all the rest, in small slices. `dropq sweep` does all at once.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from dropq.carrier.passages import carrier_of, noting
from dropq.errors import DropqError, LeaseLost, NoSuchMessage
from dropq.format.claims import Claim, claim_owners
from dropq.lifecycle.claims import claims_in, claims_of
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.endings import delivers, is_death
from dropq.lifecycle.expiry import expires_by_arrival, has_expired, may_expire
from dropq.lifecycle.holders import hold_of, is_over
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.sending import deliver_delayed
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.sidecars import PASSES_APART, collect
from dropq.lifecycle.transfers import other_host, stalled
from dropq.policies import barrier
from dropq.policies.build import view_of
from dropq.policies.wanted import deciding
from dropq.queue import stream_journal
from dropq.staging import jobs
from dropq.storage import liveness, reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.files import Storage
from dropq.storage.liveness import Signs
from dropq.upkeep import temporary
from dropq.upkeep.leftovers import leftovers
from dropq.upkeep.retention import surplus

if TYPE_CHECKING:
    from dropq.routing.router import Router
    from dropq.topics.feeding import Feeding

log = logging.getLogger("dropq")

#: How many holders' locks a consumer's sweep tries; if one of them is dead, it tries all: they seldom die alone.
LOCKS_TRIED = 10
#: Seconds after any consumer's last slice of the upkeep, in which no other consumer begins with it.
UPKEEP_INTERVAL = 60.0
#: Seconds that a slice of the upkeep takes; the next one comes after `UPKEEP_SHARE` times what this one took, or after
#: `Timing.sweep_share` times if it found something to do.
SLICE = 0.1
UPKEEP_SHARE = 100
#: Seconds without activity in a committed job after which consumers send the rest of it: its driver is dead.
STALLED_JOB = 5.0
#: Seconds that a sweep's own claim lasts.
UNWANTED_LEASE = 60.0
#: Seconds without activity after which consumers drop a job that was never committed: 7 days.
JOBS_AGE = 7 * 86_400.0


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
    #: Messages that a subscription with a recovery point got from the archive of its topic.
    recovered: int = 0
    #: What a subscription had got against its filter, from a publisher that knows no filters.
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


class RootUpkeep:
    """The upkeep of a root that is of no one queue: a process does it once a minute, however many queues it sweeps."""

    def __init__(self) -> None:
        self._again = 0.0

    def run(self, context: QueueContext, report: SweepReport) -> Iterator[None]:
        """Do it in small steps, unless it began within the last minute, or another sweep is in the middle of it."""
        if (now := time.monotonic()) < self._again:
            return
        again, self._again = now + UPKEEP_INTERVAL, math.inf
        try:
            yield from _upkeep_of_root(context, report)
        finally:
            self._again = again


def sweeps_of_routers() -> Callable[[QueueContext], QuickSweep]:
    """Return what makes the sweeps that the routers of a root do on the way."""
    return partial(QuickSweep, routes=False, of_root=RootUpkeep())


class QuickSweep:
    """The sweeps that a consumer makes on the way: each second what may bring it a message, in slices the upkeep.

    One consumer of a queue does the upkeep at a time: it stamps `.dropq/swept` with each slice, and the others begin
    only once that is a minute old.

    Args:
        context: the queue.
        routes: whether it does what the queue's selectors say; False for a router, which does that itself.
        of_root: the root's upkeep, which it does, too; None for one of its own.
    """

    def __init__(self, context: QueueContext, *, routes: bool = True, of_root: RootUpkeep | None = None) -> None:
        self._context = context
        self._routes = routes
        self._of_root = of_root or RootUpkeep()
        self._timing = context.timing
        self._first_lock = random.randrange(1 << 16)  # consumers are to try different holders' locks
        #: When to sweep again, on the monotonic clock.
        self.again = 0.0
        #: When the first file has settled that waits in a topic it feeds on, in ms since 1970; 0 if none is to settle.
        self.settles_at = 0
        self._upkeep: Iterator[None] | None = None
        self._upkeep_at = time.monotonic() + self._timing.first_upkeep
        self._upkeep_report = SweepReport()
        self._feeding: Feeding | None = None
        if context.layout.is_subscription or context.config.underlying_topic is not None:
            from dropq.topics.feeding import Feeding  # here, as most queues know no topic

            self._feeding = Feeding(context)
        self._router: Router | None = None
        self._selects_at = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time: a second has passed, or a delay or lease that was seen has ended."""
        return time.monotonic() >= self.again

    @property
    def has_begun(self) -> bool:
        """Whether it is in the middle of an upkeep, of the queue or of the root: slices of it are to follow."""
        return self._upkeep is not None

    def run(self, *, idle: bool = False) -> SweepReport:
        """Bring back what the consumer may be handed; then, if it is time for one, do a slice of the upkeep.

        Args:
            idle: clear away the dead that held nothing, too.
        """
        report = SweepReport()
        started = time.monotonic()
        interval = self._timing.sweep_interval
        self.again = started + interval
        self._first_lock += LOCKS_TRIED
        if self._feeding is not None:
            self._feed(self._feeding, report)
        next_due = _bring_back(self._context, report, idle=idle, first_lock=self._first_lock)
        pause = interval if next_due is None else min(next_due, interval)
        if self.settles_at:
            pause = min(pause, max(self.settles_at - self._context.clock.now_ms(), 0) / 1000)
        now = time.monotonic()
        self.again = now + max(pause, self._timing.sweep_share * (now - started))
        if now >= self._upkeep_at:
            self._keep_up()
        return report

    def close(self) -> None:
        """Give up an upkeep that has begun; end what it keeps for the topics that the consumer's messages come from."""
        self._upkeep = None
        if self._feeding is not None:
            self._feeding.close()
        if self._router is not None:
            self._router.close()

    def _feed(self, feeding: Feeding, report: SweepReport) -> None:
        """Distribute what waits in the topics that the consumer's messages come from."""
        self.settles_at = 0
        with _passing_over(self._context, report, "its topics"):
            report.recovered += _recover(self._context)
            feeding.keep_ephemeral()
            for distributor in feeding.distributors():
                with _passing_over(distributor.context, report, "what waits"):
                    _bring_back(distributor.context, report, idle=False, first_lock=None)
                    report.distributed += distributor.run()
                    self.settles_at = min(filter(None, (self.settles_at, distributor.settles_at)), default=0)

    def _keep_up_topics(self, report: SweepReport) -> Iterator[None]:
        """Do for the topics that the consumer's messages come from what their publishers left as they died.

        That is to finish jobs, and to remove signs of life. A topic need not have a consumer of its own.
        """
        for topic in self._feeding.topics() if self._feeding is not None else ():
            _sweep_jobs(topic, report, jobs_older_than=JOBS_AGE, stalled_for=STALLED_JOB)
            yield
            with _passing_over(topic, report, topic.layout.consumers):
                for publisher in liveness.known(topic.layout.consumers):
                    _return_if_dead(topic, report, publisher)
                    yield

    def found_nothing(self) -> None:
        """Do what the queue's selectors say with what the consumer leaves to others, unless that was a moment ago."""
        now = time.monotonic()
        if not self._routes or now < self._selects_at:
            return
        with _passing_over(self._context, SweepReport(), self._context.layout.selectors):
            if reading.exists(self._context.layout.selectors):
                from dropq.routing.router import Router

                router = self._router = self._router or Router(self._context, sweep=None)
                router.one_pass(lambda: time.monotonic() >= now + SLICE)
        took = time.monotonic() - now
        self._selects_at = now + max(self._timing.sweep_interval, self._timing.sweep_share * took)

    def _keep_up(self) -> None:
        """Do a slice of the upkeep, unless another consumer of the queue does it."""
        self._upkeep_at = math.inf  # a signal handler that receives meanwhile does not come here
        pause = UPKEEP_INTERVAL
        try:
            if self._upkeep is None and (left := self._left_to_others()) > 0:
                pause = left
                return
            pause = self._slice()
        except BaseException:
            self._upkeep = None  # the next one begins from the start
            raise
        finally:
            self._upkeep_at = time.monotonic() + pause

    def _left_to_others(self) -> float:
        """Return for how many seconds the upkeep is another consumer's.

        RACE: two may find at once that it is nobody's. Then both do it, as any number may.
        """
        try:
            age = self._context.clock.now_ms() - reading.written_ms(self._context.layout.swept)
        except FileNotFoundError:
            return 0
        left = UPKEEP_INTERVAL - age / 1000
        return min(left, UPKEEP_INTERVAL) if left < 2 * UPKEEP_INTERVAL else 0  # else it was stamped by a wrong clock

    def _slice(self) -> float:
        """Continue the upkeep for a moment; return after how many seconds to continue."""
        context = self._context
        context.storage.stamp(context.layout.swept)
        if self._upkeep is None:
            report = self._upkeep_report = SweepReport()
            self._upkeep = chain(
                _upkeep(context, report, jobs_older_than=JOBS_AGE, stalled_for=STALLED_JOB),
                _destroy_alone(context, report),
                self._of_root.run(context, report),
                self._keep_up_topics(report),
            )
        done, started = self._upkeep_report.total, time.monotonic()
        for _ in self._upkeep:
            if (took := time.monotonic() - started) > SLICE:
                return took * (self._timing.sweep_share if self._upkeep_report.total > done else UPKEEP_SHARE)
        self._upkeep = None
        return UPKEEP_INTERVAL


def sweep(
    context: QueueContext,
    *,
    foreign_older_than: float | None = None,
    unleased_older_than: float | None = None,
    jobs_older_than: float | None = None,
    ephemeral_older_than: float | None = None,
    row: str = "",
) -> SweepReport:
    """Bring a queue back in order, as somebody asks for by hand: this alone also looks at other roots.

    Args:
        context: the queue.
        foreign_older_than, unleased_older_than, jobs_older_than, ephemeral_older_than: ages in seconds, as of
            `Queue.sweep`; None leaves such claims, jobs and queues alone.
        row: as of `Queue.sweep`.
    """
    report = SweepReport()
    if temporary.remove_left(context.root, context.layout, ephemeral_older_than):
        report.ephemeral += 1
        return report
    with _passing_over(context, report, "what its topic archived"):
        report.recovered += _recover(context)
    report.next_due = _bring_back(context, report, idle=True, first_lock=None)
    if context.layout.is_topic:
        _sweep_topic(context, report, ephemeral_older_than)
    _sweep_credits(context, report)
    if unleased_older_than is not None:
        _return_unleased(context, report, unleased_older_than)
    if foreign_older_than is not None:
        _return_foreign(context, report, foreign_older_than)
    for _ in _upkeep(context, report, jobs_older_than=jobs_older_than, by_hand=True, row=row):
        pass
    if context.config.self_destruct:
        from dropq.upkeep import self_destruct

        with _passing_over(context, report, "whether it is to destroy itself"):
            report.destroyed += self_destruct.look(context)
    return report


def _bring_back(context: QueueContext, report: SweepReport, *, idle: bool, first_lock: int | None) -> float | None:
    """Bring back what may be handed out; return in how many seconds the next delay or lease ends."""
    _sweep_staged(context, report)
    returned = report.dead + report.lapsed
    dues = [*_return_claims(context, report, idle=idle, first_lock=first_lock), *_deliver_delayed(context, report)]
    if report.dead + report.lapsed > returned:
        _sweep_staged(context, report)  # what the dead had staged for these claims
    return max(min(dues) - context.clock.now_ms(), 0) / 1000 if dues else None


def _sweep_staged(context: QueueContext, report: SweepReport) -> None:
    """Bring in order what distributors, or selectors that copy, had staged."""
    with _passing_over(context, report, context.layout.staged):
        if context.layout.topic or reading.exists(context.layout.staged):
            from dropq.staging import fan_out

            rolled = fan_out.sweep(context)
            report.rolled_forward += rolled.forward
            report.refused += rolled.refused


def _recover(context: QueueContext) -> int:
    """Fill a new subscription with what its topic archived, unless that is done; return how many copies were made."""
    if context.layout.is_subscription and reading.exists(context.layout.recovering):
        from dropq.upkeep.recovery import recover_if_needed

        return recover_if_needed(context)
    return 0


def _sweep_topic(context: QueueContext, report: SweepReport, ephemeral_older_than: float | None) -> None:
    """Clear away what is left of subscriptions, then distribute what waits."""
    from dropq.topics.distribution import Distributor
    from dropq.topics.subscriptions import tidy_topic

    with _passing_over(context, report, "its subscriptions"):
        report.ephemeral += tidy_topic(context, ephemeral_older_than=ephemeral_older_than)
    with _passing_over(context, report, "what waits"):
        distributor = Distributor(context)
        try:
            report.distributed += distributor.run()
        finally:
            distributor.close()


def _sweep_credits(context: QueueContext, report: SweepReport) -> None:
    """Go on with selectors that are being removed; remove the credits that belong to no message."""
    with _passing_over(context, report, context.layout.credits):
        if not reading.exists(context.layout.credits) and not reading.exists(context.layout.selectors):
            return
        from dropq.routing.looks import Looks
        from dropq.routing.registry import finish_removed

        report.credits += finish_removed(context)
        report.credits += Looks(context).run_twice()
        report.credits += finish_removed(context)


@contextmanager
def _passing_over(context: QueueContext, report: SweepReport, what: str) -> Iterator[None]:
    """Go on with the rest of a sweep when one thing cannot be brought in order: the next sweep tries again."""
    try:
        yield
    except (OSError, DropqError) as error:
        report.refused += 1
        log.warning("sweep of %s: %s: %s", context.layout.home, what, describe(error))


# -- claims: processing -> target, expired ---------------------------------------------------------------------


def _return_claims(context: QueueContext, report: SweepReport, *, idle: bool, first_lock: int | None) -> list[int]:
    """Return what the dead held and what outlived its lease, and set aside what has expired.

    With `idle`, also clear away the dead that held nothing. With `first_lock`, try the locks of a few holders from that
    one on. Return the deadlines, in ms, that are yet to come.
    """
    claims = list(claims_in(context))
    known = liveness.known(context.layout.consumers)
    holders = {claim.subscription for claim in claims}
    with _passing_over(context, report, "the shares of barriers"):
        holders |= barrier.sharers(context)
    suspects = sorted(known if idle else known & holders)
    first = (first_lock or 0) % max(len(suspects), 1)
    for number, subscription in enumerate((*suspects[first:], *suspects[:first])):
        if first_lock is not None and number >= LOCKS_TRIED and not report.dead:
            break
        with _passing_over(context, report, f"subscription {subscription}"):
            _return_if_dead(context, report, subscription)
    with _passing_over(context, report, "a barrier"):
        report.barriers += barrier.sweep(context, claims)
    leased = [claim for claim in claims if claim.deadline]
    # Where the server's clock was set back, a new lease would be over by a measurement of before.
    now = lease_end(context.clock, 0) if leased else context.clock.now_ms()
    lapsed = [claim for claim in leased if claim.has_lapsed(now)]
    streams = stream_journal.runs(context) if lapsed else frozenset[str]()
    for claim in lapsed:
        mark = stream_journal.lapsed_claim(claim, streams)
        report.lapsed += _returned(context, report, claim, died=True, lapsed=mark)
    for claim in claims:
        if is_over(context, claim):
            report.expired += _set_aside_expired(context, report, claim)
    return [claim.deadline for claim in leased if claim.deadline > now]


def _return_if_dead(context: QueueContext, report: SweepReport, subscription: str) -> None:
    with liveness.dead(context.layout.consumers, subscription) as is_dead:
        if is_dead:
            lost = claims_of(context, subscription)
            report.dead += sum(_returned(context, report, claim, died=True) for claim in lost)
            report.barriers += barrier.give_up(context, subscription)
            if not claims_of(context, subscription):  # what was refused is left to the next sweep
                liveness.forget_dead(context.layout.consumers, subscription, context.storage)


def _return_unleased(context: QueueContext, report: SweepReport, seconds: float) -> None:
    """Return old claims without a lease and without a known holder."""
    old, signs = _older(context, claims_in(context), seconds), Signs(context.layout.consumers)
    report.barriers += barrier.give_up_old(context, signs, seconds)
    unleased = (claim for claim in old if hold_of(claim, signs, 0) == "unleased")
    report.unleased += sum(_returned(context, report, claim) for claim in unleased)


def _return_foreign(context: QueueContext, report: SweepReport, seconds: float) -> None:
    """Return old claims of scripts and of DropboxMQ clients."""
    for claim in _older(context, claims_in(context, foreign=True), seconds):
        if not (_distributed_by_hand if context.layout.is_topic else _returned)(context, report, claim):
            continue
        report.foreign += 1
        if claim.owner:
            who = f"{claim.owner}, a script or a DropboxMQ client"
            log.warning("%s: taken from %s, whose batch, if it has one, is broken", claim.own_name, who)


def _older(context: QueueContext, claims: Iterable[Claim], seconds: float) -> list[Claim]:
    return [claim for claim in claims if context.age_ms(claim.path) >= seconds * 1000]


def _returned(
    context: QueueContext, report: SweepReport, claim: Claim, *, died: bool = False, lapsed: str = ""
) -> bool:
    """Return a claim to target/; False if its holder, or another sweep, was first.

    Args:
        context: the queue.
        report: counts what could not be returned.
        claim: the claim.
        died: its holder is dead, or lost its lease.
        lapsed: as for `Claims.give_back`.
    """
    claim.exact = True  # RACE: a holder that has renewed it since the listing keeps it
    claim.died = died and is_death(context, claim)
    delay = None if is_death(context, claim) else 0
    with _passing_over(context, report, claim.filename), suppress(LeaseLost):
        Claims(context).give_back(claim, counted=delivers(context, claim), delay=delay, lapsed=lapsed)
        return True
    return False


def _distributed_by_hand(context: QueueContext, report: SweepReport, claim: Claim) -> bool:
    """Move what another program claimed in a topic to error/: its copies may have reached some receivers."""
    claim.exact = True
    with _passing_over(context, report, claim.filename), suppress(LeaseLost):
        Claims(context).set_aside(claim, "error", "foreign_claim")
        return True
    return False


def _set_aside_expired(context: QueueContext, report: SweepReport, claim: Claim) -> bool:
    with _passing_over(context, report, claim.filename), suppress(LeaseLost):
        Claims(context).set_aside(claim, "expired", "time_limit")
        return True
    return False


# -- delayed -> target -----------------------------------------------------------------------------------------


def _deliver_delayed(context: QueueContext, report: SweepReport) -> list[int]:
    """Move what is due into target/; return when the others are due, in ms."""
    now = context.clock.now_ms()
    later = []
    for entry in reading.entries(context.layout.delayed):
        if context.sidecars.ignored(entry.name) or not reading.is_message_file(entry):
            continue
        due = context.sidecars.parse(entry.name).not_before
        if due > now:
            later.append(due)
            continue
        with _passing_over(context, report, entry.name):
            report.delayed += deliver_delayed(context, entry.name)
    return later


# -- upkeep ----------------------------------------------------------------------------------------------------


def _sweep_jobs(
    context: QueueContext, report: SweepReport, *, jobs_older_than: float | None, stalled_for: float
) -> None:
    with _passing_over(context, report, context.layout.working):
        found = jobs.sweep(context, older_than=jobs_older_than, stalled_for=stalled_for)
        report.jobs_finished += found.finished
        report.jobs_dropped += found.dropped
        report.refused += found.refused


def _upkeep(
    context: QueueContext,
    report: SweepReport,
    *,
    jobs_older_than: float | None,
    stalled_for: float = 0,
    by_hand: bool = False,
    row: str = "",
) -> Iterator[None]:
    """Do what else a sweep does, in small steps; the ages are as for `jobs.sweep`."""
    _sweep_jobs(context, report, jobs_older_than=jobs_older_than, stalled_for=stalled_for)
    yield
    if reading.exists(context.layout.joining):
        from dropq.upkeep import joining  # here, as few queues put parts together

        with _passing_over(context, report, context.layout.joining):
            swept = joining.sweep(context)
            report.leftovers += swept.done
            report.refused += swept.refused
        yield
    yield from _carry(context, report, stalled_for, by_hand=by_hand, named=row)
    if context.layout.is_subscription and reading.exists(context.layout.recovering):
        return  # nothing leaves its target/
    yield from _drop_unwanted(context, report)
    yield from _prune(context, report)  # before what needs room on the disk, as it makes some
    yield from _expire(context, report)
    yield from _clear_leftovers(context, report)


def _carry(
    context: QueueContext, report: SweepReport, stalled_for: float, *, by_hand: bool, named: str
) -> Iterator[None]:
    """Carry to other file systems what dead carriers left, and to other roots only by hand: they may not answer."""
    with _passing_over(context, report, context.layout.transfers):
        unusable = dict[str, str]()
        found = list(stalled(context, stalled_for, unusable=unusable))
        for path, why in unusable.items():
            report.refused += 1
            log.warning("sweep of %s: %s: %s", context.layout.home, path, why)
        if named and named not in (row.name for row in found):
            raise NoSuchMessage(f"in row {named} of {context.layout.transfers} no message waits")
        for row in found:
            if row.is_abroad and not by_hand:
                continue
            if row.host and not row.is_of_this_host and row.name != named:
                log.warning("sweep of %s: %s", context.layout.home, other_host(row, context.name))
                continue
            with _passing_over(context, report, row.folder), noting(row, context):
                for sent in carrier_of(row, context, named=row.name == named).run():
                    report.carried += sent
                    yield


def _drop_unwanted(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Archive, undelivered, what a subscription got against its filter from a publisher that knows no filters."""
    if not context.layout.is_subscription or context.config.filter is None:
        return
    with _passing_over(context, report, "its filter"):
        wants = deciding(context.config.filter, context, "target", context)
        claims, owners = Claims(context), claim_owners(f"filter-{secrets.token_hex(5)}")
        for file in view_of(context).files():
            yield
            if wants(file) is False and (
                claim := claims.claim(file, next(owners), lease_end(context.clock, UNWANTED_LEASE))
            ):
                with suppress(LeaseLost):
                    claims.archive_uncounted(claim)
                    report.unwanted += 1


def _prune(context: QueueContext, report: SweepReport) -> Iterator[None]:
    with _passing_over(context, report, "its history"):
        for file in surplus(context, remove=True):
            report.pruned += file is not None
            yield


def _expire(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Move what has expired in target/ to expired/, in no order."""
    for entry in reading.entries(context.layout.target):
        yield
        file = context.sidecars.file(entry.name)
        if not may_expire(context, file) or context.sidecars.ignored(entry.name) or not reading.is_message_file(entry):
            continue
        with suppress(FileNotFoundError):  # RACE: a consumer claimed it since the listing
            if expires_by_arrival(context, file):
                file.arrival = reading.changed_ms(entry.path)
            if has_expired(context, file):
                with _passing_over(context, report, entry.name):
                    report.expired += Moves(context).expire_waiting(file)


def _clear_leftovers(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Remove the private files that nothing needs any more."""
    with _passing_over(context, report, context.layout.private):
        for path, remove in leftovers(context):
            yield
            with _passing_over(context, report, path):
                report.leftovers += remove()


def _clear_temporary(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Remove the root's temporary queues whose requesters died."""
    with _passing_over(context, report, context.root.layout.path):
        for removed in temporary.clear(context.root):
            report.ephemeral += removed
            yield


def _destroy_alone(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Let the queue go if it is to destroy itself."""
    from dropq.upkeep import self_destruct

    with _passing_over(context, report, context.layout.home):
        report.destroyed += self_destruct.look(context)
    yield


def _upkeep_of_root(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Do the upkeep that is of no one queue."""
    yield from _clear_temporary(context, report)
    yield from _destroy_all_alone(context, report)
    yield from _collect(context, report)


def _destroy_all_alone(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Let the queues of the root go that are to destroy themselves."""
    from dropq.upkeep import hidden, self_destruct

    with _passing_over(context, report, context.root.layout.path):
        hidden.tidy_deletes(context.root)  # what another sweep began to destroy, and was killed
        for destroyed in self_destruct.look_at_all(context.root):
            report.destroyed += destroyed
            yield


def _collect(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Collect the root's sidecars, unless that was done within the hour."""
    sidecars = context.sidecars
    with _passing_over(context, report, sidecars.folder):
        for removed in collect(sidecars.root.path, sidecars.folder, Storage(), context.clock, again=PASSES_APART):
            report.sidecars += removed
            yield
