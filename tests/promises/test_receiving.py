"""A message that cannot be claimed keeps nobody from those that can, and is reported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import unprivileged
from helpers import Clock, Make, archive, base, drop, reopened, where

from dropq import StorageError, work
from dropq.lifecycle.settlement import Claims


def put_a_file_for(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def forbid(folder: Path) -> None:
    folder.chmod(0o555)


@pytest.mark.parametrize("hinder", [put_a_file_for, forbid])
def test_a_message_that_cannot_be_claimed_is_told_of_once_all_others_are_handled(
    make: Make, clock: Clock, hinder: Callable[[Path], None]
) -> None:
    queue = make()
    hinder(Path(queue.root.layout.meta))
    drop(queue, f"{'l' * 200}.csv", b"bad")
    clock.advance(10)  # the bad one is the oldest
    for body in (b"1", b"2", b"3"):
        queue.send(body)

    def worker() -> tuple[list[bytes], str]:
        handled: list[bytes] = []
        try:
            work(reopened(queue), lambda message: handled.append(message.body), until_empty=True)
        except StorageError as error:
            return handled, str(error)
        return handled, ""

    handled, refusal = unprivileged(worker)
    assert handled == [b"1", b"2", b"3"]
    assert "nothing was moved" in refusal
    assert where(queue) == {"target": [b"bad"], "processed": handled}


def test_a_message_that_could_not_be_claimed_is_not_told_of_once_it_has_gone(make: Make, clock: Clock) -> None:
    queue = make()
    put_a_file_for(Path(queue.root.layout.meta))
    bad = f"{'l' * 200}.csv"
    drop(queue, bad, b"bad")
    clock.advance(10)
    archive(queue, b"good")
    os.unlink(base(queue) / "target" / bad)
    assert queue.receive() is None


def test_receive_many_returns_what_it_claimed_before_a_claim_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    for body in (b"1", b"2", b"3"):
        queue.send(body)
    claim, claims = Claims(queue.context).claim, iter([True, True])

    def failing(_: Claims, *args: Any) -> Any:
        if next(claims, False):
            return claim(*args)
        raise StorageError("the third one fails")

    with queue.subscribe(max_backlog=3) as subscription:
        monkeypatch.setattr(Claims, "claim", failing)
        assert [message.body for message in subscription.receive_many(3)] == [b"1", b"2"]
