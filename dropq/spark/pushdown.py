"""Spark's pushed filters, evaluated on what names tell: only what Spark would certainly not keep is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import eq, ge, gt, le, lt
from typing import Any

from pyspark.sql import datasource as spark

from dropq.spark.columns import as_datetime

#: Columns that a name tells in full.
_KNOWN = frozenset(
    {"id", "priority", "class", "timestamp", "expiration", "correlation_id", "reply_to", "type", "state"}
    | {"delivery_count"}
)
_TIMES = frozenset({"timestamp", "expiration"})
_COMPARED: dict[type[spark.Filter], Callable[[Any, Any], bool]] = {
    spark.EqualTo: eq,
    spark.GreaterThan: gt,
    spark.GreaterThanOrEqual: ge,
    spark.LessThan: lt,
    spark.LessThanOrEqual: le,
    spark.In: lambda value, wanted: value in wanted,
    spark.StringStartsWith: str.startswith,
    spark.StringEndsWith: str.endswith,
    spark.StringContains: lambda value, part: part in value,
}


def keeps(filters: Iterable[spark.Filter]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test of a row, by column: False where one of the filters, joined by AND, is surely not true."""
    tests = list(filters)

    def keep(row: Mapping[str, Any]) -> bool:
        return all(_holds(test, row) for test in tests)

    return keep


def _holds(test: spark.Filter, row: Mapping[str, Any]) -> bool:
    """Tell whether a filter may hold; SQL's three values, of which unknown does not keep a row."""
    negated = isinstance(test, spark.Not)
    inner = test.child if isinstance(test, spark.Not) else test
    column = getattr(inner, "attribute", ("",))[0]
    if column not in _KNOWN:
        return True
    value = as_datetime(row[column]) if column in _TIMES else row[column]
    if isinstance(inner, spark.IsNull | spark.IsNotNull):
        return ((value is None) == isinstance(inner, spark.IsNull)) != negated
    if isinstance(inner, spark.EqualNullSafe):
        return bool(value == inner.value) != negated
    compare = _COMPARED.get(type(inner))
    if compare is None:
        return True
    if value is None:
        return False
    try:
        return bool(compare(value, getattr(inner, "value", None))) != negated
    except TypeError:
        return True  # types that only Spark can compare
