"""The format of Java's .properties files, in which DropboxMQ keeps its switches.

Invariant: reading never fails, as people write these files by hand while senders wait. A malformed escape stands for
itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"\r\n|\r|\n")
_WHITE = " \t\f"
_CONTINUES = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_ENTRY = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_NAMED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(data: bytes) -> dict[str, str]:
    """Return the values of a .properties file, in UTF-8 or Java's Latin-1, by key; of a repeated key the last."""
    entries = (_ENTRY.match(line) for line in _lines(_text(data)))
    return {_unescaped(entry[1]): _unescaped(entry[2]) for entry in entries if entry is not None}


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _lines(text: str) -> Iterator[str]:
    """Yield lines without comments and empty lines; a line that ends in a backslash is joined with the next."""
    start = ""
    for raw in _LINE.split(text):
        line = raw.lstrip(_WHITE)
        if not start and (not line or line[0] in "#!"):
            continue
        if _CONTINUES.search(line):
            start += line[:-1]
            continue
        yield start + line
        start = ""
    if start:
        yield start


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _NAMED.get(match[2], match[2]), text)
