"""A bare Debian in which an ordinary user, without Java, runs both commands of the README.

Run by itself, it takes further releases and commands, and the ways in which people, cron and service managers start a
program:

    make fresh ARGS="--suites trixie,sid --ways nohup,bare --verbs demo,test,crashes" >fresh.log 2>&1 &
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torture import debian
from torture.table import NotRun, Options, Row

#: The oldest and the newest release whose Python will do.
SUITES = ("bookworm", "trixie")
VERBS = ("demo", "test")
#: What else `make` runs of the tests.
MORE_VERBS = ("crashes", "papers", "test-spark")
#: The folder that gets what the commands printed that failed.
PRINTED = "build/fresh"
#: The ways to start a command, which stands for `{}`.
WAYS = {
    "plainly": "{}",
    # As a shell starts it in the background: without Ctrl-C, and what it prints in a file.
    "nohup": "(trap '' INT; nohup {} >~/nohup.out 2>&1); code=$?; cat ~/nohup.out; (exit $code)",
    "bare": "env -i {}",
    "homeless": "env -u HOME {}",
    "busy": "for core in $(seq $(nproc)); do (while :; do :; done) & done; {}",
}


def run(options: Options) -> Iterable[Row]:
    """Run `make demo`, and where there is time `make test`, in each release; a case is a demo or a test that passed."""
    for suite in SUITES:
        yield from _release(suite, options.folder / suite, VERBS if options.long else VERBS[:1], ["plainly"])


def _release(suite: str, release: Path, verbs: Sequence[str], ways: Sequence[str]) -> Iterator[Row]:
    """Run commands one after the other in each way, in one copy, as the README tells people to."""
    try:
        debian.set_up(suite, release)
    except NotRun as reason:
        yield Row(f"make: Debian {suite}", not_run=str(reason))
        return
    if set(ways) & {"bare"}:
        _make(release, "make setup")  # later, nothing names the host's proxies
    for way in ways:
        for verb in verbs:
            begun = time.monotonic()
            done = _make(release, WAYS[way].format(f"make {verb}"))
            lines = done.stdout.rstrip().splitlines() or [""]
            title = f"make {verb}" if way == "plainly" else f"make {verb}, {way}"
            print(f"  {suite}, {title}: {lines[-1]} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
            passed = re.search(r"(\d+) passed", lines[-1])
            row = Row(f"{title}: Debian {suite}", cases=int(passed[1]) if passed else 1)
            if done.returncode or (verb != "demo" and not passed):
                row.wrong += [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-20:]
                whole = Path(PRINTED, f"{suite}-{way}-{verb}.log")
                whole.parent.mkdir(parents=True, exist_ok=True)
                whole.write_text(done.stdout)
                row.wrong.append(f"{whole} has all that it printed")
            yield row
    shutil.rmtree(release)


def _make(release: Path, commands: str) -> subprocess.CompletedProcess[str]:
    return debian.run(release, commands, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fresh ARGS=", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suites", default=",".join(SUITES), help="releases of Debian, such as sid")
    parser.add_argument("--ways", default="plainly", help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--verbs", default=",".join(VERBS), help=f"some of {', '.join(VERBS + MORE_VERBS)}")
    asked = parser.parse_args()
    ways, suites, verbs = asked.ways.split(","), asked.suites.split(","), asked.verbs.split(",")
    if unknown := (set(ways) - set(WAYS)) | (set(verbs) - set(VERBS + MORE_VERBS)):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        rows = [row for suite in suites for row in _release(suite, Path(folder, suite), verbs, ways)]
    for row in rows:
        verdict = f"NOT RUN: {row.not_run}" if row.not_run else "red" if row.wrong else "green"
        print(f"{row.test}: {verdict}", *(f"  {line}" for line in row.wrong), sep="\n")
    broken, missing = any(row.wrong for row in rows), any(row.not_run for row in rows)
    return 1 if broken else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
