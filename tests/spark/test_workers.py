"""What dropq does to the worker processes that it shares with its users' code; none of these tests runs Spark."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from helpers import make_queue
from pyspark.sql.types import StructType

from dropq import ConfigError
from dropq.spark.options import ReadOptions, WriteOptions
from dropq.spark.reader import Part, Rows
from dropq.spark.workers import freeze_imports
from dropq.spark.writer import QueueStreamWriter, QueueWriter, StagedFiles


@pytest.fixture(autouse=True)
def fresh_worker() -> Iterator[None]:
    """Let this process be one in which no task has run, and leave it as it was."""
    freeze_imports.cache_clear()
    gc.unfreeze()
    yield
    freeze_imports.cache_clear()
    gc.unfreeze()


class Node:
    """An object in a cycle, as users' code makes them."""

    def __init__(self) -> None:
        self.itself = self


def test_a_worker_that_only_plans_does_not_import_pandas() -> None:
    program = "import sys; import dropq.spark.datasource; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def read(root: Path) -> None:
    schema = StructType().add("id", "string")
    list(Rows(ReadOptions.parse({"root": str(root), "queue": "q"}), schema).read(Part("target", [])))


def write(root: Path) -> None:
    QueueWriter(WriteOptions.parse({"root": str(root), "queue": "q"}), "job").write(iter([]))


def write_stream(root: Path) -> None:
    with pytest.raises(ConfigError, match="no query"):
        QueueStreamWriter(WriteOptions.parse({"root": str(root), "queue": "q"})).write(iter([]))


@pytest.mark.parametrize("task", [read, write, write_stream])
def test_after_a_task_the_collector_passes_over_what_was_imported(tmp_path: Path, task: Callable[[Path], None]) -> None:
    make_queue(tmp_path)
    task(tmp_path)
    assert gc.get_freeze_count() > 10_000
    assert gc.isenabled()


def test_garbage_that_users_code_makes_after_a_task_is_collected_cycles_included(tmp_path: Path) -> None:
    make_queue(tmp_path)
    write(tmp_path)
    alive = weakref.ref(Node())
    gc.collect()  # as Spark does after each task
    assert alive() is None


def test_garbage_that_was_there_before_a_task_is_collected_not_kept(tmp_path: Path) -> None:
    make_queue(tmp_path)
    alive = weakref.ref(Node())
    write(tmp_path)
    assert alive() is None


def test_objects_that_live_during_a_later_task_are_not_kept_for_ever(tmp_path: Path) -> None:
    make_queue(tmp_path)
    write(tmp_path)
    node = Node()
    alive = weakref.ref(node)
    write(tmp_path)
    del node
    gc.collect()
    assert alive() is None


def test_an_empty_partition_opens_no_queue(tmp_path: Path) -> None:
    writer = QueueWriter(WriteOptions.parse({"root": str(tmp_path / "no root"), "queue": "q"}), "job")
    empty = pa.RecordBatch.from_pydict({"value": pa.array([], pa.string())})
    assert writer.write(iter([empty, empty])) == StagedFiles()
