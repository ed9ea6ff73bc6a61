"""A monitor reads what keeps a queue from being well, once, with the way out; it disturbs nothing."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
from children import in_child, unprivileged
from helpers import Clock, base, drop, health, leave_claimed, make_queue, names_in, reopened, take

from dropq import Message, NoSuchQueue, Queue, Root
from dropq.cli import look
from dropq.cli import main as cli
from dropq.diagnosis import health as health_module
from dropq.diagnosis.health import MAX_ERROR, Health, Limits, health_root
from dropq.format import names
from dropq.format.claims import Claim
from dropq.format.typed import Typed
from dropq.staging.jobs import Job, finish

HOUR = 3600
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Queue:
    return make_queue(tmp_path / "root", clock=clock)


@pytest.fixture
def run(queue: Queue, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `dropq health` on the root of the test, at its time; return exit code and both outputs."""
    monkeypatch.setattr("dropq.storage.clock.ServerClock.now_ms", lambda self: queue.root.clock.now_ms())

    def run(*argv: str, root: Path = queue.root.path) -> tuple[int, str, str]:
        code = cli.main(["--root", str(root), "health", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def kinds(found: Health) -> list[str]:
    return [reason.kind for reason in found.reasons]


def fail(queue: Queue, count: int) -> None:
    for _ in range(count):
        queue.send(b"x")
        take(queue).reject("no good")


def committed(queue: Queue) -> Job:
    """Commit a job whose driver dies before it sends anything."""
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("a")
    attempt.write_all([queue._address(b"")[0]], [b"x"])
    assert job._write_manifest([attempt.finish()])
    return job


# -- what is well --------------------------------------------------------------------------------------------------


def test_an_empty_queue_is_well(queue: Queue) -> None:
    found = health(queue, max_age=0, max_count=0, max_error=0)
    assert found.healthy and found.oldest_age is None and not found.notes and found.error is None
    assert found.counts == queue.counts()


def test_without_limits_messages_may_wait_for_any_time_and_in_any_number(queue: Queue, clock: Clock) -> None:
    queue.send_many([b"x"] * 100)
    clock.advance(1000 * HOUR)
    found = health(queue)
    assert found.healthy
    assert found.oldest_age == pytest.approx(1000 * HOUR, abs=1)


def test_a_message_in_work_is_well_however_long_it_takes(queue: Queue, clock: Clock) -> None:
    queue.send_many([b"x", b"y"])
    with queue.subscribe(max_backlog=None) as held, queue.subscribe(lease_period="3h") as leased:
        assert held.receive() and leased.receive()
        clock.advance(2 * HOUR)
        assert health(queue).healthy


def test_a_paused_queue_is_well_and_says_so(queue: Queue) -> None:
    queue.pause()
    found = health(queue)
    assert found.healthy and [note.kind for note in found.notes] == ["paused"]
    assert "dropq resume q" in found.notes[0].message
    queue.root.pause()
    assert "dropq resume --all" in health(queue).notes[0].message


def test_a_queue_whose_senders_wait_is_well_and_says_so(queue: Queue) -> None:
    lock = Path(queue.layout.write_lock)
    lock.touch()
    (note,) = health(queue).notes
    assert note.kind == "write-lock" and f"{lock} says; remove it" in note.message


def test_a_full_queue_is_well_and_says_what_becomes_of_sends(queue: Queue) -> None:
    for overflow, fate in (("reject", "refused"), ("discard", "discarded"), ("block", "wait")):
        full = queue.root.create_queue(overflow, max_unprocessed=2, overflow=overflow)
        full.send_many([b"x", b"y"])
        found = health(full)
        assert found.healthy and [note.kind for note in found.notes] == ["full"]
        assert fate in found.notes[0].message and "start a consumer" in found.notes[0].message


# -- age, count, errors --------------------------------------------------------------------------------------------


def test_a_message_that_waits_too_long_is_reported(queue: Queue, clock: Clock) -> None:
    queue.send(b"x", priority=0)
    clock.advance(HOUR)
    queue.send(b"y", priority=9)
    assert health(queue, max_age="1h").healthy
    clock.advance(1)
    (reason,) = health(queue, max_age="1h").reasons
    assert (reason.kind, reason.figure, reason.limit) == ("old-message", HOUR + 1, HOUR)
    assert "1h1s" in reason.message and "start a consumer" in reason.message


def old_foreign(queue: Queue, clock: Clock) -> None:
    drop(queue, "report.csv", b"x")


def named(queue: Queue, clock: Clock) -> None:
    queue.send(b"x", message_id="mine", type="order")


def with_properties(queue: Queue, clock: Clock) -> None:
    queue.send(b"x", properties={"region": "EU"}, type="order")


def redelivered(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    take(queue).nack()


def claimed_by_hand(queue: Queue, clock: Clock) -> None:
    clock.advance(HOUR)  # the name tells another time than the file
    queue.send(b"x")
    (file,) = names_in(queue, "target")
    target = base(queue) / "target"
    os.rename(target / file, target / f"someone-aaaaaaaaaa-1,0,1~{file}")


def requeued_long_ago(queue: Queue, clock: Clock) -> None:
    fail(queue, 1)
    queue.requeue()


def due_and_not_delivered(queue: Queue, clock: Clock) -> None:
    queue.send(b"x", delay="1h")
    clock.advance(HOUR)


def delayed_by_hand(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    queue.send(b"x", delay="1d")
    (file,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / file, Path(queue.layout.delayed) / file)


@pytest.mark.parametrize(
    "how",
    [
        old_foreign,
        named,
        with_properties,
        redelivered,
        claimed_by_hand,
        requeued_long_ago,
        due_and_not_delivered,
        delayed_by_hand,
    ],
)
def test_the_age_of_any_message_that_could_be_had_is_known(
    queue: Queue, clock: Clock, how: Callable[[Queue, Clock], None]
) -> None:
    how(queue, clock)
    clock.advance(2 * HOUR)
    found = health(queue, max_age="1h")
    assert kinds(found) == ["old-message", *["overdue"] * (how in (due_and_not_delivered, delayed_by_hand))]
    assert found.oldest_age == pytest.approx(2 * HOUR, abs=5)


def test_a_requeued_message_begins_to_wait_again(queue: Queue, clock: Clock) -> None:
    fail(queue, 1)
    clock.advance(5 * HOUR)
    queue.requeue()
    assert health(queue, max_age="1m").healthy


def test_what_is_not_due_yet_does_not_wait(queue: Queue, clock: Clock) -> None:
    queue.send(b"x", delay="1d")
    clock.advance(HOUR)
    found = health(queue, max_age=0, max_count=0)
    assert found.healthy and found.oldest_age is None and found.counts["delayed"] == 1


def test_a_message_of_a_clock_that_is_ahead_is_not_older_than_none(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    clock.advance(-HOUR)
    assert health(queue, max_age=0).oldest_age == 0


def held_without_a_lease(queue: Queue) -> Message:
    return take(queue)


def held_by_a_script(queue: Queue) -> None:
    (file,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / file, base(queue) / "processing" / f"me~{file}")


def held_by_nobody_known(queue: Queue) -> None:
    (file,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / file, base(queue) / "processing" / f"someone-aaaaaaaaaa-1,0,1~{file}")


def held_by_hand_under_a_name_of_its_own(queue: Queue) -> None:
    (file,) = names_in(queue, "target")
    os.rename(base(queue) / "target" / file, base(queue) / "processing" / "report.csv")


@pytest.mark.parametrize(
    "how", [held_without_a_lease, held_by_a_script, held_by_nobody_known, held_by_hand_under_a_name_of_its_own]
)
def test_what_is_held_without_a_lease_waits_too(queue: Queue, clock: Clock, how: Callable[[Queue], object]) -> None:
    queue.send(b"x")
    held = how(queue)  # kept: who is closed gives back what it holds
    clock.advance(2 * HOUR)
    found = health(queue, max_age="1h")
    (reason,) = found.reasons
    assert (reason.kind, reason.limit) == ("old-message", HOUR)
    assert reason.figure == found.oldest_age == pytest.approx(2 * HOUR, abs=5)
    assert "held without a lease" in reason.message and "dropq browse q --explain --state processing" in reason.message
    queue.send(b"y")
    assert kinds(health(queue, max_age="1h")) == ["old-message"]
    del held


def test_a_lease_that_is_renewed_is_work_under_way(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    message = queue.subscribe(lease_period="1h").receive()
    assert message is not None
    clock.advance(HOUR / 2)
    message.extend("2h")
    clock.advance(HOUR)
    found = health(queue, max_age="1h")
    assert found.healthy and found.oldest_age is None


def test_more_messages_than_allowed_are_reported(queue: Queue) -> None:
    queue.send_many([b"x"] * 3)
    (base(queue) / "target" / ".upload").touch()
    assert health(queue, max_count=3).healthy
    (reason,) = health(queue, max_count=2).reasons
    assert (reason.kind, reason.figure, reason.limit) == ("many-waiting", 3, 2)


def test_too_much_that_waits_is_explained_by_a_pause_or_by_who_works(queue: Queue) -> None:
    queue.send_many([b"x"] * 2)
    take(queue)
    assert "dropq browse q --explain --state processing" in health(queue, max_count=0).reasons[0].message
    queue.pause()
    assert "dropq resume q" in health(queue, max_count=0).reasons[0].message


def test_what_waits_behind_a_barrier_is_explained_by_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, barrier_expression="JMSType = 'sync'")
    queue.send("sync", type="sync")
    queue.send("b")
    (reason,) = queue.health(max_count=1).reasons
    assert reason.message.endswith("start a consumer; `dropq browse q --explain` says if a barrier waits")
    with reopened(queue).subscribe() as one:
        assert one.receive() is not None
        waits = f"until it is settled: 1 subscription has not settled its share of it: {one.id}"
        health = queue.health(max_count=0)
        (note,), (reason,) = health.notes, health.reasons
        assert (note.kind, note.message.endswith(waits), reason.message.endswith(waits)) == ("barrier", True, True)


def test_one_message_in_error_is_reported_unless_a_limit_allows_it(queue: Queue) -> None:
    fail(queue, 1)
    (reason,) = health(queue).reasons
    assert (reason.kind, reason.figure, reason.limit) == ("many-errors", 1, MAX_ERROR)
    assert reason.message == "error/ has 1 message; `dropq browse q --state error` says why"
    assert health(queue, max_error=1).healthy
    fail(queue, 1)
    (reason,) = health(queue, max_error=1).reasons
    assert (reason.kind, reason.figure, reason.limit) == ("many-errors", 2, 1)
    assert "over the limit of 1" in reason.message
    assert health(queue, max_error=None).healthy


def test_the_command_has_the_limit_of_the_library() -> None:
    assert inspect.signature(look.health).parameters["max_error"].default == MAX_ERROR


# -- what nobody swept -----------------------------------------------------------------------------------------------


def swept(queue: Queue, kind: str, clock: Clock) -> None:
    """What is told after a minute, and no sooner, is not told any more once it was swept."""
    clock.advance(50)
    assert health(queue).healthy
    clock.advance(20)
    (reason,) = health(queue).reasons
    assert (reason.kind, reason.limit) == (kind, 60)
    assert reason.figure == pytest.approx(70, abs=5)
    assert "dropq sweep q" in reason.message and reason.message.startswith("1 ")
    queue.sweep()
    assert health(queue).healthy


def test_what_a_dead_consumer_holds_is_reported_until_it_is_swept(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    leave_claimed(queue)
    swept(queue, "dead-holder", clock)


def test_a_dead_consumer_with_a_lease_is_reported_once(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    leave_claimed(queue, lease="1s")
    clock.advance(HOUR)
    assert kinds(health(queue)) == ["dead-holder"]


def test_a_lease_that_ran_out_is_reported_until_it_is_swept(queue: Queue, clock: Clock) -> None:
    queue.send(b"x")
    assert queue.subscribe(lease_period="1h", detached=True).receive() is not None
    clock.advance(HOUR)
    swept(queue, "lapsed-lease", clock)


def test_what_is_due_and_nobody_delivers_is_reported_until_it_is_swept(queue: Queue, clock: Clock) -> None:
    queue.send(b"x", delay=HOUR)
    clock.advance(HOUR - 10)
    assert health(queue).healthy
    clock.advance(10)
    swept(queue, "overdue", clock)


def test_nothing_is_overdue_beside_a_consumer_that_lives(queue: Queue, clock: Clock) -> None:
    queue.send(b"in its handler")
    queue.send(b"x", delay=HOUR)
    with queue.subscribe() as consumer:
        message = consumer.receive(0)
        assert message is not None
        clock.advance(HOUR + 100)
        assert health(queue).healthy
        message.ack()
    assert kinds(health(queue)) == ["overdue"]


@pytest.mark.parametrize("state", ["target", "processing", ".dropq/delayed"])
def test_a_message_that_kills_its_holders_is_reported_from_the_fourth_death_on(queue: Queue, state: str) -> None:
    (base(queue) / state).mkdir(exist_ok=True)
    held = f"{Claim('c-0123456789-1', 0, 4).prefix}" if state == "processing" else ""
    (base(queue) / state / f"{held}4.three.B.....JMS_dropq_diedI=3").touch()
    assert "kills-its-holders" not in kinds(health(queue))
    (base(queue) / state / f"{held}4.four.B.....JMS_dropq_diedI=4").touch()
    (reason,) = (reason for reason in health(queue).reasons if reason.kind == "kills-its-holders")
    assert reason.figure == 1
    assert "one 4 times" in reason.message and "`dropq show q four`" in reason.message


@pytest.mark.parametrize("lease", [None, "1s"])
def test_a_claim_that_is_settled_while_it_is_looked_at_is_well(
    queue: Queue, clock: Clock, lease: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(b"x")
    subscription = queue.subscribe(lease_period=lease)
    message = subscription.receive()
    assert message is not None
    clock.advance(HOUR)

    def known(folder: str) -> frozenset[str]:
        message.ack()
        return frozenset(os.listdir(folder) if lease is None else ())

    monkeypatch.setattr("dropq.storage.liveness.known", known)
    monkeypatch.setattr("dropq.storage.liveness.is_dead", lambda folder, one: True)
    assert health(queue).healthy


def test_a_committed_job_that_nobody_sends_is_reported_until_it_is_swept(queue: Queue, clock: Clock) -> None:
    committed(queue)
    swept(queue, "unfinished-job", clock)


def test_a_job_that_was_dropped_as_it_was_committed_is_reported_too(queue: Queue, clock: Clock) -> None:
    job = committed(queue)
    os.rename(job.folder, Path(queue.layout.working) / ".drop-job-0123456789ab")
    swept(queue, "unfinished-job", clock)


def test_a_job_that_is_not_committed_or_that_is_sent_is_well(queue: Queue, clock: Clock) -> None:
    job = Job(queue.context, "open")
    job.begin()
    Path(job.folder, "manifest.json").touch()  # reserved for the rename that commits it
    (base(queue) / "working" / ".job-file").touch()
    clock.advance(HOUR)
    assert health(queue).healthy
    finish(queue.context, committed(queue).folder)
    clock.advance(HOUR)
    assert health(queue).healthy


def test_what_scripts_hold_is_left_to_them(queue: Queue, clock: Clock) -> None:
    drop(queue, "report.csv", b"x")
    os.rename(base(queue) / "target" / "report.csv", base(queue) / "processing" / "report.csv")
    clock.advance(HOUR)
    assert health(queue).healthy


# -- what cannot be read ------------------------------------------------------------------------------------------


def test_a_queue_that_is_not_there_is_an_error(queue: Queue, run: Cli) -> None:
    with pytest.raises(NoSuchQueue):
        health(queue.root.queue("nosuch"))
    code, out, err = run("nosuch")
    assert (code, out) == (66, "") and "nosuch" in err
    assert run("q", root=queue.root.path / "nosuch")[0] == 66


def test_a_queue_whose_configuration_is_broken_is_reported(queue: Queue, run: Cli) -> None:
    Path(queue.layout.config_file).write_text("lease_perod = 3\nmax_error = ?\n")
    found = health(reopened(queue))
    assert kinds(found) == ["configuration"] and found.counts == {} and found.oldest_age is None
    assert "dropq config check" in found.reasons[0].message
    for argv in ([], ["q"]):
        code, out, err = run(*argv)
        assert (code, err) == (78, "")
        assert out.startswith("q\tunhealthy\tconfiguration\t") and out.count("\n") == 1


def test_a_root_whose_configuration_is_broken_is_an_error(queue: Queue, run: Cli) -> None:
    Path(queue.root.layout.config_file).write_text("format = 2\n")
    assert run()[:2] == (78, "")


@pytest.mark.parametrize("folders", [["processing"], ["target"], ["target", "processing"]])
def test_a_queue_that_lost_its_folders_is_not_passed_over(queue: Queue, folders: list[str], run: Cli) -> None:
    for folder in folders:
        (base(queue) / folder).rmdir()
    (found,) = reopened(queue).root.health()
    assert kinds(found) == ["storage"]
    (reason,) = found.reasons
    assert "`dropq fsck q --repair` makes" in reason.message and reason.message.count("`") == 2
    assert run()[0] == 66


def test_a_folder_that_lies_on_another_file_system_is_an_io_error(queue: Queue, run: Cli) -> None:
    (base(queue) / "error").rmdir()
    (base(queue) / "error").symlink_to("/proc")
    code, out, _ = run("q", "--json")
    assert code == 74
    assert json.loads(out)["reasons"][0]["kind"] == "storage"


@pytest.mark.parametrize("folder", [".", "target", "processing"])
def test_a_queue_that_is_closed_to_the_monitor_is_not_well(queue: Queue, folder: str) -> None:
    (base(queue) / folder).chmod(0)

    def looked() -> list[tuple[list[str], int | None, str]]:
        found = [health(reopened(queue)), *reopened(queue).root.health()]
        return [(kinds(one), getattr(one.error, "errno", None), one.reasons[0].message) for one in found]

    try:
        closed = unprivileged(looked)
    finally:
        (base(queue) / folder).chmod(0o755)
    assert len(closed) == 2
    for reported, errno, message in closed:
        assert (reported, errno) == (["storage"], 13)
        assert f"`ls -ld {quote(str(base(queue) / folder))}` shows who may look" in message


def test_what_is_no_queue_is_passed_over(queue: Queue) -> None:
    for folder in ("lost+found", "dropboxmq", ".hidden"):
        queue.root.path.joinpath(folder).mkdir(mode=0)
    queue.root.path.joinpath("data").mkdir()
    assert unprivileged(lambda: [found.queue for found in reopened(queue).root.health()]) == ["q"]


def test_a_queue_that_was_deleted_meanwhile_is_passed_over(queue: Queue) -> None:
    queue.root.create_queue("r")
    found = health_root(queue.root.context, Limits())
    assert next(found).queue == "q"
    queue.root.delete_queue("r")
    assert list(found) == []


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_line_a_reason_and_one_for_what_is_well(queue: Queue, run: Cli) -> None:
    queue.root.create_queue("r").pause()
    assert run("q") == (0, "q\thealthy\t\t\n", "")
    fail(queue, 1)
    queue.send(b"x")
    code, out, err = run("--max-error", "0", "--max-count", "0")
    assert (code, err) == (1, "")
    assert [line.split("\t")[:3] for line in out.splitlines()] == [
        ["q", "unhealthy", "many-waiting"],
        ["q", "unhealthy", "many-errors"],
        ["r", "healthy", "paused"],
    ]
    assert run("q", "--max-error", "0")[0] == 1
    assert run("r", "--max-error", "0")[0] == 0


def test_json_has_an_object_a_queue(queue: Queue, run: Cli, clock: Clock) -> None:
    queue.root.create_queue("r").pause()
    queue.send(b"x")
    clock.advance(90)
    code, out, _ = run("--json", "--max-age", "1m")
    q, r = map(json.loads, out.splitlines())
    (reason,) = q.pop("reasons")
    assert code == 1
    assert [note["kind"] for note in q.pop("notes")] == ["still"]
    assert q == {"queue": "q", "healthy": False, "counts": queue.counts(), "oldest_age": 90.0}
    assert (reason["kind"], reason["figure"], reason["limit"]) == ("old-message", 90.0, 60.0)
    assert (r["healthy"], r["reasons"], r["oldest_age"]) == (True, [], None)
    assert [note["kind"] for note in r["notes"]] == ["paused"]


def test_a_broken_queue_among_others_is_one_of_several(queue: Queue, run: Cli) -> None:
    Path(queue.root.create_queue("broken").layout.config_file).write_text("no toml")
    code, out, _ = run()
    assert code == 1
    assert [line.split("\t")[:2] for line in out.splitlines()] == [["broken", "unhealthy"], ["q", "healthy"]]


def test_a_folder_that_is_not_mounted_is_not_well(tmp_path: Path, run: Cli) -> None:
    (tmp_path / "mount").mkdir()
    code, out, err = run(root=tmp_path / "mount")
    assert (code, out) == (66, "") and "is it mounted?" in err
    Root.create(tmp_path / "new")
    code, out, err = run(root=tmp_path / "new")
    assert (code, out) == (0, "") and "no queues" in err


def test_names_that_a_shell_would_take_apart_are_quoted(queue: Queue, run: Cli) -> None:
    queue.root.create_queue("two words").pause()
    assert "`dropq resume 'two words'`" in run("two words")[1]


@pytest.mark.parametrize("argv", [["--max-age", "soon"], ["--max-count", "-1"], ["--max-error", "x"], ["a/b"]])
def test_limits_and_names_that_are_none_are_wrong_usage(run: Cli, argv: list[str]) -> None:
    assert run(*argv)[:2] == (2, "")


# -- it disturbs nothing -----------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_ctime_ns, status.st_mtime_ns)
    return found


def test_it_changes_nothing_and_opens_no_message(queue: Queue, clock: Clock) -> None:
    queue.send_many([b"x"] * 5)
    drop(queue, "report.csv", b"x")
    fail(queue, 1)
    leave_claimed(queue)
    committed(queue)
    assert take(queue)
    clock.advance(HOUR)
    before = tree(queue.root.path)

    def looked() -> tuple[list[str], list[str]]:
        seen: list[str] = []

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open":
                seen.append(str(args[0]))

        sys.addaudithook(hook)
        (found,) = reopened(queue).root.health(max_age=1, max_count=1)
        return kinds(found), seen

    reported, opened = in_child(looked)
    assert reported == ["old-message", "many-waiting", "many-errors", "dead-holder", "unfinished-job"]
    assert tree(queue.root.path) == before
    states = ("target", "delayed", "processing", "error", "working")
    files = [path for path in opened if not os.path.isdir(path)]
    assert files and not [path for path in files if any(f"/{state}/" in path for state in states)]


def test_most_ages_are_known_from_names_alone(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send_many([b"x"] * 3)
    queue.send(b"x", type="order", properties={"n": 1})
    fail(queue, 1)
    queue.requeue()

    def refuse(path: str) -> int:
        raise AssertionError(f"{path} was looked at")

    monkeypatch.setattr("dropq.storage.reading.changed_ms", refuse)
    assert health(queue).healthy


@pytest.mark.parametrize("properties", [{}, {"a": Typed("S", "b")}])
@pytest.mark.parametrize("priority", [4, 0, -3])
def test_what_is_read_at_a_glance_is_what_the_grammar_reads(
    queue: Queue, clock: Clock, priority: int, properties: dict[str, Typed]
) -> None:
    full_name = names.Name(queue.root.context.ids.next(), priority, properties=properties)
    for name in (
        full_name,
        replace(full_name, since=clock.ms - 5000),
        replace(full_name, since=clock.ms - 7000, delivery_count=2),
    ):
        file = names.file_name(name)
        drop(queue, file, b"x")
        read = names.parse(file)
        clock.advance(10)
        assert health(queue).oldest_age == (clock.ms - (read.since or read.timestamp or 0)) / 1000
        (base(queue) / "target" / file).unlink()


# -- what the queue's own filter keeps back ----------------------------------------------------------------------------


def test_what_the_queues_own_filter_keeps_back_is_told_and_a_queue_that_is_full_of_it_is_not_well(
    tmp_path: Path, run: Cli
) -> None:
    queue = make_queue(tmp_path / "other", filter="region = 'eu'", max_unprocessed=3)
    queue.send_many({"body": b"a", "properties": {"region": region}} for region in ("eu", "us", "mars"))
    found = queue.health()
    (note,) = (note for note in found.notes if note.kind == "filtered")
    assert (found.healthy, note.figure) == (True, 2)
    assert note.message.startswith("2 messages that `filter = \"region = 'eu'\"` does not match")
    take(queue).ack()
    drop(queue, "by-hand.csv", b"c")
    found = queue.health()
    (reason,) = found.reasons
    assert (reason.kind, reason.figure, reason.limit) == ("jammed", 3, 3)
    assert f"`dropq move {queue.name} OTHER --all` brings them elsewhere" in reason.message
    assert run(queue.name, root=queue.root.path)[0] == 1
    queue.move(queue.root.create_queue("rest"))
    assert queue.health().healthy and queue.health().notes == ()


def test_a_queue_that_is_full_of_bodies_that_its_filter_cannot_read_is_not_well(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "other", filter="/a = 1", max_unprocessed=1)
    queue.send('{"a": 1, "b": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert queue.receive() is None
    (reason,) = queue.health().reasons
    assert reason.kind == "jammed"
    assert "`filter = '/a = 1'` does not match (of 1 it cannot read the body)" in reason.message


def test_a_filter_that_needs_what_is_not_installed_stops_no_look_at_the_queue(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base(queue) / "queue.toml").write_text("filter = \"/a LIKE 'b'\"\n")
    queue.send("a")
    monkeypatch.setitem(sys.modules, "re2", None)
    assert "filtered" not in [note.kind for note in Root(queue.root.path).queue(queue.name).health().notes]


def test_a_long_history_costs_one_look_at_its_mount(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        queue.send(b"x")
        take(queue).ack()
    asked: list[str] = []

    def tells_writes(folder: str) -> bool:
        asked.append(folder)
        return True

    monkeypatch.setattr(health_module, "tells_writes", tells_writes)
    assert health(queue).healthy
    assert asked == [queue.layout.processed]
