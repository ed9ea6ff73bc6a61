"""The format of .properties files, as Java reads them and DropboxMQ keeps its switches; pure.

Reading never fails: people write these files by hand while senders wait. What is no escape stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"\r\n|\r|\n")
_WHITE = " \t\f"
_ENDS_OPEN = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_ENTRY = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_NAMED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(data: bytes) -> dict[str, str]:
    """Return what a .properties file says, by key; of a key that comes twice the last counts.

    Args:
        data: the file, in UTF-8; what is none is read as Latin-1, Java's own.
    """
    entries = (_ENTRY.match(line) for line in _lines(_text(data)))
    return {_unescaped(entry[1]): _unescaped(entry[2]) for entry in entries if entry is not None}


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _lines(text: str) -> Iterator[str]:
    """Yield lines without comments and empty ones; what ends in a backslash goes on in the next."""
    begun = ""
    for raw in _LINE.split(text):
        line = raw.lstrip(_WHITE)
        if not begun and (not line or line[0] in "#!"):
            continue
        if _ENDS_OPEN.search(line):
            begun += line[:-1]
            continue
        yield begun + line
        begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _NAMED.get(found[2], found[2]), text)
