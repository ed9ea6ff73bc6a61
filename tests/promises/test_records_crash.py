"""No crash, no refused call and no other program makes a bundle lose or double a record: some cases of each.

`make torture` has all of them, in its part `records`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from helpers import first_and_long
from torture.acts import Setting
from torture.record_cases import CASES, OTHERS, SETTINGS, TAKERS, RecordCases
from torture.records import ends_alone
from torture.table import Row

from dropq import LeaseLost
from dropq.format.claims import Location
from dropq.records.record_cursor import RecordCursor
from dropq.records.record_settlement import RecordSettlement
from dropq.staging import fan_out


def few(seed: int, many: int) -> Callable[[list[Any]], list[Any]]:
    """Choose so many at random."""
    chance = random.Random(seed)
    return lambda every: chance.sample(every, min(many, len(every)))


@pytest.mark.parametrize("setting", first_and_long(SETTINGS), ids=lambda setting: setting.name)
def test_a_crash_anywhere_loses_and_doubles_no_record(tmp_path: Path, setting: Setting) -> None:
    seed, row = random.randrange(10**6), Row("crash")
    for case in random.Random(seed).sample(CASES, 3):
        RecordCases(tmp_path, setting, row).crash(case, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.kills and not row.lost and not row.doubled


def test_a_crash_of_the_sweep_after_a_crash_loses_and_doubles_no_record(tmp_path: Path) -> None:
    seed, row = random.randrange(10**6), Row("crash")
    RecordCases(tmp_path, SETTINGS[0], row).crash_twice(random.Random(seed).choice(CASES[:3]), few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.kills and not row.lost and not row.doubled


def test_a_refused_call_loses_and_doubles_no_record(tmp_path: Path) -> None:
    seed, row = random.randrange(10**6), Row("fault")
    for case in random.Random(seed).sample(CASES, 3):
        RecordCases(tmp_path, SETTINGS[0], row).refuse(case, few(seed, 2))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.faults and not row.lost and not row.doubled


@pytest.mark.parametrize("other", [*OTHERS, *TAKERS])
def test_nothing_of_a_holder_counts_that_lost_its_claim_and_all_of_another(tmp_path: Path, other: str) -> None:
    seed, row = random.randrange(10**6), Row("two at once")
    for case in random.Random(seed).sample(CASES, 2):
        RecordCases(tmp_path, SETTINGS[0], row).meet(case, other, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []


# -- that it would be seen ---------------------------------------------------------------------------------------------


def tried(tmp_path: Path, name: str, is_seen: Callable[[Row], object], *, meeting: str = "") -> Row:
    """Let a case die at every other call, until that is seen which is wrong; or meet another program."""
    row = Row("control")
    case = next(case for case in CASES if case.name == name)
    cases = RecordCases(tmp_path, SETTINGS[0], row)
    if meeting:
        cases.meet(case, meeting, few(1, 20))
    else:
        cases.crash(case, lambda moments: takewhile(lambda _: not is_seen(row), moments[::2]))
    return row


@pytest.mark.long
def test_a_bundle_that_is_archived_before_its_parts_are_moved_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_forward = fan_out.roll_forward

    def early(context: Any, folder: str, **how: Any) -> bool:
        context.storage.rename(f"{folder}/whole", f"{context.layout.processed}/{folder.partition('~')[2]}")
        return roll_forward(context, folder, **how)

    monkeypatch.setattr(fan_out, "roll_forward", early)
    assert tried(tmp_path, "settle all", lambda row: row.wrong).wrong


@pytest.mark.long
def test_parts_that_are_moved_before_the_commit_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fan_out._commit

    def late(context: Any, claim: Any, folder: str) -> bool:
        for part in sorted(os.listdir(folder)):
            if ",error~" in part:
                context.storage.rename(f"{folder}/{part}", f"{context.layout.error}/{part.partition('~')[2]}")
        return commit(context, claim, folder)

    monkeypatch.setattr(fan_out, "_commit", late)
    assert tried(tmp_path, "settle each", lambda row: row.doubled).doubled


def test_parts_that_are_withdrawn_after_the_commit_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fan_out._commit

    def forgotten(context: Any, claim: Any, folder: str) -> bool:
        done = commit(context, claim, folder)
        for part in sorted(os.listdir(folder)):
            if ",target~" in part:
                context.storage.unlink(f"{folder}/{part}")
        return done

    monkeypatch.setattr(fan_out, "_commit", forgotten)
    assert tried(tmp_path, "nack what is left", lambda row: row.wrong).wrong


def test_a_bundle_that_is_gone_as_it_cannot_be_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordSettlement, "_fail_whole", lambda self, claim, why: self.claims.archive(claim))
    row = Row("control")
    cut = next(case for case in CASES if case.name == "cut")
    RecordCases(tmp_path, SETTINGS[0], row).refuse(
        cut, lambda every: takewhile(lambda _: not row.wrong, (each for each in every if each.lasts))
    )
    assert row.wrong


@pytest.mark.long
def test_a_holder_that_is_not_told_that_its_claim_is_gone_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = RecordSettlement._settle_as

    def silent(self: RecordSettlement, claim: Any, wanted: Any, heir: Any = None) -> Location:
        try:
            return settle(self, claim, wanted, heir)
        except LeaseLost:
            return Location("target", claim.own_name)

    monkeypatch.setattr(RecordSettlement, "_settle_as", silent)
    assert tried(tmp_path, "settle each", lambda row: row.wrong, meeting="a sweep that takes the living for dead").wrong


def test_what_is_left_with_what_was_settled_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = RecordCursor.left

    def with_all(self: RecordCursor) -> Any:
        found = left(self)
        return found and (*found[:2], [])

    monkeypatch.setattr(RecordCursor, "left", with_all)
    assert tried(tmp_path, "settle out of order", lambda row: row.doubled).doubled


# -- a record that kills its consumer ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [1, 2, 371, 500, 501, 999, 1000])
def test_a_record_that_kills_every_worker_ends_alone(tmp_path: Path, place: int) -> None:
    deaths, wrong = ends_alone(tmp_path / "root", place)
    assert (deaths > 3, wrong) == (True, [])
