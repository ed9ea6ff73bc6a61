"""`dropq.testing`: users' own tests get a root that is quick, and that is gone with the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dropq

TESTS = """
def test_it_is_quick(root, tmp_path):
    queue = root.create_queue("orders")
    assert queue.config.durability == "none"
    assert list(root.path.parents)[0] == tmp_path
    queue.send("x")

def test_it_is_empty(root):
    assert root.queues() == []
"""


@pytest.mark.parametrize(
    ("conftest", "head"),
    [("", "from dropq.testing import root\n"), ('pytest_plugins = ["dropq.testing"]\n', "")],
    ids=["by import", "as a plugin"],
)
def test_each_test_of_a_handler_has_an_empty_root(tmp_path: Path, conftest: str, head: str) -> None:
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_handler.py").write_text(head + TESTS)
    own = ["--rootdir", str(tmp_path), f"--basetemp={tmp_path / 'temporary'}"]  # else it clears what other runs left
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, "test_handler.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_root_asks_for_no_sync_and_is_like_any_other(tmp_path: Path) -> None:
    from dropq.testing import root

    made = root.__wrapped__(tmp_path)  # type: ignore[attr-defined]
    assert isinstance(made, dropq.Root) and made.path.parent == tmp_path
    assert dropq.Root(made.path).create_queue("q").config.durability == "none"
