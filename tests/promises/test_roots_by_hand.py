"""Several roots, and what people do to them meanwhile: other owners, clocks, pauses, deletions; and other consumers."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from forks import DIED, forked
from helpers import Clock, base, names_in, reopened, take, until, where
from test_roots import arrives, at_rest, bodies, bridge_of, bridged, give, joined
from test_roots import group as group
from test_roots import pair as pair
from test_roots import wants_last as wants_last
from test_roots_odd_files import listed
from torture.calls import Call, come_between

import dropq.spark
from dropq import ConfigError, DropqError, Queue, Root, Unavailable
from dropq.carrier.bridge import Bridge, end_rows
from dropq.cli.main import main
from dropq.lifecycle.giving import OlderState
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.timing import Timing
from dropq.policies.wanted import Wanting, Wants
from dropq.storage.files import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def want(queue: Queue) -> None:
    """Let a consumer want all messages, from now on."""
    Wanting(queue.context, "consumer", None).say(None)


def rewrite(path: Path, old: str, new: str) -> None:
    """Change a file as an editor does."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# -- whose a message is ------------------------------------------------------------------------------------------------


def test_between_roots_that_name_different_owners_nothing_moves_and_both_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    roots = joined(tmp_path, "o", "c", "d", "e", replication_type="GroupLocalQueue", initial_owner="o")
    for queue in roots:
        queue.send_many([b"0", b"1"])
        want(queue)
    for queue in roots[2:]:
        rewrite(base(queue) / "queue.toml", 'initial_owner = "o"', 'initial_owner = "d"')
    before = {queue.root.path.name: names_in(queue, "target") for queue in roots}
    for one, other in (("o", "d"), ("o", "e"), ("d", "o"), ("d", "c"), ("c", "d"), ("c", "e"), ("e", "o"), ("e", "c")):
        code = main(["--root", str(tmp_path / one), "bridge", "--once", "--peer", f"{other}={tmp_path / other}"])
        here, there = ("o" if root in "oc" else "d" for root in (one, other))
        assert code == 78
        assert f"initial_owner is '{here}' here, and '{there}' there" in capfd.readouterr().err
    assert {queue.root.path.name: names_in(queue, "target") for queue in roots} == before
    rewrite(tmp_path / "c" / "q" / "queue.toml", 'initial_owner = "o"', 'initial_owner = "d"')
    rewrite(tmp_path / "o" / "q" / "queue.toml", 'initial_owner = "o"', 'initial_owner = "d"')
    for peer in "oce":
        assert bridged(roots[2], peer) == 2
    assert len(bodies(roots[2])) == 8


def test_a_bridge_whose_peers_all_disagree_exits_as_one_does(group: tuple[Queue, Queue, Queue]) -> None:
    o, c, _ = group
    o.send(b"x")
    want(c)
    rewrite(base(c) / "queue.toml", 'initial_owner = "o"', 'initial_owner = "c"')
    assert main(["--root", str(c.root.path), "bridge", "--once"]) == 78
    assert bodies(o) == [b"x"] and bodies(c) == []


@pytest.mark.parametrize("bridge", ["before it is due", "after it is due"])
def test_what_a_root_sends_that_nobody_sweeps_is_due_at_its_owner(
    group: tuple[Queue, Queue, Queue], bridge: str
) -> None:
    o, c, _ = group
    due = time.time() + 0.3
    c.send(b"later", delay=0.3)
    c.send(b"expires", expires_in=0.05)
    c.send(b"later expires", expires_in=0.4, delay=0.3)
    c.send(b"now")
    if bridge == "after it is due":
        until(lambda: time.time() > due + 0.2, "all to be due, and expired")
    assert bridged(o, "c") == 4
    assert where(c) == {} and at_rest(c)

    def is_over() -> bool:
        o.sweep()
        while (message := o.receive()) is not None:
            assert message.body != b"later" or time.time() >= due - 0.1
            message.ack()
        return time.time() > due + 0.2 and not any(o.counts()[state] for state in ("target", "delayed", "processing"))

    until(is_over, "all to be due, and consumed or expired")
    lies = where(o)
    assert sorted(lies["processed"] + lies.get("expired", [])) == [b"expires", b"later", b"later expires", b"now"]
    assert bridge == "before it is due" or b"expires" in lies["expired"]
    assert where(c) == {}


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("kind", ["Queue", "GroupLocalQueue"])
def test_where_clocks_are_an_hour_apart_what_tells_a_time_stays_and_all_else_crosses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, hours: int
) -> None:
    options = {"replication_type": kind, **({"initial_owner": "b"} if kind == "GroupLocalQueue" else {})}
    a, b = joined(tmp_path, "a", "b", settle_time=0, **options)
    a.send(b"expires", expires_in=7200)
    a.send(b"delayed", delay=7200)
    a.send(b"both", expires_in=10_000, delay=7200)
    for number in range(3):
        a.send(b"%d" % number, priority=number)
    arrives(a, "foreign", b"3")
    root = Root(b.root.path, clock=Clock())
    root.clock.advance(3600 * hours)  # type: ignore[attr-defined]
    own = root.queue("q")
    want(own)
    bridge = Bridge(root.context, root.context.config.peer[0], ["q"])
    bridge.once()
    assert bridge.taken.total() == 4
    assert sorted(bodies(b)) == [b"0", b"1", b"2", b"3"] and b.counts()["delayed"] == 0
    assert where(a) == {"target": [b"expires"], "delayed": [b"both", b"delayed"]} and at_rest(a)
    want(b)
    bridged(b, "a")  # the clock was set right
    assert b"expires" in bodies(b)
    assert a.counts()["delayed"] == (2 if kind == "Queue" else 0)


def test_where_clocks_are_an_hour_apart_nothing_of_a_queue_that_expires_crosses(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", expiration="2h")
    a.send(b"x")
    root = Root(b.root.path, clock=Clock())
    root.clock.advance(3600)  # type: ignore[attr-defined]
    want(root.queue("q"))
    bridge = Bridge(root.context, root.context.config.peer[0], ["q"])
    bridge.once()
    assert bodies(a) == [b"x"]
    want(b)
    assert bridged(b, "a") == 1


# -- bundles, credits and copies ---------------------------------------------------------------------------------------


def test_a_message_that_crosses_frees_the_credit_under_which_it_came(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    front = a.root.create_queue("front", durability="none")
    front.add_selector("on", to="q", credit=2)
    front.send_many([b"0", b"1", b"2"])
    assert front.route() == {"on": 2}
    assert all("via" in name for name in names_in(a, "target"))
    want(b)
    assert bridged(b, "a") == 2
    assert front.sweep().credits == 2 and front.route() == {"on": 1}
    assert bridged(b, "a") == 1
    assert not any("via" in name for name in names_in(b, "target"))
    for body in (b"0", b"1", b"2"):
        message = take(b)
        assert message.body == body
        message.ack()
    assert front.sweep().credits == 1 and where(front) == {} and where(a) == {}


def test_what_was_copied_where_it_waited_is_copied_where_it_comes(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    for queue in pair:
        for name in ("audit", "next"):
            queue.root.create_queue(name, durability="none")
        queue.add_selector("audit", op="copy", to="audit")
        queue.add_selector("next", to="next", credit=1)
    a.send_many([b"0", b"1"])
    a.route()
    a.route()
    assert bodies(a.root.queue("audit")) == [b"0", b"1"] and bodies(a.root.queue("next")) == [b"0"]
    assert all("copied" in name for name in names_in(a, "target"))
    want(b)
    assert bridged(b, "a") == 1
    assert not any("copied" in name for name in names_in(b, "target"))
    b.route()
    b.route()
    assert bodies(b.root.queue("audit")) == [b"1"] == bodies(b.root.queue("next"))
    assert where(a) == {} and at_rest(a)


def test_parts_of_bundles_and_what_is_left_of_two_of_one_id_cross_once_each(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    for _ in range(2):
        a.send(b"1\n2\n3\n4\n5\n", type="jsonl", message_id="bundle")
    with a.subscribe(max_backlog=2) as consumer:
        for message in consumer.receive_many(2):
            for record in message.records():
                if record.number == 5:
                    break
                record.reject("odd") if record.number in (2, 4) else record.ack()
    a.requeue()
    ids = Counter(message.id for message in a.browse())
    assert ids == {"bundle": 2, "bundle-2": 2, "bundle-4": 2}
    want(b)
    assert bridged(b, "a") == 6
    assert where(a).get("target") is None and at_rest(a)
    found = []
    while (bundle := b.receive()) is not None:
        for record in bundle.records():
            found.append(record.data)
            record.ack()
    assert Counter(found) == {b"2": 2, b"4": 2, b"5": 2}


# -- pauses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["Queue", "GroupLocalQueue"])
def test_while_a_root_is_locked_nothing_is_given_to_it_or_taken_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, which: int
) -> None:
    """Also where a listing takes so long that it is not made again soon."""
    monkeypatch.setattr("dropq.lifecycle.open_queue.Timing", lambda: Timing(listing_share=1e6))
    options = {"replication_type": kind, **({"initial_owner": "b"} if kind == "GroupLocalQueue" else {})}
    a, b = both = joined(tmp_path, "a", "b", **options)
    a.send_many([b"0", b"1"])
    want(b)
    lock = both[which].root.path / "global-read-lock"
    lock.touch()
    left = iter(range(5))
    bridge = bridge_of(b, "a")
    bridge.run(lambda seconds: next(left, None) is None)
    assert bodies(a) == [b"0", b"1"] and at_rest(a) and len(caplog.records) == 1
    lock.unlink()
    bridge.once()
    assert bridge.taken.total() == 2


def test_a_full_queue_takes_nothing_until_there_is_room_and_then_no_more_than_that(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", max_unprocessed=2)
    a.send_many([b"0", b"1"])
    b.send_many([b"2", b"3"])
    want(b)
    with pytest.raises(Unavailable, match="is full: max_unprocessed is 2"):
        bridged(b, "a")
    message = take(b)
    with pytest.raises(Unavailable, match="is full"):
        bridged(b, "a")
    message.ack()
    assert bridged(b, "a") == 1
    assert (bodies(a), sorted(bodies(b))) == ([b"1"], [b"0", b"3"]) and at_rest(a)


# -- deleted, renamed, made anew ---------------------------------------------------------------------------------------


def _deleted(queue: Queue) -> Callable[[], object]:
    """Delete a queue, with what it has; return how to bring one back."""
    queue.root.delete_queue("q", force=True)
    return lambda: queue.root.create_queue("q", durability="none", replication_type="Queue", transfer_after=0)


def _anew(queue: Queue) -> Callable[[], object]:
    _deleted(queue)()
    return lambda: None


def _renamed(queue: Queue) -> Callable[[], object]:
    home, other = Path(queue.layout.home), Path(queue.layout.home).with_name("other")
    home.rename(other)
    return lambda: other.rename(home)


def _renamed_and_another_made(queue: Queue) -> Callable[[], object]:
    back = _renamed(queue)
    queue.root.create_queue("q", durability="none", replication_type="Queue", transfer_after=0)

    def bring_back() -> None:
        shutil.rmtree(queue.layout.home)
        back()

    return bring_back


CHANGES = {
    "deleted": _deleted,
    "deleted and made anew": _anew,
    "renamed": _renamed,
    "replaced": _renamed_and_another_made,
}


@pytest.mark.parametrize("which", ["its owner", "the taker"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_queue_that_changes_amid_a_list_loses_and_doubles_nothing_but_what_is_deleted(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, change: str, which: str
) -> None:
    a, b = pair
    sent = [b"%d" % number for number in range(4)]
    a.send_many(sent)
    b.send(b"own")
    copied: list[str] = []
    back: list[Callable[[], object]] = []
    copy = Storage.copy

    def interrupted(self: Storage, source: str, destination: str, **options: Any) -> Any:
        copied.append(source)
        if len(copied) == 3:
            back.append(CHANGES[change](a if which == "its owner" else b))
        return copy(self, source, destination, **options)

    want(b)
    bridge = bridge_of(b, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "copy", interrupted)
        left = iter(range(3))
        bridge.run(lambda seconds: next(left, None) is None)
    assert len(back) == 1
    back[0]()
    a, b = reopened(a), reopened(b)
    for queue in (a, b):
        queue.sweep()
    want(b)
    left = iter(range(3))
    bridge.run(lambda seconds: next(left, None) is None)
    is_gone = change.startswith("deleted")
    stranded = is_gone and which == "the taker"
    assert sum(a.in_transit().values()) == (4 if stranded else 0)
    assert end_rows(a.root.context, "b", None) == (4 if stranded else 0)
    kept = {"its owner": [b"own"], "the taker": sent}[which] if is_gone else [*sent, b"own"]
    assert Counter([*bodies(a), *bodies(b)]) == Counter(kept)
    assert at_rest(a) and at_rest(b)


def test_a_peer_under_another_name_gives_nothing_until_both_roots_say_so_and_then_only_once(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send(b"0")
    want(b)
    assert bridged(b, "a") == 1
    take(b).ack()
    a.send(b"1")
    give(a, b, monkeypatch)
    want(b)
    rewrite(tmp_path / "b/dropq.toml", 'name = "a"', 'name = "north"')
    with pytest.raises(ConfigError, match="it is another root"):
        bridged(b, "north")
    rewrite(tmp_path / "a/dropq.toml", 'instance = "a"', 'instance = "north"')
    with pytest.raises(OlderState, match="has been in root a, and is in root north now"):
        bridged(b, "north")
    assert a.in_transit() == {"queue q of root b": 1} and bodies(b) == []
    rewrite(tmp_path / "a/dropq.toml", 'instance = "north"', 'instance = "a"')
    rewrite(tmp_path / "b/dropq.toml", 'name = "north"', 'name = "a"')
    assert bridged(b, "a") == 1
    assert bodies(b) == [b"1"] and at_rest(a)


def test_what_is_on_its_way_to_a_root_that_has_another_name_now_comes_back_by_hand(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send(b"x")
    give(a, b, monkeypatch)
    rewrite(tmp_path / "b/dropq.toml", 'instance = "b"', 'instance = "south"')
    rewrite(tmp_path / "a/dropq.toml", 'name = "b"', 'name = "south"')
    a, b = reopened(a), reopened(b)
    want(b)
    assert bridged(b, "a") == 0 and a.in_transit() == {"queue q of root b": 1}
    assert end_rows(a.root.context, "b", None) == 1
    assert bridged(b, "a") == 1
    assert bodies(b) == [b"x"] and at_rest(a)


# -- other consumers ---------------------------------------------------------------------------------------------------


def test_a_script_s_mv_takes_what_a_bridge_is_about_to_give_and_what_has_come(
    pair: tuple[Queue, Queue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    sent = sorted(b"%d" % number for number in range(12))
    a.send_many(sent)
    (tmp_path / "taken").mkdir()
    tried = []
    give_away = Moves.give_away

    def late(self: Moves, path: str, *args: Any) -> str | None:
        tried.append(path)
        if len(tried) % 3 == 1:
            Path(path).rename(tmp_path / "taken" / Path(path).name)
        return give_away(self, path, *args)

    monkeypatch.setattr(Moves, "give_away", late)
    want(b)
    assert bridged(b, "a") == 8
    assert sorted([path.read_bytes() for path in (tmp_path / "taken").iterdir()] + bodies(b)) == sent
    for name in names_in(b, "target"):
        (base(b) / "target" / name).rename(tmp_path / "taken" / name)
    assert bridged(b, "a") == 0
    assert sorted(path.read_bytes() for path in (tmp_path / "taken").iterdir()) == sent
    assert where(a) == where(b) == {} and at_rest(a) and at_rest(b)


def test_a_consumer_of_zeromq_gets_messages_of_another_root(pair: tuple[Queue, Queue]) -> None:
    zeromq = pytest.importorskip("zeromq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")
    a, b = pair
    sent = [b"%d" % number for number in range(5)]
    a.send_many(sent)
    with zeromq.served(b, in_flight=2) as serving:
        bridge = bridge_of(b, "a")
        bridge.once()
        assert Wants(b.context).now() == [] and bridge.taken.total() == 0  # nobody is connected
        consumer = serving.client("Consumer")
        until(lambda: Wants(b.context).now(), "the server to want messages")
        (wanted,) = Wants(b.context).now()
        assert wanted.room == 2
        over = threading.Event()
        running = threading.Thread(target=bridge.run, args=(over.wait,))
        running.start()
        try:
            found = list[bytes]()
            while len(found) < len(sent):
                parts, message = consumer.receive()
                found += parts
                consumer.settle(message)
            until(lambda: b.counts()["processed"] == len(sent), "the acks")
        finally:
            over.set()
            running.join()
        assert found == sent and bridge.taken.total() == len(sent)
    assert where(a) == {} and at_rest(a)
    assert Wants(b.context).now() == []


def test_a_stream_of_spark_that_finds_nothing_gets_messages_of_another_root(
    spark: SparkSession, pair: tuple[Queue, Queue], tmp_path: Path
) -> None:
    a, b = pair
    sent, found = sorted(b"%d" % number for number in range(5)), list[bytes]()
    dropq.spark.register(spark)
    reader = spark.readStream.format("dropq").options(root=str(b.root.path), queue="q")
    writer = reader.load().writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    bridge = bridge_of(b, "a")

    def each(frame: DataFrame, batch: int) -> None:
        found.extend(bytes(row.value) for row in frame.select("value").collect())

    def is_done() -> bool:
        bridge.once()
        return b.counts()["processed"] == len(sent) or query.exception() is not None

    query = writer.foreachBatch(each).trigger(processingTime="0 seconds").start()
    try:
        until(lambda: Wants(b.context).now() or query.exception(), "the stream to want messages")
        a.send_many(sent)
        until(is_done, "the acks")
        assert query.exception() is None
    finally:
        query.stop()
    assert sorted(found) == sent and bridge.taken.total() == len(sent)
    assert where(a) == {} and at_rest(a)


# -- away, and restored ------------------------------------------------------------------------------------------------


def test_a_root_that_is_its_own_peer_by_another_path_is_refused(tmp_path: Path, pair: tuple[Queue, Queue]) -> None:
    _, b = pair
    (tmp_path / "link").symlink_to(tmp_path / "b")
    rewrite(tmp_path / "b/dropq.toml", f'root = "{tmp_path / "a"}"', f'root = "{tmp_path / "link"}"')
    b.send(b"x")
    want(b)
    with pytest.raises(ConfigError, match="this root itself"):
        bridged(b, "a")
    assert bodies(b) == [b"x"] and at_rest(b)


def test_what_waits_for_an_owner_that_is_away_comes_in_order_when_it_is_back(
    tmp_path: Path, group: tuple[Queue, Queue, Queue]
) -> None:
    o, c, _ = group
    sent = [b"%d" % number for number in range(5)]
    (tmp_path / "o").rename(tmp_path / "away")
    c.send_many(sent)
    want(c)
    with pytest.raises(Unavailable, match="is not there"):
        bridged(c, "o")
    assert c.receive() is None and c.counts()["target"] == 5
    (tmp_path / "away").rename(tmp_path / "o")
    assert bridged(o, "c") == 5
    with o.subscribe(max_backlog=None) as consumer:
        assert [message.body for message in consumer.receive_many(9)] == sent
    assert where(c) == {} and bridged(o, "c") == 0


def test_an_owner_that_is_gone_for_good_is_replaced_and_nothing_comes_twice(
    tmp_path: Path, group: tuple[Queue, Queue, Queue]
) -> None:
    o, c, d = group
    o.send(b"taken before")
    want(d)
    assert bridged(d, "o") == 1
    shutil.rmtree(tmp_path / "o")
    for queue in (c, d):
        queue.send(b"of " + queue.root.path.name.encode())
        rewrite(base(queue) / "queue.toml", 'initial_owner = "o"', 'initial_owner = "c"')
    c, d = reopened(c), reopened(d)
    assert bridged(c, "d") == 1
    assert sorted(bodies(c)) == [b"of c", b"of d"]
    assert take(d).body == b"taken before" and bodies(d) == []


def test_a_taking_root_that_was_restored_from_a_backup_goes_on(tmp_path: Path, pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    want(b)
    for number in range(2):
        a.send(b"%d" % number)
        assert bridged(b, "a") == 1
        if number == 0:
            shutil.copytree(tmp_path / "b", tmp_path / "backup", symlinks=True)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "backup").rename(tmp_path / "b")
    a.send(b"2")
    b = reopened(b)
    want(b)
    assert bridged(b, "a") == 1
    assert bodies(b) == [b"0", b"2"] and bodies(a) == [] and at_rest(a)


def test_a_peer_restored_with_a_list_on_its_way_doubles_nothing_and_strands_nothing(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send(b"0")
    listed(a, b, monkeypatch)
    shutil.copytree(tmp_path / "a", tmp_path / "backup", symlinks=True)
    assert bridged(b, "a") == 1
    take(b).ack()
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "backup").rename(tmp_path / "a")
    a = reopened(a)
    a.send(b"1")
    want(b)
    assert bridged(b, "a") == 1
    assert bodies(b) == [b"1"] and bodies(a) == [] and at_rest(a)


def test_consumers_that_take_and_return_let_a_message_go_to_and_fro_unchanged(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    sent = a.send(b"x")
    (name,) = names_in(a, "target")
    for _ in range(10):
        for queue, peer in ((b, "a"), (a, "b")):
            with queue.subscribe() as consumer:
                assert consumer.receive() is None and bridged(queue, peer) == 1
                message = consumer.receive()
                assert message is not None and message.id == sent.id
                message.release(counted=False)
    assert names_in(a, "target") == [name] and bodies(b) == [] and at_rest(a) and at_rest(b)


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.crashes
def test_a_disk_that_is_full_from_any_write_on_keeps_each_message_in_one_root(tmp_path: Path, which: str) -> None:
    sent = [b"0", b"1", b"2" * 100_000]
    for number in count():
        a, b = joined(tmp_path / str(number), "a", "b")
        a.send_many(sent)
        want(b)
        left = iter(range(number))
        refused: list[str] = []

        def full(
            call: Call, disk: str = f"{tmp_path / str(number) / which}/", left: Any = left, refused: Any = refused
        ) -> Any:
            if call.name in ("open", "write", "mkdir", "link") and (call.changes or call.name == "mkdir"):
                first = call.arguments[0]
                path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
                if path.startswith(disk) and next(left, None) is None:
                    refused.append(path)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return call.do()

        def act(b: Queue = b, full: Any = full, refused: Any = refused) -> None:
            come_between(full)
            with suppress(DropqError, OSError):
                bridged(b, "a")
            os._exit(DIED if refused else 0)

        status = forked(act)
        assert status in (0, DIED)
        assert bodies(a) + bodies(b) or a.in_transit()
        want(b)
        bridged(b, "a")
        b.sweep()
        assert Counter([*bodies(a), *bodies(b)]) == Counter(sent), number
        assert at_rest(a) and at_rest(b), number
        shutil.rmtree(tmp_path / str(number))
        if status == 0:
            break
    assert number > 3
