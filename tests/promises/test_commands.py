"""Commands: each is run for one message, and ends with its claim, its lease or its worker."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
from helpers import drop, first_and_long, make_queue, names_in, until, where
from workers import Working, counted, reason_in

from dropq import Message, Queue, Unavailable, work
from dropq.worker import command, guard
from dropq.worker.command import Command
from dropq.worker.loop import Stop, stop_on_signals

#: A worker in a process of its own: root, lease ("" for none), command. It tells what it hears, and what it did.
WORKER = """
import os, sys
import dropq
from dropq.worker.command import Command
from dropq.worker.loop import Stop, stop_on_signals
from dropq.worker.run import work

root, lease, *argv = sys.argv[1:]
def tell():
    os.write(1, b"asked\\n")  # a signal handler may interrupt its own print, which refuses that

with Command(argv) as command, stop_on_signals(Stop()) as stop, stop.waking(tell):
    print("ready", flush=True)
    print(work(dropq.Root(root).queue("q"), command, lease=lease or None, stop=stop), flush=True)
"""


@contextmanager
def worker_process(queue: Queue, *argv: str, lease: str = "") -> Iterator[subprocess.Popen[str]]:
    """A worker in a process of its own, ready."""
    arguments = [sys.executable, "-c", WORKER, str(queue.root.path), lease, *argv]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert heard(process) == "ready"
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that a worker tells; it blocks, and pytest's timeout bounds it."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def number_in(path: Path) -> int:
    """The number that a command writes into a file, once it is there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"a number in {path.name}")
    return int(path.read_text())


def alive(group: int) -> list[int]:
    """The processes of a group that still run; one that is dead and not yet reaped does not."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            state, _, process_group = Path(f"/proc/{int(entry)}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                found.append(int(entry))
    return found


# -- commands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "state", "counts", "reason"),
    [
        ("exit 0", "processed", "acked", None),
        ("exit 75", "delayed", "retried", None),
        ("exit 65", "error", "rejected", {"reason": "rejected", "detail": "exit status 65", "exit_status": 65}),
        ("exit 1", "error", "failed", {"reason": "failed", "detail": "exit status 1", "exit_status": 1}),
        ("exit 255", "error", "failed", {"reason": "failed", "detail": "exit status 255", "exit_status": 255}),
        ("kill -9 $$", "error", "failed", {"reason": "failed", "detail": "killed by SIGKILL", "exit_status": 137}),
    ],
)
def test_the_exit_status_of_a_command_says_what_becomes_of_the_message(
    tmp_path: Path, script: str, state: str, counts: str, reason: dict[str, object] | None
) -> None:
    queue = make_queue(tmp_path, redelivery_delay="1h")
    queue.send(b"a")
    with Command(["sh", "-c", f"echo why >&2; {script}"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {counts: 1}
    assert where(queue) == {state: [b"a"]}
    if reason is not None:
        known = reason_in(queue, state)
        assert known == known | reason | {"stderr": "why\n"}


@pytest.mark.parametrize("status", [126, 127])
def test_a_command_that_says_it_cannot_be_run_stops_the_worker_and_gives_the_message_back(
    tmp_path: Path, status: int
) -> None:
    queue = make_queue(tmp_path, max_deliveries=1)
    queue.send_many([b"a", b"b"])
    with Command(["sh", "-c", f"exit {status}"]) as handler:
        report = work(queue, handler)
    assert counted(report) == {"returned": 1}
    assert report.halted and str(status) in report.halted
    assert where(queue) == {"target": [b"a", b"b"]}
    assert [message.delivery_count for message in queue.browse()] == [0, 0]


def test_a_command_that_is_not_there_moves_no_message(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with pytest.raises(Unavailable, match="no-such-command"):
        Command(["no-such-command"])
    (tmp_path / "plain").write_text("not executable")
    with pytest.raises(Unavailable):
        Command([str(tmp_path / "plain")])
    with pytest.raises(ValueError, match="no command"):
        Command([])
    assert where(queue) == {"target": [b"a"]}


def test_where_exit_statuses_cannot_be_had_no_command_is_run() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(Unavailable, match="SIGCHLD"):
            Command(["true"])
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("content", [None, "no format that can be executed", "#!/no/such/interpreter\n"])
def test_a_command_that_went_or_cannot_be_executed_stops_the_worker(tmp_path: Path, content: str | None) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with Command([str(program)]) as handler:
        program.unlink() if content is None else program.write_text(content)
        report = work(queue, handler)
    assert report.halted and "cannot be run" in report.halted
    assert where(queue) == {"target": [b"a"]}


def test_a_command_gets_the_body_the_path_and_what_the_message_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPQ_PROP_outer", "another message's")
    monkeypatch.setenv("DROPQ_CORRELATION_ID", "another message's")
    queue = make_queue(tmp_path / "root")
    sent = queue.send(
        b"body\n", priority=7, type="order", reply_to="answers", properties={"n": 3, "ok": True, "t": "a b=c.~"}
    )
    out = tmp_path / "out"
    out.mkdir()
    script = (
        'cat >"$0/stdin"; cat "$1" >"$0/file"; cat "$DROPQ_FILE" >"$0/env-file"; env -0 >"$0/env"; echo "$2" >"$0/2"'
    )
    with Command(["sh", "-c", script, str(out), "{}", "<{}>"]) as handler:
        assert counted(work(queue, handler, until_empty=True, lease="1m")) == {"acked": 1}
    assert [(out / name).read_bytes() for name in ("stdin", "file", "env-file")] == [b"body\n"] * 3
    pairs = dict(entry.split("=", 1) for entry in (out / "env").read_text().split("\0") if "=" in entry)
    said = {name: value for name, value in pairs.items() if name.startswith("DROPQ_")}
    path, receipt = said.pop("DROPQ_FILE"), said.pop("DROPQ_RECEIPT")
    assert (out / "2").read_text() == f"<{path}>\n"
    assert receipt.endswith(os.path.basename(path)) and not os.path.exists(path)
    assert said.pop("DROPQ_RUN")
    assert said == {
        "DROPQ_ID": sent.id,
        "DROPQ_QUEUE": "q",
        "DROPQ_ROOT": str(tmp_path / "root"),
        "DROPQ_PRIORITY": "7",
        "DROPQ_TYPE": "order",
        "DROPQ_REPLY_TO": "answers",
        "DROPQ_DELIVERY_COUNT": "1",
        "DROPQ_PROP_n": "3",
        "DROPQ_PROP_ok": "true",
        "DROPQ_PROP_t": "a b=c.~",
    }
    assert not list(Path(queue.layout.held).iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "with space.csv",
        'quote\'s "both"',
        "new\nline",
        "$(touch pwned) `touch pwned`; touch pwned",
        "-rf",
        "{}",
        "~%41.",
        "ünïcödé",
        os.fsdecode(b"caf\xe9.txt"),
        "x" * 250,
    ],
)
def test_no_name_is_taken_for_code_and_the_path_ends_in_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = make_queue(tmp_path / "root", redelivery_attempts=1)
    drop(queue, name, b"body")
    program = (
        "import os, sys; open('out', 'ab').write(os.fsencode(sys.argv[1]) + b'\\0' + open(sys.argv[1], 'rb').read())"
    )
    failing = "; sys.exit('DROPQ_ID' not in os.environ or os.environ['DROPQ_DELIVERY_COUNT'] == '1')"
    with Command([sys.executable, "-S", "-c", program + failing, "{}"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
        assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
    first, _, rest = (tmp_path / "out").read_bytes().partition(b"\0body")
    second, _, _ = rest.partition(b"\0body")
    assert [os.path.basename(path) for path in (first, second)] == [os.fsencode(name)] * 2
    assert where(queue) == {"processed": [b"body"]}
    assert names_in(queue, "processed") == [name]
    assert not (tmp_path / "pwned").exists()


def test_what_a_name_says_that_no_environment_can_hold_is_made_safe(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    drop(queue, "4.id.B...a%00b%E9.ty%00pe.a%3DbS=x&n%00aS=y%00z&goodS=yes", b"body")
    with Command(["sh", "-c", f"env -0 >'{tmp_path}/env'"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
    entries = (tmp_path / "env").read_bytes().split(b"\0")
    assert b"DROPQ_TYPE=ty?pe" in entries and b"DROPQ_PROP_good=yes" in entries


@pytest.mark.parametrize("history", [True, False])
def test_at_most_once_a_command_gets_body_and_path_too(tmp_path: Path, history: bool) -> None:
    queue = make_queue(tmp_path / "root", semantics="at-most-once", history=history)
    queue.send(b"body")
    with Command(["sh", "-c", f'cat - "$0" >"{tmp_path}/out"; exit 3', "{}"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    assert (tmp_path / "out").read_bytes() == b"bodybody"
    assert where(queue) == ({"processed": [b"body"]} if history else {})


def test_what_a_command_prints_is_passed_on_and_the_end_of_its_stderr_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    script = "echo out; i=0; while [ $i -lt 2000 ]; do echo line $i >&2; i=$((i+1)); done; exit 3"
    with Command(["sh", "-c", script]) as handler:
        work(queue, handler, until_empty=True)
    printed = capfd.readouterr()
    assert printed.out == "out\n"
    assert "line 0\n" in printed.err and "line 1999\n" in printed.err
    kept = reason_in(queue, "error")["stderr"]
    assert kept.endswith("line 1999\n") and len(kept) == 8192


def test_what_a_command_leaves_beside_a_body_is_gone_before_the_next_one(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    names = list[str]()
    note = f'test ! -e "$1.bak" && dirname "$1" >>{tmp_path}/in'
    with (
        Command(["sh", "-c", f'{note} && cp "$1" "$1.bak"', "x", "{}"]) as copies,
        Command(["sh", "-c", note, "x", "{}"]) as notes,
    ):
        for handler in (copies, copies, notes, notes):
            drop(queue, "report.csv", b"a")
            assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
            names = (tmp_path / "in").read_text().split()
            assert not list(Path(queue.layout.held).glob("*/*"))
    assert len({*names}) == 3, "a folder is kept where nothing was left"
    assert not list(Path(queue.layout.held).iterdir())


def test_a_child_that_a_command_leaves_behind_does_not_hold_the_worker_up(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with Command(["sh", "-c", f"sleep 100 & echo $! >'{tmp_path}/child'"]) as handler:
        began = time.monotonic()
        assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
        assert time.monotonic() - began < 20
    os.kill(number_in(tmp_path / "child"), signal.SIGKILL)  # it was left alone


#: A worker whose commands each leave a child behind: it prints its threads and its open files after each of them.
LEFT_BEHIND = """
import os, sys, threading
import dropq
from dropq.worker.command import Command
from dropq.worker.run import work

queue = dropq.Root(sys.argv[1]).queue("q")
with Command(["sh", "-c", f"sleep 100 & echo $! >>'{sys.argv[2]}'"]) as command:
    def counting(message):
        command(message)
        for thread in threading.enumerate():
            if thread.name == "dropq-stderr":
                thread.join()
        print(threading.active_count(), len(os.listdir("/dev/fd")))
    work(queue, counting, until_empty=True)
"""


def test_children_that_commands_leave_behind_keep_no_thread_and_no_file_of_the_worker(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"x"] * 12)
    children = tmp_path / "children"
    command = [sys.executable, "-c", LEFT_BEHIND, str(queue.root.path), str(children)]
    try:
        with (tmp_path / "counts").open("w") as printed:  # no pipe: the children would keep it open
            subprocess.run(command, stdout=printed, check=True)
        counts = (tmp_path / "counts").read_text().splitlines()
        assert len(counts) == 12
        assert len(set(counts[1:])) == 1, counts
    finally:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)


def test_the_last_words_of_a_command_that_leaves_a_child_behind_are_kept(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    script = (
        f"(while sleep 0.05; do echo child; done) >&2 & echo $! >'{tmp_path}/child'; sleep 0.2; echo last >&2; exit 3"
    )
    with Command(["sh", "-c", script]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    assert "last\n" in reason_in(queue, "error")["stderr"]
    child = number_in(tmp_path / "child")
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(), "SIGPIPE")


def test_a_group_has_ended_once_another_process_has_its_number() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        try:
            assert not command._lives(other.pid)
        finally:
            other.kill()


#: A worker whose command writes to a stderr that nobody reads.
UNREAD = """
import os, sys
import dropq
from dropq.worker.command import Command

os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"-" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
with Command(["sh", "-c", "echo unread >&2"]) as command:
    report = dropq.work(dropq.Root(sys.argv[1]).queue("q"), command, until_empty=True)
os._exit(report.acked)
"""


def test_a_stderr_that_nobody_reads_keeps_no_worker_from_its_messages(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a"] * 3)
    command = [sys.executable, "-c", UNREAD, str(queue.root.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as worker:
        try:
            assert worker.wait(60) == 3
        finally:
            worker.kill()


def test_commands_run_side_by_side(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a", b"b", b"c"])
    meet = f'cd "{tmp_path}"; touch $$; while [ "$(ls | wc -l)" -lt 4 ]; do sleep 0.02; done'
    with Command(["sh", "-c", meet], timeout="60s") as handler:
        assert counted(work(queue, handler, concurrency=3, until_empty=True)) == {"acked": 3}


def test_a_command_that_takes_too_long_is_ended_and_its_message_fails(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")
    with Command(["sh", "-c", f"echo $$ >'{tmp_path}/pid'; sleep 100 & wait"], timeout="300ms") as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    assert reason_in(queue, "error")["detail"] == "timeout: ended after 300ms"
    until(lambda: not alive(number_in(tmp_path / "pid")), "the whole group ended")


def test_a_command_that_does_not_heed_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE", 0.3)
    queue = make_queue(tmp_path)
    queue.send(b"a")
    deaf = f"trap '' TERM; echo $$ >'{tmp_path}/pid'; while :; do sleep 0.1; done"
    with Command(["sh", "-c", deaf], timeout="300ms") as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    until(lambda: not alive(number_in(tmp_path / "pid")), "the command was killed")


def test_a_child_that_does_not_heed_sigterm_is_killed_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "GRACE", 0.3)
    queue = make_queue(tmp_path)
    queue.send(b"a")
    deaf = f"(trap '' TERM; while :; do sleep 0.1; done) & echo $$ >'{tmp_path}/pid'; wait"
    with Command(["sh", "-c", deaf], timeout="300ms") as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1}
    until(lambda: not alive(number_in(tmp_path / "pid")), "the whole group was killed")


# -- leases --------------------------------------------------------------------------------------------------


def test_a_command_that_outlasts_its_lease_runs_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    script = f"echo run >>'{tmp_path}/log'; sleep 9"
    swept = 0
    with worker_process(queue, "sh", "-c", script, lease="3s"), worker_process(queue, "sh", "-c", script, lease="3s"):
        deadline = time.monotonic() + 60
        while "processed" not in where(queue):
            assert time.monotonic() < deadline
            swept += queue.sweep().total
            time.sleep(0.02)
    assert (tmp_path / "log").read_text() == "run\n"
    assert where(queue) == {"processed": [b"a"]}
    assert swept == 0


def test_a_python_handler_that_outlasts_its_lease_keeps_it(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, lease_period="500ms")
    queue.send(b"a")
    deadlines: set[datetime | None] = set()

    def handler(message: Message) -> None:
        for _ in range(3):
            deadlines.add(message.deadline)
            until(lambda: message.deadline not in deadlines, "the lease is renewed")
            assert message.body == b"a"

    assert counted(work(queue, handler, until_empty=True)) == {"acked": 1}
    assert len(deadlines) == 3 and None not in deadlines


def test_a_command_whose_lease_is_lost_is_ended_and_nothing_is_acknowledged(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    script = f"sleep 100 & echo $$ >'{tmp_path}/pid'; wait"
    with Command(["sh", "-c", script]) as handler, Working(queue, handler, lease="1s") as working:
        group = number_in(tmp_path / "pid")
        assert len(alive(group)) == 2
        queue.pause()
        assert [outcome.ok for outcome in queue.requeue(state="processing")] == [True]
        until(lambda: not alive(group), "the command's group ended")
        until(lambda: not list(Path(queue.layout.held).glob("*/*")), "its path was cleared away")
    assert counted(working.report) == {"lost": 1}
    assert where(queue) == {"target": [b"a"]}


def test_a_lost_lease_does_not_wait_for_a_command_that_does_not_heed_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LOST_GRACE", 0.2)
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    deaf = f"trap '' TERM; echo $$ >'{tmp_path}/pid'; while :; do sleep 0.1; done"
    with Command(["sh", "-c", deaf]) as handler, Working(queue, handler, lease="1s") as working:
        group = number_in(tmp_path / "pid")
        queue.pause()
        queue.requeue(state="processing")
        until(lambda: not alive(group), "the command was killed")
    assert counted(working.report) == {"lost": 1}


def test_a_handler_sees_that_its_claim_was_lost(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send(b"a")

    def handler(message: Message) -> None:
        if message.delivery_count == 1 and not seen:
            queue.requeue(state="processing")
            until(lambda: not message.held, "the loss is seen")
            seen.append(message.id)

    seen: list[str] = []
    assert counted(work(queue, handler, lease="300ms", until_empty=True)) == {"lost": 1}
    assert seen
    assert where(queue) == {"target": [b"a"]}


# -- a worker that is ended, or killed -----------------------------------------------------------------------


def test_sigterm_finishes_what_runs(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a", b"b"])
    script = f"echo $$ >'{tmp_path}/pid'; while [ ! -e '{tmp_path}/go' ]; do sleep 0.02; done"
    with worker_process(queue, "sh", "-c", script) as process:
        number_in(tmp_path / "pid")
        process.terminate()
        assert heard(process) == "asked"
        (tmp_path / "go").touch()
        assert "acked=1," in heard(process)
        assert process.wait(20) == 0
    assert where(queue) == {"processed": [b"a"], "target": [b"b"]}


def test_a_second_sigterm_gives_back_what_runs(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    with worker_process(queue, "sh", "-c", f"echo $$ >'{tmp_path}/pid'; sleep 100 & wait") as process:
        group = number_in(tmp_path / "pid")
        for _ in range(2):
            process.terminate()
            assert heard(process) == "asked"
        assert "returned=1" in heard(process)
        assert process.wait(20) == 0
        until(lambda: not alive(group), "the command's group ended")
    assert where(queue) == {"target": [b"a"]}
    assert [message.delivery_count for message in queue.browse()] == [0]


STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize("number", STOPS)
def test_sigterm_sigint_and_sighup_finish_what_runs(tmp_path: Path, number: signal.Signals) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a", b"b"])
    script = f"echo $$ >'{tmp_path}/pid'; while [ ! -e '{tmp_path}/go' ]; do sleep 0.02; done"
    with worker_process(queue, "sh", "-c", script) as process:
        number_in(tmp_path / "pid")
        process.send_signal(number)
        assert heard(process) == "asked"
        (tmp_path / "go").touch()
        assert "acked=1," in heard(process)
        assert process.wait(20) == 0
    assert where(queue) == {"processed": [b"a"], "target": [b"b"]}


@pytest.mark.parametrize("number", first_and_long(STOPS))
@pytest.mark.parametrize("order", ["the worker first", "the command first", "the command first, by far"])
@pytest.mark.parametrize(
    "script", ["echo $$ >pid; exec sleep 100", "trap 'exit 143' 1 2 15; sleep 9 & echo $$ >pid; wait"]
)
def test_a_command_that_the_signal_of_a_stop_ends_is_given_back_uncounted(
    tmp_path: Path, number: signal.Signals, order: str, script: str
) -> None:
    queue = make_queue(tmp_path / "root", redelivery_delay="1h")
    sent = queue.send(b"a")
    with worker_process(queue, "sh", "-c", f"cd '{tmp_path}'; {script}") as process:
        group = number_in(tmp_path / "pid")
        if order == "the worker first":
            process.send_signal(number)
            assert heard(process) == "asked"
            os.killpg(group, number)
        else:
            os.killpg(group, number)
            if order.endswith("by far"):
                until(lambda: group not in alive(group), "the command ended")
            process.send_signal(number)
            assert heard(process) == "asked"
        assert "returned=1," in heard(process)
        assert process.wait(20) == 0
    assert where(queue) == {"target": [b"a"]}
    assert [(message.id, message.delivery_count, message.cancels) for message in queue.browse()] == [(sent.id, 0, 0)]


@pytest.mark.parametrize("number", STOPS)
def test_a_command_that_such_a_signal_ends_without_a_stop_failed(tmp_path: Path, number: signal.Signals) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    script = f'[ "$(cat)" = b ] || kill -{number} $$; exit 0'
    with Command(["sh", "-c", script]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"failed": 1, "acked": 1}
    assert reason_in(queue, "error")["detail"] == f"killed by {number.name}"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_parent_ignores_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_on_signals(Stop()) as stop:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: stop.times, "SIGTERM is heard")
            assert stop.times == 1
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", STOPS)
def test_a_program_that_only_calls_work_ends_by_a_signal_as_when_it_is_asked(
    tmp_path: Path, number: signal.Signals
) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send_many([b"a", b"b"])
    program = f"""
import dropq, subprocess, sys

def handler(message):
    subprocess.run(["sh", "-c", "echo $$ >'{tmp_path}/pid'; exec sleep 100"], check=True)

print(dropq.work(dropq.Root(sys.argv[1]).queue("q"), handler), flush=True)
"""
    argv = [sys.executable, "-c", program, str(queue.root.path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            number_in(tmp_path / "pid")
            os.killpg(process.pid, number)
            answer = heard(process)
            assert "returned=1," in answer and "stopped=True" in answer
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert where(queue) == {"target": [b"a", b"b"]}
    assert [message.delivery_count for message in queue.browse()] == [0, 0]


def test_the_commands_of_a_killed_worker_end_and_a_sweep_returns_its_message_counted(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"a")
    with worker_process(queue, "sh", "-c", f"sleep 100 & echo $$ >'{tmp_path}/pid'; wait") as process:
        group = number_in(tmp_path / "pid")
        assert where(queue) == {"processing": [b"a"]}
        process.kill()
        process.wait()
        until(lambda: not alive(group), "the command's group was killed")
    until(lambda: queue.sweep().dead == 1, "a sweep returns the message")
    assert where(queue) == {"target": [b"a"]}
    assert [message.delivery_count for message in queue.browse()] == [1]
    queue.sweep()
    assert not list(Path(queue.layout.held).iterdir())


def guarded(lines: str) -> subprocess.Popen[bytes]:
    """A guard that was told some lines, and whose worker still lives."""
    process = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    process.stdin.write(lines.encode())
    return process


def ignores(process: int, number: signal.Signals) -> bool:
    """Tell whether a process ignores a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "100"], start_new_session=True, env={**os.environ, **environment})


def test_the_guard_kills_what_is_listed_and_what_was_about_to_start_and_nothing_else() -> None:
    listed, starting, over, other = sleeper(), sleeper(DROPQ_RUN="b"), sleeper(DROPQ_RUN="c"), sleeper()
    try:
        process = guarded(f"run a {listed.pid}\nrun b 0\nrun c 0\nrun c {over.pid}\nend c\n")
        assert process.stdin is not None
        until(lambda: ignores(process.pid, signal.SIGTERM), "the guard is ready")
        process.send_signal(signal.SIGTERM)  # it outlives what ends its worker
        process.stdin.close()
        assert process.wait(20) == 0
        assert listed.wait(20) == starting.wait(20) == -signal.SIGKILL
        assert over.poll() is None and other.poll() is None
    finally:
        for left in (listed, starting, over, other):
            left.kill()
            left.wait()


def test_a_guard_that_was_killed_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    guards: list[int] = []

    class Killing(Command):
        def __call__(self, message: Message) -> None:
            super().__call__(message)
            process = self._guard._process
            assert process is not None
            guards.append(process.pid)
            process.kill()
            until(lambda: process.poll() is not None, "the guard died")

    with Killing(["true"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"acked": 2}
    assert len(set(guards)) == 2
    assert "starting another" in caplog.text


def test_without_a_guard_commands_run_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b"])
    with caplog.at_level(logging.WARNING), Command(["true"]) as handler:
        assert counted(work(queue, handler, until_empty=True)) == {"acked": 2}
    assert len([record for record in caplog.records if "no guard" in record.getMessage()]) == 1
