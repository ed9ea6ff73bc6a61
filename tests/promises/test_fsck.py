"""fsck finds what does not belong, sets aside what is not a message, and never deletes anything."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from children import unprivileged
from forks import die_after
from helpers import Clock, base, drop, make_queue, reopened, until

from dropq import NoSuchQueue, Queue, Root
from dropq.diagnosis import fsck as fsck_module
from dropq.diagnosis.fsck import fsck_root, queues
from dropq.diagnosis.fsck_checks import UNDER_WAY
from dropq.diagnosis.fsck_kinds import KINDS, Finding
from dropq.format.layout import FOLDERS
from dropq.lifecycle.context import RootContext
from dropq.lifecycle.decision import Decision
from dropq.staging import jobs
from dropq.storage import reading, system_calls
from dropq.storage.files import Storage
from dropq.upkeep import deletion
from dropq.upkeep.queues import create_temporary

DAY = 86_400
HEX = "0123456789ab"

Plant = Callable[[Queue], Path]


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Queue:
    return make_queue(tmp_path / "root", clock=clock)


def examined(queue: Queue, *, repair: bool = False) -> list[Finding]:
    """What is found in a root and its queue."""
    again = reopened(queue)
    return [*fsck_root(again.root.context, repair=repair), *again.fsck(repair=repair)]


def kinds(found: list[Finding]) -> list[str]:
    return [finding.kind for finding in found]


def contents(folder: Path) -> dict[int, str]:
    """Everything below a folder, but logs, by its inode: what it is, and its content; where it lies does not matter."""
    found = {}
    for path in folder.rglob("*"):
        if path.suffix == ".jsonl":
            continue  # a repair is told there
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            readable = os.access(path, os.R_OK)
            said = hashlib.sha256(path.read_bytes()).hexdigest() if readable else f"{status.st_size} bytes"
        else:
            said = os.readlink(path) if path.is_symlink() else str(stat.S_IFMT(status.st_mode))
        found[status.st_ino] = said
    return found


# -- each kind, and how it comes about -------------------------------------------------------------------------


def write(path: Path, body: bytes = b"", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    path.chmod(mode)
    return path


def written_after_the_ack(queue: Queue) -> Path:
    path = Path(queue.layout.processed, "a.csv")
    path.write_bytes(b"body")
    return path


def target(queue: Queue, name: str, body: bytes = b"body") -> Path:
    return write(base(queue) / "target" / name, body)


def processing(queue: Queue, name: str) -> Path:
    return write(base(queue) / "processing" / name, b"held")


def staged_folder(queue: Queue) -> Path:
    """The folder of a commit whose holder is gone."""
    folder = base(queue) / ".dropq/staged" / f"aaaaaaaaaa-1.{secrets.token_hex(3)},unlink~4.x.B"
    folder.parent.mkdir(exist_ok=True)
    return folder


def staged_by_the_dead(queue: Queue) -> Path:
    return write(staged_folder(queue) / "0,error~4.x-1.B").parent


def committed_bundle(queue: Queue) -> Path:
    folder = staged_by_the_dead(queue)
    write(folder / "whole", b"1\n2\n")
    return folder


def linked_commit(queue: Queue) -> Path:
    folder = write(Path(queue.root.path) / ".elsewhere" / "whole").parent
    (link := staged_folder(queue)).symlink_to(folder)
    return link


def in_staged(name: str, make: Callable[[Path], object] = Path.touch) -> Plant:
    """Something in the folder of a commit."""

    def plant(queue: Queue) -> Path:
        path = staged_folder(queue) / name
        path.parent.mkdir()
        make(path)
        return path

    return plant


def half_joined(queue: Queue) -> Path:
    """A folder in which the parts of a bundle were to be put together."""
    folder = base(queue) / ".dropq/reassembly" / f"error,{secrets.token_hex(8)}"
    write(folder / "4.x.B.....JMS_dropq_firstI=2", b"2\n")
    return write(folder / ".draft").parent


def in_reassembly(name: str, make: Callable[[Path], object] = Path.touch) -> Plant:
    def plant(queue: Queue) -> Path:
        make(path := half_joined(queue) / name)
        return path

    return plant


def link_to_a_file(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def broken_toml(queue: Queue) -> Path:
    return write(base(queue) / "queue.toml", b"lease_period = \n")


def unknown_group(queue: Queue) -> Path:
    return write(base(queue) / "queue.toml", b'group = "no-such-group-here"\n')


def no_folder(queue: Queue) -> Path:
    path = base(queue) / "expired"
    path.rmdir()
    return path


def no_target(queue: Queue) -> Path:
    path = base(queue) / "target"
    path.rmdir()
    return path


def file_for_folder(queue: Queue) -> Path:
    return write(no_folder(queue))


def dangling_folder(queue: Queue) -> Path:
    path = no_folder(queue)
    path.symlink_to("/no/such/volume")
    return path


def linked_private(queue: Queue) -> Path:
    path = base(queue) / ".dropq" / "ledger"
    path.rmdir()
    path.symlink_to("/no/such/volume")
    return path


def symlink(queue: Queue) -> Path:
    path = base(queue) / "target" / "link"
    path.symlink_to("/etc/hostname")
    return path


def directory(queue: Queue) -> Path:
    write(base(queue) / "processed" / "folder" / "inside", b"kept")
    return base(queue) / "processed" / "folder"


def fifo(queue: Queue) -> Path:
    path = base(queue) / "target" / "fifo"
    os.mkfifo(path)
    return path


def unix_socket(queue: Queue) -> Path:
    path = base(queue) / "error" / "socket"
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)
    return path


def linked(queue: Queue) -> Path:
    path = target(queue, "one")
    os.link(path, base(queue) / "processed" / "two")
    return path


def unknown_holder(queue: Queue) -> Path:
    return processing(queue, "host-1-aaaaaaaaaa-1,0,1~x")


def dead_holder(queue: Queue) -> Path:
    write(base(queue) / ".dropq" / "consumers" / "host-1-bbbbbbbbbb")
    return processing(queue, "host-1-bbbbbbbbbb-1,0,1~x")


def long_sidecar(queue: Queue) -> tuple[Path, Path]:
    """Send a message whose properties do not fit its name; return its path and its sidecar's."""
    queue.send(b"", properties={"long": "x" * 200})
    [sidecar] = Path(queue.root.layout.meta).iterdir()
    [message] = (base(queue) / "target").iterdir()
    return message, sidecar


def missing_sidecar(queue: Queue) -> Path:
    message, sidecar = long_sidecar(queue)
    sidecar.unlink()
    return message


def damaged_sidecar(queue: Queue) -> Path:
    message, sidecar = long_sidecar(queue)
    sidecar.write_bytes(b'{"format": 1, ')
    return message


def unreferenced_sidecar(queue: Queue) -> Path:
    message, sidecar = long_sidecar(queue)
    message.unlink()
    return sidecar


def job(queue: Queue) -> Path:
    started = jobs.Job(queue.context, "nightly")
    started.begin()
    attempt = started.attempt("0")
    write(Path(attempt.folder) / "4.x.B", b"row")
    return Path(started.folder)


def committed_job(queue: Queue) -> Path:
    path = job(queue)
    write(path / jobs.MANIFEST, b'{"format": 1, "files": []}')
    return path


def dropped_job(queue: Queue) -> Path:
    return write(base(queue) / "working" / f".drop-nightly-{HEX}" / "0" / "4.x.B").parent.parent


def failed(queue: Queue) -> tuple[Path, Path]:
    """Let a message fail; return its path in error/ and that of its reason."""
    queue.send(b"poison")
    message = queue.receive()
    assert message is not None
    message.fail("bad")
    queue.close()
    [reason] = (base(queue) / ".dropq" / "reasons" / "error").iterdir()
    return Path(message.path), reason


def orphan_reason(queue: Queue) -> Path:
    message, reason = failed(queue)
    message.unlink()
    return reason


def damaged_reason(queue: Queue) -> Path:
    _, reason = failed(queue)
    reason.write_bytes(b"[]")
    return reason


def world_writable_folder(queue: Queue) -> Path:
    path = base(queue) / "target"
    path.chmod(0o777)
    return path


def world_writable_file(queue: Queue) -> Path:
    path = target(queue, "open.csv")
    path.chmod(0o666)
    return path


def half_made(queue: Queue) -> Path:
    return write(Path(queue.root.path) / f".next.creating-{HEX}" / "queue.toml").parent


def half_deleted(queue: Queue) -> Path:
    return write(Path(queue.root.path) / ".old.deleted-1700000000000-abcdef" / "target" / "x").parent.parent


def undecided_delete(queue: Queue) -> Path:
    queue.root.create_queue("old").send(b"kept")
    return (queue.root.path / "old").rename(queue.root.path / ".old.deleting-1700000000000-abcdef")


def not_a_queue(queue: Queue) -> Path:
    return write(Path(queue.root.path) / "papers" / "readme").parent


def deleted_by_a_dropboxmq(queue: Queue) -> Path:
    queue.root.create_queue("temp")
    (queue.root.path / "temp").rename(deleted := queue.root.path / "temp.deleted-1700000000000")
    return deleted


def left_by_the_dead(queue: Queue) -> Path:
    die_after(lambda: create_temporary(queue.context))
    return next(path for path in queue.root.path.iterdir() if path.name.startswith("temp-"))


def untouched(queue: Queue) -> Path:
    path = left_by_the_dead(queue)
    (path / ".dropq" / "ephemeral").write_bytes(b"of another mount\n")
    return path


def absent_queue(queue: Queue) -> Path:
    other = queue.root.create_queue("other")
    shutil.rmtree(other.layout.home)
    [note] = (note for note in Path(queue.root.layout.queues).iterdir() if b"/other" in note.read_bytes())
    return note


def letters_of_the_queue(queue: Queue) -> Path:
    return write(base(queue) / "queue.toml", b'dead_letter_queue = "letters"')


def letters_of_the_root(queue: Queue) -> Path:
    return write(queue.root.path / "dropq.toml", b'format = 1\ndead_letter_queue = "letters"\n')


def selector(queue: Queue) -> Path:
    """Give the queue a selector that has spent one of its two credits; return that credit."""
    queue.root.create_queue("goal", durability="none")
    token = queue.add_selector("on", to="goal", credit=2).token
    queue.send(b"moved")
    assert queue.route()["on"]
    return min(path for path in Path(queue.layout.credits, token).iterdir() if not path.name.startswith("."))


def broken_selector(queue: Queue) -> Path:
    return write(Path(queue.layout.selectors) / "broken.toml", b'to = "q"\n')


def removed_selector(queue: Queue) -> Path:
    selector(queue)
    folder = Path(queue.layout.selectors)
    return (folder / "on.toml").rename(folder / ".on.removed")


def lost_credit(queue: Queue) -> Path:
    credit = selector(queue)
    for message in Path(queue.root.queue("goal").layout.target).iterdir():
        message.unlink()
    return credit


def damaged_credit(queue: Queue) -> Path:
    return write(selector(queue), b'{"id": ')


def token_of_another(queue: Queue) -> Path:
    folder = selector(queue).parent
    write(Path(queue.root.layout.tokens) / folder.name, b'{"queue": "goal", "selector": "on"}')
    return folder


def no_token(queue: Queue) -> Path:
    folder = selector(queue).parent
    (Path(queue.root.layout.tokens) / folder.name).unlink()
    return folder


def left_credits(queue: Queue) -> Path:
    folder = selector(queue).parent
    (Path(queue.layout.selectors) / "on.toml").unlink()
    return folder


def linked_credits(queue: Queue) -> Path:
    path = Path(queue.layout.credits) / "abcdef"
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/etc")
    return path


#: Kind, how it comes about, and whether it has to be old to be found.
PLANTED: list[tuple[str, Plant, bool]] = [
    ("configuration", broken_toml, False),
    ("configuration", unknown_group, False),
    ("missing-folder", no_folder, False),
    ("missing-folder", no_target, False),
    ("not-a-folder", file_for_folder, False),
    ("not-a-folder", dangling_folder, False),
    ("linked-folder", linked_private, False),
    ("symlink", symlink, False),
    ("directory", directory, False),
    ("special-file", fifo, False),
    ("special-file", unix_socket, False),
    ("hidden", lambda queue: target(queue, ".hidden"), True),
    ("ignored", lambda queue: target(queue, "upload.part"), True),
    ("ignored", lambda queue: write(base(queue) / "target/_temporary/0/part").parents[1], True),
    ("placeholder", lambda queue: write(base(queue) / "processed" / "a.csv", mode=0o1000), True),
    ("placeholder", lambda queue: write(Path(queue.layout.selectors) / "eu.toml", mode=0o1000), True),
    ("under-way", lambda queue: target(queue, "upload.part"), False),
    ("under-way", lambda queue: write(base(queue) / "processed" / "a.csv", mode=0o1000), False),
    ("under-way", half_made, False),
    ("unreadable", lambda queue: write(base(queue) / "target" / "a.csv", b"secret", mode=0o200), False),
    ("bad-name", lambda queue: target(queue, "4.x.B.soon"), False),
    ("foreign-claim", lambda queue: processing(queue, "a.csv"), True),
    ("written-after-ack", written_after_the_ack, True),
    ("foreign-claim", lambda queue: processing(queue, "client7~4.x.B"), True),
    ("unknown-holder", unknown_holder, False),
    ("dead-holder", dead_holder, False),
    ("several-links", linked, False),
    ("missing-sidecar", missing_sidecar, False),
    ("damaged-sidecar", damaged_sidecar, False),
    ("unreferenced-sidecar", unreferenced_sidecar, True),
    ("absent-queue", absent_queue, False),
    ("absent-letters", letters_of_the_queue, False),
    ("absent-letters", letters_of_the_root, False),
    ("abandoned-send", lambda queue: write(base(queue) / "working" / "half.csv", b"1,2,"), True),
    ("abandoned-job", job, True),
    ("unfinished-job", committed_job, True),
    ("unfinished-job", dropped_job, True),
    ("orphan-reason", orphan_reason, False),
    ("damaged-reason", damaged_reason, False),
    ("leftover", lambda queue: write(base(queue) / ".dropq/held/host-1-aaaaaaaaaa-1/a.csv").parent, False),
    ("leftover", lambda queue: write(base(queue) / ".dropq" / f".gone-{HEX}abcd"), True),
    ("leftover", staged_by_the_dead, True),
    ("unfinished-commit", committed_bundle, True),
    ("not-staged", lambda queue: write(base(queue) / ".dropq/staged/notes.txt"), False),
    ("not-staged", lambda queue: write(base(queue) / ".dropq/staged/1,error~x/whole").parent, False),
    ("not-staged", linked_commit, False),
    ("not-staged", in_staged("..,error~x"), False),
    ("not-staged", in_staged("1,etc~x"), False),
    ("not-staged", in_staged("1,processing~x"), False),
    ("not-staged", in_staged("1,error~x", os.mkfifo), False),
    ("not-staged", in_staged("1,error~x", os.mkdir), False),
    ("not-staged", in_staged("1,error~x", link_to_a_file), False),
    ("not-staged", in_staged("1.reason", os.mkdir), False),
    ("not-staged", in_staged("whole", os.mkfifo), False),
    ("not-staged", in_staged("whole", link_to_a_file), False),
    ("not-staged", lambda queue: write(staged_folder(queue) / "whole" / "4.x.B"), False),
    ("unfinished-join", half_joined, True),
    ("not-staged", lambda queue: write(base(queue) / ".dropq/reassembly/notes.txt"), False),
    ("not-staged", lambda queue: write(base(queue) / ".dropq/reassembly/error,x/.draft").parent, False),
    ("not-staged", in_reassembly(".notes"), False),
    ("not-staged", in_reassembly(".alive", os.mkfifo), False),
    ("not-staged", in_reassembly("4.x.B", link_to_a_file), False),
    ("not-staged", in_reassembly("4.y.B", os.mkdir), False),
    ("temporary", lambda queue: write(base(queue) / f".queue.toml.{HEX}.tmp"), True),
    ("temporary", lambda queue: write(Path(queue.root.layout.meta) / f".token.json.{HEX}.tmp"), True),
    ("world-writable", world_writable_folder, False),
    ("world-writable", world_writable_file, False),
    ("half-made-queue", half_made, True),
    ("half-deleted-queue", half_deleted, True),
    ("unfinished-deletion", undecided_delete, True),
    ("left-queue", left_by_the_dead, False),
    ("left-queue", untouched, True),
    ("deleted-queue", deleted_by_a_dropboxmq, False),
    ("not-a-queue", not_a_queue, False),
    ("broken-selector", broken_selector, False),
    ("not-a-selector", lambda queue: write(Path(queue.layout.selectors) / "eu.toml.orig"), False),
    ("temporary", lambda queue: write(Path(queue.layout.selectors) / f".eu.{HEX}.tmp"), True),
    ("temporary", lambda queue: write(Path(queue.layout.credits) / "abcdef" / f"..last.{HEX}.tmp"), True),
    ("unfinished-removal", removed_selector, True),
    ("under-way", removed_selector, False),
    ("lost-credit", lost_credit, True),
    ("damaged-credit", damaged_credit, True),
    ("unknown-token", token_of_another, False),
    ("unknown-token", no_token, False),
    ("left-credits", left_credits, False),
    ("not-a-credit", lambda queue: write(Path(queue.layout.credits) / "notes.txt"), True),
    ("not-a-credit", lambda queue: write(Path(queue.layout.credits) / "abcdef" / "notes.txt"), True),
    ("not-a-credit", linked_credits, True),
    ("damaged-token", lambda queue: write(Path(queue.root.layout.tokens) / "abcdef", b"{"), True),
    ("not-a-token", lambda queue: write(Path(queue.root.layout.tokens) / "notes.txt"), True),
]
#: Kinds of topics, which test_topics_diagnosis.py plants.
OF_TOPICS = {"not-a-subscription", "half-made-subscription", "broken-view-link"}
#: Kinds of moves to another file system, which test_carrier.py plants.
OF_MOVES = {"unfinished-move", "older-state", "damaged-transfer", "damaged-list"}
#: Kinds that have tests of their own, because they ask for another file system or for a user whom permissions bind.
APART = {"unclaimable-name", "two-filesystems", "unreadable-folder", "unreadable-sidecar", *OF_TOPICS, *OF_MOVES}


def test_findings_of_deleted_requests_are_told_apart_without_comparing_them(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        Path(queue.root.path, f"temp-{number}.deleted-{number}").mkdir()
    compared = list[object]()

    def compare(self: Finding, other: object) -> bool:
        compared.append(other)
        return self is other

    monkeypatch.setattr(Finding, "__eq__", compare)
    (found,) = (each for each in fsck_root(queue.root.context) if each.kind == "deleted-queue")
    assert "this and 19 other" in found.detail
    assert not compared


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _, _ in PLANTED} | APART == set(KINDS)


@pytest.mark.parametrize(("kind", "plant", "old"), PLANTED)
def test_each_kind_is_found_and_repaired_as_far_as_its_kind_says(
    queue: Queue, clock: Clock, kind: str, plant: Plant, old: bool
) -> None:
    path = plant(queue)
    clock.advance(2 * DAY if old else 0)
    before = contents(Path(queue.root.path))

    found = [finding for finding in examined(queue) if finding.kind == kind]
    assert str(path) in [finding.path for finding in found]
    assert all(("--repair` " in finding.detail) is bool(KINDS[kind].repair) for finding in found)
    assert not any(finding.open for finding in examined(queue) if finding.kind != kind)
    assert contents(Path(queue.root.path)).items() == before.items()

    repairable = bool(KINDS[kind].repair)
    repaired = [finding for finding in examined(queue, repair=True) if finding.kind == kind]
    assert {finding.repaired for finding in repaired} == {repairable}
    assert before.items() <= contents(Path(queue.root.path)).items()
    assert (kind in kinds(examined(queue))) is not repairable
    if KINDS[kind].repair == "set aside":
        inside = base(queue) if path.is_relative_to(base(queue)) else Path(queue.root.path)
        assert not os.path.lexists(path)
        assert os.path.lexists(inside / ".dropq" / "set-aside" / path.relative_to(inside))
    else:
        assert os.path.lexists(path)


def test_a_committed_job_is_under_way_as_long_as_something_moves_in_it(queue: Queue, clock: Clock) -> None:
    path = committed_job(queue)
    attempt = next(entry for entry in path.iterdir() if entry.is_dir())

    def sent_50_ms_later() -> bool:
        (attempt / "5.x.B").touch()
        (attempt / "5.x.B").unlink()
        return reading.changed_ms(str(attempt)) >= reading.changed_ms(str(path)) + 50

    until(sent_50_ms_later, "a message that was sent after the commit")
    clock.ms = reading.changed_ms(str(attempt)) + UNDER_WAY - 1
    assert kinds(queue.fsck()) == ["under-way"]
    clock.ms += 1
    assert kinds(queue.fsck()) == ["unfinished-job"]


def test_a_job_whose_manifest_has_only_its_name_reserved_was_not_committed(queue: Queue, clock: Clock) -> None:
    write(job(queue) / jobs.MANIFEST, mode=0)
    clock.advance(2 * DAY)
    assert kinds(queue.fsck()) == ["abandoned-job"]  # and no sweep would finish it
    queue.sweep(jobs_older_than=DAY)
    assert queue.fsck() == []
    write(job(queue) / jobs.MANIFEST, mode=0)
    queue.root.delete_queue("q")  # nothing was sent, so nothing is lost


@pytest.mark.parametrize(
    ("state", "open_one"),
    [("target", True), ("processing", True), ("error", True), ("processed", False), ("expired", False)],
)
def test_missing_metadata_wants_attention_only_where_the_message_may_yet_be_delivered(
    queue: Queue, state: str, open_one: bool
) -> None:
    message = missing_sidecar(queue)
    message.rename(base(queue) / state / message.name)
    assert any(finding.open for finding in queue.fsck()) is open_one


def test_a_level_and_one_sentence_belong_to_every_kind() -> None:
    for kind in KINDS.values():
        assert kind.level in ("error", "warning", "info") and kind.repair in ("", "make", "set aside")
        assert kind.says and not kind.says.endswith(".")


#: What a sweep brings in order, and by which options.
SWEPT: dict[str, dict[str, str]] = {
    "foreign-claim": {"foreign_older_than": "2h"},
    "unknown-holder": {"unleased_older_than": "2h"},
    "dead-holder": {},
    "unreferenced-sidecar": {},
    "unfinished-deletion": {},
    "abandoned-job": {"jobs_older_than": "1d"},
    "unfinished-job": {},
    "orphan-reason": {},
    "leftover": {},
    "unfinished-removal": {},
    "lost-credit": {},
    "damaged-credit": {},
}


@pytest.mark.parametrize(("kind", "options"), SWEPT.items())
def test_what_a_sweep_brings_in_order_names_the_command_that_does(
    queue: Queue, clock: Clock, kind: str, options: dict[str, str]
) -> None:
    of_root = kind in ("unreferenced-sidecar", "unfinished-deletion")
    words = [f" --{option.replace('_', '-')} {value}" for option, value in options.items()]
    assert f"`dropq sweep{'' if of_root else ' QUEUE'}{''.join(words)}`" in KINDS[kind].says
    *_, (plant, old) = ((plant, old) for planted, plant, old in PLANTED if planted == kind)
    plant(queue)
    clock.advance(2 * DAY if old else 0)
    assert kind in kinds(examined(queue))
    for _ in range(2):  # metadata goes when it was missed twice
        clock.advance(2 * DAY)
        again = reopened(queue)
        (again.root if of_root else again).sweep(**options)
    assert kind not in kinds(examined(queue))


def test_what_lies_beside_staged_parts_and_belongs_to_no_commit_outlives_every_sweep(
    queue: Queue, clock: Clock
) -> None:
    folder = staged_by_the_dead(queue)
    write(notes := folder / "notes.txt")
    for _ in range(3):
        clock.advance(2 * DAY)
        assert [(found.kind, found.path) for found in queue.fsck()] == [("not-staged", str(notes))]
        assert queue.sweep().refused == 0
    assert not (folder / "0,error~4.x-1.B").exists()
    queue.fsck(repair=True)
    queue.sweep()
    assert not folder.exists()


def test_a_temporary_queue_that_is_whole_since_it_was_listed_ends_no_check(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path(queue.root.path) / f".temp-{queue.root.context.ids.next()}.creating-{HEX}"
    made.mkdir()
    decide = deletion.decide

    def made_whole(root: RootContext, path: str) -> Decision:
        if path == str(made):
            os.rename(path, f"{root.layout.path}/{made.name.split('.')[1]}")
        return decide(root, path)

    monkeypatch.setattr(deletion, "decide", made_whole)
    assert [found.kind for found in fsck_root(queue.root.context)] == ["under-way"]


def test_a_deleted_queue_that_is_closed_to_this_user_ends_no_check(queue: Queue, clock: Clock) -> None:
    left = half_deleted(queue)
    clock.advance(2 * DAY)
    left.chmod(0)
    try:
        assert unprivileged(lambda: [found.kind for found in fsck_root(queue.root.context)]) == ["half-deleted-queue"]
    finally:
        left.chmod(0o755)


def test_a_queue_whose_deletion_was_cut_short_is_left_to_the_sweep_that_brings_it_back(
    queue: Queue, clock: Clock
) -> None:
    path = undecided_delete(queue)
    clock.advance(2 * DAY)
    assert [(found.kind, found.repaired) for found in examined(queue, repair=True)] == [("unfinished-deletion", False)]
    assert path.exists()
    queue.root.sweep()
    assert [message.body for message in queue.root.queue("old").browse()] == [b"kept"]


def test_folders_on_two_file_systems_are_found(queue: Queue, clock: Clock, elsewhere: Path) -> None:
    (base(queue) / "error").rmdir()
    (base(queue) / "error").symlink_to(elsewhere)
    write(elsewhere / ".old").chmod(0o600)
    clock.advance(DAY)
    [spanning] = [finding for finding in examined(queue) if finding.kind == "two-filesystems"]
    assert spanning.path == str(base(queue) / "error") and str(base(queue)) in spanning.detail
    [stray] = [finding for finding in examined(queue, repair=True) if finding.kind == "hidden"]
    assert not stray.repaired and "not repaired" in stray.detail  # no rename leads there
    assert (elsewhere / ".old").exists()


def test_a_folder_that_this_user_may_not_list_is_found(queue: Queue) -> None:
    (base(queue) / "error").chmod(0)
    try:
        found = unprivileged(lambda: examined(queue))
    finally:
        (base(queue) / "error").chmod(0o755)
    assert kinds(found) == ["unreadable-folder"]


def test_claims_are_not_reported_as_unknown_when_the_consumers_cannot_be_listed(queue: Queue) -> None:
    queue.send(b"held")
    with queue.subscribe() as subscription:
        assert subscription.receive()
        folder = Path(queue.layout.consumers)
        folder.chmod(0)
        try:
            (found,) = unprivileged(lambda: examined(queue))
        finally:
            folder.chmod(0o755)
    assert (found.kind, found.path) == ("unreadable-folder", str(folder))


def test_folders_that_this_user_may_list_and_not_change_are_no_finding(queue: Queue) -> None:
    folders = [*(base(queue) / state for state in FOLDERS), Path(queue.layout.consumers)]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert unprivileged(lambda: examined(queue)) == []
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_message_that_a_script_holds_is_no_finding_on_the_first_day(queue: Queue, clock: Clock) -> None:
    processing(queue, "a.csv")
    clock.advance(DAY - 60)
    assert queue.fsck() == []


@pytest.mark.parametrize("name", ["q", "two words", "QUEUE"])
def test_commands_name_the_queue(queue: Queue, clock: Clock, name: str) -> None:
    named = queue.root.create_queue(name) if name != "q" else queue
    target(named, "`dropq move QUEUE other`")
    processing(named, "`dropq move QUEUE other`")
    symlink(named)
    clock.advance(2 * DAY)
    found = {finding.kind: finding for finding in named.fsck()}
    assert f"`dropq sweep {shlex.quote(name)} --foreign-older-than 2h`" in found["foreign-claim"].detail
    assert f"`dropq fsck {shlex.quote(name)} --repair`" in found["symlink"].detail


def test_a_folder_that_everybody_may_write_is_reported_unless_it_has_the_sticky_bit(
    queue: Queue,
) -> None:
    (base(queue) / "working").chmod(0o3753)
    assert examined(queue) == []
    (base(queue) / "working").chmod(0o2753)
    assert kinds(examined(queue)) == ["world-writable"]


@pytest.mark.parametrize("closed", ["sidecar", "folder"])
def test_metadata_that_this_user_may_not_read_is_not_reported_as_damaged_or_missing(queue: Queue, closed: str) -> None:
    _, sidecar = long_sidecar(queue)
    path, mode = (sidecar, 0o044) if closed == "sidecar" else (sidecar.parent, 0o600)
    path.chmod(mode)
    try:
        found = unprivileged(lambda: examined(queue))
    finally:
        path.chmod(0o755)
    assert set(kinds(found)) == {"unreadable-sidecar"}
    assert not any("by hand" in one.detail for one in found)


def test_a_message_that_this_user_may_not_read_is_found(queue: Queue) -> None:
    target(queue, "theirs.csv").chmod(0o044)
    assert kinds(unprivileged(lambda: examined(queue))) == ["unreadable"]


# -- what repair may and may not do ----------------------------------------------------------------------------


def test_repair_makes_a_queue_whole_that_cannot_be_opened(queue: Queue) -> None:
    drop(queue, "a.csv", b"1")
    for folder in ("working", "processing", "error"):
        (base(queue) / folder).rmdir()
    found = reopened(queue).fsck(repair=True)
    assert kinds(found) == ["missing-folder"] * 3 and all(finding.repaired for finding in found)
    with reopened(queue).subscribe() as subscription:
        message = subscription.receive()
        assert message is not None and message.body == b"1"


@pytest.mark.host
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize(("own", "made"), [(0o755, 0o755), (0o2770, 0o2770), (0o1777, 0o775)])
def test_repair_makes_a_folder_of_the_mode_and_owner_of_the_queues_own(queue: Queue, own: int, made: int) -> None:
    path = no_folder(queue)
    os.chown(base(queue), 60001, 60002)
    base(queue).chmod(own)
    [finding] = [one for one in queue.fsck(repair=True) if one.kind == "missing-folder"]
    assert finding.repaired and finding.detail.endswith("; made")
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (60001, 60002, made)


def test_repair_gives_a_folder_the_configured_mode_before_that_of_the_queues_own(queue: Queue) -> None:
    write(base(queue) / "queue.toml", b'dir_mode = "2750"\n')
    path = no_folder(queue)
    base(queue).chmod(0o711)
    [finding] = reopened(queue).fsck(repair=True)
    assert finding.repaired
    assert stat.S_IMODE(path.stat().st_mode) == 0o2750


@pytest.mark.host
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize(("own", "made"), [(0o777, 0o755), (0o773, 0o711)])
def test_a_folder_that_could_not_be_given_its_owner_gives_its_group_no_more_than_others_have(
    queue: Queue, own: int, made: int
) -> None:
    path = no_folder(queue)
    os.chown(base(queue), 60001, 60002)
    base(queue).chmod(own)
    found = unprivileged(lambda: queue.fsck(repair=True))
    [finding] = [one for one in found if one.kind == "missing-folder"]
    assert finding.repaired and stat.S_IMODE(path.stat().st_mode) == made


def test_a_user_who_may_not_make_a_missing_folder_reads_why(queue: Queue) -> None:
    no_folder(queue)
    base(queue).chmod(0o555)
    try:
        [finding] = [one for one in unprivileged(lambda: queue.fsck(repair=True)) if one.open]
    finally:
        base(queue).chmod(0o755)
    assert finding.detail.endswith("; not repaired: Permission denied")


def test_repair_gives_a_second_stray_of_the_same_name_a_place_of_its_own(queue: Queue) -> None:
    for _ in range(3):
        symlink(queue)
        assert all(finding.repaired for finding in queue.fsck(repair=True))
    aside = base(queue) / ".dropq" / "set-aside" / "target"
    assert len([path for path in aside.rglob("link") if path.is_symlink()]) == 3


@pytest.mark.parametrize("dropboxmq", [False, True])
def test_repair_works_where_the_kernel_cannot_refuse_to_replace(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, dropboxmq: bool
) -> None:
    monkeypatch.setattr(system_calls, "_renameat2", None)
    queue = make_queue(tmp_path / "root", clock=clock, dropboxmq=dropboxmq)
    for _ in range(2):
        for plant in (symlink, directory, fifo):
            plant(queue)
        before = contents(tmp_path)
        assert all(finding.repaired for finding in queue.fsck(repair=True))
        assert before.items() <= contents(tmp_path).items()
    assert queue.fsck() == []


def test_repair_puts_back_a_message_that_took_a_strays_place(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fifo(queue)
    move = fsck_module._move

    def late(source: str, destination: str, store: Storage) -> None:
        if source == str(path) and stat.S_ISFIFO(path.lstat().st_mode):
            path.rename(path.parent.parent / "working" / "was-here")
            path.write_bytes(b"a message")
        move(source, destination, store)

    monkeypatch.setattr(fsck_module, "_move", late)
    [finding] = queue.fsck(repair=True)
    assert not finding.repaired and "another file" in finding.detail
    assert path.read_bytes() == b"a message"


def test_what_a_lost_configuration_may_not_ignore_is_left_alone(queue: Queue, clock: Clock) -> None:
    target(queue, "_SUCCESS")  # queue.toml may say that this is a message
    broken_toml(queue)
    clock.advance(2 * DAY)
    assert kinds(reopened(queue).fsck(repair=True)) == ["configuration"]
    assert (base(queue) / "target" / "_SUCCESS").exists()


def test_nothing_is_ever_deleted(queue: Queue, clock: Clock) -> None:
    """Everything that can be found, at once: whatever lay there lies somewhere afterwards, with the same content."""
    spoilers = {broken_toml, unknown_group, no_target, no_folder, file_for_folder, dangling_folder, linked_private}
    spoilers |= {removed_selector, lost_credit, damaged_credit, token_of_another, no_token}  # one selector is enough
    for _, plant, _ in PLANTED:
        if plant not in spoilers and "sidecar" not in plant.__name__ and "reason" not in plant.__name__:
            with suppress(FileExistsError, PermissionError):  # planted already, by another entry
                plant(queue)
    orphan_reason(queue)
    (base(queue) / "working" / "tree").mkdir(exist_ok=True)
    clock.advance(2 * DAY)
    before = contents(Path(queue.root.path))
    first = examined(queue, repair=True)
    assert sum(finding.repaired for finding in first) >= 8
    assert before.items() <= contents(Path(queue.root.path)).items()
    second = examined(queue, repair=True)
    assert not any(finding.repaired for finding in second)
    assert {kind for kind in kinds(second) if KINDS[kind].repair} == set()
    assert before.items() <= contents(Path(queue.root.path)).items()


# -- what is in order --------------------------------------------------------------------------------------------


def test_a_healthy_busy_queue_has_nothing_above_info(queue: Queue) -> None:
    drop(queue, "first.csv", b"first")
    drop(queue, "second.csv", b"second")
    drop(queue, os.fsdecode(b"\xff.csv"), b"third")
    queue.send(b"later", delay="1h")
    queue.send(b"much", properties={"long": "x" * 300})
    failed(queue)
    target(queue, "upload.part")
    write(base(queue) / "working" / "half.csv", b"1,")
    processing(queue, "a-script-has-this.csv")
    job(queue)
    queue.pause()
    queue.resume()
    with queue.subscribe() as plain, queue.subscribe(lease_period="1h") as leased, queue.subscribe() as idle:
        assert plain.receive() and leased.receive() and idle.held == ()
        before = {str(path) for path in Path(queue.root.path).rglob("*")}
        found = examined(queue, repair=True)
        assert [finding for finding in found if finding.level != "info"] == []
        assert {str(path) for path in Path(queue.root.path).rglob("*")} == before


def test_a_new_root_has_no_findings(tmp_path: Path, clock: Clock) -> None:
    root = Root.create(tmp_path / "root", dropboxmq=True, clock=clock)
    root.create_queue("flat")
    for folder in Path(root.create_queue("theirs", dropboxmq=True).layout.base).iterdir():
        write(folder / ".keep")  # as git needs it
    clock.advance(2 * DAY)
    assert fsck_root(root.context) == []
    assert [finding for name in queues(root.context) for finding in root.queue(name).fsck()] == []


def test_a_reason_without_an_inode_is_about_any_file_of_the_name(queue: Queue) -> None:
    message, reason = failed(queue)
    reason.write_text(json.dumps({"name": message.name, "inode": None, "reason": "failed"}))
    assert queue.fsck() == []
    message.unlink()
    assert kinds(queue.fsck()) == ["orphan-reason"]


def test_queues_too_damaged_to_be_opened_are_listed_too(queue: Queue) -> None:
    not_a_queue(queue)
    no_target(queue)
    assert queue.root.queues() == []
    assert queues(queue.root.context) == ["q"]


def test_what_is_no_queue_is_not_made_one(queue: Queue) -> None:
    not_a_queue(queue)
    with pytest.raises(NoSuchQueue):
        queue.root.queue("papers").fsck(repair=True)
    assert os.listdir(queue.root.path / "papers") == ["readme"]


def test_checking_changes_nothing_about_who_is_alive(queue: Queue) -> None:
    dead_holder(queue)
    with queue.subscribe() as subscription:
        for _ in range(2):
            assert "dead-holder" in kinds(queue.fsck())
        queue.sweep()
        assert "dead-holder" not in kinds(queue.fsck())
        assert subscription.receive() is not None


def test_a_lost_link_race_is_no_finding(queue: Queue, tmp_path: Path) -> None:
    path = target(queue, "a.csv")
    os.link(path, tmp_path / "held-by-a-worker")  # `dropq work` hands out such a second name
    assert examined(queue) == []


def test_metadata_that_a_linked_folder_refers_to_is_neither_unreferenced_nor_collected(
    queue: Queue, clock: Clock, tmp_path: Path
) -> None:
    long_sidecar(queue)
    (base(queue) / "target").rename(tmp_path / "bigger")
    (base(queue) / "target").symlink_to(tmp_path / "bigger")
    for _ in range(3):
        clock.advance(2 * DAY)
        assert examined(queue) == []
        assert Root(queue.root.path, clock=clock).sweep().sidecars == 0
    message = queue.receive()
    assert message is not None and message.properties["long"] == "x" * 200


def test_findings_are_plain_values(queue: Queue) -> None:
    symlink(queue)
    [finding] = queue.fsck()
    assert json.dumps([finding.kind, finding.path, finding.detail, finding.repaired, finding.level])
    assert finding == Finding("symlink", finding.path, finding.detail)


def test_only_a_missing_dead_letter_queue_of_the_root_refuses_sends_to_missing_queues(queue: Queue) -> None:
    says = "sends to queues that do not exist are refused"
    letters_of_the_queue(queue)
    (found,) = fsck_module.fsck(Root(queue.root.path).context, queue.name)
    assert found.kind == "absent-letters" and says not in found.detail
    write(queue.root.path / "dropq.toml", b'format = 1\n[defaults]\ndead_letter_queue = "letters"\n')
    (found,) = fsck_root(Root(queue.root.path).context)
    assert found.kind == "absent-letters" and says not in found.detail
    letters_of_the_root(queue)
    (found,) = fsck_root(Root(queue.root.path).context)
    assert found.kind == "absent-letters" and says in found.detail


def test_what_a_linked_private_folder_leads_to_is_not_looked_at(queue: Queue, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside / "secret")
    for folder in (queue.layout.credits, queue.layout.staged):
        Path(folder).symlink_to(outside)
    assert {found.kind for found in queue.fsck(repair=True)} == {"linked-folder"}
    assert os.listdir(outside) == ["secret"]
