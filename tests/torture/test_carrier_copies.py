"""Moves to another root, as `make torture` lets them die at each call; here at some."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import other_file_system

from torture import carrier
from torture.table import Options


def test_a_dying_mover_a_clone_and_a_backup_lose_and_double_nothing(tmp_path: Path) -> None:
    if other_file_system(tmp_path) is None:
        pytest.skip("there is no other file system here")
    rows = list(carrier.run(Options(tmp_path, long=False)))
    assert [row.test for row in rows if not row.good] == [], rows
    assert all(row.kills for row in rows)
