"""Count the RPCs that a message costs over NFS: `make bench-nfs`.

A guest of user-mode-linux serves its disk by the kernel's own NFS server to two clients on the same kernel, and counts
what they ask for; tests/torture/nfs_calls.py has the cases. A figure is the RPCs that both clients send for a message.
No busy machine changes what a call costs; what a consumer asks for by time (its looks, its sweeps) is in the figures,
so the net is as slow as nets are: 1 ms for a request and its reply.

Exit codes: 0 all was counted; 1 a case broke off; 2 NOT RUN, as this machine cannot boot a guest.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from torture.nfs_calls import CASES, chosen  # noqa: E402
from torture.rpcs import KINDS, OTHER, by_kind  # noqa: E402
from torture.table import NotRun  # noqa: E402
from torture.uml import Guest, kernel, make_disk  # noqa: E402

PAPER = PROJECT / "docs" / "benchmarks" / "nfs.json"
VERSIONS = ("v3", "v4.2")
#: Seconds that a guest may take for all cases.
PATIENCE = 3600.0
#: RPCs a message below which a line of code is not shown.
SELDOM = 0.02

Row = dict[str, Any]


def counted(version: str, cases: list[str], **how: Any) -> Iterator[Row]:
    """Boot a guest, count cases in it on one version of NFS, and yield their rows as they come.

    Raises:
        NotRun: this machine cannot boot a guest.
        RuntimeError: the guest broke off.
    """
    tree = str(kernel())
    with tempfile.TemporaryDirectory(prefix="bench-nfs-") as folder:
        disk = make_disk(Path(folder, "disk"))
        arguments = {"version": version, "cases": cases, "tree": tree, **how}
        with Guest(Path(folder, "guest"), [disk], "torture.nfs_calls:inside", nfs=True, **arguments) as guest:
            guest.up()
            deadline, told = time.monotonic() + PATIENCE, 0
            while True:
                ended = not guest.runs or time.monotonic() > deadline
                for line in (said := guest.said())[told:]:
                    if line.startswith("row "):
                        yield json.loads(line.removeprefix("row "))
                told = len(said)
                if ended:
                    break
                time.sleep(0.1)
            guest.result(1)


def total(row: Row) -> float:
    """Return the RPCs of a row, for one message."""
    return float(sum(row["calls"].values()) / row["n"])


def told(row: Row) -> str:
    """Return what a row says: RPCs for a message, or how late messages are, or why it broke off."""
    if "lag" in row:
        return "{} s at the median, {} s at p99".format(*row["lag"])
    return row["broke"] if "broke" in row else f"{total(row):.2f}"


def figure(value: float) -> str:
    """Return a figure as a table has it: nothing for what hardly ever comes."""
    return f"{value:,.1f}" if value >= 0.05 else ""


def cells_of(row: Row, rows: dict[str, Row]) -> list[str]:
    """Return a row as the cells of a table."""
    case = CASES[row["case"]]
    title = case.title if case.unit == "message" else f"{case.title}: a {case.unit}"
    if "broke" in row:
        return [f"{title}: broke off: {row['broke']}", *[""] * (len(KINDS) + 3)]
    kinds = by_kind(row["calls"])
    raw = rows.get(case.raw, {})
    figures = [kinds.get(kind, 0) / row["n"] for kind in (*KINDS, OTHER)]
    return [title, *map(figure, figures), f"**{total(row):,.1f}**", f"{total(raw):,.1f}" if "calls" in raw else ""]


def table_of(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    by_case = {row["case"]: row for row in rows}
    heads = ["operation", *KINDS, OTHER, "all", "raw"]
    yield f"| {' | '.join(heads)} |"
    yield "|---|" + "---:|" * (len(heads) - 1)
    for row in rows:
        if "lag" in row:
            continue
        yield f"| {' | '.join(cells_of(row, by_case))} |"


def causes_of(row: Row) -> Iterator[str]:
    """Yield a line for each line of code that caused RPCs: how many a message, which, by which call of Python."""
    for call, function, where, times in row.get("causes", ()):
        if times / row["n"] >= SELDOM:
            yield f"  {times / row['n']:7.2f}  {call:13} {function:12} {where}"


def main() -> int:
    """Count, print each row as it comes, and the tables at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="CASES", default="*", help=f"some of {', '.join(CASES)}; `receive*` is many")
    parser.add_argument("--versions", metavar="VERSIONS", default=",".join(VERSIONS), help="v3, v4.2, or both")
    parser.add_argument("--count", type=int, default=200, help="messages that each case counts")
    parser.add_argument("--deep", type=int, default=10_000, help="messages in the queue that commands look at")
    parser.add_argument("--rtt", type=float, default=1.0, help="milliseconds that a request and its reply need")
    parser.add_argument("--options", default="", help="more options of the mounts, such as actimeo=0")
    parser.add_argument("--trace", action="store_true", help="show which lines cause the RPCs; --count 20 is enough")
    given = parser.parse_args()
    try:
        cases = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    broke = False
    for version in given.versions.split(","):
        how = {"count": given.count, "rtt": given.rtt / 1000, "options": given.options, "trace": given.trace}
        how["deep"] = given.deep
        rows = []
        try:
            for row in counted(version, cases, **how):
                rows.append(row)
                print(f"{version}  {CASES[row['case']].title}: {told(row)}", flush=True)
                print(*causes_of(row), sep="\n", end="\n" if given.trace else "")
        except NotRun as reason:
            print(f"NOT RUN: {reason}")
            return 2
        print(f"\n{version}\n\n" + "\n".join(table_of(rows)) + "\n")
        broke = broke or any("broke" in row for row in rows)
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
