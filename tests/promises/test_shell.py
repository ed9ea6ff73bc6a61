"""Scripts that know nothing but mkdir, ls and mv share every kind of queue with dropq's own producers and consumers."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from actors import finish, start
from helpers import AT_ONCE, FOLDERS, Clock, drop, lying, make_queue, names_in, take, timed, until, where

from dropq import LeaseLost, Queue, Root

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
#: Sends NUMBER bodies PREFIX-N, as the protocol has it: write in working/, then one mv.
PRODUCER = """
cd "$1"
n=0
while [ $n -lt "$3" ]; do
    printf '%s' "$2-$n" > "working/$2-$n.txt"
    mv "working/$2-$n.txt" "target/$2-$n.txt"
    n=$((n + 1))
done
"""
#: Takes what ls shows until there is a file NOTES/stop; whose mv succeeds has the message.
CONSUMER = """
cd "$1"
while [ ! -e "$2/stop" ]; do
    for name in $(ls target); do
        case $name in *.tmp) continue;; esac
        if mv "target/$name" "processing/$name" 2> /dev/null; then
            mkdir "$2/shell/$(cat "processing/$name")" || echo "twice: $name" >> "$2/twice"
            mv "processing/$name" "processed/$name"
        fi
    done
done
"""
#: Brings back whatever lies in error/ until there is a file NOTES/stop.
REQUEUER = """
cd "$1"
while [ ! -e "$2/stop" ]; do
    for name in $(ls error); do mv "error/$name" "target/$name"; done
done
"""


def flat(root: Path) -> Queue:
    return make_queue(root)


def dropboxmq(root: Path) -> Queue:
    return make_queue(root, dropboxmq=True)


def leased(root: Path) -> Queue:
    return make_queue(root, lease_period="60s", leasing="strict", redelivery_attempts=5, durability="full")


def made_with_mkdir(root: Path) -> Queue:
    script = 'mkdir -p "$1/q" && cd "$1/q" && mkdir working target processing processed expired error'
    subprocess.run(["sh", "-c", script, "sh", str(root)], check=True)
    (root / "dropq.toml").write_text('[defaults]\ndurability = "none"\n')
    return Root(root).queue("q")


LAYOUTS: list[Callable[[Path], Queue]] = [flat, dropboxmq, leased, made_with_mkdir]


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[list[Popen[bytes]]]:
    """Processes that end with the test."""
    (tmp_path / "notes" / "shell").mkdir(parents=True)
    running: list[Popen[bytes]] = []
    yield running
    (tmp_path / "notes" / "stop").touch()
    finish(*running)


def sh(script: str, queue: Queue, *arguments: object) -> Popen[bytes]:
    return Popen(["sh", "-c", script, "sh", queue.layout.base, *map(str, arguments)], stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("make", LAYOUTS)
def test_scripts_and_dropq_share_a_queue_and_each_body_is_processed_once(
    tmp_path: Path, scripts: list[Popen[bytes]], make: Callable[[Path], Queue]
) -> None:
    queue, notes, root = make(tmp_path / "root"), tmp_path / "notes", tmp_path / "root"
    each = 40
    scripts += [sh(PRODUCER, queue, f"s{number}", each) for number in range(2)]
    scripts += [start("produce", root, notes, f"d{number}", each) for number in range(2)]
    scripts += [sh(CONSUMER, queue, notes) for _ in range(2)]
    scripts += [start("consume", root, notes), start("sweep", root, notes)]
    expected = {f"{kind}{number}-{n}" for kind in "sd" for number in range(2) for n in range(each)}
    until(lambda: _bodies(queue, "processed") == len(expected), "all to be processed")
    until(lambda: len(_taken(notes)) >= len(expected), "all to be noted")
    assert Counter(_taken(notes)) == Counter(expected)
    assert os.listdir(notes / "violations") == []
    assert not (notes / "twice").exists()
    assert where(queue) == {"processed": sorted(body.encode() for body in expected)}


def _taken(notes: Path) -> list[str]:
    """What the scripts and dropq's consumers say that they processed."""
    return [*os.listdir(notes / "shell"), *(name.rpartition(".")[0] for name in os.listdir(notes / "acked"))]


def _bodies(queue: Queue, state: str) -> int:
    return len(os.listdir(Path(queue.layout.base) / state))


def snippets() -> tuple[str, str]:
    """The producer and the consumer of docs/protocol.md."""
    text = PROTOCOL.read_text().partition("## For a shell script\n")[2].partition("\n`mv` replaces")[0]
    producer, _, consumer = textwrap.dedent(text.strip("\n")).partition("# consumer")
    return producer, "# consumer" + consumer


def in_shell(root: Path, script: str, *, handle: str = "cat", input: bytes = b"") -> bytes:
    """Run a script in a root, with a command `handle`."""
    script = f'set -e\ncd "$1"\nhandle() {{\n{handle} "$1"\n}}\n{script}'
    return subprocess.run(["sh", "-c", script, "sh", str(root)], input=input, capture_output=True, check=True).stdout


def test_the_scripts_of_the_protocol_paper_send_take_and_fail(tmp_path: Path) -> None:
    queue = Root.create(tmp_path).create_queue("orders", durability="none")
    producer, consumer = snippets()
    for number, (handle, state) in enumerate((("cat", "processed"), ("! cat", "error")), start=1):
        in_shell(tmp_path, producer, input=b"body %d" % number)
        (name,) = names_in(queue, "target")
        assert in_shell(tmp_path, consumer, handle=handle) == b"body %d" % number
        assert names_in(queue, state) == [name]
    assert where(queue) == {"processed": [b"body 1"], "error": [b"body 2"]}


def test_the_script_of_the_protocol_paper_leaves_an_empty_queue_as_it_is(tmp_path: Path) -> None:
    queue = Root.create(tmp_path).create_queue("orders", durability="none")
    assert in_shell(tmp_path, snippets()[1]) == b""
    assert where(queue) == {} and queue.fsck() == []


def test_what_a_script_of_the_protocol_paper_held_comes_back_under_its_own_name(tmp_path: Path, clock: Clock) -> None:
    root = timed(Root.create(tmp_path, clock=clock), AT_ONCE)
    queue = root.create_queue("orders", durability="none", redelivery_delay=0)
    producer, consumer = snippets()
    in_shell(tmp_path, producer, input=b"body")
    (name,) = names_in(queue, "target")
    in_shell(tmp_path, consumer, handle="exit 0 #")  # it ends before it settles anything
    (message,) = queue.browse("processing")
    assert message.deadline is not None
    assert queue.sweep().total == 0
    clock.advance(3700)
    assert queue.sweep().lapsed == 1
    (message,) = queue.browse()
    assert (message.id, message.delivery_count) == (name, 1)
    take(queue).ack()
    assert names_in(queue, "processed") == [name]


def test_a_script_that_moves_error_back_to_target_is_a_requeue(tmp_path: Path, scripts: list[Popen[bytes]]) -> None:
    queue = make_queue(tmp_path / "root")
    scripts += [sh(PRODUCER, queue, "s", 10), sh(REQUEUER, queue, tmp_path / "notes")]
    queue.send_many([f"d-{n}".encode() for n in range(10)])
    expected = sorted(f"{kind}-{n}".encode() for kind in "sd" for n in range(10))
    tries: Counter[bytes] = Counter()
    with queue.subscribe(max_backlog=None) as subscription:

        def acked() -> bool:
            message = subscription.receive(0.05)
            if message is not None:
                tries[message.body] += 1
                assert message.delivery_count == (1 if message.id.endswith(".txt") else tries[message.body])
                message.ack() if tries[message.body] == 3 else message.reject("not yet")
            return _bodies(queue, "processed") == 20

        until(acked, "all to be acked at their third try")
    assert where(queue) == {"processed": expected}
    assert {f"s-{n}.txt" for n in range(10)} <= set(names_in(queue, "processed"))


def test_a_script_may_hold_a_file_in_processing_as_long_as_it_likes(tmp_path: Path) -> None:
    clock = Clock()
    queue = make_queue(tmp_path, clock=clock, lease_period="1s")
    drop(queue, "x.csv", b"a")
    subprocess.run(["sh", "-c", 'cd "$1" && mv target/x.csv processing/x.csv', "sh", queue.layout.base], check=True)
    clock.advance(10**6)
    for _ in range(3):
        assert queue.sweep(unleased_older_than=0).total == 0
    assert queue.receive() is None
    with pytest.raises(LeaseLost):
        queue.claimed("x.csv")
    assert [message.id for message in queue.browse("processing")] == ["x.csv"]
    subprocess.run(["sh", "-c", 'cd "$1" && mv processing/x.csv processed/', "sh", queue.layout.base], check=True)
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("goal", ["target", "error", "processed"])
def test_a_script_may_take_a_message_from_a_consumer(tmp_path: Path, goal: str) -> None:
    """`mv processing/* GOAL/` with the claim's prefix on it: its holder finds the claim lost, nobody loses the body."""
    queue = make_queue(tmp_path)
    queue.send(b"a")
    message = queue.receive()
    assert message is not None
    subprocess.run(["sh", "-c", f'cd "$1" && mv processing/* {goal}/', "sh", queue.layout.base], check=True)
    for verb in (message.ack, message.nack, message.expire):
        with pytest.raises(LeaseLost):
            verb()
    assert where(queue) == {goal: [b"a"]}
    if goal != "target":
        assert [outcome.ok for outcome in queue.requeue(state=goal)] == [True]
    again = queue.receive()
    assert again is not None
    again.ack()
    assert where(queue) == {"processed": [b"a"]}
    queue.close()


def test_ls_is_a_monitor(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.send_many([b"a", b"b", b"c"])
    message = queue.receive()
    assert message is not None
    for state, count in (("target", 2), ("processing", 1), ("processed", 0), ("error", 0)):
        command = ["sh", "-c", 'ls "$1" | wc -l', "sh", f"{queue.layout.base}/{FOLDERS[state]}"]
        assert int(subprocess.run(command, check=True, capture_output=True).stdout) == count
    assert lying(Path(queue.layout.base)) == {"target": [b"b", b"c"], "processing": [b"a"]}
    queue.close()
