"""A job is sent whole or not at all, whoever stops, fails or interferes at whichever step; each message once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forks import DIED, ended, fork, forked
from helpers import Clock, Make, base, files, first_and_long, make_queue, take, until, where

from dropq import ConfigError, DropqError, NoSuchQueue, Queue, QueueFull, Root, StorageError
from dropq.lifecycle.context import QueueContext
from dropq.staging import jobs
from dropq.staging.jobs import Epoch, Job, StagedAttempt
from dropq.storage import reading, system_calls
from dropq.storage.files import Storage

#: The calls by which dropq changes a root.
CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")
#: The bodies of a job, as `stage` stages them; the last one is delayed.
ALL = [b"0", b"1", b"2", b"3", b"later"]
#: Bodies of a job whose renames take a while.
MANY_BODIES = [b"%d" % number for number in range(100)]
#: More steps than any commit of such a job takes.
MANY = 400

Hook = Callable[[int], None]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every step that durability `full` takes, but do not wait for a disk: nothing here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(params=["renameat2", "no renameat2"])
def either_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on a file system that renames without replacing, then as on one that cannot, such as NFS."""
    if request.param == "no renameat2":
        monkeypatch.setattr(system_calls, "rename_noreplace", refuse)


def refuse(source: str, destination: str, *folders: int) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)


@contextmanager
def steps(before: Hook, after: Hook = lambda step: None) -> Iterator[None]:
    """Call hooks around each call that changes a root, with its number; what they do themselves is not counted."""
    numbers, inside = count(1), False

    def stepping(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal inside
            if inside:
                return real(*args, **kwargs)
            inside = True
            try:
                step = next(numbers)
                before(step)
                result = real(*args, **kwargs)
                after(step)
                return result
            finally:
                inside = False

        return call

    with ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(mock.patch.object(os, name, stepping(getattr(os, name))))
        noreplace = stepping(system_calls.rename_noreplace)
        patches.enter_context(mock.patch.object(system_calls, "rename_noreplace", noreplace))
        yield


def stage(queue: Queue, job: Job, bodies: list[bytes] = ALL) -> list[StagedAttempt]:
    """Stage a job in two attempts, the last body delayed; a third attempt is a loser that nobody lists."""
    job.begin()
    attempts = [job.attempt(label) for label in ("p00000-a0", "p00001-a0", "p00001-a1")]
    for number, body in enumerate(bodies):
        delay = "1ms" if body == b"later" else None
        attempts[number % 2].write_all([queue._address(b"", delay=delay)[0]], [body])
    attempts[2].write_all([queue._address(b"")[0]], [b"loser"])
    return [attempt.finish() for attempt in attempts[:2]]


def begun(queue: Queue) -> Job:
    job = Job(queue.context, "job")
    job.begin()
    return job


def sent(queue: Queue) -> list[bytes]:
    """The bodies in target/ and delayed/, doubles and all."""
    return sorted([*files(Path(queue.layout.target)).values(), *files(Path(queue.layout.delayed)).values()])


def working(queue: Queue) -> list[str]:
    return os.listdir(queue.layout.working)


def committed(queue: Queue) -> bool:
    """Whether a manifest, or the ledger, says that the job counts."""
    manifests = [*Path(queue.layout.working).glob(".*/manifest.json"), *Path(queue.layout.ledger).glob("[!.]*")]
    return any(path.stat().st_size for path in manifests)


def dying_at(step: int) -> Hook:
    def hook(now: int) -> None:
        if now == step:
            os._exit(DIED)

    return hook


def failing_at(step: int) -> Hook:
    def hook(now: int) -> None:
        if now == step:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return hook


def acting_at(step: int, action: Callable[[], object], acted: list[int]) -> Hook:
    def hook(now: int) -> None:
        if now == step:
            acted.append(now)
            action()

    return hook


def fate_of(commit: Callable[[], object]) -> str:
    """Return what a commit says became of the job; whatever it raises must say it."""
    try:
        commit()
    except (StorageError, ConfigError, NoSuchQueue, QueueFull) as error:
        said = str(error).replace("nothing is sent now", "nothing was sent").replace("job was not", "nothing was")
        return next(fate for fate in ("nothing was sent", "is committed", "drops job") if fate in said)
    return "sent"


# -- crashes and errors ----------------------------------------------------------------------------------------


def test_a_job_whose_manifest_no_sweep_would_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    staged = stage(queue, job)
    monkeypatch.setattr("dropq.storage.reading.LONG_LIST", 100)
    with pytest.raises(StorageError, match=r"nothing was sent: .* make several jobs"):
        job.commit(staged)
    assert sent(queue) == [] and not committed(queue)


@pytest.mark.usefixtures("either_rename")
@pytest.mark.crashes
def test_a_driver_that_dies_before_any_step_of_its_commit_sends_all_or_nothing(tmp_path: Path) -> None:
    outcomes = set()
    for step in range(1, MANY):
        queue = make_queue(tmp_path / str(step), durability="full")
        job = Job(queue.context, "job")
        listed = stage(queue, job)

        def commit(job: Job = job, listed: list[StagedAttempt] = listed, step: int = step) -> None:
            with steps(dying_at(step)):
                job.commit(listed)

        code = forked(commit)
        all_of_it = committed(queue)
        queue.sweep(jobs_older_than=0)
        assert sent(queue) == (ALL if all_of_it else []), f"died before step {step}"
        assert working(queue) == []
        outcomes.add((code, all_of_it))
        if code == 0:
            break
    assert outcomes == {(DIED, False), (DIED, True), (0, True)}


@pytest.mark.usefixtures("either_rename")
@pytest.mark.crashes
def test_a_sweep_that_dies_before_any_step_is_taken_up_by_the_next(tmp_path: Path) -> None:
    """The job was committed, and half of it was renamed when its driver died."""
    for step in range(1, MANY):
        queue = make_queue(tmp_path / str(step), durability="full")
        leave_half(queue)

        def sweep(queue: Queue = queue, step: int = step) -> None:
            with steps(dying_at(step)):
                jobs.sweep(queue.context)

        code = forked(sweep)
        queue.sweep(jobs_older_than=0)
        assert (sent(queue), working(queue)) == (ALL, []), f"died before step {step}"
        if code == 0:
            assert step > 30
            return
        assert code == DIED
    pytest.fail("the sweep never came to its end")


def leave_half(queue: Queue, job_id: str = "job") -> Job:
    """Leave a job as a driver does that dies after two of its renames."""
    job = Job(queue.context, job_id)
    listed = stage(queue, job)
    assert job._write_manifest(listed)
    for attempt, (file, *_) in listed:
        os.rename(f"{job.folder}/{attempt}/{file}", f"{queue.layout.target}/{file}")
    return job


@pytest.mark.usefixtures("either_rename")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("overflow", first_and_long(["rest", ""]))
@pytest.mark.crashes
def test_an_error_at_any_step_of_a_commit_tells_what_became_of_the_job(
    tmp_path: Path, when: str, overflow: str
) -> None:
    """Spark aborts after a failed commit; an error may also come after the call was done, as over NFS."""
    fates = set()
    for step in range(1, MANY):
        queue, rest = overflowing(tmp_path / str(step))
        job = Job(queue.context, "job")
        listed = stage(queue, job)
        fault = failing_at(step)
        with steps(fault) if when == "before" else steps(lambda step: None, fault):
            fate = fate_of(partial(job.commit, listed, overflow=overflow))
        assert fate == "sent" or committed(queue) == (fate == "is committed"), f"an error {when} step {step}"
        if fate != "sent":
            job.abort()
        assert in_both(queue, rest) == ([] if fate == "nothing was sent" else ALL), f"an error {when} step {step}"
        queue.sweep(jobs_older_than=0)
        assert working(queue) == []
        fates.add(fate)
        if fate == "sent" and step > 100:
            break
    assert fates == {"nothing was sent", "is committed", "sent"}


# -- meetings ----------------------------------------------------------------------------------------------------


def sweep_all(queue: Queue) -> None:
    jobs.sweep(queue.context, older_than=0)


def sweep_then_another_run(queue: Queue) -> None:
    """Drop the job; then another run of it begins, and makes the folder anew."""
    jobs.sweep(queue.context, older_than=0)
    stage(queue, Job(queue.context, "job"), [b"another run"])


def sweep_that_dies(queue: Queue) -> None:
    """Take the job's folder out of the way, as a sweep does that is killed right after."""
    with suppress(FileNotFoundError):
        os.rename(Job(queue.context, "job").folder, jobs._drop_path(Job(queue.context, "job").folder))


@pytest.mark.usefixtures("either_rename")
@pytest.mark.parametrize("meeting", [sweep_all, sweep_then_another_run, sweep_that_dies])
@pytest.mark.crashes
def test_a_sweep_that_drops_a_job_at_any_step_of_its_commit(tmp_path: Path, meeting: Callable[[Queue], None]) -> None:
    outcomes = set()
    for step in range(1, MANY):
        queue = make_queue(tmp_path / str(step), durability="full")
        job = Job(queue.context, "job")
        listed = stage(queue, job)
        acted: list[int] = []
        with steps(acting_at(step, partial(meeting, queue), acted)):
            fate = fate_of(partial(job.commit, listed))
        assert fate in ("sent", "nothing was sent")
        expected = ALL if fate == "sent" else []
        assert sent(queue) == expected, f"swept at step {step}"
        queue.sweep(jobs_older_than=0)
        assert (sent(queue), working(queue)) == (expected, [])
        outcomes.add(bool(expected))
        if not acted:
            break
    assert outcomes == {True, False}


@pytest.mark.usefixtures("either_rename")
@pytest.mark.parametrize("durability", ["none", "full"])
@pytest.mark.crashes
def test_a_queue_that_is_deleted_at_any_step_of_a_commit_is_no_silence(tmp_path: Path, durability: str) -> None:
    """The deletion is refused, or the driver hears of it: no commit says that it sent what went with the queue."""
    seen = set()
    for step in range(1, MANY):
        queue = make_queue(tmp_path / str(step), durability=durability)
        job = Job(queue.context, "job")
        listed = stage(queue, job)
        acted: list[int] = []

        def delete(queue: Queue = queue) -> None:
            with suppress(StorageError):
                queue.root.delete_queue("q")

        with steps(acting_at(step, delete, acted)):
            fate = fate_of(partial(job.commit, listed))
        queue = Root(queue.root.path).queue("q")
        if queue.exists():
            queue.sweep(jobs_older_than=0)
            assert sent(queue) == ([] if fate == "nothing was sent" else ALL), f"deleted at step {step}"
        else:
            assert fate != "sent", f"deleted at step {step}"
        seen.add(queue.exists())
        if not acted:
            break
    assert seen == {True, False}


def test_a_queue_with_a_job_that_was_cut_off_is_not_deleted(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    leave_half(queue)
    for message in iter(queue.receive, None):
        message.ack()
    queue.close()
    with pytest.raises(StorageError, match="messages to work on"):
        queue.root.delete_queue("q")
    assert queue.counts()["target"] == len(ALL) - 3  # two are worked off, one is delayed


@pytest.mark.usefixtures("either_rename")
@pytest.mark.crashes
def test_a_commit_at_any_step_of_a_sweep_that_drops_the_job(tmp_path: Path) -> None:
    all_fates = set()
    for step in range(1, MANY):
        queue = make_queue(tmp_path / str(step), durability="full")
        job = Job(queue.context, "job")
        listed = stage(queue, job)
        acted: list[int] = []
        fates: list[str] = []

        def commit(job: Job = job, listed: list[StagedAttempt] = listed, fates: list[str] = fates) -> None:
            fates.append(fate_of(lambda: job.commit(listed)))

        with steps(acting_at(step, commit, acted)):
            jobs.sweep(queue.context, older_than=0)
        assert sent(queue) == (ALL if fates == ["sent"] else []), f"committed at step {step}"
        queue.sweep(jobs_older_than=0)
        assert working(queue) == []
        all_fates.update(fates)
        if not acted:
            break
    assert all_fates == {"sent", "nothing was sent"}


@pytest.mark.usefixtures("either_rename")
def test_two_drivers_of_one_job_id_send_one_of_the_two(tmp_path: Path) -> None:
    """The other one stages, commits and is through at any step of this one's commit."""
    other = [b"5", b"6"]
    seen = set()
    for step in range(1, MANY):
        queue = make_queue(tmp_path / str(step), durability="full")
        job = Job(queue.context, "job")
        listed, others = stage(queue, job), stage(queue, job, other)
        acted: list[int] = []

        def commit(queue: Queue = queue, others: list[StagedAttempt] = others) -> None:
            assert fate_of(lambda: Job(queue.context, "job").commit(others)) in ("sent", "nothing was sent")

        with steps(acting_at(step, commit, acted)):
            count_sent = job.commit(listed)
        assert sent(queue) == (ALL if count_sent else other), f"met at step {step}"
        assert working(queue) == []
        seen.add(count_sent)
        if not acted:
            break
    assert seen == {0, len(ALL)}


@pytest.mark.parametrize("others", ["in the queue", "in the other queue", "in a backup"])
def test_a_job_that_a_power_cut_brought_back_under_old_names_is_not_sent_again(tmp_path: Path, others: str) -> None:
    queue, rest = overflowing(tmp_path)
    goal = rest if others == "in the other queue" else queue
    job = Job(queue.context, "job")
    staged = stage(queue, job, [b"1", b"2", b"3", b"4"])
    assert job._write_manifest(staged, "rest" if goal is rest else "")
    listed = [(Path(job.folder, one.attempt), file) for one in staged for file in one.files]
    for folder, file in listed[1:]:  # the first is still to be sent
        os.link(folder / file, tmp_path / file if others == "in a backup" else Path(goal.layout.target, file))
    if others != "in a backup":
        take(goal).ack()  # one moved on
    jobs.sweep(queue.context)
    assert sorted([*sent(goal), *files(Path(goal.layout.processed)).values()]) == [b"1", b"2", b"3", b"4"]
    assert working(queue) == []


@pytest.mark.parametrize("durability", ["none", "full"])
def test_processes_that_roll_one_job_forward_at_once_send_each_message_once(tmp_path: Path, durability: str) -> None:
    queue = make_queue(tmp_path, durability=durability)
    job = Job(queue.context, "job")
    bodies = [str(number).encode() for number in range(300)]
    assert job._write_manifest(stage(queue, job, bodies))
    reading, writing = os.pipe()

    def roll(number: int) -> None:
        os.close(writing)
        os.read(reading, 1)  # until the parent lets go: all at once
        if number % 2:
            jobs.sweep(queue.context, older_than=0)
        else:
            assert Job(queue.context, "job").abort() in (True, False)

    pids = [fork(partial(roll, number)) for number in range(4)]
    os.close(writing)
    codes = [ended(pid) for pid in pids]
    os.close(reading)
    assert codes == [0] * 4
    queue.sweep(jobs_older_than=0)
    assert sent(queue) == sorted(bodies)
    assert working(queue) == []


@pytest.mark.usefixtures("either_rename")
def test_two_messages_staged_under_one_name_are_both_sent(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    job = begun(queue)
    file = queue._address(b"", priority=7)[0]
    listed = []
    for body in (b"one", b"two"):
        attempt = job.attempt("p")
        attempt.write_all([file], [body])
        listed.append(attempt.finish())
    assert job.commit(listed) == 2
    assert sent(queue) == [b"one", b"two"]
    assert {message.priority for message in queue.browse()} == {7}


def test_two_messages_staged_under_one_name_have_two_names_although_the_first_was_claimed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    job = begun(queue)
    file = queue._address(b"")[0]
    listed = []
    for body in (b"one", b"two"):
        attempt = job.attempt("p")
        attempt.write_all([file], [body])
        listed.append(attempt.finish())
    send, claimed = jobs._send, []

    def claim_the_first(context: QueueContext, source: str, destination: str, *, taken: bool = False) -> None:
        claimed.append(take(queue))
        send(context, source, destination, taken=taken)

    monkeypatch.setattr(jobs, "_send", claim_the_first)
    assert job.commit(listed) == 2
    (first,) = claimed
    assert first.file.endswith(f"~{file}")
    assert sent(queue) == [b"two"]
    assert os.listdir(queue.layout.target) != [file]


def test_a_message_of_the_same_name_in_target_is_not_replaced(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    listed = stage(queue, job)
    Path(queue.layout.target, listed[0].files[0]).write_bytes(b"other")
    assert job.commit(listed) == len(ALL)
    assert sent(queue) == sorted([*ALL, b"other"])


def test_a_move_that_was_done_although_it_failed_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a name is first reserved: what is removed after an error is the reservation, never what replaced it."""
    monkeypatch.setattr(system_calls, "rename_noreplace", refuse)
    store = Storage("none")
    for name in ("done", "not-done"):
        (tmp_path / name).write_bytes(b"message")
    with steps(lambda step: None, failing_at(3)):
        store.move(str(tmp_path / "done"), str(tmp_path / "processed"))
    with steps(failing_at(2)), pytest.raises(OSError, match="Input/output"):
        store.move(str(tmp_path / "not-done"), str(tmp_path / "other"))
    assert files(tmp_path) == {"processed": b"message", "not-done": b"message"}


# -- overflow ---------------------------------------------------------------------------------------------------


def overflowing(path: Path, **options: Any) -> tuple[Queue, Queue]:
    """Make a queue whose overflow selector sends to another queue; return both."""
    queue = make_queue(path, durability="full")
    rest = queue.root.create_queue("rest", durability="full", **options)
    queue.add_selector("rest", to="rest", role="overflow")
    return queue, rest


def in_both(queue: Queue, rest: Queue) -> list[bytes]:
    return sorted([*sent(queue), *(sent(rest) if rest.exists() else [])])


def test_a_job_that_overflows_is_in_the_other_queue_as_a_whole(tmp_path: Path) -> None:
    queue, rest = overflowing(tmp_path)
    job = Job(queue.context, "job")
    assert job.commit(stage(queue, job), overflow="rest") == len(ALL)
    assert (sent(queue), sent(rest)) == ([], ALL)
    assert (rest.counts()["target"], rest.counts()["delayed"]) == (len(ALL) - 1, 1)
    assert (working(queue), working(rest), ledger(queue)) == ([], [], ["job.json"])


def test_the_target_of_the_other_queue_is_synced_before_the_ledger_has_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, rest = overflowing(tmp_path)
    job = Job(queue.context, "job")
    listed, sync, known = stage(queue, job), Storage.sync, list[bool]()

    def synced(self: Storage, *folders: str) -> None:
        if {rest.layout.target, rest.layout.delayed} <= {*folders}:
            known.append(bool(os.listdir(queue.layout.ledger)))
        sync(self, *folders)

    monkeypatch.setattr(Storage, "sync", synced)
    job.commit(listed, overflow="rest")
    assert (known, ledger(queue)) == ([False], ["job.json"])


@pytest.mark.usefixtures("either_rename")
@pytest.mark.crashes
def test_a_driver_that_dies_before_any_step_of_a_commit_that_overflows_sends_all_or_nothing(tmp_path: Path) -> None:
    outcomes = set()
    for step in range(1, MANY):
        queue, rest = overflowing(tmp_path / str(step))
        job = Job(queue.context, "job")
        listed = stage(queue, job)

        def commit(job: Job = job, listed: list[StagedAttempt] = listed, step: int = step) -> None:
            with steps(dying_at(step)):
                job.commit(listed, overflow="rest")

        code = forked(commit)
        all_of_it = committed(queue)
        queue.sweep(jobs_older_than=0)
        assert (sent(queue), sent(rest)) == ([], ALL if all_of_it else []), f"died before step {step}"
        assert (working(queue), working(rest)) == ([], [])
        again = Job(queue.context, "job")
        again.commit(stage(queue, again))  # there is room now
        assert (sent(queue), sent(rest)) == (([], ALL) if all_of_it else (ALL, [])), f"died before step {step}"
        outcomes.add((code, all_of_it))
        if code == 0:
            break
    assert outcomes == {(DIED, False), (DIED, True), (0, True)}


@pytest.mark.usefixtures("either_rename")
@pytest.mark.crashes
def test_a_sweep_that_dies_before_any_step_of_a_job_that_overflows_is_taken_up_by_the_next(tmp_path: Path) -> None:
    for step in range(1, MANY):
        queue, rest = overflowing(tmp_path / str(step))
        job = Job(queue.context, "job")
        assert job._write_manifest(stage(queue, job), "rest")

        def sweep(queue: Queue = queue, step: int = step) -> None:
            with steps(dying_at(step)):
                jobs.sweep(queue.context)

        code = forked(sweep)
        queue.sweep(jobs_older_than=0)
        assert (sent(queue), sent(rest), working(queue)) == ([], ALL, []), f"died before step {step}"
        if code == 0:
            assert step > 30
            return
        assert code == DIED
    pytest.fail("the sweep never came to its end")


@pytest.mark.parametrize("ways", [("rest", ""), ("", "rest"), ("rest", "rest")])
def test_a_second_run_sends_nothing_to_either_queue(tmp_path: Path, ways: tuple[str, str]) -> None:
    queue, rest = overflowing(tmp_path)
    for kind in (partial(Job, queue.context, "daily"), partial(Epoch, queue.context, "query", 1)):
        first, again = kind(), kind()
        assert first.commit(stage(queue, first), overflow=ways[0]) == len(ALL)
        assert again.sent
        assert again.commit(stage(queue, again), overflow=ways[1]) == 0
    assert (sent(queue), sent(rest)) == (([], sorted(ALL * 2)) if ways[0] else (sorted(ALL * 2), []))


@pytest.mark.usefixtures("either_rename")
@pytest.mark.parametrize("ways", first_and_long([(("rest", ""),), (("", "rest"),)]))
def test_of_two_drivers_of_one_job_id_only_one_sends_although_one_overflows(
    tmp_path: Path, ways: tuple[str, str]
) -> None:
    other = [b"5", b"6"]
    seen = set()
    for step in range(1, MANY):
        queue, rest = overflowing(tmp_path / str(step))
        job = Job(queue.context, "job")
        listed, others = stage(queue, job), stage(queue, job, other)
        acted: list[int] = []

        def commit(queue: Queue = queue, others: list[StagedAttempt] = others) -> None:
            fate = fate_of(lambda: Job(queue.context, "job").commit(others, overflow=ways[1]))
            assert fate in ("sent", "nothing was sent")

        with steps(acting_at(step, commit, acted)):
            count_sent = job.commit(listed, overflow=ways[0])
        expected = {ways[0]: ALL if count_sent else [], ways[1]: [] if count_sent else other}
        assert (sent(queue), sent(rest)) == (expected[""], expected["rest"]), f"met at step {step}"
        seen.add(count_sent)
        if not acted:
            break
    assert seen == {0, len(ALL)}


def remove_selector(queue: Queue) -> None:
    os.unlink(f"{queue.layout.selectors}/rest.toml")


def delete_the_other(queue: Queue) -> None:
    with suppress(StorageError):  # what has come there already keeps it
        queue.root.delete_queue("rest")


@pytest.mark.usefixtures("either_rename")
@pytest.mark.parametrize("goes", first_and_long([delete_the_other, remove_selector]))
def test_where_the_way_to_the_other_queue_goes_meanwhile_each_message_is_in_one_of_the_two(
    tmp_path: Path, goes: Callable[[Queue], None]
) -> None:
    seen = set()
    for step in range(1, MANY):
        queue, rest = overflowing(tmp_path / str(step))
        job = Job(queue.context, "job")
        listed = stage(queue, job)
        acted: list[int] = []
        with steps(acting_at(step, partial(goes, queue), acted)):
            fate = fate_of(partial(job.commit, listed, overflow="rest"))
        queue.sweep(jobs_older_than=0)
        expected = [] if fate == "nothing was sent" else ALL
        assert (in_both(queue, rest), working(queue)) == (expected, []), f"gone at step {step}: {fate}"
        seen.add((bool(sent(queue)), rest.exists() and bool(sent(rest))))
        if not acted:
            break
    assert seen >= {(True, False), (False, True)}


def test_a_manifest_sends_nowhere_but_to_where_the_overflow_selector_sends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue, rest = overflowing(tmp_path)
    secret = queue.root.create_queue("secret")
    queue.add_selector("normal", to="secret")
    hostile: list[object] = ["secret", "../rest", f"{rest.layout.base}", ["rest"], {"rest": 1}, 7, True, "rest\0"]
    for number, overflow in enumerate(hostile):
        job = Job(queue.context, f"job {number}")
        listed = stage(queue, job, [b"x"])
        content = {"attempts": {part.attempt: part.files for part in listed}, "overflow": overflow}
        Path(job.folder, jobs.MANIFEST).write_text(json.dumps(content))
    assert queue.sweep().jobs_finished == len(hostile)
    assert (sent(queue), sent(rest), sent(secret)) == ([b"x"] * len(hostile), [], [])
    assert "has no overflow selector that sends there" in caplog.text


def test_a_job_overflows_to_no_other_file_system(tmp_path: Path, elsewhere: Path) -> None:
    queue, rest = overflowing(tmp_path / "root")
    shutil.move(rest.layout.base, elsewhere / "rest")
    os.symlink(elsewhere / "rest", rest.layout.base)
    job = Job(queue.context, "job")
    with pytest.raises(QueueFull, match=r"job job was not sent: .* to queue rest: rest is on another file system"):
        job.commit(stage(queue, job), overflow="rest")
    assert (job.abort(), job.sent, in_both(queue, rest)) == (False, False, [])


def test_a_job_overflows_to_no_view_on_topics(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.root.create_topic("topic")
    view = queue.root.create_queue("view", underlying_topic="topic")
    queue.add_selector("rest", to="view", role="overflow")
    job = Job(queue.context, "job")
    with pytest.raises(QueueFull, match="view is a view on topics"):
        job.commit(stage(queue, job), overflow="view")
    assert (job.abort(), in_both(queue, view)) == (False, [])


def test_a_long_name_is_written_as_the_other_queue_has_names(tmp_path: Path) -> None:
    """A DropboxMQ that reads the other queue knows no sidecars."""
    queue, rest = overflowing(tmp_path, dropboxmq=True)
    job = begun(queue)
    attempt = job.attempt("p")
    file = queue._address(b"", properties={"p": "x" * 60, "q": "y" * 60})[0]
    attempt.write_all([file], [b"long"])
    assert "JMS_dropq_meta" in file
    assert job.commit([attempt.finish()], overflow="rest") == 1
    (there,) = os.listdir(rest.layout.target)
    assert "JMS_dropq_meta" not in there and "x" * 60 in there and "y" * 60 in there


# -- what a commit refuses --------------------------------------------------------------------------------------


def test_a_job_that_lacks_a_staged_file_is_not_committed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    listed = stage(queue, job)
    Path(job.folder, listed[-1].attempt, listed[-1].files[0]).unlink()
    with pytest.raises(StorageError, match="nothing was sent"):
        job.commit(listed)
    assert job.abort() is False
    assert (sent(queue), working(queue), job.sent) == ([], [], False)


@pytest.mark.parametrize("end", ["sent", "dropped"])
def test_a_task_that_comes_late_finds_no_job_and_makes_none(tmp_path: Path, end: str) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    listed = stage(queue, job)
    early = job.attempt("p00001-a2")
    if end == "sent":
        job.commit(listed)
    else:
        job.abort()
    with pytest.raises(StorageError, match=r"did not begin, nothing of it was sent"):
        job.attempt("p00001-a3")
    with pytest.raises(StorageError, match=r"nothing of this attempt was sent"):
        early.write_all([queue._address(b"")[0]], [b"late"])
    assert working(queue) == []


def test_an_attempt_that_raises_while_a_body_is_written_does_not_list_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    attempt = begun(queue).attempt("p")
    with attempt.open(lambda: queue._address(b"")[0]) as body:
        body.write(b"whole")
    with pytest.raises(TypeError), attempt.open(lambda: queue._address(b"")[0]) as body:
        body.writelines([b"half", "no bytes"])  # type: ignore[list-item]
    assert len(attempt.finish().files) == 1


@pytest.mark.parametrize("job_id", ["", "x" * 101, "\N{EURO SIGN}" * 12])
def test_a_job_id_that_no_folder_can_be_named_by_is_refused(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(ValueError, match="job id"):
        Job(make_queue(tmp_path).context, job_id)


@pytest.mark.parametrize("job_id", ["../../x", "a/b", ".", "a b~c", "\N{EURO SIGN}", "manifest.json"])
def test_any_other_job_id_is_one_folder_in_working(tmp_path: Path, job_id: str) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, job_id)
    listed = stage(queue, job)
    assert working(queue) == [os.path.basename(job.folder)]
    assert job.commit(listed) == len(ALL)
    assert Job(queue.context, job_id).sent


def test_a_job_whose_target_is_gone_keeps_its_files(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    job = leave_half(queue)
    os.rename(queue.layout.target, f"{queue.layout.base}/aside")
    with pytest.raises(DropqError):
        job.abort()
    jobs.sweep(queue.context, older_than=0)
    os.rename(f"{queue.layout.base}/aside", queue.layout.target)
    queue.sweep()
    assert (sent(queue), working(queue)) == (ALL, [])


# -- the ledger -------------------------------------------------------------------------------------------------


def test_a_second_run_under_the_same_id_sends_nothing(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    assert Job(queue.context, "daily").commit(stage(queue, Job(queue.context, "daily"))) == len(ALL)
    again = Job(queue.context, "daily")
    assert again.sent
    assert again.commit(stage(queue, again)) == 0
    assert (sent(queue), working(queue)) == (ALL, [])


def test_a_second_run_finishes_the_first_where_that_was_cut_off(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    leave_half(queue, "daily")
    again = Job(queue.context, "daily")
    assert again.sent
    assert again.commit(stage(queue, again)) == 0
    assert (sent(queue), working(queue)) == (ALL, [])


def test_a_second_run_knows_of_a_first_that_was_dropped_as_it_was_committed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    first = leave_half(queue, "daily")
    os.rename(first.folder, jobs._drop_path(first.folder))  # a sweep, which died at this moment
    again = Job(queue.context, "daily")
    assert again.sent
    assert again.commit(stage(queue, again)) == 0
    assert (sent(queue), working(queue)) == (ALL, [])


def test_a_job_does_not_count_as_sent_for_another_whose_id_is_alike(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    other = leave_half(queue, "daily-2")
    os.rename(other.folder, jobs._drop_path(other.folder))
    assert not Job(queue.context, "daily").sent
    assert Job(queue.context, "daily-2").sent


def test_a_job_that_was_dropped_may_run_again(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "daily")
    stage(queue, job)
    assert job.abort() is False
    assert Job(queue.context, "daily").commit(stage(queue, job)) == len(ALL)


def test_the_ledger_forgets_after_seven_days(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    Job(queue.context, "daily").commit(stage(queue, Job(queue.context, "daily")))
    clock.advance(7 * 86400 - 60)
    queue.sweep()
    assert Job(queue.context, "daily").sent
    clock.advance(120)
    queue.sweep()
    assert not Job(queue.context, "daily").sent


def test_a_job_without_messages_leaves_nothing_behind(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    job = begun(queue)
    job.attempt("p00000-a0")
    assert job.commit([]) == 0
    assert (sent(queue), working(queue), job.sent) == ([], [], False)


# -- sweeping ---------------------------------------------------------------------------------------------------


def test_delayed_messages_of_a_job_wait_out_of_target(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    job = begun(queue)
    attempt = job.attempt("p")
    attempt.write_all([queue._address(b"", delay="1h")[0]], [b"later"])
    attempt.write_all([queue._address(b"")[0]], [b"now"])
    job.commit([attempt.finish()])
    assert queue.counts()["target"] == queue.counts()["delayed"] == 1
    clock.advance(3601)
    queue.sweep()
    assert queue.counts()["target"] == 2


def test_a_job_is_dropped_by_the_age_of_its_newest_activity(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    job = begun(queue)
    attempt = job.attempt("p")
    with attempt.open(lambda: queue._address(b"")[0]) as body:
        (draft,) = os.listdir(attempt.folder)

        def written_after_50_ms() -> bool:
            body.write(b"x")
            body.flush()
            changed = reading.changed_ms(f"{attempt.folder}/{draft}")
            return changed >= max(reading.changed_ms(job.folder), reading.changed_ms(attempt.folder)) + 50

        until(written_after_50_ms, "a body that is newer than its folders")
    clock.ms = reading.changed_ms(attempt.folder) + 10  # by the rename that names the body
    assert queue.sweep(jobs_older_than=0.03).jobs_dropped == 0
    clock.ms += 30
    assert queue.sweep().jobs_dropped == 0
    assert queue.sweep(jobs_older_than=0.03).jobs_dropped == 1
    assert working(queue) == []


def test_age_zero_drops_a_job_even_where_clocks_differ_a_little(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    stage(queue, Job(queue.context, "job"))
    clock.advance(-1)
    assert queue.sweep(jobs_older_than=0).jobs_dropped == 1


def test_a_sweep_leaves_other_files_in_working_alone(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    Path(queue.layout.working, "half-written").touch()
    Path(queue.layout.working, ".job-file").touch()
    Path(queue.layout.working, "folder").mkdir()
    report = queue.sweep(jobs_older_than=0)
    assert (report.jobs_dropped, report.refused) == (0, 0)
    assert sorted(working(queue)) == [".job-file", "folder", "half-written"]


def linked(queue: Queue, elsewhere: Path) -> Path:
    """Move a committed job to elsewhere, and leave a link to it; return its manifest."""
    manifest = put_manifest(queue, {"attempts": {}})
    os.rename(manifest.parent, elsewhere)
    os.symlink(elsewhere, manifest.parent)
    return elsewhere / manifest.name


def test_a_link_to_a_job_is_none_to_a_sweep(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    manifest = linked(queue, tmp_path / "elsewhere")
    os.symlink(manifest.parent, Path(queue.layout.working, ".drop-job-0123456789ab"))
    before = sorted(manifest.parent.rglob("*"))
    report = queue.sweep(jobs_older_than=0)
    assert (report.jobs_finished, report.jobs_dropped, report.refused) == (0, 0, 0)
    assert len(working(queue)) == 2
    assert sorted(manifest.parent.rglob("*")) == before


def test_a_link_to_a_job_keeps_no_queue_from_being_deleted(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    manifest = linked(queue, tmp_path / "elsewhere")
    queue.close()
    queue.root.delete_queue("q")
    assert not os.path.exists(base(queue))
    assert manifest.exists()


def put_manifest(queue: Queue, content: object) -> Path:
    job = Job(queue.context, "job")
    stage(queue, job)
    manifest = Path(job.folder, jobs.MANIFEST)
    manifest.write_text(content if isinstance(content, str) else json.dumps(content))
    return manifest


def test_a_manifest_with_hostile_paths_moves_nothing_but_staged_files(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    (tmp_path / "secret").write_bytes(b"secret")
    folder = Path(Job(queue.context, "job").folder)
    listed = stage(queue, Job(queue.context, "job"))
    hostile = [
        f"{tmp_path}/secret", "../../../secret", "/etc/passwd", "..", "", "/", "a/", "/a", "./manifest.json", "p/..",
        "a\0b", ".hidden", 7, None, ["a"], {"a": 1}, "4.x.B",
    ]  # fmt: skip
    attempts: dict[str, object] = {str(name): ["secret"] for name in hostile}
    attempts |= {"one": None, "two": 7, "three": {"a": 1}, "..": ["secret"], f"{tmp_path}": ["secret"]}
    attempts |= {part.attempt: [*hostile, *part.files] for part in listed}
    (folder / jobs.MANIFEST).write_text(json.dumps({"job": {}, "attempts": attempts}))
    queue.sweep()
    assert (sent(queue), working(queue)) == (ALL, [])
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert Job(queue.context, "job").sent


@pytest.mark.parametrize("content", ["{", "[]", "null", "7", {}, {"attempts": None}, {"attempts": "p/x"}, "\udce9"])
def test_a_damaged_manifest_is_left_for_a_person_with_all_its_files(
    tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(tmp_path)
    manifest = put_manifest(queue, content) if content != "\udce9" else put_manifest(queue, "x")
    if content == "\udce9":
        manifest.write_bytes(b'{"attempts": {"\xe9": []}}')
    before = sorted(manifest.parent.rglob("*"))
    queue.sweep(jobs_older_than=0)
    assert sorted(manifest.parent.rglob("*")) == before
    assert "set it aside by hand" in caplog.text
    with pytest.raises(DropqError, match="set it aside by hand"):
        Job(queue.context, "job").commit([StagedAttempt("a", ["b"])])


def test_a_sweep_reports_each_job_that_it_could_not_finish(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    put_manifest(queue, "{")
    assert queue.sweep().refused == 1
    other = Job(queue.context, "other")
    stage(queue, other)
    Path(other.folder, jobs.MANIFEST).write_text("[]")
    assert queue.sweep().refused == 2


def test_a_name_that_was_reserved_for_a_manifest_is_none(tmp_path: Path) -> None:
    """A driver died between reserving the name and renaming over it, where renameat2 is not to be had."""
    queue = make_queue(tmp_path)
    manifest = put_manifest(queue, "")
    manifest.chmod(0)
    job = Job(queue.context, "job")
    assert not job.sent
    with pytest.raises(StorageError, match="nothing was sent"):
        job.commit(stage(queue, job))
    assert queue.sweep(jobs_older_than=0).jobs_dropped == 1
    assert (sent(queue), working(queue)) == ([], [])


def test_what_a_task_staged_after_its_job_was_sent_goes_with_the_next_sweep(tmp_path: Path) -> None:
    """A task of an epoch begins its job itself: one that comes too late makes the job's folder anew."""
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    job.commit(stage(queue, job))
    job.begin()
    job.attempt("p00000-a1").write_all([queue._address(b"")[0]], [b"late"])
    report = queue.sweep()
    assert (report.jobs_finished, report.jobs_dropped) == (0, 1)
    assert (sent(queue), working(queue)) == (ALL, [])


def test_a_job_that_a_sweep_takes_away_while_it_is_looked_for_counts_as_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for a manifest before the commit, and takes the folder away after it."""
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    assert job._write_manifest(stage(queue, job))
    look = jobs._manifest

    def meanwhile(folder: str) -> object:
        if folder == job.folder and os.path.exists(folder):
            os.rename(folder, f"{queue.layout.working}/.drop-job-0123456789ab")
        return look(folder)

    monkeypatch.setattr(jobs, "_manifest", meanwhile)
    assert job.sent


# -- rows of jobs ------------------------------------------------------------------------------------------------------


def ledger(queue: Queue) -> list[str]:
    return sorted(path.name for path in (base(queue) / ".dropq" / "ledger").iterdir())


def test_the_ledger_keeps_the_last_of_a_row_and_knows_by_it_those_before(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    for number in range(3):
        epoch = Epoch(queue.context, "query", number)
        assert epoch.commit(stage(queue, epoch, [b"%d" % number])) == 1
    assert ledger(queue) == ["query.2.json"]
    again = Epoch(queue.context, "query", 2)
    assert again.sent
    assert again.commit(stage(queue, again, [b"again"])) == 0
    assert (sent(queue), working(queue)) == ([b"0", b"1", b"2"], [])


def test_one_of_a_row_that_comes_after_a_later_one_is_refused(tmp_path: Path) -> None:
    """A driver that was given up, or a checkpoint that was restored: what it has is neither sent nor taken for sent."""
    queue = make_queue(tmp_path)
    late = Epoch(queue.context, "query", 9)
    staged = stage(queue, late, [b"late"])
    for number in (9, 10):
        epoch = Epoch(queue.context, "query", number)
        epoch.commit(stage(queue, epoch, [b"%d" % number]))
    for refused in (late.begin, lambda: late.commit(staged)):
        with pytest.raises(DropqError, match=r"epoch 9 of query was not sent, as epoch 10 was sent before"):
            refused()
    assert Epoch(queue.context, "another", 9).commit([]) == 0
    assert (sent(queue), ledger(queue)) == ([b"10", b"9"], ["query.10.json"])


def test_one_of_a_row_that_is_overtaken_while_it_is_looked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a later one is sent, the ledger has this one no more, whether it was sent or not."""
    queue = make_queue(tmp_path)
    late = Epoch(queue.context, "query", 1)
    staged = stage(queue, late, [b"1"])
    is_in_ledger = jobs._is_in_ledger

    def overtaking(*args: Any) -> bool:
        monkeypatch.setattr(jobs, "_is_in_ledger", is_in_ledger)
        shutil.copytree(late.folder, tmp_path / "staged again")
        for number in (1, 2):
            epoch = Epoch(queue.context, "query", number)
            epoch.commit(stage(queue, epoch, [b"%d" % number]))
        shutil.copytree(tmp_path / "staged again", late.folder)
        return is_in_ledger(*args)

    monkeypatch.setattr(jobs, "_is_in_ledger", overtaking)
    with pytest.raises(DropqError, match="epoch 1 of query was not sent, as epoch 2 was sent before"):
        late.commit(staged)
    assert sent(queue) == [b"1", b"2"]


def test_what_a_row_that_went_on_left_is_dropped_by_a_sweep(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    stage(queue, Epoch(queue.context, "query", 1), [b"late"])
    stage(queue, Epoch(queue.context, "query", 3), [b"to come"])
    second = Epoch(queue.context, "query", 2)
    second.commit(stage(queue, second, [b"2"]))
    assert queue.sweep().jobs_dropped == 1
    assert [name.partition("/")[0] for name in working(queue)] == [".job-query.3"]


def test_a_row_is_remembered_longer_than_a_job_and_no_job_is_taken_for_one_of_it(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock)
    for job in (Epoch(queue.context, "query", 7), Job(queue.context, "query.7"), Job(queue.context, "query.8")):
        assert job.commit(stage(queue, job, [b"x"])) == 1
    clock.advance(8 * 86_400)
    queue.sweep()
    assert ledger(queue) == ["query.7.json"]
    clock.advance(23 * 86_400)
    queue.sweep()
    assert ledger(queue) == []


def test_whether_a_job_was_sent_is_not_guessed_where_the_ledger_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    job.commit(stage(queue, job, [b"0"]))
    lstat = os.lstat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if "/ledger/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return lstat(path, **options)

    expected = r"Permission denied at .*/ledger/job.json; it is not known whether job"
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refused)
        with pytest.raises(StorageError, match=expected):
            assert not job.sent


def test_an_error_half_way_through_the_renames_of_a_job_is_raised_and_a_sweep_sends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    listed = stage(queue, job, MANY_BODIES)
    rename, left = system_calls.rename_noreplace, iter(range(len(MANY_BODIES) // 2))

    def fail_half_way(source: str, *rest: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(system_calls, "rename_noreplace", fail_half_way)
        with pytest.raises(StorageError, match=r"Input/output error .* is committed"):
            job.commit(listed)
    assert len(sent(queue)) == len(MANY_BODIES) // 2 - 1  # the manifest's rename is one of them
    assert queue.sweep().jobs_finished == 1
    assert (sent(queue), working(queue)) == (sorted(MANY_BODIES), [])


def test_one_error_that_goes_away_does_not_stop_the_renames_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    listed = stage(queue, job, MANY_BODIES)
    rename, calls = system_calls.rename_noreplace, count()

    def fail_once(source: str, *rest: Any) -> None:
        if next(calls) == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, *rest)

    monkeypatch.setattr(system_calls, "rename_noreplace", fail_once)
    assert job.commit(listed) == len(MANY_BODIES)
    assert (sent(queue), working(queue)) == (sorted(MANY_BODIES), [])


def test_a_job_is_sent_where_its_user_may_not_list_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename into a folder asks for no right to list it."""
    queue = make_queue(tmp_path)
    job = Job(queue.context, "job")
    listed, opens = stage(queue, job), os.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == queue.layout.target:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opens(path, *args, **kwargs)

    queue.context.storage.syncs_folders = False
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert job.commit(listed) == len(ALL)
    assert sent(queue) == sorted(ALL)


def test_an_epoch_of_nothing_leaves_the_one_before_it_in_the_ledger(make: Make) -> None:
    queue = make()
    for number in (5, 6, 5):
        epoch = Epoch(queue.context, "row", number)
        epoch.begin()
        attempt = epoch.attempt("p")
        if number == 5:
            attempt.write_all([queue._address(b"a")[0]], [b"a"])
        epoch.commit([attempt.finish()])
    assert where(queue) == {"target": [b"a"]}


def test_an_error_of_the_callers_own_in_a_staged_body_stays_what_it_is(make: Make, tmp_path: Path) -> None:
    queue = make()
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("p")
    with pytest.raises(FileNotFoundError), attempt.open(lambda: "4.x.B"):
        (tmp_path / "no such input").read_bytes()
    assert attempt.files == []


def test_a_job_that_cannot_be_looked_at_is_refused_as_by_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path)
    folder = Path(queue.layout.working, ".job-open")
    folder.mkdir()

    def broken(path: str, **_: object) -> int:
        raise OSError(errno.EIO, "broken", path)

    monkeypatch.setattr("dropq.storage.reading.changed_ms", broken)
    with pytest.raises(StorageError, match="the job stays as it is"):
        jobs.decide(queue.context, str(folder), older_than=0)
