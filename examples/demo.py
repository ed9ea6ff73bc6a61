"""The main job of dropq on real input, told as one would tell it: files in, work out, errors inspected and requeued.

Orders are dropped by a shell script, checked and added up by a Spark stream, and booked by a worker; a week's sales are
added up by a Spark job and booked likewise. Selectors send some orders on by region, and a dead letter is brought back.
The last day's sales are published on a topic with two subscriptions. A log that Spark sends as one message of many rows
is settled row by row. Filters make entries of that log, over four queues: three handlers in Python, and three commands
beside them. What a shop sends in a root of its own comes to a consumer here. Clients of PZQ send and receive over
ZeroMQ. What failed is on a page for a browser, too.

    python examples/demo.py [--keep DIR]

Works on a copy of sample_root/. It ends with an accounting of every file by find and sha256sum, and exits with 1 when
one is missing, altered or unheard of. --keep makes the copy in DIR, which stays; without it nothing does.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.request import urlopen

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
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "DROPQ_ROOT": str(folder / "root"),
            "LC_ALL": "C.UTF-8",
            "JDK_JAVA_OPTIONS": os.environ.get("JDK_JAVA_OPTIONS", QUICK_START),
        }

    def run(self, command: str, *, shown: Sequence[str] = (), quiet: bool = False) -> str:
        """Run a shell command; show it, or the commands of `shown`, and unless quiet what it printed; return that."""
        for each in shown or [command]:
            print("  $ " + each.replace("\n", "\n  > "), flush=True)
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if not quiet or done.returncode:
            print(textwrap.indent(done.stdout, "    "), end="", flush=True)
        if done.returncode:
            raise SystemExit(f"demo: `{command}` ended with {done.returncode}")
        return done.stdout

    def play(self) -> int:
        """Run the demo; return its exit status."""
        self.begin()
        self.drop()
        with self.stream() as catch_up:
            self.add_up()
            catch_up()
            self.work()
            self.look()
            self.mend()
            catch_up()
            self.work_again()
        self.ship()
        self.tell()
        self.log()
        self.filter()
        self.join()
        self.serve()
        return self.account()

    def begin(self) -> None:
        """Copy the sample root, and enter its files in the ledger."""
        say("A root is a directory, a queue is a directory, a message is a file. Our ledger begins with those here:")
        shutil.copytree(TOP / "sample_root", self.folder / "root", ignore=shutil.ignore_patterns("README.md", ".keep"))
        for name in ("examples", "examples/shell", "examples/data"):  # short names for the commands below
            (self.folder / Path(name).name).symlink_to(TOP / name)
        shutil.copy(HERE / "data/articles.csv", self.folder)
        self.run("dropq create daily-sales && dropq create postings", quiet=True)
        self.ls("invoices", "orders")
        self.run("find root -type f ! -path '*/.*' ! -name '*.toml' -exec sha256sum {} + > ledger")

    def drop(self) -> None:
        """Drop orders from a shell, and upload one."""
        say("A host without Python sends 23 orders: a shell script, which writes them aside and moves each in by mv.")
        orders = "data/orders/order-11[01]* data/orders/order-112[0-3]*"
        names = self.run(f"sha256sum data/orders/* >> ledger && shell/drop.sh root orders {orders}", quiet=True)
        print(f"    {names.splitlines()[0]}\n    ... {len(names.splitlines())} in all")
        say("Another program uploads one straight into target/, in two halves. Nobody takes it before it is whole:")
        last = "data/orders/order-1124.json"
        self.run(f"(head -c 99 {last}; sleep 1; tail -c +100 {last}) > root/orders/target/upload.json")
        self.run("dropq browse orders --explain | grep upload.json | cut -f 1-3")

    @contextmanager
    def stream(self) -> Iterator[Callable[[], None]]:
        """Run a Spark stream beside the block; give what waits until the stream has dealt with all orders."""
        say(
            "A Spark stream takes the orders: it checks them, looks up their articles, and posts what each order comes "
            "to in each group of articles. What is bad it moves to error/. It goes on while the demo does."
        )
        job = "python examples/enrich_orders.py root checkpoint --articles articles.csv --continuous '1 second'"
        print(f"  $ {job} > stream.log 2>&1 &", flush=True)
        with (self.folder / "stream.log").open("w") as log:
            stream = subprocess.Popen(
                ["sh", "-c", f"exec {job}"], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

        def catch_up() -> None:
            start = time.monotonic()
            while self.has_orders():
                if stream.poll() is not None or time.monotonic() > start + PATIENCE:
                    self.run("tail -n 30 stream.log")
                    raise SystemExit("demo: the stream of orders does not go on")
                time.sleep(0.1)

        try:
            yield catch_up
        finally:
            status = end(stream)
        if status != -signal.SIGTERM:
            self.run("tail -n 30 stream.log")
            raise SystemExit(f"demo: the stream of orders ended with {status}, not when it was told to")

    def has_orders(self) -> bool:
        """Tell whether orders wait, or are held: by a look into two folders."""
        folders = (self.folder / "root/orders" / state for state in ("target", "processing"))
        return any(not name.startswith(".") for folder in folders for name in os.listdir(folder))

    def add_up(self) -> None:
        """Let a Spark job write a queue."""
        say("Meanwhile a Spark job adds up a week's sales by store and day, and sends its partitions: all, or none.")
        job = "python examples/daily_sales.py root daily-sales data/sales.csv week-23 > job.log 2>&1"
        self.run(f"{job} || {{ tail -n 30 job.log; false; }}", shown=[job])

    def work(self) -> None:
        """Let two workers book what both have sent."""
        say(
            "Each partition is a message of CSV. Two workers take the two queues, side by side, and book every message."
        )
        self.run("sha256sum root/postings/target/* root/daily-sales/target/* >> ledger")
        postings = f"{WORK_POSTINGS} &"
        sales = "dropq work daily-sales --until-empty -- shell/book.sh daily-sales.csv"
        self.run(f"{postings} {sales}; first=$?; wait $! && exit $first", shown=[postings, sales])
        self.run("tail -n 2 postings.csv")

    def look(self) -> None:
        """Look at what failed."""
        say("What was bad lies in error/, with its reason. It is not lost, and not in the way of the others:")
        self.run("dropq browse orders --state error | cut -f 1,7")
        self.page()

    def page(self) -> None:
        """Open the page, as a browser would."""
        say("`dropq web` shows it in a browser, too, with the reason of each, and prints the link to open. It begins:")
        command = "dropq web --listen 127.0.0.1:0"
        print(f"  $ {command} &", flush=True)
        with subprocess.Popen(command.split(), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE) as web:
            assert web.stdout is not None
            link, shown, start = web.stdout.readline().decode().strip(), "under way", time.monotonic()
            while "under way" in shown and time.monotonic() < start + PATIENCE:  # so are the first looks
                shown = urlopen(link, timeout=PATIENCE).read().decode()
                time.sleep(0.1)
            print("".join(f"    {heading}\n" for heading in re.findall("<h1>(.*)</h1>", shown)), end="", flush=True)
            status = end(web)
        if status:
            raise SystemExit(f"demo: the page ended with {status}")

    def mend(self) -> None:
        """Mend what failed."""
        say("The lamp is a new article, and is entered. The book-keeping is back, too. What failed by them goes again:")
        lamp = "cp articles.csv articles.new && echo 'LT-300,Floor lamp,lighting' >> articles.new"
        self.run(f"{lamp} && mv articles.new articles.csv")
        chosen = "dropq browse orders --state error | grep -e 'no article' -e refused | cut -f 1"
        self.run(f"{chosen} | dropq requeue orders - -q")
        say("Two files broke off on their way. The sender drops one again, whole; the broken ones stay to be seen.")
        self.run("sha256sum data/resent/* >> ledger && shell/drop.sh root orders data/resent/*")

    def work_again(self) -> None:
        """Book what the stream has made of it."""
        self.run(f"sha256sum root/postings/target/* >> ledger && {WORK_POSTINGS}")
        self.ls("orders")
        say("The log of the queue has what was done to its messages, and by whom:")
        self.run("dropq log orders | cut -f 2,3,6 | tail -n 4")

    def ship(self) -> None:
        """Send orders on by region, and bring back the dead letter among them."""
        say(
            "Selectors take orders to a queue for each region, two at a time. An order without a selector is a dead "
            "letter."
        )
        self.run(MAKE_SHIPPING)
        self.run(DROP_SHIPPING)
        self.run("sha256sum root/shipping/target/* >> ledger && dropq route shipping --once")
        self.run("dropq browse shipping --explain | cut -f 1,6")
        self.run(SHIP)
        self.run("dropq browse lost | cut -f 1,7,8")
        say(
            "A selector for uk is added, and the dead letter goes back to the queue that it came from. The next pass "
            "moves it, and the third order to eu, too: the acks of the first two have paid the credits back."
        )
        self.run("dropq selector add shipping uk --to eu --filter \"region = 'uk'\"", quiet=True)
        self.run("dropq requeue lost --to-origin --all --yes")
        self.run(f"dropq route shipping --once && {SHIP}")

    def tell(self) -> None:
        """Publish a day's sales on a topic, to two subscriptions."""
        say("A topic gives each subscription a copy: the office gets a day's sales, the store in Ulm its own alone.")
        self.run("dropq topic create sales && dropq topic subscribe sales day --client-id office", quiet=True)
        self.run("dropq topic subscribe sales day --client-id ulm --filter \"store = 'Ulm'\"", quiet=True)
        self.run(
            f"""grep ,{DAY}, daily-sales.csv | tr -d '"' | while IFS=, read -r store rest; do
    printf '%s\\n' "$(head -n 1 daily-sales.csv)" "$store,$rest" | dropq topic publish sales -p "store=$store" -q
done""",
            quiet=True,
        )
        self.run("(cd root/topic-root/sales; sha256sum .incoming/processed/* .subscriptions/*/target/*) >> ledger")
        command = "dropq work sales/day.$client --until-empty -- shell/book.sh $client.csv"
        self.run(f"for client in office ulm; do {command} || exit; done")

    def log(self) -> None:
        """Let Spark send the rows of a day's log as records, and settle them one by one."""
        say(
            "Spark sends the log of the till: one message of many rows, and one of them is bad. It alone goes to "
            "error/, with its reason. It is mended there, and comes again."
        )
        self.run(f"dropq create till && sed -n '/^{DAY}/p' data/sales.csv | sed '9s/,/;/' > till.log", quiet=True)
        self.run(f"{{ {SEND_TILL}\n}} > job.log 2>&1 || {{ tail -n 30 job.log; false; }}", shown=[SEND_TILL])
        # It exits with 1, as a record has failed.
        self.run(f"sha256sum root/till/target/* >> ledger && ! {WORK_TILL}", shown=[WORK_TILL])
        mend = "sed -i 's/;/,/' root/till/error/*"
        again = f"dropq requeue till --all --yes && {WORK_TILL}"
        self.run(f"{mend} && sha256sum root/till/error/* >> ledger && {again}", shown=[mend, again], quiet=True)
        self.run("wc -l < till.csv")

    def filter(self) -> None:
        """Make entries of the log by filters over four queues, in Python and by commands."""
        say(
            "Filters over four queues make entries of a store's rows of the till. Each sends what it makes by its ack. "
            "Three handlers in Python do it first, then three commands; both must make the same."
        )
        self.run(f"sha256sum till.csv till.csv >> ledger && {FILTER}", shown=[FILTER])
        for command, to in FILTERS:
            self.run(f"{command} && sha256sum root/{to}/target/* | tee -a ledger >> ledger", shown=[command])
        self.run("cat root/entries/target/* | tail -n 2")

    def join(self) -> None:
        """Take what was sent in another root."""
        say(
            "A shop has a root of its own, and both name each other. What it sends waits there, until a consumer here "
            "wants it: then a bridge brings it."
        )
        self.run(f"dropq --root shop init shop && {JOIN}", shown=[JOIN], quiet=True)
        send = "for n in 1 2 3; do echo parcel $n | dropq --root shop send parcels -q; done"
        self.run(f"{send} && sha256sum shop/parcels/target/* >> ledger", shown=[send])
        take = "for n in 1 2 3; do dropq receive parcels --wait 1m --lease 1m | cut -f 2 | dropq ack parcels -; done"
        bridge = "dropq bridge > bridge.log 2>&1 &"
        self.run(f"{bridge}\n{take}; s=$?; kill $!; wait $!; exit $s", shown=[bridge, take], quiet=True)
        self.run("dropq --root shop ls && dropq ls parcels")

    def serve(self) -> None:
        """Let programs that know ZeroMQ alone send a message, and receive it."""
        say("Programs that speak PZQ's protocol over ZeroMQ, and know of no folder, send a message and receive it.")
        client = "PZQ=ipc://sockets/ python examples/zeromq_clients.py"
        send, entered, receive = f"{client} produce 'order 1106'", "sha256sum root/pzq/target/* >> ledger", "consume 1"
        serve = f"{SERVE} > serve.log 2>&1 &"
        steps = f"{serve}\n{send} && {entered} && {client} {receive}; s=$?; kill $!; wait $!; exit $s"
        self.run("mkdir -m 700 sockets && dropq create pzq", quiet=True)
        self.run(f"{{ {steps}\n}} || {{ tail -n 30 serve.log; false; }}", shown=[serve, send, f"{client} {receive}"])

    def account(self) -> int:
        """Account for every file, and for the money."""
        say("The books are closed without dropq: every file ever entered, by its content, wherever it lies now.")
        command = "shell/account.sh root ledger"
        print(f"  $ {command}", flush=True)
        files = subprocess.run(["sh", "-c", command], cwd=self.folder, env=self.environment, check=False).returncode
        sold, ordered = sales(HERE / "data/sales.csv"), orders(dropped())
        booked, posted = (
            book(self.folder / "daily-sales.csv", "store", "day"),
            book(self.folder / "postings.csv", "order"),
        )
        print(f"    {sum(sold.values())} sold in sales.csv, {sum(booked.values())} in daily-sales.csv")
        print(f"    {sum(ordered.values())} ordered in {len(ordered)} orders, ", end="")
        print(f"{sum(posted.values())} for {len(posted)} orders in postings.csv")
        of_the_day = {key: amount for key, amount in sold.items() if key[1] == DAY}
        of_ulm = {key: amount for key, amount in of_the_day.items() if key[0] == "Ulm"}
        books = [book(self.folder / f"{client}.csv", "store", "day") for client in ("office", "ulm")]
        rows = sorted(row for row in (HERE / "data/sales.csv").read_text().splitlines() if row.startswith(DAY))
        logged = sorted((self.folder / "till.csv").read_text().splitlines())
        print(f"    {sum(of_the_day.values())} sold on {DAY}, {sum(books[0].values())} in office.csv, ", end="")
        print(f"{sum(books[1].values())} of Ulm in ulm.csv")
        of_kassel = sum(amount for key, amount in of_the_day.items() if key[0] == "Kassel")
        made = [entered(self.folder / "root" / name / "target") for name in ("entries-py", "entries")]
        print(f"    {of_kassel} of Kassel, {made[0]} entered by handlers, {made[1]} by commands")
        unlike = sold != booked or ordered != posted or books != [of_the_day, of_ulm] or logged != rows
        unlike = unlike or made != [of_kassel, of_kassel]
        print("\nNOT ALL IS ACCOUNTED FOR." if files or unlike else "\nEvery file is accounted for.")
        return 1 if files or unlike else 0

    def ls(self, *queues: str) -> None:
        """Show queues as a table with headings."""
        command = ["dropq", "ls", *queues]
        print("  $ " + " ".join(command))
        listed = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        heads = ("queue", "target", "delayed", "processing", "error", "expired", "processed", "working")
        for row in (heads, *(line.split("\t") for line in listed.stdout.splitlines())):
            first, *others = row[: len(heads)]
            print(f"    {first:12}" + "".join(f"{cell:>11}" for cell in others))


#: Java's quick compiler alone: the thorough one does not pay for itself in a job of seconds.
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: The day whose sales are published.
DAY = "2025-06-07"
#: The command that books what the stream has posted.
WORK_POSTINGS = "dropq work postings --until-empty -- shell/book.sh postings.csv"
#: Sends the rows of the till's log, in one message.
SEND_TILL = """python <<END
import dropq.spark
spark = dropq.spark.session("local[2]", app="till")
dropq.spark.register(spark)
writer = spark.read.text("till.log").write.format("dropq").mode("append").option("root", "root")
writer.option("queue", "till").option("recordsPerMessage", 1000).save()
END"""
#: The command that enters the rows of the till's log.
WORK_TILL = "dropq work till --until-empty --records -- shell/rows.sh 5 till.csv"
#: Makes the queues of the filters, and filters in Python.
FILTER = """python <<END
import dropq
root = dropq.Root("root")
names = ("log", "rows", "amounts", "entries")
for name in names: root.create_queue(name)
log, rows, amounts, entries = (root.create_queue(f"{name}-py") for name in names)
for queue in (root.queue("log"), log): queue.send_file("till.csv")

def split(message):
    return [dropq.Out(rows, row) for row in message.text.splitlines() if ",Kassel," in row]

def multiply(message):
    sold_at, store, sku, quantity, price = message.text.split(",")
    return dropq.Out(amounts, f"{sku} {int(quantity) * float(price):.2f}\\n")

def enter(message):
    return dropq.Out(entries, f"debit {message.text}")

for queue, handler in ((log, split), (rows, multiply), (amounts, enter)):
    dropq.work(queue, handler, until_empty=True)
END"""
#: The same filters as commands, and where each sends.
FILTERS = (
    ("dropq work log --to rows --lines --until-empty -- grep ,Kassel,", "rows"),
    (r"""dropq work rows --to amounts --until-empty -- awk -F , '{ printf "%s %.2f\n", $3, $4 * $5 }'""", "amounts"),
    ("dropq work amounts --to entries --until-empty -- sed 's/^/debit /'", "entries"),
)
#: Makes the queues of what is shipped, and the selectors that fill them.
MAKE_SHIPPING = """python <<END
import dropq
root = dropq.Root("root")
for name in ("eu", "us", "lost"): root.create_queue(name)
shipping = root.create_queue("shipping", dead_letter_queue="lost", unroutable_after="0s")
for name in ("eu", "us"): shipping.add_selector(name, to=name, filter=f"region = '{name}'", credit=2)
END"""
#: Drops five orders, with their regions in the names of the files.
DROP_SHIPPING = """(cd root/shipping; n=1100; for region in eu eu eu us uk; do n=$((n + 1))
    echo "order $n to $region" > working/$n; mv working/$n "target/4.order-$n.B.....regionS=$region"
done)"""
#: Ships what waits for both regions.
SHIP = "dropq work eu us --until-empty -- cat"
#: Lets two roots name each other, and share a queue.
JOIN = r"""printf 'instance = "shop"\n[[peer]]\nname = "hall"\nroot = "%s/root"\n' "$PWD" >> shop/dropq.toml
printf 'instance = "hall"\n%s\n[[peer]]\nname = "shop"\nroot = "%s/shop"\n' "$(cat root/dropq.toml)" "$PWD" > dropq.toml
mv dropq.toml root && for root in root shop; do dropq --root $root create parcels --set replication_type=Queue; done"""
#: Serves a queue over ZeroMQ.
SERVE = "dropq serve pzq --zmq --receive ipc://sockets/1 --send ipc://sockets/2 --monitor ipc://sockets/3"
#: Seconds in which the stream deals with a few orders, its start included.
PATIENCE = 120
#: Seconds in which it ends when it is told to.
ENDING = 20

Amounts = dict[tuple[str, ...], Decimal]


def end(process: subprocess.Popen[bytes]) -> int:
    """Tell a process to end, and kill it if it does not; return its exit status."""
    process.terminate()
    try:
        return process.wait(timeout=ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def say(text: str) -> None:
    """Tell what comes next."""
    print("\n" + textwrap.fill(text, 112), flush=True)


def add(lines: Iterable[tuple[tuple[str, ...], Decimal]]) -> Amounts:
    """Add amounts up by what they are for."""
    amounts: Amounts = {}
    for key, amount in lines:
        amounts[key] = amounts.get(key, Decimal(0)) + amount
    return amounts


def book(path: Path, *columns: str) -> Amounts:
    """Add a book up by some of its columns."""
    with path.open() as file:
        return add((tuple(row[column] for column in columns), Decimal(row["amount"])) for row in csv.DictReader(file))


def sales(path: Path) -> Amounts:
    """Add up what was sold, by store and day."""
    with path.open() as file:
        return add(((row["store"], row["sold_at"][:10]), worth(row)) for row in csv.DictReader(file))


def orders(paths: Iterable[Path]) -> Amounts:
    """Add up what was ordered, by order; a file that broke off orders nothing."""
    return add(((str(item["order"]),), worth(item)) for path in paths for item in items(path.read_text()))


def entered(folder: Path) -> Decimal:
    """Add up what the entries in a folder come to."""
    return sum((Decimal(path.read_text().split()[-1]) for path in folder.iterdir()), Decimal(0))


def items(text: str) -> Iterator[dict[str, Any]]:
    """Yield the items of an order that was dropped as JSON, or of several in a CSV."""
    if not text.startswith("{"):
        yield from csv.DictReader(text.splitlines())
        return
    with suppress(json.JSONDecodeError):
        order = json.loads(text)
        yield from ({**item, "order": order["order"]} for item in order["items"])


def worth(item: dict[str, Any]) -> Decimal:
    """Return what an item comes to."""
    return int(item["quantity"]) * Decimal(item["price"])


def dropped() -> Iterator[Path]:
    """Yield every file that was an order to be dealt with: the dropped ones, and those of the sample root."""
    for folder in (HERE / "data/orders", HERE / "data/resent"):
        yield from folder.iterdir()
    for state in ("target", "processing", "error"):
        yield from (path for path in (TOP / "sample_root/orders" / state).iterdir() if path.name != ".keep")


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
    with tempfile.TemporaryDirectory(prefix="dropq-demo-", ignore_cleanup_errors=True) as made:
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
