"""The file server's clock is told right, whatever happens to the clock and the processes of this host."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dropq.storage.clock import ServerClock, _since_boot


@pytest.mark.parametrize("step", [7200.0, -7200.0])
def test_a_step_of_this_hosts_clock_does_not_move_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    clock = ServerClock(str(tmp_path / "probe"))
    before, real = clock.now_ms(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert abs(clock.now_ms() - before) < 60_000


@pytest.mark.parametrize("call", ["utime", "lstat"])
@pytest.mark.parametrize("ahead", [0.0, 3600.0])
def test_a_process_that_is_stopped_while_it_measures_the_servers_clock_tells_the_right_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, ahead: float
) -> None:
    """Half a minute goes by before the call, in which another process touches the probe file."""
    probe, slept = tmp_path / "probe", [0.0]
    probe.touch()
    own, gettime, utime = time.time, time.clock_gettime, os.utime

    def server() -> float:
        return own() + slept[0]

    def touch(probe: str | Path, *, follow_symlinks: bool = False) -> None:
        utime(probe, (server(), server()))

    monkeypatch.setattr(time, "time", lambda: server() + ahead)
    monkeypatch.setattr(time, "clock_gettime", lambda id: gettime(id) + slept[0])
    monkeypatch.setattr(os, "utime", touch)
    real = getattr(os, call)

    def late(*args: Any, **options: Any) -> Any:
        if not slept[0]:
            slept[0] = 30.0
            touch(probe)
        return real(*args, **options)

    monkeypatch.setattr(os, call, late)
    assert abs(ServerClock(str(probe)).now_ms() - server() * 1000) < 1000


def test_a_link_in_the_place_of_the_probe_file_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    os.utime(tmp_path / "elsewhere", (1, 1))
    (tmp_path / "probe").symlink_to("elsewhere")
    assert abs(ServerClock(str(tmp_path / "probe")).now_ms() - time.time() * 1000) < 60_000
    assert (tmp_path / "elsewhere").stat().st_mtime == 1


def test_the_probe_file_is_made_where_it_is_missing(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    assert abs(ServerClock(str(probe)).now_ms() - time.time() * 1000) < 60_000
    assert probe.read_bytes() == b""


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock here goes on while a host sleeps")
def test_the_servers_clock_goes_on_while_this_host_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ServerClock(str(tmp_path / "probe"))
    before, own = clock.now_ms(), time.time
    slept = {time.CLOCK_BOOTTIME: 30.0}  # the monotonic clock stood still
    since_boot, (which,) = _since_boot, _since_boot.args
    monkeypatch.setattr("dropq.storage.clock._since_boot", lambda: since_boot() + slept.get(which, 0.0))
    monkeypatch.setattr(time, "time", lambda: own() + 30.0)
    monkeypatch.setattr(ServerClock, "_measure", lambda self: pytest.fail("there was no need to ask the server"))
    assert 30_000 <= clock.now_ms() - before < 60_000
