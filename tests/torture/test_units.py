"""A worker's unit is stopped while it works; `make torture` does so more often."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from torture import units
from torture.table import Options


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="which processes are a unit's is read from /proc")
def test_no_stop_of_a_unit_at_work_fails_loses_or_counts_a_message(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    (row,) = units.run(Options(tmp_path, seed, long=False))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert (row.lost, row.doubled, row.kills) == (0, 0, units.SHORT)
