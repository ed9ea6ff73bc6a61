"""A queue with `self_destruct` goes once its last selector and its last named subscription are gone.

What came under a credit returns to its source, the rest goes to the dead letters, or stays on disk. The service-lookup
test: a client sends to the queue of a service that is not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from children import in_child, killed_at_each_call
from filelock import FileLock
from forks import DIED, forked
from helpers import FRESH, Clock, drop, first_and_long, names_in, private, take, timed, until, where

from dropq import ConfigError, NoSuchQueue, Queue, Root, Unavailable
from dropq.diagnosis.fsck import fsck_root
from dropq.lifecycle import named
from dropq.lifecycle.credits import spent
from dropq.staging import jobs
from dropq.staging.jobs import Job
from dropq.storage.files import Storage
from dropq.upkeep import reassembly, self_destruct

#: The options of the queue of a service.
SERVICE: dict[str, Any] = {"self_destruct": True, "durability": "none", "redelivery_delay": 0}


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    """A root with a dead-letter queue for all, `letters`."""
    return make_root(tmp_path / "root", clock)


@pytest.fixture(autouse=True)
def alone_since(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file that says since when a queue is alone have the time of the test's clock."""
    touch = Storage.touch

    def touched(self: Storage, path: str) -> None:
        is_new = path.endswith("/alone") and not os.path.exists(path)
        touch(self, path)
        if is_new:
            os.utime(path, ns=(clock.ms * 1_000_000, clock.ms * 1_000_000))

    monkeypatch.setattr(Storage, "touch", touched)


def make_root(path: Path, clock: Clock | None = None) -> Root:
    path.mkdir()
    (path / "dropq.toml").write_text('format = 1\ndead_letter_queue = "letters"\n[defaults]\ndurability = "none"\n')
    root = timed(Root.create(path, clock=clock), FRESH)
    root.create_queue("letters")
    return root


def served(root: Root, name: str = "service", **options: Any) -> Queue:
    """Make a queue that a named subscription has come to, and left."""
    queue = root.create_queue(name, **{**SERVICE, **options})
    with queue.subscribe(client_id="worker", named=True):
        pass
    return queue


def sweep_twice(root: Root, clock: Clock, seconds: float = 61) -> None:
    """Sweep, and once more when a queue that was found alone is to go."""
    root.sweep()
    clock.advance(seconds)
    root.sweep()


def there(root: Root) -> list[str]:
    return sorted(name for name in os.listdir(root.path) if name not in (".dropq", "dropq.toml"))


def letters(root: Root) -> list[tuple[bytes, str | None, str | None]]:
    found = root.queue("letters").browse()
    return [(letter.body, letter.origin, letter.dead_letter_reason) for letter in found]


# -- when it goes, and when it stays -----------------------------------------------------------------------------------


def test_a_queue_goes_when_its_last_named_subscription_is_gone_for_long_enough(root: Root, clock: Clock) -> None:
    queue = served(root)
    root.sweep()
    assert private(queue, "named") == ["worker"] and Path(queue.layout.alone).exists()
    clock.advance(58)
    root.sweep()
    assert queue.exists()
    clock.advance(3)
    assert root.sweep().destroyed == 1
    assert there(root) == ["letters"] and os.listdir(root.layout.queues) == [
        name for name in os.listdir(root.queue("letters").layout.private) if name.startswith("queue-")
    ]


def test_a_queue_goes_when_its_last_selector_is_removed_for_long_enough(root: Root, clock: Clock) -> None:
    queue = root.create_queue("q", **SERVICE)
    queue.add_selector("out", to="letters")
    sweep_twice(root, clock)
    assert queue.exists() and not Path(queue.layout.alone).exists()
    queue.remove_selector("out")
    sweep_twice(root, clock)
    assert there(root) == ["letters"]


def test_a_selector_that_a_script_adds_and_removes_counts_as_any(root: Root, clock: Clock) -> None:
    queue = root.create_queue("q", **SERVICE)
    Path(queue.layout.selectors).mkdir()
    file = Path(queue.layout.selectors, "out.toml")
    file.write_text('to = "letters"\n')
    sweep_twice(root, clock)
    file.unlink()
    sweep_twice(root, clock)
    assert there(root) == ["letters"]


@pytest.mark.parametrize("seen", ["nothing", "an unnamed subscription", "a folder for selectors"])
def test_a_queue_that_never_had_one_stays(root: Root, clock: Clock, seen: str) -> None:
    queue = root.create_queue("q", **SERVICE)
    if seen == "an unnamed subscription":
        with queue.subscribe(client_id="worker"):
            pass
    elif seen == "a folder for selectors":
        os.mkdir(queue.layout.selectors)
    sweep_twice(root, clock)
    clock.advance(86_400)
    root.sweep()
    assert queue.exists() and not Path(queue.layout.alone).exists()


def test_a_queue_without_self_destruct_stays(root: Root, clock: Clock) -> None:
    queue = served(root, self_destruct=False)
    sweep_twice(root, clock)
    assert queue.exists() and not Path(queue.layout.alone).exists()


def test_a_queue_stays_whose_file_says_no_by_the_time(root: Root, clock: Clock) -> None:
    queue = served(root)
    queue.sweep()
    clock.advance(61)
    Path(queue.layout.config_file).write_text("self_destruct = false\n")
    assert queue.config.self_destruct and queue.sweep().destroyed == 0
    assert queue.exists()


def test_the_period_is_the_queues_own(root: Root, clock: Clock) -> None:
    queue = served(root, self_destruct_after="1h")
    sweep_twice(root, clock, 3590)
    assert queue.exists()
    clock.advance(20)
    root.sweep()
    assert not queue.exists()


def test_a_named_subscription_that_comes_back_in_time_keeps_the_queue(root: Root, clock: Clock) -> None:
    queue = served(root)
    for _ in range(3):
        root.sweep()
        clock.advance(50)
        with queue.subscribe(client_id="worker", named=True):
            assert not Path(queue.layout.alone).exists()
            clock.advance(100)
            root.sweep()
    assert queue.exists()


def test_any_living_subscription_of_a_named_client_keeps_the_queue(root: Root, clock: Clock) -> None:
    queue = root.create_queue("q", **SERVICE)
    first = queue.subscribe(client_id="worker", named=True)
    with queue.subscribe(client_id="worker", named=True):
        pass
    sweep_twice(root, clock)
    assert queue.exists()
    first.close()
    sweep_twice(root, clock)
    assert not queue.exists()


def test_a_named_subscription_that_is_killed_is_gone(root: Root, clock: Clock) -> None:
    queue = root.create_queue("q", **SERVICE)
    in_child(lambda: queue.subscribe(client_id="worker", named=True) and None)
    assert private(queue, "consumers") != []
    sweep_twice(root, clock)
    assert not queue.exists()


def test_where_no_lock_shows_life_a_named_client_counts_as_alive(root: Root, clock: Clock) -> None:
    queue = served(root)
    named.note_unlocked(queue.context, "worker")
    sweep_twice(root, clock)
    assert queue.exists()
    Path(queue.layout.named, "worker").unlink()
    sweep_twice(root, clock)
    assert not queue.exists()


@pytest.mark.parametrize("holder", ["a consumer", "a script"])
def test_a_queue_with_a_message_in_processing_stays_until_it_is_settled(root: Root, clock: Clock, holder: str) -> None:
    queue = served(root)
    queue.send(b"a")
    if holder == "a consumer":
        message = take(queue)
    else:
        (file,) = names_in(queue, "target")
        Path(queue.layout.target, file).rename(held := Path(queue.layout.processing, file))
    sweep_twice(root, clock)
    clock.advance(86_400)
    root.sweep()
    assert where(queue) == {"processing": [b"a"]}
    if holder == "a consumer":
        message.ack()
    else:
        held.rename(Path(queue.layout.processed, held.name))
    root.sweep()
    assert there(root) == ["letters"] and letters(root) == []


def test_a_queue_stays_while_a_message_is_on_its_way_to_another_file_system(root: Root, clock: Clock) -> None:
    queue = served(root)
    queue.send(b"a")
    (file,) = names_in(queue, "target")
    given = Path(queue.layout.transfers, "row", "target")
    given.mkdir(parents=True)
    Path(queue.layout.target, file).rename(given / file)
    sweep_twice(root, clock)
    assert (given / file).read_bytes() == b"a"
    (given / file).unlink()
    root.sweep()
    assert not queue.exists()


def test_a_consumer_of_another_queue_goes_on_with_a_destruction_that_was_cut_short(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*args: object) -> None:
        raise Killed

    queue = served(root)
    queue.send(b"a")
    other = root.create_queue("other")
    root.sweep()
    clock.advance(61)
    with monkeypatch.context() as broken:
        broken.setattr(self_destruct, "_closed", killed)
        with pytest.raises(Killed):
            root.sweep()
    assert not queue.exists()
    clock.advance(3600)
    consumer = timed(Root(root.path, clock=clock), replace(FRESH, first_upkeep=0))
    assert consumer.queue(other.name).receive(timeout=0) is None
    assert there(root) == ["letters", "other"]
    assert letters(root) == [(b"a", "service", "self_destruct")]


def test_a_queue_whose_credits_are_out_stays_until_their_messages_are_settled(root: Root, clock: Clock) -> None:
    queue, further = root.create_queue("q", **SERVICE), root.create_queue("further")
    queue.add_selector("out", to="further")
    queue.send(b"a")
    queue.route()
    os.unlink(Path(queue.layout.selectors, "out.toml"))
    sweep_twice(root, clock)
    assert queue.exists()
    take(further).ack()
    sweep_twice(root, clock)
    assert not queue.exists()


def test_a_consumer_of_another_queue_destroys_a_queue_in_its_upkeep(tmp_path: Path, clock: Clock) -> None:
    root = make_root(tmp_path / "root", clock)
    queue = served(root)
    queue.send(b"a")
    queue.sweep()
    clock.advance(61)
    with root.queue("letters").subscribe() as subscription:
        sweep: Any = subscription._sweep
        sweep._upkeep_at = 0.0
        message = subscription.receive(timeout=0)
        until(lambda: not queue.exists(), "the queue to go")
        message = message or subscription.receive(timeout="5s")
        assert message is not None and (message.body, message.origin) == (b"a", "service")


# -- what becomes of its messages --------------------------------------------------------------------------------------


def test_what_waits_goes_to_the_dead_letters(root: Root, clock: Clock) -> None:
    queue = served(root)
    queue.send(b"a", priority=7)
    queue.send(b"later", delay="1h")
    drop(queue, "by hand.txt", b"foreign")
    take(queue).ack()
    sweep_twice(root, clock)
    assert there(root) == ["letters"]
    assert sorted(letters(root)) == [(b"foreign", "service", "self_destruct"), (b"later", "service", "self_destruct")]


def test_what_came_under_a_credit_returns_to_its_source(root: Root, clock: Clock) -> None:
    source, first = root.create_queue("source"), root.create_queue("first")
    service = served(root)
    source.add_selector("a", to="first")
    first.add_selector("b", to="service")
    for _ in range(2):
        source.send(b"carried")
    source.route()
    first.route()
    service.send(b"own")
    assert sorted(where(service)["target"]) == [b"carried", b"own"]
    sweep_twice(root, clock)
    assert where(first) == {"target": [b"carried"]} and where(source) == {"target": [b"carried"]}
    assert letters(root) == [(b"own", "service", "self_destruct")]
    (a,), (b,) = source.selectors(), first.selectors()
    assert len(spent(source.layout, a.token)) == 1, "its message is in the first queue"
    assert spent(first.layout, b.token) == []
    take(first).ack()
    assert spent(source.layout, a.token) == []


def test_a_message_whose_credit_is_a_strangers_is_a_dead_letter(root: Root, clock: Clock) -> None:
    source, service = root.create_queue("source"), served(root)
    source.add_selector("a", to="service")
    source.send(b"real")
    source.route()
    (file,) = names_in(service, "target")
    forged = re.sub(r"^4\.[0-9-]+", "4.1700000000000000-0000000000", file)
    drop(service, forged, b"forged")
    sweep_twice(root, clock)
    assert where(source) == {"target": [b"real"]}
    assert letters(root) == [(b"forged", "service", "self_destruct")]


def test_what_has_nowhere_to_go_stays_on_disk_and_comes_back_by_a_rename(root: Root, clock: Clock) -> None:
    root.delete_queue("letters")
    queue = served(root)
    queue.send(b"a")
    sweep_twice(root, clock)
    (kept,) = there(root)
    assert re.fullmatch(r"service\.deleted-[0-9]{13}", kept)
    assert {finding.kind for finding in fsck_root(root.context)} == {"deleted-queue", "absent-letters"}
    with pytest.raises(NoSuchQueue):
        root.queue("service").send(b"b")
    Path(root.path, kept).rename(queue.layout.home)
    root.sweep()
    assert root.queue("service").counts()["target"] == 1, "it has its time again"
    with root.queue("service").subscribe(client_id="worker", named=True) as subscription:
        message = subscription.receive()
        assert message is not None and message.body == b"a"
        message.ack()


@pytest.mark.parametrize("left", ["error", "routing", "no message"])
def test_a_queue_with_what_is_no_dead_letter_is_kept_as_a_folder(root: Root, clock: Clock, left: str) -> None:
    queue = served(root)
    queue.send(b"a")
    if left == "error":
        take(queue).reject("wrong")
    elif left == "routing":
        os.mkdir(f"{queue.layout.routing}/audit")
        (file,) = names_in(queue, "target")
        os.rename(f"{queue.layout.target}/{file}", f"{queue.layout.routing}/audit/{file}")
    else:
        os.mkdir(f"{queue.layout.target}/folder")
    sweep_twice(root, clock)
    (kept,) = (name for name in there(root) if name != "letters")
    assert kept.startswith("service.deleted-")
    assert letters(root) == ([(b"a", "service", "self_destruct")] if left == "no message" else [])
    if left == "error":
        assert [path.read_bytes() for path in Path(root.path, kept, "error").iterdir()] == [b"a"]


def test_a_job_that_was_committed_is_sent_first(root: Root, clock: Clock) -> None:
    queue = served(root)
    root.sweep()
    clock.advance(61)
    committed_job(queue, b"row")
    root.sweep()
    assert there(root) == ["letters"] and letters(root) == [(b"row", "service", "self_destruct")]


def committed_job(queue: Queue, row: bytes) -> None:
    """Commit a job of one message, whose driver dies before it sends the message."""
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all([f"4.{queue.root.context.ids.next()}.B"], [row])
    staged = [attempt.finish()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "finish", dies)
        with pytest.raises(KeyboardInterrupt):
            job.commit(staged)


def parts_in_error(root: Root) -> Queue:
    """Make a queue whose error/ has three parts of a bundle, and nowhere to send them."""
    root.delete_queue("letters")
    queue = served(root, history=False)
    queue.send("a\nb\nc\n", type="text")
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            record.reject("bad")
    assert queue.counts()["error"] == 3
    return queue


def test_parts_that_a_dead_process_put_together_are_kept_with_the_queue(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = parts_in_error(root)
    with monkeypatch.context() as patch:
        patch.setattr(reassembly, "_write", lambda *_: os._exit(DIED))
        assert forked(lambda: list(queue.requeue(state="error", whole=True))) == DIED
    assert queue.counts()["error"] == 0
    sweep_twice(root, clock)
    (kept,) = (name for name in there(root) if name.startswith("service.deleted-"))
    assert len(os.listdir(root.path / kept / "error")) == 3


def test_a_queue_stays_while_its_parts_are_put_together(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, write = parts_in_error(root), reassembly._write

    def meanwhile(*given: Any) -> None:
        sweep_twice(root, clock)
        with pytest.raises(Unavailable, match="are being put together: try again; nothing was removed"):
            root.delete_queue("service")
        write(*given)

    monkeypatch.setattr(reassembly, "_write", meanwhile)
    assert [done.ok for done in queue.requeue(state="error", whole=True)] == [True]
    assert where(queue) == {"target": [b"a\nb\nc\n"]}


def test_what_is_no_reassembly_keeps_no_queue_from_going(root: Root, clock: Clock) -> None:
    queue = served(root)
    for path in (f"{queue.layout.reassembly}/x", f"{queue.layout.joining}/0123456789abcdef"):
        os.makedirs(path)
    sweep_twice(root, clock)
    assert there(root) == ["letters"]


def dies(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("dropboxmq", [False, True])
def test_a_queue_of_any_layout_and_with_a_long_name_goes(root: Root, clock: Clock, dropboxmq: bool) -> None:
    queue = root.create_queue("q" * 230, dropboxmq=dropboxmq, **SERVICE)
    with queue.subscribe(client_id="worker", named=True):
        queue.send(b"a")
    sweep_twice(root, clock)
    assert there(root) == ["letters"] and letters(root) == [(b"a", "q" * 230, "self_destruct")]


# -- races -------------------------------------------------------------------------------------------------------------


def at_the_rename(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something between the last look at a queue and the rename that hides it, once."""
    rename_folder = Storage.rename_folder
    done: list[bool] = []

    def after(self: Storage, source: str, destination: str) -> None:
        if not done:
            done.append(True)
            act()
        rename_folder(self, source, destination)

    monkeypatch.setattr(Storage, "rename_folder", after)


@pytest.mark.parametrize("comes", ["a named subscription", "a selector", "a claim", "a job"])
def test_what_comes_just_before_the_rename_brings_the_queue_back(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    queue = served(root)
    queue.send(b"a")
    root.sweep()
    clock.advance(61)
    held: list[Any] = []
    acts = {
        "a named subscription": lambda: held.append(queue.subscribe(client_id="worker", named=True)),
        "a selector": lambda: queue.add_selector("out", to="letters"),
        "a claim": lambda: held.append(take(queue)),
        "a job": lambda: committed_job(queue, b"row"),
    }
    at_the_rename(monkeypatch, acts[comes])
    root.sweep()
    assert queue.exists() and letters(root) == []
    assert where(queue) == {"processing" if comes == "a claim" else "target": [b"a"]}
    if comes == "a claim":
        held[0].ack()
        root.sweep()
        assert there(root) == ["letters"] and letters(root) == []
    elif comes == "a job":
        root.sweep()
        assert there(root) == ["letters"] and [body for body, _, _ in letters(root)] == [b"a", b"row"]


def test_a_subscription_that_begins_as_its_queue_goes_leaves_no_folder_in_its_place(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = served(root)
    queue.send(b"a")
    root.sweep()
    clock.advance(61)
    lock = FileLock.acquire

    def after_the_end(self: FileLock, *args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(FileLock, "acquire", lock)
            Path(queue.layout.alone).touch()  # RACE: a sweep found it alone before the subscription was noted
            os.utime(queue.layout.alone, (0, 0))
            root.queue("service").sweep()
        return lock(self, *args, **options)

    monkeypatch.setattr(FileLock, "acquire", after_the_end)
    with pytest.raises(NoSuchQueue, match="queue service is not there any more"):
        queue.subscribe(client_id="worker", named=True)
    assert there(root) == ["letters"] and letters(root) == [(b"a", "service", "self_destruct")]


def test_a_new_queue_of_its_name_is_not_taken_for_it(root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = served(root)
    root.sweep()
    clock.advance(61)

    def made_anew() -> None:
        assert self_destruct.sweep(Root(root.path, clock=clock).queue("service").context)
        root.create_queue("service", **SERVICE).send(b"new")

    at_the_rename(monkeypatch, made_anew)
    root.sweep()
    assert where(queue) == {"target": [b"new"]}


def test_producers_racing_with_the_end_of_a_queue_lose_nothing(root: Root, clock: Clock) -> None:
    sent: list[tuple[bytes, str]] = []

    def produce(prefix: str) -> None:
        queue, number = root.queue("service"), 0
        while True:
            body = f"{prefix}{number}".encode()
            try:
                where_to = queue.send(body).delivered_to
            except Unavailable:
                continue  # hidden, and may come back
            sent.append((body, where_to))
            if where_to == "letters":
                return
            number += 1

    queue = served(root)
    root.sweep()
    producers = [threading.Thread(target=produce, args=(prefix,)) for prefix in "abc"]
    for producer in producers:
        producer.start()
    until(lambda: os.listdir(queue.layout.target), "messages")
    clock.advance(61)
    root.sweep()
    for producer in producers:
        producer.join(10)
    assert there(root) == ["letters"]
    assert sorted(body for body, _, _ in letters(root)) == sorted(body for body, _ in sent)


# -- a crash -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_letters", first_and_long([True, False]))
@pytest.mark.crashes
def test_a_crash_anywhere_in_the_destruction_leaves_each_message_in_one_place(
    tmp_path: Path, clock: Clock, has_letters: bool
) -> None:
    numbers = count()

    def build() -> Root:
        root = make_root(tmp_path / f"root-{next(numbers)}", clock)
        source, service = root.create_queue("source"), served(root)
        if not has_letters:
            root.delete_queue("letters")
        source.add_selector("a", to="service")
        source.send(b"carried")
        source.route()
        service.send(b"own")
        service.send(b"delayed", delay="1d")
        service.sweep()
        clock.advance(61)
        return root

    for root in killed_at_each_call(build, lambda root: root.queue("service").sweep()):
        assert bodies_below(root) == [b"carried", b"delayed", b"own"]
        for _ in range(3):  # one brings the queue back, one finds it alone, one destroys it
            clock.advance(61)
            root.sweep()
            assert bodies_below(root) == [b"carried", b"delayed", b"own"]
        (selector,) = root.queue("source").selectors()
        assert spent(root.queue("source").layout, selector.token) == []
        assert where(root.queue("source")) == {"target": [b"carried"]}
        left = [name for name in there(root) if name not in ("letters", "source")]
        if has_letters:
            assert left == [] and {body for body, _, _ in letters(root)} == {b"own", b"delayed"}
        else:
            assert len(left) == 1 and left[0].startswith("service.deleted-")
    assert next(numbers) > 20, "it was killed at each call"


def bodies_below(root: Root) -> list[bytes]:
    """Return the bodies of all messages, wherever they lie below a root."""
    states = {"target", "processing", "delayed", "error", "processed", "expired"}
    found = (Path(folder, file) for folder, _, files in os.walk(root.path) for file in files)
    return sorted(path.read_bytes() for path in found if path.parent.name in states and path.name[0] != ".")


def test_a_queue_that_died_half_way_and_was_made_anew_is_kept_beside_the_new_one(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(root).send(b"old")
    root.sweep()
    clock.advance(61)

    with monkeypatch.context() as patch:
        patch.setattr(self_destruct, "_empty", dies)
        with pytest.raises(KeyboardInterrupt):
            root.sweep()
    queue = root.create_queue("service", **SERVICE)
    queue.send(b"new")
    clock.advance(61)
    root.sweep()
    assert where(queue) == {"target": [b"new"]}
    (kept,) = (name for name in there(root) if name.startswith("service.deleted-"))
    assert [path.read_bytes() for path in Path(root.path, kept, "target").iterdir()] == [b"old"]


# -- what people are told ----------------------------------------------------------------------------------------------


def test_health_says_that_a_queue_is_about_to_destroy_itself(root: Root, clock: Clock) -> None:
    queue = served(root)
    assert queue.health().notes == ()
    root.sweep()
    clock.advance(20)
    (note,) = queue.health().notes
    assert queue.health().healthy and (note.kind, note.figure) == ("alone", 40)
    assert "it destroys itself in 40s" in note.message and "`dropq work service --client-id C -- CMD`" in note.message
    queue.send(b"a")
    message = take(queue)
    clock.advance(60)
    (note,) = queue.health().notes
    assert "when its message in processing/ is settled" in note.message
    message.ack()
    (note,) = queue.health().notes
    assert "at the next sweep" in note.message
    with queue.subscribe(client_id="worker", named=True):
        assert queue.health().notes == ()


def test_fsck_finds_nothing_wrong_in_a_queue_that_is_alone(root: Root, clock: Clock) -> None:
    queue = served(root)
    root.sweep()
    assert private(queue, "named") == ["worker"] and queue.fsck() == [] and fsck_root(root.context) == []


# -- the service-lookup test -------------------------------------------------------------------------------------------


def test_a_client_finds_a_service_by_its_queue_and_a_dead_letter_where_there_is_none(
    root: Root, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = root.queue("service")
    assert client.send(b"too early").delivered_to == "letters"

    # The service comes, and serves.
    service = root.create_queue("service", **SERVICE)
    with service.subscribe(client_id="server", named=True) as subscription:
        assert client.send(b"in time").delivered_to == "service"
        sweep_twice(root, clock)
        message = subscription.receive()
        assert message is not None and message.body == b"in time"
        message.ack()
    # It goes. Its queue goes, as a client is half-way through a send.
    root.sweep()
    clock.advance(61)
    write_new = Storage.write_new

    def goes(storage: Storage, path: str, *args: Any, **options: Any) -> None:
        write_new(storage, path, *args, **options)
        if path.startswith(f"{service.layout.working}/"):
            assert root.sweep().destroyed == 1

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_new", goes)
        assert client.send(b"half-way").delivered_to == "letters"
    assert client.send(b"too late").delivered_to == "letters"
    assert letters(root) == [(body, "service", "no_such_queue") for body in (b"too early", b"half-way", b"too late")]

    # It comes again, and gets what was sent meanwhile.
    root.create_queue("service", **SERVICE)
    outcomes = list(root.queue("letters").requeue(state="target", to_origin=True))
    assert len(outcomes) == 3 and where(root.queue("service")) == {"target": [b"half-way", b"too early", b"too late"]}


def test_a_worker_that_is_restarted_between_two_runs_does_not_lose_its_queue(root: Root, clock: Clock) -> None:
    queue = root.create_queue("service", **SERVICE)

    def run_worker() -> None:
        command = [sys.executable, "-m", "dropq", "--root", str(root.path), "work", "service"]
        command += ["--client-id", "server", "--until-empty", "-q", "--", "cat"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    for body in (b"first", b"second"):
        queue.send(body)
        run_worker()
        assert where(queue)["processed"][-1:] == [body]
        root.sweep()
        clock.advance(50)
        root.sweep()
        assert queue.exists()
    clock.advance(50)
    root.sweep()
    assert not queue.exists() and letters(root) == []


# -- where it is refused -----------------------------------------------------------------------------------------------


def test_neither_a_topic_nor_a_subscription_destroys_itself(root: Root) -> None:
    with pytest.raises(ConfigError, match="options of topic news: self_destruct = true: only a queue can"):
        root.create_topic("news", self_destruct=True)
    topic = root.create_topic("news")
    audit = topic.create_subscription("audit", client_id="hq")
    for file in (f"{root.path}/topic-root/news/queue.toml", audit.layout.config_file):
        Path(file).write_text("self_destruct = true\n")
        with pytest.raises(ConfigError, match="self_destruct = true: only a queue can destroy itself"):
            root.queue("news" if file != audit.layout.config_file else audit.name).counts()
        Path(file).unlink()


def test_the_dead_letter_queue_does_not_destroy_itself_by_default(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    with open(root.layout.config_file, "a") as file:
        file.write("self_destruct = true\n")
    root = Root(root.path)
    assert root.create_queue("q").config.self_destruct and not root.queue("letters").config.self_destruct


def test_a_default_of_the_root_holds_for_queues_and_not_for_topics(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    Path(root.layout.config_file).write_text("format = 1\n[defaults]\nself_destruct = true\n")
    root = Root(root.path)
    topic = root.create_topic("news")
    audit = topic.create_subscription("audit", client_id="hq")
    assert root.create_queue("q").config.self_destruct
    assert not audit.config.self_destruct and not root.queue("news").config.self_destruct


@pytest.mark.parametrize("options", [{}, {"client_id": ""}, {"client_id": "c", "detached": True, "lease_period": "1m"}])
def test_a_named_subscription_has_a_client_and_is_not_detached(root: Root, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a named subscription has a client_id"):
        root.create_queue("q").subscribe(named=True, **options)
