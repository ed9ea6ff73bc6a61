"""What a peer's users may leave there: odd files cross or stay, damaged ones are told, and no link leads anywhere."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import unprivileged
from helpers import base, first_and_long, health, reopened
from test_roots import arrives, at_rest, bodies, bridge_of, bridged, give, joined
from test_roots import wants_last as wants_last
from test_security import PRODUCER, by

from dropq import DropqError, Message, Queue, Unavailable
from dropq.carrier import bridge as bridge_module
from dropq.carrier import lists
from dropq.carrier.bridge import end_rows, recall
from dropq.lifecycle.timing import Timing
from dropq.policies.wanted import LOOKED, Wanting
from dropq.storage import reading
from dropq.storage.files import Storage

#: An id that dropq made, but for its last digit.
ID = "4.1700000000000000-000000000"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Queue, Queue]:
    """Two queues of one name whose files settle at once."""
    a, b = joined(tmp_path, "a", "b", settle_time=0)
    return a, b


def want(queue: Queue) -> None:
    """Let a consumer want all messages, from now on."""
    Wanting(queue.context, "consumer", None).say(None)


def taken(queue: Queue) -> list[Message]:
    """Take and acknowledge all that waits."""
    found = []
    while (message := queue.receive()) is not None:
        message.body  # noqa: B018 - it is read while it is held
        message.ack()
        found.append(message)
    return found


# -- no messages -------------------------------------------------------------------------------------------------------


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("to make a device takes root")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


NO_MESSAGES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link to a message": lambda path: path.symlink_to(path.with_name(f"{ID}9.B")),
    "a folder": lambda path: path.mkdir(),
    "a socket": _socket,
    "a device": _device,
}


@pytest.mark.parametrize("lying", ["in target/", "in the row"])
@pytest.mark.parametrize("name", [f"{ID}1.B", "foreign"])
@pytest.mark.parametrize("what", NO_MESSAGES)
def test_what_is_no_message_stays_and_stops_no_message(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, what: str, name: str, lying: str
) -> None:
    a, b = pair
    folder = base(a) / "target"
    if lying == "in the row":
        a.send(b"given")
        give(a, b, monkeypatch)
        (folder,) = (base(a) / ".dropq/transfers").glob("*/target")
        name = f"0123456789abcdef~{name}"
    NO_MESSAGES[what](folder / name)
    a.send(b"x")
    want(b)
    bridged(b, "a")
    assert sorted(bodies(b)) == ([b"x"] if lying == "in target/" else [b"given", b"x"])
    left = [*os.listdir(folder), *(os.listdir(base(a) / "target") if lying == "in the row" else ())]
    assert [each.rpartition("~")[2] for each in left] == [name.rpartition("~")[2]]  # a link to nothing goes back
    assert [path for path in Path(b.layout.base).rglob("*") if path.is_symlink()] == []


@pytest.mark.parametrize("what", NO_MESSAGES)
def test_a_list_that_names_what_is_no_message_stops_no_message(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a, b = pair
    a.send_many([b"0", b"1"])
    folder = listed(a, b, monkeypatch).parent / "target"
    odd = min(folder.iterdir())
    odd.unlink()
    NO_MESSAGES[what](odd)
    rounds(b, "a")
    assert bodies(b) == [b"0"] or bodies(b) == [b"1"]
    assert [odd.name in os.listdir(folder), odd.name.partition("~")[2] in os.listdir(base(a) / "target")].count(
        True
    ) == 1
    assert [path for path in base(b).rglob("*") if path.is_symlink()] == []


def test_a_file_that_has_another_name_crosses_and_the_other_name_keeps_it(
    tmp_path: Path, pair: tuple[Queue, Queue]
) -> None:
    a, b = pair
    kept = tmp_path / "kept"
    kept.write_bytes(b"x")
    for name in ("one", "two"):
        os.link(kept, base(a) / "target" / name)
    want(b)
    assert bridged(b, "a") == 2
    assert [(message.id, message.body) for message in taken(b)] == [("one", b"x"), ("two", b"x")]
    assert kept.read_bytes() == b"x" and kept.stat().st_nlink == 1
    assert at_rest(a) and bodies(a) == []


def test_a_sparse_file_that_finds_no_room_here_stays_and_those_behind_it_come(
    tmp_path: Path, pair: tuple[Queue, Queue]
) -> None:
    a, b = pair
    disk = os.statvfs(tmp_path)
    size = max(1 << 40, disk.f_blocks * disk.f_frsize)
    huge = base(a) / "working" / "huge"
    with huge.open("wb") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no sparse files")
    huge.rename(base(a) / "target" / f"9{ID[1:]}1.B")
    want(b)
    with pytest.raises(Unavailable, match="no room for twice"):
        bridged(b, "a")
    a.send(b"x")
    assert bridged(b, "a") == 1
    assert bodies(b) == [b"x"]
    assert (base(a) / "target" / f"9{ID[1:]}1.B").stat().st_size == size and at_rest(a)


# -- odd names ---------------------------------------------------------------------------------------------------------

LONG = ["n" * 255, "é" * 127 + "n", "\N{SNOWMAN}" * 85, f"{'n' * 251}.csv"]
FOREIGN = [
    "report.csv", "a b", "new\nline", "0123456789abcdef~x", "to.json", "1.json", "%2F", "%", "4.x.B",
    "4.1.B.0.c.r.t.p", "-", "-rf", "$(id)", os.fsdecode(b"\xff\xfe"), "\N{SNOWMAN}", "x.ended",
    "queue-0123456789abcdef", "transfer.0123456789abcdef.1.json", "a'b\"c", "x" * 200,
]  # fmt: skip


@pytest.mark.parametrize("way", ["to its peer", "and back"])
@pytest.mark.parametrize("names", [LONG, FOREIGN], ids=["255 bytes", "foreign"])
def test_foreign_names_of_any_kind_and_length_cross_as_they_are(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, names: list[str], way: str
) -> None:
    a, b = pair
    for name in names:
        arrives(a, name, os.fsencode(f"of {name}"))
    ids = {message.id: message.body for message in a.browse()}
    if way == "and back":
        give(a, b, monkeypatch)
        (peer,) = a.root.context.config.peer
        assert recall(a.root.context, peer, None) == len(names)
        end = a
    else:
        want(b)
        assert bridged(b, "a") == len(names)
        end = b
    assert {message.id: message.body for message in end.browse()} == ids
    assert len(taken(end)) == len(names)
    assert bodies(a) == [] and at_rest(a) and at_rest(b)


def test_messages_whose_metadata_is_lost_cross_as_they_would_be_received(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    for body in (b"0", b"1"):
        a.send(body, properties={"text": "y" * 300}, correlation_id="c" * 200)
    for sidecar in (path for path in (a.root.path / ".dropq" / "meta").rglob("*") if path.is_file()):
        sidecar.unlink()
    a = reopened(a)
    before = [(message.id, dict(message.properties)) for message in a.browse()]
    a.send(b"2")
    want(b)
    assert bridged(b, "a") == 3
    assert [(message.id, dict(message.properties)) for message in b.browse()][:2] == before
    assert [message.body for message in taken(b)] == [b"0", b"1", b"2"] and at_rest(a)


def test_two_messages_of_one_id_both_cross(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    for queue, name, body in (
        (a, f"{ID}1.B", b"0"),
        (a, f"5{ID[1:]}1.B", b"1"),
        (b, f"{ID}1.B", b"2"),
        (a, "report", b"3"),
        (b, "report", b"4"),
    ):
        arrives(queue, name, body)
    want(b)
    assert bridged(b, "a") == 3
    assert sorted(message.body for message in taken(b)) == [b"0", b"1", b"2", b"3", b"4"]
    assert at_rest(a) and at_rest(b)


def test_a_name_that_only_the_taking_queue_ignores_comes_under_another(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    for queue, ignored in ((a, "[]"), (b, '["*.part"]')):
        with (base(queue) / "queue.toml").open("a") as file:
            file.write(f"ignore = {ignored}\n")
    arrives(a, "x.part", b"x")
    b = reopened(b)
    want(b)
    assert bridged(b, "a") == 1
    assert [message.body for message in taken(b)] == [b"x"]


@pytest.mark.parametrize("name", ["report", f"{ID}1.B"])
def test_files_of_one_name_all_cross(pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    a, b = pair
    for body in (b"0", b"1", b"2"):
        arrives(a, name, body)
        give(a, b, monkeypatch)
    want(b)
    assert bridged(b, "a") == 3
    assert sorted(message.body for message in taken(b)) == [b"0", b"1", b"2"] and at_rest(a)


# -- files that the bridge's user may not read -------------------------------------------------------------------------


@pytest.fixture
def of_another(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Queue, Queue]]:
    """Two roots of another user than the one who runs the tests."""
    if os.geteuid() != 0:
        pytest.skip("to act as several users takes root")
    top = Path(tempfile.mkdtemp(prefix="dropq-roots-"))  # tmp_path is closed to other users
    try:
        top.chmod(0o755)
        a, b = joined(top / "roots", "a", "b", settle_time=0)
        for path in (top / "roots", *(top / "roots").rglob("*")):
            os.chown(path, PRODUCER, -1)
        yield a, b
    finally:
        shutil.rmtree(top)


@pytest.mark.host
@pytest.mark.parametrize("name", [f"{ID}1.B", "foreign"])
def test_what_the_bridge_may_not_read_stays_and_goes_back_where_it_was_given(
    of_another: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    a, b = of_another
    closed = base(a) / "target" / name
    closed.write_bytes(b"closed")
    closed.chmod(0o600)

    def cross() -> int:
        want(b)
        return bridged(b, "a")

    by(PRODUCER, lambda: a.send_many([b"0", b"1"]))
    assert by(PRODUCER, cross) == 2
    assert closed.exists() and sorted(bodies(b)) == [b"0", b"1"]

    def give_only() -> None:
        want(b)
        with monkeypatch.context() as patch:
            patch.setattr(bridge_module._Crossing, "_carry", lambda *_: (0, {}))
            bridged(b, "a")

    by(PRODUCER, lambda: a.send_many([b"2", b"3"]))
    by(PRODUCER, give_only)
    given = sorted((base(a) / ".dropq/transfers").glob("*/target/*"))
    assert len(given) == 2
    os.chown(given[0], 0, 0)
    given[0].chmod(0o600)
    assert by(PRODUCER, cross) == 1
    assert sorted([*bodies(a), *bodies(b)]) == sorted([b"closed", b"0", b"1", b"2", b"3"])
    assert len(bodies(a)) == 2 and at_rest(a)


# -- files that cannot be taken, for a while or for good ---------------------------------------------------------------

#: The bodies of the messages that cannot be taken at present.
Stuck = set[bytes]


def _unreadable(patch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    size = reading.readable_size
    patch.setattr(reading, "readable_size", lambda path: None if Path(path).read_bytes() in stuck else size(path))


def _not_renamed(patch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    rename = Storage.rename

    def refused(self: Storage, source: str, destination: str) -> None:
        if "/transfers/" in destination and Path(source).read_bytes() in stuck:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, destination)
        rename(self, source, destination)

    patch.setattr(Storage, "rename", refused)


def _no_room(patch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    full = SimpleNamespace(f_bavail=0, f_frsize=4096, f_files=0, f_favail=0)
    found = os.statvfs
    patch.setattr(os, "statvfs", lambda path: full if stuck else found(path))


CANNOT: dict[str, Callable[[pytest.MonkeyPatch, Stuck], None]] = {
    "it cannot be read": _unreadable,
    "it cannot be renamed": _not_renamed,
    "there is no room here": _no_room,
}


@pytest.fixture
def listing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a bridge list the peer's messages again however long a listing takes."""
    monkeypatch.setattr("dropq.lifecycle.open_queue.Timing", lambda: Timing(listing_share=0))


@pytest.mark.usefixtures("listing_at_once")
@pytest.mark.parametrize("why", CANNOT)
def test_what_could_not_be_taken_for_a_while_comes_though_nothing_changes_at_the_peer(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    a, b = pair
    a.send(b"x")
    os.utime(base(a) / "target", (0, 0))  # nothing has come there for long
    stuck = {b"x"}
    CANNOT[why](monkeypatch, stuck)
    want(b)
    bridge = bridge_of(b, "a")
    for _ in range(2):
        with suppress(DropqError):
            bridge.once()
    assert bodies(a) == [b"x"]
    stuck.clear()
    bridge.once()
    assert bodies(b) == [b"x"] and at_rest(a)


def test_a_message_that_cannot_be_renamed_stops_no_other_and_a_bridge_looks(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send_many([b"bad", b"1", b"2"])
    _not_renamed(monkeypatch, {b"bad"})
    want(b)
    looked = base(b) / ".dropq/wanted" / LOOKED
    os.utime(looked, (0, 0))
    bridge = bridge_of(b, "a")
    with pytest.raises(DropqError, match="Operation not permitted"):
        bridge.once()
    assert bridge.taken.total() == 2 and [message.body for message in taken(b)] == [b"1", b"2"]
    assert bodies(a) == [b"bad"] and at_rest(a)
    assert not any(reason.kind == "bridge-stopped" for reason in health(b).reasons)


@pytest.mark.usefixtures("listing_at_once")
@pytest.mark.parametrize("why", ["it cannot be renamed", "there is no room here"])
def test_why_a_message_cannot_be_taken_is_told_once_however_often_it_is_tried(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    a, b = pair
    a.send(b"bad")
    stuck, consumer = {b"bad"}, Wanting(b.context, "consumer", None)
    CANNOT[why](monkeypatch, stuck)
    give, tries, left = bridge_module._Crossing._give, count(), iter(range(9))

    def tried(self: Any, *args: Any) -> dict[str, str]:
        next(tries)
        return give(self, *args)

    monkeypatch.setattr(bridge_module._Crossing, "_give", tried)

    def wait(seconds: float) -> bool:
        """Let a consumer come and go between the rounds, as one that takes what is sent here does."""
        number = next(left, None)
        consumer.end() if number in (3, 5) else consumer.say(None)
        return number is None

    bridge = bridge_of(b, "a")
    bridge.run(wait)
    assert next(tries) > 3 and len(caplog.records) == 1
    stuck.clear()
    bridge.once()
    assert bodies(b) == [b"bad"]


@pytest.mark.usefixtures("listing_at_once")
@pytest.mark.parametrize("why", ["it cannot be read", "it cannot be renamed"])
def test_what_cannot_be_taken_keeps_no_other_from_a_consumer_of_one(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    a, b = pair
    a.send_many([b"bad", b"bad for a while", b"2", b"3"])
    stuck = {b"bad", b"bad for a while"}
    CANNOT[why](monkeypatch, stuck)
    monkeypatch.setattr(bridge_module, "BEHIND", math.inf)  # however long the rounds take
    bridge = bridge_of(b, "a")

    def come(rounds: int = 8) -> list[bytes]:
        found = []
        for _ in range(rounds):
            while (message := consumer.receive()) is not None:
                message.ack()
                found.append(message.body)
            with suppress(DropqError):
                bridge.once()
        return found

    with b.subscribe(max_backlog=1) as consumer:
        assert come() == [b"2", b"3"]
        stuck.remove(b"bad for a while")
        assert come() == [b"bad for a while"]
        a.send(b"4")
        stuck.clear()
        monkeypatch.setattr(bridge_module, "BEHIND", 0.0)  # by now it has waited for long
        assert come() == [b"bad", b"4"]


def test_a_bridge_that_is_started_anew_each_time_goes_past_what_cannot_be_taken(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send_many([b"bad", b"2", b"3"])
    CANNOT["it cannot be renamed"](monkeypatch, {b"bad"})
    found = []
    with b.subscribe(max_backlog=1) as consumer:
        for _ in range(6):
            while (message := consumer.receive()) is not None:
                message.ack()
                found.append(message.body)
            with suppress(DropqError):
                bridge_of(b, "a").once()
    assert found == [b"2", b"3"]


# -- damaged files, and links ------------------------------------------------------------------------------------------

#: What a stranger may write for a value of a JSON file of ours.
VALUES: list[object] = [
    None, True, -1, 10**400, 1.5, "", "x", "x" * 5000, "..", "../../../outside", "/", "/etc/passwd", "\0", "\udc80",
    "\ud800", ".", [], [[]], ["x"], ["../x"], ["0123456789abcdef~../x"], ["0123456789abcdef~.."], [None], {}, {"": {}},
]  # fmt: skip
#: And what for the whole of it.
CONTENTS = [
    b"", b"null", b"[]", b"{}", b"5", b'"x"', b"{", b"\xff\xfe", b"NaN", b"[" * 100_000, b" " * (2 << 20), b"1" * 5000,
]  # fmt: skip
Damage = Callable[[Path, Path], object]
FIRST_THIRD = random.randrange(3)


def _by_a_link(path: Path, outside: Path) -> None:
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def _by_a_folder(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def _by_a_fifo(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damages(said: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    """Yield what a stranger may do to a file that says something, each with words for it."""
    yield from {"a link": _by_a_link, "a folder": _by_a_folder, "a FIFO": _by_a_fifo}.items()
    for content in CONTENTS:
        yield f"{content[:10]!r}", partial(_write, content)
    for how, changed in _changed(said):
        yield how, partial(_write, json.dumps(changed).encode())


def _write(content: bytes, path: Path, outside: Path) -> None:
    path.write_bytes(content)


def _changed(said: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a file says with one of its values changed, or gone; also with one of those in a value.

    Each key gets a third of the values, the next key the next third, from one that chance chooses: all of them take
    two minutes.
    """
    for turn, (key, kept) in enumerate(said.items(), FIRST_THIRD):
        others = {other: value for other, value in said.items() if other != key}
        yield f"no {key}", others
        for value in VALUES[turn % 3 :: 3]:
            yield f"{key}: {str(value)[:20]!r}", {**others, key: value}
        if isinstance(kept, dict):
            yield from ((f"{key}, {how}", {**others, key: changed}) for how, changed in _changed(kept))


def rounds(to: Queue, of: str, count: int = 3) -> None:
    """Let a bridge run for some rounds: whatever it meets, it goes on."""
    left = iter(range(count))
    bridge_of(to, of).run(lambda seconds: next(left, None) is None)


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What lies in a folder: each file's inode and content."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def listed(a: Queue, b: Queue, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a message to b's row and list it; return the list."""

    def no(self: Any, *_: Any) -> Any:
        raise OSError(5, os.strerror(5))

    want(b)
    with monkeypatch.context() as patch:
        patch.setattr(lists.Carrier, "_send", no)
        rounds(b, "a")
    (path,) = (base(a) / ".dropq/transfers").glob("*/1.json")
    return path


def _to_json(a: Queue, b: Queue, monkeypatch: pytest.MonkeyPatch) -> Path:
    return listed(a, b, monkeypatch).with_name("to.json")


def _sent(a: Queue, b: Queue, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Send a message's list, and remove nothing; return the list."""
    unlink = Storage.unlink

    def refused(self: Storage, path: str) -> bool:
        if "~" in path:
            raise OSError(5, os.strerror(5), path)
        return unlink(self, path)

    want(b)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "unlink", refused)
        rounds(b, "a")
    (path,) = (base(a) / ".dropq/transfers").glob("*/1.json")
    return path


def _in_the_ledger(a: Queue, b: Queue, monkeypatch: pytest.MonkeyPatch) -> Path:
    _sent(a, b, monkeypatch)
    (path,) = (base(b) / ".dropq/ledger").iterdir()
    return path


FILES: dict[str, Callable[[Queue, Queue, pytest.MonkeyPatch], Path]] = {
    "where a row leads": _to_json,
    "a list that is not sent": listed,
    "a list that is sent": _sent,
    "the ledger": _in_the_ledger,
}


def lying(a: Queue, b: Queue) -> Counter[str]:
    """Count the messages at each place that they have in two roots."""
    given = [path for path in (base(a) / ".dropq/transfers").glob("*/target/*~*") if path.is_file()]
    places = {"a": len(bodies(a)), "b": len(bodies(b)), "row": len(given)}
    return Counter({place: count for place, count in places.items() if count})


@pytest.mark.parametrize("what", first_and_long(FILES))
def test_a_damaged_file_is_told_loses_nothing_and_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def built(number: int) -> tuple[Queue, Queue, Path]:
        a, b = joined(tmp_path / str(number), "a", "b", settle_time=0)
        a.send(b"x")
        path = FILES[what](a, b, monkeypatch)
        (tmp_path / str(number) / "outside").mkdir()
        return a, b, path

    arrived = "b" if what in ("a list that is sent", "the ledger") else ""
    for number in count():
        a, b, path = built(number)
        outside, kept = tmp_path / str(number) / "outside", path.read_bytes()
        if (damage := next(islice(damages(json.loads(kept)), number, None), None)) is None:
            break
        how, harm = damage
        if arrived and how == "given: '[]'":
            continue  # who writes a list that leaves a message out could as well send that again
        harm(path, outside)
        before = seen(outside)
        caplog.clear()
        rounds(b, "a")
        a.sweep()
        b.sweep()
        now = lying(a, b)
        assert seen(outside) == before, how
        assert now["b"] == 1 if arrived else now.total() == 1, (how, now)
        assert now["a"] == 0 or not arrived, (how, now)
        if now["row"]:
            told = [record.message for record in caplog.records]
            told += [note.message for note in health(a).notes if note.kind == "in-transit"]
            assert a.in_transit() and told, (how, now)
        if path.is_dir():
            path.rmdir()
        elif path.is_symlink() or path.exists():
            path.unlink()
        if now["row"]:
            path.write_bytes(kept)
        rounds(b, "a")
        assert lying(a, b) == {"b": 1}, how
        shutil.rmtree(tmp_path / str(number))
    assert number > 30


LINKED = [".dropq", "q/.dropq", "q/.dropq/transfers", "q/.dropq/transfers/ROW", "q/.dropq/transfers/ROW/target"]
LINKED += ["q/.dropq/delayed", "q/.dropq/ledger"]


@pytest.mark.parametrize("state", ["before it was given", "on its way"])
@pytest.mark.parametrize("what", LINKED)
def test_a_private_folder_of_a_peer_that_is_a_link_leads_nowhere(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    what: str, state: str,
) -> None:  # fmt: skip
    a, b = pair
    a.send(b"x")
    if state == "on its way":
        listed(a, b, monkeypatch)
    elif "ROW" in what:
        give(a, b, monkeypatch)
    folder = a.root.path / what
    if "ROW" in what:
        (row,) = (base(a) / ".dropq/transfers").iterdir()
        folder = a.root.path / what.replace("ROW", row.name)
    folder.mkdir(exist_ok=True, parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    _by_a_link(folder, outside)
    before = seen(outside)
    want(b)
    caplog.clear()
    rounds(b, "a")
    (peer,) = a.root.context.config.peer
    by_hand: list[Callable[[], object]] = [
        lambda: recall(reopened(b).root.context, b.root.context.config.peer[0], None),
        lambda: recall(reopened(a).root.context, peer, None),
        lambda: end_rows(reopened(a).root.context, "b", None),
        lambda: reopened(a).sweep(),
    ]
    for verb in by_hand:
        with suppress(DropqError):
            verb()
    assert seen(outside) == before
    assert bodies(b) == [] and caplog.records
    folder.unlink()
    (outside / folder.name).rename(folder)
    rounds(b, "a")
    assert lying(a, b) == {"b": 1}


@pytest.mark.parametrize("odd", ["a file", "a FIFO", "a closed folder", "nothing"])
def test_a_row_whose_messages_cannot_be_listed_stops_no_other(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    a, b = pair
    a.send(b"x")
    row = listed(a, b, monkeypatch).parent
    target = row.with_name("0" * 16) / "target"
    target.parent.mkdir()
    shutil.copy(row / "to.json", target.parent)
    makes: dict[str, Callable[[], object]] = {
        "a file": target.touch,
        "a FIFO": lambda: os.mkfifo(target),
        "a closed folder": lambda: target.mkdir(0),
        "nothing": lambda: None,
    }
    makes[odd]()

    def run() -> None:
        want(b)
        rounds(b, "a")

    unprivileged(run)
    assert bodies(b) == [b"x"]


def test_an_ended_row_that_is_a_link_gives_nothing_back(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send(b"x")
    row = listed(a, b, monkeypatch).parent
    ended = row.rename(row.with_name(f"{row.name}.ended"))
    (tmp_path / "outside").mkdir()
    _by_a_link(ended, tmp_path / "outside")
    assert end_rows(a.root.context, "b", None) == 0
    assert bodies(a) == [] and len(list((tmp_path / "outside").rglob("*~*"))) == 1


def test_what_others_write_into_wanted_stops_no_want_and_no_bridge(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    wanted, outside = base(b) / ".dropq/wanted", tmp_path / "outside"
    outside.mkdir()
    want(b)
    said = {"format": 1, "filter": None, "room": 5}
    for number, (_, harm) in enumerate(damages(said)):
        path = wanted / f"odd{number}"
        path.write_text(json.dumps(said))
        harm(path, outside)
    before = seen(outside)
    for body in (b"0", b"1"):
        a.send(body)
        rounds(b, "a")
    assert sorted(bodies(b)) == [b"0", b"1"] and seen(outside) == before
    b.sweep()
    want(b)
    a.send(b"2")
    rounds(b, "a")
    assert len(bodies(b)) == 3 and seen(outside) == before
