"""The errors of dropq: one root, one sentence each, carrying the path or the name they are about.

Every error that a caller can meet derives from `DropqError`. A message always says what became of the message
file, where that is in doubt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dropq.producer import Sent

__all__ = [
    "ConfigError",
    "DropqError",
    "InvalidFilter",
    "InvalidName",
    "LeaseLost",
    "NoSuchMessage",
    "NoSuchQueue",
    "QueueExists",
    "QueueFull",
    "StorageError",
    "Unavailable",
]


class DropqError(Exception):
    """The root of every error that dropq raises."""


class NoSuchQueue(DropqError):
    """Raised when a queue, or the root it should lie in, is not there."""


class NoSuchMessage(DropqError):
    """Raised when no message of the wanted id lies in the folders that were looked through."""


class QueueExists(DropqError):
    """Raised when a queue is to be created whose folder is there already."""


class QueueFull(DropqError):
    """Raised when a send would take a queue over its limit; the message was not sent.

    Attributes:
        sent: of a `send_many`, what was sent before, in order.
    """

    sent: Sequence[Sent] = ()


class LeaseLost(DropqError):
    """Raised when a consumer settles a claim that is no longer its own; nothing was changed."""


class InvalidName(DropqError, ValueError):
    """Raised when a name cannot be the name of a queue."""


class InvalidFilter(DropqError, ValueError):
    """Raised when a filter cannot be used; the message points at what is wrong."""


class ConfigError(DropqError):
    """Raised when a configuration cannot be used, with the file, the key and what is allowed."""


class Unavailable(DropqError):
    """Raised when something outside dropq is missing: an extra's package, or a Java."""


class StorageError(DropqError):
    """Raised when the file system refuses; the message tells what became of the message file.

    Attributes:
        path: the path that the failed call was about.
        errno: the system's error number, or None.
        place: the state and the file name to which a message went, where it was settled and that is only not durable.
    """

    def __init__(self, message: str, *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno
        self.place: tuple[str, str] | None = None
