"""The errors of dropq: one root, one sentence each, carrying the path or the name they are about.

Every error that a caller can meet derives from `DropqError`. A message always says what became of the message
file, where that is in doubt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class Sent(Protocol):
        """What became of one message that was sent, as `dropq.Sent` says it."""

        @property
        def id(self) -> str: ...
        @property
        def accepted(self) -> bool: ...
        @property
        def delivered_to(self) -> str: ...


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


class BacklogReached(DropqError):
    """Raised when a loop over a subscription would wait for messages that the loop itself has not settled."""


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
        location: the state and the file name that a message has now, where it was settled and only that is not durable.
    """

    def __init__(self, message: str, *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno
        self.location: tuple[str, str] | None = None
