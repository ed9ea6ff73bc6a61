"""The patterns of LIKE: `%` stands for any text, `_` for any one character.

Invariant: no pattern can make matching slow. What stands between two `%` has a fixed length, so the first place where
it fits is as good as any later one, and a piece that has its place is never moved again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern: the pieces between its `%`, none of which repeats anything."""

    pieces: tuple[re.Pattern[str], ...]

    @classmethod
    def compile(cls, text: str, escape: str | None = None) -> Pattern:
        """Compile a pattern, in which `escape` takes the meaning from the character after it.

        Raises:
            ValueError: the escape character ends the pattern.
        """
        pieces: list[list[str]] = [[]]
        characters = iter(text)
        for character in characters:
            if character == escape:
                if not (escaped := next(characters, "")):
                    raise ValueError("its last character escapes nothing")
                pieces[-1].append(re.escape(escaped))
            elif character == "%":
                pieces.append([])
            else:
                pieces[-1].append("." if character == "_" else re.escape(character))
        pieces[-1].append(r"\Z")
        return cls(tuple(re.compile("".join(piece), re.DOTALL) for piece in pieces))

    def matches(self, text: str) -> bool:
        """Tell whether the pattern fits the whole text."""
        first, *others = self.pieces
        found = first.match(text)
        for piece in others:
            found = found and piece.search(text, found.end())
        return found is not None
