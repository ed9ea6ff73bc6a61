"""Selectors move, copy and bounce waiting messages; a MOVE spends a credit until its message is settled.

The scenario of two selectors with one credit each follows "Internal accounting".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from helpers import FRESH, drop, files, timed, until
from helpers import take as taken

from dropq import LeaseLost, Queue, QueueFull, Root
from dropq.lifecycle.credits import spent
from dropq.lifecycle.transitions import Transitions
from dropq.routing import Serving, mover, router


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
    assert source.route() == {}
    source.sweep()
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


# -- bounce --------------------------------------------------------------------------------------------------------


def test_a_bounce_sends_each_message_to_its_return_address(root: Root) -> None:
    source, answers = root.create_queue("source"), root.create_queue("answers")
    source.add_selector("back", op="bounce")
    source.send("a", reply_to="answers")
    source.send("nowhere")
    source.send("gone", reply_to="missing")
    source.send("itself", reply_to="source")
    source.route()
    message = taken(answers)
    assert (message.body, message.reply_to) == (b"a", None)
    assert sorted(bodies(source, "error")) == ["gone", "itself", "nowhere"]
    assert {message.reason["reason"] for message in source.browse("error") if message.reason} == {"no_return_address"}


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


def test_a_message_that_goes_round_ends_after_sixteen_hops(root: Root) -> None:
    left, right = root.create_queue("left"), root.create_queue("right")
    left.add_selector("on", to="right", credit=100)
    Path(right.layout.base, "selectors").mkdir()
    Path(right.layout.selectors, "back.toml").write_text('to = "left"\ncredit = 100\n')  # by hand: `add` refuses it
    left.send("a")
    run(left, right)
    assert [queue.counts()["error"] for queue in (left, right)] == [1, 0]
    (message,) = left.browse("error")
    assert message.reason is not None
    assert message.reason["reason"] == "hop_limit"
    assert granted(left) == {"on": 0}


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
    root.create_queue("goal", history=history)
    source, goal = root.create_queue("source"), root.queue("goal")
    source.add_selector("on", to="goal")
    for body in ("first", "second"):
        source.send(body)
    serving = Serving(router.Router(source.context, sweep=None), source.context.timing)
    ended = threading.Event()
    thread = threading.Thread(target=serving.run, args=(ended.is_set,))
    thread.start()
    try:
        until(lambda: bodies(goal) == ["first"], "the first message")
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
    second.add_selector("back", op="bounce", filter="back")
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


def test_a_writer_and_the_rest_of_a_batch_go_to_the_overflow_selector(root: Root) -> None:
    queue, rest = root.create_queue("queue", max_unprocessed=3), root.create_queue("rest")
    queue.add_selector("rest", to="rest", role="overflow")
    sent = queue.send_many(str(number) for number in range(5))
    assert [one.delivered_to for one in sent] == ["queue"] * 3 + ["rest"] * 2
    with queue.writer() as writing:
        writing.write(b"5")
    assert (bodies(queue), bodies(rest)) == (["0", "1", "2"], ["3", "4", "5"])


def test_an_overflow_selector_whose_queue_is_missing_rejects(root: Root) -> None:
    queue, _ = root.create_queue("queue", max_unprocessed=1), root.create_queue("rest")
    queue.add_selector("rest", to="rest", role="overflow")
    root.delete_queue("rest")
    queue.send("first")
    with pytest.raises(QueueFull, match="rest, which is not there"):
        queue.send("second")


def test_a_router_that_dies_while_it_copies_delivers_nothing(root: Root) -> None:
    source = root.create_queue("source", max_deliveries=1, redelivery_delay="1h")
    root.create_queue("audit")
    source.add_selector("audit", op="copy", to="audit")
    source.send("a")
    dies = mock.patch.object(mover, "fan_out", side_effect=KeyboardInterrupt)
    with dies, mock.patch.object(Transitions, "give_back"), pytest.raises(KeyboardInterrupt):
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
    assert granted(source) == {"on": 2}
    source.sweep()
    assert granted(source) == {"on": 1}
    take(goal)
    assert granted(source) == {"on": 0}
