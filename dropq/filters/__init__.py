"""Filters: conditions on messages, as JMS selectors.

Invariant: a filter is compiled once and cannot change; asking it never raises and never opens a file. What is neither
true nor false, because a message lacks what is asked about, is unknown, and only what is true matches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dropq.errors import InvalidFilter
from dropq.filters import jms
from dropq.filters.headers import for_name
from dropq.filters.tree import Lookup, Node, Value

__all__ = ["Filter", "Lookup", "Value", "check_chooses", "compile_filter", "for_name"]


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter; two are equal when their texts are.

    Attributes:
        text: the filter as it was written.
    """

    text: str
    _condition: Node = field(repr=False, compare=False)

    def matches(self, lookup: Lookup) -> bool:
        """Tell whether the condition is true, and not false or unknown.

        Args:
            lookup: gives the value of an identifier, None for NULL; `for_name` makes one for a message.
        """
        return self._condition(lookup) is True


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
        InvalidFilter: it is not a JMS selector; the message points at the column and says what was expected there.
    """
    return Filter(text, jms.parse(text))
