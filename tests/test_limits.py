"""Switches and limits, as people and configurations set them, among processes that see nothing else of each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from children import unprivileged
from helpers import make_queue, reopened

# -- read-locks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["queue", "root"])
def test_a_read_lock_that_nobody_may_read_pauses_all_the_same(tmp_path: Path, whose: str) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"x")
    path = Path(queue.layout.read_lock if whose == "queue" else queue.root.layout.read_lock)
    path.touch(0)

    def look() -> tuple[object, bool]:
        with reopened(queue).subscribe() as consumer:
            return consumer.receive(), queue.paused

    assert unprivileged(look) == (None, True)
    path.unlink()
    with reopened(queue).subscribe() as consumer:
        assert consumer.receive() is not None


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_whatever_lies_under_the_name_of_a_read_lock_pauses(tmp_path: Path, make: Callable[[Path], object]) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"x")
    make(Path(queue.layout.read_lock))
    with queue.subscribe() as consumer:
        assert queue.paused and consumer.receive() is None
