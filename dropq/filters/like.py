"""The patterns of LIKE: `%` matches any text, `_` any single character.

Invariant: no pattern makes matching slow. The piece between two `%` has a fixed length, so its first match is as good
as any later one, and matching never goes back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern: the pieces between its `%`, each without repetition."""

    pieces: tuple[re.Pattern[str], ...]

    @classmethod
    def compile(cls, text: str, escape: str | None = None) -> Pattern:
        """Compile a pattern, in which the character after `escape`, which is not the last, stands for itself."""
        pieces: list[list[str]] = [[]]
        characters = iter(text)
        for character in characters:
            if character == escape:
                if not (escaped := next(characters, "")):
                    raise ValueError("it ends with the escape character")
                pieces[-1].append(re.escape(escaped))
            elif character == "%":
                pieces.append([])
            else:
                pieces[-1].append("." if character == "_" else re.escape(character))
        pieces[-1].append(r"\Z")
        return cls(tuple(re.compile("".join(piece), re.DOTALL) for piece in pieces))

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches the whole text."""
        first, *others = self.pieces
        match = first.match(text)
        for piece in others:
            match = match and piece.search(text, match.end())
        return match is not None
