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
import subprocess
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
#: RPCs a message below which a kind, or a line of code, is not shown.
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


def figures_of(row: Row) -> Row:
    """Return a row as it is kept: what is counted, for one message, by kind and in all; or how late messages are."""
    case = CASES[row["case"]]
    kept: Row = {"case": row["case"], "title": case.title, "unit": case.unit, "raw": case.raw}
    if "lag" in row:
        return kept | {"lag": row["lag"]}
    if "calls" in row:
        kinds = {kind: count / row["n"] for kind, count in by_kind(row["calls"]).items()}
        ordered = {kind: round(kinds[kind], 2) for kind in (*KINDS, OTHER) if kinds.get(kind)}
        return kept | {"kinds": ordered, "all": round(sum(kinds.values()), 2)}
    return kept | {"broke": row["broke"]}


def in_words(row: Row, measured: dict[str, Row], before: dict[str, Any]) -> str:
    """Return a row as people read it: in all, raw, as it was before, and by kind."""
    what = row["title"] if row["unit"] == "message" else f"{row['title']}, a {row['unit']}"
    if "broke" in row:
        return f"{what}: broke off: {row['broke']}"
    was = before.get(row["case"])
    if "lag" in row:
        lags = ["{:.3f}, {:.3f} s".format(*each) for each in (row["lag"], was) if each]
        return f"{row['title']:49} {' before '.join(lags)} (median, p99)"
    raw = measured.get(row["raw"], {}).get("all")
    beside = [f"{row['all']:9,.2f}", f"raw {raw:5,.1f}" if raw else " " * 9, f"before {was:,.2f}" if was else ""]
    kinds = ", ".join(f"{kind} {count:,.1f}" for kind, count in row["kinds"].items() if count >= SELDOM)
    return f"{what:49} {'  '.join(beside):38} {kinds}"


def causes_of(row: Row) -> Iterator[str]:
    """Yield a line for each line of code that caused RPCs: how many a message, which, by which call of Python."""
    for call, function, where, times in row.get("causes", ()):
        if times / row["n"] >= SELDOM:
            yield f"  {times / row['n']:7.2f}  {call:13} {function:12} {where}"


def kept_figures() -> Row:
    """Return what is in docs/benchmarks."""
    try:
        kept: Row = json.loads(PAPER.read_text())
    except FileNotFoundError:
        kept = {}
    return kept


def keep(version: str, rows: list[Row], about: Row, *, before: bool) -> None:
    """Put the rows of a version into the paper, in place of those that it has of the same cases.

    Args:
        version: the version.
        rows: its rows.
        about: how they were measured.
        before: keep them also as what later rows are compared with.
    """
    kept = {"before": {}, **kept_figures(), **about, "kinds": [*KINDS, OTHER]}
    measured = {row["case"]: row for row in kept.get("versions", {}).get(version, [])}
    measured |= {row["case"]: row | {"commit": commit()} for row in rows if "broke" not in row}
    ordered = [measured[case] for case in CASES if case in measured]
    kept["versions"] = kept.get("versions", {}) | {version: ordered}
    if before:
        figures = {row["case"]: row["lag"] if "lag" in row else row["all"] for row in ordered}
        kept["before"] = kept["before"] | {version: {"commit": commit(), "figures": figures}}
    PAPER.write_text(json.dumps(kept, indent=1) + "\n")
    drawing = runpy.run_path(str(PROJECT / "docs" / "draw_benchmarks.py"))
    PAPER.with_suffix(".md").write_text(drawing["nfs_tables"](kept))


def commit() -> str:
    """Return which commit was measured, and whether what runs is another."""
    git = ["git", "-C", str(PROJECT)]
    done = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "dropq", "cli", "tests"], check=False).returncode
    return (done.stdout.strip() or "no commit") + (", changed" if changed else "")


def main() -> int:
    """Count, and print each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="CASES", default="*", help=f"some of {', '.join(CASES)}; `receive*` is many")
    parser.add_argument("--versions", metavar="VERSIONS", default=",".join(VERSIONS), help="v3, v4.2, or both")
    parser.add_argument("--count", type=int, default=200, help="messages that each case counts")
    parser.add_argument("--deep", type=int, default=10_000, help="messages in the queue that commands look at")
    parser.add_argument("--rtt", type=float, default=1.0, help="milliseconds that a request and its reply need")
    parser.add_argument("--options", default="", help="more options of the mounts, such as actimeo=0")
    parser.add_argument("--trace", action="store_true", help="show which lines cause the RPCs; --count 20 is enough")
    parser.add_argument("--write", action="store_true", help="keep the rows in docs/benchmarks")
    parser.add_argument("--before", action="store_true", help="with --write: compare later rows with these")
    given = parser.parse_args()
    try:
        cases = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(versions := given.versions.split(",")) - set(VERSIONS):
        parser.error(f"there is no version {', '.join(sorted(unknown))}; there are {', '.join(VERSIONS)}")
    if given.write and (given.trace or given.options):
        parser.error("what is traced, or mounted with other options, is not kept")
    how = {name: getattr(given, name) for name in ("count", "deep", "options", "trace")} | {"rtt": given.rtt / 1000}
    about = {"count": given.count, "deep": given.deep, "rtt_ms": given.rtt}
    broke = False
    for version in versions:
        before = kept_figures().get("before", {}).get(version, {}).get("figures", {})
        measured: dict[str, Row] = {}
        try:
            for row in counted(version, cases, **how):
                measured[row["case"]] = kept = figures_of(row)
                print(f"{version:4} {in_words(kept, measured, before)}", *causes_of(row), sep="\n", flush=True)
                broke = broke or "broke" in row
        except NotRun as reason:
            print(f"NOT RUN: {reason}")
            return 2
        if given.write:
            keep(version, list(measured.values()), about, before=given.before)
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
