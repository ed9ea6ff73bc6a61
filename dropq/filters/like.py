"""The patterns of LIKE: `%` matches any text, `_` any single character.

Invariant: no pattern makes matching slow. The piece between two `%` has a fixed length, so its first match is as good
as any later one, and matching never goes back.
"""

from __future__ import annotations

import re


def compile_like(text: str, escape: str | None = None) -> re.Pattern[str]:
    """Compile a pattern, in which the character after `escape` stands for itself; ValueError if there is none."""
    pieces = [""]
    characters = iter(text)
    for character in characters:
        if character == escape:
            if not (escaped := next(characters, "")):
                raise ValueError("it ends with the escape character")
            pieces[-1] += re.escape(escaped)
        elif character == "%":
            pieces.append("")
        else:
            pieces[-1] += "." if character == "_" else re.escape(character)
    pieces[-1] += r"\Z"
    like_pattern = pieces[0] + "".join(f"(?>.*?{piece})" for piece in pieces[1:] if piece)
    return re.compile(like_pattern, re.DOTALL)
