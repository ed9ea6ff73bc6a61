"""What brings a queue back in order: dead holders, lapsed leases, delays, expiry, retention, what crashes left.

Every step is one of the lifecycle's arrows and may be run by anybody at any time: two sweeps at once take turns at
single files, and the rename decides. No daemon is needed. Each second a consumer brings back what it may be handed
next, and in small slices one of a queue's consumers does all the rest, about once a minute; `dropq sweep` does all at
once.
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import os
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import chain
from typing import NamedTuple

from dropq.errors import DropqError, LeaseLost
from dropq.format import names
from dropq.format.claims import Claim, is_owner, subscription_of
from dropq.format.layout import GONE_PREFIX, WITH_REASON, ignoring
from dropq.lifecycle import early_acks
from dropq.lifecycle.claims import claims_in, claims_of
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import expires_at, expires_by_arrival, may_expire
from dropq.lifecycle.sidecars import PASSES_APART, collect
from dropq.lifecycle.transitions import Transitions
from dropq.policies import barrier, fair_share
from dropq.staging import jobs, stream_journal
from dropq.storage import liveness, reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

#: Seconds between two sweeps that a consumer makes on the way.
INTERVAL = 1.0
#: The next one comes after at least so many times what the last one took.
SWEEP_SHARE = 10
#: How many holders' locks a sweep on the way tries; if one of them is dead, it tries all: they seldom die alone.
LOCKS_TRIED = 10
#: A consumer begins with the upkeep when nobody did a part of it for so many seconds.
UPKEEP_INTERVAL = 60.0
#: Seconds that a consumer is there before it looks for that: who takes one message and ends has no time for it.
FIRST_UPKEEP = 1.0
#: Seconds that a consumer does upkeep for at a time; the next slice comes after so many times what this one took, or
#: after `SWEEP_SHARE` times where it found something to do.
SLICE = 0.1
UPKEEP_SHARE = 100
#: Seconds for which nothing moved in a committed job when a consumer sends the rest of it: who committed it is dead.
STALLED_JOB = 5.0
#: Seconds without activity after which consumers drop a job that was never committed: 7 days.
JOBS_AGE = 7 * 86_400.0
#: Seconds after which the archive is counted again while the oldest of it are removed.
COUNT_AGE = 1.0
#: Milliseconds that an empty folder in held/ is kept while its subscription lives.
EMPTY_AGE = 3_600_000
#: Milliseconds that private leftovers (reasons of files that went, bodies of a dead consumer) are kept.
LEFTOVERS_AGE = 86_400_000
#: Milliseconds for which a stream is remembered that nobody goes on with: 30 days.
STREAMS_AGE = 30 * 86_400_000


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
    sidecars: int = 0
    leftovers: int = 0
    #: What could not be brought in order, each with a warning in the log; the next sweep tries again.
    refused: int = 0
    next_due: float | None = None

    @property
    def total(self) -> int:
        """The sum of all steps; what was refused is in none."""
        return sum(self.counts().values()) - self.refused

    def counts(self) -> dict[str, int]:
        """Return the count of each step by its name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "next_due"}

    def add(self, other: SweepReport) -> None:
        """Add another queue's counts; what is due next is the sooner of the two."""
        for name, value in other.counts().items():
            setattr(self, name, getattr(self, name) + value)
        self.next_due = min((due for due in (self.next_due, other.next_due) if due is not None), default=None)


class QuickSweep:
    """The sweeps that a consumer makes on the way: each second what may bring it a message, in slices the upkeep.

    One consumer of a queue does the upkeep at a time: it stamps `.dropq/swept` with each slice, and the others begin
    only once that is a minute old.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._place = random.randrange(1 << 16)  # in the row of holders: consumers are to try different ones
        #: When to sweep again, on the monotonic clock.
        self.again = 0.0
        self.next_due: float | None = None
        self._upkeep: Iterator[None] | None = None
        self._upkeep_at = time.monotonic() + FIRST_UPKEEP
        self._kept_up = SweepReport()

    @property
    def due(self) -> bool:
        """Whether it is time: a second has passed, or a delay or lease that was seen has ended."""
        return time.monotonic() >= self.again

    def run(self, *, idle: bool = False) -> SweepReport:
        """Return what dead consumers and lapsed leases held, expire what is held too long, deliver what was delayed.

        Then comes a slice of the upkeep, when it is time for one.

        Args:
            idle: clear away the dead that held nothing, too.
        """
        report = SweepReport()
        started = time.monotonic()
        self.again = started + INTERVAL
        self._place += LOCKS_TRIED
        self.next_due = _bring_back(self._context, report, idle=idle, place=self._place)
        pause = INTERVAL if self.next_due is None else min(self.next_due, INTERVAL)
        now = time.monotonic()
        self.again = now + max(pause, 0.001, SWEEP_SHARE * (now - started))
        if now >= self._upkeep_at:
            self._keep_up()
        return report

    def _keep_up(self) -> None:
        """Do a slice of the upkeep, unless another consumer of the queue is at it."""
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
        """Return for how many seconds the upkeep is somebody else's.

        RACE: two may find at once that it is nobody's. Then both do it, as any number may.
        """
        try:
            age = self._context.clock.now_ms() - reading.written_ms(self._context.layout.swept)
        except FileNotFoundError:
            return 0
        left = UPKEEP_INTERVAL - age / 1000
        return min(left, UPKEEP_INTERVAL) if left < 2 * UPKEEP_INTERVAL else 0  # else it was stamped by a wrong clock

    def _slice(self) -> float:
        """Go on with the upkeep for a moment; return after how many seconds to go on."""
        context = self._context
        context.storage.stamp(context.layout.swept)
        if self._upkeep is None:
            self._kept_up = SweepReport()
            self._upkeep = chain(
                _upkeep(context, self._kept_up, jobs_older_than=JOBS_AGE, stalled_for=STALLED_JOB),
                _collect(context, self._kept_up),
            )
        done, started = self._kept_up.total, time.monotonic()
        for _ in self._upkeep:
            if (took := time.monotonic() - started) > SLICE:
                return took * (SWEEP_SHARE if self._kept_up.total > done else UPKEEP_SHARE)
        self._upkeep = None
        return UPKEEP_INTERVAL


def sweep(
    context: QueueContext,
    *,
    foreign_older_than: float | None = None,
    unleased_older_than: float | None = None,
    jobs_older_than: float | None = None,
) -> SweepReport:
    """Bring a queue back in order; ages are in seconds, None leaves such claims and jobs alone."""
    report = SweepReport()
    report.next_due = _bring_back(context, report, idle=True, place=None)
    _return_old_claims(context, report, foreign_older_than, unleased_older_than)
    for _ in _upkeep(context, report, jobs_older_than=jobs_older_than):
        pass
    return report


def _bring_back(context: QueueContext, report: SweepReport, *, idle: bool, place: int | None) -> float | None:
    """Bring back what may be handed out; return in how many seconds the next delay or lease ends."""
    dues = [*_return_claims(context, report, idle=idle, place=place), *_deliver_delayed(context, report)]
    return max(min(dues) - context.clock.now_ms(), 0) / 1000 if dues else None


def _upkeep(
    context: QueueContext, report: SweepReport, *, jobs_older_than: float | None, stalled_for: float = 0
) -> Iterator[None]:
    """Do what else a sweep does, in small steps: retention, expiry of what waits, jobs, leftovers.

    Args:
        context: the queue.
        report: counts what was done.
        jobs_older_than: as for `sweep`.
        stalled_for: as for `staging.sweep`.
    """
    with _passing_over(context, report, context.layout.working):
        swept = jobs.sweep(context, older_than=jobs_older_than, stalled_for=stalled_for)
        report.jobs_finished += swept.finished
        report.jobs_dropped += swept.dropped
        report.refused += swept.refused
    yield
    yield from _prune(context, report)  # before what needs room on the disk, as it makes some
    yield from _expire(context, report)
    yield from _clear_leftovers(context, report)


# -- claims: processing -> target ------------------------------------------------------------------------------


def _return_claims(context: QueueContext, report: SweepReport, *, idle: bool, place: int | None) -> list[int]:
    """Return what the dead held and what outlived its lease; return the deadlines, in ms, that are yet to come.

    With `idle`, also clear away the dead that held nothing. With `place`, try the locks of a few from there on.
    """
    claims = list(claims_in(context))
    known = liveness.known(context.layout.consumers)
    barriers = reading.is_there(context.layout.barriers, context.clock)
    holders = {claim.subscription for claim in claims}
    if barriers:
        with _passing_over(context, report, "the shares of barriers"):
            holders |= barrier.sharers(context)
    suspects = sorted(known if idle else known & holders)
    first = (place or 0) % max(len(suspects), 1)
    for number, subscription in enumerate((*suspects[first:], *suspects[:first])):
        if place is not None and number >= LOCKS_TRIED and not report.dead:
            break
        with _passing_over(context, report, f"subscription {subscription}"):
            report.dead += _return_dead(context, report, subscription, barriers=barriers)
    if barriers:
        with _passing_over(context, report, "a barrier"):
            report.barriers += barrier.sweep(context, claims)
    leased = [claim for claim in claims if claim.deadline]
    # Where the server's clock was set back, a new lease would be over by a measurement of before.
    now = lease_end(context.clock, 0) if leased else context.clock.now_ms()
    lapsed = [claim for claim in leased if claim.deadline <= now]
    streams = stream_journal.runs(context) if lapsed else frozenset[str]()
    report.lapsed += sum(
        _returned(context, report, claim, lapsed=stream_journal.lapsed_claim(claim, streams)) for claim in lapsed
    )
    expired = (claim for claim in claims if _has_expired(context, claim, now))
    report.expired += sum(_set_aside_expired(context, report, claim) for claim in expired)
    return [claim.deadline for claim in leased if claim.deadline > now]


def _return_dead(context: QueueContext, report: SweepReport, subscription: str, *, barriers: bool) -> int:
    returned = 0
    with liveness.dead(context.layout.consumers, subscription) as is_dead:
        if is_dead:
            returned = sum(_returned(context, report, claim) for claim in claims_of(context, subscription))
            if barriers:
                report.barriers += barrier.give_up(context, subscription)
            if not claims_of(context, subscription):  # what was refused is left to the next sweep
                liveness.forget_dead(context.layout.consumers, subscription, context.storage)
    return returned


def _return_old_claims(
    context: QueueContext, report: SweepReport, foreign_older_than: float | None, unleased_older_than: float | None
) -> None:
    """Return claims without a lease and without a known holder, where somebody asked for it by age."""
    folder = context.layout.consumers
    if unleased_older_than is not None:
        known = {one for one in liveness.known(folder) if liveness.is_verifiable(folder, one)}
        unleased = (claim for claim in claims_in(context) if not claim.deadline and not claim.of_barrier)
        old = _older(context, unleased, unleased_older_than)
        report.barriers += barrier.give_up_old(context, known, unleased_older_than)
        report.unleased += sum(_returned(context, report, claim) for claim in old if claim.subscription not in known)
    if foreign_older_than is not None:
        for claim in _older(context, claims_in(context, foreign=True), foreign_older_than):
            if not _returned(context, report, claim):
                continue
            report.foreign += 1
            if claim.owner:
                who = f"{claim.owner}, a script or a DropboxMQ client"
                log.warning("%s: taken from %s, whose batch, if it has one, is broken", claim.own_name, who)


def _older(context: QueueContext, claims: Iterator[Claim], seconds: float) -> list[Claim]:
    return [claim for claim in claims if context.age_ms(claim.path) >= seconds * 1000]


def _returned(context: QueueContext, report: SweepReport, claim: Claim, *, lapsed: str = "") -> bool:
    """Return a claim to target/; False when its holder, or another sweep, was first."""
    claim.exact = True  # RACE: whoever renewed it since the listing keeps it
    with _passing_over(context, report, claim.filename), suppress(LeaseLost):
        Transitions(context).give_back(claim, lapsed=lapsed)
        return True
    return False


@contextmanager
def _passing_over(context: QueueContext, report: SweepReport, what: str) -> Iterator[None]:
    """Go on with the rest of a sweep when one thing cannot be brought in order: the next sweep tries again."""
    try:
        yield
    except LeaseLost:
        raise
    except (OSError, DropqError) as error:
        report.refused += 1
        log.warning("sweep of %s: %s: %s", context.layout.home, what, describe(error))


# -- time: delays and expiry -----------------------------------------------------------------------------------


def _deliver_delayed(context: QueueContext, report: SweepReport) -> list[int]:
    """Move what is due into target/; return when the others are due, in ms."""
    now = context.clock.now_ms()
    later = []
    ignored = ignoring(context.config.ignore)
    for entry in reading.entries(context.layout.delayed):
        if ignored(entry.name) or not reading.is_message_file(entry):
            continue
        due = context.sidecars.parse(entry.name).not_before
        if due > now:
            later.append(due)
            continue
        with _passing_over(context, report, entry.name):
            report.delayed += Transitions(context).deliver_delayed(entry.name)
    return later


def _expire(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Move what has expired in target/ to expired/, in no order."""
    now = context.clock.now_ms()
    ignored = ignoring(context.config.ignore)
    for entry in reading.entries(context.layout.target):
        yield
        file = context.sidecars.file(entry.name)
        if not may_expire(context, file) or ignored(entry.name) or not reading.is_message_file(entry):
            continue
        with suppress(FileNotFoundError):  # RACE: somebody claimed it since the listing
            if expires_by_arrival(context, file):
                file.arrival = reading.changed_ms(entry.path)
            if 0 < expires_at(context, file.name, file.arrival) <= now:
                with _passing_over(context, report, entry.name):
                    report.expired += Transitions(context).expire_waiting(file)


def _has_expired(context: QueueContext, claim: Claim, now: int) -> bool:
    """Tell whether a held message's time is over: who holds it finds its lease lost."""
    if context.config.expiration is None and names.has_no_expiration(claim.own_name):
        return False
    return 0 < expires_at(context, context.sidecars.parse(claim.own_name), now) <= now


def _set_aside_expired(context: QueueContext, report: SweepReport, claim: Claim) -> bool:
    with _passing_over(context, report, claim.filename), suppress(LeaseLost):
        Transitions(context).set_aside(claim, "expired", "time_limit")
        return True
    return False


# -- retention -------------------------------------------------------------------------------------------------


def _prune(context: QueueContext, report: SweepReport) -> Iterator[None]:
    with _passing_over(context, report, "its history"):
        for file in _surplus(context, "processed", context.config.history_age, context.config.max_history, remove=True):
            report.pruned += file is not None
            yield


def surplus_history(
    context: QueueContext,
    *,
    state: str = "processed",
    keep_age: float | None = None,
    keep_count: int | None = None,
    remove: bool,
) -> Iterator[str]:
    """Yield, oldest first, the files of a state that are over a limit, by the time they came there.

    Args:
        context: the queue.
        state: the folder.
        keep_age: seconds that files are kept; None takes the queue's history_age for processed/.
        keep_count: how many are kept; None takes the queue's max_history for processed/.
        remove: remove each before it is yielded.
    """
    if state == "processed":
        keep_age = context.config.history_age if keep_age is None else keep_age
        keep_count = context.config.max_history if keep_count is None else keep_count
    yield from (file for file in _surplus(context, state, keep_age, keep_count, remove=remove) if file is not None)


def _surplus(
    context: QueueContext, state: str, keep_age: float | None, keep_count: int | None, *, remove: bool
) -> Iterator[str | None]:
    """Yield the files that are over a limit, oldest first, and before that None for each that was looked at.

    Where no age is asked for and no more than `keep_count` lie there, their names alone are counted.
    """
    folder = context.layout.folder(state)
    named = 0
    if keep_count is not None:
        for count in reading.message_counts(folder, context.config.ignore):
            named += count
            yield None
    if keep_age is None and (keep_count is None or named <= keep_count):
        return
    left, counted = named, time.monotonic()
    found = yield from _oldest(context, folder, named, keep_age, keep_count)
    now = context.clock.now_ms()
    for changed, file in found:
        if keep_age is None or now - changed <= keep_age * 1000:
            if time.monotonic() - counted > COUNT_AGE:  # others may have taken some away since
                left, counted = sum(reading.message_counts(folder, context.config.ignore)), time.monotonic()
            if left <= (keep_count or 0):
                continue
        gone = not remove or _removed(context, state, file, changed)
        left -= gone
        yield file if gone else None


class _Came(NamedTuple):
    """When a file came to its folder, in ms, and its name; what came later is less, as a heap has its least on top."""

    changed: int
    file: str

    def __lt__(self, other: tuple[object, ...]) -> bool:
        return tuple.__gt__(self, other)


def _oldest(
    context: QueueContext, folder: str, named: int, keep_age: float | None, keep_count: int | None
) -> Generator[None, None, list[_Came]]:
    """Return the files that are over a limit, oldest first; `named` is how many there are at the most."""
    now = context.clock.now_ms()
    most = 0 if keep_count is None else max(named - keep_count, 0)
    oldest: list[_Came] = []  # a heap of the `most` that came first, with the youngest of them on top
    too_old: list[_Came] = []  # of the others
    seen = 0

    def pass_on(youngest: _Came) -> None:
        if keep_age is not None and now - youngest.changed > keep_age * 1000:
            too_old.append(youngest)

    for came in _with_times(folder, ignoring(context.config.ignore)):
        yield
        seen += 1
        if len(oldest) < most:
            heapq.heappush(oldest, came)
        else:
            pass_on(heapq.heappushpop(oldest, came) if most else came)
    for _ in range(len(oldest) - max(seen - (keep_count or 0), 0)):  # names that were counted, and are no messages
        pass_on(heapq.heappop(oldest))
    return sorted(chain(oldest, too_old), reverse=True)


def _removed(context: QueueContext, state: str, file: str, changed: int) -> bool:
    """Remove a file; False where it went, or where another has come under its name since it was looked at."""
    path = f"{context.layout.folder(state)}/{file}"
    with suppress(FileNotFoundError):
        return reading.changed_ms(path) == changed and Transitions(context).remove(state, file)
    return False


def _with_times(folder: str, ignored: Callable[[str], object]) -> Iterator[_Came]:
    for entry in reading.entries(folder):
        if not ignored(entry.name) and reading.is_message_file(entry):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # RACE: another prune, or a requeue
            if not reading.is_reservation(found):  # whose name a move is about to take
                yield _Came(found.st_ctime_ns // 1_000_000, entry.name)


# -- what crashes leave ----------------------------------------------------------------------------------------


def _clear_leftovers(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Remove private files that nothing can need: names given up, bodies of the dead, old acks, reasons of no file."""

    def clear(path: str) -> None:
        with _passing_over(context, report, path):
            report.leftovers += context.storage.unlink(path)

    for entry in reading.entries(context.layout.private):
        yield
        if entry.name.startswith(GONE_PREFIX) and context.age_ms(entry.path) > LEFTOVERS_AGE:
            clear(entry.path)
    for entry in reading.entries(context.layout.consumers):
        yield
        if context.age_ms(entry.path) > LEFTOVERS_AGE and _is_nobodys(context, entry.name):
            clear(entry.path)
    with _passing_over(context, report, context.layout.turns):
        report.leftovers += fair_share.clear(context, liveness.known(context.layout.consumers))
    yield from _clear_held(context, report)
    for entry in reading.entries(context.layout.streams):
        yield
        with _passing_over(context, report, entry.path):
            if entry.is_dir(follow_symlinks=False) and _newest(context, entry.path) > STREAMS_AGE:
                context.storage.remove_tree(entry.path)
                report.leftovers += 1
    for path in early_acks.expired(context):
        yield
        clear(path)  # RACE: an ack that is given anew at this moment may go too
    for state in WITH_REASON:
        yield from _clear_reasons(context, report, state)


def _clear_held(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Remove what holders had of their messages: of the dead, and empty folders of the living."""
    kept = list(reading.entries(context.layout.held))
    # RACE: a holder is known before it claims, and has its claim before a folder in held/. Asked for in this order, a
    # folder without either is of one who is gone.
    claimed = {claim.owner for claim in claims_in(context)} if kept else set()
    known = liveness.known(context.layout.consumers) if kept else frozenset()
    for entry in kept:
        yield
        if not is_owner(entry.name) or entry.name in claimed:
            continue
        with _passing_over(context, report, entry.path):
            if subscription_of(entry.name) in known:
                report.leftovers += _cleared_empty(context, entry)
            # What was delivered at most once, without a history: who received it may yet read it.
            elif not _holds_the_only_copy(entry) or context.age_ms(entry.path) > LEFTOVERS_AGE:
                context.storage.remove_tree(entry.path)
                report.leftovers += 1


def _cleared_empty(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    """Remove a folder that has been empty for a while; False for any other.

    RACE: its holder may be about to put a message there, if it was stopped for an hour in between: then that is
    refused, and the message goes back.
    """
    try:
        is_folder = folder.is_dir(follow_symlinks=False)
        if not is_folder or context.age_ms(folder.path) <= EMPTY_AGE or reading.names_in(folder.path):
            return False
        context.storage.remove_folder(folder.path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _clear_reasons(context: QueueContext, report: SweepReport, state: str) -> Iterator[None]:
    """Remove the reasons of files that went, and file those of a copied root by their files' new inodes."""
    with _passing_over(context, report, f"the reasons of {state}/"):
        for path in context.reasons.unmatched(state):
            yield
            if path is not None and context.age_ms(path) > LEFTOVERS_AGE:
                with _passing_over(context, report, path):
                    if not context.reasons.refile(state, path):
                        report.leftovers += context.storage.unlink(path)


def _collect(context: QueueContext, report: SweepReport) -> Iterator[None]:
    """Collect the root's sidecars, where nobody did within the hour."""
    sidecars = context.sidecars
    with _passing_over(context, report, sidecars.folder):
        root, store = sidecars.root.path, Storage()
        for removed in collect(root, sidecars.folder, store, context.clock, again=PASSES_APART):
            report.sidecars += removed
            yield


def _is_nobodys(context: QueueContext, subscription: str) -> bool:
    """Tell whether a sign of life can go: it was never shown, or another mount's lock is on it and it holds nothing.

    Who lives all the same takes it up anew before the next claim.
    """
    if subscription.startswith("."):
        return not subscription.startswith(".nfs")
    if liveness.is_verifiable(context.layout.consumers, subscription):
        return False
    return not claims_of(context, subscription) and subscription not in barrier.sharers(context)


def _newest(context: QueueContext, folder: str) -> float:
    """Return how long ago anything happened in a folder, in ms."""
    return min([context.age_ms(folder), *(context.age_ms(entry.path) for entry in reading.entries(folder))])


def _holds_the_only_copy(folder: os.DirEntry[str]) -> bool:
    try:
        return folder.is_dir(follow_symlinks=False) and any(
            entry.stat(follow_symlinks=False).st_nlink == 1 for entry in reading.entries(folder.path)
        )
    except OSError:
        return False  # RACE: its reader, or another sweep, removed it
