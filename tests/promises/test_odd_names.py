"""No name that anybody can make ends a consumer, fills the log, or lies where nobody sees it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Make, base, drop, names_in, reopened, stand_in_for_os, take, until, where

import dropq
from dropq import Message, StorageError
from dropq.format.claims import split_claim
from dropq.storage.files import Storage
from dropq.worker.loop import Stop

#: Names that strangers can give to files in target/.
ODD = {
    "via": "4.id1.B.....JMS_dropq_viaS=" + "a" * 200,
    "copy": "4.id1.B.....JMS_dropq_copyS=" + "a" * 200,
    "lapsed": "4.id1.B.....JMS_dropq_lapsedS=" + "a" * 200,
    "a mark of each kind": "4.id1.B....."
    + "&".join(f"JMS_dropq_{mark}S=" + "a" * 32 for mark in ("copy", "lapsed", "meta", "via")),
    "meta": "4.id1.B.....JMS_dropq_metaS=" + "b" * 64 + "&JMS_dropq_copyS=" + "a" * 100,
    "a generated id and via": "4.1700000000000000-0000000001.B.....JMS_dropq_viaS=" + "a" * 190,
    "every number as large as it can be": "-2147483648." + "i" * 40 + ".B.9223372036854775807....."
    "JMSXDeliveryCountI=2147483646&JMS_dropq_cancelsI=2147483646&JMS_dropq_sinceL=9999999999999"
    "&JMS_dropq_copyS=c&JMS_dropq_metaS=0123456789abcdef",
    "delayed in target": "4.id1.B.....JMS_dropq_notBeforeL=9223372036854775807&JMS_dropq_copyS=" + "a" * 32,
    "a long coded id": "4." + "i" * 240 + ".B",
    "a long foreign name": "f" * 250,
    "no ascii": "ü" * 120,
    "no utf-8": os.fsdecode(b"\xff" * 200),
    "hidden behind a claim": "abc-0123456789-1,0,1~.hidden",
    "hidden behind what is no claim": "abc-0123456789-1,0,0~.hidden",
    "a dot behind a claim": "abc-0123456789-1,0,1~.",
    "two dots behind a claim": "abc-0123456789-1,0,1~..",
    "a line break": "a\nb",
    "two claims": "abc-0123456789-1,0,3~abc-0123456789-1,0,4~x",
    "a typed reply": "4.1700000000000000-0000000001.B...Q.x.y",
    "all counters at their end": "4.id.B.....JMS_dropq_hopsI=2147483647&JMSXDeliveryCountI=2147483647"
    "&JMS_dropq_cancelsI=2147483647",
    "since the end of time": "4.id.B.....JMS_dropq_sinceL=9223372036854775807",
    "an empty class": "4.id..9223372036854775807",
    "an ignored end": "4.1700000000000000-0000000001.B....tmp",
}

VERBS: dict[str, Callable[[Message], None]] = {
    "ack": Message.ack,
    "nack": lambda message: message.nack(delay=0),
    "reject": lambda message: message.reject("why"),
    "expire": Message.expire,
    "fail": lambda message: message.fail("why"),
    "release": lambda message: message.release(),
    "extend": lambda message: message.extend("5m"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_a_message_of_an_odd_name_goes_wherever_it_is_sent_and_is_seen_there(make: Make, name: str, verb: str) -> None:
    queue = make()
    drop(queue, name, b"x")
    with queue.subscribe(lease_period="1m") as subscription:
        for _ in range(3 if verb in ("nack", "release") else 1):
            message = subscription.receive()
            assert message is not None
            assert len(os.fsencode(message.file)) <= 255
            VERBS[verb](message)
        for held in subscription.held:
            held.ack()
    assert [body for bodies in where(queue).values() for body in bodies] == [b"x"]
    (state,) = where(queue)
    assert queue.counts()[state] == 1
    (seen,) = queue.browse(state)
    assert queue.find(seen.id).state == state
    assert [found for found in queue.fsck() if found.open and found.kind != "missing-sidecar"] == []


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_a_worker_takes_odd_names_as_any_other(make: Make, name: str) -> None:
    queue = make()
    drop(queue, name, b"odd")
    drop(queue, "even", b"even")
    assert dropq.work(queue, lambda message: None, until_empty=True).acked == 2
    assert where(queue) == {"processed": [b"even", b"odd"]}


# -- claims that a file system has no room for -----------------------------------------------------------------------


@pytest.fixture
def short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose names have 143 bytes at the most, as where they are encrypted."""
    rename, pathconf = os.rename, os.pathconf

    class Short:
        def __getattr__(self, name: str) -> Any:
            return self.rename if name == "rename" else getattr(os, name)

        def rename(self, source: str, destination: str) -> None:
            if len(os.fsencode(os.path.basename(destination))) > 143:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), source, None, destination)
            rename(source, destination)

    stand_in_for_os(monkeypatch, Short())
    monkeypatch.setattr(os, "pathconf", lambda path, what: 143 if what == "PC_NAME_MAX" else pathconf(path, what))


LONG = "long" * 32


def test_a_message_that_cannot_be_claimed_is_passed_over_by_a_worker_that_goes_on(
    make: Make, short_names: None, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    drop(queue, LONG, b"too long")
    done: list[bytes] = []
    stop = Stop()
    worker = threading.Thread(
        target=dropq.work, args=(queue, lambda message: done.append(message.body)), kwargs={"stop": stop}
    )
    worker.start()
    for number in range(20):
        drop(queue, f"m{number}", b"%d" % number)
        until(lambda: len(done) == number + 1 or not worker.is_alive(), "the worker to go on")  # noqa: B023
    stop.ask()
    worker.join(15)
    assert done == [b"%d" % number for number in range(20)]
    assert names_in(queue, "target") == [LONG]
    said = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(said) == 1
    assert LONG in said[0] and "dropq fsck q" in said[0]


def test_a_message_that_cannot_be_claimed_is_none_to_who_receives(make: Make, short_names: None) -> None:
    queue = make()
    drop(queue, LONG, b"too long")
    assert [queue.receive() for _ in range(3)] == [None] * 3
    assert dropq.work(queue, lambda message: None, until_empty=True).acked == 0
    assert where(queue) == {"target": [b"too long"]}


def test_no_sidecar_is_written_each_time_that_a_claim_is_refused(make: Make, short_names: None) -> None:
    queue = make()
    drop(queue, "4." + "i" * 90 + ".B.....pS=" + "v" * 90, b"too long")
    with queue.subscribe() as subscription:
        for _ in range(5):
            assert subscription.receive() is None
    assert len(os.listdir(f"{queue.root.path}/.dropq/meta")) == 1


def test_fsck_says_which_name_a_file_system_has_room_for(make: Make, short_names: None) -> None:
    queue = make()
    drop(queue, LONG, b"too long")
    (found,) = queue.fsck()
    assert (found.kind, found.level, found.open) == ("unclaimable-name", "warning", True)
    assert found.detail.endswith("`mv` it, within its folder, to a name of at most 90 bytes")
    target = base(queue) / "target"
    os.rename(target / LONG, target / LONG[:90])
    assert queue.fsck() == []
    take(queue).ack()


def test_another_refusal_is_still_told_where_nothing_else_can_be_claimed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send(b"x")

    def refused(self: Storage, source: str, destination: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

    with queue.subscribe() as subscription:
        with monkeypatch.context() as patched:
            patched.setattr(Storage, "rename", refused)
            with pytest.raises(StorageError, match="the message stays in target/"):
                subscription.receive()
        assert subscription.receive() is not None


# -- the log -------------------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


BAD = {
    "a bad property": "4.order-{}.B.....fooI=abc",
    "a bad expiration": "4.order-{}.B.soon",
    "a sidecar that is missing": "4.order-{}.B.....JMS_dropq_metaS=0123456789abcdef",
}


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_bad_names_are_not_warned_of_at_each_listing(make: Make, name: str, caplog: pytest.LogCaptureFixture) -> None:
    queue = make()
    for number in range(20):
        drop(queue, name.format(number), b"x")
    with queue.subscribe(filter="JMSType = 'mine'") as subscription:
        for _ in range(20):
            queue.send(b"x", type="mine")
            message = subscription.receive()
            assert message is not None
            message.ack()
            assert subscription.receive() is None
    queue.sweep()
    queue.stats()
    assert warnings(caplog) == []


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_bad_name_is_warned_of_once_where_its_message_is_received(
    make: Make, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    drop(queue, name.format(1), b"x")
    for _ in range(3):
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None
            assert (message.id, message.type) == ("order-1", None)
            os.rename(message.path, base(queue) / "target" / name.format(1))
    (said,) = warnings(caplog)
    assert name.format(1) in said


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_bad_name_is_warned_of_once_where_it_is_browsed(
    make: Make, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    drop(queue, name.format(1), b"x")
    for _ in range(3):
        assert [message.id for message in queue.browse()] == ["order-1"]
    (said,) = warnings(caplog)
    assert name.format(1) in said


def test_fsck_tells_which_part_of_a_name_cannot_be_read(make: Make) -> None:
    queue = make()
    drop(queue, "4.order-1.B.soon....fooI=abc", b"x")
    (found,) = queue.fsck()
    assert (found.kind, found.level) == ("bad-name", "info")
    assert "'soon' is not an expiration time" in found.detail and "property 'fooI=abc'" in found.detail


# -- coded names that end as ignored ones do -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["5.{}.T....tmp", "5.{}.T..part", "5.{}.T.....fileS=a.crc", "5.{}.T....tmp."])
@pytest.mark.parametrize("message_id", ["1700000000000000-0000000001", "order-1"])
def test_a_coded_name_is_a_message_whatever_it_ends_in(make: Make, name: str, message_id: str) -> None:
    queue = make(timing=FRESH)
    drop(queue, name.format(message_id), b"x")
    queue.send(b"y")
    assert queue.counts()["target"] == 2
    assert next(queue.browse()).id == message_id
    assert queue.stats()["target"].count == 2
    assert queue.fsck() == []
    held = take(queue)
    assert (held.id, held.body) == (message_id, b"x")
    assert queue.counts()["processing"] == 1
    held.nack(delay=0)
    take(queue).ack()
    assert queue.counts()["processed"] == 1
    assert where(queue) == {"target": [b"y"], "processed": [b"x"]}


def test_a_coded_name_is_a_message_also_where_a_pattern_is_of_any_other_form(make: Make) -> None:
    queue = make(ignore=["*draft*", "4.order.B....x", "?.a*"])
    for number, name in enumerate(("4.1700000000000000-0000000001.B....draft", "4.order.B....x", "4.a.B")):
        drop(queue, name, b"%d" % number)
    drop(queue, "a draft", b"ignored")
    assert queue.counts()["target"] == 3
    assert sorted(message.body for message in queue.browse()) == [b"0", b"1", b"2"]


def test_names_that_dropq_writes_end_in_no_dot_for_the_sake_of_ignored_ones(make: Make) -> None:
    queue = make()
    sent = queue.send(b"x", type="tmp")
    assert names_in(queue, "target") == [f"4.{sent.id}.B....tmp"]


def test_a_prefix_of_a_claim_does_not_make_a_message_of_an_ignored_file(make: Make) -> None:
    queue = make()
    drop(queue, "abc-0123456789-1,0,1~_SUCCESS", b"x")
    assert queue.receive() is None
    assert queue.counts()["target"] == 0
    assert [found.kind for found in queue.fsck()] == ["under-way"]
    assert reopened(queue).receive() is None


def test_what_a_claim_says_of_a_hidden_file_is_part_of_its_name(make: Make) -> None:
    queue = make()
    name = "abc-0123456789-1,0,1~.hidden"
    drop(queue, name, b"x")
    assert split_claim(name) == (None, name)
    take(queue).ack()
    assert names_in(queue, "processed") == [name]
    assert Path(queue.layout.processed, name).exists()
