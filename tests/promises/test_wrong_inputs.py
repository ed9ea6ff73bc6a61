"""What dropq answers to wrong input: the thing, the place, the way out, and what became of the message."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import unprivileged
from helpers import names_in

from dropq import Root
from dropq.cli import main as cli

LONG = "n" * 300

#: Command lines, the exit code of each, and words of its answer. {receipt} is of a message that is held in `work`,
#: {old} one of a message that was settled, {dir} a folder with the files `file` and `bad.toml`.
WRONG: list[tuple[str, int, list[str]]] = [
    # the command, the root
    ("nosuch", 2, ["No such command 'nosuch'", "`dropq --help` lists"]),
    ("recieve q", 2, ["'recieve'", "Did you mean 'receive'"]),
    ("list", 2, ["'list'", "Did you mean 'ls'?"]),
    ("explain q", 2, ["'explain'", "Did you mean 'browse'?"]),
    ("version", 2, ["'version'", "Did you mean '--version'?"]),
    ("topic help", 2, ["'help'", "Did you mean '--help'?"]),
    ("publish news", 2, ["'publish'", "Did you mean 'topic publish'?"]),
    ("config get q", 2, ["'get'", "Did you mean 'show'?"]),
    ("send q --ttl 5m", 2, ["--ttl", "--expires-in"]),
    ("receive q --timeout=5s", 2, ["--timeout", "--wait"]),
    ("--verson", 2, ["--verson", "--version"]),
    ("create x --set MaxRetries=3", 78, ["MaxRetries", "the nearest is RedeliveryAttempts"]),
    ("config show q visibility_timeout", 2, ["visibility_timeout", "the nearest is lease_period"]),
    ("ls --nosuch", 2, ["--nosuch", "`dropq ls --help` lists the options"]),
    ("ls --jsn", 2, ["--jsn", "--json"]),
    ("config", 2, ["config show"]),
    ("config shw q", 2, ["'shw'", "'show'"]),
    ("ls --root", 2, ["'--root' requires an argument"]),
    ("ls --root ''", 2, ["'--root'", "it is empty", "name the directory"]),
    ("--root '' ls", 2, ["'--root'", "it is empty", "name the directory"]),
    ("ls --root {dir}/missing", 66, ["no root at {dir}/missing", "`dropq init {dir}/missing`"]),
    ("ls --root {dir}/file", 66, ["no root at {dir}/file", "no directory", "name the directory"]),
    ("ls --root /proc", 66, ["/proc has no queues", "no dropq.toml", "is it the right folder, is it mounted?"]),
    ("sweep --root /proc", 66, ["/proc has no queues", "is it the right folder"]),
    ("fsck --root /proc", 66, ["/proc has no queues", "is it the right folder"]),
    ("health --root /proc", 66, ["/proc has no queues", "is it the right folder"]),
    ("create x --root /proc", 66, ["/proc", "'x' was not made"]),
    ("init {dir}/file", 74, ["{dir}/file", "the root was not made"]),
    ("init /proc/x", 66, ["/proc/x", "the root was not made"]),
    ("init a b", 2, ["unexpected extra argument", "(b)", "`dropq init --help`"]),
    # names of queues
    *[
        (f"{command} nosuch{rest}", 66, ["no queue 'nosuch' in {root}", "`dropq ls` shows", "`dropq create nosuch`"])
        for command, rest in [
            ("ls", ""),
            ("browse", ""),
            ("browse --explain", ""),
            ("show", " id"),
            ("cat", " id"),
            ("tail", ""),
            ("health", ""),
            ("send", " {dir}/file"),
            ("receive", ""),
            ("ack", " {receipt}"),
            ("nack", " {receipt}"),
            ("fail", " {receipt}"),
            ("reject", " {receipt}"),
            ("extend", " {receipt}"),
            ("wait --empty", ""),
            ("work", " -- true"),
            ("requeue --all -y", ""),
            ("replay -y", ""),
            ("move --all -y", " q"),
            ("move --all -y work", ""),
            ("expire --all -y", ""),
            ("purge --state error --all -y", ""),
            ("prune -y", ""),
            ("pause", ""),
            ("resume", ""),
            ("sweep", ""),
            ("fsck", ""),
            ("config show", ""),
        ]
    ],
    ("delete nosuch -y", 66, ["no queue 'nosuch' in {root}", "`dropq ls` shows"]),
    ("browse wrok", 66, ["no queue 'wrok'", "is it 'work'?"]),
    ("browse folder", 66, ["{root}/folder is no queue", "`dropq ls` shows the queues"]),
    ("create folder", 73, ["'folder' was not made", "{root}/folder is there, and is no queue", "another name"]),
    ("create q", 73, ["'q' is there already", "{root}/q"]),
    (f"create {LONG}", 2, [LONG, "longer than 255 bytes"]),
    ("create ''", 2, ["''", "give the name of a folder"]),
    ("create .hidden", 2, ["'.hidden'", "without a dot at the start"]),
    ("create ../x", 2, ["'../x'", "without /"]),
    ("create topic-root", 2, ["'topic-root'", "another folder of this name"]),
    ("create 'a\nb'", 2, ["control characters"]),
    ("create", 2, ["Missing argument 'QUEUE'", "`dropq create --help`"]),
    ("browse", 2, ["Missing argument 'QUEUE'", "`dropq browse --help`"]),
    ("browse q work", 2, ["unexpected extra argument", "(work)"]),
    ("pause", 2, ["name a QUEUE, or give --all"]),
    ("resume q --all", 2, ["name a QUEUE, or give --all"]),
    (
        "delete work -y",
        1,
        ["queue 'work' has messages to work on", "1 in processing", "--force", "nothing was removed"],
    ),
    ("delete work", 1, ["has messages to work on", "nothing was removed"]),
    ("delete q", 2, ["Delete queue q (no messages)?", "no terminal to ask on", "--yes", "--dry-run"]),
    ("doctor /mnt", 2, ["/mnt cannot name a queue", "`dropq --root /mnt doctor`"]),
    ("doctor --root {dir}/missing", 66, ["no such folder: {dir}/missing"]),
    # configuration
    ("create x --set nothing", 2, ["--set nothing", "write KEY=VALUE"]),
    ("create x --set =5", 2, ["--set =5", "write KEY=VALUE"]),
    ("create x --set name=y", 2, ["--set name=y", "name is not an option of a queue"]),
    ("create x --set lease_perod=3s", 78, ["lease_perod", "lease_period"]),
    ("create x --set lease_period=soon", 78, ["lease_period", "soon", "30s"]),
    ("create x --set lease_period=-1", 78, ["lease_period", "-1"]),
    ("create x --set redelivery_attempts=many", 78, ["redelivery_attempts", "many", "whole number"]),
    ("create x --set durability=some", 78, ["durability", "some", '"none", "file", "full"']),
    ("create x --set semantics=exactly-once", 78, ["semantics", "exactly-once", "at-least-once"]),
    ("create x --set file_mode=0666", 78, ["file_mode", "without write permission for others"]),
    ("create x --set self_destruct=soon", 78, ["self_destruct", "true or false"]),
    ("create x --set filter='a ='", 78, ["filter", "column 4"]),
    ("config show q nosuch", 2, ["nosuch is no key", "`dropq config show q` lists them"]),
    ("config show q lease_perod", 2, ["lease_perod", "the nearest is lease_period"]),
    ("config check {dir}/nosuch.toml", 78, ["{dir}/nosuch.toml"]),
    ("config check {dir}/bad.toml", 78, ["{dir}/bad.toml: line 1", 'lease_period = "5m"']),
    ("receive broken", 78, ["{root}/broken/queue.toml", "line 1", 'quotes: lease_period = "5m"']),
    ("send broken {dir}/file", 78, ["{root}/broken/queue.toml", "line 1"]),
    ("receive lacking", 66, ["lacks its folder processing/", "fsck lacking --repair"]),
    ("send lacking {dir}/file", 66, ["lacks its folder processing/", "fsck lacking --repair"]),
    # durations and numbers
    *[
        (f"{line} {value}", 2, [f"'{option}'", repr(value), *says])
        for line, option in [
            ("receive q --wait", "--wait"),
            ("nack q x --delay", "--delay"),
            ("wait q --empty --timeout", "--timeout"),
            ("send q --delay", "--delay"),
            ("send q --expires-in", "--expires-in"),
            ("health --max-age", "--max-age"),
            ("prune --keep-age", "--keep-age"),
            ("purge q --state error --older-than", "--older-than"),
            ("sweep --jobs-older-than", "--jobs-older-than"),
        ]
        for value, says in [("soon", ["30s"]), ("5x", ["30s"]), ("nan", ["30s"])]
    ],
    ("receive q --lease 0", 2, ["'--lease'", "'0'", "at least 1ms"]),
    ("receive q --lease 10ns", 2, ["'--lease'", "'10ns': a lease lasts at least 1ms"]),
    ("work q --lease 10ns -- true", 2, ["'10ns': a lease lasts at least 1ms"]),
    ("extend q x --by 10ns", 2, ["'10ns': a lease lasts at least 1ms"]),
    ("receive q --wait -5s", 2, ["-5s"]),
    ("receive q -n two", 2, ["'-n'", "'two' is not a whole number"]),
    ("receive q -n 0", 2, ["'-n'", "'0' is not a whole number from 1 on"]),
    ("receive q -n", 2, ["'-n' requires an argument"]),
    ("browse q -n -1", 2, ["'-n'", "'-1' is not a whole number from 0 on"]),
    ("tail q -n 1.5", 2, ["'-n'", "'1.5' is not a whole number"]),
    ("work q -j 0 -- true", 2, ["'-j' / '--jobs'", "'0' is not a whole number from 1 on"]),
    ("wait q --count few", 2, ["'--count'", "'few' is not a whole number"]),
    ("health --max-count x", 2, ["'--max-count'", "'x'"]),
    ("health --max-error -1", 2, ["'--max-error'", "'-1'"]),
    ("prune --keep-count all", 2, ["'--keep-count'", "'all' is not a whole number from 0 on"]),
    ("send q --priority high", 2, ["'--priority'", "'high' is not a whole number"]),
    ("send q --priority 9999999999", 2, ["priority 9999999999", "to 2147483647", "nothing was sent"]),
    # what is sent
    ("send q {dir}/nosuch", 66, ["No such file or directory", "{dir}/nosuch", "nothing was sent"]),
    ("send q {dir}", 74, ["{dir}", "nothing was sent"]),
    ("send q --move {dir}", 74, ["{dir}", "nothing was sent"]),
    ("send q --lines {dir}/nosuch", 66, ["No such file or directory", "{dir}/nosuch", "no line of it was sent"]),
    ("send q -p nothing", 2, ["-p nothing", "NAME=VALUE"]),
    ("send q -p =5", 2, ["-p =5", "NAME=VALUE"]),
    ("send q -p n:H=99999", 2, ["99999", "type H", "nothing was sent"]),
    ("send q -p n:Q=1", 2, ["type 'Q' is not one of B Y H I L F D S", "nothing was sent"]),
    ("send q -p n:I=x", 2, ["-p n:I=x", "'x'", "type I (int)", "nothing was sent"]),
    ("send q -p not=1", 2, ["property name 'not' is a keyword", "nothing was sent"]),
    ("send q --id ''", 2, ["message id '' is empty", "nothing was sent"]),
    ("send q --id x --lines", 2, ["--id names one message"]),
    ("send q --id x {dir}/file {dir}/file", 2, ["--id names one message"]),
    ("send q - --move", 2, ["--move takes whole files"]),
    ("send q --lines --move {dir}/file", 2, ["--move takes whole files"]),
    ("send limited {dir}/file", 75, ["limited", "max_unprocessed", "was not sent"]),
    # what is received and settled
    ("receive q", 66, ["nothing to receive: queue q has no message in target/"]),
    ("receive work", 66, ["nothing to receive: queue work has no message in target/"]),
    ("receive paused", 66, ["queue paused is paused", "`dropq resume paused`"]),
    ("receive filtered", 66, ["1 in target/ of filtered", "`dropq browse filtered --explain`"]),
    *[
        (f"{verb} work {receipt}", 1, says)
        for verb in ("ack", "nack", "fail", "reject", "extend")
        for receipt, says in [
            ("{old}", ["settled the message or taken it back", "on queue work", "nothing was changed"]),
            ("nosuch", ["no message 'nosuch' is held on queue work", "nothing was changed"]),
            ("''", ["no message '' is held on queue work", "nothing was changed"]),
        ]
    ],
    ("ack q {receipt}", 1, ["no claim", "on queue q", "nothing was changed"]),
    ("ack work", 2, ["receipts or ids", "--filter"]),
    ("ack work --defer some-id", 2, ["'some-id' cannot be deferred", "acknowledge the message once it is there"]),
    ("extend work {old} --by soon", 2, ["'--by'", "'soon'", "30s"]),
    # what is looked at
    ("show work nosuch", 66, ["no message 'nosuch' in queue work"]),
    ("cat work nosuch", 66, ["no message 'nosuch' in queue work"]),
    ("browse q --state nosuch", 2, ["'--state': 'nosuch' is not one of 'target'"]),
    ("tail q --state nosuch", 2, ["'--state': 'nosuch' is not one of 'target'"]),
    (
        "browse work --state error --filter 'priority > 4'",
        0,
        ["no message in error/ of work", "the header is JMSPriority"],
    ),
    ("receive work --filter 'priority > 4'", 66, ["no message in target/ of work", "the header is JMSPriority"]),
    ("work work --until-empty --filter 'priority > 4' -- true", 0, ["no message in target/", "JMSPriority"]),
    ("browse work --state error --filter 'region = EU'", 0, ["no message in error/", "EU", "in quotes: 'EU'"]),
    *[
        (f"{command} --filter '{text}'", 2, says)
        for command in ("browse q", "receive q", "move work q -y", "requeue work -y", "purge work --state error -y")
        for text, says in [("a =", ["column 4"]), ("a LIKE 5", ["column"]), ("(a = 1", ["column"])]
    ],
    ("requeue work --filter ' ' -y", 2, ["filter is empty"]),
    ("expire work --filter 'a =' -y", 2, ["column 4"]),
    ("expire work --filter ' ' -y", 2, ["filter is empty"]),
    # wait
    ("wait q", 2, ["give one of --empty, --count N and --id ID"]),
    ("wait q --empty --count 1", 2, ["give one of --empty, --count N and --id ID"]),
    ("wait q --id nosuch --filter 'JMSPriority = 4'", 2, ["--id names one message"]),
    ("wait q --empty --filter 'JMSPriority >'", 2, ["bad filter, column 14"]),
    ("tail q --filter 'JMSPriority >'", 2, ["bad filter, column 14"]),
    ("wait q --id nosuch", 66, ["no message 'nosuch' in queue q"]),
    ("wait work --empty --timeout 0", 75, ["timed out: queue work has", "1 in processing"]),
    # work
    ("work q", 2, ["no command", "after the queues and --", "`dropq work orders -- cat`"]),
    ("work q cat", 2, ["no command", "after the queues and --"]),
    ("work -- cat", 2, ["no queue", "before --"]),
    ("work q -q -v -- cat", 2, ["give -q or -v, not both"]),
    ("work q --filter 'a =' -- cat", 2, ["column 4"]),
    ("work q nosuch -- cat", 66, ["no queue 'nosuch' in {root}"]),
    ("reply q nosuch {dir}/file", 66, ["no message 'nosuch' in queue q"]),
    ("reply work {receipt} {dir}/file", 2, ["has no reply_to", "nothing was sent"]),
    ("work q -- no-such-command", 69, ["no-such-command: no such command", "no message was touched"]),
    ("work q -- {dir}/file", 69, ["{dir}/file", "may not be executed", "no message was touched"]),
    # many messages at once
    ("requeue work", 2, ["by their ids", "or give --all"]),
    ("requeue work x --all", 2, ["--all, but not both"]),
    ("requeue work --all", 2, ["Requeue 1 message in error/ of work?", "no terminal to ask on", "--yes"]),
    ("requeue work --filter 'JMSPriority > 9'", 2, ["Requeue what matches of 1 message in error/ of work?"]),
    ("requeue work nosuch", 1, ["requeued=0 failed=1"]),
    ("requeue work x --state target", 2, ["'target'", "messages are requeued from error"]),
    ("requeue work x --state target --to q", 2, ["`dropq move work q --state target` moves what waits"]),
    ("requeue work x --state delayed --to q", 2, ["`dropq move work q --state delayed` moves what waits"]),
    ("requeue work --all --to nosuch -y", 66, ["no queue 'nosuch'"]),
    ("move work q", 2, ["by their ids", "or give --all"]),
    ("move work", 2, ["Missing argument 'TO'"]),
    ("move work q nosuch", 1, ["moved=0 failed=1"]),
    ("move work work --all", 2, ["are in work already", "another queue"]),
    ("move work q --state error --filter 'JMSPriority > 9'", 2, ["Move what matches of 1 message in error/"]),
    ("expire work", 2, ["by their ids", "or give --all"]),
    ("expire work --all", 2, ["Expire", "in delayed/, target/, processing/ of work?", "--yes"]),
    ("expire work nosuch", 1, ["expired=0 failed=1"]),
    ("expire work x --state error", 2, ["'error'", "messages are expired in delayed, target, processing"]),
    ("purge work x", 2, ["Missing option '--state'"]),
    ("purge work --state error", 2, ["by their ids", "or give --all"]),
    ("purge work --state error e1", 2, ["Remove 1 message from error/ of work for good?", "--yes"]),
    ("purge work --state error nosuch -y", 1, ["removed=0 failed=1"]),
    ("prune work --state error -y", 2, ["--keep-age or --keep-count"]),
    ("prune work", 2, ["Prune processed/ of work?", "--yes"]),
    ("replay work", 2, ["Replay the messages in processed/ of work", "--yes"]),
    ("replay work --from yesterday", 2, ["'--from'", "'yesterday' is no point", "ISO 8601"]),
    ("replay work nosuch", 1, ["replayed=0 failed=1"]),
    ("fsck work --repair", 2, ["Repair work?", "--yes"]),
    *[
        (f"{command} --filter 'a ='", 2, ["bad filter, column 4"])
        for command in ("requeue work", "move work q", "expire work", "purge work --state target", "replay work")
    ],
]


class Standing:
    """A root with queues in odd conditions, and what the command lines name of it."""

    def __init__(self, folder: Path) -> None:
        self.root = Root.create(folder / "root")
        self.files = folder / "files"
        self.files.mkdir()
        (self.files / "file").write_text("body")
        (self.files / "bad.toml").write_text("lease_period = 5m\n")
        make = self.root.create_queue
        make("q", durability="none")
        make("paused", durability="none").pause()
        make("limited", durability="none", max_unprocessed=1).send("x")
        make("filtered", durability="none", filter="region = 'EU'").send("x")
        (self.root.path / "folder").mkdir()
        (make("broken").root.path / "broken" / "queue.toml").write_text("lease_period = 5m\n")
        make("lacking")
        (self.root.path / "lacking" / "processing").rmdir()
        self.work = make("work", durability="none")
        with self.work.subscribe(lease_period=600, detached=True, max_backlog=None) as subscription:
            for id in ("settled", "e1", "held"):
                self.work.send("x", message_id=id)
                message = subscription.receive()
                assert message is not None
                self.receipt = message.file
                if id == "settled":
                    self.old = message.file
                    message.ack()
                elif id == "e1":
                    message.reject("no good")

    def filled(self, text: str) -> str:
        """Put the root, the folder of files and the receipts into a text."""
        return text.format(root=self.root.path, dir=self.files, receipt=self.receipt, old=self.old)

    def files_of_messages(self) -> set[str]:
        """Return the path of every message."""
        return {
            f"{queue}/{state}/{name}"
            for queue in ("q", "limited", "filtered", "work", "paused")
            for state in ("target", "processing", "error", "processed", "expired")
            for name in names_in(self.root.queue(queue), state)
        }


@pytest.fixture
def standing(tmp_path: Path) -> Standing:
    return Standing(tmp_path)


Answer = tuple[int, str, str]


@pytest.fixture
def ask(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Answer]:
    """Run a command line in the root, with nothing on standard input; return exit code, stdout and stderr."""
    monkeypatch.chdir(standing.root.path)
    monkeypatch.delenv("DROPQ_ROOT", raising=False)

    def ask(line: str) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            return cli.main([standing.filled(word) for word in shlex.split(line)]), out.getvalue(), err.getvalue()

    return ask


def check(standing: Standing, answer: Answer, line: str, code: int, says: list[str]) -> None:
    exited, out, err = answer
    assert exited == code, err
    output = out if line.startswith("config check") else err
    assert [words for words in says if standing.filled(words) not in output] == [], output
    assert all(words not in err for words in ("Traceback", "fault of dropq", "Value error"))
    assert out == "" or code == 1 or line.startswith("config check")


@pytest.mark.parametrize(("line", "code", "says"), WRONG, ids=[line[:60] for line, *_ in WRONG])
def test_wrong_input_is_answered_in_words_that_help_and_moves_no_message(
    standing: Standing, ask: Callable[[str], Answer], line: str, code: int, says: list[str]
) -> None:
    before = standing.files_of_messages()
    check(standing, ask(line), line, code, says)
    assert standing.files_of_messages() == before


@pytest.mark.parametrize("line", ["send q", "send q -", "send q --lines", "ack work -", "requeue work -", "cat work -"])
def test_a_standard_input_that_is_closed_is_no_empty_input(
    standing: Standing, ask: Callable[[str], Answer], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    before = standing.files_of_messages()
    monkeypatch.setattr(sys, "__stdin__", None)
    check(standing, ask(line), line, 74, ["standard input is closed", "nothing was done", "</dev/null"])
    assert standing.files_of_messages() == before


@pytest.mark.parametrize("line", ["ls", "browse q", "send q {dir}/file", "receive q", "sweep", "fsck", "health"])
def test_a_root_that_may_not_be_read_is_named(standing: Standing, ask: Callable[[str], Answer], line: str) -> None:
    standing.root.path.chmod(0)
    try:
        code, _, err = unprivileged(lambda: ask(f"--root {shlex.quote(str(standing.root.path))} {line}"))
    finally:
        standing.root.path.chmod(0o755)
    assert code in (77, 78) and "Permission denied" in err and str(standing.root.path) in err


def test_a_root_that_is_the_working_directory_and_may_not_be_entered_is_not_called_missing(
    standing: Standing, ask: Callable[[str], Answer]
) -> None:
    standing.root.path.chmod(0)
    try:
        code, _, err = unprivileged(lambda: ask("ls"))
    finally:
        standing.root.path.chmod(0o755)
    assert code == 77 and f"may not enter {standing.root.path}" in err and "dropq init" not in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_root_of_another_user_is_no_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, owner in (("a", 12345), ("b", 0)):
        Root.create(tmp_path / name)
        os.chown(tmp_path / name, owner, owner)
    assert cli.main(["top"]) == 66
    assert f"did you mean --root {tmp_path}/b?" in capsys.readouterr().err
    os.chown(tmp_path / "b", 12345, 12345)
    assert cli.main(["top"]) == 66
    assert "did you mean" not in capsys.readouterr().err
