"""Selectors move, copy and bounce waiting messages; a MOVE spends a credit until its message is settled.

The scenario of two selectors with one credit each follows "Internal accounting".
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import in_child
from helpers import FRESH, Clock, drop, files, next_moment, only_woken, timed, until
from helpers import take as taken

from dropq import LeaseLost, Queue, QueueExists, QueueFull, Root, Unavailable
from dropq.cli import main as cli
from dropq.config.selectors import token_in
from dropq.format.layout import QueueLayout
from dropq.lifecycle import credits
from dropq.lifecycle.credits import spent
from dropq.lifecycle.settlement import Claims
from dropq.policies import lock, selectors
from dropq.routing import Serving, mover, registry, router
from dropq.routing.credit_audit import CreditAudit
from dropq.routing.router import Router
from dropq.storage import reading
from dropq.storage.locks import LockFile
from dropq.storage.reading import RESERVED_MODE


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path / "root")


def bodies(queue: Queue, state: str = "target") -> list[str]:
    return [message.body.decode() for message in queue.browse(state)]


def granted(queue: Queue) -> dict[str, int]:
    """How many credits each selector of a queue has spent."""
    return {
        one.name: len(files(Path(queue.layout.credits, one.token)))
        for one in queue.selectors()
        if one.credit is not None
    }


def take(queue: Queue) -> str:
    message = taken(queue)
    body = message.body.decode()
    message.ack()
    return body


# -- the seed's scenario -------------------------------------------------------------------------------------------


def test_two_selectors_of_one_credit_each_hold_the_third_message_until_a_destination_acknowledges(root: Root) -> None:
    queue, left, right = (root.create_queue(name) for name in ("queue", "left", "right"))
    queue.add_selector("one", to="left", credit=1)
    queue.add_selector("two", to="right", credit=1)
    for body in ("first", "second"):
        queue.send(body)
    assert queue.route() == {"one": 1, "two": 1}
    assert granted(queue) == {"one": 1, "two": 1}
    queue.send("third")
    assert queue.route() == {}
    assert bodies(queue) == ["third"]
    assert take(right) == "second"
    assert granted(queue) == {"one": 1, "two": 0}
    assert queue.route() == {"two": 1}
    assert (bodies(queue), bodies(left), bodies(right)) == ([], ["first"], ["third"])


# -- chains and diamonds -------------------------------------------------------------------------------------------


def chain(root: Root, *addresses: str, credit: int = 1) -> list[Queue]:
    queues = [root.create_queue(address, redelivery_delay=0) for address in addresses]
    for queue, following in zip(queues, addresses[1:], strict=False):
        queue.add_selector("on", to=following, credit=credit)
    return queues


def waiting(*queues: Queue) -> list[int]:
    return [queue.counts()["target"] for queue in queues]


def run(*queues: Queue) -> None:
    """Let the routers of queues pass, the first queue first, until nothing moves."""
    while sum(queue.route() != {} for queue in queues):
        pass


def test_a_chain_under_back_pressure_holds_as_many_messages_downstream_as_credits_were_granted(root: Root) -> None:
    first, second, third = chain(root, "first", "second", "third", credit=2)
    for number in range(6):
        first.send(str(number))
    run(first, second, third)
    assert waiting(first, second, third) == [4, 0, 2]
    assert granted(first) == granted(second) == {"on": 2}
    assert take(third) == "0"
    assert granted(first) == granted(second) == {"on": 1}, "one ack pays each hop"
    run(first, second, third)
    assert [take(third) for _ in range(2)] == ["1", "2"]
    run(first, second, third)
    assert [take(third) for _ in range(2)] == ["3", "4"]
    run(first, second, third)
    assert take(third) == "5"
    assert granted(first) == granted(second) == {"on": 0}
    assert waiting(first, second, third) == [0, 0, 0]


def test_a_chain_through_a_link_to_a_queue_holds_no_more_than_its_credits(root: Root) -> None:
    first, second, third = (root.create_queue(name) for name in ("first", "second", "third"))
    (root.path / "link").symlink_to("second")
    first.add_selector("on", to="link")
    second.add_selector("on", to="third", credit=9)
    for body in ("1", "2"):
        first.send(body)
    run(first, second)
    first.sweep()
    run(first, second)
    assert (waiting(first, second, third), granted(first)) == ([1, 0, 1], {"on": 1})
    assert first.remove_selector("on")
    assert waiting(first, second, third) == [2, 0, 0]


def test_a_diamond_meets_again_and_each_way_has_its_own_credits(root: Root) -> None:
    start, left, right, end = (root.create_queue(name) for name in ("start", "left", "right", "end"))
    start.add_selector("left", to="left", credit=3)
    start.add_selector("right", to="right", credit=3)
    left.add_selector("on", to="end", credit=2)
    right.add_selector("on", to="end", credit=2)
    for number in range(8):
        start.send(str(number))
    run(start, left, right)
    assert waiting(start, left, right, end) == [2, 1, 1, 4]
    got = []
    while sum(waiting(start, left, right, end)):
        got.append(take(end))
        run(start, left, right)
    assert sorted(got) == [str(number) for number in range(8)]
    assert [granted(queue) for queue in (start, left, right)] == [{"left": 0, "right": 0}, {"on": 0}, {"on": 0}]


def test_what_is_moved_begins_anew_and_keeps_its_body_and_headers(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    sent = source.send("body", priority=7, type="order", properties={"region": "eu"}, reply_to="answers")
    taken(source).nack()
    assert source.route() == {"on": 1}
    message = taken(goal)
    assert (message.id, message.priority, message.type, message.reply_to) == (sent.id, 7, "order", "answers")
    assert (message.body, dict(message.properties), message.delivery_count) == (b"body", {"region": "eu"}, 1)


def test_foreign_files_and_equal_ids_are_moved_too(root: Root) -> None:
    source, goal = chain(root, "source", "goal", credit=10)
    drop(source, "report.csv", b"1")
    source.send("2", message_id="same")
    source.send("3", message_id="same")
    assert source.route() == {"on": 3}
    assert sorted(bodies(goal)) == ["1", "2", "3"]
    for _ in range(3):
        take(goal)
    assert granted(source) == {"on": 0}


# -- every end frees its credits -----------------------------------------------------------------------------------

ENDS: dict[str, Callable[[Queue], object]] = {
    "ack": lambda queue: taken(queue).ack(),
    "reject": lambda queue: taken(queue).reject("no"),
    "fail": lambda queue: taken(queue).fail("no"),
    "expire": lambda queue: taken(queue).expire(),
    "expired by hand": lambda queue: list(queue.expire()),
    "purge": lambda queue: list(queue.purge()),
    "move": lambda queue: list(queue.move(queue.root.queue("elsewhere"))),
}


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_message_frees_the_credits_of_each_hop(root: Root, end: str, history: bool) -> None:
    first, second = (root.create_queue(name) for name in ("first", "second"))
    third = root.create_queue("third", history=history)
    root.create_queue("elsewhere")
    first.add_selector("on", to="second")
    second.add_selector("on", to="third")
    first.send("a")
    run(first, second)
    assert granted(first) == granted(second) == {"on": 1}
    ENDS[end](third)
    assert granted(first) == granted(second) == {"on": 0}


@pytest.fixture
def to_subscription(root: Root) -> tuple[Queue, Queue, Queue]:
    """Move a message to a subscription, whose names have room for its long id, through queues whose names have not."""
    root.create_topic("topic").subscribe("sub", client_id="client").close()
    first, second = chain(root, "first", "second")
    second.add_selector("on", to="topic/sub.client")
    first.send("a", message_id="i" * 85)
    run(first, second)
    return first, second, root.queue("topic/sub.client")


def test_the_end_of_a_message_frees_its_credits_where_its_name_has_the_whole_of_a_long_id(
    to_subscription: tuple[Queue, Queue, Queue],
) -> None:
    first, second, third = to_subscription
    assert granted(first) == granted(second) == {"on": 1}
    assert take(third) == "a"
    assert granted(first) == granted(second) == {"on": 0}


def test_a_message_of_a_long_id_keeps_its_credits_on_its_way_from_a_subscription(
    root: Root, to_subscription: tuple[Queue, Queue, Queue]
) -> None:
    first, second, third = to_subscription
    fourth = root.create_queue("fourth")
    third.add_selector("on", to="fourth")
    assert third.route() == {"on": 1}
    first.sweep()
    assert granted(first) == granted(second) == granted(third) == {"on": 1}
    assert second.remove_selector("on")
    assert (bodies(second), bodies(fourth)) == (["a"], [])


# -- what was lost is found ----------------------------------------------------------------------------------------


def test_a_credit_whose_message_a_person_took_out_by_hand_is_free_after_a_sweep(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.send("a")
    source.route()
    (file,) = files(Path(goal.layout.target))
    os.rename(f"{goal.layout.target}/{file}", f"{goal.layout.error}/{file}")
    assert granted(source) == {"on": 1}
    assert source.sweep().credits == 1
    assert granted(source) == {"on": 0}


def test_a_look_leaves_the_credit_of_a_message_that_is_held_delayed_or_further_on(root: Root) -> None:
    first, second, third = chain(root, "first", "second", "third", credit=3)
    for body in ("held", "delayed", "further"):
        first.send(body)
    first.route()
    held = taken(second)
    taken(second).nack(delay=60)
    second.route()
    assert waiting(second, third) == [0, 1]
    assert first.sweep().credits == second.sweep().credits == 0
    assert granted(first) == {"on": 3}
    held.ack()
    assert granted(first) == {"on": 2}


def test_the_credits_of_messages_that_went_with_their_queue_are_free_after_a_sweep(root: Root) -> None:
    source, _ = chain(root, "source", "goal")
    source.send("a")
    source.route()
    root.delete_queue("goal", force=True)
    source.sweep()
    assert granted(source) == {"on": 0}


def test_a_router_that_has_no_credit_left_finds_what_a_crash_left(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.send("a")
    source.route()
    token = source.selectors()[0].token
    (key,) = spent(source.layout, token)
    content = Path(source.layout.credits, token, key).read_bytes()
    take(goal)
    Path(source.layout.credits, token, key).write_bytes(content)  # as a crash between the rename and the unlink
    source.send("b")
    assert source.route() == {"on": 1}


def test_a_removed_selector_returns_what_it_moved_from_wherever_it_is(root: Root) -> None:
    first, second, third = chain(root, "first", "second", "third", credit=2)
    for number in range(4):
        first.send(str(number))
    first.route()
    second.route()
    first.route()
    assert waiting(first, second, third) == [0, 0, 2] or waiting(first, second, third) == [2, 0, 2]
    held = taken(third)
    assert first.remove_selector("on")
    assert sorted(bodies(first)) == ["0", "1", "2", "3"]
    assert (granted(second), waiting(second, third)) == ({"on": 0}, [0, 0])
    assert os.listdir(first.layout.credits) == []
    assert os.listdir(first.layout.selectors) == []
    with pytest.raises(LeaseLost):
        held.ack()


def test_a_selector_file_that_is_removed_by_hand_returns_nothing(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.send("a")
    source.route()
    Path(source.layout.selectors, "on.toml").unlink()
    assert take(goal) == "a"
    assert source.route() == {}


def test_a_queue_that_a_dropboxmq_made_can_have_selectors(root: Root) -> None:
    goal = root.create_queue("goal")
    source = root.create_queue("source", dropboxmq=True)
    shutil.rmtree(source.layout.private)
    source = root.queue("source")
    source.add_selector("on", to="goal")
    source.send("a")
    assert source.route() == {"on": 1}
    assert bodies(goal) == ["a"]


# -- copy ----------------------------------------------------------------------------------------------------------


def test_copies_are_made_once_and_the_message_stays_for_a_move_or_for_consumers(root: Root) -> None:
    source, audit, stats, goal = (root.create_queue(name) for name in ("source", "audit", "stats", "goal"))
    source.add_selector("audit", op="copy", to="audit")
    source.add_selector("stats", op="copy", to="stats")
    source.add_selector("goal", to="goal")
    source.send("first")
    source.send("second")
    run(source)
    assert sorted(bodies(audit)) == sorted(bodies(stats)) == ["first", "second"]
    assert (bodies(goal), bodies(source)) == (["first"], ["second"])
    assert take(goal) == "first"
    run(source)
    assert bodies(goal) == ["second"]
    assert waiting(audit, stats) == [2, 2]


def test_a_message_that_somebody_writes_to_waits_for_its_copies_and_keeps_no_other(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, goal = root.create_queue("source"), root.create_queue("goal")
    source.add_selector("all", op="copy", to="goal")
    drop(source, "1.upload.bin", b"upload")
    source.send("whole")
    with monkeypatch.context() as writing:
        writing.setattr(Claims, "is_changed", lambda self, claim: "upload" in claim.own_name)
        assert source.route() == {"all": 1}
    assert bodies(goal) == ["whole"]
    assert (bodies(source), bodies(source, "delayed")) == ([], ["upload"])


def test_a_message_that_is_only_copied_is_archived_unless_somebody_is_subscribed(root: Root) -> None:
    source, audit = root.create_queue("source"), root.create_queue("audit")
    source.add_selector("audit", op="copy", to="audit")
    source.send("nobody")
    run(source)
    assert (source.counts()["target"], bodies(source, "processed"), bodies(audit)) == (0, ["nobody"], ["nobody"])
    with source.subscribe() as subscription:
        source.send("somebody")
        run(source)
        message = subscription.receive(timeout=0)
        assert message is not None
        assert (message.body, message.delivery_count) == (b"somebody", 1)
        message.ack()
    assert sorted(bodies(audit)) == ["nobody", "somebody"]


def copied_by(source: Queue) -> Path:
    """Let a queue's selectors copy a message that stays there; return its file."""
    with source.subscribe():
        run(source)
    (file,) = Path(source.layout.target).iterdir()
    return file


def two_that_copy(root: Root) -> list[Queue]:
    names = ("first", "first-audit", "second", "second-audit")
    queues = [root.create_queue(name, redelivery_delay=0) for name in names]
    for queue in queues[::2]:
        queue.add_selector("audit", op="copy", to=f"{queue.name}-audit")
    return queues


def test_what_a_script_moves_on_is_copied_by_the_selectors_of_the_queue_that_it_comes_to(root: Root) -> None:
    first, audit, second, other = two_that_copy(root)
    first.send("a")
    file = copied_by(first)
    (mark,) = (entry.name for entry in Path(first.layout.private).iterdir() if entry.name.startswith("queue-"))
    assert f"JMS_dropq_copiedS={mark.removeprefix('queue-')}" in file.name
    os.rename(file, Path(second.layout.target, file.name))
    file = copied_by(second)
    assert (bodies(audit), bodies(other)) == (["a"], ["a"])
    os.rename(file, Path(first.layout.target, file.name))
    copied_by(first)
    assert waiting(audit, other) == [2, 1], "it comes as a message of the second queue"


def test_a_message_that_is_only_claimed_and_given_back_is_not_copied_again(root: Root) -> None:
    first, audit, *_ = two_that_copy(root)
    first.send("a")
    copied_by(first)
    taken(first).nack()
    copied_by(first)
    assert waiting(audit) == [1]


def test_a_message_that_was_requeued_and_copied_keeps_its_counters(root: Root) -> None:
    first, *_ = two_that_copy(root)
    first.send("a")
    taken(first).reject("no")
    first.requeue(ids=None)
    copied_by(first)
    for _ in range(3):
        taken(first).nack()
    message = taken(first)
    assert (message.cancels, message.delivery_count) == (3, 4)


def test_the_mark_of_an_older_dropq_counts_where_the_message_lies(root: Root) -> None:
    first, audit, *_ = two_that_copy(root)
    old = "4.1700000000000000-0123456789.B.....JMS_dropq_copyS=x&JMS_dropq_copiedB=true"
    Path(first.layout.target, old).touch()
    assert copied_by(first).name == old
    assert waiting(audit) == [0]
    taken(first).nack()
    (file,) = Path(first.layout.target).iterdir()
    assert "JMS_dropq_copiedB=true" in file.name
    copied_by(first)
    assert waiting(audit) == [0]


@pytest.mark.parametrize("value", ["..%2F..%2Fx", "x", "", "true", "0123456789abcdeg"])
def test_a_mark_that_is_none_says_nothing(root: Root, value: str) -> None:
    first, audit, *_ = two_that_copy(root)
    Path(first.layout.target, f"4.1700000000000000-0123456789.B.....JMS_dropq_copiedS={value}").touch()
    copied_by(first)
    assert waiting(audit) == [1]


# -- bounce --------------------------------------------------------------------------------------------------------


def test_a_bounce_sends_each_message_to_its_return_address(root: Root) -> None:
    source, answers = root.create_queue("source"), root.create_queue("answers")
    source.add_selector("back", op="bounce", to="*")
    source.send("a", reply_to="answers")
    source.send("nowhere")
    source.send("gone", reply_to="missing")
    source.send("itself", reply_to="source")
    source.route()
    message = taken(answers)
    assert (message.body, message.reply_to) == (b"a", None)
    assert sorted(bodies(source, "error")) == ["gone", "itself", "nowhere"]
    assert {message.reason["reason"] for message in source.browse("error") if message.reason} == {"no_return_address"}


# -- a view that lasts -------------------------------------------------------------------------------------------------


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were listed for their messages, once for each time."""
    listed, listing = list[str](), reading.listing

    def noted(folder: str, *args: Any, **options: Any) -> Any:
        listed.append(folder)
        return listing(folder, *args, **options)

    monkeypatch.setattr(reading, "listing", noted)
    return listed


def lasting(root: Root) -> Root:
    """Let a view last for as long as a test does, however slow the machine is."""
    return timed(root, replace(FRESH, max_age=3600, listing_share=10, long_attempt=3600))


def moved_on(passing: Router, goal: Queue) -> str:
    """Let a router move a message; return what came."""
    passing.one_pass()
    return take(goal)


def test_a_credit_that_is_free_again_costs_no_listing(
    root: Root, listings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "TRY_ALL", 3600.0)  # a busy machine takes longer than that for the 40
    source, goal = chain(lasting(root), "source", "goal", credit=1)
    source.send_many([f"{number:02}" for number in range(40)])
    passing = Router(source.context, sweep=None)
    assert [moved_on(passing, goal) for _ in range(40)] == [f"{number:02}" for number in range(40)]
    assert listings.count(source.layout.target) <= 3
    source.send("more")
    assert moved_on(passing, goal) == "more"


def test_a_pass_opens_its_lock_once_and_asks_for_nothing_that_its_messages_need_not(
    root: Root, listings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, counted = list[LockFile](), list[str]()

    class Noted(LockFile):
        def __init__(self, path: str, folder: str) -> None:
            super().__init__(path, folder)
            opened.append(self)

    def count(layout: QueueLayout, token: str) -> list[str]:
        counted.append(token)
        return spent(layout, token)

    source, _ = chain(lasting(root), "source", "goal", credit=10)
    source.send_many([f"{number}" for number in range(5)])
    monkeypatch.setattr(lock, "LockFile", Noted)
    monkeypatch.setattr(lock, "KEPT_OPEN", 3600.0)
    monkeypatch.setattr(credits, "spent", count)
    assert source.route() == {"on": 5}
    assert [file._fd for file in opened] == [-1]  # closed again: a child that is forked later has no part in the lock
    assert len(counted) == 2  # before it tries the first, and under the lock before it spends a credit
    assert source.layout.consumers not in listings


def test_what_waited_for_a_credit_goes_before_what_is_behind_it(root: Root) -> None:
    source, eu, us = (lasting(root).create_queue(name) for name in ("source", "eu", "us"))
    for goal in (eu, us):
        source.add_selector(goal.name, to=goal.name, credit=1, filter=f"region = '{goal.name}'")
    for number in range(4):
        for region in ("eu", "us"):
            source.send(f"{region} {number}", properties={"region": region})
    passing = Router(source.context, sweep=None)
    assert [moved_on(passing, eu) for _ in range(3)] == ["eu 0", "eu 1", "eu 2"]
    assert [moved_on(passing, us) for _ in range(3)] == ["us 0", "us 1", "us 2"]


def test_what_others_took_meanwhile_is_passed_over(root: Root) -> None:
    source, goal = chain(lasting(root), "source", "goal", credit=1)
    for name in "abcde":
        drop(source, f"{name}.csv", name.encode())
    passing = Router(source.context, sweep=None)
    assert moved_on(passing, goal) == "a"
    passing.one_pass()
    for name in "cd":
        Path(source.layout.target, f"{name}.csv").unlink()
    assert take(goal) == "b"
    assert moved_on(passing, goal) == "e"


# -- default, unroutable, hops -------------------------------------------------------------------------------------


def test_the_default_selector_takes_what_no_other_matches(root: Root) -> None:
    source, eu, rest = (root.create_queue(name) for name in ("source", "eu", "rest"))
    source.add_selector("eu", to="eu", filter="region = 'eu'", credit=5)
    source.add_selector("others", to="rest", role="default", credit=5)
    for region in ("eu", "us", "eu"):
        source.send(region, properties={"region": region})
    assert source.route() == {"eu": 2, "others": 1}
    assert (bodies(eu), bodies(rest)) == (["eu", "eu"], ["us"])


def test_what_no_selector_takes_is_unroutable_once_nobody_was_subscribed_for_a_while(root: Root) -> None:
    source = root.create_queue("source", unroutable_after="0s")
    root.create_queue("eu")
    source.add_selector("eu", to="eu", filter="region = 'eu'")
    source.send("us", properties={"region": "us"})
    with source.subscribe(filter="region = 'asia'") as subscription:
        assert subscription.receive(timeout=0) is None
        source.route()
        assert bodies(source) == ["us"]
    source.route()
    assert (bodies(source), bodies(source, "error")) == ([], ["us"])
    (message,) = source.browse("error")
    assert message.reason is not None
    assert message.reason["reason"] == "unroutable"


def test_what_is_unroutable_behind_messages_that_wait_for_a_credit_does_not_wait_with_them(root: Root) -> None:
    source = root.create_queue("source", unroutable_after="0s")
    root.create_queue("goal")
    source.add_selector("one", to="goal", credit=1, filter="n = 1")
    for number in (1, 1, 1, 2):
        source.send(str(number), properties={"n": number})
    source.route()
    assert [message.text for message in source.browse("error")] == ["2"]


def test_a_router_rests_after_it_has_looked_at_all_whatever_became_of_the_last(root: Root) -> None:
    source = root.create_queue("source", unroutable_after="0s")
    root.create_queue("goal")
    source.add_selector("one", to="goal", credit=1, filter="n = 1")
    for number in (1, 1, 2):
        source.send(str(number), properties={"n": number})
    routing = router.Router(source.context, sweep=None)
    routing.one_pass()
    assert bodies(source, "error") == ["2"]
    assert routing._tries_all_at > time.monotonic()
    routing.close()


def test_a_message_that_two_selectors_copy_to_one_queue_is_copied_once(root: Root) -> None:
    source, goal = root.create_queue("source"), root.create_queue("goal")
    source.add_selector("one", to="goal", op="copy")
    source.add_selector("two", to="goal", op="copy")
    source.send("a")
    assert source.route() == {"one": 1, "two": 1}
    assert [message.text for message in goal.browse()] == ["a"]


def test_nothing_is_unroutable_while_a_selector_cannot_be_used_or_before_its_time(root: Root) -> None:
    patient, hasty = root.create_queue("patient"), root.create_queue("hasty", unroutable_after="0s")
    root.create_queue("eu")
    for source in (patient, hasty):
        source.add_selector("eu", to="eu", filter="region = 'eu'")
        source.send("us", properties={"region": "us"})
    Path(hasty.layout.selectors, "broken.toml").write_text('to = "eu"\nfilter = "region ="\n')
    for source in (patient, hasty):
        source.route()
        assert bodies(source) == ["us"]


def without_a_taker(tmp_path: Path, clock: Clock, after: str) -> Queue:
    """A queue with a message that its selector does not take, which is unroutable after a while."""
    root = timed(Root.create(tmp_path / "timed", clock=clock), FRESH)
    source, _ = root.create_queue("source", unroutable_after=after), root.create_queue("eu")
    source.add_selector("eu", to="eu", filter="region = 'eu'")
    source.send("us")
    return source


def routers_looked(queue: Queue, *, since: int, last: int) -> None:
    """Let routers have looked at what no selector takes, from one time to another, in ms."""
    note = Path(queue.layout.routers)
    note.write_text(f"{since}\n")
    os.utime(note, ns=(last * 1_000_000,) * 2)


def test_a_router_that_starts_before_the_consumers_leaves_them_their_backlog(tmp_path: Path, clock: Clock) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    clock.advance(3600)
    one = router.Router(source.context, sweep=None)
    for seconds in (30, 29, 2):
        one.one_pass()
        assert bodies(source) == ["us"]
        clock.advance(seconds)
    one.one_pass()
    assert (bodies(source), bodies(source, "error")) == ([], ["us"])


@pytest.mark.parametrize("came_first", [True, False])
def test_what_came_while_no_router_looked_counts_from_the_next_look(
    tmp_path: Path, clock: Clock, came_first: bool
) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    (waiting,) = Path(source.layout.target).iterdir()
    came = reading.changed_ms(str(waiting))
    routers_looked(source, since=came - 3_600_000, last=came + 1 if came_first else came - 1)
    clock.advance(300)
    one = router.Router(source.context, sweep=None)
    one.one_pass()
    assert bodies(source) == ([] if came_first else ["us"])
    clock.advance(61)
    one.one_pass()
    assert bodies(source, "error") == ["us"]


def test_a_subscription_that_ended_while_no_router_looked_counts_until_the_next_look(
    tmp_path: Path, clock: Clock
) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    next_moment(tmp_path)
    with source.subscribe(filter="never") as subscription:
        assert subscription.receive(timeout=0) is None
    left = reading.changed_ms(source.layout.consumers)
    routers_looked(source, since=left - 3_600_000, last=left - 1)
    clock.advance(300)
    one = router.Router(source.context, sweep=None)
    one.one_pass()
    assert bodies(source) == ["us"]
    clock.advance(61)
    one.one_pass()
    assert bodies(source, "error") == ["us"]


@pytest.mark.parametrize("after", [60, 3600])
def test_a_second_router_knows_of_a_while_in_which_none_looked(tmp_path: Path, clock: Clock, after: int) -> None:
    """A look per router, as cron does it, after maintenance of less than ten minutes; the consumers are late."""
    source = without_a_taker(tmp_path, clock, f"{after}s")
    (waiting,) = Path(source.layout.target).iterdir()
    came = reading.changed_ms(str(waiting))
    routers_looked(source, since=came - 7_200_000, last=came - 1)
    note = Path(source.layout.routers)
    clock.ms = first = came + 540_000
    for seconds in range(0, after, after // 20):
        clock.ms = first + seconds * 1000
        source.route()
        assert bodies(source) == ["us"], f"{seconds} s after the first look"
        os.utime(note, ns=(clock.ms * 1_000_000,) * 2)
    clock.ms = first + after * 1000 + 1
    source.route()
    assert bodies(source, "error") == ["us"]


def test_cron_makes_dead_letters_although_it_looks_less_often_than_unroutable_after(
    tmp_path: Path, clock: Clock
) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    note = Path(source.layout.routers)
    for _ in range(2):
        clock.advance(300)
        source.route()
        os.utime(note, ns=(clock.ms * 1_000_000,) * 2)
    assert bodies(source, "error") == ["us"]


def test_a_router_that_may_not_note_that_it_looks_says_so_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    source = without_a_taker(tmp_path, clock, "0s")
    Path(source.layout.routers).mkdir()
    one = router.Router(source.context, sweep=None)
    for _ in range(3):
        one.one_pass()
        clock.advance(61)
    assert bodies(source) == ["us"]
    assert [source.layout.routers in line for line in caplog.messages] == [True]


def test_routers_begin_anew_after_a_long_pause(tmp_path: Path, clock: Clock) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    one = router.Router(source.context, sweep=None)
    one.one_pass()
    source.pause()
    for _ in range(100):
        clock.advance(60)
        one.one_pass()
    source.resume()
    one.one_pass()
    assert bodies(source) == ["us"]
    clock.advance(61)
    one.one_pass()
    assert bodies(source) == []


def test_without_the_folder_of_subscriptions_nobody_ever_was_subscribed(tmp_path: Path, clock: Clock) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    shutil.rmtree(source.layout.consumers, ignore_errors=True)
    one = router.Router(source.context, sweep=None)
    one.one_pass()
    clock.advance(61)
    one.one_pass()
    assert bodies(source, "error") == ["us"]


@pytest.mark.parametrize("text", ["", "soon", "-1", "9" * 31, "\N{ARABIC-INDIC DIGIT ONE}", "1\n2"])
def test_a_damaged_note_of_the_routers_begins_anew(tmp_path: Path, clock: Clock, text: str) -> None:
    source = without_a_taker(tmp_path, clock, "60s")
    Path(source.layout.routers).write_text(text)
    clock.advance(300)
    source.route()
    assert bodies(source) == ["us"]
    assert Path(source.layout.routers).read_text() == f"{clock.ms}\n"


def test_a_message_that_goes_round_ends_after_sixteen_hops(root: Root) -> None:
    left, right = root.create_queue("left"), root.create_queue("right")
    left.add_selector("on", to="right", credit=100)
    left.send("a")
    for _ in range(16):
        run(left)
        (name,) = os.listdir(right.layout.target)
        os.rename(f"{right.layout.target}/{name}", f"{left.layout.target}/{name}")  # a script closes the circle
    run(left)
    assert [queue.counts()["error"] for queue in (left, right)] == [1, 0]
    (message,) = left.browse("error")
    assert message.reason is not None
    assert message.reason["reason"] == "hop_limit"


# -- who routes ----------------------------------------------------------------------------------------------------


def test_a_consumer_of_a_queue_does_what_its_selectors_say(root: Root) -> None:
    timed(root, FRESH)
    source, goal = chain(root, "source", "goal", credit=5)
    source.add_selector("never", to="goal", filter="nobody IS NOT NULL")
    with source.subscribe(filter="region = 'eu'") as subscription:
        source.send("eu", properties={"region": "eu"})
        source.send("us", properties={"region": "us"})
        message = subscription.receive(timeout=0)
        assert message is not None
        assert message.body == b"eu"
        message.ack()
        assert subscription.receive(timeout=0) is None
    assert bodies(goal) == ["us"]


@pytest.mark.parametrize("history", [True, False])
def test_an_ack_downstream_wakes_a_router(root: Root, monkeypatch: pytest.MonkeyPatch, history: bool) -> None:
    monkeypatch.setattr(router, "RESCAN", 60.0)
    waits = only_woken(monkeypatch)
    root.create_queue("goal", history=history)
    source, goal = root.create_queue("source"), root.queue("goal")
    source.add_selector("on", to="goal")
    for body in ("first", "second"):
        source.send(body)
    serving = Serving(router.Router(source.context, sweep=None))
    ended = threading.Event()
    thread = threading.Thread(target=serving.run, args=(ended.is_set,))
    thread.start()
    try:
        until(lambda: bodies(goal) == ["first"] and waits(), "the first message, and the router to wait")
        assert take(goal) == "first"
        until(lambda: bodies(goal) == ["second"], "the second message")
    finally:
        ended.set()
        serving.wake()
        thread.join()


def test_what_cannot_be_routed_goes_to_the_dead_letter_queue_and_frees_its_credits(root: Root) -> None:
    root.create_queue("dead")
    first = root.create_queue("first")
    second = root.create_queue("second", unroutable_after="0s", dead_letter_queue="dead")
    root.create_queue("eu")
    first.add_selector("on", to="second")
    second.add_selector("eu", to="eu", filter="region = 'eu'")
    second.add_selector("back", op="bounce", to="*", filter="back")
    for body in ("nobody's", "no return address"):
        first.send(body, properties={"back": body == "no return address"})
        run(first, second)
    assert granted(first) == {"on": 0}
    letters = {message.body.decode(): message for message in root.queue("dead").browse()}
    assert {body: (letter.origin, letter.dead_letter_reason) for body, letter in letters.items()} == {
        "nobody's": ("second", "unroutable"),
        "no return address": ("second", "no_return_address"),
    }


# -- overflow ------------------------------------------------------------------------------------------------------

SENDS: dict[str, Callable[[Queue, Path], object]] = {
    "send": lambda queue, path: queue.send("more").delivered_to,
    "send with headers": lambda queue, path: queue.send("more", priority=9).delivered_to,
    "send_many": lambda queue, path: queue.send_many(["more"])[0].delivered_to,
    "send_file": lambda queue, path: queue.send_file(path).delivered_to,
}


@pytest.mark.parametrize("overflow", ["reject", "discard", "block"])
@pytest.mark.parametrize("send", SENDS)
def test_the_overflow_selector_takes_what_is_sent_to_a_full_queue(
    root: Root, tmp_path: Path, send: str, overflow: str
) -> None:
    queue = root.create_queue("queue", max_unprocessed=1, overflow=overflow)
    rest = root.create_queue("rest", max_unprocessed=1, overflow="discard")
    queue.add_selector("rest", to="rest", role="overflow")
    (tmp_path / "file").write_text("more")
    queue.send("first")
    assert SENDS[send](queue, tmp_path / "file") == "rest"
    assert (bodies(queue), bodies(rest)) == (["first"], ["more"])
    with pytest.raises(QueueFull):
        SENDS[send](queue, tmp_path / "file")  # the other is full, too
    assert (bodies(queue), bodies(rest)) == (["first"], ["more"])


def test_a_forked_child_follows_one_overflow_selector_too(root: Root) -> None:
    queue = root.create_queue("queue", max_unprocessed=1)
    second = root.create_queue("second", max_unprocessed=1, overflow="discard")
    third = root.create_queue("third")
    queue.add_selector("over", to="second", role="overflow")
    queue.send_many(["1", "2"])
    rejected = r"queue second is full \(max_unprocessed = 1\): the message was not sent"
    with pytest.raises(QueueFull, match=rejected):
        in_child(lambda: queue.send("3"))
    second.add_selector("over", to="third", role="overflow")
    with pytest.raises(QueueFull, match=rejected):
        in_child(lambda: queue.send("3"))
    assert (bodies(queue), bodies(second), bodies(third)) == (["1"], ["2"], [])


def written(queue: Queue, **fields: Any) -> str:
    with queue.writer(**fields) as writing:
        writing.write(b"more")
    return ""


BOUNCED: dict[str, Callable[..., object]] = {
    "send": lambda queue, path, **fields: queue.send("more", **fields).delivered_to,
    "send_many": lambda queue, path, **fields: queue.send_many([{"body": "more", **fields}])[0].delivered_to,
    "send_file": lambda queue, path, **fields: queue.send_file(path, **fields).delivered_to,
    "writer": lambda queue, path, **fields: written(queue, **fields) or "asker",
}


@pytest.mark.parametrize("overflow", ["reject", "discard", "block"])
@pytest.mark.parametrize("send", BOUNCED)
def test_an_overflow_selector_bounces_what_a_full_queue_refuses(
    root: Root, tmp_path: Path, send: str, overflow: str
) -> None:
    queue = root.create_queue("queue", max_unprocessed=1, overflow=overflow)
    asker = root.create_queue("asker", max_unprocessed=1, overflow="discard")
    root.create_queue("other")
    queue.add_selector("back", op="bounce", to="asker", role="overflow")
    (tmp_path / "file").write_text("more")
    queue.send("first")
    assert BOUNCED[send](queue, tmp_path / "file", reply_to="asker", correlation_id="c") == "asker"
    (back,) = asker.browse()
    assert (back.text, back.reply_to, back.correlation_id) == ("more", None, "c")
    assert (back.origin, back.dead_letter_reason) == ("queue", "overflow")
    for fields, why in [
        ({"reply_to": "asker"}, "queue asker is full"),
        ({"reply_to": "other"}, "the selector returns nothing to other"),
        ({"reply_to": "missing"}, "the selector returns nothing to missing"),
        ({}, "the message has no return address"),
    ]:
        with pytest.raises(QueueFull, match=why):
            BOUNCED[send](queue, tmp_path / "file", **fields)
    assert (bodies(queue), bodies(asker)) == (["first"], ["more"])


def test_what_overflows_to_its_return_address_waits_for_nothing_there(root: Root) -> None:
    queue, asker = root.create_queue("queue", max_unprocessed=1), root.create_queue("asker")
    queue.add_selector("back", op="bounce", to="asker", role="overflow")
    queue.send("first")
    queue.send("late", reply_to="asker", delay="1h", expires_in="1h")
    (back,) = asker.browse()
    assert (back.text, back.expiration) == ("late", None)
    assert "hopsI=1" in back.file
    Path(asker.layout.write_lock).touch()
    with pytest.raises(QueueFull, match="asker"):
        queue.send("second", reply_to="asker")
    for send in (queue.send, lambda body, **more: queue.send_many([{"body": body, **more}])):
        with pytest.raises(ValueError, match="reply_to"):
            send("third", reply_to="\udcff")
    assert bodies(asker) == ["late"]


def test_an_overflow_selector_bounces_to_no_missing_queue_and_no_job(root: Root) -> None:
    queue = root.create_queue("queue", max_unprocessed=1)
    queue.add_selector("back", op="bounce", to="*", role="overflow")
    queue.send("first")
    for address in ("missing", "no address?", "queue"):
        with pytest.raises(QueueFull, match="its overflow selector bounces"):
            queue.send("second", reply_to=address)
    with pytest.raises(QueueFull, match="what is sent has no return address"):
        queue._admit_job(1)
    records = queue.record_writer(reply_to="asker")
    records.write({})
    with pytest.raises(QueueFull, match="what is sent has no return address"):
        records.close()
    assert bodies(queue) == ["first"]


def test_a_request_to_a_full_queue_whose_overflow_selector_bounces_comes_back(root: Root) -> None:
    queue = root.create_queue("queue", max_unprocessed=1)
    queue.add_selector("back", op="bounce", role="overflow")
    queue.send("first")
    with pytest.raises(Unavailable, match=r"came back: queue queue did not keep it \(overflow\)"):
        queue.request("second", timeout=60)


def test_a_writer_and_the_rest_of_a_batch_go_to_the_overflow_selector(root: Root) -> None:
    queue, rest = root.create_queue("queue", max_unprocessed=3), root.create_queue("rest")
    queue.add_selector("rest", to="rest", role="overflow")
    sent = queue.send_many(str(number) for number in range(5))
    assert [one.delivered_to for one in sent] == ["queue"] * 3 + ["rest"] * 2
    with queue.writer() as writing:
        writing.write(b"5")
    assert (bodies(queue), bodies(rest)) == (["0", "1", "2"], ["3", "4", "5"])


@pytest.mark.parametrize("overflow", ["reject", "discard", "block"])
def test_the_overflow_selector_takes_a_job_as_a_whole(root: Root, overflow: str) -> None:
    queue = root.create_queue("queue", max_unprocessed=3, overflow=overflow)
    rest = root.create_queue("rest", max_unprocessed=5, overflow=overflow)
    queue.add_selector("rest", to="rest", role="overflow")
    queue.send("first")
    rest.send("first")
    takers = {count: queue._admit_job(count) for count in (2, 3, 4)}  # it never has room for 4
    assert {count: taker.name for count, taker in takers.items() if taker} == {2: "queue", 3: "rest", 4: "rest"}
    with pytest.raises(QueueFull, match=r"queue rest is full .* the job of 5 messages was not sent"):
        queue._admit_job(5)
    with pytest.raises(QueueFull, match="queue rest never has room for 6 messages at once"):
        queue._admit_job(6)


def test_an_overflow_selector_whose_queue_is_missing_rejects(root: Root) -> None:
    queue, _ = root.create_queue("queue", max_unprocessed=1), root.create_queue("rest")
    queue.add_selector("rest", to="rest", role="overflow")
    root.delete_queue("rest")
    queue.send("first")
    with pytest.raises(QueueFull, match="rest, which is not there"):
        queue.send("second")
    with pytest.raises(QueueFull, match="rest, which is not there"):
        queue._admit_job(1)


def test_a_router_that_dies_while_it_copies_delivers_nothing(root: Root) -> None:
    source = root.create_queue("source", max_deliveries=1, redelivery_delay="1h")
    root.create_queue("audit")
    source.add_selector("audit", op="copy", to="audit")
    source.send("a")
    dies = mock.patch.object(mover, "fan_out", side_effect=KeyboardInterrupt)
    with dies, mock.patch.object(Claims, "give_back"), pytest.raises(KeyboardInterrupt):
        source.route()
    (held,) = files(Path(source.layout.processing))
    owner, _, rest = held.partition(",")
    os.rename(
        Path(source.layout.processing, held), Path(source.layout.processing, f"{owner},1,{rest.split(',', 1)[1]}")
    )
    source.sweep()
    message = taken(source)
    assert (message.body, message.delivery_count) == (b"a", 1)


def test_a_credit_that_leads_elsewhere_is_not_kept_by_a_message_that_came_back_by_hand(root: Root) -> None:
    source, goal = chain(root, "source", "goal", credit=2)
    source.send("a")
    source.route()
    (file,) = files(Path(goal.layout.target))
    os.rename(f"{goal.layout.target}/{file}", f"{source.layout.target}/{file}")  # with the name that it has there
    assert source.route() == {"on": 1}
    source.sweep()
    assert granted(source) == {"on": 1}
    take(goal)
    assert granted(source) == {"on": 0}


# -- credits that people and programs could lose -------------------------------------------------------------------


@pytest.mark.parametrize("id", ["order-4711", "8b5f7f06-9f3c-4f0c-9a53-9a0a3d5cbb11", "x" * 90, None])
@pytest.mark.parametrize("copied", [False, True])
def test_a_message_keeps_its_credit_in_its_name_however_often_it_returns(
    root: Root, id: str | None, copied: bool
) -> None:
    first, second = chain(root, "first", "second")
    root.create_queue("audit")
    if copied:
        first.add_selector("audit", op="copy", to="audit")
    properties = {f"property{number}": "some text" for number in range(6)}
    first.send("a", message_id=id, expires_in="1h", properties=properties)
    run(first)
    for _ in range(12):
        taken(second).nack()
    assert taken(second).delivery_count == 13
    first.sweep()
    assert granted(first) == {"on": 1}


def test_a_foreign_file_keeps_its_credit_in_its_name(root: Root) -> None:
    first, second, third = chain(root, "first", "second", "third")
    drop(first, "a report of a long name, as people give it.csv", b"1")
    run(first, second)
    for _ in range(12):
        taken(third).nack()
    taken(third).ack()
    assert granted(first) == granted(second) == {"on": 0}
    (file,) = files(Path(third.layout.processed))
    assert file == "a report of a long name, as people give it.csv"


def test_a_stale_credit_beside_a_selector_that_has_some_left_is_found_too(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.add_selector("copies", op="copy", to="goal", filter="never")
    source.send("a")
    source.route()
    (file,) = files(Path(goal.layout.target))
    os.unlink(f"{goal.layout.target}/{file}")
    source.send("b")
    assert source.route() == {"on": 1}


def test_the_credits_of_a_queue_whose_delete_is_undecided_stay(root: Root) -> None:
    long = "x" * 220
    source = root.create_queue("source")
    root.create_queue(long)
    source.add_selector("on", to=long)
    source.send("a")
    source.route()
    home = Path(root.path, long)
    home.rename(Path(root.path, f".{long[:150]}.deleting-1763770000000-abcdef"))
    source.sweep()
    assert granted(source) == {"on": 1}


def test_two_routers_that_give_a_token_at_once_use_the_one_that_stays(root: Root) -> None:
    source, _ = root.create_queue("source"), root.create_queue("goal")
    Path(source.layout.selectors).mkdir()
    file = Path(source.layout.selectors, "on.toml")
    file.write_text('to = "goal"\n')
    theirs = selectors.reserve_token(root.context.layout, "source", "on", source.context.storage)
    reserve = selectors.reserve_token

    def late(*args: Any) -> str:
        token = reserve(*args)
        file.write_text(f'token = "{theirs}"\nto = "goal"\n')  # another router was first
        return token

    source.send("a")
    with mock.patch.object(selectors, "reserve_token", late):
        assert source.route() == {"on": 1}
    assert [one.token for one in source.selectors()] == [theirs]
    assert granted(source) == {"on": 1}


@pytest.mark.parametrize(
    ("content", "token"),
    [
        ("to = 'x'\n\"token\" = 'abc123'\n", "abc123"),
        ("filter = '''\ntoken = 'other1'\n'''\ntoken = 'abc123'\n", "abc123"),
        ("to = \ntoken = 'abc123'\n", "abc123"),
        ("token = '../../'\n", ""),
        ("token = 7\n", ""),
        ("to = 'x'\n", ""),
    ],
)
def test_the_token_of_a_selectors_file_is_found_however_it_is_written(content: str, token: str) -> None:
    assert token_in(content.encode()) == token


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ('# mine\nto = \'goal\'\nfilter = """\ntoken = \'abc\'\nAND n = 1\n"""\n', True),
        ("to = 'goal'\nfilter = \"\"\"\ntoken = 'abc'\n\"\"\"\ntoken = 'zzzzzz'\n", False),
        ("to = 'goal'\ncredit = 2\n\"token\" = 'zzzzzz'\n", False),
        ("to = 'goal'\r\ntoken = 'zzzzzz' # copied\r\ncredit = 2\r\n", False),
    ],
    ids=["in-a-filter", "in-a-filter-and-a-key", "quoted-key", "windows"],
)
def test_a_router_that_gives_a_token_leaves_the_selector_as_it_was(root: Root, text: str, stays: bool) -> None:
    source, goal = root.create_queue("source"), root.create_queue("goal")
    Path(source.layout.selectors).mkdir()
    file = Path(source.layout.selectors, "on.toml")
    file.write_bytes(text.encode())
    (before,) = source.selectors()
    source.send("a", properties={"token": "abc", "n": 1})
    assert source.route() == {"on": 1}
    (after,) = source.selectors()
    assert after == replace(before, token=after.token)
    assert after.token not in ("", "zzzzzz") and granted(source) == {"on": 1}
    assert not stays or file.read_bytes() == f'token = "{after.token}"\n{text}'.encode()
    assert take(goal) == "a"


@pytest.mark.parametrize("key", ["op", "role", "credit", "token"])
def test_a_number_too_long_for_decimal_digits_is_a_problem_of_its_selector_alone(root: Root, key: str) -> None:
    source, _ = root.create_queue("source"), root.create_queue("goal")
    source.add_selector("on", to="goal")
    file = Path(source.layout.selectors, "long.toml")
    file.write_text(f"to = 'goal'\n{key} = 0x{'f' * 5000}\n")
    source.send("a")
    assert source.route() == {"on": 1}
    (problem,) = selectors.read(source.context)[1][str(file)]
    assert f"{key}: 0xf" in problem and len(problem) < 500


def test_a_selector_that_is_removed_while_it_gets_a_token_stays_removed(root: Root) -> None:
    source, _ = root.create_queue("source"), root.create_queue("goal")
    Path(source.layout.selectors).mkdir()
    file = Path(source.layout.selectors, "on.toml")
    file.write_text('to = "goal"\n')
    reserve = selectors.reserve_token

    def late(*args: Any) -> str:
        file.unlink()
        return reserve(*args)

    source.send("a")
    with mock.patch.object(selectors, "reserve_token", late):
        assert source.route() == {}
    assert (source.selectors(), bodies(source)) == ([], ["a"])


def test_a_return_address_that_no_queue_can_have_is_none(root: Root) -> None:
    source, _ = root.create_queue("source"), root.create_queue("answers")
    source.add_selector("back", op="bounce", to="*")
    for address in ("x" * 300, "../x", "a//b"):
        source.send("bad", reply_to=address)
    Path(source.layout.target, "4.1763770000000000-0000000001.B...%00").write_bytes(b"bad")
    source.send("good", reply_to="answers")
    assert source.route() == {"back": 1}
    assert bodies(source, "error") == ["bad"] * 4


def test_a_broken_selector_that_is_removed_returns_what_it_moved_before(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.send("a")
    source.route()
    with Path(source.layout.selectors, "on.toml").open("a") as file:
        file.write('filter = "region ="\n')
    assert source.remove_selector("on")
    assert (bodies(source), bodies(goal)) == (["a"], [])


def test_a_router_goes_on_with_a_removal_that_was_cut_short(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.send("a")
    source.route()
    selectors_folder = Path(source.layout.selectors)
    (selectors_folder / "on.toml").rename(selectors_folder / ".on.removed")
    source.route()
    assert (bodies(source), bodies(goal), os.listdir(selectors_folder)) == (["a"], [], [])


def test_limits_end_a_dead_letter_that_a_selector_took_on_and_it_still_says_where_it_came_from(root: Root) -> None:
    dead, again = root.create_queue("dead"), root.create_queue("again", max_deliveries=2, redelivery_delay=0)
    source = root.create_queue(
        "source", max_deliveries=1, exhausted="dead-letter", dead_letter_queue="dead", redelivery_delay=0
    )
    dead.add_selector("again", to="again")
    source.send("a")
    taken(source).nack()
    assert dead.route() == {"again": 1}
    message = taken(again)
    assert (message.origin, message.dead_letter_reason) == ("source", "max_deliveries")
    message.nack()
    taken(again).nack()
    assert again.counts()["error"] == 1


def test_a_message_that_is_requeued_in_its_queue_is_not_copied_again(root: Root) -> None:
    source, audit = root.create_queue("source"), root.create_queue("audit")
    source.add_selector("audit", op="copy", to="audit")
    source.add_selector("never", to="audit", filter="FALSE")
    with source.subscribe() as subscription:
        source.send("a")
        run(source)
        message = subscription.receive(timeout=0)
        assert message is not None
        message.reject("no")
    list(source.requeue())
    run(source)
    assert bodies(audit) == ["a"]


def test_a_sender_that_waits_for_room_follows_an_overflow_selector_that_comes(root: Root) -> None:
    queue, rest = root.create_queue("queue", max_unprocessed=1, overflow="block"), root.create_queue("rest")
    queue.send("first")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(queue.send, "second")
        queue.add_selector("rest", to="rest", role="overflow")
        assert sending.result().delivered_to == "rest"
    assert bodies(rest) == ["second"]


def test_a_name_that_a_dead_process_reserved_for_a_selector_is_free(root: Root) -> None:
    source = root.create_queue("orders")
    root.create_queue("end")
    path = Path(source.layout.selectors, "on.toml")
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(RESERVED_MODE)
    source.add_selector("on", to="end")
    assert [one.to for one in source.selectors()] == ["end"]
    path.write_text("")
    with pytest.raises(QueueExists, match="somebody else"):  # an empty file of people is theirs
        source.add_selector("on", to="end")
    assert path.read_text() == ""
    assert os.listdir(path.parent) == ["on.toml"]


@pytest.mark.parametrize("is_root", [True, False], ids=["as root", "as its owner, who may not read it"])
def test_the_others_move_while_a_name_is_reserved_for_a_selector(
    root: Root, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    source, _ = chain(root, "source", "goal")
    path = Path(source.layout.selectors, "eu.toml")
    path.touch()
    path.chmod(RESERVED_MODE)
    read_small = reading.read_small

    def refused(file: str, *limit: int) -> bytes | None:
        if file == str(path) and not is_root:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)
        return read_small(file, *limit)

    monkeypatch.setattr(reading, "read_small", refused)
    source.send("a")
    assert source.route() == {"on": 1}
    assert [one.name for one in source.selectors()] == ["on"]
    assert caplog.text == ""
    kinds = [finding.kind for finding in source.fsck() if finding.path == str(path)]
    assert kinds == ["under-way"]


@pytest.mark.parametrize("is_root", [True, False], ids=["as root", "as its owner, who may not read it"])
def test_a_selector_that_replaces_its_reservation_while_it_is_read_is_read(
    root: Root, monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    source, _ = chain(root, "source", "goal")
    path = Path(source.layout.selectors, "on.toml")
    content, read_small = path.read_bytes(), reading.read_small
    path.unlink()
    path.touch()
    path.chmod(RESERVED_MODE)

    def reserved(file: str, *limit: int) -> bytes | None:
        """Read the reservation; the selector replaces it right after that."""
        monkeypatch.setattr(reading, "read_small", read_small)
        (path.parent / ".new").write_bytes(content)
        (path.parent / ".new").rename(path)
        if not is_root:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)
        return b""

    monkeypatch.setattr(reading, "read_small", reserved)
    found, problems = selectors.read(source.context)
    assert ([one.name for one in found], problems) == (["on"], {})


def test_a_selector_is_not_made_again_while_what_it_moved_is_on_its_way_back(root: Root) -> None:
    source, _ = chain(root, "source", "goal")
    source.send("a")
    source.route()
    folder = Path(source.layout.selectors)
    (folder / "on.toml").rename(folder / ".on.removed")
    with pytest.raises(QueueExists, match="is being removed"):
        source.add_selector("on", to="goal")
    assert source.remove_selector("on")
    source.add_selector("on", to="goal")
    assert bodies(source) == ["a"]


def test_a_selector_that_a_script_made_again_is_not_removed_before_what_the_first_moved_is_back(root: Root) -> None:
    source, goal = chain(root, "source", "goal", credit=2)
    source.send("a")
    source.route()
    folder, home = Path(source.layout.selectors), away(goal)
    assert not registry.remove(source.context, "on", patience=0.0)
    root.create_queue("near")
    source.send("b")
    (root.path / "on.toml").write_text('to = "near"\n')
    (root.path / "on.toml").rename(folder / "on.toml")
    assert source.route() == {"on": 1}
    with pytest.raises(Unavailable, match="an earlier selector on of queue source is being removed"):
        source.remove_selector("on")
    home.rename(goal.layout.home)
    source.sweep()
    assert (bodies(source), os.listdir(folder)) == (["a"], ["on.toml"])
    assert source.remove_selector("on")
    assert (sorted(bodies(source)), os.listdir(source.layout.credits)) == (["a", "b"], [])


def test_a_selector_is_not_made_beside_one_whose_removal_begins_meanwhile(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = chain(root, "source", "goal")
    folder, reserve = Path(source.layout.selectors), selectors.reserve_token

    def reserved(*arguments: Any) -> str:
        (folder / ".new.removed").touch()
        return reserve(*arguments)

    monkeypatch.setattr(selectors, "reserve_token", reserved)
    with pytest.raises(QueueExists, match="is being removed"):
        source.add_selector("new", to="goal")
    assert sorted(os.listdir(folder)) == [".new.removed", "on.toml"]


# -- queues that are away ----------------------------------------------------------------------------------------------


def away(queue: Queue) -> Path:
    """Take the folder of a queue away, as a disk goes that is not mounted any more; return where it is."""
    home = Path(queue.layout.home)
    return home.rename(home.parent.parent / f"{home.name}-away")


def test_no_credit_is_freed_while_the_queue_that_it_was_spent_for_is_away(root: Root) -> None:
    source, goal = chain(root, "source", "goal", credit=2)
    for body in ("1", "2", "3"):
        source.send(body)
    assert source.route() == {"on": 2}
    folder = away(goal)
    assert CreditAudit(source.context).run_twice() == 0
    source.sweep()
    assert (source.route(), granted(source)) == ({}, {"on": 2})
    folder.rename(goal.layout.home)
    assert (source.route(), take(goal), source.route()) == ({}, "1", {"on": 1})


def test_a_queue_that_took_the_name_of_another_is_missed_too_while_it_is_away(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    Path(goal.layout.home).rename(Path(root.path, "goal-2024"))
    goal = root.create_queue("goal", redelivery_delay=0)
    source.send("1")
    assert source.route() == {"on": 1}
    away(goal)
    assert CreditAudit(source.context).run_twice() == 0
    assert granted(source) == {"on": 1}


def test_a_disk_that_is_away_keeps_no_credit_of_another_queue(root: Root, tmp_path: Path) -> None:
    source, goal = chain(root, "source", "goal")
    far = root.create_queue("far")
    source.add_selector("far", to="far", filter="far = TRUE")
    source.send("1")
    source.send("2", properties={"far": True})
    run(source)
    assert granted(source)["far"] == 1
    away(far)
    Path(far.layout.home).symlink_to(tmp_path / "nothing")
    for file in files(Path(goal.layout.target)):
        os.unlink(f"{goal.layout.target}/{file}")  # by hand: its credit is lost
    freed = granted(source)["on"]
    assert CreditAudit(source.context).run_twice() == freed == 1
    assert granted(source) == {"on": 0, "far": 1}


def test_credits_are_freed_once_the_queue_that_they_were_spent_for_is_deleted(root: Root) -> None:
    source, goal = chain(root, "source", "goal")
    source.send("1")
    source.route()
    goal.root.delete_queue("goal", force=True)
    assert CreditAudit(source.context).run_twice() == 1
    assert granted(source) == {"on": 0}


def test_credits_are_freed_after_a_delete_that_died_once_it_was_decided(root: Root) -> None:
    source, _ = chain(root, "source", "goal")
    source.send("1")
    source.route()
    died = mock.patch("dropq.lifecycle.folders.forget", side_effect=KeyboardInterrupt)
    with died, pytest.raises(KeyboardInterrupt):
        root.delete_queue("goal", force=True)
    assert not Path(root.path, "goal").exists()
    assert CreditAudit(source.context).run_twice() == 1
    assert granted(source) == {"on": 0}


def test_a_selector_is_not_removed_before_a_queue_comes_back_that_holds_its_messages(
    root: Root, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, goal = chain(root, "source", "goal", credit=2)
    for body in ("1", "2"):
        source.send(body)
    source.route()
    folder = away(goal)
    monkeypatch.setattr(registry.remove, "__kwdefaults__", {"patience": 0.0})
    command = ["--root", str(root.path), "selector", "rm", "source", "on"]
    assert cli.main(command) == 75
    said = capsys.readouterr().err
    assert "2 messages wait: queue goal is away" in said
    assert bodies(source) == []
    folder.rename(goal.layout.home)
    assert cli.main(command) == 0
    assert sorted(bodies(source)) == ["1", "2"]


# -- what comes back, and what only overflows --------------------------------------------------------------------------


def test_a_message_that_returns_is_not_copied_again_and_not_archived(root: Root) -> None:
    source, goal, audit = (root.create_queue(name) for name in ("source", "goal", "audit"))
    source.add_selector("all", op="copy", to="audit")
    source.add_selector("on", to="goal", credit=5)
    source.send("1")
    run(source)
    assert bodies(goal) == ["1"]
    source.remove_selector("on")
    source.route()
    assert (bodies(source), bodies(audit), bodies(source, "processed")) == (["1"], ["1"], [])
    source.add_selector("on", to="goal", credit=5)
    assert (source.route(), bodies(goal), bodies(audit)) == ({"on": 1}, ["1"], ["1"])


def test_a_message_that_returns_is_copied_by_a_selector_that_came_after_it_was_moved(root: Root) -> None:
    source, goal, audit = (root.create_queue(name) for name in ("source", "goal", "audit"))
    source.add_selector("on", to="goal", credit=5)
    source.send("1")
    source.route()
    assert bodies(goal) == ["1"]
    source.add_selector("all", op="copy", to="audit")
    source.remove_selector("on")
    source.route()
    assert bodies(audit) == ["1"]


def test_a_queue_with_an_overflow_selector_alone_leaves_what_waits_to_its_consumers(root: Root) -> None:
    source = root.create_queue("source", unroutable_after="0s", max_unprocessed=2)
    root.create_queue("spill")
    source.add_selector("spill", to="spill", role="overflow")
    source.send("1")
    assert source.route() == {}
    assert bodies(source) == ["1"]
    (waiting,) = source.explain(state="target")
    assert "selector" not in waiting.detail


def test_one_pass_of_the_command_frees_the_credit_of_a_message_that_a_script_took(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, goal = chain(root, "source", "goal")
    for body in ("1", "2"):
        source.send(body)
    source.route()
    (file,) = files(Path(goal.layout.target))
    os.rename(f"{goal.layout.target}/{file}", f"{goal.layout.processed}/{file}")
    arguments = ["--root", str(root.path), "route", "--once"]
    assert cli.main(arguments) == 0
    assert bodies(goal) == ["2"]


def test_a_removal_lists_the_queue_that_messages_come_back_from_once_however_many_come(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, there = root.create_queue("from"), root.create_queue("there")
    queue.add_selector("on", to="there", credit=100)
    for _ in range(30):
        queue.send(b"x")
    queue.route()
    listed, names_in = list[str](), reading.names_in

    def listing(folder: str) -> frozenset[str]:
        listed.append(folder)
        return names_in(folder)

    monkeypatch.setattr(reading, "names_in", listing)
    queue.remove_selector("on")
    assert listed.count(there.layout.processing) <= 2 and queue.counts()["target"] == 30


def test_a_folder_that_is_removed_while_another_process_makes_it_is_made(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = chain(root, "source", "goal")
    make, met = os.mkdir, list[str]()

    def mkdir(path: str, mode: int) -> None:
        if not met:
            met.append(path)
            raise FileExistsError  # and at once it is gone again
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    source.send("a")
    assert source.route() == {"on": 1}
    assert met
