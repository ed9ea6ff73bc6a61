"""Watching a folder: events make it soon, a timeout makes it sure, without events one looks often."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from children import in_child

from dropq import watch
from dropq.watch import Watch, events_reach

#: Seconds that a wait which is to be ended by something else would last.
LONG = 30.0
#: Seconds in which that something has to end it, on a machine that is busy with other things.
SOON = 10.0


def waited(watching: Watch, timeout: float) -> float:
    """How long a wait lasted."""
    began = time.monotonic()
    watching.wait(timeout)
    return time.monotonic() - began


def arrive(folder: Path, name: str) -> None:
    """Let a file come into a folder by a rename, as messages do."""
    staged = folder.parent / name
    staged.touch()
    os.rename(staged, folder / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "target"
    made.mkdir()
    return made


def test_importing_dropq_does_not_import_watchdog() -> None:
    program = "import dropq, sys; dropq.work; sys.exit('watchdog' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_that_comes_ends_the_wait(folder: Path) -> None:
    with Watch(folder=str(folder)) as watching:
        assert watching.events
        arrive(folder, "a")
        assert waited(watching, LONG) < SOON


def test_a_file_that_came_before_the_wait_ends_it_too(folder: Path) -> None:
    with Watch(str(folder)) as watching:
        for name in "abc":
            arrive(folder, name)
            assert waited(watching, LONG) < SOON


def test_a_file_that_was_written_in_place_or_renamed_within_the_folder_ends_the_wait(folder: Path) -> None:
    with Watch(str(folder)) as watching:
        (folder / ".part").touch()
        assert waited(watching, LONG) < SOON
        os.rename(folder / ".part", folder / "whole")
        assert waited(watching, LONG) < SOON


def test_a_file_that_leaves_does_not_end_the_wait(folder: Path) -> None:
    (folder / "a").touch()
    with Watch(str(folder)) as watching:
        os.rename(folder / "a", folder.parent / "a")
        assert waited(watching, 0.3) >= 0.29


def test_a_fork_of_a_process_that_watched_looks_instead_of_waiting_for_events(folder: Path) -> None:
    with Watch(str(folder)):
        pass

    def waits() -> tuple[bool, float]:
        with Watch(str(folder)) as watching:
            arrive(folder, "a")
            return watching.events, waited(watching, LONG)

    events, lasted = in_child(waits)
    assert not events and lasted < SOON


def test_without_news_a_wait_ends_by_its_timeout(folder: Path) -> None:
    with Watch(str(folder)) as watching:
        assert 0.19 <= waited(watching, 0.2) < SOON
        assert waited(watching, -1) < SOON


def test_many_events_end_one_wait(folder: Path) -> None:
    with Watch(str(folder)) as watching:
        for number in range(200):
            arrive(folder, str(number))
        assert waited(watching, LONG) < SOON
        deadline = time.monotonic() + SOON
        while waited(watching, 0.3) < 0.29:
            assert time.monotonic() < deadline, "hints of a burst are told one by one"


def test_anybody_can_wake_the_one_who_waits(folder: Path) -> None:
    with Watch(str(folder)) as watching:
        waker = threading.Timer(0.05, watching.wake)
        waker.start()
        assert waited(watching, LONG) < SOON
        watching.wake()
        assert waited(watching, LONG) < SOON


def test_polling_waits_no_longer_than_its_pause(folder: Path) -> None:
    with Watch(str(folder), poll=True) as watching:
        assert not watching.events
        assert waited(watching, LONG) < SOON
        assert waited(watching, 0.0) < SOON


def test_where_events_cannot_be_had_it_polls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(watch, "_new_observer", refuse)
    with Watch(str(folder)) as watching:
        assert not watching.events
        assert waited(watching, LONG) < SOON
    assert "inotify instance limit reached" in caplog.text


def test_a_watch_that_ends_among_events_is_quiet(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for round_ in range(20):
        with Watch(str(folder)):
            for number in range(20):
                arrive(folder, f"{round_}-{number}")
    assert not caplog.records


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        *((kind, True) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "zfs", "overlay", "f2fs", "bcachefs")),
        *((kind, False) for kind in ("nfs", "nfs4", "fuse", "fuse.sshfs", "cifs", "smb3", "9p", "virtiofs", "ceph")),
    ],
)
def test_events_are_relied_on_where_all_changes_are_made_here(tmp_path: Path, kind: str, reach: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"20 1 0:1 / / rw - {kind} source rw\n")
    assert events_reach(str(tmp_path), str(mounts)) is reach


def test_where_the_system_does_not_tell_events_are_tried(tmp_path: Path) -> None:
    assert events_reach(str(tmp_path), str(tmp_path / "none"))
