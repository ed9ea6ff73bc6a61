"""How text is written into a file name, and how a coded name differs from a foreign one."""

from __future__ import annotations

import re
from urllib.parse import quote_plus, unquote_to_bytes

#: The largest signed integer of 32 bits: that of a priority, and of a counter in a name.
LARGEST = (1 << 31) - 1

#: The first three fields of a coded name, and the rest. The class may be empty if another field follows.
_CODED = re.compile(r"(-?[0-9]{1,19})\.([^.]+)\.([MBSPOT]|(?=\.+[^.]))(?:\.(.*))?", re.DOTALL)
_BARE = re.compile(r"[\w*-]*", re.ASCII)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def match_coded(text: str) -> re.Match[str] | None:
    """Match a coded file name without a claim prefix: priority, id, class and the rest; None for a foreign name."""
    match = _CODED.fullmatch(text)
    return match if match is not None and is_int32(int(match[1])) else None


def is_coded(text: str) -> bool:
    """Return whether a file name without a claim prefix is coded; any other name is foreign."""
    return match_coded(text) is not None


def is_int32(number: int) -> bool:
    """Return whether a signed integer of 32 bits can hold a number."""
    return -LARGEST - 1 <= number <= LARGEST


def encode(text: str) -> str:
    """URL-encode a text, including dots and tildes; undecodable bytes of a file name become escapes, too."""
    if _BARE.fullmatch(text):
        return text
    return quote_plus(to_bytes(text), safe="*").replace(".", "%2E").replace("~", "%7E")


def decode(text: str, errors: str = "strict") -> str:
    """Undo `encode`; return a text as it is if an escape in it is malformed or not UTF-8."""
    if "%" not in text and "+" not in text:
        return text
    try:
        raw = text.replace("+", " ").encode("utf-8", errors)
        return text if _BAD_ESCAPE.search(text) else unquote_to_bytes(raw).decode("utf-8", errors)
    except UnicodeError:
        return text


def to_bytes(text: str) -> bytes:
    """Return the bytes of a text in a file name."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that does not come from a file name
        return text.encode("utf-8", "surrogatepass")
