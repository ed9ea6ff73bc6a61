"""A reason says why a message lies in error/ or expired/, and belongs to that message alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from helpers import Make, base, drop, names_in, take


def test_reasons_name_what_they_are_about_and_go_with_it(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue).reject("r")
    (reason,) = Path(queue.layout.reasons).rglob("*.json")
    content = json.loads(reason.read_text())
    assert content["name"] == names_in(queue, "error")[0]
    assert content["delivery"] == 1
    queue.requeue()
    assert list(Path(queue.layout.reasons).rglob("*.json")) == []
    take(queue).reject("again")
    (found,) = queue.browse("error")
    assert found.reason is not None
    assert found.reason["detail"] == "again"


def test_a_reason_is_not_taken_for_another_file_of_the_same_name(make: Make) -> None:
    queue = make()
    drop(queue, "a.csv", b"a")
    take(queue).reject("r")
    os.unlink(base(queue) / "error" / "a.csv")
    keep = base(queue) / "keeps-the-inode"
    keep.touch()
    (base(queue) / "error" / "a.csv").write_bytes(b"other")
    (found,) = queue.browse("error")
    if os.lstat(found.path).st_ino != json.loads(next(Path(queue.layout.reasons).rglob("*.json")).read_text())["inode"]:
        assert found.reason is None
