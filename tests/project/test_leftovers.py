"""A run of the tests that leaves a process behind fails, and ends the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import first_and_long, until

TESTS = Path(__file__).parents[1]
CONFTEST = """
import leftovers

leftovers.PATIENCE = {patience}

def pytest_configure(config):
    leftovers.watch(config)
"""
#: How a test may leave a process behind; the last one is seen only as long as its parent is there.
LEAVE = """
import os, subprocess, time
import forks

def test_it():
    subprocess.Popen(["sleep", "101"])
    subprocess.Popen(["sleep", "102"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 103 >/dev/null 2>&1 &"], check=True)
    forks.fork(lambda: time.sleep(100))
    forks.forked(lambda: forks.fork(lambda: time.sleep(100)))
    subprocess.Popen(["sleep", "10"], env={"PATH": os.environ["PATH"]})
"""
#: How many processes share the tests, and what is left of those above.
WAYS = {"alone": ((), 6, "10 101 102 103"), "by two workers": (("-n", "2"), 5, "101 102 103")}


def run(folder: Path, test: str, *arguments: str, patience: float) -> subprocess.CompletedProcess[str]:
    """Run pytest on a test; what it prints goes to a file, as processes that are left would hold a pipe open."""
    (folder / "conftest.py").write_text(CONFTEST.format(patience=patience))
    (folder / "test_it.py").write_text(test)
    own = ["-p", "no:cacheprovider", f"--rootdir={folder}", f"--basetemp={folder / 'base'}"]
    with open(folder / "out", "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *own, *arguments, "test_it.py"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(TESTS)}, stdout=out, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    return subprocess.CompletedProcess(done.args, done.returncode, (folder / "out").read_text())


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def killed(output: str) -> list[int]:
    """Return the processes that a run says it has killed."""
    return [int(line.split()[2]) for line in output.splitlines() if line.startswith("ERROR: process ")]


@pytest.mark.parametrize(("arguments", "count", "sleeps"), first_and_long(WAYS.values()), ids=list(WAYS))
def test_a_run_that_processes_outlive_fails_and_kills_them(
    tmp_path: Path, arguments: Sequence[str], count: int, sleeps: str
) -> None:
    done = run(tmp_path, LEAVE, *arguments, patience=0.2)
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout
    left = killed(done.stdout)
    assert len(left) == count, done.stdout
    assert sorted(re.findall(r": sleep (\d+)$", done.stdout, re.MULTILINE)) == sleeps.split()
    until(lambda: not any(map(runs, left)), "the end of the processes")


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=list(WAYS))
def test_a_run_waits_for_processes_that_are_about_to_end(tmp_path: Path, arguments: Sequence[str]) -> None:
    test = "import subprocess\n\ndef test_it():\n    subprocess.Popen(['sleep', '1'])\n"
    done = run(tmp_path, test, *arguments, patience=60)
    assert done.returncode == 0 and killed(done.stdout) == [], done.stdout


def test_a_run_that_a_test_starts_ends_nothing_of_the_run_that_the_test_is_of(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "conftest.py").write_text(CONFTEST.format(patience=0.2))
    (inner / "test_inner.py").write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={inner}", str(inner)]
    test = f"    subprocess.Popen(['sleep', '100'])\n    subprocess.run({command!r}, check=True)\n"
    done = run(tmp_path, f"import subprocess\n\ndef test_it():\n{test}", patience=0.2)
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout
    assert len(killed(done.stdout)) == 1, done.stdout


def test_a_run_that_failed_anyway_keeps_its_status(tmp_path: Path) -> None:
    done = run(
        tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '100'])\nraise KeyboardInterrupt\n", patience=0.2
    )
    assert done.returncode == 2 and len(killed(done.stdout)) == 1, done.stdout
