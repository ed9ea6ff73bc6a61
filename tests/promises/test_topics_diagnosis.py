"""What health, explain, fsck and doctor say of topics: each kind is planted, found, and left as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import Clock, drop

from dropq import Queue, Root, Topic
from dropq.diagnosis.doctor import doctor
from dropq.diagnosis.fsck import fsck_root
from dropq.storage import reading

MINUTE = 60.0


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    return Root.create(tmp_path / "root", clock=clock)


@pytest.fixture
def topic(root: Root) -> Topic:
    return root.create_topic("a.b")


def subscriptions(topic: Topic) -> Path:
    return Path(topic.queue.layout.topic) / ".subscriptions"


def found_by_fsck(topic: Topic) -> dict[str, str]:
    """What fsck finds in a topic: a path by its kind."""
    return {finding.kind: finding.path for finding in topic.queue.fsck()}


def found_by_doctor(root: Root) -> dict[str, str]:
    return {
        diagnosis.kind: diagnosis.path for diagnosis in doctor(root.context) if diagnosis.level not in ("ok", "info")
    }


def full(topic: Topic) -> Queue:
    """A subscription with one message that has room for no other."""
    copies = topic.create_subscription("s", client_id="c")
    Path(copies.layout.config_file).write_text("max_unprocessed = 1\n")
    assert topic.publish("first").distributed and not topic.publish("second").distributed
    return copies


def commit_and_die(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commit a message, and move none of its copies; return the staged folder."""
    from dropq.staging import fan_out

    topic.create_subscription("s", client_id="c")
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        topic.publish("committed")
    (folder,) = os.listdir(topic.queue.layout.staged)
    return f"{topic.queue.layout.staged}/{folder}"


# -- fsck --------------------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_a_topic_that_is_used(root: Root, topic: Topic) -> None:
    topic.create_subscription("s", client_id="c")
    root.create_queue("view", underlying_topic="a.b")
    topic.publish("x")
    assert found_by_fsck(topic) == {} and root.queue("a.b/s.c").fsck() == [] and fsck_root(root.context) == []
    assert found_by_doctor(root) == {}


def test_a_message_that_is_committed_and_not_distributed_is_found_after_an_hour(
    topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = commit_and_die(topic, monkeypatch)
    assert found_by_fsck(topic) == {"under-way": folder}
    clock.advance(61 * MINUTE)
    assert found_by_fsck(topic) == {"unfinished-commit": folder}


def test_a_folder_that_is_no_subscription_is_found(topic: Topic) -> None:
    (stray := subscriptions(topic) / "notes").mkdir()
    assert found_by_fsck(topic) == {"not-a-subscription": str(stray)}


def test_a_subscription_that_was_made_half_by_hand_is_found(topic: Topic, clock: Clock) -> None:
    (half := subscriptions(topic) / "half.c" / "working").mkdir(parents=True)
    clock.advance(61 * MINUTE)
    assert found_by_fsck(topic) == {"half-made-subscription": str(half.parent)}
    (finding,) = topic.queue.fsck()
    assert "target/" in finding.detail and "working/" not in finding.detail.rpartition(":")[2]


def test_a_link_that_leads_to_no_queue_is_found(topic: Topic) -> None:
    link = subscriptions(topic) / "view.dropq"
    link.symlink_to("../../../../view")
    assert found_by_fsck(topic) == {"broken-view-link": str(link)}


def test_what_is_left_of_a_topic_that_was_half_made_is_found(root: Root, topic: Topic, clock: Clock) -> None:
    home = Path(topic.queue.layout.topic)
    (home / ".incoming.creating-0123456789ab").mkdir()
    clock.advance(61 * MINUTE)
    assert [finding.kind for finding in fsck_root(root.context)] == ["half-made-queue"]


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_a_queue_and_a_topic_of_one_name_are_found(root: Root, topic: Topic) -> None:
    home = topic.queue.layout.topic
    os.rename(root.create_queue("q").layout.home, root.path / "a.b")
    assert found_by_doctor(root) == {"two-of-a-name": home}


def test_a_subscription_on_another_file_system_is_found_and_holds_the_topic(
    root: Root, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = topic.create_subscription("s", client_id="c")
    real = reading.device
    elsewhere = copies.layout.home
    monkeypatch.setattr(reading, "device", lambda path: real(path) + path.startswith(elsewhere))
    assert found_by_doctor(root)["far-receiver"] == elsewhere


def test_a_view_that_a_dropboxmq_cannot_feed_is_found(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "shared", dropboxmq=True)
    root.create_topic("a")
    root.create_queue("view", underlying_topic="a")
    link = root.path / "topic-root" / "a" / ".subscriptions" / "view.dropq"
    assert link.is_symlink() and "missing-view-link" not in found_by_doctor(root)
    link.unlink()
    assert found_by_doctor(root) == {"missing-view-link": str(link)}


def test_a_topic_and_a_view_of_two_message_types_are_found(root: Root, topic: Topic) -> None:
    view = root.create_queue("view", underlying_topic="a.b")
    home = view.layout.home
    Path(topic.queue.layout.config_file).write_text('message_type = "text"\n')
    assert found_by_doctor(Root(root.path)) == {"unusable-queue": home}


# -- health and explain ------------------------------------------------------------------------------------------------


def test_health_says_what_a_topic_waits_for(topic: Topic, clock: Clock) -> None:
    copies = full(topic)
    for waited in (0, 2 * MINUTE):
        clock.advance(waited)
        (reason,) = topic.queue.health().reasons
        assert reason.kind == "undistributed" and "a.b/s.c is full (max_unprocessed = 1)" in reason.message
    with copies.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        message.ack()
        topic.queue.sweep()
        assert topic.queue.health().healthy


def test_health_says_of_a_message_that_nothing_keeps_and_nobody_distributes_after_a_minute(
    topic: Topic, clock: Clock
) -> None:
    Path(topic.queue.layout.target, "a.csv").write_text("x")
    assert topic.queue.health().healthy
    clock.advance(2 * MINUTE)
    (reason,) = topic.queue.health().reasons
    assert reason.kind == "undistributed" and "dropq sweep a.b" in reason.message


def test_health_says_of_a_full_subscription_that_its_topic_waits_and_what_to_do(topic: Topic) -> None:
    copies = full(topic)
    (reason,) = copies.health().reasons
    assert (reason.kind, reason.figure, reason.limit) == ("full", 1, 1)
    assert "no receiver of topic a.b gets what is published" in reason.message
    assert "start a consumer" in reason.message and "raise max_unprocessed" in reason.message
    Path(copies.layout.config_file).write_text('max_unprocessed = 1\noverflow = "discard"\n')
    found = Root(topic.queue.root.path).queue("a.b/s.c").health()
    assert found.healthy and [note.kind for note in found.notes] == ["full"]


def test_health_says_of_a_full_view_that_its_topic_waits(root: Root, topic: Topic) -> None:
    view = root.create_queue("view", underlying_topic="a.b", max_unprocessed=1)
    topic.publish("first")
    (reason,) = view.health().reasons
    assert reason.kind == "full" and "no receiver of topic a.b gets" in reason.message


def test_health_tells_of_a_commit_that_nobody_rolls_forward(
    topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_and_die(topic, monkeypatch)
    clock.advance(2 * MINUTE)
    assert [reason.kind for reason in topic.queue.health().reasons] == ["unfinished-commit"]
    assert topic.queue.counts()["processing"] == 1
    topic.queue.sweep()
    assert topic.queue.health().healthy and topic.queue.counts()["processing"] == 0


def test_a_subscription_that_is_being_filled_says_so(topic: Topic) -> None:
    copies = topic.create_subscription("s", client_id="c")
    Path(copies.layout.recovering).write_text("epoch")
    assert [note.kind for note in copies.health().notes] == ["recovering"]


def test_explain_says_of_each_message_what_its_topic_waits_for(topic: Topic) -> None:
    full(topic)
    (explanation,) = topic.queue.explain()
    assert explanation.why == "receiver" and "a.b/s.c is full" in explanation.detail


def test_explain_says_that_anybody_may_distribute_what_nothing_holds(topic: Topic) -> None:
    drop(topic.queue, "a.csv", b"x")
    (explanation,) = topic.queue.explain()
    assert explanation.why == "ready" and "`dropq sweep a.b`" in explanation.detail
