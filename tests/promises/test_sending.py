"""Messages are sent by text, bytes, file, writer or in bulk: each whole, or not at all."""

from __future__ import annotations

import errno
import os
from enum import Enum
from pathlib import Path
from typing import IO, Any

import pytest
from helpers import VERBS, Make, base, gone_mount, take, where

from dropq import StorageError, Unavailable
from dropq.format.typed import Typed
from dropq.lifecycle.sending import Outlet
from dropq.storage.files import Storage


def test_a_writer_sends_on_a_clean_exit_and_discards_on_an_exception(make: Make) -> None:
    queue = make()
    with queue.writer(type="order", priority=7) as out:
        out.write(b"one ")
        out.write(b"two")
        assert "target" not in where(queue)
    with pytest.raises(ZeroDivisionError), queue.writer() as out:
        _write_half(out)
    assert where(queue) == {"target": [b"one two"]}
    message = take(queue)
    assert (message.type, message.priority) == ("order", 7)


def _write_half(out: IO[bytes]) -> None:
    out.write(b"half")
    raise ZeroDivisionError


def test_a_full_disk_in_a_writer_sends_nothing_and_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="full")

    def full(self: Storage, fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Storage, "sync_file", full)
    with pytest.raises(StorageError, match="not sent"), queue.writer() as out:
        out.write(b"a")
    assert where(queue) == {}


def test_send_file_copies_or_moves(make: Make, tmp_path: Path) -> None:
    queue = make()
    source = tmp_path / "report.csv"
    source.write_bytes(b"a")
    queue.send_file(source)
    assert source.read_bytes() == b"a"
    queue.send_file(source, move=True, type="csv")
    assert not source.exists()
    assert where(queue) == {"target": [b"a", b"a"]}


@pytest.mark.parametrize("kind", ["missing", "folder", "link to nothing"])
@pytest.mark.parametrize("move", [False, True])
def test_send_file_of_what_is_no_file_sends_nothing(make: Make, tmp_path: Path, kind: str, move: bool) -> None:
    queue = make()
    source = tmp_path / "source"
    if kind == "folder":
        source.mkdir()
    elif kind != "missing":
        source.symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"nothing was sent|was not sent"):
        queue.send_file(source, move=move)
    assert where(queue) == {}
    assert kind == "missing" or source.is_symlink() or source.is_dir()


@pytest.mark.parametrize("refused", ["_own", "sync_file"])
def test_a_file_that_could_not_be_adopted_is_sent_all_the_same_or_stays(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"a")

    def failing(*args: object) -> None:
        monkeypatch.undo()
        raise PermissionError(errno.EPERM, "not its owner", "")

    monkeypatch.setattr(Storage, refused, failing)
    queue.send_file(source, move=True)
    assert where(queue) == {"target": [b"a"]}
    assert not source.exists()


def test_a_moved_file_stays_where_it_is_when_its_queue_goes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"the only copy")
    send = Outlet.send

    def late(self: Outlet, *args: Any, **options: Any) -> Any:
        os.rename(queue.layout.home, tmp_path / "gone")
        return send(self, *args, **options)

    monkeypatch.setattr(Outlet, "send", late)
    with pytest.raises(Unavailable, match="nothing was sent"):
        queue.send_file(source, move=True)
    assert source.read_bytes() == b"the only copy"


def test_a_moved_file_that_was_sent_and_not_synced_is_not_sent_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(durability="full")
    source = tmp_path / "source"
    source.write_bytes(b"first")

    def refused(self: Storage, *folders: str) -> None:
        source.write_bytes(b"the next one")
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folders[0])

    monkeypatch.setattr(Storage, "sync", refused)
    with pytest.raises(StorageError, match="do not send it again"):
        queue.send_file(source, move=True)
    assert where(queue) == {"target": [b"first"]}
    assert source.read_bytes() == b"the next one"


def test_a_moved_file_is_in_its_place_when_the_send_fails(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    source = tmp_path / "source"
    source.write_bytes(b"a")
    rename = Storage.rename

    def refused(self: Storage, old: str, new: str) -> None:
        if "/target/" in new:
            raise PermissionError(errno.EACCES, "no", old)
        rename(self, old, new)

    monkeypatch.setattr(Storage, "rename", refused)
    with pytest.raises(StorageError, match="not sent"):
        queue.send_file(source, move=True)
    assert where(queue) == {}
    assert source.read_bytes() == b"a"


def test_send_many_takes_bodies_and_mappings(make: Make) -> None:
    queue = make()
    sent = queue.send_many([b"a", "b", {"body": "c", "priority": 9, "delay": "1h"}])
    assert len({one.id for one in sent}) == 3
    assert where(queue) == {"target": [b"a", b"b"], "delayed": [b"c"]}


@pytest.mark.parametrize("bad", [{"body": b"x", "priority": 2**31}, {"body": b"x", "properties": {"JMSx": 1}}, 7])
def test_a_bad_message_among_many_sends_none_of_its_batch(make: Make, bad: Any) -> None:
    queue = make()
    with pytest.raises((ValueError, TypeError)):
        queue.send_many([b"a", b"b", bad, b"c"])
    assert where(queue) == {}


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_send_many_cut_short_says_how_many_were_sent_and_leaves_no_halves(
    make: Make, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    queue = make()
    calls = iter(range(1, 100))
    write_new, rename = Storage.write_new, Storage.rename

    def failing_write(self: Storage, path: str, data: bytes | memoryview, **options: Any) -> None:
        if next(calls) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write_new(self, path, data, **options)

    def failing_rename(self: Storage, source: str, destination: str) -> None:
        if next(calls) == fails_at:
            raise OSError(errno.EIO, "Input/output error", source)
        rename(self, source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_new", failing_write)
        patch.setattr(Storage, "rename", failing_rename)
        with pytest.raises(StorageError) as caught:
            queue.send_many([b"1", b"2", b"3", b"4"])
    sent = max(fails_at - 5, 0)
    assert caught.value.__notes__ == [f"{sent} messages of this send_many were sent before the error"]
    assert where(queue) == ({"target": [b"1", b"2", b"3"][:sent]} if sent else {})


def test_two_sends_with_one_id_of_the_senders_own_are_two_messages(make: Make) -> None:
    queue = make()
    for id in ("order-1", "1700000000000000-0000000001"):
        queue.send(b"a" + id.encode(), message_id=id)
        queue.send(b"b" + id.encode(), message_id=id)
        queue.send_many([{"body": b"c" + id.encode(), "message_id": id}] * 2)
        with queue.writer(message_id=id) as out:
            out.write(b"d" + id.encode())
    assert len(where(queue)["target"]) == 10
    with queue.subscribe(max_backlog=None) as subscription:
        for settle in ("nack", "release", "reject"):
            taken = subscription.receive_many(20)
            assert len(taken) == 10
            for message in taken:
                VERBS[settle](message)
    assert len(where(queue)["error"]) == 10
    assert {message.id for message in queue.browse("error")} == {"order-1", "1700000000000000-0000000001"}


def test_a_text_is_sent_as_utf_8_and_class_t(make: Make) -> None:
    queue = make()
    queue.send("größe")
    message = take(queue)
    assert (message.text, message.body, message.message_class) == ("größe", "größe".encode(), "T")


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 2**31},
        {"priority": True},
        {"message_class": "X"},
        {"message_id": ""},
        {"message_id": "x" * 101},
        {"message_id": "a\0b"},
        {"type": "\ud800"},
        {"properties": {"JMSXDeliveryCount": 1}},
        {"properties": {"or": 1}},
        {"properties": {"a b": 1}},
        {"properties": {"n": 2**63}},
        {"properties": {"n": None}},
        {"expires_in": -1},
        {"delay": "soon"},
    ],
)
def test_what_no_name_can_hold_is_refused_and_nothing_is_sent(make: Make, fields: dict[str, Any]) -> None:
    queue = make()
    with pytest.raises(ValueError):
        queue.send(b"a", **fields)
    assert where(queue) == {}


class Speed(int, Enum):
    HIGH = 7


class Word(str):
    def __str__(self) -> str:
        return "Word.PRINT"


class Letter(Word):
    pass


def test_an_enum_is_sent_as_its_value(make: Make) -> None:
    queue, word = make(), Word("print")
    sent = queue.send(
        b"a", priority=Speed.HIGH, type=word, correlation_id=word, reply_to=word, message_id=word,
        properties={"n": Speed.HIGH, word: word, "typed": Typed("S", word)}, message_class=Letter("O"),
    )  # fmt: skip
    message = take(queue)
    assert (message.priority, message.properties) == (7, {"n": 7, "print": "print", "typed": "print"})
    assert message.message_class == "O"
    assert {sent.id, message.id, message.type, message.correlation_id, message.reply_to} == {"print"}


def test_a_writer_that_cannot_clear_up_tells_what_was_the_matter(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(durability="file")
    writer = queue.writer()
    writer.__enter__().write(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", gone_mount)
        patch.setattr(os, "fsync", lambda fd: gone_mount("a file"))
        with pytest.raises(StorageError, match="the message was not sent"):
            writer.__exit__(None, None, None)
    assert where(queue) == {"working": [b"a"]}


def test_a_file_that_the_kernel_takes_piece_by_piece_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, store = os.write, Storage("none")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
        store.write_new(str(tmp_path / "one"), b"0123456789")
        store.write_all(str(tmp_path), ["two", "three"], [b"0123456789", memoryview(b"abcdefg")])
    assert [(tmp_path / name).read_bytes() for name in ("one", "two", "three")] == [b"0123456789"] * 2 + [b"abcdefg"]


def test_an_interrupted_send_of_many_counts_no_draft_as_sent_whose_removal_seems_to_be_anothers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that loses the reply to a removal is asked again, and says that nothing is there."""
    queue = make()
    unlink = Storage.unlink

    def interrupted(self: Storage, source: str, destination: str) -> None:
        raise KeyboardInterrupt

    def asked_twice(self: Storage, path: str, folder: int | None = None) -> bool:
        return unlink(self, path, folder) and unlink(self, path, folder)

    monkeypatch.setattr(Storage, "rename", interrupted)
    monkeypatch.setattr(Storage, "unlink", asked_twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        queue.send_many([b"a", b"b"])
    assert caught.value.__notes__ == ["0 messages of this send_many were sent before the error"]
    assert where(queue) == {} and list((base(queue) / "working").iterdir()) == []


def test_a_send_of_many_on_a_disk_that_turns_read_only_says_how_many_were_sent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    renames: list[str] = []
    rename = Storage.rename

    def read_only(self: Storage, source: str, destination: str) -> None:
        renames.append(source)
        if len(renames) > 1:
            monkeypatch.setattr(Storage, "unlink", refused)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)
        rename(self, source, destination)

    def refused(self: Storage, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(Storage, "rename", read_only)
    with pytest.raises(StorageError, match="the message was not sent") as caught:
        queue.send_many([b"a", b"b"])
    assert caught.value.__notes__ == ["1 messages of this send_many were sent before the error"]
