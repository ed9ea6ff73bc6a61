"""Clocks that are wrong, clocks that are set, by libfaketime, and those of machines that were paused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import make_queue, reopened

from dropq import Root
from dropq.storage.clock import CLOCK_INTERVAL, LEASE_INTERVAL, ServerClock, _since_boot
from torture import clocks
from torture.table import NotRun, Options


@pytest.mark.host
@pytest.mark.long
def test_clocks_that_are_wrong_or_set_end_no_lease_early_or_late_and_reorder_nothing(tmp_path: Path) -> None:
    try:
        rows = list(clocks.run(Options(tmp_path, seed=1, long=False)))
    except NotRun as reason:
        pytest.skip(str(reason))
    assert [line for row in rows for line in row.wrong] == []
    assert all(row.good and row.cases for row in rows)


def test_a_machine_without_libfaketime_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clocks, "LIBRARIES", ())
    monkeypatch.setattr(clocks, "_known_to_the_linker", list)
    with pytest.raises(NotRun, match="apt install faketime"):
        clocks.run(Options(tmp_path, long=False))


# -- the file server's clock, as one process tells it --------------------------------------------------------------


@pytest.mark.parametrize("lease", ["30s", "2h"])
def test_a_machine_that_was_paused_and_put_right_makes_leases_that_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: str
) -> None:
    queue = make_queue(tmp_path, lease_period=lease)
    queue.send_many([b"before", b"after"])
    since_boot = _since_boot
    with queue.subscribe(max_backlog=2) as subscription, reopened(queue) as other:
        other.sweep()  # it has measured by the clock of another host
        first = subscription.receive()
        with monkeypatch.context() as guest:
            guest.setattr(
                "dropq.storage.clock._since_boot", lambda: since_boot() - 7300.0
            )  # it did not go on, the others did
            second = subscription.receive()
            assert first is not None and second is not None
            first.extend(lease)
            assert abs(queue.root.clock.now_ms() - time.time() * 1000) < 1000
        assert other.sweep().lapsed == 0 and other.receive() is None
        first.ack()
        second.ack()


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_step_of_the_servers_clock_is_seen_by_leases_a_second_later_and_by_all_else_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """So is a pause of this machine after which nobody has set its clock right."""
    clock, stepped, later = ServerClock(str(tmp_path / "probe")), 0.0, 0.0
    utime, since_boot, own = os.utime, _since_boot, time.time

    def server() -> float:
        return own() + stepped + later

    monkeypatch.setattr(os, "utime", lambda probe, **options: utime(probe, (server(), server())))
    monkeypatch.setattr("dropq.storage.clock._since_boot", lambda: since_boot() + later)
    monkeypatch.setattr(time, "time", lambda: own() + later)
    clock.now_ms()
    stepped, later = step, LEASE_INTERVAL
    assert abs(clock.now_ms() - (own() + later) * 1000) < 1000  # not yet
    assert abs(clock.now_ms(interval=LEASE_INTERVAL) - server() * 1000) < 1000
    stepped, later = 2 * step, later + CLOCK_INTERVAL
    assert abs(clock.now_ms() - server() * 1000) < 1000


def test_a_sweep_takes_no_lease_for_over_that_was_made_after_the_servers_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path, lease_period="30s")
    queue.send(b"a")
    stepped, later = 0.0, 0.0
    utime, since_boot, own = os.utime, _since_boot, time.time

    def touch(probe: str, *, follow_symlinks: bool) -> None:
        now = own() + stepped + later
        utime(probe, (now, now))

    monkeypatch.setattr(os, "utime", touch)
    monkeypatch.setattr("dropq.storage.clock._since_boot", lambda: since_boot() + later)
    monkeypatch.setattr(time, "time", lambda: own() + later)
    other = Root(queue.root.path).queue(queue.name)  # with a clock of its own
    other.root.clock.now_ms()
    stepped, later = -3600.0, 2 * LEASE_INTERVAL
    with queue.subscribe() as holder:
        message = holder.receive()
        assert message is not None and other.sweep().lapsed == 0
        message.ack()


def test_a_clock_that_nobody_sets_is_measured_once_a_minute_and_for_leases_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, measured = ServerClock(str(tmp_path / "probe")), 0
    measure, since_boot, own, now = ServerClock._measure, _since_boot, time.time, 0.0

    def counted(self: ServerClock) -> float:
        nonlocal measured
        measured += 1
        return measure(self)

    def measurements(tell: Callable[[], int], *moments: float) -> list[int]:
        nonlocal now
        counts = []
        for moment in moments:
            now = moment
            tell()
            counts.append(measured)
        return counts

    monkeypatch.setattr(ServerClock, "_measure", counted)
    monkeypatch.setattr("dropq.storage.clock._since_boot", lambda: since_boot() + now)
    monkeypatch.setattr(time, "time", lambda: own() + now)
    assert measurements(clock.now_ms, 0, 0.4, 0.8, 30, 50, 61, 100) == [1, 1, 1, 1, 1, 2, 2]
    for_lease = partial(clock.now_ms, interval=LEASE_INTERVAL)
    assert measurements(for_lease, 100, 100.3, 100.6, 101.5, 101.9) == [3, 3, 3, 4, 4]
