"""What a rule decides, and why: code that acts reads `allowed`, code that explains shows the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a rule lets something happen.

    Attributes:
        allowed: whether it does.
        why: the reason in a word, as `Explanation.why` has it.
        detail: a sentence about it, with the way out where there is one.
        holders: the subscriptions, selectors or receivers that it is for, or that keep it waiting.
        until: when it ends by itself, in ms since 1970; 0 where that is not known.
    """

    allowed: bool
    why: str
    detail: str = ""
    holders: tuple[str, ...] = ()
    until: int = 0


def count_of(count: int, noun: str = "message") -> str:
    """Return a number of things in words."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
