"""Manual pages, made from the helps: `python -m dropq.cli.man DIR` writes one for each command into DIR/man1.

A help is written into its page as it is, by a formatter that writes roff in place of text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer._click.formatting import HelpFormatter
from typer.main import get_command

from dropq import __version__

from .main import build

#: Characters that groff would show as others, or read as a command.
_ESCAPES = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
#: A width at which nothing of a help is cut off.
_WIDE = 10_000


class _Roff(HelpFormatter):
    """Takes a help as typer writes it, and has it as roff."""

    def __init__(self) -> None:
        super().__init__(width=_WIDE, max_width=_WIDE)
        self._described = False

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write_heading("Synopsis")
        self._line(f"\\fB{_escaped(prog)}\\fR {_escaped(args)}")

    def write_heading(self, heading: str) -> None:
        self.buffer.append(f".SH {_escaped(heading.upper())}\n")

    def write_paragraph(self) -> None:
        """Begin a paragraph; the text does so by itself."""

    def write_text(self, text: str) -> None:
        """Write paragraphs; the first ones are the description."""
        if not self._described:
            self._described = True
            self.write_heading("Description")
        for paragraph in text.split("\n\n"):
            self.buffer.append(".PP\n")
            self._line(_marked(" ".join(paragraph.split())))

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        for term, meaning in rows:
            self.buffer.append(".TP\n")
            self._line(f"\\fB{_escaped(term.strip())}\\fR")
            self._line(_marked(meaning))

    def write(self, string: str) -> None:
        """Write lines as they are: examples."""
        self.buffer.append(".nf\n")
        for line in string.splitlines():
            self._line(_escaped(line.strip()))
        self.buffer.append(".fi\n")

    def _line(self, text: str) -> None:
        """Write a line of text, which is no request, whatever it begins with."""
        self.buffer.append(f"\\&{text}\n" if text.startswith(".") else f"{text}\n")


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(char, char if char.isascii() else f"\\[u{ord(char):04X}]") for char in text)


def _marked(text: str) -> str:
    """Return text in which what stands between backticks is bold."""
    parts = (_escaped(part) for part in text.split("`"))
    return "".join(f"\\fB{part}\\fR" if number % 2 else part for number, part in enumerate(parts))


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page."""
    top: Any = get_command(build())
    contexts = [top.make_context("dropq", [], resilient_parsing=True)]
    for context in contexts:
        for name, command in getattr(context.command, "commands", {}).items():
            contexts.append(command.make_context(name, [], parent=context, resilient_parsing=True))
        name = context.command_path.replace(" ", "-")
        above = context.parent.command_path.replace(" ", "-") if context.parent else ""
        yield name, _page(name, context, above)


def _page(name: str, context: Any, above: str) -> str:
    roff = _Roff()
    context.command.format_help(context, roff)
    summary = context.command.get_short_help_str(_WIDE)
    begin = f'.TH {_escaped(name.upper())} 1 "" "dropq {__version__}" "dropq"\n'
    begin += f".SH NAME\n{_escaped(name)} \\- {_marked(summary[:1].lower() + summary[1:].rstrip('.'))}\n"
    see = f".SH SEE ALSO\n\\fB{_escaped(above)}\\fR(1)\n" if above else ""
    return begin + roff.getvalue() + see


def main(folder: str) -> None:
    """Write all pages into the folder man1 of a folder, which is made where it is missing."""
    where = Path(folder, "man1")
    where.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (where / f"{name}.1").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dropq.cli.man DIR")
    main(sys.argv[1])
