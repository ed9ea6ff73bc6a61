"""What a queue's policies promise: limits of what is held, turns, barriers, and who may die meanwhile.

Processes race, are killed in the middle, and lose their lock file; what lies where is read with plain system calls.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import pytest
from actors import said, start
from filelock import FileLock
from helpers import FRESH, Clock, base, make_queue, names_in, reopened, take, until, where

from dropq import ConfigError, LeaseLost, Message, Queue, StorageError, work
from dropq.format.message_file import MessageFile
from dropq.lifecycle.timing import Timing
from dropq.policies.backlog import Backlog
from dropq.staging.stream_journal import check_semantics
from dropq.storage import reading
from dropq.storage.files import Storage

Actor = Popen[bytes]
BARRIER = "JMSType = 'sync'"


def processed(queue: Queue) -> int:
    return len(os.listdir(base(queue) / "processed"))


def private(queue: Queue, name: str) -> list[str]:
    folder = base(queue) / ".dropq" / name
    return sorted(os.listdir(folder)) if folder.exists() else []


#: A message is left to whose turn it is, who has all the time to come for it.
LEFT = Timing(turn_patience=3600, turns_wait=3600)


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_a_queue_without_policies_has_no_lock_and_no_turns(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    take(queue).ack()
    queue.sweep()
    private = base(queue) / ".dropq"
    assert not (private / "lock").exists()
    assert {entry.name for entry in private.iterdir() if entry.is_file() or os.listdir(entry)} == {
        "consumers",
        "created",
        "reasons",
        *(entry.name for entry in private.glob("queue-*")),
    }


@pytest.mark.parametrize("removed", [False, True], ids=["the lock file stays", "the lock file is taken away"])
def test_no_more_than_max_backlog_are_held_by_consumers_of_whom_some_are_killed(
    tmp_path: Path, stage: list[Actor], removed: bool
) -> None:
    queue = make_queue(tmp_path / "root", max_backlog=2)
    queue.send_many([str(number) for number in range(300)])
    notes = tmp_path / "notes"
    consumers = [start("limited", tmp_path / "root", notes, 2) for _ in range(4)]
    stage += consumers
    for done in range(20, 300, 40):
        until(lambda done=done: processed(queue) >= done, f"{done} messages to be processed", timeout=30)  # type: ignore[misc]
        if removed:
            # It is missing where nobody asked for it since the last time.
            (base(queue) / ".dropq" / "lock").unlink(missing_ok=True)
        victim = consumers.pop(0)
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        consumers.append(start("limited", tmp_path / "root", notes, 2))
        stage.append(consumers[-1])
    until(lambda: processed(queue) == 300, "all messages to be processed", timeout=30)
    assert os.listdir(notes / "violations") == []
    assert set(Counter(name.rpartition(".")[0] for name in os.listdir(notes / "acked")).values()) == {1}
    assert where(queue).keys() == {"processed"}


def test_who_waits_is_given_a_message_soon_after_another_is_settled(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b"])
    message = take(queue)
    with reopened(queue).subscribe() as other:
        assert other.receive(0.2) is None
        threading.Timer(0.2, message.ack).start()
        found = other.receive(10)
        assert found is not None
        assert found.body == b"b"


def test_what_a_script_has_claimed_counts_as_held(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b"])
    name = names_in(queue, "target")[0]
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / name)
    assert queue.receive() is None
    os.rename(base(queue) / "processing" / name, base(queue) / "processed" / name)
    assert take(queue).body == b"b"


def test_what_expires_while_it_is_held_makes_room_without_a_sweep_of_all(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock, timing=FRESH, max_backlog=1)
    queue.send(b"a", expires_in="10s")
    queue.send(b"b")
    message = take(queue)
    with reopened(queue).subscribe() as other:
        assert other.receive() is None
        clock.advance(11)
        found = other.receive()
        assert found is not None
        assert found.body == b"b"
    with pytest.raises(LeaseLost):
        message.ack()
    assert where(queue) == {"expired": [b"a"], "target": [b"b"]}


def test_who_has_the_lock_and_hangs_keeps_others_waiting_and_no_longer_than_it_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, timing=Timing(lock_patience=0.05), max_backlog=1)
    queue.send(b"a")
    os.makedirs(base(queue) / ".dropq", exist_ok=True)
    holder = FileLock(base(queue) / ".dropq" / "lock")
    with holder:
        assert queue.receive() is None
    assert "held by another process" in caplog.text
    assert take(queue).body == b"a"


def test_on_a_file_system_without_locks_messages_are_handed_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    queue = make_queue(tmp_path, max_backlog=2, fairness_model="round-robin", barrier_expression=BARRIER)
    queue.send_many([b"a", {"body": b"b", "type": "sync"}, b"c"])
    monkeypatch.setattr("fcntl.flock", refused)
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        for body in (b"a", b"b", b"c"):
            message = one.receive()
            assert message is not None
            assert message.body == body
            assert [one.receive(), other.receive()] == [None, None]  # a barrier goes to whoever hands it out
            message.ack()
    assert where(queue) == {"processed": [b"a", b"b", b"c"]}
    assert "limits and turns may be missed" in caplog.text


def test_a_claim_made_while_somebody_took_the_lock_file_away_is_given_back_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send(b"a")
    own = take(queue)
    own.nack()
    rename = Storage.rename

    def take_away(self: Storage, source: str, destination: str) -> None:
        rename(self, source, destination)
        if "/processing/" in destination:
            os.unlink(queue.layout.lock)

    monkeypatch.setattr(Storage, "rename", take_away)
    assert queue.receive() is None
    monkeypatch.setattr(Storage, "rename", rename)
    message = take(queue)
    assert (message.delivery_count, message.cancels) == (2, 1)


# -- turns -------------------------------------------------------------------------------------------------------------


#: Nanoseconds that a busy machine may take between an ask and its being seen.
NEAR = 10_000_000


class Grant(NamedTuple):
    """A message that was given: to whom, when it was asked for and given, what its taker held, and might hold."""

    consumer: int
    asked: int
    given: int
    held: int
    allowed: int


def granted(notes: Path) -> list[Grant]:
    found = []
    for number, path in enumerate(sorted((notes / "out").glob("turns.*"))):
        found += [Grant(number, *map(int, line.split())) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda grant: grant.given)


def due(grants: list[Grant], standing: Callable[[Grant], float]) -> Counter[int]:
    """How many each consumer was due: of all that waited, who stands best, and then who was longest without a turn.

    Who asked within the milliseconds before a message was given came, as far as can be told from outside, after it.
    """
    found: Counter[int] = Counter()
    turn: Counter[int] = Counter()
    for number, grant in enumerate(grants, 1):
        waited = [other for other in grants if other.asked + NEAR <= grant.given <= other.given] or [grant]
        found[min(waited, key=lambda one: (standing(one), turn[one.consumer])).consumer] += 1
        turn[grant.consumer] = number
    return found


def played(tmp_path: Path, stage: list[Actor], count: int, *players: tuple[int, int]) -> list[Grant]:
    """Let consumers, each with what it may hold and ms of handling, take so many messages."""
    actors = [start("turns", tmp_path / "root", tmp_path / "notes", *player) for player in players]
    stage += actors
    for actor in actors:
        assert said(actor) == "ready"
    for actor in actors:
        assert actor.stdin is not None
        actor.stdin.write(b"\n")
        actor.stdin.flush()
    for actor in actors:
        actor.wait(120)
    grants = granted(tmp_path / "notes")
    assert len(grants) == count
    return grants


@pytest.mark.parametrize("handling", [(10, 10, 10), (10, 10, 40)], ids=["equal", "one is slow"])
def test_round_robin_gives_equal_turns_to_those_that_wait(
    tmp_path: Path, stage: list[Actor], handling: tuple[int, ...]
) -> None:
    queue = make_queue(tmp_path / "root", fairness_model="round-robin")
    queue.send_many([str(number) for number in range(1000)])
    grants = played(tmp_path, stage, 1000, *((1, ms) for ms in handling))
    was_due, got = due(grants, lambda grant: 0), Counter(grant.consumer for grant in grants)
    assert {one: got[one] for one in got} == {one: pytest.approx(was_due[one], rel=0.1) for one in got}


def test_proportional_gives_to_whoever_holds_the_least_part_of_what_it_may(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root", fairness_model="proportional")
    queue.send_many([str(number) for number in range(1000)])
    grants = played(tmp_path, stage, 1000, (2, 10), (4, 10), (4, 40))
    was_due, got = due(grants, lambda grant: grant.held / grant.allowed), Counter(grant.consumer for grant in grants)
    assert dict(got) == {one: pytest.approx(was_due[one], rel=0.1) for one in got}


def test_of_messages_that_come_one_by_one_each_keeps_its_proportion(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root", fairness_model="proportional")
    players = [start("turns", tmp_path / "root", tmp_path / "notes", allowed, 0) for allowed in (100, 300)]
    stage += players
    for player in players:
        assert said(player) == "ready"
        assert player.stdin is not None
        player.stdin.write(b"\n")
        player.stdin.flush()
    for _ in range(200):
        until(lambda: sum("waits" in name for name in private(queue, "turns")) == 2, "both to wait")
        queue.send(b"next")
        until(lambda: not names_in(queue, "target"), "the message to be taken")
    for player in players:
        player.wait(60)
    got = Counter(grant.allowed for grant in granted(tmp_path / "notes"))
    assert dict(got) == {100: pytest.approx(50, rel=0.1), 300: pytest.approx(150, rel=0.1)}


def test_who_asks_again_and_again_leaves_a_message_to_whoever_waits_longer(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with queue.subscribe(max_backlog=None) as first, reopened(queue).subscribe(max_backlog=None) as second:
        assert first.receive() is None
        assert second.receive() is None
        queue.send_many([b"a", b"b", b"c", b"d"])
        taken: list[tuple[str, bytes]] = []
        other = threading.Thread(target=lambda: taken.extend(("second", m.body) for m in _each(second, 2)))
        other.start()
        taken.extend(("first", message.body) for message in _each(first, 2))
        other.join()
    assert Counter(who for who, _ in taken) == {"first": 2, "second": 2}


def _each(subscription: Any, count: int) -> Iterator[Message]:
    for _ in range(count):
        message = subscription.receive(10)
        assert message is not None
        yield message


def test_who_waits_and_does_not_come_is_passed_over(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with reopened(queue).subscribe() as absent, queue.subscribe(max_backlog=None) as present:
        assert absent.receive() is None
        queue.send_many([b"a", b"b"])
        assert present.receive() is not None
        assert present.receive() is not None
        assert "busy" in "".join(name for name in private(queue, "turns") if name.startswith(absent.id))


def test_who_waits_and_dies_is_not_waited_for(tmp_path: Path, stage: list[Actor]) -> None:
    queue = make_queue(tmp_path / "root", timing=LEFT, fairness_model="round-robin")
    waiter = start("limited", tmp_path / "root", tmp_path / "notes", 1)
    stage.append(waiter)
    until(lambda: any("waits" in name for name in private(queue, "turns")), "the other to wait")
    waiter.kill()
    waiter.wait(10)
    queue.send_many([b"a", b"b"])
    assert [take(queue).body, take(queue).body] == [b"a", b"b"]  # by the second at the latest it is the dead one's turn
    assert len([name for name in private(queue, "turns") if name[0] != "."]) == 1
    queue.sweep()
    assert len(private(queue, "turns")) == 1


def test_a_message_that_the_next_in_turn_does_not_want_is_not_left_to_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=LEFT, fairness_model="round-robin")
    with reopened(queue).subscribe(filter="JMSPriority > 4") as picky, queue.subscribe(max_backlog=None) as other:
        assert picky.receive() is None
        queue.send(b"plain")
        assert other.receive() is not None
        queue.send(b"urgent", priority=9)
        with reopened(queue, Timing(turn_patience=0)).subscribe() as hasty:
            assert hasty.receive() is not None


def test_standings_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with queue.subscribe() as living:
        assert living.receive() is None
        (base(queue) / ".dropq" / "turns" / "gone-0123456789,1,7,waits").touch()
        queue.sweep()
        assert [name.partition(",")[0] for name in private(queue, "turns")] == [living.id]
    assert private(queue, "turns") == []


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_value_of_an_expression_is_the_priority(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, priority="/price * /quantity")
    bodies = ['{"price": 2, "quantity": 3}', "no json", '{"price": 5, "quantity": 4}', '{"price": -1, "quantity": 9}']
    for body in bodies:
        queue.send(body)
    wanted = [bodies[2], bodies[0], bodies[1], bodies[3]]
    assert [message.text for message in queue.browse()] == wanted
    assert [take(queue).text for _ in bodies] == wanted


def test_an_expression_replaces_the_priority_in_the_name(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, priority="rank")
    queue.send(b"low", priority=9, properties={"rank": 1})
    queue.send(b"high", priority=0, properties={"rank": 2})
    assert [take(queue).body, take(queue).body] == [b"high", b"low"]


def test_each_body_is_read_once_for_its_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(tmp_path, priority="/n")
    for number in range(5):
        queue.send(f'{{"n": {number}}}')
    read: list[str] = []
    read_body = reading.read_body

    def noted(path: str, limit: int | None = None) -> bytes:
        read.append(path)
        return read_body(path, limit)

    monkeypatch.setattr(reading, "read_body", noted)
    with queue.subscribe(max_backlog=None) as subscription:
        for _ in range(5):
            subscription._attend_at = subscription._offers._target.fresh_until = 0.0
            assert subscription.receive() is not None
    assert len(read) == 5


def test_the_filter_of_a_queue_leaves_what_does_not_match_untouched(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, filter="/total > 10")
    queue.send('{"total": 5}')
    queue.send('{"total": 50}')
    assert take(queue).text == '{"total": 50}'
    assert queue.receive() is None
    assert where(queue)["target"] == [b'{"total": 5}']
    with queue.subscribe(filter="JMSPriority > 4") as subscription:
        assert subscription.receive() is None


# -- barriers ----------------------------------------------------------------------------------------------------------


def barriers(path: Path, **options: Any) -> Queue:
    return make_queue(path, barrier_expression=BARRIER, **options)


def send(queue: Queue, *bodies: bytes) -> None:
    """Send messages; a body that begins with `sync` is a barrier."""
    for body in bodies:
        queue.send(body, type="sync" if body.startswith(b"sync") else None)


def test_a_barrier_waits_for_all_before_it_goes_to_everybody_and_holds_what_is_behind_it(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"a", b"b", b"sync", b"c")
    with queue.subscribe(max_backlog=None) as one, reopened(queue).subscribe(max_backlog=None) as other:
        before = one.receive_many(2)
        assert [message.body for message in before] == [b"a", b"b"]
        assert [one.receive(), other.receive()] == [None, None]
        before[0].ack()
        before[1].nack()
        assert other.receive() is not None  # b again: it comes before the barrier
        assert one.receive() is None
        other.held[0].ack()
        shares = [one.receive(), other.receive()]
        assert [share.body for share in shares if share] == [b"sync", b"sync"]
        assert [one.receive(), other.receive()] == [None, None]
        assert shares[0] and shares[1]
        shares[0].ack()
        assert [one.receive(), other.receive()] == [None, None]
        assert where(queue)["processing"] == [b"sync"]
        shares[1].ack()
        assert where(queue)["processed"] == [b"a", b"b", b"sync"]
        assert private(queue, "barriers") == []
        last = one.receive()
        assert last is not None
        assert last.body == b"c"


def test_priorities_do_not_carry_a_message_over_a_barrier(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"a", b"sync")
    queue.send(b"urgent", priority=9)
    with queue.subscribe(max_backlog=None) as one:
        first = one.receive()
        assert first is not None
        assert (first.body, one.receive()) == (b"a", None)
        first.ack()
        share = one.receive()
        assert share is not None
        assert (share.body, one.receive()) == (b"sync", None)


def test_a_message_given_back_with_a_delay_keeps_a_barrier_waiting(tmp_path: Path) -> None:
    clock = Clock()
    queue = barriers(tmp_path, clock=clock)
    send(queue, b"a", b"sync")
    with queue.subscribe(max_backlog=None) as one:
        first = one.receive()
        assert first is not None
        first.nack(delay=60)
        assert one.receive() is None
        clock.advance(61)
        queue.sweep()
        again = one.receive()
        assert again is not None
        assert again.body == b"a"


def test_a_barrier_waits_while_nobody_is_subscribed(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    queue.sweep()
    assert where(queue) == {"target": [b"a", b"sync"]}
    assert take(queue).body == b"sync"


@pytest.mark.parametrize("how", ["ack", "reject", "expire"])
def test_a_share_is_settled_as_a_message_is_and_the_barrier_with_the_last(tmp_path: Path, how: str) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        mine, theirs = one.receive(), other.receive()
        assert mine and theirs
        getattr(mine, how)(*(["not mine"] if how == "reject" else []))
        assert where(queue)["processing"] == [b"sync"]
        theirs.ack()
    state = {"ack": "processed", "reject": "error", "expire": "expired"}[how]
    assert where(queue) == {"target": [b"a"], state: [b"sync"]}
    if how == "reject":
        (message,) = queue.browse("error")
        assert message.reason is not None
        assert (message.reason["reason"], message.reason["detail"]) == ("rejected", "not mine")


def test_a_share_that_is_given_back_comes_again_to_the_same_subscription(tmp_path: Path) -> None:
    queue = barriers(tmp_path, max_deliveries=2)
    send(queue, b"sync")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        mine, theirs = one.receive(), other.receive()
        assert mine and theirs
        theirs.ack()
        mine.nack()
        assert other.receive() is None
        again = one.receive()
        assert again is not None
        assert (again.delivery_count, again.redelivered) == (2, True)
        again.nack()
    assert where(queue) == {"error": [b"sync"]}


def test_a_share_whose_lease_runs_out_comes_again_and_its_old_holder_cannot_settle_it(tmp_path: Path) -> None:
    clock = Clock()
    queue = barriers(tmp_path, clock=clock)
    send(queue, b"sync")
    with queue.subscribe(lease_period="10s", max_backlog=None) as one:
        mine = one.receive()
        assert mine is not None
        mine.extend("60s")
        clock.advance(30)
        queue.sweep()
        assert one.receive() is None
        clock.advance(31)
        queue.sweep()
        again = one.receive()
        assert again is not None
        with pytest.raises(LeaseLost):
            mine.ack()
        again.ack()
    assert where(queue) == {"processed": [b"sync"]}


def test_a_share_may_be_settled_by_its_receipt_from_elsewhere_but_not_by_the_id(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe(detached=True, lease_period="1h") as one:
        mine = one.receive()
        assert mine is not None
    elsewhere = reopened(queue)
    with pytest.raises(LeaseLost, match="several hold it"):
        elsewhere.claimed(mine.id)
    assert mine.receipt is not None
    elsewhere.claimed(mine.receipt).ack()
    assert where(queue) == {"processed": [b"sync"]}


def test_who_ends_without_settling_its_share_keeps_nobody_waiting(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    one, other = queue.subscribe(), reopened(queue).subscribe()
    assert one.receive() is not None
    one.close()
    share = other.receive()
    assert share is not None
    share.ack()
    message = other.receive()
    assert message is not None
    assert message.body == b"a"
    other.close()
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}


def test_a_barrier_that_nobody_settled_returns_and_counts_if_anybody_had_it(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe() as one:
        assert one.receive() is not None
    assert where(queue) == {"target": [b"sync"]}
    assert next(queue.browse()).delivery_count == 1


def test_a_barrier_that_is_requeued_by_hand_leaves_nothing_behind(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe(max_backlog=None) as one:
        share = one.receive()
        assert share is not None
        assert [outcome.ok for outcome in queue.requeue(state="processing")] == [True]
        with pytest.raises(LeaseLost):
            share.ack()
        again = one.receive()
        assert again is not None
        again.ack()
    assert where(queue) == {"processed": [b"sync"]}
    assert private(queue, "barriers") == []


def test_a_queue_with_barriers_is_refused_to_readers_that_claim_by_batches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has barriers"):
        check_semantics(barriers(tmp_path).context)


def test_a_barrier_is_refused_where_messages_are_settled_before_they_are_delivered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="barrier_expression and semantics exclude each other"):
        barriers(tmp_path, semantics="at-most-once")


#: What changes files.
CHANGES = ("rename", "link", "make_folder", "unlink", "rename_folder", "remove_tree", "move", "write_small")


def dies(queue: Queue, at: int, *, after: bool) -> bool:
    """Take and ack a message in a process that dies before or after its `at`th change; False when it made fewer."""
    child = os.fork()
    if child == 0:
        try:
            subscription = reopened(queue).subscribe()
            calls = iter(range(10**6))

            def wrapped(self: Storage, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
                last = next(calls) == at
                if last and not after:
                    os._exit(9)
                result = method(self, *args, **options)
                if last:
                    os._exit(9)
                return result

            for name in CHANGES:
                setattr(Storage, name, partialmethod(wrapped, getattr(Storage, name)))
            if (message := subscription.receive()) is not None:
                message.ack()
            os._exit(8)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (8, 9), f"the child ended with {code}"
    return code == 9


@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
def test_a_barrier_is_handed_out_and_settled_whichever_call_its_holder_dies_at(tmp_path: Path, after: bool) -> None:
    for at in range(100):
        queue = barriers(tmp_path / f"root-{at}", timing=FRESH)
        send(queue, b"sync", b"a")
        with reopened(queue).subscribe() as other:
            died = dies(queue, at, after=after)
            share = other.receive(10)
            assert share is not None, f"call {at}: {where(queue)} {private(queue, 'barriers')}"
            assert share.body == b"sync"
            assert where(queue) == {"processing": [b"sync"], "target": [b"a"]}, f"call {at}"
            share.ack()
            message = other.receive(10)
            assert message is not None
            message.ack()
        assert where(queue) == {"processed": [b"a", b"sync"]}, f"call {at}"
        assert [name for name in private(queue, "barriers") if name[0] != "."] == [], f"call {at}"
        if not died:
            break
    else:
        pytest.fail("the child never came to its end")
    assert at > 8


def test_a_claim_of_a_barrier_whose_shares_are_gone_is_returned_by_a_sweep(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    (name,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / f"barrier%-0123456789-0,0,1~{name}")
    assert queue.sweep().barriers == 1
    assert where(queue) == {"target": [b"sync"]}
    assert next(queue.browse()).delivery_count == 0


def test_many_consumers_of_whom_some_are_killed_pass_barrier_after_barrier(tmp_path: Path, stage: list[Actor]) -> None:
    queue = barriers(tmp_path / "root")
    for number in range(10):
        send(queue, *(f"{number}-{n}".encode() for n in range(5)), f"sync-{number}".encode())
    notes = tmp_path / "notes"
    consumers = [start("lane", tmp_path / "root", notes) for _ in range(3)]
    stage += consumers
    for done in (10, 25, 40):
        until(partial(lambda n: processed(queue) >= n, done), f"{done} messages to be processed", timeout=30)
        victim = consumers.pop(0)
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        consumers.append(start("lane", tmp_path / "root", notes))
        stage.append(consumers[-1])
    until(lambda: processed(queue) == 60, "all to be processed", timeout=60)
    assert os.listdir(notes / "violations") == []
    assert where(queue).keys() == {"processed"}
    assert len(set(where(queue)["processed"])) == 60


def refusing(patch: pytest.MonkeyPatch, method: str, part: str) -> None:
    """Let a call of the storage fail where a path has this part: the disk is full."""
    real = getattr(Storage, method)

    def refuse(self: Storage, *args: Any, **options: Any) -> Any:
        if any(part in str(arg) for arg in args):
            raise OSError(errno.ENOSPC, "No space left on device", args[0])
        return real(self, *args, **options)

    patch.setattr(Storage, method, refuse)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("make_folder", "/barriers/"),
        ("link_or_copy", "/barriers/"),
        ("rename_folder", "/barriers/"),
        ("rename", "/processing/"),
    ],
)
def test_a_barrier_that_cannot_be_handed_out_is_not_passed_by(tmp_path: Path, method: str, part: str) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync", b"a")
    with queue.subscribe(max_backlog=None) as one:
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, method, part)
            for _ in range(3):
                with pytest.raises(StorageError):
                    one.receive()
        assert where(queue) == {"target": [b"a", b"sync"]}
        assert len(private(queue, "barriers")) <= 1  # what was staged last, where it was not to be claimed
        share = one.receive()
        assert share is not None
        assert share.body == b"sync"
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, "rename", "/acked/")
            with pytest.raises(StorageError):
                share.ack()
        share.ack()
    assert where(queue) == {"processed": [b"sync"], "target": [b"a"]}
    assert private(queue, "barriers") == []


def test_a_barrier_that_comes_back_is_not_delayed(tmp_path: Path) -> None:
    queue = barriers(tmp_path, redelivery_delay="1h")
    send(queue, b"sync", b"a")
    with queue.subscribe() as one:
        assert one.receive() is not None
    assert where(queue) == {"target": [b"a", b"sync"]}
    assert take(queue).body == b"sync"


def test_an_administrator_s_sweep_leaves_a_barrier_to_those_who_live_and_gives_up_what_nobody_has(
    tmp_path: Path,
) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe() as one:
        share = one.receive()
        assert share is not None
        assert queue.sweep(unleased_older_than=0).total == 0
        assert [finding.kind for finding in queue.fsck()] == []
        os.unlink(base(queue) / ".dropq" / "consumers" / one.id)  # as where a file system has no locks
        assert queue.sweep(unleased_older_than=0).barriers == 1
        assert where(queue) == {"target": [b"sync"]}
        with pytest.raises(LeaseLost):
            share.ack()


def test_a_damaged_word_about_a_share_does_not_keep_a_barrier(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    send(queue, b"sync")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        mine, theirs = one.receive(), other.receive()
        assert mine and theirs
        mine.reject("no")
        (token,) = private(queue, "barriers")
        (base(queue) / ".dropq" / "barriers" / token / ".why.json").write_bytes(b"")
        theirs.ack()
    assert where(queue) == {"error": [b"sync"]}


def test_what_somebody_leaves_among_the_barriers_stops_no_sweep(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    folder = base(queue) / ".dropq" / "barriers"
    (folder / "stray").write_text("x")
    queue.send(b"a")
    with queue.subscribe(lease_period="10s") as one:
        assert one.receive() is not None
        clock.advance(11)
        assert queue.sweep().lapsed == 1
    assert where(queue) == {"target": [b"a"]}


def test_what_is_before_a_barrier_and_not_for_us_keeps_it_waiting(tmp_path: Path) -> None:
    queue = barriers(tmp_path)
    queue.send(b"other's", properties={"kind": "b"})
    send(queue, b"sync", b"a")
    with queue.subscribe(filter="kind = 'a'", max_backlog=None) as one, reopened(queue).subscribe() as other:
        assert one.receive() is None
        message = other.receive()
        assert message is not None
        message.ack()
        shares = one.receive(5), other.receive(5)
        assert [share and share.body for share in shares] == [b"sync", b"sync"]


# -- what is odd -------------------------------------------------------------------------------------------------------


def test_a_standing_that_cannot_be_read_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with reopened(queue).subscribe() as living:
        assert living.receive() is None
        (name,) = private(queue, "turns")
        os.unlink(base(queue) / ".dropq" / "turns" / name)
        (base(queue) / ".dropq" / "turns" / name).mkdir()
        queue.send_many([b"a", b"b"])
        assert [take(queue).body, take(queue).body] == [b"a", b"b"]
    assert "whose turn it is cannot be told" in caplog.text


def test_turns_are_kept_of_a_filter_that_utf_8_cannot_carry(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, fairness_model="round-robin")
    with queue.subscribe(filter="JMSType <> '\ud800' OR JMSType IS NULL") as odd, reopened(queue).subscribe() as other:
        assert [odd.receive(), other.receive()] == [None, None]
        queue.send_many([b"a", b"b"])
        assert [message and message.body for message in (odd.receive(5), other.receive(5))] == [b"a", b"b"]


def test_a_worker_until_empty_waits_for_what_a_full_backlog_keeps_back(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, max_backlog=1)
    queue.send_many([b"a", b"b", b"c"])
    first = take(queue)
    threading.Timer(0.3, first.ack).start()
    report = work(reopened(queue), lambda message: None, until_empty=True)
    assert report.acked == 2
    assert where(queue) == {"processed": [b"a", b"b", b"c"]}


def test_a_listing_that_misses_claims_being_renewed_is_laid_together_with_others() -> None:
    seen = [MessageFile(f"a-0123456789-{number:x},5,1~x{number}") for number in range(150)]
    renewed = [MessageFile(file.filename.replace(",5,", ",9,")) for file in seen]
    limit = Backlog(150)
    assert limit.has_room(seen[:149], lambda: seen[:149])
    assert not limit.has_room(seen[:100], lambda: renewed[60:])
