"""No small file that a stranger may write ends a consumer, a worker, a router, a sweep or a check, or stops the others.

The table has each such file, with each thing that may be the matter with it. A case runs in a child that permissions
bind, and that has not the memory to read a large file.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import unprivileged
from helpers import AT_ONCE, base, drop, first_and_long, timed, where

from dropq import DropqError, Queue, Root, work
from dropq.diagnosis.fsck import fsck_root
from dropq.lifecycle.queue_notes import marks_in
from dropq.routing import Routers, credit_audit
from dropq.routing.router import Taken
from dropq.upkeep.sweep import QuickSweep

#: How deeply what is nested is nested.
DEEP = 100_000
#: Bytes of a large file, and of the memory that a child may have beside what it begins with.
BIG, MEMORY = 1 << 30, 256 << 20

#: The row of queue a with the messages that are on their way to b, and one of them.
ROW, GIVEN = "a/.dropq/transfers/0123456789abcdef", "0123456789abcdef~4.1795515463246000-0976127296.T"
SUBSCRIPTION = "topic-root/t/.subscriptions/s.c"
#: The files, and what stands in those that the pattern does not have; `*` in a path stands for the one name there.
FILES = {
    "a/queue.toml": "",
    "a/selectors/s.toml": "",
    "a/selectors/.x.removed": 'to = "b"\ntoken = "abcdef"\n',
    "a/routing.properties": "r.selector=x=1\n",
    "a/write-lock.properties": "target-limit=100\ndelay-milliseconds=0\n",
    "a/.dropq/created": "",
    "a/.dropq/credits/*/[0-9a-z]*": "",
    "a/.dropq/reasons/error/*.json": "",
    "a/working/.job-x/manifest.json": '{"job": "x", "format": 1, "attempts": {"1": ["4.1.B"]}}',
    f"{ROW}/to.json": "",
    f"{ROW}/refused.json": '{"why": "because", "format": 1, "kind": "refused"}',
    f"{ROW}/1.json": json.dumps({"list": "0123456789abcdef", "format": 1, "given": [GIVEN]}),
    ".dropq/tokens/*": "",
    ".dropq/views/v": "",
    ".dropq/queues/*": "",
    ".dropq/meta/*.json": "",
    ".dropq/meta/.passes": '{"abcdef": 1}',
    f"{SUBSCRIPTION}/queue.toml": 'filter = "x=1"\n',
    f"{SUBSCRIPTION}/.dropq/created": "",
    f"{SUBSCRIPTION}/.dropq/recovering": "epoch",
    "topic-root/t/.incoming/.dropq/receivers/*": "",
    "topic-root/t/queue.toml": "",
}


def nested(content: str) -> str:
    """A file of the same form, with something in it that is nested deeply."""
    deep = "[" * DEEP + "]" * DEEP
    if content.startswith("{"):
        return content.replace("{", f'{{"{next(iter(json.loads(content)))}": {deep}, ', 1)
    return f"{content.partition(' = ')[0]} = {deep}\n" if " = " in content else content.replace("=", f"={'(' * DEEP}")


def ending(content: str, end: str) -> str:
    """A file of the same form whose texts all end in something else."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        return value + end if isinstance(value, str) else value

    return json.dumps(changed(json.loads(content))) if content.startswith("{") else content.rstrip("\n") + end


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # a sweep may have finished what it was in
    path.write_bytes(content.encode("utf-8", "surrogatepass"))


def linked(path: Path, content: str) -> None:
    write(behind := path.parent / ".behind", content)
    path.symlink_to(behind.name)


def closed(path: Path, content: str) -> None:
    write(path, content)
    path.chmod(0)


def big(path: Path, content: str) -> None:
    write(path, content)
    os.truncate(path, BIG)


#: What may be the matter: makes a file, of which it gets what usually stands in it.
MATTERS: dict[str, Callable[[Path, str], object]] = {
    "nul": lambda path, content: write(path, ending(content, "\0x")),
    "surrogate": lambda path, content: write(path, ending(content, "\ud800")),
    "deep": lambda path, content: write(path, nested(content)),
    "other-form": lambda path, content: write(path, '["a", 1, {"to": null}, 1e999]'),
    "big": big,
    "fifo": lambda path, content: os.mkfifo(path),
    "link": linked,
    "dangling": lambda path, content: path.symlink_to("nothing"),
    "folder": lambda path, content: path.mkdir(),
    "closed": closed,
    "gone": lambda path, content: None,
    "gone-meanwhile": write,
}


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with each of the files in and around its queue a, and the queues b and c beside."""
    path = tmp_path_factory.mktemp("bad") / "root"
    root = timed(Root.create(path), AT_ONCE)
    a, b, _ = (root.create_queue(name, durability="none", redelivery_delay=0) for name in "abc")
    a.add_selector("s", to="b", filter="y=1", credit=2)
    b.add_selector("further", to="c", filter="z=1", credit=1000)
    a.send("moved", properties={"y": 1})
    assert a.route() == {"s": 1}
    a.send("waits", properties={"long": "x" * 200})
    a.send("fails")
    with a.subscribe(filter="long IS NULL") as subscription:
        message = subscription.receive()
        assert message is not None
        message.reject("bad")
    with root.create_topic("t", durability="none", redelivery_delay=0) as topic:
        topic.create_subscription("s", client_id="c")
        topic.publish("y")
    root.create_queue("v", durability="none", underlying_topic="t")
    (base(a) / "routing" / "r").mkdir()
    (base(a) / "routing" / "r.in-use").touch()
    (base(a) / "working" / ".job-x" / "1").mkdir(parents=True)
    (path / ROW / "target").mkdir(parents=True)
    (path / ROW / "target" / GIVEN).write_bytes(b"under way")
    [mark] = marks_in(b.layout.private)
    (path / ROW / "to.json").write_text(json.dumps({"queue": "b", "root": "", "format": 1, "mark": mark}))
    return path


@pytest.mark.parametrize("name", first_and_long(FILES, 8))
def test_a_bad_file_ends_nothing_and_stops_nobody_else(
    pattern: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "root"
    shutil.copytree(pattern, path, symlinks=True)
    file = next(path.glob(name), path / name)
    content = FILES[name] or file.read_text()
    monkeypatch.setattr(credit_audit, "AUDIT_INTERVAL", 0.0)

    def attempt() -> list[str]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        logging.disable(logging.CRITICAL)
        return [f"{matter}: {failure}" for matter in MATTERS for failure in failures(path, file, content, matter)]

    assert unprivileged(attempt, longest=300) == []


def failures(path: Path, file: Path, content: str, matter: str) -> Iterator[str]:
    """What a bad file ended that must go on, and what it made fail elsewhere."""
    make_bad(file, content, matter)
    for name, use in USES.items():
        if matter == "gone-meanwhile":
            write(file, content)
            remove_at_open(file)
        try:
            use(timed(Root(path), AT_ONCE))
        except DropqError as error:
            if name in SERVES_OTHERS:
                yield f"{name}: {error!r}"
        except BaseException as error:
            yield f"{name}: {error!r}"


def make_bad(file: Path, content: str, matter: str) -> None:
    """Put a bad file in the place of what is there."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    MATTERS[matter](file, content)


def remove_at_open(file: Path) -> None:
    """Let the next open of a file find that somebody has just removed it."""
    real, left = os.open, [file]

    def remove(path: Any, *args: Any, **kwargs: Any) -> int:
        if left and os.path.basename(os.fspath(path)) == file.name:
            left.pop().unlink(missing_ok=True)
        return real(path, *args, **kwargs)

    os.open = remove


def receive(queue: Queue) -> None:
    with queue.subscribe() as subscription:
        if (message := subscription.receive()) is not None:
            message.nack()


def receive_beside(root: Root) -> None:
    root.queue("b").send("x")
    with root.queue("b").subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        message.ack()


def one_pass(root: Root) -> dict[str, Taken]:
    """Let the routers of a root pass once; return what they took."""
    routers = Routers(root.context, sweep=lambda context: QuickSweep(context, routes=False))
    try:
        routers.one_pass()
        routers.find_credits()
        return routers.taken
    finally:
        routers.close()


def route_all(root: Root) -> None:
    root.queue("b").send("z", properties={"z": 1})
    assert one_pass(root)["b"].selectors == {"further": 1}


def sweep_all(root: Root) -> None:
    c = root.queue("c")
    c.send("later", delay=0.000_001)
    try:
        root.sweep()
    finally:
        assert c.counts()["delayed"] == 0


def check_all(root: Root) -> None:
    found = {health.queue: health for health in root.health()}
    assert {"a", "b", "c", "t", "v"} <= found.keys() and found["c"].healthy


#: What is done with the queue that has the bad file, or with all.
USES: dict[str, Callable[[Root], object]] = {
    "receive": lambda root: receive(root.queue("a")),
    "receive from the view": lambda root: receive(root.queue("v")),
    "receive from the subscription": lambda root: receive(root.queue("t/s.c")),
    "receive beside": receive_beside,
    "publish": lambda root: root.topic("t").publish("x", timeout=0),
    "work": lambda root: work(root.queue("a"), lambda message: message.nack(), until_empty=True),
    "route all": route_all,
    "sweep all": sweep_all,
    "health of all": check_all,
    "fsck": lambda root: root.queue("a").fsck(),
    "explain": lambda root: list(root.queue("a").explain()),
}
#: What must go on whatever a file of queue a says.
SERVES_OTHERS = ("receive beside", "route all", "health of all")


@pytest.mark.parametrize("place", ["topic-root/u", "topic-root/t", "topic-root/t/.subscriptions", "u"])
@pytest.mark.parametrize("matter", ["closed", "link-to-itself"])
def test_a_folder_that_nobody_may_enter_is_told_once_and_the_others_are_served(
    pattern: Path, tmp_path: Path, place: str, matter: str
) -> None:
    path = tmp_path / "root"
    shutil.copytree(pattern, path, symlinks=True)
    shutil.rmtree(path / place, ignore_errors=True)
    if matter == "closed":
        (path / place).mkdir(mode=0)
    else:
        (path / place).symlink_to((path / place).name)

    def attempt() -> tuple[list[str], list[str]]:
        said = Said()
        for use in (receive_beside, route_all, sweep_all):
            use(timed(Root(path), AT_ONCE))
        logging.getLogger("dropq").addHandler(said)
        root = timed(Root(path), AT_ONCE)
        routers = Routers(root.context, sweep=lambda context: QuickSweep(context, routes=False))
        for _ in range(3):
            routers._lists_at = 0.0
            routers.one_pass()
        routers.close()
        health = {each.queue: each for each in root.health()}
        assert {"a", "b", "c", "v"} <= health.keys() and health["c"].healthy
        root.doctor()
        fsck_root(root.context)
        unhealthy = [each.queue for each in health.values() if each.queue in "tu" and not each.healthy]
        return [line for line in said.lines if path.name in line and place in line], unhealthy

    said, unhealthy = unprivileged(attempt)
    if place != "u":
        assert len(said) == 1 and "passed over" in said[0]
    assert unhealthy == [place.split("/")[1 if "/" in place else 0]]


@pytest.mark.parametrize("address", ["a%00b", "%ED%A0%80", "..%2Fb", "t%2F%00.c"])
def test_a_return_address_that_no_queue_can_have_ends_nothing(tmp_path: Path, address: str) -> None:
    root = timed(Root.create(tmp_path / "root"), AT_ONCE)
    queue = root.create_queue("q", durability="none")
    queue.add_selector("back", op="bounce", to="*")
    drop(queue, f"4.x.B...{address}", b"x")
    assert list(queue.explain()) and root.graph() and root.health()
    one_pass(root)
    assert where(queue) == {"error": [b"x"]}


class Said(logging.Handler):
    """Keeps what the log says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
