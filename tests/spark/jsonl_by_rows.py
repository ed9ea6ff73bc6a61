"""A writer of jsonl that makes each row a Python object first: slow, and plain enough to be believed.

The library writes by columns, and must write the same bytes.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import types


def jsonl(table: pa.Table) -> bytes:
    """Return an object a line: nulls are left out, decimals keep every digit, binary is base64."""
    rows = table.to_pylist()
    return "".join(f"{_object(table.schema, row)}\n" for row in rows).encode()


def _object(fields: Any, row: dict[str, Any]) -> str:
    members = [(field, row[field.name]) for field in fields]
    return f"{{{','.join(f'{text(f.name)}:{_json(f.type, value)}' for f, value in members if value is not None)}}}"


def _json(kind: pa.DataType, value: Any) -> str:
    if value is None:
        return "null"
    if types.is_struct(kind):
        return _object(kind, value)
    if types.is_map(kind):
        return f"{{{','.join(f'{text(str(key))}:{_json(kind.item_type, item)}' for key, item in value)}}}"
    if isinstance(value, list):
        return f"[{','.join(_json(kind.value_type, item) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(_shortest(value) if types.is_float32(kind) else value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        precision = "microseconds" if value.microsecond % 1000 else "milliseconds"
        return f'"{value.replace(tzinfo=None).isoformat(timespec=precision)}{"Z" if value.tzinfo else ""}"'
    if isinstance(value, date):
        return f'"{value.isoformat()}"'
    if isinstance(value, bytes):
        return f'"{base64.b64encode(value).decode()}"'
    return text(value) if isinstance(value, str) else str(value)


def text(value: str) -> str:
    """Return a text in quotes."""
    return json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _shortest(value: float) -> float:
    """Return the double with the fewest digits that rounds to the same 32-bit float."""
    for digits in range(6, 9) if math.isfinite(value) else ():
        short = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short))[0] == value:
            return short
    return value
