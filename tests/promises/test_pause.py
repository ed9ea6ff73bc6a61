"""A paused queue looks empty to consumers; senders and holders of messages go on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from helpers import Make, make_queue, take, where

from dropq.lifecycle.timing import Timing


def test_a_paused_queue_looks_empty_and_takes_sends(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    queue.pause()
    assert (queue.paused, queue.receive()) == (True, None)
    queue.send(b"b")
    assert where(queue) == {"target": [b"a", b"b"]}
    assert len(list(queue.browse())) == 2
    queue.resume()
    queue.resume()
    assert not queue.paused
    assert take(queue).body == b"a"


def test_what_is_held_can_be_settled_while_paused(make: Make) -> None:
    queue = make()
    queue.send(b"a")
    message = take(queue)
    queue.pause()
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_the_roots_read_lock_holds_every_queue(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    for one in (queue, other):
        one.send(b"a")
    (Path(queue.root.path) / "global-read-lock").touch()
    assert queue.receive() is None
    assert other.receive() is None
    assert queue.paused
    os.unlink(Path(queue.root.path) / "global-read-lock")
    assert queue.receive() is not None
    assert other.receive() is not None
    other.close()


def test_a_pause_takes_hold_soon_however_much_was_listed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing(listing_share=10_000_000))  # as if a million messages had been listed
    queue.send_many([b"x"] * 20)
    with queue.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is not None
        queue.pause()
        threading.Event().wait(0.25)
        assert subscription.receive() is None
        queue.resume()
        assert subscription.receive(5) is not None
