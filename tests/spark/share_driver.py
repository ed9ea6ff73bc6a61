"""A driver for a cluster on a share, for torture.nfs_spark to judge and to kill: python share_driver.py MASTER ROOT.

ROOT is where each worker and the driver have mounted the share, each for itself. It writes to each of ROOT's queues by
the scenario of the queue's name, and notes what happened, as cluster_driver.py does; the last scenario does not end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster import HOSTS, PATIENCE, status
from cluster_driver import (
    MANY_ROWS,
    PARTITIONS,
    HeldMidway,
    Note,
    NotedStopsStaged,
    Scenario,
    by,
    kill_executor,
    killing,
    main,
    note,
    notes,
    numbers,
    plain,
    release,
    save,
)
from helpers import until
from pyspark.sql import DataFrame, SparkSession
from spark_driver import register
from torture import guest

import dropq.spark
from dropq import Root

#: The client of NFS that each worker has for itself.
CLIENTS = dict(zip(HOSTS, ("a", "b"), strict=True))
#: The columns of what is sent as partitions.
COLUMNS = "number bigint, half double"


def read(spark: SparkSession, root: Path, queue: str, schema: str, **options: str) -> DataFrame:
    """Return the rows of a queue as its table has them."""
    reader = spark.read.format("dropq").schema(schema).options(root=str(root), queue=queue, **options)
    return reader.load()


def read_back(spark: SparkSession, root: Path, queue: str) -> None:
    """Send again what the plain job sent, as the executors read it."""
    save(read(spark, root, "plain", "value string").repartition(PARTITIONS), root, queue, "dropq")


def take(spark: SparkSession, root: Path, queue: str) -> None:
    """Claim what was read back, and send it on."""
    with dropq.spark.claim(spark, Root(root).queue("read_back"), 2 * MANY_ROWS) as taken:
        save(taken.selectExpr("cast(value as string) value"), root, queue, "dropq", jobId="{claim}")


def partitions(spark: SparkSession, root: Path, queue: str) -> None:
    """Send partitions as messages, and read their rows."""
    rows = spark.range(0, MANY_ROWS, 1, PARTITIONS).selectExpr("id number", "id / 2 half")
    save(rows, root, queue, "dropq", messagePer="partition", bodyFormat="parquet")
    found = read(spark, root, queue, COLUMNS, bodyFormat="parquet").selectExpr("count(*)", "sum(number)", "sum(half)")
    note(root, queue, "read", sums=list(found.first() or ()))


def while_held(what: Callable[[Note], Any], spark: SparkSession, root: Path, queue: str) -> None:
    """Let something happen while a task is held midway; the job may fail of it."""

    def happen() -> None:
        until(lambda: notes(root, queue, "held"), "the held task", timeout=PATIENCE)
        what(notes(root, queue, "held")[0])

    register(spark, HeldMidway, HeldMidway.__name__)
    with ThreadPoolExecutor() as threads:
        happening = threads.submit(happen)
        try:
            save(numbers(spark), root, queue, HeldMidway.__name__, jobId="nightly")
        except Exception as error:
            note(root, queue, "refused", error=str(error))
        happening.result()


def lost_mount(spark: SparkSession, root: Path, queue: str) -> None:
    """Take the share from one worker: an empty folder is in its place. Give it back, and repeat a job that failed."""

    def take_away(held: Note) -> None:
        _in_mounts_of(held, "umount", "--lazy", str(root))
        release(root, queue)

    while_held(take_away, spark, root, queue)
    (held,) = notes(root, queue, "held")
    note(root, queue, "in its place", files=_in_mounts_of(held, "ls", "-A", str(root)).split())
    _in_mounts_of(held, "mount", "--bind", str(guest.MOUNTS / CLIENTS[held["host"]] / root.name), str(root))
    if notes(root, queue, "refused"):
        save(numbers(spark), root, queue, "dropq", jobId="nightly")


def _in_mounts_of(task: Note, *words: str) -> str:
    """Run a command where a task has its mounts; return what it said."""
    there = ["nsenter", "--mount", "--target", str(task["executor"])]
    return subprocess.run([*there, *words], check=True, capture_output=True, text=True).stdout


def stopped_server(spark: SparkSession, root: Path, queue: str) -> None:
    """Stop the server until the held task waits for it."""

    def stop(held: Note) -> None:
        subprocess.run(["rpc.nfsd", "0"], check=True)
        note(root, queue, "released")
        until(lambda: status(held["pid"]).state == "D", "the task to wait for the server", timeout=PATIENCE)
        guest.start_server()

    while_held(stop, spark, root, queue)


SCENARIOS: dict[str, Scenario] = {
    "plain": plain,
    "read_back": read_back,
    "taken": take,
    "partitions": partitions,
    "stopped_server": stopped_server,
    "killed_executor": killing(kill_executor),
    "lost_mount": lost_mount,
    "killed_driver": by(NotedStopsStaged),
}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), SCENARIOS)
