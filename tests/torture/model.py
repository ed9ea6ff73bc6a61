"""Spin goes through every state of the protocol's model, as `make model` does it by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from torture.table import NotRun, Options, Row

MODELS = Path(__file__).parents[2] / "model"
#: What check.sh exits with where it lacks a tool.
MISSING = 69


def run(options: Options) -> Iterable[Row]:
    """Check the models, and that those broken on purpose fail; a case is a search."""
    done = subprocess.run([str(MODELS / "check.sh")], capture_output=True, text=True, check=False)
    if done.returncode == MISSING:
        raise NotRun(done.stderr.strip())
    row = Row("every state of the model", cases=len(done.stdout.splitlines()))
    if done.returncode:
        row.wrong += [*done.stdout.splitlines(), done.stderr]
    return [row]
