"""What bears a bundle's id: its parts and its records, found, settled, requeued, replayed and shown by id and name."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forks import DIED, forked
from helpers import Clock, Make, Run, drop, first_and_long, make_queue, take
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torture.calls import Call, come_between

from dropq import LeaseLost, Queue, Root, StorageError
from dropq.format import names
from dropq.format.names import Name
from dropq.lifecycle import early_acks
from dropq.queue.message import Record
from dropq.records.formats import is_empty, pack
from dropq.upkeep import bulk, reassembly

ID = "1795383089375000-7523895424"


def put(queue: Queue, state: str, body: bytes, *, id: str = ID, type: str | None = "jsonl", **fields: Any) -> Path:
    """Put a file into a state, as a settlement by records does."""
    name = Name(id, type=type, copy=os.urandom(5).hex(), **fields)
    path = Path(queue.layout.folder(state), names.write(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path)


def named(queue: Queue, state: str = "target") -> list[Name]:
    """Return what the names in a state say, in order of delivery."""
    return [names.parse(message.name) for message in queue.browse(state)]


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    return [message.body for message in queue.browse(state)]


# -- settled by id -------------------------------------------------------------------------------------------------

BY_ID: dict[str, Callable[[Queue], object]] = {
    "ack": lambda queue: queue.ack(ID),
    "nack": lambda queue: queue.claimed(ID).nack(),
    "extend": lambda queue: queue.claimed(ID).extend("1m"),
    "release": lambda queue: queue.claimed(ID).release(),
}


def held(queue: Queue, count: int) -> list[str]:
    """Put so many parts into processing/, each claimed by another process; return their receipts."""
    receipts = []
    for number in range(1, count + 1):
        path = put(queue, "target", b"%d\n" % number, first=number)
        receipt = f"till-0123456789-{number},{2 * 10**12},1~{path.name}"
        path.rename(Path(queue.layout.processing, receipt))
        receipts.append(receipt)
    return receipts


@pytest.mark.parametrize("verb", BY_ID)
def test_an_id_that_two_held_parts_bear_settles_neither_and_names_their_receipts(make: Make, verb: str) -> None:
    queue = make()
    receipts = held(queue, 2)
    with pytest.raises(LeaseLost) as refused:
        BY_ID[verb](queue)
    assert all(receipt in str(refused.value) for receipt in receipts)
    assert "nothing was changed" in str(refused.value)
    assert sorted(os.listdir(queue.layout.processing)) == sorted(receipts)
    for receipt in receipts:
        queue.claimed(receipt).ack()
    assert queue.counts()["processed"] == 2


@pytest.mark.parametrize("verb", BY_ID)
def test_the_id_of_two_parts_that_this_queue_holds_itself_settles_neither(make: Make, verb: str) -> None:
    queue = make()
    for number in (1, 2):
        put(queue, "target", b"%d\n" % number, first=number)
    mine = [queue.receive(), queue.receive()]
    with pytest.raises(LeaseLost, match="settle each by its receipt"):
        BY_ID[verb](queue)
    assert all(message is not None and message.held for message in mine)


def test_an_id_that_one_held_part_bears_settles_it(make: Make) -> None:
    queue = make()
    held(queue, 1)
    assert queue.ack(ID)
    assert [name.first for name in named(queue, "processed")] == [1]


def test_an_id_that_two_waiting_parts_bear_settles_neither(make: Make) -> None:
    queue = make()
    for number in (1, 2):
        put(queue, "target", b"%d\n" % number, first=number)
    with pytest.raises(LeaseLost, match=r"2 parts of the bundle .* wait in target/"):
        queue.ack(ID)
    assert queue.counts()["target"] == 2


def test_an_ack_that_comes_early_passes_the_parts_of_a_bundle_over(make: Make) -> None:
    queue = make()
    put(queue, "target", b"1\n", first=1)
    assert not queue.ack(ID, defer=True)
    held(queue, 1)
    assert not queue.ack(ID, defer=True)
    assert early_acks.remembered(queue.layout) == {ID}
    (explained,) = queue.explain(state="target")
    assert explained.why == "ready"
    message = queue.receive()
    assert message is not None
    assert message.body == b"1\n"
    assert queue.counts()["processed"] == 0


def test_an_early_ack_that_two_held_copies_of_a_message_would_use_up_is_not_remembered(make: Make) -> None:
    queue = make()
    for number in (1, 2):
        name = f"till-0123456789-{number},{2 * 10**12},1~4.{ID}.B"
        Path(queue.layout.processing, name).write_bytes(b"1\n")
    with pytest.raises(LeaseLost, match="settle each by its receipt"):
        queue.ack(ID, defer=True)
    assert early_acks.remembered(queue.layout) == set()


def test_the_shell_names_the_receipts_of_the_parts_that_an_id_would_settle(run: Run, root: Root) -> None:
    queue = root.create_queue("orders", durability="none")
    receipts = held(queue, 2)
    for verb in ("ack", "nack", "fail", "reject", "extend"):
        refused = run(verb, "orders", ID)
        assert refused.code == 1
        assert all(receipt in refused.err for receipt in receipts)
    assert run("ack", "orders", *receipts).code == 0


# -- every file that bears the id ----------------------------------------------------------------------------------


def test_requeue_move_and_purge_by_an_id_take_every_part_that_bears_it(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    for number in (1, 4):
        put(queue, "error", b"%d\n" % number, first=number, delivery_count=3, cut=2, replayed=True)
    put(queue, "error", b"9\n", id=f"{ID}-9", record=9)
    assert [outcome.ok for outcome in queue.requeue([ID])] == [True, True]
    assert [(name.first, name.delivery_count, name.cut, name.replayed) for name in named(queue)] == [
        (1, 0, 0, False),
        (4, 0, 0, False),
    ]
    assert [outcome.ok for outcome in queue.move(other, [ID])] == [True, True]
    assert [name.first for name in named(other)] == [1, 4]
    assert [outcome.ok for outcome in other.purge([ID])] == [True, True]
    assert other.counts()["target"] == 0
    assert [name.record for name in named(queue, "error")] == [9]


def test_a_move_keeps_what_was_counted_before_a_cut_and_the_mark_of_a_replay(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    put(queue, "target", b"4\n", first=4, delivery_count=1, cut=2, replayed=True)
    queue.move(other, [ID])
    (name,) = named(other)
    assert (name.first, name.delivery_count, name.cut, name.replayed) == (4, 1, 2, True)


def test_a_replay_takes_every_archived_part_once_and_is_marked(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    for number in (1, 1, 4):
        put(queue, "processed", os.urandom(3).hex().encode(), first=number, cut=1)
    assert [outcome.ok for outcome in queue.replay(ids=[ID], to=other)] == [True, True, True]
    assert [(name.first, name.delivery_count, name.cut, name.replayed) for name in named(other)] == [
        (1, 1, 0, True),
        (1, 1, 0, True),
        (4, 1, 0, True),
    ]
    while message := other.receive():
        message.ack()
    again = other.replay()
    assert len(again) == 3
    while message := other.receive():
        message.ack()
    assert len(other.replay()) == 3, "a part that was replayed is replayed once, although it was archived twice"


def test_a_replay_of_a_whole_bundle_leaves_out_its_archived_parts(make: Make) -> None:
    queue = make()
    put(queue, "processed", b"1\n2\n", id=ID, records=2)
    put(queue, "processed", b"1\n", first=1)
    assert len(queue.replay()) == 1
    assert bodies(queue) == [b"1\n2\n"]


def test_a_replay_that_is_requeued_is_a_replay_no_more(make: Make) -> None:
    queue = make()
    put(queue, "processed", b"1\n", id=ID)
    queue.replay()
    message = queue.receive()
    assert message is not None
    message.reject("bad")
    assert [name.replayed for name in named(queue, "error")] == [True]
    queue.requeue()
    assert [name.replayed for name in named(queue)] == [False]


def test_copies_for_the_receivers_of_a_topic_begin_without_what_was_counted(root: Root) -> None:
    topic = root.create_topic("a", durability="none")
    audit = topic.create_subscription("audit", client_id="hq")
    put(topic.queue, "target", b"4\n", first=4, delivery_count=1, cut=2, replayed=True)
    topic.queue.sweep()
    (name,) = named(audit)
    assert (name.first, name.delivery_count, name.cut, name.replayed) == (4, 0, 0, False)


# -- what is counted -----------------------------------------------------------------------------------------------


def test_deliveries_before_a_cut_are_shown_and_filtered_and_no_limit_counts_them(make: Make) -> None:
    queue = make(max_deliveries=3)
    put(queue, "target", b"4\n", first=4, cut=2)
    assert [message.redelivered for message in queue.browse(filter="JMSXDeliveryCount = 3 AND JMSRedelivered")] == [
        True
    ]
    for delivery in (3, 4):
        message = queue.receive()
        assert message is not None
        assert (message.delivery_count, message.redelivered) == (delivery, True)
        message.nack()
    message = queue.receive()
    assert message is not None
    message.nack()
    assert [reason and reason["reason"] for reason in (one.reason for one in queue.browse("error"))] == [
        "max_deliveries"
    ]
    assert [name.first for name in named(queue, "error")] == [4]


# -- looking -------------------------------------------------------------------------------------------------------


def test_show_takes_every_part_that_bears_the_id_in_every_state(run: Run, root: Root) -> None:
    queue = root.create_queue("orders", durability="none")
    put(queue, "error", b"1\n", first=1)
    put(queue, "target", b"4\n", first=4)
    put(queue, "processed", b"2\n3\n", first=2)
    shown = [json.loads(line) for line in run("show", "orders", ID, "--json").out.splitlines()]
    assert sorted((one["state"], one["from"]) for one in shown) == [("error", 1), ("processed", 2), ("target", 4)]
    plain = run("show", "orders", ID).out.splitlines()
    assert sorted(line for line in plain if line.startswith("from")) == ["from\t1", "from\t2", "from\t4"]


def test_show_and_browse_tell_the_count_of_the_sender_and_which_record_it_was(run: Run, root: Root) -> None:
    queue = root.create_queue("orders", durability="none")
    put(queue, "target", b"1\n2\n", records=2)
    put(queue, "error", b"9\n", id=f"{ID}-9", record=9)
    (whole,) = [json.loads(line) for line in run("show", "orders", ID, "--json").out.splitlines()]
    assert (whole["records"], whole["from"], whole["record"]) == (2, None, None)
    (record,) = [json.loads(line) for line in run("show", "orders", f"{ID}-9", "--json").out.splitlines()]
    assert (record["records"], record["from"], record["record"]) == (None, None, 9)
    assert run("browse", "orders").out.split("\n")[0].split("\t")[-3:] == ["2", "", ""]
    assert run("browse", "orders", "--state", "error").out.split("\n")[0].split("\t")[-3:] == ["", "", "9"]


def test_explain_says_of_a_part_what_it_is(make: Make) -> None:
    queue = make()
    put(queue, "target", b"1\n", first=1)
    put(queue, "target", b"4\n", first=4, cut=2)
    put(queue, "target", b"9\n", id=f"{ID}-9", record=9)
    said = "\n".join(sorted(explanation.detail for explanation in queue.explain()))
    assert "it is what is left of a bundle, from record 1 on; more of the bundle: 2 in target/" in said
    assert "from record 4 on; it was cut in two, as a consumer died over it, and had been delivered 2 times" in said
    assert f"it was record 9 of the bundle {ID}; more of the bundle: 2 in target/" in said


@pytest.mark.parametrize("mark", ["JMS_dropq_firstI=-1", "JMS_dropq_firstI=x", "JMS_dropq_recordI=-7"])
def test_a_number_that_is_none_is_a_bad_property_and_the_message_is_no_part(make: Make, mark: str) -> None:
    queue = make()
    Path(queue.layout.target, f"4.{ID}.B.....{mark}").write_bytes(b"1\n")
    (message,) = queue.browse()
    assert (message.first_record, message.record_number) == (None, None)
    assert [finding.kind for finding in queue.fsck()] == ["bad-name"]
    assert queue.ack(ID)


def test_a_part_of_a_foreign_file_keeps_its_number_where_the_file_would_get_its_own_name(make: Make) -> None:
    queue = make()
    put(queue, "target", b"2\n", id="rows.txt", type=None, first=2)
    message = queue.receive()
    assert message is not None
    message.reject("bad")
    assert [(name.id, name.first) for name in named(queue, "error")] == [("rows.txt", 2)]


# -- put together --------------------------------------------------------------------------------------------------


def scattered(queue: Queue, state: str = "error") -> None:
    """Put a bundle of six records into a state: two parts of it, and two records that failed; nobody has record 3."""
    put(queue, state, b"1\n\n\n4\n", first=1, delivery_count=3, cancels=2, expiration=2 * 10**12, cut=1, priority=6)
    put(queue, state, b"6", first=6, delivery_count=3, priority=6)
    put(queue, state, b"5\n", id=f"{ID}-5", record=5, delivery_count=3, priority=6)
    put(queue, state, b"2\r\n", id=f"{ID}-2", record=2, delivery_count=3, priority=6)


WHOLE = b"1\n2\r\n\n4\n5\n6\n"


@pytest.mark.parametrize("state", ["error", "expired", "processed"])
def test_the_parts_and_records_of_a_bundle_are_put_together_by_their_numbers(make: Make, state: str) -> None:
    queue = make()
    scattered(queue, state)
    (outcome,) = queue.requeue([ID], state=state, whole=True)
    assert (outcome.id, outcome.ok, outcome.detail) == (ID, True, "requeued to q as one message of 4 parts")
    (name,) = named(queue)
    assert outcome.target == names.write(name)
    assert (name.id, name.type, name.priority, name.first, name.record) == (ID, "jsonl", 6, 1, 0)
    assert (name.delivery_count, name.cancels, name.cut, name.expiration) == (0, 0, 0, 0)
    assert name.copy
    assert name.since
    assert bodies(queue) == [WHOLE]
    assert queue.counts()[state] == 0
    assert os.listdir(queue.layout.reassembly) == []


def settle(record: Record, *, rejected: bool) -> None:
    if rejected:
        record.reject("bad")
    else:
        record.ack()


@pytest.mark.parametrize("state", ["error", "processed"])
def test_what_a_settlement_by_records_has_parted_is_put_together(make: Make, state: str) -> None:
    queue = make()
    id = queue.send(b"h\n1\n2\n3\n4\n5\n", type="csv").id
    message = queue.receive()
    assert message is not None
    for record in message.records():
        if record.number == 4:
            break
        settle(record, rejected=record.number == 2)
    message.nack()
    rest = queue.receive()
    assert rest is not None
    assert rest.first_record == 4
    for record in rest.records():
        settle(record, rejected=record.number == 4 and state == "error")
    queue.requeue([id], state=state, whole=True)
    (name,) = named(queue)
    first, body = {"error": (2, b"h\n2\n\n4\n"), "processed": (1, b"h\n1\n\n3\n4\n5\n")}[state]
    assert (name.id, name.first, bodies(queue)) == (id, first, [body])


def test_without_ids_each_bundle_is_put_together_and_all_else_is_requeued(make: Make) -> None:
    queue = make()
    other = "1795383089375001-7523895424"
    scattered(queue)
    put(queue, "error", b"b\n", id=other, first=2)
    put(queue, "error", b"a\n", id=other, first=1)
    put(queue, "error", b"alone\n", id="1795383089375002-7523895424", first=7)
    put(queue, "error", b"x", id="order-7")
    put(queue, "error", b"y", id="order-7")
    put(queue, "error", b"z", id="order-7", record=9)
    outcomes = queue.requeue(whole=True)
    assert all(outcome.ok for outcome in outcomes)
    assert sorted(bodies(queue)) == sorted([WHOLE, b"a\nb\n", b"alone\n", b"x", b"y", b"z"])
    assert queue.counts()["error"] == 0


def fail_bad(queue: Queue, body: bytes, name: str = "day.text") -> None:
    """Send a file, and let each record fail that is bad."""
    drop(queue, name, body)
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            settle(record, rejected=record.text.startswith("bad"))


@pytest.mark.parametrize("ids", [None, ["day.text"], ["day.text-3"]])
def test_records_of_two_files_of_one_name_are_not_put_together(make: Make, ids: list[str] | None) -> None:
    queue = make()
    fail_bad(queue, b"good\nbad 1\nbad\n")
    fail_bad(queue, b"good\ngood\nbad\nbad 2\n")
    assert all(outcome.ok for outcome in queue.requeue(ids, whole=True))
    if ids == ["day.text-3"]:
        assert bodies(queue) == [b"bad\n", b"bad\n"]
    else:
        assert sorted(bodies(queue)) == [b"bad\nbad 2\n", b"bad 1\nbad\n"]
        assert queue.counts()["error"] == 0


def test_files_of_one_name_that_were_requeued_in_one_millisecond_are_not_put_together(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, clock=Clock())
    for body in (b"1\n2\n", b"3\n4\n"):
        drop(queue, "day.text", body)
        take(queue).reject("no")
    queue.requeue()
    with queue.subscribe() as subscription:
        for record in subscription.records(timeout=0):
            settle(record, rejected=True)
    assert queue.counts()["error"] == 4
    queue.requeue(["day.text"], whole=True)
    assert sorted(bodies(queue)) == [b"1\n2\n", b"3\n4\n"]


def test_bundles_of_one_id_that_came_in_one_millisecond_are_not_put_together_however_often_they_come_back(
    make: Make,
) -> None:
    queue = make(redelivery_delay="0s")
    for body in (b"1\n2\n3\n", b"4\n5\n6\n"):
        put(queue, "target", body, id="day", since=1795383089375)
    for _ in range(2):
        for record in take(queue).records():
            record.nack("1h") if record.number == 2 else record.reject("no")
    for message in queue.browse("delayed"):
        os.rename(message.path, f"{queue.layout.target}/{message.file}")
    for _ in range(2):
        take(queue).nack(0)
        take(queue).reject("no")
    assert queue.counts()["error"] == 6
    assert all(outcome.ok for outcome in queue.requeue(["day"], whole=True))
    assert sorted(bodies(queue)) == [b"1\n2\n3\n", b"4\n5\n6\n"]


def test_records_of_a_file_that_a_selector_moved_here_are_put_together_however_often_it_was_settled(root: Root) -> None:
    start, queue = (root.create_queue(name, durability="none", redelivery_delay="0s") for name in ("start", "end"))
    start.add_selector("on", to="end", credit=5)
    put(start, "target", b"1\n2\n3\n", id="day.jsonl")
    assert start.route() == {"on": 1}
    for _ in range(3):
        message = take(queue)
        next(iter(message.records())).reject("no")
        message.release()
    assert queue.counts()["error"] == 3
    assert [outcome.ok for outcome in queue.requeue(["day.jsonl"], whole=True)] == [True]
    assert bodies(queue) == [b"1\n2\n3\n"]


def test_two_records_of_a_number_are_both_kept_unless_their_bundle_has_an_id_of_its_own(make: Make) -> None:
    queue = make()
    for _ in range(2):
        put(queue, "error", b"x\n", id="day-3", record=3, since=1795383089375)
    (outcome,) = queue.requeue(["day"], whole=True)
    assert not outcome.ok and "have a record of number 3 each" in outcome.detail
    assert bodies(queue, "error") == [b"x\n", b"x\n"]


def test_a_number_that_two_parts_have_is_there_once_if_both_say_the_same(make: Make) -> None:
    queue = make()
    put(queue, "error", b"1\n2\n", first=1)
    put(queue, "error", b"2\n3\n", first=2)
    assert queue.requeue([ID], whole=True)[0].ok
    assert bodies(queue) == [b"1\n2\n3\n"]


BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "records": ([{"body": b"1\n2\n", "first": 1}, {"body": b"x\n", "first": 2}], "different records of number 2"),
    "formats": (
        [{"body": b"1\n", "first": 1}, {"body": b"x\n", "first": 2, "type": "text"}],
        "is jsonl, and .* is text",
    ),
    "headers": (
        [{"body": b"a,b\n1,2\n", "first": 1, "type": "csv"}, {"body": b"a,c\n3,4\n", "first": 2, "type": "csv"}],
        "different headers",
    ),
    "several": (
        [{"body": b"1\n", "first": 1}, {"body": b"2\n3\n", "record": 2, "id": f"{ID}-2"}],
        "was one record, and has several now",
    ),
    "several that are alike, in two parts": (
        [{"body": b"x\n", "first": first, "record": 2, "id": f"{ID}-2"} for first in (2, 3)],
        "was one record, and has several now",
    ),
    "far apart": (
        [{"body": b"1\n", "first": 1}, {"body": b"2\n", "first": reassembly.MOST_EMPTY + 3}],
        "requeue it without --whole",
    ),
    "unreadable": (
        [{"body": b"\0\0\0\1x", "first": 1, "type": "frames"}, {"body": b"\0\0\0", "first": 2, "type": "frames"}],
        "record 2 at byte 0 is torn",
    ),
    "tables": (
        [{"body": b"1", "first": 1, "type": "parquet"}, {"body": b"2", "first": 2, "type": "parquet"}],
        "is a table and has no records",
    ),
}


@pytest.mark.parametrize("problem", BAD)
def test_parts_that_contradict_each_other_stay_as_they_are(make: Make, problem: str) -> None:
    queue = make()
    parts, says = BAD[problem]
    paths = [put(queue, "error", **part) for part in parts]
    before = {path: path.read_bytes() for path in paths}
    (outcome,) = queue.requeue([ID], whole=True)
    assert not outcome.ok
    (dry,) = bulk.requeue(queue.context, bulk.Selection(("error",), [ID], dry_run=True), whole=True)
    assert dry == outcome if problem in ("formats", "tables") else dry.ok, "a dry run reads no body"
    assert re.search(says, outcome.detail)
    assert outcome.detail.endswith("the parts stay as they are")
    assert {path: path.read_bytes() for path in Path(queue.layout.error).iterdir()} == before
    assert queue.counts()["target"] == 0
    assert left_in(queue.layout.reassembly) == []


def test_the_header_of_a_csv_is_kept_once_and_its_mark_and_frames_keep_their_bytes(make: Make) -> None:
    queue = make()
    head = b'\xef\xbb\xbfid,"a\nb"\r\n'
    put(queue, "error", head + b'1,"x\ny"\r\n', first=1, type="csv")
    put(queue, "error", head + b"3,z\r", id=f"{ID}-3", record=3, type="csv")
    assert queue.requeue([ID], whole=True)[0].ok
    assert bodies(queue) == [head + b'1,"x\ny"\r\n\n3,z\r\n']
    queue.purge()
    put(queue, "error", b"\0\0\0\2a\n\0\0\0\0", first=3, type="frames")
    put(queue, "error", b"\0\0\0\1b", first=5, type="frames")
    assert queue.requeue([ID], whole=True)[0].ok
    assert bodies(queue) == [b"\0\0\0\2a\n\0\0\0\0\0\0\0\1b"]
    assert [name.first for name in named(queue)] == [3]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.binary(max_size=5).map(lambda data: data.replace(b"\n", b"")), min_size=1, max_size=12),
    homes=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    body_format=st.sampled_from(["text", "jsonl", "frames"]),
)
def test_a_bundle_that_was_taken_apart_is_put_together_with_the_same_bytes(
    make: Make, records: list[bytes], homes: list[int], body_format: str
) -> None:
    queue = make()
    records = [b"" if is_empty(record) and body_format != "frames" else record for record in [b"first", *records]]
    homes = [0, *homes]
    for home in set(homes[: len(records)]) | {0, 1}:
        mine = [record if homes[at] == home else b"" for at, record in enumerate(records)]
        put(queue, "error", pack(body_format, mine, head=b""), first=1, type=body_format)
    assert queue.requeue([ID], whole=True)[0].ok
    (body,) = bodies(queue)
    last = max(at for at, record in enumerate(records) if record)
    assert body == pack(body_format, records[: last + 1], head=b"")


def test_a_dry_run_says_what_would_be_put_together(run: Run, root: Root) -> None:
    queue = root.create_queue("orders", durability="none")
    scattered(queue)
    ran = run("requeue", "orders", ID, "--whole", "--dry-run")
    assert ran.out.splitlines() == [f"{ID}\tok\twould be requeued to orders as one message of 4 parts"]
    assert queue.counts()["error"] == 4
    assert run("requeue", "orders", ID, "nothing", "--whole").code == 1
    assert bodies(queue) == [WHOLE]


@pytest.mark.parametrize("how", [["--to", "orders"], ["--to-origin"], ["--state", "processing"]], ids=" ".join)
def test_what_cannot_be_put_together_is_refused(run: Run, root: Root, how: list[str]) -> None:
    root.create_queue("orders", durability="none")
    assert run("requeue", "orders", ID, "--whole", *how).code == 2


def test_a_reason_goes_with_the_parts_and_stays_with_those_that_stay(make: Make) -> None:
    queue = make()
    for number in (1, 2):
        put(queue, "target", b"%d\n" % number, first=number)
        message = queue.receive()
        assert message is not None
        message.reject("bad")
    path = put(queue, "error", b"x\n", first=2)
    assert not queue.requeue([ID], whole=True)[0].ok
    path.unlink()
    assert [reason and reason["reason"] for reason in (one.reason for one in queue.browse("error"))] == ["rejected"] * 2
    assert queue.requeue([ID], whole=True)[0].ok
    assert os.listdir(f"{queue.layout.reasons}/error") == []


# -- a crash, and other processes, while parts are put together ------------------------------------------------------


def dying_at(queue: Queue, act: Callable[[], object], at: int, *, after: bool) -> bool:
    """Let a child act, and die before or after its call number `at` that changes something; return whether it did."""
    left = at

    def between(call: Call) -> Any:
        nonlocal left
        if call.changes:
            left -= 1
            if left < 0 and not after:
                os._exit(DIED)
        done = call.do()
        if call.changes and left < 0:
            os._exit(DIED)
        return done

    def die() -> None:
        come_between(between)
        act()

    code = forked(die)
    assert code in (0, DIED)
    return code == DIED


def records_of(queue: Queue) -> list[bytes]:
    """Return every record that lies in error/ or in target/, sorted."""
    return sorted(
        line for state in ("error", "target") for body in bodies(queue, state) for line in body.split() if line
    )


def left_in(folder: str) -> list[str]:
    """Return what is in the folder for parts, but for folders without parts and a sign of life, which stay a minute."""
    return [path.name for path in Path(folder).glob("*/*") if path.name != "..alive"]


def check(queue: Queue) -> None:
    assert records_of(queue) == [b"1", b"2", b"4", b"5", b"6"]
    assert not (queue.counts()["error"] and queue.counts()["target"])
    assert left_in(queue.layout.reassembly) == []


@pytest.mark.parametrize("durability", first_and_long(["full", "none"]))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.crashes
def test_a_crash_at_any_call_loses_and_doubles_no_record(make: Make, durability: str, after: bool) -> None:
    queue, at, fates = make(durability=durability), 0, set[str]()
    while True:
        scattered(queue)
        crashed = dying_at(queue, lambda: queue.requeue([ID], whole=True), at, after=after)
        queue.sweep()
        check(queue)
        fates.add("apart" if queue.counts()["error"] else "together")
        queue.purge(state="error")
        queue.purge(state="target")
        if not crashed:
            break
        at += 1
    assert fates == {"apart", "together"}
    assert at > 15


def test_parts_that_stay_after_the_whole_was_sent_are_seen(make: Make) -> None:
    queue = make()
    scattered(queue)
    with mock.patch.object(reassembly, "_remove_part", reassembly._move_back):
        queue.requeue([ID], whole=True)
    queue.sweep()
    with pytest.raises(AssertionError):
        check(queue)


def test_a_sweep_reports_what_it_cannot_move_back_and_the_next_one_moves_it(make: Make) -> None:
    queue = make()
    scattered(queue)
    with mock.patch.object(reassembly, "_write", side_effect=lambda *_: os._exit(DIED)):
        assert forked(lambda: queue.requeue([ID], whole=True)) == DIED
    away = Path(queue.layout.error).rename(Path(queue.layout.error).with_name("away"))
    assert queue.sweep().refused
    away.rename(queue.layout.error)
    assert queue.sweep().leftovers == 1
    check(queue)
    assert queue.counts()["error"] == 4


@pytest.mark.parametrize("first", ["draft", "whole"])
@pytest.mark.crashes
def test_a_crash_of_the_sweep_that_goes_on_loses_and_doubles_no_record(make: Make, first: str) -> None:
    queue, at = make(), 0
    crashed = True
    while crashed:
        scattered(queue)
        commit = reassembly._settle if first == "whole" else reassembly._write
        with mock.patch.object(reassembly, commit.__name__, side_effect=lambda *_: os._exit(DIED)):
            assert forked(lambda: queue.requeue([ID], whole=True)) == DIED
        crashed = dying_at(queue, queue.sweep, at, after=False)
        queue.sweep()
        check(queue)
        assert queue.counts()["target" if first == "whole" else "error"]
        queue.purge(state="error")
        queue.purge(state="target")
        at += 1
    assert at > 5


@pytest.mark.parametrize("error", first_and_long([errno.ENOSPC, errno.EIO]), ids=["full", "broken"])
def test_a_refused_call_loses_and_doubles_no_record(make: Make, error: int) -> None:
    queue, at, refused = make(), 0, True
    while refused:
        scattered(queue)
        refused = refusing(queue, at, error)
        queue.sweep()
        check(queue)
        queue.purge(state="error")
        queue.purge(state="target")
        at += 1
    assert at > 10


def test_a_lost_reply_loses_and_doubles_no_record(make: Make) -> None:
    queue, at, lost = make(), 0, True
    while lost:
        scattered(queue)
        lost = refusing(queue, at, errno.ENOENT, done=True)
        queue.sweep()
        check(queue)
        queue.purge(state="error")
        queue.purge(state="target")
        at += 1
    assert at > 5


def refusing(queue: Queue, at: int, error: int, *, done: bool = False) -> bool:
    """Let a child put parts together, and refuse its call number `at` that changes something.

    With `done`, the call is one that NFS sends again where its reply was lost: it was made, and is refused after that.
    """
    left, was_refused = at, 9  # what a child ends with that was refused a call

    def between(call: Call) -> Any:
        nonlocal left
        counts = call.name in ("rename", "unlink") if done else call.changes
        left -= counts
        if counts and left == -1:
            if done:
                call.do()
            raise OSError(error, os.strerror(error), *call.arguments[:1])
        return call.do()

    def put_together() -> None:
        come_between(between)
        queue.requeue([ID], whole=True)
        os._exit(was_refused if left < 0 else 0)

    code = forked(put_together)
    assert code in (0, was_refused)
    return code == was_refused


def test_a_sweep_leaves_alone_what_a_living_process_puts_together(make: Make) -> None:
    queue = make()
    scattered(queue)
    write = reassembly._write

    def swept(*args: Any) -> None:
        assert queue.counts()["error"] == 0
        assert queue.sweep().total == 0
        assert queue.counts()["error"] == 0
        write(*args)

    with mock.patch.object(reassembly, "_write", swept):
        assert queue.requeue([ID], whole=True)[0].ok
    assert bodies(queue) == [WHOLE]


def test_a_process_that_a_sweep_took_for_dead_changes_nothing(make: Make) -> None:
    queue = make()
    scattered(queue)
    write = reassembly._write

    def dropped(*args: Any) -> None:
        write(*args)
        with mock.patch.object(reassembly, "_may_live", return_value=False):
            queue.sweep()
        assert queue.counts()["error"] == 4

    with mock.patch.object(reassembly, "_write", dropped):
        (outcome,) = queue.requeue([ID], whole=True)
    assert not outcome.ok
    check(queue)
    assert queue.counts()["error"] == 4


def test_a_part_that_another_process_takes_first_keeps_the_others_apart(make: Make) -> None:
    queue = make()
    scattered(queue)
    take, taken = reassembly._take, list[str]()

    def late(context: Any, state: str, part: reassembly.Part, folder: str) -> None:
        if part.number == 5:
            taken.append(part.file)
            assert queue.requeue([f"{ID}-5"])[0].ok
        take(context, state, part, folder)

    with mock.patch.object(reassembly, "_take", late):
        (outcome,) = queue.requeue([ID], whole=True)
    assert not outcome.ok
    assert f"somebody else took {taken[0]} out of error/ first" in outcome.detail
    assert (queue.counts()["error"], queue.counts()["target"]) == (3, 1)
    assert records_of(queue) == [b"1", b"2", b"4", b"5", b"6"]


def test_two_at_once_and_a_sweep_that_takes_them_for_dead_lose_and_double_no_record(make: Make) -> None:
    queue = make()
    for _ in range(20):
        scattered(queue)
        with mock.patch.object(reassembly, "_may_live", return_value=False):
            acts = [lambda: list(queue.requeue([ID], whole=True))] * 2 + [queue.sweep]
            threads = [threading.Thread(target=act) for act in acts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            queue.sweep()
        assert records_of(queue) == [b"1", b"2", b"4", b"5", b"6"]
        queue.purge(state="error")
        queue.purge(state="target")


def test_what_is_together_waits_and_keeps_its_queue_while_its_parts_are_still_there(make: Make) -> None:
    queue = make()
    scattered(queue)
    with mock.patch.object(reassembly, "_settle", side_effect=lambda *_: os._exit(DIED)):
        assert forked(lambda: queue.requeue([ID], whole=True)) == DIED
    assert (queue.counts()["target"], bodies(queue)) == (1, [WHOLE])
    with pytest.raises(StorageError, match="1 in target"):
        queue.root.delete_queue("q")
    check(queue)


def test_a_folder_without_parts_or_a_sign_of_life_goes_after_a_minute(make: Make, clock: Clock) -> None:
    queue = make()
    folder = Path(queue.layout.reassembly, "error,0123456789abcdef")
    folder.mkdir(parents=True)
    assert queue.sweep().leftovers == 0 and folder.exists()
    clock.advance(61)
    assert queue.sweep().leftovers == 1 and not folder.exists()


# -- what the version before left, in a folder of its own -----------------------------------------------------------

#: What it wrote until it died, besides the parts that it had not removed, or moved back, yet.
OLDER = {"draft": b"1\n2", "whole": WHOLE, "dropped": b"1\n2"}


def half_joined(queue: Queue, mark: str, *, left: int = 4) -> Path:
    """Let parts lie as the version before left them when it died; `left` says how many are still in its folder."""
    scattered(queue)
    owner, name = "dcaa4fb584ef79ac", Name(ID, type="jsonl", first=1, since=1795685330710, copy="ffaa65d31f")
    folder = Path(queue.layout.joining, f"{owner},error~{names.write(name)}")
    folder.mkdir(parents=True)
    (folder.parent / owner).touch()  # its sign of life, which nobody locks any more
    (folder / f".{mark}").write_bytes(OLDER[mark])
    for number, part in enumerate(sorted(Path(queue.layout.error).iterdir())):
        if number < left:
            part.rename(folder / part.name)
        elif mark == "whole":
            part.unlink()
    return folder


@pytest.mark.parametrize("left", [4, 2, 0])
@pytest.mark.parametrize("mark", OLDER)
def test_what_the_version_before_left_goes_on_or_back(make: Make, mark: str, left: int) -> None:
    queue = make()
    folder = half_joined(queue, mark, left=left)
    queue.sweep()
    check(queue)
    assert bodies(queue) == ([WHOLE] if mark == "whole" else [])
    assert os.listdir(folder.parent) == os.listdir(queue.layout.reassembly) == []


@pytest.mark.parametrize("mark", first_and_long(OLDER))
def test_a_crash_over_what_the_version_before_left_loses_and_doubles_no_record(
    make: Make, clock: Clock, mark: str
) -> None:
    queue, at, crashed = make(), 0, True
    while crashed:
        half_joined(queue, mark)
        crashed = dying_at(queue, queue.sweep, at, after=False)
        queue.sweep()
        clock.advance(61)  # without its sign of life, a folder counts as that of the living for a minute
        queue.sweep()
        check(queue)
        assert os.listdir(queue.layout.joining) == []
        queue.purge(state="error")
        queue.purge(state="target")
        at += 1
    assert at > 5


def test_the_version_before_is_left_alone_while_it_lives_and_commits_nothing_once_it_was_taken_for_dead(
    make: Make,
) -> None:
    queue = make()
    folder = half_joined(queue, "draft")
    with (folder.parent / "dcaa4fb584ef79ac").open("rb") as sign:
        fcntl.flock(sign, fcntl.LOCK_EX)
        assert queue.sweep().total == 0 and len(os.listdir(folder)) == 5
    queue.sweep()
    with pytest.raises(FileNotFoundError):
        (folder / ".draft").rename(folder / ".whole")
    check(queue)


def test_what_the_version_before_put_together_keeps_its_queue(make: Make) -> None:
    queue = make()
    half_joined(queue, "whole")
    with pytest.raises(StorageError, match="1 in target"):
        queue.root.delete_queue("q")
    assert bodies(queue) == [WHOLE]


def test_many_records_are_put_together_with_few_files_open(make: Make) -> None:
    queue = make()
    for number in range(1, 301):
        put(queue, "error", b"%d\n" % number, id=f"{ID}-{number}", record=number)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, most[1]))
    try:
        assert queue.requeue([ID], whole=True)[0].ok
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert bodies(queue) == [b"".join(b"%d\n" % number for number in range(1, 301))]


def test_who_names_a_bundle_hears_of_its_records(root: Root) -> None:
    queue = root.create_queue("q")
    put(queue, "error", b"2\n", id=f"{ID}-2", record=2)
    put(queue, "error", b"5\n", id=f"{ID}-5", record=5)
    (outcome,) = queue.requeue([ID])
    assert not outcome.ok and outcome.detail.endswith(f"; 2 of its records are there, such as {ID}-2")
    (outcome,) = queue.requeue(["another"])
    assert outcome.detail == "no such message in error/ of queue q"
