"""Bad bodies of a stream's batches: each such message ends in error/ and each other one is acknowledged, whoever dies.

The stories are those of test_journal.py; the reader of a batch finds that the body `BAD` is bad.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from forks import DIED, forked
from helpers import Clock, base, first_and_long, reopened, where
from test_journal import (
    ALL,
    Checkpoint,
    announced,
    begun,
    check_whole,
    content,
    latest,
    run,
    story,
    streams,
    swept_in_the_present,
)
from test_journal import queue as queue
from test_journal import quick_disk as quick_disk
from test_staging import MANY, acting_at, dying_at, failing_at, steps

from dropq import DropqError, Message, Queue, StorageError
from dropq.queue.stream_journal import Journal, batch_key

BAD, REASON = b"1", "line 1 is not JSON"
GOOD = [body for body in ALL if body != BAD]


@pytest.fixture
def clock() -> Clock:
    return begun()


def judge(journal: Journal, batch: int, message: Message) -> None:
    journal.note_bad_bodies(batch).add(batch_key(message.file), REASON)


def work(journal: Journal, batch: int, checkpoint: Checkpoint) -> None:
    """Read a batch as tasks do, and commit it; its bad body is noted, and does not count as read."""
    messages = journal.messages(batch)
    notes = journal.note_bad_bodies(batch)
    for message in messages:
        if message.body == BAD:
            notes.add(batch_key(message.file), REASON)
    checkpoint.write("read", batch, [(id, body) for id, body in content(messages) if body != BAD])
    journal.renew()
    checkpoint.write("commit", batch)


def go_on(queue: Queue, checkpoint: Checkpoint) -> None:
    """Run the query from its checkpoint until nothing is left."""
    journal = announced(queue)
    try:
        for batch in range(checkpoint.committed + 1, checkpoint.offset + 1):
            work(journal, batch, checkpoint)
        while (end := latest(journal, checkpoint.offset)) > checkpoint.offset:
            checkpoint.write("offset", end)
            work(journal, end, checkpoint)
    finally:
        with suppress(OSError):
            journal.close()


def nothing(queue: Queue, checkpoint: Checkpoint) -> None:
    """The first run is yet to come."""


def a_batch_that_was_noted_and_not_committed(queue: Queue, checkpoint: Checkpoint) -> None:
    journal = run(queue)
    checkpoint.write("offset", latest(journal, 0))
    judge(journal, 1, journal.messages(1)[0])  # of a schema that this body did not fit
    judge(journal, 1, journal.messages(1)[1])


def a_batch_that_was_noted_and_committed(queue: Queue, checkpoint: Checkpoint) -> None:
    journal = run(queue)
    checkpoint.write("offset", latest(journal, 0))
    work(journal, 1, checkpoint)


@pytest.fixture(
    params=first_and_long([a_batch_that_was_noted_and_committed, a_batch_that_was_noted_and_not_committed, nothing])
)
def before(request: pytest.FixtureRequest) -> Callable[[Queue, Checkpoint], None]:
    """What an earlier run left."""
    return request.param  # type: ignore[no-any-return]


def check_ended(queue: Queue, checkpoint: Checkpoint, what: str) -> None:
    """Each good message was read in one batch and acknowledged; the bad one is in error/, with its reason."""
    batches: dict[int, list[tuple[str, bytes]]] = {}
    for batch, read in checkpoint.lines("read"):
        assert read == batches.setdefault(batch, read), f"{what}: batch {batch} was another"
    assert Counter(body for read in batches.values() for _, body in read) == Counter(GOOD), what
    assert where(queue) == {"processed": GOOD, "error": [BAD]}, what
    reasons = [message.reason for message in queue.browse("error")]
    assert [(reason or {}).get("detail") for reason in reasons] == [REASON], what
    assert streams(queue) == [], what


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.crashes
def test_a_run_that_dies_before_any_step_leaves_each_bad_message_to_be_rejected_once(
    tmp_path: Path, before: Callable[[Queue, Checkpoint], None]
) -> None:
    for step in range(1, MANY):
        queue, checkpoint = story(tmp_path / str(step), before)

        def live(queue: Queue = queue, checkpoint: Checkpoint = checkpoint, step: int = step) -> None:
            with steps(dying_at(step)):
                go_on(queue, checkpoint)

        code = forked(live)
        assert code in (0, DIED), f"step {step}"
        check_whole(queue, f"died before step {step}")
        go_on(queue, checkpoint)
        check_ended(queue, checkpoint, f"died before step {step}")
        if code == 0:
            assert step > 30
            return
    pytest.fail("the run never came to its end")


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.crashes
def test_an_error_at_any_step_leaves_each_bad_message_to_be_rejected_once(tmp_path: Path, when: str) -> None:
    for step in range(1, MANY):
        queue, checkpoint = story(tmp_path / str(step), nothing)
        reached: list[int] = []
        fault = partial(failing_at(step), step)
        hooks = (fault, None) if when == "before" else (None, fault)
        first, last = (acting_at(step, hook or (lambda: None), reached) for hook in hooks)
        with steps(first, last), suppress(StorageError):
            go_on(queue, checkpoint)
        check_whole(queue, f"an error {when} step {step}")
        go_on(queue, checkpoint)
        check_ended(queue, checkpoint, f"an error {when} step {step}")
        if not reached:
            assert step > 30
            return
    pytest.fail("the run never came to its end")


def test_a_note_counts_for_a_message_that_returned_when_its_lease_ran_out(
    queue: Queue, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_many(ALL[:2])
    journal = run(queue)
    latest(journal, 0)
    judge(journal, 1, journal.messages(1)[1])
    swept_in_the_present(queue, clock)
    assert where(queue) == {"target": ALL[:2]}
    with caplog.at_level(logging.WARNING, "dropq"):
        assert run(queue).settle(1) == 2
    assert where(queue) == {"processed": [b"0"], "error": [BAD]}
    assert "batch 1 of" in caplog.text
    assert "1 of 2 messages were rejected for their bodies, such as " in caplog.text


def test_a_run_that_reads_a_batch_again_forgets_what_the_one_before_found_bad(queue: Queue) -> None:
    queue.send_many(ALL[:2])
    earlier = run(queue)
    latest(earlier, 0)
    for message in earlier.messages(1):
        judge(earlier, 1, message)
    later = run(queue)
    first, second = later.messages(1)
    judge(later, 1, second)
    with pytest.raises(DropqError, match="a bad body was found, and its message stays claimed"):
        earlier._own_notes(1).add(batch_key(first.file), "by a task of the earlier run that is still there")
    later.settle(1)
    assert where(queue) == {"processed": [b"0"], "error": [BAD]}


def test_what_a_run_that_was_given_up_finds_bad_does_not_count_for_the_run_that_goes_on(queue: Queue) -> None:
    queue.send_many(ALL[:2])
    given_up = run(queue)
    latest(given_up, 0)
    given_up_messages = given_up.messages(1)
    later = run(queue)
    judge(later, 1, later.messages(1)[1])
    judge(given_up, 1, given_up_messages[0])
    with suppress(DropqError):
        given_up.messages(1)
    later.settle(1)
    assert where(queue) == {"processed": [b"0"], "error": [BAD]}
    assert [path for path in streams(queue) if "bad-" in path] == []


def test_a_bad_message_that_somebody_settled_meanwhile_stays_where_it_is(queue: Queue) -> None:
    queue.send_many(ALL[:2])
    journal = run(queue)
    latest(journal, 0)
    good, bad = journal.messages(1)
    judge(journal, 1, bad)
    receipt = bad.receipt
    assert receipt is not None
    reopened(queue).claimed(receipt).nack()
    journal.settle(1)
    assert where(queue) == {"processed": [good.body], "target": [BAD]}


def test_a_damaged_note_rejects_the_message_all_the_same(queue: Queue) -> None:
    queue.send(BAD)
    journal = run(queue)
    latest(journal, 0)
    judge(journal, 1, journal.messages(1)[0])
    (note,) = (base(queue) / ".dropq" / "streams" / "s").glob("bad-1.*/*")
    note.write_bytes(b"")
    journal.settle(1)
    assert where(queue) == {"error": [BAD]}
