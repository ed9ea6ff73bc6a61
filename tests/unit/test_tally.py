"""How often senders count what a limited queue holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dropq.lifecycle.timing import Timing
from dropq.policies.send_limits import Tally
from dropq.storage import reading

#: No count grows old by itself.
LASTING = Timing(listing_share=10**9, count_age=3600)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each count comes to."""
    counts: list[int] = []
    real = Tally._counted

    def count(self: Tally) -> int:
        counts.append(real(self))
        return counts[-1]

    monkeypatch.setattr(Tally, "_counted", count)
    return counts


def test_who_is_refused_again_and_again_costs_one_count(tmp_path: Path, counted: list[int]) -> None:
    for number in range(3):
        (tmp_path / str(number)).touch()
    tally = Tally([str(tmp_path)], (), 3, LASTING)
    assert [tally.enter(1) for _ in range(5)] == [0] * 5
    assert counted == [3]


def test_a_count_ends_where_it_reaches_the_limit(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 2)
    for number in range(6):
        (tmp_path / str(number)).touch()
    assert Tally([str(tmp_path)], (), 4, LASTING).enter(1) == 0
    assert counted == [4]


def test_before_anything_is_refused_by_what_was_let_in_since_there_is_a_new_count(
    tmp_path: Path, counted: list[int]
) -> None:
    for number in range(2):
        (tmp_path / str(number)).touch()
    tally = Tally([str(tmp_path)], (), 3, LASTING)
    assert tally.enter(1) == 1
    assert counted == [2]
    (tmp_path / "sent").touch()
    os.unlink(tmp_path / "0")
    assert tally.enter(1) == 1  # by what it has added up it would be full
    assert counted == [2, 2]
