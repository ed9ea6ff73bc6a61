"""A short storm of bundles, and what its judge objects to."""

from __future__ import annotations

import shutil
from pathlib import Path

from torture import records
from torture.table import Options, Row


def test_each_record_is_archived_once_or_in_error_once_in_a_storm(tmp_path: Path) -> None:
    (row,) = records.run(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills


def test_the_judge_of_the_storm_sees_what_is_lost_doubled_and_left(tmp_path: Path) -> None:
    storm = records.Storm(tmp_path, seed=1)
    (tmp_path / "notes" / "one.log").write_text("try one\nsent one\n")
    queue = storm.root.queue("q")
    queue.send("".join(f"{record}\n" for record in records._records("one")), type="text")

    def judged() -> Row:
        records.judge(row := Row("judged"), storm)
        return row

    assert judged().lost == records.MANY
    assert any("target has" in line for line in judged().wrong)
    records._work(queue)
    assert judged().good and judged().cases == records.MANY
    (archived,) = Path(queue.layout.processed).iterdir()
    shutil.copy(archived, f"{archived}.again")
    assert judged().doubled == records.MANY
