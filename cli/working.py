"""Working a queue off, and waiting for others to do so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dropq.errors import NoSuchMessage

from . import output
from .options import Json, QueueName, duration
from .output import NEGATIVE, OK, TRY_LATER
from .shell import Shell, UsageError

if TYPE_CHECKING:
    from dropq import Queue

#: Seconds between two looks of `wait`: the first pause, and the longest, to which it doubles.
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
#: States of messages that are yet to be worked on.
UNSETTLED = ("target", "delayed", "processing")


def wait(
    ctx: typer.Context,
    queue: QueueName,
    empty: Annotated[bool, typer.Option("--empty", help="Until nothing waits, is delayed, or is worked on.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=0, help="Until at least N messages wait.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="Until this message is settled.")] = None,
    timeout: Annotated[float | None, duration("--timeout", help="How long at most; exits with 75 then.")] = None,
    json: Json = False,
) -> int:
    """Wait until a queue is empty, has so many messages, or a message is settled.

    With --id it exits with 0 when the message was acknowledged, and with 1 when it ended in error/ or expired/;
    prints the state that it ended in.
    """
    if sum((empty, count is not None, id is not None)) != 1:
        raise UsageError("wait for one thing: --empty, --count N or --id ID")
    shell = Shell(ctx, json)
    found = shell.queue(queue)
    if id is not None:
        return _wait_for_one(shell, found, output.unescape(id), timeout)
    least = count or 0

    def reached() -> bool:
        counts = found.counts()
        return not any(counts[state] for state in UNSETTLED) if empty else counts["target"] >= least

    return OK if _until(reached, timeout) else _timed_out(found)


def _wait_for_one(shell: Shell, queue: Queue, id: str, timeout: float | None) -> int:
    state = _state(queue, id)
    if state is None and queue.config.history:
        queue.find(id)  # it is nowhere, and this says so
    if not _until(lambda: _state(queue, id) not in UNSETTLED, timeout):
        return _timed_out(queue)
    ended = _state(queue, id) or "processed"
    shell.line({"id": id, "state": ended}, ("state",))
    return OK if ended == "processed" else NEGATIVE


def _state(queue: Queue, id: str) -> str | None:
    for _ in range(2):  # RACE: a message that goes back while the folders are read in turn is met on a second look
        try:
            return queue.find(id).state
        except NoSuchMessage:
            continue
    return None


def _timed_out(queue: Queue) -> int:
    output.note(f"queue {queue.name}: that did not happen in time")
    return TRY_LATER


def _until(reached: Callable[[], bool], timeout: float | None) -> bool:
    end = None if timeout is None else time.monotonic() + timeout
    for pause in _pauses():
        if reached():
            return True
        left = pause if end is None else min(pause, end - time.monotonic())
        if left <= 0:
            return False
        time.sleep(left)
    raise AssertionError("unreachable: pauses never end")


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * 2, LONGEST_PAUSE)
