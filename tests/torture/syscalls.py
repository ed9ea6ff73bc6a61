"""System calls of a process at work are refused by strace, below Python: what the injected faults may have missed.

A process does a little of everything in a root, once strace is attached to it, and says what came of each verb. That is
held against the disk.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from dropq import DropqError, Queue, Root
from torture.account import body, judge, look
from torture.table import NotRun, Options, Row

#: System calls, and what each is refused with; a case for each of the first so many, in the long form and in short.
REFUSED = {
    "openat": ("EIO", "EMFILE", "EACCES"),
    "write": ("ENOSPC", "EIO"),
    "fsync": ("EIO",),
    "rename": ("EIO", "EROFS", "ESTALE"),
    "renameat2": ("EIO", "ENOSPC"),
    "getdents64": ("EIO", "ESTALE"),
    "unlink": ("EIO", "EACCES"),
    "newfstatat": ("EIO",),
}
FIRST = {True: 14, False: 1}


def run(options: Options) -> Iterable[Row]:
    """Refuse each of the first calls of every kind."""
    if not shutil.which("strace"):
        raise NotRun("no strace: apt-get install strace")
    row = Row("fault at every system call, by strace")
    for call, errors in REFUSED.items():
        for error in errors:
            for number in range(1, FIRST[options.long] + 1):
                _case(row, options.folder / "root", f"{call}:error={error}:when={number}")
    return [row]


def _case(row: Row, folder: Path, inject: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    queue = Root.create(folder).create_queue("q", redelivery_attempts=1)
    queue.send_many(body(f"waits {number}", 3000) for number in range(8))
    command = [sys.executable, "-m", "torture.syscalls", str(folder)]
    ours, others = socket.socketpair()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=others.fileno()) as child, ours.makefile() as trace:
        others.close()
        assert child.stdin is not None
        trace.readline()
        with _attached(child.pid, inject) as refused:
            child.stdin.close()
            said = [json.loads(line) for line in trace]
            child.wait()
    ours.close()
    row.cases += 1
    row.faults += bool(refused)
    if child.returncode or not said or said[-1] != {"end": True}:
        row.wrong.append(f"{inject}: the process ended with {child.returncode}")
    waited = {f"waits {number}" for number in range(8)}
    tried = {name for one in said[:-1] for name in one.get("sent", ())}
    returned = {name for one in said[:-1] if not one["raised"] for name in one.get("sent", ())}
    for one in said[:-1]:
        if one["raised"] and one["raised"] != "StorageError":
            row.wrong.append(f"{inject}: {one['verb']} raises {one['raised']}: {one['words']}")
        if one["raised"] and "visible" in one["words"]:
            returned |= {*one.get("sent", ())}
        elif one["raised"] and "not sent" in one["words"]:
            tried -= {*one.get("sent", ())}
    row.count(judge(look(folder), must=waited | returned, may=tried), inject)
    Root(folder).sweep()
    row.count(judge(look(folder), must=waited | returned, may=tried), f"{inject}, swept")


@contextmanager
def _attached(pid: int, inject: str) -> Iterator[list[str]]:
    """Attach strace to a process; the list has the lines of calls that were refused, in the end."""
    call = inject.partition(":")[0]
    command = ["strace", "-f", "-e", f"trace={call}", "-e", f"inject={inject}", "-p", str(pid)]
    refused: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        while "attached" not in tracer.stderr.readline():
            if tracer.poll() is not None:
                raise NotRun("strace may not attach to a process here: it takes CAP_SYS_PTRACE")
        yield refused
        refused += [line for line in tracer.stderr if re.search(r"\(INJECTED\)", line)]


def main(folder: str) -> None:
    """Do a little of everything, and say what came of it."""
    import_module("dropq.upkeep.bulk")  # now: who imports lists folders, too, and those calls are not of a verb
    queue = Root(folder).queue("q")
    subscription = queue.subscribe(max_backlog=None, lease_period="1h")
    messages = subscription.receive_many(6)
    out = socket.socket(fileno=1)  # it is sent to, and not written: writes are refused
    out.sendall(b"ready\n")
    sys.stdin.read()
    acked, nacked, failed, rejected, expired, extended = messages
    verbs: list[tuple[str, Callable[[], object], list[str]]] = [
        ("send", lambda: queue.send(body("sent 1", 3000)), ["sent 1"]),
        ("send with a long name", lambda: queue.send(body("sent 2"), properties={"x": "y" * 200}), ["sent 2"]),
        ("send, delayed", lambda: queue.send(body("sent 3"), delay="1h"), ["sent 3"]),
        ("writer", lambda: _write(queue, "sent 4"), ["sent 4"]),
        ("ack", acked.ack, []),
        ("nack", nacked.nack, []),
        ("fail", lambda: failed.fail("f"), []),
        ("reject", lambda: rejected.reject("r"), []),
        ("expire", expired.expire, []),
        ("extend", lambda: extended.extend("2h"), []),
        ("receive", subscription.receive, []),
        ("requeue", queue.requeue, []),
        ("counts", queue.counts, []),
        ("sweep", queue.sweep, []),
        ("close", subscription.close, []),
    ]
    for verb, call, sent in verbs:
        raised = words = ""
        try:
            call()
        except (DropqError, OSError) as error:
            raised, words = type(error).__name__, str(error)
        out.sendall(json.dumps({"verb": verb, "raised": raised, "words": words, "sent": sent}).encode() + b"\n")
    out.sendall(json.dumps({"end": True}).encode() + b"\n")


def _write(queue: Queue, name: str) -> None:
    with queue.writer() as out:
        out.write(body(name, 20_000))


if __name__ == "__main__":
    main(sys.argv[1])
