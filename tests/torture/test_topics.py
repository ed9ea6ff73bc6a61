"""A short storm in topics, and what strangers and accidents do to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torture import hardships, topics
from torture.account import body
from torture.table import Options, Row


def test_each_subscription_gets_each_message_once_in_a_storm(tmp_path: Path) -> None:
    row = topics.storm(tmp_path, seed=1, seconds=topics.SHORT)
    assert row.wrong == []
    assert row.good and row.cases and row.kills


@pytest.mark.parametrize("story", hardships.STORIES)
def test_through_each_hardship_each_message_comes_where_it_is_to_once(tmp_path: Path, story: str) -> None:
    row = hardships.run_story(Options(tmp_path, seed=1, long=False), story)
    assert row.wrong == []
    assert row.good and row.cases


def test_the_judge_of_the_hardships_sees_what_is_lost_doubled_and_strange(tmp_path: Path) -> None:
    scene = hardships.Scene.built(tmp_path / "root", dropboxmq=False)
    for name in ("one", "two"):
        scene.publish(name)
    target = Path(scene.root.queue(hardships.ALL).layout.target)
    first, second = sorted(target.iterdir())
    shutil.copy(first, first.with_name(f"{first.name}.again"))
    second.unlink()
    (target / "report.csv").write_bytes(body("nobody's"))
    row = Row("judged")
    scene.judge(row)
    assert (row.lost, row.doubled) == (1, 2)
    assert {line.partition(" ")[0] for line in scene.wrong} == {"'one'", "'two'", '"nobody\'s"'}


def test_the_judge_of_the_hardships_sees_a_refusal_that_is_not_said(tmp_path: Path) -> None:
    scene = hardships.Scene.built(tmp_path / "root", dropboxmq=False)
    scene.refused("is away", lambda: None)
    scene.refused("is away", lambda: scene.root.queue("nowhere").send(b"x"))
    assert len(scene.wrong) == 2
    assert scene.untold("is away", hardships.TOPIC)
