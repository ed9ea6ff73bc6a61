"""What a consumer asks no more of an NFS server while its queue stands empty, the other client changes all the same.

Each function is a case of nfs.py's: it takes the two clients, on queues of its own, and raises what is wrong.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forks import fork
from helpers import drop, until

from dropq import Message, Queue, Root, Subscription
from dropq.upkeep.sweep import QuickSweep
from torture.account import body, name_of

if TYPE_CHECKING:
    from torture.nfs import Clients

#: Seconds that anything may take that one waits for: a client keeps what it knows of a folder for a minute.
PATIENCE = 120.0
#: Seconds within which a change is seen that a consumer looks for less often while its queue is quiet.
SEEN = 10.0


@contextmanager
def _quiet(queue: Queue) -> Iterator[Subscription]:
    """Open a consumer, and wait until it is quiet."""
    with queue.subscribe() as subscription:

        def is_quiet() -> bool:
            assert subscription.receive(timeout=0.2) is None
            sweep = subscription._sweep
            assert isinstance(sweep, QuickSweep)
            return subscription._offers.is_quiet and sweep._rests

        until(is_quiet, "a quiet consumer whose sweep rests", timeout=PATIENCE)
        yield subscription


def _comes(subscription: Subscription, name: str) -> Message:
    began = time.monotonic()
    message = subscription.receive(timeout=PATIENCE)
    assert message is not None, "nothing came"
    late = time.monotonic() - began
    assert late < SEEN, f"it was seen {late:.1f} s late"
    assert name_of(message.body) == name
    return message


def a_quiet_consumer_gets_what_the_other_client_sends(clients: Clients) -> None:
    one, other, folder = clients.make()
    with _quiet(other) as subscription:
        one.send(body("m"))
        _comes(subscription, "m").ack()
        drop(one, "report.csv", body("n"))
        _comes(subscription, "n").ack()
    assert len(os.listdir(folder / "processed")) == 2


def a_quiet_consumer_meets_a_pause_of_the_other_client(clients: Clients) -> None:
    one, other, _ = clients.make()
    for switch in (one, one.root):
        with _quiet(other) as subscription:
            switch.pause()
            try:
                one.send(body("m"))
                assert subscription.receive(timeout=1) is None, "the pause was not seen"
            finally:
                switch.resume()
            _comes(subscription, "m").ack()


def a_quiet_consumer_meets_an_ack_that_came_first(clients: Clients) -> None:
    one, other, folder = clients.make()
    with _quiet(other) as subscription:
        early = one.root.context.ids.next()
        assert not one.ack(early, defer=True)
        drop(one, f"4.{early}.B", body("m"))

        def is_settled() -> bool:
            assert subscription.receive() is None, "it was delivered, although its ack had come"
            return os.listdir(folder / "processed") != []

        until(is_settled, "the message to be settled by its ack", timeout=PATIENCE)


def a_quiet_consumer_meets_a_route_that_the_other_client_made(clients: Clients) -> None:
    one, other, folder = clients.make()
    with _quiet(other) as subscription:
        (clients.a / one.name / "routing.properties").write_text("away.selector=JMSPriority > 0\n")
        (clients.a / one.name / "routing" / "away").mkdir(parents=True)
        (clients.a / one.name / "routing" / "away.in-use").touch()
        one.send(body("m"))

        def is_routed() -> bool:
            assert subscription.receive() is None, "it was delivered, although a route takes it"
            return os.listdir(folder / "routing" / "away") != []

        until(is_routed, "the route to take it", timeout=PATIENCE)


def a_quiet_consumer_gets_what_the_other_client_delayed(clients: Clients) -> None:
    one, other, _ = clients.make()
    for delay in ("100ms", "4s"):
        with _quiet(other) as subscription:
            one.send(body("m"), delay=delay)
            _comes(subscription, "m").ack()


def a_quiet_consumer_gets_what_a_consumer_of_the_other_client_left(clients: Clients) -> None:
    one, other, folder = clients.make()
    lease = 0 if clients.locks else 2
    with _quiet(other) as subscription:
        one.send(body("m"))  # the quiet consumer does not look until it is held
        pid = fork(partial(_hold, clients.a, one.name, lease), longest=0)
        until(lambda: os.listdir(folder / "processing"), "it to hold the message", timeout=PATIENCE)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _comes(subscription, "m").ack()


def who_a_limit_keeps_back_gets_on_when_the_other_client_settles(clients: Clients) -> None:
    one, other, _ = clients.make(max_backlog=1)
    one.send_many([body("m"), body("n")])
    held = one.receive(timeout=PATIENCE)
    assert held is not None
    with other.subscribe() as subscription:
        assert subscription.receive(timeout=4) is None  # longer than a folder counts as just changed
        held.ack()
        _comes(subscription, "n").ack()


def _hold(root: Path, name: str, lease: int) -> None:
    """Take a message, and live on."""
    with Root(root).queue(name).subscribe(lease_period=lease or None) as subscription:
        assert subscription.receive(timeout=PATIENCE) is not None
        signal.pause()


CASES = (
    a_quiet_consumer_gets_what_the_other_client_sends,
    a_quiet_consumer_meets_a_pause_of_the_other_client,
    a_quiet_consumer_meets_an_ack_that_came_first,
    a_quiet_consumer_meets_a_route_that_the_other_client_made,
    a_quiet_consumer_gets_what_the_other_client_delayed,
    a_quiet_consumer_gets_what_a_consumer_of_the_other_client_left,
    who_a_limit_keeps_back_gets_on_when_the_other_client_settles,
)
