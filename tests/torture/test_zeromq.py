"""A short storm over ZeroMQ, ends and crashes of servers, and what their judges object to."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from dropq import Message
from torture.account import body
from torture.table import Options, Row

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

from dropq.zmq import wire
from dropq.zmq.consumers import Consumers
from dropq.zmq.producers import Producers
from dropq.zmq.sockets import answered
from torture import zeromq, zeromq_crashes


@pytest.mark.long
def test_what_was_answered_is_there_once_whoever_dies_or_ends_over_zeromq(tmp_path: Path) -> None:
    storm, ends, strangers, crashes = zeromq.run(Options(tmp_path, seed=1, long=False))
    assert storm.wrong + ends.wrong + strangers.wrong + crashes.wrong == []
    assert strangers.good and strangers.cases
    assert storm.good and storm.cases and storm.kills
    assert ends.good and ends.cases and not ends.kills
    assert crashes.good and crashes.kills


# -- the judge of the storm --------------------------------------------------------------------------------------------


class Judged:
    """A storm in which nobody took part, and its notes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.storm = zeromq.Storm(folder, folder, seed=1)

    def wrong(self, notes: str, by: str = "produce-one.1") -> list[str]:
        """Return what the judge says of notes."""
        path = self.storm.notes / by
        path.write_text(notes)
        self.storm.judge(row := Row(""))
        path.unlink()
        return [line.removeprefix("the storm: ") for line in row.wrong]

    def stored(self, name: str) -> Message:
        """Store a message, and return it as a consumer has it."""
        self.storm.queue.send(body(name, 200))
        message = self.storm.queue.receive()
        assert message is not None
        return message


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """A storm in which nobody took part."""
    return Judged(tmp_path / "judged")


def test_the_judge_of_the_storm_sees_what_is_lost_came_late_or_was_not_acknowledged(judged: Judged) -> None:
    assert judged.wrong("try a.1\nsent a.1\n") == ["lost: a.1 (1)"]
    message = judged.stored("a.1")
    message.ack()
    archived = os.stat(message.path).st_ctime_ns // 1000
    good = f"try a.1\nsent a.1\ngot a.1 {archived} 500000 server-0\nack a.1 {archived} {archived + 500_000}\n"
    assert judged.wrong(good) == []
    assert "nobody acknowledged it" in judged.wrong("try a.1\nsent a.1\n")[0]
    assert "after it was archived" in judged.wrong(f"{good}got a.1 {archived + 1_000_000} 500000 server-0\n")[0]
    assert "came damaged" in judged.wrong(f"{good}damaged a.1\n")[0]
    judged.storm.queue.send(body("a.1", 200))
    assert "doubled: a.1" in judged.wrong(good)[0]


def test_the_judge_of_the_storm_sees_what_was_refused_and_is_there(judged: Judged) -> None:
    judged.stored("a.1").ack()
    assert "was refused: no" in judged.wrong("try b.1\nrefused b.1 no\n")[0]
    assert not [wrong for wrong in judged.wrong("refused id malformed message\n") if "refused" in wrong]
    assert "was refused, and is there" in judged.wrong(f"try a.1\nack a.1 1 1\nrefused a.1 {zeromq.NO_ROOM}\n")[0]


def test_the_judge_of_the_storm_sees_what_is_left_and_what_its_author_knows_as_stored(judged: Judged) -> None:
    working = Path(judged.storm.queue.layout.working, "draft")
    judged.stored("a.1").ack()
    shutil.copy(next(Path(judged.storm.queue.layout.processed).iterdir()), working)
    notes = "try a.1\nsent a.1\nack a.1 1 1\n"
    assert "was answered with 1, and lies in" in judged.wrong(notes)[0]
    working.write_bytes(body("b.1", 200))
    assert judged.wrong(notes) == []
    assert judged.storm.left == 1


def test_the_judge_of_the_storm_sees_a_consumer_that_holds_too_much(judged: Judged) -> None:
    judged.stored("a.1").ack()
    notes = "try a.1\nack a.1 1 1\n"
    out = [f"got a.1 {at} 500000 server-0\n" for at in range(zeromq.IN_FLIGHT)]
    assert judged.wrong(notes + "".join(out), by="consume-stall.1") == []
    later = [f"got a.1 {at + 500_000} 500000 server-0\n" for at in range(zeromq.IN_FLIGHT)]
    assert judged.wrong(notes + "".join(out + later), by="consume-stall.1") == []
    out.append(f"got a.1 {zeromq.IN_FLIGHT} 500000 server-0\n")
    assert f"held {zeromq.IN_FLIGHT + 1}" in judged.wrong(notes + "".join(out), by="consume-stall.1")[0]
    judged.storm.past.append(zeromq.Actor("server-0", 0, judged.storm.notes / "server-0.0", zeromq.IN_FLIGHT))
    assert judged.wrong(notes + "".join(out), by="consume-stall.1") == [], "the last is of another server"


@pytest.mark.parametrize(("lived", "due"), [(2_000_000, True), (500_000, False)])
def test_the_judge_of_the_storm_sees_an_answer_that_is_missing(judged: Judged, lived: int, due: bool) -> None:
    judged.stored("a.1").ack()
    now, storm = time.time_ns() // 1000, judged.storm
    notes = storm.notes / "produce-one.1"
    producer = zeromq.Actor("produce-one", 0, notes, now - 1, now + 10_000_000)
    server = zeromq.Actor("server-0", 0, storm.notes / "server-0.0", now - 9_000_000, now + lived)
    storm.past += [producer, server]
    said = judged.wrong("try a.1 server-0\nack a.1 1 1\n")
    assert ["has no answer" in line for line in said] == [True] * due


# -- the judge of crashes ----------------------------------------------------------------------------------------------


def crashed(folder: Path, name: str) -> Row:
    """Return what becomes of a case whose server dies at its last calls."""
    cases = zeromq_crashes.Cases(folder, zeromq_crashes.SETTINGS[0])
    cases.crash(next(case for case in zeromq_crashes.CASES if case.name == name), lambda moments: moments[-3:])
    return cases.row


def test_a_server_that_answers_before_it_stores_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Producers._store

    def answer_first(self: Producers) -> None:
        for asked in self._asked:
            answered(asked.peer, wire.stored(asked.id))
        self._socket.network.flush()
        time.sleep(0.05)  # a dying process sends nothing more
        store(self)

    monkeypatch.setattr(Producers, "_store", answer_first)
    row = crashed(tmp_path, "one is sent")
    assert row.lost
    assert "one.1 is gone, and may be target" in row.wrong[0]


def test_a_server_that_acknowledges_what_it_delivers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_out = Consumers._hand_out

    def ack_too(self: Consumers, message: Message) -> None:
        hand_out(self, message)
        message.ack()

    monkeypatch.setattr(Consumers, "_hand_out", ack_too)
    row = crashed(tmp_path, "one is delivered")
    assert any("one.1 is processed, and may be" in line for line in row.wrong)


def test_a_server_whose_keys_two_messages_can_have_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consumers, "_key", lambda self, message, delivered: message.id.encode())
    row = crashed(tmp_path, "two of one id are given back")
    assert any("2 messages have the keys" in line for line in row.wrong)
