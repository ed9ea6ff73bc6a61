"""Watching a folder: pauses at first, events make it soon, a timeout makes it sure, without events one looks often."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
from children import in_child
from helpers import open_files, overflow

from dropq.storage import watch
from dropq.storage.watch import PATIENCE, PAUSE, Watch, events_reach

#: Seconds that a wait which is to be ended by something else would last.
LONG = 30.0
#: Seconds in which that something has to end it, on a machine that is busy with other things.
SOON = 10.0


def waited(watching: Watch, timeout: float) -> float:
    """How long a wait lasted."""
    began = time.monotonic()
    watching.wait(timeout)
    return time.monotonic() - began


def observing(folder: Path) -> Watch:
    """A watch that has events already."""
    watching = Watch(str(folder))
    assert watching.observe()
    return watching


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
    watching = observing(folder)
    assert watching.events
    arrive(folder, "a")
    assert waited(watching, LONG) < SOON


def test_a_file_that_came_before_the_wait_ends_it_too(folder: Path) -> None:
    watching = observing(folder)
    for name in "abc":
        arrive(folder, name)
        assert waited(watching, LONG) < SOON


def test_a_file_that_was_written_in_place_or_renamed_within_the_folder_ends_the_wait(folder: Path) -> None:
    watching = observing(folder)
    (folder / ".part").touch()
    assert waited(watching, LONG) < SOON
    os.rename(folder / ".part", folder / "whole")
    assert waited(watching, LONG) < SOON


def test_a_file_that_leaves_does_not_end_the_wait(folder: Path) -> None:
    (folder / "a").touch()
    watching = observing(folder)
    os.rename(folder / "a", folder.parent / "a")
    assert waited(watching, 0.3) >= 0.29


def test_who_waits_long_gets_events_and_looks_once_more_before_it_relies_on_them(folder: Path) -> None:
    watching, waits = Watch(str(folder)), count()
    while not watching.events:
        news = watching.wait(LONG)
        assert news is watching.events  # the pauses before end by their timeouts, and the first one with events at once
        assert next(waits) < 100
    arrive(folder, "a")
    assert waited(watching, LONG) < SOON


def test_who_waits_a_moment_asks_for_nothing(folder: Path) -> None:
    watching = Watch(str(folder))
    left = PATIENCE / 2
    while left > 0:
        left -= waited(watching, left)
    assert not watching.events


def test_pauses_become_longer_and_are_short_again_for_a_new_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watch(str(folder), poll=True)
    asked: list[float] = []

    class Clock:
        def poll(self, ms: float) -> list[tuple[int, int]]:
            asked.append(ms / 1000)
            return []

    monkeypatch.setattr(watching, "_poller", Clock)
    for _ in range(10):
        watching.wait(LONG)
    assert asked == sorted(asked) and asked[0] < 0.01 and asked[-1] == PAUSE
    watching.begin()
    watching.wait(LONG)
    assert asked[-1] == asked[0]


def test_a_file_that_comes_into_any_of_several_folders_ends_the_wait(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    watching = Watch(str(folder), str(other))
    assert watching.observe()
    for number, each in enumerate((folder, other, folder)):
        arrive(each, str(number))
        assert waited(watching, LONG) < SOON
    other.rename(folder.parent / "old")
    other.mkdir()
    assert not watching.wait(0)  # from now on the new one is watched
    arrive(other, "late")
    assert waited(watching, LONG) < SOON


@pytest.mark.parametrize("go", [os.unlink, lambda path: os.rename(path, path.parent.parent / path.name)])
def test_a_file_that_leaves_a_folder_ends_the_wait_where_that_is_asked_for(
    folder: Path, go: Callable[[Path], object]
) -> None:
    credits = folder.parent / "credits"
    credits.mkdir()
    watching = Watch(str(folder), leaving=[str(credits)])
    assert watching.observe()
    for each in (folder, credits):
        (each / "a").touch()
    assert watching.wait(0), "it came into the folder of which arrivals are asked for"
    go(folder / "a")
    assert not watching.wait(0)
    go(credits / "a")
    assert waited(watching, LONG) < SOON
    (credits / "b").touch()
    assert not watching.wait(0)


def test_a_new_time_of_a_file_ends_the_wait_where_that_is_asked_for(folder: Path) -> None:
    rung, other = folder / "rung", folder / "other"
    for each in (rung, other):
        each.touch()
    watching = Watch(touched=[str(rung)])
    assert watching.observe()
    os.utime(other)
    rung.read_bytes()
    assert not watching.wait(0)
    os.utime(rung)
    assert waited(watching, LONG) < SOON
    assert not watching.wait(0)


def test_one_folder_without_events_makes_it_poll_all_of_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder.parent / "other"
    other.mkdir()
    monkeypatch.setattr(watch, "events_reach", lambda path: path == str(folder))
    watching = Watch(str(folder), str(other))
    assert not watching.observe() and waited(watching, LONG) < SOON


def ready(watching: Watch, timeout: float) -> bool:
    """Whether the descriptor of a watch becomes readable in a poll of the caller's own."""
    return bool(select.select([watching], [], [], timeout)[0])


@pytest.mark.parametrize("poll", [False, True])
def test_its_descriptor_tells_the_caller_when_a_wait_would_end(folder: Path, poll: bool) -> None:
    watching = Watch(str(folder), poll=poll)
    assert not ready(watching, 0)
    watching.wake()
    assert ready(watching, LONG) and watching.wait(0)
    assert not ready(watching, 0)
    arrive(folder, "a")
    assert ready(watching, 0 if poll else LONG) is not poll
    assert watching.wait(0) is not poll
    assert not ready(watching, 0)


def test_its_descriptor_is_closed_with_it(folder: Path) -> None:
    observing(folder).fileno()
    before = open_files()
    watching = observing(folder)
    watching.fileno()
    del watching
    assert open_files() == before


def test_a_fork_of_a_process_that_watched_has_events_of_its_own(folder: Path) -> None:
    ours = observing(folder)

    def waits() -> tuple[bool, float]:
        watching = observing(folder)
        arrive(folder, "a")
        return watching.events, waited(watching, LONG)

    events, lasted = in_child(waits)
    assert events and lasted < SOON
    assert waited(ours, LONG) < SOON  # nobody has read ours


def test_without_news_a_wait_ends_by_its_timeout(folder: Path) -> None:
    watching = observing(folder)
    assert 0.19 <= waited(watching, 0.2) < SOON
    assert waited(watching, -1) < SOON


def test_many_events_end_one_wait(folder: Path) -> None:
    watching = observing(folder)
    for number in range(200):
        arrive(folder, str(number))
    assert watching.wait(LONG)
    assert not watching.wait(0)


def test_when_the_kernel_has_dropped_events_the_wait_ends_after_the_last_of_them(folder: Path) -> None:
    watching = observing(folder)
    overflow(folder)
    arrive(folder, "last")  # of this one there is no event
    assert watching.wait(LONG)
    assert (folder / "last").exists()
    assert not watching.wait(0)
    arrive(folder, "next")
    assert watching.wait(LONG)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of two groups."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def following(*folders: Path) -> Watch:
    """A watch of groups, each of one folder of its name."""
    watching = Watch()
    for folder in folders:
        assert watching.follow(folder.name, [str(folder)])
    return watching


def changed(watching: Watch) -> set[str] | None:
    watching.wait(0)
    found = watching.changed()
    return None if found is None else set(found)


def test_a_watch_tells_in_which_groups_something_happened(two: tuple[Path, Path]) -> None:
    watching = following(*two)
    assert changed(watching) == set()
    arrive(two[0], "x")
    arrive(two[0], "y")
    assert changed(watching) == {"a"}
    assert changed(watching) == set()
    for folder in two:
        (folder / "z").touch()
    assert changed(watching) == {"a", "b"}


def test_a_group_has_folders_that_something_leaves_but_no_drafts(two: tuple[Path, Path]) -> None:
    watching = Watch()
    assert watching.follow("both", [str(two[0])], [str(two[1])])
    for name in ("left", ".draft"):
        (two[1] / name).touch()
    (two[1] / ".draft").unlink()
    assert changed(watching) == set()
    (two[1] / "left").unlink()
    assert changed(watching) == {"both"}


def test_a_group_that_ended_and_a_folder_that_it_has_no_longer_are_not_told_of(two: tuple[Path, Path]) -> None:
    watching = following(*two)
    assert not watching.follow("a")
    arrive(two[0], "x")
    assert changed(watching) == set()
    assert watching.follow("b", [str(two[0])])
    changed(watching)  # the kernel tells that the other is watched no more
    arrive(two[1], "y")
    assert changed(watching) == set()
    arrive(two[0], "z")
    assert changed(watching) == {"b"}


def test_two_groups_may_have_one_folder(two: tuple[Path, Path]) -> None:
    link = two[0].parent / "link"
    link.symlink_to(two[0])
    watching = following(two[0], link)
    arrive(two[0], "x")
    assert changed(watching) == {"a", "link"}
    assert not watching.follow("a")
    arrive(two[0], "y")
    assert changed(watching) == {"link"}


def test_a_folder_of_a_group_that_was_replaced_is_new_when_the_group_is_followed_again(two: tuple[Path, Path]) -> None:
    watching = following(*two)
    assert not watching.follow("a", [str(two[0])])
    two[0].rename(two[0].parent / "old")
    two[0].mkdir()
    assert watching.follow("a", [str(two[0])])
    changed(watching)
    arrive(two[0], "x")
    assert changed(watching) == {"a"}


def test_a_folder_of_a_group_that_is_missing_is_new_once_it_is_there(two: tuple[Path, Path]) -> None:
    watching = Watch()
    late = two[0] / "late"
    assert watching.follow("a", [str(two[0]), str(late)])
    assert not watching.follow("a", [str(two[0]), str(late)])
    late.mkdir()
    assert watching.follow("a", [str(two[0]), str(late)])


def test_when_the_kernel_has_dropped_events_any_group_may_have_changed(two: tuple[Path, Path]) -> None:
    watching = following(*two)
    overflow(two[0])
    assert changed(watching) is None
    assert changed(watching) == set()


def test_where_no_more_folders_can_be_watched_any_group_may_have_changed(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watching = following(two[0])

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "inotify watch limit reached")

    monkeypatch.setattr(watching._events, "add", refuse)
    assert watching.follow("b", [str(two[1])]), "what was watched is to be looked at, too"
    assert changed(watching) is None and not watching.events
    assert not watching.follow("a", [str(two[0])])
    assert caplog.text.count("inotify watch limit reached") == 1


def test_one_group_without_events_makes_it_poll_all(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "events_reach", lambda path: path == str(two[0]))
    watching = following(*two)
    assert changed(watching) is None and not watching.events


def test_groups_on_other_systems_may_all_have_changed(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("watchdog.observers")
    monkeypatch.setattr(sys, "platform", "another")
    watching = Watch()
    assert watching.follow("both", [str(two[0])], [str(two[1])])
    arrive(two[0], "x")
    assert waited(watching, LONG) < SOON
    assert watching.changed() is None
    assert not watching.follow("both")


@pytest.mark.parametrize("poll", [False, True])
def test_anybody_can_wake_the_one_who_waits(folder: Path, poll: bool) -> None:
    watching = Watch(str(folder), poll=poll)
    watching.observe()
    waker = threading.Timer(0.05, watching.wake)
    waker.start()
    assert waited(watching, LONG) < SOON
    waker.join()
    watching.wake()
    assert watching.wait(LONG)


def test_waking_often_blocks_nobody(folder: Path) -> None:
    watching = Watch(str(folder), poll=True)
    for _ in range(100_000):  # more than a pipe holds
        watching.wake()
    assert watching.wait(LONG)
    assert not watching.wait(0)


def test_a_folder_that_was_made_anew_is_watched_from_the_next_timeout_on(folder: Path) -> None:
    watching = observing(folder)
    os.rename(folder, folder.parent / "old")
    assert not watching.wait(0)  # it is not there: that is for who looks to find
    folder.mkdir()
    assert not watching.wait(0)
    arrive(folder, "a")
    assert watching.wait(LONG)


def test_a_watch_that_nobody_refers_to_leaves_no_file_open(folder: Path) -> None:
    observing(folder)
    before = open_files()
    watching = observing(folder)
    wake = watching.wake
    assert open_files() > before
    del watching
    wake()  # who wakes it late wakes nobody else
    del wake
    assert open_files() == before


def test_polling_waits_no_longer_than_its_pause(folder: Path) -> None:
    watching = Watch(str(folder), poll=True)
    assert not watching.observe() and not watching.events
    assert waited(watching, LONG) < SOON
    assert waited(watching, 0.0) < SOON


def test_where_events_cannot_be_had_it_polls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(watch, "_Inotify", refuse)
    monkeypatch.setattr(watch, "_observed", refuse)
    watching = Watch(str(folder))
    assert not watching.observe()
    for _ in range(10):
        assert waited(watching, LONG) < SOON
    assert caplog.text.count("inotify instance limit reached") == 1


def test_a_folder_that_is_not_there_gives_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.log, "disabled", True)  # pytest would keep the error, and so what it came from
    before = open_files()
    assert not Watch(str(tmp_path / "none")).observe()
    assert open_files() == before


def test_other_systems_have_the_events_of_watchdogs_observer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("watchdog.observers")  # which looks at the platform, too
    monkeypatch.setattr(sys, "platform", "another")
    watching = observing(folder)
    arrive(folder, "a")
    assert waited(watching, LONG) < SOON
    watching.wake()
    assert watching.wait(LONG)
    (folder.parent / "other").mkdir()
    leaving = Watch(str(folder.parent / "other"), leaving=[str(folder)])
    assert leaving.observe()
    (folder / "a").unlink()
    assert waited(leaving, LONG) < SOON


def test_a_watch_among_events_is_quiet(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for round_ in range(20):
        watching = observing(folder)
        for number in range(20):
            arrive(folder, f"{round_}-{number}")
        watching.wait(0)
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
