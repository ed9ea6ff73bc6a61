"""What both filter languages share: tokens, precedence, and errors that point at a column.

Invariant: parsing any text gives an expression or raises `InvalidFilter`. A mistake that shows without a message is an
error, such as a string literal where only a number makes sense; what depends on a message is not.

    either     = both *( OR both )                          both = negation *( AND negation )
    negation   = *NOT comparison
    comparison = sum [ symbol sum | IS [NOT] NULL | [NOT] predicate ]
    sum        = product *( ( + | - ) product )             product = signed *( ( * | / ) signed )
    signed     = *( + | - ) ( value | ( either ) )

Each language defines its own symbols, predicates and values.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from dropq.errors import InvalidFilter
from dropq.filters import tree
from dropq.filters.headers import HEADERS
from dropq.filters.tree import Found, Node, Path, Value
from dropq.format.names import KEYWORDS, RESERVED

log = logging.getLogger("dropq")

T = TypeVar("T")

NESTING = 32  #: parentheses within parentheses; each takes up to fifteen frames of Python's stack
_SHOWN = 100  #: characters that an error shows on either side of the column it points at
#: The tokens that end an operand: after them / divides, anywhere else it begins a path.
_OPERANDS = frozenset(["identifier", "string", "number", "path", "TRUE", "FALSE", "NULL", ")"])

#: The tokens that both languages have; each adds its own strings and symbols.
WORDS = r"""(?P<space>[ \t\f\r\n]+)
    | (?P<hex>0[xX][0-9a-fA-F]+[lL]?)
    | (?P<double>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eEfFdD]))(?:[eE][+-]?[0-9]+)?[fFdD]?)
    | (?P<integer>[0-9]+[lL]?)
    | (?P<word>[A-Za-z_$\x80-\U0010ffff][0-9A-Za-z_$\x80-\U0010ffff]*)"""


class Token(NamedTuple):
    """A token; its kind is the symbol or keyword itself, or identifier, string, number, path or end."""

    kind: str
    at: int
    text: str
    value: Value = None


class Part(NamedTuple):
    """A parsed expression."""

    node: Node
    #: The column where it begins, from 0.
    at: int
    #: The kind of its value; None if that depends on the message.
    kind: str | None
    #: The value of a literal; None for NULL and for all other expressions.
    literal: Value = None
    #: The name of an identifier; "" for all other expressions.
    name: str = ""


class Source(NamedTuple):
    """A text to parse, and what errors call it."""

    text: str
    called: str = "filter"

    def invalid(self, at: int, expected: str, found: str) -> InvalidFilter:
        """Return the error that points at a column and says what was expected there."""
        start = max(0, at - _SHOWN)
        shown = ("…" if start else "") + self.text[start : at + _SHOWN]
        caret = " " * (at - start + bool(start)) + "^"
        complaint = f"bad {self.called}, column {at + 1}: expected {expected}, found {found[:_SHOWN]}"
        lines = complaint, f"    {shown}", f"    {caret}"
        return InvalidFilter("\n".join("".join(char if char.isprintable() else " " for char in line) for line in lines))


class Dialect(NamedTuple):
    """The tokens of a language."""

    #: Matches the next token; the group says what it is: one of `WORDS`, or string, phrase or symbol.
    lexeme: re.Pattern[str]
    #: Parses a path where an operand may stand; None if the language has no paths.
    path: Callable[[Source, int], Path] | None = None
    #: The kinds of symbols, phrases and words between operands, where they differ from the text.
    kinds: Mapping[str, str] = MappingProxyType({})
    #: What to write in place of a character of other languages.
    instead: Mapping[str, str] = MappingProxyType({})


def tokens(source: Source, dialect: Dialect) -> Iterator[Token]:
    """Yield the tokens, then `end` for ever. They are read only on demand, so the leftmost error is raised."""
    text, at, before = source.text, 0, Token("", 0, "")
    while at < len(text):
        operand = before.kind in _OPERANDS
        if dialect.path and text[at] == "/" and not operand:
            path = dialect.path(source, at)
            before = Token("path", at, path, path)
            yield before
            at += len(path)
            continue
        match = dialect.lexeme.match(text, at)
        if match is None:
            expected = dialect.instead.get(text[at], "a value or an operator")
            is_open = expected.startswith("a closing ")
            raise source.invalid(at, expected, f"the end of the {source.called}" if is_open else repr(text[at]))
        if match.lastgroup != "space":
            before = _token(source, dialect, match, before)
            yield before
        at = match.end()
    while True:
        yield Token("end", at, f"the end of the {source.called}")


def _token(source: Source, dialect: Dialect, match: re.Match[str], before: Token) -> Token:
    at, lexeme = match.start(), match[0]
    if match.lastgroup in ("symbol", "phrase"):
        kind = " ".join(lexeme.upper().split())
        return Token(dialect.kinds.get(kind, kind), at, lexeme)
    if match.lastgroup == "string":
        return Token("string", at, lexeme, unquoted(lexeme))
    if match.lastgroup == "word":
        between = dialect.kinds.get(lexeme.upper()) if before.kind in _OPERANDS else None
        return Token(between, at, lexeme) if between else _word(source, match)
    if (follows := dialect.lexeme.match(source.text, match.end())) and follows.lastgroup == "word":
        raise source.invalid(match.end(), "an operator after the number", follows[0])
    value = _double(source, match) if match.lastgroup == "double" else _integer(source, match, before.text)
    return Token("number", at, lexeme, value)


def unquoted(literal: str) -> str:
    """Return the text of a quoted literal, in which the quote itself is doubled."""
    return literal[1:-1].replace(literal[0] * 2, literal[0])


def _word(source: Source, match: re.Match[str]) -> Token:
    at, word = match.start(), match[0]
    for index, char in enumerate(word.replace("$", "_")):
        if not (char if index == 0 else f"_{char}").isidentifier():
            raise source.invalid(at + index, "a value or an operator", repr(char))
    keyword = word.upper() if word.isascii() else ""  # some letters beyond ASCII have I or S as their upper case
    return Token(keyword if keyword in KEYWORDS else "identifier", at, word)


def _double(source: Source, match: re.Match[str]) -> float:
    value = float(match[0].rstrip("fFdD"))
    if math.isinf(value):
        raise source.invalid(match.start(), "a number within the range of a double", match[0])
    return value


def _integer(source: Source, match: re.Match[str], before: str) -> int:
    digits = match[0].rstrip("lL")
    try:
        value = int(digits, 16 if match.lastgroup == "hex" else 8 if digits[0] == "0" else 10)
    except ValueError:  # an 8 or 9 in an octal number, or thousands of digits
        value = 1 << 64
    if value >= (1 << 63) + (before == "-"):  # the lowest negative number is one further from 0
        raise source.invalid(match.start(), "an integer of 64 bits (octal if it begins with 0)", match[0])
    return value


class Parser(ABC):
    """Parses one text; a language adds its comparisons, predicates and values."""

    dialect: Dialect
    #: The symbols that compare.
    comparisons: tuple[str, ...] = ("=", "<>", "<", "<=", ">", ">=")
    #: The symbols that multiply and divide.
    products: tuple[str, ...] = ("*", "/")
    #: The tokens that begin a predicate.
    predicates: tuple[str, ...] = ("BETWEEN", "IN", "LIKE")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tokens = tokens(source, self.dialect)
        self._token = next(self._tokens)
        self._depth = 0
        #: The header fields and properties that the text names.
        self.identifiers: set[str] = set()

    def condition(self) -> Node:
        """Parse the text as a condition; a blank text is a condition that is true."""
        if self._token.kind == "end":
            return tree.constant(True)
        return self._typed(self._whole(), "condition")

    def expression(self) -> Node:
        """Parse the text as an expression of any kind."""
        return self._whole().node

    @abstractmethod
    def _compared(self, left: Part, symbol: str, right: Part) -> Node:
        """Return the comparison of two operands."""

    @abstractmethod
    def _predicate(self, left: Part, negated: bool) -> Node:
        """Parse a predicate after its left operand, and after NOT if `negated`."""

    def _whole(self) -> Part:
        return self._closed("end", f"the end of the {self._source.called}")

    def _either(self) -> Part:
        return self._junction(self._both, "OR", decisive=True)

    def _both(self) -> Part:
        return self._junction(self._negation, "AND", decisive=False)

    def _junction(self, operand: Callable[[], Part], symbol: str, *, decisive: bool) -> Part:
        first = operand()
        if self._token.kind != symbol:
            return first
        operands = [self._typed(first, "condition")]
        while self._accept(symbol):
            operands.append(self._typed(operand(), "condition"))
        return Part(tree.junction(decisive, *operands), first.at, "condition")

    def _sum(self) -> Part:
        return self._calculation(self._product, ("+", "-"))

    def _product(self) -> Part:
        return self._calculation(self._signed, self.products)

    def _calculation(self, operand: Callable[[], Part], either: tuple[str, ...]) -> Part:
        first = operand()
        if self._token.kind not in either:
            return first
        symbols, operands = [], [self._typed(first, "number")]
        while symbol := self._accept(*either):
            symbols.append(symbol.kind)
            operands.append(self._typed(operand(), "number"))
        return Part(tree.operation(partial(tree.fold, symbols), *operands), first.at, "number")

    def _negation(self) -> Part:
        at, count = self._token.at, 0
        while self._accept("NOT"):
            count += 1
        part = self._comparison()
        for _ in range(2 - count % 2 if count else 0):  # one or two have the same effect as all of them
            part = Part(tree.operation(tree.negation, self._typed(part, "condition")), at, "condition")
        return part

    def _comparison(self) -> Part:
        left = self._sum()
        if symbol := self._accept(*self.comparisons):
            right = self._sum()
            self._warn_of_ids(left, right.literal)
            self._warn_of_ids(right, left.literal)
            return Part(self._compared(left, symbol.kind, right), left.at, "condition")
        of_kind, negated = self._accept("IS"), self._accept("NOT")
        if not (of_kind or negated or self._token.kind in self.predicates):
            return left
        if of_kind:
            node = tree.operation(self._kind("" if negated else " or NOT NULL"), left.node)
            node = tree.operation(tree.negation, node) if negated else node
        elif self._token.kind in self.predicates:
            node = self._predicate(left, negated is not None)
        else:
            raise self._unexpected(f"{', '.join(self.predicates[:-1])} or {self.predicates[-1]}")
        return Part(node, left.at, "condition")

    def _kind(self, alternative: str) -> Callable[[Found], bool]:
        """Parse what may stand after IS or IS NOT."""
        self._expect("NULL", f"NULL{alternative}")
        return tree.is_null

    def _bounds(self) -> tuple[Part, Part]:
        """Parse the bounds after BETWEEN."""
        low = self._sum()
        self._expect("AND")
        return low, self._sum()

    def _list(self, item: Callable[[], T]) -> list[T]:
        """Parse a list in parentheses, each item by a call."""
        self._expect("(")
        items = [item()]
        while self._accept(","):
            items.append(item())
        self._expect(")", ", or )")
        return items

    def _signed(self) -> Part:
        at, signs = self._token.at, ""
        while sign := self._accept("+", "-"):
            signs += sign.kind
        part = self._value()
        if not signs:
            return part
        node, from_zero = self._typed(part, "number"), partial(tree.fold, "-" if signs.count("-") % 2 else "+")
        if part.kind == "number" and part.literal is not None:
            return literal(from_zero(0, part.literal), at)
        return Part(tree.operation(from_zero, tree.constant(0), node), at, "number")

    def _value(self) -> Part:
        token = self._token
        if token.kind == "(":
            return self._group()
        if token.kind == "identifier" and token.text.startswith("JMS") and not _may_be(token.text):
            known = [name for name in HEADERS if name.startswith(RESERVED) == token.text.startswith(RESERVED)]
            raise self._unexpected(f"a header field ({', '.join(known)}) or a property")
        if self._accept("identifier"):
            self.identifiers.add(token.text)
            return Part(tree.identifier(token.text), token.at, None, name=token.text)
        if not self._accept("string", "number", "TRUE", "FALSE"):
            raise self._unexpected("a value (IS NULL asks for NULL)" if token.kind == "NULL" else "a value")
        return literal(token.kind == "TRUE" if token.value is None else token.value, token.at)

    def _group(self) -> Part:
        at = self._open().at
        part = self._closed(")", ")")
        self._depth -= 1
        return part._replace(at=at)

    def _open(self) -> Token:
        """Read an opening parenthesis, unless too many are open."""
        if self._depth == NESTING:
            raise self._unexpected(f"at most {NESTING} parentheses within each other")
        self._depth += 1
        return self._expect("(")

    def _closed(self, end: str, called: str) -> Part:
        part = self._either()
        self._expect(end, f"{'AND, OR' if part.kind == 'condition' else 'an operator'} or {called}")
        return part

    def _typed(self, part: Part, kind: str) -> Node:
        """Refuse an expression that is known to have another kind, as it would never match."""
        if part.kind not in (None, kind):
            raise self._source.invalid(part.at, f"a {kind}", f"a {part.kind}")
        return part.node

    def _warn_of_ids(self, part: Part, *texts: Value) -> None:
        """Warn if a message's id is compared with a text that cannot be an id: that is valid JMS, but never true."""
        for text in texts if part.name == "JMSMessageID" else ():
            if isinstance(text, str) and not text.startswith("ID:"):
                warning = "%s %r: a JMSMessageID begins with ID:, so it never equals %r; write 'ID:%s'"
                log.warning(warning, self._source.called, self._source.text, text, text)

    def _string(self) -> str:
        return str(self._expect("string", "a string").value)

    def _accept(self, *kinds: str) -> Token | None:
        if self._token.kind not in kinds:
            return None
        token, self._token = self._token, next(self._tokens)
        return token

    def _expect(self, kind: str, expected: str = "") -> Token:
        if token := self._accept(kind):
            return token
        raise self._unexpected(expected or kind)

    def _unexpected(self, expected: str) -> InvalidFilter:
        return self._source.invalid(self._token.at, expected, self._token.text)


def literal(value: Value, at: int) -> Part:
    """Return the expression that is a value."""
    return Part(tree.constant(value), at, tree.kind_of(value), value)


def _may_be(identifier: str) -> bool:
    """Return whether a name that begins with JMS is a header field, or may be a property."""
    is_property = identifier.startswith(("JMSX", "JMS_")) and not identifier.startswith(RESERVED)
    return is_property or identifier in HEADERS
