"""A short storm over ZeroMQ, and what its judge objects to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torture.account import body
from torture.table import Options, Row

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from torture import zeromq


def test_what_was_answered_is_there_once_in_a_storm_over_zeromq(tmp_path: Path) -> None:
    (row,) = zeromq.run(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills


def test_the_judge_of_the_storm_sees_what_is_lost_came_late_or_was_not_acknowledged(tmp_path: Path) -> None:
    storm = zeromq.Storm(tmp_path, tmp_path, seed=1)

    def wrong(notes: str) -> list[str]:
        (storm.notes / "one.1").write_text(notes)
        storm.judge(row := Row("judged"))
        return row.wrong

    assert wrong("try a.1\nsent a.1\n") == ["the storm: lost: a.1 (1)"]
    storm.queue.send(body("a.1", 200))
    message = storm.queue.receive()
    assert message is not None
    message.ack()
    archived = os.stat(message.path).st_ctime_ns // 1000
    good = f"try a.1\nsent a.1\ngot a.1 {archived}\nack a.1\n"
    assert wrong(good) == []
    assert "nobody acknowledged it" in wrong("try a.1\nsent a.1\n")[0]
    assert "after it was archived" in wrong(f"{good}got a.1 {archived + 1_000_000}\n")[0]
    assert "came damaged" in wrong(f"{good}damaged a.1\n")[0]
    storm.queue.send(body("a.1", 200))
    assert "doubled: a.1" in wrong(good)[0]
