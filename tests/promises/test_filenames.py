"""A message that was sent from a file says what the file was called, as far as a name can be trusted in a path."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Make, make_queue, names_in, take

from dropq import Fail, Message, Queue, Reject, work
from dropq.cli import main as cli
from dropq.format.names import NAME_BUDGET
from dropq.worker.command import Command


def sent_from(queue: Queue, folder: Path, name: str, **fields: object) -> Message:
    """Send a file of a name; return what waits then, as far as it was not there before."""
    before = {message.id for message in queue.browse()}
    (folder / name).write_bytes(b"body")
    queue.send_file(folder / name, **fields)  # type: ignore[arg-type]
    (message,) = (message for message in queue.browse() if message.id not in before)
    return message


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize(
    "name", ["report.csv", "with space & more.csv", "ünïcödé.txt", "日本語の請求書" * 8 + ".pdf", "4.1.B"]
)
def test_a_file_keeps_its_name_in_a_property(make: Make, tmp_path: Path, name: str, move: bool) -> None:
    queue = make()
    message = sent_from(queue, tmp_path, name, move=move, properties={"n": 1}, reply_to="answers")
    assert dict(message.properties) == {"n": 1, "filename": name}
    assert (message.filename, message.reply_to) == (name, "answers")
    assert len(names_in(queue, "target")[0]) <= NAME_BUDGET
    with take(queue) as taken:
        taken.fail("no good")
    (failed,) = queue.browse("error")
    assert failed.filename == name


def test_the_name_that_a_sender_gives_wins(make: Make, tmp_path: Path) -> None:
    queue = make()
    assert sent_from(queue, tmp_path, "x7f3.tmp", properties={"filename": "ann.csv"}).filename == "ann.csv"
    assert sent_from(queue, tmp_path, "x7f4.tmp", properties={"filename": ""}).filename is None


def test_what_is_sent_from_no_file_by_name_stays_plain(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.send(b"a")
    queue.send_many([b"b"])
    queue.send_file(io.BytesIO(b"c"))
    (tmp_path / "d").write_bytes(b"d")
    with open(tmp_path / "d", "rb") as stream:
        queue.send_file(stream)
    assert [(message.filename, dict(message.properties)) for message in queue.browse()] == [(None, {})] * 4


def test_a_name_that_is_not_utf8_is_left_out_and_reported(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    with caplog.at_level(logging.WARNING, "dropq"):
        message = sent_from(queue, tmp_path, os.fsdecode(b"caf\xe9.txt"))
    assert (message.filename, dict(message.properties), message.body) == (None, {}, b"body")
    assert "sent without the property filename: it is not UTF-8" in caplog.text


@pytest.mark.parametrize(
    "value",
    ["", ".", "..", ".profile", "-rf", "../../etc/passwd", "/etc/passwd", "a/b", "a\nb", "a\x1b[2J", "a\0b",
     "\u202egpj.exe", "x" * 256, "é" * 128, 7, True, 1.5],
)  # fmt: skip
def test_a_name_that_is_not_safe_in_a_path_is_not_read(tmp_path: Path, value: object) -> None:
    queue = make_queue(tmp_path / "root")
    queue.send(b"body", properties={"filename": value})
    (message,) = queue.browse()
    assert (message.filename, message.properties["filename"]) == (None, value)
    with Command(["sh", "-c", f'printf %s "$1" >{tmp_path}/path', "sh", "{}"]) as handler:
        assert work(queue, handler, until_empty=True).acked == 1
    assert os.path.basename((tmp_path / "path").read_text()) == message.name


def test_a_command_gets_the_body_under_the_name_of_its_file(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    sent_from(queue, tmp_path, "$(touch pwned) 1.csv")
    sent_from(queue, tmp_path, "x" * 255)
    script = 'printf "%s\\0%s\\0%s\\0" "$1" "$DROPQ_FILE" "$DROPQ_PROP_filename"; cat "$1" >&2'
    with Command(["sh", "-c", f"({script}) >>{tmp_path}/said", "sh", "{}"]) as handler:
        assert work(queue, handler, until_empty=True).acked == 2
    said = (tmp_path / "said").read_text().split("\0")
    assert [os.path.basename(text) for text in said] == ["$(touch pwned) 1.csv"] * 3 + ["x" * 255] * 3 + [""]
    assert not os.path.exists("pwned") and not list(Path(queue.layout.held).iterdir())


def test_a_worker_says_which_file_failed(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = make(redelivery_attempts=2)
    failed, refused = sent_from(queue, tmp_path, "one.csv"), sent_from(queue, tmp_path, "two.csv")

    def handle(message: Message) -> None:
        raise Fail("no good") if message.id == failed.id else Reject("never good")

    with caplog.at_level(logging.WARNING, "dropq"):
        work(queue, handle, until_empty=True)
    assert f"message {failed.id} one.csv failed (no good), try 1 of 3, again at once" in caplog.messages
    assert f"message {refused.id} two.csv rejected (never good), try 1, in error/ now" in caplog.messages


def test_dropboxmqs_layout_gets_a_name_where_no_sidecar_is_needed(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make(dropboxmq=True)
    assert sent_from(queue, tmp_path, "report.csv", reply_to="answers").filename == "report.csv"
    long = "x" * 100
    with caplog.at_level(logging.WARNING, "dropq"):
        message = sent_from(queue, tmp_path, long, reply_to="answers")
    assert (message.filename, message.reply_to) == (None, "answers")
    assert not any("JMS_dropq_meta" in name for name in names_in(queue, "target"))
    assert "would be too long for DropboxMQ" in caplog.text


def test_the_command_line_shows_names_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = make_queue(tmp_path / "root", redelivery_attempts=0)
    root = ["--root", str(queue.root.path)]
    (tmp_path / "one.csv").write_bytes(b"1")
    (tmp_path / "lines").write_bytes(b"2\n3\n")
    assert cli.main([*root, "send", "q", "--move", str(tmp_path / "one.csv"), "-q"]) == 0
    capsys.readouterr()
    assert cli.main([*root, "browse", "q"]) == 0
    assert capsys.readouterr().out.rstrip("\n").split("\t")[-1] == "one.csv"
    assert cli.main([*root, "work", "q", "--until-empty", "--", "false"]) == 1
    assert " one.csv failed (exit status 1), try 1 of 1, in error/ now" in capsys.readouterr().err
    assert cli.main([*root, "browse", "q", "--state", "error"]) == 0
    assert capsys.readouterr().out.rstrip("\n").split("\t")[-2:] == ["failed: exit status 1", "one.csv"]
    (message,) = queue.browse("error")
    assert cli.main([*root, "show", "q", message.id]) == 0
    assert "filename\tone.csv\n" in capsys.readouterr().out
    assert cli.main([*root, "send", "q", "--lines", str(tmp_path / "lines"), "-q"]) == 0
    assert cli.main([*root, "send", "q", "--records", "--format", "text", str(tmp_path / "lines"), "-q"]) == 0
    line = [sys.executable, "-m", "dropq", *root, "send", "q", "-"]
    subprocess.run(line, input=b"4", check=True, stdout=subprocess.DEVNULL)
    assert [message.filename for message in queue.browse()] == [None] * 4
