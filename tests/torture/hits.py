"""What a module under measurement calls before each of its statements: keep which test runs which.

A line goes to the file named by `TORTURE_HITS`, whichever process runs the statement: children inherit the name of the
test with their environment.
"""

from __future__ import annotations

import os
from posix import O_APPEND, O_WRONLY, close, open, write  # those of a test that replaces the ones in `os` are not ours

HITS = "TORTURE_HITS"

_seen: set[tuple[str, str]] = set()


def hit(place: str) -> None:
    """Write down that the test which runs now runs a statement, once a process.

    Args:
        place: the statement, as `PATH:LINE`.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not test or (test, place) in _seen:
        return
    _seen.add((test, place))
    try:
        fd = open(os.environ[HITS], O_WRONLY | O_APPEND)
    except OSError:  # of another user, or out of descriptors: then one test fewer is asked about this statement
        return
    try:
        write(fd, f"{place}\t{test}\n".encode())
    finally:
        close(fd)
