"""The values that a filter's paths have in a message's body, which is read once, when a path is first looked up.

Invariant: looking up never raises. If a body does not have its type, cannot be read, or is longer than filters read of
its type, every path is NULL.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator

from dropq.filters.message_types import JSON, MessageType
from dropq.filters.tree import Found, Item, Opaque, Path

_OPAQUE = Opaque()


class Body:
    """The body of a message, which a function returns; if that raises `OSError`, every path is NULL."""

    def __init__(self, read: Callable[[], bytes], message_type: MessageType = JSON) -> None:
        #: After a lookup, why the body was not read, though it may be of its type: it is too long, nested too deeply,
        #: or the system refused; "" if it was read.
        self.unread = ""
        self._read = read
        self._type = message_type
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
            return self._item(found[0])
        items = tuple(map(self._item, _elements(found)))
        return None if all(item is None for item in items) else items

    def _parse(self) -> object:
        if self._type.parse is None:
            return {}
        try:
            data = self._read()
            if len(data) > self._type.longest:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            return self._type.parse(data)
        except OSError as error:
            self.unread = error.strerror or str(error)
        except RecursionError:
            self.unread = "Nested too deeply"
        except MemoryError:
            raise
        except Exception:  # parsers of others do not say all that they raise
            pass
        return None

    def _item(self, value: object) -> Item:
        """Return a value as one of an expression; an integer of more than 64 bits becomes a double."""
        if value is None or isinstance(value, bool | str | float):
            return value
        if not isinstance(value, int):
            convert = self._type.values.get(type(value))
            return _OPAQUE if convert is None else self._item(convert(value))
        if -(1 << 63) <= value < 1 << 63:
            return value
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")


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
