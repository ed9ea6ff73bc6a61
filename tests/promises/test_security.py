"""Who may do what: docs/security.md line by line, by users whom permissions bind; and what nobody can do by a name."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from children import in_child
from helpers import Clock, arrive, base, drop, health, make_queue, names_in, take, where
from test_cli import on_terminal
from torture.strangers import VERBS

import dropq
from dropq import Queue, Root, StorageError, work
from dropq.cli import main as cli
from dropq.diagnosis import doctor_checks as doctor
from dropq.diagnosis.fsck import fsck_root
from dropq.lifecycle import queue_notes
from dropq.queue.stream_journal import Journal
from dropq.staging.jobs import Job
from dropq.storage.mounts import Mount
from dropq.worker.command import Command

T = TypeVar("T")

#: Users and groups that no host needs to know: root may be any number.
PRODUCER, OTHER_PRODUCER, MONITOR, CONSUMER = 60001, 60002, 60003, 60004
READERS, NOBODYS = 60103, 60104
ADVICE = Path(__file__).parents[2] / "docs" / "security.md"
NASTY = "-rf $(touch pwned) `id` \"'\x1b]0;x\x07\n\u202e"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def by(user: int, function: Callable[[], T], *, group: int = NOBODYS) -> T:
    """Run a function as another user, in a child that cannot go back."""

    def as_user() -> T:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        os.umask(0o077)
        return function()

    return in_child(as_user)


def refused(user: int, function: Callable[[], object], *, group: int = NOBODYS) -> bool:
    """Tell whether a user is refused by the system's permissions."""

    def refusal() -> bool:
        try:
            function()
        except (PermissionError, StorageError) as error:
            return error.errno in (errno.EACCES, errno.EPERM)
        return False

    return by(user, refusal, group=group)


@pytest.fixture
def shared() -> Iterator[Queue]:
    """A queue with the permissions that docs/security.md advises."""
    if os.geteuid() != 0:
        pytest.skip("to act as several users takes root")
    top = Path(tempfile.mkdtemp(prefix="dropq-security-"))  # tmp_path is closed to other users
    try:
        top.chmod(0o755)
        (top / "root").mkdir()
        advise(top / "root")
        yield Root(top / "root").queue("orders")
    finally:
        shutil.rmtree(top)


def advised() -> tuple[str, list[str]]:
    """What docs/security.md advises: the commands that set a queue up, and the lines that check it."""
    setting_up, checking = re.findall(r"^```sh\n(.*?)^```", ADVICE.read_text(), re.MULTILINE | re.DOTALL)
    return setting_up, checking.splitlines()


def advise(folder: Path) -> None:
    """Do what docs/security.md advises, by the commands that stand there, whatever root's umask is."""
    users = {"consumer": str(CONSUMER), "readers": str(READERS)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **users, "PATH": path}
    environment.pop("DROPQ_ROOT", None)
    subprocess.run(["sh", "-ec", f"umask 077\n{advised()[0]}"], cwd=folder, env=environment, check=True)


def reopened(queue: Queue) -> Queue:
    """The queue as whoever runs this opens it."""
    return Root(queue.root.path).queue(queue.name)


# -- what was set up, checked ----------------------------------------------------------------------------------------

#: Who is of `$readers`, and which part the doctor tells each of them.
KINDS_OF_USERS = {
    "consumer": (CONSUMER, READERS, "may list, create and rename in all"),
    "monitor": (MONITOR, READERS, "may look in orders, not send or receive"),
    "producer": (PRODUCER, NOBODYS, "may send in orders, not look or receive"),
}


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine's disk be an ordinary one with room, whatever the tests run on."""
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    monkeypatch.setattr(doctor, "mount_of", lambda path: Mount("ext4"))
    for limit in ("LITTLE", "LITTLE_SPACE", "FEW_INODES"):
        monkeypatch.setattr(doctor, limit, 0)
    # Those two start Python, or import, which these users may not do wherever it is installed.
    trials = [trial for trial in doctor.TRIALS if trial not in (doctor.locks, doctor.events)]
    monkeypatch.setattr(doctor, "TRIALS", trials)


def command(queue: Queue, user: int, group: int, *argv: str) -> int:
    """Run a command in the root as a user, and return its exit code."""

    def run() -> int:
        os.chdir(queue.root.path)
        return int(cli.main(argv))

    return by(user, run, group=group)


def context(queue: Queue) -> None:
    """Let messages be sent with all that is kept beside them, and be taken, returned and held."""

    def send() -> None:
        sending = reopened(queue)
        for _ in range(4):
            sending.send(b"x", properties={"long": "x" * 300})
        sending.send(b"later", delay="1h")

    def consume() -> None:
        with reopened(queue) as receiving:
            take(receiving).ack()
            take(receiving).reject("no")
            receiving.sweep()

    by(PRODUCER, send)
    by(CONSUMER, consume, group=READERS)


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("used", [False, True])
def test_each_line_that_checks_it_finds_all_well_and_tells_that_user_s_part(
    shared: Queue, capfd: pytest.CaptureFixture[str], used: bool
) -> None:
    if used:
        context(shared)
    checked = []
    for line in advised()[1]:
        sudo, as_user, user, dropq_itself, *argv = shlex.split(line)
        assert (sudo, as_user, user[0], dropq_itself) == ("sudo", "-u", "$", "dropq")
        checked.append(user[1:])
        number, group, part = KINDS_OF_USERS[user[1:]]
        code = command(shared, number, group, *argv)
        out, err = capfd.readouterr()
        assert (code, err) == (0, "nothing wants attention\n"), out
        assert [part in row for row in out.splitlines() if row.split("\t")[1] == "folders"] == [True]
    assert checked == list(KINDS_OF_USERS)


@pytest.mark.usefixtures("ordinary")
def test_a_consumer_who_is_not_of_the_readers_is_told_so_by_the_doctor(
    shared: Queue, capfd: pytest.CaptureFixture[str]
) -> None:
    by(PRODUCER, lambda: reopened(shared).send(b"sent"))
    with pytest.raises(StorageError):
        by(CONSUMER, lambda: take(reopened(shared)).body)
    assert command(shared, CONSUMER, NOBODYS, "doctor") == 1
    out, err = capfd.readouterr()
    (row,) = (row for row in out.splitlines() if row.startswith(("warning", "error")))
    assert row.split("\t")[2] == "foreign-group" and err == "open=1\n"


@pytest.mark.parametrize("who", ["consumer", "monitor"])
def test_fsck_finds_nothing_amiss_in_what_was_set_up(
    shared: Queue, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    context(shared)
    user, group, _ = KINDS_OF_USERS[who]
    assert command(shared, user, group, "--root", ".", "fsck") == 0, capfd.readouterr()


# -- producers that may only drop ----------------------------------------------------------------------------------


def test_a_producer_sends_by_dropq_and_by_mv_without_seeing_what_others_sent(shared: Queue) -> None:
    def send() -> None:
        queue = reopened(shared)
        queue.send(b"one", properties={"long": "x" * 300})
        queue.send(b"later", delay="1h")
        drop(queue, "by-hand.csv", b"two")

    by(PRODUCER, send)
    assert sorted(where(shared)["target"]) == [b"one", b"two"]
    assert where(shared)["delayed"] == [b"later"]
    assert by(CONSUMER, lambda: len(take(reopened(shared)).properties), group=READERS) == 1


def test_a_producer_may_not_list_read_take_or_remove_what_others_sent(shared: Queue) -> None:
    name = by(OTHER_PRODUCER, lambda: reopened(shared).send(b"secret", message_id="known").id)
    assert name == "known"
    (file,) = names_in(shared, "target")
    path = base(shared) / "target" / file
    for act in (
        lambda: os.listdir(base(shared) / "target"),
        lambda: os.listdir(base(shared) / "working"),
        lambda: path.read_bytes(),
        lambda: os.unlink(path),
        lambda: os.rename(path, base(shared) / "working" / "mine"),
        lambda: reopened(shared).receive(),
        lambda: reopened(shared).counts(),
        lambda: list(reopened(shared).browse("error")),
        lambda: reopened(shared).sweep(),
    ):
        assert refused(PRODUCER, act)
    assert where(shared) == {"target": [b"secret"]}


def test_a_producer_may_not_configure_pause_or_plant_anything_private(shared: Queue) -> None:
    folder = base(shared)
    for act in (
        lambda: (folder / "queue.toml").write_text(""),
        lambda: reopened(shared).pause(),
        lambda: (folder / ".dropq" / "set-aside").symlink_to("/"),
        lambda: os.rename(folder / ".dropq", folder / "mine"),
        lambda: os.rename(folder / "target", folder / "mine"),
        lambda: Root(shared.root.path).create_queue("mine"),
        lambda: os.listdir(folder / "processing"),
    ):
        assert refused(PRODUCER, act)


def test_a_full_sync_by_who_may_not_read_the_folder_is_told_with_the_message_sent(shared: Queue) -> None:
    (base(shared) / "queue.toml").write_text('durability = "full"\nfile_mode = "0640"\n')
    with pytest.raises(StorageError, match="do not send it again"):
        by(PRODUCER, lambda: reopened(shared).send(b"sent"))
    assert where(shared) == {"target": [b"sent"]}


# -- monitors --------------------------------------------------------------------------------------------------


def test_a_monitor_sees_all_and_changes_nothing(shared: Queue) -> None:
    shared.send(b"seen")

    def see() -> tuple[int, bool, bytes, list[str]]:
        queue = reopened(shared)
        (message,) = queue.browse()
        return queue.counts()["target"], health(queue).healthy, message.body, [one.kind for one in queue.fsck()]

    count, well, read, kinds = by(MONITOR, see, group=READERS)
    assert (count, well, read) == (1, True, b"seen")
    assert kinds == []
    (file,) = names_in(shared, "target")
    for act in (
        lambda: reopened(shared).send(b"x"),
        lambda: reopened(shared).receive(),
        lambda: reopened(shared).ack(file),
        lambda: reopened(shared).pause(),
        lambda: os.unlink(base(shared) / "target" / file),
    ):
        assert refused(MONITOR, act, group=READERS)
    assert where(shared) == {"target": [b"seen"]}


# -- consumers ---------------------------------------------------------------------------------------------------


def test_a_consumer_takes_and_settles_what_any_producer_sent_and_sweeps(shared: Queue) -> None:
    for user in (PRODUCER, OTHER_PRODUCER):
        by(user, lambda: reopened(shared).send(b"sent"))

    def consume() -> list[bytes]:
        with reopened(shared) as queue:
            first, second = take(queue), take(queue)
            read = [first.body, second.body]
            first.ack()
            second.reject("no")
            queue.requeue()
            queue.sweep()
            assert not [found for found in queue.fsck(repair=True) if found.level == "error"]
            return read

    assert by(CONSUMER, consume, group=READERS) == [b"sent", b"sent"]
    assert {state: len(bodies) for state, bodies in where(shared).items()} == {"target": 1, "processed": 1}


def test_a_consumer_may_not_configure_pause_or_move_the_folders(shared: Queue) -> None:
    folder = base(shared)
    for act in (
        lambda: (folder / "queue.toml").write_text(""),
        lambda: reopened(shared).pause(),
        lambda: os.rename(folder / "error", folder / "mine"),
        lambda: Root(shared.root.path).delete_queue("orders", force=True),
    ):
        assert refused(CONSUMER, act, group=READERS)


def test_an_unreadable_body_is_told_and_holds_up_no_other(shared: Queue) -> None:
    def send() -> None:
        path = base(shared) / "working" / "closed"
        path.write_bytes(b"closed")
        path.chmod(0)
        arrive(path, base(shared) / "target" / "closed")
        reopened(shared).send(b"open")

    by(PRODUCER, send)

    def consume() -> list[str]:
        answers = []
        with reopened(shared) as queue:
            for _ in range(2):
                message = take(queue)
                try:
                    answers.append(message.text)
                    message.ack()
                except StorageError as error:
                    answers.append("refused")
                    message.reject(str(error))
        return sorted(answers)

    assert by(CONSUMER, consume, group=READERS) == ["open", "refused"]
    assert [len(bodies) for bodies in where(shared).values()] == [1, 1]


def test_in_a_sticky_target_only_its_owner_takes_what_others_sent(shared: Queue) -> None:
    by(PRODUCER, lambda: reopened(shared).send(b"sent"))
    (base(shared) / "target").chmod(0o1777)
    (base(shared) / "processing").chmod(0o777)
    (base(shared) / ".dropq" / "consumers").chmod(0o777)
    assert refused(OTHER_PRODUCER, lambda: reopened(shared).receive())
    assert where(shared) == {"target": [b"sent"]}
    assert by(CONSUMER, lambda: take(reopened(shared)).body, group=READERS) == b"sent"


# -- administrators ----------------------------------------------------------------------------------------------


def test_an_administrator_does_everything_and_what_he_makes_keeps_its_modes(shared: Queue) -> None:
    by(PRODUCER, lambda: reopened(shared).send(b"sent"))
    queue = reopened(shared)
    queue.pause()
    assert take_or_none(queue) is None
    queue.resume()
    take(queue).reject("no")
    queue.close()
    assert [outcome.ok for outcome in queue.requeue()] == [True]
    fsck_root(queue.root.context, repair=True)
    queue.root.delete_queue("orders", force=True)
    assert queue.root.queues() == []


def take_or_none(queue: Queue) -> dropq.Message | None:
    return queue.receive()


# -- links ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder that has to stay as it is: old files, under names that dropq clears away in its own folders."""
    folder = tmp_path / "elsewhere"
    for name in ("4.a.B", "x.json", ".gone-x", "c-0123456789-1/4.a.B", "part/4.a.B", "error/x.json", "row.1.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"not yours")
    before = tree(folder)
    yield folder
    assert tree(folder) == before


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): b"" if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


PRIVATE = [
    "",
    "consumers",
    "held",
    "reasons",
    "reasons/error",
    "delayed",
    "ledger",
    "streams",
    "acks",
    "turns",
    "barriers",
    "set-aside",
]


@pytest.mark.parametrize("folder", PRIVATE)
def test_a_private_folder_that_is_a_link_is_refused_and_nothing_behind_it_touched(
    tmp_path: Path, elsewhere: Path, folder: str
) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, "a", b"a")
    path = base(queue) / ".dropq" / folder if folder else base(queue) / ".dropq"
    if path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    fresh = Root(queue.root.path).queue("q")
    for verb in (fresh.receive, fresh.sweep, fresh.counts, lambda: fresh.send(b"x")):
        with pytest.raises(StorageError, match=r"is a symbolic link.*look where it leads.*then remove it"):
            verb()
    (found,) = fresh.fsck(repair=True)
    assert (found.kind, found.path, found.repaired) == ("linked-folder", str(path).rstrip("/"), False)
    assert "look where it leads" in found.detail
    path.unlink()
    assert take(Root(queue.root.path).queue("q")).body == b"a"


@pytest.mark.parametrize("folder", [".dropq", ".dropq/meta"])
def test_a_root_whose_private_folder_is_a_link_is_refused(tmp_path: Path, elsewhere: Path, folder: str) -> None:
    root = make_queue(tmp_path / "root").root
    shutil.rmtree(root.path / folder)
    (root.path / folder).symlink_to(elsewhere)
    for verb in (Root, Root.create):
        with pytest.raises(StorageError, match="is a symbolic link"):
            verb(root.path)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_lies_in_place_of_a_dead_claims_body_is_removed_unopened(tmp_path: Path, kind: str) -> None:
    queue = make_queue(tmp_path / "root")
    folder = base(queue) / ".dropq" / "held" / "c-0123456789-1"
    folder.parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "fifo")  # who opens it for reading, by its name or by a link, is kept until somebody writes
    (folder.symlink_to(tmp_path / "fifo") if kind == "link" else os.link(tmp_path / "fifo", folder))
    in_child(lambda: queue.sweep())
    assert not os.path.lexists(folder)
    assert (tmp_path / "fifo").is_fifo()


def test_a_fifo_in_place_of_the_clock_keeps_nobody(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    clock = queue.root.path / ".dropq" / "clock"
    clock.unlink(missing_ok=True)
    os.mkfifo(clock)
    signal.alarm(20)  # whose default is to end the process
    try:
        assert abs(Root(queue.root.path).clock.now_ms() / 1000 - time.time()) < 10
    finally:
        signal.alarm(0)


def test_a_link_that_no_queue_can_be_is_not_followed_to_look_for_metadata(tmp_path: Path, elsewhere: Path) -> None:
    root = make_queue(tmp_path / "root").root
    (elsewhere / "target").mkdir()
    token = "0123456789abcdef"
    (elsewhere / "target" / f"4.x.B.JMS_dropq_metaS={token}").touch()
    (root.path / "q\x1b").symlink_to(elsewhere)
    assert token not in queue_notes.scan(root.layout.path).references
    (root.path / "q2").symlink_to(elsewhere)
    assert token in queue_notes.scan(root.layout.path).references
    shutil.rmtree(elsewhere / "target")


def test_a_link_that_looks_like_a_queue_half_deleted_is_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    root = make_queue(tmp_path / "root").root
    link = root.path / ".x.deleting-1-012345"
    link.symlink_to(elsewhere)
    root.sweep()
    assert [(found.kind, found.path) for found in fsck_root(root.context)] == [("under-way", str(link))]
    assert "is a symbolic link" in fsck_root(root.context)[0].detail
    assert [queue.name for queue in root.queues()] == ["q"]


def test_a_queue_that_is_a_link_is_deleted_with_what_it_leads_to_and_nothing_beside_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    away = tmp_path / "other disk"
    away.mkdir()
    (away / "kept").write_bytes(b"kept")
    base(queue).rename(away / "q")
    base(queue).symlink_to(away / "q")
    drop(queue, "a", b"a")
    take(queue).ack()
    queue.root.delete_queue("q")
    assert not os.path.lexists(queue.root.path / "q")
    assert os.listdir(away) == ["kept"]


def test_a_job_leads_nowhere_by_links(tmp_path: Path, elsewhere: Path) -> None:
    queue = make_queue(tmp_path / "root")
    manifest = '{"format": 1, "job": "x", "attempts": {"part": ["4.a.B"], "mine": ["4.b.B"]}}'
    job = base(queue) / "working" / ".job-x"
    (job / "mine").mkdir(parents=True)
    (job / "mine" / "4.b.B").write_bytes(b"mine")
    (job / "part").symlink_to(elsewhere / "part")
    (job / "manifest.json").write_text(manifest)
    (elsewhere / "manifest.json").write_text(manifest)
    for name in (".job-y", ".drop-y-1"):
        (base(queue) / "working" / name).symlink_to(elsewhere)
    try:
        queue.sweep(jobs_older_than=0)
        assert where(queue)["target"] == [b"mine"]
        assert not job.exists()
        with pytest.raises(StorageError, match="is a symbolic link"):
            Job(queue.context, "y").begin()
        assert not Job(queue.context, "y").sent
    finally:
        (elsewhere / "manifest.json").unlink()


def test_a_stream_leads_nowhere_by_a_link(tmp_path: Path, elsewhere: Path) -> None:
    queue = make_queue(tmp_path / "root")
    streams = base(queue) / ".dropq" / "streams"
    (streams / "s").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="is a symbolic link"):
        Journal(queue.context, "s", queue.subscribe(lease_period="1h", detached=True))
    queue.sweep()
    queue.fsck(repair=True)


def test_what_is_set_aside_goes_nowhere_by_a_link(tmp_path: Path, elsewhere: Path) -> None:
    queue = make_queue(tmp_path / "root")
    (base(queue) / "target" / "folder").mkdir()
    (base(queue) / ".dropq" / "set-aside").mkdir()
    (base(queue) / ".dropq" / "set-aside" / "target").symlink_to(elsewhere)
    (found,) = queue.fsck(repair=True)
    assert (found.kind, found.repaired) == ("directory", False) and "leads elsewhere" in found.detail


def test_a_root_a_queue_and_a_state_folder_may_be_links(tmp_path: Path) -> None:
    made = make_queue(tmp_path / "real")
    os.rename(made.root.path / "q", tmp_path / "disk")
    (made.root.path / "q").symlink_to(tmp_path / "disk")
    os.rename(tmp_path / "disk" / "processed", tmp_path / "archive")
    (tmp_path / "disk" / "processed").symlink_to(tmp_path / "archive")
    (tmp_path / "link").symlink_to(made.root.path)
    with Root(tmp_path / "link").queue("q") as queue:
        queue.send(b"a", properties={"long": "x" * 300})
        take(queue).ack()
        assert queue.fsck() == []
    assert len(os.listdir(tmp_path / "archive")) == 1


# -- names and bodies ------------------------------------------------------------------------------------------------

NAMES = [NASTY, "-", "--", "; id", "a" * 255, os.fsdecode(b"\xff\xfe"), "{}", "{}{}", "%s", "*", "4.%00%0A%2F.B", " "]


def test_a_command_gets_any_name_as_one_argument_and_runs_no_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = make_queue(tmp_path / "root")
    for number, name in enumerate(NAMES):
        (base(queue) / "target" / name).write_bytes(f"{number}".encode())
    out = tmp_path / "out"
    out.mkdir()
    script = 'n=$(cat); [ "$#" = 2 ] && [ "$n" = "$(cat "$1")" ] && [ "$1" = "$DROPQ_FILE" ] && [ "$2" = "<$1>" ] '
    script += f'&& case $1 in /*) printf %s "$DROPQ_ID" > "{out}/$n";; esac'
    work(queue, Command(["sh", "-c", script, "sh", "{}", "<{}>"]), until_empty=True)
    written = {int(path.name): path.read_bytes() for path in out.iterdir()}
    expected = {number: os.fsencode(name) for number, name in enumerate(NAMES)}
    expected[NAMES.index("4.%00%0A%2F.B")] = b"?\n/"
    assert written == expected
    assert not list(tmp_path.glob("pwned"))


def test_a_terminal_gets_no_control_character_of_names_properties_and_reasons(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.root.create_queue("other")
    evil = "%1B%5D0%3Bx%07%0A"
    (base(queue) / "target" / f"4.{evil}.B.0.{evil}.{evil}.{evil}.{evil}S={evil}").write_bytes(b"\x1b[2J\x07")
    (base(queue) / "target" / ".\x1b[2J").mkdir()
    take(queue).reject("\x1b[2J", **{"\x1b[2J": {"\x1b[2J": "\x9b"}, "stderr": "\x1b[2J\n\x1b[2J"})
    (file,) = names_in(queue, "error")
    shown_all = ""
    for argv in (
        ["show", "q", file],
        ["show", "q", "\x1b[2J"],
        ["browse", "q", "--state", "error"],
        ["tail", "q", "--state", "error"],
        ["cat", "q", file],
        ["fsck", "q"],
        ["health", "q", "--max-error", "0"],
        ["requeue", "q", "--all", "--yes"],
        ["move", "q", "other", "--all", "--yes"],
        ["config", "show", "q", "\x1b[2J"],
        ["ls", "\x1b[2J"],
    ):
        _, shown = on_terminal("--root", str(queue.root.path), *argv)
        plain = re.sub(r"\x1b\[(?:0|1|31|33)m", "", shown)  # the headings of tables, and what is wrong
        assert all(char.isprintable() or char in "\n\t" for char in plain), (argv, shown)
        shown_all += plain
    assert "properties.\\x1b]0;x\\x07\\x0a" in shown_all and "reason.\\x1b[2J" in shown_all


# -- modes -----------------------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    """The permission bits of all that lies in a folder, but for links."""
    found = {str(path): path.lstat().st_mode for path in [folder, *folder.rglob("*")]}
    return {path: stat.S_IMODE(mode) for path, mode in found.items() if not stat.S_ISLNK(mode)}


@pytest.mark.parametrize(("umask", "never"), [(0, 0o002), (0o027, 0o027), (0o077, 0o077)])
def test_nothing_that_any_verb_makes_is_open_to_more_than_the_umask_and_never_to_all(
    tmp_path: Path, umask: int, never: int
) -> None:
    def made() -> set[str]:
        os.umask(umask)
        queue = make_queue(tmp_path / "root")
        queue.root.create_queue("other")
        (tmp_path / "open").touch()
        (tmp_path / "open").chmod(0o666 & ~umask)
        queue.send_file(tmp_path / "open", move=True)
        return open_to(queue, lambda mode: mode & never)

    assert in_child(made) == set()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_everything_in_a_queue_has_the_modes_that_it_asks_for(tmp_path: Path, umask: int) -> None:
    def made() -> set[str]:
        os.umask(umask)
        queue = make_queue(tmp_path / "root", file_mode="0640", dir_mode="0750", group=os.getegid())
        queue.root.create_queue("other", file_mode="0640", dir_mode="0750")
        (tmp_path / "open").touch()
        (tmp_path / "open").chmod(0o666)
        queue.send_file(tmp_path / "open", move=True)
        inside = f"{queue.root.path}/"
        found = open_to(queue, lambda mode: mode not in (0o640, 0o750))
        return {path for path in found if path.startswith((f"{inside}q", f"{inside}other"))}

    assert in_child(made) == set()


def open_to(queue: Queue, wrong: Callable[[int], object]) -> set[str]:
    """Do every verb, and return whatever had wrong modes after one of them."""
    found: set[str] = set()
    for name, verb in VERBS.items():
        for _ in range(3):
            queue.send(b"x", properties={"long": "x" * 300})
        with reopened(queue) as other:
            if name != "delete":  # it has messages by now
                verb(other)
            found |= {path for path, mode in modes(queue.root.path).items() if wrong(mode)}
    return found


# -- links in the private folders of topics ----------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else, which has what a sweep would remove."""
    folder = tmp_path / "outside"
    for name in ("target", ".dropq/delayed"):
        folder.joinpath("home", name).mkdir(parents=True)
        folder.joinpath("home", name, "letter").touch()
    folder.joinpath("letter").touch()
    os.utime(folder / "letter", (0, 0))
    return folder


def letters(outside: Path) -> int:
    return sum(1 for _ in outside.rglob("letter"))


@pytest.mark.parametrize("name", ["new", "deleting"])
def test_a_sweep_of_a_topic_follows_no_link_in_the_place_of_a_private_folder(
    tmp_path: Path, outside: Path, name: str
) -> None:
    clock = Clock()
    topic = Root.create(tmp_path / "root", clock=clock).create_topic("a")
    Path(topic.queue.layout.private, name).symlink_to(outside)
    clock.advance(7200)
    assert topic.queue.sweep().refused
    with pytest.raises(StorageError, match="is a symbolic link"):
        Root(topic.root.path).queue("a").sweep()
    assert letters(outside) == 3


def test_a_root_whose_views_are_a_link_is_refused(tmp_path: Path, outside: Path) -> None:
    root = Root.create(tmp_path / "root")
    Path(root.path, ".dropq", "views").symlink_to(outside)
    with pytest.raises(StorageError, match="is a symbolic link"):
        Root(root.path).queues()
    assert letters(outside) == 3


def test_a_link_among_what_is_left_of_subscriptions_goes_and_not_what_it_leads_to(
    tmp_path: Path, outside: Path
) -> None:
    topic = Root.create(tmp_path / "root").create_topic("a")
    left = Path(topic.queue.layout.private, "deleting")
    left.mkdir()
    left.joinpath("audit.hq.deleting-1-abcdef").symlink_to(outside / "home")
    topic.queue.sweep()
    assert os.listdir(left) == []
    assert letters(outside) == 3


@pytest.mark.parametrize("linked", ["target", ".dropq"])
def test_a_link_in_a_subscription_goes_with_it_and_not_what_it_leads_to(
    tmp_path: Path, outside: Path, linked: str
) -> None:
    topic = Root.create(tmp_path / "root").create_topic("a")
    audit = Path(topic.create_subscription("audit", client_id="hq").layout.home)
    left = Path(topic.queue.layout.private, "deleting")
    left.mkdir()
    audit.joinpath(linked).rename(outside / "moved")
    audit.joinpath(linked).symlink_to(outside / "home" / linked)
    audit.rename(left / "audit.hq.deleting-1-abcdef")
    topic.queue.sweep()
    assert os.listdir(left) == []
    assert letters(outside) == 3
