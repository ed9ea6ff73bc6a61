"""A table on a terminal: what stays whole, what wraps, and what is left out where the terminal is narrow.

The first column says what a row is about: a value that does not fit there has a line of its own, above its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import inf

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

#: Characters that a column of long texts has before less important columns are shown.
TEXT = 24
#: Characters of a value in the first column for which other columns make room.
LONG = 40
#: What is between two columns.
GAP = "  "


@dataclass(eq=False)
class Column:
    """One column: whole values are never broken, and rich's `styles` are for some values."""

    name: str
    cells: list[str]
    whole: bool = False
    right: bool = False
    styles: Mapping[str, str] = field(default_factory=dict)
    width: int = 0

    def __post_init__(self) -> None:
        self.heading = self.name.split("_")  # a line each
        self._widths = list(map(cell_len, self.cells))
        self._heading_width = max(map(cell_len, self.heading))

    def natural(self, limit: float = inf) -> int:
        """Return the width at which nothing wraps, apart from values that are wider than the limit."""
        return max([self._heading_width, *(width for width in self._widths if width <= limit)])

    @cached_property
    def unbroken(self) -> int:
        """The width at which no word breaks."""
        if self.whole:
            return self.natural()
        return max(cell_len(word) for text in (*self.heading, *self.cells) for word in text.split())

    def least(self) -> int:
        """Return the width that the column needs."""
        return self.natural() if self.whole else min(self.unbroken, TEXT)

    def fair(self) -> int:
        """Return the width that the column has before less important columns are shown."""
        return self.natural() if self.whole else min(self.natural(), TEXT)

    def lines(self, text: str, console: Console) -> list[str]:
        """Return the lines of a value."""
        if cell_len(text) <= self.width:
            return [text]
        return [line.plain.rstrip() for line in Text(text).wrap(console, self.width, overflow="fold")]

    def padded(self, text: str, style: str) -> Text:
        """Return a line of a value, as wide as the column."""
        space = " " * (self.width - cell_len(text))
        return Text.assemble(space, (text, style)) if self.right else Text.assemble((text, style), space)


class Table:
    """A table, laid out for the terminal, if it `fits`; where there is no room, `spare` columns are left out.

    The least important of them comes first, and goes first.
    """

    def __init__(self, columns: Sequence[Column], spare: Sequence[str] = ()) -> None:
        self._console = Console(highlight=False)
        self._all = columns
        self._shown = self._chosen(spare)
        self.fits = bool(self._shown)
        self.left_out = [column.name for column in columns if column not in self._shown]

    def _chosen(self, spare: Sequence[str]) -> list[Column]:
        """Return the columns that fit, with their widths; [] if a needed column does not fit."""
        needed = [column for column in self._all if column.name not in spare]
        by_importance = sorted(
            (column for column in self._all if column.name in spare), key=lambda column: -spare.index(column.name)
        )
        for limit in (inf, LONG, 0):  # one long value drives out no column, and ids no column that is needed
            self._limit = limit
            if self._room(needed, Column.least) < 0:
                continue
            shown = list(needed)
            for column in by_importance:
                if self._room([*shown, column], Column.fair) < 0:
                    break
                shown.append(column)
            if limit == inf and len(shown) < len(self._all):
                continue
            shown.sort(key=self._all.index)
            self._widen(shown)
            return shown
        return []

    def _room(self, columns: Sequence[Column], width: Callable[[Column], int]) -> int:
        """Give columns their widths; return how many characters of the terminal are left over."""
        for column in columns:
            first = column is self._all[0] and column.whole
            column.width = column.natural(self._limit) if first else width(column)
        return self._console.width - sum(column.width for column in columns) - len(GAP) * (len(columns) - 1)

    def _widen(self, columns: Sequence[Column]) -> None:
        """Give columns their widths; share what is left among texts: first no word breaks, then nothing wraps."""
        room = self._room(columns, Column.least)
        texts = [column for column in columns if not column.whole]
        for goals in ([column.unbroken for column in texts], [column.natural() for column in texts]):
            while short := [text for text, goal in zip(texts, goals, strict=True) if text.width < goal][:room]:
                for column in short:
                    column.width += 1
                room -= len(short)

    @property
    def heading(self) -> str:
        """The heading, as text."""
        return "\n".join(line.plain for line in self._heading())

    def lines(self, *, heading: bool = True) -> list[str]:
        """Return the table, with its heading or without, as the terminal takes it."""
        with self._console.capture() as captured:
            for line in (*(self._heading() if heading else ()), *self._rows()):
                self._console.print(line, soft_wrap=True)
        return captured.get().splitlines()

    def _heading(self) -> Iterator[Text]:
        height = max((len(column.heading) for column in self._shown), default=0)
        for number in range(height):
            parts = [["", *column.heading][max(number + 1 + len(column.heading) - height, 0)] for column in self._shown]
            yield self._line(parts, ["bold"] * len(parts))

    def _rows(self) -> Iterator[Text]:
        for values in map(list, zip(*(column.cells for column in self._shown), strict=True)):
            styles = [column.styles.get(value, "") for column, value in zip(self._shown, values, strict=True)]
            if self._shown[0].whole and cell_len(values[0]) > self._shown[0].width:
                yield Text(values[0])
                values[0] = ""
            lines = [column.lines(value, self._console) for column, value in zip(self._shown, values, strict=True)]
            for parts in zip_longest(*lines, fillvalue=""):
                yield self._line(parts, styles)

    def _line(self, parts: Sequence[str], styles: Sequence[str]) -> Text:
        padded = (column.padded(*cell) for column, *cell in zip(self._shown, parts, styles, strict=True))
        line = Text(GAP).join(padded)
        line.rstrip()
        return line
