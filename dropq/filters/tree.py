"""The expressions that filters are made of, whatever language they were written in.

Invariant: evaluating never raises. NULL is None, as a value and as the truth that is unknown; numbers are 64-bit
integers, which wrap as in Java, and doubles; values of unlike kinds are neither equal nor unequal nor in any order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from dropq.filters.like import Pattern

Value = bool | int | float | str | None

#: Gives the value of an identifier: a boolean, an integer of 64 bits, a double, a string, or None for NULL.
Lookup = Callable[[str], Value]

#: An expression: gives its value for the message whose identifiers the lookup knows.
Node = Callable[[Lookup], Value]


def constant(value: Value) -> Node:
    """Make a literal."""
    return lambda lookup: value


def identifier(name: str) -> Node:
    """Make a reference to a header field or a property."""
    return lambda lookup: lookup(name)


def operation(function: Callable[..., Value], *operands: Node) -> Node:
    """Make an application of one of the functions below to the values of the operands."""

    def evaluate(lookup: Lookup) -> Value:
        values = []
        for operand in operands:  # a comprehension would take a second frame of the stack
            values.append(operand(lookup))
        return function(*values)

    return evaluate


def kind_of(value: Value) -> str | None:
    """Name the kind of a value: condition, number or string; None for NULL."""
    if isinstance(value, bool):
        return "condition"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else None


def negation(value: Value) -> bool | None:
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


def is_null(value: Value) -> bool:
    """IS NULL: never unknown."""
    return value is None


def fold(symbols: Sequence[str], first: Value, *others: Value) -> Value:
    """Apply OR, AND, +, -, * and / from left to right, a symbol before each value but the first.

    A chain is one call, so that a long one cannot exhaust the stack.
    """
    for symbol, other in zip(symbols, others, strict=True):
        first = _BINARY[symbol](first, other)
    return first


def _junction(decisive: bool, left: Value, right: Value) -> bool | None:
    """What is no boolean is unknown, and leaves open what the other operand does not decide."""
    if left is decisive or right is decisive:
        return decisive
    return not decisive if isinstance(left, bool) and isinstance(right, bool) else None


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


_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Value, Value], Value]] = {
    "OR": partial(_junction, True),
    "AND": partial(_junction, False),
    "+": partial(_calculation, operator.add),
    "-": partial(_calculation, operator.sub),
    "*": partial(_calculation, operator.mul),
    "/": partial(_calculation, _quotient),
}
