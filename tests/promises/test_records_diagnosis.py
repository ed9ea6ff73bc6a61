"""What health, explain, counts and fsck say of bundles that are settled by their records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import Clock, Run, died, drop, reopened, take

from dropq import Queue, Root
from dropq.diagnosis.explain import Explanation
from dropq.format.staged import ALIVE
from dropq.staging import fan_out
from dropq.storage.liveness import Presence

MINUTE = 60.0


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    return Root.create(tmp_path / "root", clock=clock)


@pytest.fixture
def queue(root: Root) -> Queue:
    return root.create_queue("orders", redelivery_delay="0s", durability="none")


def lines(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(1, count + 1))


def explained(queue: Queue) -> list[Explanation]:
    return list(reopened(queue).explain())


def commit_and_die(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> str:
    """Reject record 2 of three, leave record 3, commit that, and move no part; return the bundle's id."""
    id = queue.send(lines(3), type="text").id
    message = take(queue)
    records = message.records()
    next(records).ack()
    next(records).reject("two")
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        message.release()
    return id


def test_a_bundle_that_is_committed_is_found_until_its_parts_have_arrived(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_and_die(queue, monkeypatch)
    assert queue.counts()["processing"] == queue.health().counts["processing"] == 1
    assert queue.health(max_error=None).healthy
    assert [finding.kind for finding in queue.fsck()] == ["under-way"]
    clock.advance(61 * MINUTE)
    (reason,) = queue.health(max_error=None).reasons
    assert reason.kind == "unfinished-commit" and "`dropq sweep orders`" in reason.message
    assert [finding.kind for finding in queue.fsck()] == ["unfinished-commit"]
    queue.sweep()
    assert queue.health(max_error=None).healthy and queue.fsck() == []
    assert {state: count for state, count in queue.counts().items() if count} == {
        "target": 1,
        "error": 1,
        "processed": 1,
    }


def test_explain_says_what_a_committed_bundle_waits_for(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    id = commit_and_die(queue, monkeypatch)
    (one,) = explained(queue)
    assert (one.message.id, one.message.state, one.why) == (id, "processing", "committed")
    assert "1 for error/, 1 for processed/, 1 for target/" in one.detail and "`dropq sweep orders`" in one.detail
    assert one.message.body == lines(3)
    assert [one.why for one in queue.explain("processing")] == ["committed"]
    assert list(queue.explain("target")) == []


def test_explain_names_a_folder_with_something_that_nobody_can_move(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_and_die(queue, monkeypatch)
    (folder,) = Path(queue.layout.staged).iterdir()
    (folder / "notes.txt").touch()
    queue.sweep()
    (one,) = queue.explain("processing")
    assert "all parts of it have arrived" in one.detail and "`dropq fsck orders` says what else" in one.detail
    (finding,) = [finding for finding in queue.fsck(repair=True) if finding.kind == "not-staged"]
    assert finding.repaired and finding.path == f"{folder}/notes.txt"
    queue.sweep()
    assert list(queue.explain("processing")) == [] and os.listdir(queue.layout.staged) == []


def test_explain_says_that_a_barrier_waits_for_a_committed_bundle(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = root.create_queue("q", barrier_expression="JMSPriority = 9")
    commit_and_die(queue, monkeypatch)
    queue.send("barrier", priority=9)
    one, _ = queue.explain()
    assert one.why == "barrier" and "0 wait, 1 is held" in one.detail


def test_explain_says_of_which_bundle_a_part_is_and_where_the_others_lie(queue: Queue) -> None:
    id = queue.send(lines(4), type="text").id
    message = take(queue)
    records = message.records()
    next(records).ack()
    next(records).nack()
    next(records).reject("three")
    message.release()
    left, record = sorted(explained(queue), key=lambda one: one.message.id)
    assert left.message.id == id
    assert "it is what is left of a bundle, from record 4 on" in left.detail
    assert record.message.id == f"{id}-2"
    assert f"it was record 2 of the bundle {id}" in record.detail
    for one in (left, record):
        assert one.detail.endswith("; more of the bundle: 1 in target/, 1 in error/, 1 in processed/")


def test_explain_finds_the_parts_of_a_bundle_whose_id_its_sender_made(queue: Queue) -> None:
    queue.send(lines(3), type="text", message_id="of.mine-7", correlation_id="1795383089375000-7523895424")
    message = take(queue)
    records = message.records()
    next(records).reject("one")
    message.release()
    (one,) = explained(queue)
    assert one.detail.endswith("from record 2 on; more of the bundle: 1 in error/")


def test_explain_counts_no_part_of_another_file_of_the_same_name(queue: Queue) -> None:
    for verb in ("nack", "reject"):
        drop(queue, "day.text", lines(3))
        message = take(queue)
        for record in message.records():
            record.ack() if record.number == 3 else record.nack(60) if verb == "nack" else record.reject("no")
    assert queue.counts()["error"] == 2 and queue.counts()["processed"] == 2
    for one in explained(queue):
        assert one.detail.endswith("of the bundle day.text; more of the bundle: 1 in delayed/")


def test_explain_says_that_a_bundle_was_cut_in_two(queue: Queue) -> None:
    queue.send(lines(4), type="text")
    died(take(queue))
    assert list(take(queue).records()) == []
    details = [one.detail for one in explained(queue)]
    assert len(details) == 2
    for first, detail in zip((1, 3), details, strict=True):
        assert f"from record {first} on; it was cut in two" in detail and "had been delivered once" in detail
        assert detail.endswith("more of the bundle: 1 in target/")


def test_explain_says_nothing_of_bundles_where_there_is_none(queue: Queue) -> None:
    queue.send(lines(3), type="text")
    (one,) = explained(queue)
    assert "bundle" not in one.detail


def test_the_command_shows_what_a_committed_bundle_waits_for(
    queue: Queue, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = commit_and_die(queue, monkeypatch)
    ran = run("browse", "orders", "--explain", "--json")
    (one,) = map(json.loads, ran.out.splitlines())
    assert (one["id"], one["state"], one["why"]) == (id, "processing", "committed")


def half_joined(queue: Queue) -> Path:
    """A folder in which a process that is gone was putting the parts of a bundle together."""
    folder = Path(queue.layout.reassembly, "error,0123456789abcdef")
    folder.mkdir(parents=True)
    (folder / "4.1795383089375000-7523895424.B....text.JMS_dropq_firstI=0000000002").write_bytes(b"2\n")
    (folder / ".draft").write_bytes(b"\n2\n")
    return folder


def test_parts_that_somebody_puts_together_for_hours_are_no_finding(queue: Queue, clock: Clock) -> None:
    alive = Presence(str(half_joined(queue)), ALIVE, queue.context.storage)
    clock.advance(61 * MINUTE)
    assert queue.health(max_error=None).healthy and queue.fsck() == []
    alive.abandon()
    (finding,) = queue.fsck()
    assert finding.kind == "unfinished-join" and not queue.health(max_error=None).healthy


def test_parts_that_nobody_puts_together_any_more_are_found(queue: Queue, clock: Clock) -> None:
    folder = half_joined(queue)
    assert queue.health(max_error=None).healthy and [finding.kind for finding in queue.fsck()] == ["under-way"]
    clock.advance(61 * MINUTE)
    (reason,) = queue.health(max_error=None).reasons
    assert reason.kind == "unfinished-join" and "`dropq sweep orders`" in reason.message
    (finding,) = queue.fsck()
    assert (finding.kind, finding.path) == ("unfinished-join", str(folder))
    queue.sweep()
    assert queue.health(max_error=None).healthy and queue.fsck() == []
    assert queue.counts()["error"] == 1


def test_parts_of_what_was_sent_count_as_no_messages_and_go(queue: Queue, clock: Clock) -> None:
    (half_joined(queue) / ".draft").rename(Path(queue.layout.target, "4.1795383089375000-7523895424.B....text"))
    assert {state for state, count in queue.counts().items() if count} == {"target"}
    clock.advance(61 * MINUTE)
    assert [finding.kind for finding in queue.fsck()] == ["unfinished-join"]
    queue.sweep()
    assert queue.health(max_error=None).healthy and [message.body for message in queue.browse()] == [b"\n2\n"]
    assert queue.counts()["error"] == 0


def test_stats_count_a_committed_bundle_with_its_bytes(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_and_die(queue, monkeypatch)
    held = queue.stats()["processing"]
    assert (held.count, held.bytes) == (1, len(lines(3))) and held.oldest is not None


def test_a_wait_for_a_bundle_goes_on_until_its_parts_have_arrived(
    queue: Queue, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = queue.send(lines(2), type="text").id
    message = take(queue)
    records = message.records()
    next(records).ack()
    next(records).reject("two")
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "roll_forward", lambda *args, **kwargs: False)
        message.ack()
    waited = run("wait", "orders", "--id", id, "--timeout", "0s")
    assert (waited.code, waited.out) == (75, "") and "1 in processing" in waited.err
    assert run("wait", "orders", "--empty", "--timeout", "0s").code == 75
    queue.sweep()
    waited = run("wait", "orders", "--id", id)
    assert waited.code == 0 and waited.out.endswith("processed\n")
