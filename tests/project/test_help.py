"""The help of every command is in the words of people, and its examples run."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dropq import Root
from dropq.cli import log, look, screen
from dropq.cli import main as cli
from dropq.cli.examples import EXAMPLES
from dropq.events.log import ACTS, OUTCOMES

SAMPLE = Path(__file__).parents[2] / "sample_root"
#: What a help may call a value.
VALUES = {
    *("QUEUE", "TO", "ID", "RECEIPT", "FILE", "DIR", "KEY", "KEY=VALUE", "NAME[:TYPE]=VALUE", "TYPE", "TEXT", "N"),
    *("DURATION", "FILTER", "STATE", "POINT", "QUEUE... -- CMD...", "NAME", "TOPIC", "CLIENT", "OP", "ROLE", "FORMAT"),
    *("ADDRESS", "HEADER", "BYTES", "ROW", "EVENT", "TIME", "COLUMN", "PEER", "NAME=PATH"),
}
#: Examples that wait for what does not come in a test, or need a message that asks for an answer, or a folder that is
#: not there.
UNENDING = (
    "dropq tail -f",
    "dropq log -f",
    "dropq metrics --",
    "dropq web",
    "dropq work orders invoices",
    "echo 42 | dropq reply",
    "dropq wait orders --empty",
    "dropq serve orders --zmq",
    "dropq bridge orders",
    "dropq doctor --root /mnt",
)
#: Commands that exit with 1 when they find something, or would refuse.
FINDERS = ("doctor", "log", "metrics", "health", "fsck", "work", "delete")


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command, and every group of commands, by name."""
    top = get_command(cli.build())
    yield "", top
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        yield name, command
        for inner, each in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", each


NAMES = [name for name, _ in commands()]


def run(argv: list[str], monkeypatch: pytest.MonkeyPatch, stdin: str = "") -> tuple[int, str, str]:
    raw, err = io.BytesIO(), io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
        patch.setattr(sys, "stderr", err)
        code = cli.main(argv)
        sys.stdout.flush()
        return code, raw.getvalue().decode(), err.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_help_has_words_that_people_write_and_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run([*name.split(), "-h"], monkeypatch)
    assert code == 0 and text == run([*name.split(), "--help"], monkeypatch)[1]
    usage, _, rest = text.partition("\n")
    assert not set("{}<>") & set(usage)
    assert re.findall(r"<[a-z\[\]|]+>|x>=", rest) == []
    values = {param.metavar for key, command in commands() if key == name for param in command.params} - {None}
    assert values <= VALUES
    for value in ("DURATION", "FILTER"):
        assert text.count(f"{value} is such as") == (value in values)
    examples = text.split("\nExample:\n")[1].splitlines()
    assert [line.removeprefix("  ") for line in examples] == list(EXAMPLES[name])


def join(south: Path, north: Path) -> None:
    """Let two roots name each other; the second is made."""
    Root.create(north)
    for name, root, other, there in (("south", south, "north", north), ("north", north, "south", south)):
        file = root / "dropq.toml"
        peer = f'[[peer]]\nname = "{other}"\nroot = "{there}"\n'
        file.write_text(f'instance = "{name}"\n{file.read_text()}{peer}')


#: What the helps of commands say, as words with single spaces.
SAYS = [
    ("work", "No line for each message, and no sums; only what keeps the worker from working."),
    ("work", "With --to, send each line as a message."),
    ("work", "With --to, send an empty output, or line, too."),
    ("ack", "all three by default. One of target, delayed, processing."),
    ("expire", "all three by default. One of target, delayed, processing."),
    ("log", f"may be repeated: {', '.join((*OUTCOMES, *ACTS))}."),
    ("log", f"Lines have {', '.join(log.COLUMNS)}."),
    ("top", f"Lines have {', '.join(screen.COLUMNS)}."),
    ("browse", f"Lines have {', '.join(look.COLUMNS)};"),
    ("browse", f"with --explain {', '.join(look.WHY)}."),
    ("", "a line that loads it into ~/.bashrc or ~/.zshrc"),
]


@pytest.mark.parametrize(("name", "words"), SAYS)
def test_a_help_says_what_a_command_does(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = " ".join(run([*name.split(), "-h"], monkeypatch)[1].split())
    assert words in re.sub(r"(?<=[a-z])- (?=[a-z])", "-", said)


@pytest.mark.parametrize("name", NAMES)
def test_no_help_has_a_default_that_is_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[default: ]" not in run([*name.split(), "-h"], monkeypatch)[1]


def test_no_example_is_of_a_command_that_is_not_there() -> None:
    assert set(EXAMPLES) == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("", "config", "init")])
def test_each_command_takes_the_root_before_and_after_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    missing = str(tmp_path / "missing")
    words = name.split()
    example = shlex.split(EXAMPLES[name][0].rpartition("| ")[2])[1 + len(words) :]
    rest = [] if name == "doctor" else example
    for argv in (["--root", missing, *words, *rest], [*words, "--root", missing, *rest]):
        code, _, err = run(argv, monkeypatch)
        assert code == 66 and missing in err, err
    assert not Path(missing).exists()


@pytest.mark.parametrize("before", [True, False])
def test_init_makes_the_root_that_is_named_before_or_after_it(
    before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = ["--root", str(tmp_path / "root")]
    assert run([*root, "init"] if before else ["init", *root], monkeypatch)[0] == 0
    assert (tmp_path / "root" / "dropq.toml").exists()


LINES = [(name, line) for name, lines in EXAMPLES.items() for line in lines]


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_runs_in_a_root(name: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "root")
    monkeypatch.chdir(tmp_path / "root")
    monkeypatch.delenv("DROPQ_ROOT", raising=False)
    Path("till.csv").write_text("1,2")
    Path("amps.xml").write_text("<AMPSConfig><SOW><Queue><Name>jobs</Name></Queue></SOW></AMPSConfig>")
    assert name == "" or re.search(rf"\bdropq {name}\b", line)
    join(tmp_path / "root", tmp_path / "north")
    Root(tmp_path / "root").create_topic("news").create_subscription("archive", client_id="hq")
    Root(tmp_path / "root").queue("invoices").add_selector("back", op="bounce")
    with Root(tmp_path / "root").queue("orders") as orders, orders.subscribe(detached=True, lease_period=60) as held:
        message = held.receive()
        assert message is not None
        data = ""
        for part in line.split(" | "):
            words = [word.replace("RECEIPT", message.file) for word in shlex.split(part)]
            words = [path for word in words for path in (glob(word) if "*" in word else [word])]
            if words[0] == "echo":
                data = f"{words[1]}\n"
                continue
            if line.startswith(UNENDING) or "--wait-reply" in line:  # nobody answers
                parse(words[1:])
                continue
            code, data, err = run(words[1:], monkeypatch, data)
            has_no_letters = "--to-origin" in words and "would_requeue=0 failed=0" in err
            assert code == 0 or (code == 1 and (words[1] in FINDERS or has_no_letters)), err


def parse(argv: list[str]) -> None:
    """Parse a command line, and do not run it."""
    top: Any = get_command(cli.build())
    with top.make_context("dropq", argv) as context:
        name, command, rest = top.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(name, rest, parent=context).close()
