"""An AMPS filter selects by what stands in a body, agrees with SQL where they share it, and nothing upsets it."""

from __future__ import annotations

import builtins
import json
import logging
import re
import sqlite3
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_filters import EXAMPLES, Writer, any_text, mutated, seeds

from dropq.errors import InvalidFilter, Unavailable
from dropq.filters import Body, Value, compile_expression, compile_filter, for_name
from dropq.filters.arrays import PAIRS, WIDTH
from dropq.filters.functions import ANY, FUNCTIONS
from dropq.filters.grammar import NESTING
from dropq.filters.regex import STEPS
from dropq.filters.tree import LONGEST, Found
from dropq.format.names import KEYWORDS, Name
from dropq.format.typed import Typed

T, F, U = True, False, None
PAPER = Path(__file__).parents[2] / "docs/filters.md"


def matches(text: str, body: object = None, **properties: Typed) -> bool:
    name = Name("a", priority=7, properties=properties)
    return compile_filter(text).matches(for_name(name, body=Body(lambda: json.dumps(body).encode())))


def truth(text: str, body: object = None, **properties: Typed) -> bool | None:
    """Tell whether a filter is true, false or unknown: of the last two, only the false one's negation matches."""
    if matches(text, body, **properties):
        return True
    return False if matches(f"NOT ({text})", body, **properties) else None


def value(text: str, body: object = None) -> Value:
    return compile_expression(text).value(for_name(Name("a"), body=Body(lambda: json.dumps(body).encode())))


def error(text: str) -> str:
    with pytest.raises(InvalidFilter) as caught:
        compile_filter(text)
    return str(caught.value)


class TestWhichLanguage:
    @pytest.mark.parametrize(
        "text",
        [
            "/a",
            "/a = 1",
            "1 < /a",
            "x = 1 AND /a = 2",
            "x / /a = 1",
            "NOT /a",
            "x IN (1, /a)",
            "(/a)",
            "/ = 1",
            "-/a > 1",
        ],
    )
    def test_a_path_where_an_operand_may_stand_makes_an_amps_filter(self, text: str) -> None:
        """A text with one such path is read as an AMPS filter, and may ask for the body."""
        assert compile_filter(text).reads_body

    @pytest.mark.parametrize("text", ["x/y = 1", "x / y = 1", "(x)/y = 1", "2/y = 1", "x = '/a'", "x LIKE '/a%'", ""])
    def test_any_other_text_is_a_jms_selector(self, text: str) -> None:
        """A slash between operands divides, one in a string is part of it; the body is never asked for."""
        assert not compile_filter(text).reads_body

    @pytest.mark.parametrize("text", ['x = "b"', "x == 1", "x != 1", "x % 2 = 0", "STREQUAL_I(x, 'a')", "x = NULL"])
    def test_what_only_amps_has_is_refused_in_a_selector(self, text: str) -> None:
        """Without a path a filter has to be one that any JMS program could write."""
        error(text)
        assert compile_filter(f"/a = 1 OR ({text})").reads_body

    def test_header_fields_and_properties_may_stand_beside_paths(self) -> None:
        """One filter may ask for what the name tells and for what the body holds."""
        text = "/total > 100 AND JMSPriority > 4 AND colour = 'red'"
        assert truth(text, {"total": 101}, colour=Typed("S", "red")) is T
        assert truth(text, {"total": 101}, colour=Typed("S", "blue")) is F
        assert "a header field (JMSPriority, " in error("/total > 100 AND JMSpriority > 4")

    def test_properties_may_be_called_like_words_of_amps(self) -> None:
        """Words that only AMPS has are none where an operand may stand."""
        properties = {name: Typed("I", 1) for name in ("MOD", "BEGINS", "ENDS", "INSTR", "WITH")}
        assert truth("/a = 1 AND MOD = BEGINS AND ENDS + WITH MOD INSTR = 0 OR INSTR = 2", {"a": 1}, **properties) is F
        assert truth("/a = 1 AND MOD + BEGINS + ENDS + WITH + INSTR = 5", {"a": 1}, **properties) is T


class TestPaths:
    BODY: object = {
        "a": {"b": {"c": 5}, "list": [10, 20, {"x": 1}]}, "order-id": 7, "it's": 8, 'say "x"': 9, "": 3, "größe": 4,
        "@Qty": 6, "ns:name": 2, "v1.2": 1, "6": 12, "rows": [{"p": 1, "t": ["u", "v"]}, {"p": 9, "t": []}, 5],
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("/a/b/c", 5), ("/a/list[0]", 10), ("/a/list[1]", 20), ("/a/list[2]/x", 1), ("/6", 12), ("/größe", 4),
            ("/@Qty", 6), ("/ns:name", 2), ("/v1.2", 1), ('/"order-id"', 7), ("/'order-id'", 7), ("/'it''s'", 8),
            ('/"it\'s"', 8), ('/"say ""x"""', 9), ('/""', 3), ("/rows[1]/p", 9), ("/rows[0]/t[1]", "v"),
            ("/a/'b'/\"c\"", 5),
        ],
    )  # fmt: skip
    def test_lead_by_names_and_places_into_the_body(self, text: str, found: Value) -> None:
        """A name is a field of an object, [n] the nth element of an array from 0; other names are quoted."""
        assert value(text, self.BODY) == found

    @pytest.mark.parametrize(
        "text",
        ["/b", "/a/b/c/d", "/a/list[3]", "/a[0]", "/A", "/a/list/y", "/order", "/rows[1]/t", "/rows[0][0]", "/[0]"],
    )
    def test_that_lead_nowhere_are_null(self, text: str) -> None:
        """What a body lacks is NULL, and so is an empty array."""
        assert truth(f"{text} IS NULL", self.BODY) is T
        assert truth(f"{text} = 1", self.BODY) is U

    def test_go_through_an_array_into_each_of_its_elements(self) -> None:
        """A name after an array without a place is looked for in all of its elements."""
        assert truth("/rows/p = 9", self.BODY) is T
        assert truth("/rows/p = 5", self.BODY) is F
        assert truth("/rows/t = 'v'", self.BODY) is T
        assert truth("/m = 3", {"m": [[1, 2], [[3]]]}) is T
        assert truth("/m[1] = 1", {"m": [[1, 2], [[3]]]}) is F

    def test_a_slash_alone_is_the_whole_body(self) -> None:
        """A body need not be an object."""
        assert truth("/ = 5", 5) is T
        assert truth("/ = 5", [4, 5]) is T
        assert truth("/[1] = 5", [4, 5]) is T
        assert truth("/[1]/a = 5", [4, {"a": 5}]) is T
        assert truth("/ IS NULL", None) is T

    def test_an_object_is_there_and_equals_nothing(self) -> None:
        """It is not NULL, no value, and neither equal nor unequal to anything, itself included."""
        assert truth("/a IS NULL", {"a": {}}) is F
        for text in ("/a = /a", "/a <> /a", "/a < 1", "/a = 'x'", "/a IN (1, 'x')", "/a LIKE ''", "/a BEGINS WITH ''"):
            assert truth(text, {"a": {}}) is F
        assert truth("(/a + 1) IS NULL", {"a": {}}) is T
        assert truth("/a", {"a": {}}) is U

    @pytest.mark.parametrize(
        ("text", "column", "expected"),
        [
            ("//a = 1", 2, "the name of a field, found /"),
            ("/a//b = 1", 3, "the name of a field, found /"),
            ("/a[x] = 1", 3, "an index of an array, from [0], found ["),
            ("/a[-1] = 1", 3, "an index of an array, from [0], found ["),
            ("/a[9999999999] = 1", 3, "an index of an array, from [0], found ["),
            ("/order-id = 1", 7, "a space on either side of -, to subtract, or quotes around the name, found -"),
            ("/a-1 > 1", 3, "a space on either side of -"),
            ("/a/ = 1", 5, "a value, found ="),
            ("/a /b", 5, "the end of the filter"),
            ("/a ? 1", 4, "a value or an operator, found '?'"),
        ],
    )
    def test_that_could_be_read_in_two_ways_or_in_none_are_refused(self, text: str, column: int, expected: str) -> None:
        """A dash within a name would be one thing to XPath and another to arithmetic."""
        if text == "/a /b":
            assert not matches(text, {"a": 1})  # a division by a property
        else:
            assert error(text).startswith(f"bad filter, column {column}: expected {expected}")

    def test_of_a_division_have_a_space_before_them(self) -> None:
        """A slash right behind a name goes on with the path; behind a space it divides."""
        assert truth("/a / /b = 3", {"a": 6, "b": 2}) is T
        assert truth("/a/b = 3", {"a": 6, "b": 2}) is U
        assert truth("/6*/14 < 1000", {"6": 2, "14": 3}) is T
        assert truth("/a/(1 + 1) = 3", {"a": 6}) is T


class TestLiterals:
    @pytest.mark.parametrize("text", ["/a = 'it''s'", '/a = "it\'s"'])
    def test_a_string_stands_in_single_or_double_quotes_and_doubles_its_own(self, text: str) -> None:
        """Both kinds of quotes mean the same; there are no other escapes."""
        assert truth(text, {"a": "it's"}) is T
        assert truth('/a = "say ""x"""', {"a": 'say "x"'}) is T
        assert truth(r"/a = '\n'", {"a": r"\n"}) is T

    @pytest.mark.parametrize(("text", "quote"), [("/a = 'b", "'"), ('/a = "b', '"'), ("/a = 'b''", "'")])
    def test_a_string_that_does_not_end_is_refused(self, text: str, quote: str) -> None:
        """The error points at where it begins."""
        assert error(text).startswith(f"bad filter, column 6: expected a closing {quote} to this string")

    def test_numbers_are_written_as_in_a_selector(self) -> None:
        """Decimal, hexadecimal, octal, with a fraction or an exponent, with Java's suffixes."""
        for text in ("0x1F", "31", "037", "31L", "31.0", "3.1e1", "31d"):
            assert truth(f"/a = {text}", {"a": 31}) is T

    def test_true_is_one_and_false_is_zero(self) -> None:
        """AMPS has its truths as numbers: they compare with them, calculate, and stand where a condition does."""
        body = {"t": True, "f": False, "one": 1, "two": 2, "zero": 0, "s": "x"}
        for text in ("/t = 1", "/t = TRUE", "/f = 0", "/one = TRUE", "/t + /t = 2", "/t > /f", "/t", "NOT /f", "/two"):
            assert truth(text, body) is T
        for text in ("/f", "/zero", "NOT /one", "/two = TRUE", "/two AND /zero", "/t IN (0, 5)"):
            assert truth(text, body) is F
        assert truth("/s", body) is U
        assert truth("/t IN (1)", body) is T

    def test_null_is_a_value(self) -> None:
        """It may be compared, which is unknown."""
        assert truth("/a = NULL", {"a": 1}) is U
        assert truth("/a IN (1, NULL)", {"a": 1}) is T
        assert truth("/a IN (2, NULL)", {"a": 1}) is U
        assert truth("NULL IS NULL AND /a = 1", {"a": 1}) is T

    def test_an_integer_of_more_than_64_bits_is_a_double(self) -> None:
        """JSON has no limit to its numbers; what is too large for a double is infinite."""
        assert value("/a", {"a": (1 << 63) - 1}) == (1 << 63) - 1
        assert value("/a", {"a": 1 << 63}) == float(1 << 63) and isinstance(value("/a", {"a": 1 << 63}), float)
        assert value("/a", {"a": -(1 << 63)}) == -(1 << 63)
        assert truth("/a > 1e308", {"a": 10**400}) is T
        assert truth("/a < -1e308", {"a": -(10**400)}) is T


class TestComparison:
    @pytest.mark.parametrize(
        ("symbol", "less", "equal", "greater"),
        [
            ("=", F, T, F), ("==", F, T, F), ("<>", T, F, T), ("!=", T, F, T), ("<", T, F, F), ("<=", T, T, F),
            (">", F, F, T), (">=", F, T, T),
        ],
    )  # fmt: skip
    def test_orders_numbers_and_strings(self, symbol: str, less: bool, equal: bool, greater: bool) -> None:
        """Strings have an order too, character by character; two ways to write equal and unequal mean the same."""
        assert [truth(f"/a {symbol} 2", {"a": a}) for a in (1, 2, 3)] == [less, equal, greater]
        assert [truth(f"/a {symbol} 2", {"a": a}) for a in (1.5, 2.0, 2.5)] == [less, equal, greater]
        assert [truth(f"/a {symbol} 'b'", {"a": a}) for a in ("a", "b", "ba")] == [less, equal, greater]

    @pytest.mark.parametrize("spelt", ["5", "5.0", "+5", "5.", "0.5e1", "50E-1", "005"])
    def test_of_a_number_with_a_string_that_spells_one_is_of_numbers(self, spelt: str) -> None:
        """On either side, and wherever the string comes from; two strings are compared as strings."""
        for text in ("/a = 5", "5 = /a", "/a <= 5", "/a > 4", "4.5 < /a", "/a != 6", "/a + 1 = 6"):
            assert truth(text, {"a": spelt}) is T
            literal = text.replace("/a", f"'{spelt}'")
            assert truth(f"/b = 1 AND {literal}", {"b": 1}) is T
        assert truth("/a = 5 AND p = /a", {"a": 5}, p=Typed("S", spelt)) is T
        assert truth("/a = '5'", {"a": spelt}) is (spelt == "5")
        assert truth("/a = TRUE", {"a": "1"}) is T

    @pytest.mark.parametrize("other", ["x", " 5", "5 ", "0x5", "1_0", "nan", "inf", "1e", "\u0665", "5" * (WIDTH + 1)])
    def test_of_a_number_with_any_other_string_finds_the_string_greater(self, other: str) -> None:
        """Than every number, so it is unequal to all of them."""
        for text in ("/a > 5", "5 < /a", "/a >= 1e308", "/a != 5", "/a > TRUE"):
            assert truth(text, {"a": other}) is T
        for text in ("/a = 5", "/a < 5", "5 >= /a", "/a = FALSE"):
            assert truth(text, {"a": other}) is F

    def test_of_spelt_integers_is_exact_within_64_bits(self) -> None:
        """And of doubles beyond."""
        assert truth("/a = 9223372036854775807", {"a": "9223372036854775807"}) is T
        assert truth("/a = 9223372036854775807", {"a": "9223372036854775806"}) is F
        assert value("/a + 0", {"a": "9223372036854775808"}) == float(1 << 63)
        assert value("/a + 0", {"a": "-" + "9" * 30}) == -1e30

    def test_with_null_is_unknown(self) -> None:
        """A field that is null, and one that is not there, are the same NULL."""
        bodies: list[object] = [{}, {"a": None}, {"a": []}, [], 5, "x", None]
        for body in bodies:
            assert truth("/a = 1", body) is U
            assert truth("/a IS NULL", body) is T
            assert truth("/a IS NOT NULL", body) is F

    def test_takes_an_empty_string_for_null(self) -> None:
        """Whether it stands in the body, in a property or in the filter."""
        for text in ("/a = ''", "/a != 'x'", "/a > 5", "/a LIKE ''", "/a BEGINS WITH ''", "/a IN ('', 'x')", "p = 1"):
            assert truth(f"{text} AND /b = 1", {"a": "", "b": 1}, p=Typed("S", "")) is U
        assert truth("/a IS NULL", {"a": ""}) is T
        assert truth("/a IS NOT NULL", {"a": ""}) is F
        assert truth("/a = ''", {"a": "x"}) is U
        assert value("/a + 1", {"a": ""}) is None
        assert truth("/a = 'x'", {"a": ["", "x"]}) is T
        assert truth("/a = 'y'", {"a": ["", "x"]}) is U
        assert truth("/a IS NULL", {"a": ["", None]}) is T
        assert truth("/a IS NULL", {"a": ["", {}]}) is F

    def test_with_what_is_no_number_is_unknown(self) -> None:
        """Arithmetic with a string that spells no number gives NaN, which only IS NAN finds."""
        body = {"s": "x", "n": 1}
        assert value("/s + 1 IS NAN", body) is T
        assert value("/s + 1 IS NOT NAN", body) is F
        assert value("/n + 1 is nan", body) is F
        assert value("/missing + 1 IS NAN", body) is F
        assert value("/s IS NAN", body) is F
        for text in ("/s + 1 = 1", "/s + 1 != 1", "/s + 1 < 'x'", "/s + 1", "/s + 1 IN (1)", "/s * 2 BETWEEN 1 AND 3"):
            assert truth(text, body) is U
        assert truth("/a = 1 AND NAN = 1", {"a": 1}, NAN=Typed("I", 1)) is T
        assert "expected NULL, NAN or NOT NULL, found 5" in error("/a IS 5")


class TestArrays:
    BODY: object = {"data": [1, 2, 3, "zebra", 5], "other": [14, 34, 23, 5], "none": [], "some": [None, 1], "o": [{}]}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("/data = 1", T), ("/data = 'zebra'", T), ("/data = 42", F), ("/data != 1", T), ("/data LIKE 'z'", T),
            ("/other > 30", T), ("/other > 50", F), ("/other BETWEEN 20 AND 30", T), ("/other BETWEEN 24 AND 30", F),
            ("/data IN ('lion', 'zebra')", T), ("/data IN (42, 43)", F), ("/data BEGINS WITH 'ze'", T),
            ("/data ENDS WITH ('x', 'bra')", T), ("30 < /other", T), ("/o = 1", F),
        ],
    )  # fmt: skip
    def test_satisfy_a_comparison_when_one_element_does(self, text: str, expected: bool) -> None:
        """Whatever yields true or false looks at all elements."""
        assert truth(text, self.BODY) is expected

    def test_compare_with_each_other_element_by_element(self) -> None:
        """One pair that satisfies is enough."""
        assert truth("/data = /other", self.BODY) is T
        assert truth("/data[0] = /other", self.BODY) is F
        assert truth("/other IN (/data, 99)", self.BODY) is T

    def test_satisfy_the_opposite_when_no_element_does(self) -> None:
        """NOT before a predicate is the opposite of all of it; != is a comparison of its own."""
        assert truth("/data NOT IN (1, 99)", self.BODY) is F
        assert truth("/data NOT LIKE 'z'", self.BODY) is F
        assert truth("/other NOT BETWEEN 14 AND 15", self.BODY) is F
        assert truth("/other != 14 AND /other = 14", self.BODY) is T

    def test_give_their_first_element_to_arithmetic_and_functions(self) -> None:
        """What makes one value of its operands takes one of each."""
        assert truth("/other + 1 = 15", self.BODY) is T
        assert truth("INSTR(/data, 'z') = 0", {"data": ["lazy", "zoo"]}) is F
        assert truth("INSTR(/data, 'z') = 3", {"data": ["lazy", "zoo"]}) is T
        assert value("/other", self.BODY) == 14
        assert value("/o", self.BODY) is None

    def test_that_are_empty_are_null_and_others_are_not(self) -> None:
        """An element that is null leaves open what the others do not decide."""
        assert truth("/none IS NULL", self.BODY) is T
        assert truth("/some IS NULL", self.BODY) is F
        assert truth("/some = 1", self.BODY) is T
        assert truth("/some = 2", self.BODY) is U

    def test_that_are_too_long_to_compare_with_each_other_are_unknown(self) -> None:
        """Each element would meet each: a million pairs are looked at, and no more."""
        many = int(PAIRS**0.5) + 1
        assert truth("/a = /b", {"a": [1] * many, "b": [1] * many}) is U
        assert truth("/a = 1", {"a": [0] * many + [1]}) is T


class TestArithmetic:
    @pytest.mark.parametrize(
        ("text", "result"),
        [
            ("/a + 1", 8), ("/a - 1", 6), ("/a * 2", 14), ("/a / 2", 3), ("/a % 4", 3), ("/a MOD 4", 3),
            ("/a mod 4", 3),
            ("-/a", -7), ("- - /a", 7), ("-5 % 3 + /a - /a", -2), ("5 % -3 + /a - /a", 2), ("/a + 2 * 3", 13),
            ("(/a + 2) * 3", 27), ("/a * 3 % 2", 1), ("/a / 2.0", 3.5), ("/a % 2.5", 2.0), ("-/d % 1", -0.5),
            ("/d * 2", 3.0),
        ],
    )  # fmt: skip
    def test_goes_as_in_a_selector_and_has_remainders(self, text: str, result: float) -> None:
        """Integers stay integers; what remains of a division has the sign of what was divided."""
        found = value(text, {"a": 7, "d": 1.5})
        assert found == result and type(found) is type(result)

    @pytest.mark.parametrize(
        "text", ["/a % 0", "/a / 0", "/a % 0.0", "1e308 * 10 % 2 + /a", "/n * 2", "/a + /o", "/a + '1' * /n"]
    )
    def test_that_has_no_result_is_null(self, text: str) -> None:
        """Division by zero, and whatever is calculated with NULL or an object."""
        assert value(text, {"a": 7, "o": {}}) is None

    def test_takes_strings_that_spell_numbers(self) -> None:
        """A literal that spells none is refused, as it tells without a message that the whole would be no number."""
        assert truth("/a + '1' = 2 AND -/a = '-1' AND /a * /a % 2 = 1", {"a": "1"}) is T
        assert value("/a / 2", {"a": "7"}) == 3
        assert value("/a / 2", {"a": "7.0"}) == 3.5
        for text in ("/a + 'x' = 2", "-'x' = /a"):
            assert "expected a number, found a string" in error(text)


class TestIn:
    def test_takes_numbers_strings_and_expressions(self) -> None:
        """It is a row of comparisons by = with OR between them."""
        assert truth("/a IN (1, 'x', 2.5)", {"a": "x"}) is T
        assert truth("/a IN (1, 'x', 2.5)", {"a": 2.5}) is T
        assert truth("/a IN (/b * 2, 1000)", {"a": 6, "b": 3}) is T
        assert truth("/a IN (-1, +2)", {"a": -1}) is T
        assert truth("/a IN (2)", {"a": 2.0}) is T
        assert truth("/a IN (2.0)", {"a": 2}) is T
        assert truth("/a IN ('2', 'x')", {"a": 2}) is T
        assert truth("/a IN ('2.0')", {"a": 2}) is T
        assert truth("/a IN (2)", {"a": "2.0"}) is T
        assert truth("/a IN ('2')", {"a": "2.0"}) is F
        assert truth("/a NOT IN ('2')", {"a": 3}) is T
        assert truth("/a IN (1, /b)", {"a": 2}) is U
        assert truth("/b IN (1)", {"a": 2}) is U

    @pytest.mark.parametrize("text", ["/a IN ()", "/a IN 1", "/a IN (1", "/a IN (1,)", "/a IN (1 2)"])
    def test_takes_a_list_in_parentheses(self, text: str) -> None:
        """With one element at least."""
        error(text)


class TestBetween:
    def test_includes_both_ends_and_takes_strings(self) -> None:
        """It is the pair of comparisons with the ends."""
        assert [truth("/a BETWEEN 2 AND 3", {"a": a}) for a in (1, 2, 2.5, 3, 4)] == [F, T, T, T, F]
        assert [truth("/a NOT BETWEEN 2 AND 3", {"a": a}) for a in (1, 2, 2.5, 3, 4)] == [T, F, F, F, T]
        assert [truth("/a BETWEEN 'b' AND 'd'", {"a": a}) for a in ("a", "b", "c", "d", "da")] == [F, T, T, T, F]
        assert truth("(/a * /b) BETWEEN 0 AND /c AND /c = 9", {"a": 2, "b": 3, "c": 9}) is T

    def test_is_unknown_only_where_an_end_is_missing_that_would_decide(self) -> None:
        """As of two comparisons with AND between them."""
        assert truth("/n BETWEEN 1 AND 2", {}) is U
        assert truth("/a BETWEEN /n AND 2", {"a": 3}) is F
        assert truth("/a BETWEEN /n AND 4", {"a": 3}) is U
        assert truth("/a BETWEEN 1 AND 2", {"a": "1"}) is T
        assert truth("/a BETWEEN 1 AND 2", {"a": "x"}) is F


class TestBeginsWithAndEndsWith:
    def test_take_one_string_or_some(self) -> None:
        """True when the value begins, or ends, with one of them; upper and lower case differ."""
        body = {"f": "photo.png"}
        assert truth("/f BEGINS WITH 'photo'", body) is T
        assert truth("/f BEGINS WITH ('a', 'ph')", body) is T
        assert truth("/f begins  with ('Ph')", body) is F
        assert truth("/f ENDS WITH ('gif', 'png', 'jpg')", body) is T
        assert truth("/f NOT ENDS WITH 'png'", body) is F
        assert truth("/f NOT BEGINS WITH ('x')", body) is T
        assert truth("/f ENDS WITH ''", body) is T

    def test_take_numbers_as_strings_and_are_unknown_of_null(self) -> None:
        """As Python writes them; a truth is 1 or 0."""
        assert truth("/f BEGINS WITH '1' AND /f ENDS WITH '2'", {"f": 12}) is T
        assert truth("/f ENDS WITH '.5'", {"f": 2.50}) is T
        assert truth("/f BEGINS WITH '1'", {"f": True}) is T
        assert truth("/f BEGINS WITH '1'", {}) is U
        assert truth("/f NOT ENDS WITH '1'", {}) is U

    @pytest.mark.parametrize(
        "text", ["/f BEGINS WITH 5", "/f BEGINS WITH ()", "/f BEGINS 'a'", "/f ENDS WITH /g", "/f WITH 'a'"]
    )
    def test_take_literal_strings_only(self, text: str) -> None:
        """As LIKE takes a literal."""
        error(text)


class TestFunctions:
    def test_instr_tells_where_a_string_begins_from_one(self) -> None:
        """0 where it does not occur; upper and lower case differ."""
        body = {"s": "critical, Critical"}
        assert value("INSTR(/s, 'Crit')", body) == 11
        assert value("INSTR(/s, 'crit')", body) == 1
        assert value("INSTR(/s, 'x')", body) == 0
        assert value("INSTR(/s, '')", body) == 1
        assert value("instr (/s, /t)", {"s": "ab", "t": "b"}) == 2
        assert truth('INSTR(/s, "critical") != 0', body) is T

    def test_instr_i_is_the_same_for_upper_and_lower_case_alike(self) -> None:
        """Each character stays one, so that the position is the text's own."""
        assert value("INSTR_I(/s, 'MSFT')", {"s": "ibm,msft"}) == 5
        assert value("INSTR_I(/s, 'ÄB')", {"s": "ßÄäb"}) == 3
        assert value("INSTR_I(/s, 'x')", {"s": "ßİX"}) == 3

    def test_strequal_i_is_one_or_zero_and_a_condition(self) -> None:
        """It may be compared with a number, as AMPS's manual has it, or stand alone."""
        body = {"c": "qEd"}
        for text in ("STREQUAL_I(/c, 'QED') == 1", "STREQUAL_I(/c, 'QED')", "STREQUAL_I(/c, 'QED') = TRUE"):
            assert truth(text, body) is T
            assert truth(text, {"c": "x"}) is F
            assert truth(text, {}) is U
        assert truth("NOT STREQUAL_I(/c, 'QED') AND INSTR(/c, 'x')", {"c": "xx"}) is T

    @pytest.mark.parametrize("name", ["INSTR", "INSTR_I", "STREQUAL_I"])
    def test_take_numbers_as_strings_and_are_null_of_null(self, name: str) -> None:
        """And of objects."""
        assert value(f"{name}(/a, '1')", {"a": 1}) == 1
        assert value(f"{name}('1', /a)", {}) is None
        assert value(f"{name}(/a, '1')", {"a": {}}) is None

    @pytest.mark.parametrize(
        ("text", "column", "expected"),
        [
            ("INSTR(/a)", 1, "2 arguments of INSTR, found 1"),
            ("/a = 1 OR SUBSTR(/a, 1, 2, 3) = 'x'", 11, "2 or 3 arguments of SUBSTR, found 4"),
            ("CONCAT() = /a", 1, "1 or more arguments of CONCAT, found 0"),
            ("LENGTH(/a, 1)", 1, "1 argument of LENGTH, found 2"),
            ("NAN_VALUE(/a)", 1, "0 arguments of NAN_VALUE, found 1"),
            ("INSTR(/a 'b')", 10, ", or ), found 'b'"),
            ("INSTR(/a,", 10, "a value, found the end of the filter"),
            ("INSTR(/a", 9, ", or ), found the end of the filter"),
            ("INSTR(, /a)", 7, "a value, found ,"),
            ("/a = 1 AND substring(/a, 2) = 'x'", 12, "a function, such as SUBSTR, found substring"),
            ("JMSPriority(/a)", 1, "a function (ABS, ARRAY_COUNT, "),
            ("SUM(/a) > 1", 1, "a function of one message (SUM is over many; ARRAY_SUM is over an array), found SUM"),
            ("AVG(/a) > 1", 1, "a function of one message (AVG is over many), found AVG"),
            ("MIN(/a) > 1", 1, "2 or more arguments of MIN, found 1"),
            ("IF('x', /a, 1) = 1", 4, "a condition, found a string"),
            ("REGEXP_REPLACE(/a, /b, 'x') = 'y'", 20, "a string, found another value"),
            ("REGEXP_REPLACE(/a, '(', 'x') = 'y'", 20, "a regular expression that RE2 accepts (missing ): ("),
        ],
    )
    def test_that_do_not_exist_or_are_called_wrongly_are_refused(self, text: str, column: int, expected: str) -> None:
        """The error points at the name, or at the argument, and says what there is."""
        assert error(text).startswith(f"bad filter, column {column}: expected {expected}")

    def test_of_amps_are_none_of_a_selector(self) -> None:
        """Without a path a word before a parenthesis is a property."""
        for name in FUNCTIONS:
            assert "found (" in error(f"{name}(x, y, z) = 1")

    def test_name_no_property(self) -> None:
        """A property may be called like a function, and a function is no identifier of a filter."""
        compiled = compile_filter("LENGTH(/a) = LENGTH AND COALESCE(x, /b) = IF (y = 1, 2, z)")
        assert compiled.identifiers == {"LENGTH", "x", "y", "z"}
        assert truth("LENGTH(/a) = LENGTH", {"a": "xy"}, LENGTH=Typed("I", 2)) is T

    def test_if_and_coalesce_stop_at_what_they_return(self) -> None:
        """What is behind is not looked up; an unknown condition is not true."""
        asked: list[str] = []
        assert compile_expression("IF(/a IS NULL, COALESCE(/b, 1, /c), /d)").value(asked.append) == 1
        assert asked == ["/a", "/b"]
        assert value("IF(/a > 1, 'y', 'n')", {}) == "n"
        assert value("IF(/a, 'y', 'n')", {"a": 2}) == "y"
        assert value("COALESCE(/a, /b, /c)", {"a": None, "b": "", "c": [5, 6]}) == 5
        assert value("COALESCE(/a, NULL)", {}) is None

    def test_make_no_text_that_is_longer_than_a_limit(self) -> None:
        """It is NULL instead, and the memory for it is never taken, however many megabytes a body has."""
        half = "x" * (LONGEST // 2)
        fields: dict[str, Found] = {"/h": half, "/w": half + "y", "/l": half * 30, "/a": (half,) * 30}
        texts = (
            "CONCAT(/h, /w)", f"CONCAT({', '.join(['/l'] * 500)})", f"REPLACE(/l, 'x', '{'y' * 1000}')",
            f"REGEXP_REPLACE(/h, 'x', '{'y' * 1000}')", f"ARRAY_TO_STRING(/a, '{'y' * 1000}', '')",
        )  # fmt: skip
        assert compile_expression("LENGTH(CONCAT(/h, /h))").value(fields.get) == LONGEST
        for text in texts:
            compiled = compile_expression(text)
            tracemalloc.start()
            assert compiled.value(fields.get) is None
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
            tracemalloc.stop()

    def test_replace_by_an_expression_in_bounded_time(self, caplog: pytest.LogCaptureFixture) -> None:
        """Each match may begin a search through all of the text: with too many of them the result is NULL."""
        start = time.process_time()
        with caplog.at_level(logging.WARNING, "dropq"):
            assert value("REGEXP_REPLACE(/s, 'x*y|x', 'z')", {"s": "x" * 500_000}) is None
        assert time.process_time() - start < 30
        assert "REGEXP_REPLACE NULL, for a text of 500000 characters" in caplog.records[0].getMessage()
        assert value("REGEXP_REPLACE(/s, 'x*y|x', '\\1')", {"s": "axxy"}) == "a\\1"
        assert value("REGEXP_REPLACE(/s, 'x', 'z')", {"s": "x\ud800"}) is None


NO_BACKTRACKING = "; RE2 has neither lookaround nor backreferences, so that no expression can hang a consumer)"


class TestLike:
    def test_is_a_regular_expression_that_need_only_fit_somewhere(self) -> None:
        """Unless it is anchored; upper and lower case differ unless (?i) stands in front. Selectors have % and _."""
        body = {"s": "An Apple pie"}
        for text in (
            "'Apple'",
            "'^An'",
            "'pie$'",
            "'A.*e$'",
            "'(?i)APPLE'",
            "'[Pp]ie|cake'",
            "'p{2}'",
            "''",
            '"Apple"',
        ):
            assert truth(f"/s LIKE {text}", body) is T
            assert truth(f"/s NOT LIKE {text}", body) is F
        for text in ("'apple'", "'^Apple'", "'An$'", "'Apple%'", "'_n'"):
            assert truth(f"/s LIKE {text}", body) is F

    def test_takes_numbers_as_strings_and_is_unknown_of_null(self) -> None:
        """And false of objects."""
        assert truth("/s LIKE '^1$'", {"s": 1}) is T
        assert truth("/s LIKE '4' AND 5 LIKE '5'", {"s": [1.5, 34]}) is T
        assert truth("/s LIKE ''", {"s": {}}) is F
        assert truth("/s LIKE ''", {}) is U

    def test_applies_to_properties_of_an_amps_filter_too(self) -> None:
        """A filter is of one language."""
        assert truth("/a = 1 AND p LIKE '^x.z$'", {"a": 1}, p=Typed("S", "xyz")) is T

    @pytest.mark.parametrize(
        ("pattern", "reason"),
        [
            ("(?=a)", f"invalid perl operator: (?={NO_BACKTRACKING}"),
            ("(?<!a)b", f"invalid perl operator: (?<!{NO_BACKTRACKING}"),
            (r"(.)\1", rf"invalid escape sequence: \1{NO_BACKTRACKING}"), ("[", "missing ]: ["),
            ("a{1000}{1000}", "bad repetition operator"), ("\ud800", "half of a surrogate pair is not a character"),
            ("(a{1000}b){99}", "invalid repetition size"), (r"\pL{1000}", "pattern too large"),
        ],
    )  # fmt: skip
    def test_refuses_what_re2_does_not_know_with_the_reason(
        self, pattern: str, reason: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Lookaround and backreferences have no linear time, as the error says; nothing is said on stderr."""
        said = error(f"/a = 1 AND /s LIKE '{pattern}'")
        assert said.startswith("bad filter, column 20: expected a regular expression that RE2 accepts (")
        assert reason in said
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("text", ["/s LIKE /t", "/s LIKE 5", "/s LIKE", "/s LIKE UPPER('x')"])
    def test_takes_a_literal(self, text: str) -> None:
        """So that it is compiled once."""
        error(text)

    def test_half_of_a_surrogate_pair_in_a_text_is_any_character(self) -> None:
        """JSON can write one; it is no character that an expression could name."""
        for text in ("a\ud800b", "a\udcffb"):
            assert truth("/s LIKE '^a.b$'", {"s": text}) is T
            assert truth("/s LIKE '[?]'", {"s": text}) is F

    @pytest.mark.parametrize(
        "pattern", ["(x+x+)+y", "(x*)*y", "(x|x|x?)*y", "^(x+)+$y", "(.*)(.*)(.*)y", "(?:x?){50}y"]
    )
    def test_no_expression_takes_long(self, pattern: str) -> None:
        """What would take a backtracking matcher longer than anybody lives."""
        start = time.process_time()
        assert not matches(f"/s LIKE '{pattern}'", {"s": "x" * 500_000})
        assert time.process_time() - start < 30

    def test_is_unknown_where_even_linear_time_would_be_long(self, caplog: pytest.LogCaptureFixture) -> None:
        """The size of the expression times that of all texts together is limited; the first time is told in the log."""
        compiled = compile_filter("/s LIKE '[ab]*a[ab]{900}c' OR NOT /s LIKE '[ab]*a[ab]{900}c'")
        long = json.dumps({"s": ["ab" * 1000] * (STEPS // 900 // 2000 + 1)}).encode()
        with caplog.at_level(logging.WARNING, "dropq"):
            assert not compiled.matches(for_name(Name("a"), body=Body(lambda: long)))
            assert not compiled.matches(for_name(Name("a"), body=Body(lambda: long)))
        assert [record.getMessage()[:15] for record in caplog.records] == ["LIKE is unknown"] * 2

    def test_without_re2_says_which_extra_has_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And no other filter needs it."""
        real = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "re2":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.delitem(sys.modules, "re2", raising=False)
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(Unavailable, match=r"google-re2.* install dropq with its extra `amps`"):
            compile_filter("/a LIKE 'b'")
        assert matches("/a BEGINS WITH 'b'", {"a": "b"})


class TestExpressions:
    @pytest.mark.parametrize(
        ("text", "result"),
        [
            ("/priority", 3), ("/price * /quantity", 12.5), ("JMSPriority + 1", 5), ("/price > 1", True), ("5", 5),
            ("'x'", "x"), ("/name", "n"), ("/missing", None), ("/", None), ("NOT /price", False), ("x", None),
        ],
    )  # fmt: skip
    def test_have_a_value_of_any_kind(self, text: str, result: Value) -> None:
        """What orders messages may be a field, a calculation or a condition, of a body or of a name."""
        found = value(text, {"priority": 3, "price": 2.5, "quantity": 5, "name": "n"})
        assert found == result and type(found) is type(result)

    def test_know_whether_they_ask_for_the_body(self) -> None:
        """So that whoever uses one knows what it costs."""
        assert compile_expression("/priority").reads_body
        assert not compile_expression("JMSPriority").reads_body
        assert compile_expression("/a") == compile_expression("/a") != compile_expression("/b")
        assert compile_expression(" /a").text == " /a"

    @pytest.mark.parametrize("text", ["", "  ", "/a +", "/a b", "= 1"])
    def test_that_are_blank_or_wrong_are_refused_with_the_column(self, text: str) -> None:
        """No expression is not any expression."""
        with pytest.raises(InvalidFilter, match=r"^bad expression, column \d+: expected "):
            compile_expression(text)


class SqlWriter(Writer):
    """Writes what AMPS filters and SQL share, as SQL, where LIKE with a regular expression is called REGEXP.

    As in `Writer` numbers are small, and minus signs stand apart. Strings and numbers do not meet: sqlite has another
    order between them. No string is empty, as AMPS takes it for NULL. There are no remainders of doubles, of which
    sqlite makes integers, and no string for a condition.
    """

    def string(self) -> str:
        string = super().string()
        return "n" if string == "''" else string

    def test(self) -> str:
        number, string, negated = self.number, self.string, self.maybe("NOT ")
        symbol = self.one("=", "==", "<>", "!=", "<", "<=", ">", ">=")
        tests: list[Callable[[], str]] = [
            lambda: f"{number(1)} {symbol} {number(1)}",
            lambda: f"{string()} {symbol} {string()}",
            lambda: f"{number(1)} {negated}BETWEEN {number(1)} AND {number(1)}",
            lambda: f"{string()} {negated}BETWEEN {string()} AND {string()}",
            lambda: f"{number(1)} {negated}IN ({number(0)}, 1, - 2, 2.5, {self.one('3', 'NULL', 'i')})",
            lambda: f"{string()} {negated}IN ('a', {string()}, 'it''s')",
            lambda: f"{string()} {negated}REGEXP '{self.one('a', '^a', 'b$', '.', '', '[ab]+', 'it|A', '(?i)^A')}'",
            lambda: f"INSTR({string()}, {string()}) {symbol} {number(0)}",
            lambda: f"{number(1)} IS {negated}NULL",
            lambda: f"{string()} IS {negated}NULL",
            lambda: self.one("b", "c", "TRUE", "FALSE", "b = c", "b = 1", "b <> TRUE", "b + 1 > c", "n", "i", "j"),
        ]
        return self.random.choice(tests)()

    def number(self, depth: int) -> str:
        if self.random.random() < 0.1:
            return f"{self.maybe('- ')}{self.one('i', 'j')} % {self.maybe('- ')}{self.one('2', '3', '0')}"
        return super().number(depth)


def as_amps(condition: str) -> str:
    """The same condition over fields of a body, of which there is one at least."""
    paths = re.sub(r"('[^']*')|\b([ijfgstbcn])\b", lambda found: found[1] or f"/{found[2]}", condition)
    return f"({paths.replace('REGEXP', 'LIKE')}) AND /none IS NULL"


@pytest.fixture(scope="module")
def sql() -> Callable[..., bool | None]:
    """What sqlite makes of a condition, for the values of some columns; its REGEXP is Python's."""
    database = sqlite3.connect(":memory:")
    database.create_function(
        "regexp", 2, lambda pattern, text: None if text is None else re.search(pattern, text) is not None
    )

    def evaluate(condition: str, **columns: Value) -> bool | None:
        row = ", ".join(f"? AS {column}" for column in columns)
        [answer] = database.execute(f"SELECT ({condition}) FROM (SELECT {row})", [*columns.values()]).fetchone()
        return None if answer is None else bool(answer)

    return evaluate


SQLITE = sqlite3.connect(":memory:")
#: Functions of the columns s, t, u, x, y, i and j, and what sqlite calls them.
CALLS = [
    *((f"{name}(s)", f"{name}(s)") for name in ("UPPER", "LOWER", "LENGTH", "TRIM", "LTRIM", "RTRIM")),
    *((f"{name}(x)", f"{name}(x)") for name in ("ABS", "ROUND")),
    *((call, call) for call in ("SUBSTR(s, i)", "SUBSTR(s, i, j)", "REPLACE(s, t, 'xa')", "INSTR(s, t)")),
    ("LEFT(s, j)", "substr(s, 1, j)"), ("ROUND(x, j)", "ROUND(x, j)"),
    ("CONCAT(s, t)", "coalesce(s, '') || coalesce(t, '')"),
    ("COALESCE(s, t, u)", "coalesce(nullif(s, ''), nullif(t, ''), nullif(u, ''))"), ("GREATEST(x, y)", "max(x, y)"),
    ("LEAST(x, y)", "min(x, y)"), ("IF(x > y, s, t)", "iif(x > y, s, t)"),
    ("STRFTIME('%Y-%m-%d %H:%M:%S', i * 86400 + j)", "strftime('%Y-%m-%d %H:%M:%S', i * 86400 + j, 'unixepoch')"),
]  # fmt: skip
short = st.none() | st.text("abAB x", max_size=6)
decimals = st.none() | st.integers(-(10**6), 10**6).map(lambda number: number / 1000)
literals = st.sampled_from([0, 1, -1, 5, 2.5, 5.0, "5", "5.0", "0", "", "x", "2.5", "05", "-1", "a", "1e1", 10, True])
ANSWERS = {"TRUE": T, "FALSE": F, "unknown": U}


class TestAgreement:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(seeds)
    def test_with_sqlite_on_what_the_languages_share(self, sql: Any, seed: int) -> None:
        """Two parsers and two evaluators that know nothing of each other come to the same."""
        text, message = SqlWriter(seed).condition(2), Writer(seed + 1).message()
        body = {name: None if value == "" else value for name, value in message.items()}
        assert truth(as_amps(text), body) is sql(text, **body)

    @settings(max_examples=EXAMPLES // 2, deadline=None)
    @given(
        st.sampled_from(CALLS),
        st.tuples(short, short, short, decimals, decimals, st.integers(-6, 6), st.integers(0, 6)),
    )
    def test_with_sqlite_on_functions(self, calls: tuple[str, str], values: tuple[Value, ...]) -> None:
        """Each result is that of sqlite's function."""
        columns = dict(zip("stuxyij", values, strict=True))
        row = ", ".join(f"? AS {column}" for column in columns)
        ours, theirs = calls
        [expected] = SQLITE.execute(f"SELECT {theirs} FROM (SELECT {row})", [*columns.values()]).fetchone()
        assert value(re.sub(r"\b([stuxyij])\b", r"/\1", ours), columns) == expected

    @settings(max_examples=EXAMPLES // 4, deadline=None)
    @given(st.sampled_from(["a", "b+", "[ab]c?", "^a", "c$", "b*", "a|", "(?i)A", "(a)(b)", "é", "."]), st.text("abé "))
    def test_with_python_on_replacements_by_expressions(self, pattern: str, text: str) -> None:
        """The new text stands for each match as it is written."""
        replaced = re.sub(pattern, lambda match: "<\\1>", text)
        assert value(f"REGEXP_REPLACE(/s, '{pattern}', '<\\1>')", {"s": text}) == replaced

    @settings(max_examples=EXAMPLES // 4, deadline=None)
    @given(st.lists(literals, min_size=1, max_size=4), literals)
    def test_of_in_and_between_with_comparisons(self, listed: list[Value], item: Value) -> None:
        """IN is a row of comparisons by =, and BETWEEN a pair of others, also of strings with numbers."""
        literal = [f"'{value}'" if isinstance(value, str) else repr(value) for value in listed]
        equal = " OR ".join(f"/a = {value}" for value in literal)
        assert truth(f"/a IN ({', '.join(literal)})", {"a": item}) is truth(equal, {"a": item})
        between = f"/a BETWEEN {literal[0]} AND {literal[-1]}"
        assert truth(between, {"a": item}) is truth(f"/a >= {literal[0]} AND /a <= {literal[-1]}", {"a": item})

    @pytest.mark.long
    def test_of_a_long_in_takes_no_longer_for_each_message(self) -> None:
        """It is looked up at once, whatever the literals and the value are."""
        listed = ", ".join(f"{number}, '{number}.0', 'x{number}'" for number in range(50_000))
        compiled = compile_filter(f"/a IN ({listed})")
        items: list[Value] = [7, "8", "x9", -1, "y", 0.5]
        start = time.process_time()
        for _ in range(200):
            assert [compiled.matches({"/a": item}.get) for item in items] == [True, True, True, False, False, False]
        assert time.process_time() - start < 5


def rows(heading: str) -> Iterator[list[str]]:
    """The rows of the first table after a heading of docs/filters.md, without the code marks of their cells."""
    _, _, after = PAPER.read_text().partition(f"# {heading}\n")
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert table is not None
    for line in table[0].splitlines()[2:]:
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        yield [cell.strip().replace("\\|", "|") for cell in cells]


@pytest.mark.parametrize("text", ["UPPER(a) = 'B'", "a BEGINS WITH 'b'", "COALESCE(a, 1) = 1"])
def test_a_selector_that_asks_for_what_only_amps_filters_have_is_told_why(text: str) -> None:
    """Whoever forgets the path."""
    with pytest.raises(InvalidFilter, match=r"\(a text without a path, such as /total, is a JMS selector"):
        compile_filter(text)


class TestThePaper:
    def test_lists_each_function_with_its_arguments(self) -> None:
        """Optional ones in brackets, and an ellipsis for any number."""
        listed = {}
        for signatures, _ in rows("Functions of AMPS filters"):
            for name, arguments in re.findall(r"`([A-Z_]+)\((.*?)\)`", signatures):
                required = re.sub(r"\[.*\]|, …", "", arguments)
                least = required.count(",") + 1 if required else 0
                listed[name] = least, ANY if "…" in arguments else least + arguments.count("[")
        assert listed == {name: (function.least, function.most) for name, function in FUNCTIONS.items()}

    def test_says_example_by_example_what_dropq_answers(self) -> None:
        """And where that is what AMPS's guide says; the body of all is in the paper."""
        [block] = re.findall(r"```json\n(.*?)```", PAPER.read_text(), re.DOTALL)
        body = json.loads(block)
        for code, guide, answer in rows("AMPS's guide, example by example"):
            text = code.strip("`")
            if answer == "refused":
                error(f"/id = 1 AND ({text})")
            elif answer in ANSWERS:
                assert truth(f"/id = 1 AND ({text})", body) is ANSWERS[answer], text
            else:
                assert str(value(f"IF(/id = 1, {text}, 0)", body)) == answer.strip("`"), text
            assert guide in (answer, "TRUE", "FALSE"), text


words = st.sampled_from([
    *KEYWORDS, "=", "==", "<>", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "MOD", "(", ")", ",", "'a'", '"b"',
    "''", "x", "/x", "/x/y", "/x[0]", "/[1]", '/"y"', "/", "[", "1", "0", "2.5", "9223372036854775807", "1e308",
    "/y = 1",
    "/x LIKE 'a+'", "BEGINS WITH", "ENDS WITH 'a'", "INSTR(", "INSTR_I(/x, /y)", "STREQUAL_I(x, /y)", "'", '"', "(?i)",
    "NAN", *(f"{name}(" for name in FUNCTIONS),
])  # fmt: skip
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), any_text)
times = st.lists(st.sampled_from(["%Y", "%m", "%d", "%f", "%03f", "%z", "%j", "%", "2024", "1", "-"])).map("".join)
arguments = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | any_text | times
bodies = st.dictionaries(
    st.sampled_from("xyijfgstbcn"),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("xy"), inner)),
)


class TestNothingUpsetsIt:
    @given(
        any_text
        | st.lists(words).map(" ".join)
        | st.lists(words | any_text).map("/x = 1 AND ".join)
        | seeds.map(lambda seed: mutated(Random(seed), as_amps(SqlWriter(seed).condition(2)))),
        bodies,
    )
    @example("/" * 5000, {})
    @example("/x" + "[0]" * 5000, {})
    @example("/x = " + "(" * 5000, {})
    @example('/"' + '""' * 5000, {})
    @example("/x LIKE '" + "(" * 5000 + "'", {"x": "a"})
    @example("/x LIKE '" + "(" * 5000 + ")" * 5000 + "'", {"x": "a"})
    @example("/x % y", {"x": 1e308})
    def test_any_text_compiles_or_is_an_invalid_filter(self, text: str, body: object) -> None:
        """And what compiles has a truth and a value for every body."""
        try:
            assert matches(text, body) in (True, False)
        except InvalidFilter as invalid:
            complaint = str(invalid)
            column = re.match(r"bad filter, column (\d+): expected ", complaint)
            assert column is not None and 1 <= int(column[1]) <= len(text) + 1
            assert complaint.count("\n") == 2 and complaint.encode()
        with suppress(InvalidFilter):
            value(text, body)

    @settings(max_examples=EXAMPLES // 2, deadline=None)
    @given(st.sampled_from(sorted(FUNCTIONS)), st.lists(arguments, min_size=3, max_size=3))
    @example("ROUND", [1e308, -400, 0])
    @example("ROUND", [5e-324, 10**30, 0])
    @example("POWER", [10, 400, 0])
    @example("CEILING", ["1e999", 0, 0])
    @example("STRFTIME", ["%", 1e300, 0])
    @example("STRPTIME", ["1 1", "%d %d", 0])
    def test_no_argument_of_a_function_does(self, name: str, items: list[Value]) -> None:
        """Whatever it is, there is a value, which compares with others."""
        fields = dict(zip(("/x", "/y", "/z"), items, strict=True))
        operands = ["/x", "'a|'" if name == "REGEXP_REPLACE" else "/y", "/z"]
        for count in range(FUNCTIONS[name].least, min(FUNCTIONS[name].most, 3) + 1):
            call = f"{name}({', '.join(operands[:count])})"
            found = compile_expression(f"IF(/x IS NULL, {call}, {call})").value(fields.get)
            assert isinstance(found, bool | int | float | str | None)
            assert not isinstance(found, int) or -(1 << 63) <= found < 1 << 63
            assert compile_filter(f"{call} > /x OR {call} IS NULL OR {call} LIKE '1'").matches(fields.get) in (T, F)

    @given(seeds, bodies)
    def test_no_body_does(self, seed: int, body: object) -> None:
        """Whatever is in the fields that a good filter asks about."""
        assert truth(as_amps(SqlWriter(seed).condition(3)), body) in (True, False, None)

    @pytest.mark.parametrize("level", ["NOT /y OR /x IS NULL AND (", "1 + /y % -(", "INSTR(/x, ", "IF(/x, 1, "])
    def test_parentheses_may_be_nested_so_deep_and_no_deeper(self, level: str) -> None:
        """So that neither reading nor asking exhausts the stack."""
        assert f"at most {NESTING} parentheses" in error(level * (NESTING + 1))
        assert f"at most {NESTING} parentheses" in error(level * 100_000)

    @pytest.mark.parametrize(
        ("start", "level", "end", "expected"),
        [
            ("", "/y OR /y AND /x = 1 AND NOT (", "/y", [False, True]),
            ("/x <> ", "1 + 2 * -(", "/x", [True, True]),
            ("", "INSTR(/x, ", "'a'", [False, False]),
            ("/x = ", "COALESCE(/n, ", "/y", [False, True]),
        ],
    )
    def test_nesting_leaves_a_third_of_the_stack_to_the_caller(
        self, start: str, level: str, end: str, expected: list[bool]
    ) -> None:
        """A filter may be asked from deep within a program, and says what it says elsewhere."""
        text = start + level * NESTING + end + ")" * NESTING

        def deep(frames: int, y: bool) -> bool:
            return deep(frames - 1, y) if frames else matches(text, {"x": 1, "y": y})

        assert [deep(sys.getrecursionlimit() // 3, y) for y in (False, True)] == expected

    @pytest.mark.parametrize(
        "text",
        [
            "/x = 1" + " AND /x = 1" * 20_000, "/x = 1" + " + 0" * 20_000, "NOT " * 20_000 + "/x = 1",
            "/x = " + "- " * 20_000 + "1", "/x IN (2" + ", 3" * 20_000 + ", /x)",
            "/x BEGINS WITH ('a'" + ", 'b'" * 20_000 + ") OR /x",
        ],
        ids=lambda text: text[:20],
    )  # fmt: skip
    def test_a_long_chain_is_not_nested(self, text: str) -> None:
        """What stands side by side takes no stack."""
        assert matches(text, {"x": 1})
