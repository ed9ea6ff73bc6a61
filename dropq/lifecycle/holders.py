"""Whether a claim lasts: its holder is alive, dead or unknown, its lease runs or ran out, or a script made it.

`explain` shows all that is decided here, others ask for the status alone. A sweep acts on the same tests in the same
order: `liveness.dead`, which also keeps a dead holder from coming back, then `Claim.has_lapsed`, then `is_over`.
"""

from __future__ import annotations

from shlex import quote

from dropq.format.claims import Claim
from dropq.format.layout import DEAD_LETTER
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.endings import delivers, returned
from dropq.lifecycle.expiry import has_expired
from dropq.storage.liveness import Signs


def claim_status(claim: Claim, signs: Signs, now: int) -> str:
    """Return the status of a claim of dropq's: `dead`, `lapsed`, `lease`, `held`, `unleased`, or `barrier` in shares.

    RACE: read the signs after the claims. A consumer makes its sign before its first claim, and settles its last claim
    before it removes the sign; so a holder without a sign has no claim by now, or never had a sign.
    """
    if claim.of_barrier:
        return "barrier"
    if signs.is_dead(claim.subscription):
        return "dead"
    if claim.deadline:
        return "lapsed" if claim.has_lapsed(now) else "lease"
    return "held" if signs.is_verifiable(claim.subscription) else "unleased"


def is_over(context: QueueContext, claim: Claim) -> bool:
    """Return whether a claimed message has expired: any sweep takes it from its holder, who finds its lease lost."""
    return has_expired(context, MessageFile(claim.own_name, context.clock.now_ms()))


def decide(context: QueueContext, claim: Claim | None, signs: Signs) -> Decision:
    """Return whether a sweep takes a message from who claimed it, and why; None for a script without a prefix."""
    sweep = f"`dropq sweep {quote(context.name)}"
    if claim is None or not claim.ours:
        who = claim.owner if claim is not None else "a script"
        text = f"{who} took it, and shows no sign of life: only {sweep} --foreign-older-than 2h`"
        does = "moves it to error/" if context.layout.is_topic else "returns it"
        return Decision(False, "script", f"{text} {does}, if it is that old", (who,))
    why, holder = claim_status(claim, signs, context.clock.now_ms()), (claim.subscription,)
    if why in ("dead", "lapsed"):
        text = "its holder is dead" if why == "dead" else "its lease ran out"
        text = f"{text}: any consumer, or {sweep}`, {_end(context, claim)}"
        return Decision(True, why, text, holder, claim.deadline if why == "lapsed" else 0)
    if is_over(context, claim):
        return Decision(True, "expired", f"it has expired: any consumer, or {sweep}`, moves it to expired/", holder)
    if why == "lease":
        return Decision(False, why, "its holder has a lease on it", holder, claim.deadline)
    if why == "unleased":
        text = "shows on another mount alone" if claim.subscription in signs.known else "is not known"
        text = f"it has no lease, and its holder {text}: {sweep} --unleased-older-than 2h`"
        return Decision(False, why, f"{text} returns it, if it is that old", holder)
    return Decision(False, why, "its holder is alive, and has no lease that could run out", holder)


def _end(context: QueueContext, claim: Claim) -> str:
    end = returned(context, claim, counted=delivers(context, claim))
    if not end.reason:
        return "returns it"
    does = "makes a dead letter of it" if end.state == DEAD_LETTER else f"moves it to {end.state}/"
    return f"{does}: {end.reason}"
