"""`dropq route`, `dropq.route`: whoever serves a queue or a root moves what routes and selectors take, as it comes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, drop, leave_claimed, take, timed, until, where

import dropq
from dropq import Queue, Root, Stop
from dropq.cli import main as cli
from dropq.lifecycle.context import RootContext
from dropq.routing import Router, Routers, serve
from dropq.routing.mover import Mover
from dropq.routing.router import Folders
from dropq.storage import watch
from dropq.upkeep import self_destruct, sweep
from dropq.upkeep.sweep import sweeps_of_routers

#: Runs a command line, or `dropq.route`, in a process that looks at nothing again unless an event makes it: neither
#: the rescan nor a sweep comes before the test is over.
ONLY_EVENTS = """
import math, sys
import dropq
from dropq.cli import main
from dropq.routing import router, serve
from dropq.upkeep.sweep import QuickSweep

router.RESCAN = serve.RESCAN = 3600
QuickSweep.run = lambda self, **options: setattr(self, "again", math.inf)
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root with a chain of three queues, each of which has a selector with one credit, but for the last."""
    root = Root.create(tmp_path / "root")
    for name in ("first", "second", "third"):
        root.create_queue(name, durability="none", redelivery_delay=0)
    root.queue("first").add_selector("on", to="second")
    root.queue("second").add_selector("further", to="third")
    return root


def bodies(queue: Queue) -> list[str]:
    """What waits, by plain system calls: a message may be moved on while it is read."""
    return sorted(body.decode() for body in where(queue).get("target", []))


@contextmanager
def serving(root: Root) -> Iterator[list[dict[str, dict[str, int]]]]:
    """Serve a root in a thread for a block; what `dropq.route` returned is in the list when the block is over."""
    stop, returned = Stop(), list[dict[str, dict[str, int]]]()
    thread = threading.Thread(target=lambda: returned.append(dropq.route(root, stop=stop)))
    thread.start()
    try:
        yield returned
    finally:
        stop.ask()
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program for a block; end it by SIGTERM."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)


# -- a root ------------------------------------------------------------------------------------------------------------


def test_one_pass_over_a_root_moves_what_waits_and_returns_how_many_each_selector_took(root: Root) -> None:
    for body in ("1", "2", "3"):
        root.queue("first").send(body)
    assert dropq.route(root, once=True) == {"first": {"on": 1}, "second": {"further": 1}}
    assert bodies(root.queue("third")) == ["1"]
    assert dropq.route(root, once=True) == {}


def test_a_selector_whose_messages_others_take_first_took_none(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.queue("first").send(b"1")
    monkeypatch.setattr(Mover, "_try", lambda *_: False)
    assert dropq.route(root, once=True) == {}


def test_a_pass_over_a_root_distributes_what_scripts_publish_and_serves_subscriptions(root: Root) -> None:
    topic = root.create_topic("news")
    archive = topic.create_subscription("archive", client_id="hq")
    archive.add_selector("on", to="third")
    drop(topic.queue, "published.txt", b"news")
    dropq.route(root, once=True)
    assert dropq.route(root, once=True) == {} or bodies(archive) == []
    assert bodies(root.queue("third")) == ["news"]


def test_a_root_is_served_until_it_is_asked_to_stop_and_each_ack_lets_the_next_message_through(root: Root) -> None:
    first, third = root.queue("first"), root.queue("third")
    with serving(root) as returned:
        for body in ("1", "2", "3"):
            first.send(body)
        for body in ("1", "2", "3"):
            until(lambda body=body: bodies(third) == [body], f"message {body}")  # type: ignore[misc]
            take(third).ack()
    assert returned == [{"first": {"on": 3}, "second": {"further": 3}}]


def test_an_event_of_the_threading_module_stops_it(root: Root) -> None:
    stop = threading.Event()
    stop.set()
    assert dropq.route(root, stop=stop) == {}


def test_queues_and_selectors_that_come_later_are_served(root: Root) -> None:
    root.queue("second").remove_selector("further")
    with serving(root):
        root.queue("first").send("a")
        until(lambda: bodies(root.queue("second")) == ["a"], "the first hop")
        root.create_queue("later")
        root.queue("second").add_selector("later", to="later")
        until(lambda: bodies(root.queue("later")) == ["a"], "the new selector")
        last = root.create_queue("last")
        root.queue("later").add_selector("last", to="last")
        until(lambda: bodies(last) == ["a"], "the new queue's selector")


def test_a_queue_that_cannot_be_opened_is_passed_over_with_one_warning_until_it_can(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    first, broken = root.queue("first"), root.create_queue("broken")
    broken.add_selector("on", to="third")
    broken.send("b")
    config = Path(broken.layout.config_file)
    config.write_text("nonsense")
    with serving(root) as returned:
        until(lambda: "broken is passed over" in caplog.text, "the warning")
        first.send("a")
        until(lambda: bodies(root.queue("third")) == ["a"], "the other queues")
        config.unlink()
        until(lambda: len(bodies(root.queue("third"))) == 2, "the repaired queue")
    assert caplog.text.count("broken is passed over") == 1
    assert returned[0]["broken"] == {"on": 1}


def test_a_queue_whose_disk_fails_keeps_no_other_from_being_served(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one_pass = Router.one_pass

    def failing(self: Router, stopped: Callable[[], bool] = bool) -> None:
        if self._context.name == "first":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        one_pass(self, stopped)

    monkeypatch.setattr(Router, "one_pass", failing)
    root.queue("first").send("1")
    root.queue("second").send("2")
    assert dropq.route(root, once=True) == {"second": {"further": 1}}
    assert caplog.text.count("first is passed over: ") == 1
    assert bodies(root.queue("first")) == ["1"]


def test_a_queue_that_is_deleted_is_passed_over_with_one_warning_and_the_others_go_on(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    root.create_queue("gone").add_selector("on", to="third")
    with serving(root):
        root.queue("gone").send("1")
        until(lambda: bodies(root.queue("third")) == ["1"], "the first message")
        take(root.queue("third")).ack()
        root.delete_queue("gone", force=True)
        until(lambda: "gone is passed over" in caplog.text, "the warning")
        root.queue("first").send("2")
        until(lambda: bodies(root.queue("third")) == ["2"], "the other queues")
    assert caplog.text.count("gone is passed over") == 1


def test_a_queue_that_has_lost_its_last_selector_is_not_served_any_more_and_its_count_stays(root: Root) -> None:
    first, second = root.queue("first"), root.queue("second")
    with serving(root) as returned:
        first.send("1")
        until(lambda: bodies(root.queue("third")) == ["1"], "the first message")
        take(root.queue("third")).ack()
        assert first.remove_selector("on")
        first.send("2")
        second.send("3")
        until(lambda: bodies(root.queue("third")) == ["3"], "the other queue")
    assert bodies(first) == ["2"]
    assert returned == [{"first": {"on": 1}, "second": {"further": 2}}]


# -- what it looks at --------------------------------------------------------------------------------------------------


class Listed:
    """Counts the folders that are listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, partial(self._call, getattr(os, name)))

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        self.count += 1
        return call(*args)

    def during(self, act: Callable[[], object]) -> int:
        before = self.count
        act()
        return self.count - before


def many(path: Path, queues: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Root, Routers]:
    """A root with so many queues whose selectors lead to `sink`; its routers have looked, and time stands still."""
    root = timed(Root.create(path, clock=Clock()), replace(FRESH, long_attempt=3600.0))
    root.create_queue("sink", durability="none")
    for number in range(queues):
        root.create_queue(f"q{number}", durability="none").add_selector("on", to="sink", credit=100)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    routers = Routers(root.context, sweep=sweeps_of_routers())
    for _ in range(2):
        routers.serve(bool, None)
    return root, routers


def test_a_message_to_one_queue_makes_no_more_listings_however_many_queues_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listings(queues: int) -> int:
        with monkeypatch.context() as patched:
            root, routers = many(tmp_path / str(queues), queues, patched)
            root.queue("q1").send("a")
            listed = Listed(patched)
            assert listed.during(lambda: routers.serve(bool, frozenset())) == 0
            count = listed.during(lambda: routers.serve(bool, frozenset({"q1"})))
            assert bodies(root.queue("sink")) == ["a"] and routers.has_moved
            routers.close()
            return count

    assert listings(2) == listings(40) > 0


def test_where_nothing_waits_routers_look_the_more_seldom_the_more_queues_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, routers = many(tmp_path / "many", 40, monkeypatch)
    for seconds, looked in ((0.5, 0), (61.0, 40)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: 1000.0 + seconds)
        routers._lists_at = 5000.0
        assert len(routers.serve(bool, frozenset())) == looked
    routers.close()


def test_where_a_message_waits_its_router_looks_each_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, routers = many(tmp_path / "many", 3, monkeypatch)
    sink = root.queue("sink")
    sink.pause()
    Path(sink.layout.write_lock).touch()
    root.queue("q1").send("a")
    routers.serve(bool, frozenset({"q1"}))
    for service in routers._services.values():
        service.due = max(service.due, 1001.5) if service.is_idle else service.due
    monkeypatch.setattr(time, "monotonic", lambda: 1001.0)
    assert list(routers.serve(bool, frozenset())) == ["q1"]
    Path(sink.layout.write_lock).unlink()
    monkeypatch.setattr(time, "monotonic", lambda: 1002.1)
    routers.serve(bool, frozenset())
    assert bodies(sink) == ["a"]
    routers.close()


@pytest.mark.parametrize(
    ("slow", "clocks", "seconds"),
    [
        ("open_queue", ("monotonic", "thread_time"), 2.0),
        ("addresses", ("monotonic",), 2.0),
        ("addresses", ("monotonic", "thread_time"), 6.0),
    ],
    ids=["it opened many", "the machine is busy", "there are very many"],
)
def test_a_queue_that_comes_later_is_served_within_seconds_however_long_a_listing_took(
    slow: str, clocks: tuple[str, ...], seconds: float, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = dict.fromkeys(("monotonic", "thread_time"), 1000.0)
    for name in clock:
        monkeypatch.setattr(time, name, partial(clock.__getitem__, name))

    def slowly(call: Callable[..., Any], *args: Any) -> Any:
        clock.update({name: clock[name] + 100 for name in clocks})
        return call(*args)

    with monkeypatch.context() as patched:
        patched.setattr(serve, slow, partial(slowly, getattr(serve, slow)))
        routers = Routers(root.context, sweep=sweeps_of_routers())
        routers.serve(bool, None)
    later = root.create_queue("later", durability="none")
    later.add_selector("on", to="third")
    later.send("a")
    clock["monotonic"] += seconds
    routers.serve(bool, frozenset())
    assert bodies(root.queue("third")) == ["a"]
    routers.close()


def delayed(queue: Queue) -> None:
    queue.send("a", delay="1h")


def held(queue: Queue) -> None:
    queue.send("a")
    leave_claimed(queue, "1h")


def staged(queue: Queue) -> None:
    Path(queue.layout.staged, "r-1.x,processed~4.a.B").mkdir(parents=True)


def half_removed(queue: Queue) -> None:
    Path(queue.layout.selectors, "on.toml").rename(Path(queue.layout.selectors, ".on.removed"))


def out_of_credit(queue: Queue) -> None:
    queue.send("a")
    assert queue.route() == {"on": 1}


def without_delayed(queue: Queue) -> None:
    os.rmdir(queue.layout.delayed)


@pytest.mark.parametrize(
    ("act", "idle"),
    [
        (lambda queue: None, True),
        (lambda queue: drop(queue, "upload.part", b"x"), True),
        (lambda queue: queue.send("a"), False),
        (delayed, False),
        (held, False),
        (staged, False),
        (half_removed, False),
        (out_of_credit, False),
        (without_delayed, False),
    ],
)
def test_a_queue_is_idle_while_nothing_is_there_that_time_may_change(
    root: Root, act: Callable[[Queue], object], idle: bool
) -> None:
    queue = root.queue("first")
    act(queue)
    router = Router(queue.context, sweep=None)
    router._mover.refresh()
    assert router.is_idle is idle


def test_without_events_every_queue_is_looked_at(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "events_reach", lambda path: False)
    with serving(root):
        for body in ("1", "2"):
            root.queue("first").send(body)
        for body in ("1", "2"):
            until(lambda body=body: bodies(root.queue("third")) == [body], f"message {body}")  # type: ignore[misc]
            take(root.queue("third")).ack()


def test_a_queue_that_was_replaced_is_served_anew(root: Root) -> None:
    first = root.queue("first")
    routers = Routers(root.context, sweep=sweeps_of_routers())
    routers.serve(bool, None)
    shutil.copytree(first.layout.home, root.path / ".copy")
    shutil.rmtree(first.layout.home)
    os.rename(root.path / ".copy", first.layout.home)
    first.send("a")
    routers._lists_at = 0.0
    assert "first" in routers.serve(bool, frozenset())
    assert bodies(root.queue("second")) == ["a"]
    routers.close()


def test_a_queue_that_goes_while_it_is_looked_at_is_passed_over_with_a_warning(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    routers = Routers(root.context, sweep=sweeps_of_routers())
    routers.serve(bool, None)
    shutil.rmtree(root.queue("first").layout.home)
    assert routers.serve(bool, frozenset({"first"}))["first"] == Folders(), "nothing there is to be watched any more"
    assert "first is passed over: queue 'first' is gone" in caplog.text
    routers.close()


def test_the_upkeep_of_the_root_is_done_once_however_many_queues_routers_sweep(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()

    def sweep_all(of: RootContext) -> list[int]:
        made.append(of.layout.path)
        return []

    monkeypatch.setattr(self_destruct, "sweep_all", sweep_all)
    own = sweeps_of_routers()
    for name in ("first", "second", "third"):
        quick = own(root.queue(name).context)
        quick._upkeep_at = 0.0
        quick.run()
    assert made == [str(root.path)]


def test_an_upkeep_that_has_begun_in_an_idle_queue_or_for_the_root_goes_on_each_second(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = root.create_queue("kept", max_history=1, durability="none")
    queue.add_selector("on", to="third")
    for number in range(20):
        Path(queue.layout.folder("processed"), f"4.x{number}.B").touch()
    looked = list[int]()

    def sweep_all(of: RootContext) -> Iterator[int]:
        for number in range(20):
            looked.append(number)
            yield 0

    monkeypatch.setattr(self_destruct, "sweep_all", sweep_all)
    monkeypatch.setattr(sweep, "SLICE", -1.0)  # each slice is one step
    monkeypatch.setattr(serve, "IDLE_SHARE", 1e9)  # as among very many queues
    routers = Routers(root.context, sweep=sweeps_of_routers())
    for seconds in range(180):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: 1000.0 + seconds)
        routers.serve(bool, frozenset())
    assert len(where(queue)["processed"]) == 1
    assert looked[:20] == list(range(20))
    assert all(service.is_idle for service in routers._services.values())
    routers.close()


def test_an_upkeep_of_the_root_that_takes_long_is_not_begun_again_by_another_queue_unless_it_was_given_up(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()

    def sweep_all(of: RootContext) -> Iterator[int]:
        begun.append(of.layout.path)
        yield from [0] * 1000

    monkeypatch.setattr(self_destruct, "sweep_all", sweep_all)
    monkeypatch.setattr(sweep, "SLICE", -1.0)  # each slice is one step
    own = sweeps_of_routers()
    first, second, third = (own(root.queue(name).context) for name in ("first", "second", "third"))

    def run(quick: sweep.QuickSweep) -> int:
        for _ in range(100):
            now = time.monotonic() + 61
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            quick.run()
        return len(begun)

    assert (run(first), run(second)) == (1, 1)
    first.close()
    assert run(third) == 2


# -- a process, which waits for events ---------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [["second"], []], ids=["a queue", "the root"])
def test_an_ack_downstream_wakes_a_process_that_serves(root: Root, queue: list[str]) -> None:
    second, third = root.queue("second"), root.queue("third")
    program = f"{ONLY_EVENTS}\nsys.exit(main.main(sys.argv[1:]))"
    with process("-c", program, "--root", str(root.path), "route", *queue) as router:
        for body in ("1", "2", "3"):
            second.send(body)
        for body in ("1", "2", "3"):
            until(lambda body=body: bodies(third) == [body], f"message {body}")  # type: ignore[misc]
            take(third).ack()
        router.send_signal(signal.SIGTERM)
        out, err = router.communicate()
    assert (router.returncode, out) == (0, "second\tselector\tfurther\t3\n"), err
    assert err == "routed=0 selected=3 distributed=0\n"


@pytest.mark.parametrize("history", [True, False])
def test_an_ack_at_the_end_of_a_chain_lets_each_queue_before_it_move_one(root: Root, history: bool) -> None:
    root.delete_queue("third")
    third = root.create_queue("third", history=history, durability="none")
    first, second = root.queue("first"), root.queue("second")
    program = f"{ONLY_EVENTS}\nprint(dropq.route(dropq.Root(sys.argv[1])))"
    with process("-c", program, str(root.path)) as router:
        for body in ("1", "2", "3"):
            first.send(body)
        until(lambda: (bodies(first), bodies(second), bodies(third)) == (["2", "3"], [], ["1"]), "the first message")
        take(third).ack()
        until(lambda: (bodies(first), bodies(second), bodies(third)) == (["3"], [], ["2"]), "the second message")
        router.send_signal(signal.SIGTERM)
        out, err = router.communicate()
    assert (router.returncode, out, err) == (0, "{'first': {'on': 2}, 'second': {'further': 2}}\n", "")


# -- the command line --------------------------------------------------------------------------------------------------


def test_route_prints_what_selectors_took(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root.queue("first").send("a")
    assert cli.main(["--root", str(root.path), "route", "first", "--once", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"queue": "first", "kind": "selector", "name": "on", "moved": 1}
    assert err == "routed=0 selected=1 distributed=0\n"
    assert cli.main(["--root", str(root.path), "route", "--once"]) == 0
    assert capsys.readouterr().out == "second\tselector\tfurther\t1\n"


def unusable(root: Root) -> str:
    broken = Path(root.queue("first").layout.selectors, "broken.toml")
    broken.write_text('to = "third"\nfilter = "region ="\n')
    return "selector broken.toml is passed over: "


def closed(root: Root) -> str:
    Path(root.queue("first").layout.config_file).write_text("nonsense")
    return "first is passed over: "


@pytest.mark.parametrize(
    ("spoil", "queue"),
    [(unusable, ["first"]), (unusable, []), (closed, [])],
    ids=["a selector, of a queue", "a selector", "a queue"],
)
def test_route_exits_with_1_where_a_selector_cannot_be_used_or_a_queue_of_the_root_cannot_be_served(
    spoil: Callable[[Root], str], queue: list[str], root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    why = spoil(root)
    root.queue("second").send("a")
    assert cli.main(["--root", str(root.path), "route", *queue, "--once"]) == 1
    assert caplog.text.count(why) == 1
    assert bodies(root.queue("third")) == ([] if queue else ["a"])


def test_route_refuses_a_folder_that_is_no_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--root", str(tmp_path), "route", "--once"]) == 66
    assert f"{tmp_path} has no queues" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
