"""What goes to a queue on another file system comes there once, whoever dies when, and however many carry it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from children import killed_at_each_call, unprivileged
from forks import DIED, ended, fork, forked
from helpers import FRESH, Clock, RecordingOs, archive, base, drop, files, first_and_long, health, take, timed, where
from torture.calls import Call, come_between
from torture.crashes import Dying, Moment

from dropq import Queue, Root, StorageError
from dropq.carrier import lists
from dropq.carrier.carriers import carrier_of
from dropq.cli import main as cli
from dropq.diagnosis.fsck import fsck
from dropq.format.layout import JOB_PREFIX
from dropq.lifecycle.queue_notes import scan
from dropq.lifecycle.transfers import in_transit, rows
from dropq.staging import jobs
from dropq.staging.jobs import Attempt, TransferJob
from dropq.storage import mounts, system_calls
from dropq.storage.files import Storage
from dropq.topics import subscriptions
from dropq.upkeep import bulk
from dropq.upkeep.sweep import QuickSweep


class Scene(NamedTuple):
    """Two queues, on two file systems."""

    here: Queue
    there: Queue

    def again(self) -> Scene:
        """The same queues, as another process opens them."""
        return Scene(
            *(
                Root(queue.root.path, clock=queue.root.context.clock).queue(queue.name)
                for queue in (self.here, self.there)
            )
        )

    @property
    def row(self) -> Path:
        """The folder of the only row."""
        (row,) = (base(self.here) / ".dropq" / "transfers").iterdir()
        return row

    @property
    def given(self) -> dict[str, bytes]:
        """What was given, and is still here."""
        folder = base(self.here) / ".dropq" / "transfers"
        found: dict[str, bytes] = {}
        for row in folder.iterdir() if folder.exists() else ():
            found |= files(row / "target")
        return found

    def arrived(self) -> list[bytes]:
        return where(self.there).get("target", [])


def build(here: Path, there: Path, **options: Any) -> Scene:
    for folder in (here, there):
        shutil.rmtree(folder, ignore_errors=True)
    roots = [timed(Root.create(folder, clock=Clock()), FRESH) for folder in (here, there)]
    options = {"durability": "none", "redelivery_delay": 0, **options}
    return Scene(roots[0].create_queue("here", **options), roots[1].create_queue("there", **options))


@pytest.fixture
def scene(tmp_path: Path, elsewhere: Path) -> Scene:
    return build(tmp_path / "root", elsewhere / "root")


def move(scene: Scene, **options: Any) -> list[bulk.Outcome]:
    return scene.here.move(scene.there, **options)


def give(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move all that waits, as a process does that dies before it carries anything."""
    with monkeypatch.context() as dying:
        dying.setattr(lists.Carrier, "run", lambda self: iter(()))
        move(scene)


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_a_message_keeps_all_that_a_move_keeps(scene: Scene) -> None:
    queue = scene.here
    sent = queue.send(
        b"body", priority=7, type="t", correlation_id="c", reply_to="r", expires_in=3600, properties={"n": 5, "s": "x"}
    )
    take(queue).nack()
    (name,) = files(base(queue) / "target")
    os.utime(base(queue) / "target" / name, ns=(10**18, 10**18))
    kept = ("id", "body", "priority", "type", "correlation_id", "reply_to", "expiration", "properties", "cancels")
    before = [getattr(message, key) for message in queue.browse() for key in kept]
    (outcome,) = move(scene)
    (after,) = scene.there.browse()
    assert [getattr(after, key) for key in kept] == before
    assert (after.id, after.delivery_count, after.redelivered) == (sent.id, 1, True)
    assert os.stat(after.path).st_mtime_ns == 10**18
    assert (outcome.ok, outcome.target) == (True, after.file)
    assert where(queue) == {} and scene.given == {}


def test_a_message_that_is_requeued_there_begins_anew(scene: Scene) -> None:
    scene.here.send(b"body", expires_in=3600)
    take(scene.here).reject("bad")
    (outcome,) = bulk.requeue(scene.here.context, bulk.Selection(("error",)), to=scene.there.context)
    (after,) = scene.there.browse()
    assert outcome.ok and outcome.detail == "requeued to there"
    assert (after.delivery_count, after.redelivered, after.expiration) == (0, False, None)
    assert where(scene.here) == {} and not any((base(scene.here) / ".dropq/reasons/error").iterdir())


def test_a_foreign_file_keeps_its_name_and_its_place_in_the_order(scene: Scene) -> None:
    for name in ("b.csv", "a.csv", "größe ~ 100 %.csv"):
        drop(scene.here, name, name.encode())
    order = [message.id for message in scene.here.browse()]
    move(scene)
    assert [message.id for message in scene.there.browse()] == order
    while (message := scene.there.receive()) is not None:
        message.ack()
    assert sorted(files(base(scene.there) / "processed")) == sorted(order)


@pytest.mark.parametrize("at", [0, 1])
def test_what_is_written_to_before_its_list_is_sent_goes_with_a_later_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    for name in ("a.csv", "b.csv"):
        drop(scene.here, name, b"1\n")
    real, copied = Storage.copy, list[str]()

    def copy(self: Storage, source: str, destination: str, **options: Any) -> os.stat_result:
        was = real(self, source, destination, **options)
        copied.append(source)
        if len(copied) == 2:  # the first was copied a while ago
            with open(copied[at], "ab") as body:
                body.write(b"2\n")
        return was

    monkeypatch.setattr(Storage, "copy", copy)
    outcomes = move(scene)
    assert len(outcomes) == 2
    assert scene.arrived() == [b"1\n"]
    assert list(scene.given.values()) == [b"1\n2\n"]
    assert where(scene.here) == {}
    scene.here.sweep()
    assert scene.arrived() == [b"1\n", b"1\n2\n"]
    assert scene.given == {}
    assert len(copied) == 3


def test_metadata_that_fits_no_name_comes_along_to_another_root(scene: Scene) -> None:
    properties = {"a": "x" * 200, "b": "ü" * 100}
    scene.here.send(b"1", properties=properties, correlation_id="c" * 300)
    drop(scene.here, "long" * 60, b"2")
    move(scene)
    shutil.rmtree(scene.here.root.path)
    there = Root(scene.there.root.path).queue("there")
    first, second = sorted(there.browse(), key=lambda message: message.body)
    assert (first.properties, first.correlation_id) == (properties, "c" * 300)
    assert second.id == "long" * 60


def test_two_messages_of_one_id_both_arrive(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for body in (b"1", b"2"):
        scene.here.send(body, message_id="same")
        give(scene, monkeypatch)
    scene.here.send(b"3")
    (name,) = files(base(scene.here) / "target")
    shutil.copy(base(scene.here) / "target" / name, base(scene.here) / "working" / name)
    give(scene, monkeypatch)
    os.rename(base(scene.here) / "working" / name, base(scene.here) / "target" / name)
    give(scene, monkeypatch)
    assert len(scene.given) == 4
    scene.here.sweep()
    assert scene.arrived() == [b"1", b"2", b"3", b"3"]
    shutil.copy(base(scene.there) / "target" / name, base(scene.here) / "target" / name)
    move(scene)
    assert scene.arrived() == [b"1", b"2", b"3", b"3", b"3"]


def test_many_messages_go_in_lists_and_the_ledger_there_keeps_the_last_for_good(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "LIST_LENGTH", 3)
    monkeypatch.setattr(bulk, "LIST_LENGTH", 4)
    scene.here.send_many([b"%d" % number for number in range(10)])
    assert [outcome.ok for outcome in move(scene)] == [True] * 10
    assert scene.arrived() == [b"%d" % number for number in range(10)]
    ledger = base(scene.there) / ".dropq" / "ledger"
    assert [path.name for path in ledger.iterdir()] == [f"transfer.{scene.row.name}.5.json"]
    assert sorted(path.name for path in scene.row.iterdir()) == ["5.json", "target", "to.json"]
    clock = scene.there.root.context.clock
    assert isinstance(clock, Clock)
    clock.advance(400 * 86_400)
    scene.there.sweep()
    assert len(list(ledger.iterdir())) == 1


def test_a_queue_of_the_same_root_may_lie_on_another_file_system(tmp_path: Path, elsewhere: Path) -> None:
    scene = build(tmp_path / "root", elsewhere / "root")
    (tmp_path / "root" / "linked").symlink_to(scene.there.layout.home)
    scene.here.send(b"body", properties={"a": "x" * 200})
    (outcome,) = scene.here.move(scene.here.root.queue("linked"))
    assert outcome.ok
    assert json.loads((scene.row / "to.json").read_text())["root"] == ""
    (message,) = scene.here.root.queue("linked").browse()
    assert (message.body, message.properties) == (b"body", {"a": "x" * 200})
    (tmp_path / "root").rename(tmp_path / "moved")
    moved = Root(tmp_path / "moved")
    moved.queue("here").send(b"again")
    assert moved.queue("here").move(moved.queue("linked"))[0].ok
    assert len(list((tmp_path / "moved/here/.dropq/transfers").iterdir())) == 1


def test_the_command_moves_to_a_queue_on_another_file_system(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = build(tmp_path / "root", elsewhere / "root")
    (tmp_path / "root" / "linked").symlink_to(scene.there.layout.home)
    scene.here.send_many([b"1", b"2"])
    take(scene.here).fail("bad")
    root = ["--root", str(tmp_path / "root")]
    assert cli.main([*root, "move", "here", "linked", "--all", "--yes"]) == 0
    assert cli.main([*root, "requeue", "here", "--all", "--to", "linked", "--yes"]) == 0
    assert scene.arrived() == [b"1", b"2"]


# -- whoever dies ------------------------------------------------------------------------------------------------------

BODIES = [b"foreign", b"long", b"plain"]


def filled(here: Path, there: Path, **options: Any) -> Scene:
    scene = build(here, there, **options)
    scene.here.send(b"plain", priority=5)
    scene.here.send(b"long", properties={"a": "x" * 250})
    drop(scene.here, "foreign.csv", b"foreign")
    return scene


def judged(scene: Scene, bodies: list[bytes], *, sweeps: int = 1) -> None:
    """Check what a crash left, then let so many sweeps and another move do the rest, and check that."""
    handed_out = Counter([*where(scene.here).get("target", []), *scene.arrived()])
    assert max(handed_out.values(), default=1) == 1, f"handed to two: {handed_out}"
    committed = [
        body
        for folder in (base(scene.there) / "working").glob(".*/*/")
        if (folder.parent / "manifest.json").is_file()
        for body in files(folder).values()
    ]
    lost = set(bodies) - {*handed_out, *scene.given.values(), *committed}
    assert not lost, f"lost: {lost}"
    again = scene.again()
    for _ in range(sweeps - 1):
        again.here.sweep()
    assert again.here.sweep().refused == again.there.sweep().refused == 0
    assert again.given == {}
    assert all(outcome.ok for outcome in move(again))
    assert (scene.arrived(), where(scene.here)) == (sorted(bodies), {})
    assert [path.name for path in scene.row.iterdir() if path.suffix == ".json"] != []
    assert [finding for finding in fsck(again.here.root.context, "here") if finding.open] == []


@pytest.mark.parametrize("setting", first_and_long(["full", "lists of one", "without a rename that replaces nothing"]))
@pytest.mark.crashes
def test_a_crash_anywhere_in_a_move_loses_and_doubles_nothing(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power is cut
    if setting == "lists of one":
        monkeypatch.setattr(lists, "LIST_LENGTH", 1)
    if setting.startswith("without"):

        def missing(source: str, *_: object) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

        monkeypatch.setattr(system_calls, "rename_noreplace", missing)

    def built() -> Scene:
        return filled(tmp_path / "root", elsewhere / "root", durability="full" if setting == "full" else "none")

    # A manifest whose name was reserved, and did not come, is dropped by the first sweep.
    sweeps = 2 if setting.startswith("without") else 1
    for scene in killed_at_each_call(built, lambda scene: move(scene.again())):
        judged(scene, BODIES, sweeps=sweeps)


@pytest.mark.crashes
def test_a_crash_anywhere_in_a_sweep_that_carries_loses_and_doubles_nothing(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built() -> Scene:
        scene = filled(tmp_path / "root", elsewhere / "root")
        give(scene, monkeypatch)
        return scene

    for scene in killed_at_each_call(built, lambda scene: scene.again().here.sweep()):
        judged(scene, BODIES)


# -- however many carry ------------------------------------------------------------------------------------------------


class Between:
    """Counts calls; at one of them, lets others do their work first."""

    def __init__(self, at: int | None, others: Callable[[], object]) -> None:
        self.calls = 0
        self._at = at
        self._others = others
        self._busy = False

    def __call__(self, call: Call) -> object:
        if not self._busy:
            if self.calls == self._at:
                self._busy = True
                self._others()
                self._busy = False
            self.calls += 1
        return call.do()


def in_between(at: int | None, act: Callable[[], object], others: Callable[[], object]) -> int:
    """Let a child act, and others at a call of it; return how many calls it made."""
    reads, writes = os.pipe()

    def acting() -> None:
        between = Between(at, others)
        come_between(between)
        act()
        os.write(writes, str(between.calls).encode())

    child = fork(acting)
    os.close(writes)
    with open(reads) as pipe:
        calls = pipe.read()
    assert ended(child) == 0
    return int(calls)


@pytest.mark.parametrize(
    "others", first_and_long(["a sweep", "a sweep after each of three moves", "a consumer there, too"])
)
@pytest.mark.crashes
def test_a_carrier_that_was_stopped_anywhere_does_no_harm_when_it_wakes_up(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    seed = random.randrange(10**6)
    more = [b"more %d" % number for number in range(3)] if others.startswith("a sweep after") else []

    def built() -> Scene:
        scene = filled(tmp_path / "root", elsewhere / "root")
        give(scene, monkeypatch)
        return scene

    scene = built()

    def meanwhile() -> None:
        again = scene.again()
        again.here.sweep()
        for body in more:
            again.here.send(body)
            assert all(outcome.ok for outcome in move(again))
        if others == "a consumer there, too":
            while (message := again.there.receive()) is not None:
                message.ack()

    calls = in_between(None, scene.again().here.sweep, meanwhile)
    assert calls > 100
    left = 40
    for at in random.Random(seed).sample(range(calls), calls):
        scene = built()
        if in_between(at, scene.again().here.sweep, meanwhile) <= at:
            continue  # what the others learned of folders saved the sweep its last calls
        left -= 1
        scene.again().there.sweep()
        came = Counter([*scene.arrived(), *where(scene.there).get("processed", [])])
        assert came == Counter([*BODIES, *more]), f"seed {seed}, call {at}"
        assert (scene.given, where(scene.here)) == ({}, {}), f"seed {seed}, call {at}"
        if not left:
            break
    assert not left, "the others came too seldom"


def test_a_late_carrier_that_writes_an_old_list_again_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is renamed away once it is done could be written again, with other messages, and called sent."""
    for number in range(3):
        scene.here.send(b"%d" % number)
        move(scene)
    scene.here.send(b"new")
    give(scene, monkeypatch)
    (given,) = scene.given
    old = {"format": 1, "list": "0" * 16, "given": [given]}
    (scene.row / "2.json").write_text(json.dumps(old))
    scene.here.sweep()
    assert (scene.arrived(), scene.given) == ([b"0", b"1", b"2", b"new"], {})
    assert sorted(path.name for path in scene.row.glob("?.json")) == ["4.json"]


@pytest.mark.crashes
def test_processes_that_carry_at_once_and_are_killed_lose_and_double_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "LIST_LENGTH", 7)
    bodies = [b"%03d" % number for number in range(120)]
    scene.here.send_many(bodies)
    give(scene, monkeypatch)

    def dying(calls: int) -> None:
        come_between(Dying(Moment(calls)))
        scene.again().here.sweep()

    for _ in range(12):
        children = [fork(partial(dying, random.randrange(20, 400))) for _ in range(3)]
        assert {ended(child) for child in children} <= {0, DIED}
    again = scene.again()
    again.here.sweep()
    again.there.sweep()
    assert (scene.arrived(), scene.given) == (bodies, {})


# -- scripts -----------------------------------------------------------------------------------------------------------


def test_what_a_script_takes_back_before_it_is_copied_is_not_carried(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send_many([b"0", b"1", b"2"])
    give(scene, monkeypatch)
    taken = next(name for name, body in scene.given.items() if body == b"1")
    copy = lists.Carrier._copy

    def taking(self: lists.Carrier, *args: Any) -> Any:
        os.rename(f"{self.given}/{taken}", tmp_path / taken)
        return copy(self, *args)

    with monkeypatch.context() as script:
        script.setattr(lists.Carrier, "_copy", taking)
        scene.here.sweep()
    assert (scene.arrived(), scene.given) == ([b"0", b"2"], {})
    os.rename(tmp_path / taken, base(scene.here) / "target" / taken)
    assert [message.body for message in scene.here.browse()] == [b"1"]
    move(scene)
    assert scene.arrived() == [b"0", b"1", b"2"]


def test_what_a_script_takes_after_the_copy_and_puts_back_after_the_commit_is_not_removed(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send_many([b"0", b"1", b"2"])
    give(scene, monkeypatch)
    taken = next(name for name, body in scene.given.items() if body == b"1")
    copy, note = lists.Carrier._copy, TransferJob.sent_note

    def taking(self: lists.Carrier, *args: Any) -> Any:
        copies = copy(self, *args)
        if not (tmp_path / taken).exists():
            os.rename(f"{self.given}/{taken}", tmp_path / taken)
        return copies

    def putting_back(self: TransferJob) -> Any:
        with monkeypatch.context() as once:
            once.setattr(lists.Carrier, "_copy", copy)
        if (tmp_path / taken).exists():
            os.rename(tmp_path / taken, scene.row / "target" / taken)
            monkeypatch.setattr(lists.Carrier, "_copy", copy)
        return note(self)

    monkeypatch.setattr(lists.Carrier, "_copy", taking)
    monkeypatch.setattr(TransferJob, "sent_note", putting_back)
    scene.here.sweep()
    assert (scene.arrived(), scene.given) == ([b"0", b"1", b"2"], {})


def test_a_list_whose_messages_were_all_taken_does_not_stop_the_next(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send(b"taken")
    give(scene, monkeypatch)
    copy = lists.Carrier._copy

    def taking(self: lists.Carrier, *args: Any) -> Any:
        for name in os.listdir(self.given):
            os.rename(f"{self.given}/{name}", tmp_path / name)
        return copy(self, *args)

    with monkeypatch.context() as script:
        script.setattr(lists.Carrier, "_copy", taking)
        scene.here.sweep()
    scene.here.send(b"next")
    assert move(scene)[0].ok
    assert scene.arrived() == [b"next"]


def test_what_a_script_moves_into_a_row_is_carried(scene: Scene) -> None:
    scene.here.send(b"1")
    move(scene)
    drop(scene.here, "a.csv", b"2")
    os.rename(base(scene.here) / "target" / "a.csv", scene.row / "target" / "a.csv")
    (scene.row / "target" / "b.csv.tmp").write_bytes(b"half")
    scene.here.sweep()
    assert sorted(message.id for message in scene.there.browse())[1] == "a.csv"
    assert scene.arrived() == [b"1", b"2"]
    assert list(scene.given) == ["b.csv.tmp"]


# -- what cannot be carried --------------------------------------------------------------------------------------------


def test_messages_wait_in_sight_while_the_other_queue_is_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.here.send(b"0")
    move(scene)
    home = Path(scene.there.layout.home)
    scene.here.send(b"1")
    give(scene, monkeypatch)
    home.rename(f"{home}.away")
    goal = f"{scene.there.root.path}/there"
    assert scene.here.in_transit() == {goal: 1}
    assert scene.here.sweep().refused == 1
    (explained,) = scene.here.explain()
    assert (explained.why, explained.message.state, explained.message.body) == ("transit", "in-transit", b"1")
    assert goal in explained.detail
    (note,) = health(scene.here).notes
    assert note.kind == "in-transit" and "the last try: no queue 'there' in" in note.message
    root = ["--root", str(scene.here.root.path)]
    capsys.readouterr()
    assert cli.main([*root, "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["in_transit"] == {goal: 1}
    assert cli.main([*root, "delete", "here", "--dry-run"]) == 1
    with pytest.raises(StorageError, match=f"1 in transit to {goal}"):
        scene.here.root.delete_queue("here")
    clock = scene.here.root.context.clock
    assert isinstance(clock, Clock)
    clock.advance(2 * 86_400)
    assert [reason.kind for reason in health(scene.here).reasons] == ["unfinished-move"]
    (found,) = (finding for finding in fsck(scene.here.root.context, "here") if finding.open)
    assert found.kind == "unfinished-move" and "no queue 'there' in" in found.detail
    Path(f"{home}.away").rename(home)
    assert scene.here.sweep().carried == 1
    assert scene.arrived() == [b"0", b"1"]
    assert health(scene.here).healthy and scene.here.in_transit() == {}
    assert not (scene.row / "refused.json").exists()


def test_why_nothing_is_carried_is_said_also_where_it_cannot_be_noted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.here.send(b"0")
    give(scene, monkeypatch)
    there = scene.there.root.path
    there.rename(there.with_name("away"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")

    with monkeypatch.context() as broken:
        broken.setattr(Storage, "write_small", full)
        assert scene.here.sweep().refused == 1
    assert f"no root at {there}" in caplog.text
    there.with_name("away").rename(there)
    assert scene.here.sweep().carried == 1


def test_the_sidecar_of_a_given_message_counts_as_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.here.send(b"body", properties={"a": "x" * 250})
    give(scene, monkeypatch)
    (sidecar,) = (scene.here.root.path / ".dropq" / "meta").iterdir()
    assert scan(str(scene.here.root.path)).references == {sidecar.stem}


def test_another_queue_of_the_name_gets_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.here.send(b"given")
    give(scene, monkeypatch)
    scene.there.root.delete_queue("there")
    new = scene.there.root.create_queue("there", durability="none")
    assert scene.again().here.sweep().refused == 1
    assert (where(new), list(scene.given.values())) == ({}, [b"given"])
    scene.here.send(b"moved")
    assert scene.again().here.move(Root(new.root.path).queue("there"))[0].ok
    assert where(new) == {"target": [b"moved"]}


def copied(scene: Scene, folder: Path) -> Queue:
    """The queue in a copy of its root."""
    shutil.copytree(scene.here.root.path, folder, symlinks=True)
    return Root(folder).queue("here")


def die_before_sending(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mover die once it has written a list."""
    with monkeypatch.context() as dying:
        dying.setattr(lists.Carrier, "_send", lambda *_: os._exit(DIED))
        assert forked(lambda: Root(queue.root.path).queue(queue.name).sweep()) == DIED


@pytest.mark.parametrize("lists_behind", [1, 2])
def test_a_copy_of_a_root_that_is_behind_gives_nothing_until_its_row_is_ended(
    scene: Scene, tmp_path: Path, lists_behind: int
) -> None:
    scene.here.send(b"first")
    move(scene)
    scene.here.send(b"second")
    copy = copied(scene, tmp_path / "copy")
    for number in range(lists_behind):
        scene.here.send(b"%d" % number)
        move(scene)
    came = scene.arrived()
    copy.send(b"of the copy")
    outcomes = copy.move(scene.there)
    assert {outcome.ok for outcome in outcomes} == {False}
    said = f"is 1 here, and {1 + lists_behind} in {scene.there.layout.home}. Nothing is given"
    assert said in outcomes[0].detail
    assert (where(copy)["target"], scene.arrived()) == ([b"of the copy", b"second"], came)
    assert [said in reason.message for reason in health(copy).reasons if reason.kind == "older-state"] == [True]
    assert [said in each.detail for each in fsck(copy.root.context, "here") if each.kind == "older-state"] == [True]
    (row,) = (base(copy) / ".dropq" / "transfers").iterdir()
    row.rename(row.with_name(f"{row.name}.ended"))
    take(copy).ack()  # which the other queue has already
    assert [outcome.ok for outcome in copy.move(scene.there)] == [True]
    assert scene.arrived() == sorted([*came, b"of the copy"])
    assert health(copy).healthy


def test_a_queue_restored_from_before_its_first_move_gives_nothing(scene: Scene, tmp_path: Path) -> None:
    scene.here.send(b"sent")
    backup = copied(scene, tmp_path / "backup")
    move(scene)
    while (message := scene.there.receive()) is not None:
        message.ack()
    (outcome,) = backup.move(scene.there)
    said = f"the last list of row {scene.row.name} is 0 here, and 1 in {scene.there.layout.home}"
    assert not outcome.ok and said in outcome.detail
    assert (scene.arrived(), where(backup), backup.in_transit()) == ([], {"target": [b"sent"]}, {})
    assert [said in reason.message for reason in health(backup).reasons] == [True]
    take(backup).ack()
    (row,) = (base(backup) / ".dropq" / "transfers").iterdir()
    row.rename(row.with_name(f"{row.name}.ended"))
    backup.send(b"new")
    assert [outcome.ok for outcome in backup.move(scene.there)] == [True]
    assert scene.arrived() == [b"new"]


def test_a_list_that_is_committed_there_and_not_in_the_ledger_counts(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send(b"sent")
    backup = copied(scene, tmp_path / "backup")
    with monkeypatch.context() as dying:
        dying.setattr(jobs, "finish", lambda *_, **__: os._exit(DIED))
        assert forked(lambda: move(scene)) == DIED
    assert not list((base(scene.there) / ".dropq" / "ledger").glob("transfer*"))
    (outcome,) = backup.move(scene.there)
    assert not outcome.ok and "is 0 here, and 1 in" in outcome.detail
    assert where(backup) == {"target": [b"sent"]}


def test_an_older_state_that_had_given_before_carries_nothing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send(b"0")
    move(scene)
    scene.here.send(b"1")
    give(scene, monkeypatch)
    backup = copied(scene, tmp_path / "backup")
    for body in (b"2", b"3"):
        scene.here.send(body)
        move(scene)
    came = scene.arrived()
    assert (backup.sweep().carried, scene.arrived()) == (0, came)
    assert [reason.kind for reason in health(backup).reasons] == ["older-state"]
    (explained,) = backup.explain()
    assert "the last try" in explained.detail and "is 1 here, and 3 in" in explained.detail


def test_of_two_copies_that_wrote_a_list_of_one_number_the_second_is_refused(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send(b"first")
    move(scene)
    copy = copied(scene, tmp_path / "copy")
    copy.send(b"of the copy")
    give(Scene(copy, scene.there), monkeypatch)
    scene.here.send(b"second")
    with monkeypatch.context() as late:
        settle = lists.Carrier._settle

        def overtaking(self: lists.Carrier, listed: lists.List) -> int:
            if listed.number == 2:
                late.setattr(lists.Carrier, "_settle", settle)
                move(scene)
            return settle(self, listed)

        late.setattr(lists.Carrier, "_settle", overtaking)
        assert copy.sweep().refused == 1
    assert scene.arrived() == [b"first", b"second"]
    (row,) = (base(copy) / ".dropq" / "transfers").iterdir()
    assert list(files(row / "target").values()) == [b"of the copy"]


def test_a_copy_of_a_root_finds_its_own_list_sent_by_the_original(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send(b"body")
    give(scene, monkeypatch)
    die_before_sending(scene.here, monkeypatch)
    copy = copied(scene, tmp_path / "copy")
    assert scene.here.sweep().carried == 1
    assert (copy.sweep().refused, copy.in_transit()) == (0, {})
    assert scene.arrived() == [b"body"]


@pytest.mark.parametrize(("damaged", "content"), [("to.json", "{"), ("to.json", '{"format": 1}'), ("1.json", "{")])
def test_a_damaged_file_of_a_row_is_reported_and_nothing_is_lost(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, damaged: str, content: str
) -> None:
    scene.here.send(b"0")
    move(scene)
    scene.here.send(b"1")
    give(scene, monkeypatch)
    (scene.row / damaged).write_text(content)
    again = scene.again().here
    assert again.sweep().carried == 0
    assert list(scene.given.values()) == [b"1"]
    found = [finding for finding in fsck(again.root.context, "here") if finding.open]
    assert [(finding.kind, Path(finding.path).name) for finding in found] == [("damaged-transfer", damaged)]


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "closed", "text", "closed job"])
def test_a_list_of_nobody_that_cannot_be_read_keeps_nothing_back(tmp_path: Path, elsewhere: Path, kind: str) -> None:
    def attempt() -> None:
        scene = build(tmp_path / "here", elsewhere / "there")
        row = f"transfer.{'ab' * 8}.1"
        path = base(scene.there) / ".dropq/ledger" / f"{row}.json"
        path.parent.mkdir(exist_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(path)
        elif kind == "closed job":
            (base(scene.there) / "working" / f"{JOB_PREFIX}{row}").mkdir(mode=0)
        else:
            path.write_text("x")
            path.chmod(0 if kind == "closed" else 0o644)
        scene.here.send(b"body")
        move(scene)
        assert scene.arrived() == [b"body"]
        if kind != "closed job":
            found = fsck(scene.there.root.context, "there")
            assert [Path(each.path) for each in found if each.kind == "damaged-list"] == [path]

    unprivileged(attempt)


def test_a_message_that_this_user_may_not_read_keeps_no_other_back(scene: Scene) -> None:
    scene.here.send_many([b"0", b"1"])
    (name, _), _ = files(base(scene.here) / "target").items()
    (base(scene.here) / "target" / name).chmod(0)

    def moving() -> list[tuple[bool, str]]:
        return [(outcome.ok, outcome.detail) for outcome in move(scene.again())]

    outcomes = unprivileged(moving)
    assert sorted(ok for ok, _ in outcomes) == [False, True]
    assert any("this user may not read it" in detail for _, detail in outcomes)
    (given,) = os.listdir(scene.row / "target")
    assert len(scene.arrived()) == 1
    (scene.row / "target" / given).chmod(0o644)
    assert scene.here.sweep().carried == 1


def test_a_disk_that_is_full_keeps_the_messages_here(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.here.send_many([b"0", b"1"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    with monkeypatch.context() as broken:
        broken.setattr("dropq.storage.files.Storage.copy", full)
        outcomes = move(scene)
    assert [outcome.ok for outcome in outcomes] == [False, False]
    assert "No space left" in outcomes[0].detail
    assert len(scene.given) == 2 and os.listdir(base(scene.there) / "working") == []
    assert scene.here.sweep().carried == 2


def test_one_message_that_cannot_be_read_keeps_no_other_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.here.send_many([b"0", b"1", b"2"])
    give(scene, monkeypatch)
    copy, access = Storage.copy, os.access
    closed = sorted(os.listdir(scene.row / "target"))[1]

    def unreadable(self: Storage, source: str, *args: Any, **options: Any) -> Any:
        if source.endswith(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), source)
        return copy(self, source, *args, **options)

    with monkeypatch.context() as other_user:
        other_user.setattr(Storage, "copy", unreadable)
        # It was listed by a user who could read it.
        other_user.setattr(lists.Carrier, "_waiting", lambda self: sorted(os.listdir(scene.row / "target")))
        other_user.setattr(os, "access", lambda path, mode: not path.endswith(closed) and access(path, mode))
        carrier = carrier_of(next(rows(scene.here.context.layout)), scene.here.context)
        assert next(carrier.run()) == 2
    assert len(scene.arrived()) == 2 and list(scene.given) == [closed]
    scene.here.sweep()
    assert scene.arrived() == [b"0", b"1", b"2"]


def test_a_carrier_that_fails_leaves_the_copies_of_another_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.here.send_many([b"0", b"1"])
    give(scene, monkeypatch)
    finish = Attempt.finish

    def meanwhile(self: Attempt) -> Any:
        monkeypatch.undo()
        with monkeypatch.context() as broken:
            broken.setattr(Attempt, "finish", refused)
            assert scene.again().here.sweep().refused == 1
        return finish(self)

    def refused(self: Attempt) -> Any:
        raise StorageError("no")

    monkeypatch.setattr(Attempt, "finish", meanwhile)
    assert scene.here.sweep().carried == 2
    assert scene.arrived() == [b"0", b"1"]


def test_a_queue_that_takes_the_place_of_another_meanwhile_gets_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.here.send(b"given")
    give(scene, monkeypatch)
    (given,) = scene.given
    home = Path(scene.there.layout.home)
    attempt = TransferJob.attempt

    def late(self: TransferJob, label: str) -> Any:
        home.rename(home.with_name("there2"))
        Root(home.parent).create_queue("there")
        Path(self.folder).mkdir()
        return attempt(self, label)

    monkeypatch.setattr(TransferJob, "attempt", late)
    assert scene.again().here.sweep().refused == 1
    assert where(Root(home.parent).queue("there")) == {}
    assert list(scene.given) == [given]


def test_what_is_listed_was_given_durably(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = build(scene.here.root.path, scene.there.root.path, durability="full")
    scene.here.send(b"first")
    move(scene)
    (scene.row / "target" / "byhand").write_bytes(b"by hand")
    recorder = RecordingOs().record(monkeypatch)
    scene.here.sweep()
    calls = [" ".join(call) for call in recorder.calls]
    given = next(number for number, call in enumerate(calls) if call.startswith("rename") and "byhand " in call)
    synced = [number for number, call in enumerate(calls) if call == f"fsync {scene.row}/target"]
    listed = next(number for number, call in enumerate(calls) if call.startswith("rename") and "2.json" in call)
    assert any(given < number < listed for number in synced)


@pytest.mark.parametrize("damage", ["its to.json is cut off", "its folder has another name"])
def test_a_queue_with_messages_in_a_row_that_nobody_can_use_is_not_deleted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    scene.here.send_many([b"0", b"1"])
    give(scene, monkeypatch)
    row = scene.row
    if damage.startswith("its to.json"):
        (row / "to.json").write_bytes(b"{")
    else:
        row = row.rename(row.with_name(f"{row.name}.old"))
    assert scene.here.in_transit() == {"?": 2}
    with pytest.raises(StorageError, match=r"2 in transit to \?"):
        scene.here.root.delete_queue("here")
    assert len(files(row / "target")) == 2
    assert "damaged-transfer" in [finding.kind for finding in fsck(scene.here.root.context, "here")]


def test_a_subscription_with_messages_on_their_way_is_not_removed(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = build(tmp_path / "root", elsewhere / "root")
    topic = scene.here.root.create_topic("news", durability="none")
    subscription = topic.create_subscription("s", client_id="c")
    topic.publish(b"a")
    with monkeypatch.context() as dying:
        dying.setattr(lists.Carrier, "run", lambda self: iter(()))
        subscription.move(scene.there)
    with pytest.raises(StorageError, match="1 on the way to"):
        topic.unsubscribe("s", client_id="c")
    assert subscription.in_transit() == {f"{elsewhere}/root/there": 1}
    with monkeypatch.context() as late:
        late.setattr(subscriptions, "in_transit", nothing_at_first(in_transit))
        with pytest.raises(StorageError, match="nothing was removed"):
            topic.unsubscribe("s", client_id="c")
    subscription.sweep()
    assert scene.arrived() == [b"a"]
    topic.unsubscribe("s", client_id="c")


def nothing_at_first(look: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
    """Let the first look find nothing, as a message comes only after it."""
    seen: list[object] = []

    def looked(layout: Any) -> dict[str, int]:
        seen.append(layout)
        return look(layout) if len(seen) > 1 else {}

    return looked


# -- who looks at another root, and where its path leads ---------------------------------------------------------------


#: What looks at a path, or opens it.
LOOKS = ("stat", "lstat", "open", "scandir", "listdir", "access", "readlink", "rename", "mkdir", "statvfs")


def touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the paths below a folder that this process looks at from now on."""
    seen = list[str]()

    def looking(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def look(path: Any = ".", *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(str(folder)):
                seen.append(f"{name} {os.fsdecode(path)}")
            return real(path, *args, **options)

        return look

    for name in LOOKS:
        monkeypatch.setattr(os, name, looking(name))
    return seen


def test_only_a_sweep_by_hand_looks_at_another_root(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.here.send(b"left")
    give(scene, monkeypatch)
    clock = scene.here.root.context.clock
    assert isinstance(clock, Clock)
    clock.advance(60)
    root = timed(Root(scene.here.root.path, clock=clock), replace(FRESH, first_upkeep=0))
    queue = root.queue("here")
    with monkeypatch.context() as looking:
        seen = touched(scene.there.root.path, looking)
        assert queue.receive() is None
        assert queue.route() == {}
        for sweep in (QuickSweep(queue.context), QuickSweep(queue.context, routes=False)):
            sweep.run(idle=True)
        health(queue)
        list(queue.explain())
        assert cli.main(["--root", str(root.path), "ls", "--json"]) == 0
        assert cli.main(["--root", str(root.path), "fsck"]) in (0, 1)
        assert cli.main(["--root", str(root.path), "graph"]) == 0
        assert seen == []
        assert list(scene.given.values()) == [b"left"]
        queue.sweep()
        assert seen != []
    assert scene.arrived() == [b"left"]


def test_a_consumer_carries_to_another_disk_of_its_own_root_what_a_dead_mover_left(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    root = timed(Root.create(tmp_path / "root", clock=clock), replace(FRESH, first_upkeep=0))
    home = Path(root.create_queue("there").layout.home)
    shutil.move(home, elsewhere / "there")
    home.symlink_to(elsewhere / "there")
    scene = Scene(root.create_queue("here"), root.queue("there"))
    scene.here.send(b"left")
    give(scene, monkeypatch)
    clock.advance(60)
    assert scene.here.receive() is None
    assert scene.arrived() == [b"left"]


def on_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "host", lambda: name)


def clone(scene: Scene) -> None:
    """Put a clone of the other root in its place, as another host has it there."""
    there = scene.there.root.path
    shutil.copytree(there, there.with_name("clone"), symlinks=True)
    there.rename(there.with_name("original"))
    there.with_name("clone").rename(there)


def test_what_another_host_gave_is_carried_only_by_who_names_the_row(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_host("one", monkeypatch)
    scene.here.send(b"given on one")
    give(scene, monkeypatch)
    row = scene.row
    on_host("two", monkeypatch)
    report = scene.here.sweep()
    assert (report.carried, report.refused, scene.arrived()) == (0, 0, [])
    assert "host one wrote row" in caplog.text
    (explained,) = scene.here.explain()
    assert f"`dropq sweep here --row {row.name}`" in explained.detail
    assert [f"--row {row.name}" in note.message for note in health(scene.here).notes] == [True]
    scene.here.send(b"of two")
    assert [outcome.ok for outcome in move(scene)] == [True]
    assert (scene.arrived(), list(files(row / "target").values())) == ([b"of two"], [b"given on one"])
    root = ["--root", str(scene.here.root.path)]
    assert cli.main([*root, "sweep", "--row", row.name]) == 2
    assert cli.main([*root, "sweep", "here", "--row", "0" * 16]) == 1
    assert cli.main([*root, "sweep", "here", "--row", row.name]) == 0
    assert scene.arrived() == [b"given on one", b"of two"]


def test_a_clone_of_the_other_root_gets_nothing_that_the_other_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host("one", monkeypatch)
    scene.here.send(b"0")
    move(scene)
    scene.here.send(b"1")
    with monkeypatch.context() as dying:
        dying.setattr(lists.Carrier, "_settle", lambda self, listed: os._exit(DIED))
        assert forked(lambda: move(scene)) == DIED
    clone(scene)
    on_host("two", monkeypatch)
    scene.here.sweep()
    assert [message.body for message in Root(scene.there.root.path).queue("there").browse()] == [b"0"]
    assert list(scene.given.values()) == [b"1"]


def test_a_row_of_an_older_dropq_is_carried_by_name_and_gets_nothing_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.here.send(b"given")
    give(scene, monkeypatch)
    row = scene.row
    said = json.loads((row / "to.json").read_text())
    (row / "to.json").write_text(json.dumps({key: said[key] for key in ("format", "root", "queue", "mark")}))
    assert scene.here.sweep().refused == 1
    assert f"so does `dropq sweep here --row {row.name}`" in caplog.text
    scene.here.send(b"new")
    assert [outcome.ok for outcome in move(scene)] == [True]
    assert scene.arrived() == [b"new"]
    assert scene.here.sweep(row=row.name).carried == 1
    assert scene.arrived() == [b"given", b"new"]


def test_a_row_that_was_copied_from_another_queue_carries_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.here.send(b"given")
    give(scene, monkeypatch)
    other = scene.here.root.create_queue("other", durability="none")
    shutil.copytree(scene.row, base(other) / ".dropq" / "transfers" / scene.row.name)
    assert (other.sweep().refused, scene.arrived()) == (1, [])
    assert "was copied from another queue" in caplog.text
    assert scene.here.sweep().carried == 1


def test_nothing_is_written_to_another_root_at_the_path(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.here.send(b"given")
    give(scene, monkeypatch)
    there = scene.there.root.path
    there.rename(there.with_name("original"))
    Root.create(there).create_queue("there")
    before = sorted((str(path), path.lstat().st_ctime_ns) for path in there.rglob("*"))
    assert scene.here.sweep().refused == 1
    assert sorted((str(path), path.lstat().st_ctime_ns) for path in there.rglob("*")) == before
    assert list(scene.given.values()) == [b"given"]


# -- how durably -------------------------------------------------------------------------------------------------------


def test_lists_and_copies_are_durable_before_what_depends_on_them(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = build(tmp_path / "root", elsewhere / "root", durability="full").again()
    archive(scene.there, b"opens it")
    scene.here.send(b"body")
    recorder = RecordingOs().record(monkeypatch)
    move(scene)
    calls = [" ".join(call) for call in recorder.calls]

    def first(start: str, end: str = "") -> int:
        return next(number for number, call in enumerate(calls) if call.startswith(start) and call.endswith(end))

    def last(start: str, end: str = "") -> int:
        return max(number for number, call in enumerate(calls) if call.startswith(start) and call.endswith(end))

    row, there = str(scene.row), str(base(scene.there))
    order = [
        first(f"fsync {row}/target"),
        first("rename", f"{row}/1.json"),
        first(f"fsync {row}", row.rpartition("/")[2]),
        first("open", ".B"),
        first("rename", "/manifest.json"),
        first(f"fsync {there}/target"),
        last(f"fsync {there}/.dropq/ledger"),
        first(f"unlink {row}/target/"),
    ]
    assert order == sorted(order), calls
