"""What brings a queue back in order: dead holders, lapsed leases, delays, expiry, retention, what crashes left.

Every step is one of the lifecycle's arrows and may be run by anybody at any time: two sweeps at once take turns at
single files, and the rename decides. No daemon is needed: consumers sweep now and then, `dropq sweep` sweeps all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields

from dropq import consumers, deferred, journal, names, staging, storage
from dropq.admission import barrier, fairness
from dropq.errors import DropqError, LeaseLost
from dropq.layout import ignoring
from dropq.lifecycle import Held, Lifecycle, Waiting
from dropq.ready import Ready
from dropq.reasons import explains

log = logging.getLogger("dropq")

#: Seconds between two sweeps that a consumer makes on the way.
INTERVAL = 1.0
#: The next one comes after at least so many times what the last one took.
SWEEP_SHARE = 10
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
    """The part of a sweep that consumers make on the way: what may bring them a message."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        #: When to sweep again, on the monotonic clock.
        self.again = 0.0
        self.next_due: float | None = None

    @property
    def due(self) -> bool:
        """Whether it is time: a second has passed, or a delay or lease that was seen has ended."""
        return time.monotonic() >= self.again

    def run(self, *, idle: bool = False) -> SweepReport:
        """Return what dead consumers and lapsed leases held, expire what is held too long, deliver what was delayed.

        Args:
            idle: clear away the dead that held nothing, too.
        """
        report = SweepReport()
        started = time.monotonic()
        self.again = started + INTERVAL
        dues = [*_return_claims(self._life, report, idle=idle), *_deliver_delayed(self._life, report)]
        self.next_due = max(min(dues) - self._life.clock.now_ms(), 0) / 1000 if dues else None
        pause = INTERVAL if self.next_due is None else min(self.next_due, INTERVAL)
        now = time.monotonic()
        self.again = now + max(pause, 0.001, SWEEP_SHARE * (now - started))
        return report


def sweep(
    life: Lifecycle,
    *,
    foreign_older_than: float | None = None,
    unleased_older_than: float | None = None,
    jobs_older_than: float | None = None,
) -> SweepReport:
    """Bring a queue back in order; ages are in seconds, None leaves such claims and jobs alone."""
    quick = QuickSweep(life)
    report = quick.run(idle=True)
    report.next_due = quick.next_due
    _return_old_claims(life, report, foreign_older_than, unleased_older_than)
    report.pruned = _prune(life, report)  # first of what needs room on the disk, as it makes some
    _expire(life, report)
    jobs = staging.sweep(life, older_than=jobs_older_than)
    report.jobs_finished, report.jobs_dropped = jobs.finished, jobs.dropped
    report.refused += jobs.refused
    report.leftovers += _clear_leftovers(life, report)
    return report


# -- claims: processing -> target ------------------------------------------------------------------------------


def _return_claims(life: Lifecycle, report: SweepReport, *, idle: bool = False) -> list[int]:
    """Return what the dead held and what outlived its lease; return the deadlines, in ms, that are yet to come.

    With `idle`, also clear away the dead that held nothing.
    """
    claims = list(_claims(life))
    known = consumers.known(life.layout.consumers)
    barriers = storage.exists(life.layout.barriers)
    holders = {claimed.claim.subscription for claimed in claims}
    if barriers:
        with _passing_over(life, report, "the shares of barriers"):
            holders |= barrier.sharers(life)
    for subscription in known if idle else known & holders:
        with _passing_over(life, report, f"subscription {subscription}"):
            report.dead += _return_dead(life, report, subscription, barriers=barriers)
    if barriers:
        with _passing_over(life, report, "a barrier"):
            report.barriers += barrier.sweep(life, claims)
    now = life.clock.now_ms()
    leased = [claimed for claimed in claims if claimed.claim.deadline]
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
        unleased = (c for c in _claims(life) if not c.claim.deadline and not c.claim.of_barrier)
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
    return [claimed for claimed in _claims(life) if claimed.claim.subscription == subscription]


def _claims(life: Lifecycle) -> Iterator[Held]:
    for entry in storage.entries(life.layout.processing):
        claim, file = names.split_claim(entry.name)
        if claim is not None and claim.ours and storage.is_message_file(entry):
            yield Held(life.layout.processing, claim, file)


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


def _expire(life: Lifecycle, report: SweepReport) -> None:
    """Move what has expired in target/ to expired/."""
    now = life.clock.now_ms()
    for waiting in list(Ready(life.layout.target, life.sidecars, ignoring(life.config.ignore)).waiting()):
        if life.may_expire(waiting) and 0 < life.waiting_expires_at(waiting) <= now:
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


def _prune(life: Lifecycle, report: SweepReport) -> int:
    pruned = 0
    with _passing_over(life, report, "its history"):
        for _ in surplus_history(life, remove=True):
            pruned += 1
    return pruned


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
    if keep_age is None and keep_count is None:
        return
    folder = life.layout.folder(state)
    came = sorted(_with_times(folder, ignoring(life.config.ignore)))
    now = life.clock.now_ms()
    surplus = len(came) - keep_count if keep_count is not None else 0
    for place, (changed, file) in enumerate(came):
        if place < surplus or (keep_age is not None and now - changed > keep_age * 1000):
            if remove:
                life.remove(state, file)
            yield file


def _with_times(folder: str, ignored: Callable[[str], object]) -> Iterator[tuple[int, str]]:
    for entry in storage.entries(folder):
        if not ignored(entry.name) and storage.is_message_file(entry):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # RACE: another prune, or a requeue
            if not storage.is_reservation(found):  # whose name a move is about to take
                yield found.st_ctime_ns // 1_000_000, entry.name


# -- what crashes leave ----------------------------------------------------------------------------------------


def _clear_leftovers(life: Lifecycle, report: SweepReport) -> int:
    """Remove private files that nothing can need: names given up, bodies of the dead, old acks, reasons of no file."""
    cleared = 0
    known = consumers.known(life.layout.consumers)
    for entry in storage.entries(life.layout.private):
        if entry.name.startswith(".gone-") and life.age_ms(entry.path) > LEFTOVERS_AGE:
            with _passing_over(life, report, entry.path):
                life.storage.unlink(entry.path)
                cleared += 1
    for entry in storage.entries(life.layout.consumers):
        if life.age_ms(entry.path) > LEFTOVERS_AGE and _is_nobodys(life, entry.name):
            with _passing_over(life, report, entry.path):
                life.storage.unlink(entry.path)
                cleared += 1
    with _passing_over(life, report, life.layout.turns):
        cleared += fairness.clear(life, known)
    for entry in storage.entries(life.layout.held):
        claim, _ = names.split_claim(f"{entry.name},0,1~x")
        if claim is None or claim.subscription in known or life.find_claim(claim.owner) is not None:
            continue
        if _holds_the_only_copy(entry) and life.age_ms(entry.path) <= LEFTOVERS_AGE:
            continue  # delivered at most once, without a history: who received it may yet read it
        with _passing_over(life, report, entry.path):
            life.storage.remove_tree(entry.path)
            cleared += 1
    for entry in storage.entries(life.layout.streams):
        with _passing_over(life, report, entry.path):
            if entry.is_dir(follow_symlinks=False) and _newest(life, entry.path) > STREAMS_AGE:
                life.storage.remove_tree(entry.path)
                cleared += 1
    for path in deferred.expired(life):
        with _passing_over(life, report, path):
            cleared += life.storage.unlink(path)  # RACE: an ack that is given anew at this moment may go too
    for state in ("error", "expired"):
        for entry in storage.entries(f"{life.layout.reasons}/{state}"):
            if life.age_ms(entry.path) > LEFTOVERS_AGE and not _explains_something(life, state, entry.path):
                with _passing_over(life, report, entry.path):
                    life.storage.unlink(entry.path)
                    cleared += 1
    return cleared


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


def _explains_something(life: Lifecycle, state: str, path: str) -> bool:
    try:
        content = storage.parse_json(storage.read_small(path) or b"null")
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and explains(life.layout.folder(state), content)
