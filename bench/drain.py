"""Take messages off a queue in a new process: the first, then others, and how much memory that took.

python bench/drain.py CLASS FOLDER MESSAGES STARTED prints a line of JSON; STARTED is the monotonic time of its start.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import peers


def main(kind: str, folder: str, messages: int, started: float) -> None:
    """Take so many and tell how long it took."""
    up = time.monotonic()
    queue: peers.Peer = getattr(peers, kind)(folder)
    taking = queue.take_all()
    starts = [next(taking)[:12]]
    first = time.monotonic()
    starts += [body[:12] for body in itertools.islice(taking, messages - 1)]  # whole bodies would need memory of ours
    ended = time.monotonic()
    figures = {
        "start_s": up - started,
        "first_s": first - up,
        "each_us": 1e6 * (ended - first) / max(len(starts) - 1, 1),
        "peak_mb": peak_kb() / 1000,
        "taken": len(starts),
        "doubled": len(starts) - len(set(starts)),
    }
    taking.close()  # type: ignore[attr-defined]
    queue.close()
    print(json.dumps(figures))


def peak_kb() -> int:
    """Return how much memory this program had at the most; getrusage would count its parent before the exec."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
