"""What administrators do in bulk: requeue, move, expire, purge and prune, one message at a time, an outcome for each.

Each function returns an iterator: what it yielded is done, and what it did not yield was not touched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote

from dropq.carrier.lists import LIST_LENGTH
from dropq.carrier.passages import Passage
from dropq.errors import DropqError, LeaseLost, NoSuchMessage, Unavailable
from dropq.filters import check_chooses
from dropq.format.addresses import check_address
from dropq.format.claims import Claim, split_receipt
from dropq.format.layout import SETTLED, WAITING, WITH_REASON
from dropq.format.transfers import own_name_of
from dropq.lifecycle import dead_letters
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.settlement import Claims
from dropq.queue.browsing import browse
from dropq.queue.message import Message
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.storage.failures import error_context
from dropq.storage.watch import Watch
from dropq.upkeep import joining
from dropq.upkeep.recovery import is_recovering, recover_if_needed
from dropq.upkeep.retention import surplus

#: States that messages can be requeued from.
REQUEUED = (*SETTLED, "processing")
#: Seconds for which a command waits until parts of committed messages have arrived.
PATIENCE = 10.0
#: States that messages can be expired in, in the order in which messages pass through them.
EXPIRED = ("delayed", "target", "processing")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one message: `detail` says it in words, `target` is its file name where it went."""

    id: str
    name: str
    ok: bool
    detail: str
    target: str | None = None


def select(
    context: QueueContext,
    state: str,
    *,
    ids: Iterable[str] | None = None,
    filter: str | None = None,
    older_than: float | None = None,
) -> Iterator[Message]:
    """Yield the messages of a state, in order of delivery.

    Args:
        context: the queue.
        state: the folder.
        ids: only those of these message ids, file names or receipts.
        filter: only those that match.
        older_than: only those that came to this state more than this many seconds ago.
    """
    if filter is not None:
        check_chooses(filter)
    if state == "target":
        _wait_for_recovery(context)
    with error_context("no message was touched"):
        if reading.exists(context.layout.staged):
            _roll_forward(context)
    wanted = _wanted(ids)
    for message in list(browse(context, state, filter)):
        if wanted is not None and wanted.isdisjoint((message.id, message.name, message.file)):
            continue
        with error_context("this message and those after it were not touched"):
            if older_than is not None and context.age_ms(message.path) <= older_than * 1000:
                continue
        yield message


def _wanted(ids: Iterable[str] | None) -> KeysView[str] | None:
    """Return the ids and file names that are asked for, each once; a receipt is asked for by the claim's file name."""
    return None if ids is None else dict.fromkeys(split_receipt(id)[0] for id in ids).keys()


def _roll_forward(context: QueueContext) -> None:
    """Let parts for the queue itself arrive first, as they are among what is chosen from.

    Raises:
        Unavailable: one could not be moved for 10 s.
    """
    until = time.monotonic() + PATIENCE
    while keeps := fan_out.sweep(context).keeps:
        if (left := until - time.monotonic()) <= 0:
            raise Unavailable(f"{keeps}; try again once that is mended; no message was touched")
        Watch(context.layout.staged).wait(min(left, PATIENCE / 5))


def requeue(
    context: QueueContext,
    *,
    ids: Iterable[str] | None = None,
    state: str = "error",
    filter: str | None = None,
    to: QueueContext | None = None,
    keep_expiration: bool = False,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Move messages back into target/ as if they were new: counters and the queue's clock start again.

    Args:
        context: the queue that they lie in.
        ids, filter: which; without both, all of the state.
        state: error, expired, processed, or processing, whose holders lose their claims.
        to: the queue that they go to; None is this one.
        keep_expiration: keep their own expiration.
        dry_run: only say what would be done.

    Raises:
        ValueError: messages of that state cannot be requeued.
    """
    if state not in REQUEUED:
        way = _instead_of_requeue(context, state, to) if state in WAITING else ""
        raise ValueError(f"state {state!r}: messages are requeued from {', '.join(REQUEUED)}{way}")
    goal = to or context
    passage = Passage(context, goal)
    act = partial(_requeue, Moves(context), goal=goal, keep_expiration=keep_expiration)
    return _carried(passage, _each(context, state, ids, filter, act, f"requeued to {goal.name}", dry_run))


def _instead_of_requeue(context: QueueContext, state: str, to: QueueContext | None) -> str:
    """Return what takes messages out of a state in which they wait, as an error says it."""
    queue = quote(context.name)
    if to is not None:
        return f"; `dropq move {queue} {quote(to.name)} --state {state}` moves what waits"
    if count := letters_in(context, state):
        letters = "1 dead letter waits" if count == 1 else f"{count} dead letters wait"
        where = "" if state == "target" else f" --state {state}"
        return (
            f"; {letters} in {state}/ of queue {context.name}: `dropq requeue {queue} --to-origin{where}` moves such "
            "back to where they came from"
        )
    return f"; what lies in {state}/ of queue {context.name} waits to be delivered already"


def _requeue(moves: Moves, message: Message, goal: QueueContext, *, keep_expiration: bool) -> str | None:
    def act(folder: str) -> str | None:
        return moves.requeue(folder, message.file, goal, keep_expiration=keep_expiration)

    return _without_reason(message, act)


def _without_reason(message: Message, act: Callable[[str], str | None]) -> str | None:
    """Move a message out of the folder of its state by `act`, and remove its reason; return what `act` does."""
    context, state = message.context, message.state
    inode = reading.inode_or_none(message.path) if state in WITH_REASON else None
    file = act(context.layout.folder(state))
    if file is not None and inode is not None:
        context.reasons.drop(state, message.file, inode)
    return file


def requeue_whole(
    context: QueueContext,
    *,
    ids: Iterable[str] | None = None,
    state: str = "error",
    filter: str | None = None,
    keep_expiration: bool = False,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Put the parts of each bundle together, and requeue it as one message; requeue all else as `requeue` does.

    What was a record of a bundle belongs to it, too. A part that is alone is requeued as it is. Another bundle may have
    an id that is not a generated one: there, parts belong together that have waited since the same time.

    Args:
        context: the queue that they lie in.
        ids, filter: which; without both, all of the state. The id of a bundle chooses its records, too.
        state: error, expired or processed.
        keep_expiration: keep their own expirations, of a bundle that of its first part.
        dry_run: only say what would be done.

    Raises:
        ValueError: parts of that state cannot be put together.
    """
    if state not in SETTLED:
        raise ValueError(f"state {state!r}: parts of a bundle are put together from {', '.join(SETTLED)}")
    return _requeue_whole(context, ids, state, filter, keep_expiration, dry_run)


def _requeue_whole(
    context: QueueContext,
    ids: Iterable[str] | None,
    state: str,
    filter: str | None,
    keep_expiration: bool,
    dry_run: bool,
) -> Iterator[Outcome]:
    with error_context("no message was requeued"):
        joining.sweep(context)  # what a process that died was putting together is there again
    wanted, found = _wanted(ids), set[str]()
    bundles = dict[tuple[str | None, str], list[Message]]()
    for message in select(context, state, filter=filter):
        bundle = joining.bundle_of(message)
        known = {message.id, message.name, message.file, bundle or message.id}
        if wanted is None or not known.isdisjoint(wanted):
            found |= known
            bundles.setdefault((bundle, joining.came(message) if bundle else message.file), []).append(message)
    act = partial(_requeue, Moves(context), goal=context, keep_expiration=keep_expiration)
    done = f"requeued to {context.name}"
    for (bundle, _), parts in bundles.items():
        if bundle and len(parts) > 1:
            yield _put_together(context, state, bundle, parts, keep_expiration=keep_expiration, dry_run=dry_run)
        else:
            yield from each(context, state, parts, wanted=None, act=act, done=done, dry_run=dry_run)
    missing = [id for id in wanted or () if id not in found]
    yield from each(context, state, [], wanted=missing, act=act, done=done, dry_run=dry_run)


def _put_together(
    context: QueueContext,
    state: str,
    bundle: str,
    parts: list[Message],
    *,
    keep_expiration: bool,
    dry_run: bool,
) -> Outcome:
    done = f"requeued to {context.name} as one message of {len(parts)} parts"
    if dry_run:
        return Outcome(bundle, parts[0].file, True, f"would be {done}")
    try:
        file = joining.join(context, state, parts, keep_expiration=keep_expiration)
    except DropqError as error:
        return Outcome(bundle, parts[0].file, False, str(error))
    return Outcome(bundle, parts[0].file, True, done, file)


def requeue_to_origin(
    context: QueueContext,
    *,
    ids: Iterable[str] | None = None,
    state: str = "target",
    filter: str | None = None,
    keep_expiration: bool = False,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Move each dead letter back into target/ of the queue that it came from, as `requeue` does.

    There it is no dead letter any more. A letter stays whose queue is not there, or has another dead-letter queue. What
    is no dead letter stays, too, and is passed over unless its id was given.

    Args:
        context: the queue that they lie in.
        ids, filter: which; without both, all of the state.
        state: as for `requeue`, or target or delayed.
        keep_expiration: keep their own expiration, which they may have got in the queue that they lie in.
        dry_run: only say what would be done.

    Raises:
        ValueError: messages of that state cannot be requeued.
    """
    if state not in (*REQUEUED, *WAITING):
        raise ValueError(f"state {state!r}: dead letters are requeued from {', '.join((*REQUEUED, *WAITING))}")
    return _requeue_to_origin(context, ids, state, filter, keep_expiration, dry_run)


def _requeue_to_origin(
    context: QueueContext,
    ids: Iterable[str] | None,
    state: str,
    filter: str | None,
    keep_expiration: bool,
    dry_run: bool,
) -> Iterator[Outcome]:
    wanted, found = _wanted(ids), set[str]()
    run, moves = partial(each, context, state, dry_run=dry_run), Moves(context)
    for message, goal in _each_with_origin(context, state, filter, wanted):
        found |= {message.id, message.name, message.file}
        if isinstance(goal, DropqError):
            yield Outcome(message.id, message.file, False, f"it stays in {state}/ of {context.name}: {goal}")
            continue
        passage = Passage(context, goal)
        act = partial(_requeue, moves, goal=goal, keep_expiration=keep_expiration)
        yield from _carried(passage, run([message], wanted=None, act=act, done=f"requeued to {goal.name}"))
    missing = [id for id in wanted or () if id not in found]
    yield from run([], wanted=missing, act=lambda message: None, done="")


def _each_with_origin(
    context: QueueContext, state: str, filter: str | None, wanted: KeysView[str] | None
) -> Iterator[tuple[Message, QueueContext | DropqError]]:
    """Yield the dead letters, or the messages that are wanted, with the queue that each goes back to, or why not."""
    origins = dict[str, QueueContext]()
    for message in select(context, state, ids=wanted, filter=filter):
        if wanted is not None or _is_letter(message):
            try:
                goal = _origin(message, origins)
                dead_letters.check_origin(context, goal)
            except DropqError as error:
                yield message, error
            else:
                yield message, goal


def origins_in(
    context: QueueContext, state: str, filter: str | None = None, ids: Iterable[str] | None = None
) -> Counter[str]:
    """Return how many letters `requeue_to_origin` would put back into which queue; by "" those that stay."""
    found = _each_with_origin(context, state, filter, _wanted(ids))
    return Counter("" if isinstance(goal, DropqError) else goal.name for _, goal in found)


def requeued_from(state: str | None, *, to_origin: bool) -> str:
    """Return the state that messages are requeued from: target for dead letters, which wait there, else error."""
    if state is not None:
        return state
    return "target" if to_origin else "error"


def letters_in(context: QueueContext, state: str, filter: str | None = None, ids: Iterable[str] | None = None) -> int:
    """Return how many dead letters a queue has in a state, of those that match a filter, or have one of these ids."""
    wanted = None if ids is None else set(ids)
    return sum(
        _is_letter(message) and (wanted is None or not wanted.isdisjoint({message.id, message.name, message.file}))
        for message in browse(context, state, filter)
    )


def _is_letter(message: Message) -> bool:
    return message.dead_letter_reason is not None and message.origin not in (None, message.context.name)


def _origin(message: Message, opened: dict[str, QueueContext]) -> QueueContext:
    """Open the queue that a dead letter came from, unless it is open already.

    Raises:
        NoSuchMessage: it is no dead letter.
        DropqError: its queue cannot be opened; the error names it.
    """
    origin = message.origin
    if origin is None or not _is_letter(message):
        raise NoSuchMessage("it is no dead letter")
    if origin not in opened:
        check_address(origin)  # it is read from a name, which anybody may have written
        opened[origin] = open_queue(message.context.root, origin)
    return opened[origin]


def move(
    context: QueueContext,
    to: QueueContext,
    *,
    ids: Iterable[str] | None = None,
    state: str = "target",
    filter: str | None = None,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Move messages into another queue's target/, with their counters and expirations as they are.

    Where that queue lies on another file system, messages are reported once they are there, many at a time.
    """
    passage, moves = Passage(context, to), Moves(context)

    def act(message: Message) -> str | None:
        return _without_reason(message, lambda folder: moves.move(folder, message.file, to))

    return _carried(passage, _each(context, state, ids, filter, act, f"moved to {to.name}", dry_run))


def _carried(passage: Passage, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
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
            yield from _arrived(passage, on_the_way)
            on_the_way = []
    yield from _arrived(passage, on_the_way)


def _arrived(passage: Passage, outcomes: list[Outcome]) -> Iterator[Outcome]:
    why = passage.carry() if outcomes else ""
    for outcome in outcomes:
        given = outcome.target or ""
        if passage.has_left(given):
            yield replace(outcome, target=passage.arrived.get(given))
        else:
            detail = f"it is on its way to another file system, and `dropq sweep` of this queue goes on with it: {why}"
            yield replace(outcome, ok=False, detail=detail, target=None)


def expire(
    context: QueueContext,
    *,
    ids: Iterable[str] | None = None,
    state: str | None = None,
    filter: str | None = None,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Move messages that wait, are delayed or are held to expired/; their holders lose their claims.

    Args:
        context: the queue.
        ids, filter: which; without both, all of the state.
        state: target, delayed or processing; None for all three.
        dry_run: only say what would be done.

    Raises:
        ValueError: messages of that state cannot be expired.
    """
    states = EXPIRED if state is None else (state,)
    if not set(states) <= set(EXPIRED):
        raise ValueError(f"state {state!r}: messages are expired in {', '.join(EXPIRED)}")
    wanted = _wanted(ids)
    messages = [message for one in states for message in select(context, one, ids=wanted, filter=filter)]

    def act(message: Message) -> str | None:
        return "" if _expire(context, message) else None

    return each(context, "/, ".join(states), messages, wanted=wanted, act=act, done="expired", dry_run=dry_run)


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


def purge(
    context: QueueContext,
    *,
    ids: Iterable[str] | None = None,
    state: str = "target",
    filter: str | None = None,
    older_than: float | None = None,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Remove messages for good."""

    def act(message: Message) -> str | None:
        return "" if Moves(context).remove(state, message.file) else None

    return _each(context, state, ids, filter, act, "removed", dry_run, older_than)


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
        for file in surplus(context, state=state, keep_age=keep_age, keep_count=keep_count, remove=not dry_run):
            if file is not None:
                yield Outcome(Message(Claims(context), state, context.sidecars.file(file)).id, file, True, done)


def _wait_for_recovery(context: QueueContext) -> None:
    """Let a new subscription be filled first: nothing leaves its target/ before that.

    Raises:
        Unavailable: another process has been filling it for too long.
    """
    recover_if_needed(context)
    if is_recovering(context):
        raise Unavailable(
            f"{context.name} is being filled with what its topic archived: try again once that is done; nothing was "
            "changed"
        )


def _each(
    context: QueueContext,
    state: str,
    ids: Iterable[str] | None,
    filter: str | None,
    act: Callable[[Message], str | None],
    done: str,
    dry_run: bool,
    older_than: float | None = None,
) -> Iterator[Outcome]:
    wanted = _wanted(ids)
    messages = select(context, state, ids=wanted, filter=filter, older_than=older_than)
    return each(context, state, messages, wanted=wanted, act=act, done=done, dry_run=dry_run)


def each(
    context: QueueContext,
    state: str,
    messages: Iterable[Message],
    *,
    wanted: Iterable[str] | None,
    act: Callable[[Message], str | None],
    done: str,
    dry_run: bool,
) -> Iterator[Outcome]:
    """Do something to each message; yield what became of each, and then the wanted messages that are not there.

    Args:
        context, state: where the messages are looked for.
        messages: the messages.
        wanted: the ids, file names or receipts that were asked for; None if no certain ones were.
        act: does it; returns the message's file name where it went, or None if another process was first.
        done: what was done, in words.
        dry_run: only say what would be done.
    """
    found: set[str] = set()
    for message in messages:
        found |= {message.id, message.name, message.file}
        if dry_run:
            yield Outcome(message.id, message.file, True, f"would be {done}")
            continue
        try:
            file = act(message)
        except DropqError as error:
            yield Outcome(message.id, message.file, False, str(error))
            continue
        if file is None:
            yield Outcome(message.id, message.file, False, f"somebody else took it out of {message.state}/ first")
        else:
            yield Outcome(message.id, message.file, True, done, file or None)
    missing = [id for id in wanted or () if id not in found]
    records = _records_of(context, state, missing) if missing and state in SETTLED else {}
    for id in missing:
        ids = records.get(id, [])
        hint = f"; {len(ids)} of its records are there, such as {ids[0]}" if ids else ""
        yield Outcome(id, id, False, f"no such message in {state}/ of queue {context.name}{hint}")


def _records_of(context: QueueContext, state: str, bundles: Iterable[str]) -> dict[str, list[str]]:
    """Return the ids of the records that lie in a state, by the ids of their bundles, by one listing."""
    found = {bundle: list[str]() for bundle in bundles}
    for message in browse(context, state):
        if (bundle := joining.bundle_of(message)) in found and bundle is not None:
            found[bundle].append(message.id)
    return found
