"""What a rule decides, and why: code that acts reads `allowed`, code that explains shows the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a rule lets something happen: a delivery, a move, a send, or that a sweep does its work."""

    allowed: bool
    #: The reason in a word; of a message that waits, that of `Explanation.why`.
    why: str
    #: A sentence about it, with the way out where there is one.
    detail: str = ""
    #: The subscriptions, selectors or receivers that it is for, or that keep it waiting.
    holders: tuple[str, ...] = ()
    #: When it ends by itself, in ms since 1970; 0 where that is not known.
    until: int = 0


def count_of(count: int, noun: str = "message") -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
