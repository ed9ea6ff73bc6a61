"""What a look at a queue shows: how many messages lie in each state, and when each was sent."""

from __future__ import annotations

import pytest
from helpers import Make, base, drop, files, take

from dropq.cli import main as cli


def test_counts_and_stats_tell_what_lies_where(make: Make) -> None:
    queue = make()
    queue.send_many([b"a", b"bb", b"ccc"])
    queue.send(b"later", delay=60)
    take(queue).ack()
    take(queue)
    counts = queue.counts()
    assert {state: count for state, count in counts.items() if count} == {
        "target": 1,
        "processing": 1,
        "processed": 1,
        "delayed": 1,
    }
    stats = queue.stats()
    assert (stats["target"].count, stats["target"].bytes) == (1, 3)
    assert files(base(queue) / "target") != {}


#: The last of the times that a name can hold, in ms: about the year 292 million.
LATEST = 2**63 - 1


@pytest.mark.parametrize(
    "name",
    [
        f"4.x.B.{LATEST}",
        f"4.x.B.....JMS_dropq_sinceL={LATEST}",
        f"4.x.B.....JMS_dropq_notBeforeL={LATEST}",
    ],
)
def test_times_beyond_all_calendars_can_be_looked_at(make: Make, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    queue = make()
    drop(queue, name, b"a")
    [message] = queue.browse()
    times = [message.timestamp, message.expiration, message.not_before, message.since]
    assert max(moment.year for moment in times if moment is not None) == 9999
    assert queue.stats()["target"].count == 1
    for command in (
        ["browse", "q", "--json"],
        ["show", "q", message.id],
        ["show", "q", message.id, "--json"],
    ):
        assert cli.main(["--root", str(queue.root.path), *command]) == 0, capsys.readouterr().err
