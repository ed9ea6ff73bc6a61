"""The operators of AMPS, which take arrays: a comparison is true if it is true for any element.

Invariant: evaluating never raises. TRUE is 1 and FALSE is 0. An empty string counts as NULL, and in comparisons so does
NaN, what no number is. Strings have an order; beside a number, a string is the number that it spells, or else greater
than any number. Arithmetic takes the first element of an array.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable

from dropq.filters import tree
from dropq.filters.regex import Regex
from dropq.filters.tree import Found, Item, Opaque, Value, single

#: Pairs of elements that a comparison of two arrays may take; with more pairs it is unknown.
PAIRS = 1_000_000
#: Characters of the longest string that counts as a number.
WIDTH = 64
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_ORDER = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (1, 0), "=": (0,), "<>": (-1, 1)}


def number(found: Found) -> int | float | None:
    """Return the value to calculate with: TRUE is 1, FALSE is 0, a string the number that it spells, or else NaN."""
    value = single(found)
    if not isinstance(value, str):
        return int(value) if isinstance(value, bool) else value
    if len(value) > WIDTH or not _NUMBER.fullmatch(value):
        return math.nan if value else None
    try:
        exact = int(value)
    except ValueError:
        return float(value)
    return exact if -(1 << 63) <= exact < 1 << 63 else float(value)


def as_text(found: Found) -> str | None:
    """Return the value as a string: a number as Python writes it, TRUE as 1."""
    value = single(found)
    return value if value is None or isinstance(value, str) else str(number(value))


def is_null(found: Found) -> bool:
    """IS NULL: never unknown; an array is NULL if all of its elements are."""
    return all(item in (None, "") for item in _items(found))


def is_unknown(item: Item) -> bool:
    """Return whether comparisons with a value are unknown: with NULL, an empty string and NaN."""
    return item in (None, "") or item != item


def is_nan(found: Found) -> bool:
    """IS NAN: whether it is a number that is none, such as the sum of a number and a string that spells none."""
    value = single(found)
    return value != value


def truth(found: Found) -> bool | None:
    """Return a value as a condition: a number is true unless it is 0; what is no number is unknown."""
    return _any(map(_truth, _items(found)))


def compare(symbol: str, left: Found, right: Found) -> bool | None:
    """Compare with =, <>, <, <=, > or >=."""
    lefts, rights = _items(left), _items(right)
    if len(lefts) * len(rights) > PAIRS:
        return None
    return _any(_compare(symbol, left, right) for left in lefts for right in rights)


def between(found: Found, low: Found, high: Found) -> bool | None:
    """BETWEEN: whether an element is within the bounds, or equals one of them."""
    return _any(_is_within(item, single(low), single(high)) for item in _items(found))


class Members:
    """The literals of an IN, in sets, so that a list of any length is looked up at once."""

    def __init__(self, literals: Collection[Value]) -> None:
        self._strings = frozenset(value for value in literals if isinstance(value, str))
        self._numbers = _Numbers(value for value in literals if not isinstance(value, str))
        self._spelt = _Numbers(literals)

    def has(self, item: Item) -> bool | None:
        """Return whether a value equals a literal; None, unknown, for NULL."""
        if is_unknown(item):
            return None
        if isinstance(item, str):  # two strings are compared as strings
            return item in self._strings or self._numbers.has(number(item))
        return not isinstance(item, Opaque) and self._spelt.has(number(item))


class _Numbers:
    """The numbers among some values."""

    def __init__(self, values: Iterable[Value]) -> None:
        numbers = [number(value) for value in values]
        self._integers = frozenset(value for value in numbers if isinstance(value, int))
        self._doubles = frozenset(value for value in numbers if isinstance(value, float) and value == value)
        self._rounded = self._doubles | frozenset(map(float, self._integers))

    def has(self, value: int | float | None) -> bool:
        """Return whether a number equals one of them: as doubles, if one of the two is a double."""
        if isinstance(value, int):
            return value in self._integers or float(value) in self._doubles
        return value in self._rounded


def within(members: Members, found: Found, *others: Found) -> bool | None:
    """IN: whether an element equals a literal, or the value of one of the other expressions in the list."""
    return _any([_any(map(members.has, _items(found))), *(compare("=", found, other) for other in others)])


def like(regex: Regex, found: Found) -> bool | None:
    """LIKE: whether a value has a match of the expression; unknown if the search would take too long."""
    items = _items(found)
    if regex.takes_long(sum(len(item) for item in items if isinstance(item, str))):
        return None
    return _any_text(regex.matches, items)


def affixed(test: Callable[[str, tuple[str, ...]], bool], strings: tuple[str, ...], found: Found) -> bool | None:
    """BEGINS WITH and ENDS WITH: whether a value begins, or ends, with one of the strings."""
    return _any_text(lambda text: test(text, strings), _items(found))


def _items(found: Found) -> tuple[Item, ...]:
    return found if isinstance(found, tuple) else (found,)


def _any(truths: Iterable[bool | None]) -> bool | None:
    """Return the OR of truth values: true if any is true, else unknown if any is unknown."""
    result: bool | None = False
    for truth in truths:
        if truth:
            return True
        if truth is None:
            result = None
    return result


def _truth(item: Item) -> bool | None:
    value = number(item)
    return None if value is None or math.isnan(value) else value != 0


def _compare(symbol: str, left: Item, right: Item) -> bool | None:
    if is_unknown(left) or is_unknown(right):
        return None
    if isinstance(left, str) and isinstance(right, str):
        return (left > right) - (left < right) in _ORDER[symbol]
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        return False
    first, second = number(left), number(right)
    if first != first or second != second:  # one is a string that spells no number
        return isinstance(left, str) - isinstance(right, str) in _ORDER[symbol]
    return tree.compare(symbol, first, second)


def _is_within(item: Item, low: Value, high: Value) -> bool | None:
    above, below = _compare(">=", item, low), _compare("<=", item, high)
    if above is False or below is False:
        return False
    return above and below


def _any_text(test: Callable[[str], bool], items: Iterable[Item]) -> bool | None:
    return _any(
        False if isinstance(item, Opaque) else test(shown) if (shown := as_text(item)) else None for item in items
    )
