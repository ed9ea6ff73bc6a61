"""The main job of dropq on real input, told as one would tell it: files in, work out, errors inspected and requeued.

    python examples/demo.py [--keep DIR]

Works on a copy of sample_root/. It ends with an accounting of every file by find and sha256sum, and exits with 1 when
one is missing, altered or unheard of. --keep makes the copy in DIR, which stays; without it nothing does.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent


class Demo:
    """The demo in one folder.

    Args:
        folder: where the root and all that the demo writes lies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DROPQ_ROOT": str(folder / "root"),
            "LC_ALL": "C.UTF-8",
        }

    def run(self, command: str, *, shown: str | None = None, ok: tuple[int, ...] = (0,), quiet: bool = False) -> str:
        """Show a shell command and run it; return what it printed, which is shown too unless it is to be quiet."""
        for line in (shown or command).splitlines():
            print(f"  $ {line}", flush=True)
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if not quiet or done.returncode not in ok:
            print(textwrap.indent(done.stdout, "    "), end="", flush=True)
        if done.returncode not in ok:
            raise SystemExit(f"demo: `{command}` ended with {done.returncode}, not {' or '.join(map(str, ok))}")
        return done.stdout

    def play(self) -> int:
        """Run the demo; return its exit status."""
        self.begin()
        self.drop()
        self.spark()
        self.work()
        self.look()
        self.mend()
        return self.account()

    def begin(self) -> None:
        """Copy the sample root, and enter its files in the ledger."""
        say("A root is a directory, a queue is a directory, a message is a file. Our ledger begins with those here:")
        shutil.copytree(TOP / "sample_root", self.folder / "root", ignore=shutil.ignore_patterns("README.md", ".keep"))
        for name in ("examples", "examples/shell", "examples/data"):  # short names for the commands below
            (self.folder / Path(name).name).symlink_to(TOP / name)
        self.run("dropq create daily-sales", quiet=True)
        self.ls()
        self.run("find root -type f ! -path '*/.*' ! -name '*.toml' -exec sha256sum {} + > ledger")

    def drop(self) -> None:
        """Drop orders from a shell."""
        say("A host without Python sends 24 orders: a shell script, which writes them aside and moves each in by mv.")
        self.run("sha256sum data/orders/* >> ledger")
        names = self.run("shell/drop.sh root orders data/orders/*", quiet=True).splitlines()
        print(f"    {names[0]}\n    ... {len(names)} in all")

    def spark(self) -> None:
        """Let a Spark job write a queue."""
        say("A Spark job adds up a week's sales by store and day, and sends its partitions: all of them, or none.")
        job = 'python examples/daily_sales.py "$DROPQ_ROOT" daily-sales data/sales.csv week-23 > spark.log 2>&1'
        self.run(f"{job} || {{ tail -n 30 spark.log; false; }}", shown=job)
        self.run("dropq browse daily-sales")
        self.run("sha256sum root/daily-sales/target/* >> ledger")

    def work(self) -> None:
        """Let two workers take both queues."""
        say("Two workers take the two queues, side by side. Each runs a command for every message.")
        orders = "dropq work orders -j 2 --until-empty -- python examples/handle_order.py book.csv"
        sales = "dropq work daily-sales --until-empty -- shell/book_sales.sh daily-sales.csv"
        start = time.monotonic()
        self.run(f"{orders} & {sales}; first=$?; wait $!; exit $(($? + first))", shown=f"{orders} &\n{sales}", ok=(1,))
        print(f"    (that took {time.monotonic() - start:.1f} s)")

    def look(self) -> None:
        """Look at what failed."""
        say("What failed lies in error/, with its reason. Nothing is lost, nothing is in the way of the others:")
        self.ls()
        self.run("dropq browse orders --state error | cut -f 1,7")

    def mend(self) -> None:
        """Mend what failed."""
        say(
            "A negative quantity is a return, so the handler learns that. The book-keeping is back, too. Both go again:"
        )
        chosen = "dropq browse orders --state error | grep -e quantity -e refused | cut -f 1"
        self.run(f"{chosen} | dropq requeue orders -")
        say("Two files broke off on their way. The sender drops one again, whole; the broken ones stay to be seen.")
        self.run("sha256sum data/resent/* >> ledger")
        self.run("shell/drop.sh root orders data/resent/*")
        self.run("dropq work orders --until-empty -- python examples/handle_order.py --returns book.csv")
        self.ls()

    def account(self) -> int:
        """Account for every file, and for the money."""
        say("The books are closed without dropq: every file ever entered, by its content, wherever it lies now.")
        command = "shell/account.sh root ledger"
        print(f"  $ {command}", flush=True)
        files = subprocess.run(["sh", "-c", command], cwd=self.folder, env=self.environment, check=False).returncode
        sold = total(HERE / "data/sales.csv", "quantity", "price")
        booked = total(self.folder / "daily-sales.csv")
        print(f"    {sold} sold in sales.csv, {booked} in daily-sales.csv")
        orders = len((self.folder / "book.csv").read_text().splitlines())
        print(f"    {orders} orders in book.csv")
        unlike = sold != booked or orders != ORDERS
        print("\nNOT ALL IS ACCOUNTED FOR." if files or unlike else "\nEvery file is accounted for.")
        return 1 if files or unlike else 0

    def ls(self) -> None:
        """Show the queues as a table with headings."""
        print("  $ dropq ls")
        listed = subprocess.run(["dropq", "ls"], env=self.environment, capture_output=True, text=True, check=True)
        heads = ("queue", "target", "delayed", "processing", "error", "expired", "processed", "working")
        for row in (heads, *(line.split("\t") for line in listed.stdout.splitlines())):
            first, *others = row[: len(heads)]
            print(f"    {first:12}" + "".join(f"{cell:>11}" for cell in others))


#: What was ordered: 24 files, one of which was sent twice, and the sample root's seven.
ORDERS = 32


def say(text: str) -> None:
    """Tell what comes next."""
    print("\n" + textwrap.fill(text, 112), flush=True)


def total(path: Path, *columns: str) -> Decimal:
    """Add up a CSV: the product of some columns, or the last one where there is no heading."""
    with path.open() as file:
        if not columns:
            return sum((Decimal(row[-1]) for row in csv.reader(file)), Decimal(0))
        return sum((Decimal(row[columns[0]]) * Decimal(row[columns[1]]) for row in csv.DictReader(file)), Decimal(0))


@contextmanager
def workshop(keep: str | None) -> Iterator[Path]:
    """Give a folder to work in, which is removed at the end unless it is to be kept."""
    if keep is not None:
        folder = Path(keep).resolve()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise SystemExit(f"demo: {folder} is there already: --keep takes a new folder") from None
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dropq-demo-") as made:
        yield Path(made)


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", metavar="DIR", help="a new folder to work in, which stays")
    options = parser.parse_args()
    with workshop(options.keep) as folder:
        status = Demo(folder).play()
        print(
            f"All of it is in {folder}."
            if options.keep
            else "(To look around afterwards: .venv/bin/python examples/demo.py --keep DIR)"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
