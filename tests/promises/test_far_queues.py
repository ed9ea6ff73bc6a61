"""Selectors, routes and dead letters reach queues on other file systems, by way of a carrier.

What a crash at each call leaves is in tests/torture/graph_cases.py, in the setting of two file systems.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, RecordingOs, drop, take, timed

from dropq import Queue, Root
from dropq.carrier import lists
from dropq.carrier.carriers import Carriers, CarrierTo
from dropq.cli import main as cli
from dropq.lifecycle import credits, transfers
from dropq.routing.credit_audit import CreditAudit, idle_credits
from dropq.storage import reading


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    return timed(Root.create(tmp_path / "root", clock=clock), FRESH)


@pytest.fixture
def far(root: Root, elsewhere: Path) -> Callable[..., Queue]:
    """Makes a queue that lies on another file system than the root."""

    def make(name: str, **options: Any) -> Queue:
        home = Path(root.create_queue(name, redelivery_delay=0, **options).layout.home)
        shutil.move(home, elsewhere / name)
        home.symlink_to(elsewhere / name)
        return root.queue(name)

    return make


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    return [message.body for message in queue.browse(state)]


def give(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something as a process does that dies before it carries anything."""
    with monkeypatch.context() as dying:
        dying.setattr(lists.Carrier, "run", lambda self: iter(()))
        act()


def spent(queue: Queue) -> int:
    return sum(len(credits.spent(queue.context.layout, one.token)) for one in queue.selectors())


# -- selectors ---------------------------------------------------------------------------------------------------------


def test_a_move_carries_under_its_credit_which_the_ack_there_frees(root: Root, far: Callable[..., Queue]) -> None:
    orders, there = root.create_queue("orders"), far("there")
    orders.add_selector("on", to="there", credit=1)
    orders.send(b"a", priority=7, properties={"region": "eu", "long": "x" * 300}, expires_in="1h")
    orders.send(b"b")
    assert orders.route() == {"on": 1}
    message = take(there)
    assert (message.body, message.priority, message.properties["region"]) == (b"a", 7, "eu")
    assert (message.delivery_count, message._file.name.hops) == (1, 1)
    assert (orders.route(), spent(orders)) == ({}, 1)
    message.ack()
    assert (orders.route(), bodies(there), orders.in_transit()) == ({"on": 1}, [b"b"], {})


def test_no_look_frees_the_credit_of_a_message_on_its_way(
    root: Root, far: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, there = root.create_queue("orders"), far("there")
    orders.add_selector("on", to="there", credit=1)
    orders.send(b"a")
    give(orders.route, monkeypatch)
    assert (orders.in_transit(), bodies(there), spent(orders)) == ({"there": 1}, [], 1)
    orders.send(b"b")
    (waiting,) = (said for said in orders.explain(state="target"))
    assert "has no credit left of 1: there holds 1 message" in waiting.detail
    take(orders).ack()
    assert idle_credits(orders.context) == []
    assert CreditAudit(orders.context).run_twice() == 0
    orders.sweep()
    assert (orders.in_transit(), bodies(there), spent(orders)) == ({}, [b"a"], 1)
    take(there).ack()
    assert spent(orders) == 0


def test_a_copy_goes_to_queues_on_both_file_systems(root: Root, far: Callable[..., Queue]) -> None:
    orders, near, there = root.create_queue("orders"), root.create_queue("near"), far("there")
    for name in ("near", "there"):
        orders.add_selector(name, op="copy", to=name)
    drop(orders, "report.csv", b"a")
    orders.send(b"b", message_id="same")
    assert orders.route() == {"near": 2, "there": 2}
    assert sorted(bodies(near)) == sorted(bodies(there)) == [b"a", b"b"]
    assert {message.id for message in there.browse()} == {"report.csv", "same"}
    assert (orders.in_transit(), orders.counts()["processed"]) == ({}, 2)


def test_a_bounce_reaches_a_return_address_on_another_file_system(root: Root, far: Callable[..., Queue]) -> None:
    orders, answers = root.create_queue("orders"), far("answers")
    orders.add_selector("back", op="bounce", to="*")
    orders.send(b"a", reply_to="answers")
    assert orders.route() == {"back": 1}
    assert [(message.body, message.reply_to) for message in answers.browse()] == [(b"a", None)]


def test_a_message_returns_from_another_file_system_when_its_selector_is_removed(
    root: Root, far: Callable[..., Queue]
) -> None:
    first, second, there = root.create_queue("first"), root.create_queue("second"), far("there")
    first.add_selector("on", to="second", credit=1)
    second.add_selector("on", to="there", credit=1)
    first.send(b"a")
    first.route()
    second.route()
    assert (bodies(there), spent(first), spent(second)) == ([b"a"], 1, 1)
    second.remove_selector("on")
    assert (bodies(second), bodies(there), there.in_transit()) == ([b"a"], [], {})
    assert spent(first) == 0, "from another file system it comes back under no credit"


def test_a_removed_selector_first_carries_what_is_on_its_way(
    root: Root, far: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, there = root.create_queue("orders"), far("there")
    orders.add_selector("on", to="there", credit=1)
    orders.send(b"a")
    give(orders.route, monkeypatch)
    orders.remove_selector("on")
    assert (bodies(orders), bodies(there), orders.in_transit(), there.in_transit()) == ([b"a"], [], {}, {})
    assert not any(Path(orders.layout.credits).iterdir())


def test_messages_wait_for_a_disk_that_is_away_and_the_log_says_so_once(
    root: Root, far: Callable[..., Queue], elsewhere: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    orders, there = root.create_queue("orders"), far("there")
    orders.add_selector("on", to="there", credit=5)
    orders.send(b"a")
    give(orders.route, monkeypatch)
    (elsewhere / "there").rename(elsewhere / "away")
    carriers = Carriers(orders.context)
    with caplog.at_level(logging.WARNING, "dropq"):
        assert [carriers.run() for _ in range(3)] == [0, 0, 0]
    (said,) = (line for line in caplog.messages if "wait" in line)
    assert "messages for there wait" in said
    orders.send(b"b")
    assert orders.route() == {}, "nothing more is given to a queue that is not there"
    (elsewhere / "away").rename(elsewhere / "there")
    assert (carriers.run(), orders.route()) == (1, {"on": 1})
    assert sorted(bodies(there)) == [b"a", b"b"]


def test_the_command_routes_to_another_file_system(
    root: Root, far: Callable[..., Queue], capsys: pytest.CaptureFixture[str]
) -> None:
    root.create_queue("orders")
    there = far("there")
    arguments = ["--root", str(root.path)]
    assert cli.main([*arguments, "selector", "add", "orders", "on", "--to", "there", "--credit", "3"]) == 0
    root.queue("orders").send_many([b"a", b"b"])
    assert cli.main([*arguments, "route", "orders", "--once"]) == 0
    assert bodies(there) == [b"a", b"b"]


# -- routes ------------------------------------------------------------------------------------------------------------


def routed(queue: Queue, to: str | Path) -> None:
    base = Path(queue.layout.base)
    (base / "routing" / "R").symlink_to(to)
    (base / "routing" / "R.in-use").touch()
    (base / "routing.properties").write_text("R.selector=JMSPriority > 0\n")


def test_a_route_leads_to_a_queue_on_another_file_system(root: Root, far: Callable[..., Queue]) -> None:
    orders, there = root.create_queue("orders"), far("there")
    routed(orders, "../../there/target")
    orders.send(b"a", properties={"long": "x" * 300})
    drop(orders, "report.csv", b"b")
    assert orders.route() == {"R": 2}
    assert sorted(bodies(there)) == [b"a", b"b"]
    assert next(message for message in there.browse() if message.body == b"a").properties == {"long": "x" * 300}


def test_what_a_consumer_routes_to_another_file_system_a_sweep_carries(root: Root, far: Callable[..., Queue]) -> None:
    orders, there = root.create_queue("orders"), far("there")
    routed(orders, "../../there/target")
    orders.send(b"a")
    assert orders.receive(timeout=0) is None
    assert orders.in_transit() == {"there": 1}
    orders.sweep()
    assert (bodies(there), orders.in_transit()) == ([b"a"], {})


def test_a_route_leads_to_a_queue_of_another_root_with_all_metadata(root: Root, elsewhere: Path) -> None:
    there = Root.create(elsewhere / "other").create_queue("there")
    orders = root.create_queue("orders")
    routed(orders, there.layout.target)
    orders.send(b"a", correlation_id="c" * 300)
    assert orders.route() == {"R": 1}
    assert orders.in_transit() == {there.layout.home: 1}, "no router looks at another root"
    orders.sweep()
    assert [message.correlation_id for message in Root(elsewhere / "other").queue("there").browse()] == ["c" * 300]


def test_a_route_to_a_queue_of_dropboxmq_on_another_file_system(root: Root, elsewhere: Path) -> None:
    there = Root.create(elsewhere / "other", dropboxmq=True).create_queue("there", dropboxmq=True)
    orders = root.create_queue("orders")
    routed(orders, there.layout.target)
    orders.send(b"a")
    assert orders.route() == {"R": 1}
    orders.sweep()
    assert bodies(Root(elsewhere / "other").queue("there")) == [b"a"]


def test_a_route_to_another_file_system_that_leads_to_no_queue_takes_nothing(
    root: Root, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orders = root.create_queue("orders")
    (elsewhere / "target").mkdir()
    routed(orders, elsewhere / "target")
    orders.send(b"a")
    with caplog.at_level(logging.WARNING, "dropq"):
        assert orders.route() == {}
    assert bodies(orders) == [b"a"]
    assert "leads to another file system, and not to the target/ of a queue of a root there" in caplog.text


# -- dead letters ------------------------------------------------------------------------------------------------------


def test_a_dead_letter_is_carried_to_another_file_system_and_back(root: Root, far: Callable[..., Queue]) -> None:
    letters = far("letters")
    orders = root.create_queue("orders", max_deliveries=1, exhausted="dead-letter", dead_letter_queue="letters")
    orders.send(b"a", expires_in="1h")
    take(orders).nack()
    assert orders.in_transit() == {"letters": 1}
    orders.sweep()
    (letter,) = letters.browse()
    assert (letter.origin, letter.dead_letter_reason, letter.expiration) == ("orders", "max_deliveries", None)
    outcomes = list(letters.requeue(state="target", to_origin=True))
    assert [outcome.ok for outcome in outcomes] == [True]
    assert (bodies(orders), bodies(letters), letters.in_transit()) == ([b"a"], [], {})


def test_a_dead_letter_on_its_way_is_durable_before_it_leaves_its_queue(
    root: Root, far: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    far("letters")
    orders = root.create_queue(
        "orders", max_deliveries=1, exhausted="dead-letter", dead_letter_queue="letters", durability="full"
    )
    orders.send(b"a")
    message = take(orders)
    recorder = RecordingOs().record(monkeypatch)
    message.nack()
    (row,) = transfers.rows(orders.context.layout)
    synced = [call[1] for call in recorder.calls if call[0] == "fsync"]
    assert synced.index(row.given) < synced.index(orders.context.layout.processing)


# -- self-destruction --------------------------------------------------------------------------------------------------


def test_what_waits_in_a_queue_that_destroys_itself_goes_to_another_file_system(
    root: Root, far: Callable[..., Queue], clock: Clock
) -> None:
    letters, orders = far("letters"), far("orders")
    service = root.create_queue("service", self_destruct=True, self_destruct_after="0s", dead_letter_queue="letters")
    orders.add_selector("on", to="service", credit=5)
    with service.subscribe(client_id="c", named=True):
        pass
    orders.send(b"a")
    orders.route()
    service.send(b"b")
    clock.advance(10**6)
    root.sweep()
    clock.advance(10**6)
    root.sweep()
    assert not service.exists()
    assert (bodies(orders), bodies(letters), spent(orders)) == ([b"a"], [b"b"], 0)


# -- carriers ----------------------------------------------------------------------------------------------------------


def test_consumers_that_give_all_the_time_do_not_keep_sweeps_from_carrying(
    root: Root, far: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = root.create_queue("orders")
    far("there")
    routed(orders, "../../there/target")
    orders.send(b"a")
    assert orders.receive(timeout=0) is None
    (row,) = transfers.rows(orders.context.layout)
    assert list(transfers.stalled(orders.context, 5)) == []
    changed = reading.changed_ms
    monkeypatch.setattr(
        reading, "changed_ms", lambda path, **gone: changed(path, **gone) - 60_000 * (path == row.folder)
    )
    assert list(transfers.stalled(orders.context, 5)) == [row]


def test_a_row_whose_folder_is_a_link_is_passed_over(
    root: Root, far: Callable[..., Queue], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, there = root.create_queue("orders"), far("there")
    orders.add_selector("on", to="there")
    orders.send(b"a")
    orders.route()
    (row,) = transfers.rows(orders.context.layout)
    outside = root.path.parent / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_bytes(b"secret")
    Path(row.given).rmdir()
    Path(row.given).symlink_to(outside)
    orders.sweep()
    assert (bodies(there), (outside / "secret.txt").read_bytes()) == ([b"a"], b"secret")


def test_an_outcome_says_what_is_still_on_its_way_when_the_disk_goes(
    root: Root, far: Callable[..., Queue], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, there = root.create_queue("orders"), far("there")
    orders.send(b"a")
    carry = CarrierTo.carry

    def gone(self: CarrierTo) -> str:
        (elsewhere / "there").rename(elsewhere / "away")
        return carry(self)

    monkeypatch.setattr(CarrierTo, "carry", gone)
    (outcome,) = orders.move(there)
    assert (outcome.ok, orders.in_transit()) == (False, {"there": 1})
    (elsewhere / "away").rename(elsewhere / "there")
    orders.sweep()
    assert bodies(there) == [b"a"]


def test_a_folder_that_is_no_message_makes_no_carrier_work(root: Root, far: Callable[..., Queue]) -> None:
    orders, _ = root.create_queue("orders"), far("there")
    orders.add_selector("on", to="there")
    orders.send(b"a")
    orders.route()
    (row,) = transfers.rows(orders.context.layout)
    Path(row.given, "stray").mkdir()
    assert list(transfers.stalled(orders.context)) == []
