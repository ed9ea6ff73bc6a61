"""What keeping a queue in order costs: one sweep of a queue whose folders are large; a line of JSON for each row.

Each row is a process of its own, so that its memory is its own. `python bench/upkeep.py` measures 100,000 files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import dropq

#: How many files lie there.
FILES = 100_000
DAY = 86_400_000


class Ahead:
    """A clock two days ahead, to which what was just made is old."""

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970 UTC."""
        return int(time.time() * 1000) + 2 * DAY


def reasons(queue: dropq.Queue, count: int) -> None:
    """Let messages lie in expired/ with reasons over a day old."""
    folder = Path(queue.layout.reasons, "expired")
    folder.mkdir(parents=True)
    for number in range(count):
        path = Path(queue.layout.expired, _name(number))
        path.touch()
        about = {"name": path.name, "inode": path.stat().st_ino, "reason": "time_limit"}
        digest = hashlib.sha256(f"{about['inode']}/{path.name}".encode()).hexdigest()[:32]
        (folder / f"{digest}.json").write_text(json.dumps(about))


def waiting(queue: dropq.Queue, count: int) -> None:
    """Let messages wait."""
    for number in range(count):
        Path(queue.layout.target, _name(number)).touch()


def files(queue: dropq.Queue, count: int) -> None:
    """Let files of scripts wait."""
    for number in range(count):
        Path(queue.layout.target, f"report-2024-11-05-{number:09d}.csv").touch()


def history(queue: dropq.Queue, count: int) -> None:
    """Let messages lie in processed/, as many as its limit allows."""
    for number in range(count):
        Path(queue.layout.processed, _name(number)).touch()


#: What lies in the queue, and its options.
CASES: dict[str, tuple[Callable[[dropq.Queue, int], None], dict[str, Any]]] = {
    "reasons over a day old": (reasons, {}),
    "messages that wait": (waiting, {}),
    "files of scripts that wait": (files, {}),
    "files of scripts that wait, with an expiration": (files, {"expiration": "30d"}),
    "messages in processed/, within max_history": (history, {"max_history": 10_000_000}),
    "messages in processed/, within history_age": (history, {"history_age": "30d"}),
}


def _name(number: int) -> str:
    return f"4.{1_700_000_000_000_000 + number:016d}-{number:010d}.B"


def _measure(case: str, folder: str, count: int, answer: SimpleQueue[dict[str, Any]]) -> None:
    fill, options = CASES[case]
    root = dropq.Root.create(folder, clock=Ahead())
    queue = root.create_queue("q", durability="none", **options)
    fill(queue, count)
    before = _peak_mb()
    began = time.process_time()
    queue.sweep()
    took = time.process_time() - began
    answer.put({"what": case, "files": count, "seconds": round(took, 2), "mb": round(_peak_mb() - before, 1)})


def _peak_mb() -> float:
    with open("/proc/self/status") as file:
        [line] = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--folder", default="/dev/shm", help="where to measure; in memory it is the processor's time")
    parser.add_argument("--quick", action="store_true", help="a tenth of the files")
    asked, _ = parser.parse_known_args()
    for case in CASES:
        folder = tempfile.mkdtemp(prefix="dropq-upkeep-", dir=asked.folder)
        try:
            answer: SimpleQueue[dict[str, Any]] = multiprocessing.get_context("spawn").SimpleQueue()
            count = asked.files // 10 if asked.quick else asked.files
            child = multiprocessing.get_context("spawn").Process(
                target=_measure, args=(case, f"{folder}/root", count, answer)
            )
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{case}: the measuring process ended with {child.exitcode}")
            print(json.dumps(answer.get()), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
