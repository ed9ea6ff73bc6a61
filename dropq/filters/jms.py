"""The language of JMS selectors: SQL-92 conditions over header fields and properties.

Invariant: any text whatever gives an expression or an `InvalidFilter`. What can be seen to be wrong without a message
is an error here, such as a string literal where only a number makes sense; what depends on a message is not.

    either     = both *( OR both )                          both = negation *( AND negation )
    negation   = *NOT comparison
    comparison = sum [ ( = | <> | < | <= | > | >= ) sum | IS [NOT] NULL | [NOT] predicate ]
    predicate  = BETWEEN sum AND sum | IN ( string *( , string ) ) | LIKE string [ ESCAPE string ]
    sum        = product *( ( + | - ) product )             product = signed *( ( * | / ) signed )
    signed     = *( + | - ) ( identifier | string | number | TRUE | FALSE | ( either ) )
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from dropq.errors import InvalidFilter
from dropq.filters import tree
from dropq.filters.like import Pattern
from dropq.filters.tree import Node, Value

NESTING = 32  #: parentheses within parentheses; each takes up to fifteen frames of Python's stack
KEYWORDS = frozenset(["NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"])
#: The header fields; other names that begin with JMS are none, but for JMSX and JMS_, which begin those of properties.
HEADERS = (
    "JMSPriority", "JMSMessageID", "JMSTimestamp", "JMSCorrelationID", "JMSType", "JMSReplyTo", "JMSExpiration",
    "JMSRedelivered",
)  # fmt: skip
_SHOWN = 100  #: characters that an error shows on either side of the column it points at
_LEXEME = re.compile(
    r"""(?P<space>[ \t\f\r\n]+)
    | (?P<string>'[^']*(?:''[^']*)*'(?!'))
    | (?P<hex>0[xX][0-9a-fA-F]+[lL]?)
    | (?P<double>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eEfFdD]))(?:[eE][+-]?[0-9]+)?[fFdD]?)
    | (?P<integer>[0-9]+[lL]?)
    | (?P<word>[A-Za-z_$\x80-\U0010ffff][0-9A-Za-z_$\x80-\U0010ffff]*)
    | (?P<symbol><>|<=|>=|[=<>+\-*/(),])""",
    re.VERBOSE,
)
#: What to write instead of what other languages write.
_INSTEAD = {"'": "a closing ' to this string", '"': "a string in single quotes", "!": "<> for unequal"}


class _Token(NamedTuple):
    """A word of the language: its kind is the symbol or keyword itself, or identifier, string, number or end."""

    kind: str
    at: int
    text: str
    value: Value = None


class _Part(NamedTuple):
    """An expression, where it begins, and the kind of its value; None when only a message can tell."""

    node: Node
    at: int
    kind: str | None


def parse(text: str) -> Node:
    """Parse a selector into a condition; a blank one is true.

    Raises:
        InvalidFilter: it is none; the message points at the column and says what was expected there.
    """
    return _Parser(text).whole()


def _may_be(identifier: str) -> bool:
    """Tell whether a name that begins with JMS is a header field, or may be a property."""
    return identifier in HEADERS or identifier.startswith(("JMSX", "JMS_"))


def _invalid(text: str, at: int, expected: str, found: str) -> InvalidFilter:
    start = max(0, at - _SHOWN)
    shown = ("…" if start else "") + text[start : at + _SHOWN]
    caret = " " * (at - start + bool(start)) + "^"
    complaint = f"bad filter, column {at + 1}: expected {expected}, found {found[:_SHOWN]}"
    lines = complaint, f"    {shown}", f"    {caret}"
    return InvalidFilter("\n".join("".join(char if char.isprintable() else " " for char in line) for line in lines))


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens one by one, so that the first error from the left is the one that is told; `end` repeats."""
    at, before = 0, ""
    while at < len(text):
        found = _LEXEME.match(text, at)
        if found is None:
            raise _invalid(text, at, _INSTEAD.get(text[at], "a value or an operator"), repr(text[at]))
        if found.lastgroup != "space":
            yield _token(found, before)
            before = found[0]
        at = found.end()
    while True:
        yield _Token("end", at, "the end of the filter")


def _token(found: re.Match[str], before: str) -> _Token:
    at, lexeme = found.start(), found[0]
    if found.lastgroup == "symbol":
        return _Token(lexeme, at, lexeme)
    if found.lastgroup == "string":
        return _Token("string", at, lexeme, lexeme[1:-1].replace("''", "'"))
    if found.lastgroup == "word":
        return _word(found)
    if (follows := _LEXEME.match(found.string, found.end())) and follows.lastgroup == "word":
        raise _invalid(found.string, found.end(), "an operator after the number", follows[0])
    return _Token("number", at, lexeme, _double(found) if found.lastgroup == "double" else _integer(found, before))


def _word(found: re.Match[str]) -> _Token:
    at, word = found.start(), found[0]
    for index, char in enumerate(word.replace("$", "_")):
        if not (char if index == 0 else f"_{char}").isidentifier():
            raise _invalid(found.string, at + index, "a value or an operator", repr(char))
    keyword = word.upper() if word.isascii() else ""  # beyond ASCII there are more letters with the capital I or S
    return _Token(keyword if keyword in KEYWORDS else "identifier", at, word)


def _double(found: re.Match[str]) -> float:
    value = float(found[0].rstrip("fFdD"))
    if math.isinf(value):
        raise _invalid(found.string, found.start(), "a number within the range of a double", found[0])
    return value


def _integer(found: re.Match[str], before: str) -> int:
    digits = found[0].rstrip("lL")
    try:
        value = int(digits, 16 if found.lastgroup == "hex" else 8 if digits[0] == "0" else 10)
    except ValueError:  # an 8 or 9 in an octal number, or thousands of digits
        value = 1 << 64
    if value >= (1 << 63) + (before == "-"):  # there is one more negative number than there are positive ones
        raise _invalid(found.string, found.start(), "an integer of 64 bits (octal if it begins with 0)", found[0])
    return value


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._token = next(self._tokens)
        self._depth = 0

    def whole(self) -> Node:
        if self._token.kind == "end":
            return tree.constant(True)  # an empty selector is none
        return self._typed(self._closed("end", "the end of the filter"), "condition")

    def _either(self) -> _Part:
        return self._chain(self._both(), ("OR",), self._both, "condition")

    def _both(self) -> _Part:
        return self._chain(self._negation(), ("AND",), self._negation, "condition")

    def _sum(self) -> _Part:
        return self._chain(self._product(), ("+", "-"), self._product, "number")

    def _product(self) -> _Part:
        return self._chain(self._signed(), ("*", "/"), self._signed, "number")

    def _chain(self, first: _Part, either: tuple[str, ...], operand: Callable[[], _Part], kind: str) -> _Part:
        if self._token.kind not in either:
            return first
        symbols, operands = [], [self._typed(first, kind)]
        while symbol := self._accept(*either):
            symbols.append(symbol.kind)
            operands.append(self._typed(operand(), kind))
        return _Part(tree.operation(partial(tree.fold, symbols), *operands), first.at, kind)

    def _negation(self) -> _Part:
        at, count = self._token.at, 0
        while self._accept("NOT"):
            count += 1
        part = self._comparison()
        for _ in range(2 - count % 2 if count else 0):  # of many, two do what all of them would
            part = _Part(tree.operation(tree.negation, self._typed(part, "condition")), at, "condition")
        return part

    def _comparison(self) -> _Part:
        left = self._sum()
        if symbol := self._accept("=", "<>", "<", "<=", ">", ">="):
            return _Part(self._compared(left, symbol.kind), left.at, "condition")
        is_null, negated = self._accept("IS"), self._accept("NOT")
        if not (is_null or negated or self._token.kind in ("BETWEEN", "IN", "LIKE")):
            return left
        if is_null:
            self._expect("NULL", "NULL" if negated else "NULL or NOT NULL")
            node = tree.operation(tree.is_null, left.node)
        elif self._accept("BETWEEN"):
            return _Part(self._between(left, bool(negated)), left.at, "condition")
        else:
            node = tree.operation(self._membership(), self._typed(left, "string"))
        return _Part(tree.operation(tree.negation, node) if negated else node, left.at, "condition")

    def _compared(self, left: _Part, symbol: str) -> Node:
        right = self._sum()
        if symbol not in ("=", "<>"):
            self._typed(left, "number")
            self._typed(right, "number")
        return tree.operation(partial(tree.compare, symbol), left.node, right.node)

    def _between(self, left: _Part, negated: bool) -> Node:
        """BETWEEN and NOT BETWEEN are each a pair of comparisons, and so both false for what has no order."""
        value, low = self._typed(left, "number"), self._typed(self._sum(), "number")
        self._expect("AND")
        high = self._typed(self._sum(), "number")
        lower = tree.operation(partial(tree.compare, "<" if negated else ">="), value, low)
        upper = tree.operation(partial(tree.compare, ">" if negated else "<="), value, high)
        return tree.operation(partial(tree.fold, ["OR" if negated else "AND"]), lower, upper)

    def _membership(self) -> Callable[..., Value]:
        if self._accept("LIKE"):
            return partial(tree.like, self._pattern())
        self._expect("IN", "BETWEEN, IN or LIKE")
        self._expect("(")
        strings = [self._string()]
        while self._accept(","):
            strings.append(self._string())
        self._expect(")", ", or )")
        return partial(tree.within, frozenset(strings))

    def _pattern(self) -> Pattern:
        token, pattern = self._token, self._string()
        escape = self._character() if self._accept("ESCAPE") else None
        try:
            return Pattern.compile(pattern, escape)
        except ValueError as error:
            raise _invalid(self._text, token.at, f"a pattern ({error})", token.text) from None

    def _character(self) -> str:
        if self._token.kind == "string" and len(str(self._token.value)) != 1:
            raise self._unexpected("a string of one character")
        return self._string()

    def _signed(self) -> _Part:
        at, signs = self._token.at, ""
        while sign := self._accept("+", "-"):
            signs += sign.kind
        part = self._value()
        if not signs:
            return part
        from_zero = partial(tree.fold, "-" if signs.count("-") % 2 else "+")
        return _Part(tree.operation(from_zero, tree.constant(0), self._typed(part, "number")), at, "number")

    def _value(self) -> _Part:
        token = self._token
        if token.kind == "(":
            return self._group()
        if token.kind == "/":
            raise self._unexpected("a header field or property (filters over bodies are not built in this version)")
        if token.kind == "identifier" and token.text.startswith("JMS") and not _may_be(token.text):
            raise self._unexpected(f"a header field ({', '.join(HEADERS)}) or a property")
        if self._accept("identifier"):
            return _Part(tree.identifier(token.text), token.at, None)
        if not self._accept("string", "number", "TRUE", "FALSE"):
            raise self._unexpected("a value (IS NULL asks for NULL)" if token.kind == "NULL" else "a value")
        value = token.kind == "TRUE" if token.value is None else token.value
        return _Part(tree.constant(value), token.at, tree.kind_of(value))

    def _group(self) -> _Part:
        if self._depth == NESTING:
            raise self._unexpected(f"at most {NESTING} parentheses within each other")
        at = self._expect("(").at
        self._depth += 1
        part = self._closed(")", ")")
        self._depth -= 1
        return part._replace(at=at)

    def _closed(self, end: str, called: str) -> _Part:
        part = self._either()
        self._expect(end, f"{'AND, OR' if part.kind == 'condition' else 'an operator'} or {called}")
        return part

    def _typed(self, part: _Part, kind: str) -> Node:
        """Refuse an expression that can be seen to be of another kind: it would never match."""
        if part.kind not in (None, kind):
            raise _invalid(self._text, part.at, f"a {kind}", f"a {part.kind}")
        return part.node

    def _string(self) -> str:
        return str(self._expect("string", "a string").value)

    def _accept(self, *kinds: str) -> _Token | None:
        if self._token.kind not in kinds:
            return None
        token, self._token = self._token, next(self._tokens)
        return token

    def _expect(self, kind: str, expected: str = "") -> _Token:
        if token := self._accept(kind):
            return token
        raise self._unexpected(expected or kind)

    def _unexpected(self, expected: str) -> InvalidFilter:
        return _invalid(self._text, self._token.at, expected, self._token.text)
