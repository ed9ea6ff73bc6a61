"""`send --records` sends the records of files or of a pipe, many in a message, and tells what became of each."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import FRESH, Run, first_and_long, make_queue, until

from dropq import Queue, Root


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path / "root", timing=FRESH)


@pytest.fixture
def root(queue: Queue) -> Root:
    return queue.root


def bodies(queue: Queue) -> list[bytes]:
    """What waits in target/, in order of delivery."""
    return [message.body for message in queue.browse()]


@contextmanager
def following(queue: Queue, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that follows a pipe, in a process of its own."""
    argv = [sys.executable, "-m", "dropq", "--root", str(queue.root.path), "send", "q", "--records", *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, bufsize=0, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def put(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write into the pipe of a command."""
    assert process.stdin is not None
    process.stdin.write(data)


def heard(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that a command prints; it blocks, and pytest's timeout bounds it."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_records_are_sent_many_in_a_message_with_an_id_and_a_number_for_each(run: Run, queue: Queue) -> None:
    done = run("send", "q", "--records", "--max-records", "2", input='{"a":1}\n\n{"a":2}\n{"a":3}')
    assert bodies(queue) == [b'{"a":1}\n{"a":2}\n', b'{"a":3}\n']
    messages = list(queue.browse())
    assert done == (0, "".join(f"{message.id}\t{n}\n" for message, n in zip(messages, (2, 1), strict=True)), "")
    assert {message.type for message in messages} == {"jsonl"}


def test_json_prints_an_object_a_message(run: Run, queue: Queue) -> None:
    done = run("send", "q", "--records", "--json", "--priority", "7", "-p", "shop=a", input="1\n2\n")
    (message,) = queue.browse()
    assert json.loads(done.out) == {"id": message.id, "accepted": True, "delivered_to": "q", "records": 2}
    assert (message.priority, message.properties) == (7, {"shop": "a"})


def test_each_message_of_csv_has_the_header_of_its_file(run: Run, queue: Queue, tmp_path: Path) -> None:
    for number, text in enumerate(('id,note\n1,"a\nb"\n2,c\n', "id,note\n3,d", "\ufeffother\n4\n")):
        (tmp_path / f"{number}.csv").write_text(text)
    done = run("send", "q", "--records", "--format", "csv", *(str(tmp_path / f"{number}.csv") for number in range(3)))
    assert bodies(queue) == [b'id,note\n1,"a\nb"\n2,c\n3,d\n', b"other\n4\n"]
    assert [line.split("\t")[1] for line in done.out.splitlines()] == ["3", "1"]


def test_frames_are_sent_as_frames(run: Run, queue: Queue) -> None:
    assert run("send", "q", "--records", "--format", "frames", input="\0\0\0\3a\nb\0\0\0\1c").code == 0
    assert bodies(queue) == [b"\0\0\0\3a\nb\0\0\0\1c"]


def test_an_empty_input_sends_nothing(run: Run, queue: Queue) -> None:
    assert run("send", "q", "--records", input="") == (0, "", "")
    assert bodies(queue) == []


@pytest.mark.parametrize(
    ("body_format", "text", "says"),
    [
        ("csv", 'id\n1\n2,"c', "record 2 at byte 5 does not end"),
        ("frames", "\0\0\0\1a\0\0\0\2c", "record 2 at byte 5 is torn"),
        ("csv", "id\n1\na\rb\n", "record 2: the record is not one row of csv"),
    ],
)
def test_a_bad_record_ends_the_command_after_what_came_before_it_was_sent(
    run: Run, queue: Queue, body_format: str, text: str, says: str
) -> None:
    done = run("send", "q", "--records", "--format", body_format, input=text)
    assert done.code == 65
    assert f"error: standard input: {says}" in done.err
    assert done.err.endswith("sent=1 not_sent=0\n")
    assert done.out == f"{next(queue.browse()).id}\t1\n"


def test_a_file_that_is_missing_keeps_back_nothing_that_was_read_before(run: Run, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("1\n")
    done = run("send", "q", "--records", str(tmp_path / "there"), str(tmp_path / "missing"))
    assert done.code == 66 and "missing" in done.err
    assert bodies(queue) == [b"1\n"]


@pytest.mark.parametrize(
    "options",
    [
        ("--records", "--lines"),
        ("--records", "--move"),
        ("--records", "--id", "1"),
        ("--records", "--type", "order"),
        ("--records", "--wait-reply", "1s"),
        ("--records", "--format", "json"),
        ("--records", "--format", "parquet"),
        ("--records", "--max-records", "0"),
        ("--records", "--max-bytes", "0"),
        ("--records", "--linger", "-1"),
        ("--format", "csv"),
        ("--linger", "1s"),
    ],
)
def test_options_that_do_not_go_together_are_refused_and_nothing_is_sent(
    run: Run, queue: Queue, options: tuple[str, ...]
) -> None:
    done = run("send", "q", *options, input="1\n")
    assert done.code == 2, done
    assert bodies(queue) == []


def test_what_a_full_queue_refuses_at_the_end_is_told(run: Run, root: Root) -> None:
    small = root.create_queue("small", max_unprocessed=1, overflow="reject", durability="none")
    done = run("send", "small", "--records", "--max-records", "2", input="1\n2\n3\n4\n5\n")
    assert done.code == 75
    assert "queue small is full" in done.err
    assert done.err.endswith("sent=2 not_sent=3\n")
    assert bodies(small) == [b"1\n2\n"]
    assert done.out == f"{next(small.browse()).id}\t2\n"


def test_quiet_prints_the_sum_of_the_records(run: Run, queue: Queue) -> None:
    done = run("send", "q", "--records", "-q", "--max-records", "2", input="1\n2\n3\n")
    assert done == (0, "", "sent=3 not_sent=0\n")
    assert len(bodies(queue)) == 2


def test_a_pipe_is_followed_and_its_records_are_sent_when_they_have_lingered(queue: Queue) -> None:
    with following(queue, "--linger", "20ms", "--format", "text") as process:
        put(process, b"1\n2")
        assert heard(process).endswith(b"\t1\n")
        put(process, b"+2\n")
        assert heard(process).endswith(b"\t1\n")
        assert bodies(queue) == [b"1\n", b"2+2\n"]
        put(process, b"3")
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.endswith(b"\t1\n")
    assert bodies(queue)[-1] == b"3\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_command_send_what_it_has_read_and_no_half_record(
    queue: Queue, number: signal.Signals
) -> None:
    with following(queue, "--linger", "1h", "--max-records", "3") as process:
        put(process, b"1\n2\n3\n")
        assert heard(process).endswith(b"\t3\n")
        put(process, b"4\n5\n6 ha")
        assert process.stdin is not None
        until(lambda: _is_read(process), "the command has read its pipe")
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert bodies(queue) == [b"1\n2\n3\n", b"4\n5\n"]
    assert out.endswith(b"\t2\n")
    assert (b"5 records sent" in err) == (number == signal.SIGINT)
    assert b"4 bytes behind the last whole record were read, and not sent" in err


def _is_read(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdin is not None
    return not any(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)))


@pytest.mark.parametrize("number", first_and_long([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
@pytest.mark.parametrize("how", ["limit", "write-lock"])
def test_a_signal_ends_the_wait_for_a_queue_that_blocks_and_what_was_sent_is_told(
    tmp_path: Path, number: signal.Signals, how: str
) -> None:
    queue = make_queue(tmp_path / "root", timing=FRESH, max_unprocessed=1, overflow="block")
    if how == "write-lock":
        Path(queue.layout.write_lock).touch()
    with following(queue, "--max-records", "2", "--format", "text") as process:
        if how == "limit":
            put(process, b"1\n2\n")
            assert heard(process).endswith(b"\t2\n")
        put(process, b"3\n4\n5\n6 ha")
        assert process.stderr is not None
        assert b"senders wait" in process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out) == (75, b"")
    assert b"4 bytes behind the last whole record were read" in err
    assert err.endswith(b"sent=2 not_sent=3\n" if how == "limit" else b"sent=0 not_sent=3\n")
    assert bodies(queue) == [b"1\n2\n"][: how == "limit"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_the_command_wherever_it_is_and_tells_what_was_sent(
    queue: Queue, number: signal.Signals
) -> None:
    with following(queue, "--max-records", "1", "--format", "text") as process:
        with open(os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as ids:
            while ids.write(bytes(4096)):
                pass  # until the pipe is full
        put(process, b"1\n2\n")
        assert process.stderr is not None
        until(lambda: len(bodies(queue)) == 1 and is_asleep(process), "the command waits for who reads its ids")
        process.send_signal(number)
        until(lambda: is_asleep(process), "the command has noted the signal, and waits again")
        process.send_signal(number)
        read, line = process.stderr.readline(), process.stderr.readline()
    assert read == b"2 bytes behind the last whole record were read, and not sent\n"
    assert line == b"sent=1 not_sent=0\n"


def is_asleep(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process sleeps, and has seen each signal that it was sent."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    status = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
    return status["State"].startswith("S") and not int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)


def test_a_signal_ends_the_wait_for_who_writes_to_a_fifo(queue: Queue, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "first").write_text("1\n")
    sources = [str(tmp_path / "first"), str(tmp_path / "fifo")]
    with following(queue, "--max-records", "1", *sources) as process:
        assert heard(process).endswith(b"\t1\n")
        until(lambda: is_asleep(process), "the command waits for a writer")
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert bodies(queue) == [b"1\n"]


def test_a_queue_that_is_full_for_a_while_gets_the_records_of_a_pipe_later(root: Root) -> None:
    small = root.create_queue("q2", max_unprocessed=1, overflow="reject", durability="none")
    small.send("in the way")
    argv = [sys.executable, "-m", "dropq", "--root", str(root.path), "send", "q2", "--records", "--linger", "1ms"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"1\n")
        process.stdin.flush()
        assert b"queue q2 is full" in process.stderr.readline()
        message = small.receive()
        assert message is not None
        message.ack()
        assert process.stdout.readline().endswith(b"\t1\n")
        process.communicate()
    assert process.returncode == 0
    assert bodies(small) == [b"1\n"]


def test_a_reader_of_ids_that_leaves_keeps_no_record_back(queue: Queue) -> None:
    argv = [sys.executable, "-m", "dropq", "--root", str(queue.root.path), "send", "q", "--records"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = subprocess.run(argv, input=b"1\n2\n", stdout=closed, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert b"not all ids were read" in done.stderr
    assert bodies(queue) == [b"1\n2\n"]
