"""Filters: conditions on messages, written as JMS selectors over names, or as AMPS filters over names and bodies.

Invariant: a compiled filter never changes, and matching never raises. A condition on something that the message lacks
is unknown, neither true nor false, and only true matches. Only a filter with a path, such as `/order/total`, reads
bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dropq.errors import InvalidFilter
from dropq.filters import tree
from dropq.filters.body import Body
from dropq.filters.grammar import Parser, Source
from dropq.filters.headers import NOT_ITS_OWN, for_name
from dropq.filters.jms import Selector
from dropq.filters.message_types import LIMIT, message_type
from dropq.filters.tree import Lookup, Node, Value

E = TypeVar("E", bound="Expression")

__all__ = [
    "LIMIT",
    "NOT_ITS_OWN",
    "Body",
    "Expression",
    "Filter",
    "Lookup",
    "Value",
    "check_chooses",
    "compile_expression",
    "compile_filter",
    "compile_selector",
    "for_name",
    "message_type",
]


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression, which has a value for each message; expressions with equal texts are equal."""

    text: str
    #: Whether it has paths, and so may need the body of a message.
    reads_body: bool
    #: The header fields and properties that it names, and `UNIX_TIMESTAMP()`.
    identifiers: frozenset[str] = field(repr=False, compare=False)
    _node: Node = field(repr=False, compare=False)

    @property
    def changes(self) -> bool:
        """Whether its value changes while a message waits, as it asks for the time."""
        return tree.NOW in self.identifiers

    def value(self, lookup: Lookup) -> Value:
        """Return the value for the lookup of a message: for an array, its first element; None for NULL or an object."""
        return tree.single(self._node(lookup))


class Filter(Expression):
    """A compiled filter: an expression that is a condition."""

    __slots__ = ()

    def matches(self, lookup: Lookup) -> bool:
        """Return whether the condition is true for a message, rather than false or unknown."""
        return self._node(lookup) is True


def check_chooses(text: str) -> None:
    """Refuse a blank filter, for verbs that take, move or remove what it matches: it would match every message."""
    if not text.strip():
        raise InvalidFilter("the filter is empty, and would match every message: leave it out, or write a condition")


def compile_filter(text: str) -> Filter:
    """Compile a filter; a blank one matches every message.

    Raises:
        InvalidFilter: the text is neither a JMS selector nor an AMPS filter; the error points at a column and says
            what was expected there.
        Unavailable: the filter has a regular expression, and RE2 is not installed.
    """
    return _compile(Source(text), Filter, Parser.condition)


def compile_selector(text: str) -> Filter:
    """Compile the selector of a route: a JMS selector, over names alone."""
    return _compile(Source(text, "selector"), Filter, Parser.condition, may_be_amps=False)


def compile_expression(text: str) -> Expression:
    """Compile an expression of any kind, such as one to order messages by; errors as of `compile_filter`.

    A blank text is an InvalidFilter.
    """
    return _compile(Source(text, "expression"), Expression, Parser.expression)


def _compile(source: Source, kind: type[E], parse: Callable[[Parser], Node], *, may_be_amps: bool = True) -> E:
    try:
        parser, reads_body = _parser(source) if may_be_amps else (Selector(source), False)
        node = parse(parser)  # first, as it finds the identifiers
        return kind(source.text, reads_body, frozenset(parser.identifiers), node)
    except InvalidFilter as error:
        if not may_be_amps or not _asks_for_amps(source):
            raise
        complaint, *shown = str(error).split("\n")
        hint = "a text without a path, such as /total, is a JMS selector, which has no functions, and no WITH"
        raise InvalidFilter("\n".join((f"{complaint} ({hint})", *shown))) from None
    except RecursionError:  # the caller itself has used most of the stack
        raise InvalidFilter(f"the {source.called} cannot be read here: the program's stack is nearly full") from None


def _asks_for_amps(source: Source) -> bool:
    """Return whether a text without a path has a function of AMPS, or its BEGINS WITH or ENDS WITH."""
    from dropq.filters.amps import has_path
    from dropq.filters.functions import FUNCTIONS

    words = re.findall(r"\b(\w++)\s*+\(|\b(BEGINS|ENDS)\s++WITH\b", source.text.upper())
    return any(name in FUNCTIONS or phrase for name, phrase in words) and not has_path(source.text)


def _parser(source: Source) -> tuple[Parser, bool]:
    """Return the parser for a text, and whether the text has a path; only AMPS filters have paths."""
    if "/" in source.text:
        from dropq.filters.amps import AmpsFilter, has_path  # few filters read bodies

        if has_path(source.text):
            return AmpsFilter(source), True
    return Selector(source), False
