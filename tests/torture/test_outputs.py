"""A short storm of a chain, and what its judge objects to."""

from __future__ import annotations

import shutil
from pathlib import Path

from torture import outputs
from torture.table import Options, Row


def test_each_message_comes_out_of_a_chain_once_in_a_storm(tmp_path: Path) -> None:
    (row,) = outputs.run(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills


def test_the_judge_of_the_chain_sees_what_is_lost_doubled_changed_and_left(tmp_path: Path) -> None:
    storm = outputs.Storm(tmp_path, seed=1, many=3)

    def judged() -> tuple[int, int, list[str]]:
        row = Row("judged")
        wrong = list(outputs.judged(storm.root, storm.sent, row))
        return row.lost, row.doubled, wrong

    assert judged()[0] == 12 and "a: target has" in judged()[2][0]
    outputs.work_off(storm.root, seed=1)
    assert judged() == (0, 0, [])
    last = storm.root.queue("d")
    first, second, third = sorted(Path(last.layout.target).iterdir())
    shutil.copy(first, f"{first}.again")
    second.write_bytes(second.read_bytes() + b"more")
    third.unlink()
    lost, doubled, wrong = judged()
    assert (lost, doubled) == (2, 1) and len(wrong) == 4
