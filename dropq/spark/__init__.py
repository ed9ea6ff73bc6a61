"""The Spark front of dropq: importing this package neither imports pyspark nor starts a Java."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dropq.spark.session import Java, find_java, require_pyspark, session

__all__ = ["Java", "claim", "find_java", "infer", "register", "session"]

#: Names that are imported on first use, as their modules import pyspark.
_LAZY = {"register": "dropq.spark.datasource", "claim": "dropq.spark.claim_batch", "infer": "dropq.spark.inference"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_pyspark()
    return getattr(import_module(_LAZY[name]), name)
