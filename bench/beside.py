"""What the measurements of topics and of selectors share: the raw loop's system calls, their rows, their options."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from dropq.storage.system_calls import CREATE, FILE_MODE


class RawCalls:
    """Writes and renames by plain system calls.

    Args:
        syncs: whether each file is synced, and both folders after each rename, as dropq does where durability is full.
    """

    def __init__(self, syncs: bool) -> None:
        self._syncs = syncs

    def copy(self, file: str, body: bytes, base: str) -> None:
        """Write a message in working/ of a queue, and rename it to target/."""
        self.write(f"{base}/working/{file}", body)
        self.rename(f"{base}/working/{file}", f"{base}/target/{file}")

    def write(self, path: str, body: bytes) -> None:
        """Write a file."""
        fd = os.open(path, CREATE, FILE_MODE)
        try:
            os.write(fd, body)
            if self._syncs:
                os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, destination: str) -> None:
        """Rename a file to another folder."""
        os.rename(source, destination)
        if self._syncs:
            synced(os.path.dirname(destination), os.path.dirname(source))


def synced(*paths: str) -> None:
    """Sync files and folders."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def emptied(folder: str) -> int:
    """Remove the files of a folder; return how many there were."""
    names = os.listdir(folder)
    for name in names:
        os.unlink(f"{folder}/{name}")
    return len(names)


def compared(raw: list[float], ours: list[float]) -> dict[str, object]:
    """Return what a row says of the microseconds that a message took in each round, raw and by dropq."""
    ratios = [one / other for one, other in zip(raw, ours, strict=True)]
    return {
        "raw_us": round(statistics.median(raw)),
        "dropq_us": round(statistics.median(ours)),
        "ratio": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
        "load": round(os.getloadavg()[0], 1),
    }


def print_rows(what: str | None, cases: Iterable[Any], row: Callable[[Any, str, int], dict[str, object]]) -> int:
    """Print a line of JSON for each case that the command line asks for.

    Args:
        what: what is measured, for the help.
        cases: the cases, each with a `name`, and with `on`: tmpfs or disk.
        row: measures a case in a folder, in so many rounds, and returns its row.
    """
    parser = argparse.ArgumentParser(description=what and what.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases in whose names this is")
    parser.add_argument("--tmpfs", default="/dev/shm", metavar="DIR")
    parser.add_argument("--disk", default=".", metavar="DIR")
    given = parser.parse_args()
    for case in cases:
        if given.only in case.name:
            print(json.dumps(row(case, given.tmpfs if case.on == "tmpfs" else given.disk, given.rounds)), flush=True)
    return 0
