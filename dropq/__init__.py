"""dropq: a message queue that is nothing but directories.

What a name here stands for is imported when it is first used: a command that only parses and prints stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dropq.admin import Outcome
    from dropq.errors import (
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
    from dropq.message import Message
    from dropq.names import Typed
    from dropq.producer import Sent
    from dropq.queue import Queue, StateStats
    from dropq.root import Root
    from dropq.subscription import Subscription
    from dropq.sweep import SweepReport
    from dropq.worker import Reject, Retry, work

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DropqError",
    "InvalidFilter",
    "InvalidName",
    "LeaseLost",
    "Message",
    "NoSuchMessage",
    "NoSuchQueue",
    "Outcome",
    "Queue",
    "QueueExists",
    "QueueFull",
    "Reject",
    "Retry",
    "Root",
    "Sent",
    "StateStats",
    "StorageError",
    "Subscription",
    "SweepReport",
    "Typed",
    "Unavailable",
    "work",
]

#: The modules of the public names; those that are not listed live in `errors`.
_HOMES = {
    "Message": "message",
    "Outcome": "admin",
    "Queue": "queue",
    "Reject": "worker",
    "Retry": "worker",
    "Root": "root",
    "Sent": "producer",
    "StateStats": "queue",
    "Subscription": "subscription",
    "SweepReport": "sweep",
    "Typed": "names",
    "work": "worker",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
