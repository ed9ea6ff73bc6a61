"""JSON in the body of a message, as RFC 8259 defines it: UTF-8, and no NaN or Infinity.

It is imported by the verbs that need it: a shell's `send` does not wait for it.
"""

from __future__ import annotations

import json
import reprlib


def to_json(value: object) -> str:
    """Return a value as compact JSON.

    Raises:
        ValueError: the value, or a part of it, has no JSON; the error names the part and where it is.
    """
    try:
        return _dumped(value)
    except RecursionError as error:
        raise ValueError("the value cannot be JSON: it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        where, part = _culprit(value)
        raise ValueError(f"{where} cannot be JSON: {reprlib.repr(part)} ({error})") from error


def from_json(body: bytes) -> object:
    """Return the value of a body.

    Raises:
        ValueError: the body is not JSON; the error says where.
    """
    try:
        return json.loads(body.decode(), parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _dumped(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode()  # half of a surrogate pair has no UTF-8
    return text


def _fits(value: object) -> bool:
    try:
        _dumped(value)
    except (TypeError, ValueError):
        return False
    return True


def _culprit(value: object) -> tuple[str, object]:
    """Return the innermost part of a value that has no JSON, with where it is."""
    where, seen = "the value", set[int]()
    while isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        inner = next(((key, part) for key, part in parts if not _fits(part)), None)
        if inner is None:
            break  # a key of it, or its depth
        where, value = f"{where}[{inner[0]!r:.50}]", inner[1]
    return where, value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
