"""Settling without the message object: by a receipt, which proves a claim, or by the id of a message.

An id proves no claim. So it settles a message that the caller holds, that waits, or that a dead consumer held; with
`sublet` leasing it settles any claim. If several messages have the id, as parts of a bundle do, it settles none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import NamedTuple

from dropq.errors import DropqError, LeaseLost, NoSuchMessage
from dropq.format.claims import BodyVersion, Claim, split_receipt
from dropq.format.layout import SETTLED
from dropq.format.message_file import MessageFile
from dropq.lifecycle import early_acks
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.holders import claim_status
from dropq.lifecycle.processing import find_claim, until_found
from dropq.lifecycle.settlement import Claims, Settlement
from dropq.queue.browsing import bearing, find_all
from dropq.queue.message import Message
from dropq.queue.subscription import Subscription, held_here
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.liveness import Signs

#: What an error says of a message that was to be acknowledged by its id.
UNCERTAIN = "`dropq show` shows whether the message was acknowledged"


class _SeveralBearIt(LeaseLost):
    """Raised when an id names no single message; nothing was changed."""


def claimed(context: QueueContext, receipt: str, own: Subscription | None) -> Message:
    """Take up a claim by its receipt, or, if leasing is `sublet`, by an id; LeaseLost if there is none, or several."""
    filename, body = split_receipt(receipt)
    claim = context.sidecars.file(filename).claim
    if claim is None or not claim.ours or "/" in filename or "\0" in receipt:
        return _claimed_by_id(context, receipt, own)
    ours = held_here(context, claim.owner)
    if ours is not None:
        return ours  # the message object that holds it: what settles the one settles the other
    found = find_claim(context, claim.owner)
    settlement: Settlement = Claims(context)
    if found is None and reading.is_there(context.layout.barriers, context.clock):
        from dropq.policies.barrier import find_share

        found, settlement = find_share(context, claim.owner) or (None, settlement)
    if found is None:
        raise LeaseLost(
            f"no claim {claim.owner} on queue {context.name}: somebody else has settled the message or taken it back, "
            "or its lease ran out; nothing was changed"
        )
    found.body = body
    return _message_of(settlement, found)


def _message_of(settlement: Settlement, claim: Claim) -> Message:
    return Message(settlement, "processing", settlement.context.sidecars.file(claim.filename), claim=claim)


def ack(
    context: QueueContext,
    message_id: str,
    *,
    own: Subscription | None,
    subscribe: Callable[[], AbstractContextManager[Subscription]],
    defer: bool,
) -> bool:
    """Acknowledge a message by its id, as `Queue.ack` says; `subscribe` opens what claims a message that waits."""
    if not defer:
        return _acknowledged(context, message_id, own, subscribe)
    early_acks.check(context, message_id)
    early_acks.remember(context, message_id)
    # RACE: a consumer that takes the message from now on finds its ack; a message that came before is found here.
    try:
        done = _acknowledged(context, message_id, own, subscribe, parts=False)
    except _SeveralBearIt:
        early_acks.forget(context, message_id)
        raise
    if done or _is_past_ack(context, message_id):
        early_acks.forget(context, message_id)
    return done


class Delivered(NamedTuple):
    """What tells a message that was delivered before from all others, and the version of its body at that time."""

    id: str
    distinction: str
    body: BodyVersion


def ack_delivered(context: QueueContext, delivered: Delivered, subscription: Subscription) -> bool:
    """Acknowledge a message that was delivered before, if it waits, or somebody holds it; return whether it did.

    `subscription` claims it if it waits. Another message of its id, or the same with another body, stays as it is.
    """
    for state in ("processing", "delayed", "target", "processing"):  # RACE: with sweeps, and then with consumers
        for file in bearing(context, state, delivered.id):
            if file.distinction != delivered.distinction:
                continue
            with suppress(FileNotFoundError, LeaseLost):
                if context.settling.version(f"{context.layout.folder(state)}/{file.filename}") != delivered.body:
                    continue
                if (claim := _taken(context, file, state, subscription)) is not None:
                    _archive(context, claim, file if state != "processing" else None)
                    return True
    return False


def ack_listed(context: QueueContext, message: Message, subscription: Subscription, own: Subscription | None) -> bool:
    """Acknowledge a message that a listing has shown, as an ack by its id does; return False if it moved on since.

    `subscription` claims it if it waits, and `own` may hold it. LeaseLost, with the reason, if it stays.
    """
    state = message.state
    file = context.sidecars.file(message.file, context.layout.folder(state))
    if why := why_kept(context, file, state, own):
        raise LeaseLost(why)
    if state != "processing":
        if (claim := _taken(context, file, state, subscription)) is not None:
            _archive(context, claim, file)
        return claim is not None
    assert file.claim is not None
    (_held_by(own, file.claim) or _message_of(Claims(context), file.claim)).ack()
    return True


def why_kept(context: QueueContext, file: MessageFile, state: str, own: Subscription | None) -> str:
    """Return why an ack of who does not hold a message leaves it where it is; "" if it does not.

    That it cannot be looked at is a reason, too: an ack of many goes on with the others.
    """
    stays, claim = f"it stays in {state}/", file.claim
    try:
        if state != "processing":
            if context.paused:
                return f"{stays}: queue {context.name} is paused"
            if state == "target" and context.settling.settles_at(file):
                return f"{stays}: somebody may still write to it, by settle_time"
        elif claim is None or not claim.ours or claim.of_barrier:
            return f"{stays}: only who holds it can settle it"
        elif _held_by(own, claim) is None and context.config.leasing == "strict" and _if_ended(context, claim) is None:
            return f"{stays}: another consumer holds it, and queue {context.name} has strict leasing"
    except OSError as error:
        return f"{stays}: {describe(error)}"
    return ""


def _held_by(own: Subscription | None, claim: Claim) -> Message | None:
    return None if own is None or own._inherited else own._held.get(claim.owner)


def _archive(context: QueueContext, claim: Claim, waited: MessageFile | None) -> None:
    """Acknowledge a message; if that fails, give back one that `waited`, as nobody else knows of its claim."""
    try:
        Claims(context).archive(claim)
    except (DropqError, OSError):
        if waited is not None:
            delay = max(waited.name.not_before - context.clock.now_ms(), 0) / 1000
            with suppress(DropqError, OSError):  # it was archived, and not synced
                Claims(context).give_back(claim, counted=False, delay=delay)
        raise


def _taken(context: QueueContext, file: MessageFile, state: str, subscription: Subscription) -> Claim | None:
    """Return the claim on a held message, else claim it; None for a barrier, while paused, or after a lost race."""
    if state == "processing":
        return file.claim if file.claim is not None and file.claim.ours and not file.claim.of_barrier else None
    if context.paused:
        return None
    claim = Claims(context).claim(file, next(subscription._owners), 0, state=state)
    if claim is not None:
        claim.body = None  # it was compared before, or nobody has read it
    return claim


def _acknowledged(
    context: QueueContext,
    message_id: str,
    own: Subscription | None,
    subscribe: Callable[[], AbstractContextManager[Subscription]],
    *,
    parts: bool = True,
) -> bool:
    """Acknowledge a message by its id; without `parts`, pass over the parts of a bundle."""
    ack_held = partial(_is_acknowledged_as_held, context, message_id, own, parts=parts)
    if ack_held():
        return True
    if context.paused:
        return False  # nobody claims then
    # RACE: a sweep moves messages from delayed/ to target/: what is missed in the first folder is met in the second.
    for state in ("delayed", "target"):
        waiting = bearing(context, state, message_id)
        if parts and len(waiting) > 1 and any(file.name.first for file in waiting):
            raise _SeveralBearIt(
                f"{len(waiting)} parts of the bundle {message_id!r} wait in {state}/ of queue {context.name}: receive "
                "them, and settle each by its receipt; nothing was changed"
            )
        for file in waiting:
            if file.name.first and not parts:
                continue
            with subscribe() as subscription:
                if (claim := _taken(context, file, state, subscription)) is not None:
                    _archive(context, claim, file)
                    return True
    return until_found(ack_held)  # RACE: a consumer may have claimed it before target/ was listed


def _is_acknowledged_as_held(context: QueueContext, message_id: str, own: Subscription | None, *, parts: bool) -> bool:
    """Acknowledge a held message by its id; return False if it is not held, or another consumer keeps it."""
    try:
        _claimed_by_id(context, message_id, own, unleased=True, parts=parts).ack()
    except _SeveralBearIt:
        raise
    except LeaseLost:
        return False
    return True


def _claimed_by_id(
    context: QueueContext, message_id: str, own: Subscription | None, *, unleased: bool = False, parts: bool = True
) -> Message:
    """Take up a claim by the message's id: the caller's own; where leasing is `sublet`, any consumer's.

    With `unleased`, for an ack, strict leasing also gives up a claim that a sweep would return; and processing/ is
    listed once, as the message may wait. Without `parts`, parts of a bundle are passed over.
    """
    held = own.held if own is not None and not own._inherited else ()
    ours = [message for message in held if message.id == message_id and (parts or message.first_record is None)]
    list_files = partial(bearing, context, "processing", message_id)
    found = list_files() if unleased else until_found(list_files)
    files = [file for file in found if parts or not file.name.first]
    claims = [file.claim for file in files if file.claim is not None and file.claim.ours]
    if len(claims) > 1:
        receipts = ", ".join(claim.filename for claim in claims)
        raise _SeveralBearIt(
            f"{len(claims)} messages that are held on queue {context.name} have the id {message_id!r}: settle each by "
            f"its receipt, {receipts}; nothing was changed"
        )
    if ours:
        return ours[0]
    strict = context.config.leasing == "strict"
    if strict and not unleased:
        raise LeaseLost(
            f"{message_id!r} is no receipt, and queue {context.name} has strict leasing: ids do not settle claims"
        )
    for claim in claims:
        if claim.of_barrier:
            raise LeaseLost(f"message {message_id!r} is a barrier, and several hold it: settle it by receipt")
        now = _if_ended(context, claim) if strict else find_claim(context, claim.owner)
        if now is not None:
            return _message_of(Claims(context), now)
    paused = f", which is paused: what waits stays until `dropq resume {context.name}`" if context.paused else ""
    raise LeaseLost(f"no message {message_id!r} is held on queue {context.name}{paused}; nothing was changed")


def _if_ended(context: QueueContext, claim: Claim) -> Claim | None:
    """Return the claim if its lease ran out, or its holder is dead; else None."""
    if claim_status(claim, Signs(context.layout.consumers), context.clock.now_ms()) not in ("dead", "lapsed"):
        return None
    claim.exact = True  # RACE: a holder that renewed it since the listing keeps it
    return claim


def _is_past_ack(context: QueueContext, message_id: str) -> bool:
    """Return whether an early ack would wait in vain: the message is settled, or another consumer holds it strictly."""
    try:
        state = find_all(context, message_id)[0].state
    except NoSuchMessage:
        return False
    return state in SETTLED or (state == "processing" and context.config.leasing == "strict")
