"""A stream reads each message once, whichever of its runs dies, fails or comes late, and at whichever step.

A run is driven as Spark drives it: the next offset is asked for (which settles what is committed, and claims), written
down in the checkpoint, its messages are read, and the batch is committed. What is where is looked at by plain system
calls.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forks import DIED, forked
from helpers import Clock, RecordingOs, base, drop, files, first_and_long, make_queue, names_in, reopened, take, where
from test_staging import MANY, acting_at, dying_at, failing_at, refuse, steps

from dropq import ConfigError, DropqError, Message, Queue, StorageError
from dropq.format import names
from dropq.queue.stream_journal import Journal
from dropq.storage import system_calls
from dropq.storage.files import Storage

#: Seconds of the leases here, and how far in the past the clock begins: a file's times are those of the real clock, so
#: that what a lease's end is followed by has to come at the present.
LEASE, PAST = 600, 7200
#: The bodies of the longer stories, in the order in which they are delivered, and how many a batch takes.
ALL, LIMIT = [b"0", b"1", b"2", b"foreign"], 2

Read = list[tuple[str, bytes]]


@pytest.fixture
def clock() -> Clock:
    return begun()


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Queue:
    return make_queue(tmp_path, clock=clock)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every step that durability `full` takes, but do not wait for a disk: nothing here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def begun() -> Clock:
    clock = Clock()
    clock.advance(-PAST)
    return clock


def run(queue: Queue, *, stream: str = "s", **options: Any) -> Journal:
    """Begin another run of the stream, as another process does."""
    return announced(reopened(queue), stream, **options)


def announced(queue: Queue, stream: str = "s", **options: Any) -> Journal:
    """Begin another run of the stream on a queue that is open."""
    options = {"client_id": "spark", "max_backlog": None, "lease_period": LEASE, "detached": True, **options}
    return Journal(queue.context, stream, queue.subscribe(**options))


def latest(journal: Journal, start: int, limit: int | None = LIMIT) -> int:
    """Ask for the next offset, as Spark does when all up to `start` is committed."""
    journal.settle(start)
    return start + 1 if journal.next_batch(start + 1, limit) else start


def content(messages: list[Message]) -> Read:
    return [(message.id, message.body) for message in messages]


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


def streams(queue: Queue) -> list[str]:
    """What is written down of streams, by its place, but for the batch that was settled last."""
    folder = base(queue) / ".dropq" / "streams"
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(path for path in found if not re.fullmatch(r"(s|another)(/settled-\d+)?", path))


def swept_in_the_present(queue: Queue, clock: Clock) -> None:
    """Let the present come, in which every lease of the past has run out, and sweep."""
    clock.ms = Clock().ms
    queue.sweep()


def batched(queue: Queue, *sent: bytes) -> Read:
    """Let a run claim a batch of what is sent, and die before it reads it; return what the batch holds."""
    for body in sent:
        queue.send(body)
    journal = run(queue)
    assert journal.next_batch(1, None) == len(sent)
    return content(journal.messages(1))


def test_a_batch_takes_no_further_message_once_it_has_so_many_bytes(queue: Queue) -> None:
    queue.send_many([b"123", b"4567", b"8", b"9"])
    journal = run(queue)
    assert (journal.next_batch(1, None, 4), bodies(journal.messages(1)), journal.size(1)) == (2, [b"123", b"4567"], 7)
    assert (journal.settle(1), journal.next_batch(2, 1, 4), journal.size(2)) == (2, 1, 1)


# -- runs that die or fail at any step ---------------------------------------------------------------------------------


class Checkpoint:
    """What Spark keeps of a query, outside of the queue; and what the query did, batch by batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def write(self, what: str, batch: int, read: Read | None = None) -> None:
        with self.path.open("a") as lines:
            lines.write(json.dumps([what, batch, [[id, body.decode()] for id, body in read or ()]]) + "\n")

    def lines(self, what: str) -> list[tuple[int, Read]]:
        notes = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(batch, [(id, body.encode()) for id, body in read]) for kind, batch, read in notes if kind == what]

    @property
    def offset(self) -> int:
        return max((batch for batch, _ in self.lines("offset")), default=0)

    @property
    def committed(self) -> int:
        return max((batch for batch, _ in self.lines("commit")), default=0)

    def forget_unread(self) -> None:
        """Be as if the driver had died just before it wrote its last offset, if it has read nothing of it yet."""
        if self.offset > max((batch for batch, _ in self.lines("read")), default=0):
            kept = self.path.read_text().splitlines()[:-1]
            self.path.write_text("".join(f"{line}\n" for line in kept))


def listed(queue: Queue, batch: int) -> Read:
    """What a batch holds, by its file and those in processing/ alone."""
    entries = json.loads((base(queue) / ".dropq" / "streams" / "s" / f"{batch}.json").read_text())["claims"]
    held = files(base(queue) / "processing")
    found: dict[str, tuple[str, bytes]] = {}
    for filename, body in held.items():
        claim, name = filename.partition(",")[0].partition("-")[2], names.parse(filename.partition("~")[2])
        found[name.lapsed or claim] = name.id, body
    return [found[entry] for entry in entries]


def go_on(queue: Queue, checkpoint: Checkpoint) -> None:
    """Run the query from its checkpoint until nothing is left: what was not committed is read again first."""
    journal = announced(queue)
    try:
        for batch in range(checkpoint.committed + 1, checkpoint.offset + 1):
            work(journal, batch, checkpoint)
        while (end := latest(journal, checkpoint.offset)) > checkpoint.offset:
            checkpoint.write("offset", end, listed(queue, end))
            work(journal, end, checkpoint)
    finally:
        with suppress(OSError):  # an error is told by what was before
            journal.close()


def work(journal: Journal, batch: int, checkpoint: Checkpoint) -> None:
    checkpoint.write("read", batch, content(journal.messages(batch)))
    journal.renew()
    checkpoint.write("commit", batch)


def nothing(queue: Queue, checkpoint: Checkpoint) -> None:
    """The first run is yet to come."""


def a_batch_that_was_not_committed(queue: Queue, checkpoint: Checkpoint) -> None:
    journal = run(queue)
    checkpoint.write("offset", latest(journal, 0), listed(queue, 1))
    checkpoint.write("read", 1, content(journal.messages(1)))


def a_committed_batch_and_claims_that_were_not_written_down(queue: Queue, checkpoint: Checkpoint) -> None:
    a_batch_that_was_not_committed(queue, checkpoint)
    checkpoint.write("commit", 1)
    run(queue)._claim(1, besides=0)


@pytest.fixture(
    params=[nothing, a_batch_that_was_not_committed, a_committed_batch_and_claims_that_were_not_written_down]
)
def before(request: pytest.FixtureRequest) -> Callable[[Queue, Checkpoint], None]:
    """What an earlier run left."""
    return request.param  # type: ignore[no-any-return]


def story(folder: Path, before: Callable[[Queue, Checkpoint], None]) -> tuple[Queue, Checkpoint]:
    """A queue in which all messages wait, and a stream of it that has come so far."""
    queue = make_queue(folder, clock=begun(), durability="full")
    queue.send_many(ALL[:-1])
    drop(queue, "report.csv", ALL[-1])
    checkpoint = Checkpoint(folder / "checkpoint")
    before(queue, checkpoint)
    again = reopened(queue)
    assert again.context, "it is opened here"
    return again, checkpoint


def check_whole(queue: Queue, what: str) -> None:
    """Each message lies whole in one state folder."""
    lying = where(queue)
    assert sorted(body for found in lying.values() for body in found) == ALL, f"{what}: {lying}"


def check_ended(queue: Queue, checkpoint: Checkpoint, what: str) -> None:
    """Each batch was the same whenever it was read; each message was read in one batch, and is acknowledged once."""
    batches: dict[int, Read] = {}
    for batch, read in [*checkpoint.lines("offset"), *checkpoint.lines("read")]:
        assert read == batches.setdefault(batch, read), f"{what}: batch {batch} was another"
    read_once = Counter(body for read in batches.values() for _, body in read)
    assert read_once == Counter(ALL), what
    assert checkpoint.committed == checkpoint.offset == max(batches), what
    assert where(queue) == {"processed": ALL}, what
    assert streams(queue) == [], what


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize(
    ("offset", "renameat2"), first_and_long([("written", True), ("not written", True), ("written", False)]),
    ids=["offset written", "offset not written", "no renameat2"],
)  # fmt: skip
@pytest.mark.crashes
def test_a_run_that_dies_before_any_step_is_gone_on_with_by_the_next(
    tmp_path: Path,
    before: Callable[[Queue, Checkpoint], None],
    offset: str,
    renameat2: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not renameat2:
        monkeypatch.setattr(system_calls, "rename_noreplace", refuse)
    for step in range(1, MANY):
        queue, checkpoint = story(tmp_path / str(step), before)

        def live(queue: Queue = queue, checkpoint: Checkpoint = checkpoint, step: int = step) -> None:
            with steps(dying_at(step)):
                go_on(queue, checkpoint)

        code = forked(live)
        assert code in (0, DIED), f"step {step}"
        check_whole(queue, f"died before step {step}")
        if offset == "not written" and code:
            checkpoint.forget_unread()
        go_on(queue, checkpoint)
        check_ended(queue, checkpoint, f"died before step {step}")
        if code == 0:
            assert step > 30
            return
    pytest.fail("the run never came to its end")


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.crashes
def test_an_error_at_any_step_of_a_run_is_told_and_the_next_run_goes_on(
    tmp_path: Path, before: Callable[[Queue, Checkpoint], None], when: str
) -> None:
    outcomes = Counter[str]()
    for step in range(1, MANY):
        queue, checkpoint = story(tmp_path / str(step), before)
        reached: list[int] = []
        fault = partial(failing_at(step), step)
        hooks = (fault, None) if when == "before" else (None, fault)
        first, last = (acting_at(step, hook or (lambda: None), reached) for hook in hooks)
        with steps(first, last):
            try:
                go_on(queue, checkpoint)
                outcomes["nothing"] += 1
            except StorageError as error:
                outcomes[f"{type(error).__name__}: {os.strerror(errno.EIO) in str(error)}"] += 1
        check_whole(queue, f"an error {when} step {step}")
        go_on(queue, checkpoint)
        check_ended(queue, checkpoint, f"an error {when} step {step}")
        if not reached:
            break
    else:
        pytest.fail("the run never came to its end")
    assert set(outcomes) == {"nothing", "StorageError: True"}
    assert outcomes["StorageError: True"] > 10, outcomes
    assert outcomes.total() > 30


# -- leases that run out while nobody goes on with the stream ----------------------------------------------------------


@pytest.mark.parametrize("durability", ["none", "full"])
def test_what_a_lapsed_lease_has_returned_is_claimed_again_for_its_batch(
    tmp_path: Path, clock: Clock, durability: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path, clock=clock, durability=durability)
    before = batched(queue, b"0", b"1", b"2")
    swept_in_the_present(queue, clock)
    assert where(queue) == {"target": [b"0", b"1", b"2"]}
    queue.send(b"later", priority=9)
    messages = run(queue).messages(1)
    assert content(messages) == before
    assert [message.delivery_count for message in messages] == [2, 2, 2]
    assert where(queue) == {"processing": [b"0", b"1", b"2"], "target": [b"later"]}
    assert caplog.messages == []
    third = run(queue)
    assert content(third.messages(1)) == before
    assert (latest(third, 1), bodies(third.messages(2))) == (2, [b"later"])
    assert where(queue) == {"processed": [b"0", b"1", b"2"], "processing": [b"later"]}


def test_a_batch_whose_leases_ran_out_is_gone_on_with_where_nobody_has_swept(queue: Queue, clock: Clock) -> None:
    before = batched(queue, b"0", b"1")
    clock.advance(PAST)
    journal = run(queue)
    assert content(journal.messages(1)) == before
    queue.sweep()
    assert where(queue) == {"processing": [b"0", b"1"]}
    assert all(message.delivery_count == 1 for message in journal.messages(1))


@pytest.mark.parametrize("fate", ["held", "settled", "rejected", "claimed by a script", "removed"])
def test_what_others_took_when_its_lease_ran_out_is_left_out_of_its_batch_with_a_warning(
    queue: Queue, clock: Clock, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, second, _ = batched(queue, b"0", b"1", b"2")
    swept_in_the_present(queue, clock)
    file = next(name for name in names_in(queue, "target") if second[0] in name)
    taken = queue.receive() if fate in ("held", "settled", "rejected") else None
    if fate == "claimed by a script":
        os.rename(base(queue) / "target" / file, base(queue) / "processing" / "mine")
    elif fate == "removed":
        (base(queue) / "target" / file).unlink()
    elif taken is not None:
        ends: dict[str, Callable[[], None]] = {"settled": taken.ack, "rejected": partial(taken.reject, "r")}
        ends.get(fate, lambda: None)()
    left = [b"0", b"2"] if taken is None else [b"1", b"2"]
    their_state = {"held": "processing", "settled": "processed", "rejected": "error"}.get(fate)
    journal = run(queue)
    assert bodies(journal.messages(1)) == left
    assert caplog.messages[0].endswith(
        "1 of 3 messages were settled by others, or are held by them, and are not read again"
    )
    assert latest(journal, 1) == 1
    assert where(queue)["processed"] == sorted([*left, *([b"0"] if their_state == "processed" else [])])
    if their_state is not None:
        assert b"0" in where(queue)[their_state]
    if fate == "held" and taken is not None:
        taken.ack()
        assert where(queue) == {"processed": [b"0", b"1", b"2"]}


def test_a_batch_of_which_others_took_all_is_read_as_none_and_the_stream_goes_on(queue: Queue, clock: Clock) -> None:
    batched(queue, b"0", b"1")
    swept_in_the_present(queue, clock)
    for _ in range(2):
        take(queue).ack()
    queue.send(b"next")
    journal = run(queue)
    assert journal.messages(1) == []
    assert (latest(journal, 1), bodies(journal.messages(2)), latest(journal, 2)) == (2, [b"next"], 2)
    journal.close()
    assert where(queue) == {"processed": [b"0", b"1", b"next"]}
    assert streams(queue) == []


def test_what_was_committed_is_acknowledged_where_it_lies_before_anybody_takes_it(queue: Queue, clock: Clock) -> None:
    batched(queue, b"0", b"1")
    queue.send(b"next")
    swept_in_the_present(queue, clock)
    assert where(queue) == {"target": [b"0", b"1", b"next"]}
    journal = run(queue)
    assert journal.settle(1) == 2
    assert where(queue) == {"processed": [b"0", b"1"], "target": [b"next"]}
    assert (journal.next_batch(2, None), bodies(journal.messages(2))) == (1, [b"next"])
    assert queue.browse(state="processed")


@pytest.mark.parametrize("committed", [True, False])
def test_a_run_that_died_when_it_had_claimed_a_batch_again_is_gone_on_with_after_its_leases_too(
    queue: Queue, clock: Clock, committed: bool
) -> None:
    """It wrote nothing down of its new claims, and acknowledged none; then its leases ran out as well."""
    before = batched(queue, b"0", b"1")
    clock.advance(LEASE + 1)
    queue.sweep()
    second = run(queue)
    assert len(second._adopt_batch(1)) == 2
    assert where(queue) == {"processing": [b"0", b"1"]}
    swept_in_the_present(queue, clock)
    assert where(queue) == {"target": [b"0", b"1"]}
    third = run(queue)
    if not committed:
        assert content(third.messages(1)) == before
    assert (latest(third, 1), where(queue)) == (1, {"processed": [b"0", b"1"]})


@pytest.mark.parametrize("name", [None, "report.csv", "order-17"])
def test_a_batch_whose_leases_run_out_again_and_again_stays_the_same(
    queue: Queue, clock: Clock, name: str | None
) -> None:
    """Each night a run reads it, and is stopped before its next batch."""
    if name is None or "." not in name:
        queue.send(b"0", message_id=name)
    else:
        drop(queue, name, b"0")
    journal = run(queue)
    assert journal.next_batch(1, None) == 1
    before = content(journal.messages(1))
    for _ in range(4):
        clock.advance(LEASE + 1)
        queue.sweep()
        assert where(queue) == {"target": [b"0"]}
        assert content(run(queue).messages(1)) == before
    clock.advance(LEASE + 1)
    queue.sweep()
    last = run(queue)
    assert (last.settle(1), last.next_batch(2, None), where(queue)) == (1, 0, {"processed": [b"0"]})
    if name is not None and "." in name:
        assert names_in(queue, "processed") == [name]


def test_a_message_that_went_from_stream_to_stream_is_of_the_last_alone(queue: Queue, clock: Clock) -> None:
    queue.send(b"0")
    for stream in ("s", "another", "s", "another"):
        assert run(queue, stream=stream).next_batch(queue.counts()["target"] + 8, None) == 1
        clock.advance(LEASE + 1)
        queue.sweep()
        assert where(queue) == {"target": [b"0"]}
    assert run(queue).messages(9) == []
    last = run(queue, stream="another")
    assert (last.settle(9), where(queue)) == (1, {"processed": [b"0"]})


def test_a_lease_that_runs_out_while_its_batch_is_taken_up_costs_the_batch_nothing(queue: Queue, clock: Clock) -> None:
    before = batched(queue, b"0", b"1", b"2")
    journal = run(queue)
    claims = journal._claims

    def late() -> Any:
        found = claims()
        clock.advance(LEASE + 1)
        queue.sweep()
        assert where(queue) == {"target": [b"0", b"1", b"2"]}
        return found

    journal._claims = late  # type: ignore[method-assign]
    assert content(journal.messages(1)) == before
    assert journal.settle(1) == 3


@pytest.mark.parametrize("taken", ["by the stream", "by a consumer"])
def test_the_longest_names_can_be_claimed_however_often_their_leases_run_out(
    tmp_path: Path, clock: Clock, taken: str
) -> None:
    queue = make_queue(tmp_path, clock=clock, redelivery_delay=1, redelivery_backoff=1)
    queue.send(b"0", message_id="i" * 100, type="t" * 60, correlation_id="c" * 60, expires_in="300d", priority=-(2**31))
    take(queue).nack()
    clock.advance(2)
    queue.sweep()
    journal = run(queue, client_id="a-client-of-16-b")
    assert journal.next_batch(1, None) == 1
    before = content(journal.messages(1))
    for _ in range(3):
        clock.advance(LEASE + 1)
        queue.sweep()
        clock.advance(2)
        queue.sweep()
        assert where(queue) == {"target": [b"0"]}
        journal = run(queue, client_id="a-client-of-16-b")
        assert content(journal.messages(1)) == before
    if taken == "by a consumer":
        clock.advance(LEASE + 1)
        queue.sweep()
        clock.advance(2)
        queue.sweep()
        message = take(queue)
        assert message.id == "i" * 100
        assert run(queue).messages(1) == []  # what another holds is not the stream's, however long its name
        message.ack()
    else:
        journal.settle(1)
    assert where(queue) == {"processed": [b"0"]}


@pytest.mark.parametrize("odd", [".keep", "README"])
def test_strangers_among_the_streams_keep_no_lease_from_ending(queue: Queue, clock: Clock, odd: str) -> None:
    before = batched(queue, b"0")
    (base(queue) / ".dropq" / "streams" / odd).write_text("not a stream")
    clock.advance(LEASE + 1)
    queue.sweep()
    assert where(queue) == {"target": [b"0"]}
    assert content(run(queue).messages(1)) == before


def test_a_stream_that_cannot_be_looked_at_keeps_no_lease_from_ending(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batched(queue, b"0")
    real = os.open

    def refused(path: str, flags: int, mode: int = 0o777) -> int:
        if "/streams/" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, mode)

    clock.advance(LEASE + 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        queue.sweep()
    assert where(queue) == {"target": [b"0"]}
    assert "/streams/s cannot be read" in caplog.text


def test_what_others_hold_of_a_committed_batch_is_theirs(queue: Queue, clock: Clock) -> None:
    batched(queue, b"0", b"1")
    swept_in_the_present(queue, clock)
    taken = take(queue)
    journal = run(queue)
    assert latest(journal, 1) == 1
    journal.close()
    assert where(queue) == {"processed": [b"1"], "processing": [b"0"]}
    taken.ack()
    assert streams(queue) == []


@pytest.mark.parametrize("committed", [True, False])
def test_files_of_one_foreign_name_are_told_apart_by_what_they_are(queue: Queue, clock: Clock, committed: bool) -> None:
    drop(queue, "report.csv", b"first")
    journal = run(queue)
    journal.next_batch(1, None)
    swept_in_the_present(queue, clock)
    take(queue).ack()
    drop(queue, "report.csv", b"second")
    again = run(queue)
    if committed:
        assert again.settle(1) == 0
    else:
        assert again.messages(1) == []
    assert where(queue) == {"processed": [b"first"], "target": [b"second"]}
    assert (latest(again, 1), bodies(again.messages(2)), latest(again, 2)) == (2, [b"second"], 2)
    assert where(queue) == {"processed": [b"first", b"second"]}


@pytest.mark.parametrize("committed", [True, False])
def test_a_foreign_file_that_was_returned_is_found_again_under_its_new_name(
    queue: Queue, clock: Clock, committed: bool
) -> None:
    drop(queue, "report.csv", b"first")
    journal = run(queue)
    journal.next_batch(1, None)
    before = content(journal.messages(1))
    swept_in_the_present(queue, clock)
    drop(queue, "report.csv", b"second")
    assert "report.csv" in names_in(queue, "target")
    assert len(names_in(queue, "target")) == 2
    again = run(queue)
    if not committed:
        assert content(again.messages(1)) == before
    assert (latest(again, 1), bodies(again.messages(2)), latest(again, 2)) == (2, [b"second"], 2)
    assert where(queue) == {"processed": [b"first", b"second"]}


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("name", ["generated", "foreign"])
def test_what_waits_out_a_redelivery_delay_is_found_all_the_same(
    tmp_path: Path, clock: Clock, committed: bool, name: str
) -> None:
    queue = make_queue(tmp_path, clock=clock, redelivery_delay="1h")
    if name == "foreign":
        drop(queue, "report.csv", b"0")
    else:
        queue.send(b"0")
    journal = run(queue)
    journal.next_batch(1, None)
    before = content(journal.messages(1))
    swept_in_the_present(queue, clock)
    assert where(queue) == {"delayed": [b"0"]}
    again = run(queue)
    if not committed:
        assert content(again.messages(1)) == before
        assert where(queue) == {"processing": [b"0"]}
    assert latest(again, 1) == 1
    assert where(queue) == {"processed": [b"0"]}


def test_what_is_given_back_while_its_lease_runs_is_delivered_anew(queue: Queue, clock: Clock) -> None:
    batched(queue, b"0", b"1")
    clock.ms = Clock().ms
    journal = run(queue)
    first, _ = journal.messages(1)
    assert first.receipt is not None
    queue.claimed(first.receipt).nack()
    assert latest(journal, 1) == 2
    assert where(queue) == {"processed": [b"1"], "processing": [b"0"]}
    assert bodies(journal.messages(2)) == [b"0"]
    assert latest(journal, 2) == 2
    assert where(queue) == {"processed": [b"0", b"1"]}


@pytest.mark.parametrize("way", ["another consumer", "an administrator", "a delay"])
def test_what_was_given_back_is_delivered_anew_however_late_the_stream_goes_on(
    queue: Queue, clock: Clock, way: str
) -> None:
    """A query that is stopped has its last batch committed and not acknowledged: that may last for days."""
    batched(queue, b"0", b"1")
    journal = run(queue)
    receipt = journal.messages(1)[0].receipt
    assert receipt is not None
    message = queue.claimed(receipt)
    if way == "an administrator":
        message.reject("bad input")
        swept_in_the_present(queue, clock)
        assert [outcome.ok for outcome in queue.requeue()] == [True]
    elif way == "a delay":
        message.nack(delay="1h")
        swept_in_the_present(queue, clock)
    else:
        message.nack()
        another = queue.subscribe()
        assert another.receive() is not None
        swept_in_the_present(queue, clock)
        another.close()
    assert where(queue) == {"target": [b"0", b"1"]}
    again = run(queue)
    assert latest(again, 1) == 2
    assert (bodies(again.messages(2)), where(queue)) == ([b"0"], {"processing": [b"0"], "processed": [b"1"]})


def test_a_new_file_with_name_and_inode_of_one_that_was_settled_is_another_message(
    tmp_path: Path, clock: Clock
) -> None:
    """The run died between its last ack and the end of its batch's file; the queue keeps no history."""
    queue = make_queue(tmp_path, clock=clock, history=False)
    drop(queue, "report.csv", b"first")
    journal = run(queue)
    journal.next_batch(1, None)
    (message,) = journal.messages(1)
    inode = os.stat(message.path).st_ino
    message.ack()
    clock.ms = Clock().ms
    drop(queue, "report.csv", b"second")
    if os.stat(base(queue) / "target" / "report.csv").st_ino != inode:
        pytest.skip("this file system does not use an inode's number again")
    again = run(queue)
    assert (again.settle(1), where(queue)) == (0, {"target": [b"second"]})


# -- claims that were not written down ---------------------------------------------------------------------------------


def test_claims_of_a_run_that_died_before_it_wrote_them_down_come_into_the_next_batch(queue: Queue) -> None:
    queue.send_many([b"%d" % number for number in range(6)])
    run(queue)._claim(2, besides=0)
    run(queue)._claim(1, besides=0)
    assert len(streams(queue)) == 2
    journal = run(queue)
    assert latest(journal, 0, limit=6) == 1
    assert sorted(bodies(journal.messages(1))) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert latest(journal, 1) == 1
    journal.close()
    assert where(queue) == {"processed": [b"0", b"1", b"2", b"3", b"4", b"5"]}
    assert streams(queue) == []


def test_claims_of_another_stream_or_of_a_consumer_are_theirs(queue: Queue) -> None:
    queue.send_many([b"0", b"1", b"2"])
    other = run(queue, stream="another")
    other.next_batch(1, 1)
    consumed = take(queue)
    journal = run(queue)
    assert (latest(journal, 0), bodies(journal.messages(1)), latest(journal, 1)) == (1, [b"2"], 1)
    journal.close()
    assert where(queue) == {"processed": [b"2"], "processing": [b"0", b"1"]}
    consumed.ack()
    assert other.settle(1) == 1
    other.close()
    assert (where(queue), streams(queue)) == ({"processed": [b"0", b"1", b"2"]}, [])


def test_claims_that_were_not_written_down_count_towards_the_limit(queue: Queue) -> None:
    queue.send_many([b"%d" % number for number in range(9)])
    for _ in range(2):
        run(queue)._claim(2, besides=0)
    assert run(queue).next_batch(1, 2) <= 4


# -- leases ------------------------------------------------------------------------------------------------------------


def test_renewed_leases_outlast_the_first(queue: Queue, clock: Clock) -> None:
    queue.send_many([b"0", b"1"])
    journal = run(queue)
    journal.next_batch(1, None)
    for _ in range(5):
        clock.advance(LEASE - 1)
        journal.renew()
        queue.sweep()
        assert where(queue) == {"processing": [b"0", b"1"]}
    (deadline,) = {name.split(",")[1] for name in names_in(queue, "processing")}
    assert int(deadline) == clock.ms + LEASE * 1000
    assert bodies(journal.messages(1)) == [b"0", b"1"]
    assert latest(journal, 1) == 1
    assert where(queue) == {"processed": [b"0", b"1"]}


def test_a_lease_that_was_lost_is_told_once_and_the_others_are_renewed(
    queue: Queue, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many([b"0", b"1", b"2"])
    journal = run(queue)
    journal.next_batch(1, None)
    lost = journal.messages(1)[0]
    os.unlink(lost.path)
    clock.advance(LEASE / 2)
    journal.renew()
    journal.renew()
    (logged,) = caplog.messages
    assert lost.id in logged
    assert "is gone" in logged
    clock.advance(LEASE / 2 + 1)
    queue.sweep()
    assert where(queue) == {"processing": [b"1", b"2"]}


def test_leases_that_ran_out_while_the_run_stood_still_are_told(
    queue: Queue, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many([b"0", b"1"])
    journal = run(queue)
    journal.next_batch(1, None)
    swept_in_the_present(queue, clock)
    with caplog.at_level(logging.WARNING, "dropq"):
        journal.renew()
    assert [text.partition(":")[2].split(",")[0] for text in caplog.messages]
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("renewed", [False, True])
def test_what_ran_out_while_the_run_stood_still_is_acknowledged_where_it_lies(
    queue: Queue, clock: Clock, renewed: bool
) -> None:
    """The host was suspended, or the file server hung, for longer than a lease; then the batch is committed."""
    queue.send_many([b"0", b"1"])
    journal = run(queue)
    journal.next_batch(1, None)
    assert len(journal.messages(1)) == 2
    swept_in_the_present(queue, clock)
    if renewed:
        journal.renew()
    assert (latest(journal, 1), where(queue)) == (1, {"processed": [b"0", b"1"]})


@pytest.mark.parametrize("renewed", [0, 1])
@pytest.mark.parametrize("committed", [True, False])
def test_a_run_that_died_amid_a_renewal_is_gone_on_with_when_its_leases_have_run_out(
    queue: Queue, clock: Clock, renewed: int, committed: bool
) -> None:
    clock.ms = Clock().ms - (LEASE + 50) * 1000
    before = batched(queue, b"0", b"1")
    journal = run(queue)
    assert content(journal.messages(1)) == before
    clock.advance(LEASE / 2)

    def die_amid_a_renewal() -> None:
        renames = iter(range(renewed))
        real = os.rename

        def rename(*args: Any, **kwargs: Any) -> None:
            if next(renames, None) is None:
                os._exit(DIED)
            real(*args, **kwargs)

        os.rename = rename
        journal.renew()

    assert forked(die_amid_a_renewal) == DIED
    swept_in_the_present(queue, clock)
    again = run(queue)
    if not committed:
        assert content(again.messages(1)) == before
    assert latest(again, 1) == 1
    assert where(queue) == {"processed": [b"0", b"1"]}


def test_two_batches_of_one_offset_are_both_claimed_again(queue: Queue, clock: Clock) -> None:
    queue.send_many(ALL)
    journal = run(queue)
    journal.next_batch(1, 2)
    journal.next_batch(2, 2)
    swept_in_the_present(queue, clock)
    again = run(queue)
    assert [bodies(again.messages(batch)) for batch in (1, 2)] == [ALL[:2], ALL[2:]]


def test_a_full_disk_keeps_no_lease_from_being_renewed(queue: Queue, clock: Clock) -> None:
    queue.send_many([b"0", b"1"])
    journal = run(queue)
    journal.next_batch(1, None)
    clock.advance(LEASE - 1)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        with suppress(OSError):
            journal.renew()
    clock.advance(2)
    queue.sweep()
    assert where(queue) == {"processing": [b"0", b"1"]}


# -- two runs at once --------------------------------------------------------------------------------------------------


def zombie_story(folder: Path, step: int, meeting: Callable[[Queue, Checkpoint], object]) -> tuple[Queue, bool]:
    """Let a run that Spark has given up ask for its next offset, while another runs at some step of it."""
    queue, checkpoint = story(folder, nothing)
    zombie = run(queue)
    latest(zombie, 0)
    checkpoint.write("offset", 1, listed(queue, 1))
    checkpoint.write("commit", 1)
    acted: list[int] = []
    with steps(acting_at(step, lambda: meeting(queue, checkpoint), acted)), suppress(DropqError, OSError):
        latest(zombie, 1)
        zombie.messages(2)
        zombie.renew()
    check_whole(queue, f"met at step {step}")
    with suppress(DropqError, OSError):
        zombie.close()
    return queue, bool(acted)


def one_batch_that_is_not_committed(queue: Queue, checkpoint: Checkpoint) -> None:
    journal = run(queue)
    latest(journal, 1)
    checkpoint.write("offset", 2, content(journal.messages(2)))


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("meeting", [go_on, one_batch_that_is_not_committed])
@pytest.mark.crashes
def test_two_runs_that_meet_at_any_step_lose_nothing_and_settle_nothing_twice(
    tmp_path: Path, meeting: Callable[[Queue, Checkpoint], object]
) -> None:
    for step in range(1, MANY):
        queue, met = zombie_story(tmp_path / str(step), step, meeting)
        for _ in range(2):
            last = run(queue)
            for offset in range(1, 10):
                latest(last, offset, limit=None)
            last.close()
        assert where(queue) == {"processed": ALL}, f"met at step {step}"
        assert streams(queue) == []
        if not met:
            assert step > 15
            return
    pytest.fail("the run never came to its end")


def test_two_runs_that_write_one_batch_at_once_each_settle_what_they_hold(queue: Queue, clock: Clock) -> None:
    queue.send_many(ALL[:-1])
    late = run(queue)
    write, read = late._write, list[bytes]()

    def write_late(batch: int, messages: dict[str, Message]) -> None:
        living = run(queue)
        living._has_adopted_leftovers = True
        assert latest(living, 0) == 1
        write(batch, messages)
        read.extend(bodies(living.messages(1)))
        living.settle(1)

    late._write = write_late  # type: ignore[method-assign,assignment]
    assert late.next_batch(1, LIMIT) == LIMIT
    assert where(queue)["processed"] == read
    with pytest.raises(DropqError, match=r"reads the stream .* since this run began"):
        late.settle(1)
    swept_in_the_present(queue, clock)
    assert where(queue) == {"processed": read, "target": [body for body in ALL[:-1] if body not in read]}


def test_a_copy_of_a_checkpoint_that_is_gone_on_with_takes_the_stream_from_the_older_query(queue: Queue) -> None:
    queue.send_many(ALL[:2])
    older = run(queue)
    assert latest(older, 0, limit=1) == 1
    copied = run(queue)
    assert latest(copied, 1, limit=1) == 2
    refusals: list[Callable[[], int]] = [lambda: older.settle(2), lambda: older.next_batch(2, None)]
    for refused in refusals:
        with pytest.raises(DropqError, match=f"{copied._subscription.id} reads the stream .*/streams/s since"):
            refused()
    older.close()
    assert bodies(copied.messages(2)) == [ALL[1]]
    assert (copied.settle(2), where(queue)) == (1, {"processed": ALL[:2]})


@pytest.mark.parametrize("step", range(4))
@pytest.mark.crashes
def test_a_run_that_ends_leaves_what_another_writes_at_any_step_of_it(queue: Queue, step: int) -> None:
    """Spark lets a query be started again before the process that read for the last one has ended."""
    ending, living = run(queue), run(queue)
    queue.send(b"0")
    claims, acted = ending._claims, list[int]()

    def claim_meanwhile() -> Any:
        found = claims()
        if step == 0:
            latest(living, 0)
        return found

    ending._claims = claim_meanwhile  # type: ignore[method-assign]
    with steps(acting_at(step, lambda: latest(living, 0), acted)):
        ending.close()
    if step and not acted:
        latest(living, 0)  # it has ended with fewer steps
    assert bodies(run(queue).messages(1)) == [b"0"]


# -- what is taken -----------------------------------------------------------------------------------------------------


def test_a_snapshot_offers_only_what_waited_at_that_moment(queue: Queue) -> None:
    queue.send_many([b"0", b"1", b"2"])
    journal = run(queue)
    journal._subscription._snapshot()
    queue.send(b"later", priority=9)
    take_other = queue.subscribe()
    assert take_other.receive() is not None  # it has the one that came later
    queue.send(b"later still", priority=9)
    read, offset = [], 0
    while (end := latest(journal, offset)) > offset:
        read.append(bodies(journal.messages(end)))
        offset = end
    assert read == [[b"0", b"1"], [b"2"]]
    journal.close()
    assert where(queue) == {"processed": [b"0", b"1", b"2"], "processing": [b"later"], "target": [b"later still"]}
    take_other.close()
    assert streams(queue) == []


def test_a_snapshot_leaves_out_what_others_took_since(queue: Queue) -> None:
    queue.send_many([b"0", b"1", b"2"])
    journal = run(queue)
    journal._subscription._snapshot()
    take(queue).ack()
    assert latest(journal, 0, limit=None) == 1
    assert bodies(journal.messages(1)) == [b"1", b"2"]


def test_a_message_that_cannot_be_claimed_holds_up_no_other(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many(ALL[:2])
    drop(queue, "poison", ALL[2])
    rename = Storage.rename

    def refused(self: Storage, source: str, destination: str) -> None:
        if source.endswith("/target/poison"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source)
        rename(self, source, destination)

    monkeypatch.setattr(Storage, "rename", refused)
    journal = run(queue)
    assert latest(journal, 0, limit=None) == 1
    assert bodies(journal.messages(1)) == ALL[:2]
    assert "target/poison" in caplog.text
    with pytest.raises(StorageError, match=r"target/poison; the message stays in target/"):
        latest(journal, 1)
    assert where(queue) == {"processed": ALL[:2], "target": [ALL[2]]}


def test_a_stream_holds_no_more_than_the_queue_allows(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path, clock=clock, max_per_subscription_backlog=3)
    queue.send_many([b"%d" % number for number in range(7)])
    journal = run(queue)
    assert journal.next_batch(1, None) == 3
    assert journal.next_batch(2, None) == 0
    assert latest(journal, 1, limit=2) == 2
    assert len(journal.messages(2)) == 2
    again = run(queue)
    assert len(again.messages(2)) == 2
    assert again.next_batch(3, None) == 1, "what it has taken up counts"
    assert len(names_in(queue, "processing")) == 3


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1] * 4), (3, [3, 1]), (4, [4]), (5, [4]), (None, [4])])
def test_a_batch_holds_no_more_than_its_limit(queue: Queue, limit: int | None, sizes: list[int]) -> None:
    queue.send_many(ALL)
    journal, read, offset = run(queue), [], 0
    while (end := latest(journal, offset, limit)) > offset:
        read.append(bodies(journal.messages(end)))
        offset = end
    assert [len(batch) for batch in read] == sizes
    assert [body for batch in read for body in batch] == ALL


@pytest.mark.parametrize("paused", ["queue", "root"])
def test_a_paused_queue_gives_nothing_new_and_what_was_claimed_goes_on(queue: Queue, paused: str) -> None:
    before = batched(queue, b"0")
    queue.send(b"1")
    (queue if paused == "queue" else queue.root).pause()
    journal = run(queue)
    assert content(journal.messages(1)) == before
    assert latest(journal, 1) == 1
    assert where(queue) == {"processed": [b"0"], "target": [b"1"]}
    (queue if paused == "queue" else queue.root).resume()
    journal = run(queue)
    assert (latest(journal, 1), bodies(journal.messages(2))) == (2, [b"1"])


def test_a_stream_with_a_filter_leaves_the_others_alone(queue: Queue) -> None:
    for number, region in enumerate(["EU", "US", "EU", "ASIA"]):
        queue.send(b"%d" % number, properties={"region": region}, priority=number)
    options = {"filter": "region = 'EU' AND JMSPriority < 9"}
    journal = run(queue, **options)
    assert latest(journal, 0) == 1
    assert sorted(bodies(journal.messages(1))) == [b"0", b"2"]
    again = run(queue, **options)
    assert sorted(bodies(again.messages(1))) == [b"0", b"2"]
    assert latest(again, 1) == 1
    again.close()
    assert where(queue) == {"processed": [b"0", b"2"], "target": [b"1", b"3"]}


def test_an_idle_stream_changes_no_message_and_leaves_nothing(queue: Queue) -> None:
    journal = run(queue)
    assert [latest(journal, 0) for _ in range(3)] == [0, 0, 0]
    journal.renew()
    assert [name for name in streams(queue) if name.endswith(".json")] == []
    journal.close()
    assert (where(queue), streams(queue)) == ({}, [])


# -- what is refused and told ------------------------------------------------------------------------------------------


def test_a_queue_that_delivers_at_most_once_is_refused(tmp_path: Path, clock: Clock) -> None:
    queue = make_queue(tmp_path, clock=clock, semantics="at-most-once")
    queue.send(b"0")
    with pytest.raises(ConfigError, match='queue q has semantics = "at-most-once"'):
        run(queue)
    assert (where(queue), streams(queue)) == ({"target": [b"0"]}, [])


@pytest.mark.parametrize("stream", ["", "a/b", "..", ".", "a b", "é", "x" * 101, "a\0", "a\n"])
def test_what_cannot_name_a_folder_names_no_stream(queue: Queue, stream: str) -> None:
    with pytest.raises(ValueError, match="cannot name a stream"):
        run(queue, stream=stream)
    assert streams(queue) == []


def test_a_batch_that_is_not_known_is_told_with_the_way_out(queue: Queue) -> None:
    batched(queue, b"0")
    journal = run(queue)
    with pytest.raises(DropqError, match=r"batch 7 is not in the journal .*/streams/s: .* Start the query with a new"):
        journal.messages(7)
    assert where(queue) == {"processing": [b"0"]}


DAMAGED = [
    "", "{", "[]", "null", "7", "{}", '{"claims": null}', '{"claims": 7}', b'{"claims": ["\xe9"]}',
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_batch_is_told_with_its_path_and_nothing_is_lost(
    queue: Queue, clock: Clock, damage: str | bytes
) -> None:
    batched(queue, b"0", b"1")
    path = base(queue) / ".dropq" / "streams" / "s" / "1.json"
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    actions: list[Callable[[Journal], object]] = [
        lambda journal: journal.messages(1),
        lambda journal: journal.settle(1),
        lambda journal: journal.next_batch(1, None),
        lambda journal: journal.next_batch(2, None),
    ]
    for action in actions:
        journal = run(queue)
        with pytest.raises(DropqError, match=r"/streams/s/1\.json is damaged .* start the query with a new checkpoint"):
            action(journal)
        journal.close()
        assert where(queue) == {"processing": [b"0", b"1"]}
        assert path.exists()
    path.rename(base(queue) / "1.json")  # the way out
    journal = run(queue)
    assert journal.next_batch(2, None) == 2
    assert bodies(journal.messages(2)) == [b"0", b"1"]


# -- acks --------------------------------------------------------------------------------------------------------------

ENDS = ("fsync", "rename", "unlink")


@pytest.mark.parametrize(
    ("history", "synced"), [(True, ["fsync processed", "fsync processing"]), (False, ["fsync processing"])]
)
def test_the_acks_of_a_batch_are_synced_once_a_folder_and_before_the_batch_goes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, history: bool, synced: list[str]
) -> None:
    queue = make_queue(tmp_path, clock=clock, durability="full", history=history)
    queue.send_many(ALL)
    journal = run(queue)
    journal.next_batch(1, None)
    seen = RecordingOs().record(monkeypatch)
    assert journal.settle(1) == len(ALL)
    calls = seen.briefly(ENDS, base(queue))
    destination = "processed/*" if history else ".dropq/*"
    acks = [f"rename processing/* {destination}"] * len(ALL)
    end = "rename .dropq/streams/s/* .dropq/streams/s/*"
    assert [call for call in calls if call.startswith("rename")] == [*acks, end]
    assert [call for call in calls if call.startswith("fsync")] == synced
    last_ack = max(index for index, call in enumerate(calls) if call == acks[0])
    assert last_ack < calls.index(synced[0]) <= calls.index(synced[-1]) < calls.index(end)
    assert where(queue) == ({"processed": ALL} if history else {})


def test_a_batch_is_durable_before_its_offset_is_told(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, clock=clock, durability="full")
    queue.send_many(ALL)
    journal = run(queue)
    seen = RecordingOs().record(monkeypatch)
    assert latest(journal, 0, limit=None) == 1
    calls = [call.replace(".dropq/streams/s", "s") for call in seen.briefly(("write", *ENDS), base(queue))]
    assert calls[-5:] == [
        "fsync processing", "write s/*", "fsync s/*", "rename s/* s/*", "fsync s",
    ]  # fmt: skip
    assert calls[-6] == "rename target/* processing/*"


def test_acks_are_final(queue: Queue, clock: Clock) -> None:
    batched(queue, b"0", b"1")
    journal = run(queue)
    messages = journal.messages(1)
    assert (journal.settle(1), journal.settle(1), journal.settle(0)) == (2, 0, 0)
    assert [message.held for message in messages] == [False, False]
    swept_in_the_present(queue, clock)
    assert where(queue) == {"processed": [b"0", b"1"]}
    assert latest(run(queue), 1) == 1


def test_an_ack_that_fails_leaves_the_rest_for_the_next(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send_many(ALL)
    journal = run(queue)
    journal.next_batch(1, None)
    left, move = iter(range(2)), Storage.move

    def refused(self: Storage, source: str, destination: str, *how: Any) -> None:
        if next(left, None) is None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), source)
        move(self, source, destination, *how)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "move", refused)
        with pytest.raises(StorageError, match=r"Permission denied.*stays in"):
            journal.settle(1)
    assert {state: len(found) for state, found in where(queue).items()} == {"processed": 2, "processing": 2}
    assert journal.settle(1) == len(ALL)
    assert where(queue) == {"processed": ALL}


def test_a_batch_that_was_settled_is_empty_when_a_checkpoint_that_lost_its_commit_asks_for_it(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many(ALL)
    journal = run(queue)
    for batch in (1, 2):
        assert latest(journal, batch - 1) == batch
        journal.messages(batch)
    journal.settle(2)
    journal.close()
    again = run(queue)
    assert again.messages(2) == again.messages(1) == []
    assert "was acknowledged" in caplog.text
    queue.send(b"new")
    assert latest(again, 2) == 3
    assert bodies(again.messages(3)) == [b"new"]
    assert sorted(os.listdir(base(queue) / ".dropq/streams/s"))[-1] == "settled-2"
