"""Spark on the share: a cluster in a guest whose two workers and whose driver have a mount each, with its own cache.

share_driver.py runs the jobs. An executor and the driver are killed, a worker loses its mount, and the server stops.
What became of the messages is told by the server's own disk.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers import where

from dropq import Queue, Root
from torture.guest import MOUNTS, mount
from torture.table import NotRun, Row
from torture.uml import Guest, make_disk

#: The memory of the guest, in which six Javas run, and the seconds that all jobs may take.
MEMORY, PATIENCE = "4G", 1800.0
#: Where a worker or the driver finds the share as its own client has it; what is beside it is on no share.
SHARE = Path("/run/share/root")


def jobs(folder: Path, version: str) -> Row:
    """Run the jobs in a guest of their own."""
    if find_spec("pyspark") is None:
        raise NotRun("no PySpark: pip install 'dropq[spark,jre]'")
    from cluster import why_not

    if reason := why_not():
        raise NotRun(reason)
    disk = make_disk(folder / "disk-of-spark")
    task = "torture.nfs_spark:inside"
    with Guest(folder / "guest-of-spark", [disk], task, nfs=True, memory=MEMORY, version=version) as guest:
        return Row(**guest.result(PATIENCE))


def inside(disk: Path, version: str) -> dict[str, Any]:
    """Run the jobs and judge them; return a row."""
    import share_driver
    from cluster import running

    for client in (*share_driver.CLIENTS.values(), "driver"):
        mount(version, client)
    root = Root.create(MOUNTS / "driver" / SHARE.name)
    for name in share_driver.SCENARIOS:
        root.create_queue(name, durability="none")
    SHARE.mkdir(parents=True)
    (cluster_folder := SHARE.parent / "cluster").mkdir()
    workers = {host: _words_with(client) for host, client in share_driver.CLIENTS.items()}
    with running(cluster_folder, by=workers) as cluster:
        subprocess.run(_bind("driver"), shell=True, check=True)
        with cluster.driver(Path(share_driver.__file__), str(SHARE)) as driver:
            at_last = SHARE / f"at-{list(share_driver.SCENARIOS)[-1]}"
            driver.wait_until(at_last.exists, "the driver at its last commit", timeout=PATIENCE)
        cluster.wait_until_idle()
    row = Row(f"Spark, each worker with a mount of its own: {version}", kills=2, faults=2)
    for name in share_driver.SCENARIOS:
        _judge(row, Root(disk / SHARE.name).queue(name))
    return asdict(row)


def _bind(client: str) -> str:
    """Return the command that puts what a client has at its place."""
    return f"mount --bind {MOUNTS / client / SHARE.name} {SHARE}"


def _words_with(client: str) -> list[str]:
    """Return the words that run a command with the mount of a client."""
    return ["unshare", "--mount", "sh", "-c", f'{_bind(client)} && exec "$@"', "sh"]


def _judge(row: Row, queue: Queue) -> None:
    """Count what a job lost or doubled, and tell what else is wrong."""
    from cluster import HOSTS
    from cluster_driver import MANY_ROWS, PARTITIONS, ROWS, notes

    state, rows = {
        "plain": ("target", MANY_ROWS),
        "read_back": ("processed", MANY_ROWS),
        "taken": ("target", MANY_ROWS),
        "partitions": ("target", PARTITIONS),
        "killed_driver": ("working", 0),
    }.get(queue.name, ("target", ROWS))
    noted = notes(SHARE, queue.name)
    for note in noted:
        if note["event"] == "broken" or note.get("files"):
            row.wrong.append(f"{queue.name}: {note}")
    queue.sweep(jobs_older_than=0)
    lying = where(queue)
    bodies = lying.pop(state, [])
    row.cases += rows
    row.wrong += [f"{queue.name}: {len(bodies)} in {state}" for state, bodies in lying.items()]
    row.wrong += [f"{queue.name}: {finding}" for finding in queue.fsck()]
    if queue.name == "partitions":
        (sums,) = (note["sums"] for note in noted if note["event"] == "read")
        wanted = [MANY_ROWS, MANY_ROWS * (MANY_ROWS - 1) // 2, MANY_ROWS * (MANY_ROWS - 1) / 4]
        row.wrong += [] if sums == wanted and len(bodies) == PARTITIONS else [f"partitions: read {sums}, not {wanted}"]
        return
    found = Counter(int(body.split()[0]) for body in bodies)
    row.lost += len(set(range(rows)) - found.keys())
    row.doubled += sum(count > 1 for count in found.values())
    hosts = {words[1].decode() for body in bodies if len(words := body.split()) > 1}
    if queue.name == "plain" and hosts != set(HOSTS):
        row.wrong.append(f"plain: sent from {hosts}")
