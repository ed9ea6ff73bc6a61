"""A filter selects as the JMS selector language says, agrees with SQL where they share it, and nothing upsets it."""

from __future__ import annotations

import math
import os
import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dropq.errors import InvalidFilter
from dropq.filters import Body, Value, compile_filter, compile_selector, for_name
from dropq.filters.grammar import NESTING
from dropq.filters.like import Pattern
from dropq.format.names import KEYWORDS, Name, check_property_name, parse
from dropq.format.typed import Typed

T, F, U = True, False, None
#: How many generated expressions are held against sqlite: DROPQ_EXAMPLES=100000 takes about an hour.
EXAMPLES = int(os.environ.get("DROPQ_EXAMPLES", "500"))


def matches(text: str, **fields: Value) -> bool:
    return compile_filter(text).matches(fields.get)


def truth(text: str, **fields: Value) -> bool | None:
    """Tell whether a filter is true, false or unknown: of the last two, only the false one's negation matches."""
    return True if matches(text, **fields) else False if matches(f"NOT ({text})", **fields) else None


def error(text: str) -> str:
    with pytest.raises(InvalidFilter) as caught:
        compile_filter(text)
    return str(caught.value)


class TestLiterals:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("x = 'literal'", "literal"), ("x = 'literal''s'", "literal's"), ("x = ''", ""), ("x = ''''", "'"),
            ("x = 'Größe 数 \N{GRINNING FACE}'", "Größe 数 \N{GRINNING FACE}"), ("x = '-- a'", "-- a"),
            (r"x = '\n'", r"\n"), ("x = 'a\nb'", "a\nb"),
        ],
    )  # fmt: skip
    def test_a_string_stands_in_single_quotes_and_doubles_its_own(self, text: str, value: str) -> None:
        """A literal string is any text of Unicode in single quotes; '' within it is one quote, and nothing
        else is special.
        """
        assert truth(text, x=value) is T

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("57", 57), ("-957", -957), ("+62", 62), ("0", 0), ("57L", 57), ("57l", 57),
            ("9223372036854775807", (1 << 63) - 1), ("-9223372036854775808", -(1 << 63)),
            ("0x1F", 31), ("0XffL", 255), ("010", 8), ("0777L", 511), ("-0x10", -16), ("0000000000000000000000001", 1),
        ],
    )  # fmt: skip
    def test_an_exact_number_is_a_java_integer_of_64_bits(self, text: str, value: int) -> None:
        """A number without a point is exact: decimal, hexadecimal or octal as in Java, with an L or without,
        in a long's range.
        """
        half = value // 2 if value > 0 else -(-value // 2)
        assert truth(f"x = {text} AND {text} / 2 = half", x=value, half=half) is T

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("7E3", 7000.0), ("-57.9E2", -5790.0), ("7.", 7.0), ("-95.7", -95.7), ("+6.2", 6.2), (".5", 0.5),
            ("1e-3", 0.001), ("2.5E+1", 25.0), ("5F", 5.0), ("5d", 5.0), ("0.1f", 0.1), ("1.5D", 1.5), ("09.5", 9.5),
            ("1.7976931348623157E308", sys.float_info.max),
        ],
    )  # fmt: skip
    def test_an_approximate_number_is_a_java_double(self, text: str, value: float) -> None:
        """A number with a point, an exponent or a suffix F or D is approximate: a double, as Java writes it."""
        assert truth(f"x = {text} AND {text} / 2 = half", x=value, half=value / 2) is T

    @pytest.mark.parametrize(
        "text",
        [
            "9223372036854775808", "-9223372036854775809", "0x8000000000000000", "09", "0778", "1e999", "5abc", "0x",
            "1_000", "5LL", "1e", "1.2.3", "9" * 5000, "0b1", "- (9223372036854775808)",
        ],
    )  # fmt: skip
    def test_what_is_no_number_of_java_or_beyond_its_range_is_refused(self, text: str) -> None:
        """A literal that Java would not compile does not compile here."""
        assert "expected" in error(f"x = {text}")

    def test_booleans_are_true_and_false(self) -> None:
        """The two literals of the type boolean are TRUE and FALSE, and each is a condition by itself."""
        assert truth("x = TRUE", x=True) is T
        assert truth("x = false", x=True) is F
        assert truth("TRUE") is T
        assert truth("FALSE") is F


class TestIdentifiers:
    @pytest.mark.parametrize(
        "name", ["a", "_x", "$a_b", "größe", "a1", "数", "null_", "\u0131s", "e\u0301", "JMS_vendor_x"]
    )
    def test_begin_with_a_letter_an_underscore_or_a_dollar(self, name: str) -> None:
        """An identifier begins as a Java identifier does, and goes on with such characters and digits."""
        assert truth(f"{name} = 1", **{name: 1}) is T

    @pytest.mark.parametrize("name", ["1a", "a.b", "a-b c", "#a", "a b", "a\u00a0b", "\u0301e", '"a"', "a@", "\ud800"])
    def test_are_nothing_else(self, name: str) -> None:
        """What is no Java identifier is no identifier: no quotes, dots or dashes."""
        error(f"{name} = 1")

    @pytest.mark.parametrize("keyword", sorted(KEYWORDS))
    def test_are_never_a_keyword_and_so_no_property_is_called_like_one(self, keyword: str) -> None:
        """NULL, TRUE, FALSE, NOT, AND, OR, BETWEEN, LIKE, IN, IS and ESCAPE are reserved, in any case."""
        for name in (keyword, keyword.lower(), keyword.title()):
            if keyword in ("TRUE", "FALSE"):
                assert truth(f"{name} = 1", **{name: 1}) is F
            else:
                error(f"{name} = 1")
            with pytest.raises(ValueError, match="keyword"):
                check_property_name(name)

    def test_are_case_sensitive(self) -> None:
        """Color and color are two properties."""
        assert truth("color = 'blue'", Color="blue") is U

    def test_that_a_message_does_not_have_are_null(self) -> None:
        """An identifier that a message lacks is NULL."""
        assert truth("nothing IS NULL") is T

    def test_keep_the_type_that_was_sent(self) -> None:
        """No value is converted as getters of properties would do: what was sent as a string is no number."""
        assert truth("NumberOfOrders > 1", NumberOfOrders="2") is F
        assert truth("NumberOfOrders = 2", NumberOfOrders="2") is F


class TestTheWholeSelector:
    @pytest.mark.parametrize("text", ["", " ", "\t\r\n\f"])
    def test_an_empty_one_selects_everything(self, text: str) -> None:
        """A selector that is empty is none."""
        assert matches(text)

    def test_only_what_is_true_matches(self) -> None:
        """What is false and what is unknown is left to others."""
        selected = [matches("x > 1", x=x) for x in (2, 1, None)]
        assert selected == [True, False, False]

    @pytest.mark.parametrize("space", [" ", "\t", "\f", "\r", "\n", "\r\n", " \t "])
    def test_white_space_is_that_of_java(self, space: str) -> None:
        """Spaces, tabs, form feeds and ends of lines part words."""
        assert truth(f"{space}x{space}={space}1{space}AND{space}y{space}IS{space}NULL{space}", x=1) is T

    @pytest.mark.parametrize("space", ["\v", "\u00a0", "\u2003", "\0"])
    def test_other_space_is_none(self, space: str) -> None:
        """What Unicode has besides is no white space of Java's grammar."""
        assert "column 2" in error(f"x{space}= 1")

    def test_white_space_may_be_left_out_between_symbols_and_words(self) -> None:
        """Where words cannot run together, none is needed."""
        assert truth("(x+1)*2=4 AND'a'=y", x=1, y="a") is T

    @pytest.mark.parametrize("text", ["x = 1 -- not two", "x = 1 /* one */", "x = 1; y = 2"])
    def test_comments_and_statements_are_not_part_of_it(self, text: str) -> None:
        """Only conditional expressions of SQL were taken over."""
        error(text)
        assert truth("x = 1 --1", x=2) is T

    def test_keywords_may_be_written_in_any_case(self) -> None:
        """Names of operators and literals are not case-sensitive, identifiers are."""
        text = "Not x Between 1 aNd 2 oR y lIkE 'a!_' eScApE '!' or z iN ('b') Or w Is nOt nUlL oR v = tRuE"
        assert truth(text, x=1, y="a_") is T
        assert truth(text, x=1, v=True) is T
        assert truth(text, x=1, z="b") is T

    def test_the_example_of_the_specification(self) -> None:
        """A type, a colour and a weight have to be right at once."""
        text = "JMSType = 'car' AND color = 'blue' AND weight > 2500"
        assert truth(text, JMSType="car", color="blue", weight=2501) is T
        assert truth(text, JMSType="car", color="blue", weight=2500) is F
        assert truth(text, JMSType="car", color="red") is F
        assert truth(text, JMSType="car", color="blue") is U

    def test_two_are_equal_when_their_texts_are(self) -> None:
        """So that who subscribes again can see that nothing changed."""
        assert compile_filter("x = 1") == compile_filter("x = 1") != compile_filter("x=1")
        assert compile_filter("x = 1").text == "x = 1"


class TestLogic:
    @pytest.mark.parametrize(
        ("left", "right", "both", "either"),
        [
            (T, T, T, T), (T, F, F, T), (T, U, U, T), (F, T, F, T), (F, F, F, F), (F, U, F, U),
            (U, T, U, T), (U, F, F, U), (U, U, U, U),
        ],
    )  # fmt: skip
    def test_and_or_have_three_values(
        self, left: bool | None, right: bool | None, both: bool | None, either: bool | None
    ) -> None:
        """The tables of AND and OR: the unknown stays open unless the other operand decides."""
        assert truth("a AND b", a=left, b=right) is both
        assert truth("a OR b", a=left, b=right) is either

    @pytest.mark.parametrize(("value", "negated"), [(T, F), (F, T), (U, U)])
    def test_not_leaves_the_unknown_unknown(self, value: bool | None, negated: bool | None) -> None:
        """The table of NOT."""
        assert truth("NOT a", a=value) is negated
        assert truth("NOT NOT a", a=value) is value
        assert truth("NOT NOT NOT a", a=value) is negated

    @pytest.mark.parametrize("value", ["true", "", 1, 0, 1.0])
    def test_what_is_no_boolean_is_unknown_as_a_condition(self, value: Value) -> None:
        """A property of another type is neither true nor false."""
        for text in ("a", "NOT a", "NOT NOT a", "a AND TRUE", "a OR FALSE"):
            assert truth(text, a=value) is U
        assert truth("(NOT NOT a) IS NULL", a=value) is T

    def test_not_binds_closer_than_and_and_that_closer_than_or(self) -> None:
        """Operators are applied in the order NOT, AND, OR; parentheses change it."""
        assert truth("TRUE OR TRUE AND FALSE") is T
        assert truth("(TRUE OR TRUE) AND FALSE") is F
        assert truth("NOT FALSE AND FALSE") is F
        assert truth("NOT (FALSE AND FALSE)") is T
        assert truth("NOT x = 1", x=2) is T

    def test_a_condition_in_parentheses_is_a_boolean(self) -> None:
        """It may be compared like one."""
        assert truth("(x > 1) = (y > 1)", x=2, y=3) is T
        assert truth("(x > 1) = y", x=2, y=False) is F
        assert truth("(x > 1) IS NULL", x=None) is T


class TestComparison:
    @pytest.mark.parametrize(
        ("symbol", "less", "equal", "greater"),
        [
            ("=", F, T, F), ("<>", T, F, T), ("<", T, F, F), ("<=", T, T, F), (">", F, F, T), (">=", F, T, T),
        ],
    )  # fmt: skip
    def test_orders_numbers(self, symbol: str, less: bool, equal: bool, greater: bool) -> None:
        """The six operators =, >, >=, <, <= and <>; there are no others."""
        assert [truth(f"x {symbol} 2", x=x) for x in (1, 2, 3)] == [less, equal, greater]
        assert [truth(f"x {symbol} 2", x=x) for x in (1.5, 2.0, 2.5)] == [less, equal, greater]

    @pytest.mark.parametrize("symbol", ["=", "<>", "<", "<=", ">", ">="])
    def test_with_null_is_unknown(self, symbol: str) -> None:
        """A comparison with an unknown value is unknown."""
        assert truth(f"x {symbol} y") is U
        assert truth(f"x {symbol} y", x=1) is U
        assert truth(f"x {symbol} y", y="a") is U

    @pytest.mark.parametrize("symbol", ["=", "<>", "<", "<=", ">", ">="])
    @pytest.mark.parametrize(("x", "y"), [(5, "5"), (1, True), (0.0, False), ("true", True), ("1", 1.0)])
    def test_of_unlike_types_is_false(self, symbol: str, x: Value, y: Value) -> None:
        """Only values of like types are compared; exact and approximate numbers are of like types."""
        assert truth(f"x {symbol} y", x=x, y=y) is F
        assert truth(f"x {symbol} y", x=y, y=x) is F

    def test_of_strings_and_of_booleans_knows_no_order(self) -> None:
        """They are equal or not, and that is all."""
        assert truth("x = 'a'", x="a") is T
        assert truth("x <> 'a'", x="A") is T
        assert truth("x <> y", x=True, y=False) is T
        for symbol in ("<", "<=", ">", ">="):
            assert truth(f"x {symbol} y", x="a", y="b") is F
            assert truth(f"x {symbol} y", x="a", y="a") is F
            assert truth(f"x {symbol} y", x=True, y=False) is F

    def test_two_strings_are_equal_only_character_by_character(self) -> None:
        """The same characters in the same order, with no case folded and no space trimmed."""
        assert truth("x = 'a '", x="a") is F
        assert truth("x = '\u00e9'", x="e\u0301") is F

    def test_of_an_integer_and_a_double_is_that_of_two_doubles(self) -> None:
        """Numbers are promoted by Java's rules."""
        assert truth("x = 5.0", x=5) is T
        assert truth("x < 5.5", x=5) is T
        assert truth("x = 9007199254740992.0", x=9007199254740993) is T
        assert truth("x = 9007199254740992", x=9007199254740993) is F

    def test_nan_equals_nothing_and_infinity_is_the_greatest(self) -> None:
        """Doubles compare as in Java."""
        assert truth("x = x", x=math.nan) is F
        assert truth("x <> x", x=math.nan) is T
        assert truth("x > 1.7976931348623157E308", x=math.inf) is T


class TestArithmetic:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("10 - 2 - 3", 5), ("10 - (2 - 3)", 11), ("16 / 4 / 2", 2),
            ("2 * 7 / 4", 3), ("7 / 4 * 2", 2), ("-2 * 3", -6), ("2 - -3", 5), ("- - 2", 2), ("+-+2", -2),
            ("-(1 + 2)", -3), ("1-2", -1), ("-3 + 5", 2),
        ],
    )  # fmt: skip
    def test_goes_by_precedence_and_then_from_left_to_right(self, text: str, value: int) -> None:
        """Signs, then * and /, then + and -; equals from left to right."""
        assert truth(f"x = {text}", x=value) is T

    @pytest.mark.parametrize(
        ("text", "value"),
        [("7 / 2", 3), ("-7 / 2", -3), ("7 / -2", -3), ("-7 / -2", 3), ("1 / 2", 0), ("-1 / 2", 0)],
    )
    def test_of_integers_drops_the_fraction(self, text: str, value: int) -> None:
        """Java's division of integers, towards zero."""
        assert truth(f"x = {text}", x=value) is T

    def test_with_a_double_is_that_of_doubles(self) -> None:
        """One approximate operand makes an approximate result."""
        assert truth("x = 7 / 2.0 AND x = 7. / 2 AND x = 3 + 0.5 AND x = 7 * .5", x=3.5) is T
        assert truth("x * 10 > 1E308", x=sys.float_info.max) is T

    @pytest.mark.parametrize(
        "text",
        [
            "9223372036854775807 + 1", "-9223372036854775807 - 2 + 1", "4611686018427387904 * 2",
            "-9223372036854775808 / -1", "-x",
        ],
    )  # fmt: skip
    def test_of_integers_wraps_as_in_java(self, text: str) -> None:
        """Beyond 64 bits a long begins again at the other end."""
        assert truth(f"x = {text}", x=-(1 << 63)) is T

    @pytest.mark.parametrize("text", ["1 / 0", "1 / 0.0", "1.5 / 0", "0 / 0", "1 / (x - x)"])
    def test_division_by_zero_is_null(self, text: str) -> None:
        """Java would throw for integers; here there is no value, as in SQL."""
        assert truth(f"{text} IS NULL", x=5) is T
        assert truth(f"{text} = 1", x=5) is U

    @pytest.mark.parametrize("text", ["x + 1", "1 - x", "x * 2", "2 / x", "-x", "+x", "x + x"])
    @pytest.mark.parametrize("value", [None, "1", True])
    def test_on_what_is_no_number_is_null(self, text: str, value: Value) -> None:
        """Arithmetic on a NULL, or on another type, has no value."""
        assert truth(f"{text} IS NULL", x=value) is T
        assert truth(f"{text} <> 5", x=value) is U


class TestBetween:
    def test_includes_both_ends(self) -> None:
        """a BETWEEN b AND c is a >= b AND a <= c; NOT BETWEEN is a < b OR a > c."""
        assert [truth("age BETWEEN 15 AND 19", age=age) for age in (14, 15, 17.5, 19, 20)] == [F, T, T, T, F]
        assert [truth("age NOT BETWEEN 15 AND 19", age=age) for age in (14, 15, 17.5, 19, 20)] == [T, F, F, F, T]

    def test_takes_arithmetic_and_leaves_the_next_and_alone(self) -> None:
        """Its operands are arithmetic expressions, and its AND is its own."""
        assert truth("x + 1 BETWEEN y - 1 AND y * 2 AND z", x=3, y=2, z=True) is T
        assert truth("NOT x BETWEEN 1 AND 2 AND z", x=3, z=False) is F

    def test_is_two_comparisons_where_something_is_null(self) -> None:
        """An end that is NULL is only missed where the other does not decide."""
        assert truth("x BETWEEN 1 AND 2") is U
        assert truth("x BETWEEN low AND 2", x=3) is F
        assert truth("x NOT BETWEEN low AND 2", x=3) is T
        assert truth("x BETWEEN low AND 4", x=3) is U
        assert truth("x NOT BETWEEN low AND 4", x=3) is U

    def test_is_false_of_what_has_no_order_and_so_is_its_opposite(self) -> None:
        """As the comparisons are that it stands for."""
        assert truth("x BETWEEN 1 AND 2", x="1") is F
        assert truth("x NOT BETWEEN 1 AND 2", x="1") is F
        assert truth("NOT x BETWEEN 1 AND 2", x="1") is T


class TestIn:
    def test_is_equality_with_one_of_some_strings(self) -> None:
        """a IN ('b', 'c') is a = 'b' OR a = 'c'."""
        assert truth("Country IN ('UK', 'US', 'it''s')", Country="UK") is T
        assert truth("Country IN ('UK','US','it''s')", Country="it's") is T
        assert truth("Country IN ('UK')", Country="Peru") is F
        assert truth("Country NOT IN ('UK', 'US')", Country="Peru") is T
        assert truth("Country NOT IN ('UK', 'US')", Country="US") is F

    def test_is_unknown_of_null(self) -> None:
        """And so is NOT IN."""
        assert truth("Country IN ('UK')") is U
        assert truth("Country NOT IN ('UK')") is U

    def test_is_false_of_what_is_no_string(self) -> None:
        """The identifier's value is to be a string."""
        assert truth("x IN ('1')", x=1) is F
        assert truth("x NOT IN ('1')", x=1) is T

    @pytest.mark.parametrize("text", ["x IN ()", "x IN (1)", "x IN ('a',)", "x IN 'a'", "x IN ('a'", "x IN (y)"])
    def test_takes_string_literals_only_and_at_least_one(self, text: str) -> None:
        """Numbers and identifiers cannot stand in the list."""
        error(text)


class TestLike:
    @pytest.mark.parametrize(
        ("pattern", "matching", "other"),
        [
            ("'12%3'", ["123", "12993", "1233"], ["1234", "13", "0123"]),
            ("'l_se'", ["lose", "l_se", "l\nse", "l\N{GRINNING FACE}se"], ["loose", "lse", "LOSE"]),
            (r"'\_%' ESCAPE '\'", ["_foo", "_"], ["bar", "", r"\_foo"]),
            ("'%'", ["", "a", "a\nb"], []),
            ("''", [""], ["a", "\n"]),
            ("'a'", ["a"], ["ab", "ba", "a\n", "A", ""]),
            ("'%%a_%%'", ["ab", "xaby"], ["a", "ba"]),
            ("'it''s%'", ["it's so"], ["its so"]),
            ("'100!%' ESCAPE '!'", ["100%"], ["1000"]),
            ("'a!!b!c' ESCAPE '!'", ["a!bc"], ["a!!b!c", "abc"]),
            ("'%%_' ESCAPE '%'", ["%a"], ["a", "%"]),
            ("'[a-c].*^$\\'", ["[a-c].*^$\\"], ["a"]),
            ("'a%b%'", ["ab", "axb", "abb\n"], ["ba", "a"]),
            ("'%ab%ab'", ["abab", "ab ab"], ["ab", "aab"]),
        ],
    )  # fmt: skip
    def test_fits_any_text_for_percent_and_one_character_for_an_underscore(
        self, pattern: str, matching: list[str], other: list[str]
    ) -> None:
        """Other characters stand for themselves, as these two do behind the ESCAPE character; all of the
        text has to fit.
        """
        for value in matching:
            assert truth(f"x LIKE {pattern}", x=value) is T
            assert truth(f"x NOT LIKE {pattern}", x=value) is F
        for value in other:
            assert truth(f"x LIKE {pattern}", x=value) is F
            assert truth(f"x NOT LIKE {pattern}", x=value) is T

    def test_is_unknown_of_null(self) -> None:
        """And so is NOT LIKE."""
        assert truth("x LIKE '%'") is U
        assert truth("x NOT LIKE '%'") is U

    def test_is_false_of_what_is_no_string(self) -> None:
        """The identifier's value is to be a string."""
        assert truth("x LIKE '%'", x=12) is F
        assert truth("x LIKE '%'", x=True) is F

    @pytest.mark.parametrize(
        "text",
        [
            "x LIKE 5", "x LIKE y", "x LIKE 'a' ESCAPE", "x LIKE 'a' ESCAPE ''", "x LIKE 'a' ESCAPE 'ab'",
            "x LIKE 'a' ESCAPE 5", "x LIKE 'a!' ESCAPE '!'", "x ESCAPE '!'", "x LIKE",
        ],
    )  # fmt: skip
    def test_takes_a_literal_pattern_and_a_single_character_to_escape_with(self, text: str) -> None:
        """Both are literals; the character is one."""
        error(text)

    @pytest.mark.parametrize("pattern", ["%a%a%a%a%a%b", "%a" * 500 + "b", "%_" * 500 + "b", "%" * 500 + "b"])
    def test_no_pattern_takes_long(self, pattern: str) -> None:
        """No piece between two % is ever placed twice."""
        selector, value = compile_filter(f"x LIKE '{pattern}'"), "a" * 20_000
        start = time.process_time()
        assert not selector.matches(lambda _: value)
        assert time.process_time() - start < 2


class TestIsNull:
    def test_turns_the_unknown_into_true_and_its_opposite_into_false(self) -> None:
        """It asks whether there is a value, and is never unknown itself."""
        assert truth("x IS NULL") is T
        assert truth("x IS NOT NULL") is F
        assert truth("x IS NULL", x="") is F
        assert truth("x IS NOT NULL", x=False) is T

    @pytest.mark.parametrize("text", ["x = NULL", "NULL", "x IS 5", "x IS TRUE", "x IS NOT", "x NOT NULL", "IS NULL"])
    def test_is_the_only_place_for_null(self, text: str) -> None:
        """NULL is no literal that could be compared."""
        error(text)


class TestWhatIsWrong:
    @pytest.mark.parametrize(
        ("text", "column", "expected"),
        [
            ("a = 1 AND AND b", 11, "a value, found AND"),
            ("a =", 4, "a value, found the end of the filter"),
            ("a = 'b", 5, "a closing ' to this string, found the end of the filter"),
            ("a = 'b''", 5, "a closing ' to this string"),
            ('a = "b"', 5, "a string in single quotes, found '\"'"),
            ("a != 5", 3, "<> for unequal"),
            ("a == 5", 4, "a value, found ="),
            ("a = NULL", 5, "a value (IS NULL asks for NULL), found NULL"),
            ("a b", 3, "an operator or the end of the filter, found b"),
            ("a = 1 b", 7, "AND, OR or the end of the filter, found b"),
            ("a = b = c", 7, "AND, OR or the end of the filter, found ="),
            ("(a = 1", 7, "AND, OR or ), found the end of the filter"),
            ("(a", 3, "an operator or ), found the end of the filter"),
            ("a = 1)", 6, "AND, OR or the end of the filter, found )"),
            ("()", 2, "a value, found )"),
            ("a NOT 5", 7, "BETWEEN, IN or LIKE, found 5"),
            ("a IS 5", 6, "NULL or NOT NULL, found 5"),
            ("a IS NOT 5", 10, "NULL, found 5"),
            ("a BETWEEN 1 OR 2", 13, "AND, found OR"),
            ("a IN 'b'", 6, "(, found 'b'"),
            ("a IN ('b' 'c')", 11, ", or ), found 'c'"),
            ("a LIKE b", 8, "a string, found b"),
            ("a LIKE 'b' ESCAPE 'cd'", 19, "a string of one character, found 'cd'"),
            ("a LIKE 'b!' ESCAPE '!'", 8, "a pattern (it ends with the escape character), found 'b!'"),
            ("a = 09", 5, "an integer of 64 bits (octal if it begins with 0), found 09"),
            ("a = 1e999", 5, "a number within the range of a double, found 1e999"),
            ("a = 5abc", 6, "an operator after the number, found abc"),
            ("größe§ = 1", 6, "a value or an operator, found '§'"),
            ("a ? 5", 3, "a value or an operator, found '?'"),
        ],
    )  # fmt: skip
    def test_is_shown_with_its_column_and_with_what_was_expected_there(
        self, text: str, column: int, expected: str
    ) -> None:
        complaint, shown, caret = error(text).split("\n")
        assert complaint.startswith(f"bad filter, column {column}: expected {expected}")
        assert shown == f"    {text}"
        assert caret == " " * (4 + column - 1) + "^"

    @pytest.mark.parametrize(
        ("text", "column", "expected"),
        [
            ("5", 1, "a condition, found a number"),
            ("a + 1", 1, "a condition, found a number"),
            ("'a'", 1, "a condition, found a string"),
            ("a AND 'b'", 7, "a condition, found a string"),
            ("NOT 5", 5, "a condition, found a number"),
            ("a > 'b'", 5, "a number, found a string"),
            ("'b' < a", 1, "a number, found a string"),
            ("a >= TRUE", 6, "a number, found a condition"),
            ("a BETWEEN 'b' AND 'c'", 11, "a number, found a string"),
            ("a = 'b' + 1", 5, "a number, found a string"),
            ("a = -'b'", 6, "a number, found a string"),
            ("a = 2 * (b = 1)", 9, "a number, found a condition"),
            ("5 LIKE 'b'", 1, "a string, found a number"),
            ("a * 2 IN ('b')", 1, "a string, found a number"),
        ],
    )
    def test_is_also_what_could_never_match_whatever_the_message(self, text: str, column: int, expected: str) -> None:
        assert error(text).startswith(f"bad filter, column {column}: expected {expected}\n")

    def test_only_a_route_s_selector_may_ask_for_the_destination_and_it_reads_no_body(self) -> None:
        selector = compile_selector("JMSDestination = 'orders' AND n = 1")
        values: dict[str, Value] = {"JMSDestination": "orders", "n": 1}
        assert selector.matches(lambda name: values.get(name)) and not selector.reads_body
        for text in ("/a = 1", "JMSDestinatio = 'orders'", "n = "):
            with pytest.raises(InvalidFilter, match=r"^bad selector, column"):
                compile_selector(text)

    @pytest.mark.parametrize("name", ["JMSpriority", "JMSDestinations", "JMS", "JMSRedeliverd"])
    def test_is_a_header_field_that_there_is_not(self, name: str) -> None:
        said = error(f"a = 1 AND {name} = 1")
        assert said.startswith("bad filter, column 11: expected a header field (JMSPriority, ")
        assert f", found {name}" in said

    def test_a_filter_of_several_lines_is_shown_in_one(self) -> None:
        _, shown, caret = error("a\n=\tb\r\nAND AND").split("\n")
        assert shown == "    a = b  AND AND"
        assert caret.index("^") - 4 == 11

    def test_a_long_filter_is_shown_around_the_column(self) -> None:
        complaint, shown, caret = error("x = 1 AND " * 1000 + "?" + " OR y" * 1000).split("\n")
        assert "column 10001:" in complaint
        assert shown[caret.index("^")] == "?"
        assert len(complaint) + len(shown) + len(caret) < 500
        assert len(error("x = 'a' '" + "a" * 10_000 + "'")) < 800

    @pytest.mark.parametrize("level", ["NOT y OR x IS NULL AND (", "1 + 2 * -("])
    def test_parentheses_may_be_nested_so_deep_and_no_deeper(self, level: str) -> None:
        assert f"at most {NESTING} parentheses" in error(level * (NESTING + 1))
        assert f"at most {NESTING} parentheses" in error(level * 100_000)

    @pytest.mark.parametrize(
        ("start", "level", "end"),
        [("", "y OR y AND x = 1 AND NOT (", "y"), ("x <> ", "1 + 2 * -(", "x"), ("", "y OR y AND 1 < 1 + 2 * -(", "(")],
        ids=["conditions", "numbers", "a mixture, which is wrong only at its end"],
    )
    def test_nesting_leaves_a_third_of_the_stack_to_the_caller(self, start: str, level: str, end: str) -> None:
        text = start + level * NESTING + end + ")" * NESTING

        def deep(frames: int) -> object:
            if frames:
                return deep(frames - 1)
            return error(text) if end == "(" else matches(text, x=1, y=False)

        deep(sys.getrecursionlimit() // 3)

    @pytest.mark.parametrize(
        "text",
        [
            "x = 1" + " AND x = 1" * 20_000, "x = 1" + " OR x = 1" * 20_000, "x = 1" + " + 0" * 20_000,
            "x = 1" + " * 1" * 20_000, "NOT " * 20_000 + "x = 1", "x = " + "- " * 20_000 + "1",
            "x = " + "(1) + " * 20_000 + "(1 - 20000)", "y IN ('a'" + ", 'b'" * 20_000 + ") OR x = 1",
        ],
        ids=lambda text: text[:20],
    )  # fmt: skip
    def test_a_long_chain_is_not_nested(self, text: str) -> None:
        assert matches(text, x=1)


class TestTheFieldsOfAMessage:
    CODED = parse("7.1140429201295000-9262574723.T.1140429211295.corr1283.TestQueue1.XYZType.pS=5&nI=-5&bB=true&dD=2.5")

    @pytest.mark.parametrize(
        ("field", "literal"),
        [
            ("JMSPriority", "7"), ("JMSMessageID", "'ID:1140429201295000-9262574723'"),
            ("JMSDeliveryMode", "'PERSISTENT'"),
            ("JMSTimestamp", "1140429201295"), ("JMSExpiration", "1140429211295"),
            ("JMSCorrelationID", "'corr1283'"), ("JMSReplyTo", "'TestQueue1'"), ("JMSType", "'XYZType'"),
            ("JMSXDeliveryCount", "1"), ("JMSRedelivered", "FALSE"),
            ("p", "'5'"), ("n", "-5"), ("b", "TRUE"), ("d", "2.5"),
        ],
    )  # fmt: skip
    def test_are_its_header_fields_and_its_typed_properties(self, field: str, literal: str) -> None:
        assert compile_filter(f"{field} = {literal}").matches(for_name(self.CODED))

    @pytest.mark.parametrize("field", ["jmspriority", "JMSDestinations", "P", "priority", "JMS_dropq_since"])
    def test_are_null_when_they_are_called_anything_else(self, field: str) -> None:
        assert for_name(self.CODED)(field) is None

    @pytest.mark.parametrize(("queue", "destination"), [("orders", "orders"), ("a.b", "a.b"), ("a.b/s%2E1.c", "a.b")])
    def test_have_the_queue_or_the_topic_of_a_subscription_as_destination(self, queue: str, destination: str) -> None:
        assert compile_filter(f"JMSDestination = '{destination}'").matches(for_name(self.CODED, queue=queue))

    def test_have_a_reply_to_without_the_folder_of_topics(self) -> None:
        name = parse("4.1140429201295000-9262574723.T...Ta%2Eb", typed_replies=True)
        assert compile_filter("JMSReplyTo = 'a.b'").matches(for_name(name))

    @pytest.mark.parametrize("field", ["JMSCorrelationID", "JMSReplyTo", "JMSType", "JMSTimestamp"])
    def test_are_null_when_the_name_does_not_tell_them(self, field: str) -> None:
        assert compile_filter(f"{field} IS NULL").matches(for_name(parse("report.csv")))

    @pytest.mark.parametrize(
        "condition",
        ["= 'X'", "<> 'X'", "IN ('ID:1', 'X')", "LIKE 'X%'", "= 'X' AND /a = 1", "IN ('X', 'ID:1') AND /a = 1"],
    )
    def test_an_id_that_no_message_can_have_is_warned_of(
        self, condition: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        lookup = for_name(self.CODED, body=Body(lambda: b'{"a": 1}'))
        assert compile_filter(f"JMSMessageID {condition}").matches(lookup) is ("<>" in condition)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "a JMSMessageID begins with ID:" in said and "write 'ID:X" in said

    @pytest.mark.parametrize(
        "text",
        [
            "JMSMessageID = 'ID:1' OR JMSCorrelationID = '1'",
            "JMSMessageID IN ('ID:1', 'ID:2')",
            "JMSMessageID LIKE 'ID:1%' OR JMSMessageID LIKE '%1' OR JMSMessageID LIKE '_D:%'",
            "JMSMessageID = JMSCorrelationID",
            "'x' = JMSType",
        ],
    )
    def test_an_id_that_a_message_can_have_is_not(self, text: str, caplog: pytest.LogCaptureFixture) -> None:
        compile_filter(text)
        assert caplog.records == []

    def test_of_a_foreign_file_are_its_name_and_the_defaults(self) -> None:
        text = "JMSMessageID LIKE '%.csv' AND JMSPriority = 4 AND JMSExpiration = 0"
        assert compile_filter(text).matches(for_name(parse("report.csv")))

    def test_the_timestamp_is_that_of_the_id_else_of_the_name_else_of_arrival(self) -> None:
        assert for_name(Name("1140429201295000-9262574723", since=5), arrival=7)("JMSTimestamp") == 1140429201295
        assert for_name(Name("a", since=5), arrival=7)("JMSTimestamp") == 5
        assert for_name(Name("a"), arrival=7)("JMSTimestamp") == 7

    def test_the_delivery_is_the_given_one_else_the_next(self) -> None:
        seen = [
            (lookup("JMSXDeliveryCount"), lookup("JMSRedelivered"))
            for lookup in (
                for_name(Name("a")),
                for_name(Name("a", delivery_count=1)),
                for_name(Name("a", delivery_count=1), delivery_count=1),
                for_name(Name("a"), delivery_count=3),
            )
        ]
        assert seen == [(1, False), (2, True), (1, False), (3, True)]

    def test_a_property_hides_no_header_field(self) -> None:
        assert for_name(Name("a", properties={"JMSPriority": Typed("I", 9)}))("JMSPriority") == 4


class Writer:
    """Writes what the two languages share, by the productions of the grammar: each reads it by its own precedence.

    Numbers are small, since sqlite makes a double of an integer that overflows, and minus signs stand apart, since two
    begin a comment in SQL. Strings, numbers and booleans do not meet, since sqlite has an order among them, and strings
    have none here. Division by zero is NULL to both.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, *choices: str) -> str:
        return self.random.choice(choices)

    def maybe(self, text: str, chance: float = 0.3) -> str:
        return text if self.random.random() < chance else ""

    def chain(self, operand: Callable[[int], str], depth: int, *operators: str) -> str:
        text = operand(depth)
        while self.random.random() < 0.25:
            text += f" {self.one(*operators)} {operand(depth)}"
        return text

    def condition(self, depth: int) -> str:
        return self.chain(lambda depth: self.chain(self.negation, depth, "AND"), depth, "OR")

    def negation(self, depth: int) -> str:
        nested = depth and self.random.random() < 0.4
        return self.maybe("NOT ") + self.maybe("NOT ") + (f"({self.condition(depth - 1)})" if nested else self.test())

    def test(self) -> str:
        number, string, negated = self.number, self.string, self.maybe("NOT ")
        tests: list[Callable[[], str]] = [
            lambda: f"{number(1)} {self.one('=', '<>', '<', '<=', '>', '>=')} {number(1)}",
            lambda: f"{string()} {self.one('=', '<>')} {string()}",
            lambda: f"{number(1)} {negated}BETWEEN {number(1)} AND {number(1)}",
            lambda: f"{string()} {negated}IN ('a', 'it''s')",
            lambda: f"{string()} {negated}LIKE '{self.one('a%', '%b', '_', '%', '', 'a_%', '%t%')}'",
            lambda: f"{number(1)} IS {negated}NULL",
            lambda: f"{string()} IS {negated}NULL",
            lambda: self.one("b", "c", "TRUE", "FALSE", "b = c", "b <> TRUE", "b IS NULL", "n"),
        ]
        return self.random.choice(tests)()

    def number(self, depth: int) -> str:
        if self.random.random() < 0.2:
            return f"{self.maybe('- ')}{self.one('i', 'j')} / {self.maybe('- ')}{self.one('2', '3')}"
        return self.chain(lambda depth: self.chain(self.signed, depth, "*", "/"), depth, "+", "-")

    def signed(self, depth: int) -> str:
        sign = self.maybe("- ", 0.2) + self.maybe("+ ", 0.1) + self.maybe("- ", 0.1)
        if depth and self.random.random() < 0.2:
            return f"{sign}({self.number(depth - 1)})"
        return sign + self.one("0", "1", "2", "3", "0.5", "1.5", "2.", ".25", "1E1", "i", "j", "i", "j", "f", "g", "n")

    def string(self) -> str:
        return self.one("'a'", "'b'", "'A'", "''", "'it''s'", "s", "t", "s", "t", "n")

    def message(self) -> dict[str, Value]:
        kinds: dict[str, Sequence[Value]] = {
            "ij": range(-9, 10), "fg": [0.5, -1.5, 2.0], "st": ["a", "b", "ab", "", "it's"], "bc": [T, F], "n": [],
        }  # fmt: skip
        return {key: self.random.choice([*some, None]) for keys, some in kinds.items() for key in keys}


seeds = st.integers(0, 1 << 64)


@pytest.fixture(scope="module")
def sql() -> Callable[..., bool | None]:
    """What sqlite makes of a condition, for the values of some columns."""
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA case_sensitive_like = ON")

    def evaluate(condition: str, **columns: Value) -> bool | None:
        row = ", ".join(f"? AS {column}" for column in columns)
        [answer] = database.execute(f"SELECT ({condition}) FROM (SELECT {row})", [*columns.values()]).fetchone()
        return None if answer is None else bool(answer)

    return evaluate


class TestAgreement:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(seeds)
    def test_with_sqlite_on_what_the_languages_share(self, sql: Any, seed: int) -> None:
        text, message = Writer(seed).condition(2), Writer(seed + 1).message()
        assert truth(text, **message) is sql(text, **message)

    @given(st.text("ab%_!", max_size=5), st.text("ab%_!", max_size=8), st.sampled_from([None, "!", "%", "_", "a"]))
    def test_of_like_with_sqlite_and_with_a_naive_matcher(
        self, sql: Any, pattern: str, value: str, escape: str | None
    ) -> None:
        tokens = like_tokens(pattern, escape)
        if tokens is None:
            with pytest.raises(ValueError):
                Pattern.compile(pattern, escape)
            return
        text = f"x LIKE '{pattern}'" + (f" ESCAPE '{escape}'" if escape else "")
        assert truth(text, x=value) is sql(text, x=value) is naive_like(tokens, value)


def like_tokens(pattern: str, escape: str | None) -> list[tuple[str, bool]] | None:
    """Read a pattern as characters with whether they mean themselves; None when an escape ends it."""
    if not pattern:
        return []
    taken = 2 if pattern[0] == escape else 1
    rest = like_tokens(pattern[taken:], escape)
    return None if rest is None or len(pattern) < taken else [(pattern[taken - 1], taken == 2), *rest]


def naive_like(tokens: list[tuple[str, bool]], value: str) -> bool:
    if not tokens:
        return not value
    (character, literal), rest = tokens[0], tokens[1:]
    if character == "%" and not literal:
        return any(naive_like(rest, value[start:]) for start in range(len(value) + 1))
    fits = bool(value) and ((character == "_" and not literal) or character == value[0])
    return fits and naive_like(rest, value[1:])


words = st.sampled_from([
    *KEYWORDS, "=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "(", ")", ",", "'a'", "'%_'", "''", "x", "y", "1",
    "0", "2.5", "0x1F", "07", "9223372036854775807", "1e308", "x = 1", "x LIKE 'a%'", "y IN ('a', 'b')", "'", "/path",
])  # fmt: skip
any_text = st.text(st.characters(exclude_categories=()))
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.text("a%_'", max_size=3)
)


def mutated(random: random.Random, text: str) -> str:
    """Return a good filter with a few characters taken out, doubled or exchanged."""
    characters = list(text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(characters) + 1)
        characters[at : at + random.randint(0, 2)] = random.choice([*"/[]()'\"-.,=<%ax0 ", "", "\\", "AND", "é"])
    return "".join(characters)


class TestNothingUpsetsIt:
    @given(
        any_text
        | st.lists(words).map(" ".join)
        | st.lists(words | any_text).map("".join)
        | seeds.map(lambda seed: mutated(random.Random(seed), Writer(seed).condition(2))),
        values,
        values,
    )
    @example("(" * 5000, None, None)
    @example("x = " + "9" * 5000, None, None)
    @example("x = 0x" + "f" * 5000, None, None)
    @example("x = 1e" + "9" * 5000, None, None)
    @example("x LIKE '" + "%_" * 3000 + "'", "a", None)
    @example("'" * 5001, None, None)
    @example("x = '" + "''" * 5000, None, None)
    def test_any_text_compiles_or_is_an_invalid_filter(self, text: str, x: Value, y: Value) -> None:
        try:
            assert matches(text, x=x, y=y) in (True, False)
            return
        except InvalidFilter as invalid:
            complaint = str(invalid)
        column = re.match(r"bad filter, column (\d+): expected ", complaint)
        assert column is not None and 1 <= int(column[1]) <= len(text) + 1
        assert complaint.count("\n") == 2 and complaint.encode()

    @pytest.mark.parametrize("text", ["a", "a ", "a(", "BEGINS ", " ", "1"])
    def test_a_long_text_takes_time_by_its_length(self, text: str) -> None:  # by its square it would take hours
        with pytest.raises(InvalidFilter):
            compile_filter(text * 500_000 + " b c")

    @given(seeds, values, values, values)
    def test_no_message_does(self, seed: int, x: Value, y: Value, z: Value) -> None:
        fields = dict(zip("ijfgstbcn", [x, y, z] * 3, strict=True))
        assert truth(Writer(seed).condition(3), **fields) in (True, False, None)


def test_a_filter_that_is_compiled_deep_in_a_program_is_read_or_refused() -> None:
    def deep(left: int) -> None:
        if left:
            return deep(left - 1)
        compile_filter("(" * 30 + "n = 1" + ")" * 30)

    refused = set()
    for depth in range(100, sys.getrecursionlimit() - 60, 20):
        try:
            deep(depth)
        except InvalidFilter as error:
            refused.add(str(error))
        except RecursionError:
            break  # it did not even come to the filter
    assert refused == {"the filter cannot be read here: the program's stack is nearly full"}
