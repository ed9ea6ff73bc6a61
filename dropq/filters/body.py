"""The values that a filter's paths have in a message's body, which is read once, when a path is first looked up.

Invariant: looking up never raises. If a body does not have its type, cannot be read, or is longer than `LIMIT`, every
path is NULL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from dropq.filters.tree import Found, Item, Opaque, Path
from dropq.format.json_body import refuse_constant

#: Bytes of the longest body that a filter reads; parsing takes many times as much memory.
LIMIT = 16 << 20

_OPAQUE = Opaque()


class Body:
    """The body of a message.

    Args:
        read: returns it; if it raises `OSError`, every path is NULL.
        message_type: json; text, which is the value of the path `/`; or binary, in which every path is NULL.
    """

    def __init__(self, read: Callable[[], bytes], message_type: str) -> None:
        self._read = read
        self._message_type = message_type
        self._content: object = None
        self._parsed = False

    def find(self, path: Path) -> Found:
        """Return the value at a path, or the elements of an array there; None if there is nothing.

        A name after an array is looked up in each of its elements; an index selects an element.
        """
        if not self._parsed:
            self._content, self._parsed = self._parse(), True
        found = [self._content]
        for step in path.steps:
            found = list(_step_into(found, step))
        if len(found) == 1 and not isinstance(found[0], list):
            return _item(found[0])
        return tuple(map(_item, _elements(found))) or None

    def _parse(self) -> object:
        if self._message_type == "binary":
            return {}
        try:
            data = self._read()
            if len(data) > LIMIT:
                return None
            if self._message_type == "text":
                return data.decode()
            return json.loads(data, parse_constant=refuse_constant)
        except (OSError, ValueError, RecursionError):  # a number with thousands of digits raises ValueError, too
            return None


def _step_into(found: Iterable[object], step: str | int) -> Iterator[object]:
    if isinstance(step, int):
        yield from (value[step] for value in found if isinstance(value, list) and step < len(value))
    else:
        yield from (value[step] for value in _elements(found) if isinstance(value, dict) and step in value)


def _elements(found: Iterable[object]) -> Iterator[object]:
    """Yield values; in place of an array, yield its elements, at any depth."""
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
    """Return a JSON value as a value of an expression; an integer of more than 64 bits becomes a double."""
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
