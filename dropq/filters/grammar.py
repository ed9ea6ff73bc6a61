"""What the languages of filters share: words, precedence, and errors that point at a column.

Invariant: any text whatever gives an expression or an `InvalidFilter`. What can be seen to be wrong without a message
is an error here, such as a string literal where only a number makes sense; what depends on a message is not.

    either     = both *( OR both )                          both = negation *( AND negation )
    negation   = *NOT comparison
    comparison = sum [ symbol sum | IS [NOT] NULL | [NOT] predicate ]
    sum        = product *( ( + | - ) product )             product = signed *( ( * | / ) signed )
    signed     = *( + | - ) ( value | ( either ) )

Which symbols, predicates and values there are is the language's.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from dropq.errors import InvalidFilter
from dropq.filters import tree
from dropq.filters.tree import Node, Path, Value

log = logging.getLogger("dropq")

NESTING = 32  #: parentheses within parentheses; each takes up to fifteen frames of Python's stack
KEYWORDS = frozenset(["NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"])
#: The header fields; other names that begin with JMS are none, but for JMSX and JMS_, which begin those of properties.
HEADERS = (
    "JMSPriority", "JMSMessageID", "JMSTimestamp", "JMSCorrelationID", "JMSType", "JMSReplyTo", "JMSExpiration",
    "JMSRedelivered", "JMSDeliveryMode",
)  # fmt: skip
_SHOWN = 100  #: characters that an error shows on either side of the column it points at
#: What ends an operand: after it a / divides, anywhere else it begins a path.
_OPERANDS = frozenset(["identifier", "string", "number", "path", "TRUE", "FALSE", "NULL", ")"])

#: The words that both languages have, and what they are; strings and symbols are each one's own.
WORDS = r"""(?P<space>[ \t\f\r\n]+)
    | (?P<hex>0[xX][0-9a-fA-F]+[lL]?)
    | (?P<double>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eEfFdD]))(?:[eE][+-]?[0-9]+)?[fFdD]?)
    | (?P<integer>[0-9]+[lL]?)
    | (?P<word>[A-Za-z_$\x80-\U0010ffff][0-9A-Za-z_$\x80-\U0010ffff]*)"""


class Token(NamedTuple):
    """A word of the language: its kind is the symbol or keyword itself, or identifier, string, number, path or end."""

    kind: str
    at: int
    text: str
    value: Value = None


class Part(NamedTuple):
    """An expression, where it begins, and the kind of its value; None when only a message can tell.

    A literal has its value, which is None for NULL and for whatever is no literal; an identifier has its name.
    """

    node: Node
    at: int
    kind: str | None
    literal: Value = None
    name: str = ""


class Source(NamedTuple):
    """A text that is read, and what it is called in errors."""

    text: str
    called: str = "filter"

    def invalid(self, at: int, expected: str, found: str) -> InvalidFilter:
        """Make the error that points at a column and says what was expected there."""
        start = max(0, at - _SHOWN)
        shown = ("…" if start else "") + self.text[start : at + _SHOWN]
        caret = " " * (at - start + bool(start)) + "^"
        complaint = f"bad {self.called}, column {at + 1}: expected {expected}, found {found[:_SHOWN]}"
        lines = complaint, f"    {shown}", f"    {caret}"
        return InvalidFilter("\n".join("".join(char if char.isprintable() else " " for char in line) for line in lines))


class Dialect(NamedTuple):
    """How a language writes its words.

    Attributes:
        lexeme: matches the next word by its group: those of `WORDS`, string, phrase or symbol.
        path: reads a path where an operand may stand; None where the language has none.
        kinds: symbols, phrases and words between operands that are another kind of token than their text says.
        instead: what to write instead of what other languages write.
    """

    lexeme: re.Pattern[str]
    path: Callable[[Source, int], Path] | None = None
    kinds: Mapping[str, str] = MappingProxyType({})
    instead: Mapping[str, str] = MappingProxyType({})


def tokens(source: Source, dialect: Dialect) -> Iterator[Token]:
    """Yield the tokens one by one, so that the first error from the left is the one that is told; `end` repeats."""
    text, at, before = source.text, 0, Token("", 0, "")
    while at < len(text):
        operand = before.kind in _OPERANDS
        if dialect.path and text[at] == "/" and not operand:
            path = dialect.path(source, at)
            before = Token("path", at, path, path)
            yield before
            at += len(path)
            continue
        found = dialect.lexeme.match(text, at)
        if found is None:
            raise source.invalid(at, dialect.instead.get(text[at], "a value or an operator"), repr(text[at]))
        if found.lastgroup != "space":
            before = _token(source, dialect, found, before)
            yield before
        at = found.end()
    while True:
        yield Token("end", at, f"the end of the {source.called}")


def _token(source: Source, dialect: Dialect, found: re.Match[str], before: Token) -> Token:
    at, lexeme = found.start(), found[0]
    if found.lastgroup in ("symbol", "phrase"):
        kind = " ".join(lexeme.upper().split())
        return Token(dialect.kinds.get(kind, kind), at, lexeme)
    if found.lastgroup == "string":
        return Token("string", at, lexeme, unquoted(lexeme))
    if found.lastgroup == "word":
        between = dialect.kinds.get(lexeme.upper()) if before.kind in _OPERANDS else None
        return Token(between, at, lexeme) if between else _word(source, found)
    if (follows := dialect.lexeme.match(source.text, found.end())) and follows.lastgroup == "word":
        raise source.invalid(found.end(), "an operator after the number", follows[0])
    value = _double(source, found) if found.lastgroup == "double" else _integer(source, found, before.text)
    return Token("number", at, lexeme, value)


def unquoted(literal: str) -> str:
    """Return what stands between quotes, in which the quote itself is doubled."""
    return literal[1:-1].replace(literal[0] * 2, literal[0])


def _word(source: Source, found: re.Match[str]) -> Token:
    at, word = found.start(), found[0]
    for index, char in enumerate(word.replace("$", "_")):
        if not (char if index == 0 else f"_{char}").isidentifier():
            raise source.invalid(at + index, "a value or an operator", repr(char))
    keyword = word.upper() if word.isascii() else ""  # beyond ASCII there are more letters with the capital I or S
    return Token(keyword if keyword in KEYWORDS else "identifier", at, word)


def _double(source: Source, found: re.Match[str]) -> float:
    value = float(found[0].rstrip("fFdD"))
    if math.isinf(value):
        raise source.invalid(found.start(), "a number within the range of a double", found[0])
    return value


def _integer(source: Source, found: re.Match[str], before: str) -> int:
    digits = found[0].rstrip("lL")
    try:
        value = int(digits, 16 if found.lastgroup == "hex" else 8 if digits[0] == "0" else 10)
    except ValueError:  # an 8 or 9 in an octal number, or thousands of digits
        value = 1 << 64
    if value >= (1 << 63) + (before == "-"):  # there is one more negative number than there are positive ones
        raise source.invalid(found.start(), "an integer of 64 bits (octal if it begins with 0)", found[0])
    return value


class Parser(ABC):
    """Reads one text; a language says what is compared and how, and which predicates and values there are."""

    #: How the language writes its words.
    dialect: Dialect
    #: Which symbols compare.
    comparisons: tuple[str, ...] = ("=", "<>", "<", "<=", ">", ">=")
    #: Which symbols multiply and divide.
    products: tuple[str, ...] = ("*", "/")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tokens = tokens(source, self.dialect)
        self._token = next(self._tokens)
        self._depth = 0

    def condition(self) -> Node:
        """Read the text as a condition; a blank one is true."""
        if self._token.kind == "end":
            return tree.constant(True)  # an empty selector is none
        return self._typed(self._whole(), "condition")

    def expression(self) -> Node:
        """Read the text as an expression of any kind."""
        return self._whole().node

    @abstractmethod
    def _compared(self, left: Part, symbol: str, right: Part) -> Node:
        """Make the comparison of two operands."""

    @abstractmethod
    def _predicate(self, left: Part, negated: bool) -> Node:
        """Read BETWEEN, IN, LIKE and the like after their left operand, and after a NOT where there was one."""

    #: Which tokens begin a predicate.
    predicates: tuple[str, ...] = ("BETWEEN", "IN", "LIKE")

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
        for _ in range(2 - count % 2 if count else 0):  # of many, two do what all of them would
            part = Part(tree.operation(tree.negation, self._typed(part, "condition")), at, "condition")
        return part

    def _comparison(self) -> Part:
        left = self._sum()
        if symbol := self._accept(*self.comparisons):
            right = self._sum()
            self._warn_of_ids(left, right.literal)
            self._warn_of_ids(right, left.literal)
            return Part(self._compared(left, symbol.kind, right), left.at, "condition")
        is_null, negated = self._accept("IS"), self._accept("NOT")
        if not (is_null or negated or self._token.kind in self.predicates):
            return left
        if is_null:
            self._expect("NULL", "NULL" if negated else "NULL or NOT NULL")
            node = tree.operation(tree.is_null, left.node)
            node = tree.operation(tree.negation, node) if negated else node
        elif self._token.kind in self.predicates:
            node = self._predicate(left, negated is not None)
        else:
            raise self._unexpected(f"{', '.join(self.predicates[:-1])} or {self.predicates[-1]}")
        return Part(node, left.at, "condition")

    def _bounds(self) -> tuple[Part, Part]:
        """Read what BETWEEN stands before."""
        low = self._sum()
        self._expect("AND")
        return low, self._sum()

    def _listed(self, one: Callable[[], object]) -> None:
        """Read a list in parentheses, one by one."""
        self._expect("(")
        one()
        while self._accept(","):
            one()
        self._expect(")", ", or )")

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
            raise self._unexpected(f"a header field ({', '.join(HEADERS)}) or a property")
        if self._accept("identifier"):
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
        """Read a parenthesis within which there may be others."""
        if self._depth == NESTING:
            raise self._unexpected(f"at most {NESTING} parentheses within each other")
        self._depth += 1
        return self._expect("(")

    def _closed(self, end: str, called: str) -> Part:
        part = self._either()
        self._expect(end, f"{'AND, OR' if part.kind == 'condition' else 'an operator'} or {called}")
        return part

    def _typed(self, part: Part, kind: str) -> Node:
        """Refuse an expression that can be seen to be of another kind: it would never match."""
        if part.kind not in (None, kind):
            raise self._source.invalid(part.at, f"a {kind}", f"a {part.kind}")
        return part.node

    def _warn_of_ids(self, part: Part, *texts: Value) -> None:
        """Warn where a message's id is compared with text that no id is: that is good JMS, and never true."""
        for text in texts if part.name == "JMSMessageID" else ():
            if isinstance(text, str) and not text.startswith("ID:"):
                said = "%s %r: a JMSMessageID begins with ID:, so none is %r; write 'ID:%s'"
                log.warning(said, self._source.called, self._source.text, text, text)

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
    """Make the expression that is a value."""
    return Part(tree.constant(value), at, tree.kind_of(value), value)


def _may_be(identifier: str) -> bool:
    """Tell whether a name that begins with JMS is a header field, or may be a property."""
    return identifier in HEADERS or identifier.startswith(("JMSX", "JMS_"))
