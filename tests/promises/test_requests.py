"""Requests: each requester gets the answer to its own request, and what it was given in is gone when nobody waits."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from children import in_child, killed_at_each_call
from forks import die_after
from helpers import FRESH, Clock, Make, drop, first_and_long, health, make_queue, take, until, where

import dropq
from dropq import Message, NoSuchQueue, Queue, QueueFull, Root, StorageError, aio
from dropq.cli import main as cli
from dropq.diagnosis.fsck import fsck_root
from dropq.format import names
from dropq.lifecycle import ephemeral
from dropq.storage.liveness import Presence
from dropq.upkeep.requests import Requester

#: How long a test waits for an answer that comes.
SOON = 20
MINUTES = 5 * 60


def temporary(root: Root) -> list[str]:
    """What lies in a root of temporary queues, by plain system calls: also what is half made or half removed."""
    return sorted(name for name in os.listdir(root.path) if "temp-" in name)


def answer(request: Message) -> None:
    request.reply(f"re: {request.text}")
    request.ack()


@contextmanager
def responding(queue: Queue, respond: Callable[[Message], object] = answer) -> Iterator[None]:
    """Let a thread with a root object of its own answer what comes."""
    done = threading.Event()

    def serve() -> None:
        with Root(queue.root.path).queue(queue.name).subscribe() as subscription:
            while not done.is_set():
                if (request := subscription.receive(timeout="50ms")) is not None:
                    respond(request)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def left_by_the_dead(queue: Queue) -> str:
    """Let a process die that waits for an answer; return the name of its queue."""
    die_after(lambda: Requester(queue.context, queue.root.queue))
    (name,) = temporary(queue.root)
    return name


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with make_queue(tmp_path / "root") as queue:
        yield queue


# -- the answer --------------------------------------------------------------------------------------------------------


def test_a_request_returns_its_answer_which_is_settled_and_outlives_its_queue(queue: Queue) -> None:
    with responding(queue), queue:
        found = queue.request("how many?", SOON, type="question", properties={"n": 1})
    assert found is not None and temporary(queue.root) == []
    (request,) = queue.browse("processed")
    assert (request.text, request.type, request.properties) == ("how many?", "question", {"n": 1})
    assert (found.text, found.body, found.open().read(), found.size()) == ("re: how many?", *[b"re: how many?"] * 2, 13)
    assert (found.correlation_id, found.message_class, found.held) == (request.id, "T", False)
    assert found.queue.name == request.reply_to
    found.ack()  # changes nothing
    with found:
        pass


def test_the_queue_for_answers_is_named_as_a_temporary_queue_and_is_neither_durable_nor_kept(queue: Queue) -> None:
    with responding(queue):
        found = queue.request("q", SOON)
    assert found is not None
    (name,) = temporary(queue.root)
    assert names.is_temporary(name) and name == found.queue.name
    assert (found.queue.config.durability, found.queue.config.history) == ("none", False)
    assert where(found.queue) == {}


@pytest.mark.parametrize("given", [{"correlation_id": "c-1"}, {"message_id": "m-1"}, {"correlation_id": "c" * 300}])
def test_an_answer_is_told_by_the_id_that_was_given(queue: Queue, given: dict[str, str]) -> None:
    with responding(queue):
        found = queue.request("q", SOON, **given)
    assert found is not None and found.correlation_id in given.values()
    assert temporary(queue.root) == []  # another request may be given the same id


def test_an_answer_of_a_jms_client_has_the_id_as_its_header_has_it(queue: Queue) -> None:
    with responding(queue, lambda request: request.reply("a", correlation_id=f"ID:{request.id}")):
        found = queue.request("q", SOON)
    assert found is not None and found.text == "a"


def test_what_else_comes_to_the_queue_is_dropped_with_a_line_in_the_log(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    def respond(request: Message) -> None:
        request.reply("of another", correlation_id="other", message_id="stray")
        assert request.reply_to is not None
        answers = queue.root.queue(request.reply_to)
        drop(answers, "note.txt", b"of nobody")
        until(lambda: where(answers) == {}, "both to be dropped")
        request.reply("mine")

    with responding(queue, respond):
        found = queue.request("q", SOON)
    assert found is not None and found.text == "mine"
    dropped = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert len(dropped) == 2 and "message stray was dropped: its correlation id is 'other'" in " ".join(dropped)


def test_a_second_answer_is_not_the_answer_to_the_next_request(queue: Queue) -> None:
    def twice(request: Message) -> None:
        request.reply(f"re: {request.text}")
        request.reply("again")
        request.ack()

    with responding(queue, twice):
        found = [queue.request(f"{number}", SOON) for number in range(3)]
    assert [message and message.text for message in found] == ["re: 0", "re: 1", "re: 2"]


def test_twenty_requesters_at_once_get_their_own_answers(queue: Queue) -> None:
    with responding(queue), responding(queue), ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda number: queue.request(f"{number}", SOON), range(100)))
    assert [message and message.text for message in found] == [f"re: {number}" for number in range(100)]
    queue.close()
    assert temporary(queue.root) == []


def test_a_signal_handler_asks_while_its_own_thread_waits_for_an_answer(queue: Queue) -> None:
    found: list[Message | None] = []

    def ask(*_: object) -> None:
        found.append(queue.request("of the handler", SOON))

    def respond(request: Message) -> None:
        if request.text == "of the thread":
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: found, "the answer to the handler")
        answer(request)

    before = signal.signal(signal.SIGUSR1, ask)
    try:
        with responding(queue, respond), responding(queue, respond):
            found.append(queue.request("of the thread", SOON))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [message and message.text for message in found] == ["re: of the handler", "re: of the thread"]


def test_no_default_of_the_root_keeps_an_answer_back(tmp_path: Path) -> None:
    make_queue(tmp_path)
    (tmp_path / "dropq.toml").write_text(
        'format = 1\n[defaults]\nfilter = "n = 1"\nmax_per_subscription_backlog = 1\nbarrier_expression = "TRUE"\n'
    )
    with Root(tmp_path).queue("q") as queue:
        with responding(queue):
            found = queue.request("q", SOON, properties={"n": 1})
        assert found is not None and found.text == "re: q"


def test_who_may_answer_the_request_may_write_into_the_queue_for_answers(tmp_path: Path) -> None:
    with make_queue(tmp_path, file_mode="0660", dir_mode="2770", group=os.getgid()) as queue, responding(queue):
        found = queue.request("q", SOON)
        assert found is not None
        about = os.stat(found.queue.layout.target)
        assert (stat.S_IMODE(about.st_mode), about.st_gid) == (0o2770, os.getgid())
        assert stat.S_IMODE(os.stat(f"{found.queue.layout.private}/ephemeral").st_mode) == 0o660


def test_in_a_dropboxmq_root_the_queue_has_its_layout_and_the_request_its_style(tmp_path: Path) -> None:
    with make_queue(tmp_path, dropboxmq=True) as queue, responding(queue):
        found = queue.request("q", SOON)
        assert found is not None
        assert os.path.basename(found.queue.layout.base) == "incoming"
        (file,) = os.listdir(queue.layout.processed)
        assert file.endswith(f".Q{found.queue.name}")


# -- no answer ---------------------------------------------------------------------------------------------------------


def test_without_an_answer_in_time_there_is_none_and_the_queue_is_gone(queue: Queue) -> None:
    assert queue.request("q", "20ms") is None
    assert temporary(queue.root) == []
    assert where(queue) == {"target": [b"q"]}


def test_an_answer_that_comes_too_late_is_refused_and_told_with_its_correlation(queue: Queue) -> None:
    assert queue.request("q", "20ms", correlation_id="c-7") is None
    request = take(queue)
    with pytest.raises(
        NoSuchQueue,
        match=r"message \S+ of queue q, correlation id 'c-7': its requester's queue temp-.*nothing was sent",
    ):
        request.reply("late")
    assert request.held and temporary(queue.root) == []


@pytest.mark.parametrize(
    ("timeout", "fields", "said"),
    [
        (0, {}, "timeout above 0.*nothing was sent"),
        (-1, {}, "is not a duration"),
        ("soon", {}, "is not a duration"),
        (1, {"reply_to": "answers"}, "reply_to of its own.*nothing was sent"),
        (1, {"priority": 2**40}, "priority"),
        (1, {"message_id": ""}, "message id"),
    ],
)
def test_what_no_request_can_have_is_refused_and_leaves_nothing(
    queue: Queue, timeout: Any, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        queue.request("q", timeout, **fields)
    assert where(queue) == {} and temporary(queue.root) == []


def test_a_request_to_a_missing_queue_is_refused_and_leaves_nothing(queue: Queue) -> None:
    with pytest.raises(NoSuchQueue, match="no queue 'nowhere'"):
        queue.root.queue("nowhere").request("q", SOON)
    assert temporary(queue.root) == []


@pytest.mark.parametrize("overflow", ["reject", "discard"])
def test_a_full_queue_refuses_a_request_also_where_it_discards(make: Make, overflow: str) -> None:
    queue = make(max_unprocessed=1, overflow=overflow)
    queue.send("first")
    with pytest.raises(QueueFull):
        queue.request("second", SOON)
    assert where(queue) == {"target": [b"first"]} and temporary(queue.root) == []


def test_a_request_whose_queue_somebody_removes_says_so(queue: Queue) -> None:
    def remove(request: Message) -> None:
        assert request.reply_to is not None
        queue.root.delete_queue(request.reply_to, force=True)

    with (
        responding(queue, remove),
        pytest.raises(NoSuchQueue, match="the request was sent, and its answer cannot come"),
    ):
        queue.request("q", "2s")
    assert temporary(queue.root) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("no")])
def test_an_exception_and_an_interrupt_leave_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def raising(*_: object) -> None:
        raise error

    monkeypatch.setattr(dropq.Subscription, "_receive", raising)
    with pytest.raises(type(error)):
        queue.request("q", SOON)
    assert temporary(queue.root) == []


def test_a_queue_for_answers_that_cannot_be_subscribed_to_goes_again_and_nothing_is_sent(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise StorageError("no")

    monkeypatch.setattr("dropq.upkeep.requests.Subscription", refused)
    with pytest.raises(StorageError):
        queue.request("q", SOON)
    assert temporary(queue.root) == [] and where(queue) == {}


# -- what is kept for the next request ---------------------------------------------------------------------------------


def test_the_queue_is_kept_for_the_next_request_until_the_object_is_closed(queue: Queue) -> None:
    with responding(queue):
        found = [queue.request("q", SOON) for _ in range(3)]
        assert len({message and message.queue.name for message in found}) == 1
        queue.close()
        assert temporary(queue.root) == []
        assert queue.request("after a close", SOON) is not None


def test_a_kept_queue_that_somebody_removed_is_made_again(queue: Queue) -> None:
    with responding(queue):
        assert queue.request("q", SOON) is not None
        (first,) = temporary(queue.root)
        queue.root.delete_queue(first, force=True)
        assert queue.request("q", SOON) is not None
    assert temporary(queue.root) != [first]


def test_what_is_kept_goes_with_the_queue_object(queue: Queue) -> None:
    with responding(queue):
        other = queue.root.queue("q")
        assert other.request("q", SOON) is not None
    assert len(temporary(queue.root)) == 1
    del other
    gc.collect()
    assert temporary(queue.root) == []


def test_what_is_kept_goes_with_the_program(queue: Queue) -> None:
    program = "import sys, dropq; assert dropq.Root(sys.argv[1]).queue('q').request('q', 20); print('answered')"
    with responding(queue):
        ran = subprocess.run([sys.executable, "-c", program, str(queue.root.path)], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("answered\n", "")
    assert temporary(queue.root) == []


def test_a_forked_child_asks_by_itself_and_leaves_what_its_parent_has(queue: Queue) -> None:
    def ask() -> str:
        found = queue.request("of the child", SOON)
        queue.close()
        assert found is not None
        return found.queue.name

    with responding(queue):
        first = queue.request("q", SOON)
        name = in_child(ask)
        assert first is not None and temporary(queue.root) == [first.queue.name] != [name]
        again = queue.request("q", SOON)
        assert again is not None and again.queue.name == first.queue.name


# -- what is left, and who removes it ----------------------------------------------------------------------------------


def sweep(queue: Queue) -> int:
    return queue.root.sweep().ephemeral


def tidy(queue: Queue) -> int:
    return queue.root.tidy().ephemeral


@pytest.mark.parametrize("by", [sweep, tidy])
def test_what_a_killed_requester_leaves_is_removed_by_a_sweep(queue: Queue, by: Callable[[Queue], int]) -> None:
    left = left_by_the_dead(queue)
    drop(queue.root.queue(left), "answer", b"nobody waits for it")
    assert by(queue) == 1
    assert temporary(queue.root) == []
    assert by(queue) == 0


def test_the_upkeep_of_any_consumer_removes_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=FRESH)
    left_by_the_dead(queue)
    with queue.subscribe() as subscription:
        subscription._sweep._upkeep_at = 0  # type: ignore[attr-defined]
        subscription.receive()
    assert temporary(queue.root) == []


def test_no_sweep_takes_what_its_requester_holds_however_old_it_is(make: Make, clock: Clock) -> None:
    queue = make()
    with responding(queue):
        assert queue.request("q", SOON) is not None
    kept = temporary(queue.root)
    clock.advance(1e6)
    assert in_child(lambda: dropq.Root(queue.root.path, clock=clock).sweep(ephemeral_older_than=0).ephemeral) == 0
    assert queue.root.queue(kept[0]).sweep(ephemeral_older_than=0).ephemeral == 0
    assert temporary(queue.root) == kept
    queue.close()


def unlock(queue: Queue, name: str) -> None:
    """Let a queue be one whose holder has another mount's lock."""
    marker = queue.root.path / name / ".dropq" / "ephemeral"
    marker.write_bytes(b"of another mount\n")


def test_where_locks_tell_nothing_only_the_age_does(make: Make, clock: Clock) -> None:
    queue = make()
    left = left_by_the_dead(queue)
    unlock(queue, left)
    clock.advance(MINUTES)
    assert queue.root.sweep().ephemeral == 0
    assert queue.root.sweep(ephemeral_older_than="6m").ephemeral == 0
    assert queue.root.sweep(ephemeral_older_than="4m").ephemeral == 1
    assert temporary(queue.root) == []


def test_a_requester_on_a_file_system_without_locks_is_not_taken_for_dead(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    monkeypatch.setattr(Presence, "_make", lambda self: [])
    with responding(queue):
        assert queue.request("q", SOON) is not None
        (kept,) = temporary(queue.root)
        clock.advance(MINUTES)
        assert queue.root.sweep().ephemeral == 0 and temporary(queue.root) == [kept]
        assert queue.root.sweep(ephemeral_older_than="1m").ephemeral == 1
        assert queue.request("q", SOON) is not None  # its queue is made again


def test_a_requester_touches_its_queue_with_each_request_and_while_it_waits(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []
    touch = ephemeral.touch

    def recorded(layout: Any, storage: Any) -> bool:
        touched.append(layout.home)
        return touch(layout, storage)

    monkeypatch.setattr(ephemeral, "touch", recorded)
    monkeypatch.setattr(ephemeral, "TOUCH_INTERVAL", 0.01)

    def slow(request: Message) -> None:
        until(lambda: len(touched) > 3, "touches")
        answer(request)

    with responding(queue, slow):
        assert queue.request("q", SOON) is not None


def test_a_queue_that_is_being_made_is_held_before_it_has_its_name(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    move_folder = dropq.storage.files.Storage.move_folder

    def swept(self: Any, source: str, destination: str) -> None:
        move_folder(self, source, destination)
        seen.append(in_child(lambda: Root(queue.root.path).sweep(ephemeral_older_than=0).ephemeral))

    monkeypatch.setattr(dropq.storage.files.Storage, "move_folder", swept)
    with responding(queue):
        assert queue.request("q", SOON) is not None
    assert seen == [0]


def test_a_queue_of_that_name_which_nobody_made_for_answers_is_left_alone(make: Make, clock: Clock) -> None:
    queue = make()
    queue.root.create_queue("temp-1795248503411000-1501319413")
    queue.root.create_queue("temp-of-mine")
    clock.advance(1e6)
    assert queue.root.sweep(ephemeral_older_than=0).ephemeral == 0
    assert len(temporary(queue.root)) == 2


def test_a_sweep_follows_no_link_that_a_stranger_planted(queue: Queue) -> None:
    queue.send("stays")
    name = "temp-1795248503411000-1501319413"
    for folder in (f".{name}.deleted-1-a", f".{name}.creating-0", name):
        (queue.root.path / folder).mkdir()
        (queue.root.path / folder / "target").symlink_to(queue.layout.target)
    (queue.root.path / f".{name}.deleted-2-a").symlink_to(queue.layout.home)
    queue.root.tidy()
    assert where(queue) == {"target": [b"stays"]}
    assert not (queue.root.path / f".{name}.deleted-1-a").exists()


def test_what_a_send_that_was_half_way_puts_there_goes_too(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tree, came = dropq.storage.files.Storage.remove_tree, list[str]()

    def late(self: Any, path: str) -> None:
        if not came:
            came.append(path)
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove_tree(self, path)

    monkeypatch.setattr(dropq.storage.files.Storage, "remove_tree", late)
    assert queue.request("q", "1ms") is None
    assert came and temporary(queue.root) == []


def test_a_sweep_of_the_queue_itself_removes_it_too(queue: Queue) -> None:
    left = left_by_the_dead(queue)
    assert queue.root.queue(left).sweep().ephemeral == 1
    assert temporary(queue.root) == []


def test_a_sweep_passes_over_a_temporary_queue_that_is_gone_since_it_was_listed(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Queue(queue.root, "temp-1795248503411000-1501319413")
    monkeypatch.setattr(Root, "queues", lambda self: [gone, queue])
    assert queue.root.sweep().refused == 0


def test_of_a_temporary_queue_no_note_is_kept_also_where_an_answer_has_a_long_name(make: Make, clock: Clock) -> None:
    queue = make()
    with responding(queue, lambda request: request.reply("a", properties={"long": "x" * 300})):
        found = queue.request("q", SOON)
        assert found is not None and found.properties["long"] == "x" * 300
    queue.root.sweep()
    notes = [path.read_bytes() for path in Path(queue.root.layout.queues).iterdir()]
    assert notes and not any(b"temp-" in note for note in notes)
    queue.close()
    for _ in range(2):
        clock.advance(2 * 86_400)
        queue.root.sweep()
    assert [name for name in os.listdir(queue.root.layout.meta) if name.endswith(".json")] == []  # was collected
    assert not any(finding.open for finding in fsck_root(queue.root.context))


def test_a_temporary_queue_is_shown_as_any_and_healthy_alone(queue: Queue) -> None:
    left = left_by_the_dead(queue)
    assert left in [each.name for each in queue.root.queues()]
    assert health(queue.root.queue(left)).healthy
    assert [finding.kind for finding in fsck_root(queue.root.context)] == ["left-queue"]
    assert queue.root.queue(left).fsck() == []


def test_a_temporary_queue_that_goes_while_health_looks_is_not_unhealthy(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_the_dead(queue)

    def opening(root: Any, name: str) -> None:
        queue.root.sweep()
        raise StorageError("it lacks its folder target/")

    monkeypatch.setattr("dropq.diagnosis.health.open_queue", opening)
    assert [each.queue for each in queue.root.health()] == ["q"]


def test_doctor_leaves_temporary_queues_alone_unless_one_is_named(queue: Queue) -> None:
    left = left_by_the_dead(queue)
    paths = [found.path for found in queue.root.doctor()]
    assert paths and not any(left in path for path in paths)
    assert queue.root.doctor([left])


@pytest.mark.parametrize("answered", first_and_long([True, False]))
@pytest.mark.crashes
def test_a_requester_that_dies_at_any_call_leaves_at_most_what_a_sweep_removes(tmp_path: Path, answered: bool) -> None:
    clock = Clock()
    roots = iter(range(10_000))

    def build() -> Queue:
        queue = make_queue(tmp_path / f"{next(roots)}", clock=clock)
        _ = queue.context
        return queue

    def act(queue: Queue) -> None:
        send = queue.send

        def send_and_answer(**fields: Any) -> dropq.Sent:
            sent = send("q", **fields)
            queue.root.queue(fields["reply_to"]).send("a", correlation_id=sent.id)
            return sent

        with queue:
            found = queue._request(send_and_answer if answered else partial(send, "q"), SOON if answered else "1ms", {})
            assert (found is not None) == answered

    left = set()
    for queue in killed_at_each_call(build, act):
        root = Root(queue.root.path, clock=clock)
        left |= {"hidden" if name.startswith(".") else "there" for name in temporary(root)}
        assert where(queue) in ({}, {"target": [b"q"]}, {"working": [b"q"]}, {"working": [b""]})
        clock.advance(MINUTES)
        root.sweep()
        assert temporary(root) == []
    assert left == {"hidden", "there"} and next(roots) > 60


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_tasks_await_their_answers(queue: Queue) -> None:
    async def ask() -> list[str]:
        async with aio.Queue(queue) as asked:
            found = await asyncio.gather(*(asked.request(f"{number}", SOON) for number in range(10)))
            return [await message.text() for message in found if message is not None]

    with responding(queue):
        assert asyncio.run(ask()) == [f"re: {number}" for number in range(10)]
    assert temporary(queue.root) == []


def test_a_task_without_an_answer_in_time_gets_none(queue: Queue) -> None:
    assert asyncio.run(aio.Queue(queue).request("q", "20ms")) is None


def test_a_cancelled_request_holds_nothing_when_the_cancellation_arrives(queue: Queue) -> None:
    async def ask() -> list[str]:
        asked = aio.Queue(queue)
        task = asyncio.create_task(asked.request("q", None))
        await asyncio.to_thread(until, lambda: where(queue), "the request")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        return temporary(queue.root)

    assert asyncio.run(ask()) == []
    with pytest.raises(NoSuchQueue):
        take(queue).reply("late")


def test_requests_that_are_cancelled_at_any_moment_leave_nothing(queue: Queue) -> None:
    async def ask() -> int:
        answered = 0
        async with aio.Queue(queue) as asked:
            for step in range(60):
                tasks = [asyncio.create_task(asked.request(f"{step} {number}", SOON)) for number in range(3)]
                await asyncio.sleep(random.random() / 50)
                for task in tasks[1:]:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(one, aio.Message | asyncio.CancelledError) for one in ended), ended
                answered += sum(isinstance(one, aio.Message) for one in ended)
        return answered

    def respond(request: Message) -> None:
        with suppress(NoSuchQueue):
            request.reply("a")
        request.ack()

    with responding(queue, respond):
        assert asyncio.run(ask()) >= 60
    assert temporary(queue.root) == []


def test_a_request_that_is_cancelled_before_its_turn_is_not_sent(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        asked = aio.Queue(queue)
        first = asyncio.create_task(asked.request("first", None))
        await asyncio.to_thread(until, lambda: where(queue), "the request")
        second = asyncio.create_task(asked.request("second", None))
        await asyncio.sleep(0)
        for task in (second, first):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()

    monkeypatch.setattr(aio, "REQUESTS", 1)
    asyncio.run(ask())
    assert where(queue) == {"target": [b"first"]} and temporary(queue.root) == []


# -- the command -------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, root: Path, *argv: str, stdin: bytes = b"") -> int:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return cli.main(["--root", str(root), *argv])


def test_the_command_prints_the_body_of_the_answer_and_tells_the_id_on_stderr(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with responding(queue, lambda request: request.reply(b"\0 bytes, as they are")):
        assert run(monkeypatch, queue.root.path, "send", "q", "--wait-reply", "20s", "-p", "n:I=3", stdin=b"?") == 0
    (request,) = [*queue.browse("target"), *queue.browse("processing")]
    printed = capfdbinary.readouterr()
    assert (printed.out, printed.err) == (b"\0 bytes, as they are", f"sent {request.id}\n".encode())
    assert (request.body, request.properties, temporary(queue.root)) == (b"?", {"n": 3}, [])


def test_the_command_sends_a_file_and_has_both_in_json(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "question").write_text("file")
    argv = ("send", "q", str(tmp_path / "question"), "--move", "--correlation-id", "c", "--wait-reply", "20s", "--json")
    with responding(queue):
        assert run(monkeypatch, queue.root.path, *argv) == 0
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert (shown["accepted"], shown["delivered_to"], shown["reply"]["body"]) == (True, "q", "re: file")
    assert (shown["reply"]["correlation_id"], printed.err) == ("c", "")
    assert not (tmp_path / "question").exists()


def test_the_command_exits_with_75_when_no_answer_came_in_time(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, queue.root.path, "send", "q", "--wait-reply", "20ms") == 75
    (request,) = queue.browse()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"sent {request.id}\n" in printed.err and f"no answer to message {request.id} came in time" in printed.err
    assert run(monkeypatch, queue.root.path, "send", "q", "--wait-reply", "20ms", "--json") == 75
    assert json.loads(capsys.readouterr().out)["reply"] is None
    assert temporary(queue.root) == []


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--wait-reply", "0"), 2, "nothing was sent"),
        (("--wait-reply", "1s", "--lines"), 2, "sends one message"),
        (("--wait-reply", "1s", "--reply-to", "q"), 2, "no --reply-to"),
        (("--wait-reply", "1s", "one", "two"), 2, "sends one message"),
        (("--wait-reply", "1s", "--id", ""), 2, "nothing was sent"),
        (("--wait-reply", "1s", "missing-file"), 66, "missing-file"),
    ],
)
def test_the_command_refuses_what_no_request_can_have(
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert run(monkeypatch, queue.root.path, "send", "q", *argv) == code
    assert said in capsys.readouterr().err
    assert where(queue) == {} and temporary(queue.root) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_command_and_leaves_nothing(queue: Queue, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dropq", "--root", str(queue.root.path), "send", "q", "--wait-reply", "1h"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr is not None and child.stderr.readline().startswith(b"sent ")  # it waits from here on
    child.send_signal(number)
    out, err = child.communicate()
    assert (child.returncode, out) == (130 if number == signal.SIGINT else -number, b"")
    assert (b"was sent, and no answer is awaited" in err) == (number == signal.SIGINT)
    assert temporary(queue.root) == []


def test_the_command_sweep_removes_what_is_left_and_by_age_where_locks_tell_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_by_the_dead(queue)
    assert run(monkeypatch, queue.root.path, "sweep") == 0
    assert "ephemeral\t1\n" in capsys.readouterr().out
    unlock(queue, left_by_the_dead(queue))
    assert run(monkeypatch, queue.root.path, "sweep") == 0
    assert "ephemeral" not in capsys.readouterr().out
    assert run(monkeypatch, queue.root.path, "sweep", "--ephemeral-older-than", "0") == 0
    assert "ephemeral\t1\n" in capsys.readouterr().out
    assert temporary(queue.root) == []


def test_a_command_on_all_queues_passes_over_a_temporary_queue_that_is_gone_since_it_was_listed(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = "temp-1795248503411000-1501319413"
    monkeypatch.setattr(Root, "queues", lambda self: [Queue(self, gone), Queue(self, "q")])
    for command in ("ls", "sweep"):
        assert run(monkeypatch, queue.root.path, command) == 0
        assert run(monkeypatch, queue.root.path, command, gone) == 66
