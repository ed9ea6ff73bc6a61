"""Each command has a manual page, which is its help, and which groff reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from dropq.cli import main as cli
from dropq.cli.examples import EXAMPLES

#: The pages by the names of their commands, as the examples have them: those of groups, too.
PAGES = {name: "-".join(["dropq", *name.split()]) for name in EXAMPLES}


@pytest.fixture(scope="module")
def man(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "man"
    subprocess.run([sys.executable, "-m", "dropq.cli.man", folder], check=True)
    return folder


def test_each_command_has_its_page_and_nothing_else_has_one(man: Path) -> None:
    assert {path.name for path in (man / "man1").iterdir()} == {f"{page}.1" for page in PAGES.values()}


@pytest.mark.host
@pytest.mark.skipif(not shutil.which("groff"), reason="there is no groff: apt-get install groff")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_all_that_the_help_shows(name: str, man: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "groff",
        "-man",
        "-ww",
        "-Tutf8",
        "-P-cbou",
        "-rLL=400n",
        "-rHY=0",
        str(man / "man1" / f"{PAGES[name]}.1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    page = re.sub(r"\s+", " ", done.stdout.translate({0x2010: "-", 0x2212: "-"}))  # as some write a hyphen
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLE"):
        assert f" {heading} " in page
    context = get_command(cli.build()).make_context("dropq", [], resilient_parsing=True)
    for word in name.split():
        inner = context.command.commands[word]  # type: ignore[attr-defined]
        context = inner.make_context(word, [], parent=context, resilient_parsing=True)
    for param in context.command.get_params(context):
        meant = re.sub(r"\s+", " ", getattr(param, "help", "").replace("`", ""))
        assert meant in page, param.name
        assert all(option in page for option in param.opts if option.startswith("-"))
    for example in EXAMPLES[name]:
        assert re.sub(r"\s+", " ", example) in page


@pytest.mark.host
@pytest.mark.skipif(not shutil.which("man"), reason="there is no man: apt-get install man-db")
def test_man_finds_a_page_by_its_command(man: Path) -> None:
    done = subprocess.run(
        ["man", "-M", man, "dropq-topic-subscribe"], env={"PATH": "/usr/bin:/bin", "MANWIDTH": "120", "LC_ALL": "C"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Make a durable subscription" in done.stdout
