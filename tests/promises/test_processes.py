"""Threads may share a subscription, a process may have several, and a forked child has to open its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import in_child
from forks import Process
from helpers import base, drop, make_queue, only_woken, until, where

from dropq import DropqError, LeaseLost, Message, Queue, Root, Subscription

MANY = 200


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


def take(source: Queue | Subscription) -> Message:
    message = source.receive(timeout=5)
    assert message is not None
    return message


def elsewhere(queue: Queue) -> Queue:
    """The queue as another process would open it."""
    return Root(queue.root.path).queue(queue.name)


def together(*functions: Callable[[], object]) -> list[object]:
    """Run functions at the same time, each in a thread; return what they returned."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]


# -- threads -----------------------------------------------------------------------------------------------------


def test_threads_that_share_a_subscription_get_each_message_once(queue: Queue) -> None:
    queue.send_many([b"%d" % number for number in range(MANY)])
    seen: list[bytes] = []

    with queue.subscribe(max_backlog=None) as subscription:

        def consume() -> None:
            while (message := subscription.receive()) is not None:
                seen.append(message.body)
                message.ack()

        together(*[consume] * 6)
        assert subscription.held == ()
    assert sorted(seen) == sorted(b"%d" % number for number in range(MANY))
    assert len(where(queue)["processed"]) == MANY


def test_threads_that_share_a_subscription_share_its_backlog(queue: Queue) -> None:
    queue.send_many([b"x"] * 20)
    with queue.subscribe(max_backlog=3) as subscription:
        taken = together(*[subscription.receive] * 6)
        assert sum(message is not None for message in taken) == 3 == len(subscription.held)
    assert len(where(queue)["target"]) == 20


def test_threads_that_share_a_queue_send_and_receive_at_once(queue: Queue) -> None:
    sent: list[str] = []
    acked: list[str] = []

    def produce() -> None:
        for _ in range(MANY // 4):
            sent.append(queue.send(b"x").id)

    def consume() -> None:
        while len(acked) < MANY and (message := queue.receive(timeout=10)) is not None:
            message.ack()
            acked.append(message.id)
            if len(acked) == MANY:
                queue.close()  # wakes who still waits

    together(*[produce] * 4, consume)
    assert len(set(sent)) == MANY and sorted(acked) == sorted(sent)


def test_of_threads_that_settle_one_message_only_one_does(queue: Queue) -> None:
    for _ in range(20):
        queue.send(b"x")
        message = take(queue)
        outcomes: list[str] = []

        def settle(verb: Callable[[], None], outcomes: list[str] = outcomes) -> None:
            try:
                verb()
                outcomes.append("settled")
            except LeaseLost:
                outcomes.append("lost")

        together(lambda m=message: settle(m.ack), lambda m=message: settle(m.expire))  # type: ignore[misc]
        assert sorted(outcomes) == ["lost", "settled"]
    assert sum(len(bodies) for bodies in where(queue).values()) == 20


def test_closing_a_subscription_wakes_the_thread_that_waits_on_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, subscription = only_woken(monkeypatch), queue.subscribe()
    got: list[Message | None] = []
    waiting = threading.Thread(target=lambda: got.append(subscription.receive(None)))
    waiting.start()
    until(waits, "it waits")
    subscription.close()
    waiting.join(30)
    assert not waiting.is_alive() and got == [None]
    with pytest.raises(DropqError, match="is closed"):
        subscription.receive()


# -- several subscriptions in one process ------------------------------------------------------------------------


def test_two_subscriptions_of_one_process_are_two_consumers(queue: Queue) -> None:
    queue.send_many([b"1", b"2", b"3"])
    with queue.subscribe() as one, queue.subscribe() as other:
        first, second = take(one), take(other)
        assert first.id != second.id and first.owner != second.owner
        assert one.receive() is None is other.receive()  # each has a backlog of one
        queue.sweep()  # neither is dead
        assert len(where(queue)["processing"]) == 2
        one.close()
        assert where(queue) == {"target": [b"1", b"3"], "processing": [b"2"]}
        with pytest.raises(LeaseLost):
            first.ack()
        second.ack()
    assert where(queue) == {"target": [b"1", b"3"], "processed": [b"2"]}


def test_two_queue_objects_of_one_process_do_not_sweep_each_other(queue: Queue) -> None:
    queue.send(b"x")
    message = take(queue)
    again = elsewhere(queue)
    assert again.sweep().total == 0
    assert again.receive() is None
    again.close()
    message.ack()


# -- fork --------------------------------------------------------------------------------------------------------


def test_a_child_is_refused_on_a_subscription_of_its_parent(queue: Queue) -> None:
    queue.send_many([b"1", b"2"])
    with queue.subscribe(max_backlog=None) as subscription:
        take(subscription)
        with pytest.raises(DropqError, match="before a fork, by the parent: open another"):
            in_child(subscription.receive)
        with pytest.raises(DropqError, match="before a fork"):
            in_child(lambda: subscription.receive_many(2))
        with pytest.raises(DropqError, match="before a fork"):
            in_child(lambda: next(iter(subscription)))
        assert where(queue) == {"processing": [b"1"], "target": [b"2"]}
        take(subscription).ack()


def test_a_child_may_send_and_ids_stay_unique(queue: Queue) -> None:
    queue.send(b"parent")
    children = [in_child(lambda: [queue.send(b"child").id for _ in range(20)]) for _ in range(3)]
    own = [queue.send(b"parent").id for _ in range(20)]
    assert len({*own, *(sent for child in children for sent in child)}) == 80
    assert where(queue) == {"target": sorted([b"child"] * 60 + [b"parent"] * 21)}


def test_a_child_may_receive_on_its_own_subscription(queue: Queue) -> None:
    queue.send_many([b"1", b"2", b"3"])
    mine = take(queue)

    def child() -> tuple[bytes, bytes]:
        with queue.subscribe() as subscription:
            first = take(subscription)
            first.ack()
        second = take(queue)  # the queue object's own subscription is opened anew
        second.ack()
        queue.close()
        return first.body, second.body

    assert in_child(child) == (b"2", b"3")
    assert mine.held and mine.body == b"1"
    mine.ack()
    assert where(queue) == {"processed": [b"1", b"2", b"3"]}


def test_what_a_child_holds_when_it_dies_comes_back_and_what_its_parent_holds_does_not(queue: Queue) -> None:
    queue.send_many([b"parent", b"child"])
    mine = take(queue)

    def child() -> None:
        assert take(queue).body == b"child"
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="without an answer"):
        in_child(child)
    assert where(queue) == {"processing": [b"child", b"parent"]}
    assert [finding.kind for finding in queue.fsck()] == ["dead-holder"]
    assert elsewhere(queue).sweep().dead == 1
    assert where(queue) == {"processing": [b"parent"], "delayed": [b"child"]}
    mine.ack()


def closes_everything(queue: Queue, subscription: Subscription) -> None:
    subscription.close()
    queue.close()


def leaves_a_with_block(queue: Queue, subscription: Subscription) -> None:
    with queue, subscription:
        pass


def sweeps(queue: Queue, subscription: Subscription) -> None:
    queue.sweep()
    elsewhere(queue).sweep()


def exits(queue: Queue, subscription: Subscription) -> None:
    sys.exit(3)


@pytest.mark.parametrize("behave", [closes_everything, leaves_a_with_block, sweeps, exits])
def test_a_child_cannot_give_back_what_its_parent_holds(
    queue: Queue, behave: Callable[[Queue, Subscription], None]
) -> None:
    queue.send_many([b"1", b"2"])
    mine = take(queue)
    with queue.subscribe() as subscription:
        other = take(subscription)
        child = Process(target=behave, args=(queue, subscription))
        child.start()
        child.join()
        assert child.exitcode == (3 if behave is exits else 0)
        assert elsewhere(queue).sweep().dead == 0  # the child did not let go of the parent's sign of life
        assert where(queue) == {"processing": [b"1", b"2"]}
        mine.ack()
        other.ack()
    assert where(queue) == {"processed": [b"1", b"2"]}


FORKING = """
import os, sys
from dropq import Root

queue = Root(sys.argv[1]).queue("q")
subscription = queue.subscribe()
message, own = subscription.receive(), queue.receive()
pid = os.fork()
if pid == 0:
    del message, own, subscription
    sys.exit(0)  # the whole way out: atexit, and the end of every object
assert os.waitpid(pid, 0)[1] == 0
assert Root(sys.argv[1]).queue("q").sweep().dead == 0
message.ack()
own.ack()
"""


def test_a_child_that_ends_as_programs_do_takes_nothing_of_its_parents_along(queue: Queue) -> None:
    queue.send_many([b"1", b"2"])
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(queue.root.path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert where(queue) == {"processed": [b"1", b"2"]}


ORPHANING = """
import os, sys, time
from dropq import Root

message = Root(sys.argv[1]).queue("q").receive()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os._exit(0)
"""


def test_a_parent_that_dies_is_dead_also_while_its_child_lives(queue: Queue) -> None:
    queue.send(b"x")
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANING, str(queue.root.path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait()
            until(lambda: elsewhere(queue).sweep().dead == 1, "the dead parent's message to come back")
            assert where(queue) == {"delayed": [b"x"]}
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_claim_may_be_settled_by_the_child_that_inherits_it_once(queue: Queue) -> None:
    queue.send(b"x")
    message = take(queue)
    in_child(message.ack)
    with pytest.raises(LeaseLost):
        message.ack()
    assert where(queue) == {"processed": [b"x"]}


def test_a_script_and_many_processes_share_a_queue(queue: Queue) -> None:
    for number in range(30):
        drop(queue, f"{number}.csv", b"%d" % number)

    def consume(path: str) -> None:
        with Root(path).queue("q").subscribe() as subscription:
            while (message := subscription.receive()) is not None:
                message.ack()

    consumers = [Process(target=consume, args=(str(queue.root.path),)) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join()
        assert consumer.exitcode == 0
    assert sorted(os.listdir(base(queue) / "processed")) == sorted(f"{number}.csv" for number in range(30))


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Let another thread of the parent do something all the time."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            act()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_child_receives_from_a_queue_that_another_thread_of_its_parent_was_just_opening(queue: Queue) -> None:
    def opens() -> None:
        queue.receive()
        queue.close()

    def child() -> int:
        faulthandler.dump_traceback_later(5, exit=True)
        with queue:
            return sum(queue.receive() is None for _ in range(3))

    with meanwhile(opens):
        assert [in_child(child) for _ in range(25)] == [3] * 25


#: Forks while a thread imports what it needs to receive: that goes on once the fork is done, or after a moment.
FORKS_IN_AN_IMPORT = """
import os, signal, sys, threading
import dropq
queue = dropq.Root(sys.argv[1]).queue(sys.argv[2])
importing, forked = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[3] and not importing.is_set():
            importing.set()
            forked.wait(0.5)

sys.meta_path.insert(0, Slow())
os.register_at_fork(after_in_parent=forked.set)
thread = threading.Thread(target=lambda: queue.receive(timeout=0.1))
thread.start()
assert importing.wait(60)
if child := os.fork():
    thread.join()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(30)
queue.receive(timeout=0.1)
os._exit(0)
"""


@pytest.mark.parametrize(
    "module", ["dropq.queue.subscription", "dropq.queue.offers", "dropq.upkeep.sweep", "watchdog.observers.api"]
)
def test_a_child_does_not_wait_for_an_import_of_a_thread_that_it_does_not_have(queue: Queue, module: str) -> None:
    program = [sys.executable, "-c", FORKS_IN_AN_IMPORT, str(queue.root.path), queue.name, module]
    assert subprocess.run(program, check=False).returncode == 0


def test_a_child_is_refused_on_a_subscription_that_another_thread_of_its_parent_was_just_using(queue: Queue) -> None:
    queue.send(b"a")
    with queue.subscribe() as subscription:
        message = take(subscription)

        def child() -> list[str]:
            faulthandler.dump_traceback_later(60, exit=True)
            assert subscription.held == (message,) and subscription._inherited
            refused = []
            for use in (subscription.receive, lambda: subscription.receive_many(1), subscription._snapshot):
                with pytest.raises(DropqError, match="before a fork, by the parent") as error:
                    use()
                refused.append(str(error.value))
            subscription.close()
            return refused

        entered, let_go = threading.Event(), threading.Event()

        def look() -> None:
            with subscription._lock:
                entered.set()
                let_go.wait(60)

        thread = threading.Thread(target=look)
        thread.start()
        assert entered.wait(10)
        try:
            assert len(in_child(child)) == 3
        finally:
            let_go.set()
            thread.join()
        message.ack()


def test_threads_that_open_a_queue_at_once_share_its_subscription(queue: Queue) -> None:
    queue.send_many([b"x"] * 8)
    for _ in range(10):
        for message in together(*[lambda: queue.receive(5)] * 8):
            assert isinstance(message, Message)
            message.release()
        assert len(os.listdir(queue.layout.consumers)) == 1
        queue.close()
        assert os.listdir(queue.layout.consumers) == []
