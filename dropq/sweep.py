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

from dropq import consumers, deferred, journal, names, staging, storage
from dropq.admission import barrier, fairness
from dropq.errors import DropqError, LeaseLost
from dropq.layout import ignoring
from dropq.lifecycle import Held, Lifecycle, Waiting
from dropq.sidecars import PASSES_APART, collect

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

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
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
        self.next_due = _bring_back(self._life, report, idle=idle, place=self._place)
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
            age = self._life.clock.now_ms() - storage.written_ms(self._life.layout.swept)
        except FileNotFoundError:
            return 0
        left = UPKEEP_INTERVAL - age / 1000
        return min(left, UPKEEP_INTERVAL) if left < 2 * UPKEEP_INTERVAL else 0  # else it was stamped by a wrong clock

    def _slice(self) -> float:
        """Go on with the upkeep for a moment; return after how many seconds to go on."""
        life = self._life
        life.storage.stamp(life.layout.swept)
        if self._upkeep is None:
            self._kept_up = SweepReport()
            self._upkeep = chain(
                _upkeep(life, self._kept_up, jobs_older_than=JOBS_AGE, stalled_for=STALLED_JOB),
                _collect(life, self._kept_up),
            )
        done, started = self._kept_up.total, time.monotonic()
        for _ in self._upkeep:
            if (took := time.monotonic() - started) > SLICE:
                return took * (SWEEP_SHARE if self._kept_up.total > done else UPKEEP_SHARE)
        self._upkeep = None
        return UPKEEP_INTERVAL


def sweep(
    life: Lifecycle,
    *,
    foreign_older_than: float | None = None,
    unleased_older_than: float | None = None,
    jobs_older_than: float | None = None,
) -> SweepReport:
    """Bring a queue back in order; ages are in seconds, None leaves such claims and jobs alone."""
    report = SweepReport()
    report.next_due = _bring_back(life, report, idle=True, place=None)
    _return_old_claims(life, report, foreign_older_than, unleased_older_than)
    for _ in _upkeep(life, report, jobs_older_than=jobs_older_than):
        pass
    return report


def _bring_back(life: Lifecycle, report: SweepReport, *, idle: bool, place: int | None) -> float | None:
    """Bring back what may be handed out; return in how many seconds the next delay or lease ends."""
    dues = [*_return_claims(life, report, idle=idle, place=place), *_deliver_delayed(life, report)]
    return max(min(dues) - life.clock.now_ms(), 0) / 1000 if dues else None


def _upkeep(
    life: Lifecycle, report: SweepReport, *, jobs_older_than: float | None, stalled_for: float = 0
) -> Iterator[None]:
    """Do what else a sweep does, in small steps: retention, expiry of what waits, jobs, leftovers.

    Args:
        life: the queue.
        report: counts what was done.
        jobs_older_than: as for `sweep`.
        stalled_for: as for `staging.sweep`.
    """
    with _passing_over(life, report, life.layout.working):
        jobs = staging.sweep(life, older_than=jobs_older_than, stalled_for=stalled_for)
        report.jobs_finished += jobs.finished
        report.jobs_dropped += jobs.dropped
        report.refused += jobs.refused
    yield
    yield from _prune(life, report)  # before what needs room on the disk, as it makes some
    yield from _expire(life, report)
    yield from _clear_leftovers(life, report)


# -- claims: processing -> target ------------------------------------------------------------------------------


def _return_claims(life: Lifecycle, report: SweepReport, *, idle: bool, place: int | None) -> list[int]:
    """Return what the dead held and what outlived its lease; return the deadlines, in ms, that are yet to come.

    With `idle`, also clear away the dead that held nothing. With `place`, try the locks of a few from there on.
    """
    claims = list(life.claims())
    known = consumers.known(life.layout.consumers)
    barriers = storage.is_there(life.layout.barriers, life.clock)
    holders = {claimed.claim.subscription for claimed in claims}
    if barriers:
        with _passing_over(life, report, "the shares of barriers"):
            holders |= barrier.sharers(life)
    suspects = sorted(known if idle else known & holders)
    first = (place or 0) % max(len(suspects), 1)
    for number, subscription in enumerate((*suspects[first:], *suspects[:first])):
        if place is not None and number >= LOCKS_TRIED and not report.dead:
            break
        with _passing_over(life, report, f"subscription {subscription}"):
            report.dead += _return_dead(life, report, subscription, barriers=barriers)
    if barriers:
        with _passing_over(life, report, "a barrier"):
            report.barriers += barrier.sweep(life, claims)
    leased = [claimed for claimed in claims if claimed.claim.deadline]
    # Where the server's clock was set back, a new lease would be over by a measurement of before.
    now = storage.lease_end(life.clock, 0) if leased else life.clock.now_ms()
    lapsed = [claimed for claimed in leased if claimed.claim.deadline <= now]
    streams = journal.runs(life) if lapsed else frozenset[str]()
    report.lapsed += sum(_returned(life, report, one, lapsed=journal.lapsed_claim(one, streams)) for one in lapsed)
    report.expired += sum(_set_aside_expired(life, report, one) for one in claims if _has_expired(life, one, now))
    return [claimed.claim.deadline for claimed in leased if claimed.claim.deadline > now]


def _return_dead(life: Lifecycle, report: SweepReport, subscription: str, *, barriers: bool) -> int:
    returned = 0
    with consumers.dead(life.layout.consumers, subscription) as is_dead:
        if is_dead:
            returned = sum(_returned(life, report, claimed) for claimed in held_by(life, subscription))
            if barriers:
                report.barriers += barrier.give_up(life, subscription)
            if not held_by(life, subscription):  # what was refused is left to the next sweep
                consumers.bury(life.layout.consumers, subscription, life.storage)
    return returned


def _return_old_claims(
    life: Lifecycle, report: SweepReport, foreign_older_than: float | None, unleased_older_than: float | None
) -> None:
    """Return claims without a lease and without a known holder, where somebody asked for it by age."""
    folder = life.layout.consumers
    if unleased_older_than is not None:
        known = {one for one in consumers.known(folder) if consumers.can_be_told(folder, one)}
        unleased = (c for c in life.claims() if not c.claim.deadline and not c.claim.of_barrier)
        old = _older(life, unleased, unleased_older_than)
        report.barriers += barrier.give_up_old(life, known, unleased_older_than)
        report.unleased += sum(_returned(life, report, c) for c in old if c.claim.subscription not in known)
    if foreign_older_than is not None:
        for held in _older(life, _foreign_claims(life), foreign_older_than):
            if not _returned(life, report, held):
                continue
            report.foreign += 1
            if held.claim.owner:
                who = f"{held.claim.owner}, a script or a DropboxMQ client"
                log.warning("%s: taken from %s, whose batch, if it has one, is broken", held.file, who)


def held_by(life: Lifecycle, subscription: str) -> list[Held]:
    """Return the claims of a subscription, by a listing."""
    return [claimed for claimed in life.claims() if claimed.claim.subscription == subscription]


def _foreign_claims(life: Lifecycle) -> Iterator[Held]:
    ignored = ignoring(life.config.ignore)
    for entry in storage.entries(life.layout.processing):
        claim, _ = names.split_claim(entry.name)
        if (claim is None or not claim.ours) and not ignored(entry.name) and storage.is_message_file(entry):
            yield life.seized(entry.name)


def _older(life: Lifecycle, claims: Iterator[Held], seconds: float) -> list[Held]:
    return [c for c in claims if life.age_ms(c.path) >= seconds * 1000]


def _returned(life: Lifecycle, report: SweepReport, held: Held, *, lapsed: str = "") -> bool:
    """Return a claim to target/; False when its holder, or another sweep, was first."""
    held.as_seen = True  # RACE: whoever renewed it since the listing keeps it
    with _passing_over(life, report, held.filename), suppress(LeaseLost):
        life.give_back(held, lapsed=lapsed)
        return True
    return False


@contextmanager
def _passing_over(life: Lifecycle, report: SweepReport, what: str) -> Iterator[None]:
    """Go on with the rest of a sweep when one thing cannot be brought in order: the next sweep tries again."""
    try:
        yield
    except LeaseLost:
        raise
    except (OSError, DropqError) as error:
        report.refused += 1
        log.warning("sweep of %s: %s: %s", life.layout.home, what, storage.told(error))


# -- time: delays and expiry -----------------------------------------------------------------------------------


def _deliver_delayed(life: Lifecycle, report: SweepReport) -> list[int]:
    """Move what is due into target/; return when the others are due, in ms."""
    now = life.clock.now_ms()
    later = []
    ignored = ignoring(life.config.ignore)
    for entry in storage.entries(life.layout.delayed):
        if ignored(entry.name) or not storage.is_message_file(entry):
            continue
        due = life.sidecars.parse(entry.name).not_before
        if due > now:
            later.append(due)
            continue
        with _passing_over(life, report, entry.name):
            report.delayed += life.deliver_delayed(entry.name)
    return later


def _expire(life: Lifecycle, report: SweepReport) -> Iterator[None]:
    """Move what has expired in target/ to expired/, in no order."""
    now = life.clock.now_ms()
    ignored = ignoring(life.config.ignore)
    for entry in storage.entries(life.layout.target):
        yield
        waiting = Waiting(entry.name, 0, names.is_plain(entry.name) is not None)
        if not life.may_expire(waiting) or ignored(entry.name) or not storage.is_message_file(entry):
            continue
        with suppress(FileNotFoundError):  # RACE: somebody claimed it since the listing
            if life.expires_by_arrival(waiting):
                waiting = waiting._replace(arrival=storage.changed_ms(entry.path))
            if 0 < life.waiting_expires_at(waiting) <= now:
                with _passing_over(life, report, waiting.file):
                    report.expired += life.expire_waiting(waiting)


def _has_expired(life: Lifecycle, held: Held, now: int) -> bool:
    """Tell whether a held message's time is over: who holds it finds its lease lost."""
    waiting = Waiting(held.file, now, names.is_plain(held.file) is not None)
    return life.may_expire(waiting) and 0 < life.waiting_expires_at(waiting) <= now


def _set_aside_expired(life: Lifecycle, report: SweepReport, held: Held) -> bool:
    with _passing_over(life, report, held.filename), suppress(LeaseLost):
        life.set_aside(held, "expired", "time_limit")
        return True
    return False


# -- retention -------------------------------------------------------------------------------------------------


def _prune(life: Lifecycle, report: SweepReport) -> Iterator[None]:
    with _passing_over(life, report, "its history"):
        for file in _surplus(life, "processed", life.config.history_age, life.config.max_history, remove=True):
            report.pruned += file is not None
            yield


def surplus_history(
    life: Lifecycle,
    *,
    state: str = "processed",
    keep_age: float | None = None,
    keep_count: int | None = None,
    remove: bool,
) -> Iterator[str]:
    """Yield, oldest first, the files of a state that are over a limit, by the time they came there.

    Args:
        life: the queue.
        state: the folder.
        keep_age: seconds that files are kept; None takes the queue's history_age for processed/.
        keep_count: how many are kept; None takes the queue's max_history for processed/.
        remove: remove each before it is yielded.
    """
    if state == "processed":
        keep_age = life.config.history_age if keep_age is None else keep_age
        keep_count = life.config.max_history if keep_count is None else keep_count
    yield from (file for file in _surplus(life, state, keep_age, keep_count, remove=remove) if file is not None)


def _surplus(
    life: Lifecycle, state: str, keep_age: float | None, keep_count: int | None, *, remove: bool
) -> Iterator[str | None]:
    """Yield the files that are over a limit, oldest first, and before that None for each that was looked at.

    Where no age is asked for and no more than `keep_count` lie there, their names alone are counted.
    """
    folder = life.layout.folder(state)
    named = 0
    if keep_count is not None:
        for count in storage.message_counts(folder, life.config.ignore):
            named += count
            yield None
    if keep_age is None and (keep_count is None or named <= keep_count):
        return
    left, counted = named, time.monotonic()
    found = yield from _oldest(life, folder, named, keep_age, keep_count)
    now = life.clock.now_ms()
    for changed, file in found:
        if keep_age is None or now - changed <= keep_age * 1000:
            if time.monotonic() - counted > COUNT_AGE:  # others may have taken some away since
                left, counted = sum(storage.message_counts(folder, life.config.ignore)), time.monotonic()
            if left <= (keep_count or 0):
                continue
        gone = not remove or _removed(life, state, file, changed)
        left -= gone
        yield file if gone else None


class _Came(NamedTuple):
    """When a file came to its folder, in ms, and its name; what came later is less, as a heap has its least on top."""

    changed: int
    file: str

    def __lt__(self, other: tuple[object, ...]) -> bool:
        return tuple.__gt__(self, other)


def _oldest(
    life: Lifecycle, folder: str, named: int, keep_age: float | None, keep_count: int | None
) -> Generator[None, None, list[_Came]]:
    """Return the files that are over a limit, oldest first; `named` is how many there are at the most."""
    now = life.clock.now_ms()
    most = 0 if keep_count is None else max(named - keep_count, 0)
    oldest: list[_Came] = []  # a heap of the `most` that came first, with the youngest of them on top
    too_old: list[_Came] = []  # of the others
    seen = 0

    def pass_on(youngest: _Came) -> None:
        if keep_age is not None and now - youngest.changed > keep_age * 1000:
            too_old.append(youngest)

    for came in _with_times(folder, ignoring(life.config.ignore)):
        yield
        seen += 1
        if len(oldest) < most:
            heapq.heappush(oldest, came)
        else:
            pass_on(heapq.heappushpop(oldest, came) if most else came)
    for _ in range(len(oldest) - max(seen - (keep_count or 0), 0)):  # names that were counted, and are no messages
        pass_on(heapq.heappop(oldest))
    return sorted(chain(oldest, too_old), reverse=True)


def _removed(life: Lifecycle, state: str, file: str, changed: int) -> bool:
    """Remove a file; False where it went, or where another has come under its name since it was looked at."""
    path = f"{life.layout.folder(state)}/{file}"
    with suppress(FileNotFoundError):
        return storage.changed_ms(path) == changed and life.remove(state, file)
    return False


def _with_times(folder: str, ignored: Callable[[str], object]) -> Iterator[_Came]:
    for entry in storage.entries(folder):
        if not ignored(entry.name) and storage.is_message_file(entry):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # RACE: another prune, or a requeue
            if not storage.is_reservation(found):  # whose name a move is about to take
                yield _Came(found.st_ctime_ns // 1_000_000, entry.name)


# -- what crashes leave ----------------------------------------------------------------------------------------


def _clear_leftovers(life: Lifecycle, report: SweepReport) -> Iterator[None]:
    """Remove private files that nothing can need: names given up, bodies of the dead, old acks, reasons of no file."""

    def clear(path: str) -> None:
        with _passing_over(life, report, path):
            report.leftovers += life.storage.unlink(path)

    for entry in storage.entries(life.layout.private):
        yield
        if entry.name.startswith(".gone-") and life.age_ms(entry.path) > LEFTOVERS_AGE:
            clear(entry.path)
    for entry in storage.entries(life.layout.consumers):
        yield
        if life.age_ms(entry.path) > LEFTOVERS_AGE and _is_nobodys(life, entry.name):
            clear(entry.path)
    with _passing_over(life, report, life.layout.turns):
        report.leftovers += fairness.clear(life, consumers.known(life.layout.consumers))
    yield from _clear_held(life, report)
    for entry in storage.entries(life.layout.streams):
        yield
        with _passing_over(life, report, entry.path):
            if entry.is_dir(follow_symlinks=False) and _newest(life, entry.path) > STREAMS_AGE:
                life.storage.remove_tree(entry.path)
                report.leftovers += 1
    for path in deferred.expired(life):
        yield
        clear(path)  # RACE: an ack that is given anew at this moment may go too
    for state in ("error", "expired"):
        yield from _clear_reasons(life, report, state)


def _clear_held(life: Lifecycle, report: SweepReport) -> Iterator[None]:
    """Remove what holders had of their messages: of the dead, and empty folders of the living."""
    kept = list(storage.entries(life.layout.held))
    # RACE: a holder is known before it claims, and has its claim before a folder in held/. Asked for in this order, a
    # folder without either is of one who is gone.
    claimed = {claimed.claim.owner for claimed in life.claims()} if kept else set()
    known = consumers.known(life.layout.consumers) if kept else frozenset()
    for entry in kept:
        yield
        claim, _ = names.split_claim(f"{entry.name},0,1~x")
        if claim is None or claim.owner in claimed:
            continue
        with _passing_over(life, report, entry.path):
            if claim.subscription in known:
                report.leftovers += _cleared_empty(life, entry)
            # What was delivered at most once, without a history: who received it may yet read it.
            elif not _holds_the_only_copy(entry) or life.age_ms(entry.path) > LEFTOVERS_AGE:
                life.storage.remove_tree(entry.path)
                report.leftovers += 1


def _cleared_empty(life: Lifecycle, folder: os.DirEntry[str]) -> bool:
    """Remove a folder that has been empty for a while; False for any other.

    RACE: its holder may be about to put a message there, if it was stopped for an hour in between: then that is
    refused, and the message goes back.
    """
    try:
        is_folder = folder.is_dir(follow_symlinks=False)
        if not is_folder or life.age_ms(folder.path) <= EMPTY_AGE or storage.names_in(folder.path):
            return False
        life.storage.remove_folder(folder.path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _clear_reasons(life: Lifecycle, report: SweepReport, state: str) -> Iterator[None]:
    """Remove the reasons of files that went, and file those of a copied root by their files' new inodes."""
    with _passing_over(life, report, f"the reasons of {state}/"):
        for path in life.reasons.unmatched(state):
            yield
            if path is not None and life.age_ms(path) > LEFTOVERS_AGE:
                with _passing_over(life, report, path):
                    if not life.reasons.refile(state, path):
                        report.leftovers += life.storage.unlink(path)


def _collect(life: Lifecycle, report: SweepReport) -> Iterator[None]:
    """Collect the root's sidecars, where nobody did within the hour."""
    sidecars = life.sidecars
    with _passing_over(life, report, sidecars.folder):
        root, store = sidecars.root.path, storage.Storage()
        for removed in collect(root, sidecars.folder, store, life.clock, again=PASSES_APART):
            report.sidecars += removed
            yield


def _is_nobodys(life: Lifecycle, subscription: str) -> bool:
    """Tell whether a sign of life can go: it was never shown, or another mount's lock is on it and it holds nothing.

    Who lives all the same takes it up anew before the next claim.
    """
    if subscription.startswith("."):
        return not subscription.startswith(".nfs")
    if consumers.can_be_told(life.layout.consumers, subscription):
        return False
    return not held_by(life, subscription) and subscription not in barrier.sharers(life)


def _newest(life: Lifecycle, folder: str) -> float:
    """Return how long ago anything happened in a folder, in ms."""
    return min([life.age_ms(folder), *(life.age_ms(entry.path) for entry in storage.entries(folder))])


def _holds_the_only_copy(folder: os.DirEntry[str]) -> bool:
    try:
        return folder.is_dir(follow_symlinks=False) and any(
            entry.stat(follow_symlinks=False).st_nlink == 1 for entry in storage.entries(folder.path)
        )
    except OSError:
        return False  # RACE: its reader, or another sweep, removed it
