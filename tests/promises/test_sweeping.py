"""A sweep goes on past what it cannot do, and reports what it had to leave."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import Clock, Make, archive, names_in, take, where

from dropq import Queue, StorageError
from dropq.lifecycle.ages import DAY, HOUR, MINUTE
from dropq.routing import Router
from dropq.storage import reading
from dropq.storage.files import Storage
from dropq.upkeep.steps import ROOT_STEPS, STEPS


def full_disk(path: str, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@pytest.mark.parametrize("held", [False, True])
def test_a_reason_that_cannot_be_written_keeps_no_sweep_from_pruning(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    queue = make(max_history=1)
    archive(queue, b"1", b"2", b"3")
    queue.send(b"late", expires_in="1s")
    with queue.subscribe() as subscription:
        if held:
            subscription.receive()
        clock.advance(2)
        with monkeypatch.context() as patch:
            patch.setattr(queue.context.storage, "write_small", full_disk)
            assert queue.sweep().pruned == 2
        assert where(queue)["processing" if held else "target"] == [b"late"]
        assert queue.sweep().expired == 1


def test_a_sweep_prunes_before_it_does_what_needs_room(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(max_history=1)
    archive(queue, b"1", b"2")
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    write_small = queue.context.storage.write_small

    def nearly_full(path: str, data: bytes) -> None:
        if len(names_in(queue, "processed")) > 1:
            full_disk(path, data)
        write_small(path, data)

    monkeypatch.setattr(queue.context.storage, "write_small", nearly_full)
    assert queue.sweep().expired == 1


def test_a_folder_among_the_consumers_does_not_end_a_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    os.makedirs(f"{queue.layout.consumers}/no-consumer")
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    assert queue.sweep().expired == 1


def test_a_leftover_that_cannot_be_removed_does_not_end_a_sweep(make: Make, clock: Clock) -> None:
    queue = make()
    os.mkdir(f"{queue.layout.reasons}/error/no-reason")
    os.mkdir(f"{queue.layout.private}/.gone-1")
    Path(queue.layout.private, ".gone-1", "left").touch()
    Path(queue.layout.held, "a-0123456789-1").write_bytes(b"")
    os.mkdir(f"{queue.layout.held}/a-0123456789-2")
    clock.advance(2 * 86_400)
    report = queue.sweep()
    assert (report.leftovers, report.refused) == (3, 1)
    assert os.listdir(queue.layout.held) == []
    assert not os.path.exists(f"{queue.layout.private}/.gone-1")


def credits_of(queue: Queue) -> dict[str, set[str]]:
    """What lies in the folders of credits of a queue, by token."""
    found = Path(queue.layout.credits)
    return {folder.name: set(os.listdir(folder)) for folder in found.iterdir()} if found.exists() else {}


def with_selector(queue: Queue) -> str:
    """Give a queue a selector whose message was settled; return its token."""
    downstream = queue.root.create_queue("downstream", durability="none")
    queue.add_selector("on", to="downstream")
    queue.send("a")
    queue.route()
    take(downstream).ack()
    (token,) = credits_of(queue)
    return token


def test_files_of_selectors_and_credits_that_were_not_finished_go_after_a_day(make: Make, clock: Clock) -> None:
    queue = make()
    token = with_selector(queue)
    queue.send("b")
    queue.route()
    (key,) = credits_of(queue)[token] - {".last"}
    selectors, credits = Path(queue.layout.selectors), Path(queue.layout.credits, token)
    unfinished = [selectors / ".new.0123456789ab.tmp", credits / "..last.0123456789ab.tmp"]
    kept = [selectors / ".hidden.toml", credits / ".0123456789ab.txt", selectors / ".dir.0123456789ab.tmp"]
    for path in (*unfinished, *kept[:2]):
        path.touch()
    kept[2].mkdir()
    clock.advance(3600)
    assert queue.sweep().leftovers == 0
    clock.advance(86_400)
    report = queue.sweep()
    assert (report.leftovers, report.refused) == (2, 0)
    assert not any(path.exists() for path in unfinished) and all(path.exists() for path in kept)
    assert credits_of(queue) == {token: {".last", key, kept[1].name}}


def test_the_folder_of_credits_of_a_selector_that_was_removed_by_hand_goes_once_it_is_empty(
    make: Make, clock: Clock
) -> None:
    queue = make()
    token = with_selector(queue)
    queue.send("b")
    queue.route()
    os.unlink(f"{queue.layout.selectors}/on.toml")
    clock.advance(86_400 + 60)
    assert queue.sweep().leftovers == 0 and len(credits_of(queue)[token]) == 2, "a message is out under a credit"
    downstream = queue.root.queue("downstream")
    take(downstream).ack()
    assert credits_of(queue) == {token: {".last"}}
    assert queue.sweep().leftovers == 1
    assert credits_of(queue) == {}
    assert not queue.fsck()


@pytest.mark.parametrize("name", ["on.toml", ".on.removed", "renamed.toml"])
def test_the_folder_of_credits_of_a_token_that_a_file_has_stays(make: Make, clock: Clock, name: str) -> None:
    queue = make()
    before = with_selector(queue)
    os.rename(f"{queue.layout.selectors}/on.toml", f"{queue.layout.selectors}/{name}")
    clock.advance(10 * 86_400)
    queue.sweep()
    if name == ".on.removed":
        assert credits_of(queue) == {}, "the removal was finished"
    else:
        assert credits_of(queue) == {before: {".last"}}


def test_a_selector_that_is_put_back_after_its_folder_went_spends_as_many_credits_as_it_has(
    make: Make, clock: Clock
) -> None:
    queue = make()
    token = with_selector(queue)
    router = Router(queue.context, sweep=None)
    queue.send("b")
    router.one_pass()  # this one has spent the last credit
    take(queue.root.queue("downstream")).ack()
    file = Path(queue.layout.selectors, "on.toml")
    away = file.rename(queue.root.path / "on.toml")
    clock.advance(10 * 86_400)
    assert queue.sweep().leftovers == 1
    away.rename(file)
    for body in ("c", "d"):
        queue.send(body)
    router.one_pass()
    assert queue.root.queue("downstream").counts()["target"] == 1
    assert len(credits_of(queue)[token] - {".last"}) == 1


def test_a_folder_of_credits_that_is_a_link_is_left_alone(make: Make, clock: Clock) -> None:
    queue = make()
    token = with_selector(queue)
    os.unlink(f"{queue.layout.selectors}/on.toml")
    elsewhere = queue.root.path / "elsewhere"
    os.rename(queue.layout.credits, elsewhere)
    os.symlink(elsewhere, queue.layout.credits)
    clock.advance(10 * 86_400)
    queue.sweep()
    assert os.listdir(elsewhere / token) == [".last"]


@pytest.mark.parametrize("folder", ["processing", "delayed", "target"])
def test_a_root_is_swept_over_a_queue_that_cannot_be_listed(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    queue = make()
    denied = queue.root.create_queue("another", durability="none").layout.folder(folder)
    queue.send(b"late", expires_in="1s")
    clock.advance(2)
    listing = reading.listing

    def refusing(path: str) -> Any:
        if path == denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listing(path)

    monkeypatch.setattr(reading, "listing", refusing)
    with pytest.raises(StorageError, match="the sweep did not come to its end"):
        queue.root.sweep()
    assert where(queue) == {"expired": [b"late"]}


def test_a_drain_gives_up_a_folder_that_does_not_become_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.storage.files.DRAIN_LIMIT", 0.02)
    tries = 0

    def refuse(path: str) -> None:
        nonlocal tries
        tries += 1
        assert tries < 1000, "it tries for ever, and without a pause"
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        Storage().drain(str(tmp_path))


def test_a_sweep_tells_what_it_had_to_leave(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.send_many([{"body": b"a", "delay": 1}, {"body": b"b", "delay": 1}])
    clock.advance(2)

    def refused(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "rename_guarded", refused)
        report = queue.sweep()
    assert (report.refused, report.total) == (2, 0)
    assert queue.sweep().delayed == 2


def test_the_protocol_says_how_old_is_what_each_step_removes() -> None:
    words = {MINUTE: "a minute", HOUR: "an hour", DAY: "a day", 7 * DAY: "7 days", 30 * DAY: "30 days"}
    paper = Path(__file__).parents[2].joinpath("docs", "protocol.md").read_text()
    rows = paper.partition("### What is removed")[2].partition("\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    said = {row: ages for step in (*STEPS, *ROOT_STEPS) for row, ages in step.ages.items()}
    for start, ages in said.items():
        (row,) = (row for row in rows if row.startswith(f"| {start}"))
        assert all(words[age] in row for age in ages), row
    for row in rows:
        assert row.startswith(tuple(f"| {start}" for start in said)) or not any(word in row for word in words.values())
