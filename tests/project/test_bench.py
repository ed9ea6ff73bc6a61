"""The benchmark accounts for every message: what it says of lost and doubled ones is true."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dropq.upkeep.steps import LOCKS_TRIED

TOP = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOP / "bench"))
    return importlib.import_module("bench")


def measured(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a run on few messages."""
    options = ("--tmpfs", str(tmp_path), "--disk", str(tmp_path))
    command = [sys.executable, str(TOP / "bench/bench.py"), "--json", "--rounds", "1", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_raw_loop_and_dropq_lose_and_double_nothing(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--only", "one,four,batch", "--messages", "50", "--queues", "Raw,Dropq,DropqManyFull")
    assert len(rows) == 3 * 4 + 2 + 4
    for row in rows:
        assert (row["lost"], row["doubled"]) == (0, 0), row
        assert "broke" not in row and row["ratio"] > 0
    assert all("wasted" in row for row in rows if row["part"] == "drained")
    assert not list(tmp_path.iterdir())  # what it worked in is gone


def test_the_tables_name_every_queue_that_was_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--only", "one", "--messages", "10", "--queues", "Dropq,RawFull")
    parts = {"one": {"commit": "1234567", "date": "2026-01-01", "rows": rows}}
    paper = runpy.run_path(str(TOP / "docs/draw_benchmarks.py"))["queue_tables"]({"machine": "here", "parts": parts})
    for row in rows:
        assert paper.count(f"| {row['what']} |") == 2
        assert f"| {row['what']} | {row['per_s']:,} |" in paper


@pytest.mark.long
def test_each_record_that_was_measured_is_accounted_for(tmp_path: Path) -> None:
    few = ("--rounds", "1", "--records", "1000", "--large", "1", "--pace", "0", "--lines", "5")
    command = [sys.executable, str(TOP / "bench/records.py"), *few, "--tmpfs", str(tmp_path), "--disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["against"] for row in rows if "ratio" in row} >= {"raw loop", "raw loop of bundles", "by one"}
    for row in rows:
        assert "skipped" in row or (row["lost"], row["doubled"]) == (0, 0), row
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_each_message_that_went_over_zeromq_is_accounted_for(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")
    few = ("--rounds", "1", "--messages", "200", "--tmpfs", str(tmp_path), "--disk", str(tmp_path))
    command = [sys.executable, str(TOP / "bench/zeromq.py"), *few]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 10
    assert all(row["lost"] == 0 and row["ratio"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


def test_a_record_that_was_to_be_rejected_and_is_not_in_error_counts_as_lost(bench: Any, tmp_path: Path) -> None:
    records = importlib.import_module("records")
    kind = type("Kind", (records.RecordsOneInHundred,), {"take_all": acknowledging})
    runs = [bench.tried(bench.one_and_one, peer, str(tmp_path), 1000) for peer in (records.RecordsOneInHundred, kind)]
    assert [run.lost for run in runs] == [0, 1000]


def acknowledging(queue: Any) -> Iterator[bytes]:
    """Take records and acknowledge each."""
    for record in queue.subscribed().records(timeout=0):
        record.ack()
        yield record.data


def doctored(bench: Any, change: Callable[[list[bytes]], list[bytes]]) -> Any:
    """A raw loop that hands out something else than what it took."""

    def take_all(self: Any) -> Iterator[bytes]:
        yield from change(list(bench.Raw.take_all(self)))

    return type("Doctored", (bench.Raw,), {"name": "doctored", "take_all": take_all})


@pytest.mark.parametrize(
    ("change", "lost", "doubled"),
    [
        (lambda bodies: bodies, 0, 0),
        (lambda bodies: bodies[1:], 1, 0),
        (lambda bodies: [*bodies, bodies[3]], 0, 1),
        (lambda bodies: [bodies[0][:-1], *bodies[1:]], 1, 0),
        (lambda bodies: [b"", *bodies[1:], bodies[1]], 1, 1),
    ],
    ids=["as it is", "one left out", "one twice", "one cut short", "one empty and one twice"],
)
def test_a_queue_that_loses_or_doubles_is_told(
    bench: Any, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], lost: int, doubled: int
) -> None:
    plan = bench.Plan(1, 10, str(tmp_path), str(tmp_path))
    queues = (bench.Raw, doctored(bench, change))
    raw, row = bench.compare("one", "tmpfs", plan, queues, bench.one_and_one)
    assert (row["lost"], row["doubled"]) == (lost, doubled)
    assert not bench.is_bad(raw)
    assert bench.is_bad({**row, "what": "dropq, none"}) == bool(lost or doubled)


def test_what_was_taken_and_is_not_settled_counts_as_lost(bench: Any, tmp_path: Path) -> None:
    forgetful = type("Forgetful", (bench.Raw,), {"name": "forgetful", "settled": classmethod(lambda cls, folder: 7)})
    plan = bench.Plan(1, 10, str(tmp_path), str(tmp_path))
    _, row = bench.compare("one", "tmpfs", plan, (bench.Raw, forgetful), bench.one_and_one)
    assert row["lost"] == 3


def test_a_queue_that_breaks_off_is_told_and_the_others_go_on(bench: Any, tmp_path: Path) -> None:
    def fail(self: Any) -> Iterator[bytes]:
        raise OSError("no more")

    broken = type("Broken", (bench.Raw,), {"name": "broken", "take_all": fail})
    plan = bench.Plan(2, 10, str(tmp_path), str(tmp_path))
    for run in (bench.one_and_one, bench.four_and_four):
        raw, row = bench.compare("one", "tmpfs", plan, (bench.Raw, broken), run)
        assert raw["lost"] == 0
        assert "OSError: no more" in row["broke"]
        assert row["times"] == 2 and "per_s" not in row
        assert "no more" in bench.in_words(row, None)


def test_a_queue_whose_module_is_missing_is_left_out_with_the_reason(bench: Any, tmp_path: Path) -> None:
    absent = type("Absent", (bench.Raw,), {"name": "absent", "needs": "no_such_module"})
    plan = bench.Plan(1, 10, str(tmp_path), str(tmp_path))
    _, row = bench.compare("one", "tmpfs", plan, (bench.Raw, absent), bench.one_and_one)
    assert "no_such_module" in row["skipped"]


@pytest.mark.long
def test_what_grows_is_measured_on_what_it_names(tmp_path: Path) -> None:
    command = [sys.executable, str(TOP / "bench/upkeep.py"), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(rows) == 13
    assert {row["files"] for row in rows.values()} == {100}
    taken = {what: row for what, row in rows.items() if what.startswith("taken")}
    assert len(taken) == 3
    for row in taken.values():
        assert (row["taken"], row["left_in_held"]) == (100, 0), row
    [lost] = (row for row in rows.values() if "gone" in row)
    assert (lost["gone"], lost["held"]) == (100, 100)
    [beside] = (row for row in rows.values() if "lock_tries" in row)
    assert beside["lock_tries"] == LOCKS_TRIED
    assert sum("early_ack_ms" in row and "find_ms" in row for row in rows.values()) == 2
    assert not list(tmp_path.iterdir())  # what it worked in is gone
