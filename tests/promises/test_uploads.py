"""What real programs put straight into target/ is processed once and whole, and what is not whole is told.

The programs upload at the same time, each for longer than a file settles, while a worker runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import join
from typing import NamedTuple

import pytest
from helpers import Clock, base, drop, health, make_queue, names_in, reopened, take, until, where
from workers import Working, reason_in

from dropq import Queue, Root
from dropq.lifecycle.timing import Timing

#: Bytes of an upload, and kilobytes that it transfers in a second: it takes three seconds. rsync writes 256 KiB at a
#: time, which is far less than it transfers while a file settles.
SIZE, RATE = 1_200_000, 400
LARGE = 200_000_000
#: Seconds after which a file settles that was written in place.
SETTLED_AFTER = Timing().written_in_place
#: Where systems keep the server that sftp and scp talk to.
SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
SERVER = next((server for server in SERVERS if os.access(server, os.X_OK)), "")

#: Writes down what it was given: the id and the hash of the body.
HANDLER = 'printf "%s %s\\n" "$DROPQ_ID" "$(sha256sum | cut -c 1-64)" >> "$SEEN"'
#: Writes a file in pieces: the source, the destination, the bytes of a piece, the seconds between two.
WRITER = """
import sys, time
source, destination, size, pause = sys.argv[1:]
with open(source, "rb") as whole, open(destination, "wb", buffering=0) as part:
    while piece := whole.read(int(size)):
        part.write(piece)
        time.sleep(float(pause))
"""
#: What stands for ssh: it runs the command on this machine.
HERE = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec sh -c "$*"\n'


class Upload(NamedTuple):
    """What a program did with a file."""

    seen: list[str]
    sent: str
    longest_pause: float
    code: int


def writer(source: Path, destination: str, size: int, pause: float) -> str:
    return join([sys.executable, "-c", WRITER, str(source), destination, str(size), str(pause)])


def sftp(source: Path, destination: str) -> str:
    put = f'put "{source}" "{destination}"'
    return f"echo {join([put])} | {join(['sftp', '-q', '-b', '-', '-l', str(RATE * 8), '-D', SERVER])}"


def scp(source: Path, destination: str) -> str:
    return join(["scp", "-q", "-l", str(RATE * 8), "-D", SERVER, str(source), f"here:{destination}"])


def old_scp(source: Path, destination: str) -> str:
    shell = source.parent / "here"
    shell.write_text(HERE)
    shell.chmod(0o700)
    remote = f"here:{join([destination])}"
    return join(["scp", "-q", "-O", "-l", str(RATE * 8), "-S", str(shell), str(source), remote])


def rsync(*options: str) -> Callable[[Path, str], str]:
    return lambda source, destination: join(["rsync", f"--bwlimit={RATE}", *options, str(source), destination])


def rsync_again(source: Path, destination: str) -> str:
    """Kill rsync when a part has arrived, and run it again: it goes on with the part in its own folder."""
    folder, name = os.path.split(destination)
    once = rsync("--partial-dir=.parts")(source, destination)
    arrived = f'[ -n "$(find {join([folder])} -name {join([f".{name}.*"])} -size +0)" ]'
    kept = join(["test", "-s", f"{folder}/.parts/{name}"])
    first, then = (f"until {condition}; do sleep 0.05; done" for condition in (arrived, kept))
    return f"{once} & {first}; kill $!; {then}; wait; {once}"


def filepart(source: Path, destination: str) -> str:
    """Do what WinSCP does with all but small files."""
    hidden = f"{destination}.filepart"
    return f"{writer(source, hidden, SIZE // 25, 0.1)} && {join(['mv', hidden, destination])}"


def cp(source: Path, destination: str) -> str:
    large = source.parent / "large"
    with large.open("wb") as file:
        piece = os.urandom(1_000_000)
        for _ in range(LARGE // len(piece)):
            file.write(piece)
    return join(["cp", str(large), destination])


#: How each program uploads a file.
PROGRAMS: dict[str, Callable[[Path, str], str]] = {
    "sftp": sftp,
    "scp": scp,
    "scp -O": old_scp,
    "rsync": rsync(),
    "rsync --inplace": rsync("--inplace"),
    "rsync --inplace --times": rsync("--inplace", "--times"),
    "rsync --partial-dir": rsync_again,
    "filepart": filepart,
    "cp": cp,
    "pauses": lambda source, destination: writer(source, destination, SIZE // 2 + 1, 3),
}
#: Those that a bare Debian has.
EVERYWHERE = ("filepart", "cp", "pauses")


def missing(program: str) -> str:
    """Return why a program cannot run here; nothing if it can."""
    name = program.split()[0]
    if name in ("sftp", "scp", "rsync") and not shutil.which(name):
        package = "rsync" if name == "rsync" else "openssh-client"
        return f"there is no {name}: apt-get install {package}"
    if program in ("sftp", "scp") and not SERVER:
        return "there is no sftp-server: apt-get install openssh-sftp-server"
    return ""


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Upload]:
    """What each program uploads while a worker runs, by the program; none of those that are missing."""
    folder = tmp_path_factory.mktemp("uploads")
    source, seen = folder / "source", folder / "seen"
    source.write_bytes(os.urandom(SIZE))
    root = Root.create(folder / "root")
    queues = {"pauses": root.create_queue("slow", settle_time="5s")}
    queue = root.create_queue("q")
    there = [program for program in PROGRAMS if not missing(program)]
    paths = {program: base(queues.get(program, queue)) / "target" / f"{program}.csv" for program in there}
    ways = {program: PROGRAMS[program](source, str(path)) for program, path in paths.items()}
    command = [sys.executable, "-m", "dropq", "--root", str(root.path), "work", "q", "slow", "-q"]
    with subprocess.Popen([*command, "--", "sh", "-c", HANDLER], env={**os.environ, "SEEN": str(seen)}) as worker:
        try:
            running = {program: subprocess.Popen(["sh", "-c", way]) for program, way in ways.items()}
            pauses = longest_pauses(running, paths)
            left = [path for program, path in paths.items() if running[program].returncode == 0]
            until(lambda: not any(path.exists() for path in left), "all uploads are taken")
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
        finally:
            worker.kill()
    hashes = defaultdict[str, list[str]](list)
    for line in seen.read_text().splitlines():
        name, _, digest = line.rpartition(" ")
        hashes[name].append(digest)
    sent = {program: digest_of(source.parent / "large" if program == "cp" else source) for program in there}
    return {
        program: Upload(hashes[path.name], sent[program], pauses[program], running[program].returncode)
        for program, path in paths.items()
    }


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def longest_pauses(running: dict[str, subprocess.Popen[bytes]], paths: dict[str, Path]) -> dict[str, float]:
    """Wait until programs have ended; return for how long each left its file in target/ as it was."""
    longest, last = dict.fromkeys(running, 0.0), dict[str, tuple[int, float]]()
    while waited_for := [program for program, process in running.items() if process.poll() is None]:
        for program in waited_for:
            with suppress(FileNotFoundError):  # not there yet, or taken
                changed, now = paths[program].stat().st_ctime_ns, time.monotonic()
                known, since = last.get(program, (changed, now))
                longest[program] = max(longest[program], now - since)
                last[program] = (changed, since if changed == known else now)
        time.sleep(0.01)
    return longest


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=[pytest.mark.host] if each not in EVERYWHERE else []) for each in PROGRAMS],
)
def test_what_a_program_uploads_is_processed_once_and_whole(program: str, request: pytest.FixtureRequest) -> None:
    if why := missing(program):
        pytest.skip(why)
    upload: Upload = request.getfixturevalue("uploads")[program]
    assert upload.code == 0
    if upload.seen != [upload.sent] and upload.longest_pause > SETTLED_AFTER and program != "pauses":
        pytest.skip(
            f"this machine let {program} wait for {upload.longest_pause:.1f} s, and nobody knows that it goes on"
        )
    assert upload.seen == [upload.sent]


# -- what is not whole is told -----------------------------------------------------------------------------------------


@pytest.mark.host
def test_rsync_partial_shows_a_part_under_the_file_s_own_name(tmp_path: Path) -> None:
    """It is why the papers say --partial-dir: a part that was moved in looks like a file that is whole."""
    if why := missing("rsync"):
        pytest.skip(why)
    queue = make_queue(tmp_path / "root", timing=Timing())
    source, target = tmp_path / "source", base(queue) / "target"
    source.write_bytes(os.urandom(SIZE))
    once = rsync("--partial")(source, str(target / "a.csv"))
    with subprocess.Popen(["sh", "-c", f"exec {once}"], stderr=subprocess.DEVNULL) as process:
        until(lambda: any(path.stat().st_size for path in target.glob(".a.csv.*")), "a part")
        process.terminate()
    until((target / "a.csv").exists, "the part under its own name")
    assert 0 < len(take(queue).body) < SIZE


def test_a_writer_that_pauses_for_longer_than_the_default_is_told_of(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, timing=Timing())
    with (base(queue) / "target" / "rows.csv").open("wb", buffering=0) as rows:
        rows.write(b"1\n")
        with Working(queue, lambda message: message.body):
            until(lambda: names_in(queue, "processed"), "the first row alone was processed")
        rows.write(b"2\n")
    assert [finding.kind for finding in queue.fsck()] == ["written-after-ack"]
    assert [note.kind for note in health(queue).notes] == ["written-after-ack"]


def test_what_is_written_while_a_worker_has_it_ends_in_error(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, settle_time=0)
    with (base(queue) / "target" / "rows.csv").open("wb", buffering=0) as rows:
        rows.write(b"1\n")

        def handler(message: object) -> None:
            rows.write(b"2\n")

        with Working(queue, handler) as working:
            until(lambda: names_in(queue, "error"), "the message goes to error/")
    assert where(queue) == {"error": [b"1\n2\n"]}
    assert reason_in(queue, "error")["reason"] == "body_changed"
    assert "settle_time" in reason_in(queue, "error")["detail"]
    assert (working.report.acked, working.report.failed) == (0, 1)


def test_a_body_that_nobody_wrote_to_is_not_told_of(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, settle_time=0)
    for number in range(20):  # the ack comes in the tick of the write, unless it waits for the next
        drop(queue, f"{number}.csv", b"1\n")
        take(queue).ack()
    assert queue.fsck() == []
    assert health(queue).notes == ()


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["1970-01-01 00:00:00 UTC", "1969-07-20 20:17:40 UTC", "2100-01-01 00:00:00 UTC"])
def test_a_copied_time_is_no_write_whenever_it_is(tmp_path: Path, moment: str) -> None:
    queue = make_queue(tmp_path / "root", clock=Clock(), timing=Timing())
    source = tmp_path / "a.csv"
    source.write_bytes(b"a")
    subprocess.run(["touch", "-d", moment, source], check=True)
    subprocess.run(["cp", "-p", source, base(queue) / "target"], check=True)
    message = take(queue)
    assert message.body == b"a"
    message.ack()
    assert where(queue) == {"processed": [b"a"]}
    assert queue.fsck() == []


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_file_settles_by_a_clock_that_is_an_hour_off(tmp_path: Path, hours: int) -> None:
    clock = Clock()
    clock.advance(3600 * hours)
    queue = make_queue(tmp_path, clock=clock, settle_time="5s")
    path = base(queue) / "target" / "a.csv"
    path.write_bytes(b"a")
    if hours < 0:  # its ctime is in the future: it counts since when it stands unchanged
        assert queue.receive() is None
        clock.advance(4)
        with path.open("ab") as file:
            file.write(b"b")
        assert queue.receive() is None
        clock.advance(4)
        assert queue.receive() is None
        clock.advance(1)
    assert take(queue).body == (b"ab" if hours < 0 else b"a")


def test_what_dropq_sends_never_waits(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, clock=Clock(), settle_time="1h")
    queue.send(b"a")
    queue.send(b"b", message_id="b.csv")
    for _ in range(2):
        take(queue).nack()
        take(queue).ack()
    drop(queue, "c.csv", b"c")
    assert where(queue) == {"processed": [b"a", b"b"], "target": [b"c"]}
    assert queue.receive() is None


def test_what_a_script_moves_in_comes_at_once(tmp_path: Path) -> None:
    """Its times may be those of a write, as all happens in one tick; here no time passes, so an event must tell."""
    queue = make_queue(tmp_path, clock=Clock(), timing=Timing())
    seen: list[bytes] = []
    with Waiting(queue, seen.append):
        for number in range(20):
            drop(queue, f"{number}.csv", b"%d" % number)
        (base(queue) / "target" / "in-place.csv").write_bytes(b"in place")
        until(lambda: len(seen) >= 20, "all that was moved in")
    assert sorted(seen, key=int) == [b"%d" % number for number in range(20)]
    assert reopened(queue).receive() is None


class Waiting:
    """A consumer in a thread, which waits for events when the block begins."""

    def __init__(self, queue: Queue, seen: Callable[[bytes], object]) -> None:
        self._subscription = queue.subscribe()
        self._seen = seen
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while (message := self._subscription.receive(timeout=60)) is not None:
            self._seen(message.body)
            message.ack()

    def _hears(self) -> bool:
        watch = self._subscription._waiting._watch
        return watch is not None and watch.events

    def __enter__(self) -> None:
        self._thread.start()
        until(self._hears, "the consumer waits for events")

    def __exit__(self, *exc: object) -> None:
        self._subscription.close()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the consumer did not end"
