"""Explain why a message is not delivered, or who holds it: for a person whose queue stands still.

An explanation changes nothing and takes no lock: it was true when the folders were listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property, partial
from itertools import chain
from shlex import quote

from dropq.diagnosis import staged_checks
from dropq.diagnosis.work_checks import Workers
from dropq.errors import ConfigError, DropqError
from dropq.format import names
from dropq.format.layout import STATES, UNSETTLED
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.format.transfers import own_name_of
from dropq.lifecycle import early_acks
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.dead_letters import check_origin
from dropq.lifecycle.decision import Decision, count_of
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.holders import decide
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.processing import claimed_messages, committed
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.transfers import given_messages, way_on
from dropq.policies.backlog import Backlog
from dropq.policies.barrier import Before, Shares, handed_out
from dropq.policies.fair_share import FairShare
from dropq.policies.filter_rest import FilterRest
from dropq.policies.matching import matcher
from dropq.policies.routes import Routes
from dropq.policies.wanted import belonging_here
from dropq.queue.browsing import listed
from dropq.queue.message import Message, utc
from dropq.routing.forecast import Forecast, way_here
from dropq.storage import reading
from dropq.storage.liveness import Signs
from dropq.topics.distribution import Distributor


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a message is where it is.

    Attributes:
        message: the message.
        why: `ready`, `paused`, `expired`, `acked`, `owner`, `filter`, `route`, `selector`, `barrier`, `backlog`,
            `turn`, `delay`, `receiver`, `unreadable`, `settling`, `destination`;
            for a message that is held: `held`, `lease`, `lapsed`, `dead`, `expired`, `unleased`, `script`, `barrier`;
            `committed` for a message whose parts have not all arrived, which counts as one in processing/;
            `transit` for a message that goes to another file system, whose state is `in-transit`.
        detail: a sentence about it, with the way out where there is one.
        holders: the subscriptions that hold it; for a message that waits, those that may get it, or keep it waiting.
        until: when that ends by itself; None when that is not known.
    """

    message: Message
    why: str
    detail: str
    holders: tuple[str, ...] = ()
    until: datetime | None = None


def explain(context: QueueContext, state: str | None = None, filter: str | None = None) -> Iterator[Explanation]:
    """Yield, in order of delivery, why each unsettled message is not delivered, or who holds it; see `Queue.explain`.

    ValueError if messages of that state are not explained; StorageError if a folder of the queue cannot be listed.
    """
    if state is not None and state not in UNSETTLED:
        raise ValueError(f"state {state!r}: messages of {', '.join(UNSETTLED)} are explained")
    with context.error_context("nothing was changed"):
        snapshot, settlement = _Snapshot(context), Claims(context)
        for where in UNSETTLED if state is None else (state,):
            explained = {"target": snapshot.waiting, "delayed": snapshot.delayed, "processing": snapshot.claimed}[where]
            matches = None if filter is None else matcher(context, filter, where)
            for file in listed(context, where):
                found = explained(file)  # also for messages that do not match: one may be a barrier
                if matches is None or matches(file):
                    message = Message(settlement, where, file)
                    more = f"{snapshot.way_back(message)}{way_here(context, file)}{snapshot.of_bundle(message, file)}"
                    until = utc(found.until) if found.until else None
                    yield Explanation(message, found.why, f"{found.detail}{more}", found.holders, until)
            if where == "processing":
                yield from _committed(settlement, matches)
        if state is None:
            yield from _in_transit(settlement, filter)


def why_waits(context: QueueContext, file: str) -> Decision:
    """Return the first reason why no consumer gets a message of target/, which is named by its file."""
    return _Snapshot(context).waiting(context.sidecars.file(file, context.layout.target))


class _Snapshot:
    """What stands between a queue's messages and its consumers at this moment."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._name = quote(context.name)
        self._locks = [lock for lock in context.read_locks if reading.is_there(lock, context.clock)]
        self._acks = reading.names_in(context.layout.acks)
        self._belongs = belonging_here(context)
        self._rest = FilterRest(context)
        self._is_letters_of = cache(partial(_is_letters_of, context))
        self._routes = Routes(context)
        self._routes.refresh()
        self._forecast = Forecast(context)
        expression = context.config.barrier_expression
        self._is_barrier = None if expression is None else matcher(context, expression)
        self._barrier: str | None = None  # the id of the first barrier that waits, once it was met
        self._ahead = 0
        self._distributor = Distributor(context) if context.layout.is_topic else None
        self._topic_waits: Decision | None = None  # what keeps all from being distributed behind a message, once met
        self._claimed = claimed = claimed_messages(context)
        self._barriers_out = handed_out(context, claimed)
        self._before = Before.of(context, claimed)
        self._signs = Signs(context.layout.consumers)
        self._alive = tuple(self._signs.living)
        self._turns: FairShare | None = None
        if context.config.fairness_model != "fast":
            self._turns = FairShare(context, "", allowed=None, filter=None, lasting=False)
            self._turns.refresh(claimed)

    # -- messages that wait ----------------------------------------------------------------------------------------

    def waiting(self, file: MessageFile) -> Decision:
        """Return the first reason why no consumer gets a message of target/."""
        if self._locks[:1] == [self._context.layout.recovering]:
            text = "the queue is being filled with what its topics archived"
            return Decision(False, "paused", f"{text}: `dropq sweep {self._name}` goes on with it")
        if self._locks:
            queue = self._name if self._locks[0] == self._context.layout.read_lock else "--all"
            means = "pauses consumers"
            if self._context.layout.is_topic:
                means = "keeps what is published from being distributed"
            return Decision(False, "paused", f"{self._locks[0]} {means}: `dropq resume {queue}` removes it")
        if due := self._context.settling.settles_at(file):
            self._ahead += 1
            return Decision(False, "settling", self._settling(), until=due)
        if file.name.id in self._acks and early_acks.applies(self._context, file):
            text = "its ack came before it: the next consumer archives it, and does not get it"
            return Decision(False, "acked", text)
        if has_expired(self._context, file):
            text = f"it has expired: any consumer, or `dropq sweep {self._name}`, moves it to expired/"
            return Decision(False, "expired", text)
        if self._belongs is not None and not self._belongs(file):
            owner = self._context.config.initial_owner
            text = (
                f"no consumer of this root gets it before root {owner}, the initial_owner, whose bridge takes it there"
            )
            return Decision(False, "owner", text)
        if not (found := self._rest.decide(file)).allowed:
            return found
        if self._distributor is not None:
            return self._published(self._distributor, file)
        routed = self._routed(file)
        plan = None if routed else self._forecast.of(file)
        kept = self._behind_barrier(file, routed) or self._over_backlog()
        if kept is not None:
            sent_on = routed or plan
            if kept.allowed or sent_on is None or sent_on.why in ("leave", "stay"):
                return kept
            return replace(kept, detail=f"{kept.detail}; {sent_on.detail}")  # routers pass by what keeps consumers back
        if plan is None or plan.why == "leave" or self._alive:  # a consumer may be first
            return routed or self._ready(file)
        return Decision(False, "selector", plan.detail)

    def _published(self, distributor: Distributor, file: MessageFile) -> Decision:
        if self._topic_waits is None and (routed := self._routed(file)) is not None:
            return routed
        found = self._topic_waits or distributor.decide(file)
        if not found.allowed:
            self._topic_waits = found
            return replace(found, detail=f"the topic waits: {found.detail}")
        return found

    def _settling(self) -> str:
        patience = f"{self._context.settling.patience:g} s"
        if self._context.config.settle_time is None:
            cause = "it was written in place just now, or is empty, so its writer may go on"
            return f"{cause}: it waits for {patience} after that, and settle_time sets another time"
        return f"it was changed just now, so somebody may still write to it: it waits for settle_time, {patience}"

    def _behind_barrier(self, file: MessageFile, routed: Decision | None) -> Decision | None:
        if self._is_barrier is None:
            return None
        if kept := next((behind for _, behind in self._barriers_out.values() if not behind.allowed), None):
            return kept
        if self._barrier is not None:
            return Decision(False, "barrier", f"it waits behind the barrier {self._barrier}")
        if routed is None and self._is_barrier(file):
            self._barrier = file.name.id
            return self._before.decide(file, self._ahead, self._alive)
        self._ahead += 1
        return None

    def _over_backlog(self) -> Decision | None:
        most = self._context.config.max_backlog
        found = None if most is None else Backlog(most).decide(self._claimed, lambda: claimed_messages(self._context))
        return None if found is None or found.allowed else found

    def _routed(self, file: MessageFile) -> Decision | None:
        route = next(self._routes.taking(file, file.own_name), None)
        if route is None:
            return None
        movers = f"the next consumer, or `dropq route {self._name} --once`, moves it to {route.folder}"
        return Decision(False, "route", f"it goes to route {route.name}: {movers}")

    def _ready(self, file: MessageFile) -> Decision:
        rivals = () if self._turns is None else (one.subscription for one in self._turns.rivals(file))
        if turns := tuple(one for one in rivals if not self._signs.is_dead(one)):
            text = "it goes to the subscription whose turn it is, which has a moment to ask for it"
            return Decision(False, "turn", text, turns)
        if not self._alive:
            return Decision(True, "ready", "no consumer is subscribed: the first that asks gets it")
        if len(kept := self._workers.blocked) == len(self._alive):
            text = f"its workers take nothing, as {next(iter(kept.values()))}"
            return Decision(False, "destination", text, self._alive)
        text = f"{self._working}: the first that is free, and whose own filter matches, gets it"
        return Decision(True, "ready", text, self._alive)

    @cached_property
    def _working(self) -> str:
        """How many consumers live, and how many messages they hold.

        How many a consumer takes at a time, and the filter of its own, cannot be seen from outside.
        """
        alive = frozenset(self._alive)
        held = sum(file.claim is not None and file.claim.subscription in alive for file in self._claimed)
        live, hold = ("lives", "holds") if len(self._alive) == 1 else ("live", "hold")
        holding = f", and {hold} {count_of(held)}" if held else ""
        return f"{count_of(len(self._alive), 'consumer')} {live}{holding}"

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self._context, self._signs)

    def delayed(self, file: MessageFile) -> Decision:
        """Return until when a message is delayed."""
        name = self._context.sidecars.parse(file.filename)
        cause = "it was given back" if name.delivery_count else "it was sent with a delay"
        if name.died:
            cause = f"{cause}, and {_times(name.died)} a holder died over it or lost its lease"
        if name.not_before <= self._context.clock.now_ms():
            text = f"{cause}, and its time has come: any consumer, or `dropq sweep {self._name}`, delivers it"
            return Decision(True, "delay", text)
        return Decision(False, "delay", f"{cause}, and waits for its time", until=name.not_before)

    # -- messages that are held ------------------------------------------------------------------------------------

    def claimed(self, file: MessageFile) -> Decision:
        """Return who holds a message, and what would return it."""
        if file.claim is None or not file.claim.of_barrier:
            return decide(self._context, file.claim, self._signs)
        # RACE: a barrier that is in no listing yet is being handed out.
        said = self._barriers_out.get(file.claim.owner) or Shares(self._context, file.claim.owner).decide(
            is_shown=False
        )
        return said[0]

    def way_back(self, message: Message) -> str:
        """Describe a dead letter: where it comes from, why, and how it gets back; return "" for any other message."""
        origin = message.origin
        if not message.dead_letter_reason or not origin or origin == self._context.name:
            return ""
        letter = f"; it is a dead letter from {origin} ({message.dead_letter_reason})"
        if message.state == "processing":
            return letter
        which = f"{quote(message.id)} --state {message.state}"
        command = f"dropq requeue {self._name} {which} --to-origin"
        if not self._is_letters_of(origin):
            command = f"dropq move {self._name} {quote(origin)} {which}"
        return f"{letter}: `{command}` puts it back"

    # -- parts of bundles ------------------------------------------------------------------------------------------

    def of_bundle(self, message: Message, file: MessageFile) -> str:
        """Describe a part of a bundle: which part it is, and where the others lie; return "" for any other message."""
        name = file.name
        if not (name.first or name.record):
            return ""
        says = f"it is what is left of a bundle, from record {name.first} on"
        if name.record:
            says = f"it was record {name.record} of the bundle {_bundle(message.id, name)}"
        elif name.cut:
            says = f"{says}; it was cut in two, as a consumer died over it, and had been delivered {_times(name.cut)}"
        others = self._parts.get(_identity(name), Counter()) - Counter([message.state])
        where = ", ".join(f"{count} in {state}/" for state, count in others.items())
        return f"; {says}{f'; more of the bundle: {where}' if where else ''}"

    @cached_property
    def _parts(self) -> dict[tuple[str, str], Counter[str]]:
        """How many files of each bundle lie in each state, for bundles that have an unsettled part."""
        marked = (file for state in UNSETTLED for file in self._files(state) if names.may_be_part(file))
        parts = {self._bundle_of(file): Counter[str]() for file in marked}
        for state in STATES:
            for file in self._files(state):
                # An archive may have a million files: most are passed over by their text.
                id = names.generated_id(file)
                if (found := parts.get((id, "") if id else self._bundle_of(file))) is not None:
                    found[state] += 1
        return parts

    def _files(self, state: str) -> Iterator[str]:
        return chain.from_iterable(reading.files_in(self._context.layout.folder(state)))

    def _bundle_of(self, filename: str) -> tuple[str, str]:
        return _identity(self._context.sidecars.file(filename).name)


def _is_letters_of(context: QueueContext, origin: str) -> bool:
    """Return whether the dead letters of a queue come to this one, as far as is known: the other may be missing now."""
    try:
        check_origin(context, open_queue(context.root, origin))
    except DropqError as error:
        return not isinstance(error, ConfigError)
    return True


def _identity(name: Name) -> tuple[str, str]:
    """Return what identifies the bundle of a part: its id, and the mark of its parts."""
    return _bundle(name.id, name), names.bundle_mark(name)


def _bundle(id: str, name: Name) -> str:
    return id.removesuffix(f"-{name.record}") if name.record else id


class _MessageOnItsWay(Message):
    """A message that lies in no state folder: on its way to another file system, or committed."""

    __slots__ = ("_path",)

    def __init__(self, settlement: Claims, state: str, file: MessageFile, path: str) -> None:
        super().__init__(settlement, state, file)
        self._path = path

    @property
    def path(self) -> str:
        """Where its file lies."""
        return self._path


def _committed(settlement: Claims, matches: Callable[[MessageFile], bool] | None) -> Iterator[Explanation]:
    context = settlement.context
    for file, path in sorted(committed(context), key=lambda found: found[1]):
        if matches is None or matches(file):
            message = _MessageOnItsWay(settlement, "processing", file, path)
            yield Explanation(message, "committed", staged_checks.waits_for(context, path))


def _in_transit(settlement: Claims, filter: str | None) -> Iterator[Explanation]:
    context = settlement.context
    matches = None if filter is None else matcher(context, filter, "target")
    for row, name in sorted(given_messages(context.layout), key=lambda given: own_name_of(given[1]) or given[1]):
        file = context.sidecars.file(name)
        detail = f"it is on its way to {row.destination}; such messages: {way_on(row, context.name)}"
        if matches is None or matches(file):
            message = _MessageOnItsWay(settlement, "in-transit", file, f"{row.given}/{name}")
            yield Explanation(message, "transit", detail)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
