"""What administrators do in bulk, one message at a time: requeue, move, replay, ack, expire, purge, prune.

Each function returns an iterator of outcomes: what it yielded is done, and what it did not yield was not touched.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from shlex import quote

from dropq.carrier.carriers import CarrierTo
from dropq.carrier.lists import LIST_LENGTH
from dropq.errors import DropqError, LeaseLost, NoSuchMessage, Unavailable
from dropq.filters import check_chooses, compile_filter
from dropq.format.addresses import check_address
from dropq.format.claims import Claim, split_receipt
from dropq.format.layout import SETTLED, STATES, WAITING, WITH_REASON
from dropq.format.message_file import MessageFile
from dropq.format.transfers import own_name_of
from dropq.lifecycle import dead_letters
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.settlement import Claims
from dropq.policies.matching import deciding
from dropq.queue import by_id
from dropq.queue.browsing import browse, named, walk
from dropq.queue.message import Message
from dropq.queue.subscription import Subscription
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.storage.failures import describe, error_context
from dropq.storage.watch import Watch
from dropq.upkeep import reassembly
from dropq.upkeep.archived import checked, since
from dropq.upkeep.recovery import recover_if_needed
from dropq.upkeep.retention import surplus

#: States that messages can be requeued from.
REQUEUED = (*SETTLED, "processing")
#: Seconds for which a command waits until parts of committed messages have arrived.
PATIENCE = 10.0
#: States that messages can be expired and acknowledged in, in the order in which messages pass through them.
UNFINISHED = ("delayed", "target", "processing")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one message: `detail` says it in words, `target` is its new file name."""

    id: str
    name: str
    ok: bool
    detail: str
    target: str | None = None


@dataclass(frozen=True)
class Selection:
    """Which messages a bulk verb acts on, by their states and what they match; made once of the verb's arguments.

    Attributes:
        ids: their ids, file names or receipts; None for all that lie there.
        older_than: seconds that they have been there at least; None for any time.
        dry_run: whether the verb only reports what it would do.
        before: only what came to the state by this time, in ms since 1970, however long the verb takes; None for all.
            Then it takes the memory of few messages, and ends once `stop` returns True.
        exact: the ids are file names, so that one listing finds them.

    Raises:
        ValueError: `ids` is a text, which is no list of ids.
        InvalidFilter: the filter cannot be read, or is blank.
        Unavailable: the filter has a regular expression, and RE2 is not installed.
    """

    states: tuple[str, ...]
    ids: Iterable[str] | None = None
    filter: str | None = None
    older_than: float | None = None
    dry_run: bool = False
    before: int | None = None
    exact: bool = False
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if isinstance(self.ids, str | bytes):
            raise ValueError(f"ids are several texts: for one id, give [{self.ids!r}]; nothing was changed")
        if self.filter is not None:
            check_chooses(self.filter)
            compile_filter(self.filter)

    @property
    def where(self) -> str:
        """The states, in words."""
        return "/, ".join(self.states)

    @cached_property
    def wanted(self) -> KeysView[str] | None:
        """The ids and file names that are asked for, each once; a receipt asks for the claim's file name."""
        return None if self.ids is None else dict.fromkeys(split_receipt(id)[0] for id in self.ids).keys()

    def takes(self, names: set[str]) -> bool:
        """Return whether a message of these names is asked for."""
        return self.wanted is None or not self.wanted.isdisjoint(names)

    @cached_property
    def _tests(self) -> dict[str, Callable[[MessageFile], bool | None]]:
        return {}  # by state

    @cached_property
    def _reads_bodies(self) -> bool:
        return self.filter is not None and compile_filter(self.filter).reads_body

    def why_spared(self, *messages: Message) -> str:
        """Return why a verb leaves messages alone: their bodies cannot be read, and a filter asks for them; else ""."""
        if self.filter is None or not self._reads_bodies:
            return ""
        for message in messages:
            context, state = message.context, message.state
            if state not in self._tests:
                self._tests[state] = deciding(self.filter, context, state, context, context.reasons)
            matches = self._tests[state](message._file)
            if not matches and os.path.lexists(message.path):
                why = "cannot be read, or is too long or deep"
                return f"the filter does not surely match it, as its body, or its sidecar, {why}; it was not touched"
        return ""

    def check(self, allowed: Sequence[str], verb: str, instead: str = "") -> None:
        """Raise ValueError for states that a verb does not take messages from; it says what to do `instead`."""
        if not set(self.states) <= set(allowed):
            raise ValueError(f"state {self.where!r}: {verb} {', '.join(allowed)}{instead}")


def select(context: QueueContext, which: Selection) -> Iterator[Message]:
    """Yield the selected messages: one state after the other, each in order of delivery."""
    if "target" in which.states:
        _wait_for_recovery(context)
    with error_context("no message was touched"):
        if reading.exists(context.layout.staged):
            _roll_forward(context)
    for message in (message for state in which.states for message in _listed(context, state, which)):
        if not which.takes(_names(message)):
            continue
        with error_context("this message and those after it were not touched"):
            if which.older_than is not None and context.age_ms(message.path) <= which.older_than * 1000:
                continue
            if which.before is not None and reading.changed_ms(message.path, gone=which.before + 1) > which.before:
                continue
        yield message


def _listed(context: QueueContext, state: str, which: Selection) -> Iterable[Message]:
    """List messages of a state, the wanted ones among them; what comes meanwhile only where its time tells that."""
    if which.exact and which.wanted is not None:
        return list(named(context, state, which.wanted))
    if which.before is not None:
        return walk(context, state, which.filter, which.stop)
    return list(browse(context, state, which.filter))


def _names(message: Message) -> set[str]:
    return {message.id, message.name, message.file}


def _roll_forward(context: QueueContext) -> None:
    """Wait for at most 10 s until committed parts have arrived, so that they can be selected, too."""
    until = time.monotonic() + PATIENCE
    while keeps := fan_out.sweep(context).keeps:
        if (left := until - time.monotonic()) <= 0:
            raise Unavailable(f"{keeps}; try again once that is mended; no message was touched")
        Watch(context.layout.staged).wait(min(left, PATIENCE / 5))


def requeue(
    context: QueueContext,
    which: Selection,
    *,
    to: QueueContext | None = None,
    to_origin: bool = False,
    whole: bool = False,
    keep_expiration: bool = False,
) -> Iterator[Outcome]:
    """Move messages back into target/ as if they were new, as `Queue.requeue` says.

    Args:
        to: the queue that they go to; None is this one.
        to_origin: what is no dead letter stays, too, and is reported only if its id was given.
        whole: the id of a bundle chooses all its parts. Another bundle may have an id that is not a generated one:
            there, parts belong together that have waited since the same time.
        keep_expiration: keep their own expirations, of a bundle that of its first part.

    Raises:
        ValueError: messages of that state cannot be requeued so; or `whole` is given with `to_origin`.
    """
    if whole and to_origin:
        raise ValueError("whole puts parts together in this queue: requeue them to their origin after that")
    if whole:
        which.check(SETTLED, "parts of a bundle are put together from")
        return _requeue_whole(context, which, keep_expiration=keep_expiration)
    if to_origin:
        which.check((*REQUEUED, *WAITING), "dead letters are requeued from")
        return _requeue_to_origin(context, which, keep_expiration=keep_expiration)
    which.check(REQUEUED, "messages are requeued from", _instead_of_requeue(context, which.where, to))
    destination, moves = to or context, Moves(context)
    messages = select(context, which)
    if to is None and which.wanted is None:
        messages = (message for message in messages if not _is_for_another(message))

    def act(message: Message) -> str | None:
        return _requeue(moves, message, destination, keep_expiration=keep_expiration)

    why_kept = _why_kept if to is None else None
    outcomes = each(context, which, messages, act, f"requeued to {destination.name}", why_kept)
    return _carried(CarrierTo(context, destination), outcomes)


def _is_for_another(message: Message) -> bool:
    """Return whether a message in error/ was made of one of this queue, for a queue that is gone."""
    return (
        message.state == "error"
        and _is_letter(message)
        and (message.reason or {}).get("reason") == dead_letters.NO_SUCH_QUEUE
    )


def _instead_of_requeue(context: QueueContext, state: str, to: QueueContext | None) -> str:
    """Return a hint for an error: what moves messages that wait in a state; "" if none wait in that state."""
    if state not in WAITING:
        return ""
    queue = quote(context.name)
    if to is not None:
        return f"; `dropq move {queue} {quote(to.name)} --state {state}` moves what waits"
    if count := letters_in(context, Selection((state,))):
        letters = "1 dead letter waits" if count == 1 else f"{count} dead letters wait"
        where = "" if state == "target" else f" --state {state}"
        return (
            f"; {letters} in {state}/ of queue {context.name}: `dropq requeue {queue} --to-origin{where}` moves such "
            "back to where they came from"
        )
    return f"; what lies in {state}/ of queue {context.name} waits to be delivered already"


def _why_kept(message: Message) -> str:
    """Return why a message cannot be requeued to its own queue; "" if it can."""
    if not _is_for_another(message):
        return ""
    return (
        f"it was made for {message.origin}, which was gone, and is no message of this queue: `dropq requeue "
        f"{quote(message.context.name)} {quote(message.id)} --to QUEUE` sends it to another"
    )


def _requeue(moves: Moves, message: Message, destination: QueueContext, *, keep_expiration: bool) -> str | None:
    return _moved(message, partial(moves.requeue, to=destination, keep_expiration=keep_expiration))


def _moved(message: Message, move: Callable[[str, str], str | None]) -> str | None:
    """Move a message out of the folder of its state by `move`, and remove its reason; return what `move` does."""
    context, state = message.context, message.state
    inode = reading.inode_or_none(message.path) if state in WITH_REASON else None
    file = move(context.layout.folder(state), message.file)
    if file is not None and inode is not None:
        context.reasons.drop(state, message.file, inode)
    return file


def _requeue_whole(context: QueueContext, which: Selection, *, keep_expiration: bool) -> Iterator[Outcome]:
    with error_context("no message was requeued"):
        reassembly.sweep(context)  # what a process that died was putting together is there again
    (state,), found = which.states, set[str]()
    bundles = dict[tuple[str | None, str], list[Message]]()
    for message in select(context, replace(which, ids=None)):
        is_own = not _is_for_another(message)
        bundle = reassembly.bundle_of(message) if is_own else None
        known = _names(message) | {bundle or message.id}
        if which.takes(known) and (is_own or which.wanted is not None):
            found |= known
            bundles.setdefault((bundle, reassembly.came(message) if bundle else message.file), []).append(message)
    moves, done = Moves(context), f"requeued to {context.name}"
    for (bundle, _), parts in bundles.items():
        if bundle and len(parts) > 1:
            join = partial(reassembly.join, context, state, parts, keep_expiration=keep_expiration)
            why = which.why_spared(*parts) or reassembly.why_apart(parts)
            outcome = _outcome(parts[0], join, f"{done} as one message of {len(parts)} parts", which, why)
            yield replace(outcome, id=bundle)
        else:
            for part in parts:
                act = partial(_requeue, moves, part, context, keep_expiration=keep_expiration)
                yield _outcome(part, act, done, which, _why_kept(part))
    yield from _not_found(context, which, found)


def _requeue_to_origin(context: QueueContext, which: Selection, *, keep_expiration: bool) -> Iterator[Outcome]:
    moves, found = Moves(context), set[str]()
    for message, destination in _each_with_origin(context, which):
        found |= _names(message)
        if isinstance(destination, DropqError):
            detail = f"it stays in {message.state}/ of {context.name}: {destination}"
            yield Outcome(message.id, message.file, False, detail)
            continue
        act = partial(_requeue, moves, message, destination, keep_expiration=keep_expiration)
        outcome = _outcome(message, act, f"requeued to {destination.name}", which)
        yield from _carried(CarrierTo(context, destination), [outcome])
    yield from _not_found(context, which, found)


def _each_with_origin(context: QueueContext, which: Selection) -> Iterator[tuple[Message, QueueContext | DropqError]]:
    """Yield the dead letters, or the messages that are wanted, with the queue that each goes back to, or why not."""
    origins = dict[str, QueueContext]()
    for message in select(context, which):
        if which.wanted is not None or _is_letter(message):
            try:
                destination = _origin(message, origins)
                dead_letters.check_origin(context, destination)
            except DropqError as error:
                yield message, error
            else:
                yield message, destination


def origins_in(context: QueueContext, which: Selection) -> Counter[str]:
    """Return how many letters a requeue to their origins would move to each queue; under "", how many stay."""
    found = _each_with_origin(context, which)
    return Counter("" if isinstance(destination, DropqError) else destination.name for _, destination in found)


def requeued_from(state: str | None, *, to_origin: bool) -> str:
    """Return the state that messages are requeued from: target for dead letters, which wait there, else error."""
    if state is not None:
        return state
    return "target" if to_origin else "error"


def letters_in(context: QueueContext, which: Selection) -> int:
    """Return how many of the selected messages are dead letters, by a look alone."""
    messages = (message for state in which.states for message in browse(context, state, which.filter))
    return sum(_is_letter(message) and which.takes(_names(message)) for message in messages)


def _is_letter(message: Message) -> bool:
    return message.dead_letter_reason is not None and message.origin not in (None, message.context.name)


def _origin(message: Message, opened: dict[str, QueueContext]) -> QueueContext:
    """Open the queue that a dead letter came from, unless it is open already; DropqError where that is not possible."""
    origin = message.origin
    if origin is None or not _is_letter(message):
        raise NoSuchMessage("it is no dead letter")
    if origin not in opened:
        check_address(origin)  # it is read from a name, which anybody may have written
        opened[origin] = open_queue(message.context.root, origin)
    return opened[origin]


def move(context: QueueContext, which: Selection, *, to: QueueContext) -> Iterator[Outcome]:
    """Move messages into another queue's target/, with their counters and expirations as they are.

    Where that queue lies on another file system, messages are reported once they are there, many at a time.

    Raises:
        ValueError: they are to be moved from working/, where senders still write.
    """
    which.check(STATES, "messages are moved from")
    act = partial(_moved, move=partial(Moves(context).move, to=to))
    return _carried(CarrierTo(context, to), each(context, which, select(context, which), act, f"moved to {to.name}"))


def _carried(carrier: CarrierTo, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Yield outcomes; those of messages that go to another file system once they are there.

    If this is not iterated to its end, sweeps of the queue carry what is on its way.
    """
    on_the_way: list[Outcome] = []
    for outcome in outcomes:
        if not outcome.ok or outcome.target is None or own_name_of(outcome.target) is None:
            yield outcome
            continue
        on_the_way.append(outcome)
        if len(on_the_way) == LIST_LENGTH:
            yield from _arrived(carrier, on_the_way)
            on_the_way = []
    yield from _arrived(carrier, on_the_way)


def _arrived(carrier: CarrierTo, outcomes: list[Outcome]) -> Iterator[Outcome]:
    why = carrier.carry() if outcomes else ""
    for outcome in outcomes:
        given = outcome.target or ""
        if carrier.has_left(given):
            yield replace(outcome, target=carrier.arrived.get(given))
        else:
            detail = f"it is on its way to another file system, and `dropq sweep` of this queue goes on with it: {why}"
            yield replace(outcome, ok=False, detail=detail, target=None)


def replay(
    context: QueueContext, which: Selection, start: str | date | None = None, *, to: QueueContext | None = None
) -> Iterator[Outcome]:
    """Send archived messages again, each once, as redelivered ones: without their expirations, on a new clock.

    A replay makes copies: a link would share its inode with the archived file, by which a reason finds its file; and
    each rename of the link would change the ctime of both, by which retention finds the oldest files.

    Args:
        start: the point to begin at, as for `since`; None is the queue's recovery_point; else, and where ids are given,
            it is all; ValueError for what is no point to begin at.
        to: the queue that they go to; None is this one.
    """
    destination, moves = to or context, Moves(context)
    if start is None:
        start = (which.wanted is None and context.config.recovery_point) or "epoch"
    messages = _chosen(context, checked(start), which)

    def act(message: Message) -> str | None:
        return moves.replay(message.file, destination)

    return each(context, which, messages, act, f"replayed to {destination.name}")


def _chosen(context: QueueContext, point: str, which: Selection) -> Iterator[Message]:
    """Yield the messages from a point on that were asked for, each once.

    The parts of a bundle are messages of their own, unless the bundle is archived as a whole, too.
    """
    chosen = None
    if which.wanted is not None or which.filter is not None:
        chosen = {message.file for message in select(context, which)}
    seen: set[Hashable] = set()
    settlement = Claims(context)
    asked = [archived for archived in since(context, point) if chosen is None or archived.file in chosen]
    wholes = {archived.message for archived in asked}
    for archived in asked:
        if archived.message not in seen and archived.bundle not in wholes:
            seen.add(archived.message)
            yield Message(settlement, "processed", context.sidecars.file(archived.file))


def ack(
    context: QueueContext,
    which: Selection,
    *,
    subscribe: Callable[[], AbstractContextManager[Subscription]],
    own: Subscription | None = None,
) -> Iterator[Outcome]:
    """Acknowledge messages that wait, are delayed or are held, each as by its id; holders lose their claims.

    With strict leasing, what others than `own` hold stays. `subscribe` opens what claims the messages that wait.

    Raises:
        ValueError: it is a topic: who subscribed to it would not get the messages.
    """
    which.check(UNFINISHED, "messages are acknowledged in")
    if context.layout.is_topic:
        raise ValueError(f"{context.name} is a topic, which nobody consumes: name a subscription; nothing was changed")
    messages = list(select(context, which))
    if which.dry_run:

        def why_kept(message: Message) -> str:
            return by_id.why_kept(context, message._file, message.state, own)

        return each(context, which, messages, lambda message: None, "acknowledged", why_kept)

    def acknowledging() -> Iterator[Outcome]:
        with subscribe() as claiming:

            def act(message: Message) -> str | None:
                with context.error_context(by_id.UNCERTAIN):
                    return "" if by_id.ack_listed(context, message, claiming, own) else None

            yield from each(context, which, messages, act, "acknowledged")

    return acknowledging()


def expire(context: QueueContext, which: Selection) -> Iterator[Outcome]:
    """Move messages that wait, are delayed or are held to expired/; their holders lose their claims."""
    which.check(UNFINISHED, "messages are expired in")
    messages = list(select(context, which))
    return each(context, which, messages, lambda message: "" if _expire(context, message) else None, "expired")


def _expire(context: QueueContext, message: Message) -> bool:
    reason = "forced_expire"
    file = context.sidecars.file(message.file, context.layout.folder(message.state))
    if message.state != "processing":
        return Moves(context).expire_waiting(file, reason, message.state)
    claim = file.claim
    if claim is None or not claim.ours:  # of a script, or of a DropboxMQ client
        claim = Claim.foreign(file.filename, file.folder, file.delivery_count + 1)
    try:
        Claims(context).set_aside(claim, "expired", reason)
    except LeaseLost:
        return False  # RACE: its holder, or a sweep, was first
    return True


def purge(context: QueueContext, which: Selection) -> Iterator[Outcome]:
    """Remove messages for good."""
    moves = Moves(context)

    def act(message: Message) -> str | None:
        return "" if moves.remove(message.state, message.file, "purged") else None

    return each(context, which, select(context, which), act, "removed")


def prune(
    context: QueueContext,
    *,
    state: str = "processed",
    keep_age: float | None = None,
    keep_count: int | None = None,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Remove the oldest messages of a state beyond an age, in seconds, or a count; None takes the queue's limits."""
    done = "would be removed" if dry_run else "removed"
    with context.error_context("what is not reported as removed was not touched"):
        if state == "target":
            _wait_for_recovery(context)
        for found in surplus(context, state=state, keep_age=keep_age, keep_count=keep_count, remove=not dry_run):
            if found is not None:
                id = Message(Claims(context), state, context.sidecars.file(found.file)).id
                detail = done if found.error is None else describe(found.error)
                yield Outcome(id, found.file, found.error is None, detail)


def _wait_for_recovery(context: QueueContext) -> None:
    """Let a new subscription be filled before anything leaves its target/; Unavailable if that takes too long."""
    recover_if_needed(context)
    if context.is_recovering:
        raise Unavailable(
            f"{context.name} is being filled with what its topics archived: try again once that is done; nothing was "
            "changed"
        )


def each(
    context: QueueContext,
    which: Selection,
    messages: Iterable[Message],
    act: Callable[[Message], str | None],
    done: str,
    why_kept: Callable[[Message], str] | None = None,
) -> Iterator[Outcome]:
    """Do something to each message; yield what became of each, and then the wanted messages that are not there.

    `act` returns a message's new file name, "" if it has none, or None if another process was first; `done` says in
    words what it does. `why_kept` returns why it cannot be done, or "": a dry run asks it, too.
    """
    found: set[str] = set()
    for message in messages:
        found |= _names(message)
        yield _outcome(message, partial(act, message), done, which, why_kept(message) if why_kept else "")
    yield from _not_found(context, which, found)


def _outcome(
    message: Message, act: Callable[[], str | None], done: str, which: Selection, why_kept: str = ""
) -> Outcome:
    outcome = partial(Outcome, message.id, message.file)
    if why := which.why_spared(message) or why_kept:
        return outcome(False, why)
    if which.dry_run:
        return outcome(True, f"would be {done}")
    try:
        file = act()
    except DropqError as error:
        return outcome(False, str(error))
    if file is None:
        return outcome(False, f"somebody else took it out of {message.state}/ first")
    return outcome(True, done, file or None)


def _not_found(context: QueueContext, which: Selection, found: set[str]) -> Iterator[Outcome]:
    """Yield an outcome for each name that was asked for and that no message has."""
    missing = [id for id in which.wanted or () if id not in found]
    records = (
        _records_of(context, which.where, missing) if missing and which.where in SETTLED and not which.exact else {}
    )
    for id in missing:
        ids = records.get(id, [])
        hint = f"; {len(ids)} of its records are there, such as {ids[0]}" if ids else ""
        yield Outcome(id, id, False, f"no such message in {which.where}/ of queue {context.name}{hint}")


def _records_of(context: QueueContext, state: str, bundles: Iterable[str]) -> dict[str, list[str]]:
    """Return the ids of the records that lie in a state, by the ids of their bundles, by one listing."""
    found = {bundle: list[str]() for bundle in bundles}
    for message in browse(context, state):
        if (bundle := reassembly.bundle_of(message)) in found and bundle is not None:
            found[bundle].append(message.id)
    return found
