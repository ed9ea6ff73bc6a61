"""`make torture-spark` kills Spark jobs at random moments: what it accounts for, without Spark."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from torture import kill_driver, spark_kills
from torture.kill_driver import STREAM_IN, STREAM_OUT, WRITER, Log, Run, sending
from torture.spark_kills import (
    AFTER,
    ALL,
    BEFORE,
    MIDDLE,
    WORKER,
    WRITING,
    Account,
    Job,
    Lane,
    Proof,
    Row,
    StreamIn,
    StreamOut,
    Tail,
    Torture,
    WriterJob,
)

from dropq.staging import jobs


class Killed(BaseException):
    """Raised where a kill is to fall."""


@pytest.fixture
def torture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torture:
    """A torture that has not begun."""
    monkeypatch.setattr(kill_driver, "draw_out", lambda seconds: None)
    return Torture(tmp_path, seed=4711, proven=1)


@pytest.fixture(params=[WRITER, STREAM_OUT])
def job(request: pytest.FixtureRequest, torture: Torture, tmp_path: Path) -> Job:
    """A job of 20 messages, or a stream of two such epochs, none of which is sent."""
    kind = {WRITER: WriterJob, STREAM_OUT: StreamOut}[request.param]
    job: Job = kind(tmp_path, Run(request.param, "job", 20, batches=1 if kind is WriterJob else 2))
    job.prepare("none")
    tell(job, "run begins", "task begins 0", "staged 1", "task ends 0")
    return job


def tell(job: Job, *steps: str) -> None:
    """Tell steps in the log of a job."""
    for step in steps:
        Log(str(job.log), job.run.name)(step)


def bodies(job: Job) -> list[str]:
    """Return the bodies of a job, or of the first epoch of a stream."""
    return [f"{'' if isinstance(job, WriterJob) else '0 '}job {number}" for number in range(job.run.rows)]


def commit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage and commit what a job sends, and be killed before the first rename."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    queue = job.root.queue(job.run.name)
    committed = jobs.Job(queue.context, "committed")
    committed.begin()
    attempt = committed.attempt("p0")
    attempt.write_all(queue._plain_addresses(job.run.rows, "T"), [body.encode() for body in bodies(job)])
    staged = attempt.finish()
    log = Log(str(job.log), job.run.name)
    with monkeypatch.context() as patched, suppress(Killed):
        patched.setattr(jobs, "finish", die)
        with sending(log, "commit", []):
            committed.commit([staged])


def test_a_line_of_a_log_counts_when_its_end_is_there(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    tails = []
    for part in ("1.5 7 q stag", "ed 3\n2", ".5 7 q renamed 1\n"):
        with (tmp_path / "log").open("a") as log:
            log.write(part)
        tails.append([(line.what, line.number) for line in tail.lines()])
    assert tails == [[], [("staged", 3)], [("renamed", 1)]]


def test_a_job_whose_manifest_was_told_must_be_all_there(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(job, monkeypatch)
    progress = job.progress()
    progress.feed_all(Tail(job.log).lines())
    assert (progress.phase(0), progress.decided(0)) == (MIDDLE, 1)
    job.sweep()
    assert job.check() == Account()
    assert job.effects == 1


def test_a_committed_job_that_is_dropped_is_lost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(job, monkeypatch)
    shutil.rmtree(job.folder / "root" / "job" / "working" / ".job-committed")
    job.sweep()
    account = job.check()
    assert (account.lost, account.is_good, job.effects) == (20, False, 0)


def test_a_job_that_did_not_begin_its_manifest_must_have_sent_nothing(job: Job) -> None:
    tell(job, "commit begins")
    assert job.check() == Account()
    job.root.queue("job").send_many(bodies(job))
    assert not job.check().is_good


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_job_that_was_killed_as_it_named_its_manifest_may_be_sent_or_not(job: Job, is_sent: bool) -> None:
    tell(job, "commit begins", "manifest begins")
    if is_sent:
        job.root.queue("job").send_many(bodies(job))
    assert job.check() == Account()


def test_a_batch_that_is_done_must_have_its_effect(torture: Torture, tmp_path: Path) -> None:
    stream = StreamIn(tmp_path, Run(STREAM_IN, "in", 1))
    stream.prepare("none")
    assert stream.check() == Account()
    for folder in ("offsets", "commits"):
        (tmp_path / "checkpoints" / "in" / folder).mkdir(parents=True)
        (tmp_path / "checkpoints" / "in" / folder / "0").touch()
    assert stream.check().faults == ["batches that have their effect: 0, not 1 to 1"]


def test_the_table_tells_what_a_kill_fell_into(torture: Torture, job: Job) -> None:
    proofs = [Proof(WORKER, WRITING, 0), Proof(ALL, BEFORE, 0), Proof(ALL, MIDDLE, 1), Proof(WORKER, AFTER, 1)]
    rows = [torture.table[job.run.direction, phase] for phase in (WRITING, BEFORE, MIDDLE, AFTER)]
    torture.judge(job, proofs, Account())
    assert rows == [Row(none=1)] * 4
    job.effects = 1
    torture.judge(job, proofs, Account())
    assert rows == [Row(all=1, none=1), Row(all=1, none=1, revived=1), Row(all=1, none=1), Row(all=1, none=1)]


def test_a_job_whose_workers_never_start_is_given_up(
    torture: Torture, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run_once(lane: Lane) -> list[Proof]:
        runs.append(lane)
        assert len(runs) < 100
        lane._is_slow_start = True
        return []

    monkeypatch.setattr(Lane, "_run_once", run_once)
    job.run = Run(job.run.direction, "job", 20, has_id=True)
    Lane(torture, job, random.Random(1)).run()
    assert len(runs) == spark_kills.SLOW_STARTS + 1
    assert "fails by itself" in torture.faults[0]
