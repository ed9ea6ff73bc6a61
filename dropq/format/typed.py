"""A property's value with its JMS type, as names carry it."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass

#: The largest integer of type I; every counter in a name has that type.
LARGEST = (1 << 31) - 1

_INT_BITS = {"Y": 7, "H": 15, "I": 31, "L": 63}
_TYPES = "BYHILFDS"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_FLOAT = re.compile(r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")


@dataclass(frozen=True, slots=True)
class Typed:
    """A property's value with the JMS type it has in a name: one of B Y H I L F D S.

    Raises:
        ValueError: the value is not of the type, or outside its range.
    """

    type: str
    value: bool | int | float | str

    def __post_init__(self) -> None:
        kind, value = self.type, self.value
        if kind == "S" and isinstance(value, str):
            check_text("a property value", value)
        elif kind == "B":
            _require(isinstance(value, bool), self)
        elif kind in _INT_BITS and isinstance(value, int) and not isinstance(value, bool):
            limit = 1 << _INT_BITS[kind]
            _require(-limit <= value < limit, self)
        elif kind in ("F", "D") and isinstance(value, (int, float)) and not isinstance(value, bool):
            object.__setattr__(self, "value", _float(self, value))
        else:
            _require(False, self)

    @classmethod
    def of(cls, value: object) -> Typed:
        """Give a Python value its type: bool B, int I or L, float D, str S; a Typed is itself."""
        if isinstance(value, Typed):
            return value
        if isinstance(value, bool):
            return cls("B", value)
        if isinstance(value, int):
            return cls("I" if -LARGEST - 1 <= value <= LARGEST else "L", value)
        if isinstance(value, float):
            return cls("D", value)
        if isinstance(value, str):
            return cls("S", value)
        raise ValueError(f"a property is a bool, int, float or str, not {type(value).__name__}")

    @classmethod
    def read(cls, kind: str, text: str) -> Typed:
        """Read a value as it stands in a name, after decoding."""
        if kind == "S":
            return cls(kind, text)
        if kind == "B" and text.lower() in ("true", "false"):
            return cls(kind, text.lower() == "true")
        if kind in _INT_BITS and _INTEGER.fullmatch(text):
            return cls(kind, int(text))
        if kind in ("F", "D") and _FLOAT.fullmatch(text):
            return cls(kind, float(text))
        if kind not in _TYPES or len(kind) != 1:
            raise ValueError(f"property type {kind!r} is none of {' '.join(_TYPES)}")
        raise ValueError(f"{text!r} is not a value of property type {kind}")

    @property
    def text(self) -> str:
        """The value as it stands in a name, before encoding."""
        value = self.value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        if isinstance(value, int):
            return str(int(value))  # an IntEnum writes its number
        return value if isinstance(value, str) else repr(value)


def _require(good: bool, typed: Typed) -> None:
    if typed.type not in _TYPES or len(typed.type) != 1:
        raise ValueError(f"property type {typed.type!r} is none of {' '.join(_TYPES)}")
    if not good:
        raise ValueError(f"{typed.value!r} is not a value of property type {typed.type}")


def _float(typed: Typed, value: float) -> float:
    try:
        number = float(value)
        if typed.type == "F":
            struct.pack(">f", number)  # the native form lets overflow pass
        return math.nan if math.isnan(number) else number  # one NaN, so that equal names are equal
    except OverflowError:
        raise ValueError(f"{value!r} is not a value of property type {typed.type}") from None


def check_text(what: str, value: str) -> None:
    """Refuse text that UTF-8 cannot carry, with a ValueError that calls it `what`."""
    if not value.isascii() and _LONE_SURROGATE.search(value):
        raise ValueError(f"{what} holds a lone surrogate, which UTF-8 cannot carry: {value!r}")
