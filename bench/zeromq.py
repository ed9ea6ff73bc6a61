"""Measure a queue that is served over ZeroMQ beside a server of a deque in memory, and beside batches without sockets.

In each round all run one after the other, and what counts are the ratios within a round. The server of a deque has the
same sockets and answers the same frames, as simply as it can: what is left to measure is the queue. On a disk, where
each answer and each ack is synced, one process sends and acknowledges in batches of as many as are outstanding, without
sockets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import zmq

import dropq
from bench import scratch

BODY = b"x" * 1024
OUTSTANDING = 200
ANY = "tcp://127.0.0.1:*"


class Case(NamedTuple):
    """What is measured: how many producers, how many answers each waits for at once, and whether a consumer acks."""

    what: str
    messages: int
    producers: int
    outstanding: int
    through: bool


CASES = (
    Case("in, one producer", 3_000, 1, 1, False),
    Case("in, 200 outstanding", 20_000, 1, OUTSTANDING, False),
    Case("through, one producer", 3_000, 1, 1, True),
    Case("through, eight producers", 8_000, 8, 1, True),
    Case("through, 200 outstanding", 10_000, 1, OUTSTANDING, True),
)


# -- servers -----------------------------------------------------------------------------------------------------------


def serve_deque() -> None:
    """Serve a deque in memory until killed."""
    context = zmq.Context()
    receive, send = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    receive.sndhwm, send.sndhwm = 100_000, 10
    for socket in (receive, send):
        socket.bind(ANY)
    print("deque", receive.LAST_ENDPOINT.decode(), send.LAST_ENDPOINT.decode(), sep="\t", flush=True)
    waiting, out = deque[list[bytes]](), dict[bytes, list[bytes]]()
    keys, blocked = 0, False
    while True:
        poller = zmq.Poller()
        poller.register(receive, zmq.POLLIN)
        poller.register(send, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
        poller.poll()
        while (frames := _frames(send)) is not None:
            message = out.pop(frames[0])
            if frames[1] != b"1":
                waiting.appendleft(message)
        while (frames := _frames(receive)) is not None:
            peer, id, *rest = frames
            waiting.append(rest[rest.index(b"") + 1 :])
            receive.send_multipart([peer, id, b"1", b""])
        blocked = False
        while waiting and len(out) < 100:
            if not send.EVENTS & zmq.POLLOUT:
                blocked = True
                break
            keys += 1
            key = b"%d" % keys
            out[key] = waiting.popleft()
            send.send_multipart([key, b"%d" % (time.time_ns() // 1000), b"5000000", b"", *out[key]])


def _frames(socket: Any) -> list[bytes] | None:
    try:
        frames: list[bytes] = socket.recv_multipart(zmq.NOBLOCK)
        return frames
    except zmq.Again:
        return None


@contextmanager
def server(*argv: str) -> Iterator[list[str]]:
    """Run a server; yield where it receives and sends."""
    with subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rstrip("\n").split("\t")[1:3]
        finally:
            process.kill()


# -- clients -----------------------------------------------------------------------------------------------------------


def clients(case: Case, receive: str, send: str) -> tuple[float, int]:
    """Let clients do their work; return the seconds, and how many messages were not answered or did not come."""
    with zmq.Context() as context:
        producers = [context.socket(zmq.DEALER) for _ in range(case.producers)]
        consumer = context.socket(zmq.ROUTER)
        sockets = [*producers, consumer]
        for socket in sockets:
            socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 0
        for producer in producers:
            producer.connect(receive)
            producer.send_multipart([b"first", b"", BODY])
            producer.recv_multipart()
        if case.through:
            consumer.connect(send)
            for _ in producers:
                _settle(consumer)
        began = time.perf_counter()
        missing = _work(case, producers, consumer)
        took = time.perf_counter() - began
        for socket in sockets:
            socket.close()
    return took, missing


def _work(case: Case, producers: list[Any], consumer: Any) -> int:
    poller, sent, answered, come = zmq.Poller(), 0, 0, 0
    for socket in (*producers, consumer):
        poller.register(socket, zmq.POLLIN)
    for producer in producers:
        for _ in range(case.outstanding):
            producer.send_multipart([b"%d" % sent, b"", BODY])
            sent += 1
    while answered < case.messages or (case.through and come < case.messages):
        ready = [socket for socket, _ in poller.poll(10_000)]
        if not ready:
            break
        for socket in ready:
            if socket is consumer:
                while _settle(consumer, zmq.NOBLOCK):
                    come += 1
                continue
            while (frames := _frames(socket)) is not None:
                answered += frames[1] == b"1"
                if sent < case.messages:
                    socket.send_multipart([b"%d" % sent, b"", BODY])
                    sent += 1
    return case.messages - (min(answered, come) if case.through else answered)


def _settle(consumer: Any, how: int = 0) -> bool:
    try:
        peer, key, *_ = consumer.recv_multipart(how)
    except zmq.Again:
        return False
    consumer.send_multipart([peer, key, b"1"])
    return True


# -- what is compared --------------------------------------------------------------------------------------------------


def by_deque(case: Case, base: str) -> tuple[float, int]:
    """Measure the server of a deque."""
    with server(__file__, "--deque") as (receive, send):
        return clients(case, receive, send)


def by_dropq(case: Case, base: str, durability: str) -> tuple[float, int]:
    """Measure dropq; what is not there at the end is missing, too."""
    with scratch(base) as folder:
        queue = dropq.Root.create(f"{folder}/root").create_queue("q", durability=durability)
        options = (*("--root", f"{folder}/root"), "serve", "q", "--zmq", "--receive", ANY, "--send", ANY)
        with server("-m", "dropq", *options, "--monitor", ANY) as (receive, send):
            took, missing = clients(case, receive, send)
        counts = queue.counts()
        there = sum(counts[state] for state in ("target", "processing", "processed"))
        return took, missing + abs(case.messages + case.producers - there)


def by_batches(case: Case, base: str) -> tuple[float, int]:
    """Measure one process that sends in batches, and acknowledges in batches, without sockets."""
    with scratch(base) as folder:
        queue = dropq.Root.create(f"{folder}/root").create_queue("q", durability="full")
        size, come = case.producers * case.outstanding, 0
        with queue.subscribe(max_backlog=None) as subscription:
            began = time.perf_counter()
            for _ in range(case.messages // size):
                queue.send_many([BODY] * size)
                if case.through:
                    messages = subscription.receive_many(size)
                    come += sum(message.body == BODY for message in messages)
                    subscription.ack_many(messages)
            took = time.perf_counter() - began
        return took, case.messages - come if case.through else 0


def row(case: Case, on: str, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    durability = "none" if on == "tmpfs" else "full"
    loops: dict[str, Callable[[Case, str], tuple[float, int]]] = {
        "other": by_deque if on == "tmpfs" else by_batches,
        "dropq": partial(by_dropq, durability=durability),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    missing = 0
    for number in range(rounds):
        for name in list(loops) if number % 2 else list(loops)[::-1]:
            took, lacking = loops[name](case, base)
            times[name].append(took)
            missing += lacking if name == "dropq" else 0
    ratios = [other / own for other, own in zip(times["other"], times["dropq"], strict=True)]
    return {
        "what": case.what,
        "on": on,
        "durability": durability,
        "against": "a deque in memory" if on == "tmpfs" else "batches without sockets",
        "rounds": rounds,
        "a_round": case.messages,
        "per_s": round(case.messages / statistics.median(times["dropq"])),
        "ratio": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
        "lost": missing,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, help="in a round, instead of thousands")
    parser.add_argument("--tmpfs", default="/dev/shm", metavar="DIR")
    parser.add_argument("--disk", default=".", metavar="DIR")
    parser.add_argument("--deque", action="store_true", help="serve a deque, to be measured beside")
    asked = parser.parse_args()
    if asked.deque:
        serve_deque()
    missing = 0
    for on, base in (("tmpfs", asked.tmpfs), ("disk", asked.disk)):
        for case in CASES:
            few = case._replace(messages=asked.messages or case.messages // (1 if on == "tmpfs" else 5))
            found = row(few, on, str(Path(base).resolve()), asked.rounds)
            missing += int(str(found["lost"]))
            print(json.dumps(found), flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
