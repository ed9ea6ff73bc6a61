"""The examples are true: the sample root is sound, its tour runs, the shell scripts keep the protocol, the demo accounts."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import dropq
from dropq.fsck import fsck, fsck_root
from helpers import base, files, make_queue, until, where

TOP = Path(__file__).parent.parent
SHELL = TOP / "examples" / "shell"
SH = shutil.which("dash") or "/bin/sh"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "DROPQ_ROOT"} | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "COLUMNS": "110",
    "LC_ALL": "C.UTF-8",
}


def module(name: str) -> ModuleType:
    """Load an example as a module."""
    spec = importlib.util.spec_from_file_location(name, TOP / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def sh(script: str, *arguments: str | Path, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run a script of examples/shell."""
    command = [SH, str(SHELL / script), *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, **kwargs)  # type: ignore[call-overload, no-any-return]


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the sample root -------------------------------------------------------------------------------------------


def test_the_scripts_make_what_is_checked_in_byte_for_byte(tmp_path: Path) -> None:
    module("make_sample_root").main(tmp_path / "root")
    checked_in = tree(TOP / "sample_root")
    del checked_in["README.md"]
    checked_in.pop(".dropq/clock", None)  # made by whoever looks at it with dropq
    assert tree(tmp_path / "root") == checked_in
    module("make_data").main(tmp_path / "data")
    assert tree(tmp_path / "data") == tree(TOP / "examples" / "data")


def test_the_sample_root_is_sound_and_so_is_any_copy(tmp_path: Path) -> None:
    for root in (TOP / "sample_root", shutil.copytree(TOP / "sample_root", tmp_path / "copy")):
        found = [*fsck_root(dropq.Root(root)), *(item for queue in dropq.Root(root).queues() for item in fsck(queue))]
        assert [item for item in found if item.open] == []


def test_the_sample_root_has_messages_in_every_state_and_their_reasons(tmp_path: Path) -> None:
    root = dropq.Root(shutil.copytree(TOP / "sample_root", tmp_path / "copy"))
    orders = root.queue("orders").counts()
    assert all(orders[state] for state in ("target", "processing", "processed", "expired", "error"))
    for state in ("error", "expired"):
        assert all(message.reason for message in root.queue("orders").browse(state))
    assert root.queue("invoices").layout.base.endswith("/incoming")


def test_a_queue_that_a_keep_file_holds_in_git_can_be_deleted(tmp_path: Path) -> None:
    root = dropq.Root(shutil.copytree(TOP / "sample_root", tmp_path / "copy"))
    with pytest.raises(dropq.StorageError, match="messages to work on"):
        root.delete_queue("invoices")
    for message in root.queue("invoices").browse():
        os.remove(message.path)
    root.delete_queue("invoices")
    assert not (tmp_path / "copy" / "invoices").exists()


# -- the tour --------------------------------------------------------------------------------------------------


def tour() -> list[tuple[str, str]]:
    """Return the commands of the tour, each with the output that is shown for it."""
    steps: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", (TOP / "sample_root/README.md").read_text(), re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in steps]


def take_tour(commands: Sequence[str], folder: Path) -> list[str]:
    """Run commands in one shell on a terminal; return what each printed."""
    (folder / "sample_root").symlink_to(TOP / "sample_root")
    mark = "@@@@"
    script = "\n".join(f"echo {mark}\n{command.replace('/tmp/shop', f'{folder}/shop')}" for command in commands)
    leader, terminal = pty.openpty()
    child = subprocess.Popen(
        [SH, "-c", script.replace("cp -R sample_root", "cp -RH sample_root")],
        cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    printed = b""
    while True:
        try:
            chunk = os.read(leader, 1 << 16)
        except OSError:  # how Linux says that the last of the other end is closed
            break
        if not chunk:
            break
        printed += chunk
    os.close(leader)
    assert child.wait(timeout=10) is not None
    return printed.decode().replace("\r\n", "\n").split(f"{mark}\n")[1:]


def pattern(shown: str) -> str:
    """Make a pattern of what is shown: any white space is as good as any other, and … stands for whatever varies."""
    return r"\s*" + r"\s+".join(re.escape(word).replace("…", ".*") for word in shown.split()) + r"\s*"


def test_the_tour_of_the_sample_root_shows_what_it_says(tmp_path: Path) -> None:
    steps = tour()
    printed = take_tour([command for command, _ in steps], tmp_path)
    for (command, shown), output in zip(steps, printed, strict=True):
        output = output.replace(f"{tmp_path}/shop", "/tmp/shop")
        assert re.fullmatch(pattern(shown), output), f"$ {command}\n{output}"
