"""Several roots: a message is owned by one, goes where a consumer wants it, once, and is stranded nowhere."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import killed_at_each_call
from helpers import AT_ONCE, base, events, health, names_in, next_moment, timed, until, where

from dropq import ConfigError, DropqError, Queue, Root, Unavailable
from dropq.carrier import bridge as bridge_module
from dropq.carrier.bridge import Bridge, end_rows, recall
from dropq.cli.main import main
from dropq.diagnosis import peers
from dropq.lifecycle.giving import OlderState
from dropq.policies import wanted as wanted_module
from dropq.policies.wanted import LOOKED, Wants
from dropq.storage import reading
from dropq.storage.files import Storage

OPTIONS: dict[str, Any] = {
    "durability": "none",
    "redelivery_delay": 0,
    "replication_type": "Queue",
    "transfer_after": 0,
}


@pytest.fixture(autouse=True)
def wants_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what was wanted count until its subscription closes, however busy the machine is."""
    monkeypatch.setattr(wanted_module, "COUNTS", 1e6)
    monkeypatch.setattr(bridge_module, "ROWS", 0.0)


def joined(folder: Path, *names: str, **options: Any) -> list[Queue]:
    """Make roots that name each other, each with a queue `q` that they share; return the queues."""
    for name in names:
        (folder / name).mkdir(parents=True)
        peers = "".join(f'[[peer]]\nname = "{other}"\nroot = "{folder / other}"\n' for other in names if other != name)
        (folder / name / "dropq.toml").write_text(f'format = 1\ninstance = "{name}"\ninstance_group = "g"\n{peers}')
    roots = [timed(Root(folder / name), AT_ONCE) for name in names]
    return [root.create_queue("q", **{**OPTIONS, **options}) for root in roots]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Queue, Queue]:
    a, b = joined(tmp_path, "a", "b")
    return a, b


def bridged(to: Queue, of: str) -> int:
    """Let the bridge of a queue's root take what is wanted from a peer; return how many messages came."""
    bridge = bridge_of(to, of)
    bridge.once()
    return bridge.taken.total()


def bridge_of(to: Queue, of: str) -> Bridge:
    context = Root(to.root.path).context
    (peer,) = (peer for peer in context.config.peer if peer.name == of)
    return Bridge(context, peer, ["q"])


def arrives(queue: Queue, name: str, body: bytes) -> None:
    """Move a file of a script into a queue."""
    file = queue.root.path / name
    file.write_bytes(body)
    file.rename(base(queue) / "target" / name)


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    return [message.body for message in queue.browse(state)]


def at_rest(queue: Queue) -> bool:
    """Whether nothing of a queue is on its way."""
    return queue.in_transit() == {} and not any(name.startswith(".job") for name in names_in(queue, "working"))


# -- who wants, and what comes -----------------------------------------------------------------------------------------


def test_nothing_moves_that_nobody_wants_and_all_comes_in_order_that_is(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    sent = [b"%d" % number for number in range(5)]
    a.send_many(sent)
    assert bridged(b, "a") == 0 and len(bodies(a)) == 5
    with b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 5
        assert [message.body for message in subscription.receive_many(9)] == sent
    assert where(a) == {} and at_rest(a)
    assert [event.fields["to"] for event in events(a) if event.event == "moved"] == []
    assert not any(name for name in os.listdir(base(b) / ".dropq/wanted") if name != LOOKED)


def test_a_subscription_gets_its_free_backlog_and_more_while_it_takes_all(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send_many([b"x"] * 20)
    with b.subscribe(max_backlog=1) as subscription:
        assert subscription.receive() is None
        counts = []
        context = b.root.context
        bridge = Bridge(context, context.config.peer[0], ["q"])
        for _ in range(4):
            before = bridge.taken.total()
            bridge.once()
            counts.append(bridge.taken.total() - before)
            while (message := subscription.receive()) is not None:
                message.ack()
        assert counts == [1, 2, 4, 8]
        assert a.counts()["target"] == 5


def test_a_worker_that_is_busy_gets_no_more_than_it_wanted(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send_many([b"x"] * 20)
    with b.subscribe(max_backlog=1) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 1
        assert subscription.receive(60) is not None
        (_,) = Wants(b.context).now()  # it says so for a while
        assert bridged(b, "a") <= 1
    assert b.counts()["target"] <= 2


def test_a_worker_that_takes_nothing_more_gets_no_more(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send_many([b"x"] * 50)
    with b.subscribe(max_backlog=1) as subscription:
        assert subscription.receive() is None
        context = b.root.context
        bridge = Bridge(context, context.config.peer[0], ["q"])
        for _ in range(6):
            bridge.once()  # it wants one, as its file says, and does not take what came
        assert bridge.taken.total() == 1


def test_what_a_dead_subscription_left_here_keeps_none_from_another(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send_many([b"x"] * 5)
    a.send(b"red", properties={"colour": "red"})
    context = b.root.context
    bridge = Bridge(context, context.config.peer[0], ["q"])
    with b.subscribe(max_backlog=None, filter="colour IS NULL") as first:
        assert first.receive() is None
        bridge.once()
    assert b.counts()["target"] == 5
    with b.subscribe(filter="colour = 'red'") as second:
        assert second.receive() is None
        bridge.once()
        message = second.receive()
        assert message is not None and message.body == b"red"


def test_a_filter_that_cannot_be_read_stops_no_other_want(
    pair: tuple[Queue, Queue], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    a.send(b"x")
    with wanting(b):
        (base(b) / ".dropq/wanted/odd").write_text(json.dumps({"filter": "((((", "room": 5}))
        bridge = bridge_of(b, "a")
        bridge.once()
        a.send(b"y")
        bridge._queues["q"]._list_again = 0.0  # however long the first listing took
        bridge.once()
        assert bridge.taken.total() == 2
    assert len([record for record in caplog.records if "((((" in record.message]) == 1  # not at each listing


def test_a_second_file_of_a_name_waits_as_long_as_the_first(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", transfer_after="1h", settle_time=0)
    with wanting(b):
        bridge = bridge_of(b, "a")

        def due() -> float:
            bridge._round()
            return bridge._queues["q"].due

        arrives(a, "report.txt", b"first")
        first = due()
        assert first < math.inf and due() == first
        (base(a) / "target" / "report.txt").unlink()
        next_moment(tmp_path)
        arrives(a, "report.txt", b"second")
        assert due() > first


def test_to_want_again_replaces_no_file(pair: tuple[Queue, Queue]) -> None:
    _, b = pair
    file = base(b) / ".dropq/wanted/me"
    want = wanted_module.Wanting(b.context, "me", None)
    want.say(1)
    number = file.stat().st_ino
    want.pause()
    assert Wants(b.context).now() == [] and want.again_in <= 0
    want.say(1)
    assert Wants(b.context).now() == [("me", None, 1)] and file.stat().st_ino == number
    want.pause()
    file.unlink()  # as a sweep does with an old one
    want.say(1)
    want.pause()
    want.end()
    assert not file.exists()


@pytest.mark.parametrize("text", ["short", "so long that the return address stands in a sidecar" * 3])
def test_a_request_stays_where_its_answer_can_come_back(pair: tuple[Queue, Queue], text: str) -> None:
    a, b = pair
    a.send(b"question", reply_to="temp-1795383089375000-7523895424", properties={"text": text})
    a.send(b"x")
    with wanting(b):
        assert bridged(b, "a") == 1
    assert bodies(a) == [b"question"]


@pytest.mark.parametrize("filter", ["colour = 'red'", "/colour = 'red'"])
def test_only_what_a_consumers_filter_matches_comes(pair: tuple[Queue, Queue], filter: str) -> None:
    a, b = pair
    for colour in ("red", "blue", "red"):
        a.send(json.dumps({"colour": colour}).encode(), properties={"colour": colour})
    with b.subscribe(max_backlog=None, filter=filter) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 2
        assert bridged(b, "a") == 0
    assert [message.properties["colour"] for message in a.browse()] == ["blue"]


def test_what_is_left_of_a_bundle_comes_although_the_queues_filter_matches_only_the_whole(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", message_type="text", filter="/ LIKE 'ERROR'")
    a.send("ERROR 1\n2\n", type="text")
    a.send("none", type="text")
    with a.subscribe() as subscription:
        next(subscription.records()).ack()
    with b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 1
        message = subscription.receive()
        assert message is not None and message.body == b"2\n"
    assert bodies(a) == [b"none"]


def test_who_does_not_ask_wants_nothing(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send(b"x")
    with b.subscribe() as subscription:
        assert bridged(b, "a") == 0
        b.pause()
        assert subscription.receive() is None
        assert list(Wants(b.context).now()) == []
        b.resume()
        b.send(b"own")
        assert subscription.receive() is not None
        assert subscription.receive() is None  # it holds all that it may
        assert bridged(b, "a") == 0


def test_a_local_queue_says_nothing(tmp_path: Path) -> None:
    (queue,) = joined(tmp_path, "a", replication_type="LocalQueue")
    with queue.subscribe() as subscription:
        assert subscription.receive() is None
    assert not (base(queue) / ".dropq" / "wanted").exists()
    with pytest.raises(ConfigError, match="LocalQueue"):
        bridge_module.shared_queues(queue.root.context, ["q"])


def test_a_bridge_opens_a_queue_again_when_its_configuration_has_changed(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SETTLED_NS", -(10**18))  # what changed just now counts, too
    root, known = pair[1].root.context, dict[str, Any]()
    (context,) = bridge_module.shared_queues(root, known=known)
    assert bridge_module.shared_queues(root, known=known)[0] is context
    toml = base(pair[1]) / "queue.toml"
    toml.write_text(toml.read_text() + "max_unprocessed = 7\n")
    assert bridge_module.shared_queues(root, known=known)[0].config.max_unprocessed == 7
    shutil.rmtree(base(pair[1]))
    assert bridge_module.shared_queues(root, known=known) == [] == list(known)


def test_a_queue_whose_configuration_changed_just_now_is_opened_again(pair: tuple[Queue, Queue]) -> None:
    root, known = pair[1].root.context, dict[str, Any]()
    os.utime(base(pair[1]) / "queue.toml")
    (context,) = bridge_module.shared_queues(root, known=known)
    assert bridge_module.shared_queues(root, known=known)[0] is not context


def test_a_want_is_seen_where_nobody_wanted_anything(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SETTLED_NS", -(10**18))
    b = pair[1]
    wants = Wants(b.context)
    assert wants.now() == wants.now() == []
    with b.subscribe() as subscription:
        assert subscription.receive() is None
        assert len(wants.now()) == len(wants.now()) == 1
    assert wants.now() == wants.now() == []
    shutil.rmtree(base(b))
    assert wants.now() == []


def test_what_was_listed_and_is_taken_meanwhile_stays_with_the_owner(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send_many([b"x"] * 3)
    give = bridge_module._Crossing._give

    def late(self: Any, theirs: Any, chosen: Any, row: Any) -> dict[str, str]:
        with a.subscribe(max_backlog=None) as consumer:
            for message in consumer.receive_many(2):
                message.ack()
        return give(self, theirs, chosen, row)

    monkeypatch.setattr(bridge_module._Crossing, "_give", late)
    with b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 1


def test_foreign_files_keep_their_names_and_sidecars_their_properties(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    (base(a) / "working" / "report.csv").write_bytes(b"r")
    (base(a) / "working" / "report.csv").rename(base(a) / "target" / "report.csv")
    long = {"text": "y" * 300}
    a.send(b"p", properties=long, correlation_id="c" * 200)
    with b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        until(lambda: bridged(b, "a") or len(bodies(a)) == 0, "the foreign file to settle")
        until(lambda: bridged(b, "a") or len(bodies(a)) == 0, "the foreign file to settle")
        found = {message.body: message for message in subscription.receive_many(9)}
        assert found[b"r"].id == "report.csv" and found[b"p"].properties == long
        for message in found.values():
            message.ack()
    assert "report.csv" in names_in(b, "processed")


def test_what_cannot_be_read_and_what_is_no_file_stays(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    target = base(a) / "target"
    os.mkfifo(target / "4.1700000000000000-0000000001.B")
    (target / "4.1700000000000000-0000000002.B").symlink_to("/etc/passwd")
    (target / "4.1700000000000000-0000000003.B").mkdir()
    a.send(b"x")
    with b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 1
    assert len(os.listdir(target)) == 3


# -- what is refused ---------------------------------------------------------------------------------------------------


def wanting(queue: Queue) -> Any:
    subscription = queue.subscribe(max_backlog=None)
    assert subscription.receive() is None
    return subscription


def _unmounted(folder: Path) -> None:
    (folder / "a").rename(folder / "away")
    (folder / "a").mkdir()


def _another(folder: Path) -> None:
    file = folder / "a" / "dropq.toml"
    file.write_text(file.read_text().replace('instance = "a"', 'instance = "other"'))


def _one_sided(folder: Path) -> None:
    (folder / "a" / "dropq.toml").write_text('format = 1\ninstance = "a"\n')


def _itself(folder: Path) -> None:
    file = folder / "b" / "dropq.toml"
    file.write_text(file.read_text().replace(f'root = "{folder / "a"}"', f'root = "{folder / "b"}"'))


def _otherwise(folder: Path) -> None:
    (folder / "a" / "q" / "queue.toml").write_text('replication_type = "Queue"\nexpiration = "1m"\n')


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "an empty mount point": (_unmounted, Unavailable, "no dropq.toml"),
    "another root": (_another, ConfigError, "another root"),
    "a peer that does not name this root": (_one_sided, ConfigError, "stranded"),
    "this root itself": (_itself, ConfigError, "this root itself"),
    "another configuration": (_otherwise, ConfigError, "expiration is None here, and 60.0 there"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_is_taken_from_a_peer_that_is_not_what_it_is_called(
    tmp_path: Path, pair: tuple[Queue, Queue], what: str
) -> None:
    a, b = pair
    act, kind, said = REFUSED[what]
    a.send(b"x")
    with wanting(b):
        act(tmp_path)
        with pytest.raises(kind, match=said):
            bridged(b, "a")
    lying = tmp_path / ("away" if act is _unmounted else "a")
    assert len(os.listdir(lying / "q" / "target")) == 1
    assert act is not _unmounted or os.listdir(tmp_path / "a") == []


@pytest.mark.parametrize("which", [0, 1])
def test_neither_may_be_paused_or_refuse_sends(pair: tuple[Queue, Queue], which: int) -> None:
    a, b = pair
    a.send(b"x")
    with wanting(b):
        for stop, go_on in (
            (pair[which].pause, pair[which].resume),
            (
                lambda: (base(pair[which]) / "write-lock.properties").write_text("target-limit=0\n"),
                (base(pair[which]) / "write-lock.properties").unlink,
            ),
        ):
            stop()
            with pytest.raises(Unavailable):
                bridged(b, "a")
            assert len(bodies(a)) == 1
            go_on()
        assert bridged(b, "a") == 1


def test_no_more_comes_than_there_is_room_for(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", max_unprocessed=5)
    a.send_many([b"x"] * 5)
    b.send_many([b"own"] * 3)
    with b.subscribe(max_backlog=None, filter="colour = 'red'") as subscription:
        assert subscription.receive() is None
        with b.subscribe(max_backlog=None) as other:
            own = other.receive_many(3)
            assert other.receive() is None
            assert bridged(b, "a") == 2
            assert len(own) == 3


def test_where_clocks_differ_what_expires_stays(pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    a.send(b"expires", expires_in=3600)
    a.send(b"lasts")
    monkeypatch.setattr(bridge_module, "CLOCKS", -1)
    with wanting(b):
        assert bridged(b, "a") == 1
    assert bodies(a) == [b"expires"]


# -- whose a message is ------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> tuple[Queue, Queue, Queue]:
    o, c, d = joined(tmp_path, "o", "c", "d", replication_type="GroupLocalQueue", initial_owner="o")
    return o, c, d


def test_of_a_group_local_queue_nobody_gets_a_message_before_its_initial_owner(
    group: tuple[Queue, Queue, Queue],
) -> None:
    o, c, _ = group
    c.send(b"x")
    (base(c) / "target" / "4.1700000000000000-0000000001.B").write_bytes(b"by hand")
    assert c.receive() is None
    assert {one.why for one in c.explain()} == {"owner"}
    assert bridged(o, "c") == 2  # at once: nobody at o wants it
    assert sorted(bodies(o)) == [b"by hand", b"x"]
    with c.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        assert bridged(c, "o") == 2
        first, second = subscription.receive_many(2)
        assert "JMS_dropq_ownedB=true" in first.file
        first.release()
        second.reject("r")
        assert subscription.receive() is not None  # it is its own now, also after it came back
    c.requeue()
    assert {one.why for one in c.explain()} == {"ready"}
    assert bridged(o, "c") == 0


def test_a_request_too_goes_to_the_initial_owner_of_a_group_local_queue(group: tuple[Queue, Queue, Queue]) -> None:
    o, c, _ = group
    c.send(b"question", reply_to="temp-1795383089375000-7523895424")
    assert (bridged(o, "c"), bodies(o)) == (1, [b"question"])


def test_what_is_marked_hides_nothing_from_the_initial_owner(group: tuple[Queue, Queue, Queue]) -> None:
    o, c, _ = group
    o.send(b"first")
    with c.subscribe() as subscription:
        assert subscription.receive() is None
        assert bridged(c, "o") == 1
    c.send_many([b"later"] * 3)
    assert bridged(o, "c") == 3
    assert bodies(c) == [b"first"]


def test_a_record_of_an_owned_bundle_is_owned(group: tuple[Queue, Queue, Queue]) -> None:
    o, c, _ = group
    o.send(b"1\n2\n3\n", type="jsonl")
    with c.subscribe() as subscription:
        assert subscription.receive() is None
        assert bridged(c, "o") == 1
        message = subscription.receive()
        assert message is not None
        for record in message.records():
            record.reject("odd") if record.number == 2 else record.ack()
    c.requeue()
    assert {one.why for one in c.explain()} == {"ready"}


def test_a_mark_goes_with_a_move_to_another_queue(group: tuple[Queue, Queue, Queue]) -> None:
    o, c, _ = group
    o.send(b"x")
    with c.subscribe() as subscription:
        assert subscription.receive() is None
        assert bridged(c, "o") == 1
    c.root.create_queue("other", durability="none")
    c.move(c.root.queue("other"))
    (name,) = names_in(c.root.queue("other"), "target")
    assert "owned" not in name


def test_delayed_messages_go_to_the_initial_owner_and_are_due_there(group: tuple[Queue, Queue, Queue]) -> None:
    o, c, _ = group
    c.send(b"later", delay=3600)
    assert bridged(o, "c") == 1
    assert bodies(o, "delayed") == [b"later"] and c.counts()["delayed"] == 0


def test_another_initial_owner_frees_what_waits(tmp_path: Path, group: tuple[Queue, Queue, Queue]) -> None:
    _, c, d = group
    c.send(b"x")
    file = tmp_path / "c" / "q" / "queue.toml"
    file.write_text(file.read_text().replace('initial_owner = "o"', 'initial_owner = "c"'))
    freed = Root(tmp_path / "c").queue("q")
    with pytest.raises(ConfigError, match="initial_owner is 'o' here, and 'c' there"), wanting(d):
        bridged(d, "c")
    message = freed.receive()
    assert message is not None and message.body == b"x"


def test_a_script_s_file_whose_name_only_looks_marked_goes_to_the_owner(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", replication_type="GroupLocalQueue", initial_owner="a", settle_time=0)
    arrives(b, "report of JMS_dropq_ownedB=true", b"x")
    assert bridged(a, "b") == 1
    assert bodies(a) == [b"x"] and where(b) == {}


# -- crashes, and what is on its way -----------------------------------------------------------------------------------


@pytest.mark.crashes
def test_a_bridge_that_dies_at_any_call_leaves_each_message_once(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(10_000))

    def build() -> tuple[Queue, Queue]:
        folder = next(folders)
        a, b = joined(folder, "a", "b")
        a.send_many([b"0", b"1"])
        subscription = wanting(b)
        subscription.close()
        wanted_module.Wanting(b.context, "me", None).say(None)
        return a, b

    def act(built: tuple[Queue, Queue]) -> None:
        bridged(built[1], "a")

    for a, b in killed_at_each_call(build, act):
        b.sweep()
        bridged(b, "a")
        b.sweep()
        found = Counter([*bodies(a), *bodies(b)])
        assert found == {b"0": 1, b"1": 1}
        assert at_rest(a) and at_rest(b)
        shutil.rmtree(a.root.path.parent)


def give(a: Queue, b: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what waits at a to the row for b, and carry nothing."""
    with monkeypatch.context() as patch, wanting(b):
        patch.setattr(bridge_module._Crossing, "_carry", lambda *_: (0, {}))
        bridged(b, "a")
    assert a.counts()["target"] == 0


def test_what_is_on_its_way_is_seen_and_recalled(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    a.send_many([b"0", b"1"])
    give(a, b, monkeypatch)
    assert a.in_transit() == {"queue q of root b": 2}
    (first, _) = a.explain()
    assert first.why == "transit" and "dropq bridge" in first.detail
    assert any("queue q of root b" in note.message for note in health(a).notes)
    a.sweep()  # which passes over it
    assert a.in_transit() == {"queue q of root b": 2}
    assert main(["--root", str(a.root.path), "bridge", "--recall", "b"]) == 0
    assert "recalled=2" in capsys.readouterr().err
    assert bodies(a) == [b"0", b"1"] and at_rest(a)
    with wanting(b):
        assert bridged(b, "a") == 2


def test_a_recall_needs_the_peer_unless_it_is_proxied(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send(b"x")
    give(a, b, monkeypatch)
    (tmp_path / "b").rename(tmp_path / "away")
    (peer,) = a.root.context.config.peer
    with pytest.raises(Unavailable):
        recall(a.root.context, peer, None)
    assert end_rows(a.root.context, "b", None) == 1
    (message,) = a.browse()
    assert message.redelivered and at_rest(a)
    (tmp_path / "away").rename(tmp_path / "b")
    with wanting(b):
        assert bridged(b, "a") == 1


def test_a_recall_passes_over_a_queue_that_cannot_be_opened_and_one_that_the_peer_lacks(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    a.root.create_queue("aside", **OPTIONS)
    (base(a.root.create_queue("broken")) / "queue.toml").write_text("durability = 1\n")
    a.send(b"x")
    give(a, b, monkeypatch)
    (peer,) = a.root.context.config.peer
    context = Root(a.root.path).context
    assert recall(context, peer, None) == 1
    assert len([record for record in caplog.records if "queue broken is passed over" in record.message]) == 1
    with pytest.raises(ConfigError):
        recall(context, peer, ["broken"])
    give(a, b, monkeypatch)
    assert end_rows(context, "b", None) == 1
    assert bodies(a) == [b"x"]


def test_what_is_on_its_way_comes_back_though_neither_shares_the_queue_any_more(
    tmp_path: Path, pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    a.send(b"x")
    give(a, b, monkeypatch)
    (tmp_path / "a/dropq.toml").write_text('format = 1\ninstance = "a"\n')
    (tmp_path / "a/q/queue.toml").write_text('durability = "none"\n')
    assert main(["--root", str(a.root.path), "bridge", "--recall", "b", "--proxied"]) == 0
    assert "recalled=1" in capsys.readouterr().err
    assert bodies(a) == [b"x"]


def test_a_message_that_cannot_be_read_stops_no_other(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send_many([b"0", b"bad", b"2"])
    copy = Storage.copy

    def broken(self: Storage, source: str, destination: str, **options: Any) -> Any:
        if Path(source).read_bytes() == b"bad":
            raise OSError(5, os.strerror(5), source)
        return copy(self, source, destination, **options)

    monkeypatch.setattr(Storage, "copy", broken)
    with wanting(b):
        assert bridged(b, "a") == 2
    assert bodies(a) == [b"bad"] and at_rest(a)


@pytest.mark.parametrize("left", ["abc", [[1]], None])
def test_a_damaged_ledger_removes_nothing(
    pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch, left: Any
) -> None:
    a, b = pair
    a.send(b"x")
    unlink = Storage.unlink

    def refused(self: Storage, path: str) -> bool:
        if "~" in path:
            raise OSError(5, os.strerror(5), path)
        return unlink(self, path)

    with wanting(b), monkeypatch.context() as patch:
        patch.setattr(Storage, "unlink", refused)
        with pytest.raises(DropqError):
            bridged(b, "a")
    assert a.in_transit()
    (entry,) = (base(b) / ".dropq/ledger").iterdir()
    said = json.loads(entry.read_text())
    said["note"]["left"] = left
    entry.write_text(json.dumps(said))
    with pytest.raises(DropqError, match="damaged"):
        bridged(b, "a")
    assert a.in_transit()


def test_a_file_that_another_program_wrote_comes_once_it_has_settled(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a", "b", settle_time="1h")
    bridge = bridge_of(b, "a")
    with b.subscribe() as subscription:
        assert subscription.receive() is None
        (base(a) / "target" / "report.csv").write_bytes(b"whole")
        os.utime(base(a) / "target", (0, 0))  # nothing has come there for long

        def comes() -> bool:
            bridge.once(lambda seconds: True)
            return (message := subscription.receive()) is not None and message.body == b"whole"

        assert not comes()
        toml = base(a) / "queue.toml"
        toml.write_text(toml.read_text().replace('settle_time = "1h"', 'settle_time = "1ms"'))
        until(comes, "the file to come")


def test_nothing_more_is_given_to_a_row_that_cannot_be_carried(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send(b"first")
    with wanting(b):
        assert bridged(b, "a") == 1
        (entry,) = (base(b) / ".dropq/ledger").iterdir()
        entry.write_bytes(b"")  # as a power cut may leave what was not synced
        for waiting in range(3):
            a.send(b"x")
            with pytest.raises(DropqError, match="another list"):
                bridged(b, "a")
            assert sum(a.in_transit().values()) == 1 and len(bodies(a)) == waiting


def test_what_finds_no_room_goes_back(pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    a.send_many([b"small", b"large" * 1000])
    copy = Storage.copy

    def full(self: Storage, source: str, destination: str, **options: Any) -> Any:
        if os.path.getsize(source) > 1000:
            raise OSError(28, os.strerror(28), destination)
        return copy(self, source, destination, **options)

    monkeypatch.setattr(Storage, "copy", full)
    with wanting(b):
        assert bridged(b, "a") == 1
    assert bodies(b) == [b"small"] and len(bodies(a)) == 1 and at_rest(a)
    monkeypatch.undo()
    with wanting(b) if not bodies(b) else b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is not None
        assert subscription.receive() is None
        assert bridged(b, "a") == 1


def test_a_peer_that_was_restored_from_a_backup_gives_nothing(tmp_path: Path, pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send(b"0")
    shutil.copytree(tmp_path / "a", tmp_path / "backup", symlinks=True)
    with b.subscribe(max_backlog=None) as subscription:
        assert subscription.receive() is None
        assert bridged(b, "a") == 1
        message = subscription.receive()
        assert message is not None
        message.ack()
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "backup").rename(tmp_path / "a")
        a = timed(Root(tmp_path / "a"), AT_ONCE).queue("q")
        a.send(b"new")
        assert subscription.receive() is None
        with pytest.raises(OlderState, match="older state"):
            bridged(b, "a")
        assert sorted(bodies(a)) == [b"0", b"new"]  # its consumers go on
        assert any(reason.kind == "older-state" for reason in health(a).reasons)
        assert end_rows(a.root.context, "b", None) == 0
        assert bridged(b, "a") == 2  # b"0" twice, as the backup had it


def test_of_a_root_and_its_clone_one_is_refused(tmp_path: Path, pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    with wanting(b):
        a.send(b"0")
        assert bridged(b, "a") == 1
    shutil.copytree(tmp_path / "a", tmp_path / "c", symlinks=True)
    file = tmp_path / "c" / "dropq.toml"
    file.write_text(file.read_text().replace('instance = "a"', 'instance = "c"'))
    own = tmp_path / "b" / "dropq.toml"
    own.write_text(own.read_text() + f'[[peer]]\nname = "c"\nroot = "{tmp_path / "c"}"\n')
    Root(tmp_path / "c").queue("q").send(b"1")
    b = timed(Root(tmp_path / "b"), AT_ONCE).queue("q")
    with b.subscribe(max_backlog=None) as subscription:
        while (message := subscription.receive()) is not None:
            message.ack()
        with pytest.raises(OlderState, match="copied"):
            bridged(b, "c")
        a.send(b"2")
        assert bridged(b, "a") == 1


def test_an_older_dropq_passes_over_a_row_to_a_peer(pair: tuple[Queue, Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    a.send(b"x")
    give(a, b, monkeypatch)
    (row,) = (base(a) / ".dropq" / "transfers").iterdir()
    said = json.loads((row / "to.json").read_text())
    assert "root" not in said and (said["peer"], said["queue"]) == ("b", "q")


def test_the_graph_shows_the_peers_and_config_check_what_they_say_otherwise(
    tmp_path: Path, pair: tuple[Queue, Queue], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(peers, "PATIENCE", 600.0)
    graph = a.root.graph()
    assert [(edge.source, edge.to, edge.kind) for edge in graph.edges] == [("q", "root b", "bridge")]
    assert "what it wants" in graph.mermaid() and "root b" in graph.dot()
    command = ["--root", str(a.root.path), "config", "check"]
    assert main(command) == 0
    _otherwise(tmp_path)
    assert main(command) == 78
    assert "expiration is 60.0 here, and None there" in capsys.readouterr().out
    assert {each.kind for each in a.root.doctor() if each.kind.startswith("peer")} == {
        "peer",
        "peer-differs",
        "peer-unsynced",
    }
    (tmp_path / "b").rename(tmp_path / "away")
    assert {each.kind for each in a.root.doctor() if each.kind.startswith("peer")} == {"peer-away"}


# -- who looks ---------------------------------------------------------------------------------------------------------


def test_health_misses_a_bridge(pair: tuple[Queue, Queue]) -> None:
    _, b = pair
    with wanting(b):
        assert not any(reason.kind == "bridge-stopped" for reason in health(b).reasons)
        os.utime(base(b) / ".dropq" / "wanted" / LOOKED, (0, 0))
        assert any(reason.kind == "bridge-stopped" for reason in health(b).reasons)
        bridged(b, "a")
        assert not any(reason.kind == "bridge-stopped" for reason in health(b).reasons)


def test_a_bridge_that_may_take_nothing_looks(pair: tuple[Queue, Queue]) -> None:
    a, b = pair
    a.send(b"x")
    a.pause()
    with wanting(b):
        os.utime(base(b) / ".dropq" / "wanted" / LOOKED, (0, 0))
        with pytest.raises(Unavailable, match="paused"):
            bridged(b, "a")
        assert not any(reason.kind == "bridge-stopped" for reason in health(b).reasons)


@pytest.fixture
def command(pair: tuple[Queue, Queue]) -> list[str]:
    return ["--root", str(pair[1].root.path), "bridge"]


def test_the_command_takes_once_and_says_how_many(
    pair: tuple[Queue, Queue], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    a.send(b"x")
    with wanting(b):
        assert main([*command, "--once"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["q", "a", "1"] and "taken=1" in err
    assert main([*command, "--peer", "z=/nowhere"]) == 78
    assert main([*command, "--peer", f"a={a.root.path}x", "--once"]) == 75
    assert main([*command, "--proxied"]) == 2
    assert main([*command, "nosuch"]) == 66


def test_several_peers_are_served_each_by_a_process_of_its_own(tmp_path: Path) -> None:
    a, b, c = joined(tmp_path, "a", "b", "c")
    a.send(b"from a")
    c.send(b"from c")
    shutil.move(tmp_path / "c" / "dropq.toml", tmp_path / "kept")
    with b.subscribe() as subscription:
        wants = wanted_module.Wanting(b.context, "me", None)

        def has_come() -> bool:
            wants.say(1)
            assert main(["--root", str(b.root.path), "bridge", "--once"]) == 75  # c is away
            return bool(bodies(b))

        until(has_come, "the message of the peer that is there")
        message = subscription.receive()
        assert message is not None and message.body == b"from a"


# -- configuration -----------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a GroupLocalQueue without initial_owner": ({"replication_type": "GroupLocalQueue"}, "initial_owner"),
    "an initial_owner of a Queue": ({"initial_owner": "a"}, "only a GroupLocalQueue"),
    "a domain of a Queue": ({"group_local_queue_domain": "d"}, "only a GroupLocalQueue"),
    "a barrier": ({"barrier_expression": "JMSType = 'b'"}, "barrier_expression and replication_type"),
    "self-destruction": ({"self_destruct": True}, "self_destruct and replication_type"),
    "an unknown type": ({"replication_type": "Mirror"}, "LocalQueue"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_several_roots_cannot_share_is_refused(tmp_path: Path, what: str) -> None:
    options, said = WRONG[what]
    with pytest.raises(ConfigError, match=said):
        joined(tmp_path, "a", **options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[peer]]\nname = "b"\nroot = "/b"\n', "set instance"),
        ('instance = "a"\n[[peer]]\nname = "a"\nroot = "/b"\n', "names two roots"),
        ('instance = "a"\n[[peer]]\nname = "b"\nroot = "b"\n', "absolute path"),
        ('instance = "a"\n[[peer]]\nname = "b"\n', "name and root"),
        ('instance = "a/b"\n', "instance"),
    ],
)
def test_a_root_that_names_its_peers_wrongly_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "dropq.toml").write_text(f"format = 1\n{text}")
    with pytest.raises(ConfigError, match=said):
        Root(tmp_path)


def test_temporary_queues_and_subscriptions_stay_in_their_root(tmp_path: Path) -> None:
    (tmp_path / "dropq.toml").write_text('format = 1\ninstance = "a"\n[defaults]\nreplication_type = "Queue"\n')
    root = Root(tmp_path)
    root.create_topic("news")
    root.topic("news").subscribe("all", client_id="x")
    assert {queue.name: queue.context.config.replication_type for queue in root.queues()} == {
        "news": "LocalQueue",
        "news/all.x": "LocalQueue",
    }
    assert root.create_queue("q").context.config.replication_type == "Queue"
