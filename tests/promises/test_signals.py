"""A signal handler may close, receive, send and settle at any moment of its own thread: nothing hangs or stays.

A handler is feigned by a function that is called in the middle of a call to the file system; and, at random moments,
it is one.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from helpers import FRESH, base, first_and_long, make_queue, names_in, where
from torture.calls import Call, come_between

from dropq import DropqError, LeaseLost, Message, Queue
from dropq.format.ids import IdSource

#: Seconds after which a child says where it hangs, and ends.
PATIENCE = 600.0
#: How often a handler comes at a random moment.
ROUNDS = 300

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without a history, leased": {"history": False, "lease_period": "1m"},
    "with policies": {"max_backlog": 10, "fairness_model": "round-robin", "priority": "/p"},
    "at most once": {"semantics": "at-most-once", "history": False},
}


class Case:
    """A queue of three messages and a subscription, which holds one of them."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.settles_first = queue.config.semantics == "at-most-once"
        self.queue.send_many([b'{"p": 3}', b'{"p": 2}', b'{"p": 1}'])
        self.subscription = self.queue.subscribe(max_backlog=None)
        self.closed = False
        self.got: list[Message] = []
        self.ids: list[str] = []
        self.receive()

    # -- what is interrupted, and what interrupts it --

    def receive(self) -> None:
        message = self.subscription.receive()
        if message is not None:
            self.got.append(message)

    def ack(self) -> None:
        self._settle(self.got[0].ack)

    def nack(self) -> None:
        self._settle(partial(self.got[0].nack, 0))

    def extend(self) -> None:
        self._settle(partial(self.got[0].extend, "1m"))

    def send(self) -> None:
        self.ids.append(self.queue.send(b'{"p": 4}').id)

    def close(self) -> None:
        self.closed = True
        self.subscription.close()

    def _settle(self, verb: Callable[[], None]) -> None:
        with suppress(LeaseLost):  # somebody was first; at most once, it is settled before it is delivered
            verb()

    # -- what is so in the end --

    def check(self) -> None:
        """See that every claim has an owner that lives, and that all can be had and settled."""
        lying = where(self.queue)
        claims = {name.partition(",")[0] for name in names_in(self.queue, "processing")}
        assert claims == {message.owner for message in self.subscription.held}
        receipts = [message.receipt for message in self.got if message.receipt]
        assert len(set(receipts)) == len(receipts)
        signs = [name for name in os.listdir(self.queue.layout.consumers) if name.startswith(self.subscription.id)]
        if self.closed:
            assert "processing" not in lying and not signs
            with pytest.raises(DropqError, match="is closed"):
                self.subscription.receive()
        else:
            assert len(signs) == 1
        assert len(set(self.ids)) == len(self.ids)
        with self.queue.subscribe(max_backlog=None) if self.closed else self.subscription as consumer:
            for message in (*consumer.held, *iter(consumer.receive, None)):
                assert message.body
                message.ack()
        bodies = [b'{"p": 1}', b'{"p": 2}', b'{"p": 3}', *[b'{"p": 4}'] * len(self.ids)]
        assert where(self.queue) == ({"processed": bodies} if self.queue.config.history else {})
        for name in names_in(self.queue, "processed"):
            (base(self.queue) / "processed" / name).unlink()


class InTheMiddle:
    """Calls a function once, before or after one of the calls that go by, counted from when that is asked for."""

    def __init__(self) -> None:
        self.at, self.late = -1, False
        self.do: Callable[[], object] = dict

    def __call__(self, call: Call) -> Any:
        self.at -= 1
        due = self.at == -1
        if due and not self.late:
            self.do()
        done = call.do()
        if due and self.late:
            self.do()
        return done


@pytest.mark.parametrize("verb", ["close", "receive", "send", "ack"])
@pytest.mark.parametrize("kind", first_and_long(KINDS))
@pytest.mark.crashes
def test_a_handler_may_come_in_the_middle_of_every_call_of_every_verb(tmp_path: Path, kind: str, verb: str) -> None:
    def interrupted() -> int:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        queue = make_queue(tmp_path, timing=FRESH, **KINDS[kind])
        between = InTheMiddle()
        come_between(between)
        count = 0
        for act in ("receive", "ack", "nack", "extend", "send", "close"):
            for late in (False, True):
                for at in range(200):
                    case = Case(queue)
                    between.at, between.late, between.do = at, late, partial(_handled, case, verb)
                    with _only_if_closed(case):
                        getattr(case, act)()
                    reached, between.at = between.at < 0, -1
                    try:
                        case.check()
                    except BaseException as error:
                        error.add_note(f"{act}, call {at}, {'after' if late else 'before'}")
                        raise
                    count += reached
                    if not reached:
                        break
        return count

    assert in_child(interrupted) > 30


def _handled(case: Case, verb: str) -> None:
    with _only_if_closed(case):
        getattr(case, verb)()


@contextmanager
def _only_if_closed(case: Case) -> Iterator[None]:
    """Pass over that the subscription is closed, where it is."""
    try:
        yield
    except DropqError:
        if not case.closed:
            raise


# -- at random moments -------------------------------------------------------------------------------------------------


def closes_while_it_receives(queue: Queue) -> object:
    """A handler closes what its thread receives from; return what is left that nobody will ever return."""
    left: list[str] = []
    for _ in range(ROUNDS):
        _fill(queue, 30)
        subscription = queue.subscribe(max_backlog=None)
        with _after_a_moment(subscription.close, 0.002), suppress(DropqError):
            while subscription.receive() is not None:
                pass
        subscription.close()
        left += names_in(queue, "processing") + os.listdir(queue.layout.consumers)
    return left


def closes_while_it_acknowledges(queue: Queue) -> object:
    """A handler closes what its thread acknowledges from."""
    left: list[str] = []
    for _ in range(ROUNDS):
        _fill(queue, 30)
        subscription = queue.subscribe(max_backlog=None)
        with _after_a_moment(subscription.close, 0.003), suppress(DropqError):
            while (message := subscription.receive()) is not None:
                message.ack()
        subscription.close()
        left += names_in(queue, "processing") + os.listdir(queue.layout.consumers)
    return left


def sends_while_it_sends(queue: Queue) -> object:
    """A handler sends while its thread does; return the ids of either that are twice, or not in order."""
    inner: list[str] = []
    outer: list[str] = []
    with _again_and_again(lambda: inner.append(queue.send(b"a").id)):
        while len(inner) < ROUNDS:
            outer.append(queue.send(b"b").id)
    twice = len(inner) + len(outer) - len({*inner, *outer})
    return [*([twice] if twice else []), *(one for one in (inner, outer) if one != sorted(one))]


def receives_while_it_receives(queue: Queue) -> object:
    """A handler receives from what its thread receives from; return what either of them got twice, or what is left."""
    got: list[Message] = []
    looks = 0

    def receive() -> None:
        nonlocal looks
        looks += 1
        if (message := subscription.receive(0.001)) is not None:
            got.append(message)

    with queue.subscribe(max_backlog=None) as subscription:
        while looks < ROUNDS:
            _fill(queue, 50)
            with _again_and_again(receive):
                while (message := subscription.receive()) is not None:
                    got.append(message)
            receipts = [message.receipt for message in got]
            twice = len(receipts) - len(set(receipts))
            left = set(receipts) ^ set(names_in(queue, "processing"))
            if twice or left:
                return [twice, *left]
            subscription.ack_many(got)
            got.clear()
    return []


def acknowledges_what_its_thread_settles(queue: Queue) -> object:
    """A handler acknowledges the message that its thread gives back; return how often it was neither, or both."""
    odd: list[int] = []
    for _ in range(ROUNDS):
        _fill(queue, 1)
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None
            done: list[str] = []
            with _after_a_moment(partial(_noted, done, message.ack), 0.0003):
                _noted(done, partial(message.nack, 0))
                while not done:
                    pass
            if len(done) > 1 or names_in(queue, "processing"):
                odd.append(len(done))
    return odd


def _noted(done: list[str], verb: Callable[[], None]) -> None:
    with suppress(LeaseLost):
        verb()
        done.append("settled")


def _fill(queue: Queue, count: int) -> None:
    """Leave nothing in a queue but so many new messages."""
    for state in ("target", "processing", "processed"):
        for name in names_in(queue, state):
            (base(queue) / state / name).unlink()
    queue.send_many([b'{"p": 1}'] * count)


@contextmanager
def _after_a_moment(handler: Callable[[], object], longest: float) -> Iterator[None]:
    """Call a handler at a moment within the block, or at its end."""
    signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, longest))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _again_and_again(handler: Callable[[], object]) -> Iterator[None]:
    """Call a handler at random moments within the block, once at a time."""

    def handle(*_: object) -> None:
        handler()
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.002))

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0001)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize(
    "options", first_and_long([{"max_backlog": 100, "priority": "/p"}, {}]), ids=["with policies", "plain"]
)
@pytest.mark.parametrize(
    "handler",
    [
        closes_while_it_receives,
        closes_while_it_acknowledges,
        sends_while_it_sends,
        receives_while_it_receives,
        acknowledges_what_its_thread_settles,
    ],
)
def test_a_handler_may_come_at_any_moment(
    tmp_path: Path, handler: Callable[[Queue], object], options: dict[str, Any]
) -> None:
    queue = make_queue(tmp_path, history=False, **options)

    def run() -> object:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        return handler(queue)

    assert in_child(run) == []


# -- what they are made of ---------------------------------------------------------------------------------------------


def test_ids_that_a_handler_makes_in_the_middle_of_another_are_others_and_all_later_ones_are_greater() -> None:
    """It comes where one can: as a call that the making of an id makes has returned."""
    made: list[str] = []
    inside = False

    def interrupted() -> None:
        nonlocal inside
        if not inside:
            inside = True
            made.extend([ids.next(), *ids.take(3), ids.next()])
            inside = False

    class Random(random.Random):
        def getrandbits(self, k: int, /) -> int:
            interrupted()
            return super().getrandbits(k)

    class Lock:
        """A lock that lets a signal handler in when it is taken, and when it is given back."""

        def __enter__(self) -> None:
            interrupted()

        def __exit__(self, *exc: object) -> None:
            interrupted()

    def now_ms() -> int:
        interrupted()
        return 1_700_000_000_000

    ids = IdSource(now_ms, Random())
    ids._lock = Lock()  # type: ignore[assignment]
    for make in (ids.next, lambda: ids.take(5)[-1]):
        for _ in range(20):
            made.append(make())
            latest = max(made)
            made.append(ids.next())
            assert made[-1][:16] > latest[:16] or made[-1] == max(made)
    numbers = [one[:16] for one in made]
    assert len(set(numbers)) == len(numbers)


def test_a_handler_that_raises_in_an_attempt_leaves_a_subscription_that_can_try_again(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def interrupted() -> list[bytes]:
        queue = make_queue(tmp_path)
        between = InTheMiddle()
        come_between(between)

        def stop() -> None:
            raise Stop

        bodies: list[bytes] = []
        for at in range(200):
            queue.send(b"a")
            with queue.subscribe() as subscription:
                between.at, between.do = at, stop
                try:
                    message = subscription.receive()
                except Stop:
                    pass
                else:
                    reached, between.at = between.at < 0, -1
                    assert message is not None and not reached
                    return bodies
                while (message := subscription.receive()) is not None:
                    bodies.append(message.body)
                    message.ack()
            assert "processing" not in where(queue)
            for waiting in iter(queue.receive, None):
                waiting.ack()
            queue.close()
        return []

    assert len(in_child(interrupted)) > 5
