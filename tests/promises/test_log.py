"""The log: each delivery that ended without an ack is told once, sums are exact, and nothing waits for it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import killed_at_each_call, unprivileged
from forks import die_after, ended, fork, forked, pool
from helpers import FRESH, Clock, Make, base, drop, events, health, make_queue, names_in, sums, take, told

from dropq import Message, Queue, Root, work
from dropq.cli import log as cli_log
from dropq.cli.main import main
from dropq.events import log as log_module
from dropq.events.log import DETAILED, LINE_LIMIT, LISTED
from dropq.events.reader import Rates, Reader
from dropq.records.record_settlement import RecordSettlement
from dropq.storage.files import Storage


def file_of(queue: Queue) -> Path:
    """The one file of a queue's log."""
    (path,) = (base(queue) / ".dropq" / "log").iterdir()
    return path


def sent(queue: Queue, count: int = 1) -> list[Message]:
    """Send messages, and claim them."""
    for _ in range(count):
        queue.send(b"x")
    return [take(queue) for _ in range(count)]


# -- each delivery is told once --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "options", "wanted"),
    [
        (lambda message: message.ack(), {}, []),
        (lambda message: message.nack(), {}, [("returned", "nack")]),
        (lambda message: message.fail("f"), {"redelivery_attempts": 1}, [("returned", "failed")]),
        (lambda message: message.fail("f"), {}, [("failed", "failed")]),
        (lambda message: message.reject("r"), {}, [("rejected", "rejected")]),
        (lambda message: message.expire(), {}, [("expired", "forced_expire")]),
        (lambda message: message.nack(), {"max_deliveries": 1}, [("failed", "max_deliveries")]),
        (lambda message: message.fail("f"), {"exhausted": "expired"}, [("expired", "failed")]),
        (lambda message: message.release(), {}, [("returned", "released")]),
        (lambda message: message.release(counted=False), {}, []),
        (lambda message: message.extend(60), {}, []),
    ],
)
def test_a_delivery_that_ends_without_an_ack_has_one_line(
    make: Make, end: Callable[[Message], None], options: dict[str, Any], wanted: list[tuple[str, str]]
) -> None:
    queue = make(**options)
    (message,) = sent(queue)
    owner = message.owner
    end(message)
    assert told(queue) == wanted
    for event in events(queue)[1:]:
        assert event.fields["id"] == message.id
        assert event.fields["owner"] == owner
        assert event.fields["delivery"] == 1
        assert 0 <= float(event.fields["seconds"]) < 60


def test_each_failed_try_is_told_with_its_reason_and_its_traceback(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make(redelivery_attempts=2)
    queue.send(b"x")
    tries = iter((ValueError("first"), KeyError("second"), None))

    def handle(message: Message) -> None:
        if (error := next(tries)) is not None:
            raise error

    work(queue, handle, until_empty=True)
    while queue.counts()["target"]:
        work(queue, handle, until_empty=True)
    (first, second) = events(queue)[1:]
    assert [event.fields["detail"] for event in (first, second)] == ["ValueError: first", "KeyError: 'second'"]
    assert "Traceback" in str(first.fields["traceback"])
    (message,) = queue.browse("processed")
    assert main(["--root", str(queue.root.path), "show", "q", message.id]) == 0
    shown = capsys.readouterr().out
    assert "ValueError: first" in shown and "KeyError" in shown
    assert f"log_begins\t{datetime.now(UTC):%Y-%m-%d}" in shown
    assert main(["--root", str(queue.root.path), "--json", "show", "q", message.id]) == 0
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["delivery"] for each in record["log"]] == [1, 2]
    assert record["log"][0]["by"] and record["log"][0]["owner"]


@pytest.mark.parametrize("by", [[], ["--each"]])
def test_a_try_that_a_command_gave_back_is_told_with_its_exit_status_and_its_stderr(
    make: Make, by: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make(max_cancels=2, redelivery_delay=0)
    queue.send(b"x")
    command = ["sh", "-c", "echo the till is shut >&2; exit 75"]
    for _ in range(2):
        main(["--root", str(queue.root.path), "work", "q", "--until-empty", "-q", *by, "--", *command])
    first, last = events(queue)[1:]
    assert (first.event, first.fields["reason"]) == ("returned", "nack")
    assert (last.event, last.fields["reason"]) == ("failed", "max_cancels")
    for event in (first, last):
        assert (event.fields["exit_status"], event.fields["stderr"]) == (75, "the till is shut\n")
    (message,) = queue.browse("error")
    assert message.reason is not None and message.reason["stderr"] == "the till is shut\n"


def test_the_line_of_a_record_that_was_rejected_has_no_delivery_no_seconds_and_no_owner(make: Make) -> None:
    queue = make()
    queue.send(b"one\ntwo\n", type="text")
    command = ["sh", "-c", "grep -q one || exit 65"]
    main(["--root", str(queue.root.path), "work", "q", "--until-empty", "-q", "--each", "--", *command])
    (rejected,) = [event for event in events(queue) if event.event == "rejected"]
    assert str(rejected.fields["id"]).endswith("-2") and not {"delivery", "seconds", "owner"} & rejected.fields.keys()


def test_the_host_of_a_line_is_shown_without_the_id_of_its_boot(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    queue = make()
    (message,) = sent(queue)
    message.fail("f")
    assert main(["--root", str(queue.root.path), "show", "q", message.id]) == 0
    assert f" on {os.uname().nodename}\n" in capsys.readouterr().out


def test_what_a_sweep_brings_back_is_told_once_by_whichever_sweep_was_first(make: Make, clock: Clock) -> None:
    queue = make(lease_period="10s", timing=FRESH)
    queue.send(b"x")
    with queue.subscribe() as subscription:
        subscription.receive()
        clock.advance(60)
        reopened = [Root(queue.root.path, clock=clock).queue("q") for _ in range(2)]
        for each in reopened:
            each.sweep()
    assert told(queue) == [("returned", "lease")]


def test_what_a_dead_holder_held_is_told_as_dead(make: Make) -> None:
    queue = make(timing=FRESH)
    queue.send(b"x")

    die_after(lambda: queue.subscribe().receive())
    queue.sweep()
    assert told(queue) == [("returned", "dead")]


def test_what_administrators_do_is_told_with_each_id(make: Make) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    ids = [queue.send(b"x").id for _ in range(4)]
    take(queue).reject("r")
    queue.requeue()
    queue.move(other, ids=[ids[1]])
    queue.purge([ids[2]], state="target")
    queue.expire([ids[3]])
    queue.pause()
    queue.resume()
    found = [(event.event, event.fields.get("id"), event.fields.get("to")) for event in events(queue)]
    assert found == [
        ("created", None, None),
        ("rejected", ids[0], None),
        ("requeued", ids[0], "q"),
        ("moved", ids[1], "other"),
        ("purged", ids[2], None),
        ("expired", ids[3], None),
        ("paused", None, None),
        ("resumed", None, None),
    ]
    queue.close()
    assert sums(queue) == {"rejected": 1, "moved": 1, "removed": 1, "expired": 1}


def test_what_is_pruned_is_told_by_its_number(make: Make) -> None:
    queue = make()
    for message in sent(queue, 3):
        message.ack()
    queue.prune(keep_count=1)
    (event,) = (each for each in events(queue) if each.event == "pruned")
    assert (event.fields["count"], event.fields["state"]) == (2, "processed")


def test_a_dead_letter_says_where_it_went(make: Make) -> None:
    queue = make(dead_letter_queue="letters", exhausted="dead-letter")
    queue.root.create_queue("letters", durability="none")
    sent(queue)[0].fail("f")
    (event,) = events(queue)[1:]
    assert (event.event, event.fields["reason"], event.fields["to"]) == ("dead-letter", "failed", "letters")


def test_records_that_fail_are_told_and_their_bundle_ends_once(make: Make) -> None:
    queue = make(log="all")
    queue.send(b"1\n2\n3\n4\n", type="jsonl")
    message = take(queue)
    for record in message.records():
        record.reject("odd") if record.number % 2 else record.ack()
    found = told(queue)
    assert found == [("rejected", "rejected"), ("rejected", "rejected"), ("acked", None)]
    queue.close()
    assert sums(queue) == {"acked": 1}


def test_a_bundle_of_which_nothing_is_left_is_acknowledged_whatever_ends_it(make: Make) -> None:
    queue = make(log="all")
    queue.send(b"1\n2\n", type="jsonl")
    message = take(queue)
    records = message.records()
    for _ in range(2):
        record = next(records)
        record.reject("odd") if record.number == 1 else record.ack()
    message.nack()
    queue.close()
    assert told(queue) == [("rejected", "rejected"), ("acked", None)]
    assert sums(queue) == {"acked": 1}


def test_a_barrier_ends_once_for_all_its_holders(make: Make) -> None:
    queue = make(barrier_expression="1 = 1", log="all")
    subscriptions = [queue.subscribe() for _ in range(3)]
    queue.send(b"x")
    for subscription in subscriptions:
        message = subscription.receive(5)
        assert message is not None
        message.ack()
    assert told(queue) == [("acked", None)]
    for subscription in subscriptions:
        subscription.close()
    assert sums(queue) == {"acked": 1}


def test_a_publish_ends_once_in_its_topic_and_once_in_each_subscription(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    topic = root.create_topic("t", durability="none", log="all")
    with topic.subscribe("s", client_id="c") as subscription:
        topic.publish(b"x")
        message = subscription.receive(5)
        assert message is not None
        message.ack()
        theirs = subscription._context.layout.log
    topic.close()
    of_topic = [event.event for event in Reader(f"{tmp_path}/topic-root/t/.incoming/.dropq/log").events()]
    assert Counter(of_topic) == {"moved": 1, "sum": 1}
    assert [event.fields["acked"] for event in Reader(theirs).events() if event.event == "sum"] == [1]


def test_log_off_writes_nothing_and_all_has_acks(make: Make, tmp_path: Path) -> None:
    off, everything = make(log="off"), Root.create(tmp_path / "all").create_queue("q", log="all", durability="none")
    for queue in (off, everything):
        for message, end in zip(sent(queue, 3), ("ack", "nack", "ack"), strict=True):
            getattr(message, end)()
        queue.close()
    assert os.listdir(off.layout.log) == []
    assert Counter(event.event for event in events(everything)) == {"created": 1, "acked": 2, "returned": 1}


# -- what others do by renames of their own ----------------------------------------------------------------------

#: The names that DropboxMQ 1.2 gave to messages on their ways.
VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "dropboxmq-1.2-names.json").read_text()
)
TAKE = Path(__file__).parents[2] / "examples" / "shell" / "take.sh"
#: What precedes a name where a DropboxMQ client, or a script, holds the message; the last has a lease of a minute.
CLIENT, PLAIN, LEASED = "client7~", "", "sh-0123456789-1,{lease},1~"


def held_by_other(queue: Queue, prefix: str) -> tuple[str, str]:
    """Send a message, and take it as other programs do, by a rename; return its id, and its file name then."""
    id = queue.send(b"x").id
    (name,) = names_in(queue, "target")
    claim = prefix.format(lease=queue.root.clock.now_ms() + 60_000) + name
    os.rename(base(queue) / "target" / name, base(queue) / "processing" / claim)
    return id, claim


@pytest.mark.parametrize("end", ["processed", "error", "expired"])
def test_what_a_dropboxmq_takes_and_settles_is_in_no_line_and_no_sum(make: Make, end: str) -> None:
    queue = make(dropboxmq=True, log="all", timing=FRESH)
    held = list[tuple[Path, Path]]()
    for case in VECTORS:
        if name := case.get(f"{end}_name"):
            drop(queue, case["target_name"], b"x")
            claim = base(queue) / "processing" / case.get("processing_name", name)
            held.append(((base(queue) / "target" / case["target_name"]).rename(claim), base(queue) / end / name))
    sent(queue)[0].ack()
    queue.sweep()
    for claim, settled in held:
        claim.rename(settled)
    queue.sweep()
    queue.close()
    assert len(held) == queue.counts()[end] - (end == "processed") > 0
    assert told(queue) == [("acked", None)]
    assert sums(queue) == {"acked": 1}


def test_what_a_script_takes_and_settles_is_in_no_line_and_no_sum(make: Make) -> None:
    queue = make(log="all")
    sent(queue)[0].ack()
    for command in ("true", "false"):
        drop(queue, f"{command}.csv", b"x")
        subprocess.run(["sh", TAKE, queue.root.path, "q", command], check=command == "true")
    queue.close()
    assert (queue.counts()["processed"], queue.counts()["error"]) == (2, 1)
    assert told(queue) == [("acked", None)]
    assert sums(queue) == {"acked": 1}


@pytest.mark.parametrize(
    ("prefix", "line"),
    [
        (CLIENT, {"reason": "foreign", "owner": "client7", "delivery": 1}),
        (PLAIN, {"reason": "foreign", "owner": "", "delivery": 1}),
        (LEASED, {"reason": "lease", "owner": "sh-0123456789-1", "delivery": 1}),
    ],
)
def test_what_a_sweep_takes_from_another_program_is_told_with_its_holder(
    make: Make, clock: Clock, prefix: str, line: dict[str, object]
) -> None:
    queue = make(dropboxmq=True, timing=FRESH)
    id, _ = held_by_other(queue, prefix)
    queue.sweep(foreign_older_than=100)
    clock.advance(200)
    queue.sweep(foreign_older_than=100)
    queue.close()
    (event,) = events(queue)[1:]
    assert event.event == "returned"
    assert event.fields == {"id": id, "pid": os.getpid(), **line}
    assert sums(queue) == {"returned": 1}


def test_what_a_sweep_takes_from_a_distributor_of_a_topic_is_told_as_failed(tmp_path: Path, clock: Clock) -> None:
    queue = Root.create(tmp_path, clock=clock, dropboxmq=True).create_topic("t", durability="none").queue
    (base(queue) / "processing" / "dist~4.1795332982430000-0000000001.T").write_bytes(b"x")
    clock.advance(200)
    queue.sweep(foreign_older_than=100)
    queue.close()
    (event,) = events(queue)
    assert (event.event, event.fields["reason"], event.fields["owner"]) == ("failed", "foreign_claim", "dist")
    assert event.fields["id"] == "1795332982430000-0000000001"
    assert sums(queue) == {"failed": 1}


@pytest.mark.parametrize("prefix", [CLIENT, PLAIN, LEASED])
@pytest.mark.parametrize(
    ("act", "event", "outcome"),
    [
        (lambda queue, id: queue.requeue([id], state="processing"), "requeued", "returned"),
        (lambda queue, id: queue.move(queue.root.queue("other"), [id], state="processing"), "moved", "moved"),
        (lambda queue, id: queue.expire([id]), "expired", "expired"),
        (lambda queue, id: queue.purge([id], state="processing"), "purged", "removed"),
    ],
)
def test_what_an_administrator_takes_from_another_program_has_a_line(
    make: Make, prefix: str, act: Callable[[Queue, str], object], event: str, outcome: str
) -> None:
    queue = make(dropboxmq=True)
    queue.root.create_queue("other", durability="none")
    id, _ = held_by_other(queue, prefix)
    act(queue, id)
    assert [(each.event, each.fields["id"]) for each in events(queue)[1:]] == [(event, id)]
    owner = {CLIENT: "client7", LEASED: "sh-0123456789-1"}.get(prefix)
    assert (events(queue)[1].fields.get("owner") or None) == owner
    queue.close()
    assert sums(queue) == {outcome: 1}


def test_a_reject_of_what_a_script_holds_is_told_with_the_script_as_owner(make: Make) -> None:
    queue = make(leasing="sublet")
    command = ["--root", str(queue.root.path), "reject", "q"]
    ids = list[str]()
    for number in range(2):
        id, receipt = held_by_other(queue, LEASED)
        assert main([*command, (id, receipt)[number], "--reason", "bad"]) == 0
        ids.append(id)
    queue.close()
    assert told(queue) == [("rejected", "rejected")] * 2
    assert [event.fields["id"] for event in events(queue)[1:]] == ids
    assert {event.fields["owner"] for event in events(queue)[1:]} == {"sh-0123456789-1"}
    assert sums(queue) == {"rejected": 2}


@pytest.mark.parametrize("prefix", [CLIENT, PLAIN])
def test_a_settlement_that_is_refused_as_another_program_holds_the_message_has_no_line(make: Make, prefix: str) -> None:
    queue = make(dropboxmq=True, leasing="sublet", log="all")
    for name in held_by_other(queue, prefix):
        assert main(["--root", str(queue.root.path), "reject", "q", name, "--reason", "bad"]) == 1
        assert not queue.ack(name)
    queue.close()
    assert queue.counts()["processing"] == 1
    assert told(queue) == [] and sums(queue) == {}


# -- sums ----------------------------------------------------------------------------------------------------------


def test_sums_of_threads_and_processes_are_exact(make: Make) -> None:
    queue = make()
    queue.send_many([b"x"] * 400)

    def consume() -> None:
        own = Root(queue.root.path).queue("q")
        with own.subscribe() as subscription:
            while (message := subscription.receive(0)) is not None:
                message.ack()

    def process() -> None:
        threads = [threading.Thread(target=consume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    children = [subprocess.Popen([sys.executable, "-c", _CONSUME, queue.root.path]) for _ in range(2)]
    process()
    for child in children:
        assert child.wait(60) == 0
    queue.close()
    assert queue.counts()["processed"] == 400
    assert sums(queue)["acked"] == 400


_CONSUME = """
import sys
from dropq import Root
queue = Root(sys.argv[1]).queue("q")
while (message := queue.receive(0)) is not None:
    message.ack()
"""  # its end tells the rest


def test_a_fork_does_not_tell_again_what_its_parent_has_counted(make: Make) -> None:
    queue = make()
    sent(queue)[0].ack()

    def child() -> None:
        mine = queue.root.queue("q")
        mine.send(b"x")
        message = mine.receive()
        assert message is not None
        message.ack()
        mine.close()

    forked(child)
    queue.close()
    assert sums(queue) == {"acked": 2}


def test_a_sum_is_written_when_five_seconds_have_passed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    first, second, third = sent(queue, 3)
    first.ack()
    assert sums(queue) == {}
    monkeypatch.setattr(log_module, "SUM_INTERVAL", 0.0)
    second.ack()
    assert sums(queue) == {"acked": 2}
    monkeypatch.undo()
    third.ack()
    queue.close()
    assert sums(queue) == {"acked": 3}


def test_a_process_of_many_queues_writes_a_sum_of_each_at_most_each_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(log_module, "monotonic", lambda: now)
    monkeypatch.setattr(log_module, "_UNTOLD", {})
    written = list[tuple[int, object]]()

    def sums_of(number: int) -> log_module.Sums:
        return log_module.Sums(lambda event, fields: written.append((number, fields.get("acked"))))

    many = list(map(sums_of, range(100)))
    for _ in range(3):
        for each in many:
            each.count("acked")
        now += 1
    assert written == []
    now += 2
    sums_of(100).count("acked")  # nobody attends to the others any more
    assert written == [(number, 3) for number in range(100)]


def test_what_multiprocessing_does_at_the_end_is_registered_once_a_process(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, registered = make(), list[object]()
    monkeypatch.setattr(util, "Finalize", lambda *args, **options: registered.append(args))
    for _ in range(3):
        sent(queue)[0].ack()
        queue.close()
    assert len(registered) <= 1


def test_rates_are_those_of_the_last_minute(make: Make, clock: Clock) -> None:
    queue = make()
    folder = base(queue) / ".dropq" / "log"
    now = datetime.now(UTC)

    def line(ago: float, over: float, **counts: int) -> str:
        time = (now - timedelta(seconds=ago)).isoformat()
        return json.dumps({"time": time, "event": "sum", "pid": 7, "over": over, **counts}) + "\n"

    lines = (line(90, 10, acked=1000), line(50, 20, acked=100, returned=7), line(5, 10, acked=40, failed=20))
    (folder / f"{now:%Y%m%d}-other-0.jsonl").write_text("".join(lines))
    rates = Rates(str(folder))
    rates.read(now)
    assert rates.by_holder(now) == {("other", 7): pytest.approx((75 + 60) / 60)}  # its minute ended with its last sum
    assert sum(rates.totals.values()) == 0
    with open(folder / f"{now:%Y%m%d}-other-0.jsonl", "a") as file:
        file.write(line(0, 1, rejected=5))
    rates.read(now)
    assert rates.totals["rejected"] == 5


def test_a_first_look_counts_the_last_minute_however_long_its_lines_are(make: Make) -> None:
    queue, now = make(), datetime.now(UTC)

    def line(ago: float, event: str, **fields: object) -> str:
        time = (now - timedelta(seconds=ago)).isoformat()
        return json.dumps({"time": time, "event": event, "pid": 7, **fields}) + "\n"

    lines = [line(600, "failed", detail="x" * 2000)] * 2000 + [line(90, "sum", over=5.0, acked=900)]
    for ago in range(60, 0, -5):
        lines += [line(ago, "acked", id="x" * 2000)] * 300 + [line(ago, "sum", over=5.0, acked=50)]
    (Path(queue.layout.log) / f"{now:%Y%m%d}-h-0.jsonl").write_text("".join(lines))
    rates = Rates(queue.layout.log)
    rates.read(now)
    assert rates.by_holder(now) == {("h", 7): pytest.approx(10, abs=0.1)}


# -- nothing waits for it ----------------------------------------------------------------------------------------


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _broken(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


HINDRANCES: dict[str, Callable[[Path], object]] = {
    "a link": _link,
    "a broken link": _broken,
    "a fifo": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_what_lies_in_place_of_todays_file_hinders_no_message(
    make: Make, hindrance: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    path = file_of(queue)
    path.unlink()
    HINDRANCES[hindrance](path)
    for message in sent(queue, 3):
        message.reject("r")
    assert queue.counts()["error"] == 3
    assert sum("what goes by is not in the log" in record.message for record in caplog.records) == 1
    assert list(Reader(queue.layout.log).events()) == []
    assert hindrance != "a link" or "dropq" not in Path("/etc/passwd").read_text()


@pytest.mark.host
def test_a_file_that_nobody_may_change_hinders_no_message(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    queue = make()
    path = file_of(queue)
    if not shutil.which("chattr") or subprocess.run(["chattr", "+i", path], check=False).returncode:
        pytest.skip("to make a file immutable takes root, and a file system that can")
    try:
        before = path.read_bytes()
        for message in sent(queue, 3):
            message.reject("r")
        assert queue.counts()["error"] == 3
        assert path.read_bytes() == before
        assert sum("what goes by is not in the log" in record.message for record in caplog.records) == 1
        queue.sweep()
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def test_a_full_disk_and_a_missing_folder_hinder_no_message(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()

    def full(self: Storage, path: str, line: Callable[[int], bytes]) -> None:
        raise OSError(28, os.strerror(28), path)

    monkeypatch.setattr(Storage, "append", full)
    sent(queue)[0].reject("r")
    monkeypatch.undo()
    file_of(queue).unlink()
    (base(queue) / ".dropq" / "log").rmdir()
    sent(queue)[0].reject("r")
    assert told(queue) == [("rejected", "rejected")]


def test_a_large_file_gets_no_details_and_at_last_only_acts_and_sums(make: Make) -> None:
    queue = make()
    path = file_of(queue)
    os.truncate(path, DETAILED)
    sent(queue)[0].reject("r", traceback="t")
    with open(path, "rb") as file:
        file.seek(DETAILED)
        (line,) = file.read().splitlines()
    assert b"rejected" in line and b"traceback" not in line
    os.truncate(path, LISTED)
    sent(queue)[0].reject("r")
    queue.pause()
    with open(path, "rb") as file:
        file.seek(LISTED)
        assert [json.loads(line)["event"] for line in file] == ["paused"]


@pytest.mark.parametrize("text", ["x" * 100_000, "\U0001f600" * 50_000, "\udcff" * 50_000, "\\" * 40_000])
def test_a_line_is_bounded_whatever_is_said(make: Make, text: str) -> None:
    queue = make()
    sent(queue)[0].reject(text, traceback=text, stderr=text, exit_status=3, other=[1])
    line = file_of(queue).read_bytes().splitlines(keepends=True)[-1]
    assert len(line) <= LINE_LIMIT
    said = json.loads(line)
    assert said["exit_status"] == 3 and said["traceback"] and text.endswith(said["traceback"])
    assert "other" not in said


LIES = [
    b'{"time": "2026-01-01T00:00:00+00:00", "event": "failed", "by": "root", "id": "a"}\n',
    b'{"time": "2026-01-01T00:00:00+00:00", "event": "sum", "acked": 1e999, "over": 1}\n',
    b'{"time": "2026-01-01T00:00:00+00:00", "event": "sum", "acked": -5, "over": "x"}\n',
    b'{"time": "never", "event": "failed"}\n',
    b'{"time": "2026-01-01T00:00:00+00:00", "event": "\\u001b[31m"}\n',
    b"[" * 100_000 + b"\n",
    b"\xff\xfe\x00\n",
    b"x" * (3 * LINE_LIMIT) + b"\n",
    b"[]\n",
    b'{"event": "failed"}\n',
]


def test_a_strangers_lines_are_told_as_his_or_not_at_all(make: Make) -> None:
    queue = make()
    with open(file_of(queue), "ab") as file:
        file.write(b"".join(LIES) + b'{"time": "torn')
    found = {event.event: event for event in Reader(queue.layout.log).events()}
    assert found.keys() == {"created", "failed", "sum"}
    assert found["failed"].by == found["created"].by
    assert not {"acked", "over"} & found["sum"].fields.keys()
    assert main(["--root", str(queue.root.path), "log", "q"]) == 0


def test_lines_of_several_hosts_are_told_by_time(make: Make) -> None:
    queue = make()
    folder = base(queue) / ".dropq" / "log"
    hosts = [[f"2026-01-0{day}T00:00:{second:02}+00:00" for day in (1, 2) for second in (s, s + 20)] for s in (1, 2)]
    for host, times in enumerate(hosts):
        for time in times:
            with open(folder / f"{time[:10].replace('-', '')}-host{host}-0.jsonl", "a") as file:
                file.write(json.dumps({"time": time, "event": "paused"}) + "\n")
    found = [event.time for event in events(queue) if event.event == "paused"]
    assert found == sorted(found) and len(found) == 8
    since = datetime(2026, 1, 2, 0, 0, 10, tzinfo=UTC)
    assert len([event for event in events(queue, since=since) if event.event == "paused"]) == 2


def test_a_reader_tells_only_what_is_new_and_finds_a_file_that_was_replaced(make: Make) -> None:
    queue = make()
    reader = Reader(queue.layout.log)
    assert [event.event for event in reader.events()] == ["created"]
    assert list(reader.events()) == []
    queue.pause()
    assert [event.event for event in reader.events()] == ["paused"]
    file_of(queue).write_bytes(b"")
    queue.resume()
    assert [event.event for event in reader.events()] == ["resumed"]


def test_a_sweep_removes_what_is_older_than_log_age(make: Make, clock: Clock) -> None:
    queue = make(log_age="1d")
    other = base(queue) / ".dropq" / "log" / "notes.txt"
    other.write_text("a person's")
    clock.advance(86_000)
    queue.sweep()
    assert told(queue) == [] and len(events(queue)) == 1
    clock.advance(1000)
    queue.sweep()
    assert os.listdir(other.parent) == [other.name]


def test_a_crash_before_any_call_of_a_reject_or_of_its_log_leaves_one_message(tmp_path: Path, clock: Clock) -> None:
    made = count()

    def build() -> Queue:
        queue = make_queue(tmp_path / f"root-{next(made)}", clock=clock, timing=FRESH)
        shutil.rmtree(queue.layout.log)
        queue.send(b"x")
        return queue

    def reject(queue: Queue) -> None:
        message = queue.receive()
        assert message is not None
        message.reject("r")
        queue.close()

    for queue in killed_at_each_call(build, reject):
        queue.sweep()
        assert sum(queue.counts().values()) == 1
        rejected = [event for event in events(queue) if event.event == "rejected"]
        assert len(rejected) <= queue.counts()["error"]


def test_log_prints_what_matches_and_says_so_where_nothing_does(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    queue = make()
    first, second = sent(queue, 2)
    first.reject("one\ttwo")
    second.nack()
    command = ["--root", str(queue.root.path), "log", "q"]

    def printed(*argv: str) -> tuple[int, list[str]]:
        code = main([*command, *argv])
        return code, capsys.readouterr().out.splitlines()

    code, lines = printed("--id", first.id)
    assert code == 0 and len(lines) == 1
    assert lines[0].split("\t")[1:6] == ["rejected", first.id, "1", lines[0].split("\t")[4], "rejected: one\\x09two"]
    assert [line.split("\t")[1] for line in printed("-n", "1")[1]] == ["returned"]
    assert [line.split("\t")[1] for line in printed("--event", "created", "--event", "returned")[1]] == [
        "created",
        "returned",
    ]
    assert len(printed("--since", "1h")[1]) == 3
    assert printed("--since", "2999-01-01") == (1, [])
    assert printed("--id", "nobody") == (1, [])
    assert printed("--event", "nothing")[0] == 2
    assert printed("--since", "yesterday")[0] == 2


def test_log_follows_what_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make()
    comes = iter((queue.pause, queue.resume))

    def sleep(seconds: float) -> None:
        try:
            next(comes)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(cli_log, "time", SimpleNamespace(sleep=sleep))
    assert main(["--root", str(queue.root.path), "log", "q", "-f", "-n", "0"]) == 130
    assert [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()] == ["paused", "resumed"]


def test_log_of_no_lines_is_no_failure_and_one_that_follows_ends_with_its_queue(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make()
    command = ["--root", str(queue.root.path), "log", "q"]
    assert main([*command, "-n", "0"]) == 0
    looks = iter((lambda: queue.root.delete_queue("q"),))  # a second one would be the end of the test
    monkeypatch.setattr(cli_log, "time", SimpleNamespace(sleep=lambda seconds: next(looks)()))
    assert main([*command, "-f"]) == 66
    assert "not there any more" in capsys.readouterr().err


def test_a_log_that_this_user_may_not_read_is_unknown_and_hinders_nothing(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = make()
    id = queue.send(b"x").id
    take(queue).ack()
    queue.close()
    log = base(queue) / ".dropq" / "log"
    log.chmod(0o300)

    def look() -> tuple[float | None, bool, list[int]]:
        (seen,) = queue.root.overview()
        command = ["--root", str(queue.root.path)]
        asked = (["log", "q"], ["show", "q", id], ["health", "q", "--still", "0s"])
        return seen.rate_out, seen.health.healthy, [main([*command, *argv]) for argv in asked]

    try:
        assert unprivileged(look) == (None, True, [77, 0, 0])
    finally:
        log.chmod(0o755)
    assert capfd.readouterr().err.count("Permission denied") == 2


def test_a_sweep_passes_over_old_files_that_this_user_may_not_remove(make: Make) -> None:
    queue = make(log_age="0s")
    log = base(queue) / ".dropq" / "log"
    os.utime(file_of(queue), (1, 1))
    log.chmod(0o555)
    try:
        assert unprivileged(lambda: Root(queue.root.path).queue("q").sweep().refused) == 0
    finally:
        log.chmod(0o755)
    assert os.listdir(log)


def test_a_pause_of_a_paused_queue_is_told_once(make: Make) -> None:
    queue = make()
    for act in (queue.pause, queue.pause, queue.resume, queue.resume):
        act()
    assert told(queue) == [("paused", None), ("resumed", None)]


# -- what readers of the change found ------------------------------------------------------------------------------


def test_a_line_of_any_shape_ends_no_reader(make: Make) -> None:
    queue = make()
    odd = [
        b'{"event": [], "time": "x"}',
        b'{"event": {}, "time": []}',
        b'{"time": 7, "event": "paused"}',
        b"null",
        b"7",
    ]
    with open(file_of(queue), "ab") as file:
        file.write(
            b"\n".join(odd) + b'\n{"time": "2026-11-29T0{"time": "2026-11-29T08:00:00+00:00", "event": "paused"}\n'
        )
    assert [event.event for event in events(queue)] == ["created", "paused"]  # the torn line hides no whole one
    assert health(queue).error is None


def test_rates_are_told_of_sums_of_no_length_and_not_of_the_future(make: Make) -> None:
    queue, now = make(), datetime.now(UTC)

    def line(ago: float, pid: int, **counts: object) -> str:
        return json.dumps({"time": (now - timedelta(seconds=ago)).isoformat(), "event": "sum", "pid": pid, **counts})

    told = (line(5, 1, over=0.0, acked=6), line(62, 2, over=0.0, acked=100), line(-3600, 3, over=1, acked=100))
    later = (line(200, 1, over=0.0, acked=1), line(70, 4, over=10.0, acked=60))
    (Path(queue.layout.log) / f"{now:%Y%m%d}-h-0.jsonl").write_text("\n".join((*told, *later)) + "\n")
    rates = Rates(queue.layout.log)
    rates.read(now)
    assert rates.by_holder(now) == {("h", 1): pytest.approx(0.1), ("h", 2): 0.0, ("h", 4): 0.0}


def test_a_body_that_changes_while_its_records_are_settled_is_told_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    path = base(queue) / "target" / "lines.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    os.utime(path, (1, 1))
    message = take(queue)
    write = RecordSettlement._write

    def while_somebody_writes(self: RecordSettlement, *arguments: Any) -> None:
        write(self, *arguments)
        with open(message.path, "ab") as file:
            file.write(b"4\n")

    monkeypatch.setattr(RecordSettlement, "_write", while_somebody_writes)
    for record in message.records():
        record.reject("odd") if record.number == 1 else record.ack()
    queue.close()
    assert told(queue) == [("failed", "body_changed")]
    assert sums(queue) == {"failed": 1}


@pytest.mark.parametrize("is_there", [True, False])
def test_records_that_are_dead_letters_say_where_they_are(make: Make, is_there: bool) -> None:
    queue = make(exhausted="dead-letter", dead_letter_queue="letters")
    if is_there:
        queue.root.create_queue("letters", durability="none")
    queue.send(b"1\n2\n", type="jsonl")
    for record in take(queue).records():
        record.fail("odd") if record.number == 1 else record.ack()
    (event,) = (event for event in events(queue) if event.fields.get("reason") == "failed")
    assert (event.event, event.fields.get("to")) == (("dead-letter", "letters") if is_there else ("failed", None))
    assert queue.counts()["error"] == (not is_there)


def test_a_process_of_multiprocessing_tells_what_it_settled(tmp_path: Path) -> None:
    queue = Root.create(tmp_path).create_queue("q", durability="none")
    queue.send_many([b"x"] * 3)
    with pool() as processes:
        processes.submit(_settle_all, str(tmp_path)).result(60)
        assert sums(queue) == {}
    assert sums(queue) == {"acked": 3}


def _settle_all(root: str) -> None:
    queue = Root(root).queue("q")
    while (message := queue.receive()) is not None:
        message.ack()


def test_what_another_queue_of_the_name_settled_is_not_told_in_a_new_one(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    for _ in range(2):
        queue = root.create_queue("q", durability="none")
        queue.send(b"x")
        take(queue).ack()
        before = sums(queue)
        if not before:
            root.delete_queue("q", force=True)
            queue.close()
            root.create_queue("q", durability="none").close()
            assert sums(root.queue("q")) == {}
            root.delete_queue("q", force=True)


def test_the_log_makes_nothing_where_a_disk_is_away(make: Make) -> None:
    queue = make()
    (message,) = sent(queue)
    away = base(queue).rename(base(queue).with_name("away"))
    base(queue).mkdir()
    queue.context.log.act("paused")
    assert os.listdir(base(queue)) == []
    base(queue).rmdir()
    away.rename(base(queue))
    message.ack()


def test_a_file_of_another_owner_or_name_is_not_written_to(make: Make, tmp_path: Path) -> None:
    queue = make()
    path = file_of(queue)
    os.link(path, tmp_path / "linked")
    before = path.read_bytes()
    queue.pause()
    assert path.read_bytes() == before
    (path.parent / "20260101-host-12345.jsonl").write_text('{"time": "2026-01-01T00:00:00+00:00", "event": "paused"}\n')
    assert events(queue)[0].by == f"{pwd.getpwuid(os.getuid()).pw_name}?"


def test_a_folder_in_place_of_an_old_file_ends_no_sweep(make: Make) -> None:
    queue = make(log_age="0s")
    (base(queue) / ".dropq" / "log" / "20260101-host-0.jsonl").mkdir()
    os.utime(base(queue) / ".dropq" / "log" / "20260101-host-0.jsonl", (1, 1))
    assert queue.sweep().refused == 1


def test_many_files_of_a_day_are_read_with_few_descriptors(make: Make) -> None:
    queue = make()
    for host in range(100):
        path = base(queue) / ".dropq" / "log" / f"20260101-host{host}-0.jsonl"
        path.write_text(json.dumps({"time": f"2026-01-01T00:00:{host % 60:02}+00:00", "event": "paused"}) + "\n")
    before = len(os.listdir("/proc/self/fd"))
    reading = Reader(queue.layout.log).events()
    assert next(reading).event == "paused"
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert sum(1 for _ in reading) == 100


def test_parts_that_are_put_together_are_told_as_requeued(make: Make) -> None:
    queue = make()
    id = queue.send(b"1\n2\n3\n", type="jsonl").id
    for record in take(queue).records():
        record.reject("odd")
    queue.requeue(whole=True)
    (event,) = (event for event in events(queue) if event.event == "requeued")
    assert (event.fields["id"], event.fields["count"], event.fields["state"]) == (id, 3, "error")


def test_lines_of_many_processes_stay_whole(make: Make) -> None:
    queue = make()
    text = "x" * 3000

    def tell() -> None:
        for number in range(100):
            queue.context.log.ended("rejected", f"4.x{number}.B", reason=text)

    children = [fork(tell) for _ in range(8)]
    assert [ended(child) for child in children] == [0] * 8
    assert sum(event.fields.get("reason") == text for event in events(queue)) == 800


def test_who_may_not_write_the_log_works_on_and_is_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    queue = make()
    log = base(queue) / ".dropq" / "log"
    before = file_of(queue).read_bytes()
    file_of(queue).chmod(0o444)
    log.chmod(0o555)

    def work() -> dict[str, int]:
        mine = Root(queue.root.path).queue("q")
        for _ in range(3):
            mine.send(b"x")
            message = mine.receive()
            assert message is not None
            message.reject("r")
        mine.close()
        return mine.counts()

    try:
        counts = unprivileged(work)
    finally:
        log.chmod(0o755)
    assert counts["error"] == 3
    assert file_of(queue).read_bytes() == before
