"""A short storm of three roots that share a queue."""

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


def test_three_roots_in_a_storm_lose_and_double_nothing(tmp_path: Path) -> None:
    rows = list(roots.run(Options(tmp_path, long=False)))
    assert [row for row in rows if not row.good] == []
    assert all(row.cases and row.kills for row in rows)
