"""Queues of DropboxMQ's layout, and the claims of its clients, are taken as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import FRESH, Clock, Make, Run, base, drop, health, make_queue, names_in, reopened, take, where

from dropq import Message, Root
from dropq.format.message_file import MessageFile
from dropq.format.names import NAME_BUDGET, SHARED_BUDGET
from dropq.lifecycle.endings import delay_before


def test_dropboxmqs_layout_is_opened_as_it_is(tmp_path: Path) -> None:
    for folder in ("working", "target", "processing", "processed", "expired", "error"):
        (tmp_path / "orders" / "incoming" / folder).mkdir(parents=True)
    queue = Root(tmp_path).queue("orders")
    assert queue.exists()
    queue.send(b"a")
    assert where(queue) == {"target": [b"a"]}
    assert sorted(os.listdir(tmp_path / "orders")) == ["incoming"]
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        message.reject("r")
    assert where(queue) == {"error": [b"a"]}
    assert [found.name for found in Root(tmp_path).queues()] == ["orders"]


def test_typed_replies_are_written_and_read_as_dropboxmq_does(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, dropboxmq=True)
    assert (tmp_path / "q" / "incoming" / "target").is_dir()
    assert (tmp_path / "dropboxmq" / "transaction" / "rolled-back").is_dir()
    for reply, written in (("estQueue1", "QestQueue1"), ("topic-root/prices", "Tprices"), ("Quotes", "QQuotes")):
        queue.send(b"a", reply_to=reply)
        (name,) = names_in(queue, "target")
        assert name.split(".")[5] == written
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None
            assert message.reply_to == reply
            message.nack()
            (name,) = names_in(queue, "target")
            assert name.split(".")[5] == written
            again = subscription.receive()
            assert again is not None
            again.ack()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root of dropq's own."""
    return Root.create(tmp_path / "root")


def shared_root(path: Path, settings: str = "") -> Root:
    """A root that a running DropboxMQ made, and dropq only opens."""
    (path / "dropboxmq" / "transaction").mkdir(parents=True)
    if settings:
        (path / "dropq.toml").write_text(settings)
    return Root(path)


@pytest.mark.parametrize("made", [False, True])
def test_a_root_that_has_dropboxmqs_folder_has_typed_replies(tmp_path: Path, made: bool) -> None:
    root = shared_root(tmp_path)
    if made:
        Root.create(tmp_path)
        root = Root(tmp_path)
    queue = root.create_queue("q", durability="none")
    queue.send(b"a", reply_to="answers")
    (name,) = names_in(queue, "target")
    assert name.split(".")[5] == "Qanswers"
    drop(queue, "4.jar.T...TestQ", b"b")
    assert sorted(str(message.reply_to) for message in queue.browse()) == ["answers", "topic-root/estQ"]
    assert "bare-replies" not in [diagnosis.kind for diagnosis in root.doctor()]


def test_what_dropq_toml_says_of_replies_counts_and_the_doctor_warns(tmp_path: Path) -> None:
    root = shared_root(tmp_path, 'format = 1\nreply_to_style = "bare"\n')
    queue = root.create_queue("q", durability="none")
    queue.send(b"a", reply_to="answers")
    assert names_in(queue, "target")[0].split(".")[5] == "answers"
    [found] = [diagnosis for diagnosis in root.doctor() if diagnosis.kind == "bare-replies"]
    assert found.open and found.path == str(tmp_path / "dropq.toml")


def test_new_queues_of_a_root_that_has_dropboxmqs_folder_are_of_its_layout(root: Root, run: Run) -> None:
    assert not root.create_queue("before", durability="none").layout.shared
    (root.path / "dropboxmq").mkdir()
    assert root.create_queue("theirs", durability="none").layout.shared
    assert not root.create_queue("flat", dropboxmq=False, durability="none").layout.shared
    for options, shared in (((), True), (("--flat",), False), (("--dropboxmq",), True)):
        name = f"q{len(options)}{shared}"
        assert run("create", name, *options).code == 0
        assert root.queue(name).layout.shared is shared
    assert run("create", "both", "--flat", "--dropboxmq").code == 2
    [found] = [diagnosis for diagnosis in root.doctor() if diagnosis.kind == "flat-queue"]
    assert not found.open and found.found.startswith("before, flat and q1False ")


def test_what_comes_back_to_a_subscription_that_a_dropboxmq_may_consume_waits_for_nothing(tmp_path: Path) -> None:
    root = shared_root(tmp_path)
    with root.create_topic("t", durability="none") as topic:
        copies = topic.create_subscription("s", client_id="c")
        slow = topic.create_subscription("slow", client_id="c")
        Path(slow.layout.config_file).write_text('redelivery_delay = "1h"\n')
        topic.publish(b"x")
    for queue, delayed in ((copies, 0), (reopened(slow), 1)):
        take(queue).nack()
        assert queue.counts()["delayed"] == delayed
    name = replace(MessageFile(names_in(copies, "target")[0]).name, died=3)
    waits = [delay_before(reopened(queue).context, name, died=True) for queue in (copies, slow)]
    assert waits == [0, 3600]


def test_a_dropboxmq_clients_claim_is_swept_only_when_asked_for(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, lease_period="5s")
    queue.send(b"a")
    (name,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / f"client7~{name}")
    clock.advance(10_000)
    assert queue.sweep(unleased_older_than=0).total == 0
    assert queue.sweep(foreign_older_than=20_000).total == 0
    assert queue.sweep(foreign_older_than=5_000).foreign == 1
    assert take(queue).delivery_count == 2


#: What a DropboxMQ client writes into fields 5 to 8: an id of correlation, a reply-to, a type and a property.
HEADERS = "0f8fad5b-d9cb-469f-a165-70867728950e.Qanswers.order.regionS=EU"


def named(length: int) -> str:
    """A name of so many bytes."""
    name = f"4.1140429201295000-9262574723.T..{HEADERS}"
    return name + "x" * (length - len(name))


def to_delayed_and_back(message: Message) -> None:
    clock = message.queue.root.clock
    assert isinstance(clock, Clock)
    message.nack(delay=5)
    clock.advance(6)
    message.queue.sweep()


def to_error_and_back(message: Message) -> None:
    message.reject("r")
    assert [outcome.ok for outcome in message.queue.requeue()] == [True]


@pytest.mark.parametrize("length", [len(named(0)), SHARED_BUDGET - len("JMSXDeliveryCountI=1&&JMS_dropq_cancelsI=1")])
@pytest.mark.parametrize(
    ("settle", "state"),
    [
        (Message.ack, "processed"),
        (lambda message: message.nack(delay=0), "target"),
        (to_delayed_and_back, "target"),
        (lambda message: message.fail("r"), "target"),
        (lambda message: message.reject("r"), "error"),
        (Message.expire, "expired"),
        (to_error_and_back, "target"),
    ],
)
def test_what_a_dropboxmq_wrote_into_a_name_is_still_there_when_the_message_moved_on(
    make: Make, settle: Callable[[Message], None], state: str, length: int
) -> None:
    queue = make(dropboxmq=True, timing=FRESH, redelivery_attempts=9)
    drop(queue, named(length), b"a")
    settle(take(queue))
    (name,) = names_in(queue, state)
    assert ".".join(name.split(".")[4:7]) in HEADERS
    assert named(length).rpartition(".")[2] in name.replace("JMSXDeliveryCountI=1&", "")
    assert "JMS_dropq_meta" not in name
    assert len(name) <= SHARED_BUDGET


def test_what_passes_the_budget_of_a_shared_queue_goes_to_a_sidecar(make: Make) -> None:
    queue = make(dropboxmq=True)
    drop(queue, named(SHARED_BUDGET), b"a")
    take(queue).nack()
    (name,) = names_in(queue, "target")
    assert "JMS_dropq_meta" in name
    assert len(name) <= SHARED_BUDGET
    message = take(queue)
    assert (message.reply_to, message.type) == ("answers", "order")
    message.ack()


def test_a_queue_of_its_own_layout_keeps_to_its_budget(make: Make) -> None:
    queue = make()
    queue.send(b"a", correlation_id="c" * (NAME_BUDGET - len(named(0).partition("..")[0] + "..")))
    assert len(names_in(queue, "target")[0]) == NAME_BUDGET
    take(queue).nack()
    (name,) = names_in(queue, "target")
    assert "JMS_dropq_meta" in name
    assert len(name) <= NAME_BUDGET


def test_what_comes_into_a_shared_queue_gets_its_metadata_back_into_its_name(make: Make) -> None:
    queue = make(dropboxmq=True)
    other = queue.root.create_queue("other", dropboxmq=False, durability="none")
    other.send(b"a", correlation_id="c" * 120)
    assert "JMS_dropq_meta" in names_in(other, "target")[0]
    assert [outcome.ok for outcome in other.move(queue)] == [True]
    (name,) = names_in(queue, "target")
    assert name.split(".")[4] == "c" * 120
    assert [outcome.ok for outcome in queue.move(other)] == [True]
    assert len(names_in(other, "target")[0]) <= NAME_BUDGET
    assert take(other).correlation_id == "c" * 120


def test_what_comes_into_a_shared_queue_without_its_sidecar_stays_a_message(make: Make) -> None:
    queue = make(dropboxmq=True)
    other = queue.root.create_queue("other", dropboxmq=False, durability="none")
    other.send(b"a", correlation_id="c" * 120)
    shutil.rmtree(queue.root.path / ".dropq" / "meta")
    assert [outcome.ok for outcome in other.move(queue)] == [True]
    assert take(queue).body == b"a"


@pytest.mark.parametrize(
    "name",
    [
        "4.1140429201295000-9262574723.T....tmp",
        "4.1140429201295000-9262574723.T..part",
        "4.1140429201295000-9262574723.T...crc",
        "4.1140429201295000-9262574723.T....order.nS=x.tmp",
        "4.1140429201295000-9262574723....tmp",
    ],
)
def test_a_coded_name_is_a_message_for_everyone_whatever_it_ends_in(make: Make, clock: Clock, name: str) -> None:
    queue = make(timing=FRESH)
    drop(queue, name, b"a")
    clock.advance(7_200)
    assert queue.counts()["target"] == 1
    assert [message.file for message in queue.browse()] == [name]
    assert [found.why for found in queue.explain()] == ["ready"]
    assert [reason.kind for reason in health(queue, max_count=0).reasons] == ["many-waiting"]
    assert queue.fsck(repair=True) == []
    message = take(queue)
    assert message.body == b"a"
    message.ack()
    assert queue.counts()["processed"] == 1


def test_what_a_dropboxmq_archived_under_its_prefix_is_not_found_odd(make: Make, clock: Clock) -> None:
    queue = make()
    for number in range(3):
        path = base(queue) / "processed" / f"client7~4.114042920129500{number}-9262574723.T.....JMSXDeliveryCountI=1"
        path.write_bytes(b"a")
    clock.advance(2 * 86_400)
    assert queue.fsck() == []
    assert queue.counts()["processed"] == 3


def test_a_foreign_file_that_a_dropboxmq_holds_comes_back_under_the_whole_name(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH)
    (base(queue) / "processing" / "client7~plain.csv").write_bytes(b"a")
    clock.advance(10_000)
    assert queue.sweep(foreign_older_than=5_000).foreign == 1
    message = take(queue)
    assert message.id == "client7~plain.csv"
    message.ack()
    assert names_in(queue, "processed") == ["client7~plain.csv"]


def test_a_filter_sees_the_queue_as_destination(make: Make) -> None:
    queue = make(filter="JMSDestination = 'q'")
    queue.send(b"a")
    assert [message.body for message in queue.browse(filter="JMSDestination = 'q'")] == [b"a"]
    take(queue).ack()
