"""Settling without the message object: by a receipt, which proves a claim, or by the id of a message.

An id proves no claim. So it settles what the caller holds, what waits, and what a dead consumer held; with `sublet`
leasing it settles any claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from dropq.errors import LeaseLost, NoSuchMessage
from dropq.format.claims import Claim
from dropq.format.layout import SETTLED
from dropq.lifecycle import early_acks
from dropq.lifecycle.claims import find_claim
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transitions import Transitions
from dropq.queue.browsing import bearing, find_all
from dropq.queue.message import Message
from dropq.queue.subscription import Subscription, held_here
from dropq.storage import liveness, reading


def claimed(context: QueueContext, receipt: str, own: Subscription | None) -> Message:
    """Take up a claim by its receipt, or, where leasing is `sublet`, by the message's id.

    Args:
        context: the queue.
        receipt: the claimed file's name, or an id.
        own: the caller's own subscription; None where there is none.

    Raises:
        LeaseLost: there is no such claim.
    """
    claim = context.sidecars.file(receipt).claim
    if claim is None or not claim.ours or "/" in receipt or "\0" in receipt:
        return _claimed_by_id(context, receipt, own)
    ours = held_here(context, claim.owner)
    if ours is not None:
        return ours  # the message object that holds it: what settles the one settles the other
    found, transitions = find_claim(context, claim.owner), Transitions(context)
    if found is None and reading.is_there(context.layout.barriers, context.clock):
        from dropq.policies.barrier import find_share

        found, transitions = find_share(context, claim.owner) or (None, transitions)
    if found is None:
        raise LeaseLost(
            f"no claim {claim.owner} on queue {context.name}: its lease ran out, or it was settled; nothing was changed"
        )
    return _held(transitions, found)


def _held(transitions: Transitions, claim: Claim) -> Message:
    return Message(transitions, "processing", transitions.context.sidecars.file(claim.filename), claim=claim)


def ack(
    context: QueueContext,
    message_id: str,
    *,
    own: Subscription | None,
    subscribe: Callable[[], AbstractContextManager[Subscription]],
    defer: bool,
) -> bool:
    """Acknowledge a message by its id, as `Queue.ack` says.

    Args:
        context: the queue.
        message_id: the message's id.
        own: the caller's own subscription; None where there is none.
        subscribe: opens a subscription that claims the message if it waits.
        defer: remember the ack of a message that is not here yet.
    """
    if not defer:
        return _acknowledged(context, message_id, own, subscribe)
    early_acks.check(message_id)
    early_acks.remember(context, message_id)
    # RACE: a consumer that takes the message from now on finds its ack; a message that came before is found here.
    done = _acknowledged(context, message_id, own, subscribe)
    if done or _is_past_ack(context, message_id):
        early_acks.forget(context, message_id)
    return done


def _acknowledged(
    context: QueueContext,
    message_id: str,
    own: Subscription | None,
    subscribe: Callable[[], AbstractContextManager[Subscription]],
) -> bool:
    try:
        _claimed_by_id(context, message_id, own, unleased=True).ack()
        return True
    except LeaseLost:
        pass  # it is not held, or by another consumer: it may wait
    return _ack_waiting(context, message_id, subscribe)


def _claimed_by_id(
    context: QueueContext, message_id: str, own: Subscription | None, *, unleased: bool = False
) -> Message:
    """Take up a claim by the message's id: the caller's own; where leasing is `sublet`, any consumer's.

    With `unleased`, strict leasing also gives up a claim that a sweep would return.
    """
    for message in own.held if own is not None and not own._inherited else ():
        if message.id == message_id:
            return message
    strict = context.config.leasing == "strict"
    if strict and not unleased:
        raise LeaseLost(
            f"{message_id!r} is no receipt, and queue {context.name} has strict leasing: ids do not settle claims"
        )
    for claim in _claims_of(context, message_id):
        if claim.of_barrier:
            raise LeaseLost(f"message {message_id!r} is a barrier, and several hold it: settle it by receipt")
        found = _if_ended(context, claim) if strict else find_claim(context, claim.owner)
        if found is not None:
            return _held(Transitions(context), found)
    paused = f", which is paused: what waits stays until `dropq resume {context.name}`" if context.paused else ""
    raise LeaseLost(f"no message {message_id!r} is held on queue {context.name}{paused}; nothing was changed")


def _claims_of(context: QueueContext, message_id: str) -> Iterator[Claim]:
    for file in bearing(context, "processing", message_id):
        if file.claim is not None and file.claim.ours:
            yield file.claim


def _if_ended(context: QueueContext, claim: Claim) -> Claim | None:
    """Return the claim if its lease ran out, or its holder is dead; else None."""
    lapsed = 0 < claim.deadline <= context.clock.now_ms()
    if not lapsed and not liveness.is_dead(context.layout.consumers, claim.subscription):
        return None
    claim.exact = True  # RACE: a holder that renewed it since the listing keeps it
    return claim


def _is_past_ack(context: QueueContext, message_id: str) -> bool:
    """Return whether an ack has nothing to wait for: the message is settled, or strictly held by another consumer."""
    try:
        state = find_all(context, message_id)[0].state
    except NoSuchMessage:
        return False
    return state in SETTLED or (state == "processing" and context.config.leasing == "strict")


def _ack_waiting(
    context: QueueContext, message_id: str, subscribe: Callable[[], AbstractContextManager[Subscription]]
) -> bool:
    if context.paused:
        return False  # nobody claims then
    # RACE: a sweep moves messages from delayed/ to target/: what is missed in the first folder is met in the second.
    for state in ("delayed", "target"):
        for file in bearing(context, state, message_id):
            with subscribe() as subscription:
                claim = Transitions(context).claim(file, subscription._next_owner(), 0, state=state)
                if claim is not None:
                    Transitions(context).archive(claim)
                    return True
    return False
