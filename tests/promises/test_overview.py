"""The look: what ls, health, top and metrics show is what stands, how old it is, and whether it moves."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from helpers import FRESH, Clock, Make, make_queue, take, until

from dropq import Look, NoSuchQueue, Queue, Root
from dropq.cli import output
from dropq.cli import screen as screen_module
from dropq.cli.main import main
from dropq.cli.shell import Shell
from dropq.diagnosis import overview as overview_module
from dropq.diagnosis.health import Health, Reason
from dropq.diagnosis.metrics import Exporter, findings
from dropq.diagnosis.overview import Viewer
from dropq.diagnosis.standing import Standing, ages_by
from dropq.diagnosis.summary import state_of
from dropq.storage import reading


def look_at(queue: Queue) -> Look:
    """What one look at a queue shows."""
    (look,) = overview_module.overview(queue.root.context, [queue.name])
    return look


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a command printed."""
    return capsys.readouterr().out.splitlines()


# -- what stands ---------------------------------------------------------------------------------------------------


def test_a_look_has_counts_ages_and_holders(make: Make, clock: Clock) -> None:
    queue = make(timing=FRESH)
    queue.send(b"old")
    clock.advance(100)
    queue.send_many([b"x"] * 3)
    queue.send(b"late", delay=5)
    with queue.subscribe(client_id="ann", max_backlog=2) as subscription:
        held = subscription.receive()
        assert held is not None
        clock.advance(30)
        look = look_at(queue)
        assert look.counts == Standing(queue.context).counts == queue.counts()
        assert (look.counts["target"], look.counts["processing"], look.counts["delayed"]) == (3, 1, 1)
        assert look.oldest["target"] == pytest.approx(30, abs=1)
        assert look.oldest["delayed"] == pytest.approx(25, abs=1)
        assert look.oldest["processing"] == pytest.approx(130, abs=1)
        assert sum(look.ages) == 3 and look.ages[2] == 3
        assert look.consumers == 1
        (holder,) = look.holders
        assert (holder.client, holder.held, holder.status) == ("ann", 1, "held")
        assert holder.subscription == subscription.id
    assert look_at(queue).consumers == 0


def test_ls_counts_names_and_looks_at_no_file(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make()
    queue.send(b"x")
    Path(queue.layout.target, "report.csv").write_text("x")

    def changed(path: str, **gone: int) -> int:
        raise AssertionError(path)

    monkeypatch.setattr(reading, "changed_ms", changed)
    assert main(["--root", str(queue.root.path), "ls"]) == 0
    assert lines(capsys)[0].startswith("q\t2\t")


def test_a_root_is_looked_at_queue_by_queue_and_one_that_cannot_be_read_has_its_error(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    for name in ("a", "b", "c"):
        root.create_queue(name, durability="none").send(b"x")
    (tmp_path / "b" / "queue.toml").write_text("nonsense = 1\n")
    looks = root.overview()
    assert [look.queue for look in looks] == ["a", "b", "c"]
    assert [look.health.error is None for look in looks] == [True, False, True]
    assert findings(looks[1]) == ["configuration"]
    assert looks[0].counts["target"] == 1 and not looks[1].counts


def test_a_queue_of_which_nobody_can_tell_whether_it_went_is_shown_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.create(tmp_path)
    root.create_queue("q", durability="none")

    def refused(*_: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), tmp_path)

    def gone(*_: object) -> Any:
        raise NoSuchQueue("it is no queue")

    monkeypatch.setattr(overview_module, "open_queue", gone)
    monkeypatch.setattr(overview_module, "why_away", refused)
    (look,) = root.overview()
    assert look.health.error is not None and "it is no queue" in str(look.health.error)


def test_what_settled_and_what_came_are_rates_of_the_last_minute(make: Make, clock: Clock) -> None:
    queue = make()
    watched = overview_module.Watched(queue.root.context, "q")
    queue.send_many([b"x"] * 30)
    assert watched.look().rate_in is None
    for _ in range(20):
        take(queue).ack()
    queue.context.log.sums.tell()
    clock.advance(20)
    queue.send_many([b"x"] * 5)
    look = watched.look()
    assert look.rate_out == pytest.approx(20 / 60)
    assert look.rate_in == pytest.approx(20 / 60 + (15 - 30) / 20, abs=0.01) or look.rate_in == 0.0
    assert watched.newly_settled()["acked"] == 20
    assert watched.newly_settled()["acked"] == 0


def test_without_a_log_there_is_no_rate(make: Make) -> None:
    queue = make(log="off")
    take_one(queue)
    look = look_at(queue)
    assert look.rate_out is None and look.rate_in is None


def take_one(queue: Queue) -> None:
    """Send a message, and acknowledge it."""
    queue.send(b"x")
    take(queue).ack()


# -- why it stands still -------------------------------------------------------------------------------------------


def full_backlog(queue: Queue) -> None:
    subscription = queue.subscribe()
    assert subscription.receive() is not None
    queue.root.kept = subscription  # type: ignore[attr-defined]


STANDSTILLS: dict[str, tuple[dict[str, Any], Callable[[Queue], object], str]] = {
    "nobody": ({}, lambda queue: None, "ready: "),
    "backlog": ({"max_backlog": 1}, full_backlog, "backlog: "),
    "filter": ({"filter": "JMSPriority = 9"}, lambda queue: None, "filter: "),
    "barrier": ({"barrier_expression": "JMSPriority = 9"}, lambda queue: None, "ready: "),
}


@pytest.mark.parametrize("name", STANDSTILLS)
def test_a_queue_that_stands_still_says_why(
    make: Make, clock: Clock, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, stop, wanted = STANDSTILLS[name]
    queue = make(**options)
    for _ in range(3):
        queue.send(b"x")
    stop(queue)
    assert look_at(queue).still == ""
    clock.advance(70)
    assert "messages wait, and nobody has taken one for 1m" in look_at(queue).still
    assert look_at(queue).still.startswith(wanted)
    command = ["--root", str(queue.root.path), "--json", "health", "q"]

    def judged(*argv: str) -> tuple[int, list[str], list[str]]:
        code = main([*command, *argv])
        (record,) = map(json.loads, lines(capsys))
        reasons, notes = ([one["kind"] for one in record[part]] for part in ("reasons", "notes"))
        return code, reasons, notes

    clock_of_files = os.stat(queue.layout.processing).st_mtime - 70  # the command has a clock of its own
    os.utime(queue.layout.processing, (clock_of_files, clock_of_files))
    aged = datetime.fromtimestamp(clock.ms / 1000 - 140, UTC)
    for file in os.listdir(queue.layout.target):
        os.rename(f"{queue.layout.target}/{file}", f"{queue.layout.target}/4.{int(aged.timestamp() * 1e6)}{file[18:]}")
    assert "still" in judged()[2]
    code, reasons, _ = judged("--still", "30s")
    assert (code, "still" in reasons) == (1, True)
    assert "still" not in judged("--still", "1h")[1]


def test_a_queue_stands_still_for_no_longer_than_its_oldest_message_waits(make: Make, clock: Clock) -> None:
    queue = make()
    clock.advance(400)
    queue.send(b"x")
    clock.advance(70)
    assert "nobody has taken one for 1m10s" in look_at(queue).still


def test_a_queue_that_is_paused_says_that(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send(b"x")
    queue.pause()
    clock.advance(70)
    look = look_at(queue)
    assert look.still == "" and findings(look) == ["paused"]


def test_a_holder_that_hangs_and_renews_its_lease_does_not_move_the_queue(make: Make, clock: Clock) -> None:
    queue = make(max_backlog=1, timing=FRESH)
    queue.send_many([b"x"] * 2)
    message = take(queue)
    watched = overview_module.Watched(queue.root.context, "q")
    assert watched.look().still == ""
    for _ in range(4):
        clock.advance(30)
        message.extend(60)
        os.utime(queue.layout.processing, (clock.ms / 1000, clock.ms / 1000))
        look = watched.look()
    assert "1 held, as many as max_backlog allows" in look.still
    message.ack()
    message = take(queue)
    os.utime(queue.layout.processing, (clock.ms / 1000, clock.ms / 1000))
    assert watched.look().still == ""
    message.ack()


def test_a_queue_that_scripts_empty_between_two_looks_does_not_stand_still(make: Make, clock: Clock) -> None:
    queue = make(log="off")
    queue.send_many([b"x"] * 3)
    watched = overview_module.Watched(queue.root.context, "q")
    for _ in range(4):
        os.utime(queue.layout.processing, (clock.ms / 1000, clock.ms / 1000))  # as two mv leave it
        assert watched.look().still == ""
        clock.advance(30)
    clock.advance(40)
    assert watched.look().still


def test_a_queue_that_moves_does_not_stand_still(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send_many([b"x"] * 3)
    clock.advance(70)
    message = take(queue)
    now = clock.ms / 1000
    os.utime(queue.layout.processing, (now, now))
    assert look_at(queue).still == ""
    message.ack()


def test_a_queue_whose_messages_a_router_moves_does_not_stand_still(make: Make, clock: Clock) -> None:
    queue = make()
    queue.send_many([b"x"] * 3)
    clock.advance(70)
    assert look_at(queue).still
    queue.context.log.ended("moved", "4.1795940105402001-3959586867.B", intended=True)
    queue.context.log.sums.tell()
    assert look_at(queue).still == ""


# -- ages by what is in names --------------------------------------------------------------------------------------


def test_ages_are_counted_by_type_and_by_property(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make()
    queue.send(b"x", type="invoice", properties={"customer": "ann"})
    clock.advance(120)
    queue.send(b"x", type="order", properties={"customer": "ann"})
    queue.send(b"x", properties={"customer": "bob\tand [red]co"})
    clock.advance(5)
    assert ages_by(queue.context, "target", "type") == (
        {
            "invoice": [0, 0, 0, 1, 0, 0, 0, 0],
            "order": [0, 1, 0, 0, 0, 0, 0, 0],
            "": [0, 1, 0, 0, 0, 0, 0, 0],
        },
        None,
        [0, 2, 0, 1, 0, 0, 0, 0],
    )
    found = ages_by(queue.context, "target", "customer")
    assert {value: sum(counts) for value, counts in found.of_value.items()} == {"ann": 2, "bob\tand [red]co": 1}
    command = ["--root", str(queue.root.path), "ls", "q", "--ages"]
    assert main([*command, "--by", "customer"]) == 0
    assert [line.split("\t")[:2] for line in lines(capsys)] == [
        ["ann", "2"],
        ["bob\\x09and [red]co", "1"],
        ["total", "3"],
    ]
    assert main(command) == 0
    assert lines(capsys)[0].split("\t")[:2] == ["q", "3"]
    assert main(["--root", str(queue.root.path), "ls", "--ages"]) == 2
    assert main(["--root", str(queue.root.path), "ls", "q", "--by", "type"]) == 2
    assert main(["--root", str(queue.root.path), "ls", "q", "--state", "error"]) == 2
    monkeypatch.setattr(Shell, "on_terminal", True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    capsys.readouterr()
    assert main([*command, "--by", "nosuch"]) == 0
    assert "(none)" in capsys.readouterr().out


def test_a_property_of_many_values_takes_no_more_than_the_first(make: Make) -> None:
    queue = make()
    for number in range(60):
        queue.send(b"x", properties={"n": number})
    found = ages_by(queue.context, "target", "n")
    assert len(found.of_value) == 50
    assert found.others is not None and sum(found.others) == 10 and sum(found.total) == 60


def make_due(viewer: Viewer) -> None:
    """Let a viewer look again, as for the first time, at all that it does not look at now."""
    for watched in (viewer._listing, *viewer.all()):
        watched.due = 0.0
    viewer._due = [(0.0, watched.name) for watched in viewer.all()]


# -- a viewer --------------------------------------------------------------------------------------------------


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let looks at queues whose names begin with `dead` wait until the test ends; return which looks so began."""
    end = threading.Event()
    look = overview_module.Watched.look
    began: list[str] = []

    def waiting(self: overview_module.Watched) -> Look:
        if self.name.startswith("dead"):
            began.append(self.name)
            end.wait()
            raise NoSuchQueue(self.name)
        return look(self)

    monkeypatch.setattr(overview_module.Watched, "look", waiting)
    yield began
    end.set()


def test_queues_that_do_not_answer_keep_no_other_waiting_and_are_looked_at_once(
    tmp_path: Path, hanging: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_module, "PATIENCE", 0.2)
    root = Root.create(tmp_path)
    for name in (*(f"dead{number}" for number in range(6)), *(f"q{number}" for number in range(20))):
        root.create_queue(name, durability="none")
    viewer = Viewer(root.context)
    viewer.wait()
    seen = viewer._seen
    dead = {f"dead{number}" for number in range(6)}
    assert {name for name, one in seen.items() if one.last is None} == dead
    first = seen["q0"].looked
    make_due(viewer)

    def is_looked_at_again() -> bool:
        viewer.refresh()
        return seen["q0"].looked > first

    until(is_looked_at_again, "the next look")
    assert sorted(hanging) == sorted(dead)
    viewer.close()
    text = Exporter().text(viewer)
    assert 'dropq_up{queue="dead0"} 0' in text and 'dropq_up{queue="q0"} 1' in text
    looks = root.overview()
    assert sum(look.health.error is not None for look in looks) == 6


def test_a_viewer_looks_at_four_queues_at_once_while_they_may_still_answer(
    tmp_path: Path, hanging: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_module, "PATIENCE", float("inf"))
    root = Root.create(tmp_path)
    names = [f"dead{number}" for number in range(10)]
    for name in names:
        root.create_queue(name, durability="none")
    viewer = Viewer(root.context, names)
    for _ in range(3):
        viewer.refresh()
    assert sum(seen.began is not None for seen in viewer.all()) == overview_module.TOGETHER
    until(lambda: len(hanging) == overview_module.TOGETHER, "four looks")
    viewer.close()  # else the others begin when the test ends, and hang in the next one


def test_a_viewer_sees_queues_come_and_go(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    root.create_queue("a", durability="none")
    viewer = Viewer(root.context)
    viewer.wait()
    assert list(viewer._seen) == ["a"]
    root.create_queue("b", durability="none")
    root.delete_queue("a")
    viewer._listing.due = 0.0

    def has_changed() -> bool:
        viewer.refresh()
        return list(viewer._seen) == ["b"]

    until(has_changed, "the listing")


def test_a_viewer_rests_between_two_looks(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    viewer = Viewer(queue.root.context, ["q"])
    viewer.wait()
    (seen,) = viewer.all()
    until(lambda: seen.began is None, "the end of the look")
    assert seen.due >= seen.looked + overview_module.PAUSE
    viewer.refresh()
    assert seen.began is None


# -- metrics -------------------------------------------------------------------------------------------------------


def text_of(viewer: Viewer, exporter: Exporter) -> str:
    """What an exporter writes once each queue was looked at again."""
    make_due(viewer)
    viewer.wait()
    return exporter.text(viewer)


def test_what_was_settled_since_the_exporter_began_is_counted_as_long_as_the_queue_is_there(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    queue = root.create_queue("q", durability="none")
    take_one(queue)
    queue.context.log.sums.tell()
    viewer, exporter = Viewer(root.context), Exporter()
    assert 'dropq_settled_total{queue="q",outcome="acked"} 0' in text_of(viewer, exporter)
    for _ in range(3):
        take_one(queue)
    queue.context.log.sums.tell()
    text = text_of(viewer, exporter)
    assert 'dropq_settled_total{queue="q",outcome="acked"} 3' in text
    queue.close()
    root.delete_queue("q")

    def is_gone() -> bool:
        viewer._listing.due = 0.0
        viewer.refresh()
        return not viewer._seen

    until(is_gone, "the listing")
    assert 'queue="q"' not in exporter.text(viewer)


def test_what_comes_and_goes_has_no_series_of_its_own(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    root.create_queue("q", durability="none")
    topic = root.create_topic("t", durability="none")
    topic.subscribe("kept", client_id="c").close()
    with topic.subscribe("s", durable=False), topic.subscribe("s2", durable=False):
        for number in range(2):
            os.makedirs(tmp_path / f"temp-1795940105402{number:03d}-3959586867" / "target")
        topic.publish(b"x")
        viewer, exporter = Viewer(root.context), Exporter()
        text = text_of(viewer, exporter)
    named = {line.partition('queue="')[2].partition('"')[0] for line in text.splitlines() if not line.startswith("#")}
    assert named == {"q", "t", "t/kept.c", "t/.ephemeral", ".temp", ".root"}
    assert 'dropq_consumers{queue="t/.ephemeral"} 2' in text


def test_labels_hold_whatever_a_queue_is_called(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    name = 'a "quoted" back\\slash'
    root.create_queue(name, durability="none")
    text = text_of(Viewer(root.context), Exporter())
    assert 'dropq_up{queue="a \\"quoted\\" back\\\\slash"} 1' in text


def test_metrics_once_say_by_their_exit_whether_all_could_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Root.create(tmp_path)
    root.create_queue("q", durability="none").send(b"x")
    command = ["--root", str(tmp_path), "metrics"]
    assert main(command) == 0
    assert 'dropq_messages{queue="q",state="target"} 1' in lines(capsys)
    (tmp_path / "q" / "queue.toml").write_text("nonsense = 1\n")
    for named in ((), ("q",)):
        assert main([*command, *named]) == 1
        text = capsys.readouterr().out
        assert 'dropq_up{queue="q"} 0' in text and "dropq_consumers{" not in text
    assert main([*command, "--textfile", "q.txt"]) == 2
    assert main([*command, "--textfile", "x.prom", "--listen", "127.0.0.1:0"]) == 2
    assert main([*command, "--listen", "9590"]) == 2
    assert main([*command, "--textfile", str(tmp_path / "nowhere" / "x.prom")]) == 73
    assert main([*command, "--listen", "192.0.2.1:9590"]) == 73


def test_metrics_of_a_queue_that_is_not_there_name_one_that_is_like_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Root.create(tmp_path / "root")
    root.create_queue("orders", durability="none")
    for more in ((), ("--listen", "127.0.0.1:0"), ("--textfile", str(tmp_path / "x.prom"))):
        assert main(["--root", str(root.path), "metrics", "ordres", *more]) == 66
        told = capsys.readouterr()
        assert "is it 'orders'?" in told.err and not told.out


def test_a_textfile_whose_folder_goes_away_is_written_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Root.create(tmp_path / "root")
    folder, steps = tmp_path / "textfiles", iter(range(5))
    folder.mkdir()

    def sleep(seconds: float) -> None:
        number = next(steps)
        if number == 0:
            shutil.rmtree(folder)
        elif number == 3:
            folder.mkdir()
        elif number == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Viewer, "keep_up", lambda self, seconds: sleep(seconds))
    assert main(["--root", str(root.path), "metrics", "--textfile", str(folder / "q.prom")]) == 130
    assert (folder / "q.prom").exists()
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_textfile_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root.create(tmp_path / "root")
    queue = root.create_queue("q", durability="none")
    path, found = tmp_path / "q.prom", list[str]()

    def sleep(seconds: float) -> None:
        found.append(path.read_text())
        assert os.listdir(tmp_path).count(path.name) == 1 and len(os.listdir(tmp_path)) == 2
        if len(found) == 2:
            raise KeyboardInterrupt
        queue.send(b"x")

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["--root", str(root.path), "metrics", "--textfile", str(path), "--interval", "100ms"]) == 130
    assert all(text.startswith("# HELP dropq_messages") and text.endswith("\n") for text in found)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int], bool]], int]:
    """Run an exporter of a root with a queue q, until what is given its address returns true; return its exit."""
    root = Root.create(tmp_path)
    root.create_queue("q", durability="none")

    def serve(ask: Callable[[str, int], bool]) -> int:
        notes: list[str] = []
        refresh, ended = Viewer.refresh, threading.Event()

        def asking() -> None:
            host, port = re.findall(r"http://(.+):(\d+)/metrics", notes[0])[0]
            try:
                until(lambda: ask(host, int(port)), "the answer")
            finally:
                ended.set()

        asker = threading.Thread(target=asking)

        def refreshing(self: Viewer) -> None:
            refresh(self)
            if threading.current_thread() is threading.main_thread():
                if asker.ident is None:
                    asker.start()
                if ended.is_set():
                    raise KeyboardInterrupt

        monkeypatch.setattr(output, "note", notes.append)
        monkeypatch.setattr(Viewer, "refresh", refreshing)
        code = main(["--root", str(root.path), "metrics", "--listen", "127.0.0.1:0"])
        asker.join()
        return code

    return serve


def test_prometheus_is_answered_over_http(served: Callable[[Callable[[str, int], bool]], int]) -> None:
    asked: list[tuple[int, str, str]] = []

    def ask(host: str, port: int) -> bool:
        with urlopen(f"http://{host}:{port}/metrics") as answer:
            asked.append((answer.status, answer.headers["Content-Type"], answer.read().decode()))
        return 'dropq_up{queue="q"' in asked[-1][2]

    assert served(ask) == 130
    status, kind, text = asked[-1]
    assert status == 200 and kind.startswith("text/plain; version=0.0.4")
    assert 'dropq_up{queue="q"} 1' in text


def test_a_scrape_that_is_cut_short_is_no_news(
    served: Callable[[Callable[[str, int], bool]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = threading.Event()
    end = ThreadingHTTPServer.shutdown_request

    def ending(self: ThreadingHTTPServer, request: socket.socket) -> None:
        end(self, request)
        ended.set()

    monkeypatch.setattr(ThreadingHTTPServer, "shutdown_request", ending)

    def ask(host: str, port: int) -> bool:
        with socket.create_connection((host, port)) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the end is a reset
        return ended.wait(60)

    assert served(ask) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_scrapes_that_are_cut_short_do_not_end_the_exporter(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    root.create_queue("q", durability="none")
    command = [sys.executable, "-m", "dropq", "--root", str(tmp_path), "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as exporter:
        try:
            assert exporter.stderr is not None
            address = re.findall(r"http://(.+):(\d+)/metrics", exporter.stderr.readline())[0]
            for _ in range(100):
                with socket.create_connection(address) as client:
                    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with urlopen(f"http://{address[0]}:{address[1]}/metrics") as answer:
                assert answer.status == 200
        finally:
            exporter.kill()


# -- top -----------------------------------------------------------------------------------------------------------


def test_top_into_a_pipe_prints_a_line_for_each_queue_the_worst_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Root.create(tmp_path)
    for name, count in (("well", 1), ("busy", 5), ("bad", 0), ("[red]odd", 2)):
        queue = root.create_queue(name, durability="none", redelivery_attempts=0)
        queue.send_many([b"x"] * count)
    take_failing(root.queue("bad"))
    command = ["--root", str(tmp_path)]
    assert main([*command, "top"]) == 0
    assert [line.split("\t")[:3] for line in lines(capsys)] == [
        ["bad", "unhealthy", "0"],
        ["busy", "ok", "5"],
        ["[red]odd", "ok", "2"],
        ["well", "ok", "1"],
    ]
    assert main([*command, "--json", "top", "--sort", "QUEUE"]) == 0
    records = list(map(json.loads, lines(capsys)))
    assert [record["queue"] for record in records] == ["[red]odd", "bad", "busy", "well"]
    assert records[1]["reasons"][0]["kind"] == "many-errors"
    assert records[2]["counts"]["target"] == 5 and sum(records[2]["ages"].values()) == 5
    for seconds in (records[1]["age"], records[2]["oldest"], records[2]["oldest_of"]["target"]):
        assert seconds == round(seconds, 3)
    assert main([*command, "top", "--sort", "size"]) == 2
    assert main([*command, "top", "nowhere"]) == 66


def test_top_shows_a_temporary_queue_that_was_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Root.create(tmp_path)
    name = "temp-1795940105402000-3959586867"
    for folder in ("target", "processing", "processed", "error", "expired", "working"):
        os.makedirs(tmp_path / name / folder)
    assert main(["--root", str(root.path), "top"]) == 0 and not lines(capsys)
    assert main(["--root", str(root.path), "--json", "top", name]) == 0
    assert json.loads(lines(capsys)[0])["queue"] == name


@pytest.mark.parametrize(
    ("kinds", "state"),
    [((), "ok"), (("many-errors", "still"), "still"), (("full",), "unhealthy"), (("storage", "full"), "unread")],
)
def test_the_state_of_a_queue_is_the_worst_of_what_health_says(
    tmp_path: Path, kinds: tuple[str, ...], state: str
) -> None:
    watched = overview_module.Watched(Root.create(tmp_path).context, "q")
    reasons = tuple(Reason(kind, "") for kind in kinds)
    watched.last = Look("q", datetime.now(UTC), Health("q", reasons))
    assert state_of(watched, 0) == state
    watched.last = Look("q", datetime.now(UTC), Health("q", notes=(Reason("paused", ""), Reason("full", ""))))
    assert state_of(watched, 0) == "full"
    watched.began = -overview_module.PATIENCE
    assert state_of(watched, 0) == "silent"


def take_failing(queue: Queue) -> None:
    """Send a message, and fail it for good."""
    queue.send(b"x")
    take(queue).reject("r")


@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (100, 30), (200, 60)])
@pytest.mark.parametrize("name", [None, "q"])
def test_the_screen_fits_its_terminal_whatever_is_in_names(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: int,
    rows: int,
    name: str | None,
) -> None:
    queue = make()
    for odd in ("[red]", "x" * 200, "\u202eabc", "na\u00efve \u65e5\u672c"):
        queue.root.create_queue(odd, durability="none").send(b"x")
    take_failing(queue)
    with queue.subscribe(client_id="ann") as subscription:
        queue.send(b"x")
        assert subscription.receive() is not None
        viewer = Viewer(queue.root.context, None if name is None else [name])
        viewer.wait()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))
        monkeypatch.setenv("NO_COLOR", "1")
        shell = type("Shell", (), {"root": queue.root})
        screen_module._draw(shell, viewer, None)  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert text.startswith(screen_module.HOME) and text.endswith(screen_module.REST)
    drawn = text.removeprefix(screen_module.HOME).removesuffix(screen_module.REST).split("\x1b[K\n")
    assert len(drawn) <= rows
    assert "\u202e" not in text and "\x1b" not in "".join(drawn)
    if name is None:
        assert all(word in text for word in ("5 queues", "waiting", "queue"))
    elif rows > 10:
        assert "rejected" in text and "ann" in text


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux: apt-get install tmux")
def test_a_terminal_is_as_it_was_once_top_has_ended_and_usable_when_it_was_killed(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    root.create_queue("orders", durability="none").send(b"x")
    server = f"dropq-{os.getpid()}"

    def tmux(*argv: str) -> str:
        command = ["tmux", "-L", server, "-f", "/dev/null", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def shows(text: str) -> None:
        until(lambda: text in tmux("capture-pane", "-p"), f"{text!r} on the screen", timeout=60)

    top = shlex.join([sys.executable, "-m", "dropq", "--root", str(root.path), "top", "--interval", "100ms"])
    # What is typed is short: the narrow screen below has to hold it and what came before.
    tmux("new-session", "-d", "-x", "100", "-y", "20", "-e", "PS1=$ ", "-e", f"TOP={top}", "sh")
    try:
        tmux("send-keys", "echo before; echo $((6 * 7))", "Enter")
        shows("42")
        tmux("send-keys", 'eval "$TOP"', "Enter")
        shows("1 queue, 1 waiting")
        tmux("resize-window", "-x", "40", "-y", "10")
        root.create_queue("invoices", durability="none")
        shows("invoices")
        tmux("send-keys", "C-c")
        shows("42")
        assert "waiting" not in tmux("capture-pane", "-p")
        tmux("send-keys", 'clear; eval "$TOP" & sleep 0', "Enter")
        shows("invoices")
        tmux("send-keys", "kill -9 $!; echo $((7 * 191))", "Enter")
        shows("1337")
    finally:
        tmux("kill-server")
