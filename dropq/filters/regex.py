"""The regular expressions of AMPS's LIKE, in linear time: RE2's, which has neither lookaround nor backreferences.

Invariant: no expression and no text can make matching take long. The time is at the most the size of the one times
the size of the other, so what is too much of that is not tried. This is the only importer of re2.
"""

from __future__ import annotations

import logging
from typing import Any

from dropq.errors import Unavailable

log = logging.getLogger("dropq")

#: Steps that matching may take, some nanoseconds each: instructions of the compiled expression times characters.
STEPS = 200_000_000
#: Bytes that a compiled expression may take; RE2's own limit lets one grow to hundreds of thousands of instructions.
MEMORY = 1 << 20


class Regex:
    """A compiled regular expression.

    Args:
        pattern: the expression; `(?i)` in front makes upper and lower case alike.

    Raises:
        ValueError: RE2 does not take it, and says why.
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
            raise ValueError("half of a surrogate pair is no character") from None
        except re2.error as error:
            raise ValueError(_reason(error)) from None
        self._size: int = max(self._compiled.programsize, 1)
        self._told = False

    def takes_long(self, length: int) -> bool:
        """Tell whether to look through so many characters may take longer than anybody waits; warns of the first."""
        long = length * self._size > STEPS
        if long and not self._told:
            self._told = True
            log.warning(
                "a LIKE is unknown of texts of more than %d characters, as here of %d: simplify its expression %r",
                STEPS // self._size, length, self._compiled.pattern[:100],
            )  # fmt: skip
        return long

    def fits(self, text: str) -> bool:
        """Tell whether the expression fits somewhere in the text."""
        try:
            return self._compiled.search(text) is not None
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write
            return self._compiled.search(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")) is not None


def _re2() -> Any:
    try:
        import re2
    except ImportError as missing:
        raise Unavailable(
            "LIKE in a filter over bodies needs the package google-re2, which is not installed for this Python: "
            "install dropq with its extra `amps`"
        ) from missing
    return re2


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
