"""`queue.explain` and `dropq browse --explain`: each reason why a message waits, and who holds what is held."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actors import finish, said, start
from children import unprivileged
from helpers import Clock, add_route, base, make_queue, names_in, reopened, take

from dropq import Queue, StorageError
from dropq.cli import main as cli


def why(queue: Queue, state: str | None = "target", **options: Any) -> list[tuple[str, str]]:
    """The body and the reason of each message, in order."""
    return [(explained.message.text, explained.why) for explained in queue.explain(state, **options)]


def details(queue: Queue, state: str = "target") -> list[str]:
    return [explained.detail for explained in queue.explain(state)]


def test_what_anybody_may_take_is_ready(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many(["a", "b"])
    assert why(queue) == [("a", "ready"), ("b", "ready")]
    assert details(queue)[0] == "no consumer is subscribed: the first that asks gets it"
    with reopened(queue).subscribe() as subscription:
        (explained, _) = queue.explain("target")
        assert explained.holders == (subscription.id,)


def test_what_is_ready_says_how_much_the_living_hold_and_that_each_may_have_a_filter(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many(["a", "b", "c", "d"])
    gets = "the first that is free, and whose own filter matches, gets it"
    with reopened(queue).subscribe(filter="region = 'EU'"), reopened(queue).subscribe(max_backlog=2) as busy:
        assert details(queue)[-1] == f"2 consumers live: {gets}"
        assert busy.receive() is not None and busy.receive() is not None
        assert details(queue)[-1] == f"2 consumers live, and hold 2 messages: {gets}"
    with reopened(queue).subscribe() as only:
        assert details(queue)[-1] == f"1 consumer lives: {gets}"
        assert only.receive() is not None
        assert details(queue)[-1] == f"1 consumer lives, and holds 1 message: {gets}"


def test_a_pause_names_the_file_that_makes_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send("a")
    queue.pause()
    assert why(queue) == [("a", "paused")]
    assert details(queue) == [f"{queue.layout.read_lock} pauses consumers: `dropq resume q` removes it"]
    queue.resume()
    Path(queue.root.layout.read_lock).touch()
    assert details(queue) == [f"{queue.root.layout.read_lock} pauses consumers: `dropq resume --all` removes it"]


def test_what_the_queue_s_filter_leaves_out_says_so(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, filter="JMSPriority > 4")
    queue.send("a")
    queue.send("b", priority=9)
    assert why(queue) == [("b", "ready"), ("a", "filter")]


def test_what_has_expired_is_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    queue.send("a", expires_in="1s")
    clock.advance(2)
    assert why(queue) == [("a", "expired")]


def test_what_was_acknowledged_before_it_came_is_for_nobody(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    id = f"{clock.ms:013d}000-0123456789"
    queue.ack(id, defer=True)
    queue.send("a", message_id=id)
    assert why(queue) == [("a", "acked")]


def test_a_full_backlog_names_who_fills_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many(["a", "b"])
    with reopened(queue).subscribe() as subscription:
        assert subscription.receive() is not None
        (explained,) = queue.explain("target")
        assert (explained.why, explained.holders) == ("backlog", (subscription.id,))
        assert explained.detail == "1 held, as many as max_backlog allows"


def test_a_message_for_the_next_turn_names_whose_turn_it_is(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with reopened(queue).subscribe() as subscription:
        assert subscription.receive() is None
        queue.send("a")
        (explained,) = queue.explain("target")
        assert (explained.why, explained.holders) == ("turn", (subscription.id,))


def test_a_barrier_says_what_it_waits_for_and_holds_up_what_is_behind_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    for body, type in (("a", None), ("sync", "sync"), ("b", None)):
        queue.send(body, type=type)
    assert why(queue) == [("a", "ready"), ("sync", "barrier"), ("b", "barrier")]
    assert why(queue, filter="JMSType = 'sync'") == [("sync", "barrier")]
    assert details(queue)[1].endswith("1 waits, 0 are held, 0 were given back")
    with reopened(queue).subscribe(max_backlog=None) as one, reopened(queue).subscribe() as other:
        first = one.receive()
        assert first is not None
        assert details(queue)[0].endswith("0 wait, 1 is held, 0 were given back")
        first.ack()
        assert why(queue)[0] == ("sync", "ready")
        share = one.receive()
        assert share is not None
        share.ack()
        (explained,) = queue.explain("target")
        assert (explained.message.text, explained.why, explained.holders) == ("b", "barrier", (other.id,))
        (explained,) = queue.explain("processing")
        assert (explained.message.text, explained.why, explained.holders) == ("sync", "barrier", (other.id,))


def test_a_barrier_and_what_is_behind_it_say_which_selector_takes_them_all_the_same(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    goal = queue.root.create_queue("goal")
    for body, type in (("a", None), ("sync", "sync"), ("b", None)):
        queue.send(body, type=type)
    queue.add_selector("on", to="goal", credit=2)
    with reopened(queue).subscribe() as subscription:
        assert subscription.receive() is not None
        assert why(queue, "target") == [("sync", "barrier"), ("b", "barrier")]
        assert [detail.rpartition("; ")[2] for detail in details(queue)[:2]] == [
            "the next router moves it to goal by selector on"
        ] * 2
        assert queue.route() == {"on": 2}
    assert [message.text for message in goal.browse()] == ["sync", "b"]


def test_a_message_behind_a_barrier_says_which_route_takes_it_all_the_same(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    add_route(queue, "urgent", "JMSPriority > 6")
    queue.send("sync", type="sync")
    queue.send("b", priority=9)
    assert why(queue) == [("sync", "barrier"), ("b", "barrier")]
    assert "; it goes to route urgent: " in details(queue)[1]
    assert queue.route() == {"urgent": 1}


@pytest.mark.parametrize(
    ("how", "does", "behind"),
    [("acked", "archives it", "ready"), ("aside", "sets it aside", "ready"), ("left", "returns it", "barrier")],
)
def test_a_barrier_whose_shares_are_all_settled_keeps_back_only_what_it_comes_back_before(
    tmp_path: Path, how: str, does: str, behind: str
) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    queue.send("sync", type="sync")
    queue.send("b")
    with reopened(queue).subscribe(max_backlog=None) as one:
        assert one.receive() is not None
        (share,) = Path(queue.layout.barriers).glob("barrier*/*~*")
        share.rename(share.parent / how / share.name)  # and there its holder dies
        assert why(queue) == [("b", behind)]
        (explained,) = queue.explain("processing")
        assert (explained.why, explained.holders) == ("barrier", ())
        assert explained.detail == f"all shares of it are settled: any consumer, or `dropq sweep q`, {does}"
        message = one.receive()
        assert message is not None and message.text == ("b" if behind == "ready" else "sync")


def test_a_barrier_whose_consumer_died_as_it_handed_it_out_keeps_back_what_is_behind_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    queue.send("sync", type="sync")
    queue.send("b")
    (first, _) = names_in(queue, "target")
    Path(queue.layout.target, first).rename(Path(queue.layout.processing, f"barrier%-0123456789-0,0,1~{first}"))
    assert why(queue) == [("b", "barrier")]
    (explained,) = queue.explain("processing")
    assert "died as it did: any consumer, or `dropq sweep q`, returns it" in explained.detail
    with reopened(queue).subscribe() as one:
        message = one.receive()
        assert message is not None and message.text == "sync"


def test_a_barrier_that_could_go_to_nobody_says_so(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    queue.send("sync", type="sync")
    assert details(queue) == ["it is a barrier, and waits until a consumer subscribes"]


def test_a_delay_says_why_and_until_when(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    queue.send("a", delay="1h")
    queue.send("b")
    take(queue).nack(delay=60)
    by_body = {explained.message.text: explained for explained in queue.explain("delayed")}
    assert by_body["a"].why == by_body["b"].why == "delay"
    assert "sent with a delay" in by_body["a"].detail
    assert "given back" in by_body["b"].detail
    assert by_body["a"].until is not None
    name = f"4.c.B.....JMSXDeliveryCountI=2&JMS_dropq_notBeforeL={2 * clock.ms}&JMS_dropq_diedI=2"
    (base(queue) / ".dropq/delayed" / name).touch()
    (dead,) = (explained for explained in queue.explain("delayed") if explained.message.id == "c")
    assert "2 times a holder died over it or lost its lease" in dead.detail
    clock.advance(7200)
    assert "its time has come" in details(queue, "delayed")[0]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """A process that holds the one message of a queue."""
    queue = make_queue(tmp_path / "root")
    queue.send("a")
    actor = start("hold", tmp_path / "root", tmp_path / "notes", 1)
    assert said(actor) == "holding"
    yield actor, queue
    finish(actor)


def test_a_holder_that_lives_and_one_that_is_dead_are_told_apart(holder: Any) -> None:
    actor, queue = holder
    assert why(queue, "processing") == [("a", "held")]
    actor.kill()
    actor.wait(10)
    assert why(queue, "processing") == [("a", "dead")]


def test_leases_that_run_and_that_ran_out_are_told_apart(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    queue.send("a")
    with queue.subscribe(lease_period="10s") as subscription:
        assert subscription.receive() is not None
        (explained,) = queue.explain("processing")
        assert (explained.why, explained.holders) == ("lease", (subscription.id,))
        assert explained.until is not None
        clock.advance(11)
        assert why(queue, "processing") == [("a", "lapsed")]


def test_claims_that_nothing_brings_back_by_itself_name_the_way_out(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many(["a", "b"])
    first, second = names_in(queue, "target")
    target, processing = base(queue) / "target", base(queue) / "processing"
    os.rename(target / first, processing / f"gone-0123456789-1,0,1~{first}")
    os.rename(target / second, processing / f"client~{second}")
    found = {explained.message.text: (explained.why, explained.detail) for explained in queue.explain("processing")}
    assert found["a"][0] == "unleased"
    assert "`dropq sweep q --unleased-older-than 2h`" in found["a"][1]
    assert found["b"][0] == "script"
    assert "`dropq sweep q --foreign-older-than 2h`" in found["b"][1]


def test_explaining_changes_nothing(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1, fairness_model="round-robin", barrier_expression="JMSType = 'sync'")
    queue.send_many(["a", "b"])
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert len(list(queue.explain())) == 2
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("folder", ["acks", "consumers", "delayed"])
def test_a_folder_that_may_not_be_listed_is_named_in_the_error(tmp_path: Path, folder: str) -> None:
    queue = make_queue(tmp_path)
    queue.send("a")
    closed = base(queue) / ".dropq" / folder
    closed.chmod(0)
    try:
        with pytest.raises(StorageError) as raised:
            unprivileged(lambda: list(queue.explain()))
    finally:
        closed.chmod(0o755)
    assert raised.value.path == str(closed) and str(raised.value).endswith("nothing was changed")


def test_only_what_is_not_settled_is_explained(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    with pytest.raises(ValueError, match="target, delayed, processing"):
        list(queue.explain("error"))


def test_the_shell_explains_in_lines_and_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many(["a", "b", "c"])
    message = take(queue)
    assert message.owner is not None
    holder = message.owner.rpartition("-")[0]
    browse = ["--root", str(tmp_path), "browse", "q", "--explain"]
    assert cli.main(browse) == 0
    lines = [line.split("\t") for line in capfd.readouterr().out.splitlines()]
    assert [line[1:5] for line in lines] == [
        ["target", "backlog", "", holder],
        ["target", "backlog", "", holder],
        ["processing", "held", "", holder],
    ]
    assert cli.main([*browse, "--state", "processing", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert (record["id"], record["why"], record["until"]) == (message.id, "held", None)
    assert record["holders"] == [holder]
    assert cli.main([*browse, "--state", "error"]) == 2
    assert "target, delayed, processing" in capfd.readouterr().err
