"""How text is written into a file name, and how a coded name is told from a foreign one."""

from __future__ import annotations

import re
from urllib.parse import quote_plus, unquote_to_bytes

#: The first three fields of a coded name, and the rest. The class may be empty where another field follows it.
CODED = re.compile(r"(-?[0-9]{1,19})\.([^.]+)\.([MBSPOT]|(?=\.+[^.]))(?:\.(.*))?", re.DOTALL)
_BARE = re.compile(r"[\w*-]*", re.ASCII)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def is_coded(text: str) -> bool:
    """Tell whether a file name without a claim's prefix is coded; any other is foreign."""
    found = CODED.fullmatch(text)
    return found is not None and -(1 << 31) <= int(found[1]) < 1 << 31


def encode(text: str) -> str:
    """URL-encode, dots and tildes too; the bytes of an undecodable file name become escapes."""
    if _BARE.fullmatch(text):
        return text
    return quote_plus(to_bytes(text), safe="*").replace(".", "%2E").replace("~", "%7E")


def decode(text: str, errors: str = "strict") -> str:
    """Undo `encode`; text with a malformed escape, or one that is not UTF-8, is returned as it is."""
    if "%" not in text and "+" not in text:
        return text
    try:
        raw = text.replace("+", " ").encode("utf-8", errors)
        return text if _BAD_ESCAPE.search(text) else unquote_to_bytes(raw).decode("utf-8", errors)
    except UnicodeError:
        return text


def to_bytes(text: str) -> bytes:
    """Return the bytes that a file name has for text."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that no file system gave us
        return text.encode("utf-8", "surrogatepass")
