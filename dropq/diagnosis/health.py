"""Whether a queue is well: what waits too long, what failed, what nobody sweeps, what keeps it from working.

A check changes nothing, opens no body, and keeps no consumer waiting: names alone say nearly everything. A monitor runs
it every few minutes, beside consumers at their work.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dropq.diagnosis import fsck, selector_checks, staged_checks, topic_checks
from dropq.diagnosis.explain import why_waits
from dropq.diagnosis.standing import Standing
from dropq.diagnosis.work_checks import Workers, waiting_for_each_other
from dropq.durations import format_duration, parse_duration
from dropq.errors import ConfigError, DropqError, NoSuchQueue, StorageError, Unavailable
from dropq.events.reader import Rates
from dropq.format import names
from dropq.format.addresses import layouts
from dropq.format.claims import ZMQ, client_of
from dropq.format.layout import IN_USE, UNSETTLED, WAITING
from dropq.format.message_file import MessageFile
from dropq.lifecycle import dead_letters
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.decision import count_of
from dropq.lifecycle.holders import claim_status
from dropq.lifecycle.open_queue import open_queue, refuse_closed
from dropq.lifecycle.processing import committed
from dropq.lifecycle.queue_notes import addresses, remedy
from dropq.lifecycle.settling import is_written_late, tells_writes
from dropq.lifecycle.transfers import Row, refusal, rows, way_on
from dropq.policies import barrier, routes
from dropq.policies.filter_rest import FilterRest
from dropq.policies.selectors import REMOVED
from dropq.policies.send_limits import SendLimits
from dropq.policies.wanted import LOOKED, Wants
from dropq.queue.message import Duration
from dropq.routing.forecast import Forecast
from dropq.routing.registry import removed_in
from dropq.staging import jobs
from dropq.storage import reading
from dropq.storage.clock import utc
from dropq.storage.failures import describe
from dropq.topics.distribution import Distributor
from dropq.upkeep import self_destruct

__all__ = ["MAX_ERROR", "UNSWEPT", "Health", "Reason", "health", "health_root", "queues"]

#: How many messages may lie in error/ by default: where three files come a night, each failure is reported.
MAX_ERROR = 0
#: Seconds for which nobody takes or settles a message before a queue stands still.
STILL = 60.0
#: Milliseconds for which a dead consumer's message, a lapsed lease or a committed job may wait for a sweep.
UNSWEPT = 60_000

#: Folders of a root that this user may not be allowed to enter, and that are no queues.
_NO_QUEUES = ("dropboxmq", "topic-root", "lost+found")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a queue is not well, or a note about it: its kind, a sentence with the way out, a figure and its limit.

    Ages are in seconds; where nothing is measured, figure and limit are None.
    """

    kind: str
    message: str
    figure: float | None = None
    limit: float | None = None


class Limits(NamedTuple):
    """What a queue that is well may have, as `health` takes it, in seconds."""

    max_age: float | None = None
    max_count: int | None = None
    max_error: int | None = MAX_ERROR
    still: float | None = None

    @classmethod
    def of(
        cls, max_age: Duration | None, max_count: int | None, max_error: int | None, still: Duration | None
    ) -> Limits:
        """Return limits whose periods are given as people write them; ValueError if one is no period."""
        age, idle = (None if period is None else parse_duration(period) for period in (max_age, still))
        return cls(age, max_count, max_error, idle)


@dataclass(frozen=True)
class Health:
    """Whether a queue is well, and why not.

    Attributes:
        queue: its name.
        reasons: why it is not well; empty when it is.
        notes: what is no fault, but explains its state: it is paused, senders wait, it is full.
        counts: how many messages lie in each state; empty for a queue that cannot be read.
        oldest_age: seconds that the oldest message has waited, also if it is held without a running lease; None if no
            message waits.
        error: what kept the queue from being read.
    """

    queue: str
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    oldest_age: float | None = None
    error: DropqError | OSError | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.reasons


def health(root: RootContext, name: str, limits: Limits) -> Health:
    """Report whether a queue is well, as `Queue.health` does; also a queue that cannot be read or used.

    A message waits from when it was sent or requeued; in delayed/, from when it was due. A message that is held without
    a running lease waits, too: nothing shows that its holder works on it.
    """
    try:
        return judged(Standing(open_queue(root, name)), limits)
    except (DropqError, OSError) as error:
        if isinstance(error, NoSuchQueue):
            raise
        if is_gone(root, name, error):
            raise NoSuchQueue(f"queue {name} is not there any more") from error
        return unusable(root, name, error)


def judged(standing: Standing, limits: Limits) -> Health:
    """Report whether a queue that stands so is well."""
    checks = _Checks(standing)
    reasons, notes = tuple(checks.reasons(limits)), tuple(checks.notes(limits))
    return Health(standing.context.name, reasons, notes, standing.counts, standing.oldest_age)


def health_root(root: RootContext, limits: Limits) -> Iterator[Health]:
    """Report on each queue of a root, by name; also on those that are too damaged to be opened, or closed to this user.

    OSError if the root cannot be listed.
    """
    for name in queues(root):
        try:
            yield health(root, name, limits)
        except NoSuchQueue as error:
            if reading.exists(layouts(root.layout.path, name)[0].home):  # RACE: else it was deleted since the listing
                yield unusable(root, name, error)


# -- the queues --------------------------------------------------------------------------------------------------


def queues(root: RootContext) -> list[str]:
    """Return the names of all queues, in order; also of those that are too damaged, or that this user may not enter."""
    found = set(fsck.queues(root))
    closed = list[str]()
    for name in {*addresses(root.layout, lambda topic, error: closed.append(topic)), *closed} - found:
        if name not in _NO_QUEUES:
            try:
                refuse_closed(root.layout.path, name)
            except StorageError:
                found.add(name)
    return sorted(found)


def destroyed_in(context: QueueContext) -> float | None:
    """Return in how many seconds a sweep may destroy a queue; None if the last sweep found that something needs it."""
    layout = context.layout
    if not context.config.self_destruct or not (reading.exists(layout.kept) and reading.exists(layout.alone)):
        return None
    return max(self_destruct.left_ms(context), 0) / 1000


def is_gone(root: RootContext, name: str, error: Exception) -> bool:
    """Return whether an error says that a queue is not there: RACE: a temporary one goes when its requester is done."""
    if isinstance(error, NoSuchQueue):
        return True
    try:
        return names.is_temporary(name) and not reading.exists(f"{root.layout.path}/{name}")
    except OSError:
        return False  # it is shown with the error that it had


def unusable(root: RootContext, name: str, error: Exception) -> Health:
    """Report a queue that cannot be read, or looked at by a fault of ours: the error, and the way out."""
    if not isinstance(error, DropqError | OSError):
        error = Unavailable(f"a fault of dropq: {error!r}")
    text, quoted = "; ".join(str(error).splitlines()), shlex.quote(name)
    kind, way_out = "storage", f"`dropq fsck {quoted}` says more"
    if "`dropq " in text or isinstance(error, Unavailable):
        way_out = ""
    if isinstance(error, ConfigError):
        kind, way_out = "configuration", "correct it, then run `dropq config check`"
    elif isinstance(error, NoSuchQueue) and os.path.exists(layouts(root.layout.path, name)[0].home):
        text, way_out = "target/ and processing/ are missing", f"`dropq fsck {quoted} --repair` makes them"
    elif isinstance(error, OSError):
        text = describe(error)
    if isinstance(error, StorageError | OSError) and error.errno == errno.EACCES:
        way_out = f"`ls -ld {shlex.quote(_closed(layouts(root.layout.path, name)[0].home, error))}` shows who may look"
    why = "; ".join(filter(None, (text, way_out)))
    return Health(name, (Reason(kind, f"it cannot be read: {why}"),), error=error)


def _closed(home: str, error: StorageError | OSError) -> str:
    """Return the folder that this user may not enter."""
    path = error.path if isinstance(error, StorageError) else os.fsdecode(error.filename or home)
    while path.startswith(f"{home}/"):
        try:
            os.stat(path)
            return path
        except OSError:
            path = os.path.dirname(path)
    return home


# -- the checks ----------------------------------------------------------------------------------------------------


class _Checks:
    """What is to be said of a queue that stands so."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._context = standing.context
        self._name = shlex.quote(self._context.name)
        self._now = standing.now
        self._counts = standing.counts
        self._claimed = standing.claimed
        self._signs = standing.signs

    @property
    def _waiting_age(self) -> float | None:
        """Seconds that the oldest message has waited to be taken; a delayed message waits from when it was due."""
        return max((self._standing.oldest[one] for one in WAITING if one in self._standing.oldest), default=None)

    # -- the verdict -------------------------------------------------------------------------------------------

    def reasons(self, limits: Limits) -> Iterator[Reason]:
        """Yield why the queue is not well."""
        max_age, max_count, max_error, still = limits
        waiting, failed, age = self._counts["target"], self._counts["error"], self._standing.oldest_age
        if age is not None and max_age is not None and age > max_age:
            text, way_out = f"a message has waited for {_duration(age)}", self._way_out()
            if age != self._waiting_age:
                text, way_out = f"a message from {_duration(age)} ago is held without a lease", self._holders()
            text = f"{text}, over the limit of {_duration(max_age)}"
            yield Reason("old-message", f"{text}; {way_out}", age, max_age)
        if max_count is not None and waiting > max_count:
            text = f"target/ has {count_of(waiting)}, over the limit of {max_count}"
            yield Reason("many-waiting", f"{text}; {self._way_out()}", waiting, max_count)
        if max_error is not None and failed > max_error:
            text = f"error/ has {count_of(failed)}"
            text = f"{text}, over the limit of {max_error}" if max_error else text
            way_out = f"`dropq browse {self._name} --state error` says why"
            yield Reason("many-errors", f"{text}; {way_out}", failed, max_error)
        if still is not None:
            yield from self._standstill(still)
        yield from self._lost_claims()
        yield from self._overdue()
        yield from self._killers()
        ages = [self._age(path) for _, path in committed(self._context)]
        yield from self._unswept("unfinished-commit", ages, "message", "committed, whose parts have not arrived")
        for why in staged_checks.left_to_owners(self._context):
            yield Reason("unfinished-commit", f"a part of a committed message stays: {why}")
        halves = staged_checks.reassembly_ages(self._context, self._now)
        yield from self._unswept("unfinished-join", halves, "bundle", "half put together by `dropq requeue --whole`")
        yield from self._topic_reasons()
        if self._stops_topic:
            yield from self._full()
        yield from self._unusable_routes()
        yield from self._selector_reasons()
        yield from self._absent_letters()
        yield from self._unfilled()
        yield from self._jam()
        yield from self._waits_for_itself()
        yield from self._unswept("unfinished-job", self._idle_jobs(), "committed job", "not sent to the end")
        yield from self._unfinished_moves()
        yield from self._without_bridge()
        refused = filter(None, (refusal(row.folder) for row in rows(self._context.layout)))
        for why in dict.fromkeys(each.why for each in refused if each.is_older):
            yield Reason("older-state", why)

    def _unfinished_moves(self) -> Iterator[Reason]:
        """Yield what has been on its way to other file systems, or to other roots, for too long."""
        ages: dict[Row, list[int]] = {}
        for row, file in self._standing.given:
            ages.setdefault(row, []).append(self._age(f"{row.given}/{file}"))
        here = [age for row, those in ages.items() if not row.peer for age in those]
        yield from self._unswept("unfinished-move", here, "message", "on the way to another file system")
        for row, those in ages.items():
            if row.peer and (late := [age for age in those if age > UNSWEPT]):
                since = max(late) / 1000
                text = f"{count_of(len(late))} on the way to {row.destination}, the oldest for {_duration(since)}"
                yield Reason("unfinished-move", f"{text}: {way_on(row, self._context.name)}", since, UNSWEPT / 1000)

    def _without_bridge(self) -> Iterator[Reason]:
        if self._context.root.config.peer and Wants(self._context).now():
            idle = self._now - reading.written_ms(f"{self._context.layout.wanted}/{LOOKED}", gone=self._now)
            if idle > UNSWEPT:
                text = f"consumers want messages of other roots, and no bridge has looked for {_duration(idle / 1000)}"
                yield Reason("bridge-stopped", f"{text}: start `dropq bridge`", idle / 1000, UNSWEPT / 1000)

    def _overdue(self) -> Iterator[Reason]:
        """Yield that delayed messages have been due for too long.

        A consumer that lives delivers them when it comes back from its handler: beside it nothing is overdue.
        """
        late = self._standing.delayed.older_than(UNSWEPT // 1000)
        if late and not any(map(self._signs.is_verifiable, self._signs.living)):
            oldest = self._standing.oldest["delayed"]
            yield from self._late("overdue", late, oldest, "message", "due, and not back in target/")

    def _killers(self) -> Iterator[Reason]:
        killers, (most, file) = self._standing.marks.killers, self._standing.marks.worst
        if killers:
            text = f"{count_of(killers)} whose holders died or lost their leases, one {most} times"
            id = shlex.quote(self._context.sidecars.full(MessageFile(file).name).id)
            way_out = f"`dropq show {self._name} {id}` shows it; max_deliveries in queue.toml ends such a message"
            yield Reason("kills-its-holders", f"{text}: {way_out}", killers)

    def _topic_reasons(self) -> Iterator[Reason]:
        """Yield what keeps published messages from the receivers of a topic; report at once what blocks them all."""
        age, limit = self._waiting_age, UNSWEPT / 1000
        if not self._context.layout.is_topic:
            return
        if why := topic_checks.unlisted(self._context):
            yield Reason("storage", f"its subscriptions cannot be listed, and are not checked: {why}")
        if age is None or self._pause:
            return
        text = f"a message has waited for {_duration(age)} to be distributed"
        if why := Distributor(self._context).what_blocks():
            yield Reason("undistributed", f"{text}: {why}", age)
        elif age > limit:
            text = f"{text}, over the limit of {_duration(limit)}; run `dropq sweep {self._name}`"
            yield Reason("undistributed", text, age, limit)

    def _unusable_routes(self) -> Iterator[Reason]:
        for name, why in routes.examine(self._context)[1].items():
            text = f"route {name} is in use, and takes nothing: {why}"
            in_use = shlex.quote(f"{self._context.layout.routing}/{name}{IN_USE}")
            yield Reason("route", f"{text}; correct it, or remove {in_use}")

    def _selector_reasons(self) -> Iterator[Reason]:
        for why in selector_checks.unusable(self._forecast):
            yield Reason("selector", f"a selector takes nothing: {why}")
        folder = self._context.layout.selectors
        ages = [self._age(f"{folder}/.{name}{REMOVED}") for name in removed_in(self._context)]
        yield from self._unswept("removed-selector", ages, "removed selector", "whose messages have not all returned")

    @cached_property
    def _filtered(self) -> int:
        """How many waiting messages the queue's own filter keeps from every consumer; of many, the first count."""
        return len(self._kept_out)

    @cached_property
    def _kept_out(self) -> list[MessageFile]:
        if self._rest is None or (matches := self._rest.matches) is None:
            return []
        target, first = self._context.layout.target, self._standing.waiting.first
        files = (self._context.sidecars.file(file, target) for file in first)
        return [file for file in files if not matches(file)]

    @cached_property
    def _rest(self) -> FilterRest | None:
        try:
            return FilterRest(self._context)
        except Unavailable:
            return None  # whoever consumes here is told what is not installed

    def _jam(self) -> Iterator[Reason]:
        """Yield that a queue is full of messages that nobody may take: it stays so."""
        most, count = self._context.config.max_unprocessed, sum(self._counts[state] for state in UNSETTLED)
        if most is not None and most <= count == self._filtered and not self._goes_aside:
            text = f"it is full (max_unprocessed = {most}) of messages that {self._why_filtered}"
            yield Reason("jammed", text, count, most)

    @property
    def _goes_aside(self) -> bool:
        return self._rest is not None and self._rest.is_put_aside

    @cached_property
    def _why_filtered(self) -> str:
        where = shlex.quote(self._context.layout.config_file)
        no_match = f"`filter = {self._context.config.filter!r}` does not match"
        if self._rest is not None and (unread := sum(not self._rest.keeps_out(file) for file in self._kept_out)):
            no_match = f"{no_match} (of {unread} it cannot read the body)"
        if self._goes_aside:
            after = format_duration(self._context.config.unroutable_after)
            return (
                f"{no_match}: after {after}, by unroutable_after, consumers put aside in "
                f"error/ what waits; correct a wrong filter in {where} before that"
            )
        away = f"`dropq move {self._name} OTHER --all`" if self._filtered == self._counts["target"] else "`dropq move`"
        return (
            f"{no_match}, and no consumer gets: correct that in {where}, or {away} "
            f"brings them elsewhere; `dropq browse {self._name} --explain` names them"
        )

    def _unfilled(self) -> Iterator[Reason]:
        """Yield that a new subscription or view should be filled by now, and consumers see nothing until it is."""
        age = self._context.age_ms(self._context.layout.recovering) if self._context.is_recovering else 0
        if age > UNSWEPT:
            text = f"consumers have seen nothing for {_duration(age / 1000)}, over {_duration(UNSWEPT / 1000)}"
            text = f"{text}, as the archives of its topics come first"
            text = f"{text}: `dropq sweep {self._name}` says what keeps it"
            yield Reason("recovering", text, age / 1000, UNSWEPT / 1000)

    def _absent_letters(self) -> Iterator[Reason]:
        letters = self._context.config.dead_letter_queue
        if letters is None or dead_letters.find_layout(self._context.root.layout.path, letters) is not None:
            return
        if selector_checks.may_have_letters(self._context):
            text = f"its dead-letter queue {letters} is missing: what should go there goes to error/"
            yield Reason("absent-letters", f"{text}; {remedy(self._context.root.layout, letters)}")

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self._context, self._signs)

    def _waits_for_itself(self) -> Iterator[Reason]:
        if self._workers.blocked and (circle := waiting_for_each_other(self._context)):
            text = f"its workers and those of the queues they send to wait for each other: {' -> '.join(circle)}"
            yield Reason("full-circle", f"{text}; raise max_unprocessed of one, or let other consumers empty it")

    def _standstill(self, limit: float) -> Iterator[Reason]:
        """Yield that messages have waited for longer than a limit, in seconds, and nobody took or settled one."""
        oldest = self._standing.waiting.oldest
        if oldest is None or self._pause or self._context.name == self._context.root.config.dead_letter_queue:
            return  # nobody is to take what lies there
        idle = min(self._standing.idle_ms / 1000, self._standing.oldest["target"])
        if idle <= limit or self._moves_on(limit):
            return
        text = f"messages wait, and nobody has taken one for {_duration(idle)}"
        with suppress(Unavailable):  # whoever consumes here is told what is not installed
            why = why_waits(self._context, oldest[1])
            text = f"{why.why}: {why.detail}; {text}"
            holders = sum(one.status in ("held", "lease") for one in self._standing.holders)
            if why.allowed and holders:
                text = f"{text}; {count_of(holders, 'consumer')} at work with what they hold: {self._holders()}"
        yield Reason("still", text, idle, limit)

    def _moves_on(self, limit: float) -> bool:
        """Return whether messages left in that time without a claim, as by routers, as far as the log tells."""
        if self._standing.moves is not None:
            return self._standing.moves
        now = utc(self._now)
        rates = Rates(self._context.layout.log, limit)
        with suppress(OSError):  # it is closed to this user
            rates.read(now)
        return any(rates.by_holder(now).values())

    def notes(self, limits: Limits) -> Iterator[Reason]:
        """Yield what is no fault, but explains the queue's state."""
        layout = self._context.layout
        if limits.still is None:
            yield from self._standstill(STILL)
        if self._context.is_recovering:
            yield Reason(
                "recovering",
                "it is being filled with what its topics archived: consumers see nothing until then; "
                f"`dropq sweep {self._name}` goes on with it",
            )
        for name, count in routes.routed(self._context.layout, self._context.config.ignore).items():
            folder, target = f"{layout.routing}/{name}", shlex.quote(layout.target)
            nobody, done = "consumer of this queue", "delivered"
            if layout.is_topic:
                nobody, done = "receiver of this topic", "distributed"
            text = f"{count_of(count)} in {folder}, which no {nobody} gets"
            yield Reason("routed", f"{text}: move them to {target} to have them {done}", count)
        if self._rest is not None and self._rest.is_idle:
            yield Reason("filter-rest", "filter_rest does nothing here, as the filter chooses what comes in")
        if self._filtered:
            yield Reason("filtered", f"{count_of(self._filtered)} that {self._why_filtered}", self._filtered)
        if letters := self._standing.marks.letters:
            text = f"{count_of(letters, 'dead letter')}: `dropq browse {self._name}` says where they come from, and why"
            way_back = f"`dropq requeue {self._name} --to-origin --all` puts back those whose dead-letter queue this is"
            yield Reason("letters", f"{text}; {way_back}", letters)
        for row, count in Counter(row for row, _ in self._standing.given).items():
            text = f"{count_of(count)} on the way to {row.destination}, which lies on another file system"
            yield Reason("in-transit", f"{text}: {way_on(row, self._context.name)}", count)
        if count := self._written_late():
            text = f"{count_of(count)} written to after the ack; a longer settle_time prevents this"
            yield Reason("written-after-ack", f"{text}: `dropq fsck {self._name}` lists them", count)
        yield from self._alone()
        if kept := list(self._workers.blocked.values()):
            yield Reason("destination", f"workers take nothing from it, as {kept[0]}", len(kept))
        if self._pause:
            means = "what is published is not distributed" if layout.is_topic else "consumers see an empty queue"
            yield Reason("paused", f"{means}; {self._pause}")
        yield from (Reason("barrier", why) for why in self._barriers)
        if why := self._refusals.get("write-lock"):
            yield Reason("write-lock", f"{why}; remove it to let them continue")
        if not self._stops_topic:
            yield from self._full()

    @cached_property
    def _forecast(self) -> Forecast:
        return Forecast(self._context)

    @cached_property
    def _refusals(self) -> dict[str, str]:
        return SendLimits(self._context.name, self._context).refusals()

    @property
    def _stops_topic(self) -> bool:
        """Whether a topic waits for this queue while it is full."""
        return self._context.is_fed and self._context.config.overflow != "discard"

    def _full(self) -> Iterator[Reason]:
        config, count = self._context.config, sum(self._counts[state] for state in UNSETTLED)
        most, way_out = config.max_unprocessed, self._way_out()
        if (outcome := self._refusals.get("full")) is None:
            return
        if self._stops_topic:
            topic = config.underlying_topic or self._context.name.partition("/")[0]
            outcome = f"no receiver of topic {topic} gets what is published until it has room"
            way_out = f'{way_out}; or raise max_unprocessed, or set overflow = "discard"'
        text = f"{count_of(count)} waiting, delayed or held, and max_unprocessed is {most}"
        yield Reason("full", f"{text}: {outcome}; {way_out}", count, most)

    def _written_late(self) -> int:
        """Return how many messages in processed/ whose names dropq did not write were written to there."""
        processed, count = self._context.layout.processed, 0
        for file in self._standing.odd if tells_writes(processed) else ():
            if MessageFile(file).name.foreign:
                with suppress(FileNotFoundError):  # RACE: retention removed it
                    count += is_written_late(os.lstat(f"{processed}/{file}"))
        return count

    def _alone(self) -> Iterator[Reason]:
        """Yield when the queue destroys itself, if nothing needs it any more."""
        if (left := destroyed_in(self._context)) is None:
            return
        when = f"in {_duration(left)}" if left else "at the next sweep"
        if not left and (held := self._counts["processing"]):
            noun, verb = ("message", "is") if held == 1 else ("messages", "are")
            when = f"when its {noun} in processing/ {verb} settled"
        text = f"it has no selector and no named subscription any more: it destroys itself {when}"
        yield Reason("alone", f"{text}; `dropq work {self._name} --client-id C -- CMD` keeps it", left)

    def _age(self, path: str) -> int:
        """Return how long ago, in ms, a file was renamed or changed; 0 if it is gone."""
        return self._now - self._standing.changed(path)

    def _unswept(self, kind: str, ages: Iterable[int], noun: str, what: str) -> Iterator[Reason]:
        """Yield a reason if a sweep should have dealt with something by now; ages are in ms."""
        late = [age for age in ages if age > UNSWEPT]
        yield from self._late(kind, len(late), max(late, default=0) / 1000, noun, what)

    def _late(self, kind: str, count: int, oldest: float, noun: str, what: str) -> Iterator[Reason]:
        """Yield a reason if some things are late; the oldest is so many seconds old."""
        if count:
            limit = UNSWEPT / 1000
            text = f"{count_of(count, noun)} {what}, the oldest for {_duration(oldest)}"
            text = f"{text}, over the limit of {_duration(limit)}; run `dropq sweep {self._name}`"
            yield Reason(kind, text, oldest, limit)

    def _lost_claims(self) -> Iterator[Reason]:
        """Yield that no sweep returned what dead consumers hold, or what is held by leases that ran out.

        No file says when a consumer died: its claims are as old as their last renewal.
        """
        # RACE: each holder's lock is tried and freed at once: a sweep that meets it there comes again in a second.
        claims = [file.claim for file in self._claimed if file.claim is not None and file.claim.ours]
        statuses = [(claim_status(claim, self._signs, self._now - UNSWEPT), claim) for claim in claims]
        dead = [self._age(claim.path) for why, claim in statuses if why == "dead"]
        yield from self._unswept("dead-holder", dead, "message", "held by dead consumers")
        # RACE: a claim that was renewed or settled since the listing is not there under this name.
        there = [claim for why, claim in statuses if why == "lapsed" and reading.exists(claim.path)]
        lapsed = [self._now - claim.deadline for claim in there]
        yield from self._unswept("lapsed-lease", lapsed, "message", "held by leases that ran out")

    def _idle_jobs(self) -> Iterator[int]:
        """Yield for how long, in ms, each committed job has been idle."""
        for folder in jobs.job_folders(self._context.layout.working):
            with suppress(FileNotFoundError):  # not committed; or RACE: another process finishes it
                if os.lstat(f"{folder}/{jobs.MANIFEST}").st_size:
                    yield jobs.idle_ms(folder, self._now, files=False)

    # -- what to do ------------------------------------------------------------------------------------------------

    @cached_property
    def _pause(self) -> str:
        """How to end the pause; "" if there is no pause."""
        if reading.is_there(self._context.root.layout.read_lock, self._context.clock):
            return "the whole root is paused: `dropq resume --all` ends that"
        if reading.is_there(self._context.layout.read_lock, self._context.clock):
            return f"it is paused: `dropq resume {self._name}` ends that"
        return ""

    def _way_out(self) -> str:
        """Return what to do when too much waits."""
        if self._pause:
            return self._pause
        takers = [one for one in self._forecast.selectors.for_waiting if one.selector.op != "copy"]
        if takers and not any(one.has_credit for one in takers):
            out = (one.selector for one in takers)
            spent = " and ".join(f"selector {one.name} has no credit left of {one.credit} for {one.to}" for one in out)
            return f"{spent}: consumers there must settle messages first"
        if not self._claimed:
            return self._who_should_work()
        if self._barriers:
            return self._barriers[0]
        text = f"{count_of(len(self._claimed))} held: {self._holders()}"
        if all(file.claim is not None and file.claim.of_zmq for file in self._claimed):
            text += ". A client that wants more than --in-flight of `dropq serve` before it acknowledges gets no more"
        return text

    @cached_property
    def _barriers(self) -> list[str]:
        """What each barrier waits for that is handed out, and keeps back all messages behind it."""
        if not any(file.claim is not None and file.claim.of_barrier for file in self._claimed):
            return []
        waits = barrier.handed_out(self._context, self._claimed).values()
        said = (f"{it.detail}: {', '.join(it.holders)}" if it.holders else it.detail for it, _ in waits)
        return [
            f"a barrier is handed out, and nothing behind it is delivered until it is settled: {why}" for why in said
        ]

    def _who_should_work(self) -> str:
        """Return what to start where no message is held."""
        router = f"`dropq route {self._name}`"
        if self._forecast.selectors.for_waiting:  # a consumer would take messages away from the selectors
            waits = f"`dropq browse {self._name} --explain` says what each message waits for"
            return f"if nothing moves, no router serves it: start {router}; {waits}"
        if routes.examine(self._context)[0]:
            return f"no message is held: start a consumer, or {router}, which moves only what the routes take"
        if servers := sorted(client_of(one) for one in self._signs.living if one.startswith(ZMQ)):  # without consumers
            return f"{' and '.join(servers)} lives, and no consumer takes a message from it: connect one to its socket"
        if self._context.config.barrier_expression is not None:
            return (
                f"no message is held: start a consumer; `dropq browse {self._name} --explain` says if a barrier waits"
            )
        return f"no message is held: start a consumer, then see `dropq ls {self._name}`"

    def _holders(self) -> str:
        return f"`dropq browse {self._name} --explain --state processing` says by whom"


def _duration(seconds: float) -> str:
    return format_duration(int(seconds))
