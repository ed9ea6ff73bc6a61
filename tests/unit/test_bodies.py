"""Bodies that are read by their names in an open folder are those that are read by their paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dropq.storage.reading import READ_SIZE, read_bodies, read_body

SIZES = [0, 1, READ_SIZE - 1, READ_SIZE, READ_SIZE + 1, 2 * READ_SIZE, 3 * READ_SIZE + 7]


def test_bodies_of_any_size_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for size in SIZES:
        (tmp_path / str(size)).write_bytes(os.urandom(size))
    names = [str(size) for size in reversed(SIZES)]
    assert list(read_bodies(str(tmp_path), names)) == [read_body(f"{tmp_path}/{name}") for name in names]


def test_what_is_no_body_is_none_and_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"body")
    (tmp_path / "link").symlink_to(tmp_path / "body")
    (tmp_path / "folder").mkdir()
    (tmp_path / "huge").write_bytes(b"x" * (READ_SIZE + 1))
    names = ["link", "body", "missing", "folder", "huge", "body"]
    assert list(read_bodies(str(tmp_path), names, READ_SIZE)) == [None, b"body", None, None, None, b"body"]


def test_in_a_folder_that_cannot_be_opened_no_body_is_read(tmp_path: Path) -> None:
    assert list(read_bodies(f"{tmp_path}/missing", ["a", "b"])) == [None, None]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_reader_that_stops_leaves_nothing_open(tmp_path: Path, count: int) -> None:
    names = [str(number) for number in range(3)]
    for name in names:
        (tmp_path / name).write_bytes(b"body")
    before = os.listdir("/proc/self/fd")
    bodies = read_bodies(str(tmp_path), names)
    assert [next(bodies) for _ in range(count)] == [b"body"] * count
    bodies.close()
    assert os.listdir("/proc/self/fd") == before
