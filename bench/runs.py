"""A run of one queue: by one process or by several at once, and the account of every message.

A message counts when it was taken once, whole, and lies settled where a queue keeps what is settled.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from peers import Peer

#: Bytes of a body; it begins with its number.
SIZE = 1024
#: Seconds that a consumer waits which found nothing.
PAUSE = 0.001
#: Seconds after which processes that work together are given up.
LIMIT = 300.0


@dataclass
class Run:
    """What a run came to: seconds in all, and of sending and taking where these went apart; and the account."""

    messages: int
    whole: float
    sending: float = 0.0
    taking: float = 0.0
    lost: int = 0
    doubled: int = 0
    #: Claims that came too late, where they were counted.
    wasted: int | None = None


def body_of(number: int) -> bytes:
    """Return a body that tells its number."""
    return f"{number:012d}".encode().ljust(SIZE, b"x")


def number_of(body: bytes) -> int | None:
    """Return the number of a body; None where it is not whole."""
    start = body[:12]
    return int(start) if start.isdigit() and body == body_of(int(start)) else None


def accounted(run: Run, bodies: Iterable[bytes], settled: int | None) -> Run:
    """Fill in what was lost and what came twice.

    Args:
        run: the run.
        bodies: what was taken.
        settled: how many messages lie settled; None where the queue does not keep them.
    """
    taken = [number for number in map(number_of, bodies) if number is not None]
    once = len(set(taken))
    run.lost = run.messages - (once if settled is None else min(once, settled))
    run.doubled = len(taken) - once
    return run


def one_and_one(peer: type[Peer], folder: str, messages: int) -> Run:
    """Send all by one process, then take all by the same."""
    bodies = [body_of(number) for number in range(messages)]
    queue = peer(folder)
    started = time.perf_counter()
    queue.put_all(bodies)
    sent = time.perf_counter()
    taken = list(queue.take_all())
    ended = time.perf_counter()
    queue.close()
    run = Run(messages, ended - started, sending=sent - started, taking=ended - sent)
    return accounted(run, taken, peer.settled(folder))


def four_and_four(peer: type[Peer], folder: str, messages: int, *, counting: bool = False) -> Run:
    """Send by four processes and take by four others, all at once."""
    return Team(peer, folder).run(messages, senders=4, takers=4, counting=counting)


def four_that_take(peer: type[Peer], folder: str, messages: int, *, counting: bool = False) -> Run:
    """Take by four processes what was sent before: none of them ever waits."""
    queue = peer(folder)
    queue.put_all([body_of(number) for number in range(messages)])
    queue.close()
    return Team(peer, folder).run(messages, senders=0, takers=4, counting=counting)


@dataclass
class Share:
    """What one process of several did: when it began and last took something, what it took, how often too late."""

    started: float
    ended: float = 0.0
    taken: list[bytes] = field(default_factory=list)
    late: int = 0


class Team:
    """Processes that work on one queue; each opens it for itself, and none begins before all are up."""

    def __init__(self, peer: type[Peer], folder: str) -> None:
        self.peer, self.folder = peer, folder
        self.context = multiprocessing.get_context("fork")
        self.results: Any = self.context.Queue()

    def run(self, messages: int, *, senders: int, takers: int, counting: bool) -> Run:
        """Share the messages out among the senders, and let the takers take until all is sent and none waits.

        Raises:
            RuntimeError: one of them failed.
        """
        self.sending = self.context.Value("i", senders)
        self.gate = self.context.Barrier(senders + takers, timeout=LIMIT)
        works: list[Callable[[], Any]] = [lambda n=n: self._send(range(n, messages, senders)) for n in range(senders)]  # type: ignore[misc]
        works += [lambda: self._take(counting)] * takers
        jobs = [self.context.Process(target=self._work, args=(work,), daemon=True) for work in works]
        for job in jobs:
            job.start()
        try:
            results = [self.results.get(timeout=LIMIT) for _ in jobs]
            for job in jobs:
                job.join(LIMIT)
        finally:
            for job in jobs:
                job.kill()
        failures = [result for result in results if isinstance(result, str)]
        if failures:
            raise RuntimeError(next(filter(None, failures), "not all processes came up"))
        whole = max(one.ended for one in results) - min(one.started for one in results)
        run = Run(messages, whole, wasted=sum(one.late for one in results) if counting else None)
        return accounted(run, (body for one in results for body in one.taken), self.peer.settled(self.folder))

    def _work(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except threading.BrokenBarrierError:
            result = ""  # another failed, and its result tells why
        except Exception as error:
            self.gate.abort()
            result = f"{type(error).__name__}: {error}"
        self.results.put(result)

    def _send(self, share: range) -> Share:
        try:
            bodies = [body_of(number) for number in share]
            queue = self.peer(self.folder)
            self.gate.wait()
            started = time.monotonic()
            queue.put_all(bodies)
            queue.close()
            return Share(started, started)
        finally:
            with self.sending.get_lock():
                self.sending.value -= 1

    def _take(self, counting: bool) -> Share:
        late = Late() if counting else None
        queue = self.peer(self.folder)
        self.gate.wait()
        share = Share(time.monotonic())
        while True:
            over = not self.sending.value  # before the look: what was sent until then is found
            before = len(share.taken)
            share.taken.extend(queue.take_all())
            if len(share.taken) > before:
                share.ended = time.monotonic()
            elif over:
                break
            else:
                time.sleep(PAUSE)
        queue.close()
        share.late = late.count if late else 0
        return share


class Late:
    """Counts, from now on, this process' renames that came too late: another had taken the file."""

    def __init__(self) -> None:
        self.count = 0
        self._rename = os.rename
        os.rename = self._counted  # type: ignore[assignment]

    def _counted(self, source: str, destination: str) -> None:
        try:
            self._rename(source, destination)
        except FileNotFoundError:
            self.count += 1
            raise
