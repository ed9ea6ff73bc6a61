"""Replies: an answer goes to the queue that a message names, with its correlation, and to nowhere else."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import drop, make_queue, take, where
from workers import reason_in

import dropq
from dropq import InvalidName, NoSuchQueue, Queue, QueueFull, Root, Sent
from dropq.cli import main as cli
from dropq.format.names import temporary_name
from dropq.storage.files import Storage


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Queue]:
    """A queue of requests; `answers` is another queue of its root."""
    with make_queue(tmp_path / "root") as queue:
        queue.root.create_queue("answers", durability="none")
        yield queue


@pytest.fixture
def answers(asked: Queue) -> Iterator[Queue]:
    with asked.root.queue("answers") as queue:
        yield queue


def tree(folder: Path) -> set[str]:
    """Every path below a folder, but for the file server's clock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "clock"}


@pytest.mark.parametrize(
    ("request_has", "answer_has"),
    [({"correlation_id": "c-1"}, "c-1"), ({"message_id": "m-1"}, "m-1"), ({"correlation_id": ""}, None)],
)
def test_an_answer_has_the_correlation_id_of_its_request_else_its_id(
    asked: Queue, answers: Queue, request_has: dict[str, str], answer_has: str | None
) -> None:
    sent = asked.send("question", reply_to="answers", **request_has)  # type: ignore[arg-type]
    request = take(asked)
    reply = request.reply("answer")
    assert request.held and where(asked) == {"processing": [b"question"]}
    answer = take(answers)
    assert (reply, answer.text, answer.message_class) == (Sent(answer.id, True, "answers"), "answer", "T")
    assert answer.correlation_id == (answer_has or sent.id)


def test_an_answer_takes_the_fields_of_send(asked: Queue, answers: Queue) -> None:
    asked.send("question", reply_to="answers", correlation_id="c")
    take(asked).reply(b"\0", correlation_id="mine", priority=9, properties={"n": 1}, message_id="a", reply_to="q")
    answer = take(answers)
    assert (answer.body, answer.correlation_id, answer.priority) == (b"\0", "mine", 9)
    assert (answer.id, answer.properties, answer.reply_to) == ("a", {"n": 1}, "q")


def test_an_answer_may_come_after_the_ack_and_from_who_only_looks(asked: Queue, answers: Queue) -> None:
    asked.send("question", reply_to="answers")
    request = next(asked.browse())
    request.reply("soon")
    held = take(asked)
    held.ack()
    held.reply("done")
    assert where(answers) == {"target": [b"done", b"soon"]}


def test_a_long_request_is_answered_by_what_its_sidecar_says(asked: Queue, answers: Queue) -> None:
    asked.send("question", reply_to="answers", correlation_id="c" * 300)
    take(asked).reply("answer")
    assert take(answers).correlation_id == "c" * 300


def test_an_answer_reaches_the_queue_of_a_root_that_writes_as_dropboxmq_does(tmp_path: Path) -> None:
    with make_queue(tmp_path, dropboxmq=True) as queue:
        queue.send("question", reply_to="q")
        take(queue).reply("answer")
        assert where(queue) == {"processing": [b"question"], "target": [b"answer"]}


def test_a_message_without_a_reply_to_is_not_answered(asked: Queue) -> None:
    asked.send("question", message_id="m")
    before = tree(asked.root.path)
    with pytest.raises(ValueError, match=r"message m of queue q has no reply_to: .*; nothing was sent$"):
        next(asked.browse()).reply("answer")
    assert tree(asked.root.path) == before


def test_a_reply_to_that_names_no_queue_is_told_with_the_message(asked: Queue) -> None:
    asked.send("question", message_id="m", reply_to="answer")
    with pytest.raises(
        NoSuchQueue, match=r"message m of queue q: no queue 'answer'.*is it 'answers'.*nothing was sent"
    ):
        take(asked).reply("answer")


@pytest.mark.parametrize(
    "written", ["%2E%2E%2Foutside", "%2Ftmp", "..", "answers%2Ftarget", "%2Edropq", "q%00", "topic-root", "a" * 256]
)
def test_a_reply_to_that_a_stranger_wrote_never_leads_out_of_the_queues(
    asked: Queue, tmp_path: Path, written: str
) -> None:
    make_queue(tmp_path / "outside")
    reply_to = written.replace("%2E", ".").replace("%2F", "/").replace("%00", "\0")
    if len(written) < 100 and written != "..":
        drop(asked, f"4.1795248503411000-1501319413.T...{written}", b"question")  # as a script writes it
    else:
        asked.send("question", reply_to=reply_to)
    before = tree(tmp_path)
    request = next(asked.browse())
    assert request.reply_to == reply_to
    with pytest.raises(InvalidName, match=r"nothing was sent$"):
        request.reply("answer")
    assert tree(tmp_path) == before


def test_a_queue_for_answers_that_is_full_rejects_them(asked: Queue) -> None:
    asked.root.create_queue("small", durability="none", max_unprocessed=1, overflow="reject")
    asked.send("question", reply_to="small")
    request = take(asked)
    request.reply("first")
    with pytest.raises(QueueFull):
        request.reply("second")
    assert request.held


def test_the_overflow_selector_of_a_full_queue_takes_answers(
    asked: Queue, answers: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = asked.root.create_queue("small", durability="none", max_unprocessed=1)
    small.add_selector("over", to="answers", role="overflow")
    small.send("first")
    sent = asked.send("question", reply_to="small")
    assert take(asked).reply("second").delivered_to == "answers"
    assert run(monkeypatch, asked.root.path, "reply", "q", sent.id, stdin=b"third") == 0
    assert "overflowed=1: queue small was full; they went to answers" in capsys.readouterr().err
    assert where(answers) == {"target": [b"second", b"third"]}


def test_an_answer_to_a_topic_is_distributed(asked: Queue) -> None:
    subscription = asked.root.create_topic("t").create_subscription("s", client_id="c")
    asked.send("question", reply_to="t")
    assert take(asked).reply("answer").distributed
    assert take(subscription).text == "answer"


def test_a_view_that_rejects_takes_no_answer_beyond_its_limit(asked: Queue) -> None:
    asked.root.create_topic("t")
    asked.root.create_queue("view", underlying_topic="t", max_unprocessed=1, overflow="reject").send("first")
    asked.send("question", reply_to="view")
    with pytest.raises(QueueFull, match="queue view is full"):
        take(asked).reply("second")


# -- the command -------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, root: Path, *argv: str, stdin: bytes = b"") -> int:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return cli.main(["--root", str(root), *argv])


def test_the_command_answers_by_receipt_also_after_the_lease_was_renewed(
    asked: Queue, answers: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.send("question", reply_to="answers", correlation_id="c")
    with asked.subscribe(lease_period="1m") as subscription:
        (request,) = subscription.receive_many(1)
        receipt = request.receipt
        assert receipt is not None
        request.extend("5m")
        arguments = ("-p", "n:I=3", "--priority", "7", "--type", "t", "--reply-to", "q", "--id", "a")
        assert run(monkeypatch, asked.root.path, "reply", "q", receipt, *arguments, stdin=b"from stdin") == 0
        assert request.held
    assert capsys.readouterr().out == "a\n"
    answer = take(answers)
    assert (answer.body, answer.correlation_id, answer.priority, answer.type) == (b"from stdin", "c", 7, "t")
    assert (answer.properties, answer.reply_to) == ({"n": 3}, "q")


def test_the_command_answers_by_id_with_a_file_and_another_correlation_id(
    asked: Queue, answers: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_bytes(b"from a file")
    sent = asked.send("question", reply_to="answers")
    arguments = [sent.id, str(tmp_path / "answer"), "--correlation-id", "other"]
    assert run(monkeypatch, asked.root.path, "reply", "q", *arguments) == 0
    assert (tmp_path / "answer").exists()
    assert [(one.body, one.correlation_id) for one in answers.browse()] == [(b"from a file", "other")]


@pytest.mark.parametrize(
    ("reply_to", "code", "said"),
    [(None, 2, "has no reply_to"), ("../../tmp", 2, "cannot name a queue"), ("nowhere", 66, "no queue 'nowhere'")],
)
def test_the_command_says_why_a_message_cannot_be_answered(
    asked: Queue,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reply_to: str | None,
    code: int,
    said: str,
) -> None:
    sent = asked.send("question", reply_to=reply_to)
    assert run(monkeypatch, asked.root.path, "reply", "q", sent.id, stdin=b"answer") == code
    printed = capsys.readouterr()
    assert said in printed.err and "nothing was sent" in printed.err and printed.out == ""


def test_the_command_refuses_a_message_that_is_not_there_and_a_receipt_that_is_settled(
    asked: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, asked.root.path, "reply", "q", "none", stdin=b"answer") == 66
    asked.send("question", reply_to="answers")
    request = take(asked)
    receipt = request.receipt
    assert receipt is not None
    request.ack()
    assert run(monkeypatch, asked.root.path, "reply", "q", receipt, stdin=b"answer") == 1


def test_a_command_of_a_worker_answers_with_what_its_environment_says(asked: Queue, answers: Queue) -> None:
    from dropq.worker.command import Command

    asked.send("question", reply_to="answers", correlation_id="c")
    script = f'tr a-z A-Z | "{sys.executable}" -m dropq reply "$DROPQ_QUEUE" "$DROPQ_RECEIPT" >/dev/null'
    with Command(["sh", "-c", script]) as command:
        report = dropq.work(asked, command, until_empty=True, lease="1m")
    assert report.acked == 1, reason_in(asked, "error")
    assert [(one.text, one.correlation_id) for one in answers.browse()] == [("QUESTION", "c")]


def test_a_shell_script_answers_by_the_fields_of_the_name(asked: Queue, answers: Queue) -> None:
    asked.send("one", reply_to="answers", correlation_id="c-1")
    asked.send("two", reply_to="answers")
    script = """
        set -ef
        IFS='
'
        for name in $(ls q/target); do
            IFS=.
            set -- $name
            answer="4.answer-$2.T..${5:-$2}"
            printf answer > "$6/working/$answer"
            mv "$6/working/$answer" "$6/target/$answer"
        done
    """
    ids = [message.id for message in asked.browse()]
    subprocess.run(["sh", "-c", script], cwd=asked.root.path, check=True)
    found = [(message.id, message.text, message.correlation_id) for message in answers.browse()]
    assert found == [(f"answer-{ids[0]}", "answer", "c-1"), (f"answer-{ids[1]}", "answer", ids[1])]


def test_an_answer_whose_requester_took_it_at_once_and_removed_its_queue_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.create(tmp_path / "root")
    asked, answers = root.create_queue("asked"), temporary_name(root.context.ids.next())
    own = Path(root.path, answers)
    for state in ("working", "target", "processing", "processed", "expired", "error"):
        (own / state).mkdir(parents=True)  # as a script makes it, without a queue.toml
    asked.send("question", reply_to=answers)
    sync = Storage.sync

    def late(self: Storage, *folders: str) -> None:
        if own.exists() and f"{own}/target" in folders:
            shutil.rmtree(own)
        sync(self, *folders)

    monkeypatch.setattr(Storage, "sync", late)
    message = asked.receive()
    assert message is not None
    assert message.reply("answer").accepted
    message.ack()
    assert asked.counts()["processed"] == 1
