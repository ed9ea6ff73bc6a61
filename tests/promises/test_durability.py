"""What is synced, and when: `none`, `file` and `full` keep what they say through a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import VERBS, Make, RecordingOs, base, make_queue, where

from dropq import Message, Root, Sent, StorageError
from dropq.lifecycle.sending import Outlet
from dropq.storage import files, system_calls
from dropq.storage.files import Storage
from dropq.storage.mounts import Mount

CALLS = ("fsync", "rename")


@pytest.mark.parametrize(
    ("durability", "send", "ack"),
    [
        (
            "full",
            ["fsync working/*", "rename working/* target/*", "fsync target", "fsync working"],
            ["rename processing/* processed/*", "fsync processed", "fsync processing"],
        ),
        ("file", ["fsync working/*", "rename working/* target/*"], ["rename processing/* processed/*"]),
        ("none", ["rename working/* target/*"], ["rename processing/* processed/*"]),
    ],
)
def test_the_order_of_syncs_and_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, send: list[str], ack: list[str]
) -> None:
    queue = make_queue(tmp_path, durability=durability)
    with queue.subscribe() as subscription:
        seen = RecordingOs().record(monkeypatch)
        queue.send(b"a")
        assert seen.briefly(CALLS, base(queue)) == send
        seen.calls.clear()
        message = subscription.receive()
        assert message is not None
        assert seen.briefly(CALLS, base(queue)) == ["rename target/* processing/*"], "claims are not synced"
        seen.calls.clear()
        message.ack()
        assert seen.briefly(CALLS, base(queue)) == ack


@pytest.mark.parametrize(
    ("settle", "calls"),
    [
        ("nack", ["rename processing/* target/*", "fsync target", "fsync processing"]),
        ("extend", ["rename processing/* processing/*"]),
    ],
)
def test_a_return_is_synced_at_full_and_an_extension_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settle: str, calls: list[str]
) -> None:
    queue = make_queue(tmp_path, durability="full", lease_period="1h")
    with queue.subscribe() as subscription:
        queue.send(b"a")
        message = subscription.receive()
        assert message is not None
        seen = RecordingOs().record(monkeypatch)
        VERBS[settle](message)
        assert seen.briefly(CALLS, base(queue)) == calls


def test_a_writer_a_file_and_a_delayed_message_are_synced_like_a_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    queue.send(b"makes the folder", delay=1)
    (tmp_path / "body").write_bytes(b"c")
    (tmp_path / "moved").write_bytes(b"d")
    order = ["fsync working/*", "rename working/* target/*", "fsync target", "fsync working"]
    seen = RecordingOs().record(monkeypatch)
    with queue.writer() as out:
        out.write(b"b")
    assert seen.briefly(CALLS, base(queue)) == order
    seen.calls.clear()
    queue.send_file(tmp_path / "body")
    assert seen.briefly(CALLS, base(queue)) == order
    seen.calls.clear()
    queue.send_file(tmp_path / "moved", move=True)
    assert seen.briefly(CALLS, base(queue)) == ["fsync ../*", "rename ../* target/*", *order[2:]]
    seen.calls.clear()
    queue.send(b"e", delay=1)
    assert seen.briefly(CALLS, base(queue)) == [line.replace("target", ".dropq/delayed") for line in order]


def test_send_many_syncs_folders_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, durability="full")
    seen = RecordingOs().record(monkeypatch)
    queue.send_many([b"x"] * 5)
    calls = seen.briefly(CALLS, base(queue))
    assert calls == [*["fsync working/*"] * 5, *["rename working/* target/*"] * 5, "fsync target", "fsync working"]


def test_ack_many_syncs_folders_once_and_tells_whose_claims_were_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    queue.send_many([b"a", b"b", b"c"])
    with queue.subscribe(max_backlog=None) as subscription:
        messages = subscription.receive_many(3)
        os.rename(messages[1].path, base(queue) / "target" / messages[1].name)  # somebody returned it
        seen = RecordingOs().record(monkeypatch)
        assert subscription.ack_many(messages) == [messages[1]]
        assert seen.briefly(CALLS, base(queue)) == [
            *["rename processing/* processed/*"] * 2,
            "fsync processed",
            "fsync processing",
        ]
        assert subscription.held == ()
    assert where(queue) == {"target": [b"b"], "processed": [b"a", b"c"]}


@pytest.mark.parametrize("durability", ["none", "file", "full"])
def test_what_is_sent_by_the_hundred_is_synced_as_a_whole_before_the_first_of_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: True)
    queue = make_queue(tmp_path, durability=durability)
    seen = RecordingOs().record(monkeypatch)
    queue.send_many([b"x"] * 100)
    sends = ["rename working/* target/*"] * 100
    calls = {"none": sends, "file": ["syncfs working", *sends]}
    calls["full"] = [*calls["file"], "fsync target", "fsync working"]
    assert seen.briefly((*CALLS, "syncfs"), base(queue)) == calls[durability]


def test_where_a_file_system_cannot_be_synced_as_a_whole_each_message_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: False)
    queue = make_queue(tmp_path, durability="file")
    seen = RecordingOs().record(monkeypatch)
    queue.send_many([b"x"] * 100)
    assert seen.briefly(CALLS, base(queue)) == ["fsync working/*"] * 100 + ["rename working/* target/*"] * 100


def test_nothing_is_sent_of_what_could_not_be_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(system_calls, "can_sync_whole", lambda path: True)
    monkeypatch.setattr(system_calls, "sync_whole", refused)
    queue = make_queue(tmp_path, durability="full")
    with pytest.raises(StorageError, match="the message was not sent"):
        queue.send_many([b"x"] * 100)
    assert where(queue) == {}


def test_an_interrupted_send_many_tells_of_what_is_in_target_and_of_nothing_else(tmp_path: Path) -> None:
    class Interrupted(list[Sent]):
        def append(self, one: Sent) -> None:
            if len(self) == 5:
                raise KeyboardInterrupt
            super().append(one)

    queue = make_queue(tmp_path)
    sent = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        queue._send_into(sent, [b"x"] * 10)
    assert sorted(one.id for one in sent) == sorted(message.id for message in queue.browse())
    assert "working" not in where(queue)


@pytest.mark.parametrize("move", [False, True])
def test_an_interrupt_before_the_rename_leaves_the_senders_file_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: bool
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    queue = make_queue(tmp_path / "root")
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(Outlet, "send", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        queue.send_file(tmp_path / "file", move=move)
    assert (tmp_path / "file").read_bytes() == b"x"
    assert where(queue) == {} and not hasattr(raised.value, "__notes__")


def test_an_interrupted_send_many_takes_away_also_what_was_just_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    opened, made = os.open, iter(range(10))

    def interrupted(path: str, flags: int, *args: Any, **options: Any) -> int:
        fd = opened(path, flags, *args, **options)
        if flags & os.O_EXCL and next(made) == 5:
            os.close(fd)
            raise KeyboardInterrupt
        return fd

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.send_many([b"x"] * 10)
    assert where(queue) == {}


def test_on_nfs_no_folder_is_synced_as_the_server_has_made_a_rename_durable_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount("nfs4"))
    queue = make_queue(tmp_path, durability="full")
    with queue.subscribe() as subscription:
        seen = RecordingOs().record(monkeypatch)
        queue.send(b"a")
        assert seen.briefly(CALLS, base(queue)) == ["fsync working/*", "rename working/* target/*"]
        seen.calls.clear()
        message = subscription.receive()
        assert message is not None
        message.ack()
        assert not [call for call in seen.briefly(CALLS, base(queue)) if call.startswith("fsync")]


@pytest.mark.parametrize("sticky", [True, False])
def test_on_nfs_a_body_of_a_sole_name_is_created_exclusively_only_in_a_sticky_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sticky: bool
) -> None:
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount("nfs4"))
    queue = make_queue(tmp_path, durability="none")
    working = base(queue) / "working"
    if sticky:
        working.chmod(0o1777)
    flags = list[int]()
    opened = os.open

    def noting(path: str, how: int, *args: Any, **options: Any) -> int:
        if os.path.dirname(path) == str(working):
            flags.append(how & (os.O_EXCL | os.O_NOFOLLOW))
        return opened(path, how, *args, **options)

    monkeypatch.setattr(os, "open", noting)
    queue.send(b"a")
    queue.send_many([b"b", b"c"])
    assert flags == [os.O_NOFOLLOW | (os.O_EXCL if sticky else 0)] * 3
    assert where(queue) == {"target": [b"a", b"b", b"c"]}


@pytest.mark.parametrize(
    ("kind", "release", "can"),
    [
        ("ext4", "5.8.0", True),
        ("xfs", "6.1.0-13-amd64", True),
        ("ext4", "5.4.0", False),
        ("fuse.sshfs", "6.1.0", False),
    ],
)
def test_which_file_systems_are_synced_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, release: str, can: bool
) -> None:
    monkeypatch.setattr(system_calls, "mount_of", lambda path: Mount(kind))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", release, "", "")))
    assert system_calls.can_sync_whole("/anywhere") is can
    monkeypatch.setattr(system_calls, "mount_of", lambda path: Mount("fuse.other"))
    assert not system_calls.can_sync_whole("/anywhere")  # another one may be mounted there since


def test_on_btrfs_the_folder_that_a_message_left_is_synced_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount("btrfs"))
    queue = make_queue(tmp_path, durability="full")
    queue.send(b"a")
    message = queue.receive()
    assert message is not None
    seen = RecordingOs().record(monkeypatch)
    message.ack()
    assert seen.briefly(CALLS, base(queue)) == [
        "rename processing/* processed/*",
        "fsync processing",
        "fsync processed",
    ]


@pytest.mark.parametrize(
    ("kind", "synced"), [("ext4", ["to/target", "q/target"]), ("btrfs", ["q/target", "to/target"])]
)
def test_what_a_selector_moves_is_in_one_queue_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, synced: list[str]
) -> None:
    monkeypatch.setattr(files, "mount_at", lambda folder, device: Mount(kind))
    queue = make_queue(tmp_path, durability="full")
    Root(tmp_path).create_queue("to", durability="full")
    queue.add_selector("on", to="to")
    queue.send(b"a")
    seen = RecordingOs().record(monkeypatch)
    assert queue.route() == {"on": 1}
    calls = seen.briefly(CALLS, tmp_path)
    assert calls[calls.index("rename q/target/* to/target/*") + 1 :][:2] == [f"fsync {folder}" for folder in synced]


def test_a_sidecar_is_durable_before_the_name_that_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")
    seen = RecordingOs().record(monkeypatch)
    queue.send(b"a", properties={"long": "x" * 200})
    calls = seen.briefly(CALLS, tmp_path)
    assert calls[:3] == [
        "fsync .dropq/meta/*",
        "rename .dropq/meta/* .dropq/meta/*",
        "fsync .dropq/meta",
    ]
    assert calls[3:] == ["fsync q/working/*", "rename q/working/* q/target/*", "fsync q/target", "fsync q/working"]


def test_a_sync_error_after_the_rename_says_that_the_message_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, durability="full")

    def failing(self: Storage, *folders: str) -> None:
        raise OSError(errno.EIO, "Input/output error", folders[0])

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "sync", failing)
        with pytest.raises(StorageError, match="do not send it again") as caught:
            queue.send(b"a")
    assert caught.value.errno == errno.EIO
    assert where(queue) == {"target": [b"a"]}


@pytest.mark.parametrize(
    ("settle", "state"),
    [
        (lambda message: message.ack(), "processed"),
        (lambda message: message.nack(), "target"),
        (lambda message: message.reject("no"), "error"),
    ],
)
def test_a_message_that_was_settled_and_not_synced_is_held_no_more(
    make: Make, monkeypatch: pytest.MonkeyPatch, settle: Callable[[Message], None], state: str
) -> None:
    queue = make(durability="full")
    with queue.subscribe() as subscription:
        for body in ("a", "b"):
            queue.send(body)
        message = subscription.receive()
        assert message is not None
        syncs = Storage.sync

        def refused(self: Storage, *folders: str) -> None:
            if queue.layout.processing in folders:
                monkeypatch.setattr(Storage, "sync", syncs)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            syncs(self, *folders)

        monkeypatch.setattr(Storage, "sync", refused)
        with pytest.raises(StorageError, match="the message is settled"):
            settle(message)
        assert (message.held, message.state, subscription.held) == (False, state, ())
        assert os.path.exists(message.path)
        assert subscription.receive() is not None  # it may hold one
