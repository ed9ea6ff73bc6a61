"""Filters: conditions on messages, as JMS selectors over what names tell, or as AMPS filters over bodies too.

Invariant: a filter is compiled once and cannot change; asking it never raises. What is neither true nor false, because
a message lacks what is asked about, is unknown, and only what is true matches. A filter without a path, such as
`/order/total`, never has a body read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dropq.errors import InvalidFilter
from dropq.filters import tree
from dropq.filters.body import LIMIT
from dropq.filters.grammar import Parser, Source
from dropq.filters.headers import for_name
from dropq.filters.jms import Selector
from dropq.filters.tree import Lookup, Node, Value

T = TypeVar("T")

__all__ = [
    "LIMIT",
    "Expression",
    "Filter",
    "Lookup",
    "Value",
    "check_chooses",
    "compile_expression",
    "compile_filter",
    "for_name",
]


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter; two are equal when their texts are.

    Attributes:
        text: the filter as it was written.
        reads_body: whether it has paths, and so may ask for a message's body.
    """

    text: str
    reads_body: bool
    _condition: Node = field(repr=False, compare=False)

    def matches(self, lookup: Lookup) -> bool:
        """Tell whether the condition is true, and not false or unknown.

        Args:
            lookup: gives the value of an identifier, None for NULL; `for_name` makes one for a message.
        """
        return self._condition(lookup) is True


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression, which has a value for each message; two are equal when their texts are.

    Attributes:
        text: the expression as it was written.
        reads_body: whether it has paths, and so may ask for a message's body.
    """

    text: str
    reads_body: bool
    _node: Node = field(repr=False, compare=False)

    def value(self, lookup: Lookup) -> Value:
        """Return its value for a message: of an array the first element's; None for NULL, and for an object."""
        return tree.single(self._node(lookup))


def check_chooses(text: str) -> None:
    """Refuse a blank filter where one takes, moves or removes: it would be meant for every message.

    Raises:
        InvalidFilter: it is blank.
    """
    if not text.strip():
        raise InvalidFilter("the filter is empty, and would choose every message: ask for all of them, or say which")


def compile_filter(text: str) -> Filter:
    """Compile a filter; a blank one matches every message.

    Raises:
        InvalidFilter: it is neither a JMS selector nor an AMPS filter; the message points at the column and says what
            was expected there.
        Unavailable: it has a regular expression, and RE2 is not installed.
    """
    return _compiled(Source(text), lambda parser, reads_body: Filter(text, reads_body, parser.condition()))


def compile_expression(text: str) -> Expression:
    """Compile an expression of any kind, such as one to order messages by.

    Raises:
        InvalidFilter: it is blank, or cannot be read; the message points at the column.
        Unavailable: it has a regular expression, and RE2 is not installed.
    """
    source = Source(text, "expression")
    return _compiled(source, lambda parser, reads_body: Expression(text, reads_body, parser.expression()))


def _compiled(source: Source, compiled: Callable[[Parser, bool], T]) -> T:
    try:
        return compiled(*_parser(source))
    except RecursionError:  # whoever asks is deep in the stack itself
        raise InvalidFilter(f"the {source.called} cannot be read here: the program's stack is nearly full") from None


def _parser(source: Source) -> tuple[Parser, bool]:
    """Return what reads a text, by whether it has a path, and whether it has one."""
    if "/" in source.text:
        from dropq.filters.amps import AmpsFilter, has_path  # few look into bodies

        if has_path(source.text):
            return AmpsFilter(source), True
    return Selector(source), False
