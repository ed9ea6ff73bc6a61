"""Sweeps bring a queue back in order: dead holders, lapsed leases, delays, expiry, retention, what crashes leave.

No daemon is needed. Each second, a consumer does the steps that bring back what it may be handed next. About once a
minute, one of a queue's consumers does the upkeep, in small slices. `dropq sweep` does all steps at once.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from dropq.lifecycle import ages
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.storage import liveness, reading
from dropq.storage.failures import error_context
from dropq.upkeep import deletion, steps
from dropq.upkeep.steps import LOCKS_TRIED, Sweep, SweepReport, When

if TYPE_CHECKING:
    from dropq.routing.router import Router
    from dropq.topics.receiver_topics import ReceiverTopics

#: Seconds after any consumer's last slice of the upkeep, in which no other consumer begins with it.
UPKEEP_INTERVAL = 60.0
#: Seconds that a slice of the upkeep takes; the next one comes after `UPKEEP_SHARE` times what this one took, or after
#: `Timing.sweep_share` times if it found something to do.
SLICE = 0.1
UPKEEP_SHARE = 100


class RootUpkeep:
    """The upkeep of a root outside its queues: a process does it once a minute, however many queues it sweeps."""

    _again = 0.0

    def run(self, context: QueueContext, report: SweepReport) -> Iterator[None]:
        """Do it in small steps, unless it began within the last minute, or another sweep is in the middle of it."""
        if (now := time.monotonic()) < self._again:
            return
        again, self._again = now + UPKEEP_INTERVAL, math.inf
        try:
            passing = Sweep(context, report).passing_over
            yield from steps.run_of_root(context.root, report, When.MINUTE, passing)
        finally:
            self._again = again


def sweeps_of_routers() -> Callable[[QueueContext], QuickSweep]:
    """Return a factory of the sweeps that the routers of a root do on the way."""
    return partial(QuickSweep, routes=False, of_root=RootUpkeep())


class QuickSweep:
    """The sweeps that a consumer makes on the way: each second what may bring it a message, in slices the upkeep.

    One consumer of a queue does the upkeep at a time: it stamps `.dropq/swept` with each slice, and the others begin
    only once that is a minute old.

    Args:
        routes: whether it runs the queue's selectors; False for a router, which runs them itself.
        of_root: the root's upkeep, which several sweeps may share; None makes a new one.
    """

    def __init__(self, context: QueueContext, *, routes: bool = True, of_root: RootUpkeep | None = None) -> None:
        self._context = context
        self._routes = routes
        self._of_root = of_root or RootUpkeep()
        self._timing = context.timing
        self._first_lock = random.randrange(1 << 16)  # consumers are to try different holders' locks
        #: When to sweep again, on the monotonic clock.
        self.again = 0.0
        self._began = 0.0
        self._rests = False
        #: Of what changes without target/, while a sweep has found nothing to bring back.
        self._standstill = reading.Standstill(context.layout.delayed, clock=context.clock)
        #: When the first unsettled file of the consumer's topics has settled, in ms since 1970; 0 if all have settled.
        self.settles_at = 0
        self._upkeep: Iterator[None] | None = None
        self._upkeep_at = time.monotonic() + self._timing.first_upkeep
        self._upkeep_report = SweepReport()
        self._topics: ReceiverTopics | None = None
        if context.layout.is_subscription or context.config.underlying_topic is not None:
            from dropq.topics.receiver_topics import ReceiverTopics  # here, as most queues know no topic

            self._topics = ReceiverTopics(context)
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

    def run(self, *, idle: bool = False, quiet: bool = False) -> int:
        """Bring back what the consumer may be handed; return how much. If it is time, do a slice of the upkeep.

        While it is `idle`, it clears away the dead that held nothing, too. While target/ is `quiet`, no claim is made:
        once a sweep has found none, nor a delay, it only looks whether a delayed message has come.
        """
        report = SweepReport()
        started = self._began = time.monotonic()
        self._rests = quiet and self._topics is None and self._standstill.lasts()
        if self._rests:
            on_nfs = self._standstill.is_on_nfs
            self.again = started + (self._timing.quiet_interval if on_nfs else self._timing.sweep_interval)
        else:
            self.again = started + self._bring_back(report, started, idle=idle, quiet=quiet)
        if started >= self._upkeep_at:
            self._keep_up()
        return report.total

    def stir(self) -> None:
        """Do all steps next time, a second after the last sweep: target/ has changed, perhaps by a claim."""
        self._standstill.end()
        if self._rests:
            self._rests = False
            self.again = self._began + self._timing.sweep_interval

    def _bring_back(self, report: SweepReport, started: float, *, idle: bool, quiet: bool) -> float:
        """Do the steps of each second; return how many seconds after `started` the next are due."""
        interval = self._timing.sweep_interval
        self.again = started + interval
        self._first_lock += LOCKS_TRIED
        if self._topics is not None:
            self._distribute(self._topics, report)
        sweep = Sweep(self._context, report, idle=idle, first_lock=self._first_lock)
        if quiet:
            self._standstill.begin()
        next_due = sweep.do(When.SECOND)
        if report.total or report.refused or sweep.claims or next_due is not None:
            self._standstill.end()
        else:
            self._standstill.confirm()
        pause = interval if next_due is None else min(next_due, interval)
        if self.settles_at:
            pause = min(pause, max(self.settles_at - self._context.clock.now_ms(), 0) / 1000)
        took = time.monotonic() - started
        return took + max(pause, self._timing.sweep_share * took)

    def close(self) -> None:
        """Give up an upkeep that has begun; end what it keeps for the topics that the consumer's messages come from."""
        self._upkeep = None
        if self._topics is not None:
            self._topics.close()
        if self._router is not None:
            self._router.close()

    def _distribute(self, topics: ReceiverTopics, report: SweepReport) -> None:
        self.settles_at = 0
        sweep = Sweep(self._context, report)
        with sweep.passing_over("its topics"):
            steps.recover(sweep)
            topics.keep_ephemeral()
            for distributor in topics.distributors():
                of_topic = Sweep(distributor.context, report, idle=False)
                with of_topic.passing_over("what waits"):
                    of_topic.do(When.SECOND)
                    report.distributed += distributor.run()
                    self.settles_at = min(filter(None, (self.settles_at, distributor.settles_at)), default=0)

    def _keep_up_topics(self, report: SweepReport) -> Iterator[None]:
        """In the consumer's topics, finish the jobs of dead publishers, and remove their signs of life.

        A topic need not have a consumer of its own.
        """
        for topic in self._topics.topics() if self._topics is not None else ():
            sweep = _of_consumer(topic, report)
            with sweep.passing_over("jobs"):
                steps.sweep_jobs(sweep)
            yield
            with sweep.passing_over(topic.layout.consumers):
                for publisher in liveness.known(topic.layout.consumers):
                    steps.return_if_dead(sweep, publisher)
                    yield

    def found_nothing(self) -> None:
        """Run the queue's selectors on messages that no filter here takes, at most once a second."""
        now = time.monotonic()
        if not self._routes or now < self._selects_at:
            return
        with Sweep(self._context, SweepReport()).passing_over(self._context.layout.selectors):
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
            own = _upkeep(context, report)
            self._upkeep = chain(own, self._of_root.run(context, report), self._keep_up_topics(report))
        done, started = self._upkeep_report.total, time.monotonic()
        for _ in self._upkeep:
            if (took := time.monotonic() - started) > SLICE:
                return took * (self._timing.sweep_share if self._upkeep_report.total > done else UPKEEP_SHARE)
        self._upkeep = None
        return UPKEEP_INTERVAL


def sweep(context: QueueContext, *, ephemeral_older_than: float | None = None, **asked: Any) -> SweepReport:
    """Bring a queue back in order at once, as somebody asks for by hand; the arguments are those of `steps.Sweep`."""
    report = SweepReport()
    if deletion.remove_left(context.root, context.layout, ephemeral_older_than):
        report.ephemeral += 1
        return report
    whole = Sweep(context, report, ephemeral_older_than=ephemeral_older_than, by_hand=True, **asked)
    report.next_due = whole.do(When.WHOLE)
    return report


def tidy(root: RootContext) -> SweepReport:
    """Do what a sweep does outside of the queues, as `Root.tidy` says."""
    report = SweepReport()
    failed = "the queues are swept; the next sweep goes on with what is the root's"
    for _ in steps.run_of_root(root, report, When.WHOLE, lambda _: error_context(failed)):
        pass
    return report


def _upkeep(context: QueueContext, report: SweepReport) -> Iterator[None]:
    return _of_consumer(context, report).run(When.MINUTE)


def _of_consumer(context: QueueContext, report: SweepReport) -> Sweep:
    """Return a consumer's sweep of its queue, or of a topic that sends to it."""
    return Sweep(context, report, jobs_older_than=ages.JOB / 1000, stalled_for=ages.DEAD_DRIVER / 1000)
