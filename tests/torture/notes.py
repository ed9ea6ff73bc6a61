"""What processes under torture write down as they go, and what that proves; nothing of dropq is used here.

A line goes to a process's own file, by one call of the system, before a step and after it: a process that was killed
leaves word of what it was in the middle of. Times are the machine's, which is the root's on a local disk.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

#: What ends a hold when it is begun: settling it, leaving the handler that a worker settles for, closing.
_ENDING = ("ack", "nack", "fail", "reject", "leave", "close")
_FOR_EVER = 1 << 63


class Notes:
    """The notes that a process takes."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __call__(self, step: str, *words: object) -> None:
        """Append a line: `try`, `sent`, `ask`, `got`, `half`, `do`, `did`, `lost` or `idle`, and what is to be said."""
        os.write(self._file, f"{time.time_ns()} {' '.join(map(str, (step, *words)))}\n".encode())


@dataclass
class Claim:
    """A message in somebody's hands, as its holder noted it; times are in ns, deadlines in ms."""

    name: str
    owner: str
    #: When the file was renamed, by its ctime, which is never ahead; and when the holder had its body.
    made: int
    got: int
    #: Until when it is held by each deadline that the holder knew, and since when it knew that.
    leases: list[tuple[int, int]]
    #: How it was to be settled, when that began and when it returned; None for not at all.
    by: str | None = None
    began: int | None = None
    settled: int | None = None
    #: When the holder was told that it had lost the claim.
    lost: int | None = None

    @property
    def open(self) -> bool:
        """Whether nothing was done yet to settle it."""
        return self.began is None and self.lost is None

    @property
    def acked(self) -> bool:
        """Whether an ack returned."""
        return self.by == "ack" and self.settled is not None

    @property
    def in_hand(self) -> tuple[int, int]:
        """The time from its body to its settlement, where that succeeded; else no time."""
        return (self.got, self.began) if self.settled and self.began else (0, 0)

    def sure(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield the times in which it was held for certain: not settled, by a living process, on a lease."""
        until = end if self.began is None else min(self.began, end)
        for at, deadline in self.leases:
            yield at, min(until, deadline * 1_000_000 if deadline else _FOR_EVER)


@dataclass
class ProcessNotes:
    """What the notes of one process tell."""

    tried: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    claims: list[Claim] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    #: What it was in the middle of: a call that did not return, or work on a message.
    within: str | None = None
    last: int = 0

    @classmethod
    def read(cls, path: Path) -> ProcessNotes:
        """Read the notes of a process, which may still be taking them."""
        notes = cls()
        held: dict[str, Claim] = {}
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                at, step, *words = line.split()
                notes._step(int(at), step, words, held)
        if notes.within is None and any(claim.open for claim in held.values()):
            notes.within = "holding"
        return notes

    @property
    def leased(self) -> bool:
        """Whether it holds a message on a lease."""
        return any(claim.open and claim.leases[-1][1] for claim in self.claims)

    def _step(self, at: int, step: str, words: list[str], held: dict[str, Claim]) -> None:
        self.last = at
        self.within = {"try": "send", "ask": "receive", "do": words[0] if words else ""}.get(step)
        match step:
            case "try":
                self.tried |= set(words)
            case "sent":
                self.sent |= set(words)
            case "half":
                self.half += words
            case "got":
                name, owner, deadline, made = words
                held[owner] = Claim(name, owner, int(made), at, [(at, int(deadline))])
                self.claims.append(held[owner])
            case "do" if words[0] in _ENDING:
                self.within = None if words[0] == "leave" else words[0]  # what a worker does then, it does not note
                for claim in [held[owner] for owner in words[1:] if owner in held]:
                    claim.by, claim.began = words[0], at
            case "did" if words[0] == "extend" and words[1] in held:
                held[words[1]].leases.append((at, int(words[2])))
            case "did" | "lost":
                for claim in [held[owner] for owner in words[1:] if owner in held]:
                    claim.by = words[0]
                    claim.settled, claim.lost = (at, None) if step == "did" else (None, at)


def broken(claims: Iterable[tuple[Claim, int]]) -> Iterator[tuple[str, str]]:
    """Yield each name of a body about which a promise to its holders was broken, and how.

    Args:
        claims: every claim that was noted, each with the time until which its process lived for certain.
    """
    by_name: dict[str, list[tuple[Claim, int]]] = defaultdict(list)
    for claim, end in claims:
        by_name[claim.name].append((claim, end))
        if early := _lost_early(claim):
            yield claim.name, f"{claim.owner} lost it {early}"
    for name, of_one in by_name.items():
        for one, other in combinations(of_one, 2):
            for what in _quarrel(*one, *other):
                yield name, f"{one[0].owner} and {other[0].owner}: {what}"


def _lost_early(claim: Claim) -> str:
    """Tell how long before its last known deadline a claim was lost; nothing when it was not."""
    deadline = claim.leases[-1][1] * 1_000_000
    if claim.lost is None or 0 < deadline <= claim.lost:
        return ""
    return f"{(deadline - claim.lost) // 1_000_000} ms before its lease had run out" if deadline else "without a lease"


def _quarrel(one: Claim, one_end: int, other: Claim, other_end: int) -> Iterator[str]:
    """Yield how two claims of the same message contradict each other."""
    if one.owner == other.owner:
        return  # a stream's: a later run of it goes on with what an earlier one claimed
    if one.acked and other.acked:
        yield "both acknowledged it"
    for first, second in ((one, other), (other, one)):
        if first.acked and first.settled is not None and second.made > first.settled:
            yield "delivered again after its ack had returned"
    if any(_meet(*a, *b) for a in one.sure(one_end) for b in other.sure(other_end)):
        yield "both held it on leases that had not run out"
    if _meet(*one.in_hand, *other.in_hand):
        yield "both held it at a time, and both settled it"


def _meet(begin: int, end: int, other_begin: int, other_end: int) -> bool:
    return max(begin, other_begin) < min(end, other_end)
