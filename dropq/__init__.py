"""dropq: a message queue that is nothing but directories.

A name is imported when it is first used, so that a command that only parses and prints starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dropq.api import Queue, Root, Topic, route
    from dropq.config.selectors import Selector
    from dropq.diagnosis.doctor_kinds import Diagnosis
    from dropq.diagnosis.explain import Explanation
    from dropq.diagnosis.fsck_kinds import Finding
    from dropq.diagnosis.graph import Graph
    from dropq.diagnosis.graph_parts import Edge, Node
    from dropq.diagnosis.health import Health, Reason
    from dropq.diagnosis.overview import Look
    from dropq.diagnosis.standing import Holder
    from dropq.errors import (
        BacklogReached,
        ConfigError,
        DropqError,
        InvalidFilter,
        InvalidName,
        LeaseLost,
        NoSuchMessage,
        NoSuchQueue,
        QueueExists,
        QueueFull,
        StorageError,
        Unavailable,
    )
    from dropq.events.reader import Event
    from dropq.format.typed import Typed
    from dropq.queue.browsing import StateStats
    from dropq.queue.bundling import RecordWriter
    from dropq.queue.message import Duration, Message, Record
    from dropq.queue.outputs import Out
    from dropq.queue.sender import Sent
    from dropq.queue.subscription import Subscription
    from dropq.upkeep.bulk import Outcome
    from dropq.upkeep.steps import SweepReport
    from dropq.worker.loop import Cancelled, Fail, Halt, Left, Reject, Retry, Stop, WorkReport
    from dropq.worker.run import work

__version__ = "0.1.0"

__all__ = [
    "BacklogReached",
    "Cancelled",
    "ConfigError",
    "Diagnosis",
    "DropqError",
    "Duration",
    "Edge",
    "Event",
    "Explanation",
    "Fail",
    "Finding",
    "Graph",
    "Halt",
    "Health",
    "Holder",
    "InvalidFilter",
    "InvalidName",
    "LeaseLost",
    "Left",
    "Look",
    "Message",
    "NoSuchMessage",
    "NoSuchQueue",
    "Node",
    "Out",
    "Outcome",
    "Queue",
    "QueueExists",
    "QueueFull",
    "Reason",
    "Record",
    "RecordWriter",
    "Reject",
    "Retry",
    "Root",
    "Selector",
    "Sent",
    "StateStats",
    "Stop",
    "StorageError",
    "Subscription",
    "SweepReport",
    "Topic",
    "Typed",
    "Unavailable",
    "WorkReport",
    "route",
    "work",
]

#: The public names by the modules that they live in; those that are not listed live in `errors`.
_NAMES = {
    "api": "Queue Root Topic route",
    "config.selectors": "Selector",
    "diagnosis.doctor_kinds": "Diagnosis",
    "diagnosis.explain": "Explanation",
    "diagnosis.fsck_kinds": "Finding",
    "diagnosis.graph": "Graph",
    "diagnosis.graph_parts": "Edge Node",
    "diagnosis.health": "Health Reason",
    "diagnosis.overview": "Look",
    "diagnosis.standing": "Holder",
    "events.reader": "Event",
    "format.typed": "Typed",
    "queue.browsing": "StateStats",
    "queue.bundling": "RecordWriter",
    "queue.message": "Duration Message Record",
    "queue.outputs": "Out",
    "queue.sender": "Sent",
    "queue.subscription": "Subscription",
    "upkeep.bulk": "Outcome",
    "upkeep.steps": "SweepReport",
    "worker.loop": "Cancelled Fail Halt Left Reject Retry Stop WorkReport",
    "worker.run": "work",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
