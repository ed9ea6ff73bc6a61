"""A process dies before, in the middle of, and after each of its storage calls; then the promises are checked on disk.

What is checked afterwards is checked by plain system calls alone: every message that target/ had seen lies whole in
exactly one state folder, once more after a sweep, and nothing else lies in any.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import Clock, drop, lying

from dropq import Message, Queue, Root, admin, storage

#: The calls of dropq.storage that are counted; fsync does nothing here, for no power is cut.
COUNTED = ("open", "write", "rename", "unlink", "link", "mkdir", "rmdir", "fsync", "fchmod", "fchown", "utime")
DIED = 77
BODY, SECOND, THIRD = (word * 5000 for word in (b"body ", b"second ", b"third "))
LONG = {"text": "x" * 300}
NAME = "report.csv"


class Dying:
    """Stands for `os` in dropq.storage; once set, it ends the process before, midway in, or after the Nth call.

    Midway is in a write alone, of which half is done.
    """

    def __init__(self, *, noreplace: bool) -> None:
        self.left = -1
        self.when = "never"
        self._noreplace = noreplace
        self._rename_noreplace = storage.rename_noreplace

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in COUNTED:
            return real
        return lambda *args, **kwargs: self.call(name, (lambda *_: None) if name == "fsync" else real, *args, **kwargs)

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name != "write" and self.when == "midway":
            return real(*args, **kwargs)
        self.left -= 1
        if self.left == 0 and self.when == "midway":
            os.write(args[0], bytes(args[1])[: len(args[1]) // 2])
        if self.left == 0 and self.when != "after":
            os._exit(DIED)
        try:
            return real(*args, **kwargs)
        finally:
            if self.left == 0:
                os._exit(DIED)

    def rename_noreplace(self, source: str, destination: str) -> None:
        if not self._noreplace:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)
        self.call("rename", self._rename_noreplace, source, destination)


@dataclass(frozen=True)
class Crash:
    """An operation, and the states that each body may be in: when it died, swept after that, and when it did not die.

    States are separated by spaces; `gone` is in no state folder.
    """

    start: Callable[[Path], Callable[[], object]]
    died: Mapping[bytes, str]
    swept: Mapping[bytes, str]
    done: Mapping[bytes, str]
    also: Callable[[Path], None] = field(default=lambda root: None)


def new(root: Path, name: str = "q", **options: Any) -> Queue:
    return Root.create(root).create_queue(name, **options)


def taken(queue: Queue) -> Message:
    message = queue.receive()
    assert message is not None
    return message


def with_one(act: Callable[[Message], object], **options: Any) -> Callable[[Path], Callable[[], object]]:
    """An operation on one message that is held."""

    def start(root: Path) -> Callable[[], object]:
        queue = new(root, **options)
        queue.send(BODY, properties=LONG)
        message = taken(queue)
        return lambda: act(message)

    return start


def sending(act: Callable[[Queue], object]) -> Callable[[Path], Callable[[], object]]:
    def start(root: Path) -> Callable[[], object]:
        queue = new(root)
        return lambda: act(queue)

    return start


def write(queue: Queue) -> None:
    with queue.writer() as out:
        out.write(BODY[:10])
        out.write(BODY[10:])


def send_file(move: bool) -> Callable[[Path], Callable[[], object]]:
    def start(root: Path) -> Callable[[], object]:
        queue = new(root, file_mode="0640")
        source = root / "source"
        source.write_bytes(BODY)
        return lambda: queue.send_file(source, move=move)

    return start


def nowhere_lost(root: Path) -> None:
    """A file that is moved into a queue is in its old place, in working/, or sent."""
    found = [root / "source", *(root / "q" / "working").iterdir(), *(root / "q" / "target").iterdir()]
    assert BODY in [path.read_bytes() for path in found if path.exists()]


def receiving(**options: Any) -> Callable[[Path], Callable[[], object]]:
    def start(root: Path) -> Callable[[], object]:
        queue = new(root, **options)
        drop(queue, "ä" * 110 + ".csv", BODY)
        return lambda: queue.subscribe().receive()

    return start


def same_names(act: Callable[[Message], object]) -> Callable[[Path], Callable[[], object]]:
    """A foreign file goes where one of the same name lies already."""

    def start(root: Path) -> Callable[[], object]:
        queue = new(root)
        for body in (BODY, SECOND):
            drop(queue, NAME, body)
            message = taken(queue)
            if body == BODY:
                act(message)
        return lambda: act(message)

    return start


def in_error(act: Callable[[Queue], object]) -> Callable[[Path], Callable[[], object]]:
    def start(root: Path) -> Callable[[], object]:
        queue = new(root)
        queue.root.create_queue("other")
        Root.create(root / "elsewhere").create_queue("far")
        queue.send(BODY, properties=LONG)
        drop(queue, NAME, SECOND)
        taken(queue).reject("r")
        taken(queue).reject("r")
        return lambda: act(queue)

    return start


def closing(root: Path) -> Callable[[], object]:
    queue = new(root)
    queue.send_many([BODY, SECOND])
    subscription = queue.subscribe(max_backlog=2)
    assert len(subscription.receive_many(2)) == 2
    return subscription.close


def sweeping(root: Path) -> Callable[[], object]:
    """Of three messages one is held by the dead, one has expired, one was delayed."""
    clock = Clock()
    queue = Root.create(root, clock=clock).create_queue("q", expiration_model="default")
    queue.send(BODY, properties=LONG)
    if (child := os.fork()) == 0:
        os._exit(0 if queue.receive() is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    queue.send(SECOND, expires_in=5)
    queue.send(THIRD, delay=5)
    clock.advance(10)
    return queue.sweep


def exhausting(root: Path) -> Callable[[], object]:
    clock = Clock()
    queue = Root.create(root, clock=clock).create_queue("q", max_deliveries=1, lease_period="5s", exhausted="expired")
    drop(queue, NAME, BODY)
    taken(queue)
    clock.advance(10)
    return queue.sweep


def pruning(root: Path) -> Callable[[], object]:
    queue = new(root, max_history=1)
    for body in (BODY, SECOND):
        queue.send(body)
        taken(queue).ack()
    return queue.sweep


def deleting(root: Path) -> Callable[[], object]:
    queue = new(root)
    queue.send(BODY)
    taken(queue).ack()
    queue.close()
    return lambda: queue.root.delete_queue("q")


def requeue(queue: Queue, **options: Any) -> None:
    assert all(outcome.ok for outcome in admin.requeue(queue, **options))


def move(queue: Queue, to: Queue) -> None:
    assert all(outcome.ok for outcome in admin.move(queue, to, state="error"))


def purge(queue: Queue) -> None:
    assert all(outcome.ok for outcome in admin.purge(queue, state="error"))


def far(queue: Queue) -> Queue:
    return Root(queue.root.path / "elsewhere").queue("far")


CRASHES: dict[str, Crash] = {
    "send": Crash(
        sending(lambda queue: queue.send(BODY)),
        died={BODY: "gone target"}, swept={BODY: "gone target"}, done={BODY: "target"},
    ),
    "send, metadata spilled": Crash(
        sending(lambda queue: queue.send(BODY, properties=LONG)),
        died={BODY: "gone target"}, swept={BODY: "gone target"}, done={BODY: "target"},
    ),
    "send, delayed": Crash(
        sending(lambda queue: queue.send(BODY, delay="1h")),
        died={BODY: "gone delayed"}, swept={BODY: "gone delayed"}, done={BODY: "delayed"},
    ),
    "send_many": Crash(
        sending(lambda queue: queue.send_many([BODY, SECOND, THIRD])),
        died=dict.fromkeys((BODY, SECOND, THIRD), "gone target"),
        swept=dict.fromkeys((BODY, SECOND, THIRD), "gone target"),
        done=dict.fromkeys((BODY, SECOND, THIRD), "target"),
    ),
    "writer": Crash(
        sending(write), died={BODY: "gone target"}, swept={BODY: "gone target"}, done={BODY: "target"},
    ),
    "send_file": Crash(
        send_file(False), died={BODY: "gone target"}, swept={BODY: "gone target"}, done={BODY: "target"},
        also=nowhere_lost,
    ),
    "send_file, moved": Crash(
        send_file(True), died={BODY: "gone target"}, swept={BODY: "gone target"}, done={BODY: "target"},
        also=nowhere_lost,
    ),
    "receive": Crash(
        receiving(), died={BODY: "target processing"}, swept={BODY: "target"}, done={BODY: "processing"},
    ),
    "receive, at most once": Crash(
        receiving(semantics="at-most-once"),
        died={BODY: "target processing processed"}, swept={BODY: "target processed"}, done={BODY: "processed"},
    ),
    "receive, at most once without history": Crash(
        receiving(semantics="at-most-once", history=False),
        died={BODY: "target processing gone"}, swept={BODY: "target gone"}, done={BODY: "gone"},
    ),
    "ack": Crash(
        with_one(lambda message: message.ack()),
        died={BODY: "processing processed"}, swept={BODY: "target processed"}, done={BODY: "processed"},
    ),
    "ack without history": Crash(
        with_one(lambda message: message.ack(), history=False),
        died={BODY: "processing gone"}, swept={BODY: "target gone"}, done={BODY: "gone"},
    ),
    "ack, a name that is taken": Crash(
        same_names(lambda message: message.ack()),
        died={BODY: "processed", SECOND: "processing processed"},
        swept={BODY: "processed", SECOND: "target processed"},
        done={BODY: "processed", SECOND: "processed"},
    ),
    "nack": Crash(
        with_one(lambda message: message.nack()),
        died={BODY: "processing target"}, swept={BODY: "target"}, done={BODY: "target"},
    ),
    "nack, delayed": Crash(
        with_one(lambda message: message.nack(delay="1h")),
        died={BODY: "processing delayed"}, swept={BODY: "target delayed"}, done={BODY: "delayed"},
    ),
    "fail": Crash(
        with_one(lambda message: message.fail("f")),
        died={BODY: "processing error"}, swept={BODY: "target error"}, done={BODY: "error"},
    ),
    "fail, to be tried again": Crash(
        with_one(lambda message: message.fail("f"), redelivery_attempts=3),
        died={BODY: "processing target"}, swept={BODY: "target"}, done={BODY: "target"},
    ),
    "reject": Crash(
        with_one(lambda message: message.reject("r")),
        died={BODY: "processing error"}, swept={BODY: "target error"}, done={BODY: "error"},
    ),
    "reject, a name that is taken": Crash(
        same_names(lambda message: message.reject("r")),
        died={BODY: "error", SECOND: "processing error"},
        swept={BODY: "error", SECOND: "target error"},
        done={BODY: "error", SECOND: "error"},
    ),
    "expire": Crash(
        with_one(lambda message: message.expire()),
        died={BODY: "processing expired"}, swept={BODY: "target expired"}, done={BODY: "expired"},
    ),
    "extend": Crash(
        with_one(lambda message: message.extend("1h"), lease_period="1h"),
        died={BODY: "processing"}, swept={BODY: "target"}, done={BODY: "processing"},
    ),
    "close": Crash(
        closing, died=dict.fromkeys((BODY, SECOND), "processing target"),
        swept=dict.fromkeys((BODY, SECOND), "target"), done=dict.fromkeys((BODY, SECOND), "target"),
    ),
    "requeue": Crash(
        in_error(requeue), died=dict.fromkeys((BODY, SECOND), "error target"),
        swept=dict.fromkeys((BODY, SECOND), "error target"), done=dict.fromkeys((BODY, SECOND), "target"),
    ),
    "requeue, to another queue": Crash(
        in_error(lambda queue: requeue(queue, to=queue.root.queue("other"))),
        died=dict.fromkeys((BODY, SECOND), "error other"),
        swept=dict.fromkeys((BODY, SECOND), "error other"), done=dict.fromkeys((BODY, SECOND), "other"),
    ),
    "move": Crash(
        in_error(lambda queue: move(queue, queue.root.queue("other"))),
        died=dict.fromkeys((BODY, SECOND), "error other"),
        swept=dict.fromkeys((BODY, SECOND), "error other"), done=dict.fromkeys((BODY, SECOND), "other"),
    ),
    "move, to another root": Crash(
        in_error(lambda queue: move(queue, far(queue))),
        died=dict.fromkeys((BODY, SECOND), "error far"),
        swept=dict.fromkeys((BODY, SECOND), "error far"), done=dict.fromkeys((BODY, SECOND), "far"),
    ),
    "purge": Crash(
        in_error(purge), died=dict.fromkeys((BODY, SECOND), "error gone"),
        swept=dict.fromkeys((BODY, SECOND), "error gone"), done=dict.fromkeys((BODY, SECOND), "gone"),
    ),
    "sweep": Crash(
        sweeping,
        died={BODY: "processing target", SECOND: "target expired", THIRD: "delayed target"},
        swept={BODY: "target", SECOND: "target expired", THIRD: "delayed target"},
        done={BODY: "target", SECOND: "expired", THIRD: "target"},
    ),
    "sweep, exhausted": Crash(
        exhausting, died={BODY: "processing expired"}, swept={BODY: "expired"}, done={BODY: "expired"},
    ),
    "sweep, history": Crash(
        pruning, died={BODY: "processed gone", SECOND: "processed"},
        swept={BODY: "gone", SECOND: "processed"}, done={BODY: "gone", SECOND: "processed"},
    ),
    "delete": Crash(
        deleting, died={BODY: "processed gone"}, swept={BODY: "processed gone"}, done={BODY: "gone"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("noreplace", [True, False], ids=["noreplace", "reservations"])
@pytest.mark.parametrize("name", CRASHES)
def test_whenever_it_dies_each_message_is_whole_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, noreplace: bool
) -> None:
    crash, dying = CRASHES[name], Dying(noreplace=noreplace)
    monkeypatch.setattr(storage, "os", dying)
    monkeypatch.setattr(storage, "rename_noreplace", dying.rename_noreplace)
    # What it leaves after a call is what it leaves before the next one: one of the two for each kind of file system.
    for when in ("after", "midway") if noreplace else ("before",):
        for at in itertools.count(1):
            root = tmp_path / f"{when}-{at}"
            outcome = _in_a_child(crash, root, dying, at, when)
            allowed = crash.died if outcome == DIED else crash.done
            _check(root, allowed, f"{name}: died {when} call {at}" if outcome == DIED else f"{name}: done")
            crash.also(root)
            if outcome == 0:
                assert at > 1 or when == "midway", "no storage call was counted"
                break
            for path in (root / "q", root / "other", root / "elsewhere" / "far"):
                if path.exists():
                    Root(path.parent).queue(path.name).sweep()
            _check(root, crash.swept, f"{name}: died {when} call {at}, then swept")
            assert not list(_held(root)), f"{name}: died {when} call {at}: a dead consumer holds on"
            shutil.rmtree(root)


def _in_a_child(crash: Crash, root: Path, dying: Dying, at: int, when: str) -> int:
    """Run an operation in a forked child; return DIED, or 0 when it was done before it could die."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            root.mkdir()
            operation = crash.start(root)
            dying.left, dying.when = at, when
            operation()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, DIED), f"the child ended with {status}"
    return status


def _check(root: Path, allowed: Mapping[bytes, str], moment: str) -> None:
    """Each body whole in exactly one allowed place, nothing else anywhere but in working/, and every sidecar there."""
    found: dict[bytes, list[str]] = {body: [] for body in allowed}
    for folder in _queues(root):
        for state, bodies in lying(folder).items():
            if state == "working":
                continue
            for body in bodies:
                assert body in found, f"{moment}: {state}/ has {len(body)} bytes that were never sent: {body[:20]!r}"
                found[body].append(state if folder.name == "q" else folder.name)
        for state in ("target", "processing", "processed", "error", "expired", ".dropq/delayed"):
            for name in os.listdir(folder / state) if (folder / state).exists() else ():
                for token in re.findall(r"JMS_dropq_metaS=(\w+)", name):
                    sidecar = folder.parent / ".dropq" / "meta" / f"{token}.json"
                    assert sidecar.read_bytes().endswith(b"}"), f"{moment}: {sidecar}"
    for body, places in found.items():
        assert len(places) <= 1, f"{moment}: {body[:8]!r} lies in {places}"
        place = places[0] if places else "gone"
        assert place in allowed[body].split(), f"{moment}: {body[:8]!r} is {place}, and may be {allowed[body]}"


def _queues(root: Path) -> Iterator[Path]:
    yield from (path for path in (root / "q", root / "other", root / "elsewhere" / "far") if path.exists())


def _held(root: Path) -> Iterator[str]:
    for folder in _queues(root):
        yield from os.listdir(folder / "processing")
