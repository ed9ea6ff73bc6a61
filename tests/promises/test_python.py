"""The Python interface: loops that cannot hang on themselves, JSON, and the public names."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from helpers import Clock, make_queue, take, until, where

import dropq
from dropq import BacklogReached, DropqError, Message, NoSuchQueue, Queue, Root
from dropq.cli import output
from dropq.diagnosis.health import MAX_ERROR


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with make_queue(tmp_path) as queue:
        yield queue


# -- a loop over a subscription ----------------------------------------------------------------------------------------


def test_a_loop_that_does_not_settle_its_message_is_told_so_instead_of_waiting_for_itself(queue: Queue) -> None:
    sent = queue.send_many([b"a", b"b"])
    with queue.subscribe() as subscription:
        with pytest.raises(BacklogReached, match=rf"{sent[0].id}.*ack each.*`with message:`.*max_backlog$") as raised:
            list(subscription)
        assert where(queue) == {"processing": [b"a"], "target": [b"b"]}
        subscription.held[0].ack()
        assert next(iter(subscription)).body == b"b"  # settled: the next loop goes on
    assert output.exit_code(raised.value) == 75


def test_a_loop_may_hold_as_many_as_its_backlog_and_the_error_names_the_first_of_them(queue: Queue) -> None:
    sent = queue.send_many([b"%d" % number for number in range(6)])
    with queue.subscribe(max_backlog=5) as subscription:
        with pytest.raises(BacklogReached) as raised:
            list(subscription)
        assert [message.body for message in subscription.held] == [b"0", b"1", b"2", b"3", b"4"]
    assert ", ".join(one.id for one in sent[:3]) + " and 2 more" in str(raised.value)
    assert sent[3].id not in str(raised.value)


def test_a_second_loop_of_the_thread_does_not_wait_for_what_the_first_left(queue: Queue) -> None:
    queue.send_many([b"a", b"b"])
    with queue.subscribe() as subscription:
        assert [message.body for message in islice(subscription, 1)] == [b"a"]
        with pytest.raises(BacklogReached):
            next(iter(subscription))


@pytest.mark.parametrize("settles", ["ack", "nack", "with"])
def test_a_loop_that_settles_each_message_goes_on(queue: Queue, settles: str) -> None:
    queue.send_many([b"a", b"b", b"c"])
    seen = []
    with queue.subscribe() as subscription:
        for message in subscription:
            seen.append(message.body)
            if settles == "with":
                with message:
                    pass
            else:
                getattr(message, settles)()
            if len(seen) == 3:
                break
    assert len(seen) == 3


def test_a_loop_waits_for_what_another_thread_received(queue: Queue) -> None:
    queue.send_many([b"a", b"b"])
    seen: list[bytes] = []

    def loop() -> None:
        for message in subscription:
            seen.append(message.body)
            message.ack()
            return

    with queue.subscribe() as subscription:
        held = subscription.receive()
        assert held is not None
        thread = threading.Thread(target=loop)
        thread.start()
        until(lambda: subscription._waiting.waits, "the loop waits for the other thread")
        assert seen == []
        held.ack()
        thread.join(10)
    assert seen == [b"b"]


def test_a_loop_goes_on_where_the_lease_of_what_it_left_ran_out(tmp_path: Path) -> None:
    clock = Clock()
    with make_queue(tmp_path, clock=clock) as queue:
        queue.send_many([b"a", b"b"])
        with queue.subscribe(lease_period="5s") as subscription:
            assert next(iter(subscription)).body == b"a"
            clock.advance(6)
            assert next(iter(subscription)).body in (b"a", b"b")


def test_a_cap_of_the_queue_is_named_where_it_is_what_stops_the_loop(tmp_path: Path) -> None:
    with make_queue(tmp_path, max_per_subscription_backlog=1) as queue:
        queue.send(b"a")
        with (
            queue.subscribe(max_backlog=5) as subscription,
            pytest.raises(BacklogReached, match="a larger max_per_subscription_backlog of the queue"),
        ):
            list(subscription)


def test_a_loop_ends_where_its_subscription_is_closed_while_a_message_is_handled(queue: Queue) -> None:
    queue.send_many([b"a", b"b"])
    with queue.subscribe() as subscription:
        for message in subscription:
            message.ack()
            subscription.close()
        with pytest.raises(DropqError, match="is closed"):
            next(iter(subscription))
    assert where(queue) == {"processed": [b"a"], "target": [b"b"]}


def test_a_loop_at_most_once_has_nothing_to_settle(tmp_path: Path) -> None:
    with make_queue(tmp_path, semantics="at-most-once") as queue:
        queue.send_many([b"a", b"b"])
        with queue.subscribe() as subscription:
            assert [message.body for message in islice(subscription, 2)] == [b"a", b"b"]


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_a_value_is_sent_as_compact_json_in_utf_8_and_comes_back_as_it_was(queue: Queue) -> None:
    value = {"item": 7, "name": "Bär", "tags": ["a", None, True, 1.5]}
    sent = queue.send_json(value, priority=6, properties={"n": 3}, message_id="j")
    assert sent.accepted
    message = take(queue)
    assert message.body == '{"item":7,"name":"Bär","tags":["a",null,true,1.5]}'.encode()
    assert (message.id, message.priority, message.message_class, message.properties) == ("j", 6, "T", {"n": 3})
    assert message.json() == value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, float("nan")]}, r"the value\['a'\]\[1\] cannot be JSON: nan"),
        (float("inf"), "the value cannot be JSON: inf"),
        ({"when": datetime(2026, 1, 2)}, r"the value\['when'\] cannot be JSON: datetime"),
        ([b"bytes"], r"the value\[0\] cannot be JSON: b'bytes'"),
        ({(1, 2): 3}, r"the value cannot be JSON: \{\(1, 2\): 3\}"),
        ("\ud800", "the value cannot be JSON"),
        (cast("Any", lambda: None), "the value cannot be JSON: <function"),
    ],
)
def test_what_cannot_be_json_is_named_and_not_sent(queue: Queue, value: object, named: str) -> None:
    with pytest.raises(ValueError, match=rf"send_json: {named}.*; nothing was sent$"):
        queue.send_json(value)
    assert where(queue) == {}


def test_a_value_that_holds_itself_or_is_too_deep_is_refused(queue: Queue) -> None:
    loop: list[object] = []
    loop.append(loop)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (loop, deep):
        with pytest.raises(ValueError, match="cannot be JSON"):
            queue.send_json(value)
    assert where(queue) == {}


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 100_000, b"1 2"])
def test_a_body_that_is_not_json_is_told_with_its_message(queue: Queue, body: bytes) -> None:
    queue.send(body, message_id="m")
    message = take(queue)
    with pytest.raises(ValueError, match=r"^message m: its body is not JSON: ."):
        message.json()
    assert message.held


# -- what a handler says -----------------------------------------------------------------------------------------------


def test_a_handler_that_cannot_work_at_all_ends_the_worker_and_its_message_goes_back_uncounted(queue: Queue) -> None:
    queue.send_many([b"a", b"b"])

    def handler(message: Message) -> None:
        raise dropq.Halt("the database is down")

    report = dropq.work(queue, handler, until_empty=True)
    assert (report.halted, report.returned) == ("the database is down", 1)
    assert [message.delivery_count for message in queue.browse()] == [0, 0]


def test_a_handler_that_is_cancelled_says_so_and_its_message_goes_back_uncounted(queue: Queue) -> None:
    queue.send(b"a")
    stop = dropq.Stop()

    class Handler:
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def __call__(self, message: Message) -> None:
            stop.ask()
            stop.ask()
            assert self.cancelled.wait(60)
            raise dropq.Cancelled

        def cancel(self, message: Message) -> None:
            self.cancelled.set()

    report = dropq.work(queue, Handler(), stop=stop)
    assert (report.returned, report.failed, report.stopped) == (1, 0, True)
    assert [message.delivery_count for message in queue.browse()] == [0]


# -- what administrators do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["requeue", "purge", "expire", "replay"])
def test_one_id_that_is_no_list_is_not_taken_letter_by_letter(queue: Queue, verb: str) -> None:
    with pytest.raises(ValueError, match=r"give \['an-id'\]; nothing was changed"):
        list(getattr(queue, verb)(ids="an-id"))


def test_what_cannot_be_sent_is_named(queue: Queue) -> None:
    with pytest.raises(TypeError, match="a body is bytes or str, not dict: `send_json` sends JSON"):
        queue.send({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a body is bytes or str, not int"):
        queue.send_many([{"body": 5}])
    with pytest.raises(ValueError, match="property 'a': a property is a bool, int, float or str, not list"):
        queue.send("x", properties={"a": [1]})
    with pytest.raises(ValueError, match="priority 'high': an integer"):
        queue.send("x", priority="high")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"root.queue\('q'\) returns it"):
        dropq.work("q", print)  # type: ignore[arg-type]
    assert where(queue) == {}


def test_messages_are_moved_to_another_queue_as_they_are(queue: Queue) -> None:
    other = queue.root.create_queue("other", durability="none")
    first, second = queue.send_many([b"a", b"b"])
    assert [outcome.detail for outcome in queue.move(other, [first.id], dry_run=True)] == ["would be moved to other"]
    assert [(outcome.id, outcome.ok) for outcome in queue.move(other, [first.id])] == [(first.id, True)]
    assert (where(queue), where(other)) == ({"target": [b"b"]}, {"target": [b"a"]})
    take(queue).reject("r")
    assert [outcome.id for outcome in queue.move(other, state="error")] == [second.id]
    assert where(other) == {"target": [b"a", b"b"]}


def test_messages_are_removed_by_choice_and_by_age(tmp_path: Path) -> None:
    clock = Clock()
    with make_queue(tmp_path, clock=clock) as queue:
        queue.send_many([b"a", {"body": b"b", "type": "x"}])
        assert [outcome.ok for outcome in queue.purge(older_than="1h")] == []
        assert [outcome.ok for outcome in queue.purge(filter="JMSType = 'x'")] == [True]
        assert where(queue) == {"target": [b"a"]}
        clock.advance(7200)
        assert [outcome.ok for outcome in queue.purge(older_than="1h")] == [True]
        assert where(queue) == {}


def test_a_history_is_pruned_to_a_count(queue: Queue) -> None:
    queue.send_many([b"a", b"b", b"c"])
    for _ in range(3):
        take(queue).ack()
    assert len(queue.prune(keep_count=1, dry_run=True)) == 2
    assert [outcome.detail for outcome in queue.prune(keep_count=1)] == ["removed", "removed"]
    assert queue.counts()["processed"] == 1


def test_a_queue_and_its_root_report_how_they_are(queue: Queue) -> None:
    queue.send(b"a")
    assert queue.health().healthy
    assert [reason.kind for reason in queue.health(max_count=0).reasons] == ["many-waiting"]
    assert [(one.queue, one.healthy) for one in queue.root.health()] == [("q", True)]
    assert {one.kind for one in queue.doctor()} <= {one.kind for one in queue.root.doctor()}
    assert queue.root.doctor()[0].kind == "root"
    with pytest.raises(NoSuchQueue):
        queue.root.queue("none").doctor()


def test_the_limits_of_health_are_those_of_its_room() -> None:
    for verb in (Queue.health, Root.health):
        assert inspect.signature(verb).parameters["max_error"].default == MAX_ERROR


# -- what is public ----------------------------------------------------------------------------------------------------

#: What a queue or a root has for dropq's own modules, of types that are theirs.
FOR_DROPQ = {"context", "layout", "config"}


def test_every_public_name_is_known_to_the_type_checker_and_lies_where_it_is_looked_for() -> None:
    checked = {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(str(dropq.__file__)).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dropq.")
        for alias in node.names
    }
    homes = {name: f"dropq.{dropq._HOMES.get(name, 'errors')}" for name in dropq.__all__}
    assert homes == checked
    assert dropq._HOMES.keys() <= set(dropq.__all__)
    for name in dropq.__all__:
        assert getattr(dropq, name) is getattr(import_module(homes[name]), name)


def verbs() -> Iterator[tuple[str, Any]]:
    """Yield the public functions, methods and properties, each with its name."""
    for name in dropq.__all__:
        thing = getattr(dropq, name)
        if inspect.isfunction(thing):
            yield name, thing
        for member, value in inspect.getmembers_static(thing) if isinstance(thing, type) else ():
            if not member.startswith("_") and member not in FOR_DROPQ:
                plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if inspect.isfunction(plain):
                    yield f"{name}.{member}", inspect.unwrap(plain)


def fields() -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of the public records: record and field, the record, and the type as it is written."""
    for name in dropq.__all__:
        thing = getattr(dropq, name)
        for field in getattr(thing, "__dataclass_fields__", getattr(thing, "_fields", ())):
            if not field.startswith("_"):
                said = thing.__annotations__[field]
                yield f"{name}.{field}", thing, getattr(said, "__forward_arg__", said)


def classes(hint: object) -> Iterator[type]:
    """Yield the classes of dropq that a type is made of."""
    if isinstance(hint, type) and hint.__module__.startswith("dropq"):
        yield hint
    for part in get_args(hint):
        yield from classes(part)


def test_what_public_verbs_return_is_public() -> None:
    public = {name: getattr(dropq, name) for name in dropq.__all__}
    looked_at, hidden = set(), set()
    for name, verb in verbs():
        said = verb.__annotations__.get("return")
        hint = eval(said, {**verb.__globals__, **public}) if isinstance(said, str) else said  # an unknown name raises
        for kind in classes(hint):
            looked_at.add(kind.__name__)
            if public.get(kind.__name__) is not kind:
                hidden.add(f"{name} returns {kind.__name__}")
    assert {"Health", "Diagnosis", "Finding", "Explanation", "Outcome", "WorkReport", "Message"} <= looked_at
    assert hidden == set()


def test_what_the_fields_of_public_records_hold_is_public() -> None:
    public = {name: getattr(dropq, name) for name in dropq.__all__}
    looked_at, hidden = set(), set()
    for name, record, said in fields():
        looked_at.add(name)
        for kind in classes(eval(said, {**vars(sys.modules[record.__module__]), **public})):  # an unknown name raises
            if public.get(kind.__name__) is not kind:
                hidden.add(f"{name} holds {kind.__name__}")
    assert {"Sent.id", "Health.reasons", "Explanation.message", "WorkReport.left"} <= looked_at
    assert hidden == set()


def test_every_exception_is_public() -> None:
    modules = [module.name for module in pkgutil.walk_packages(dropq.__path__, "dropq.")]
    others = ("dropq.spark", "dropq.web", "dropq.zmq", "dropq.cli", "dropq.__main__")
    library = {name for name in modules if not name.startswith(others)}
    for name in library:
        import_module(name)
    waiting: list[type[BaseException]] = [Exception]
    found = set[str]()
    while waiting:
        waiting = [inner for kind in waiting for inner in kind.__subclasses__()]
        found |= {kind.__name__ for kind in waiting if kind.__module__ in library and not kind.__name__.startswith("_")}
    # Readers by records catch the one, and set the message aside; those who do not wait for room catch the other.
    # Who carries messages keeps what the third says beside their row; to users it is a StorageError. Of those of what
    # work makes, a worker catches the one, and the other is a ValueError to users. The last two are an Unavailable
    # and a StorageError to them.
    found -= {"Unreadable", "MustWait", "OlderState", "NotSent", "TooManyOutputs", "Missing", "ReadFailed"}
    assert {"DropqError", "LeaseLost", "Retry"} <= found <= set(dropq.__all__)
