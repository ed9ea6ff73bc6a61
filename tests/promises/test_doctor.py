"""The doctor reports what a file system has and lacks, what that means and what to do; it leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from children import in_child, unprivileged
from forks import forked
from helpers import Clock, base, drop, make_queue, reopened, take

from dropq import NoSuchQueue, Queue, Root
from dropq.cli import main as cli
from dropq.cli import setup
from dropq.diagnosis import doctor_checks
from dropq.diagnosis.doctor import KINDS, LEVELS, Diagnosis, doctor
from dropq.diagnosis.fsck import fsck_root
from dropq.format.layout import FOLDERS
from dropq.storage import liveness, locks, reading, system_calls
from dropq.storage.clock import ServerClock
from dropq.storage.files import Storage
from dropq.storage.mounts import Mount, mount_of
from dropq.storage.watch import Watch

Plant = Callable[[Queue, pytest.MonkeyPatch], None]
Cli = Callable[..., tuple[int, str, str]]

#: The kinds that are reported of any POSIX file system with all that dropq can use.
GOOD = {"root", "rename", "noreplace", "locks", "sync", "listing", "events", "clock", "names", "folders"}
NOBODY = 65534


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine's disk be an ordinary one with room, whatever the tests run on."""
    monkeypatch.setattr(doctor_checks, "mount_of", lambda path: Mount("ext4"))
    for limit in ("LITTLE", "LITTLE_SPACE", "FEW_INODES"):
        monkeypatch.setattr(doctor_checks, limit, 0)
    monkeypatch.setattr(doctor_checks, "SYNCS", 1)


@pytest.fixture
def run(queue: Queue, capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: str, root: Path = queue.root.path) -> tuple[int, str, str]:
        code = cli.main(["--root", str(root), "doctor", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def kinds(found: list[Diagnosis]) -> list[str]:
    return [one.kind for one in found]


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies below a folder: its inode, and when it was last renamed or changed; of folders the inode alone."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_ino, 0 if path.is_dir() else status.st_ctime_ns)
    return found


# -- on this machine ---------------------------------------------------------------------------------------------


def test_a_disk_has_what_is_needed(queue: Queue) -> None:
    assert set(kinds(doctor(queue.root.context))) >= GOOD


def test_a_disk_in_memory_has_what_is_needed() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or (mount := mount_of(str(shared))) is None or mount.kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        found = doctor(make_queue(Path(folder) / "root").root.context)
    assert set(kinds(found)) >= GOOD


@pytest.mark.usefixtures("plain")
def test_a_folder_that_is_no_root_yet_is_tried_too_and_stays_as_it_was(tmp_path: Path) -> None:
    found = doctor(Root(tmp_path).context)
    assert set(kinds(found)) == GOOD - {"root", "folders"} | {"no-root", "file-system", "space"}
    assert not list(tmp_path.iterdir())


@contextmanager
def mounted(command: list[str], point: Path) -> Iterator[Path]:
    """Mount a FUSE file system for the length of a block; skip where that cannot be done."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: apt-get install {command[0]}")
    point.mkdir(exist_ok=True)
    done = subprocess.run([*command, str(point)], capture_output=True, text=True, timeout=20)
    if done.returncode != 0 or not os.path.ismount(point):
        pytest.skip(f"{command[0]} cannot mount here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["fusermount3" if shutil.which("fusermount3") else "fusermount", "-u", str(point)], timeout=20)


@pytest.mark.host
def test_a_fuse_mount_is_known_by_its_type_and_by_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "behind").mkdir()
    with mounted(["bindfs", str(tmp_path / "behind")], tmp_path / "mount") as point:
        found = doctor(make_queue(point / "root").root.context)
    assert set(kinds(found)) >= {"no-noreplace", "local-locks", "rename", "folders"}
    (mount,) = (one.found for one in found if one.kind == "file-system")
    assert mount.startswith(f"fuse.bindfs at {point} ") or mount.startswith(f"fuse at {point} ")


def test_folders_of_one_device_without_a_rename_between_them_are_reported(tmp_path: Path) -> None:
    branches = [tmp_path / "one", tmp_path / "two"]
    for branch in branches:
        branch.mkdir()
    queue = make_queue(branches[0] / "root")
    (branches[1] / "root" / "q").mkdir(parents=True)
    (base(queue) / "error").rename(branches[1] / "root" / "q" / "error")
    command = ["mergerfs", "-o", "category.create=epmfs", ":".join(map(str, branches))]
    with mounted(command, tmp_path / "mount") as point:
        root = Root(point / "root")
        found = [one for one in doctor(root.context) if one.kind == "cross-device"]
        assert Path(found[0].path).name == "error"
        assert reading.device(found[0].path) == reading.device(str(point / "root" / "q" / "target"))
        assert not list(point.rglob(".dropq-doctor*"))


# -- each kind, and how it comes about ---------------------------------------------------------------------------


def nothing(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is out of order."""


def on(kind: str, *options: str) -> Plant:
    """Let the root lie on a mount of some type and options."""
    return lambda queue, monkeypatch: monkeypatch.setattr(
        doctor_checks, "mount_of", lambda path: Mount(kind, "/srv", "server:/export", options)
    )


def untold_mount(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "mount_of", lambda path: None)


def no_root(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(queue.root.layout.config_file).unlink()


def no_folder(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    (base(queue) / "error").rmdir()


def limit(name: str, value: float) -> Plant:
    return lambda queue, monkeypatch: monkeypatch.setattr(doctor_checks, name, value)


def refusing(verb: str, number: int, where: str = "") -> Plant:
    """Let a call of the storage fail, on paths that contain something."""

    def plant(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(Storage, verb)

        def refuse(self: Storage, *args: Any, **kwargs: Any) -> Any:
            if any(where in str(arg) for arg in args):
                raise OSError(number, os.strerror(number), args[0])
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Storage, verb, refuse)

    return plant


def copying(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(self: Storage, source: str, destination: str) -> None:
        shutil.copyfile(source, destination)
        os.unlink(source)

    monkeypatch.setattr(Storage, "rename", rename)


def for_two(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Storage.rename

    def rename(self: Storage, source: str, destination: str) -> None:
        os.link(source, destination) if "rename-here" in source else real(self, source, destination)

    monkeypatch.setattr(Storage, "rename", rename)


def no_renameat2(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_calls, "_renameat2", None)


def einval_on_a_free_name(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS and bindfs answer: of a taken name the kernel itself says so, and never asks them."""

    def rename_noreplace(source: str, destination: str) -> None:
        number = errno.EEXIST if os.path.lexists(destination) else errno.EINVAL
        raise OSError(number, os.strerror(number), source)

    monkeypatch.setattr(system_calls, "rename_noreplace", rename_noreplace)


def replacing_all_the_same(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_calls, "rename_noreplace", os.rename)


def locker(program: str) -> Plant:
    return limit("_LOCKER", program)  # type: ignore[arg-type]


def without_second_locks(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an old kernel has none for open files."""

    def refused(fd: int, kind: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(locks, "_set", refused)


def lasting_lock(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "PATIENCE", 0.05)
    monkeypatch.setattr(liveness, "is_dead", lambda folder, name: False)


def no_folder_sync(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: Storage, *folders: str) -> None:
        if self.syncs_folders:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), folders[0])

    monkeypatch.setattr(Storage, "sync", sync)


def stale(looks: int) -> Plant:
    """Let a listing of one folder stay as it first was, for so many looks."""

    def plant(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_checks, "PATIENCE", 0.05)
        real, listed = doctor_checks._listed, list[list[str]]()

        def list_late(folder: str) -> list[str]:
            if len(listed) > looks:
                return real(folder)
            listed.append(listed[0] if listed else real(folder))
            return listed[-1]

        monkeypatch.setattr(doctor_checks, "_listed", list_late)

    return plant


def unwatchable(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropq.storage.watch._events", lambda *arguments: None)


def without_events(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "wait", lambda self, timeout: False)


def other_clock(ahead: float) -> Plant:
    return lambda queue, monkeypatch: monkeypatch.setattr(ServerClock, "offset", lambda self: ahead)


def shouting(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "PATIENCE", 0.05)
    real = reading.names_in
    monkeypatch.setattr(reading, "names_in", lambda folder: frozenset(name.upper() for name in real(folder)))


def folding(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: str(path).endswith("names/case") or real(path))


def room(free: int, inodes: int = 10**6) -> Plant:
    status = SimpleNamespace(f_bavail=free, f_frsize=4096, f_blocks=10**9, f_files=10**6, f_favail=inodes)
    return lambda queue, monkeypatch: monkeypatch.setattr(os, "statvfs", lambda path: status)


def little(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor_checks, "mount_of", lambda path: Mount("ext4"))


def full(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    little(queue, monkeypatch)
    room(10**6)(queue, monkeypatch)


def used_up(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    little(queue, monkeypatch)
    room(0)(queue, monkeypatch)


def without_any_inode(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    little(queue, monkeypatch)
    room(10**8 * 5, 0)(queue, monkeypatch)


def without_inodes(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    little(queue, monkeypatch)
    room(10**8 * 5, 100)(queue, monkeypatch)


def sticky(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    (base(queue) / "target").chmod(0o1755)
    another_user(queue, monkeypatch)


def another_user(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    other = NOBODY if os.geteuid() != NOBODY else NOBODY - 1  # nobody may be who runs the tests
    monkeypatch.setattr(os, "geteuid", lambda: other)


def of_readers(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others send what a group alone may read, of which this user is not."""
    (base(queue) / "working").chmod(0o2753)
    Path(queue.layout.config_file).write_text('durability = "none"\nfile_mode = "0640"\n')
    another_user(queue, monkeypatch)
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(os, "getegid", lambda: -1)


def leased(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(queue.layout.config_file).write_text('durability = "none"\nlease_period = "30s"\n')
    on("nfs", "vers=3", "nolock")(queue, monkeypatch)


#: Kind, and how it comes about.
def route_without_a_folder(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    (base(queue) / "routing.properties").write_text("hi.selector=TRUE\n")
    (base(queue) / "routing" / "hi.in-use").touch()


def selector(text: str) -> Plant:
    def plant(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        Path(queue.layout.selectors).mkdir()
        Path(queue.layout.selectors, "on.toml").write_text(text)

    return plant


def view_on(topic: str) -> Plant:
    def plant(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        queue.root.create_queue("view", underlying_topic=topic)

    return plant


PLANTED: list[tuple[str, Plant]] = [
    ("root", nothing),
    ("no-root", no_root),
    ("unusable-queue", no_folder),
    ("no-topic", view_on("later")),
    ("no-topic", view_on("q")),
    ("file-system", nothing),
    ("read-only", refusing("make_folder", errno.EROFS)),
    ("object-store", on("fuse.s3fs")),
    ("nfs-soft", on("nfs4", "vers=4.2", "soft")),
    ("late-writes", on("nfs4")),
    ("rename", nothing),
    ("no-rename", refusing("rename", errno.EPERM)),
    ("cross-device", refusing("rename", errno.EXDEV, "rename-there")),
    ("cross-device", refusing("rename", errno.EXDEV, "/processing/")),
    ("cross-device", refusing("rename", errno.EXDEV, "/target/")),
    ("copying-rename", copying),
    ("shared-rename", for_two),
    ("noreplace", nothing),
    ("no-noreplace", no_renameat2),
    ("no-noreplace", einval_on_a_free_name),
    ("broken-noreplace", replacing_all_the_same),
    ("locks", nothing),
    ("locks", on("nfs4", "vers=4.2", "local_lock=none")),
    ("unserved-locks", untold_mount),
    ("unserved-locks", without_second_locks),
    ("no-locks", locker("print(37)")),
    ("no-locks", locker("raise SystemExit(1)")),
    ("weak-locks", locker("import sys; print(0, flush=True); sys.stdin.read()")),
    ("no-locks", lasting_lock),
    ("local-locks", on("nfs", "vers=3", "nolock", "local_lock=all")),
    ("local-locks", on("cifs", "nobrl")),
    ("local-locks", on("fuse.sshfs")),
    ("leased-locks", leased),
    ("local-locks", on("virtiofs")),
    ("sync", nothing),
    ("no-sync", refusing("sync_file", errno.EINVAL)),
    ("no-folder-sync", no_folder_sync),
    ("listing", nothing),
    ("late-listing", stale(2)),
    ("late-listing", stale(1000)),
    ("events", nothing),
    ("no-events", unwatchable),
    ("no-events", without_events),
    ("clock", nothing),
    ("clock-offset", other_clock(3.25)),
    ("clock-offset", other_clock(-3.25)),
    ("names", nothing),
    ("short-names", refusing("write_new", errno.ENAMETOOLONG, "c" * 80)),
    ("changed-names", refusing("write_new", errno.EINVAL, "*")),
    ("changed-names", shouting),
    ("folding-names", folding),
    ("space", nothing),
    ("no-room", used_up),
    ("no-room", without_any_inode),
    ("low-space", full),
    ("low-space", without_inodes),
    ("folders", nothing),
    ("sticky-folder", sticky),
    ("unusable-route", route_without_a_folder),
    ("unusable-selector", selector('to = "gone"\n')),
    ("unusable-selector", selector('to = "q"\n')),
    ("foreign-group", of_readers),
    ("not-tried", refusing("write_new", errno.EIO, "/replace/")),
]
#: Kinds of topics, which test_topics_diagnosis.py plants.
OF_TOPICS = {"two-of-a-name", "far-receiver", "missing-view-link"}
#: Kinds that have tests of their own, because they ask for a user whom permissions bind, or do not.
APART = (
    OF_TOPICS
    | {"wide-bounce", "bare-replies", "flat-queue"}
    | {"peer", "peer-away", "peer-differs", "peer-unsynced"}  # see test_roots.py
    | {"closed-root", "untried", "closed-private", "closed-log", "closed-folder", "closed-delayed", "part", "no-part"}
)


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _ in PLANTED} | APART == set(KINDS)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("kind", "plant"), PLANTED)
def test_each_kind_is_found(queue: Queue, kind: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(queue, monkeypatch)
    before = everything(queue.root.path)
    found = doctor(reopened(queue).root.context)
    assert kind in kinds(found), found
    assert everything(queue.root.path) == before
    if plant is nothing:
        assert not any(one.open for one in found)


def test_every_kind_says_what_it_means_and_what_is_amiss_what_to_do() -> None:
    for name, kind in KINDS.items():
        assert kind.level in LEVELS and kind.means, name
        assert kind.advice or kind.level in ("ok", "info"), name
        assert not kind.means.endswith(".") and not kind.advice.endswith("."), name


def doctor_kind(queue: Queue, kind: str, name: str) -> list[Diagnosis]:
    """Return what the doctor finds of a kind in one queue of a root."""
    return [one for one in doctor(queue.root.context, queues=[name]) if one.kind == kind]


def test_the_commands_of_an_advice_name_the_folder_or_the_queue(tmp_path: Path) -> None:
    (folder := tmp_path / "my disk").mkdir()
    (found,) = (one for one in doctor(Root(folder).context) if one.kind == "no-root")
    assert f"`dropq init '{folder}'`" in found.advice
    queue = make_queue(folder / "root")
    no_folder(queue, pytest.MonkeyPatch())
    (found,) = (one for one in doctor(queue.root.context) if one.kind == "unusable-queue")
    assert "`dropq fsck q`" in found.advice
    subscription = queue.root.create_topic("sales.eu").create_subscription("audit", client_id="hq")
    no_folder(subscription, pytest.MonkeyPatch())
    (found,) = doctor_kind(queue, "unusable-queue", subscription.name)
    assert found.path == subscription.layout.home
    assert "`dropq fsck sales.eu/audit.hq`" in found.advice
    route_without_a_folder(other := queue.root.create_queue("other"), pytest.MonkeyPatch())
    (found,) = doctor_kind(queue, "unusable-route", other.name)
    assert f"remove '{other.layout.routing}/hi.in-use'" in found.advice


def test_what_lies_on_another_file_system_is_tried_there_too(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reading.device
    apart = queue.layout.base
    monkeypatch.setattr(reading, "device", lambda path: 1 if path.startswith(apart) else real(path))
    found = doctor(queue.root.context)
    assert {one.path for one in found if one.kind == "rename"} == {str(queue.root.path), apart}


@pytest.mark.usefixtures("plain")
def test_a_queue_that_is_laid_out_as_dropboxmq_does_is_tried_where_its_folders_are(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", dropboxmq=True)
    (found,) = (one for one in doctor(queue.root.context) if one.kind == "folders")
    assert found.path.endswith("/q/incoming")


# -- users whom permissions bind ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain")
def test_a_folder_that_this_user_may_not_write_or_list_is_reported(queue: Queue) -> None:
    for mode, said in ((0o555, "make a file"), (0o300, "list")):
        (base(queue) / "error").chmod(mode)
        found = unprivileged(lambda: doctor(reopened(queue).root.context))
        (closed,) = (one for one in found if one.kind == "closed-folder")
        assert closed.path.endswith("/q/error") and said in closed.found
        assert "folders" not in kinds(found)
    (base(queue) / "error").chmod(0o755)


@pytest.mark.usefixtures("plain")
def test_a_selector_that_sends_to_a_queue_in_which_this_user_may_not_write_is_reported(queue: Queue) -> None:
    goal = queue.root.create_queue("goal")
    queue.add_selector("on", to="goal")
    assert "unusable-selector" not in kinds(unprivileged(lambda: doctor(reopened(queue).root.context)))
    closed = Path(goal.layout.target)
    closed.chmod(0o555)
    try:
        found = unprivileged(lambda: doctor(reopened(queue).root.context, queues=["q"]))
    finally:
        closed.chmod(0o755)
    (diagnosis,) = (one for one in found if one.kind == "unusable-selector")
    assert diagnosis.path.endswith("/q/selectors/on.toml") and f"may not write {closed}" in diagnosis.found


@pytest.mark.usefixtures("plain")
def test_a_user_who_may_write_only_in_a_queue_reads_what_that_costs(queue: Queue) -> None:
    private, meta = Path(queue.root.layout.private), Path(queue.root.layout.meta)
    for closed in (private, meta):
        closed.chmod(0o555)
        queue.root.path.chmod(0o555)
        try:
            found = unprivileged(lambda: doctor(reopened(queue).root.context))
        finally:
            queue.root.path.chmod(0o755)
            closed.chmod(0o755)
        assert {"rename", "folders"} <= set(kinds(found))
        assert "closed-root" not in kinds(found)
        # What is written in .dropq/ itself is there already.
        assert ("closed-private" in kinds(found)) is (closed == meta)


@pytest.mark.usefixtures("plain")
def test_a_consumer_who_may_not_write_the_log_is_told(queue: Queue) -> None:
    log = Path(queue.layout.log)
    assert "closed-log" not in kinds(unprivileged(lambda: doctor(reopened(queue).root.context)))
    log.chmod(0o555)
    try:
        found = unprivileged(lambda: doctor(reopened(queue).root.context))
    finally:
        log.chmod(0o755)
    assert "closed-log" in kinds(found)


@pytest.mark.usefixtures("plain")
def test_where_nothing_may_be_made_the_doctor_only_looks_things_up(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir(mode=0o555)
    found = unprivileged(lambda: doctor(Root(tmp_path / "mount").context))
    assert kinds(found) == ["no-root", "file-system", "space", "closed-root"]


@pytest.mark.usefixtures("plain")
@pytest.mark.host
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_what_is_closed_to_it() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        queue = make_queue(Path(folder) / "root")
        for path in Path(folder).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)

        def looked() -> list[Diagnosis]:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            return doctor(Root(queue.root.path).context)

        found = in_child(looked)
        for path in (Path(folder) / "root" / "q").rglob("*"):
            path.chmod(0o711 if path.is_dir() else 0o644)
        refused = in_child(looked)
    (part,) = (one for one in found if one.check == "folders")
    assert part.kind == "part" and "may look in q, not send or receive" in part.found
    assert "user nobody" in part.found or f"user {NOBODY}" in part.found
    assert [one.kind for one in found if one.check == "root"] == ["root", "untried"]
    assert not any(one.open for one in found)
    (none,) = (one for one in refused if one.check == "folders")
    assert none.kind == "no-part" and none.level == "error"
    assert all(f"{state}/: may not make" in none.found for state in (*FOLDERS, ".dropq"))
    assert "closed-root" in kinds(refused)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("mode", [0o555, 0o300])
@pytest.mark.parametrize("folder", ["consumers", "held", "reasons", "reasons/error", "staged", "reassembly"])
def test_a_private_folder_of_consumers_that_is_closed_to_this_user_is_reported(
    queue: Queue, folder: str, mode: int
) -> None:
    closed = Path(queue.layout.private) / folder
    closed.mkdir(exist_ok=True)
    for below in closed.iterdir():
        below.rmdir()  # as in an older queue: it is made when it is needed
    closed.chmod(mode)
    try:
        found = unprivileged(lambda: doctor(reopened(queue).root.context))
    finally:
        closed.chmod(0o755)
    (diagnosis,) = (one for one in found if one.check == "folders")
    assert (diagnosis.kind, diagnosis.path) == ("closed-folder", str(closed))
    assert everything(closed) == {}


@pytest.mark.usefixtures("plain")
def test_a_missing_private_folder_is_reported_only_where_this_user_may_not_make_it(queue: Queue) -> None:
    shutil.rmtree(queue.layout.private)
    for mode, kinds_told in ((0o755, ["folders"]), (0o555, ["closed-folder"])):
        base(queue).chmod(mode)
        try:
            found = unprivileged(lambda: doctor(reopened(queue).root.context))
        finally:
            base(queue).chmod(0o755)
        diagnoses = [one for one in found if one.check == "folders"]
        assert kinds(diagnoses) == kinds_told
        assert {one.path for one in diagnoses} == {str(base(queue))}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("said", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("verb", "where"),
    [
        ("make_folder", ""),
        ("write_new", ""),
        ("create", "/sync/"),
        ("create", "/working/"),
        ("sync_file", ""),
        ("rename", "/processing/"),
        ("rename", "rename-there"),
    ],
)
def test_a_full_file_system_is_reported_once_and_last_and_as_nothing_else(
    queue: Queue, verb: str, where: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(queue.root.path)
    refusing(verb, said, where)(queue, monkeypatch)
    found = doctor(reopened(queue).root.context)
    assert [one.kind for one in found if one.level != "ok"] == ["no-room"]
    assert found[-1].kind == "no-room" and os.strerror(said) in found[-1].found
    assert everything(queue.root.path) == before


@pytest.mark.usefixtures("plain")
def test_a_full_file_system_that_also_refuses_a_call_is_one_error(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_up(queue, monkeypatch)
    refusing("make_folder", errno.ENOSPC)(queue, monkeypatch)
    assert [one.level for one in doctor(queue.root.context) if one.open] == ["error"]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("told", [True, False])
def test_a_read_only_mount_is_one_error_and_no_matter_of_permissions(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    if told:
        on("ext4", "ro", "relatime", "rw")(queue, monkeypatch)
    for verb in ("make_folder", "create", "write_new"):
        refusing(verb, errno.EROFS)(queue, monkeypatch)
    monkeypatch.setattr(os, "access", lambda path, mode, **how: not mode & os.W_OK)
    found = doctor(reopened(queue).root.context)
    assert [one.kind for one in found if one.level != "ok"] == ["read-only"]
    assert [one for one in found if one.kind == "file-system" and told] == []
    if told:
        (mount,) = (one.found for one in found if one.kind == "read-only")
        assert mount.endswith("is mounted read-only (ro,relatime)")


@pytest.mark.usefixtures("plain")
def test_a_mount_that_is_said_to_be_read_only_and_is_not_is_tried_as_any_other(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = kinds(doctor(reopened(queue).root.context))
    on("ext4", "ro", "relatime")(queue, monkeypatch)
    assert kinds(doctor(reopened(queue).root.context)) == usual


@pytest.mark.host
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_real_read_only_mount_is_reported_as_nothing_else(queue: Queue) -> None:
    point = str(queue.root.path)
    if subprocess.run(["mount", "--bind", "-o", "ro", point, point], capture_output=True).returncode:
        pytest.skip("no mount can be made here")
    try:
        found = doctor(reopened(queue).root.context)
    finally:
        subprocess.run(["umount", point], check=True)
    assert [one.kind for one in found if one.open] == ["read-only"]
    (options,) = re.findall(r"is mounted read-only \((.*)\)", next(one.found for one in found if one.open))
    assert "rw" not in options.split(",") and len(set(options.split(","))) == len(options.split(","))


@pytest.mark.usefixtures("plain")
def test_the_owner_of_a_sticky_folder_may_take_what_others_sent(queue: Queue) -> None:
    (base(queue) / "target").chmod(0o1777)
    assert "folders" in kinds(unprivileged(lambda: doctor(reopened(queue).root.context)))


@pytest.mark.usefixtures("plain")
def test_a_sender_reads_that_a_delay_is_refused(queue: Queue) -> None:
    shut = ("processing", "processed", "expired", "error", ".dropq/delayed", ".dropq")
    closed = [base(queue) / name for name in shut]
    for folder in closed:
        folder.chmod(0o111)
    try:
        found = unprivileged(lambda: doctor(reopened(queue).root.context))
    finally:
        for folder in reversed(closed):
            folder.chmod(0o755)
    (part, delayed) = (one for one in found if one.check == "folders")
    assert part.kind == "part" and "may send in q, not look or receive" in part.found
    assert (delayed.kind, delayed.path) == ("closed-delayed", queue.layout.delayed)


@pytest.mark.usefixtures("plain")
def test_a_sender_reads_that_delayed_is_missing_rather_than_forbidden(queue: Queue) -> None:
    shutil.rmtree(queue.layout.private)
    closed = [base(queue), *(base(queue) / name for name in ("processing", "processed", "expired", "error"))]
    for folder in closed:
        folder.chmod(0o555)
    try:
        found = unprivileged(lambda: doctor(reopened(queue).root.context))
    finally:
        for folder in closed:
            folder.chmod(0o755)
    (delayed,) = (one for one in found if one.kind == "closed-delayed")
    assert delayed.path == str(base(queue)) and delayed.found.startswith(f"{queue.layout.delayed} is missing: ")


@pytest.mark.usefixtures("plain")
def test_queues_without_a_lease_are_named_where_locks_stay_on_a_mount(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased(queue, monkeypatch)
    queue.root.create_queue("r")
    (locks,) = (one for one in doctor(queue.root.context) if one.check == "locks")
    assert locks.kind == "local-locks" and locks.found.endswith("without lease_period: r")
    assert "leased-locks" in kinds(doctor(queue.root.context, queues=["q"]))


# -- nothing is left, nothing is touched -------------------------------------------------------------------------


def test_messages_in_every_state_stay_as_they_are(queue: Queue) -> None:
    queue.send_many([b"x"] * 3)
    queue.send(b"later", delay="1h")
    drop(queue, "report.csv", b"1,2")
    take(queue).ack()
    take(queue).reject("no good")
    take(queue).expire()
    with queue.subscribe() as subscription:
        assert subscription.receive()
        before = everything(queue.root.path)
        doctor(reopened(queue).root.context)
        assert everything(queue.root.path) == before


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("dropboxmq", [False, True])
def test_no_file_of_the_doctors_ever_lies_where_consumers_look(tmp_path: Path, dropboxmq: bool) -> None:
    root = make_queue(tmp_path / "root", dropboxmq=dropboxmq).root
    root.create_topic("news").create_subscription("all", client_id="x")
    targets = [Path(queue.layout.target) for queue in root.queues()]
    assert len(targets) == 3
    watches = [Watch(str(target)) for target in targets]
    assert all(watch.observe() for watch in watches)
    assert "folders" in kinds(doctor(root.context))
    assert not any(watch.wait(0) for watch in watches)
    (targets[0] / ".seen").touch()
    assert watches[0].wait(0)


@pytest.mark.usefixtures("plain")
def test_a_consumer_that_takes_hidden_files_too_gets_none_of_the_doctors(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let such a consumer, as DropboxMQ's clients are, take what it finds after each call of the storage."""
    target, taken = base(queue) / "target", list[str]()

    def met(verb: str) -> Callable[..., Any]:
        real = getattr(Storage, verb)

        def call(self: Storage, *args: Any, **kwargs: Any) -> Any:
            done = real(self, *args, **kwargs)
            for name in os.listdir(target):
                os.rename(target / name, base(queue) / "processing" / f"client~{name}")
                taken.append(name)
            return done

        return call

    for verb in ("create", "write_new", "rename", "unlink", "make_folder", "sync"):
        monkeypatch.setattr(Storage, verb, met(verb))
    found = doctor(queue.root.context)
    assert taken == []
    assert set(kinds(found)) == GOOD | {"file-system", "space"}


@pytest.mark.parametrize("raised", [KeyboardInterrupt, OSError, ZeroDivisionError])
@pytest.mark.parametrize("where", ["root", "folder", "queue"])
def test_nothing_is_left_when_it_is_cut_short(
    queue: Queue, where: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = queue.root
    if where == "folder":
        (root.path / "new").mkdir()
        root = Root(root.path / "new")
    if where == "queue":
        real = Storage.rename

        def rename(self: Storage, source: str, destination: str) -> None:
            real(self, source, destination)
            if "/processing/" in destination:
                raise raised

        monkeypatch.setattr(Storage, "rename", rename)
    else:

        def sync(self: Storage, *folders: str) -> None:
            raise raised

        monkeypatch.setattr(Storage, "sync", sync)
    before = everything(queue.root.path)
    with suppress(raised):
        doctor(root.context)
    assert everything(queue.root.path) == before


def killed(root: Root, verb: str, where: str) -> None:
    """Let the doctor be killed in the middle of a call of the storage."""
    real = getattr(Storage, verb)

    def die(self: Storage, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if where in str(args[-1]):
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Storage, verb, die):
        assert forked(lambda: doctor(root.context)) == -signal.SIGKILL


@pytest.mark.parametrize("private", [True, False])
def test_what_a_kill_leaves_of_its_folder_fsck_knows_and_sets_aside(queue: Queue, clock: Clock, private: bool) -> None:
    root = Root(queue.root.path, clock=clock)
    if not private:
        shutil.rmtree(root.layout.private)
    killed(root, "rename", "rename-there/file")
    assert [found.kind for found in fsck_root(root.context)] == ["under-way"]
    clock.advance(7200)
    (left,) = fsck_root(root.context, repair=True)
    assert left.kind == "temporary" and left.repaired and "dropq doctor" in left.detail
    assert fsck_root(root.context) == []


@pytest.mark.parametrize("state", ["processing", "processed", "expired", "error", ".dropq", ".dropq/delayed"])
def test_what_a_kill_leaves_in_a_queue_is_no_message_and_fsck_knows_it(queue: Queue, clock: Clock, state: str) -> None:
    queue = Root(queue.root.path, clock=clock).queue("q")
    killed(queue.root, "rename", f"/q/{state}/.")
    assert queue.receive() is None and not any(queue.counts().values())
    clock.advance(2 * 86_400)
    (left,) = reopened(queue).fsck(repair=True)
    assert left.kind == ("temporary" if state == ".dropq" else "hidden") and left.repaired
    assert reopened(queue).fsck() == []


# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain")
def test_a_fit_root_exits_with_0_and_has_a_line_for_each_thing_that_was_looked_at(run: Cli) -> None:
    code, out, err = run()
    assert (code, err) == (0, "nothing wants attention\n")
    rows = [line.split("\t") for line in out.splitlines()]
    assert {row[0] for row in rows} == {"ok"} and {len(row) for row in rows} == {7}
    assert [row[2] for row in rows if row[1] == "locks"] == ["locks"]


@pytest.mark.usefixtures("plain")
def test_what_is_amiss_exits_with_1_and_comes_last_with_what_to_set(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "mount_of", lambda path: Mount("nfs", options=("vers=3", "nolock", "soft")))
    code, out, err = run()
    assert (code, err) == (1, "open=2\n")
    levels = [line.split("\t")[0] for line in out.splitlines()]
    assert levels == sorted(levels, key=LEVELS.index) and levels[-1] == "warning"
    assert "mount without nolock" in out


@pytest.mark.usefixtures("plain")
def test_json_has_an_object_a_finding(run: Cli) -> None:
    code, out, _ = run("--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {tuple(one) for one in found} == {("level", "check", "kind", "path", "found", "means", "advice")}


@pytest.mark.usefixtures("plain")
def test_only_the_queues_that_are_named_are_tried(queue: Queue, run: Cli) -> None:
    queue.root.create_queue("r")
    folders = [json.loads(line)["path"] for line in run("r", "--json")[1].splitlines() if '"folders"' in line]
    assert [Path(path).name for path in folders] == ["r"]
    code, out, err = run("nosuch")
    assert (code, out) == (66, "") and "nosuch" in err
    assert run("a/b")[0] == 2


def test_a_path_where_a_queue_is_expected_is_answered_with_the_way_to_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    assert cli.main(["doctor", "/mnt"]) == 2
    assert "`dropq --root /mnt doctor` tests a folder" in capfd.readouterr().err


@pytest.mark.parametrize("below", ["", "root"])
def test_a_folder_that_this_user_may_not_enter_is_named_and_exits_with_77(run: Cli, tmp_path: Path, below: str) -> None:
    (tmp_path / "closed" / "root").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    try:
        code, out, err = unprivileged(lambda: run(root=tmp_path / "closed" / below))
    finally:
        (tmp_path / "closed").chmod(0o755)
    assert (code, out) == (77, "")
    assert f"may not enter {tmp_path / 'closed'}:" in err


def test_a_folder_that_is_not_there_exits_with_66(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("nosuch", "nosuch/deeper", "file", "file/deeper"):
        code, out, err = run(root=tmp_path / path)
        assert (code, out) == (66, "") and f"no such folder: {tmp_path / path}: name a folder on that mount" in err
    with pytest.raises(NoSuchQueue):
        Root(tmp_path / "nosuch")


def test_on_a_terminal_meaning_and_advice_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = setup._diagnosis_text(Diagnosis("no-locks", "/srv", "no flock:\nNo locks available"), "/srv: ")
    lines = text.splitlines()
    assert lines[0] == r"warning  locks    /srv: no flock:\x0aNo locks available"
    assert lines[-1] == "         to do    set lease_period for each queue"
    assert len(lines) > 2 and all(len(line) <= 60 for line in lines)
    assert setup._diagnosis_text(Diagnosis("rename", "/srv", "one rename moves a file"), "").count("\n") == 0


def test_the_doctor_is_not_imported_by_what_does_not_need_it() -> None:
    program = "import dropq, dropq.cli.main, sys; sys.exit('dropq.diagnosis.doctor' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
