"""The command line, run in this process where that shows it, and as a process of its own where only that does."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from children import unprivileged
from helpers import drop, take, until
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

import dropq
from dropq import Message, Queue, Root
from dropq.cli import look, output
from dropq.cli import main as cli
from dropq.cli.sending import Sending
from dropq.cli.shell import delayed_interrupt
from dropq.errors import Missing
from dropq.format.layout import ALL_STATES
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.sending import Outlet
from dropq.lifecycle.settlement import Claims
from dropq.storage import reading
from dropq.storage.files import Storage

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
#: What a terminal must never get out of a name.
NASTY = "a\x1b[31m\\b\n\u202e.csv"


@dataclass
class Ran:
    """What a run left: exit code and both outputs."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def rows(self) -> list[list[str]]:
        """The lines of plain output, by column."""
        return [line.split("\t") for line in self.out.splitlines()]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ran]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root.create(tmp_path / "root")
    made.create_queue("q", durability="none", redelivery_delay=0)
    return made


@pytest.fixture
def q(root: Root) -> Iterator[Queue]:
    with root.queue("q") as queue:
        yield queue


@pytest.fixture
def run(root: Root, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process, on the root of the test."""

    def run(*argv: str, input: bytes | str = b"", in_root: bool = True) -> Ran:
        data = input.encode() if isinstance(input, str) else input
        out, err = io.BytesIO(), io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
            patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8"))
            code = cli.main([*(("--root", str(root.path)) if in_root else ()), *argv])
            sys.stdout.flush()
            sys.stderr.flush()
            return Ran(code, out.getvalue(), err.getvalue().decode())

    return run


def environment(**more: str) -> dict[str, str]:
    hidden = ("DROPQ_ROOT", "DROPQ_DEBUG", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {"TERM": "xterm"} | more


class _Child(subprocess.Popen[bytes]):
    """A command that is killed when its block fails, instead of waited for."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def process(*argv: str | bytes, env: Mapping[str, str] | None = None, **options: Any) -> _Child:
    """Start a command line as a process of its own."""
    command = [sys.executable, "-m", "dropq", *argv]
    return _Child(command, env=env or environment(), **options)


def ran(*argv: str | bytes, input: bytes = b"", **options: Any) -> Ran:
    """Run a command line as a process of its own, with no terminal anywhere near."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process(*argv, **{**pipes, **options}) as child:
        out, err = child.communicate(input)
    return Ran(child.returncode, out or b"", (err or b"").decode())


def on_terminal(*argv: str, typed: bytes = b"") -> tuple[int, str]:
    """Run a command line on a terminal of its own; return the exit code and what the terminal showed."""
    master, slave = pty.openpty()
    with process(*argv, stdin=slave, stdout=slave, stderr=slave, env=environment(COLUMNS="120")) as child:
        os.close(slave)
        shown = b""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if not select.select([master], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(master, 4096)
            except OSError:  # EIO: whoever had the other end is gone
                break
            shown += data
            if typed and shown.rstrip().endswith(b"[y/N]:"):
                os.write(master, typed)
                typed = b""
        os.close(master)
        return child.wait(), shown.decode().replace("\r\n", "\n")


def failed(queue: Queue, *bodies: bytes, reason: str = "no good") -> list[str]:
    """Send messages and reject each; return their ids."""
    ids = []
    for body in bodies:
        ids.append(queue.send(body).id)
        message = queue.receive()
        assert message is not None
        message.reject(reason)
    return ids


def commands() -> dict[str, Any]:
    """Every command, those of groups by both of their names."""
    found = {}
    for name, command in get_command(cli.build()).commands.items():  # type: ignore[attr-defined]
        for inner, each in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = each
    return found


# -- what all commands share -------------------------------------------------------------------------------------


def test_each_command_says_what_it_does_and_what_each_option_is(run: Run) -> None:
    for name, command in commands().items():
        helped = run(*name.split(), "--help")
        assert helped.code == 0 and helped.out.startswith("Usage: dropq"), name
        first = command.help.split("\n")[0]
        assert first.endswith(".") and first in " ".join(helped.out.split()), name
        assert all(param.help for param in command.params), name


def test_the_list_of_commands_has_them_all_whole_and_under_their_headings(run: Run) -> None:
    helped = run("--help")
    assert helped.code == 0
    for heading, group in cli.COMMANDS.items():
        listed = helped.out.split(f"\n{heading}:\n")[1].split("\n\n")[0]
        for name in group:
            (line,) = re.findall(rf"^  {name}  +(.*)$", listed, re.MULTILINE)
            assert line.endswith("."), f"{name}: too long for one line"
            assert not line.endswith("..."), f"{name}: too long for one line"


def test_the_manual_has_every_command_in_a_table_and_in_an_example() -> None:
    manual = DOCS.read_text()
    rows = "\n".join(re.findall(r"^\| (`[^|]*) \|", manual, re.MULTILINE))
    examples = "\n".join(re.findall(r"^```sh\n(.*?)^```", manual, re.MULTILINE | re.DOTALL))
    for name in commands():
        assert re.search(rf"`{name}[` ]", rows), name
        # `serve` needs an extra, and `bridge` another root; their own papers have their examples.
        assert name in ("serve", "bridge") or re.search(rf"\bdropq (--json )?{name}\b", examples), name


def test_the_manual_names_only_options_that_a_command_has() -> None:
    prose = re.sub(r"^```.*?^```", "", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    there = {option for command in commands().values() for param in command.params for option in param.opts}
    everywhere = {"--root", "--json", "--help", "--install-completion", "--show-completion", "--uninstall-completion"}
    assert named > {"--dry-run", "--yes"}
    assert named - there - everywhere == set()


@pytest.mark.papers
def test_every_example_of_the_manual_runs(tmp_path: Path) -> None:
    shim = tmp_path / "bin" / "dropq"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dropq "$@"\n')
    shim.chmod(0o755)
    folder = tmp_path / "empty"
    folder.mkdir()
    examples = "\n".join(re.findall(r"^```sh\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL))
    assert examples.count("dropq ") > 25
    env = environment(PATH=f"{shim.parent}:{os.environ['PATH']}")
    done = subprocess.run(["sh", "-eux", "-c", examples], cwd=folder, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"error:" not in done.stderr, done.stderr.decode()


def test_json_may_be_asked_for_before_and_after_the_command(run: Run) -> None:
    assert run("--json", "ls").records == run("ls", "--json").records != []


def test_the_root_is_an_option_a_variable_or_the_nearest_above(
    run: Run, root: Root, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    monkeypatch.chdir(root.path / "q" / "target")
    assert run("ls", in_root=False).rows[0][0] == "q"
    monkeypatch.chdir(tmp_path)
    lost = run("ls", in_root=False)
    assert lost.code == 66
    assert all(way_out in lost.err for way_out in ("--root", "DROPQ_ROOT", "dropq init"))
    monkeypatch.setenv("DROPQ_ROOT", str(root.path))
    assert run("ls", in_root=False).rows[0][0] == "q"
    assert run("--root", "nowhere", "ls", in_root=False).code == 66


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"dropq {dropq.__version__}\n"


def test_without_a_command_it_tells_which_there_are(run: Run) -> None:
    nothing = run(in_root=False)
    assert (nothing.code, nothing.out) == (2, "")
    assert "requeue" in nothing.err


# -- exit codes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (dropq.LeaseLost("x"), 1),
        (dropq.InvalidName("x"), 2),
        (dropq.InvalidFilter("x"), 2),
        (ValueError("x"), 2),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), 65),
        (dropq.NoSuchQueue("x"), 66),
        (dropq.NoSuchMessage("x"), 66),
        (dropq.StorageError("x", errno=errno.ENOENT), 66),
        (FileNotFoundError(errno.ENOENT, "x"), 66),
        (Missing("x"), 69),
        (dropq.Unavailable("x"), 75),
        (RuntimeError("x"), 70),
        (dropq.DropqError("x"), 70),
        (dropq.QueueExists("x"), 73),
        (dropq.StorageError("x"), 74),
        (dropq.StorageError("x", errno=errno.ENOSPC), 74),
        (OSError(errno.EIO, "x"), 74),
        (dropq.QueueFull("x"), 75),
        (dropq.StorageError("x", errno=errno.EACCES), 77),
        (PermissionError(errno.EPERM, "x"), 77),
        (dropq.StorageError("x", errno=errno.EROFS), 77),
        (dropq.ConfigError("x"), 78),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert output.exit_code(error) == code


def test_every_error_of_the_library_has_an_exit_code_of_its_own() -> None:
    for kind in (getattr(dropq, name) for name in dropq.__all__):
        if isinstance(kind, type) and issubclass(kind, dropq.DropqError) and kind is not dropq.DropqError:
            assert output.exit_code(kind("x")) != 70, kind


def test_a_root_of_a_newer_format_is_refused_with_both_numbers(run: Run, root: Root) -> None:
    Path(root.layout.config_file).write_text("format = 2\n")
    done = run("browse", "q")
    assert done.code == 78
    assert "format 1" in done.err and "2" in done.err


def test_a_fault_is_one_line_and_a_traceback_only_for_who_asks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(self: Root) -> list[Queue]:
        raise RuntimeError("boom\x1b")

    monkeypatch.setattr(Root, "queues", fault)
    monkeypatch.delenv("DROPQ_DEBUG", raising=False)
    done = run("ls")
    assert (done.code, done.out) == (70, "")
    assert "boom\\x1b" in done.err and "DROPQ_DEBUG=1" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("DROPQ_DEBUG", "1")
    assert "Traceback" in run("ls").err


# -- escaping ------------------------------------------------------------------------------------------------------


@given(st.binary())
def test_what_is_escaped_can_be_shown_and_comes_back_as_it_was(raw: bytes) -> None:
    text = os.fsdecode(raw)
    assert output.escape(text).isprintable()
    assert output.unescape(output.escape(text)) == text


@given(st.text(st.characters(exclude_categories=())))
def test_no_text_at_all_is_shown_with_control_characters(text: str) -> None:
    assert output.escape(text).isprintable()
    assert all(char.isprintable() or char in "\n\t" for char in output.visible(text))
    output.visible(text).encode()


@pytest.mark.parametrize("name", [NASTY, "tab\there", os.fsdecode(b"caf\xe9.csv"), "back\\x41slash", "per%2Ecent", " "])
def test_a_foreign_name_goes_through_every_command_and_back(run: Run, q: Queue, name: str) -> None:
    drop(q, name, b"body")
    ((id, *_),) = run("browse", "q").rows
    assert id.isprintable()
    assert output.unescape(id) == name
    assert run("show", "q", id).rows[0] == ["id", id]
    assert run("cat", "q", id).raw == b"body"
    ((_, receipt, path),) = run("receive", "q").rows
    assert Path(output.unescape(path)).read_bytes() == b"body"
    assert run("extend", "q", receipt).code == 0
    assert run("reject", "q", receipt).code == 0
    assert os.listdir(q.layout.error) == [name]
    assert run("requeue", "q", "-", input=run("browse", "q", "--state", "error").raw).code == 0
    assert run("receive", "q").code == 0
    assert run("ack", "q", id).code == 0
    assert os.listdir(q.layout.processed) == [name]
    assert run("browse", "q", "--state", "processed", "--json").records[0]["id"] == name


def test_reasons_types_and_warnings_are_escaped_too(run: Run, q: Queue) -> None:
    q.send(b"", type=NASTY, properties={"p": NASTY}, correlation_id=NASTY)
    message = q.receive()
    assert message is not None
    message.reject(NASTY)
    Path(q.layout.target, "4.bad\x1b.B.....nI=x").touch()  # a property that is no integer: the library warns of it
    for argv in (["browse", "q", "--state", "error"], ["show", "q", message.id], ["browse", "q"], ["ack", "q", NASTY]):
        done = run(*argv)
        assert all(char.isprintable() or char in "\n\t" for char in done.out + done.err), argv
    assert run("show", "q", message.id, "--json").records[0]["reason"]["detail"] == NASTY


# -- set-up ------------------------------------------------------------------------------------------------------------


def test_init_makes_a_root_and_may_be_repeated(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("init", str(tmp_path / "new"), in_root=False).out == f"{tmp_path / 'new'}\n"
    assert run("--root", str(tmp_path / "shared"), "init", "--dropboxmq", in_root=False).code == 0
    assert (tmp_path / "shared" / "dropboxmq" / "transaction" / "prepared").is_dir()


def test_init_says_that_a_directory_was_a_root_or_lies_in_one(run: Run, root: Root, tmp_path: Path) -> None:
    assert run("init", str(tmp_path / "new"), in_root=False).err == ""
    assert run("init").err == f"{root.path} was a root already\n"
    inner = run("init", str(root.path / "q"), in_root=False)
    assert inner.code == 0 and f"{root.path}/q lies in the root {root.path}" in inner.err


def test_a_root_that_is_near_is_named_where_none_is_found(
    run: Run, root: Root, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root's neighbour").mkdir()
    for argv in (["ls"], ["--root", str(tmp_path), "ls"], ["--root", str(root.path / "q"), "ls"]):
        lost = run(*argv, in_root=False)
        assert lost.code == 66 and f"--root {root.path}?" in lost.err, argv


def test_where_a_setting_is_written_is_told_who_wants_to_set_one(run: Run) -> None:
    refused = run("config", "set", "q", "lease_period", "5m")
    assert refused.code == 2 and "queue.toml" in refused.err and "`dropq config check`" in refused.err


def test_create_takes_options_as_toml_or_as_text(run: Run, root: Root) -> None:
    settings = [
        "lease_period=30s",
        "max_deliveries=3",
        "history=false",
        'ignore=["*.bak", "*.x"]',
        'semantics="at-most-once"',
    ]
    done = run("create", "new", *(part for setting in settings for part in ("--set", setting)))
    assert done.out == f"{root.path}/new\n"
    config = root.queue("new").config
    assert (config.lease_period, config.max_deliveries, config.history) == (30, 3, False)
    assert (config.ignore, config.semantics) == (("*.bak", "*.x"), "at-most-once")
    assert run("create", "old", "--dropboxmq", "--json").records == [{"queue": "old", "path": f"{root.path}/old"}]
    assert (root.path / "old" / "incoming" / "target").is_dir()


def test_delete_refuses_a_queue_with_work_unless_it_is_forced(run: Run, q: Queue) -> None:
    q.send(b"x")
    assert "1 in target" in run("delete", "q").err
    assert run("delete", "q", "--dry-run").code == 1
    refused = run("delete", "q", "--yes")
    assert refused.code == 1 and "1 in target" in refused.err
    assert q.counts()["target"] == 1
    assert run("delete", "q", "--force", "--dry-run").code == 0
    assert run("delete", "q", "--force", "--yes").code == 0
    assert run("ls", "q").code == 66


def test_config_show_tells_value_and_source(run: Run, root: Root) -> None:
    queue = root.create_queue("new", lease_period="30s")
    assert run("config", "show", "new", "lease_period").rows == [["lease_period", '"30s"', queue.layout.config_file]]
    everything = run("config", "show", "new", "--json").records
    assert {"key": "max_deliveries", "value": 0, "source": "default"} in everything


def test_config_check_reads_files_by_hand_or_those_of_the_root(run: Run, q: Queue, tmp_path: Path) -> None:
    assert run("config", "check").code == 0
    Path(q.layout.config_file).write_text("lease_perod = 3\n")
    (tmp_path / "queue.toml").write_text("no toml")
    for argv, says in (([], "lease_period"), ([str(tmp_path / "queue.toml")], "line 1"), (["gone.toml"], "gone.toml")):
        done = run("config", "check", *argv)
        assert done.code == 78
        assert says in done.out
    assert run("browse", "q").code == 78


AMPS = """<AMPSConfig><SOW>
<QueueDefinition><Name>jobs</Name><LeasePeriod>30S</LeasePeriod><Filters>/a</Filters></QueueDefinition>
<LocalQueue><Topic>mail</Topic><MessageType>text</MessageType></LocalQueue>
</SOW></AMPSConfig>"""


def test_import_makes_the_queues_of_amps_and_says_what_it_leaves_out(run: Run, root: Root, tmp_path: Path) -> None:
    file = tmp_path / "amps.xml"
    file.write_text(AMPS)
    paths = {name: f"{root.path}/{name}" for name in ("jobs", "mail")}
    tried = run("config", "import", str(file), "--dry-run", "--json")
    assert tried.records == [
        {
            "queue": "jobs",
            "path": paths["jobs"],
            "settings": {"lease_period": "30s", "replication_type": "Queue"},
            "left_out": {"Filters": "dropq has no such key; the nearest is filter"},
        },
        {"queue": "mail", "path": paths["mail"], "settings": {"message_type": "text"}, "left_out": {}},
    ]
    assert not root.queue("jobs").exists()
    done = run("config", "import", str(file))
    assert (done.code, done.rows) == (0, [[*each] for each in paths.items()])
    assert done.err.splitlines() == [
        "jobs: roots that name each other share it, and dropq.toml has no [[peer]]",
        "jobs: Filters is left out: dropq has no such key; the nearest is filter",
        "created=2",
    ]
    assert (root.queue("jobs").config.lease_period, root.queue("mail").config.message_type) == (30, "text")


def test_import_makes_no_queue_where_one_cannot_be_made(
    run: Run, root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "amps.xml"
    file.write_text(AMPS.replace("mail", "q"))
    taken = run("config", "import", str(file))
    assert taken.code == 73 and f"{root.path} has q already" in taken.err
    file.write_text(AMPS.replace("text", "none such"))
    wrong = run("config", "import", str(file))
    assert wrong.code == 78 and 'MessageType = "none such"' in wrong.err
    (root.path / "late").mkdir()  # RACE: it comes once all was checked
    late = AMPS.replace("<SOW>", "<SOW><Queue><Name>first</Name></Queue><Queue><Name>late</Name></Queue>")
    file.write_text(late)
    monkeypatch.setattr("dropq.upkeep.queues.refuse_taken", lambda root, wanted: None)
    assert run("config", "import", str(file)).code == 73
    (root.path / "late").rmdir()
    file.write_text("<AMPSConfig/>")
    assert run("config", "import", str(file)).code == 1
    assert run("config", "import", str(tmp_path / "gone.xml")).code == 66
    assert [queue.name for queue in root.queues()] == ["q"]


# -- looking -----------------------------------------------------------------------------------------------------------


def test_ls_counts_the_states_and_goes_on_past_a_broken_queue(run: Run, root: Root, q: Queue) -> None:
    failed(q, b"x")
    q.send_many([b"y", b"z"])
    q.pause()
    assert run("ls").rows == [["q", "2", "0", "0", "1", "0", "0", "0", "paused"]]
    root.create_queue("broken")
    Path(root.path, "broken", "queue.toml").write_text("no toml")
    assert run("ls", "broken").code == 78
    done = run("ls", "--json")
    assert done.code == 1 and "broken" in done.err
    assert [(record["queue"], record["target"], record["paused"]) for record in done.records] == [("q", 2, True)]


TEMPORARY = "temp-1795248503411000-1501319413"


def test_ls_leaves_out_temporary_queues_which_health_and_fsck_do_not(run: Run, root: Root, q: Queue) -> None:
    root.create_queue(TEMPORARY)
    root.create_queue("temp-of-mine")
    assert [row[0] for row in run("ls").rows] == ["q", "temp-of-mine"]
    assert [record["queue"] for record in run("ls", "--json").records] == ["q", "temp-of-mine"]
    assert [row[0] for row in run("ls", "-a").rows] == ["q", TEMPORARY, "temp-of-mine"]
    assert [row[0] for row in run("ls", TEMPORARY).rows] == [TEMPORARY]
    assert [row[0] for row in run("health").rows] == ["q", TEMPORARY, "temp-of-mine"]
    Path(root.path, TEMPORARY, "target", "folder").mkdir()
    assert TEMPORARY in run("fsck").out


def test_a_root_of_temporary_queues_alone_is_not_said_to_have_none(run: Run, root: Root) -> None:
    root.create_queue(TEMPORARY)
    assert run("delete", "q", "--yes").code == 0
    done = run("ls")
    assert (done.code, done.out) == (0, "")
    assert done.err == "temporary queues that are not listed: 1; --all lists them\n"


def test_a_header_names_the_columns_of_piped_lines(run: Run, q: Queue) -> None:
    header, counts = run("ls", "--header").rows
    named = dict(zip(header, counts, strict=True))
    assert (named["queue"], named["target"], named["error"], header[-1]) == ("q", "0", "0", "paused")
    assert run("ls", "--header", "--json").records == run("ls", "--json").records


def test_every_state_that_a_queue_counts_is_listed_and_can_be_named(run: Run, q: Queue) -> None:
    (listed,) = run("--json", "ls", "q").records
    assert set(q.counts()) == set(ALL_STATES) == listed.keys() - {"queue", "paused"}
    for state in ALL_STATES:
        assert run("browse", "q", "--state", state).code == 0


def test_a_filter_that_finds_nothing_is_told_of_properties_and_of_nothing_else(run: Run) -> None:
    """A path, or a function of AMPS, is no property that could be misspelt."""
    ran = run("browse", "q", "--filter", "LENGTH(/a) = 1 AND UPPER(/b) = colour OR IF(/c = 1, size, 2) = 2")
    assert [line.rpartition(" has the property ")[2].partition(":")[0] for line in ran.err.splitlines()] == [
        "colour",
        "size",
    ]


@pytest.mark.parametrize("line", ["browse q --state error", "requeue q --yes", "purge q --state error --yes"])
def test_a_filter_whose_property_is_misspelt_is_told_of_the_one_that_is_there(run: Run, q: Queue, line: str) -> None:
    """Also by the verbs that repair, which would else only count nothing."""
    q.send("a", properties={"customer": "bob"})
    with q.subscribe() as subscription:
        subscription.receive(timeout=0).reject("no")  # type: ignore[union-attr]
    ran = run(*line.split(), "--filter", "custmer = 'bob'")
    assert ran.code == 0 and "no message in error/ of q has the property custmer: is it customer?" in ran.err
    assert q.counts()["error"] == 1


def test_where_there_is_nothing_to_requeue_nobody_is_asked(run: Run, q: Queue) -> None:
    """There is no terminal here, where any question would end with 2."""
    ran = run("requeue", "q", "--all")
    assert (ran.code, ran.err) == (0, "requeued=0 failed=0\n")
    with q.subscribe() as subscription:
        q.send("a")
        subscription.receive(timeout=0).reject("no")  # type: ignore[union-attr]
    assert run("requeue", "q", "--all").code == 2


@pytest.mark.parametrize(("filter", "bodies"), [("n > 3", ["number"]), ("n = '7'", ["text"]), ("n = 7", ["number"])])
def test_a_property_is_a_string_unless_its_type_is_given(run: Run, q: Queue, filter: str, bodies: list[str]) -> None:
    run("send", "q", "-", "-p", "n=7", input="text")
    run("send", "q", "-", "-p", "n:I=7", input="number")
    found = run("browse", "q", "--filter", filter, "--json").records
    assert [q.find(record["id"]).text for record in found] == bodies


def test_browse_lists_in_order_of_delivery_with_what_a_state_needs(run: Run, q: Queue) -> None:
    low, high = q.send(b"x").id, q.send(b"yy", priority=9, type="order").id
    rows = run("browse", "q").rows
    assert [(row[0], row[1], row[3], row[5]) for row in rows] == [(high, "9", "2", "order"), (low, "4", "1", "")]
    assert [row[0] for row in run("browse", "q", "-n", "1").rows] == [high]
    (bad,) = failed_first(q)
    (row,) = run("browse", "q", "--state", "error").rows
    assert (row[0], row[-1]) == (bad, "rejected: no good")
    q.send(b"later", delay="1h")
    assert run("browse", "q", "--state", "delayed").rows[0][-1].endswith("Z")
    message = q.receive()
    assert message is not None
    assert run("browse", "q", "--state", "processing").rows[0][6] == message.owner


def failed_first(queue: Queue) -> list[str]:
    """Reject the first message that waits."""
    message = queue.receive()
    assert message is not None
    message.reject("no good")
    return [message.id]


def test_a_queue_without_delayed_messages_has_none_to_show(run: Run, q: Queue) -> None:
    for argv in (["browse", "q"], ["tail", "q"], ["purge", "q", "--all", "--yes"]):
        done = run(*argv, "--state", "delayed")
        assert (done.code, done.out) == (0, "")


def test_json_has_numbers_times_and_every_name(run: Run, q: Queue) -> None:
    q.send(b"body", expires_in="1h", properties={"n": 5, "f": float("inf"), "s": "é"}, reply_to="answers")
    (record,) = run("browse", "q", "--json").records
    assert (record["bytes"], record["priority"], record["reply_to"]) == (4, 4, "answers")
    assert record["properties"] == {"n": 5, "f": "Infinity", "s": "é"}
    for key in ("timestamp", "expiration"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record[key])
    assert record["deadline"] is None


def test_show_tells_the_reason_and_the_counters(run: Run, q: Queue) -> None:
    q.send(b"x", properties={"n": 1})
    message = q.receive()
    assert message is not None
    message.fail("broke", traceback="line 1\nline 2", stderr="oh\n")
    shown = dict(run("show", "q", message.id).rows)
    assert shown["state"] == "error" and shown["properties.n"] == "1" and shown["delivery_count"] == "1"
    assert (shown["reason.detail"], shown["reason.traceback"]) == ("broke", "line 1\\x0aline 2")
    assert {"cancels", "redelivered", "bytes", "path"} <= shown.keys()
    (record,) = run("show", "q", message.id, "--json").records
    assert record["reason"]["stderr"] == "oh\n"


def test_cat_writes_the_bytes_as_they_are(run: Run, q: Queue) -> None:
    first, second = q.send(b"\x00\xff\n").id, q.send(b"text").id
    assert run("cat", "q", first, second).raw == b"\x00\xff\ntext"
    assert run("cat", "q", "-", input=f"{second}\n{first}\n").raw == b"text\x00\xff\n"
    assert run("cat", "q", first, second, "--json").records == [
        {"id": first, "body_base64": "AP8K"},
        {"id": second, "body": "text"},
    ]
    partly = run("cat", "q", "gone", second)
    assert (partly.code, partly.raw) == (1, b"text")


def test_tail_lists_what_came_last(run: Run, q: Queue) -> None:
    ids = [q.send(b"x", priority=priority).id for priority in (1, 9, 5)]
    assert [row[0] for row in run("tail", "q", "-n", "2").rows] == ids[1:]
    assert run("tail", "q", "-n", "0").rows == []


def test_tail_lists_of_what_matches_what_came_last(run: Run, q: Queue) -> None:
    ids = [q.send(f'{{"n": {n}}}', priority=priority).id for n, priority in enumerate((5, 9, 5, 1))]
    assert [row[0] for row in run("tail", "q", "--filter", "JMSPriority > 4").rows] == ids[:3]
    assert [row[0] for row in run("tail", "q", "-n", "1", "--filter", "/n < 2").rows] == ids[1:2]
    assert run("tail", "q", "--filter", "/n > 9").rows == []


def test_tail_goes_on_with_what_matches(run: Run, q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [q.send("a", type="x").id]
    looks = iter(["y", "x", ""])

    def sleep(seconds: float) -> None:
        kind = next(looks)
        if not kind:
            raise KeyboardInterrupt
        sent = q.send("b", type=kind)
        if kind == "x":
            ids.append(sent.id)

    monkeypatch.setattr(look, "time", SimpleNamespace(sleep=sleep))
    done = run("tail", "q", "-f", "--filter", "JMSType = 'x'")
    assert [row[0] for row in done.rows] == ids
    assert len(ids) == 2


def test_tail_shows_each_file_of_one_name(run: Run, q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(q, "day.csv", b"first")
    looks = iter([True, False])

    def sleep(seconds: float) -> None:
        if not next(looks):
            raise KeyboardInterrupt
        drop(q, "next.csv", b"second")
        take(q).ack()
        os.rename(f"{q.layout.target}/next.csv", f"{q.layout.target}/day.csv")

    monkeypatch.setattr(look, "time", SimpleNamespace(sleep=sleep))
    assert [row[0] for row in run("tail", "q", "-f").rows] == ["day.csv", "day.csv"]


# -- sending, receiving, settling --------------------------------------------------------------------------------------


def test_send_takes_files_and_standard_input(run: Run, q: Queue, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    sent = run("send", "q", str(one), "-", str(two), input=b"in")
    assert [run("cat", "q", id).raw for (id,) in sent.rows] == [b"1", b"in", b"2"]
    assert run("send", "q", input=b"").code == 0
    partly = run("send", "q", "gone", str(one))
    assert partly.code == 1 and len(partly.rows) == 1
    assert run("send", "q", str(two), "--move").code == 0
    assert one.exists() and not two.exists()
    assert q.counts()["target"] == 6
    (record,) = run("send", "q", "--json", input=b"").records
    assert record == {"id": record["id"], "accepted": True, "delivered_to": "q"}


def test_a_plain_message_from_standard_input_has_a_plain_name(run: Run, q: Queue) -> None:
    ((id,),) = run("send", "q", input=b"x").rows
    assert os.listdir(q.layout.target) == [f"4.{id}.B"]


def test_send_gives_a_message_all_that_a_name_can_hold(run: Run, q: Queue) -> None:
    properties = ["s=text", "e=", "eq=a=b", "h:H=5", "b:B=true", "f:F=1.5", "l:L=9999999999"]
    headers = ["--priority", "7", "--type", "t", "--correlation-id", "c", "--reply-to", "r", "--id", "mine"]
    times = ["--expires-in", "1h", "--delay", "1m"]
    done = run("send", "q", *headers, *times, *(part for each in properties for part in ("-p", each)), input=b"x")
    assert done.rows == [["mine"]]
    message = q.find("mine", ["delayed"])
    assert (message.priority, message.type, message.correlation_id, message.reply_to) == (7, "t", "c", "r")
    assert message.properties == {
        "s": "text", "e": "", "eq": "a=b", "h": 5, "b": True, "f": 1.5, "l": 9999999999
    }  # fmt: skip
    assert message.expiration is not None and message.not_before is not None
    assert run("send", "q", "-p", "short:H=5", "-p", "text=5", input=b"").code == 0
    assert "shortH=5&textS=5" in os.listdir(q.layout.target)[0]


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"\n", [b""]),
        (b"x" * 200_000, None),
    ],
)
def test_each_line_becomes_a_message(run: Run, q: Queue, text: bytes, bodies: list[bytes] | None) -> None:
    done = run("send", "q", "--lines", "-p", "k=v", input=text)
    messages = list(q.browse())
    assert [message.body for message in messages] == ([text] if bodies is None else bodies)
    assert [message.id for message in messages] == [id for (id,) in done.rows]
    assert all(message.properties == {"k": "v"} for message in messages)


def test_many_lines_come_out_in_order(run: Run, q: Queue) -> None:
    lines = [b"%060d" % number for number in range(2500)]  # more than one read, and more than one batch
    assert len(run("send", "q", "--lines", input=b"\n".join(lines)).rows) == len(lines)
    assert [message.body for message in q.browse()] == lines


def test_receive_claims_with_a_lease_and_prints_what_settles(run: Run, root: Root, q: Queue) -> None:
    sent = q.send(b"body").id
    ((id, receipt, path),) = run("receive", "q").rows
    assert id == sent and Path(path).name == receipt and Path(path).read_bytes() == b"body"
    (message,) = q.browse("processing")
    assert message.deadline is not None and 50 < message.deadline.timestamp() - time.time() < 61
    assert run("receive", "q").code == 66
    leased = root.create_queue("leased", lease_period="1h", durability="none")
    leased.send_many([b"", b"", b""])
    (by_queue, by_option) = [
        *run("receive", "leased", "--json").records,
        *run("receive", "leased", "--lease", "2h", "--json").records,
    ]
    assert by_queue["deadline"] < by_option["deadline"]
    assert len(run("receive", "leased", "-n", "5").rows) == 1


def test_receive_waits_as_long_as_it_is_told(run: Run, q: Queue) -> None:
    began = time.monotonic()
    assert run("receive", "q", "--wait", "200ms").code == 66
    assert time.monotonic() - began >= 0.2
    q.send(b"x", delay="100ms")
    assert run("receive", "q", "--wait", "20s").code == 0


def test_each_verb_settles_as_it_says(run: Run, q: Queue) -> None:
    def received() -> str:
        q.send(b"x")
        return run("receive", "q").rows[0][1]

    def state_of(id: str) -> tuple[str, str]:
        message = q.find(id)
        return message.state, output.reason_text(message.reason)

    receipt = received()
    assert run("ack", "q", receipt).out == ""
    assert q.counts()["processed"] == 1
    assert run("ack", "q", receipt).code == 1
    receipt = received()
    assert run("nack", "q", receipt, "--delay", "1h").code == 0
    assert [message.cancels for message in q.browse("delayed")] == [1]
    for verb, why in (("fail", "failed"), ("reject", "rejected")):
        (record,) = run(verb, "q", received(), "--reason", "so it is", "--json").records
        assert record["receipt"] is None
        assert state_of(record["id"]) == ("error", f"{why}: so it is")
    old = received()
    ((new,),) = run("extend", "q", old, "--by", "1h").rows
    assert old != new
    assert run("ack", "q", old).code == 0, "a receipt stays good when the lease is renewed"


def test_what_receive_printed_can_be_piped_into_the_verbs(run: Run, root: Root) -> None:
    strict = root.create_queue("strict", leasing="strict", durability="none")
    strict.send_many([b"1", b"2", b"3"])
    received = run("receive", "strict", "-n", "3")
    assert run("ack", "strict", received.rows[0][0]).code == 1, "an id is no receipt"
    extended = run("extend", "strict", "-", input=received.raw)
    assert len(extended.rows) == 3
    assert run("ack", "strict", "-", input=extended.raw).code == 0
    assert strict.counts()["processed"] == 3


def test_an_ack_is_deferred_where_that_is_asked_for(run: Run, q: Queue) -> None:
    id, waits = "1763805600000000-0123456789", q.send(b"waits").id
    assert run("ack", "q", id).code == 1
    done = run("ack", "q", id, waits, "--defer", "--json")
    assert done.code == 0 and f"{id} was not acknowledged now: its ack is remembered" in done.err
    assert [(record["id"], record["state"]) for record in done.records] == [(id, None), (waits, "processed")]
    assert q.counts()["processed"] == 1
    q.send(b"x", message_id=id)
    assert run("receive", "q").code == 66
    assert q.counts()["processed"] == 2
    assert run("ack", "q", id, "--defer").code == 1, "it is settled"


def test_no_ack_is_deferred_when_one_of_the_ids_cannot_be(run: Run, q: Queue) -> None:
    sent = q.send(b"a")
    refused = run("ack", "q", "-", "--defer", input=f"{sent.id}\norder-17\n")
    assert refused.code == 2 and "the ack of 'order-17' cannot be deferred" in refused.err
    assert q.counts()["target"] == 1


def test_of_several_receipts_the_good_ones_are_settled(run: Run, q: Queue) -> None:
    q.send_many([b"1", b"2"])
    good = [row[1] for row in run("receive", "q", "-n", "2").rows]
    done = run("ack", "q", good[0], "gone", good[1])
    assert done.code == 1 and "gone" in done.err
    assert q.counts()["processed"] == 2


def test_who_settles_what_is_not_held_is_told_where_it_lies(run: Run, root: Root, q: Queue) -> None:
    root.create_queue("other").send(b"x", message_id="elsewhere")
    id = q.send(b"1").id
    receipt = run("receive", "q").rows[0][1]
    assert run("ack", "q", receipt).code == 0
    for verb, named in (("ack", id), ("ack", receipt), ("nack", receipt), ("extend", receipt)):
        again = run(verb, "q", named)
        assert again.code == 1 and again.err.endswith(f"; message {id} lies in processed/ of queue q\n")
    for verb in ("ack", "show", "cat"):
        assert "; message elsewhere lies in target/ of queue other" in run(verb, "q", "elsewhere").err
    assert "lies in" not in run("ack", "q", "nowhere").err
    assert run("ack", "q", *["elsewhere"] * 9).err.count("lies in") == 3, "each looks through all queues"


def test_ack_takes_all_that_match_a_filter(run: Run, q: Queue) -> None:
    ids = [q.send(b"x", priority=9 - number).id for number in range(3)]
    run("receive", "q")
    by_filter = ("ack", "q", "--filter", "JMSPriority > 7")
    assert "Acknowledge what matches of 3 messages in delayed/, target/, processing/ of q?" in run(*by_filter).err
    assert run(*by_filter, "--dry-run").err == "would_acknowledge=2 failed=0\n"
    assert q.counts()["processed"] == 0
    done = run(*by_filter, "--yes")
    assert (done.code, done.err) == (0, "acknowledged=2 failed=0\n")
    assert sorted(done.rows) == sorted([id, "ok", "acknowledged"] for id in ids[:2])
    assert q.counts() | {"target": 1, "processed": 2, "processing": 0} == q.counts()


@pytest.mark.parametrize("rest", [[], ["ID", "--filter", "TRUE"], ["--filter", "TRUE", "--defer"], ["ID", "--dry-run"]])
def test_ack_refuses_what_chooses_no_messages_or_twice(run: Run, q: Queue, rest: list[str]) -> None:
    q.send(b"x", message_id="ID")
    assert run("ack", "q", *rest, "--yes").code == 2
    assert q.counts()["target"] == 1


# -- working, waiting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "state", "code", "says"),
    [
        ("exit 0", "processed", 0, "1 acknowledged in "),
        ("exit 3", "error", 1, "1 failed try in "),
        ("exit 65", "error", 1, "1 rejected in "),
        ("exit 127", "target", 69, "1 given back unfinished in "),
    ],
)
def test_work_settles_by_exit_status(run: Run, q: Queue, command: str, state: str, code: int, says: str) -> None:
    q.send(b"x")
    done = run("work", "q", "--until-empty", "--poll", "--", "sh", "-c", command)
    assert done.code == code
    assert q.counts()[state] == 1
    assert says in done.err


def test_work_until_empty_says_what_waits_that_no_filter_matches(run: Run, q: Queue) -> None:
    for region in ("EU", "US", "US"):
        q.send(b"x", properties={"region": region})
    work = ("work", "q", "--until-empty", "--filter", "region = 'EU'")
    said = "2 messages wait in q that the filter does not match\n"
    for _ in range(2):
        done = run(*work, "--", "true")
        assert (done.code, done.err.count(said)) == (0, 1)
    assert run(*work, "-q", "--", "true").err == ""
    Path(q.layout.config_file).write_text("filter = \"region = 'US'\"")
    q.send(b"x", properties={"region": "EU"})
    done = run("work", "q", "--until-empty", "--", "true")
    assert done.code == 0 and "1 message waits in q that the filter does not match\n" in done.err


def test_work_gives_the_command_its_arguments_as_they_are(run: Run, q: Queue, tmp_path: Path) -> None:
    id = q.send(b"body", properties={"n": 5}).id
    script = 'cat > "$1/body"; cat "$2" > "$1/file"; echo "$DROPQ_ID $DROPQ_PROP_n $3" > "$1/env"'
    argv = ["sh", "-c", script, "sh", str(tmp_path), "{}", "--json"]
    assert run("work", "q", "-j", "2", "--until-empty", "--", *argv).code == 0
    read = {name: (tmp_path / name).read_text() for name in ("body", "file", "env")}
    assert read == {"body": "body", "file": "body", "env": f"{id} 5 --json\n"}


def test_wait_tells_what_came_of_it(run: Run, q: Queue) -> None:
    assert run("wait", "q", "--empty").code == 0
    q.send(b"x")
    assert run("wait", "q", "--count", "1").code == 0
    late = run("wait", "q", "--empty", "--timeout", "100ms")
    assert late.code == 75 and late.err.startswith("timed out: queue q has ")
    assert run("wait", "q", "--count", "2", "--timeout", "0").code == 75
    message = q.receive()
    assert message is not None
    assert run("wait", "q", "--id", message.id, "--timeout", "50ms").code == 75
    message.ack()
    assert run("wait", "q", "--id", message.id).rows == [["processed"]]
    (bad,) = failed(q, b"x")
    assert (run("wait", "q", "--id", bad).code, run("wait", "q", "--id", bad).rows) == (1, [["error"]])


def test_wait_counts_only_what_matches(run: Run, q: Queue) -> None:
    q.send('{"n": 1}', type="x")
    q.send('{"n": 2}', type="y")
    assert run("wait", "q", "--count", "1", "--filter", "JMSType = 'x'").code == 0
    assert run("wait", "q", "--count", "2", "--filter", "JMSType = 'x'", "--timeout", "0").code == 75
    assert run("wait", "q", "--count", "1", "--filter", "/n = 2").code == 0
    late = run("wait", "q", "--empty", "--filter", "JMSType = 'x'", "--timeout", "0")
    assert late.code == 75
    assert late.err == "timed out: queue q has 1 in target, 0 in delayed, 0 in processing that match\n"
    message = q.receive()
    assert message is not None and message.type == "x"
    assert run("wait", "q", "--empty", "--filter", "JMSType = 'x'", "--timeout", "0").code == 75
    message.ack()
    assert run("wait", "q", "--empty", "--filter", "JMSType = 'x'").code == 0
    assert run("wait", "q", "--empty", "--timeout", "0").code == 75


def test_a_message_that_goes_back_during_the_look_keeps_a_wait_waiting(
    run: Run, q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    q.send(b"x")
    message = q.receive()
    assert message is not None
    listed = reading.message_counts

    def counts(folder: str, patterns: tuple[str, ...]) -> Iterator[int]:
        if folder == q.layout.processing and message.held:
            message.nack(delay=0)  # target/ was listed before
        return listed(folder, patterns)

    monkeypatch.setattr(reading, "message_counts", counts)
    assert run("wait", "q", "--empty", "--timeout", "0").code == 75
    assert not message.held


def test_wait_for_a_message_that_leaves_no_history(run: Run, root: Root) -> None:
    queue = root.create_queue("brief", history=False, durability="none")
    id = queue.send(b"x").id
    assert run("wait", "brief", "--id", id, "--timeout", "0").code == 75
    message = queue.receive()
    assert message is not None
    message.ack()
    assert run("wait", "brief", "--id", id).code == 0


# -- repair ------------------------------------------------------------------------------------------------------------


def test_all_is_not_taken_without_a_yes(run: Run, root: Root, q: Queue) -> None:
    failed(q, b"1", b"2")
    root.create_queue("other")
    for argv in (
        ["requeue", "q", "--all"],
        ["move", "q", "other", "--all", "--state", "error"],
        ["purge", "q", "--state", "error", "--all"],
        ["purge", "q", "--state", "error", "some-id"],
        ["prune", "q", "--state", "error", "--keep-count", "0"],
        ["fsck", "--repair"],
        ["delete", "q", "--force"],
    ):
        done = run(*argv)
        assert (done.code, done.out) == (2, ""), argv
        assert "--yes" in done.err and "--dry-run" in done.err
    assert q.counts()["error"] == 2


def test_requeue_takes_named_messages_those_of_stdin_or_all(run: Run, root: Root, q: Queue) -> None:
    ids = failed(q, b"1", b"2", b"3", b"4")
    assert run("requeue", "q", "--all", "--dry-run").err == "would_requeue=4 failed=0\n"
    assert q.counts()["error"] == 4
    done = run("requeue", "q", ids[0])
    assert (done.rows, done.err) == ([[ids[0], "ok", "requeued to q"]], "requeued=1 failed=0\n")
    assert run("requeue", "q", "-", input=f"{ids[1]}\tmore\tcolumns\n\n").code == 0
    partly = run("requeue", "q", "gone", ids[2], "--json")
    assert partly.code == 1 and partly.err == "requeued=1 failed=1\n"
    assert {record["id"]: record["ok"] for record in partly.records} == {"gone": False, ids[2]: True}
    other = root.create_queue("other", durability="none")
    assert run("requeue", "q", "--all", "--yes", "--to", "other").code == 0
    assert (q.counts()["target"], other.counts()["target"]) == (3, 1)


def test_requeue_drops_expirations_unless_told(run: Run, q: Queue) -> None:
    for _ in range(2):
        q.send(b"x", expires_in="1h")
        failed_first(q)
    first, second = [message.id for message in q.browse("error")]
    assert run("requeue", "q", first).code == run("requeue", "q", second, "--keep-expiration").code == 0
    assert {message.id: message.expiration is not None for message in q.browse()} == {first: False, second: True}


def test_move_keeps_what_requeue_resets(run: Run, root: Root, q: Queue) -> None:
    id = q.send(b"x", expires_in="1h").id
    message = q.receive()
    assert message is not None
    message.nack()
    other = root.create_queue("other", durability="none")
    assert run("move", "q", "other", "--all", "--yes").rows == [[id, "ok", "moved to other"]]
    (moved,) = other.browse()
    assert (moved.id, moved.delivery_count, moved.cancels) == (id, 1, 1)
    assert moved.expiration is not None


def test_replay_sends_what_was_archived_again(run: Run, root: Root, q: Queue) -> None:
    sent = q.send_many([b"1", b"2", b"3"])
    while message := q.receive():
        message.ack()
    refused = run("replay", "q")
    assert refused.code == 2 and "Replay the messages in processed/ of q, from epoch on, to q?" in refused.err
    assert [row[:2] for row in run("replay", "q", "--dry-run").rows] == [[one.id, "ok"] for one in sent]
    assert q.counts()["target"] == 0
    done = run("replay", "q", "--from", sent[1].id, "--yes", "--json")
    assert done.code == 0 and "replayed=2 failed=0" in done.err
    assert [record["id"] for record in done.records] == [one.id for one in sent[1:]]
    other = root.create_queue("other", durability="none")
    listed = run("browse", "q", "--state", "processed", "--filter", f"JMSMessageID = 'ID:{sent[0].id}'").raw
    assert run("replay", "q", "-", "nothing", "--to", "other", input=listed).code == 1
    assert [message.id for message in other.browse()] == [sent[0].id]
    assert q.counts()["processed"] == 3


@pytest.mark.parametrize("verb", ["show", "cat"])
def test_of_several_messages_of_one_id_the_first_to_be_delivered_is_shown_and_acknowledged(
    run: Run, root: Root, verb: str
) -> None:
    queue = root.create_queue("twins", durability="none")
    bodies = [b"%d" % number for number in range(12)]
    for body in bodies:
        queue.send(body, message_id="order-7", priority=-int(body))
    for body in bodies[:-1]:
        ran = run(verb, "twins", "order-7", *(["--raw"] if verb == "cat" else []))
        assert f"{12 - int(body)} messages in target/ have the id order-7; this is the first" in ran.err
        path = queue.find("order-7").path
        assert Path(path).read_bytes() == body
        assert (body if verb == "cat" else path.encode()) in ran.raw
        assert run("ack", "twins", "order-7").code == 0
        assert not os.path.exists(path)
    assert run(verb, "twins", "order-7").err == ""


@pytest.mark.parametrize("history", ["true", "false"])
def test_what_comes_settled_is_nothing_to_acknowledge(run: Run, root: Root, history: str) -> None:
    run("create", "once", "--set", "semantics=at-most-once", "--set", f"history={history}")
    queue = root.queue("once")
    queue.send(b"x")
    received = run("receive", "once")
    assert received.code == 0
    acked = run("ack", "once", "-", input=received.raw)
    assert acked.code == 0
    assert "settles messages before it delivers them: there is nothing to acknowledge" in acked.err
    for verb in ("nack", "fail", "reject", "extend"):
        refused = run(verb, "once", "-", input=received.raw)
        assert refused.code == 1
        assert "settles messages before it delivers them: it is too late for that" in refused.err
    assert run("ack", "q", "-", input=received.raw).code == 1  # in another queue a receipt is missing


@pytest.mark.parametrize("point", ["yesterday", "", "2026-13-01"])
def test_replay_refuses_a_bad_point_and_says_what_is_allowed(run: Run, q: Queue, point: str) -> None:
    refused = run("replay", "q", "--from", point, "--yes")
    assert refused.code == 2
    assert "epoch, now, creation, an id that dropq made, or an ISO 8601 date or time" in refused.err


def test_purge_removes_by_id_by_age_or_all(run: Run, q: Queue) -> None:
    ids = failed(q, b"1", b"2", b"3")
    purge = ("purge", "q", "--state", "error")
    assert run(*purge, ids[0], "--yes").rows == [[ids[0], "ok", "removed"]]
    assert run(*purge, "--older-than", "1h", "--yes").rows == []
    assert len(run(*purge, "--all", "--dry-run").rows) == 2
    assert q.counts()["error"] == 2
    assert run(*purge, "--older-than", "0", "-y").err.endswith("failed=0\n")
    assert run(*purge, "--all", "--yes").code == 0
    assert q.counts()["error"] == 0


def test_expire_moves_to_expired_by_id_by_filter_or_all(run: Run, q: Queue) -> None:
    ids = [q.send(b"x", priority=9 - number).id for number in range(4)]
    assert q.receive() is not None
    assert run("expire", "q", ids[1]).rows == [[ids[1], "ok", "expired"]]
    assert run("expire", "q", "--all").code == 2
    asked = "Expire all 3 messages in delayed/, target/, processing/ of q?"
    assert asked in run("expire", "q", "--all").err
    assert run("expire", "q", "--filter", "JMSPriority = 7", "--dry-run").rows == [[ids[2], "ok", "would be expired"]]
    assert q.counts()["expired"] == 1
    assert run("expire", "q", "--filter", "JMSPriority = 7", "--yes").rows == [[ids[2], "ok", "expired"]]
    assert run("expire", "q", "--state", "processing", "--all", "--yes").rows == [[ids[0], "ok", "expired"]]
    done = run("expire", "q", "--all", "-y", "-q")
    assert (done.rows, done.err) == ([], "expired=1 failed=0\n")
    assert run("expire", "q", ids[0]).code == 1
    assert q.counts()["expired"] == 4


def test_prune_keeps_the_newest(run: Run, root: Root, q: Queue) -> None:
    ids = failed(q, b"1", b"2", b"3")
    assert len(run("prune", "--state", "error", "--keep-count", "1", "--dry-run").rows) == 2
    assert run("prune", "--state", "error", "--keep-count", "1", "--yes").err == "removed=2 failed=0\n"
    assert [message.id for message in q.browse("error")] == ids[2:]
    assert run("prune", "--yes").err == "removed=0 failed=0\n"


def test_what_is_asked_speaks_of_one_message_as_of_one(run: Run, q: Queue) -> None:
    failed(q, b"1")
    assert "Remove 1 message from error/ of q" in run("purge", "q", "--state", "error", "--all").err
    assert "old enough of 1 message from" in run("purge", "q", "--state", "error", "--older-than", "1h").err
    assert "Requeue 1 message in" in run("requeue", "q", "--all").err
    failed(q, b"2")
    assert "Requeue all 2 messages in" in run("requeue", "q", "--all").err


@pytest.fixture
def broken(root: Root) -> str:
    """Name a queue, before q in the alphabet, that cannot be opened."""
    Path(root.create_queue("broken", durability="none").layout.folder("error")).rmdir()
    return "broken"


def test_prune_goes_on_past_a_broken_queue(run: Run, q: Queue, broken: str) -> None:
    failed(q, b"1", b"2")
    prune = ("prune", "--state", "error", "--keep-count", "1", "--yes")
    done = run(*prune)
    assert done.code == 1 and len(done.rows) == 1
    assert done.err.count("lacks its folder") == 1 and done.err.endswith("removed=1 failed=0\n")
    assert run(*prune, broken).code == run("ls", broken).code == 66
    assert run(*prune, "q").code == 0


def test_sweep_goes_on_past_a_broken_queue_and_says_so_once(run: Run, q: Queue, broken: str) -> None:
    q.send(b"1")
    assert run("receive", "q", "--lease", "1ms").code == 0
    lapsed = time.time() + 0.001
    until(lambda: time.time() > lapsed, "the lease to end")
    done = run("sweep")
    assert (done.code, done.rows) == (1, [["lapsed", "1"]])
    assert done.err.count("lacks its folder") == 1 and done.err.endswith("swept=1\n")
    assert run("sweep", broken).code == 66


def test_fsck_goes_on_past_a_queue_that_is_not_there(run: Run, q: Queue, broken: str) -> None:
    done = run("fsck", broken, "nosuch", "q")
    assert (done.code, [row[1] for row in done.rows]) == (1, ["missing-folder"])
    assert done.err.count("nosuch") == 2 and done.err.endswith("open=1\n")
    assert (run("fsck", "nosuch").code, run("fsck", "q", "nosuch").code) == (66, 1)


def missing(folder: Path) -> None:
    (folder / "error").rmdir()


def misconfigured(folder: Path) -> None:
    (folder / "queue.toml").write_text("no toml")


def linked(folder: Path) -> None:
    os.rename(folder / ".dropq", folder.parent / ".elsewhere")
    (folder / ".dropq").symlink_to("../.elsewhere")


def partly_closed(folder: Path) -> None:
    (folder / "processing").chmod(0)


def closed(folder: Path) -> None:
    folder.chmod(0)


@pytest.mark.parametrize("how", [missing, misconfigured, linked, partly_closed, closed])
def test_a_root_whose_queue_cannot_be_read_has_one(run: Run, q: Queue, how: Callable[[Path], None]) -> None:
    folder = Path(q.layout.home)
    (folder / ".dropq").mkdir(exist_ok=True)
    how(folder)
    try:
        done = unprivileged(lambda: run("ls"))
        named = unprivileged(lambda: run("ls", "q"))
    finally:
        folder.chmod(0o755)
    assert done.out == "" and "has no queues" not in done.err
    assert named.code and named.err.startswith("error: ") and "dropq create" not in named.err
    assert done.err == named.err or "`dropq health` says why" in done.err


def test_what_is_refused_names_what_is_closed(run: Run, q: Queue) -> None:
    failed(q, b"x")
    Path(q.layout.target).chmod(0)
    try:
        done = unprivileged(lambda: run("send", "q", input="y"))
    finally:
        Path(q.layout.target).chmod(0o755)
    assert done.code == 77
    assert re.match(rf"error: Permission denied at {q.layout.working}/\S+ -> {q.layout.target}/\S+; ", done.err)
    Path(q.layout.processing).chmod(0)
    try:
        done = unprivileged(lambda: run("receive", "q"))
    finally:
        Path(q.layout.processing).chmod(0o755)
    assert done.err.startswith(f"warning: queue q was not swept: Permission denied at {q.layout.processing}\n")


def test_what_a_script_held_is_not_taken_for_a_clients(run: Run, q: Queue) -> None:
    q.send(b"x")
    (file,) = Path(q.layout.target).iterdir()
    os.rename(file, f"{q.layout.processing}/me~{file.name}")
    done = run("sweep", "q", "--foreign-older-than", "0s")
    assert "taken from me, a script or a DropboxMQ client" in done.err


def test_a_paused_queue_looks_empty_and_a_paused_root_is_told_of(run: Run, q: Queue) -> None:
    q.send(b"x")
    assert run("pause", "q").code == run("pause", "--all").code == 0
    assert "root" in run("resume", "q").err
    assert run("receive", "q").code == 66
    assert run("resume", "--all").code == 0
    assert run("receive", "q").code == 0


def test_sweep_returns_what_was_lost_in_one_queue_or_all(run: Run, q: Queue) -> None:
    q.send_many([b"1", b"2"])
    for argv in (["sweep", "q"], ["sweep"]):
        assert run("receive", "q", "--lease", "1ms").code == 0
        time.sleep(0.01)
        done = run(*argv)
        assert (done.rows, done.err) == ([["lapsed", "1"]], "swept=1\n")
    q.send(b"3")  # the others wait after their deaths
    os.rename(Path(q.layout.target, sorted(os.listdir(q.layout.target))[0]), Path(q.layout.processing, "by-hand"))
    assert run("sweep", "q", "--json").records[0]["foreign"] == 0
    assert run("sweep", "q", "--foreign-older-than", "0s", "--json").records[0]["foreign"] == 1


def test_fsck_finds_and_sets_aside(run: Run, root: Root, q: Queue) -> None:
    assert run("fsck").code == 0
    stray = Path(q.layout.target, "stray")
    stray.symlink_to("/nowhere")
    for argv in (["fsck"], ["fsck", "q"], ["fsck", "--repair", "--dry-run"]):
        done = run(*argv)
        assert done.code == 1
        assert [(row[1], row[2], row[4]) for row in done.rows] == [("symlink", str(stray), "")]
    repaired = run("fsck", "--repair", "--yes", "--json")
    assert repaired.code == 0
    assert [record["repaired"] for record in repaired.records] == [True]
    assert not stray.is_symlink()
    assert run("fsck", "nosuch").code == 66


def test_fsck_repairs_a_queue_that_cannot_be_opened(run: Run, q: Queue) -> None:
    os.rmdir(q.layout.error)
    assert run("browse", "q").code != 0
    assert run("fsck", "--repair", "--yes").code == 0
    assert run("browse", "q").code == 0


# -- as a process of its own -------------------------------------------------------------------------------------------


def imported(*argv: str) -> set[str]:
    """The packages that a command line imports."""
    script = (
        "import sys; from dropq.cli.main import main; code = main(sys.argv[1:]); "
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, check=True)
    return set(done.stderr.decode().split())


def test_help_imports_nothing_heavy() -> None:
    assert not {"pydantic", "rich", "filelock", "watchdog", "pyspark"} & imported("--help")


def test_a_command_of_a_script_imports_nothing_heavy(root: Root, tmp_path: Path) -> None:
    root.create_queue("own", lease_period="5m", durability="none")
    (tmp_path / "body").write_bytes(b"x")
    for argv in (["send", "own", str(tmp_path / "body")], ["ls"]):
        found = imported("--root", str(root.path), *argv)
        assert not {"pydantic", "rich", "filelock", "watchdog", "pyspark"} & found, argv
    for argv in (["receive", "own", "--lease", "1m"], ["health"], ["browse", "own"]):
        found = imported("--root", str(root.path), *argv)
        assert not {"pydantic", "rich", "watchdog", "pyspark"} & found, argv


def test_text_is_taken_as_it_is_and_the_rest_is_converted(run: Run, q: Queue) -> None:
    assert run("send", "q", "-p", "a=1", "-p", "b:I=2", "--priority", "7", input=b"x").code == 0
    (message,) = q.browse()
    assert (message.priority, dict(message.properties)) == (7, {"a": "1", "b": 2})
    wrong = run("send", "q", "--priority", "high", input=b"x")
    assert wrong.code == 2 and "'--priority'" in wrong.err and "'high' is not a whole number" in wrong.err
    wrong = run("receive", "q", "--wait", "soon")
    assert wrong.code == 2 and "'--wait'" in wrong.err and "500ms" in wrong.err
    assert run("receive", "q", "--nosuch").code == 2
    assert "Did you mean 'send'" in run("sned", "q").err


def test_a_reader_that_has_seen_enough_ends_it_quietly(root: Root, q: Queue) -> None:
    q.send_many([b"x"] * 3000)
    command = f'"{sys.executable}" -m dropq --root "{root.path}" browse q | head -1'
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1


def test_what_changes_messages_finishes_though_nobody_reads(root: Root, q: Queue, tmp_path: Path) -> None:
    q.send_many([b"x"] * 2000)
    other = root.create_queue("other", durability="none")
    reading, writing = os.pipe()
    os.close(reading)
    done = ran("--root", str(root.path), "move", "q", "other", "--all", "--yes", stdout=writing)
    os.close(writing)
    assert (done.code, done.err) == (0, "moved=2000 failed=0\n")
    assert other.counts()["target"] == 2000


def test_a_full_disk_under_stdout_is_an_error(root: Root, q: Queue) -> None:
    with open("/dev/full", "wb") as full:
        done = ran("--root", str(root.path), "ls", stdout=full)
    assert done.code == 74
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


def test_closed_streams_do_no_harm(root: Root, q: Queue) -> None:
    command = f'"{sys.executable}" -m dropq --root "{root.path}"'
    script = f"{command} ls >&- 2>&- && {command} browse nosuch 2>&-; test $? = 66"
    done = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_ids_and_receipts_that_go_to_a_closed_stdout_are_an_error(root: Root, q: Queue) -> None:
    command = f'"{sys.executable}" -m dropq --root "{root.path}"'
    done = subprocess.run(["sh", "-c", f"echo x | {command} send q >&-"], env=environment(), capture_output=True)
    (message,) = q.browse()
    why = "its id could not be written to standard output: Bad file descriptor"
    assert (done.returncode, done.stderr.decode()) == (74, f"error: message {message.id} was sent; {why}\n")
    done = subprocess.run(["sh", "-c", f"{command} receive q >&-"], env=environment(), capture_output=True)
    assert done.returncode == 74 and b"1 given back: their receipts were not printed" in done.stderr
    assert [message.delivery_count for message in q.browse()] == [0]


def test_undecodable_arguments_and_names_work_end_to_end(root: Root, q: Queue, tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(file, "wb") as writing:
        writing.write(b"body")
    assert ran("--root", str(root.path), "send", "q", file, "--move").code == 0
    Path(q.layout.target, os.fsdecode(b"na\xefve.csv")).write_bytes(b"")
    listed = ran("--root", str(root.path), "browse", "q")
    assert b"na\\xefve.csv\t" in listed.raw
    assert ran("--root", str(root.path), "purge", "q", "--state", "target", b"na\xefve.csv", "--yes").code == 0
    assert ran("--root", str(root.path), "send", "q", "--id", b"\xff").code == 2
    ascii_only = environment(PYTHONIOENCODING="ascii", DROPQ_ROOT=str(root.path))
    q.send(b"", type="é")
    assert ran("browse", "q", env=ascii_only).code == 0


def test_ctrl_c_ends_a_wait_without_a_traceback(root: Root, q: Queue) -> None:
    with process("--root", str(root.path), "tail", "-f", "q", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        id = q.send(b"x").id
        assert child.stdout.readline().startswith(id.encode())
        child.send_signal(signal.SIGINT)
        _, err = child.communicate()
    assert child.returncode == 130
    assert b"Traceback" not in err


def interrupting(monkeypatch: pytest.MonkeyPatch, kind: type | ModuleType, name: str, *, at: int) -> None:
    """Let Ctrl-C come at the end of the call of a method that is the `at`-th."""
    real, calls = getattr(kind, name), iter(range(1, 1_000_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(kind, name, call)


@pytest.mark.parametrize(
    ("kind", "name", "at"),
    [
        (Outlet, "stage", 3),
        (Outlet, "send", 1),
        (Outlet, "send", 1000),
        (Outlet, "send", 1700),
        (Storage, "rename", 1234),
        (Outlet, "sent", 2),
        (Queue, "_send_into", 1),
        (Sending, "_print", 1),
        (Sending, "_print", 1000),
        (Sending, "_print", 1001),
    ],
)
def test_the_ids_of_all_lines_that_were_sent_are_printed_whenever_ctrl_c_comes(
    run: Run, q: Queue, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, at: int
) -> None:
    interrupting(monkeypatch, kind, name, at=at)
    done = run("send", "q", "--lines", input="line\n" * 2500)
    assert sorted(done.out.split()) == sorted(message.id for message in q.browse())
    assert os.listdir(q.layout.working) == []
    assert (done.code, done.err) == (130, f"interrupted: {len(done.out.split())} sent, nothing after that\n")


@pytest.mark.parametrize(("name", "sent"), [("stage", 1), ("send", 2), ("sent", 2)])
def test_ctrl_c_in_a_send_of_files_tells_how_many_were_sent(
    run: Run, q: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sent: int
) -> None:
    files = [str(tmp_path / name) for name in "abc"]
    for file in files:
        Path(file).write_text("x")
    interrupting(monkeypatch, *((Storage, "create") if name == "stage" else (Outlet, name)), at=2)
    done = run("send", "q", *files)
    assert done.code == 130 and done.err.startswith(f"interrupted: {sent} of 3 sent, nothing after that")
    assert sorted(done.out.split()) == sorted(message.id for message in q.browse())
    assert len(done.out.split()) == sent


@pytest.mark.parametrize(("kind", "name"), [(Storage, "adopt"), (Outlet, "send"), (Storage, "unlink")])
def test_ctrl_c_in_a_move_of_files_leaves_each_where_it_was_or_says_that_it_was_sent(
    run: Run, q: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text("x")

    def other_file_system(self: Storage, path: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if name == "unlink":
        monkeypatch.setattr(Storage, "adopt", other_file_system)
    interrupting(monkeypatch, kind, name, at=2)
    done = run("send", "q", "--move", *map(str, files))
    sent = q.counts()["target"]
    assert done.code == 130 and done.err.startswith(f"interrupted: {sent} of 3 sent, nothing after that")
    assert sum(file.exists() for file in files) == 3 - sent
    assert sorted(done.out.split()) == sorted(message.id for message in q.browse())
    assert os.listdir(q.layout.working) == []


@pytest.mark.parametrize(
    ("refused", "sent", "says"),
    [
        ("rename", 0, "the message was not sent"),
        ("sync", 1, "the message is visible, but"),
        ("unlink", 1, "the message was sent, its source could not be removed"),
    ],
)
def test_the_id_of_a_message_that_was_sent_is_printed_also_when_an_error_follows(
    run: Run, q: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, sent: int, says: str
) -> None:
    def failing(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def other_file_system(*args: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(Storage, "adopt", other_file_system)
    monkeypatch.setattr(Storage, refused, failing)
    done = run("send", "q", "--move", str(tmp_path / "file"))
    assert done.code == 74 and says in done.err
    assert done.out.split() == [message.id for message in q.browse()]
    assert len(done.out.split()) == sent


def test_ctrl_c_stays_ignored_where_whoever_started_the_command_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with delayed_interrupt() as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        assert not interrupted
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_among_lines_tells_true_sums(run: Run, root: Root, tmp_path: Path) -> None:
    few = root.create_queue("few", durability="none", max_unprocessed=1020)
    (tmp_path / "lines").write_text("line\n" * 20_000)
    done = run("send", "few", "--lines", str(tmp_path / "lines"))
    assert done.code == 75
    assert done.err.endswith("sent=1020 not_sent=18980\n") and "send_many" not in done.err
    assert sorted(done.out.split()) == sorted(message.id for message in few.browse())


def test_what_was_sent_is_told_when_its_id_cannot_be_written(root: Root, q: Queue, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    for file in files:
        Path(file).write_text("x")
    with open("/dev/full", "wb") as full:
        done = ran("--root", str(root.path), "send", "q", *files, stdout=full)
    (message,) = q.browse()
    why = "its id could not be written to standard output: No space left on device"
    assert (done.code, done.err) == (74, f"error: message {message.id} was sent; {why}\n")
    with open("/dev/full", "wb") as full:
        done = ran("--root", str(root.path), "send", "q", "--lines", input=b"one\ntwo\n", stdout=full)
    assert done.code == 74 and done.err.count("was sent; its id could not be written") == 2
    assert all(f"message {message.id} was sent" in done.err for message in q.browse() if message.body != b"x")


def test_a_send_goes_on_when_nobody_reads_its_ids_and_says_how_many_there_were(root: Root, q: Queue) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = ran("--root", str(root.path), "send", "q", "--lines", input=b"x\n" * 1500, stdout=writing)
    os.close(writing)
    assert (done.code, done.err) == (0, "sent=1500: not all ids were read\n")
    assert q.counts()["target"] == 1500


@pytest.mark.parametrize("out", ["a full disk", "a closed pipe"])
def test_claims_that_nobody_is_told_of_are_given_back(root: Root, q: Queue, out: str) -> None:
    q.send_many([b"1", b"2", b"3"])
    if out == "a full disk":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, stdout = os.pipe()
        os.close(reading)
    done = ran("--root", str(root.path), "receive", "q", "-n", "3", stdout=stdout)
    os.close(stdout)
    assert done.code == (74 if out == "a full disk" else 1)
    assert "could not be written" in done.err and "3 given back: their receipts were not printed" in done.err
    assert [(message.body, message.delivery_count) for message in q.browse()] == [(b"1", 0), (b"2", 0), (b"3", 0)]


@pytest.mark.parametrize(("kind", "name", "at"), [(Claims, "claim", 2), (Message, "size", 2), (Message, "size", 3)])
def test_ctrl_c_in_a_receive_gives_back_what_was_not_printed(
    run: Run, q: Queue, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, at: int
) -> None:
    q.send_many([b"1", b"2", b"3"])
    interrupting(monkeypatch, kind, name, at=at)
    done = run("receive", "q", "-n", "3")
    assert done.code == 130 and "given back" in done.err and "interrupted" in done.err
    held = [message.file for message in q.browse("processing")]
    assert [row[1] for row in done.rows] == held
    assert len(held) + q.counts()["target"] == 3


@pytest.mark.parametrize("semantics", ["at-least-once", "at-most-once"])
def test_ctrl_c_in_a_receive_tells_how_many_were_received(
    run: Run, root: Root, monkeypatch: pytest.MonkeyPatch, semantics: str
) -> None:
    root.create_queue("own", durability="none", semantics=semantics).send_many([b"1", b"2", b"3"])
    interrupting(monkeypatch, output, "write", at=2)
    done = run("receive", "own", "-n", "3")
    assert len(done.rows) == 2
    assert done.code == 130 and "interrupted: 2 of 3 received\n" in done.err


@pytest.mark.parametrize("at", [1, 2, 40])
def test_an_interrupted_move_tells_how_many_were_moved_and_where_the_rest_is(
    run: Run, root: Root, q: Queue, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    other = root.create_queue("other", durability="none")
    q.send_many([b"x"] * 50)
    interrupting(monkeypatch, Moves, "move", at=at)
    done = run("move", "q", "other", "--all", "--yes")
    printed = f"moved={at} failed=0\ninterrupted: {at} of 50 moved, the rest stays in target/\n"
    assert (done.code, done.err) == (130, printed)
    assert len(done.rows) == other.counts()["target"] == at
    assert q.counts()["target"] == 50 - at


def test_an_interrupted_wait_and_fsck_say_how_far_they_came(
    run: Run, root: Root, q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    q.send(b"x")
    root.create_queue("r", durability="none")
    interrupting(monkeypatch, Queue, "counts", at=2)
    done = run("wait", "q", "--empty")
    assert done.code == 130 and done.err.startswith("interrupted: queue q has 1 in target")
    interrupting(monkeypatch, Queue, "fsck", at=1)
    done = run("fsck")
    assert done.code == 130 and re.fullmatch("interrupted: [01] of 2 queues checked\n", done.err)


def test_a_worker_says_what_it_left(run: Run, root: Root) -> None:
    patient = root.create_queue("patient", durability="none")
    patient.send(b"x")
    done = run("work", "patient", "--until-empty", "--", "sh", "-c", "exit 75")
    (delayed,) = patient.browse("delayed")
    assert delayed.not_before is not None
    due = output.time_text(delayed.not_before)
    given_back, counts, left = done.err.splitlines()
    assert "given back (exit status 75), try 1, again in" in given_back
    assert counts.startswith("1 given back for another try in ")
    assert (done.code, left) == (0, f"1 given back waits until {due} at the latest")


def test_lines_are_sent_as_they_come(root: Root, q: Queue) -> None:
    argv = ("--root", str(root.path), "send", "q", "--lines")
    with process(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"one\nhalf of ")
        child.stdin.flush()
        assert child.stdout.readline().strip()
        until(lambda: q.counts()["target"] == 1, "the first line is sent")
        child.communicate(b"two\n")
    assert [message.body for message in q.browse()] == [b"one", b"half of two"]


def test_a_worker_outlives_commands_that_do_not_read(root: Root, q: Queue) -> None:
    q.send_many([b"x" * 1_000_000] * 3)
    done = ran("--root", str(root.path), "work", "q", "--until-empty", "--", "true")
    assert done.code == 0 and "3 acknowledged in " in done.err


def test_a_worker_takes_from_several_queues_in_their_order_or_by_turns(root: Root, q: Queue, run: Run) -> None:
    other = root.create_queue("other", durability="none")
    for fair, taken in ((False, "qqoo"), (True, "qoqo")):
        for _ in range(2):
            q.send(b"")
            other.send(b"")
        done = run("work", *["--fair"] * fair, "q", "other", "--until-empty", "-v", "--json", "--", "true")
        *lines, sums = done.records
        assert "".join(line["queue"][0] for line in lines) == taken
        assert {line["outcome"] for line in lines} == {"acked"} and sums["acked"] == 4


def test_the_lines_of_a_worker_with_many_threads_are_whole(root: Root, q: Queue) -> None:
    q.send_many([b"x"] * 300)
    argv = ("--root", str(root.path), "work", "q", "-j", "8", "--until-empty", "-v", "--json", "--", "true")
    done = ran(*argv)
    assert done.code == 0 and len(done.records) == 301


def test_a_worker_takes_what_matches_its_filter(q: Queue, run: Run) -> None:
    for kind in "ab":
        q.send(kind, type=kind)
    done = run("work", "q", "--until-empty", "--filter", "JMSType = 'b'", "--client-id", "me", "--", "true")
    assert done.code == 0 and [message.text for message in q.browse()] == ["a"]


def test_a_worker_under_cron_says_nothing_where_nothing_was_done_and_nothing_went_wrong(q: Queue, run: Run) -> None:
    work = ("work", "q", "--until-empty", "--", "true")
    assert run(*work).err == ""
    q.send(b"x")
    assert run("work", "-q", "q", "--until-empty", "--", "false").err == ""
    q.send(b"x")
    assert re.fullmatch(r"1 acknowledged in [0-9.]+ s\n", run(*work).err)


def test_a_worker_that_is_asked_for_it_says_what_became_of_each_message(root: Root, run: Run) -> None:
    tried = root.create_queue("tried", durability="none", redelivery_attempts=1, redelivery_delay="1h")
    ids = tried.send_many([b"0", b"75", b"65", b"3"])
    exits = ("--", "sh", "-c", "exit $(cat)")
    done = run("work", "tried", "-v", "--until-empty", *exits)
    *lines, sums, left = done.err.splitlines()
    expected = [
        ("acknowledged", ""),
        ("given back  ", r" \(exit status 75\), try 1, again in (1h|59m59.9s)"),
        ("rejected    ", r" \(exit status 65\), try 1, in error/ now"),
        ("failed      ", r" \(exit status 3\), try 1 of 2, again in (1h|59m59.9s)"),
    ]
    for line, sent, (outcome, details) in zip(lines, ids, expected, strict=True):
        assert re.fullmatch(rf"{outcome} {sent.id} in \d+\.\d s{details}", line)
    assert sums.startswith("1 acknowledged, 1 failed try, 1 rejected, 1 given back for another try in ")
    assert sums.endswith("; 1 now in error/") and left.startswith("2 given back wait until ")
    tried.send_many([b"75", b"65"])
    again, refused, total = run("work", "tried", "-v", "--json", "--until-empty", *exits).records
    assert (again["outcome"], again["delivery_count"], again["state"], again["tries"]) == (
        "retried",
        1,
        "delayed",
        None,
    )
    assert again["due"].endswith("Z") and again["queue"] == "tried"
    assert (refused["outcome"], refused["reason"]) == ("rejected", "exit status 65")
    assert (refused["state"], refused["due"]) == ("error", None)
    assert (total["retried"], total["rejected"]) == (1, 1)


def test_on_a_terminal_a_worker_shows_each_message_and_a_bar(root: Root, q: Queue) -> None:
    q.send_many([b"x"] * 100)
    code, shown = on_terminal("--root", str(root.path), "work", "q", "--until-empty", "-j", "2", "--", "true")
    assert code == 0 and len(re.findall(r"acknowledged \S+ in \d+\.\d s\n", shown)) == 100
    assert "working" in shown and "100/100" in shown and re.search(r"100 acknowledged in [0-9.]+ s\n", shown)
    assert "waiting" not in shown
    code, shown = on_terminal("--root", str(root.path), "work", "q", "--until-empty", "--", "true")
    assert (code, shown) == (0, "no message was there to handle\n")


def test_a_worker_says_once_that_it_waits_and_what_a_stop_and_a_pause_do(root: Root, q: Queue) -> None:
    q.pause()
    master, slave = pty.openpty()
    shown = bytearray()

    def shows(words: str) -> bool:
        try:
            while select.select([master], [], [], 0)[0]:
                shown.extend(os.read(master, 4096))
        except OSError:  # EIO: the worker has ended, and all that it showed was read
            assert words.encode() in shown, bytes(shown)
        return words.encode() in shown

    argv = ("--root", str(root.path), "work", "q", "--", "sh", "-c", "read line; kill -INT $PPID; sleep 0.5")
    with process(*argv, stdin=slave, stdout=slave, stderr=slave, env=environment(COLUMNS="120")) as worker:
        os.close(slave)
        until(lambda: shows("queue q is paused: nothing comes until `dropq resume q`"), "the pause is shown")
        until(lambda: shows("waiting for messages of q (Ctrl-C ends)"), "the wait is shown")
        q.resume()
        q.send(b"one\n")
        until(lambda: shows("finishing 1 message; a second Ctrl-C or SIGTERM gives it back"), "the stop is shown")
        until(lambda: shows("1 acknowledged in "), "the sum is shown")
        assert worker.wait(60) == 0
    os.close(master)
    assert [shown.count(words) for words in (b"is paused", b"waiting for", b"finishing")] == [1, 1, 1]


def test_on_a_terminal_it_asks(root: Root, q: Queue) -> None:
    failed(q, b"x")
    argv = ("--root", str(root.path), "requeue", "q", "--all")
    code, shown = on_terminal(*argv, typed=b"n\n")
    assert code == 1 and "Requeue 1 message in error/ of q?" in shown and "nothing was done" in shown
    assert q.counts()["error"] == 1
    code, shown = on_terminal(*argv, typed=b"y\n")
    assert code == 0 and "requeued=1 failed=0" in shown
    code, shown = on_terminal("--root", str(root.path), "purge", "q", "--all", "--state", "target", typed=b"\x04")
    assert code == 130 and "Traceback" not in shown


def test_on_a_terminal_it_shows_tables_and_no_control_characters(root: Root, q: Queue) -> None:
    drop(q, NASTY, b"\x1b[2Jbody\n")
    (bad,) = failed_first(q)
    root.create_queue("other")
    q.send(b"plain")
    for argv, says in (
        (["ls"], "total"),
        (["browse", "q"], "timestamp"),
        (["browse", "q", "--state", "error"], "a\\x1b[31m"),
        (["show", "q", output.escape(bad)], "\\x1b[2Jbody"),
        (["cat", "q", output.escape(bad)], "\\x1b[2Jbody"),
    ):
        code, shown = on_terminal("--root", str(root.path), *argv)
        assert code == 0 and says in shown, shown
        text = re.sub(r"\x1b\[[0-9;]*m", "", shown)  # colours are our own
        assert all(char.isprintable() or char == "\n" for char in text), argv
    assert b"\x1b[2J" in on_terminal("--root", str(root.path), "cat", "q", output.escape(bad), "--raw")[1].encode()
    code, shown = on_terminal("--root", str(root.path), "--json", "browse", "q")
    assert [line[:1] for line in shown.splitlines()] == ["{"]


def test_on_a_terminal_long_work_shows_how_far_it_is(root: Root, q: Queue) -> None:
    q.send_many([b"x"] * 150)
    root.create_queue("other")
    code, shown = on_terminal("--root", str(root.path), "move", "q", "other", "--all", "--yes")
    assert code == 0 and "150/150" in shown and "moved=150 failed=0" in shown
    assert shown.count("moved to other") == 150
    code, _ = on_terminal("--root", str(root.path), "send", "q")
    assert code == 2


# -- what a hostile reader tried -----------------------------------------------------------------------------------


def test_a_body_that_is_still_written_is_not_moved_to_another_queue(root: Root, run: Run) -> None:
    root.create_queue("other")
    (root.path / "q" / "working" / "half.csv").write_bytes(b"half")
    moved = run("move", "q", "other", "--all", "--state", "working", "--yes")
    assert (moved.code, "state 'working': messages are moved from" in moved.err) == (2, True)
    with pytest.raises(ValueError, match="messages are moved from"):
        list(root.queue("q").move(root.queue("other"), state="working"))
    assert (root.path / "q" / "working" / "half.csv").read_bytes() == b"half"


def test_a_command_acts_on_the_queue_that_is_named_and_on_no_other_whose_name_is_its_escape(
    root: Root, run: Run
) -> None:
    for name in ("aAb", "a\\x41b"):
        root.create_queue(name, durability="none").send(b"x")
        take(root.queue(name)).ack()
    escaped = "a\\\\x41b"
    assert sorted(row[0] for row in run("ls").rows) == sorted(["aAb", escaped, "q"])
    assert run("prune", escaped, "--keep-count", "0", "--yes").err == "removed=1 failed=0\n"
    assert run("sweep", escaped).code == run("sweep").code == 0
    assert [root.queue(name).counts()["processed"] for name in ("aAb", "a\\x41b")] == [1, 0]
    assert run("create", "b\\x41b").rows == [[str(root.path / "bAb")]]


@pytest.mark.parametrize(("leaves", "where"), [("move", "left q: moved to other"), ("purge", "left q: purged")])
def test_a_message_that_left_its_queue_was_not_acknowledged(
    root: Root, run: Run, monkeypatch: pytest.MonkeyPatch, leaves: str, where: str
) -> None:
    queue, other = root.queue("q"), root.create_queue("other")
    id = queue.send(b"x").id

    def leave(seconds: float) -> None:
        _ = list(queue.move(other, [id]) if leaves == "move" else queue.purge([id]))

    monkeypatch.setattr("dropq.cli.working.time.sleep", leave)
    waited = run("wait", "q", "--id", id, "--timeout", "1m")
    assert (waited.code, waited.out, where in waited.err) == (1, "", True)


@pytest.mark.parametrize("leaves", ["move", "fail"])
def test_a_message_that_left_a_queue_without_history_and_log_was_not_acknowledged(
    root: Root, run: Run, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    other = root.create_queue("other")
    queue = root.create_queue("brief", history=False, log="off", exhausted="dead-letter", dead_letter_queue="other")
    id = queue.send(b"x").id

    def leave(seconds: float) -> None:
        if leaves == "move":
            assert [outcome.ok for outcome in queue.move(other, [id])] == [True]
        else:
            take(queue).fail("no")

    monkeypatch.setattr("dropq.cli.working.time.sleep", leave)
    waited = run("wait", "brief", "--id", id, "--timeout", "1m")
    assert (waited.code, waited.out) == (1, "")
    assert waited.err == f"message {id} lies in target/ of queue other\n"


def test_a_message_whose_copies_lie_elsewhere_was_acknowledged_without_history_and_log(root: Root, run: Run) -> None:
    root.create_queue("copies", history=False, log="off")
    queue = root.create_queue("brief", history=False, log="off")
    queue.add_selector("all", to="copies", op="copy")
    copied = queue.send(b"x").id
    queue.route()
    topic = root.create_topic("news", history=False, log="off")
    for reader in ("reader", "sibling"):
        made = topic.create_subscription(reader, client_id="me")
        Path(made.layout.config_file).write_text('history = false\nlog = "off"\n')
    published = topic.publish(b"x").id
    for name in ("copies", "news/reader.me"):
        take(root.queue(name)).ack()
    for name, id in (("brief", copied), ("copies", copied), ("news", published), ("news/reader.me", published)):
        waited = run("wait", name, "--id", id)
        assert (waited.code, waited.rows) == (0, [["removed"]])


def test_a_message_that_was_pruned_during_a_wait_was_acknowledged(
    root: Root, run: Run, q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = q.send(b"x").id

    def prune(seconds: float) -> None:
        take(q).ack()
        q.prune(keep_count=0)

    monkeypatch.setattr("dropq.cli.working.time.sleep", prune)
    waited = run("wait", "q", "--id", id, "--timeout", "1m")
    assert (waited.code, waited.rows) == (0, [["processed"]])
    assert run("wait", "q", "--id", id).code == 66


def test_an_ack_without_a_history_says_of_which_message_it_was(root: Root, run: Run) -> None:
    queue = root.create_queue("brief", history=False)
    id = queue.send(b"x").id
    receipt = run("receive", "brief", "--json").records[0]["receipt"]
    assert run("ack", "brief", receipt, "--json").records == [{"id": id, "state": "removed", "receipt": None}]


def test_a_queue_that_cannot_be_opened_does_not_keep_a_sweep_from_the_root(
    root: Root, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.create_queue("bad")
    (root.path / "bad" / "queue.toml").write_text("nonsense = 1\n")
    tidied: list[object] = []
    tidy = Root.tidy

    def noted(self: Root) -> object:
        tidied.append(self)
        return tidy(self)

    monkeypatch.setattr(Root, "tidy", noted)
    swept = run("sweep")
    assert (swept.code, len(tidied), "nonsense" in swept.err) == (1, 1, True)


@pytest.mark.parametrize("line", ["pause --all", "config check", "top", "metrics", "prune --yes"])
def test_a_folder_that_is_hardly_the_root_is_refused(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "a mount that is away"
    empty.mkdir()
    assert cli.main(["--root", str(empty), *line.split()]) == 66
    assert "is it mounted?" in capsys.readouterr().err
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_body_that_cannot_be_written_is_told_as_the_output(root: Root, q: Queue, size: int) -> None:
    ids = [q.send(b"x" * size).id for _ in range(3)]
    with open("/dev/full", "wb") as full:
        done = ran("--root", str(root.path), "cat", "q", *ids, stdout=full)
    assert done.code == 74
    assert done.err.startswith("error: standard output could not be written: No space left on device; ")
    assert done.err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_told_as_the_output(root: Root) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dropq", "--root", str(root.path), "create", "made"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, root.queue("made").exists()) == (74, True)
    assert done.stderr.startswith("error: standard output could not be written: No space left on device; ")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("top --interval 0", "at least 100ms"),
        ("metrics --textfile x.prom --interval 1ms", "at least 100ms"),
        ("work q --timeout 0 -- cat", "at least 1ms"),
        ("topic subscribe news v --recovery-point soon --dry-run", "is no point to begin at"),
        ("bridge --proxied --recall other --peer other=/tmp", "leave --peer out"),
        ("requeue q --state target --all", "messages are requeued from"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_before_anything_is_done(root: Root, run: Run, line: str, text: str) -> None:
    root.create_topic("news")
    refused = run(*line.split())
    assert (refused.code, text in refused.err, refused.out) == (2, True, "")


def test_an_empty_directory_name_makes_no_root_of_the_working_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("init", "").code == 2
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("line", [["ls"], ["init", "new"]])
def test_a_working_directory_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    (tmp_path / "gone").rmdir()
    assert cli.main(line) == 66
    assert "the working directory was removed" in capsys.readouterr().err


def test_a_message_without_a_history_was_acknowledged_although_another_has_its_id(root: Root, run: Run) -> None:
    for name in ("brief", "kept"):
        root.create_queue(name, history=False).send(b"x", message_id="job1")
    take(root.queue("brief")).ack()
    waited = run("wait", "brief", "--id", "job1")
    assert (waited.code, waited.rows) == (0, [["removed"]])


@pytest.mark.parametrize("line", ["log q", "browse q", "tail q"])
def test_any_number_of_lines_may_be_asked_for(root: Root, run: Run, line: str) -> None:
    root.queue("q").send(b"x")
    asked = run(*line.split(), "-n", "9" * 20)
    assert (asked.code, len(asked.rows)) == (0, 1)


def test_one_message_may_be_named_on_standard_input(root: Root, run: Run) -> None:
    id = root.queue("q").send(b"x").id
    assert run("show", "q", "-", input=f"{id}\n").rows[0] == ["id", id]
    assert run("show", "q", "-").err.startswith("error: give one message: standard input has 0")


def test_a_pause_can_be_ended_where_nothing_else_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "global-read-lock").touch()
    assert cli.main(["--root", str(tmp_path / "left"), "resume", "--all"]) == 0
    assert list((tmp_path / "left").iterdir()) == []
