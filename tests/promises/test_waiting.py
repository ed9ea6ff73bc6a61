"""Waiting in receive: an event ends it, and so does whatever else may bring a message, by any thread or process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from helpers import drop, make_queue, only_woken, open_files, overflow, reopened, take, until, where

from dropq import Message, Queue, Subscription
from dropq.lifecycle.timing import Timing
from dropq.storage import watch

#: Seconds that a wait which is to be ended by something else may last.
LONG = 60.0


class Waiting:
    """A thread that receives, and waits for as long as it takes."""

    def __init__(self, receive: Callable[[None], Message | None]) -> None:
        self.got: list[Message | None] = []
        self._thread = threading.Thread(target=lambda: self.got.append(receive(None)), daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Whether it is past its first look, and waits for news, or for its turn to."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return frame is not None and frame.f_code.co_name in ("receive", "wait")

    def message(self) -> Message | None:
        """What it received in the end."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "it waits in vain"
        return self.got[0]

    def body(self) -> bytes:
        """The body of what it received."""
        message = self.message()
        assert message is not None
        return message.body


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path)


@pytest.fixture
def only_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody look but for an event, or for being woken."""
    monkeypatch.setattr(Subscription, "_next_attempt", LONG)
    monkeypatch.setattr(watch, "PATIENCE", 0.0)


def watching(subscription: Subscription) -> bool:
    """Whether somebody waits on a subscription, for events."""
    return (
        subscription._waiting.waits and subscription._waiting._watch is not None and subscription._waiting._watch.events
    )


def test_who_waits_a_moment_imports_no_watchdog_and_starts_no_thread(queue: Queue) -> None:
    program = """if True:
        import dropq, sys, threading
        queue = dropq.Root(sys.argv[1]).queue("q")
        assert queue.receive(timeout=0.01) is None
        assert "watchdog" not in sys.modules and threading.active_count() == 1
        assert queue.receive(timeout=0.5) is None
        assert threading.active_count() == 1
    """
    subprocess.run([sys.executable, "-c", program, str(queue.root.path)], check=True)


@pytest.mark.usefixtures("only_events")
@pytest.mark.parametrize("how", ["send", "mv", "nack", "requeue", "sweep"])
def test_whatever_comes_into_target_ends_the_wait(queue: Queue, how: str) -> None:
    queue.send(b"a")
    other = reopened(queue)
    held = take(other)
    with queue.subscribe() as subscription:
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "it watches")
        if how == "send":
            other.send(b"a")
        elif how == "mv":
            drop(queue, "note", b"a")
        elif how == "nack":
            held.nack()
        elif how == "requeue":
            other.requeue(state="processing")
        else:
            held.nack("20ms")
            until(lambda: other.sweep().delayed, "somebody else's sweep delivers it")
        assert waiting.body() == b"a"


@pytest.mark.usefixtures("only_events")
@pytest.mark.parametrize(
    "settle", [Message.ack, lambda message: message.reject("no"), lambda message: message.nack(60)]
)
def test_whatever_makes_room_under_max_backlog_ends_the_wait(
    tmp_path: Path, settle: Callable[[Message], object]
) -> None:
    queue = make_queue(tmp_path / "limited", max_backlog=1)
    queue.send_many([b"a", b"b"])
    held = take(reopened(queue))
    with queue.subscribe() as subscription:
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "it watches")
        settle(held)
        assert waiting.body() == b"b"


def test_what_gives_no_event_is_found_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.0)
    queue = make_queue(tmp_path, lease_period="200ms")
    with queue.subscribe() as subscription, queue.subscribe() as other:
        queue.send(b"delayed", delay="200ms")
        assert Waiting(subscription.receive).body() == b"delayed"
        subscription.held[0].ack()
        queue.send(b"leased")
        assert other.receive() is not None
        assert Waiting(subscription.receive).body() == b"leased"
        subscription.held[0].ack()
        queue.pause()
        queue.send(b"paused")
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "it watches")
        queue.resume()
        assert waiting.body() == b"paused"


@pytest.mark.usefixtures("only_events")
def test_threads_that_wait_on_one_subscription_have_a_message_each(queue: Queue) -> None:
    with queue.subscribe(max_backlog=None) as subscription:
        for _ in range(5):
            waiting = [Waiting(subscription.receive) for _ in range(4)]
            until(lambda: watching(subscription), "one watches for all")
            queue.send_many([b"a", b"b", b"c", b"d"])
            assert sorted(each.body() for each in waiting) == [b"a", b"b", b"c", b"d"]


@pytest.mark.usefixtures("only_events")
def test_who_waits_for_room_is_woken_by_who_makes_it(queue: Queue) -> None:
    queue.send_many([b"a", b"b"])
    with queue.subscribe() as subscription:
        first = subscription.receive()
        assert first is not None
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "it watches")
        first.ack()
        assert waiting.body() == b"b"


@pytest.mark.usefixtures("only_events")
def test_closing_ends_the_wait_of_all_threads_and_leaves_no_file_open(queue: Queue) -> None:
    queue.counts()
    before = open_files()
    subscription = queue.subscribe()
    waiting = [Waiting(subscription.receive) for _ in range(3)]
    until(lambda: watching(subscription) and all(each.waits for each in waiting), "one watches for all")
    subscription.close()
    assert [each.message() for each in waiting] == [None] * 3
    assert open_files() == before


@pytest.mark.usefixtures("only_events")
def test_a_signal_handler_may_close_what_its_own_thread_waits_on(queue: Queue) -> None:
    subscription = queue.subscribe()
    before = signal.signal(signal.SIGUSR1, lambda *_: subscription.close())
    try:

        def interrupt() -> None:
            until(lambda: watching(subscription), "it watches")
            os.kill(os.getpid(), signal.SIGUSR1)

        threading.Thread(target=interrupt, daemon=True).start()
        assert subscription.receive(None) is None
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("only_events")
def test_a_signal_handler_may_receive_from_what_its_own_thread_waits_on(queue: Queue) -> None:
    subscription = queue.subscribe()
    inner: list[Message | None] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: inner.append(subscription.receive(0.01)))
    try:

        def interrupt() -> None:
            until(lambda: watching(subscription), "it watches")
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: inner, "the handler has received")
            subscription.close()  # the wait outside goes on, and is woken

        threading.Thread(target=interrupt, daemon=True).start()
        assert subscription.receive(LONG) is None
        assert inner == [None]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("only_events")
def test_a_child_of_one_who_waits_has_events_of_its_own_and_takes_none_of_its_parents(queue: Queue) -> None:
    with queue.subscribe() as subscription:
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "the parent watches")

        def receives() -> bytes:
            with reopened(queue).subscribe(filter="JMSType = 'child'") as own:
                childs = Waiting(own.receive)
                until(lambda: watching(own), "the child watches")
                queue.send(b"childs", type="child")
                return childs.body()

        subscription._offers._matches = lambda found: "child" not in found.filename
        assert in_child(receives) == b"childs"
        queue.send(b"parents")
        assert waiting.body() == b"parents"


@pytest.mark.usefixtures("only_events")
def test_a_burst_loses_no_message_although_events_are_lost(queue: Queue) -> None:
    with queue.subscribe(max_backlog=None) as subscription:
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "it watches")
        drop(queue, "first", b"first")
        assert waiting.body() == b"first"
        overflow(Path(queue.layout.target))  # while nobody waits
        for number in range(100):
            drop(queue, f"note-{number}", b"%d" % number)
        bodies = [Waiting(subscription.receive).body() for _ in range(100)]
        assert sorted(bodies, key=int) == [b"%d" % number for number in range(100)]
        waiting = Waiting(subscription.receive)
        until(lambda: watching(subscription), "it watches again")
        drop(queue, "last", b"last")
        assert waiting.body() == b"last"
    assert len(where(queue)["target"]) == 102


def test_where_there_are_no_events_it_looks_often(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> None:
        return None

    monkeypatch.setattr(Subscription, "_next_attempt", LONG)
    monkeypatch.setattr(watch, "_events", none)
    with queue.subscribe() as subscription:
        assert subscription.receive(timeout=0.2) is None
        waiting = Waiting(subscription.receive)
        until(lambda: subscription._waiting.waits, "it waits")
        queue.send(b"a")
        assert waiting.body() == b"a"


def test_a_look_that_takes_long_and_finds_nothing_is_not_repeated_at_once(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    look = Subscription._next

    def counted(self: Subscription) -> Message | None:
        looks.append(None)
        return look(self)

    monkeypatch.setattr(Subscription, "_next", counted)
    queue.send(b"for others")
    with queue.subscribe(filter="JMSPriority = 9") as subscription:
        assert subscription.receive("300ms") is None
    often = len(looks)
    looks.clear()
    all_are_long = reopened(queue, Timing(long_attempt=0, listing_share=10_000))
    with all_are_long.subscribe(filter="JMSPriority = 9") as subscription:
        assert subscription.receive("300ms") is None
    assert len(looks) <= 2 < often


def test_receive_waits_for_a_message_and_gives_up_in_time(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    with queue.subscribe() as subscription:
        assert subscription.receive(0.05) is None
        sender = threading.Timer(0.1, queue.send, [b"a"])
        sender.start()
        message = subscription.receive(10)
        sender.join()
        assert message is not None
        assert message.body == b"a"


def test_closing_wakes_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = only_woken(monkeypatch)
    queue = make_queue(tmp_path)
    subscription = queue.subscribe()
    taken: list[object] = []
    waiter = threading.Thread(target=lambda: taken.extend(subscription))
    waiter.start()
    until(waits, "it waits")
    subscription.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert taken == []


def test_what_a_thread_waits_with_is_open_until_the_program_has_ended(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    text = f"""
import atexit, os, threading
opened = lambda: set(os.listdir("/proc/self/fd"))
atexit.register(lambda: print(before <= opened()))  # the last of all
from dropq.storage.watch import Watch
watch = Watch({queue.layout.target!r})
threading.Thread(target=watch.wait, args=(60,), daemon=True).start()
before = opened()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
