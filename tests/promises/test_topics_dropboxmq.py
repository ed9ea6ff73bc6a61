"""Topics that dropq and DropboxMQ 1.2 share: what that program writes is read, and what dropq writes leaves it whole.

The vectors are the record of what the program did, step by step.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forks import DIED, forked
from helpers import FRESH, Clock, base, drop, files, first_and_long, names_in, take, timed, where

from dropq import DropqError, InvalidName, Message, NoSuchQueue, Queue, Root, Unavailable
from dropq.format.addresses import SubscriptionName, check_subscription_name, is_topic_name, topic_layout
from dropq.lifecycle import queue_notes
from dropq.storage import reading, system_calls
from dropq.storage.files import Storage
from dropq.topics import subscriptions, writers

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "dropboxmq-1.2-topics.json").read_text()
)
SUBSCRIPTIONS = [
    (each["subscription"], each["client"], each["folder"][0], each["no_local_of_name_plus_L"][0])
    for each in VECTORS["names"]["subscriptions"]
]
#: Names that DropboxMQ takes for other topics, by leaving out empty parts, or that lead elsewhere: dropq refuses them.
REFUSED_TOPICS = {"x..y", ".x", "x.", "a/b", "..", ".", "a.../b", "x.deleted-1"}


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    made = Root.create(tmp_path / "root", clock=clock, dropboxmq=True)
    with (tmp_path / "root" / "dropq.toml").open("a") as file:
        file.write('[defaults]\ndurability = "none"\nredelivery_delay = 0\n')
    return opened(made)


def opened(root: Root) -> Root:
    return timed(Root(root.path, clock=root.clock), FRESH)


def replayed(root: Root, steps: list[dict[str, Any]]) -> None:
    """Leave on disk what DropboxMQ left after some steps; each file is filled with its size in bytes."""
    for step in steps:
        for folder in step.get("dirs_added", ()):
            (root.path / folder).mkdir(parents=True, exist_ok=True)
        for file, size in step.get("files_added", {}).items():
            path = root.path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
        for file in step.get("files_removed", ()):
            (root.path / file).unlink(missing_ok=True)
        for folder in step.get("dirs_removed", ()):
            shutil.rmtree(root.path / folder, ignore_errors=True)


def received(queue: Queue) -> list[tuple[str, int]]:
    """Take all that waits, and acknowledge it; return ids and delivery counts."""
    taken = []
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            taken.append((message.id, message.delivery_count))
            message.ack()
    return taken


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "client", "folder", "no_local"), SUBSCRIPTIONS)
def test_the_folder_of_a_subscription_is_called_as_dropboxmq_calls_it(
    name: str, client: str, folder: str, no_local: str
) -> None:
    assert SubscriptionName(name, client).folder == folder
    assert SubscriptionName.of(folder) == (name, client, False)
    assert SubscriptionName(f"{name}L", client, no_local=True).folder == no_local
    assert SubscriptionName.of(no_local) == (f"{name}L", client, True)


def test_dropq_makes_every_subscription_that_dropboxmq_does_but_those_without_a_name() -> None:
    def refuses(name: str, client: str) -> bool:
        try:
            check_subscription_name(name, client)
        except InvalidName:
            return True
        return False

    assert {(name, client) for name, client, *_ in SUBSCRIPTIONS if refuses(name, client)} == {("", "c")}


def test_the_folder_of_a_topic_is_where_dropboxmq_looks_for_it() -> None:
    topics = {each["topic"]: each["maps_to"] for each in VECTORS["names"]["topics"]}
    assert {topic for topic in topics if not is_topic_name(topic)} == REFUSED_TOPICS
    for topic in topics.keys() - REFUSED_TOPICS:
        assert topic_layout("/root", topic).home == f"/root/{topics[topic]}"


@pytest.mark.parametrize("name", sorted(REFUSED_TOPICS))
def test_a_topic_that_dropboxmq_would_take_for_another_is_refused(root: Root, name: str) -> None:
    with pytest.raises(InvalidName, match=re.escape(repr(name))):
        root.create_topic(name)
    assert not (root.path / "topic-root").exists()


def test_a_publish_leaves_the_files_that_dropboxmqs_publish_leaves(root: Root) -> None:
    calls = VECTORS["syscalls_of_one_publish_to_a_b"]
    renames = [re.findall(r'"([^"]+)"', call) for call in calls if call.startswith("rename")]
    ends = {os.path.dirname(destination) for _, destination in renames}
    for topic in ("a", "a.b"):
        root.create_topic(topic)
    root.topic("a.b").create_subscription("one", client_id="me")
    root.topic("a").create_subscription("two", client_id="me")
    root.topic("a").create_subscription("nl", client_id="me", no_local=True)
    root.topic("a.b", client_id="me").publish("hello")
    there = {str(path.parent.relative_to(root.path)) for path in (root.path / "topic-root").rglob("4.*")}
    assert there == ends
    assert {path.read_bytes() for path in (root.path / "topic-root").rglob("4.*")} == {b"hello"}


# -- what DropboxMQ left -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(1, len(VECTORS["topics"]) + 1))
def test_after_each_step_dropq_finds_the_topics_and_subscriptions_that_dropboxmq_has(root: Root, steps: int) -> None:
    replayed(root, VECTORS["topics"][:steps])
    expected = set()
    for incoming in (root.path / "topic-root").rglob(".incoming"):
        expected.add(str(incoming.parent.relative_to(root.path / "topic-root")).replace("/", "."))
    for above in (root.path / "topic-root").rglob(".subscriptions"):
        topic = str(above.parent.relative_to(root.path / "topic-root")).replace("/", ".")
        expected |= {f"{topic}/{name}" for name in os.listdir(above) if ".deleted-" not in name}
    queues = [queue for queue in root.queues() if queue.name != "orders"]  # the record has it in part only
    assert {queue.name for queue in queues} == expected
    for queue in queues:
        states = {state: sorted(os.listdir(base(queue) / state)) for state in ("target", "processed", "error")}
        for state, there in states.items():
            # A claim's prefix that DropboxMQ left before a name does not count.
            ids = sorted(name.rpartition("~")[2].split(".")[1] for name in there)
            assert sorted(message.id for message in queue.browse(state)) == ids
        received(queue)
        assert os.listdir(base(queue) / "target") == []


def test_dropq_publishes_to_the_subscriptions_that_dropboxmq_made(root: Root) -> None:
    replayed(root, VECTORS["topics"][:36])  # up to subscriptions of a and of a.b
    walk_as_dropboxmq(root.path)
    queues = [queue for queue in root.queues() if "/" in queue.name]
    before = {queue.name: queue.counts()["target"] for queue in queues}
    sent = root.topic("a.b", client_id="x.pub").publish(b"1")
    assert sent.distributed
    got = {queue.name for queue in queues if queue.counts()["target"] > before[queue.name]}
    assert got == {name for name in before if name.startswith(("a/", "a.b/")) and "x%2Epub.no-local" not in name}
    assert got
    walk_as_dropboxmq(root.path)


def test_a_distributors_copies_are_taken_through_its_prefix(root: Root) -> None:
    """What its name was before the prefix is the id, the counts count; before a plain name, ~ is the name's own."""
    first, second = VECTORS["distributor"]
    replayed(root, [first, {**second, "files_removed": []}])
    copies = root.queue("a/nl.me.no-local")
    coded = {
        "dist~4.1795332982430000-0000000001.T": ("1795332982430000-0000000001", 1),
        "dist~4.1795332982430000-0000000004.T.....JMSXDeliveryCountI=2": ("1795332982430000-0000000004", 3),
        "dist~.hidden": ("dist~.hidden", 1),
    }
    assert coded.keys() <= set(os.listdir(copies.layout.target))
    there = len(os.listdir(copies.layout.target))
    taken = received(copies)
    assert set(coded.values()) <= set(taken)
    assert len(taken) == there
    kept = set(names_in(copies, "processed"))
    assert "4.1795332982430000-0000000001.T" in kept
    assert "dist~.hidden" in kept
    (old,) = (one for one in root.queue("a.b").browse("processed") if one.id == "1795332982430000-0000000004")
    assert old.delivery_count == 3


def test_a_plain_name_that_a_distributor_delivers_keeps_the_prefix_as_its_own(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    name = "1795333238528000-0795817103~report.csv"
    drop(copies, name, b"1")
    assert received(copies) == [(name, 1)]
    assert names_in(copies, "processed") == [name]


def test_what_a_distributor_holds_is_left_to_it_until_a_sweep_is_told_otherwise(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    name = "dist~4.1795332982430000-0000000001.T"
    (base(topic.queue) / "processing" / name).write_bytes(b"1")
    clock.advance(100_000)
    assert topic.publish(b"2").distributed
    root.sweep()
    received(copies)
    assert names_in(topic.queue, "processing") == [name]
    assert topic.queue.sweep(foreign_older_than=5).foreign == 1
    (message,) = topic.queue.browse("error")
    assert message.reason is not None
    assert (message.id, message.reason["reason"]) == ("1795332982430000-0000000001", "foreign_claim")
    assert where(copies) == {"processed": [b"2"]}, "whether it had a copy is not known, so it gets none"


def test_a_publish_of_dropboxmqs_that_died_half_way_is_left_alone(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    name = "4.1795332982430000-0000000001.T"
    for queue in (topic.queue, copies):
        (base(queue) / "working" / name).write_bytes(b"half")
    root.sweep()
    received(copies)
    assert where(topic.queue) == where(copies) == {"working": [b"half"]}


@pytest.mark.parametrize("folder", ["s.c.deleted-1795333235623", "s.c.deleted-1795333386497.deleted-1795333386498"])
def test_what_dropboxmq_removed_is_no_subscription_and_does_not_keep_its_name(root: Root, folder: str) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c")
    above = Path(topic.queue.layout.topic) / ".subscriptions"
    os.rename(above / "s.c", above / folder)
    assert topic.subscriptions() == []
    assert topic.publish(b"1").distributed
    assert files(above / folder / "target") == {}
    topic.create_subscription("s", client_id="c")
    topic.publish(b"2")
    assert sorted(os.listdir(above)) == ["s.c", folder]


def test_a_plain_file_among_the_subscriptions_does_no_harm(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    (Path(topic.queue.layout.topic) / ".subscriptions" / "README.txt").write_text("x")
    assert topic.publish(b"1").distributed
    assert where(copies) == {"target": [b"1"]}


def test_a_link_among_the_subscriptions_to_a_queue_is_fed_once(root: Root) -> None:
    topic = root.create_topic("a")
    queue = root.create_queue("other", dropboxmq=True)
    above = Path(topic.queue.layout.topic) / ".subscriptions"
    (above / "to-queue.x").symlink_to(queue.layout.base)
    (above / "again.x").symlink_to(queue.layout.base)
    (above / "nowhere.x").symlink_to(root.path / "nowhere")
    assert topic.publish(b"1").distributed
    assert where(queue) == {"target": [b"1"]}


def test_a_subscription_without_a_name_that_dropboxmq_made_is_served(root: Root) -> None:
    topic = root.create_topic("a")
    folder = Path(topic.queue.layout.topic) / ".subscriptions" / ".c"
    for state in ("working", "target", "processing", "processed", "expired", "error"):
        (folder / state).mkdir(parents=True)
    assert topic.publish(b"1").distributed
    assert list(files(folder / "target").values()) == [b"1"]
    assert len(received(root.queue("a/.c"))) == 1


# -- what DropboxMQ meets ------------------------------------------------------------------------------------------


def walk_as_dropboxmq(root: Path) -> None:
    """Go through a root as DropboxMQ's publisher, subscriber and creator do, and fail where one of them would."""
    for home in [path for path, _, _ in os.walk(root / "topic-root") if "/." not in path[len(str(root)) :]]:
        incoming, above = Path(home) / ".incoming", Path(home) / ".subscriptions"
        if incoming.exists():
            _check_folders(incoming)
        for entry in os.listdir(above) if above.exists() else ():
            if ".deleted" in entry or not (above / entry).is_dir():
                continue  # passed over
            _check_folders(above / entry)
            parts = entry.split(".")
            is_view = (above / entry).is_symlink()
            assert len(parts) == 2 or (len(parts) == 3 and parts[2] == "no-local"), f"{entry} is taken for {parts[:2]}"
            assert is_view or all(parts), f"{entry} in .subscriptions is no subscription"


def _check_folders(folder: Path) -> None:
    for state in ("working", "target", "processing", "processed", "expired", "error"):
        assert (folder / state).is_dir(), f"{folder} was there before its {state}/"
    hidden = [name for name in os.listdir(folder / "target") if name.startswith(".")]
    assert not hidden, f"{hidden} in {folder}/target would be delivered"


def everything(root: Root) -> None:
    """Do everything in topics that dropq does: what is left of it at the end is one topic with three receivers."""
    top = root.create_topic("a")
    topic = root.create_topic("a.b", history=True)
    for number in range(3):
        topic.publish(str(number))
    copies = topic.create_subscription("s", client_id="c", recovery_point="epoch")
    top.create_subscription("above", client_id="c")
    topic.create_subscription("nl", client_id="me", no_local=True, filter="JMSPriority > 3")
    root.create_queue("view", underlying_topic="a.b", dropboxmq=True)
    root.create_queue("all", underlying_topic="^a", default_publish_target="a", dropboxmq=True)
    with topic.subscribe("s", durable=False) as ephemeral:
        root.topic("a.b", client_id="me").publish(b"1")
        message = ephemeral.receive()
        assert message is not None
        message.nack()
    root.queue("view").send(b"2")
    topic.queue.send_many([b"3", {"body": b"4", "delay": "1h"}])
    drop(topic.queue, "report.csv", b"5")
    (base(copies) / "target" / "4.1795332982430000-0000000001.T").write_bytes(b"6")
    received(copies)
    copies.close()
    topic.create_subscription("s", client_id="c", filter="JMSPriority > 1")
    topic.create_subscription("s", client_id="c", no_local=True)
    topic.publish(b"7")
    topic.unsubscribe("s", client_id="c")
    root.sweep()
    root.delete_queue("all", force=True)
    topic.queue.fsck(repair=True)


@contextmanager
def between_calls(act: Callable[[int], None]) -> Iterator[None]:
    """Call a function, with a number, before each call that changes something on disk."""
    numbers, inside = count(1), False

    def stepping(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if not inside:
                inside = True
                try:
                    act(next(numbers))
                finally:
                    inside = False
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in ("write", "rename", "unlink", "link", "symlink", "mkdir", "rmdir", "utime"):
            patches.enter_context(mock.patch.object(os, name, stepping(getattr(os, name))))
        patches.enter_context(
            mock.patch.object(system_calls, "rename_noreplace", stepping(system_calls.rename_noreplace))
        )
        yield


@pytest.mark.crashes
def test_dropboxmq_could_publish_and_subscribe_between_any_two_steps_of_dropq(root: Root) -> None:
    steps = []

    def walk(step: int) -> None:
        steps.append(step)
        walk_as_dropboxmq(root.path)

    with between_calls(walk):
        everything(root)
    walk_as_dropboxmq(root.path)
    assert len(steps) > 200
    assert [queue.name for queue in root.queues()] == ["a", "a.b", "a.b/nl.me.no-local", "a/above.c", "view"]


def seen_by_dropboxmq(root: Path) -> dict[str, int]:
    """How many files, hidden ones too, lie in each folder below a root that a DropboxMQ may list: none in a .dropq."""
    seen = {}
    for folder, below, names in os.walk(root):
        seen[os.path.relpath(folder, root)] = len(names)
        below[:] = [name for name in below if name != ".dropq"]
    return seen


def test_the_log_changes_nothing_that_dropboxmq_lists(tmp_path: Path, clock: Clock) -> None:
    seen, logs = {}, {}
    for level in ("off", "all"):
        path = tmp_path / level
        Root.create(path, clock=clock, dropboxmq=True)
        (path / "dropq.toml").write_text(f'format = 1\n[defaults]\ndurability = "none"\nlog = "{level}"\n')
        everything(root := opened(Root(path, clock=clock)))
        root.create_queue("q", dropboxmq=True).send_many([b"1", b"2", b"3"])
        for queue in (root.queue("q"), root.queue("a/above.c")):
            for settle in (Message.ack, Message.nack, partial(Message.reject, reason="r")):
                settle(take(queue))
        walk_as_dropboxmq(path)
        seen[level] = seen_by_dropboxmq(path)
        logs[level] = {str(log.parent.relative_to(path)) for log in path.rglob("*.jsonl")}
    assert seen["all"] == seen["off"]
    homes = ("q/incoming", "topic-root/a/b/.incoming", "topic-root/a/.subscriptions/above.c")
    assert logs["off"] == set()
    assert logs["all"] >= {f"{home}/.dropq/log" for home in homes}


def dies_at(step: int, now: int) -> None:
    if now == step:
        os._exit(DIED)


@pytest.mark.parametrize("step", first_and_long(range(3, 400, 17), 8))
def test_dropboxmq_could_publish_wherever_dropq_died_and_while_a_sweep_brings_that_in_order(
    root: Root, clock: Clock, step: int
) -> None:

    def die() -> None:
        with between_calls(partial(dies_at, step)):
            everything(root)

    assert forked(die) in (0, DIED)
    walk_as_dropboxmq(root.path)
    clock.advance(7200)
    with between_calls(lambda step: walk_as_dropboxmq(root.path)):
        opened(root).sweep()
    walk_as_dropboxmq(root.path)


# -- views -----------------------------------------------------------------------------------------------------------


def test_a_view_is_linked_in_its_topmost_topic_alone_as_dropboxmq_feeds_all_above(root: Root) -> None:
    def links() -> set[str]:
        found = (root.path / "topic-root").rglob("*.dropq")
        return {str(link.relative_to(root.path / "topic-root")) for link in found if link.is_symlink()}

    root.create_topic("t.u.v")
    root.create_queue("view", underlying_topic="t.*", default_publish_target="t.u.v")
    assert links() == {"t/u/v/.subscriptions/view.dropq"}
    root.create_topic("t")
    root.create_topic("t.w")
    assert links() == {"t/.subscriptions/view.dropq"}
    (root.path / "topic-root/t/w/.subscriptions/view.dropq").symlink_to(base(root.queue("view")))
    root.sweep()
    assert links() == {"t/.subscriptions/view.dropq"}
    root.delete_queue("t")
    assert links() == {"t/u/v/.subscriptions/view.dropq", "t/w/.subscriptions/view.dropq"}


def test_a_view_gets_only_its_own_topics_although_dropboxmq_s_link_is_in_one_above(root: Root) -> None:
    topics = [root.create_topic(name) for name in ("t", "t.u")]
    view = root.create_queue("view", underlying_topic="t")
    plain = root.create_queue("plain")
    (root.path / "topic-root/t/.subscriptions/plain.dropq").symlink_to(base(plain))
    for topic in topics:
        topic.publish(topic.name)
    assert where(view) == {"target": [b"t"]}
    assert not where(plain)


@pytest.mark.parametrize("many", [1, 2, 5])
def test_a_subscription_that_dropboxmq_is_just_making_is_waited_for_and_called_so(
    root: Root, caplog: pytest.LogCaptureFixture, many: int
) -> None:
    topic = root.create_topic("a")
    home = Path(topic.queue.layout.topic) / ".subscriptions" / "s.c"
    states = ["working", "target", "processing", "processed", "expired", "error"]
    for state in states[:many]:
        (home / state).mkdir(parents=True)

    assert topic.publish(b"1").distributed is (many == 1)
    assert "this user may not send" not in caplog.text
    assert ("topic a waits: a/s.c cannot be used: a DropboxMQ is just making its folders" in caplog.text) is (many > 1)
    for state in states[many:]:
        (home / state).mkdir()
    assert opened(root).topic("a").publish(b"2").distributed
    assert {message.body for message in root.queue("a/s.c").browse()} == ({b"2"} if many == 1 else {b"1", b"2"})


def test_a_subscription_that_goes_as_its_rights_are_looked_at_holds_nothing(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    home = base(copies)
    access = os.access

    def going(path: str, mode: int) -> bool:
        monkeypatch.setattr(os, "access", access)
        home.rename(f"{home}.deleted-1795333235623")  # as DropboxMQ removes it
        return access(path, mode)

    monkeypatch.setattr(os, "access", going)
    assert opened(root).topic("a").publish(b"1").distributed


# -- removals while DropboxMQ publishes ------------------------------------------------------------------------------


NAME = "4.1795332982430000-0000000001.T"


@pytest.fixture
def staged(root: Root, monkeypatch: pytest.MonkeyPatch) -> Callable[[Queue], Path]:
    """Write to a queue's working/ as a transaction of DropboxMQ does; nobody waits for its end."""
    monkeypatch.setattr(writers, "PATIENCE", 0)

    def stage(queue: Queue) -> Path:
        path = base(queue) / "working" / NAME
        path.write_bytes(b"of a transaction")
        return path

    return stage


@pytest.mark.parametrize("where_it_writes", ["the subscription", "the topic", "a topic below"])
@pytest.mark.parametrize("how", ["unsubscribe", "close", "delete"])
def test_a_subscription_that_is_removed_is_there_for_dropboxmq_until_that_has_published(
    root: Root, staged: Callable[[Queue], Path], how: str, where_it_writes: str
) -> None:
    topic, below = root.create_topic("a"), root.create_topic("a.b")
    subscription = topic.subscribe("s", client_id="c", durable=how != "close")
    (copies,) = topic.subscriptions()
    home = base(copies)
    file = staged({"the subscription": copies, "the topic": topic.queue, "a topic below": below.queue}[where_it_writes])
    subscription.close()
    if how == "unsubscribe":
        topic.unsubscribe("s", client_id="c")
    elif how == "delete":
        root.delete_queue(copies.name, force=True)
    assert opened(root).topic("a").subscriptions() == []
    assert not opened(root).queue(copies.name).exists()
    with pytest.raises(NoSuchQueue, match="was removed; its folder goes when no DropboxMQ writes to it"):
        list(opened(root).queue(copies.name).browse())
    assert topic.publish(b"for nobody").distributed
    assert files(home / "target") == {}
    root.sweep()
    file.rename(home / "target" / NAME)
    root.sweep()
    assert not home.exists()
    assert os.listdir(topic.queue.layout.deleting) == []


def test_a_removal_waits_for_a_publish_of_dropboxmq_that_ends_soon(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    file = base(copies) / "working" / NAME
    file.touch()
    with mock.patch.object(time, "sleep", side_effect=lambda _: file.unlink()):
        topic.unsubscribe("s", client_id="c")
    assert not base(copies).exists()


def test_what_dropboxmq_left_in_working_for_an_hour_keeps_no_subscription(
    root: Root, clock: Clock, staged: Callable[[Queue], Path]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    staged(copies)
    clock.advance(3601)
    topic.unsubscribe("s", client_id="c")
    assert not base(copies).exists()


@pytest.mark.parametrize("below", [False, True])
def test_what_a_send_that_died_left_in_working_of_a_topic_keeps_no_subscription_for_longer_than_a_minute(
    root: Root, clock: Clock, staged: Callable[[Queue], Path], below: bool
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    staged(root.create_topic("a.b").queue if below else topic.queue)
    clock.advance(61)
    replaced = topic.create_subscription("s", client_id="c", filter="JMSPriority > 3")
    assert replaced.name == copies.name
    topic.unsubscribe("s", client_id="c")
    assert not base(copies).exists()


def test_publishes_one_after_the_other_do_not_keep_a_subscription_from_being_replaced(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    drafts = (base(topic.queue) / "working" / f"4.179533298243{number:04}-0000000001.T" for number in count())
    writing = [next(drafts)]
    writing[0].touch()

    def next_publish(_: float) -> None:
        writing.append(next(drafts))
        writing[-1].touch()
        writing[-2].unlink()

    with mock.patch.object(time, "sleep", side_effect=next_publish):
        topic.unsubscribe("s", client_id="c")
    assert (len(writing), base(copies).exists()) == (2, False)


def test_a_subscription_to_which_dropboxmq_writes_is_neither_replaced_nor_made_again(
    root: Root, staged: Callable[[Queue], Path]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"kept")
    file = staged(copies)
    with pytest.raises(
        Unavailable, match=r"a DropboxMQ is writing to subscription a/s\.c, or a send to its topic died"
    ):
        topic.create_subscription("s", client_id="c", filter="JMSPriority > 3")
    assert [message.body for message in copies.browse()] == [b"kept"]
    topic.unsubscribe("s", client_id="c")
    with pytest.raises(Unavailable, match=r"subscription a/s\.c was removed, and a DropboxMQ is writing to its folder"):
        topic.create_subscription("s", client_id="c")
    with pytest.raises(Unavailable, match="removed while a DropboxMQ wrote to them"):
        root.delete_queue("a")
    file.unlink()
    again = topic.create_subscription("s", client_id="c")
    assert list(again.browse()) == []
    assert topic.publish(b"new").distributed
    assert [message.body for message in again.browse()] == [b"new"]


def test_a_hidden_subscription_comes_back_if_a_route_took_a_message_at_the_last_moment(
    root: Root, staged: Callable[[Queue], Path]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    (base(copies) / "routing" / "kept").mkdir()
    file = staged(copies)
    topic.unsubscribe("s", client_id="c")
    file.rename(base(copies) / "routing" / "kept" / NAME)
    opened(root).sweep()
    assert [queue.name for queue in opened(root).topic("a").subscriptions()] == ["a/s.c"]


@pytest.mark.parametrize("step", ["await_writers", "is_forced"])
def test_a_sweep_leaves_a_subscription_alone_that_was_made_anew_as_it_removed_the_one_of_before(
    root: Root, staged: Callable[[Queue], Path], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    file, real = staged(copies), getattr(subscriptions, step)
    topic.unsubscribe("s", client_id="c")
    file.unlink()

    def made_anew(*args: Any) -> bool:
        answer: bool = real(*args)
        monkeypatch.setattr(subscriptions, step, real)
        opened(root).topic("a").create_subscription("s", client_id="c")
        assert opened(root).topic("a").publish(b"new").distributed
        return answer

    monkeypatch.setattr(subscriptions, step, made_anew)
    opened(root).sweep()
    assert [message.body for message in opened(root).queue("a/s.c").browse()] == [b"new"]


@pytest.mark.parametrize("remove", ["sweep", "delete_queue"])
def test_a_subscription_made_anew_after_the_hidden_ones_were_listed_is_left_alone(
    root: Root, staged: Callable[[Queue], Path], monkeypatch: pytest.MonkeyPatch, remove: str
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    file, hidden_subscriptions = staged(copies), queue_notes.hidden_subscriptions
    topic.unsubscribe("s", client_id="c")

    def listed(*args: Any) -> list[str]:
        found = list(hidden_subscriptions(*args))
        monkeypatch.setattr(subscriptions, "hidden_subscriptions", hidden_subscriptions)
        file.unlink()
        opened(root).topic("a").create_subscription("s", client_id="c")
        assert opened(root).topic("a").publish(b"new").distributed
        return found

    monkeypatch.setattr(subscriptions, "hidden_subscriptions", listed)
    if remove == "sweep":
        opened(root).sweep()
    else:
        with pytest.raises(DropqError, match="subscri"):
            opened(root).delete_queue("a", force=True)
    assert [message.body for message in opened(root).queue("a/s.c").browse()] == [b"new"]


def test_an_unsubscribe_that_waits_for_dropboxmq_leaves_a_subscription_alone_that_was_made_anew_meanwhile(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c")
    await_writers = writers.await_writers

    def waiting(*args: Any) -> bool:
        monkeypatch.setattr(subscriptions, "await_writers", await_writers)
        opened(root).sweep()
        opened(root).topic("a").create_subscription("s", client_id="c")
        assert opened(root).topic("a").publish(b"new").distributed
        return await_writers(*args)

    monkeypatch.setattr(subscriptions, "await_writers", waiting)
    with pytest.raises(NoSuchQueue, match="is not there any more"):
        topic.unsubscribe("s", client_id="c")
    assert [message.body for message in opened(root).queue("a/s.c").browse()] == [b"new"]


def test_a_sweep_that_waits_for_dropboxmq_does_not_decide_anew_how_a_subscription_is_removed(
    root: Root, staged: Callable[[Queue], Path]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    staged(copies)
    topic.unsubscribe("s", client_id="c")
    before = os.stat(copies.layout.removed)
    root.sweep()
    after = os.stat(copies.layout.removed)
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


@pytest.mark.parametrize("dropboxmq", [False, True])
def test_subscriptions_are_listed_once_and_looked_at_only_where_a_dropboxmq_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropboxmq: bool
) -> None:
    root = Root.create(tmp_path / "root", dropboxmq=dropboxmq)
    topic = root.create_topic("a")
    for name in ("s", "t"):
        topic.create_subscription(name, client_id="c")
    entries = mock.Mock(wraps=reading.entries)
    exists = mock.Mock(wraps=reading.exists)
    monkeypatch.setattr(queue_notes, "entries", entries)
    monkeypatch.setattr(queue_notes, "exists", exists)
    assert sorted(queue_notes.subscription_folders(root.context.layout, "a")) == ["s.c", "t.c"]
    assert (entries.call_count, exists.call_count) == (1, 2 if dropboxmq else 0)


def test_a_sweep_removes_a_hidden_subscription_also_once_no_dropboxmq_works_in_the_root(
    root: Root, staged: Callable[[Queue], Path]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    file = staged(copies)
    topic.unsubscribe("s", client_id="c")
    file.unlink()
    shutil.rmtree(root.path / "dropboxmq")
    opened(root).sweep()
    assert not base(copies).exists()


def test_a_hidden_subscription_that_cannot_be_removed_keeps_no_other(
    root: Root, staged: Callable[[Queue], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = root.create_topic("a")
    hidden = [topic.create_subscription(name, client_id="c") for name in ("s", "t")]
    written = [staged(copies) for copies in hidden]
    for name in ("s", "t"):
        topic.unsubscribe(name, client_id="c")
    for file in written:
        file.unlink()
    real = Storage.rename_folder

    def refuse_once(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "rename_folder", real)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source)

    monkeypatch.setattr(Storage, "rename_folder", refuse_once)
    report = topic.queue.sweep()
    assert (report.ephemeral, report.refused) == (1, 1)
    assert [base(copies).exists() for copies in hidden].count(True) == 1
    topic.queue.sweep()
    assert not any(base(copies).exists() for copies in hidden)


def test_fsck_tells_of_a_subscription_that_dropboxmq_keeps(
    root: Root, clock: Clock, staged: Callable[[Queue], Path]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    staged(copies)
    topic.unsubscribe("s", client_id="c")
    assert [finding.kind for finding in topic.queue.fsck()] == ["under-way"]
    clock.advance(2 * 86_400)
    (found,) = topic.queue.fsck()
    assert (found.kind, "`dropq sweep` removes the folder" in found.detail) == ("leftover", True)
