"""A queue that is worked on keeps itself in order: its consumers do what `dropq sweep` does, a slice at a time."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import die_after
from helpers import FRESH, Clock, Make, base, make_queue, reopened, take, timed

from dropq import Queue, Root
from dropq.api import Topic
from dropq.lifecycle.ages import SIDECAR_PASSES
from dropq.lifecycle.sidecars import collect
from dropq.lifecycle.timing import Timing
from dropq.staging.jobs import Job
from dropq.storage import liveness, reading
from dropq.storage.files import Storage
from dropq.upkeep import retention, sweep
from dropq.upkeep.steps import SweepReport
from dropq.upkeep.sweep import QuickSweep

#: Consumers begin with the upkeep at once, rather than after a second.
EARLY = Timing(first_upkeep=0)
#: They sweep at each look, too.
SOON = replace(FRESH, first_upkeep=0)


def committed_job(queue: Queue, monkeypatch: pytest.MonkeyPatch, body: bytes = b"paid") -> None:
    """Commit a job of one message, whose driver dies before it sends it."""
    job = Job(queue.context, "import-1")
    job.begin()
    attempt = job.attempt("p0")
    attempt.write_all(["4.1795332177000000-0000000001.B"], [body])

    def dies(*args: Any, **kwargs: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dropq.staging.jobs.finish", dies)
        with pytest.raises(KeyboardInterrupt):
            job.commit([attempt.finish()])


def names_in(queue: Queue, state: str) -> list[str]:
    return sorted(os.listdir(base(queue) / state))


def test_a_consumer_sends_what_was_committed_by_one_who_died(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=SOON)
    committed_job(queue, monkeypatch)
    with queue.subscribe() as subscription:
        assert subscription.receive() is None  # its driver may just be at it
    clock.advance(sweep.UPKEEP_INTERVAL + 1)
    with queue.subscribe() as subscription:
        message = subscription.receive() or subscription.receive()
        assert message is not None and message.body == b"paid"
        message.ack()
        assert names_in(queue, "working") == []


def test_a_consumer_of_a_subscription_finishes_what_was_published_by_one_who_died(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = timed(Root.create(tmp_path / "root", clock=clock), SOON)
    topic = root.create_topic("sales.eu")
    own = topic.create_subscription("audit", client_id="hq")
    above = root.create_topic("sales").create_subscription("stock", client_id="hq")
    committed_job(topic.queue, monkeypatch)
    with above.subscribe() as subscription:
        assert subscription.receive() is None  # its driver may just be at it
    clock.advance(sweep.UPKEEP_INTERVAL + 1)
    with timed(root, SOON).queue(above.name).subscribe() as subscription:
        found = [message.body for message in (subscription.receive() for _ in range(3)) if message is not None]
    assert found == [b"paid"]
    assert [message.body for message in own.browse()] == [b"paid"]
    assert (names_in(topic.queue, "working"), len(names_in(topic.queue, "processed"))) == ([], 1)


@pytest.fixture
def idle(tmp_path: Path) -> tuple[Topic, Queue]:
    """A topic in which nothing waits, and a subscription of it."""
    topic = timed(Root.create(tmp_path), SOON).create_topic("a", durability="none")
    return topic, topic.create_subscription("audit", client_id="c")


def test_a_program_that_publishes_and_ends_leaves_no_sign_of_life(idle: tuple[Topic, Queue]) -> None:
    topic, audit = idle
    program = f"import dropq; dropq.Root({str(topic.root.path)!r}).topic('a').publish(b'x')"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert len(list(audit.browse())) == 1
    assert os.listdir(topic.queue.layout.consumers) == []


def test_a_thread_that_publishes_and_ends_leaves_no_sign_of_life(idle: tuple[Topic, Queue]) -> None:
    topic, audit = idle
    thread = threading.Thread(target=lambda: topic.publish(b"x"))
    thread.start()
    thread.join()
    assert len(list(audit.browse())) == 1
    assert os.listdir(topic.queue.layout.consumers) == []


def test_a_child_that_ends_takes_no_sign_of_life_of_its_parent(idle: tuple[Topic, Queue]) -> None:
    topic, _ = idle
    topic.publish(b"x")
    program = (
        f"import dropq, os, sys; topic = dropq.Root({str(topic.root.path)!r}).topic('a'); topic.publish(b'x');"
        f"os.fork() or sys.exit(); os.wait(); print(len(os.listdir({topic.queue.layout.consumers!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert ran.stdout == b"2\n", "its own and this process's"


def test_a_consumer_forgets_publishers_that_were_killed_though_nothing_waits_in_their_topic(
    idle: tuple[Topic, Queue],
) -> None:
    topic, audit = idle
    die_after(lambda: topic.publish(b"x"))
    assert len(os.listdir(topic.queue.layout.consumers)) == 1
    with audit.subscribe(max_backlog=None) as subscription:
        while subscription.receive() is not None or os.listdir(topic.queue.layout.consumers):
            pass


@pytest.mark.parametrize("underlying", ["", "a"])
def test_an_idle_look_lists_no_folder_of_topics_that_do_not_feed_the_queue(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, underlying: str
) -> None:
    root = timed(Root.create(tmp_path, clock=clock), replace(FRESH, first_upkeep=1000))
    queue = root.create_topic("a", durability="none").create_subscription("audit", client_id="c")
    if underlying:
        queue = root.create_queue("view", underlying_topic=underlying, default_publish_target="a", durability="none")
    sweep, listed = QuickSweep(queue.context), Counter[str]()

    def listing(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(folder: Any = ".") -> Any:
            listed["folders"] += 1
            return real(folder)

        return call

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, listing(getattr(os, name)))

    def look() -> int:
        clock.advance(60)  # the folders changed long ago
        sweep.run()
        listed.clear()
        sweep.run()
        return listed.total()

    before = look()
    for number in range(20):
        os.makedirs(tmp_path / "topic-root" / f"b{number}" / "c" / ".incoming" / "target")
    assert look() == before
    root.create_topic("a.b" if not underlying else "d").publish(b"x")
    assert look() >= before


def test_publishers_that_were_killed_delay_no_message(
    idle: tuple[Topic, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, audit = idle
    consumers = Path(topic.queue.layout.consumers)
    for number in range(50):
        (consumers / f"distributor-{number:010d}").touch()
    Path(topic.queue.layout.working, "1.csv").touch()
    Path(topic.queue.layout.working, "1.csv").rename(Path(topic.queue.layout.target, "1.csv"))
    tried, dead = [], liveness.dead

    def trying(folder: str, name: str) -> Any:
        tried.append(folder)
        return dead(folder, name)

    monkeypatch.setattr(liveness, "dead", trying)
    with timed(Root(topic.root.path), replace(FRESH, first_upkeep=1000)).queue(audit.name).subscribe() as subscription:
        assert subscription.receive() is not None
    assert str(consumers) not in tried


def test_a_consumer_leaves_a_job_to_its_driver_while_something_moves_in_it(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=SOON)
    committed_job(queue, monkeypatch)
    for _ in range(5):
        clock.advance(sweep.UPKEEP_INTERVAL + 1)
        monkeypatch.setattr("dropq.storage.reading.changed_ms", lambda path, gone=None, now=clock.ms: now - 2000)
        with queue.subscribe() as subscription:
            assert subscription.receive() is None
    assert names_in(queue, "working") == [".job-import-1"]


def test_a_time_of_the_future_keeps_nobody_from_the_upkeep(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON, max_history=1)
    for _ in range(3):
        queue.send(b"a")
        take(queue).ack()
    queue.close()
    later = clock.ms / 1000 + 3 * 86_400
    Path(queue.layout.swept).touch()
    os.utime(queue.layout.swept, (later, later))
    with queue.subscribe() as subscription:
        subscription.receive()
    assert len(names_in(queue, "processed")) == 1


def test_of_a_history_from_which_others_take_meanwhile_no_more_is_removed_than_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=replace(SOON, count_age=-1))  # it is counted again before each
    queue.send_many([b"a"] * 6)
    with queue.subscribe(max_backlog=None) as subscription:
        subscription.ack_many(subscription.receive_many(6))
    oldest = retention._oldest

    def some_go(*args: Any) -> Any:
        found = yield from oldest(*args)
        for file in set(names_in(queue, "processed")) - {one.file for one in found}:
            os.unlink(base(queue) / "processed" / file)
        return found

    monkeypatch.setattr(retention, "_oldest", some_go)
    assert len(list(filter(None, retention.surplus(queue.context, keep_count=2, remove=True)))) == 2
    assert len(names_in(queue, "processed")) == 2


def test_a_working_folder_that_may_not_be_listed_keeps_nobody_from_the_rest_of_the_upkeep(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=SOON, max_history=1)
    for _ in range(3):
        queue.send(b"a")
        take(queue).ack()
    entries = reading.entries

    def refused(folder: str) -> Any:
        if folder == queue.layout.working:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return entries(folder)

    monkeypatch.setattr(reading, "entries", refused)
    report = queue.sweep()
    assert (report.refused, report.pruned) == (1, 2)


def test_a_consumer_drops_a_job_that_nobody_went_on_with_for_a_week(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON)
    job = Job(queue.context, "import-1")
    job.begin()
    job.attempt("p0").write_all(["4.1795332177000000-0000000001.B"], [b"paid"])
    clock.advance(6.9 * 86_400)
    with queue.subscribe() as subscription:
        subscription.receive()
    assert names_in(queue, "working") == [".job-import-1"]
    clock.advance(0.2 * 86_400)
    with queue.subscribe() as subscription:
        subscription.receive()
    assert names_in(queue, "working") == []


@pytest.mark.parametrize(("limit", "kept"), [({"max_history": 3}, 3), ({"history_age": "1h"}, 0)])
def test_a_consumer_keeps_the_history_within_its_limits(
    make: Make, clock: Clock, limit: dict[str, Any], kept: int
) -> None:
    queue = make(timing=SOON, **limit)
    for body in (b"1", b"2", b"3", b"4", b"5"):
        queue.send(body)
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            message.ack()
    assert len(names_in(queue, "processed")) == 5
    clock.advance(7200)
    with queue.subscribe() as subscription:
        subscription.receive()
    assert len(names_in(queue, "processed")) == kept


def test_a_consumer_expires_what_its_filter_leaves_out(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON)
    queue.send(b"a", expires_in="1m")
    clock.advance(120)
    with queue.subscribe(filter="n = 1") as subscription:
        assert subscription.receive() is None
    assert names_in(queue, "target") == []
    assert len(names_in(queue, "expired")) == 1


def test_a_consumer_forgets_acks_that_are_too_old(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON, deferred_ack_expiration="1h")
    queue.ack("1795332177000000-0000000001", defer=True)
    clock.advance(7200)
    with queue.subscribe() as subscription:
        subscription.receive()
    assert list((base(queue) / ".dropq" / "acks").glob("*")) == []


def test_a_consumer_collects_metadata_that_nobody_needs_each_hour(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON, history=False)
    queue.send(b"a", properties={"long": "x" * 200})
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        message.ack()
    meta = Path(queue.root.layout.meta)
    for hours, left in ((25, 1), (0.5, 1), (1, 0)):
        clock.advance(hours * 3600)
        with queue.subscribe() as subscription:
            subscription.receive()
        assert len(list(meta.glob("*.json"))) == left


def unneeded(queue: Queue, count: int = 1) -> None:
    """Leave metadata that nobody needs."""
    for _ in range(count):
        queue.send(b"a", properties={"long": "x" * 200})
    while (message := queue.receive()) is not None:
        message.ack()


def looked_at(queue: Queue, clock: Clock) -> list[int]:
    """Look for metadata as a consumer does; return what each step removed."""
    layout = queue.root.layout
    return list(collect(layout.path, layout.meta, Storage(), clock, again=SIDECAR_PASSES))


def test_metadata_is_collected_in_steps_of_one_file(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON, history=False)
    unneeded(queue, 20)
    for _ in range(30):
        queue.send(b"a")
    clock.advance(25 * 3600)
    assert len(looked_at(queue, clock)) > 50
    clock.advance(2 * 3600)
    steps = looked_at(queue, clock)
    assert (sum(steps), max(steps)) == (20, 1)


def test_metadata_that_cannot_be_collected_is_tried_again_after_an_hour(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON, history=False)
    unneeded(queue)
    (queue.root.path / "away").symlink_to("no-such-disk")
    assert looked_at(queue, clock) != []
    clock.advance(1800)
    assert looked_at(queue, clock) == []
    clock.advance(1900)
    assert looked_at(queue, clock) != []


def test_a_pass_that_seems_to_be_of_the_future_keeps_nobody_from_collecting(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON, history=False)
    unneeded(queue)
    clock.advance(25 * 3600)
    looked_at(queue, clock)
    notes = Path(queue.root.layout.meta) / ".unreferenced"
    [token] = json.loads(notes.read_text())
    ahead = clock.ms + 30 * 86_400_000
    notes.write_text(json.dumps({token: ahead}))
    for removed in (0, 1):
        clock.advance(4000)
        os.utime(notes, ns=(ahead * 1_000_000,) * 2)
        assert sum(looked_at(queue, clock)) == removed


def test_empty_folders_of_the_living_are_cleared_away(make: Make, clock: Clock) -> None:
    queue = make(timing=SOON)
    held = base(queue) / ".dropq" / "held"
    with queue.subscribe() as subscription:
        (held / f"{subscription.id}-1").mkdir(parents=True)
        (held / f"{subscription.id}-2").mkdir()
        (held / f"{subscription.id}-2" / "body").touch()
        queue.sweep()
        assert len(list(held.iterdir())) == 2  # its holder may be about to put something there
        clock.advance(2 * 3600)
        assert queue.sweep().leftovers == 1
        assert [folder.name for folder in held.iterdir()] == [f"{subscription.id}-2"]


# -- by whom, and at what price --------------------------------------------------------------------------------


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *, steps: int = 1, took: float = 0.0) -> Iterator[list[str]]:
    """Count the steps of the upkeep, each of which takes so many seconds on the clock that sweeps ask."""
    done: list[str] = []
    now = time.monotonic()

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now

        @staticmethod
        def advance(seconds: float) -> None:
            nonlocal now
            now += seconds

    def upkeep(context: object, report: SweepReport, **ages: object) -> Iterator[None]:
        for _ in range(steps):
            Time.advance(took)
            done.append("step")
            yield

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_upkeep", upkeep)
        patch.setattr(sweep, "time", Time)
        yield done


def sweeper(queue: Queue) -> QuickSweep:
    return QuickSweep(reopened(queue).context)


def now() -> float:
    return sweep.time.monotonic()  # type: ignore[attr-defined, no-any-return]


def advance(seconds: float) -> None:
    sweep.time.advance(seconds)  # type: ignore[attr-defined]


def a_minute_later(queue: Queue) -> None:
    """Let the last slice of the upkeep be a minute old."""
    swept = base(queue) / ".dropq" / "swept"
    os.utime(swept, (time.time() - 61, time.time() - 61))


def test_one_consumer_does_the_upkeep_once_a_minute(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", timing=EARLY, clock=clock)
    with counted(monkeypatch) as done:
        for consumer in [sweeper(queue) for _ in range(5)]:
            consumer.run()
        assert done == ["step"]
        a_minute_later(queue)
        for consumer in [sweeper(queue) for _ in range(5)]:
            consumer.run()
        assert done == ["step"] * 2


def test_the_upkeep_takes_a_small_share_of_a_consumers_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", timing=EARLY, clock=clock)
    with counted(monkeypatch, steps=100, took=0.06) as done:
        consumer = sweeper(queue)
        began = now()
        while len(done) < 100:
            before = len(done)
            consumer.run()
            assert len(done) - before <= 2  # a slice
            advance(1)
        assert now() - began > 90 * 6


def test_another_consumer_goes_on_where_one_died_in_the_middle_of_the_upkeep(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(tmp_path / "root", timing=EARLY, clock=clock)
    with counted(monkeypatch, steps=5, took=1.0) as done:
        sweeper(queue).run()
        other = sweeper(queue)
        other.run()
        assert len(done) == 1
        a_minute_later(queue)
        advance(61)
        other.run()
        assert len(done) == 2


def test_an_upkeep_that_is_refused_begins_anew_and_keeps_nobody_from_receiving(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make(timing=EARLY, max_history=0)
    queue.send(b"a")

    def refused(*args: object, **ages: object) -> Iterator[None]:
        raise PermissionError(13, "Permission denied")

    with queue.subscribe() as subscription:
        with monkeypatch.context() as patch:
            patch.setattr(sweep, "_upkeep", refused)
            message = subscription.receive()
            assert message is not None
            message.ack()
        assert "was not swept: Permission denied" in caplog.text
    clock.advance(61)
    with queue.subscribe() as subscription:
        subscription.receive()
    assert names_in(queue, "processed") == []


def test_a_history_within_its_limit_is_counted_and_not_looked_at(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=EARLY, max_history=10)
    for _ in range(10):
        queue.send(b"a")
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            message.ack()
    monkeypatch.delattr(retention, "kept_files")  # so that who asks fails
    report = queue.sweep()
    assert (report.pruned, report.refused) == (0, 0)


def test_what_came_back_into_the_history_while_it_is_pruned_stays(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(timing=EARLY, history_age="1h")
    queue.send(b"a")
    message = queue.receive()
    assert message is not None
    message.ack()
    archived = base(queue) / "processed" / message.name
    before = archived.stat().st_ctime_ns // 1_000_000
    clock.advance(7200)
    sorts = sorted

    def come_between(found: object, **how: bool) -> list[object]:
        if not how:  # of subscriptions
            return sorts(found)  # type: ignore[call-overload, no-any-return]
        archived.rename(base(queue) / "target" / message.name)
        while archived.parent.joinpath("../target", message.name).stat().st_ctime_ns // 1_000_000 == before:
            os.utime(base(queue) / "target" / message.name)
        (base(queue) / "target" / message.name).rename(archived)
        return sorts(found, **how)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(retention, "sorted", come_between, raising=False)
        assert queue.sweep().pruned == 0
    assert names_in(queue, "processed") == [message.name]
    assert queue.sweep().pruned == 1


def test_the_more_a_sweep_costs_the_longer_is_the_pause_after_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    now = 100.0

    def costly(*args: object) -> list[int]:
        nonlocal now
        now += 7.0
        return []

    monkeypatch.setattr("dropq.upkeep.sweep.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("dropq.upkeep.steps.claims_in", costly)
    quick = QuickSweep(queue.context)
    quick.run()
    assert quick.again >= 107.0 + 7 * 7.0
