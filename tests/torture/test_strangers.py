"""The short form of the torture by strangers, and what it found."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Clock, base, make_queue, names_in, take, where

from dropq import DropqError, Queue, Root, StorageError
from torture import strangers
from torture.account import body
from torture.strangers import Canary, Case, Deed, Stranger, watch

DAY = 86_400
DEEP = b"[" * 100_000


def test_a_root_that_a_stranger_wrote_lets_no_verb_fail_but_by_errors_of_dropq(tmp_path: Path) -> None:
    row = strangers.stories(tmp_path, examples=14, number=1)
    assert row.good and row.cases, "\n".join(row.wrong)


def test_folders_that_are_replaced_while_in_use_cost_no_message(tmp_path: Path) -> None:
    row = strangers.replaced_folders(tmp_path)
    assert row.good and row.cases == len(strangers.REPLACED), row.wrong


def test_a_hundred_messages_are_received_among_many_strays(tmp_path: Path) -> None:
    row = strangers.many_strays(tmp_path, 600)
    assert row.good, row.wrong


def test_a_big_body_is_never_held_whole(tmp_path: Path) -> None:
    row = strangers.big_bodies(tmp_path, 256 << 20, ways=("cat", "open"))
    assert row.good and row.cases == 2, row.wrong


def test_a_body_that_is_held_whole_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strangers.WAYS, "whole", "queue.find('body').body")
    row = strangers.big_bodies(tmp_path, 128 << 20, ways=("whole",))
    assert len(row.wrong) == 1 and "whole of" in row.wrong[0]


# -- the rig can fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        (lambda queue, away: (away / "secret").write_text("x"), "outside the root was changed"),
        (lambda queue, away: (away / "secret").read_text(), "which is"),
        (lambda queue, away: os.listdir(base(queue) / "link"), "which is"),
        (lambda queue, away: os.rename(base(queue) / "link" / "secret", base(queue) / "x"), "os.rename"),
        (lambda queue, away: (away.parent / "beside").mkdir(), "os.mkdir"),
        (lambda queue, away: dict[str, str]()["no such key"], "KeyError"),
        (lambda queue, away: os.unlink(base(queue) / "target" / "m"), "lost: m0"),
        (lambda queue, away: signal.raise_signal(signal.SIGALRM), "hangs"),
    ],
)
def test_the_torture_sees_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Queue, Path], object], says: str
) -> None:
    queue = make_queue(tmp_path / "root")
    (tmp_path / "outside").mkdir()
    canary = Canary(tmp_path / "outside")
    (base(queue) / "link").symlink_to(canary.folder)
    stranger = Stranger(tmp_path / "root", canary.folder, "q")
    stranger.do([Deed("message", b"target/m")], [])
    monkeypatch.setitem(strangers.VERBS, "wrong", lambda queue: verb(queue, canary.folder))
    monkeypatch.setitem(strangers.REMOVERS, "nothing", lambda queue: None)
    case = Case(tmp_path / "root", canary)
    strangers.play(case, stranger, ["counts", "wrong"], None, "nothing")
    assert says in "\n".join(case.wrong)
    assert not watch().on


# -- what it found ---------------------------------------------------------------------------------------------------


def test_json_that_is_nested_without_end_is_damaged_and_no_fault(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path / "root", clock=clock, history_age="1h")
    queue.send(b"a", properties={"long": "x" * 300})
    (sidecar,) = Path(queue.root.layout.meta).glob("*.json")
    sidecar.write_bytes(DEEP)
    message = take(queue)
    message.reject("no")
    (reason,) = Path(queue.layout.reasons).rglob("*.json")
    reason.write_bytes(DEEP)
    (failed,) = queue.browse("error")
    assert failed.reason is None and failed.properties == {}
    job = base(queue) / "working" / ".job-x"
    job.mkdir()
    (job / "manifest.json").write_bytes(DEEP)
    (Path(queue.root.layout.meta) / ".unreferenced").write_bytes(DEEP)
    assert "damaged-reason" in {found.kind for found in queue.fsck()}
    clock.advance(2 * DAY)
    queue.root.sweep()
    assert (job / "manifest.json").exists()


def test_a_manifest_with_half_of_a_surrogate_pair_sends_the_rest(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    part = base(queue) / "working" / ".job-x" / "part"
    part.mkdir(parents=True)
    (part / "4.x.B").write_bytes(body("x"))
    attempts = {"part": ["\ud800", "4.x.B"], "\ud800": ["4.x.B"]}
    (part.parent / "manifest.json").write_text(json.dumps({"format": 1, "attempts": attempts}))
    queue.sweep()
    assert names_in(queue, "target") == ["4.x.B"]


def test_a_folder_among_the_metadata_does_not_end_a_sweep_of_the_root(tmp_path: Path) -> None:
    clock = Clock()
    root = make_queue(tmp_path / "root", clock=clock).root
    (Path(root.layout.meta) / "x.json").mkdir()
    for hours in (48, 2, 2):
        clock.advance(hours * 3600)
        root.sweep()
    assert (Path(root.layout.meta) / "x.json").is_dir()


def test_a_file_in_place_of_the_reasons_is_told_and_the_message_can_be_settled_when_it_is_gone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    message = take(queue)
    folder = base(queue) / ".dropq" / "reasons" / "error"
    folder.rmdir()
    folder.touch()
    with pytest.raises(StorageError, match="Not a directory"):
        message.fail("why")
    assert names_in(queue, "processing") != []
    folder.unlink()
    message.fail("why")
    assert where(queue)["error"] == [b"a"]


@pytest.mark.parametrize("folder", ["target", "processing", "error", ".dropq/delayed", ".dropq/consumers"])
def test_a_file_in_place_of_a_folder_is_told_by_an_error_of_dropq(tmp_path: Path, folder: str) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    path = base(queue) / folder
    if path.is_dir():
        os.rename(path, tmp_path / "old")
    path.touch()
    told = 0
    for verb in (
        queue.counts,
        queue.stats,
        queue.sweep,
        queue.fsck,
        lambda: list(queue.browse("error")),
        queue.receive,
        queue.close,
    ):
        try:
            verb()
        except DropqError:
            told += 1
    assert told
    path.unlink()
    if (tmp_path / "old").exists():
        os.rename(tmp_path / "old", path)
    fresh = Root(queue.root.path).queue("q")
    assert {message.body for state in ("target", "processing") for message in fresh.browse(state)} == {b"a"}


def test_a_moved_file_that_everybody_may_change_is_not_sent_as_such(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    source = tmp_path / "open"
    source.touch()
    source.chmod(0o666)
    queue.send_file(source, move=True)
    (message,) = queue.browse()
    assert stat.S_IMODE(os.stat(message.path).st_mode) == 0o664


def test_a_reason_of_a_stranger_is_about_no_file_of_elsewhere(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    (tmp_path / "elsewhere").touch()
    folder = Path(queue.layout.reasons) / "error"
    (folder / "x.json").write_text(json.dumps({"name": "../../../elsewhere", "inode": None}))
    assert [found.kind for found in queue.fsck()] == ["orphan-reason"]


def test_a_closing_subscription_says_what_becomes_of_what_it_holds(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    subscription = queue.subscribe()
    (base(queue) / "processing").rmdir()
    (base(queue) / "processing").touch()
    with pytest.raises(StorageError, match="returns with the next sweep"):
        subscription.close()
    (base(queue) / "processing").unlink()
    (base(queue) / "processing").mkdir()
    assert Root(queue.root.path).queue("q").sweep().total == 0
