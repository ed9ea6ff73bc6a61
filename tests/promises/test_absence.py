"""Nothing is removed because it is not seen: a queue may be away for a while, with all that its names refer to."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from children import unprivileged
from forks import forked
from helpers import Clock, base, first_and_long, make_queue, where
from torture.acts import Meeting
from torture.calls import come_between

from dropq import DropqError, NoSuchQueue, Queue, Root, Unavailable, route
from dropq.cli.main import main
from dropq.diagnosis.fsck import fsck_root
from dropq.lifecycle import queue_notes, sidecars
from dropq.storage.files import Storage
from dropq.upkeep.sweep import sweep

#: What does not fit a name.
LONG: Any = {"properties": {"customer": "ann " * 40}, "correlation_id": "invoice-4711", "reply_to": "answers"}
DAY = 86_400

Away = Callable[[Path], None]


def nothing(path: Path) -> None:
    """An automounter's entry: it is there when somebody asks for it by name."""


def a_link_that_leads_nowhere(path: Path) -> None:
    path.symlink_to(path.parent.parent / "no-such-disk" / path.name)


def an_empty_mount_point(path: Path) -> None:
    path.mkdir()


def a_mount_point_with_something_beneath(path: Path) -> None:
    path.mkdir()
    (path / "written-while-the-disk-was-away").touch()


def a_mount_point_with_a_queue_beneath(path: Path) -> None:
    Root(path.parent).create_queue(path.name)


def closed_to_this_user(path: Path) -> None:
    path.mkdir(mode=0)


@contextmanager
def away(queue: Queue, leaving: Away) -> Iterator[None]:
    """Take a queue away, as when its disk is not mounted, and bring it back."""
    home = Path(queue.layout.home)
    disk = queue.root.path.parent / "disk"
    home.rename(disk)
    leaving(home)
    yield
    if home.is_symlink():
        home.unlink()
    shutil.rmtree(home, ignore_errors=True)
    disk.rename(home)


def swept(queue: Queue, clock: Clock, times: int = 3) -> int:
    """Sweep the root as cron does; return how many sidecars it removed."""
    removed = 0
    for _ in range(times):
        clock.advance(1.1 * DAY)
        removed += Root(queue.root.path, clock=clock).sweep().sidecars
    return removed


def collected(queue: Queue, clock: Clock) -> int:
    """Look for sidecars to remove as a sweep of the root does, which stops at queues that cannot be opened."""
    removed = 0
    for _ in range(3):
        clock.advance(1.1 * DAY)
        removed += Root(queue.root.path, clock=clock).tidy().sidecars
    return removed


def assert_whole(queue: Queue, clock: Clock) -> None:
    message = Root(queue.root.path, clock=clock).queue(queue.name).receive()
    assert message is not None
    assert (message.correlation_id, message.reply_to) == ("invoice-4711", "answers")
    assert message.properties == LONG["properties"]
    message.ack()


@pytest.mark.parametrize(
    "leaving",
    [
        nothing,
        a_link_that_leads_nowhere,
        an_empty_mount_point,
        a_mount_point_with_something_beneath,
        a_mount_point_with_a_queue_beneath,
    ],
)
def test_the_metadata_of_a_queue_that_is_away_stays(tmp_path: Path, clock: Clock, leaving: Away) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    with away(queue, leaving):
        assert swept(queue, clock) == 0
    assert swept(queue, clock) == 0
    assert_whole(queue, clock)


@pytest.mark.parametrize("linked", [False, True])
def test_the_metadata_of_a_queue_that_this_user_may_not_enter_stays(tmp_path: Path, clock: Clock, linked: bool) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    home = closed = Path(queue.layout.home)
    if linked:
        closed = tmp_path / "disk"
        closed.mkdir()
        home.rename(closed / "q")
        home.symlink_to(closed / "q")
    closed.chmod(0)
    try:
        assert unprivileged(lambda: collected(queue, clock)) == 0
    finally:
        closed.chmod(0o755)
    assert_whole(queue, clock)


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_metadata_of_a_message_that_was_moved_to_a_queue_which_is_away_stays(
    tmp_path: Path, clock: Clock, by_hand: bool
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    other = queue.root.create_queue("other", durability="none")
    queue.send(b"pay", **LONG)
    if by_hand:
        [file] = (base(queue) / "target").iterdir()
        file.rename(base(other) / "target" / file.name)
        assert swept(queue, clock, 1) == 0
    else:
        assert [outcome.ok for outcome in queue.move(other)] == [True]
    with away(other, nothing):
        assert swept(queue, clock) == 0
    assert_whole(other, clock)


def test_a_queue_that_was_made_by_hand_is_missed_too(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    for folder in ("working", "target", "processing", "processed", "expired", "error"):
        (queue.root.path / "mine" / folder).mkdir(parents=True)
    mine = queue.root.queue("mine")
    mine.send(b"pay", **LONG)
    with away(mine, nothing):
        assert swept(queue, clock) == 0
    assert_whole(mine, clock)


def test_a_root_that_knows_no_queues_yet_does_not_take_a_link_that_leads_nowhere_for_none(
    tmp_path: Path, clock: Clock
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    shutil.rmtree(queue.root.layout.queues)  # as a root of an older dropq
    for mark in (base(queue) / ".dropq").glob("queue-*"):
        mark.unlink()
    with away(queue, a_link_that_leads_nowhere):
        assert swept(queue, clock) == 0
    assert_whole(queue, clock)


def test_a_queue_that_is_away_is_told_with_the_way_out(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    with away(queue, nothing):
        assert swept(queue, clock, 1) == 0
        [finding] = fsck_root(Root(queue.root.path, clock=clock).context, repair=True)
        assert (finding.kind, finding.level, finding.repaired) == ("absent-queue", "warning", False)
        for text in (finding.detail, caplog.text):
            assert queue.layout.home in text
            assert f"remove {finding.path}" in text
        os.unlink(finding.path)  # what it says to do where the queue is gone for good
        assert swept(queue, clock) == 1


def test_a_queue_that_lacks_target_alone_is_not_away(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    os.rmdir(queue.layout.target)
    says = "queue q lacks its folder target/: `dropq fsck q --repair` makes it"
    assert queue_notes.why_away(queue.root.context.layout, "q") == says
    with pytest.raises(DropqError, match=says):
        Root(queue.root.path).queue("q").send("x")


def test_the_metadata_of_a_queue_that_was_deleted_or_renamed_is_no_reason_to_keep_that_of_others(
    tmp_path: Path, clock: Clock
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock, history=False)
    other = queue.root.create_queue("other", durability="none", history=False)
    queue.send(b"pay", **LONG)
    for _ in range(2):
        other.send(b"pay", **LONG)
    queue.root.delete_queue("q", force=True)
    Path(other.layout.home).rename(other.root.path / "renamed")
    renamed = queue.root.queue("renamed")
    assert_whole(renamed, clock)
    assert fsck_root(queue.root.context) == []
    assert swept(renamed, clock) == 2
    assert_whole(renamed, clock)


@pytest.mark.parametrize("state", ["processed", "error", "expired", "target"])
def test_the_metadata_of_a_state_folder_whose_link_leads_nowhere_stays(
    tmp_path: Path, clock: Clock, state: str
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    linked(base(queue) / state, tmp_path / "disk")
    queue.send(b"pay", **LONG)
    if state != "target":
        message = queue.receive()
        assert message is not None
        if state == "error":
            message.reject("no")
        else:
            message.ack() if state == "processed" else message.expire()
    (tmp_path / "disk").rename(tmp_path / "away")
    assert collected(queue, clock) == 0
    (tmp_path / "away").rename(tmp_path / "disk")
    assert collected(queue, clock) == 0
    [found] = Root(queue.root.path, clock=clock).queue("q").browse(state)
    assert (found.correlation_id, found.properties) == ("invoice-4711", LONG["properties"])


@pytest.mark.parametrize("private", [".dropq", ".dropq/delayed"])
def test_a_private_folder_that_is_a_link_is_not_followed_and_keeps_the_metadata(
    tmp_path: Path, clock: Clock, private: str
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    for file in (base(queue) / "target").iterdir():
        file.unlink()  # nobody refers to the metadata, unless it is from behind the link
    linked(base(queue) / private, tmp_path / "disk")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "disk").rglob("*")}
    assert collected(queue, clock) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "disk").rglob("*")} == before


def linked(folder: Path, disk: Path) -> None:
    folder.rename(disk)
    folder.symlink_to(disk)


def test_a_link_that_leads_nowhere_in_place_of_incoming_keeps_the_metadata(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path / "root", clock=clock, dropboxmq=True)
    queue.send(b"pay", **LONG)
    unknown(queue)
    linked(base(queue), tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "away")
    assert collected(queue, clock) == 0
    (tmp_path / "away").rename(tmp_path / "disk")
    assert_whole(queue, clock)


def unknown(queue: Queue) -> None:
    """Make a queue as an older dropq made it: without a mark, and without a note."""
    shutil.rmtree(queue.root.layout.queues)
    for mark in queue.root.path.glob("**/.dropq/queue-*"):
        mark.unlink()


def test_a_link_that_breaks_while_another_is_looked_behind_keeps_the_metadata(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    for state in ("target", "processed"):
        linked(base(queue) / state, tmp_path / state)
    queue.send(b"done")
    message = queue.receive()
    assert message is not None
    message.ack()
    queue.send(b"pay", **LONG)
    layout = queue.root.layout
    clock.advance(1.1 * DAY)
    for number in range(sum(1 for _ in sidecars.collect(layout.path, layout.meta, Storage(), clock))):
        for _ in range(3):
            clock.advance(1.1 * DAY)
            for step, removed in enumerate(sidecars.collect(layout.path, layout.meta, Storage(), clock)):
                assert removed == 0
                if step == number:
                    (tmp_path / "target").rename(tmp_path / "away")
            (tmp_path / "away").rename(tmp_path / "target")
    assert_whole(queue, clock)


def test_a_queue_that_goes_while_its_root_is_looked_through_keeps_the_metadata(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    layout, home, disk = queue.root.layout, Path(queue.layout.home), tmp_path / "disk"
    marks = queue_notes.marks_in(queue.layout.private)

    def names_below(*looked: Any) -> Iterator[str]:
        yield from marks  # seen in the moment before
        home.rename(disk)

    for _ in range(3):
        clock.advance(1.1 * DAY)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(queue_notes, "_names_below", names_below)
            assert sum(sidecars.collect(layout.path, layout.meta, Storage(), clock)) == 0
        disk.rename(home)
    assert_whole(queue, clock)


def test_looking_for_metadata_brings_no_deleted_queue_back(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    other = queue.root.create_queue("other", durability="none")
    other.send(b"pay", **LONG)
    marks_in = queue_notes.marks_in

    def deleted_first(private: str) -> set[str]:
        if os.path.exists(queue.layout.home) and private == queue.layout.private:
            queue.root.delete_queue("q")
        return marks_in(private)

    monkeypatch.setattr(queue_notes, "marks_in", deleted_first)
    assert collected(other, clock) == 0
    assert not os.path.exists(queue.layout.home)
    monkeypatch.undo()
    queue.root.create_queue("q", durability="none")
    assert_whole(other, clock)


@pytest.fixture
def unwritable(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue of an older dropq that is mounted read-only, beside one with metadata that nobody needs."""
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    unknown(queue)
    other = queue.root.create_queue("other", durability="none", history=False)
    other.send(b"gone", **LONG)
    message = other.receive()
    assert message is not None
    message.ack()
    touch = Storage.touch

    def refused(store: Storage, path: str) -> None:
        if path.startswith(f"{queue.layout.private}/queue-"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        touch(store, path)

    monkeypatch.setattr(Storage, "touch", refused)
    return queue


def test_a_queue_that_cannot_be_written_is_no_reason_to_keep_the_metadata_of_others(
    unwritable: Queue, clock: Clock
) -> None:
    assert collected(unwritable, clock) == 1
    assert fsck_root(Root(unwritable.root.path, clock=clock).context) == []
    assert_whole(unwritable, clock)


@pytest.mark.parametrize("leaving", [nothing, an_empty_mount_point, a_mount_point_with_something_beneath])
def test_a_queue_that_cannot_be_written_is_missed_while_it_is_away(
    unwritable: Queue, clock: Clock, caplog: pytest.LogCaptureFixture, leaving: Away
) -> None:
    assert swept(unwritable, clock, 1) == 0
    with away(unwritable, leaving):
        assert swept(unwritable, clock) == 0
        [finding] = [
            one for one in fsck_root(Root(unwritable.root.path, clock=clock).context) if one.kind == "absent-queue"
        ]
        for text in (finding.detail, caplog.text):
            assert unwritable.layout.home in text
            assert f"remove {finding.path}" in text
    assert swept(unwritable, clock) == 1
    assert_whole(unwritable, clock)


def test_a_queue_that_can_be_written_again_has_a_mark_in_place_of_its_path(
    unwritable: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(unwritable, clock, 1)
    notes = Path(unwritable.root.layout.queues)
    assert len(list(notes.glob("path-*"))) == 1
    monkeypatch.undo()
    swept(unwritable, clock, 1)
    assert list(notes.glob("path-*")) == []
    Path(unwritable.layout.home).rename(unwritable.root.path / "renamed")
    assert fsck_root(Root(unwritable.root.path, clock=clock).context) == []


def test_a_queue_without_a_mark_that_is_deleted_is_forgotten(unwritable: Queue, clock: Clock) -> None:
    swept(unwritable, clock, 1)
    unwritable.root.delete_queue("q", force=True)
    assert "absent-queue" not in {one.kind for one in fsck_root(Root(unwritable.root.path, clock=clock).context)}
    assert swept(unwritable, clock) == 2


def test_what_keeps_metadata_from_being_collected_is_told_as_it_is(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"pay", **LONG)
    unknown(queue)

    def full(*anything: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), queue.layout.private)

    monkeypatch.setattr(queue_notes, "make_known", full)
    assert collected(queue, clock) == 0
    assert (
        f"as a queue cannot be noted, and would not be missed: No space left on device at {queue.layout.private}"
        in (caplog.text)
    )


@pytest.mark.parametrize("leaving", [nothing, a_link_that_leads_nowhere, closed_to_this_user])
def test_the_reasons_of_messages_that_are_away_stay(tmp_path: Path, clock: Clock, leaving: Away) -> None:
    queue = make_queue(tmp_path / "root", clock=clock)
    queue.send(b"a")
    message = queue.receive()
    assert message is not None
    message.reject("no such customer")
    context = queue.context  # as of a consumer that goes on: a queue without its folders does not open
    error = base(queue) / "error"
    error.rename(tmp_path / "disk")
    leaving(error)

    def swept_twice() -> int:
        return sweep(context).leftovers + sweep(context).leftovers

    clock.advance(2 * DAY)
    try:
        assert unprivileged(swept_twice) == 0
    finally:
        error.unlink() if error.is_symlink() else shutil.rmtree(error, ignore_errors=True)
    (tmp_path / "disk").rename(error)
    [again] = queue.browse("error")
    assert again.reason is not None and again.reason["detail"] == "no such customer"


def hidden_by_a_dead_delete(path: Path) -> None:
    """A delete that died undecided: a sweep brings the queue back."""
    path.rename(path.with_name(f".{path.name}.deleting-{int(time.time() * 1000)}-abcdef"))


def on_a_disk_that_is_away(path: Path) -> None:
    path.rename(path.parent.parent / "disk")


def behind_a_link_that_leads_nowhere(path: Path) -> None:
    on_a_disk_that_is_away(path)
    a_link_that_leads_nowhere(path)


def beneath_an_empty_mount_point(path: Path) -> None:
    on_a_disk_that_is_away(path)
    path.mkdir()


HIDDEN = [
    hidden_by_a_dead_delete,
    on_a_disk_that_is_away,
    behind_a_link_that_leads_nowhere,
    beneath_an_empty_mount_point,
]


@pytest.fixture
def service(tmp_path: Path) -> Root:
    """A root with the queues `asked` and `answers`, and one for dead letters."""
    root = Root.create(tmp_path / "root")
    (root.path / "dropq.toml").write_text(
        'format = 1\ndead_letter_queue = "dead"\n[defaults]\ndurability = "none"\nsettle_time = 0\n'
    )
    root = Root(root.path)
    for name in ("dead", "asked", "answers"):
        root.create_queue(name)
    return root


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_send_to_a_queue_that_is_away_is_unavailable_and_no_dead_letter(service: Root, hide: Away) -> None:
    opened = service.queue("answers")
    opened.send(b"before")
    hide(service.path / "answers")
    for queue in (opened, service.queue("answers")):
        with pytest.raises(Unavailable, match="queue answers is"):
            queue.send(b"pay")
        with pytest.raises(Unavailable, match="queue answers is"):
            queue.send_many([b"pay"])
    assert where(service.queue("dead")) == {}
    with pytest.raises(NoSuchQueue, match="queue answers is"):
        service.queue("answers").receive()


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_queue_that_is_away_is_not_left_out_of_a_listing(
    service: Root, hide: Away, capfd: pytest.CaptureFixture[str]
) -> None:
    (service.path / "no queue").mkdir()
    assert main(["--root", str(service.path), "ls"]) == 0
    hide(service.path / "answers")
    assert main(["--root", str(service.path), "ls"]) == 1
    out, err = capfd.readouterr()
    assert [line.split("\t")[0] for line in out.splitlines()] == ["answers", "asked", "dead", "asked", "dead"]
    assert err.count("error: ") == 1 and err.startswith("error: queue answers is ")


@pytest.mark.parametrize("hide", HIDDEN)
def test_health_tells_how_a_dead_letter_queue_that_is_away_comes_back(service: Root, hide: Away) -> None:
    paid = service.create_queue("paid", exhausted="dead-letter")
    hide(service.path / "dead")
    (reason,) = paid.health().reasons
    assert reason.kind == "absent-letters"
    assert "queue dead is" in reason.message
    assert "dropq create" not in reason.message


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_reply_to_a_queue_that_is_away_is_unavailable_and_no_dead_letter(service: Root, hide: Away) -> None:
    service.queue("asked").send(b"price?", reply_to="answers")
    hide(service.path / "answers")
    with service.queue("asked") as asked:
        message = asked.receive()
        assert message is not None
        with pytest.raises(Unavailable, match=r"queue answers is .*; nothing was sent"):
            message.reply(b"7")
    assert where(service.queue("dead")) == {}


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_bounce_to_a_queue_that_is_away_waits_and_explain_says_so(service: Root, hide: Away) -> None:
    asked = service.queue("asked")
    asked.add_selector("back", op="bounce", to="answers")
    asked.send(b"price?", reply_to="answers")
    hide(service.path / "answers")
    route(service, once=True)
    assert where(asked) == {"target": [b"price?"]}
    assert any("queue answers is" in why.detail for why in asked.explain())
    assert where(service.queue("dead")) == {}


def test_a_send_to_what_never_was_a_queue_and_to_a_deleted_one_is_a_dead_letter(service: Root) -> None:
    service.delete_queue("answers")
    for name in ("answers", "ansers"):
        assert service.queue(name).send(b"pay").delivered_to == "dead"


MADE: dict[str, Callable[[Root], object]] = {
    "made": lambda root: root.create_queue("made"),
    "a.b": lambda root: root.create_topic("a.b"),
    "t/s.c": lambda root: root.topic("t").create_subscription("s", client_id="c"),
}


@pytest.mark.parametrize("name", first_and_long(MADE))
def test_a_queue_that_is_deleted_as_it_is_made_is_missing_and_not_away(service: Root, name: str) -> None:
    """The deletion comes before each call of what makes it: it leaves neither a folder nor a note."""
    service.create_topic("t")
    for calls in count():

        def meet(calls: int = calls) -> None:
            deleting = Meeting(calls, lambda: Root(service.path).delete_queue(name, force=True))
            come_between(deleting)
            with suppress(DropqError):
                MADE[name](Root(service.path))
            os._exit(0 if len(deleting.calls) > calls else 3)

        code = forked(meet)
        if service.queue(name).exists():
            service.delete_queue(name, force=True)
        assert service.queue(name).send(b"a").delivered_to == "dead", calls
        assert code in (0, 3), calls
        if code == 3:
            assert calls > 20
            return


def test_a_topic_whose_delete_died_is_unavailable_and_comes_back(tmp_path: Path, clock: Clock) -> None:
    root = Root.create(tmp_path / "root", clock=clock)
    topic = root.create_topic("a.b", durability="none")
    topic.create_subscription("s", client_id="c")
    topic.unsubscribe("s", client_id="c")
    incoming = Path(topic.queue.layout.base)
    incoming.rename(incoming.with_name(f".incoming.deleting-{clock.now_ms()}-abcdef"))
    with pytest.raises(Unavailable, match="being deleted"):
        Root(root.path, clock=clock).topic("a.b").publish(b"news")
    clock.advance(61)
    root.sweep()
    assert Root(root.path, clock=clock).topic("a.b").publish(b"news").accepted
