"""What people and scripts leave behind by `mv`: claims without an owner, and the prefixes of claims."""

from __future__ import annotations

import os

import pytest
from helpers import FRESH, Clock, Make, base, drop, names_in, take, where

from dropq import LeaseLost


def test_a_scripts_claim_is_swept_only_when_asked_for(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH, lease_period="5s")
    drop(queue, "report.csv", b"a")
    os.rename(base(queue) / "target" / "report.csv", base(queue) / "processing" / "report.csv")
    clock.advance(10_000)
    assert queue.sweep(unleased_older_than=0).total == 0
    assert names_in(queue, "processing") == ["report.csv"]
    assert queue.sweep(foreign_older_than=5_000).foreign == 1
    message = take(queue)
    assert (message.id, message.delivery_count) == ("report.csv", 2)
    message.ack()
    assert names_in(queue, "processed") == ["report.csv"]


@pytest.mark.parametrize("state", ["target", "error", "processed"])
def test_a_claim_prefix_left_by_hand_is_dropped_by_the_next_claim_and_its_count_kept(make: Make, state: str) -> None:
    queue = make()
    sent = queue.send(b"a")
    message = take(queue)
    (claimed,) = names_in(queue, "processing")
    os.rename(base(queue) / "processing" / claimed, base(queue) / state / claimed)
    with pytest.raises(LeaseLost):
        message.ack()
    (found,) = queue.browse(state)
    assert found.id == sent.id
    if state != "target":
        os.rename(base(queue) / state / claimed, base(queue) / "target" / claimed)
    again = take(queue)
    assert (again.id, again.delivery_count) == (sent.id, 2)
    assert again.receipt is not None
    assert again.receipt.count("~") == 1
    again.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_claim_prefix_left_by_hand_is_dropped_by_a_requeue(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    take(queue)
    (claimed,) = names_in(queue, "processing")
    os.rename(base(queue) / "processing" / claimed, base(queue) / "error" / claimed)
    queue.requeue()
    assert all("~" not in name for name in names_in(queue, "target"))
    assert take(queue).delivery_count == 1


@pytest.mark.parametrize("name", ["report~2.csv", "a,b~c", "client~report.csv", "x-y,0,1~4.i.B"])
def test_any_other_tilde_or_comma_is_the_files_own(make: Make, name: str) -> None:
    queue = make()
    drop(queue, name, b"a")
    message = take(queue)
    assert message.id == name
    message.nack()
    take(queue).ack()
    assert names_in(queue, "processed") == [name]


@pytest.mark.parametrize("name", ["4.x.B", "report.csv"])
def test_a_scripts_claim_that_a_sweep_returns_obeys_the_delay_and_the_limit_of_deliveries(
    make: Make, clock: Clock, name: str
) -> None:
    queue = make(max_deliveries=2, redelivery_delay="10s")
    drop(queue, name, b"a")
    for state in ("delayed", "error"):
        [waiting] = names_in(queue, "target")
        claimed = f"mine~{waiting}" if waiting.startswith("4.") else waiting
        os.rename(base(queue) / "target" / waiting, base(queue) / "processing" / claimed)
        clock.advance(1)
        assert queue.sweep(foreign_older_than=0).foreign == 1
        assert where(queue) == {state: [b"a"]}
        clock.advance(10)
        queue.sweep()
    [message] = queue.browse("error")
    assert message.reason is not None and message.reason["reason"] == "max_deliveries"
