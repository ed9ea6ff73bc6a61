"""Many messages under each policy, as `make torture` has them by the hundred thousand; and what is held to be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torture import policies
from torture.policies import Given
from torture.table import Row


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_of_many_messages_under_a_policy_each_is_handed_out_once(tmp_path: Path, policy: str) -> None:
    row = policies.drain(tmp_path, policy, policies.SHORT)
    assert row.good, row
    assert len(os.listdir(tmp_path / "root" / "q" / "processed")) == policies.SHORT


def given(*numbers: int, urgency: int = 0) -> list[Given]:
    """What a consumer is given, a nanosecond after it settled what it had before."""
    return [Given(number, urgency, 2 * at, 2 * at + 1) for at, number in enumerate(numbers)]


def test_a_message_that_was_given_twice_or_never_or_is_gone_or_lies_twice_is_told(tmp_path: Path) -> None:
    for state in ("target", "processed", "error", "expired"):
        (tmp_path / state).mkdir()
    for name, number in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / "processed" / name).write_text(f'{{"number": {number}}}')
    (tmp_path / "target" / "d").touch()
    row = Row("")
    policies._account(row, tmp_path, [given(0, 1), given(1)], 3, every=0)
    assert row.wrong == ["1 was given 2 times, not 1", "2 was given 0 times, not 1", "target/ is not empty"]
    assert (row.lost, row.doubled) == (1, 1)


def test_a_barrier_is_to_go_to_each_consumer(tmp_path: Path) -> None:
    for state in ("target", "processed", "error", "expired"):
        (tmp_path / state).mkdir()
    for number in range(2):
        (tmp_path / "processed" / str(number)).write_text(f'{{"number": {number}}}')
    row = Row("")
    policies._account(row, tmp_path, [given(0, 1), given(1), given()], 2, every=2)
    assert row.wrong == ["1 was given 2 times, not 3"]


def test_what_passes_a_barrier_is_told() -> None:
    assert policies._across_barriers([given(0, 1, 2, 3)], 2) == []
    assert policies._across_barriers([given(1, 0)], 2) == ["lane 1 began before lane 0 was settled"]
    assert policies._across_barriers([given(0, 2, 1)], 2) == ["lane 2 began before lane 1 was settled"]


def test_what_comes_after_something_less_urgent_is_told() -> None:
    assert policies._out_of_order([given(0, urgency=2) + given(1, urgency=1), given(2, urgency=3)], 1) == []
    assert len(policies._out_of_order([given(0, urgency=1) + given(1, urgency=2)], 1)) == 1
