"""The value of a property with its JMS type, as file names hold it."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass

from dropq.format.escapes import is_int32

#: The types of properties, and what they hold.
TYPES = {"B": "boolean", "Y": "byte", "H": "short", "I": "int", "L": "long", "F": "float", "D": "double", "S": "string"}

_INT_BITS = {"Y": 7, "H": 15, "I": 31, "L": 63}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_FLOAT = re.compile(r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")


@dataclass(frozen=True, slots=True)
class Typed:
    """The value of a property with its JMS type: one of B Y H I L F D S.

    Raises:
        ValueError: the value does not have the type, or is outside its range.
    """

    type: str
    value: bool | int | float | str

    def __post_init__(self) -> None:
        kind, value = self.type, self.value
        if kind == "S" and isinstance(value, str):
            check_text("a property value", value)
            if type(value) is not str:  # of an Enum its value
                object.__setattr__(self, "value", str.__str__(value))
        elif kind in ("F", "D") and isinstance(value, (int, float)) and not isinstance(value, bool):
            object.__setattr__(self, "value", _float(self, value))
        elif not _holds(kind, value):
            raise _misfit(kind, value)

    def __eq__(self, other: object) -> bool:
        # As tuples, to which NaN is equal to itself: what dataclass makes compares the values, from Python 3.13 on.
        if not isinstance(other, Typed):
            return NotImplemented
        return (self.type, self.value) == (other.type, other.value)

    @classmethod
    def of(cls, value: object) -> Typed:
        """Return a Python value with its type: bool B, int I or L, float D, str S; return a Typed as it is."""
        if isinstance(value, Typed):
            return value
        if isinstance(value, bool):
            return cls("B", value)
        if isinstance(value, int):
            return cls("I" if is_int32(value) else "L", value)
        if isinstance(value, float):
            return cls("D", value)
        if isinstance(value, str):
            return cls("S", value)
        raise ValueError(f"a property is a bool, int, float or str, not {type(value).__name__}")

    @classmethod
    def read(cls, kind: str, text: str) -> Typed:
        """Read a value from the decoded text of a file name.

        Raises:
            ValueError: the text is not a value of the type, or there is no such type.
        """
        if kind == "S":
            return cls(kind, text)
        if kind == "B" and text.lower() in ("true", "false"):
            return cls(kind, text.lower() == "true")
        if kind in _INT_BITS and _INTEGER.fullmatch(text):
            return cls(kind, int(text))
        if kind in ("F", "D") and _FLOAT.fullmatch(text):
            return cls(kind, float(text))
        raise _misfit(kind, text)

    @property
    def text(self) -> str:
        """The value as text for a file name, before encoding."""
        value = self.value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        if isinstance(value, int):
            return str(int(value))  # an IntEnum writes its number
        return value if isinstance(value, str) else repr(value)


def _holds(kind: str, value: object) -> bool:
    if isinstance(value, bool) or kind not in _INT_BITS:
        return isinstance(value, bool) and kind == "B"
    limit = 1 << _INT_BITS[kind]
    return isinstance(value, int) and -limit <= value < limit


def _misfit(kind: str, value: object) -> ValueError:
    if kind not in TYPES:
        return ValueError(f"property type {kind!r} is not one of {' '.join(TYPES)}")
    return ValueError(f"{value!r} is not a value of property type {kind} ({TYPES[kind]})")


def _float(typed: Typed, value: float) -> float:
    try:
        number = float(value)
        if typed.type == "F":
            struct.pack(">f", number)  # the native form lets overflow pass
        return math.nan if math.isnan(number) else number  # one NaN, so that equal names are equal
    except OverflowError:
        raise _misfit(typed.type, value) from None


def read_property(text: str) -> tuple[str, Typed]:
    """Return name and value of a property that people write, NAME=VALUE or NAME:TYPE=VALUE; ValueError for others."""
    head, equals, value = text.partition("=")
    name, _, kind = head.partition(":")
    if not equals or not name:
        allowed = "NAME=VALUE or NAME:TYPE=VALUE is allowed"
        raise ValueError(f"{text}: {allowed}, with a TYPE of {' '.join(TYPES)}")
    try:
        return name, Typed.read(kind or "S", value)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def check_text(what: str, value: str) -> None:
    """Raise a ValueError, which calls a text `what`, if UTF-8 cannot encode the text."""
    if not value.isascii() and LONE_SURROGATE.search(value):
        raise ValueError(f"{what} has a lone surrogate, which UTF-8 cannot encode: {value!r}")
