"""Foreign files called the same never overwrite one another, whatever becomes of them and whatever the file system can.

Every test counts the bodies after every step with plain system calls: each must lie in exactly one state folder.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FOLDERS, FRESH, Clock, base, drop, first_and_long, make_queue, names_in, stand_in_for_os, where
from hypothesis import given, settings
from hypothesis import strategies as st

from dropq import Message, Queue
from dropq.format import names
from dropq.storage import system_calls
from dropq.storage.files import Storage

NAME = "report.csv"
A, B = b"the first", b"the second"
KEPT = ("processed", "error", "expired")

ACTIONS: dict[str, Callable[[Message], None]] = {
    "ack": lambda message: message.ack(),
    "nack": lambda message: message.nack(),
    "fail": lambda message: message.fail("f"),
    "reject": lambda message: message.reject("r"),
    "expire": lambda message: message.expire(),
    "release": lambda message: message.release(counted=False),
}
ENDS = {"ack": "processed", "nack": "target", "fail": "error", "reject": "error", "expire": "expired"}


def kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """renameat2 knows no flags, as on NFS and most FUSE file systems."""

    def refused(source: str, destination: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    monkeypatch.setattr(system_calls, "rename_noreplace", refused)


def rename_refuses(monkeypatch: pytest.MonkeyPatch, number: int = errno.EEXIST) -> None:
    """A plain rename refuses to replace a file, as on HDFS mounts; modes are not kept, renameat2 knows no flags."""
    kernel_refuses(monkeypatch)

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return {"rename": self.rename_file, "open": self.open_file}.get(name) or getattr(os, name)

        def rename_file(self, source: str, destination: str) -> None:
            os.lstat(source)
            if os.path.lexists(destination):
                raise OSError(number, os.strerror(number), source, None, destination)
            os.rename(source, destination)

        def open_file(self, path: str, flags: int, mode: int = 0o777) -> int:
            return os.open(path, flags, mode | 0o644)

    stand_in_for_os(monkeypatch, Refusing())


FILE_SYSTEMS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "noreplace": lambda monkeypatch: None,
    "no noreplace": kernel_refuses,
    "rename never replaces": rename_refuses,
    "rename never replaces and says EIO": lambda monkeypatch: rename_refuses(monkeypatch, errno.EIO),
}


@pytest.fixture(params=FILE_SYSTEMS)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    FILE_SYSTEMS[name](monkeypatch)
    return name


def bodies(queue: Queue) -> list[bytes]:
    """All files of all state folders, reservations included: nothing may be left of them."""
    found = []
    for part in FOLDERS.values():
        folder = base(queue) / part
        found += [path.read_bytes() for path in folder.iterdir() if path.is_file()] if folder.exists() else []
    return sorted(found)


def hold_both(queue: Queue, first: bytes, second: bytes) -> dict[bytes, Message]:
    """Two files of one name, held at once: the second is dropped when the first has been claimed."""
    held = {}
    for body in (first, second):
        drop(queue, NAME, body)
        message = queue.receive()
        assert message is not None
        assert (message.body, message.id) == (body, NAME)
        held[body] = message
    assert bodies(queue) == sorted([first, second])
    return held


def take_both(queue: Queue) -> dict[bytes, Message]:
    taken = {}
    for _ in range(2):
        message = queue.receive()
        assert message is not None
        assert message.id == NAME
        taken[message.body] = message
    assert queue.receive() is None
    return taken


def assert_names(queue: Queue) -> None:
    """Of the files in a folder that keeps names one has its own, the others a coded form of it."""
    for state in KEPT:
        found = names_in(queue, state)
        if found:
            assert NAME in found, (state, found)
        for other in found:
            assert names.parse(other).id == NAME


def bring_back(queue: Queue) -> None:
    for state in KEPT:
        for outcome in queue.requeue(state=state):
            assert outcome.ok, outcome


@pytest.mark.parametrize("first", first_and_long(ACTIONS, 6))
def test_two_files_called_the_same_survive_every_pair_of_ends_again_and_again(
    tmp_path: Path, file_system: str, first: str
) -> None:
    rounds = itertools.product(ACTIONS, ("ack", "reject"), ("reject", "expire"))
    for number, (second, again, other) in enumerate(rounds):
        queue = make_queue(tmp_path / str(number), clock=Clock())
        held = hold_both(queue, A, B)
        for body, action in ((A, first), (B, second)):
            ACTIONS[action](held[body])
            assert bodies(queue) == [A, B], (first, second)
            assert_names(queue)
        bring_back(queue)
        assert where(queue) == {"target": [A, B]}
        taken = take_both(queue)
        for body, action in ((B, again), (A, other)):
            ACTIONS[action](taken[body])
            assert bodies(queue) == [A, B], (first, second, again, other)
            assert_names(queue)
        queue.close()


@pytest.mark.parametrize("end", ["ack", "fail", "reject", "expire"])
def test_many_files_called_the_same_all_come_to_one_folder(tmp_path: Path, file_system: str, end: str) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    expected = []
    for number in range(12):
        body = f"body {number}".encode()
        drop(queue, NAME, body)
        message = queue.receive()
        assert message is not None
        ACTIONS[end](message)
        expected.append(body)
        assert bodies(queue) == sorted(expected)
    assert len(names_in(queue, ENDS[end])) == 12
    assert_names(queue)
    if end != "ack":
        assert [found.reason is not None for found in queue.browse(ENDS[end])] == [True] * 12
    queue.close()


@pytest.mark.parametrize("state", KEPT)
def test_a_file_comes_back_under_its_own_name_to_each_folder(tmp_path: Path, file_system: str, state: str) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    drop(queue, NAME, A)
    for _ in range(3):
        for action in ("nack", {"processed": "ack", "error": "reject", "expired": "expire"}[state]):
            message = queue.receive()
            assert message is not None
            ACTIONS[action](message)
        assert names_in(queue, state) == [NAME]
        os.rename(base(queue) / state / NAME, base(queue) / "target" / NAME)
    queue.close()


@pytest.mark.parametrize("state", KEPT)
def test_a_file_that_a_script_put_there_is_not_overwritten(tmp_path: Path, file_system: str, state: str) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    drop(queue, NAME, A)
    message = queue.receive()
    assert message is not None
    (base(queue) / state / NAME).write_bytes(B)
    ACTIONS[{"processed": "ack", "error": "reject", "expired": "expire"}[state]](message)
    assert bodies(queue) == [A, B]
    assert (base(queue) / state / NAME).read_bytes() == B
    queue.close()


def test_a_mover_that_comes_between_a_reservation_and_its_rename_finds_the_name_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Storage("none")
    first, second, goal = (str(tmp_path / name) for name in ("first", "second", "goal"))
    for path in (first, second):
        Path(path).write_text(path)
    kernel_refuses(monkeypatch)
    refused: list[str] = []

    class Meanwhile:
        def __getattr__(self, name: str) -> Any:
            return self.rename_file if name == "rename" else getattr(os, name)

        def rename_file(self, source: str, destination: str) -> None:
            if "/.gone-" in source:  # what is tried first
                return os.rename(source, destination)
            stand_in_for_os(monkeypatch, os)
            with pytest.raises(FileExistsError):
                store.move(second, goal)
            refused.append(second)
            os.rename(source, destination)

    stand_in_for_os(monkeypatch, Meanwhile())
    store.move(first, goal)
    assert refused == [second]
    assert (Path(goal).read_text(), Path(second).read_text()) == (first, second)


@pytest.mark.parametrize("claimed", [False, True])
def test_files_called_the_same_expire_side_by_side(tmp_path: Path, file_system: str, claimed: bool) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, timing=FRESH, clock=clock, expiration="1h")
    hold_both(queue, A, B)
    if not claimed:
        queue.close()
    clock.advance(7200)
    queue.sweep()
    clock.advance(7200)
    queue.sweep()
    if not claimed:
        assert where(queue) == {"expired": [A, B]}
    assert bodies(queue) == [A, B]
    assert_names(queue)
    queue.close()


def test_lost_leases_of_files_called_the_same_bring_both_back(tmp_path: Path, file_system: str) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, timing=FRESH, clock=clock, lease_period="5s")
    hold_both(queue, A, B)
    for _ in range(3):
        clock.advance(6)
        assert queue.sweep().lapsed == 2
        assert bodies(queue) == [A, B]
        take_both(queue)
    queue.close()


def test_a_hard_link_to_a_held_file_is_another_message(tmp_path: Path, file_system: str) -> None:
    """Two names of one inode: a rename of one over the other would do nothing, and say nothing."""
    queue = make_queue(tmp_path, timing=FRESH)
    drop(queue, NAME, A)
    message = queue.receive()
    assert message is not None
    for state in KEPT:
        os.link(message.path, base(queue) / state / NAME)
    message.ack()
    assert bodies(queue) == [A] * 4
    assert where(queue) == {"processed": [A, A], "error": [A], "expired": [A]}
    bring_back(queue)
    assert where(queue) == {"target": [A] * 4}
    queue.close()


def test_long_files_called_the_same_keep_their_names_too(tmp_path: Path, file_system: str) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    name = "ä" * 120 + ".csv"
    held = []
    for body in (A, B):
        drop(queue, name, body)
        message = queue.receive()
        assert message is not None
        held.append(message)
    for message in held:
        message.nack()
    for action in ("reject", "reject"):
        again = queue.receive()
        assert again is not None
        assert again.id == name
        ACTIONS[action](again)
    assert bodies(queue) == [A, B]
    assert name in names_in(queue, "error")
    queue.requeue()
    assert {found.id for found in queue.browse()} == {name}
    queue.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), st.integers(0, 1)),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 3)),
        st.tuples(st.just("requeue"), st.integers(0, 2)),
        st.tuples(st.just("mv"), st.integers(0, 8)),
        st.tuples(st.just("lapse"), st.just(0)),
        st.tuples(st.just("sweep"), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.crashes
def test_no_sequence_of_verbs_and_of_mv_loses_or_doubles_a_body(kind: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(steps=STEPS)
    def run(steps: list[tuple[str, int]]) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
            FILE_SYSTEMS[kind](monkeypatch)
            _play(make_queue(Path(folder), clock=Clock(), timing=FRESH, lease_period="1h"), steps)

    run()


def _play(queue: Queue, steps: list[tuple[str, int]]) -> None:
    """Play steps on files of two names; after each step every body that was dropped lies in one place."""
    expected: list[bytes] = []
    held: list[Message] = []
    clock = queue.root.clock
    assert isinstance(clock, Clock)
    for verb, choice in steps:
        if verb == "drop":
            name = (NAME, "4.other~.B")[choice]
            if not (base(queue) / "target" / name).exists():  # a script's names are the script's to keep apart
                expected.append(f"{name} {len(expected)}".encode())
                drop(queue, name, expected[-1])
        elif verb == "take":
            message = queue.receive()
            held += [message] if message is not None else []
        elif verb in ACTIONS and held:
            ACTIONS[verb](held.pop(choice % len(held)))
        elif verb == "requeue":
            queue.requeue(state=KEPT[choice])
        elif verb == "mv":
            _move_by_hand(queue, choice)
        elif verb == "lapse":
            clock.advance(4000)
            queue.sweep()
            held.clear()
        elif verb == "sweep":
            queue.sweep()
        assert bodies(queue) == sorted(expected), (verb, choice)
    queue.close()
    assert bodies(queue) == sorted(expected)


def _move_by_hand(queue: Queue, choice: int) -> None:
    """`mv STATE/X target/`, as a careful script does it: not over another X."""
    state = KEPT[choice % 3]
    found = names_in(queue, state)
    if found:
        name = found[choice % len(found)]
        if not (base(queue) / "target" / name).exists():
            os.rename(base(queue) / state / name, base(queue) / "target" / name)
