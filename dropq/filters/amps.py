"""The language of AMPS filters: conditions over fields of JSON bodies, header fields and properties.

    comparison = sum ( = | == | <> | != | < | <= | > | >= ) sum
    predicate  = BETWEEN sum AND sum | IN ( sum *( , sum ) ) | LIKE string | ( BEGINS | ENDS ) WITH strings
    strings    = string | ( string *( , string ) )
    product    = signed *( ( * | / | % | MOD ) signed )
    value      = path | function ( either , either ) | identifier | string | number | TRUE | FALSE | NULL
    function   = INSTR | INSTR_I | STREQUAL_I       string = '...' | "..."
    path       = / [ name ] *( [n] ) *( / name *( [n] ) )

A name with other characters than letters, digits and _ $ @ . : needs quotes. `grammar` has the rest of the grammar.
Where an operand may stand, AMPS's own words are identifiers, so that a property may have such a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import takewhile

from dropq.errors import InvalidFilter
from dropq.filters import arrays, tree
from dropq.filters.arrays import AFFIXES, FUNCTIONS, Members
from dropq.filters.grammar import WORDS, Dialect, Parser, Part, Source, tokens, unquoted
from dropq.filters.regex import Regex
from dropq.filters.tree import Found, Node, Path

_STRING = r"""'[^']*(?:''[^']*)*'(?!') | "[^"]*(?:""[^"]*)*"(?!")"""
_LEXEME = re.compile(
    rf"""(?P<phrase>(?i:BEGINS|ENDS)[ \t\f\r\n]+(?i:WITH)(?![0-9A-Za-z_$\x80-\U0010ffff]))
    | {WORDS}
    | (?P<string>{_STRING})
    | (?P<symbol><>|!=|<=|>=|==|[=<>+\-*/%(),])""",
    re.VERBOSE,
)
_NAME = r"[\w$@.:]+"
#: A step of a path; the first may lack a name.
_STEP = re.compile(rf"/(?P<name>{_NAME}|{_STRING})? | \[(?P<index>[0-9]{{1,9}})\]", re.VERBOSE)
#: A dash after a path: it could belong to the name of a field, or subtract.
_DASHED = re.compile(r"-[\w$@.:]")


def _path(source: Source, start: int) -> Path:
    """Parse a path."""
    text, at = source.text, start
    steps: list[str | int] = []
    while step := _STEP.match(text, at):
        if step["index"]:
            steps.append(int(step["index"]))
        elif name := step["name"]:
            steps.append(unquoted(name) if name[0] in "'\"" else name)
        elif at > start:
            break  # a division
        at = step.end()
        if text.startswith("/", at) and (at == start + 1 or text.startswith("//", at)):
            raise source.invalid(at, "the name of a field", "/")
    if text.startswith("[", at):
        raise source.invalid(at, "an index of an array, from [0]", "[")
    if _DASHED.match(text, at):
        raise source.invalid(at, "a space on either side of -, to subtract, or quotes around the name", "-")
    return Path(source.text[start:at], tuple(steps))


_DIALECT = Dialect(
    _LEXEME,
    path=_path,
    kinds={"==": "=", "!=": "<>", "MOD": "%"},
    instead={"'": "a closing ' to this string", '"': 'a closing " to this string'},
)


def has_path(text: str) -> bool:
    """Return whether a text has a path where an operand may stand, and so is an AMPS filter."""
    dialect = _DIALECT._replace(path=lambda source, at: Path("/", ()))
    try:
        before_end = takewhile(lambda token: token.kind != "end", tokens(Source(text), dialect))
        return any(token.kind == "path" for token in before_end)
    except InvalidFilter:
        return False


class AmpsFilter(Parser):
    """Parses an AMPS filter."""

    dialect = _DIALECT
    products = ("*", "/", "%")
    predicates = ("BETWEEN", "IN", "LIKE", "BEGINS WITH", "ENDS WITH")

    def _compared(self, left: Part, symbol: str, right: Part) -> Node:
        return tree.operation(partial(arrays.compare, symbol), left.node, right.node)

    def _predicate(self, left: Part, negated: bool) -> Node:
        if self._accept("BETWEEN"):
            low, high = self._bounds()
            node = tree.operation(arrays.between, left.node, low.node, high.node)
        elif self._accept("IN"):
            node = self._within(left)
        else:
            node = tree.operation(self._test_of_strings(), self._typed(left, "string"))
        return tree.operation(tree.negation, node) if negated else node

    def _within(self, left: Part) -> Node:
        parts = self._list(self._sum)
        self._warn_of_ids(left, *(part.literal for part in parts))
        members = Members(part.literal for part in parts if part.literal is not None)
        others = [part.node for part in parts if part.literal is None]
        return tree.operation(partial(arrays.within, members), left.node, *others)

    def _test_of_strings(self) -> Callable[[Found], bool | None]:
        if self._accept("LIKE"):
            token, pattern = self._token, self._string()
            try:
                return partial(arrays.like, Regex(pattern))
            except ValueError as error:
                expected = f"a regular expression that RE2 accepts ({error})"
                raise self._source.invalid(token.at, expected, token.text) from None
        affix = self._accept("BEGINS WITH") or self._expect("ENDS WITH")
        strings = self._list(self._string) if self._token.kind == "(" else [self._string()]
        return partial(AFFIXES[affix.kind], tuple(strings))

    def _value(self) -> Part:
        token = self._token
        if isinstance(token.value, Path):
            self._expect("path")
            return Part(tree.identifier(token.value), token.at, None)
        if self._accept("NULL"):
            return Part(tree.constant(None), token.at, None)
        part = super()._value()
        if token.kind == "identifier" and self._token.kind == "(" and token.text.upper() in FUNCTIONS:
            return self._call(token.at, FUNCTIONS[token.text.upper()])
        return part

    def _call(self, at: int, function: Callable[[Found, Found], int | None]) -> Part:
        """Parse the arguments of a function; they may be conditions, too."""
        self._open()
        first = self._either()
        self._expect(",")
        second = self._closed(")", ")")
        self._depth -= 1
        return Part(tree.operation(function, first.node, second.node), at, None)

    def _typed(self, part: Part, kind: str) -> Node:
        """Convert between numbers and conditions: TRUE is 1, FALSE is 0, and a number other than 0 is true."""
        if kind == "condition" and part.kind != "string":
            return part.node if part.kind == kind else tree.operation(arrays.truth, part.node)
        if kind == "number" and part.kind != "string":
            return part.node if part.kind == kind else tree.operation(arrays.number, part.node)
        return super()._typed(part, kind)
