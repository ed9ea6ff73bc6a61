"""Each shell completes commands, queues, states, keys and ids, and takes odd names as they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pexpect
import pytest
from helpers import first_and_long

from dropq import Root
from dropq.cli import completion
from dropq.cli import main as cli

#: The options by which each shell does without a user's settings.
SHELLS = {
    "bash": ["--noprofile", "--norc"],
    "zsh": ["-f"],
    "fish": ["--no-config"],
}
#: Names of queues in which a shell finds something to evaluate, to expand or to split at, and what is typed of each.
ODD = {
    "two words": "tw",
    "it's $(touch made)": "it",
    "`touch made`;x": "\\`",
    "a:b=c": "a",
    "q*": "q",
    "~z": "\\~",
    'dou"ble': "dou",
    "back\\slash": "ba",
    "né": "n",
}
PROMPT = "ready> "


class Terminal:
    """A shell on a terminal of its own, which has loaded the completion of dropq.

    Args:
        shell: its name.
        folder: its working directory.
        home: the user's.
        installed: it reads the user's settings, and loads the completion by them.
    """

    def __init__(self, shell: str, folder: Path, home: Path, *, installed: bool = False) -> None:
        shim = home / "bin" / "dropq"
        shim.parent.mkdir(parents=True, exist_ok=True)
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dropq "$@"\n')
        shim.chmod(0o755)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("DROPQ", "XDG", "ZDOTDIR"))}
        env |= {"HOME": str(home), "PATH": f"{shim.parent}:{env['PATH']}", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        env |= {"PS1": PROMPT, "fish_greeting": ""}
        started = [shutil.which(shell), *(() if installed else SHELLS[shell]), "-i"]
        self.shell, self.home = shell, home
        self.child = pexpect.spawn(
            str(started[0]), started[1:], env=env, cwd=str(folder), timeout=600, dimensions=(50, 250), encoding="utf-8"
        )
        if shell == "fish":
            self.child.send(f"function fish_prompt; echo -n '{PROMPT}'; end\r")
        elif installed:
            self.child.send(f"PS1='{PROMPT}'\r")
        self.child.expect(rf"(?<!'){PROMPT}")
        if not installed:
            self.run("dropq --show-completion > ../script")
            self.run("source ../script")

    def run(self, line: str) -> str:
        """Type a line, with \\t for the key Tab; return what was on the terminal until its command had ended."""
        status = "$status" if self.shell == "fish" else "$?"
        self.child.send(f"{line}; echo ended-{status}\r")
        self.child.expect(rf"^(.*)ended-\d+\r*\n.*{PROMPT}")
        assert isinstance(self.child.match, re.Match)
        return str(self.child.match[1])

    def records(self, line: str) -> list[dict[str, Any]]:
        """Run a line that prints JSON; return what it printed."""
        return [json.loads(text) for text in re.findall(r"\{.*\}", self.run(line))]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root.create(tmp_path / "root")
    orders = root.create_queue("orders", durability="none")
    orders.send("a", message_id="first")
    orders.send("b", message_id="second $(touch made)")
    for name in ODD:
        root.create_queue(name, durability="none")
    return root


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.host] if each != "bash" else []) for each in SHELLS])
def terminal(request: pytest.FixtureRequest, root: Root, tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed (apt install {request.param})")
    terminal = Terminal(request.param, root.path, tmp_path / "home")
    yield terminal
    terminal.child.close(force=True)


def test_each_queue_is_completed_whatever_its_name_has(terminal: Terminal, root: Root) -> None:
    for name, typed in ODD.items():
        assert [record["queue"] for record in terminal.records(f"dropq --json ls {typed}\t")] == [name]
    assert not (root.path / "made").exists()


def test_commands_options_states_keys_ids_and_receipts_are_completed(terminal: Terminal, root: Root) -> None:
    with root.queue("orders").subscribe(lease_period=60, detached=True) as subscription:
        held = subscription.receive()
        assert held is not None
        (shown,) = terminal.records("dropq --js\t bro\t ord\t --stat\t processi\t")
        assert shown["id"] == "first"
        (acked,) = terminal.records(f"dropq ack orders {held.file[:9]}\t --json")
    assert acked["id"] == "first"
    (body,) = terminal.records("dropq cat orders sec\t --json")
    assert (body["id"], body["body"]) == ("second $(touch made)", "b")
    (setting,) = terminal.records("dropq config sh\t orders --json lease_per\t")
    assert setting["key"] == "lease_period"
    assert "created" in terminal.run(f"cd {root.path}; dropq create new --set lease_per\t5m && echo created")
    assert root.queue("new").config.lease_period == 300


def test_what_stands_in_open_quotes_is_completed(terminal: Terminal) -> None:
    assert [record["queue"] for record in terminal.records("dropq --json ls 'two w\t")] == ["two words"]
    assert [record["queue"] for record in terminal.records('dropq --json ls "two w\t')] == ["two words"]


def test_the_names_of_files_are_completed_where_a_file_is_meant(terminal: Terminal, root: Root) -> None:
    (root.path / "mail.txt").write_text("sent")
    terminal.run("dropq send orders mail.t\t")
    assert "sent" in [message.text for message in root.queue("orders").browse()]
    assert "no queue 'mail'" in terminal.run("dropq ls mail\t")


def test_an_installed_completion_says_where_it_is_and_works_in_the_next_terminal(
    terminal: Terminal, root: Root, tmp_path: Path
) -> None:
    for _ in range(2):
        printed = terminal.run("dropq --install-completion")
    home = re.escape(str(terminal.home))
    (script,) = set(re.findall(rf"{home}/\S*dropq[/.]\S*(?:bash|zsh|fish)\b", printed))
    assert "_dropq_completion" in Path(script).read_text()
    startup = {"bash": ".bashrc", "zsh": ".zshrc"}.get(terminal.shell)
    if startup is not None:
        assert (terminal.home / startup).read_text() == f"source {quote(script)}\n"
        assert f"source {quote(script)}" in printed
    again = Terminal(terminal.shell, root.path, terminal.home, installed=True)
    try:
        assert [record["queue"] for record in again.records("dropq --json ls tw\t")] == ["two words"]
    finally:
        again.child.close(force=True)


@pytest.mark.parametrize("before", [b"", b"alias ll='ls -l'", b"export A=\xff\r\n\nexport B=2\n"])
@pytest.mark.parametrize("shell", SHELLS)
def test_an_uninstalled_completion_leaves_the_shells_settings_as_they_were(
    shell: str, before: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(completion, "script", lambda: (shell, "the script"))
    startup = tmp_path / {"bash": ".bashrc", "zsh": ".zshrc", "fish": "unused"}[shell]
    startup.write_bytes(before)
    assert cli.main(["--install-completion"]) == 0
    (script,) = (path for path in tmp_path.rglob("*") if path.is_file() and path != startup)
    assert script.read_text() == "the script"
    capsys.readouterr()

    assert cli.main(["--uninstall-completion"]) == 0
    printed = capsys.readouterr().out
    assert f"{script} is removed." in printed and (shell == "fish" or str(startup) in printed)
    assert not script.exists() and (shell == "fish" or not script.parent.exists()), "no empty folder is left"
    added = b"\n" if shell != "fish" and before and not before.endswith(b"\n") else b""
    assert startup.read_bytes() == before + added
    assert cli.main(["--uninstall-completion"]) == 0
    assert capsys.readouterr().out == "No completion is installed: nothing was changed.\n"


@pytest.mark.parametrize("shell", first_and_long(SHELLS))
@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("ls", {}),
        ("browse", {"DROPQ_ROOT": "missing"}),
        ("show q", {}),
        ("show nosuch", {"DROPQ_ROOT": "root"}),
        ("browse --root missing", {"DROPQ_ROOT": "root"}),
    ],
)
def test_a_root_or_queue_that_is_missing_completes_nothing_and_prints_nothing(
    shell: str, command: str, environment: dict[str, str], root: Root, tmp_path: Path
) -> None:
    words = [f"dropq {command} "] if shell == "bash" else [*command.split(), ""]
    for end, printed in (("", ""), ("orders", "plain\torders")):
        if end:  # the same question finds queues where there is a root
            words = ["dropq ls --root root or"] if shell == "bash" else ["ls", "--root", "root", "or"]
        done = subprocess.run(
            [sys.executable, "-m", "dropq", *words],
            env={**os.environ, "_DROPQ_COMPLETE": f"complete_{shell}", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.strip("\n"), done.stderr) == (0, printed, "")


def completed(home: Path, line: str) -> str:
    """What dropq answers to the script of bash for a line."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "_DROPQ_COMPLETE": "complete_bash", "_DROPQ_BREAKS": " "}
    done = subprocess.run([sys.executable, "-m", "dropq", line], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_completing_a_line_does_nothing_that_the_line_would_do(tmp_path: Path) -> None:
    for option in ("--install-completion", "--uninstall-completion", "--show-completion", "--version"):
        assert "plain\tls" in completed(tmp_path, f"dropq {option} l")
    assert list(tmp_path.iterdir()) == []


def test_an_id_is_completed_wherever_its_message_is_among_many(tmp_path: Path) -> None:
    queue = Root.create(tmp_path / "root").create_queue("q", durability="none")
    ids = [one.id for one in queue.send_many([b"x"] * 300)]
    for id in (ids[0], ids[-1]):
        assert completed(tmp_path, f"dropq --root {quote(str(tmp_path))}/root show q {id}") == f"plain\t{id}\n"


def test_the_id_of_a_message_that_is_held_is_completed_where_a_command_takes_several_states(tmp_path: Path) -> None:
    queue = Root.create(tmp_path / "root").create_queue("q", durability="none")
    queue.send(b"x", message_id="held")
    with queue.subscribe() as subscription:
        assert subscription.receive() is not None
        line = f"dropq --root {quote(str(tmp_path))}/root expire q he"
        assert completed(tmp_path, line) == "plain\theld\n"


def test_the_ids_that_requeue_completes_are_those_of_the_state_that_it_takes(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    (root.path / "dropq.toml").write_text('dead_letter_queue = "q"\n')
    queue = Root(root.path).create_queue("q", durability="none")
    queue.send(b"x", message_id="bad")
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        message.reject("r")
    Root(root.path).queue("missing").send(b"x", message_id="letter")
    line = f"dropq --root {quote(str(tmp_path))}/root requeue q "
    assert completed(tmp_path, line) == "plain\tbad\n"
    assert completed(tmp_path, f"{line}--to-origin ") == "plain\tletter\n"
    assert completed(tmp_path, f"{line}--state target ") == "plain\tletter\n"
