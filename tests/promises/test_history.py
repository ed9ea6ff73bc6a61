"""What was acknowledged is kept as long, and as many messages of it, as the queue says."""

from __future__ import annotations

import errno
import os

import pytest
from helpers import Clock, Make, base, names_in, next_moment, take, where

from dropq import Queue
from dropq.cli import main
from dropq.storage.files import Storage


def test_the_oldest_history_goes_first_and_none_early(make: Make) -> None:
    queue = make(max_history=2)
    for body in (b"a", b"b", b"c", b"d"):
        queue.send(body)
        take(queue).ack()
        next_moment(base(queue))
    assert queue.sweep().pruned == 2
    assert where(queue) == {"processed": [b"c", b"d"]}
    assert queue.sweep().pruned == 0


def test_history_is_kept_for_its_age(make: Make, clock: Clock) -> None:
    queue = make(history_age="1h")
    queue.send(b"a")
    take(queue).ack()
    clock.advance(3590)
    assert queue.sweep().pruned == 0
    clock.advance(20)
    assert queue.sweep().pruned == 1
    assert where(queue) == {}


def test_retention_looks_at_processed_alone(make: Make, clock: Clock) -> None:
    queue = make(max_history=0, history_age="0s")
    queue.send_many([b"a", b"b", b"c"])
    take(queue).reject("r")
    take(queue).expire()
    clock.advance(10)
    assert queue.sweep().pruned == 0
    assert where(queue) == {"error": [b"a"], "expired": [b"b"], "target": [b"c"]}


def _with_a_fixed_file(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archive four messages; the oldest, `a`, cannot be removed."""
    for body in (b"a", b"b", b"c", b"d"):
        queue.send(body)
        take(queue).ack()
        next_moment(base(queue))
    (fixed,) = (message.path for message in queue.browse("processed") if message.body == b"a")
    real = Storage.discard

    def discard(self: Storage, path: str, folder: str) -> None:
        if path == str(fixed):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        real(self, path, folder)

    monkeypatch.setattr(Storage, "discard", discard)


def test_a_file_that_cannot_be_removed_keeps_no_younger_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(max_history=2)
    _with_a_fixed_file(queue, monkeypatch)
    report = queue.sweep()
    assert (report.pruned, report.refused) == (1, 1)
    assert where(queue) == {"processed": [b"a", b"c", b"d"]}
    queue.send(b"e")
    take(queue).ack()
    report = queue.sweep()
    assert (report.pruned, report.refused) == (1, 1)
    assert where(queue) == {"processed": [b"a", b"d", b"e"]}


def test_a_prune_reports_the_file_that_it_cannot_remove_and_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = make(max_history=2)
    _with_a_fixed_file(queue, monkeypatch)
    assert main.main(["--root", str(queue.root.path), "prune", queue.name, "--yes"]) == 1
    assert capsys.readouterr().err.endswith("removed=1 failed=1\n")
    assert where(queue) == {"processed": [b"a", b"c", b"d"]}
    (stays,) = queue.prune()
    assert not stays.ok and "the message stays in processed/" in stays.detail
    assert [message.id for message in queue.browse("processed") if message.body == b"a"] == [stays.id]


def _refusing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Let a call of the system be refused the next time it is made."""
    real = getattr(os, call)

    def refused(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(os, call, real)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, refused)


def test_an_ack_without_a_history_that_cannot_unlink_is_an_ack(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(history=False)
    queue.send("a")
    message = take(queue)
    _refusing(monkeypatch, "unlink")
    message.ack()
    assert message.state == "removed" and not names_in(queue, "processing")
    assert [name for name in os.listdir(queue.layout.private) if name.startswith(".gone-")]
