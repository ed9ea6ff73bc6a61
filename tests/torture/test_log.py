"""A short storm of which the log tells, and what its judge objects to."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from dropq.events.reader import Event
from torture import log
from torture.table import Options


def test_the_log_tells_the_state_of_each_message_after_a_storm(tmp_path: Path) -> None:
    (row,) = log.run(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills


def test_the_judge_of_the_log_sees_what_is_untold_told_twice_and_counted_too_often() -> None:
    now = datetime.now(UTC)

    def told(event: str, **fields: str | int) -> Event:
        return Event(now, event, "ann", "host", fields)

    states = {"a": "processed", "b": "error", "c": "target"}
    right = [
        told("acked", id="a"),
        told("returned", id="b"),
        told("rejected", id="b"),
        told("sum", acked=1, rejected=1),
    ]
    assert list(log.judged(states, right, kills=0)) == []
    assert len(list(log.judged(states, right[1:], kills=0))) == 1
    assert list(log.judged(states, right[1:], kills=1)) == []
    assert list(log.judged(states, [*right, told("acked", id="a")], kills=0)) == ["a acked 2 times"]
    assert len(list(log.judged(states, [*right, told("sum", acked=1)], kills=0))) == 1
    assert len(list(log.judged(states, [*right, told("sum", failed=1)], kills=0))) == 1
    assert len(list(log.judged(states, [*right, told("returned", id="a")], kills=0))) == 1
