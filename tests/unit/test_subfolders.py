"""What lies in a folder of subscriptions is listed again whenever it may be another."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dropq.storage import reading
from dropq.storage.mounts import Mount
from dropq.storage.reading import Subfolders
from dropq.storage.system_calls import Asked, ask

LATER = 10_000


class Ahead:
    """A clock that is ahead by so many milliseconds: for it, what changed just now changed long ago."""

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead

    def now_ms(self) -> int:
        return int(time.time() * 1000) + self.ahead


def names(found: Subfolders) -> set[str]:
    return {entry.name for entry in found.now()}


def test_a_folder_that_did_not_change_is_not_listed_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = Subfolders(str(tmp_path), Ahead(LATER), shared=False)
    assert found.now() is found.now()


def test_what_is_made_renamed_and_removed_is_seen_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = Subfolders(str(tmp_path), Ahead(LATER), shared=False)
    assert names(found) == {"a"}
    for change, expected in (
        (lambda: (tmp_path / "b").mkdir(), {"a", "b"}),
        (lambda: (tmp_path / "b").rename(tmp_path / "c"), {"a", "c"}),
        (lambda: (tmp_path / "a").rmdir(), {"c"}),
    ):
        time_of = tmp_path.stat().st_ctime_ns
        change()
        while tmp_path.stat().st_ctime_ns == time_of:  # a tick of the kernel's clock, which the rule leaves out
            tmp_path.chmod(0o700)
        assert names(found) == expected


def test_a_folder_that_changed_just_now_is_listed_each_time(tmp_path: Path) -> None:
    found = Subfolders(str(tmp_path), Ahead(), shared=False)
    for number in range(300):  # many within a tick of the kernel's clock
        (tmp_path / str(number)).mkdir()
        assert len(found.now()) == number + 1


def test_a_folder_whose_mount_may_leave_its_time_is_listed_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("fuse.bindfs"))
    found = Subfolders(str(tmp_path), Ahead(LATER), shared=True)
    for number in range(300):
        (tmp_path / str(number)).mkdir()
        assert len(found.now()) == number + 1


def test_on_nfs_one_call_tells_that_a_folder_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "mount_at", lambda folder, device: Mount("nfs4"))
    (tmp_path / "a").mkdir()
    found = Subfolders(str(tmp_path), Ahead(LATER), shared=True)
    before, asked = found.now(), list[str]()

    def counted(path: str, *, follows: bool) -> Asked | None:
        asked.append(path)
        return ask(path, follows=follows)

    monkeypatch.setattr(reading, "ask", counted)
    monkeypatch.setattr(reading, "subfolders", None)  # it is not called
    assert found.now() is before
    assert asked == [str(tmp_path)]


def test_a_missing_folder_is_empty_until_it_is_made(tmp_path: Path) -> None:
    found = Subfolders(str(tmp_path / "there"), Ahead(LATER), shared=False)
    assert found.now() == []
    (tmp_path / "there" / "a").mkdir(parents=True)
    assert names(found) == {"a"}
