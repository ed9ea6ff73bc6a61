"""Queues of DropboxMQ's layout, and the claims of its clients, are taken as they are."""

from __future__ import annotations

import os
from pathlib import Path

from helpers import FRESH, Clock, Make, base, make_queue, names_in, take, where

from dropq import Root


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
