"""The papers are true: their examples run, their links lead somewhere, what they list exists."""

from __future__ import annotations

import configparser
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote

import pytest
from helpers import until
from torture.debian import MADE

import dropq
from dropq import aio

TOP = Path(__file__).parents[2]
PAPERS = [TOP / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "sample_root/README.md")]
PAPERS += sorted((TOP / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(paper: Path, *kinds: str) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(paper.read_text()) if kind in kinds]


def anchors(paper: Path) -> set[str]:
    """Return what a link can name in a paper: its headings, as forges write them."""
    headings = re.findall(r"^#+ (.+)$", paper.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_link_leads_somewhere(paper: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", paper.read_text()):
        there = paper.parent / target if target else paper
        assert there.exists(), f"{paper.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{paper.name} links to {target}#{anchor}"


def test_each_file_of_the_promises_is_in_the_index_once() -> None:
    _, _, index = (TOP / "docs" / "reliability.md").read_text().partition("## Which tests hold which promise\n")
    named = re.findall(r"`(\w+)`[,| ]", index.partition("\n\n`tests/unit/`")[0])
    files = sorted(file.stem.removeprefix("test_") for file in (TOP / "tests" / "promises").glob("test_*.py"))
    assert sorted(named) == files


def printed_comments(program: str) -> list[str]:
    """Return what the comments behind the calls of print in a program say that it prints."""
    return re.findall(r"print\(.*\)+  # (.+)$", program, re.MULTILINE)


def shown_steps(paper: Path) -> list[tuple[str, str]]:
    """Return the commands of a paper's console blocks, each with the output that is shown for it."""
    steps: list[tuple[str, str]] = []
    for _, text in blocks(paper, "console"):
        for line in text.splitlines(keepends=True):
            if line.startswith("$ "):
                steps.append((line[2:], ""))
            else:
                steps[-1] = (steps[-1][0], steps[-1][1] + line)
    return steps


def comparable(output: str) -> str:
    """Return an output with words in place of ids and periods, which differ from run to run, and with single spaces."""
    output = re.sub(r"\b\d{16}-\d{10}\b", "ID", output)
    return re.sub(r" +$", "", re.sub(r"[ \t]+", " ", re.sub(r"\b\d+\.\d s\b", "PERIOD", output)), flags=re.MULTILINE)


def check_steps(steps: list[tuple[str, str]], folder: Path) -> None:
    """Run commands in a folder, in one shell, and compare what they print with what is shown for each."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("DROPQ_ROOT", None)
    mark = "@@@@\n"
    script = "".join(f"{command}printf '{mark}'\n" for command, _ in steps)
    with subprocess.Popen(
        ["sh", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            printed, _ = shell.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # what the commands left running
    outputs = printed.replace(str(folder), "/home/ann").split(mark)
    assert outputs.pop() == "", "the shell ended early"
    for (command, shown), output in zip(steps, outputs, strict=True):
        assert comparable(output) == comparable(shown), f"$ {command}{output}"


def check_tour(paper: Path, folder: Path, example: str) -> str:
    """Run the commands of a paper's console blocks in a folder, then a Python example, and compare what they print.

    It returns what the example printed on stderr.
    """
    check_steps(shown_steps(paper), folder)
    ran = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == printed_comments(example)
    return ran.stderr


def test_the_description_of_the_package_needs_nothing_beside_it_and_its_example_runs(tmp_path: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(TOP / "setup.cfg")
    kind, _, name = setup["metadata"]["long_description"].partition(": ")
    text = (TOP / name).read_text()
    assert kind == "file" and not re.search(r"\]\(|<img|\]:", text), "an index shows it where no link finds its file"
    ((_, example),) = blocks(TOP / name, "python")
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("hello\n", "")


def test_the_tour_of_the_topics_paper_prints_what_it_shows(tmp_path: Path) -> None:
    paper = TOP / "docs/topics.md"
    ((_, example),) = blocks(paper, "python")
    check_tour(paper, tmp_path, example)


def test_the_tour_of_the_routing_paper_prints_what_it_shows(tmp_path: Path) -> None:
    paper = TOP / "docs/routing.md"
    ((_, example),) = blocks(paper, "python")
    check_tour(paper, tmp_path, example)


def test_the_tour_of_the_pipelines_paper_prints_what_it_shows(tmp_path: Path) -> None:
    paper = TOP / "docs/pipelines.md"
    said = check_tour(paper, tmp_path, "\n".join(text for _, text in blocks(paper, "python")))
    shown = next(text for _, text in blocks(paper, "text") if text.startswith("message "))
    assert comparable(said) == comparable(shown)


def test_the_tour_of_the_paper_of_several_roots_prints_what_it_shows(tmp_path: Path) -> None:
    check_steps(shown_steps(TOP / "docs/several-roots.md"), tmp_path)


def test_the_lines_of_the_zeromq_paper_run_in_two_terminals_and_print_what_they_show(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    texts = [text for _, text in blocks(TOP / "docs/zeromq.md", "text")]
    server, clients = texts[:2]
    with_keys = next(text for text in texts if "--keys keys" in text)
    client = next(text for text in texts if text.startswith("import zmq"))
    (checkout := tmp_path / "src" / "dropq" / "examples").mkdir(parents=True)
    shutil.copy(TOP / "examples/zeromq_clients.py", checkout)
    folder = tmp_path / "try"
    (folder / "sockets").mkdir(mode=0o700, parents=True)  # the default addresses may be taken
    lines = [line for text in (server, clients, with_keys) for line in text.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    serves = [at for at, line in enumerate(commands) if line.startswith("dropq serve")]
    addresses = "--receive ipc://sockets/1 --send ipc://sockets/2 --monitor ipc://sockets/3"
    for at in serves:
        commands[at] = f"{commands[at]} {addresses} &\ntrap 'kill $!' EXIT"
    commands.insert(commands.index("umask 077"), "kill $!; wait $!")  # as Ctrl-C in the first terminal does
    commands += [
        f"python - <<'.'\n{client.replace('tcp://127.0.0.1:1113', 'ipc://sockets/')}.",
        "trap - EXIT",
        "kill $!",
    ]
    done = subprocess.run(
        ["sh", "-ec", "\n".join([*commands, "wait $!"]).replace("\npython ", "\ntimeout 60 python ")], cwd=folder,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PZQ": "ipc://sockets/"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = done.stdout.replace(str(tmp_path), "/home/ann").replace("ipc://sockets/", "tcp://127.0.0.1:1113")
    shown = [line for line in lines if not line.startswith(("$ ", "queue   target"))]
    assert timeless(output) == timeless("\n".join([*shown, "[b'id', b'1', b'']"]))


def timeless(output: str) -> list[str]:
    """Return the lines of what a server and its clients print, without the time when it began."""
    return [comparable(line).strip() for line in re.sub("since: .*", "since: TIME", output).splitlines()]


def test_the_tour_of_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    (example,) = (text for _, text in blocks(TOP / "README.md", "python") if "needs the extra" not in text)
    check_tour(TOP / "README.md", tmp_path, example)
    root = dropq.Root(tmp_path / "work")
    counts = {queue.name: {state: n for state, n in queue.counts().items() if n} for queue in root.queues()}
    processed = {"jobs": 2, "orders": 5, "sales": 1, "sales/audit.hq": 1}
    assert counts == {name: {"processed": n} for name, n in processed.items()}, "the tour leaves no message behind"


def test_the_tour_of_the_readme_fits_a_terminal_of_80_columns() -> None:
    assert [
        line for _, text in blocks(TOP / "README.md", "console") for line in text.splitlines() if len(line) > 80
    ] == []


COOKBOOK = TOP / "docs/cookbook.md"
#: A block of commands, and the block of text that follows it, which is what they print.
STEP = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def tasks() -> dict[str, list[tuple[str, str]]]:
    """Return the steps of each task of the cookbook, by its heading."""
    sections = COOKBOOK.read_text().split("\n## ")[1:]
    return {section.partition("\n")[0]: STEP.findall(section) for section in sections}


@pytest.mark.parametrize("task", tasks())
def test_a_task_of_the_cookbook_prints_what_it_shows(task: str, tmp_path: Path) -> None:
    steps = tasks()[task]
    if any("curl " in commands for commands, _ in steps) and not shutil.which("curl"):
        pytest.skip("there is no curl: apt-get install curl")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    check_steps([(commands.replace("8765", port), shown) for commands, shown in steps], tmp_path)


def test_the_blocks_of_the_cookbook_fit_100_columns() -> None:
    assert [line for _, text in blocks(COOKBOOK, "sh", "text") for line in text.splitlines() if len(line) > 100] == []


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the checkout and the environment of a user who has an empty home, and this machine's package index."""
    folder = tmp_path_factory.mktemp("newcomer")
    probe = ["-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "wheel"]
    probed = subprocess.run([sys.executable, *probe], cwd=folder, capture_output=True, text=True)
    if probed.returncode:
        pytest.skip(f"pip reaches no package index here: {probed.stderr.splitlines()[-1]}")
    shutil.copytree(TOP, folder / "checkout", ignore=MADE, symlinks=True)
    (folder / "home").mkdir()
    home = Path.home()
    others = ("DROPQ_", "PIPX_", "VIRTUAL_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment |= {
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # Where pip finds its settings and its cache.
        "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", str(home / ".config")),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(home / ".cache")),
    }
    return folder / "checkout", environment


def install(lines: str, found: str, newcomer: tuple[Path, dict[str, str]]) -> None:
    """Run lines of the README, and check that the command that they install is the one that is found, and works."""
    checkout, environment = newcomer
    done = subprocess.run(
        ["sh", "-ec", f"{lines}\n{found}\nmkdir ~/$$ && cd ~/$$ && dropq init && dropq create orders"],
        cwd=checkout, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("/orders\n")


@pytest.mark.timeout(900)
def test_the_lines_of_the_readme_install_dropq_into_a_virtual_environment(
    newcomer: tuple[Path, dict[str, str]],
) -> None:
    lines, _ = (text for _, text in blocks(TOP / "README.md", "sh"))
    install(lines, '[ "$(command -v dropq)" = ~/dropq-venv/bin/dropq ]', newcomer)


@pytest.mark.timeout(900)
@pytest.mark.host
@pytest.mark.skipif(not shutil.which("pipx"), reason="there is no pipx: apt-get install pipx")
def test_the_line_of_the_readme_installs_dropq_with_pipx(newcomer: tuple[Path, dict[str, str]]) -> None:
    _, line = (text for _, text in blocks(TOP / "README.md", "sh"))
    install(line, "PATH=~/.local/bin:/usr/bin:/bin", newcomer)


OPERATIONS = TOP / "docs/operations.md"


def cron_lines() -> tuple[dict[str, str], list[str]]:
    """Return the variables and the commands of the crontab as cron reads them."""
    ((_, text),) = (block for block in blocks(OPERATIONS, "text") if "PATH=" in block[1])
    variables = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    commands = re.findall(r"^(?:[\d*/]+ +){5}(.+)$", text, re.MULTILINE)
    assert len(variables) + len(commands) == len(text.splitlines())
    assert not [line for line in commands if re.search(r"(?<!\\)%", line)], "a bare % ends a command of cron's"
    return variables, [line.replace("\\%", "%") for line in commands]


def run_as_cron(line: str, variables: dict[str, str], folder: Path) -> str:
    """Run a command in the environment in which cron runs it, and return what cron would mail."""
    paths = {"/opt/dropq/bin": str(Path(sys.executable).parent), "/srv/queues": str(folder / "root")}
    paths["/usr/local/bin/report"] = str(folder / "report")
    here = {"HOME": str(folder), "LOGNAME": "ann", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh", **variables}
    for said, place in paths.items():
        line = line.replace(said, quote(place))
        here = {name: value.replace(said, place) for name, value in here.items()}
    set_here = [f"{name}={value}" for name, value in here.items()]
    done = subprocess.run(
        ["env", "-i", *set_here, "/bin/sh", "-c", line], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.stdout


def test_the_crontab_works_its_queues_and_is_silent_while_nothing_is_wrong(tmp_path: Path) -> None:
    variables, commands = cron_lines()
    root = dropq.Root.create(tmp_path / "root")
    queues = [root.create_queue(name, durability="none") for name in ("orders", "reports")]
    (tmp_path / "report").write_text("#!/bin/sh\nexec cat > ~/seen\n")
    (tmp_path / "report").chmod(0o755)
    unfit = any(finding.open for finding in root.doctor())  # of the machine that tests
    for line in commands:
        printed = run_as_cron(line, variables, tmp_path)
        assert printed == "" or (unfit and " doctor " in line), f"{line}\n{printed}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d\n", (tmp_path / "seen").read_text())
    assert queues[1].counts()["processed"] == 1


def test_the_crontab_reports_a_lost_queue_and_a_failed_message(tmp_path: Path) -> None:
    variables, commands = cron_lines()
    looks, works = (next(line for line in commands if word in line) for word in (" ls ", " work "))
    root = dropq.Root.create(tmp_path / "root")
    assert "no queue 'orders'" in run_as_cron(looks, variables, tmp_path)
    root.create_queue("reports", durability="none").send("2024-11-05")
    (tmp_path / "report").write_text("#!/bin/sh\necho no paper >&2\nexit 65\n")
    (tmp_path / "report").chmod(0o755)
    assert "no paper" in run_as_cron(works, variables, tmp_path)


def test_the_operations_paper_finds_the_reason_of_a_failed_file_without_dropq(tmp_path: Path) -> None:
    queue = dropq.Root.create(tmp_path).create_queue("orders", durability="none")
    for name in ("report.csv", "report.csv.gz", "the report.csv"):
        (tmp_path / "orders/target" / name).write_text("bad")
    dropq.work(queue, lambda message: 1 // 0, until_empty=True)
    (lines,) = (text for _, text in blocks(OPERATIONS, "sh") if "sha256sum" in text)
    done = subprocess.run(["sh", "-eu", "-c", lines], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, _, content = done.stdout.partition("\n")
    assert (tmp_path / found).read_text() == content
    reason = json.loads(content)
    assert (reason["name"], reason["delivery"]) == ("report.csv", 1)
    assert "ZeroDivisionError" in reason["traceback"] and reason["arrived"] <= reason["time"]


def units() -> dict[str, configparser.ConfigParser]:
    """Return the units of the operations paper, by their file names."""
    found = {}
    for _, text in blocks(OPERATIONS, "ini"):
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(text)
        found[text.splitlines()[0].removeprefix("# /etc/systemd/system/")] = unit
    return found


def test_the_worker_unit_of_the_operations_paper_works_and_stops(tmp_path: Path) -> None:
    service = units()["dropq-orders.service"]["Service"]
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
        assert worker.stderr is not None
        # Where the signal comes between the last rename and what follows it, a line says first what is finished.
        assert worker.stderr.read().splitlines()[-1].startswith("5 acknowledged in ")
        assert worker.wait(20) == 0


def test_the_timer_unit_runs_what_the_crontab_runs() -> None:
    (text,) = (text for _, text in blocks(OPERATIONS, "ini") if "oneshot" in text)
    _, commands = cron_lines()
    started = re.findall(r"^ExecStart=/opt/dropq/bin/(.+)$", text.replace("/srv/queues", '"$ROOT"'), re.MULTILINE)
    assert [f'out=$({command} 2>&1) || echo "$out"' for command in started] == commands[:2]
    assert units()["dropq-upkeep.timer"]["Timer"]["OnCalendar"] == "*:0/5"


@pytest.mark.host
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze: apt-get install systemd")
def test_systemd_finds_nothing_wrong_in_the_units(tmp_path: Path) -> None:
    for text in (text for _, text in blocks(OPERATIONS, "ini")):
        file = tmp_path / text.splitlines()[0].rpartition("/")[2]
        file.write_text(re.sub(r"/opt/dropq/bin/dropq|/usr/local/bin/handle-order", "/bin/sh", text))
    files = sorted(map(str, tmp_path.iterdir()))
    assert len(files) == 5
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def is_tests(text: str) -> bool:
    """Whether an example is a module of tests."""
    return "\ndef test_" in text


def test_the_tests_of_a_handler_in_the_python_paper_pass(tmp_path: Path) -> None:
    (example,) = (text for _, text in blocks(TOP / "docs/python.md", "python") if is_tests(text))
    (tmp_path / "test_orders.py").write_text(example)
    own = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'base'}"]  # else it clears what others left
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, "test_orders.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_reference_of_the_python_paper_says_what_the_code_says() -> None:
    paper = (TOP / "docs/python.md").read_text()
    written = runpy.run_path(str(TOP / "docs/python_reference.py"))["with_reference"](paper)
    assert written == paper, "run docs/python_reference.py again"


def reference_parts() -> dict[str, str]:
    """Return the parts of the reference of the python paper, by their headings."""
    reference = (TOP / "docs/python.md").read_text().partition("\n## Reference\n")[2]
    return {part.partition("\n")[0]: part for part in reference.split("\n### ")[1:]}


def test_the_reference_has_every_public_attribute() -> None:
    kinds = {f"dropq.{name}": getattr(dropq, name) for name in ("Root", "Queue", "Topic", "Subscription", "Message")}
    kinds |= {f"dropq.{name}": getattr(dropq, name) for name in ("Record", "RecordWriter")}
    kinds |= {f"dropq.aio.{name}": getattr(aio, name) for name in aio.__all__}
    parts = reference_parts()
    for heading, kind in kinds.items():
        public = {name for name in dir(kind) if not name.startswith("_")} - {"context", "layout", "config"}
        missing = [name for name in sorted(public) if not re.search(rf"[`\s]{name}\b", parts[heading])]
        assert missing == [], heading


def test_the_reference_has_every_public_name() -> None:
    parts = reference_parts()
    names = {f"dropq.{name}" for name in dropq.__all__} - set(parts)
    others = {re.split(r"\W", line)[0] for line in parts["Other names"].splitlines()}
    assert sorted(name for name in names if name.removeprefix("dropq.") not in others) == []
    assert [name for name in aio.__all__ if f"dropq.aio.{name}" not in parts] == []


def test_the_examples_of_the_python_paper_print_what_it_says(tmp_path: Path) -> None:
    program = "\n".join(text for _, text in blocks(TOP / "docs/python.md", "python") if not is_tests(text))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed_comments(program)


@pytest.mark.timeout(400)
def test_the_examples_of_the_records_paper_run_in_their_order(tmp_path: Path) -> None:
    paper = TOP / "docs/records.md"
    program = "\n".join(text for _, text in blocks(paper, "python"))
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == printed_comments(program)

    (loop,) = (text for _, text in blocks(paper, "sh") if "while IFS" in text)
    lines = "\n".join(text for _, text in blocks(paper, "sh") if text != loop)
    commands = {
        "tail": 'echo "a line of $2"',  # one that ends
        "insert": '[ "$1" != "line 2" ]',
        "editor": 'exec sed -i s/3/30/ "$1"',
        "insert-each": loop,
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    lines += """
        printf 'line 1\nline 2\nline 3\n' | dropq send readings --records --format text
        dropq work readings --until-empty --records -- insert-each || dropq browse readings --state error
    """
    folders = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": ":".join(folders), "EDITOR": "editor"}
    environment.pop("DROPQ_ROOT", None)
    done = subprocess.run(["sh", "-eux", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "error:" not in done.stderr, done.stderr
    for shown in ("1: a line of /var/log/app.log", "2: x2,12", '{"n":30}', "as one message of 3 parts", "the database"):
        assert shown in done.stdout, done.stdout + done.stderr
    root = dropq.Root(tmp_path / "work")
    assert [message.record_number for message in root.queue("readings").browse("error")] == [2]


@pytest.mark.parametrize(
    ("body", "inserted"),
    [
        (b"1\n2\n3", ["1", "2", "3"]),
        (b"1\n2\n3\n", ["1", "2", "3"]),
        (b"1\r\n2\r\n3", ["1\r", "2\r", "3"]),
        (b"\xef\xbb\xbf1\n2", ["1", "2"]),
        (b"1\0\n\0\n2", ["1", "", "2"]),
        (b"1\n" + b"x" * (20 << 20) + b"\n2\n", ["1"]),
        (b" 1 \\t\n\n\n*", [" 1 \\t", "*"]),
        (b"", []),
    ],
)
def test_the_loop_of_the_records_paper_inserts_every_record_however_its_file_ends(
    tmp_path: Path, body: bytes, inserted: list[str]
) -> None:
    """It reads its standard input as the command gives it, and as a file is that another program gives it."""
    (loop,) = (text for _, text in blocks(TOP / "docs/records.md", "sh") if "while IFS" in text)
    insert = tmp_path / "insert"
    insert.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$1\" >>{quote(str(tmp_path / 'stored'))}\n")
    insert.chmod(0o755)
    queue = dropq.Root.create(tmp_path / "root").create_queue("q", durability="none")
    queue.send(body, type="text")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True)
    work = ["-m", "dropq", "--root", str(queue.root.path), "work", "q", "--until-empty", "--records", "--"]
    done = run([sys.executable, *work, "sh", "-c", loop])
    stored = tmp_path / "stored"
    assert (stored.read_bytes().decode().split("\n")[:-1] if stored.exists() else []) == inserted, done.stderr
    if len(body) < 1000:
        assert [message.body for message in queue.browse("processed")] == [body]
    stored.unlink(missing_ok=True)
    run(["sh", "-c", loop], input="1\n2")
    assert stored.read_text() == "1\n2\n"


def test_the_loop_of_the_records_paper_reports_the_row_of_a_csv_that_was_refused(tmp_path: Path) -> None:
    (loop,) = (text for _, text in blocks(TOP / "docs/records.md", "sh") if "while IFS" in text)
    queue = dropq.Root.create(tmp_path / "root").create_queue("q", durability="none")
    queue.send("id,price\na,1\nb,none\nc,3", type="csv")
    insert = f"insert() {{ [ $1 != b,none ] && echo $1 >>{quote(str(tmp_path / 'stored'))}; }}\n"
    work = ["-m", "dropq", "--root", str(queue.root.path), "work", "q", "--until-empty", "--records", "--"]
    subprocess.run([sys.executable, *work, "sh", "-c", insert + loop])
    assert (tmp_path / "stored").read_text() == "a,1\nc,3\n"
    assert [message.text for message in queue.browse("error")] == ["id,price\nb,none\n"]


def test_the_python_paper_names_everything_that_is_public() -> None:
    paper, _, _ = (TOP / "docs/python.md").read_text().partition("\n## Reference\n")
    assert [name for name in dropq.__all__ if not re.search(rf"\b{name}\b", paper)] == []


@pytest.mark.spark
def test_the_spark_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = (text for _, text in blocks(TOP / "README.md", "python") if "needs the extra" in text)
    queue = dropq.Root.create(tmp_path / "work").create_queue("orders")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(message.text for message in queue.browse()) == [str(number) for number in range(10)]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_no_example_puts_a_path_into_the_text_of_a_program(paper: Path) -> None:
    for text in re.findall(r"\bsh -\w*c ('[^']*'|\"[^\"]*\")", paper.read_text()):
        assert "{}" not in text, f"{paper.name}: a name can hold a command, which {text} would run"


@pytest.mark.parametrize("picture", ["lifecycle", "house", "topics", "pipeline", "graph", "roots"])
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
