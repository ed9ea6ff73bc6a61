"""A short storm in a graph of queues."""

from __future__ import annotations

from pathlib import Path

from torture import graph
from torture.table import Options


def test_each_message_is_settled_once_and_each_credit_comes_back_in_a_storm(tmp_path: Path) -> None:
    (row,) = graph.run(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills
