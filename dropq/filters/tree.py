"""The expressions that filters consist of, in either language.

Invariant: evaluating never raises. None is NULL, and the truth value unknown. Numbers are doubles, and integers of 64
bits, which wrap as in Java. No comparison of values of different kinds is true. The functions here take single values;
those in `arrays` also take the arrays of AMPS.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dropq.filters.like import Pattern

Value = bool | int | float | str | None

#: What an expression names if its value changes while a message waits, as it asks for the time.
NOW = "UNIX_TIMESTAMP()"
#: Characters of the longest text that a function makes; in place of a longer one it returns NULL.
LONGEST = 1 << 20


class Opaque:
    """An object in a body: it is not NULL, and equals nothing."""


class Path(str):
    """A path into a body, as it was written; its steps are names of fields, and indexes of arrays, from 0."""

    __slots__ = ("steps",)
    steps: tuple[str | int, ...]

    def __new__(cls, text: str, steps: tuple[str | int, ...]) -> Path:
        path = super().__new__(cls, text)
        path.steps = steps
        return path


Item = Value | Opaque

#: What a message has under a name: a value, or the elements of an array, at least one.
Found = Item | tuple[Item, ...]

#: Returns the value of an identifier or a `Path` in a message; None is NULL, an integer has 64 bits.
Lookup = Callable[[str], Found]

#: An expression: returns its value for the message of a lookup.
Node = Callable[[Lookup], Found]


def constant(value: Value) -> Node:
    """Return a literal."""
    return lambda lookup: value


def identifier(name: str) -> Node:
    """Return a reference to a header field, a property or a path."""
    return lambda lookup: lookup(name)


def operation(function: Callable[..., Found], *operands: Node) -> Node:
    """Return an expression that applies a function, such as those below, to the values of its operands."""

    def evaluate(lookup: Lookup) -> Found:
        values = []
        for operand in operands:  # a comprehension would take another frame of the stack
            values.append(operand(lookup))
        return function(*values)

    return evaluate


def junction(decisive: bool, *operands: Node) -> Node:
    """Return OR (`decisive` is True) or AND (False): the first operand with that value decides, and ends evaluation.

    An operand that is not a boolean is unknown; then the result is unknown, unless another operand decides. A chain is
    one node, so that a long chain cannot exhaust the stack.
    """

    def evaluate(lookup: Lookup) -> bool | None:
        result: bool | None = not decisive
        for operand in operands:
            value = operand(lookup)
            if value is decisive:
                return decisive
            if not isinstance(value, bool):
                result = None
        return result

    return evaluate


def single(found: Found) -> Value:
    """Return a single value: for an array, its first element; None for an object."""
    item = found[0] if isinstance(found, tuple) else found
    return None if isinstance(item, Opaque) else item


def kind_of(value: Found) -> str | None:
    """Return the kind of a value: condition, number or string; None for NULL, objects and arrays."""
    if isinstance(value, bool):
        return "condition"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else None


def negation(value: Found) -> bool | None:
    """NOT: unknown stays unknown."""
    return not value if isinstance(value, bool) else None


def compare(symbol: str, left: Any, right: Any) -> bool | None:
    """Compare with =, <>, <, <=, > or >=; only numbers have an order."""
    kind, other = kind_of(left), kind_of(right)
    if kind is None or other is None:
        return None
    if kind != other or (kind != "number" and symbol not in ("=", "<>")):
        return False
    if isinstance(left, float) or isinstance(right, float):
        left, right = float(left), float(right)  # as Java does; Python would compare exactly
    return _COMPARISONS[symbol](left, right)


def within(strings: Collection[str], value: Value) -> bool | None:
    """IN: whether the value is one of the strings."""
    return None if value is None else value in strings


def like(pattern: Pattern, value: Value) -> bool | None:
    """LIKE: whether the value is a string that the pattern matches."""
    return None if value is None else isinstance(value, str) and pattern.matches(value)


def is_null(value: Found) -> bool:
    """IS NULL: never unknown."""
    return value is None


def fold(symbols: Sequence[str], first: Value, *others: Value) -> Value:
    """Apply +, -, *, / and % from left to right: a long chain is one call, so that it cannot exhaust the stack."""
    for symbol, other in zip(symbols, others, strict=True):
        first = _calculation(_CALCULATIONS[symbol], first, other)
    return first


def wrapped(value: int) -> int:
    """Return an integer in 64 bits, as Java wraps it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _calculation(function: Callable[[Any, Any], Any], left: Value, right: Value) -> int | float | None:
    if kind_of(left) != "number" or kind_of(right) != "number":
        return None
    result: int | float | None = function(left, right)
    return wrapped(result) if isinstance(result, int) else result


def _quotient(left: Any, right: Any) -> int | float | None:
    if right == 0:
        return None
    if isinstance(left, float) or isinstance(right, float):
        return float(left / right)
    size = int(abs(left) // abs(right))  # Java drops the fraction; Python's // rounds down
    return size if (left < 0) == (right < 0) else -size


def _remainder(left: Any, right: Any) -> int | float | None:
    """Return the remainder of a division, which has the sign of the dividend."""
    if right == 0 or math.isinf(left):
        return None
    if isinstance(left, float) or isinstance(right, float):
        return math.fmod(left, right)
    size = int(abs(left) % abs(right))
    return -size if left < 0 else size


_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_CALCULATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _quotient, "%": _remainder,
}  # fmt: skip
