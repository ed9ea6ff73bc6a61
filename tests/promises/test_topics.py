"""A topic gives each of its receivers a copy of each message, once; who they are, and what each of them gets."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from children import unprivileged
from forks import die_after, forked
from helpers import (
    FRESH,
    Clock,
    add_route,
    base,
    drop,
    files,
    health,
    lying,
    names_in,
    private,
    take,
    timed,
    where,
)

from dropq import (
    ConfigError,
    InvalidFilter,
    InvalidName,
    NoSuchQueue,
    Queue,
    QueueExists,
    QueueFull,
    Root,
    StorageError,
    Topic,
    Unavailable,
    work,
)
from dropq.config.load import check_file
from dropq.format.ids import IdSource
from dropq.format.layout import unsettled_config
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.moving import Moves
from dropq.staging import fan_out
from dropq.staging.jobs import Job
from dropq.storage import reading
from dropq.storage.files import Storage
from dropq.topics import views
from dropq.upkeep import recovery

#: What a queue is without, whose configuration does not matter to a test: the wait for a disk, and for a second try.
QUICK = '[defaults]\ndurability = "none"\nredelivery_delay = 0\n'


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    made = Root.create(tmp_path / "root", clock=clock)
    made.path.joinpath("dropq.toml").write_text("format = 1\n" + QUICK)
    return opened(made)


def opened(root: Root) -> Root:
    """The same root as another process opens it."""
    return timed(Root(root.path, clock=root.clock), FRESH)


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    """The bodies of a state, in order of delivery."""
    return [message.body for message in queue.browse(state)]


def received(queue: Queue) -> list[bytes]:
    """Take all that waits, and acknowledge it."""
    taken = []
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            taken.append(message.body)
            message.ack()
    return taken


def configure(queue: Queue | Topic, text: str) -> None:
    """Write a queue.toml by hand."""
    layout = queue.queue.layout if isinstance(queue, Topic) else queue.layout
    Path(layout.config_file).write_text(text)


def staged(topic: Topic) -> list[str]:
    return private(topic.queue, "staged")


# -- addresses -----------------------------------------------------------------------------------------------------


def test_a_topic_lies_where_its_dots_cut_its_name_and_its_subscriptions_beside_it(root: Root) -> None:
    topic = root.create_topic("sales.eu")
    topic.create_subscription("audit.1", client_id="h q")
    topic.create_subscription("stock", client_id="berlin", no_local=True)
    home = root.path / "topic-root" / "sales" / "eu"
    assert sorted(os.listdir(home)) == [".incoming", ".subscriptions"]
    assert sorted(os.listdir(home / ".subscriptions")) == ["audit%2E1.h+q", "stock.berlin.no-local"]
    states = {"working", "target", "processing", "processed", "expired", "error"}
    assert states < set(os.listdir(home / ".incoming"))
    assert states < set(os.listdir(home / ".subscriptions" / "audit%2E1.h+q"))
    assert [queue.name for queue in topic.subscriptions()] == [
        "sales.eu/audit%2E1.h+q",
        "sales.eu/stock.berlin.no-local",
    ]


def test_a_topic_and_a_subscription_are_queues_in_every_verb(root: Root) -> None:
    topic = root.create_topic("a.b")
    copies = topic.create_subscription("s", client_id="c")
    sent = topic.publish(b"1", priority=7, properties={"n": 5})
    queue = opened(root).queue("a.b/s.c")
    assert queue.exists()
    assert [found.name for found in root.queues()] == ["a.b", "a.b/s.c"]
    assert queue.find(sent.id).properties == {"n": 5}
    assert queue.counts()["target"] == 1
    assert queue.stats()["target"].bytes == 1
    take(queue).reject("no")
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    take(queue).ack()
    assert [outcome.ok for outcome in queue.replay("epoch")] == [True]
    assert [outcome.ok for outcome in queue.purge()] == [True]
    assert [outcome.ok for outcome in topic.queue.purge(state="processed")] == [True]
    assert health(copies).healthy
    assert health(topic.queue).healthy
    assert copies.fsck() == topic.queue.fsck() == []
    copies.close()
    queue.close()
    root.delete_queue("a.b/s.c", force=True)
    assert not queue.exists()


def test_where_a_queue_and_a_topic_have_one_name_the_queue_is_meant(root: Root) -> None:
    topic_base = base(root.create_topic("a.b").queue)
    root.create_queue("c.d")
    with pytest.raises(
        QueueExists, match=r"topic 'c.d' was not made: the root has a queue of this name, .*another name"
    ):
        root.create_topic("c.d")
    with pytest.raises(QueueExists, match=r"queue 'a.b' was not made: the root has a topic of this name, .*/a/b"):
        root.create_queue("a.b")
    with pytest.raises(QueueExists, match=r"topic 'a.b' is there already"):
        root.create_topic("a.b")
    (root.path / "a.b").mkdir()
    for name in ("working", "target", "processing", "processed", "expired", "error"):
        (root.path / "a.b" / name).mkdir()
    queue = opened(root).queue("a.b")
    queue.send(b"1")
    assert queue.layout.home == str(root.path / "a.b")
    assert lying(topic_base) == {}
    with pytest.raises(NoSuchQueue, match=r"'a.b' is a queue, and no topic: .*/a.b$"):
        opened(root).topic("a.b").publish(b"1")


@pytest.mark.parametrize(
    "name", ["a..b", "..", ".a", "a.", "", ".", "a/b", "a/s.c", "a/s.c/x", "x\0", "a\n", "topic-root"]
)
def test_a_name_that_no_topic_can_have_is_refused_and_named(root: Root, name: str) -> None:
    for refused in (root.topic, root.create_topic):
        with pytest.raises(InvalidName, match=re.escape(repr(name))):
            refused(name)
    assert not (root.path / "topic-root").exists()


@pytest.mark.parametrize(
    "address", ["a/s.c/x", "a/s", "a/", "a/.c.d", "a/s.c.other", "a/s.c.deleted-1234567890123", "a..b/s.c", "/s.c"]
)
def test_an_address_that_no_subscription_can_have_is_refused_and_named(root: Root, address: str) -> None:
    root.create_topic("a")
    with pytest.raises(InvalidName, match=re.escape(repr(address.partition("/")[0])) + "|" + re.escape(repr(address))):
        root.queue(address)


@pytest.mark.parametrize(
    ("name", "client", "why"),
    [
        ("", "c", "the name of a subscription is empty"),
        ("s\0", "c", "without NUL"),
        ("s" * 197, "c", "as it would be called with --no-local, has 208; give a shorter name"),
    ],
)
def test_what_cannot_name_a_subscription_is_refused_with_the_reason(
    root: Root, name: str, client: str, why: str
) -> None:
    topic = root.create_topic("a")
    with pytest.raises(InvalidName, match=why):
        topic.create_subscription(name, client_id=client)


@pytest.mark.parametrize(("name", "client"), [("", "c"), ("s\0", "c"), ("s" * 200, "c"), ("\ud800", "c")])
def test_a_subscription_that_no_folder_can_be_called_after_is_refused(root: Root, name: str, client: str) -> None:
    topic = root.create_topic("a")
    with pytest.raises(InvalidName, match=r"cannot (be the|name a)|is empty"):
        topic.create_subscription(name, client_id=client)
    assert topic.subscriptions() == []


def test_a_topic_that_is_not_there_is_named_with_the_way_out(root: Root) -> None:
    root.create_topic("news")
    for act in (
        lambda: root.topic("new").publish(b"1"),
        lambda: root.topic("new").create_subscription("s", client_id="c"),
        lambda: root.topic("new").unsubscribe("s", client_id="c"),
        lambda: root.queue("new/s.c").send(b"1"),
    ):
        with pytest.raises(NoSuchQueue, match=r"'?new'?"):
            act()
    assert not (root.path / "topic-root" / "new").exists()


def test_a_durable_subscription_needs_a_client_id(root: Root) -> None:
    topic = root.create_topic("a")
    with pytest.raises(ValueError, match=r"subscription 's' of topic a: .*needs a client_id.*nothing was made"):
        topic.subscribe("s")
    assert topic.subscriptions() == []


# -- distribution --------------------------------------------------------------------------------------------------


def test_each_subscription_gets_a_copy_of_its_own_under_the_same_name(root: Root) -> None:
    topic = root.create_topic("a")
    queues = [topic.create_subscription(name, client_id="c") for name in ("one", "two", "three")]
    sent = topic.publish("text", priority=6, correlation_id="x.1", type="t", properties={"p": True})
    assert (sent.accepted, sent.delivered_to, sent.distributed) == (True, "a", True)
    (name,) = names_in(topic.queue, "processed")
    found = [base(queue) / "target" / name for queue in queues]
    assert [path.read_bytes() for path in found] == [b"text"] * 3
    archived = base(topic.queue) / "processed" / name
    assert len({path.stat().st_ino for path in (*found, archived)}) == 4, "a link shares its inode"
    assert all(path.stat().st_nlink == 1 for path in (*found, archived))
    take(queues[0]).ack()
    assert [where(queue) for queue in queues] == [
        {"processed": [b"text"]},
        {"target": [b"text"]},
        {"target": [b"text"]},
    ]
    assert staged(topic) == []


def test_what_is_published_while_nobody_subscribes_is_archived_only(root: Root) -> None:
    topic = root.create_topic("a")
    assert topic.publish(b"1").distributed
    later = topic.create_subscription("s", client_id="c")
    assert topic.publish(b"2").distributed
    assert bodies(later) == [b"2"]
    assert where(topic.queue) == {"processed": [b"1", b"2"]}


def test_a_topic_without_history_keeps_nothing_of_what_was_distributed(root: Root) -> None:
    topic = root.create_topic("a", history=False)
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"1")
    assert where(topic.queue) == {}
    assert bodies(copies) == [b"1"]


def test_a_publish_feeds_the_topics_above_and_not_those_below(root: Root) -> None:
    names = ("a", "a.b", "a.b.c", "ab")
    queues = {name: root.create_topic(name).create_subscription(f"on {name}", client_id="c") for name in names}
    for name in queues:
        root.topic(name).publish(name)
    assert {name: bodies(queue) for name, queue in queues.items()} == {
        "a": [b"a", b"a.b", b"a.b.c"],
        "a.b": [b"a.b", b"a.b.c"],
        "a.b.c": [b"a.b.c"],
        "ab": [b"ab"],
    }
    assert bodies(root.queue("a"), "processed") == [b"a"], "each is archived where it was published"


def test_a_topic_that_is_only_the_parent_of_another_cannot_be_published_to(root: Root) -> None:
    root.create_topic("a.b")
    with pytest.raises(NoSuchQueue, match="'a'"):
        root.topic("a").publish(b"1")
    root.create_topic("a").create_subscription("s", client_id="c")
    root.topic("a.b").publish(b"1")
    assert bodies(root.queue("a/s.c")) == [b"1"]


def test_messages_are_delivered_by_priority_and_in_the_order_of_their_times(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    for number, priority in enumerate((4, 4, 9, 1)):
        topic.publish(str(number), priority=priority)
    assert received(copies) == [b"2", b"0", b"1", b"3"]


def test_what_scripts_published_is_distributed_by_priority(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c", filter="JMSPriority > 0")
    for number, priority in enumerate((4, 4, 9, 1)):
        drop(topic.queue, f"{priority}.{1_700_000_000_000_000 + number}-0000000000.B", str(number).encode())
    assert received(copies) == [b"2", b"0", b"1", b"3"]


# -- what is published in other ways -------------------------------------------------------------------------------


def test_a_script_publishes_by_mv_and_a_consumer_distributes(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    other = topic.create_subscription("other", client_id="c")
    drop(topic.queue, "report.csv", b"1")
    assert received(copies) == [b"1"]
    assert where(other) == {"target": [b"1"]}
    assert where(topic.queue) == {"processed": [b"1"]}


def test_a_sweep_distributes_what_a_script_published(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    drop(topic.queue, "report.csv", b"1")
    assert topic.queue.sweep().distributed == 1
    assert bodies(copies) == [b"1"]
    assert root.sweep().distributed == 0


def test_a_foreign_file_keeps_its_name_and_its_time_in_every_copy(root: Root) -> None:
    topic = root.create_topic("a")
    queues = [topic.create_subscription(name, client_id="c") for name in "st"]
    for name in ("report.csv", "2024.report.csv", "a b~2.txt", "x" * 120):
        file = base(topic.queue) / "working" / name
        file.write_bytes(name.encode())
        os.utime(file, ns=(1_600_000_000_123_456_789,) * 2)
        os.rename(file, base(topic.queue) / "target" / name)
    assert topic.queue.sweep().distributed == 4
    for folder in [*(base(queue) / "target" for queue in queues), base(topic.queue) / "processed"]:
        assert {name: data.decode() for name, data in files(folder).items()} == {
            name: name for name in ("report.csv", "2024.report.csv", "a b~2.txt", "x" * 120)
        }
        assert {file.stat().st_mtime_ns for file in folder.iterdir()} == {1_600_000_000_123_456_789}


def test_of_two_foreign_files_of_one_name_both_arrive(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    for body in (b"1", b"2"):
        drop(topic.queue, "report.csv", body)
        assert topic.queue.sweep().distributed == 1
    assert sorted(bodies(copies)) == [b"1", b"2"]
    assert "report.csv" in names_in(copies, "target")
    assert where(topic.queue) == {"processed": [b"1", b"2"]}


def test_a_message_of_an_id_that_was_given_before_arrives_too(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    for body in (b"1", b"2"):
        assert topic.publish(body, message_id="same").distributed
    assert sorted(bodies(copies)) == [b"1", b"2"]


def test_one_generated_id_published_to_two_topics_comes_twice_to_the_topic_above(root: Root) -> None:
    """A script that copies one file into two topics sends two messages."""
    above = root.create_topic("a").create_subscription("s", client_id="c")
    for name in ("a.x", "a.y"):
        drop(root.create_topic(name).queue, "4.1700000000000000-0000000000.B", name.encode())
        root.queue(name).sweep()
    assert sorted(bodies(above)) == [b"a.x", b"a.y"]


@pytest.mark.parametrize("way", ["send_many", "send_file", "writer", "send_json", "send", "job", "text"])
def test_every_way_to_send_publishes(root: Root, tmp_path: Path, way: str) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    queue = topic.queue
    (tmp_path / "file").write_bytes(b"1")
    if way == "send_many":
        assert [sent.distributed for sent in queue.send_many([b"1", {"body": b"2", "priority": 9}])] == [True, True]
    elif way == "send_file":
        assert queue.send_file(tmp_path / "file").distributed
        assert queue.send_file(tmp_path / "file", move=True).distributed
    elif way == "writer":
        with queue.writer(priority=2) as file:
            file.write(b"1")
    elif way == "send_json":
        assert queue.send_json(1).distributed
    elif way == "send":
        assert queue.send(b"1").distributed
    elif way == "text":
        assert topic.publish("1").distributed
    else:
        job = Job(queue.context, "job")
        job.begin()
        attempt = job.attempt("p0-a0")
        attempt.write_all([queue._address(b"")[0]], [b"1"])
        job.commit([attempt.finish()])
        root.sweep()
    waiting = {"send_many": [b"2", b"1"], "send_file": [b"1", b"1"]}.get(way, [b"1"])
    assert bodies(copies) == waiting
    assert sorted(bodies(queue, "processed")) == sorted(waiting)
    assert where(queue).keys() == {"processed"}


def test_a_long_name_with_metadata_beside_it_arrives_whole(root: Root) -> None:
    topic = root.create_topic("a", durability="none")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"1", correlation_id="c" * 300, properties={"p": "v" * 500})
    message = take(copies)
    assert (message.correlation_id, message.properties) == ("c" * 300, {"p": "v" * 500})
    message.ack()


def test_a_large_body_is_copied_whole(root: Root) -> None:
    topic = root.create_topic("a")
    queues = [topic.create_subscription(name, client_id="c") for name in "st"]
    body = os.urandom(3 << 20)
    assert topic.publish(body).distributed
    assert [bodies(queue) for queue in queues] == [[body], [body]]


# -- who publishes -------------------------------------------------------------------------------------------------


def test_a_no_local_subscription_does_not_get_what_its_own_client_publishes(root: Root) -> None:
    root.create_topic("a").create_subscription("nl", client_id="me", no_local=True)
    local = root.topic("a").create_subscription("all", client_id="me")
    root.topic("a", client_id="me").publish(b"mine")
    root.topic("a", client_id="you").publish(b"yours")
    root.topic("a", client_id="x.me").publish(b"another's")
    root.topic("a").publish(b"nobody's")
    assert bodies(root.queue("a/nl.me.no-local")) == [b"yours", b"another's", b"nobody's"]
    assert bodies(local) == [b"mine", b"yours", b"another's", b"nobody's"]


def test_who_published_is_no_property_of_what_is_delivered(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    root.topic("a", client_id="me").publish(b"1", properties={"p": 1})
    message = take(copies)
    assert message.properties == {"p": 1}
    message.ack()
    assert not [name for state in ("target", "processed") for name in names_in(copies, state) if "from" in name]
    (archived,) = root.queue("a").browse("processed")
    assert archived.properties == {"p": 1}


def test_a_no_local_subscription_above_the_topic_leaves_out_its_clients_messages_too(root: Root) -> None:
    above = root.create_topic("a").create_subscription("nl", client_id="me", no_local=True)
    root.create_topic("a.b")
    root.topic("a.b", client_id="me").publish(b"mine")
    root.topic("a.b").publish(b"other")
    assert bodies(above) == [b"other"]


@pytest.mark.parametrize("recovered", [False, True])
@pytest.mark.parametrize("text", ["short", "so long that its client is in a sidecar" * 5])
def test_what_a_client_published_to_another_topic_reaches_its_no_local_subscription(
    root: Root, text: str, recovered: bool
) -> None:
    first, second = root.create_topic("a"), root.create_topic("b")
    if not recovered:
        first.create_subscription("s", client_id="c")
    quiet = second.create_subscription("nl", client_id="me", no_local=True)
    root.topic("a", client_id="me").publish(b"1", properties={"text": text})
    copies = first.create_subscription("s", client_id="c", recovery_point="epoch")
    copies.add_selector("on", to="b")
    assert copies.route() == {"on": 1}
    second.queue.sweep()
    assert [(message.body, message.properties) for message in quiet.browse()] == [(b"1", {"text": text})]


def test_a_no_local_client_is_known_when_somebody_else_distributes(root: Root) -> None:
    topic = root.create_topic("a")
    quiet = topic.create_subscription("nl", client_id="me", no_local=True)
    topic.queue.pause()
    assert root.topic("a", client_id="me").queue.send_many([b"1", {"body": b"2"}])[1].distributed is False
    topic.queue.resume()
    assert opened(root).sweep().distributed == 2
    assert bodies(quiet) == []


# -- filters -------------------------------------------------------------------------------------------------------


def test_what_does_not_match_a_filter_never_arrives(root: Root) -> None:
    topic = root.create_topic("a")
    high = topic.create_subscription("high", client_id="c", filter="JMSPriority > 5")
    large = topic.create_subscription("large", client_id="c", filter="/total > 100")
    topic.publish('{"total": 5}', priority=9)
    topic.publish('{"total": 500}', priority=1)
    topic.publish("no JSON")
    assert bodies(high) == [b'{"total": 5}']
    assert bodies(large) == [b'{"total": 500}']
    assert len(bodies(topic.queue, "processed")) == 3


def test_what_was_scripted_is_filtered_by_its_body_too(root: Root) -> None:
    topic = root.create_topic("a")
    large = topic.create_subscription("large", client_id="c", filter="/total > 100")
    for total in (5, 500):
        drop(topic.queue, f"{total}.json", f'{{"total": {total}}}'.encode())
    assert topic.queue.sweep().distributed == 2
    assert names_in(large, "target") == ["500.json"]


@pytest.mark.parametrize("filter", ["JMSPriority >", "/total LIKE '('", "", "1 +", "/a = "])
def test_a_subscription_with_a_filter_that_does_not_parse_is_not_made(root: Root, filter: str) -> None:
    topic = root.create_topic("a")
    with pytest.raises(InvalidFilter, match="filter"):
        topic.create_subscription("s", client_id="c", filter=filter)
    assert topic.subscriptions() == []
    assert private(topic.queue, "new") == []


def test_a_filter_that_cannot_be_evaluated_holds_the_topic_whole_and_in_order(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = root.create_topic("a")
    large = topic.create_subscription("large", client_id="c", filter="/total > 100")
    every = topic.create_subscription("every", client_id="c")
    with monkeypatch.context() as broken:
        broken.setattr("dropq.topics.receivers.deciding", lambda *args: lambda file: None)
        assert topic.publish('{"total": 500}').distributed is False
        assert opened(root).topic("a").publish('{"total": 600}', priority=9).distributed is False
        assert opened(root).sweep().distributed == 0
        assert where(large) == where(every) == {}
        assert len(names_in(topic.queue, "target")) == 2, "nothing is claimed, nothing staged"
        assert staged(topic) == []
    assert "the filter of a/large.c cannot be evaluated" in caplog.text
    assert opened(root).sweep().distributed == 2
    assert bodies(large) == bodies(every) == [b'{"total": 600}', b'{"total": 500}']


def test_a_filter_that_was_broken_by_hand_holds_the_topic_and_says_where(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    configure(copies, 'filter = "JMSPriority >"\n')
    assert opened(root).topic("a").publish(b"1").distributed is False
    assert "a/s.c cannot be used" in caplog.text
    assert f"{copies.layout.config_file}: filter" in caplog.text
    assert where(topic.queue) == {"target": [b"1"]}
    configure(copies, "")
    assert opened(root).sweep().distributed == 1
    assert bodies(copies) == [b"1"]


def test_what_another_program_put_in_against_a_filter_is_archived_undelivered(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    configure(copies, 'filter = "JMSPriority > 5"\nunroutable_after = 0\n')
    copies = opened(root).queue("a/s.c")
    ids = IdSource(lambda: time.time_ns() // 1_000_000)
    names = {priority: f"{priority}.{ids.next()}.T" for priority in (9, 1)}
    for priority, name in names.items():
        drop(copies, name, str(priority).encode())
    assert received(copies) == [b"9"], "a consumer is not handed it either"
    drop(copies, f"9.{ids.next()}.T", b"7")
    assert copies.sweep().unwanted == 1
    assert where(copies) == {"target": [b"7"], "processed": [b"1", b"9"]}
    assert names[1] in names_in(copies, "processed"), "it was not delivered"


@pytest.mark.parametrize("patience", ["0s", "1h"])
def test_what_waits_when_a_filter_is_changed_is_delivered_all_the_same(root: Root, patience: str) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.create_subscription("other", client_id="c")
    configure(copies, f'filter = "JMSPriority > 5"\nunroutable_after = "{patience}"\n')
    topic = opened(root).topic("a")
    for number in range(3):
        topic.publish(b"%d" % number, priority=6)
    with opened(root).queue("a/s.c").subscribe() as consumer:
        held = consumer.receive()
        assert held is not None
        configure(copies, f'filter = "JMSPriority > 6"\nunroutable_after = "{patience}"\n')
        held.release(counted=False)
    late = opened(root).queue("a/s.c")
    drop(copies, "6.1700000000000000-0000000001.T", b"sent before")
    assert late.sweep().unwanted == 0
    assert {said.why for said in late.explain()} == {"ready"}
    assert sorted(received(late)) == [b"0", b"1", b"2", b"sent before"]


def test_a_filter_of_a_subscription_does_not_look_again_at_what_it_let_in(root: Root) -> None:
    topic = root.create_topic("a", message_type="text")
    copies = topic.create_subscription("s", client_id="c", filter="/ LIKE 'ERROR' AND NOT JMSRedelivered")
    configure(copies, Path(copies.layout.config_file).read_text() + "redelivery_delay = 0\nunroutable_after = 0\n")
    topic.publish("ERROR 1\n2\n3\n", type="text")
    copies = opened(root).queue("a/s.c")
    with copies.subscribe() as first:
        next(first.records()).ack()
    assert copies.sweep().unwanted == 0
    with copies.subscribe() as second:
        message = second.receive()
        assert message is not None and message.body == b"2\n3\n"
        message.nack()
        assert copies.sweep().unwanted == 0
        assert bodies(copies) == [b"2\n3\n"]
        again = second.receive()
        assert again is not None and again.delivery_count == 2


# -- room ----------------------------------------------------------------------------------------------------------


def full(root: Root, text: str) -> tuple[Topic, Queue, Queue]:
    """A topic with a subscription that takes one message, and one without limit."""
    topic = root.create_topic("a")
    small = topic.create_subscription("small", client_id="c")
    every = topic.create_subscription("every", client_id="c")
    configure(small, text)
    topic = opened(root).topic("a")
    assert topic.publish(b"1").distributed
    return topic, opened(root).queue(small.name), every


def test_a_full_subscription_holds_the_topic_until_it_has_room(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    topic, small, every = full(root, "max_unprocessed = 1\n")
    sent = topic.publish(b"2")
    assert (sent.accepted, sent.distributed) == (True, False)
    assert "a/small.c is full (max_unprocessed = 1)" in caplog.text
    assert bodies(every) == [b"1"]
    assert bodies(topic.queue) == [b"2"]
    assert received(small) == [b"1", b"2"], "its consumer distributes what waits as soon as there is room"
    assert bodies(every) == [b"1", b"2"]


def test_a_route_of_a_topic_takes_what_waits_first_whatever_room_receivers_have(root: Root) -> None:
    topic, _, _ = full(root, "max_unprocessed = 1\n")
    assert not topic.publish(b"waits").distributed
    add_route(topic.queue, "urgent", "JMSPriority > 6")
    topic = opened(root).topic("a")
    topic.queue.pause()
    assert not topic.publish(b"urgent", priority=9).distributed
    topic.queue.resume()
    assert [one.why for one in topic.queue.explain()] == ["route", "receiver"]
    assert "a/small.c is full" not in str(health(topic.queue))
    topic.queue.route()
    assert (topic.queue.routed(), bodies(topic.queue)) == ({"urgent": 1}, [b"waits"])


def test_a_publish_with_a_timeout_waits_for_a_full_subscription(root: Root) -> None:
    topic, small, every = full(root, "max_unprocessed = 1\n")
    consumer = threading.Thread(target=lambda: received(small))
    consumer.start()
    assert topic.publish(b"2", timeout=30).distributed
    consumer.join()
    assert bodies(every) == [b"1", b"2"]


def test_a_full_subscription_that_discards_gets_nothing_and_holds_nobody(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    topic, small, every = full(root, 'max_unprocessed = 1\noverflow = "discard"\n')
    assert topic.publish(b"2").distributed
    assert "a/small.c is full, and discards" in caplog.text
    assert bodies(small) == [b"1"]
    assert bodies(every) == [b"1", b"2"]
    assert bodies(topic.queue, "processed") == [b"1", b"2"]


def test_reject_is_refused_for_a_subscription(root: Root) -> None:
    copies = root.create_topic("a").create_subscription("s", client_id="c")
    configure(copies, 'overflow = "reject"\n')
    with pytest.raises(ConfigError, match=r's\.c/queue\.toml: overflow = "reject": a subscription cannot reject'):
        opened(root).queue("a/s.c").counts()


def test_a_full_topic_refuses_its_own_senders(root: Root) -> None:
    topic = root.create_topic("a", max_unprocessed=1)
    topic.queue.pause()
    topic.publish(b"1")
    with pytest.raises(QueueFull, match="a"):
        topic.publish(b"2")
    assert where(topic.queue) == {"target": [b"1"]}


# -- subscribing and unsubscribing ---------------------------------------------------------------------------------


def test_a_durable_subscription_stays_and_is_shared_by_who_names_it_again(root: Root) -> None:
    topic = root.create_topic("a")
    with topic.subscribe("s", client_id="c") as first:
        topic.publish(b"1")
        topic.publish(b"2")
        with opened(root).topic("a").subscribe("s", client_id="c") as second:
            messages = [first.receive(), second.receive()]
            assert sorted(message.body for message in messages if message) == [b"1", b"2"]
            for message in messages:
                assert message is not None
                message.ack()
    topic.publish(b"3")
    with topic.subscribe("s", client_id="c") as again:
        message = again.receive()
        assert message is not None
        assert message.body == b"3"
        message.ack()


def test_a_topic_of_a_stranger_that_is_closed_stops_no_subscribe_and_no_unsubscribe(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    topic = root.create_topic("a")
    Path(root.path, "topic-root/evil/.subscriptions").mkdir(parents=True)
    Path(root.path, "topic-root/evil").chmod(0)

    def attempt() -> list[str]:
        for _ in range(2):
            topic.create_subscription("s", client_id="c")
            topic.unsubscribe("s", client_id="c")
        Path(root.path, "topic-root/a/.subscriptions").chmod(0)
        with pytest.raises(StorageError):
            topic.create_subscription("s", client_id="c")
        with pytest.raises(StorageError):
            topic.unsubscribe("s", client_id="c")
        return [line for line in caplog.messages if "evil" in line]

    (line,) = unprivileged(attempt)
    assert "passed over" in line
    assert not topic.subscriptions()


def test_an_ephemeral_subscription_goes_when_it_is_closed(root: Root) -> None:
    topic = root.create_topic("a")
    with topic.subscribe("s", durable=False) as copies:
        (queue,) = topic.subscriptions()
        topic.publish(b"1")
        message = copies.receive()
        assert message is not None
        message.ack()
        topic.publish(b"2")
    assert topic.subscriptions() == []
    assert not queue.exists()
    assert topic.publish(b"3").distributed
    assert private(topic.queue, "deleting") == []
    assert os.listdir(Path(topic.queue.layout.topic) / ".subscriptions") == []


def test_two_ephemeral_subscriptions_of_one_name_are_two(root: Root) -> None:
    topic = root.create_topic("a")
    with topic.subscribe("s", durable=False) as one, topic.subscribe("s", durable=False) as two:
        topic.publish(b"1")
        got = [one.receive(), two.receive()]
        assert [message and message.body for message in got] == [b"1", b"1"]


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({}, {"filter": "JMSPriority > 5"}),
        ({"filter": "JMSPriority > 5"}, {}),
        ({"filter": "JMSPriority > 5"}, {"filter": "JMSPriority > 6"}),
        ({}, {"no_local": True}),
        ({"no_local": True}, {}),
    ],
)
def test_subscribing_again_in_another_way_begins_anew(root: Root, first: dict[str, Any], again: dict[str, Any]) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c", **first)
    topic.publish(b"1", priority=9)
    copies = topic.create_subscription("s", client_id="c", **again)
    assert [queue.name for queue in topic.subscriptions()] == [copies.name]
    assert where(copies) == {}
    topic.publish(b"2", priority=9)
    assert bodies(copies) == [b"2"]


def test_subscribing_again_in_the_same_way_keeps_what_is_there(root: Root) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c", filter="JMSPriority > 5", no_local=True)
    topic.publish(b"1", priority=9)
    copies = topic.create_subscription("s", client_id="c", filter="JMSPriority > 5", no_local=True)
    assert bodies(copies) == [b"1"]


def test_subscribing_to_another_topic_under_the_same_name_removes_the_old_one(root: Root) -> None:
    old, new = root.create_topic("a"), root.create_topic("b.c")
    old.create_subscription("s", client_id="c")
    other = old.create_subscription("s", client_id="other")
    new.create_subscription("s", client_id="c")
    assert [queue.name for queue in root.queues()] == ["a", other.name, "b.c", "b.c/s.c"]


def test_a_subscription_in_use_is_not_removed_for_another(root: Root) -> None:
    topic = root.create_topic("a")
    other = root.create_topic("b")
    with topic.subscribe("s", client_id="c") as copies:
        topic.publish(b"1")
        for act in (
            lambda: topic.create_subscription("s", client_id="c", filter="JMSPriority > 5"),
            lambda: topic.create_subscription("s", client_id="c", no_local=True),
            lambda: other.create_subscription("s", client_id="c"),
            lambda: topic.unsubscribe("s", client_id="c"),
        ):
            with pytest.raises(Unavailable, match=r"subscription a/s\.c is in use by c-.*nothing was removed"):
                act()
        message = copies.receive()
        assert message is not None
        assert message.body == b"1"
    topic.unsubscribe("s", client_id="c")
    assert topic.subscriptions() == []


def test_a_subscription_is_not_removed_while_a_command_holds_a_message_of_it(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c")
    topic.publish(b"1")
    with root.queue("a/s.c").subscribe(client_id="shell", detached=True, lease_period=60) as command:
        held = command.receive()
        assert held is not None
        for act in (
            lambda: topic.unsubscribe("s", client_id="c"),
            lambda: topic.create_subscription("s", client_id="c", no_local=True),
        ):
            with pytest.raises(Unavailable, match=r"subscription a/s\.c is in use by shell-"):
                act()
        clock.advance(61)
        topic.unsubscribe("s", client_id="c")
        with pytest.raises(StorageError, match="the queue is not where it was"):
            held.ack()


def test_a_subscription_that_is_not_there_cannot_be_removed(root: Root) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c")
    with pytest.raises(NoSuchQueue, match=r"topic a has no subscription 's' of client 'd'"):
        topic.unsubscribe("s", client_id="d")
    root.create_topic("a.b")
    with pytest.raises(NoSuchQueue, match=r"topic a\.b has no subscription 's' of client 'c'"):
        root.topic("a.b").unsubscribe("s", client_id="c")
    assert [queue.name for queue in topic.subscriptions()] == ["a/s.c"]


@pytest.mark.parametrize(("name", "client"), [("aduit", "hq"), ("audit", "qh"), ("audit.hq", "hq")])
def test_a_mistyped_subscription_is_answered_with_the_nearest(name: str, client: str, root: Root) -> None:
    topic = root.create_topic("sales")
    topic.create_subscription("audit", client_id="hq")
    with pytest.raises(NoSuchQueue, match=r"is it 'audit' of client 'hq'\?"):
        topic.unsubscribe(name, client_id=client)


def test_unsubscribing_from_what_is_no_topic_says_so(root: Root) -> None:
    root.create_topic("sales")
    root.create_queue("orders")
    with pytest.raises(NoSuchQueue, match=r"no topic 'sale' in .*is it 'sales'\?"):
        root.topic("sale").unsubscribe("audit", client_id="hq")
    with pytest.raises(NoSuchQueue, match=r"'orders' is a queue, and no topic"):
        root.topic("orders").unsubscribe("audit", client_id="hq")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".a", "a.", "a..b", "a.b/s.c"])
def test_what_cannot_name_a_topic_is_refused_as_the_name_of_a_topic(name: str, root: Root) -> None:
    with pytest.raises(InvalidName, match="cannot name a topic: give one or more parts"):
        root.create_topic(name)


def test_unsubscribing_removes_what_the_subscription_holds(root: Root) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c", no_local=True)
    other = topic.create_subscription("other", client_id="c")
    topic.publish(b"1")
    topic.unsubscribe("s", client_id="c")
    assert [queue.name for queue in topic.subscriptions()] == ["a/other.c"]
    assert topic.publish(b"2").distributed
    assert bodies(other) == [b"1", b"2"]
    assert private(topic.queue, "deleting") == []
    assert os.listdir(Path(topic.queue.layout.topic) / ".subscriptions") == ["other.c"]


def with_a_routed_message(root: Root) -> tuple[Topic, Queue]:
    """A topic and its subscription, whose route `u` took a message, and whose route `t` took none."""
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    for name in ("t", "u"):
        add_route(copies, name, "TRUE" if name == "u" else "FALSE")
    topic.publish(b"routed")
    copies.route()
    return topic, copies


def test_what_a_route_took_is_removed_by_force_alone(root: Root) -> None:
    topic, _ = with_a_routed_message(root)
    removals: list[Callable[[], object]] = [
        lambda: topic.unsubscribe("s", client_id="c"),
        lambda: topic.create_subscription("s", client_id="c", filter="n > 1"),
        lambda: topic.subscribe("s", client_id="c", no_local=True),
        lambda: root.create_topic("b").create_subscription("s", client_id="c"),
    ]
    for remove in removals:
        with pytest.raises(StorageError, match=r"a/s\.c has messages that its routes took,.* \(1 in routing/u\)"):
            remove()
        assert opened(root).queue("a/s.c").routed() == {"u": 1}
    topic.unsubscribe("s", client_id="c", force=True)
    assert topic.subscriptions() == [] and private(topic.queue, "deleting") == []


@pytest.mark.parametrize("remove", ["unsubscribe", "delete"])
def test_a_subscription_comes_back_if_a_route_took_a_message_at_the_last_moment(
    root: Root, monkeypatch: pytest.MonkeyPatch, remove: str
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    for name in ("t", "u"):
        add_route(copies, name, "TRUE" if name == "u" else "FALSE")
    real = Storage.rename_folder

    def routed_first(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "rename_folder", real)
        topic.publish(b"routed")
        copies.route()
        real(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", routed_first)
    with pytest.raises(StorageError, match=r"1 in routing/u.*nothing was removed"):
        topic.unsubscribe("s", client_id="c") if remove == "unsubscribe" else root.delete_queue("a/s.c")
    assert opened(root).queue("a/s.c").routed() == {"u": 1}
    assert private(topic.queue, "deleting") == []
    topic.publish(b"next")
    assert opened(root).queue("a/s.c").route() == {"u": 1}


def test_a_route_that_was_half_way_when_the_subscription_went_brings_it_back(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that has found its folders by then moves the message although their path is another."""
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    for name in ("t", "u"):
        add_route(copies, name, "FALSE")
    topic.publish(b"routed")
    real = Storage.remove_folder

    def half_way(self: Storage, path: str) -> None:
        monkeypatch.setattr(Storage, "remove_folder", real)
        real(self, path)
        (other,) = {"t", "u"} - {os.path.basename(path)}
        base = Path(path).parent.parent
        (message,) = os.listdir(base / "target")
        (base / "target" / message).rename(base / "routing" / other / message)

    monkeypatch.setattr(Storage, "remove_folder", half_way)
    with pytest.raises(StorageError, match=r"1 in routing/[tu]"):
        topic.unsubscribe("s", client_id="c")
    assert sum(copies.routed().values()) == 1
    assert {"t", "u"} < set(os.listdir(base(copies) / "routing"))


@pytest.mark.parametrize("routed", [True, False])
def test_a_sweep_decides_on_a_removal_whose_process_died(
    root: Root, caplog: pytest.LogCaptureFixture, *, routed: bool
) -> None:
    topic, copies = with_a_routed_message(root)
    if not routed:
        shutil.rmtree(base(copies) / "routing" / "u")
    left = Path(topic.queue.layout.private, "deleting")
    left.mkdir()
    base(copies).rename(left / "s.c.deleting-1-abcdef-unless-routed")
    topic.queue.sweep()
    assert os.listdir(left) == []
    assert [queue.routed() for queue in topic.subscriptions()] == ([{"u": 1}] if routed else [])
    assert ("its routes took messages: it is back" in caplog.text) == routed


def test_what_a_route_took_stays_if_the_name_of_its_subscription_is_taken(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    topic, copies = with_a_routed_message(root)
    left = Path(topic.queue.layout.private, "deleting")
    left.mkdir()
    gone = left / "s.c.deleting-1-abcdef-unless-routed"
    base(copies).rename(gone)
    topic.create_subscription("s", client_id="c")
    assert topic.queue.sweep().refused == 1
    assert f"what its routes took is in {gone}/routing" in caplog.text
    assert len(os.listdir(gone / "routing" / "u")) == 1


def test_a_copy_goes_on_to_a_subscription_that_came_back(root: Root) -> None:
    """While its folder is there, it is not known yet whether it goes."""
    topic, copies = with_a_routed_message(root)
    left = Path(topic.queue.layout.private, "deleting")
    left.mkdir()
    real, gone = fan_out.roll_forward, left / "s.c.deleting-1-abcdef-unless-routed"

    with pytest.MonkeyPatch.context() as patch:

        def taken_away_first(*args: Any, **kwargs: Any) -> bool:
            patch.setattr(fan_out, "roll_forward", real)
            base(copies).rename(gone)
            return real(*args, **kwargs)

        patch.setattr(fan_out, "roll_forward", taken_away_first)
        topic.publish(b"1", priority=9)
    opened(root).topic("a").queue.sweep()
    opened(root).topic("a").queue.sweep()
    assert bodies(opened(root).queue("a/s.c")) == [b"1"]


@pytest.mark.parametrize("again", [False, True])
def test_a_copy_whose_receiver_goes_while_it_is_on_its_way_is_set_aside(
    root: Root, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c")
    other = topic.create_subscription("other", client_id="c")
    real = fan_out.roll_forward

    def unsubscribed_first(*args: Any, **kwargs: Any) -> bool:
        monkeypatch.setattr(fan_out, "roll_forward", real)
        elsewhere = opened(root).topic("a")
        elsewhere.unsubscribe("s", client_id="c")
        if again:
            elsewhere.create_subscription("s", client_id="c")
        return real(*args, **kwargs)

    monkeypatch.setattr(fan_out, "roll_forward", unsubscribed_first)
    assert topic.publish(b"1", correlation_id="x").distributed
    assert bodies(other) == [b"1"]
    assert where(topic.queue) == {"processed": [b"1"], "error": [b"1"]}
    (gone,) = topic.queue.browse("error")
    assert gone.reason is not None
    assert gone.reason["reason"] == "receiver_gone"
    assert gone.reason["receiver"] == "topic-root/a/.subscriptions/s.c"
    assert [where(queue) for queue in topic.subscriptions() if queue.name == "a/s.c"] == ([{}] if again else [])
    assert staged(topic) == []


# -- recovery ------------------------------------------------------------------------------------------------------


def test_a_new_subscription_begins_with_what_the_topic_archived(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    clock.advance(60)
    sent = [topic.publish(str(number), priority=number).id for number in range(4)]
    recovered = {
        point: bodies(topic.create_subscription(f"at-{number}", client_id="c", recovery_point=point))
        for number, point in enumerate(("epoch", "creation", sent[2], "now", None))
    }
    every = [b"3", b"2", b"1", b"0"]
    assert recovered == {"epoch": every, "creation": every, sent[2]: [b"3", b"2"], "now": [], None: []}


def test_a_topic_says_where_its_subscriptions_begin(root: Root) -> None:
    topic = root.create_topic("a", recovery_point="epoch")
    topic.publish(b"a")
    assert bodies(topic.create_subscription("default", client_id="c")) == [b"a"]
    assert bodies(topic.create_subscription("own", client_id="c", recovery_point="now")) == []
    assert bodies(root.create_topic("b").create_subscription("other", client_id="c")) == []


@pytest.mark.parametrize("point", [None, "epoch", "now"])
def test_a_new_view_begins_with_what_its_topics_archived(root: Root, clock: Clock, point: str | None) -> None:
    for name in ("a.b", "a.c", "x"):
        topic = root.create_topic(name)
        for priority in (9, 1):
            clock.advance(1)
            topic.publish(f"{name} {priority}", priority=priority)
    asked: dict[str, Any] = {"underlying_topic": "^a[.]", "default_publish_target": "a.c", "recovery_point": point}
    view = root.create_queue("view", filter="JMSPriority > 5", **asked)
    before = [] if point == "now" else [b"a.b 9", b"a.c 9"]
    assert [take(view).body for _ in before] == before
    root.topic("a.c").publish("later", priority=9)
    assert [(message.body, message.delivery_count) for message in view.browse()] == [(b"later", 0)]


def test_equal_files_of_two_topics_are_two_messages_for_a_new_view(root: Root) -> None:
    for name in ("a.b", "a.c"):
        root.create_topic(name)
        draft = Path(root.path) / "report.csv"
        draft.write_bytes(name.encode())
        os.utime(draft, ns=(10**18, 10**18))
        draft.rename(Path(root.queue(name).layout.target) / "report.csv")
        root.queue(name).route()
    asked: dict[str, Any] = {"underlying_topic": "^a[.]", "default_publish_target": "a.c"}
    assert sorted(bodies(root.create_queue("view", **asked))) == [b"a.b", b"a.c"]


def test_a_view_whose_filling_was_cut_short_is_filled_before_anybody_takes_of_it(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = root.create_topic("a")
    for body in (b"1", b"2", b"3"):
        topic.publish(body)
    copy, copied = Moves.copy_archived, list[str]()

    def copying(moves: Moves, filename: str, to: QueueContext) -> str | None:
        if copied:
            raise KeyboardInterrupt
        copied.append(filename)
        return copy(moves, filename, to)

    monkeypatch.setattr(Moves, "copy_archived", copying)
    with pytest.raises(KeyboardInterrupt):
        root.create_queue("view", underlying_topic="a")
    monkeypatch.undo()
    view = root.queue("view")
    topic.publish(b"4")
    assert "recovering" in [note.kind for note in view.health().notes]
    assert {(said.why, "is being filled" in said.detail) for said in view.explain()} == {("paused", True)}
    assert [take(view).body for _ in range(4)] == [b"1", b"2", b"3", b"4"], "a consumer goes on with it"
    assert "recovering" not in [note.kind for note in view.health().notes]


def test_a_view_on_a_topic_that_is_away_is_filled_once_that_is_back(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    root.create_topic("sales.us").publish(b"a")
    folder, elsewhere = root.path / "topic-root/sales/us", root.path.parent / "us"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    elsewhere.rename(root.path.parent / "away")
    view = root.create_queue("view", underlying_topic="sales.us")
    assert "queue view is made, and a sweep fills it" in caplog.text
    assert view.sweep().recovered == 0 and "recovering" in [note.kind for note in view.health().notes]
    assert "view view begins with what it archived" in caplog.text
    (root.path.parent / "away").rename(elsewhere)
    assert [message.body for message in iter(view.receive, None)] == [b"a"]


def test_a_view_waits_for_what_its_filter_cannot_read(
    root: Root, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    root.create_topic("a").publish('{"b": 1}')
    read = reading.read_body

    def refused(path: str, most: int) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(reading, "read_body", refused)
    view = root.create_queue("view", underlying_topic="a", filter="/b = 1")
    monkeypatch.setattr(reading, "read_body", read)
    clock.advance(61)
    (reason,) = view.health().reasons
    assert reason.kind == "recovering" and "`dropq sweep view` says what keeps it" in reason.message
    assert take(view).json() == {"b": 1}
    assert view.health().healthy


def test_recovery_begins_at_a_time(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    topic.publish(b"before")
    clock.advance(3600)
    now = datetime.fromtimestamp(clock.ms / 1000, UTC)
    clock.advance(1)
    topic.publish(b"after")
    assert bodies(topic.create_subscription("s", client_id="c", recovery_point=now.isoformat())) == [b"after"]
    assert bodies(topic.create_subscription("t", client_id="c", recovery_point=now)) == [b"after"]


def test_a_point_that_is_none_makes_no_subscription(root: Root) -> None:
    topic = root.create_topic("a")
    with pytest.raises(ValueError, match="'tomorrow' is no point"):
        topic.create_subscription("s", client_id="c", recovery_point="tomorrow")
    assert topic.subscriptions() == []


def test_what_is_recovered_is_delivered_for_the_first_time_and_filtered(root: Root) -> None:
    topic = root.create_topic("a")
    root.topic("a", client_id="me").publish(b"mine", priority=9)
    topic.publish(b"low", priority=1)
    sent = topic.publish(b"high", priority=9, properties={"p": 1}, correlation_id="c")
    copies = topic.create_subscription(
        "s", client_id="me", no_local=True, filter="JMSPriority > 5", recovery_point="epoch"
    )
    message = take(copies)
    assert (message.id, message.body, message.properties, message.correlation_id) == (sent.id, b"high", {"p": 1}, "c")
    assert (message.delivery_count, message.redelivered) == (1, False)
    message.ack()
    assert received(copies) == []
    assert bodies(topic.queue, "processed") == [b"mine", b"high", b"low"]


def test_what_has_expired_is_not_recovered_and_what_will_keeps_its_time(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    topic.publish(b"short", expires_in=10)
    topic.publish(b"long", expires_in=1000)
    clock.advance(100)
    copies = topic.create_subscription("s", client_id="c", recovery_point="epoch")
    (message,) = copies.browse()
    assert message.body == b"long"
    assert message.expiration == datetime.fromtimestamp((clock.ms + 900_000) / 1000, UTC)
    clock.advance(1000)
    copies.sweep()
    assert where(copies) == {"expired": [b"long"]}


def test_the_lifetime_of_a_subscription_counts_from_its_recovery(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    topic.publish(b"1")
    clock.advance(100)
    configure(topic, "")
    copies = topic.create_subscription("s", client_id="c")
    configure(copies, 'expiration = "60s"\n')
    topic.unsubscribe("s", client_id="c")
    copies = topic.create_subscription("s", client_id="c", recovery_point="epoch")
    configure(copies, 'expiration = "60s"\n')
    assert received(opened(root).queue(copies.name)) == [b"1"]


def test_what_was_distributed_meanwhile_is_recovered_once(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscription stands before it is filled: what is published then comes by itself, and lies in the archive."""
    topic = root.create_topic("a")
    topic.publish(b"1")
    drop(topic.queue, "report.csv", b"2")
    real = recovery._begin_again

    def publishing_first(context: Any) -> None:
        elsewhere = opened(root).topic("a")
        elsewhere.publish(b"3")
        elsewhere.queue.sweep()
        real(context)

    monkeypatch.setattr(recovery, "_begin_again", publishing_first)
    copies = topic.create_subscription("s", client_id="c", recovery_point="epoch")
    assert sorted(bodies(copies)) == [b"1", b"2", b"3"]
    assert not Path(copies.layout.recovering).exists()


@pytest.mark.parametrize("who", ["sweep", "consumer", "work", "subscribing again"])
def test_a_recovery_that_was_cut_short_is_begun_again_and_nothing_leaves_target_before(
    root: Root, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    topic = root.create_topic("a")
    for body in (b"1", b"2", b"3"):
        topic.publish(body)
    real = Moves.copy_archived
    left = [1]

    def dying(self: Moves, *args: Any) -> str | None:
        if not left:
            raise StorageError("the power was cut")
        left.pop()
        return real(self, *args)

    with monkeypatch.context() as broken:
        broken.setattr(Moves, "copy_archived", dying)
        with pytest.raises(StorageError, match="power"):
            topic.create_subscription("s", client_id="c", recovery_point="epoch")
        copies = opened(root).queue("a/s.c")
        assert Path(copies.layout.recovering).exists()
        assert len(bodies(copies)) == 1
        with copies.subscribe() as early:
            assert early.receive() is None
        assert len(bodies(copies)) == 1, "nothing leaves target/"
        assert copies.sweep().refused > 0
        assert len(bodies(copies)) == 1
    copies = opened(root).queue("a/s.c")
    if who == "sweep":
        copies.sweep()
    elif who == "subscribing again":
        topic.create_subscription("s", client_id="c")
    elif who == "work":
        seen: list[bytes] = []
        work(copies, lambda message: seen.append(message.body), until_empty=True)
        assert seen == [b"1", b"2", b"3"]
        return
    assert received(copies) == [b"1", b"2", b"3"]
    assert not Path(copies.layout.recovering).exists()


# -- pause, delay, expiration --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["topic", "root"])
def test_what_is_published_to_a_paused_topic_waits(root: Root, what: str) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    paused = topic.queue if what == "topic" else root
    paused.pause()
    assert topic.publish(b"1").distributed is False
    assert opened(root).sweep().distributed == 0
    assert received(copies) == []
    assert where(topic.queue) == {"target": [b"1"]}
    paused.resume()
    assert received(copies) == [b"1"]


def test_a_publish_with_a_timeout_waits_for_the_end_of_a_pause(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.queue.pause()
    assert topic.publish(b"1", timeout="10ms").distributed is False
    resuming = threading.Timer(0.05, topic.queue.resume)
    resuming.start()
    assert topic.publish(b"2", timeout=30).distributed
    resuming.join()
    assert sorted(received(copies)) == [b"1", b"2"]


def test_a_publish_by_a_signal_handler_leaves_the_one_that_it_interrupts_its_timeout(root: Root) -> None:
    topic = root.create_topic("a")
    with topic._patient(30):
        assert topic.publish(b"1").distributed
        assert topic._publishing.patience.seconds == 30
    assert topic._publishing.patience.seconds is None


def test_a_paused_subscription_goes_on_getting_messages(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    copies.pause()
    assert topic.publish(b"1").distributed
    assert received(copies) == []
    copies.resume()
    assert received(copies) == [b"1"]


def test_what_is_published_with_a_delay_is_distributed_when_it_is_due(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    sent = topic.publish(b"1", delay=60)
    assert (sent.accepted, sent.distributed) == (True, False)
    assert received(copies) == []
    assert where(topic.queue) == {"delayed": [b"1"]}
    clock.advance(61)
    assert received(copies) == [b"1"], "a consumer brings it"
    assert "notBefore" not in "".join(names_in(copies, "processed") + names_in(topic.queue, "processed"))


def test_what_expires_before_it_is_distributed_goes_to_the_topics_expired(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.queue.pause()
    topic.publish(b"1", expires_in=10)
    clock.advance(11)
    topic.queue.resume()
    assert received(copies) == []
    assert where(topic.queue) == {"expired": [b"1"]}
    assert where(copies) == {}


def test_what_expires_afterwards_expires_where_it_arrived(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"1", expires_in=10)
    clock.advance(11)
    assert received(copies) == []
    assert where(copies) == {"expired": [b"1"]}
    assert where(topic.queue) == {"processed": [b"1"]}


def test_the_expiration_of_a_topic_is_not_that_of_its_subscriptions(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a", expiration="10s")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"distributed")
    topic.queue.pause()
    topic.publish(b"waits")
    clock.advance(60)
    topic.queue.resume()
    assert received(copies) == [b"distributed"]
    assert bodies(topic.queue, "expired") == [b"waits"]


# -- views ---------------------------------------------------------------------------------------------------------


def test_a_view_gets_what_is_published_to_its_topic_alone(root: Root) -> None:
    topic = root.create_topic("a.b")
    root.create_topic("a.b.c")
    root.create_topic("a")
    view = root.create_queue("view", underlying_topic="a.b")
    for name in ("a", "a.b", "a.b.c"):
        root.topic(name).publish(name)
    assert bodies(view) == [b"a.b"]
    sent = view.send(b"sent to it")
    assert (sent.accepted, sent.delivered_to, sent.distributed) == (True, "a.b", True)
    assert bodies(view) == [b"a.b", b"sent to it"]
    assert bodies(topic.queue, "processed") == [b"a.b", b"sent to it"]


def test_a_view_on_an_expression_gets_what_topics_publish_that_come_later(root: Root) -> None:
    root.create_topic("sales.eu")
    view = root.create_queue("view", underlying_topic="^sales[.]", default_publish_target="sales.eu")
    for name in ("sales.us", "other", "sales"):
        root.create_topic(name)
    for name in ("sales.eu", "sales.us", "other", "sales"):
        opened(root).topic(name).publish(name)
    assert sorted(bodies(view)) == [b"sales.eu", b"sales.us"]
    assert view.send(b"1").delivered_to == "sales.eu"


def test_a_view_whose_topic_comes_later_gets_what_is_published_then(root: Root) -> None:
    view = root.create_queue("view", underlying_topic="later")
    with pytest.raises(NoSuchQueue, match=r"sends to it go to topic 'later', which is not there: .*topic create later"):
        view.send(b"1")
    root.create_topic("later").publish(b"2")
    assert bodies(view) == [b"2"]
    assert opened(root).queue("view").send(b"3").delivered_to == "later"


def test_a_views_filter_and_consumers_act_as_those_of_a_subscription(root: Root) -> None:
    topic = root.create_topic("a")
    view = root.create_queue("view", underlying_topic="a", filter="JMSPriority > 5")
    drop(topic.queue, "9.1700000000000000-0000000009.T", b"9")
    drop(topic.queue, "1.1700000000000000-0000000001.T", b"1")
    assert received(view) == [b"9"], "its consumer distributes what waits in the topic"
    assert sorted(bodies(topic.queue, "processed")) == [b"1", b"9"]


def test_a_subscription_and_two_views_each_get_one_copy(root: Root) -> None:
    topic = root.create_topic("a")
    queues = [
        topic.create_subscription("s", client_id="c"),
        root.create_queue("one", underlying_topic="a"),
        root.create_queue("two", underlying_topic="a|b", default_publish_target="a"),
    ]
    topic.publish(b"1")
    assert [bodies(queue) for queue in queues] == [[b"1"]] * 3


def test_a_queue_that_becomes_a_view_by_hand_is_fed_once_it_was_opened(root: Root) -> None:
    topic = root.create_topic("a")
    queue = root.create_queue("q")
    configure(queue, 'underlying_topic = "a"\n')
    assert opened(root).queue("q").counts()["target"] == 0
    topic.publish(b"1")
    assert bodies(queue) == [b"1"]
    configure(queue, "")
    opened(root).topic("a").publish(b"2")
    assert bodies(queue) == [b"1"]
    assert opened(root).queue("q").send(b"3").delivered_to == "q"


def test_a_view_that_is_deleted_gets_nothing_and_holds_nobody(root: Root) -> None:
    topic = root.create_topic("a")
    root.create_queue("view", underlying_topic="a")
    other = topic.create_subscription("s", client_id="c")
    topic.publish(b"1")
    root.delete_queue("view", force=True)
    assert topic.publish(b"2").distributed
    assert opened(root).topic("a").publish(b"3").distributed
    assert sorted(bodies(other)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("after", [0, 1], ids=["before both looks", "between the looks"])
def test_the_note_of_a_view_that_goes_away_as_it_is_forgotten_keeps_its_topics(
    root: Root, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    root.create_topic("a")
    root.create_topic("other")
    view = root.create_queue("view", underlying_topic="a")
    note, real, looks = Path(root.path, ".dropq/views/view"), views._expression, list[str]()

    def leaving(context: RootContext, name: str) -> str | None:
        looks.append(name)
        if len(looks) > after:
            away = Path(root.path, f".view.deleting-{context.clock.now_ms()}-abcdef")
            if not away.exists():
                os.rename(view.layout.home, away)
            return real(context, name)
        return None

    monkeypatch.setattr(views, "_expression", leaving)
    views.forget_view(root.context, "view", Storage())
    monkeypatch.undo()
    assert note.read_text() == "a"
    assert opened(root).topic("other").publish(b"x").distributed


def test_a_views_reject_refuses_its_own_senders_and_holds_the_topic_for_others(root: Root) -> None:
    topic = root.create_topic("a")
    view = root.create_queue("view", underlying_topic="a", max_unprocessed=1, overflow="reject")
    other = topic.create_subscription("s", client_id="c")
    assert view.send(b"1").distributed
    with pytest.raises(QueueFull, match="view"):
        view.send(b"2")
    assert topic.publish(b"3").distributed is False
    assert bodies(other) == [b"1"]
    assert received(view) == [b"1", b"3"]
    assert bodies(other) == [b"1", b"3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"underlying_topic": "a", "default_publish_target": "b"},
            'none of the topics that underlying_topic = "a" names',
        ),
        ({"underlying_topic": "a.*"}, "set default_publish_target"),
        ({"underlying_topic": "("}, "no regular expression"),
        ({"underlying_topic": "a..b"}, "no part of a topic's name"),
        ({"default_publish_target": "a"}, "only a view has one"),
    ],
)
def test_a_view_on_what_is_no_topic_is_refused(root: Root, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        root.create_queue("view", **options)
    assert not root.queue("view").exists()


def test_a_view_on_an_expression_is_refused_where_nobody_can_evaluate_it(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(Unavailable, match=r"underlying_topic\) need the package google-re2"):
        root.create_queue("view", underlying_topic="^sales[.]", default_publish_target="sales.eu")
    assert not root.queue("view").exists()
    assert root.create_topic("other").publish(b"1").distributed


def test_a_view_on_itself_or_on_another_queue_is_no_view_on_a_topic(root: Root) -> None:
    view = root.create_queue("view", underlying_topic="view")
    with pytest.raises(NoSuchQueue, match=r"queue view is a view on topic 'view', and 'view' is a queue"):
        view.send(b"1")
    root.create_queue("q")
    other = root.create_queue("other", underlying_topic="q")
    with pytest.raises(NoSuchQueue, match=r"queue other is a view on topic 'q', and 'q' is a queue"):
        other.send(b"1")
    assert received(view) == received(other) == []


@pytest.mark.parametrize("key", ["underlying_topic", "default_publish_target"])
def test_neither_a_topic_nor_a_subscription_can_be_a_view(root: Root, key: str) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    with pytest.raises(ConfigError, match=rf"options of topic b: {key} = .*only a queue can be a view"):
        root.create_topic("b", underlying_topic="a", default_publish_target="a")
    for queue in (copies, topic.queue):
        before = Path(queue.layout.config_file)
        configure(queue, f'{key} = "b"\n')
        with pytest.raises(ConfigError, match="only a queue can be a view"):
            opened(root).queue(queue.name).counts()
        before.unlink()


# -- message types -------------------------------------------------------------------------------------------------


def test_a_subscription_reads_bodies_as_its_topic_says(root: Root) -> None:
    topic = root.create_topic("a", message_type="nvfix", field_separator=";")
    copies = topic.create_subscription("s", client_id="c", filter="/n = '1'")
    for config in (topic.queue.config, copies.config):
        assert (config.message_type, config.field_separator) == ("nvfix", ";")
    topic.publish("n=2;m=1")
    topic.publish("m=2;n=1")
    assert [message.text for message in copies.browse()] == ["m=2;n=1"]


@pytest.mark.parametrize("expression", [False, True])
def test_a_view_on_a_topic_of_another_message_type_is_refused(root: Root, *, expression: bool) -> None:
    root.create_topic("a.b", message_type="text")
    root.create_topic("a.c")
    options: dict[str, Any] = (
        {"underlying_topic": "^a[.]", "default_publish_target": "a.c"} if expression else {"underlying_topic": "a.b"}
    )
    said = r'message_type = "json".*topic a\.b has message_type = "text": give both the same'
    with pytest.raises(ConfigError, match=said):
        root.create_queue("view", **options)
    assert not root.queue("view").exists()
    if not expression:
        assert root.create_queue("view", message_type="text", **options).counts()["target"] == 0


def test_config_check_finds_a_view_on_topics_of_two_types(root: Root) -> None:
    topic = root.create_topic("a")
    view = root.create_queue("view", underlying_topic="a")
    assert view.counts()["target"] == 0
    topic.publish(b"1")
    configure(topic, 'message_type = "text"\n')
    (problem,) = check_file(view.layout.config_file)
    assert problem.startswith(f'{view.layout.config_file}: underlying_topic = "a": ')
    assert 'topic a has message_type = "text"' in problem
    with pytest.raises(ConfigError, match="topic a has message_type"):
        opened(root).queue("view").counts()
    assert opened(root).topic("a").publish(b"2").distributed is False
    configure(view, 'underlying_topic = "a"\nmessage_type = "text"\n')
    assert check_file(view.layout.config_file) == []
    assert opened(root).sweep().distributed == 1
    assert sorted(bodies(opened(root).queue("view"))) == [b"1", b"2"]


def test_a_topic_of_another_type_that_comes_later_is_not_distributed_to_a_view(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    root.create_topic("a.x")
    view = root.create_queue("view", underlying_topic="^a[.]", default_publish_target="a.x")
    assert where(view) == {}
    root.create_topic("a.y", message_type="binary")
    assert root.topic("a.y").publish(b"1").distributed is False
    assert "topic a.y waits: view cannot be used: " in caplog.text
    assert 'its topic a.y has message_type = "binary": give both the same' in caplog.text
    assert where(view) == {}


# -- configuration -------------------------------------------------------------------------------------------------


def test_a_topics_file_is_for_what_is_published_and_the_default_of_its_subscriptions(root: Root) -> None:
    topic = root.create_topic("a", max_deliveries=3, history=False, lease_period="30s", max_unprocessed=9)
    copies = topic.create_subscription("s", client_id="c")
    own = topic.create_subscription("own", client_id="c")
    configure(own, "max_deliveries = 5\n")
    own = opened(root).queue(own.name)
    assert (topic.queue.config.history, topic.queue.config.max_unprocessed) == (False, 9)
    assert (topic.queue.config.max_deliveries, topic.queue.config.lease_period) == (0, None)
    assert (copies.config.max_deliveries, copies.config.lease_period) == (3, 30)
    assert (copies.config.history, copies.config.max_unprocessed, copies.config.overflow) == (True, None, "block")
    assert (own.config.max_deliveries, own.config.lease_period) == (5, 30)


def test_a_subscriptions_own_file_wins_over_its_topics_and_that_over_the_roots_defaults(root: Root) -> None:
    root.path.joinpath("dropq.toml").write_text(
        f'format = 1\n{QUICK}max_deliveries = 1\nmax_backlog = 1\nmessage_type = "text"\nlease_period = "1s"\n'
    )
    topic = opened(root).create_topic("a", max_deliveries=2, max_backlog=2)
    copies = topic.create_subscription("s", client_id="c")
    configure(copies, "max_deliveries = 3\n")
    config = opened(root).queue("a/s.c").config
    assert (config.max_deliveries, config.max_backlog, config.lease_period) == (3, 2, 1)
    assert (config.message_type, config.durability) == ("text", "none")
    assert topic.queue.config.message_type == "text"


def test_a_filter_in_a_topics_file_is_the_default_filter_of_its_subscriptions(root: Root) -> None:
    topic = root.create_topic("a", filter="JMSPriority > 5")
    copies = topic.create_subscription("s", client_id="c")
    other = topic.create_subscription("low", client_id="c", filter="JMSPriority < 5")
    for priority in (1, 9):
        topic.publish(str(priority), priority=priority)
    assert (bodies(copies), bodies(other)) == ([b"9"], [b"1"])
    assert len(bodies(topic.queue, "processed")) == 2
    assert topic.create_subscription("s", client_id="c").counts()["target"] == 1


def test_a_problem_in_a_topics_file_is_told_with_its_file_and_key(root: Root) -> None:
    topic = root.create_topic("a")
    topic.create_subscription("s", client_id="c")
    file = topic.queue.layout.config_file
    assert file == str(root.path / "topic-root" / "a" / "queue.toml")
    configure(topic, "max_deliverys = 1\n")
    for name in ("a", "a/s.c"):
        with pytest.raises(
            ConfigError, match=rf"{file}: max_deliverys is not a key of a queue; the nearest is max_deliv"
        ):
            opened(root).queue(name).counts()
    assert len(check_file(file)) == 1


def test_wrong_options_make_no_topic(root: Root) -> None:
    with pytest.raises(ConfigError, match="options of topic a: nonsense"):
        root.create_topic("a", nonsense=1)
    assert not root.topic("a").exists()


# -- at once -------------------------------------------------------------------------------------------------------


def test_threads_publish_at_once(root: Root) -> None:
    topic = root.create_topic("a")
    queues = [topic.create_subscription(name, client_id="c") for name in "st"]
    errors: list[BaseException] = []

    def publishing(number: int) -> None:
        try:
            for count in range(20):
                assert topic.publish(f"{number}.{count}").distributed
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=publishing, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    every = sorted(f"{number}.{count}".encode() for number in range(4) for count in range(20))
    assert [sorted(bodies(queue)) for queue in queues] == [every, every]
    assert staged(topic) == []
    assert where(topic.queue).keys() == {"processed"}


def test_a_child_publishes_with_the_object_of_its_parent(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"parent")

    def publish() -> None:
        assert topic.publish(b"child").distributed

    assert forked(publish) == 0
    assert topic.publish(b"parent again").distributed
    assert sorted(bodies(copies)) == [b"child", b"parent", b"parent again"]


def test_closing_a_topic_ends_its_sign_of_life_and_it_can_be_used_again(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    with topic:
        topic.publish(b"1")
    assert private(topic.queue, "consumers") == []
    assert topic.publish(b"2").distributed
    assert bodies(copies) == [b"1", b"2"]
    topic.close()


# -- what is made by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has", [(), ("working",), ("working", "processing", "processed", "expired", "error")])
def test_a_subscription_folder_without_target_gets_nothing_and_holds_nobody(
    root: Root, caplog: pytest.LogCaptureFixture, has: tuple[str, ...]
) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    half = Path(topic.queue.layout.topic) / ".subscriptions" / "half.c"
    half.mkdir()
    for name in has:
        (half / name).mkdir()
    assert topic.publish(b"1").distributed
    assert topic.publish(b"2").distributed
    assert bodies(copies) == [b"1", b"2"]
    assert caplog.text.count("a/half.c gets nothing") == 1
    assert [queue.name for queue in topic.subscriptions()] == ["a/s.c"]


@pytest.mark.parametrize("name", ["s.c.other", "nodot", "s.c.deleted-1234567890123", "a%2eb.c"])
def test_a_folder_that_is_no_subscription_gets_nothing(root: Root, name: str) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("t", client_id="c")
    folder = Path(topic.queue.layout.topic) / ".subscriptions" / name
    for state in ("working", "target", "processing", "processed", "expired", "error"):
        (folder / state).mkdir(parents=True)
    assert topic.publish(b"1").distributed
    assert bodies(copies) == [b"1"]
    assert os.listdir(folder / "target") == []
    assert [queue.name for queue in root.queues()] == ["a", "a/t.c"]


def committed(root: Root, monkeypatch: pytest.MonkeyPatch) -> tuple[Topic, Queue, Path]:
    """A topic with a message that was committed for a subscription and not rolled forward, and its staged folder."""
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        assert topic.publish(b"1").distributed is False
    (folder,) = staged(topic)
    return topic, copies, Path(topic.queue.layout.staged) / folder


def test_what_is_committed_arrives_with_the_next_sweep_or_consumer(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, copies, folder = committed(root, monkeypatch)
    assert (folder / "whole").is_file()
    assert received(opened(root).queue(copies.name)) == [b"1"]
    assert where(topic.queue) == {"processed": [b"1"]}
    assert staged(topic) == []


def sweep_of(topic: Topic) -> int:
    """Sweep a topic as another process would; return how many messages it rolled forward."""
    return fan_out.sweep(opened(topic.root).queue(topic.name).context).forward


def known(topic: Topic) -> Path:
    """The file that says which queue the one receiver of a topic is."""
    (path,) = Path(topic.queue.layout.receivers).iterdir()
    return path


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"path": 5}', '{"path": "../outside", "inode": 1, "word": ""}',
     '{"path": "/tmp", "inode": 1, "word": ""}', '{"path": "topic-root/../../x", "inode": 1, "word": ""}'],
)  # fmt: skip
def test_a_receiver_that_cannot_be_read_or_leads_out_of_the_root_keeps_the_copy_where_it_is(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, text: str
) -> None:
    topic, copies, folder = committed(root, monkeypatch)
    (tmp_path / "outside" / "target").mkdir(parents=True)
    said = known(topic).read_text()
    known(topic).write_text(text)
    assert sweep_of(topic) == 0
    assert "stays there until a sweep can move it" in caplog.text
    assert f"{known(topic)} is damaged" in caplog.text
    assert where(copies) == {}
    assert (folder / "whole").read_bytes() == b"1", "nothing is archived before its copies have gone"
    assert os.listdir(tmp_path / "outside" / "target") == []
    known(topic).write_text(said)
    assert sweep_of(topic) == 1
    assert bodies(copies) == [b"1"]


@pytest.mark.parametrize("how", ["inode", "word", "another queue", "link", "missing", "file", "unknown"])
def test_a_receiver_that_is_not_the_one_that_is_named_gets_nothing(
    root: Root, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    topic, copies, _ = committed(root, monkeypatch)
    other = root.create_queue("other")
    outside = tmp_path / "outside"
    (outside / "target").mkdir(parents=True)
    (root.path / "link").symlink_to(outside)
    (root.path / "file").touch()
    said = json.loads(known(topic).read_text())
    change = {
        "inode": {"inode": said["inode"] + 1, "word": ""},
        "word": {"word": "0" * 16},
        "another queue": {"path": "other"},
        "link": {"path": "link"},
        "missing": {"path": "nowhere"},
        "file": {"path": "file"},
        "unknown": {},
    }[how]
    known(topic).write_text(json.dumps(said | change))
    if how == "unknown":
        known(topic).unlink()
    assert sweep_of(topic) == 1
    assert where(copies) == where(other) == {}
    assert os.listdir(outside / "target") == []
    assert where(topic.queue) == {"processed": [b"1"], "error": [b"1"]}
    (gone,) = topic.queue.browse("error")
    assert gone.reason is not None
    assert gone.reason["reason"] == "receiver_gone"


def test_a_copy_that_another_program_committed_reaches_a_view_of_each_layout_and_the_topics_above(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = root.create_topic("a.b")
    above = root.create_topic("a").create_subscription("s", client_id="c")
    views = [root.create_queue(f"view{n}", underlying_topic="a.b", dropboxmq=n == 1) for n in range(2)]
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        topic.publish(b"1")
    assert sweep_of(topic) == 1
    assert [bodies(queue) for queue in (above, *views)] == [[b"1"]] * 3


def test_what_keeps_a_program_from_other_queues_keeps_no_copy_from_its_receiver(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, copies, _ = committed(root, monkeypatch)
    (root.path / "loop").symlink_to(root.path / "loop")
    assert sweep_of(topic) == 1
    assert bodies(copies) == [b"1"]


def test_a_copy_waits_while_its_receiver_is_being_removed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = root.create_topic("a")
    view = root.create_queue("view", underlying_topic="a")
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        topic.publish(b"1")
    hidden = os.path.join(root.path, ".view.deleting-1795408273487-abcdef")
    os.rename(view.layout.home, hidden)
    assert sweep_of(topic) == 0, "a delete that finds messages brings the queue back"
    os.rename(hidden, view.layout.home)
    assert sweep_of(topic) == 1
    assert bodies(view) == [b"1"]


def test_what_lies_beside_a_committed_message_and_is_no_copy_keeps_it_there(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic, copies, folder = committed(root, monkeypatch)
    (folder / "0~odd").write_bytes(b"?")
    assert sweep_of(topic) == 0
    assert "0~odd stays there until a sweep can move it: it is no part of a message" in caplog.text
    assert bodies(copies) == [b"1"]
    (folder / "0~odd").unlink()
    assert sweep_of(topic) == 1


def test_what_a_topic_knows_of_a_receiver_goes_a_day_after_the_receiver_unless_a_copy_is_left(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, copies, _ = committed(root, monkeypatch)
    here = known(topic)
    clock.advance(2 * 86_400)
    topic.queue.sweep()
    assert here.exists(), "the receiver is there"
    with monkeypatch.context() as stalled:
        stalled.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        assert topic.publish(b"2").distributed is False
        shutil.rmtree(copies.layout.home)
        topic.queue.sweep()
        assert here.exists(), "a copy is on its way"
    topic.queue.sweep()
    assert not here.exists()
    assert sorted(bodies(topic.queue, "error")) == [b"2"]


def test_a_publisher_makes_a_receiver_known_again_whose_file_went(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.topics.receivers.CONFIG_AGE", 0.0)
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"1")
    known(topic).unlink()
    topic.publish(b"2")
    assert known(topic).exists()
    assert bodies(copies) == [b"1", b"2"]


def test_a_change_of_a_topics_file_counts_for_the_subscriptions_of_a_publisher_that_goes_on(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.topics.receivers.CONFIG_AGE", 0.0)
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"1", priority=1)
    configure(topic, 'filter = "JMSPriority > 5"\n')
    topic.publish(b"2", priority=1)
    topic.publish(b"3", priority=9)
    configure(copies, 'filter = "JMSPriority < 5"\n')
    topic.publish(b"4", priority=9)
    assert sorted(bodies(copies)) == [b"1", b"3"]


def test_a_sweep_of_the_root_removes_the_ephemeral_subscriptions_of_the_dead(root: Root, clock: Clock) -> None:
    topic = root.create_topic("a")
    die_after(lambda: topic.subscribe("s", durable=False))
    (left,) = topic.subscriptions()
    clock.advance(120)
    root.sweep()  # it goes on behind the subscription that it has just removed
    assert not left.exists()


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        ("remove_tree", ".incoming/.dropq/deleting"),
        ("remove_tree", ".incoming/.dropq/new"),
        ("rename_guarded", ".incoming/.dropq"),
        ("rename_folder", ".subscriptions"),
    ],
)
def test_what_cannot_be_removed_from_a_topic_keeps_nothing_else_that_is_left(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch, call: str, refused: str
) -> None:
    topic = root.create_topic("a")
    home = Path(topic.queue.layout.topic)
    unsettled = Path(unsettled_config(topic.queue.layout.topic))
    folders = [".incoming/.dropq/deleting", ".incoming/.dropq/new"]
    for folder in folders:
        (home / folder).mkdir(exist_ok=True)
    for name in ("s", "t"):
        gone = home / folders[0] / f"{name}.c.deleting-1-abcdef"
        base(topic.create_subscription(name, client_id="c")).rename(gone)
        (home / folders[1] / name).mkdir()
        die_after(lambda: topic.subscribe("passing", durable=False))
    unsettled.touch()
    clock.advance(7200)

    def left() -> list[str]:
        found = [name for folder in (*folders, ".subscriptions") for name in os.listdir(home / folder)]
        return found + [path.name for path in (unsettled,) if path.exists()]

    assert len(left()) == 7
    fixed, real = set[str](), getattr(Storage, call)

    def refuse(self: Storage, path: str, *args: object) -> object:
        if os.path.dirname(path) == str(home / refused) and (not fixed or path in fixed):
            fixed.add(path)
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        return real(self, path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, call, refuse)
        report = topic.queue.sweep()
    assert [os.path.basename(path) for path in fixed] == left()
    assert report.refused == 1
    assert topic.queue.sweep().refused == 0 and left() == []


@pytest.mark.parametrize("verb", ["prune", "purge", "move", "expire"])
@pytest.mark.parametrize("why", ["it fails", "another process is at it"])
def test_no_verb_takes_a_message_out_of_a_subscription_that_is_half_recovered(
    root: Root, monkeypatch: pytest.MonkeyPatch, verb: str, why: str
) -> None:
    def refused(*args: Any) -> None:
        raise StorageError("the power was cut")

    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"1")
    Path(copies.layout.recovering).write_text("epoch")
    acts: dict[str, Callable[[], object]] = {
        "prune": lambda: copies.prune(state="target", keep_count=0),
        "purge": copies.purge,
        "move": lambda: copies.move(root.create_queue("q")),
        "expire": copies.expire,
    }
    with monkeypatch.context() as broken:
        if why == "it fails":
            broken.setattr(recovery, "_begin_again", refused)
        else:
            broken.setattr(recovery, "recover", lambda context: 0)
        with pytest.raises((StorageError, Unavailable), match=r"power|a/s\.c is being filled .* nothing was changed"):
            acts[verb]()
        assert where(copies) == {"target": [b"1"]}
    copies.sweep()
    assert where(copies) == {"target": [b"1"]}


# -- views that cannot be used now -----------------------------------------------------------------------------------


def undecided(home: str | Path) -> Path:
    """Give a queue the name that a delete leaves which died undecided; return that."""
    hidden = Path(home).with_name(f".{Path(home).name}.deleting-{int(time.time() * 1000)}-abcdef")
    Path(home).rename(hidden)
    return hidden


def test_what_is_published_waits_for_a_view_whose_delete_is_not_decided(root: Root) -> None:
    topic, view = root.create_topic("a"), root.create_queue("view", underlying_topic="a")
    audit = topic.create_subscription("audit", client_id="hq")
    hidden = undecided(view.layout.home)
    assert not opened(root).topic("a").publish(b"for all").distributed
    assert lying(base(topic.queue)) == {"target": [b"for all"]}
    hidden.rename(view.layout.home)
    topic.queue.sweep()
    assert (bodies(view), bodies(audit)) == ([b"for all"], [b"for all"])


def test_what_is_published_waits_for_a_view_that_is_away(root: Root) -> None:
    topic, view = root.create_topic("a"), root.create_queue("view", underlying_topic="a")
    home, disk = Path(view.layout.home), root.path.parent / "disk"
    home.rename(disk)
    assert not opened(root).topic("a").publish(b"for all").distributed
    os.utime(Path(root.layout.views) / "view", (0, 0))
    root.sweep()
    disk.rename(home)
    topic.queue.sweep()
    assert bodies(view) == [b"for all"]


@pytest.mark.parametrize("broken", ["a typo", "no right to look", "away"])
def test_a_view_that_cannot_be_opened_holds_only_the_topics_that_it_names(root: Root, broken: str) -> None:
    mine, theirs = root.create_topic("mine"), root.create_topic("theirs")
    view = root.create_queue("view", underlying_topic="theirs")
    if broken == "a typo":
        configure(view, 'underlying_topic = "theirs"\nmax_delivery = 3\n')
    elif broken == "away":
        Path(view.layout.home).rename(root.path.parent / "disk")
    else:
        shutil.rmtree(view.layout.target)
        os.symlink("target", view.layout.target)  # which says ELOOP to everybody
    again = opened(root)
    assert again.topic(mine.name).publish(b"x").distributed
    assert not again.topic(theirs.name).publish(b"x").distributed
    again.sweep() if broken == "away" else again.tidy()
    assert os.listdir(root.layout.views) == ["view"]


def test_the_note_of_a_view_follows_its_configuration(root: Root) -> None:
    root.create_topic("before"), root.create_topic("after")
    view = root.create_queue("view", underlying_topic="before")
    configure(view, 'underlying_topic = "after"\n')
    assert opened(root).topic("after").publish(b"x").distributed
    assert bodies(view) == [b"x"]
    configure(view, 'underlying_topic = "after"\nmax_delivery = 3\n')
    assert opened(root).topic("before").publish(b"x").distributed
    assert not opened(root).topic("after").publish(b"x").distributed


def test_a_view_that_is_made_while_a_sweep_forgets_one_of_its_name_is_fed(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = root.create_topic("a")
    views = Path(root.layout.views)
    views.mkdir(exist_ok=True)
    (views / "view").touch()
    os.utime(views / "view", (0, 0))
    move = Storage.move_folder

    def late(storage: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "move_folder", move)
        (views / "view").unlink()  # a sweep saw the old note, and no view
        move(storage, source, destination)

    monkeypatch.setattr(Storage, "move_folder", late)
    view = root.create_queue("view", underlying_topic="a")
    assert os.listdir(views) == ["view"]
    topic.publish(b"x")
    assert bodies(view) == [b"x"]


def test_what_is_published_waits_for_a_subscription_whose_removal_is_not_decided(root: Root) -> None:
    topic = root.create_topic("a")
    copies = topic.create_subscription("s", client_id="c")
    topic.publish(b"before")
    removed = Path(topic.queue.layout.private) / "deleting" / "s.c.deleting-1-abcdef-unless-routed"
    removed.parent.mkdir(exist_ok=True)
    Path(copies.layout.home).rename(removed)
    assert not topic.publish(b"meanwhile").distributed
    removed.rename(copies.layout.home)
    topic.queue.sweep()
    assert bodies(copies) == [b"before", b"meanwhile"]
