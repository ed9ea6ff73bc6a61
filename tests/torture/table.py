"""The table that a torture ends in."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from pathlib import Path

from torture.account import Account

HEADS = ("test", "cases", "kills", "faults", "lost", "doubled")


class NotRun(Exception):
    """Raised by a part that this machine cannot run; it says what is missing, and how to get it."""


@dataclass(frozen=True)
class Options:
    """How a part is to be run."""

    folder: Path  #: where it may make what it likes, on a disk
    seed: int = 1  #: of all that is left to chance
    long: bool = True  #: whether it is run for its figures; else as a part of `make test`, in a few seconds


@dataclass
class Row:
    """What a test came to: how many cases it had, what was done to them, and what became of the messages."""

    test: str
    cases: int = 0
    kills: int = 0
    faults: int = 0
    lost: int = 0
    doubled: int = 0
    #: What else went wrong, a line each; and why it was not run, if it was not.
    wrong: list[str] = field(default_factory=list)
    not_run: str = ""

    @property
    def good(self) -> bool:
        """Whether it was run, and kept every promise."""
        return not (self.lost or self.doubled or self.wrong or self.not_run)

    def count(self, account: Account, where: str) -> None:
        """Take in what became of the messages of a case."""
        self.lost += len(account.lost)
        self.doubled += len(account.doubled)
        if not account.good:
            self.wrong.append(f"{where}: {account}")


def rendered(rows: list[Row]) -> str:
    """Return rows as a table in Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---|" + "---:|" * (len(HEADS) - 1)]
    for row in rows:
        figures = astuple(row)[1 : len(HEADS)]
        cells = [f"NOT RUN: {row.not_run}", *[""] * (len(figures) - 1)] if row.not_run else [f"{n:,}" for n in figures]
        lines.append(f"| {row.test} | {' | '.join(cells)} |")
    return "\n".join(lines)
