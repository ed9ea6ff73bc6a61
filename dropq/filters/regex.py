"""The regular expressions of AMPS's LIKE and REGEXP_REPLACE: RE2's, with neither lookaround nor backreferences.

Invariant: no expression and no text makes matching slow. RE2's time for a search is at most proportional to the size of
the expression times the length of the text, and above a limit nothing is searched. Only this module imports re2.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from dropq.errors import Missing
from dropq.filters.tree import LONGEST

log = logging.getLogger("dropq")

#: Steps that matching may take, some nanoseconds each: instructions of the compiled expression times characters.
STEPS = 200_000_000
#: Bytes that a compiled expression may take; RE2's own limit allows hundreds of thousands of instructions.
MEMORY = 1 << 20
#: What RE2 complains of where an expression has lookaround or a backreference.
_BACKTRACKING = re.compile(r"\(\?|\\[1-9gk]")


class Regex:
    """A compiled regular expression, which ignores case after `(?i)`.

    Raises:
        ValueError: RE2 refuses the expression; the error says why.
        Unavailable: RE2 is not installed.
    """

    def __init__(self, pattern: str) -> None:
        re2 = _re2()
        options = re2.Options()
        options.log_errors = False  # it would write to stderr
        options.max_mem = MEMORY
        options.never_capture = True
        try:
            self._compiled = re2.compile(pattern, options)
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair is not a character") from None
        except re2.error as error:
            raise ValueError(_reason(error)) from None
        self._size: int = max(self._compiled.programsize, 1)
        self._warned = False

    def takes_long(self, length: int, searches: int = 1) -> bool:
        """Return whether searches through `length` characters may take more than `STEPS`; log a warning once."""
        long = length * searches * self._size > STEPS
        if long and not self._warned:
            self._warned = True
            log.warning(
                "LIKE is unknown, and REGEXP_REPLACE NULL, for a text of %d characters (searches: %d) and a regular "
                "expression of this size, %d: simplify %r",
                length, searches, self._size, self._compiled.pattern[:100],
            )  # fmt: skip
        return long

    def matches(self, text: str) -> bool:
        """Return whether the text has a match of the expression."""
        try:
            return self._compiled.search(text) is not None
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write
            return self._compiled.search(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")) is not None

    def replaced(self, text: str, new: str) -> str | None:
        """Return the text with `new`, as it is written, for each match; None if that takes too long or is too long."""
        if self.takes_long(len(text)):
            return None
        pieces: list[str] = []
        end, length = 0, len(text)
        for searches, match in enumerate(self._compiled.finditer(text), 2):
            length += len(new) - match.end() + match.start()
            if length > LONGEST or self.takes_long(len(text), searches):
                return None
            pieces += text[end : match.start()], new
            end = match.end()
        return "".join((*pieces, text[end:]))


def _re2() -> Any:
    try:
        import re2
    except ImportError as missing:
        raise Missing(
            "regular expressions (LIKE in a filter over bodies, and underlying_topic) need the package google-re2, "
            "which is not installed for this Python: install dropq with its extra `amps`: pip install 'dropq[amps]'"
        ) from missing
    return re2


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    shown = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    if _BACKTRACKING.search(shown):
        shown += "; RE2 has neither lookaround nor backreferences, so that no expression can hang a consumer"
    return shown
