"""A short storm in a graph of queues, and what its judge objects to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from dropq.routing import credit_audit, registry
from torture import graph, mixture, rings
from torture.account import body
from torture.table import Options, Row


@pytest.mark.long
def test_each_message_is_settled_once_and_each_credit_comes_back_in_a_storm(tmp_path: Path) -> None:
    with (
        mock.patch.object(credit_audit, "AUDIT_INTERVAL", graph.AUDIT_INTERVAL),
        mock.patch.object(registry, "AUDIT_INTERVAL", graph.AUDIT_INTERVAL),
    ):
        row = graph.storm(tmp_path, seed=1, seconds=graph.SHORT)
    assert row.wrong == []
    assert row.good and row.cases and row.kills


@pytest.mark.long
def test_topics_views_selectors_routes_and_dead_letters_stand_a_storm_in_one_root(tmp_path: Path) -> None:
    row = mixture.storm(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases and row.kills


@pytest.mark.long
@pytest.mark.parametrize("make", [rings.by_chance, rings.together])
def test_nothing_goes_round_on_a_ring(tmp_path: Path, make: Callable[[Options], Row]) -> None:
    row = make(Options(tmp_path, seed=1, long=False))
    assert row.wrong == []
    assert row.good and row.cases


def test_the_judge_of_rings_sees_what_goes_round_and_what_is_refused_for_nothing(tmp_path: Path) -> None:
    made = rings.Administered(tmp_path / "root", "1")
    assert not rings.Step("selector", "one", "two").take(made.root)
    row = Row("judged")
    expected = made.ways.flow(made.send_everywhere())
    made.route()
    made.judge(row, expected)  # the model does not know the selector
    assert (row.lost, row.doubled) == (2, 2)
    assert made._refused("x", lambda: made.root.queue("two").add_selector("on", to="one"), closes=False)
    assert not made._refused("y", lambda: None, closes=True)
    assert [line.partition(":")[0] for line in made.wrong[-2:]] == [
        "x is refused",
        "y closes a ring, and is not refused",
    ]


@pytest.fixture
def calm(tmp_path: Path) -> graph.Storm:
    """A graph in which a message went to the left, and another to the right."""
    storm = graph.Storm(tmp_path, seed=1)
    start = storm.root.queue("start")
    for name in ("one", "two"):
        (tmp_path / "notes" / f"{name}.log").write_text(f"try {name}\nsent {name}\n")
        start.send(body(name))
    assert start.route() == {"left": 1, "right": 1}
    return storm


def judged(storm: graph.Storm) -> Row:
    row = Row("judged")
    graph._judge(row, storm)
    row.wrong += graph._books(storm)
    return row


def waiting(storm: graph.Storm, queue: str) -> Path:
    (path,) = Path(storm.root.queue(queue).layout.target).iterdir()
    return path


def test_the_judge_of_the_storm_objects_to_nothing_in_a_graph_that_is_in_order(calm: graph.Storm) -> None:
    assert judged(calm).good


def test_the_judge_of_the_storm_sees_what_is_lost_doubled_leaked_and_overdrawn(calm: graph.Storm) -> None:
    left = waiting(calm, "left")
    shutil.copy(left, left.with_name(f"{left.name}.again"))
    assert judged(calm).doubled == 1
    left.with_name(f"{left.name}.again").unlink()
    kept = left.rename(calm.folder / "kept")
    row = judged(calm)
    assert row.lost == 1
    assert any("is spent on nothing" in line for line in row.wrong)
    kept.rename(left)
    (credit,) = Path(calm.root.queue("start").layout.credits).glob(f"*/{left.name.partition('viaS=')[2][7:17]}")
    os.unlink(credit)
    assert any("is free, and" in line for line in judged(calm).wrong)


def test_the_judge_of_the_storm_sees_a_message_that_was_settled_twice_or_comes_back(calm: graph.Storm) -> None:
    notes = calm.folder / "notes" / "consumer.log"
    notes.write_text("settled one\n")
    assert any("was settled, and is in" in line for line in judged(calm).wrong)
    notes.write_text("settled one\nsettled one\n")
    assert judged(calm).doubled == 1
