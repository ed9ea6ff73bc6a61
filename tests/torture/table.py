"""The table that a torture ends in."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from torture.account import Account

T = TypeVar("T")

FIGURES = ("cases", "kills", "faults", "lost", "doubled")
HEADS = ("part", "test", *FIGURES, "commit")
PROJECT = Path(__file__).parents[2]
#: Each setting but the first has one in so many of the cases that the first has: all of them would take a day.
SPARSE = 8
#: What the commit of a row bears whose figures are older than the code.
OLDER = " (older)"


class NotRun(Exception):
    """Raised by a part that this machine cannot run; it says what is missing, and how to get it."""


@dataclass(frozen=True)
class Options:
    """How a part is to be run."""

    folder: Path  #: where it may make what it likes, on a disk
    seed: int = 1  #: of all that is left to chance
    long: bool = True  #: whether it is run for its figures; else as a part of `make crashes`, in a few seconds
    first: bool = True  #: whether it is the first setting of several
    share: slice = field(default_factory=lambda: slice(None))  #: which of the cases it has

    def apart(self, settings: Sequence[T]) -> Iterator[tuple[Options, T]]:
        """Yield how the part is run in each setting, in a folder of its own; the first, the longest, in halves."""
        shares = [slice(0, None, 2), slice(1, None, 2), *[slice(None)] * (len(settings) - 1)]
        for number, (share, setting) in enumerate(zip(shares, [settings[0], *settings], strict=True)):
            folder = self.folder / str(number)
            folder.mkdir()
            yield replace(self, folder=folder, first=setting is settings[0], share=share), setting

    def shared(self, cases: Sequence[T]) -> Sequence[T]:
        """Return the share of the cases that it has."""
        return cases[self.share]

    def some(self, chance: random.Random, one_in: int = 1) -> Callable[[list[T]], list[T]]:
        """Return what chooses one case in so many, fewer in each setting but the first, and a single one in short."""
        among = one_in * (1 if self.first else SPARSE)
        return lambda all: chance.sample(all, min(len(all), len(all) // among + 1 if self.long else 1))


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


def summed(rows: list[Row]) -> list[Row]:
    """Return rows with one in place of those whose tests are the same up to a colon: it has the sums of their figures.

    What follows the colon in each is in the sum, too. A row that was not run is in no sum with one that was.
    """
    alike: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.test.partition(": ")[0], row.not_run), []).append(row)
    return [_sum(test, group) for (test, _), group in alike.items()]


def _sum(test: str, rows: list[Row]) -> Row:
    variants = "; ".join(dict.fromkeys(filter(None, (row.test.partition(": ")[2] for row in rows))))
    figures = {figure: sum(getattr(row, figure) for row in rows) for figure in FIGURES}
    wrong = [line for row in rows for line in row.wrong]
    return Row(f"{test}: {variants}" if variants else test, **figures, wrong=wrong, not_run=rows[0].not_run)


def lines_of(part: str, rows: list[Row], commit: str) -> list[str]:
    """Return a part's rows as lines of a table in Markdown."""
    lines = []
    for row in rows:
        figures = [getattr(row, figure) for figure in FIGURES]
        cells = [f"NOT RUN: {row.not_run}", *[""] * (len(figures) - 1)] if row.not_run else [f"{n:,}" for n in figures]
        test = f"{row.test}: **broken**" if row.wrong else row.test
        lines.append(f"| {' | '.join([part, test, *cells, commit])} |")
    return lines


def table_of(lines: list[str]) -> str:
    """Return lines under their heads."""
    return "\n".join([f"| {' | '.join(HEADS)} |", "|---|---|" + "---:|" * len(FIGURES) + "---|", *lines])


def merged(table: str, lines: list[str], parts: tuple[str, ...]) -> list[str]:
    """Return a table's lines with those of other parts in their place: of a part, all lines are new or none is."""
    new = {_part(line) for line in lines}
    kept = [line for line in table.splitlines() if _part(line) in parts and _part(line) not in new]
    return sorted(kept + lines, key=lambda line: parts.index(_part(line)))


def marked(lines: list[str]) -> list[str]:
    """Return rows, with a mark where the code has changed since the commit, or this history does not have it."""
    older = {commit: code_since(commit) != "same" for commit in {commit_of(line) for line in lines}}
    rows = [line.removesuffix(" |").removesuffix(OLDER) for line in lines]
    return [f"{row}{OLDER * older[commit_of(row)]} |" for row in rows]


def commit_of(line: str) -> str:
    """Return the commit that a row names."""
    return line.removesuffix(" |").removesuffix(OLDER).removesuffix("-changed").rpartition(" ")[2]


def code_since(commit: str) -> str:
    """Return whether dropq, as it lies here, is the "same" as at a commit, "changed", or the commit "unknown"."""
    git = ["git", "-C", str(PROJECT), "diff", "--quiet", commit, "--", "dropq"]
    status = subprocess.run(git, capture_output=True, check=False).returncode
    return {0: "same", 1: "changed"}.get(status, "unknown")


def _part(line: str) -> str:
    return line.removeprefix("| ").partition(" ")[0]
