"""The papers are true: their examples run, their links lead somewhere, what they list exists."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest
from helpers import until

import dropq

TOP = Path(__file__).parents[2]
PAPERS = [TOP / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAPERS += sorted((TOP / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(paper: Path, *kinds: str) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(paper.read_text()) if kind in kinds]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_link_leads_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", paper.read_text()):
        assert (paper.parent / target).exists(), f"{paper.name} links to {target}"


def test_the_tour_of_the_readme_runs_word_for_word(tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    environment.pop("DROPQ_ROOT", None)
    script = ["set -e"]
    for number, (kind, text) in enumerate(blocks(TOP / "README.md", "console", "python")):
        if kind == "console":
            commands = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
            # A worker that met a bad message ends by telling so.
            script += [f"{command} || [ $? = 1 ]" if "exit 65" in command else command for command in commands]
        elif "needs the extra" not in text:
            (tmp_path / f"example{number}.py").write_text(text)
            script.append(f"(cd {quote(str(tmp_path))} && {quote(sys.executable)} example{number}.py)")
    done = subprocess.run(
        ["sh", "-c", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    counts = dropq.Root(tmp_path / "work").queue("orders").counts()
    assert counts["processed"] == 5
    assert sum(counts.values()) == 5
    assert "no item in it" in done.stdout  # `dropq show` tells why the message failed
    assert "hello" in done.stdout
    assert "hello again" in done.stdout
    assert "1 held, as many as max_backlog allows" in done.stdout
    jobs = dropq.Root(tmp_path / "work").queue("jobs")
    assert [message.text for message in jobs.browse("processing")] == ['{"urgency": 5, "region": "US"}\n']


def test_the_unit_of_the_operations_paper_works_and_stops(tmp_path: Path) -> None:
    ((_, text),) = blocks(TOP / "docs/operations.md", "ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    assert (service["KillMode"], service["Restart"]) == ("mixed", "always")
    started = service["ExecStart"].split()
    assert [started[0], started[2], started[-2]] == [
        "/opt/dropq/bin/dropq",
        "/srv/queues",
        "/usr/local/bin/handle-order",
    ]
    started = [sys.executable, "-m", "dropq", "--root", str(tmp_path), *started[3:-2], "true", "{}"]
    queue = dropq.Root.create(tmp_path).create_queue("orders", durability="none")
    queue.send_many([b"x"] * 5)
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as worker:
        until(lambda: queue.counts()["processed"] == 5, "the worker works")
        worker.terminate()
        assert worker.stderr is not None and worker.stderr.read().startswith("5 acknowledged in ")
        assert worker.wait(20) == 0


def test_the_examples_of_the_python_paper_print_what_it_says(tmp_path: Path) -> None:
    program = "\n".join(text for _, text in blocks(TOP / "docs/python.md", "python"))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"^ *print\(.*\)  # (.+)$", program, re.MULTILINE)


def test_the_python_paper_names_everything_that_is_public() -> None:
    paper = (TOP / "docs/python.md").read_text()
    assert [name for name in dropq.__all__ if not re.search(rf"\b{name}\b", paper)] == []


@pytest.mark.spark
def test_the_spark_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = (text for _, text in blocks(TOP / "README.md", "python") if "needs the extra" in text)
    queue = dropq.Root.create(tmp_path / "work").create_queue("orders")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(message.text for message in queue.browse()) == [str(number) for number in range(10)]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_no_example_puts_a_path_into_the_text_of_a_program(paper: Path) -> None:
    for text in re.findall(r"\bsh -\w*c ('[^']*'|\"[^\"]*\")", paper.read_text()):
        assert "{}" not in text, f"{paper.name}: a name can hold a command, which {text} would run"


@pytest.mark.parametrize("picture", ["lifecycle", "house"])
def test_a_picture_is_what_its_script_draws(picture: str) -> None:
    script = TOP / f"docs/draw_{picture}.py"
    drawn = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert drawn.stdout == (TOP / f"docs/{picture}.svg").read_text(), f"run docs/draw_{picture}.py again"


def test_the_figures_are_drawn_from_what_was_measured() -> None:
    drawing = runpy.run_path(str(TOP / "docs/draw_benchmarks.py"))
    for name, text in drawing["drawn"]().items():
        assert text == (TOP / "docs/benchmarks" / name).read_text(), f"{name}: run docs/draw_benchmarks.py again"
    for name, mark in drawing["marks"]().items():  # pictures that not everybody can draw
        assert mark.encode() in (TOP / "docs/benchmarks" / name).read_bytes(), f"{name}: draw it again"
