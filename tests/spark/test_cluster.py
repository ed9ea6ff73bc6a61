"""On a real cluster, whatever becomes of tasks, executors and drivers, a job sends each row once or nothing.

cluster_driver.py runs the jobs, one for each queue, and notes what happened; here it is judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import DRIVER_UMASK, HOSTS, UMASK, Cluster, running, why_not
from cluster_driver import MANY_ROWS, PARTITIONS, ROWS, SCENARIOS, Note, ended, mode_and_group, notes, staged
from helpers import base, files, where

from dropq import Queue, Root

# Seconds: the first test waits for all jobs, and others may want the machine's cores meanwhile.
pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

DRIVER = Path(__file__).with_name("cluster_driver.py")
#: A group for messages: another than what this process's files have, if there is one to be had.
GROUP = os.getegid() + 1 if os.geteuid() == 0 else max(os.getgroups(), default=os.getegid())
#: What queues are configured with.
CONFIGURED: dict[str, dict[str, Any]] = {
    "plain": {"durability": "none"},
    "modes": {"group": GROUP, "file_mode": "0660", "dir_mode": "2770"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with two hosts."""
    if reason := why_not():
        pytest.skip(reason)
    with running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def root(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Root:
    """The root as the driver left it, which was killed before the last commit."""
    root = Root.create(tmp_path_factory.mktemp("jobs") / "root")
    for name in SCENARIOS:
        root.create_queue(name, **CONFIGURED.get(name, {}))
    with cluster.driver(DRIVER, str(root.path)) as driver:
        at_last = root.path / f"at-{list(SCENARIOS)[-1]}"
        driver.wait_until(at_last.exists, f"the driver at its last commit, with notes beside {root.path}")
    cluster.wait_until_idle()
    return root


def notes_of(root: Root, queue: str) -> list[Note]:
    """What happened in a scenario, which took the course that it is about."""
    found = notes(root.path, queue)
    assert [each["error"] for each in found if each["event"] == "broken"] == []
    return found


def first(found: list[Note], event: str, **facts: object) -> int:
    """The place of the first such event."""
    indexes = [index for index, each in enumerate(found) if each.items() >= {"event": event, **facts}.items()]
    assert indexes, f"no {event!r} {facts} in {found}"
    return indexes[0]


def rows(count: int = ROWS) -> list[bytes]:
    return sorted(str(number).encode() for number in range(count))


def assert_all_that_lies(queue: Queue, bodies: list[bytes]) -> None:
    """Messages with these bodies were sent, each once; no folder of the queue holds anything else."""
    assert where(queue) == ({"target": bodies} if bodies else {})
    assert os.listdir(queue.layout.working) == []
    assert queue.sweep(jobs_older_than=0).total == 0
    assert queue.fsck() == []


def test_a_job_spread_over_both_hosts_sends_each_row_once(root: Root) -> None:
    queue, _ = root.queue("plain"), notes_of(root, "plain")
    sent = [message.text.split() for message in queue.browse()]
    assert sorted(int(number) for number, _ in sent) == list(range(MANY_ROWS))
    assert {host for _, host in sent} == set(HOSTS)
    assert_all_that_lies(queue, sorted(" ".join(each).encode() for each in sent))


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_that_fail_at_first_send_each_row_once(root: Root) -> None:
    """One fails while rows come, one takes its Python with it, and two fail after they have staged all."""
    found = notes_of(root, "failing_tasks")
    began = {each["partition"] for each in found if each["event"] == "began" and each["attempt"] == 0}
    errors = {each["partition"]: each["error"] for each in found if each["event"] == "failed" and each["attempt"] == 0}
    late = "RuntimeError: fails after all is staged"
    assert began == {0, 1, 2, 3}
    assert errors == {0: "RuntimeError: fails while rows are coming", 2: late, 3: late}
    assert_all_that_lies(root.queue("failing_tasks"), rows())


@pytest.mark.parametrize("killed", ["worker", "executor"])
def test_a_task_that_is_killed_while_it_stages_is_staged_anew_by_another(root: Root, killed: str) -> None:
    """Its Python alone, or its whole executor, gets a SIGKILL."""
    queue, process = f"killed_{killed}", {"worker": "pid", "executor": "executor"}[killed]
    found = notes_of(root, queue)
    held, kill, again = first(found, "held"), first(found, "killed"), first(found, "staged", partition=0)
    assert held < kill < again
    assert 0 < found[held]["staged"] < ROWS
    assert found[again][process] != found[held][process]
    assert found[held]["pid"] not in [each.get("pid") for each in found[kill:]]
    assert_all_that_lies(root.queue(queue), rows())


# -- speculation and late tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "by_then", "outcome"),
    [
        ("before", range(1), "staged"),  # nothing: it saw that the job was sent
        ("midway", range(1, ROWS // PARTITIONS), "failed"),
        ("staged", range(ROWS // PARTITIONS, ROWS), "staged"),
    ],
)
def test_a_try_that_lost_and_goes_on_after_the_commit_changes_nothing(
    root: Root, moment: str, by_then: range, outcome: str
) -> None:
    """Speculation repeats a slow task on the other host, which wins; the slow one goes on when all is sent."""
    queue = f"late_{moment}"
    found = notes_of(root, queue)
    held, won, saved = first(found, "held"), first(found, "staged", partition=0), first(found, "saved")
    late = ended(root.path, queue)
    assert late is not None and late["event"] == outcome
    assert held < won < saved < first(found, "released") < found.index(late)
    assert found[held]["staged"] in by_then
    assert {found[held]["host"], found[won]["host"]} == set(HOSTS)
    assert {found[held]["attempt"], found[won]["attempt"]} == {0, 1}
    assert_all_that_lies(root.queue(queue), rows())


@pytest.mark.parametrize("moment", ["before", "midway"])
def test_a_try_that_goes_on_after_its_job_failed_leaves_nothing(root: Root, moment: str) -> None:
    queue = f"failed_{moment}"
    found = notes_of(root, queue)
    late = ended(root.path, queue)
    assert late is not None and "StorageError: No such file or directory" in late.get("error", late)
    assert first(found, "held") < first(found, "refused") < first(found, "released") < found.index(late)
    assert "fails each time" in found[first(found, "refused")]["error"]
    assert_all_that_lies(root.queue(queue), [])


def test_a_try_of_a_job_that_failed_adds_nothing_to_a_second_run_of_its_id(root: Root) -> None:
    """It stages into the second run's folder just before that commits."""
    found = notes_of(root, "failed_then_repeated")
    tries = [name[:6] for name in found[first(found, "lying")]["tries"]]
    assert tries == ["p00000", "p00000", "p00001", "p00002", "p00003"]
    assert first(found, "refused") < first(found, "released") < first(found, "lying") < first(found, "saved")
    assert_all_that_lies(root.queue("failed_then_repeated"), rows())


# -- modes -------------------------------------------------------------------------------------------------------------


def modes(folder: str) -> set[tuple[str, int]]:
    """The permission bits and the groups of the files of a folder."""
    return {mode_and_group(Path(folder, name)) for name in files(Path(folder))}


def test_what_executors_with_another_umask_write_has_the_modes_of_the_queue(root: Root) -> None:
    found, queue = notes_of(root, "modes"), root.queue("modes")
    assert found[first(found, "files")]["modes"] == [["0660", GROUP]]
    assert found[first(found, "folders")]["modes"] == [["2770", GROUP]]
    assert modes(queue.layout.target) == modes(queue.layout.ledger) == {("0660", GROUP)}
    assert_all_that_lies(queue, rows())


def test_without_modes_of_the_queue_each_ones_umask_decides(root: Root) -> None:
    found, queue = notes_of(root, "umask"), root.queue("umask")
    group = base(queue).stat().st_gid
    executors, drivers = f"{0o664 & ~UMASK:04o}", f"{0o664 & ~DRIVER_UMASK:04o}"
    assert found[first(found, "files")]["modes"] == [[executors, group]]
    assert found[first(found, "folders")]["modes"] == [[f"{0o775 & ~UMASK:04o}", group]]
    assert modes(queue.layout.target) == {(executors, group)}
    assert modes(queue.layout.ledger) == {(drivers, group)}
    assert_all_that_lies(queue, rows())


# -- the driver --------------------------------------------------------------------------------------------------------


def test_a_driver_killed_before_its_commit_sent_nothing_and_a_sweep_clears_up(root: Root) -> None:
    queue = root.queue("killed_driver")
    assert len(staged(root.path, "killed_driver", "p*/*")) == ROWS
    queue.sweep()
    assert len(staged(root.path, "killed_driver", "p*/*")) == ROWS
    assert where(queue) == {}
    assert queue.sweep(jobs_older_than=0).jobs_dropped == 1
    assert_all_that_lies(queue, [])
