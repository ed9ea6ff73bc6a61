"""Who may settle what, where leasing is `sublet` and where it is `strict`: each verb, in Python and as a command.

A receipt proves a claim, whoever shows it. By a message's id anybody settles anything where leasing is `sublet`; where
it is `strict` a client settles what it holds itself, and acknowledges what nobody holds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from actors import finish, said, start
from children import in_child
from helpers import Clock, Make, base, files, reopened, take, where

from dropq import LeaseLost, Message, Queue
from dropq.cli.main import main as cli
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.queue import by_id
from dropq.queue.browsing import bearing

Leasing = Literal["sublet", "strict"]

LEASINGS: tuple[Leasing, ...] = ("sublet", "strict")
#: Each verb, and the state that it leaves the message in.
VERBS: dict[str, tuple[Callable[[Message], None], str]] = {
    "ack": (Message.ack, "processed"),
    "nack": (Message.nack, "target"),
    "fail": (lambda message: message.fail("r"), "error"),
    "reject": (lambda message: message.reject("r"), "error"),
    "extend": (lambda message: message.extend("5m"), "processing"),
}


def everything(queue: Queue) -> dict[str, list[str]]:
    """The file names in each state, as plain system calls see them."""
    return {state: sorted(files(base(queue) / state)) for state in ("target", "processing", "processed", "error")}


def command(queue: Queue, verb: str, named: str) -> int:
    """Run a verb as a command of another process; return its exit code."""
    code: int = in_child(lambda: cli(["--root", str(queue.root.path), verb, "q", named]))
    return code


def settled(queue: Queue, verb: str, named: str) -> bool:
    """Whether another process could do that to a message, by its receipt or its id; if not, nothing has changed."""
    before = everything(queue)

    def act() -> bool:
        try:
            VERBS[verb][0](reopened(queue).claimed(named))
        except LeaseLost:
            return False
        return True

    done = in_child(act)
    assert (everything(queue) != before) is done
    return done


each_verb = pytest.mark.parametrize("verb", VERBS)
each_leasing = pytest.mark.parametrize("leasing", LEASINGS)


def held(make: Make, leasing: Leasing, **options: str) -> tuple[Queue, Message]:
    """A queue, and the one message in it, which the queue's own subscription holds."""
    queue = make(leasing=leasing, lease_period="1m", **options)
    queue.send(b"a")
    return queue, take(queue)


# -- by a receipt ------------------------------------------------------------------------------------------------------


@each_leasing
@each_verb
def test_a_receipt_settles_from_any_process(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    assert settled(queue, verb, str(message.receipt))
    assert where(queue) == {VERBS[verb][1]: [b"a"]}


@each_leasing
@each_verb
def test_a_receipt_settles_in_the_process_that_holds_it(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    VERBS[verb][0](queue.claimed(str(message.receipt)))
    assert where(queue) == {VERBS[verb][1]: [b"a"]}


@each_leasing
@each_verb
def test_a_receipt_settles_on_the_command_line(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    assert command(queue, verb, str(message.receipt)) == 0
    assert where(queue) == {VERBS[verb][1]: [b"a"]}


@each_leasing
@each_verb
def test_a_receipt_whose_lease_ran_out_settles_until_somebody_swept(
    make: Make, clock: Clock, leasing: Leasing, verb: str
) -> None:
    for swept in (False, True):
        queue, message = held(make, leasing)
        clock.advance(61)
        if swept:
            queue.sweep()
        assert settled(queue, verb, str(message.receipt)) is not swept


@each_leasing
@each_verb
def test_a_receipt_of_what_is_settled_changes_nothing(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    receipt = str(message.receipt)
    message.ack()
    assert not settled(queue, verb, receipt)
    assert command(queue, verb, receipt) == 1
    assert where(queue) == {"processed": [b"a"]}


# -- by an id ----------------------------------------------------------------------------------------------------------


@each_leasing
@each_verb
def test_an_id_settles_what_one_holds_oneself(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    VERBS[verb][0](queue.claimed(message.id))
    assert message.state == VERBS[verb][1], "it is one message, not two views of it"
    assert where(queue) == {VERBS[verb][1]: [b"a"]}


@each_leasing
@each_verb
def test_an_id_settles_what_another_holds_where_leasing_is_sublet_only(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    assert settled(queue, verb, message.id) is (leasing == "sublet")
    assert where(queue) == {VERBS[verb][1] if leasing == "sublet" else "processing": [b"a"]}


@each_leasing
@each_verb
def test_an_id_on_the_command_line_settles_what_another_holds_where_leasing_is_sublet_only(
    make: Make, leasing: Leasing, verb: str
) -> None:
    queue, message = held(make, leasing)
    before = everything(queue)
    assert command(queue, verb, message.id) == (0 if leasing == "sublet" else 1)
    assert (everything(queue) == before) is (leasing == "strict")


@each_leasing
@each_verb
def test_an_id_of_what_is_settled_changes_nothing(make: Make, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    message.ack()
    assert not settled(queue, verb, message.id)
    assert command(queue, verb, message.id) == 1
    assert where(queue) == {"processed": [b"a"]}


@each_leasing
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "ack"])
def test_what_waits_is_if_ended_to_give_back_refuse_or_renew(make: Make, leasing: Leasing, verb: str) -> None:
    queue = make(leasing=leasing)
    sent = queue.send(b"a")
    assert not settled(queue, verb, sent.id)
    assert command(queue, verb, sent.id) == 1
    assert where(queue) == {"target": [b"a"]}


@each_leasing
@each_verb
def test_a_lapsed_lease_is_anothers_still_but_for_an_ack(make: Make, clock: Clock, leasing: Leasing, verb: str) -> None:
    queue, message = held(make, leasing)
    clock.advance(61)
    assert settled(queue, verb, message.id) is (leasing == "sublet")


# -- queue.ack(id) -----------------------------------------------------------------------------------------------------


@each_leasing
def test_an_ack_by_id_takes_what_one_holds_oneself(make: Make, leasing: Leasing) -> None:
    queue, message = held(make, leasing)
    assert queue.ack(message.id)
    assert message.state == "processed"
    assert not queue.ack(message.id), "it is settled"


@each_leasing
def test_an_ack_by_id_of_what_another_holds_has_no_effect_where_leasing_is_strict(make: Make, leasing: Leasing) -> None:
    queue, message = held(make, leasing)
    assert in_child(lambda: reopened(queue).ack(message.id)) is (leasing == "sublet")
    if leasing == "strict":
        message.ack()
    else:
        with pytest.raises(LeaseLost):
            message.ack()
    assert where(queue) == {"processed": [b"a"]}


@each_leasing
def test_a_child_after_a_fork_does_not_hold_what_its_parent_does(make: Make, leasing: Leasing) -> None:
    queue, message = held(make, leasing)
    assert in_child(lambda: queue.ack(message.id)) is (leasing == "sublet")


@each_leasing
def test_anybody_acknowledges_what_waits_by_its_id(make: Make, leasing: Leasing) -> None:
    queue = make(leasing=leasing)
    first, second = queue.send_many([b"a", b"b"])
    assert in_child(lambda: reopened(queue).ack(first.id))
    assert command(queue, "ack", second.id) == 0
    assert where(queue) == {"processed": [b"a", b"b"]}


@each_leasing
def test_anybody_acknowledges_what_a_lease_ran_out_of_also_before_a_sweep(
    make: Make, clock: Clock, leasing: Leasing
) -> None:
    queue, message = held(make, leasing, redelivery_delay="1h")
    clock.advance(61)
    assert in_child(lambda: reopened(queue).ack(message.id))
    with pytest.raises(LeaseLost):
        message.ack()
    assert where(queue) == {"processed": [b"a"]}


def test_a_lease_that_is_renewed_in_the_last_moment_is_its_holders(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, message = held(make, "strict")
    clock.advance(61)
    other = reopened(queue)
    nobodys = by_id._if_ended

    def renewed_meanwhile(*args: Any) -> object:
        found = nobodys(*args)
        message.extend("1m")
        return found

    monkeypatch.setattr(by_id, "_if_ended", renewed_meanwhile)
    assert other.ack(message.id) is False
    message.ack()


@each_leasing
def test_anybody_acknowledges_what_a_dead_consumer_held(make: Make, tmp_path: Path, leasing: Leasing) -> None:
    queue = make(leasing=leasing)
    sent = queue.send(b"a")
    holder = start("hold", queue.root.path, tmp_path / "notes", 1)
    try:
        assert said(holder) == "holding"
        if leasing == "strict":
            assert not queue.ack(sent.id)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
        assert queue.ack(sent.id)
        assert where(queue) == {"processed": [b"a"]}
    finally:
        finish(holder)


@each_leasing
def test_an_id_of_nothing_is_nothing(make: Make, leasing: Leasing) -> None:
    queue = make(leasing=leasing)
    assert queue.ack("nothing") is False
    assert command(queue, "ack", "nothing") == 1


def test_strict_leasing_lets_only_the_receipt_settle_and_sublet_lets_the_id(make: Make) -> None:
    strict, sublet = make(leasing="strict"), make(leasing="sublet")
    for queue in (strict, sublet):
        sent = queue.send(b"a")
        message = take(queue)
        other = reopened(queue)
        if queue is strict:
            with pytest.raises(LeaseLost):
                other.claimed(sent.id)
            assert not other.ack(sent.id)
            assert where(queue) == {"processing": [b"a"]}
            assert message.receipt is not None
            other.claimed(message.receipt).ack()
        else:
            assert other.ack(sent.id)
        assert where(queue) == {"processed": [b"a"]}
        assert not other.ack(sent.id)


def test_an_ack_by_id_takes_a_message_that_waits(make: Make) -> None:
    queue = make()
    ids = [sent.id for sent in queue.send_many([b"a", b"b"])]
    assert queue.ack(ids[1])
    assert where(queue) == {"target": [b"a"], "processed": [b"b"]}
    assert not queue.ack("nothing")


@pytest.mark.parametrize("leasing", LEASINGS)
def test_an_ack_by_id_meets_a_message_that_is_claimed_while_it_looks(
    make: Make, monkeypatch: pytest.MonkeyPatch, leasing: Leasing
) -> None:
    queue = make(leasing=leasing)
    sent = queue.send(b"a")
    consumer = reopened(queue).subscribe()
    claimed = list[Message | None]()

    def then_claimed(context: QueueContext, state: str, message_id: str) -> list[MessageFile]:
        if state == "delayed" and not claimed:
            claimed.append(consumer.receive())
        return bearing(context, state, message_id)

    monkeypatch.setattr(by_id, "bearing", then_claimed)
    assert queue.ack(sent.id) is (leasing == "sublet")
    assert where(queue) == {"processed" if leasing == "sublet" else "processing": [b"a"]}
