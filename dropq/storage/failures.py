"""Say in one sentence why a call of the file system failed, where, and what became of the message."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from dropq.errors import StorageError


def describe(error: Exception) -> str:
    """Return the text of an error; for a failed system call the reason and the paths, both of them for a rename."""
    if not isinstance(error, OSError):
        return str(error)
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, str | bytes)]
    return f"{error.strerror or error}{' at ' if paths else ''}{' -> '.join(paths)}"


def told(error: BaseException) -> str:
    """Return the type and the text of an error; the type alone of one whose text cannot be made."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception:
        return kind


def storage_error(error: OSError, outcome: str) -> StorageError:
    """Return the StorageError for a failed call: the reason, the path, and what became of the message."""
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    return StorageError(f"{describe(error)}; {outcome}", path=path, errno=error.errno)


@contextlib.contextmanager
def error_context(outcome: str) -> Iterator[None]:
    """Raise a StorageError, with what became of the messages, when a call in the block fails."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, outcome) from error
