"""The account that the torture keeps, held against what it is to find; and the table."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from torture import table
from torture.__main__ import PAPER, PARTS
from torture.account import Account, body, judge, look, name_of
from torture.table import OLDER, PROJECT, Row, code_since, commit_of, lines_of, marked, merged, summed, table_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a queue that has every folder."""
    for folder in ("working", "target", "processing", "processed", "expired", "error", "routing/R", ".dropq/delayed"):
        (tmp_path / "q" / folder).mkdir(parents=True)
    return tmp_path


def put(root: Path, place: str, content: bytes) -> Path:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size", [0, 1, 64, 5000])
def test_a_body_tells_its_name_as_long_as_it_is_whole(size: int) -> None:
    content = body("a name", size)
    assert name_of(content) == "a name"
    assert {name_of(content[:cut]) for cut in range(len(content))} == {None}
    assert name_of(content + content) is None


@pytest.mark.parametrize(
    ("place", "state"),
    [
        ("q/target/x", "target"),
        ("q/incoming/target/x", "target"),
        ("q/routing/R/x", "routing"),
        ("q/.dropq/delayed/x", "delayed"),
        ("other/error/x", "other/error"),
        (".q.deleting-1-2/processed/x", "processed"),
    ],
)
def test_a_body_is_found_in_every_state(root: Path, place: str, state: str) -> None:
    put(root, place, body("a"))
    found = look(root)
    assert found.states() == {"a": state}
    assert judge(found, must={"a"}).good


@pytest.mark.parametrize("place", ["q/working/x", "q/working/.job-1/a/x", "q/.dropq/set-aside/target/x"])
def test_what_was_not_sent_is_in_no_state(root: Path, place: str) -> None:
    put(root, place, body("a"))
    found = look(root)
    assert (dict(found.locations), found.beside) == ({}, [str(root / place)])
    assert judge(found, must={"a"}).lost == ["a"]


@pytest.mark.parametrize("place", ["q/target/.hidden", "q/.dropq/.gone-1", "q/.dropq/held/o/x", "stray"])
def test_what_is_no_message_does_not_count(root: Path, place: str) -> None:
    put(root, place, body("a"))
    os.symlink(root / place, root / "q" / "target" / "link")
    os.mkfifo(root / "q" / "target" / "fifo")
    os.close(os.open(root / "q" / "error" / "reserved", os.O_CREAT, 0))
    assert judge(look(root), must=()).good


def test_what_is_broken_is_told(root: Path) -> None:
    for place in ("q/target/1", "q/error/1"):
        put(root, place, body("twice"))
    put(root, "q/target/2", body("half")[:-1])
    put(root, "q/target/3", body("never sent"))
    account = judge(look(root), must={"twice", "gone"}, may={"maybe"})
    assert (account.lost, account.doubled) == (["gone"], ["twice"])
    assert account.wrong == [
        f"{root}/q/target/2 is not whole",
        "never sent was never sent, and lies in target",
    ]
    row = Row("a test", cases=1)
    row.count(account, "here")
    assert (row.lost, row.doubled, row.good) == (1, 1, False)
    assert "gone" in row.wrong[0]


def test_a_table_says_what_was_not_run() -> None:
    rows = [Row("one", cases=1000, kills=2), Row("two", not_run="no spin: apt install spin")]
    assert lines_of("model", [Row("three", wrong=["so"])], "1") == [
        "| model | three: **broken** | 0 | 0 | 0 | 0 | 0 | 1 |"
    ]
    assert lines_of("model", rows, "c0ffee") == [
        "| model | one | 1,000 | 2 | 0 | 0 | 0 | c0ffee |",
        "| model | two | NOT RUN: no spin: apt install spin |  |  |  |  | c0ffee |",
    ]
    assert [row.good for row in rows] == [True, False]
    assert Account().good


def test_rows_that_differ_behind_the_colon_are_summed_and_nothing_that_is_wrong_is_hidden() -> None:
    rows = [
        Row("crash: plain", cases=1, kills=2, faults=3, lost=4, doubled=5, wrong=["so"]),
        Row("storm"),
        Row("crash: no history", cases=10, kills=20, faults=30, lost=40, doubled=50),
        Row("crash: on a mount", not_run="no mount"),
    ]
    whole, storm, missing = summed(rows)
    assert whole == Row("crash: plain; no history", 11, 22, 33, 44, 55, wrong=["so"])
    assert (storm, missing) == (rows[1], rows[3])
    assert summed(summed(rows)) == [whole, storm, missing]


def test_a_part_that_is_run_again_has_its_rows_replaced_and_leaves_those_of_others() -> None:
    old = [*lines_of("crashes", [Row("a"), Row("b")], "1"), *lines_of("storm", [Row("c")], "1")]
    new = [*lines_of("storm", [Row("c", kills=3)], "2"), *lines_of("faults", [Row("d")], "2")]
    rows = merged(table_of(old), new, ("crashes", "faults", "storm"))
    assert rows == [*old[:2], new[1], new[0]]
    assert merged("No table yet.", new, ("crashes", "faults", "storm")) == [new[1], new[0]]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits of a history, in which dropq changes with the second one, and other things with the third."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    (tmp_path / "dropq").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    commits = []
    for number, file in enumerate(("dropq/a.py", "dropq/a.py", "paper.md")):
        (tmp_path / file).write_text(f"{number}\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        commits.append(found.stdout.strip())
    monkeypatch.setattr(table, "PROJECT", tmp_path)
    return commits


def test_rows_are_marked_whose_commit_had_other_code(repository: list[str], tmp_path: Path) -> None:
    first, second, third = repository
    lines = [
        line for commit in (first, second, f"{third}-changed", "unknown") for line in lines_of("a", [Row("b")], commit)
    ]
    ends = [line.rpartition("| ")[2] for line in marked(lines)]
    assert ends == [f"{first} (older) |", f"{second} |", f"{third}-changed |", "unknown (older) |"]
    assert marked(marked(lines)) == marked(lines)
    (tmp_path / "dropq" / "a.py").write_text("changed, and not committed\n")
    assert all(line.endswith(f"{OLDER} |") for line in marked(lines))
    assert (code_since(second), code_since("unknown")) == ("changed", "unknown")


def test_the_paper_marks_the_rows_that_are_older_than_the_code() -> None:
    """Rows of commits that this history does not have may have a mark or none: histories are copied in part."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    rows = [line for line in PAPER.read_text().splitlines() if line.startswith(tuple(f"| {part} |" for part in PARTS))]
    since = {commit: code_since(commit) for commit in map(commit_of, rows)}
    if set(since.values()) == {"unknown"}:
        pytest.skip(f"{PROJECT} has no history that tells when the rows were run")
    for row in rows:
        if since[commit_of(row)] != "unknown":
            right = row.endswith(f"{OLDER} |") == (since[commit_of(row)] == "changed")
            assert right, f'run make torture ARGS="--mark": {row}'
