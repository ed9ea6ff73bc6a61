"""How text that anybody may have written is shown: no control character of it reaches a terminal or a page.

`unescape` returns what `escape` was given, byte for byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dropq.format.escapes import to_bytes


def escape(text: str) -> str:
    r"""Write what a terminal must not get as `\xNN`, byte by byte, and a backslash as two; `unescape` undoes it."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join("\\\\" if char == "\\" else _visible(char) for char in text)


def unescape(text: str) -> str:
    r"""Undo `escape`; a backslash that begins no escape stays as it is."""
    if "\\" not in text:
        return text

    def byte(found: re.Match[bytes]) -> bytes:
        return bytes([int(found[1], 16)]) if found[1] else b"\\"

    return os.fsdecode(re.sub(rb"\\(?:\\|x([0-9a-fA-F]{2}))", byte, os.fsencode(text)))


def visible(text: str) -> str:
    """Make text safe to show to people: as `escape`, but lines and tabs stay, and so do backslashes."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" else _visible(char) for char in text)


def _visible(char: str) -> str:
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in to_bytes(char))


def reason_text(reason: object) -> str:
    """Write in one line why a message lies in error/ or expired/."""
    if not isinstance(reason, Mapping):
        return ""
    last_words = str(reason.get("stderr") or "").strip().splitlines()[-1:]
    return ": ".join([str(reason[key]) for key in ("reason", "detail") if reason.get(key)] + last_words)
