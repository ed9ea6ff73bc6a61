"""JSON in the body of a message, as RFC 8259 defines it: UTF-8, and no NaN or Infinity.

Only the verbs that need this module import it, so that `dropq send` starts fast.
"""

from __future__ import annotations

import json
import reprlib


def to_json(value: object) -> str:
    """Return a value as compact JSON; ValueError names the part that JSON cannot hold, and where it is."""
    try:
        return _dump(value)
    except RecursionError as error:
        raise ValueError("the value cannot be JSON: it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        where, part = _bad_part(value)
        raise ValueError(f"{where} cannot be JSON: {reprlib.repr(part)} ({error})") from error


def from_json(body: bytes) -> object:
    """Return the JSON value of a body; ValueError says where it is none."""
    try:
        return json.loads(body.decode(), parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _dump(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode()  # raises for half of a surrogate pair, which UTF-8 cannot encode
    return text


def _can_be_json(value: object) -> bool:
    try:
        _dump(value)
    except (TypeError, ValueError):
        return False
    return True


def _bad_part(value: object) -> tuple[str, object]:
    """Return where a value has a part that JSON cannot hold, and the part: the innermost."""
    where, seen = "the value", set[int]()
    while isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        inner = next(((key, part) for key, part in parts if not _can_be_json(part)), None)
        if inner is None:
            break  # one of its keys is bad, or it is nested too deeply
        where, value = f"{where}[{inner[0]!r:.50}]", inner[1]
    return where, value


def refuse_constant(constant: str) -> object:
    """Raise ValueError for NaN and Infinity, which Python's parser would accept."""
    raise ValueError(f"{constant} is not JSON")
