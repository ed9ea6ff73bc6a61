"""`work --each` and `work --records`: a command for each record, and a command for the records of a message."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, cast
from unittest.mock import ANY

import pytest
from helpers import drop, make_queue, take, until, where
from workers import counted

from dropq import Queue
from dropq.cli import main
from dropq.lifecycle.reasons import STDERR_LIMIT
from dropq.worker.loop import Handler, Stop
from dropq.worker.record_commands import BundleCommand, RecordCommand
from dropq.worker.run import By, run
from dropq.worker.sources import Sources

Dropq = Callable[..., tuple[int, str, str]]


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return make_queue(tmp_path, durability="none")


@pytest.fixture
def dropq(queue: Queue, capfd: pytest.CaptureFixture[str]) -> Dropq:
    """Runs a command line on the root; returns the exit code, and what was printed on stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main.main(["--root", str(queue.root.path), *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_records_that_sed_repairs_in_place_keep_their_reasons_until_they_are_requeued(
    queue: Queue, dropq: Dropq
) -> None:
    id = queue.send(b"one\ntwo\n", type="text").id
    assert dropq("work", "q", "--until-empty", "--each", "--", "sh", "-c", "cat >&2; exit 3")[0] == 1
    files = [message.path for message in queue.browse("error")]
    subprocess.run(["sed", "-i", "s/o/0/", *files], check=True)
    for number, text in ((1, "0ne\n"), (2, "tw0\n")):
        code, out, _ = dropq("show", "q", f"{id}-{number}", "--json")
        assert (code, json.loads(out)["reason"]["exit_status"]) == (0, 3)
        assert dropq("cat", "q", f"{id}-{number}")[1] == text
    assert dropq("fsck", "q")[:2] == (0, "")
    assert dropq("requeue", "q", "--all", "--yes")[0] == 0
    assert dropq("fsck", "q")[:2] == (0, "")
    assert where(queue)["target"] == [b"0ne\n", b"tw0\n"]


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, last + 1))


def reasons(queue: Queue) -> dict[str, Any]:
    """Why messages lie in error/, by their ids."""
    return {message.id: message.reason for message in queue.browse("error")}


@pytest.mark.parametrize("by", ["--records", "--each"])
def test_a_body_that_a_command_writes_to_ends_in_error(queue: Queue, dropq: Dropq, by: str) -> None:
    drop(queue, "a.txt", lines(1, 3))
    append = 'cat; for body in "$0"/*; do echo 4 >> "$body"; done'
    code, out, err = dropq("work", "q", "--until-empty", by, "--", "sh", "-c", append, queue.layout.processing)
    assert (code, out) == (1, "1\n2\n3\n")
    assert "message a.txt failed (body_changed: " in err
    (body,) = where(queue).pop("error")
    assert body == lines(1, 3) + b"4\n" * (3 if by == "--each" else 1)
    assert reasons(queue)["a.txt"]["reason"] == "body_changed"
    assert dropq("requeue", "q", "--all", "--yes")[0] == 0
    assert dropq("work", "q", "--until-empty", by, "--", "cat") == (0, body.decode(), ANY)
    assert where(queue) == {"processed": [body]}


# -- a command for each record ---------------------------------------------------------------------------------


def test_each_runs_a_command_for_each_record_with_the_variables_of_its_message(queue: Queue, dropq: Dropq) -> None:
    id = queue.send(b"one\ntwo", type="text", properties={"region": "eu"}).id
    show = 'echo "$DROPQ_RECORD of $DROPQ_ID: $(cat), $DROPQ_PROP_region, ${DROPQ_FAILED-none}"'
    code, out, err = dropq("work", "q", "--until-empty", "--each", "--", "sh", "-c", show)
    assert out == f"1 of {id}: one, eu, none\n2 of {id}: two, eu, none\n"
    assert code == 0 and err.startswith("2 acknowledged in ")


def test_each_gives_a_line_with_its_line_feed_and_a_frame_as_it_is(queue: Queue, dropq: Dropq) -> None:
    queue.send(b"a\r\nb", type="text")
    queue.send(b"\0\0\0\x03x\ny", type="frames")
    assert dropq("work", "q", "--until-empty", "--each", "--", "cat")[1].encode() == b"a\r\nb\nx\ny"


def test_exit_codes_of_each_settle_the_record(queue: Queue, dropq: Dropq) -> None:
    id = queue.send(b"0\n65\n75\n1\n0\n", type="text").id
    command = 'read -r code; echo "said $code" >&2; exit "$code"'
    code, out, err = dropq("work", "q", "--until-empty", "--json", "--each", "--", "sh", "-c", command)
    sums = json.loads(out)
    assert code == 1
    assert {key: sums[key] for key in ("acked", "rejected", "retried", "failed")} == {
        **{"acked": 2, "rejected": 1},
        **{"retried": 1, "failed": 1},
    }
    assert [left["id"] for left in sums["left"]] == [f"{id}-3"]
    assert where(queue) == {
        "processed": [b"0\n65\n75\n1\n0\n"],
        "error": [b"1\n", b"65\n"],
        "target": [b"75\n"],
    }
    assert {key: (why["reason"], why["exit_status"], why["stderr"]) for key, why in reasons(queue).items()} == {
        f"{id}-2": ("rejected", 65, "said 65\n"),
        f"{id}-4": ("failed", 1, "said 1\n"),
    }
    assert f"message {id}-4 failed (exit status 1), try 1 of 1, in error/ now" in err


def test_each_that_cannot_be_run_stops_the_worker_and_what_is_left_waits(queue: Queue, dropq: Dropq) -> None:
    queue.send(lines(1, 3), type="text")
    code, _, err = dropq("work", "q", "--each", "--", "sh", "-c", '[ "$DROPQ_RECORD" = 1 ] || exit 127')
    assert code == 69 and "cannot be run" in err
    assert where(queue) == {"processed": [b"1"], "target": [lines(2, 3)]}


# -- a command for the records of a message --------------------------------------------------------------------


def work_records(dropq: Dropq, script: str, *options: str) -> tuple[int, str, str]:
    return dropq("work", "q", "--until-empty", "--records", *options, "--", "sh", "-c", script)


def test_records_gives_all_of_them_to_one_command_and_acknowledges_them(queue: Queue, dropq: Dropq) -> None:
    queue.send(b"id,n\n1,a\n2,b", type="csv")
    code, out, err = work_records(dropq, 'cat; echo; echo "${DROPQ_RECORD-none}"')
    assert (code, out) == (0, "id,n\n1,a\n2,b\n\nnone\n") and err.startswith("2 acknowledged in ")
    assert where(queue) == {"processed": [b"id,n\n1,a\n2,b"]}


BOM = b"\xef\xbb\xbf"
TOO_LONG = b"a line that is longer than max_record_bytes"


@pytest.mark.parametrize("by", ["--records", "--each"])
@pytest.mark.parametrize(
    ("format", "body", "read"),
    [
        ("text", b"1\n2\n3", b"1\n2\n3\n"),
        ("jsonl", b'{"n": 1}\n{"n": 2}', b'{"n": 1}\n{"n": 2}\n'),
        ("text", b"1\r\n2\r\n3", b"1\r\n2\r\n3\n"),
        ("text", b"1\r\n2\r\n", b"1\r\n2\r\n"),
        ("text", BOM + b"1\n2", b"1\n2\n"),
        ("text", BOM + b"1\n2\n", b"1\n2\n"),
        ("text", BOM + BOM + b"1\n", BOM + b"1\n"),
        ("text", b"1\n\n2\n\r\n", b"1\n2\n"),
        ("text", b"a\0b\n\0", b"a\0b\n\0\n"),
        ("text", b"1\n" + TOO_LONG + b"\n2\n", b"1\n"),
        ("text", b"1\n" + TOO_LONG, b"1\n"),
        ("text", b"", b""),
        ("csv", BOM + b'id,t\n1,"a\nb"\n2,c', b'id,t\n1,"a\nb"\n2,c\n'),
        ("csv", b"id,t\r\n1,a\r\n2,b\r\n", b"id,t\r\n1,a\r\n2,b\r\n"),
        ("frames", b"\0\0\0\x02ab", b"\0\0\0\x02ab"),
    ],
)
def test_commands_read_every_record_and_each_line_with_its_line_feed(
    queue: Queue, dropq: Dropq, tmp_path: Path, by: str, format: str, body: bytes, read: bytes
) -> None:
    is_long = TOO_LONG in body
    body = body.replace(TOO_LONG, b"x" * (20 << 20))
    queue.send(body, type=format)
    dropq("work", "q", "--until-empty", by, "--", "sh", "-c", f"cat >>{quote(str(tmp_path / 'read'))}")
    there = tmp_path / "read"
    records = read.partition(b"\n")[2] if format == "csv" else read.removeprefix(b"\0\0\0\x02")
    expected = read if by == "--records" else records
    assert (there.read_bytes() if there.exists() else b"") == expected
    lies = where(queue)
    if is_long:
        assert lies["processed"] == [b"1"] and lies["error"][0].startswith(b"x")
    else:
        assert lies == {"processed": [body]}, "the body stays byte for byte"


def test_a_long_reason_of_a_record_is_cut_and_the_next_one_is_read(queue: Queue, dropq: Dropq) -> None:
    queue.send(lines(1, 3), type="text")
    code, _, _ = work_records(dropq, r"""printf '1\t%100000s\n2\tshort\n' x >"$DROPQ_FAILED" """)
    assert code == 1
    assert sorted(len(str(why["detail"])) for why in reasons(queue).values()) == [len("short"), STDERR_LIMIT]


def test_the_records_that_a_command_reports_fail_and_the_others_are_acknowledged(queue: Queue, dropq: Dropq) -> None:
    id = queue.send(lines(1, 4), type="text").id
    code, _, err = work_records(dropq, r"""printf '2\tno\tnumber\n4\n' >"$DROPQ_FAILED" """)
    assert code == 1 and "2 acknowledged, 2 failed tries in " in err and "2 now in error/" in err
    assert where(queue) == {"processed": [lines(1, 4)], "error": [b"2\n", b"4\n"]}
    assert {key: why["detail"] for key, why in reasons(queue).items()} == {
        f"{id}-2": "no\tnumber",
        f"{id}-4": "sh reported that it failed",
    }


@pytest.mark.parametrize("format", ["text", "csv", "frames"])
def test_numbers_count_the_records_that_the_command_reads(queue: Queue, dropq: Dropq, format: str) -> None:
    bodies = {
        "text": b"1\n2\n3\n4\n",
        "csv": b"id\n1\n2\n3\n4\n",
        "frames": b"".join(b"\0\0\0\x01%d" % number for number in range(1, 5)),
    }
    id = queue.send(bodies[format], type=format).id
    message = take(queue)
    records = list(message.records())
    records[1].ack()
    message.nack()
    code, out, _ = work_records(dropq, r"""cat; echo 2 >"$DROPQ_FAILED" """)
    read = {"text": "1\n3\n4\n", "csv": "id\n1\n3\n4\n", "frames": "\0\0\0\x011\0\0\0\x013\0\0\0\x014"}
    assert (code, out) == (1, read[format])
    assert list(reasons(queue)) == [f"{id}-3"]


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (r"0\n", "line 1 of DROPQ_FAILED names record 0, and the command has read 3"),
        (r"1\n4\n", "line 2 of DROPQ_FAILED names record 4, and the command has read 3"),
        (r"2\n3\n2\tagain\n", "line 3 of DROPQ_FAILED names record 2, which was named before"),
        (r"two\n", "line 1 of DROPQ_FAILED begins with 'two': write the number of a record"),
        (r"1\n\n", "line 2 of DROPQ_FAILED begins with '': write the number of a record"),
        (r"\tno number\n", "line 1 of DROPQ_FAILED begins with '': write the number of a record"),
        (r"-1\n", "line 1 of DROPQ_FAILED begins with '-1': write the number of a record"),
    ],
)
def test_a_report_that_cannot_be_read_fails_the_whole(queue: Queue, dropq: Dropq, report: str, reason: str) -> None:
    id = queue.send(lines(1, 3), type="text").id
    assert work_records(dropq, f"""printf -- '{report}' >"$DROPQ_FAILED" """)[0] == 1
    assert where(queue) == {"error": [lines(1, 3)]}
    assert reasons(queue)[id]["detail"] == reason


def test_a_report_that_is_gone_fails_the_whole(queue: Queue, dropq: Dropq) -> None:
    id = queue.send(lines(1, 3), type="text").id
    assert work_records(dropq, 'rm "$DROPQ_FAILED"')[0] == 1
    assert reasons(queue)[id]["detail"] == "DROPQ_FAILED cannot be read: No such file or directory"


@pytest.mark.parametrize(("status", "state"), [(1, "error"), (65, "error"), (75, "target")])
def test_another_exit_status_settles_the_whole_whatever_was_reported(
    queue: Queue, dropq: Dropq, status: int, state: str
) -> None:
    queue.send(lines(1, 3), type="text")
    work_records(dropq, f'echo 1 >"$DROPQ_FAILED"; exit {status}')
    assert where(queue) == {state: [lines(1, 3)]}


def test_more_failures_than_are_allowed_leave_the_others_of_them_together(tmp_path: Path, dropq: Dropq) -> None:
    queue = make_queue(tmp_path / "other", durability="none", max_record_failures=2)
    queue.send(lines(1, 6), type="text")
    script = r"""printf '1\n2\n4\n5\n' >"$DROPQ_FAILED" """
    root = str(queue.root.path)
    assert main.main(["--root", root, "work", "q", "--until-empty", "--records", "--", "sh", "-c", script]) == 1
    assert where(queue)["error"] == [b"1\n", b"2\n", b"4\n5\n\n"]
    assert {why["reason"] for why in reasons(queue).values()} == {"failed", "too_many_records"}


@pytest.mark.parametrize("options", [{"barrier_expression": "JMSType = 'text'"}, {"semantics": "at-most-once"}])
def test_what_cannot_be_settled_in_part_fails_as_a_whole(tmp_path: Path, options: dict[str, Any]) -> None:
    queue = make_queue(tmp_path / "other", **options)
    queue.send(lines(1, 3), type="text")
    script = ["sh", "-c", r"""printf '2\tno number\n' >"$DROPQ_FAILED" """]
    with BundleCommand(script) as handler, queue.subscribe() as subscription:
        report = run(Sources([subscription]), cast(Handler, handler), Stop(), by="bundle", until_empty=True)
    assert counted(report) == {"failed": 1}
    assert where(queue) == {"processed" if "semantics" in options else "error": [lines(1, 3)]}


def test_a_command_that_leaves_its_input_unread_has_had_all_of_it(queue: Queue, dropq: Dropq) -> None:
    queue.send(lines(1, 100_000), type="text")
    assert work_records(dropq, "read -r line; echo $line")[:2] == (0, "1\n")
    assert queue.counts()["processed"] == 1


def test_a_message_without_records_runs_no_command(queue: Queue, dropq: Dropq) -> None:
    queue.send(b"\n", type="text")
    assert work_records(dropq, "echo here; exit 1")[:2] == (0, "")
    assert where(queue) == {"processed": [b"\n"]}


def test_what_cannot_be_read_is_not_given_to_the_command_and_goes_to_error(queue: Queue, dropq: Dropq) -> None:
    id = queue.send(b"\0\0\0\x01a\0\0\0\x05bc", type="frames").id
    code, out, _ = work_records(dropq, "cat")
    assert (code, out) == (1, "\0\0\0\x01a")
    assert reasons(queue)[id]["reason"] == "unreadable" and queue.counts()["processed"] == 1


@pytest.mark.parametrize("by", ["record", "bundle"])
def test_a_second_request_ends_the_command_and_gives_what_is_left_back(queue: Queue, tmp_path: Path, by: By) -> None:
    queue.send(lines(1, 2), type="text")
    started, stop = tmp_path / "started", Stop()

    def ask_twice() -> None:
        until(started.exists, "the command to run")
        stop.ask()
        stop.ask()

    asking = threading.Thread(target=ask_twice)
    asking.start()
    kind = RecordCommand if by == "record" else BundleCommand
    command = ["sh", "-c", f'[ "$DROPQ_RECORD" = 1 ] || {{ touch "{started}"; sleep 60; }}']
    with kind(command) as handler, queue.subscribe() as subscription:
        report = run(Sources([subscription]), cast(Handler, handler), stop, by=by)
    asking.join()
    assert counted(report) == ({"acked": 1, "returned": 1} if by == "record" else {"returned": 1})
    assert where(queue)["target"] == [lines(2, 2) if by == "record" else lines(1, 2)]


# -- both ------------------------------------------------------------------------------------------------------


def test_each_and_records_exclude_each_other(queue: Queue, dropq: Dropq) -> None:
    code, _, err = work_records(dropq, "cat", "--each")
    assert code == 2 and "not both" in err


@pytest.mark.parametrize("option", ["--each", "--records"])
def test_a_table_is_rejected_with_the_way_out(queue: Queue, dropq: Dropq, option: str) -> None:
    id = queue.send(b"PAR1", type="parquet").id
    code, out, _ = dropq("work", "q", "--until-empty", option, "--", "cat")
    assert (code, out) == (1, "")
    assert reasons(queue)[id]["reason"] == "rejected" and "read it with Spark" in reasons(queue)[id]["detail"]


def test_a_worker_within_a_command_does_not_pass_on_the_variables_of_another_record(
    queue: Queue, dropq: Dropq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPQ_RECORD", "7")
    monkeypatch.setenv("DROPQ_FAILED", "/somewhere")
    queue.send(b"a", type="text")
    code, out, _ = dropq(
        "work", "q", "--until-empty", "--", "sh", "-c", "echo ${DROPQ_RECORD-none} ${DROPQ_FAILED-none}"
    )
    assert (code, out) == (0, "none none\n")
