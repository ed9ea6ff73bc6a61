"""What somebody put into `.dropq/staged/` by hand: a sweep follows none of it, waits for none, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import Clock, reopened, take

from dropq import Message, Queue, Root, Unavailable
from dropq.lifecycle.reasons import Reasons
from dropq.staging import fan_out
from dropq.storage import reading, system_calls
from dropq.upkeep import bulk
from dropq.upkeep.bulk import Outcome

DAY = 86400.0

Make = Callable[[Path], object]


@pytest.fixture(params=["renameat2", "no renameat2"], autouse=True)
def either_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on a file system that renames without replacing, then as on one that cannot, such as NFS."""
    if request.param == "no renameat2":
        monkeypatch.setattr(system_calls, "rename_noreplace", refuse)


def refuse(source: str, destination: str) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Queue:
    return Root.create(tmp_path / "root", clock=clock).create_queue("orders", redelivery_delay="0s", durability="none")


class Outside(NamedTuple):
    """What lies outside of the queue, and is never touched."""

    file: Path
    folder: Path

    def is_as_it_was(self) -> bool:
        return self.file.read_bytes() == b"outside" and os.listdir(self.folder) == ["file"]


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    (tmp_path / "file").write_bytes(b"outside")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    return Outside(tmp_path / "file", tmp_path / "folder")


def a_link(path: Path) -> None:
    path.symlink_to("../../../../../file")


def a_link_to_a_folder(path: Path) -> None:
    path.symlink_to("../../../../../folder")


def a_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


ODD = [a_link, a_link_to_a_folder, os.mkfifo, os.mkdir, a_full_folder]


def staged(queue: Queue) -> Message:
    """A held bundle of which record 1 is acknowledged, record 2 is rejected, and 3 and 4 are left."""
    queue.send(b"1\n2\n3\n4\n", type="text")
    message = take(queue)
    records = message.records()
    next(records).ack()
    next(records).reject("two")
    return message


def committed(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commit a bundle, and move no part; return its staged folder."""
    message = staged(queue)
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        message.release()
    (folder,) = Path(queue.layout.staged).iterdir()
    return folder


def part(folder: Path, state: str) -> Path:
    """The part of a bundle for a state."""
    return next(path for path in folder.iterdir() if f",{state}~" in path.name)


def sweep(queue: Queue, clock: Clock) -> None:
    """Sweep now, and when everything is old."""
    for _ in range(3):
        reopened(queue).sweep()
        clock.advance(2 * DAY)


def bodies(queue: Queue) -> dict[str, list[bytes]]:
    """The bodies of the messages in each state."""
    states = ("target", "delayed", "processing", "processed", "error", "expired")
    found = {state: sorted(message.body for message in queue.browse(state)) for state in states}
    return {state: there for state, there in found.items() if there}


def found(queue: Queue) -> set[str]:
    """The kinds that fsck finds."""
    return {finding.kind for finding in reopened(queue).fsck()}


ALL = {"target": [b"3\n4\n"], "processed": [b"1"], "error": [b"2\n"]}


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("state", ["error", "target", "processed"])
def test_in_place_of_a_part_nothing_odd_is_moved_and_the_others_are(
    queue: Queue, clock: Clock, outside: Outside, monkeypatch: pytest.MonkeyPatch, state: str, make: Make
) -> None:
    path = part(committed(queue, monkeypatch), state)
    os.rename(path, kept := outside.file.with_name("kept"))
    make(path)
    sweep(queue, clock)
    assert bodies(queue) == {other: there for other, there in ALL.items() if other != state}
    assert (path.parent / "whole").read_bytes() == b"1\n2\n3\n4\n"
    assert outside.is_as_it_was() and found(queue) == {"not-staged", "unfinished-commit"}
    assert [finding.repaired for finding in queue.fsck(repair=True) if finding.kind == "not-staged"] == [True]
    os.rename(kept, path)
    sweep(queue, clock)
    assert bodies(queue) == ALL and found(queue) == set() and outside.is_as_it_was()


@pytest.mark.parametrize("make", ODD)
def test_in_place_of_a_reason_anything_may_lie_and_the_parts_are_moved(
    queue: Queue, clock: Clock, outside: Outside, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    path = committed(queue, monkeypatch) / "0.reason"
    path.unlink()
    make(path)
    sweep(queue, clock)
    assert bodies(queue) == ALL and os.listdir(queue.layout.staged) == []
    assert [message.reason for message in queue.browse("error")] == [None]
    assert outside.is_as_it_was() and found(queue) == {"damaged-reason"}


@pytest.mark.parametrize("make", ODD)
def test_the_reason_of_no_part_keeps_no_part_from_its_place(
    queue: Queue, clock: Clock, outside: Outside, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    make(committed(queue, monkeypatch) / "9.reason")
    sweep(queue, clock)
    assert bodies(queue) == ALL
    queue.fsck(repair=True)
    sweep(queue, clock)
    assert bodies(queue) == ALL and found(queue) == set() and outside.is_as_it_was()
    assert os.listdir(queue.layout.staged) == []


def changed(**fields: object) -> Make:
    """Write other fields into a reason."""
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "spoil",
    [
        changed(name="../../../../file"),
        changed(name=["x"]),
        lambda path: os.truncate(path, 100 << 20),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.write_bytes(b"\xff\0"),
    ],
)
def test_a_reason_that_is_about_something_else_or_cannot_be_read_counts_for_nothing(
    queue: Queue, clock: Clock, outside: Outside, monkeypatch: pytest.MonkeyPatch, spoil: Make
) -> None:
    spoil(committed(queue, monkeypatch) / "0.reason")
    sweep(queue, clock)
    assert bodies(queue) == ALL and os.listdir(queue.layout.staged) == []
    (bad,) = queue.browse("error")
    assert bad.reason is None and outside.is_as_it_was()
    assert len(queue.requeue([bad.id])) == 1


def test_a_reason_of_a_part_counts_by_its_name_where_a_copy_gave_the_part_another_inode(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(inode=1)(committed(queue, monkeypatch) / "0.reason")
    sweep(queue, clock)
    (bad,) = queue.browse("error")
    assert bad.reason is not None and bad.reason["detail"] == "two"


@pytest.mark.parametrize("make", [a_link, a_link_to_a_folder, os.mkfifo])
def test_what_has_the_name_of_the_message_and_is_none_keeps_the_parts_until_it_is_set_aside(
    queue: Queue, clock: Clock, outside: Outside, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    folder = committed(queue, monkeypatch)
    os.rename(folder / "whole", kept := outside.file.with_name("kept"))
    make(folder / "whole")
    before = set(os.listdir(folder))
    sweep(queue, clock)
    assert set(os.listdir(folder)) == before and bodies(queue) == {} and outside.is_as_it_was()
    assert found(queue) == {"not-staged"} and queue.counts()["processing"] == 0
    queue.fsck(repair=True)
    os.rename(kept, folder / "whole")
    sweep(queue, clock)
    assert bodies(queue) == ALL and found(queue) == set()


@pytest.mark.parametrize("make", ODD)
def test_a_holder_commits_whatever_has_the_name_of_the_message_in_its_folder(
    queue: Queue, clock: Clock, outside: Outside, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    message = staged(queue)
    commit = fan_out._commit
    folders: list[str] = []

    def after_another(context: object, claim: object, folder: str) -> bool:
        if not folders:
            make(Path(folder) / "whole")
            reopened(queue).sweep()
        folders.append(folder)
        return commit(context, claim, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(fan_out, "_commit", after_another)
    message.release()
    assert bodies(queue) == ALL and outside.is_as_it_was()
    sweep(queue, clock)
    assert bodies(queue) == ALL and outside.is_as_it_was()


@pytest.mark.parametrize("name", ["..,error~x", "1,etc~x", "1,processing~x", "7,error~..", "7,target~.", "01,error~x"])
def test_a_file_that_is_no_part_by_its_name_stays_and_is_found(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stray = committed(queue, monkeypatch) / name
    stray.write_bytes(b"stray")
    sweep(queue, clock)
    assert bodies(queue) == ALL and stray.read_bytes() == b"stray"
    assert found(queue) == {"not-staged", "unfinished-commit"}
    queue.fsck(repair=True)
    sweep(queue, clock)
    assert bodies(queue) == ALL and found(queue) == set()
    assert (Path(queue.layout.set_aside, ".dropq/staged", stray.parent.name, name)).read_bytes() == b"stray"


@pytest.mark.parametrize("name", ["aaaaaaaaaa-1.abcdef,target~..", "aaaaaaaaaa-1.abcdef,error~x", "../x", "notes"])
def test_a_folder_that_is_no_staged_folder_by_its_name_is_left_alone(
    queue: Queue, clock: Clock, outside: Outside, name: str
) -> None:
    folder = Path(queue.layout.staged, name.replace("/", "%2F"))
    folder.mkdir(parents=True)
    (folder / "whole").write_bytes(b"x")
    sweep(queue, clock)
    assert os.listdir(folder) == ["whole"] and bodies(queue) == {} and outside.is_as_it_was()
    assert found(queue) == {"not-staged"} and queue.counts()["processing"] == 0


def test_a_link_in_place_of_a_staged_folder_is_not_followed(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = committed(queue, monkeypatch)
    os.rename(folder, moved := tmp_path / "moved")
    folder.symlink_to(moved)
    before = set(os.listdir(moved))
    sweep(queue, clock)
    assert set(os.listdir(moved)) == before and bodies(queue) == {}
    assert found(queue) == {"not-staged"} and queue.counts()["processing"] == 0


@pytest.mark.parametrize("make", ODD)
def test_what_a_dead_holder_staged_goes_and_nothing_behind_its_links(
    queue: Queue, clock: Clock, outside: Outside, make: Make
) -> None:
    folder = Path(queue.layout.staged, "aaaaaaaaaa-1.abcdef,unlink~4.x.B")
    folder.mkdir(parents=True)
    (folder / "0,target~4.x.B").write_bytes(b"never committed")
    make(folder / "1,target~4.y.B")
    sweep(queue, clock)
    queue.fsck(repair=True)
    sweep(queue, clock)
    assert os.listdir(queue.layout.staged) == [] and bodies(queue) == {} and outside.is_as_it_was()


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize(
    "odd", ["reassembly/error,0123456789abcdef/.draft", "joining/0123456789abcdef,error~4.x.B....text/.whole"]
)
def test_parts_go_back_where_something_odd_lies_in_place_of_what_was_put_together(
    queue: Queue, clock: Clock, outside: Outside, make: Make, odd: str
) -> None:
    path = Path(queue.layout.private, odd)
    path.parent.mkdir(parents=True)
    (path.parent / "4.x.B....text.JMS_dropq_firstI=0000000002").write_bytes(b"2\n")
    make(path)
    sweep(queue, clock)
    assert bodies(queue) == {"error": [b"2\n"]} and found(queue) == set() and outside.is_as_it_was()


@pytest.mark.parametrize("verb", ["requeue", "purge", "move"])
def test_a_command_waits_until_what_was_committed_has_arrived_and_says_what_it_waits_for(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    folder = committed(queue, monkeypatch)
    monkeypatch.setattr(bulk, "PATIENCE", 0.1)
    error, arguments = Path(queue.layout.error), {"move": (queue.root.create_queue("other"),)}.get(verb, ())
    call: Callable[[], list[Outcome]] = partial(getattr(queue, verb), *arguments, state="error")
    error.rmdir()
    error.touch()
    with pytest.raises(Unavailable, match=f"{re.escape(str(folder))}: .*no message was touched"):
        call()
    error.unlink()
    error.mkdir()
    monkeypatch.setattr(bulk, "PATIENCE", 60.0)
    assert len(call()) == 1
    assert "error" not in bodies(queue)


def test_a_command_waits_for_no_part_of_another_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = queue.root.create_queue("goal")
    queue.add_selector("copies", to="goal", op="copy")
    queue.send("copied")
    target = Path(goal.layout.target)

    target.rename(target.with_name("away"))
    target.touch()
    queue.route()
    assert any(reading.exists(f"{folder}/whole") for folder in Path(queue.layout.staged).iterdir())
    queue.send("another")
    monkeypatch.setattr(bulk, "PATIENCE", 60.0)
    assert len(queue.purge(state="target")) == 1


def test_a_part_that_another_roll_forward_moved_first_keeps_its_reason(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(queue, monkeypatch)
    adopt, others = Reasons.adopt, iter([reopened(queue)])

    def then_another_sweeps(self: Reasons, *args: Any) -> None:
        adopt(self, *args)
        for other in others:
            other.sweep()

    monkeypatch.setattr(Reasons, "adopt", then_another_sweeps)
    queue.sweep()
    (message,) = queue.browse("error")
    assert message.reason is not None and message.reason["detail"] == "two"
    assert bodies(queue) == ALL
    assert len(os.listdir(f"{queue.layout.reasons}/error")) == 1
