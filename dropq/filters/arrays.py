"""The operators of AMPS, which take arrays: a comparison is true if it is true for any element.

Invariant: evaluating never raises. TRUE is 1 and FALSE is 0. Strings have an order. No comparison of values of
different kinds is true. Arithmetic takes the first element of an array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dropq.filters import tree
from dropq.filters.regex import Regex
from dropq.filters.tree import Found, Item, Opaque, Value, single

#: Pairs of elements that a comparison of two arrays may take; with more pairs it is unknown.
PAIRS = 1_000_000
_ORDER = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (1, 0), "=": (0,), "<>": (-1, 1)}


def number(found: Found) -> Value:
    """Return the value to calculate with: TRUE is 1, FALSE is 0."""
    value = single(found)
    return int(value) if isinstance(value, bool) else value


def truth(found: Found) -> bool | None:
    """Return a value as a condition: a number is true unless it is 0, a string or an object is unknown."""
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

    def __init__(self, literals: Iterable[Value]) -> None:
        values = [int(value) if isinstance(value, bool) else value for value in literals]
        self._strings = frozenset(value for value in values if isinstance(value, str))
        self._integers = frozenset(value for value in values if isinstance(value, int))
        self._doubles = frozenset(value for value in values if isinstance(value, float))
        self._rounded = self._doubles | frozenset(map(float, self._integers))

    def has(self, item: Item) -> bool | None:
        """Return whether a value equals a literal; None, unknown, for NULL."""
        if item is None:
            return None
        if isinstance(item, str):
            return item in self._strings
        if isinstance(item, float):
            return item in self._rounded
        return isinstance(item, int) and (int(item) in self._integers or float(item) in self._doubles)


def within(members: Members, found: Found, *others: Found) -> bool | None:
    """IN: whether an element equals a literal, or the value of one of the other expressions in the list."""
    return _any([_any(map(members.has, _items(found))), *(compare("=", found, other) for other in others)])


def like(regex: Regex, found: Found) -> bool | None:
    """LIKE: whether a string has a match of the expression; unknown if the search would take too long."""
    items = _items(found)
    if regex.takes_long(sum(len(item) for item in items if isinstance(item, str))):
        return None
    return _any_string(regex.matches, items)


def begins(prefixes: tuple[str, ...], found: Found) -> bool | None:
    """BEGINS WITH: whether a string begins with one of the prefixes."""
    return _any_string(lambda text: text.startswith(prefixes), _items(found))


def ends(suffixes: tuple[str, ...], found: Found) -> bool | None:
    """ENDS WITH: whether a string ends with one of the suffixes."""
    return _any_string(lambda text: text.endswith(suffixes), _items(found))


def position(found: Found, part: Found) -> int | None:
    """INSTR: where a string occurs in another, from 1; 0 if it does not occur."""
    return _of_two_strings(lambda text, part: text.find(part) + 1, found, part)


def position_folded(found: Found, part: Found) -> int | None:
    """INSTR_I: the same, ignoring case."""
    return _of_two_strings(lambda text, part: _fold(text).find(_fold(part)) + 1, found, part)


def equal_folded(found: Found, other: Found) -> int | None:
    """STREQUAL_I: 1 if two strings are equal ignoring case, else 0."""
    return _of_two_strings(lambda text, other: int(_fold(text) == _fold(other)), found, other)


#: The functions, by name.
FUNCTIONS: dict[str, Callable[[Found, Found], int | None]] = {
    "INSTR": position, "INSTR_I": position_folded, "STREQUAL_I": equal_folded,
}  # fmt: skip
#: The predicates that take literal strings, by name.
AFFIXES: dict[str, Callable[[tuple[str, ...], Found], bool | None]] = {"BEGINS WITH": begins, "ENDS WITH": ends}


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
    return bool(item) if isinstance(item, bool | int | float) else None


def _compare(symbol: str, left: Item, right: Item) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        return (left > right) - (left < right) in _ORDER[symbol]
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        return False
    return tree.compare(symbol, number(left), number(right))


def _is_within(item: Item, low: Value, high: Value) -> bool | None:
    above, below = _compare(">=", item, low), _compare("<=", item, high)
    if above is False or below is False:
        return False
    return above and below


def _any_string(test: Callable[[str], bool], items: Collection[Item]) -> bool | None:
    return _any(None if item is None else isinstance(item, str) and test(item) for item in items)


def _of_two_strings(function: Callable[[str, str], int], found: Found, other: Found) -> int | None:
    text, second = single(found), single(other)
    return function(text, second) if isinstance(text, str) and isinstance(second, str) else None


def _fold(text: str) -> str:
    """Return a text without case; a character that case folding would make longer stays, so positions do not change."""
    if text.isascii():
        return text.lower()
    return "".join(folded if len(folded := char.casefold()) == 1 else char for char in text)
