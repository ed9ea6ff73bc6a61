"""Measure what a message costs where much lies beside it: many topics or queues, a folder in target/, much that
comes back.

Each case is measured with little and with much in turn, and what counts is the ratio of the two within a round: near 1,
what lies beside costs nothing. With another checkout on PYTHONPATH the same is measured there.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from beside import print_rows

import dropq
from bench import scratch
from dropq.routing.router import Router
from dropq.upkeep.sweep import QuickSweep

#: How many messages a round publishes.
PUBLISHED = 300
#: How many messages go to one of many queues in a round, and how long, in seconds, no message comes.
ROUTED, IDLE = 30, 60.0
#: Routers have begun once they use so few seconds of a processor in a second, or after so many seconds.
AT_REST, STARTS = 0.05, 60.0
#: How many times a consumer without messages looks whether something waits for it, in a round.
LOOKS = 20
#: How many messages a round moves under a credit.
MOVED = 200


class Case(NamedTuple):
    """What is measured: by `measure`, in a folder, with `little` and with `much`."""

    name: str
    measure: Callable[[str, int], float]
    little: int
    much: int
    on: str = "tmpfs"


def removal(folder: str, unsettled: int) -> float:
    """Return the microseconds a message that the removal of a selector takes, which moved so many."""
    root = dropq.Root.create(folder)
    source, _ = (root.create_queue(name, durability="none") for name in ("source", "target"))
    source.add_selector("on", to="target", credit=unsettled)
    source.send_many([b"x"] * unsettled)
    source.route()
    began = time.perf_counter()
    source.remove_selector("on")
    return (time.perf_counter() - began) / unsettled * 1e6


def publish(folder: str, folders: int) -> float:
    """Return the microseconds that a publish takes with so many folders in the topic's target/."""
    topic = dropq.Root.create(folder).create_topic("t", durability="none")
    topic.create_subscription("s", client_id="c")
    for number in range(folders):
        os.mkdir(f"{topic.queue.layout.target}/{number}")
    topic.publish(b"x")
    began = time.perf_counter()
    for _ in range(PUBLISHED):
        topic.publish(b"x")
    return (time.perf_counter() - began) / PUBLISHED * 1e6


def look(folder: str, topics: int, *, view: bool = False) -> float:
    """Return the microseconds of a processor that one look of an idle consumer takes, beside so many topics.

    Args:
        folder: the root's.
        topics: how many topics do not feed the consumer.
        view: whether its queue is a view on a topic, and not a subscription.
    """
    root = dropq.Root.create(folder)
    own = root.create_topic("own", durability="none").create_subscription("s", client_id="c")
    if view:
        own = root.create_queue("v", underlying_topic="own", durability="none")
    for number in range(topics):
        os.makedirs(f"{folder}/topic-root/other{number}/.incoming/target")
    sweep = QuickSweep(own.context)
    sweep.run()
    began = time.process_time()
    for _ in range(LOOKS):
        sweep.run()
    return (time.process_time() - began) / LOOKS * 1e6


def credit(folder: str, waiting: int) -> float:
    """Return the microseconds that a message takes under a selector with one credit, while so many wait."""
    root = dropq.Root.create(folder)
    source, target = (root.create_queue(name, durability="none") for name in ("source", "target"))
    source.add_selector("on", to="target", credit=1)
    source.send_many([b"x"] * (waiting + MOVED))
    router = Router(source.context, sweep=None)
    with target.subscribe() as subscription:
        began = time.perf_counter()
        for _ in range(MOVED):
            while (message := subscription.receive()) is None:
                router.one_pass()
            message.ack()
        return (time.perf_counter() - began) / MOVED * 1e6


def _used(thread: threading.Thread) -> float:
    """Return the seconds of a processor that a thread has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


@contextmanager
def _served(folder: str, queues: int) -> Iterator[tuple[dropq.Root, threading.Thread]]:
    """Yield a root with so many queues, each with a selector, and the thread that serves it, once that has no work."""
    root, stop = dropq.Root.create(folder), threading.Event()
    root.create_queue("sink", durability="none")
    for number in range(queues):
        root.create_queue(f"q{number}", durability="none", selector=[{"name": "on", "to": "sink", "credit": 100_000}])
    thread = threading.Thread(target=dropq.route, args=(root,), kwargs={"stop": stop})
    thread.start()
    try:
        before, give_up = -1.0, time.monotonic() + STARTS
        while (used := _used(thread)) - before > AT_REST and time.monotonic() < give_up:
            before = used
            time.sleep(1)
        yield root, thread
    finally:
        stop.set()
        thread.join()


def idle(folder: str, queues: int) -> float:
    """Return the microseconds of a processor that routers of so many queues take in a second, while nothing comes."""
    with _served(folder, queues) as (_, thread):
        began = _used(thread)
        time.sleep(IDLE)
        return (_used(thread) - began) / IDLE * 1e6


def routed(folder: str, queues: int) -> float:
    """Return the microseconds of a processor that routers of so many queues take for a message to one of them."""
    with _served(folder, queues) as (root, thread):
        queue, began = root.queue("q0"), _used(thread)
        for number in range(ROUTED):
            queue.send(b"x")
            while len(os.listdir(root.queue("sink").layout.target)) <= number:
                time.sleep(0.002)
            time.sleep(0.05)  # what comes at once would share a pass
        return (_used(thread) - began) / ROUTED * 1e6


CASES = (
    *(Case(f"a message of {much} routed queues", routed, 10, much) for much in (100, 400)),
    *(Case(f"{much} idle routed queues", idle, 10, much) for much in (100, 400)),
    Case("selector rm", removal, 250, 2000),
    Case("publish beside folders", publish, 0, 1),
    Case("idle consumer beside topics", look, 1, 1500),
    Case("idle view beside topics", partial(look, view=True), 1, 1500),
    Case("selector with credit 1", credit, 1000, 30000),
)


def row(case: Case, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    little, much = list[float](), list[float]()
    for number in range(rounds):
        for times, size in ((little, case.little), (much, case.much))[:: 1 if number % 2 else -1]:
            with scratch(base) as folder:
                times.append(case.measure(f"{folder}/root", size))
    ratios = [one / other for one, other in zip(much, little, strict=True)]
    return {
        "what": case.name,
        "little": case.little,
        "much": case.much,
        "little_us": round(statistics.median(little)),
        "much_us": round(statistics.median(much)),
        "ratio": round(statistics.median(ratios), 2),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, CASES, row))
