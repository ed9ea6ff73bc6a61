"""Hold dropq against crashes, faults, strangers and real mounts, and end in one table: `make torture`.

Exit codes: 0 every promise was kept; 1 one was broken; 2 none was broken, but a part was NOT RUN.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from torture.table import PROJECT, NotRun, Options, Row, lines_of, marked, merged, summed, table_of

#: The parts in the order of the table: each is a module with a function `run(options)` that returns rows.
PARTS = (
    "crashes",
    "faults",
    "disks",
    "syscalls",
    "storm",
    "topics",
    "graph",
    "carrier",
    "roots",
    "records",
    "outputs",
    "log",
    "units",
    "policies",
    "spark",
    "zeromq",
    "powercut",
    "nfs",
    "fuse",
    "hdfs",
    "strangers",
    "clocks",
    "model",
    "tests",
    "fresh",
)
PAPER = PROJECT / "docs" / "reliability.md"
BEGIN, END = "<!-- torture: begin -->", "<!-- torture: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make torture ARGS=", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=1, help="of all that is left to chance")
    parser.add_argument("--short", action="store_true", help="as short as in make crashes")
    parser.add_argument("--folder", type=Path, help="where to work: a folder on a disk, not on tmpfs")
    parser.add_argument("--write", action="store_true", help="keep the rows in docs/reliability.md")
    parser.add_argument(
        "--mark", action="store_true", help="run nothing: mark the rows there that are older than dropq"
    )
    asked = parser.parse_args()
    if asked.mark:
        _keep([])
        return 0
    parts = asked.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    commit = _commit()
    logging.disable()  # what goes wrong on purpose is no news
    with tempfile.TemporaryDirectory(prefix="torture-", dir=asked.folder) as folder:
        of_part = {part: _rows(part, Options(Path(folder), asked.seed, not asked.short)) for part in parts}
    rows = [row for part in parts for row in of_part[part]]
    for part in parts:
        for row in of_part[part]:
            for line in row.wrong:
                print(f"WRONG  {part}, {row.test}: {line}")
    print(table_of(lines := [line for part in parts for line in lines_of(part, summed(of_part[part]), commit)]))
    if asked.write:
        _keep(lines)
    broken = [row.test for row in rows if not row.good and not row.not_run]
    missing = [row.test for row in rows if row.not_run]
    verdict = "a promise was broken" if broken else "every promise was kept where it was tried"
    print(f"{verdict}: {len(rows)} rows, {len(broken)} with a broken promise, {len(missing)} NOT RUN")
    return 1 if broken else 2 if missing else 0


def _rows(part: str, options: Options) -> list[Row]:
    """Run a part, and say each row as it comes; one that this machine cannot run has a row that says why."""
    begun = time.monotonic()
    print(f"{part} ...", file=sys.stderr, flush=True)
    folder = options.folder / part
    folder.mkdir()
    run: Callable[[Options], Iterable[Row]] = import_module(f"torture.{part}").run
    rows: list[Row] = []
    try:
        for row in run(Options(folder, options.seed, options.long)):
            rows.append(row)
            print(*lines_of(part, [row], ""), sep="\n", file=sys.stderr, flush=True)
    except NotRun as reason:
        rows.append(Row(part, not_run=str(reason)))
    except Exception as error:  # the other parts are as good as before
        traceback.print_exc()
        rows.append(Row(part, wrong=[f"ended by {error!r}"]))
    wrong = [f"  {row.test}: {line}" for row in rows for line in row.wrong]
    took = f"{part}: {time.monotonic() - begun:.0f} s"
    print(*wrong, took, sep="\n", file=sys.stderr, flush=True)
    return rows


def _commit() -> str:
    """Return what was held against all this, as git calls it; what its papers say does not matter."""
    git = ["git", "-C", str(PROJECT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!docs"], check=False)
    return (head.stdout.strip() or "unknown") + ("-changed" if changed.returncode else "")


def _keep(lines: list[str]) -> None:
    """Put lines into the paper's table, in place of those that it has of the same parts, and mark what is older."""
    before, _, rest = PAPER.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    PAPER.write_text(f"{before}{BEGIN}\n{table_of(marked(merged(table, lines, PARTS)))}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
