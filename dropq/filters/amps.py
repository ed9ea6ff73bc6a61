"""The language of AMPS filters: conditions over fields of bodies, header fields and properties.

    comparison = sum [ symbol sum | IS [NOT] ( NULL | NAN ) | [NOT] predicate ]
    symbol     = = | == | <> | != | < | <= | > | >=
    predicate  = BETWEEN sum AND sum | IN ( sum *( , sum ) ) | LIKE string | ( BEGINS | ENDS ) WITH strings
    strings    = string | ( string *( , string ) )
    product    = signed *( ( * | / | % | MOD ) signed )
    value      = path | function ( [ either *( , either ) ] ) | identifier | string | number | TRUE | FALSE | NULL
    path       = / [ name ] *( [n] ) *( / name *( [n] ) )      string = '...' | "..."

A function is one of `functions.FUNCTIONS`; REGEXP_REPLACE takes a string as its second argument, IF a condition first.
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
from dropq.filters.arrays import Members
from dropq.filters.functions import ANY, FUNCTIONS, instead_of
from dropq.filters.grammar import WORDS, Dialect, Parser, Part, Source, Token, tokens, unquoted
from dropq.filters.regex import Regex
from dropq.filters.tree import NOW, Found, Node, Path

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
_CALL = re.compile(r"[ \t\f\r\n]*\(")


def _path(source: Source, start: int) -> Path:
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

    def _kind(self, alternative: str) -> Callable[[Found], bool]:
        if self._token.kind == "identifier" and self._token.text.upper() == "NAN":
            self._expect("identifier")
            return arrays.is_nan
        self._expect("NULL", f"NULL{', NAN' if alternative else ' or NAN'}{alternative}")
        return arrays.is_null

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
        members = Members([part.literal for part in parts if not arrays.is_null(part.literal)])
        others = [part.node for part in parts if arrays.is_null(part.literal)]
        return tree.operation(partial(arrays.within, members), left.node, *others)

    def _test_of_strings(self) -> Callable[[Found], bool | None]:
        if self._accept("LIKE"):
            token, pattern = self._token, self._string()
            return partial(arrays.like, self._regex(token.at, pattern))
        affix = self._accept("BEGINS WITH") or self._expect("ENDS WITH")
        test = str.startswith if affix.kind == "BEGINS WITH" else str.endswith
        strings = self._list(self._string) if self._token.kind == "(" else [self._string()]
        return partial(arrays.affixed, test, tuple(strings))

    def _regex(self, at: int, pattern: str) -> Regex:
        try:
            return Regex(pattern)
        except ValueError as error:
            expected = f"a regular expression that RE2 accepts ({error})"
            raise self._source.invalid(at, expected, f"'{pattern}'") from None

    def _value(self) -> Part:
        token = self._token
        if isinstance(token.value, Path):
            self._expect("path")
            return Part(tree.identifier(token.value), token.at, None)
        if self._accept("NULL"):
            return Part(tree.constant(None), token.at, None)
        if token.kind == "identifier" and _CALL.match(self._source.text, token.at + len(token.text)):
            return self._call(self._expect("identifier"))
        return super()._value()

    def _call(self, token: Token) -> Part:
        """Parse the arguments of a function; they may be conditions, too."""
        name = token.text.upper()
        if (function := FUNCTIONS.get(name)) is None:
            raise self._source.invalid(token.at, instead_of(name), token.text)
        self._open()
        parts: list[Part] = []
        while self._token.kind != ")" and (not parts or self._expect(",", ", or )")):
            parts.append(self._either())
        self._expect(")")
        self._depth -= 1
        if not function.least <= len(parts) <= function.most:
            raise self._source.invalid(token.at, _arity(name), str(len(parts)))
        operands: list[Node | Regex] = [part.node for part in parts]
        if name == "UNIX_TIMESTAMP":
            self.identifiers.add(NOW)
        elif name == "IF":
            operands[0] = self._typed(parts[0], "condition")
        elif name == "REGEXP_REPLACE":
            if not isinstance(parts[1].literal, str):
                raise self._source.invalid(parts[1].at, "a string", "another value")
            operands[1] = self._regex(parts[1].at, parts[1].literal)
        return Part(function.call(*operands), token.at, None)

    def _typed(self, part: Part, kind: str) -> Node:
        """Convert between numbers, strings and conditions, except literal strings that spell no number."""
        if kind == "string":
            return part.node
        if part.kind == "string" and (kind == "condition" or (value := arrays.number(part.literal)) != value):
            return super()._typed(part, kind)
        if part.kind == kind:
            return part.node
        return tree.operation(arrays.truth if kind == "condition" else arrays.number, part.node)


def _arity(name: str) -> str:
    _, least, most = FUNCTIONS[name]
    counts = f"{least}" if least == most else f"{least} or more" if most == ANY else f"{least} or {most}"
    return f"{counts} argument{'s' * (counts != '1')} of {name}"
