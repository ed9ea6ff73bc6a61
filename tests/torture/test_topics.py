"""A short storm in topics."""

from __future__ import annotations

from pathlib import Path

from torture import topics
from torture.table import Options


def test_each_subscription_gets_each_message_once_in_a_storm(tmp_path: Path) -> None:
    (row,) = topics.run(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills
