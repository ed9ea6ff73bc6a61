"""Short storms of roots that share a queue, and recalls amid what a bridge does."""

from __future__ import annotations

from pathlib import Path

import pytest

from torture import roots
from torture.table import Options


def test_a_peer_whose_mount_hangs_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    row = roots.hung(tmp_path / "hung", rounds=2)
    if row.not_run:
        pytest.skip(row.not_run)
    assert row.wrong == [] and row.cases == 7


@pytest.mark.long
def test_roots_in_a_storm_and_those_that_people_work_on_lose_and_double_nothing(tmp_path: Path) -> None:
    rows = list(roots.run(Options(tmp_path, long=False)))
    assert [row for row in rows if not row.good] == []
    assert all(row.cases for row in rows) and sum(row.kills > 0 for row in rows) == 3
