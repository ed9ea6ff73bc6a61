"""Clocks that are wrong, and clocks that are set, by libfaketime."""

from __future__ import annotations

from pathlib import Path

import pytest
from torture import clocks
from torture.table import NotRun, Options


def test_clocks_that_are_wrong_or_set_end_no_lease_early_or_late_and_reorder_nothing(tmp_path: Path) -> None:
    try:
        rows = list(clocks.run(Options(tmp_path, seed=1, long=False)))
    except NotRun as reason:
        pytest.skip(str(reason))
    assert [line for row in rows for line in row.wrong] == []
    assert all(row.good and row.cases for row in rows)


def test_a_machine_without_libfaketime_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clocks, "LIBRARIES", ())
    monkeypatch.setattr(clocks, "_known_to_the_linker", list)
    with pytest.raises(NotRun, match="apt install faketime"):
        clocks.run(Options(tmp_path, long=False))
