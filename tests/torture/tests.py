"""The tests marked `long`, which .ci/run leaves out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable

from torture.table import PROJECT, NotRun, Options, Row


def run(options: Options) -> Iterable[Row]:
    """Run the tests marked `long`; a case is a test that passed."""
    if not options.long:
        raise NotRun("they take minutes, and each of them is part of `make crashes` or `make test-spark`")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "long"]
    environment = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(options.folder)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.rstrip().splitlines() or [""]
    passed = re.search(r"(\d+) passed", lines[-1])
    row = Row("tests that .ci/run leaves out", cases=int(passed[1]) if passed else 0)
    if done.returncode:
        row.wrong += [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-20:]
        print(done.stdout, file=sys.stderr)
    yield row
    if skipped := [line for line in lines if line.startswith("SKIPPED")]:
        yield Row("tests that .ci/run leaves out, and that were skipped", not_run="; ".join(skipped))
