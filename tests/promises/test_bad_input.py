"""Bad input gets an error that says what, where and what now, or is passed over; nothing is lost by it."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from children import in_child, unprivileged
from helpers import Make, base, drop, gone_mount, make_queue, names_in, reopened, stand_in_for_os, take, where

from dropq import (
    ConfigError,
    DropqError,
    InvalidName,
    LeaseLost,
    NoSuchQueue,
    Queue,
    Root,
    StorageError,
    Unavailable,
    work,
)
from dropq.format.layout import FOLDERS
from dropq.worker.command import Command

#: What may be done to a queue that cannot be opened.
USES: list[Callable[[Queue], object]] = [
    lambda queue: queue.send(b"x"),
    lambda queue: queue.receive(),
    lambda queue: queue.counts(),
    lambda queue: queue.sweep(),
    lambda queue: queue.subscribe(),
]


# -- names of queues ---------------------------------------------------------------------------------------------

BAD_NAMES = [
    "",
    ".",
    "..",
    "../other",
    "a/b",
    "/etc",
    ".hidden",
    "a\0b",
    "n" * 300,
    "é" * 150,
    "line\nbreak",
    "bell\x07",
    "\x7f",
    "next\x85line",
    os.fsdecode(b"\xff"),
    "topic-root",
    "dropboxmq",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_a_name_that_no_queue_can_have_is_refused_and_makes_nothing(tmp_path: Path, name: str) -> None:
    root = Root.create(tmp_path / "root")
    before = sorted(tmp_path.rglob("*"))
    for use in (root.queue, root.create_queue, root.delete_queue):
        with pytest.raises(InvalidName) as raised:
            use(name)
        assert repr(name) in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["n" * 255, "€" * 85, "-x", "a b", "a~b,c%d", "q.toml", "*"])
def test_a_name_that_a_queue_can_have_serves_from_making_to_deleting(tmp_path: Path, name: str) -> None:
    root = Root.create(tmp_path / "root")
    with root.create_queue(name, durability="none") as queue:
        queue.send("x")
        take(queue).ack()
    assert [queue.name for queue in root.queues()] == [name]
    root.delete_queue(name)
    assert root.queues() == []


# -- what is no message, in target/ ----------------------------------------------------------------------------


def make_strays(folder: Path, outside: Path) -> set[str]:
    """Put one of everything that is no message into a folder; return the names."""
    outside.write_bytes(b"not yours")
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "link-to-folder").symlink_to(outside.parent)
    os.mkfifo(folder / "fifo")
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket")
    finally:
        os.chdir(here)
    (folder / "folder").mkdir()
    (folder / "folder" / "4.inside.B").write_bytes(b"inside")
    for name in (".hidden", "_SUCCESS", "upload.part", "x.tmp", "x.crc"):
        (folder / name).write_bytes(b"no message")
    (folder / "_temporary").mkdir()
    return set(os.listdir(folder))


@pytest.mark.parametrize("state", ["target", "processing", "error", "processed", "expired", "delayed"])
def test_what_is_no_message_is_passed_over_in_every_state(tmp_path: Path, state: str) -> None:
    queue = make_queue(tmp_path / "root")
    folder = Path(queue.layout.folder(state))
    folder.mkdir(exist_ok=True)
    strays = make_strays(folder, tmp_path / "outside")
    drop(queue, "a.csv", b"a message")

    assert [message.name for message in queue.browse()] == ["a.csv"]
    assert queue.counts()["target"] == 1
    take(queue).nack()
    assert queue.receive(timeout=0.05) is not None
    assert queue.receive() is None
    queue.close()
    queue.sweep(foreign_older_than=0, unleased_older_than=0, jobs_older_than=0)
    if state in ("error", "processed", "expired"):
        assert queue.requeue(state=state) == []
    take(queue).ack()

    assert names_in(queue, "processed") == sorted(
        {"a.csv"} | ({"_SUCCESS", "upload.part", "x.crc", "x.tmp", "link"} if state == "processed" else set())
    )
    assert strays <= set(os.listdir(folder))
    assert (tmp_path / "outside").read_bytes() == b"not yours"


@pytest.mark.host
def test_a_device_is_passed_over(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    try:
        os.mknod(base(queue) / "target" / "zero", 0o20666, os.makedev(1, 5))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    assert queue.receive() is None


def test_an_empty_file_is_a_message(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, "empty.csv", b"")
    queue.send(b"")
    for _ in range(2):
        message = take(queue)
        assert message.body == b"" and message.size() == 0
        message.ack()
    assert where(queue) == {"processed": [b"", b""]}


def test_a_file_that_may_not_be_read_is_a_message_whose_body_says_so(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, "locked.csv", b"secret")
    drop(queue, "open.csv", b"open")
    (base(queue) / "target" / "locked.csv").chmod(0)

    def consume() -> tuple[str, str]:
        with reopened(queue) as again:
            locked, free = sorted((take(again), take(again)), key=lambda message: message.id)
            with pytest.raises(StorageError) as raised:
                _ = locked.body
            assert raised.value.errno == errno.EACCES
            with pytest.raises(StorageError), locked:
                locked.open()
            free.ack()
            return str(raised.value), locked.state

    error, state = unprivileged(consume)
    assert "Permission denied" in error and "its body was not read" in error
    assert state == "error"
    assert names_in(queue, "processed") == ["open.csv"]
    [failed] = queue.browse("error")
    assert failed.reason is not None and "Permission denied" in str(failed.reason["detail"])
    assert failed.name == "locked.csv"
    assert queue.requeue()[0].ok


def test_a_worker_fails_a_body_that_may_not_be_read_as_often_as_the_queue_says(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", redelivery_attempts=1)
    drop(queue, "locked.csv", b"secret")
    (base(queue) / "target" / "locked.csv").chmod(0)

    def consume() -> int:
        with reopened(queue) as again, Command(["true"]) as handler:
            return work(again, handler, until_empty=True, poll=True).failed

    assert unprivileged(consume) == unprivileged(consume) == 1
    [failed] = queue.browse("error")
    detail = str((failed.reason or {})["detail"])
    assert "Permission denied" in detail and "stays where it is" not in detail


@pytest.mark.parametrize("folder", ["target", "processing"])
def test_a_folder_that_may_not_be_changed_is_an_error_and_no_loss(tmp_path: Path, folder: str) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, "a.csv", b"1")
    path = base(queue) / folder
    path.chmod(0o555)
    try:
        with pytest.raises(StorageError) as raised:
            unprivileged(lambda: reopened(queue).receive())
        assert raised.value.errno == errno.EACCES and "stays in target/" in str(raised.value)
    finally:
        path.chmod(0o755)
    assert where(queue) == {"target": [b"1"]}


# -- undecodable names -----------------------------------------------------------------------------------------

RAW_NAMES = [b"\xff\xfereport 1.csv", b"caf\xe9.txt", b"\xff" * 250, "naïve.csv".encode(), b"a\nb\x07c"]


@pytest.mark.parametrize("raw", RAW_NAMES, ids=ascii)
def test_an_undecodable_name_comes_back_byte_for_byte_from_every_journey(tmp_path: Path, raw: bytes) -> None:
    queue = make_queue(tmp_path / "root")
    folder = os.fsencode(base(queue))
    (base(queue) / "working" / os.fsdecode(raw)).write_bytes(b"body")
    os.rename(folder + b"/working/" + raw, folder + b"/target/" + raw)

    take(queue).nack()
    take(queue).fail("bad")
    [failed] = queue.browse("error")
    assert failed.reason is not None and failed.reason["detail"] == "bad"
    assert os.listdir(folder + b"/error") == [raw]
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    take(queue).expire()
    assert os.listdir(folder + b"/expired") == [raw]
    assert [outcome.ok for outcome in queue.requeue(state="expired")] == [True]
    again = take(queue)
    again.extend("1m")
    assert again.id == os.fsdecode(raw) and again.body == b"body"
    again.ack()
    assert os.listdir(folder + b"/processed") == [raw]
    assert where(queue) == {"processed": [b"body"]}


def test_an_undecodable_id_of_a_coded_name_stays_the_id(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, os.fsdecode(b"7.\xff.T"), b"body")
    take(queue).nack()
    take(queue).reject("bad")
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    message = take(queue)
    assert (message.id, message.priority, message.message_class) == (os.fsdecode(b"\xff"), 7, "T")


def test_two_undecodable_files_of_one_name_both_stay(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    name = os.fsdecode(b"\xff.csv")
    for body in (b"1", b"2"):
        drop(queue, name, body)
        take(queue).nack()
    take(queue).ack()
    take(queue).ack()
    assert where(queue) == {"processed": [b"1", b"2"]}


# -- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropboxmq", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_queue_that_lacks_a_folder_is_not_opened(tmp_path: Path, folder: str, dropboxmq: bool) -> None:
    queue = make_queue(tmp_path / "root", dropboxmq=dropboxmq)
    (base(queue) / folder).rmdir()
    with pytest.raises(StorageError) as raised:
        reopened(queue).send(b"x")
    assert f"lacks its folder {folder}/" in str(raised.value) and "fsck q --repair" in str(raised.value)
    queue.fsck(repair=True)
    reopened(queue).send(b"x")


def test_a_folder_that_goes_while_the_queue_is_open_is_told_by_whoever_needs_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    folder = base(queue)
    queue.send(b"1")

    (folder / "working").rename(folder / "gone")
    with pytest.raises(StorageError, match="was not sent"):
        queue.send(b"2")
    (folder / "gone").rename(folder / "working")

    (folder / "processing").rename(folder / "gone")
    with pytest.raises(StorageError, match="stays in target/"):
        queue.receive()
    (folder / "gone").rename(folder / "processing")

    for settle, state in (("ack", "processed"), ("reject", "error"), ("expire", "expired"), ("nack", "target")):
        message = take(queue)
        (folder / state).rename(folder / "gone")
        with pytest.raises(StorageError, match="stays in processing/"):
            getattr(message, settle)(*(["bad"] if settle == "reject" else []))
        (folder / "gone").rename(folder / state)
        assert message.held
        message.nack()
    assert where(queue) == {"target": [b"1"]}


def test_a_queue_that_goes_while_it_is_open_takes_and_gives_nothing_any_more(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.receive()
    home = Path(queue.layout.home)
    home.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match=r"queue q is away.*nothing was sent"):
        queue.send(b"x")
    with pytest.raises(NoSuchQueue):
        queue.receive(timeout=1)
    with pytest.raises(NoSuchQueue, match="queue q is away"):
        reopened(queue).receive()


def test_a_queue_with_a_stray_folder_is_deleted_only_by_force(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    (base(queue) / "target" / "folder").mkdir()
    with pytest.raises(StorageError, match="nothing was removed"):
        queue.root.delete_queue("q")
    assert (base(queue) / "target" / "folder").is_dir() and reopened(queue).exists()
    queue.root.delete_queue("q", force=True)
    assert [name for name in os.listdir(queue.root.path) if "q" in name.split(".")] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_queue_on_two_file_systems_is_refused_with_both_named(tmp_path: Path, elsewhere: Path, folder: str) -> None:
    queue = make_queue(tmp_path / "root")
    here = base(queue)
    (here / folder).rmdir()
    (here / folder).symlink_to(elsewhere)
    with pytest.raises(StorageError) as raised:
        reopened(queue).send(b"x")
    assert str(here / folder) in str(raised.value)
    assert str(here / ("target" if folder == "working" else "working")) in str(raised.value)
    assert "one" in str(raised.value)


def test_a_file_from_another_file_system_is_copied_where_it_cannot_be_moved(tmp_path: Path, elsewhere: Path) -> None:
    queue = make_queue(tmp_path / "root")
    (elsewhere / "in.csv").write_bytes(b"1,2")
    queue.send_file(elsewhere / "in.csv", move=True)
    assert where(queue) == {"target": [b"1,2"]} and os.listdir(elsewhere) == []


@pytest.mark.parametrize("move", [False, True])
def test_sending_what_is_no_file_sends_nothing(tmp_path: Path, move: bool) -> None:
    queue = make_queue(tmp_path / "root")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nothing")
    for name in ("missing", "folder", "dangling"):
        with pytest.raises(StorageError, match="nothing was sent"):
            queue.send_file(tmp_path / name, move=move)
    assert where(queue) == {} and os.listdir(base(queue) / "working") == []


def test_a_queue_that_vanishes_is_told_to_its_consumers_and_producers(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    subscription = queue.subscribe()
    queue.root.delete_queue("q", force=True)
    with pytest.raises(NoSuchQueue):
        subscription.receive()
    with pytest.raises(NoSuchQueue):
        queue.subscribe()
    with pytest.raises(NoSuchQueue):
        queue.send(b"b")
    with pytest.raises(NoSuchQueue):
        queue.send(b"b", delay=1)
    with pytest.raises(NoSuchQueue):
        queue.send_many([b"b"])
    with pytest.raises(NoSuchQueue), queue.writer() as out:
        out.write(b"b")
    subscription.close()
    assert not (Path(queue.root.path) / "q").exists(), "nothing of it is made anew"
    queue.root.create_queue("q")


@pytest.mark.parametrize("folder", ["processing", "processed", "error", "target"])
def test_a_folder_that_vanishes_is_told_and_loses_nothing(make: Make, folder: str) -> None:
    queue = make()
    queue.send_many([b"a", b"b"])
    message = take(queue) if folder != "processing" else None
    os.rename(base(queue) / folder, base(queue) / ".elsewhere")
    act: Callable[[], object] = queue.receive
    if message is not None and folder != "target":
        act = message.ack if folder == "processed" else partial(message.reject, "r")
    with pytest.raises(DropqError) as caught:
        act()
    assert not isinstance(caught.value, LeaseLost)
    os.rename(base(queue) / ".elsewhere", base(queue) / folder)
    if message is not None:
        message.ack()
    assert sum(len(bodies) for bodies in where(queue).values()) == 2


@pytest.mark.parametrize("folder", ["private", "delayed"])
def test_a_private_folder_on_another_file_system_is_refused(make: Make, elsewhere: Path, folder: str) -> None:
    queue = make()
    path = Path(getattr(queue.layout, folder))
    if path.exists():
        shutil.rmtree(path)
    path.symlink_to(elsewhere)
    with pytest.raises(StorageError, match="two file systems"):
        reopened(queue).send(b"a")


@pytest.mark.parametrize(
    "verb",
    [
        lambda queue: queue.receive(),
        lambda queue: queue.counts(),
        lambda queue: queue.stats(),
        lambda queue: queue.find("x"),
        lambda queue: list(queue.browse()),
        lambda queue: queue.ack("x"),
        lambda queue: queue.sweep(),
        lambda queue: queue.fsck(),
        lambda queue: queue.root.queues(),
    ],
)
def test_a_mount_that_is_gone_is_told_by_every_verb(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Queue], object]
) -> None:
    queue = make()
    queue.send(b"a")
    assert queue.receive() is not None
    for name in ("lstat", "stat", "scandir", "listdir"):
        monkeypatch.setattr(os, name, gone_mount)
    with pytest.raises(StorageError, match=os.strerror(errno.ENOTCONN)) as refused:
        verb(queue)
    monkeypatch.undo()
    assert refused.value.errno == errno.ENOTCONN


# -- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"lease_period = \n", ["line 1", "not valid TOML"]),
        (b"lease_period = 5m\n", ["line 1", "a duration stands in quotes: lease_period = '5m'"]),
        (b"priority = [1,\n", ["line 2", "not valid TOML"]),
        (b'client = """\nabc\n\n', ["line 4", "not valid TOML"]),
        (b"\xff\xfe\x00", ["UTF-8"]),
        (b"lease_peroid = '5m'\n", ["lease_peroid", "lease_period"]),
        (b"lease_period = 'soon'\n", ["lease_period", "soon", "30s"]),
        (b"self_destruct = 'yes'\n", ["self_destruct", "true or false"]),
        (b"name = 'other'\n", ["other", "'q'"]),
    ],
    ids=[
        "no-toml",
        "no-quotes",
        "no-end-of-list",
        "no-end-of-text",
        "no-text",
        "unknown-key",
        "bad-value",
        "not-built",
        "other-name",
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_with_file_and_key(
    tmp_path: Path, text: bytes, said: list[str]
) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, "a.csv", b"1")
    file = base(queue) / "queue.toml"
    file.write_bytes(text)
    for use in USES:
        with pytest.raises(ConfigError) as raised:
            use(reopened(queue))
        assert str(file) in str(raised.value)
        assert all(part in str(raised.value).replace('"', "'") for part in said)
    file.unlink()
    assert where(reopened(queue)) == {"target": [b"1"]}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_a_configuration_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    queue = make_queue(tmp_path / "root")
    file = base(queue) / "queue.toml"
    file.unlink()
    make(file)
    with pytest.raises(ConfigError, match=r"queue\.toml"):
        reopened(queue).receive()


def test_a_configuration_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    (base(queue) / "queue.toml").chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        unprivileged(lambda: reopened(queue).receive())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease_peroid": "5m"}, "lease_period"),
        ({"self_destruct": "yes"}, "true or false"),
        ({"durability": "some"}, '"none", "file", "full"'),
        ({"file_mode": "0666"}, "without write permission for others"),
    ],
)
def test_options_that_cannot_be_used_make_no_queue(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    root = Root.create(tmp_path / "root")
    with pytest.raises(ConfigError, match=said):
        root.create_queue("q", **options)
    assert root.queues() == [] and sorted(os.listdir(root.path)) == [".dropq", "dropq.toml"]


def test_a_root_of_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    Path(queue.root.layout.config_file).write_text("format = 7\nsomething_new = 1\n")
    before = sorted(tmp_path.rglob("*"))
    for use in USES:
        with pytest.raises(ConfigError) as raised:
            use(reopened(queue))
        assert "format 1" in str(raised.value) and "7" in str(raised.value)
    with pytest.raises(ConfigError, match="7"):
        Root(queue.root.path).create_queue("other")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_root_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, way_out in ((tmp_path / "nothing", "dropq init"), (tmp_path / "file", "name the directory")):
        with pytest.raises(NoSuchQueue, match=way_out):
            Root(path)
    with pytest.raises(StorageError, match="was not made"):
        Root.create(tmp_path / "file")


# -- a full disk ---------------------------------------------------------------------------------------------------

SMALL = 256 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; mounting one takes root."""
    folder = tmp_path / "small"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % SMALL) != 0:
        pytest.skip(f"a small file system cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(os.fsencode(folder), 2) == 0, os.strerror(ctypes.get_errno())


class FullDisk:
    """Stands for the module `os` in dropq.storage, on a disk that is full: it writes no more than what is left."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.left <= 0 and data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: self.left])
        self.left -= written
        return written


def too_much(queue: Queue) -> dict[str, Callable[[], object]]:
    """Every way to send more than the disk has left."""

    def by_writer() -> None:
        with queue.writer() as writing:
            writing.write(b"x" * SMALL)

    def by_slow_writer() -> None:
        with queue.writer() as writing:
            for _ in range(SMALL // 1000 + 1):
                writing.write(b"x" * 1000)

    source = Path(queue.root.path).parent.parent / "source"
    source.write_bytes(b"x" * SMALL)
    return {
        "send": lambda: queue.send(b"x" * SMALL),
        "send_many": lambda: queue.send_many([b"x" * SMALL]),
        "send_file": lambda: queue.send_file(source),
        "send_file, moving": lambda: queue.send_file(source, move=True),
        "writer": by_writer,
        "writer, slowly": by_slow_writer,
    }


@pytest.mark.parametrize("durability", ["none", "full"])
def test_a_send_to_a_full_disk_leaves_nothing_half_written(small_disk: Path, durability: str) -> None:
    queue = make_queue(small_disk / "root", durability=durability)
    queue.send(b"before")
    for way, send in too_much(queue).items():
        with pytest.raises((StorageError, OSError)) as raised:
            send()
        assert getattr(raised.value, "errno", None) == errno.ENOSPC, way
        if "writer" not in way:  # what the caller's own write says reaches the caller as it is
            assert isinstance(raised.value, StorageError) and "sent" in str(raised.value), way
        assert where(queue) == {"target": [b"before"]}, way
        assert os.listdir(base(queue) / "working") == [], way
    assert (small_disk.parent / "source").exists()
    queue.send(b"after")
    assert where(queue) == {"target": [b"after", b"before"]}


def test_a_full_disk_keeps_nobody_from_working_off_what_waits(small_disk: Path) -> None:
    queue = make_queue(small_disk / "root", durability="full")
    for number in range(5):
        queue.send(b"%d" % number)
    with queue.subscribe(max_backlog=None) as subscription:
        fill(small_disk)
        taken = [subscription.receive() for _ in range(5)]
        ack, nack, extend, release, late = (message for message in taken if message is not None)
        ack.ack()
        nack.nack()
        extend.extend("1m")
        extend.ack()
        release.release()
        assert late.body == b"4"
        with pytest.raises(StorageError) as raised:
            late.reject("bad")  # its reason cannot be written
        assert raised.value.errno == errno.ENOSPC and "stays in processing/" in str(raised.value)
        with pytest.raises(StorageError, match="nothing was moved"):
            queue.send(b"", properties={"long": "x" * 200})  # its sidecar cannot be written
        (small_disk / "filler").unlink()
        late.reject("bad")
    assert where(queue) == {"processed": [b"0", b"2"], "target": [b"1", b"3"], "error": [b"4"]}
    assert os.listdir(base(queue) / "working") == []


def fill(folder: Path) -> None:
    """Write until nothing more can be written."""
    with open(folder / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass


@pytest.mark.parametrize("left", [0, 1, 5, 9])
def test_a_body_that_is_cut_short_is_never_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    queue = make_queue(tmp_path / "root", durability="full")
    queue.send(b"before")
    stand_in_for_os(monkeypatch, FullDisk(left))
    with pytest.raises(StorageError) as raised:
        queue.send(b"0123456789")
    stand_in_for_os(monkeypatch, os)
    assert raised.value.errno == errno.ENOSPC and "the message was not sent" in str(raised.value)
    assert where(queue) == {"target": [b"before"]} and os.listdir(base(queue) / "working") == []


def test_a_batch_on_a_full_disk_is_not_sent_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path / "root")
    stand_in_for_os(monkeypatch, FullDisk(25))
    with pytest.raises(StorageError) as raised:
        queue.send_many([b"0123456789"] * 5)
    stand_in_for_os(monkeypatch, os)
    assert "0 messages" in " ".join(raised.value.__notes__)
    assert where(queue) == {} and os.listdir(base(queue) / "working") == []


@pytest.mark.parametrize("properties", [{}, {"long": "x" * 200}], ids=["plain", "with-a-sidecar"])
def test_a_file_over_the_size_limit_is_not_sent(tmp_path: Path, properties: dict[str, str]) -> None:
    queue = make_queue(tmp_path / "root")

    def send() -> None:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        queue.send(b"x" * 1000, properties=properties)

    with pytest.raises(StorageError) as raised:
        in_child(send)
    assert raised.value.errno == errno.EFBIG
    assert where(queue) == {} and os.listdir(base(queue) / "working") == []


@pytest.mark.parametrize("call", ["fsync", "rename", "open"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_refused_call_on_the_way_leaves_the_message_sent_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Whichever call of a send fails, the message is either in target/ and the error says so, or nowhere."""
    for nth in range(1, 10):
        queue = make_queue(tmp_path / f"root{nth}", durability="full")
        refusing = Refusing(call, nth, number)
        stand_in_for_os(monkeypatch, refusing)
        try:
            queue.send(b"body")
        except StorageError as error:
            fate = str(error)
        else:
            fate = "sent"
        finally:
            stand_in_for_os(monkeypatch, os)
        there = where(queue)
        unsent = "not sent" in fate or "cannot be opened" in fate
        assert there == ({} if unsent else {"target": [b"body"]})
        assert unsent or "do not send it again" in fate or fate == "sent"
        if not refusing.refused:
            return
    raise AssertionError("the send never came to its end")


class Refusing:
    """Stands for the module `os` in dropq.storage: the nth call of a function fails."""

    def __init__(self, call: str, nth: int, number: int) -> None:
        self._call, self._nth, self._number = call, nth, number
        self.refused = False

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            self._nth -= 1
            if self._nth == 0:
                self.refused = True
                return self._refuse
        return getattr(os, name)

    def _refuse(self, subject: object, *_: object, **__: object) -> None:
        path = subject if isinstance(subject, str) else None
        raise OSError(self._number, os.strerror(self._number), path)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "send takes one"),
        (b"hello", "send takes one"),
        ({"body": b"hello"}, "send takes one"),
        ([b"a", {"priority": 5}], "has no `body`"),
        ([b"a", {"body": b"b", "colour": "red", "size": 2}], "says 'colour', 'size', which send does not take"),
    ],
)
def test_what_is_no_list_of_messages_is_refused_by_send_many(tmp_path: Path, messages: Any, said: str) -> None:
    queue = make_queue(tmp_path)
    with pytest.raises(ValueError, match=said):
        queue.send_many(messages)
    assert where(queue) == {}


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("before", [0, 5, 2005])
def test_send_many_says_how_many_it_sent_before_what_it_sends_raised(
    tmp_path: Path, error: BaseException, before: int
) -> None:
    queue = make_queue(tmp_path)
    error = type(error)(*error.args)  # each run notes on one of its own

    def bodies() -> Iterator[bytes]:
        for number in range(before):
            yield b"%d" % number
        raise error

    with pytest.raises(type(error)) as raised:
        queue.send_many(bodies())
    sent = len(os.listdir(base(queue) / "target"))
    assert raised.value.__notes__ == [f"{sent} messages of this send_many were sent before the error"]
    assert sent == before // 1000 * 1000
    assert os.listdir(base(queue) / "working") == []


def test_receive_many_tells_how_to_hold_more(tmp_path: Path) -> None:
    with make_queue(tmp_path).subscribe() as subscription:
        with pytest.raises(ValueError, match=r"receive_many\(50\).*may hold 1: give subscribe\(\) a max_backlog of 50"):
            subscription.receive_many(50)
        with pytest.raises(ValueError, match=r"receive_many\(0\): at least 1 is to be asked for"):
            subscription.receive_many(0)
