"""The functions of AMPS, by name, and the arguments that each takes.

Invariant: evaluating never raises. A function takes the first element of an array, unless it is about arrays. Where an
argument is NULL or there is no result, it returns NULL, and so it does in place of a text longer than `LONGEST`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from difflib import get_close_matches
from functools import partial, reduce
from itertools import chain, cycle
from typing import Any, NamedTuple

from dropq.filters import tree
from dropq.filters.arrays import as_text, compare, is_null, is_unknown, number
from dropq.filters.regex import Regex
from dropq.filters.tree import LONGEST, Found, Item, Lookup, Node, Value, single

#: Characters of the longest time as text, and of the longest format of one.
TIME = 128
#: The number of arguments of a function that takes any number.
ANY = 1 << 63


class Function(NamedTuple):
    """A function: what returns the expression that applies it to expressions, and how many arguments it takes."""

    call: Callable[..., Node]
    least: int
    most: int


def instead_of(name: str) -> str:
    """Return what to write in place of a function that does not exist."""
    if name in _AGGREGATES:
        also = f"; ARRAY_{name} is over an array" if f"ARRAY_{name}" in FUNCTIONS else ""
        return f"a function of one message ({name} is over many{also})"
    nearest = get_close_matches(name, FUNCTIONS, n=1)
    return f"a function, such as {nearest[0]}" if nearest else f"a function ({', '.join(sorted(FUNCTIONS))})"


def _of(call: Callable[..., Any], *takes: Callable[..., Any], least: int | None = None, most: int = 0) -> Function:
    """Return a function of values; `takes` convert its arguments, the last one all further ones."""
    apply = partial(_applied, call, takes)
    return Function(partial(tree.operation, apply), len(takes) if least is None else least, max(len(takes), most))


def _applied(call: Callable[..., Any], takes: tuple[Callable[[Found], Any], ...], *found: Found) -> Found:
    try:
        values = [take(value) for take, value in zip(chain(takes, cycle(takes[-1:])), found, strict=False)]
        result = None if None in values else call(*values)
    except (ArithmeticError, ValueError, OSError, re.error):
        return None
    if isinstance(result, str) and len(result) > LONGEST:
        return None
    return tree.wrapped(result) if isinstance(result, int) else result


def _whole(found: Found) -> int | None:
    value = number(found)
    return None if value is None else int(value)


def _short(found: Found) -> str | None:
    value = as_text(found)
    return None if value is None or len(value) > TIME else value


def _elements(found: Found) -> tuple[Item, ...] | None:
    return found if isinstance(found, tuple) else None if found is None else (found,)


def _if(condition: Node, then: Node, otherwise: Node) -> Node:
    return lambda lookup: single((then if condition(lookup) is True else otherwise)(lookup))


def _coalesce(*operands: Node) -> Node:
    def evaluate(lookup: Lookup) -> Found:
        for operand in operands:
            if not is_null(value := single(operand(lookup))):
                return value
        return None

    return evaluate


def _replacing(operand: Node, regex: Regex, new: Node) -> Node:
    return _of(regex.replaced, as_text, as_text).call(operand, new)


def _joined(separator: str, texts: Sequence[str]) -> str | None:
    length = sum(map(len, texts)) + len(separator) * len(texts)
    return separator.join(texts) if length <= LONGEST else None


def _replaced(value: str, old: str, new: str) -> str | None:
    if not old:
        return value
    length = len(value) + value.count(old) * (len(new) - len(old))
    return value.replace(old, new) if length <= LONGEST else None


def _part(value: str, start: int, length: int | None = None) -> str:
    """Return a part of a text; `start` counts from 1, or from -1 at the end, as in SQL."""
    begin = start - 1 if start > 0 else len(value) + start if start else -1
    end = len(value) if length is None else begin + max(length, 0)
    return value[max(begin, 0) : max(end, 0)]


def _fold(value: str) -> str:
    """Return a text without case; a character that case folding would make longer stays, so positions do not change."""
    if value.isascii():
        return value.lower()
    return "".join(folded if len(folded := char.casefold()) == 1 else char for char in value)


def _rounded(value: float, places: int = 0) -> float:
    """Return a number rounded as it is written in decimals, halves away from 0."""
    step = Decimal((0, (1,), -max(-400, min(places, 400))))
    return type(value)(Decimal(repr(value)).quantize(step, ROUND_HALF_UP, context=Context(prec=1000)))


def _extreme(symbol: str, items: tuple[Item, ...]) -> Value:
    values = (value for item in items if not is_unknown(value := single(item)))
    return reduce(lambda best, value: value if compare(symbol, value, best) else best, values, next(values, None))


def _sum(items: tuple[Item, ...]) -> Value:
    total: Value = 0
    for item in items:
        if (value := number(item)) is not None:
            total = tree.fold("+", total, value)
    return total


def _shown_time(shape: str, seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.strftime(shape.replace("%03f", f"{moment.microsecond // 1000:03}"))


def _read_time(value: str, shape: str) -> float:
    moment = datetime.strptime(value, shape.replace("%03f", "%f"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_GREATEST = _of(lambda *values: _extreme(">", values), single, most=ANY)
_LEAST = _of(lambda *values: _extreme("<", values), single, most=ANY)
#: The functions, by name.
FUNCTIONS: dict[str, Function] = {
    "ABS": _of(abs, number),
    "ARRAY_COUNT": _of(len, _elements),
    "ARRAY_MAX": _of(partial(_extreme, ">"), _elements),
    "ARRAY_MIN": _of(partial(_extreme, "<"), _elements),
    "ARRAY_SUM": _of(_sum, _elements),
    "ARRAY_TO_STRING": _of(
        lambda items, separator, null: _joined(separator, [as_text(item) or null for item in items]),
        _elements, as_text, as_text,
    ),
    "CEILING": _of(lambda value: type(value)(math.ceil(value)), number),
    "CHAR_VALUE": _of(lambda code: chr(code) if 0 <= code <= 255 else "?", _whole),
    "COALESCE": Function(_coalesce, 1, ANY),
    "CONCAT": _of(lambda *texts: _joined("", texts), lambda found: as_text(found) or "", most=ANY),
    "FALSE_VALUE": _of(lambda: False),
    "FLOOR": _of(lambda value: type(value)(math.floor(value)), number),
    "GREATEST": _GREATEST,
    "IF": Function(_if, 3, 3),
    "INSTR": _of(lambda value, part: value.find(part) + 1, as_text, as_text),
    "INSTR_I": _of(lambda value, part: _fold(value).find(_fold(part)) + 1, as_text, as_text),
    "LEAST": _LEAST,
    "LEFT": _of(lambda value, length: _part(value, 1, length), as_text, _whole),
    "LENGTH": _of(len, as_text),
    "LOWER": _of(str.lower, as_text),
    "LTRIM": _of(str.lstrip, as_text),
    "MAX": _GREATEST._replace(least=2),
    "MIN": _LEAST._replace(least=2),
    "NAN_VALUE": _of(lambda: math.nan),
    "POWER": _of(math.pow, number, number),
    "REGEXP_REPLACE": Function(_replacing, 3, 3),
    "REPLACE": _of(_replaced, as_text, as_text, as_text),
    "REVERSE": _of(lambda value: value[::-1], as_text),
    "RIGHT": _of(lambda value, length: _part(value, -length, length), as_text, _whole),
    "ROUND": _of(_rounded, number, _whole, least=1),
    "RTRIM": _of(str.rstrip, as_text),
    "SQRT": _of(math.sqrt, number),
    "STREQUAL_I": _of(lambda value, other: int(_fold(value) == _fold(other)), as_text, as_text),
    "STRFTIME": _of(_shown_time, _short, number),
    "STRPTIME": _of(_read_time, _short, _short),
    "SUBSTR": _of(_part, as_text, _whole, _whole, least=2),
    "TRIM": _of(str.strip, as_text),
    "TRUE_VALUE": _of(lambda: True),
    "UNIX_TIMESTAMP": _of(lambda: time.time()),
    "UPPER": _of(str.upper, as_text),
}  # fmt: skip
_AGGREGATES = (
    "AVG", "COUNT", "COUNT_DISTINCT", "GROUP_CONCAT", "STDDEV_POP", "STDDEV_SAMP", "SUM", "UNIQUE",
)  # fmt: skip
