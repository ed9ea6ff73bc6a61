"""Commands whose output is sent: `dropq work IN --to OUT -- CMD` sends all of it with the ack, or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers import Run, base, files, make_queue, other_file_system, reopened, until, where
from workers import Working, counted, reason_in

import dropq
from dropq import Out, Queue, StorageError
from dropq.queue.outputs import Destinations, OutputWriter
from dropq.worker.command import SendingCommand
from dropq.worker.loop import Stop
from dropq.worker.run import run as run_worker
from dropq.worker.sources import Sources

#: The worker as a process of its own; its arguments are those of the command line.
DROPQ = [sys.executable, "-m", "dropq"]


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path)


@pytest.fixture
def root(queue: Queue) -> dropq.Root:
    return queue.root


@pytest.fixture
def out(queue: Queue) -> Queue:
    return queue.root.create_queue("out", durability="none")


def sh(script: str, **options: Any) -> SendingCommand:
    return SendingCommand(["sh", "-c", script], [Out("out", b"")], **options)


def worked(queue: Queue, command: SendingCommand) -> dict[str, int]:
    """Work until the queue is empty; return what the report counts."""
    with command, reopened(queue).subscribe(max_backlog=1) as subscription:
        return counted(run_worker(Sources([subscription]), command, Stop(), until_empty=True))


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    return [message.body for message in queue.browse(state)]


def nothing_is_left(queue: Queue, out: Queue) -> bool:
    staged = base(queue) / ".dropq/staged"
    return not (staged.exists() and list(staged.iterdir())) and files(base(out) / "working") == {}


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_what_a_command_writes_is_sent_with_the_ack(queue: Queue, out: Queue) -> None:
    sent = queue.send(b"page", properties={"n": 1})
    assert worked(queue, sh("tr a-z A-Z")) == {"acked": 1}
    (made,) = out.browse("target")
    assert (made.body, made.correlation_id, made.properties) == (b"PAGE", sent.id, {"n": 1})
    assert where(queue) == {"processed": [b"page"]} and nothing_is_left(queue, out)


@pytest.mark.parametrize(
    ("script", "counts", "state"),
    [
        ("echo half; exit 3", "failed", "error"),
        ("echo half; exit 65", "rejected", "error"),
        ("echo half; exit 75", "retried", "target"),
        ("echo half; kill -9 $$", "failed", "error"),
    ],
)
def test_what_a_command_wrote_that_did_not_succeed_is_not_sent(
    queue: Queue, out: Queue, script: str, counts: str, state: str
) -> None:
    queue.send(b"a")
    assert worked(queue, sh(script)) == {counts: 1}
    assert bodies(out) == [] and nothing_is_left(queue, out) and where(queue) == {state: [b"a"]}


def test_a_body_is_sent_once_the_whole_process_group_has_ended(queue: Queue, out: Queue, tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    queue.send(b"a")
    command = sh(f"(read go < {fifo}; echo late) & echo early")
    with command, Working(queue, command) as working:
        until(lambda: list((base(queue) / ".dropq/staged").rglob("0.draft")), "the draft")
        fifo.write_text("go\n")
        until(lambda: bodies(out) == [b"early\nlate\n"], "the whole body")
    assert counted(working.report) == {"acked": 1}


def test_a_child_that_closed_stdout_is_waited_for(queue: Queue, out: Queue, tmp_path: Path) -> None:
    queue.send(b"a")
    done = tmp_path / "done"
    script = f"echo body; (exec >&-; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo > {done}) &"
    assert worked(queue, sh(script)) == {"acked": 1}
    assert done.exists() and bodies(out) == [b"body\n"]


def test_a_daemon_that_left_the_group_keeps_nothing_back(queue: Queue, out: Queue, tmp_path: Path) -> None:
    queue.send(b"a")
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' & while ! [ -s {pid} ]; do :; done; echo body"
    try:
        assert worked(queue, sh(script)) == {"acked": 1}
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert bodies(out) == [b"body\n"]


#: The command line in a process that has to reap what its commands leave, as the first process of a container has.
REAPING = (
    "import ctypes, sys; from dropq.cli.main import main; "
    "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    "script",
    ["sleep 0.1 & cat", "(sh -c 'true & echo $$ > {}; exec setsid sleep 600' > /dev/null 2>&1 &); cat"],
    ids=["a child", "a daemon's child"],
)
def test_the_dead_of_a_group_keep_nothing_back(queue: Queue, out: Queue, script: str, tmp_path: Path) -> None:
    queue.send(b"a")
    daemon, script = tmp_path / "pid", script.replace("{}", str(tmp_path / "pid"))
    arguments = ["--root", str(queue.root.path), "work", "q", "--to", "out", "--until-empty", "--", "sh", "-c", script]
    try:
        assert subprocess.run([sys.executable, "-c", REAPING, *arguments], timeout=60, check=False).returncode == 0
    finally:
        if daemon.exists():
            os.kill(int(daemon.read_text()), signal.SIGKILL)
    assert bodies(out) == [b"a"]


def test_a_timeout_counts_until_the_group_has_ended(queue: Queue, out: Queue) -> None:
    queue.send(b"a")
    assert worked(queue, sh("echo body; sleep 600 &", timeout=0.5)) == {"failed": 1}
    assert "timeout" in reason_in(queue, "error")["detail"] and bodies(out) == []


def test_an_empty_output_is_no_message(queue: Queue, out: Queue) -> None:
    queue.send(b"a")
    assert worked(queue, sh("true")) == {"acked": 1}
    assert bodies(out) == [] and nothing_is_left(queue, out) and where(queue) == {"processed": [b"a"]}
    queue.send(b"b")
    assert worked(queue, sh("true", sends_empty=True)) == {"acked": 1}
    assert bodies(out) == [b""]


def test_each_line_is_a_message(queue: Queue, out: Queue) -> None:
    queue.send(b"a")
    assert worked(queue, sh("printf '1\\n\\n22\\n333'", lines=True)) == {"acked": 1}
    assert bodies(out) == [b"1", b"22", b"333"] and nothing_is_left(queue, out)
    queue.send(b"b")
    assert worked(queue, sh("printf '\\n4\\n'", lines=True, sends_empty=True)) == {"acked": 1}
    assert bodies(out)[3:] == [b"", b"4"]


def test_a_line_is_whole_however_it_was_written(queue: Queue, out: Queue) -> None:
    queue.send(b"a")
    script = "i=0; while [ $i -lt 300 ]; do printf %s 1234567890; i=$((i+1)); done; echo; echo end"
    assert worked(queue, sh(script, lines=True)) == {"acked": 1}
    assert bodies(out) == [b"1234567890" * 300, b"end"]


def test_more_lines_than_may_be_sent_fail_the_message(
    queue: Queue, out: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.queue.outputs.MOST", 3)
    queue.send(b"3")
    queue.send(b"4")
    assert worked(queue, sh("seq $(cat)", lines=True)) == {"acked": 1, "failed": 1}
    assert bodies(out) == [b"1", b"2", b"3"] and nothing_is_left(queue, out)
    assert reason_in(queue, "error")["reason"] == "too_many_outputs"


def test_an_empty_line_that_is_not_sent_does_not_count(
    queue: Queue, out: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropq.queue.outputs.MOST", 3)
    queue.send(b"a")
    assert worked(queue, sh("echo; seq 3", lines=True)) == {"acked": 1}
    assert bodies(out) == [b"1", b"2", b"3"]


def test_a_large_body_takes_no_memory(queue: Queue, out: Queue) -> None:
    queue.send(b"a")
    script = (
        "import re, sys; from dropq.cli.main import main; code = main(sys.argv[1:]); "
        "peak = int(re.search(r'VmHWM:\\s*([0-9]+)', open('/proc/self/status').read())[1]); "
        "sys.exit(code or (peak > 150_000 and f'{peak} KiB of memory'))"
    )
    command = ["head", "-c", str(300 << 20), "/dev/zero"]
    arguments = ["--root", str(queue.root.path), "work", "q", "--to", "out", "--until-empty", "--", *command]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = out.browse("target")
    assert made.size() == 300 << 20


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_command_and_gives_the_message_back(
    queue: Queue, out: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OutputWriter.write

    def full(self: OutputWriter, data: bytes) -> None:
        if self.size > 100_000:
            raise StorageError("no space left", errno=errno.ENOSPC)
        write(self, data)

    monkeypatch.setattr(OutputWriter, "write", full)
    queue.send(b"a")
    assert worked(queue, sh("yes")) == {"returned": 1}
    (waiting,) = queue.browse("target")
    assert waiting.delivery_count == 0 and bodies(out) == [] and nothing_is_left(queue, out)


def test_a_full_disk_is_named_and_a_worker_that_could_write_nothing_exits_with_75(
    run: Run, queue: Queue, out: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".draft"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    queue.send(b"a")
    monkeypatch.setattr(os, "write", full)
    ran = run(*["work", "q", "--to", "out", "--until-empty", "--", "cat"])
    assert ran.code == 75 and bodies(queue) == [b"a"] and bodies(out) == []
    (warning,) = (line for line in ran.err.splitlines() if "goes back" in line)
    assert warning.endswith(f"No space left on device at {base(out)}")


def test_a_worker_that_is_killed_leaves_what_a_sweep_removes(queue: Queue, out: Queue, tmp_path: Path) -> None:
    queue.send(b"a")
    script = "head -c 50000000 /dev/zero; exec sleep 600"
    arguments = [*DROPQ, "--root", str(queue.root.path), "work", "q", "--to", "out", "--", "sh", "-c", script]
    with subprocess.Popen(arguments) as worker:
        until(lambda: any(size > 49_000_000 for size in _drafts(queue)), "the draft")
        worker.kill()
    queue = reopened(queue)
    until(lambda: queue.sweep() and bodies(queue) == [b"a"], "the message")
    queue.sweep()
    assert _drafts(queue) == [] and bodies(out) == [] and files(base(out) / "working") == {}
    assert worked(queue, sh("cat")) == {"acked": 1} and bodies(out) == [b"a"]


def _drafts(queue: Queue) -> list[int]:
    return [path.stat().st_size for path in (base(queue) / ".dropq/staged").rglob("*.draft")]


def test_a_destination_that_goes_while_a_worker_runs_stops_it(queue: Queue, out: Queue) -> None:
    queue.send(b"a")
    command = sh("true")
    with command, reopened(queue).subscribe() as subscription:
        destinations = {"q": Destinations(queue.context, queue.root.queue)}
        destinations["q"].sender("out")
        queue.root.delete_queue("out")
        report = run_worker(
            Sources([subscription]),
            command,
            Stop(),
            destinations=destinations,
        )
    assert report.halted is not None and "out" in report.halted
    assert bodies(queue) == [b"a"]


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_sends_to_each_destination(run: Run, queue: Queue, out: Queue) -> None:
    more = queue.root.create_queue("more")
    queue.send(b"a", properties={"k": 1, "l": 2})
    options = "--to out --to more -p k=x -p m:I=3 --type t --until-empty"
    assert run("work", "q", *options.split(), "--", "tr", "a", "A").code == 0
    for queue in (out, more):
        (made,) = queue.browse("target")
        assert (made.body, made.type, made.properties) == (b"A", "t", {"k": "x", "l": 2, "m": 3})


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("--to nope", 66, "no queue 'nope'"),
        ("--to out --each", 2, "--to sends with the ack of a message"),
        ("--to out --records", 2, "--to sends with the ack of a message"),
        ("--to out --to out", 2, "--to out is given twice"),
        ("--to --json", 2, "'--json' is none"),
        ("--lines", 2, "--lines needs --to"),
        ("--send-empty", 2, "--send-empty needs --to"),
        ("--type t", 2, "give --to QUEUE"),
        ("-p a=b", 2, "give --to QUEUE"),
        ("--to out -p NOT=b", 2, "NOT"),
        ("--to a//b", 2, "a//b"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_the_work(
    run: Run, queue: Queue, out: Queue, options: str, code: int, says: str
) -> None:
    queue.send(b"a")
    ran = run("work", "q", *options.split(), "--until-empty", "--", "cat")
    assert (ran.code, says in ran.err) == (code, True), ran
    assert bodies(queue) == [b"a"]


def test_a_missing_destination_s_dead_letter_queue_takes_it(tmp_path: Path) -> None:
    (tmp_path / "dropq.toml").write_text('dead_letter_queue = "dlq"\n')
    queue = make_queue(tmp_path)
    letters = queue.root.create_queue("dlq")
    queue.send(b"a")
    options = ["--root", str(tmp_path), "work", "q", "--to", "nope", "--until-empty", "--", "cat"]
    assert subprocess.run([*DROPQ, *options], check=False).returncode == 0
    (letter,) = letters.browse("target")
    assert (letter.body, letter.origin) == (b"a", "nope")


def test_a_dead_letter_queue_s_own_filter_is_refused_where_its_destination_is_missing(run: Run, queue: Queue) -> None:
    (Path(queue.root.path) / "dropq.toml").write_text('dead_letter_queue = "q"\n')
    queue.send(b"a")
    ran = run(*["work", "q", "--to", "nope", "--until-empty", "--", "cat"])
    assert ran.code == 66 and "would come back to q" in ran.err and bodies(queue) == [b"a"]


@pytest.mark.parametrize(
    "options", [{"semantics": "at-most-once"}, {"barrier_expression": "JMSType = 'b'"}], ids=["once", "barrier"]
)
def test_queues_whose_acks_can_send_nothing_are_refused(
    run: Run, root: dropq.Root, out: Queue, options: dict[str, Any]
) -> None:
    root.create_queue("in", **options).send(b"a")
    ran = run(*["work", "in", "--to", "out", "--until-empty", "--", "cat"])
    assert ran.code == 78 and "nothing can go out with an ack" in ran.err
    assert bodies(root.queue("in")) == [b"a"]


def test_a_circle_through_a_topic_is_refused_at_the_start(run: Run, root: dropq.Root) -> None:
    root.create_topic("t")
    root.create_queue("v", underlying_topic="t").add_selector("back", to="q")
    ran = run(*["work", "q", "--to", "t", "--until-empty", "--", "cat"])
    assert ran.code == 78 and "q -> t -> v -> q" in ran.err


def test_another_file_system_is_refused_at_the_start(run: Run, root: dropq.Root) -> None:
    there = other_file_system(root.path)
    if there is None:
        pytest.skip("there is no other file system")
    folder = Path(tempfile.mkdtemp(dir=there))
    try:
        far = dropq.Root.create(folder).create_queue("far")
        os.symlink(base(far), root.path / "far")
        ran = run(*["work", "q", "--to", "far", "--until-empty", "--", "cat"])
        assert ran.code == 78 and "no rename from queue q leads to" in ran.err
        assert files(base(far) / "working") == {}
    finally:
        shutil.rmtree(folder)


def test_a_write_lock_keeps_workers_back_and_explain_says_so(
    run: Run, queue: Queue, out: Queue, tmp_path: Path
) -> None:
    queue.send(b"a")
    lock = Path(out.layout.write_lock)
    lock.touch()
    arguments = [*DROPQ, "--root", str(queue.root.path), "work", "q", "--to", "out", "--until-empty", "--", "cat"]
    said = tmp_path / "said"
    with open(said, "w") as stderr, subprocess.Popen(arguments, stderr=stderr) as worker:
        until(lambda: "nothing is taken from queue q" in said.read_text(), "a word in the log")
        assert [found.why for found in queue.explain("target")] == ["destination"]
        ran = run(*["browse", "q", "--explain", "--json"])
        assert json.loads(ran.out)["why"] == "destination"
        assert str(lock) in json.loads(ran.out)["detail"]
        lock.unlink()
        assert worker.wait(60) == 0
    assert bodies(out) == [b"a"]


def test_a_chain_of_workers_does_each_step_once(run: Run, queue: Queue, out: Queue) -> None:
    last = queue.root.create_queue("last")
    for number in range(20):
        queue.send(str(number))
    assert run(*["work", "q", "--to", "out", "--until-empty", "-j", "2", "--", "sed", "s/^/a/"]).code == 0
    assert run(*["work", "out", "--to", "last", "--until-empty", "-j", "2", "--", "sed", "s/^/b/"]).code == 0
    assert sorted(bodies(last)) == sorted(b"ba%d" % number for number in range(20))
    assert {message.correlation_id for message in last.browse("target")} == {
        message.id for message in queue.browse("processed")
    }
