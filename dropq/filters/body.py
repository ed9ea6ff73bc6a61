"""What the paths of a filter find in a message's body, which is read when the first of them asks, and once.

Invariant: looking never raises. A body that is not of its type, cannot be read or is longer than `LIMIT` has only
NULLs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from dropq.filters.tree import Found, Item, Opaque, Path

#: Bytes of the longest body that a filter looks into, which takes many times as much memory meanwhile.
LIMIT = 16 << 20

_OPAQUE = Opaque()


class Body:
    """The body of one message.

    Args:
        read: reads it; what it raises of `OSError` makes it a body of NULLs.
        message_type: json; text, of which the path `/` is the whole; or binary, which has nothing to find.
    """

    def __init__(self, read: Callable[[], bytes], message_type: str) -> None:
        self._read = read
        self._message_type = message_type
        self._content: object = None
        self._done = False

    def find(self, path: Path) -> Found:
        """Return the value that a path leads to, or the elements of the array there; None where there is nothing.

        A name goes through an array into each of its elements; a place is one in the array itself.
        """
        if not self._done:
            self._content, self._done = self._parsed(), True
        found = [self._content]
        for step in path.steps:
            found = list(_taken(found, step))
        if len(found) == 1 and not isinstance(found[0], list):
            return _item(found[0])
        return tuple(map(_item, _elements(found))) or None

    def _parsed(self) -> object:
        if self._message_type == "binary":
            return {}
        try:
            data = self._read()
            if len(data) > LIMIT:
                return None
            if self._message_type == "text":
                return data.decode()
            return json.loads(data, parse_constant=_refuse)
        except (OSError, ValueError, RecursionError):  # a ValueError is also a number of thousands of digits
            return None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _taken(found: Iterable[object], step: str | int) -> Iterator[object]:
    if isinstance(step, int):
        yield from (value[step] for value in found if isinstance(value, list) and step < len(value))
    else:
        yield from (value[step] for value in _elements(found) if isinstance(value, dict) and step in value)


def _elements(found: Iterable[object]) -> Iterator[object]:
    """Yield values, and of arrays, however they are nested, what stands in them."""
    waiting = [iter(found)]
    while waiting:
        for value in waiting[-1]:
            if isinstance(value, list):
                waiting.append(iter(value))
                break
            yield value
        else:
            waiting.pop()


def _item(value: object) -> Item:
    """Return a value of JSON as one of the tree; an integer that has more than 64 bits is a double."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if not isinstance(value, int):
        return _OPAQUE
    if -(1 << 63) <= value < 1 << 63:
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
