"""Measure dropq against the raw loop of system calls, and against what else there is: `make bench`.

In each round all queues run one after the other, so that a noisy machine disturbs all; what counts are the ratios
within a round, and of those the median. Every message is accounted for: the end is 1 where dropq lost or doubled one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers
from peers import Dirq, Dropq, DropqFull, DropqLease, DropqManyFull, Peer, Raw, RawFull, RawManyFull
from runs import Run, body_of, four_and_four, four_that_take, one_and_one

import dropq
from dropq.storage.mounts import mount_of

HERE = Path(__file__).parent
PAPER = HERE.parent / "docs" / "benchmarks" / "queues.json"
#: How many wait, where it is measured what that costs; and how many of them are taken.
DEPTHS = (1_000, 10_000, 100_000, 1_000_000)
TAKEN = 20_000
#: Bytes that a waiting message may need in a file system in memory.
ROOM = 8192
#: Rounds for queues that take long.
SELDOM = 3
#: Queues whose claims that came too late are counted.
COUNTED = (Raw, Dropq, DropqLease)
#: Policies that take a lock.
GUARDED = {"max_backlog", "fairness_model", "barrier_expression"}
#: Parts that other scripts measure, which print a line of JSON for each row.
SCRIPTS = (
    *("calls", "waking", "startup", "upkeep", "topics", "pipeline", "selecting", "records", "roots", "web", "zeromq"),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured where, and how often."""

    rounds: int
    messages: int
    tmpfs: str
    disk: str
    quick: bool = False
    queues: Sequence[type[Peer]] = peers.QUEUES

    def on(self, medium: str) -> Plan:
        """Return the plan for a place: a disk that syncs is slow, and gets a fifth of the messages."""
        return self if medium == "tmpfs" else replace(self, messages=max(self.messages // 5, 1))

    def folder(self, medium: str) -> str:
        """Return the folder of a place."""
        return self.tmpfs if medium == "tmpfs" else self.disk


# -- the parts -------------------------------------------------------------------------------------------------------


def one(plan: Plan) -> Iterator[Row]:
    """One process sends all, then takes all."""
    for medium in ("tmpfs", "disk"):
        yield from compare("one", medium, plan.on(medium), plan.queues, one_and_one)


def four(plan: Plan) -> Iterator[Row]:
    """Four processes send while four others take; then four take what was sent before."""
    for medium in ("tmpfs", "disk"):
        yield from compare("four", medium, plan.on(medium), plan.queues, with_late(four_and_four))
    few = [peer for peer in plan.queues if peer in (*COUNTED, Dirq)]
    yield from compare("drained", "tmpfs", plan, few, with_late(four_that_take))


def batch(plan: Plan) -> Iterator[Row]:
    """One by one against a thousand at a time, all synced: the ratio is to sending, and taking, one by one."""
    plan = replace(plan.on("disk"), messages=max(plan.messages * 2 // 5, 1))
    yield from compare("batch", "disk", plan, (DropqFull, DropqManyFull, RawFull, RawManyFull), one_and_one)


def depth(plan: Plan) -> Iterator[Row]:
    """Take from a queue in which many wait, each time in a new process."""
    for waiting in DEPTHS[:2] if plan.quick else DEPTHS:
        if shutil.disk_usage(plan.tmpfs).free < waiting * ROOM:
            yield {"part": "depth", "on": "tmpfs", "what": f"{waiting} waiting", "skipped": "there is no room for them"}
            continue
        with scratch(plan.tmpfs) as folder:
            yield from deep(folder, waiting, min(plan.rounds, 3 if waiting == DEPTHS[-1] else 5))


def policies(plan: Plan) -> Iterator[Row]:
    """What each policy costs: the ratios are to dropq without any, by one process and by four that take."""
    yield from compare("policies", "tmpfs", plan, (Dropq, *peers.POLICIES), one_and_one)
    guarded = [peer for peer in peers.POLICIES if peer.options.keys() & GUARDED]
    yield from compare(
        "contended", "tmpfs", replace(plan, messages=plan.messages // 2), (Dropq, *guarded), four_that_take
    )


def script(name: str) -> Callable[[Plan], Iterator[Row]]:
    """Return a part that another script measures."""

    def measured(plan: Plan) -> Iterator[Row]:
        path = HERE / f"{name}.py"
        if not path.exists():
            yield {"part": name, "what": path.name, "skipped": "it is not there"}
            return
        done = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, text=True, check=False)
        for line in done.stdout.splitlines():
            yield {"part": name, **json.loads(line)}
        if done.returncode:
            yield {
                "part": name,
                "what": path.name,
                "broke": f"it ended with {done.returncode}",
                "times": 1,
                "rounds": 1,
            }

    return measured


PARTS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "one": one,
    "four": four,
    "batch": batch,
    "depth": depth,
    "policies": policies,
    **{name: script(name) for name in SCRIPTS},
}


# -- comparing -------------------------------------------------------------------------------------------------------

Running = Callable[[type[Peer], str, int], Run]
#: What came of each round: a run, why it broke off, or nothing where it was sat out.
Runs = list[Run | str | None]


def compare(part: str, medium: str, plan: Plan, queues: Sequence[type[Peer]], run: Running) -> Iterator[Row]:
    """Run all queues in turn, so many times over; yield a row for each, with its ratio to the first."""
    here = [peer for peer in queues if not peer.missing()]
    measured: dict[type[Peer], Runs] = {peer: [] for peer in here}
    for number in range(plan.rounds):
        progress(f"{part}, {medium}: round {number + 1} of {plan.rounds}")
        for peer in random.Random(number).sample(here, len(here)):
            if peer.seldom and number >= SELDOM:
                measured[peer].append(None)
                continue
            if medium == "disk":
                os.sync()  # what those before it wrote is not for it to wait for
            measured[peer].append(tried(run, peer, plan.folder(medium), plan.messages))
    progress("")
    by_name = {peer.name: runs for peer, runs in measured.items()}
    for peer in queues:
        row: Row = {"part": part, "on": medium, "what": peer.name, "note": peer.note}
        if peer in measured:
            yield row | figures(measured[peer], measured[queues[0]], by_name.get(peer.like))
        else:
            yield row | {"skipped": peer.missing()}


def tried(run: Running, peer: type[Peer], base: str, messages: int) -> Run | str:
    """Run a queue in a folder of its own; return what came of it, or why it broke off."""
    with scratch(base) as folder:
        try:
            peer.make(folder)
            return run(peer, folder, messages)
        except Exception as error:  # of others too: what they raise is a figure
            return f"{type(error).__name__}: {error}"
        finally:
            peer.unmake(folder)


def brief(ratio: float) -> float:
    """Return a ratio with two digits behind the point; one below a tenth has two that are not 0."""
    return round(ratio, 2) if ratio >= 0.1 else float(f"{ratio:.2g}")


def figures(runs: Runs, floor: Runs, like: Runs | None) -> Row:
    """Return the figures of a queue's runs: medians, and its ratios to others within each round."""
    whole = [run for run in runs if isinstance(run, Run)]
    broke = [run for run in runs if isinstance(run, str)]
    row: Row = {"rounds": len(whole) + len(broke)}
    if broke:
        row |= {"broke": broke[0], "times": len(broke)}
    if not whole:
        return row
    ratios = ratios_of(runs, floor, "whole")
    row |= {"messages": whole[0].messages, "per_s": round(median([run.messages / run.whole for run in whole]))}
    if ratios:
        row |= {"ratio": brief(median(ratios)), "range": [brief(min(ratios)), brief(max(ratios))]}
    for name in ("sending", "taking"):
        if found := ratios_of(runs, floor, name):
            row[name] = round(median(found), 2)
    if like is not None and (found := ratios_of(runs, like, "whole")):
        row["like"] = round(median(found), 2)
    late = [run.wasted / run.messages for run in whole if run.wasted is not None]
    if late:
        row["wasted"] = round(median(late), 3)
    return row | {name: sum(getattr(run, name) for run in whole) for name in ("lost", "doubled")}


def ratios_of(runs: Runs, floor: Runs, of: str) -> list[float]:
    """Return how many times as fast as another a queue was in each round that both lived through."""
    pairs = [(a, b) for a, b in zip(runs, floor, strict=True) if isinstance(a, Run) and isinstance(b, Run)]
    return [getattr(b, of) / getattr(a, of) for a, b in pairs if getattr(a, of)]


def with_late(run: Callable[..., Run]) -> Running:
    """Return a run that is made again, for some queues, to count claims that came too late: counting takes time."""

    def runs(peer: type[Peer], folder: str, messages: int) -> Run:
        found = run(peer, folder, messages)
        if peer in COUNTED:
            again = f"{folder}/again"
            os.mkdir(again)
            peer.make(again)
            counted = run(peer, again, messages, counting=True)
            found.wasted = counted.wasted
            found.lost += counted.lost
            found.doubled += counted.doubled
        return found

    return runs


def median(values: list[float]) -> float:
    """Return the middle value."""
    return statistics.median(values)


@contextmanager
def scratch(base: str) -> Iterator[str]:
    """Give an empty folder on a file system, and remove it afterwards."""
    folder = tempfile.mkdtemp(prefix="dropq-bench-", dir=os.path.abspath(base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# -- many that wait ----------------------------------------------------------------------------------------------------


def deep(folder: str, waiting: int, rounds: int) -> Iterator[Row]:
    """Take some of so many, by new processes in turn; what they took is sent anew before the next."""
    Dropq.make(folder)
    fill(folder, range(waiting))
    sent, taken = waiting, 0
    found: dict[type[Peer], list[Row]] = {Raw: [], Dropq: []}
    for number in range(rounds):
        progress(f"depth, {waiting} waiting: round {number + 1} of {rounds}")
        for peer in found:
            one = drained(peer, folder, min(waiting, TAKEN))
            found[peer].append(one)
            taken += one["taken"]
            fill(folder, range(sent, sent + one["taken"]))
            sent += one["taken"]
    progress("")
    counts = dropq.Root(f"{folder}/root").queue("q").counts()
    for peer, runs in found.items():
        row: Row = {"part": "depth", "on": "tmpfs", "what": peer.name, "waiting": waiting, "rounds": rounds}
        for name, digits in (("start_s", 3), ("first_s", 4), ("each_us", 1), ("peak_mb", 0)):
            row[name] = round(median([run[name] for run in runs]), digits)
        row["ratio"] = round(median([a["each_us"] / b["each_us"] for a, b in zip(found[Raw], runs, strict=True)]), 2)
        row["lost"] = sent - counts["target"] - counts["processed"]
        yield row | {"doubled": sum(run["doubled"] for run in runs) + max(taken - counts["processed"], 0)}


def drained(peer: type[Peer], folder: str, messages: int) -> Row:
    """Take messages in a new process; return what it tells."""
    command = [sys.executable, str(HERE / "drain.py"), peer.__name__, folder, str(messages), str(time.monotonic())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: Row = json.loads(done.stdout)
    return measured


def fill(folder: str, numbers: range) -> None:
    """Send messages, by two processes."""
    context = multiprocessing.get_context("fork")
    halves = (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
    jobs = [context.Process(target=send_all, args=(folder, half)) for half in halves]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise RuntimeError(f"{folder}: the queue could not be filled")


def send_all(folder: str, numbers: range) -> None:
    """Send some of the messages."""
    queue = dropq.Root(f"{folder}/root").queue("q")
    for start in range(0, len(numbers), 10_000):
        queue.send_many(map(body_of, numbers[start : start + 10_000]))


# -- telling -----------------------------------------------------------------------------------------------------------

#: What is shown of the rows: the key, its title, and how it is written.
COLUMNS = (
    ("what", "queue", "{:37}"),
    ("waiting", "waiting", "{:9,}"),
    ("per_s", "msgs/s", "{:8,}"),
    ("ratio", "ratio", "{:6.2f}"),
    ("range", "from, to", "{0[0]:6.2f} {0[1]:6.2f}"),
    ("sending", "sending", "{:7.2f}"),
    ("taking", "taking", "{:7.2f}"),
    ("like", "same syncs", "{:10.2f}"),
    ("wasted", "too late", "{:8.3f}"),
    ("start_s", "start, s", "{:8.2f}"),
    ("first_s", "first, s", "{:8.3f}"),
    ("each_us", "each, us", "{:8.1f}"),
    ("peak_mb", "MB", "{:5.0f}"),
    ("lost", "lost", "{:6,}"),
    ("doubled", "doubled", "{:7,}"),
)
SHOWN = {
    "depth": ("what", "waiting", "start_s", "first_s", "each_us", "peak_mb", "ratio", "lost", "doubled"),
    "one": ("what", "per_s", "ratio", "range", "sending", "taking", "like", "lost", "doubled"),
    "four": ("what", "per_s", "ratio", "range", "like", "wasted", "lost", "doubled"),
}
SHOWN |= {"batch": SHOWN["one"], "drained": SHOWN["four"], "policies": SHOWN["one"], "contended": SHOWN["four"]}


def in_words(row: Row, before: Row | None) -> str:
    """Return a row as people read it, below a heading where it begins a table."""
    if row["part"] not in SHOWN:
        return json.dumps(row)
    columns = [column for column in COLUMNS if column[0] in SHOWN[row["part"]]]
    heading = ""
    if before is None or any(row.get(key) != before.get(key) for key in ("part", "on")):
        titles = [f"{title:{'<' if key == 'what' else '>'}{width(form)}}" for key, title, form in columns]
        heading = f"\n{row['part']}, {row['on']}\n{' '.join(titles)}\n"
    if "lost" not in row:
        return f"{heading}{row['what']:37} {row.get('skipped') or row.get('broke')}"  # it has no figures
    cells = [form.format(row[key]) if key in row else " " * width(form) for key, _, form in columns]
    more = f"  broke off {row['times']} times of {row['rounds']}: {row['broke']}" if "broke" in row else ""
    return heading + " ".join(cells) + more


def width(form: str) -> int:
    """Return how wide a cell is."""
    return len(form.format((0.0, 0.0) if "[" in form else "" if form == "{:37}" else 0))


def progress(text: str) -> None:
    """Tell who looks on what is going on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def is_bad(row: Row) -> bool:
    """Tell whether a row says that dropq, or what it is measured by, is broken."""
    ours = row["part"] in SCRIPTS or row["what"].startswith(("dropq", "raw loop"))
    return ours and bool(row.get("lost") or row.get("doubled") or "broke" in row)


def machine(plan: Plan) -> str:
    """Return a line about the machine."""
    with open("/proc/cpuinfo") as about:
        models = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    kinds = [f"{medium} is {mount.kind}" for medium in ("tmpfs", "disk") if (mount := mount_of(plan.folder(medium)))]
    cores = f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"
    return f"{cores}, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}; {', '.join(kinds)}"


def commit() -> str:
    """Return which commit was measured, and whether what runs is another."""
    git = ["git", "-C", str(HERE.parent)]
    done = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "dropq", "bench"], check=False).returncode
    return (done.stdout.strip() or "no commit") + (", changed" if changed else "")


def keep(part: str, rows: list[Row], plan: Plan) -> None:
    """Put a part's rows into the paper, in place of those it had; of another machine nothing is kept."""
    try:
        kept = json.loads(PAPER.read_text())
    except FileNotFoundError:
        kept = {}
    about = machine(plan)
    parts = kept["parts"] if kept.get("machine") == about else {}
    parts[part] = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "rows": rows}
    ordered = {name: parts[name] for name in PARTS if name in parts}
    PAPER.write_text(json.dumps({"machine": about, "parts": ordered}, indent=1) + "\n")


def main() -> int:
    """Measure, and show a row for each queue as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)}")
    every = {peer.__name__: peer for peer in peers.QUEUES}
    parser.add_argument("--queues", metavar="QUEUES", help=f"some of {','.join(every)}; Raw is always among them")
    parser.add_argument("--rounds", type=int, default=7, help=f"slow queues take part in {SELDOM}")
    parser.add_argument("--messages", type=int, default=4000, help="in memory; a fifth of that on disk")
    parser.add_argument("--tmpfs", default="/dev/shm", metavar="DIR", help="a folder in memory")
    parser.add_argument("--disk", default=".", metavar="DIR", help="a folder on a disk")
    parser.add_argument("--quick", action="store_true", help="two rounds of few messages, to see that it works")
    parser.add_argument("--json", action="store_true", help="print lines of JSON")
    parser.add_argument("--write", action="store_true", help="keep the rows in docs/benchmarks")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else list(PARTS)
    named = ["Raw", *given.queues.split(",")] if given.queues else list(every)
    if unknown := sorted({*chosen} - {*PARTS} | {*named} - {*every}):
        parser.error(f"there is no {', '.join(unknown)}; parts are {', '.join(PARTS)}; queues {', '.join(every)}")
    rounds, messages = (2, 500) if given.quick else (given.rounds, given.messages)
    plan = Plan(rounds, messages, given.tmpfs, given.disk, given.quick, [every[name] for name in dict.fromkeys(named)])
    rows: list[Row] = []
    if not given.json:
        print(machine(plan))
    for part in chosen:
        found: list[Row] = []
        for row in PARTS[part](plan):
            print(json.dumps(row) if given.json else in_words(row, found[-1] if found else None), flush=True)
            found.append(row)
        if given.write:
            keep(part, found, plan)
        rows += found
    if given.write:
        subprocess.run([sys.executable, HERE.parent / "docs" / "draw_benchmarks.py"], check=True)
    bad = [row for row in rows if is_bad(row)]
    for row in bad:
        print(f"{row['part']}: {row['what']} is broken: {json.dumps(row)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
