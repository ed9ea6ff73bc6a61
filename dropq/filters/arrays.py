"""The operators of AMPS, which see several values at once: a comparison is true when it is for any element of an array.

Invariant: evaluating never raises. TRUE is 1 and FALSE is 0; strings have an order among themselves; values of unlike
kinds are neither equal nor unequal nor in any order. Whatever calculates takes the first element.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dropq.filters import tree
from dropq.filters.regex import Regex
from dropq.filters.tree import Found, Item, Opaque, Value, single

#: Pairs of elements that a comparison of two arrays looks at; of longer ones it is unknown.
PAIRS = 1_000_000
_ORDER = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (1, 0), "=": (0,), "<>": (-1, 1)}


def number(found: Found) -> Value:
    """Return the value to calculate with: TRUE is 1, FALSE is 0."""
    value = single(found)
    return int(value) if isinstance(value, bool) else value


def truth(found: Found) -> bool | None:
    """Return what a value is as a condition: a number is true unless it is 0, and a string or an object unknown."""
    return _some(map(_truth, _items(found)))


def compare(symbol: str, left: Found, right: Found) -> bool | None:
    """Compare by one of = <> < <= > >=."""
    lefts, rights = _items(left), _items(right)
    if len(lefts) * len(rights) > PAIRS:
        return None
    return _some(_compared(symbol, one, other) for one in lefts for other in rights)


def between(found: Found, low: Found, high: Found) -> bool | None:
    """BETWEEN: whether an element lies between the bounds, or is one of them."""
    return _some(_within_bounds(item, single(low), single(high)) for item in _items(found))


class Members:
    """The literals of an IN, each found at once.

    Args:
        literals: numbers, strings and booleans.
    """

    def __init__(self, literals: Iterable[Value]) -> None:
        values = [int(value) if isinstance(value, bool) else value for value in literals]
        self._strings = frozenset(value for value in values if isinstance(value, str))
        self._integers = frozenset(value for value in values if isinstance(value, int))
        self._doubles = frozenset(value for value in values if isinstance(value, float))
        self._rounded = self._doubles | frozenset(map(float, self._integers))

    def has(self, item: Item) -> bool | None:
        """Tell whether a value equals one of them; unknown of NULL."""
        if item is None:
            return None
        if isinstance(item, str):
            return item in self._strings
        if isinstance(item, float):
            return item in self._rounded
        return isinstance(item, int) and (int(item) in self._integers or float(item) in self._doubles)


def within(members: Members, found: Found, *others: Found) -> bool | None:
    """IN: whether an element equals one of the members, or one of the values that only the message tells."""
    tests = [_some(map(members.has, _items(found)))]
    tests += (compare("=", found, other) for other in others)
    return _some(tests)


def like(regex: Regex, found: Found) -> bool | None:
    """LIKE: whether the expression fits somewhere in a string; unknown where that would take long."""
    items = _items(found)
    if regex.takes_long(sum(len(item) for item in items if isinstance(item, str))):
        return None
    return _of_strings(regex.fits, items)


def begins(prefixes: tuple[str, ...], found: Found) -> bool | None:
    """BEGINS WITH: whether a string begins with one of some."""
    return _of_strings(lambda text: text.startswith(prefixes), _items(found))


def ends(suffixes: tuple[str, ...], found: Found) -> bool | None:
    """ENDS WITH: whether a string ends with one of some."""
    return _of_strings(lambda text: text.endswith(suffixes), _items(found))


def position(found: Found, part: Found) -> int | None:
    """INSTR: where a string begins in another, from 1; 0 where it does not occur."""
    return _of_two(lambda text, piece: text.find(piece) + 1, found, part)


def position_folded(found: Found, part: Found) -> int | None:
    """INSTR_I: the same, where upper and lower case are alike."""
    return _of_two(lambda text, piece: _folded(text).find(_folded(piece)) + 1, found, part)


def equal_folded(found: Found, other: Found) -> int | None:
    """STREQUAL_I: 1 where two strings are equal but for upper and lower case, else 0."""
    return _of_two(lambda text, piece: int(_folded(text) == _folded(piece)), found, other)


#: The functions, by name.
FUNCTIONS: dict[str, Callable[[Found, Found], int | None]] = {
    "INSTR": position, "INSTR_I": position_folded, "STREQUAL_I": equal_folded,
}  # fmt: skip
#: The predicates that take strings.
AFFIXES: dict[str, Callable[[tuple[str, ...], Found], bool | None]] = {"BEGINS WITH": begins, "ENDS WITH": ends}


def _items(found: Found) -> tuple[Item, ...]:
    return found if isinstance(found, tuple) else (found,)


def _some(truths: Iterable[bool | None]) -> bool | None:
    """OR of any number: true when one is, unknown when none is and one is unknown."""
    result: bool | None = False
    for one in truths:
        if one:
            return True
        if one is None:
            result = None
    return result


def _truth(item: Item) -> bool | None:
    return bool(item) if isinstance(item, bool | int | float) else None


def _compared(symbol: str, left: Item, right: Item) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        return (left > right) - (left < right) in _ORDER[symbol]
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        return False
    return tree.compare(symbol, number(left), number(right))


def _within_bounds(item: Item, low: Value, high: Value) -> bool | None:
    above, below = _compared(">=", item, low), _compared("<=", item, high)
    if above is False or below is False:
        return False
    return above and below


def _of_strings(test: Callable[[str], bool], items: Collection[Item]) -> bool | None:
    return _some(None if item is None else isinstance(item, str) and test(item) for item in items)


def _of_two(function: Callable[[str, str], int], found: Found, other: Found) -> int | None:
    text, piece = single(found), single(other)
    return function(text, piece) if isinstance(text, str) and isinstance(piece, str) else None


def _folded(text: str) -> str:
    """Make upper and lower case alike; each character stays one, so that positions stay what they are."""
    if text.isascii():
        return text.lower()
    return "".join(folded if len(folded := char.casefold()) == 1 else char for char in text)
