"""dropq: a message queue that is nothing but directories."""

from __future__ import annotations

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
from dropq.queue import Queue, Sent, StateStats
from dropq.root import Root
from dropq.subscription import Subscription
from dropq.sweep import SweepReport

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
    "Root",
    "Sent",
    "StateStats",
    "StorageError",
    "Subscription",
    "SweepReport",
    "Typed",
    "Unavailable",
]
