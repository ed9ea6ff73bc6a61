"""A process dies before or after a call to the file system, or a call is refused; in short, `make torture` in long.

What verbs there are is found by looking, and what is checked afterwards is checked by plain system calls alone.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from helpers import Clock

from dropq import Message, NoSuchQueue, Queue, StorageError
from dropq.lifecycle.sending import Outlet
from dropq.staging.jobs import Job
from dropq.storage import reading
from dropq.storage.files import Storage
from torture import crashes, disks, faults
from torture.cases import Cases
from torture.table import NotRun, Options, Row
from torture.verbs import SETTINGS, VALUES, Verb, build, verbs


@pytest.mark.parametrize("part", [crashes, faults], ids=["crashes", "faults"])
def test_whatever_a_process_meets_each_message_is_whole_in_one_place(tmp_path: Path, part: object) -> None:
    seed = random.randrange(10**6)
    rows = list(part.run(Options(tmp_path, seed, long=False)))  # type: ignore[attr-defined]
    assert [f"seed {seed}: {line}" for row in rows for line in row.wrong] == []
    assert sum(row.kills + row.faults for row in rows) > 5
    assert [(row.lost, row.doubled) for row in rows if row.lost or row.doubled] == []


@pytest.mark.host
def test_a_disk_that_is_full_or_turned_read_only_loses_nothing(tmp_path: Path) -> None:
    try:
        rows = list(disks.run(Options(tmp_path, random.randrange(10**6), long=False)))
    except NotRun as reason:
        pytest.skip(str(reason))
    assert [line for row in rows for line in row.wrong] == []
    if missing := [f"{row.test}: {row.not_run}" for row in rows if row.not_run]:
        pytest.skip("; ".join(missing))


# -- what is called, and how -------------------------------------------------------------------------------------------


def test_every_verb_is_found_and_called_without_being_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shout(self: Queue, loudness: int) -> None:
        """Be a verb that comes later."""

    scene = build(tmp_path, SETTINGS[0], Clock())
    names = [str(verb) for verb in verbs(scene)]
    assert {"Queue.send", "Queue.send(delay=1h)", "Message.ack", "Root.delete_queue(force=True)", "work"} <= {*names}
    assert {"Job.commit", "requeue(to=far/away)", "purge(which=target)", "Message.body", "Journal.settle"} <= {*names}
    monkeypatch.setattr(Queue, "shout", shout, raising=False)
    with pytest.raises(LookupError, match=r"say in VALUES what `loudness` of Queue\.shout is"):
        verbs(scene)
    monkeypatch.setitem(VALUES, "loudness", lambda scene: [1, 2])
    assert {*map(str, verbs(scene))} - {*names} == {"Queue.shout", "Queue.shout(loudness=2)"}
    scene.queue.close()


# -- that it would be seen ---------------------------------------------------------------------------------------------


def tried(tmp_path: Path, host: type, method: str, *, fault: bool = False) -> Row:
    """What becomes of one verb that is crashed at every call, or refused."""
    cases = Cases(tmp_path, SETTINGS[0], Row("control"))
    verb = Verb(host, method, getattr(host, method))
    if fault:
        faults.refuse(cases, verb, random.Random(1))
    else:
        crashes.crash(cases, verb)
    return cases.row


@pytest.mark.long
def test_a_move_that_for_a_moment_makes_two_messages_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link_and_unlink(self: Storage, source: str, destination: str, *how: object) -> None:
        self.link(source, destination)
        self.unlink(source)

    monkeypatch.setattr(Storage, "move", link_and_unlink)
    row = tried(tmp_path, Message, "ack")
    assert row.doubled and "held" in row.wrong[0]


@pytest.mark.long
def test_a_move_that_for_a_moment_leaves_none_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: Storage, source: str, destination: str, *how: object) -> None:
        content = reading.read_body(source)
        self.unlink(source)
        self.write_new(destination, content)

    monkeypatch.setattr(Storage, "move", copy)
    assert tried(tmp_path, Message, "ack").lost


def test_a_send_that_writes_in_sight_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_in_target(self: Outlet, file: str, data: bytes, *, not_before: int = 0) -> None:
        self.context.storage.write_new(f"{self.context.layout.target}/{file}", data)

    monkeypatch.setattr(Outlet, "send_new", write_in_target)
    assert any("is not whole" in line for line in tried(tmp_path, Queue, "send").wrong)


def test_a_commit_of_a_part_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Job._write_manifest
    monkeypatch.setattr(Job, "_write_manifest", lambda self, listed, *more: write(self, listed[:1], *more))
    assert any("of new a part is sent" in line for line in tried(tmp_path, Job, "commit").wrong)


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), "raises OSError"),
        (StorageError("no; the message was sent, its source is there"), "and new is gone"),
        (NoSuchQueue("there is none"), "says NoSuchQueue"),
        (StorageError("no"), "does not tell what became of the message"),
        (None, "returned, and new is gone"),
    ],
)
def test_a_fault_that_is_told_wrongly_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    send_new = Outlet.send_new

    def wrongly(self: Outlet, file: str, data: bytes, *, not_before: int = 0) -> None:
        try:
            send_new(self, file, data, not_before=not_before)
        except StorageError:
            if error is not None:
                raise error from None

    monkeypatch.setattr(Outlet, "send_new", wrongly)
    row = tried(tmp_path, Queue, "send", fault=True)
    assert any(said in line for line in row.wrong), row.wrong
