"""The errors of dropq: each derives from `DropqError`, and its text is one sentence with the path or name concerned.

Where a caller could doubt what became of a message file, the text says it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class Sent(Protocol):
        """The result of sending one message: what `dropq.Sent` has."""

        @property
        def id(self) -> str: ...
        @property
        def accepted(self) -> bool: ...
        @property
        def delivered_to(self) -> str: ...


class DropqError(Exception):
    """The root of every error that dropq raises."""


class NoSuchQueue(DropqError):
    """Raised when a queue does not exist, or its root does not."""


class NoSuchMessage(DropqError):
    """Raised when none of the folders searched has a message with the given id."""


class QueueExists(DropqError):
    """Raised when a queue cannot be created because its folder exists."""


class QueueFull(DropqError):
    """Raised when a send would take a queue over its limit; the message was not sent.

    Attributes:
        sent: the messages that `send_many` had sent before, in order.
        overflows_to: the address that the queue's overflow selector sends to; "" if it has none, or bounces.
        overflow: that selector; None if the queue has none.
    """

    sent: Sequence[Sent] = ()
    overflows_to: str = ""
    overflow: object = None


class BacklogReached(DropqError):
    """Raised when a loop over a subscription would wait until the loop itself settles messages: for ever."""


class LeaseLost(DropqError):
    """Raised when a consumer settles a message whose claim it has lost; nothing was changed."""


class InvalidName(DropqError, ValueError):
    """Raised when a name cannot be the name of a queue."""


class InvalidFilter(DropqError, ValueError):
    """Raised when a filter cannot be used; the message points at what is wrong."""


class ConfigError(DropqError):
    """Raised when a configuration cannot be used; the message names the file, the key and what is allowed."""


class Unavailable(DropqError):
    """Raised when something is not to be had now, such as a queue whose disk is away, or a lock that another has."""


class Missing(Unavailable):
    """Raised when what this process needs is not there: the package of an extra, a Java, or a command."""


class StorageError(DropqError):
    """Raised when a call of the file system fails; the message says what became of the message file.

    Attributes:
        path: the path that was given to the failed call.
        errno: the system's error number, or None.
        location: the state and file name that the message has now, if it was settled and only the sync failed.
        unsynced: whether messages were sent, and only the sync failed.
    """

    def __init__(self, message: str, *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno
        self.location: tuple[str, str] | None = None
        self.unsynced = False
