"""No crash, no refused call and no other program makes a topic lose or double a message: some cases of each.

`make torture` has all of them, in its part `topics`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import unprivileged
from forks import DIED, die_after, forked
from helpers import FRESH, Clock, arrive, first_and_long, timed, where
from torture.table import Row
from torture.topic_cases import CASES, MEETING, OTHERS, SETTINGS, Setting, TopicCases

from dropq import NoSuchQueue, Queue, QueueExists, Root, StorageError
from dropq.api import Topic
from dropq.config.load import validate_options
from dropq.lifecycle import folders, processing, queue_notes
from dropq.lifecycle.open_queue import open_queue
from dropq.staging import copies, fan_out
from dropq.storage import liveness, mounts, system_calls
from dropq.storage.files import Storage
from dropq.topics import distribution, receivers, subscriptions
from dropq.upkeep import archived, queues, recovery


def few(seed: int, many: int) -> Callable[[list[Any]], list[Any]]:
    """Choose so many at random."""
    chance = random.Random(seed)
    return lambda every: chance.sample(every, min(many, len(every)))


@pytest.mark.parametrize("setting", first_and_long(SETTINGS), ids=lambda setting: setting.name)
def test_a_crash_anywhere_loses_and_doubles_nothing_in_a_topic(tmp_path: Path, setting: Setting) -> None:
    seed, row = random.randrange(10**6), Row("crash")
    for case in random.Random(seed).sample(CASES, 6):
        TopicCases(tmp_path, setting, row).crash(case, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.kills and not row.lost and not row.doubled


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-1]], ids=lambda setting: setting.name)
def test_a_refused_call_loses_and_doubles_nothing_in_a_topic(tmp_path: Path, setting: Setting) -> None:
    seed, row = random.randrange(10**6), Row("fault")
    for case in random.Random(seed).sample(CASES, 6):
        TopicCases(tmp_path, setting, row).refuse(case, few(seed, 2))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.faults and not row.lost and not row.doubled


@pytest.mark.parametrize("other", OTHERS)
def test_two_programs_at_once_give_each_subscription_each_message_once(tmp_path: Path, other: str) -> None:
    seed, row = random.randrange(10**6), Row("two at once")
    for case in random.Random(seed).sample(MEETING, 3):
        TopicCases(tmp_path, SETTINGS[0], row).meet(case, other, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []


def test_every_verb_of_a_topic_is_in_a_case() -> None:
    public = {name for name in vars(Topic) if not name.startswith("_")}
    looking = {"exists", "subscriptions", "close"}
    assert public - looking == {"publish", "subscribe", "create_subscription", "unsubscribe"}, "give it a case"


# -- that it would be seen ---------------------------------------------------------------------------------------------


def tried(tmp_path: Path, name: str, is_seen: Callable[[Row], object]) -> Row:
    """Let a case die at one call after the other, until that is seen which is wrong."""
    row = Row("control")
    case = next(case for case in CASES if case.name == name)
    TopicCases(tmp_path, SETTINGS[0], row).crash(case, lambda moments: takewhile(lambda _: not is_seen(row), moments))
    return row


def test_copies_that_are_moved_before_the_commit_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fan_out._commit

    def late(context: Any, claim: Any, folder: str) -> bool:
        for part in sorted(os.listdir(folder))[:1]:
            to = f"{context.root.layout.path}/topic-root/a/b/.subscriptions/all.x/target/{part.partition('~')[2]}"
            context.storage.rename(f"{folder}/{part}", to)
        return commit(context, claim, folder)

    monkeypatch.setattr(fan_out, "_commit", late)
    assert tried(tmp_path, "publish", lambda row: row.doubled).doubled


@pytest.mark.long
def test_a_message_that_is_archived_before_its_copies_are_moved_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_forward = fan_out.roll_forward

    def early(context: Any, folder: str, **how: Any) -> bool:
        whole = f"{folder}/whole"
        context.storage.rename(whole, f"{context.layout.processed}/{folder.partition('~')[2]}")
        return roll_forward(context, folder, **how)

    monkeypatch.setattr(fan_out, "roll_forward", early)
    assert tried(tmp_path, "distribute by a sweep", lambda row: row.lost).lost


# -- one by one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def topic(tmp_path: Path) -> Topic:
    root = timed(Root.create(tmp_path, clock=Clock()), FRESH)
    return root.create_topic("a", durability="none")


def die(*_: object) -> None:
    os._exit(DIED)


def script(topic: Topic, body: bytes) -> None:
    draft = Path(topic.queue.layout.working, f"{body.decode()}.csv")
    draft.write_bytes(body)
    arrive(draft, Path(topic.queue.layout.target, draft.name))


def bodies(queue: Queue) -> list[bytes]:
    return [message.body for message in queue.browse()]


def test_a_distributor_that_dies_is_no_delivery_and_delays_nothing(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    topic = root.create_topic("a", durability="none", max_deliveries=1, redelivery_delay="1h")
    audit = topic.create_subscription("audit", client_id="hq")
    acts: list[Callable[[Topic], object]] = [lambda own: own.publish(b"once"), lambda own: own.queue.sweep()]
    for act in acts:
        with mock.patch.object(fan_out, "_commit", side_effect=lambda *_: os._exit(DIED)):
            assert forked(lambda act=act: act(Root(tmp_path).topic("a"))) == DIED  # type: ignore[misc]
    topic.queue.sweep()
    (message,) = audit.browse()
    assert (message.body, message.redelivered) == (b"once", False)


def test_a_sweep_of_the_root_passes_over_a_subscription_that_it_has_just_removed(topic: Topic) -> None:
    die_after(lambda: topic.subscribe("passing", durable=False))
    clock = topic.root.clock
    assert isinstance(clock, Clock)
    clock.advance(3600)
    topic.root.sweep()
    assert topic.subscriptions() == []


def test_a_recovery_waits_for_what_is_committed_and_cannot_be_rolled_forward(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = topic.create_subscription("first", client_id="x")
    real = system_calls.rename_noreplace

    def refuse(source: str, destination: str, *folders: int) -> None:
        if destination.startswith("target/"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        real(source, destination, *folders)

    with monkeypatch.context() as broken:
        broken.setattr(system_calls, "rename_noreplace", refuse)
        topic.publish(b"committed")
        with pytest.raises(StorageError, match="is there, and a later sweep fills it"):
            topic.create_subscription("second", client_id="x", recovery_point="epoch")
        assert topic.queue.sweep().refused
    topic.root.sweep()
    second = topic.root.queue("a/second.x")
    assert bodies(first) == bodies(second) == [b"committed"]


def test_what_is_distributed_while_a_subscription_is_filled_comes_there_once(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(topic, b"meanwhile")
    waiting, since = recovery._waiting, archived.since

    def distributing(function: Callable[..., Any]) -> Callable[..., Any]:
        def listed(*args: Any) -> Any:
            found = list(function(*args))
            Root(topic.root.path).topic("a").queue.sweep()
            return found

        return listed

    monkeypatch.setattr(recovery, "_waiting", distributing(waiting))
    monkeypatch.setattr(recovery, "since", distributing(since))
    assert bodies(topic.create_subscription("new", client_id="x", recovery_point="epoch")) == [b"meanwhile"]


def test_a_publisher_that_cannot_show_that_it_lives_leaves_its_message_to_others(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "consumers")

    with monkeypatch.context() as broken:
        broken.setattr("dropq.topics.distribution.Presence", refused)
        assert not topic.publish(b"sent").distributed
    topic.queue.sweep()
    assert bodies(audit) == [b"sent"]


def test_a_sweep_that_looks_as_a_holder_commits_takes_no_copy(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    is_committed, commit = processing.is_committed, fan_out._commit
    late: list[Callable[[], object]] = []

    def looking(folder: str) -> bool:
        found = is_committed(folder)
        while late:
            late.pop()()
        return found

    def committing(context: Any, claim: Any, folder: str) -> bool:
        late.append(lambda: commit(context, claim, folder))
        fan_out.sweep(context)
        return True

    monkeypatch.setattr(fan_out, "is_committed", looking)
    monkeypatch.setattr(fan_out, "_commit", committing)
    topic.publish(b"copied")
    assert bodies(audit) == [b"copied"]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT, errno.EIO], ids=errno.errorcode.get)
def test_a_copy_whose_receiver_stands_is_never_set_aside(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")

    def refused(source: str, destination: str, *_: int) -> None:
        if destination.startswith("target/"):
            raise OSError(number, os.strerror(number), source)
        os.rename(source, destination)

    with monkeypatch.context() as broken:
        broken.setattr(system_calls, "rename_noreplace", refused)
        assert not topic.publish(b"copied").distributed
        topic.queue.sweep()
    assert (bodies(audit), os.listdir(topic.queue.layout.error)) == ([], [])
    topic.queue.sweep()
    assert bodies(audit) == [b"copied"]


def test_a_subscription_is_not_removed_where_its_consumers_cannot_be_told(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.create_subscription("audit", client_id="hq")

    def refused(folder: str) -> frozenset[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    monkeypatch.setattr(liveness, "known", refused)
    with pytest.raises(StorageError, match="was not removed"):
        topic.unsubscribe("audit", client_id="hq")
    assert [queue.name for queue in topic.subscriptions()] == ["a/audit.hq"]


def test_a_consumer_that_ends_leaves_no_sign_of_life_in_its_topics(topic: Topic) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    script(topic, b"waits")
    with audit.subscribe() as consumer:
        assert consumer.receive() is not None
        assert os.listdir(topic.queue.layout.consumers)
    assert os.listdir(topic.queue.layout.consumers) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "unknown")], ids=["interrupt", "EIO"])
def test_what_is_committed_as_the_commit_fails_loses_no_copy(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    commit = fan_out._commit

    def failing(context: Any, claim: Any, folder: str) -> bool:
        commit(context, claim, folder)
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(fan_out, "_commit", failing)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                topic.publish(b"copied")
        else:
            topic.publish(b"copied")
    topic.queue.sweep()
    assert bodies(audit) == [b"copied"]


def test_a_topic_in_which_a_message_is_committed_as_it_is_deleted_comes_back(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = topic.root.create_topic("a.b", durability="none")
    above = topic.create_subscription("audit", client_id="hq")
    refuse_unsettled = queues.refuse_unsettled

    def looking(context: Any) -> None:
        refuse_unsettled(context)
        monkeypatch.setattr(queues, "refuse_unsettled", refuse_unsettled)
        with monkeypatch.context() as died:
            died.setattr(fan_out, "roll_forward", lambda *_, **__: False)
            below.publish(b"committed")

    monkeypatch.setattr(queues, "refuse_unsettled", looking)
    with pytest.raises(StorageError, match="1 in processing"):
        topic.root.delete_queue("a.b")
    below.queue.sweep()
    assert bodies(above) == [b"committed"]


@pytest.mark.parametrize("force", [False, True])
def test_a_topic_that_somebody_subscribes_to_as_it_is_deleted_comes_back(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    refuse_subscriptions = queues.refuse_subscriptions

    def looking(root: Any, context: Any) -> None:
        refuse_subscriptions(root, context)
        monkeypatch.setattr(queues, "refuse_subscriptions", refuse_subscriptions)
        topic.create_subscription("audit", client_id="hq")

    monkeypatch.setattr(queues, "refuse_subscriptions", looking)
    with pytest.raises(StorageError, match=r"has 1 subscriptions, such as a/audit\.hq"):
        topic.root.delete_queue("a", force=force)
    again = Root(topic.root.path)
    assert again.topic("a").publish(b"x").distributed
    assert bodies(again.queue("a/audit.hq")) == [b"x"]


def test_who_subscribes_to_a_topic_as_it_goes_is_told_and_leaves_nothing(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = folders.building

    @contextmanager
    def late(*args: Any, **how: Any) -> Iterator[Any]:
        with build(*args, **how) as holder:
            Root(topic.root.path).delete_queue("a")
            yield holder

    monkeypatch.setattr(subscriptions, "building", late)
    with pytest.raises(NoSuchQueue, match=r"subscription a/audit\.hq was not made"):
        topic.create_subscription("audit", client_id="hq")
    assert not os.path.lexists(topic.queue.layout.home)


def test_what_is_published_as_the_topic_goes_away_is_not_called_distributed(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    home = Path(topic.queue.layout.base)
    commit = fan_out._commit

    def going(*args: Any) -> bool:
        home.rename(f"{home}.away")
        return commit(*args)

    with monkeypatch.context() as away:
        away.setattr(fan_out, "_commit", going)
        assert topic.publish(b"later").distributed is False
    Path(f"{home}.away").rename(home)
    clock = topic.root.context.clock
    assert isinstance(clock, Clock)
    clock.advance(61)
    topic.queue.sweep()
    assert bodies(audit) == [b"later"]


def max_deliveries(root: Root, topic: str) -> int:
    return open_queue(Root(root.path).context, f"{topic}/audit.hq").config.max_deliveries


def test_of_two_that_make_a_topic_the_second_changes_no_configuration(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = topic.root

    def first(*args: Any, **how: Any) -> Any:
        monkeypatch.setattr("dropq.topics.subscriptions.validate_options", validate_options)
        Root(root.path).create_topic("b", max_deliveries=1).create_subscription("audit", client_id="hq")
        return validate_options(*args, **how)

    monkeypatch.setattr("dropq.topics.subscriptions.validate_options", first)
    with pytest.raises(QueueExists):
        root.create_topic("b", max_deliveries=2)
    assert max_deliveries(root, "b") == 1
    assert Path(root.path, "topic-root/b/queue.toml").read_text() == "max_deliveries = 1\n"


@pytest.mark.parametrize("kind", ["configured", "plain"])
@pytest.mark.parametrize("force", [False, True])
def test_a_topic_that_is_made_as_one_of_its_name_is_removed_keeps_its_own_configuration(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, kind: str, force: bool
) -> None:
    root = topic.root
    root.create_topic("b", max_deliveries=1)
    drain = Storage.drain

    def going(storage: Storage, folder: str) -> None:
        monkeypatch.setattr(Storage, "drain", drain)
        made = Root(root.path).create_topic("b", **({"max_deliveries": 2} if kind == "configured" else {}))
        made.create_subscription("audit", client_id="hq")
        drain(storage, folder)

    monkeypatch.setattr(Storage, "drain", going)
    root.delete_queue("b", force=force)
    assert max_deliveries(root, "b") == (2 if kind == "configured" else 0)


@pytest.mark.parametrize("work", ["made", "removed"])
def test_the_configuration_of_a_topic_counts_whoever_dies_as_it_is_made_or_removed(topic: Topic, work: str) -> None:
    root, home = topic.root, Path(topic.root.path, "topic-root/b")
    if work == "removed":
        root.create_topic("b", max_deliveries=3)

    def dying() -> None:
        if work == "made":
            with mock.patch.object(subscriptions, "settle_config", die):
                root.create_topic("b", max_deliveries=3)
        with mock.patch.object(Storage, "rename_folder", die):
            root.delete_queue("b")

    assert forked(dying) == DIED
    assert not (home / "queue.toml").exists()
    Root(root.path).topic("b").create_subscription("audit", client_id="hq")
    assert max_deliveries(root, "b") == 3
    assert root.queue("b").fsck() == []
    root.context.clock.advance(3601)  # type: ignore[attr-defined]
    root.queue("b").sweep()
    assert (home / "queue.toml").read_text() == "max_deliveries = 3\n"
    assert max_deliveries(root, "b") == 3
    assert root.queue("b").fsck() == []


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_configuration_that_an_administrator_wrote_after_a_crash_counts_and_stays(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, in_kernel: bool
) -> None:
    root, settle = topic.root, subscriptions.settle_config
    with mock.patch.object(subscriptions, "settle_config", die):
        assert forked(lambda: root.create_topic("b", max_deliveries=3)) == DIED
    Root(root.path).topic("b").create_subscription("audit", client_id="hq")
    file, written = Path(root.path, "topic-root/b/queue.toml"), "max_deliveries = 7\n"
    if not in_kernel:
        monkeypatch.setattr(system_calls, "_renameat2", None)
        file.write_text(written)
    else:  # just before the rename

        def late(self: Storage, source: str, destination: str) -> None:
            file.write_text(written)
            rename_guarded(self, source, destination)

        rename_guarded = Storage.rename_guarded
        monkeypatch.setattr(Storage, "rename_guarded", late)
    root.context.clock.advance(3601)  # type: ignore[attr-defined]
    root.queue("b").sweep()
    assert (file.read_text(), max_deliveries(root, "b")) == (written, 7)
    file.unlink()
    assert max_deliveries(root, "b") == 0, "nothing of before comes back"
    settle(root.queue("b").layout, Storage())
    assert not file.exists()


def test_an_administrators_configuration_counts_before_any_sweep(topic: Topic) -> None:
    root = topic.root
    with mock.patch.object(subscriptions, "settle_config", die):
        assert forked(lambda: root.create_topic("b", max_deliveries=3)) == DIED
    Root(root.path).topic("b").create_subscription("audit", client_id="hq")
    Path(root.path, "topic-root/b/queue.toml").write_text("max_deliveries = 7\n")
    assert max_deliveries(root, "b") == 7


def test_two_deletes_of_a_topic_leave_no_configuration_for_the_next(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rename, make = topic.root, Storage.rename_folder, Storage.make_folder
    root.create_topic("b", max_deliveries=3)

    def pausing(self: Storage, path: str, **how: Any) -> None:
        if path.endswith("topic-root/b/.incoming/.dropq"):
            raise KeyboardInterrupt
        make(self, path, **how)

    def meeting(self: Storage, source: str, destination: str) -> None:
        monkeypatch.setattr(Storage, "rename_folder", rename)
        monkeypatch.setattr(Storage, "make_folder", pausing)
        with pytest.raises(KeyboardInterrupt):
            Root(root.path).delete_queue("b")
        monkeypatch.setattr(Storage, "make_folder", make)
        rename(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", meeting)
    root.delete_queue("b")
    root.create_topic("b").create_subscription("audit", client_id="hq")
    assert max_deliveries(root, "b") == 0


def test_a_delete_that_is_undone_leaves_the_configuration_where_it_was(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, refuse_unsettled = topic.root, queues.refuse_unsettled
    root.create_topic("b", max_deliveries=3)

    def looking(context: Any) -> None:
        refuse_unsettled(context)
        monkeypatch.setattr(queues, "refuse_unsettled", refuse_unsettled)
        Path(context.layout.target, "late.csv").touch()

    monkeypatch.setattr(queues, "refuse_unsettled", looking)
    with pytest.raises(StorageError, match="1 in target"):
        root.delete_queue("b")
    assert Path(root.path, "topic-root/b/queue.toml").read_text() == "max_deliveries = 3\n"


@pytest.mark.parametrize("call", ["make_folder", "write_small"])
def test_a_subscription_that_cannot_be_made_replaces_none(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    topic.create_subscription("audit", client_id="hq", filter="x = 1")
    topic.publish(b"kept", properties={"x": 1})
    made = getattr(Storage, call)

    def full(storage: Storage, path: str, *args: Any, **how: Any) -> Any:
        if f"{topic.queue.layout.new}/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return made(storage, path, *args, **how)

    with monkeypatch.context() as disk:
        disk.setattr(Storage, call, full)
        for options in ({"filter": "x > 0"}, {"filter": "x = 1", "no_local": True}):
            with pytest.raises(StorageError, match="No space left"):
                topic.create_subscription("audit", client_id="hq", **options)
    assert [bodies(each) for each in topic.subscriptions()] == [[b"kept"]]
    assert not os.listdir(topic.queue.layout.new)


def test_a_subscription_that_cannot_be_cleared_away_is_replaced(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.create_subscription("audit", client_id="hq", filter="x = 1")
    topic.publish(b"gone", properties={"x": 1})

    def broken(_: Storage, folder: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    with monkeypatch.context() as disk:
        disk.setattr(Storage, "drain", broken)
        audit = topic.create_subscription("audit", client_id="hq", filter="x > 0")
    topic.publish(b"new", properties={"x": 1})
    topic.queue.sweep()
    assert bodies(audit) == [b"new"]
    assert not os.listdir(topic.queue.layout.deleting)


def test_of_two_that_subscribe_with_a_new_filter_the_second_keeps_what_the_first_got(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.create_subscription("audit", client_id="hq", filter="x = 1")
    replaced_by = subscriptions.replaced_by
    others: list[threading.Thread] = []
    got: list[bool] = []

    def other() -> None:
        Root(topic.root.path).topic("a").create_subscription("audit", client_id="hq", filter="x = 2")
        got.append(topic.publish(b"for x = 2", properties={"x": 2}).distributed is True)

    def looking(*args: Any) -> list[str]:
        found = replaced_by(*args)
        if not others:
            others.append(threading.Thread(target=other))
            others[0].start()
            others[0].join(0.2)
        return found

    monkeypatch.setattr(subscriptions, "replaced_by", looking)
    audit = topic.create_subscription("audit", client_id="hq", filter="x = 2")
    others[0].join(10)
    assert got == [True]
    assert bodies(audit) == [b"for x = 2"]


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_a_subscription_whose_name_something_else_has_is_refused(topic: Topic, what: str) -> None:
    taken = Path(topic.queue.layout.home, ".subscriptions", "audit.hq")
    taken.touch() if what == "a file" else taken.symlink_to("../../..")
    with pytest.raises(StorageError, match="is there, and is no folder"):
        topic.create_subscription("audit", client_id="hq")
    assert os.listdir(topic.queue.layout.new) == []


def test_a_filter_that_changes_as_it_is_read_counts_from_the_next_refresh_on(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = topic.create_subscription("audit", client_id="hq", filter="x = 1")

    def opening(root: Any, address: str) -> Any:
        context = open_queue(root, address)
        monkeypatch.setattr("dropq.topics.receivers.open_queue", open_queue)
        Path(context.layout.config_file).write_text('filter = "x = 2"\n')
        return context

    monkeypatch.setattr("dropq.topics.receivers.open_queue", opening)
    monkeypatch.setattr(receivers, "CONFIG_AGE", 0)
    for body in (b"first", b"second"):
        topic.publish(body, properties={"x": 2})
    assert bodies(audit) == [b"second"]


def test_a_recovery_point_that_cannot_be_read_is_reported_and_stops_no_sweep(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    Path(audit.layout.recovering).write_text("yesterday\n")
    assert audit.sweep().refused == 1
    assert f"{audit.layout.recovering}: 'yesterday' is no point to begin at" in caplog.text
    Path(audit.layout.recovering).write_text("epoch\n")
    assert audit.sweep().refused == 0
    assert not Path(audit.layout.recovering).exists()


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["from memory", "by the kernel"])
def test_a_sweep_takes_no_message_from_a_living_process_whose_copies_take_longer_than_a_lease(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    made = [topic.create_subscription(f"s{number}", client_id="hq") for number in range(6)]
    clock = topic.root.context.clock
    assert isinstance(clock, Clock)
    write_all, copy = Storage.write_all, Storage.copy
    passed = [0.0]

    def slowly(write: Callable[..., object], *args: Any, **options: Any) -> None:
        write(*args, **options)
        passed[0] += copies.LEASE / 4
        clock.advance(copies.LEASE / 4)
        Root(topic.root.path, clock=clock).queue("a").sweep()

    monkeypatch.setattr(distribution, "COPIES_AT_ONCE", 1)
    monkeypatch.setattr("dropq.topics.distribution.time.monotonic", lambda: time.monotonic_ns() / 1e9 + passed[0])
    monkeypatch.setattr(Storage, "write_all", lambda *args, **options: slowly(write_all, *args, **options))
    monkeypatch.setattr(Storage, "copy", lambda *args, **options: slowly(copy, *args, **options))
    assert topic.publish(bytes(size)).distributed
    assert [len(bodies(queue)) for queue in made] == [1] * 6


@pytest.mark.parametrize("by", ["a delete", "a sweep"])
def test_a_view_that_appears_as_one_of_its_name_is_forgotten_gets_what_is_published(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    root = topic.root
    view = root.create_queue("night", underlying_topic="a")
    unlink = Storage.unlink
    note = os.path.join(root.layout.views, "night")

    def unlinking(storage: Storage, path: str) -> bool:
        if path == note:
            monkeypatch.setattr(Storage, "unlink", unlink)
            Root(root.path).create_queue("night", underlying_topic="a")
        return unlink(storage, path)

    monkeypatch.setattr(Storage, "unlink", unlinking)
    if by == "a delete":
        root.delete_queue("night")
    else:
        queue_notes.forget(root.layout, view.layout.base, view.layout.private, Storage())
        shutil.rmtree(view.layout.home)
        os.utime(note, (0, 0))
        root.tidy()
    topic.publish(b"copied")
    assert bodies(Root(root.path).queue("night")) == [b"copied"]


def test_a_view_never_stands_without_its_note(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    root = topic.root
    root.create_queue("night", underlying_topic="a")
    note, unlink = os.path.join(root.layout.views, "night"), Storage.unlink
    asked: dict[str, Any] = {"underlying_topic": "a", "recovery_point": "now", "durability": "none"}
    maker = threading.Thread(target=lambda: timed(Root(root.path), FRESH).create_queue("night", **asked))
    there = list[bool]()

    def unlinking(storage: Storage, path: str) -> bool:
        if path != note or maker.ident:
            return unlink(storage, path)
        maker.start()
        maker.join(0.2)
        unlink(storage, path)
        there.append(Root(root.path).queue("night").exists())
        topic.publish(b"x")
        return True

    monkeypatch.setattr(Storage, "unlink", unlinking)
    root.delete_queue("night")
    maker.join()
    assert len(bodies(Root(root.path).queue("night"))) == sum(there)
    assert topic.publish(b"later").distributed
    assert bodies(Root(root.path).queue("night"))[-1:] == [b"later"]


def test_a_publisher_does_not_wait_for_ever_for_another_distributor(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    layout = topic.queue.layout
    run = distribution.Distributor.run

    def other_first(distributor: Any, **options: Any) -> int:
        for file in os.listdir(layout.target):
            os.rename(f"{layout.target}/{file}", f"{layout.processing}/{file}")
        return run(distributor, **options)

    script(topic, b"before")
    with monkeypatch.context() as stuck:
        stuck.setattr(distribution, "OTHERS", 0.1)
        stuck.setattr(distribution.Distributor, "run", other_first)
        assert topic.publish(b"claimed by a script").distributed is False
    for file in os.listdir(layout.processing):
        os.rename(f"{layout.processing}/{file}", f"{layout.target}/{file}")
    topic.queue.sweep()
    assert sorted(bodies(audit)) == [b"before", b"claimed by a script"]


def test_a_message_that_another_distributor_claims_as_its_body_is_read_holds_nothing(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = topic.create_subscription("audit", client_id="hq", filter="/total > 1")
    chosen = distribution.Distributor._chosen

    def other_first(distributor: Any, *args: Any) -> Any:
        monkeypatch.setattr(distribution.Distributor, "_chosen", chosen)
        Root(topic.root.path).queue("a").sweep()
        return chosen(distributor, *args)

    Path(topic.queue.layout.target, "bill.json").write_text('{"total": 2}')
    monkeypatch.setattr(distribution.Distributor, "_chosen", other_first)
    distributor = distribution.Distributor(topic.queue.context)
    distributor.run()
    assert distributor.blocked_by == ""
    assert bodies(audit) == [b'{"total": 2}']


@pytest.mark.parametrize("closed", ["", "target"], ids=["its folder", "its target"])
def test_a_receiver_that_this_user_may_not_open_holds_the_topic_and_misses_nothing(topic: Topic, closed: str) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    folder = Path(audit.layout.home, closed)
    folder.chmod(0)
    try:
        published = unprivileged(lambda: Root(topic.root.path).topic("a").publish(b"for all").distributed)
    finally:
        folder.chmod(0o755)
    assert published is False
    topic.queue.sweep()
    assert bodies(audit) == [b"for all"]


def test_a_roll_forward_syncs_the_receivers_that_another_one_moved_copies_to(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(topic.queue.layout.config_file).write_text('durability = "full"\n')
    published = Root(topic.root.path).topic(topic.name)
    audit = published.create_subscription("audit", client_id="hq")

    def nothing(*_: object) -> None:
        """Stand in for what a process does not come to that dies after it has moved the last copy."""

    with monkeypatch.context() as dying:
        for stopped, verb in ((fan_out._Mover, "sync"), (fan_out, "end_whole"), (Storage, "remove_folder")):
            dying.setattr(stopped, verb, nothing)
        published.publish(b"copied")
    assert bodies(audit) == [b"copied"]
    synced: list[int] = []
    real = Storage.sync_in

    def noted(self: Storage, folder: int, name: str) -> None:
        synced.append(os.fstat(folder).st_ino)
        real(self, folder, name)

    monkeypatch.setattr(Storage, "sync_in", noted)
    assert Root(topic.root.path).queue(topic.name).sweep().rolled_forward == 1
    assert os.stat(audit.layout.base).st_ino in synced


def committed(topic: Topic, monkeypatch: pytest.MonkeyPatch, body: bytes) -> Path:
    """Let a distributor die right after the commit of what a script published; return the staged folder."""
    script(topic, body)
    before = set(os.listdir(topic.queue.layout.staged))
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "roll_forward", lambda *_, **__: False)
        distribution.Distributor(topic.queue.context).run()
    (folder,) = set(os.listdir(topic.queue.layout.staged)) - before
    return Path(topic.queue.layout.staged, folder)


def part_in(folder: Path) -> Path:
    (part,) = (path for path in folder.iterdir() if path.name != "whole")
    return part


def after_a_power_cut_on_btrfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what was linked until now be older than the machine's start."""
    monkeypatch.setattr(mounts, "started_at", lambda: time.time() + 1)
    monkeypatch.setattr(mounts, "mount_of", lambda path: mounts.Mount("btrfs"))


@pytest.mark.parametrize("old", ["of a copy", "of the claim", "of an archived message"])
def test_a_name_that_a_power_cut_brings_back_is_unlinked(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    """On btrfs a file that was renamed may have both names after a power cut."""
    audit = topic.create_subscription("audit", client_id="hq")
    layout, folder = topic.queue.layout, committed(topic, monkeypatch, b"1")
    claim = f"distributor-{folder.name.partition('.')[0]},{topic.root.context.clock.now_ms() + 60_000},1~1.csv"
    file, name = {
        "of a copy": (part_in(folder), f"{audit.layout.target}/1.csv"),
        "of the claim": (folder / "whole", f"{layout.processing}/{claim}"),
        "of an archived message": (folder / "whole", f"{layout.processed}/1.csv"),
    }[old]
    os.link(file, name)
    after_a_power_cut_on_btrfs(monkeypatch)
    Root(topic.root.path).queue(topic.name).sweep()
    assert where(topic.queue) == {"processed": [b"1"]}
    assert where(audit) == {"target": [b"1"]}
    assert os.listdir(layout.staged) == []


@pytest.mark.parametrize("link", ["of a copy", "of the message, in target", "of the message, in processed"])
@pytest.mark.parametrize("why", ["made since the start", "of another message", "not on btrfs"])
def test_a_link_that_somebody_made_is_a_message(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, link: str, why: str
) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    folder, layout = committed(topic, monkeypatch, b"1"), topic.queue.layout
    name = "2.csv" if why == "of another message" else "1.csv"
    file, to = {
        "of a copy": (part_in(folder), audit.layout.target),
        "of the message, in target": (folder / "whole", layout.target),
        "of the message, in processed": (folder / "whole", layout.processed),
    }[link]
    os.link(file, f"{to}/{name}")
    after_a_power_cut_on_btrfs(monkeypatch)
    if why == "made since the start":
        monkeypatch.setattr(mounts, "started_at", lambda: 0.0)
    if why == "not on btrfs":
        monkeypatch.setattr(mounts, "mount_of", lambda path: mounts.Mount("ext4"))
    Root(topic.root.path).queue(topic.name).sweep()
    distribution.Distributor(topic.queue.context).run()
    assert len(bodies(audit)) == (1 if link == "of the message, in processed" else 2)
    assert len(os.listdir(layout.processed)) == (1 if link == "of a copy" else 2)


@pytest.mark.parametrize("what", ["a note", "a damaged file", "one that may not be opened"])
def test_a_message_is_archived_whatever_else_lies_among_the_receivers(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    Path(topic.queue.layout.config_file).write_text('durability = "full"\n')
    published = Root(topic.root.path).topic(topic.name)
    audit = published.create_subscription("audit", client_id="hq")
    committed(published, monkeypatch, b"1")
    folder = Path(topic.queue.layout.receivers)
    (topic.root.path / "loop").symlink_to(topic.root.path / "loop")
    text = '{"path": "loop", "inode": 5, "word": ""}' if what == "one that may not be opened" else "?"
    (folder / ("notes.txt" if what == "a note" else "0" * 16)).write_text(text)
    published.queue.sweep()
    assert where(published.queue) == {"processed": [b"1"]}
    assert bodies(audit) == [b"1"]


def test_a_publisher_writes_the_damaged_file_of_a_receiver_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    topic.publish(b"1")
    (known,) = Path(topic.queue.layout.receivers).iterdir()
    known.write_bytes(b"")
    committed(Root(topic.root.path).topic(topic.name), monkeypatch, b"2")
    Root(topic.root.path).queue(topic.name).sweep()
    assert bodies(audit) == [b"1", b"2"]


def test_what_was_staged_for_the_claim_of_a_dead_distributor_goes_with_the_same_sweep(topic: Topic) -> None:
    audit = topic.create_subscription("audit", client_id="hq")
    with mock.patch.object(fan_out, "_commit", side_effect=lambda *_: os._exit(DIED)):
        assert forked(lambda: topic.publish(b"1")) == DIED
    assert os.listdir(topic.queue.layout.staged) != []
    topic.queue.sweep()
    assert [names for _, _, names in os.walk(topic.queue.layout.staged) if names] == [], "a fence is a folder"
    distribution.Distributor(topic.queue.context).run()
    assert bodies(audit) == [b"1"]


def test_the_archive_of_a_topic_keeps_who_published(topic: Topic) -> None:
    topic.create_subscription("audit", client_id="hq")
    other = Root(topic.root.path).topic(topic.name, client_id="mine")
    other.publish(b"own")
    topic.publish(b"of another")
    late = topic.create_subscription("late", client_id="mine", no_local=True, recovery_point="epoch")
    late.sweep()
    assert bodies(late) == [b"of another"]


def test_an_unsubscribe_whose_removal_cannot_be_looked_at_raises_what_dropq_raises(tmp_path: Path) -> None:
    row = Row("fault")
    for case in random.Random(616347).sample(CASES, 6):
        TopicCases(tmp_path, SETTINGS[0], row).refuse(case, few(616347, 2))
    assert row.wrong == []
