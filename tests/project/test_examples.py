"""The examples are true: the sample root is sound and its tour runs, scripts and pipeline keep what they promise."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from helpers import base, files, first_and_long, make_queue, names_in, until, where

import dropq
import dropq.spark
from dropq.diagnosis.fsck import fsck_root
from dropq.format import names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOP = Path(__file__).parents[2]
SHELL = TOP / "examples" / "shell"
SH = shutil.which("dash") or "/bin/sh"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "DROPQ_ROOT"} | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "NO_COLOR": "1",
    "TERM": "xterm",
    "LC_ALL": "C.UTF-8",
}


def module(name: str) -> ModuleType:
    """Load an example as a module."""
    spec = importlib.util.spec_from_file_location(name, TOP / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def sh(script: str, *arguments: str | Path, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run a script of examples/shell."""
    command = [SH, str(SHELL / script), *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload, no-any-return]


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the sample root -------------------------------------------------------------------------------------------


def test_the_scripts_make_what_is_checked_in_byte_for_byte(tmp_path: Path) -> None:
    module("make_sample_root").main(tmp_path / "root")
    checked_in = tree(TOP / "sample_root")
    del checked_in["README.md"]
    checked_in.pop(".dropq/clock", None)  # made by whoever looks at it with dropq
    assert tree(tmp_path / "root") == checked_in
    module("make_data").main(tmp_path / "data")
    assert tree(tmp_path / "data") == tree(TOP / "examples" / "data")


def test_the_sample_root_is_sound_and_so_is_any_copy(tmp_path: Path) -> None:
    for root in (TOP / "sample_root", shutil.copytree(TOP / "sample_root", tmp_path / "copy")):
        found = [
            *fsck_root(dropq.Root(root).context),
            *(item for queue in dropq.Root(root).queues() for item in queue.fsck()),
        ]
        assert [item for item in found if item.open] == []


def test_the_sample_root_has_messages_in_every_state_and_their_reasons(tmp_path: Path) -> None:
    root = dropq.Root(shutil.copytree(TOP / "sample_root", tmp_path / "copy"))
    orders = root.queue("orders").counts()
    assert all(orders[state] for state in ("target", "processing", "processed", "expired", "error"))
    for state in ("error", "expired"):
        assert all(message.reason for message in root.queue("orders").browse(state))
    assert root.queue("invoices").layout.base.endswith("/incoming")


def test_a_reason_without_an_inode_goes_with_its_message(tmp_path: Path) -> None:
    queue = dropq.Root(shutil.copytree(TOP / "sample_root", tmp_path / "copy")).queue("orders")
    assert all(outcome.ok for outcome in queue.requeue())
    assert os.listdir(base(queue) / ".dropq" / "reasons" / "error") == []
    assert [item for item in queue.fsck() if item.kind == "orphan-reason"] == []


def test_a_queue_that_a_keep_file_holds_in_git_can_be_deleted(tmp_path: Path) -> None:
    root = dropq.Root(shutil.copytree(TOP / "sample_root", tmp_path / "copy"))
    with pytest.raises(dropq.StorageError, match="messages to work on"):
        root.delete_queue("invoices")
    for message in root.queue("invoices").browse():
        os.remove(message.path)
    root.delete_queue("invoices")
    assert not (tmp_path / "copy" / "invoices").exists()


# -- the tour --------------------------------------------------------------------------------------------------


def tour() -> list[tuple[str, str]]:
    """Return the commands of the tour, each with the output that is shown for it."""
    steps: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", (TOP / "sample_root/README.md").read_text(), re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in steps]


def take_tour(commands: Sequence[str], folder: Path) -> list[str]:
    """Run commands in one shell on a terminal; return what each printed."""
    mark = "@@@@"
    script = "\n".join(f"echo {mark}\n{command.replace('/tmp/shop', quote(f'{folder}/shop'))}" for command in commands)
    leader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, 110))
    child = subprocess.Popen(
        [SH, "-c", script],
        cwd=TOP, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    printed = b""
    while True:
        try:
            chunk = os.read(leader, 1 << 16)
        except OSError:  # how Linux says that the last of the other end is closed
            break
        if not chunk:
            break
        printed += chunk
    os.close(leader)
    assert child.wait() is not None
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode())
    return plain.replace("\r\n", "\n").split(f"{mark}\n")[1:]


def pattern(shown: str) -> str:
    """Make a pattern of what is shown: any white space is as good as any other.

    In it … stands for what varies within a line, and [...] for lines that are left out.
    """
    words = (r"(?s:.*)" if word == "[...]" else re.escape(word).replace("…", ".*") for word in shown.split())
    return r"\s*" + r"\s+".join(words) + r"\s*"


def test_the_tour_of_the_sample_root_shows_what_it_says(tmp_path: Path) -> None:
    steps = tour()
    printed = take_tour([command for command, _ in steps], tmp_path)
    for (command, shown), output in zip(steps, printed, strict=True):
        output = output.replace(f"{tmp_path}/shop", "/tmp/shop")
        assert re.fullmatch(pattern(shown), output), f"$ {command}\n{output}"


# -- drop.sh and take.sh ---------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["flat", "incoming"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> dropq.Queue:
    return make_queue(tmp_path / "root", dropboxmq=request.param)


def next_tick(queue: dropq.Queue) -> None:
    """Wait until the file system's clock, which moves in steps, has moved: age is all that take.sh orders by."""
    probe = base(queue) / "probe"

    def now() -> int:
        probe.touch()
        return probe.stat().st_ctime_ns

    before = now()
    until(lambda: now() > before, "the file system's clock to move")


def test_what_drop_sh_sends_is_received_in_its_order(queue: dropq.Queue, tmp_path: Path) -> None:
    bodies = [b"one", b"", b"\0three\n"]
    paths = [tmp_path / name for name in ("a b", "-f", "c;*")]
    for path, body in zip(paths, bodies, strict=True):
        path.write_bytes(body)
    done = sh("drop.sh", queue.root.path, "q", *(path.name for path in paths), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [message.file for message in queue.browse()]
    assert [message.body for message in queue.browse()] == bodies
    assert all(names.parse(message.file).generated for message in queue.browse())
    assert queue.counts()["working"] == 0


def test_drop_sh_sends_standard_input_and_says_what_it_could_not_send(queue: dropq.Queue, tmp_path: Path) -> None:
    done = sh("drop.sh", queue.root.path, "q", tmp_path / "not-there", "-", input="from a pipe")
    assert done.returncode == 1
    assert "not-there was not sent" in done.stderr
    assert where(queue) == {"target": [b"from a pipe"]}
    assert sh("drop.sh", queue.root.path, "no-such", "-", input="").returncode == 66
    assert sh("drop.sh", queue.root.path, "q").returncode == 2


def test_take_sh_takes_one_and_puts_it_where_its_end_says(queue: dropq.Queue) -> None:
    for body in (b"good", b"bad", b"waits"):
        queue.send(body)
        next_tick(queue)
    command = ("sh", "-c", 'cat && grep -q good "$0"')
    first = sh("take.sh", queue.root.path, "q", *command)
    assert (first.returncode, first.stdout) == (0, "good")
    assert sh("take.sh", queue.root.path, "q", *command).returncode == 1
    assert where(queue) == {"processed": [b"good"], "error": [b"bad"], "target": [b"waits"]}
    assert sh("take.sh", queue.root.path, "q", "true").returncode == 0
    assert sh("take.sh", queue.root.path, "q", "true").returncode == 66
    assert sh("take.sh", queue.root.path, "no-such", "true").returncode == 66


def test_take_sh_respects_the_read_locks(queue: dropq.Queue) -> None:
    queue.send(b"waits")
    for lockable in (queue, queue.root):
        lockable.pause()
        assert sh("take.sh", queue.root.path, "q", "true").returncode == 66
        lockable.resume()
    assert sh("take.sh", queue.root.path, "q", "true").returncode == 0


def test_take_sh_passes_over_what_is_no_message(queue: dropq.Queue, tmp_path: Path) -> None:
    target = base(queue) / "target"
    (target / "folder").mkdir()
    (target / "link").symlink_to(tmp_path)
    for name in (".hidden", "_SUCCESS", "upload.part"):
        (target / name).touch()
    os.mkfifo(target / "fifo")
    before = sorted(os.listdir(target))
    assert sh("take.sh", "-a", queue.root.path, "q", "true").returncode == 0
    assert sorted(os.listdir(target)) == before


def test_take_sh_replaces_no_file_of_the_same_name(queue: dropq.Queue) -> None:
    for state, code in (("processed", "true"), ("error", "false")):
        for body in (b"first", b"second", b"third"):
            (base(queue) / "target" / "odd name*.csv").write_bytes(body)
            sh("take.sh", queue.root.path, "q", code)
        assert where(queue)[state] == [b"first", b"second", b"third"]
        assert "odd name*.csv" in files(base(queue) / state)


def test_a_message_that_take_sh_held_when_it_was_killed_comes_back_counted(queue: dropq.Queue, tmp_path: Path) -> None:
    (base(queue) / "target" / "report~2.csv").write_bytes(b"body")
    started = tmp_path / "started"
    command = [SH, str(SHELL / "take.sh"), str(queue.root.path), "q", "sh", "-c", f"touch '{started}'; sleep 30"]
    child = subprocess.Popen(command, env=ENVIRONMENT | {"TAKE_LEASE": "1"}, start_new_session=True)
    until(started.exists, "the command to run")
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert [message.id for message in queue.browse("processing")] == ["report~2.csv"]
    until(lambda: queue.sweep().lapsed, "the lease to run out")
    message = queue.receive()
    assert message is not None
    assert (message.id, message.body, message.delivery_count) == ("report~2.csv", b"body", 2)


def test_take_sh_that_lost_its_claim_changes_nothing(queue: dropq.Queue) -> None:
    queue.send(b"body")
    take_back = f"dropq --root '{queue.root.path}' requeue q --state processing --all --yes"
    done = sh("take.sh", queue.root.path, "q", "sh", "-c", take_back)
    assert done.returncode == 1
    assert "is gone" in done.stderr
    assert where(queue) == {"target": [b"body"]}


def test_a_signal_gives_back_what_take_sh_holds_or_ends_it_after_that(queue: dropq.Queue, tmp_path: Path) -> None:
    queue.send(b"body")
    started = tmp_path / "started"
    command = [SH, str(SHELL / "take.sh"), "-a", str(queue.root.path), "q", "sh", "-c", f"touch '{started}'; sleep 30"]
    child = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True)
    until(started.exists, "the command to run")
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait() == 143
    message = queue.receive()
    assert message is not None
    assert (message.body, message.delivery_count) == (b"body", 2)


def test_shell_and_dropq_share_a_queue_and_each_message_is_handled_once(queue: dropq.Queue, tmp_path: Path) -> None:
    inbox, seen = tmp_path / "inbox", tmp_path / "seen"
    inbox.mkdir()
    seen.mkdir()
    for number in range(40):
        (inbox / f"{number}").write_text(f"{number}")
    halves = [sorted(inbox.iterdir())[start::2] for start in (0, 1)]
    droppers = [
        subprocess.Popen([SH, str(SHELL / "drop.sh"), str(queue.root.path), "q", *map(str, half)], env=ENVIRONMENT)
        for half in halves
    ]
    # Whoever handles a message writes its body to a file of the handler's own: two of them would be two lines.
    script = f'cd "{seen}"; cat >> $$; echo >> $$; exit 0; # "$0"'
    command = [SH, str(SHELL / "take.sh"), "-a", str(queue.root.path), "q", "sh", "-c", script]
    got: list[str] = []

    def receive() -> None:
        with queue.subscribe() as subscription:
            while (message := subscription.receive(timeout=1)) is not None:
                got.append(message.text)
                message.ack()

    thread = threading.Thread(target=receive)
    thread.start()
    while any(dropper.poll() is None for dropper in droppers) or queue.counts()["target"]:
        takers = [subprocess.Popen(command, env=ENVIRONMENT) for _ in range(3)]
        assert [taker.wait() for taker in takers] == [0, 0, 0]
    thread.join()
    handled = [line for path in seen.iterdir() for line in path.read_text().split()] + got
    assert Counter(handled) == Counter(str(number) for number in range(40))
    assert len(where(queue)["processed"]) == 40
    assert set(where(queue)) == {"processed"}


# -- requests and answers --------------------------------------------------------------------------------------

#: Both sides of a request, by dropq and by what needs no dropq; a responder puts what it reads in capitals.
ASKING = {
    "dropq": ["dropq", "send", "q", "--wait-reply", "20s"],
    "mv": [SH, str(SHELL / "ask.sh"), "{root}", "q", "20"],
}
UPPER = ("tr", "a-z", "A-Z")
ANSWERING = {
    "dropq": ["dropq", "work", "q", "--", "sh", "-c", 'tr a-z A-Z | dropq reply "$DROPQ_QUEUE" "$DROPQ_RECEIPT"'],
    "mv": [SH, str(SHELL / "take.sh"), "-a", "{root}", "q", SH, str(SHELL / "answer.sh"), "{root}", *UPPER],
}


def at(root: Path, command: list[str]) -> list[str]:
    return [word.replace("{root}", str(root)) for word in command]


@pytest.mark.parametrize("dropboxmq", first_and_long([False, True]), ids=["", "dropboxmq"])
@pytest.mark.parametrize("answered_by", ANSWERING)
@pytest.mark.parametrize("asked_by", ASKING)
def test_shell_and_dropq_ask_and_answer_each_other(
    tmp_path: Path, asked_by: str, answered_by: str, dropboxmq: bool
) -> None:
    queue = make_queue(tmp_path / "root", dropboxmq=dropboxmq)
    environment = {**ENVIRONMENT, "DROPQ_ROOT": str(queue.root.path)}
    responders: list[subprocess.Popen[bytes]] = []

    def respond() -> None:  # take.sh ends when nothing waits; dropq's worker waits for more
        if not responders or responders[-1].poll() is not None:
            command = at(queue.root.path, ANSWERING[answered_by])
            responders.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))

    def ask(number: int) -> subprocess.Popen[str]:
        command = at(queue.root.path, ASKING[asked_by])
        asking = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert asking.stdin is not None
        asking.stdin.write(f"question {number}")
        asking.stdin.close()
        asking.stdin = None
        return asking

    requesters = [ask(number) for number in range(3)]
    try:

        def are_done() -> bool:
            respond()
            return all(one.poll() is not None for one in requesters)

        until(are_done, "all answers")
        assert [one.communicate()[0] for one in requesters] == [f"QUESTION {number}" for number in range(3)]
    finally:
        for process in [process for group in (requesters, responders) for process in group]:
            process.terminate()
            process.wait(10)
    assert [one.returncode for one in requesters] == [0, 0, 0]
    assert [each.name for each in queue.root.queues()] == ["q"]
    assert len(where(queue)["processed"]) == 3


def test_ask_sh_without_an_answer_in_time_leaves_its_request_alone(queue: dropq.Queue) -> None:
    asked = sh("ask.sh", queue.root.path, "q", "0", input="question")
    assert (asked.returncode, asked.stdout) == (75, "")
    assert where(queue) == {"target": [b"question"]}
    (request,) = queue.browse()
    assert f"no answer to {request.id}" in asked.stderr
    with pytest.raises(dropq.NoSuchQueue):
        request.reply("late")
    late = sh("take.sh", queue.root.path, "q", SH, SHELL / "answer.sh", queue.root.path, "cat")
    assert late.returncode == 1 and f"nobody waits for the answer to {request.id}" in late.stderr
    assert where(queue) == {"error": [b"question"]}
    assert not [name for name in os.listdir(queue.root.path) if "temp-" in name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ask_sh_leaves_no_queue_when_a_signal_ends_it(queue: dropq.Queue, number: signal.Signals) -> None:
    command = [SH, str(SHELL / "ask.sh"), str(queue.root.path), "q", "60", os.devnull]
    child = subprocess.Popen(command, env=ENVIRONMENT)
    until(lambda: where(queue), "the request")
    child.send_signal(number)
    assert child.wait() == 128 + number
    assert not [name for name in os.listdir(queue.root.path) if "temp-" in name]


@pytest.mark.parametrize(
    ("script", "arguments", "code"),
    [
        ("ask.sh", ["{root}", "q"], 2),
        ("ask.sh", ["{root}", "q", "soon"], 2),
        ("ask.sh", ["{root}", "nowhere", "1"], 66),
        ("ask.sh", ["{root}", "q", "1", "missing"], 1),
        ("answer.sh", ["{root}", "cat"], 2),
        ("answer.sh", ["{root}", "cat", "report.csv"], 1),
        ("answer.sh", ["{root}", "cat", "4.1.B...%2E%2E%2Fq"], 1),
        ("answer.sh", ["{root}", "cat", "4.1.B...nowhere"], 1),
        ("answer.sh", ["{root}", "false", "4.1.B...q"], 1),
    ],
)
def test_ask_sh_and_answer_sh_refuse_what_cannot_be(
    queue: dropq.Queue, script: str, arguments: list[str], code: int
) -> None:
    ran = sh(script, *at(queue.root.path, arguments), input="body")
    assert ran.returncode == code and ran.stderr
    assert where(queue) == {}
    assert [each.name for each in queue.root.queues()] == ["q"]


# -- the pipeline ----------------------------------------------------------------------------------------------


class Shop:
    """The pipeline of examples/enrich_orders.py in a root of its own, from the dropped files to the book."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        dropq.spark.register(spark)
        root = dropq.Root.create(folder / "root")
        self.orders = root.create_queue("orders", durability="none")
        self.postings = root.create_queue("postings", durability="none")
        self.pipeline = module("enrich_orders")
        self.articles = shutil.copy(TOP / "examples/data/articles.csv", folder)
        self.checkpoint = folder / "checkpoint"
        self.book = folder / "postings.csv"
        self._spark = spark

    def start(self, **trigger: Any) -> Any:
        """Start the stream."""
        root, checkpoint = str(self.orders.root.path), str(self.checkpoint)
        return self.pipeline.start(self._spark, root, checkpoint, str(self.articles), **trigger)

    def run(self) -> None:
        """Run the stream until it ends, as cron does."""
        self.start(availableNow=True).awaitTermination()

    def run_cut_off(self) -> None:
        """Run the stream, and see it fail."""
        with pytest.raises(Exception, match="cut off"):
            self.run()

    def drop(self, *paths: Path) -> None:
        """Drop files by the script."""
        assert sh("drop.sh", self.orders.root.path, "orders", *paths).returncode == 0

    def drop_order(self, number: int, sku: str) -> None:
        """Drop an order of two pieces at 10.05."""
        items = [{"sku": sku, "quantity": 2, "price": "10.05"}]
        self.orders.send(json.dumps({"order": number, "items": items}))

    def booked(self) -> dict[tuple[str, ...], Decimal]:
        """Book what waits in postings, all of which must go well; return what is booked for each order."""
        handle = f"{quote(str(SHELL / 'book.sh'))} {quote(str(self.book))}"
        command = f"dropq --root {quote(str(self.orders.root.path))} work postings --until-empty -- {handle}"
        subprocess.run([SH, "-c", command], env=ENVIRONMENT, check=True, capture_output=True)
        return module("demo").book(self.book, "order")  # type: ignore[no-any-return]

    def reasons(self) -> dict[bytes, str]:
        """Return what is in error/, with its reasons."""
        return {message.body: str((message.reason or {})["detail"]) for message in self.orders.browse("error")}

    def counts(self) -> dict[str, int]:
        """Return how many orders lie in each state."""
        return {state: len(bodies) for state, bodies in where(self.orders).items()}

    def lying(self) -> tuple[Any, ...]:
        """Return what lies where."""
        return where(self.orders), where(self.postings), self.book.read_bytes()


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Shop:
    return Shop(spark, tmp_path)


ORDERS = TOP / "examples" / "data" / "orders"


@pytest.mark.long
def test_the_pipeline_books_each_good_order_once_and_rejects_the_others_with_their_reasons(shop: Shop) -> None:
    shop.drop(*ORDERS.iterdir())
    shop.run()
    bad = {name: (ORDERS / f"order-{name}.json").read_bytes() for name in (1106, 1114, 1121)}
    assert shop.reasons() == {
        bad[1106]: "order 1106: there is no article LT-300",
        bad[1114]: "broken off, or no order at all: Unterminated string starting at: line 8 column 7 (char 133)",
        bad[1121]: "order 1121: there is no article LT-300",
    }
    assert shop.counts() == {"processed": 21, "error": 3}
    ordered = module("demo").orders(path for path in ORDERS.iterdir() if path.read_bytes() not in bad.values())
    booked = shop.booked()
    assert booked == ordered
    assert (len(booked), sum(booked.values())) == (21, Decimal("13253.20"))
    with shop.book.open() as file:
        one = [(row["group"], row["text"], row["amount"]) for row in csv.DictReader(file) if row["order"] == "1105"]
    assert sorted(one) == [("kitchen", "1 Mug", "7.50"), ("seating", "1 Stool, 2 Armchair Petrol", "737.00")]

    before = shop.lying()
    shop.run()  # nothing new
    assert shop.booked() == ordered
    assert shop.lying() == before


@pytest.mark.long
def test_a_stream_cut_off_before_its_commit_posts_nothing_twice(shop: Shop) -> None:
    for number in (1, 2, 3):
        shop.drop_order(number, "MG-001")
    shop.drop_order(4, "none")
    query = shop.start(processingTime="1 hour")  # which acknowledges its first batch when it plans the second
    commit = shop.checkpoint / "commits" / "0"
    until(commit.exists, "the first batch")
    query.stop()
    commit.unlink()
    (commit.parent / ".0.crc").unlink()
    assert shop.counts() == {"processing": 3, "error": 1}
    posted = names_in(shop.postings, "target")
    shop.run()
    assert names_in(shop.postings, "target") == posted
    assert shop.counts() == {"processed": 3, "error": 1}
    assert list(shop.booked().values()) == [Decimal("20.10")] * 3


@pytest.mark.long
def test_articles_that_become_known_while_a_stream_is_cut_off_cost_no_order(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.drop_order(1, "MG-001")
    shop.drop_order(2, "new")
    with monkeypatch.context() as cut:
        cut.setattr(shop.pipeline, "post", cut_off_after(lambda *_: None))
        shop.run_cut_off()
        assert shop.counts() == {"processing": 1, "error": 1}
        with open(shop.articles, "a") as articles:
            articles.write("new,Known by now,seating\n")
        cut.undo()
        cut.setattr(shop.pipeline, "post", cut_off_after(shop.pipeline.post))
        shop.run_cut_off()
    posted = names_in(shop.postings, "target")
    assert [outcome.ok for outcome in shop.orders.requeue()] == [True]
    shop.run()  # the first batch again, then the one that was requeued
    assert shop.counts() == {"processed": 2}
    assert len(posted) == 1 and len(names_in(shop.postings, "target")) == 2
    assert shop.booked() == {("1",): Decimal("20.10"), ("2",): Decimal("20.10")}


@pytest.mark.long
def test_a_batch_of_bad_orders_alone_posts_nothing_and_the_stream_goes_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in BAD_ORDERS:
        shop.orders.send(body)
    with monkeypatch.context() as cut:
        cut.setattr(shop.pipeline, "post", cut_off_after(shop.pipeline.post))
        shop.run_cut_off()
    shop.drop_order(1, "MG-001")
    shop.run()
    assert shop.reasons().keys() == BAD_ORDERS.keys()
    assert shop.booked() == {("1",): Decimal("20.10")}


def cut_off_after(step: Callable[..., None]) -> Callable[..., None]:
    """Return a step of the pipeline after which it dies."""

    def cut_off(*arguments: Any) -> None:
        step(*arguments)
        raise RuntimeError("cut off")

    return cut_off


def line(**item: object) -> bytes:
    """Return an order of one item."""
    return json.dumps({"order": 1, "items": [{"sku": "MG-001", "quantity": 1, "price": "7.50"} | item]}).encode()


#: What is no order, and how the reason begins that people read.
BAD_ORDERS = {
    b"": "neither JSON nor a CSV with the columns order, sku, quantity, price",
    b"hello": "neither JSON nor a CSV",
    b"order,sku,price\n1,MG-001,7.50\n": "neither JSON nor a CSV",
    b"order,sku,quantity,price\n": "there are no items in it",
    b'order,sku,quantity,price\n1,"MG-0\n': "broken off, or no order at all: unexpected end",
    b"order,sku,quantity,price\n1,MG-001,2,1249": "broken off: the last line has no line end",
    b"order,sku,quantity,price,price\n1,MG-001,1,3.00,9.00\n": "the heading has the column price more than once",
    b'{"order": 1, "items": [{"sku": "MG-001", "quantity": 1, "price": 7.5, "quantity": 5}]}': "'quantity' is there",
    b"order,sku,quantity,price\n1,MG-001,2,3,50\n": "order '1', article 'MG-001': the line has more fields than the",
    b"order,sku,quantity,price\n1,MG-001\n": "order '1', article 'MG-001': quantity is None, not a whole number",
    b"order,sku,quantity,price\n1,MG-001,1,7.5O\n": "order '1', article 'MG-001': price is '7.5O', not an amount",
    b"{": "broken off, or no order at all: ",
    b'{"a":' * 100_000: "broken off, or no order at all: ",
    b"\xff\xfe{": "broken off, or no order at all: 'utf-8' codec",
    b'{"order": 1}': "there are no items in it",
    b'{"order": 1, "items": {}}': "there are no items in it",
    b'{"order": 1, "items": [7]}': "there are no items in it",
    b'{"items": [{"sku": "MG-001", "quantity": 1, "price": 7.5}]}': "order None, article 'MG-001': order is None",
    line(price=float("nan")): "order 1, article 'MG-001': price is nan, not",
    line(sku="\ud800"): r"order 1, article '\ud800': sku is '\ud800', not the number of an article",
    line(sku=["x" * 1000]): "order 1, article ['xxxx",
    line(quantity=0): "order 1, article 'MG-001': quantity is 0, not a whole number, and not 0",
    line(quantity=1.5): "order 1, article 'MG-001': quantity is '1.5', not",
    line(quantity=True): "order 1, article 'MG-001': quantity is True, not",
    line(quantity=10**12): "order 1, article 'MG-001': quantity is 1000000000000, not",
    line(price=-1): "order 1, article 'MG-001': price is -1, not an amount such as 7.50",
    line(price="1e9"): "order 1, article 'MG-001': price is '1e9', not",
}


def test_what_is_no_order_has_a_reason_for_people() -> None:
    read_lines = module("enrich_orders").read_lines
    for body, reason in BAD_ORDERS.items():
        [(*columns, problem)] = read_lines(body)
        assert columns == [None] * 4
        assert problem.startswith(reason), problem
        assert len(problem) < 150


def test_orders_are_read_as_json_and_as_csv_with_returns_and_the_mark_of_a_spreadsheet() -> None:
    read_lines = module("enrich_orders").read_lines
    mug = ("1", "MG-001", -2, Decimal("7.5"), None)
    assert read_lines(line(quantity=-2, price=7.5)) == [mug]
    rows = '\ufeffsku,order,quantity,price,note\r\nMG-001,1,-2,7.5,"a\nb"\r\n,,,,\r\n'
    assert read_lines(rows.replace(",,,,\r\n", "").encode()) == [mug]
    assert read_lines(rows.encode())[0][4] == "order '', article '': order is '', not a number or a name"


def test_book_sh_enters_rows_once_below_one_heading(tmp_path: Path) -> None:
    book = tmp_path / "book.csv"
    first, second = '"a","b"\nx,1\ny\\n,2\n', '"a","b"\ny\\n,2\nz,3'
    for message in (first, second, first):
        done = sh("book.sh", book, input=message)
        assert (done.returncode, done.stderr) == (0, "")
    assert book.read_text() == '"a","b"\nx,1\ny\\n,2\nz,3\n'
    for message in ("", "\n", '"a","c"\n1,2\n'):
        done = sh("book.sh", book, input=message)
        assert done.returncode == 65
        assert "heading" in done.stderr
    assert book.read_text() == '"a","b"\nx,1\ny\\n,2\nz,3\n'
    assert [path.name for path in tmp_path.iterdir()] == ["book.csv"]


# -- a log in a database ---------------------------------------------------------------------------------------

NEEDS_SQLITE = pytest.mark.skipif(shutil.which("sqlite3") is None, reason="sqlite3 is not installed")


@pytest.mark.host
@NEEDS_SQLITE
def test_a_log_that_grows_is_in_a_database_and_bad_lines_are_repaired_and_requeued(tmp_path: Path) -> None:
    queue, log, database = make_queue(tmp_path / "root"), tmp_path / "requests.log", tmp_path / "requests.db"
    root = {**ENVIRONMENT, "DROPQ_ROOT": str(queue.root.path)}

    def run(script: str) -> str:
        done = subprocess.run([SH, "-c", script], env=root, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    def waits(count: int) -> Callable[[], bool]:
        return lambda: sum(body.count(b"\n") for body in where(queue).get("target", [])) == count

    work = f"dropq work q --until-empty --records -- {quote(str(SHELL / 'insert.sh'))} {quote(str(database))}"
    rows = f"sqlite3 {quote(str(database))} 'SELECT id, ms FROM requests ORDER BY id'"
    log.write_text("a1 2026-11-23T14:02:11 35\nb2 2026-11-23T14:02:12 5o\n")
    with subprocess.Popen(["tail", "-n", "+1", "-F", log], stdout=subprocess.PIPE) as tail:
        sender = subprocess.Popen(
            ["dropq", "send", "q", "--records", "--format", "text", "--linger", "50ms"], stdin=tail.stdout, env=root
        )
        until(waits(2), "the first lines")
        with log.open("a") as file:
            file.write("c'3 2026-11-23T14:02:13 7\nd4 yesterday 3\n")
        until(waits(4), "the next lines")
        tail.terminate()
        assert sender.wait() == 0
    run(work)
    assert run(rows) == "a1|35\nc'3|7\n"
    bad = sorted(queue.browse("error"), key=lambda message: message.body)
    assert [message.body for message in bad] == [b"b2 2026-11-23T14:02:12 5o\n", b"d4 yesterday 3\n"]
    assert all("CHECK constraint failed" in str((message.reason or {})["detail"]) for message in bad)

    for message, repaired in zip(bad, ("b2 2026-11-23T14:02:12 50", "d4 2026-11-22T08:00:00 3"), strict=True):
        Path(message.path).write_text(f"{repaired}\n")
        run(f"dropq requeue q {message.id}")
    run(work)
    assert run(rows) == "a1|35\nb2|50\nc'3|7\nd4|3\n"
    assert set(where(queue)) == {"processed"}


@pytest.mark.host
@NEEDS_SQLITE
def test_insert_sh_asks_for_another_try_where_the_database_cannot_be_written_to(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root", redelivery_delay="1h")
    queue.send(b"a1 2026-11-23T14:02:11 35\n", type="text")
    command = ["dropq", "work", "q", "--until-empty", "--records", "--", str(SHELL / "insert.sh"), "missing/x.db"]
    environment = {**ENVIRONMENT, "DROPQ_ROOT": str(queue.root.path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "unable to open database" in done.stderr
    assert where(queue) == {"delayed": [b"a1 2026-11-23T14:02:11 35\n"]}


# -- filters -------------------------------------------------------------------------------------------------------


def test_a_chain_of_filters_whose_workers_are_killed_makes_one_bill_of_each_order(tmp_path: Path) -> None:
    done = sh("pipeline.sh", "12", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("orders=12 bills=12 missing=0 twice=0\nkilled=2 done_again=")


@pytest.mark.parametrize(
    ("command", "counts"),
    first_and_long(
        [
            ('dropq purge bills --state target --yes "$ID"', "bills=2 missing=1 twice=0"),
            (
                "dropq cat bills $ID | dropq send bills -q --correlation-id $(head -n 1 ids)",
                "bills=4 missing=0 twice=1",
            ),
            ('sed -i s/pay/owe/ bills/target/*"$ID"*', "bills=3 missing=0 twice=0"),
        ]
    ),
    ids=["missing", "twice", "wrong"],
)
def test_the_count_of_a_chain_of_filters_finds_what_is_missing_twice_or_wrong(
    tmp_path: Path, command: str, counts: str
) -> None:
    (tmp_path / "dropq").write_text(f"""#!/bin/sh
PATH=${{PATH#*:}}
if [ "$1 $2" = "browse bills" ] && mkdir {quote(str(tmp_path))}/done 2>/dev/null; then
    ID=$(dropq browse bills -n 1 | cut -f 1)
    {{ {command}; }} >&2
fi
exec dropq "$@"
""")
    (tmp_path / "dropq").chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"}
    script = [SH, str(SHELL / "pipeline.sh"), "3", "0"]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert counts in done.stdout


# -- the demo --------------------------------------------------------------------------------------------------


def test_the_accounting_finds_what_is_missing_altered_twice_or_unheard_of(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    for body in (b"a", b"a", b"b"):
        queue.send(body)
    ledger = tmp_path / "ledger"
    ledger.write_text("".join(f"{hashlib.sha256(body).hexdigest()}  x\n" for body in (b"a", b"b", b"a")))
    accounts = [SH, str(SHELL / "account.sh"), str(tmp_path / "root"), str(ledger)]

    def verdict() -> tuple[int, str]:
        done = subprocess.run(accounts, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert verdict()[0] == 0
    paths = sorted((base(queue) / "target").iterdir())
    paths[0].write_bytes(b"A")
    assert verdict()[0] == 1
    assert "MISSING" in verdict()[1] and "NOT IN THE LEDGER" in verdict()[1]
    paths[0].write_bytes(b"a")
    assert verdict()[0] == 0
    shutil.copy(paths[2], base(queue) / "error" / "copy")
    assert verdict()[0] == 1
    os.remove(base(queue) / "error" / "copy")
    os.remove(paths[1])
    assert verdict()[0] == 1


def test_the_accounting_looks_into_topics_and_subscriptions(tmp_path: Path) -> None:
    sales = dropq.Root.create(tmp_path / "root").create_topic("sales")
    audit = sales.create_subscription("audit", client_id="hq")
    sales.publish("a")
    ledger = tmp_path / "ledger"
    ledger.write_text(f"{hashlib.sha256(b'a').hexdigest()}  x\n" * 2)
    accounts = [SH, str(SHELL / "account.sh"), str(tmp_path / "root"), str(ledger)]
    assert subprocess.run(accounts, capture_output=True, check=False).returncode == 0
    with audit.receive() as message:  # type: ignore[union-attr]
        assert subprocess.run(accounts, capture_output=True, check=False).returncode == 0
        os.remove(message.path)
        assert subprocess.run(accounts, capture_output=True, check=False).returncode == 1
        Path(message.path).write_bytes(b"a")


def test_the_demo_tells_each_subscription_what_it_asked_for(tmp_path: Path) -> None:
    demo = module("demo")
    played = demo.Demo(tmp_path)
    played.begin()
    sold = demo.sales(TOP / "examples/data/sales.csv")
    rows = "".join(f"{store},{day},1,{amount}\n" for (store, day), amount in sold.items())
    (tmp_path / "daily-sales.csv").write_text(f"store,day,items,amount\n{rows}")
    played.tell()
    of_the_day = {key: amount for key, amount in sold.items() if key[1] == demo.DAY}
    assert demo.book(tmp_path / "office.csv", "store", "day") == of_the_day
    assert demo.book(tmp_path / "ulm.csv", "store", "day") == {
        key: amount for key, amount in of_the_day.items() if key[0] == "Ulm"
    }


def test_the_demo_brings_a_dead_letter_back_to_its_queue_and_ships_each_order_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = module("demo").Demo(tmp_path)
    played.begin()
    played.ship()
    printed = capsys.readouterr().out
    before, _, after = printed.partition("dropq requeue lost ")
    assert "order-1103\tselector eu: it has no credit left of 2" in before
    assert "order-1105\tshipping\tunroutable" in before
    assert "order-1105\tok\trequeued to shipping" in after
    assert sorted(SHIPPED.findall(before)) == ["order 1101 to eu", "order 1102 to eu", "order 1104 to us"]
    assert sorted(SHIPPED.findall(after)) == ["order 1103 to eu", "order 1105 to uk"]

    root = dropq.Root(tmp_path / "root")
    shipping, lost, eu, us = (root.queue(name) for name in ("shipping", "lost", "eu", "us"))
    assert {name: count for queue in (shipping, lost) for name, count in queue.counts().items() if count} == {}
    assert [len(names_in(queue, "processed")) for queue in (eu, us)] == [4, 1]
    [repaired] = [message for message in eu.browse("processed") if message.id == "order-1105"]
    assert (repaired.properties["region"], repaired.delivery_count) == ("uk", 1)
    account = sh("account.sh", tmp_path / "root", tmp_path / "ledger")
    assert account.returncode == 0, account.stdout


def test_the_demo_enters_each_row_of_a_store_once_by_handlers_and_by_commands(tmp_path: Path) -> None:
    demo = module("demo")
    played = demo.Demo(tmp_path)
    played.begin()
    sales = (TOP / "examples/data/sales.csv").read_text().splitlines(keepends=True)
    rows = [row for row in sales if row.startswith(demo.DAY)]
    (tmp_path / "till.csv").write_text("".join(rows))
    played.filter()
    bodies = [
        sorted(path.read_text() for path in (tmp_path / "root" / name / "target").iterdir())
        for name in ("entries", "entries-py")
    ]
    assert bodies[0] == bodies[1]
    assert [body.split()[1] for body in bodies[0]] == sorted(row.split(",")[2] for row in rows if ",Kassel," in row)
    account = sh("account.sh", tmp_path / "root", tmp_path / "ledger")
    assert account.returncode == 0, account.stdout


#: A line that a worker of the demo prints for an order that it ships.
SHIPPED = re.compile(r"^ +(order \d+ to \w+)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("stream", "ending"),
    [
        ("touch ready; exec sleep 60", None),
        ("trap '' TERM; touch ready; exit 3", "ended with 3"),
        ("trap '' TERM; touch ready; while :; do sleep 0.1; done", "ended with -9"),
    ],
    ids=["ends when it is told to", "died", "ignores what it is told"],
)
def test_the_demo_sees_how_its_stream_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str, ending: str | None
) -> None:
    demo = module("demo")
    monkeypatch.setattr(demo, "ENDING", 0.3)
    played = demo.Demo(tmp_path)
    (tmp_path / "python").write_text(f"#!/bin/sh\n{stream}\n")
    (tmp_path / "python").chmod(0o755)
    played.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    with pytest.raises(SystemExit, match=ending) if ending else nullcontext(), played.stream():
        until((tmp_path / "ready").exists, "the stream to run")


@pytest.mark.spark
@pytest.mark.timeout(300)  # it starts two Spark sessions of its own
def test_the_demo_accounts_for_every_file_and_fails_where_one_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, str(TOP / "examples" / "demo.py"), "--keep", str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Every file is accounted for." in done.stdout
    assert "order-1105\tok\trequeued to shipping" in done.stdout
    assert SHIPPED.findall(done.stdout).count("order 1105 to uk") == 1
    assert "1 now in error/" in done.stdout
    assert len(done.stdout.splitlines()) < 210

    demo = module("demo").Demo(folder)
    assert demo.account() == 0
    queues = [
        folder / "root" / name / "processed" for name in ("orders", "postings", "daily-sales", "eu", "till", "log")
    ]
    queues += [folder / "root" / name / "target" for name in ("entries", "entries-py")]
    queues += [
        folder / "root/topic-root/sales" / each / "processed" for each in (".incoming", ".subscriptions/day.ulm")
    ]
    files = [next(path for path in queue.iterdir() if not path.name.startswith(".")) for queue in queues]
    for path in files:
        body = path.read_bytes()
        path.unlink()
        assert demo.account() == 1
        path.write_bytes(body + b" ")
        assert demo.account() == 1
        path.write_bytes(body)
    for book in (folder / name for name in ("postings.csv", "daily-sales.csv", "office.csv", "ulm.csv", "till.csv")):
        rows = book.read_bytes()
        book.write_bytes(rows + rows.splitlines(keepends=True)[-1])
        assert demo.account() == 1
        book.write_bytes(rows)
    assert demo.account() == 0
