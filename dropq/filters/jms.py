"""The language of JMS selectors: SQL-92 conditions over header fields and properties.

    comparison = sum ( = | <> | < | <= | > | >= ) sum
    predicate  = BETWEEN sum AND sum | IN ( string *( , string ) ) | LIKE string [ ESCAPE string ]
    value      = identifier | 'string' | number | TRUE | FALSE

`grammar` has the rest of the grammar.
"""

from __future__ import annotations

import re
from functools import partial

from dropq.filters import tree
from dropq.filters.grammar import WORDS, Dialect, Parser, Part
from dropq.filters.like import Pattern
from dropq.filters.tree import Node

_LEXEME = re.compile(
    WORDS
    + r"""
    | (?P<string>'[^']*(?:''[^']*)*'(?!'))
    | (?P<symbol><>|<=|>=|[=<>+\-*/(),])""",
    re.VERBOSE,
)
_INSTEAD = {"'": "a closing ' to this string", '"': "a string in single quotes", "!": "<> for unequal"}


class Selector(Parser):
    """Parses a JMS selector."""

    dialect = Dialect(_LEXEME, instead=_INSTEAD)

    def _compared(self, left: Part, symbol: str, right: Part) -> Node:
        if symbol not in ("=", "<>"):
            self._typed(left, "number")
            self._typed(right, "number")
        return tree.operation(partial(tree.compare, symbol), left.node, right.node)

    def _predicate(self, left: Part, negated: bool) -> Node:
        if self._accept("BETWEEN"):
            return self._between(left, negated)
        test = self._like(left) if self._accept("LIKE") else self._within(left)
        node = tree.operation(test, self._typed(left, "string"))
        return tree.operation(tree.negation, node) if negated else node

    def _between(self, left: Part, negated: bool) -> Node:
        """Parse BETWEEN or NOT BETWEEN: a pair of comparisons each, so both are false for values without an order."""
        bounds = self._bounds()
        value, low, high = (self._typed(part, "number") for part in (left, *bounds))
        lower = tree.operation(partial(tree.compare, "<" if negated else ">="), value, low)
        upper = tree.operation(partial(tree.compare, ">" if negated else "<="), value, high)
        return tree.junction(negated, lower, upper)

    def _within(self, left: Part) -> partial[bool | None]:
        self._expect("IN")
        strings = self._list(self._string)
        self._warn_of_ids(left, *strings)
        return partial(tree.within, frozenset(strings))

    def _like(self, left: Part) -> partial[bool | None]:
        token, pattern = self._token, self._string()
        if pattern[:1] not in ("I", "_", "%"):
            self._warn_of_ids(left, pattern)
        escape = self._character() if self._accept("ESCAPE") else None
        try:
            return partial(tree.like, Pattern.compile(pattern, escape))
        except ValueError as error:
            raise self._source.invalid(token.at, f"a pattern ({error})", token.text) from None

    def _character(self) -> str:
        if self._token.kind == "string" and len(str(self._token.value)) != 1:
            raise self._unexpected("a string of one character")
        return self._string()
