"""On HDFS: a NameNode and a DataNode of Hadoop 2.7, mounted as its FUSE client does it, see hdfs_mount.py.

No registry has Hadoop's servers by name. The pyspark package of Spark 2.4 contains them among its jars, and
`make test-hdfs` fetches it.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers import until

from dropq.spark.session import find_java
from torture import fuse, hdfs_points, mounts
from torture.mounts import Kind, Mounted
from torture.table import NotRun, Options, Row

MOUNT = Path(__file__).with_name("hdfs_mount.py")
#: Where `make test-hdfs` puts Hadoop's jars; another folder may be named.
JARS = Path(os.environ.get("HADOOP_JARS") or Path(__file__).parents[2] / ".venv" / "hadoop")
#: The newest Java that Hadoop 2.7 runs on: later ones lack what it asks who its user is.
NEWEST_JAVA = 21
_folders = itertools.count(1)


class Cluster:
    """A NameNode and a DataNode that end with the block.

    Args:
        folder: where they keep their files.
    """

    def __init__(self, folder: Path) -> None:
        from torture.hdfs_mount import Java

        for name in ("hdfs", "datanode"):  # pages that they would show
            page = folder / "classes" / "webapps" / name / "WEB-INF"
            page.mkdir(parents=True)
            (page / "web.xml").write_text("<web-app/>")
        (folder / "classes" / "log4j.properties").write_text("log4j.rootLogger=OFF\n")
        self.java = Java(JARS, memory="512m", also=folder / "classes")
        try:
            self._start(folder)
        except BaseException:
            self.stop()
            raise

    def _start(self, folder: Path) -> None:
        jvm = self.java.jvm
        jvm.org.apache.hadoop.metrics2.lib.DefaultMetricsSystem.setMiniClusterMode(True)
        settings = {
            "fs.defaultFS": "hdfs://127.0.0.1:0",
            "hadoop.tmp.dir": str(folder / "kept"),
            "dfs.replication": 1,
            "dfs.webhdfs.enabled": "false",
            "dfs.namenode.http-address": "127.0.0.1:0",
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.heartbeat.interval": 1,
        }
        server = jvm.org.apache.hadoop.hdfs.server
        server.namenode.NameNode.format(self.java.configured(**settings))
        self._name = server.namenode.NameNode.createNameNode(self.java.words(), self.java.configured(**settings))
        self.at = f"hdfs://127.0.0.1:{self._name.getNameNodeAddress().getPort()}"
        settings["fs.defaultFS"] = self.at
        self._data = server.datanode.DataNode.createDataNode(self.java.words(), self.java.configured(**settings))
        until(lambda: self._name.getNamesystem().getNumLiveDataNodes() == 1, "the DataNode", timeout=60)

    def stop(self) -> None:
        self.java.__exit__(None, None, None)

    def kind(self) -> Kind:
        """Return what mounts a folder of its own for each place behind a mount."""
        paths: dict[Path, str] = {}

        def mounting(folders: list[Path], mount: Path, seconds: int) -> list[str]:
            folder = paths.setdefault(folders[0], f"/{next(_folders)}")
            return [sys.executable, str(MOUNT), str(JARS), self.at, folder, str(mount), "--remember", str(seconds)]

        @contextmanager
        def behind(folders: list[Path]) -> Iterator[None]:
            """Show what HDFS has with another client, whose kernel remembers nothing."""
            command = mounting(folders, folders[0], 0)
            looking = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            try:
                until(
                    lambda: os.path.ismount(folders[0]) or looking.poll() is not None,
                    "a look behind the mount",
                    timeout=60,
                )
                yield
            finally:
                mounts.unmounted(folders[0])
                looking.kill()
                looking.wait(10)

        return Kind("HDFS", sys.executable, lambda folders, mount: mounting(folders, mount, 60), behind=behind)


def needs() -> None:
    """Raise NotRun where HDFS cannot be had, with what to do."""
    mounts.needs(mounts.HDFS_LIKE)
    if (java := find_java()).version > NEWEST_JAVA:
        raise NotRun(
            f"Hadoop 2.7 runs on no Java after {NEWEST_JAVA}, and {java.source} has {java.version}: set JAVA_HOME"
        )
    if not any(JARS.glob("hadoop-hdfs-2*.jar")):
        raise NotRun(f"no Hadoop in {JARS}: make test-hdfs fetches it (some 210 MB)")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster for as long as the block lasts."""
    needs()
    folder.mkdir(parents=True, exist_ok=True)
    running = Cluster(folder)
    try:
        yield running
    finally:
        running.stop()


def same_points(fs: Mounted, row: Row, options: Options) -> None:
    """What the passthrough is held to, too."""
    with mounts.second(fs) as other:
        row.cases += len(hdfs_points.POINTS)
        row.wrong += hdfs_points.differences(fs.path, other.path)


#: What is tried. The kernel remembers names for a minute meanwhile, by fuse-dfs's own options.
TESTS: tuple[tuple[str, Callable[[Mounted, Row, Options], None]], ...] = (
    ("point by point", same_points),
    ("every verb", fuse.every_verb),
    (f"{fuse.CONSUMERS} consumers, one killed", fuse.race),
    ("holders killed", fuse.killed_holders),
    ("its process killed", fuse.killed_daemon),
    ("two clients", fuse.two_mounts),
)


def run(options: Options) -> Iterable[Row]:
    logging.getLogger("py4j").addHandler(logging.NullHandler())
    with cluster(options.folder / "cluster") as running:
        for name, test in TESTS:
            yield fuse.tested(name, options, test, running.kind())
