"""The expressions that filters are made of, whatever language they were written in.

Invariant: evaluating never raises. NULL is None, as a value and as the truth that is unknown; numbers are 64-bit
integers, which wrap as in Java, and doubles; values of unlike kinds are neither equal nor unequal nor in any order.
What stands here is for single values; `arrays` has what AMPS makes of several.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dropq.filters.like import Pattern

Value = bool | int | float | str | None


class Opaque:
    """Something in a body that is there, and so is not NULL, and that nothing equals: an object."""


class Path(str):
    """A way into a body, as it was written.

    Attributes:
        steps: names of fields, and places in arrays from 0.
    """

    __slots__ = ("steps",)
    steps: tuple[str | int, ...]

    def __new__(cls, text: str, steps: tuple[str | int, ...]) -> Path:
        path = super().__new__(cls, text)
        path.steps = steps
        return path


Item = Value | Opaque

#: What is found in a message: a value, or the elements of an array, of which there is one at least.
Found = Item | tuple[Item, ...]

#: Gives what an identifier or a `Path` stands for; None is NULL, an integer has 64 bits.
Lookup = Callable[[str], Found]

#: An expression: gives its value for the message whose identifiers the lookup knows.
Node = Callable[[Lookup], Found]


def constant(value: Value) -> Node:
    """Make a literal."""
    return lambda lookup: value


def identifier(name: str) -> Node:
    """Make a reference to a header field, a property or a path."""
    return lambda lookup: lookup(name)


def operation(function: Callable[..., Found], *operands: Node) -> Node:
    """Make an application of a function, such as those below, to the values of the operands."""

    def evaluate(lookup: Lookup) -> Found:
        values = []
        for operand in operands:  # a comprehension would take a second frame of the stack
            values.append(operand(lookup))
        return function(*values)

    return evaluate


def junction(decisive: bool, *operands: Node) -> Node:
    """Make OR, which what is true decides, or AND, which what is false does; what stands behind that is not looked at.

    What is no boolean is unknown, and leaves open what the other operands do not decide. A chain is one node, so that
    a long one cannot exhaust the stack.
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
    """Return the value that is meant where only one can be: of an array the first element; an object is none."""
    item = found[0] if isinstance(found, tuple) else found
    return None if isinstance(item, Opaque) else item


def kind_of(value: Found) -> str | None:
    """Name the kind of a value: condition, number or string; None for NULL, and for what is none of these."""
    if isinstance(value, bool):
        return "condition"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else None


def negation(value: Found) -> bool | None:
    """NOT: the unknown stays unknown."""
    return not value if isinstance(value, bool) else None


def compare(symbol: str, left: Any, right: Any) -> bool | None:
    """Compare by one of = <> < <= > >=; only numbers have an order."""
    kind, other = kind_of(left), kind_of(right)
    if kind is None or other is None:
        return None
    if kind != other or (kind != "number" and symbol not in ("=", "<>")):
        return False
    if isinstance(left, float) or isinstance(right, float):
        left, right = float(left), float(right)  # as Java has it; Python would compare exactly
    return _COMPARISONS[symbol](left, right)


def within(strings: Collection[str], value: Value) -> bool | None:
    """IN: whether the value is one of the strings."""
    return None if value is None else value in strings


def like(pattern: Pattern, value: Value) -> bool | None:
    """LIKE: whether the value is a string that the pattern fits."""
    return None if value is None else isinstance(value, str) and pattern.matches(value)


def is_null(value: Found) -> bool:
    """IS NULL: never unknown."""
    return value is None


def fold(symbols: Sequence[str], first: Value, *others: Value) -> Value:
    """Apply +, -, *, / and % from left to right, a symbol before each value but the first.

    A chain is one call, so that a long one cannot exhaust the stack.
    """
    for symbol, other in zip(symbols, others, strict=True):
        first = _calculation(_CALCULATIONS[symbol], first, other)
    return first


def _calculation(function: Callable[[Any, Any], Any], left: Value, right: Value) -> int | float | None:
    if kind_of(left) != "number" or kind_of(right) != "number":
        return None
    result: int | float | None = function(left, right)
    return (result + (1 << 63)) % (1 << 64) - (1 << 63) if isinstance(result, int) else result


def _quotient(left: Any, right: Any) -> int | float | None:
    if right == 0:
        return None
    if isinstance(left, float) or isinstance(right, float):
        return float(left / right)
    size = int(abs(left) // abs(right))  # Java drops the fraction, where Python's // rounds down
    return size if (left < 0) == (right < 0) else -size


def _remainder(left: Any, right: Any) -> int | float | None:
    """What is left of a division has the sign of what was divided."""
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
